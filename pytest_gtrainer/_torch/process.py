"""State of the process: deterministic algorithms, streams of CUDA, compiled code.

Inductor and Dynamo are read only if somebody has imported them: an import takes seconds.
"""

import sys
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.cuda

ATTRIBUTES = {
    "torch._C": ("_set_deterministic_algorithms",),
    "torch.cuda": ("_sleep",),
}


def set_deterministic_algorithms(on: bool, *, warn_only: bool) -> None:
    # ``torch.use_deterministic_algorithms`` does the same, and imports Inductor.
    torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


def set_backend_flag(backend: Any, name: str, value: bool) -> None:
    """Set one flag of ``torch.backends.cudnn`` or ``torch.backends.mkldnn``."""
    # ``import torch.testing._internal.common_utils`` forbids to assign these flags for the rest of
    # the process. torch's way out, ``backend.flags(...)``, would set all flags of the backend, and
    # raises if precisions of TF32 are mixed.
    vars(type(backend))[name].setter(value)


def keep_stream_busy(cycles: int) -> None:
    """Let the current CUDA stream sleep."""
    torch.cuda._sleep(cycles)


def forget_cublas_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each stream: 32 MiB on an H100."""
    # A CPU build has no such function.
    with suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()


def inductor_config() -> Any:
    """Return Inductor's configuration; None if nobody has imported it."""
    return sys.modules.get("torch._inductor.config")


def compiles() -> bool:
    """Return whether dynamo and Inductor are loaded."""
    return "torch._inductor" in sys.modules and "torch._dynamo" in sys.modules


def fresh_cache() -> AbstractContextManager[Any]:
    """Let Inductor compile into an empty folder."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()
