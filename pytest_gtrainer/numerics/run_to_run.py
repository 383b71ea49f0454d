"""Is it deterministic? Run it again under pressure, and say which pressure broke it.

A *pressure* changes something on which a result must not depend: the number of threads, where memory lies, the process,
what Inductor has cached, what else the machine is doing, how kernels of a GPU overlap. Each is applied by itself, to a
run that starts from the same random states as the first. A pressure that cannot be applied here (streams without a GPU)
is *not judged*: counted and named, never passed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.assertions import BitwiseDifference
from pytest_gtrainer.numerics.compare import Verdict, compare
from pytest_gtrainer.numerics.entries import Tensors, entries
from pytest_gtrainer.numerics.record import Key
from pytest_gtrainer.numerics.seeds import random_states_kept

Kept = dict[str, torch.Tensor]
Function = Callable[[], Tensors]
PROCESS_LIMIT = 300.0


class NotJudged(Exception):
    """A pressure that cannot be applied here; the message says why."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Something on which a result must not depend.

    Attributes:
        name: for reports.
        run: calls the function under pressure; its result, kept.
    """

    name: str
    run: Callable[[Function], Kept]


@dataclass(slots=True)
class RunToRun:
    """What was tried; ``str()`` gives a line each.

    Attributes:
        equal: the runs and pressures under which the result was the same, bit for bit.
        not_judged: pressures that could not be applied, with the reason.
    """

    equal: list[str] = field(default_factory=list)
    not_judged: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"equal        {', '.join(self.equal) or 'nothing'}"]
        return "\n".join([*lines, *(f"not judged   {name}: {why}" for name, why in self.not_judged.items())])


def kept(value: Tensors) -> Kept:
    """Copies of all tensors, by name."""
    return {_name(key): tensor.detach().clone() for key, tensor in entries(value).items()}


def _name(key: Key) -> str:
    return key.name if not key.phase else f"step {key.step}, rank {key.rank}, {key.phase} of {key.name}"


def _once(function: Function) -> Kept:
    with random_states_kept():
        return kept(function())


def _inside(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[[Function], Kept]:
    def run(function: Function) -> Kept:
        with context():
            return _once(function)

    return run


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == count:
        raise NotJudged(f"the first run had {count} already")
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _other_addresses() -> Iterator[None]:
    """Blocks of many sizes are taken before the run, every second one is given back: new ones come to lie elsewhere."""
    sizes = [64 * 3**power for power in range(12) for _ in range(4)]
    blocks: list[torch.Tensor | None] = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        blocks += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for index in range(0, len(blocks), 2):
        blocks[index] = None
    yield
    del blocks


@contextmanager
def _busy_core() -> Iterator[None]:
    """Another process takes the time of a core, and ends with this one."""
    busy = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent: sum(range(20000))"
    with subprocess.Popen([sys.executable, "-S", "-c", busy, str(os.getpid())]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def _fresh_inductor_cache() -> Iterator[None]:
    if "torch._inductor" not in sys.modules or "torch._dynamo" not in sys.modules:
        raise NotJudged("nothing was compiled: torch.compile is not loaded")
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


@contextmanager
def _stream_jitter() -> Iterator[None]:
    """The run goes to a stream of its own, and other streams sleep for irregular times beside it."""
    if not torch.cuda.is_available():
        raise NotJudged("needs a GPU")
    streams = [torch.cuda.Stream() for _ in range(4)]
    for index, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000 * (3 * index % 4 + 1))
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


_CHILD = """
import pickle, sys
sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch
from pytest_gtrainer.numerics.run_to_run import _answer
_answer(sys.argv[2])
"""


def _other_process(function: Function) -> Kept:
    """A new Python, with another order of sets and other addresses, from the same random states."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotJudged("another process is no rank of this world")
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(_pickled(function))
        command = [sys.executable, "-c", _CHILD, pickle.dumps(sys.path).hex(), str(call)]
        environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT, env=environment)
        if done.returncode:
            raise RuntimeError(f"the run in another process failed:\n{done.stderr}")
        answer: Kept = torch.load(call.with_suffix(".answer"), weights_only=True)
        return answer


def _pickled(function: Function) -> bytes:
    settings = {
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    module_name, qualname = _importable(function)
    file = getattr(sys.modules[module_name], "__file__", None)
    return pickle.dumps((module_name, file, settings, qualname))


def _importable(function: Function) -> tuple[str, str]:
    """Module and name by which another process finds the function."""
    module_name, qualname = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found: Any = None if module_name == "__main__" else sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function:
        name = qualname or repr(function)
        raise NotJudged(f"another process cannot import {name}: define it with def at the top level of a module")
    return module_name, qualname


def _answer(path: str) -> None:
    """In the other process: import the module by its file, run the function, leave its result."""
    import importlib
    import importlib.util

    module_name, file, settings, qualname = pickle.loads(Path(path).read_bytes())
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    torch.set_num_threads(settings["threads"])
    if settings["deterministic"]:
        torch.use_deterministic_algorithms(True)
    torch.set_rng_state(settings["random"])
    function: Any = module
    for part in qualname.split("."):
        function = getattr(function, part)
    torch.save(kept(function()), Path(path).with_suffix(".answer"))


PRESSURES: tuple[Pressure, ...] = (
    Pressure("1 thread", _inside(lambda: _threads(1))),
    Pressure("2 threads", _inside(lambda: _threads(2))),
    Pressure("3 threads", _inside(lambda: _threads(3))),
    Pressure("other addresses", _inside(_other_addresses)),
    Pressure("another process", _other_process),
    Pressure("fresh Inductor cache", _inside(_fresh_inductor_cache)),
    Pressure("a busy core", _inside(_busy_core)),
    Pressure("stream jitter", _inside(_stream_jitter)),
)
"""What ``assert_run_to_run`` tries, one after the other."""


def assert_run_to_run(
    function: Function, runs: int = 3, *, pressures: Sequence[Pressure] = PRESSURES, what: str = ""
) -> RunToRun:
    """Fail unless ``function()`` gives the same bits again, and under every pressure.

    Args:
        function: makes its own inputs and returns tensors: a record, mapping, list or module. For the run in another
            process it has to be defined at the top level of a module.
        runs: how many plain runs, the first included.
        pressures: what else to try; sums that are cut by thread break under another number of threads, so leave
            those out where that is agreed.
        what: what is run, for the message.

    Raises:
        BitwiseDifference: naming the pressure, and the difference at its origin.
        ValueError: less than two runs.
    """
    __tracebackhide__ = True
    if runs < 2:
        raise ValueError(f"runs={runs}: one run has nothing to be compared with")
    first, report = _once(function), RunToRun()
    plain = [Pressure(f"run {number}", _once) for number in range(2, runs + 1)]
    for pressure in (*plain, *pressures):
        try:
            result = pressure.run(function)
        except NotJudged as reason:
            report.not_judged[pressure.name] = str(reason)
            facts.emit("verdict", outcome="not judged", tensors=0, what=f"{what} under {pressure.name}: {reason}")
            continue
        _judge(compare(result, first), pressure, report, what)
    return report


def _judge(verdict: Verdict, pressure: Pressure, report: RunToRun, what: str) -> None:
    __tracebackhide__ = True
    facts.emit("verdict", outcome=verdict.outcome, tensors=verdict.compared, what=what)
    if verdict.outcome != "equal":
        title = f"{what or 'the run'} does not repeat itself under this pressure: {pressure.name}"
        raise BitwiseDifference(f"{title}\n{verdict}\nbefore that:\n{report}", verdict)
    report.equal.append(pressure.name)
