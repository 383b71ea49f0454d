"""Make models of what training code combines, drawn by a seed: ``fuzz --models``.

A model has blocks of a norm and a feed-forward, or of experts. It is sharded as training code does
it, by torch's tensor, sequence or expert parallelism and by FSDP or replicas, and its step is
traced. A finding is reduced on the graph, so models need not shrink.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pytest_gtrainer._torch.passes import functional_collectives
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.attack.generate import mesh_of_ranks
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.tracing.sharding import MixedPrecisionPolicy, data_parallel
from pytest_gtrainer.tracing.step import trace_step

VOCABULARY = 8
TENSOR, SEQUENCE, EXPERTS = "tensor", "sequence", "experts"
FULLY_SHARD, REPLICATE = "fully_shard", "replicate"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class Ingredients:
    """The parts of a model, and how it is sharded.

    Attributes:
        layers: the number of blocks.
        dim, hidden: extents of the weights; FSDP shards some of them unevenly.
        norm: "layer" or "rms".
        activation: "relu", "silu" or "tanh".
        gated: a second product scales the first, as in SwiGLU.
        bias: linear layers have one.
        tied: head and embedding share their weight.
        drops: activations are dropped out.
        canonical: the graph is canonical, as passes of a pipeline get it; else as it is traced.
        data: "fully_shard" or "replicate", over the first dimension of the mesh; "" for neither.
        across: "tensor", "sequence" or "experts", over the last dimension; "" for none.
        gathered, reduced: dtypes of parameters and gradients in collectives; None for their own.
    """

    layers: int = 1
    dim: int = 8
    hidden: int = 8
    norm: str = "layer"
    activation: str = "tanh"
    gated: bool = False
    bias: bool = False
    tied: bool = False
    drops: bool = False
    canonical: bool = True
    data: str = ""
    across: str = ""
    gathered: torch.dtype | None = None
    reduced: torch.dtype | None = None


def draw_ingredients(seed: int, dimensions: int) -> Ingredients:
    """Return what a seed makes a model of.

    Args:
        seed: the same one returns the same.
        dimensions: of the mesh, 0 for one process. With two, data is parallel over the first and
            the model over the second; with one it is either.
    """
    dice = random.Random(seed)
    data = dice.choice((FULLY_SHARD, FULLY_SHARD, REPLICATE, ""))
    across = dice.choice((TENSOR, SEQUENCE, EXPERTS, ""))
    if dimensions == 0:
        data = across = ""
    elif dimensions == 1 and data and across:
        data, across = dice.choice(((data, ""), ("", across)))
    gathered = dice.choice((None, torch.bfloat16))
    is_sharded = data == FULLY_SHARD
    return Ingredients(
        layers=dice.randint(1, 2),
        dim=dice.choice((4, 6, 10)),
        hidden=dice.choice((4, 8, 10)),
        norm=dice.choice(("layer", "rms")),
        activation=dice.choice(sorted(_ACTIVATIONS)),
        gated=dice.random() < 0.5,
        bias=dice.random() < 0.5,
        # Torch's styles would make two parameters of a tied one.
        tied=dice.random() < 0.3 and across not in (TENSOR, SEQUENCE),
        # Ranks that share a model would drop other elements of what is whole on each.
        drops=dice.random() < 0.3 and not across,
        canonical=dice.random() < 0.7,
        data=data,
        across=across,
        gathered=gathered if is_sharded else None,
        reduced=dice.choice((None, torch.float32)) if is_sharded and gathered else None,
    )


class FeedForward(nn.Module):
    """Two products with an activation between, and a third that scales it if it is gated."""

    def __init__(self, given: Ingredients) -> None:
        super().__init__()
        # Not in the order of their use.
        self.down = nn.Linear(given.hidden, given.dim, bias=given.bias)
        self.up = nn.Linear(given.dim, given.hidden, bias=given.bias)
        if given.gated:
            self.gate = nn.Linear(given.dim, given.hidden, bias=given.bias)
        self._given = given

    def forward(self, x: Tensor) -> Tensor:
        h = _ACTIVATIONS[self._given.activation](self.up(x))
        if self._given.gated:
            h = h * self.gate(x)
        if self._given.drops:
            h = nn.functional.dropout(h, 0.5)
        down: Tensor = self.down(h)
        return down


class Experts(nn.Module):
    """The expert of this rank: rows of all ranks come to it, and go back."""

    def __init__(self, given: Ingredients, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self._group = FeedForward(given), group

    def forward(self, x: Tensor) -> Tensor:
        exchange = functional_collectives.all_to_all_single_autograd
        rows = exchange(x.reshape(-1, x.shape[-1]), None, None, self._group)
        back: Tensor = exchange(self.inner(rows), None, None, self._group)
        return back.reshape(x.shape)


class Block(nn.Module):
    """A residual block of a norm and a feed-forward."""

    def __init__(self, given: Ingredients, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = _norm(given)
        self.feed_forward = FeedForward(given) if group is None else Experts(given, group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, given: Ingredients, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, given.dim)
        self.layers = nn.ModuleList(Block(given, group) for _ in range(given.layers))
        self.norm = _norm(given)
        self.head = nn.Linear(given.dim, VOCABULARY, bias=False)
        if given.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _norm(given: Ingredients) -> nn.Module:
    return nn.LayerNorm(given.dim) if given.norm == "layer" else nn.RMSNorm(given.dim)


def models_over(ranks: int) -> Callable[[int], fx.GraphModule]:
    """Return a function that makes the graph of a model of a seed, over the world that is up.

    Args:
        ranks: of the world, whose mesh is that of ``mesh_of_ranks``; 0 for models of one process.
    """
    mesh = None
    if ranks > 1:
        extents = {}
        for part in mesh_of_ranks(ranks).split(", "):
            name, _, extent = part.partition("=")
            extents[name] = int(extent)
        mesh = init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))
    dimensions = 0 if mesh is None else mesh.ndim
    return lambda seed: graph_of(draw_ingredients(seed, dimensions), mesh)


def graph_of(given: Ingredients, mesh: DeviceMesh | None) -> fx.GraphModule:
    """Return the joint graph of a step of a model, sharded over a mesh.

    Args:
        given: what the model is made of.
        mesh: of one or two dimensions; None for one process.
    """
    with random_states_kept():
        model = _shard(given, mesh)
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        traced = trace_step(model, lambda each, given: each(given).logsumexp(-1).mean(), (tokens,))
    return canonicalize_graph_pass(traced.gm) if given.canonical else traced.gm


def _shard(given: Ingredients, mesh: DeviceMesh | None) -> nn.Module:
    """Return a model on this rank of a mesh."""
    if mesh is None:
        return Model(given)
    names = mesh.mesh_dim_names
    assert names is not None
    first, last = mesh[names[0]], mesh[names[-1]]
    model = Model(given, last.get_group() if given.across == EXPERTS else None)
    if given.across in (TENSOR, SEQUENCE):
        _parallelize(model, last, given)
    if given.data:
        policy = MixedPrecisionPolicy(given.gathered, given.reduced)
        data_parallel(model, first, mode=given.data, mp_policy=policy)
    return model


def _parallelize(model: Model, mesh: DeviceMesh, given: Ingredients) -> None:
    """Shard products over a mesh, and activations between them if sequences are parallel."""
    between = Shard(1) if given.across == SEQUENCE else Replicate()
    kept: dict[str, Any] = {"use_local_output": given.across != SEQUENCE}
    rows = RowwiseParallel(output_layouts=between, **kept)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, **kept),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        "layers.*.feed_forward.up": ColwiseParallel(input_layouts=between),
        "layers.*.feed_forward.down": rows,
    }
    if given.gated:
        plan["layers.*.feed_forward.gate"] = ColwiseParallel(input_layouts=between)
    if given.across == SEQUENCE:
        plan |= {"norm": SequenceParallel(), "layers.*.norm": SequenceParallel()}
    parallelize_module(model, mesh, plan)
