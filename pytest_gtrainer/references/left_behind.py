"""Tensors that a chunked forward leaves in attributes of its modules.

Each chunk replaces those of the chunk before it, so only the last chunk's remain. Read outside of
the module, as an auxiliary loss is, they would be taken for those of all rows. So each that
requires a gradient is exchanged for a ``LeftTensor``, which refuses to be read, until the module
runs again. One without a gradient stays: it may be a cache that does not depend on rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gtrainer._torch.threads import unseen_by_modes
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.passes.chunking.config import ChunkError
from pytest_gtrainer.tracing.model import holds_as_object, tensor_text


class LeftTensor(Tensor):
    """Stands for a tensor that the last chunk's forward has left in an attribute.

    Attributes:
        left: the tensor.
        message: why it cannot be read.
    """

    left: Tensor
    message: str

    __hash__ = object.__hash__
    __repr__ = object.__repr__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every use.

        Raises:
            ChunkError: with the attribute, the module and the number of chunks.
        """
        for leaf in pytree.tree_leaves([args, kwargs]):
            if isinstance(leaf, LeftTensor):
                raise ChunkError(leaf.message)
        raise ChunkError(f"{func} reads what a chunked forward has left in an attribute")


def left_tensors(module: nn.Module) -> dict[int, Tensor]:
    """Return the tensors in attributes of a module by their id."""
    found = {}
    for holder, key, _ in _places(module):
        for leaf in pytree.tree_leaves(holder[key]):
            if isinstance(leaf, Tensor):
                found[id(leaf)] = leaf
    return found


def named_tensors(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors in attributes of a module by the name of the attribute."""
    found: dict[str, list[Tensor]] = {}
    for holder, key, name in _places(module):
        leaves = pytree.tree_leaves(holder[key])
        found.setdefault(name, []).extend(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return found


def withhold(
    module: nn.Module,
    before: dict[int, Tensor],
    of_first: dict[str, list[Tensor]],
    fqn: str,
    num_chunks: int,
) -> None:
    """Exchange the tensors that require a gradient, and were not there before a chunked forward.

    Args:
        of_first: those that the first chunk has left. What is the same in both is of no rows, such
            as a weight that is made of parameters.
    """
    made_again = set()
    for attribute, latest in named_tensors(module).items():
        # A list may have grown from chunk to chunk.
        pairs = zip(of_first.get(attribute, ()), latest, strict=False)
        made_again |= {id(other) for one, other in pairs if _is_same(one, other)}

    def exchanged(value: Any, name: str) -> Any:
        is_left = isinstance(value, Tensor) and not isinstance(value, nn.Parameter | LeftTensor)
        if not is_left or id(value) in before or not value.requires_grad:
            return value
        if id(value) in made_again:
            return value
        with unseen_by_modes():
            made = torch.empty(0).as_subclass(LeftTensor)
        made.left = value
        made.message = (
            f"{fqn} has run in {num_chunks} chunks and left {tensor_text(value)} in its attribute "
            f"{name}, which is read outside of it: it is that of the last chunk alone. Return it "
            "from the module with the chunk dimension, or compute it outside; if no row has a part "
            "in it, name the module in row_wise="
        )
        return made

    for holder, key, name in _places(module):
        _exchange(holder, key, lambda value, name=name: exchanged(value, name))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return False  # no other chunk has made it again
    try:
        with unseen_by_modes(), torch.no_grad():
            return torch.equal(one, other)
    except RuntimeError:  # fake tensors, which have no numbers, or other dtypes
        return False


def put_back(module: nn.Module) -> None:
    """Put the tensors back that ``withhold`` has exchanged."""
    for holder, key, _ in _places(module):
        _exchange(holder, key, lambda leaf: leaf.left if isinstance(leaf, LeftTensor) else leaf)


def _exchange(holder: Any, key: Any, exchanged: Any) -> None:
    before = holder[key]
    if isinstance(before, Tensor):
        after = exchanged(before)
    else:
        after = pytree.tree_map(exchanged, before)
    leaves = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    if any(one is not other for one, other in leaves):
        holder[key] = after


def _places(module: nn.Module) -> Iterator[tuple[Any, Any, str]]:
    """Yield where attributes hold tensors or tuples: a dict or list, the key, the name."""
    own = vars(nn.Module())  # parameters, buffers, modules, hooks
    for fqn, inner in module.named_modules():
        table = vars(inner)
        for name in [name for name in table if name not in own]:
            yield from _places_within(table, name, f"{fqn}.{name}".removeprefix("."), 3)


def _places_within(holder: Any, key: Any, name: str, depth: int) -> Iterator[tuple[Any, Any, str]]:
    value = holder[key]
    if isinstance(value, Tensor | tuple):
        yield holder, key, name
        return
    if holds_as_object(value):
        value = vars(value)
    if depth and isinstance(value, dict | list):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _places_within(value, inner, name, depth - 1)
