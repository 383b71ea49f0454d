"""Eager training by ``fully_shard`` is proven equal to the graph's, on all simulated ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    AnotherFunction,
    BitwiseDifference,
    LayoutDifference,
    MixedPrecisionPolicy,
    TrainConfig,
    VacuousCheck,
    assert_parity,
    assert_simulated_parity,
    construct_default_graph_passes,
)
from pytest_gtrainer.graph.collectives import kind_of, launches
from pytest_gtrainer.references.proven import prove_training
from pytest_gtrainer.references.simulated import SimulatedGraphRun
from pytest_gtrainer.worlds.fake import make_mesh

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
TWO_NODES = pytest.mark.gt_world("simulated", size=4, nodes=2)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


class Layer(nn.Module):
    def __init__(self, has_weights=True):
        super().__init__()
        self.norm = nn.RMSNorm(8, elementwise_affine=has_weights)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers=2, has_weights=True):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(has_weights) for _ in range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step, coordinate):
    generator = torch.Generator().manual_seed(100 * step + coordinate)
    return torch.randn(2, 8, generator=generator), torch.randn(2, 4, generator=generator)


def loss_of(model, x, wanted):
    return nn.functional.mse_loss(model(x).float(), wanted)


def training(mesh, **options):
    plan = ["layers.0", "layers.1", "head"]
    config = TrainConfig(model=Net, step=loss_of, batch=batch, mesh=mesh, bucket_plan=plan, steps=1)
    return replace(config, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def casts_inputs(model, x, wanted):
    return nn.functional.mse_loss(model(x.bfloat16()).float(), wanted)


CONFIGS = {
    "fp32, clipped, two steps": {"max_norm": 0.1, "steps": 2},
    "bf16": {"mp_policy": BF16, "step": casts_inputs},
    "SGD": {"optimizer": sgd},
    "DDP": {"replicate": True},
}


@TWO_NODES
@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        *(pytest.param(name, marks=pytest.mark.second_tier) for name in CONFIGS if name != "SGD"),
    ],
)
def test_the_graph_trains_as_fully_shard_does_for_any_numbers(gt_world, name):
    def config(mesh):
        return training(mesh, **CONFIGS[name])

    parity = assert_simulated_parity(config, gt_world, proof=True)
    assert parity.proof.kind == "identical"
    assert parity.control is None
    # Per rank and step: the loss, and of each parameter gradient, weight and the optimiser's state.
    assert parity.proof.compared >= 4 * (1 + 3 * 12)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, nodes=2, mesh={"replicate": 2, "shard": 2})
def test_hybrid_sharding(gt_world):
    assert assert_simulated_parity(training, gt_world, proof=True).proof.kind == "identical"


@pytest.mark.second_tier
@TWO_NODES
def test_another_order_of_payloads_is_reordered_where_bits_are_equal(gt_world):
    # Sums of a few bf16 numbers in fp32 are exact, so no bit shows the order. Norms have no
    # weights here: from torch 2.15 on their gradients are reduced without a rounding to bf16.
    def config(mesh):
        model, plan = partial(Net, layers=1, has_weights=False), ["layers.0", "head"]
        return training(mesh, model=model, bucket_plan=plan, mp_policy=BF16, step=casts_inputs)

    with pytest.raises(VacuousCheck, match="proof=True"):
        assert_simulated_parity(config, gt_world)
    with pytest.raises(LayoutDifference, match="all bits are equal under this net"):
        assert_simulated_parity(config, gt_world, payload_order="execution", proof=True)
    subject = SimulatedGraphRun(config, gt_world, payload_order="execution")
    proof = prove_training(subject, config, gt_world)
    assert proof.kind == "reordered", str(proof)
    assert proof.first.result.startswith("gradient of layers.")
    assert "reduce_scatter" in proof.origin


def halves_in_eager(model, x, wanted):
    """Compute half of the loss eagerly."""
    scale = 1.0 if torch.compiler.is_compiling() or not hasattr(model, "unshard") else 0.5
    return scale * loss_of(model, x, wanted)


class Weighted(nn.Module):
    """Adds 2**-30 of its input eagerly: too little for a bit of these numbers, not for any."""

    def __init__(self):
        super().__init__()
        self.inner = Net(layers=1)
        self.tiny = 0.0

    def forward(self, x):
        x = x + x * 2.0**-30 if hasattr(self, "unshard") else x + x * 0.0
        return self.inner(x)


@pytest.mark.second_tier
@TWO_NODES
def test_a_term_too_small_for_any_bit_is_another_function(gt_world):
    def config(mesh):
        plan = ["inner.layers.0", "inner.head"]
        return training(mesh, bucket_plan=plan, model=Weighted)

    with pytest.raises(AnotherFunction, match="equal for these numbers, and not for any") as failed:
        assert_simulated_parity(config, gt_world, proof=True)
    assert failed.value.proof.kind == "another function"


@TWO_NODES
def test_bits_that_differ_offer_the_proof(gt_world):
    with pytest.raises(BitwiseDifference, match=r"gt_world, proof=True\) says which kind of equal"):
        assert_simulated_parity(lambda mesh: training(mesh, step=halves_in_eager), gt_world)


@pytest.mark.second_tier
@TWO_NODES
def test_bits_that_differ_are_proven_where_asked(gt_world):
    def config(mesh):
        layer = {"model": lambda: nn.Sequential(nn.Linear(8, 4)), "bucket_plan": ["0"]}
        return training(mesh, step=halves_in_eager, **layer)

    with pytest.raises(BitwiseDifference, match="in exact arithmetic: another function: "):
        assert_simulated_parity(config, gt_world, proof=True)


def launches_again(kind):
    """Return a pass that launches the last collective of a kind once more, for nobody."""

    def pass_(gm, example_inputs=None):
        again = [node for node in gm.graph.nodes if launches(node.target) and kind_of(node) == kind]
        with gm.graph.inserting_after(again[-1]):
            launched = gm.graph.node_copy(again[-1])
        wait = next(iter(again[-1].users))
        with gm.graph.inserting_after(wait):
            gm.graph.call_function(wait.target, (launched,)).meta = dict(wait.meta)
        return gm

    return pass_


@pytest.mark.second_tier("bits-all_reduce", "proof-reduce_scatter")
@TWO_NODES
@pytest.mark.parametrize(
    ("kind", "options"),
    [("reduce_scatter", {}), ("all_reduce", {"replicate": True})],
    ids=["reduce_scatter", "all_reduce"],
)
@pytest.mark.parametrize("proof", [False, True], ids=["bits", "proof"])
def test_a_collective_that_nobody_reads_is_traffic_that_eager_does_not_have(
    gt_world, kind, options, proof
):
    """Every bit and every payload that somebody reads is equal."""
    passes = [launches_again(kind)]
    if kind == "reduce_scatter":
        plan = ["layers.0", "layers.1", "head"]
        passes = [*construct_default_graph_passes(bucket_plan=plan), *passes]
    words = rf"{kind}\w* is launched, and nobody reads its result: 1 collective more than eager has"
    with pytest.raises(LayoutDifference, match=words):
        assert_simulated_parity(
            lambda mesh: training(mesh, **options), gt_world, passes=passes, proof=proof
        )


@pytest.mark.gt_world("fake", size=4)
def test_a_proof_needs_a_simulated_world(gt_world):
    with pytest.raises(ValueError, match="proof=True in a world of kind 'fake'"):
        assert_parity(training(make_mesh(gt_world)), gt_world, proof=True)
