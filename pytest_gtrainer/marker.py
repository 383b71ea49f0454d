"""The ``gt_world`` marker of a collected test: the world that it asks for, and several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer import extensions
from pytest_gtrainer.worlds import KINDS, MARKER, SpecError

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.spec import World, WorldSpec  # noqa: F401

MARKER_HELP = (
    'gt_world(kind, size=8, mesh={"fsdp": 8}, nodes=1, rank=0, device=None, timeout=None): '
    "run the test in a world of process groups; kind is fake (structure only), simulated "
    "(all ranks in one process, sums as over several nodes) or ranks (one process a rank); "
    "a list as size parametrises"
)
SIZE_PARAM = "gt_world_size"
SHARED = pytest.StashKey["list[tuple[WorldSpec | None, World]]"]()
"""The worlds of a module or class that are set up: their groups live on from test to test."""


def closest_marker(item: pytest.Item | pytest.Collector) -> pytest.Mark | None:
    """Return the nearest ``gt_world`` marker, as ``get_closest_marker`` does."""
    # Each test of every project is asked, with or without worlds: this loop costs a fifth.
    node: pytest.Item | pytest.Collector | None = item
    while node is not None:
        for mark in node.own_markers:
            if mark.name == MARKER:
                return mark
        node = node.parent
    return None


def spec_of(item: pytest.Item | pytest.Collector) -> WorldSpec | None:
    """Return the spec of the nearest marker, with the parametrised size; None without a marker.

    Raises:
        SpecError: the marker's arguments are wrong, as for ``make_spec``.
    """
    marker = closest_marker(item)
    if marker is None:
        return None
    if len(marker.args) > 1:
        raise SpecError(
            f"gt_world takes one positional argument, the kind; not {len(marker.args)}: "
            f"{marker.args}"
        )

    fields = dict(marker.kwargs)
    if marker.args and "kind" in fields:
        raise SpecError("gt_world got its kind twice")
    kind = marker.args[0] if marker.args else fields.pop("kind", None)
    callspec = getattr(item, "callspec", None)
    if callspec is not None and SIZE_PARAM in callspec.params:
        fields["size"] = callspec.params[SIZE_PARAM]
    kinds: tuple[str, ...] = KINDS
    # Most tests are in a world of ours, and call no hook.
    if kind not in KINDS:
        kinds += tuple(extensions.worlds(item.config, KINDS))

    from pytest_gtrainer.worlds.spec import make_spec

    return make_spec(kind, kinds=kinds, **fields)


def valid_spec_of(item: pytest.Item) -> WorldSpec | None:
    """Return the spec; None also for a wrong marker, which the set-up of the test reports."""
    try:
        return spec_of(item)
    except SpecError:
        return None


def parametrised_sizes(definition: pytest.Item) -> list[Any] | None:
    """Return the sizes of a marker whose ``size`` is a list or tuple, else None."""
    marker = closest_marker(definition)
    if marker is None:
        return None
    size = marker.kwargs.get("size")
    if isinstance(size, Iterable) and not isinstance(size, str | bytes | Mapping):
        return list(size)
    return None


def id_of(item: pytest.Item) -> str:
    """Return the id of a test that all runs share.

    xdist appends the group to the id of a test that has one (``--dist loadgroup``).
    """
    if item.parent is not None:
        plain = f"{item.parent.nodeid}::{item.name}"
        if item.nodeid.startswith(f"{plain}@"):
            return plain
    return item.nodeid
