"""One trace for all ranks: the first and the last rank trace, and the others take over the first
one's graph.

Ranks run one program, so their graphs differ in the names of groups and GPUs alone, unless sizes
differ or code asks for its rank. Sizes are compared before anything is traced. What depends on the
rank shows between the first and the last rank, as in a simulated world; only code that treats a
rank between them apart does not.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.graph_bytes import bytes_of, graphs_of
from pytest_gtrainer._torch.process_groups import names_of_live_groups
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer._torch.values import OpOverload, local_part, pytree, schema
from pytest_gtrainer.graph.nodes import argument_of
from pytest_gtrainer.graph.partitions import partition_fault
from pytest_gtrainer.graph.same_on_ranks import (
    GROUP,
    Line,
    Partition,
    first_difference,
    node_lines,
    nodes_within,
)
from pytest_gtrainer.references.replicas import RanksDisagree, broadcast_bytes, texts_of_ranks
from pytest_gtrainer.tracing.model import ModelState, local, tensor_text
from pytest_gtrainer.tracing.refusals import RunMode
from pytest_gtrainer.tracing.step import TracedStep, rank_of

_UNABLE = "cannot hand over its graph, "


def trace_once(
    trace: Callable[[], TracedStep],
    model: nn.Module,
    inputs: Sequence[Any],
    mesh: DeviceMesh,
    *,
    check: bool = False,
) -> TracedStep:
    """``trace()`` on the first and the last rank of ``mesh``; if both give one graph, the others
    take it over.

    Every rank of the world has to call it. ``trace`` calls ``trace_step`` on this model and these
    inputs. ``mesh`` has the ranks of data parallelism: beside them, tensor parallelism gives each
    rank numbers of its own. This spares CPU time; on the clock it does so only where ranks share
    cores. ``TracedStep.handed_over`` says what was done, and why a rank traced by itself. With
    ``check`` every rank traces, too, and compares.

    Raises:
        RanksDisagree: with ``check``, on the rank whose own graph is another; names the first node.
    """
    if dist.get_backend() == "fake":
        return replace(trace(), handed_over="traced here: a fake world has no other rank")
    # every rank issues the same collectives, whatever the ranks of its mesh find out
    rank, ranks = dist.get_rank(), sorted(mesh.mesh.flatten().tolist())
    ends, partitions = (ranks[0], ranks[-1]), _partitions_of_groups()
    given = [*ModelState.of(model).tensors, *pytree.tree_leaves(tuple(inputs))]
    device = next(
        (tensor.device for tensor in given if isinstance(tensor, torch.Tensor)), torch.device("cpu")
    )
    why = _difference(texts_of_ranks("\n".join(_given(model, inputs))), ranks)
    traced, lines, written, failure, state = None, "", b"nothing", None, ""
    try:
        if why or rank in ends:
            traced = trace()
        if traced is not None and not why:
            lines = "\n".join(_lines(traced, partitions)).replace(repr(device), "own device")
            beside = tuple(partitions), traced.example_inputs, traced.gradient_placements
            if rank == ends[0]:
                written = bytes_of([*filter(None, (traced.gm, traced.twin))], beside, device)
            state = hashlib.sha256(lines.encode()).hexdigest()
    except Exception as raised:  # the others must not wait for this rank
        failure, state = raised, f"{_UNABLE}{type(raised).__name__}: {raised}"
    states = texts_of_ranks(state)
    texts = texts_of_ranks("" if states[ends[0]] == states[ends[1]] else lines)
    sent = {
        first: broadcast_bytes(written, first)
        for first in sorted(set(map(int, texts_of_ranks(str(ends[0])))))
    }
    if failure is not None and traced is None:
        raise failure
    failed = next(
        (f"rank {end} {states[end]}" for end in ends if states[end].startswith(_UNABLE)), ""
    )
    if why := why or failed or _difference(texts, ends):
        return replace(traced or trace(), handed_over=f"traced here: {why}")
    if traced is not None:
        return replace(
            traced,
            handed_over=f"traced here, and on rank {ends[rank == ends[0]]}, for {len(ranks)} ranks",
        )
    taken = _taken_over(sent[ends[0]], model, inputs, partitions, device)
    if check:
        whole = {
            of: "\n".join(_lines(step, partitions))
            for of, step in ((ends[0], taken), (rank, trace()))
        }
        if differing := _difference(whole, (ends[0], rank)):
            raise RanksDisagree(f"the graph that was handed over is not the own one: {differing}")
    return taken


def _partitions_of_groups() -> dict[str, Partition]:
    """By name, the groups that divide the world: those that ranks made in the same place; every
    rank must call it.
    """
    own = {
        name: dist.get_process_group_ranks(group) for group, name in names_of_live_groups().items()
    }
    told = map(json.loads, texts_of_ranks(json.dumps(list(own.values()))))
    made_together = dict(zip(own, zip(*told, strict=False), strict=False))
    return {
        name: tuple(dict.fromkeys(map(tuple, groups)))
        for name, groups in made_together.items()
        if not partition_fault(dict(enumerate(map(tuple, groups))))
    }


def _given(model: nn.Module, inputs: Sequence[Any]) -> Iterator[str]:
    """Yield what a trace is given: state and inputs, a line each."""
    state = ModelState.of(model)
    for fqn, tensor in zip(state.fqns, state.tensors, strict=True):
        own, placed = (
            local_part(tensor) if isinstance(tensor, DTensor) else tensor,
            getattr(tensor, "placements", ""),
        )
        trained = "trained" if tensor.requires_grad else "fixed"
        yield f"{fqn} {tensor_text(own)} {own.stride()} on {own.device.type}, {trained} {placed}"
    leaves, spec = pytree.tree_flatten(tuple(inputs))
    yield f"mode {RunMode.of(model, [*map(local, state.tensors), *leaves])}"
    for place, leaf in enumerate(leaves):
        told = (
            f"{tensor_text(leaf)} {leaf.stride()}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        )
        yield f"input {place} {told}"
    yield f"inputs {spec}"


def _naming_groups(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
    """Nodes that name a group, with its place among the operator's arguments."""
    for node in nodes_within(gm):
        for place, argument in enumerate(
            schema(node.target).arguments if isinstance(node.target, OpOverload) else ()
        ):
            if argument.name == GROUP:
                yield node, place


def _lines(traced: TracedStep, partitions: Mapping[str, Partition]) -> Iterator[str]:
    """Every node of a step's graphs without what may differ between ranks, and where gradients are
    placed.
    """
    for gm in filter(None, (traced.gm, traced.twin)):
        for node, _ in _naming_groups(gm):
            if (name := argument_of(node, GROUP)) not in partitions:
                raise ValueError(f"its process group {name!r} has no counterpart on every rank")
        for line in node_lines(gm, dist.get_rank(), partitions):
            yield f"{line.text} at {line.where}"
    yield f"gradients placed {traced.gradient_placements}"


def _taken_over(
    data: bytes,
    model: nn.Module,
    inputs: Sequence[Any],
    groups: Iterable[str],
    device: torch.device,
) -> TracedStep:
    """A step that another rank has written, with the groups and the device of this rank."""
    (gm, *twins), (names, fakes, placements) = graphs_of(data, new_fake_mode(), device)
    own = dict(zip(names, groups, strict=True))
    for graph in (gm, *twins):
        for node, place in _naming_groups(graph):
            name = own[argument_of(node, GROUP)]
            if place < len(node.args):
                node.update_arg(place, name)
            else:
                node.update_kwarg(GROUP, name)
            node.meta.pop("eager_input_vals", None)  # which names the group, too
    state, spec = ModelState.of(model), pytree.tree_structure(tuple(inputs))
    fqns = tuple(state.parameters), tuple(state.buffers), state.trainable
    twin, rank, mode = twins[0] if twins else None, rank_of(state), RunMode.of(model, fakes)
    return TracedStep(gm, fakes, *fqns, spec, placements, rank, twin, "from another rank", mode)


def _difference(texts: Mapping[int, str] | Sequence[str], ranks: Sequence[int]) -> str:
    """Describe the first line of the first rank that differs from the first of ``ranks``; "" if
    none does.
    """
    lines = {rank: [Line(line, "") for line in texts[rank].splitlines()] for rank in ranks}
    found = first_difference(lines)
    if found is None:
        return ""
    return f"rank {found.rank} has {found.line.text}, rank {found.other} {found.other_line.text}"
