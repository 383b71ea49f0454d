"""What goes wrong on a team of threads, in words: standstill, time limits, stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType

import torch

from pytest_gtrainer.worlds.simulated.threads.team import ThreadTeam, is_here, ranks_text

_TORCH = str(Path(torch.__file__).parent)
_MOST_STACKS = 6
_MOST_FRAMES = 12


class Standstill(AssertionError):
    """Every rank that has not ended waits for another one."""


class TimeLimit(AssertionError):
    """A rank ran for too long without coming to a collective or to its end."""


def standstill(team: ThreadTeam) -> Standstill:
    """The error for a team in which nobody can run."""
    return Standstill(f"no rank can go on: {_situation(team)}\n\n{stacks(team)}")


def time_limit(team: ThreadTeam, seconds: float) -> TimeLimit:
    """The error for a team of which one rank keeps the turn for longer than ``seconds``."""
    return TimeLimit(
        f"a rank ran for {seconds:g} seconds without coming to a collective: {_situation(team)}\n\n{stacks(team)}"
    )


def _situation(team: ThreadTeam) -> str:
    frames = _frames(team)
    doing = dict.fromkeys(range(team.size), "waiting for its turn")
    doing |= {rank: f"{event}{_whereabouts(frames.get(rank))}" for rank, event in team.waiting.items()}
    if team.running is not None:
        doing[team.running] = f"running{_whereabouts(frames.get(team.running))}"
    doing |= dict.fromkeys(team.ended, "ended")
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in _by_text(doing).items()]
    return "; ".join(lines)


def stacks(team: ThreadTeam) -> str:
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


def _frames(team: ThreadTeam) -> dict[int, FrameType]:
    current = sys._current_frames()
    return {rank: current[thread] for rank, thread in sorted(team.threads.items()) if thread in current}


def _stack(frame: FrameType) -> str:
    """The frames of the function that the rank runs; of torch's the innermost, which is the collective."""
    entries = dropwhile(lambda entry: is_here(entry.filename) or entry.filename == threading.__file__,
                        traceback.extract_stack(frame))  # fmt: skip
    inner = list(takewhile(lambda entry: not is_here(entry.filename), entries))
    shown = [entry for entry in inner[:-1] if not entry.filename.startswith(_TORCH)] + inner[-1:]
    return "".join(traceback.format_list(shown[-_MOST_FRAMES:]))


def _whereabouts(frame: FrameType | None) -> str:
    """The innermost line that belongs neither to torch nor to us, to be added to a sentence."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_TORCH, "<")) or is_here(name) or name == threading.__file__):
            return f", at {Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
