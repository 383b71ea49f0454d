"""Chunk eagerly: each matching module's forward runs once per chunk, its outputs are concatenated.

This is what a chunked graph is equal to, bit for bit, with early gradient accumulation off.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.fsdp2 import is_block_mask, split_block_mask
from pytest_gtrainer._torch.tracing import annotate
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.graph.nodes import BODY, EAGER, MATERIALIZATION, SPLIT_BOUNDARY, annotation
from pytest_gtrainer.passes.chunking.config import MOE, ChunkConfig, ChunkError
from pytest_gtrainer.references.chunk_judges import ForwardJudge, check_twins, twin_graphs
from pytest_gtrainer.references.left_behind import (
    left_tensors,
    named_tensors,
    put_back,
    withhold,
)
from pytest_gtrainer.tracing.model import Attachment, tensor_text

# Names of a block's parameters besides its activation. Masks and positions are cut along the batch
# if they have it; what is shared goes to every chunk as a whole.
MASKS = frozenset({"mask", "masks", "attn_mask", "attention_mask", "attention_masks", "block_mask"})
POSITIONS = frozenset({"positions", "position_ids"})
SHARED = frozenset({"rope", "rope_cache", "freqs_cis", "freqs", "position_embeddings"})


class EagerChunking(Attachment):
    """Chunking that ``eager_chunked`` put on the modules ``fqns``; ``remove()`` takes it off."""

    def __init__(self, fqns: tuple[str, ...], wrapped: Iterable[nn.Module]) -> None:
        super().__init__([partial(_unwrap, module) for module in wrapped])
        self.fqns = fqns


def _unwrap(module: nn.Module) -> None:
    put_back(module)
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
        TypeError: ``model`` is no module, or ``config`` no ``ChunkConfig``.
    """
    check_type(model, nn.Module, "model", "an nn.Module")
    check_type(config, ChunkConfig, "config", "a ChunkConfig")
    matching = {}
    for fqn, module in model.named_modules():
        if fqn and config.matches(fqn):
            matching[fqn] = module

    if not matching:
        outermost = ", ".join(name for name, _ in model.named_children())
        raise ChunkError(
            f"module_fqn={config.module_fqn!r} matches no module of the model; outermost are "
            f"{outermost}"
        )

    fresh = {}
    for fqn, module in matching.items():
        forward = module.__dict__.get("forward")
        if not isinstance(forward, _ChunkedForward):
            signature = inspect.signature(module.forward)
            fresh[fqn] = _ChunkedForward(module, module.forward, config, fqn, forward, signature)
            continue
        theirs = forward.config
        if (theirs.chunk_dim, theirs.num_chunks) != (config.chunk_dim, config.num_chunks):
            raise ChunkError(
                f"{fqn} runs in {theirs.num_chunks} chunks by {theirs.chunk_dim} already: "
                "remove() that chunking first"
            )

    for fqn, chunked in fresh.items():  # only now: an error leaves the model as it was
        matching[fqn].forward = chunked
    return EagerChunking(tuple(matching), [matching[fqn] for fqn in fresh])


@dataclass(frozen=True, slots=True)
class _ChunkedForward:
    """A module's ``forward`` that runs in chunks.

    Attributes:
        module: the module itself.
        run: the module's forward on all rows.
        replaced: the forward that the instance itself had, if any, instead of that of its class.
        judged: the ways to call the forward whose operators were judged, see ``_way_of``.
    """

    module: nn.Module
    run: Callable[..., Any]
    config: ChunkConfig
    fqn: str
    replaced: Callable[..., Any] | None
    signature: inspect.Signature
    judged: set[Hashable] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        with self._annotated(SPLIT_BOUNDARY):
            chunks = self._split(bound.arguments)
        # Dynamo traces this call: neither a copy of the module nor a mode can run in it.
        judge, way, before = None, None, None
        if not torch.compiler.is_compiling() and self.config.module_fqn not in self.config.row_wise:
            put_back(self.module)
            before = left_tensors(self.module)
            # Chunks, and later steps of the same way, run the same operators.
            way = self._way_of(bound.arguments)
            if way not in self.judged:
                judge = self._judge(way, bound.arguments, chunks[0])
        following: AbstractContextManager[Any] = judge or nullcontext()
        outputs = []
        for index, arguments in enumerate(chunks):
            part = inspect.BoundArguments(self.signature, arguments)
            with self._annotated(BODY, index), following:
                outputs.append(self.run(*part.args, **part.kwargs))
            following = nullcontext()
            if index == 0 and before is not None:
                of_first = named_tensors(self.module)

        if before is not None:
            withhold(self.module, before, of_first, self.fqn, self.config.num_chunks)
        with self._annotated(MATERIALIZATION):
            joined = self._join(outputs)
        if judge is not None:
            judge.check_returned(outputs[0])
            self.judged.add(way)
        return joined

    def _way_of(self, arguments: Mapping[str, Any]) -> Hashable:
        """Return what may choose the operators of a forward, but for the numbers of tensors.

        Batch normalisation mixes rows in training alone, and attention may be reached only with a
        mask, by a switch of a module, or where gradients are needed.
        """
        way: list[Hashable] = [torch.is_grad_enabled()]
        way += [parameter.requires_grad for parameter in self.module.parameters()]
        for name, value in arguments.items():
            text = ""
            if isinstance(value, Tensor):
                # As text, because symbolic extents have no hash.
                text = f"{tensor_text(value)}, {value.requires_grad}"
            way.append((name, type(value), text))
        for module in self.module.modules():
            for name, value in vars(module).items():
                if _is_plain(value):
                    # As text: lists have no hash.
                    way.append((name, str(value) if isinstance(value, _CONTAINERS) else value))
        return tuple(way)

    def _judge(
        self, way: Hashable, whole: Mapping[str, Any], part: Mapping[str, Any]
    ) -> ForwardJudge | None:
        """Refuse operators that mix rows, or return a judge that follows the first chunk."""
        graphs = twin_graphs(self.fqn, self.run, whole, part)
        if graphs is not None:
            check_twins(self.fqn, graphs, self.config)
            self.judged.add(way)
            return None

        cut = []
        for place, (name, value) in enumerate(part.items()):
            if isinstance(value, Tensor) and value.shape != whole[name].shape:
                cut.append((value, self.config.dim if place == 0 else 0))
        return ForwardJudge(self.fqn, self.config, cut)

    def _annotated(self, role: str, chunk_id: int | None = None) -> Any:
        return annotate(annotation(self.fqn, role, EAGER, chunk_id))

    def _split(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the arguments of each chunk, by name."""
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

        extent = self.config.chunk_extent(activation.shape[self.config.dim], self.fqn)
        chunks = []
        for piece in activation.split(extent, self.config.dim):
            # Contiguous, as the graph's chunks are: a kernel may add in another order for other
            # strides.
            chunks.append({names[0]: piece.contiguous()})

        for name in names[1:]:
            pieces = self._split_beside(name, arguments, activation)
            for chunk, piece in zip(chunks, pieces, strict=True):
                chunk[name] = piece
        return chunks

    def _split_beside(
        self, name: str, arguments: Mapping[str, Any], activation: Tensor
    ) -> list[Any]:
        """Return an argument besides the activation once per chunk.

        It is cut along the batch if it has that dimension; else all chunks share it.
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

        # A 2-D mask is of [batch, sequence], or of pairs of positions, which all rows share.
        sequence = activation.shape[1] if activation.ndim > 1 else -1
        is_square_mask = name in MASKS and tuple(value.shape) == (sequence, sequence)
        is_row = value.ndim == 1 and value.shape[0] == batch
        if (is_square_mask or is_row) and batch == sequence:
            clear = "4-D"
            if is_row:
                clear = "2-D, [1, sequence] or [batch, sequence]"
            raise self._refused(
                arguments, f"whether {name} has a batch dimension is unclear: give it as {clear}"
            )

        if is_square_mask or value.ndim == 0 or value.shape[0] == 1:
            return [value] * count
        if value.shape[0] == batch:
            return [piece.contiguous() for piece in value.split(batch // count)]
        if name in POSITIONS and value.ndim == 1:
            return [value] * count
        raise self._refused(arguments, f"the first extent of {name} is neither the batch's nor 1")

    def _join(self, outputs: list[Any]) -> Any:
        """Concatenate the chunks' outputs; tuples and lists item by item."""
        first, dim = outputs[0], self.config.dim
        if type(first) in (tuple, list) and all(isinstance(item, Tensor) for item in first):
            return type(first)(self._join(list(items)) for items in zip(*outputs, strict=True))
        if not isinstance(first, Tensor):
            raise TypeError(
                f"{self.fqn} returns a {type(first).__name__}: a chunked module returns a tensor, "
                "or a tuple or list of tensors"
            )

        for output in outputs:
            if output.ndim <= dim:
                raise ChunkError(
                    f"{self.fqn} returns a tensor of {output.ndim} dimensions, which has no "
                    f"{self.config.chunk_dim} dimension to be joined along: return it with that "
                    "dimension, or keep it inside the module"
                )
            if dim and output.requires_grad:
                # The backward of cat gives views with gaps, where the graph has whole chunks.
                output.register_hook(lambda gradient: gradient.contiguous())

        return torch.cat(outputs, dim)

    def _refused(self, arguments: Mapping[str, Any], why: str) -> ChunkError:
        observed = []
        for name, value in arguments.items():
            kind = tensor_text(value) if isinstance(value, Tensor) else type(value).__name__
            observed.append(f"{name}: {kind}")
        return ChunkError(
            f"{self.fqn} was called with ({', '.join(observed)}), which cannot be chunked by "
            f"{self.config.chunk_dim}: {why}"
        )


_CONTAINERS = (list, tuple, dict, set, frozenset, SimpleNamespace)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a switch or a number, or a container of nothing else."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
