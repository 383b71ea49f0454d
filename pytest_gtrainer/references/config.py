"""Configure and train both sides of a comparison: one configuration and one loop, so that they
cannot differ by accident.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.graph.bucket_plan import (
    LOSS,
    SUGGESTS,
    Bucket,
    BucketPlan,
    Plan,
    layer_of,
    unknown_modules,
)
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
    """The training run of both sides of a comparison.

    Attributes:
        model: a function that builds the model, with equal values on all ranks of the mesh that
            shards them.
        step: ``step(model, *inputs) -> scalar loss``.
        batch: ``batch(step, coordinate) -> inputs``, tensors on the device of the mesh; with
            ``accumulate`` the number of the batch, over all steps, stands for the step. The
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
        max_norm: clip gradients to this norm, above 0; they are recorded before and after.
        activation_checkpoint: let the backward recompute every layer, both sides by
            ``torch.utils.checkpoint``; a graph refuses to restore random numbers, see
            ``trace_step``.
        chunk: let the modules it matches run in chunks: ``eager_chunked`` on the eager side,
            ``chunk_pass`` on the graph's, which needs a second trace.
        context: entered around forward and backward of every step, on both sides:
            ``loss_parallel``, say.
        record_rng: record the states of all random generators before each step, and at the end.
        trace_once: two ranks of ``mesh`` trace for all, which spares time where ranks share cores;
            see ``trace_once``.
        accumulate: number of batches whose gradients a step adds before the optimiser, and before
            clipping: ``batch`` is called with 0, 1, ... over all steps. Each batch reduces its
            gradients, as FSDP2 does by default. For a mean divide the loss of ``step`` by it.
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
    accumulate: int = 1
    steps: int = 5

    def __post_init__(self) -> None:
        _check_types(self)
        _check_numbers(self)
        if self.mesh.ndim > 2:
            raise ValueError(
                "a mesh has one dimension, or two (replicate, shard); this one is "
                f"{self.mesh.ndim}-D"
            )

        if self.hybrid and self.submeshes:
            raise ValueError(
                "submeshes beside a 2-D mesh are not supported: hybrid sharding is for the whole "
                "model"
            )

        if self.replicate and (self.hybrid or self.submeshes):
            raise ValueError(
                "replicate=True is for a 1-D mesh without submeshes: a 2-D mesh replicates and "
                "shards"
            )

        if self.replicate and self.accumulate > 1:
            raise ValueError(
                f"accumulate={self.accumulate} with replicate=True: DDP reduces again what it has "
                "accumulated, and the graph each batch by itself; take fully_shard, or return the "
                "sum of the losses from step"
            )

        if self.replicate and self.mp_policy != MixedPrecisionPolicy():
            raise ValueError(
                f"replicate=True with {self.mp_policy}: DDP has no dtypes of its own, leave "
                "mp_policy out"
            )

        _check_mesh(self.mesh, "TrainConfig.mesh")
        for name, mesh in self.submeshes.items():
            _check_mesh(mesh, f"the mesh of {name!r} in submeshes")
            if mesh.ndim != 1:
                raise ValueError(
                    f"submeshes has a {mesh.ndim}-D mesh for {name!r}: take the one dimension it "
                    "is sharded over"
                )

        _check_submeshes(self.mesh, self.submeshes)
        # A bucket of several modules has no FQN of its own, and is a list in the plan.
        unknown = sorted(name for name in self.submeshes if name not in self.bucket_plan)
        if unknown:
            raise PlanError(
                f"submeshes names {', '.join(unknown)}, which is no entry of the bucket plan"
            )

    def inputs(self, number: int, coordinate: int | None = None) -> Batch:
        """Return the batch of this number, over all steps, at a data coordinate, by default this
        rank's.

        Raises:
            TypeError: ``batch`` gives no tuple: each row of a tensor, and each key of a dict, would
                be taken for an input.
        """
        batch = self.batch(number, self.coordinate if coordinate is None else coordinate)
        if isinstance(batch, torch.Tensor):
            raise TypeError(
                "TrainConfig.batch returns a tensor: return a tuple of the step's inputs, one as "
                "(tensor,)"
            )
        give = "a tuple of the step's inputs, one as (tensor,)"
        check_type(batch, (tuple, list), "what TrainConfig.batch returns", give)
        return batch

    @property
    def coordinate(self) -> int:
        """This rank's index among the data-parallel ranks, from 0."""
        # Not from the tensor of the mesh: a batch may be asked for while a step is traced.
        own = self.mesh.get_coordinate() or ()
        return sum(at * math.prod(self.mesh.shape[dim + 1 :]) for dim, at in enumerate(own))

    def batches(self, step: int) -> list[tuple[int, str]]:
        """Return the number of each batch of a step, and the name of its loss in a record."""
        if self.accumulate == 1:
            return [(step, "loss")]
        first = step * self.accumulate
        numbers = range(first, first + self.accumulate)
        return [(number, f"batch {number}") for number in numbers]

    @property
    def hybrid(self) -> bool:
        """Return whether the mesh replicates parameters in one dimension, shards in the other."""
        return self.mesh.ndim == 2


def _check_types(config: TrainConfig) -> None:
    """Refuse what is of another type than its field: it would fail far from here, or not at all."""
    if isinstance(config.model, nn.Module):
        raise TypeError(
            f"TrainConfig.model is a {type(config.model).__name__}: give a function that builds "
            "it, as each side trains a model of its own"
        )
    for name in ("model", "step", "batch", "optimizer", "context"):
        value = getattr(config, name)
        if not callable(value):
            hint = "; leave it out for none" if name == "context" else ""
            raise TypeError(f"TrainConfig.{name} is {_spell(value)}: give a function{hint}")

    none = type(None)
    expected: dict[str, tuple[type, ...]] = {
        "mesh": (DeviceMesh,),
        "submeshes": (Mapping,),
        "mp_policy": (MixedPrecisionPolicy,),
        "activation_checkpoint": (ActivationCheckpointConfig, none),
        "chunk": (ChunkConfig, none),
        "replicate": (bool,),
        "record_rng": (bool,),
        "trace_once": (bool,),
    }
    for name, types in expected.items():
        value = getattr(config, name)
        if not isinstance(value, types):
            wanted = " or ".join("None" if each is none else each.__name__ for each in types)
            raise TypeError(f"TrainConfig.{name} is {_spell(value)}: expected {wanted}")
    for name, mesh in config.submeshes.items():
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"submeshes has {_spell(mesh)} for {name!r}: give a DeviceMesh")


def _spell(value: object) -> str:
    """Spell a value with its type, or the type alone if the value takes more than a few words.

    >>> _spell(3), _spell("no"), _spell(None), _spell([1] * 99)
    ('3, of type int', "'no', of type str", 'None', 'of type list')
    """
    if value is None:
        return "None"
    words = repr(value)
    own_type = f"of type {type(value).__name__}"
    return own_type if len(words) > 60 or "\n" in words else f"{words}, {own_type}"


def _check_numbers(config: TrainConfig) -> None:
    steps, max_norm, bucket_mb = config.steps, config.max_norm, config.ddp_bucket_mb
    for name, what in (("steps", "steps"), ("accumulate", "batches of a step")):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: give a whole number of {what}")
    if steps < 1:
        raise ValueError(f"steps={steps}: train for at least one step")
    if config.accumulate < 1:
        raise ValueError(f"accumulate={config.accumulate}: a step has at least one batch")
    # An infinite norm clips nothing, and is how trainers only measure it.
    if max_norm is not None and not (_is_number(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm={max_norm!r}: give a number above 0, or None to clip nothing")
    if bucket_mb is not None and not (_is_number(bucket_mb) and 0 <= bucket_mb < math.inf):
        raise ValueError(
            f"ddp_bucket_mb={bucket_mb!r}: give a number of MiB, 0 for a bucket for each gradient, "
            "or None for torch's size"
        )
    if bucket_mb != 0 and not config.replicate:
        raise ValueError(
            f"ddp_bucket_mb={bucket_mb!r} without replicate=True: only DDP has such buckets; give "
            "replicate=True, or leave it out"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_mesh(mesh: DeviceMesh, name: str) -> None:
    """Check that each rank is in a mesh once, and that the calling rank is one of them.

    Torch would fail later, with a message about shapes.
    """
    ranks = mesh.mesh.flatten().tolist()
    rank, count = Counter(ranks).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{name} has rank {rank} more than once, {mesh.mesh.tolist()}: its dimensions must not "
            "overlap"
        )

    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} is not in {name}, which has ranks "
            f"{ranks}: every rank that trains needs a mesh that it is part of"
        )


def _check_submeshes(mesh: DeviceMesh, submeshes: Mapping[str, DeviceMesh]) -> None:
    """Check that submeshes are parts of the mesh, and were cut out of root meshes that do not
    overlap.

    Ranks of root meshes that overlap would wait for each other.
    """
    named = {f"the mesh of {name!r} in submeshes": one for name, one in submeshes.items()}
    for name, one in named.items():
        beyond = sorted(set(one.mesh.flatten().tolist()) - set(mesh.mesh.flatten().tolist()))
        if beyond:
            raise ValueError(
                f"{name} has ranks {one.mesh.tolist()}, and TrainConfig.mesh has "
                f"{mesh.mesh.tolist()}, without {beyond}: a submesh is a part of the ranks that "
                "data is parallel over"
            )

    for (name, one), (other_name, other) in itertools.combinations(named.items(), 2):
        ours, theirs = (set(root_ranks(each).flatten().tolist()) for each in (one, other))
        if ours & theirs and not (ours <= theirs or theirs <= ours):
            raise ValueError(
                f"{name} is of a mesh of ranks {sorted(ours)}, and {other_name} of one of ranks "
                f"{sorted(theirs)}: they share {sorted(ours & theirs)} alone; cut both out of one "
                "mesh, init_device_mesh(...)['name']"
            )


def finished(
    config: TrainConfig | Callable[[DeviceMesh], TrainConfig], world: World | None
) -> TrainConfig:
    """Return a configuration as it is, or the one that a function builds from this rank's mesh."""
    if isinstance(config, TrainConfig):
        return config
    check_builds(config)
    if world is None:
        raise ValueError(
            "a function that builds the configuration needs a mesh: give world=gt_world too"
        )
    from pytest_gtrainer.worlds.fake import make_mesh

    return built(config, make_mesh(world))


def check_builds(config: object) -> None:
    """Check that a configuration is one, or a function."""
    if not isinstance(config, TrainConfig) and not callable(config):
        raise TypeError(
            f"the configuration is {_spell(config)}: give a TrainConfig, or a function that builds "
            "it from a mesh"
        )


def built(build: Callable[[DeviceMesh], TrainConfig], mesh: DeviceMesh) -> TrainConfig:
    """Return the configuration that a function builds from a mesh."""
    config = build(mesh)
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"the function of the configuration returns {_spell(config)}: return a TrainConfig"
        )
    return config


def new_optimizer(config: TrainConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimiser of a configuration for these parameters.

    Raises:
        TypeError: it is no optimiser.
        ValueError: it holds none of the parameters. Then no weight is trained, on either side.
    """
    optimizer = config.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"TrainConfig.optimizer returns {_spell(optimizer)}: return a torch.optim.Optimizer"
        )
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    if parameters and held.isdisjoint(map(id, parameters)):
        raise ValueError(
            "TrainConfig.optimizer returns an optimiser that holds no parameter of the model, so "
            "no weight would be trained: give it the parameters that it is called with"
        )
    return optimizer


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
                own_mesh = config.mesh
                for entry, mesh in config.submeshes.items():
                    if name.startswith(f"{entry}."):
                        own_mesh = mesh
                        break
                ModelPart.of(name, parameter, own_mesh)
    except ValueError as error:
        raise ValueError(
            f"{error}. TrainConfig.model must build a new, unsharded model at every call"
        ) from None

    if config.activation_checkpoint is not None:
        checkpoint_layers(model, config.activation_checkpoint)
    return model


def checkpoint_layers(model: nn.Module, config: ActivationCheckpointConfig) -> nn.Module:
    """Let the backward recompute every layer (``layers.0``, ...) of a model, in place.

    The forwards are replaced, so what hooks a layer's call is not recomputed.
    """
    layers = [module for fqn, module in model.named_modules() if fqn and layer_of(fqn) == fqn]
    if not layers:
        outermost = ", ".join(name for name, _ in model.named_children())
        raise ValueError(
            f"the model has no layers such as layers.0 to checkpoint; its outermost are {outermost}"
        )

    for layer in layers:
        recomputed = partial(checkpoint, layer.forward, **config.arguments())
        # eager_chunked reads the signature of the forward that it wraps.
        layer.forward = update_wrapper(recomputed, layer.forward)
    return model


def bucket_modules(model: nn.Module, plan: BucketPlan) -> list[tuple[str, list[nn.Module]]]:
    """Return the modules that FSDP2 wraps for each bucket, by its label, inner buckets first.

    Raises:
        PlanError: the plan names a module that does not exist, or leaves out a layer.
    """
    modules = dict(model.named_modules())
    buckets = Plan(plan).buckets
    planned = [fqn for bucket in buckets for fqn in bucket.fqns]
    missing = [fqn for fqn in planned if fqn not in modules and fqn != LOSS]
    if missing:
        raise unknown_modules(missing, modules)
    covered = set(map(layer_of, planned))
    left_out = []
    for fqn, module in modules.items():
        if layer_of(fqn) == fqn and fqn not in covered and list(module.parameters()):
            left_out.append(fqn)

    if left_out:
        raise PlanError(f"the bucket plan leaves out {', '.join(left_out)}; {SUGGESTS}")

    def depth(bucket: Bucket) -> int:
        """Return how many modules are around the innermost one of a bucket; 0 for the root."""
        return max(len(fqn.split(".")) if fqn else 0 for fqn in bucket.roots)

    # fully_shard has to wrap an inner module before the one around it.
    found = []
    for bucket in sorted(buckets, key=depth, reverse=True):
        found.append((bucket.label, [modules[fqn] for fqn in bucket.roots if fqn in modules]))
    return found


def start_of(rank: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return an entry for a record's ``meta``: the digest of a rank's weights at the start.

    A pipeline stage without parameters has no entry.
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

    Args:
        compute_gradients: ``compute_gradients(*inputs)`` returns the loss and fills ``.grad``.
        recorder: takes the tensors instead of the record that is returned.
        part: distinguishes ranks that have other parts of one model, as stages of a pipeline.

    Raises:
        ValueError: in a fake world, whose collectives move no data.
        ReplicasDiffer: ranks of one data coordinate have other batches, or other whole tensors.
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
    optimizer = new_optimizer(config, parameters)
    # Beside data parallelism, ranks of one data coordinate share a model.
    peers: list[tuple[int, ...]] = []
    if root_ranks(config.mesh).numel() == world > config.mesh.size():
        peers = peers_by((config.coordinate, part))
    for step in range(config.steps):
        optimizer.zero_grad()
        # Eager code would add the gradients of parameters that the optimiser does not hold.
        model.zero_grad()
        if config.record_rng:
            record_random_states(record, step, rank)
        for number, name in config.batches(step):
            inputs = config.inputs(number)
            if peers:
                _check_batch(inputs, peers, number)
            loss = compute_gradients(*inputs)
            record.add(step, rank, "loss", name, local(loss.detach()))
        record_gradients(record, step, rank, "gradient", model.named_parameters())
        if config.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, config.max_norm)
            record_gradients(record, step, rank, "clipped", model.named_parameters())
        optimizer.step()
        record_state(record, step, rank, model.named_parameters(), optimizer, model.named_buffers())
        weights = [(name, local(value.detach())) for name, value in model.named_parameters()]
        print_weight_digest(step, rank, side, weights)

    if config.record_rng:
        record_random_states(record, config.steps - 1, rank, " at the end")
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


def _check_batch(inputs: Batch, peers: list[tuple[int, ...]], number: int) -> None:
    """Refuse a batch that differs between ranks which share a model. Every rank must call it."""
    tensors = []
    for place, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, torch.Tensor):
            tensors.append((f"input {place}", leaf))
    assert_alike(
        tensors, peers, f"of one data coordinate, in TrainConfig.batch({number}, coordinate)"
    )


def record_random_states(record: Record, step: int, rank: int, when: str = "") -> None:
    """Record the states of all random generators, as they are before the step unless ``when``."""
    for name, state in random_state().items():
        record.add(step, rank, "rng", name + when, state)


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
    optimizer: torch.optim.Optimizer | None,
    buffers: Named,
) -> None:
    """Record weights, what the optimiser keeps of each, and buffers; of DTensors the local part."""
    for phase, name, tensor in trained_state(parameters, optimizer, buffers):
        record.add(step, rank, phase, name, local(tensor.detach()))


def trained_state(
    parameters: Named, optimizer: torch.optim.Optimizer | None, buffers: Named
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield phase, name and tensor of weights, what the optimiser keeps of each, and buffers."""
    for name, parameter in parameters:
        yield "weight", name, parameter
        state: dict[str, Any] = {}
        if optimizer is not None:
            state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            # L-BFGS keeps lists, and some optimisers count their steps in Python.
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                where = f"{name}.{key}{pytree.keystr(path)}"
                if isinstance(leaf, torch.Tensor):
                    yield "optimizer", where, leaf
                elif isinstance(leaf, int | float):
                    yield "optimizer", where, torch.tensor(leaf, dtype=torch.float64)

    for name, buffer in buffers:
        yield "buffer", name, buffer
