"""What the ``gt_world`` marker of a test asks for; read and checked without torch.

A *spec* is the marker's content, complete and valid: kind, size, mesh, nodes, rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MARKER = "gt_world"
KINDS = ("fake", "simulated", "ranks")
_FIELDS = ("size", "mesh", "nodes", "rank", "device", "timeout")
DEVICES = ("cpu", "cuda")


class SpecError(Exception):
    """The marker asks for something that cannot be; the message is one sentence for its author."""


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """A checked ``gt_world`` marker.

    ``mesh`` maps dimension names to extents whose product is ``size``, outermost first.
    ``rank`` is the rank that a fake world plays; ``device`` the one that ranks, or the tensors of a fake world, must be
    on, None for any; ``timeout`` is in seconds, None for the default.
    """

    kind: str
    size: int
    mesh: Mapping[str, int]
    nodes: int = 1
    rank: int = 0
    device: str | None = None
    timeout: float | None = None


def make_spec(kind: Any = None, *, kinds: Collection[str] = KINDS, **fields: Any) -> WorldSpec:
    """Check the marker's arguments and fill in what follows from them; ``kinds`` are the worlds that there are.

    >>> make_spec("fake", mesh={"fsdp": 4, "ep": 2}).size
    8
    >>> dict(make_spec("ranks", size=4).mesh)
    {'fsdp': 4}

    Raises:
        SpecError: in one sentence, naming the value.
    """
    _check_kind(kind, kinds)
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise SpecError(f"gt_world takes {', '.join(_FIELDS)}; not {', '.join(unknown)}")
    mesh = _check_mesh(fields.get("mesh"))
    size = fields.get("size")
    if size is None:
        size = math.prod(mesh.values()) if mesh else 8
    _check_count("size", size)
    if mesh is None:
        mesh = {"fsdp": size}
    if math.prod(mesh.values()) != size:
        product = " x ".join(f"{name}={extent}" for name, extent in mesh.items())
        raise SpecError(
            f"gt_world's mesh {product} multiplies to {math.prod(mesh.values())}, but its size is {size}: "
            "make them equal, or leave one of them out"
        )
    device = _device(fields.get("device"))
    if kind == "simulated" and device == "cuda":
        raise SpecError('gt_world("simulated", device="cuda"): a simulated world adds on the CPU; leave device out')
    return WorldSpec(
        kind,
        size,
        MappingProxyType(dict(mesh)),
        _nodes(fields.get("nodes", 1), size),
        _rank(fields.get("rank", 0), size),
        device,
        _timeout(fields.get("timeout")),
    )


def _check_kind(kind: Any, kinds: Collection[str]) -> None:
    if kind not in kinds:
        raise SpecError(f"gt_world has no kind {kind!r}; it has {', '.join(kinds)}")


def _check_count(what: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise SpecError(f"gt_world's {what} is a whole number, 1 or more; not {value!r}")


def _check_mesh(mesh: Any) -> dict[str, int] | None:
    if mesh is None:
        return None
    if not isinstance(mesh, Mapping) or not mesh or not all(isinstance(name, str) for name in mesh):
        raise SpecError(f'gt_world\'s mesh maps dimension names to extents, as {{"fsdp": 8}}; not {mesh!r}')
    for name, extent in mesh.items():
        _check_count(f"mesh dimension {name!r}", extent)
    return dict(mesh)


def _nodes(nodes: Any, size: int) -> int:
    _check_count("nodes", nodes)
    if size % nodes:
        raise SpecError(f"gt_world's {size} ranks do not divide over {nodes} nodes: change one of them")
    return int(nodes)


def _rank(rank: Any, size: int) -> int:
    if type(rank) is not int or not 0 <= rank < size:
        raise SpecError(f"gt_world's rank lies in 0..{size - 1}; not {rank!r}")
    return rank


def _device(device: Any) -> str | None:
    if device is not None and device not in DEVICES:
        raise SpecError(f"gt_world's device is one of {', '.join(DEVICES)}; not {device!r}")
    return device


def _timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise SpecError(f"gt_world's timeout is a number of seconds above 0; not {timeout!r}")
    return float(timeout)
