"""Functional collectives of a graph, extra groups for them, fake values of new nodes.

- functional collectives are the operators of ``torch.ops._c10d_functional``; a group is an argument
  by name;
- ``bucketing._pre_bucket_all_gather`` (registered by ``torch._inductor.fx_passes.bucketing``) takes
  the rank as its argument ``rank``, and lays the rank's part at this place of a buffer for the
  whole group; each tensor in the dtype that ``_ALL_DTYPES`` has at its place of ``out_dtype_ints``.
  ``fsdp.all_gather_copy_in`` does the same without a cast, and gives the rank's part first;
- ``torch._inductor.pattern_matcher.stable_topological_sort`` is what Inductor calls behind a user's
  pass;
- ``torch.ops.higher_order.inductor_compiled_code`` calls what Inductor compiled;
- ``DeviceMesh._get_root_mesh`` is the mesh that a submesh was cut out of, its ``mesh`` holds all
  ranks;
- ``distributed_c10d._new_process_group_helper`` is what ``new_group`` calls, and takes a name
  (``new_group`` counts, or hashes the number of groups a rank has, and ranks that make groups in
  another order disagree); ``_world`` holds the tables of groups, which ``destroy_process_group``
  empties;
- ``torch._inductor.fx_passes.control_dependencies.preserve_node_ordering`` wraps nodes in the
  higher-order operator ``control_deps(nodes to stand behind, body, *operands)``, which keeps their
  name and metadata;
- ``torch._inductor.fx_passes.micro_pipeline_tp`` is asynchronous tensor parallelism: it looks for
  collectives beside products, and fuses them where NCCL is built in and ``_symmetric_memory`` is
  there for the group, which its ``_test_mode`` says of groups that one names; what it fuses is gone
  from the graph. It asks ``dist.is_nccl_available`` itself: where NCCL is not built in, that
  answers yes meanwhile, and is put back;
- ``torch._logging.trace_structured`` writes to the log that ``TORCH_TRACE`` asks for; tlparse shows
  its event "artifact" as a file, of the encoding that stands in its metadata.
"""

from collections.abc import Mapping

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
WAIT = _ops.wait_tensor.default
_several = getattr(_ops, "wait_tensors", None)
WAITS = (
    WAIT,
    torch.ops.c10d_functional.wait_tensor.default,
    *([_several.default] if _several is not None else []),
)
"""``wait_tensors``, of several tensors, is there from torch 2.15 on; the older namespace is what
bucketing calls.
"""
ALL_GATHER_OUT = _ops.all_gather_into_tensor_out.default
PRE_BUCKET_ALL_GATHER = "bucketing::_pre_bucket_all_gather"
COPY_IN = "fsdp::all_gather_copy_in"
COMPILED_CODE = "inductor_compiled_code"
COMPILED_MODULES = "torch._inductor"

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)

# ends the names of process groups that passes make; they are gone with their world
EXTRA_GROUP = ":extra"


def dtypes_of_buckets() -> tuple[torch.dtype, ...]:
    """Return what the numbers of ``out_dtype_ints`` stand for. A graph that has them has imported
    this module of Inductor.
    """
    from torch._inductor.fx_passes.bucketing import _ALL_DTYPES

    return _ALL_DTYPES


def log_artefact(name: str, content: object) -> None:
    """Put an artefact, a text or JSON, into the log that ``TORCH_TRACE`` asks for."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {
            "name": name,
            "encoding": "string" if isinstance(content, str) else "json",
        },
        payload_fn=lambda: content,
        expect_trace_id=False,
    )


def sort_as_inductor(graph: fx.Graph) -> None:
    """Put late nodes right behind their operands, as Inductor does behind its passes; a cycle is a
    ValueError.
    """
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
            f"the graph has a cycle behind a pass: {node.name} stands before its operand"
        ) from None


def root_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """All ranks of the mesh that ``mesh`` was cut out of, in its shape."""
    return mesh._get_root_mesh().mesh


def extra_group(name: str) -> str:
    """The name of the extra group of the group ``name``: the same ranks and backend, made at the
    first call in a world. Its members alone make it. They agree on the source's name, which is the
    prefix of the group's keys in the store; torch's own table finds it again while the world lives,
    and has forgotten it afterwards.
    """
    source, extra = group_named(name), name + EXTRA_GROUP
    world = (
        distributed_c10d._world
    )  # looked up anew: a simulated world puts another one in its place
    if extra in world.pg_names.values():
        return extra
    ranks = dist.get_process_group_ranks(source)
    _, store = world.pg_map[dist.group.WORLD]
    if dist.get_backend(source) != "fake":
        # a group of that name that has ended has left its addresses in the store: each one has keys
        # of its own
        made_before = (store.add(f"{extra}/made", 1) - 1) // len(ranks)
        store = dist.PrefixStore(f"{extra}/{made_before}", store)
    backend = dist.Backend(dist.get_backend(source))
    timeout, about = _get_default_timeout(backend), f"{source.group_desc}_extra"
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        store,
        GroupName(extra),
        timeout=timeout,
        group_desc=about,
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return extra


def is_extra_group(name: str) -> bool:
    """Return whether ``extra_group`` made it."""
    return name.endswith(EXTRA_GROUP)


def add_control_dependencies(graph: fx.Graph, after: Mapping[fx.Node, fx.Node]) -> None:
    """Let Inductor keep each node behind another one that it does not read; to import it takes
    seconds.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet([first]) for node, first in after.items()})


def is_control_dependency(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "control_deps"


def fused_by_async_tp(graph: fx.Graph, group: str) -> dict[str, list[str]]:
    """Products that torch fuses with each gather and scatter of a group, rewriting it; imports
    Inductor (seconds).
    """
    from torch._inductor.fx_passes import micro_pipeline_tp as tp
    from torch.distributed._symmetric_memory import _test_mode

    def products() -> list[str]:
        return [node.name for node in graph.nodes if node.target in MATMULS]

    fused, has_nccl = {}, dist.is_nccl_available
    try:
        if not has_nccl():
            dist.is_nccl_available = lambda: True
        with _test_mode({group}):
            gathers = tp.find_all_gather_patterns(graph)
            scatters = tp.find_reduce_scatter_patterns(graph)
            for found in [*gathers, *scatters]:
                is_gather, before = found in gathers, products()
                name = (found.ag_node if is_gather else found.reduce_scatter_node).name
                (tp.fuse_all_gather_matmul if is_gather else tp.fuse_matmul_reduce_scatter)(found)
                fused[name] = [product for product in before if product not in products()]
    finally:
        dist.is_nccl_available = has_nccl
    return fused


def is_bucketed_by_torch(node: fx.Node) -> bool:
    """Return whether the node is one of those that torch's (and torchtitan's) buckets are packed
    with.
    """
    return str(getattr(node.target, "namespace", "")) == "bucketing"


def values_of_split(whole: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    """The values of ``split_with_sizes``, with the strides of views."""
    if not isinstance(whole, FakeTensor):
        return list(whole.split_with_sizes(sizes, dim))
    meta = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
    return [faked(part, whole) for part in meta.split_with_sizes(sizes, dim)]
