"""The table of operators against torch, for every operator that has a sample in torch's OpInfo.

Abstract inputs get the elements of their real numbers. Then every result that is made without an
unknown function must have the elements of the real result: numbers modulo a prime those of exact
sums and products of small whole numbers, terms those of the numbers that moved. Where an operator
is made of others, real numbers check the others, too.
"""

import collections
import dataclasses
import math
import warnings
from fractions import Fraction

import pytest
import torch
from torch.utils import _pytree as pytree

from pytest_gtrainer.arithmetic import base, field, hashing, terms
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.prime import P
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.graph.nodes import tensors_in

SAMPLES = 7  # of each kind
FEW = 2  # one of 35 wrong readings needs more; those operators are judged by all samples below
EXACT = 2**52


class Watched(ArithmeticMode):
    """Counts decisions, which are not those of real numbers, and compares parts with the whole."""

    def __init__(self, arithmetic):
        super().__init__(arithmetic)
        self.decided, self.wrong_parts, self.overloads = 0, [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._inside:
            self.overloads.add(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

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


def judge(call, arguments, arithmetic, unknown_functions, whole_numbers, mode_of=Watched):
    """Run one sample; return the overloads of each result that was checked, and what is wrong."""
    args, kwargs = base.mapped(lambda leaf: real_copy(leaf, whole_numbers), arguments)
    mode = mode_of(arithmetic)
    for tensor in tensors_in(args, kwargs):
        if tensor.is_floating_point():
            mode.shadows.write(tensor, arithmetic.lift(tensor))
    unknown_functions.clear()
    with torch.no_grad(), mode:
        results = call(*args, **kwargs)
    is_known = not unknown_functions and not mode.decided
    # In a field 1.3 is the float64 number, and what it divides no fraction of small numbers.
    numbers = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, float)]
    checked, wrong = [], list(mode.wrong_parts)
    for result in tensors_in(results):
        value = mode.shadows.read(result) if result.layout is torch.strided else None
        if value is None or not is_known or not result.is_floating_point():
            continue
        if result.numel() and not result.abs().max() < EXACT:
            continue
        if not whole_numbers or bool((result == result.round()).all()):
            checked += mode.overloads
            if not torch.equal(value.elements, arithmetic.lift(result)):
                wrong.append("elements")
        elif all(leaf.is_integer() for leaf in numbers):
            pairs = list(fractions_of(result, value.elements))
            checked += mode.overloads if pairs else ()
            for fraction, element in pairs:
                inverse = pow(fraction.denominator, -1, arithmetic.prime.modulus)
                if (fraction.numerator * inverse - element) % arithmetic.prime.modulus:
                    wrong.append(f"fraction {fraction}")
    return checked, wrong


def fractions_of(result, elements):
    """Yield the results that are fractions of small whole numbers, with their elements."""
    flat = result.flatten()[:64].tolist(), elements.flatten()[:64].tolist()
    for value, element in zip(*flat, strict=True):
        if math.isfinite(value):
            exact = Fraction(value)
            near = exact.limit_denominator(10_000)
            if abs(near - exact) <= abs(exact) * 1e-12:
                yield near, element


ARITHMETICS = {
    "field": lambda: field.Field(casts="opaque"),
    "kernels": lambda: terms.Terms(strict=False),
    "strict": lambda: terms.Terms(strict=True),
}


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "samples",
    [pytest.param(FEW, id="few"), pytest.param(SAMPLES, id="all", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", ARITHMETICS)
def test_elements_are_those_of_real_results(name, samples, unknown_functions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        torch.manual_seed(0)
        checked, overloads, wrong = set(), set(), []
        for operator in op_db:
            if torch.float64 in operator.dtypes:
                found, mistakes = judge_samples(operator, name, unknown_functions, samples=samples)
                wrong += mistakes
                overloads |= found
                checked |= {operator.name} if found else set()
    print(f"{name}: {len(checked)} operators of OpInfo, {len(overloads)} overloads")
    assert wrong == []
    least = {"field": (150, 150), "kernels": (90, 90), "strict": (80, 80)}[name]
    assert (len(checked), len(overloads)) >= least, "the test has become vacuous"


def judge_samples(operator, name, unknown_functions, mode_of=Watched, samples=SAMPLES):
    """Return the overloads that the samples of an operator have checked, and what is wrong.

    Args:
        samples: how many of each kind are judged.
    """
    checked, wrong = set(), []
    kinds = collections.Counter()
    for count, sample in enumerate(samples_of(operator)):
        kinds[kind := kind_of(sample)] += 1
        if kinds[kind] > samples:
            continue
        arguments = (sample.input, *sample.args), sample.kwargs
        if operator.name == "nn.functional.rms_norm":
            # Real numbers lose its default, 2e-16, beside a whole number; the field does not.
            arguments[1].setdefault("eps", 0.0)
        arithmetic = ARITHMETICS[name]()
        try:
            found, mistakes = judge(
                operator.op, arguments, arithmetic, unknown_functions, name == "field", mode_of
            )
        except (NoMeaning, RuntimeError, AssertionError, ValueError):
            continue  # "unknown" by name, or no sample for these numbers
        checked.update(found)
        if operator.name == "nn.functional.interpolate":
            # Its known weights are roundings of fractions, and stay these roundings.
            mistakes = [each for each in mistakes if "fraction" not in each]
        wrong += [f"{operator.name}, sample {count}: {each}" for each in mistakes]
    return checked, wrong


def kind_of(sample):
    """Return which arguments a sample has, as samples with options come behind many without."""

    def shape(argument):
        return argument.ndim if isinstance(argument, torch.Tensor) else type(argument)

    options = sorted((name, shape(value)) for name, value in sample.kwargs.items())
    return shape(sample.input), tuple(map(shape, sample.args)), str(options)


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
    overload = f"aten.{call.__name__}.{'default' if name == '_sum' else 'Tensor'}"
    found = judge(call, (arguments, {}), arithmetic, unknown_functions, True)
    assert found == ([overload], [])
    monkeypatch.setattr(field.Field, name, method)
    found = judge(call, (arguments, {}), arithmetic, unknown_functions, True)
    assert found == ([overload], ["elements"])


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


def taking(change):
    """Return a call whose arguments are changed: so its meaning reads them wrong."""

    def changed(call):
        named = dict(call.named)
        change(named)
        arguments = call.operator._schema.arguments
        args = [named[each.name] for each in arguments if not each.kwarg_only]
        kwargs = {each.name: named[each.name] for each in arguments if each.kwarg_only}
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return changed


def sets(name, value):
    return lambda named: named.update({name: value})


def swaps(first, second):
    return lambda named: named.update({first: named[second], second: named[first]})


def turns(name, function=lambda value: torch.flip(value, [-1])):
    def turn(named):
        value = named[name]
        if hasattr(value, "elements"):
            named[name] = dataclasses.replace(value, elements=function(value.elements))
        else:
            named[name] = function(value)

    return turn


# By the name of a sample in OpInfo: the operator that is read wrong, and how.
WRONG_READINGS = {
    "add": ("add", sets("alpha", 1)),
    "sub": ("sub", swaps("self", "other")),
    "rsub": ("sub", swaps("self", "other")),
    "mul": ("mul", lambda named: named.update(other=named["self"])),
    "div": ("div", swaps("self", "other")),
    "pow": ("pow", sets("exponent", 2)),
    "sum": ("sum", turns("self", lambda elements: elements * 2 % P)),
    "mean": ("mean", turns("self", lambda elements: elements * 2 % P)),
    "var": ("var", sets("correction", 0)),
    "cumsum": ("cumsum", turns("self")),
    "prod": ("prod", turns("self", lambda elements: elements * 0 + 1)),
    "mm": ("mm", turns("mat2")),
    "bmm": ("bmm", turns("self", lambda elements: elements.flip(0))),
    "mv": ("mv", turns("vec")),
    "dot": ("dot", turns("tensor")),
    "index_add": ("index_add", sets("alpha", 1)),
    "scatter_add": ("scatter_add", turns("index")),
    "index_put": ("index_put", turns("values")),
    "nn.functional.conv1d": ("convolution", sets("bias", None)),
    "nn.functional.conv2d": ("convolution", turns("weight")),
    "flip": ("flip", sets("dims", [0])),
    "roll": ("roll", turns("shifts", lambda shifts: [-each for each in shifts])),
    "cat": ("cat", turns("tensors", lambda tensors: list(tensors)[::-1])),
    "gather": ("gather", turns("index")),
    "tril": ("tril", sets("diagonal", 0)),
    "triu": ("triu", sets("diagonal", 0)),
    "where": ("where", swaps("self", "other")),
    "masked_fill": ("masked_fill", turns("mask", torch.logical_not)),
    "index_select": ("index_select", turns("index")),
    "constant_pad_nd": ("constant_pad_nd", sets("value", 5)),
    "repeat": ("repeat", turns("self")),
    "diagonal_scatter": ("diagonal_scatter", sets("offset", 1)),
    "index_copy": ("index_copy", turns("source")),
    "scatter": ("scatter", turns("index")),
    "nn.functional.embedding": ("embedding", turns("indices")),
}


class Misread(Watched):
    """A mode in which one operator reads its arguments wrong."""

    wrong = None

    def _call(self, func, base, args, kwargs, results):
        call = super()._call(func, base, args, kwargs, results)
        name, change = self.wrong
        return taking(change)(call) if base == name else call


@pytest.mark.second_tier
@pytest.mark.parametrize("sample", WRONG_READINGS)
def test_an_operator_that_reads_an_argument_wrong_is_found(sample, unknown_functions, monkeypatch):
    """Planted all over the table, and found by the samples of OpInfo alone."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(0)
    (operator, *_) = [each for each in op_db if each.name == sample]
    monkeypatch.setattr(Misread, "wrong", WRONG_READINGS[sample])
    assert judge_samples(operator, "field", unknown_functions)[1] == []
    assert judge_samples(operator, "field", unknown_functions, Misread)[1] != []
