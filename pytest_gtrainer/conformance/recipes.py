"""Recipes of the graphs that rules are judged on.

A recipe describes a small model, which is sharded and traced as one rank of a fake world.
"""

import copy
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy

from pytest_gtrainer import extensions
from pytest_gtrainer._torch.passes import (
    ALL_GATHER,
    ALL_REDUCE,
    RECEIVE,
    SEND,
    WAIT,
    functional_collectives,
)
from pytest_gtrainer.attack.models import OwnGraph, graphs_of, load_model
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
LAYER_NORM = torch.ops.aten.native_layer_norm.default
LINEARS, PREFIXES = ("w1", "w2", "w3"), ("w", "w1", "w1_out")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The model of a rule, and how it is sharded and traced.

    Attributes:
        layers: the number of blocks.
        dim: the extent of every weight; 4 ranks shard 10 unevenly.
        registered: the linear layers of a block, or the weights of its experts.
        executed: the same in the order of their use. If it is the order of registration, no wrong
            order of a payload shows.
        bias: the linear layers that have one.
        tied: head and embedding share their weight.
        reduced: the dtype that gradients are reduced in. Parameters are gathered in bfloat16
            unless it is None.
        mixed: norms are gathered in float32.
        mesh: names and extents. The last dimension shards; "replicate" holds replicas; over "tp"
            activations are exchanged.
        activation_dim: the dimension that activations are exchanged over.
        gathers_again: parameters are gathered again in the backward.
        moe: blocks have experts, which are in a bucket of their own.
        inside: an addition to a block, or to its experts; see ``_add_inside``.
        batch: rows of tokens.
        sequence: tokens of a row.
        given: "canonical", or a graph where the work of a pass is not done yet: "traced",
            "duplicates", "tagged", "ddp" or "chunks".
        chunks: the number of chunks.
        waits: the waits of gathered parameters stand "late", before their first readers, or have
            an "alias".
        updates: a shard is doubled before its second gather, or else before the backward.
        traps: the graph is ``TRAPS``.
        part: "forward" or "backward" of the joint graph, as a graph of its own.
    """

    layers: int = 2
    dim: int = 8
    registered: tuple[str, ...] = LINEARS
    executed: tuple[str, ...] = ("w1", "w3", "w2")
    bias: tuple[str, ...] = ("w1",)
    tied: bool = False
    reduced: torch.dtype | None = torch.float32
    mixed: bool = False
    mesh: tuple[tuple[str, int], ...] = (("fsdp", 4),)
    activation_dim: str = "tp"
    gathers_again: bool = False
    moe: bool = False
    inside: str = ""
    batch: int = 2
    sequence: int = 3
    given: str = "canonical"
    chunks: int = 2
    waits: str = ""
    updates: bool = False
    traps: bool = False
    part: str = ""

    def __str__(self) -> str:
        """Return the fields that differ from their defaults, as a call would name them."""
        changed = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                changed.append(f"{each.name}={value}")
        return f"Recipe({', '.join(changed)})"

    @property
    def size(self) -> int:
        """The number of ranks in its mesh."""
        return math.prod(extent for _, extent in self.mesh)

    @property
    def plan(self) -> BucketPlan:
        """A bucket for each layer; tied parameters are in one bucket."""
        layers: list[Any] = []
        for fqn in [f"layers.{index}" for index in range(self.layers)]:
            if self.moe:
                layers += [[f"{fqn}.norm", f"{fqn}.moe.router"], [f"{fqn}.moe.experts"]]
            else:
                layers.append(fqn)
        if self.tied:
            return [["tok_embeddings", "norm", "lm_head"], *layers]
        return ["tok_embeddings", *layers, ["norm", "lm_head"]]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.reduced is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(torch.bfloat16, self.reduced)

    def tokens(self, step: int, coordinate: int) -> tuple[torch.Tensor]:
        """Return the inputs of a step: int64 tokens of shape ``[batch, sequence]``."""
        generator = torch.Generator().manual_seed(100 * step + coordinate)
        return (torch.randint(VOCABULARY, (self.batch, self.sequence), generator=generator),)

    def config(self, mesh: DeviceMesh) -> TrainConfig:
        """Return its training on a mesh, for two steps."""
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
        """Its blocks chunked by batch, or its experts by sequence."""
        chunked = ("layers.*.moe", SEQUENCE) if self.moe else ("layers.*", BATCH)
        # Eager chunking reduces the gradient of each chunk by itself; early accumulation adds them
        # before, which has other bits.
        return ChunkConfig(*chunked, self.chunks, early_grad_accumulation=False)

    def model(self, meshes: DeviceMesh | None) -> "Net":
        """Return the model on this rank of a mesh, not sharded."""
        if meshes is None or self.activation_dim not in dict(self.mesh):
            return Net(self)
        return Net(self, meshes[self.activation_dim].get_group())

    def trace(self, meshes: DeviceMesh | None) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """Return the joint graph of a step on this rank, and its twin at the extent of a chunk.

        ``meshes`` is a mesh with the dimensions of the recipe; None for a model of one process.
        """
        if self.traps:
            return parse(TRAPS), None
        if self.part:
            return _cut(graph_of(replace(self, part="")), self.part), None
        if self.given in ("canonical", "tagged"):
            traced_before = replace(self, given="traced", gathers_again=False, updates=False)
            return self._prepare(graph_of(traced_before)), None
        model: nn.Module = self.model(meshes)
        # Chunks are compared in one process; DDP does not shard.
        if meshes is not None and self.given not in ("chunks", "ddp"):
            model = self._shard(model, meshes)
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.int64)
        chunk = self.chunking if self.given == "chunks" else None
        traced = trace_step(
            model, step, (tokens,), reuse_gathers=self.given != "duplicates", chunk=chunk
        )
        if self.given == "traced":
            return traced.gm, None
        if self.given == "ddp" and meshes is not None:
            _average_gradients(traced.gm, meshes["replicate"])
        if traced.twin is None:
            return self._prepare(traced.gm), None
        return self._prepare(traced.gm), canonicalize_graph_pass(traced.twin)

    def _shard(self, model: nn.Module, meshes: DeviceMesh) -> nn.Module:
        names = tuple(name for name, _ in self.mesh if name != "tp")
        shards = meshes[names] if len(names) > 1 else meshes[names[0]]
        mode = "hybrid_shard" if "replicate" in names else "fully_shard"
        if self.mixed:
            # A parameter that is sharded keeps its policy, so the norms come before the model.
            for module in list(model.modules()):
                if isinstance(module, nn.LayerNorm):
                    data_parallel(module, shards, mode=mode)
        return data_parallel(model, shards, mode=mode, mp_policy=self.policy)

    def _prepare(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the passes that come before those of the recipe's kind."""
        gm = canonicalize_graph_pass(gm)
        if "replicate" in dict(self.mesh) and self.given != "ddp":
            # DTensor traces the all-reduce between replicas first; FSDP2 reduce-scatters first.
            gm = reduce_scatter_before_all_reduce_pass(gm)
        if self.gathers_again or self.given == "tagged":
            gm = tag_with_memory_policy_pass(gm)
        if self.given == "tagged":
            _tag_blocks(gm)
        elif self.gathers_again:
            gm = selective_activation_remat_pass(gm)
        if self.waits:
            _change_waits(gm, self.waits)
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
"""Copies that look like identities and are none: one is returned, one is of a tensor that is
written to, one changes strides.
"""


@dataclass(frozen=True, slots=True)
class OwnRecipe(Recipe):
    """A graph of a user's own model, ``--gt-model``; of the other fields only few are read.

    Attributes:
        path: ``module:function``, or the name that a hook gives to its function.
        name: of the graph among those of the model, "" for a single one.
    """

    path: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the model, the graph, and the part of it."""
        return " ".join(filter(None, (self.path, self.name, self.part)))

    @property
    def size(self) -> int:
        """The number of ranks of the world that is up."""
        return dist.get_world_size()

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan of the model's TrainConfig, empty without one."""
        return self.own.plan

    @property
    def own(self) -> OwnGraph:
        """The graph as the user's function gives it on this rank."""
        return _own_graphs(self.path, self.given)[self.name]


def own_recipes(path: str, kind: str, given: Mapping[str, Any]) -> list[Recipe]:
    """Return a recipe for each graph of a user's model.

    Args:
        path: of the model.
        kind: of the pass; "separate" has two graphs for each step.
        given: the fields of this kind's recipes.

    Raises:
        ModelError: the model has no graph.
    """
    recipes: list[Recipe] = []
    as_given = given.get("given", "canonical")
    for name, own in _own_graphs(path, as_given).items():
        parts = ("forward", "backward") if kind == "separate" and own.is_step else ("",)
        for part in parts:
            recipes.append(OwnRecipe(path=path, name=name, part=part, given=as_given, mesh=()))
    return recipes


def _own_graphs(path: str, given: str) -> dict[str, OwnGraph]:
    """Return the graphs of a user's model on this rank; a world asks its function once.

    Raises:
        ModelError: the model has no graph.
    """
    # Groups of a world that has ended are gone, so graphs are kept for as long as the world is.
    known = _own.setdefault(dist.group.WORLD, {})
    key = path, dist.get_rank(), given == "traced"
    if key not in known:
        try:
            make = extensions.models().get(path) or load_model(path)
            known[key] = graphs_of(make, f"--gt-model={path}", as_traced=given == "traced")
        except ValueError as error:
            known[key] = error  # else each rule would trace again, to fail again
    found = known[key]
    if isinstance(found, ValueError):
        raise found
    return found


def _cut(gm: fx.GraphModule, part: str) -> fx.GraphModule:
    """Return one direction as a graph of its own, whose inputs are what it reads of the other.

    Results of the whole graph keep their names; those that the other direction reads have none.
    """
    results, meta = results_of(gm), gm.graph.output_node().meta
    part_of = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            part_of[node] = 1 if direction(node) == BACKWARD else 0
    cut = cut_part(gm, part_of, 1 if part == "backward" else 0, results)
    names = {}
    for node, name in zip(results, meta["gt_outputs"], strict=True):
        names[node.name] = name
    outputs = tuple(names.get(name, "") for name in cut.gives)
    cut.gm.graph.output_node().meta = {**meta, "gt_outputs": outputs}
    _correct_statistics(gm, cut.gm)
    return cut.gm


def _correct_statistics(gm: fx.GraphModule, cut: fx.GraphModule) -> None:
    """Give mean and deviation of a norm, as inputs of a graph, the dtype that they really have.

    The CPU's kernel for bf16 rows and fp32 weights computes them in fp32. Torch's fake kernel says
    bf16, and on such inputs the kernel of the backward raises.
    """
    of_weights = {}
    for norm in gm.graph.find_nodes(op="call_function", target=LAYER_NORM):
        for item in norm.users:
            if item.args[1] in (1, 2) and isinstance(norm.args[2], fx.Node):
                of_weights[item.name] = norm.args[2].meta["val"].dtype
    for node in cut.graph.find_nodes(op="placeholder"):
        if node.name in of_weights:
            node.meta["val"] = node.meta["val"].to(of_weights[node.name])


def _tag_blocks(gm: fx.GraphModule) -> None:
    """Tag the forward of each block for recomputation, all but its last value."""
    latest: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        block = ".".join(node_fqn(node).split(".")[:2])
        if node.op != "call_function" or direction(node) != FORWARD:
            continue
        if block.startswith("layers."):
            if block in latest:
                latest[block].meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
            latest[block] = node


def _average_gradients(gm: fx.GraphModule, replicas: DeviceMesh) -> None:
    """Average each gradient over replicas where it is computed, as DDP under torch.compile does."""
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


def _change_waits(gm: fx.GraphModule, how: str) -> None:
    """Move the waits of parameters to their first readers ("late"), or put an alias after them."""
    for member in fsdp_all_gathers(gm):
        wait = member.wait
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
    """Write to a shard before its second gather; before the backward if there is none."""
    gathers = [each for each in fsdp_all_gathers(gm) if each.parameter == "layers.0.w1.weight"]
    if len(gathers) > 1:
        reader = [*gathers[1].chain, gathers[1].launch][0]
    else:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        reader = next(node for node in calls if direction(node) == BACKWARD)
    shard = gm.graph.find_nodes(op="placeholder")[gathers[0].position]
    with gm.graph.inserting_before(reader):
        doubled = gm.graph.call_function(torch.ops.aten.mul_.Scalar, (shard, 2))
    doubled.meta = {**reader.meta, "val": shard.meta["val"]}


class Experts(nn.Module):
    """An expert for each row of a batch; weights are used in the recipe's order of execution."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        for name in recipe.registered:
            weight = torch.randn(recipe.batch, recipe.dim, recipe.dim) / recipe.dim
            self.register_parameter(name, nn.Parameter(weight))
        self._executed = recipe.executed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._executed:
            x = torch.tanh(torch.bmm(x, getattr(self, name)))
        return x


class Moe(nn.Module):
    """Experts and a router, which scales what the experts return."""

    def __init__(self, recipe: Recipe, activation_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(recipe.dim, 1), Experts(recipe)
        self._recipe, self._activation_group = recipe, activation_group

    def forward(self, x: torch.Tensor) -> Any:
        return _add_inside(self.experts(x), self._recipe, self._activation_group) * self.router(x)


class MoeBlock(nn.Module):
    """A residual block of a norm and experts."""

    def __init__(self, recipe: Recipe, activation_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(recipe.dim), Moe(recipe, activation_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


def _add_inside(
    h: torch.Tensor, recipe: Recipe, activation_group: dist.ProcessGroup | None, place: int = 0
) -> torch.Tensor:
    """Return ``h`` with the addition that ``Recipe.inside`` names: what a rule is about.

    ``place`` is that of the block among the others.
    """
    match recipe.inside:
        case "drops":
            return nn.functional.dropout(h, 0.5)
        case "mixes":
            # The mean over the dimension that is chunked depends on rows of other chunks.
            return h - h.mean(recipe.chunking.dim, keepdim=True)
        case "noise":
            # Views and transposes that change nothing.
            return h.view(h.shape).transpose(0, 1).transpose(0, 1)
        case "buffers":
            return _with_fresh_buffers(h)
        case "exchanges" if activation_group is not None:
            return h + WAIT(ALL_REDUCE(h.detach().contiguous(), "sum", activation_group.group_name))
        case "routes" if activation_group is not None:
            # Rows go to other ranks, as in expert parallelism.
            rows = h.contiguous()
            return functional_collectives.all_to_all_single_autograd(
                rows, None, None, activation_group
            )
        case "sends" if activation_group is not None:
            sent: torch.Tensor = _Handover.apply(h.contiguous(), activation_group, 3 * place)
            return sent
    return h


class _Handover(torch.autograd.Function):
    """The first rank of a group adds its activation to that of the second, as to a later stage.

    The second sends the gradient back. Tags are consecutive, as no two messages may be alike.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, group: dist.ProcessGroup, tag: int) -> torch.Tensor:
        ctx.group, ctx.tag = group, tag
        if group.rank() == 0:
            _send(h, group, tag)
            _send(h.sum(-1).bfloat16(), group, tag + 1)
            return h.clone()
        h = h + _receive(h, group, tag)
        return h * _receive(h[..., 0].bfloat16(), group, tag + 1).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.group.rank() == 0:
            return grad + _receive(grad, ctx.group, ctx.tag + 2), None, None
        _send(grad.contiguous(), ctx.group, ctx.tag + 2)
        return grad, None, None


def _send(x: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
    WAIT(SEND(x, 1 - group.rank(), tag, group.group_name))


def _receive(like: torch.Tensor, group: dist.ProcessGroup, tag: int) -> torch.Tensor:
    received: torch.Tensor = WAIT(
        RECEIVE(torch.zeros_like(like), 1 - group.rank(), tag, group.group_name)
    )
    return received


def _with_fresh_buffers(h: torch.Tensor) -> torch.Tensor:
    """Add terms that are wrong if a pass makes one of two equal expressions.

    These are fresh buffers, draws, and products before and after a write.
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
    """A residual block of linear layers with a norm, a scale and a shift.

    It uses parameters neither in the order of registration nor module by module, so that no wrong
    order of a payload looks right.
    """

    def __init__(
        self, recipe: Recipe, activation_group: dist.ProcessGroup | None = None, place: int = 0
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(recipe.dim))
        self.shift = nn.Parameter(torch.zeros(recipe.dim))
        for name in recipe.registered:
            self.add_module(name, nn.Linear(recipe.dim, recipe.dim, bias=name in recipe.bias))
        self.norm = nn.LayerNorm(recipe.dim)
        self._recipe, self._activation_group, self._place = recipe, activation_group, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        for name in self._recipe.executed:
            h = torch.tanh(self.get_submodule(name)(h))
        h = _add_inside(h, self._recipe, self._activation_group, self._place)
        return x + (h + self.shift) * self.scale


class Net(nn.Module):
    """An embedding, blocks, a norm and a head.

    Behind each block activations are exchanged in ``activation_group``, unless the block adds
    something (``Recipe.inside``).
    """

    def __init__(self, recipe: Recipe, activation_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, recipe.dim)
        blocks: list[nn.Module] = []
        for place in range(recipe.layers):
            blocks.append(
                MoeBlock(recipe, activation_group)
                if recipe.moe
                else Block(recipe, activation_group, place)
            )
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(recipe.dim)
        self.lm_head = nn.Linear(recipe.dim, VOCABULARY, bias=False)
        if recipe.tied:
            self.lm_head.weight = self.tok_embeddings.weight
        self._activation_group = None if recipe.inside else activation_group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
            if self._activation_group is not None:
                size, name = self._activation_group.size(), self._activation_group.group_name
                exchanged = WAIT(ALL_GATHER(x.detach().contiguous(), size, name))
                x = x + WAIT(ALL_REDUCE(exchanged[: x.shape[0]].contiguous(), "sum", name))
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a loss that depends on every token and every logit."""
    logits: torch.Tensor = model(tokens)
    return logits.float().logsumexp(-1).mean()


# Meshes by default group and extents: a second mesh would have groups of its own.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)
# Graphs of users' models, or why there are none, by default group; then by path, rank, and whether
# they are as traced.
_own: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, dict[str, OwnGraph] | ValueError]] = (
    weakref.WeakKeyDictionary()
)
# Graph, twin and names of the mesh's groups, by recipe, rank and backend. The world of these groups
# may have ended.
_traced: dict[Any, tuple[fx.GraphModule, fx.GraphModule | None, list[str]]] = {}


def mesh_of(recipe: Recipe) -> DeviceMesh:
    """Return the mesh of a recipe over all ranks of the default group: the same at each call."""
    made = _meshes.setdefault(dist.group.WORLD, {})
    if recipe.mesh not in made:
        names, extents = zip(*recipe.mesh, strict=True)
        made[recipe.mesh] = init_device_mesh("cpu", extents, mesh_dim_names=names)
    return made[recipe.mesh]


def graph_of(recipe: Recipe, twin: bool = False) -> fx.GraphModule:
    """Return a copy of the graph of a recipe on this rank, or of its twin.

    A process traces a recipe once. In another world the groups of the same mesh have other names;
    they replace those of the trace.
    """
    if isinstance(recipe, OwnRecipe):
        gm = recipe.own.gm
        return _copy(_cut(gm, recipe.part) if recipe.part else gm)
    mesh, names = None, []
    if recipe.mesh:
        mesh = mesh_of(recipe)
        names = [mesh.get_group(name).group_name for name, _ in recipe.mesh]
    key = recipe, dist.get_rank(), dist.get_backend()
    if key not in _traced:
        _traced[key] = *recipe.trace(mesh), names
    traced, traced_twin, traced_names = _traced[key]
    if twin:
        assert traced_twin is not None, f"{recipe} has no twin"
        traced = traced_twin
    gm = _copy(traced)
    renamed = dict(zip(traced_names, names, strict=True))
    for node in gm.graph.nodes:
        if launches(node.target):
            group = group_of(node)
            node.args = tuple(renamed[str(group)] if each == group else each for each in node.args)
    if traced_names != names:
        gm.recompile()
    return gm


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with metadata of its own."""
    copied = copy.deepcopy(gm)
    for node in copied.graph.nodes:
        # A deep copy of a graph copies the metadata of its nodes shallowly.
        for name, value in node.meta.items():
            if isinstance(value, dict):
                node.meta[name] = copy.copy(value)
    return copied
