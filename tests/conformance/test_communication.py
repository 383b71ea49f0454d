"""What two graphs have to send alike: reductions by kind, dtype, elements and ranks, and bytes."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from pytest_gtrainer.conformance.rules import _communicate_as_much, _communication, _sent

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
        with pytest.raises(AssertionError, match=r"all_reduce .* elements before the pass, \d+ b"):
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
    with pytest.raises(AssertionError, match="32 bytes before the pass, 64 behind it"):
        compared(once, twice)
    compared(once, graph(GATHERS, torch.bfloat16))
