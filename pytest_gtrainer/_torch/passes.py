"""Functional collectives of a graph, extra groups for them, and what Inductor does to both.

Functional collectives are the operators of ``torch.ops._c10d_functional``; each names its group by
a string. A collective returns at once, and ``wait_tensor`` waits for its result.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# registers torch.ops._c10d_functional's meta kernels
import torch.distributed._functional_collectives as functional_collectives
from torch import fx
from torch._logging import trace_structured
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.process_groups import group_named
from pytest_gtrainer._torch.values import FakeTensor, HigherOrderOperator, faked

with private_names():
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import (
        GroupName,
        _get_default_timeout,
        _new_process_group_helper,
    )

ATTRIBUTES = {
    "torch.distributed.distributed_c10d": ("_world",),
    "torch.ops:_c10d_functional": (
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "reduce_scatter_tensor",
        "all_reduce",
        "all_to_all_single",
        "isend",
        "irecv",
        "wait_tensor",
    ),
    "torch.ops:aten": ("_scaled_mm",),
    "torch._inductor.fx_passes.micro_pipeline_tp": (
        "find_all_gather_patterns",
        "find_reduce_scatter_patterns",
        "fuse_all_gather_matmul",
        "fuse_matmul_reduce_scatter",
    ),
    "torch.distributed.device_mesh:DeviceMesh": ("_get_root_mesh",),
    "torch.distributed.distributed_c10d:_World": ("pg_map", "pg_names", "pg_group_ranks"),
}

__all__ = ["functional_collectives"]

_ops = torch.ops._c10d_functional
ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default
ALL_TO_ALL = _ops.all_to_all_single.default
SEND = _ops.isend.default
RECEIVE = _ops.irecv.default
WAIT = _ops.wait_tensor.default
# torch's bucketing calls the operator of the older namespace.
WAITS: tuple[Any, ...] = (WAIT, torch.ops.c10d_functional.wait_tensor.default)
# A wait for several tensors, from torch 2.15 on.
if hasattr(_ops, "wait_tensors"):
    WAITS += (_ops.wait_tensors.default,)
ALL_GATHER_OUT = _ops.all_gather_into_tensor_out.default
# It takes the rank as an argument, and puts the rank's part, cast, at its place in a buffer for the
# whole group.
PRE_BUCKET_ALL_GATHER = "bucketing::_pre_bucket_all_gather"
# It does the same without a cast, and returns the rank's part first.
COPY_IN = "fsdp::all_gather_copy_in"
# The higher-order operator that calls what Inductor compiled.
COMPILED_CODE = "inductor_compiled_code"
COMPILED_MODULES = "torch._inductor"

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)

# The end of the names of process groups that passes make. Groups end with their world.
EXTRA_GROUP = ":extra"


def dtypes_of_buckets() -> tuple[torch.dtype, ...]:
    """Return the dtypes that the numbers in ``out_dtype_ints`` of a bucket stand for."""
    # A graph with such numbers comes from this module of Inductor, so it is imported already.
    from torch._inductor.fx_passes.bucketing import _ALL_DTYPES

    return _ALL_DTYPES


def log_artefact(name: str, content: object) -> None:
    """Write a text or JSON to the log of ``TORCH_TRACE``; tlparse shows it as a file."""
    encoding = "string" if isinstance(content, str) else "json"
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: content,
        expect_trace_id=False,
    )


def sort_as_inductor(graph: fx.Graph) -> None:
    """Put late nodes right after their operands, as Inductor does after a user's pass.

    Raises ValueError for a cycle.
    """
    # A sorted graph does not import Inductor.
    ready: set[fx.Node] = set()
    for node in graph.nodes:
        if not ready.issuperset(node.all_input_nodes):
            break
        ready.add(node)
    else:
        return
    from torch._inductor.pattern_matcher import stable_topological_sort

    try:
        stable_topological_sort(graph)
    except AssertionError:
        raise ValueError(
            f"the graph has a cycle after a pass: {node.name} stands before its operand"
        ) from None


def root_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """Return all ranks of the mesh that ``mesh`` was cut out of, in its shape."""
    return mesh._get_root_mesh().mesh


def extra_group(name: str) -> str:
    """Return the name of the extra group of the group ``name``: of the same ranks and backend.

    Its members alone make it, at the first call in a world. The name of the source, on which they
    agree, is the prefix of its keys in the store. torch's own table finds it again as long as the
    world lives.
    """
    source, extra = group_named(name), name + EXTRA_GROUP
    # A simulated world puts another object in its place.
    world = distributed_c10d._world
    if extra in world.pg_names.values():
        return extra
    ranks = dist.get_process_group_ranks(source)
    _, store = world.pg_map[dist.group.WORLD]
    if dist.get_backend(source) != "fake":
        # A group of this name that has ended has left its addresses in the store, so each group has
        # keys of its own.
        made_before = (store.add(f"{extra}/made", 1) - 1) // len(ranks)
        store = dist.PrefixStore(f"{extra}/{made_before}", store)
    backend = dist.Backend(dist.get_backend(source))
    # ``new_group`` calls the same function. It names a group by the number of groups that a rank
    # has made, and ranks that make groups in another order would disagree.
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        store,
        GroupName(extra),
        timeout=_get_default_timeout(backend),
        group_desc=f"{source.group_desc}_extra",
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return extra


def is_extra_group(name: str) -> bool:
    """Return whether ``extra_group`` made the group."""
    return name.endswith(EXTRA_GROUP)


def add_control_dependencies(graph: fx.Graph, after: Mapping[fx.Node, fx.Node]) -> None:
    """Let Inductor keep each node after another one that it does not read.

    Each node becomes the body of a higher-order operator ``control_deps``, which keeps its name and
    metadata. Imports Inductor, which takes seconds.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet([first]) for node, first in after.items()})


def is_control_dependency(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "control_deps"


def fused_by_async_tp(graph: fx.Graph, group: str) -> dict[str, list[str]]:
    """Let torch fuse products with collectives of a group; return the products by collective.

    Asynchronous tensor parallelism rewrites the graph: what it fuses is gone. Imports Inductor,
    which takes seconds.
    """
    from torch._inductor.fx_passes import micro_pipeline_tp as tp
    from torch.distributed._symmetric_memory import _test_mode

    def products() -> list[str]:
        return [node.name for node in graph.nodes if node.target in MATMULS]

    fused = {}
    # torch fuses only if NCCL is built in, though the graph may run elsewhere. In the test mode the
    # group counts as one with symmetric memory.
    with mock.patch.object(dist, "is_nccl_available", return_value=True), _test_mode({group}):
        gathers = tp.find_all_gather_patterns(graph)
        scatters = tp.find_reduce_scatter_patterns(graph)
        for found in [*gathers, *scatters]:
            before = products()
            if found in gathers:
                name = found.ag_node.name
                tp.fuse_all_gather_matmul(found)
            else:
                name = found.reduce_scatter_node.name
                tp.fuse_matmul_reduce_scatter(found)
            fused[name] = [product for product in before if product not in products()]
    return fused


def is_bucketed_by_torch(node: fx.Node) -> bool:
    """Return whether a node packs a bucket of torch's own pass, which torchtitan uses, too."""
    return str(getattr(node.target, "namespace", "")) == "bucketing"


def values_of_split(whole: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    """Return the values of ``split_with_sizes``, with the strides of views."""
    if not isinstance(whole, FakeTensor):
        return list(whole.split_with_sizes(sizes, dim))
    meta = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
    return [faked(part, whole) for part in meta.split_with_sizes(sizes, dim)]
