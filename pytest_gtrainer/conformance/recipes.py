"""The graphs that rules are judged on: small models by recipe, sharded and traced as one rank of a
fake world.
"""

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, WAIT, functional_collectives
from pytest_gtrainer.graph.bucket_plan import BucketPlan
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, group_of, launches, results_of
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, node_fqn
from pytest_gtrainer.graphtext import parse
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.chunking.config import BATCH, SEQUENCE, ChunkConfig
from pytest_gtrainer.passes.collectives import reduce_scatter_before_all_reduce_pass
from pytest_gtrainer.passes.remat import (
    RECOMPUTE,
    selective_activation_remat_pass,
    tag_with_memory_policy_pass,
)
from pytest_gtrainer.passes.stages import cut_part
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.tracing.sharding import MixedPrecisionPolicy, data_parallel
from pytest_gtrainer.tracing.step import trace_step

VOCABULARY = 16
DIV = torch.ops.aten.div.Tensor
LINEARS, PREFIXES = ("w1", "w2", "w3"), ("w", "w1", "w1_out")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model is like, and how it is sharded and traced."""

    layers: int = 2  # blocks
    dim: int = 8  # the extent of every weight; 4 ranks shard 10 unevenly
    registered: tuple[str, ...] = (
        LINEARS  # a block's linear layers; where the next differs an order can be wrong
    )
    executed: tuple[str, ...] = ("w1", "w3", "w2")
    bias: tuple[str, ...] = ("w1",)  # those of them that have one
    tied: bool = False  # head and embedding share their weight
    reduced: torch.dtype | None = (
        torch.float32
    )  # of gradients; parameters are gathered in bfloat16 unless it is None
    mixed: bool = False  # norms are gathered in float32
    # the last dimension shards, one called "replicate" holds replicas, over one called "tp"
    # activations are exchanged
    mesh: tuple[tuple[str, int], ...] = (("fsdp", 4),)
    beside: str = "tp"  # or another of its dimensions
    gathers_again: bool = False  # parameters, in the backward
    moe: bool = False  # blocks of experts, which are in a bucket of their own
    inside: str = ""  # what a block, or its experts, do besides: see ``_besides``
    batch: int = 2
    sequence: int = 3  # tokens of a row
    # or "traced", "duplicates", "tagged", "ddp", "chunks": what a pass is for is not done
    given: str = "canonical"
    chunks: int = 2
    waits: str = (
        ""  # for gathered parameters stand "late", before their first readers, or have an "alias"
    )
    updates: bool = (
        False  # a shard is doubled before its second gather, or else before the backward
    )
    traps: bool = False  # the graph is ``TRAPS``
    part: str = ""  # "forward" or "backward" of the joint graph, as a graph of its own

    def __str__(self) -> str:
        """Return what is not as by default, as a person would ask for it."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return f"Recipe({', '.join(f'{name}={value}' for name, value, default in values if value != default)})"

    @property
    def size(self) -> int:
        """Ranks of its mesh."""
        return math.prod(extent for _, extent in self.mesh)

    @property
    def plan(self) -> BucketPlan:
        """A bucket a layer; what is tied is in one."""
        layers: list[Any] = [f"layers.{index}" for index in range(self.layers)]
        if self.moe:
            layers = [
                part
                for fqn in layers
                for part in ([f"{fqn}.norm", f"{fqn}.moe.router"], [f"{fqn}.moe.experts"])
            ]
        if self.tied:
            return [["tok_embeddings", "norm", "lm_head"], *layers]
        return ["tok_embeddings", *layers, ["norm", "lm_head"]]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return (
            MixedPrecisionPolicy()
            if self.reduced is None
            else MixedPrecisionPolicy(torch.bfloat16, self.reduced)
        )

    def tokens(self, step: int, coordinate: int) -> tuple[torch.Tensor]:
        """The inputs of a step: rows of tokens."""
        generator = torch.Generator().manual_seed(100 * step + coordinate)
        return (torch.randint(VOCABULARY, (self.batch, self.sequence), generator=generator),)

    def config(self, mesh: DeviceMesh) -> TrainConfig:
        """Its training on a mesh, two steps."""
        return TrainConfig(
            model=lambda: Net(self),
            step=step,
            batch=self.tokens,
            bucket_plan=self.plan,
            mesh=mesh,
            mp_policy=self.policy,
            steps=2,
        )

    @property
    def chunking(self) -> ChunkConfig:
        """Its blocks by batch, or its experts by sequence, as the bits of eager chunking need it."""
        what = ("layers.*.moe", SEQUENCE) if self.moe else ("layers.*", BATCH)
        return ChunkConfig(*what, self.chunks, early_grad_accumulation=False)

    def model(self, meshes: DeviceMesh | None) -> "Net":
        """The model on this rank of a mesh, not sharded."""
        return Net(
            self,
            meshes[self.beside].get_group() if meshes and self.beside in dict(self.mesh) else None,
        )

    def trace(self, meshes: DeviceMesh | None) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """The joint graph of a step on this rank of a mesh that has its dimensions, and at the
        extent of a chunk.
        """
        if self.traps:
            return parse(TRAPS), None
        if self.part:
            return _cut(graph_of(replace(self, part="")), self.part), None
        if self.given in ("canonical", "tagged"):
            return self._prepare(
                graph_of(replace(self, given="traced", gathers_again=False, updates=False))
            ), None
        model: nn.Module = self.model(meshes)
        if meshes is not None and self.given not in (
            "chunks",
            "ddp",
        ):  # the former are compared in one process
            names = tuple(name for name, _ in self.mesh if name != "tp")
            shards = meshes[names] if len(names) > 1 else meshes[names[0]]
            mode = "hybrid_shard" if "replicate" in names else "fully_shard"
            if self.mixed:  # the norms first, in their own dtype
                for module in [each for each in model.modules() if isinstance(each, nn.LayerNorm)]:
                    data_parallel(module, shards, mode=mode)
            model = data_parallel(model, shards, mode=mode, mp_policy=self.policy)
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.int64)
        chunk = self.chunking if self.given == "chunks" else None
        traced = trace_step(
            model, step, (tokens,), reuse_gathers=self.given != "duplicates", chunk=chunk
        )
        if self.given == "traced":
            return traced.gm, None
        if self.given == "ddp" and meshes is not None:
            _average_gradients(traced.gm, meshes["replicate"])
        return self._prepare(traced.gm), traced.twin and canonicalize_graph_pass(traced.twin)

    def _prepare(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return what other passes do before those of its kind."""
        gm = canonicalize_graph_pass(gm)
        if "replicate" in dict(self.mesh) and self.given != "ddp":
            gm = reduce_scatter_before_all_reduce_pass(gm)  # as FSDP2 has it
        if self.gathers_again or self.given == "tagged":
            gm = tag_with_memory_policy_pass(gm)
        if self.given == "tagged":
            _tag_blocks(gm)
        elif self.gathers_again:
            gm = selective_activation_remat_pass(gm)
        if self.waits:
            _wait_otherwise(gm, self.waits)
        if self.updates:
            _double_a_shard(gm)
        return gm


TRAPS = """# gtrainer graph v2
if I:
  I.x: f32[2, 3]
if fwd:
  clone: f32[2, 3] = aten.clone(I.x)
  exp: f32[2, 3] = aten.exp(I.x)
  clone_1: f32[2, 3] = aten.clone(exp)
  neg_: f32[2, 3] = aten.neg_(exp)
  sub: f32[2, 3] = aten.sub.Tensor(neg_, clone_1)
  t: f32[3, 2][1, 3] = aten.t(sub)
  clone_2: f32[3, 2] = aten.clone(t, memory_format=contiguous_format)
  detach: f32[3, 2] = aten.detach(clone_2)
if out:
  yield fwd._.clone
  yield fwd._.sub
  yield fwd._.detach
"""
"""What looks like an identity and is none: copies that are returned, or of what is written to, or
for their strides.
"""


def _cut(gm: fx.GraphModule, part: str) -> fx.GraphModule:
    """One direction as a graph of its own, which takes what it reads of the other; its results have
    their names.
    """
    whole, results = gm.graph.output_node(), results_of(gm)
    part_of = {
        node: int(direction(node) == BACKWARD)
        for node in gm.graph.nodes
        if node.op == "call_function"
    }
    cut = cut_part(gm, part_of, int(part == "backward"), results)
    names = {node.name: name for node, name in zip(results, whole.meta["gt_outputs"], strict=True)}
    cut.gm.graph.output_node().meta = {
        **whole.meta,
        "gt_outputs": tuple(names.get(name, "") for name in cut.gives),
    }
    return cut.gm


def _tag_blocks(gm: fx.GraphModule) -> None:
    """Of each block all but the last value is computed again."""
    calls = [
        node for node in gm.graph.nodes if node.op == "call_function" and direction(node) == FORWARD
    ]
    inside = [node for node in calls if node_fqn(node).startswith("layers.")]
    last = {".".join(node_fqn(node).split(".")[:2]): node for node in inside}.values()
    for node in inside:
        if node not in last:
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE


def _average_gradients(gm: fx.GraphModule, replicas: DeviceMesh) -> None:
    """Each on its own, where it is computed, as DDP under torch.compile has it: divided, and summed
    over replicas.
    """
    output, group = gm.graph.output_node(), replicas.get_group().group_name
    loss, *gradients = output.args[0]
    for at, gradient in enumerate(gradients):
        node = gradient
        for target, *args in ((DIV, replicas.size()), (ALL_REDUCE, "sum", group), (WAIT,)):
            with gm.graph.inserting_after(node):
                node = gm.graph.call_function(target, (node, *args))
            node.meta = dict(gradient.meta)
        gradients[at] = node
    output.args = ([loss, *gradients],)


def _wait_otherwise(gm: fx.GraphModule, how: str) -> None:
    """Waits in another order than launches, or with an alias that stands for them."""
    for wait in [member.wait for member in fsdp_all_gathers(gm)]:
        if how == "late":
            min(wait.users).prepend(wait)
            continue
        with gm.graph.inserting_after(wait):
            alias = gm.graph.call_function(torch.ops.aten.alias.default, (wait,))
        alias.meta = dict(wait.meta)
        wait.replace_all_uses_with(
            alias, delete_user_cb=lambda user, alias=alias: user is not alias
        )


def _double_a_shard(gm: fx.GraphModule) -> None:
    first, *second = [
        each for each in fsdp_all_gathers(gm) if each.parameter == "layers.0.w1.weight"
    ]
    behind = next(
        node
        for node in gm.graph.nodes
        if direction(node) == BACKWARD and node.op == "call_function"
    )
    if second:
        behind, *_ = *second[0].chain, second[0].launch
    shard = gm.graph.find_nodes(op="placeholder")[first.position]
    with gm.graph.inserting_before(behind):
        doubled = gm.graph.call_function(torch.ops.aten.mul_.Scalar, (shard, 2))
    doubled.meta = {**behind.meta, "val": shard.meta["val"]}


class Experts(nn.Module):
    """One for each row of a batch; weights are used in the recipe's order, not in that of
    registration.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        for name in recipe.registered:
            self.register_parameter(
                name, nn.Parameter(torch.randn(recipe.batch, recipe.dim, recipe.dim) / recipe.dim)
            )
        self._executed = recipe.executed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._executed:
            x = torch.tanh(torch.bmm(x, getattr(self, name)))
        return x


class Moe(nn.Module):
    """A router, and experts; what they do besides, they do to what the experts give."""

    def __init__(self, recipe: Recipe, beside: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(recipe.dim, 1), Experts(recipe)
        self._recipe, self._beside = recipe, beside

    def forward(self, x: torch.Tensor) -> Any:
        return _besides(self.experts(x), self._recipe, self._beside) * self.router(x)


class MoeBlock(nn.Module):
    """A norm, and a layer of experts."""

    def __init__(self, recipe: Recipe, beside: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(recipe.dim), Moe(recipe, beside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


def _besides(h: torch.Tensor, recipe: Recipe, beside: dist.ProcessGroup | None) -> torch.Tensor:
    if recipe.inside == "drops":
        return nn.functional.dropout(h, 0.5)
    if recipe.inside == "mixes":  # what chunks hold apart
        return h - h.mean(recipe.chunking.dim, keepdim=True)
    if recipe.inside == "noise":  # views in vain
        return h.view(h.shape).transpose(0, 1).transpose(0, 1)
    if recipe.inside == "buffers":
        return _with_fresh_buffers(h)
    if recipe.inside == "exchanges" and beside is not None:
        return h + WAIT(ALL_REDUCE(h.detach().contiguous(), "sum", beside.group_name))
    if (
        recipe.inside == "routes" and beside is not None
    ):  # rows to other ranks, as expert parallelism does
        return functional_collectives.all_to_all_single_autograd(h.contiguous(), None, None, beside)
    return h


def _with_fresh_buffers(h: torch.Tensor) -> torch.Tensor:
    """Add terms that are wrong if two equal expressions become one: fresh buffers, draws, products
    around a write.
    """
    constant = h.detach()
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty_like(constant),
        lambda: constant.new_zeros(constant.shape),
        lambda: torch.zeros(constant.shape, dtype=constant.dtype),
        lambda: constant.clone(),
    ]
    for make in makers:
        one, other = make(), make()
        one.fill_(2)
        other.fill_(3)
        h = h * one - other
    for draw in (lambda: torch.rand_like(constant), lambda: torch.empty_like(constant).uniform_()):
        h = h + draw() - 2 * draw()

    # Two products have one left operand; the right one of the first is written to before the third.
    rows, dim = constant.reshape(-1, constant.shape[-1]), constant.shape[-1]
    one, other = constant.new_zeros(dim, dim), constant.new_zeros(dim, dim)
    one.fill_(0.5)
    other.fill_(0.25)
    products = rows @ one - rows @ other
    one.mul_(2)
    return h + (products + rows @ one).reshape(h.shape)


class Block(nn.Module):
    """Its order of use is neither that of registration nor that of modules: no wrong order of a
    payload looks right.
    """

    def __init__(self, recipe: Recipe, beside: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.ones(recipe.dim)),
            nn.Parameter(torch.zeros(recipe.dim)),
        )
        for name in recipe.registered:
            self.add_module(name, nn.Linear(recipe.dim, recipe.dim, bias=name in recipe.bias))
        self.norm = nn.LayerNorm(recipe.dim)
        self._recipe, self._beside = recipe, beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        for name in self._recipe.executed:
            h = torch.tanh(self.get_submodule(name)(h))
        h = _besides(h, self._recipe, self._beside)
        return x + (h + self.shift) * self.scale


class Net(nn.Module):
    """An embedding, blocks, a norm and a head; between blocks activations are exchanged over
    ``beside``.
    """

    def __init__(self, recipe: Recipe, beside: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, recipe.dim)
        block = MoeBlock if recipe.moe else Block
        self.layers = nn.ModuleList(block(recipe, beside) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.dim)
        self.lm_head = nn.Linear(recipe.dim, VOCABULARY, bias=False)
        if recipe.tied:
            self.lm_head.weight = self.tok_embeddings.weight
        self._beside = None if recipe.inside else beside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
            if self._beside is not None:
                size, name = self._beside.size(), self._beside.group_name
                exchanged = WAIT(ALL_GATHER(x.detach().contiguous(), size, name))
                x = x + WAIT(ALL_REDUCE(exchanged[: x.shape[0]].contiguous(), "sum", name))
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """A loss that every token and every logit is in."""
    logits: torch.Tensor = model(tokens)
    return logits.float().logsumexp(-1).mean()


_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)
"""By default group and extents: one mesh, and so one set of groups."""
_traced: dict[Any, tuple[fx.GraphModule, fx.GraphModule | None, list[str]]] = {}
"""By recipe, rank and backend: graph, twin, and the groups of the mesh's dimensions, of a world
that may be gone.
"""


def mesh_of(recipe: Recipe) -> DeviceMesh:
    """Its mesh over all ranks of the default group: the same one at each call."""
    made, extents = _meshes.setdefault(dist.group.WORLD, {}), dict(recipe.mesh)
    if recipe.mesh not in made:
        made[recipe.mesh] = init_device_mesh(
            "cpu", tuple(extents.values()), mesh_dim_names=tuple(extents)
        )
    return made[recipe.mesh]


def graph_of(recipe: Recipe, twin: bool = False) -> fx.GraphModule:
    """Its graph on this rank, or the one at the extent of a chunk; the caller's own.

    A process traces it once. Another world has other names for the groups of the same mesh, which
    are put in.
    """
    mesh = mesh_of(recipe) if recipe.mesh else None
    names = [mesh.get_group(name).group_name for name, _ in recipe.mesh] if mesh is not None else []
    key = recipe, dist.get_rank(), dist.get_backend()
    if key not in _traced:
        _traced[key] = *recipe.trace(mesh), names
    *graphs, named = _traced[key]
    gm, now = copy.deepcopy(graphs[twin]), dict(zip(named, names, strict=True))
    for node in gm.graph.nodes:  # a copy of a graph shares what its nodes' metadata holds
        node.meta = {
            name: copy.copy(value) if isinstance(value, dict) else value
            for name, value in node.meta.items()
        }
        if launches(node.target):
            group = group_of(node)
            node.args = tuple(now[str(group)] if each == group else each for each in node.args)
    if named != names:
        gm.recompile()
    return gm
