"""The messages between the parent, the forkserver and the ranks; each is pickled by itself.

Terms: the *parent* is the pytest process that owns the tests; the *forkserver* is the process
that forks ranks for it; a *rank* is one process of a world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# --- parent and forkserver ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a forked process needs to become a rank.

    Attributes:
        folder: where the rank keeps its log and its stacks; ``store`` is the rendezvous file there.
        args: pytest's command line, as the parent got it.
        worker: the content of ``config.workerinput``.
        live_output: leave stdout and stderr as they are (``-s``).
    """

    rank: int
    size: int
    device: str
    backend: str
    folder: str
    store: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    args: tuple[str, ...]
    basetemp: str
    worker: Mapping[str, Any]
    live_output: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The forkserver has imported everything and may fork: it has one thread."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The forkserver cannot fork safely."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a rank; the rank's end of its channel follows as file descriptors."""

    setup: RankSetup


@dataclass(frozen=True, slots=True)
class Forked:
    pid: int


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Signal a rank; a rank that has been reaped already is left alone."""

    pid: int
    signum: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank has ended; ``status`` is negative for a signal."""

    pid: int
    status: int


# --- parent to rank ------------------------------------------------------------------------


class ItemRef(NamedTuple):
    """A test in a session: its node id, and the directories and file that lead to it."""

    nodeid: str
    chain: tuple[str, ...]


class RunItem(NamedTuple):
    """Run one test, which the parent has found at ``location``; what it shares with ``next_item`` stays set up."""

    item: ItemRef
    next_item: ItemRef | None
    location: tuple[str, int | None, str] | None = None


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Call the function pickled in ``payload``, after importing the test file of ``chain``."""

    payload: bytes
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Destroy the process groups, so that ranks blocked in a collective with this one raise."""


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Replace the process groups by a new default group of ``size`` ranks, who meet at ``store``."""

    store: str
    size: int


@dataclass(frozen=True, slots=True)
class DropSubgroups:
    """Destroy what the test has made beside the default group."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Tear down what is still set up, and end."""


TIMES = ("start", "stop", "duration")
"""The times of a report, in the order of ``ItemDone.times``."""

# --- rank to parent ------------------------------------------------------------------------


class GroupState(NamedTuple):
    """The state of a rank's process groups after a test, to be compared across ranks.

    Attributes:
        intact: the default group is the one that the rank was given.
        groups_made: torch's counter, from which it names groups; ranks must agree on it.
        subgroups: how many groups there are beside the default one.
        issued: collectives issued on each group that still exists, by the group's description.
    """

    intact: bool
    groups_made: int
    subgroups: int = 0
    issued: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Up:
    """The rank is ready; ``capture_fds`` are pytest's files of captured stdout and stderr."""

    capture_fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartFailed:
    text: str


@dataclass(frozen=True, slots=True)
class Raised:
    """Sent at once when a phase raises, since formatting the traceback can take seconds.

    Attributes:
        time: on the host's monotonic clock, which all ranks share.
        waiting_in: the torch.distributed function that raised, None if the test's own code did.
        origin: the exception's ``gt_origin``, a sortable place of the fault such as (step, rank).
    """

    time: float
    when: str
    summary: str
    is_skip: bool
    waiting_in: str | None
    origin: tuple[Any, ...] | None


class WarningRecord(NamedTuple):
    """A warning that a test gave."""

    text: str
    category: tuple[str, str]
    filename: str
    lineno: int
    when: str
    nodeid: str
    location: tuple[str, int, str] | None


class ItemDone(NamedTuple):
    """The rank is through with a test.

    Attributes:
        reports: one serialised report per phase, of plain types only; without its times, so that those of several
            ranks are equal where the ranks have told the same.
        times: start, stop and duration of each of them.
        trouble: what kept the rank from running the test at all, or stopped the session.
        left: what the test has left behind, in words.
    """

    reports: tuple[dict[str, Any], ...]
    times: tuple[tuple[float, ...], ...]
    warnings: tuple[WarningRecord, ...]
    trouble: str | None
    state: GroupState
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDone:
    """The rank is through with a function: ``result`` is pickled, ``error`` a traceback."""

    result: bytes | None
    error: str | None
    output: str
    facts: tuple[Mapping[str, Any], ...]
    state: GroupState


@dataclass(frozen=True, slots=True)
class LeftGroup:
    pass


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    pass


@dataclass(frozen=True, slots=True)
class DroppedSubgroups:
    pass


@dataclass(frozen=True, slots=True)
class Stopped:
    """The rank ends now; ``error`` is what its last teardown raised."""

    error: str | None
