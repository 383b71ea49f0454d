"""Record the tensors of one training run, in memory and on disk.

A *record* maps ``Key(step, rank, phase, name)`` to a copy of a tensor in host memory. A *partial*
record is of one rank of its world. With a *spool* large tensors are in nameless files.

A file begins with a magic line and the bytes of the tensors, each on a boundary of 64 bytes. At its
end stand an index in JSON, which includes the place at which it begins, and the length of the
index. Loading maps the file.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import sys
import tempfile
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from pytest_gtrainer.facts import check_type, counted
from pytest_gtrainer.numerics.bits import byte_view, is_dtensor, memory, parts, plain
from pytest_gtrainer.numerics.verdict import PHASES, Key

_MAGIC = b"gtrainer-record-3 %s\n" % sys.byteorder.encode()
_ALIGNMENT = 64
_LENGTH = 8
_PIECE = 16 << 20

LARGE = 1 << 20  # minimum size in bytes of a tensor that a spooled record keeps on disk

_ANYWHERE = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_LEADING = "module"


def normalised(name: str) -> str:
    """Return a name without the prefixes of wrappers; ``module.`` is removed only at the front.

    >>> normalised("_orig_mod.layers.0._checkpoint_wrapped_module.wq.weight")
    'layers.0.wq.weight'
    >>> normalised("layers.module.weight")
    'layers.module.weight'
    """
    *path, last = name.split(".")
    path = [part for part in path if part not in _ANYWHERE]
    while path and path[0] == _LEADING:
        del path[0]
    return ".".join([*path, last])


START = "weights at the start of rank "
"""In a record's ``meta``, with the rank: the digest of the parameters before the first step."""


class Record:
    """Copies of the tensors of a run, in the order in which they were added.

    Args:
        world_size: how many ranks the run had.
        rank: the only rank of which this is a record; None (the default) if it is of all.
        meta: free text about the run; it takes no part in digests and comparisons.
        spool: a folder with space for a run that does not fit into memory: tensors of 1 MiB and
            more are kept there, in nameless files that go with the record.

    Attributes:
        placements: of each entry that was a DTensor its placements and global shape, in words.

    >>> record = Record()
    >>> record.add(0, 0, "weight", "_orig_mod.wq.weight", torch.ones(2))
    >>> list(record)
    [Key(step=0, rank=0, phase='weight', name='wq.weight')]
    """

    __slots__ = ("_spool", "_tensors", "meta", "placements", "rank", "world_size")

    def __init__(
        self,
        world_size: int = 1,
        rank: int | None = None,
        meta: dict[str, str] | None = None,
        *,
        spool: str | PathLike[str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(
                f"a record of a run on {world_size} ranks: world_size must be at least 1"
            )
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        # Else the first large tensor fails, after the first step of the run.
        if spool is not None and not os.path.isdir(spool):
            raise ValueError(f"spool={os.fspath(spool)!r} is no folder: make it before the run")
        self.world_size = world_size
        self.rank = rank
        self.meta = dict(meta or {})
        self._tensors: dict[Key, Tensor] = {}
        self.placements: dict[Key, str] = {}
        self._spool = spool

    def add(self, step: int, rank: int, phase: str, name: str, tensor: Tensor) -> None:
        """Keep a copy of ``tensor``: of a DTensor its local shard, detached, contiguous, on the
        CPU.

        A quantised tensor is kept as its integers, scales and zero points, each under a name of its
        own.

        Raises:
            ValueError: an unknown phase, a rank that is not of this record, or a key added twice.
            TypeError: what is given is no tensor.
            NoBytes: the tensor holds no values (meta, fake).
        """
        check_type(name, str, "the name of a recorded tensor", "a text")
        check_type(tensor, Tensor, f"{phase} {name!r} of a record", "a tensor, torch.tensor(...)")
        for part_name, part in parts(name, tensor):
            key = self._new_key(step, rank, phase, part_name)
            self._add(key, part)
            if is_dtensor(part):
                self.placements[key] = f"{part.placements} of {list(part.shape)}"

    def _add(self, key: Key, tensor: Tensor) -> None:
        source = plain(tensor)
        copy = byte_view(source).to("cpu", copy=True).view(source.dtype).view(source.shape)
        if self._spool is not None and copy.nbytes >= LARGE:
            # The file has no name, and goes with the mapped tensor.
            with tempfile.TemporaryFile(dir=self._spool) as file:
                place = _append(file, copy)
                file.flush()
                copy = _mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), *place)
        self._tensors[key] = copy

    def _new_key(self, step: int, rank: int, phase: str, name: str) -> Key:
        key = Key(step, rank, phase, normalised(name))
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}: one of {', '.join(PHASES)}")
        if rank not in self.expected_ranks:
            raise ValueError(f"rank {rank} does not belong to {self!r}")
        if key in self._tensors:
            raise ValueError(f"{key} is recorded already")
        return key

    @property
    def expected_ranks(self) -> range:
        """The ranks of which this is a record, captured or not."""
        if self.rank is None:
            return range(self.world_size)
        return range(self.rank, self.rank + 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which something was captured."""
        return tuple(sorted({key.rank for key in self._tensors}))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which something was captured."""
        return tuple(sorted({key.step for key in self._tensors}))

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The pairs ``(step, rank)`` that should be in the record, and of which nothing is."""
        seen = {(key.step, key.rank) for key in self._tensors}
        wanted = itertools.product(self.steps, self.expected_ranks)
        return tuple(place for place in wanted if place not in seen)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __getitem__(self, key: tuple[int, int, str, str]) -> Tensor:
        return self._tensors[Key(*key)]

    def items(self) -> ItemsView[Key, Tensor]:
        """Return keys and tensors in the order of ``add``."""
        return self._tensors.items()

    def select(
        self,
        *,
        step: int | None = None,
        rank: int | None = None,
        phase: str | None = None,
        name: str | None = None,
    ) -> dict[Key, Tensor]:
        """Return the entries of one step, rank, phase or name, or of any combination of them."""
        wanted = (step, rank, phase, name)
        return {
            key: tensor
            for key, tensor in self._tensors.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        }

    def __repr__(self) -> str:
        parts = [f"world_size={self.world_size}"]
        if self.rank is not None:
            parts.append(f"rank={self.rank}")
        return f"Record({', '.join(parts)}, {counted(len(self), 'tensor')})"

    @classmethod
    def merged(cls, records: Iterable[Record]) -> Record:
        """Merge the records of the ranks of a world into one.

        The tensors are shared with the parts, not copied. A rank of which no part has anything
        shows in ``missing``, and a comparison is then unverified. If parts disagree about an entry
        of ``meta``, the first one stands.

        Raises:
            ValueError: no records, different world sizes, or two with the same rank.
        """
        parts = list(records)
        sizes = {part.world_size for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"records of one world are merged, got world sizes {sorted(sizes)}")
        whole = cls(sizes.pop())
        for part in parts:
            twice = sorted({*whole.ranks} & {*part.ranks})
            if twice:
                raise ValueError(f"ranks {twice} are in more than one of the records to merge")
            whole._tensors.update(part._tensors)
            whole.placements |= part.placements
            whole.meta = part.meta | whole.meta
        return whole

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to one file, which appears under its name when it is whole."""
        header: dict[str, Any] = {
            "world_size": self.world_size,
            "rank": self.rank,
            "meta": self.meta,
        }
        unfinished = f"{os.fspath(path)}.{os.getpid()}.part"
        try:
            with open(unfinished, "wb") as file:
                file.write(_MAGIC)
                rows = [[*key, *_append(file, tensor)] for key, tensor in self._tensors.items()]
                header["placements"] = [[*key, words] for key, words in self.placements.items()]
                # The index comes last, as a place is known only when its bytes are written.
                index = json.dumps({**header, "begins": file.tell(), "tensors": rows}).encode()
                file.write(index + len(index).to_bytes(_LENGTH, "little"))
            os.replace(unfinished, path)
        # Also if the run is stopped: half a file of many gigabytes would stay on the disk.
        except BaseException:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
            raise

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Record:
        """Map a file that ``save`` wrote.

        Tensors are read when they are looked at, and changes to them stay private. No code from the
        file is run.

        Raises:
            ValueError: the file holds something else, or not all of a record.
        """
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{path} does not hold a record ({_MAGIC.decode().strip()})")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

        try:
            end = len(mapped) - _LENGTH
            start = end - int.from_bytes(mapped[end:], "little")
            header = json.loads(mapped[start:end])
            lost = header["begins"] - start
            record = cls(header["world_size"], header["rank"], header["meta"])
            len(record.expected_ranks)  # raises if the world size of a damaged file is no integer
            for step, rank, phase, name, *place in header["tensors"] if lost == 0 else ():
                if type(step) is not int or type(rank) is not int:
                    raise TypeError(f"{step!r} is no step, or {rank!r} no rank")
                record._tensors[record._new_key(step, rank, phase, name)] = _mapped(mapped, *place)
            # Files of older versions have none.
            for *fields, words in header.get("placements", ()):
                record.placements[Key(*fields)] = str(words)
            if lost == 0:
                return record
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{path} was cut off or damaged: its index cannot be read ({error})"
            ) from error

        raise ValueError(f"{path} was cut off: {lost} bytes before its index are missing")


def _append(file: BinaryIO, tensor: Tensor) -> tuple[str, list[int], int]:
    """Append the bytes of a tensor to a file; return its dtype and shape, and where they begin."""
    # Kernels expect a tensor at an address that its element size divides.
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    start = file.tell()
    for piece in byte_view(tensor).split(_PIECE):
        host = piece.cpu()
        file.write(memory(host))
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start


def _mapped(mapped: mmap.mmap, dtype: str, shape: Sequence[int], start: int) -> Tensor:
    kind = getattr(torch, dtype)
    numel = math.prod(shape)
    if not numel:  # torch.empty of the dtype itself fails for some
        return torch.empty(0, dtype=torch.uint8).view(kind).view(list(shape))
    row = torch.frombuffer(mapped, dtype=torch.uint8, count=numel * kind.itemsize, offset=start)
    return row.view(kind).view(list(shape))


Tensors: TypeAlias = "Tensor | nn.Module | Record | Mapping[str, Any] | list[Any] | tuple[Any, ...]"

OUTSIDE_A_RUN = ""


def entries(value: Tensors) -> dict[Key, Tensor]:
    """Return every tensor in ``value`` by its key; None is no entry.

    The phase is empty outside a ``Record`` and what ``Record.select`` returns.
    """
    if isinstance(value, Record):
        return dict(value.items())
    if isinstance(value, Mapping):
        # What ``select`` returned keeps its places in the run.
        selected = {key: tensor for key, tensor in value.items() if isinstance(key, Key)}
        if selected and len(selected) == len(value):
            return selected

    found: dict[Key, Tensor] = {}
    for name, tensor in _named(value, ""):
        key = Key(0, 0, OUTSIDE_A_RUN, normalised(name))
        if key in found:
            raise ValueError(f"two tensors are named {key.name!r}")
        found[key] = tensor

    return found


def _parts_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{name}.{key}" if name else str(key), part
    else:
        for index, part in enumerate(value):
            yield f"{name}[{index}]", part


def vacant(value: Any, name: str = "") -> set[str]:
    """Return the names of the places inside ``value`` that hold None, or an empty list, tuple or
    mapping.

    >>> sorted(vacant({"a": None, "b": [torch.ones(1), ()]}))
    ['a', 'b[1]']
    """
    found: set[str] = set()
    if isinstance(value, (Mapping, list, tuple)) and value:
        for own_name, part in _parts_of(value, name):
            found |= vacant(part, own_name)
    elif name and (value is None or isinstance(value, (Mapping, list, tuple))):
        found.add(normalised(name))
    return found


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield from parts(name, value)
    elif isinstance(value, nn.Module):
        yield from _named(dict(value.named_parameters(remove_duplicate=False)), name)
        yield from _named(dict(value.named_buffers(remove_duplicate=False)), name)
    elif isinstance(value, (Mapping, list, tuple)):
        for own_name, part in _parts_of(value, name):
            yield from _named(part, own_name)
    elif value is not None or not name:
        where = f" at {name!r}" if name else ""
        raise TypeError(f"expected tensors, got {type(value).__name__}{where}")
