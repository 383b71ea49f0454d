"""Find the first operator whose output differs, once step and tensor are known.

While a run is *captured*, a digest of every operator's output is kept, with its *place*. Eager runs
are captured below autograd, graphs node by node. Left out are operators that compute nothing, or
that one side alone has: views, factories of uninitialised memory, collectives and what packs their
payloads.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.autograd import (
    TorchDispatchMode,
    in_backward,
    last_made_node,
    watching_backward,
)
from pytest_gtrainer._torch.values import OpOverload, schema
from pytest_gtrainer.facts import check_type, counted
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    direction,
    node_fqn,
    spell_dtype,
    tensors_in,
)
from pytest_gtrainer.numerics.bits import NoBytes, plain
from pytest_gtrainer.numerics.digest import digest
from pytest_gtrainer.numerics.verdict import Outcome, cut

_OUTSIDE_THE_MODEL = "loss"
_COMPUTING = ("aten", "prims", "_quantized", "quantized", "mkldnn", "onednn")


class OperatorPlace(NamedTuple):
    """One call of an operator; ``number`` counts its calls in this module and direction."""

    fqn: str
    direction: str
    operator: str
    number: int

    def __str__(self) -> str:
        return f"{_where(*self[:3])}, call {self.number}"


def _where(fqn: str, towards: str, operator: str) -> str:
    """Describe where an operator is called.

    >>> _where("layers.0.wq", "bwd", "aten.mm.default")
    'aten.mm.default in the backward of layers.0.wq'
    """
    where = "forward"
    if towards == BACKWARD:
        where = "backward"
    module = ", of no module"
    if fqn:
        module = f" of {fqn}"
    return f"{operator} in the {where}{module}"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator: digests of its outputs, and their layouts for a person."""

    place: OperatorPlace
    digests: tuple[str, ...]
    layout: str


@dataclass(slots=True)
class OperatorCapture:
    """The calls of a run, in order.

    The outputs at the place ``keep`` are kept as tensors, so that they can be compared by element.
    """

    keep: OperatorPlace | None = None
    calls: list[OperatorCall] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    _counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def note(self, fqn: str, towards: str, operator: OpOverload, output: Any) -> None:
        """Note a call that has run, unless it computes nothing."""
        if not computes(operator):
            return
        tensors = tensors_in(output)
        try:
            digests = tuple(digest(tensor).partition(":")[2] for tensor in tensors)
        except NoBytes:
            return

        if not tensors:
            return
        group = (fqn, towards, str(operator))
        place = OperatorPlace(*group, self._counts[group])
        self._counts[group] += 1
        layouts = (f"{spell_dtype(tensor.dtype)}{list(plain(tensor).shape)}" for tensor in tensors)
        self.calls.append(OperatorCall(place, digests, ", ".join(layouts)))
        if place == self.keep:
            self.kept = [plain(tensor).clone() for tensor in tensors]

    def watch(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """Return a callable that runs a graph and notes every node.

        ``traced.with_graph(capture.watch(traced.gm))`` is a step that can be replayed.
        """
        note = self.note

        class Noting(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if isinstance(n.target, OpOverload):
                    note(node_fqn(n), direction(n), n.target, value)
                return value

        return Noting(gm).run


@contextmanager
def capture_operators(
    model: nn.Module, *, keep: OperatorPlace | None = None
) -> Iterator[OperatorCapture]:
    """Capture every operator that an eager run of ``model`` calls in the block.

    Operators outside the model's modules have the FQN "loss". Outputs at the place ``keep`` are
    kept.
    """
    capture = OperatorCapture(keep)
    mode = _EagerMode(capture)
    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            enter = module.register_forward_pre_hook(
                lambda *_, fqn=fqn: mode.modules.append(fqn), prepend=True
            )
            leave = module.register_forward_hook(
                lambda *_, fqn=fqn: mode.leave(fqn), always_call=True
            )
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        # Calls are listed in their order, which threads of several devices would mix.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(watching_backward(mode.running.append, mode.end))
        stack.enter_context(mode)
        yield capture


class _EagerMode(TorchDispatchMode):
    """See operators below autograd.

    A backward operator belongs to the module in whose forward its autograd node was made.
    """

    def __init__(self, capture: OperatorCapture) -> None:
        super().__init__()
        self._capture = capture
        self.running: list[int] = []
        self.modules: list[str] = []
        self._made_in: dict[int, str] = {}

    # Hooks of modules and of autograd: what one returns would replace an output or a gradient.

    def leave(self, fqn: str) -> None:
        # A hook of the user's that stands before ``enter`` may raise; torch calls this one anyway.
        if self.modules and self.modules[-1] == fqn:
            self.modules.pop()

    def end(self) -> None:
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        towards = BACKWARD if in_backward() else FORWARD
        # A checkpoint runs the forwards of modules inside the backward.
        if towards == FORWARD or self.modules:
            fqn = self.modules[-1] if self.modules else _OUTSIDE_THE_MODEL
            self._made_in.setdefault(last_made_node(), fqn)
        elif self.running:
            fqn = self._made_in.get(self.running[-1], "")
        else:
            fqn = ""
        self._capture.note(fqn, towards, func, output)
        return output


def computes(operator: OpOverload) -> bool:
    """Return whether an operator's output is a value that both sides compute."""
    if operator.namespace not in _COMPUTING or operator.is_view:
        return False
    name = schema(operator).name.partition("::")[2]
    # Eager makes the ones that a backward begins with before it begins, a graph inside of it.
    return not name.startswith(
        (
            "ones_like",
            "empty",
            "new_empty",
            "detach",
            "alias",
            "resize",
            "set_",
            "_local_scalar",
            "lift",
        )
    )


@dataclass(frozen=True, slots=True)
class OperatorVerdict:
    """The result of a comparison of captures.

    Attributes:
        compared: the number of pairs of calls that were looked at.
        differing: pairs of calls, actual and expected, whose outputs differ.
        unaligned: operators that one side calls more often, with both counts.
        reason: why nothing was compared, if the calls say otherwise.
    """

    outcome: Outcome
    compared: int
    differing: tuple[tuple[OperatorCall, OperatorCall], ...]
    unaligned: tuple[tuple[str, int, int], ...]
    reason: str = ""

    @property
    def first(self) -> OperatorPlace | None:
        """The place of the first call that differs."""
        return self.differing[0][1].place if self.differing else None

    def __bool__(self) -> bool:
        raise TypeError("a verdict has three outcomes: ask for verdict.outcome == 'equal'")

    def __str__(self) -> str:
        lines = [f"{self.outcome}: {len(self.differing)} of {counted(self.compared, 'operator')}"]
        if self.reason:
            lines.append(f"  {self.reason}")
        if self.differing:
            actual, expected = self.differing[0]
            lines += [
                f"  first at {expected.place}",
                f"    actual   {actual.layout} {' '.join(actual.digests)}",
                f"    expected {expected.layout} {' '.join(expected.digests)}",
            ]
            lines += cut("then at", [str(other.place) for _, other in self.differing[1:]])

        unaligned = []
        for what, mine, theirs in self.unaligned:
            unaligned.append(f"{what}: {mine} times in actual, {theirs} in expected")
        return "\n".join([*lines, *cut("not aligned", unaligned)])


def compare_operators(actual: OperatorCapture, expected: OperatorCapture) -> OperatorVerdict:
    """Align the calls of ``actual`` and ``expected`` by place, and compare their outputs.

    A capture against itself is unverified: there are no two runs. So are equal ones where operators
    have no counterpart: what these compute has been compared with nothing.
    """
    for name, side in (("actual", actual), ("expected", expected)):
        check_type(side, OperatorCapture, name, "what capture_operators() yields")
    mine = Counter(call.place[:3] for call in actual.calls)
    theirs = Counter(call.place[:3] for call in expected.calls)
    unaligned = []
    for group in theirs | mine:
        if mine[group] != theirs[group]:
            unaligned.append((_where(*group), mine[group], theirs[group]))
    calls = {call.place: call for call in actual.calls}
    compared, differing = 0, []
    for call in expected.calls:
        # An operator that one side calls more often has no counterpart for each of its calls.
        if mine[call.place[:3]] == theirs[call.place[:3]]:
            compared += 1
            if calls[call.place].digests != call.digests:
                differing.append((calls[call.place], call))

    outcome: Outcome = "equal" if compared else "unverified"
    reason = ""
    if differing:
        outcome = "different"
    elif compared and any(call is calls.get(call.place) for call in expected.calls):
        outcome = "unverified"
        reason = "actual and expected are the same capture, so nothing was compared: run each side"
    elif compared and unaligned:
        outcome = "unverified"
        reason = "all operators with a counterpart are equal; compare the results for the others"
    return OperatorVerdict(outcome, compared, tuple(differing), tuple(unaligned), reason)
