"""Tensors that a function holds: a write is a result, and put back; a module is refused."""

import argparse
import functools
import threading
from collections import UserDict, UserList, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gtrainer import assert_compiled_bitwise, prove

W = torch.ones(3)
MODEL = nn.Linear(3, 3)


@dataclass(slots=True)
class Slots:
    w: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    w: Any


class OfClass:
    W = W

    @classmethod
    def of_class(cls):
        return cls.W

    @staticmethod
    def of_static():
        return W

    @property
    def of_property(self):
        return W

    def of_method(self):
        return self.of_other_method()

    def of_other_method(self):
        return W

    def __getitem__(self, key):
        return W

    def unused(self):
        return MODEL


class Inherits(OfClass):
    pass


class Reads(nn.Module):
    def forward(self, x):
        W.add_(1)
        return x * 2


local, own, inherited = threading.local(), OfClass(), Inherits()
local.w = W
namespace, slots, frozen, nested = SimpleNamespace(w=W), Slots(W), Frozen(W), Slots([Slots(W)])
queue, parsed, mapping, listing = deque([W]), argparse.Namespace(w=W), UserDict(w=W), UserList([W])
HOLDERS = {
    "SimpleNamespace": lambda: namespace.w,
    "slots": lambda: slots.w,
    "frozen": lambda: frozen.w,
    "slots of slots": lambda: nested.w[0].w,
    "deque": lambda: queue[0],
    "argparse": lambda: parsed.w,
    "UserDict": lambda: mapping["w"],
    "UserList": lambda: listing[0],
    "thread": lambda: local.w,
    "class attribute": lambda: own.W,
    "inherited attribute": lambda: inherited.W,
    "class method": lambda: own.of_class(),
    "static method": lambda: own.of_static(),
    "property": lambda: inherited.of_property,
    "method of a method": lambda: own.of_method(),
    "item": lambda: own[0],
    "partial": functools.partial(lambda holder: holder.of_method(), own),
    "bound method": own.of_method,
}


def writing(read, number):
    """Return a function that adds a known number to what ``read`` returns."""

    def call(x):
        held = read()
        held.add_(number)
        return x * 2

    return call


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_written_to_a_held_tensor_is_a_result_and_is_put_back(holder):
    read, x = HOLDERS[holder], torch.randn(3)
    one, two = writing(read, 1), writing(read, 2)
    assert prove(one, lambda x: x * 2, inputs=(x,)).kind == "another function"
    assert prove(one, two, inputs=(x,)).kind == "another function"
    assert prove(one, writing(read, 1), inputs=(x,)).kind == "identical"
    assert W.tolist() == [1, 1, 1]


def test_what_a_forward_writes_to_a_global_is_a_result_and_is_put_back():
    """A module that is proven writes, or a part of it."""
    x = torch.randn(3)
    for module in (Reads(), nn.Sequential(Reads())):
        assert prove(module, lambda x: x * 2, inputs=(x,)).kind == "another function"
        assert W.tolist() == [1, 1, 1]


@pytest.mark.parametrize("place", ["namespace", "slots", "thread"])
def test_an_attribute_that_a_call_makes_or_replaces_is_put_back(place):
    holder = globals()[place] if place != "thread" else local

    def replaces(x):
        if place != "slots":
            holder.new = x
        holder.w = x * 3
        return x * 2

    assert prove(replaces, lambda x: x * 2, inputs=(torch.randn(3),)).kind == "another function"
    assert holder.w is W
    assert not hasattr(holder, "new")


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "holder", ["slots", "deque", "UserDict", "class attribute", "static method"]
)
def test_compiled_code_leaves_what_it_holds_as_it_was(holder):
    assert_compiled_bitwise(writing(HOLDERS[holder], 1), torch.randn(3))
    assert W.tolist() == [1, 1, 1]


class Steps:
    def step(self, x):
        return MODEL(x)

    def count(self, x):
        return x * 2


steps, boxed, named, items = Steps(), Slots(MODEL), SimpleNamespace(w=MODEL), deque([MODEL])
MODULES = {
    "method": lambda x: steps.step(x),
    "slots": lambda x: boxed.w(x),
    "SimpleNamespace": lambda x: named.w(x),
    "deque": lambda x: items[0](x),
}


@pytest.mark.parametrize("holder", MODULES)
def test_a_module_that_something_holds_is_refused(holder):
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"the function holds .* a Linear, .* make it an input"):
        prove(MODULES[holder], MODULES[holder], inputs=(x,))


def test_a_method_that_nobody_names_holds_nothing():
    x = torch.randn(3)
    assert prove(lambda x: steps.count(x), lambda x: x * 2, inputs=(x,)).kind == "identical"
    assert prove(steps.count, lambda x: x * 2, inputs=(x,)).kind == "identical"
