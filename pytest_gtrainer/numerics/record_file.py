"""Records on disk: raw bytes that are mapped, not read.

A file is a magic line, the tensors' bytes one after the other, each on a boundary of 64 bytes, then an index in JSON
that knows where it begins, and its length. Loading maps the file and reads the index; what a comparison touches is
paged in, and the pages can go again, so that two records larger than memory can be compared. Nothing in a file is
executed.

A *spool* is a nameless file that takes a record's large tensors while it is made; it goes with the last of them.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view, memory

_MAGIC = b"gtrainer-record-3 %s\n" % sys.byteorder.encode()
_ALIGNMENT = 64
_LENGTH = 8
_PIECE = 16 << 20

LARGE = 1 << 20
"""From how many bytes on a spooled record keeps a tensor on disk."""


class NoRecord(ValueError):
    """A file that holds no record, or not all of one."""


def write(path: str | PathLike[str], header: dict[str, Any], tensors: Iterable[tuple[Sequence[Any], Tensor]]) -> None:
    """Write ``(key, tensor)`` pairs, one tensor after the other, under another name until all is there."""
    unfinished = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(unfinished, "wb") as file:
            file.write(_MAGIC)
            rows = [[*key, *_written(file, tensor)] for key, tensor in tensors]
            index = json.dumps({**header, "begins": file.tell(), "tensors": rows}).encode()
            file.write(index + len(index).to_bytes(_LENGTH, "little"))
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def _written(file: BinaryIO, tensor: Tensor) -> tuple[str, list[int], int]:
    """Append the bytes; returns dtype, shape and where they begin."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    start = file.tell()
    for piece in byte_view(tensor).split(_PIECE):
        host = piece.cpu()
        file.write(memory(host))
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], list[tuple[list[Any], Tensor]]]:
    """The header and the ``(key, tensor)`` pairs that ``write`` was given; tensors are mapped, changes stay private.

    Raises:
        NoRecord: the file holds something else, or was cut off.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise NoRecord(f"{path} does not hold a record ({_MAGIC.decode().strip()})")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        end = len(mapped) - _LENGTH
        length = int.from_bytes(mapped[end:], "little")
        header = json.loads(mapped[end - length : end])
        begins, rows = header.pop("begins"), header.pop("tensors")
    except (ValueError, KeyError, TypeError):
        raise NoRecord(f"{path} was cut off: its index is not where it should be") from None
    if begins != end - length:
        raise NoRecord(f"{path} was cut off: {begins - (end - length)} bytes before its index are missing")
    return header, [(key, _mapped(mapped, dtype, shape, start)) for *key, dtype, shape, start in rows]


def _mapped(mapped: mmap.mmap, dtype: str, shape: Sequence[int], start: int) -> Tensor:
    kind = getattr(torch, dtype)
    numel = math.prod(shape)
    if not numel:
        return torch.empty(list(shape), dtype=kind)
    row = torch.frombuffer(mapped, dtype=torch.uint8, count=numel * kind.itemsize, offset=start)
    return row.view(kind).view(list(shape))


@dataclass(slots=True)
class Spool:
    """A nameless file in a folder that keeps large tensors until nobody holds them."""

    folder: str | PathLike[str]

    def keep(self, tensor: Tensor) -> Tensor:
        """The same contiguous tensor, mapped from disk if it is large."""
        if tensor.numel() * tensor.element_size() < LARGE:
            return tensor
        with tempfile.TemporaryFile(dir=self.folder) as file:
            dtype, shape, start = _written(file, tensor)
            file.flush()
            return _mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype, shape, start)
