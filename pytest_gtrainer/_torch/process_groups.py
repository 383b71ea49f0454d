"""Process groups: which live, how many were made; torch's caches that outlive a test.

A functional collective names its group by a string, and names belong to one world: a later world
gives them to other groups. So this module looks names up, and makes torch and the modules of a
test forget groups when their world ends.
"""

import contextlib
import math
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
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
    "torch._C._distributed_c10d": ("_create_work_from_future",),
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
    """Return the process group that a graph calls ``name``.

    Raises ValueError if this process has none of that name.
    """
    try:
        return c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"process group {name!r} of the graph does not exist in this process: {error}"
        ) from None


def group_ranks(name: str) -> tuple[int, ...]:
    """Return the global ranks of the group ``name``, in group order; raises as ``group_named``."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


def name_of_group(given: Any, owner: Any) -> str | None:
    """Return the name of the group that an operator is ``given``; None if that is no group.

    ``owner`` is the module that the graph belongs to, for groups that it holds as attributes.
    """
    if isinstance(given, str):
        return given
    # In a graph for all ranks the group is a node, whose value is the group of this rank.
    value = getattr(given, "meta", {}).get("val")
    if value is None and getattr(given, "op", "") == "get_attr":
        value = getattr(owner, str(given.target), None)
    # Operators of ``c10d`` take a boxed group.
    if isinstance(value, torch.ScriptObject):
        try:
            value = dist.ProcessGroup.unbox(value)
        except RuntimeError:  # another object
            return None
    return getattr(value, "group_name", None)


_PREMUL = re.compile(r"premul_sum\((.*)\)")


def spell_reduction(given: Any) -> str | None:
    """Return a reduction as text, such as ``sum``, ``avg`` or ``premul_sum(0.25)``.

    ``given`` is a name or a ``ReduceOp``; the result is None for anything else.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return None
    kind = str(getattr(given, "op", given).name).lower()
    if kind != "premul_sum":
        return kind
    # ``__getstate__`` is the only reader of the factor, which is a number or a tensor.
    factor = given.__getstate__()[1] if isinstance(given, dist.ReduceOp) else None
    return f"premul_sum({factor if isinstance(factor, float) else 'a tensor'})"


def boxed_reduction(given: Any, owner: Any) -> str | None:
    """Return the reduction that an operator of ``c10d`` is ``given`` as an attribute of ``owner``.

    It is a boxed object that has the number of its kind, and no factor; None if it has none.
    """
    if getattr(given, "op", "") != "get_attr":
        return None
    kind = getattr(getattr(owner, str(given.target), None), "op", None)
    return None if kind is None else str(dist.ReduceOp.RedOpType(kind()).name).lower()


def group_of_call(named: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the group among the arguments of a collective operator, functional or of ``c10d``."""
    given = named.get("process_group", named.get("group_name"))
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    return group_named(given) if isinstance(given, str) else given


def finished(result: Any, outputs: Sequence[torch.Tensor] = ()) -> Any:
    """Wait for what an operator of ``c10d`` has begun, and return the same with a finished work.

    gloo copies results when somebody waits, and again when somebody waits again.
    """
    work = result[-1] if isinstance(result, tuple) else result
    dist.Work.unbox(work).wait()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(outputs))
    done = _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    return (*result[:-1], done) if isinstance(result, tuple) else done


def reduction_by_trial(
    named: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device
) -> tuple[str, float | None]:
    """Return the name of a reduction, and the factor of a premultiplied sum.

    An operator of ``c10d`` has it as an object that nobody can read, so the group is asked to
    reduce the numbers 2, 3, 4, ... with it. Every rank of the group has to call this.
    """
    numbers = [float(rank + 2) for rank in range(dist.get_world_size(group))]
    own = numbers[dist.get_rank(group)]
    trial = torch.tensor([own], dtype=torch.float64, device=device)
    finished(torch.ops.c10d.allreduce_([trial], named["process_group"], named["reduce_op"], None))
    found = trial.item()
    total = sum(numbers)
    reductions = {
        "sum": total,
        "avg": total / len(numbers),
        "max": max(numbers),
        "min": min(numbers),
        "product": math.prod(numbers),
    }
    for name, result in reductions.items():
        if math.isclose(found, result):  # a backend may average by a factor, which is rounded
            return name, None
    return "premul_sum", found / total


def plain_reduction(spelled: str, ranks: int) -> str:
    """Return the plainest reduction that gives the same bits.

    In a ``premul_sum`` each rank multiplies, then the products are added; ``avg`` divides the sum.
    Both have the same bits if the factor is a power of two, which changes exponents only (unless a
    result is subnormal).

    >>> [plain_reduction(f"premul_sum({factor})", 4) for factor in (1.0, 0.25, 0.5)]
    ['sum', 'avg', 'premul_sum(0.5)']
    """
    found = _PREMUL.fullmatch(spelled)
    try:
        factor = float(found[1]) if found else 0.0
    except ValueError:
        return spelled
    if factor == 1.0:
        return "sum"
    is_power_of_two = ranks & (ranks - 1) == 0
    if factor * ranks == 1.0 and is_power_of_two:
        return "avg"
    return spelled


def live_groups() -> list[dist.ProcessGroup]:
    """Return all groups of this process, in the order in which they were made."""
    return list(c10d._world.pg_map)


def names_of_live_groups() -> dict[dist.ProcessGroup, str]:
    """Return the names of all groups of this process."""
    return dict(c10d._world.pg_names)


def groups_made() -> int:
    """Return how many groups were made since the default one, those that have ended included."""
    return int(c10d._world.group_count)


def issued_on(group: dist.ProcessGroup) -> int:
    """Return how many collectives, sends and receives were issued on a group.

    Raises RuntimeError if its backend does not count.
    """
    return int(group._get_sequence_number_for_group())


RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""The variable that says how many calls the flight recorder keeps, as the first group is made."""


def recorded_calls(since: int, *, lines: bool = True) -> dict[str, list[list[Any]]]:
    """Return the collectives in torch's flight recorder since a time in ns, by name of their group.

    A collective is a list: time in ns, number, operator, dtypes, shape, elements, line of the user,
    and whether it is under way. The recorder holds the last 2,000 on CPU, unless
    ``RECORDER_SIZE`` says otherwise; sends and receives are left out. Without ``lines``
    it takes a tenth of the time.
    """
    found: dict[str, list[list[Any]]] = {}
    if _dump_fr_trace is None:
        return found
    latest_group: dict[str, int] = {}
    for entry in pickle.loads(_dump_fr_trace(includeStackTraces=lines)).get("entries", ()):
        name = entry["process_group"][0]
        if entry["time_created_ns"] < since or entry["is_p2p"]:
            continue
        # The group was destroyed, and another one got its name: earlier entries are of the former.
        if latest_group.setdefault(name, entry["pg_id"]) != entry["pg_id"]:
            found[name], latest_group[name] = [], entry["pg_id"]
        dtypes = {str(getattr(torch, each.lower(), each)) for each in entry["input_dtypes"]}
        shapes = entry["input_sizes"]
        call = [
            entry["time_created_ns"],
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
            "/".join(sorted(dtypes)).replace("torch.", ""),
            shapes[0] if len(shapes) == 1 else [len(shapes), "tensors"],
            sum(map(math.prod, shapes)),
            _line_of_user(entry.get("frames", ())),
            not entry["retired"],
        ]
        found.setdefault(name, []).append(call)
    return found


def _line_of_user(frames: Iterable[dict[str, Any]]) -> str:
    """Return the innermost line of Python outside torch."""
    inside = os.path.dirname(torch.__file__) + os.sep
    for frame in frames:
        file = frame["filename"]
        # Torch's deprecated functions are wrapped by the second.
        is_torchs = file.startswith(inside) or file.endswith("typing_extensions.py")
        if file.endswith(".py") and not is_torchs:
            return f"{os.path.basename(file)}:{frame['line']} in {frame['name']}"
    return "an unknown line"


def abort_all_groups() -> None:
    """End all groups; ``destroy_process_group`` would wait for collectives that never end."""
    c10d._abort_process_group()


def silence_collective_log() -> None:
    """Disable the logger that writes every failed collective with all its arguments."""
    # Without propagation it would still reach pytest's handler.
    c10d_logger._c10d_logger.disabled = True


def skip_by_dynamo(function: Callable[..., Any]) -> None:
    """Let Dynamo run a function as it is, but compile what it calls."""
    # ``torch.compiler.disable`` would add a frame of its own to each call.
    from torch._dynamo.decorators import skip

    skip(function)


def forget_groups(ended: Collection[dist.ProcessGroup]) -> None:
    """Remove ended groups from tables of modules outside torch, which later tests would read.

    Warns of each attribute or tuple that still holds one.
    """
    # What only the caller's list, the loop and the call refer to is in no table. A search takes
    # milliseconds.
    gone = {id(group) for group in ended if sys.getrefcount(group) > 3}
    if not gone:
        return
    for module in list(sys.modules.values()):
        home = getattr(module, "__name__", "")
        if home.partition(".")[0] in _WITHOUT_GROUPS or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            # Modules hold a hundred thousand objects, and every fake world ends here: tables are
            # searched by `map`, and types are compared exactly.
            kind = type(value)
            held: Iterable[object] = (value,)
            if kind is dict and name != "__builtins__":
                held = (*value, *value.values())
            elif kind in (list, set, tuple):
                held = value
            if value is ended or gone.isdisjoint(map(id, held)):
                continue
            if kind is dict:
                found = [key for key, each in value.items() if id(key) in gone or id(each) in gone]
                for key in found:
                    del value[key]
            elif kind is list:
                value[:] = [each for each in value if id(each) not in gone]
            elif kind is set:
                value -= {each for each in value if id(each) in gone}
            else:
                warnings.warn(
                    f"{home}.{name} still holds a process group of a world that has ended: what a "
                    "later test traces with it names a group that is gone. Set it anew where the "
                    "world ends, in a fixture",
                    stacklevel=2,
                )


# Nine tenths of all that modules hold lies in these, and torch names groups by numbers, which stand
# in many of their tables.
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
    """Return the dotted names of attributes of modules and classes that hold a group, or its name.

    ``group`` is the name of a group, or the address of its object as ``repr`` has it.
    """
    found = []
    for module in list(sys.modules.values()):
        home = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or home.partition(".")[0] in _WITHOUT_GROUPS:
            continue
        owners: list[tuple[str, Any]] = [(home, module)]
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == home:
                owners.append((f"{home}.{name}", value))
        for path, owner in owners:
            for name, value in list(vars(owner).items()):
                if not name.startswith("__") and _holds_group(value, group, depth=4):
                    found.append(f"{path}.{name}")
    return found


def _holds_group(value: Any, group: str, depth: int) -> bool:
    """Search plain containers and attributes of objects, ``depth`` levels deep."""
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
    # Objects are judged by their type alone: asked for more, one may import, compute or raise.
    kind = type(value)
    home = str(kind.__module__).partition(".")[0]
    if issubclass(kind, dist.ProcessGroup):
        return group in (value.group_name, hex(id(value)))
    if home == "torch":
        # A DeviceMesh keeps the names of its groups, also of groups that have ended.
        return group in getattr(value, "_dim_group_names", ())
    if home in _WITHOUT_GROUPS or issubclass(kind, type | ModuleType):
        return False
    return any(
        _holds_group(each, group, depth - 1)
        for each in list(getattr(value, "__dict__", {}).values())
    )


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding propagation, redistribution plans and costs.

    Two meshes over the same ranks with the same names are equal, whatever their groups. The caches
    would give a later test the mesh of an earlier one, whose groups are gone ("Could not resolve
    the process group registered under the name 1") or whose names now belong to other groups.
    """
    # A cache of a module that nobody has imported is empty.
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    def forget(_: object = None) -> None:
        # ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` does the first alone, and
        # needs NumPy.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()

    forget()
    # Every thread has its own cache of sharding propagation. The backward of a GPU runs in a thread
    # that outlives a test, so a hook empties the cache there.
    if torch.cuda.is_initialized():
        leaf = torch.zeros(1, device="cuda", requires_grad=True)
        leaf.register_hook(forget)
        # A test may have left the GPU broken; the next test reports it.
        with contextlib.suppress(RuntimeError):
            leaf.sum().backward()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def forget_compiled() -> None:
    """Empty dynamo's caches if something was compiled."""
    # ``reset`` of torch 2.13 imports Inductor where there is a GPU. The counter of frames is the
    # only count of compilations that costs nothing to read.
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # The module lacks its counter if a test was ended while it was imported.
    if getattr(frames, "FRAME_COUNTER", 0) > 0:
        torch.compiler.reset()
