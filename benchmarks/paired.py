"""Paired measurement: ours and the yardstick take turns in one process.

On a machine with other things to do a time says little; the ratio of two medians that
were measured in turns says a lot. Times are CPU seconds of the whole process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """``ours`` may cost at most ``limit`` times what ``yardstick`` costs."""

    ours: str
    yardstick: str
    limit: float


def measure(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds of each, by default of CPU; everyone runs once a round, and a first round is
    not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def report(
    times: Mapping[str, float], gibibytes: Mapping[str, float] | None, goals: list[Goal]
) -> bool:
    """Print times, throughput if it is one of memory, and goals; whether every goal is met."""
    for name, seconds in times.items():
        throughput = f" {gibibytes[name] / seconds:8.2f} GiB/s" if gibibytes else ""
        print(f"{name:<28} {seconds:8.4f} s{throughput}")
    met = True
    for goal in goals:
        ratio = times[goal.ours] / times[goal.yardstick]
        met &= ratio <= goal.limit
        word = "met" if ratio <= goal.limit else "MISSED"
        print(f"{goal.ours} / {goal.yardstick} = {ratio:.3f}, at most {goal.limit:.3g}: {word}")
    return met
