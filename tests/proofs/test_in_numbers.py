"""Float64 numbers of both sides contradict a proof, or a mistake that it claims to find."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from pytest_gtrainer import assert_same_function, prove
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.numbers import Numbers
from pytest_gtrainer.proofs.in_numbers import (
    Difference,
    agreement,
    contradiction,
    difference,
    largest,
    lost_digits,
)

F = nn.functional
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
POSITIVE = X.abs()
MASK = torch.arange(6) > 3
LOWEST = torch.finfo(torch.float32).min


def online(x):
    first, last = x[:, :3].amax(-1), x[:, 3:].amax(-1)
    most = torch.maximum(first, last)
    parts = [(x[:, :3], first), (x[:, 3:], last)]
    total = sum((part - own[:, None]).exp().sum(-1) * (own - most).exp() for part, own in parts)
    return most + total.log()


def in_chunks(q, k, v):
    out = total = 0
    most = torch.full((len(q), 1), -torch.inf)
    for rows in (slice(0, 2), slice(2, 4)):
        scores = (q[:, None] * k[None, rows]).sum(-1)
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, scale = torch.exp(scores - new), torch.exp(most - new)
        out, total = out * scale + weights @ v[rows], total * scale + weights.sum(-1, keepdim=True)
        most = new
    return out / total


def routed_by_weights(x):
    weights, places = x.softmax(-1).topk(2)
    return torch.zeros_like(x).scatter(1, places, weights / weights.sum(-1, keepdim=True))


def routed_by_scores(x):
    scores, places = x.topk(2)
    return torch.zeros_like(x).scatter(1, places, scores.softmax(-1))


def adamw(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    (model(x) ** 2).mean().backward()
    optimizer.step()
    return x.sum()


def adamw_by_hand(model, x, eps=1e-8):
    (model(x) ** 2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            own = parameter.grad
            mean, square = 0.1 * own / (1 - 0.9), 0.001 * own * own / (1 - 0.999)
            parameter.sub_(1e-5 * mean / (square.sqrt() + eps))
    return x.sum()


def clipped(model, x):
    (model(x) ** 2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_by_hand(model, x):
    (model(x) ** 2).mean().backward()
    norm = torch.sqrt(sum((each.grad**2).sum() for each in model.parameters()))
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))


def norm_of_norms(x):
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(row) for row in x]))


PROVEN = {
    "a choice before softmax": (routed_by_scores, routed_by_weights, X),
    "a logarithm of softmax": (lambda x: x.softmax(-1).log(), lambda x: x.log_softmax(-1), X),
    "logsumexp in parts": (online, lambda x: x.logsumexp(-1), X),
    "log1p": (torch.log1p, lambda x: (1 + x).log(), POSITIVE),
    "a norm of norms": (norm_of_norms, torch.linalg.vector_norm, X),
    "the square of a root": (lambda x: x.sqrt() ** 2, lambda x: x * 1, POSITIVE),
    "the lowest number as a mask": (
        lambda x: x.masked_fill(MASK, LOWEST).softmax(-1),
        lambda x: x.masked_fill(MASK, -torch.inf).softmax(-1),
        X,
    ),
    "-1e9 as a mask": (
        lambda x: (x + torch.where(MASK, -1e9, 0.0)).softmax(-1),
        lambda x: x.masked_fill(MASK, -torch.inf).softmax(-1),
        X,
    ),
    "relu6": (
        lambda x: torch.where(x < 0, 0.0, torch.where(x > 6, 6.0, x)),
        lambda x: x.clamp(0.0, 6.0),
        X,
    ),
    "both halves": (lambda x: x.relu() - (-x).relu(), lambda x: x * 1, X),
    "attention by another product": (
        in_chunks,
        lambda q, k, v: torch.softmax(q @ k.T, -1) @ v,
        *(X, X + 1, X * 2),
    ),
    "what large numbers leave": (
        lambda x: torch.distributions.Categorical(logits=x, validate_args=False).entropy(),
        lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
        X,
    ),
    "clipping": (clipped, clipped_by_hand, nn.Linear(6, 2), X),
    "AdamW": (adamw, adamw_by_hand, nn.Linear(6, 2), X),
    "powers of a list": (
        lambda x: x ** torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5, -1.0]),
        lambda x: torch.stack(
            [x[:, 0] * 0 + 1, x[:, 1], x[:, 2] ** 2, x[:, 3] ** 3, x[:, 4].sqrt(), 1 / x[:, 5]], 1
        ),
        POSITIVE,
    ),
    "a known zero": (lambda x: (x * 2, x * 0), lambda x: (x * 2, torch.zeros_like(x)), X),
}


@pytest.mark.second_tier("attention by another product", "clipping")
@pytest.mark.parametrize("name", PROVEN)
def test_what_arithmetic_knows_is_proven(name):
    actual, expected, *inputs = PROVEN[name]
    proof = prove(actual, expected, inputs=inputs)
    assert proof.is_at_least("rounds elsewhere"), str(proof)


AGREE = {
    "sines, of which a cosine near 1 leaves no digits": (
        lambda x: x.sin() ** 2,
        lambda x: 1 - x.cos() ** 2,
        X,
    ),
    "a sum of large numbers": (lambda x: x + x.sin() ** 2 - x, lambda x: 1 - x.cos() ** 2, X),
    "the larger of two": (
        lambda x: torch.maximum(x, 0.25 * x),
        lambda x: F.leaky_relu(x, 0.25),
        X,
    ),
    "the largest scores, of which large ones are all 1": (
        lambda x: x.gather(1, x.sigmoid().topk(2)[1]),
        lambda x: x.gather(1, x.topk(2)[1]),
        X,
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_numbers_that_agree_are_no_other_function(name):
    """Nobody knows that they are equal, and it is no bug either."""
    actual, expected, *inputs = AGREE[name]
    proof = prove(actual, expected, inputs=inputs)
    assert proof.kind == "unknown", str(proof)
    assert "both agree in float64 to" in proof.reason
    assert "this arithmetic does not know that they are equal" in str(proof)


def corrected(beta, step):
    return lambda x: x / (1 - beta**step)


THREE = torch.tensor(3.0)
DIGITS = {
    "a step": (corrected(0.9, THREE), corrected(0.9, 3), corrected(0.9, 4)),
    "a hundredth step": (
        corrected(0.999, 100 * THREE),
        corrected(0.999, 300),
        corrected(0.99, 300),
    ),
    "steps": (
        lambda x: x / (1 - 0.95 ** torch.arange(1.0, 7)),
        lambda x: torch.stack([x[:, at] / (1 - 0.95 ** (at + 1)) for at in range(6)], 1),
        lambda x: x / (1 - 0.95 ** torch.arange(2.0, 8)),
    ),
    "a view": (
        lambda x: x * (1 - 0.95 ** torch.arange(1.0, 7))[2:].sqrt()[0],
        lambda x: x * (1 - 0.95**3) ** 0.5,
        lambda x: x * (1 - 0.95**2) ** 0.5,
    ),
    "decays in tensors": (
        lambda x: x * torch.tensor([0.9]) ** torch.arange(6),
        lambda x: x * torch.tensor([0.9**place for place in range(6)]),
        lambda x: x * torch.tensor([0.9 ** (place + 1) for place in range(6)]),
    ),
}


@pytest.mark.parametrize("name", DIGITS)
def test_what_a_program_computes_of_constants_in_float32_has_their_digits(name):
    """Optimisers have the step in a tensor, or in Python."""
    actual, expected, twin = DIGITS[name]
    for first, second in ((actual, expected), (expected, actual)):
        assert prove(first, second, inputs=(X,)).kind == "rounds elsewhere"
    assert prove(actual, twin, inputs=(X,)).kind == "another function"


def test_digits_are_lost_where_a_number_is_written_over():
    def written(x):
        correction = 1 - 0.9**THREE
        correction.mul_(2)
        return x / correction

    proof = prove(written, lambda x: x / (1 - 0.9**3), inputs=(X,))
    assert proof.kind == "another function"
    proof = prove(written, lambda x: x / (2 * (1 - 0.9**3)), inputs=(X,))
    assert proof.kind == "unknown"  # numbers keep what was written, elements do not
    many = torch.arange(17.0)
    unknown = prove(lambda x: x * (0.9**many)[3], lambda x: x * 0.9**3, inputs=(X,))
    assert not unknown.is_at_least("reordered")


def rotated(x, offset, base=1e4, dtype=torch.float32):
    """Rotate pairs of numbers by their positions, as rotary embeddings do."""
    width = x.shape[-1]
    frequencies = base ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    angles = torch.outer(torch.arange(len(x), dtype=dtype) + offset, frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


@torch.library.custom_op("in_numbers::single", mutates_args=())
def single(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 alone")
    return 2 * x


single.register_fake(lambda x: torch.empty_like(x))
SINGLE = torch.ops.in_numbers.single


def built_on_meta(x):
    """Return 1, for as many weights as a norm has that gets them later."""
    with torch.device("meta"):
        norm = nn.RMSNorm(16)
        total = (norm.weight + 1).mul_(2).sum()
    return norm.weight.numel() // 16 + total.dim()


def divided(by):
    made = torch.zeros(40)
    torch.div(torch.arange(40.0), by, out=made)
    return made


def with_positions(x, frequencies, make=torch.zeros):
    """Add sines and cosines that are written to an empty table."""
    table = make(x.shape)
    angles = torch.arange(len(x))[:, None] * frequencies(x.shape[1])
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return x + table


def powers(base):
    return lambda width: base ** (-torch.arange(0, width, 2) / width)


def exponentials(width):
    return torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))


def betas(count, dtype):
    return (1 - torch.linspace(1e-4, 0.02, count, dtype=dtype)[:40]).cumprod(0).float()


def scores(first, second, **settings):
    return lambda q, k: rotated(q, first, **settings) @ rotated(k, second, **settings).T


ROWS = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
TABLES = {  # a program, the same with a table that is rounded otherwise, another one, and inputs
    "even steps": (
        lambda x: x * torch.linspace(0, 1, 40),
        lambda x: x * (torch.arange(40.0) / 39),
        lambda x: x * (torch.arange(40.0) / 39.001),
        (ROWS,),
    ),
    "a quotient of integers": (
        lambda x: x * torch.linspace(0, 1, 8),
        lambda x: x * (torch.arange(8) / 7),
        lambda x: x * (torch.arange(8) / 8),
        (ROWS[:, :8],),
    ),
    "a window": (
        lambda x: x * torch.hann_window(40, periodic=False),
        lambda x: x * (0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(40.0) / 39)),
        lambda x: x * torch.hann_window(40, periodic=True),
        (ROWS,),
    ),
    "products of a schedule": (
        lambda x: x * betas(40, torch.float32),
        lambda x: x * betas(40, torch.float64),
        lambda x: x * betas(41, torch.float64),
        (ROWS,),
    ),
    "written in place": (
        lambda x: x * torch.linspace(0, 1, 40),
        lambda x: x * torch.arange(40.0).div_(39),
        lambda x: x * torch.arange(40.0).div_(39.001),
        (ROWS,),
    ),
    "written in parts": (
        lambda x: with_positions(x, exponentials),
        lambda x: with_positions(x, powers(1e4)),
        lambda x: with_positions(x, powers(1.001e4)),
        (ROWS,),
    ),
    "written by out=": (
        lambda x: x * torch.linspace(0, 1, 40),
        lambda x: x * divided(39),
        lambda x: x * divided(39.001),
        (ROWS,),
    ),
    "written to memory that nobody has written": (
        lambda x: with_positions(x, exponentials, torch.empty),
        lambda x: with_positions(x, powers(1e4), torch.empty),
        lambda x: with_positions(x, powers(1.001e4), torch.empty),
        (ROWS,),
    ),
    "beside an operator for float32 alone": (
        lambda x: x * torch.linspace(0, 1, 40) * SINGLE(torch.ones(40)),
        lambda x: x * (torch.arange(40.0) / 39) * SINGLE(torch.ones(40)),
        lambda x: x * (torch.arange(40.0) / 39.001) * SINGLE(torch.ones(40)),
        (ROWS,),
    ),
    "beside a model that is built without numbers": (
        lambda x: x * torch.linspace(0, 1, 40) * built_on_meta(x),
        lambda x: x * (torch.arange(40.0) / 39) * built_on_meta(x),
        lambda x: x * (torch.arange(40.0) / 39.001) * built_on_meta(x),
        (ROWS,),
    ),
    "angles of relative positions": (
        scores(0, 0),
        scores(5, 5),
        scores(5, 6),
        (ROWS, ROWS[:, :40] + 1),
    ),
    "angles in float64": (
        scores(0, 0),
        scores(0, 0, dtype=torch.float64),
        scores(0, 0, dtype=torch.float64, base=1.001e4),
        (ROWS, ROWS + 1),
    ),
    "a mean that Python reads": (
        lambda x: x - x.mean().item(),
        lambda x: x - x.mean(),
        lambda x: x - x.mean() * 1.001,
        (X,),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_rounded_otherwise_is_no_other_function(name):
    actual, expected, twin, inputs = TABLES[name]
    for first, second in ((actual, expected), (expected, actual)):
        proof = prove(first, second, inputs=inputs)
        assert proof.kind == "unknown", str(proof)
        assert "both agree in float64 to" in proof.reason
        if "mean" not in name:
            assert "known numbers that they compute, such as tables, are rounded" in proof.reason
    assert prove(actual, twin, inputs=inputs).kind == "another function"


def test_digits_of_a_table_end_where_something_else_is_written():
    """What was given to it, and then zeros."""

    def reused(x):
        table = torch.arange(40.0) / 39
        table.copy_(x[0])
        twice = table * 2
        table.zero_()
        return x * (table + 7) + twice

    expected = lambda x: x * 7 + x[0] * 2  # noqa: E731
    assert prove(reused, expected, inputs=(ROWS,)).is_at_least("rounds elsewhere")
    other = lambda x: x * (torch.arange(40.0) / 39 + 7) + x[0] * 2  # noqa: E731
    for first, second in ((reused, other), (other, reused)):
        assert prove(first, second, inputs=(ROWS,)).kind == "another function"


def rms(eps, after=False):
    def norm(x):
        square = (x * x).mean(-1, keepdim=True)
        return x / (square.sqrt() + eps if after else (square + eps).sqrt())

    return norm


def rare(limit):
    return lambda x: torch.where(x.abs() > limit, x * (1 + 2**-20), x)


SMALL = {
    "a factor": (lambda x: x.relu() * (1 + 2**-30), lambda x: x.relu()),
    "an eps": (rms(1e-12), rms(2e-12)),
    "an eps that moves": (rms(1e-12), rms(1e-12, after=True)),
    "a factor of sines": (lambda x: x.sin() ** 2, lambda x: (1 - x.cos() ** 2) * (1 + 1e-9)),
    "a rare branch": (rare(1000), lambda x: x * 1),
    "a rare branch of all": (
        lambda x: torch.where((x > 3).all(), x * 2, x),
        lambda x: x * 1,
    ),
    "a rare branch of small numbers": (
        lambda x: torch.where(x.abs() < 1e-3, x * 2, x),
        lambda x: x * 1,
    ),
    "a sign in one element": (
        lambda x: torch.cat([x[:-1], x[-1:].abs()]).exp(),
        torch.exp,
    ),
    "other scores, of which large ones are all 1": (
        lambda x: x.gather(1, x.sigmoid().topk(2)[1]),
        lambda x: x.gather(1, x.abs().sigmoid().topk(2)[1]),
    ),
    "a known number": (lambda x: (x + 1, torch.tensor(-0.0)), lambda x: (x + 1, torch.tensor(0.0))),
}


@pytest.mark.parametrize("name", SMALL)
def test_mistakes_that_are_small_in_numbers_are_another_function(name):
    actual, expected = SMALL[name]
    proof = prove(actual, expected, inputs=(X,))
    assert proof.kind == "another function", str(proof)


def test_a_small_number_in_a_small_step_is_another_function():
    # With the weights of one seed in sixty all differences are so small that nobody knows.
    torch.manual_seed(0)
    twice = partial(adamw_by_hand, eps=2e-8)
    assert prove(twice, adamw, inputs=(nn.Linear(6, 2), X)).kind == "another function"


@pytest.mark.parametrize("last", [torch.relu, torch.sin])
def test_equal_elements_of_other_numbers_are_no_proof(monkeypatch, last):
    """A mistake of the arithmetic is found, also where something is decided."""
    monkeypatch.setattr(Field, "_neg", lambda self, call: self.lift(call.args[0]))
    proof = prove(lambda x: last(torch.neg(x)), lambda x: last(x * 1), inputs=(X,))
    assert proof.kind == "unknown", str(proof)
    assert "apart" in proof.reason
    with pytest.raises(AssertionError, match="apart"):
        assert_same_function(lambda x: last(torch.neg(x)), last, inputs=(X,))


def through_numpy(x):
    y = x.clone()
    y.numpy()[0] = 0
    return y


def test_what_numpy_computes_is_seen_where_something_is_decided():
    proof = prove(lambda x: through_numpy(x).relu(), lambda x: x.relu(), inputs=(X,))
    assert proof.kind == "unknown", str(proof)


def test_a_proof_says_where_no_numbers_can_be_compared():
    def scaled(x):
        eights = x.to(torch.float8_e4m3fn)
        one = torch.ones(())
        product = torch._scaled_mm(eights, eights.t(), one, one).float()
        return torch.where(product > 0, product, 0.0)

    x = torch.randn(16, 16)
    proof = prove(scaled, scaled, inputs=(x,))
    assert proof.kind == "identical"
    assert "aten._scaled_mm.default has no kernel for float64" in str(proof)


@pytest.mark.parametrize(
    ("calls", "reads", "draws"),
    [(3, False, [1, 2, 5, 8, 11]), (3, True, [0]), (3_000, False, [1])],
    ids=["small", "what is given alone", "large"],
)
def test_which_inputs_may_contradict_a_proof(calls, reads, draws):
    tried = []

    def compare(numbers):
        tried.append(numbers.seed)
        numbers.calls = calls
        return Difference()

    assert contradiction("identical", compare, reads=reads) == ""
    assert tried == draws
    for last in draws:
        found = contradiction(
            "identical",
            lambda numbers, last=last: Difference(
                float(numbers.seed == last and not numbers.shaken), "output 0"
            ),
            reads=reads,
        )
        assert found.startswith("output 0 is 1e+00 apart in float64"), last


@pytest.mark.parametrize(("calls", "decides", "count"), [(300, True, 18), (300, False, 8)])
def test_how_many_inputs_agree(calls, decides, count):
    tried = []

    def compare(numbers):
        tried.append(numbers.seed)
        numbers.calls = calls
        return Difference()

    assert f"to 1e-16 for {count} inputs" in agreement(compare, decides=decides)
    assert tried == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("decides", "moves", "tries"),
    [
        (False, [1e-6], [1]),
        (False, [2e-4, 2e-4, 0.1, 0.2], [1, 2, 3, 4]),
        (False, [2e-4, 0.2], [1, 2]),  # here it is noise
        (True, [1e-6, 1e-6, 1e-6, 1e-6], [1, 2, 3, 4]),
        (True, [1e-6, 1e-6, 1e-6, 0.2], [1, 2, 3, 4]),
        (False, [math.nan, 1e-6], [1, 2]),
    ],
)
def test_a_difference_far_beyond_rounding_is_one_at_once(decides, moves, tries):
    """Where a program chooses among numbers one try may choose as the kernels did."""
    tried = []

    def compare(numbers):
        if not numbers.shaken:
            return Difference(1.0 if numbers.seed == 1 else 0.0, "out")
        tried.append(numbers.shaken)
        return Difference(moves[len(tried) - 1], "out")

    said = agreement(compare, decides=decides)
    assert tried == tries
    is_noise = 8 * moves[-1] >= 1.0
    assert bool(said) == is_noise


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "wanted", "apart"),
    [
        ([INF, 2.0], [1.0, 1.0], 1.0),
        ([1.0, 2.0], [INF, 1.0], 1.0),
        ([NAN, 2.0], [1.0, 1.0], 1.0),
        ([INF, 2.0], [-INF, 1.0], 1.0),
        ([INF, 2.0], [1e300, 1.0], 1.0),  # nor does its other side, which is large
        ([INF, 2.0], [INF, 1.0], 1.0),
        ([INF, 1.0], [1.0, 1.0], NAN),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
    ],
)
def test_what_overflows_hides_no_other_place(found, wanted, apart):
    """Neither the rest of its tensor, nor another result, before it or after it."""
    numbers = [{("a", None): torch.tensor(each, dtype=torch.float64)} for each in (found, wanted)]
    assert difference(*numbers, 0.0).size == pytest.approx(apart, nan_ok=True)
    overflows, differs = Difference(NAN), Difference(0.5, "b")
    assert largest([overflows, differs]) == largest([differs, overflows]) == differs
    assert not largest([overflows, Difference(), Difference(1e-17)]).size <= 0


@pytest.mark.parametrize("first", [INF, NAN, 1.0])
def test_what_overflows_hides_no_lost_digits(first):
    def of(number):
        return {("a", None): torch.tensor([first, number]), ("b", None): torch.tensor([first])}

    own = of(2.0), of(1.7)
    exact = ({key: each.double() for key, each in own[1].items()},) * 2
    assert "the actual program alone loses digits of a" in lost_digits(own, exact)
    assert lost_digits(exact, exact) == ""


@pytest.mark.parametrize("given", [POSITIVE, POSITIVE.where(MASK, 0), torch.zeros(4, 6)])
def test_inputs_near_those_that_are_given_keep_their_sign(given):
    """A root, or a logarithm, of what is never negative has a number in the first draw."""
    drawn = given.clone()
    Numbers(1).of_input("x", drawn)
    assert float(drawn.min()) >= 0
    assert not torch.equal(drawn, given)
    negative = X.clone()
    Numbers(1).of_input("x", negative)
    assert torch.equal(negative < 0, X < 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_without_eps_has_that_of_what_it_computes_in(dtype):
    x = (X / 64).to(dtype)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    proof = prove(
        lambda x: F.rms_norm(x, (6,)), lambda x: F.rms_norm(x, (6,), eps=eps), inputs=(x,)
    )
    assert proof.kind == "identical", str(proof)
