"""Hash every bit of a set of tensors: name, dtype, shape and raw bytes of each, in order.

Strides and devices do not count. Of a DTensor the local shard counts, or on request the global
tensor. A tensor larger than a *leaf* of 4 MiB enters by the hashes of its leaves. ``xxh3_128``
finds every accident; ``sha256`` also stands against somebody who wants two models to look the same;
``mix128`` is computed by torch on the tensor's device. Digests are comparable if the algorithm is
the same.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view, is_dtensor, memory, plain
from pytest_gtrainer.numerics.record import Record, Tensors, entries

_LEAF = 4 << 20
_WORD = 8
# Constants of splitmix64, as signed numbers, since torch has no unsigned arithmetic of 64 bits.
_POSITION = (0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64)
_STEPS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))

Scope = Literal["local", "global"]


def mix128(view: Tensor) -> bytes:
    """Return a hash of sixteen bytes of a byte view ``uint8[n]``, computed on its device."""
    missing = -view.numel() % _WORD
    if missing:
        view = torch.nn.functional.pad(view, (0, missing))
    elif view.storage_offset() % _WORD:
        view = view.clone()  # a view as words has to begin on the boundary of one
    words = view.view(torch.int64)
    positions = torch.arange(1, words.numel() + 1, device=view.device)
    sums = [_mixed(words ^ _mixed(positions * constant)).sum() for constant in _POSITION]
    # One copy from the device for both.
    totals = torch.stack(sums).tolist()
    return b"".join(total.to_bytes(_WORD, "little", signed=True) for total in totals)


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        # torch shifts signed numbers, which brings ones into a negative one.
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words


# By name, the hash of headers and leaves, and the hash of one leaf, a byte view ``uint8[n]``.
ALGORITHMS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], bytes]]] = {
    "xxh3_128": (xxhash.xxh3_128, lambda view: xxhash.xxh3_128_digest(memory(view))),
    "sha256": (hashlib.sha256, lambda view: hashlib.sha256(memory(view)).digest()),
    "mix128": (xxhash.xxh3_128, mix128),
}


def digest(value: Tensors, *, algorithm: str = "xxh3_128", scope: Scope = "local") -> str:
    """Return a hash of the bits of ``value``, ``"xxh3_128:5f0c…"``: a tensor, module, record,
    mapping or sequence.

    Of a module it covers parameters and buffers in order, tied weights under each name. Of a record
    it covers world size, keys and tensors, not ``meta``.

    Args:
        algorithm: one of ``ALGORITHMS``.
        scope: of a DTensor the "local" shard of this rank, or the "global" tensor, gathered one at
            a time. Then every rank of its mesh must call this and gets the digest of the model
            before it was sharded.

    Raises:
        ValueError: unknown algorithm or scope; no tensor at all.
        TypeError: something that is not a tensor, or (``NoBytes``) holds no values.

    >>> digest(torch.zeros(2)) == digest(torch.tensor([0.0, -0.0]))
    False
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown digest algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
    if scope not in ("local", "global"):
        raise ValueError(
            f"unknown scope {scope!r} of a digest: local (the shard) or global (the whole tensor)"
        )

    hasher = ALGORITHMS[algorithm][0]()
    if isinstance(value, Record):
        hasher.update(_framed("record", value.world_size, value.rank))
    found = entries(value)
    if not found:
        raise ValueError(
            "a digest of no tensors is the same whatever holds none: leave it out of the comparison"
        )

    for key, tensor in found.items():
        if scope == "global" and is_dtensor(tensor):
            tensor = tensor.full_tensor()
        local = plain(tensor)
        hasher.update(_framed(*key, str(local.dtype), *local.shape))
        for leaf in _leaves(local, algorithm):
            hasher.update(leaf)

    return f"{algorithm}:{hasher.hexdigest()}"


def _leaves(tensor: Tensor, algorithm: str) -> Iterator[Any]:
    """Yield the bytes themselves if they fit into one leaf, else the hash of each leaf."""
    view, on_device = byte_view(tensor), algorithm == "mix128"
    if view.numel() <= _LEAF and not on_device:
        host = view.cpu()  # kept alive by this frame while its memory is read
        yield memory(host)
        return
    for part in view.split(_LEAF):
        yield ALGORITHMS[algorithm][1](part if on_device else part.cpu())


def _framed(*parts: object) -> bytes:
    """Return parts as one byte string that begins with its length, so that no two are confused.

    >>> _framed("w", 2)
    b"8:('w', 2)"
    """
    header = repr(parts).encode()
    return b"%d:%s" % (len(header), header)


def print_weight_digest(
    step: int, rank: int, side: str, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Print a digest of this rank's weights if ``GT_WEIGHT_HASH=1``, to be compared by eye.

    On a GPU it is computed there, by ``mix128``.
    """
    named = dict(weights) if os.environ.get("GT_WEIGHT_HASH") == "1" else {}
    if named:  # a stage of a pipeline may have no parameters
        on_host = all(tensor.device.type == "cpu" for tensor in named.values())
        text = digest(named, algorithm="xxh3_128" if on_host else "mix128")
        print(f"weights step {step} rank {rank} {text} {side}", flush=True)
