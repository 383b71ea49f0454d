"""A parameter that modules of two buckets share, as GPT-2's head and embedding do, is refused on
both sides.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gtrainer import (
    TrainConfig,
    bucket_layout,
    data_parallel,
    get_default_transformer_block_buckets,
    graphtext,
    trace_step,
)
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer.graph.bucket_plan import Plan, tied_parameters
from pytest_gtrainer.graph.collectives import PlanError, fsdp_reduce_scatters
from pytest_gtrainer.references.eager import shard_eagerly

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
TOKENS = torch.zeros(2, 3, dtype=torch.int64)
APART = ["wte", "h.0", "lm_head"]


class Tied(nn.Module):
    """The head has the embedding's weight; ``again`` is the first block, registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(16, 8), nn.ModuleList([nn.Linear(8, 8)])
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.wte.weight
        self.again = self.h[0]

    def forward(self, tokens):
        return self.lm_head(self.h[0](self.wte(tokens)))


def step(model, tokens):
    return model(tokens).sum()


def refused_eagerly(plan, mesh):
    config = TrainConfig(
        model=Tied, step=step, batch=lambda step, rank: (TOKENS,), bucket_plan=plan, mesh=mesh
    )
    with pytest.raises(PlanError) as failure:
        shard_eagerly(Tied(), config)
    return str(failure.value)


@pytest.mark.parametrize(
    "plan", [APART, ["wte", "h.0"]], ids=["two buckets", "a bucket and the root"]
)
def test_graph_and_eager_refuse_it_in_the_same_words(gt_mesh, plan):
    """A10, B6, D11: torch's own refusal comes in the first forward, and speaks of the same cause
    and way out.
    """
    traced = trace_step(data_parallel(Tied(), gt_mesh), step, (TOKENS,))
    before = traced.gm.code
    with pytest.raises(PlanError) as failure:
        joint_pass(traced.gm, bucket_plan=plan)
    assert traced.gm.code == before
    assert str(failure.value) == refused_eagerly(plan, gt_mesh)
    assert "Parameter 'wte.weight' is shared with 'lm_head.weight' in another bucket" in str(
        failure.value
    )
    assert "in the same bucket, ['wte', 'lm_head']" in str(failure.value)
    eager = Tied()
    for fqn in plan:
        fully_shard(eager.get_submodule(fqn), mesh=gt_mesh)
    fully_shard(eager, mesh=gt_mesh)
    with pytest.raises(
        ValueError, match="is shared with a parameter already managed by another FSDP group"
    ):
        eager(TOKENS)


@pytest.mark.parametrize("apart", ["a", "b", "c"])
def test_any_of_several_modules_of_a_tie_may_be_apart(apart):
    """B6: the message has all of them, and where they are."""
    together = [name for name in ("a", "b", "c") if name != apart]
    tied = {"a.w": ("a.w", "b.w", "c.w")}
    with pytest.raises(PlanError) as failure:
        Plan([together, apart]).check_ties(tied)
    said = str(failure.value)
    assert said.startswith("Parameter 'a.w' is shared with 'b.w', 'c.w' in another bucket ")
    assert f"({', '.join(sorted(['+'.join(together), apart]))})" in said
    assert "in the same bucket, ['a', 'b', 'c']" in said
    Plan([["a", "b", "c"]]).check_ties(tied)


def test_names_that_the_model_does_not_have_are_told_before_a_tie(gt_mesh):
    """The default plan on a model with other names and tied weights, such as GPT-2. The tie used to
    be reported instead.
    """
    traced = trace_step(data_parallel(Tied(), gt_mesh), step, (TOKENS,))
    with pytest.raises(
        PlanError, match=r"the bucket plan names 'tok_embeddings', 'layers\.0', 'norm', which the"
    ):
        joint_pass(traced.gm, bucket_plan=get_default_transformer_block_buckets(1))


def test_in_one_bucket_it_is_gathered_and_reduced_once(gt_mesh):
    """The twin, by the way out that the message gives."""
    traced = trace_step(data_parallel(Tied(), gt_mesh), step, (TOKENS,))
    layout = bucket_layout(joint_pass(traced.gm, bucket_plan=[["wte", "lm_head"], "h.0"]))
    for kind in ("all_gather", "reduce_scatter"):
        assert sorted(payload.parameters for payload in layout.of(kind)) == [
            ("h.0.weight", "h.0.bias"),
            ("wte.weight",),
        ]


def test_a_module_registered_twice_is_no_tie():
    assert tied_parameters(Tied()) == {"wte.weight": ("wte.weight", "lm_head.weight")}


def test_a_gradient_that_is_returned_twice_goes_by_its_first_name():
    """A10: as the parameter does, where a graph traced elsewhere returns it for each module."""
    (member,) = fsdp_reduce_scatters(graphtext.parse(RETURNED_TWICE))
    assert (member.parameter, member.position) == ("wte.weight", 0)


@pytest.mark.parametrize("shape", [lambda wait: {"wte": wait}, lambda wait: ([wait], None)])
def test_a_gradient_may_be_in_any_structure_of_results(shape):
    gm = graphtext.parse(RETURNED_TWICE)
    output = gm.graph.output_node()
    output.args = (shape(output.args[0][0]),)
    (member,) = fsdp_reduce_scatters(gm)
    assert (member.parameter, member.position) == ("wte.weight", 0)


RETURNED_TWICE = """\
fsdp = group(range(0, 4))
if I:
  I.x: f32[8]
if bwd:
  scatter: f32[2] = _c10d_functional.reduce_scatter_tensor(I.x, "avg", 4, fsdp)
  wait: f32[2] = _c10d_functional.wait_tensor(scatter)
if out:
  wte.weight = bwd._.wait
  lm_head.weight = bwd._.wait
"""


def test_a_graph_that_gathers_it_in_both_buckets_is_told_of_the_tie(gt_mesh):
    """B6: traced elsewhere nobody noted the tie; advice to trace otherwise would not do."""
    traced = trace_step(data_parallel(Tied(), gt_mesh), step, (TOKENS,), reuse_gathers=False)
    traced.gm.graph.output_node().meta.pop("gt_tied")
    with pytest.raises(
        PlanError,
        match="if it is shared/tied, place its modules in the same bucket, they are in wte and",
    ):
        joint_pass(traced.gm, bucket_plan=APART)
