"""Train a small decoder: fully_shard, AdamW, clipping, a schedule, dropout, EMA, checkpoints.

    python train.py --steps 6
    torchrun --nproc-per-node=2 train.py --steps 6 --save checkpoints --save-at 3
    torchrun --nproc-per-node=2 train.py --steps 6 --resume checkpoints/step3

Needs torch alone. The data are made up from a seed; every number of ranks trains on the same global
batches.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 16, 32, 4


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ffn_norm(x)))))


class Decoder(nn.Module):
    def __init__(self, layers=2, dropout=0.1):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Batches:
    """Global batches by position; each rank takes its rows."""

    def __init__(self, seed, size, rank, world):
        self.seed, self.size, self.rank, self.world = seed, size, rank, world
        self.position = 0

    def next(self):
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.position)
        start = torch.randint(VOCABULARY, (self.size, 1), generator=generator)
        stride = torch.randint(1, 5, (self.size, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        self.position += 1
        return tokens.chunk(self.world)[self.rank]


def make_model(options, world):
    """Return the model with the same weights on any number of ranks, sharded if there are several."""
    torch.manual_seed(options.seed)
    model = Decoder(options.layers, options.dropout)
    if options.compile:
        for layer in model.layers:
            layer.compile(backend=options.compile)
    if world > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


class Trainer:
    """Everything that a run needs to go on: what ``save`` writes, and ``load`` puts back."""

    def __init__(self, options):
        self.options = options
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.model = make_model(options, self.world)
        self.ema = make_model(options, self.world).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / options.warmup)
        )
        self.batches = Batches(options.seed, options.batch, self.rank, self.world)
        # Ranks draw other dropout masks.
        torch.manual_seed(options.seed + 1000 * self.rank)

    def step(self):
        tokens = self.batches.next()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss * self.options.loss_scale).backward()
        self.unscale()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for average, weight in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                average.lerp_(weight, 0.1)
        return loss.item()

    def unscale(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.options.loss_scale)

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "ema": dict(self.ema.state_dict()),
            "schedule": self.schedule.state_dict(),
            "position": self.batches.position,
            f"random.{self.rank}": torch.get_rng_state(),
        }

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.ema.load_state_dict(state["ema"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.position = state["position"]
        torch.set_rng_state(state[f"random.{self.rank}"])


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="train up to this step")
    parser.add_argument("--save", type=Path, help="folder of checkpoints")
    parser.add_argument("--save-at", type=int, default=0, help="save after this many steps")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="rows of a global batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--loss-scale", type=float, default=8.0)
    parser.add_argument("--compile", metavar="BACKEND", help="compile every layer")
    return parser.parse_args()


def main():
    options = parse()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    trainer = Trainer(options)
    if options.resume:
        trainer.load(options.resume)
    while trainer.batches.position < options.steps:
        loss = trainer.step()
        if trainer.rank == 0:
            print(f"step {trainer.batches.position}: loss {loss!r}", flush=True)
        if options.save and trainer.batches.position == options.save_at:
            trainer.save(options.save / f"step{options.save_at}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
