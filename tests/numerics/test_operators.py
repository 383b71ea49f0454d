"""Eager and graph are aligned, and the first operator that differs is named."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    ActivationCheckpointConfig,
    capture_operators,
    compare,
    compare_operators,
    deterministic,
    digest,
    trace_step,
)
from pytest_gtrainer.numerics.operators import OperatorCapture, OperatorPlace
from tests.numerics.samples import flip_bit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with deterministic(seed=3):
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(self.first(x)).sin()
        return self.second(hidden) + self.second(hidden + 1)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def eager(model: nn.Module, *, keep: OperatorPlace | None = None) -> OperatorCapture:
    with capture_operators(model, keep=keep) as capture:
        step(model, X).backward()
    return capture


def replayed(model: nn.Module, *, keep: OperatorPlace | None = None) -> OperatorCapture:
    traced, capture = trace_step(model, step, (X,)), OperatorCapture(keep)
    traced.with_graph(capture.watch(traced.gm)).replay(model, X)
    return capture


@pytest.mark.second_tier("deepseek_v3")
@pytest.mark.gt_world("ranks", size=1)
@pytest.mark.parametrize("make", [llama3_training, deepseek_v3_training])
def test_a_graph_and_eager_align_operator_by_operator(gt_mesh, make):
    config = make(gt_mesh, "fp32")
    batch, model = config.batch(0, 0), config.model()
    with capture_operators(model) as expected:
        config.step(model, *batch).backward()
    traced, actual = trace_step(config.model(), config.step, batch), OperatorCapture()
    traced.with_graph(actual.watch(traced.gm)).replay(config.model(), *batch)
    verdict = compare_operators(actual, expected)
    assert verdict.outcome == "equal"
    assert verdict.unaligned == ()
    assert verdict.compared == len(expected.calls) > 250


def test_the_first_operator_that_differs_is_named():
    """One bit of the second layer's weight differs, so its product is the first difference."""
    spoiled = Net()
    flip_bit(spoiled.second.weight.data, element=5, bit=20)
    verdict = compare_operators(replayed(spoiled), eager(Net()))
    assert verdict.outcome == "different"
    assert verdict.first == OperatorPlace("second", "fwd", "aten.addmm.default", 0)
    lines = str(verdict).splitlines()
    assert lines[0] == f"different: {len(verdict.differing)} of {verdict.compared} operators"
    assert lines[1] == "  first at aten.addmm.default in the forward of second, call 0"
    assert not [call for _, call in verdict.differing if call.place[:2] == ("first", "fwd")]


class Branches(nn.Module):
    """Two layers beside each other, run in either order."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        with deterministic(seed=3):
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: self.get_submodule(name)(x) for name in self.order}
        return made["left"] + made["right"]


def test_operators_are_aligned_by_their_place_not_by_their_order():
    """A graph may run what does not depend on each other in another order."""
    expected = eager(Branches("left", "right"))
    verdict = compare_operators(eager(Branches("right", "left")), expected)
    assert (verdict.outcome, verdict.unaligned) == ("equal", ())
    spoiled = Branches("right", "left")
    flip_bit(spoiled.left.bias.data, element=1, bit=20)
    assert compare_operators(eager(spoiled), expected).first == OperatorPlace(
        "left", "fwd", "aten.addmm.default", 0
    )


class Halved(torch.autograd.Function):
    """The value as it is, half its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def test_a_difference_of_the_backward_is_found_in_the_backward():
    class Wrong(Net):
        def between(self, x):
            return Halved.apply(x)

    verdict = compare_operators(eager(Wrong()), eager(Net()))
    assert verdict.first == OperatorPlace("first", "bwd", "aten.mm.default", 0)
    assert str(verdict).splitlines()[-1] == (
        "    aten.mul.Tensor in the backward, of no module: 2 times in actual, 1 in expected"
    )


def test_the_elements_of_the_first_operator():
    """A second run keeps that operator's output whole."""
    spoiled = Net()
    flip_bit(spoiled.second.weight.data, element=5, bit=20)
    first = compare_operators(replayed(spoiled), eager(Net())).first
    text = str(compare(replayed(spoiled, keep=first).kept, eager(Net(), keep=first).kept))
    assert "first at [0], element (0, 0)" in text
    assert "of this f32[3, 4]" in text


class Checkpointed(nn.Module):
    def __init__(self, config: ActivationCheckpointConfig) -> None:
        super().__init__()
        self.config, self.inner, self.drop = config, nn.Linear(4, 4), nn.Dropout(0.5)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.drop(self.inner(y)).sin(), x, **self.config.arguments())


def _checkpointed(**options) -> OperatorCapture:
    with deterministic(seed=1):
        return eager(Checkpointed(ActivationCheckpointConfig(**options)))


def test_a_dropped_restore_of_random_numbers_is_found_at_the_dropout():
    """K1: the recomputation draws another mask; with the restore two runs agree."""
    assert compare_operators(_checkpointed(), _checkpointed()).outcome == "equal"
    verdict = compare_operators(_checkpointed(preserve_rng_state=False), _checkpointed())
    assert verdict.first == OperatorPlace("drop", "bwd", "aten.bernoulli_.float", 0)


def test_the_text_names_the_calls_that_differ_and_those_that_one_side_lacks():
    def captured(*calls: tuple[str, float]) -> OperatorCapture:
        capture = OperatorCapture()
        for fqn, value in calls:
            capture.note(fqn, "fwd", torch.ops.aten.sin.default, torch.full((2, 1), value))
        return capture

    actual = captured(("first", 1.0), ("second", 2.0), ("second", 3.0), ("", 0.0), ("left", 0.0))
    expected = captured(("first", 1.0), ("second", 2.5), ("second", 3.5), ("", 0.0))
    one, other = (digest(torch.full((2, 1), value)).partition(":")[2] for value in (2.0, 2.5))
    assert str(compare_operators(actual, expected)).splitlines() == [
        "different: 2 of 4 operators",
        "  first at aten.sin.default in the forward of second, call 0",
        f"    actual   f32[2, 1] {one}",
        f"    expected f32[2, 1] {other}",
        "  then at",
        "    aten.sin.default in the forward of second, call 1",
        "  not aligned",
        "    aten.sin.default in the forward of left: 1 times in actual, 0 in expected",
    ]


def test_nothing_captured_is_unverified():
    verdict = compare_operators(OperatorCapture(), OperatorCapture())
    assert verdict.outcome == "unverified"
    with pytest.raises(TypeError, match="three outcomes"):
        bool(verdict)


def test_a_run_is_left_as_it_was():
    """No hook and no patch stays; what is computed is the same."""
    model, plain = Net(), Net()
    eager(model)
    step(plain, X).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.autograd.graph._engine_run_backward is torch.autograd._engine_run_backward
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"


@pytest.mark.parametrize("fails_in", ["a hook before ours", "a hook", "the forward"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_module_that_raises_and_whose_error_is_caught_is_left(fails_in, is_nested):
    """Wherever it raises, what runs behind it is in no other module."""

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("forward")

    def hook(module, args):
        if fails_in != "the forward":
            raise ValueError("hook")

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = nn.Sequential(Fails()) if is_nested else Fails()
            self.after = nn.Linear(4, 4)

        def forward(self, x):
            prepend = fails_in == "a hook before ours"
            handle = self.fails.register_forward_pre_hook(hook, prepend=prepend)
            try:
                self.fails(x)
            except ValueError:
                pass
            finally:
                handle.remove()
            return self.after(x).sin()

    model = Outer()
    with capture_operators(model) as capture:
        model(X)
    places = [(call.place.fqn, call.place.operator) for call in capture.calls]
    assert places == [("after", "aten.addmm.default"), ("", "aten.sin.default")]


class Asking(nn.Module):
    """Between two products it asks for a number, a truth, and a shape on no device."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.first, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.asks:
            x.detach().sum().item()
            torch.equal(x.detach(), x.detach())
            torch.empty(2, device="meta").sin()
        return self.first(x)


def test_calls_without_a_tensor_of_values_have_no_place():
    """The twin does not ask; the sum that is asked for is a call, and one more on one side."""
    runs = []
    for asks in (True, False):
        torch.manual_seed(0)
        model = Asking(asks=asks)
        with capture_operators(model) as capture:
            model(X).sum().backward()
        runs.append(capture)
    verdict = compare_operators(*runs)
    assert [(what.partition(" ")[0], *counts) for what, *counts in verdict.unaligned] == [
        ("aten.sum.default", 1, 0)
    ]
    assert (verdict.outcome, verdict.compared) == ("unverified", len(runs[1].calls))
    assert "all operators with a counterpart are equal; compare the results for" in str(verdict)
    assert len(runs[0].calls) == len(runs[1].calls) + 1


@pytest.mark.parametrize("last", [torch.sigmoid, lambda x: x.relu() * 2, lambda x: x])
def test_operators_without_a_counterpart_leave_it_unverified(last):
    """The result of the last operator is compared with nothing."""
    captures = []
    for end in (last, torch.relu, torch.relu):
        net = Net()
        net.register_forward_hook(lambda module, args, output, end=end: end(output))
        with capture_operators(net) as capture, torch.no_grad():
            net(X)
        captures.append(capture)
    assert compare_operators(*captures[:2]).outcome == "unverified"
    assert compare_operators(*captures[1:]).outcome == "equal"


def test_a_capture_against_itself_compares_nothing():
    """There are no two runs, as in a record against itself."""
    own = eager(Net())
    verdict = compare_operators(own, own)
    assert verdict.outcome == "unverified"
    assert "  actual and expected are the same capture" in str(verdict)
    assert compare_operators(own, OperatorCapture(calls=list(own.calls))).outcome == "unverified"
    assert compare_operators(own, eager(Net())).outcome == "equal"
