"""V2: inputs keep sharing memory; small and integer inputs get extreme values, too."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_pass_bitwise, facts
from pytest_gtrainer.bisect import Stage, bisect_extremes, bisect_stages, local_run
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.graph_inputs import Extreme, replace_elements
from pytest_gtrainer.numerics.graph_run import copies
from pytest_gtrainer.testing.running import assert_same_values
from pytest_gtrainer.worlds.simulated.interpreter import PerRank


def graph_of(function, *inputs):
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta.setdefault("val", value)
    return gm


def writes_first(x, y):
    x.add_(1)
    return x * 3, y * 2


def writes_last(x, y):
    doubled = y * 2
    x.add_(1)
    return x * 3, doubled


def whole_and_tail():
    x = torch.randn(8)
    return [x, x[2:]]


def halves_of_one():
    return list(torch.randn(12).as_strided((2, 8), (4, 1)).unbind())


def one_twice():
    x = torch.randn(8)
    return [x, x]


def other_dtype():
    x = torch.randn(8)
    return [x, x.view(torch.int32)]


SHARING = [whole_and_tail, halves_of_one, one_twice, other_dtype]


def two_of_their_own():
    return [torch.randn(8), torch.randn(8)]


@pytest.mark.parametrize("make", SHARING)
def test_a_pass_that_is_wrong_only_for_inputs_that_share_memory_is_seen(make):
    before, after = (graph_of(each, *make()) for each in (writes_first, writes_last))
    with pytest.raises(BitwiseDifference, match="output 1"):
        assert_pass_bitwise((before, after))
    stages = [Stage("", before), Stage("the pass", after)]
    assert bisect_stages(stages, local_run(make())).outcome == "different"


def test_the_twin_without_shared_memory_is_equal():
    before, after = (graph_of(each, *two_of_their_own()) for each in (writes_first, writes_last))
    assert_pass_bitwise((before, after))
    stages = [Stage("", before), Stage("the pass", after)]
    assert bisect_stages(stages, local_run(two_of_their_own())).outcome == "equal"
    assert bisect_extremes(stages, local_run, two_of_their_own()).outcome == "equal"


@pytest.mark.parametrize("make", SHARING)
def test_extreme_inputs_share_memory_as_well(make):
    """A write that ordinary numbers hide: it takes the larger one."""

    def first(x, y):
        x.clamp_(-100, 100)
        return x * 3, y * 2

    def last(x, y):
        doubled = y * 2
        x.clamp_(-100, 100)
        return x * 3, doubled

    stages = [Stage(name, graph_of(each, *make())) for name, each in (("", first), ("a", last))]
    assert bisect_stages(stages, local_run(make())).outcome == "equal"
    assert bisect_extremes(stages, local_run, make()).inputs.startswith("inputs with large")


def test_copies_keep_places_strides_and_dtypes():
    base = torch.arange(24.0)
    given = [
        base[3:9],
        base.view(4, 6).t(),
        base[3:4].expand(5),
        base.view(torch.int32),
        torch.zeros(0),
        torch.tensor([1 + 2j]).conj(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (3,)),
        PerRank([base[:2], base[1:3]]),
    ]
    made = copies(given)
    for value, copy in zip(given[:6], made[:6], strict=True):
        assert (copy.dtype, copy.stride()) == (value.dtype, value.stride())
        assert torch.equal(copy, value)
    made[0][0] = 77.0
    assert [made[1][3, 0], made[2][4], made[3].view(torch.float32)[3]] == [77.0] * 3
    made[8][0][1] = 55.0
    assert (made[8][1][0], made[1][1, 0], base[1]) == (55.0, 55.0, 1.0)
    needs = copies([torch.ones(2, requires_grad=True), torch.ones(2)], keep_grad=True)
    assert [each.requires_grad for each in needs] == [True, False]


def equal(x):
    return x + 0.0


def clamped(low, high):
    """Infinite numbers stay as they are."""
    return lambda x: torch.where(x.abs() == torch.inf, x, x.clamp(low, high)) + 0.0


def by_values(before, after):
    assert_same_values(after, before, "after against before")


def by_pass(before, after):
    assert_pass_bitwise((before, after))


def by_bisection(before, after):
    stages = [Stage("", before), Stage("the pass", after)]
    example = before.graph.find_nodes(op="placeholder")[0].meta["val"]
    made = torch.ones(example.shape, dtype=example.dtype)
    found = bisect_extremes(stages, local_run, [made])
    if found.outcome == "different":
        raise BitwiseDifference(f"on {found.inputs}", found.verdict)


PLACES = [by_values, by_pass, by_bisection]


# All three places draw the same values: the first tier has every shape in one of them.
@pytest.mark.second_tier(
    *(
        f"{place}-{shape}"
        for place in ("by_pass", "by_bisection")
        for shape in ("()", "(1", "(2,", "(7")
    )
)
@pytest.mark.parametrize(
    "after",
    [
        clamped(-2e4, 1e4),
        clamped(-1e4, 2e4),
        lambda x: x.clamp(min=-3e38),
        lambda x: x.clamp(max=3e38),
    ],
    ids=["high", "low", "-inf", "inf"],
)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 2), (7,)], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_small_input_gets_all_values(place, shape, after):
    given = torch.ones(shape)
    with pytest.raises(BitwiseDifference, match=r"on inputs with (large|infin)"):
        place(graph_of(equal, given), graph_of(lambda x: after(x) + 0.0, given))


def hidden_by(fill):
    """A softmax of scores of which those below -50 are hidden, as those of padding are."""
    return lambda x: x.masked_fill(x < -50, fill).softmax(-1)


MASKS = {
    "finite or infinite": (hidden_by(-torch.inf), hidden_by(-1e9)),
    # Rows of -inf are the mask itself.
    "rows that are hidden are 0": (
        lambda x: x.softmax(-1),
        lambda x: torch.where((x == -torch.inf).all(-1, keepdim=True), 0.0, x.softmax(-1)),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(3,), (1, 4), (2, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_a_row_of_which_nothing_is_seen_shows_how_it_is_masked(kind, shape, place):
    before, after = (graph_of(function, torch.ones(shape)) for function in MASKS[kind])
    with pytest.raises(BitwiseDifference, match="rows that are negative and large, or infinite"):
        place(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_other_row_is_negative_and_large_then_infinite(dtype):
    def of_rows(shift):
        made = torch.ones(2, 3, 2, dtype=dtype).transpose(0, 1)
        replace_elements(made, Extreme.ROWS, seed=5, shift=shift)
        assert torch.equal(made[..., 0], made[..., 1])
        return made[..., 0].flatten().tolist()

    expanded = torch.ones(1, 3).expand(2, 3)
    replace_elements(expanded, Extreme.ROWS, seed=5)
    assert expanded.tolist() == [[-2e4] * 3] * 2
    parts = torch.ones(3, 2, dtype=torch.complex64)
    replace_elements(parts, Extreme.ROWS, seed=5)
    assert parts.tolist() == [[-2e4, -2e4], [1, 1], [-2e4, -2e4]]
    low = torch.tensor(-2e4, dtype=dtype).item()
    assert of_rows(0) == [low, 1, low, 1, low, 1]
    assert of_rows(1) == [-torch.inf, 1, -torch.inf, 1, -torch.inf, 1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(), (3,), (9,)], ids=str)
def test_a_small_input_gets_both_zeros(place, shape):
    before = graph_of(lambda x: x * 1.0, torch.ones(shape))
    after = graph_of(equal, torch.ones(shape))
    with pytest.raises(BitwiseDifference, match="zeros of both signs"):
        place(before, after)


INTEGER_PASSES = {
    "a square is left out": (lambda x: x * x, lambda x: x + 0),
    "negative numbers are cut": (lambda x: x + 0, lambda x: x.clamp(min=0)),
    "numbers over 120 are cut": (lambda x: x + 0, lambda x: x.clamp(max=99)),
    "odd numbers alone": (lambda x: x + 0, lambda x: x % 2),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", INTEGER_PASSES)
def test_integers_are_more_than_0_and_1(place, dtype, kind):
    if (dtype, kind) == (torch.uint8, "negative numbers are cut"):
        pytest.skip("it has none")
    before, after = (graph_of(each, torch.ones(2, dtype=dtype)) for each in INTEGER_PASSES[kind])
    with pytest.raises(BitwiseDifference, match="on inputs with large and negative integers"):
        place(before, after)


def look_up(limit, tokens):
    """Tokens choose rows of a table of ``limit``."""
    table = torch.arange(4.0 * limit).view(limit, 4)
    return torch.nn.functional.embedding(tokens, table) + 0.0


def rows(limit):
    made = torch.ones(3, dtype=torch.int64)
    return (
        graph_of(lambda tokens: look_up(limit, tokens), made),
        graph_of(lambda tokens: look_up(limit, tokens.clamp(max=1)), made),
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("limit", "words"), [(200, "integers from 2 to 100"), (20, "from 2 to 10"), (5, "2 and 3")]
)
def test_an_index_gets_the_largest_integers_that_are_in_range(place, limit, words):
    with (
        facts.collecting() as seen,
        pytest.raises(BitwiseDifference, match=f"on inputs with .*{words}"),
    ):
        place(*rows(limit))
    assert not [fact for fact in seen if fact["kind"] == "idle"]


@pytest.mark.parametrize("place", [by_values, by_bisection])
def test_an_index_that_only_0_and_1_fit_is_named(place):
    before, after = rows(2)
    with facts.collecting() as seen:
        place(before, after)
    (idle,) = [fact["what"] for fact in seen if fact["kind"] == "idle"]
    assert idle.startswith("graph input 0 has no other integers than its own: the graph refuses 2")
    assert "IndexError" in idle


def test_each_integer_input_is_tried_by_itself():
    """An index beside a number."""

    def before(tokens, number):
        return look_up(10, tokens) * (number * number)

    def after(tokens, number):
        return look_up(10, tokens) * number

    given = torch.ones(3, dtype=torch.int64), torch.ones((), dtype=torch.int64)
    with pytest.raises(BitwiseDifference, match="large and negative integers in graph input 1"):
        by_values(*(graph_of(each, *given) for each in (before, after)))


ALIASES = {
    "an input": (lambda x, y: (x.clone(), x + y), lambda x, y: (x.view(8), x + y)),
    "a part of an input": (lambda x, y: (y[2:] * 1, x + y), lambda x, y: (y[2:], x + y)),
    "another result": (
        lambda x, y: ((x + y), (x + y).clone()),
        lambda x, y: (z := x + y, z.view(8)),
    ),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_a_result_in_the_memory_of_another_tensor(kind):
    """A write to one of them changes the other."""
    before, after = (graph_of(each, *two_of_their_own()) for each in ALIASES[kind])
    with pytest.raises(BitwiseDifference, match=r"output \d lies in the memory of"):
        assert_pass_bitwise((before, after))
    with facts.failing_checks(lambda error: None):
        assert_pass_bitwise((after, before))  # a copy more is no other value


def test_expanded_inputs_and_booleans():
    given = [torch.ones(1).expand(4), torch.tensor([True, False])]
    made = copies(given)
    replace_elements(made[0], Extreme.LARGE, seed=0)
    assert made[0].unique().numel() == 1
    gm = graph_of(lambda x, mask: (x + 1, mask.logical_not()), *given)
    assert bisect_extremes([Stage("", gm), Stage("", gm)], local_run, given).outcome == "equal"


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (0, 1)), ((2, 3), (1, 0)), ((3, 2), (1, 1)), ((2, 2), (0, 0)), ((2, 3), (0, 5))],
)
def test_inputs_whose_elements_share_memory_get_numbers(shape, strides):
    """An expanded tensor, or windows of one, has such elements."""
    x = torch.randn(20).as_strided(shape, strides)
    gm = graph_of(lambda x: x.sin(), x)
    assert_same_values(gm, graph_of(lambda x: x.sin(), x), "sin")
    with pytest.raises(BitwiseDifference):
        assert_same_values(gm, graph_of(lambda x: x.cos(), x), "cos")


def drawn(x):
    return torch.multinomial(x.softmax(-1), 1).sum() + x.sum()


def refuses_all(x):
    return torch.linalg.eigvalsh(x @ x.T)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (drawn, "no input has had infinities: the graph refuses them (RuntimeError: probability"),
        (drawn, "no input has had NaN: the graph refuses them (RuntimeError: probability"),
        (refuses_all, "graph input 0 has not had infinities everywhere: the graph refuses them"),
    ],
)
def test_numbers_that_a_graph_refuses_are_left_out_with_a_word(function, words):
    """The other kinds of numbers are compared."""
    gm, before = (graph_of(function, torch.randn(3, 3)) for _ in range(2))
    with facts.collecting() as seen:
        assert_same_values(gm, before, "a graph")
    assert any(words in fact["what"] for fact in facts.of_kind(seen, "idle"))
    wrong = graph_of(lambda x: function(x.clamp(-100, 100)), torch.randn(3, 3))
    with pytest.raises(BitwiseDifference, match="inputs with large numbers"):
        assert_same_values(wrong, before, "a clamp")


BOUNDED = {
    "the last index": (
        lambda x, i: x[i],
        lambda x, i: x[i.clamp(max=len(x) - 2)],
        lambda: (torch.randn(74, 2), torch.tensor([0, 3, 2, 5])),
    ),
    "of a few": (
        lambda x, i: x[i.abs()],
        lambda x, i: x[i.abs().clamp(max=1)],
        lambda: (torch.randn(3, 2), torch.tensor([0, 1])),
    ),
    "after arithmetic": (
        lambda x, i: x[i // 2],
        lambda x, i: x[(i // 2).clamp(max=len(x) - 2)],
        lambda: (torch.randn(9, 2), torch.tensor([0, 3, 2, 5])),
    ),
    "int8": (
        lambda i: i + 1,
        lambda i: (i.int() + 1).clamp(-128, 127).to(torch.int8),
        lambda: (torch.arange(5, dtype=torch.int8),),
    ),
    "uint8": (
        lambda i: i - 1,
        lambda i: (i.int() - 1).clamp(0, 255).to(torch.uint8),
        lambda: (torch.arange(1, 5, dtype=torch.uint8),),
    ),
    "int16": (
        lambda i: i + 1,
        lambda i: (i.int() + 1).clamp(-32768, 32767).to(torch.int16),
        lambda: (torch.arange(5, dtype=torch.int16),),
    ),
    "imaginary parts": (
        lambda z: z * 2,
        lambda z: torch.complex((z * 2).real, (z * 2).imag.clamp(-50, 50)),
        lambda: (torch.randn(4, dtype=torch.complex64),),
    ),
}


@pytest.mark.parametrize("where", BOUNDED)
def test_a_bound_at_the_end_of_a_range_shows(where):
    function, bounded, make_inputs = BOUNDED[where]
    inputs = make_inputs()
    before, after = graph_of(function, *inputs), graph_of(bounded, *inputs)
    with pytest.raises(BitwiseDifference):
        assert_pass_bitwise((before, after))
    with pytest.raises(BitwiseDifference):
        assert_same_values(after, before, "bounded")
