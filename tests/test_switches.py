"""Switches of public functions are True or False; any text would count as True."""

import dataclasses
import inspect
from contextlib import AbstractContextManager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import pytest_gtrainer
from pytest_gtrainer import ChunkConfig


def is_switch(annotation, default):
    return annotation in (bool, "bool") or isinstance(default, bool)


def switches():
    """Return the switches of all public names: of fields, and of arguments."""
    found = []
    for name in sorted(pytest_gtrainer.__all__):
        public = getattr(pytest_gtrainer, name)
        if inspect.isclass(public):
            # Rules are ours, and ``TrainConfig`` has a test of its own types.
            if name in ("Rule", "TrainConfig") or not dataclasses.is_dataclass(public):
                continue
            for each in dataclasses.fields(public):
                if is_switch(each.type, each.default):
                    found.append((name, each.name))
        elif inspect.isfunction(public):
            for each in inspect.signature(public).parameters.values():
                if is_switch(each.annotation, each.default):
                    found.append((name, each.name))
    return found


def call(name, switch, value):
    public = getattr(pytest_gtrainer, name)
    if public is ChunkConfig:
        return ChunkConfig("layers.*", **{switch: value})
    options = {switch: value}
    for each in inspect.signature(public).parameters.values():
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            options[each.name] = None
    if "gm" in options:
        options["gm"] = make_fx(torch.relu)(torch.ones(3))
    result = public(**options)
    if isinstance(result, AbstractContextManager):
        with result:
            pass
    return result


@pytest.mark.parametrize(("name", "switch"), switches())
@pytest.mark.parametrize("value", ["no", "", 0, 1, None])
def test_a_switch_is_true_or_false(name, switch, value):
    with pytest.raises((TypeError, ValueError), match=rf"{switch}( is |=).*: give True or False"):
        call(name, switch, value)


def test_there_are_switches():
    assert len(switches()) > 25
