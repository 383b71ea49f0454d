"""Chunked graphs as text: what a node's chunk is, whoever chunked it."""

import operator

import pytest

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from fixtures.models.loss import ce_step
from pytest_gtrainer import eager_chunked, graphtext, trace_step
from pytest_gtrainer.graph.nodes import KEYS

CONFIG = strict("layers.*")


def by_graph(model):
    return chunked(trace_step(model, ce_step, token_batch(0), chunk=CONFIG), CONFIG)


def by_eager_code(model):
    with eager_chunked(model, CONFIG):
        return trace_step(model, ce_step, token_batch(0)).gm


def test_consecutive_chunked_blocks(gt_golden):
    """Six blocks fold; each hands its chunks to the next, and only the last one's are joined."""
    gt_golden.check(by_graph(net(*[chunkable.Dense] * 6)()))


@pytest.mark.second_tier("by_eager_code", "by_graph")
@pytest.mark.parametrize("producer", [by_graph, by_eager_code])
def test_the_text_tells_all_of_it(producer):
    """I3, G11: reading it gives the annotations back."""
    gm = producer(net(chunkable.Dense, chunkable.MoEBlock)())
    text = str(graphtext.render(gm))
    again = graphtext.parse(text)
    assert str(graphtext.render(again)) == text
    assert annotations(again) == annotations(gm)
    assert len({str(annotation) for annotation in annotations(gm)}) > 4


def annotations(gm):
    """Return the annotations in order of the nodes."""
    nodes = [
        node for node in gm.graph.nodes if node.target is not operator.getitem
    ]  # these have no line of their own
    customs = [node.meta.get("custom") or {} for node in nodes]
    return [
        {key: custom[key] for key in KEYS if key in custom}
        for custom in customs
        if set(KEYS) & set(custom)
    ]


@pytest.mark.parametrize(
    "tag", ["chunk(L)", "chunk(L, body)", "chunk(L, 0, graph)", "chunk(L, 1.5)"]
)
def test_a_tag_that_is_none(tag):
    lines = ["# gtrainer graph v2", "if I:", "  I[0]: f32[2]", "if fwd:", "  with _:"]
    text = "\n".join([*lines, f"    neg: f32[2] | {tag} = aten.neg(I[0])", ""])
    with pytest.raises(
        graphtext.TextError, match=r"expected `chunk\(path, 0\)` or `chunk\(path, split_boundary\)`"
    ):
        graphtext.parse(text)
