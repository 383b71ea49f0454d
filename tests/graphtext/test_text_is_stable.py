"""Changes that must not change a text, and the lines that a change may touch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer.graphtext import lines_of, render
from tests.graphtext.toy import small_graph, toy_graph

pytestmark = pytest.mark.second_tier


def test_node_names_do_not_show():
    graph, renamed = toy_graph(), toy_graph()
    for count, node in enumerate(renamed.graph.nodes):
        node._rename(f"other_{1000 - 3 * count}")
    assert render(renamed) == render(graph)


def test_another_process_and_hash_seed_give_the_same_text():
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-m", "tests.graphtext.toy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == render(toy_graph())


def collectives(*groups: dist.ProcessGroup) -> torch.fx.GraphModule:
    graph = small_graph(lambda x: x.relu(), torch.zeros(4))
    (relu,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    with graph.graph.inserting_after(relu):
        for group in groups:
            arguments = (relu, "sum", group.group_name)
            reduced = graph.graph.call_function(
                torch.ops._c10d_functional.all_reduce.default, arguments
            )
            reduced.meta["val"] = relu.meta["val"]
    return graph


@pytest.mark.gt_world("fake", mesh={"dp": 2, "fsdp": 4})
def test_the_order_in_which_groups_are_made_does_not_show(gt_world, gt_mesh):
    dp, fsdp = dist.new_group([0, 4]), dist.new_group([0, 1, 2, 3])
    text = render(collectives(dp, fsdp), mesh=gt_world.mesh)
    dist.new_group([5, 6])
    fsdp, dp = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 4])
    assert render(collectives(dp, fsdp), mesh=gt_world.mesh) == text
    assert "dp = group(range(0, 8, 4))" in text
    assert "fsdp = group(range(0, 4))" in text


@pytest.mark.gt_world("fake", mesh={"dp": 2, "fsdp": 4})
def test_groups_are_named_by_mesh_dimension_and_told_apart(gt_world, gt_mesh):
    second = dist.new_group([0, 1, 2, 3])
    text = render(
        collectives(second, gt_mesh.get_group("fsdp"), gt_mesh.get_group("dp")), mesh=gt_world.mesh
    )
    assert [line for line in text.splitlines() if "= group(" in line] == [
        "dp = group(range(0, 8, 4))",
        "fsdp = group(range(0, 4))",
        "fsdp_2 = group(range(0, 4))",
    ]


def test_a_group_of_no_process_group_is_still_a_symbol():
    graph = small_graph(lambda x: x.relu(), torch.zeros(4))
    (relu,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    relu.target, relu.args = (
        torch.ops._c10d_functional.all_reduce.default,
        (relu.args[0], "sum", "17"),
    )
    assert "group = group(None)" in render(graph)
    assert "17" not in render(graph)


def test_a_change_in_one_layer_leaves_the_others_alone():
    before, after = (
        lines_of(toy_graph(6)),
        lines_of(toy_graph(6, {3: lambda x: torch.sin(x) * torch.cos(x)})),
    )
    changed = {record.section for record in {*before} ^ {*after}}
    assert changed == {"fwd.layers[3]"}


def test_a_text_is_python():
    tree = ast.parse(render(toy_graph(6, {3: torch.tanh})))
    assert {type(statement) for statement in tree.body} <= {ast.If, ast.For, ast.Assign}


def test_where_independent_constants_stand_does_not_show():
    """`get_attr` nodes in any order, at the front or before their use."""
    text = None
    for order in ("ab", "ba"):
        graph = fx.Graph()
        source = graph.placeholder("v")
        constants = {name: graph.get_attr(name) for name in order}
        for name in "ab":
            source = graph.call_function(torch.ops.aten.add.Tensor, (source, constants[name]))
        graph.output(source)
        gm = fx.GraphModule({"a": torch.ones(2), "b": torch.zeros(2)}, graph)
        assert render(gm) == (text or render(gm))
        text = render(gm)


PROJECT = """
import pytest
from tests.graphtext.toy import toy_graph

@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_layers(gt_golden, layers):
    gt_golden.check(toy_graph(layers))
"""


@pytest.mark.long
def test_workers_of_xdist_give_the_same_text(pytester):
    pytester.makepyfile(PROJECT)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parents[2]}")
    pytester.runpytest_inprocess("--gt-update-goldens").assert_outcomes(passed=4)
    pytester.runpytest_subprocess("-n4").assert_outcomes(passed=4)
