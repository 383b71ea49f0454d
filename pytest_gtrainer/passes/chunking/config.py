"""Configure chunking: which modules, along which dimension, into how many parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.graph.bucket_plan import BucketPlan
from pytest_gtrainer.graph.nodes import node_fqn

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class ChunkError(ValueError):
    """A region cannot be chunked as asked; the message says which, where, and what to do."""


class ChunkWarning(UserWarning):
    """A chunked region computes with row numbers, or with counts of rows, which are a chunk's."""


def describe(node: fx.Node) -> str:
    """Return a node as text: name, operator, extents, module and, if it is known, source line."""
    is_call = node.op == "call_function"
    text = f"{node.name} = {node.target}" if is_call else f"{node.op} {node.target}"
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        text += f" {list(value.shape)}"
    fqn = node_fqn(node)
    if fqn:
        text += f" in {fqn}"
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if frames:
        text += f" at {frames[-1]['file']}:{frames[-1]['line']}"
    return text


def is_inexact(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point or complex numbers.

    A sum of such rounds, and a gradient may reach them.
    """
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


BATCH, SEQUENCE = "batch", "sequence"
_DIMENSIONS = {BATCH: 0, SEQUENCE: 1}
BLOCK, MOE = "transformer block", "MoE layer"


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """A choice of regions, and how they are chunked.

    Attributes:
        module_fqn: pattern of the roots' FQNs, component by component: ``layers.*`` are transformer
            blocks, ``layers.*.moe`` their MoE layers; ``*`` stands for one component, or for a part
            of one.
        chunk_dim: "batch", dimension 0 of the root's activation, or, for MoE layers, "sequence",
            dimension 1.
        num_chunks: the number of equal chunks, at least 2.
        early_grad_accumulation: add chunks' gradients before their reduction; False has the bits of
            eager chunking.
        row_wise: full names of operators (``"mylib::norm"``) that treat each row of the chunk
            dimension by itself, where chunking cannot know it: operators of one's own, for which
            you answer. With the pattern of the modules itself among them, you answer for all that
            these compute.

    Raises:
        ChunkError: a value is none of these, or the two do not go together.
    """

    module_fqn: str
    chunk_dim: str = BATCH
    num_chunks: int = 2
    early_grad_accumulation: bool = True
    row_wise: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind = self.kind  # refuses a pattern of neither kind
        if not isinstance(self.chunk_dim, str) or self.chunk_dim not in _DIMENSIONS:
            raise ChunkError(f"chunk_dim={self.chunk_dim!r}: choose {BATCH!r} or {SEQUENCE!r}")
        if type(self.num_chunks) is not int or self.num_chunks < 2:
            raise ChunkError(
                f"num_chunks={self.num_chunks!r}: give an integer of at least 2; one chunk is the "
                "model"
            )
        if not isinstance(self.early_grad_accumulation, bool):
            raise ChunkError(
                f"early_grad_accumulation={self.early_grad_accumulation!r}: give True or False"
            )
        # In a text ``in`` would find every part of a name.
        if not isinstance(self.row_wise, tuple | list | set | frozenset) or not all(
            isinstance(name, str) for name in self.row_wise
        ):
            raise ChunkError(
                f"row_wise={self.row_wise!r}: give a tuple of full names, such as ('mylib::norm',)"
            )
        # A configuration is hashed, as the options of a pass are.
        object.__setattr__(self, "row_wise", tuple(sorted(self.row_wise)))
        for name in self.row_wise:
            # Higher-order operators have a word, and functions of Python a text in brackets.
            is_operator = "::" in name or name.isidentifier() or name.startswith("<")
            if not is_operator and name != self.module_fqn:
                raise ChunkError(
                    f"row_wise names {name!r}, which is neither the full name of an operator, as "
                    f"'mylib::norm' is, nor the pattern of the modules, {self.module_fqn!r}"
                )
        if self.chunk_dim == SEQUENCE and kind == BLOCK:
            raise ChunkError(
                f"module_fqn={self.module_fqn!r} by sequence: a transformer block holds attention, "
                f"which mixes positions; chunk it by {BATCH!r}, or the MoE layers alone "
                f"({self.module_fqn}.moe) by {SEQUENCE!r}"
            )

    @property
    def kind(self) -> str:
        """ "transformer block" or "MoE layer", from the last component of the pattern."""
        if isinstance(self.module_fqn, str):
            *container, last = self.module_fqn.split(".")
            if container and all(container):
                if last == "*" or last.isdecimal():
                    return BLOCK
                if last == "moe":
                    return MOE
        raise ChunkError(
            f"module_fqn={self.module_fqn!r} names neither transformer blocks, as 'layers.*' does, "
            "nor MoE layers, as 'layers.*.moe' does"
        )

    @property
    def dim(self) -> int:
        """The dimension of the root's activation that is chunked."""
        return _DIMENSIONS[self.chunk_dim]

    def matches(self, fqn: str) -> bool:
        """Return whether a module is a root.

        >>> config = ChunkConfig("layers.*")
        >>> config.matches("layers.3"), config.matches("layers.3.moe")
        (True, False)
        """
        return self.root_of(fqn) == fqn != ""

    def root_of(self, fqn: str) -> str:
        """Return the root that the module ``fqn`` is, or lies in; "" if it is in none.

        >>> config = ChunkConfig("layers.*")
        >>> config.root_of("layers.3.moe.router"), config.root_of("norm")
        ('layers.3', '')
        """
        components, patterns = fqn.split("."), self.module_fqn.split(".")
        if len(components) < len(patterns) or not all(map(fnmatchcase, components, patterns)):
            return ""
        return ".".join(components[: len(patterns)])

    def chunk_extent(self, extent: int, what: str) -> int:
        """Return the extent of one chunk; a ChunkError if the chunks do not divide the extent."""
        if extent % self.num_chunks or extent < self.num_chunks:
            raise ChunkError(
                f"{what}: extent {extent} of the {self.chunk_dim} dimension does not divide into "
                f"{self.num_chunks} chunks; choose num_chunks among the divisors of {extent}"
            )
        return extent // self.num_chunks

    def twin_inputs(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inputs of a step at the extent of one chunk, for the trace of its twin.

        The first tensor that has the chunk dimension gives its extent; every tensor with this
        extent there is cut. Without such a tensor this is a ChunkError.
        """
        leaves, spec = pytree.tree_flatten(tuple(inputs))
        places = self.dynamic_dims(inputs)[self.chunk_dim]
        first, dim = places[0]
        part = self.chunk_extent(leaves[first].shape[dim], f"{self.module_fqn}, the step's inputs")
        for leaf, dim in places:
            leaves[leaf] = leaves[leaf].narrow(dim, 0, part).contiguous()
        return tuple(pytree.tree_unflatten(leaves, spec))

    def dynamic_dims(self, inputs: Sequence[Any]) -> dict[str, list[tuple[int, int]]]:
        """Return the dimensions that ``twin_inputs`` cuts, for ``trace_step(dynamic_dims=...)``.

        Returns:
            The name of the chunk dimension with pairs of the index of a leaf and its dimension.
        """
        places: list[tuple[int, int]] = []
        extent = None
        for index, leaf in enumerate(pytree.tree_leaves(tuple(inputs))):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > self.dim:
                extent = leaf.shape[self.dim] if extent is None else extent
                if leaf.shape[self.dim] == extent:
                    places.append((index, self.dim))
        if not places:
            raise ChunkError(
                f"no input of the step has a {self.chunk_dim} dimension (dimension {self.dim})"
            )
        return {self.chunk_dim: places}


def check_surroundings(config: ChunkConfig, plan: BucketPlan, tensor_parallel_degree: int) -> None:
    """Refuse chunks beside tensor parallelism, and a bucket that reaches out of a chunked layer."""
    if tensor_parallel_degree != 1:
        raise ChunkError(
            f"{config.module_fqn} cannot run in chunks at a tensor-parallel degree of "
            f"{tensor_parallel_degree}: its collectives on activations would run once per chunk; "
            "chunk with a degree of 1, or leave chunk= out"
        )
    for entry in plan:
        fqns = [entry] if isinstance(entry, str) else list(entry)
        roots = dict.fromkeys(map(config.root_of, fqns))
        roots.pop("", None)
        for root in roots:
            layer = root.rpartition(".")[0] if config.kind == MOE else root
            beyond = [fqn for fqn in fqns if fqn != layer and not fqn.startswith(f"{layer}.")]
            if beyond:
                raise ChunkError(
                    f"the bucket [{', '.join(fqns)}] holds a part of the chunked {root} and, "
                    f"beyond {layer}, {', '.join(beyond)}: put what lies in {layer} into buckets "
                    "of its own"
                )
