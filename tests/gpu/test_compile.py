"""torch.compile on a GPU, by Triton's kernels: what is recorded, and bits of passes, of generated
code, of replays.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_compiled_bitwise,
    assert_graph,
    assert_pass_bitwise,
    assert_run_to_run,
    graphtext,
    gt_compile,
)
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import PRESSURES
from tests.compiling.test_inductor import Model
from tests.compiling.test_recorder import Rescale

pytestmark = pytest.mark.gt_world("ranks", size=1, device="cuda")


def compiled_run(a_pass):
    torch.manual_seed(0)
    with gt_compile() as record:
        compiled = torch.compile(Model().cuda(), options={"post_grad_custom_post_pass": a_pass})
        compiled(torch.randn(4, 16, device="cuda")).sum().backward()
    return record


def test_every_stage_is_on_the_gpu(gt_world):
    """And its text comes back."""
    record = compiled_run(Rescale(2.0))
    for name, stage in record.only.stages.items():
        values = pytree.tree_leaves([node.meta.get("val") for node in stage.graph.nodes])
        assert {str(value.device) for value in values if isinstance(value, torch.Tensor)} == {
            "cuda:0"
        }, name
        text = graphtext.render(stage)
        assert graphtext.render(graphtext.parse(text)) == text


def test_a_pass_that_changes_no_bit_and_its_twin_that_does(gt_world):
    assert_pass_bitwise(compiled_run(Rescale(2.0)).passes("Rescale")[0])
    with pytest.raises(
        BitwiseDifference, match="Rescale on the forward graph 0/0 changed the numbers"
    ):
        assert_pass_bitwise(compiled_run(Rescale(3.0)).passes("Rescale")[0])


def test_generated_code_is_eager_or_blamed(gt_world):
    """A sum of two products in bf16 is rounded once by a fused kernel, three times by eager's."""
    x = torch.randn(64, 1000, device="cuda")
    assert assert_compiled_bitwise(lambda x: torch.relu(x @ x.T), x).outcome == "equal"
    with pytest.raises(
        BitwiseDifference, match="compiled against eager: code generation changed the numbers"
    ):
        assert_compiled_bitwise(lambda x: x * 3 + x * 5, x.bfloat16())


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_step_with_a_sum_of_nccl_has_eagers_bits(gt_world, mode):
    """Lowered to kernels; also as CUDA graphs, which are captured in the second step and launched
    from the third on.
    """
    torch.manual_seed(0)
    model, x = Model().cuda(), torch.randn(4, 16, device="cuda")

    def loss(x):
        return collectives.all_reduce(model(x), "sum", dist.group.WORLD).sum()

    def gradients(function, x):
        model.zero_grad()
        function(x).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients(loss, x)
    with gt_compile(lower=True) as record:
        compiled = torch.compile(loss, mode=mode)
        steps = [gradients(compiled, x) for _ in range(4)]
        other = gradients(compiled, x + 1)
    record.assert_no_graph_breaks()
    assert_graph(record.forward, "count 1 all_reduce")
    for actual in steps:
        assert_bitwise_equal(actual, expected)
    assert_bitwise_different(other, expected)


def test_a_compiled_step_repeats_itself(gt_world, gt_deterministic, record_property):
    """Kernels that are generated anew give the same bits; streams may be late."""
    model, x = Model().cuda(), torch.randn(4, 16, device="cuda")

    def step():
        model.zero_grad()
        torch.compile(model)(x).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    step()
    wanted = ("fresh Inductor cache", "stream jitter")
    report = assert_run_to_run(
        step, pressures=[pressure for pressure in PRESSURES if pressure.name in wanted]
    )
    record_property("measured", str(report).replace("\n", "; "))
    assert {*wanted} <= {*report.equal}
