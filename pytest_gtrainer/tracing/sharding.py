"""Data parallelism that a tracer can see: parameters that gather on access.

``data_parallel`` turns each parameter into a DTensor and its attribute into a property that
returns the gathered plain tensor. An eager run and a trace see the same two collectives a
parameter: an all-gather in ``param_dtype`` when the attribute is read, and a reduction of
its gradient in ``reduce_dtype`` (A12). ``state_dict`` and ``parameters`` see the shards.

The idea of parametrised access is SimpleFSDP's (arXiv:2411.00284).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pytest_gtrainer._torch.tracing import annotate, current_annotation
from pytest_gtrainer._torch.values import parameters_of
from pytest_gtrainer.supported import LAST, installed_minor
from pytest_gtrainer.tracing.model import KEY

PLACEMENTS: dict[str, list[Placement]] = {
    "fully_shard": [Shard(0)],
    "replicate": [Replicate()],
    "hybrid_shard": [Replicate(), Shard(0)],
}


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of FSDP2's policy of the same name; None keeps what is there.

    ``param_dtype`` is the dtype parameters are gathered and used in, ``reduce_dtype`` the one
    gradients are reduced in. By default that is ``param_dtype`` up to torch 2.14, and the parameter's own dtype from
    2.15 on, as FSDP2 does it. Gradients return in the dtype of the
    parameter. Forward inputs are not cast at module boundaries: a graph has none.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def default_reduce_dtype(param_dtype: torch.dtype | None, parameter: torch.dtype) -> torch.dtype:
    """The dtype that FSDP2 of the installed torch reduces in if the policy names none."""
    return parameter if param_dtype is None or (installed_minor() or LAST) >= (2, 15) else param_dtype


@dataclass(frozen=True, slots=True)
class _Access:
    """How a parameter is gathered, and its gradient reduced; ``first``: divided before the reduction."""

    policy: MixedPrecisionPolicy
    op: str
    divide_by: float | None
    first: bool


_describing: ContextVar[bool] = ContextVar("describing", default=False)
_gathers: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("gathers", default=None)


@contextmanager
def reusing_gathers() -> Iterator[None]:
    """Inside, a parameter read again gives the first read's tensor (A10).

    So it is gathered once, and its gradient contributions are added before the one
    reduction, as in FSDP2: RS(a) + RS(b) is not RS(a + b) in bits.
    """
    token = _gathers.set({})
    try:
        yield
    finally:
        _gathers.reset(token)


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    gradient_divide_factor: float | None = None,
) -> nn.Module:
    """Shard (or replicate) every plain parameter of ``model`` over ``mesh``, in place.

    Parameters that it has sharded already are left alone, so apply it to inner modules with a
    mesh of their own (routed experts) first, as with ``fully_shard``. Other DTensors are refused: a tensor-parallel
    parameter would be sharded a second time (``_StridedShard``), which is not modelled. Initialise before: from here
    on the attribute is a gathered copy, and writing into it changes nothing; the shards are in
    ``parameters()``.

    Args:
        model: any module whose forward reads parameters as attributes; all ranks must hold
            equal values of what is sharded over them.
        mesh: 1-D for ``fully_shard`` (``Shard(0)``) and ``replicate``; 2-D (replicate, shard)
            for ``hybrid_shard``.
        gradient_divide_factor: reduce by sum, then divide by this in the reduce dtype
            (FSDP2's ``set_gradient_divide_factor``); by default the reduction averages. ``replicate`` multiplies by
            the inverse before the sum, as DDP does: on ranks that are no power of two an average has other bits.

    Raises:
        ValueError: unknown mode, a mesh of the wrong rank or without this process, a parameter without dimensions, a
            parameter that somebody else has made a DTensor, or fp16 reduction (FSDP2 divides before and after it,
            which is not modelled).
    """
    scalars = [fqn for fqn, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and mode != "replicate":
        raise ValueError(f"{', '.join(scalars)} has no dimension to shard: give it shape (1,), as FSDP2 asks for")
    _refuse_foreign_dtensors(model)
    placements = _placements(mode, mesh)
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.reduce_dtype is torch.float16 or (policy.reduce_dtype is None and policy.param_dtype is torch.float16):
        raise ValueError("a reduce_dtype of torch.float16 is not supported: use torch.bfloat16 or torch.float32")
    op = "avg" if gradient_divide_factor is None else "sum"
    access = _Access(policy, op, gradient_divide_factor, first=mode == "replicate")
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        table = parameters_of(module)
        plain = {name: p for name, p in table.items() if p is not None and not isinstance(p, DTensor)}
        for name, parameter in plain.items():
            if parameter not in shards:
                # src_data_rank=None: values are equal on all ranks already, nothing is sent
                shard = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                shards[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            table[name] = shards[parameter]
        if plain:  # a class of the module's own, whose parameters are properties
            cls = type(module)
            described = {"__module__": cls.__module__, "extra_repr": partialmethod(_describe_shards, cls.extra_repr)}
            properties = {name: property(partial(_read, name, access)) for name in plain}
            module.__class__ = type(cls.__name__, (cls,), {**described, **properties})
    return model


def _placements(mode: str, mesh: DeviceMesh) -> list[Placement]:
    """How parameters lie on ``mesh``, which must fit the mode and this rank."""
    if mode not in PLACEMENTS:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(PLACEMENTS)}")
    placements = PLACEMENTS[mode]
    if mesh.ndim != len(placements):
        raise ValueError(f"mode={mode!r} needs a {len(placements)}-D mesh, this one is {mesh.ndim}-D: {mesh}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} is not in {mesh}: "
            "every rank that trains needs a mesh that it is part of"
        )
    return placements


def _refuse_foreign_dtensors(model: nn.Module) -> None:
    """What was sharded here is a property of its module's class."""
    foreign = {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in model.named_modules()
        for name, parameter in parameters_of(module).items()
        if isinstance(parameter, DTensor) and not isinstance(getattr(type(module), name, None), property)
    }
    if foreign:
        name, first = next(iter(foreign.items()))
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(
            f"{name}{more} is a DTensor already, {first.placements} over {first.device_mesh}: data parallelism of "
            "tensor-parallel parameters (_StridedShard) is not supported, give plain parameters"
        )


def _describe_shards(module: nn.Module, describe: Callable[[Any], str]) -> str:
    """``extra_repr`` that reads shards.

    Some look at their parameters. Printing a model on one rank, as pytest prints the arguments of a failed test, would
    then wait for the other ranks for ever.
    """
    token = _describing.set(True)
    try:
        return describe(module)
    finally:
        _describing.reset(token)


def _read(name: str, access: _Access, module: nn.Module) -> torch.Tensor:
    """What the attribute of a sharded parameter gives."""
    if name not in parameters_of(module):
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    parameter: Any = parameters_of(module)[name]
    compiling = torch.compiler.is_dynamo_compiling()  # Dynamo cannot read context variables
    if (not compiling and _describing.get()) or not isinstance(parameter, DTensor):  # or swapped for a plain tensor
        return parameter
    cache = None if compiling else _gathers.get()
    if cache is None:
        return _Gather.apply(parameter, access)
    if id(parameter) not in cache:
        with torch.enable_grad():  # also where the first read wants no gradient: a later one may
            cache[id(parameter)] = _Gather.apply(parameter, access)
    gathered = cache[id(parameter)]
    return gathered if torch.is_grad_enabled() else gathered.detach()


class _Gather(torch.autograd.Function):
    """DTensor shards -> the whole plain tensor; its gradient -> reduced shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, access: _Access) -> torch.Tensor:
        ctx.access, ctx.mesh, ctx.placements = access, parameter.device_mesh, parameter.placements
        gather_dtype = access.policy.param_dtype or parameter.dtype
        ctx.dtype = parameter.dtype
        reduce_dtype = access.policy.reduce_dtype
        ctx.reduce_dtype = reduce_dtype or default_reduce_dtype(access.policy.param_dtype, parameter.dtype)
        # a Function on a leaf has another seq_nr in the forward than in the backward (torch 2.13),
        # so its backward cannot inherit the FQN by seq_nr
        ctx.fqn = current_annotation(KEY)
        replicate = [Replicate()] * parameter.device_mesh.ndim
        whole = parameter.redistribute(placements=replicate, forward_dtype=gather_dtype)
        # a replicated parameter is used as it is: a view, because a Function must not return its input
        return whole.to_local().view_as(whole.to_local())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        with annotate({KEY: ctx.fqn}) if ctx.fqn else nullcontext():
            partial = [Partial(ctx.access.op)] * ctx.mesh.ndim
            own, factor = grad.to(ctx.reduce_dtype), ctx.access.divide_by
            if factor is not None and ctx.access.first:
                own, factor = own * (1 / factor), None
            unreduced = DTensor.from_local(own, ctx.mesh, partial, run_check=False)
            reduced = unreduced.redistribute(placements=ctx.placements)
            if factor is not None:
                reduced = reduced / factor
            return reduced.to(ctx.dtype), None
