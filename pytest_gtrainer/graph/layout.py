"""Bucket layouts: which parameter sits at which byte of which collective. They are compared before
bits.

``bucket_layout`` reads one off a graph's nodes, ``references.eager.eager_bucket_layout`` off
``fully_shard``'s buffers. Limit: of a payload only one end has names in a graph. Bits find a pass
that packs in one order, unpacks in another.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import is_control_dependency
from pytest_gtrainer._torch.process_groups import group_ranks, plain_reduction
from pytest_gtrainer._torch.values import HigherOrderOperator
from pytest_gtrainer.facts import FailedCheck, counted
from pytest_gtrainer.graph.bucket_plan import layer_of
from pytest_gtrainer.graph.collectives import (
    chain_to_output,
    group_of,
    hides,
    input_name,
    kind_of,
    launches,
    output_name,
    ranks_given,
    reduction_of,
    results_of,
    wait_of,
)
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopted
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    argument_of,
    bodies_of,
    direction,
    is_view,
    node_fqn,
    short_name,
    walked,
)
from pytest_gtrainer.graph.packing import (
    Arrival,
    State,
    Unread,
    arrivals,
    computes,
    nbytes_of,
    packed,
    reduces,
)

ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME = "all_gather", "reduce_scatter", "all_reduce"
KINDS = (ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)
_SPLITS = (torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor)
_OWN_COPIES = ("_to_copy", "convert_element_type", "index", "index_select", "gather", "take")
"""Casts, and rows that a model picks from a parameter, as those of chosen experts."""
_MOST_LINES, _MOST_MOVED = (
    24,
    3,
)  # a failure names enough to see what happened, not every parameter of 126 layers


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's part of one rank's slice of a payload: ``nbytes`` at byte ``offset``."""

    parameter: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """One collective: what it is, over which ranks, and who sits where.

    ``padding`` are bytes of one rank's slice in which no parameter sits, as zeros between or behind
    them.
    """

    collective: str
    dtype: torch.dtype
    ranks: tuple[int, ...]
    op: str  # the reduction's, "" for an all-gather
    slots: tuple[Slot, ...]
    directions: tuple[
        str, ...
    ] = ()  # in which a graph issues it; eager FSDP2 gathers one payload in both
    padding: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their FQNs in the order in which they are packed."""
        return tuple(slot.parameter for slot in self.slots)

    @property
    def label(self) -> str:
        """The bucket in a reader's words: its layer, or its outermost modules."""
        return "+".join(
            dict.fromkeys(layer_of(fqn) or fqn.split(".")[0] for fqn in self.parameters)
        )


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All payloads of a graph or of a model, in the order they are issued.

    Attributes:
        payloads: the payloads.
        kept: parameters that a graph's backward reads from an all-gather of the forward. They stay
            unsharded between.
    """

    payloads: tuple[Payload, ...]
    kept: tuple[str, ...] = field(
        default=(), compare=False
    )  # where values are read is no part of a layout

    def of(self, collective: str) -> tuple[Payload, ...]:
        """The payloads of one kind of collective."""
        return tuple(payload for payload in self.payloads if payload.collective == collective)

    def __str__(self) -> str:
        lines = []
        for payload in self.payloads:
            op, dtype = (
                f" {payload.op}" if payload.op else "",
                str(payload.dtype).removeprefix("torch."),
            )
            ranks = counted(len(payload.ranks), "rank")
            lines.append(f"{payload.label}: {payload.collective}{op} {dtype} over {ranks}")
            lines += [
                f"  {slot.offset:>10}  {slot.nbytes:>10}  {slot.parameter}"
                for slot in payload.slots
            ]
        return "\n".join(lines)


class LayoutDifference(FailedCheck):
    """Two layouts differ; the message names bucket and parameters."""

    __module__ = (
        "pytest_gtrainer"  # the name that users import, and that fits into a line of a summary
    )


def bucket_layout(gm: AnyGraph, *, names: Names | None = None) -> BucketLayout:
    """Return which parameter lies at which byte of the graph's all-gathers and of its reductions of
    gradients.

    A reduction is a reduce-scatter, or an all-reduce (over replicas under hybrid sharding, or of
    what is not sharded). Collectives of activations alone are left out. Offsets are bytes inside
    one rank's slice of the payload. A payload that is gathered once in each direction is listed
    once, with both directions; a second time in one direction it is listed again. A coalesced
    collective is one payload for each tensor. ``names`` as for ``graphtext.render``.

    Raises:
        PlanError: a collective of parameters or gradients has no wait.
        UnreadLayout: the places of parameters or gradients in a collective cannot be read: the
            message names the node.
        ValueError: a process group of the graph does not exist here, and no text that it was parsed
            from said its ranks.
    """
    gm = adopted(gm, names)
    reader = _Reader(gm)
    reader.refuse_nested(gm)
    payloads: list[Payload] = []
    kept: dict[str, None] = {}
    for node, sent in packed(gm).items():
        for payload in reader.payloads(node, sent):
            payloads.append(payload)
            if payload.collective == ALL_GATHER_NAME and payload.directions == (FORWARD,):
                kept.update(dict.fromkeys(_read_in_backward(node, payload)))
    payloads.sort(key=lambda payload: payload.collective != ALL_GATHER_NAME)
    merged: dict[tuple[Payload, int], list[str]] = {}
    repeated: Counter[Payload] = Counter()
    for payload in payloads:
        merged.setdefault((replace(payload, directions=()), repeated[payload]), []).extend(
            payload.directions
        )
        repeated[payload] += 1
    listed = (replace(payload, directions=tuple(ways)) for (payload, _), ways in merged.items())
    return BucketLayout(tuple(listed), tuple(kept))


class UnreadLayout(ValueError):
    """A collective of parameters or gradients whose layout cannot be read; the message names the
    node.
    """


class _Reader:
    """Tells the payloads of one graph's collectives."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._output = gm.graph.output_node()
        self._inputs = {
            node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        }
        self._outputs: dict[fx.Node, list[int]] = {}
        for index, result in enumerate(results_of(gm)):
            if isinstance(result, fx.Node):
                self._outputs.setdefault(result, []).append(index)
        told = [node.meta["gt_input"] for node in self._inputs if "gt_input" in node.meta]
        self._parameters: set[str] = (
            set()
        )  # of which gradients may be results, where these have names
        if "gt_outputs" in (
            known := self._output.meta
        ):  # a backward alone does not take all of them
            self._parameters = {each["fqn"] for each in told if each["kind"] == "parameter"}
            self._parameters.update(
                known.get("gt_managed_order", ()), known.get("gt_parameters", ())
            )

    def payloads(self, node: fx.Node, sent: list[State]) -> Iterable[Payload]:
        """Of one collective; several where it is coalesced, none where it is of activations."""
        kind, names = (
            kind_of(node) if node.op == "call_function" else "",
            self._names_in(node, sent),
        )
        is_read = kind and not hides(node)
        if kind == ALL_GATHER_NAME and is_read:
            for state in sent:
                if isinstance(state, Unread) and names:
                    raise _unread(node, "gathers", names, state.node)
                parts = state if isinstance(state, tuple) else ()
                placed = zip(
                    parts,
                    itertools.accumulate((part.nbytes for part in parts), initial=0),
                    strict=False,
                )
                slots = [
                    Slot(self._name(part.source, node), at, part.nbytes)
                    for part, at in placed
                    if part.source
                ]
                if slots:
                    size = sum(part.nbytes for part in parts)
                    yield self._payload(ALL_GATHER_NAME, node, tuple(slots), size)
        elif kind in (REDUCE_SCATTER_NAME, ALL_REDUCE_NAME) and is_read:
            yield from self._reductions(kind, node)
        elif names:
            raise _unread(node, "moves", names, node)
        elif reached := [
            name
            for arrival in arrivals(node, self._outputs)
            for name in self._gradients(arrival, node)
        ]:
            raise _unread(node, "gives", reached, node)

    def refuse_nested(self, gm: fx.GraphModule) -> None:
        """Refuse a graph inside the graph that gathers parameters or reduces gradients: the outer
        one tells neither.
        """
        for node in gm.graph.nodes:
            if not isinstance(node.target, HigherOrderOperator) or is_control_dependency(node):
                continue
            for body in bodies_of(gm, node).values():
                launch = next(_parameter_collectives(body), None)
                given = [
                    each
                    for each in node.all_input_nodes
                    if each in self._inputs and is_parameter(each)
                ]
                if launch is not None and (given or direction(node) == BACKWARD):
                    names = [self._name(each, node) for each in given] or [
                        node_fqn(node) or "the root"
                    ]
                    wrong = f"{node.name} ({node.target}) of {', '.join(names[:_MOST_MOVED])} runs a graph of its own"
                    advice = "a layout reads the collectives of the outer graph alone, so inline that graph first"
                    raise UnreadLayout(f"{wrong}, in which {launch.name} is: {advice}")

    def _payload(self, kind: str, node: fx.Node, slots: tuple[Slot, ...], size: int) -> Payload:
        """The payload of one rank's slice of ``size`` bytes."""
        value = node.meta.get("val")
        if isinstance(value, list | tuple):
            value = value[0]
        elif getattr(node.target, "namespace", "") == "_c10d_functional":
            wait_of(node)
        ranks = _ranks_of(node)
        if (stated := argument_of(node, "group_size")) not in (None, len(ranks)):
            raise UnreadLayout(
                f"the collective {node.name} says group_size={stated}, and its group has "
                f"{counted(len(ranks), 'rank')}: give it the size of its group"
            )
        padding = size - sum(slot.nbytes for slot in slots)
        op, directions = reduction_of(node) or "", (direction(node),)
        return Payload(kind, value.dtype, ranks, op, slots, directions, padding)

    def _names_in(self, launch: fx.Node, sent: list[State]) -> list[str]:
        """The parameters that go in; of an unread value those above the node that lost their order."""
        found: dict[fx.Node, None] = {}
        for state in sent:
            if isinstance(state, tuple):
                found |= {part.source: None for part in state if part.source}
            elif isinstance(state, Unread):
                above = walked([state.node], operator.attrgetter("all_input_nodes"))
                found |= dict.fromkeys(
                    sorted(one for one in above if one.op == "placeholder" and is_parameter(one))
                )
        return [self._name(node, launch) for node in found]

    def _name(self, source: fx.Node, launch: fx.Node) -> str:
        if source.op == "get_attr":  # a parameter that the graph's module holds
            return str(source.target)
        return input_name(source, self._inputs[source], _module_of(launch))

    def _reductions(self, kind: str, launch: fx.Node) -> Iterable[Payload]:
        """Follow the results to the outputs: order and widths come from the splits on the way."""
        results = [launch]
        if isinstance(launch.meta.get("val"), list | tuple):
            items = (user for user in launch.users if user.target is operator.getitem)
            results = sorted(items, key=lambda item: item.args[1])
        for result in results:
            found: dict[tuple[int, int], list[Arrival]] = {}
            for arrival in arrivals(result, self._outputs):
                found.setdefault((arrival.piece.at, arrival.piece.numel), []).append(arrival)
            named = {
                at: [n for one in each for n in self._gradients(one, launch)]
                for at, each in found.items()
            }
            if any(named.values()):
                for at, numel in [place for place, names in named.items() if not names]:
                    lies_over = any(
                        names and at <= low and low + n <= at + numel
                        for (low, n), names in named.items()
                    )
                    users = [one.used_by or result for one in found[at, numel]]
                    if (taking := [user for user in users if not reduces(user)]) or not lies_over:
                        others = [name for names in named.values() for name in names]
                        raise _unread(launch, "gives", others, (taking or users)[0])
                named = {place: names for place, names in named.items() if names}
                self._refuse_shared_places(launch, found, named)
                width = result.meta["val"].element_size()
                slots = [
                    Slot(names[0], at * width, numel * width)
                    for (at, numel), names in sorted(named.items())
                ]
                yield self._payload(kind, launch, tuple(slots), nbytes_of(result.meta["val"]))
            else:
                for arrival in itertools.chain(*found.values()):
                    self._refuse_unknown(launch, arrival)

    def _refuse_shared_places(
        self,
        launch: fx.Node,
        found: dict[tuple[int, int], list[Arrival]],
        named: dict[tuple[int, int], list[str]],
    ) -> None:
        """Gradients that seem to lie on each other: an operator on the way picks elements in an
        unknown way.
        """
        end, last = 0, ""
        for (at, numel), names in sorted(named.items()):
            places = {
                one.piece.node: None for one in found[at, numel] if self._gradients(one, launch)
            }
            if at < end or len(places) > 1:
                raise _unread(
                    launch, "gives", [*([last] if at < end else []), *names], next(iter(places))
                )
            end, last = at + numel, names[0]

    def _gradients(self, arrival: Arrival, launch: fx.Node) -> list[str]:
        """The names of the gradients among the outputs that a part of a result arrives at."""
        names = [
            output_name(self._output, position, _module_of(launch)) for position in arrival.outputs
        ]
        if kind_of(launch) == REDUCE_SCATTER_NAME and not arrival.added:
            return names
        # an all-reduced loss, or what a chunk of activations is added to, is no gradient
        if self._parameters:
            return [name for name in names if name in self._parameters]
        return names if direction(launch) == BACKWARD else []

    def _refuse_unknown(self, launch: fx.Node, arrival: Arrival) -> None:
        """Where a result of the backward ends at an operator of which nobody knows what it does."""
        user = arrival.used_by
        if (
            user is None
            or computes(user)
            or launches(user.target)
            or isinstance(user.target, HigherOrderOperator)
        ):
            return
        if (chain := chain_to_output(user, self._output)) is not None:
            outputs = tuple(self._outputs.get([user, *chain][-1], ()))
            if names := self._gradients(Arrival(arrival.piece, outputs, added=True), launch):
                raise _unread(launch, "gives", names, user)


def _unread(launch: fx.Node, verb: str, names: list[str], at: fx.Node) -> UnreadLayout:
    more = f" and {len(names) - _MOST_MOVED} more" if len(names) > _MOST_MOVED else ""
    target = getattr(at.target, "name", lambda: at.target)()
    why = f"at node {at.name} ({target}) their order is lost"
    if at is launch:
        why = f"{target} is no collective that a layout knows"
    return UnreadLayout(
        f"the collective {launch.name} {verb} {', '.join(names[:_MOST_MOVED])}{more}, and the place of each in it "
        f"cannot be read: {why}. Pack by cat, copies, views and torch's own bucketing operators around functional "
        "collectives, or compare bits"
    )


def _read_in_backward(launch: fx.Node, payload: Payload) -> Iterator[str]:
    """Yield the parameters of an all-gather of the forward whose gathered values a node of the
    backward reads.

    Each value on the way holds the same elements of every rank's row: all of them at the launch,
    and one parameter's behind the split of a bucket. Where nobody can say which elements a node
    takes, it may read any of the value's.
    """
    width = payload.dtype.itemsize
    row = sum(slot.nbytes for slot in payload.slots) // width
    todo = [(launch, 0, row)]
    seen = set()
    read: set[str] = set()
    while todo:
        value = node, begin, size = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        inside = [
            slot.parameter
            for slot in payload.slots
            if slot.offset < (begin + size) * width and begin * width < slot.offset + slot.nbytes
        ]
        for user in node.users:
            if user.op == "output":
                continue
            below = _unpacked(node, begin, size, user)
            if direction(user) == BACKWARD:
                read.update(inside)
            elif below is not None:
                todo += below
            elif len(inside) > 1:  # a cast of the whole bucket, say
                todo.append((user, begin, size))
    yield from (slot.parameter for slot in payload.slots if slot.parameter in read)


def _unpacked(
    node: fx.Node, begin: int, size: int, user: fx.Node
) -> list[tuple[fx.Node, int, int]] | None:
    """Return what ``user`` makes of elements of each rank's row, in the form of
    ``_read_in_backward``.

    None means that it makes new numbers of them. A copy of what lies one behind the other is the
    model's own, and so are casts and picked rows: FSDP2 keeps these for the backward, too.
    """
    if user.target in _SPLITS:
        widths = [part.shape[-1] for part in user.meta["val"]]
        if sum(widths) == size:
            begins = list(itertools.accumulate(widths, initial=begin))
            items = [item for item in user.users if item.target is operator.getitem]
            return [(item, begins[item.args[1]], widths[item.args[1]]) for item in items]
    value, name = node.meta.get("val"), short_name(user)
    if name == "clone" and isinstance(value, torch.Tensor):
        moves = not value.is_contiguous()
    else:
        moves = is_view(user.target) or not (name in _OWN_COPIES or computes(user))
    return [(user, begin, size)] if moves else None


def _parameter_collectives(body: fx.GraphModule) -> Iterator[fx.Node]:
    """All-gathers of a body's own inputs, and its reduce-scatters."""
    for launch, sent in packed(body).items():
        parts = [part for state in sent if isinstance(state, tuple) for part in state]
        gathers = kind_of(launch) == ALL_GATHER_NAME and any(
            part.source is not None for part in parts
        )
        if gathers or kind_of(launch) == REDUCE_SCATTER_NAME:
            yield launch


def is_parameter(node: fx.Node) -> bool:
    """Return whether an input is a parameter, or nobody says what it is."""
    return bool(node.meta.get("gt_input", {"kind": "parameter"})["kind"] == "parameter")


def _ranks_of(launch: fx.Node) -> tuple[int, ...]:
    """Of the group in this process; of a graph parsed where there is none, as its text says."""
    if (name := group_of(launch)) is None:
        if (given := ranks_given(launch)) is None:
            raise UnreadLayout(
                f"the collective {launch.name} ({launch.target}) names no process group"
            )
        return given
    try:
        return group_ranks(name)
    except ValueError:
        ranks: tuple[int, ...] | None = (
            getattr(launch.graph.owning_module, "meta", {}).get("gt_groups", {}).get(name)
        )
        if ranks is None:
            raise
        return ranks


def _module_of(launch: fx.Node) -> str:
    """Return where a collective belongs: its bucket's first module, else the module it was traced
    in.
    """
    bucket = launch.meta.get("fsdp_bucket")
    return bucket["plan_fqns"][0] if bucket else node_fqn(launch)


@facts.check
def assert_same_layout(
    actual: BucketLayout | AnyGraph,
    expected: BucketLayout | AnyGraph,
    *,
    actual_is: str = "graph",
    names: Names | None = None,
) -> tuple[str, ...]:
    """Assert that ``actual`` has the collectives of ``expected``: group, dtype, op, each parameter
    at its byte offset.

    Collectives are paired by the parameters that they share. Their order and their directions are
    not compared. A graph is read by ``bucket_layout``, with ``names``. ``actual_is`` names the
    first side in messages.

    A backward that gathers a bucket again may leave out parameters that it does not read, as
    biases: ``fully_shard`` gathers the whole group, and nobody reads the rest. What it reads it
    must gather again.

    Returns:
        A line for each such bucket, with what ``expected`` gathers in the backward and nobody
        reads.

    Raises:
        LayoutDifference: names the bucket and the parameters that lie elsewhere.
        ValueError: a layout is empty, so there is nothing to compare, or has a collective of
            another kind.
    """
    __tracebackhide__ = True
    actual, expected = (
        each if isinstance(each, BucketLayout) else bucket_layout(each, names=names)
        for each in (actual, expected)
    )
    for which, layout in ((actual_is, actual), ("expected", expected)):
        if not layout.payloads:
            wrong = f"the {which} layout has no collective of parameters, so there is nothing to compare"
            raise ValueError(f"{wrong}: shard the model (data_parallel, fully_shard) first")
        if strange := {payload.collective for payload in layout.payloads} - {*KINDS}:
            raise ValueError(
                f"the {which} layout has a collective {strange.pop()!r}; expected {', '.join(KINDS)}"
            )
    problems: list[str] = []
    unread: list[str] = []
    for kind in KINDS:
        rest = list(actual.of(kind))
        once: list[Payload] = []  # of ``expected``, what ``actual`` does not gather in the backward
        for wanted in expected.of(kind):
            shared = [len(set(payload.parameters) & set(wanted.parameters)) for payload in rest]
            if not any(shared):
                problems.append(
                    f"bucket {wanted.label!r}: no {kind} of {', '.join(wanted.parameters)}"
                )
                continue
            found = rest.pop(shared.index(max(shared)))
            problems += _compare_payloads(found, wanted)
            if kind == ALL_GATHER_NAME and found.directions == (FORWARD,):
                once.append(wanted)
        article = "a" if kind == REDUCE_SCATTER_NAME else "an"
        for extra in rest:
            whole = next(
                (wanted for wanted in once if set(extra.parameters) < set(wanted.parameters)), None
            )
            if whole is not None and extra.directions == (BACKWARD,):
                once.remove(whole)
                problems += _compare_regathered(extra, whole, actual.kept)
                left_out = [name for name in whole.parameters if name not in extra.parameters]
                unread.append(
                    f"bucket {whole.label!r}: no node of the backward reads {', '.join(left_out)}"
                )
                continue
            named = ", ".join(extra.parameters)
            problems.append(
                f"bucket {extra.label!r}: {article} {kind} of {named} that is not expected"
            )
    facts.notify(
        "layouts", actual=actual, expected=expected, problems=problems, actual_is=actual_is
    )
    if problems:
        left = len(problems) - _MOST_LINES
        more = [f"and {counted(left, 'more difference')}"] if left > 0 else []
        raise LayoutDifference("\n".join(["bucket layouts differ", *problems[:_MOST_LINES], *more]))
    return tuple(unread)


def _compare_regathered(again: Payload, whole: Payload, kept: Collection[str]) -> Iterable[str]:
    """Yield what is wrong with a bucket that the backward gathers again without some of its
    parameters.
    """
    missing = [name for name in whole.parameters if name not in again.parameters]
    for name in missing:
        if name in kept:
            yield (
                f"bucket {whole.label!r}: the backward gathers the bucket again without {name}, and reads the "
                "forward's copy of it, which stays unsharded: gather again whatever the backward reads"
            )
    slots: list[Slot] = []
    for slot in whole.slots:
        if slot.parameter in again.parameters:
            slots.append(replace(slot, offset=sum(earlier.nbytes for earlier in slots)))
    yield from _compare_payloads(again, replace(whole, slots=tuple(slots)))


def _compare_payloads(actual: Payload, wanted: Payload) -> Iterable[str]:
    where = f"bucket {wanted.label!r}, {wanted.collective}"
    for what in ("dtype", "ranks"):
        if (ours := getattr(actual, what)) != (theirs := getattr(wanted, what)):
            yield f"{where}: {what} is {ours}, expected {theirs}"
    if plain_reduction(actual.op, len(wanted.ranks)) != plain_reduction(
        wanted.op, len(wanted.ranks)
    ):
        premultiplied = "premul_sum" in actual.op + wanted.op
        why = (
            " (premul_sum multiplies each rank's gradient before the sum, and rounds the product)"
            * premultiplied
        )
        yield f"{where}: op is {actual.op}, expected {wanted.op}{why}"
    if actual.padding != wanted.padding:
        yield (f"{where}: {actual.padding} bytes belong to no parameter, expected {wanted.padding}")
    for payload in (actual, wanted):
        yield from (f"{where}: {fault}" for fault in _faults(payload))
    ours_at, theirs_at = (
        {slot.parameter: slot for slot in payload.slots} for payload in (actual, wanted)
    )
    yield from (
        f"{where}: {parameter} is missing" for parameter in theirs_at if parameter not in ours_at
    )
    yield from (
        f"{where}: {parameter} does not belong here"
        for parameter in ours_at
        if parameter not in theirs_at
    )
    shared = [(ours_at[slot.parameter], slot) for slot in wanted.slots if slot.parameter in ours_at]
    for ours, slot in [(ours, slot) for ours, slot in shared if ours.nbytes != slot.nbytes]:
        yield f"{where}: {slot.parameter} has {ours.nbytes} bytes, expected {slot.nbytes}"
    moved = [(ours, slot) for ours, slot in shared if ours.offset != slot.offset]
    for ours, slot in moved[:_MOST_MOVED]:
        yield f"{where}: {slot.parameter} sits at byte {ours.offset}, expected {slot.offset}"
    if len(moved) > _MOST_MOVED:
        yield f"{where}: and {counted(len(moved) - _MOST_MOVED, 'more parameter')} of it elsewhere"


def _faults(payload: Payload) -> Iterable[str]:
    """Yield which parameters have two places in a payload, or lie on each other."""
    known: set[str] = set()
    end, last = 0, ""
    for slot in sorted(payload.slots, key=lambda slot: (slot.offset, slot.nbytes)):
        if slot.parameter in known:
            yield f"{slot.parameter} has two places"
        elif slot.offset < end:
            yield f"{last} and {slot.parameter} lie on each other at byte {slot.offset}"
        known.add(slot.parameter)
        if slot.offset + slot.nbytes > end:
            end, last = slot.offset + slot.nbytes, slot.parameter
