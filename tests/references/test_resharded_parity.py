"""Parity with resharding: a backward that gathers only what it reads passes, one that loses a
gather fails.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer import (
    TrainConfig,
    assert_parity,
    bucket_layout,
    construct_default_graph_passes,
    tag_with_memory_policy_pass,
)
from pytest_gtrainer.graph.collectives import fsdp_all_gathers
from pytest_gtrainer.graph.layout import (
    BucketLayout,
    LayoutDifference,
    Payload,
    Slot,
    assert_same_layout,
)
from pytest_gtrainer.passes.graph_pass import bind_options
from pytest_gtrainer.passes.remat import RECOMPUTE
from pytest_gtrainer.references.graph import GraphRun

WEIGHT, BIAS, SCALE = "layers.0.up.weight", "layers.0.up.bias", "layers.0.norm.weight"
PLAN = ["embedding", "layers.0", "layers.1", ["norm", "head"]]


class Block(nn.Module):
    """Biases are read by no backward; a norm's weight and the matrices are."""

    def __init__(self, bias):
        super().__init__()
        self.norm = nn.RMSNorm(9)
        self.up, self.down = nn.Linear(9, 5, bias=bias), nn.Linear(5, 9, bias=bias)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).sin())


class Experts(Block):
    """Picks the rows of an expert a token: the backward reads the picked rows, and not the
    parameter.
    """

    def __init__(self):
        super().__init__(bias=False)
        self.experts = nn.Parameter(torch.rand(3, 9))

    def forward(self, x):
        chosen = x.sum(-1).floor().long() % 3
        return super().forward(x) * self.experts[chosen]


class Net(nn.Module):
    """``tied``: the head is the embedding's matrix, in one bucket. ``frozen``: the first layer is
    not trained.

    ``experts``: the last layer picks rows of a parameter.
    """

    def __init__(self, bias=True, tied=False, frozen=False, experts=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 9)
        self.layers = nn.ModuleList(Block(bias) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(9), nn.Linear(9, 13, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        if experts:
            self.layers[1] = Experts()
        if frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@pytest.fixture
def training(gt_mesh):
    """``training(model=Net, **changes)``"""

    def batch(step, rank):
        return (
            torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank)),
        )

    def make(model=Net, **changes):
        fields = {
            "step": lambda model, tokens: model(tokens),
            "batch": batch,
            "bucket_plan": PLAN,
            "steps": 1,
        }
        return TrainConfig(model=model, mesh=gt_mesh, **{**fields, **changes})

    return make


TIED = ["layers.0", "layers.1", ["embedding", "norm", "head"]]


@pytest.mark.second_tier("none", "tied", "a frozen", "experts")
@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize(
    ("model", "plan", "left_out"),
    [
        (Net, PLAN, ["layers.0", "layers.1", "norm+head"]),
        (lambda: Net(bias=False), PLAN, []),
        (lambda: Net(tied=True), TIED, ["embedding+norm+head", "layers.0", "layers.1"]),
        (lambda: Net(bias=False, tied=True), TIED, []),
        (lambda: Net(frozen=True), PLAN, ["layers.0", "layers.1", "norm+head"]),
        (lambda: Net(bias=False, experts=True), PLAN, ["layers.1"]),
    ],
    ids=["biases", "none", "tied", "tied without biases", "a frozen layer", "experts"],
)
def test_what_no_backward_reads_need_not_be_gathered_again(
    training, gt_world, model, plan, left_out
):
    """D2: eager ``fully_shard`` gathers the whole group.

    The result says which parameters of it nobody reads.
    """
    config = training(model, bucket_plan=plan)
    parity = assert_parity(config, gt_world, reshard_after_forward=True, invisible="report")
    assert sorted(line.split("'")[1] for line in parity.unread) == left_out
    assert all("bias" in line or "experts" in line for line in parity.unread)


def losing(lost, resharding=True):
    """The pipeline, whose resharding passes over ``lost``: the backward reads the forward's copy of
    it.
    """

    def lose(gm, example_inputs=None):
        tag_with_memory_policy_pass(gm)
        for member in fsdp_all_gathers(gm):
            if lost(member.parameter):
                reached = [member.launch, member.wait, *member.chain, *member.wait.users]
                for node in reached:
                    node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        return gm

    passes = construct_default_graph_passes(bucket_plan=PLAN, reshard_after_forward=resharding)
    return [
        bind_options(lose) if step.name == "tag_with_memory_policy_pass" else step
        for step in passes
    ]


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("lost", [WEIGHT, SCALE, "head.weight"])
def test_a_gather_that_is_missing_is_named(training, gt_world, lost):
    """D2: the twin. All bits are equal; only the layout shows that a parameter stays unsharded."""
    with pytest.raises(LayoutDifference) as raised:
        assert_parity(
            training(),
            gt_world,
            passes=losing(lambda name: name == lost),
            reshard_after_forward=True,
        )
    words = (
        f"gathers the bucket again without {lost}, and reads the forward's copy of it, which stays "
        f"unsharded"
    )
    assert words in str(raised.value)
    assert "all bits are equal" in str(raised.value)


@pytest.mark.gt_world("fake", size=3)
@pytest.mark.parametrize(
    "changes", [{}, {"reshard_after_forward": True}], ids=["kept", "resharded"]
)
def test_a_layout_says_what_stays_unsharded(training, changes):
    """D17: by name, through the split of a bucket.

    A bias, which the backward does not read, is not kept.
    """
    kept = GraphRun(training(), **changes).layout().kept
    matrices = [
        f"layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("norm.weight", "up.weight", "down.weight")
    ]
    assert sorted(kept) == ([] if changes else sorted([*matrices, "norm.weight", "head.weight"]))


@pytest.mark.gt_world("fake", size=3)
@pytest.mark.parametrize(
    "lost", [[WEIGHT], [WEIGHT, SCALE], ["layers.1.down.weight", "head.weight"]]
)
def test_a_layout_of_one_lost_gather_names_it_alone(training, lost):
    run = GraphRun(training(), passes=losing(lambda name: name in lost))
    assert sorted(run.layout().kept) == sorted(lost)
    assert sorted(bucket_layout(run.traced.gm).kept) == sorted(lost)


def payload(*names, directions=()):
    slots = tuple(Slot(name, 4 * place, 4) for place, name in enumerate(names))
    return Payload("all_gather", torch.float32, (0, 1), "", slots, directions)


WHOLE = payload(WEIGHT, BIAS, SCALE)
FORWARD = replace(WHOLE, directions=("fwd",))


@pytest.mark.parametrize("names", [[WEIGHT, SCALE], [WEIGHT], [BIAS, SCALE]])
def test_a_part_that_the_backward_gathers_is_packed_in_its_order(names):
    actual = BucketLayout((FORWARD, payload(*names, directions=("bwd",))), kept=())
    left_out = [name for name in WHOLE.parameters if name not in names]
    finding = f"bucket 'layers.0': no node of the backward reads {', '.join(left_out)}"
    assert assert_same_layout(actual, BucketLayout((WHOLE,))) == (finding,)


@pytest.mark.parametrize(
    ("others", "kept", "words"),
    [
        ([payload(SCALE, WEIGHT, directions=("bwd",))], (), f"{SCALE} sits at byte 0, expected 4"),
        (
            [payload(WEIGHT, directions=("bwd",))],
            (SCALE,),
            f"gathers the bucket again without {SCALE}",
        ),
        (
            [payload(WEIGHT, directions=("fwd",))],
            (),
            f"an all_gather of {WEIGHT} that is not expected",
        ),
        (
            [payload(WEIGHT, directions=("bwd",)), payload(SCALE, directions=("bwd",))],
            (),
            f"of {SCALE} that is not",
        ),
        (
            [payload(WEIGHT, "other", directions=("bwd",))],
            (),
            f"of {WEIGHT}, other that is not expected",
        ),
        (
            [replace(payload(WEIGHT, directions=("bwd",)), dtype=torch.bfloat16)],
            (),
            "dtype is torch.bfloat16",
        ),
        (
            [replace(payload(WEIGHT, directions=("bwd",)), ranks=(0,))],
            (),
            "ranks is (0,), expected (0, 1)",
        ),
    ],
    ids=[
        "another order",
        "one is kept",
        "in the forward",
        "in two parts",
        "a foreign one",
        "dtype",
        "ranks",
    ],
)
def test_another_part_of_a_bucket_is_a_difference(others, kept, words):
    """D2: only one gather of the backward, of parameters of the bucket, in its order, over its
    ranks, is a part.
    """
    with pytest.raises(LayoutDifference) as raised:
        assert_same_layout(BucketLayout((FORWARD, *others), kept=kept), BucketLayout((WHOLE,)))
    assert words in str(raised.value)


def test_a_part_beside_a_whole_gather_in_the_backward_is_one_too_many():
    both = replace(WHOLE, directions=("fwd", "bwd"))
    with pytest.raises(LayoutDifference, match=f"an all_gather of {WEIGHT} that is not expected"):
        assert_same_layout(
            BucketLayout((both, payload(WEIGHT, directions=("bwd",)))), BucketLayout((WHOLE,))
        )
