"""What both sides of a comparison share: one configuration, so that they cannot differ by accident,
and one loop.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer._torch.passes import root_ranks
from pytest_gtrainer._torch.random_states import random_state
from pytest_gtrainer._torch.threads import BACKEND
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.bucket_plan import LOSS, BucketPlan, Plan, layer_of, unknown_modules
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.numerics.determinism import ActivationCheckpointConfig
from pytest_gtrainer.numerics.digest import digest, print_weight_digest
from pytest_gtrainer.numerics.record import START, Record, normalised
from pytest_gtrainer.passes.chunking.config import ChunkConfig
from pytest_gtrainer.references.replicas import (
    ReplicasDiffer,
    ReplicaWarning,
    assert_alike,
    find_difference,
    peers_by,
    state_of,
)
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.tracing.refusals import refuse_model
from pytest_gtrainer.tracing.sharding import MixedPrecisionPolicy, ModelPart

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.spec import World

Batch = tuple[Any, ...]


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimiser: AdamW with decay, so that every part of its state matters."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What both sides of a comparison train.

    Attributes:
        model: a function that builds the model, with equal values on all ranks of the mesh that
            shards them.
        step: ``step(model, *inputs) -> scalar loss``.
        batch: ``batch(step, coordinate) -> inputs``, tensors on the device of the mesh. The
            coordinate is the place in ``mesh``, from 0. Ranks that share a model (tensor
            parallelism) get one batch; real ranks check this.
        bucket_plan: a list of buckets (module FQNs, or lists of these), each also one
            ``fully_shard`` group.
        mesh: the ranks of data parallelism: 1-D, or 2-D (replicate, shard) for hybrid sharding.
        submeshes: plan entries (a FQN each) that are sharded over another mesh, as routed experts
            are; their gradients are summed there and divided by the size of ``mesh``.
        mp_policy: dtypes of both sides.
        replicate: DDP on the eager side, one all-reduce for each gradient in the graph; the plan is
            not used.
        ddp_bucket_mb: size of DDP's buckets. 0 reduces every gradient by itself, as the graph does.
            None is torch's size (one bucket in the first step, then 25 MiB), with other bits: a
            ring adds an element in an order that depends on its place in the bucket.
        optimizer: makes the optimiser of the trainable parameters.
        max_norm: clip gradients to this norm; they are recorded before and after.
        activation_checkpoint: let the backward recompute every layer, both sides by
            ``torch.utils.checkpoint``; a graph refuses to restore random numbers, see
            ``trace_step``.
        chunk: let the modules it matches run in chunks: ``eager_chunked`` on the eager side,
            ``chunk_pass`` on the graph's, which needs a second trace.
        context: entered around forward and backward of every step, on both sides:
            ``loss_parallel``, say.
        record_rng: record the states of all random generators before each step.
        trace_once: two ranks of ``mesh`` trace for all, which spares time where ranks share cores;
            see ``trace_once``.
        steps: number of steps.
    """

    model: Callable[[], nn.Module]
    step: Callable[..., torch.Tensor]
    batch: Callable[[int, int], Batch]
    bucket_plan: BucketPlan
    mesh: DeviceMesh
    submeshes: Mapping[str, DeviceMesh] = field(default_factory=dict)
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    replicate: bool = False
    ddp_bucket_mb: float | None = 0
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = adamw
    max_norm: float | None = None
    activation_checkpoint: ActivationCheckpointConfig | None = None
    chunk: ChunkConfig | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    record_rng: bool = False
    trace_once: bool = False
    steps: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: train for at least one step")
        if self.mesh.ndim > 2:
            raise ValueError(
                f"a mesh has one dimension, or two (replicate, shard); this one is {self.mesh.ndim}-D"
            )
        if self.hybrid and self.submeshes:
            raise ValueError(
                "submeshes beside a 2-D mesh are not supported: hybrid sharding is for the whole model"
            )
        if self.replicate and (self.hybrid or self.submeshes):
            raise ValueError(
                "replicate=True is for a 1-D mesh without submeshes: a 2-D mesh replicates and shards"
            )
        if self.replicate and self.mp_policy != MixedPrecisionPolicy():
            raise ValueError(
                f"replicate=True with {self.mp_policy}: DDP has no dtypes of its own, leave mp_policy out"
            )
        _check_mesh(self.mesh, "TrainConfig.mesh")
        for name, mesh in self.submeshes.items():
            _check_mesh(mesh, f"the mesh of {name!r} in submeshes")
            if mesh.ndim != 1:
                raise ValueError(
                    f"submeshes has a {mesh.ndim}-D mesh for {name!r}: take the one dimension it is sharded over"
                )
        _check_submeshes(self.mesh, self.submeshes)
        entries = {entry for entry in self.bucket_plan if isinstance(entry, str)}
        unknown = sorted(set(self.submeshes) - entries)
        if unknown:
            raise PlanError(
                f"submeshes names {', '.join(unknown)}, which is no entry of the bucket plan"
            )

    def inputs(self, step: int, coordinate: int | None = None) -> Batch:
        """The inputs of a step at a data coordinate, by default this rank's.

        Raises:
            TypeError: ``batch`` gives a tensor, whose rows would each be taken for an input.
        """
        batch = self.batch(step, self.coordinate if coordinate is None else coordinate)
        if isinstance(batch, torch.Tensor):
            raise TypeError(
                "TrainConfig.batch returns a tensor: return a tuple of the step's inputs, one as (tensor,)"
            )
        return batch

    @property
    def coordinate(self) -> int:
        """This rank's index among the data-parallel ranks, from 0."""
        own = (
            self.mesh.get_coordinate() or ()
        )  # no tensor of the mesh: a batch may be asked for while a step is traced
        return sum(at * math.prod(self.mesh.shape[dim + 1 :]) for dim, at in enumerate(own))

    @property
    def hybrid(self) -> bool:
        """Return whether parameters are replicated over one dimension of the mesh and sharded over
        the other.
        """
        return self.mesh.ndim == 2


def _check_mesh(mesh: DeviceMesh, name: str) -> None:
    """Each rank is in a mesh once, and the calling process is one of them; else torch would fail
    later, by a shape.
    """
    ranks = mesh.mesh.flatten().tolist()
    twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
    if twice is not None:
        raise ValueError(
            f"{name} has rank {twice} more than once, {mesh.mesh.tolist()}: its dimensions must not overlap"
        )
    if mesh.get_coordinate() is None:
        wrong = f"rank {dist.get_rank()} of {dist.get_world_size()} is not in {name}, which has ranks {ranks}"
        raise ValueError(f"{wrong}: every rank that trains needs a mesh that it is part of")


def _check_submeshes(mesh: DeviceMesh, submeshes: Mapping[str, DeviceMesh]) -> None:
    """Submeshes are parts of the mesh, and of root meshes that do not overlap: else ranks would
    wait for each other.
    """
    named = {f"the mesh of {name!r} in submeshes": one for name, one in submeshes.items()}
    for name, one in named.items():
        beyond = sorted(set(one.mesh.flatten().tolist()) - set(mesh.mesh.flatten().tolist()))
        if beyond:
            wrong = f"{name} has ranks {one.mesh.tolist()}, and TrainConfig.mesh has {mesh.mesh.tolist()}"
            raise ValueError(
                f"{wrong}, without {beyond}: a submesh is a part of the ranks that data is parallel over"
            )
    for (name, one), (other_name, other) in itertools.combinations(named.items(), 2):
        ours, theirs = (set(root_ranks(each).flatten().tolist()) for each in (one, other))
        if ours & theirs and not (ours <= theirs or theirs <= ours):
            raise ValueError(
                f"{name} is of a mesh of ranks {sorted(ours)}, and {other_name} of one of ranks {sorted(theirs)}: they "
                f"share {sorted(ours & theirs)} alone; cut both out of one mesh, init_device_mesh(...)['name']"
            )


def finished(
    config: TrainConfig | Callable[[DeviceMesh], TrainConfig], world: World | None
) -> TrainConfig:
    """The configuration itself, or the one that a function builds from this rank's mesh of
    ``world``.
    """
    if isinstance(config, TrainConfig):
        return config
    if world is None:
        raise ValueError(
            "a function that builds the configuration needs a mesh: give world=gt_world too"
        )
    from pytest_gtrainer.worlds.fake import make_mesh

    return config(make_mesh(world))


def new_model(config: TrainConfig) -> nn.Module:
    """Return a model of the configuration, checkpointed if it says so.

    Raises:
        ValueError: a parameter cannot be sharded, or has a hook; or the model or a submodule is
            wrapped.
    """
    model = config.model()
    try:
        refuse_model(model)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                inner = (
                    mesh for entry, mesh in config.submeshes.items() if name.startswith(f"{entry}.")
                )
                ModelPart.of(name, parameter, next(inner, config.mesh))
    except ValueError as error:
        raise ValueError(
            f"{error}. TrainConfig.model must build a new, unsharded model at every call"
        ) from None
    return (
        model
        if config.activation_checkpoint is None
        else checkpoint_layers(model, config.activation_checkpoint)
    )


def checkpoint_layers(model: nn.Module, config: ActivationCheckpointConfig) -> nn.Module:
    """Let the backward recompute every layer (``layers.0``, ...) in place, inside of what hooks its
    call.
    """
    layers = [module for fqn, module in model.named_modules() if fqn and layer_of(fqn) == fqn]
    if not layers:
        outermost = ", ".join(name for name, _ in model.named_children())
        raise ValueError(
            f"the model has no layers such as layers.0 to checkpoint; its outermost are {outermost}"
        )
    for layer in layers:
        recomputed = partial(checkpoint, layer.forward, **config.arguments())
        layer.forward = update_wrapper(
            recomputed, layer.forward
        )  # its signature is read: eager_chunked
    return model


def bucket_modules(model: nn.Module, plan: BucketPlan) -> list[tuple[str, list[nn.Module]]]:
    """Return what FSDP2 wraps for each bucket, by label, inner ones first; a PlanError if plan and
    layers do not fit.
    """
    modules = dict(model.named_modules())
    buckets = Plan(plan).buckets
    missing = [
        fqn for bucket in buckets for fqn in bucket.fqns if fqn not in modules and fqn != LOSS
    ]
    if missing:
        raise unknown_modules(missing, modules)
    layers = [
        fqn
        for fqn, module in modules.items()
        if layer_of(fqn) == fqn and any(True for _ in module.parameters())
    ]
    covered = {layer_of(fqn) for bucket in buckets for fqn in bucket.fqns}
    left_out = [fqn for fqn in layers if fqn not in covered]
    if left_out:
        raise PlanError(f"the bucket plan leaves out {', '.join(left_out)}")
    # by the number of modules around them, of which the root has none
    inner_first = sorted(
        buckets, key=lambda bucket: -max(fqn.count(".") + 1 if fqn else 0 for fqn in bucket.roots)
    )
    return [
        (bucket.label, [modules[fqn] for fqn in bucket.roots if fqn in modules])
        for bucket in inner_first
    ]


def start_of(rank: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """For a record's ``meta``: what a rank's weights are at first; nothing of a stage that has
    none.
    """
    named = dict(sorted((normalised(name), weight) for name, weight in parameters))
    return {f"{START}{rank}": digest(named)} if named else {}


def train(
    config: TrainConfig,
    model: nn.Module,
    compute_gradients: Callable[..., torch.Tensor],
    side: str,
    recorder: Record | None = None,
    part: Hashable = None,
) -> Record:
    """Train ``model`` and record loss, gradients, weights, optimiser state and buffers of every
     step.

     ``compute_gradients(*inputs)`` returns the loss and fills ``.grad``. A ``recorder`` takes the
     tensors instead of the record that is returned. ``part`` tells apart ranks that have other parts
     of one model. Refused are fake groups
    , and batches and whole tensors that differ between ranks of one data coordinate.
    """
    if dist.get_backend() == "fake":
        raise ValueError(
            'a fake world moves no data, so training in it means nothing: use gt_world("ranks")'
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    empty = Record(
        world_size=world, rank=rank, meta={"side": side, **start_of(rank, model.named_parameters())}
    )
    record = empty if recorder is None else recorder
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = config.optimizer(parameters)
    # those that share one model
    peers = (
        peers_by((config.coordinate, part))
        if root_ranks(config.mesh).numel() == world > config.mesh.size()
        else []
    )
    for step in range(config.steps):
        optimizer.zero_grad()
        if config.record_rng:
            record_random_states(record, step, rank)
        inputs = config.inputs(step)
        if peers:
            leaves = (
                (f"input {place}", leaf) for place, leaf in enumerate(pytree.tree_leaves(inputs))
            )
            tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
            assert_alike(
                tensors, peers, f"of one data coordinate, in TrainConfig.batch({step}, coordinate)"
            )
        loss = compute_gradients(*inputs)
        record.add(step, rank, "loss", "loss", local(loss.detach()))
        record_gradients(record, step, rank, "gradient", model.named_parameters())
        if config.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, config.max_norm)
            record_gradients(record, step, rank, "clipped", model.named_parameters())
        optimizer.step()
        record_state(record, step, rank, model.named_parameters(), optimizer, model.named_buffers())
        print_weight_digest(
            step,
            rank,
            side,
            ((name, local(value.detach())) for name, value in model.named_parameters()),
        )
    if peers:
        _, difference = find_difference(
            state_of(model),
            peers,
            "whole on every rank that shares the model: a shard is a DTensor",
        )
        if difference and dist.get_backend() != BACKEND:
            raise ReplicasDiffer(difference)
        if difference:
            warnings.warn(
                f"{difference}. In a simulated world this can be right: a net may add in another "
                "order for each of their data-parallel groups; on ranks it is an error",
                ReplicaWarning,
                stacklevel=2,
            )
    return empty


def record_random_states(record: Record, step: int, rank: int) -> None:
    for name, state in random_state().items():
        record.add(step, rank, "rng", name, state)


Named = Iterable[tuple[str, torch.Tensor]]


def record_gradients(record: Record, step: int, rank: int, phase: str, parameters: Named) -> None:
    for name, parameter in parameters:
        if parameter.grad is not None:
            record.add(step, rank, phase, name, local(parameter.grad.detach()))


def record_state(
    record: Record,
    step: int,
    rank: int,
    parameters: Named,
    optimizer: torch.optim.Optimizer,
    buffers: Named,
) -> None:
    """Weights, what the optimiser keeps of each, and buffers."""
    for name, parameter in parameters:
        record.add(step, rank, "weight", name, local(parameter.detach()))
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                record.add(step, rank, "optimizer", f"{name}.{key}", local(value.detach()))
    for name, buffer in buffers:
        record.add(step, rank, "buffer", name, local(buffer.detach()))
