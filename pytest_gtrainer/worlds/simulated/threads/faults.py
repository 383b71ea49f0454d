"""What goes wrong on a team of threads, in words: disagreement, standstill, time limits, stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.threads.team import Team

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_MOST_STACKS = 6
_MOST_FRAMES = 12


class Standstill(AssertionError):
    """Every rank that has not ended waits for another one."""


class TimeLimit(AssertionError):
    """A rank ran for too long without coming to a collective or to its end."""


class NotOnThreads(RuntimeError):
    """Something that ranks on threads must not do, tracing and compiling above all."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> ranks_text([3]), ranks_text([5, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 5')
    """
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(texts)


def standstill(team: Team) -> Standstill:
    """The error for a team in which nobody can run."""
    return Standstill(f"no rank can go on: {_situation(team)}\n\n{stacks(team)}")


def time_limit(team: Team, seconds: float) -> TimeLimit:
    """The error for a team of which one rank keeps the turn for longer than ``seconds``."""
    return TimeLimit(
        f"a rank ran for {seconds:g} seconds without coming to a collective: {_situation(team)}\n\n{stacks(team)}"
    )


def _situation(team: Team) -> str:
    frames = _frames(team)
    doing = dict.fromkeys(range(team.size), "waiting for its turn")
    doing |= {rank: f"{event}{_whereabouts(frames.get(rank))}" for rank, event in team.waiting.items()}
    if team.running is not None:
        doing[team.running] = f"running{_whereabouts(frames.get(team.running))}"
    doing |= dict.fromkeys(team.ended, "ended")
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in _by_text(doing).items()]
    return "; ".join(lines)


def stacks(team: Team) -> str:
    """The Python stacks of all ranks that have not ended, equal ones once, outermost call first."""
    frames = _frames(team)
    texts = {rank: _stack(frame) for rank, frame in frames.items() if rank not in team.ended}
    groups = [(text, ranks) for text, ranks in _by_text(texts).items() if text]
    parts = [f"--- {ranks_text(ranks)} ---\n{text}" for text, ranks in groups[:_MOST_STACKS]]
    if len(groups) > _MOST_STACKS:
        parts.append(f"... and {len(groups) - _MOST_STACKS} more")
    return "\n".join(parts)


def _by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups


def _frames(team: Team) -> dict[int, FrameType]:
    current = sys._current_frames()
    return {rank: current[thread] for rank, thread in sorted(team.threads.items()) if thread in current}


def _stack(frame: FrameType) -> str:
    """The frames of the function that the rank runs; of torch's the innermost, which is the collective."""
    function = dropwhile(_is_not_the_functions, traceback.extract_stack(frame))
    inner = list(takewhile(lambda entry: not _is_here(entry.filename), function))
    shown = [entry for entry in inner[:-1] if not entry.filename.startswith(_TORCH)] + inner[-1:]
    return "".join(traceback.format_list(shown[-_MOST_FRAMES:]))


def _is_not_the_functions(entry: traceback.FrameSummary) -> bool:
    return _is_here(entry.filename) or entry.filename == threading.__file__


def _whereabouts(frame: FrameType | None) -> str:
    """The innermost line that belongs neither to torch nor to us, to be added to a sentence."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_TORCH, "<")) or _is_here(name) or name == threading.__file__):
            return f", at {Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def is_ours(frame: FrameType) -> bool:
    """Whether a thread is in a line of ours, or in a semaphore that one takes."""
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return _is_here(frame.f_code.co_filename)


def _is_here(filename: str) -> bool:
    return filename.startswith(_HERE)
