"""Data parallelism that a tracer can see: parameters that gather on access.

An eager run and a trace see the same two collectives a parameter: an all-gather in ``param_dtype``
when the attribute is read, and a reduction of its gradient in ``reduce_dtype``.
``state_dict`` and ``parameters`` see the shards. The idea of parametrised access is SimpleFSDP's
(arXiv:2411.00284).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from pytest_gtrainer._torch.tracing import (
    annotate,
    concatenated,
    current_annotation,
    shard_of_shards,
)
from pytest_gtrainer._torch.values import parameters_of
from pytest_gtrainer.environment import LAST, installed_minor
from pytest_gtrainer.graph.nodes import PART, REDUCE
from pytest_gtrainer.tracing.model import KEY, local
from pytest_gtrainer.tracing.refusals import refuse_hooks

PLACEMENTS: dict[str, list[Placement]] = {
    "fully_shard": [Shard(0)],
    "replicate": [Replicate()],
    "hybrid_shard": [Replicate(), Shard(0)],
}


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of FSDP2's policy of the same name; None keeps what is there.

    ``param_dtype`` is the dtype parameters are gathered and used in, ``reduce_dtype`` the one
    gradients are reduced in. By default that is ``param_dtype`` up to torch 2.14, and the
    parameter's own dtype from 2.15 on, as FSDP2 does it. Gradients return in the dtype of the
    parameter. Forward inputs are not cast at module boundaries: a graph has none.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def default_reduce_dtype(param_dtype: torch.dtype | None, parameter: torch.dtype) -> torch.dtype:
    """The dtype that FSDP2 of the installed torch reduces in if the policy names none."""
    return parameter if param_dtype is None or sets_grad_dtype() else param_dtype


def sets_grad_dtype() -> bool:
    """Return whether FSDP2 of the installed torch sets ``grad_dtype`` of a gathered parameter, see
    ``gradient_dtype``.

    Up to torch 2.14 it does not, and autograd casts every gradient to the dtype of that parameter.
    """
    return (installed_minor() or LAST) >= (2, 15)


def gradient_dtype(
    gathered: torch.dtype, reduced: torch.dtype, is_replica: bool
) -> torch.dtype | None:
    """Return the dtype that FSDP2 of torch 2.15 lets autograd cast a gathered parameter's gradients
    to.

    None is for no cast. If the reduction is wider than the parameter, a gradient keeps the dtype in
    which its operator makes it: RMSNorm on CPU gives that of a bf16 weight in fp32. ``is_replica``
    is for a parameter that the model itself replicates, as a norm under tensor parallelism: there a
    sum over other ranks may come first, so that FSDP2 casts before it.
    """
    both_float = gathered.is_floating_point and reduced.is_floating_point
    if both_float and reduced.itemsize > gathered.itemsize and not is_replica:
        return None
    return reduced


@dataclass(frozen=True, slots=True)
class ModelPart:
    """How the model itself has sharded a parameter (tensor, expert parallelism), and this rank's
    shard of that.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, fqn: str, parameter: DTensor, mesh: DeviceMesh) -> "ModelPart":
        """That of a parameter which is to be sharded over ``mesh``, too; a ValueError names one
        that cannot be.
        """
        theirs, placements = parameter.device_mesh, parameter.placements
        said = f"{fqn} is a DTensor already, {placements} over {theirs}"
        shared = sorted(set(theirs.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ValueError(
                f"{said}, which shares ranks {shared} with {mesh}: shard a parameter once over the same ranks; "
                'tensor parallelism takes another dimension, init_device_mesh(..., mesh_dim_names=("dp", "tp"))["tp"]'
            )
        if theirs.ndim > 2:
            raise ValueError(
                f"{said}: a model's mesh has one dimension, or two (expert and tensor parallelism)"
            )
        other = [placement for placement in placements if type(placement) not in (Shard, Replicate)]
        if other:
            raise ValueError(
                f"{said}: {other[0]} cannot be sharded further, give Shard or Replicate"
            )
        try:
            concatenated(mesh, theirs)
        except RuntimeError as error:
            raise ValueError(
                f"{said}, and {mesh} is of another device mesh ({error}): cut both out of one init_device_mesh(...)"
            ) from None
        local_part = parameter.to_local()
        return cls(theirs, placements, local_part.shape, local_part.stride())


@dataclass(frozen=True, slots=True)
class _Access:
    """How a parameter is gathered and its gradient reduced, divided ``first`` or last; ``model``:
    of a DTensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    policy: MixedPrecisionPolicy
    op: str
    divide_by: float | None
    first: bool
    model: ModelPart | None = None


_describing: ContextVar[bool] = ContextVar("describing", default=False)
_gathers: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("gathers", default=None)
_accumulating: ContextVar[bool] = ContextVar("accumulating", default=False)
_for_dynamo: list[dict[int, torch.Tensor]] = []
"""The innermost of ``reusing_gathers`` last, for Dynamo, which reads no context variables and runs
in one thread.
"""


@contextmanager
def reusing_gathers() -> Iterator[None]:
    """Inside, a parameter is gathered once, and its gradients are added before one reduction,
    as in FSDP2.
    """
    cache: dict[int, torch.Tensor] = {}
    _for_dynamo.append(cache)
    try:
        with nullcontext() if torch.compiler.is_dynamo_compiling() else _set(_gathers, cache):
            yield
    finally:
        _for_dynamo.pop()


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def accumulating_gradients() -> AbstractContextManager[None]:
    """Inside, gradients are cast before a reduction, as FSDP2 adds microbatches; nodes that reduce
    are marked.
    """
    return _set(_accumulating, True)


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    gradient_divide_factor: float | None = None,
) -> nn.Module:
    """Shard (or replicate) every parameter of ``model`` over ``mesh``, in place, as ``fully_shard``
    does.

    A second call skips sharded parameters, so apply it first to inner modules with their own mesh
    (routed experts), as with ``fully_shard``. Of a DTensor that ``parallelize_module`` made over
    another dimension of this mesh it shards dim 0 of the local shard. Initialise the model before:
    afterwards the attribute (``linear.weight``) is a gathered copy, and writes to it are lost. The
    shards are in ``parameters()``.

    Args:
        model: its forward reads parameters as attributes; all ranks hold equal values of what is
            sharded over them.
        mesh: 1-D for ``fully_shard`` (``Shard(0)``) and ``replicate``; 2-D (replicate, shard) for
            ``hybrid_shard``.
        mode: one of these three. ``mp_policy``: FSDP2's, with the dtypes of gathers
            (``param_dtype``) and reductions.
        gradient_divide_factor: reduce by sum, then divide by this in the reduce dtype (FSDP2's
            ``set_gradient_divide_factor``); by default the reduction averages. ``replicate``
            multiplies by the inverse before the sum, as DDP does; if the number of ranks is no
            power of two, an average has other bits.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: unknown mode, a mesh of the wrong rank or without this process, a parameter
            without dimensions, a DTensor that ``ModelPart.of`` refuses, a parameter with a hook
            (the shard is another tensor), or fp16 reduction (FSDP2 divides before and after it: not
            modelled).
    """
    scalars = [fqn for fqn, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and mode != "replicate":
        raise ValueError(
            f"{', '.join(scalars)} has no dimension to shard: give it shape (1,), as FSDP2 asks for"
        )
    placements, policy = _placements(mode, mesh), mp_policy or MixedPrecisionPolicy()
    if policy.reduce_dtype is torch.float16 or (
        policy.reduce_dtype is None and policy.param_dtype is torch.float16
    ):
        raise ValueError(
            "a reduce_dtype of torch.float16 is not supported: use torch.bfloat16 or torch.float32"
        )
    op = "avg" if gradient_divide_factor is None else "sum"
    plain = _Access(
        mesh, tuple(placements), policy, op, gradient_divide_factor, first=mode == "replicate"
    )
    own = {  # what was sharded here before is a property of its module's class
        f"{path}.{name}".lstrip("."): (module, name, parameter)
        for path, module in model.named_modules()
        for name, parameter in parameters_of(module).items()
        if parameter is not None
        and not (
            isinstance(parameter, DTensor)
            and isinstance(getattr(type(module), name, None), property)
        )
    }
    accesses = {
        fqn: replace(plain, model=ModelPart.of(fqn, parameter, mesh))
        if isinstance(parameter, DTensor)
        else plain
        for fqn, (_, _, parameter) in own.items()
    }
    shards: dict[nn.Parameter, nn.Parameter] = {}
    properties: dict[nn.Module, dict[str, property]] = {}
    for fqn, (module, name, parameter) in own.items():
        if parameter not in shards:
            refuse_hooks(parameter, f"the parameter {fqn}")
            shards[parameter] = _shard(parameter, accesses[fqn])
        parameters_of(module)[name] = shards[parameter]
        properties.setdefault(module, {})[name] = property(partial(_read, name, accesses[fqn]))
    for (
        module,
        its_own,
    ) in properties.items():  # a class of the module's own, whose parameters are properties
        cls = type(module)
        described = {
            "__module__": cls.__module__,
            "extra_repr": partialmethod(_describe_shards, cls.extra_repr),
        }
        module.__class__ = type(cls.__name__, (cls,), {**described, **its_own})
    return model


def _shard(parameter: nn.Parameter, access: _Access) -> nn.Parameter:
    """This rank's part; ``src_data_rank=None``: values are equal on all ranks already, nothing is
    sent.
    """
    plain = local(parameter.detach())
    shard = distribute_tensor(plain, access.mesh, access.placements, src_data_rank=None)
    if access.model is not None:
        part, shape, stride = access.model, parameter.shape, parameter.stride()
        parts = math.prod(
            part.mesh.size(dim) for dim, placed in enumerate(part.placements) if placed.is_shard(0)
        )
        ours = [
            shard_of_shards(parts) if placement.is_shard() else placement
            for placement in access.placements
        ]
        whole = concatenated(access.mesh, part.mesh)
        shard = _from_local(shard.to_local(), whole, [*ours, *part.placements], shape, stride)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _placements(mode: str, mesh: DeviceMesh) -> list[Placement]:
    """How parameters lie on ``mesh``, which must fit the mode and this rank."""
    if mode not in PLACEMENTS:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(PLACEMENTS)}")
    placements = PLACEMENTS[mode]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"the mesh is {mesh!r}: give a DeviceMesh, the fixture gt_mesh or init_device_mesh(...)"
        )
    if mesh.ndim != len(placements):
        raise ValueError(
            f"mode={mode!r} needs a {len(placements)}-D mesh, this one is {mesh.ndim}-D: {mesh}"
        )
    if mesh.get_coordinate() is None:
        wrong = f"rank {dist.get_rank()} of {dist.get_world_size()} is not in {mesh}"
        raise ValueError(f"{wrong}: every rank that trains needs a mesh that it is part of")
    return placements


def _describe_shards(module: nn.Module, describe: Callable[[Any], str]) -> str:
    """``extra_repr`` that reads shards: printing a model on one rank must not wait for the others."""
    with _set(_describing, True):
        return describe(module)


def _read(name: str, access: _Access, module: nn.Module) -> torch.Tensor:
    """Return what the attribute of a sharded parameter gives."""
    if name not in parameters_of(module):
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    parameter: Any = parameters_of(module)[name]
    compiling = torch.compiler.is_dynamo_compiling()  # Dynamo cannot read context variables
    if (not compiling and _describing.get()) or not isinstance(
        parameter, DTensor
    ):  # or swapped for a plain tensor
        return parameter
    cache = (_for_dynamo[-1] if _for_dynamo else None) if compiling else _gathers.get()
    if cache is not None and id(parameter) in cache:
        return cache[id(parameter)]
    with (
        torch.enable_grad()
    ):  # read under no_grad, a parameter still has a gradient where it is used later
        gathered = _Gather.apply(parameter, access)
    if cache is not None:
        cache[id(parameter)] = gathered
    return gathered


class _Gather(torch.autograd.Function):
    """DTensor shards -> the whole tensor, or the model's DTensor; its gradient -> reduced shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, access: _Access) -> torch.Tensor:
        ctx.access, part, size = access, access.model, (parameter.shape, parameter.stride())
        ctx.spec = (parameter.device_mesh, parameter.placements, *size)
        gather_dtype = access.policy.param_dtype or parameter.dtype
        ctx.dtype = parameter.dtype
        reduce_dtype = access.policy.reduce_dtype
        ctx.reduce_dtype = reduce_dtype or default_reduce_dtype(
            access.policy.param_dtype, parameter.dtype
        )
        # a Function on a leaf has another seq_nr in the forward than in the backward (torch 2.13),
        # so its backward cannot inherit the FQN by seq_nr
        ctx.fqn = current_annotation(KEY)
        if part is not None:  # this rank's shard of the model's shard
            parameter = _from_local(
                parameter.to_local(), access.mesh, access.placements, part.shape, part.stride
            )
        is_replica = part is not None and any(
            placement.is_replicate() for placement in part.placements
        )
        ctx.casts_first = sets_grad_dtype() and is_replica
        if (
            sets_grad_dtype() and not torch.compiler.is_dynamo_compiling()
        ):  # Dynamo does not know the method
            ctx.set_output_grad_dtype(gradient_dtype(gather_dtype, ctx.reduce_dtype, is_replica))
        replicate = [Replicate()] * access.mesh.ndim
        whole = parameter.redistribute(placements=replicate, forward_dtype=gather_dtype)
        # a replicated parameter is used as it is: a view, because a Function must not return its
        # input
        plain = whole.to_local().view_as(whole.to_local())
        return plain if part is None else _from_local(plain, part.mesh, part.placements, *size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        access = ctx.access
        accumulating = (
            not torch.compiler.is_dynamo_compiling() and _accumulating.get()
        )  # which Dynamo cannot read
        is_model_part = isinstance(grad, DTensor)
        if is_model_part and access.model is None:
            raise TypeError(
                f"the gradient of a plain parameter of {ctx.fqn or 'the model'} is a DTensor over "
                f"{grad.device_mesh}, which FSDP2 refuses, too: make the parameter one by parallelize_module"
            )
        with annotate({KEY: ctx.fqn}) if ctx.fqn else nullcontext():
            if accumulating or (is_model_part and ctx.casts_first):
                grad = grad.to(ctx.reduce_dtype)
            with annotate({PART: REDUCE}) if accumulating else nullcontext():
                if is_model_part:
                    grad = grad.redistribute(placements=access.model.placements).to_local()
                own, factor = grad.to(ctx.reduce_dtype), access.divide_by
                if factor is not None and access.first:
                    own, factor = own * (1 / factor), None
                reduced = _reduced(own, access)
                if factor is not None:
                    reduced = reduced / factor
                reduced = reduced.to(ctx.dtype)
                return reduced if access.model is None else _from_local(
                    reduced.to_local(), *ctx.spec
                ), None


def _reduced(gradient: torch.Tensor, access: _Access) -> DTensor:
    """This rank's shard of a gradient. Rows that do not divide are padded at once: torch pads each
    rank's part.
    """
    placements = [Partial(access.op)] * access.mesh.ndim
    unreduced = DTensor.from_local(gradient, access.mesh, placements, run_check=False)
    rows, ranks = gradient.shape[0] if gradient.ndim else 0, access.mesh.size(-1)
    if not access.placements[-1].is_shard() or type(rows) is not int or rows % ranks == 0:
        return unreduced.redistribute(placements=access.placements)
    placements[:-1] = access.placements[:-1]  # replicas first, without the padding
    most = -(-rows // ranks)
    padding = [0, 0] * (gradient.ndim - 1) + [0, most * ranks - rows]
    plain = unreduced.redistribute(placements=placements).to_local()
    padded = DTensor.from_local(
        nn.functional.pad(plain, padding), access.mesh, placements, run_check=False
    )
    own = padded.redistribute(placements=access.placements).to_local()
    kept = min(most, max(0, rows - most * access.mesh.get_local_rank(access.mesh.ndim - 1)))
    own = own if kept == most else own.narrow(0, 0, kept)
    return _from_local(own, access.mesh, access.placements, gradient.shape, gradient.stride())


def _from_local(
    plain: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    return DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=stride)
