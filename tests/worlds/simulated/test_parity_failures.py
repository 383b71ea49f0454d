"""A failed check on many nodes names both layouts, the step, the element, and who adds it when."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fixtures.models.llama3 import FLAVORS, Llama3
from fixtures.models.loss import ce_step
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    BucketLayout,
    NetModel,
    TrainConfig,
    VacuousCheck,
    assert_bitwise_equal,
    assert_simulated_parity,
    facts,
    sweep_nets,
    train_eager,
    train_graph,
)
from pytest_gtrainer.conformance.recipes import Recipe
from pytest_gtrainer.graph.layout import LayoutDifference, Payload, Slot
from pytest_gtrainer.numerics.compare import BitwiseDifference, compare
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.parity import paths_of_first
from pytest_gtrainer.swallowed import FailedChecks
from pytest_gtrainer.worlds.simulated import DependsOnRank

CONFIG = functools.partial(llama3_training, precision="fp32", steps=1)
EIGHT = pytest.mark.gt_world("simulated", size=8, nodes=2)


def first_element(text: str) -> int:
    """Return the place of the first difference in its matrix; it depends on the processor."""
    row, column = re.search(
        r"first at step 0, rank 0, gradient of \S+, element \((\d+), (\d+)\)", text
    ).groups()
    width = re.search(r"ULP apart; \d+ of \d+ elements of this f32\[\d+, (\d+)\]", text)[1]
    return int(row) * int(width) + int(column)


def twice_as_much_when_traced(model, tokens, labels):
    loss = ce_step(model, tokens, labels)
    return loss if get_proxy_mode() is None else loss * 2


@pytest.mark.second_tier
@EIGHT
def test_bits_that_differ_are_told_with_the_path_of_the_element(gt_world):
    """L4: the layouts are equal here, so each side has the element at the same place, and adds it
    in the same order.
    """
    with pytest.raises(BitwiseDifference) as error:
        assert_simulated_parity(functools.partial(CONFIG, step=twice_as_much_when_traced), gt_world)
    text = str(error.value)
    assert re.search(
        r"first at step 0, rank 0, loss\n    actual   12\.316\d+  0x41451[0-9a-f]{3}\n", text
    )
    assert "step 0, rank 0, gradient of layers.0.attention.wq.weight: 512 of 512" in text
    # next(0), next(next(0)), ..., 0 on the ring 0 3 2 1 4 7 6 5
    path = (
        "reduce_scatter, element 0 of 2048, channel 0, summed in the order of ranks 3 2 1 4 7 6 5 0"
    )
    for side in ("graph", "eager"):
        assert (
            f"  {side}: bucket 'tok_embeddings', {path}\n    > byte 0: tok_embeddings.weight, 8192 "
            f"bytes" in text
        )


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2)
def test_other_starting_weights_are_told_before_their_first_bit(gt_world):
    """The loss differs first and is not the cause; runs from one seed do not say so."""

    def seeded(seed):
        model = Llama3(FLAVORS["debug"])
        model.init_weights(seed=seed)
        return model

    eager = train_eager(CONFIG, world=gt_world)
    others = {
        "weights": functools.partial(CONFIG, model=lambda: seeded(1)),
        "step": functools.partial(CONFIG, step=twice_as_much_when_traced),
    }
    causes = {}
    for name, config in others.items():
        with pytest.raises(BitwiseDifference) as error:
            assert_bitwise_equal(
                train_graph(config, world=gt_world), eager, what="graph against eager"
            )
        causes[name] = str(error.value).splitlines()[1]
    assert (
        causes["weights"]
        == "the two runs start from different weights, on ranks 0, 1: seed both sides alike"
    )
    assert "start" not in causes["step"]


LAYOUTS_AROUND_WQ = """
  graph: bucket 'layers.0', reduce_scatter, element 4872 of 5392, channel 3, \
summed in the order of ranks 7 6 5 4 3 2 1 0
      byte 17440: layers.0.attention.wv.weight, 1024 bytes
      byte 18464: layers.0.attention.wk.weight, 1024 bytes
    > byte 19488: layers.0.attention.wq.weight, 2048 bytes
      byte 21536: layers.0.attention_norm.weight, 32 bytes
  eager: bucket 'layers.0', reduce_scatter, element 0 of 5392, channel 0, \
summed in the order of ranks 3 2 1 4 7 6 5 0
    > byte 0: layers.0.attention.wq.weight, 2048 bytes
      byte 2048: layers.0.attention.wk.weight, 1024 bytes
      byte 3072: layers.0.attention.wv.weight, 1024 bytes"""


@pytest.mark.second_tier
@EIGHT
def test_execution_order_is_told_by_layout_and_bits(gt_world):
    """S1: the bug of pull request 3590.

    The message has bucket, parameters, step, element, both layouts and both orders of ranks.
    """
    with pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(CONFIG, gt_world, payload_order="execution")
    text = str(error.value)
    assert (
        "bucket 'layers.0', reduce_scatter: layers.0.attention.wq.weight sits at byte 19488, "
        "expected 0" in text
    )
    assert "and therefore bits are different" in text
    assert "first at step 0, rank 0, gradient of layers.0.attention.wq.weight, element (" in text
    assert re.search(r"ULP apart; \d+ of 512 elements of this f32\[8, 64\]", text)
    first = first_element(text)
    here = LAYOUTS_AROUND_WQ.replace("element 4872 ", f"element {4872 + first} ")
    assert here.replace("element 0 ", f"element {first} ") in text
    assert text.splitlines()[-1].startswith("rounding or a bug? assert_parity(config, gt_world,")
    assert LAYOUTS_AROUND_WQ in Path("docs/worlds.md").read_text()


class SecondFirst(nn.Module):
    """Its parameters are registered in another order than they are used in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)).sum()


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_layouts_that_differ_are_one_failure(gt_world):
    """The difference that the check itself catches, to add the bits, is none that a test hides."""
    failed = FailedChecks()

    def training(mesh):
        return TrainConfig(
            model=SecondFirst,
            step=lambda model, x: model(x),
            batch=lambda step, rank: (torch.ones(2, 4),),
            bucket_plan=[["second", "first"]],
            mesh=mesh,
            steps=1,
        )

    with facts.failing_checks(failed.note), pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(training, gt_world, payload_order="execution")
    failed.forget(error.value)
    failed.raise_hidden()


@pytest.mark.second_tier
@EIGHT
def test_execution_order_of_routed_experts(gt_world):
    """S1: the same bug in the other model."""
    config = functools.partial(
        deepseek_v3_training, precision="fp32", flavor="debug_small", steps=1
    )
    with pytest.raises(LayoutDifference) as error:
        assert_simulated_parity(config, gt_world, payload_order="execution")
    text = str(error.value)
    assert "layers.1.moe.routed_experts.w1 sits at byte 24576, expected 0" in text
    assert "first at step 0, rank 0, gradient of layers.0.attention.wq_a.weight, element (" in text
    first = first_element(text)
    assert (
        f"graph: bucket 'layers.0', reduce_scatter, element {4620 + first} of 5592, channel 3, "
        f"summed in" in text
    )
    assert (
        f"eager: bucket 'layers.0', reduce_scatter, element {first} of 5592, channel 0, summed in"
        in text
    )


INVISIBLE = [
    *sweep_nets(8, nodes=[1], channels=[4]),
    *sweep_nets(8, nodes=[2], channels=[1]),
    *sweep_nets(8, nodes=[2], channels=[4], accumulate=["fp32"]),
]


@pytest.mark.second_tier
@EIGHT
@pytest.mark.parametrize("net", INVISIBLE)
def test_the_bug_is_invisible(gt_world, net):
    """S1: where all channels add a shard in one order, or accumulate in fp32, only the layout sees
    it.
    """
    world = dataclasses.replace(gt_world, net=net)
    with pytest.raises(
        LayoutDifference, match="all bits are equal under this net: only the layout shows it"
    ):
        assert_simulated_parity(CONFIG, world, payload_order="execution")


def test_an_element_is_counted_in_the_dtype_of_the_wire():
    """A gradient comes back in fp32 from a reduction in bf16, whose payload has elements of two
    bytes.
    """
    slots = Slot("first", 0, 16), Slot("second", 16, 16)
    layouts = {
        "graph": BucketLayout((Payload("reduce_scatter", torch.bfloat16, (0, 1), "avg", slots),))
    }
    records = Record(world_size=2), Record(world_size=2)
    for number, record in enumerate(records):
        record.add(0, 0, "gradient", "second", torch.full((8,), float(number)))
    line = next(
        paths_of_first(
            NetModel(1, 2), layouts, lambda rank, ranks: ranks, compare(*records), records[0]
        )
    )
    assert "element 8 of 16," in line, f"the first of the second eight elements: {line}"


@pytest.mark.gt_world("simulated", size=2)
def test_a_layout_that_differs_fails_where_no_bit_does(gt_world):
    """S1: two ranks add a + b in any order."""
    with pytest.raises(
        LayoutDifference, match="all bits are equal under this net: only the layout shows it"
    ):
        assert_simulated_parity(Recipe(reduced=None).config, gt_world, payload_order="execution")


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=8, nodes=1)
def test_a_check_that_could_not_fail_is_no_pass(gt_world):
    """S3: the graph is right, and one node with rail rings would not have shown if it were not.

    The control trains for one step, and the first of two is what it is compared with.
    """
    with pytest.raises(
        VacuousCheck, match=r"could not fail.*take two nodes or more with two channels"
    ):
        assert_simulated_parity(Recipe(reduced=None).config, gt_world)


class Roots(torch.nn.Module):
    """Gradients of 1, some of them infinite: the root of 0 is 0.

    All of them NaN with ``scale=nan``.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.values = scale, torch.nn.ParameterList(torch.ones(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(value.sum() + (value[0] - 1).sqrt() for value in self.values) * self.scale


def roots(mesh, scale: float):
    ones = (torch.ones(1),)
    fields = {
        "model": lambda: Roots(scale),
        "step": lambda model, x: model(x),
        "batch": lambda step, rank: ones,
    }
    return TrainConfig(mesh=mesh, bucket_plan=[["values", ""]], steps=1, **fields)


@EIGHT
def test_an_order_that_infinite_gradients_hide(gt_world):
    """V6: the cause is not that sums are exact."""
    with pytest.raises(VacuousCheck, match="because gradients or losses hold NaN or inf"):
        assert_simulated_parity(functools.partial(roots, scale=1.0), gt_world)


@EIGHT
def test_a_run_that_is_not_finite_is_no_parity(gt_world):
    """V6"""
    with pytest.raises(
        BitwiseDifference, match="the run is not finite: step 0, rank 0, loss is NaN"
    ):
        assert_simulated_parity(functools.partial(roots, scale=float("nan")), gt_world)


@EIGHT
def test_a_world_of_odd_shards_is_refused(gt_world):
    """S4: by parameter and dimension, before anything is traced."""
    config = functools.partial(llama3_training, precision="fp32", flavor="debug_odd", steps=1)
    with pytest.raises(
        DependsOnRank, match=r"w1\.weight has 201 elements in dimension 0, and 8 ranks share them"
    ):
        train_graph(config, world=gt_world)
