"""Messages of failing goldens: words, notes, then bounded lines that fit a terminal."""

import gc
import glob
import json
import re

import pytest

from pytest_gtrainer.golden.compare import difference, judge
from pytest_gtrainer.graphtext import diff, header

HEAD = "# gtrainer graph v2\n# torch: 2.13\nfsdp = group(range(0, 8))\n"
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
    assert diff(GRAPH, unfolded) == ""


def test_another_header_is_no_difference():
    assert difference("graph", GRAPH, GRAPH.replace("torch: 2.13", "torch: 2.14")) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("graph v2", "graph v1", "the old text has format v2, the new one v1: render both again"),
        ("graph v2", "graph v3", "the old text has format v2, the new one v3: render both again"),
        (
            "# torch: 2.13\n",
            "# view: layout\n# torch: 2.13\n",
            "the old text has view full, the new one layout",
        ),
        (
            "# torch: 2.13\n",
            "# groups: dp = [0, 2] [1, 3]\n",
            "the old text has groups those of the first rank, the new one dp = [0, 2] [1, 3]",
        ),
    ],
)
def test_headers_that_give_lines_another_meaning_are_a_difference(before, after, said):
    """Equal lines of two formats, views or partitions are not equal; a text without a header has
    none of these.
    """
    other = GRAPH.replace(before, after)
    assert diff(GRAPH, other).startswith(said)
    assert diff(other, GRAPH) != ""
    assert diff(other, other) == diff(header.body(GRAPH), other) == ""


def test_words_then_lines():
    first = "for i in fwd.layers[0]:\n" + LAYER
    others = "for i in fwd.layers[1:4]:  # x3\n" + LAYER.replace("aten.mul", "aten.div")
    assert (
        said(GRAPH, HEAD + first + others)
        == """\
the dataflow differs, first at aten.div in fwd layers.1.norm
fwd layers[1..3].norm: lost aten.mul, gained aten.div

--- golden
+++ obtained
@@ fwd.layers[1..3] @@
-L.norm | mul: f32[2] = aten.mul(layers[i-1].add)
+L.norm | mul: f32[2] = aten.div(layers[i-1].add)
 bucket(layers[i+1]) | all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(P.w, 8, fsdp)
 L | add: f32[2] = aten.add(L.norm.mul)"""
    )


def test_another_torch_is_mentioned_after_the_words():
    obtained = GRAPH.replace("2.13", "2.14").replace("aten.mul", "aten.div")
    words, _, lines = said(GRAPH, obtained).partition("\n\n")
    assert words.endswith("\nmade with torch 2.13, running 2.14")
    assert lines.startswith("--- golden\n")
    assert header.read(obtained)["torch"] == "2.14"


# -- the first sentence


def test_only_the_schedule():
    lines = LAYER.splitlines(keepends=True)
    moved = GRAPH.replace(LAYER, "".join([*lines[2:4], *lines[:2], *lines[4:]]))
    assert said(GRAPH, moved).startswith(
        "same dataflow, other schedule (4 of 12 operators moved)\n"
    )


def test_only_the_spelling():
    """The name of a value means nothing."""
    renamed = GRAPH.replace("mul:", "mul_1:").replace("norm.mul)", "norm.mul_1)")
    words, _, lines = said(GRAPH, renamed).partition("\n\n")
    assert words == "same dataflow, same schedule: only the spelling differs"
    assert "-L.norm | mul: f32[2]" in lines


def test_only_modules_buckets_or_tags():
    tagged = GRAPH.replace("f32[2] = aten.mul", "f32[2] | must_save = aten.mul")
    assert said(GRAPH, tagged).startswith(
        "same dataflow, same schedule, other modules, buckets or tags\n"
    )


def test_only_what_no_value_uses():
    text = GRAPH.replace("fsdp = ", "tp = group(range(0, 2))\nfsdp = ")
    assert said(GRAPH, text).startswith(
        "same dataflow, same schedule, other definitions at the head\n"
    )


def test_all_of_it():
    obtained = GRAPH.replace("aten.mul", "aten.div")
    assert said(GRAPH, obtained).startswith(
        "the dataflow differs, first at aten.div in fwd layers.0.norm\n"
    )


def test_what_was_lost_is_named_where_nothing_is_new():
    longer = GRAPH + "if fwd:\n  with loss:\n    sum: f32[()] = aten.sum(layers[3].add)\n"
    assert said(longer, GRAPH).startswith("the dataflow differs, without aten.sum in fwd loss\n")


# -- width and length


def test_no_line_is_wider_than_a_terminal():
    operands = ", ".join(
        f"layers[{number}].a_rather_long_module_name.value" for number in range(40)
    )
    wide = HEAD + f"if fwd:\n  with {'a' * 300}:\n    cat: f32[2] = aten.cat([{operands}])\n"
    obtained = wide.replace("layers[39]", "layers[38]").replace("aten.cat", "aten.stack")
    lines = said(wide, obtained).splitlines()
    assert max(map(len, lines)) <= 160
    assert lines[0].endswith("…")


def test_lines_that_differ_out_of_sight_are_cut_on_the_left():
    operands = ", ".join(f"layers[{number}].value" for number in range(40))
    wide = HEAD + f"if fwd:\n  with L:\n    cat: f32[2] = aten.cat([{operands}])\n"
    lost, gained = said(wide, wide.replace("layers[38]", "layers[37]")).splitlines()[-2:]
    assert lost.startswith("-L | cat: f32[2] = aten.cat([layers[0].")
    assert lost.endswith("layers[38].value, layers[39].value])")
    assert gained.endswith("layers[37].value, layers[39].value])")


def test_words_are_at_most_a_dozen():
    modules = [
        f"  with m{number}{'x' * number}:\n    a{number}: f32[2] = aten.op{number}(I[0])\n"
        for number in range(30)
    ]
    golden = HEAD + "if I:\n  I[0]: f32[2]\nif fwd:\n" + "".join(modules)
    words, _, _ = said(golden, golden.replace("aten.op", "aten.other")).partition("\n\n")
    assert len(words.splitlines()) == 12
    assert words.splitlines()[-1] == "… and 20 more such differences"


def test_the_number_of_lines_is_given():
    golden = (
        HEAD + "if fwd:\n" + "".join(f"  a{number}: f32[2] = aten.op()\n" for number in range(300))
    )
    _, _, lines = (
        difference("graph", golden, golden.replace("op(", "other("), limit=10) or ""
    ).partition("\n\n")
    assert len(lines.splitlines()) == 11
    assert lines.endswith("\n… and more")


@pytest.mark.parametrize(
    "damage", ["if fwd:\n  with L:\n    what is this\n", "if fwd:\n  x: f32[2] = = aten.mm((\n"]
)
def test_what_is_no_statement_is_compared_as_a_line(damage):
    golden = "# gtrainer graph v2\n" + damage
    assert "\n+" in said(golden, golden + "  and more\n")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was(enabled):
    """It is off while graphs are compared; what others have frozen stays so."""
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        assert diff(GRAPH, GRAPH.replace("aten.", "prims."))
        assert gc.isenabled() == enabled
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_schedule_says_what_changed_inside_of_a_body():
    body = "def cond_graph_0():\n  if fwd:\n    launch(_.all_reduce, fsdp, f32[2], bytes=8)\n"
    text = f"{body}if fwd:\n  call(L, cond, cond_graph_0)\n"
    found = diff(text, text.replace("bytes=8", "bytes=16")).splitlines()[0]
    assert found.startswith(
        "in cond_graph_0: fwd: lost launch(_.all_reduce, fsdp, f32[2], bytes=8)"
    )


def test_what_commands_a_terminal_is_shown_as_letters(run, pytester, goldens):
    """Colours, titles and the direction of writing of a golden do not reach the reader's
    terminal.
    """
    source = "def test_a(gt_golden):\n    gt_golden.check({!r})"
    text = "one\n\x1b]0;title\x07\u202etwo\u200b\n"
    shown = "\\x1b]0;title\\x07\\u202etwo\\u200b"
    missing = run(source.format(text))
    assert shown in missing.stdout.str()
    assert "\u202e" not in missing.stdout.str()
    assert "\x1b]0" not in missing.stdout.str()
    run(source.format(text), "--gt-update-goldens")
    differs = run(source.format("one\ntwo\n"))
    differs.stdout.fnmatch_lines([f"*-{glob.escape(shown)}", "*+two"])
    assert "\u202e" not in differs.stdout.str()


ODD = "\x1b[31m\u202e"
GRAPH_OF_TESTS = """
import json, pytest, torch

graph = torch.fx.Graph()
x = graph.placeholder("x")
graph.output((x,))
x.meta["val"] = torch.zeros(2)

@pytest.mark.parametrize("case", ["header", "damaged", "field"])
def test_graph(gt_golden, case):
    gt_golden.check(torch.fx.GraphModule({}, graph))

def test_numbers(gt_golden):
    gt_golden.check([1.0])

def test_like():
    from pytest_gtrainer.graphtext import parse
    parse("# gtrainer graph v1\\n# remake: ODD\\n")
""".replace("ODD", "\\x1b[31m\\u202e")


@pytest.mark.second_tier
def test_no_part_of_a_golden_commands_a_terminal(run, goldens, pytester):
    """Neither names in a damaged one, nor the header, nor an environment of numbers, nor the name
    of an unused file.
    """
    run(GRAPH_OF_TESTS, "--gt-create-goldens")
    folder = pytester.path / "golden" / "test_it"
    of_case = {
        case: folder / f"test_graph-{case}.fxgraph" for case in ("header", "damaged", "field")
    }
    text = of_case["header"].read_text()
    of_case["header"].write_text(
        re.sub("# torch: .*", f"# torch: 2.13.0{ODD}", text).replace("f32[2]", "f32[3]")
    )
    of_case["damaged"].write_text(text.replace("f32[2]", f"f32[2] @ {ODD}"))
    of_case["field"].write_text(text.replace("graph v2", f"graph v9{ODD}"))
    numbers = folder / "test_numbers.numbers.json"
    entries = json.loads(numbers.read_text())
    entries["entries"][0]["environment"]["device"] = f"cpu{ODD}"
    numbers.write_text(json.dumps(entries))
    (folder / f"test_gone{ODD}.txt").touch()
    result = run(None)
    result.assert_outcomes(failed=4, passed=1)
    shown = result.stdout.str()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    for difference_text in (
        "made with torch 2.13.0%s",
        "remake it with `%s`",
        "device cpu%s, instructions",
        "test_gone%s.txt",
    ):
        assert difference_text.replace("%s", "\\x1b[31m\\u202e") in shown


def test_letters_that_look_alike_are_named(run, goldens):
    """On each changed line; the header does not count."""
    source = "def test_a(gt_golden):\n    gt_golden.check({!r})"
    run(source.format("a\npay\nnow\n"), "--gt-update-goldens")
    result = run(source.format("b\np\u0430y\nnow\u200b\n"))
    shown = result.stdout.str()
    assert "in ASCII: 'pay' in the golden, 'p\\u0430y' in what was obtained" in shown
    assert "in ASCII: 'now' in the golden, 'now\\u200b' in what was obtained" in shown
    assert "in ASCII" not in run(source.format("a\nplay\nnow\n")).stdout.str()
    heads = [f"# gtrainer graph v2\n# test: {letter}\n" for letter in ("\u0430", "a")]
    assert (
        "in ASCII"
        not in judge("graph", heads[0] + "if P:\n", heads[1] + "if P:\n  P.a: _\n").reasons
    )
