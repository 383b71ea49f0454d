"""Run programs in an arithmetic, and keep what they make.

A *program* is a graph or a function with its inputs. A run begins with abstract inputs and leaves
*results*: outputs, gradients, and the state that was written to.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import UNUSUAL_SEED, random_state, random_states_kept
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.mode import ArithmeticMode, CountReads
from pytest_gtrainer.arithmetic.shadows import whole_storage
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph.nodes import AFTERWARDS, input_fqn, value_of
from pytest_gtrainer.numerics.bits import byte_view, same_bytes
from pytest_gtrainer.numerics.determinism import seed_everything
from pytest_gtrainer.numerics.graph_run import (
    attributes_of,
    copies,
    named_outputs,
    random_states_afterwards,
)
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.inputs import DrawnInputs
from pytest_gtrainer.proofs.state import (
    attributes_of_tensors,
    captured_by,
    check_outputs,
    copy_of,
    modes_of_torch,
    named_state,
    number_of,
    put_modes_back,
    python_values,
    restorer_of_contents,
)
from pytest_gtrainer.worlds.simulate import AnyWorld, net_of_any, run_on_net
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode
from pytest_gtrainer.worlds.simulated.interpreter.values import RankRandomStates, at
from pytest_gtrainer.worlds.simulated.net import Net

__tracebackhide__ = facts.hides_frames

Key = tuple[str, int | None]
"""The name of a result, and in a world the rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A result of a run.

    Attributes:
        elements: int64; of a known tensor its real numbers.
        is_known: it depends on no abstract input.
        exponents: a second form of the elements. Results are equal if one of the forms is.
        lifted: the elements of a known tensor of floats, to compare it with an abstract one.
    """

    elements: Tensor
    dtype: torch.dtype
    is_known: bool
    exponents: Tensor | None = None
    lifted: Tensor | None = None

    def equals(self, other: "Result") -> bool:
        if self.dtype != other.dtype or self.elements.shape != other.elements.shape:
            return False
        if self.is_known != other.is_known:
            known, abstract = (self, other) if self.is_known else (other, self)
            # An abstract tensor times 0 equals the zeros that a factory makes.
            return known.lifted is not None and torch.equal(known.lifted, abstract.elements)
        if same_bytes(byte_view(self.elements), byte_view(other.elements)):
            return True
        if self.exponents is None or other.exponents is None:
            return False
        return torch.equal(self.exponents, other.exponents)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The results of a program in an arithmetic.

    Attributes:
        results: by name and rank.
        arithmetic: in which it ran.
        reads: operators by which the program asked for real numbers.
        real: the real numbers of its outputs, and of state that it wrote to; complex ones as pairs.
        trains: the outputs through which gradients flow to the inputs. None for a graph, and for a
            program that has called backward itself: its gradients are results.
    """

    results: dict[Key, Result]
    arithmetic: Arithmetic
    reads: Mapping[str, int]
    real: dict[Key, Tensor]
    trains: frozenset[str] | None = None


@dataclass(slots=True)
class Observed:
    """The outputs of a program, those that train, and its state before and after.

    ``put_back`` undoes what the run has written, once its results have been read.
    """

    outputs: dict[Key, Tensor] = field(default_factory=dict)
    before: dict[Key, Result] = field(default_factory=dict)
    numbers_before: dict[Key, Tensor] = field(default_factory=dict)
    after: dict[Key, Tensor] = field(default_factory=dict)
    trains: frozenset[str] | None = None
    put_back: ExitStack = field(default_factory=ExitStack)

    def note_before(self, mode: ArithmeticMode, key: Key, tensor: Tensor) -> None:
        """Note a tensor of the state: its elements, and beside them its real numbers."""
        self.before[key] = _result_of(mode, tensor)
        if not self.before[key].is_known:
            self.numbers_before[key] = real_numbers(tensor)

    def note_values(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Note the Python values that the run has changed, each as a number that stands for it."""
        for name, value in after.items():
            if before.get(name) != value:
                self.after[f"{name}{AFTERWARDS}", None] = number_of(value)
        for name in before.keys() - after.keys():
            number = number_of(before[name])
            self.before[f"{name}{AFTERWARDS}", None] = Result(number, number.dtype, True)

    def check_unwritten(self, arithmetic: Arithmetic, key: Key, tensor: Tensor) -> None:
        """Refuse real numbers that have changed while the elements stayed as they were.

        Rounding is allowed for: a field sets some casts aside, and these change real numbers.
        """
        before = self.numbers_before.get(key)
        # Where abstract elements were compared the real numbers followed these, and mean nothing.
        if before is None or arithmetic.decisions:
            return
        after = real_numbers(tensor)
        if before.shape == after.shape and not are_apart(after, before, arithmetic.coarsest):
            return
        name, rank = key
        where = "" if rank is None else f" on rank {rank}"
        raise NoMeaning(
            f"{name.removesuffix(AFTERWARDS)}{where} is written to where no dispatch mode sees it, "
            "as NumPy does"
        )


class Program(ABC):
    """A program with its inputs. A run changes neither them nor the program.

    Attributes:
        last: the results of the last run, as real tensors.
    """

    last: dict[Key, Tensor]

    def known(self) -> list[str]:
        """Return the names of floating-point tensors whose numbers stay what they are."""
        return []

    def gather_from_all_ranks(self, own: Any) -> list[Any]:
        """Return the answers of all real ranks, in rank order; programs of one process have one.

        On real ranks this is a collective: every rank must call it, the same number of times.
        """
        return [own]

    def run(self, arithmetic: Arithmetic, on_result: Any = None) -> ProgramRun:
        """Run in an arithmetic, from a random state that is always the same."""
        mode = ArithmeticMode(arithmetic, owner=id(self))
        mode.on_result = on_result
        observed = Observed()
        with observed.put_back:
            # Dynamo refuses to compile under a dispatch mode, and would skip such frames for ever.
            with random_states_kept(), torch.compiler.set_stance("force_eager"):
                seed_everything(UNUSUAL_SEED)
                start = random_state()
                self._run(mode, observed)
                end = random_state()

            # The random state is a result: one more draw changes all numbers drawn afterwards.
            for name, state in random_states_afterwards(end).items():
                observed.after[name, None] = state
            for name, state in random_states_afterwards(start).items():
                observed.before[name, None] = Result(state, state.dtype, True)
            self.last = observed.outputs | observed.after
            results, real = self._read(mode, observed)
            return ProgramRun(results, arithmetic, mode.reads, real, observed.trains)

    @staticmethod
    def _read(
        mode: ArithmeticMode, observed: Observed
    ) -> tuple[dict[Key, Result], dict[Key, Tensor]]:
        """Return copies of the results, and their real numbers."""
        results: dict[Key, Result] = {}
        real: dict[Key, Tensor] = {}
        for key, tensor in observed.outputs.items():
            results[key] = _result_of(mode, tensor)
            real[key] = real_numbers(tensor)

        for key, tensor in observed.after.items():
            own, before = _result_of(mode, tensor), observed.before.get(key)
            # State counts only if the program writes to it.
            if before is None or not before.equals(own):
                results[key] = own
                real[key] = real_numbers(tensor)
            else:
                observed.check_unwritten(mode.arithmetic, key, tensor)

        for key in observed.before.keys() - observed.after.keys():
            results[key] = Result(torch.zeros(0), torch.float32, True)  # it is gone
        return results, real

    @abstractmethod
    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        """Run under the mode, and note every result and all state."""


def _result_of(mode: ArithmeticMode, tensor: Tensor) -> Result:
    if tensor.layout is not torch.strided:
        raise NoMeaning(f"a result or an input of layout {tensor.layout}")
    if tensor.is_meta:
        raise NoMeaning("a result or an input on the meta device, which holds no numbers")
    if tensor.is_quantized:
        raise NoMeaning(f"a result or an input of {tensor.dtype}, which has scales beside numbers")
    if mode.shadows.has(tensor) and not mode.shadows.has_complex(tensor):
        tensor = parts_of_complex(tensor)
    value = mode.shadows.read(tensor)
    arithmetic = mode.arithmetic
    if value is None:
        lifted = None
        if tensor.is_floating_point():
            lifted = arithmetic.compared(arithmetic.lift(tensor))
        return Result(tensor.detach().clone(), tensor.dtype, True, lifted=lifted)
    elements = arithmetic.compared(value.elements)
    exponents = arithmetic.compared_instead(value.elements)
    return Result(elements.clone(), value.dtype, False, exponents)


def real_numbers(tensor: Tensor) -> Tensor:
    """Return a copy of the numbers in memory; of complex ones the two parts, as elements have."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.clone()


def are_apart(found: Tensor, wanted: Tensor, coarsest: float, *, least: float = 0.0) -> bool:
    """Return whether real numbers differ by more than rounding explains.

    Args:
        found, wanted: of one shape.
        coarsest: the relative rounding of the narrowest dtype that the program computes in.
        least: an absolute difference that says nothing.
    """
    # Numbers of eight bits have one digit, and what is computed from several may have none.
    share = max(0.1, 8 * coarsest)
    found, wanted = found.double(), wanted.double()
    error = _largest(found - wanted)
    if error > share * magnitude(wanted) + least:
        return True
    return not torch.equal(found.isnan(), wanted.isnan())


def magnitude(numbers: Tensor) -> float:
    """Return the largest finite size: an infinity, as of a mask, is no measure of the others."""
    numbers = numbers.double()  # dtypes of eight bits have few operators
    return _largest(torch.where(numbers.isfinite(), numbers, 0.0))


def _largest(numbers: Tensor) -> float:
    """Return the largest size, where an infinity is more than any number, and NaN nothing."""
    return float(numbers.nan_to_num(nan=0.0).abs().max()) if numbers.numel() else 0.0


def parts_of_complex(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its parts, in the same memory; any other one as it is."""
    is_plain = tensor.layout is torch.strided and not tensor.is_conj()
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() and is_plain else tensor


def _with_numbers(tensors: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            found.append(name)
    return found


def make_abstract(mode: ArithmeticMode, tensor: Tensor, name: Any) -> None:
    """Make floating-point numbers abstract. A view of abstract memory is abstract already."""
    tensor = parts_of_complex(tensor)
    if not tensor.is_floating_point() or mode.shadows.has(tensor):
        return
    if not tensor.numel():
        mode.arithmetic.empty_inputs.append(_spell_input(name))
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        memory = whole_storage(tensor)
        places = torch.arange(memory.numel())
        places = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if len(places.unique()) < tensor.numel():
            # It is expanded, so several places are one element.
            mode.make_abstract(memory, name)
            return
        if memory.numel() > tensor.numel():
            # Other inputs may be other parts of the same memory, such as the chunks of a batch.
            mode.make_abstract(memory, ("memory of", name))
    mode.make_abstract(tensor, name)


def _spell_input(name: Any) -> str:
    """Return the name of an input in words: a place, a place and a rank, or an FQN."""
    if isinstance(name, tuple) and isinstance(name[-1], int):
        return f"input {name[0]} of rank {name[1]}"
    return f"input {name}" if isinstance(name, int) else str(name)


def _names_that_train(outputs: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of outputs through which gradients flow to tensors that were given."""
    own = {id(tensor) for tensor in given.values() if tensor.requires_grad}
    # A new leaf, such as an ``nn.Parameter``, is cut from what it was made of.
    return frozenset(
        name for name, tensor in outputs.items() if tensor.grad_fn is not None or id(tensor) in own
    )


def _restorer(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores a tensor's present numbers and gradient."""
    numbers, gradient = tensor.detach().clone(), None
    if tensor.is_leaf:
        gradient = tensor.grad
        if gradient is not None:
            tensor.grad = gradient.clone()  # a backward adds to it in place

    def put_back() -> None:
        with torch.no_grad():
            if not torch.equal(tensor, numbers):
                tensor.copy_(numbers)
        if tensor.is_leaf:
            tensor.grad = gradient

    return put_back


def refuse_another_kind(node: fx.Node, value: Any) -> None:
    """Refuse a tensor of another dtype or size than the graph was traced for, or a number for one.

    Its operators would round otherwise, and its numbers may depend on the size.

    Raises:
        ValueError: dtypes or sizes differ, or the graph was traced for a tensor.
    """
    traced = value_of(node)
    if not isinstance(traced, Tensor):
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"input {input_fqn(node)} is {value!r}, and a graph was traced for a tensor of "
            f"{traced.dtype} and {list(traced.shape)}"
        )
    sizes = list(traced.shape)
    is_known = all(isinstance(size, int) for size in sizes)
    if traced.dtype != value.dtype or (is_known and sizes != list(value.shape)):
        raise ValueError(
            f"input {input_fqn(node)} is a tensor of {value.dtype} and size {list(value.shape)}, "
            f"and a graph was traced for {traced.dtype} and {sizes}: give inputs= of that kind, or "
            "trace both graphs for this one"
        )


class GraphProgram(Program):
    """A graph without collectives, or on all ranks of a world."""

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], world: AnyWorld | None, by_place: bool
    ) -> None:
        """Take ``inputs``, in a world those of each rank. ``by_place``: results have no names.

        Raises:
            ValueError: the graph takes another number of inputs, or was traced for others.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        takes = list(map(input_fqn, placeholders))
        of_ranks = [inputs] if world is None else inputs
        if isinstance(of_ranks, DrawnInputs):
            of_ranks = of_ranks[:1]  # the others have as many, and may never be drawn
        for own in of_ranks:
            if len(own) != len(takes):
                raise ValueError(
                    f"a graph takes {counted(len(takes), 'input')} ({', '.join(takes)}), and "
                    f"{len(own)} are given: both programs take the same inputs in the same order, "
                    "each a tensor or a number by itself"
                )
            for node, value in zip(placeholders, own, strict=True):
                refuse_another_kind(node, value)
        self.rank: int | None = None  # of this process, on real ranks
        self.gm, self.inputs, self.world, self.by_place = gm, inputs, world, by_place

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        gm = self.gm
        if dict(attributes_of(gm)) or gm.graph.find_nodes(op="call_module"):
            gm = copy.deepcopy(gm)  # a run may write to what the module holds
        inputs = [self.inputs] if self.world is None else self.inputs
        # All at once, as ranks may share a tensor.
        given = copies(list(map(list, inputs)))
        for number, own in enumerate(given):
            rank = self.rank if self.world is None else number
            for place, value in enumerate(own):
                if isinstance(value, Tensor):
                    make_abstract(mode, value, place if rank is None else (place, rank))

        for name, tensor in gm.named_parameters():
            make_abstract(mode, tensor, name)
        for key, tensor in self._state(gm, given).items():
            observed.note_before(mode, key, tensor)

        with torch.no_grad(), mode:
            if self.world is None:
                outputs = NodeByNode(gm, self.rank).run(*given[0])
                observed.outputs = self._named(self.rank, outputs, gm)
            else:
                random = RankRandomStates()
                start = random.copy()
                results = self._run_on_ranks(mode, gm, given, self.world, random)
                for rank, own in enumerate(results):
                    observed.outputs |= self._named(rank, own, None)

        observed.after = self._state(gm, given)
        if self.world is not None:  # each rank has drawn from a generator of its own
            _note_random_states(observed, start, random, len(given))

    def known(self) -> list[str]:
        abstract = {name for name, _ in self.gm.named_parameters()}
        found = {name: tensor for name, tensor in attributes_of(self.gm) if name not in abstract}
        return _with_numbers(found)

    def _run_on_ranks(
        self,
        mode: ArithmeticMode,
        gm: fx.GraphModule,
        given: Sequence[Any],
        world: AnyWorld,
        random: RankRandomStates,
    ) -> list[dict[str, Any]]:
        """Return the results of each rank; leave in ``random`` the states of their generators."""
        return run_on_net(gm, given, world, self._net_in(mode.arithmetic, world), random=random)

    @staticmethod
    def _net_in(arithmetic: Arithmetic, world: AnyWorld) -> Net:
        net = net_of_any(world)
        # Numbers modulo a prime have the same sum in any order, and a net that follows the order of
        # real ranks would round partial sums.
        return AnyOrder.of(net) if isinstance(arithmetic, Field) else net

    def _named(
        self, rank: int | None, outputs: Any, gm: fx.GraphModule | None
    ) -> dict[Key, Tensor]:
        if gm is not None or not isinstance(outputs, dict):
            leaves = pytree.tree_leaves(outputs)
            structure = self.gm.graph.output_node().meta.get("gt_structure")
            if isinstance(structure, pytree.TreeSpec) and structure.num_leaves == len(leaves):
                outputs = pytree.tree_unflatten(leaves, structure)  # as the traced function did
            outputs = named_outputs(outputs, None if self.by_place else gm)
        named: dict[Key, Tensor] = {}
        for name, leaf in outputs.items():
            if isinstance(leaf, Tensor):
                named[name, rank] = leaf
        return named

    def _state(self, gm: fx.GraphModule, given: Sequence[Sequence[Any]]) -> dict[Key, Tensor]:
        """Return the inputs that are tensors, and the graph's attributes."""
        found: dict[Key, Tensor] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        for number, own in enumerate(given):
            rank = self.rank if self.world is None else number
            for place, (node, value) in enumerate(zip(placeholders, own, strict=True)):
                name = f"input {place}" if self.by_place else input_fqn(node)
                if isinstance(value, Tensor):
                    found[f"{name}{AFTERWARDS}", rank] = value
        for name, tensor in attributes_of(gm):
            found[f"{name}{AFTERWARDS}", None] = tensor.detach()
        return found


def _note_random_states(
    observed: Observed, start: RankRandomStates, end: RankRandomStates, size: int
) -> None:
    """Note the state of each rank's generator before and after a run."""
    for rank in range(size):
        for name, state in random_states_afterwards({"torch.cpu": at(end.states, rank)}).items():
            observed.after[name, rank] = state
        for name, state in random_states_afterwards({"torch.cpu": at(start.states, rank)}).items():
            observed.before[name, rank] = Result(state, state.dtype, True)


class FunctionProgram(Program):
    """An eager function, or a module, called with copies of its inputs.

    Modules among the inputs have abstract parameters. What is left in ``grad`` is a result.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.function, self.inputs = function, inputs
        # Both refuse what nobody can follow.
        state, captured = named_state(function, inputs), captured_by(function)
        buffers = {name: each for name, each in state.items() if name.startswith("buffer ")}
        self._known = _with_numbers(buffers | captured)

    def known(self) -> list[str]:
        return self._known

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        function, *given = copy_of([self.function, *self.inputs])
        state = named_state(function, given)
        for name, tensor in state.items():
            if not name.startswith("buffer "):
                # By its place alone, as a ``GraphProgram`` names its inputs: equal names have equal
                # elements.
                place = name.removeprefix("input ")
                make_abstract(mode, tensor, int(place) if place.isdigit() else name)
                if tensor.is_leaf and tensor.grad is not None:
                    make_abstract(mode, tensor.grad, ("gradient of", name))

        captured = captured_by(self.function)
        for name, tensor in (state | captured).items():
            observed.note_before(mode, (f"{name}{AFTERWARDS}", None), tensor.detach())
        values = self._python_values(function, given)
        # The function reads these tensors themselves, so the run cannot have copies: they are
        # restored after it.
        for tensor in captured.values():
            observed.put_back.callback(_restorer(tensor))
        observed.put_back.callback(restorer_of_contents(self.function))
        observed.put_back.callback(put_modes_back, modes_of_torch())
        outputs = self._called(mode, function, given)
        check_outputs(outputs)
        observed.note_values(values, self._python_values(function, given))
        named = named_outputs(outputs)
        for name, leaf in named.items():
            observed.outputs[name, None] = leaf.detach()
        for name, tensor in attributes_of_tensors(named).items():
            observed.outputs[name.removeprefix("buffer "), None] = tensor.detach()
        observed.trains = _names_that_train(named, state)
        # Looked up again: a program may replace a tensor instead of writing to it.
        held = named_state(function, given, has_run=True) | captured_by(self.function)
        for name, tensor in held.items():
            observed.after[f"{name}{AFTERWARDS}", None] = tensor.detach()
            if tensor.is_leaf and tensor.grad is not None:
                observed.outputs[f"gradient of {name}", None] = tensor.grad.detach()
                observed.trains = None

    def _python_values(self, function: Callable[..., Any], given: Sequence[Any]) -> dict[str, str]:
        """Return the values of Python that a call may change."""
        return python_values(function, given)

    def _called(self, mode: ArithmeticMode, function: Callable[..., Any], given: list[Any]) -> Any:
        try:
            with mode, CountReads(mode):
                return function(*given)
        except NoMeaning:
            raise
        except Exception as error:
            # Dynamo refuses to run under a mode, and would refuse a second call as well.
            if "torch.compile" not in str(error):
                function, *given = copy_of([self.function, *self.inputs])
                try:
                    function(*given)
                except Exception:
                    raise error from None  # it raises on real numbers, too
            words = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
            raise NoMeaning(f"the function runs on real numbers alone ({words})") from error


class NamedProgram(Program):
    """A function from named inputs to named results, such as a stage of a compilation.

    It remembers its runs, as a stage is compared with the one before and with the one after.
    """

    def __init__(
        self, call: Callable[[dict[str, Any]], dict[str, Tensor]], inputs: Mapping[str, Any]
    ) -> None:
        self.call, self.inputs = call, inputs
        self._runs: dict[Any, ProgramRun] = {}

    def run(self, arithmetic: Arithmetic, on_result: Any = None) -> ProgramRun:
        if on_result is not None:
            return super().run(arithmetic, on_result)
        key = arithmetic.settings()
        if key not in self._runs:
            self._runs[key] = super().run(arithmetic)
        return self._runs[key]

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        given = dict(zip(self.inputs, copies(list(self.inputs.values())), strict=True))
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            make_abstract(mode, tensor, name)
        for name, tensor in tensors.items():
            observed.note_before(mode, (f"{name}{AFTERWARDS}", None), tensor)
        with mode:
            for name, result in self.call(given).items():
                observed.outputs[name, None] = result.detach()
        for name, tensor in tensors.items():
            observed.after[f"{name}{AFTERWARDS}", None] = tensor
