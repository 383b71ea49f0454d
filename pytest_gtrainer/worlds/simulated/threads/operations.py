"""What each collective does with the calls of all members of a group, as few operations on stacked tensors.

A *call* is what one member gave: tensors, reduction, root, splits. Its *text* holds everything in which the
members must agree. ``run`` gets the calls of all members, in the order of their ranks in the group, and
fills every member's outputs. Reductions are the net's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from pytest_gtrainer.worlds.simulated.collectives import all_to_all, stacked

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.net import Net


PART_BYTES = 1 << 26
"""Of all members' inputs that are copied at a time to be reduced."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce op by name ("sum", "avg", ...), and the factor of a premultiplied sum."""

    name: str
    factor: float | None = None

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name} {self.factor:g}"

    def reduce(self, stacked: Tensor, by_net: Callable[[Tensor, str], Tensor]) -> Tensor:
        """Reduce ``[members, elements]``; a factor is applied to every input, in the dtype that is sent."""
        if self.name != "premul_sum":
            return by_net(stacked, self.name)
        return by_net(stacked * torch.tensor(self.factor, dtype=torch.float32).to(stacked.dtype), "sum")


@dataclass(kw_only=True)
class Call:
    """One member's part of a collective."""

    name: ClassVar[str]

    def text(self) -> str:
        """The collective and everything that all members must agree in."""
        return self.name

    def check(self, members: int) -> None:
        """Raise ValueError if the call cannot be right, whatever the others say."""

    @classmethod
    def misfit(cls, calls: Sequence[Self], ranks: Sequence[int]) -> str | None:
        """How calls of equal text contradict each other; ``ranks`` are the members' global ones."""
        return None

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        """Fill the outputs of all calls."""


class Barrier(Call):
    name = "barrier"


@dataclass(kw_only=True)
class AllReduce(Call):
    """Every tensor is reduced by itself, as NCCL does with coalesced ones (gloo joins those to one)."""

    name = "all_reduce"
    tensors: list[Tensor]
    reduction: Reduction

    def text(self) -> str:
        return f"{self.name} ({self.reduction}) of {texts(self.tensors)}"

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        reduction = calls[0].reduction
        for tensors in zip(*(call.tensors for call in calls), strict=True):
            if tensors[0].numel():
                result = reduction.reduce(_stack(tensors), net.all_reduce)
                _hand_out(tensors, result if result.dim() == 2 else result.expand(len(tensors), -1))


@dataclass(kw_only=True)
class ReduceScatter(Call):
    """``inputs[i]`` holds one part for each member, which leaves in ``outputs[i]``."""

    name = "reduce_scatter"
    outputs: list[Tensor]
    inputs: list[Tensor]
    reduction: Reduction

    def text(self) -> str:
        return f"{self.name} ({self.reduction}) of {texts(self.inputs)}"

    def check(self, members: int) -> None:
        for output, given in zip(self.outputs, self.inputs, strict=True):
            _check_parts(self.name, "input", given, "output", output, members)

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        for index, first in enumerate(calls[0].inputs):
            inputs = [call.inputs[index].detach().reshape(len(calls), -1) for call in calls]
            outputs = [call.outputs[index] for call in calls]
            for destinations in _few_at_a_time(inputs, net) if first.numel() else ():
                _reduce_scatter(inputs, outputs, destinations, calls[0].reduction, net)


def _few_at_a_time(inputs: Sequence[Tensor], net: Net) -> Iterator[range]:
    """The destinations in parts, as the members hold on to their inputs: a copy of all would double the memory."""
    members = len(inputs)
    step = max(1, PART_BYTES // inputs[0].nbytes) if net.by_destination else members
    yield from (range(start, min(start + step, members)) for start in range(0, members, step))


def _reduce_scatter(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], destinations: range, reduction: Reduction, net: Net
) -> None:
    """Reduce the shards of some destinations; ``inputs`` are ``[destination, element]``."""
    shards = slice(destinations.start, destinations.stop)
    some = destinations if net.by_destination else None
    result = reduction.reduce(
        _stack([given[shards] for given in inputs]), lambda rows, op: net.reduce_scatter(rows, op, some)
    )
    _hand_out(outputs[shards], result.reshape(len(destinations), -1))


@dataclass(kw_only=True)
class AllGather(Call):
    """Every member's ``inputs[i]`` end up side by side in ``outputs[i]``."""

    name = "all_gather"
    outputs: list[Tensor]
    inputs: list[Tensor]

    def text(self) -> str:
        return f"{self.name} of {texts(self.inputs)}"

    def check(self, members: int) -> None:
        for output, given in zip(self.outputs, self.inputs, strict=True):
            _check_parts(self.name, "output", output, "input", given, members)

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        for index in range(len(calls[0].inputs)):
            gathered = _stack([call.inputs[index] for call in calls])
            for call in calls:
                fill(call.outputs[index], gathered)


@dataclass(kw_only=True)
class AllGatherList(Call):
    """Every member's tensor arrives in a tensor of its own, of its own size."""

    name = "all_gather"
    outputs: list[Tensor]
    given: Tensor

    def text(self) -> str:
        return f"{self.name} into a list of {_dtype(self.given)}"

    def check(self, members: int) -> None:
        _check_count(self.name, self.outputs, members)

    @classmethod
    def misfit(cls, calls: Sequence[Self], ranks: Sequence[int]) -> str | None:
        wanted = [[output.numel() for output in call.outputs] for call in calls]
        return _size_misfit([[call.given.numel()] * len(calls) for call in calls], wanted, ranks)

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        for call in calls:
            for output, source in zip(call.outputs, calls, strict=True):
                fill(output, source.given)


@dataclass(kw_only=True)
class Broadcast(Call):
    name = "broadcast"
    tensors: list[Tensor]
    root: int

    def text(self) -> str:
        return f"{self.name} from member {self.root} of {texts(self.tensors)}"

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        source = calls[calls[0].root]
        for call in calls:
            if call is not source:
                for tensor, sent in zip(call.tensors, source.tensors, strict=True):
                    fill(tensor, sent)


@dataclass(kw_only=True)
class Gather(Call):
    name = "gather"
    outputs: list[Tensor]
    given: Tensor
    root: int

    def text(self) -> str:
        return f"{self.name} to member {self.root} of {texts([self.given])}"

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        root = calls[calls[0].root]
        _check_count(cls.name, root.outputs, len(calls))
        for output, call in zip(root.outputs, calls, strict=True):
            fill(output, call.given)


@dataclass(kw_only=True)
class Scatter(Call):
    name = "scatter"
    output: Tensor
    inputs: list[Tensor]
    root: int

    def text(self) -> str:
        return f"{self.name} from member {self.root} of {texts([self.output])}"

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        root = calls[calls[0].root]
        _check_count(cls.name, root.inputs, len(calls))
        for call, given in zip(calls, root.inputs, strict=True):
            fill(call.output, given)


@dataclass(kw_only=True)
class AllToAll(Call):
    """Rows of ``given`` go to the members by ``sends``, rows of ``output`` come from them by ``receives``.

    Sizes and splits are in rows of ``width`` elements.
    """

    name = "all_to_all"
    output: Tensor
    given: Tensor
    sends: list[int]
    receives: list[int]
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = _width(self.given)

    def text(self) -> str:
        return f"{self.name} of rows of {_dtype(self.given)}[{self.width}]"

    def check(self, members: int) -> None:
        for what, tensor, splits in (("input", self.given, self.sends), ("output", self.output, self.receives)):
            rows = tensor.shape[0] if tensor.dim() else 0
            if len(splits) != members or sum(splits) != rows:
                raise ValueError(
                    f"all_to_all: the {what} has {rows} rows, but its splits {splits} have {len(splits)} entries "
                    f"for {members} ranks that sum to {sum(splits)}"
                )

    @classmethod
    def misfit(cls, calls: Sequence[Self], ranks: Sequence[int]) -> str | None:
        return _size_misfit([call.sends for call in calls], [call.receives for call in calls], ranks)

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        if not calls[0].width:
            return
        rows = [call.given.detach().reshape(-1, calls[0].width) for call in calls]
        for call, part in zip(calls, all_to_all(rows, [call.sends for call in calls]), strict=True):
            fill(call.output, part)


@dataclass(kw_only=True)
class AllToAllList(Call):
    """``inputs[i]`` goes to member i, ``outputs[i]`` comes from it."""

    name = "all_to_all"
    outputs: list[Tensor]
    inputs: list[Tensor]

    def text(self) -> str:
        return f"{self.name} of a list of {_dtype(self.inputs[0])}"

    def check(self, members: int) -> None:
        _check_count(self.name, self.inputs, members)
        _check_count(self.name, self.outputs, members)

    @classmethod
    def misfit(cls, calls: Sequence[Self], ranks: Sequence[int]) -> str | None:
        sent = [[given.numel() for given in call.inputs] for call in calls]
        return _size_misfit(sent, [[output.numel() for output in call.outputs] for call in calls], ranks)

    @classmethod
    def run(cls, calls: Sequence[Self], net: Net) -> None:
        for destination, call in enumerate(calls):
            for output, source in zip(call.outputs, calls, strict=True):
                fill(output, source.inputs[destination])


def _size_misfit(
    sent: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], ranks: Sequence[int]
) -> str | None:
    """``sent[i][j]`` is what member i has for j, ``wanted[j][i]`` what j expects from i."""
    for source, row in enumerate(sent):
        for destination, size in enumerate(row):
            if wanted[destination][source] != size:
                return (
                    f"rank {ranks[source]} sends {size} to rank {ranks[destination]}, "
                    f"which expects {wanted[destination][source]} from it"
                )
    return None


def _check_parts(name: str, whole_name: str, whole: Tensor, part_name: str, part: Tensor, members: int) -> None:
    if whole.numel() != part.numel() * members or whole.dtype != part.dtype:
        raise ValueError(
            f"{name}: the {whole_name} {texts([whole])} must be {members} times the {part_name} {texts([part])}"
        )


def _check_count(name: str, tensors: Sequence[Tensor], members: int) -> None:
    if len(tensors) != members:
        raise ValueError(f"{name}: a list of {len(tensors)} tensors for {members} ranks")


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """``[members, elements]``."""
    return stacked([tensor.detach() for tensor in tensors])


def _hand_out(outputs: Sequence[Tensor], rows: Tensor) -> None:
    for output, row in zip(outputs, rows, strict=True):
        fill(output, row)


def fill(output: Tensor, values: Tensor) -> None:
    """Write ``values``, of as many elements and the same dtype, to ``output``."""
    if texts([output]) != texts([values]):
        raise ValueError(f"a collective gives {texts([values])}, but its output is {texts([output])}: make them equal")
    # .data: autograd does not see that a collective writes, as it does not with other backends
    output.data.copy_(values.detach().reshape(output.shape))


def _width(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def texts(tensors: Sequence[Tensor]) -> str:
    """Dtypes and sizes.

    >>> texts([torch.zeros(2, 3), torch.zeros(0, dtype=torch.int8)])
    'float32[6], int8[0]'
    """
    return ", ".join(f"{_dtype(tensor)}[{tensor.numel()}]" for tensor in tensors)
