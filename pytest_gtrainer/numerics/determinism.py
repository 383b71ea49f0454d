"""Set every switch of determinism together, and restore all of them; seed Python, NumPy and torch.

A switch that comes too late raises, and does not only warn: a check that believes it is
deterministic and is not proves nothing. All switches are in ``knobs``. ``balanced_loss`` gives all
tokens the same weight.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from pytest_gtrainer._torch.process import (
    inductor_config,
    set_backend_flag,
    set_deterministic_algorithms,
)
from pytest_gtrainer._torch.random_states import numpy_or_none, random_states_kept, seed_torch
from pytest_gtrainer.environment import variable
from pytest_gtrainer.facts import check_switches, check_type
from pytest_gtrainer.numerics import knobs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """Settings that make a training run repeatable.

    Attributes:
        seed: for Python, NumPy and torch.
        deterministic: use deterministic algorithms, refuse operators that have none.
        deterministic_warn_only: warn about such operators instead.
        moe_force_load_balance: route tokens to experts in turn; read by the models.
    """

    seed: int = 0
    deterministic: bool = True
    deterministic_warn_only: bool = False
    moe_force_load_balance: bool = False

    def __post_init__(self) -> None:
        check_switches(
            deterministic=self.deterministic,
            deterministic_warn_only=self.deterministic_warn_only,
            moe_force_load_balance=self.moe_force_load_balance,
        )


@dataclass(frozen=True, slots=True)
class ActivationCheckpointConfig:
    """Options of ``torch.utils.checkpoint``; the fields are its arguments.

    Attributes:
        preserve_rng_state: recompute with the random numbers of the forward; without it dropout
            recomputes another mask, and what comes after the region draws other numbers.
        determinism_check: "default" compares shapes, dtypes and devices of what was recomputed,
            "none" nothing.
        debug: on a mismatch, show the operators of both runs.
    """

    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False

    def __post_init__(self) -> None:
        check_switches(preserve_rng_state=self.preserve_rng_state, debug=self.debug)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``torch.utils.checkpoint.checkpoint``.

        >>> arguments = ActivationCheckpointConfig(debug=True).arguments()
        >>> arguments["use_reentrant"], arguments["preserve_rng_state"], arguments["debug"]
        (False, True, True)
        """
        return {"use_reentrant": False, **asdict(self)}


def flex_attention_options(config: DebugConfig) -> dict[str, bool]:
    """Return options for ``torch.compile(flex_attention, options=...)``: no tuning if ``config`` is
    deterministic.

    The options of a compiled function override Inductor's own configuration.

    >>> flex_attention_options(DebugConfig())
    {'max_autotune': False, 'coordinate_descent_tuning': False}
    """
    tuned = not _checked(config).deterministic
    return {"max_autotune": tuned, "coordinate_descent_tuning": tuned}


def _checked(config: Any) -> DebugConfig:
    check_type(config, DebugConfig, "config", "a DebugConfig")
    return config


NCCL_PRESETS: Mapping[str, Mapping[str, str]] = {
    "as_found": {},
    # Megatron-LM --deterministic-mode demands that NCCL_ALGO is one of Tree, Ring, CollnetDirect,
    # CollnetChain, ^NVLS; its users mostly choose Ring, as slime and Primus do.
    "megatron_ring": {"NCCL_ALGO": "Ring"},
    "megatron_no_nvls": {"NCCL_ALGO": "^NVLS"},
    # SGLang --enable-deterministic-inference: trees, and for all-reduce only.
    "sglang_tree": {"NCCL_ALGO": "allreduce:tree"},
    # vLLM batch_invariant.override_envs_for_invariance: trees, one channel, one protocol.
    "vllm_batch_invariant": {
        "NCCL_LAUNCH_MODE": "GROUP",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_NET_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_PROTO": "Simple",
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_NTHREADS": "1",
        "NCCL_SOCKET_NTHREADS": "1",
    },
}
"""Environment variables by the name of the preset; ``as_found`` sets nothing."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE_VALUES = (":4096:8", ":16:8")

_INDUCTOR = knobs.flags("torch._inductor.config")
"""Inductor's own flags. Its import reads each from ``TORCHINDUCTOR_`` and its name in capitals."""

# If CUDA started inside one of our blocks, it has the workspace, although the variable is gone
# again.
_cuda_started_here = False
_active: list[Settings] = []


class DeterminismError(RuntimeError):
    """A setting cannot be honoured in this process any more."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a ``deterministic`` block: a configuration, and a preset of NCCL's variables."""

    config: DebugConfig
    nccl: str = "as_found"
    _before: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def seed(self) -> int:
        """The seed in effect."""
        return self.config.seed

    def report(self) -> str:
        """Write the values in effect now, a line each, and what those were that have changed."""
        lines = [f"{'seed':<72} {torch.initial_seed()}"]
        for name, value in knobs.values().items():
            before = self._before.get(name, value)
            line = f"{name:<72} {_spell(value)}"
            if before != value:
                line += f"  (was {_spell(before)})"
            lines.append(line)
        return "\n".join(lines)


def _spell(value: Any) -> str:
    """Return the value of a knob; only an environment variable may be unset."""
    if value is None:
        return "unset"
    return str(value)


def active() -> Settings | None:
    """Return the settings of the innermost ``deterministic`` block of this process."""
    return _active[-1] if _active else None


@contextmanager
def deterministic(
    config: DebugConfig | None = None, *, seed: int | None = None, nccl: str = "as_found"
) -> Iterator[Settings]:
    """Run a block deterministically; everything is restored on exit.

    A block inside a deterministic one is deterministic, too, whatever its ``config`` says: the
    switches that are on stay on.

    Args:
        config: what to set; the default ``DebugConfig()`` sets everything.
        seed: instead of ``config.seed``; see ``mesh_seed`` for one per mesh dimension.
        nccl: a preset of NCCL's variables, see ``NCCL_PRESETS``; by default they are left alone.

    Raises:
        DeterminismError: CUDA was initialised without the cuBLAS workspace variable, or NCCL has
            read its variables already.
        ValueError: no NCCL preset of that name.
    """
    config = _checked(config or DebugConfig())
    if seed is not None:
        config = replace(config, seed=seed)
    if any(outer.config.deterministic for outer in _active):
        config = replace(config, deterministic=True)
    settings = Settings(config, nccl, knobs.values())
    with ExitStack() as stack:
        _set_nccl(stack, nccl)
        stack.enter_context(random_states_kept())
        if config.deterministic:
            stack.enter_context(_cublas_workspace())
            _set_inductor(stack)
            _set_flags(stack, warn_only=config.deterministic_warn_only)
        seed_everything(config.seed)
        _active.append(settings)
        stack.callback(_active.pop)
        yield settings


def call_under(config: DebugConfig, nccl: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function inside ``deterministic``; other processes enter a block by it."""
    with deterministic(config, nccl=nccl):
        return function(*args)


def _set_nccl(stack: ExitStack, preset: str) -> None:
    """Set the variables of a preset, before NCCL reads them as it makes its first communicator."""
    if preset not in NCCL_PRESETS:
        raise ValueError(
            f"there is no NCCL preset {preset!r}: choose one of {', '.join(NCCL_PRESETS)}"
        )

    differing = {}
    for name, value in NCCL_PRESETS[preset].items():
        if os.environ.get(name) != value:
            differing[name] = value
    if differing and _nccl_is_up():
        name, value = next(iter(differing.items()))
        raise DeterminismError(
            f"NCCL has communicators already, so {name}={value} of the preset {preset!r} would not "
            "be read: set it before the process starts, or enter deterministic() before the "
            "process group is made"
        )

    for name, value in differing.items():
        stack.enter_context(variable(name, value))


def _nccl_is_up() -> bool:
    return (
        dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


@contextmanager
def _cublas_workspace() -> Iterator[None]:
    """Set the workspace variable, before cuBLAS reads it as CUDA starts."""
    global _cuda_started_here
    started_before = torch.cuda.is_initialized()
    set_before = os.environ.get(_WORKSPACE) in _WORKSPACE_VALUES
    if started_before and not set_before and not _cuda_started_here:
        raise DeterminismError(
            f"CUDA is already initialised and {_WORKSPACE} is {os.environ.get(_WORKSPACE)!r}: "
            f"set it to {_WORKSPACE_VALUES[0]} before the process starts, or enter "
            "deterministic() before the first use of CUDA"
        )

    # Whoever has set one of the two has chosen how much memory it takes.
    wanted = os.environ[_WORKSPACE] if set_before else _WORKSPACE_VALUES[0]
    with variable(_WORKSPACE, wanted):
        try:
            yield
        finally:
            if torch.cuda.is_initialized() and not started_before:
                _cuda_started_here = True
                _read_workspace()


def _read_workspace() -> None:
    """Multiply once: torch and cuBLAS read the variable at the first product, and never again."""
    with suppress(RuntimeError):  # of a GPU that has failed: the error of the block is on its way
        one = torch.ones(1, 1, dtype=torch.float32, device="cuda")
        torch.mm(one, one)


def _set_inductor(stack: ExitStack) -> None:
    """Set Inductor's own flags, by its variables until it is loaded: its import takes 0.7 s."""
    variables = {name: f"TORCHINDUCTOR_{name.upper()}" for name in _INDUCTOR}
    loaded = inductor_config()
    before = {name: getattr(loaded, name) for name in _INDUCTOR} if loaded is not None else {}

    def put_back() -> None:
        config = inductor_config()
        for name in _INDUCTOR if config is not None else ():
            # If it was loaded inside the block, it gets what it would have read outside.
            setattr(config, name, before.get(name, os.environ.get(variables[name]) == "1"))

    stack.callback(put_back)
    for name, value in _INDUCTOR.items():
        stack.enter_context(variable(variables[name], "1" if value else "0"))
        if loaded is not None:
            setattr(loaded, name, value)


def _set_flags(stack: ExitStack, *, warn_only: bool) -> None:
    """Set flags of backends and deterministic algorithms, without importing Inductor."""
    for backend in (torch.backends.cudnn, torch.backends.mkldnn):
        for name, value in knobs.flags(backend.__name__).items():
            stack.callback(set_backend_flag, backend, name, getattr(backend, name))
            set_backend_flag(backend, name, value)
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(set_deterministic_algorithms, before, warn_only=warned_only)
    set_deterministic_algorithms(True, warn_only=warn_only)


def seed_everything(seed: int) -> None:
    """Seed Python, torch and NumPy; a device that has not started gets the seed when it starts."""
    check_type(seed, int, "the seed", "a whole number")
    random.seed(seed)
    seed_torch(seed % 2**64)
    numpy = numpy_or_none()  # which torch has imported, if there is one
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def mesh_seed(seed: int, mesh: DeviceMesh, distinct: Sequence[str] = ()) -> int:
    """Return this rank's seed: ``seed`` plus its place along the mesh dimensions ``distinct``.

    Raises:
        ValueError: the mesh has no dimension of that name, or this rank is not on it.
    """
    check_type(seed, int, "the seed", "a whole number")
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in distinct if name not in names]
    if unknown:
        raise ValueError(
            f"the mesh has no dimension {', '.join(map(repr, unknown))}; its dimensions are {names}"
        )

    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"this rank is not on {mesh}")
    place = 0
    for dim in map(names.index, distinct):
        place = place * mesh.size(dim) + coordinates[dim]
    return (seed + place) % 2**64


def balanced_loss(
    loss_sum: torch.Tensor,
    tokens: torch.Tensor | int,
    group: dist.ProcessGroup | None = None,
    *,
    gradients: Literal["avg", "sum"] = "avg",
) -> torch.Tensor:
    """Return this rank's share of the mean over the tokens of all ranks; every rank of the group
    must call it.

    With ``gradients="sum"`` the sum of the shares is the global mean; with "avg" (FSDP, DDP) their
    average is. One all-reduce counts tokens exactly, in int64, also in a trace. Over ``R`` ranks
    the result differs from the mean on one rank by at most ``(R + 2) * eps`` of the dtype times the
    sum of absolute shares. If all ranks have equally many tokens and ``R`` is a power of two, it is
    bit for bit the mean of the rank's own tokens.

    Args:
        loss_sum: the sum over this rank's tokens, a scalar; zero on a rank without tokens.
        tokens: how many those are, without padding.
        group: the ranks that share the batch; by default all.
        gradients: how gradients are reduced afterwards.

    Raises:
        ValueError: ``loss_sum`` is not a scalar, ``tokens`` is no count, or ``gradients`` is
            neither.
    """
    from pytest_gtrainer._torch.passes import functional_collectives

    if loss_sum.numel() != 1:
        raise ValueError(
            f"loss_sum is the sum over this rank's tokens, a scalar; not {list(loss_sum.shape)}"
        )

    # A size that is traced is neither of these.
    if isinstance(tokens, float) or (isinstance(tokens, int) and tokens < 0):
        raise ValueError(f"tokens={tokens!r}: give a whole number, 0 or more")
    if gradients not in ("avg", "sum"):
        raise ValueError(f"gradients are reduced by 'avg' or 'sum'; not {gradients!r}")
    if group is None:
        group = dist.group.WORLD
    count = torch.as_tensor(tokens, dtype=torch.int64, device=loss_sum.device).detach()
    total = functional_collectives.all_reduce(count.reshape(()), "sum", group)
    if gradients == "sum":
        return loss_sum / total
    # The reduction divides by the number of ranks; a power of two is taken back exactly. The sum
    # times the number of ranks may be too large for its dtype, where the mean is not, and in fp16
    # a share of the mean may be too small.
    wide = loss_sum.float() if loss_sum.dtype == torch.float16 else loss_sum
    return (wide / total * dist.get_world_size(group)).to(loss_sum.dtype)
