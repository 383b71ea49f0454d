"""Runs of identical layers: where they are, the model cut to four units of each, and names in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from pytest_gtrainer._torch.values import buffers_of, modules_of, parameters_of
from pytest_gtrainer.tracing.stamping.signature import difference, signature
from pytest_gtrainer.tracing.stamping.verdict import FullLayers, StampedLayers

KEPT, TEMPLATE, MAX_PERIOD = 4, 1, 4
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Run:
    """Layers ``first`` to ``first + period * units`` of a container repeat a unit of ``period`` layers."""

    container: str
    first: int
    period: int
    units: int

    @property
    def copies(self) -> int:
        """How many units the cut model lacks."""
        return self.units - KEPT

    @property
    def last(self) -> int:
        """The first layer behind it."""
        return self.first + self.period * self.units

    def dropped(self) -> range:
        """Layers that the cut model lacks: behind the template."""
        start = self.first + (TEMPLATE + 1) * self.period
        return range(start, start + self.copies * self.period)

    def told(self) -> StampedLayers:
        return StampedLayers(self.container, self.first, self.period, self.units)


def find_runs(model: nn.Module) -> tuple[list[Run], list[FullLayers]]:
    """Runs of more than four units, those with the most layers first taken; and why other containers have none."""
    runs: list[Run] = []
    full: list[FullLayers] = []
    shared = shared_modules(model)
    for fqn, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(_is_below(fqn, run.container) for run in runs):
            continue
        layers = list(modules_of(module).values())
        if len(layers) <= KEPT:
            continue
        signatures = [signature(layer) if layer is not None else None for layer in layers]
        numbers: dict[Any, int] = {}
        kinds = [numbers.setdefault(each, len(numbers)) for each in signatures]
        found = [Run(fqn, *stretch) for stretch in _stretches(kinds)]
        if not found:
            pairs = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
            told = Counter(difference(signatures[i - 1], signatures[i]) for i in pairs).most_common(1)
            reason = f"no more than {KEPT} units are alike: layers differ in {told[0][0]}" if told else "too few units"
            full.append(FullLayers(fqn, reason))
        for run in found:
            names = [f"{fqn}.{key}".lstrip(".") for key in list(modules_of(module))[run.first : run.last]]
            tied = next((reason for name, reason in shared if any(_is_below(name, layer) for layer in names)), None)
            if tied is None:
                runs.append(run)
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


def shared_modules(model: nn.Module) -> list[tuple[str, str]]:
    """Names of modules and tensors that a model holds under two names, with what is to be said about each."""
    first: dict[int, str] = {}
    found = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        held = [(fqn, module)] if fqn else []
        held += [(f"{fqn}.{n}".lstrip("."), t) for t_of in (parameters_of, buffers_of) for n, t in t_of(module).items()]
        for name, what in held:
            known = first.setdefault(id(what), name) if what is not None else name
            if known != name:
                found += [(name, f"{name} is {known}"), (known, f"{name} is {known}")]
    return found


@contextmanager
def cut(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """The model with four units of each run; layers of lists and sequences are numbered anew."""
    saved = []
    try:
        for fqn in dict.fromkeys(run.container for run in runs):
            table = modules_of(model.get_submodule(fqn))
            saved.append((table, dict(table)))
            kept = cut_keys(model.get_submodule(fqn), [run for run in runs if run.container == fqn])
            layers = [table[key] for key in kept.values()]
            table.clear()
            table.update(zip(kept, layers, strict=True))
        yield
    finally:
        for table, layers_of_all in saved:
            table.clear()
            table.update(layers_of_all)


def cut_keys(container: nn.Module, runs: Sequence[Run]) -> dict[str, str]:
    """The cut container's keys, with those of the real one."""
    dropped = {index for run in runs for index in run.dropped()}
    kept = [key for index, key in enumerate(modules_of(container)) if index not in dropped]
    named = isinstance(container, nn.ModuleDict) or not all(key.isdigit() for key in modules_of(container))
    return dict(zip(kept if named else map(str, range(len(kept))), kept, strict=True))


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of the cut model: its run by number, None outside; its unit there; layer in the unit."""

    run: int | None
    unit: int
    layer: int


class Names:
    """Names in the cut model, of modules and tensors: whose unit they are of, and their names in the whole model.

    ``slots`` gives the layers of runs, whole: each one's run by number, and its place in the unit.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Run]) -> None:
        """Of the whole ``model``."""
        self.runs = runs
        self._layers: dict[str, dict[str, tuple[Place, str]]] = {}
        self._real: dict[str, list[str]] = {}
        self._parsed: dict[str, tuple[str, Place, str, str] | None] = {}
        self.slots: dict[nn.Module, tuple[int, int]] = {}
        for fqn in dict.fromkeys(run.container for run in runs):
            container = model.get_submodule(fqn)
            self._real[fqn] = list(modules_of(container))
            index = {key: place for place, key in enumerate(self._real[fqn])}
            its = [(number, run) for number, run in enumerate(runs) if run.container == fqn]
            for number, run in its:
                layers = list(modules_of(container).values())[run.first : run.last]
                self.slots.update((one, (number, i % run.period)) for i, one in enumerate(layers) if one is not None)
            keys = cut_keys(container, [run for _, run in its])
            self._layers[fqn] = {key: (self._place(index[real], its), real) for key, real in keys.items()}

    @staticmethod
    def _place(index: int, runs: list[tuple[int, Run]]) -> Place:
        for number, run in runs:
            if run.first <= index < run.last:
                unit, layer = divmod(index - run.first, run.period)
                return Place(number, unit if unit <= TEMPLATE else unit - run.copies, layer)
        return Place(None, 0, 0)

    def _parse(self, fqn: str) -> tuple[str, Place, str, str] | None:
        """Container, place, real key and the rest of a name in the cut model."""
        if fqn not in self._parsed:
            self._parsed[fqn] = None
            for container, layers in self._layers.items():
                prefix = container + "." if container else ""
                key, _, rest = fqn[len(prefix) :].partition(".")
                if fqn.startswith(prefix) and key in layers:
                    self._parsed[fqn] = (container, *layers[key], rest)
        return self._parsed[fqn]

    def place(self, fqn: str) -> Place | None:
        """Where a name of the cut model belongs; None outside of runs."""
        found = self._parse(fqn)
        return found[1] if found and found[1].run is not None else None

    def real(self, fqn: str, unit: int | None = None) -> str:
        """The name in the whole model; ``unit``, counted there, takes the place of its own."""
        found = self._parse(fqn)
        if found is None:
            return fqn
        container, place, key, rest = found
        if unit is not None and place.run is not None:
            run = self.runs[place.run]
            key = self._real[container][run.first + unit * run.period + place.layer]
        return ".".join(part for part in (container, key, rest) if part)

    def stands_for(self, fqn: str) -> list[tuple[int, str]]:
        """Units and names in the whole model that a name of the cut model stands for: several in the template."""
        place = self.place(fqn)
        if place is None or place.run is None:
            return [(0, self.real(fqn))]
        copies = self.runs[place.run].copies
        first = place.unit if place.unit <= TEMPLATE else place.unit + copies
        return [(u, self.real(fqn, u)) for u in range(first, first + 1 + copies * (place.unit == TEMPLATE))]
