"""Sentences on values: operators, dtypes, literals, operands, tags, inputs and outputs."""

import pytest

from pytest_gtrainer.graphtext import diff
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, sentences

TEXT = """\
if P:
  P.embed.weight: f32[8, 4]
for i in P.layers[0:4]:
  P.L.w: f32[4, 4]
if I:
  I[0]: f32[2, 4]
  I[1]: f32[2, 4]
for i in fwd.layers[0]:
  with L.mlp:
    mm: f32[2, 4] = aten.mm(I[0], P.L.w)
    relu: f32[2, 4] = aten.relu(mm)
  with L:
    add: f32[2, 4] = aten.add.Tensor(I[1], L.mlp.relu, alpha=1)
for i in fwd.layers[1:4]:
  with L.mlp:
    mm: f32[2, 4] = aten.mm(layers[i-1].add, P.L.w)
    relu: f32[2, 4] = aten.relu(mm)
  with L:
    add: f32[2, 4] = aten.add.Tensor(layers[i-1].add, L.mlp.relu, alpha=1)
if out:
  loss = fwd.layers[3].add
  first = fwd.layers[0].add
"""


def words(old: str, new: str) -> list[str]:
    """The sentences, without the verdict."""
    assert old != new
    return diff(old, new).partition("\n\n")[0].splitlines()[1:]


def after(*changes: tuple[str, str]) -> list[str]:
    """Return the difference after parts of the text are replaced."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return words(TEXT, text)


# -- whole modules

SIX = (
    TEXT.replace("[0:4]", "[0:6]")
    .replace("[1:4]", "[1:6]")
    .replace("layers[3].add", "layers[5].add")
)


def test_what_a_new_layer_does_is_one_sentence_for_all_of_them():
    new = "new: layers[4, 5], with 1 parameter, 3 operators in fwd"
    assert words(TEXT, SIX) == [new]
    assert words(SIX.replace("aten.relu", "aten.gelu"), TEXT) == [
        new.replace("new", "gone"),
        # what else has changed is not hidden
        "fwd layers[0..3].mlp: lost aten.gelu, gained aten.relu",
    ]


def test_a_layer_that_was_there_is_not_new():
    """It has another parameter."""
    more = SIX.replace("  P.L.w: f32[4, 4]\n", "  P.L.w: f32[4, 4]\n  P.L.v: f32[4, 4]\n")
    assert words(SIX, more) == ["gained parameter layers[0..5].v"]


# -- operators


def test_operators_by_module_with_all_layers():
    assert after(("aten.relu", "aten.gelu")) == [
        "fwd layers[0..3].mlp: lost aten.relu, gained aten.gelu"
    ]


def test_what_holds_of_most_layers_is_said_first():
    assert after(("embed.weight: f32", "embed.weight: bf16"), ("P.L.w: f32", "P.L.w: f16")) == [
        "dtype of parameter layers[0..3].w: f32 became f16",
        "dtype of parameter embed.weight: f32 became bf16",
    ]


def test_operators_lost_and_gained_are_counted():
    line = "    relu: f32[2, 4] = aten.relu(mm)\n"
    twice = (line, line + line.replace("relu:", "relu_1:") + line.replace("relu:", "relu_2:"))
    assert after(twice) == ["fwd layers[0..3].mlp: gained 2 aten.relu"]
    assert words(TEXT.replace(*twice), TEXT) == ["fwd layers[0..3].mlp: lost 2 aten.relu"]


def test_what_happened_to_many_modules_is_said_once():
    lines = [f"  with {name}:\n    mm: f32[2] = aten.mm(I[0])\n" for name in "abcdef"]
    text = "if I:\n  I[0]: f32[2]\nif fwd:\n" + "".join(lines)
    said = words(text, text.replace("aten.mm", "aten.matmul"))
    assert said == ["fwd a: lost aten.mm, gained aten.matmul (and 5 more like this)"]


def test_collectives_are_counted():
    text = "fsdp = group(range(0, 2))\nif P:\n  P.w: f32[2]\nif fwd:\n  with m:\n"
    line = (
        "    all_gather_into_tensor: f32[4] = _c10d_functional.all_gather_into_tensor(P.w, 2, "
        "fsdp)\n"
    )
    assert words(text + line, text + "    sin: f32[2] = aten.sin(P.w)\n")[:2] == [
        "lost AG m/fwd of w",
        "all_gather_into_tensor: 1 became 0",
    ]


# -- types


def test_a_dtype_is_told_where_it_comes_from():
    """Nodes that follow from it are only counted."""
    assert after(("P.L.w: f32", "P.L.w: bf16")) == [
        "dtype of parameter layers[0..3].w: f32 became bf16"
    ]
    all_bf16 = [(f"{name}: f32", f"{name}: bf16") for name in ("P.L.w", "mm", "relu")]
    assert after(*all_bf16) == [
        "dtype of parameter layers[0..3].w: f32 became bf16",
        "types of 8 values that follow from these changed, too",
    ]


def test_a_dtype_of_one_operator():
    assert after(("relu: f32", "relu: bf16")) == [
        "dtype of aten.relu in fwd layers[0..3].mlp: f32 became bf16",
    ]


def test_a_cast_to_another_dtype_is_said_once():
    cast = "    _to_copy: {0}[2, 4] = aten._to_copy(mm, dtype={0})\n    relu:"
    old, new = (TEXT.replace("    relu:", cast.format(dtype)) for dtype in ("bf16", "f16"))
    assert words(old, new) == ["dtype of aten._to_copy in fwd layers[0..3].mlp: bf16 became f16"]


def test_a_shape_and_strides_are_no_dtype():
    expected = "type of aten.relu in fwd layers[0..3].mlp: f32[2, 4] became f32[2, 4][1, 2]"
    assert after(("relu: f32[2, 4]", "relu: f32[2, 4][1, 2]")) == [expected]
    assert after(("I[1]: f32[2, 4]", "I[1]: f32[1, 4]")) == [
        "type of input 1: f32[2, 4] became f32[1, 4]"
    ]


# -- literals and operands


def test_a_literal():
    expected = (
        "arguments of aten.add.Tensor in fwd layers[0..3]: ·, ·, alpha=1 became ·, ·, alpha=2"
    )
    assert after(("alpha=1", "alpha=2")) == [expected]


def test_an_item_is_a_literal():
    text = (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    topk: (f32[1], i64[1]) = aten.topk(I[0], 1)\n"
    )
    sin = "    sin: f32[1] = aten.sin(topk[0])\n"
    assert words(text + sin, text + sin.replace("[0]", "[1]")) == [
        "arguments of aten.sin in fwd m: ·[0] became ·[1]"
    ]


def test_items_in_another_order():
    text = (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    topk: (f32[1], i64[1]) = aten.topk(I[0], 1)\n"
    )
    add = "    add: f32[1] = aten.add.Tensor({})\n"
    difference = words(text + add.format("topk[0], topk[1]"), text + add.format("topk[1], topk[0]"))
    assert difference == [
        "arguments of aten.add.Tensor in fwd m are in another order: ·[0], ·[1] became ·[1], ·[0]"
    ]


def test_an_item_of_what_was_lost_is_not_told():
    """The reader of one output of the operand that was lost: the loss says it."""
    text = (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    split: [f32[1], f32[1]] = aten.split(I[0], 1)\n"
    )
    copied = "    clone: f32[1] = aten.clone(split[0])\n    sin: f32[1] = aten.sin(clone)\n"
    assert words(text + copied, text + "    sin: f32[1] = aten.sin(split[0])\n") == [
        "fwd m: lost aten.clone"
    ]


def test_a_literal_beside_an_operand_that_was_lost():
    """The loss explains the operand, not the literal; the twin has another operand alone."""
    old = module("exp = aten.exp(I[0])", "mul = aten.mul(exp, 2)")
    new = module("expm1 = aten.expm1(I[0])", "mul = aten.mul(expm1, 3)")
    lost = "fwd m: lost aten.exp, gained aten.expm1"
    assert words(old, new) == [lost, "arguments of aten.mul in fwd m: ·, 2 became ·, 3"]
    assert words(old, new.replace("3)", "2)")) == [lost]


def test_an_operand_is_another_value():
    assert after(("(layers[i-1].add, L.mlp.relu", "(layers[i-1].mlp.relu, L.mlp.relu")) == [
        "aten.add.Tensor in fwd layers[1..3] reads layers[i-1].mlp.relu instead of "
        "layers[i-1].add as operand 1"
    ]


@pytest.mark.parametrize(
    ("operands", "others"),
    [
        ("cos, sin, sin", ""),
        ("cos, tan, sin", " (and 1 more operand)"),
        ("cos, tan, cos", " (and 2 more operands)"),
    ],
)
def test_of_several_operands_that_are_others_the_first_is_told(operands, others):
    lines = [
        "exp = aten.exp(I[0])",
        "sin = aten.sin(I[1])",
        "cos = aten.cos(I[0])",
        "tan = aten.tan(I[1])",
    ]
    old, new = (
        module(*lines, f"add = aten.addcmul({read})") for read in ("exp, sin, sin", operands)
    )
    assert words(old, new) == [
        f"aten.addcmul in fwd m reads m.cos instead of m.exp as operand 1{others}"
    ]


def test_operands_that_are_others_are_counted_before_they_are_in_another_order():
    lines = ["exp = aten.exp(I[0])", "sin = aten.sin(I[1])"]
    old, new = (
        module(*lines, f"cat = aten.cat([{read}])") for read in ("exp, exp, sin", "sin, sin, exp")
    )
    assert words(old, new) == [
        "aten.cat in fwd m reads m.sin instead of m.exp as operand 1 (and 2 more operands)"
    ]


def test_a_size_of_the_data_is_another_one():
    text = (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    pair: (i64[u0], i64[u1]) = aten.pair(I[0])\n"
    )
    first, second = (
        f"    view: f32[2, 2] = aten.view(I[0], [sym({symbol}), -1])\n" for symbol in ("u0", "u1")
    )
    said = ["aten.view in fwd m reads size 1 of m.pair instead of size 0 of m.pair as operand 2"]
    assert words(text + first, text + second) == said


def test_a_group_where_a_value_was():
    old = (
        "fsdp = group(range(0, 2))\nif I:\n  I[0]: f32[2]\nif fwd:\n"
        "  sin: f32[2] = aten.sin(I[0])\n"
    )
    old += "  cos: f32[2] = aten.cos(sin)\n"
    new = old.replace("cos(sin)", "cos(fsdp)")
    assert words(old, new) == ["aten.cos in fwd _ reads fsdp instead of sin as operand 1"]
    assert "+cos: f32[2] = aten.cos(fsdp)" in diff(old, new).splitlines()


def test_operands_in_another_order():
    assert after(("(layers[i-1].add, L.mlp.relu", "(L.mlp.relu, layers[i-1].add")) == [
        "operands of aten.add.Tensor in fwd layers[1..3] are in another order: "
        "layers[1..3].mlp.relu where "
        "layers[i-1].add was"
    ]


def test_operands_that_follow_are_not_told():
    """The twin: the reader of a new value reads another one, and that says nothing new."""
    step = "    relu: f32[2, 4] = aten.relu(mm)\n"
    said = after((step, "    sin: f32[2, 4] = aten.sin(mm)\n" + step.replace("(mm)", "(sin)")))
    assert said == ["fwd layers[0..3].mlp: gained aten.sin"]


def module(*lines: str) -> str:
    text = "if I:\n  I[0]: f32[2]\n  I[1]: f32[2]\nif fwd:\n  with m:\n"
    return text + "".join(f"    {line.replace(' =', ': f32[2] =')}\n" for line in lines)


def test_exchanged_lines_are_told_as_such():
    """The twin: names are counted in the order of the lines, so both lines have the name of the
    other.
    """
    old = module(
        "mul = aten.mul(I[0], 2)", "mul_1 = aten.mul(I[1], 2)", "add = aten.add(mul, mul_1)"
    )
    new = module(
        "mul = aten.mul(I[1], 2)", "mul_1 = aten.mul(I[0], 2)", "add = aten.add(mul_1, mul)"
    )
    assert diff(old, new).partition("\n\n")[0].splitlines() == [
        "same dataflow, other schedule (1 of 3 operators moved)",
        "m.mul moved behind m.mul_1",
    ]


def test_values_are_told_apart_by_what_they_are_computed_from():
    """Also where something before them has changed: no operand is another one here."""
    old = module("exp = aten.exp(I[0])", "mul = aten.mul(exp, I[0])", "mul_1 = aten.mul(exp, I[1])")
    new = module(
        "expm1 = aten.expm1(I[0])", "mul = aten.mul(expm1, I[1])", "mul_1 = aten.mul(expm1, I[0])"
    )
    assert words(old, new) == [
        "fwd m: lost aten.exp, gained aten.expm1",
        "m.mul moved behind m.mul_1",
    ]


def test_values_are_told_apart_by_the_operators_that_they_are_computed_from():
    old = module(
        "exp = aten.exp(I[0])",
        "sin = aten.sin(exp)",
        "cos = aten.cos(exp)",
        "mul = aten.mul(sin, 2)",
        "mul_1 = aten.mul(cos, 2)",
    )
    new = module(
        "expm1 = aten.expm1(I[0])",
        "sin = aten.sin(expm1)",
        "cos = aten.cos(expm1)",
        "mul = aten.mul(cos, 2)",
        "mul_1 = aten.mul(sin, 2)",
    )
    assert words(old, new) == [
        "fwd m: lost aten.exp, gained aten.expm1",
        "m.mul moved behind m.mul_1",
    ]


# -- modules and tags


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", " | must_save", "none became must_save"),
        (" | must_save", " | prefer_recompute", "must_save became prefer_recompute"),
        (
            " | unowned | custom(stage=1)",
            " | unowned | custom(stage=2)",
            "unowned | custom(stage=1) became unowned | custom(stage=2)",
        ),
    ],
)
def test_tags(old, new, said):
    sides = [TEXT.replace("mm: f32[2, 4]", f"mm: f32[2, 4]{tag}") for tag in (old, new)]
    assert words(*sides) == [f"tags of aten.mm in fwd layers[0..3].mlp: {said}"]
    verdict = diff(*sides).splitlines()[0]
    assert verdict == "same dataflow, same schedule, other modules, buckets or tags", (
        "and not the spelling alone"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mm: f32[2, 4] =", "mm: f32[2, 4] | must_save ="),
        ("relu: f32[2, 4] =", "relu: bf16[2, 4] ="),
        ("alpha=1", "alpha=2"),
        ("relu: f32[2, 4] = aten.relu", "relu: f32[2, 4] = aten.relu6"),
        ("first = fwd.layers[0].add", "first = fwd.layers[1].add"),
    ],
    ids=["tag", "dtype", "literal", "operator", "output"],
)
def test_the_lines_of_what_has_changed_are_shown(old, new):
    """A line that is left out says the same on both sides, under another name.

    None of these does.
    """
    beside = "  I[1]: f32[2, 4]\n", "  I[1]: f32[2, 4]\n  I[2]: f32[2, 4]\n"
    text = diff(TEXT, TEXT.replace(old, new).replace(*beside)).partition("\n\n")[2]
    assert "+I[2]: f32[2, 4]" in text
    for sign, part in (("-", old), ("+", new)):
        assert any(line.startswith(sign) and part in line for line in text.splitlines()), (
            f"no {sign}{part} in {text}"
        )


def test_of_many_sentences_the_weightiest_are_said_and_the_others_counted():
    remarks = [Remark(Weight.REST, f"rest {n}") for n in range(9)] + [
        Remark(Weight.DTYPE, "a dtype")
    ]
    assert sentences(remarks, limit=4) == [
        "a dtype",
        "rest 0",
        "rest 1",
        "… and 7 more such differences",
    ]
    assert len(sentences(remarks, limit=10)) == 10


def test_payloads_that_are_issued_in_another_order():
    """Each payload of a layout has its members, in their order."""
    lines = [f"  payload(fsdp, f32, fwd, bytes=8)\n  {name}: at(0, bytes=8)\n" for name in "abc"]
    head = "fsdp = group(range(0, 2))\nif all_gather:\n"
    said = diff(head + "".join(lines), head + "".join([lines[1], lines[0], lines[2]])).partition(
        "\n\n"
    )[0]
    assert "payloads are issued in another order" in said.splitlines()
    fewer = diff(head + "".join(lines), head + "".join(lines[:2])).partition("\n\n")[0]
    assert "another order" not in fewer, "one that is lost moves none"


def test_values_belong_to_another_module():
    text = TEXT.replace("with L.mlp:", "with L.ffn:").replace("L.mlp.", "L.ffn.")
    assert words(TEXT, text) == [
        "aten.mm of fwd layers[0..3].mlp belongs to fwd layers[0..3].ffn now",
        "aten.relu of fwd layers[0..3].mlp belongs to fwd layers[0..3].ffn now",
    ]


def test_values_of_the_forward_went_to_the_backward():
    text = "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n    sin: f32[2] = aten.sin(I[0])\n"
    assert words(text, text.replace("if fwd", "if bwd")) == [
        "aten.sin of fwd m belongs to bwd m now"
    ]


# -- inputs, outputs, definitions


def test_inputs():
    assert after(("  I[1]: f32[2, 4]\n", "  I[1]: f32[2, 4]\n  I[2]: f32[2, 4]\n")) == [
        "gained input 2"
    ]
    weights = "for i in P.layers[0:4]:\n  P.L.w: f32[4, 4]\n"
    assert after((weights, weights + "  P.L.b: f32[4]\n")) == ["gained parameter layers[0..3].b"]
    assert after(("if P:\n  P.embed.weight: f32[8, 4]\n", "")) == ["lost parameter embed.weight"]
    inputs = "  I[0]: f32[2, 4]\n", "  I[1]: f32[2, 4]\n"
    assert after(("".join(inputs), "".join(inputs[::-1]))) == ["inputs are in another order"]


def test_outputs():
    assert after(("  first = fwd.layers[0].add\n", "")) == ["lost output first"]
    assert after(("first = fwd.layers[0].add", "first = fwd.layers[1].add")) == [
        "output first is layers.1.add instead of layers.0.add"
    ]
    lines = "  loss = fwd.layers[3].add\n", "  first = fwd.layers[0].add\n"
    assert after(("".join(lines), "".join(lines[::-1]))) == ["outputs are in another order"]
    unnamed = TEXT.replace("loss = ", "yield ").replace("first = ", "yield ")
    lines = "  yield fwd.layers[3].add\n", "  yield fwd.layers[0].add\n"
    verdict = diff(unnamed, unnamed.replace("".join(lines), "".join(lines[::-1]))).splitlines()[0]
    assert verdict == "the dataflow differs", "outputs without names differ by their order"
    assert words(unnamed, unnamed.replace("yield fwd.layers[0].add", "yield None")) == [
        "output 1 is None instead of layers.0.add"
    ]


@pytest.mark.parametrize(("one", "other"), [("s0", "s1"), ("fsdp", "tp")])
def test_an_output_that_is_defined_at_the_head(one, other):
    head = "fsdp = group(range(0, 2))\ntp = group(range(0, 4))\ns0 = size(16)\ns1 = size(24)\n"
    text = head + f"if I:\n  I[0]: f32[s0, s1]\nif out:\n  n = {one}\n  x = I[0]\n"
    assert words(text, text.replace(f"n = {one}", f"n = {other}")) == [
        f"output n is {other} instead of {one}"
    ]


def test_many_outputs_that_are_others_are_said_once():
    lines = "".join(f"    x{n}: f32[2] = aten.op{n}()\n" for n in range(10))
    text = f"if fwd:\n  with m:\n{lines}if out:\n" + "".join(
        f"  out{n} = fwd.m.x{n}\n" for n in range(10)
    )
    other = text
    for number in range(0, 10, 2):
        other = other.replace(
            f"out{number} = fwd.m.x{number}", f"out{number} = fwd.m.x{number + 1}"
        )
    assert words(text, other) == ["output out0 is m.x1 instead of m.x0 (and 4 more like this)"]


def test_definitions():
    sized = "s0 = size(16)\n" + TEXT
    assert words(sized, sized.replace("16", "32")) == ["symbol s0: size(16) became size(32)"]
    assert words(TEXT, "returns = list\n" + TEXT) == ["gained convention returns = list"]


@pytest.mark.parametrize(
    ("kind", "old", "new", "kept"),
    [
        ("process group", "a = group(range(0, 2))", "c = group([0, 3])", "b = group([2, 3])"),
        ("symbol", "s0 = size(16)", "s2 = size(7)", "s1 = size(24)"),
    ],
)
def test_definitions_that_went_and_came_are_told_apart(kind, old, new, kept):
    """The one that stays stands in another place of the other graph."""
    verb = [f"lost {kind} {old}", f"gained {kind} {new}"]
    assert words(f"{old}\n{kept}\n{TEXT}", f"{kept}\n{new}\n{TEXT}") == verb
    verb = [f"lost {kind} {new}", f"gained {kind} {old}"]
    assert words(f"{kept}\n{new}\n{TEXT}", f"{old}\n{kept}\n{TEXT}") == verb


PAIR = """\
if I:
  I[0]: f32[8]
if fwd:
  with m:
    pair: (f32[u0], f32[u1]) = aten.two(I[0])
    a: f32[u0] = aten.sin(pair[0])
    b: f32[u0, u1] = aten.outer(a, pair[1])
if out:
  x = fwd.m.b
"""


@pytest.mark.parametrize(
    ("line", "other", "first"),
    [
        ("a: f32[u0]", "a: f32[u1]", "sin"),
        ("b: f32[u0, u1]", "b: f32[u1, u0]", "outer"),
        ("b: f32[u0, u1]", "b: f32[u0, u0]", "outer"),
        ("b: f32[u0, u1]", "b: f32[u1, u1]", "outer"),
    ],
)
def test_two_sizes_that_one_value_brings_in_are_two(line, other, first):
    found = diff(PAIR, PAIR.replace(line, other)).splitlines()[0]
    assert found == f"the dataflow differs, first at aten.{first} in fwd m"


def test_names_of_sizes_do_not_count():
    renamed = PAIR.replace("u0", "u7").replace("u1", "u0")
    assert diff(PAIR, renamed).startswith("same dataflow, same schedule: only the spelling")


def test_what_changed_inside_of_a_body():
    body = (
        "def cond_graph_0():\n  if A:\n    A[0]: f32[2]\n  if fwd:\n"
        "    sin: f32[2] = aten.sin(A[0])\n"
    )
    text = body + (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    cond: f32[2] = hop.cond(I[0], cond_graph_0)\n"
    )
    assert words(text, text.replace("aten.sin", "aten.cos")) == [
        "in cond_graph_0: the dataflow differs, first at aten.cos in fwd _",
        "in cond_graph_0: fwd _: lost aten.sin, gained aten.cos",
    ]


BELOW_ITS_USE = """\
if fwd:
  sin: f32[2] = aten.sin(I.x)
  cos: f32[2] = aten.cos(I.x)
if I:
  I.x: f32[2]
if fwd:
  tan: f32[2] = aten.tan(I.x)
if out:
  yield tan
"""


def test_an_input_below_its_first_use_is_read_by_those_after_it():
    (said,) = words(BELOW_ITS_USE, BELOW_ITS_USE.replace("tan(I.x)", "tan(cos)"))
    assert said == "aten.tan in fwd _ reads cos instead of x as operand 1"


# -- definitions

SIZES = """\
s0 = size(3)
s1 = size(4)
if I:
  I[0]: f32[s0]
  I[1]: f32[s1]
if fwd:
  with m:
    sym_size: int[s0] = aten.sym_size.int(I[0], 0)
    zeros: f32[s0] = aten.zeros([sym_size])
if out:
  zeros = fwd.m.zeros
"""


def test_another_symbol_is_no_process_group():
    other = SIZES.replace("int[s0] = aten.sym_size.int(I[0]", "int[s1] = aten.sym_size.int(I[1]")
    found = words(SIZES, other.replace("zeros: f32[s0]", "zeros: f32[s1]"))
    assert found[:2] == [
        "symbol of aten.sym_size.int in fwd m: s0 became s1",
        "symbol of aten.zeros in fwd m: s0 became s1",
    ]
    assert "group" not in " ".join(found)
