"""Places of items and slices in a payload: small functions, each by a table."""

import operator

import pytest
import torch
from torch import fx

from pytest_gtrainer.graph.packing import (
    Part,
    Piece,
    _cut,
    _items,
    _scaled,
    _slice_begin,
    nbytes_of,
)

aten = torch.ops.aten


def node_of(target, args, value, operand):
    """Return a node that reads a placeholder with a traced value."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = operand
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = value
    return node


@pytest.mark.parametrize(
    ("args", "begin"),
    [
        ((0, 1, 3), 2),
        ((0, 0, 3), 0),
        ((0, None, 3), 0),
        ((0, -2), 8),
        ((0, -6, -1), 0),
        ((0, -1, 2**63 - 1), 10),
        ((0, 2, 6, 1), 4),
        ((0, 2, 6, 2), None),
        ((1, 1, 2), None),
    ],
    ids=str,
)
def test_the_first_element_of_a_slice(args, begin):
    x = torch.empty(6, 2)
    node = node_of(aten.slice.Tensor, args, aten.slice.Tensor(x, *args), x)
    assert _slice_begin(node) == begin


@pytest.mark.parametrize(("indices", "numbers"), [((0, 1, 2), (0, 1, 2)), ((-1, 0, -3), (2, 0, 0))])
def test_items_are_counted_from_the_front(indices, numbers):
    x = torch.empty(6)
    split = node_of(aten.split.Tensor, (2,), list(x.split(2)), x)
    items = [split.graph.call_function(operator.getitem, (split, each)) for each in indices]
    assert _items(split) == list(zip(numbers, items, strict=True))


@pytest.mark.parametrize(
    ("begin", "width", "found"),
    [
        (0, 10, [(3, 5, 4)]),
        (4, 2, [(0, 6, 2)]),
        (5, 9, [(0, 7, 2)]),
        (0, 4, [(3, 5, 1)]),
        (7, 3, []),
        (0, 3, []),
    ],
)
def test_a_piece_is_clipped_to_what_is_cut_out_of_its_node(begin, width, found):
    """Elements 5 to 8 of a result lie at 3 to 6 of a node."""
    node = fx.Graph().placeholder("x")
    pieces = _cut(Piece(node, 3, 5, 4), node, begin, width)
    assert [(piece.low, piece.at, piece.numel) for piece in pieces] == found


@pytest.mark.parametrize(
    ("sizes", "nbytes", "scaled"),
    [
        ((4, 8), 12, (4, 8)),
        ((4, 8), 6, (2, 4)),
        ((4, 8), 24, (8, 16)),
        ((5,), 7, (7,)),
        ((4, 8), 7, None),
        ((0, 0), 4, None),
    ],
)
def test_parts_have_the_sizes_of_a_cast(sizes, nbytes, scaled):
    found = _scaled(tuple(Part(None, size) for size in sizes), nbytes)
    assert (found and tuple(part.nbytes for part in found)) == scaled


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (torch.empty(2, 3), 24),
        (torch.empty(0, 3), 0),
        ([torch.empty(2), torch.empty(3, dtype=torch.bfloat16)], 14),
        ((torch.empty(1), (torch.empty(2), torch.empty(3))), 24),
        ([None, torch.empty(2, dtype=torch.bool), 7], 2),
        ([], 0),
        (None, 0),
    ],
    ids=["a tensor", "empty", "two dtypes", "nested", "others", "none", "no value"],
)
def test_bytes_of_a_value_are_those_of_all_its_tensors(value, nbytes):
    """A coalesced collective has one tensor for each member, of any dtype."""
    assert nbytes_of(value) == nbytes
