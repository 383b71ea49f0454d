"""A text that is no graph is refused with line, column and the nearest thing expected."""

import pytest
import torch

from pytest_gtrainer.graphtext import TextError, parse

GRAPH = """\
if P:
  P.layers[0].w: f32[4, 4]
for i in fwd.layers[0]:
  with L.mlp:
    mm: f32[4, 4] = aten.mm(P.L.w, P.L.w)
    relu: f32[4, 4] = aten.relu(mm)
if out:
  yield fwd.layers[0].mlp.relu
"""


def test_the_graph_itself_is_read():
    assert len(parse(GRAPH).graph.nodes) == 4


# one change to the graph above, and what is said of it
WRONG = [
    (
        "aten.relu(mm)",
        "aten.rellu(mm)",
        "line 6, column 23: torch has no operator `aten.rellu`, did you mean `aten.relu`?",
    ),
    (
        "aten.mm(",
        "aten.add(",
        "line 5, column 21: torch has no operator `aten.add`: it has aten.add.Scalar, "
        "aten.add.Scalar_out, "
        "aten.add.Tensor, aten.add.out",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(m)",
        "line 6, column 33: no `m` before this line in fwd of `layers.0.mlp`, did you mean `mm`?",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(L.mpl.mm)",
        "line 6, column 33: no `mm`: nothing before this line is in fwd of `layers.0.mpl`, "
        "did you mean `layers.0.mlp`?",
    ),
    (
        "(P.L.w, ",
        "(P.L.v, ",
        "line 5, column 29: there is no input `P.L.v`, did you mean `P.layers.0.w`?",
    ),
    (
        "relu: f32[4, 4] =",
        "mm: f32[4, 4] =",
        "line 6, column 5: `mm` is defined twice in this module: values are named once, `mm_1`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: float32[4, 4]",
        "line 6, column 11: `float32` is no dtype: expected `f32`, `bf16`, `i64`, ...",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, n]",
        "line 6, column 18: `n` is no symbol: define it at the head, `n = size(16)`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, Foo(4)]",
        "line 6, column 18: expected a size like `4`, `s0` or `2*u0 + 1`, found `Foo(4)`",
    ),
    ("relu: f32[4, 4]", "relu: f32[4, 4][1]", "line 6, column 11: 2 extents and 1 strides"),
    ("relu: f32[4, 4]", "relu: f32[-4, 4]", "line 6, column 11: there is no tensor `f32[-4, 4]`: "),
    ("relu: f32[4, 4]", "relu: f32[4, 4] | saved", "line 6, column 23: `saved` is no tag"),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, 4] | chunk(L.mlp, maybe)",
        "line 6, column 23: expected `chunk(path, 0)` or `chunk(path, split_boundary)`, found "
        "`chunk(L.mlp, maybe)`",
    ),
    (
        "relu: f32[4, 4] =",
        "relu =",
        "line 6, column 5: expected `name: type = operator(...)`, found `relu = aten.relu(mm)`",
    ),
    (
        "  yield ",
        "  return ",
        "line 8, column 3: expected `mm: f32[2, 4] = aten.mm(x, y)`, found `return fwd.",
    ),
    (
        "if out:",
        "if uot:",
        "line 7, column 4: expected one of P, B, I, A, fwd, bwd, out, found `uot`, did you "
        "mean `out`?",
    ),
    (
        "fwd.layers[0]:",
        "fwd.layers[0:9:2]:",
        "line 3, column 10: expected `for i in fwd.layers[0:8]:`, found 'for i in "
        "fwd.layers[0:9:2]:'",
    ),
    (
        "fwd.layers[0]:",
        "layers[0]:",
        "line 3, column 10: expected `for i in fwd.layers[0:8]:`, found `layers[0]`",
    ),
    ("if out:", "if out", "line 7, column 7: expected ':': graph text is a part of Python"),
    (
        "aten.relu(mm)",
        "aten.relu(aten.neg(mm))",
        "line 6, column 33: expected an operand, found `aten.neg(mm)`: an operator stands in a "
        "line of its own",
    ),
    (
        "aten.relu(mm)",
        "hop.conditional(mm)",
        "line 6, column 23: torch has no higher-order operator `conditional`",
    ),
    (
        "with L.mlp:",
        "with L.mlp, L.attention:",
        "line 4, column 3: expected one module or bucket, `with layers[0].attention:`",
    ),
    (
        "with L.mlp:",
        "with bucket():",
        "line 4, column 8: expected `bucket(layers[0])`, found `bucket()`",
    ),
    (
        "with L.mlp:",
        "with layers[i-1].mlp:",
        "line 4, column 8: layer -1 of `layers` does not exist",
    ),
    (
        "if P:\n  P.layers[0].w",
        "if P:\n  P.L.w",
        "line 2, column 3: `P.L` is relative to a layer, and this section has none",
    ),
    (
        "mm: f32[4, 4] =",
        "mm: f32[9999999999999999999., 4] =",
        "line 5, column 9: there is no tensor `f32[1e+19, 4]`: ",
    ),
    (
        "mm: f32[4, 4] =",
        "mm: f32[9223372036854775807, 4] =",
        "line 5, column 13: 9223372036854775807 is no size of a tensor",
    ),
    (
        "for i in fwd.layers[0]:",
        "for i in fwd.layers[0:99999999999999999999]:",
        "line 3, column 10: expected `for i in fwd.layers[0:8]:`, found 'for i in "
        "fwd.layers[0:99999999999999999999]:'",
    ),
    (
        "for i in fwd.layers[0]:",
        "for i in fwd.layers[0:999999]:",
        "line 3, column 10: expected 1 to 10000 layers in a heading, found 999999",
    ),
    (
        "for i in fwd.layers[0]:",
        "for i in fwd.layers[i+1].x[0]:",
        "line 3, column 10: a section's own path is not relative",
    ),
    (
        "for i in fwd.layers[0]:",
        "for i in *fwd.layers[0]:",
        "line 3, column 10: expected a name like `L.attention.mm`, found `*fwd.layers[0]`",
    ),
    (
        "yield fwd.layers[0].mlp.relu",
        "yield fwd[i-1].mlp.relu",
        "line 8, column 9: expected the layers' module before `[...]`, found `fwd[i - 1]`",
    ),
    (
        "relu: f32[4, 4] =",
        "relu: f32[4, 4] | must_save(stage=1) =",
        "line 6, column 23: expected a tag like `must_save` or `custom(stage=1)`, found "
        "`must_save(stage=1)`",
    ),
    (
        "if P:\n",
        "fsdp = group(8)\nif P:\n",
        "line 1, column 14: expected the ranks of a group, `range(0, 8)` or `[0, 4]`, found `8`",
    ),
    (
        "if P:\n",
        f"fsdp = group(range(0, {10**30}))\nif P:\n",
        "line 1, column 14: the groups of a text have at most 1048576 ranks together, and with "
        "`range(",
    ),
    (
        "if P:\n",
        "# gtrainer graph v" + "1" * 4400 + "\nif P:\n  P.v: i64[3 - u0]\n",
        "line 3, column 8: there is no tensor `i64[3 - u0]`: the bounds of u0 are not known",
    ),
    (
        "if P:\n",
        "a = group([0])\na = group([1])\nif P:\n",
        "line 2, column 1: `a` is defined twice",
    ),
    (
        "if P:\n",
        "managed = [w]\nif P:\n",
        "line 1, column 12: expected a list of parameter names, found `w`",
    ),
    (
        "if P:\n",
        "# gtrainer graph v1\n# remake: pytest t.py --gt-update-goldens\nif P:\n",
        "line 1: format v1, and this pytest-gtrainer reads v2: remake it with `pytest t.py "
        "--gt-update-goldens`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, 4.5]",
        "line 6, column 18: `4.5` is no number of the kind `int`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: int[9 / 2]",
        "line 6, column 15: `9 / 2` is no number of the kind `int`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, 4 / 0]",
        "line 6, column 18: `4 / 0` is no number of the kind `int`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: float[-mm]",
        "line 6, column 18: `mm` is no symbol: define it at the head",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32",
        "line 6, column 11: expected a type like `f32[2, 4]`, `int[u0]` or `_`, found `f32`",
    ),
    (
        "  P.layers[0].w: f32[4, 4]\n",
        "  P.layers[0].w: f32[4, 4]\n  P.layers[0].w: f32[2]\n",
        "line 3, column 3: there is an input `P.layers[0].w` already",
    ),
    (
        "  P.layers[0].w: f32[4, 4]\n",
        "  P.layers[0].w: f32[4, 4] = 3\n",
        "line 2, column 3: expected an input like `P.layers[0].w: f32[2, 4]`, found "
        "`P.layers[0].w: f32[4, 4] = 3`",
    ),
    (
        "  P.layers[0].w: f32[4, 4]\n",
        "  B.layers[0].w: f32[4, 4]\n",
        "line 2, column 3: expected an input like `P.layers[0].w: f32[2, 4]`, found "
        "`B.layers[0].w: f32[4, 4]`",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(mm[9])",
        "line 6, column 33: `mm[9]`: select(): index 9 out of range",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(const(f32[2]))",
        "line 6, column 33: expected `const(f32[2], [1.0, 2.0])`, found `const(f32[2])`",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(const(_, 3))",
        "line 6, column 33: expected `const(f32[2], [1.0, 2.0])`, found `const(_, 3)`",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(const('Enum'))",
        "line 6, column 33: `const('Enum')` is given by its digest",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(range(1, 2, 0))",
        "line 6, column 33: `range(1, 2, 0)`: range() arg 3 must not be",
    ),
    (
        "aten.relu(mm)",
        "aten.relu(device('gpu'))",
        "line 6, column 33: `gpu` is no device: expected `cpu`, `cuda`",
    ),
    (
        "aten.relu(mm)",
        "relu(mm)",
        "line 6, column 23: `relu` is no operator: expected one like `aten.add.Tensor`, "
        "`operator.add` or `hop.cond`",
    ),
    ("aten.relu(mm)", "aten.relu(**mm)", "line 6, column 35: expected named arguments, found `**`"),
    (
        "if out:\n",
        "if bwd:\n  neg: f32[4, 4] = aten.neg(P.layers[0].w)\nelse:\n  pass\nif out:\n",
        "line 10, column 3: a section has no `else`",
    ),
    (
        "  yield ",
        "  a = b = ",
        "line 8, column 3: expected `mm: f32[2, 4] = aten.mm(x, y)`, found `a = b = fwd.",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, 4] | custom(stage=mm)",
        "line 6, column 36: expected a literal, found `mm`",
    ),
    (
        "relu: f32[4, 4]",
        "relu: f32[4, 4] | custom(stage=1, **2)",
        "line 6, column 41: expected a table like `**{2: 3}`, found `2`",
    ),
    (
        "with L.mlp:",
        "with layers[0.5].mlp:",
        'line 4, column 15: expected an index like `[3]`, `[i-1]` or `["name"]`, found `[0.5]`',
    ),
    (
        "with L.mlp:",
        "with bucket(layers[-1]):",
        "line 4, column 15: expected a module path, found `layers[-1]`",
    ),
    (
        "if P:\n",
        "n = size('x')\nif P:\n",
        "line 1, column 10: expected the example of a symbol, `size(16)`, found `'x'`",
    ),
    (
        "if P:\n",
        "default = device('gpu')\nif P:\n",
        "line 1, column 11: `gpu` is no device: expected `cpu`",
    ),
    (
        "if P:\n",
        "n = 3\nif P:\n",
        "line 1, column 5: expected a definition like `n = group(range(0, 8))`, found `3`",
    ),
    (
        "if P:\n",
        "# gtrainer graph v9\nif P:\n",
        "line 1: format v9, and this pytest-gtrainer reads v2: it was made by a newer "
        "pytest-gtrainer, so upgrade",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "problem"), WRONG, ids=[new.strip()[:60] for _, new, _ in WRONG]
)
def test_what_is_wrong_is_said(old, new, problem):
    assert GRAPH.count(old) == 1
    with pytest.raises(TextError) as error:
        parse(GRAPH.replace(old, new))
    assert str(error.value).startswith(problem)


def test_a_large_whole_number_is_read_to_the_last_digit():
    """The twin of a size that is no whole number: a double would round it."""
    gm = parse(
        f"if P:\n  P.v: int[{2**53} + 1]\n  P.w: int[18 / 2]\nif out:\n  yield P.v\n  yield P.w\n"
    )
    assert [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")] == [2**53 + 1, 9]


SPLIT = """\
if I:
  I.x: f32[4]
if fwd:
  split: [f32[2], f32[2]] = aten.split.Tensor(I.x, 2)
  sin: f32[2] = aten.sin(split[ITEM])
if out:
  yield sin
"""


@pytest.mark.parametrize("item", [2, 9, -3])
def test_an_output_that_an_operator_does_not_give_is_refused(item):
    """An index counts from either end; the twin takes each output that exists."""
    for known in (0, 1, -1, -2):
        assert len(parse(SPLIT.replace("ITEM", str(known))).graph.nodes) == 5
    with pytest.raises(
        TextError, match=rf"line 5, column 26: `split\[{item}\]`: there are 2 outputs"
    ):
        parse(SPLIT.replace("ITEM", str(item)))


@pytest.mark.parametrize("size", [15, 17, 32])
def test_a_constant_that_is_given_with_another_size_is_refused(size):
    """Its digest was asked for, and what is handed over has other bytes."""
    text = (
        "if fwd:\n  sin: f32[4, 4] = aten.sin(const(f32[4, 4], 'sha256:0'))\nif out:\n  yield sin\n"
    )
    made = parse(text, constants={"sha256:0": torch.arange(16.0)})
    assert made()[0].equal(torch.arange(16.0).view(4, 4).sin()), (
        "equal bytes are laid out as the text says"
    )
    message = rf"the constant given is torch\.float32 \[{size}\], not `f32\[4, 4\]`"
    with pytest.raises(TextError, match=message):
        parse(text, constants={"sha256:0": torch.zeros(size)})


RESULTS = "{}if I:\n  I[0]: f32[2]\nif fwd:\n  with _:\n    sin: f32[2] = aten.sin(I[0])\nif out:\n"


@pytest.mark.parametrize(
    ("head", "results", "why"),
    [
        ("", ["yield from (sin,)", "yield sin"], "no other stands beside it"),
        ("", ["yield from (sin,)", "yield from (sin,)"], "no other stands beside it"),
        ("", ["yield from (sin,)", "loss = sin"], "no other stands beside it"),
        ("", ["yield sin", "yield from (sin,)"], "no other stands beside it"),
        ("returns = value\n", ["yield sin", "yield sin"], "this is a second result"),
    ],
)
def test_a_result_that_would_be_lost_is_refused(head, results, why):
    """The twin reads each alone."""
    begin = RESULTS.format(head)
    with pytest.raises(TextError, match=why) as caught:
        parse(begin + "".join(f"  {each}\n" for each in results))
    assert caught.value.line == begin.count("\n") + 2
    for each in results:
        parse(f"{begin}  {each}\n")
