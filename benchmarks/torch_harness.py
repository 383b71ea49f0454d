"""Torch's own harnesses with tests on ranks that do nothing: the yardsticks of ``benchmarks.ranks``.

    python -m benchmarks.torch_harness spawned      one test of MultiProcessTestCase
    python -m benchmarks.torch_harness continuous   for each line of stdin, as many of MultiProcContinuousTest

The latter answers each line with the seconds that each test took. BENCH_RANKS says how many ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest

from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase


class Continuous(MultiProcContinuousTest):
    """Ranks that stay, on a group that stays; no pytest in them."""

    world_size = int(os.environ.get("BENCH_RANKS", "2"))

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_empty(self) -> None:
        pass


class Spawned(MultiProcessTestCase):
    """New processes for every test."""

    @property
    def world_size(self) -> int:
        return int(os.environ.get("BENCH_RANKS", "2"))

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_empty(self) -> None:
        pass


def run(case: unittest.TestCase) -> float:
    """Seconds of one test; the first one of ``Continuous`` starts the ranks."""
    result = unittest.TestResult()
    start = time.perf_counter()
    case.run(result)
    seconds = time.perf_counter() - start
    assert result.wasSuccessful(), result.errors + result.failures
    return seconds


def serve() -> None:
    for line in sys.stdin:
        print(json.dumps([run(Continuous("test_empty")) for _ in range(int(line))]), flush=True)
    Continuous.tearDownClass()


if __name__ == "__main__":
    if sys.argv[1] == "continuous":
        serve()
    else:
        run(Spawned("test_empty"))
