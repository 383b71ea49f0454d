"""Activation checkpointing by its own configuration: eager and graph recompute, and every field
arrives.
"""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from fixtures.training import llama3_training
from pytest_gtrainer import (
    ActivationCheckpointConfig,
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    train_eager,
    train_graph,
)
from pytest_gtrainer.references.config import checkpoint_layers
from pytest_gtrainer.references.graph import GraphRun

OTHERWISE = ActivationCheckpointConfig(
    preserve_rng_state=False, determinism_check="none", debug=True
)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5).sin()


class Dropping(nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(8, 8), Layer(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class DroppingInFront(Dropping):
    """Dropout before the layers, which have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


def dropping(mesh, activation_checkpoint: ActivationCheckpointConfig | None) -> TrainConfig:
    return TrainConfig(
        model=Dropping,
        step=lambda model, x: model(x),
        batch=lambda step, rank: (torch.full((3, 8), 1.0 + step + rank),),
        bucket_plan=["layers.0", "layers.1"],
        mesh=mesh,
        steps=2,
        activation_checkpoint=activation_checkpoint,
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_both_sides_recompute_and_no_bit_changes(gt_mesh, gt_world):
    """K1: the graph repeats each layer's forward in the backward."""

    def checkpointed(mesh):
        return llama3_training(
            mesh, "fp32", steps=1, activation_checkpoint=ActivationCheckpointConfig()
        )

    graph = train_graph(checkpointed, world=gt_world)
    assert_bitwise_equal(graph, train_eager(checkpointed, world=gt_world))
    assert_bitwise_equal(
        graph, train_eager(lambda mesh: llama3_training(mesh, "fp32", steps=1), world=gt_world)
    )
    attentions = [
        _attentions(each)
        for each in (checkpointed(gt_mesh), llama3_training(gt_mesh, "fp32", steps=1))
    ]
    assert attentions == [4, 2]


def _attentions(config: TrainConfig) -> int:
    nodes = GraphRun(config).traced.gm.graph.nodes
    return sum(
        "scaled_dot_product" in str(node.target) and "backward" not in str(node.target)
        for node in nodes
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_random_numbers_that_are_not_restored(gt_world):
    """K1: eager and graph draw another mask in the backward, and eager with the restore differs."""
    records = {}
    for preserve in (False, True):
        config = ActivationCheckpointConfig(preserve_rng_state=preserve)
        records[preserve] = train_eager(
            lambda mesh, config=config: dropping(mesh, config), world=gt_world
        )
    plain = train_eager(lambda mesh: dropping(mesh, None), world=gt_world)
    graph = train_graph(lambda mesh: dropping(mesh, OTHERWISE), world=gt_world)
    assert_bitwise_equal(graph, records[False])
    assert_bitwise_equal(records[True], plain)
    verdict = assert_bitwise_different(records[False], plain)
    assert verdict.first.key[:3] == (0, 0, "gradient")


@pytest.mark.gt_world("fake", size=2)
def test_a_graph_refuses_to_restore_random_numbers(gt_mesh):
    """K1: it would compute with another mask in silence."""
    with pytest.raises(ValueError, match=r"aten\.\w+\.\w+ comes after code of the step that sets"):
        GraphRun(dropping(gt_mesh, ActivationCheckpointConfig()))
    GraphRun(dropping(gt_mesh, None))
    outside = replace(dropping(gt_mesh, ActivationCheckpointConfig()), model=DroppingInFront)
    assert len(GraphRun(outside).traced.trainable_fqns) == 4, (
        "what is drawn outside of layers is not drawn again"
    )


class Fickle(nn.Module):
    """Computes in another dtype when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.to(torch.float32 if self.calls == 1 else torch.float64).sin().float()


def backward_of_a_fickle_layer(config: ActivationCheckpointConfig) -> torch.Tensor:
    model = nn.Module()
    model.layers = nn.ModuleList([Fickle()])
    x = torch.ones(2, requires_grad=True)
    checkpoint_layers(model, config).layers[0](x).sum().backward()
    return x.grad


def test_the_check_of_determinism():
    """K1: "default" compares what was recomputed, "none" does not."""
    with pytest.raises(
        CheckpointError, match="Recomputed values for the following tensors have different metadata"
    ):
        backward_of_a_fickle_layer(ActivationCheckpointConfig())
    assert (
        backward_of_a_fickle_layer(ActivationCheckpointConfig(determinism_check="none")) is not None
    )


@pytest.mark.second_tier
def test_debugging(monkeypatch: pytest.MonkeyPatch):
    """K1: the operators of both runs are shown."""
    # torch logs operators with arguments that their format has no place for, and pytest's handlers
    # format them
    for logger in (logging.getLogger(), logging.getLogger("LoggingTensor")):
        monkeypatch.setattr(logger, "handlers", [])
    with pytest.raises(
        CheckpointError, match=r"(?s)dumping logs of latest computation.*aten\.sin\.default"
    ):
        backward_of_a_fickle_layer(ActivationCheckpointConfig(debug=True))


def gradient_behind_dropout(**fields) -> torch.Tensor:
    torch.manual_seed(0)
    model, x = Dropping(), torch.ones(3, 8)
    if fields:
        checkpoint_layers(model, ActivationCheckpointConfig(**fields))
    model(x).backward()
    return model.layers[0].weight.grad


def test_every_layer_alone_is_recomputed_with_its_own_random_numbers_or_others():
    """K1: the mask is that of the forward only if its state is put back.

    Layers are checkpointed, and not what is in them.
    """
    plain = gradient_behind_dropout()
    assert_bitwise_equal(
        gradient_behind_dropout(preserve_rng_state=True), plain, what="with the forward's mask"
    )
    assert_bitwise_different(
        gradient_behind_dropout(preserve_rng_state=False), plain, what="with another mask"
    )
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]), "head": nn.Linear(2, 2)}
    )
    checkpoint_layers(model, ActivationCheckpointConfig())
    wrapped = [fqn for fqn, module in model.named_modules() if "forward" in vars(module)]
    assert wrapped == ["layers.0"], "modules that are recomputed"


def test_a_model_without_layers():
    with pytest.raises(
        ValueError, match=r"no layers such as layers\.0 to checkpoint; its outermost are head"
    ):
        checkpoint_layers(nn.ModuleDict({"head": nn.Linear(2, 2)}), ActivationCheckpointConfig())
