"""Answers of ranks to a signal while their tests run: Python stacks, calls of collectives, output.

A thread of the rank answers, holding the GIL. A signal handler that walks a stack may read a frame
that is being pushed or popped, and the rank dies of it (cpython #116008; seen once in some thousand
tests). A rank that holds the GIL in C++ cannot answer. When its team is about to be killed anyway,
its faulthandler may try: the "dump".

A *call* is a collective that a rank has issued on a group, as torch records it; its *number* counts
the calls on that group. A rank *lacks* a call if its own last call has a lower number.
"""

import json
import linecache
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pytest_gtrainer.worlds import by_value, ranks_by, ranks_text

_LAST = getattr(signal, "SIGRTMAX", signal.SIGTERM)  # ranks need Linux, which has the first
STACK_SIGNAL, CALLS_SIGNAL, DUMP_SIGNAL, OUTPUT_SIGNAL = _LAST - 2, _LAST - 3, _LAST - 4, _LAST - 5
STOPPED = "stopped by a signal, as SIGSTOP is one"
WAIT_SECONDS = 1.0
LIMIT = 2**20

_HEAD = "Stack (most recent call first):"
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in (.+)$', re.MULTILINE)
# Frames that only hand a call on, and the files in which collectives are called.
_WRAPPERS = (
    "torch/distributed/c10d_logger.py",
    "torch/_ops.py",
    "torch/_compile.py",
    "pytest_gtrainer/ranks/inside/messages.py",
)
_COLLECTIVES = (
    *_WRAPPERS,
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_ASKED = {
    "stack": (STACK_SIGNAL, "answers", '"'),
    "calls": (CALLS_SIGNAL, "answers", "{"),
    "output": (OUTPUT_SIGNAL, "answers", "["),
    "dump": (DUMP_SIGNAL, "dump", _HEAD),
}
"""What ranks can be asked for: the signal, where the answer comes, how it begins."""


def file_of(folder: str | Path, rank: int, what: str) -> Path:
    """Return the path of a rank's file.

    These are "answers", with a line of JSON for each; "dump", which faulthandler writes; and "log",
    the output that pytest does not capture.
    """
    return Path(folder) / f"rank{rank}.{what}"


def fatal_error(file: Path) -> str:
    """Return what a rank's faulthandler wrote as it died; "" if it died in another way."""
    text = _read_from(file, 0)
    start = text.rfind("Fatal Python error")
    return without_pytest_frames(text[start:]) if start >= 0 else ""


def take_answers(
    kind: str, ranks: Collection[int], folder: str | Path, ask: Callable[[int, int], None]
) -> dict[int, str]:
    """Ask ranks for one kind of answer; return the texts by rank, "" if a rank did not answer.

    ``ask(rank, signum)`` sends a signal to a rank.
    """
    signum, place, start = _ASKED[kind]
    files = {rank: file_of(folder, rank, place) for rank in ranks}
    # Earlier answers stand in the same file.
    sizes = {}
    for rank, file in files.items():
        sizes[rank] = file.stat().st_size if file.exists() else 0
    for rank in ranks:
        ask(rank, signum)
    end = time.monotonic() + WAIT_SECONDS
    texts = dict.fromkeys(ranks, "")
    while not all(texts.values()) and time.monotonic() < end:
        time.sleep(0.03)
        for rank, file in files.items():
            texts[rank] = _answer(_read_from(file, sizes[rank]), kind, start)
    return texts


def _answer(text: str, kind: str, start: str) -> str:
    """Return the last whole answer that begins with ``start``.

    A late answer of another kind may stand beside it.
    """
    _, begun, rest = f"\n{text}".rpartition(f"\n{start}")
    line, whole, more = rest.partition("\n")
    if not begun or not whole or (kind == "dump" and not more.endswith("\n")):
        return ""
    answer = start + (rest if kind == "dump" else line)
    if kind == "output":
        return str(json.loads(answer)[0])
    return str(json.loads(answer)) if kind == "stack" else answer


def _read_from(file: Path, offset: int) -> str:
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(LIMIT).decode(errors="replace")
    return ""


def stacks_text(frames: Mapping[int, FrameType], main: int | None, own: int) -> str:
    """Return the stacks of a process as faulthandler writes them.

    The main thread's comes first; that of the thread ``own``, which asks, is left out.
    """
    texts = []
    for thread in sorted(frames.keys() - {own}, key=lambda each: each != main):
        lines = [_HEAD if thread == main else "Another thread:"]
        for frame, line in traceback.walk_stack(frames[thread]):
            lines.append(
                f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
            )
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def waiting_in(text: str) -> str | None:
    """Return the collective that the main thread is in, None if it is elsewhere."""
    frames = _main_frames(text)
    for file, line, _ in frames[:1]:
        if "/torch/" not in file and ".wait(" in linecache.getline(file, int(line)):
            return "wait"  # of a work, which is C++
    return collective_of([(file, function) for file, _, function in frames])


def may_wait(text: str) -> bool:
    """Return whether the main thread is in a collective or an operator, which may wait for one."""
    if waiting_in(text) is not None:
        return True
    frames = _main_frames(text)
    return bool(frames) and frames[0][0].endswith(_WRAPPERS)


def main_thread(text: str) -> str:
    return text.partition("\n\n")[0]


def whereabouts(text: str) -> str:
    """Return where the main thread is, to be added to a sentence.

    It is at the innermost frame that is neither torch's nor Python's.

    >>> torch_frame = '  File "/x/torch/nn/functional.py", line 9 in linear\\n'
    >>> whereabouts(torch_frame + '  File "/u/model.py", line 3 in forward\\n')
    ', at model.py:3 in forward'
    """
    if text.startswith(STOPPED):
        return f", {STOPPED}"
    collective = waiting_in(text)
    if collective:
        return f", waiting in {collective}"
    frames = _main_frames(text)
    if not frames:
        return ""
    innermost = frames[0]
    for frame in frames:
        if not re.search(r"/torch/|/python3\.\d+/(?!site-packages/)", frame[0]):
            innermost = frame
            break
    file, line, name = innermost
    return f", at {Path(file).name}:{line} in {name}"


def without_pytest_frames(text: str) -> str:
    """Return stacks without the frames of pytest and of this package that call the test.

    The thread that answers is left out, too.
    """
    # pytest calls a test from the first file, and imports a conftest file from the second.
    below = r"\n.*/_pytest/(?:python|assertion/rewrite)\.py"
    threads = []
    for each in text.rstrip().split("\n\n"):
        if not re.search("in _answer_parent|Extension mod", each):
            threads.append(re.split(below, each)[0])
    return "\n\n".join(threads) or "no answer"


def _main_frames(text: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of every frame of the main thread, innermost first."""
    return _FRAME.findall(main_thread(text))


def collective_of(frames: list[tuple[str, str]]) -> str | None:
    """Return the collective that a stack is in, None if it is in none.

    ``frames`` are pairs of file and function, innermost first.

    >>> fsdp_frame = ("/x/torch/distributed/fsdp/_state.py", "wait")
    >>> collective_of([fsdp_frame, ("/u/test_it.py", "test_it")])
    'wait'
    """
    # The outermost frame of the collective is the function that the user called.
    for file, function in reversed(frames[: depth_of_collective(frames)]):
        if not file.endswith(_WRAPPERS):
            return function
    # A work's wait() is C++ called by whoever holds the work: FSDP, for example.
    if frames and "/torch/distributed/" in frames[0][0]:
        return frames[0][1]
    return None


def depth_of_collective(frames: list[tuple[str, str]]) -> int:
    """Return how many of the innermost frames belong to the collective call itself."""
    for depth, (file, _) in enumerate(frames):
        if not file.endswith(_COLLECTIVES):
            return depth
    return len(frames)


# Collectives whose ranks must give equally many elements of one dtype; others, in which splits may
# differ, and only the dtype must be the same. Of the rest, some ranks give nothing.
_ALIKE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_OF_ONE_DTYPE = ("all_to_all", "gather")
KEPT = 64  # the most of its last calls on a group that a rank answers with


class Call(NamedTuple):
    """A collective of one rank, called at the user's line ``place``; ``pending`` until it ends."""

    op: str
    dtype: str
    shape: Sequence[int]
    elements: int
    place: str
    pending: bool

    def kind(self) -> tuple[object, ...]:
        """Return what must be the same on every rank."""
        if self.op in _ALIKE:
            return (self.op, self.dtype, self.elements)
        if self.op in _OF_ONE_DTYPE:
            return (self.op, self.dtype)
        return (self.op,)

    def __str__(self) -> str:
        tensor = f" of {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{self.op}{tensor} at {self.place}"


class GroupCalls(NamedTuple):
    """The calls of a rank on a group of ``ranks``.

    ``last`` is the number of the last call, ``first`` that of the first one of this test; ``calls``
    are the last ones of this test.
    """

    label: str
    ranks: Sequence[int]
    last: int
    first: int
    calls: Mapping[int, Call]


Calls = Mapping[int, Mapping[str, GroupCalls]]  # by rank, its groups by their name


def read_calls(texts: Mapping[int, str]) -> Calls:
    """Return the calls that ranks answered with.

    A rank that did not answer, or not to the end, is missing.
    """
    found: dict[int, dict[str, GroupCalls]] = {}
    for rank, text in texts.items():
        if not text.endswith("}"):
            continue
        found[rank] = {}
        for name, (label, ranks, last, first, calls) in json.loads(text).items():
            by_number = {number: Call(*call) for number, *call in calls}
            found[rank][name] = GroupCalls(label, ranks, last, first, by_number)
    return found


def _by_group(
    calls: Calls,
) -> Iterator[tuple[str, dict[int, GroupCalls], dict[int, dict[int, Call]]]]:
    """Yield each group's name, the calls of each of its ranks, and its calls by number and rank."""
    by_group: dict[str, dict[int, GroupCalls]] = {}
    for rank, groups in sorted(calls.items()):
        for name, group in groups.items():
            by_group.setdefault(name, {})[rank] = group
    for name, on in by_group.items():
        issued: dict[int, dict[int, Call]] = {}
        for rank, group in on.items():
            for number, call in group.calls.items():
                issued.setdefault(number, {})[rank] = call
        yield name, on, dict(sorted(issued.items()))


def never_ending(calls: Calls, waiting: Collection[int]) -> str | None:
    """Return why the ``waiting`` ranks wait for ever; None if that is not certain.

    It is certain if each is in a call that another rank lacks or has called otherwise, and that
    rank has ended or waits for ever, too.
    """
    differing = differing_call(calls)
    stuck = [_stuck_calls(calls, rank) for rank in waiting]
    if not all(stuck):
        return None
    if differing is not None:
        return differing
    name, number = min(place for places in stuck for place in places)
    on, issued = next((on, issued) for each, on, issued in _by_group(calls) if each == name)
    inside = list(issued[number])
    lacking = [rank for rank, group in on.items() if group.last < number]
    ended = [rank for rank in lacking if rank not in waiting]
    why = []
    if ended:
        why.append(f"{ranks_text(ended)} ended without it")
    else:
        for rank in lacking:
            why.append(f"rank {rank} waits in {_first_pending(calls[rank]) or 'no call'}")
    where = f"{on[inside[0]].calls[number]} on {on[inside[0]].label}"
    wait = "waits" if len(inside) == 1 else "wait"
    return f"{ranks_text(inside)} {wait} in {where}: {', '.join(why)}{_parting(on, issued, number)}"


def _first_pending(groups: Mapping[str, GroupCalls]) -> Call | None:
    for group in groups.values():
        for call in group.calls.values():
            if call.pending:
                return call
    return None


def called_by_some(calls: Calls) -> str:
    """Return the first call that other ranks of its group lack, to be added to a sentence."""
    for _, on, issued in _by_group(calls):
        for number, own in issued.items():
            if any(group.last < number for group in on.values()):
                called = f"{ranks_text(own)} alone called {next(iter(own.values()))}"
                return f"; {called}{_parting(on, issued, number)}"
    return ""


def differing_call(calls: Calls) -> str | None:
    """Return the first call that ranks of a group issued differently.

    That is another collective, dtype, or number of elements.
    """
    for _, on, issued in _by_group(calls):
        for number, own in issued.items():
            kinds = ranks_by((rank, call.kind()) for rank, call in own.items())
            if len(kinds) > 1:
                sides = sorted(kinds.values(), key=len)
                text = ", ".join(f"{ranks_text(side)} called {own[side[0]]}" for side in sides)
                group = on[sides[0][0]]
                return f"{text}, as call {number - group.first + 1} of this test on {group.label}"
    return None


def _stuck_calls(calls: Calls, rank: int) -> list[tuple[str, int]]:
    """Return the calls that a rank is in and another one lacks, or has issued differently.

    Each by its group and number.
    """
    found = []
    for name, own in calls.get(rank, {}).items():
        others = [calls[other][name] for other in own.ranks if name in calls.get(other, {})]
        for number, call in own.calls.items():
            lacked = any(
                other.last < number or other.calls.get(number, call).kind() != call.kind()
                for other in others
            )
            if call.pending and lacked:
                found.append((name, number))
    return found


def _parting(
    on: Mapping[int, GroupCalls], issued: Mapping[int, Mapping[int, Call]], before: int
) -> str:
    """Return where the ranks of a group first called from different lines before a call."""
    for number, own in issued.items():
        if number < before and len({call.place for call in own.values()}) > 1:
            nth = number - on[min(own)].first + 1
            places = {rank: call.place for rank, call in own.items()}
            return f"; they part at call {nth} of this test: {by_value(places)}"
    return ""
