"""A small decoder, its training step, and how it is spread over a mesh of ``dp`` and ``tp``."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, N_HEADS = 40, 4

BUCKETS = ["tok_embeddings", "layers.0", "layers.1", ["norm", "lm_head"]]
"""The parameters of an entry travel in one collective; eager FSDP2 wraps the same modules."""


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head_dim = dim // N_HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A rank of tensor parallelism has some of the heads: -1 is their number.
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """It uses ``gate`` before ``up``, and registers them the other way round."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(dim)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """The model on one rank; equal weights wherever it is built."""

    def __init__(self, dim: int = 16, hidden: int = 32, n_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def tensor_parallel(model: Decoder, mesh: DeviceMesh, *, forget_a_sum: bool = False) -> Decoder:
    """Spread heads and hidden channels over the ranks of ``mesh``, in place.

    Args:
        forget_a_sum: a mistake. Each rank goes on with its own part of what the last ``down`` adds.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in model.layers:
        plan = {"attention.wq": columns, "attention.wk": columns, "attention.wv": columns}
        plan |= {"attention.wo": rows, "feed_forward.down": rows}
        plan |= {"feed_forward.gate": columns, "feed_forward.up": columns}
        if forget_a_sum and layer is model.layers[-1]:
            plan["feed_forward.down"] = RowwiseParallel(output_layouts=Partial())
        parallelize_module(layer, mesh, plan)
    return model


def step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, other ones at each step and for each rank of ``dp``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
