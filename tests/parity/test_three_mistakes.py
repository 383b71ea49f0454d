"""FSDP, expert and tensor parallelism together on eight ranks: equal to eager, and each of three
mistakes differs.

Run it with ``--gt-gpus=8 -rP`` to see the table.
"""

import copy

import pytest
import torch

from fixtures.training import Parallelism, deepseek_v3_training
from pytest_gtrainer import assert_same_layout, compare, facts
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.references.replicas import texts_of_ranks
from pytest_gtrainer.tracing.model import ModelState, local

pytestmark = pytest.mark.second_tier

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def sums_instead_of_averages(gm):
    """Gradients of dense parameters are added over the data ranks, and nobody divides."""
    for node in gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        if node.args[1] == "avg":
            node.update_arg(1, "sum")
            return 1
    return 0


def a_tensor_parallel_sum_left_out(gm):
    """Every rank goes on with its own part of a product."""
    node = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)[0]
    node.replace_all_uses_with(node.args[0])
    return 1


def a_gradient_rounded_before_the_sum(gm):
    """To bf16, where the reduction is in fp32."""
    node = gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)[0]
    with gm.graph.inserting_before(node):
        rounded = gm.graph.call_function(
            aten._to_copy.default, (node.args[0],), {"dtype": torch.bfloat16}
        )
        node.update_arg(
            0, gm.graph.call_function(aten._to_copy.default, (rounded,), {"dtype": torch.float32})
        )
    return 1


MISTAKES = (
    sums_instead_of_averages,
    a_tensor_parallel_sum_left_out,
    a_gradient_rounded_before_the_sum,
)


@pytest.mark.gt_world("ranks", size=8, mesh={"efsdp": 2, "ep": 2, "tp": 2})
def test_three_kinds_of_parallelism_equal_eager_and_three_mistakes_differ(gt_mesh, gt_world):
    config = deepseek_v3_training(gt_mesh, "fp32", "debug_small", parallel=Parallelism({}), steps=1)
    eager, graph = EagerRun(config), GraphRun(config)
    start = [local(tensor).detach().clone() for tensor in ModelState.of(graph.model).tensors]
    expected, actual = eager.run(), graph.run()
    assert_same_layout(graph.layout(), eager.layout())
    equal = compare(actual, expected)
    assert equal.outcome == "equal", str(equal)
    for mistake in MISTAKES:
        for tensor, first in zip(ModelState.of(graph.model).tensors, start, strict=True):
            local(tensor).detach().copy_(first)
        wrong, gm = copy.copy(graph), copy.deepcopy(graph.traced.gm)
        assert mistake(gm)
        gm.recompile()
        wrong.traced = graph.traced.with_graph(gm)
        verdict = _judged(wrong, expected)
        assert "different" in texts_of_ranks(verdict.split(":")[0]), mistake.__name__
        if gt_world.rank == 0:
            print(f"{mistake.__name__}: {verdict}")


def _judged(run, expected):
    """Return the outcome in a line; replicas that differ are reported even before the bits."""
    try:
        with facts.failing_checks(lambda error: None):  # it is an answer here
            return str(compare(run.run(), expected)).splitlines()[0]
    except AssertionError as error:
        return f"different: {error}"
