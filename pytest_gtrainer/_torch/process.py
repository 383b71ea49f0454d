"""State of the process: deterministic algorithms, streams of CUDA, compiled code.

- ``torch._C._set_deterministic_algorithms`` is ``torch.use_deterministic_algorithms`` less its
  import of Inductor.
- ``torch.backends.ContextProp`` is the class of flags such as
  ``torch.backends.cudnn.deterministic``; its attribute ``setter`` sets one of them where assignment
  is refused.
- ``torch.cuda._sleep(cycles)`` keeps a stream busy.
- ``torch._C._cuda_clearCublasWorkspaces()`` frees what cuBLAS keeps for each stream, 32 MiB on an
  H100.
- Inductor's and dynamo's modules are looked at only where somebody has imported them: importing
  them takes seconds.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.cuda

ATTRIBUTES = {
    "torch._C": ("_set_deterministic_algorithms",),
    "torch.cuda": ("_sleep",),
}


def set_deterministic_algorithms(on: bool, *, warn_only: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


def set_backend_flag(backend: Any, name: str, value: bool) -> None:
    """Set one flag of ``torch.backends.cudnn`` or ``torch.backends.mkldnn``.

    ``import torch.testing._internal.common_utils`` forbids to assign these flags for the rest of
    the process. torch's way out, ``backend.flags(...)``, would set all flags of the backend, and
    raises where precisions of TF32 are mixed.
    """
    vars(type(backend))[name].setter(value)


def keep_stream_busy(cycles: int) -> None:
    """The current CUDA stream sleeps."""
    torch.cuda._sleep(cycles)


def forget_cublas_workspaces() -> None:
    """cuBLAS takes its memory anew when it needs it."""
    try:
        torch._C._cuda_clearCublasWorkspaces()
    except AttributeError:  # of a CPU build
        return


def inductor_config() -> Any:
    """Inductor's configuration; None while nobody has imported it."""
    return sys.modules.get("torch._inductor.config")


def compiles() -> bool:
    """Return whether dynamo and Inductor are loaded."""
    return "torch._inductor" in sys.modules and "torch._dynamo" in sys.modules


def fresh_cache() -> AbstractContextManager[Any]:
    """Inductor compiles into an empty folder inside."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()
