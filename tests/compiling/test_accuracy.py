"""Compiled code and eager against float64: who errs more, by how much, and where nothing shows it.

``compiled`` is any callable here. Only the tests of the second tier generate code.
"""

import re

import pytest
import torch
from torch import nn

from pytest_gtrainer import LessAccurate, VacuousCheck, assert_no_less_accurate, facts
from pytest_gtrainer.facts import FailedCheck


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))


class InBfloat16(Model):
    """A product of the last layer is rounded once too often."""

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))).bfloat16().float())


class RoundedBackward(Model):
    def forward(self, x):
        x = self.up(x)
        x.register_hook(lambda gradient: gradient.bfloat16().float())
        return self.down(torch.relu(self.norm(x)))


def x(seed=0, rows=6):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def test_the_same_numbers_are_no_less_accurate():
    accuracy = assert_no_less_accurate(Model(), Model(), x())
    assert accuracy.worst.ratio == pytest.approx(1, rel=0.5)
    assert len(accuracy.tensors) == 7
    assert not accuracy.not_judged
    assert str(accuracy).startswith("no less accurate than eager: 0 of 7 tensors on 4 seeds")


def test_an_output_that_is_rounded_more():
    with pytest.raises(LessAccurate, match=r"    output: .* times") as caught:
        assert_no_less_accurate(InBfloat16(), Model(), x())
    assert len(caught.value.accuracy.failing) == 6
    assert caught.value.accuracy.worst.ratio > 1000
    assert_no_less_accurate(InBfloat16(), Model(), x(), factor=1e6)


def test_those_that_fail_come_in_the_order_of_the_number_that_they_begin_with():
    """Four numbers may err more by chance than 64, so ratios alone are in another order."""

    def results(x):
        return {
            "few": x[:1, 0].exp(),
            "many": x.exp(),
            "some": x[:, :2].exp(),
            "mean": x.exp().mean(),
        }

    def rounded(x):
        return {name: each.bfloat16().float() for name, each in results(x).items()}

    with pytest.raises(LessAccurate) as caught:
        assert_no_less_accurate(rounded, results, x(rows=64))
    text = str(caught.value)
    assert "  then, the worst first\n" in text
    found = re.findall(r"^    .+: (\S+) times what is allowed: (\S+) times the error", text, re.M)
    excesses, ratios = zip(*[(float(excess), float(ratio)) for excess, ratio in found], strict=True)
    assert len(found) == 3
    assert list(excesses) == sorted(excesses, reverse=True)
    assert list(ratios) != sorted(ratios, reverse=True)


def test_a_line_is_of_the_one_element_or_of_all_whichever_is_over_by_more():
    """The line begins with how far it is over what is allowed."""

    def results(x):
        return {name: 2 + x.sigmoid() for name in ("one", "both", "all", "all but little")}

    def with_wrong_elements(x):
        found = results(x)
        found["one"][0, 0] += 8e-6
        found["both"] += 6e-7
        found["both"][0, 0] += 3e-5
        found["all"] += 1e-4
        found["all but little"] += 6e-7
        return found

    with pytest.raises(LessAccurate) as caught:
        assert_no_less_accurate(with_wrong_elements, results, x(rows=4096), seeds=[0])
    accuracy = caught.value.accuracy
    assert len(accuracy.failing) == 4
    for each in accuracy.failing:
        excess = float(re.search(r": (\S+) times what is allowed", each.in_order(2.0))[1])
        ratio, allowed = re.search(
            r": (?:one element has )?(\S+) times the \D+ \((\S+) allowed", each.in_order(2.0)
        ).groups()
        assert excess == pytest.approx(float(ratio) / float(allowed), rel=0.01)
    by_one = [each.name for each in accuracy.failing if "one element has" in each.in_words(2.0)]
    assert sorted(by_one) == ["output['both']", "output['one']"]
    assert str(accuracy).count("one element has") == 2


def test_a_gradient_that_is_rounded_more_names_parameter_and_module():
    with pytest.raises(
        LessAccurate, match=r"worst gradient of up\.\w+, of up \(Linear\): "
    ) as caught:
        assert_no_less_accurate(RoundedBackward(), Model(), x())
    assert {each.name for each in caught.value.accuracy.failing} == {
        "gradient of up.weight",
        "gradient of up.bias",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 256])
def test_one_element_that_is_wrong_among_many(size, dtype):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(size, 16, generator=generator).to(dtype)
    right = torch.randn(16, size, generator=generator).to(dtype)

    def with_a_zero(left, right):
        product = (left @ right).clone()
        product[-1, -1] = 0
        return product

    with pytest.raises(LessAccurate, match=r"times the (largest )?error of eager"):
        assert_no_less_accurate(with_a_zero, torch.matmul, left, right)
    assert_no_less_accurate(lambda *both: torch.matmul(*both), torch.matmul, left, right)
    assert_no_less_accurate(
        lambda left, right: (left.flip(1).float() @ right.flip(0).float()).to(dtype),
        torch.matmul,
        left,
        right,
    )


def test_eager_may_err_more():
    accuracy = assert_no_less_accurate(Model(), InBfloat16(), x())
    assert accuracy.worst.ratio < 2


def test_casts_inside_are_set_aside_in_float64():
    """Else the reference would be as wrong as eager, whose ratio is then as it is."""
    accuracy = assert_no_less_accurate(Model(), InBfloat16(), x())
    (output,) = [each for each in accuracy.tensors if each.name == "output"]
    assert output.eager > 1e-4
    assert output.compiled < 1e-6


def test_a_function_of_a_module_and_an_input_that_requires_a_gradient():
    def step(model, x):
        model(x).square().mean().backward()
        return x.sum()

    def rounded(model, x):
        model(x).square().mean().backward()
        x.grad = x.grad.bfloat16().float()
        return x.sum()

    model, given = Model(), x().requires_grad_()
    assert_no_less_accurate(lambda *inputs: step(*inputs), step, model, given)
    with pytest.raises(LessAccurate, match="worst gradient of input 1: "):
        assert_no_less_accurate(rounded, step, model, given)
    assert given.grad is None
    assert model.up.weight.grad is None


def test_inputs_for_each_seed_and_low_precision():
    model = Model().bfloat16()
    made = []

    def make_inputs(seed):
        made.append(seed)
        return (x(seed).bfloat16(),)

    accuracy = assert_no_less_accurate(
        Model().bfloat16(), model, make_inputs=make_inputs, seeds=(3, 4)
    )
    assert made == [3, 4]
    assert accuracy.worst.eager > 1e-4


def test_inputs_vary_if_those_of_any_seed_are_others():
    """A constant result is set aside then, wherever the seed stands that gives other inputs."""
    for other in (1, 2):
        with pytest.raises(VacuousCheck, match="the same for all inputs"):
            assert_no_less_accurate(
                lambda x: torch.full((), 0.1) * 3 + 0 * x.sum(),
                lambda x: torch.full((), 0.1) * 3 + 0 * x.sum(),
                make_inputs=lambda seed, other=other: (x(int(seed == other)),),
                seeds=range(3),
            )


def test_a_buffer_that_is_written_is_compared_and_put_back():
    class Averaged(nn.Module):
        def __init__(self, dtype=torch.float32):
            super().__init__()
            self.dtype = dtype
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x):
            self.average += x.mean(0).to(self.dtype)
            return x * 2

    eager = Averaged()
    with pytest.raises(LessAccurate, match=r"worst average afterwards, of Averaged: "):
        assert_no_less_accurate(Averaged(torch.bfloat16), eager, x())
    assert not eager.average.any()


def test_whole_numbers_count_as_right_or_wrong():
    def choice(x):
        return x.argmax(-1)

    def rounded(x):
        return x.mul(4).round().argmax(-1)

    with facts.collecting() as seen:
        assert_no_less_accurate(lambda x: choice(x), choice, x(rows=64))
    assert facts.of_kind(seen, "idle")  # nothing rounds
    with pytest.raises(LessAccurate, match="worst output: inf times"):
        assert_no_less_accurate(rounded, choice, x(rows=64))


def test_a_few_numbers_may_err_more_by_chance():
    def loss(x):
        return x.exp().mean()

    accuracy = assert_no_less_accurate(lambda x: loss(x.flip(0)), loss, x(rows=64))
    assert accuracy.worst.count == 4
    assert accuracy.worst.allowed(2) > 8


def test_a_single_number_cannot_vary():
    """It is no constant result: its inputs are the same on all seeds."""
    accuracy = assert_no_less_accurate(lambda x: x.exp(), torch.exp, torch.tensor(0.3))
    assert accuracy.worst.count == 4


def test_what_is_not_finite():
    def inverse(x):
        return 1 / (x * (x > 0))

    with facts.collecting() as seen:
        accuracy = assert_no_less_accurate(lambda x: inverse(x), inverse, x())
    assert accuracy.worst.left_out
    assert "not finite in eager" in str(accuracy)
    assert facts.of_kind(seen, "verdict")[-1]["outcome"] == "no less accurate (not finite)"
    with pytest.raises(LessAccurate, match="worst output: inf times"):
        assert_no_less_accurate(lambda x: inverse(x) * 1e38 * 10, inverse, x())

    def also(x):
        return x.exp(), inverse(x)

    # One of several results is enough.
    with facts.collecting() as seen:
        accuracy = assert_no_less_accurate(lambda x: also(x), also, x())
    assert [bool(each.left_out) for each in accuracy.tensors] == [False, True]
    assert facts.of_kind(seen, "verdict")[-1]["outcome"] == "no less accurate (not finite)"
    with pytest.raises(VacuousCheck, match="output: no element is finite"):
        assert_no_less_accurate(lambda x: x / 0 * 0, lambda x: x / 0 * 0.0, x())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.ones(3) / 3, "output: the same for all inputs"),
        (lambda x: (x + 1e9) - 1e9 - x, "output: zeros in its place would pass"),
        (lambda x: x[:0], "output: empty"),
        (lambda x: (None, "causal"), "it returns no numbers, and leaves none"),
    ],
    ids=["constant", "nothing but error", "empty", "nothing"],
)
def test_a_check_that_cannot_fail(function, message):
    with pytest.raises(VacuousCheck, match=message):
        assert_no_less_accurate(lambda x: function(x), function, x())


class BeforeBatchNorm(nn.Module):
    """The norm takes away the bias, so its gradient is nothing but error."""

    def __init__(self, added=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.added = nn.Linear(8, 16), nn.BatchNorm1d(16), added

    def forward(self, x):
        bias = self.up.bias
        return self.norm(self.up(x)) + self.added * (bias - bias.detach())


class Counting(nn.Module):
    def __init__(self, step=1.0):
        super().__init__()
        self.step = step
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += self.step
        return x.exp()


def square(value):
    return torch.full((4, 4), value)


NOISE = r"an element is .* off \(.* allowed; zeros in its place would pass"
ALLOWED = "times the error of eager"


@pytest.mark.parametrize(
    ("result", "other", "message"),
    [
        (lambda x: x.exp().log() - x, lambda x: 0 * x + 1e-3, NOISE),
        (lambda x: x.exp().log() - x, lambda x: x * torch.nan, NOISE),
        (lambda x: (x + 1) - 1 - x, lambda x: 0 * x + 1000, "off .*; the same for all inputs"),
        (lambda x: x - x, lambda x: x - x + 1e-5, "0 allowed; the same for all inputs"),
        (lambda x: square(1.0), lambda x: square(0.0), "0 allowed; the same for all inputs"),
        (lambda x: square(0.0), lambda x: square(1e-6), "0 allowed; the same for all inputs"),
        (lambda x: square(1.0) / 3, lambda x: square(0.3333), "off .*; the same for all inputs"),
        (lambda x: square(1j), lambda x: square(-1j), "0 allowed; the same for all inputs"),
        (lambda x: len(x), lambda x: -1, ALLOWED),
        (lambda x: 1j, lambda x: 2j, "0 allowed; the same for all inputs"),
        (lambda x: square(True).tril(), lambda x: square(True).triu(), ALLOWED),
        (lambda x: square(0), lambda x: square(7), ALLOWED),
        (lambda x: x > 9, lambda x: x < 9, ALLOWED),
        (lambda x: square(-torch.inf), lambda x: square(3.0), "64 elements unlike the inf"),
        (lambda x: square(-torch.inf), lambda x: square(torch.inf), "64 elements unlike the inf"),
        (lambda x: square(torch.nan), lambda x: square(3.0), "64 elements unlike the inf or NaN"),
        (
            lambda x: torch.where(x > 0, torch.inf, x.exp()),
            lambda x: torch.where(x > 0, -5.0, x.exp()),
            "elements unlike the inf or NaN that eager and float64 agree on",
        ),
        (lambda x: "causal", lambda x: "full", "compiled gives 'full', eager 'causal'"),
        (lambda x: None, lambda x: x, "compiled gives a tensor of torch.float32, eager None"),
        (lambda x: x, lambda x: None, "compiled gives None, eager a tensor of torch.float32"),
        (lambda x: x.dtype, lambda x: torch.int8, "compiled gives torch.int8, eager torch.float32"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_shows_no_ratio_may_not_be_anything(result, other, message, alone):
    """Beside a result that is judged, and alone."""

    def both(function):
        if alone:
            return lambda x: {"b": function(x)}
        return lambda x: {"a": x.exp(), "b": function(x)}

    with pytest.raises(FailedCheck, match=rf"output\['b'\]: .*({message})"):
        assert_no_less_accurate(both(other), both(result), x())
    if not alone:
        assert_no_less_accurate(both(result), both(lambda x: result(x)), x())


@pytest.mark.parametrize("seeds", [[0], range(4)], ids=["one seed", "four seeds"])
def test_state_and_gradients_that_show_no_ratio(seeds):
    accuracy = assert_no_less_accurate(BeforeBatchNorm(), BeforeBatchNorm(), x(), seeds=seeds)
    assert any("gradient of up.bias: zeros in its" in line for line in accuracy.not_judged)
    for added in (0.01, 5.0, 1e30):
        with pytest.raises(LessAccurate, match=r"gradient of up.bias.*: an element is .* off"):
            assert_no_less_accurate(BeforeBatchNorm(added), BeforeBatchNorm(), x(), seeds=seeds)
    with pytest.raises(LessAccurate, match="worst steps afterwards, of Counting: "):
        assert_no_less_accurate(Counting(2.0), Counting(), x(), seeds=seeds)


def test_other_roundings_of_what_cancels_are_no_failure():
    """Eager may be exact by chance, and what is large elsewhere says how large an error may be."""

    def cancels(x, y):
        return x.exp() + y - y

    def otherwise(x, y, by=1 + 2**-23):
        return x.exp() + by * y - y

    given = [x(rows=64), x(1, rows=64).requires_grad_()]
    given[0].requires_grad_()
    accuracy = assert_no_less_accurate(otherwise, cancels, *given, factor=8)
    assert any("gradient of input 1: the same" in line for line in accuracy.not_judged)
    with pytest.raises(LessAccurate, match="worst gradient of input 1: an element is"):
        assert_no_less_accurate(lambda *both: otherwise(*both, 1.001), cancels, *given, factor=1e6)
    assert_no_less_accurate(BeforeBatchNorm(1e-8), BeforeBatchNorm(), x(rows=64))


class Writing(nn.Module):
    """Put another tensor in the place of one."""

    def __init__(self, place, factor=1.0):
        super().__init__()
        self.place, self.factor, self.cache = place, factor, torch.ones(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("first", None)

    def forward(self, x, others):
        if self.place == "others":
            others.append(x[0] * self.factor)
        else:
            setattr(self, self.place, x[0] * self.factor)
        return x.exp()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("mean", "mean afterwards, of Writing"),
        ("first", "first afterwards"),
        ("cache", "attribute cache afterwards"),
        ("added", "attribute added afterwards"),
        ("others", r"input 1\[1\] afterwards"),
    ],
)
def test_a_tensor_that_takes_the_place_of_another_is_compared_and_put_back(place, name):
    eager, others = Writing(place), [x(1)]
    assert_no_less_accurate(Writing(place), eager, x(), others)
    with pytest.raises(LessAccurate, match=f"worst {name}"):
        assert_no_less_accurate(Writing(place, 1.01), eager, x(), others)
    assert not eager.mean.any()
    assert eager.first is None
    assert eager.cache.all()
    assert not hasattr(eager, "added")
    assert len(others) == 1


def test_a_text_with_numbers_in_it_is_not_judged():
    def shown(x):
        return x.exp(), f"{float(x.exp().sum()):.17g}"

    accuracy = assert_no_less_accurate(lambda x: (x.exp(), "about 50"), shown, x())
    assert "output[1]: a str that is another in float64" in accuracy.not_judged


def test_what_is_refused():
    model = Model()
    with pytest.raises(ValueError, match="eager draws random numbers"):
        assert_no_less_accurate(nn.Dropout(), nn.Dropout(), x())
    with pytest.raises(ValueError, match="eager computes in float64 already"):
        assert_no_less_accurate(lambda x: x.exp(), torch.exp, x().double())
    with pytest.raises(ValueError, match="one object"):
        assert_no_less_accurate(model, model, x())
    other = Model()
    nn.init.zeros_(other.up.weight)
    with pytest.raises(ValueError, match=r"other numbers in up\.weight: copy the state"):
        assert_no_less_accurate(other, model, x())
    with pytest.raises(ValueError, match="the function holds model"):
        assert_no_less_accurate(lambda x: x, lambda x: model(x), x())
    with pytest.raises(ValueError, match="memory is read as another dtype"):
        assert_no_less_accurate(lambda x: x, lambda x: x.view(torch.int32) >> 1, x())
    with pytest.raises(ValueError, match="give one of them"):
        assert_no_less_accurate(Model(), model, x(), make_inputs=lambda seed: (x(seed),))
    with pytest.raises(TypeError, match=r"seeds=3: give the seeds themselves, such as range\(3\)"):
        assert_no_less_accurate(Model(), model, x(), seeds=3)


def test_other_results_are_said_so():
    with pytest.raises(FailedCheck, match=r"output: compiled gives torch\.bfloat16"):
        assert_no_less_accurate(lambda x: x.bfloat16(), lambda x: x * 1, x())
    with pytest.raises(FailedCheck, match=r"output\[1\]: only eager has it"):
        assert_no_less_accurate(lambda x: (x,), lambda x: (x, x), x())


def test_nothing_stays():
    before = torch.get_default_dtype(), torch.get_rng_state()
    model = Model()
    assert_no_less_accurate(Model(), model, x())
    with pytest.raises(ValueError, match="does not run in float64"):
        assert_no_less_accurate(lambda x: x.mT, lambda x: x.mT.view(torch.int32), x())
    assert torch.get_default_dtype() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert model.up.weight.grad is None
    assert model.up.weight.dtype == torch.float32


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generated_code(dtype):
    model = Model().to(dtype)
    accuracy = assert_no_less_accurate(torch.compile(model), model, x().to(dtype))
    assert len(accuracy.tensors) == 7
