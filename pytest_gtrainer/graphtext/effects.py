"""What the order of a schedule decides beyond the dataflow: random numbers, and values changed in place.

Two graphs of equal dataflow give the same results only if random numbers are drawn in the same order,
and if each reader of a value that is changed in place stands on the same side of the change. No torch
here: operators are known by name.

Terms: the *storage* of a value is that of its first operand, for a view or a change in place, else its
own. One walk over the values.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pytest_gtrainer.graphtext.dataflow import Dataflow, Value
from pytest_gtrainer.graphtext.statements import HOLE

_RANDOM = frozenset({
    "bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout_", "alpha_dropout", "feature_dropout",
    "exponential", "exponential_", "geometric_", "inductor_random", "inductor_randint", "inductor_seed",
    "inductor_seeds", "log_normal_", "multinomial", "native_dropout", "normal", "normal_", "normal_functional",
    "philox_rand", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
    "random_", "randperm", "rrelu", "rrelu_", "rrelu_with_noise", "run_and_save_rng_state",
    "run_with_rng_state", "uniform", "uniform_"
})  # fmt: skip
_OUT = f"out={HOLE}"
_VIEWS = frozenset({
    "_conj", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand",
    "expand_as", "flatten", "lift_fresh", "movedim", "narrow", "permute", "real", "reshape", "select", "set",
    "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "wait_tensor"
})  # fmt: skip
_PYTHON_IN_PLACE = frozenset({
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor", "setitem"
})  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def short_name(operator: str) -> str:
    """The operator without its namespace and overload.

    >>> short_name("aten.add_.Tensor"), short_name("operator.add"), short_name("hop.cond")
    ('add_', 'add', 'cond')
    """
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def is_random(value: Value) -> bool:
    """Whether it draws random numbers; attention does so if its dropout is not zero."""
    name = short_name(value.operator)
    if name.startswith("_scaled_dot_product"):
        return any(_is_probability(argument) for argument in value.arguments.split(", "))
    return name in _RANDOM


def _is_probability(argument: str) -> bool:
    try:
        return "." in argument and 0 < float(argument) <= 1
    except ValueError:
        return False


def written(value: Value) -> list[int]:
    """The values that a statement changes in place."""
    if (place := value.arguments.find(_OUT)) >= 0:
        return [source for source in [value.operand_at(place + len(_OUT) - 1)] if source is not None]
    if not _changes(value.operator):
        return []
    if value.arguments.startswith("[") and not value.operator.startswith("operator."):
        return list(value.sources)  # of several lists we do not know which are written
    return list(value.sources[:1])


@functools.lru_cache(maxsize=1 << 12)
def _changes(operator: str) -> bool:
    """Whether an operator changes something in place, by its name."""
    name = short_name(operator)
    if operator.startswith("operator."):
        return name in _PYTHON_IN_PLACE
    return name.endswith("_") and not name.endswith("__")


@functools.lru_cache(maxsize=1 << 12)
def _is_view(operator: str) -> bool:
    return short_name(operator) in _VIEWS


@dataclass(frozen=True, slots=True)
class Effects:
    """In the order of the schedule: who draws, and what happens to each storage that is changed.

    ``histories`` has for each such storage (by one value of it) its changes, each with the readers
    since the change before.
    """

    draws: list[int] = field(default_factory=list)
    histories: dict[int, list[tuple[int | None, list[int]]]] = field(default_factory=dict)


def effects(graph: Dataflow) -> Effects:
    """The effects of a graph; values are told by their places."""
    found = Effects([place for place, value in enumerate(graph.values) if value.operator and is_random(value)])
    targets = [written(value) for value in graph.values]
    if not any(targets):
        return found
    storages = _storages(graph, targets)
    changed = {storages[target] for of in targets for target in of}
    readers: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(graph.values):
        own = {storages[target] for target in targets[place]}
        for storage in {storages[source] for source in value.sources} & changed:
            if storage in own:
                found.histories.setdefault(storage, []).append((place, readers.pop(storage, [])))
            elif storages[place] != storage:
                readers[storage].append(place)
    for storage, rest in readers.items():
        found.histories.setdefault(storage, []).append((None, rest))
    return found


def _storages(graph: Dataflow, targets: Sequence[Sequence[int]]) -> list[int]:
    """For each value one that stands for its storage, given what each changes in place."""
    storages: list[int] = []
    for place, (value, own) in enumerate(zip(graph.values, targets, strict=True)):
        base = own or (value.sources[:1] if _is_view(value.operator) else ())
        storages.append(storages[base[0]] if base else place)
    return storages


def histories_by_digest(found: Effects, digests: Sequence[int]) -> Iterator[tuple[int, list[object]]]:
    """Each storage with what happens to it, in a form that two graphs may be compared by."""
    for storage, changes in found.histories.items():
        yield (
            storage,
            [
                (None if change is None else digests[change], sorted(digests[reader] for reader in readers))
                for change, readers in changes
            ],
        )
