"""Prove for ranks that are alike by running one of them, which stands for all.

All ranks run one graph, so each value is a function of the rank: its elements are fingerprints of
expressions in which the rank is a variable. Only a collective looks at other ranks. It is carried
out on all of them: each contributes the one rank's elements with its own number put in for the
variable, and the results become one expression again, a choice by the rank. If two programs make
equal expressions, they are equal on each rank.

The converse does not hold: two different expressions may be equal on every rank. So if two programs
differ here, all ranks have to run.

Float64 numbers cannot depend on the rank in this way. So all ranks have the numbers of the one,
and a collective gives it what rank 0 would get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import Arithmetic, Elements
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.numbers import Numbers
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.graph.nodes import tensors_in, written_operands
from pytest_gtrainer.proofs.programs import GraphProgram
from pytest_gtrainer.worlds.simulate import AnyWorld, net_of_any, run_on_net
from pytest_gtrainer.worlds.simulated.interpreter.steps import CollectiveStep, Frame
from pytest_gtrainer.worlds.simulated.interpreter.values import RankRandomStates


class OneRankForAll(GraphProgram):
    """A graph of which one rank runs; its results are those of rank 0."""

    def __init__(self, program: GraphProgram) -> None:
        own = program.inputs[:1]
        super().__init__(program.gm, own, program.world, program.by_place)

    def _run_on_ranks(
        self,
        mode: ArithmeticMode,
        gm: fx.GraphModule,
        given: Sequence[Any],
        world: AnyWorld,
        random: RankRandomStates,
    ) -> list[dict[str, Any]]:
        size = net_of_any(world).size
        of_ranks = run_on_net(
            gm,
            [given[0]] * size,
            world,
            self._net_in(mode.arithmetic, world),
            random=random,
            collective_step=partial(CollectiveOfAlike, mode=mode),
            generates_code=False,
        )
        return of_ranks[:1]


def differ_only_in_floats(of_ranks: Sequence[Sequence[Any]]) -> bool:
    """Return whether the inputs of all ranks may differ in floating-point values only.

    Types, shapes, strides, dtypes and integers have to be equal.
    """
    first = of_ranks[0]
    for own in of_ranks[1:]:
        for ours, theirs in zip(first, own, strict=True):
            if type(ours) is not type(theirs):
                return False
            if not isinstance(ours, Tensor):
                # The text too: 0.0 equals -0.0, and operators give other results for it.
                if ours != theirs or repr(ours) != repr(theirs):
                    return False
                continue
            if ours.shape != theirs.shape or ours.stride() != theirs.stride():
                return False
            if ours.dtype != theirs.dtype:
                return False
            if not ours.is_floating_point() and not torch.equal(ours, theirs):
                return False

    return True


@dataclass(frozen=True, slots=True)
class CollectiveOfAlike(CollectiveStep):
    """A collective among ranks of which one has run."""

    mode: ArithmeticMode

    def value(self, frame: Frame, dying: frozenset[fx.Node]) -> Any:
        calls = self._calls(frame)
        if "inputs" in calls[0]:  # a coalesced collective: a list of tensors
            of_each = [self._on_ranks(tensor, len(calls)) for tensor in calls[0]["inputs"]]
            for call, own in zip(calls, zip(*of_each, strict=True), strict=True):
                call["inputs"] = list(own)
        else:
            for call, tensor in zip(
                calls, self._on_ranks(calls[0]["input"], len(calls)), strict=True
            ):
                call["input"] = tensor

        of_ranks = self._carry_out(calls)
        if isinstance(of_ranks[0], list):
            result: Any = list(map(self._by_rank, zip(*of_ranks, strict=True)))
        else:
            result = self._by_rank(of_ranks)
        if not written_operands(self.node):
            return result
        (name,) = [each.name for each in schema(self.node.target).arguments if each.is_write]
        written = self._calls(frame)[0][name]
        for target, new in zip(tensors_in(written), tensors_in(result), strict=True):
            target.copy_(new)
        return written

    def _on_ranks(self, tensor: Tensor, size: int) -> list[Tensor]:
        """Return a copy for each rank, with the number of this rank put in for the variable."""
        value = self.mode.shadows.read(tensor)
        if value is None:
            if not tensor.numel():
                return [tensor] * size
            # Other ranks may have other numbers; only those of this rank are here.
            raise NoMeaning(f"ranks exchange known numbers in {self.node.name}")

        copies = []
        with without_modes():
            if isinstance(self.mode.arithmetic, Numbers):
                filled = value.elements.expand(size, *value.elements.shape)
            else:
                filled = fill_in_ranks(self.mode.arithmetic, value.elements, size)
            for elements in filled:
                copies.append(tensor.detach().clone())
                self.mode.shadows.write(copies[-1], elements, value.fits)
        return copies

    def _by_rank(self, of_ranks: Sequence[Tensor]) -> Tensor:
        """Return one tensor for all ranks' results: a choice by the rank, unless they are equal."""
        first = of_ranks[0]
        # Ranks of a group share what they got, so there are few objects for many ranks.
        places: dict[int, int] = {}
        different: list[Tensor] = []
        class_of = []
        for own in of_ranks:
            if id(own) not in places:
                places[id(own)] = len(places)
                different.append(own)
            class_of.append(places[id(own)])

        if len(different) == 1 or not first.numel() or isinstance(self.mode.arithmetic, Numbers):
            return first

        elements: list[Elements] = []
        fits = set()
        for own in different:
            value = self.mode.shadows.read(own)
            if value is None or (elements and value.elements.shape != elements[0].shape):
                raise NoMeaning(f"ranks get tensors of other shapes from {self.node.name}")
            elements.append(value.elements)
            fits.add(value.fits)

        with without_modes():
            result = first.detach().clone()
            is_same = torch.ones((), dtype=torch.bool)
            for each in elements[1:]:
                is_same = is_same & (each == elements[0])
            chosen = hashing.mix(hashing.of_name("by rank", class_of), elements)
            by_rank = torch.where(is_same, elements[0], self.mode.arithmetic.narrow(chosen))
            self.mode.shadows.write(result, by_rank, fits.pop() if len(fits) == 1 else None)

        return result


def fill_in_ranks(arithmetic: Arithmetic, elements: Elements, size: int) -> Elements:
    """Return ``[size, *elements.shape]``: by rank the elements that it has.

    Zeros and infinities are the same on every rank.
    """
    key = arithmetic.order(elements)
    limits = torch.iinfo(torch.int64)
    is_constant = (key == 0) | (key == limits.min) | (key == limits.max)
    ranks = torch.arange(size).view(-1, *[1] * elements.ndim)
    filled = arithmetic.narrow(hashing.mix(hashing.of_name("on rank"), [elements, ranks]))
    return torch.where(is_constant, elements, filled)
