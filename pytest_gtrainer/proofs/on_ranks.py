"""Collectives of real ranks in an arithmetic: the elements travel beside the real numbers.

A collective runs as it is, for the real numbers. Then the ranks of its group gather the elements of
all operands, and each computes its own result with the collectives of a simulated world. That adds
in an order of its own, so this is for the field, where every order gives the same elements.

Every rank of a group has to be in the arithmetic, as all of them take part in the exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import WAIT
from pytest_gtrainer._torch.process_groups import (
    finished,
    group_of_call,
    reduction_by_trial,
)
from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.values import pytree, schema
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.operators import base_name
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.graph.nodes import named_arguments, tensors_in
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.programs import GraphProgram, Observed, ProgramRun
from pytest_gtrainer.worlds.gathering import gather_objects
from pytest_gtrainer.worlds.simulated import collectives
from pytest_gtrainer.worlds.simulated.collectives import Collective, Contribution
from pytest_gtrainer.worlds.simulated.interpreter.steps import COLLECTIVES, contributions
from pytest_gtrainer.worlds.simulated.net import NetModel

_MOVE_NOTHING = (
    *("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan"),
)


@dataclass(slots=True)
class _C10dCall:
    """A call of an operator of ``c10d``: what this rank gives, and where it gets something."""

    collective: Collective
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    details: dict[str, Any] = field(default_factory=dict)


class GraphOnRanks(GraphProgram):
    """A graph on this rank, with the collectives of real ranks.

    Every rank of the world runs it at the same time.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(gm, inputs, None, by_place=False)
        self.rank = dist.get_rank()

    def run(self, arithmetic: Arithmetic, on_result: Any = None) -> ProgramRun:
        if isinstance(arithmetic, Terms):
            raise NoMeaning("the order in which real ranks add is not known")
        return super().run(arithmetic, on_result)

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        mode.exchange = exchange_on_ranks
        super()._run(mode, observed)

    def gather_from_all_ranks(self, own: Any) -> list[Any]:
        return gather_objects(own)


def exchange_on_ranks(mode: ArithmeticMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out a collective of this rank under a mode, and exchange the elements.

    Every rank of the collective's group must be under such a mode.
    """
    base = base_name(func)
    if base in _MOVE_NOTHING:
        return func(*args, **kwargs)
    named = named_arguments(func, args, kwargs)
    group = group_of_call(named)
    facts.notify("communicates", ranks=tuple(dist.get_process_group_ranks(group)))

    tensors = tensors_in(args, kwargs)
    moves_floats = any(tensor.is_floating_point() for tensor in tensors)
    for tensor in tensors:
        # Its bytes would travel without the elements, and arrive as known numbers.
        if tensor.is_complex():
            raise NoMeaning(f"{func} of complex numbers between real ranks")
        if not tensor.is_floating_point() and mode.shadows.has(tensor):
            mode.shadows.read(tensor)  # refuses abstract memory that is read as another dtype
            moves_floats = True
    if not moves_floats:
        return func(*args, **kwargs)

    run = partial(func, *args, **kwargs)
    if func.namespace == "c10d":
        return _exchange_around(mode, _parse_call(mode, base, named, group), run, group)
    if base not in COLLECTIVES:
        raise NoMeaning(f"{func} between real ranks")
    return _exchange_around_functional(mode, func, named, run, group)


def _exchange_around(
    mode: ArithmeticMode, call: _C10dCall, run: Callable[[], Any], group: dist.ProcessGroup
) -> Any:
    """Run an operator of ``c10d``, which writes to its outputs, and exchange the elements."""
    # Read before the operator runs, which may write to its operands.
    given = [_pack(mode, tensor) for tensor in call.inputs]
    with without_modes():
        result = finished(run(), call.outputs)
        of_ranks = gather_objects((given, call.details), group)
    members = []
    for rank, (own, details) in enumerate(of_ranks):
        inputs = []
        for sent in own:
            tensor = _unpack(mode, sent)
            # ``c10d`` fills memory in order, whatever the shapes; only exchanges count rows.
            inputs.append(tensor if details.get("sends") else tensor.reshape(-1))
        members.append(Contribution(rank=rank, inputs=inputs, **details))
    found = _carry_out(mode, call.collective, members)[dist.get_rank(group)]
    _write_elements(mode, call.outputs, found, group)
    return result


def _exchange_around_functional(
    mode: ArithmeticMode,
    func: Any,
    named: dict[str, Any],
    run: Callable[[], Any],
    group: dist.ProcessGroup,
) -> Any:
    """Run a functional collective, in place or not, and exchange the elements."""
    sent = dict(named)
    sent.pop("group_name")  # other ranks know the group by other names
    sent = pytree.tree_map_only(Tensor, lambda tensor: _pack(mode, tensor), sent)
    with without_modes():
        result = run()
        # The exchange needs the group for itself, so the collective has to end first.
        pytree.tree_map_only(Tensor, WAIT, result)
        calls = gather_objects(sent, group)

    calls = pytree.tree_map_only(_SentTensor, lambda each: _unpack(mode, each), calls)
    members = contributions(calls, range(len(calls)))
    found = _carry_out(mode, COLLECTIVES[base_name(func)], members)[dist.get_rank(group)]
    targets = tensors_in(result)
    for argument in schema(func).arguments:
        if argument.is_write:
            targets = tensors_in(named[argument.name])

    _write_elements(mode, targets, found, group)
    return result


def _carry_out(
    mode: ArithmeticMode, collective: Collective, members: list[Contribution]
) -> list[list[Tensor]]:
    net = AnyOrder.of(NetModel.of_world(len(members)))
    with mode, torch.no_grad():
        return collective(net, members)


@dataclass(frozen=True, slots=True)
class _SentTensor:
    """The data that ranks exchange for a tensor.

    Attributes:
        elements: int64; of a known tensor its numbers.
        dtype: of the tensor.
        fits: the dtype whose numbers the elements are; None for a known tensor.
    """

    elements: Tensor
    dtype: torch.dtype
    fits: torch.dtype | None


def _pack(mode: ArithmeticMode, tensor: Tensor) -> _SentTensor:
    value = mode.shadows.read(tensor)
    with without_modes():
        own = tensor.detach()
        if value is not None:
            elements, fits = value.elements, value.fits
        else:
            # They stay known, as in a simulated world: an operator on known numbers rounds.
            elements, fits = own, None
        # A copy, since pickle writes the whole storage of a view.
        return _SentTensor(elements.clone().contiguous(), own.dtype, fits)


def _unpack(mode: ArithmeticMode, sent: _SentTensor) -> Tensor:
    """Return a tensor on this rank with the elements of another rank's; its numbers are zeros."""
    with without_modes():
        if sent.fits is None:
            return sent.elements
        made = torch.zeros(sent.elements.shape, dtype=sent.dtype)
        if made.numel():
            mode.shadows.write(made, sent.elements, sent.fits)
        return made


def _write_elements(
    mode: ArithmeticMode,
    targets: Sequence[Tensor],
    found: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Give tensors on this rank the elements that a collective has made for them."""
    ranks = tuple(dist.get_process_group_ranks(group))
    for target, made in zip(targets, found, strict=True):
        value = mode.shadows.read(made)
        with without_modes():
            if value is not None:
                mode.write(target.detach(), value.elements.reshape(target.shape), value.fits)
            else:
                mode.write_known(target.detach())
        facts.notify("exchanged", output=target.detach(), ranks=ranks)


_BY_OPERATOR: dict[str, tuple[Collective, str, str]] = {
    "allreduce_": (collectives.all_reduce, "tensors", "tensors"),
    "allreduce_coalesced_": (collectives.all_reduce, "tensors", "tensors"),
    "broadcast_": (collectives.broadcast, "tensors", "tensors"),
    "_allgather_base_": (collectives.all_gather, "input_tensor", "output_tensor"),
    "allgather_into_tensor_coalesced_": (collectives.all_gather, "inputs", "outputs"),
    "_reduce_scatter_base_": (collectives.reduce_scatter, "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": (collectives.reduce_scatter, "inputs", "outputs"),
    "scatter_": (collectives.scatter, "input_tensors", "output_tensors"),
    "gather_": (collectives.gather, "input_tensors", "output_tensors"),
}
"""By operator: the collective, and the arguments that it reads and writes."""


def _parse_call(mode: ArithmeticMode, base: str, named: dict[str, Any], group: Any) -> _C10dCall:
    """Read the arguments of an operator of ``c10d``."""
    size = dist.get_world_size(group)
    details: dict[str, Any] = {}
    if "reduce_op" in named:
        with without_modes():
            device = tensors_in(named)[0].device
            details["op"], details["factor"] = reduction_by_trial(named, group, device)
    if "root_rank" in named:
        details["root"] = named["root_rank"]
    if base in _BY_OPERATOR:
        collective, reads, writes = _BY_OPERATOR[base]
        return _C10dCall(collective, tensors_in(named[reads]), tensors_in(named[writes]), details)
    if base == "allgather_":
        # As an exchange of lists: here the members may have tensors of other sizes.
        given = tensors_in(named["input_tensors"]) * size
        return _list_exchange(given, tensors_in(named["output_tensors"]))
    if base == "alltoall_":
        return _list_exchange(
            tensors_in(named["input_tensors"]), tensors_in(named["output_tensors"])
        )
    if base == "reduce_scatter_":
        parts = tensors_in(named["input_tensors"])
        with mode, torch.no_grad():
            whole = torch.cat([part.reshape(-1) for part in parts])
        outputs = tensors_in(named["output_tensors"])
        return _C10dCall(collectives.reduce_scatter, [whole], outputs, details)

    if base == "alltoall_base_":
        given, output = named["input"], named["output"]
        details["sends"] = _splits(named["input_split_sizes"], given, size)
        details["receives"] = _splits(named["output_split_sizes"], output, size)
        return _C10dCall(collectives.all_to_all, [given], [output], details)

    raise NoMeaning(f"c10d.{base} between real ranks")


def _list_exchange(inputs: list[Tensor], outputs: list[Tensor]) -> _C10dCall:
    sizes = {
        "sends": [tensor.numel() for tensor in inputs],
        "receives": [tensor.numel() for tensor in outputs],
    }
    return _C10dCall(collectives.exchange_lists, inputs, outputs, sizes)


def _splits(given: Sequence[int], tensor: Tensor, size: int) -> list[int]:
    return list(given) or [len(tensor) // size] * size
