"""What usual practice sees: ``assert_close`` with defaults, and a loss curve of 50 steps at 1 %.

Both run in real numbers, without this package, on two gloo ranks where a bug needs ranks. A
``Practice`` gives, for the version with the bug or the fixed one, tensors by name and losses of
both sides. Curves are AdamW's, with its defaults, as that is what trainers use.
"""

import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._debug_mode import DebugMode

STEPS = 50
CURVE_TOLERANCE = 0.01


@dataclass
class Sides:
    """What one run of both sides gives.

    Attributes:
        actual, expected: tensors by name.
        losses, expected_losses: one a step; empty where there is no training.
        same_hashes: what DebugMode's hashes of both sides say; None where it cannot compare them.
    """

    actual: dict[str, Tensor]
    expected: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    expected_losses: list[float] = field(default_factory=list)
    same_hashes: bool | None = None


@dataclass(frozen=True)
class Practice:
    """How people compare both sides without this package.

    Attributes:
        run: takes ``bug`` and returns both sides.
        ranks: on how many ranks.
    """

    run: Callable[[bool], Sides]
    ranks: int = 1


@dataclass(frozen=True)
class Seen:
    """Which usual checks fail: True where one does, None where there is nothing to compare."""

    close: bool | None
    curve: bool | None
    hashes: bool | None


def look(sides: Sides) -> Seen:
    """Judge both sides as people do."""
    close = None
    if sides.actual:
        close = False
        for name, value in sides.expected.items():
            try:
                torch.testing.assert_close(sides.actual[name], value)
            except AssertionError:
                close = True
    curve = None
    if sides.losses:
        curve = False
        for loss, expected in zip(sides.losses, sides.expected_losses, strict=True):
            # Written so that NaN counts as seen.
            if not abs(loss - expected) <= CURVE_TOLERANCE * abs(expected):
                curve = True
    hashes = None if sides.same_hashes is None else not sides.same_hashes
    return Seen(close, curve, hashes)


def look_at(module: str, bug: bool) -> Seen:
    """Run the practice of an exhibit, by the name of its module, so that ranks can import it."""
    from museum.exhibit import EXHIBITS

    importlib.import_module(module)
    practice = EXHIBITS[module].usual
    assert isinstance(practice, Practice)
    torch.manual_seed(0)
    return look(practice.run(bug))


def of_functions(
    actual: Callable[..., Any], expected: Callable[..., Any], inputs: Callable[[], Sequence[Any]]
) -> Practice:
    """Compare what two functions return, and DebugMode's hashes of both.

    Args:
        actual: takes ``bug`` and then the inputs.
        expected: takes the inputs.
        inputs: makes them anew for each side.
    """

    def run(bug: bool) -> Sides:
        torch.manual_seed(0)
        given, others = inputs(), inputs_again(inputs)
        logs, results = [], []
        for call, arguments in ((lambda *args: actual(bug, *args), given), (expected, others)):
            with DebugMode() as mode, DebugMode.log_tensor_hashes():
                results.append(tensors_of(call(*arguments)))
            logs.append(mode.logs)
        try:
            same = not DebugMode.check_hash_mismatches(*logs)
        except ValueError:  # other operators
            same = None
        return Sides(results[0], results[1], same_hashes=same)

    return Practice(run)


def of_results(
    actual: Callable[[bool], Any], expected: Callable[[], Any], *, ranks: int = 1
) -> Practice:
    """Compare what two sides give: on ranks, ``actual`` runs on each, and so does ``expected``."""

    def run(bug: bool) -> Sides:
        return Sides(tensors_of(actual(bug)), tensors_of(expected()))

    return Practice(run, ranks)


def inputs_again(inputs: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Make the same inputs once more: one side may write to its own."""
    torch.manual_seed(0)
    return inputs()


def tensors_of(value: Any) -> dict[str, Tensor]:
    """Name the tensors of a result: a tensor, a sequence, or a dict."""
    if isinstance(value, Tensor):
        return {"result": value.detach().clone()}
    named = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {str(name): each.detach().clone() for name, each in named if isinstance(each, Tensor)}


def of_models(
    parallel: Callable[[DeviceMesh, bool], Any],
    reference: Callable[[], nn.Module],
    step: Callable[..., Tensor],
    batch: Callable[[int], Sequence[Any]],
    *,
    mesh: Mapping[str, int],
    data_dim: str = "",
    local: Mapping[str, tuple[str, int]] | None = None,
    combine: str = "mean",
) -> Practice:
    """Compare the loss and gradients of a parallel model with the unsharded one's, and 50 steps.

    Args:
        parallel: takes the mesh and ``bug``.
        reference, step, batch: as of ``assert_same_model``.
        mesh: extents by name, of two ranks in all.
        data_dim: along which ranks have other batches; "" if all have one.
        local: parameters sliced by hand, as of ``assert_same_model``.
        combine: of the losses of data ranks: "mean" or "sum".
    """
    size = 1
    for extent in mesh.values():
        size *= extent

    def run(bug: bool) -> Sides:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        torch.manual_seed(0)
        whole = reference()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.normal_(std=0.3)
        mine = parallel(device_mesh, bug)
        load(mine, whole, device_mesh, local or {})
        place = device_mesh.get_local_rank(data_dim) if data_dim else 0
        count = device_mesh[data_dim].size() if data_dim else 1
        divisor = count if combine == "mean" else 1

        sides = Sides({}, {})
        optimizers = torch.optim.AdamW(mine.parameters()), torch.optim.AdamW(whole.parameters())
        for index in range(STEPS):
            loss = step(mine, *batch_at(batch, place))
            loss.backward()
            losses = []
            for data_rank in range(count):
                losses.append(step(whole, *batch_at(batch, data_rank)) / divisor)
            expected = torch.stack(losses).sum()
            expected.backward()
            if index == 0:
                sides.actual = gradients(mine, device_mesh, local or {})
                sides.expected = gradients(whole, device_mesh, {})
            sides.losses.append(logged(loss, device_mesh, data_dim, divisor))
            sides.expected_losses.append(expected.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return sides

    return Practice(run, size)


def of_pipeline(
    parallel: Callable[[DeviceMesh, bool], tuple[nn.Module, Callable[..., Tensor | None]]],
    reference: Callable[[], nn.Module],
    step: Callable[..., Tensor],
    batch: Callable[[int], Sequence[Any]],
) -> Practice:
    """Compare a pipeline of two ranks with the whole model, as ``of_models`` does.

    Args:
        parallel: returns the module of this rank's stage, and a step that gives the loss on the
            last one.
        reference, step, batch: as of ``assert_same_model``.
    """

    def run(bug: bool) -> Sides:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        torch.manual_seed(0)
        whole = reference()
        stage, step_of_stage = parallel(mesh, bug)
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        inputs = batch_at(batch, 0)

        sides = Sides({}, {})
        optimizers = torch.optim.AdamW(stage.parameters()), torch.optim.AdamW(whole.parameters())
        for index in range(STEPS):
            loss = step_of_stage(stage, *inputs)
            expected = step(whole, *inputs)
            expected.backward()
            if index == 0:
                sides.actual = gradients(stage, mesh, {})
                of_whole = gradients(whole, mesh, {})
                sides.expected = {name: of_whole[name] for name in sides.actual}
            logged_loss = torch.zeros(()) if loss is None else loss.clone()
            dist.broadcast(logged_loss, 1)
            sides.losses.append(logged_loss.item())
            sides.expected_losses.append(expected.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return sides

    return Practice(run, 2)


def batch_at(batch: Callable[[int], Sequence[Any]], place: int) -> Sequence[Any]:
    """Make the batch of a data coordinate; the same for every rank and step."""
    torch.manual_seed(100 + place)
    return batch(place)


def dimension_of(
    name: str, mesh: DeviceMesh, local: Mapping[str, tuple[str, int]]
) -> tuple[DeviceMesh, int] | None:
    """Return along which mesh and which dimension of the tensor ranks hold slices by hand."""
    for pattern, (dim, dimension) in local.items():
        if fnmatch.fnmatch(name, pattern):
            return mesh[dim], dimension
    return None


def load(
    mine: nn.Module, whole: nn.Module, mesh: DeviceMesh, local: Mapping[str, tuple[str, int]]
) -> None:
    """Give a parallel model the weights of the whole one."""
    state = {}
    for name, value in whole.state_dict().items():
        sliced = dimension_of(name, mesh, local)
        if sliced is not None:
            along, dimension = sliced
            value = value.chunk(along.size(), dimension)[along.get_local_rank()]
        state[name] = value
    set_model_state_dict(mine, state, options=StateDictOptions(full_state_dict=True))


def gradients(
    model: nn.Module, mesh: DeviceMesh, local: Mapping[str, tuple[str, int]]
) -> dict[str, Tensor]:
    """Gather every gradient as a whole tensor."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        sliced = dimension_of(name, mesh, local)
        if sliced is not None:
            along, dimension = sliced
            parts = [torch.empty_like(gradient) for _ in range(along.size())]
            dist.all_gather(parts, gradient.contiguous(), group=along.get_group())
            gradient = torch.cat(parts, dimension)
        found[name.removeprefix("module.")] = gradient.detach().clone()
    return found


def logged(loss: Tensor, mesh: DeviceMesh, data_dim: str, divisor: int) -> float:
    """Return the loss that a trainer logs: the mean or sum over data ranks."""
    value = loss.detach().clone()
    if data_dim:
        dist.all_reduce(value, group=mesh[data_dim].get_group())
        value /= divisor
    return float(value.item())
