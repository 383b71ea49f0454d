"""Classes of torch's multi-process harness, given worlds of pytest-gtrainer."""

import unittest

import pytest
import torch.distributed as dist
from torch.testing._internal.common_fsdp import FSDPTest


def on_world(cls, kind, size):
    """Return ``cls`` with the same bodies, run in a world of ``size`` instead of in processes of its own.

    ``FSDPTest`` starts a process a rank and calls the method there. What a class adds to it is taken
    over, from all its bases; ``world_size`` is set, and ``rank`` asks torch.distributed.
    """
    body = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, FSDPTest) and base is not FSDPTest:
            body.update({k: v for k, v in vars(base).items() if not k.startswith("__")})
    body |= {"world_size": size, "rank": property(lambda self: dist.get_rank())}
    rebased = type(cls.__name__, (unittest.TestCase,), body)
    return pytest.mark.gt_world(kind, size=size)(rebased)
