"""What the processes of a world tell each other, and the pipes that carry it; each message is pickled by itself.

Terms: the *parent* is the pytest process that owns the tests; the *forkserver* is the process that forks ranks for it;
a *rank* is one process of a world. A rank answers a command that has no result by sending the command back.
Between machines nothing is pickled but what a test's call holds: ``torchrun.line`` spells the same classes as JSON.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# --- parent and forkserver ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a forked process needs to become a rank; the forkserver gets it with the rank's end of its channel.

    Attributes:
        ranks: those of the team on this machine.
        folder: where the rank keeps its log and its stacks.
        store: where the ranks meet, see ``JoinGroup``.
        basetemp: for temporary files; None leaves it to pytest.
        args: pytest's command line, as the parent got it.
        worker: the content of ``config.workerinput``.
        live_output: leave stdout and stderr as they are (``-s``).
    """

    size: int
    ranks: range
    device: str
    backend: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    args: tuple[str, ...]
    basetemp: str | None
    worker: Mapping[str, Any]
    live_output: bool
    rank: int = 0
    folder: str = ""
    store: str = ""


class Forked(NamedTuple):
    pid: int


class SendSignal(NamedTuple):
    """Signal a rank; a rank that has been reaped already is left alone."""

    pid: int
    signum: int


class Exited(NamedTuple):
    """A rank has ended; ``status`` is negative for a signal."""

    pid: int
    status: int


class Started(NamedTuple):
    """The forkserver may fork, or a rank is ready; ``error`` says why not.

    ``capture_fds`` are pytest's files of a forked rank's captured stdout and stderr.
    """

    error: str | None = None
    capture_fds: tuple[int, ...] = ()


# --- parent to rank ------------------------------------------------------------------------


class ItemRef(NamedTuple):
    """A test in a session: its node id, and the directories and file that lead to it."""

    nodeid: str
    chain: tuple[str, ...]


class RunItem(NamedTuple):
    """Run one test, which the parent has found at ``location``; what it shares with ``next_item`` stays set up."""

    item: ItemRef
    next_item: ItemRef | None
    location: tuple[str, int | None, str]


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
    """Replace the process groups by a new default group of ``size`` ranks, who meet at ``store``.

    That is a file, or, without a leading slash, a place in torchrun's store.
    """

    store: str
    size: int


@dataclass(frozen=True, slots=True)
class DropSubgroups:
    """Destroy what the test has made beside the default group."""


class Terminal(NamedTuple):
    """The terminal that a rank may use, until it says ``PromptOver``; without one it goes on, or says the refusal."""

    path: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Tear down what is still set up, and end."""


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


GroupCondition = Literal["fit", "with subgroups", "disagreeing", "left", "killed", "dead"]
"""What a command has left of the ranks' process group, the worse the later.

Ranks may have made groups beside it, have issued different collectives on it, or have left it; or all ranks were ended,
or one has died.
"""


@dataclass(frozen=True, slots=True)
class Raised:
    """Sent at once when a phase raises, since formatting the traceback can take seconds.

    Attributes:
        time: on the host's monotonic clock, which all ranks share.
        waiting_in: the torch.distributed function that raised, None if the test's own code did.
        origin: the exception's ``gt_origin``, a sortable place of the fault such as (step, rank).
    """

    time: float
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


class AtPrompt(NamedTuple):
    """A rank has come to a breakpoint, or has failed: ``failure`` is its traceback. ``Terminal`` answers."""

    failure: str | None = None


class PromptOver(NamedTuple):
    """The rank goes on, and leaves the terminal to others."""


class ItemDone(NamedTuple):
    """The rank is through with a test.

    Attributes:
        reports: one serialised report per phase, of plain types only.
        trouble: what kept the rank from running the test at all, or stopped the session.
        left: what the test has left behind, in words.
    """

    reports: tuple[dict[str, Any], ...]
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


class Ended(NamedTuple):
    """How a rank has ended, in words, and what it wrote last."""

    how: str
    last_words: str


# --- from rank 0 to another process, under torchrun ------------------------------------------------


class StartTeam(NamedTuple):
    """Fork this node's ranks of a team of ``size``, called by the place where they meet; each answers ``Started``."""

    team: str
    size: int
    worker: Mapping[str, Any]


class ToRanks(NamedTuple):
    """A command for some ranks of a team."""

    team: str
    ranks: tuple[int, ...]
    command: object


class FromRank(NamedTuple):
    """What a rank has said; ``Ended`` if it is gone."""

    team: str
    rank: int
    message: object


class Stacks(NamedTuple):
    """What ranks answer: ``ranks.stacks`` has the kinds; without texts it is the question."""

    team: str
    ranks: tuple[int, ...]
    texts: Mapping[int, str] = {}
    kind: str = "stack"


class KillTeam(NamedTuple):
    team: str


class Over(NamedTuple):
    """The run is over: leave, with that exit status."""

    status: int


# --- the channel of a forked rank --------------------------------------------------------------

_LENGTH = struct.Struct("=Q")
_AT_ONCE = 2**16


class Channel:
    """One end of two pipes between the parent and a rank: messages of any length in both directions, as bytes.

    A socket pair would do with half as many files. But whoever waits to read from a socket is woken, for nothing, each
    time that the other side has read from it: every rank once more in every test, in the middle of another rank's. And
    a ``multiprocessing.connection.Connection`` reads the length of a message by itself, for the price of a second read.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Take over two file descriptors: to read from, and to write to."""
        self._incoming, self._outgoing = incoming, outgoing
        self._read = bytearray()

    def fileno(self) -> int:
        """The file that has something to read when a message has come, or the other end is closed."""
        return self._incoming

    def has_message(self) -> bool:
        """Whether a message has been read already, with the one before: the file says nothing of it any more."""
        return len(self._read) >= _LENGTH.size and len(self._read) >= self._end()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the pipe is full.

        Raises:
            OSError: the other end is closed.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            rest = rest[os.write(self._outgoing, rest) :]

    def receive(self) -> bytes:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is closed, and there is no whole message any more.
        """
        while not self.has_message():
            self.read()
        end = self._end()
        message = bytes(memoryview(self._read)[_LENGTH.size : end])
        del self._read[:end]
        return message

    def read(self) -> None:
        """Read what there is, at the most as much as fits into a pipe; waits only if there is nothing.

        Raises:
            EOFError: the other end is closed.
        """
        some = os.read(self._incoming, _AT_ONCE)
        if not some:
            raise EOFError
        self._read += some

    def _end(self) -> int:
        """Where the message ends that ``_read`` begins with."""
        return _LENGTH.size + int(_LENGTH.unpack_from(self._read)[0])

    def close(self) -> None:
        for fd in {self._incoming, self._outgoing} - {-1}:
            os.close(fd)
        self._incoming = self._outgoing = -1


def fd_pairs() -> tuple[tuple[int, int], tuple[int, int]]:
    """The file descriptors of both ends of a new channel."""
    one_in, other_out = os.pipe()
    other_in, one_out = os.pipe()
    return (one_in, one_out), (other_in, other_out)
