"""Pressures: what a result must not depend on, changed around a run of a function.

Each is a context, or where that cannot be, a way to call the function. One that cannot be applied here raises
``NotJudged``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pytest_gtrainer._torch.process import compiles, forget_all_compiled, fresh_cache, keep_stream_busy
from pytest_gtrainer.numerics.entries import Tensors, entries
from pytest_gtrainer.numerics.record import Key
from pytest_gtrainer.numerics.seeds import random_states_kept

Kept = dict[str, torch.Tensor]
Function = Callable[[], Tensors]
_POOL = 32  # streams of one priority that torch has for a device


class NotJudged(Exception):
    """A pressure that cannot be applied here; the message says why."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Something on which a result must not depend.

    Attributes:
        name: for reports.
        run: calls the function under pressure; its result, kept.
    """

    name: str
    run: Callable[[Function], Kept]


def kept(value: Tensors) -> Kept:
    """Copies of all tensors, by name."""
    return {_name(key): tensor.detach().clone() for key, tensor in entries(value).items()}


def _name(key: Key) -> str:
    return key.name if not key.phase else f"step {key.step}, rank {key.rank}, {key.phase} of {key.name}"


def once(function: Function) -> Kept:
    with random_states_kept():
        return kept(function())


def inside(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[[Function], Kept]:
    """A pressure that is one run inside of a context."""

    def run(function: Function) -> Kept:
        with context():
            return once(function)

    return run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Operators run on ``count`` threads; not judged where the first run had as many."""
    before = torch.get_num_threads()
    if before == count:
        raise NotJudged(f"the first run had {count} already")
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_addresses() -> Iterator[None]:
    """Blocks of many sizes are taken before the run, every second one is given back: new ones come to lie elsewhere."""
    sizes = [64 * 3**power for power in range(12) for _ in range(4)]
    blocks: list[torch.Tensor | None] = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        blocks += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for index in range(0, len(blocks), 2):
        blocks[index] = None
    yield
    del blocks


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process takes the time of a core, and ends with this one."""
    busy = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent: sum(range(20000))"
    with subprocess.Popen([sys.executable, "-S", "-c", busy, str(os.getpid())]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def fresh_inductor_cache() -> Iterator[None]:
    """All is compiled anew, into an empty folder; not judged where nothing was compiled."""
    if not compiles():
        raise NotJudged("nothing was compiled: torch.compile is not loaded")
    forget_all_compiled()
    try:
        with fresh_cache():
            yield
    finally:
        forget_all_compiled()  # what was compiled in there refers to files that are gone


@contextmanager
def stream_jitter() -> Iterator[None]:
    """The run goes to a stream of its own, and what it takes of torch's streams is late by irregular times.

    ``torch.cuda.Stream()`` hands out the streams of a pool in turn, one pool a priority; here each of them first has
    to sleep for up to 4 million cycles, about 2 ms. Work that waits for its inputs gives the same bits all the same.
    """
    if not torch.cuda.is_available():
        raise NotJudged("needs a GPU")
    if not torch.cuda.is_initialized():
        raise NotJudged("the run does not use CUDA")
    torch.cuda.synchronize()  # what came before the run is none of its business
    for index in range(_POOL):
        for priority in (0, -1):
            with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                keep_stream_busy(1_000_000 * (3 * index % 4 + 1))
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        torch.cuda.synchronize()
