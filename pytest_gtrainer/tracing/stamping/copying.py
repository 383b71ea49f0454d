"""Stamping: the whole graph from a cut one, with the template copied for every unit that was not traced.

Nodes are made in the order of a full trace: within a pass the copies stand beside the template. A copy's operands are
those of the template, seen from its own unit. Names, ``seq_nr``, memory and data-dependent symbols go on as they do
from the template to the next unit. Cost: linear in the nodes of the whole graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import Renaming, renew_symbols
from pytest_gtrainer._torch.graph_modules import empty_graph
from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer._torch.stamping import SYMBOLIC, copy_facts, is_storage_of, new_storage, on_storage, renamed_number
from pytest_gtrainer._torch.values import FakeTensor, storage_id
from pytest_gtrainer.tracing.stamping.runs import TEMPLATE, Place
from pytest_gtrainer.tracing.stamping.units import INNER, Pass, Units, fqn_of, named_as, split_name
from pytest_gtrainer.tracing.stamping.verdict import Refused, tensors_of


def stamp(units: Units, trainable: Sequence[str]) -> fx.Graph:
    """The graph of the whole model, whose parameters that require a gradient are ``trainable``.

    Raises:
        Refused: a gradient of the template is not made in its unit, or symbols are made in a way that cannot be copied.
    """
    stamping = _Stamping(units)
    for stretch in units.stretches:
        if isinstance(stretch, Pass):
            stamping.visit(stretch)
        elif stretch.op != "output":
            stamping.emit(stretch, _OUTSIDE)
    stamping.output(trainable)
    return stamping.graph


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a node is made: in which pass, for which unit of the whole model, and how many units stand before it there.

    ``index`` is the node's place in its unit; ``count`` by how much the thread's counter goes up per unit.
    """

    visit: Pass | None
    unit: int
    real: int
    index: int = 0
    before: int = 0
    count: int = 0

    @property
    def is_copy(self) -> bool:
        return self.unit == TEMPLATE != self.real


_OUTSIDE = _Spot(None, 0, 0)


class _Stamping:
    """What has been made so far; ``copied`` maps a copy's pass, unit of the whole model and index to its node."""

    def __init__(self, units: Units) -> None:
        self.units, self.names = units, units.names
        self.graph = empty_graph(units.graph)
        self.kept: dict[fx.Node, fx.Node] = {}
        self.copied: dict[tuple[int, int, int], fx.Node] = {}
        self.renamings: dict[tuple[int, int], Renaming] = defaultdict(dict)
        self.moved_names: dict[str, int] = defaultdict(int)
        self.moved_count = self.inputs = 0
        self.forwards = [_Counted.of(visit, units) for visit in units.passes if visit.kind == "forward"]

    def visit(self, visit: Pass) -> None:
        copies = self.units.run_of(visit).copies
        steps = zip(visit.units[TEMPLATE], visit.number_steps, strict=True)
        counts = {abs(step) for node, step in steps if self._is_count(node)} or {0}
        if len(counts) > 1:
            raise self.units.refuse(visit, f"the thread's counter goes up by {sorted(counts)} in one unit")
        (count,) = counts
        for unit, nodes in visit.units.items():
            reals = [unit if unit <= TEMPLATE else unit + copies]
            if unit == TEMPLATE:
                reals = [*range(TEMPLATE, TEMPLATE + copies + 1)][:: -1 if visit.descends else 1]
            for before, real in enumerate(reals):
                for index, node in enumerate(nodes):
                    self.emit(node, _Spot(visit, unit, real, index, before, count))
            if unit == TEMPLATE:
                self.moved_count += copies * count
                for base, step in visit.name_steps.items():
                    self.moved_names[base] += copies * step
        for real in range(TEMPLATE + 1, TEMPLATE + copies + 1):
            renaming = self.renamings.get((visit.run, real))
            if renaming and visit.kind == "forward":
                values = [node.meta.get("val") for node in visit.units[TEMPLATE] if node.meta.get("unbacked_bindings")]
                sizes = [extent for value in values if isinstance(value, torch.Tensor) for extent in value.shape]
                symbolic = [value for value in (*values, *sizes) if isinstance(value, SYMBOLIC)]
                copy_facts(symbolic[0].node.shape_env, renaming)

    def emit(self, node: fx.Node, spot: _Spot) -> None:
        visit = spot.visit
        if node.op == "placeholder":
            name: Any = f"arg{self.inputs}_1"
            target, args, kwargs = name, (), {}
            self.inputs += 1
        else:
            base, number = split_name(node)
            number += self.moved_names[base] + (spot.before * visit.name_steps[base] if visit and spot.before else 0)
            name, target = f"{base}_{number}" if number else base, node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: self.seen(operand, node, spot))
        made = append_node(self.graph, name, node.op, target, args, kwargs)
        made.meta = self._meta(node, spot)
        if visit and spot.is_copy:
            self.copied[self.units.number[id(visit)], spot.real, spot.index] = made
        else:
            self.kept[node] = made

    def seen(self, other: fx.Node, node: fx.Node, spot: _Spot) -> fx.Node:
        """The whole graph's node for one of the cut graph's that ``node`` refers to."""
        if spot.visit is None or other not in self.units.at or self.units.at[other][0].run != spot.visit.run:
            return self.kept[other]
        visit, unit, index = self.units.at[other]
        return self._of_unit(visit, spot.real + unit - spot.unit, index)

    def _of_unit(self, visit: Pass, real: int, index: int) -> fx.Node:
        copies = self.units.run_of(visit).copies
        if TEMPLATE < real <= TEMPLATE + copies:
            return self.copied[self.units.number[id(visit)], real, index]
        return self.kept[visit.units[real if real <= TEMPLATE else real - copies][index]]

    def _meta(self, node: fx.Node, spot: _Spot) -> dict[str, Any]:
        meta = dict(node.meta)
        if "seq_nr" in meta:
            meta["seq_nr"] = self._number(node, spot)
        real = spot.real if spot.visit else None
        if "custom" in meta:
            meta["custom"] = dict(named_as(self.names, meta["custom"], real) or {})
        if meta.get("gt_input", {}).get("kind", "input") != "input":
            meta["gt_input"] = {**meta["gt_input"], "fqn": self.names.real(fqn_of(node), real)}
        renaming = self.renamings[spot.visit.run, spot.real] if spot.visit and spot.is_copy else {}
        if spot.is_copy and meta.get("unbacked_bindings"):
            made = {key: meta[key] for key in ("unbacked_bindings", "val")}
            renew_symbols(made, renaming)
            meta["unbacked_bindings"] = made["unbacked_bindings"]
        if "val" in meta:
            meta["val"] = self._value(node, spot, renaming)
        for key in ("tensor_meta", "eager_input_vals") if renaming else ():
            if key in meta:
                meta[key] = _renamed(meta[key], renaming)
        return meta

    def _is_count(self, node: fx.Node) -> bool:
        """Whether ``seq_nr`` is how far the thread had counted in the backward, and not that of a forward node."""
        return bool(node.meta.get("seq_nr", -1) > self.units.last_forward)

    def _number(self, node: fx.Node, spot: _Spot) -> int:
        """``seq_nr`` in the whole graph, up to what the state of the missing layers adds to all."""
        number: int = node.meta["seq_nr"]
        if self._is_count(node):
            return number + sum(each.added for each in self.forwards) + self.moved_count + spot.before * spot.count
        step = spot.visit.number_steps[spot.index] if spot.visit and spot.unit in (TEMPLATE, INNER) else 0
        own = [each for each in self.forwards if spot.visit and each.visit.run == spot.visit.run and each.has(number)]
        behind = sum(each.added for each in self.forwards if number >= each.inner and not (step and each in own))
        return number + behind + (spot.real - spot.unit) * step

    def _value(self, node: fx.Node, spot: _Spot, renaming: Renaming) -> Any:
        """The node's value, on the memory of the node that it shares it with in the whole graph."""
        new: dict[int, torch.UntypedStorage] = {}

        def on_its_memory(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(on_its_memory, value))
            if not isinstance(value, FakeTensor):
                return renamed_number(value, renaming)
            known = storage_id(value)
            maker, index = self.units.makers[known]
            storage = value.untyped_storage()
            if maker is not node:
                storage = tensors_of(self.seen(maker, node, spot))[index].untyped_storage()
            elif spot.is_copy:
                if known not in new:
                    new[known] = new_storage(renamed_number(storage.nbytes(), renaming))
                storage = new[known]
            if not renaming and is_storage_of(storage, value):
                return value
            return on_storage(value, storage, renaming)

        return on_its_memory(node.meta["val"])

    def output(self, trainable: Sequence[str]) -> None:
        """Loss and gradients, these in the order of the whole model's parameters."""
        output = self.units.graph.output_node()
        loss, *gradients = output.args[0]
        found: dict[str, Any] = {}
        for fqn, gradient in zip(output.meta["gt_outputs"][1:], gradients, strict=True):
            for real, name in self.names.stands_for(fqn):
                found[name] = gradient and self._gradient(gradient, self.names.place(fqn), real, fqn)
        made = self.graph.output(type(output.args[0])([self.kept[loss], *(found[fqn] for fqn in trainable)]))
        made.meta = self._meta(output, _OUTSIDE)

    def _gradient(self, gradient: fx.Node, place: Place | None, real: int, fqn: str) -> fx.Node:
        if place is None or place.run is None:
            return self.kept[gradient]
        if gradient in self.units.at and self.units.at[gradient][0].run == place.run:
            visit, unit, index = self.units.at[gradient]
            if unit == place.unit:
                return self._of_unit(visit, real, index)
        raise Refused(self.names.runs[place.run].container, f"the gradient of {fqn} is not made in its layer")


@dataclass(frozen=True, slots=True)
class _Counted:
    """The forward pass of a run by ``seq_nr``: where it begins and ends, and its inner unit begins; what copies add."""

    visit: Pass
    first: int
    last: int
    inner: int
    added: int

    @classmethod
    def of(cls, visit: Pass, units: Units) -> _Counted:
        numbers = {unit: [n.meta["seq_nr"] for n in nodes if "seq_nr" in n.meta] for unit, nodes in visit.units.items()}
        every = [number for found in numbers.values() for number in found] or [0]
        template, inner = (min(numbers[unit], default=0) for unit in (TEMPLATE, INNER))
        return cls(visit, min(every), max(every), inner, (inner - template) * units.run_of(visit).copies)

    def has(self, number: int) -> bool:
        return self.first <= number <= self.last


def _renamed(value: Any, renaming: Renaming) -> Any:
    """Metadata in the copy's symbols."""
    if isinstance(value, FakeTensor):
        return on_storage(value, value.untyped_storage(), renaming)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_renamed(item, renaming) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([_renamed(item, renaming) for item in value])
    if isinstance(value, dict):
        return {key: _renamed(item, renaming) for key, item in value.items()}
    return renamed_number(value, renaming)
