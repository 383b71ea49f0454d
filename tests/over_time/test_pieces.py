"""Pieces of a trainer's state: which there are, when they are equal, and how they are put back."""

import copy
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch
from torch import nn

from pytest_gtrainer.over_time.pieces import RANDOM, Piece, pieces_of


class Kept:
    """A part with a ``state_dict``, as a schedule has."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def trainer(seed=0):
    """A trainer with state in each place where it is looked for, and things that are none."""
    torch.manual_seed(seed)
    made = SimpleNamespace(model=nn.Linear(2, 2), kept=Kept(seed), count=seed, rate=seed / 2)
    made.tensor = torch.full((3,), float(seed))
    made.list = [seed, torch.full((2,), seed), Kept(seed), "text", None]
    made.tuple = (Kept(seed), seed, torch.full((1,), seed))
    made.dict = {"rows": seed, 3: torch.full((1,), seed), "kept": Kept(seed)}
    made.plain = SimpleNamespace(epoch=seed, deep=SimpleNamespace(lost=seed), kept=Kept(seed))
    made.flag, made.text, made.nothing, made.function = True, "text", None, print
    made.empty, made.none = [], {}
    return made


CHANGING = {
    *("model", "kept", "count", "rate", "tensor", "list.0", "list.1", "list.2"),
    *("tuple.0", "tuple.1", "tuple.2", "dict.rows", "dict[3]", "dict.kept"),
    *("plain.epoch", "plain.deep.lost", "plain.kept", RANDOM),
}
NAMES = CHANGING | {
    *("flag", "text", "nothing", "empty", "none", "list.3", "list.4"),
    *("model.in_features", "model.out_features", "model.training"),
}


def test_pieces_are_found_in_attributes_and_in_what_these_hold():
    assert set(pieces_of(trainer())) == NAMES


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_one_piece_is_put_back_and_no_other(name):
    one = trainer(1)
    before = pieces_of(one)
    other = trainer(2)
    # As a load does: objects and tensors are others, or the same with other values.
    for attribute, value in vars(other).items():
        setattr(one, attribute, value)
    changed = pieces_of(one)
    assert {each for each in NAMES if not before[each].equals(changed[each])} == CHANGING
    before[name].put_back()
    after = pieces_of(one)
    assert {each for each in NAMES if not before[each].equals(after[each])} == CHANGING - {name}
    assert {each for each in NAMES if changed[each].equals(after[each])} == NAMES - {name}


class Slotted:
    __slots__ = ("rows",)


class MoreSlots(Slotted):
    __slots__ = ("epoch", "unset")


class Mixed(MoreSlots):
    """Has a ``__dict__``, too."""


@pytest.mark.parametrize("kind", [Slotted, MoreSlots, Mixed])
def test_slots_of_an_object_and_of_its_bases_are_pieces(kind):
    part = kind()
    names = [name for name in ("rows", "epoch", "free") if kind is Mixed or hasattr(kind, name)]
    for name in names:
        setattr(part, name, 1)
    before = pieces_of(SimpleNamespace(part=part))
    assert before.keys() - {RANDOM} == {f"part.{name}" for name in names}
    for name in names:
        setattr(part, name, 2)
    for name in names:
        before[f"part.{name}"].put_back()
    assert [getattr(part, name) for name in names] == [1] * len(names)


@pytest.mark.parametrize("shape", [(3,), (4,), ()])
def test_a_tensor_is_written_into_where_it_fits(shape):
    """Others may hold it, as an optimiser does."""
    made = SimpleNamespace(a=torch.ones(3, requires_grad=True))
    piece = pieces_of(made)["a"]
    held = made.a = torch.zeros(shape, requires_grad=True)
    piece.put_back()
    assert made.a.tolist() == [1, 1, 1]
    assert (made.a is held) == (shape == (3,))
    made.a = None
    piece.put_back()
    assert made.a.tolist() == [1, 1, 1]


def test_a_piece_is_a_copy():
    made = trainer(1)
    before = pieces_of(made)
    with torch.no_grad():
        for tensor in (made.tensor, made.model.weight, made.list[1], made.dict[3], made.tuple[2]):
            tensor.add_(1)
    changed = {"tensor", "model", "list.1", "dict[3]", "tuple.2"}
    now = pieces_of(made)
    assert {name for name in NAMES if not before[name].equals(now[name])} == changed


VALUES = [
    *(
        0,
        1,
        1.0,
        True,
        "1",
        None,
        float("inf"),
        float("nan"),
        [1],
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {},
        [],
    ),
    *([1, 2], torch.tensor(1), torch.tensor(1.0), torch.tensor([1]), torch.tensor([1, 2])),
    *(
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0.0]),
        torch.tensor([-0.0]),
        torch.tensor([0], dtype=torch.int32),
    ),
    *(torch.empty(0), torch.empty(0, 2), {"a": torch.ones(1)}, {"a": torch.zeros(1)}),
    *(numpy.array([1, 2]), numpy.array([1, 3])),
]


@pytest.mark.parametrize("place", range(len(VALUES)))
def test_values_are_equal_to_their_copy_alone(place):
    """Type, shape, dtype and bits count: also of an empty state against one that is filled."""
    own = Piece(VALUES[place], print)
    equal = [
        other
        for other in range(len(VALUES))
        if own.equals(Piece(copy.deepcopy(VALUES[other]), print))
    ]
    assert equal == [place]


@hypothesis.given(st.lists(st.floats(width=32), max_size=4))
@hypothesis.settings(deadline=None)
def test_tensors_are_equal_by_their_bits(numbers):
    own = Piece({"a": torch.tensor(numbers)}, print)
    assert own.equals(Piece({"a": torch.tensor(numbers)}, print))
    for place in range(len(numbers)):
        other = torch.tensor(numbers)
        other.view(torch.int32)[place] ^= 1
        assert not own.equals(Piece({"a": other}, print))


def test_objects_that_compare_by_identity_say_nothing():
    assert Piece([Kept(1)], print).equals(Piece([Kept(2)], print))
    assert not Piece([Kept(1)], print).equals(Piece([object()], print))
