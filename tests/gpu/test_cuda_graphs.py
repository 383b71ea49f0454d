"""CUDA graphs of a traced step: captured once and launched again, it gives the bits of the step
that runs op by op.
"""

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.tracing.model import ModelState, local

pytestmark = pytest.mark.gt_world("ranks", size=1, device="cuda")


class Captured:
    """A rewritten training step in a CUDA graph.

    The memory that goes in and out stays where it is.
    """

    def __init__(self, mesh, precision: str) -> None:
        self.config = llama3_training(mesh, precision)
        run = GraphRun(self.config)
        self.gm = run.traced.gm
        self.state = [local(tensor).detach() for tensor in ModelState.of(run.model).tensors]
        self.inputs = [tensor.clone() for tensor in self.config.batch(0, 0)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                self.gm(*self.state, *self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.out = self.gm(*self.state, *self.inputs)

    def launch(self, step: int, *, copy_inputs: bool = True) -> list[torch.Tensor]:
        """Loss and gradients of the captured step on the batch of ``step``."""
        if copy_inputs:
            for here, new in zip(self.inputs, self.config.batch(step, 0), strict=True):
                here.copy_(new)
        self.graph.replay()
        return [tensor.clone() for tensor in self.out if tensor is not None]

    def op_by_op(self, step: int) -> list[torch.Tensor]:
        with torch.no_grad():
            found = self.gm(*self.state, *self.config.batch(step, 0))
        return [tensor.clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16_fp32"])
def test_a_captured_step_equals_the_step(gt_mesh, gt_deterministic, precision):
    """On new batches and new weights. A step of one rank has no collective: test_compile.py
    captures one of NCCL.
    """
    captured = Captured(gt_mesh, precision)
    for step in (1, 2):
        assert_bitwise_equal(captured.launch(step), captured.op_by_op(step))
        with torch.no_grad():
            for weight in captured.state:
                weight.mul_(1.001) if weight.is_floating_point() else None


def test_an_input_that_is_not_copied_in_differs(gt_mesh, gt_deterministic):
    """The twin that must differ: a captured graph reads the memory of its capture, not the new
    batch.
    """
    captured = Captured(gt_mesh, "fp32")
    assert_bitwise_different(captured.launch(1, copy_inputs=False), captured.op_by_op(1))
