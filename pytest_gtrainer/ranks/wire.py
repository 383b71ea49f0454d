"""Messages between the processes of a world, and the pipes that carry them; each message is
pickled by itself.

Terms: the *parent* is the pytest process that owns the tests; the *forkserver* is the process that
forks ranks for it; a *rank* is one process of a world. A rank answers a command that has no result
by sending the command back. In order: parent and forkserver, parent to rank, rank to parent, rank 0
to another process under torchrun, the channel of a rank. Between machines nothing is pickled but
what a test's call holds: ``torchrun.line`` spells the same classes as JSON.
"""

import os
import select
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class RankSetup:
    """All that a forked process needs to become a rank; the forkserver gets it with the rank's end
    of its channel.
    """

    size: int
    ranks: range  # those of the team on this machine
    device: str
    backend: str
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    args: tuple[str, ...]  # pytest's command line, as the parent got it
    basetemp: str | None  # for temporary files; None leaves it to pytest
    worker: Mapping[str, Any]  # the content of config.workerinput
    live_output: bool  # leave stdout and stderr as they are (-s)
    rank: int = 0
    folder: str = ""  # for the rank's log and its stacks
    store: str = ""  # where the ranks meet, see JoinGroup


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
    """The forkserver may fork, or a rank is ready; ``error`` says why not."""

    error: str | None = None
    capture_fds: tuple[int, ...] = ()  # pytest's files of a rank's captured stdout and stderr


class ItemRef(NamedTuple):
    """A test in a session: its node id, and the directories and file that lead to it."""

    nodeid: str
    chain: tuple[str, ...]


class RunItem(NamedTuple):
    """Run one test, which the parent has found at ``location``; what it shares with ``next_item``
    stays set up.
    """

    item: ItemRef
    next_item: ItemRef | None
    location: tuple[str, int | None, str]


class CallFunction(NamedTuple):
    """Call the function pickled in ``payload``, after importing the test file of ``chain``."""

    payload: bytes
    chain: tuple[str, ...]


class Do(NamedTuple):
    """Destroy the process groups, so that ranks blocked in a collective with this one raise;
    destroy what the test has made beside the default one; or tear down what is still set up, and
    end.
    """

    what: Literal["leave group", "drop subgroups", "stop"]


class JoinGroup(NamedTuple):
    """Replace the process groups by a new default group of ``size`` ranks, who meet at ``store``: a
    file, or, without a leading slash, a place in torchrun's store.
    """

    store: str
    size: int


class Terminal(NamedTuple):
    """The terminal that a rank may use, until it says ``PromptOver``; without one it goes on, or
    says the refusal.
    """

    path: str | None = None
    refusal: str | None = None


class GroupState(NamedTuple):
    """The state of a rank's process groups after a test, to be compared across ranks."""

    intact: bool  # the default group is the one that the rank was given
    groups_made: int  # torch's counter, from which it names groups
    subgroups: int = 0  # how many groups there are beside the default one
    issued: Mapping[
        str, int
    ] = {}  # collectives on each group that still exists, by the group's description
    shared: bool = (
        False  # a module or class shares a world, and with it the groups beside the default one
    )
    broken: bool = False  # an error on the GPU, which lasts as long as the process
    messages: Mapping[str, int] = {}  # sends less receives on each group, with gloo


GroupCondition = Literal["fit", "with subgroups", "disagreeing", "left", "killed", "dead"]
"""What a command has left of the ranks' process group, the worse the later.

Ranks made groups beside it, issued different collectives on it, or left it; all ranks were ended,
or one has died.
"""


class Raised(NamedTuple):
    """Sent at once when a phase raises, since formatting the traceback can take seconds."""

    time: float  # on the host's monotonic clock, which all ranks share
    summary: str
    is_skip: bool
    waiting_in: (
        str | None
    )  # the torch.distributed function that raised, None if the test's own code did
    origin: (
        tuple[Any, ...] | None
    )  # the exception's gt_origin, a sortable place of the fault such as (step, rank)
    place: tuple[tuple[str, int], ...] = ()  # file and line of each frame that it went through
    in_subtest: bool = False  # the test goes on

    def is_like(self, other: "Raised") -> bool:
        """Return whether both failed at one place by one type; values may differ from rank to rank,
        words of gloo may not.
        """
        said = [
            each.summary if self.waiting_in else each.summary.partition(":")[0]
            for each in (self, other)
        ]
        return (said[0], self.place, self.waiting_in) == (said[1], other.place, other.waiting_in)


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
    """A rank has come to a breakpoint, or has failed: ``failure`` is its traceback. ``Terminal``
    answers.
    """

    failure: str | None = None


class PromptOver(NamedTuple):
    """The rank goes on, and leaves the terminal to others."""


class ItemDone(NamedTuple):
    """The rank is through with a test."""

    reports: tuple[dict[str, Any], ...]  # a serialised one per phase, of plain types only
    warnings: tuple[WarningRecord, ...]
    trouble: str | None  # what kept the rank from running the test at all, or stopped the session
    state: GroupState
    left: tuple[str, ...] = ()  # what the test has left behind, in words


class CallDone(NamedTuple):
    """The rank is through with a function: ``result`` is pickled, ``error`` a traceback."""

    result: bytes | None
    error: str | None
    output: str
    facts: tuple[Mapping[str, Any], ...]
    state: GroupState


class Stopped(NamedTuple):
    """The rank has ended its session, and what failed in that: hooks, fixtures that were still set
    up.
    """

    problems: tuple[str, ...] = ()


class Ended(NamedTuple):
    """How a rank has ended, in words, and what it wrote last."""

    how: str
    last_words: str


class StartTeam(NamedTuple):
    """Fork this node's ranks of a team of ``size``, called by the place where they meet; each
    answers ``Started``.
    """

    team: str
    size: int
    worker: Mapping[str, Any]


class ToTeam(NamedTuple):
    """Call a method of the ``LocalRanks`` of a team on this node."""

    team: str
    method: Literal["send", "stacks", "kill"]
    arguments: tuple[Any, ...] = ()


class FromRank(NamedTuple):
    """A rank's message, ``Ended`` if it is gone; without a rank the stacks that were asked for."""

    team: str
    rank: int | None
    message: Any


class Over(NamedTuple):
    """The run is over: leave, with that exit status."""

    status: int


_LENGTH = struct.Struct("=Q")
_AT_ONCE = 2**16


class Channel:
    """One end of two pipes between the parent and a rank: messages of any length in both
    directions, as bytes.

    A process that waits to read from a socket is woken, for nothing, each time that the other side
    has read from it: every rank once more in every test. A
    ``multiprocessing.connection.Connection`` costs a second read, for the length.
    """

    def __init__(self, incoming: int, outgoing: int, send_limit: float | None = None) -> None:
        """``send_limit`` is how many seconds a message may wait for the other end to read on."""
        self._incoming, self._outgoing = incoming, outgoing
        self._read = bytearray()
        self._send_limit = send_limit
        if send_limit is not None:
            os.set_blocking(outgoing, False)

    def fileno(self) -> int:
        """Return the file to read from when a message has come, or the other end is closed."""
        return self._incoming

    def has_message(self) -> bool:
        """Return whether a message has been read already, with the one before: the file says
        nothing of it any more.
        """
        return len(self._read) >= _LENGTH.size and len(self._read) >= self._end()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the pipe is full.

        Raises:
            OSError: the other end is closed.
            TimeoutError: the other end reads nothing for ``send_limit`` seconds.
        """
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self._outgoing, rest) :]
            except BlockingIOError:  # only with a limit
                poll = select.poll()
                poll.register(self._outgoing, select.POLLOUT)
                if not poll.poll((self._send_limit or 0) * 1000):
                    raise TimeoutError("the other end of the channel does not read") from None

    def receive(self) -> bytes:
        """The next message; waits for it. EOFError if the other end is closed, and there is no
        whole one any more.
        """
        while not self.has_message():
            self.read()
        end = self._end()
        message = bytes(memoryview(self._read)[_LENGTH.size : end])
        del self._read[:end]
        return message

    def read(self) -> None:
        """Read what there is, as much as fits into a pipe; waits if there is nothing. EOFError if
        the end is closed.
        """
        if not (some := os.read(self._incoming, _AT_ONCE)):
            raise EOFError
        self._read += some

    def _end(self) -> int:
        """Return where the message ends that ``_read`` begins with."""
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
