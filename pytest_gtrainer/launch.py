"""How torchrun has started this process; read without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

_NEEDED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCH = pytest.StashKey["Launch | None"]()


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that torchrun has started.

    Attributes:
        local_rank: among the ``local_size`` processes of the same node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that owns the tests and reports for all."""
        return self.rank == 0

    @property
    def is_beside_the_driver(self) -> bool:
        """Whether it is on rank 0's node; torchrun counts ranks node by node."""
        return self.rank == self.local_rank

    @property
    def watched(self) -> tuple[int, ...]:
        """The ranks of the same node whose end this process is to notice.

        The next one in a circle; rank 0, which reports, sees all of its node, so that each has two who may see how it
        ends before torchrun forgets it.
        """
        first = self.rank - self.local_rank
        if self.leads:
            return tuple(range(1, self.local_size))
        return (first + (self.local_rank + 1) % self.local_size,) if self.local_size > 1 else ()


def read(environ: Mapping[str, str]) -> Launch | None:
    """The launch that the environment tells of, None without torchrun.

    >>> read({"RANK": "3"})
    >>> read(dict.fromkeys(_NEEDED, "1"))
    Launch(rank=1, size=1, local_rank=1, local_size=1)
    """
    if not all(name in environ for name in _NEEDED):
        return None
    return Launch(*(int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def of(config: pytest.Config) -> Launch | None:
    """The launch of this pytest process: None without torchrun, and in the session of a rank."""
    if _LAUNCH not in config.stash:
        is_worker = hasattr(config, "workerinput")
        config.stash[_LAUNCH] = None if is_worker else read(os.environ)
    return config.stash[_LAUNCH]


def check(config: pytest.Config) -> None:
    """Refuse what cannot be had under torchrun.

    Raises:
        pytest.UsageError: in one sentence.
    """
    launch = of(config)
    if launch is not None and (config.getoption("tx", None) or config.getoption("numprocesses", None)):
        raise pytest.UsageError(
            f"torchrun has started the {launch.size} ranks of this run, and xdist would start processes of its own: "
            "leave out -n and --dist"
        )
