"""Stamping layers: memory of copies, facts about symbols, what is in force around a call.

- ``FakeTensor(mode, meta_tensor, device)`` on a meta tensor that shows a given storage makes a view without a dispatch;
- ``Tensor._version`` counts the writes to a tensor's memory;
- ``ShapeEnv.deferred_runtime_asserts`` holds, by symbol, what a trace relied on about a data-dependent size, and
  ``ShapeEnv.replacements`` what it found a symbol to be equal to;
- ``_get_current_dispatch_mode_stack`` lists dispatch modes, ``_get_current_function_mode_stack`` function modes, and
  ``torch._C._autograd._top_saved_tensors_default_hooks`` gives the pair in force around saved tensors.
"""

from dataclasses import replace
from typing import Any

import torch

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.chunking import Renaming, renamed_number
from pytest_gtrainer._torch.values import FakeTensor, storage_id

with private_names():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ATTRIBUTES = {
    "torch:Tensor": ("_version",),
    "torch:UntypedStorage": ("_cdata",),
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": ("deferred_runtime_asserts", "replacements"),
}

OF_A_TRACE = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode", "TorchFunctionMetadataMode")


def version_of(tensor: torch.Tensor) -> int:
    """How often its memory has been written to."""
    return int(tensor._version)


def is_storage_of(storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
    """Whether a tensor shows this memory."""
    return bool(storage._cdata == storage_id(tensor))


def new_storage(nbytes: Any) -> torch.UntypedStorage:
    """Memory of nobody."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def on_storage(like: FakeTensor, storage: torch.UntypedStorage, renaming: Renaming) -> FakeTensor:
    """A fake tensor like another, on other memory and in other symbols; without the mode's dispatch."""
    size, stride, offset = like.size(), like.stride(), like.storage_offset()
    if renaming:
        size = torch.Size([renamed_number(extent, renaming) for extent in size])
        stride = tuple(renamed_number(extent, renaming) for extent in stride)
        offset = renamed_number(offset, renaming)
    shown = torch.empty(0, dtype=like.dtype, device="meta").set_(storage, offset, size, stride)
    return FakeTensor(like.fake_mode, shown, like.fake_device)


def copy_facts(env: Any, renaming: Renaming) -> None:
    """What the trace found out about the renamed symbols holds of their copies, too."""
    for symbol, copied in renaming.items():
        if symbol in env.replacements:
            env.replacements[copied] = env.replacements[symbol].xreplace(renaming)
        facts = env.deferred_runtime_asserts.get(symbol, ())
        env.deferred_runtime_asserts.setdefault(copied, []).extend(
            replace(fact, expr=fact.expr.xreplace(renaming)) for fact in facts
        )


def foreign_modes() -> list[str]:
    """Dispatch modes and function modes that are on beside those of a trace."""
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    return [name for name in (type(mode).__name__ for mode in modes) if name not in OF_A_TRACE]


def saved_tensor_hooks() -> Any:
    """The pair of hooks in force around tensors that are saved for the backward, None without one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
