"""Two graphs send alike: reductions by kind, dtype, elements and ranks, and bytes."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer.conformance.rules import (
    _communicate_as_much,
    _communication,
    _sent,
    is_same_on_ranks,
)

pytestmark = pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
c10d = torch.ops._c10d_functional
REDUCES, GATHERS = (c10d.all_reduce.default, "sum"), (c10d.all_gather_into_tensor.default, 2)


@pytest.fixture
def graph(gt_mesh):
    def make(call=REDUCES, dtype=torch.float32, size=8, dim="tp", times=1):
        """Return a graph that launches one collective, so many times."""
        made, (target, *args) = fx.Graph(), call
        x = made.placeholder("x")
        x.meta["val"] = torch.empty(size, dtype=dtype)
        for _ in range(times):
            launch = made.call_function(target, (x, *args, gt_mesh.get_group(dim).group_name))
            launch.meta["val"] = torch.empty(args[0] * size if call is GATHERS else size)
        made.output((x,))
        return fx.GraphModule(torch.nn.Module(), made)

    return make


def compared(before, after, kind="any"):
    _communicate_as_much(
        SimpleNamespace(
            before=before,
            after=after,
            graphs=(before, after),
            adapter=SimpleNamespace(kind=kind),
        )
    )


OTHERS = {
    "another dtype": {"dtype": torch.bfloat16},
    "fewer elements": {"size": 4},
    "another reduction": {"call": (REDUCES[0], "max")},
    "other ranks": {"dim": "dp"},
    "twice": {"times": 2},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_reduction_that_is_another_one_is_told(graph, other):
    before, after = graph(), graph(**OTHERS[other])
    assert _communication(before) == _communication(graph())
    for both in ((before, after), (after, before)):
        with pytest.raises(
            AssertionError, match=r"all_reduce .* elements before the pass, \d+ after it"
        ):
            compared(*both)
    compared(after, after)


def test_reductions_are_named_by_dtype_and_ranks(graph):
    assert _communication(graph(dtype=torch.bfloat16, dim="dp", times=2)) == {
        "all_reduce sum of torch.bfloat16 over ranks [0, 2]": 16
    }


def test_what_is_gathered_twice_may_be_gathered_once_and_not_the_other_way(graph):
    once, twice = (graph(GATHERS, times=times) for times in (1, 2))
    assert _communication(once) == _communication(twice)
    assert (_sent(once), _sent(twice)) == (
        {"all_gather over ranks [0, 1]": 32},
        {"all_gather over ranks [0, 1]": 64},
    )
    compared(twice, once)
    with pytest.raises(AssertionError, match="32 bytes before the pass, 64 after it"):
        compared(once, twice)
    compared(once, graph(GATHERS, torch.bfloat16))


@dataclass(frozen=True)
class OnEachRank:
    """A pass of which rank 3 has another result."""

    recipe: SimpleNamespace
    odd: tuple

    @property
    def before(self):
        return self.of(REDUCES)

    @property
    def after(self):
        return self.of(self.odd if dist.get_rank() == 3 else REDUCES)

    def of(self, call):
        graph, (target, *args) = fx.Graph(), call
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8)
        launch = graph.call_function(target, (x, *args, dist.group.WORLD.group_name))
        launch.meta["val"] = torch.empty(8)
        graph.output((x,))
        return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.gt_world("fake", size=4, rank=1)
def test_what_ranks_launch_otherwise_is_told_of_each(gt_world):
    recipe = SimpleNamespace(mesh={"dp": 4}, size=4)
    is_same_on_ranks(OnEachRank(recipe, REDUCES))
    words = re.escape(
        "rank 3 launches broadcast of torch.float32[8] where rank 1 launches all_reduce of "
        "torch.float32[8]"
    )
    with pytest.raises(AssertionError, match=words):
        is_same_on_ranks(OnEachRank(recipe, (c10d.broadcast.default, 0)))
