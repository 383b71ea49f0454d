"""Messages between the parent and a rank arrive whole and in order, and wake nobody but who waits
for them.
"""

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_gtrainer.ranks.wire import Channel, fd_pairs

Ends = tuple[Channel, Channel]
Action = Callable[[], object]
LARGE = 5 * 2**20  # many times what a pipe holds


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = (Channel(*fds) for fds in fd_pairs())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    one, other = ends
    for message in (b"first", b"", b"third"):
        one.send(message)
    other.send(b"answer")
    assert [other.receive() for _ in range(3)] == [b"first", b"", b"third"]
    assert one.receive() == b"answer"


def test_a_message_that_came_with_another_is_told(ends: Ends) -> None:
    """Both are read at once, so the file does not say that there is a second one."""
    one, other = ends
    assert not other.has_message()
    one.send(b"first")
    one.send(b"second")
    assert other.receive() == b"first"
    assert other.has_message()
    assert other.receive() == b"second"
    assert not other.has_message()


def test_a_message_may_be_longer_than_the_pipe(ends: Ends) -> None:
    one, other = ends
    message = os.urandom(LARGE)
    sender = threading.Thread(target=lambda: [one.send(message), one.send(b"next")])
    sender.start()
    assert other.receive() == message
    assert other.receive() == b"next"
    sender.join()


def test_a_limit_ends_a_send_that_nobody_reads() -> None:
    ours, theirs = fd_pairs()
    one, other = Channel(*ours, send_limit=0.2), Channel(*theirs)
    with pytest.raises(TimeoutError, match="does not read"):
        one.send(bytes(LARGE))
    one.close()
    other.close()


def test_a_limit_lets_a_message_be_longer_than_the_pipe() -> None:
    ours, theirs = fd_pairs()
    one, other = Channel(*ours, send_limit=60.0), Channel(*theirs)
    message = os.urandom(LARGE)
    sender = threading.Thread(target=one.send, args=(message,))
    sender.start()
    assert other.receive() == message
    sender.join()
    one.close()
    other.close()


def test_a_limit_is_in_seconds() -> None:
    """The other end may read late, as long as its pause is short enough."""
    ours, theirs = fd_pairs()
    one, other = Channel(*ours, send_limit=30.0), Channel(*theirs)
    received, message = list[bytes](), bytes(LARGE)

    def read_late() -> None:
        time.sleep(0.5)
        with suppress(EOFError):
            received.append(other.receive())

    reader = threading.Thread(target=read_late)
    reader.start()
    try:
        one.send(message)
    finally:
        one.close()
        reader.join()
    assert received == [message]
    other.close()


def test_the_end_of_the_other_side_is_the_end(ends: Ends) -> None:
    one, other = ends
    one.send(b"last")
    one.close()
    assert other.receive() == b"last"
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        other.send(b"to nobody")


@pytest.mark.parametrize(
    "sent", [3, 8, 12], ids=["in the length", "after the length", "in the text"]
)
def test_an_end_in_the_middle_of_a_message_is_an_end(sent: int) -> None:
    (incoming, outgoing), (their_incoming, their_outgoing) = fd_pairs()
    ours = Channel(incoming, outgoing)
    os.write(their_outgoing, (10).to_bytes(8, "little")[:sent] + b"x" * max(0, sent - 8))
    os.close(their_outgoing)
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()
    os.close(their_incoming)


def test_a_closed_end_reads_no_other_file(ends: Ends) -> None:
    """The next file that is opened gets its number."""
    other = ends[1]
    other.close()
    incoming, outgoing = os.pipe()
    os.write(outgoing, b"somebody else's")
    with pytest.raises(OSError, match="Bad file descriptor"):
        other.receive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        other.send(b"")
    other.close()  # and closes none
    assert os.read(incoming, 100) == b"somebody else's"
    os.close(incoming)
    os.close(outgoing)


ROUNDS = 50


def wakes_of_a_reader(wait: Action, other_side: Action, release: Action) -> int:
    """Count how often a thread that waits to read is woken while the other side acts many times."""
    reader = threading.Thread(target=wait)
    reader.start()
    time.sleep(0.1)
    before = _switches(reader)
    for _ in range(ROUNDS):
        other_side()
        time.sleep(0.002)
    woken = _switches(reader) - before
    release()
    reader.join()
    return woken


def _switches(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("nonvoluntary_ctxt_switches")[0].split("voluntary_ctxt_switches:")[1])


def test_who_waits_is_not_woken_when_the_other_side_reads(ends: Ends) -> None:
    one, other = ends
    for _ in range(ROUNDS):
        other.send(b"answer")
    assert wakes_of_a_reader(other.receive, one.receive, lambda: one.send(b"command")) < ROUNDS / 5


def test_a_socket_pair_wakes_who_waits_when_the_other_side_reads() -> None:
    """The channel avoids this. It also shows that the test above can fail."""
    one, other = socket.socketpair()
    with one, other:
        for _ in range(ROUNDS):
            other.send(b"answer")
        woken = wakes_of_a_reader(
            lambda: other.recv(100), lambda: one.recv(6), lambda: one.send(b"command")
        )
    assert woken > ROUNDS / 5


@pytest.mark.gt_world("ranks", size=2)
def test_ranks_share_the_session_of_the_parent_and_not_its_process_group() -> None:
    """Linux shares the time of its cores by session (autogroup), and a terminal sends Ctrl-C to a
    process group.
    """
    forkserver = os.getppid()
    parent = int(Path(f"/proc/{forkserver}/stat").read_text().rpartition(")")[2].split()[1])
    assert os.getsid(0) == os.getsid(forkserver) == os.getsid(parent)
    assert len({os.getpgid(each) for each in (0, forkserver, parent)}) == 3


@pytest.mark.gt_world("ranks", size=2)
def test_programs_that_a_rank_starts_do_not_hold_its_channel() -> None:
    """Such a program may outlive the rank, whose death shows in the end of its channel."""
    parent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    shared = (
        _pipes(parent).keys() & _pipes(os.getpid()).keys()
    )  # gloo, and CUDA, have pipes of their own
    channel = [fd for pipe in shared for fd in _pipes(os.getpid())[pipe] if fd > 2]
    assert len(channel) >= 2
    assert not any(map(os.get_inheritable, channel))


def test_a_rank_that_its_world_does_not_have_says_so(tmp_path: Path) -> None:
    """gloo said "rank < size. 3 vs 2"."""
    from pytest_gtrainer.ranks.inside.rank import RankGroup

    with pytest.raises(
        ValueError, match=r"rank 3 cannot join a world of 2 ranks, which are 0\.\.1"
    ):
        RankGroup(3, "cpu", "nccl").join(str(tmp_path / "meet"), 2)


def _pipes(process: int) -> dict[str, list[int]]:
    """Return the pipe to which each descriptor of a process leads."""
    pipes: dict[str, list[int]] = defaultdict(list)
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            if (leads := os.readlink(link)).startswith("pipe:"):
                pipes[leads].append(int(link.name))
    return pipes
