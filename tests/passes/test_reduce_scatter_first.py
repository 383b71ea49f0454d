"""``reduce_scatter_before_all_reduce_pass`` swaps what commutes, and leaves the rest."""

import pytest

from pytest_gtrainer import PlanError, graphtext, reduce_scatter_before_all_reduce_pass
from pytest_gtrainer.attack.oracles import judge_graphs

GRAPH = """
# gtrainer graph v2
dp = group(range(0, 4, 2))
tp = group(range(0, 2))
world = group(range(0, 4))
if I:
  I.x: f32[2, 2]
if bwd:
  with _:
    mul: f32[2, 2] = aten.mul.Scalar(I.x, 2)
    other: f32[2, 2] = aten.mul.Scalar(I.x, 2)
    all_reduce: f32[2, 2] = _c10d_functional.all_reduce(mul, '{first}', {replicas})
    wait_tensor: f32[2, 2] = _c10d_functional.wait_tensor(all_reduce)
    {between}
    reduce_scatter_tensor: f32[1, 2] = _c10d_functional.reduce_scatter_tensor(wait_tensor, '{then}', 2, tp)
    wait_tensor_1: f32[1, 2] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
if out:
  yield bwd._.wait_tensor_1
"""
WRITE = "fill_: f32[2, 2] = aten.fill_.Scalar(mul, 3)"
OTHER_WRITE = "fill_: f32[2, 2] = aten.fill_.Scalar(other, 3)"


@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize(
    ("replicas", "first", "then", "between", "is_swapped"),
    [
        ("dp", "sum", "sum", "", True),
        ("dp", "avg", "sum", "", True),
        ("dp", "max", "max", "", True),
        ("dp", "max", "sum", "", False),
        ("dp", "sum", "sum", WRITE, False),
        ("dp", "sum", "sum", OTHER_WRITE, True),
        ("world", "sum", "sum", "", False),
        ("tp", "sum", "sum", "", False),
    ],
)
def test_what_commutes_is_swapped(replicas, first, then, between, is_swapped, gt_mesh):
    """``fuzz`` has found the shared ranks: a replica of another shard was added."""
    text = GRAPH.format(replicas=replicas, first=first, then=then, between=between)
    gm = reduce_scatter_before_all_reduce_pass(graphtext.parse(text))
    launches = [node.name for node in gm.graph.nodes if "reduce" in node.name]
    is_first = launches[0].startswith("reduce_scatter")
    assert is_first == is_swapped
    before = graphtext.parse(text)
    assert judge_graphs(gm, before, "reordered", 4) is None


PADDED = """
# gtrainer graph v2
dp = group(range(0, 4, 2))
tp = group(range(0, 2))
if I:
  I.x: f32[3, 2]
if bwd:
  with _:
    mul: f32[3, 2] = aten.mul.Scalar(I.x, 2)
    all_reduce: f32[3, 2] = _c10d_functional.all_reduce(mul, 'sum', dp)
    wait_tensor: f32[3, 2] = _c10d_functional.wait_tensor(all_reduce)
    pad: f32[4, 2] = aten.constant_pad_nd(wait_tensor, [0, 0, 0, 1])
    neg: f32[{rows}, 2] = aten.neg({read})
    reduce_scatter_tensor: f32[2, 2] = _c10d_functional.reduce_scatter_tensor(pad, 'sum', 2, tp)
    wait_tensor_1: f32[2, 2] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
if out:
  yield bwd._.wait_tensor_1
  yield bwd._.neg
"""


@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize(
    ("read", "rows", "is_swapped"), [("mul", 3, True), ("wait_tensor", 3, False), ("pad", 4, False)]
)
def test_a_sum_that_something_else_reads_stays_in_front(read, rows, is_swapped, gt_mesh):
    """Uneven shards have a pad between the two, which another may read as well as the sum."""
    text = PADDED.format(read=read, rows=rows)
    gm = graphtext.parse(text)
    if not is_swapped:
        with pytest.raises(PlanError, match=r"is read by neg too, so its reduce-scatter cannot"):
            reduce_scatter_before_all_reduce_pass(gm)
        return
    gm = reduce_scatter_before_all_reduce_pass(gm)
    launches = [node.name for node in gm.graph.nodes if "reduce" in node.name]
    assert launches[0].startswith("reduce_scatter")
    assert judge_graphs(gm, graphtext.parse(text), "reordered", 4) is None
