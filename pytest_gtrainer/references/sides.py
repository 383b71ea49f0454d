"""The sides of ``assert_same_model``: an unsharded model, and one rank's part of a parallel one.

A *data coordinate* is the place of a rank along the data dimensions of a mesh. A *part* of a whole
tensor is what a rank holds of it that was sliced by hand, so no DTensor says where it belongs.
"""

import inspect
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer import facts
from pytest_gtrainer._torch.arithmetic import is_compiled
from pytest_gtrainer._torch.fsdp2 import groups_of, parameter_groups, precisions
from pytest_gtrainer._torch.random_states import random_states_kept, seed_torch, without_modes
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer._torch.wrapped_modules import kept_tensors, name_without_wrappers
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.mode import ArithmeticMode, CountReads
from pytest_gtrainer.facts import check_type
from pytest_gtrainer.proofs.contexts import Elements
from pytest_gtrainer.proofs.further_runs import Chances
from pytest_gtrainer.proofs.state import known_numbers
from pytest_gtrainer.references.buffers import (
    BuffersBefore,
    Changed,
    ParametersBefore,
    elements_of,
    lifted,
    whole_of,
)
from pytest_gtrainer.references.first_module import Calls

__tracebackhide__ = facts.hides_frames

Step: TypeAlias = Callable[..., Any]
Batch: TypeAlias = Callable[[int], Sequence[Any]]
Combine: TypeAlias = Literal["mean", "sum"] | Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole tensor: ``length`` of dimension ``dim``, from ``start`` on."""

    dim: int
    start: int
    length: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(slots=True)
class SideResults:
    """One side of a comparison: a rank, or the reference, and the elements that it has computed.

    Attributes:
        losses: by data coordinate.
        whole: what the reference combines them to.
        exponents: by data coordinate; losses are equal, too, if these are.
        real: the real numbers of the losses, by data coordinate and of the inputs that gave them.
        given: the same keys, of all inputs of this side, also where a rank has no loss.
        parameters: the FQNs of all parameters that this side holds.
        gradients: whole ones, by FQN; without those of parameters that have none.
        sizes: by FQN the sum of the sizes of a gradient's real numbers.
        tied: the FQNs of each parameter that has several.
        parts: of tensors that were sliced by hand, which part of the whole this is.
        used_local: the patterns of ``local`` that said so.
        is_scaled: gradients are multiplied by an abstract number.
        calls: what modules return, by data coordinate, if they are followed.
        of_batches: of the reference, if modules are followed: the gradients of each data coordinate
            by itself.
        precisions: policies of mixed precision, in words.
        chances: what may make two functions equal by chance.
        has_functions: exp, log or a root was a function of which little is known.
        arithmetic: in which this side has run, if it was noted.
        reads: how many real numbers the model and its step have asked for.
        known: names of buffers, and of modules that are not registered: their numbers stay.
        drawn: operators by which the step has drawn random numbers; of the reference alone.
        is_compiled: a module is compiled, and has run as it was before.
        has_communicated: of the reference: its step, or what builds it, came to a collective.
        reduced_dims: those along which FSDP2 or DDP reduces gradients.
        buffers: by data coordinate, and FQN, those that the step has changed.
        held_buffers: the FQNs of all buffers of this side.
        late_buffers: of the reference: those that one backward changes for several coordinates.
        changed_parameters: the FQNs of parameters whose numbers the step has changed.
        found_buffers, wanted_buffers: what is compared of the buffers of this rank, by result.
        divided_dims: dimensions of the mesh along which this rank has a part of a parameter.
        used_dims: dimensions of the mesh along which the step of this rank communicates.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    whole: Tensor | None = None
    exponents: dict[int, Tensor | None] = field(default_factory=dict)
    real: dict[tuple[int, float], float] = field(default_factory=dict)
    given: set[tuple[int, float]] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    used_local: set[str] = field(default_factory=set)
    is_scaled: bool = True
    calls: dict[int, Calls] = field(default_factory=dict)
    of_batches: list[dict[str, Tensor]] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    chances: Chances = field(default_factory=Chances)
    has_functions: bool = False
    arithmetic: Arithmetic | None = None
    reads: int = 0
    known: list[str] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)
    is_compiled: bool = False
    has_communicated: bool = False
    divided_dims: set[str] = field(default_factory=set)
    used_dims: set[str] = field(default_factory=set)
    reduced_dims: set[str] = field(default_factory=set)
    buffers: dict[int, dict[str, Changed]] = field(default_factory=dict)
    held_buffers: set[str] = field(default_factory=set)
    late_buffers: set[str] = field(default_factory=set)
    changed_parameters: set[str] = field(default_factory=set)
    found_buffers: dict[str, Tensor] = field(default_factory=dict)
    wanted_buffers: dict[str, Tensor] = field(default_factory=dict)

    def note(self, mode: ArithmeticMode) -> None:
        """Note what may make two functions equal, or unequal, by chance."""
        self.arithmetic = arithmetic = mode.arithmetic
        self.reads = sum(mode.reads.values())
        self.chances = Chances.of(arithmetic)
        self.has_functions = bool(arithmetic.exponentials or arithmetic.roots)

    def results(self) -> dict[str, Tensor]:
        losses = {
            f"loss of data coordinate {coordinate}": own for coordinate, own in self.losses.items()
        }
        gradients = {f"gradient of {fqn}": own for fqn, own in self.gradients.items()}
        return {**losses, **gradients, **self.found_buffers}

    def all_results(self) -> dict[str, Tensor]:
        """Return the results, with the buffers of all data coordinates."""
        found = self.results()
        for coordinate, changed in self.buffers.items():
            for fqn, each in changed.items():
                found[_name_of_buffer(fqn, coordinate)] = each.after
        return found

    def match_buffers(self, whole: "SideResults") -> None:
        """Match the buffers that this rank's step changes with those of the unsharded side's."""
        for coordinate, changed in self.buffers.items():
            expected = whole.buffers.get(coordinate, {})
            both_have = self.held_buffers & whole.held_buffers - whole.late_buffers
            for fqn in sorted(both_have & (changed.keys() | expected.keys())):
                name, own, wanted = _name_of_buffer(fqn, coordinate), changed.get(fqn), None
                if fqn in expected:
                    wanted = expected[fqn]
                    if fqn in self.parts:
                        part = self.parts[fqn]
                        wanted = Changed(part.of(wanted.before), part.of(wanted.after))
                # A side that does not change it has the numbers that the other began with.
                own, wanted = own or wanted, wanted or own
                assert own is not None
                assert wanted is not None
                is_changed = fqn in changed, fqn in expected
                self.found_buffers[name] = own.after if is_changed[0] else own.before
                self.wanted_buffers[name] = wanted.after if is_changed[1] else wanted.before

    def part_of(self, whole: "SideResults") -> dict[str, Tensor]:
        """Return the results of the unsharded side that this side should have."""
        wanted = whole.results()
        for fqn, part in self.parts.items():
            name = f"gradient of {fqn}"
            if name in wanted:
                wanted[name] = part.of(wanted[name])
        return wanted | self.wanted_buffers


def _name_of_buffer(fqn: str, coordinate: int) -> str:
    return f"buffer {fqn} of data coordinate {coordinate}"


@dataclass(frozen=True, slots=True)
class Models:
    """The arguments of ``assert_same_model``.

    Attributes:
        is_shared: on real ranks the reference runs on the first one, for all.
    """

    parallel: Callable[..., Any]
    reference: Callable[[], nn.Module]
    step: Step
    batch: Batch
    data_dims: Sequence[str]
    combine: Combine = "mean"
    local: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    ignore_buffers: Sequence[str] = ()
    is_shared: bool = False

    def ignores(self, fqn: str) -> bool:
        """Return whether a buffer is not to be compared."""
        return any(fnmatchcase(fqn, pattern) for pattern in self.ignore_buffers)

    def run_reference(
        self, mode: ArithmeticMode, coordinates: int, is_scaled: bool, follows: bool = False
    ) -> SideResults:
        """Run the unsharded model: the steps of all data coordinates, combined to one loss.

        Args:
            follows: keep what modules return, and their gradients: those of each loss by itself.
        """
        side, elements = SideResults(is_scaled=is_scaled), Elements(mode)
        scale = elements if is_scaled else None
        with mode, CountReads(mode):
            model = self.new_reference(elements)
            side.known = known_numbers(model)
            buffers, parameters = BuffersBefore(mode, model), ParametersBefore(model)
            losses = []
            for coordinate in range(coordinates):
                inputs, total = self.inputs(elements, coordinate)
                side.given.add((coordinate, total))
                calls = side.calls[coordinate] = Calls()
                mode.arithmetic.drawn.clear()  # what initialised weights, and made the batch
                with (
                    calls.followed(model, partial(elements_of, mode)) if follows else nullcontext()
                ):
                    loss = self.step(model, *inputs)
                side.drawn |= mode.arithmetic.drawn
                side.buffers[coordinate] = self._changed(buffers)
                if coordinate + 1 < coordinates:
                    buffers.put_back()
                if not isinstance(loss, Tensor):
                    raise TypeError(
                        f"the step returns {_spell_type(loss)} for the reference: return the loss"
                    )
                _check_one_number(loss, "the step", "for the reference")
                side.losses[coordinate] = elements_of(mode, loss)
                side.exponents[coordinate] = exponents_of(mode, loss)
                side.real[coordinate, total] = real_number(loss)
                if follows and loss.requires_grad:
                    backward(loss, scale)
                    _take_gradients(side, mode, model)
                    side.of_batches.append(side.gradients)
                    side.gradients = {}
                    model.zero_grad()
                losses.append(loss)
            if not follows:
                whole = self._combined(losses)
                if not isinstance(whole, Tensor) or not whole.requires_grad:
                    raise ValueError(
                        "the loss of the reference depends on no parameter that requires a "
                        "gradient: is it a constant, is it detached, or is the model frozen?"
                    )
                side.whole = elements_of(mode, whole)
                backward(whole, scale)
            _take_gradients(side, mode, model)
            self._take_late_buffers(side, buffers, coordinates)
            side.changed_parameters = parameters.changed()
        side.has_communicated = mode.has_communicated
        return side

    def _changed(self, buffers: BuffersBefore) -> dict[str, Changed]:
        """Return the buffers that a step has changed, and that are to be compared."""
        found = buffers.changed()
        return {fqn: each for fqn, each in found.items() if not self.ignores(fqn)}

    def _take_late_buffers(
        self, side: SideResults, buffers: BuffersBefore, coordinates: int
    ) -> None:
        """Take the buffers that a backward changes, too, as a model that is checkpointed does."""
        side.held_buffers = buffers.names
        late, known = self._changed(buffers), side.buffers[coordinates - 1]
        if coordinates == 1:
            side.buffers[0] = late
            return
        # One backward serves all data coordinates.
        for name in late.keys() | known.keys():
            either = late.get(name), known.get(name)
            if None in either or not torch.equal(late[name].after, known[name].after):
                side.late_buffers.add(name)

    def _combined(self, losses: Sequence[Tensor]) -> Tensor:
        if not isinstance(self.combine, str):
            whole = self.combine(losses)
            if not isinstance(whole, Tensor):
                raise TypeError(
                    f"combine returns {_spell_type(whole)}: return one loss, made of all that it "
                    "is given"
                )
            _check_one_number(whole, "combine", "for all losses")
            return whole
        total: Any = sum(losses)
        return total / len(losses) if self.combine == "mean" else total

    def run_parallel(
        self,
        mode: ArithmeticMode,
        mesh: DeviceMesh | None,
        follows: bool = False,
        disturbed: str = "",
    ) -> SideResults:
        """Run this rank's model on this rank's batch, inside of the mode.

        Args:
            follows: keep what modules return.
            disturbed: a dimension of the mesh: what the step gets of ranks along it is changed.
        """
        side, elements = SideResults(), Elements(mode)
        model, step = self._build_parallel(mesh)
        self._load(side, model, dict(kept_tensors(self.new_reference(elements))), mesh)
        side.precisions = precisions(model)
        side.is_compiled = any(map(is_compiled, model.modules()))
        buffers, parameters = BuffersBefore(mode, model), ParametersBefore(model)
        coordinate, _ = data_coordinate(mesh, self.data_dims)
        inputs, total = self.inputs(elements, coordinate)
        side.given.add((coordinate, total))
        calls = side.calls[coordinate] = Calls()
        with _groups_used() as groups, _disturbed(mode, mesh, disturbed):
            with calls.followed(model, partial(elements_of, mode)) if follows else nullcontext():
                loss = step(model, *inputs)
            if isinstance(loss, Tensor):
                _check_one_number(loss, "the step", "for the parallel model")
            side.is_scaled = isinstance(loss, Tensor) and loss.requires_grad
            if side.is_scaled:
                backward(loss, elements)
        side.reduced_dims = _reduced_dims(model, mesh)
        if mesh is not None:
            side.divided_dims = self._divided_dims(side, model, mesh)
            for ranks in groups:
                side.used_dims |= _dims_between(mesh, ranks)
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(
                f"the step returns {_spell_type(loss)} for the parallel model: return the loss, or "
                "None on a stage of a pipeline that has none"
            )
        if loss is not None:
            side.losses[coordinate] = elements_of(mode, loss)
            side.exponents[coordinate] = exponents_of(mode, loss)
            side.real[coordinate, total] = real_number(loss)
        _take_gradients(side, mode, model)
        side.buffers[coordinate], side.held_buffers = self._changed(buffers), buffers.names
        side.changed_parameters = parameters.changed()
        return side

    @property
    def takes_mesh(self) -> bool:
        """Return whether the function that builds the parallel model takes an argument."""
        return bool(inspect.signature(self.parallel).parameters)

    def _build_parallel(self, mesh: DeviceMesh | None) -> tuple[nn.Module, Step]:
        """Build this rank's model; its step comes second."""
        takes_mesh = mesh is not None and self.takes_mesh
        built = self.parallel(mesh) if takes_mesh else self.parallel()
        is_pair = isinstance(built, tuple) and len(built) == 2
        model, step = built if is_pair else (built, self.step)
        if not isinstance(model, nn.Module) or not callable(step):
            raise TypeError(
                f"parallel returns {reprlib.repr(built)}: return the nn.Module that it builds, or "
                "a tuple of it and its own step"
            )
        return model, step

    def _load(
        self,
        side: SideResults,
        model: nn.Module,
        whole: Mapping[str, Tensor],
        mesh: DeviceMesh | None,
    ) -> None:
        """Load the unsharded state into this rank's model, by FQN and placement."""
        for name, own in kept_tensors(model):
            if name not in whole:
                raise ValueError(
                    f"the parallel model has {name}, and the reference has not: build both with "
                    "the same FQNs"
                )
            value = whole[name]
            if own.shape != value.shape:
                side.parts[name] = self._part_of(side, name, own, value, mesh)
                value = side.parts[name].of(value)
            if isinstance(own, DTensor):
                # Every rank has the whole tensor, so none scatters: a scatter needs even shards.
                placed = distribute_tensor(
                    value.detach(), own.device_mesh, own.placements, src_data_rank=None
                )
                own, value = own.to_local(), placed.to_local()
            own.detach().copy_(value)

    def _divided_dims(self, side: SideResults, model: nn.Module, mesh: DeviceMesh) -> set[str]:
        """Return the dimensions of a mesh along which this rank has a part of a parameter."""
        dims = set()
        for pattern, (mesh_dim, _) in self.local.items():
            if any(fnmatchcase(name, pattern) for name in side.parts):
                dims.add(mesh_dim)
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                continue
            own_mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    ranks = dist.get_process_group_ranks(own_mesh.get_group(dim))
                    dims |= _dims_between(mesh, ranks)
        return dims

    def _part_of(
        self, side: SideResults, name: str, own: Tensor, whole: Tensor, mesh: DeviceMesh | None
    ) -> Part:
        """Return which part of a whole tensor this rank's own is, by the mapping of ``local=``."""
        shapes = f"{name} has shape {list(own.shape)}, and {list(whole.shape)} in the reference"
        for pattern, (mesh_dim, dim) in self.local.items():
            if mesh is None or not fnmatchcase(name, pattern):
                continue
            names = mesh.mesh_dim_names or ()
            count, place = mesh.size(names.index(mesh_dim)), mesh.get_local_rank(mesh_dim)
            # As torch.chunk, so as DTensor: the last ranks have less, or nothing.
            extent = whole.shape[dim]
            each = -(-extent // count)
            start = min(place * each, extent)
            part = Part(dim, start, min(each, extent - start))
            side.used_local.add(pattern)
            expected = part.of(whole).shape
            if own.shape != expected:
                raise ValueError(
                    f"{shapes}: of a slice along {mesh_dim!r}, local[{pattern!r}], "
                    f"{list(expected)} is expected"
                )
            return part
        raise ValueError(
            f"{shapes}: if it was sliced by hand, say along which dimension of the mesh and of the "
            f'tensor, such as local={{"{name}": ("ep", 0)}}'
        )

    def build_reference(self) -> nn.Module:
        with random_states_kept():
            seed_torch(0)
            model = self.reference()
        check_type(model, nn.Module, "what reference returns", "the nn.Module that it builds")
        return model

    def new_reference(self, elements: Elements) -> nn.Module:
        model = self.build_reference()
        elements.make_abstract(model)
        return model

    def batch_of(self, coordinate: int) -> tuple[Any, ...]:
        """Return the inputs of a data coordinate; refuse a tensor, whose rows would each be one."""
        batch: Any = self.batch(coordinate)
        give = "a tuple of the step's inputs, one as (x,)"
        check_type(batch, (tuple, list), f"batch({coordinate})", give)
        if not batch:
            raise ValueError(f"batch({coordinate}) is empty: give {give}")
        return tuple(batch)

    def inputs(self, elements: Elements, coordinate: int) -> tuple[Any, float]:
        """Return the inputs of a data coordinate, and the sum of their real numbers."""
        with random_states_kept():
            # Both sides get the same numbers, also if the batch draws them.
            seed_torch(1 + coordinate)
            leaves, spec = pytree.tree_flatten(self.batch_of(coordinate))
        total = 0.0
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                total += float(leaf.detach().double().sum())
                # A copy, as a batch may be given again.
                leaves[place] = leaf.detach().clone()
                elements.make_abstract(leaves[place], ("batch", coordinate, place))
        return pytree.tree_unflatten(leaves, spec), total


def _spell_type(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _check_one_number(loss: Tensor, who: str, of: str) -> None:
    """Refuse what ``loss.backward()`` would refuse without a gradient for it."""
    if loss.numel() != 1:
        raise ValueError(
            f"{who} returns a tensor of shape {list(loss.shape)} {of}, whose gradients nobody can "
            "add up: return the loss, one number, as its mean or sum"
        )


def backward(loss: Tensor, elements: Elements | None) -> None:
    """Compute gradients, times an abstract number if there are ``elements``.

    Else those that depend on whole numbers alone, such as counts of tokens, would be known numbers.
    """
    times = torch.ones_like(loss)
    if elements is not None:
        elements.make_abstract(times, "gradient of the loss")
    loss.backward(times)


def _take_gradients(side: SideResults, mode: ArithmeticMode, model: nn.Module) -> None:
    # Each name of a tied parameter: ranks of a pipeline may hold it by different ones.
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        name = name_without_wrappers(model, fqn)
        side.parameters.add(name)
        names.setdefault(id(parameter), []).append(name)
        if parameter.grad is not None:
            gradient = whole_of(parameter.grad)
            side.gradients[name] = elements_of(mode, gradient)
            with without_modes():
                side.sizes[name] = float(gradient.double().abs().sum())
    side.tied = [several for several in names.values() if len(several) > 1]


def exponents_of(mode: ArithmeticMode, loss: Tensor) -> Tensor | None:
    """Return what a loss is compared by instead of its elements; None if there is nothing."""
    elements = lifted(mode, loss)
    with without_modes():
        return mode.arithmetic.compared_instead(elements)


def real_number(loss: Tensor) -> float:
    """Return the real number beside the elements of a loss."""
    whole = loss.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    with without_modes():
        return float(whole.double().sum())


def data_coordinate(mesh: DeviceMesh | None, data_dims: Sequence[str]) -> tuple[int, int]:
    """Return this rank's place along the data dimensions of a mesh, and how many there are."""
    place, count = 0, 1
    if mesh is None:
        return place, count
    names = mesh.mesh_dim_names or ()
    for name in data_dims:
        size = mesh.size(names.index(name))
        place = place * size + mesh.get_local_rank(name)
        count *= size
    return place, count


@contextmanager
def _groups_used() -> Iterator[set[tuple[int, ...]]]:
    """Keep the ranks of each group in which this rank communicates inside."""
    found: set[tuple[int, ...]] = set()
    thread = threading.get_ident()

    def communicates(ranks: tuple[int, ...]) -> None:
        if threading.get_ident() == thread:  # simulated ranks are threads
            found.add(ranks)

    with facts.watching({"communicates": communicates}):
        yield found


@contextmanager
def _disturbed(mode: ArithmeticMode, mesh: DeviceMesh | None, dim: str) -> Iterator[None]:
    """Change the floating-point numbers that ranks along a dimension exchange inside.

    Each element becomes an unknown function of itself, so ranks that get equal numbers go on with
    equal ones, and no norm takes the change out again as it does with a factor or a summand.
    """
    if mesh is None or not dim:
        yield
        return
    thread = threading.get_ident()

    def exchanged(output: Tensor, ranks: tuple[int, ...]) -> None:
        # Simulated ranks are threads. The last one that comes to a collective fills all outputs.
        if threading.get_ident() != thread or not output.is_floating_point():
            return
        if dim not in _dims_between(mesh, ranks):
            return
        value = mode.shadows.read(output)
        with without_modes():
            output.mul_(1.5).add_(0.25)  # a step may also read the real numbers
            if value is not None:
                own = mode.arithmetic.compared(value.elements)
                hashed = hashing.mix(hashing.of_name("disturbed"), [own])
                mode.write(output, mode.arithmetic.narrow(hashed), value.fits)

    with facts.watching({"exchanged": exchanged}):
        yield


def _reduced_dims(model: nn.Module, mesh: DeviceMesh | None) -> set[str]:
    """Return the dimensions of a mesh along which FSDP2 or DDP reduces gradients."""
    if mesh is None:
        return set()
    groups = [each for group in parameter_groups(model) for each in groups_of(group)]
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            groups.append(module.process_group)
    dims = set()
    for group in groups:
        if group is not None:
            dims |= _dims_between(mesh, dist.get_process_group_ranks(group))
    return dims


def _dims_between(mesh: DeviceMesh, ranks: Sequence[int]) -> set[str]:
    """Return the dimensions of a mesh in which the coordinates of these ranks differ."""
    with without_modes():
        of_ranks = torch.isin(mesh.mesh, torch.tensor(ranks)).nonzero().tolist()
    dims = set()
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if len({coordinates[dim] for coordinates in of_ranks}) > 1:
            dims.add(name)
    return dims


def groups_along(mesh: DeviceMesh, dims: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ranks that differ in these dimensions alone, in the order of the last one."""
    names = list(mesh.mesh_dim_names or ())
    inner = [names.index(name) for name in dims]
    others = [dim for dim in range(mesh.ndim) if dim not in inner]
    moved = mesh.mesh.permute(*others, *inner)
    size = 1
    for dim in inner:
        size *= mesh.size(dim)
    yield from moved.reshape(-1, size).tolist()
