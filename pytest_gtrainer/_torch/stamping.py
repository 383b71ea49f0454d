"""Stamping layers: memory of copies, facts about symbols, what is in force around a call.

- ``Tensor._make_subclass`` makes a fake tensor of a meta tensor that shows a given storage, as ``FakeTensor.__new__``
  does, which takes five times as long; what else that sets is taken from one that it made;
- ``as_strided`` of a tensor without elements asks nothing of symbolic extents, and ``resize_storage_bytes_`` nothing of
  a symbolic number of bytes: ``set_`` and ``empty`` decide there whether the result is contiguous;
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
from pytest_gtrainer._torch.values import SYMBOLIC, FakeTensor, FakeTensorMode, storage_id

with private_names():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ATTRIBUTES = {
    "torch:Tensor": ("_version", "_make_subclass"),
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
    if isinstance(nbytes, int):
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    shown = torch.empty(0, dtype=torch.uint8, device="meta")
    torch.ops.inductor.resize_storage_bytes_(shown, nbytes)
    return shown.untyped_storage()


def fake_on_storage(
    mode: FakeTensorMode, storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device,
    view: tuple[Any, Any, Any], attributes: dict[torch.device, dict[str, Any]],
) -> FakeTensor:  # fmt: skip
    """A fake tensor that shows this ``view`` (size, stride, offset) of given memory; without the mode's dispatch.
    ``attributes`` keeps what a fake tensor holds beside its extents, for all tensors of the mode."""
    shown = torch.empty(0, dtype=dtype, device="meta").set_(storage, 0, (0,), (1,)).as_strided(*view)
    if device not in attributes:
        attributes[device] = dict(vars(FakeTensor(mode, shown, device)))
    made = torch.Tensor._make_subclass(FakeTensor, shown, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes[device])
    return made


class Renamed:
    """Numbers and tensors of a copy, in its own symbols; a number that stands in many places is made once."""

    def __init__(self, attributes: dict[torch.device, dict[str, Any]]) -> None:
        """``attributes`` as for ``fake_on_storage``."""
        self.renaming: Renaming = {}
        self._numbers: dict[Any, Any] = {}
        self._attributes = attributes

    def number(self, value: Any) -> Any:
        """A symbolic number in the copy's symbols; anything else as it is."""
        if not isinstance(value, SYMBOLIC) or not self.renaming:
            return value
        key = type(value), value.node.expr, len(self.renaming)
        if key not in self._numbers:
            self._numbers[key] = renamed_number(value, self.renaming)
        return self._numbers[key]

    def on_storage(self, like: FakeTensor, storage: torch.UntypedStorage) -> FakeTensor:
        """A fake tensor like another, on other memory."""
        size, stride, offset = like.size(), like.stride(), like.storage_offset()
        if self.renaming:
            size, stride = torch.Size(map(self.number, size)), tuple(map(self.number, stride))
            offset = self.number(offset)
        view = size, stride, offset
        return fake_on_storage(like.fake_mode, storage, like.dtype, like.fake_device, view, self._attributes)


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
