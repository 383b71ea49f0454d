"""Infinities, NaN, absolute values, choices and roots of abstract elements."""

import importlib.util
import math
import sys
from functools import partial

import pytest
import torch

from pytest_gtrainer import prove
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.proofs.further_runs import ORDERS, Chances, further_runs, orders

F = torch.nn.functional
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 6, dtype=torch.bool).triu(1)
INF = float("inf")


def kind(actual, expected, *inputs):
    return prove(actual, expected, inputs=inputs or (X,)).kind


def masked(x, value=-INF):
    return x.masked_fill(MASK, value)


SCALED = {
    "times": lambda x, c: masked(x) * c,
    "times on the left": lambda x, c: c * masked(x),
    "times a tensor": lambda x, c: masked(x) * torch.full((6,), c),
    "divided": lambda x, c: masked(x) / c,
    "negative": lambda x, c: masked(x, INF) * -c,
}


@pytest.mark.parametrize("name", SCALED)
def test_a_mask_that_is_scaled_by_a_known_number_stays_a_mask(name):
    """Two scales differ, and a softmax of it is a softmax of numbers."""
    scaled = SCALED[name]
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, 0.5)) == "identical"
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, -0.5)) == "another function"
    assert kind(lambda x: scaled(x, 0.5), lambda x: scaled(x, 0.25)) == "another function"
    probabilities = [lambda x, c=c: F.softmax(scaled(x, c), -1) for c in (0.5, 0.25)]
    assert kind(*probabilities) == "another function"


def test_a_mask_that_is_scaled_by_an_unknown_number_proves_nothing():
    """-inf times w is an infinity of either sign or NaN, as w decides."""
    proof = prove(
        lambda x, w: masked(x) * (w + x), lambda x, w: masked(x) * (x + 2 * w - w), inputs=(X, X)
    )
    assert proof.kind == "unknown"
    assert "NaN in exact arithmetic alone" in proof.reason


def test_state_that_becomes_nan_proves_nothing():
    def write(factor):
        def step(x, w, out):
            out.copy_(factor * F.softmax(masked(x) * w, -1))

        return step

    proof = prove(write(1), write(3), inputs=(X, X.abs(), X))
    assert proof.kind == "unknown"
    assert "NaN in exact arithmetic alone" in proof.reason


ADDED = {
    "index_put": lambda x, y: x.index_put((torch.tensor([0, 0]),), y[:2], accumulate=True),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 0]), y[:2]),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(2, 6, dtype=torch.long), y[:2]),
    "cumsum": lambda x, y: (x + y).cumsum(0),
    "embedding's gradient": lambda x, y: torch.ops.aten.embedding_dense_backward(
        x + y, torch.zeros(4, dtype=torch.long), 3, -1, False
    ),
}


@pytest.mark.parametrize("value", [-INF, INF, float("nan")])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_an_infinity_is_none_of_the_numbers(name, value):
    """An infinity is an element behind the numbers, and must not be added as one of them."""
    adds = ADDED[name]
    special = torch.where(MASK, value, 0.0)
    plain = torch.where(MASK, {-INF: 0.0, INF: 1.0}.get(value, 2.0), 0.0)
    assert kind(lambda x: adds(x, special), lambda x: adds(x, plain)) == "another function"
    assert kind(lambda x: adds(x, special), lambda x: adds(x * 1, special)) == "identical"
    reordered = kind(lambda x: adds(x + x.cos(), special), lambda x: adds(x.cos() + x, special))
    assert reordered == "identical"  # an addition commutes


QUESTIONS = ("isfinite", "isinf", "isneginf", "isposinf", "isnan")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1.0])
def test_what_is_not_finite_says_so(question, value):
    asks = getattr(torch, question)
    answer = bool(asks(torch.tensor(value)))
    others = bool(asks(torch.tensor(1.0)))
    expected = torch.where(MASK, answer, others)
    proof = prove(
        lambda x: torch.where(asks(masked(x, value)), x, 2 * x),
        lambda x: torch.where(expected, x, 2 * x),
        inputs=(X,),
    )
    assert proof.is_at_least("reordered"), str(proof)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_absolute_values(count):
    x = X.flatten()[:count]
    assert kind(torch.abs, lambda x: (-x).abs(), x) in ("reordered", "other kernels")
    assert kind(torch.abs, lambda x: torch.maximum(x, -x), x) == "reordered"
    assert kind(torch.abs, lambda x: x * 1, x) == "another function"
    assert kind(torch.abs, lambda x: -x, x) == "another function"
    assert kind(lambda x: x.clone().amax(), lambda x: -(-x).amin(), x) == "reordered"


@pytest.mark.parametrize("chooses", [torch.maximum, torch.minimum])
def test_of_two_zeros_a_kernel_returns_one_by_its_place(chooses):
    """So the larger of y and x may have another bit than that of x and y; a sum has not."""
    x, y = X, X.roll(1)
    assert kind(chooses, lambda x, y: chooses(y, x), x, y) == "other kernels"
    assert kind(chooses, lambda x, y: chooses(x, y), x, y) == "identical"
    assert kind(torch.add, lambda x, y: y + x, x, y) == "identical"


@pytest.mark.parametrize("narrow_first", [True, False])
def test_memory_that_is_written_in_parts_holds_the_widest_of_them(narrow_first):
    """A cast to a narrower dtype and back changes it, if not all parts were rounded to that."""

    def rounded(x):
        return x.bfloat16().float()

    def in_parts(x, wide):
        whole = torch.empty(8, 6)
        for part in (slice(0, 4), slice(4, 8)) if narrow_first else (slice(4, 8), slice(0, 4)):
            whole[part] = wide(x) if part.start else rounded(x)
        return whole

    def cast(wide):
        return lambda x: rounded(in_parts(x, wide))

    def kept(wide):
        return lambda x: in_parts(x, wide)

    assert kind(cast(rounded), kept(rounded)) != "another function"
    assert kind(cast(torch.neg), kept(torch.neg)) == "rounds elsewhere"


CHOICES = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "maximum": lambda x: torch.maximum(x[:, 0], x[:, -1]),
    "minimum": lambda x: torch.minimum(x[:, -1], x[:, 0]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_chooses_among_numbers_and_a_nan_is_nan(name):
    """Not the largest or the smallest of the others."""
    chooses = CHOICES[name]
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:2, -1] = True

    def with_nan(x):
        return chooses(x.masked_fill(mask, float("nan")))

    def without(x):
        return torch.where(mask[:, -1], float("nan"), chooses(x))

    proof = prove(with_nan, without, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(with_nan, chooses) == "another function"


def test_the_order_of_negatives_is_turned_round():
    prime = Prime(P)
    elements = torch.randint(0, P, (1000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(prime.order_key(prime.negative(elements)), -prime.order_key(elements))


def test_what_chooses_does_not_round_again():
    x = X.bfloat16()
    two = kind(lambda x: x.amax(), lambda x: torch.maximum(x[:2].amax(), x[2:].amax()), x)
    assert two == "reordered"
    assert kind(lambda x: x.abs(), lambda x: x.abs().abs(), x) != "another function"
    assert kind(lambda x: x.amax(), lambda x: x[:1, :1].amax(), x) == "another function"


def test_a_product_of_few_numbers_decides_nothing():
    """Else the real numbers would not be compared."""

    def hidden(x):
        with torch.no_grad():
            x.detach().numpy()[:] *= 2  # no dispatch mode sees it
        return x.prod()

    assert kind(hidden, torch.prod) == "unknown"


def test_a_fold_does_not_depend_on_what_was_folded_before():
    spec = importlib.util.spec_from_file_location("fresh_hashing", hashing.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert spec.name not in sys.modules
    one = torch.tensor([5])
    before = fresh.fold(one, [0])
    fresh.fold(torch.arange(100), [0])
    assert torch.equal(fresh.fold(one, [0]), before)
    assert torch.equal(hashing.fold(one, [0]), before)


@pytest.mark.parametrize("size", [8, 600])
def test_a_convolution_that_adds_more_products_than_float64_can_is_unknown(size):
    """The gradient of a weight adds one product for each pixel."""
    x, weight = torch.ones(1, 1, size, size), torch.ones(1, 1, 1, 1)

    def gradient(x, weight, factor=1):
        _, found, _ = torch.ops.aten.convolution_backward(
            factor * x,
            x,
            weight,
            [0],
            [1, 1],
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            [False, True, False],
        )
        return found / factor

    proof = prove(gradient, lambda x, weight: gradient(x, weight, 2), inputs=(x, weight))
    if size == 8:
        assert proof.kind == "reordered"
    else:
        assert proof.kind == "unknown"
        assert "a convolution that adds 360000 products" in proof.reason


ROOTS = {
    "a product": (lambda x, y: (x * y).sqrt(), lambda x, y: x.sqrt() * y.sqrt()),
    "a quotient": (lambda x, y: (x / y).sqrt(), lambda x, y: x.sqrt() / y.sqrt()),
    "a quotient by a number": (lambda x, y: (x / 2).sqrt(), lambda x, y: x.sqrt() / 2**0.5),
    "an inverse": (lambda x, y: x.rsqrt(), lambda x, y: (1 / x).sqrt()),
}


@pytest.mark.parametrize("name", ROOTS)
def test_the_root_of_a_product_is_the_product_of_the_roots(name):
    """Optimisers divide the root, or the number below it."""
    inputs = X.abs() + 1, X.flip(0).abs() + 1
    proof = prove(*ROOTS[name], inputs=inputs)
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    assert (
        kind(lambda x, y: (x * y).sqrt(), lambda x, y: x.sqrt() * y, *inputs) == "another function"
    )
    assert kind(lambda x, y: (x + y).sqrt(), lambda x, y: x.sqrt() + y.sqrt(), *inputs) == (
        "another function"
    )
    assert kind(lambda x, y: x.sqrt(), lambda x, y: (-x).sqrt(), *inputs) == "another function"


LEFT_TO_CHANCE = {
    "softmax": (lambda x: x.softmax(-1), Chances()),
    "log_softmax": (lambda x: x.log_softmax(-1), Chances()),
    "logsumexp": (lambda x: x.logsumexp(-1), Chances()),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), Chances()),
    "amax": (lambda x: x.flatten()[:6].amax(), Chances(decides=True, decides_few=True)),
    "sort": (lambda x: x.sort(-1).values, Chances(decides=True)),
    "roots of many": (lambda x: x.sqrt(), Chances(roots=True)),
    "roots of few": (
        lambda x: x.flatten()[:3].expand(8, 3).sqrt(),
        Chances(roots=True, fewest_roots=3),
    ),
    "roots of none": (lambda x: x[:0].sqrt(), Chances()),
}


@pytest.mark.parametrize("exact", [Field, FieldWithExponents])
@pytest.mark.parametrize("name", LEFT_TO_CHANCE)
def test_what_may_be_equal_by_chance_is_noted(name, exact):
    """The largest number that softmax subtracts may be any: it changes no real number."""
    function, chances = LEFT_TO_CHANCE[name]
    mode = ArithmeticMode(exact(casts="opaque"))
    x = X.expand(2, 4, 6).clone()
    with mode:
        mode.make_abstract(x, "x")
        function(x)
    assert Chances.of(mode.arithmetic) == chances


def test_signs_of_few_roots_run_until_they_hardly_agree_by_chance():
    assert len(orders(Chances())) == 0
    runs = []
    for count in (1, 2, 3, 5, 8, 15, 16):
        seeds = orders(Chances(roots=True, fewest_roots=count))
        assert seeds[:2] == ((0, 1), (0, -1)), "inputs of either sign"
        runs.append(len(seeds))
    assert runs == [9, 9, 7, 5, 3, 3, 2]
    few, many = Chances(roots=True, fewest_roots=2), Chances(roots=True, fewest_roots=16)
    assert len(orders(few, many)) == len(orders(many, few)) == len(orders(few)) == 9
    assert orders(Chances(fewest_roots=1), Chances(decides=True)) == ORDERS
    assert len(orders(Chances(decides=True, decides_few=True))) == 16


@pytest.mark.parametrize(
    ("actual", "expected", "gaps"),
    [
        ((), (), []),
        (((5, 100),), ((5, 100),), []),
        (((5, 100),), (), [(1, 99)]),
        ((), ((5, -100),), [(1, 99)]),
        (((5, 100), (6, 300)), (), [(1, 99), (101, 199)]),
        (((5, 100), (6, 300)), ((5, 100),), [(101, 199)]),
        (((5, 100), (6, 300)), ((6, 300),), [(1, 99), (101, 199)]),
    ],
    ids=str,
)
def test_beside_a_limit_of_one_program_all_inputs_are_above_0_and_then_all_below(
    actual, expected, gaps
):
    """A condition on all elements holds for one sign alone, as (x < -0.3).all() does."""
    sides = [[Chances(decides=True, limits=limits)] for limits in (actual, expected)]
    found = [run for run in further_runs(*sides) if run.is_for_limits and run.sign]
    assert [(run.gaps, run.sign) for run in found] == [
        ((gap,), sign) for gap in gaps for sign in (1, -1)
    ]


SIGNS = {
    "a number and its negative": (lambda x: x.relu() - (-x).relu(), lambda x: x * 1),
    "an absolute value": (lambda x: x.relu() + (-x).relu(), torch.abs),
    "a sign": (lambda x: x.sign() * x.abs(), lambda x: x * 1),
    "a factor": (lambda x: (2 * x).relu(), lambda x: 2 * x.relu()),
    "a square": (lambda x: (x * x).relu(), lambda x: x * x),
    "a power": (lambda x: x.exp().abs(), torch.exp),
    "two limits": (lambda x: x.clamp(0, 6), lambda x: torch.where(x < 0, 0, x.where(x < 6, 6.0))),
    "limits twice": (lambda x: x.clamp(-1, 0.5).clamp(-1, 0.5), lambda x: x.clamp(-1, 0.5)),
    "a limit of pads": (
        lambda x: F.pad(x, (0, 2)).clamp(min=0.5),
        lambda x: F.pad(x.clamp(min=0.5), (0, 2), value=0.5),
    ),
}
TWINS = {
    "a number and its negative": lambda x: x.relu() + (-x).relu(),
    "an absolute value": lambda x: -x.abs(),
    "a sign": lambda x: x.abs(),
    "a factor": lambda x: 3 * x.relu(),
    "a square": lambda x: (x * x.flip(0)).relu(),
    "a power": lambda x: -x.exp(),
    "two limits": lambda x: x.clamp(0, 5),
    "limits twice": lambda x: x.clamp(-1, 1).clamp(-1, 0.25),
    "a limit of pads": lambda x: F.pad(x.clamp(min=0.5), (0, 2)),
}


@pytest.mark.parametrize("name", SIGNS)
def test_elements_are_above_or_below_0_as_numbers_are(name):
    actual, expected = SIGNS[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(TWINS[name], expected) == "another function"


def norm_of_norms(x, y):
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(each) for each in (x, y)])
    )


SQUARES = {
    "a root": (lambda x, y: x.sqrt() ** 2, lambda x, y: x * 1, lambda x, y: -x),
    "an inverse root": (
        lambda x, y: x.rsqrt() * x.rsqrt(),
        lambda x, y: 1 / x,
        lambda x, y: -1 / x,
    ),
    "its fourth power": (
        lambda x, y: x.sqrt() ** 4,
        lambda x, y: x * x,
        lambda x, y: x.sqrt() ** 3,
    ),
    "a norm of norms": (
        norm_of_norms,
        lambda x, y: ((x**2).sum() + (y**2).sum()).sqrt(),
        lambda x, y: (x.sum() ** 2 + (y**2).sum()).sqrt(),
    ),
    "a deviation": (
        lambda x, y: x.std(-1) ** 2,
        lambda x, y: x.var(-1),
        lambda x, y: x.var(-1, correction=0),
    ),
    "a distance": (
        lambda x, y: torch.dist(x, y) ** 2,
        lambda x, y: ((x - y) ** 2).sum(),
        lambda x, y: ((x + y) ** 2).sum(),
    ),
}


SQUARES |= {
    "times an inverse root": (
        lambda x, y: x * x.rsqrt(),
        lambda x, y: x.sqrt(),
        lambda x, y: -x.sqrt(),
    ),
    "a root divided": (lambda x, y: x.sqrt() / x, lambda x, y: x.rsqrt(), lambda x, y: -x.rsqrt()),
    "divided by a root": (lambda x, y: x / x.sqrt(), lambda x, y: x**0.5, lambda x, y: -(x**0.5)),
    "an odd power": (lambda x, y: x * x.sqrt(), lambda x, y: x**1.5, lambda x, y: -(x**1.5)),
    "an odd power below": (
        lambda x, y: x.rsqrt() / x,
        lambda x, y: x.rsqrt() ** 3,
        lambda x, y: -(x.rsqrt() ** 3),
    ),
    "one after the other": (
        lambda x, y: x.rsqrt() * x.rsqrt() * x.rsqrt(),
        lambda x, y: x**-1.5,
        lambda x, y: -(x**-1.5),
    ),
    "a root and its negative": (
        lambda x, y: x.sqrt() * -x.sqrt(),
        lambda x, y: -x,
        lambda x, y: x * 1,
    ),
    "a root by another": (lambda x, y: x.sqrt() / x.rsqrt(), lambda x, y: x * 1, lambda x, y: -x),
    "a deviation by products": (
        lambda x, y: x.var(-1) * x.var(-1).rsqrt(),
        lambda x, y: x.std(-1),
        lambda x, y: x.std(-1, correction=0),
    ),
    "another factor first": (
        lambda x, y: (x * y) * x.rsqrt(),
        lambda x, y: x * (y * x.rsqrt()),
        lambda x, y: -x * (y * x.rsqrt()),
    ),
    "a logarithm of a product": (
        lambda x, y: (x * y).log(),
        lambda x, y: x.log() + y.log(),
        lambda x, y: x.log() - y.log(),
    ),
    "a logarithm of a power": (
        lambda x, y: (x**3).log(),
        lambda x, y: 3 * x.log(),
        lambda x, y: 2 * x.log(),
    ),
    "a logarithm of a root": (
        lambda x, y: x.sqrt().log(),
        lambda x, y: x.log() / 2,
        lambda x, y: x.log() / 4,
    ),
    "a power of a logarithm": (
        lambda x, y: (1.5 * x.log()).exp(),
        lambda x, y: x**1.5,
        lambda x, y: x**2.5,
    ),
    "another base": (
        lambda x, y: x.log2(),
        lambda x, y: x.log() / math.log(2),
        lambda x, y: x.log() / math.log(3),
    ),
    "ten": (
        lambda x, y: x.log10(),
        lambda x, y: x.log() / math.log(10),
        lambda x, y: x.log2(),
    ),
    "a power of two": (
        lambda x, y: 2.0 ** (x + y),
        lambda x, y: x.exp2() * (y * math.log(2)).exp(),
        lambda x, y: x.exp2() + y.exp2(),
    ),
    "a tensor as exponent": (
        lambda x, y: x ** torch.tensor(2.0),
        lambda x, y: x * x,
        lambda x, y: x * y,
    ),
    "exponents of many sizes": (
        lambda x, y: x ** torch.full((2, 4, 6), 0.5),
        lambda x, y: x.sqrt().expand(2, 4, 6) * 1,
        lambda x, y: x.expand(2, 4, 6) * 1,
    ),
}


@pytest.mark.parametrize("name", SQUARES)
def test_the_square_of_a_root_is_what_is_below_it(name):
    actual, expected, twin = SQUARES[name]
    inputs = X.abs() + 1, X.flip(0).abs() + 1
    proof = prove(actual, expected, inputs=inputs)
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(twin, expected, *inputs) == "another function"


def adamw_by_hand(steps, lr, decay):
    betas = (0.9, 0.999)

    def train(model, x):
        weights = list(model.parameters())
        means, squares = ([torch.zeros_like(each) for each in weights] for _ in range(2))
        for step in range(1, steps + 1):
            model.zero_grad()
            (model(x) ** 2).mean().backward()
            with torch.no_grad():
                for weight, mean, square in zip(weights, means, squares, strict=True):
                    weight.sub_(lr * decay * weight)
                    mean.copy_(betas[0] * mean + (1 - betas[0]) * weight.grad)
                    square.copy_(betas[1] * square + (1 - betas[1]) * weight.grad**2)
                    corrected = square / (1 - betas[1] ** step)
                    by = lr * (mean / (1 - betas[0] ** step)) / (corrected.sqrt() + 1e-8)
                    weight.sub_(by)
        return x.sum()

    return train


def adamw(steps, lr, decay):
    def train(model, x):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
        return x.sum()

    return train


@pytest.mark.parametrize("options", [(1, 1e-3, 0.0), (3, 1e-3, 0.01), (1, 2.5e-5, 0.01)])
def test_an_optimiser_by_hand_is_that_of_torch(options):
    """Constants such as sqrt(1 - beta ** step) are those that are meant."""
    inputs = (torch.nn.Linear(6, 2), X)
    proof = prove(adamw(*options), adamw_by_hand(*options), inputs=inputs)
    assert proof.kind == "rounds elsewhere", str(proof)
    steps, lr, decay = options
    other = adamw_by_hand(steps, 2 * lr, decay)
    assert kind(adamw(*options), other, *inputs) == "another function"


LEAST = torch.finfo(torch.float32).min
BEHIND = torch.arange(6) > 3


def expected_mask(x):
    return x.masked_fill(BEHIND, -INF).softmax(-1)


MASKS = {
    "filled": lambda x: x.masked_fill(BEHIND, LEAST).softmax(-1),
    "added": lambda x: (x + torch.where(BEHIND, -1e9, 0.0)).softmax(-1),
    "added twice": lambda x: (x + torch.where(BEHIND, -1e9, 0.0) - 1 * BEHIND).softmax(-1),
    "chosen": lambda x: x.where(~BEHIND, LEAST).softmax(-1),
    "scaled": lambda x: ((2 * x).masked_fill(BEHIND, LEAST) / 2).softmax(-1),
    "in the logarithm": lambda x: (x + LEAST * BEHIND).log_softmax(-1).exp(),
    "subtracted": lambda x: (x - 1e9 * BEHIND).softmax(-1),
    "subtracted twice": lambda x: torch.sub(x, 1e9 * BEHIND, alpha=2).softmax(-1),
    "subtracted from": lambda x: (-(1e9 * BEHIND - x)).softmax(-1),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_a_large_number_is_one_of_infinity_in_a_softmax(name):
    proof = prove(MASKS[name], expected_mask, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert "exp is 0 where a mask of -1e4 or less is filled in, or added" in proof.assumes
    proof = prove(lambda x: MASKS[name](x)[:, :4], lambda x: x[:, :4].softmax(-1), inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(MASKS[name], lambda x: expected_mask(3 * x)) == "another function"


def test_masks_in_narrow_dtypes_and_their_gradients():
    def gradient_of(function):
        def step(x):
            x = x.clone().requires_grad_()
            return torch.autograd.grad((function(x) ** 2).sum(), x)[0]

        return step

    assert kind(*map(gradient_of, (MASKS["added"], expected_mask))) == "reordered"
    least = torch.finfo(torch.bfloat16).min
    narrow = prove(
        lambda x: x.masked_fill(BEHIND, least).softmax(-1), expected_mask, inputs=(X.bfloat16(),)
    )
    assert narrow.is_at_least("rounds elsewhere"), str(narrow)


OTHER_MASKS = {
    "another place": lambda x: x.masked_fill(torch.arange(6) > 2, LEAST).softmax(-1),
    "a number that counts": lambda x: x.masked_fill(BEHIND, -100.0).softmax(-1),
    "another sign": lambda x: x.masked_fill(BEHIND, -LEAST).softmax(-1),
    "subtracted with another sign": lambda x: (x + 1e9 * BEHIND).softmax(-1),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_another_mask_differs(name):
    assert kind(OTHER_MASKS[name], expected_mask) in ("another function", "unknown")


def test_what_a_large_number_is_added_to_is_not_lost():
    """Outside of exp it is a number as others are."""
    assert kind(lambda x: 2 * x + -1e9, lambda x: x + -1e9) == "another function"
    assert kind(lambda x: x + -1e9 + 1e9, lambda x: x * 1) in ("reordered", "unknown")


def test_two_masks_of_other_signs_are_none():
    masked = X[0] * 0 - 1e4
    for cancelled in (
        lambda x: (x + masked) + -(x + masked),
        lambda x: (x + masked) - (x + masked),
        lambda x: x.masked_fill(BEHIND, -1e9) - x.masked_fill(BEHIND, -1e9),
    ):

        def scaled(x, cancelled=cancelled):
            return cancelled(x).exp() * x

        assert kind(scaled, lambda x: (x - x).exp() * x) == "reordered"
        assert kind(scaled, lambda x: x * 0) == "another function"


def test_a_mask_is_below_all_other_numbers():
    chosen = kind(lambda x: x.masked_fill(BEHIND, LEAST).topk(2)[0], lambda x: x[:, :4].topk(2)[0])
    assert chosen == "reordered"
    assert kind(lambda x: x.clamp(min=LEAST), lambda x: x * 1) == "reordered"
    other = kind(lambda x: x.masked_fill(BEHIND, -1.0).topk(2)[0], lambda x: x[:, :4].topk(2)[0])
    assert other == "another function"


FACTORS = {
    "a norm": (
        lambda g, x: torch.linalg.vector_norm(g * x, dim=-1),
        lambda g, x: g * torch.linalg.vector_norm(x, dim=-1),
    ),
    "a deviation": (lambda g, x: (g * x).std(-1), lambda g, x: g * x.std(-1)),
    "a normalised row": (
        lambda g, x: F.rms_norm(g * x, [4], eps=0.0),
        lambda g, x: F.rms_norm(x, [4], eps=0.0),
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_one_factor_gives_all_roots_one_sign(name):
    """Equal for a factor above 0 alone; the numbers that are given are above 0."""
    actual, expected = FACTORS[name]
    inputs = torch.tensor(1.0), torch.randn(32, 4)
    # Without inputs of either sign only numbers contradict it, and then it is "unknown".
    assert prove(actual, expected, inputs=inputs).kind == "another function"


LIMITS = {
    "a lower limit": (lambda x: x.clamp(-32768, 32767), lambda x: x.clamp(max=32767)),
    "the larger": (lambda x: torch.maximum(x, torch.tensor(-65504.0)), lambda x: x * 1),
    "another limit": (lambda x: x.clamp(min=-1e4), lambda x: x.clamp(min=-2e4)),
    "a largest number of fewer": (
        lambda x: x / x.flatten().amax(),
        lambda x: x / x.flatten()[12:].amax(),
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_far_below_are_met(name):
    actual, expected = LIMITS[name]
    assert not prove(actual, expected, inputs=(X,)).is_at_least("rounds elsewhere")


DECIDING = {
    "where": (
        lambda x: torch.where(x > 0.5, x, -x),
        lambda x: torch.where(x <= 0.5, -x, 1 * x),
        lambda x: torch.where(x > 0.51, x, -x),
    ),
    "below 0": (
        lambda x: torch.where(x > -1, x, -x),
        lambda x: torch.where(x <= -1, -x, x),
        lambda x: torch.where(x > -1.001, x, -x),
    ),
    "a window": (
        lambda x: torch.where((x > 2) & (x < 2.05), -x, x),
        lambda x: torch.where((x <= 2) | (x >= 2.05), x, -x),
        lambda x: x * 1,
    ),
    "a norm": (
        lambda x: torch.where(x.norm() > 1, x / x.norm(), x),
        lambda x: torch.where(x.norm() <= 1, x, x / (x**2).sum().sqrt()),
        lambda x: torch.where(x.norm() > 1.2, x / x.norm(), x),
    ),
    "limits of two": (
        lambda x: torch.where(x[0] > 1, x[0], 0) + torch.where(x[1] > 1.1, x[1], 0),
        lambda x: torch.where(x[1] > 1.1, x[1], 0) + torch.where(x[0] > 1, x[0], 0),
        lambda x: torch.where(x[0] > 1.1, x[0], 0) + torch.where(x[1] > 1, x[1], 0),
    ),
    "limits of two numbers": (
        lambda x: torch.where(x[0, 0] > 1, x, 0) + torch.where(x[1, 0] > 1.1, x, 0),
        lambda x: torch.where(x[1, 0] > 1.1, x, 0) + torch.where(x[0, 0] > 1, x, 0),
        lambda x: torch.where(x[0, 0] > 1.1, x, 0) + torch.where(x[1, 0] > 1, x, 0),
    ),
    "a tensor of limits": (
        lambda x: torch.where(x > torch.arange(6) / 8, x, -x),
        lambda x: torch.where(torch.arange(6) / 8 < x, x, -x),
        lambda x: torch.where(x > (torch.arange(6) + 0.01) / 8, x, -x),
    ),
    "limits that do nothing": (
        lambda x: x.clamp(-2, 2).clamp(-1, 1),
        lambda x: x.clamp(-1, 1),
        lambda x: x.clamp(-2, 2).clamp(-1, 1.1),
    ),
    "gradients": (
        lambda x: x * ((x >= -1) & (x <= 1)),
        lambda x: torch.where(x > 1, 0, torch.where(x < -1, 0, x)),
        lambda x: x * ((x >= -1) & (x <= 1.01)),
    ),
}


@pytest.mark.second_tier("a norm", "limits of two numbers", "a tensor of limits", "gradients")
@pytest.mark.parametrize("name", DECIDING)
def test_limits_that_only_decide_are_compared(name):
    actual, expected, twin = DECIDING[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert "limits" not in str(proof)
    for first, second in ((twin, actual), (expected, twin)):
        proof = prove(first, second, inputs=(X,))
        assert proof.kind in ("another function", "unknown"), str(proof)


def test_more_limits_than_are_compared_are_named():
    x, limits = torch.randn(100), torch.arange(100) / 8
    proof = prove(
        lambda x: torch.where(x > limits, x, -x),
        lambda x: torch.where(limits < x, x, -x),
        inputs=(x,),
    )
    assert "limits that only decide" in str(proof)


SIXTY_FOUR = torch.arange(64.0)
FEWER = {
    "a largest number": (lambda x: x - x.amax(), lambda x, own: x - own.amax()),
    "a least number": (lambda x: x - x.amin(), lambda x, own: x - own.amin()),
    "a place": (lambda x: x[:60] + x[1:].argmax(), lambda x, own: x[:60] + own[1:].argmax()),
    "the larger numbers": (lambda x: x.topk(2)[0], lambda x, own: own.topk(2)[0]),
    "what is above 0": (lambda x: x.relu().max() + x, lambda x, own: own.relu().max() + x),
    "sizes": (lambda x: x / x.abs().amax(), lambda x, own: x / own.abs().amax()),
    "exponentials": (lambda x: (x - x.amax()).exp(), lambda x, own: (x - own.amax()).exp()),
}


@pytest.mark.second_tier(*list(FEWER)[2:])
@pytest.mark.parametrize("name", FEWER)
def test_one_number_of_many_that_is_not_chosen_from_is_missed(name):
    """One number of 64 is the largest in one order of 64, so such orders are looked for."""
    actual, expected = FEWER[name]
    cut = slice(1, None) if name != "a place" else slice(None, 63)
    assert kind(lambda x: expected(x, x[cut]), actual, SIXTY_FOUR) == "another function"
    assert kind(lambda x: expected(x, 1 * x), actual, SIXTY_FOUR) in ("identical", "reordered")


def routed(choose, x):
    """Mixtral takes the weights of a softmax, others a softmax of the scores."""
    weights, places = choose(x)
    return torch.zeros_like(x).scatter(1, places, weights)


def by_weights(x):
    weights, places = x.softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), places


def by_scores(x, count=2, sign=1):
    scores, places = (sign * x).topk(count)
    return (sign * scores).softmax(-1), places


SOFTMAX_ORDERS = {
    "routing": (
        partial(routed, by_weights),
        partial(routed, by_scores),
        partial(routed, partial(by_scores, sign=-1)),
    ),
    "a place": (
        lambda x: x.gather(1, x.softmax(-1).argmax(-1, keepdim=True)),
        lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
        lambda x: x.gather(1, x.softmax(0).argmax(-1, keepdim=True)),
    ),
    "a place of all": (
        lambda x: x.flatten()[x.flatten().softmax(0).argmax()],
        lambda x: x.flatten()[x.argmax()],
        lambda x: x.flatten()[x.softmax(-1).argmax()],
    ),
    "a logarithm": (
        lambda x: x.gather(1, (-x.log_softmax(-1)).argmin(-1, keepdim=True)),
        lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
        lambda x: x.gather(1, x.log_softmax(-1).argmin(-1, keepdim=True)),
    ),
    "a mask": (
        lambda x: x.gather(1, masked(x, -1e9).softmax(-1).argmax(-1, keepdim=True)),
        lambda x: x.gather(1, masked(x, -1e9).argmax(-1, keepdim=True)),
        lambda x: x.gather(1, x.softmax(-1).argmax(-1, keepdim=True)),
    ),
    "above 0": (
        lambda x: x.softmax(-1).relu(),
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1).relu(),
    ),
}


@pytest.mark.second_tier(*list(SOFTMAX_ORDERS)[1:])
@pytest.mark.parametrize("name", SOFTMAX_ORDERS)
def test_a_softmax_has_the_order_of_its_operand_in_each_row(name):
    actual, expected, twin = SOFTMAX_ORDERS[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.is_at_least("reordered"), str(proof)
    assert kind(twin, expected) == "another function"


RIGHT_CHOICES = {
    "in parts": (lambda x: torch.maximum(x[:2].amax(), x[2:].amax()), lambda x: x.amax()),
    "of sizes": (lambda x: x.abs().amax(), lambda x: torch.maximum(x.amax(), -x.amin())),
    "a root": (lambda x: (x * x).sqrt(), lambda x: x.abs()),
    "relu first": (lambda x: x.relu().amax(), lambda x: x.amax().relu()),
    "a shifted softmax": (
        lambda x: (x - x[:, 1:].amax()).exp() / (x - x[:, 1:].amax()).exp().sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
    ),
}


@pytest.mark.second_tier(*list(RIGHT_CHOICES)[1:])
@pytest.mark.parametrize("name", RIGHT_CHOICES)
def test_what_is_chosen_from_other_numbers_may_be_equal(name):
    assert kind(*RIGHT_CHOICES[name]) == "reordered"


ADDED_MASKS = {
    "relu": (lambda x: (x + -1e4).relu(), lambda x: x * 0),
    "a subtraction": (lambda x: (x - 1e4).clamp(min=0), lambda x: x * 0),
    "a maximum": (lambda x: torch.maximum(x - 1e4, torch.ones(6)), lambda x: x * 0 + 1),
    "a minimum": (lambda x: torch.minimum(1e4 - x, torch.ones(6)), lambda x: x * 0 + 1),
    "where": (lambda x: torch.where(x - 1e4 > 0, x, -x), lambda x: -x),
}


@pytest.mark.second_tier(*list(ADDED_MASKS)[1:])
@pytest.mark.parametrize("name", ADDED_MASKS)
def test_what_a_mask_is_added_to_may_be_above_a_limit(name):
    actual, expected = ADDED_MASKS[name]
    assert kind(actual, expected) in ("another function", "unknown")
    assert kind(actual, actual) == "identical"


def test_the_lowest_number_limits_nothing():
    assert kind(lambda x: (x + LEAST * BEHIND).clamp(min=LEAST).softmax(-1), expected_mask) == (
        "reordered"
    )
    proof = prove(
        lambda x: (x - 1e9 * BEHIND).topk(2)[0], lambda x: x[:, :4].topk(2)[0], inputs=(X,)
    )
    assert proof.kind == "reordered"
    assert "a mask of -1e4 or less is below every number without a mask" in str(proof)
    proof = prove(lambda x: torch.maximum(x + -1e4, 2 * x), lambda x: 2 * x, inputs=(X,))
    assert "a mask of -1e4 or less is below every number without a mask" in str(proof)


def test_a_row_of_nan_does_not_hide_the_rest():
    mask, ends = torch.tensor([0.0] * 3 + [-1e4] * 3), torch.zeros(4, 6)
    ends[0] = -torch.inf
    proof = prove(
        lambda x: ((x + mask) * 1e-6 + ends).softmax(-1),
        lambda x: ((x + 2 * mask) * 1e-6 + ends).softmax(-1),
        inputs=(X,),
    )
    assert proof.kind == "unknown"
    assert "apart in float64" in proof.reason
