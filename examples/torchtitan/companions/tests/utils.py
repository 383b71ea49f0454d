"""Stands for ``tests/utils.py`` of torchtitan's repository, which the wheel does not have.

Its graph_trainer tests import two functions from there. They compare the hashes only with each
other, or with values that are skipped, so any hash of all bits does.
"""

import hashlib

import torch
from torch import nn


def _hash(tensors):
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        # A wrapper for checkpointing renames its parameters, and changes none.
        name = name.replace("._checkpoint_wrapped_module", "")
        value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_model(model: nn.Module) -> str:
    return _hash({**dict(model.named_parameters()), **dict(model.named_buffers())})


def hash_gradient(model: nn.Module) -> str:
    return _hash({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
