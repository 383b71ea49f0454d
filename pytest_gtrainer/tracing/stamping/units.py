"""The units of a cut trace: which nodes are whose, and whether the inner two are alike.

A *pass* is a stretch of the graph that visits the units of one run one after another, up or down: parameters, buffers,
forward, backward. A node belongs to the unit whose module it names, or whose state alone it reads; one that names no
layer, between two units of a pass, to the one before it. The rest is *outside*.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from pytest_gtrainer._torch.chunking import Expression, Symbol
from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.graph.nodes import node_fqn
from pytest_gtrainer.tracing.model import KEY
from pytest_gtrainer.tracing.stamping.runs import KEPT, TEMPLATE, Names, Place, StampedLayers
from pytest_gtrainer.tracing.stamping.verdict import Refused, described, differing_key, shown, symbol_pairs, tensors_of

INNER, EDGES = TEMPLATE + 1, (0, KEPT - 1)


@dataclass(slots=True, eq=False)
class Pass:
    """One visit to all units of a run, in the graph's order; ``units`` are nodes by unit, as they are visited.
    ``number_steps`` tell by how much ``seq_nr`` differs from the template to the next unit, per node of the template;
    ``name_steps`` by how much numbers of names ("mm_7") go up from one visited unit to the next, per base."""

    run: StampedLayers
    kind: str
    units: dict[int, list[fx.Node]]
    number_steps: list[int] = field(default_factory=list)
    name_steps: dict[str, int] = field(default_factory=dict)

    @property
    def descends(self) -> bool:
        return next(iter(self.units)) > 0

    def goes_on(self, place: Place, kind: str) -> bool:
        """Whether a node of this place and kind belongs to the unit visited now or to the next one."""
        unit = next(reversed(self.units))
        following = unit + (-1 if self.descends else 1)
        is_next = place.unit == unit or (place.unit == following and len(self.units) < KEPT)
        return (self.run, self.kind) == (place.run, kind) and is_next


class Units:
    """The cut graph by passes, checked, or Refused; ``at`` is each node's pass, unit and place in the unit."""

    def __init__(self, graph: fx.Graph, names: Names) -> None:
        self.graph, self.names = graph, names
        self.stretches = list(self._passes())
        self.passes = [stretch for stretch in self.stretches if isinstance(stretch, Pass)]
        units = [(visit, unit, nodes) for visit in self.passes for unit, nodes in visit.units.items()]
        self.at: dict[fx.Node, tuple[Pass, int, int]] = {
            node: (visit, unit, index) for visit, unit, nodes in units for index, node in enumerate(nodes)
        }
        self.makers: dict[int, tuple[fx.Node, int]] = {}
        for node in graph.nodes:
            for index, tensor in enumerate(tensors_of(node)):
                self.makers.setdefault(storage_id(tensor), (node, index))
        forward = [n for n in graph.nodes if n.op != "output" and "seq_nr" in n.meta and kind_of(n) == "forward"]
        self.last_forward = max((node.meta["seq_nr"] for node in forward), default=-1)
        self._check_reads()
        symbols: dict[StampedLayers, dict[Symbol, Expression]] = defaultdict(dict)
        for visit in self.passes:
            self._check_inner_units(visit, symbols[visit.run])

    def relative(self, node: fx.Node, run: StampedLayers, unit: int) -> Any:
        """Which node, seen from a unit of a run: equal for two units that see the same."""
        visit, its_unit, index = self.at.get(node, (None, 0, 0))
        if visit is None or visit.run is not run:
            return "outside", node.name
        return "unit", id(visit), its_unit - unit, index

    def _passes(self) -> Iterator[Pass | fx.Node]:
        current: Pass | None = None
        between: list[fx.Node] = []
        for node in self.graph.nodes:
            place, kind = self._place(node), kind_of(node)
            if place is None:
                between.append(node)
                continue
            if current is not None and current.goes_on(place, kind):
                current.units[next(reversed(current.units))] += between
                current.units.setdefault(place.unit, []).append(node)
            else:
                yield from self._completed(current, node)
                yield from between
                if place.unit in EDGES:
                    current = Pass(place.run, kind, {place.unit: [node]})
                else:
                    where = f"%{node.name} ({fqn_of(node)})"
                    raise Refused(place.run.container, f"layers do not come one after another: {where}")
            between = []
        yield from self._completed(current, node)
        yield from between

    def _place(self, node: fx.Node) -> Place | None:
        """Of a node that names no layer and reads a tensor of a layer's state, and nothing else, that layer."""
        place = self.names.place(fqn_of(node)) if node.op != "output" else None
        if place is None and node.op == "call_function" and [n.op for n in node.all_input_nodes] == ["placeholder"]:
            return self.names.place(fqn_of(node.all_input_nodes[0]))
        return place

    def _completed(self, visit: Pass | None, node: fx.Node) -> Iterator[Pass]:
        if visit is None:
            return
        if len(visit.units) < KEPT:
            reached = f"%{node.name} ({fqn_of(node) or node.op})"
            raise Refused(visit.run.container, f"layers do not come one after another: {reached} comes between them")
        yield visit

    def _check_reads(self) -> None:
        """Units read their neighbours at most. What reads out of a run is compared in the outline."""
        for node, (visit, unit, _) in self.at.items():
            makers = [self.makers[storage_id(tensor)][0] for tensor in tensors_of(node)]
            for operand in [*node.all_input_nodes, *makers]:
                its_visit, its_unit, _ = self.at.get(operand, (None, 0, 0))
                if its_visit is not None and its_visit.run is visit.run and abs(its_unit - unit) > 1:
                    place = f"%{node.name} ({fqn_of(node) or 'the model itself'})"
                    reason = f"{place} reads %{operand.name} ({fqn_of(operand)}) of another unit"
                    raise Refused(visit.run.container, reason)

    def _check_inner_units(self, visit: Pass, symbols: dict[Symbol, Expression]) -> None:
        """The template and the next unit: the same operators on the same operands, with the same metadata."""
        nodes, others, container = visit.units[TEMPLATE], visit.units[INNER], visit.run.container
        if len(nodes) != len(others):
            raise Refused(container, f"units {TEMPLATE} and {INNER} have {len(nodes)} and {len(others)} nodes")
        for node, other in zip(nodes, others, strict=True):
            symbols.update(symbol_pairs(node, other))
            if (why := inner_difference(self, visit.run, node, other, symbols)) is not None:
                where = f"%{node.name} and %{other.name} of two inner units ({fqn_of(node)})"
                raise Refused(container, f"{where} differ: {why}")
            visit.number_steps.append(other.meta.get("seq_nr", 0) - node.meta.get("seq_nr", 0))
            (base, number), (_, its_number) = split_name(node), split_name(other)
            step = abs(its_number - number)
            if visit.name_steps.setdefault(base, step) != step:
                raise Refused(container, f"names of {base} do not go up evenly")


def inner_difference(
    units: Units, run: StampedLayers, node: fx.Node, other: fx.Node, symbols: dict[Symbol, Expression]
) -> str | None:
    """In what a node of the template differs from the one of the next unit, each seen from its own unit."""
    if node.op == "get_attr":
        return f"attribute {node.target} of the graph, which is not copied"
    if node.op != other.op or (node.op != "placeholder" and node.target != other.target):
        return f"{node.target} and {other.target}"
    if split_name(node)[0] != split_name(other)[0]:
        return "their names"
    pairs = ((node, TEMPLATE), (other, INNER))
    sides = [(each, partial(units.relative, run=run, unit=unit)) for each, unit in pairs]
    operands, theirs = (fx.map_arg((each.args, each.kwargs), seen) for each, seen in sides)
    if described(operands, symbols) != described(theirs, {}):
        return f"operands {shown(node.args)} and {shown(other.args)}"
    if (key := differing_key(node, other, symbols, but=("seq_nr", "custom", "gt_input"))) is not None:
        return f"meta {key!r}, {shown(node.meta.get(key))} and {shown(other.meta.get(key))}"
    custom = [named_as(units.names, each.meta.get("custom"), INNER) for each in (node, other)]
    if custom[0] != custom[1]:
        return f"meta 'custom', {custom[0]} and {custom[1]}"
    if units.names.real(fqn_of(node), INNER) != units.names.real(fqn_of(other), INNER):
        return f"modules {fqn_of(node)} and {fqn_of(other)}"
    memory, its = (
        [(seen(maker), index) for maker, index in (units.makers[storage_id(t)] for t in tensors_of(each))]
        for each, seen in sides
    )
    return None if memory == its else "the memory that they share"


def named_as(names: Names, custom: dict[str, Any] | None, unit: int | None) -> dict[str, Any] | None:
    """A node's ``custom`` with the name that its module has in the whole model."""
    if not custom or KEY not in custom:
        return custom
    return {**custom, KEY: names.real(custom[KEY], unit)}


def fqn_of(node: fx.Node) -> str:
    """The module of a node; of a placeholder the tensor's own name."""
    given = node.meta.get("gt_input")
    return (given["fqn"] if given["kind"] != "input" else "") if given else node_fqn(node)


def kind_of(node: fx.Node) -> str:
    """What kind of pass a node is of."""
    if node.op == "placeholder":
        return str(node.meta["gt_input"]["kind"])
    return "backward" if node.meta.get("autograd_backward") else "forward"


def split_name(node: fx.Node) -> tuple[str, int]:
    """A name's base and number: ("mm", 7) of mm_7; inputs are numbered by their place."""
    if node.op == "placeholder":
        return "arg", 0
    head, _, tail = node.name.rpartition("_")
    return (head, int(tail)) if head and tail.isdigit() else (node.name, 0)
