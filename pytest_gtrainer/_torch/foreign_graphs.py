"""Inputs and outputs of a graph, as Dynamo and AOTAutograd describe them.

AOTAutograd and Inductor put descriptors of ``torch._functorch._aot_autograd.descriptors`` into
``meta["desc"]`` of placeholders, and a list of them into that of the output.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._functorch._aot_autograd import descriptors as d
    from torch.export import ExportedProgram

ATTRIBUTES = {
    "torch._functorch._aot_autograd.descriptors": (
        "ParamAOTInput",
        "BufferAOTInput",
        "PlainAOTInput",
        "TangentAOTInput",
        "SubclassGetAttrAOTInput",
        "SubclassSizeAOTInput",
        "SubclassStrideAOTInput",
        "PlainAOTOutput",
        "SavedForBackwardsAOTOutput",
        "GradAOTOutput",
        "InputMutationAOTOutput",
        "SubclassGetAttrAOTOutput",
    ),
}

__all__ = ["ExportedProgram"]

_LOCAL = "_local_tensor"


@dataclass(frozen=True, slots=True)
class Input:
    """An input by its FQN, or by the index of an input of Dynamo's graph and a part of it."""

    kind: str = "input"
    fqn: str | None = None
    index: int | None = None
    suffix: str = ""
    is_tangent: bool = False


class Result(NamedTuple):
    """An output: "output" by its place, "kept" for the backward, or "gradient" or "updated" of an
    input.
    """

    kind: str
    place: int = 0
    of: Input | None = None
    suffix: str = ""


def source_of(node: fx.Node) -> str | None:
    """Return the expression by which Dynamo found an input; None if the graph is not Dynamo's."""
    source = getattr(node, "_dynamo_source", None)
    source = source or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    # A method before torch 2.14.
    if callable(name):
        name = name()
    return None if name is None else str(name)


def described_input(node: fx.Node) -> Input | None:
    """Return AOTAutograd's description of an input; None without one."""
    return _input(node.meta.get("desc"))


def _input(descriptor: Any) -> Input | None:
    match descriptor:
        case d.ParamAOTInput():
            return Input("parameter", descriptor.target)
        case d.BufferAOTInput():
            return Input("buffer", descriptor.target)
        case d.PlainAOTInput():
            return Input(index=descriptor.idx)
        case d.TangentAOTInput():
            of = described_output(descriptor.output)
            name = f"gradient.output_{of.place}" if of is not None and of.kind == "output" else None
            return Input("input", name, is_tangent=True)
        case d.SubclassGetAttrAOTInput():
            return _part_of(
                descriptor.base, "" if descriptor.attr == _LOCAL else f".{descriptor.attr}"
            )
        case d.SubclassSizeAOTInput():
            return _part_of(descriptor.base, f".size.{descriptor.idx}")
        case d.SubclassStrideAOTInput():
            return _part_of(descriptor.base, f".stride.{descriptor.idx}")
    return None


def _part_of(base: Any, suffix: str) -> Input | None:
    """Return an input that is an attribute of the tensor that ``base`` describes."""
    whole = _input(base)
    if whole is None:
        return None
    fqn = None if whole.fqn is None else whole.fqn + suffix
    return Input(whole.kind, fqn, whole.index, whole.suffix + suffix, whole.is_tangent)


def described_output(descriptor: Any) -> Result | None:
    """Return AOTAutograd's description of an output; None for a kind that no text names."""
    match descriptor:
        case d.PlainAOTOutput():
            return Result("output", descriptor.idx)
        case d.SavedForBackwardsAOTOutput():
            return Result("kept")
        case d.GradAOTOutput():
            return _result_of("gradient", descriptor.grad_of)
        case d.InputMutationAOTOutput():
            return _result_of("updated", descriptor.mutated_input)
        case d.SubclassGetAttrAOTOutput():
            base = described_output(descriptor.base)
            if base is None or descriptor.attr == _LOCAL:
                return base
            return Result(base.kind, base.place, base.of, f"{base.suffix}.{descriptor.attr}")
    return None


def _result_of(kind: str, descriptor: Any) -> Result | None:
    source = _input(descriptor)
    return None if source is None else Result(kind, of=source)
