"""Bucket layouts: which parameter sits at which byte of which collective.

A layout needs no arithmetic, so it is compared before bits: it finds the same class of bug
(a wrong payload order, a lost parameter, a wrong group or dtype) and names the parameter.
``bucket_layout`` reads it off a graph's nodes, not off what a pass says it did;
``references.eager.eager_bucket_layout`` reads it off ``fully_shard``'s own buffers.

Limit: only one end of a payload has names in a graph, the parameters that go into an
all-gather and the gradients that come out of a reduce-scatter. A pass that packs in one order
and unpacks in another is found by bits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import ALL_GATHER, REDUCE_SCATTER
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.graph.bucket_plan import layer_of
from pytest_gtrainer.graph.collectives import (
    all_reduce_behind,
    chain_to_output,
    group_of,
    input_name,
    output_name,
    results_of,
    wait_of,
)
from pytest_gtrainer.graph.nodes import direction, is_wait, node_fqn

ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME = "all_gather", "reduce_scatter", "all_reduce"
KINDS = (ALL_GATHER_NAME, REDUCE_SCATTER_NAME, ALL_REDUCE_NAME)


# a failure names enough to see what happened, not every parameter of 126 layers
_MOST_LINES, _MOST_MOVED = 24, 3


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's part of one rank's slice of a payload: ``nbytes`` at byte ``offset``."""

    parameter: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """One collective: what it is, over which ranks, and who sits where.

    ``directions`` tells where a graph issues it; eager FSDP2 gathers one payload in both.
    ``op`` is the reduction's, "" for an all-gather.
    """

    collective: str
    dtype: torch.dtype
    ranks: tuple[int, ...]
    op: str
    slots: tuple[Slot, ...]
    directions: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their FQNs in the order in which they are packed."""
        return tuple(slot.parameter for slot in self.slots)

    @property
    def label(self) -> str:
        """The bucket in a reader's words: its layer, or its outermost modules."""
        names = (layer_of(fqn) or fqn.split(".")[0] for fqn in self.parameters)
        return "+".join(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All payloads of a graph or of a model, in the order they are issued."""

    payloads: tuple[Payload, ...]

    def of(self, collective: str) -> tuple[Payload, ...]:
        """The payloads of one kind of collective."""
        return tuple(payload for payload in self.payloads if payload.collective == collective)

    def __str__(self) -> str:
        lines = []
        for payload in self.payloads:
            op, dtype = f" {payload.op}" if payload.op else "", str(payload.dtype).removeprefix("torch.")
            lines.append(f"{payload.label}: {payload.collective}{op} {dtype} over {len(payload.ranks)} ranks")
            lines += [f"  {slot.offset:>10}  {slot.nbytes:>10}  {slot.parameter}" for slot in payload.slots]
        return "\n".join(lines)


class LayoutDifference(AssertionError):
    """Two layouts differ; the message names bucket and parameters."""


def bucket_layout(gm: fx.GraphModule) -> BucketLayout:
    """Layout of the graph's all-gathers of parameters and reduce-scatters of gradients.

    An all-reduce of what a reduce-scatter leaves, as of replicas under hybrid sharding, is a payload too.
    Offsets are bytes inside one rank's slice of the payload. A payload gathered once in each
    direction is listed once, with both; repeated in one direction it is listed again.

    Raises:
        ValueError: a process group of the graph does not exist here, and no text that it was parsed
            from said its ranks.
    """
    inputs = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    gathers = [_gather_payload(node, inputs) for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)]
    outputs = {node: index for index, node in enumerate(results_of(gm)) if isinstance(node, fx.Node)}
    scatters = [
        payload
        for node in gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
        for payload in _scatter_payloads(node, outputs)
    ]
    merged: dict[tuple[Payload, int], list[str]] = {}
    repeated: Counter[Payload] = Counter()
    for payload in [*(p for p in gathers if p is not None), *scatters]:
        merged.setdefault((replace(payload, directions=()), repeated[payload]), []).extend(payload.directions)
        repeated[payload] += 1
    return BucketLayout(tuple(replace(payload, directions=tuple(ways)) for (payload, _), ways in merged.items()))


def _gather_payload(launch: fx.Node, positions: dict[fx.Node, int]) -> Payload | None:
    packed = launch.all_input_nodes[0]
    # DTensor concatenates too, to pad a single tensor: a bucket's carries the bucket's mark
    is_bucket = packed.target is torch.ops.aten.cat.default and "fsdp_bucket" in packed.meta
    found = []
    for part in packed.all_input_nodes if is_bucket else [packed]:
        source = part  # up a chain of single-input nodes to the one graph input above it
        while source.op != "placeholder":
            if len(source.all_input_nodes) != 1 or is_wait(source):
                return None
            [source] = source.all_input_nodes
        value = part.meta["val"]
        name = input_name(source, positions[source], _module_of(launch))
        found.append((name, value.numel() * value.element_size()))
    dtype = launch.meta["val"].dtype
    return Payload(ALL_GATHER_NAME, dtype, _ranks_of(launch), "", _slots(found), (direction(launch),))


def _ranks_of(launch: fx.Node) -> tuple[int, ...]:
    """Of the group in this process; of a graph parsed where there is none, as its text says."""
    name, owner = group_of(launch), launch.graph.owning_module
    told: Mapping[str, tuple[int, ...] | None] = {} if owner is None else owner.meta.get("gt_groups", {})
    try:
        return group_ranks(name)
    except ValueError:
        if (ranks := told.get(name)) is None:
            raise
        return ranks


def _module_of(launch: fx.Node) -> str:
    """Where a collective belongs: its bucket's first module, else the module it was traced in."""
    bucket = launch.meta.get("fsdp_bucket")
    return bucket["plan_fqns"][0] if bucket else node_fqn(launch)


def _scatter_payloads(launch: fx.Node, positions: dict[fx.Node, int]) -> Iterable[Payload]:
    """Follow the result through its wait and split to the outputs: order and widths come from the split.

    A result that is added to another before it is returned is no gradient yet: it is left out,
    and a comparison then misses the parameter.
    """
    output = launch.graph.output_node()
    found = []
    wait = wait_of(launch)
    second = all_reduce_behind(wait)
    parts = [second[1] if second else wait]
    split = next(iter(parts[0].users))
    if split.target is torch.ops.aten.split_with_sizes.default and "fsdp_bucket" in split.meta:
        parts = sorted((item for item in split.users if item.target is getitem), key=lambda item: item.args[1])
    for part in parts:
        chain = chain_to_output(part, output)
        if chain is None:
            return
        position = positions[chain[-1] if chain else part]
        value = part.meta["val"]
        found.append((output_name(output, position, _module_of(launch)), value.numel() * value.element_size()))
    dtype, slots = launch.meta["val"].dtype, _slots(found)
    for name, node in ((REDUCE_SCATTER_NAME, launch), (ALL_REDUCE_NAME, second[0] if second else None)):
        if node is not None:
            yield Payload(name, dtype, _ranks_of(node), str(node.args[1]), slots, (direction(node),))


def _slots(parts: list[tuple[str, int]]) -> tuple[Slot, ...]:
    """Parameters and their bytes, one behind the other."""
    offsets = itertools.accumulate((nbytes for _, nbytes in parts), initial=0)
    return tuple(Slot(parameter, offset, nbytes) for (parameter, nbytes), offset in zip(parts, offsets, strict=False))


def assert_same_layout(actual: BucketLayout, expected: BucketLayout, *, actual_is: str = "graph") -> None:
    """Every collective of ``expected`` has its like in ``actual``: group, dtype, op, parameter at byte offset.

    Collectives are paired by the parameters they share; the order in which they are issued and
    the directions are not compared.

    Raises:
        LayoutDifference: names the bucket and the parameters that sit elsewhere.
        ValueError: a layout is empty, so that there is nothing to compare.
    """
    __tracebackhide__ = True
    for which, layout in ((actual_is, actual), ("expected", expected)):
        if not layout.payloads:
            raise ValueError(
                f"the {which} layout has no collective of parameters, so there is nothing to compare: "
                "shard the model (data_parallel, fully_shard) first"
            )
    problems: list[str] = []
    for kind in KINDS:
        rest = list(actual.of(kind))
        for wanted in expected.of(kind):
            shared = [len(set(payload.parameters) & set(wanted.parameters)) for payload in rest]
            if not any(shared):
                problems.append(f"bucket {wanted.label!r}: no {kind} of {', '.join(wanted.parameters)}")
                continue
            problems += _compare_payloads(rest.pop(shared.index(max(shared))), wanted)
        article = "a" if kind == REDUCE_SCATTER_NAME else "an"
        for extra in rest:
            named = ", ".join(extra.parameters)
            problems.append(f"bucket {extra.label!r}: {article} {kind} of {named} that is not expected")
    facts.tell("layouts", actual=actual, expected=expected, problems=problems, actual_is=actual_is)
    if problems:
        shown = problems[:_MOST_LINES]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more differences")
        raise LayoutDifference("bucket layouts differ\n" + "\n".join(shown))


def _compare_payloads(actual: Payload, wanted: Payload) -> Iterable[str]:
    where = f"bucket {wanted.label!r}, {wanted.collective}"
    for what in ("dtype", "ranks", "op"):
        ours, theirs = getattr(actual, what), getattr(wanted, what)
        if ours != theirs:
            yield f"{where}: {what} is {ours}, expected {theirs}"
    ours_at = {slot.parameter: slot for slot in actual.slots}
    theirs_at = {slot.parameter: slot for slot in wanted.slots}
    for parameter in [name for name in theirs_at if name not in ours_at]:
        yield f"{where}: {parameter} is missing"
    for parameter in [name for name in ours_at if name not in theirs_at]:
        yield f"{where}: {parameter} does not belong here"
    shared = [(ours_at[slot.parameter], slot) for slot in wanted.slots if slot.parameter in ours_at]
    for ours, slot in shared:
        if ours.nbytes != slot.nbytes:
            yield f"{where}: {slot.parameter} has {ours.nbytes} bytes, expected {slot.nbytes}"
    moved = [(ours, slot) for ours, slot in shared if ours.offset != slot.offset]
    for ours, slot in moved[:_MOST_MOVED]:
        yield f"{where}: {slot.parameter} sits at byte {ours.offset}, expected {slot.offset}"
    if len(moved) > _MOST_MOVED:
        yield f"{where}: and {len(moved) - _MOST_MOVED} more parameters of it sit elsewhere"
