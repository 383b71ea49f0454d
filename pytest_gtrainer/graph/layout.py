"""Bucket layouts: which parameter sits at which byte of which collective.

Layouts are compared before bits. ``bucket_layout`` reads one off a graph's nodes,
``references.eager.eager_bucket_layout`` off ``fully_shard``'s buffers.

Limit: a graph names only one end of a payload. A pass that packs in one order and unpacks in
another has the right layout; its bits are wrong.
"""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import is_control_dependency
from pytest_gtrainer._torch.process_groups import group_ranks, plain_reduction
from pytest_gtrainer._torch.values import HigherOrderOperator
from pytest_gtrainer.facts import FailedCheck, counted, spell_some
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
    refuse_unseen,
    results_of,
    wait_of,
)
from pytest_gtrainer.graph.foreign import AnyGraph, Names, adopt
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    argument_of,
    bodies_of,
    direction,
    is_parameter,
    is_view,
    node_fqn,
    places_of,
    short_name,
    walk,
)
from pytest_gtrainer.graph.packing import (
    Arrival,
    State,
    Unread,
    computes,
    follow_result,
    nbytes_of,
    read_sent_states,
    reduces,
    sources_of,
)

ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME = "all_gather", "reduce_scatter", "all_reduce"
KINDS = (ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)
_SPLITS = (torch.ops.aten.split_with_sizes.default, torch.ops.aten.split.Tensor)
_OWN_COPIES = ("_to_copy", "convert_element_type", "index", "index_select", "gather", "take")
"""Casts, and rows that a model picks from a parameter, as those of chosen experts."""
# A failure names enough to see what happened, not every parameter of 126 layers.
_MOST_LINES = 24
_MOST_MOVED = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's part of one rank's slice of a payload: ``nbytes`` at byte ``offset``."""

    parameter: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """One collective, and the parameters in it.

    Attributes:
        ranks: the ranks of its process group.
        op: the reduction; "" for an all-gather.
        slots: one for each parameter, in the order in which they are packed.
        directions: those in which a graph issues it. Eager FSDP2 gathers one payload in both.
        padding: bytes of one rank's slice without a parameter, zeros between or after them.
    """

    collective: str
    dtype: torch.dtype
    ranks: tuple[int, ...]
    op: str
    slots: tuple[Slot, ...]
    directions: tuple[str, ...] = ()
    padding: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        """FQNs in the order in which they are packed."""
        return tuple(slot.parameter for slot in self.slots)

    @property
    def label(self) -> str:
        """The name of the bucket in messages: its layer, or its outermost modules."""
        names = [layer_of(fqn) or fqn.split(".")[0] for fqn in self.parameters]
        return "+".join(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All payloads of a graph or of a model, in the order they are issued.

    Attributes:
        payloads: the payloads.
        kept: parameters that a graph's backward reads from an all-gather of the forward. They stay
            unsharded between.
    """

    payloads: tuple[Payload, ...]
    # Where values are read is no part of a layout.
    kept: tuple[str, ...] = field(default=(), compare=False)

    def of(self, collective: str) -> tuple[Payload, ...]:
        """Return the payloads of one kind of collective."""
        return tuple(payload for payload in self.payloads if payload.collective == collective)

    def __str__(self) -> str:
        lines = []
        for payload in self.payloads:
            collective = f"{payload.collective} {payload.op}".strip()
            dtype = str(payload.dtype).removeprefix("torch.")
            ranks = counted(len(payload.ranks), "rank")
            lines.append(f"{payload.label}: {collective} {dtype} over {ranks}")
            for slot in payload.slots:
                lines.append(f"  {slot.offset:>10}  {slot.nbytes:>10}  {slot.parameter}")
        return "\n".join(lines)


class LayoutDifference(FailedCheck):
    """Two layouts differ; the message names bucket and parameters."""

    # The name that users import; it fits into a line of pytest's summary.
    __module__ = "pytest_gtrainer"


def bucket_layout(gm: AnyGraph, *, names: Names | None = None) -> BucketLayout:
    """Return the place of each parameter in a graph's all-gathers and reductions of gradients.

    A reduction is a reduce-scatter, or an all-reduce (over replicas under hybrid sharding, or of
    what is not sharded). Collectives of activations alone are left out. Offsets are bytes inside
    one rank's slice of the payload. A payload that is gathered once in each direction is listed
    once, with both directions; a second time in one direction it is listed again. A coalesced
    collective is one payload for each tensor. ``names`` as for ``graphtext.render``.

    Raises:
        PlanError: a collective of parameters or gradients has no wait, or a node communicates and
            calls no operator.
        UnreadLayout: the places of parameters or gradients in a collective cannot be read: the
            message names the node.
        ValueError: a process group of the graph does not exist here, and no text that it was parsed
            from said its ranks.
    """
    gm = adopt(gm, names)
    refuse_unseen(gm)
    reader = _Reader(gm)
    reader.refuse_nested(gm)
    payloads: list[Payload] = []
    kept: dict[str, None] = {}
    for node, sent in read_sent_states(gm).items():
        for payload in reader.payloads(node, sent):
            payloads.append(payload)
            if payload.collective == ALL_GATHER_NAME and payload.directions == (FORWARD,):
                kept.update(dict.fromkeys(_read_in_backward(node, payload)))

    payloads.sort(key=lambda payload: payload.collective != ALL_GATHER_NAME)

    # FSDP2 unshards a bucket once in each direction. So the n-th gather of a payload in the forward
    # and the n-th in the backward are one entry, as they are one bucket of ``fully_shard``.
    directions: dict[tuple[Payload, int], list[str]] = defaultdict(list)
    repeated: Counter[Payload] = Counter()
    for payload in payloads:
        directions[replace(payload, directions=()), repeated[payload]] += payload.directions
        repeated[payload] += 1
    listed = []
    for (payload, _), found in directions.items():
        listed.append(replace(payload, directions=tuple(found)))
    return BucketLayout(tuple(listed), tuple(kept))


class UnreadLayout(ValueError):
    """A layout of parameters or gradients that cannot be read; the message names the node."""


class _Reader:
    """Reads the payloads of one graph's collectives."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._output = gm.graph.output_node()
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._inputs = places_of(placeholders)
        self._outputs: dict[fx.Node, list[int]] = defaultdict(list)
        for index, result in enumerate(results_of(gm)):
            if isinstance(result, fx.Node):
                self._outputs[result].append(index)
        # If results have names, those of parameters are gradients. A backward alone does not take
        # all parameters, so its tracer names them beside.
        self._parameters: set[str] = set()
        known = self._output.meta
        if "gt_outputs" in known:
            names = [*known.get("gt_managed_order", ()), *known.get("gt_parameters", ())]
            self._parameters.update(names)
            for node in placeholders:
                given = node.meta.get("gt_input")
                if given is not None and given["kind"] == "parameter":
                    self._parameters.add(given["fqn"])

    def payloads(self, launch: fx.Node, sent: list[State]) -> Iterator[Payload]:
        """Yield the payloads of a collective.

        A coalesced collective has several, and one of activations has none.

        Args:
            sent: what ``read_sent_states`` says of its operands.
        """
        kind = "" if hides(launch) else kind_of(launch)
        names = self._names_in(launch, sent)
        if kind == ALL_GATHER_NAME:
            for place, state in enumerate(sent):
                if isinstance(state, Unread) and names:
                    raise _unread(launch, "gathers", names, state.node)
                # The model itself gathers activations, in sequence parallelism for example.
                if not isinstance(state, tuple):
                    continue
                slots: list[Slot] = []
                size = 0
                for part in state:
                    if part.source is not None:
                        slots.append(Slot(self._name(part.source, launch), size, part.nbytes))
                    size += part.nbytes
                if slots:
                    yield self._payload(ALL_GATHER_NAME, launch, slots, size, place)
        elif kind in (REDUCE_SCATTER_NAME, ALL_REDUCE_NAME):
            yield from self._reductions(kind, launch)
        elif names:
            raise _unread(launch, "moves", names, launch)
        else:
            reached = []
            for arrival in follow_result(launch, self._outputs):
                reached += self._gradients(arrival, launch)
            if reached:
                raise _unread(launch, "gives", reached, launch)

    def refuse_nested(self, gm: fx.GraphModule) -> None:
        """Refuse a graph inside the graph that gathers parameters or reduces gradients."""
        for node in gm.graph.nodes:
            # Inductor writes an order of nodes as a higher-order operator around one operator.
            if not isinstance(node.target, HigherOrderOperator) or is_control_dependency(node):
                continue
            names = []
            for operand in node.all_input_nodes:
                if operand in self._inputs and is_parameter(operand):
                    names.append(self._name(operand, node))
            for body in bodies_of(gm, node).values():
                launch = next(_parameter_collectives(body), None)
                if launch is not None and (names or direction(node) == BACKWARD):
                    of = ", ".join(names[:_MOST_MOVED]) or node_fqn(node) or "the root"
                    raise UnreadLayout(
                        f"{node.name} ({node.target}) of {of} runs a graph of its own, in which "
                        f"{launch.name} is: a layout reads the collectives of the outer graph "
                        "alone, so inline that graph first"
                    )

    def _payload(
        self, kind: str, launch: fx.Node, slots: list[Slot], size: int, place: int
    ) -> Payload:
        """Return the payload of a collective whose slice of one rank has ``size`` bytes.

        Args:
            place: of this payload among those of a coalesced collective, each of its own dtype.
        """
        value = launch.meta.get("val")
        if isinstance(value, list | tuple):
            value = value[place]
        elif getattr(launch.target, "namespace", "") == "_c10d_functional":
            wait_of(launch)

        ranks = _ranks_of(launch)
        stated = argument_of(launch, "group_size")
        if stated not in (None, len(ranks)):
            raise UnreadLayout(
                f"the collective {launch.name} says group_size={stated}, and its group has "
                f"{counted(len(ranks), 'rank')}: give it the size of its group"
            )

        padding = size - sum(slot.nbytes for slot in slots)
        op, directions = reduction_of(launch) or "", (direction(launch),)
        return Payload(kind, value.dtype, ranks, op, tuple(slots), directions, padding)

    def _names_in(self, launch: fx.Node, sent: list[State]) -> list[str]:
        """Return the parameters that go in; for an unread operand all that are above it."""
        found: dict[fx.Node, None] = {}
        for state in sent:
            found |= sources_of([state])
            if isinstance(state, Unread):
                above = walk([state.node], operator.attrgetter("all_input_nodes"))
                inputs = sorted(node for node in above if node.op == "placeholder")
                found |= dict.fromkeys(filter(is_parameter, inputs))
        return [self._name(node, launch) for node in found]

    def _name(self, source: fx.Node, launch: fx.Node) -> str:
        if source.op == "get_attr":  # a parameter that the graph's module holds
            return str(source.target)
        return input_name(source, self._inputs[source], _module_of(launch))

    def _reductions(self, kind: str, launch: fx.Node) -> Iterator[Payload]:
        """Follow the results to the outputs: order and widths come from the splits on the way."""
        results = [launch]
        if isinstance(launch.meta.get("val"), list | tuple):
            items = [user for user in launch.users if user.target is operator.getitem]
            results = sorted(items, key=lambda item: item.args[1])
        for result in results:
            found: dict[tuple[int, int], list[Arrival]] = defaultdict(list)
            names: dict[tuple[int, int], list[str]] = defaultdict(list)
            for arrival in follow_result(result, self._outputs):
                place = (arrival.piece.at, arrival.piece.numel)
                found[place].append(arrival)
                names[place] += self._gradients(arrival, launch)
            named = {place: fqns for place, fqns in sorted(names.items()) if fqns}
            if not named:
                for arrival in itertools.chain(*found.values()):
                    self._refuse_unknown(launch, arrival)
                continue

            for place, arrived in found.items():
                if place not in named:
                    self._refuse_unnamed(launch, result, place, arrived, named)
            self._refuse_shared_places(launch, found, named)
            value = result.meta["val"]
            width = value.element_size()
            slots = []
            for (at, numel), fqns in named.items():
                slots.append(Slot(fqns[0], at * width, numel * width))
            index = 0 if result is launch else int(result.args[1])
            yield self._payload(kind, launch, slots, nbytes_of(value), index)

    def _refuse_unnamed(
        self,
        launch: fx.Node,
        result: fx.Node,
        place: tuple[int, int],
        found: list[Arrival],
        named: dict[tuple[int, int], list[str]],
    ) -> None:
        """Refuse a part besides gradients that is none, unless it is a norm of all of them."""
        at, numel = place
        lies_over = any(at <= low and low + count <= at + numel for low, count in named)
        users = [arrival.used_by or result for arrival in found]
        # ``clip_grad_norm_`` of a whole bucket reads the payload, and moves none of it.
        moving = [user for user in users if not reduces(user)]
        if moving or not lies_over:
            gradients = list(itertools.chain(*named.values()))
            raise _unread(launch, "gives", gradients, (moving or users)[0])

    def _refuse_shared_places(
        self,
        launch: fx.Node,
        found: dict[tuple[int, int], list[Arrival]],
        named: dict[tuple[int, int], list[str]],
    ) -> None:
        """Refuse gradients that seem to overlap: an operator on the way picks elements."""
        end, last = 0, ""
        for (at, numel), names in named.items():
            nodes: dict[fx.Node, None] = {}
            for arrival in found[at, numel]:
                if self._gradients(arrival, launch):
                    nodes[arrival.piece.node] = None
            first = next(iter(nodes))
            if at < end:
                raise _unread(launch, "gives", [last, *names], first)
            if len(nodes) > 1:
                raise _unread(launch, "gives", names, first)
            end, last = at + numel, names[0]

    def _gradients(self, arrival: Arrival, launch: fx.Node) -> list[str]:
        """Return the names of the gradients among the outputs that a part arrives at."""
        module = _module_of(launch)
        names = [output_name(self._output, place, module) for place in arrival.outputs]
        if kind_of(launch) == REDUCE_SCATTER_NAME and not arrival.added:
            return names
        # An all-reduced loss, or what a chunk of activations is added to, is no gradient.
        if self._parameters:
            return [name for name in names if name in self._parameters]
        if direction(launch) == BACKWARD:
            return names
        return []

    def _refuse_unknown(self, launch: fx.Node, arrival: Arrival) -> None:
        """Refuse a gradient that ends at an operator of which nobody knows what it does."""
        user = arrival.used_by
        if user is None or computes(user) or launches(user.target):
            return
        chain = chain_to_output(user, self._output)
        if chain is not None and not isinstance(user.target, HigherOrderOperator):
            outputs = tuple(self._outputs.get([user, *chain][-1], ()))
            names = self._gradients(Arrival(arrival.piece, outputs, added=True), launch)
            if names:
                raise _unread(launch, "gives", names, user)


def _unread(launch: fx.Node, verb: str, names: list[str], at: fx.Node) -> UnreadLayout:
    target = getattr(at.target, "name", lambda: at.target)()
    why = f"at node {at.name} ({target}) their order is lost"
    if at is launch:
        why = f"{target} is no collective that a layout knows"
    return UnreadLayout(
        f"the collective {launch.name} {verb} {spell_some(names, _MOST_MOVED)}, and the "
        f"place of each in it cannot be read: {why}. Pack by cat, copies, views and torch's own "
        "bucketing operators around functional collectives, or compare bits"
    )


def _read_in_backward(launch: fx.Node, payload: Payload) -> Iterator[str]:
    """Yield the parameters of a forward all-gather whose gathered values the backward reads.

    Each value on the way holds the same elements of every rank's row: all of them at the launch,
    and one parameter's after the split of a bucket. Where nobody can say which elements a node
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

        inside = []
        for slot in payload.slots:
            is_behind = slot.offset >= (begin + size) * width
            is_before = slot.offset + slot.nbytes <= begin * width
            if not is_behind and not is_before:
                inside.append(slot.parameter)

        for user in node.users:
            # The output node serves both directions: being returned is no read of the backward.
            if user.op == "output":
                continue
            below = _unpacked(node, begin, size, user)
            if direction(user) == BACKWARD:
                read.update(inside)
            elif below is not None:
                todo += below
            elif len(inside) > 1:  # a cast of the whole bucket, say
                todo.append((user, begin, size))

    for slot in payload.slots:
        if slot.parameter in read:
            yield slot.parameter


def _unpacked(
    node: fx.Node, begin: int, size: int, user: fx.Node
) -> list[tuple[fx.Node, int, int]] | None:
    """Return what ``user`` makes of elements of each rank's row, in the form of
    ``_read_in_backward``.

    None means that it makes new numbers of them. A copy of what lies one after the other is the
    model's own, and so are casts and picked rows: FSDP2 keeps these for the backward, too.
    """
    if user.target in _SPLITS:
        widths = [part.shape[-1] for part in user.meta["val"]]
        # Another sum splits another dimension, so each part has elements of all parameters.
        if sum(widths) == size:
            begins = list(itertools.accumulate(widths, initial=begin))
            parts = []
            for item in user.users:
                if item.target is operator.getitem:
                    number = item.args[1]
                    parts.append((item, begins[number], widths[number]))
            return parts

    value, name = node.meta.get("val"), short_name(user)
    if name == "clone" and isinstance(value, torch.Tensor):
        moves = not value.is_contiguous()
    else:
        moves = is_view(user.target) or not (name in _OWN_COPIES or computes(user))

    if not moves:
        return None
    return [(user, begin, size)]


def _parameter_collectives(body: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the all-gathers of a body's own inputs, and its reduce-scatters."""
    for launch, sent in read_sent_states(body).items():
        gathers = kind_of(launch) == ALL_GATHER_NAME and sources_of(sent)
        if gathers or kind_of(launch) == REDUCE_SCATTER_NAME:
            yield launch


def _ranks_of(launch: fx.Node) -> tuple[int, ...]:
    """Return the ranks of a collective's group in this process.

    A graph that was parsed where the group does not exist has them from its text.
    """
    name = group_of(launch)
    if name is None:
        given = ranks_given(launch)
        if given is not None:
            return given
        raise UnreadLayout(f"the collective {launch.name} ({launch.target}) names no process group")

    try:
        return group_ranks(name)
    except ValueError:
        meta = getattr(launch.graph.owning_module, "meta", {})
        ranks: tuple[int, ...] | None = meta.get("gt_groups", {}).get(name)
        if ranks is None:
            raise
        return ranks


def _module_of(launch: fx.Node) -> str:
    """Return the first module of a collective's bucket, else the module it was traced in."""
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
    """Assert that ``actual`` has the collectives of ``expected``.

    That is group, dtype, op, and each parameter at its byte offset.

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
    if not isinstance(actual, BucketLayout):
        actual = bucket_layout(actual, names=names)
    if not isinstance(expected, BucketLayout):
        expected = bucket_layout(expected, names=names)
    for side, layout in ((actual_is, actual), ("expected", expected)):
        if not layout.payloads:
            raise ValueError(
                f"the {side} layout has no collective of parameters, so there is nothing to "
                "compare: shard the model (data_parallel, fully_shard) first"
            )
        for payload in layout.payloads:
            if payload.collective not in KINDS:
                raise ValueError(
                    f"the {side} layout has a collective {payload.collective!r}; "
                    f"expected {', '.join(KINDS)}"
                )

    problems: list[str] = []
    unread: list[str] = []
    for kind in KINDS:
        _compare_kind(kind, actual, expected, problems, unread)
    facts.notify(
        "layouts", actual=actual, expected=expected, problems=problems, actual_is=actual_is
    )
    if problems:
        lines = ["bucket layouts differ", *problems[:_MOST_LINES]]
        if len(problems) > _MOST_LINES:
            lines.append(f"and {counted(len(problems) - _MOST_LINES, 'more difference')}")
        raise LayoutDifference("\n".join(lines))

    return tuple(unread)


def _compare_kind(
    kind: str,
    actual: BucketLayout,
    expected: BucketLayout,
    problems: list[str],
    unread: list[str],
) -> None:
    """Compare the collectives of one kind; add to ``problems``, and to ``unread`` where
    ``assert_same_layout`` returns it.
    """
    rest = list(actual.of(kind))
    once: list[Payload] = []  # of ``expected``, what ``actual`` does not gather in the backward
    for wanted in expected.of(kind):
        # Paired by the parameters that they share: order and directions are not compared.
        shared = [len(set(payload.parameters) & set(wanted.parameters)) for payload in rest]
        if not any(shared):
            parameters = ", ".join(wanted.parameters)
            problems.append(f"bucket {wanted.label!r}: no {kind} of {parameters}")
            continue
        found = rest.pop(shared.index(max(shared)))
        problems += _compare_payloads(found, wanted)
        if kind == ALL_GATHER_NAME and found.directions == (FORWARD,):
            once.append(wanted)

    article = "an"
    if kind == REDUCE_SCATTER_NAME:
        article = "a"
    for extra in rest:
        wholes = [wanted for wanted in once if set(extra.parameters) < set(wanted.parameters)]
        if not wholes or extra.directions != (BACKWARD,):
            parameters = ", ".join(extra.parameters)
            problems.append(
                f"bucket {extra.label!r}: {article} {kind} of {parameters} that is not expected"
            )
            continue
        whole = wholes[0]
        once.remove(whole)
        problems += _compare_regathered(extra, whole, actual.kept)
        left_out = ", ".join(name for name in whole.parameters if name not in extra.parameters)
        unread.append(f"bucket {whole.label!r}: no node of the backward reads {left_out}")


def _compare_regathered(again: Payload, whole: Payload, kept: Collection[str]) -> Iterable[str]:
    """Yield what is wrong with a bucket that the backward gathers again in part."""
    for name in whole.parameters:
        if name in kept and name not in again.parameters:
            yield (
                f"bucket {whole.label!r}: the backward gathers the bucket again without {name}, "
                "and reads the forward's copy of it, which stays unsharded: gather again whatever "
                "the backward reads"
            )
    # Zeros after a parameter belong to it: they are sent again with it, or left out with it.
    width = sum(slot.nbytes for slot in whole.slots) + whole.padding
    ends = [*(slot.offset for slot in whole.slots[1:]), width]
    slots: list[Slot] = []
    place = 0
    for slot, end in zip(whole.slots, ends, strict=True):
        if slot.parameter in again.parameters:
            slots.append(replace(slot, offset=place))
            place += end - slot.offset
    padding = place - sum(slot.nbytes for slot in slots)
    yield from _compare_payloads(again, replace(whole, slots=tuple(slots), padding=padding))


def _compare_payloads(actual: Payload, wanted: Payload) -> Iterable[str]:
    """Yield in what a payload is not the wanted one."""
    where = f"bucket {wanted.label!r}, {wanted.collective}"
    if actual.dtype != wanted.dtype:
        yield f"{where}: dtype is {actual.dtype}, expected {wanted.dtype}"
    if actual.ranks != wanted.ranks:
        yield f"{where}: ranks is {actual.ranks}, expected {wanted.ranks}"
    size = len(wanted.ranks)
    if plain_reduction(actual.op, size) != plain_reduction(wanted.op, size):
        why = ""
        if "premul_sum" in actual.op + wanted.op:
            why = (
                " (premul_sum multiplies each rank's gradient before the sum, "
                "and rounds the product)"
            )
        yield f"{where}: op is {actual.op}, expected {wanted.op}{why}"

    if actual.padding != wanted.padding:
        yield f"{where}: {actual.padding} bytes belong to no parameter, expected {wanted.padding}"
    for fault in [*_faults(actual), *_faults(wanted)]:
        yield f"{where}: {fault}"
    yield from _compare_places(where, actual, wanted)


def _compare_places(where: str, actual: Payload, wanted: Payload) -> Iterable[str]:
    """Yield which parameters are not at their places."""
    found = {slot.parameter: slot for slot in actual.slots}
    expected = {slot.parameter: slot for slot in wanted.slots}
    for parameter in [fqn for fqn in expected if fqn not in found]:
        yield f"{where}: {parameter} is missing"
    for parameter in [fqn for fqn in found if fqn not in expected]:
        yield f"{where}: {parameter} does not belong here"

    moved = []
    for parameter, slot in expected.items():
        own = found.get(parameter)
        if own is None:
            continue
        if own.nbytes != slot.nbytes:
            yield f"{where}: {parameter} has {own.nbytes} bytes, expected {slot.nbytes}"
        if own.offset != slot.offset:
            moved.append(f"{parameter} sits at byte {own.offset}, expected {slot.offset}")

    for text in moved[:_MOST_MOVED]:
        yield f"{where}: {text}"
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
