"""Draw inputs of a program that is proven: real tensors, which become abstract if they are floats.

Integers stay what they are in a proof. An operator that they index raises for one that is too
large, so they are drawn below the extents that they index.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import FakeTensor, OpOverload
from pytest_gtrainer.graph.nodes import argument_of, input_fqn, is_view, short_name, value_of
from pytest_gtrainer.numerics.graph_inputs import sample_tensor

_KEEPING = ("_to_copy", "clone", "contiguous", "lift_fresh_copy", "convert_element_type")
_ALONG_DIM = ("gather", "index_add", "index_copy", "index_select", "scatter", "scatter_add")


def refuse_no_numbers() -> None:
    """Raise a ValueError where new tensors hold no numbers, as a proof runs on real ones."""
    made = torch.empty(0)
    if made.is_meta or isinstance(made, FakeTensor):
        kind = "on the meta device" if made.is_meta else "fake ones, as gt_fake_tensors makes"
        raise ValueError(
            f"a proof runs on real numbers, and here new tensors are {kind}: prove outside of that"
        )


def draw_inputs(gm: fx.GraphModule, seed: int) -> list[Any]:
    """Return a real value for each placeholder: normal numbers, and places below their extent.

    Raises:
        ValueError: an input that nobody can make up: an integer without a range, a symbolic size,
            or an input without a traced value.
    """
    generator = torch.Generator().manual_seed(seed)
    made: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        name = input_fqn(node)
        if isinstance(value, Tensor):
            if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
                raise ValueError(
                    f"input {name} has a symbolic size: give inputs=, with the sizes to prove for"
                )
            made.append(_draw(gm, node, name, value, generator))
        elif value is None and all(user.op == "output" for user in node.users):
            made.append(None)  # as the mesh of a DTensor, which no operator reads
        elif value is None or isinstance(value, torch.SymInt | torch.SymFloat):
            raise ValueError(f"input {name} has no traced value: give inputs=")
        else:
            made.append(value)

    return made


class DrawnInputs(Sequence[list[Any]]):
    """Inputs of each rank, drawn when they are first read: ranks that are alike need only one's."""

    def __init__(self, gm: fx.GraphModule, size: int) -> None:
        self._gm, self._size = gm, size
        self._made: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, rank: int) -> list[Any]: ...

    @overload
    def __getitem__(self, rank: slice) -> list[list[Any]]: ...

    def __getitem__(self, rank: int | slice) -> list[Any]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self._size))]
        if not 0 <= rank < self._size:
            raise IndexError(f"rank {rank} of {self._size}")
        if rank not in self._made:
            self._made[rank] = draw_inputs(self._gm, seed=rank)
        return self._made[rank]


def describe_integers(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Describe the integers that were drawn: a proof does not hold for others, such as padding."""
    parts = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not isinstance(value, Tensor) or not value.numel() or value.dtype == torch.bool:
            continue
        if not value.is_floating_point() and not value.is_complex():
            parts.append(f"{input_fqn(node)} in {int(value.min())}..{int(value.max())}")
    if not parts:
        return ""
    return f"whole numbers that were drawn: {', '.join(parts)}"


def _draw(
    gm: fx.GraphModule, node: fx.Node, name: str, value: Tensor, generator: torch.Generator
) -> Tensor:
    """Return a tensor like ``value``: normal numbers, or integers that the graph can index with."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        like = torch.empty(0, dtype=value.dtype)
        return sample_tensor(like, value.shape, value.stride(), generator)
    if value.dtype == torch.bool:
        return torch.randint(0, 2, tuple(value.shape), generator=generator).bool()

    extents = list(index_extents(node))
    # A buffer that is no index is a counter, such as BatchNorm's ``num_batches_tracked``: any
    # number will do.
    is_buffer = node.meta.get("gt_input", {}).get("kind") == "buffer"
    if not extents and node.users and not is_buffer:
        raise ValueError(
            f"input {name} is {value.dtype} and is no index of anything in the graph, so nobody "
            "knows its range: give inputs="
        )

    most = min(extents, default=2)
    drawn = torch.randint(0, max(1, most), tuple(value.shape), generator=generator)
    flat = drawn.view(-1)
    # A wrong bound shows at the ends of the range, a wrong sum where a number comes twice.
    flat[0:3:2] = max(1, most) - 1
    flat[1:2] = 0
    # In the strides of the trace, which the graph's views bake in.
    empty = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
    return empty.copy_(drawn)


def index_extents(node: fx.Node) -> Iterator[int]:
    """Yield the extent of each dimension that a node is an index into, through views and casts."""
    todo, seen = [node], {node}
    while todo:
        used = todo.pop()
        for user in used.users:
            if not isinstance(user.target, OpOverload):
                continue
            yield from _extents_in(user, used)
            keeps_numbers = is_view(user.target) or short_name(user) in _KEEPING
            if keeps_numbers and user not in seen:
                seen.add(user)
                todo.append(user)


def _extents_in(user: fx.Node, index: fx.Node) -> Iterator[int]:
    name = short_name(user)
    shapes = [_shape(argument) for argument in user.args]
    if name == "embedding" and user.args[1] is index:
        yield shapes[0][0]
    elif name == "embedding_dense_backward" and user.args[1] is index:
        yield int(user.args[2])
    elif name in _ALONG_DIM and argument_of(user, "index") is index:
        yield shapes[0][int(argument_of(user, "dim"))]
    elif name.startswith("nll_loss") and argument_of(user, "target") is index:
        # The classes are the second dimension, or the only one of a single sample.
        *_, classes = _shape(argument_of(user, "self"))[:2]
        yield classes
    elif name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
        for dim, given in enumerate(argument_of(user, "indices")):
            if given is index:
                yield shapes[0][dim]


def _shape(argument: Any) -> Sequence[int]:
    value = value_of(argument) if isinstance(argument, fx.Node) else None
    return tuple(getattr(value, "shape", ()))
