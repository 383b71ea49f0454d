"""Modules that torch has wrapped or changed, each by the class or attribute that shows it."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

ATTRIBUTES = {
    "torch.distributed._composable.replicate": ("DDP",),
    "torch.distributed._composable.replicate_with_fsdp": ("ReplicateModule",),
    "torch._dynamo.eval_frame": ("OptimizedModule",),
    "torch.nn:Module": ("_compiled_call_impl", "_non_persistent_buffers_set"),
}

COMPILED = "torch.compile"

# Functions put a class in front of the module's own, as ``fully_shard`` does with ``FSDPModule``.
# A ``ReplicateModule`` is an ``FSDPModule``, so it comes first. A class whose file nobody has
# imported has no instances; files are looked up in ``sys.modules``, because the package of the
# file ``replicate`` has a function of that name, too.
_CLASSES = (
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule", "replicate"),
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    ("torch.distributed._composable.replicate", "DDP", "replicate"),
    ("torch._dynamo.eval_frame", "OptimizedModule", COMPILED),
)


# Modules of which the only child is the module that they wrap.
_AROUND = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")
}


# By the class of a wrapper, or of its base, the name of the module that it wraps.
_NAME_OF_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def wrapped_by(module: nn.Module) -> str:
    """Return the name of the class or function of torch that wraps ``module``; "" if none does."""
    if isinstance(module, DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(module, DataParallel):
        return "DataParallel"
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    for file, name, spelled in _CLASSES:
        imported = sys.modules.get(file)
        if imported is not None and isinstance(module, getattr(imported, name)):
            return spelled
    # ``module.compile()`` changes the module and does not wrap it.
    if module._compiled_call_impl is not None or is_compiled(module.forward):
        return COMPILED
    return ""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within those that torch has put around it."""
    while type(module).__name__ in _AROUND and wrapped_by(module):
        module = next(module.children())
    return module


def name_without_wrappers(model: nn.Module, name: str) -> str:
    """Return a name in ``model`` without the parts by which torch's wrappers name what they wrap.

    By the modules on its way, so that a module of the user's may be named ``module``: without it
    ``weight`` and ``module.weight`` of one model would have one name.

    >>> name_without_wrappers(DataParallel(nn.Sequential(nn.Linear(1, 1))), "module.0.weight")
    '0.weight'
    >>> name_without_wrappers(nn.ModuleDict({"module": nn.Linear(1, 1)}), "module.weight")
    'module.weight'
    """
    at: Any = model
    kept = []
    for part in name.split("."):
        classes = [each.__name__ for each in type(at).__mro__]
        if not any(part == _NAME_OF_WRAPPED.get(each) for each in classes):
            kept.append(part)
        at = getattr(at, part, None)
    return ".".join(kept)


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, with names that have no wrappers in them.

    These are not the entries of a state dict: its hooks may rename a parameter, split it, copy it
    or leave it out.
    """
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        yield name_without_wrappers(model, fqn), parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                fqn = f"{prefix}.{name}" if prefix else name
                yield name_without_wrappers(model, fqn), buffer


def is_about_compiled_code(error: RuntimeError) -> bool:
    """Return whether ``error`` is the one of compiled code that is called inside a trace."""
    return "symbolically trace a dynamo-optimized function" in str(error)


def is_compiled(function: Any) -> bool:
    """Return whether ``function`` is what ``torch.compile`` gave for a function or a method."""
    return hasattr(function, "_torchdynamo_orig_callable")
