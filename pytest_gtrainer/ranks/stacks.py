"""What ranks answer to a signal while their tests run: their Python stacks, and the collectives they have called.

A thread of the rank answers, holding the GIL: whoever else walks a stack, as a signal handler does, may read a frame
that is being pushed or popped, and the rank dies of it (cpython #116008; seen once in some thousand tests). A rank that
holds the GIL in C++ cannot answer. When its team is about to be killed anyway, its faulthandler may try: the "dump".
"""

from __future__ import annotations

import json
import linecache
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType

STACK_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
CALLS_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
DUMP_SIGNAL = signal.SIGRTMAX - 4 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
STOPPED = "stopped by a signal, as SIGSTOP is one"
WAIT_SECONDS = 1.0
LIMIT = 2**20

_HEAD = "Stack (most recent call first):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
# Frames that only hand a call on, and the files in which collectives are called.
_WRAPPERS = ("torch/distributed/c10d_logger.py", "torch/_ops.py", "torch/_compile.py")
_COLLECTIVES = (
    *_WRAPPERS,
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)


def file_of(folder: str | Path, rank: int, what: str) -> Path:
    """Where a rank's "answers" go, stacks and calls as JSON, a line each; its faulthandler's "dump"; in its "log" what
    pytest does not capture."""
    return Path(folder) / f"rank{rank}.{what}"


_ASKED = {
    "stack": (STACK_SIGNAL, "answers", '"'),
    "calls": (CALLS_SIGNAL, "answers", "{"),
    "dump": (DUMP_SIGNAL, "dump", _HEAD),
}
"""What ranks can be asked for: the signal, where the answer comes, how it begins."""


def fatal_error(file: Path) -> str:
    """What a rank's faulthandler wrote as it died; "" if it died in another way."""
    text = _read_from(file, 0)
    start = text.rfind("Fatal Python error")
    return readable(text[start:]) if start >= 0 else ""


def take_answers(
    kind: str, ranks: Collection[int], folder: str | Path, ask: Callable[[int, int], None]
) -> dict[int, str]:
    """Ask ranks for one kind of answer, each by its signal: rank to text, "" for one that did not answer."""
    signum, place, start = _ASKED[kind]
    files = {rank: file_of(folder, rank, place) for rank in ranks}
    before = {rank: file.stat().st_size if file.exists() else 0 for rank, file in files.items()}
    for rank in ranks:
        ask(rank, signum)
    end, texts = time.monotonic() + WAIT_SECONDS, dict.fromkeys(ranks, "")
    while not all(texts.values()) and time.monotonic() < end:
        time.sleep(0.03)
        texts = {rank: _answer(_read_from(file, before[rank]), kind, start) for rank, file in files.items()}
    return texts


def _answer(text: str, kind: str, start: str) -> str:
    """The last whole answer that begins so; a late one of the other kind may stand beside it."""
    _, begun, rest = f"\n{text}".rpartition(f"\n{start}")
    line, whole, more = rest.partition("\n")
    if not begun or not whole or (kind == "dump" and not more.endswith("\n")):
        return ""
    if kind == "dump":
        return start + rest
    return str(json.loads(start + line)) if kind == "stack" else start + line


def _read_from(file: Path, offset: int) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(LIMIT).decode(errors="replace")
    except OSError:
        return ""


def stacks_text(frames: Mapping[int, FrameType], main: int | None, own: int) -> str:
    """The stacks of a process as faulthandler writes them, the main thread's first, without the ``own`` one."""
    texts: dict[int, str] = {}
    for thread in frames.keys() - {own}:
        lines, frame = [_HEAD if thread == main else "Another thread:"], frames.get(thread)
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        texts[thread] = "\n".join(lines)
    return "\n\n".join(texts[each] for each in sorted(texts, key=lambda each: each != main))


def waiting_in(text: str) -> str | None:
    r"""The collective that the main thread is in, None if it is elsewhere.

    >>> waiting_in('Stack (most recent call first):\n'
    ...            '  File "/x/torch/distributed/distributed_c10d.py", line 9 in barrier\n'
    ...            '  File "/x/torch/distributed/c10d_logger.py", line 8 in wrapper\n'
    ...            '  File "/u/test_it.py", line 3 in test_it\n')
    'barrier'
    """
    frames = _main_frames(text)
    if (
        frames
        and "/torch/" not in frames[0]["file"]
        and ".wait(" in linecache.getline(frames[0]["file"], int(frames[0]["line"]))
    ):
        return "wait"  # of a work, which is C++
    return collective_of([(match["file"], match["function"]) for match in frames])


def may_wait(text: str) -> bool:
    """Whether the main thread is in a collective, or in an operator, which may wait for one."""
    return waiting_in(text) is not None or any(match["file"].endswith(_WRAPPERS) for match in _main_frames(text)[:1])


def main_thread(text: str) -> str:
    return text.partition("\n\n")[0]


def whereabouts(text: str) -> str:
    r"""Where the main thread is, to be added to a sentence.

    >>> whereabouts('Stack (most recent call first):\n'
    ...             '  File "/u/test_it.py", line 3 in test_it\n')
    ', at test_it.py:3 in test_it'
    """
    if text.startswith(STOPPED):
        return f", {STOPPED}"
    waits = waiting_in(text)
    if waits:
        return f", waiting in {waits}"
    for frame in _main_frames(text)[:1]:
        return f", at {Path(frame['file']).name}:{frame['line']} in {frame['function']}"
    return ""


def readable(text: str) -> str:
    """Stacks without pytest's and our own frames below the test, and without the thread that answers."""
    threads = (
        each for each in text.rstrip().split("\n\n") if not re.search("in _answer_parent|Extension modules", each)
    )
    return "\n\n".join(re.split(r"\n.*/_pytest/python\.py", each)[0] for each in threads) or "no answer"


def _main_frames(text: str) -> list[re.Match[str]]:
    return [match for line in main_thread(text).splitlines() if (match := _FRAME.match(line))]


def collective_of(frames: list[tuple[str, str]]) -> str | None:
    """The collective that was called, from (file, function) pairs, innermost first.

    >>> collective_of([("/x/torch/nn/linear.py", "forward"), ("/u/test_it.py", "test_it")])
    >>> collective_of([("/x/torch/distributed/fsdp/_state.py", "wait"), ("/u/test_it.py", "test_it")])
    'wait'
    """
    inside = [(file, function) for file, function in frames[: depth_of_collective(frames)]]
    named = [function for file, function in inside if not file.endswith(_WRAPPERS)]
    if named:
        return named[-1]
    # A work's wait() is C++ called by whoever holds the work: FSDP, for example.
    if frames and "/torch/distributed/" in frames[0][0]:
        return frames[0][1]
    return None


def depth_of_collective(frames: list[tuple[str, str]]) -> int:
    """How many of the innermost frames belong to the collective call itself."""
    return next((n for n, (file, _) in enumerate(frames) if not file.endswith(_COLLECTIVES)), len(frames))
