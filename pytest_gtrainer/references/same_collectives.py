"""Before a graph runs on ranks: do they all issue the same collectives in the same order? (D14)

Only some ranks pad uneven shards, so their graphs differ. If their collectives did, ranks
would wait for each other in different ones: an abort on gloo, a hang on NCCL.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer._torch.passes import WAIT, group_ranks
from pytest_gtrainer.graph.nodes import node_fqn


class RanksDisagree(AssertionError):
    """The ranks' graphs issue different collectives; the message names the first."""


def collective_sequence(gm: fx.GraphModule) -> list[str]:
    """The launches of collectives in graph order: operator, dtype, ranks of the group, and where they come from."""
    return [
        _describe(node)
        for node in gm.graph.nodes
        if str(node.target).startswith("_c10d_functional.") and node.target is not WAIT
    ]


def _describe(node: fx.Node) -> str:
    value = node.meta["val"]
    # data-dependent and uneven sizes differ between ranks by right; a bucket's do not
    shape = list(value.shape) if "fsdp_bucket" in node.meta else "any shape"
    where = "+".join(node.meta["fsdp_bucket"]["plan_fqns"]) if "fsdp_bucket" in node.meta else node_fqn(node)
    return f"{node.target} {str(value.dtype).removeprefix('torch.')} {shape} of {where} over {_group_size(node)} ranks"


def _group_size(node: fx.Node) -> int:
    return len(group_ranks(str(node.args[-1])))


def assert_same_collectives(gm: fx.GraphModule) -> None:
    """Compare this rank's sequence with all others; every rank must call it.

    Raises:
        RanksDisagree: on every rank, with the first collective that differs and two ranks that differ in it.
    """
    sequences = [text.splitlines() for text in _gathered("\n".join(collective_sequence(gm)))]
    for rank, sequence in enumerate(sequences):
        for index, (first, other) in enumerate(zip_longest(sequences[0], sequence, fillvalue="nothing more")):
            if first != other:
                raise RanksDisagree(f"collective {index} differs: rank 0 issues {first}, rank {rank} issues {other}")


def _gathered(text: str) -> list[str]:
    """Each rank's text, by rank. ``dist.all_gather_object`` does this too, but needs NumPy."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    content = text.encode()
    lengths = _all_gather(torch.tensor([len(content)], device=device))
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    rows = zip(_all_gather(padded), lengths, strict=True)
    return [bytes(row[: int(length)].tolist()).decode() for row, length in rows]


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows
