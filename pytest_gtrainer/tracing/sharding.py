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
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.graph.nodes import PART, REDUCE
from pytest_gtrainer.tracing.model import KEY, local, rewrap
from pytest_gtrainer.tracing.refusals import refuse_hooks

PLACEMENTS: dict[str, list[Placement]] = {
    "fully_shard": [Shard(0)],
    "replicate": [Replicate()],
    "hybrid_shard": [Replicate(), Shard(0)],
}
# Read once: each look at the version reads a file, and the tracer asks for every parameter.
_SETS_GRAD_DTYPE = (installed_minor() or LAST) >= (2, 15)


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

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            # No parameter of another dtype can require a gradient.
            if not isinstance(dtype, torch.dtype) or not (
                dtype.is_floating_point or dtype.is_complex
            ):
                raise TypeError(
                    f"{name}={dtype!r}: give a floating-point dtype, such as torch.bfloat16, or "
                    "None"
                )


def default_reduce_dtype(param_dtype: torch.dtype | None, parameter: torch.dtype) -> torch.dtype:
    """Return the dtype that FSDP2 of the installed torch reduces in if the policy names none."""
    if param_dtype is None or sets_grad_dtype():
        return parameter
    return param_dtype


def sets_grad_dtype() -> bool:
    """Return whether FSDP2 of the installed torch sets ``grad_dtype`` of a gathered parameter.

    Up to torch 2.14 it does not, and autograd casts every gradient to the dtype of that parameter.
    See ``gradient_dtype`` for what it is set to.
    """
    return _SETS_GRAD_DTYPE


def gradient_dtype(
    gathered: torch.dtype, reduced: torch.dtype, is_replica: bool
) -> torch.dtype | None:
    """Return the dtype to which FSDP2 of torch 2.15 lets autograd cast a gradient.

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
    """The placements that the model gave a parameter (tensor, expert parallelism), and the shape
    and strides of this rank's shard.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, fqn: str, parameter: DTensor, mesh: DeviceMesh) -> "ModelPart":
        """Return the part that the model made of a parameter, which ``mesh`` is to shard further.

        Raises:
            ValueError: it cannot be sharded over that mesh.
        """
        own_mesh, placements = parameter.device_mesh, parameter.placements
        found = f"{fqn} is a DTensor already, {placements} over {own_mesh}"
        own_ranks = set(own_mesh.mesh.flatten().tolist())
        shared = sorted(own_ranks.intersection(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ValueError(
                f"{found}, which shares ranks {shared} with {mesh}: shard a parameter once over "
                "the same ranks; tensor parallelism takes another dimension, "
                'init_device_mesh(..., mesh_dim_names=("dp", "tp"))["tp"]'
            )
        if own_mesh.ndim > 2:
            raise ValueError(
                f"{found}: a model's mesh has one dimension, or two (expert and tensor parallelism)"
            )
        for placement in placements:
            if type(placement) not in (Shard, Replicate):
                raise ValueError(
                    f"{found}: {placement} cannot be sharded further, give Shard or Replicate"
                )
        try:
            concatenated(mesh, own_mesh)
        except RuntimeError as error:
            raise ValueError(
                f"{found}, and {mesh} is of another device mesh ({error}): cut both out of one "
                "init_device_mesh(...)"
            ) from None
        local_part = parameter.to_local()
        return cls(own_mesh, placements, local_part.shape, local_part.stride())


@dataclass(frozen=True, slots=True)
class _Access:
    """The way in which a parameter is gathered and its gradient reduced.

    Attributes:
        op: the reduction, "avg" or "sum".
        divide_by: a factor by which the gradient is divided.
        first: divide by ``divide_by`` before the reduction, as DDP does, not after it.
        model: of a DTensor, how the model has sharded it.
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
"""The caches of all open ``reusing_gathers``, the innermost last.

Dynamo takes the last one in place of ``_gathers``, since it cannot read context variables.
"""


@contextmanager
def reusing_gathers() -> Iterator[None]:
    """Gather a parameter once inside, and add its gradients before one reduction, as FSDP2 does."""
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
    """Inside, cast each gradient to the reduce dtype first, and mark the nodes that then reduce it.

    FSDP2 casts the gradient of each microbatch, adds them, and reduces the sum.
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
    """Shard (or replicate) the parameters of ``model`` over ``mesh`` in place, as ``fully_shard``.

    A second call skips sharded parameters, so apply it first to inner modules with their own mesh
    (routed experts), as with ``fully_shard``. If a parameter is a DTensor that
    ``parallelize_module`` made over another dimension of this mesh, dim 0 of its local shard is
    sharded. Initialise the model before: afterwards the attribute (``linear.weight``) is a gathered
    copy, and writes to it are lost. The shards are in ``parameters()``.

    Args:
        model: its forward reads parameters as attributes; all ranks hold equal values of what is
            sharded over them.
        mesh: 1-D for ``fully_shard`` (``Shard(0)``) and ``replicate``; 2-D (replicate, shard) for
            ``hybrid_shard``.
        mode: one of these three.
        mp_policy: FSDP2's, with the dtypes of gathers (``param_dtype``) and reductions.
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
    if gradient_divide_factor is not None and not 0 < gradient_divide_factor < math.inf:
        raise ValueError(
            f"gradient_divide_factor={gradient_divide_factor!r}: give a finite number above 0"
        )
    scalars = [fqn for fqn, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and mode != "replicate":
        raise ValueError(
            f"{', '.join(scalars)} has no dimension to shard: give it shape (1,), as FSDP2 asks for"
        )
    policy = mp_policy or MixedPrecisionPolicy()
    check_type(policy, MixedPrecisionPolicy, "mp_policy", "a MixedPrecisionPolicy(param_dtype=...)")
    placements = _placements(mode, mesh)
    if (policy.reduce_dtype or policy.param_dtype) is torch.float16:
        raise ValueError(
            "a reduce_dtype of torch.float16 is not supported: use torch.bfloat16 or torch.float32"
        )
    op = "avg" if gradient_divide_factor is None else "sum"
    plain = _Access(
        mesh, tuple(placements), policy, op, gradient_divide_factor, first=mode == "replicate"
    )
    found = list(_parameters_to_shard(model))
    accesses = {}
    # Before any is sharded: a DTensor that is refused leaves the model as it was.
    for fqn, _, _, parameter in found:
        accesses[fqn] = plain
        if isinstance(parameter, DTensor):
            accesses[fqn] = replace(plain, model=ModelPart.of(fqn, parameter, mesh))

    shards: dict[nn.Parameter, nn.Parameter] = {}
    properties: dict[nn.Module, dict[str, property]] = {}
    for fqn, module, name, parameter in found:
        if parameter not in shards:
            refuse_hooks(parameter, f"the parameter {fqn}")
            shards[parameter] = _shard(parameter, accesses[fqn])
        parameters_of(module)[name] = shards[parameter]
        properties.setdefault(module, {})[name] = property(partial(_read, name, accesses[fqn]))
    for module, of_module in properties.items():
        # A property belongs to a class, so each module gets a class of its own.
        cls = type(module)
        members = {
            "__module__": cls.__module__,
            "extra_repr": partialmethod(_describe_shards, cls.extra_repr),
            **of_module,
        }
        module.__class__ = type(cls.__name__, (cls,), members)
    return model


def _parameters_to_shard(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield FQN, module, name and tensor of each parameter that is not sharded here already."""
    for path, module in model.named_modules():
        for name, parameter in parameters_of(module).items():
            # A parameter that was sharded here is a property of its module's class.
            is_property = isinstance(getattr(type(module), name, None), property)
            if parameter is None or (is_property and isinstance(parameter, DTensor)):
                continue
            yield f"{path}.{name}".lstrip("."), module, name, parameter


def _shard(parameter: nn.Parameter, access: _Access) -> nn.Parameter:
    """Return this rank's shard of a parameter."""
    # ``src_data_rank=None``: values are equal on all ranks already, so nothing is sent.
    plain = local(parameter.detach())
    shard = distribute_tensor(plain, access.mesh, access.placements, src_data_rank=None)
    part = access.model
    if part is not None:
        # The model's shards of dim 0, of which each is sharded again.
        count = 1
        for dim, placement in enumerate(part.placements):
            if placement.is_shard(0):
                count *= part.mesh.size(dim)
        placements: list[Placement] = []
        for placement in access.placements:
            placements.append(shard_of_shards(count) if placement.is_shard() else placement)
        placements += part.placements
        mesh = concatenated(access.mesh, part.mesh)
        shard = rewrap(shard.to_local(), parameter, mesh, placements)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _placements(mode: str, mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of parameters on ``mesh``, which must fit the mode and this rank."""
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
        raise ValueError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} is not in {mesh}: "
            "every rank that trains needs a mesh that it is part of"
        )
    return placements


def _describe_shards(module: nn.Module, describe: Callable[[Any], str]) -> str:
    """Return ``extra_repr`` of the shards: printing on one rank must not wait for the others."""
    with _set(_describing, True):
        return describe(module)


def _read(name: str, access: _Access, module: nn.Module) -> torch.Tensor:
    """Return the value of a sharded parameter's attribute: the gathered parameter."""
    if name not in parameters_of(module):
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    parameter: Any = parameters_of(module)[name]
    if not isinstance(parameter, DTensor):  # it was exchanged for a plain tensor
        return parameter
    cache: dict[int, torch.Tensor] | None = None
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot read context variables
        if _for_dynamo:
            cache = _for_dynamo[-1]
    elif _describing.get():
        return parameter
    else:
        cache = _gathers.get()
    if cache is not None and id(parameter) in cache:
        return cache[id(parameter)]
    # A parameter that is read under no_grad still has a gradient where it is used later.
    with torch.enable_grad():
        gathered = _Gather.apply(parameter, access)
    if cache is not None:
        cache[id(parameter)] = gathered
    return gathered


class _Gather(torch.autograd.Function):
    """Gather a parameter's shards; reduce its gradient to shards in the backward.

    The result is a plain tensor, or the DTensor as the model made it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, access: _Access) -> torch.Tensor:
        part, policy = access.model, access.policy
        size = (parameter.shape, parameter.stride())
        ctx.access = access
        ctx.spec = (parameter.device_mesh, parameter.placements, *size)
        ctx.dtype = parameter.dtype
        ctx.reduce_dtype = policy.reduce_dtype or default_reduce_dtype(
            policy.param_dtype, parameter.dtype
        )
        # A Function on a leaf has another seq_nr in the forward than in the backward (torch 2.13),
        # so its backward cannot inherit the FQN by seq_nr.
        ctx.fqn = current_annotation(KEY)
        is_replica = False
        if part is not None:  # this rank's shard of the model's shard
            parameter = _from_local(
                parameter.to_local(), access.mesh, access.placements, part.shape, part.stride
            )
            is_replica = any(placement.is_replicate() for placement in part.placements)
        gather_dtype = policy.param_dtype or parameter.dtype
        ctx.casts_first = sets_grad_dtype() and is_replica
        # Dynamo does not know the method.
        if sets_grad_dtype() and not torch.compiler.is_dynamo_compiling():
            ctx.set_output_grad_dtype(gradient_dtype(gather_dtype, ctx.reduce_dtype, is_replica))
        replicate = [Replicate()] * access.mesh.ndim
        whole = parameter.redistribute(placements=replicate, forward_dtype=gather_dtype)
        # The local tensor of a replicated parameter is the input, which a Function must not return.
        plain = whole.to_local().view_as(whole.to_local())
        if part is None:
            return plain
        return _from_local(plain, part.mesh, part.placements, *size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        access = ctx.access
        # Dynamo cannot read context variables.
        accumulating = not torch.compiler.is_dynamo_compiling() and _accumulating.get()
        is_model_part = isinstance(grad, DTensor)
        if is_model_part and access.model is None:
            raise TypeError(
                f"the gradient of a plain parameter of {ctx.fqn or 'the model'} is a DTensor over "
                f"{grad.device_mesh}, which FSDP2 refuses, too: make the parameter one by "
                "parallelize_module"
            )
        with annotate({KEY: ctx.fqn}) if ctx.fqn else nullcontext():
            if accumulating or (is_model_part and ctx.casts_first):
                grad = grad.to(ctx.reduce_dtype)
            with annotate({PART: REDUCE}) if accumulating else nullcontext():
                if is_model_part:
                    grad = grad.redistribute(placements=access.model.placements).to_local()
                grad = grad.to(ctx.reduce_dtype)
                if access.divide_by is not None and access.first:
                    grad = grad * (1 / access.divide_by)
                reduced = _reduce(grad, access)
                if access.divide_by is not None and not access.first:
                    reduced = reduced / access.divide_by
                reduced = reduced.to(ctx.dtype)
                if access.model is not None:
                    reduced = _from_local(reduced.to_local(), *ctx.spec)
                return reduced, None


def _reduce(gradient: torch.Tensor, access: _Access) -> DTensor:
    """Return this rank's shard of a gradient, reduced over all ranks."""
    placements = [Partial(access.op)] * access.mesh.ndim
    unreduced = DTensor.from_local(gradient, access.mesh, placements, run_check=False)
    rows, ranks = gradient.shape[0] if gradient.ndim else 0, access.mesh.size(-1)
    if not access.placements[-1].is_shard() or type(rows) is not int or rows % ranks == 0:
        return unreduced.redistribute(placements=access.placements)

    # Rows that do not divide are padded in one node: torch would pad the part of each rank. The sum
    # over replicas comes first, without the padding.
    placements[:-1] = access.placements[:-1]
    plain = unreduced.redistribute(placements=placements).to_local()
    most = math.ceil(rows / ranks)
    padding = [0, 0] * (gradient.ndim - 1) + [0, most * ranks - rows]
    padded = DTensor.from_local(
        nn.functional.pad(plain, padding), access.mesh, placements, run_check=False
    )
    shard = padded.redistribute(placements=access.placements).to_local()
    left = rows - most * access.mesh.get_local_rank(access.mesh.ndim - 1)
    if left < most:
        shard = shard.narrow(0, 0, max(0, left))
    return _from_local(shard, access.mesh, access.placements, gradient.shape, gradient.stride())


def _from_local(
    plain: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    return DTensor.from_local(plain, mesh, placements, run_check=False, shape=shape, stride=stride)
