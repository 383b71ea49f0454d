"""The first module of a parallel model whose output, or the gradient of it, is another.

Forward hooks on both sides keep the elements that each call of a module returns, by FQN, and
hooks on these tensors keep their gradients. A *placement* says how the outputs of ranks make the
whole one: a list of joins, each a dimension of the mesh and one of the tensor along which outputs
are concatenated. That of a DTensor is known; that of a plain tensor is the one that makes it equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer._torch.wrapped_modules import name_without_wrappers
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.proofs.prove import common_factor

Placement: TypeAlias = tuple[tuple[str, int], ...]
ByRank: TypeAlias = dict[int, Tensor]

_MOST_JOINS = 2
_MOST_NAMES = 3


@dataclass(slots=True)
class Calls:
    """The elements that modules have returned, by FQN, and the gradients of these, in their order.

    Of a module that returns several tensors each has a name, with its place in brackets. Inputs
    are the tensors that a module was given by position.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)

    @contextmanager
    def followed(self, model: nn.Module, elements_of: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Keep what the modules of a model return inside."""

        def keep(into: dict[str, list[Tensor]], name: str, tensor: Tensor) -> None:
            into.setdefault(name, []).append(elements_of(tensor))

        def hook(fqn: str, module: nn.Module, given: Any, output: Any) -> None:
            inputs = [each for each in given if _is_followed(each)]
            for place, each in enumerate(inputs):
                keep(self.inputs, f"{fqn}[{place}]", each)
            leaves = pytree.tree_leaves(output)
            for place, leaf in enumerate(leaves):
                if not _is_followed(leaf):
                    continue
                name = fqn if len(leaves) == 1 else f"{fqn}[{place}]"
                keep(self.outputs, name, leaf)
                if leaf.requires_grad:
                    leaf.register_hook(partial(keep, self.gradients, name))

        handles = []
        for fqn, module in model.named_modules():
            name = name_without_wrappers(model, fqn)
            handles.append(module.register_forward_hook(partial(hook, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_followed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def first_module(
    result: str,
    found: Sequence[tuple[int, Calls]],
    wanted: Sequence[Calls],
    mesh: DeviceMesh | None,
    *,
    is_exact: bool,
    tied: Sequence[Sequence[str]] = (),
    gradients: Mapping[str, bool] | None = None,
) -> str:
    """Return where the models begin to differ, in words.

    Args:
        result: the name of the loss or gradient that differs.
        found: by rank the data coordinate, and the calls.
        wanted: the calls of the reference, by data coordinate.
        is_exact: False: gradients of outputs have a factor. A schedule divides by the number of
            micro-batches in the end, and the mean of a part of a batch is that of fewer tokens.
        tied: the FQNs of each parameter that several modules share.
        gradients: by the FQN of each parameter that has a gradient, whether it is right.
    """
    search = _Search(found, wanted, _Joins(mesh))
    parameter = result.removeprefix("gradient of ")
    shared = next((names for names in tied if parameter in names), [parameter])
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in shared))
    begins = search.in_forward()
    if not begins and result.startswith("buffer "):
        module = _named(result.split()[1].rpartition(".")[0])
        return f"{module} itself, which changes it: the outputs of all modules are right"
    if not begins and not result.startswith("gradient of "):
        begins = "the loss: the outputs of all modules are right"
    elif not begins:
        begins = search.in_backward(is_exact)
    if not begins:
        named = " or ".join(map(_named, owners))
        share = f", which share {parameter}" if len(owners) > 1 else ""
        begins = f"{named}{share}, or behind it: what is compared is right"
        if all(owner in search.placements for owner in owners):
            begins = f"{named} itself{share}: its output, and the gradient of that, are right"
            wrong, others = _others_alike(owners, gradients or {})
            if others and wrong == len(gradients or {}):
                return (
                    f"no module: outputs, and their gradients, are right, and those of all {wrong} "
                    "parameters differ. Look where gradients are added or divided"
                )
            if others:
                begins += f", as of {spell_some(others)}"
    if search.unknown and "itself" not in begins:
        shown = ", ".join(map(_named, search.unknown[:_MOST_NAMES]))
        count = len(search.unknown) - _MOST_NAMES
        more = f" and {count} more" if count > 0 else ""
        begins += f" (not compared, as a rank has another part of them: {shown}{more})"
    return begins


def _others_alike(
    owners: Sequence[str], gradients: Mapping[str, bool]
) -> tuple[int, Sequence[str]]:
    """Return how many gradients differ, and which modules but ``owners`` have one of these."""
    wrong = [fqn for fqn, is_right in gradients.items() if not is_right]
    modules = {fqn.rpartition(".")[0] for fqn in wrong}
    return len(wrong), sorted(map(_named, modules - set(owners)))


@dataclass(slots=True)
class _Search:
    """The comparison of all modules.

    Attributes:
        placements: of modules whose output is right, what makes it whole.
        unknown: modules of which nobody knows how their outputs make the whole one.
    """

    found: Sequence[tuple[int, Calls]]
    wanted: Sequence[Calls]
    joins: "_Joins"
    placements: dict[str, Placement] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def in_forward(self) -> str:
        """Return the first module whose output differs, in words; or ""."""
        differing: dict[str, str] = {}
        for name in self.wanted[0].outputs:
            own, whole = self._of_ranks(name, "outputs")
            if not own:
                continue
            placement, comparable = self.joins.find(own, whole)
            if placement is not None:
                self.placements[name] = placement
            elif comparable:
                relations = [self.joins.relation(joined, whole) for joined in comparable]
                differing[name] = max(relations, key=bool)
            else:
                self.unknown.append(name)
        for name, relation in differing.items():
            # What is inside of a module may be in another order, such as the rows of experts.
            if not any(_is_inside(name, right) for right in self.placements):
                return f"the output of {_named(name)}{relation}{self._said_of_inputs(name)}"
        return ""

    def _said_of_inputs(self, output: str) -> str:
        """Return that a module was given another input than the reference's; "" if it was not."""
        module = output.partition("[")[0]
        for name in self.wanted[0].inputs:
            if name.rpartition("[")[0] != module:
                continue
            own, whole = self._of_ranks(name, "inputs")
            placement, comparable = self.joins.find(own, whole) if own else (None, [])
            if placement is None and comparable:
                relations = [self.joins.relation(joined, whole) for joined in comparable]
                relation = max(relations, key=bool)
                before = _named(module.rpartition(".")[0])
                return f"; its input already differs{relation}: look before it in {before}"
        return ""

    def in_backward(self, is_exact: bool) -> str:
        """Return the first module behind which gradients differ, in words; or ""."""
        for name in self.wanted[0].gradients:
            own, whole = self._of_ranks(name, "gradients")
            if name not in self.placements or not own:
                continue
            joined = self.joins.joined(own, self.placements[name])
            if joined is not None and _are_equal(joined, whole):
                continue
            rank = min(own)
            factor = None
            if joined is not None and not is_exact:
                factor = common_factor(joined[rank], whole[rank])
            if factor in (None, 0):
                relation = self.joins.relation(own if joined is None else joined, whole)
                return f"the gradient of the output of {_named(name)}{relation}"
        return ""

    def _of_ranks(self, name: str, what: str) -> tuple[ByRank, ByRank]:
        """Return what the ranks that call a module have, and what they should have."""
        own, whole = {}, {}
        for rank, (coordinate, calls) in enumerate(self.found):
            mine = getattr(calls, what).get(name)
            expected = getattr(self.wanted[coordinate], what).get(name)
            if mine and expected:
                own[rank] = _as_one(mine, len(expected), expected[0].shape)
                whole[rank] = _as_one(expected, len(expected), expected[0].shape)
        return own, whole


def _named(name: str) -> str:
    return name or "the whole model"


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _as_one(calls: Sequence[Tensor], count: int, like: Sequence[int]) -> Tensor:
    """Return the tensors of all calls of a module as one; those of micro-batches are one batch."""
    rows = calls[0].shape[0] if calls[0].ndim else 0
    batches = like[0] // rows if rows and count == 1 else 1
    # A schedule calls each stage once more, and first, to infer shapes.
    if batches > 1 and len(calls) in (batches, batches + 1):
        return torch.cat(list(calls[-batches:]))
    same = [call for call in calls[:count] if call.shape == calls[0].shape]
    return same[0] if len(same) == 1 else torch.stack(same)


def _are_equal(found: Mapping[int, Tensor], wanted: Mapping[int, Tensor]) -> bool:
    return all(torch.equal(own, wanted[rank]) for rank, own in found.items())


class _Joins:
    """Joins of what the ranks of a mesh have."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._groups: dict[str, list[list[int]]] = {}
        for dim, name in enumerate(() if mesh is None else mesh.mesh_dim_names or ()):
            size = mesh.size(dim) if mesh is not None else 1
            if mesh is not None and size > 1:
                self._groups[name] = mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist()

    def find(self, own: ByRank, whole: ByRank) -> tuple[Placement | None, list[ByRank]]:
        """Return the placement that makes all equal, else what others make of the right shape."""
        comparable = []
        tries: list[tuple[Placement, ByRank]] = [((), own)]
        while tries:
            placement, joined = tries.pop(0)
            if all(each.shape == whole[rank].shape for rank, each in joined.items()):
                comparable.append(joined)
                if _are_equal(joined, whole):
                    return placement, []
            if len(placement) == _MOST_JOINS:
                continue
            used = [name for name, _ in placement]
            for name in self._groups:
                for dim in range(next(iter(whole.values())).ndim):
                    more = None if name in used else self._join(joined, name, dim, whole)
                    if more is not None:
                        tries.append(((*placement, (name, dim)), more))
        return None, comparable

    def joined(self, own: ByRank, placement: Placement) -> ByRank | None:
        """Return what ranks have, joined by a placement."""
        joined: ByRank | None = own
        for name, dim in placement:
            joined = None if joined is None else self._join(joined, name, dim, None)
        return joined

    def _join(self, own: ByRank, name: str, dim: int, like: ByRank | None) -> ByRank | None:
        """Concatenate along a dimension; None if that does not fit."""
        joined: ByRank = {}
        for group in self._groups[name]:
            parts = [own[rank] for rank in group if rank in own]
            if not parts:
                continue
            if len(parts) < len(group) or any(part.ndim <= dim for part in parts):
                return None
            extent = sum(part.shape[dim] for part in parts)
            if like is not None and extent > like[group[0]].shape[dim]:
                return None
            try:
                together = torch.cat(parts, dim)
            except RuntimeError:  # other shapes
                return None
            joined |= dict.fromkeys(group, together)
        return joined

    def relation(self, own: ByRank, whole: ByRank) -> str:
        """Return how what ranks have is related to what they should have, in words; or ""."""
        if any(each.shape != whole[rank].shape for rank, each in own.items()):
            return ""
        rank = min(own)
        for name, groups in self._groups.items():
            sums: ByRank = {}
            are_alike = True
            for group in groups:
                parts = [own[each] for each in group if each in own]
                are_alike = are_alike and all(torch.equal(part, parts[0]) for part in parts)
                if parts:
                    total = parts[0]
                    for part in parts[1:]:
                        total = Prime(P).add(total, part)
                    sums |= dict.fromkeys(group, total)
            # A sum of what is alike on all ranks is a factor.
            if not are_alike and all(torch.equal(sums[each], whole[each]) for each in own):
                return f": equal after a sum over {name!r}"
        factor = common_factor(own[rank], whole[rank])
        return "" if factor in (None, 1) else f", rank {rank}: {factor} times what is expected"
