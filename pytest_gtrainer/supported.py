"""Which torch this package was made for, said in one place and in one line."""

from __future__ import annotations

from importlib import metadata

TORCH = "2.13"
"""Its private modules are used; ``_torch`` says which, a module a topic, and was read against this version."""


def complaint(version: str | None = None) -> str | None:
    """What to tell who has another torch; None for the one that is supported. Does not import torch.

    >>> complaint("2.13.1+cpu")
    >>> complaint("2.14.0")
    'torch 2.14.0 is not supported: pytest-gtrainer reads private parts of torch 2.13; graph text, goldens and digests \
may work, tracing, passes and ranks may not: pip install "torch==2.13.*"'
    """
    found = version if version is not None else metadata.version("torch")
    if found == TORCH or found.startswith(f"{TORCH}."):
        return None
    return (
        f"torch {found} is not supported: pytest-gtrainer reads private parts of torch {TORCH}; graph text, goldens "
        f'and digests may work, tracing, passes and ranks may not: pip install "torch=={TORCH}.*"'
    )
