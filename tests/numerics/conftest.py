"""Fixtures of the numerics tests."""

from collections.abc import Callable

import pytest

from pytest_gtrainer import Record, facts
from tests.numerics.samples import make_run


@pytest.fixture(autouse=True)
def told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts that these tests provoke do not belong into the summary of the suite."""
    monkeypatch.setattr(facts, "_sinks", [])


@pytest.fixture
def run() -> Callable[..., Record]:
    """``run(world_size=2, steps=2, rank=None)``: the record of a made-up training run."""
    return make_run
