"""Is it deterministic? Run it again under pressure, and say which pressure broke it.

A *pressure* changes something on which a result must not depend: the number of threads, where memory lies, the process,
what Inductor has cached, what else the machine is doing, how kernels of a GPU overlap. Each is applied by itself, to a
run that starts from the same random states as the first. A pressure that cannot be applied here (streams without a GPU)
is *not judged*: counted and named, never passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pytest_gtrainer import facts
from pytest_gtrainer.numerics.assertions import BitwiseDifference
from pytest_gtrainer.numerics.compare import Verdict, compare
from pytest_gtrainer.numerics.other_process import in_another_process
from pytest_gtrainer.numerics.pressures import (
    Function,
    Kept,
    NotJudged,
    Pressure,
    busy_core,
    fresh_inductor_cache,
    inside,
    once,
    other_addresses,
    stream_jitter,
    threads,
)

PRESSURES: tuple[Pressure, ...] = (
    Pressure("1 thread", inside(lambda: threads(1))),
    Pressure("2 threads", inside(lambda: threads(2))),
    Pressure("3 threads", inside(lambda: threads(3))),
    Pressure("other addresses", inside(other_addresses)),
    Pressure("another process", in_another_process),
    Pressure("fresh Inductor cache", inside(fresh_inductor_cache)),
    Pressure("a busy core", inside(busy_core)),
    Pressure("stream jitter", inside(stream_jitter)),
)
"""What ``assert_run_to_run`` tries, one after the other."""


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


def first_run(function: Function) -> Kept:
    """A GPU that started in a run cannot have its generators put back to before: then the first run is the next one."""
    started = torch.cuda.is_initialized()
    result = once(function)
    return result if torch.cuda.is_initialized() == started else once(function)


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
    first, report = first_run(function), RunToRun()
    plain = [Pressure(f"run {number}", once) for number in range(2, runs + 1)]
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
