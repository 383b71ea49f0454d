"""Small functions of graph text, each by an example."""

import ast
import re

import pytest
import torch
from torch import fx

from pytest_gtrainer.facts import escaped, spell_some
from pytest_gtrainer.graphtext.dataflow import HOLE, SYMBOL, Template, statement, template
from pytest_gtrainer.graphtext.differences.lines import Change, changes, spell_sections, text_diff
from pytest_gtrainer.graphtext.differences.remarks import (
    _relative,
    cut,
    module_of,
    ranges,
    same_start,
    unit_of,
    where,
)
from pytest_gtrainer.graphtext.differences.values import _became
from pytest_gtrainer.graphtext.equivalence import bare_name, canonical
from pytest_gtrainer.graphtext.folding import rising
from pytest_gtrainer.graphtext.header import nearest, read, version_of, write
from pytest_gtrainer.graphtext.literals import spell_literal
from pytest_gtrainer.graphtext.operands import may_be_symbolic
from pytest_gtrainer.graphtext.operators import mesh_dimension, spell_ranks, word
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.graphtext.scopes import scopes_of
from pytest_gtrainer.graphtext.sections import (
    NEAR,
    Layer,
    Scope,
    SectionKey,
    _quoted,
    common_parent,
    is_word,
    section_keys,
    spell,
    spell_from,
    spell_input,
    split_layer,
    stretches,
)
from pytest_gtrainer.graphtext.spelling import is_contiguous
from pytest_gtrainer.graphtext.syntax import (
    LinePlace,
    chain,
    key_of,
    links_of,
    scope_at,
    static_path,
)
from pytest_gtrainer.graphtext.torch_spellings import spellings_between

HERE = Layer("layers", 3)


@pytest.mark.parametrize("between", [["view_1"], ["view_1", "view_2"], ["view_2", "view_1"]])
def test_operators_that_are_called_as_values_are_do_not_share_a_name(between):
    with torch.library._scoped_library("gt_names", "DEF") as library:
        for name in between:
            library.define(f"{name}(Tensor x) -> Tensor")
        graph = fx.Graph()
        node = graph.placeholder("x")
        view = torch.ops.aten.view.default
        nodes = [graph.call_function(view, (node, [4]))]
        for name in between:
            operator = getattr(torch.ops.gt_names, name).default
            nodes.append(graph.call_function(operator, (nodes[-1],)))
        for _ in range(3):
            nodes.append(graph.call_function(view, (nodes[-1], [4])))
        graph.output(tuple(nodes))
        text = render(fx.GraphModule({}, graph))
    names = re.findall(r"^    (\w+):? .*= (?:aten\.view|gt_names)", text, re.MULTILINE)
    assert len(names) == len(nodes), text
    assert len(set(names)) == len(names), text


def test_header():
    assert nearest("aten.mmm", ["aten.mm", "aten.add"]) == ", did you mean `aten.mm`?"
    assert nearest("xyz", ["aten.mm"]) == ""
    assert (version_of("# gtrainer graph v7\nif P:"), version_of("if P:")) == (7, None)
    assert write({"torch": "2.13.0"}) == ["# gtrainer graph v2", "# torch: 2.13.0"]
    assert read("# gtrainer graph v2\n# torch: 2.13.0\nif P:\n  P.x: f32[2]  # y: z\n") == {
        "torch": "2.13.0"
    }


def test_words_for_a_line_of_text():
    assert (cut("abcdef", 4), cut("abcd", 4)) == ("abc…", "abcd")
    assert (same_start("f32[2]", "f32[4]"), same_start("mm", "mm_1")) == (4, 2)
    assert ranges([0, 1, 2, 5, 7, 8]) == ["0..2", "5", "7", "8"]
    assert (spell_some(["a", "b"]), spell_some(["a", "b", "c", "d", "e"])) == (
        "a, b",
        "a, b, c and 2 more",
    )
    assert escaped("a" + chr(27) + "[31m" + chr(0x202E)) == r"a\x1b[31m\u202e"
    assert _became("f32[2]", "f32[4]") == "f32[2] became f32[4]"
    long = "[" + "f32[2], " * 20
    assert (
        _became(f"{long}f32[3]]", f"{long}f32[4]]")
        == "…f32[2], f32[2], f32[3]] became …f32[2], f32[2], f32[4]]"
    )


def test_words_for_modules_and_layers():
    text = "layers.4.wq beside layers.3, my.layers.4"
    assert _relative(text, "layers", 4) == "layers.<+0>.wq beside layers.<-1>, my.layers.4"
    for away in (NEAR, -NEAR):
        assert _relative(f"layers.{9 + away}", "layers", 9) == f"layers.<{away:+d}>"
    for away in (NEAR + 1, -NEAR - 1):
        assert _relative(f"layers.{9 + away}", "layers", 9) == f"layers.{9 + away}", "is far"
    sections = ["fwd.layers[0]", "fwd.layers[1]", "fwd.layers[2]", "bwd", ""]
    assert spell_sections(sections) == "fwd.layers[0..2], bwd, definitions"
    assert module_of(Scope(("layers.3.norm",), "fwd")) == "layers.3.norm"
    assert module_of(Scope(("norm", "lm_head"), "bwd", True)) == "norm+lm_head"
    assert (
        module_of(Scope(("layers.1.a", "layers.1.b", "layers.1.c"), "fwd", True))
        == "layers.1.a+2 more"
    )
    assert where(Scope(("layers.3.norm",), "fwd")) == "fwd layers.3.norm"
    assert where(Scope(("norm",), "bwd", True)) == "bwd bucket norm"
    assert unit_of(Scope(("layers.3.attention.wq",), "bwd")) == "layers.3/bwd"
    assert unit_of(Scope(("norm",), "fwd")) == "norm"


def test_differences_in_lines():
    assert rising([0, 1, 5, 2, 3, 4]) == [0, 1, 3, 4, 5]  # places of a longest rising subsequence
    assert changes("abcd", "axcde") == [Change(1, 2, 1, 2), Change(4, 4, 4, 5)]
    assert text_diff(["a", "b"], ["a", "c"]) == [
        "--- golden",
        "+++ obtained",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "+c",
    ]


def test_sizes_whatever_the_order_of_their_terms():
    def pair(one: str, another: str) -> tuple[str, str]:
        return canonical(one, ["b", "a"]), canonical(another, ["a", "b"])

    for one, another in (
        ("f32[\1 + \1, 2]", "f32[\1 + \1, 2]"),
        ("f32[-2*\1 + \1]", "f32[\1 - 2*\1]"),
    ):
        assert len({*pair(one, another)}) == 1
    assert len({*pair("f32[\1 - \1]", "f32[\1 - \1]")}) == 2
    for one, another in ((3, 2**63 - 1), (-1, 2**61 - 2), (0, 2**61 - 1), (-1, -2)):
        texts = [f"\0, 0, \1 + \1, {each}" for each in (one, another)]
        assert len({*pair(*texts)}) == 2, "constants outside a polynomial"


def test_operators_and_groups():
    assert [bare_name(name) for name in ("aten.add_.Tensor", "operator.add", "hop.cond")] == [
        "add_",
        "add",
        "cond",
    ]
    assert [word(name) for name in ("from", "add", "<lambda>", "0")] == [
        "from__kw",
        "add",
        "_lambda_",
        "_0",
    ]
    assert [spell_ranks(ranks) for ranks in ([0, 1, 2, 3], [0, 4])] == [
        "range(0, 4)",
        "range(0, 8, 4)",
    ]
    assert [spell_ranks(ranks) for ranks in ([0, 1, 3], [5])] == ["[0, 1, 3]", "[5]"]
    mesh = {"dp": 2, "fsdp": 4}
    assert [mesh_dimension(ranks, mesh) for ranks in ([0, 4], [4, 5, 6, 7], [0, 1])] == [
        "dp",
        "fsdp",
        None,
    ]


def test_paths_and_layers():
    assert split_layer("layers.3.attention.wq") == (HERE, "attention.wq")
    assert split_layer("norm") == (None, "norm")
    # No list has an element 01: a name that only looks like a number stays a name.
    for name in ("01", "007", "\u0663"):
        assert split_layer(f"blocks.{name}.w") == (None, f"blocks.{name}.w")
        assert spell(f"blocks.{name}.w") == f'blocks["{name}"].w'
    assert [is_word(name) for name in ("wq", "class", "\ufb01")] == [
        True,
        False,
        False,
    ]  # the last is one letter
    assert [_quoted(name) for name in ("en-de", 'a"b', "a\\b")] == ['"en-de"', r'"a\"b"', r'"a\\b"']
    assert spell_from("layers.0.attention", HERE) == "layers[0].attention"  # too far away
    assert spell_input("P", "layers.3.wq.weight", HERE) == "P.L.wq.weight"
    assert spell_input("I", "0.tokens", None) == "I[0].tokens"
    assert common_parent(["layers.3.attention.wq", "layers.3.attention.wo"]) == "layers.3.attention"
    assert common_parent(["a", "b"]) == ""
    assert where(Scope(("layers.3", "norm"), "fwd", is_bucket=True)) == "fwd bucket layers.3+norm"
    a, b = SectionKey("fwd", None), SectionKey("bwd", None)
    assert list(stretches([a, a, b])) == [(a, slice(0, 2)), (b, slice(2, 3))]


def test_in_which_section_a_line_stands():
    a, b = SectionKey("fwd", Layer("layers", 0)), SectionKey("fwd", Layer("layers", 1))
    assert section_keys([a, b, a], [False, True, False]) == [a, a, a]
    assert section_keys([a, b, a, a, b], [False] * 5) == [a, a, a, a, b]
    assert section_keys([a, b, a], [False] * 3) == [a, b, a]


def test_lines_as_templates():
    found = statement("mm: bf16[2, L.u0] | must_save = aten.mm(x, L.y[1], 1e-05, dtype=f32)")
    assert found.type == Template(f"bf16[2, {SYMBOL}]", (), ("L.u0",))
    assert found.tags == "must_save"
    assert found.arguments.text == f"{HOLE}, {HOLE}[1], 1e-05, dtype={HOLE}"
    assert found.arguments.references == (("", "x"), ("L", "y"), ("", "f32"))
    sizes = template("bf16[L.u0 + L.u1, 64]", is_type=True)
    assert sizes == Template(f"bf16[{SYMBOL} + {SYMBOL}, 64]", (), ("L.u0", "L.u1"))
    assert template("float8_e4m3fn[4, 4][1, 4] @ cuda", is_type=True).symbols == ()


def test_constants_and_sizes():
    assert [spell_literal(value) for value in (torch.bfloat16, -0.0)] == ["bf16", "-0.0"]
    assert spell_literal(torch.device("cuda", 1)) == 'device("cuda")'
    shapes = ([2, 3], [3, 1]), ([2, 3], [1, 2]), ([1, 3], [7, 1])
    assert [is_contiguous(shape, strides) for shape, strides in shapes] == [True, False, True]
    assert (may_be_symbolic("f32[4, u0]"), may_be_symbolic("sum_1: f32[4]")) == (True, False)


def test_chains():
    links = chain(ast.parse("saved.layers[i-1].mm", mode="eval").body)
    assert [link.value for link in links] == ["saved", "layers", -1, "mm"]
    assert static_path(links_of('heads["en-de"].layers[3]')) == "heads.en-de.layers.3"
    bucket = Scope(("layers.3.moe", "norm"), "fwd", is_bucket=True)
    assert scope_at(links_of("saved.bucket(L.moe, norm)"), LinePlace("bwd", HERE)) == bucket
    assert (key_of("bwd.layers[3]"), key_of("fwd")) == (
        SectionKey("bwd", HERE),
        SectionKey("fwd", None),
    )


def test_spellings_between_versions():
    found = [str(spelling) for spelling in spellings_between("2.15.0+cu132", "2.14.1")]
    assert found == ["aten._unsafe_view for aten.view of aten.addmm"]
    assert spellings_between("2.14.0", "2.14.1+cpu") == spellings_between(None, "2.15.0") == ()


@pytest.mark.parametrize(
    ("modules", "owner"),
    [
        (["layers.0.mlp", "layers.1.norm"], "layers.1"),
        (["layers.1.norm", "layers.0.mlp"], "layers.0"),
        (["layers.0.mlp", "layers.0.mlp.up"], "layers.0.mlp"),
        (["layers.2.mlp", "norm"], "layers.2"),
        (["norm", "layers.2.mlp", "head"], "layers.2"),
        (["head.a", "head.b"], "head"),
        (["norm", "head"], ""),
        ([], ""),
    ],
    ids=str,
)
def test_what_names_no_module_belongs_to_that_of_its_operands(modules, owner):
    """To what all share, else to the layer of the last one that is in a layer."""
    graph, operands = fx.Graph(), []
    for fqn in modules:
        node = graph.call_function(torch.ops.aten.ones.default, ([2],))
        node.meta["custom"] = {"module_fqn": fqn}
        operands.append(node)
    total = graph.call_function(torch.ops.aten.stack.default, (operands,))
    assert scopes_of(graph.nodes).of[total].owners == (owner,)


def test_inputs_say_where_a_value_belongs_if_no_operand_is_computed():
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    weight.meta["gt_input"] = {"kind": "parameter", "fqn": "layers.3.w.weight"}
    alone = graph.call_function(torch.ops.aten.exp.default, (weight,))
    node = graph.call_function(torch.ops.aten.ones.default, ([2],))
    node.meta["custom"] = {"module_fqn": "layers.1.mlp"}
    both = graph.call_function(torch.ops.aten.mul.Tensor, (node, weight))
    found = scopes_of(graph.nodes).of
    assert (found[alone].owners, found[both].owners) == (("layers.3.w",), ("layers.1.mlp",))
