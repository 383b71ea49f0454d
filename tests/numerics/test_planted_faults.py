"""Five faults that cost days: each is planted in a run and reported where it is."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fixtures.training import llama3_training
from pytest_gtrainer import (
    Record,
    assert_bitwise_equal,
    assert_same_layout,
    bisect_passes,
    capture_operators,
    compare_operators,
    deterministic,
    train_eager,
)
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.references.graph import GraphRun
from tests.numerics.samples import flip_bit
from tests.numerics.test_bisect import BATCH, Net, pipeline, traced_net


def failure(actual, expected, what: str) -> list[str]:
    with pytest.raises(BitwiseDifference) as caught:
        assert_bitwise_equal(actual, expected, what=what)
    return str(caught.value).splitlines()


class Spoiling:
    """A recorder that flips one bit of one weight as training hands it over."""

    def __init__(self, into: Record) -> None:
        self.into = into

    def add(self, step: int, rank: int, phase: str, name: str, tensor: torch.Tensor) -> None:
        if (step, rank, phase, name) == (3, 5, "weight", "layers.1.attention.wk.weight"):
            flip_bit(tensor, element=10, bit=9)
        self.into.add(step, rank, phase, name, tensor)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=6, nodes=1)
def test_one_bit_in_one_weight_at_step_3_on_rank_5(gt_world):
    """Every rank sees its consequences at step 4; the origin is the weight of rank 5 at step 3."""
    from pytest_gtrainer.references.simulated import simulated_eager
    from pytest_gtrainer.worlds.fake import net_of

    def config(mesh):
        return llama3_training(mesh, "fp32", steps=5)

    expected = train_eager(config, world=gt_world)
    parts = [Record(6, rank) for rank in range(6)]
    simulated_eager(
        config, net_of(gt_world), mesh=gt_world.mesh, recorders=[Spoiling(part) for part in parts]
    )
    lines = failure(Record.merged(parts), expected, what="spoiled against clean")
    assert lines[0] == "spoiled against clean"
    assert lines[2].startswith(
        "  first at step 3, rank 5, weight of layers.1.attention.wk.weight, element ("
    )
    assert lines[5].startswith("    512 ULP apart; 1 of ")
    assert lines[7].startswith("    step 4, rank 0, ")


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_swapped_bucket_members(gt_mesh, gt_world):
    """The layout names the bucket and the parameters; no arithmetic is needed."""
    from pytest_gtrainer.references.simulated import simulated_eager
    from pytest_gtrainer.worlds.fake import net_of

    def config(mesh):
        return llama3_training(mesh, "bf16_fp32", steps=1)

    eager = simulated_eager(config, net_of(gt_world), mesh=gt_world.mesh)
    graph = GraphRun(config(gt_mesh))
    swapped = graph.rewritten(payload_order="execution")
    with pytest.raises(LayoutDifference) as caught:
        assert_same_layout(swapped.layout(), eager.layout)
    assert str(caught.value).splitlines()[:2] == [
        "bucket layouts differ",
        "bucket 'layers.0', all_gather: layers.0.attention.wq.weight sits at byte 32, expected 0",
    ]
    assert_same_layout(graph.layout(), eager.layout)


class Dropping(nn.Module):
    """Dropout in a checkpointed region."""

    def __init__(self, preserve_rng_state: bool) -> None:
        super().__init__()
        self.inner, self.drop, self.preserve = nn.Linear(4, 4), nn.Dropout(0.5), preserve_rng_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda y: self.drop(self.inner(y)).sin(),
            x,
            use_reentrant=False,
            preserve_rng_state=self.preserve,
        )


def test_a_dropped_restore_of_random_numbers():
    """The record says in which tensor it shows first, the operators say where it comes from."""
    x, captures, records = torch.ones(3, 4), [], []
    for preserve in (False, True):
        with deterministic(seed=2):
            model, record = Dropping(preserve), Record()
            with capture_operators(model) as capture:
                loss = model(x).sum()
                loss.backward()
            record.add(0, 0, "loss", "loss", loss)
            for name, parameter in model.named_parameters():
                record.add(0, 0, "gradient", name, parameter.grad)
            record.add(1, 0, "rng", "torch.cpu", torch.get_rng_state())
        captures.append(capture)
        records.append(record)
    lines = failure(*records, what="without the restore")
    assert lines[2].startswith("  first at step 0, rank 0, gradient of inner.weight, element (")
    assert any(line.startswith("    step 1, rank 0, random state of torch.cpu: ") for line in lines)
    assert str(compare_operators(*captures)).splitlines()[1] == (
        "  first at aten.bernoulli_.float in the backward of drop, call 0"
    )


def test_a_pass_that_reassociates_an_add():
    lines = str(bisect_passes(traced_net(), pipeline(4), (Net(), *BATCH))).splitlines()
    assert lines[0] == "introduced by pass 5 of 6, reassociate_pass() (7 replays)"
    assert lines[-3] == "  computed from what the pass made"
    assert lines[-2] == "    add_tensor = aten.add.Tensor in the forward of sum"


def test_a_nan_payload():
    """Both are NaN to every floating-point comparison."""
    sides = []
    for word in (0x7FC0_0001, 0x7FC0_0000):
        record = Record()
        record.add(0, 0, "loss", "loss", torch.tensor(1.0))
        values = torch.tensor([0, word, 0], dtype=torch.int64).to(torch.int32).view(torch.float32)
        record.add(0, 0, "gradient", "layers.0.wq.weight", values)
        sides.append(record)
    assert failure(*sides, what="another payload") == [
        "another payload",
        "different: 1 of 2 tensors, 1 element",
        "  first at step 0, rank 0, gradient of layers.0.wq.weight, element (1)",
        "    actual   nan  0x7fc00001",
        "    expected nan  0x7fc00000",
        "    1 of 3 elements of this f32[3]",
    ]
