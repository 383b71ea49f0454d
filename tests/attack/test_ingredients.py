"""``fuzz --models``: models of what training code combines, drawn by a seed."""

import copy
from collections import Counter

import pytest
import torch
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.attack.fuzz import GRAPHS_OF_A_MODEL, Fuzzer
from pytest_gtrainer.attack.ingredients import (
    EXPERTS,
    FULLY_SHARD,
    REPLICATE,
    SEQUENCE,
    TENSOR,
    Ingredients,
    draw_ingredients,
    graph_of,
    models_over,
)
from pytest_gtrainer.graph.collectives import kind_of, launches


def fuzz(name, folder, *arguments):
    options = ["--models", "--folder", str(folder), "--minutes", "0.5", *map(str, arguments)]
    return main(["fuzz", "--gt-pass", f"{__name__}:{name}", *options])


def collectives(gm):
    return Counter(kind_of(node) for node in gm.graph.nodes if launches(node.target))


def test_seeds_make_models_of_every_kind():
    drawn = [draw_ingredients(seed, dimensions=2) for seed in range(200)]
    kinds = {(each.data, each.across) for each in drawn}
    wanted = set()
    for data in (FULLY_SHARD, REPLICATE, ""):
        for across in (TENSOR, SEQUENCE, EXPERTS, ""):
            wanted.add((data, across))
    assert kinds == wanted
    for name in ("gated", "bias", "tied", "drops", "canonical"):
        assert {getattr(each, name) for each in drawn} == {False, True}
    assert drawn == [draw_ingredients(seed, dimensions=2) for seed in range(200)]


def test_a_mesh_of_one_dimension_has_one_kind_of_parallelism():
    drawn = [draw_ingredients(seed, dimensions=1) for seed in range(100)]
    assert not any(each.data and each.across for each in drawn)
    assert any(each.data for each in drawn)
    assert any(each.across for each in drawn)
    alone = [draw_ingredients(seed, dimensions=0) for seed in range(100)]
    assert not any(each.data or each.across for each in alone)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Ingredients(data=FULLY_SHARD), {"all_gather", "reduce_scatter"}),
        (Ingredients(data=REPLICATE), {"all_reduce"}),
        (Ingredients(across=TENSOR), {"all_gather", "all_reduce"}),
        (Ingredients(across=SEQUENCE, gated=True), {"all_gather", "reduce_scatter"}),
        (  # gradients of norms are partial sums
            Ingredients(data=REPLICATE, across=SEQUENCE, norm="rms"),
            {"all_gather", "reduce_scatter", "all_reduce"},
        ),
        (Ingredients(across=EXPERTS, tied=True), {"all_to_all"}),
        (
            Ingredients(data=FULLY_SHARD, across=EXPERTS, gathered=torch.bfloat16),
            {"all_gather", "reduce_scatter", "all_to_all"},
        ),
    ],
    ids=lambda each: f"{each.data} {each.across}" if isinstance(each, Ingredients) else "",
)
@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
def test_a_model_has_the_collectives_of_its_parallelism(given, wanted, gt_mesh):
    gm = graph_of(given, gt_mesh)
    assert set(collectives(gm)) == wanted
    text = graphtext.render(gm)
    assert graphtext.render(graphtext.parse(text)) == text


@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
def test_each_model_is_tried_whole_and_then_in_parts(gt_mesh, tmp_path):
    """A seed makes the same graph again, whatever was made before."""
    seen = []

    def note_pass(gm, inputs):
        seen.append(graphtext.render(gm))
        return gm

    make = models_over(4)

    def fuzzer():
        return Fuzzer(note_pass, "it", "reordered", 4, tmp_path, print, make_model=make)

    first = fuzzer()
    for seed in (0, 1, GRAPHS_OF_A_MODEL):
        first._try(seed, 20)
    assert seen[0] == graphtext.render(make(0))
    assert seen[2] == graphtext.render(make(1))
    fuzzer()._try(1, 20)
    assert seen[3] == seen[1]
    assert len(set(seen)) == 3


def nothing_pass(gm, inputs):
    return gm


def add_gradients_pass(gm, inputs):
    """Takes a sum over ranks for a mean."""
    for node in gm.graph.nodes:
        if launches(node.target) and "avg" in node.args:
            node.args = tuple("sum" if each == "avg" else each for each in node.args)
    gm.recompile()
    return gm


def copy_pass(gm, inputs):
    """Leaves all values as they are."""
    gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        with gm.graph.inserting_after(node):
            made = gm.graph.call_function(torch.ops.aten.alias.default, (node,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    gm.recompile()
    return gm


@pytest.mark.second_tier
def test_a_mistake_is_found_on_generated_models(tmp_path):
    assert fuzz("add_gradients_pass", tmp_path, "--failures", 1, "--ranks", 2) == 1
    [path] = tmp_path.glob("*.fxgraph")
    assert "from a model of --models" in path.read_text()


@pytest.mark.second_tier
@pytest.mark.parametrize("ranks", [0, 4])
def test_a_right_pass_is_not_blamed_on_generated_models(ranks, tmp_path, capsys):
    assert fuzz("copy_pass", tmp_path, "--ranks", ranks, "--minutes", 0.1) == 0
    assert "0 failures" in capsys.readouterr().err


def test_graphs_are_made_from_one_kind_of_model(tmp_path, capsys):
    assert fuzz("nothing_pass", tmp_path, "--gt-model", "it:it") == 2
    assert "--models and --gt-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(3, "--models --ranks=3: give an even number"), (1, "--ranks=1: give 2 or more, or 0")],
)
def test_models_are_not_divided_among_three_ranks(ranks, words, tmp_path, capsys):
    assert fuzz("nothing_pass", tmp_path, "--ranks", ranks) == 2
    assert words in capsys.readouterr().err


@pytest.mark.gt_world("fake", mesh={"dp": 3, "tp": 2})
def test_models_are_sharded_over_three_ranks(gt_mesh):
    make = models_over(6)
    for seed in range(12):
        make(seed).graph.lint()
