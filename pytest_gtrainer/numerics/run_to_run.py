"""Is it deterministic? Run it again under pressure, and say which pressure broke it.

A *pressure* changes something on which a result must not depend. Each is applied by itself, to a
run that starts from the same random states as the first. One that cannot be applied here is *not
judged*: counted and named, never passed.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from pytest_gtrainer import facts
from pytest_gtrainer._torch.process import compiles, fresh_cache, keep_stream_busy
from pytest_gtrainer._torch.random_states import GeneratorStates, random_states_kept
from pytest_gtrainer.numerics.bits import copied
from pytest_gtrainer.numerics.compare import BitwiseDifference, compare
from pytest_gtrainer.numerics.determinism import DebugConfig, active, deterministic
from pytest_gtrainer.numerics.record import Record, Tensors, entries

Kept = Record | dict[str, torch.Tensor]
Function = Callable[[], Tensors]
_POOL = 32  # streams of one priority that torch has for a device


class NotJudged(Exception):
    """A pressure that cannot be applied here; the message says why."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Something on which a result must not depend; ``run`` calls a function under it and keeps the
    result.
    """

    name: str
    run: Callable[[Function], Kept]


def kept(value: Tensors) -> Kept:
    """Return copies of all tensors by name; a record as it is, because it holds copies and knows
    its ranks.
    """
    if isinstance(value, Record):
        return value
    return {key.name: copied(tensor) for key, tensor in entries(value).items()}


def once(function: Function) -> Kept:
    with random_states_kept():
        return kept(function())


def inside(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[[Function], Kept]:
    """A pressure that is one run inside of a context."""

    def run(function: Function) -> Kept:
        with context():
            return once(function)

    return run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Operators run on ``count`` threads; not judged where the first run had as many."""
    before = torch.get_num_threads()
    if before == count:
        raise NotJudged(f"the first run had {count} already")
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_addresses() -> Iterator[None]:
    """Blocks of many sizes are taken before the run, every second one given back: new ones lie
    elsewhere.
    """
    sizes = [512 * count for count in range(1, 200) for _ in range(4)] + [
        64 * 3**power for power in (10, 11)
    ] * 4
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        blocks += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks[::2]
    yield
    del blocks


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process takes the time of a core, and ends with this one."""
    busy = (
        "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent: sum(range(20000))"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", busy, str(os.getpid())]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def fresh_inductor_cache() -> Iterator[None]:
    """All is compiled anew, into an empty folder; not judged where nothing was compiled."""
    if not compiles():
        raise NotJudged("nothing was compiled: torch.compile is not loaded")
    torch.compiler.reset()
    try:
        with fresh_cache():
            yield
    finally:
        torch.compiler.reset()  # what was compiled in there refers to files that are gone


@contextmanager
def late_streams(own: bool) -> Iterator[None]:
    """The run has a stream of its own; it is late, or those of torch's pools are, by irregular
    times from 25 ms on.

    Work that waits for its inputs repeats itself either way.
    """
    if not torch.cuda.is_available():
        raise NotJudged("needs a GPU")
    if not torch.cuda.is_initialized():
        raise NotJudged("the run does not use CUDA")
    torch.cuda.synchronize()  # what came before the run is none of its business
    here = torch.cuda.Stream()
    for index, priority in itertools.product(range(_POOL), (0, -1)):
        stream = torch.cuda.Stream(priority=priority)
        if (stream == here) == own:
            with torch.cuda.stream(stream):
                keep_stream_busy(50_000_000 * (3 * index % 4 + 1))
    try:
        with torch.cuda.stream(here):
            yield
    finally:
        torch.cuda.synchronize()


PROCESS_LIMIT = 300.0


def in_another_process(function: Function) -> Kept:
    """A new Python, with another order of sets and other addresses, from the same random states and
    switches.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotJudged("another process is no rank of this world")
    module_name, qualname = (
        getattr(function, "__module__", ""),
        getattr(function, "__qualname__", ""),
    )
    try:
        found = attrgetter(qualname)(
            None if module_name == "__main__" else sys.modules.get(module_name)
        )
    except AttributeError:
        found = None
    if found is not function:
        name = qualname or repr(function)
        raise NotJudged(
            f"another process cannot import {name}: define it with def at the top level of a module"
        )
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        file = getattr(sys.modules[module_name], "__file__", None)
        call.write_bytes(pickle.dumps((module_name, file, qualname, _state())))
        command = [
            sys.executable,
            "-P",
            "-c",
            f"from {__name__} import _answer; _answer({str(call)!r})",
        ]
        hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": hash_seed,
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_LIMIT, env=environment
        )
        if done.returncode:
            raise RuntimeError(f"the run in another process failed:\n{done.stderr}")
        answer: Kept = torch.load(
            call.with_suffix(".answer"), weights_only=False
        )  # our own process wrote it
        return answer


# What a run takes from its process beside random numbers and what ``deterministic`` sets: how to
# read and to set it.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    # of torch's two ways to say it the one that Inductor hears
    "algorithms": (
        torch.get_deterministic_debug_mode,
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
}


def _state() -> tuple[GeneratorStates, dict[str, Any], tuple[DebugConfig, str] | None]:
    """Return where a run starts from: random states, switches, and what ``deterministic`` was asked
    for.
    """
    # what waits are functions, and for a CUDA that no run has started
    states, block = replace(GeneratorStates.now(), waiting={}), active()
    try:
        switches = {name: read() for name, (read, _) in _SWITCHES.items()}
    # of the precision of products, which torch cannot tell if its two switches disagree
    except RuntimeError as error:
        raise NotJudged(
            "torch.get_float32_matmul_precision() raises, as backends' fp32_precision was set beside it, so another "
            "process cannot be set alike: set the precision by torch.set_float32_matmul_precision alone"
        ) from error
    return states, switches, None if block is None else (block.config, block.nccl)


def _answer(path: str) -> None:
    """In the other process: import the module by its file, run the function from the same state,
    leave its result.
    """
    module_name, file, qualname, (states, switches, block) = pickle.loads(Path(path).read_bytes())
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function = attrgetter(qualname)(module)
    with deterministic(block[0], nccl=block[1]) if block is not None else contextlib.nullcontext():
        for name, (read, write) in _SWITCHES.items():
            if read() != switches[name]:
                write(switches[name])
        states.put_back()
        torch.save(kept(function()), Path(path).with_suffix(".answer"))


PRESSURES: tuple[Pressure, ...] = (
    Pressure("1 thread", inside(lambda: threads(1))),
    Pressure("2 threads", inside(lambda: threads(2))),
    Pressure("3 threads", inside(lambda: threads(3))),
    Pressure("other addresses", inside(other_addresses)),
    Pressure("another process", in_another_process),
    Pressure("fresh Inductor cache", inside(fresh_inductor_cache)),
    Pressure("a busy core", inside(busy_core)),
    Pressure("stream jitter", inside(lambda: late_streams(own=False))),
    Pressure("a late stream", inside(lambda: late_streams(own=True))),
)
"""What ``assert_run_to_run`` tries, one after the other."""


@dataclass(slots=True)
class RunToRun:
    """The runs and pressures with ``equal`` bits, and why others are ``not_judged``; ``str()``
    gives a line each.

    Attributes:
        not_finite: tensors of the first run that hold NaN or inf.
    """

    equal: list[str] = field(default_factory=list)
    not_judged: dict[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"equal        {', '.join(self.equal) or 'nothing'}"]
        lines += [
            f"not finite   {each}, which is equal whatever computes it" for each in self.not_finite
        ]
        return "\n".join(
            [*lines, *(f"not judged   {name}: {why}" for name, why in self.not_judged.items())]
        )


@facts.check
def assert_run_to_run(
    function: Function, runs: int = 3, *, pressures: Sequence[Pressure] = PRESSURES, what: str = ""
) -> RunToRun:
    """Fail unless ``function()`` gives the same bits again, and under every pressure.

    Args:
        function: makes its own inputs and returns tensors: a record, mapping, list or module. For
            the run in another process it has to be defined at the top level of a module.
        runs: how many plain runs, the first included.
        pressures: what else to try. Sums that are divided among threads fail under another number
            of threads.
        what: what is run, for the message.

    Raises:
        BitwiseDifference: naming the pressure, and the difference at its origin.
        ValueError: less than two runs.
    """
    __tracebackhide__ = True
    if runs < 2:
        raise ValueError(f"runs={runs}: one run has nothing to be compared with")
    report, cuda_started = RunToRun(), torch.cuda.is_initialized()
    first = once(function)
    if (
        torch.cuda.is_initialized() != cuda_started
    ):  # its generators cannot be put back to before it started
        first = once(function)
    plain = [Pressure(f"run {number}", once) for number in range(2, runs + 1)]
    for pressure in (*plain, *pressures):
        try:
            result = pressure.run(function)
        except NotJudged as reason:
            report.not_judged[pressure.name] = str(reason)
            facts.emit(
                "verdict",
                outcome="not judged",
                tensors=0,
                what=f"{what} under {pressure.name}: {reason}",
            )
            continue
        verdict = compare(result, first)
        report.not_finite = verdict.not_finite
        facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
        if verdict.outcome != "equal":
            title = (
                f"{what or 'the run'} does not repeat itself under this pressure: {pressure.name}"
            )
            raise BitwiseDifference(f"{title}\n{verdict}\nbefore that:\n{report}", verdict)
        report.equal.append(pressure.name)
    return report
