"""The table of operators against torch, for every operator that has a sample in torch's OpInfo.

Abstract inputs get the elements of their real numbers. Then every result that is made without an
unknown function must have the elements of the real result: numbers modulo a prime those of exact
sums and products of small whole numbers, terms those of the numbers that moved. Where an operator
is made of others, real numbers check the others, too.
"""

import collections
import warnings

import pytest
import torch

from pytest_gtrainer.arithmetic import base, field, hashing, terms
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.graph.nodes import tensors_in

SAMPLES = 6
EXACT = 2**52


class Watched(ArithmeticMode):
    """Counts decisions, which are not those of real numbers, and compares parts with the whole."""

    def __init__(self, arithmetic):
        super().__init__(arithmetic)
        self.decided, self.wrong_parts = 0, []

    def _know(self, tensor, numbers):
        self.decided += 1
        super()._know(tensor, numbers)

    def _adopt(self, results, found, call=None):
        for real, part in zip(results, found, strict=False):
            comparable = real.dtype == part.dtype and real.numel() == part.numel()
            if comparable and real.is_floating_point() and not self.decided:
                close = {"rtol": 1e-6, "atol": 1e-9, "equal_nan": True}
                if not torch.allclose(real, part.reshape(real.shape), **close):
                    self.wrong_parts.append(str(call and call.operator))
        super()._adopt(results, found, call)


@pytest.fixture
def unknown_functions(monkeypatch):
    """Count hashes and choices: what they give has no real counterpart."""
    counts = collections.Counter()

    def counted(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(hashing, "mix")
    for kind in (field.Field, terms.Terms):
        counted(kind, "order")
    return counts


def real_copy(value, whole_numbers):
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_floating_point() and whole_numbers:
        return torch.randint(1, 8, value.shape).to(value.dtype)
    return value.clone()


def judge(call, arguments, arithmetic, unknown_functions, whole_numbers):
    """Run one sample; return what was checked of each result, and what is wrong."""
    args, kwargs = base.mapped(lambda leaf: real_copy(leaf, whole_numbers), arguments)
    mode = Watched(arithmetic)
    for tensor in tensors_in(args, kwargs):
        if tensor.is_floating_point():
            mode.shadows.write(tensor, arithmetic.lift(tensor))
    unknown_functions.clear()
    with torch.no_grad(), mode:
        results = call(*args, **kwargs)
    is_known = not unknown_functions and not mode.decided
    checked, wrong = 0, list(mode.wrong_parts)
    for result in tensors_in(results):
        value = mode.shadows.read(result) if result.layout is torch.strided else None
        if value is None or not is_known or not result.is_floating_point():
            continue
        is_exact = not whole_numbers or bool((result == result.round()).all())
        if is_exact and (not result.numel() or result.abs().max() < EXACT):
            checked += 1
            if not torch.equal(value.elements, arithmetic.lift(result)):
                wrong.append("elements")
    return checked, wrong


ARITHMETICS = {
    "field": lambda: field.Field(casts="opaque"),
    "kernels": lambda: terms.Terms(strict=False),
    "strict": lambda: terms.Terms(strict=True),
}


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ARITHMETICS)
def test_elements_are_those_of_real_results(name, unknown_functions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        torch.manual_seed(0)
        checked, wrong = collections.Counter(), []
        for operator in op_db:
            if torch.float64 not in operator.dtypes:
                continue
            for count, sample in enumerate(samples_of(operator)):
                arguments = (sample.input, *sample.args), sample.kwargs
                if operator.name == "nn.functional.rms_norm":
                    # Real numbers lose its default, 2e-16, beside a whole number; the field does not.
                    arguments[1].setdefault("eps", 0.0)
                arithmetic = ARITHMETICS[name]()
                try:
                    found, mistakes = judge(
                        operator.op, arguments, arithmetic, unknown_functions, name == "field"
                    )
                except (NoMeaning, RuntimeError, AssertionError, ValueError):
                    continue  # "unknown" by name, or no sample for these numbers
                checked[operator.name] += found
                wrong += [f"{operator.name}, sample {count}: {each}" for each in mistakes]
                if count == SAMPLES:
                    break
    assert wrong == []
    least = {"field": 150, "kernels": 90, "strict": 80}[name]
    assert sum(map(bool, checked.values())) >= least, "the test has become vacuous"


def samples_of(operator):
    try:
        yield from operator.sample_inputs("cpu", torch.float64, requires_grad=False)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError):
        return


PLANTED = {
    "a sum that forgets a row": (
        "_sum",
        lambda self, call: (
            self.lift(call.args[0]).reshape(-1)[:1].sum().expand(call.result.shape) * 0 + 1
        ),
    ),
    "a product that is a sum": ("_mul", lambda self, call: self._add(call)),
    "a difference with its operands exchanged": (
        "_sub",
        lambda self, call: self.prime.negative(self.prime.subtract(*self._operands(call))),
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_wrong_meaning_is_found(mistake, unknown_functions, monkeypatch):
    """The twin: the same judgement on operators whose meaning is wrong."""
    torch.manual_seed(0)  # of three equal differences none shows an exchange
    name, method = PLANTED[mistake]
    call = {"_sum": torch.sum, "_mul": torch.mul, "_sub": torch.sub}[name]
    arguments = (torch.randn(3, 4),) if name == "_sum" else (torch.randn(3), torch.randn(3) + 9)
    arithmetic = field.Field(casts="opaque")
    assert judge(call, (arguments, {}), arithmetic, unknown_functions, True) == (1, [])
    monkeypatch.setattr(field.Field, name, method)
    found = judge(call, (arguments, {}), arithmetic, unknown_functions, True)
    assert found == (1, ["elements"])


def test_a_planted_wrong_formula_is_found(unknown_functions, monkeypatch):
    """Parts of an operator are compared with it in real numbers."""
    from pytest_gtrainer.arithmetic import formulas, mode

    operator = torch.ops.aten.silu.default
    wrong = {operator: lambda x: x * torch.sigmoid(x) * 1.01}
    arguments = (torch.randn(3),), {}

    def planted(operator, is_exact):
        return wrong.get(operator)

    for made_of, mistakes in ((formulas.parts_of, []), (planted, [str(operator)])):
        monkeypatch.setattr(mode, "parts_of", made_of)
        arithmetic = terms.Terms(strict=False)
        assert judge(operator, arguments, arithmetic, unknown_functions, False)[1] == mistakes
