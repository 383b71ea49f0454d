"""What ranks answer to a signal, also one that hangs in C++: their Python stacks, and the collectives they have called.

The rank's faulthandler appends the stack of its main thread to a file; a thread of the rank appends its calls, and the
stacks of its other threads, to another. Here they are asked for and read. The faulthandler must not walk the stack of
a thread that runs meanwhile: it would read frames that are gone, and the rank would die of it (cpython #116008).
"""

from __future__ import annotations

import linecache
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
CALLS_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
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
    """Where a rank's "stacks" go; its "calls", a line an answer; in its "log" what pytest does not capture."""
    return Path(folder) / f"rank{rank}.{what}"


def fatal_error(file: Path) -> str:
    """What a rank's faulthandler wrote as it died; "" if it died in another way."""
    text = _read_from(file, 0)
    start = text.rfind("Fatal Python error")
    threads = text[start:].split("\n\n") if start >= 0 else []
    return readable("\n\n".join(each for each in threads if "in _tell_calls" not in each)) if threads else ""


def take_answers(files: Mapping[int, Path], ask: Callable[[int], None]) -> dict[int, str]:
    """Ask every rank in ``files`` for its stacks, or its calls: rank to text, "" for one that did not answer."""
    before = {rank: file.stat().st_size if file.exists() else 0 for rank, file in files.items()}
    for rank in files:
        ask(rank)
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        time.sleep(0.03)
        texts = {rank: _read_from(file, before[rank]) for rank, file in files.items()}
        if all(_is_whole(text) for text in texts.values()):
            break
    return texts


def _read_from(file: Path, offset: int) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(LIMIT).decode(errors="replace")
    except OSError:
        return ""


def _is_whole(text: str) -> bool:
    """Whether the line of calls is, or the stack."""
    return text.endswith("\n") and (text[0] == "{" or "File " in text[text.rfind(_HEAD) :])


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
    return text[max(text.rfind(_HEAD), 0) :]


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
    """A stack without pytest's and our own frames below the test."""
    lines = text.rstrip().splitlines()
    below = next((n for n, line in enumerate(lines) if "/_pytest/python.py" in line), len(lines))
    return "\n".join(lines[:below]) or "no answer"


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
