"""The files of a record: ``rank0.jsonl`` and so on, lines of JSON, of which nothing is unpickled.

The first line is the header, the last one says how the run ended, and each line between holds what
one optimiser's step ended: ``{"step": 3, "places": {"step": "train.py:107 in step"}, "phases":
{"clip": {"layers.0.weight": entry}}}``. The last but one has ``"left": 3`` instead of a step: what
the trainer has left after it. Lines are flushed, so a run that dies leaves every step
before. An entry is

- a number;
- ``[number, dtype]``: a tensor of one element without dimensions;
- ``[fingerprint, dtype, shape, part]``: a tensor. ``part`` is None for one that is no DTensor,
  ``[offsets, sizes]`` of a shard in the global tensor, "partial" for an addend, or "rows", and then
  there is a fingerprint for each row. With values, the place of its bytes in ``rank0.values``
  follows;
- ``{"calls": [entry, ...]}``: one for each call within the step;
- a text: why there is none.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_gtrainer._torch.values import local_part
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.graph.nodes import DTYPES, spell_dtype
from pytest_gtrainer.numerics.bits import byte_view, is_dtensor, memory, plain
from pytest_gtrainer.over_time.fingerprints import (
    MODULUS,
    fingerprint,
    fingerprints_of_rows,
)

FORMAT, VERSION = "record of pytest-gtrainer", 1
UNRECORDED = "unrecorded"
"""The ``part`` of an ``Entry`` that holds a reason and no value."""

_MOST_ROWS = 1024
# What reading a line raises that is no line of ours.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

Entries = dict[str, dict[str, Any]]
"""By phase and name."""


class RecordError(ValueError):
    """A folder cannot be recorded into, or what it holds is not a record that can be read."""


@dataclass(slots=True)
class Waiting:
    """An entry whose numbers are still on the device: one copy brings those of a whole step."""

    numbers: Tensor
    rest: list[Any]
    value: Tensor | None = None


def entry_of(value: Any, *, keep: bool = False) -> Any:
    """Return the entry of a tensor or number, read now; ``keep`` copies the bytes of a tensor.

    Raises:
        NoBytes: the tensor holds no values.
    """
    if not isinstance(value, Tensor):
        return value
    shape: list[int] = list(value.shape)
    part = None
    if is_dtensor(value):
        part = _part_of(value)
        local = plain(local_part(value))
    else:
        local = plain(value)
    dtype = spell_dtype(value.dtype)
    if not shape and not local.is_complex():
        # Integers of 64 bits are no floats; and without a copy, a number of 64 bits would be read
        # only when the step is written.
        wide = torch.int64
        if local.is_floating_point():
            wide = torch.float64
        return Waiting(local.to(wide, copy=True).view(1), [dtype])
    if isinstance(part, list):
        numbers = fingerprint(local, part[0], shape)
    else:
        numbers = fingerprint(local)
    kept = None
    if keep:
        # A clone first: on the host the view itself would be kept, which the trainer changes.
        kept = byte_view(local).clone().cpu()
    return Waiting(numbers.view(1), [dtype, shape, part], kept)


def rows_of(value: Tensor) -> Any:
    """Return the entry of an input, with a fingerprint for each row of a batch.

    Ranks of another world hold other rows of the same global batch.
    """
    if is_dtensor(value) or not value.dim() or not value.numel() or len(value) > _MOST_ROWS:
        return entry_of(value)
    rest = [spell_dtype(value.dtype), list(value.shape), "rows"]
    return Waiting(fingerprints_of_rows(plain(value)), rest)


_parts: dict[Any, Any] = {}


def _part_of(tensor: Any) -> Any:
    """Return offsets and sizes of this rank's part of a DTensor; "partial" for an addend."""
    if any(placement.is_partial() for placement in tensor.placements):
        return "partial"
    key = tensor.device_mesh, tensor.placements, tensor.shape
    if key not in _parts:
        # What a checkpoint of torch asks a tensor.
        chunks = tensor.__create_chunk_list__()
        part = [list(chunks[0].offsets), list(chunks[0].sizes)]
        is_block = len(chunks) == 1 and part[1] == list(local_part(tensor).shape)
        _parts[key] = part if is_block else None
    return _parts[key]


def rank_of_process() -> int:
    """Return this process's rank, as torch or a launcher says; 0 without either."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


class Writer:
    """Write the record of one rank.

    Raises:
        RecordError: the folder holds a record, or is none.
    """

    def __init__(self, folder: str | PathLike[str], *, values: bool = False) -> None:
        self.values = values
        self.folder = Path(folder)
        self.file: BinaryIO | None = None
        self.bytes: BinaryIO | None = None
        if self._path().exists():
            raise RecordError(f"{folder} holds a record already: name another folder, or remove it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{folder} cannot be made: {error.strerror}") from error

    def begin(self, header: dict[str, Any]) -> None:
        """Make the files and write the header."""
        path = self._path()
        self.file = path.open("xb")
        if self.values:
            self.bytes = path.with_suffix(".values").open("wb")
        self._line({"format": FORMAT, "version": VERSION, **header})

    def _path(self) -> Path:
        # A script may make its ranks itself, after this has been made.
        return self.folder / f"rank{rank_of_process()}.jsonl"

    def step(self, number: int, phases: Entries, places: dict[str, str]) -> None:
        """Write what has been gathered since the last line, and lines of the trainer by call."""
        self._values({"step": number, "places": places, "phases": phases}, phases)

    def left(self, number: int, phases: Entries) -> None:
        """Write what a trainer leaves after its last step, which has that number."""
        self._values({"left": number, "phases": phases}, phases)

    def _values(self, content: dict[str, Any], phases: Entries) -> None:
        """Write a line with entries whose numbers may be on a device."""
        waiting = list(_waiting(phases))
        by_kind: dict[Any, list[Waiting]] = {}
        for entry in waiting:
            by_kind.setdefault((entry.numbers.device, entry.numbers.dtype), []).append(entry)
        # Each copy to the host waits for the device: one brings all numbers of a dtype.
        resolved = {}
        for entries in by_kind.values():
            numbers = torch.cat([entry.numbers for entry in entries]).tolist()
            begin = 0
            for entry in entries:
                end = begin + len(entry.numbers)
                resolved[id(entry)] = numbers[begin:end]
                begin = end

        def spell(entry: Waiting) -> list[Any]:
            numbers = resolved[id(entry)]
            if len(entry.rest) == 1:
                return [numbers[0], *entry.rest]
            # Signed on the device, and without a sign where parts are added up.
            shown = [f"{number % MODULUS:016x}" for number in numbers]
            first: Any = shown[0]
            if entry.rest[2] == "rows":
                first = shown
            return [first, *entry.rest, *self._keep(entry.value)]

        self._line(content, default=spell)

    def _keep(self, value: Tensor | None) -> list[list[int]]:
        if value is None or self.bytes is None:
            return []
        place = self.bytes.tell()
        self.bytes.write(memory(value))
        return [[place, value.numel()]]

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended."""
        name = ""
        if error is not None:
            name = type(error).__name__
        self._line({"end": name})

    def _line(self, content: Any, **how: Any) -> None:
        assert self.file is not None
        line = json.dumps(content, separators=(",", ":"), **how)
        # The bytes first: a line must not name a place that a dying process has not written.
        if self.bytes is not None:
            self.bytes.flush()
        self.file.write(line.encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        """Close the files; a full disk, which may be why it ends, is no error again."""
        for file in (self.file, self.bytes):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def _waiting(phases: Entries) -> Iterator[Waiting]:
    for entries in phases.values():
        for entry in entries.values():
            calls = [entry]
            if isinstance(entry, dict):
                calls = entry["calls"]
            for each in calls:
                if isinstance(each, Waiting):
                    yield each


@dataclass(frozen=True, slots=True)
class Entry:
    """The record that one rank has of one tensor or number.

    Attributes:
        numbers: the number, the text, or the fingerprints, one or one for each row.
        dtype: the short name of the dtype; empty for what is no tensor.
        place: position and length of its bytes among the values.
    """

    numbers: tuple[str, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    part: Any = None
    place: tuple[int, int] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return a number with its dtype, as ``0.5 as f32[]``, and of a tensor what ``kind`` is."""
        if self.shape or len(self.numbers) > 1:
            return self.kind
        return f"{self.numbers[0]} as {self.kind}" if self.dtype else self.numbers[0]

    @property
    def kind(self) -> str:
        """Return dtype and global shape, as ``f32[4, 8]``; of rows that of one row; or the reason
        why there is no value.
        """
        if self.part == UNRECORDED:
            return self.numbers[0]
        shape = self.shape
        if self.part == "rows":
            shape = shape[1:]
        return f"{self.dtype}{list(shape)}"


def _parsed(content: Any) -> list[Entry]:
    if isinstance(content, dict):
        return [_parsed(call)[0] for call in content["calls"]]
    if isinstance(content, str):
        return [Entry((content,), part=UNRECORDED)]
    if not isinstance(content, list):
        return [Entry((str(content),))]
    if len(content) == 2:
        return [Entry((repr(content[0]),), str(content[1]))]
    numbers, dtype, shape, part, *places = content
    if not isinstance(numbers, list):
        numbers = [numbers]
    for number in numbers:
        int(number, 16)
    if part != "rows" and len(numbers) != 1:
        raise ValueError("one fingerprint is expected")
    if isinstance(part, list):
        offsets, sizes = part
        part = (tuple(map(int, offsets)), tuple(map(int, sizes)))
        if {len(part[0]), len(part[1])} != {len(shape)}:
            raise ValueError("offsets and sizes are of another number of dimensions")
    place = None
    if places:
        place = int(places[0][0]), int(places[0][1])
    return [Entry(tuple(numbers), str(dtype), tuple(map(int, shape)), part, place)]


Values = dict[int, list[Entry]]
"""By rank, the entries of one name in one phase of one step: one, or one for each call."""

Steps = dict[int, dict[str, dict[str, Values]]]
"""By step, phase and name."""


@dataclass(slots=True)
class RecordedRun:
    """A record that was read.

    Attributes:
        headers: by rank.
        steps: by step, phase, name and rank.
        places: by step, the lines of the trainer that call "backward" and "step".
        left: by the number of the last step, what the trainer left after it, as in ``steps``.
        notes: what is wrong with it, a sentence each; empty if every rank ended in order.
    """

    folder: Path
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: Steps = field(default_factory=dict)
    places: dict[int, dict[str, str]] = field(default_factory=dict)
    left: Steps = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def header(self) -> dict[str, Any]:
        """Return the header of the first rank."""
        return self.headers[min(self.headers)]

    def add(self, rank: int, steps: Steps, step: int, phases: Any) -> None:
        """Add what a line of a rank holds to ``self.steps`` or ``self.left``."""
        for phase, entries in phases.items():
            named = steps.setdefault(step, {}).setdefault(phase, {})
            for name, entry in entries.items():
                parsed = _parsed(entry)
                if isinstance(entry, dict):
                    # Each optimiser of a step ends a line, and calls go on in the next.
                    parsed = named.get(name, {}).get(rank, []) + parsed
                named.setdefault(name, {})[rank] = parsed


def read_run(folder: str | PathLike[str]) -> RecordedRun:
    """Read the record in ``folder``; of ranks that stopped early or were cut, what is there.

    Raises:
        RecordError: there is none, or of another version, or a line is not one of a record.
    """
    run = RecordedRun(Path(folder))
    files = {}
    for path in run.folder.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        # Copies that somebody has made lie beside, as "rank0 copy.jsonl".
        if number.isdecimal():
            files[int(number)] = path
    if not files:
        raise RecordError(f"{folder} holds no record: no file rank0.jsonl")
    last = {}
    for rank, path in sorted(files.items()):
        last[rank] = _read_rank(run, rank, path)

    world = run.header["world_size"]
    if max(files) >= world:
        raise RecordError(f"{folder} holds files of more than the {world} ranks of its first one")
    if len(files) < world:
        run.notes.append(f"of {world} ranks, {world - len(files)} left no file")
    if len(set(last.values())) > 1:
        ends = [f"rank {rank} after step {step}" for rank, step in last.items()]
        run.notes.append(f"its ranks stopped at different steps: {spell_some(ends, 8)}")
    return run


def _read_rank(run: RecordedRun, rank: int, path: Path) -> int:
    """Add the file of a rank, and return its last step, -1 without one."""
    step, end = -1, None
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if number == len(lines):
            break  # empty, or a line whose end is missing
        try:
            content = json.loads(line)
            if number == 1:
                _check_header(content, path)
                run.headers[rank] = content
            elif "end" in content:
                end = str(content["end"])
            elif "left" in content:
                run.add(rank, run.left, int(content["left"]), content["phases"])
            else:
                step = int(content["step"])
                run.add(rank, run.steps, step, content["phases"])
                run.places.setdefault(step, dict(content.get("places", {})))
        except RecordError:
            raise
        except _MALFORMED as error:
            raise RecordError(f"{path}, line {number}, is not a line of a record") from error
    if rank not in run.headers:
        raise RecordError(f"{path} is cut within its first line")
    if end is None:
        run.notes.append(f"rank {rank} was cut after step {step}: its last line is missing")
    elif end:
        run.notes.append(f"rank {rank} ended after step {step} by {end}")
    return step


def values_of(folder: Path, rank: int, entry: Entry) -> Tensor | None:
    """Return the bytes that were kept of an entry, as the tensor of its rank; None without them."""
    path = folder / f"rank{rank}.values"
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    if entry.place is None or entry.dtype not in dtypes or not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, entry.place[0]))
        content = bytearray(file.read(max(0, entry.place[1])))
    shape = entry.shape
    if isinstance(entry.part, tuple):
        shape = entry.part[1]
    dtype = dtypes[entry.dtype]
    if len(content) != prod(shape) * dtype.itemsize or not content:
        return None
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)


def _check_header(header: Any, path: Path) -> None:
    if header["format"] != FORMAT:
        raise RecordError(f"{path} is no {FORMAT}")
    if header["version"] != VERSION:
        raise RecordError(
            f"{path} is a record of version {header['version']}, and this is version {VERSION}: "
            "compare it with the pytest-gtrainer that wrote it"
        )
    if not isinstance(header["world_size"], int):
        raise TypeError("the number of ranks is expected")
