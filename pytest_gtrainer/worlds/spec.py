"""What the ``gt_world`` marker of a test asks for, and the world that the test gets; read and checked without torch.

A *spec* is the marker's content, complete and valid: kind, size, mesh, nodes, rank.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
    """A checked ``gt_world`` marker. ``mesh`` maps dimension names to extents whose product is ``size``, outermost
    first. ``rank`` is the rank that a fake world plays; ``device`` the one that ranks, or the tensors of a fake world,
    must be on, None for any; ``timeout`` is in seconds, None for the default."""

    kind: str
    size: int
    mesh: Mapping[str, int]
    nodes: int = 1
    rank: int = 0
    device: str | None = None
    timeout: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class World:
    """Where a test runs, as the ``gt_world`` fixture hands it out.

    Attributes:
        kind: "fake", "simulated", "ranks", or one that a hook gives.
        size: number of ranks.
        rank: the rank of this process; None in a test that stays in the parent (``gt_ranks``).
        nodes: number of nodes the ranks are said to lie on.
        mesh: dimension names and extents, outermost first; ``gt_mesh`` is its DeviceMesh.
        device: "cpu" or "cuda"; tensors of the test belong there.
        backend: process group backend, "fake", "gloo" or "nccl".
        net: net model of a simulated world, else None.
    """

    kind: str
    size: int
    rank: int | None
    nodes: int
    mesh: Mapping[str, int]
    device: str
    backend: str
    net: object | None = None


def make_spec(kind: Any = None, *, kinds: Collection[str] = KINDS, **fields: Any) -> WorldSpec:
    """Check the marker's arguments and fill in what follows from them; ``kinds`` are the worlds that there are.

    >>> make_spec("fake", mesh={"fsdp": 4, "ep": 2}).size
    8
    >>> dict(make_spec("ranks", size=4).mesh)
    {'fsdp': 4}
    """
    if kind not in kinds:
        raise SpecError(f"gt_world has no kind {kind!r}; it has {', '.join(kinds)}")
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise SpecError(f"gt_world takes {', '.join(_FIELDS)}; not {', '.join(unknown)}")
    size, mesh = _size_and_mesh(fields.get("size"), fields.get("mesh"))
    nodes, rank = fields.get("nodes", 1), fields.get("rank", 0)
    device, timeout = fields.get("device"), fields.get("timeout")
    _check_count("nodes", nodes)
    if size % nodes:
        raise SpecError(
            f"gt_world's {size} ranks do not divide over {nodes} nodes: change one of them"
        )
    if type(rank) is not int or not 0 <= rank < size:
        raise SpecError(f"gt_world's rank lies in 0..{size - 1}; not {rank!r}")
    if device is not None and device not in DEVICES:
        raise SpecError(f"gt_world's device is one of {', '.join(DEVICES)}; not {device!r}")
    if kind == "simulated" and device == "cuda":
        raise SpecError(
            'gt_world("simulated", device="cuda"): a simulated world adds on the CPU; leave device out'
        )
    if timeout is not None:
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < math.inf
        ):
            raise SpecError(f"gt_world's timeout is a number of seconds above 0; not {timeout!r}")
        timeout = float(timeout)
    return WorldSpec(kind, size, MappingProxyType(mesh), nodes, rank, device, timeout)


def _size_and_mesh(size: Any, mesh: Any) -> tuple[int, dict[str, int]]:
    """Each follows from the other where one is missing; without both it is 8 ranks."""
    if mesh is not None and (
        not isinstance(mesh, Mapping) or not mesh or not all(isinstance(n, str) for n in mesh)
    ):
        raise SpecError(
            f'gt_world\'s mesh maps dimension names to extents, as {{"fsdp": 8}}; not {mesh!r}'
        )
    for name, extent in (mesh or {}).items():
        _check_count(f"mesh dimension {name!r}", extent)
    if size is None:
        size = math.prod(mesh.values()) if mesh else 8
    _check_count("size", size)
    mesh = {"fsdp": size} if mesh is None else dict(mesh)
    if math.prod(mesh.values()) != size:
        product = " x ".join(f"{name}={extent}" for name, extent in mesh.items())
        wrong = f"gt_world's mesh {product} multiplies to {math.prod(mesh.values())}, but its size is {size}"
        raise SpecError(f"{wrong}: make them equal, or leave one of them out")
    return size, mesh


def _check_count(what: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise SpecError(f"gt_world's {what} is a whole number, 1 or more; not {value!r}")
