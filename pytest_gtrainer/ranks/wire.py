"""Messages between the processes of a world, and the pipes that carry them.

Terms: the *parent* is the pytest process that owns the tests; the *forkserver* is the process that
forks ranks for it; a *rank* is one process of a world.

The classes stand in this order: parent and forkserver, parent to rank, rank to parent, rank 0 to
another process under torchrun, the channel of a rank. A rank answers a command that has no result
by sending the command back. Each message is pickled by itself. Between machines the messages are
JSON (``torchrun.line``); only the function and the arguments of a ``CallFunction`` are pickled.
"""

import os
import select
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Everything that a forked process needs to become a rank.

    The forkserver gets it together with the rank's end of its channel.
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
    """Signal a rank, unless the forkserver has reaped it already."""

    pid: int
    signum: int


class Exited(NamedTuple):
    """A rank has ended; ``status`` is negative for a signal."""

    pid: int
    status: int


class Started(NamedTuple):
    """The forkserver or a rank is ready, or has failed to start: ``error`` says why."""

    error: str | None = None
    capture_fds: tuple[int, ...] = ()  # pytest's files of a rank's captured stdout and stderr


class ItemRef(NamedTuple):
    """A test in a session: its node id, and the directories and file that lead to it."""

    nodeid: str
    chain: tuple[str, ...]


class RunItem(NamedTuple):
    """Run one test, whose location in the parent is ``location``.

    Fixtures that it shares with ``next_item`` stay set up. ``is_observed`` is for ``--gt-repeat``.
    """

    item: ItemRef
    next_item: ItemRef | None
    location: tuple[str, int | None, str]
    is_observed: bool = False


class CallFunction(NamedTuple):
    """Call the function pickled in ``payload``, after importing the test file of ``chain``."""

    payload: bytes
    chain: tuple[str, ...]


class Do(NamedTuple):
    """A command without arguments.

    - "leave group": destroy the process groups, so that ranks blocked in a collective with this one
      raise;
    - "drop subgroups": destroy the groups that the test has made besides the default one;
    - "stop": tear down the fixtures that are still set up, and end.
    """

    what: Literal["leave group", "drop subgroups", "stop"]


class JoinGroup(NamedTuple):
    """Replace the process groups by a new default group of ``size`` ranks.

    They meet at ``store``: the path of a file, or, without a leading slash, a prefix in torchrun's
    store.
    """

    store: str
    size: int


class Terminal(NamedTuple):
    """The parent's answer to ``AtPrompt``.

    With a ``path`` the rank uses that terminal until it sends ``PromptOver``. With a ``refusal`` it
    raises that text. With neither it goes on.
    """

    path: str | None = None
    refusal: str | None = None


class GroupState(NamedTuple):
    """The state of a rank's process groups after a test, to be compared across ranks."""

    intact: bool  # the default group is the one that the rank was given
    groups_made: int  # torch's counter, from which it names groups
    subgroups: int = 0  # how many groups there are besides the default one
    # Collectives on each group that still exists, by the group's description.
    issued: Mapping[str, int] = {}
    # A module or class shares a world, and with it the groups besides the default one.
    shared: bool = False
    broken: bool = False  # an error on the GPU, which lasts as long as the process
    messages: Mapping[str, int] = {}  # sends less receives on each group, with gloo
    # A checksum of the kind of each of the last collectives: by group as above, by number.
    kinds: Mapping[str, Mapping[int, int]] = {}


GroupCondition = Literal["fit", "with subgroups", "disagreeing", "left", "killed", "dead"]
"""The state of the ranks' process group after a command, from the best to the worst.

In words: fit for the next test; ranks made groups beside it; ranks issued different collectives on
it; ranks left it; all ranks were ended; a rank has died.
"""


class Raised(NamedTuple):
    """A phase has raised. Sent at once, since formatting the traceback can take seconds."""

    time: float  # on the host's monotonic clock, which all ranks share
    summary: str
    is_skip: bool
    # The torch.distributed function that raised, None if the test's own code did.
    waiting_in: str | None
    # The exception's gt_origin, a sortable place of the fault such as (step, rank).
    origin: tuple[Any, ...] | None
    place: tuple[tuple[str, int], ...] = ()  # file and line of each frame that it went through
    in_subtest: bool = False  # the test goes on

    def is_like(self, other: "Raised") -> bool:
        """Return whether both failed at one place with one type of exception.

        Values in a message may differ from rank to rank. The words of a collective may not.
        """
        own, others = self.summary, other.summary
        if not self.waiting_in:
            own, others = own.partition(":")[0], others.partition(":")[0]
        same_place = (self.place, self.waiting_in) == (other.place, other.waiting_in)
        return same_place and own == others


class WarningRecord(NamedTuple):
    """A warning that a test gave, or a function that was called on the rank."""

    text: str
    category: tuple[str, str]
    filename: str
    lineno: int
    when: str
    nodeid: str
    location: tuple[str, int, str] | None

    def class_here(self) -> type[Warning]:
        """Return the class of the warning, ``UserWarning`` if only the rank has its module."""
        module, name = self.category
        found = getattr(sys.modules.get(module), name, None)
        return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning


class AtPrompt(NamedTuple):
    """A rank is at a breakpoint, or has failed with the traceback ``failure``.

    The parent answers with a ``Terminal``.
    """

    failure: str | None = None


class PromptOver(NamedTuple):
    """The rank goes on, and does not use the terminal any more."""


class ItemDone(NamedTuple):
    """The rank has run a test."""

    reports: tuple[dict[str, Any], ...]  # a serialised one per phase, of plain types only
    warnings: tuple[WarningRecord, ...]
    trouble: str | None  # why the rank did not run the test at all, or why the session stops
    state: GroupState
    left: tuple[str, ...] = ()  # groups and memory that the test has left behind, in words


class CallDone(NamedTuple):
    """The rank has called a function: ``result`` is pickled, ``error`` a traceback."""

    result: bytes | None
    error: str | None
    output: str
    facts: tuple[Mapping[str, Any], ...]
    warnings: tuple[WarningRecord, ...]
    state: GroupState


class Stopped(NamedTuple):
    """The rank has ended its session; ``problems`` are hooks and fixtures that failed in that."""

    problems: tuple[str, ...] = ()


class Ended(NamedTuple):
    """The end of a rank: how it ended, in words, and the last output that it wrote."""

    how: str
    last_words: str


class StartTeam(NamedTuple):
    """Fork this node's ranks of a team of ``size``; each rank answers ``Started``.

    The name of the ``team`` is the place where its ranks meet.
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
    """A rank's message, ``Ended`` if it is gone; without a rank, the stacks that were asked for."""

    team: str
    rank: int | None
    message: Any


class Over(NamedTuple):
    """The run is over: leave, with that exit status."""

    status: int


_LENGTH = struct.Struct("=Q")
_READ_AT_ONCE = 2**16  # bytes that a pipe of Linux holds


class Channel:
    """One end of two pipes between the parent and a rank, which carry messages of any length.

    Not a socket: a process that waits to read from one is woken, for nothing, each time that the
    other side has read from it, so every rank would wake once more in every test. Not a
    ``multiprocessing.connection.Connection`` either, which needs a second read for the length.
    """

    def __init__(self, incoming: int, outgoing: int, send_limit: float | None = None) -> None:
        """``send_limit`` is how many seconds a message may wait for the other end to read on."""
        self._incoming, self._outgoing = incoming, outgoing
        self._buffer = bytearray()
        self._send_limit = send_limit
        if send_limit is not None:
            os.set_blocking(outgoing, False)

    def fileno(self) -> int:
        """Return the file to poll: readable when a message comes or the other end is closed."""
        return self._incoming

    def has_message(self) -> bool:
        """Return whether a whole message has been read already.

        Such a message came together with the one before, so the file does not become readable.
        """
        if len(self._buffer) < _LENGTH.size:
            return False
        return len(self._buffer) >= self._end_of_message()

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
        """Return the next message; waits for it.

        Raises:
            EOFError: the other end is closed, and no whole message is left.
        """
        while not self.has_message():
            self.read()
        end = self._end_of_message()
        message = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return message

    def read(self) -> None:
        """Read what has come, at most as much as fits into a pipe; waits if nothing has.

        Raises:
            EOFError: the other end is closed.
        """
        some = os.read(self._incoming, _READ_AT_ONCE)
        if not some:
            raise EOFError
        self._buffer += some

    def _end_of_message(self) -> int:
        """Return where the first message in the buffer ends."""
        return _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0])

    def close(self) -> None:
        for fd in {self._incoming, self._outgoing} - {-1}:
            os.close(fd)
        self._incoming = self._outgoing = -1


def fd_pairs() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the file descriptors of both ends of a new channel, each (incoming, outgoing)."""
    one_in, other_out = os.pipe()
    other_in, one_out = os.pipe()
    return (one_in, one_out), (other_in, other_out)
