"""Train eagerly with torch's own ``fully_shard``, and read off the bucket layout that it has.

Here is the reference that a rewritten graph is compared with.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer._torch import fsdp2
from pytest_gtrainer._torch.fsdp2 import FSDP2Policy, fully_shard
from pytest_gtrainer.graph.bucket_plan import Plan, tied_parameters
from pytest_gtrainer.graph.layout import (
    ALL_GATHER_NAME,
    ALL_REDUCE_NAME,
    REDUCE_SCATTER_NAME,
    BucketLayout,
    Payload,
    Slot,
)
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.references.chunked import eager_chunked
from pytest_gtrainer.references.config import TrainConfig, bucket_modules, new_model, train
from pytest_gtrainer.tracing.sharding import default_reduce_dtype


class EagerRun:
    """A model under ``fully_shard``, wrapped once for each bucket of the plan, or under DDP.

    Train it once with ``run``.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.model = new_model(config)
        self._side = "eager DDP" if config.replicate else "eager fully_shard"
        self._trained = self.model
        if config.replicate:
            limits: Any = None
            if config.ddp_bucket_mb is not None:
                # A list of one is for all buckets: DDP ignores bucket_cap_mb in the first step.
                limits = [config.ddp_bucket_mb]
            self._trained = DistributedDataParallel(
                self.model, device_mesh=config.mesh, bucket_cap_mb_list=limits
            )
        else:
            shard_eagerly(self.model, config)

    def run(self, recorder: Record | None = None) -> Record:
        """Train for ``config.steps`` steps; ``references.config.train`` says what is recorded."""
        chunking: AbstractContextManager[Any] = nullcontext()
        if self.config.chunk is not None:
            chunking = eager_chunked(self.model, self.config.chunk)
        with chunking:
            return train(self.config, self.model, self._compute_gradients, self._side, recorder)

    def layout(self) -> BucketLayout:
        """Return where FSDP2 put each parameter; call it after ``run``. Empty under DDP."""
        if self.config.replicate:
            return BucketLayout(())
        return eager_bucket_layout(self.model)

    def _compute_gradients(self, *inputs: Any) -> torch.Tensor:
        with self.config.context():
            loss = self.config.step(self._trained, *inputs)
            loss.backward()
        return loss


def shard_eagerly(model: nn.Module, config: TrainConfig) -> None:
    """Apply ``fully_shard`` to the modules of each bucket, then to the root.

    Raises:
        PlanError: the plan does not fit the model.
        ValueError: a parameter is sharded over the same ranks already.
    """
    policy = FSDP2Policy(
        param_dtype=config.mp_policy.param_dtype,
        reduce_dtype=config.mp_policy.reduce_dtype,
        cast_forward_inputs=False,  # a graph has no module boundary at which to cast
    )
    Plan(config.bucket_plan).check_ties(tied_parameters(model))
    buckets = bucket_modules(model, config.bucket_plan)
    for label, modules in buckets:
        mesh = config.submeshes.get(label, config.mesh)
        _refuse_overlap(label, modules, mesh)
        target: Any = modules[0] if len(modules) == 1 else modules
        fully_shard(target, mesh=mesh, mp_policy=policy)
        if label in config.submeshes:
            # FSDP2 would choose a premultiplied sum, which gloo does not have.
            modules[0].set_gradient_divide_factor(float(config.mesh.size()))
            modules[0].set_force_sum_reduction_for_comms(True)

    if not any(model in modules for _, modules in buckets):
        fully_shard(model, mesh=config.mesh, mp_policy=policy)


def _refuse_overlap(label: str, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Raise if a parameter is sharded already, over ranks that ``mesh`` has, too.

    Over other ranks it may be: experts of expert parallelism are sharded again over ``efsdp``.
    """
    wrapped: set[nn.Parameter] = set()
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, fsdp2.FSDPModule):
                wrapped.update(inner.parameters())

    for module in modules:
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor) or parameter in wrapped:
                continue
            theirs = parameter.device_mesh
            if len(set(mesh.mesh.flatten().tolist()) & set(theirs.mesh.flatten().tolist())) > 1:
                raise ValueError(
                    f"{name} of the bucket {label!r} is sharded already, over {theirs}, and {mesh} "
                    "has the same ranks: give the bucket a mesh of other ranks "
                    "(TrainConfig.submeshes), or "
                    "shard the model once"
                )


def eager_bucket_layout(model: nn.Module) -> BucketLayout:
    """Return which parameter sits at which byte of FSDP2's collectives.

    They are all-gathers, reduce-scatters and, of replicas, all-reduces. Call it after a backward,
    while gradients are there: FSDP2 finishes its set-up in the first forward, and reduces the
    parameters that got a gradient.

    Raises:
        ValueError: no module of ``model`` has parameters managed by ``fully_shard``.
    """
    groups = fsdp2.parameter_groups(model)
    if not groups:
        raise ValueError(
            f"{type(model).__name__} has no parameters managed by fully_shard: wrap it, and run "
            "one step"
        )

    if all(parameter.grad is None for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no gradients: run a backward first, and keep them"
        )

    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    payloads: list[Payload] = []
    for group in groups:
        payloads += _payloads(group, names)
    return BucketLayout(tuple(payloads))


def _payloads(group: Any, names: dict[int, str]) -> list[Payload]:
    """Return what one parameter group of FSDP2 gathers and reduces, by the names of its shards."""
    gathers, scatters, replicas = fsdp2.groups_of(group)

    def slots(parameters: list[Any], sizes: list[int]) -> tuple[Slot, ...]:
        fqns = [names[id(parameter.sharded_param)] for parameter in parameters]
        return tuple(map(Slot, fqns, accumulate(sizes, initial=0), sizes))

    sizes, dtype = fsdp2.all_gather_inputs(group)
    gather = Payload(ALL_GATHER_NAME, dtype, _ranks(gathers), "", slots(group.fsdp_params, sizes))
    # FSDP2 gathers frozen and unused parameters, and reduces only those that have a gradient.
    trained = []
    for parameter in group.fsdp_params:
        if parameter.sharded_param.grad is not None:
            trained.append(parameter)

    if not trained:
        return [gather]
    first = trained[0]
    dtype = fsdp2.reduce_dtype(group) or default_reduce_dtype(first.param_dtype, first.orig_dtype)
    op, op_of_replicas = fsdp2.reduce_ops(group, dtype, first.sharded_param.device.type)
    sizes = []
    for parameter in trained:
        sizes.append(fsdp2.shard_numel(parameter, scatters.size()) * dtype.itemsize)
    scatter = Payload(REDUCE_SCATTER_NAME, dtype, _ranks(scatters), op, slots(trained, sizes))
    if replicas is None:
        return [gather, scatter]
    reduce = replace(scatter, collective=ALL_REDUCE_NAME, ranks=_ranks(replicas), op=op_of_replicas)
    return [gather, scatter, reduce]


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
