"""Chunkings with one law broken on purpose: each must differ from eager chunking, or the checks see
nothing.
"""

from dataclasses import replace

import torch

from fixtures.chunking import Case, check_differs, check_equals_eager, chunked, strict
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from pytest_gtrainer.passes.chunking import rewrite


def check_control(model, broken, kind, num_chunks):
    """The honest rewriting equals; the broken one differs in ``kind``."""
    case = Case(model=model, config=strict("layers.*", num_chunks=num_chunks), steps=1)
    check_equals_eager(case)
    check_differs(replace(case, rewrite=broken), kind)


def test_gradients_added_first_chunk_first(monkeypatch):
    """G14: with four chunks; two would not show it."""

    def first_first(traced, config):
        fold = rewrite.Rewrite._fold
        monkeypatch.setattr(
            rewrite.Rewrite, "_fold", lambda self, terms, like: fold(self, terms[::-1], like)
        )
        return chunked(traced, config)

    check_control(net(chunkable.Dense), first_first, "gradient", num_chunks=4)


def test_bodies_interleaved_under_dropout(monkeypatch):
    """G15: both chunks' first random numbers are drawn before the second ones."""

    def emit_interleaved(self, region, copies):
        for node in region.body:
            for chunk in range(len(copies)):
                copies[chunk][node] = self._copy(node, copies[chunk], chunk, region)

    def interleaved(traced, config):
        monkeypatch.setattr(rewrite.Rewrite, "_emit_bodies", emit_interleaved)
        return chunked(traced, config)

    check_control(net(chunkable.TwoDropouts), interleaved, "gradient", num_chunks=2)


def test_factories_split_instead_of_recomputed():
    """G15: ``arange`` of the batch goes on in the second chunk instead of starting again."""

    def split(traced, config):
        gm = chunked(traced, config)
        (second,) = [node for node in gm.graph.nodes if node.name == "arange_chunk1"]
        second.args = (2, 4)
        second.target = torch.ops.aten.arange.start
        gm.recompile()
        return gm

    check_control(net(chunkable.Factories), split, "gradient", num_chunks=4)


def test_a_stale_buffer():
    """G7: the second chunk reads what the buffer was before the first one."""

    def stale(traced, config):
        gm = chunked(traced, config)
        first, *_, second = [
            node for node in gm.graph.nodes if node.name in ("lerp__chunk0", "lerp__chunk1")
        ]
        with gm.graph.inserting_before(first):
            before = gm.graph.call_function(torch.ops.aten.clone.default, (first.args[0],))
        (reader,) = [user for user in second.users if "sub" in user.name]
        reader.replace_input_with(second, before)
        gm.recompile()
        return gm

    check_control(net(chunkable.RunningMean), stale, "gradient", num_chunks=2)
