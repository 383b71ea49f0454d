"""Every switch of determinism, set together and restored whole.

``deterministic`` sets what makes one run repeat another bit for bit on one machine, and on
exit, also after an exception, puts back every flag, generator and environment variable.
What cannot be honoured any more is an error, never a warning: a check that believes it is
deterministic and is not proves nothing. All switches, set or left alone, are in ``knobs``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from pytest_gtrainer._torch.process import inductor_config, set_deterministic_algorithms
from pytest_gtrainer.environment import variable
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.seeds import random_states_kept, seed_everything


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """What makes a training run repeatable.

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


@dataclass(frozen=True, slots=True)
class ActivationCheckpointConfig:
    """How ``torch.utils.checkpoint`` recomputes; the fields are its arguments.

    Attributes:
        preserve_rng_state: recompute with the random numbers of the forward; without it dropout recomputes
            another mask, and what comes after the region draws other numbers.
        determinism_check: "default" compares shapes, dtypes and devices of what was recomputed, "none" nothing.
        debug: on a mismatch, show the operators of both runs.
    """

    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``torch.utils.checkpoint.checkpoint``.

        >>> ActivationCheckpointConfig(debug=True).arguments()
        {'use_reentrant': False, 'preserve_rng_state': True, 'determinism_check': 'default', 'debug': True}
        """
        return {"use_reentrant": False, **asdict(self)}


def flex_attention_options(config: DebugConfig) -> dict[str, bool]:
    """``torch.compile(flex_attention, options=...)``: tuned by measuring, unless it has to be deterministic (K2).

    Options of a compiled function win over Inductor's own configuration, which is why a model that
    compiles FlexAttention takes them from here.

    >>> flex_attention_options(DebugConfig())
    {'max_autotune': False, 'coordinate_descent_tuning': False}
    """
    tuned = not config.deterministic
    return {"max_autotune": tuned, "coordinate_descent_tuning": tuned}


NCCL_PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "as_found": MappingProxyType({}),
    # Megatron-LM --deterministic-mode demands that NCCL_ALGO is one of Tree, Ring, CollnetDirect, CollnetChain, ^NVLS;
    # its users mostly choose Ring, as slime and Primus do.
    "megatron_ring": MappingProxyType({"NCCL_ALGO": "Ring"}),
    "megatron_no_nvls": MappingProxyType({"NCCL_ALGO": "^NVLS"}),
    # SGLang --enable-deterministic-inference: trees, and for all-reduce only.
    "sglang_tree": MappingProxyType({"NCCL_ALGO": "allreduce:tree"}),
    # vLLM batch_invariant.override_envs_for_invariance: trees, one channel, one protocol.
    "vllm_batch_invariant": MappingProxyType({
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
    }),
})  # fmt: skip
"""Environment variables by the name of the preset; ``as_found`` sets nothing."""


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACE_VALUES = (":4096:8", ":16:8")

_INDUCTOR: Mapping[str, tuple[bool, str]] = {
    "deterministic": (True, "TORCHINDUCTOR_DETERMINISTIC"),
    "max_autotune": (False, "TORCHINDUCTOR_MAX_AUTOTUNE"),
    "max_autotune_pointwise": (False, "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE"),
    "max_autotune_gemm": (False, "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM"),
    "coordinate_descent_tuning": (False, "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"),
}

# Whether CUDA was first initialised inside one of our blocks: then it has the workspace,
# although the variable is gone again.
_cuda_started_here = False

_active: list[Settings] = []


class DeterminismError(RuntimeError):
    """A setting cannot be honoured in this process any more."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``deterministic`` put in place.

    Attributes:
        config: what was asked for.
        nccl: the preset of NCCL's variables.
    """

    config: DebugConfig
    nccl: str = "as_found"
    _before: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def seed(self) -> int:
        """The seed in effect."""
        return self.config.seed

    def report(self) -> str:
        """The values in effect now, one a line, with what they were before where that is something else."""
        lines = [f"{'seed':<72} {torch.initial_seed()}"]
        for name, value in knobs.values().items():
            now, before = ("unset" if v is None else v for v in (value, self._before.get(name, value)))
            lines.append(f"{name:<72} {now}{'' if before == now else f'  (was {before})'}")
        return "\n".join(lines)


def active() -> Settings | None:
    """The settings of the innermost ``deterministic`` block of this process."""
    return _active[-1] if _active else None


@contextmanager
def deterministic(
    config: DebugConfig | None = None, *, seed: int | None = None, nccl: str = "as_found"
) -> Iterator[Settings]:
    """Run a block deterministically; everything is restored on exit.

    Args:
        config: what to set; the default ``DebugConfig()`` sets everything.
        seed: instead of ``config.seed``; see ``mesh_seed`` for one per mesh dimension.
        nccl: a preset of NCCL's variables, see ``NCCL_PRESETS``; by default they are left alone.

    Raises:
        DeterminismError: CUDA was initialised without the cuBLAS workspace variable, or NCCL has read
            its variables already.
        ValueError: no NCCL preset of that name.
    """
    config = config or DebugConfig()
    if seed is not None:
        config = replace(config, seed=seed)
    settings = Settings(config, nccl, knobs.values())
    with ExitStack() as stack:
        stack.enter_context(_nccl(nccl))
        stack.enter_context(random_states_kept())
        if config.deterministic:
            stack.enter_context(_cublas_workspace())
            stack.enter_context(_inductor())
            stack.enter_context(_flags(warn_only=config.deterministic_warn_only))
        seed_everything(config.seed)
        _active.append(settings)
        stack.callback(_active.pop)
        yield settings


def call_under(config: DebugConfig, nccl: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` inside ``deterministic``: how a block reaches into other processes."""
    with deterministic(config, nccl=nccl):
        return function(*args)


@contextmanager
def _nccl(preset: str) -> Iterator[None]:
    """NCCL reads its variables when a communicator is made; afterwards it is too late."""
    if preset not in NCCL_PRESETS:
        raise ValueError(f"there is no NCCL preset {preset!r}: choose one of {', '.join(NCCL_PRESETS)}")
    wanted = NCCL_PRESETS[preset]
    differing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if differing and _nccl_is_up():
        name, value = next(iter(differing.items()))
        raise DeterminismError(
            f"NCCL has communicators already, so {name}={value} of the preset {preset!r} would not be read: set it "
            "before the process starts, or enter deterministic() before the process group is made"
        )
    with ExitStack() as stack:
        for name, value in differing.items():
            stack.enter_context(variable(name, value))
        yield


def _nccl_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return "nccl" in str(distributed.get_backend_config())


@contextmanager
def _cublas_workspace() -> Iterator[None]:
    """cuBLAS reads its variable when it starts; afterwards it is too late."""
    global _cuda_started_here
    started_before = torch.cuda.is_initialized()
    set_before = os.environ.get(_WORKSPACE) in _WORKSPACE_VALUES
    if started_before and not set_before and not _cuda_started_here:
        raise DeterminismError(
            f"CUDA is already initialised and {_WORKSPACE} is {os.environ.get(_WORKSPACE)!r}: "
            f"set it to {_WORKSPACE_VALUES[0]} before the process starts, or enter "
            "deterministic() before the first use of CUDA"
        )
    with variable(_WORKSPACE, os.environ[_WORKSPACE] if set_before else _WORKSPACE_VALUES[0]):
        try:
            yield
        finally:
            if torch.cuda.is_initialized() and not started_before:
                _cuda_started_here = True
                _read_workspace()


def _read_workspace() -> None:
    """torch and cuBLAS look at their variable at the first product and never again: one while it is there."""
    with suppress(RuntimeError):  # from a GPU that has failed, and what failed is on its way up
        one = torch.ones(1, 1, dtype=torch.float32, device="cuda")
        torch.mm(one, one)


@contextmanager
def _inductor() -> Iterator[None]:
    """Inductor's own flags, without importing it (0.7 s): by its variables until it is loaded."""
    loaded = inductor_config()
    before = {name: getattr(loaded, name) for name in _INDUCTOR} if loaded is not None else {}
    try:
        with ExitStack() as stack:
            for name, (value, from_variable) in _INDUCTOR.items():
                stack.enter_context(variable(from_variable, "1" if value else "0"))
                if loaded is not None:
                    setattr(loaded, name, value)
            yield
    finally:
        loaded = inductor_config()
        if loaded is not None:
            for name, (_, from_variable) in _INDUCTOR.items():
                # one that was loaded inside the block gets what it would have read outside
                setattr(loaded, name, before.get(name, os.environ.get(from_variable) == "1"))


@contextmanager
def _flags(*, warn_only: bool) -> Iterator[None]:
    """Flags of backends, and ``torch.use_deterministic_algorithms`` less its import of Inductor, see ``_inductor``."""
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn
    flags = cudnn.deterministic, cudnn.benchmark, onednn.deterministic
    algorithms = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.deterministic, cudnn.benchmark, onednn.deterministic = True, False, True
        set_deterministic_algorithms(True, warn_only=warn_only)
        yield
    finally:
        set_deterministic_algorithms(algorithms, warn_only=warned_only)
        cudnn.deterministic, cudnn.benchmark, onednn.deterministic = flags
