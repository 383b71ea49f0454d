"""Eager chunking: each matching module's forward runs once per chunk, its outputs are concatenated.

This is what a chunked graph is equal to, bit for bit, with early gradient accumulation off.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.fsdp2 import is_block_mask, split_block_mask
from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer.graph.nodes import BODY, EAGER, MATERIALIZATION, SPLIT_BOUNDARY, annotation
from pytest_gtrainer.passes.chunking.config import MOE, ChunkConfig, ChunkError
from pytest_gtrainer.references.chunk_judges import ForwardJudge, check_twins, twin_graphs
from pytest_gtrainer.tracing.model import Attachment, tensor_text

MASKS = frozenset({"mask", "masks", "attn_mask", "attention_mask", "attention_masks", "block_mask"})
POSITIONS = frozenset({"positions", "position_ids"})
SHARED = frozenset({"rope", "rope_cache", "freqs_cis", "freqs", "position_embeddings"})
"""Names of a block's parameters beside its activation: cut along the batch if they have it, or
shared by all chunks.
"""


class EagerChunking(Attachment):
    """What ``eager_chunked`` put on a model; ``remove()`` gives the modules ``fqns`` their own
    forward back.
    """

    def __init__(self, fqns: tuple[str, ...], wrapped: Iterable[nn.Module]) -> None:
        super().__init__([partial(_unwrap, module) for module in wrapped])
        self.fqns = fqns


def _unwrap(module: nn.Module) -> None:
    replaced = module.__dict__.pop("forward").replaced
    if replaced is not None:
        module.forward = replaced


def eager_chunked(model: nn.Module, config: ChunkConfig) -> EagerChunking:
    """Let each matching module of ``model`` run in chunks, in place, until the result is removed.

    A module is wrapped once, however often this is called. What hooks the module's call
    (``fully_shard``, annotations) sees one call. ``config.early_grad_accumulation`` does not matter
    here.

    Raises:
        ChunkError: no module matches, or one is chunked already in another way.
    """
    roots = {fqn: module for fqn, module in model.named_modules() if fqn and config.matches(fqn)}
    if not roots:
        outermost = ", ".join(name for name, _ in model.named_children())
        raise ChunkError(
            f"module_fqn={config.module_fqn!r} matches no module of the model; outermost are {outermost}"
        )
    own = {fqn: module.__dict__.get("forward") for fqn, module in roots.items()}
    chunked = {
        fqn: forward.config for fqn, forward in own.items() if isinstance(forward, _ChunkedForward)
    }
    for fqn, theirs in chunked.items():
        if (theirs.chunk_dim, theirs.num_chunks) != (config.chunk_dim, config.num_chunks):
            raise ChunkError(
                f"{fqn} runs in {theirs.num_chunks} chunks by {theirs.chunk_dim} already: remove() that chunking first"
            )
    fresh = {fqn: module for fqn, module in roots.items() if fqn not in chunked}
    for fqn, module in fresh.items():
        module.forward = _ChunkedForward(
            module.forward, config, fqn, own[fqn], inspect.signature(module.forward)
        )
    return EagerChunking(tuple(roots), fresh.values())


@dataclass(frozen=True, slots=True)
class _ChunkedForward:
    """Stands for a module's ``forward``; ``replaced`` is what the instance had in its place, if
    anything.
    """

    run: Callable[..., Any]
    config: ChunkConfig
    fqn: str
    replaced: Callable[..., Any] | None
    signature: inspect.Signature
    followed: list[bool] = field(default_factory=list)  # not empty once a chunk was judged

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        with self._annotated(SPLIT_BOUNDARY):
            chunks = self._split(bound.arguments)
        following = None if self.followed else self._judge(bound.arguments, chunks[0])
        outputs = []
        for index, arguments in enumerate(chunks):
            part = inspect.BoundArguments(self.signature, arguments)
            with (
                self._annotated(BODY, index),
                following if following and not index else nullcontext(),
            ):
                outputs.append(self.run(*part.args, **part.kwargs))
        with self._annotated(MATERIALIZATION):
            joined = self._join(outputs)
        if following is not None:
            following.check_returned(outputs[0])
            self.followed.append(True)
        return joined

    def _judge(self, whole: Mapping[str, Any], part: Mapping[str, Any]) -> ForwardJudge | None:
        """Refuse operators that mix rows, or give what judges the first chunk; in compiled code
        nobody judges.
        """
        if torch.compiler.is_compiling() or self.config.module_fqn in self.config.row_wise:
            return None
        if (graphs := twin_graphs(self.fqn, self.run, whole, part)) is not None:
            check_twins(self.fqn, graphs, self.config)
            self.followed.append(True)
            return None
        cut = [
            (value, self.config.dim if place == 0 else 0)
            for place, (name, value) in enumerate(part.items())
            if isinstance(value, Tensor) and value.shape != whole[name].shape
        ]
        return ForwardJudge(self.fqn, self.config, cut)

    def _annotated(self, role: str, chunk_id: int | None = None) -> Any:
        return annotate(annotation(self.fqn, role, EAGER, chunk_id))

    def _split(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each chunk, by name."""
        names = list(arguments)
        activation = arguments[names[0]] if names else None
        if not isinstance(activation, Tensor) or activation.ndim <= self.config.dim:
            raise self._refused(
                arguments, "its first argument must be an activation with that dimension"
            )
        for name, value in arguments.items():
            if isinstance(value, DTensor):
                raise self._refused(
                    arguments, f"{name} is a DTensor, {value.placements} over {value.device_mesh}"
                )
        if self.config.kind == MOE and len(names) > 1:
            raise self._refused(arguments, "a MoE layer takes one activation and nothing else")
        part = self.config.chunk_extent(activation.shape[self.config.dim], self.fqn)
        parts = {
            names[0]: [piece.contiguous() for piece in activation.split(part, self.config.dim)]
        }
        parts |= {name: self._split_beside(name, arguments, activation) for name in names[1:]}
        return [
            {name: pieces[index] for name, pieces in parts.items()}
            for index in range(self.config.num_chunks)
        ]

    def _split_beside(
        self, name: str, arguments: Mapping[str, Any], activation: Tensor
    ) -> list[Any]:
        """An argument beside the activation, once per chunk: along the batch if it has one, else
        shared.
        """
        value, count, batch = arguments[name], self.config.num_chunks, activation.shape[0]
        if value is None or (name in SHARED and isinstance(value, Tensor)):
            return [value] * count
        if name in MASKS and is_block_mask(value):
            return split_block_mask(value, count)
        if name not in MASKS | POSITIONS or not isinstance(value, Tensor):
            raise self._refused(
                arguments, "beside the activation, a block takes masks, positions and rotary caches"
            )
        seq = activation.shape[1] if activation.ndim > 1 else -1
        pairs_of_positions = name in MASKS and value.ndim == 2 and tuple(value.shape) == (seq, seq)
        is_row = value.ndim == 1 and value.shape[0] == batch
        if (pairs_of_positions or is_row) and batch == seq:
            clear = "2-D, [1, sequence] or [batch, sequence]" if is_row else "4-D"
            raise self._refused(
                arguments, f"whether {name} has a batch dimension is unclear: give it as {clear}"
            )
        if pairs_of_positions or value.ndim == 0 or value.shape[0] == 1:
            return [value] * count
        if value.shape[0] == batch:
            return [piece.contiguous() for piece in value.split(batch // count)]
        if name in POSITIONS and value.ndim == 1:
            return [value] * count
        raise self._refused(arguments, f"the first extent of {name} is neither the batch's nor 1")

    def _join(self, outputs: list[Any]) -> Any:
        """The chunks' outputs as one; unless batches are joined, gradients are made contiguous, as
        the graph's are.
        """
        first, dim = outputs[0], self.config.dim
        if type(first) in (tuple, list) and all(isinstance(item, Tensor) for item in first):
            return type(first)(self._join(list(items)) for items in zip(*outputs, strict=True))
        if not isinstance(first, Tensor):
            wrong = f"{self.fqn} returns a {type(first).__name__}"
            raise TypeError(
                f"{wrong}: a chunked module returns a tensor, or a tuple or list of tensors"
            )
        for output in outputs:
            if output.ndim <= dim:
                raise ChunkError(
                    f"{self.fqn} returns a tensor of {output.ndim} dimensions, which has no {self.config.chunk_dim} "
                    "dimension to be joined along: return it with that dimension, or keep it inside the module"
                )
            if dim and output.requires_grad:
                output.register_hook(lambda gradient: gradient.contiguous())
        return torch.cat(outputs, dim)

    def _refused(self, arguments: Mapping[str, Any], why: str) -> ChunkError:
        values = arguments.values()
        kinds = [
            tensor_text(value) if isinstance(value, Tensor) else type(value).__name__
            for value in values
        ]
        observed = ", ".join(map(": ".join, zip(arguments, kinds, strict=True)))
        return ChunkError(
            f"{self.fqn} was called with ({observed}), which cannot be chunked by {self.config.chunk_dim}: {why}"
        )
