"""Represent the values of a graph on all ranks.

A value is *uniform*, one object for all ranks, or ``PerRank``. Its *sharing* says which ranks have
the same object: the ranks of a group share what they gathered. An operator runs once for each class
of ranks that share all its operands. The state of the random generator is such a value, too.

Before ranks write into a tensor, they get memory of their own: of every live value that looks into
the tensor's memory, through views too, each rank gets a copy.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.values import pytree, storage_id
from pytest_gtrainer.graph.nodes import tensors_in
from pytest_gtrainer.numerics.bits import span
from pytest_gtrainer.worlds import ranks_by

Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Classes of ranks that share a value; ``Sharings`` has one instance for equal classes."""

    class_of: tuple[int, ...]  # by rank, the number of its class
    classes: tuple[tuple[int, ...], ...]  # the ranks of each class


class PerRank(list[Any]):
    """One value for each rank, in their order. Anything else is uniform: the same on all ranks."""

    __slots__ = ("sharing",)

    def __init__(self, values: Iterable[Any], sharing: Sharing | None = None) -> None:
        super().__init__(values)
        self.sharing = sharing


class Sharings:
    """The sharings of a world of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: dict[tuple[int, ...], Sharing] = {}
        self.uniform = self.by_key([None] * size)

    def by_key(self, keys: Sequence[Hashable]) -> Sharing:
        """Return the sharing in which ranks with equal keys share."""
        numbers: dict[Hashable, int] = {}
        class_of = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        if class_of not in self._known:
            classes = ranks_by(enumerate(class_of)).values()
            self._known[class_of] = Sharing(class_of, tuple(map(tuple, classes)))
        return self._known[class_of]

    def of(self, value: Any) -> Sharing:
        """Return the sharing of a value; ranks share objects, and equal whole numbers.

        >>> Sharings(3).of(PerRank([2000, int("2000"), 1])).classes
        ((0, 1), (2,))
        """
        if type(value) is not PerRank:
            return self.uniform
        if value.sharing is None:
            keys: list[Hashable] = []
            for own in value:
                # By identity: 0.0 == -0.0 and 1 == True, but operators give other results for them.
                # CPython shares only small integers, so all integers go by value.
                keys.append(own if type(own) is int else id(own))
            value.sharing = self.by_key(keys)

        return value.sharing

    def common(self, sharings: Iterable[Sharing]) -> Sharing:
        """Return the sharing of a result: ranks share it if they share all operands."""
        distinct = set(sharings) - {self.uniform} or {self.uniform}
        if len(distinct) == 1:
            return distinct.pop()
        classes = [sharing.class_of for sharing in distinct]
        return self.by_key(list(zip(*classes, strict=True)))

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


def storages_of(value: Any) -> set[int]:
    """Return the storages of all tensors in ``value``, of all ranks if it is ``PerRank``."""
    return set(map(storage_id, tensors_in(value)))


def make_private(values: Values, written: Iterable[fx.Node], size: int) -> set[int]:
    """Rebind ``values`` so that ranks can write to ``written`` unseen by each other.

    Returns:
        The storages that were copied; none if the ranks have memory of their own already.
    """
    storages = storages_of([values[node] for node in written])
    # Views as well: what a rank writes has to be seen through each view of its own copy.
    views: Values = {}
    for node, value in values.items():
        if not storages.isdisjoint(storages_of(value)):
            views[node] = value

    if _are_apart(views.values(), storages):
        return set()

    copies = []
    for rank in range(size):
        own = [at(value, rank) for value in views.values()]
        copies.append(_clone_storages(own, storages))

    for node, of_ranks in zip(views, zip(*copies, strict=True), strict=True):
        values[node] = PerRank(of_ranks)
    return storages


def _are_apart(values: Iterable[Any], storages: set[int]) -> bool:
    """Return True if no value is uniform, and no two ranks reach the same byte of ``storages``."""
    spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for value in values:
        if type(value) is not PerRank:
            return False
        for rank, own in enumerate(value):
            for tensor in tensors_in(own):
                spans[storage_id(tensor)].append((*_byte_span(tensor), rank))

    # Ranks may have slices of one storage: the shards that one split made are such.
    for storage in storages:
        end, owner = 0, -1
        for start, stop, rank in sorted(spans[storage]):
            if start < end and owner != rank:
                return False
            if stop > end:
                end, owner = stop, rank

    return True


def _byte_span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the end of its last one."""
    first = tensor.storage_offset()
    end = first + span(tensor.shape, tensor.stride())
    return first * tensor.itemsize, end * tensor.itemsize


def _clone_storages(own: list[Any], storages: set[int]) -> list[Any]:
    """Return one rank's values with each of ``storages`` replaced by a clone of it."""
    clones: dict[int, Tensor] = {}

    def move_to_clone(tensor: Tensor) -> Tensor:
        storage = storage_id(tensor)
        if storage not in storages:
            return tensor
        # ``UntypedStorage.clone`` is no operator: a dispatch mode that follows tensors through a
        # replay would not see this copy.
        if storage not in clones:
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage(), 0, (count,), (1,))
            clones[storage] = whole.clone()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return own.set_(clones[storage].untyped_storage(), *place)

    moved: list[Any] = pytree.tree_map_only(Tensor, move_to_clone, own)
    return moved


class RankRandomStates:
    """Generator states, one for all ranks or one for each; a run continues from them."""

    def __init__(self, states: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
        """``states`` are by default those of the process."""
        if states is None:
            states = torch.get_rng_state()
        if not isinstance(states, torch.Tensor):
            states = PerRank(states)
        self.states: Any = states

    @classmethod
    def of_ranks(cls, states: Sequence[torch.Tensor]) -> "RankRandomStates":
        """Return the states of the ranks; one uniform state if all are equal."""
        if all(torch.equal(states[0], state) for state in states):
            return cls(states[0])
        return cls(states)

    def copy(self) -> "RankRandomStates":
        """Return the same states; a run that continues from them does not change these."""
        return RankRandomStates(self.states)

    @property
    def uniform(self) -> bool:
        return type(self.states) is not PerRank

    @contextmanager
    def drawn_by(self, rank: int | None, size: int) -> Iterator[None]:
        """Draw from the state of ``rank`` inside; with None from the uniform one, for all ranks."""
        if rank is not None and self.uniform:
            self.states = PerRank([self.states] * size)
        torch.set_rng_state(at(self.states, rank or 0))
        # No ``finally``: after an operator that raised there is no state to continue from.
        yield
        if rank is None:
            self.states = torch.get_rng_state()
        else:
            self.states[rank] = torch.get_rng_state()
