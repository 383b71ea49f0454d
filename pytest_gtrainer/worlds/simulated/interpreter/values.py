"""Values of a graph on all ranks.

A value is *uniform*, one object for all ranks, or ``PerRank``. Its *kind* says which ranks share an
object: the ranks of a group share what they gathered. An operator runs once for each class of ranks
that share all its operands. The state of the random generator is such a value, too.

Before ranks write into a tensor, they get memory of their own: of every live value that looks into
the tensor's memory, through views too, each rank gets a copy.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import pytree, storage_id
from pytest_gtrainer.numerics.bits import span
from pytest_gtrainer.worlds import ranks_by

Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Classes of ranks that share a value; ``Kinds`` has one instance for equal classes."""

    class_of: tuple[int, ...]  # by rank, the number of its class
    classes: tuple[tuple[int, ...], ...]  # the ranks of each class


class PerRank(list[Any]):
    """One value for each rank, in their order. Anything else is uniform: the same on all ranks."""

    __slots__ = ("kind",)

    def __init__(self, values: Iterable[Any], kind: Kind | None = None) -> None:
        super().__init__(values)
        self.kind = kind


class Kinds:
    """The kinds of a world of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: dict[tuple[int, ...], Kind] = {}
        self.uniform = self.by_key([None] * size)

    def by_key(self, keys: Sequence[Hashable]) -> Kind:
        """Return the kind in which ranks with equal keys share."""
        numbers: dict[Hashable, int] = {}
        class_of = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        if class_of not in self._known:
            classes = ranks_by(enumerate(class_of)).values()
            self._known[class_of] = Kind(class_of, tuple(map(tuple, classes)))
        return self._known[class_of]

    def of(self, value: Any) -> Kind:
        """Return the kind of a value; ranks share objects, and equal whole numbers.

        >>> Kinds(3).of(PerRank([2000, int("2000"), 1])).classes
        ((0, 1), (2,))
        """
        if type(value) is not PerRank:
            return self.uniform
        if value.kind is None:
            # By identity, as 0.0 and -0.0 are equal, and so are 1 and True, but not their results.
            value.kind = self.by_key([own if type(own) is int else id(own) for own in value])
        return value.kind

    def common(self, kinds: Iterable[Kind]) -> Kind:
        """Return the kind of a result: ranks share it if they share all operands."""
        distinct = set(kinds) - {self.uniform} or {self.uniform}
        if len(distinct) == 1:
            return distinct.pop()
        return self.by_key(list(zip(*(kind.class_of for kind in distinct), strict=True)))

    def value(self, own: Sequence[Any]) -> Any:
        """Return the value that is ``own[rank]`` on every rank."""
        value = PerRank(own)
        return own[0] if self.of(value) is self.uniform else value


def at(value: Any, rank: int) -> Any:
    """Return the value of one rank."""
    return value[rank] if type(value) is PerRank else value


def of_rank(value: Any, rank: int) -> Any:
    """Return the value of one rank, which may hold others, uniform or per rank.

    >>> of_rank([1, PerRank([2, 3])], rank=1)
    (1, 3)
    """
    if type(value) is PerRank:
        return value[rank]
    if isinstance(value, list | tuple):
        return tuple(of_rank(item, rank) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value: itself, or those in a tuple, list or dict, of all ranks."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def storages_of(value: Any) -> set[int]:
    """Return the storages of all tensors in ``value``."""
    return set(map(storage_id, tensors_in(value)))


def make_private(values: Values, written: Iterable[fx.Node], size: int) -> set[int]:
    """Rebind ``values`` so that ranks can write to ``written`` unseen by each other.

    Returns:
        The storages that were copied; none if the ranks have memory of their own already.
    """
    storages = storages_of([values[node] for node in written])
    shared = [node for node, value in values.items() if not storages.isdisjoint(storages_of(value))]
    if _are_apart([values[node] for node in shared], storages):
        return set()

    copies = []
    for rank in range(size):
        copies.append(_over_clones([at(values[node], rank) for node in shared], storages))
    values.update(zip(shared, map(PerRank, zip(*copies, strict=True)), strict=True))
    return storages


def _are_apart(values: list[Any], storages: set[int]) -> bool:
    """Return True if no value is uniform, and no two ranks reach the same byte of ``storages``."""
    if not set(map(type, values)) <= {PerRank}:
        return False
    spans = set()
    for value in values:
        for rank, own in enumerate(value):
            spans |= {(*_span(tensor), rank) for tensor in tensors_in(own)}

    # By storage, the end of the spans so far that reach furthest, and the rank that it belongs to.
    furthest: dict[int, tuple[int, int]] = {}
    for storage, start, stop, rank in sorted(spans):
        end, owner = furthest.get(storage, (0, rank))
        if storage in storages and start < end and owner != rank:
            return False
        furthest[storage] = max((end, owner), (stop, rank))
    return True


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and its first byte there and the end of its last one."""
    first = tensor.storage_offset()
    end = first + span(tensor.shape, tensor.stride())
    return storage_id(tensor), first * tensor.itemsize, end * tensor.itemsize


def _over_clones(own: list[Any], storages: set[int]) -> list[Any]:
    """Return one rank's values with each of ``storages`` replaced by a clone of it."""
    clones: dict[int, Tensor] = {}

    def over_clone(tensor: Tensor) -> Tensor:
        storage = storage_id(tensor)
        if storage not in storages:
            return tensor
        # All views of a storage look into one clone, so a write is seen through each of them.
        # An operator clones it, so a dispatch mode that follows tensors sees the copy.
        if storage not in clones:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage(), 0, (count,), (1,))
            clones[storage] = whole.clone()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return own.set_(clones[storage].untyped_storage(), *place)

    moved: list[Any] = pytree.tree_map_only(Tensor, over_clone, own)
    return moved


class RankRandomStates:
    """Generator states, one for all ranks or one for each; a run continues from them."""

    def __init__(self, states: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
        """``states`` are by default those of the process."""
        if states is None:
            states = torch.get_rng_state()
        self.states: Any = states if isinstance(states, torch.Tensor) else PerRank(states)

    @classmethod
    def of_ranks(cls, states: Sequence[torch.Tensor]) -> "RankRandomStates":
        """Return the states of the ranks; one uniform state if all are equal."""
        return cls(states[0] if all(torch.equal(states[0], state) for state in states) else states)

    def copy(self) -> "RankRandomStates":
        """Return the same states; a run that continues from them does not change these."""
        return RankRandomStates(self.states.clone() if self.uniform else list(self.states))

    @property
    def uniform(self) -> bool:
        return type(self.states) is not PerRank

    @contextmanager
    def drawn_by(self, rank: int | None, size: int) -> Iterator[None]:
        """Draw from the state of ``rank`` inside; with None from the uniform one, for all ranks."""
        if rank is not None and self.uniform:
            self.states = PerRank([self.states] * size)
        torch.set_rng_state(at(self.states, rank or 0))
        yield
        if rank is None:
            self.states = torch.get_rng_state()
        else:
            self.states[rank] = torch.get_rng_state()
