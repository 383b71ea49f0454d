"""``--gt-model``: what its function may return, and what a wrong one says."""

import pytest
import torch
from torch import fx, nn

from pytest_gtrainer import gt_compile, prove
from pytest_gtrainer._torch.tracing import make_fx
from pytest_gtrainer.attack.models import ModelError, graphs_of, load_model
from pytest_gtrainer.tracing.step import trace_step


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        return torch.tanh(self.up(x))


class Decides(Tiny):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def graph():
    return make_fx(torch.tanh, tracing_mode="fake")(torch.ones(2, 4))


def traced():
    return trace_step(Tiny(), lambda model, x: model(x).square().mean(), (torch.ones(2, 4),))


def recorded():
    model = torch.compile(Tiny())
    with gt_compile() as record:
        model(torch.ones(2, 4)).sum().backward()
    return record


module = Tiny()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: (Tiny(), (torch.ones(2, 4),)), [""]),
        (lambda: (Tiny(), torch.ones(2, 4)), [""]),
        (lambda: (Tiny(), [torch.ones(2, 4)], lambda model, x: model(x).sum()), [""]),
        (graph, [""]),
        (traced, [""]),
        (lambda: {"first": graph(), "second": traced()}, ["first", "second"]),
        (recorded, ["joint"]),
        (lambda: (torch.compile(Tiny()), torch.ones(2, 4)), ["joint"]),
        (lambda: {"a": recorded()}, ["a.joint"]),
    ],
)
def test_what_a_function_may_return(make, names):
    found = graphs_of(make, "--gt-model=it")
    assert list(found) == names
    for own in found.values():
        assert len(own.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default))


def test_a_step_is_canonical_unless_it_is_asked_for_as_traced():
    """Detaches of the trace are gone from the one, and stay in the other."""

    def make():
        return Tiny(), torch.ones(2, 4)

    given, as_traced = graphs_of(make, "it")[""].gm, graphs_of(make, "it", as_traced=True)[""].gm
    assert len(given.graph.nodes) < len(as_traced.graph.nodes)
    assert prove(given, as_traced).kind == "identical"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Tiny, "it returns a model without inputs, and nobody knows their shapes"),
        (lambda: (Tiny(),), "it returns a model and 0 other values: return"),
        (lambda: 3, "it returns int: return"),
        (lambda: None, "it returns NoneType: return"),
        (dict, "it returns an empty dict"),
        (lambda: 1 / 0, "no graph: ZeroDivisionError: division by zero"),
        (lambda: (Decides(), torch.ones(2, 4)), "the step decides in Python by the value"),
        (lambda: (Tiny(), torch.ones(2, 5)), "no graph: RuntimeError"),
        (lambda: fx.symbolic_trace(Tiny()), "input x has no traced value"),
        (
            lambda: make_fx(torch.tanh, tracing_mode="symbolic")(torch.ones(2, 4)),
            "no tensor of known sizes: trace the model without dynamic dimensions",
        ),
        (lambda: {"a": 3}, "it returns int"),
        (
            lambda: (nn.Module.requires_grad_(Tiny(), False), torch.ones(2, 4)),
            "no parameter of the model requires a gradient",
        ),
        (
            lambda: (Tiny(), torch.ones(2, 4), lambda model, x: model(x)),
            "no graph: ValueError",
        ),
    ],
)
def test_what_cannot_be_used(make, says):
    with pytest.raises(ModelError, match=r"^--gt-model=it") as raised:
        graphs_of(make, "--gt-model=it")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere:it", "No module named 'nowhere'"),
        (f"{__name__}:it", "has no attribute 'it'"),
        (__name__, "expected module:name, as my_models:tiny"),
        (f"{__name__}:module", "is of type Tiny, not a function without arguments"),
    ],
)
def test_no_such_function(path, says):
    with pytest.raises(ValueError, match=r"^--gt-model=") as raised:
        load_model(path)
    assert says in str(raised.value)
