"""The rule ``state``: what a pass leaves changed in its process."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from types import ModuleType

import pytest
import torch
from torch import nn

from pytest_gtrainer._torch.modes import MODES
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import KINDS, RULES, _timer, judge
from pytest_gtrainer.proofs.state import modes_of_torch

pytestmark = [
    pytest.mark.gt_world("fake", size=4, rank=1),
    pytest.mark.usefixtures("gt_module_world"),
]

MATMUL = torch.backends.mkldnn.matmul
SETTINGS = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: MATMUL.fp32_precision, lambda value: setattr(MATMUL, "fp32_precision", value)),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_grad_enabled, torch.set_grad_enabled),
]
CHANGES = {
    "the random state of torch.cpu": lambda: torch.manual_seed(3),
    "the random state of torch.cpu ": lambda: torch.rand(1),
    "the random state of python": random.random,
    "torch.get_default_dtype() from torch.float32 to torch.float64": lambda: (
        torch.set_default_dtype(torch.float64)
    ),
    "torch.get_num_threads() from": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.backends.mkldnn.matmul.fp32_precision from none to ieee": lambda: setattr(
        MATMUL, "fp32_precision", "ieee"
    ),
    "torch.are_deterministic_algorithms_enabled() from False to True": lambda: (
        torch.use_deterministic_algorithms(True)
    ),
    "torch.is_grad_enabled() from True to False": lambda: torch.set_grad_enabled(False),
    "OMP_DYNAMIC from": lambda: os.environ.update(OMP_DYNAMIC="true"),
    "autocast from": lambda: torch.autocast("cpu").__enter__(),
    "the default device from cpu to meta": lambda: torch.set_default_device("meta"),
}


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    settings = [(read(), write) for read, write in SETTINGS]
    modes = [(read(), write) for read, write in MODES.values()]
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    with random_states_kept():
        yield
    for value, write in (*modes, *settings):
        write(value)


@pytest.mark.parametrize("kind", ["any", "chunking"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_pass_leaves_changed(change, kind, request):
    """Q4"""

    def changes(gm):
        CHANGES[change]()
        return gm

    adapter = Adapter(changes, kind, call=lambda gm, *given: changes(gm))
    with pytest.raises(AssertionError, match="it changes") as failure:
        judge(RULES["state"], adapter, request)
    assert change.strip() in str(failure.value)


def changing(change):
    """A pass that removes a node, and leaves something changed."""

    def changes(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        CHANGES[change]()
        return gm

    return changes


@pytest.fixture
def my_models(monkeypatch):
    """A module with a model of the user."""
    made = ModuleType("my_models")
    made.tiny = lambda: (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4)),
        torch.ones(2, 4),
    )
    monkeypatch.setitem(sys.modules, "my_models", made)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_pass_leaves_changed_is_told_on_a_model_of_the_user(change, request, my_models):
    """Also after other rules, in which the pass has changed it before."""
    adapter = Adapter(changing(change), models=("my_models:tiny",))
    seen = modes_of_torch()
    for rule in ("E6", "D9"):
        with suppress(AssertionError):
            judge(RULES[rule], adapter, request, "my_models:tiny")
        assert modes_of_torch() == seen, "no other pass is blamed for it"
    with pytest.raises(AssertionError, match="it changes") as failure:
        judge(RULES["state"], adapter, request, "my_models:tiny")
    assert change.strip() in str(failure.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_pass_puts_back(kind, request):
    """The twin, for each kind."""

    def puts_back(gm, *given):
        with random_states_kept(), torch.no_grad(), torch.device("cpu"):
            torch.rand(1)
        return gm

    judge(RULES["state"], Adapter(puts_back, kind, call=puts_back, strict=True), request)


@pytest.mark.parametrize(
    ("which", "number"),
    [(signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_PROF, signal.SIGPROF)],
    ids=["time", "CPU time"],
)
def test_a_longer_timer_of_the_caller_goes_on_where_it_was(which, number):
    """A pass takes from the caller's time; a shorter timer is left alone."""
    before = signal.getitimer(which)
    handler = signal.getsignal(number)
    try:
        for given, limit in ((50, 5), (5, 50)):
            signal.setitimer(which, given, 7)
            with _timer(which, number, limit, lambda frame: None):
                end = time.process_time() + 0.1
                while time.process_time() < end:
                    pass
            left, interval = signal.getitimer(which)
            assert given - 4 < left < given - 0.05
            assert interval == 7
            assert signal.getsignal(number) is handler
    finally:
        signal.setitimer(which, *before)
