"""The digest of a dataflow: what changes it and what does not, read from text without torch."""

import operator

import pytest
import torch
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.graphtext import unfold
from pytest_gtrainer.graphtext.dataflow import Symbol, dataflow, statement
from pytest_gtrainer.graphtext.differences.remarks import where
from pytest_gtrainer.graphtext.equivalence import (
    Numbers,
    digests_of,
    draws_numbers,
    effects,
    effects_of_operator,
    written,
)

TEXT = """\
fsdp = group(range(0, 8))
for i in P.layers[0:2]:
  P.L.w: f32[2, 4]
if I:
  I[0]: f32[4, 2]
if fwd:
  with embed:
    mul: f32[4, 2] = aten.mul.Tensor(I[0], 0.5)
for i in fwd.layers[0]:
  with bucket(L):
    all_gather_into_tensor: f32[16, 4] = _c10d_functional.all_gather_into_tensor(P.L.w, 8, fsdp)
    wait_tensor: f32[16, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  with L.attention:
    topk: (f32[4, 1], i64[4, 1]) | must_save = aten.topk(embed.mul, 1)
  with L:
    add: f32[4, 2] = aten.add.Tensor(L.attention.topk[0], bucket(L).wait_tensor)
for i in fwd.layers[1]:
  with L:
    add: f32[4, 2] = aten.add.Tensor(layers[i-1].add, P.L.w)
for i in bwd.layers[1]:
  with L:
    mul: f32[4, 2] = aten.mul.Tensor(saved.L.add, saved.layers[i-1].attention.topk[1])
if out:
  loss = fwd.layers[1].add
  layers[1].w = bwd.layers[1].mul
"""


NUMBERS = Numbers()


def digest_of(text: str) -> int:
    return digests_of(dataflow(unfold(text)), NUMBERS).whole


@pytest.mark.parametrize("space", ["P", "B", "I", "A"])
def test_inputs_of_one_name_are_two_inputs(space):
    """Tracers give several inputs one name: their places are exchanged, and that is told."""
    first, second = f"{space}.x", f'{space}.x["#1"]'
    head = f"if {space}:\n  {first}: f32[2]\n  {second}: f32[2]\nif fwd:\n"
    texts = []
    for operands in ((first, second), (second, first), (first, first)):
        called = f"  sub: f32[2] = aten.sub.Tensor({', '.join(operands)})\n"
        texts.append(f"{head}{called}if out:\n  yield fwd._.sub\n")
    assert len(set(map(digest_of, texts))) == 3


def test_references_are_resolved():
    graph = dataflow(unfold(TEXT))
    names = [f"{where(value.scope)} {value.name}".strip() for value in graph.values]
    read = {
        name: [names[source] for source in value.sources]
        for name, value in zip(names, graph.values, strict=True)
    }
    assert read["fwd embed mul"] == ["I 0"]
    assert read["fwd bucket layers.0 all_gather_into_tensor"] == ["P layers.0.w"]
    assert read["fwd layers.0 add"] == [
        "fwd layers.0.attention topk",
        "fwd bucket layers.0 wait_tensor",
    ]
    assert read["fwd layers.1 add"] == ["fwd layers.0 add", "P layers.1.w"]
    assert read["bwd layers.1 mul"] == ["fwd layers.1 add", "fwd layers.0.attention topk"]
    assert [(result.name, names[int(str(result.operands[0]))]) for result in graph.results] == [
        ("loss", "fwd layers.1 add"),
        ("layers.1.w", "bwd layers.1 mul"),
    ]


def test_a_heading_may_name_another_space():
    text = "if I:\n  I[0]: f32[2]\nif fwd:\n  with bwd.norm:\n    sin: f32[2] = aten.sin(I[0])\n"
    read = "  with norm:\n    cos: f32[2] = aten.cos(bwd.norm.sin)\n"
    assert dataflow(unfold(text + read)).values[2].sources == (1,)


def test_an_operator_among_the_inputs_is_no_reason_to_give_up():
    """A line that was moved by hand: it is no input, and its name alone says where it stands."""
    text = "for i in P.layers[0]:\n  P.L.w: f32[2]\n  mm: f32[2] = aten.mm(P.L.w, P.L.w)\n"
    assert [value.scope.owners for value in dataflow(unfold(text)).values] == [
        ("layers.0.w",),
        ("mm",),
    ]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("mm_{}: f32[{}, u{}] = aten.mm(x_{}, L.y[{}], {}, dtype=f32)", id="numbers"),
        pytest.param(
            'mm_{}: f32[{}, u{}] = aten.mm("é", x_{}, "é", L.y[{}], {}, dtype=f32)', id="not ASCII"
        ),
    ],
)
def test_lines_that_differ_in_numbers_are_told_apart(line):
    """Only one of them is parsed: the others have its columns."""
    for numbers in ((1, 2, 3, 4, 5, 6.5), (9, 8, 7, 6, 5, 4.25), (10, 11, 12, 13, 14, 1.5)):
        name, size, symbol, operand, item, literal = numbers
        found = statement(line.format(*numbers))
        assert found.name == f"mm_{name}"
        assert (found.type.text, found.type.symbols) == (f"f32[{size}, \1]", (f"u{symbol}",))
        assert found.arguments.references == (("", f"x_{operand}"), ("L", "y"), ("", "f32"))
        assert found.arguments.text.endswith(f"\0[{item}], {literal}, dtype=\0")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("aten.topk", "aten.sort", id="operator"),
        pytest.param("(I[0], 0.5)", "(I[0], 0.25)", id="literal"),
        pytest.param("embed.mul, 1)", "embed.mul, 1, largest=True)", id="keyword"),
        pytest.param("topk[0], bucket", "topk[1], bucket", id="item"),
        pytest.param("layers[i-1].add, P", "embed.mul, P", id="operand"),
        pytest.param(
            "aten.mul.Tensor(saved.L.add, saved.layers[i-1].attention.topk[1])",
            "aten.mul.Tensor(saved.layers[i-1].attention.topk[1], saved.L.add)",
            id="order of operands",
        ),
        pytest.param(
            "mul: f32[4, 2] = aten.mul.Tensor(I", "mul: bf16[4, 2] = aten.mul.Tensor(I", id="dtype"
        ),
        pytest.param(
            "f32[16, 4] = _c10d_functional.wait",
            "f32[16, 4][1, 16] = _c10d_functional.wait",
            id="strides",
        ),
        pytest.param("P.L.w: f32[2, 4]", "P.L.w: f32[2, 4] @ cuda", id="device of an input"),
        pytest.param(
            "I[0]: f32[4, 2]\n", "I[0]: f32[4, 2]\n  I[1]: f32[4, 2]\n", id="one more input"
        ),
        pytest.param("range(0, 8)", "range(0, 4)", id="ranks of a group"),
        pytest.param("loss = fwd.layers[1].add", "loss = fwd.layers[0].add", id="result"),
        pytest.param("  loss =", "  total =", id="name of a result"),
        pytest.param("if out:\n", "returns = list\nif out:\n", id="convention"),
    ],
)
def test_what_changes_the_digest(old, new):
    assert old in TEXT
    assert digest_of(TEXT.replace(old, new)) != digest_of(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "add: f32[4, 2] = aten.add.Tensor(L.a",
            "add_7: f32[4, 2] = aten.add.Tensor(L.a",
            id="name",
        ),
        pytest.param(" | must_save", "", id="tag"),
        pytest.param("with embed:", "with _:", id="module"),
        pytest.param("bucket(L)", "bucket(L, norm)", id="bucket"),
        pytest.param("fsdp", "fsdp_2", id="number of a group"),
    ],
)
def test_what_does_not(old, new):
    text = TEXT.replace(old, new)
    text = text.replace("layers[i-1].add,", "layers[i-1].add_7,") if "add_7" in new else text
    text = text.replace("embed.mul", "_.mul") if "_" in new and old == "with embed:" else text
    assert text != TEXT
    assert digest_of(text) == digest_of(TEXT)


def test_the_schedule_does_not_change_it():
    line = "    wait_tensor: f32[16, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)\n"
    add = "  with L:\n    add: f32[4, 2] = aten.add.Tensor(L"
    later = TEXT.replace(line, "").replace(add, f"  with bucket(L):\n{line}{add}")
    assert later != TEXT
    assert digest_of(later) == digest_of(TEXT)


# -- symbols

MOE = """\
if I:
  I[0]: i64[2]
for i in fwd.layers[0]:
  with L:
    a: int[L.u0] = aten.one(I[0])
    b: int[L.u1] = aten.two(I[0])
    cat: f32[L.u0 + 2*L.u1, 4] = aten.cat([a, b])
    view: f32[4, L.u0 + 2*L.u1] = aten.view(cat, [4, sym(L.u0 + 2*L.u1)])
"""
SWAPPED = """\
if I:
  I[0]: i64[2]
for i in fwd.layers[0]:
  with L:
    b: int[L.u0] = aten.two(I[0])
    a: int[L.u1] = aten.one(I[0])
    cat: f32[2*L.u0 + L.u1, 4] = aten.cat([a, b])
    view: f32[4, 2*L.u0 + L.u1] = aten.view(cat, [4, sym(2*L.u0 + L.u1)])
"""


def test_symbols_are_what_brings_them_in():
    """Their numbers follow from the schedule."""
    assert digest_of(SWAPPED) == digest_of(MOE)
    cat = dataflow(unfold(MOE)).values[3]
    assert [operand for operand in cat.operands if isinstance(operand, Symbol)] == [
        Symbol(1, 0),
        Symbol(2, 0),
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Max(L.u0, 2*L.u1)", "Max(2*L.u0, L.u1)", True),
        ("Min(L.u0, 2*L.u1)", "Min(2*L.u0, L.u1)", True),
        ("L.u0 - L.u1", "-L.u0 + L.u1", True),
        ("L.u0 - L.u1", "L.u0 - L.u1", False),
        ("L.u0//L.u1", "L.u0//L.u1", False),
        ("3*L.u0*L.u1", "3*L.u0*L.u1", True),
    ],
)
def test_a_size_is_the_same_whatever_the_numbers_of_its_symbols(one, other, same):
    sizes = MOE.replace("L.u0 + 2*L.u1", one), SWAPPED.replace("2*L.u0 + L.u1", other)
    assert (digest_of(sizes[0]) == digest_of(sizes[1])) == same


def test_symbols_of_layers_are_told_apart():
    """Each layer's own `L.u0` is another one."""
    values = dataflow(unfold(MOE.replace("layers[0]", "layers[0:2]"))).values
    symbols = [
        [each for each in value.operands if isinstance(each, Symbol)]
        for value in values
        if value.name == "cat"
    ]
    assert symbols == [[Symbol(1, 0), Symbol(2, 0)], [Symbol(5, 0), Symbol(6, 0)]]


def test_symbols_that_come_in_together_are_told_apart():
    text = (
        "if I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
        "    pair: (i64[u0], i64[u1]) = aten.pair(I[0])\n"
    )
    first, second = (f"    x: f32[{symbol}] = aten.x(pair)\n" for symbol in ("u0", "u1"))
    assert digest_of(text + first) != digest_of(text + second)


def test_another_size_changes_the_digest():
    assert digest_of(MOE.replace("L.u0 + 2*L.u1", "2*L.u0 + L.u1")) != digest_of(MOE)
    assert digest_of(MOE.replace("sym(L.u0 + 2*L.u1)", "sym(L.u0 + 2*L.u0)")) != digest_of(MOE)


# -- groups

TWINS = """\
fsdp = group(range(0, 8))
fsdp_2 = group(range(0, 8))
if I:
  I[0]: f32[2]
if fwd:
  with a:
    all_reduce: f32[2] = _c10d_functional.all_reduce(I[0], "sum", fsdp)
  with b:
    all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(I[0], 8, fsdp_2)
  with c:
    all_gather_into_tensor: f32[16] = _c10d_functional.all_gather_into_tensor(a.all_reduce, 8, fsdp_2)
"""


def test_groups_of_the_same_ranks_are_told_by_who_shares_them():
    exchanged = (
        TWINS.replace("fsdp)", "fsdp_0)").replace("fsdp_2)", "fsdp)").replace("fsdp_0)", "fsdp_2)")
    )
    assert digest_of(exchanged) == digest_of(TWINS)
    parted = TWINS.replace("(a.all_reduce, 8, fsdp_2)", "(a.all_reduce, 8, fsdp)")
    assert digest_of(parted) != digest_of(TWINS)


# -- bodies

BODY = """\
def cond_graph_0():
  if A:
    A[0]: f32[2]
  if fwd:
    sin: f32[2] = aten.sin(A[0])
    cos: f32[2] = aten.cos(A[0])
  if out:
    yield fwd._.sin
if I:
  I[0]: b8[()]
  I[1]: f32[2]
if fwd:
  with L:
    cond: (f32[2],) = hop.cond(I[0], cond_graph_0, cond_graph_0, (I[1],))
if out:
  yield fwd.L.cond[0]
"""


def test_a_body_counts_by_its_dataflow():
    assert digest_of(BODY.replace("cond_graph_0", "cond_graph_3")) == digest_of(BODY)
    sin, cos = "    sin: f32[2] = aten.sin(A[0])\n", "    cos: f32[2] = aten.cos(A[0])\n"
    assert digest_of(BODY.replace(sin + cos, cos + sin)) == digest_of(BODY)
    assert digest_of(BODY.replace("aten.sin", "aten.tan")) != digest_of(BODY)


# -- effects


def values_of(*lines: str):
    text = "if I:\n  I[0]: f32[2]\n  I[1]: f32[2]\nif fwd:\n" + "".join(
        f"  {line}\n" for line in lines
    )
    return dataflow(unfold(text))


@pytest.mark.parametrize(
    ("line", "targets"),
    [
        ("x: f32[2] = aten.add_.Tensor(I[0], I[1])", [0]),
        ("x: f32[2] = aten.add.Tensor(I[0], I[1])", []),
        ("x: f32[2] = aten.__and__.Tensor(I[0], I[1])", []),
        ("x: f32[2] = aten.mm.out(I[0], I[0], out=I[1])", [1]),
        ("x: f32[u0, 2*u1] = aten.mm.out(I[0], I[0], out=I[1])", [1]),
        ("x: _ = aten._foreach_add_.List([I[0], I[1]], [I[1], I[0]])", [0, 1]),
        ("x: _ = operator.setitem(I[1], 0, I[0])", [1]),
        ("x: f32[2] = operator.add(I[1], I[0])", []),
    ],
)
def test_what_is_changed_in_place(line, targets):
    assert written(values_of(line).values[2]) == targets


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        ("aten.native_dropout(I[0], 0.1, True)", True),
        ("aten.rand([2])", True),
        ("aten.mul.Tensor(I[0], 0.1)", False),
        ("aten._scaled_dot_product_flash_attention_for_cpu(I[0], I[0], I[0], 0.0, True)", False),
        ("aten._scaled_dot_product_flash_attention_for_cpu(I[0], I[0], I[0], 0.1, True)", True),
        (
            "aten._scaled_dot_product_flash_attention(I[0], I[0], I[0], 0.0, True, scale=0.125)",
            False,
        ),
        # A keyword stands at the place of dropout_p, and is another argument.
        ("aten._scaled_dot_product_flash_attention(I[0], I[0], I[0], is_causal=True)", False),
        ("aten._scaled_dot_product_flash_attention(I[0], I[0], I[0], scale=0.125)", False),
        ("aten._scaled_dot_product_flash_attention(I[0], I[0], I[0], dropout_p=0.1)", True),
    ],
)
def test_what_draws_random_numbers(call, draws):
    assert draws_numbers(values_of(f"x: f32[2] = {call}").values[2]) == draws


@pytest.fixture(scope="module")
def library():
    """Operators of a user, which torch knows by their schemas only."""
    with torch.library._scoped_library("gt_effects", "DEF") as library:
        library.define("norm(Tensor x, Tensor(a!) out, *, Tensor(b!)? scale) -> ()")
        library.define("peek(Tensor(a) x) -> Tensor(a)")
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        yield library
    effects_of_operator.cache_clear()


@pytest.mark.parametrize(
    ("call", "targets"),
    [
        ("gt_effects.norm(I[0], I[1])", [1]),
        ("gt_effects.norm(I[1], out=I[0])", [0]),
        ("gt_effects.norm(I[1], I[1], scale=I[0])", [1, 0]),
        ("gt_effects.noise(I[0])", []),
        ("aten.bernoulli_.float(I[1], 0.5)", [1]),
        ("method.add_(I[1], I[0])", [1]),
        ("torch.relu_(I[1])", [1]),
        ("torch.add(I[0], I[1])", []),
        ("torch.add(I[0], I[0], out=I[1])", [1]),
        ("not_imported.scale_(I[1], I[0])", [1]),
        ("not_imported.scale(I[1], I[0])", []),
        ("not_imported.__and__(I[1], I[0])", []),
        ("operator.iadd(I[1], I[0])", [1]),
        ("aten.cat.out([I[0], I[0]], 0, out=I[1])", [1]),
        ("aten.index_put_(I[1], [I[0], None], I[0])", [1]),
    ],
)
def test_schemas_say_what_is_written(library, call, targets):
    assert written(values_of(f"x: f32[2] = {call}").values[2]) == targets


@pytest.mark.parametrize(
    ("operator", "is_view", "draws"),
    [
        ("gt_effects.peek", True, False),
        ("gt_effects.noise", False, True),
        ("gt_effects.norm", False, False),
        ("aten.view", True, False),
        ("aten._unsafe_view", True, False),
        ("aten.split.Tensor", True, False),
        ("aten.clone", False, False),
        ("_c10d_functional.wait_tensor", True, False),
        ("method.transpose", True, False),
        ("torch.squeeze", True, False),
        ("aten.rrelu_with_noise", False, True),
        ("aten.bernoulli_.float", False, True),
        ("method.bernoulli_", False, True),
        ("torch.rand_like", False, True),
        ("prims.inductor_seeds", False, True),
        ("prims.inductor_random", False, False),  # all of its numbers come from the seed
        ("hop.run_and_save_rng_state", False, True),
        ("not_imported.rand", False, False),
    ],
)
def test_schemas_and_tags_say_what_is_a_view_and_what_draws(library, operator, is_view, draws):
    found = effects_of_operator(operator)
    assert (found.is_view, found.draws) == (is_view, draws)


def test_a_view_shares_the_storage_that_is_changed():
    graph = values_of(
        "view: f32[2] = aten.view(I[0], [2])",
        "sin: f32[2] = aten.sin(I[0])",
        "add_: f32[2] = aten.add_.Tensor(view, I[1])",
        "cos: f32[2] = aten.cos(I[0])",
    )
    assert effects(graph).histories == {0: [(4, [3]), (None, [5])]}


def test_a_view_in_the_shape_of_another_shares_the_storage_of_its_first_operand():
    graph = values_of(
        "view_as: f32[2] = aten.view_as(I[0], I[1])",
        "add_: f32[2] = aten.add_.Tensor(view_as, I[1])",
        "cos: f32[2] = aten.cos(I[0])",
    )
    assert effects(graph).histories == {0: [(3, []), (None, [4])]}


def test_a_view_of_a_view_of_what_was_changed_in_place_shares_its_storage_too():
    graph = values_of(
        "add_: f32[2] = aten.add_.Tensor(I[0], I[1])",
        "view: f32[2] = aten.view(add_, [2])",
        "t: f32[2] = aten.t(view)",
        "sin: f32[2] = aten.sin(I[0])",
        "mul_: f32[2] = aten.mul_.Tensor(t, 2)",
    )
    assert effects(graph).histories == {0: [(2, []), (6, [5])]}, (
        "all by the input at which they look"
    )


def test_a_getitem_of_other_arguments_is_shown_as_it_is():
    """No such graph runs, but a text of it says so."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(torch.ops.aten.split.Tensor, (x, 1))
    graph.output(graph.call_function(operator.getitem, (split, 0, 1)))
    text = graphtext.render(fx.GraphModule({}, graph))
    assert "operator.getitem(split, 0, 1)" in text
