"""Does a parallel model compute the unsharded one?

Both run in the field, where every order of additions gives the same: so there is no tolerance and
no control. Both get the same numbers: torch's own code loads the unsharded state into the parallel
model, by FQN and placement.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_states_kept, without_modes
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.numerics.record import normalised
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.contexts import Elements, has_real_ranks
from pytest_gtrainer.proofs.on_ranks import exchange_on_ranks, gathered_from_ranks
from pytest_gtrainer.proofs.proof import AnotherFunction, Kind, Place, Proof
from pytest_gtrainer.proofs.prove import AGAIN, common_factor
from pytest_gtrainer.references.simulated import mesh_of
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.simulated.threads.run import run_threads

Step = Callable[..., Tensor]
Batch = Callable[[int], Sequence[Any]]


@dataclass(slots=True)
class _Made:
    """The elements that one side has made.

    Attributes:
        losses: by data coordinate.
        gradients: whole ones, by FQN; without those of parameters that have none.
        decides: elements were compared or sorted, or had few square roots.
        has_exponentials: exp was a function of which nothing is known.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    decides: bool = False
    has_exponentials: bool = False

    def note(self, arithmetic: Arithmetic) -> None:
        """Note what may make two functions equal, or unequal, by chance."""
        self.decides = bool(arithmetic.decisions + arithmetic.roots)
        self.has_exponentials = bool(arithmetic.exponentials)

    def results(self) -> dict[str, Tensor]:
        losses = {f"loss of data coordinate {place}": own for place, own in self.losses.items()}
        return {**losses, **{f"gradient of {fqn}": own for fqn, own in self.gradients.items()}}


@dataclass(frozen=True, slots=True)
class _Models:
    """The arguments of ``assert_same_model``."""

    parallel: Callable[..., nn.Module]
    reference: Callable[[], nn.Module]
    step: Step
    batch: Batch
    data_dims: Sequence[str]

    def run_reference(self, mode: ArithmeticMode, coordinates: int) -> _Made:
        """Run the unsharded model: the mean of the steps of all data coordinates."""
        made, elements = _Made(), Elements(mode)
        with mode:
            model = self._new_reference(elements)
            losses = []
            for coordinate in range(coordinates):
                losses.append(self.step(model, *self._inputs(elements, coordinate)))
                made.losses[coordinate] = _elements_of(mode, losses[-1])
            _backward(sum(losses) / coordinates, elements)
            for fqn, parameter in model.named_parameters():
                if parameter.grad is not None:
                    made.gradients[normalised(fqn)] = _elements_of(mode, parameter.grad)
        return made

    def run_parallel(self, mode: ArithmeticMode, mesh: DeviceMesh | None) -> _Made:
        """Run this rank's model on this rank's batch, inside of the mode."""
        made, elements = _Made(), Elements(mode)
        takes_mesh = mesh is not None and bool(inspect.signature(self.parallel).parameters)
        model = self.parallel(mesh) if takes_mesh else self.parallel()
        whole = self._new_reference(elements)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, whole.state_dict(), options=options)
        coordinate, _ = data_coordinate(mesh, self.data_dims)
        loss = self.step(model, *self._inputs(elements, coordinate))
        _backward(loss, elements)
        made.losses[coordinate] = _elements_of(mode, loss)
        for fqn, parameter in model.named_parameters():
            if parameter.grad is not None:
                name = normalised(fqn.removeprefix("module."))
                made.gradients[name] = _elements_of(mode, parameter.grad)
        return made

    def _new_reference(self, elements: Elements) -> nn.Module:
        with random_states_kept():
            torch.manual_seed(0)
            model = self.reference()
        elements.make_abstract(model)
        return model

    def _inputs(self, elements: Elements, coordinate: int) -> Any:
        leaves, spec = pytree.tree_flatten(tuple(self.batch(coordinate)))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                # A copy, as a batch may be given again.
                leaves[place] = leaf.detach().clone()
                elements.make_abstract(leaves[place], ("batch", coordinate, place))
        return pytree.tree_unflatten(leaves, spec)


def _backward(loss: Tensor, elements: Elements) -> None:
    """Compute gradients times an abstract number.

    Else those that depend on whole numbers alone, such as counts of tokens, would be known numbers.
    """
    times = torch.ones_like(loss)
    elements.make_abstract(times, "gradient of the loss")
    loss.backward(times)


def _elements_of(mode: ArithmeticMode, tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, whole if it is sharded; also those of known numbers."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    value = mode.shadows.read(whole)
    with without_modes():
        elements = mode.arithmetic.lift(whole if value is None else value)
        return mode.arithmetic.compared(elements).clone()


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


@facts.check
def assert_same_model(
    parallel: Callable[..., nn.Module],
    reference: Callable[[], nn.Module],
    step: Step,
    batch: Batch,
    *,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] = ("dp",),
) -> Proof:
    """Fail unless a parallel model computes the same loss and gradients as the unsharded one.

    Both run in exact arithmetic, with the same abstract parameters and inputs: so there is no
    tolerance, and a difference is no rounding. The reference takes the mean of the steps of all
    data coordinates, as data parallelism does. Casts, and so mixed precision, are set aside if the
    two are not equal with them.

    Args:
        parallel: builds this rank's model, of the mesh if it takes an argument; by torch's own
            code, such as ``fully_shard`` and ``parallelize_module``.
        reference: builds the unsharded model, with the same FQNs.
        step: ``step(model, *batch(coordinate))`` is the loss, a mean over this rank's batch.
        batch: the inputs by data coordinate. Ranks that share one give the same.
        mesh: of a ranks or simulated world; in a ranks world every rank calls this. None for a
            model without process groups, in one process.
        data_dims: dimensions of the mesh along which ranks have other batches; () if all ranks have
            one.

    Returns:
        A proof of kind "reordered" (the same function, rounded at the same places), or "rounds
        elsewhere".

    Raises:
        AnotherFunction: the first gradient or loss that differs, the rank, the factor if it is a
            small fraction, and what would repair it.
        ValueError: a mesh without names, or without one of ``data_dims``; equal batches; a
            reference without gradients.
        RuntimeError: other FQNs, or shapes; torch names them.
    """
    __tracebackhide__ = True
    models = _Models(parallel, reference, step, batch, data_dims)
    _check_dims(mesh, data_dims)
    _check_batches(models, data_coordinate(mesh, data_dims)[1])
    proof = None
    for kind in _CASTS:
        try:
            proof = _proof_of(kind, models, mesh)
        except NoMeaning as error:
            proof = Proof("unknown", reason=str(error))
        if proof.kind in (kind, "unknown"):
            break
    assert proof is not None
    facts.emit("verdict", outcome=proof.kind, tensors=proof.compared, what="model")
    if not proof.is_at_least("rounds elsewhere"):
        raise AnotherFunction(f"the parallel model is not the unsharded one\n{proof}", proof)
    return proof


_CASTS: Mapping[Kind, str] = {"reordered": "opaque", "rounds elsewhere": "identity"}


def _check_dims(mesh: DeviceMesh | None, data_dims: Sequence[str]) -> None:
    """Refuse data dimensions that the mesh does not have: all ranks would get one batch."""
    if mesh is None:
        return
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("the mesh has no names: give its dimensions names, mesh_dim_names=")
    unknown = [name for name in data_dims if name not in names]
    if unknown:
        raise ValueError(
            f"data_dims={tuple(data_dims)}: the mesh has {', '.join(map(repr, names))}. Name those "
            "along which ranks have other batches, or () if all ranks have one"
        )


def _check_batches(models: _Models, coordinates: int) -> None:
    """Refuse batches of whole numbers that are equal: then no reduction over data would show."""
    batches = [pytree.tree_leaves(tuple(models.batch(place))) for place in range(coordinates)]
    for later in range(1, coordinates):
        for earlier in range(later):
            if _are_equal(batches[earlier], batches[later]):
                raise ValueError(
                    f"batch({earlier}) and batch({later}) are equal whole numbers, so a gradient "
                    "that nobody reduces would not show: give each data coordinate its own"
                )


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    if len(first) != len(second):
        return False
    for own, other in zip(first, second, strict=True):
        if not isinstance(own, Tensor) or not isinstance(other, Tensor):
            if own is not other and own != other:
                return False
        elif own.is_floating_point() or not torch.equal(own, other):
            return False  # floating-point numbers are abstract, and so never equal
    return True


def _proof_of(kind: Kind, models: _Models, mesh: DeviceMesh | None) -> Proof:
    """Return whether the two are equal in a kind, in each arithmetic that may find it.

    Where elements decide something, or have few square roots, they run again with others.
    """
    proof = None
    for exact in (Field, FieldWithExponents):
        arithmetic = exact(casts=_CASTS[kind])
        found, expected = _run_sides(models, mesh, arithmetic)
        proof = _compare(kind, found, expected, mesh)
        if proof.kind == kind:
            for seed, bias in AGAIN if any(made.decides for made in (*found, expected)) else ():
                arithmetic = exact(casts=_CASTS[kind], seed=seed)
                arithmetic.bias = bias
                proof = _compare(kind, *_run_sides(models, mesh, arithmetic), mesh)
                if proof.kind != kind:
                    break
        has_exponentials = any(made.has_exponentials for made in (*found, expected))
        if proof.kind == kind or not has_exponentials:
            break
    assert proof is not None
    return proof


def _run_sides(
    models: _Models, mesh: DeviceMesh | None, arithmetic: Field
) -> tuple[list[_Made], _Made]:
    """Return what each rank has made, and the reference."""
    _, coordinates = data_coordinate(mesh, models.data_dims)
    mode = ArithmeticMode(copy.deepcopy(arithmetic))
    expected = models.run_reference(mode, coordinates)
    expected.note(mode.arithmetic)
    mode = ArithmeticMode(arithmetic)
    if mesh is None or has_real_ranks():
        if mesh is not None:
            mode.exchange = exchange_on_ranks
        with mode:
            made = models.run_parallel(mode, mesh)
        made.note(arithmetic)
        return ([made] if mesh is None else gathered_from_ranks(made)), expected
    extents = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    net = AnyOrder.of(NetModel.of_world(mesh.size()))

    def run_rank(rank: int) -> _Made:
        return models.run_parallel(mode, mesh_of(extents))

    found = run_threads(mesh.size(), run_rank, net=net, under=mode.on_another_thread)
    found[0].note(arithmetic)
    return found, expected


def _compare(kind: Kind, found: Sequence[_Made], expected: _Made, mesh: DeviceMesh | None) -> Proof:
    wanted = expected.results()
    if not any(bool(own.any()) for own in expected.gradients.values()):
        raise ValueError(
            "no parameter of the reference has a gradient but 0: is the loss that of the model?"
        )
    for rank, made in enumerate(found):
        results = made.results()
        missing = [fqn for fqn in expected.gradients if fqn not in made.gradients]
        more = [fqn for fqn in made.gradients if fqn not in expected.gradients]
        if missing or more:
            says = f"has no gradient on rank {rank}, and the reference has one"
            if not missing:
                says = f"has a gradient on rank {rank}, and the reference has none"
            place = Place(f"gradient of {(missing or more)[0]}", rank, says=says)
            return Proof("another function", len(wanted), place)
        for name, own in results.items():
            different = _difference(name, rank, own, wanted[name])
            if different is not None:
                return _explain(different, found, wanted, mesh)
    return Proof(kind, compared=sum(len(made.results()) for made in found))


def _difference(name: str, rank: int, found: Tensor, wanted: Tensor) -> Place | None:
    if found.shape != wanted.shape:
        return Place(name, rank, says=f"shape {list(found.shape)}, expected {list(wanted.shape)}")
    places = (found != wanted).nonzero()
    if not len(places):
        return None
    return Place(name, rank, tuple(places[0].tolist()), len(places), found.numel())


def _explain(
    place: Place,
    found: Sequence[_Made],
    wanted: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
) -> Proof:
    """Return the proof that says where the models differ, by which factor, and what repairs it."""
    expected = wanted[place.result]
    of_ranks = [made.results().get(place.result) for made in found]
    factor = None
    repairs: tuple[str, ...] = ()
    own = of_ranks[place.rank or 0]
    if place.element is not None and own is not None:
        factor = common_factor(own, expected)
    known = [each for each in of_ranks if each is not None]
    if mesh is not None and len(known) == len(found):
        repairs = tuple(repairs_of(known, expected, mesh))
    return Proof("another function", len(wanted), place, factor=factor, repairs=repairs)


def repairs_of(of_ranks: Sequence[Tensor], expected: Tensor, mesh: DeviceMesh) -> Iterator[str]:
    """Yield what makes the results of all ranks the expected one, along one dimension each."""
    field_of = Prime(P)
    names = mesh.mesh_dim_names or ()
    for dim, name in enumerate(names):
        size = mesh.size(dim)
        if size == 1:
            continue
        groups = mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist()
        sums = []
        for group in groups:
            total = of_ranks[group[0]]
            for rank in group[1:]:
                total = field_of.add(total, of_ranks[rank])
            sums.append(total)
        count = torch.tensor(size)
        tries = {
            f"a sum over {name!r}": sums,
            f"a mean over {name!r}": [field_of.divide(total, count) for total in sums],
        }
        for words, results in tries.items():
            if all(torch.equal(result, expected) for result in results):
                yield words
