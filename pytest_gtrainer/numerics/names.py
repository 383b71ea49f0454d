"""Names of tensors as the model's author wrote them, without what wrappers add.

``torch.compile``, activation checkpointing and data-parallel wrappers each put a prefix
into the names of what they wrap; two runs of one model must still have the same names.
"""

from __future__ import annotations

_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_LEADING = "module"


def normalised(name: str) -> str:
    """The name without wrapper prefixes; ``module.`` goes only where it leads.

    >>> normalised("_orig_mod.layers.0._checkpoint_wrapped_module.wq.weight")
    'layers.0.wq.weight'
    >>> normalised("module.module.wq.weight"), normalised("layers.module.weight")
    ('wq.weight', 'layers.module.weight')
    """
    *path, last = name.split(".")
    path = [part for part in path if part not in _ANYWHERE]
    while path and path[0] == _LEADING:
        del path[0]
    return ".".join([*path, last])
