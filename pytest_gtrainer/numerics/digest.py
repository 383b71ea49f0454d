"""One string that stands for every bit of a set of tensors.

A digest covers, tensor by tensor and in order: name, dtype, shape, raw bytes. Each tensor
is preceded by a header of known length, so that no byte can wander from one tensor, or
from a name, into the next. Strides and devices do not count; of a DTensor the local shard
does, or on request the global tensor.

The bytes of a tensor are cut into *leaves* of 4 MiB; a larger tensor is the hash of its leaves' hashes, in
order. So leaves are hashed by several threads, and how many does not show in the digest. Bytes go to the
hash where they lie: nothing is copied of contiguous tensors in host memory, and one leaf at a time of a GPU's.

``xxh3_128`` runs at the speed of memory and finds every accident; it is not made against someone who wants two
models to look the same. For that there is ``sha256``. ``mix128`` is computed by torch where the tensor lies, so
that of a model on a GPU sixteen bytes a leaf reach the host; on a CPU it gives the same string, more slowly. Two
digests are comparable if they were made by the same algorithm, which stands in front of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import torch
import xxhash
from torch import Tensor

from pytest_gtrainer.numerics.bits import byte_view, is_dtensor, memory, plain
from pytest_gtrainer.numerics.record import Record, Tensors, entries
from pytest_gtrainer.numerics.verdict import Key

_WORD = 8
_POSITION = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


def mix128(view: Tensor) -> bytes:
    """Sixteen bytes for a byte view ``uint8[n]``, on any device.

    >>> a = torch.arange(40, dtype=torch.uint8)
    >>> mix128(a) == mix128(a.clone()), mix128(a) == mix128(a.flip(0))
    (True, False)
    """
    rest = -view.numel() % _WORD
    if rest:
        view = torch.nn.functional.pad(view, (0, rest))
    elif view.storage_offset() % _WORD:
        view = view.clone()
    words = view.view(torch.int64)
    positions = torch.arange(1, words.numel() + 1, device=view.device)
    sums = [_mixed(words ^ _mixed(positions * _signed(constant))).sum() for constant in _POSITION]
    return b"".join(int(total).to_bytes(_WORD, "little", signed=True) for total in torch.stack(sums).tolist())


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, _LAST)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shifted right, with zeros coming in: torch's own shift of a negative number brings in ones."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    """The 64-bit constant as torch takes it.

    >>> _signed(2**64 - 1)
    -1
    """
    return constant - 2**64 if constant >= 2**63 else constant


_LEAF = 4 << 20

Scope = Literal["local", "global"]


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How leaves are hashed, and how the parts are put together.

    Attributes:
        whole: the hash of headers and leaves.
        leaf: the hash of one leaf, a byte view ``uint8[n]``.
        on_device: whether ``leaf`` takes tensors wherever they are.
    """

    whole: Callable[[], _Hash]
    leaf: Callable[[Tensor], bytes]
    on_device: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "xxh3_128": Algorithm(xxhash.xxh3_128, lambda view: xxhash.xxh3_128_digest(memory(view))),
    "sha256": Algorithm(hashlib.sha256, lambda view: hashlib.sha256(memory(view)).digest()),
    "mix128": Algorithm(xxhash.xxh3_128, mix128, on_device=True),
}


def digest(value: Tensors, *, algorithm: str = "xxh3_128", scope: Scope = "local") -> str:
    """Digest a tensor, mapping, sequence, module or record: ``"xxh3_128:5f0c…"``.

    A module gives parameters and buffers in order, tied weights under each name. Of a
    record, world size, keys and tensors count, ``meta`` does not.

    Args:
        algorithm: one of ``ALGORITHMS``.
        scope: of a DTensor the "local" shard of this rank, or the "global" tensor: then every rank of its mesh
            must call this, all get the same digest, and it is that of the model before it was sharded. One
            tensor is gathered at a time.

    Raises:
        ValueError: unknown algorithm or scope.
        TypeError: something that is not a tensor, or (``NoBytes``) holds no values.

    >>> digest(torch.zeros(2)) == digest(torch.tensor([0.0, -0.0]))
    False
    """
    feeder = _Feeder.of(algorithm, scope)
    hasher = feeder.algorithm.whole()
    if isinstance(value, Record):
        hasher.update(_framed("record", value.world_size, value.rank))
    with ExitStack() as stack:
        for key, tensor in entries(value).items():
            feeder.feed(hasher, key, tensor, stack)
    return f"{algorithm}:{hasher.hexdigest()}"


def digests(value: Tensors, *, algorithm: str = "xxh3_128", scope: Scope = "local") -> dict[Key, str]:
    """The digest of every tensor by itself, name included; see ``digest``."""
    feeder = _Feeder.of(algorithm, scope)
    found = {}
    with ExitStack() as stack:
        for key, tensor in entries(value).items():
            hasher = feeder.algorithm.whole()
            feeder.feed(hasher, key, tensor, stack)
            found[key] = f"{algorithm}:{hasher.hexdigest()}"
    return found


def digest_of_bytes(tensor: Tensor) -> str:
    """A short digest of dtype, shape and bytes of one tensor, without a name; for many tensors of one process."""
    local = plain(tensor)
    feeder = _Feeder(ALGORITHMS["xxh3_128"], "local", threads=1)
    hasher = xxhash.xxh3_128(b"%s%s" % (str(local.dtype).encode(), str(tuple(local.shape)).encode()))
    for leaf in feeder.leaves(byte_view(local), ExitStack()):
        hasher.update(leaf)
    return hasher.hexdigest()


@dataclass(slots=True)
class _Feeder:
    """Brings tensors to a hash; threads live as long as the stack that is handed in."""

    algorithm: Algorithm
    scope: Scope
    threads: int
    pool: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, algorithm: str, scope: str) -> _Feeder:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown digest algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
        if scope not in ("local", "global"):
            raise ValueError(f"unknown scope {scope!r} of a digest: local (the shard) or global (the whole tensor)")
        return cls(ALGORITHMS[algorithm], scope, torch.get_num_threads())  # type: ignore[arg-type]

    def feed(self, hasher: _Hash, key: Key, tensor: Tensor, stack: ExitStack) -> None:
        if self.scope == "global" and is_dtensor(tensor):
            tensor = tensor.full_tensor()
        local = plain(tensor)
        hasher.update(_framed(*key, str(local.dtype), *local.shape))
        for leaf in self.leaves(byte_view(local), stack):
            hasher.update(leaf)

    def leaves(self, view: Tensor, stack: ExitStack) -> Iterator[Any]:
        """What stands for the bytes: themselves where one leaf holds them, else the hash of each leaf."""
        if view.numel() <= _LEAF and not self.algorithm.on_device:
            host = view.cpu()  # kept alive by this frame while its memory is read
            yield memory(host)
            return
        parts = view.split(_LEAF)
        if view.device.type != "cpu":
            yield from (self.algorithm.leaf(part if self.algorithm.on_device else part.cpu()) for part in parts)
        else:
            yield from self._hashed(parts, stack)

    def _hashed(self, parts: Sequence[Tensor], stack: ExitStack) -> Iterator[bytes]:
        """Each thread has one run of leaves, the first this one: handing leaves over one by one costs as much time
        as a tenth of a leaf."""
        if self.threads == 1 or len(parts) == 1 or self.algorithm.on_device:
            return map(self.algorithm.leaf, parts)
        if self.pool is None:
            self.pool = stack.enter_context(ThreadPoolExecutor(self.threads - 1, "gtrainer-digest"))
        run = -(-len(parts) // self.threads)

        def hashes(start: int) -> list[bytes]:
            return [self.algorithm.leaf(part) for part in parts[start : start + run]]

        others = [self.pool.submit(hashes, start) for start in range(run, len(parts), run)]
        return chain(hashes(0), *(other.result() for other in others))

def _framed(*parts: object) -> bytes:
    """Parts as one byte string that says its own length.

    >>> _framed("w", 2)
    b"8:('w', 2)"
    """
    header = repr(parts).encode()
    return b"%d:%s" % (len(header), header)


class WeightDigests:
    """Takes what a ``Record`` takes and keeps of each step and rank a digest of its weights.

    >>> import torch
    >>> kept = WeightDigests()
    >>> kept.add(0, 0, "weight", "w", torch.ones(2)); kept.add(0, 0, "loss", "loss", torch.ones(()))
    >>> other = WeightDigests()
    >>> other.add(0, 0, "weight", "w", -torch.ones(2))
    >>> list(kept.steps), kept.steps == other.steps
    ([0], False)
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None
        self._ranks: dict[int, dict[int, str]] = {}

    def add(self, step: int, rank: int, phase: str, name: str, tensor: Tensor) -> None:
        """Note a tensor; of weights a digest is made as soon as another step or rank begins."""
        if phase != "weight":
            return
        if self._place != (step, rank):
            self._close()
            self._place = (step, rank)
        self._tensors[name] = tensor.detach().clone()

    def _close(self) -> None:
        if self._place is not None:
            step, rank = self._place
            self._ranks.setdefault(step, {})[rank] = digest(self._tensors)
        self._place, self._tensors = None, {}

    @property
    def steps(self) -> dict[int, str]:
        """One digest for all ranks of every step."""
        self._close()
        told = {}
        for step, ranks in sorted(self._ranks.items()):
            lines = "\n".join(f"{rank} {digested}" for rank, digested in sorted(ranks.items()))
            told[step] = f"xxh3_128:{xxhash.xxh3_128(lines.encode()).hexdigest()}"
        return told

    @classmethod
    def merged(cls, parts: Iterable[WeightDigests]) -> WeightDigests:
        """The digests of ranks that were kept apart."""
        whole = cls()
        for part in parts:
            part._close()
            for step, ranks in part._ranks.items():
                whole._ranks.setdefault(step, {}).update(ranks)
        return whole


def tell_weights(step: int, rank: int, side: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Print a digest of this rank's weights if ``GT_WEIGHT_HASH=1``: a line per step and rank, to be compared by eye.

    Weights that lie on a GPU stay there: of them it is a ``mix128``.

    >>> import torch
    >>> os.environ["GT_WEIGHT_HASH"] = "1"
    >>> tell_weights(3, 5, "eager", [("w", torch.zeros(2))])
    weights step 3 rank 5 xxh3_128:2997c89bb6d3041c53e8ce44f4f6f76f eager
    >>> del os.environ["GT_WEIGHT_HASH"]
    """
    if os.environ.get("GT_WEIGHT_HASH") == "1":
        told = dict(weights)
        on_host = all(tensor.device.type == "cpu" for tensor in told.values())
        made = digest(told, algorithm="xxh3_128" if on_host else "mix128")
        print(f"weights step {step} rank {rank} {made} {side}", flush=True)
