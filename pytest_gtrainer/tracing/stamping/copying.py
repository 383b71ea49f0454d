"""Stamping: the whole graph from a cut one, with the template copied for every unit that was not traced.

Nodes are made in the order of a full trace: within a pass the copies stand beside the template. A copy's operands are
those of the template, seen from its own unit. Names, ``seq_nr``, memory and data-dependent symbols go on as they do
from the template to the next unit. Cost: linear in the nodes of the whole graph.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.chunking import renew_symbols, shape_env_of
from pytest_gtrainer._torch.graph_modules import empty_graph
from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer._torch.stamping import Renamed, copy_facts, is_storage_of, new_storage
from pytest_gtrainer._torch.values import SYMBOLIC, FakeTensor, pytree, storage_id
from pytest_gtrainer.tracing.stamping.runs import TEMPLATE
from pytest_gtrainer.tracing.stamping.units import INNER, Pass, Units, fqn_of, named_as, split_name
from pytest_gtrainer.tracing.stamping.verdict import Refused, tensors_of


def stamp(units: Units, trainable: Sequence[str]) -> fx.Graph:
    """The graph of the whole model, whose parameters that require a gradient are ``trainable``, or Refused."""
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
    """Where a node is made: pass, unit of the cut and of the whole model, place in it, copies before it."""

    visit: Pass | None = None
    unit: int = 0
    real: int = 0
    index: int = 0
    before: int = 0

    @property
    def is_copy(self) -> bool:
        return self.unit == TEMPLATE != self.real


_OUTSIDE = _Spot()


class _Stamping:
    """What has been made so far: ``made`` by the cut graph's node, in passes by pass, unit of the whole and index."""

    def __init__(self, units: Units) -> None:
        self.units, self.names = units, units.names
        self.graph = empty_graph(units.graph)
        self.made: dict[Any, fx.Node] = {}
        self.renamings: dict[tuple[Any, int], Renamed] = defaultdict(partial(Renamed, {}))
        self.fixed: set[tuple[fx.Node, str]] = set()  # metadata of the template without symbols
        self.moved_names: dict[str, int] = defaultdict(int)
        self.inputs = 0
        counted = [_Counted.of(visit, units.last_forward) for visit in units.passes]
        self.counted = [each for each in counted if each.step]

    def visit(self, visit: Pass) -> None:
        run = visit.run
        for unit, nodes in visit.units.items():
            reals = run.reals(unit)
            for before, real in enumerate(reversed(reals) if visit.descends else reals):
                for index, node in enumerate(nodes):
                    self.emit(node, _Spot(visit, unit, real, index, before))
            for base, step in visit.name_steps.items() if unit == TEMPLATE else ():
                self.moved_names[base] += run.copies * step
        values = [node.meta["val"] for node in visit.units[TEMPLATE] if node.meta.get("unbacked_bindings")]
        for real in run.reals(TEMPLATE)[1:] if values and visit.kind == "forward" else ():
            copy_facts(shape_env_of(values), self.renamings[run, real].renaming)

    def emit(self, node: fx.Node, spot: _Spot) -> None:
        if node.op == "placeholder":
            name: Any = f"arg{self.inputs}_1"
            target, args, kwargs = name, (), {}
            self.inputs += 1
        else:
            base, number = split_name(node)
            number += self.moved_names[base] + (
                spot.before * spot.visit.name_steps[base] if spot.visit and spot.before else 0
            )
            name, target = f"{base}_{number}" if number else base, node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: self.seen(operand, spot))
        made = append_node(self.graph, name, node.op, target, args, kwargs)
        made.meta = self._meta(node, spot)
        self.made[(spot.visit, spot.real, spot.index) if spot.visit else node] = made

    def seen(self, other: fx.Node, spot: _Spot) -> fx.Node:
        """The whole graph's node for one of the cut graph's that the node at ``spot`` refers to."""
        if other not in self.units.at:
            return self.made[other]
        visit, unit, index = self.units.at[other]
        is_inside = spot.visit is not None and spot.visit.run is visit.run
        return self.made[visit, spot.real + unit - spot.unit if is_inside else visit.run.reals(unit)[0], index]

    def _meta(self, node: fx.Node, spot: _Spot) -> dict[str, Any]:
        meta = dict(node.meta)
        if "seq_nr" in meta:
            steps = spot.visit.number_steps if spot.visit and spot.unit in (TEMPLATE, INNER) else None
            moves = steps is None or steps[spot.index] != 0
            meta["seq_nr"] += sum(each.added(meta["seq_nr"], spot, moves) for each in self.counted)
        real = spot.real if spot.visit else None
        if "custom" in meta:
            meta["custom"] = dict(named_as(self.names, meta["custom"], real) or {})
        if meta.get("gt_input", {}).get("kind", "input") != "input":
            meta["gt_input"] = {**meta["gt_input"], "fqn": self.names.real(fqn_of(node), real)}
        copied = self.renamings[(spot.visit.run, spot.real) if spot.visit and spot.is_copy else (None, 0)]
        if spot.is_copy and meta.get("unbacked_bindings"):
            made = {key: meta[key] for key in ("unbacked_bindings", "val")}
            renew_symbols(made, copied.renaming)
            meta["unbacked_bindings"] = made["unbacked_bindings"]
        if "val" in meta:
            meta["val"] = self._value(node, spot, copied)
        for key in ("tensor_meta", "eager_input_vals") if copied.renaming else ():
            if key in meta and (node, key) not in self.fixed:
                meta[key] = _renamed(node.meta[key], copied)
                if meta[key] is node.meta[key]:
                    self.fixed.add((node, key))
        return meta

    def _value(self, node: fx.Node, spot: _Spot, copied: Renamed) -> Any:
        """The node's value, on the memory of the node that it shares it with in the whole graph."""
        new: dict[int, torch.UntypedStorage] = {}

        def on_its_memory(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return copied.number(value)
            known = storage_id(value)
            maker, index = self.units.makers[known]
            storage = value.untyped_storage()
            if maker is not node:
                storage = tensors_of(self.seen(maker, spot))[index].untyped_storage()
            elif spot.is_copy:
                if known not in new:
                    new[known] = new_storage(copied.number(storage.nbytes()))
                storage = new[known]
            if not copied.renaming and is_storage_of(storage, value):
                return value
            return copied.on_storage(value, storage)

        value = node.meta["val"]
        return on_its_memory(value) if isinstance(value, FakeTensor) else pytree.tree_map(on_its_memory, value)

    def output(self, trainable: Sequence[str]) -> None:
        """Loss and gradients, these in the order of the whole model's parameters."""
        output = self.units.graph.output_node()
        loss, *gradients = output.args[0]
        found: dict[str, Any] = {}
        for fqn, gradient in zip(output.meta["gt_outputs"][1:], gradients, strict=True):
            place = self.names.place(fqn)
            for real, name in self.names.stands_for(fqn):
                spot = _OUTSIDE
                if place is not None and gradient is not None:
                    visit, unit, _ = self.units.at.get(gradient, (None, 0, 0))
                    if visit is None or visit.run is not place.run or unit != place.unit:
                        raise Refused(place.run.container, f"the gradient of {fqn} is not made in its layer")
                    spot = _Spot(visit, unit, real)
                found[name] = gradient and self.seen(gradient, spot)
        results = [self.seen(loss, _OUTSIDE), *(found[fqn] for fqn in trainable)]
        self.graph.output(type(output.args[0])(results)).meta = self._meta(output, _OUTSIDE)


@dataclass(frozen=True, slots=True)
class _Counted:
    """The ``step`` numbers of ``seq_nr`` that the thread counts in each unit of a pass: copies move what follows."""

    visit: Pass
    first: int
    last: int
    behind: int
    step: int

    @classmethod
    def of(cls, visit: Pass, last_forward: int) -> "_Counted":
        is_backward = visit.kind == "backward"
        numbers: dict[int, list[int]] = {}
        for unit, nodes in visit.units.items():
            told = [node.meta["seq_nr"] for node in nodes if "seq_nr" in node.meta]
            numbers[unit] = [number for number in told if (number > last_forward) == is_backward]
        every = [number for found in numbers.values() for number in found] or [0]
        one, other = (min(numbers[unit], default=0) for unit in (TEMPLATE, INNER))
        steps = zip(visit.units[TEMPLATE], visit.number_steps, strict=True)
        counts = {abs(step) for node, step in steps if is_backward and node.meta.get("seq_nr", -1) > last_forward}
        if len(counts) > 1:
            raise Refused(visit.run.container, f"the thread's counter goes up by {sorted(counts)} in one unit")
        return cls(visit, min(every), max(every), max(one, other), abs(one - other))

    def added(self, number: int, spot: _Spot, moves: bool) -> int:
        """What the pass's copies add to a number of the node at ``spot``, which may be one of them."""
        run = self.visit.run
        if moves and spot.visit is not None and spot.visit.run is run and self.first <= number <= self.last:
            before = 1 + run.copies - spot.real if self.visit.descends else spot.real - 1
            return self.step * min(max(before, 0), run.copies)
        return self.step * run.copies if number >= self.behind else 0


def _renamed(value: Any, copied: Renamed) -> Any:
    """Metadata in the copy's symbols: the same object without any of them."""
    if isinstance(value, FakeTensor):
        numbers = *value.size(), *value.stride(), value.storage_offset()
        is_fixed = not any(isinstance(number, SYMBOLIC) for number in numbers)
        return value if is_fixed else copied.on_storage(value, value.untyped_storage())
    if isinstance(value, list | tuple):
        items = [_renamed(item, copied) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        table = {key: _renamed(item, copied) for key, item in value.items()}
        return value if all(table[key] is value[key] for key in value) else table
    return copied.number(value)
