"""A parallel model is held to float64 numbers, and what a comparison takes for granted is named."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import AnotherFunction, assert_same_model
from pytest_gtrainer.arithmetic.field import Field


class Model(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = last

    def forward(self, x):
        return self.last(self.linear(x))


def step(model, x):
    return (model(x) ** 2).mean()


def batch(coordinate):
    return (torch.randn(3, 4),)


def compare(actual, expected):
    return assert_same_model(lambda: Model(actual), lambda: Model(expected), step, batch)


def kind_of(actual, expected):
    with pytest.raises(AnotherFunction) as failure:
        compare(actual, expected)
    return failure.value.proof.kind, str(failure.value)


def double_angle(y):
    """A formula of the sine that no arithmetic knows."""
    return 2 * (y / 2).sin() * (y / 2).cos()


def test_numbers_that_agree_are_no_other_function():
    kind, text = kind_of(double_angle, torch.sin)
    assert kind == "unknown"
    assert "nobody knows whether the parallel model is the unsharded one" in text
    assert "both agree in float64 to" in text
    assert kind_of(lambda y: y.relu() * (1 + 2**-30), torch.relu)[0] == "another function"


def test_what_is_compiled_runs_as_it_was():
    def compiled():
        model = Model(torch.relu)
        model.linear.compile(fullgraph=True)
        return model

    proof = assert_same_model(compiled, lambda: Model(torch.relu), step, batch)
    assert proof.kind == "reordered"
    assert "run uncompiled: record.prove() judges graphs" in str(proof)
    inside = compare(lambda y: torch.compile(torch.sin, fullgraph=True)(y), torch.sin)
    assert inside.kind == "reordered"
    with pytest.raises(AnotherFunction, match="another function"):
        compare(lambda y: torch.compile(torch.sin, fullgraph=True)(2 * y), torch.sin)


def test_a_loss_of_logarithms_is_compared_by_its_exponents():
    def likelihood(model, x):
        return model(x).select(-1, 1).mean()

    def proof_of(last):
        def build(last):
            return lambda: Model(last)

        return assert_same_model(build(last), build(lambda y: y.log_softmax(-1)), likelihood, batch)

    assert proof_of(lambda y: y.softmax(-1).log()).kind == "reordered"
    with pytest.raises(AnotherFunction, match="another function"):
        proof_of(lambda y: (2 * y).softmax(-1).log())


@pytest.mark.parametrize(
    ("actual", "expected", "twin"),
    [
        (
            lambda y: torch.where(y > 0.5, y, 2 * y),
            lambda y: torch.where(y <= 0.5, 2 * y, y),
            lambda y: torch.where(y > 0.51, y, 2 * y),
        ),
        (
            lambda y: y - y.flatten().amax(),
            lambda y: y + (-y).flatten().amin(),
            lambda y: y - y.flatten()[1:].amax(),
        ),
    ],
)
def test_what_only_decides_is_compared(actual, expected, twin):
    assert compare(actual, expected).kind == "reordered"
    assert kind_of(twin, expected)[0] in ("another function", "unknown")
    assert kind_of(actual, twin)[0] in ("another function", "unknown")


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_numbers_of_all_ranks_are_compared(gt_mesh):
    def build(last):
        def on_rank(mesh):
            model = Model(last)
            for parameter in model.parameters():
                parameter.register_hook(lambda own: reduced(own, mesh))
            return model

        return on_rank

    def reduced(gradient, mesh):
        torch.distributed.all_reduce(gradient, group=mesh.get_group("dp"))
        return gradient / 2

    def expected():
        return Model(torch.sin)

    same = assert_same_model(build(expected().last), expected, step, batch, mesh=gt_mesh)
    assert same.kind == "reordered"
    by_hand = build(double_angle)
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(by_hand, expected, step, batch, mesh=gt_mesh)
    assert failure.value.proof.kind == "unknown", str(failure.value)
    assert "both agree in float64 to" in str(failure.value)


def test_equal_elements_of_other_numbers_are_no_proof(monkeypatch):
    monkeypatch.setattr(Field, "_neg", lambda self, call: self.lift(call.args[0]))
    kind, text = kind_of(lambda y: torch.neg(y).relu(), torch.relu)
    assert kind == "unknown"
    assert "apart in float64, though the elements are equal" in text


@torch.library.custom_op("gt_same_model::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_autograd(lambda ctx, gradient: halved(gradient))


def test_an_operator_without_a_meaning_is_named():
    kind, text = kind_of(lambda y: halved(y), lambda y: y / 2)
    assert kind == "unknown"
    assert "nobody knows what gt_same_model.halved.default computes:" in text
    proof = compare(lambda y: halved(y), lambda y: halved(y))
    assert "gt_same_model.halved.default depend on nothing but their arguments" in str(proof)


ASSUMED = {
    "reads": (
        lambda y: y * (5 if y.abs().max().item() > 1e9 else 1),
        "numbers that the program reads stay what they are (1 are read)",
    ),
    "a list": (
        lambda y: y * (5 if max(y.flatten().tolist()) > 1e9 else 1),
        "numbers that the program reads stay what they are (1 are read)",
    ),
    "choices": (
        lambda y: y.gather(-1, y.topk(2)[1]).repeat(1, 2),
        "what aten.topk.default chose in 9 orders shows every choice",
    ),
    "branches": (
        lambda y: y * 2 if ((y > 0) & (y < 1)).all() else y * 1,
        "all 9 orders take the same branch at test_same_model_in_numbers.py:",
    ),
    "comparisons": (lambda y: y * (y > 0), "no two compared numbers are equal (aten.gt.Scalar)"),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_what_is_taken_for_granted_is_named(name):
    last, assumed = ASSUMED[name]
    other = (lambda y: y * 1) if name in ("reads", "a list", "branches") else last
    assert f"assumed: {assumed}" in str(compare(last, other))


class Normed(Model):
    def __init__(self):
        super().__init__(torch.sin)
        self.register_buffer("mean", torch.ones(4))
        self.hidden = [nn.LayerNorm(4)]

    def forward(self, x):
        return self.hidden[0](super().forward(x) - self.mean)


def test_what_has_known_numbers_is_named():
    proof = assert_same_model(Normed, Normed, step, batch)
    says = "assumed: runs begin with the given numbers of buffer mean, hidden[0]: others are not"
    assert says in str(proof)
    assert "the given numbers of" not in str(compare(torch.sin, torch.sin))


class Routed(nn.Module):
    def __init__(self, wrong=-1):
        super().__init__()
        self.gate = nn.Linear(4, 64, bias=False)
        self.wrong = wrong

    def forward(self, x):
        weights, places = self.gate(x).softmax(-1).topk(1)
        return x * torch.where(places == self.wrong, 3 * weights, weights)


@pytest.mark.parametrize(
    ("wrong", "kind"), [(37, "another function"), (8, "unknown")], ids=["chosen", "never chosen"]
)
def test_a_mistake_in_a_branch_that_is_seldom_taken_is_no_proof(wrong, kind):
    """Numbers choose another expert than any order of elements does."""
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(lambda: Routed(wrong), Routed, step, batch)
    assert failure.value.proof.kind == kind, str(failure.value)
    assert kind != "unknown" or "no run takes the branch in which they differ" in str(failure.value)


def rounds(x):
    """Round to whole numbers, as a field and float64 do not."""
    return (x + 2.0**23) - 2.0**23


class Rounding(Model):
    """A model that loses digits in a place of its own, or in none."""

    def __init__(self, where=""):
        super().__init__(torch.nn.Identity())
        self.where = where

    def forward(self, x):
        hidden = self.linear(x)
        if self.where == "activations":
            hidden = rounds(hidden)
        if self.where == "gradients":
            hidden.register_hook(rounds)
        loss = (hidden**2).mean() * 100
        return rounds(loss) if self.where == "loss" else loss


@pytest.mark.parametrize("where", ["loss", "activations", "gradients"])
@pytest.mark.parametrize("loses", ["parallel", "reference"])
def test_digits_that_one_model_alone_loses_are_no_proof(where, loses):
    sides = {"parallel": "", "reference": ""}
    sides[loses] = where
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(
            lambda: Rounding(sides["parallel"]),
            lambda: Rounding(sides["reference"]),
            lambda model, x: model(x),
            batch,
        )
    assert failure.value.proof.kind == "unknown"
    assert "digit" in str(failure.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_models_that_lose_the_same_digits_are_equal(dtype):
    for where in ("loss", ""):
        assert assert_same_model(
            lambda where=where: Rounding(where).to(dtype),
            lambda where=where: Rounding(where).to(dtype),
            lambda model, x: model(x),
            lambda coordinate: (torch.randn(3, 4, dtype=dtype),),
        ).is_at_least("reordered")
