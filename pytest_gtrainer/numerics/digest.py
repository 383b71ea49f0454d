"""One string that stands for every bit of a set of tensors.

A digest covers, tensor by tensor and in order: name, dtype, shape, raw bytes. Each tensor
is preceded by a header of known length, so that no byte can wander from one tensor, or
from a name, into the next. Strides and devices do not count; of a DTensor the local shard
does. Bytes go to the hash where they lie: nothing is copied for contiguous tensors in host
memory, and one chunk at a time from a GPU.

``xxh3_128`` runs at the speed of memory and finds every accident; it is not made against
someone who wants two models to look the same. For that there is ``sha256``. Two digests
are comparable if they were made by the same algorithm, which stands in front of them.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import xxhash
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view, plain
from pytest_gtrainer.numerics.entries import Tensors, entries
from pytest_gtrainer.numerics.record import Key, Record

_CHUNK = 64 << 20


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


ALGORITHMS: dict[str, Callable[[], _Hash]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}


def digest(value: Tensors, *, algorithm: str = "xxh3_128") -> str:
    """Digest a tensor, mapping, sequence, module or record: ``"xxh3_128:5f0c…"``.

    A module gives parameters and buffers in order, tied weights under each name. Of a
    record, world size, keys and tensors count, ``meta`` does not.

    Raises:
        ValueError: unknown algorithm.
        TypeError: something that is not a tensor, or (``NoBytes``) holds no values.

    >>> import torch
    >>> digest(torch.zeros(2)) == digest(torch.tensor([0.0, -0.0]))
    False
    """
    hasher = _hasher(algorithm)
    if isinstance(value, Record):
        hasher.update(_framed("record", value.world_size, value.rank))
    for key, tensor in entries(value).items():
        _feed(hasher, key, tensor)
    return f"{algorithm}:{hasher.hexdigest()}"


def digests(value: Tensors, *, algorithm: str = "xxh3_128") -> dict[Key, str]:
    """The digest of every tensor by itself, name included; see ``digest``."""
    found = {}
    for key, tensor in entries(value).items():
        hasher = _hasher(algorithm)
        _feed(hasher, key, tensor)
        found[key] = f"{algorithm}:{hasher.hexdigest()}"
    return found


def _hasher(algorithm: str) -> _Hash:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown digest algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm]()


def _feed(hasher: _Hash, key: Key, tensor: Tensor) -> None:
    local = plain(tensor)
    hasher.update(_framed(*key, str(local.dtype), *local.shape))
    for chunk in _host_chunks(byte_view(local)):
        hasher.update(_memory(chunk))


def _framed(*parts: object) -> bytes:
    """Parts as one byte string that says its own length.

    >>> _framed("w", 2)
    b"8:('w', 2)"
    """
    header = repr(parts).encode()
    return b"%d:%s" % (len(header), header)


def _host_chunks(view: Tensor) -> Iterator[Tensor]:
    if view.device.type == "cpu":
        yield view
    else:
        yield from (chunk.cpu() for chunk in view.split(_CHUNK))


def _memory(view: Tensor) -> bytes | ctypes.Array[ctypes.c_ubyte]:
    """The memory of a contiguous byte view, not copied; valid as long as ``view`` lives."""
    if not view.numel():
        return b""
    return (ctypes.c_ubyte * view.numel()).from_address(view.data_ptr())
