"""Torch's own harnesses with tests on ranks that do nothing: the yardsticks of
``benchmarks.ranks``.

    python -m benchmarks.torch_harness spawned      one test of MultiProcessTestCase python -m
    benchmarks.torch_harness continuous   for each line of stdin, tests of MultiProcContinuousTest

A line is the name of a test and how many of it to run; the answer is the seconds that each took.
BENCH_RANKS says how many ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

VALUE = torch.ones(2**18)


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

    def test_all_reduce(self) -> None:
        dist.all_reduce(VALUE)


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
        name, count = line.split()
        print(json.dumps([run(Continuous(name)) for _ in range(int(count))]), flush=True)
    Continuous.tearDownClass()


if __name__ == "__main__":
    if sys.argv[1] == "continuous":
        serve()
    else:
        run(Spawned("test_empty"))
