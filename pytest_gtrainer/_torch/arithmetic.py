"""Operators in simpler ones, and storages as keys, for other arithmetics.

- ``torch._decomp.decomposition_table`` has by operator the function that Inductor and AOTAutograd
  take it apart with. Functions call operators, so a dispatch mode sees their parts.
- ``OpOverload.decompose`` does the same for operators that the dispatcher itself takes apart.
- ``OpOverload.redispatch`` with the key of a device runs the kernel itself. Where that is made of
  other operators, as those on lists and those of FSDP2 are, they are dispatched, so a mode that is
  active sees them.
- ``HigherOrderOperator.py_kernels`` has by dispatch key what runs one without autograd: Python that
  calls operators, such as the attention of ``flex_attention`` with its whole score matrix.
  ``generic_scan`` is that of ``scan``.
- ``StorageWeakRef`` refers to the storage object of a tensor and keeps its address, ``cdata``,
  from being used again. ``resize_`` of a storage keeps the object.
- ``UntypedStorage.resize_`` frees memory, and makes it again, without an operator. It is replaced
  while somebody watches: a storage itself calls nothing.
- ``OPDEFS`` has by name the operators that are written in Python, ``_init_fn`` is their function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.random_states import without_modes

with private_names():
    from torch._decomp import decomposition_table
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._library.custom_ops import OPDEFS
    from torch._ops import HigherOrderOperator
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

ATTRIBUTES = {
    "torch._C": ("DispatchKeySet", "DispatchKey"),
    "torch._ops:OpOverload": ("_schema", "decompose", "_can_decompose", "redispatch"),
    "torch._library.custom_ops:CustomOpDef": ("_init_fn",),
}

__all__ = ["HigherOrderOperator", "StorageWeakRef", "TorchDispatchMode", "decomposition_table"]


_resize = torch.UntypedStorage.resize_
_watchers: list[Callable[[torch.Tensor], None]] = []
_lock = Lock()


def _watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
    if size == 0:
        with without_modes():
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for note in list(_watchers):
            note(tensor)
    return _resize(storage, size)


@contextmanager
def watching_freed_storages(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``note`` with a tensor of each storage whose memory is freed, before it is.

    On all threads.
    """
    with _lock:
        _watchers.append(note)
        torch.UntypedStorage.resize_ = _watched_resize
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(note)
            if not _watchers:
                torch.UntypedStorage.resize_ = _resize


@cache  # asked of every operator that a proof runs
def is_taken_apart(operator: Any) -> bool:
    """Return whether the dispatcher takes an operator apart by itself."""
    return bool(operator._can_decompose())


def body_of_packing(operator: Any) -> Callable[..., Any] | None:
    """Return the Python function of an operator by which Inductor packs buckets, else None."""
    if operator.namespace != "bucketing":
        return None
    name = operator.name().partition(".")[0]
    return OPDEFS[name]._init_fn if name in OPDEFS else None


def is_compiled(value: Any) -> bool:
    """Return whether ``torch.compile`` has made, or changed, a function or module."""
    # The one marks functions, the other modules that compile() has changed in place.
    marked = "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})
    is_changed = getattr(value, "_compiled_call_impl", None) is not None
    return isinstance(value, OptimizedModule) or marked or is_changed


def take_apart(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call the operators that the dispatcher makes this one of; NotImplemented for a primitive."""
    return operator.decompose(*args, **kwargs)


def dense_kernel_of(operator: HigherOrderOperator) -> Any:
    """Return the function that runs a higher-order operator by others; None if there is none."""
    # Their kernels refuse any active mode.
    own = {"scan": _scan, "cond": _cond, "invoke_subgraph": _call, "strict_mode": _call_on_list}
    if operator.name() in own:
        return own[operator.name()]
    return operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def _scan(combine: Any, init: Any, xs: Any, additional_inputs: Any) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)


def _cond(predicate: Any, true_branch: Any, false_branch: Any, operands: Any) -> Any:
    return (true_branch if predicate else false_branch)(*operands)


def _call(graph: Any, identifier: Any, *operands: Any) -> Any:
    return graph(*operands)


def _call_on_list(function: Any, operands: Any) -> Any:
    return function(*operands)


def run_kernel(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run the CPU's kernel of an operator, without the dispatch modes that it has passed."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return operator.redispatch(keys, *args, **kwargs)


def signature(operator: Any) -> list[tuple[str, str]]:
    """Return name and type of each argument that is no ``out=``."""
    arguments = operator._schema.arguments
    return [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]


def functional_of(operator: Any) -> Any:
    """Return the operator that computes what this one writes: ``add`` of ``add_`` and ``add.out``.

    None if it has none with the same arguments.
    """
    name = operator._schema.name.partition("::")[2]
    packet = getattr(getattr(torch.ops, operator.namespace), name, None)
    if name.endswith("_") and not name.endswith("__"):
        packet = getattr(getattr(torch.ops, operator.namespace), name[:-1], None)
    if packet is None:
        return None
    wanted = signature(operator)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and signature(candidate) == wanted:
            return candidate
    return None
