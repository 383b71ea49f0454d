"""Runs of identical layers: where they are, the model cut to four units of each, and names in both."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import nn

from pytest_gtrainer._torch.values import modules_of
from pytest_gtrainer.tracing.stamping.signature import difference, signature

KEPT, TEMPLATE, MAX_PERIOD = 4, 1, 4
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class StampedLayers:
    """Identical layers of which four units were traced: ``layers[first : first + period * units]`` of ``container``."""

    container: str
    first: int
    period: int
    units: int

    @property
    def copies(self) -> int:
        """How many units the cut model lacks."""
        return self.units - KEPT

    def reals(self, unit: int) -> range:
        """The units of the whole model that one of the cut model stands for: several for the template."""
        first = unit if unit <= TEMPLATE else unit + self.copies
        return range(first, first + 1 + (self.copies if unit == TEMPLATE else 0))

    def place(self, index: int) -> Place | None:
        """The place of the container's layer ``index``, its unit counted in the whole model; None outside."""
        unit, layer = divmod(index - self.first, self.period)
        return Place(self, unit, layer) if 0 <= unit < self.units else None


@dataclass(frozen=True, slots=True)
class FullLayers:
    """Layers that were traced one by one, below ``module``, and why."""

    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """What ``trace_step(..., repeat_layers=)`` did: runs that it stamped, and what it traced in full."""

    stamped: tuple[StampedLayers, ...] = ()
    full: tuple[FullLayers, ...] = ()

    def beside(self, of_twin: RepeatedLayers | None) -> RepeatedLayers:
        """The same, with what was traced in full for the twin alone."""
        more = (each for each in (of_twin.full if of_twin else ()) if each not in self.full)
        told = (FullLayers(each.module, f"in the twin, {each.reason}") for each in more)
        return RepeatedLayers(self.stamped, (*self.full, *told))

    def outcomes(self) -> list[str]:
        """
        >>> RepeatedLayers((StampedLayers("layers", 0, 1, 126),), (FullLayers("", "they differ"),)).outcomes()
        ['stamped (122 of 126 in layers)', 'in full (they differ)']
        """
        stamped = [f"stamped ({s.copies * s.period} of {s.units * s.period} in {s.container})" for s in self.stamped]
        return stamped + [f"in full ({f'{each.module}: ' if each.module else ''}{each.reason})" for each in self.full]


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of a run: its unit, and which layer of the unit."""

    run: StampedLayers
    unit: int
    layer: int


def find_runs(model: nn.Module) -> tuple[list[StampedLayers], list[FullLayers]]:
    """Runs of more than four units, those with the most layers first taken; and why other containers have none."""
    runs: list[StampedLayers] = []
    full: list[FullLayers] = []
    shared = list(_shared_names(model))
    for fqn, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(_is_below(fqn, run.container) for run in runs):
            continue
        keys, layers = list(modules_of(module)), modules_of(module).values()
        if len(keys) <= KEPT:
            continue
        signatures = [signature(layer) if layer is not None else None for layer in layers]
        numbers: dict[Any, int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in signatures]
        if not (found := list(_stretches(kinds))):
            pairs = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
            told = Counter(difference(signatures[i - 1], signatures[i]) for i in pairs).most_common(1)
            reason = f"no more than {KEPT} units are alike: layers differ in {told[0][0]}" if told else "too few units"
            full.append(FullLayers(fqn, reason))
        for first, period, units in found:
            names = [f"{fqn}.{key}".lstrip(".") for key in keys[first : first + period * units]]
            tied = next((reason for name, reason in shared if any(_is_below(name, layer) for layer in names)), None)
            if tied is None:
                runs.append(StampedLayers(fqn, first, period, units))
            else:
                full.append(FullLayers(fqn, tied))
    return runs, full


def _stretches(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, period, units) of repetitions, longest first at each place, the shortest period of those.

    >>> list(_stretches([0, 1, 1, 1, 1, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]))
    [(1, 1, 5), (6, 2, 5)]
    """
    start = 0
    while start < len(kinds):
        best = 0, 0
        for period in range(1, MAX_PERIOD + 1):
            end = start
            while end + period < len(kinds) and kinds[end] == kinds[end + period]:
                end += 1
            units = (end + period - start) // period
            if units > KEPT and units * period > best[0] * best[1]:
                best = period, units
        if best != (0, 0):
            yield start, *best
        start += max(1, best[0] * best[1])


def _is_below(fqn: str, module: str) -> bool:
    return not module or fqn == module or fqn.startswith(module + ".")


def _shared_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Both names of each module and tensor that a model holds under two, with what is to be said about them."""
    first: dict[int, str] = {}
    for held in (model.named_modules, model.named_parameters, model.named_buffers):
        for name, what in held(remove_duplicate=False):
            known = first.setdefault(id(what), name)
            if known != name:
                yield from ((each, f"{name} is {known}") for each in (name, known))


class Names:
    """Whose unit a name in the cut model is of, and its name in the whole one; ``slots``: the layers of runs, whole."""

    def __init__(self, model: nn.Module, runs: Sequence[StampedLayers]) -> None:
        """Of the whole ``model``."""
        self.runs = runs
        self.slots: dict[nn.Module, tuple[StampedLayers, int]] = {}
        self._cut: list[tuple[dict[str, nn.Module | None], dict[str, nn.Module | None]]] = []
        self._layers: dict[str, tuple[Place | None, str]] = {}  # of the cut model, with their real names
        self._real: dict[Place, str] = {}
        self._found = functools.cache(self._find)
        for fqn in dict.fromkeys(run.container for run in runs):
            self._add(fqn, model.get_submodule(fqn))

    def _add(self, fqn: str, container: nn.Module) -> None:
        table, kept = modules_of(container), dict[str, nn.Module | None]()
        renumbered = not isinstance(container, nn.ModuleDict) and all(key.isdigit() for key in table)
        for index, (key, layer) in enumerate(table.items()):
            its = (run.place(index) for run in self.runs if run.container == fqn)
            place, name = next(filter(None, its), None), f"{fqn}.{key}".lstrip(".")
            if place is not None:
                self._real[place] = name
                if layer is not None:
                    self.slots[layer] = place.run, place.layer
                unit = next((unit for unit in range(KEPT) if place.unit == place.run.reals(unit)[0]), None)
                if unit is None:
                    continue
                place = Place(place.run, unit, place.layer)
            short = str(len(kept)) if renumbered else key
            kept[short] = layer
            self._layers[f"{fqn}.{short}".lstrip(".")] = place, name
        self._cut.append((table, kept))

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The model with four units of each run; layers of lists and sequences are numbered anew."""
        with ExitStack() as stack:
            for table, kept in self._cut:
                stack.enter_context(patch.dict(table, kept, clear=True))
            yield

    def _find(self, fqn: str) -> tuple[Place | None, str, str]:
        """The place of a name in the cut model, the real name of its layer, and what is behind that."""
        layer = fqn
        while layer and layer not in self._layers:
            layer = layer.rpartition(".")[0]
        return (*self._layers.get(layer, (None, layer)), fqn[len(layer) :])

    def place(self, fqn: str) -> Place | None:
        """Where a name of the cut model belongs, its unit counted there; None outside of runs."""
        return self._found(fqn)[0]

    def real(self, fqn: str, unit: int | None = None) -> str:
        """The name in the whole model; ``unit``, counted there, takes the place of its own."""
        place, layer, rest = self._found(fqn)
        if place is not None and unit is not None:
            layer = self._real[Place(place.run, unit, place.layer)]
        return layer + rest

    def stands_for(self, fqn: str) -> list[tuple[int, str]]:
        """Units and names in the whole model that a name of the cut model stands for: several in the template."""
        place = self.place(fqn)
        return [(unit, self.real(fqn, unit)) for unit in (place.run.reals(place.unit) if place else (0,))]
