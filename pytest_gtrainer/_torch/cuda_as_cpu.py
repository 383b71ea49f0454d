"""CUDA that is the CPU: the questions and the device arguments that ask for it.

Contract, read in torch 2.13 to 2.15:

- A ``TorchFunctionMode`` sees every call of torch that places a tensor, also those of
  ``Module.cuda`` and ``Module.to_empty``. So no method of torch is replaced for tensors.
- Functions of ``torch.cuda`` pass no mode: they are replaced in their modules while the block
  lasts. Torch's own code, and ours, gets the original, or it would start CUDA.
- So are the functions that make process groups and meshes: NCCL becomes gloo.
- ``_get_available_device_type`` is what torch gives libraries for the name of their device. They
  import it by name, so it is replaced before they are imported.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

from pytest_gtrainer._torch import private_names

with private_names():
    from torch import _utils as device_names

ATTRIBUTES = {
    "torch._utils": ("_get_available_device_type",),
}

# Decorators of torch's own harness ask in the name of a test whether there are enough GPUs.
_ASKS_FOR_TESTS = "torch.testing._internal.common_distributed"
_HEAR_THE_TRUTH = ("torch", "pytest_gtrainer")
_NOTHING = ("synchronize", "empty_cache", "ipc_collect", "init", "set_device")
_REFUSED = (
    *("stream", "set_stream", "current_stream", "default_stream"),
    *("graph", "make_graphed_callables", "graph_pool_handle", "get_device_properties"),
    *("mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved"),
    *("max_memory_reserved", "memory_stats", "memory_summary", "memory_snapshot"),
    *("reset_peak_memory_stats", "set_per_process_memory_fraction"),
)
# Classes stay what they are, as isinstance needs them; only making one is refused.
_REFUSED_CLASSES = ("Stream", "Event", "CUDAGraph")
_GROUPS = (
    *((dist, name) for name in ("init_process_group", "new_group", "init_device_mesh")),
    (device_mesh, "init_device_mesh"),
)


class NoStandInError(RuntimeError):
    """The CPU cannot stand for what was asked of CUDA."""


def _is_cuda(device: Any) -> bool:
    # Dynamo traces this: a regular expression would end its graph.
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaAsCpu(TorchFunctionMode):
    """Place on the CPU each tensor that a call of torch would place on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            # Its device may be a number, and non_blocking means nothing here.
            format_ = kwargs.get("memory_format", torch.preserve_format)
            return args[0].to("cpu", memory_format=format_)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _needs_the_truth() -> bool:
    """Return whether torch, or this package, calls the function that calls this one."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame else None
    caller = frame.f_globals.get("__name__", "") if frame else ""
    return caller != _ASKS_FOR_TESTS and caller.partition(".")[0] in _HEAR_THE_TRUTH


def _answered(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _needs_the_truth() else answer(*args, **kwargs)

    return answered


def _refused(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if _needs_the_truth():
            return original(*args, **kwargs)
        raise NoStandInError(
            f"torch.cuda.{name}: CUDA is the CPU in this run (gt_cuda_as), and the CPU has no "
            "stand-in for it; this test needs a GPU, or has to do without"
        )

    return refused


def _of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes process groups or a mesh: NCCL is gloo, and CUDA the CPU."""
    signature = inspect.signature(original)

    @wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _needs_the_truth():
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if "nccl" in str(given.get("backend", "")):
            # A further group is of the world's own backend: a fake world has fake groups.
            given["backend"] = None if dist.is_initialized() else "gloo"
            given.pop("pg_options", None)  # NCCL's
        if _is_cuda(given.get("device_id")):
            del given["device_id"]
        if _is_cuda(given.get("device_type")):
            given["device_type"] = "cpu"
        return original(*call.args, **call.kwargs)

    return made


def _seeded(seed: int) -> None:
    # Not torch.manual_seed, which would ask torch.cuda again.
    torch.default_generator.manual_seed(int(seed))


def _answers(devices: int) -> dict[str, Callable[..., Any]]:
    """Return what the functions of ``torch.cuda`` answer for as many ``devices``."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,  # torch without CUDA raises
        "is_bf16_supported": lambda including_emulation=True: True,
        # Below every capability: tests of one kind of GPU skip, in their own words.
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "CPU (gt_cuda_as)",
        "manual_seed": _seeded,
        "manual_seed_all": _seeded,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * devices,
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        **dict.fromkeys(_NOTHING, lambda *args, **kwargs: None),
    }


@contextmanager
def cuda_as_cpu(devices: int = 1) -> Iterator[None]:
    """Let the CPU stand for CUDA inside the block, as ``devices`` devices."""
    with ExitStack() as stack:
        for name, answer in _answers(devices).items():
            _replace(stack, torch.cuda, name, _answered(getattr(torch.cuda, name), answer))
        for name in ("is_available", "device_count"):
            answer = _answers(devices)[name]
            original = getattr(torch.accelerator, name)
            _replace(stack, torch.accelerator, name, _answered(original, answer))
        for name in _REFUSED:
            _replace(stack, torch.cuda, name, _refused(getattr(torch.cuda, name), name))
        for name in _REFUSED_CLASSES:
            cls = getattr(torch.cuda, name)
            _replace(stack, cls, "__new__", _refused(cls.__new__, name))
        for owner, name in _GROUPS:
            _replace(stack, owner, name, _of_cpu(getattr(owner, name)))
        _replace(stack, device_names, "_get_available_device_type", lambda: "cpu")
        stack.enter_context(CudaAsCpu())
        yield


def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))
