"""Modes and hooks that stay active until somebody ends them: read them, and put them back.

A test that enters a mode and fails may leave it active, and every later test of the process would
run inside it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.modules.module as module
from torch.fx import traceback

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._C._autograd import (
        _pop_saved_tensors_default_hooks,
        _push_saved_tensors_default_hooks,
        _top_saved_tensors_default_hooks,
    )
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_AUTOCAST_DEVICES = ("cpu", "cuda")
ATTRIBUTES = {
    "torch.nn.modules.module": (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    )
}

# Dicts that ``register_module_forward_hook`` and its like fill. Torch never replaces them.
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_forward_hooks_always_called,
    module._global_forward_hooks_with_kwargs,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
    module._global_buffer_registration_hooks,
    module._global_module_registration_hooks,
    module._global_parameter_registration_hooks,
)


def _autocast() -> tuple[Any, ...]:
    states = [
        (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
        for each in _AUTOCAST_DEVICES
    ]
    return (*states, torch.is_autocast_cache_enabled(), autocast_depth())


def autocast_depth() -> int:
    """Count the open blocks of autocast, also inside an operator, where autocast is off.

    Only the end of the outermost block empties the cache of casts, so a block that is left open
    lets later ones use old casts.
    """
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast(state: tuple[Any, ...]) -> None:
    *states, is_cached, depth = state
    for device, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, states, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(is_cached)
    torch.clear_autocast_cache()
    for _ in range(autocast_depth(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, autocast_depth()):
        torch.autocast_decrement_nesting()


def _function_modes() -> tuple[Any, ...]:
    """Return the function modes that are entered, the outermost first."""
    # The default device is a mode, too, but a setting of its own here.
    return tuple(
        mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)
    )


def dispatch_modes() -> tuple[Any, ...]:
    """Return the dispatch modes that are entered, the outermost first."""
    return tuple(_get_current_dispatch_mode_stack())


def _set_modes(read: Callable[[], Sequence[Any]], wanted: Sequence[Any]) -> None:
    """End the modes that are not wanted, the innermost first, and enter those that are missing."""
    entered = read()
    common = 0
    while common < min(len(entered), len(wanted)) and entered[common] is wanted[common]:
        common += 1
    for mode in reversed(entered[common:]):
        # If the exit of one mode fails, the others still end.
        with contextlib.suppress(Exception):
            mode.__exit__(None, None, None)
    for mode in wanted[common:]:
        mode.__enter__()


def _saved_tensor_hooks() -> Any:
    return _top_saved_tensors_default_hooks(False)


def _set_saved_tensor_hooks(wanted: Any) -> None:
    """Pop pairs of hooks down to the wanted one; push it if it is gone.

    Only the top of the stack can be read, so pairs below the wanted one are not restored.
    """
    top = _saved_tensor_hooks()
    while top is not None and top != wanted:
        _pop_saved_tensors_default_hooks()
        top = _saved_tensor_hooks()
    if top is None and wanted is not None:
        _push_saved_tensors_default_hooks(*wanted)


def _global_hooks() -> list[dict[int, Any]]:
    return [dict(hooks) for hooks in _GLOBAL_HOOKS]


def _set_global_hooks(wanted: list[dict[int, Any]]) -> None:
    for registered, hooks in zip(_GLOBAL_HOOKS, wanted, strict=True):
        registered.clear()
        registered.update(hooks)


def _annotations() -> dict[str, Any]:
    return dict(traceback.current_meta.get("custom", {}))


def _set_annotations(wanted: dict[str, Any]) -> None:
    if wanted:
        traceback.current_meta["custom"] = dict(wanted)
    else:
        traceback.current_meta.pop("custom", None)


# Functions that read each setting and put it back, by name. Modes come first: an active one would
# see how the others are put back.
MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch function modes": (_function_modes, lambda wanted: _set_modes(_function_modes, wanted)),
    "dispatch modes": (dispatch_modes, lambda wanted: _set_modes(dispatch_modes, wanted)),
    "autocast": (_autocast, _set_autocast),
    "saved-tensor hooks": (_saved_tensor_hooks, _set_saved_tensor_hooks),
    "global module hooks": (_global_hooks, _set_global_hooks),
    # A trace that fails may leave them, and each later graph would have them.
    "annotations of traced nodes": (_annotations, _set_annotations),
    "the default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
}


def _matmul_precision() -> tuple[str | None, str, str]:
    precision = None
    # It raises if the two ways to set the precision were mixed.
    with contextlib.suppress(RuntimeError):
        precision = torch.get_float32_matmul_precision()
    on_cuda, on_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return precision, on_cuda.fp32_precision, on_cpu.fp32_precision


def _set_matmul_precision(value: tuple[str | None, str, str]) -> None:
    if value[0] is not None:
        torch.set_float32_matmul_precision(value[0])
    torch.backends.cuda.matmul.fp32_precision = value[1]
    torch.backends.mkldnn.matmul.fp32_precision = value[2]


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "matmul precision": (_matmul_precision, _set_matmul_precision),
    # Written only if changed: use_deterministic_algorithms imports half of Inductor.
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
}
"""Functions that read other settings and put them back, by name."""


def spell_mode(value: Any) -> str:
    """Return a value of ``MODES`` as text: modes by their classes, hooks by their number."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"{sum(map(len, value))} hooks"
    if isinstance(value, tuple) and all(hasattr(mode, "__exit__") for mode in value):
        return ", ".join(type(mode).__name__ for mode in value) or "none"
    if isinstance(value, tuple) and all(map(callable, value)):
        return " and ".join(getattr(hook, "__qualname__", repr(hook)) for hook in value)
    return str(value)
