"""The graphs that rules are judged on: small models by recipe, sharded and traced as one rank of a fake world."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, WAIT
from pytest_gtrainer.graph.bucket_plan import BucketPlan
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.collectives import reduce_scatter_before_all_reduce_pass
from pytest_gtrainer.passes.remat import selective_activation_remat_pass, tag_with_memory_policy_pass
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.tracing.sharding import MixedPrecisionPolicy, data_parallel
from pytest_gtrainer.tracing.step import trace_step

VOCABULARY = 16
LINEARS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model is like, and how it is sharded and traced."""

    layers: int = 2  # blocks
    dim: int = 8  # the extent of every weight; 4 ranks shard 10 unevenly
    registered: tuple[str, ...] = LINEARS  # a block's linear layers; where the next differs an order can be wrong
    executed: tuple[str, ...] = ("w1", "w3", "w2")
    bias: tuple[str, ...] = ("w1",)  # those of them that have one
    tied: bool = False  # head and embedding share their weight
    reduced: torch.dtype | None = torch.float32  # of gradients; parameters are gathered in bfloat16 unless it is None
    mixed: bool = False  # norms are gathered in float32
    # the last dimension shards, one called "replicate" holds replicas, over one called "tp" activations are exchanged
    mesh: tuple[tuple[str, int], ...] = (("fsdp", 4),)
    gathers_again: bool = False  # parameters, in the backward

    def __str__(self) -> str:
        """What is not as by default, as a person would ask for it."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return f"Recipe({', '.join(f'{name}={value}' for name, value, default in values if value != default)})"

    @property
    def size(self) -> int:
        """Ranks of its mesh."""
        return math.prod(extent for _, extent in self.mesh)

    @property
    def plan(self) -> BucketPlan:
        """A bucket a layer; what is tied is in one."""
        layers = [f"layers.{index}" for index in range(self.layers)]
        if self.tied:
            return [["tok_embeddings", "norm", "lm_head"], *layers]
        return ["tok_embeddings", *layers, ["norm", "lm_head"]]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy() if self.reduced is None else MixedPrecisionPolicy(torch.bfloat16, self.reduced)

    def config(self, mesh: DeviceMesh) -> TrainConfig:
        """Its training on a mesh, two rows of three tokens a step."""

        def batch(step: int, coordinate: int) -> tuple[torch.Tensor]:
            generator = torch.Generator().manual_seed(100 * step + coordinate)
            return (torch.randint(VOCABULARY, (2, 3), generator=generator),)

        return TrainConfig(
            model=lambda: Net(self),
            step=step,
            batch=batch,
            bucket_plan=self.plan,
            mesh=mesh,
            mp_policy=self.policy,
            steps=2,
        )

    def trace(self, meshes: DeviceMesh) -> fx.GraphModule:
        """The canonical joint graph of a step, on this rank of a mesh that has its dimensions."""
        names = tuple(name for name, _ in self.mesh if name != "tp")
        beside = meshes["tp"].get_group() if "tp" in dict(self.mesh) else None
        shards = meshes[names] if len(names) > 1 else meshes[names[0]]
        mode = "hybrid_shard" if "replicate" in names else "fully_shard"
        model: nn.Module = Net(self, beside)
        if self.mixed:  # the norms first, in their own dtype
            for module in [each for each in model.modules() if isinstance(each, nn.LayerNorm)]:
                data_parallel(module, shards, mode=mode)
        sharded = data_parallel(model, shards, mode=mode, mp_policy=self.policy)
        gm = canonicalize_graph_pass(trace_step(sharded, step, (torch.zeros(2, 3, dtype=torch.int64),)).gm)
        if "replicate" in names:
            gm = reduce_scatter_before_all_reduce_pass(gm)  # as FSDP2 has it
        if self.gathers_again:
            gm = selective_activation_remat_pass(tag_with_memory_policy_pass(gm))
        return gm


class Block(nn.Module):
    """Its order of use is neither that of registration nor that of modules: no wrong order of a payload looks right."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(recipe.dim)), nn.Parameter(torch.zeros(recipe.dim))
        for name in recipe.registered:
            self.add_module(name, nn.Linear(recipe.dim, recipe.dim, bias=name in recipe.bias))
        self.norm = nn.LayerNorm(recipe.dim)
        self._executed = recipe.executed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        for name in self._executed:
            h = torch.tanh(self.get_submodule(name)(h))
        return x + (h + self.shift) * self.scale


class Net(nn.Module):
    """An embedding, blocks, a norm and a head; between blocks activations are exchanged over ``beside``."""

    def __init__(self, recipe: Recipe, beside: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, recipe.dim)
        self.layers = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.dim)
        self.lm_head = nn.Linear(recipe.dim, VOCABULARY, bias=False)
        if recipe.tied:
            self.lm_head.weight = self.tok_embeddings.weight
        self._beside = beside

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


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What is made once for a process group: of an ended one it would name groups that are gone."""


def mesh_of(recipe: Recipe) -> DeviceMesh:
    """Its mesh over all ranks of the default group: the same one at each call."""
    made, extents = _of_group.setdefault(dist.group.WORLD, {}), dict(recipe.mesh)
    if recipe.mesh not in made:
        made[recipe.mesh] = init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))
    mesh: DeviceMesh = made[recipe.mesh]
    return mesh


def graph_of(recipe: Recipe) -> fx.GraphModule:
    """Its graph on this rank; the caller's own."""
    made = _of_group.setdefault(dist.group.WORLD, {})
    if recipe not in made:
        made[recipe] = recipe.trace(mesh_of(recipe))
    gm = copy.deepcopy(made[recipe])
    for node in gm.graph.nodes:  # a copy of a graph shares what its nodes' metadata holds
        node.meta = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in node.meta.items()}
    return gm
