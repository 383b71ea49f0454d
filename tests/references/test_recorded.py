"""Records of training beyond weights: clipped gradients, random states, lines of weight digests."""

import random
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fixtures.training import llama3_training
from pytest_gtrainer import (
    Record,
    TrainConfig,
    assert_bitwise_different,
    assert_bitwise_equal,
    compare,
    train_eager,
    train_graph,
)
from pytest_gtrainer.references.graph import GraphRun


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_gradients_before_and_after_clipping_are_equal_on_both_sides(gt_mesh, gt_world):
    config = llama3_training(gt_mesh, "fp32", steps=2, max_norm=0.1)
    eager, graph = train_eager(config), train_graph(config)
    assert_bitwise_equal(graph, eager)
    before, after = (
        {key.name: value for key, value in eager.select(step=1, phase=phase).items()}
        for phase in ("gradient", "clipped")
    )
    assert_bitwise_different(after, before, what="clipping must do something")
    unclipped = train_eager(llama3_training(gt_mesh, "fp32", steps=2))
    assert not unclipped.select(phase="clipped")
    assert_bitwise_different(_weights(unclipped), _weights(eager), what="without clipping")


def _weights(record: Record) -> dict[str, torch.Tensor]:
    return {f"{key.step} {key.name}": value for key, value in record.select(phase="weight").items()}


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_random_states_are_recorded_before_each_step(gt_mesh, gt_world):
    """The control draws one number in the batch of step 0: the states differ from step 1 on, and
    nothing else.
    """
    plain = llama3_training(gt_mesh, "fp32", steps=2, record_rng=True)

    def drawing(step: int, rank: int):
        torch.rand(1) if step == 0 else None
        return plain.batch(step, rank)

    torch.manual_seed(0)
    expected = train_eager(plain)
    torch.manual_seed(0)
    actual = train_eager(llama3_training(gt_mesh, "fp32", steps=2, record_rng=True, batch=drawing))
    assert_bitwise_different(actual.select(phase="rng"), expected.select(phase="rng"))
    verdict = compare(actual, expected)
    assert {(key.phase, key.name) for key in expected.select(step=0, phase="rng")} >= {
        ("rng", "torch.cpu")
    }
    assert [(one.key.step, one.key.phase, one.key.name) for one in verdict.differences] == [
        (1, "rng", "torch.cpu"),
        (1, "rng", "torch.cpu at the end"),
    ]


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_a_simulated_graph_clips_as_eager_does(gt_world):
    """The norm is a sum over ranks in the order of the net; the twin clips to half of it."""

    def config(mesh, max_norm=0.1):
        return llama3_training(mesh, "fp32", steps=2, max_norm=max_norm)

    graph = train_graph(config, world=gt_world)
    assert_bitwise_equal(graph, train_eager(config, world=gt_world))
    assert len(graph.select(phase="clipped")) == len(graph.select(phase="gradient"))
    half = train_eager(lambda mesh: config(mesh, max_norm=0.05), world=gt_world)
    verdict = assert_bitwise_different(half, graph)
    assert (verdict.first.key.step, verdict.first.key.phase) == (0, "clipped")


@pytest.mark.gt_world("ranks", size=2)
def test_what_a_step_records_and_when(gt_mesh):
    """A record has random states before the batch draws; gradients before clipping and after."""
    seen: list[torch.Tensor] = []

    def batch(step: int, rank: int):
        seen.append(torch.get_rng_state())
        return (torch.rand(3, 4) + rank,)

    def config(**changes):
        return TrainConfig(
            model=model,
            step=lambda model, x: model(x).square().sum(),
            batch=batch,
            steps=2,
            bucket_plan=["0", "1"],
            mesh=gt_mesh,
            **changes,
        )

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    record = train_eager(config(record_rng=True, max_norm=0.25))
    parameters, buffers = (
        dict(named()) for named in (model().named_parameters, model().named_buffers)
    )
    names = {
        "loss": {"loss"},
        "gradient": {*parameters},
        "clipped": {*parameters},
        "weight": {*parameters},
        "optimizer": {
            f"{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")
        },
        "buffer": {*buffers},
    }
    by_phase = {phase: {key.name for key in record.select(step=1, phase=phase)} for phase in names}
    assert by_phase == names, "what is recorded of a step, by phase"
    for step in range(2):
        assert_bitwise_equal(
            record[step, gt_mesh.get_rank(), "rng", "torch.cpu"], seen[step], what="random states"
        )
        norms = []
        for phase in ("gradient", "clipped"):
            squares = torch.stack(
                [value.square().sum() for value in record.select(step=step, phase=phase).values()]
            )
            total = squares.sum()
            dist.all_reduce(total)
            norms.append(float(total.sqrt()))
        assert norms[0] > 0.5 > 0.26 > norms[1] > 0.24, (
            f"norms before and behind clipping to 0.25: {norms}"
        )
    assert {key.phase for key in train_eager(config())} == names.keys() - {"clipped"}


class Drawing(nn.Module):
    """Dropout between two layers, on every rank its own; the first parameter is not used, and has
    no gradient.

    A buffer counts the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        self.calls.add_(1)
        return second(nn.functional.dropout(first(x), 0.5)).square().mean()


class DrawingOptimizer(torch.optim.SGD):
    """Adds a number of its own drawing to each rank's weights."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(float(torch.rand(())) * random.random())


@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_a_simulated_graph_draws_what_each_rank_draws(gt_world):
    """Batches (which differ between ranks), graph, optimiser and weights draw random numbers."""

    def config(mesh, draws=1):
        def batch(step, rank):
            torch.rand(rank * draws)
            for _ in range(rank * draws):
                random.random()
            return (torch.rand(3, 8) * random.random(),)

        return TrainConfig(
            model=Drawing,
            step=lambda model, x: model(x),
            batch=batch,
            mesh=mesh,
            steps=2,
            bucket_plan=["layers.0", "layers.1"],
            record_rng=True,
            optimizer=lambda parameters: DrawingOptimizer(parameters, lr=0.1),
        )

    before = torch.get_rng_state()
    graph = train_graph(config, world=gt_world)
    assert_bitwise_equal(graph, train_eager(config, world=gt_world))
    assert torch.equal(torch.get_rng_state(), before)
    calls = {
        (key.step, key.rank, key.name): int(value)
        for key, value in graph.select(phase="buffer").items()
    }
    assert calls == {(step, rank, "calls"): step + 1 for step in range(2) for rank in range(2)}
    verdict = assert_bitwise_different(
        train_graph(lambda mesh: config(mesh, draws=2), world=gt_world), graph
    )
    assert verdict.first.key[:3] == (0, 0, "gradient")


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_a_line_of_digests_for_each_step_and_rank(gt_world, monkeypatch, capsys):
    """Graph and eager print the same digests; another seed of the weights gives others."""
    monkeypatch.setenv("GT_WEIGHT_HASH", "1")

    def config(mesh):
        return llama3_training(mesh, "fp32", steps=2)

    def other(mesh):
        return llama3_training(
            mesh, "fp32", steps=2, batch=lambda step, rank: config(mesh).batch(step + 1, rank)
        )

    printed = []
    for run in (
        lambda: train_eager(config, world=gt_world),
        lambda: train_graph(config, world=gt_world),
        lambda: train_eager(other, world=gt_world),
    ):
        run()
        lines = re.findall(
            r"weights step (\d) rank (\d) (xxh3_128:\w{32}) (.*)", capsys.readouterr().out
        )
        printed.append({(step, rank): digest for step, rank, digest, _ in lines})
    assert printed[0].keys() == {(step, rank) for step in "01" for rank in "01"}
    assert printed[0] == printed[1]
    assert not set(printed[0].values()) & set(printed[2].values())


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_without_the_variable_nothing_is_printed(gt_world, monkeypatch, capsys):
    monkeypatch.delenv("GT_WEIGHT_HASH", raising=False)
    train_eager(lambda mesh: llama3_training(mesh, "fp32", steps=1), world=gt_world)
    assert "weights step" not in capsys.readouterr().out


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=2)
def test_the_batch_that_a_trace_looks_at_draws_nothing(gt_mesh):
    """It is the first of the training, too. The twin: that batch does draw."""
    plain, states = llama3_training(gt_mesh, "fp32"), []

    def drawing(step: int, rank: int):
        torch.rand(1)
        random.random()
        return plain.batch(step, rank)

    drawn = replace(plain, batch=drawing)
    for config in (plain, drawn):
        torch.manual_seed(0)
        random.seed(0)
        GraphRun(config)
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]
    drawn.inputs(0)
    assert torch.get_rng_state().tolist() != states[0][0]
