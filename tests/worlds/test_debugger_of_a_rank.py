"""``dist.breakpoint`` of a rank, in one process: where it stops, and whom it asks."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.inside import debugger

pytestmark = pytest.mark.gt_world("fake", size=4, rank=2)


@pytest.fixture
def asked(gt_world, monkeypatch):
    """The times at which this rank has asked for the terminal, which it never gets."""
    found, cleanup = [], []
    for name in ("rank", "ask", "leave"):
        monkeypatch.setattr(debugger.RankPdb, name, None, raising=False)
    config = SimpleNamespace(
        option=SimpleNamespace(), workerinput={"gt_pdb": False}, add_cleanup=cleanup.append
    )

    def ask(prompt):
        found.append(prompt)
        return wire.Terminal()

    debugger.connect(2, ask, lambda: None, SimpleNamespace(config=config))
    yield found
    for undo in cleanup:
        undo()


@pytest.mark.parametrize(("skip", "stops"), [(0, 5), (1, 4), (2, 3), (5, 0), (9, 0)])
def test_so_many_calls_of_a_line_are_skipped(asked, skip, stops):
    for _ in range(5):
        dist.breakpoint(2, skip=skip)
    assert asked == [wire.AtPrompt()] * stops


def test_each_line_counts_by_itself(asked):
    for _ in range(2):
        dist.breakpoint(2, skip=1)
        dist.breakpoint(2, skip=1)
    assert len(asked) == 2


def test_it_stops_on_one_rank_alone(asked):
    dist.breakpoint(1)
    dist.breakpoint()
    assert asked == []


def test_a_refusal_is_an_error(asked, monkeypatch):
    refused = staticmethod(lambda prompt: wire.Terminal(refusal="no terminal here"))
    monkeypatch.setattr(debugger.RankPdb, "ask", refused)
    with pytest.raises(RuntimeError, match="no terminal here"):
        dist.breakpoint(2)
