"""A failure of ``assert_same_model`` names the first module that differs."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fixtures.models.gated import VOCABULARY, GatedModel
from fixtures.models.gated import own_token_step as step
from pytest_gtrainer import AnotherFunction, assert_same_model

TENSOR = {
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.gate": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.gate": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def batch(coordinate):
    generator = torch.Generator().manual_seed(coordinate)
    return (torch.randint(VOCABULARY, (8, 4), generator=generator),)


def tensor_parallel(mesh):
    return parallelize_module(GatedModel(), mesh["tp"], TENSOR)


def origin(parallel, mesh=None):
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(parallel, GatedModel, step, batch, mesh=mesh, data_dims=())
    return failure.value.proof.origin


def norms_of_its_own(mesh):
    """Each rank has a plain norm, whose gradient is that of its part of the sequence."""
    plan = {name: style for name, style in SEQUENCE.items() if name != "blocks.*.norm"}
    return parallelize_module(GatedModel(), mesh["tp"], plan)


def doubles_columns(mesh):
    """The output of each rank is its columns; joined they are 2 times what is expected."""
    model = tensor_parallel(mesh)
    model.blocks[1].gate.register_forward_hook(lambda module, given, output: 2 * output)
    return model


class Part(torch.autograd.Function):
    """Leave a gradient a part, as that of columns which nobody adds: 3 - 2 = 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (3 if torch.distributed.get_rank() == 0 else -2)


def keeps_partial_gradients(mesh):
    model = tensor_parallel(mesh)
    model.blocks[1].up.register_forward_pre_hook(
        lambda module, given: Part.apply(given[0]), prepend=True
    )
    model.blocks[1].gate.register_forward_pre_hook(
        lambda module, given: Part.apply(given[0]), prepend=True
    )
    return model


def doubles_the_gradient_of_columns(mesh):
    """The gradient that is doubled is one of columns, too."""
    model = tensor_parallel(mesh)

    def doubles(module, given, output):
        output.register_hook(lambda gradient: 2 * gradient)

    model.blocks[1].gate.register_forward_hook(doubles)
    return model


PARALLEL = {
    doubles_the_gradient_of_columns: "the gradient of the output of blocks.1.gate, rank 0: "
    "2 times what is expected",
    norms_of_its_own: "blocks.0.norm itself: its output, and the gradient of that, are right, "
    "as of blocks.1.norm",
    doubles_columns: "the output of blocks.1.gate, rank 0: 2 times what is expected",
    keeps_partial_gradients: "the gradient of the output of blocks.1.norm: "
    "equal after a sum over 'tp'",
}


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("parallel", PARALLEL, ids=lambda function: function.__name__)
def test_the_first_module_of_a_parallel_model(parallel, gt_mesh):
    assert origin(parallel, gt_mesh) == PARALLEL[parallel]


def test_the_first_module_in_one_process():
    def doubles_a_block():
        model = GatedModel()
        forward = model.blocks[0].forward
        model.blocks[0].forward = lambda x: 2 * forward(x)
        return model

    def drops_a_gradient():
        model = GatedModel()
        model.blocks[1].norm.register_forward_pre_hook(
            lambda module, given: given[0].detach() + 0 * given[0]
        )
        return model

    assert origin(doubles_a_block) == "the output of blocks.0, rank 0: 2 times what is expected"
    assert origin(drops_a_gradient) == "the gradient of the output of blocks.0"


class Between(nn.Module):
    """A model with a function between two modules, in which sides differ."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


def test_a_module_of_another_input_is_not_to_blame():
    def proof_of(function):
        def square(model, x):
            return model(x).square().mean()

        return assert_same_model(
            lambda: Between(function), lambda: Between(torch.tanh), square, batch_of_rows
        )

    def batch_of_rows(coordinate):
        return (torch.randn(2, 4),)

    with pytest.raises(AnotherFunction) as failure:
        proof_of(lambda x: 2 * torch.tanh(x))
    assert failure.value.proof.origin == (
        "the output of down; its input already differs, rank 0: 2 times what is expected: "
        "look before it in the whole model"
    )


def test_gradients_that_differ_in_all_modules_blame_none():
    """The first one had been named, though its output and the gradient of that are right."""
    begins = origin(lambda: halves_gradients(None))
    assert begins.startswith("no module: outputs, and their gradients, are right, and those of all")


class TiedHeads(nn.Module):
    """Two heads that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.first(x) * self.second(x + 1)


def test_the_modules_that_share_a_weight_are_all_named():
    """Whichever of them is wrong, the weight has the first one's name."""

    def doubles(factor):
        model = TiedHeads()
        model.first.weight.register_hook(lambda own: factor * own)
        return model

    def square(model, x):
        return (model(x) ** 2).mean()

    def proof_of(factor):
        return assert_same_model(lambda: doubles(factor), TiedHeads, square, two_rows)

    def two_rows(coordinate):
        return (torch.randn(2, 4),)

    assert proof_of(1).kind == "reordered"
    with pytest.raises(AnotherFunction) as failure:
        proof_of(2)
    begins = "first or second itself, which share first.weight: its output"
    assert failure.value.proof.origin.startswith(begins)


def halves_gradients(mesh):
    """Replicas that are divided twice: all have the same half."""
    model = GatedModel()
    for parameter in model.parameters():
        parameter.register_hook(lambda own: own / 2)
    return model


def halves_an_output(mesh):
    model = GatedModel()
    model.blocks[1].gate.register_forward_hook(lambda module, given, output: output / 2)
    return model


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("parallel", [halves_gradients, halves_an_output])
def test_a_factor_that_all_ranks_share_is_no_missing_sum(parallel, gt_mesh):
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(parallel, GatedModel, step, batch, mesh=gt_mesh, data_dims=())
    assert "1/2 times what is expected" in str(failure.value)
    assert "equal after a sum" not in str(failure.value)


def test_a_wrong_loss_of_right_modules():
    def own(model, tokens):
        return 2 * step(model, tokens)

    begins = "the loss: the outputs of all modules are right"
    assert origin(lambda: (GatedModel(), own)) == begins
