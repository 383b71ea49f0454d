"""Complex numbers are pairs of real ones, as in rotary embeddings."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import prove

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Y = X.flip(0) + 1
TURNS = torch.polar(torch.ones(4, 3), torch.arange(12.0).view(4, 3))
PLACES = torch.tensor([1, 0, 3])


def of(x):
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def turned(x, turns=TURNS):
    return torch.view_as_real(of(x) * turns).flatten(1)


def turned_by_hand(x, turns=TURNS, sign=1):
    parts = torch.view_as_real(turns)
    a, b, c, d = x[:, ::2], x[:, 1::2], parts[..., 0], parts[..., 1]
    return torch.stack([a * c - sign * b * d, a * d + sign * b * c], -1).flatten(1)


def gradient(function):
    def of_input(x, other):
        x = x.clone().requires_grad_()
        (function(x) * other).sum().backward()
        return x.grad

    return of_input


def parts(function):
    """Return a function of pairs as real tensors, which returns such pairs."""
    return lambda *given: torch.view_as_real(function(*map(of, given)).resolve_conj())


def stacked(real, imaginary):
    return torch.stack([real, imaginary], -1)


def product(x, y):
    a, b, c, d = x[:, ::2], x[:, 1::2], y[:, ::2].mT, y[:, 1::2].mT
    return stacked(a @ c - b @ d, a @ d + b @ c)


def pairs(x):
    return x.unflatten(-1, (-1, 2))


# Two programs, and the kind in which they are equal.
EQUAL = {
    "a rotation": (turned, turned_by_hand, "other kernels"),
    "a rotation that is given": (
        lambda x, y: turned(x, of(y)),
        lambda x, y: turned_by_hand(x, of(y)),
        "other kernels",
    ),
    "exchanged": (turned, lambda x: torch.view_as_real(TURNS * of(x)).flatten(1), "other kernels"),
    "its gradient": (gradient(turned), gradient(turned_by_hand), "reordered"),
    "its gradient, by a rotation back": (
        gradient(turned),
        lambda x, y: turned(y, TURNS.conj()),
        "reordered",
    ),
    "rows": (
        parts(lambda x, p=PLACES: x[p]),
        lambda x: pairs(x)[PLACES],
        "identical",
    ),
    "a conjugate": (
        parts(lambda x: x.conj().clone()),
        lambda x: stacked(x[:, ::2], -x[:, 1::2]),
        "identical",
    ),
    "a matrix product": (parts(lambda x, y: x @ y.mT), product, "other kernels"),
    "a sum": (parts(lambda x: x.sum(0)), lambda x: pairs(x).sum(0), "other kernels"),
    "a difference": (
        parts(lambda x, y: x - 2 * y + 1),
        lambda x, y: pairs(x) - 2 * pairs(y) + torch.tensor([1.0, 0.0]),
        "reordered",
    ),
    "a scaled sum": (
        parts(lambda x, y: torch.add(x, y, alpha=3)),
        lambda x, y: pairs(x) + 3 * pairs(y),
        "other kernels",
    ),
    "a scaled sum behind a real one": (
        lambda x, y: torch.view_as_real(torch.add(x[:, :3], of(y), alpha=3)),
        lambda x, y: stacked(x[:, :3] + 3 * y[:, ::2], 3 * y[:, 1::2]),
        "other kernels",
    ),
    "a scaled sum before a real one": (
        lambda x, y: torch.view_as_real(torch.add(of(x), y[:, :3], alpha=3)),
        lambda x, y: stacked(x[:, ::2] + 3 * y[:, :3], x[:, 1::2]),
        "other kernels",
    ),
    "a scaled difference": (
        parts(lambda x, y: torch.sub(x, y, alpha=3)),
        lambda x, y: pairs(x) - 3 * pairs(y),
        "reordered",
    ),
    "a scaled difference behind a real one": (
        lambda x, y: torch.view_as_real(torch.sub(x[:, :3], of(y), alpha=3)),
        lambda x, y: stacked(x[:, :3] - 3 * y[:, ::2], -3 * y[:, 1::2]),
        "reordered",
    ),
    "a scaled difference before a real one": (
        lambda x, y: torch.view_as_real(torch.sub(of(x), y[:, :3], alpha=3)),
        lambda x, y: stacked(x[:, ::2] - 3 * y[:, :3], x[:, 1::2]),
        "reordered",
    ),
    "a quotient": (parts(lambda x: x / 3), lambda x: pairs(x) / 3, "other kernels"),
    "times i": (
        parts(lambda x: x * 1j),
        lambda x: stacked(-x[:, 1::2], x[:, ::2]),
        "reordered",
    ),
    "by angles": (
        lambda x, y: torch.view_as_real(torch.polar(x, y)),
        lambda x, y: stacked(x * y.cos(), x * y.sin()),
        "other kernels",
    ),
    "of two parts": (
        lambda x, y: torch.view_as_real(torch.complex(x, y)) * 2,
        lambda x, y: stacked(x, y) * 2,
        "identical",
    ),
    "a copy": (
        parts(lambda x: x.to(torch.complex64, copy=True)),
        lambda x: pairs(x).clone(),
        "identical",
    ),
    "a result": (lambda x: of(x) * 2, lambda x: of(x) + of(x), "reordered"),
    "a transform": (torch.fft.rfft, lambda x: torch.fft.rfft(x * 1), "identical"),
}


OF_TWO = (
    "a rotation that is given",
    "its gradient",
    "its gradient, by a rotation back",
    "a matrix product",
    "a difference",
    "by angles",
    "of two parts",
)


@pytest.mark.second_tier("its gradient")
@pytest.mark.parametrize("name", EQUAL)
def test_programs_are_equal_in_their_kind(name):
    actual, expected, kind = EQUAL[name]
    inputs = (X, Y) if name in OF_TWO or name.startswith("a scaled") else (X,)
    proof = prove(actual, expected, inputs=inputs)
    assert proof.kind == kind, str(proof)


OTHER = {
    "the other way round": (turned, lambda x: turned_by_hand(x, sign=-1)),
    "a gradient without a conjugate": (gradient(turned), lambda x, y: turned(y)),
    "exchanged parts": (
        parts(lambda x: x * 1),
        lambda x: stacked(x[:, 1::2], x[:, ::2]),
    ),
    "a conjugate too many": (lambda x: of(x) * 2, lambda x: of(x) + of(x).conj()),
}


@pytest.mark.parametrize("name", OTHER)
def test_mistakes_are_another_function(name):
    actual, expected = OTHER[name]
    inputs = (X, Y) if "gradient" in name else (X,)
    assert prove(actual, expected, inputs=inputs).kind == "another function"


@pytest.mark.second_tier
def test_a_complex_input_of_a_graph_stands_for_any_numbers():
    def scaled(x, turns):
        return turned(x, turns) + torch.view_as_real(turns).flatten(1)

    def with_its_conjugate(x, turns):
        return turned(x, turns.conj()) + torch.view_as_real(turns).flatten(1)

    graphs = []
    for function in (scaled, with_its_conjugate):
        graphs.append(make_fx(function)(X, torch.ones(4, 3, dtype=torch.complex64)))
    assert prove(graphs[0], graphs[0]).kind == "identical"
    proof = prove(graphs[1], graphs[0], inputs=(X, torch.ones(4, 3, dtype=torch.complex64)))
    assert proof.kind == "another function"


UNKNOWN = {
    "a size": (lambda x: of(x).abs(), "aten.abs.default of complex numbers"),
    "a complex factor": (
        lambda x: torch.add(of(x), of(x), alpha=2j),
        "a sum with a complex alpha",
    ),
    "a quotient": (lambda x: 1 / of(x), "aten.reciprocal.default of complex numbers"),
    "a mask": (
        lambda x: of(x).masked_fill(torch.eye(4, 3, dtype=torch.bool), 2),
        "aten.masked_fill.Scalar of complex numbers and real ones",
    ),
    "a product at places": (
        lambda x: of(x).scatter(0, PLACES.view(1, 3), of(x), reduce="multiply"),
        "aten.scatter.reduce reduces complex numbers",
    ),
    "a write": (lambda x: of(x * 2).mul_(2), "aten.mul_.Tensor writes complex numbers"),
    "another sign": (lambda x: of(x).conj().imag * 1, "a view of numbers with the other sign"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_meaning_is_unknown_by_name(name):
    function, reason = UNKNOWN[name]
    proof = prove(function, function, inputs=(X,))
    assert proof.kind == "unknown"
    assert proof.reason.startswith(reason)
