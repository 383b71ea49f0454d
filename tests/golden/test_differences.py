"""A failure says in words what differs, then shows bounded lines."""

from __future__ import annotations

import time

from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.golden.diff import LIMIT, text_diff
from pytest_gtrainer.graphtext import header

HEAD = "# gtrainer graph v1\n# torch: 2.13\nfsdp = group(range(0, 8))\n"
LAYER = """\
  with L.norm:
    mul: f32[2] = aten.mul(layers[i-1].add)
  with bucket(layers[i+1]):
    all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(P.w, 8, fsdp)
  with L:
    add: f32[2] = aten.add(L.norm.mul)
"""
GRAPH = HEAD + "for i in fwd.layers[0:4]:  # x4\n" + LAYER


def said(golden: str, obtained: str) -> str:
    found = difference("graph", golden, obtained)
    assert found is not None
    return found


def test_another_folding_is_no_difference():
    unfolded = HEAD + "".join(f"for i in fwd.layers[{layer}]:\n{LAYER}" for layer in range(4))
    assert difference("graph", GRAPH, unfolded) is None


def test_another_header_is_no_difference():
    assert difference("graph", GRAPH, GRAPH.replace("torch: 2.13", "torch: 2.14")) is None


def test_operators_are_named_per_module_with_all_layers():
    first = "for i in fwd.layers[0]:\n" + LAYER
    others = "for i in fwd.layers[1:4]:  # x3\n" + LAYER.replace("aten.mul", "aten.div")
    text = said(GRAPH, HEAD + first + others)
    assert text.startswith("fwd layers[1..3].norm: lost aten.mul, gained aten.div\n")
    assert "@@ fwd.layers[1..3] @@\n-L.norm | mul: f32[2] = aten.mul(" in text


def test_collectives_are_counted():
    fewer = GRAPH.replace(LAYER.splitlines()[2] + "\n" + LAYER.splitlines()[3] + "\n", "")
    assert "all_gather_into_tensor: 4 became 0" in said(GRAPH, fewer)


def test_types_operands_and_the_schedule_are_told_apart():
    assert said(GRAPH, GRAPH.replace("mul: f32", "mul: bf16")).startswith(
        "the same operators, but types differ in 4, first in fwd layers[0].norm: aten.mul"
    )
    operand = GRAPH.replace("(L.norm.mul)", "(L.other)")
    assert said(GRAPH, operand).startswith("the same operators, but operands differ in 4, first in")
    lines = LAYER.splitlines(keepends=True)
    moved = GRAPH.replace(LAYER, "".join([*lines[2:4], *lines[:2], *lines[4:]]))
    assert said(GRAPH, moved).startswith("the same operations in another order: only the schedule differs")


def test_groups_inputs_and_outputs_are_told_apart():
    groups = GRAPH.replace("range(0, 8)", "range(0, 4)")
    assert said(GRAPH, groups).startswith("process groups changed: 1 lines lost, 1 gained")
    assert said(GRAPH, GRAPH + "if P:\n  P.x: f32[2]\n").startswith("inputs changed: 0 lines lost, 1 gained")
    assert said(GRAPH, GRAPH + "if out:\n  yield fwd.x\n").startswith("outputs changed: 0 lines lost, 1")


def test_another_torch_is_mentioned():
    obtained = GRAPH.replace("2.13", "2.14").replace("aten.mul", "aten.div")
    assert "made with torch 2.13, running 2.14\n" in said(GRAPH, obtained)
    assert header.read(obtained)["torch"] == "2.14"


def test_a_diff_is_bounded_in_lines_and_in_time():
    # each line 200 times: too rare for difflib to leave it out, often enough to take it minutes
    old = [f"line {number * 7 % 200}" for number in range(40_000)]
    new = [f"line {number * 11 % 200}" for number in range(40_000)]
    start = time.perf_counter()
    shown = text_diff(old, new)
    assert time.perf_counter() - start < 1
    assert len(shown) == LIMIT + 1
    assert shown[-1] == "… and more"


def test_one_line_of_many_is_found():
    lines = [f"line {number}" for number in range(40_000)]
    assert text_diff(lines, [*lines[:30_000], "new", *lines[30_000:]])[2] == "@@ -29998,6 +29998,7 @@"
