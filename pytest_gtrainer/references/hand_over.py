"""Trace once for all ranks: the first and the last rank trace, and the others take over the first
one's graph.

Ranks run one program. So their graphs differ only in the names of groups and GPUs, unless sizes
differ or code asks for its rank. Sizes are compared before anything is traced. What depends on the
rank shows as a difference between the first and the last rank, as in a simulated world. Code that
treats a rank between them apart is not noticed.
"""

import hashlib
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
from pytest_gtrainer._torch.values import local_part, pytree
from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.nodes import argument_of, parameter
from pytest_gtrainer.graph.partitions import partition_fault
from pytest_gtrainer.graph.same_on_ranks import (
    GROUP,
    Partition,
    node_lines,
    nodes_within,
)
from pytest_gtrainer.references.replicas import (
    RanksDisagree,
    broadcast_bytes,
    first_differing_line,
    texts_of_ranks,
)
from pytest_gtrainer.tracing.model import ModelState, local, tensor_text
from pytest_gtrainer.tracing.refusals import RunMode
from pytest_gtrainer.tracing.step import TracedStep, rank_of
from pytest_gtrainer.worlds.gathering import gather_objects

_UNABLE = "cannot hand over its graph, "


def trace_once(
    trace: Callable[[], TracedStep],
    model: nn.Module,
    inputs: Sequence[Any],
    mesh: DeviceMesh,
    *,
    check: bool = False,
) -> TracedStep:
    """Call ``trace()`` on the first and the last rank of ``mesh``; if both give one graph, the
    others take it over.

    Every rank of the world has to call it. ``trace`` calls ``trace_step`` on this model and these
    inputs. ``mesh`` has the ranks of data parallelism: beside them, tensor parallelism gives each
    rank numbers of its own. This spares CPU time; on the clock it does so only where ranks share
    cores. ``TracedStep.handed_over`` says what was done, and why a rank traced by itself. With
    ``check`` every rank traces, too, and compares.

    Raises:
        RanksDisagree: with ``check``, on the rank whose own graph is another; names the first node.
    """
    check_switches(check=check)
    if dist.get_backend() == "fake":
        return replace(trace(), handed_over="traced here: a fake world has no other rank")
    rank, ranks = dist.get_rank(), sorted(mesh.mesh.flatten().tolist())
    ends, partitions = (ranks[0], ranks[-1]), _partitions_of_groups()
    # A graph that is written names the device of its rank, which the reader replaces by its own.
    device = _device_of(model, inputs)

    # Ranks whose sizes differ have other graphs, so each traces by itself.
    why = _difference(texts_of_ranks("\n".join(_given(model, inputs))), ranks)
    traced, lines, written, failure = None, "", b"nothing", None
    try:
        if why or rank in ends:
            traced = trace()
        if traced is not None and not why:
            lines = "\n".join(_lines(traced, partitions)).replace(repr(device), "own device")
            if rank == ends[0]:
                beside = tuple(partitions), traced.example_inputs, traced.gradient_placements
                written = bytes_of([*filter(None, (traced.gm, traced.twin))], beside, device)
        state = hashlib.sha256(lines.encode()).hexdigest()
    except Exception as raised:  # raised below, since the other ranks wait for what this one sends
        failure, state = raised, f"{_UNABLE}{type(raised).__name__}: {raised}"

    # From here on every rank issues the same collectives, whatever the ranks of its mesh found out.
    states = texts_of_ranks(state)
    # Lines of large graphs are long, so they travel only where they have to be shown.
    texts = texts_of_ranks("" if states[ends[0]] == states[ends[1]] else lines)
    firsts = sorted(set(gather_objects(ends[0])))  # each mesh of data parallelism has one
    sent = {first: broadcast_bytes(written, first) for first in firsts}

    if failure is not None and traced is None:
        raise failure
    # A graph that cannot be written is no error: then every rank traces.
    unable = [f"rank {end} {states[end]}" for end in ends if states[end].startswith(_UNABLE)]
    why = why or "".join(unable[:1]) or _difference(texts, ends)
    if why:
        return replace(traced or trace(), handed_over=f"traced here: {why}")
    if traced is not None:
        other = ends[rank == ends[0]]
        words = f"traced here, and on rank {other}, for {len(ranks)} ranks"
        return replace(traced, handed_over=words)

    taken = _read_step(sent[ends[0]], model, inputs, partitions, device)
    if check:
        steps = {ends[0]: taken, rank: trace()}
        whole = {of: "\n".join(_lines(step, partitions)) for of, step in steps.items()}
        difference = _difference(whole, (ends[0], rank))
        if difference:
            raise RanksDisagree(f"the graph that was handed over is not the own one: {difference}")

    return taken


def _device_of(model: nn.Module, inputs: Sequence[Any]) -> torch.device:
    for given in [*ModelState.of(model).tensors, *pytree.tree_leaves(tuple(inputs))]:
        if isinstance(given, torch.Tensor):
            return given.device
    return torch.device("cpu")


def _partitions_of_groups() -> dict[str, Partition]:
    """Return, by the name of this rank's group, every rank's groups made in the same place.

    Only groups that divide the world are among them. Every rank must call it.
    """
    own: dict[str, tuple[int, ...]] = {}
    for group, name in names_of_live_groups().items():
        own[name] = tuple(dist.get_process_group_ranks(group))
    of_ranks = gather_objects(list(own.values()))
    partitions = {}
    # Some ranks may have made more groups than others.
    for name, members in zip(own, zip(*of_ranks, strict=False), strict=False):
        if not partition_fault(dict(enumerate(members))):
            partitions[name] = tuple(dict.fromkeys(members))
    return partitions


_PLAIN = (bool, int, float, complex, str)


def _given(model: nn.Module, inputs: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each tensor of the state, each input, and each number or string that a
    module holds: a trace depends on them.
    """
    state = ModelState.of(model)
    for fqn, tensor in zip(state.fqns, state.tensors, strict=True):
        own, placements = tensor, ""
        if isinstance(tensor, DTensor):
            own, placements = local_part(tensor), str(tensor.placements)
        trained = "trained" if tensor.requires_grad else "fixed"
        yield (
            f"{fqn} {tensor_text(own)} {own.stride()} on {own.device.type}, {trained} {placements}"
        )

    leaves, spec = pytree.tree_flatten(tuple(inputs))
    for fqn, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            # RunMode names the mode; what begins with "_" may be a counter or an id.
            if type(value) in _PLAIN and name != "training" and not name.startswith("_"):
                yield f"{fqn}.{name} {value!r}".removeprefix(".")
    yield f"mode {RunMode.of(model, [*map(local, state.tensors), *leaves])}"
    for place, leaf in enumerate(leaves):
        text = repr(leaf)
        if isinstance(leaf, torch.Tensor):
            text = f"{tensor_text(leaf)} {leaf.stride()}"
        yield f"input {place} {text}"

    yield f"inputs {spec}"


def _nodes_with_groups(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes that name a process group, with the place of its name among the arguments."""
    for node in nodes_within(gm):
        found = parameter(node.target, GROUP)
        if found is not None:
            yield node, found[0]


def _lines(traced: TracedStep, partitions: Mapping[str, Partition]) -> Iterator[str]:
    """Yield a line for each node, without what may differ between ranks, and one for gradients."""
    for gm in filter(None, (traced.gm, traced.twin)):
        for node, _ in _nodes_with_groups(gm):
            name = argument_of(node, GROUP)
            if name not in partitions:
                raise ValueError(f"its process group {name!r} has no counterpart on every rank")
        for line in node_lines(gm, dist.get_rank(), partitions):
            yield f"{line.text} at {line.where}"
    yield f"gradients placed {traced.gradient_placements}"


def _read_step(
    data: bytes,
    model: nn.Module,
    inputs: Sequence[Any],
    groups: Iterable[str],
    device: torch.device,
) -> TracedStep:
    """Read a step that another rank has written, with the groups and the device of this rank."""
    (gm, *twins), (names, fakes, placements) = graphs_of(data, new_fake_mode(), device)
    own = dict(zip(names, groups, strict=True))
    for graph in (gm, *twins):
        for node, place in _nodes_with_groups(graph):
            name = own[argument_of(node, GROUP)]
            if place < len(node.args):
                node.update_arg(place, name)
            else:
                node.update_kwarg(GROUP, name)
            node.meta.pop("eager_input_vals", None)  # which names the group, too

    state = ModelState.of(model)
    return TracedStep(
        gm,
        fakes,
        tuple(state.parameters),
        tuple(state.buffers),
        state.trainable,
        pytree.tree_structure(tuple(inputs)),
        placements,
        rank_of(state),
        twins[0] if twins else None,
        handed_over="from another rank",
        mode=RunMode.of(model, fakes),
    )


def _difference(texts: Mapping[int, str] | Sequence[str], ranks: Sequence[int]) -> str:
    """Describe the first line of the first rank that differs from the first of ``ranks``; "" if
    none does.
    """
    found = first_differing_line(texts, ranks)
    if found is None:
        return ""
    return f"rank {found.rank} has {found.line.text}, rank {found.other} {found.other_line.text}"
