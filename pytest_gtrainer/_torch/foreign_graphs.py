"""What Dynamo and AOTAutograd say of a graph's inputs and outputs.

- ``node._dynamo_source``, else ``meta["grapharg"].source``, on placeholders of Dynamo: the source,
  whose ``name`` is its expression (a method before torch 2.14).
- ``meta["desc"]`` on placeholders of AOTAutograd and Inductor, and on the output a list of them:
  descriptors of ``torch._functorch._aot_autograd.descriptors``. ``PlainAOTInput.idx`` counts the
  inputs of Dynamo's graph, ``ParamAOTInput.target`` is an FQN, ``SubclassGetAttrAOTInput.base`` the
  tensor whose attribute it is.
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
    """An input by its FQN, or by the index of Dynamo's input and what is taken of it."""

    kind: str = "input"
    fqn: str | None = None
    index: int | None = None
    suffix: str = ""
    is_tangent: bool = False


class Result(NamedTuple):
    """What an output is: "output" by its place, "kept" for the backward, "gradient" or "updated" of
    an input.
    """

    kind: str
    place: int = 0
    of: Input | None = None
    suffix: str = ""


def source_of(node: fx.Node) -> str | None:
    """The expression by which Dynamo found the input, None if it was not Dynamo."""
    source = getattr(node, "_dynamo_source", None) or getattr(
        node.meta.get("grapharg"), "source", None
    )
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else None


def described_input(node: fx.Node) -> Input | None:
    """Return what AOTAutograd says of an input, None if it says nothing."""
    return _input(node.meta.get("desc"))


def _input(told: Any) -> Input | None:
    match told:
        case d.ParamAOTInput():
            return Input("parameter", told.target)
        case d.BufferAOTInput():
            return Input("buffer", told.target)
        case d.PlainAOTInput():
            return Input(index=told.idx)
        case d.TangentAOTInput():
            of = described_output(told.output)
            name = f"gradient.output_{of.place}" if of is not None and of.kind == "output" else None
            return Input("input", name, is_tangent=True)
        case d.SubclassGetAttrAOTInput():
            return _part_of(told.base, "" if told.attr == _LOCAL else f".{told.attr}")
        case d.SubclassSizeAOTInput():
            return _part_of(told.base, f".size.{told.idx}")
        case d.SubclassStrideAOTInput():
            return _part_of(told.base, f".stride.{told.idx}")
    return None


def _part_of(base: Any, suffix: str) -> Input | None:
    if (whole := _input(base)) is None:
        return None
    fqn = None if whole.fqn is None else whole.fqn + suffix
    return Input(whole.kind, fqn, whole.index, whole.suffix + suffix, whole.is_tangent)


def described_output(told: Any) -> Result | None:
    """Return what AOTAutograd says of an output, None if that is nothing that a text names."""
    match told:
        case d.PlainAOTOutput():
            return Result("output", told.idx)
        case d.SavedForBackwardsAOTOutput():
            return Result("kept")
        case d.GradAOTOutput():
            return Result("gradient", of=of) if (of := _input(told.grad_of)) is not None else None
        case d.InputMutationAOTOutput():
            return (
                Result("updated", of=of) if (of := _input(told.mutated_input)) is not None else None
            )
        case d.SubclassGetAttrAOTOutput():
            if (base := described_output(told.base)) is None or told.attr == _LOCAL:
                return base
            return Result(base.kind, base.place, base.of, f"{base.suffix}.{told.attr}")
    return None
