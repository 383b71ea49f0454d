"""Check that a function is deterministic: run it again under pressures, and name the one that
changes its bits.

A *pressure* changes something on which a result must not depend, such as the number of threads.
Each is applied by itself, to a run that starts from the same random states as the first. One that
cannot be applied here is *not judged*: it is counted and named, and does not pass.
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
from pytest_gtrainer._torch.values import parts_of, storage_id, writes_to
from pytest_gtrainer.numerics.bits import copied, is_dtensor
from pytest_gtrainer.numerics.compare import BitwiseDifference, compare
from pytest_gtrainer.numerics.determinism import DebugConfig, active, deterministic
from pytest_gtrainer.numerics.graph_run import has_storage
from pytest_gtrainer.numerics.record import Record, Tensors, entries, vacant

Kept = Record | dict[Any, torch.Tensor | None]
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
    """Return copies of all tensors by name; a record, which holds copies, as it is.

    A place without a tensor keeps its name, with None: another run may have one there, or no place.
    """
    if isinstance(value, Record):
        return value
    found = entries(value)
    if any(key.phase for key in found):  # of ``Record.select``: a name occurs at many places
        return {key: _copy(tensor) for key, tensor in found.items()}
    named: dict[Any, torch.Tensor | None] = dict.fromkeys(vacant(value))
    for key, tensor in found.items():
        named[key.name] = _copy(tensor)
    return named


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; of a DTensor one with its placements, which say what its local part means."""
    own = copied(tensor)
    if not is_dtensor(tensor):
        return own
    from torch.distributed.tensor import DTensor

    place = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        own, *place, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def memory_of(value: Tensors) -> list[Any]:
    """Return where a result lies and how often that was written to.

    If two runs return the same, the second has computed nothing, or has written where nobody
    counts: in inference mode, or through ``.data``.
    """
    if isinstance(value, Record):
        return [id(value)]
    found: list[Any] = []
    for key, tensor in entries(value).items():
        for part in parts_of(tensor):  # of a DTensor the local one
            writes = None if part.is_inference() else writes_to(part)
            # A sparse tensor has no one storage: it is made anew if it is another object.
            if not has_storage(part):
                found.append((key, id(part), writes))
            elif part.numel():
                found.append((key, storage_id(part), writes))
    return found


def once(function: Function) -> Kept:
    """Run a function from the random states of now, which stay as they are."""
    with random_states_kept():
        return kept(function())


def inside(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[[Function], Kept]:
    """Return a pressure that runs a function inside a context."""

    def run(function: Function) -> Kept:
        with context():
            return once(function)

    return run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run operators on ``count`` threads; not judged if the first run had as many."""
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
    """Let new tensors lie elsewhere: take memory of many sizes before the run, and give back every
    second block.
    """
    sizes = sorted(4 * [*range(512, 512 * 200, 512), 64 * 3**10, 64 * 3**11])
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        blocks += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks[::2]
    yield
    del blocks


@contextmanager
def busy_core() -> Iterator[None]:
    """Let another process take the time of a core; it ends with this one."""
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
    """Compile everything again, into an empty folder; not judged if nothing was compiled."""
    if not compiles():
        raise NotJudged("nothing was compiled: torch.compile is not loaded")
    torch.compiler.reset()
    try:
        with fresh_cache():
            yield
    finally:
        torch.compiler.reset()  # what was compiled in the block refers to files that are gone


@contextmanager
def late_streams(own: bool) -> Iterator[None]:
    """Run on a stream of its own, and delay this stream, or all others, by irregular times from
    25 ms on.

    Work that waits for its inputs repeats itself either way. Without the wait it reads too early.
    """
    if not torch.cuda.is_available():
        raise NotJudged("needs a GPU")
    if not torch.cuda.is_initialized():
        raise NotJudged("the run does not use CUDA")
    torch.cuda.synchronize()  # the run does not wait for work from before it
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
    """Run in a new Python, where sets have another order, from the same state."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotJudged("another process is no rank of this world")
    module_name = getattr(function, "__module__", "")
    qualname = getattr(function, "__qualname__", "")
    # In the other process ``__main__`` is another module.
    module = None if module_name == "__main__" else sys.modules.get(module_name)
    try:
        found = attrgetter(qualname)(module)
    except AttributeError:  # a lambda, or a function inside another
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
        code = f"from {__name__} import _answer; _answer({str(call)!r})"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            env=environment,
        )
        if done.returncode:
            raise RuntimeError(f"the run in another process failed:\n{done.stderr}")
        # Our own process wrote the file, so unpickling it is safe.
        answer: Kept = torch.load(call.with_suffix(".answer"), weights_only=False)
        return answer


def _read_autocast() -> list[tuple[str, bool, torch.dtype]]:
    found = []
    for device in ("cpu", "cuda"):
        dtype = torch.get_autocast_dtype(device)
        found.append((device, torch.is_autocast_enabled(device), dtype))
    return found


def _write_autocast(state: list[tuple[str, bool, torch.dtype]]) -> None:
    for device, is_enabled, dtype in state:
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)


# State of a process on which a run depends, besides random numbers and what ``deterministic`` sets:
# how to read and to set it.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_read_autocast, _write_autocast),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    # Inductor follows only this one of torch's two functions.
    "algorithms": (
        torch.get_deterministic_debug_mode,
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
}


def _state() -> tuple[GeneratorStates, dict[str, Any], tuple[DebugConfig, str] | None]:
    """Return what a run starts from: random states, switches, and the ``deterministic`` block."""
    # ``waiting`` holds functions, for a CUDA that no run has started.
    states, block = replace(GeneratorStates.now(), waiting={}), active()
    try:
        switches = {name: read() for name, (read, _) in _SWITCHES.items()}
    # torch has two switches for the precision of products, and refuses to read one if they
    # disagree.
    except RuntimeError as error:
        raise NotJudged(
            "torch.get_float32_matmul_precision() raises, as backends' fp32_precision was set "
            "beside it, so another process cannot be set alike: set the precision by "
            "torch.set_float32_matmul_precision alone"
        ) from error
    return states, switches, None if block is None else (block.config, block.nccl)


def _answer(path: str) -> None:
    """Run the function in the other process, from the same state, and write its result.

    A module that cannot be imported by its name, as one of pytest's importlib mode, is by its file.
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
    # First, as the others move new tensors, too: they would be blamed for what an address does.
    Pressure("other addresses", inside(other_addresses)),
    Pressure("1 thread", inside(lambda: threads(1))),
    Pressure("2 threads", inside(lambda: threads(2))),
    Pressure("3 threads", inside(lambda: threads(3))),
    Pressure("another process", in_another_process),
    Pressure("fresh Inductor cache", inside(fresh_inductor_cache)),
    Pressure("a busy core", inside(busy_core)),
    Pressure("stream jitter", inside(lambda: late_streams(own=False))),
    Pressure("a late stream", inside(lambda: late_streams(own=True))),
)
"""The pressures of ``assert_run_to_run``, one after the other."""


@dataclass(slots=True)
class RunToRun:
    """The result of ``assert_run_to_run``; ``str()`` gives a line for each pressure that counts.

    Attributes:
        equal: runs and pressures that gave the same bits.
        not_judged: why others were not judged, by name.
        not_finite: tensors of the first run that hold NaN or inf.
    """

    equal: list[str] = field(default_factory=list)
    not_judged: dict[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"equal        {', '.join(self.equal) or 'nothing'}"]
        for each in self.not_finite:
            lines.append(f"not finite   {each}, which is equal whatever computes it")
        for name, why in self.not_judged.items():
            lines.append(f"not judged   {name}: {why}")
        return "\n".join(lines)


def _chosen(pressures: Sequence[Pressure], without: Sequence[str]) -> list[Pressure]:
    """Return the pressures whose names are not among ``without``."""
    for pressure in pressures:
        if not isinstance(pressure, Pressure):
            raise TypeError(
                f"pressures has {pressure!r}: give a Pressure(name, run), or some of PRESSURES: "
                f"{', '.join(each.name for each in PRESSURES)}"
            )
    facts.check_type(without, (list, tuple), "without", "a list of names of pressures")
    names = [each.name for each in pressures]
    for name in without:
        if name not in names:
            known = ", ".join(names)
            raise ValueError(f"without has {name!r}, which is no pressure: there are {known}")
    return [each for each in pressures if each.name not in without]


@facts.check
def assert_run_to_run(
    function: Function,
    runs: int = 3,
    *,
    pressures: Sequence[Pressure] = PRESSURES,
    without: Sequence[str] = (),
    what: str = "",
) -> RunToRun:
    """Fail unless ``function()`` gives the same bits again, and under every pressure.

    Args:
        function: makes its own inputs and returns tensors: a record, mapping, list or module, whose
            gradients are not looked at. For the run in another process it has to be defined at the
            top level of a module.
        runs: how many plain runs, the first included.
        pressures: what else to try.
        without: names of pressures to leave out, such as ``["2 threads"]``: sums that are divided
            among threads fail under another number of them.
        what: what is run, for the message.

    Raises:
        BitwiseDifference: naming the pressure, and the difference at its origin; or the second run
            returns what the first one made.
        TypeError: one of ``pressures`` is none.
        ValueError: less than two runs, or ``without`` has a name of no pressure.
    """
    __tracebackhide__ = True
    facts.check_callable(function=function)
    if runs < 2:
        raise ValueError(f"runs={runs}: one run has nothing to be compared with")
    pressures = _chosen(pressures, without)
    report, cuda_started = RunToRun(), torch.cuda.is_initialized()
    last: Tensors = {}

    def noted() -> Tensors:
        nonlocal last
        last = function()
        return last

    first = once(noted)
    # Generators of CUDA cannot be put back to before it started.
    if torch.cuda.is_initialized() != cuda_started:
        first = once(noted)
    # With the result itself: while it lives, no other one lies at its address.
    made = last, memory_of(last)
    plain = [Pressure(f"run {number}", once) for number in range(2, runs + 1)]
    for pressure in (*plain, *pressures):
        try:
            result = pressure.run(noted if pressure in plain else function)
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
        is_cached = pressure in plain and made[1] != [] and memory_of(last) == made[1]
        if is_cached:
            why = "a result that is kept from run to run is equal whatever computed it"
            verdict = replace(verdict, outcome="unverified", reasons=(why,))
        facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
        if is_cached:
            raise BitwiseDifference(
                f"{what or 'the run'} returns what the first one made, and no write to it has been "
                "counted since: let the function compute it anew, or return a clone, as nobody "
                f"counts writes through .data and in inference mode\n{verdict}",
                verdict,
            )
        if verdict.outcome != "equal":
            raise BitwiseDifference(
                f"{what or 'the run'} does not repeat itself under this pressure: {pressure.name}\n"
                f"{verdict}\nbefore that:\n{report}",
                verdict,
            )

        report.equal.append(pressure.name)

    return report
