"""Python stacks of ranks, taken from outside by a signal, also from a rank that hangs in C++.

The rank's faulthandler appends its stacks to a file; here they are asked for and read.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
WAIT_SECONDS = 1.0
LIMIT = 6000

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line \d+ in (?P<function>.+)$')
# Frames of torch that only hand a call on.
_WRAPPERS = ("c10d_logger.py", "_dynamo/", "contextlib.py", "utils/_contextlib.py")


def stack_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.stacks"


def take_stacks(files: Mapping[int, Path], ask: Callable[[int], None]) -> dict[int, str]:
    """Ask every rank in ``files`` for its stacks: rank to text, "" for one that did not answer."""
    before = {rank: _size(file) for rank, file in files.items()}
    for rank in files:
        ask(rank)
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        time.sleep(0.03)
        texts = {rank: _read_from(file, before[rank]) for rank, file in files.items()}
        if all(_is_whole(text) for text in texts.values()):
            break
    return texts


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_from(file: Path, offset: int) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(LIMIT * 4).decode(errors="replace")
    except OSError:
        return ""


def _is_whole(text: str) -> bool:
    """Whether the last thread of a dump is in: the thread that got the signal comes last."""
    current = text.rfind("Current thread ")
    return current >= 0 and "File " in text[current:] and text.endswith("\n")


def waiting_in(text: str) -> str | None:
    """The torch.distributed function that the main thread is in, None if it is elsewhere.

    >>> waiting_in('Current thread 0x1 (most recent call first):\\n'
    ...            '  File "/x/torch/distributed/distributed_c10d.py", line 9 in barrier\\n'
    ...            '  File "/x/torch/distributed/c10d_logger.py", line 8 in wrapper\\n'
    ...            '  File "/home/u/test_it.py", line 3 in test_it\\n')
    'barrier'
    """
    current = text.rfind("Current thread ")
    frames = [match for line in text[max(current, 0) :].splitlines() if (match := _FRAME.match(line))]
    return distributed_call([(match["file"], match["function"]) for match in frames])


def distributed_call(frames: list[tuple[str, str]]) -> str | None:
    """The function of torch.distributed that user code called, from (file, function) innermost first.

    >>> distributed_call([("/x/torch/_ops.py", "__call__"), ("/u/test_it.py", "test_it")])
    """
    found = None
    for file, function in frames:
        path = file.replace("\\", "/")
        if "/torch/" not in path:
            break
        if "/torch/distributed/" in path and not any(wrapper in path for wrapper in _WRAPPERS):
            found = function
    return found
