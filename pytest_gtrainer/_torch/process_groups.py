"""Process groups: which live, how many were made; torch's caches that outlive a test.

- ``distributed_c10d._resolve_process_group(name)`` gives the group that a functional collective
  names.
- ``pg_map``, ``pg_names`` and ``group_count`` of ``distributed_c10d._world`` have no public reader.
- ``_get_sequence_number_for_group`` counts what was issued on a group.
- ``_dump_fr_trace`` gives what torch's flight recorder holds, the last 2,000 collectives on CPU
  unless the environment says otherwise; sends and receives are not among them.
- ``_abort_process_group`` does not wait for collectives that never end, as
  ``destroy_process_group`` does.
- ``c10d_logger`` logs every failed collective with all its arguments, on each rank that waited.
- Two DeviceMeshes over the same ranks with the same names are equal, whatever their groups. So
  DTensor's caches hand a later test the mesh of an earlier one, whose groups are gone ("Could not
  resolve the process group registered under the name 1"), or, worse, whose group names now belong
  to others. A world that ends therefore empties them, those of sharding propagation in each thread
  that lives on: every thread has its own.
- ``DeviceMesh._dim_group_names`` are the names of the groups of a mesh, also of one whose groups
  have ended.
- Operators of ``c10d`` take a group as a ``torch.ScriptObject``, which ``ProcessGroup.unbox``
  opens; others its name, or in graphs for all ranks a node whose ``meta["val"]`` is the group.
- A ``ReduceOp`` has its kind as ``op``, and of ``PREMUL_SUM`` the factor, a number or a tensor, as
  the second of what ``__getstate__`` gives; it says neither in its text. Before 2.15 functional
  collectives know no factor.
- ``torch._dynamo.convert_frame.FRAME_COUNTER`` counts what was compiled; no other count costs
  nothing to read.
"""

import contextlib
import math
import os
import pickle
import re
import sys
import warnings
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

try:
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
except ImportError:  # a build that records nothing
    _dump_fr_trace = None

ATTRIBUTES = {
    "torch.distributed.distributed_c10d": (
        "_world",
        "_resolve_process_group",
        "_abort_process_group",
    ),
    "torch.distributed.c10d_logger": ("_c10d_logger",),
    "torch.distributed.tensor:DTensor": ("_op_dispatcher",),
    "torch._C": ("_clear_DTensor_sharding_propagator_cache",),
    "torch.distributed.tensor._redistribute": (
        "_gen_transform_infos",
        "clear_redistribute_planner_cache",
    ),
    "torch.distributed.tensor._collective_utils:MeshTopoInfo": ("build_from_mesh",),
    "torch.distributed.distributed_c10d:_World": ("pg_map", "pg_names", "group_count"),
    "torch.distributed:ProcessGroup": ("_get_sequence_number_for_group",),
    "torch._dynamo.convert_frame": ("FRAME_COUNTER",),
}


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph calls ``name``; a ValueError if there is none in this process."""
    try:
        return c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"process group {name!r} of the graph does not exist in this process: {error}"
        ) from None


def group_ranks(name: str) -> tuple[int, ...]:
    """Global ranks of the process group called ``name``, in group order; raises as ``group_named``."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


def name_of_group(given: Any, owner: Any) -> str | None:
    """The name of a group as an operator's argument has it: a name, a node, or an object in the
    graph's module.
    """
    if isinstance(given, str):
        return given
    value = getattr(given, "meta", {}).get("val")
    if value is None and getattr(given, "op", "") == "get_attr":
        value = getattr(owner, str(given.target), None)
    if isinstance(value, torch.ScriptObject):
        try:
            value = dist.ProcessGroup.unbox(value)
        except RuntimeError:  # it is none
            return None
    return getattr(value, "group_name", None)


_PREMUL = re.compile(r"premul_sum\((.*)\)")


def spell_reduction(given: Any) -> str | None:
    """``sum``, ``avg``, ``premul_sum(0.25)``: a reduction by name or as ``ReduceOp``; None of
    anything else.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return None
    if (kind := getattr(given, "op", given).name.lower()) != "premul_sum":
        return str(kind)
    factor = given.__getstate__()[1] if isinstance(given, dist.ReduceOp) else None
    return f"premul_sum({factor if isinstance(factor, float) else 'a tensor'})"


def plain_reduction(spelled: str, ranks: int) -> str:
    """A reduction as the plainest one that gives the same bits.

    Each rank multiplies, then products are added. A power of two moves exponents only, but for
    results that lose bits.

    >>> [plain_reduction(op, 4) for op in ("premul_sum(1.0)", "premul_sum(0.25)", "premul_sum(0.5)", "avg")]
    ['sum', 'avg', 'premul_sum(0.5)', 'avg']
    """
    found = _PREMUL.fullmatch(spelled)
    try:
        factor = float(found[1]) if found else None
    except ValueError:
        return spelled
    if factor == 1.0:
        return "sum"
    return (
        "avg"
        if factor is not None and factor * ranks == 1.0 and ranks & (ranks - 1) == 0
        else spelled
    )


def live_groups() -> list[dist.ProcessGroup]:
    """All groups of this process, in the order in which they were made."""
    return list(c10d._world.pg_map)


def names_of_live_groups() -> dict[dist.ProcessGroup, str]:
    """Those groups with their names."""
    return dict(c10d._world.pg_names)


def groups_made() -> int:
    """Return how many groups were made since the default one was, those that have ended included."""
    return int(c10d._world.group_count)


def issued_on(group: dist.ProcessGroup) -> int:
    """Collectives, sends and receives issued on a group; a RuntimeError if its backend does not
    count.
    """
    return int(group._get_sequence_number_for_group())


def recorded_calls(since: int) -> dict[str, list[list[Any]]]:
    """Collectives in torch's recorder since a time in ns, by group; the last item says whether it
    is under way.
    """
    found: dict[str, list[list[Any]]] = {}
    incarnation: dict[str, int] = {}
    for entry in (
        pickle.loads(_dump_fr_trace()).get("entries", ()) if _dump_fr_trace is not None else ()
    ):
        name = entry["process_group"][0]
        if entry["time_created_ns"] < since or entry["is_p2p"]:
            continue
        if entry["pg_id"] != incarnation.setdefault(
            name, entry["pg_id"]
        ):  # destroyed, and another got its name
            found[name], incarnation[name] = [], entry["pg_id"]
        number, op = entry["collective_seq_id"], entry["profiling_name"].partition(":")[2]
        dtypes = {str(getattr(torch, each.lower(), each)) for each in entry["input_dtypes"]}
        shapes, place = entry["input_sizes"], _line_of_user(entry.get("frames", ()))
        shape, elements = (
            shapes[0] if len(shapes) == 1 else [len(shapes), "tensors"],
            sum(map(math.prod, shapes)),
        )
        said = [number, op, "/".join(sorted(dtypes)).replace("torch.", ""), shape, elements, place]
        found.setdefault(name, []).append([entry["time_created_ns"], *said, not entry["retired"]])
    return found


def _line_of_user(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost frame outside torch."""
    inside = os.path.dirname(torch.__file__) + os.sep
    outside = (
        each
        for each in frames
        if each["filename"].endswith(".py") and not each["filename"].startswith(inside)
    )
    told = (
        f"{os.path.basename(each['filename'])}:{each['line']} in {each['name']}" for each in outside
    )
    return next(told, "an unknown line")


def abort_all_groups() -> None:
    """End all groups without waiting for collectives under way."""
    c10d._abort_process_group()


def silence_collective_log() -> None:
    """Disable the logger of failed collectives: pytest captures what merely does not propagate."""
    c10d_logger._c10d_logger.disabled = True


def forget_groups(ended: Collection[dist.ProcessGroup]) -> None:
    """Take ended groups out of tables of modules outside torch, else later tests meet them; warn of
    what stays.
    """
    # what only the caller's list, the loop and the call hold is in no table; to look takes
    # milliseconds
    if not (gone := {id(group) for group in ended if sys.getrefcount(group) > 3}):
        return
    for module in list(sys.modules.values()):
        home = getattr(module, "__name__", "")
        if home.partition(".")[0] == "torch" or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            # modules hold a hundred thousand objects, and every fake world ends here: tables are
            # searched by `map`
            kind = type(value)
            is_table = kind in (list, set, tuple) or (kind is dict and name != "__builtins__")
            held = (
                (*value, *value.values())
                if is_table and kind is dict
                else value
                if is_table
                else (value,)
            )
            if value is ended or gone.isdisjoint(map(id, held)):
                continue
            if kind is dict:
                for key in [
                    key for key, each in value.items() if id(key) in gone or id(each) in gone
                ]:
                    del value[key]
            elif kind is list:
                value[:] = [each for each in value if id(each) not in gone]
            elif kind is set:
                value -= {each for each in value if id(each) in gone}
            else:
                warnings.warn(
                    f"{home}.{name} still holds a process group of a world that has ended: what a later test "
                    "traces with it names a group that is gone. Set it anew where the world ends, in a fixture",
                    stacklevel=2,
                )


# torch names groups by numbers, which stand in many tables of these modules that have nothing to do
# with groups.
_WITHOUT_GROUPS = {
    *sys.stdlib_module_names,
    "_pytest",
    "hypothesis",
    "jinja2",
    "mpmath",
    "networkx",
    "numpy",
    "pluggy",
    "pygments",
    "pytest",
    "pytest_gtrainer",
    "sympy",
    "torch",
    "xdist",
}


def tables_that_name(group: str) -> list[str]:
    """Return the tables and attributes of modules and classes that hold a group, or its name, as
    dotted names.

    ``group`` is the name of a group, or the address of its object as ``repr`` has it.
    """
    found = []
    for module in list(sys.modules.values()):
        home = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or home.partition(".")[0] in _WITHOUT_GROUPS:
            continue
        places = {
            f"{home}.{name}": value
            for name, value in list(vars(module).items())
            if not name.startswith("__")
        }
        for name, value in list(places.items()):
            if isinstance(value, type) and value.__module__ == home:
                inner = {
                    inner: held for inner, held in vars(value).items() if not inner.startswith("__")
                }
                places.update({f"{name}.{inner}": held for inner, held in inner.items()})
        found += [place for place, value in places.items() if _holds_group(value, group, depth=4)]
    return found


def _holds_group(value: Any, group: str, depth: int) -> bool:
    if type(value) is str:
        return value == group
    if depth == 0:
        return False
    if type(value) is dict:
        return any(
            _holds_group(each, group, depth - 1) for pair in list(value.items()) for each in pair
        )
    if type(value) in (list, tuple, set, frozenset):
        return any(_holds_group(each, group, depth - 1) for each in list(value))
    # By its type alone: an object of the user may import, compute or raise when it is asked for
    # more.
    kind = type(value)
    home = str(kind.__module__).partition(".")[0]
    if issubclass(kind, dist.ProcessGroup):
        return group in (value.group_name, hex(id(value)))
    if home == "torch":
        return group in getattr(value, "_dim_group_names", ())  # of a DeviceMesh
    if home in _WITHOUT_GROUPS or issubclass(kind, type | ModuleType):
        return False
    return any(
        _holds_group(each, group, depth - 1)
        for each in list(getattr(value, "__dict__", {}).values())
    )


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding propagation, redistribution plans and costs, where it was
    ever imported. ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` does the first
    alone, and needs NumPy.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    def forget(_: object = None) -> None:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()

    forget()
    if (
        torch.cuda.is_initialized()
    ):  # backwards of a GPU run in a thread of their own, which outlives a test
        leaf = torch.zeros(1, device="cuda", requires_grad=True)
        leaf.register_hook(forget)
        with contextlib.suppress(
            RuntimeError
        ):  # a test has left the GPU broken: the next one will say so
            leaf.sum().backward()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def forget_compiled() -> None:
    """Empty dynamo's caches if something was compiled; else it might import Inductor (torch 2.13,
    with a GPU).
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.FRAME_COUNTER > 0:
        torch.compiler.reset()
