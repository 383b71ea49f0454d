"""Fingerprints of parts of a tensor, which add up to the fingerprint of the whole tensor.

A tensor is a row of words of at most four bytes, in row-major order. Its fingerprint is the sum of
``word * weight(index)`` modulo 2^64, where ``index`` is the place of the word in the *global*
tensor. So the shards of a DTensor add up to the fingerprint of the full tensor on any mesh, without
communication, and values that have changed places are seen. A weight is a pseudo-random number of
64 bits. Two tensors that differ by accident have the same fingerprint once in 2^33 cases or less
often (multilinear hashing; Carter and Wegman, 1979). It computes on the tensor's device.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view

MODULUS = 1 << 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PIECE = 1 << 18
# Constants of splitmix64, as signed numbers, since torch has no unsigned arithmetic of 64 bits.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_STEPS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def fingerprint(
    tensor: Tensor, offsets: Sequence[int] = (), shape: Sequence[int] | None = None
) -> Tensor:
    """Return the fingerprint of a local tensor as an ``int64[]`` on its device.

    Args:
        offsets: where the tensor begins in the global one; the origin without it.
        shape: the shape of the global tensor; that of ``tensor`` without it.

    >>> whole = torch.arange(12.0).view(3, 4)
    >>> left, right = whole[:, :1], whole[:, 1:]
    >>> parts = fingerprint(left, (0, 0), (3, 4)) + fingerprint(right, (0, 1), (3, 4))
    >>> bool(parts == fingerprint(whole))
    True
    """
    words = _words(tensor)
    if not words.numel():
        return torch.zeros((), dtype=torch.int64, device=words.device)
    per_element = words.numel() // tensor.numel()
    if shape is None or list(shape) == list(tensor.shape):
        return _of_run(words, 0)

    # Trailing dimensions that the part holds as a whole make long runs of neighbours.
    shape = [*shape, per_element]
    offsets = [*offsets, 0]
    sizes = [*tensor.shape, per_element]
    run, stride, dim = 1, 1, len(shape)
    while dim and run == stride:
        dim -= 1
        run *= sizes[dim]
        start = offsets[dim] * stride
        stride *= shape[dim]
    starts = torch.tensor([start], device="cpu")
    for outer in reversed(range(dim)):
        first, last = offsets[outer], offsets[outer] + sizes[outer]
        places = torch.arange(first, last, device="cpu") * stride
        starts = (places[:, None] + starts).view(-1)
        stride *= shape[outer]
    if len(starts) == 1:
        return _of_run(words, int(starts))

    starts = starts.to(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    within = torch.arange(run, device=words.device)
    rows = max(1, _PIECE // run)
    for some, begins in zip(words.view(-1, run).split(rows), starts.split(rows), strict=True):
        total += (some.to(torch.int64) * _weights_at(begins[:, None] + within)).sum()
    return total


def fingerprints_of_rows(tensor: Tensor) -> Tensor:
    """Return a fingerprint for each index of the first dimension, as ``int64[rows]``."""
    rows = _words(tensor).view(tensor.shape[0], -1)
    total = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for number, piece in enumerate(rows.split(_PIECE, dim=1)):
        weights = _weights(rows.device)[: piece.shape[1]]
        total += (piece.to(torch.int64) * weights).sum(dim=1) * _factor(number)
    return total


def _words(tensor: Tensor) -> Tensor:
    return byte_view(tensor).view(_WORDS[min(tensor.element_size(), 4)])


def _of_run(words: Tensor, start: int) -> Tensor:
    """Return the fingerprint of words that are neighbours, the first at the index ``start``."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    weights, done = _weights(words.device), 0
    while done < words.numel():
        number, place = divmod(start + done, _PIECE)
        piece = words[done : done + _PIECE - place]
        products = piece.to(torch.int64) * weights[place : place + piece.numel()]
        total += products.sum() * _factor(number)
        done += piece.numel()
    return total


def _weights_at(indices: Tensor) -> Tensor:
    factors = _mixed(indices // _PIECE * _INCREMENT) | 1
    return _weights(indices.device)[indices % _PIECE] * factors


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return the weights of the first piece. Those of another piece are ``_factor`` times these."""
    return _mixed(torch.arange(1, _PIECE + 1, device=device) * _INCREMENT)


@functools.lru_cache(maxsize=4096)
def _factor(number: int) -> int:
    factor = _mixed(torch.tensor(number, dtype=torch.int64, device="cpu") * _INCREMENT) | 1
    return int(factor)


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        # torch shifts signed numbers, which brings ones into a negative one.
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words
