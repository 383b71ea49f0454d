"""The ``gt_world`` marker of a test, checked, and the world that the test gets; without torch.

A *spec* is the marker's content, complete and valid: kind, size, mesh, nodes, rank.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pytest_gtrainer.worlds import KINDS, SpecError

_FIELDS = ("size", "mesh", "nodes", "rank", "device", "timeout")
DEVICES = ("cpu", "cuda")
MOST_RANKS = 1 << 20
"""Largest world. Torch keeps a list of the ranks of each group, so larger ones take all memory."""


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """A checked ``gt_world`` marker.

    Attributes:
        mesh: dimension names and extents, outermost first; the product of the extents is ``size``.
        rank: the rank that a fake world plays.
        device: the device that ranks, or the tensors of a fake world, must be on; None for any.
        timeout: seconds; None for the default.
    """

    kind: str
    size: int
    mesh: Mapping[str, int]
    nodes: int = 1
    rank: int = 0
    device: str | None = None
    timeout: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class World:
    """The world in which a test runs; the ``gt_world`` fixture returns it.

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


def check_world(world: object) -> None:
    """Check that a world is one, before an attribute of it is read."""
    if not isinstance(world, World):
        raise TypeError(f"world={world!r}: give the world of the test, the fixture gt_world")


def make_spec(kind: Any = None, *, kinds: Collection[str] = KINDS, **fields: Any) -> WorldSpec:
    """Check the marker's arguments, and fill in what follows from them.

    Args:
        kinds: the kinds of worlds that there are.

    Raises:
        SpecError: in one sentence, for the author of the marker.

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
    if size > MOST_RANKS:
        raise SpecError(
            f"gt_world has at most {MOST_RANKS:,} ranks: take a smaller size, or smaller "
            "dimensions of the mesh"
        )
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
            'gt_world("simulated", device="cuda"): '
            "a simulated world adds on the CPU; leave device out"
        )

    if timeout is not None:
        # True is an int.
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout < math.inf:
            raise SpecError(f"gt_world's timeout is a number of seconds above 0; not {timeout!r}")
        timeout = float(timeout)

    return WorldSpec(kind, size, MappingProxyType(mesh), nodes, rank, device, timeout)


def _size_and_mesh(size: Any, mesh: Any) -> tuple[int, dict[str, int]]:
    """Return size and mesh. One follows from the other; without both the world has 8 ranks."""
    if mesh is None:
        size = 8 if size is None else size
        _check_count("size", size)
        return size, {"fsdp": size}

    is_named = isinstance(mesh, Mapping) and all(isinstance(name, str) for name in mesh)
    if not is_named or not mesh:
        raise SpecError(
            f'gt_world\'s mesh maps dimension names to extents, as {{"fsdp": 8}}; not {mesh!r}'
        )

    for name, extent in mesh.items():
        _check_count(f"mesh dimension {name!r}", extent)
    ranks = math.prod(mesh.values())
    if size is not None:
        _check_count("size", size)
        if ranks != size:
            product = " x ".join(f"{name}={extent}" for name, extent in mesh.items())
            raise SpecError(
                f"gt_world's mesh {product} multiplies to {ranks}, but its size is {size}: "
                "make them equal, or leave one of them out"
            )

    return ranks, dict(mesh)


def _check_count(what: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise SpecError(f"gt_world's {what} is a whole number, 1 or more; not {value!r}")
