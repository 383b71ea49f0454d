"""The ``gt_world`` marker of a collected test: which world it asks for, and its sizes if there are several."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from pytest_gtrainer import extensions
from pytest_gtrainer.worlds.spec import KINDS, MARKER, SpecError, World, WorldSpec, make_spec

MARKER_HELP = (
    'gt_world(kind, size=8, mesh={"fsdp": 8}, nodes=1, rank=0, device=None, timeout=None): run the test in a world of '
    "process groups; kind is fake (structure only), simulated (all ranks in one process, sums as over several nodes) "
    "or ranks (one process a rank); a list as size parametrises"
)
SIZE_PARAM = "gt_world_size"
SHARED = pytest.StashKey[list[tuple[WorldSpec | None, World]]]()
"""The worlds of a module or class that are set up: their groups live on from test to test."""


def spec_of(item: pytest.Item | pytest.Collector) -> WorldSpec | None:
    """The spec by the nearest marker and the parametrised size; None without one, SpecError as ``make_spec``."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    if len(marker.args) > 1:
        raise SpecError(
            f"gt_world takes one positional argument, the kind; not {len(marker.args)}: {marker.args}"
        )
    fields = dict(marker.kwargs)
    callspec = getattr(item, "callspec", None)
    if callspec is not None and SIZE_PARAM in callspec.params:
        fields["size"] = callspec.params[SIZE_PARAM]
    if marker.args and "kind" in fields:
        raise SpecError("gt_world got its kind twice")
    kind = marker.args[0] if marker.args else fields.pop("kind", None)
    more = () if kind in KINDS else extensions.worlds(item.config, KINDS)  # most tests ask no hook
    return make_spec(kind, kinds=(*KINDS, *more), **fields)


def valid_spec_of(item: pytest.Item) -> WorldSpec | None:
    """The spec, None also for a marker that is none; the set-up of the test tells what is wrong with it."""
    try:
        return spec_of(item)
    except SpecError:
        return None


def parametrised_sizes(definition: pytest.Item) -> list[Any] | None:
    """The sizes of a marker whose ``size`` is a list or tuple; None if it is not."""
    marker = definition.get_closest_marker(MARKER)
    size = marker.kwargs.get("size") if marker else None
    if isinstance(size, Iterable) and not isinstance(size, str | bytes | Mapping):
        return list(size)
    return None


def id_of(item: pytest.Item) -> str:
    """The id of a test as all runs know it: xdist appends a group to some (``--dist loadgroup``)."""
    plain = f"{item.parent.nodeid}::{item.name}" if item.parent is not None else item.nodeid
    return plain if item.nodeid.startswith(f"{plain}@") else item.nodeid
