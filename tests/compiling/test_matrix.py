"""The matrix: graphs of five tracers, of five models, under four wrappings, on 8 fake and 2 gloo
ranks.

A cell is a model and a wrapping in a world; it holds all its stages. What torch does not make is in
``REFUSED``, and a test sees that torch refuses it still. Versions of torch are compared by ``python
-m tests.compiling.matrix``.
"""

import itertools
import random
import re
from operator import getitem

import pytest
import torch

from pytest_gtrainer import graphtext
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.references.graph import texts_of_ranks
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import make_spec
from tests.compiling.matrix import (
    MODELS,
    REFUSED,
    WRAPPINGS,
    another_parameter,
    batch,
    graphs,
    texts,
    wrapped,
)

SAMPLE = 3
CELLS = [
    pytest.param(model, wrapping, marks=[pytest.mark.long] * (model == "deepseek_v3"))
    for model in MODELS
    for wrapping in WRAPPINGS
]
# Each wrapping and each model. All pairs have one text on the first and last of eight fake ranks.
PAIRS = [("gpt2", "tp"), ("qwen3", "data_parallel"), ("llama3", "ddp")]
GLOO_CELLS = [
    pytest.param(
        *cell.values,
        marks=[pytest.mark.long] * (cell.values[0] != "conv" and cell.values not in PAIRS),
    )
    for cell in CELLS
]


def fake(rank):
    return fake_world(make_spec("fake", size=8, rank=rank, mesh={"d": 8}))


@pytest.mark.second_tier
@pytest.mark.parametrize(("model", "wrapping"), CELLS)
def test_on_eight_fake_ranks(model, wrapping):
    """P1 and P2, of every stage: names, the way back, what changes the text; the last rank has it,
    too.
    """
    first = {}
    with fake(0) as world:
        for _, name, gm, names in graphs(model, wrapping, make_mesh(world)):
            first[name] = text = graphtext.render(gm, names=names)
            hold(adopt(gm, names), text)
    with fake(7) as world:
        other = texts(model, wrapping, make_mesh(world), another_parameter)
    assert other.keys() == first.keys()
    for name, text in first.items():
        lines = str(graphtext.diff(text, other[name], limit=10_000)).splitlines()
        assert any(line[:1] in "+-" and "unrelated" in line for line in lines), name
        gone = [line for line in lines if line[:1] == "-"]
        if (
            name == "make_fx"
        ):  # which gives no node its module: inputs keep their names, nodes may be counted anew
            gone = [line for line in gone if line[1:3] in ("P.", "B.", "I.", "I[")]
        assert not [line for line in gone if "layers" in line or "lm.transformer.h" in line], name


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"d": 2})
@pytest.mark.parametrize(("model", "wrapping"), GLOO_CELLS)
def test_on_two_gloo_ranks(gt_mesh, gt_world, model, wrapping):
    """P1: each rank has the same text, of every stage."""
    for name, text in texts(model, wrapping, gt_mesh).items():
        assert "A[" not in text, name
        if wrapping == "tp":  # of a gradient that all ranks have, each takes its own part
            text = re.sub(rf"(clone\(split\w*)\[{gt_world.rank}\]\)", r"\1[rank])", text)
        assert len(set(texts_of_ranks(text))) == 1, name


@pytest.mark.parametrize(("wrapping", "stage"), REFUSED)
def test_what_torch_refuses(wrapping, stage):
    with fake(0) as world:
        model = wrapped("conv", wrapping, make_mesh(world))
        with pytest.raises(RuntimeError) as refused:
            torch.export.export(model, (batch("conv"),))
    assert REFUSED[wrapping, stage] in str(refused.value)


def hold(gm, text):
    """The text says it all: it comes back, and changes with what counts and with nothing else."""
    assert "A[" not in text
    assert "L['" not in text
    allowed = ["profiler"] if "profiler." in text else []  # of DDP's forward, by make_fx
    again = graphtext.parse(text, constants=graphtext.constants(gm), allow=allowed)
    assert graphtext.render(again) == text
    nodes = [
        node for node in gm.graph.nodes if node.op == "call_function" and node.target is not getitem
    ]
    typed = [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    names = [node.name for node in nodes]
    for node in nodes:
        node.name = f"n_{node.name}"
    assert graphtext.render(gm) == text
    for node, name in zip(nodes, names, strict=True):
        node.name = name
    drawn = random.Random(0)
    for node in drawn.sample(typed, min(SAMPLE, len(typed))):
        value, target = node.meta["val"], node.target
        node.meta["val"] = value.to(torch.int8 if value.dtype != torch.int8 else torch.int16)
        assert graphtext.render(gm) != text, f"the dtype of {node}"
        node.meta["val"] = value.unsqueeze(0)
        assert graphtext.render(gm) != text, f"the shape of {node}"
        node.meta["val"] = value
        node.target = (
            torch.ops.aten.neg.default
            if target is not torch.ops.aten.neg.default
            else torch.ops.aten.abs
        )
        assert graphtext.render(gm) != text, f"the operator of {node}"
        node.target = target
    pairs = [
        (one, two)
        for one, two in itertools.pairwise(nodes)
        if one.next is two and one not in two.all_input_nodes
    ]
    for one, two in drawn.sample(pairs, min(SAMPLE, len(pairs))):
        one.prepend(two)
        assert graphtext.render(gm) != text, f"the order of {one} and {two}"
        two.prepend(one)
    assert graphtext.render(gm) == text
