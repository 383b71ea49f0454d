"""Accuracy: compiled code and eager, each against a run of the eager function in float64.

Inductor's kernels round otherwise than those of eager, so bits are not promised. What can be asked
is that they do not round *more*. An *error* is the root mean square of the difference from the run
in float64, over the elements of a tensor and over all seeds. Less than half a unit in the last
place of the tensor's dtype does not count, as no kernel can do better. Of whole numbers and bools
the error is the share of elements that differ.

A mean over many elements hides one that is wrong. So the largest error of an element is judged too,
by eager's largest, with a factor that is ``_FOR_ONE`` times as large.

A few numbers, such as one loss a seed, may be near to the exact ones by chance. So a factor grows
by three standard deviations of the logarithm of a ratio of two errors: ``exp(3 / sqrt(n))``.

Some results show no such ratio: constants, and numbers that are nothing but error. They must stay
below a *floor*, the largest error of an element that rounding explains. Infinities and NaNs on
which eager and float64 agree, and results that are no numbers, must be the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.arithmetic import TorchDispatchMode
from pytest_gtrainer._torch.random_states import random_state, random_states_kept
from pytest_gtrainer._torch.values import OpOverload, pytree, schema
from pytest_gtrainer.facts import FailedCheck, counted
from pytest_gtrainer.graph.nodes import AFTERWARDS
from pytest_gtrainer.numerics.graph_run import copies
from pytest_gtrainer.numerics.verdict import cut
from pytest_gtrainer.proofs.state import (
    HeldState,
    captured_by,
    check_outputs,
    copy_of,
    named_state,
)
from pytest_gtrainer.worlds.simulated import VacuousCheck

# Largest errors vary more than means: another order of additions may hit one element badly.
_FOR_ONE = 8.0
_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


@dataclass(slots=True)
class TensorErrors:
    """The errors of a result, on both sides.

    Attributes:
        name: "output", "gradient of <FQN>", or what the function leaves in a buffer or an input.
        module: whose parameter or buffer it is, in words; else "".
        count: elements that were compared, over all seeds.
        left_out: elements that are not finite in eager or in float64.
        other_extremes: those that eager and float64 agree on, and compiled code has otherwise.
        is_constant: it is the same on all seeds, though the inputs are not.
        not_judged: why it shows no ratio; "" if it does.
        floor: the error of an element that is allowed, if it shows no ratio.
    """

    name: str
    module: str = ""
    dtype: torch.dtype = torch.float32
    count: int = 0
    left_out: int = 0
    other_extremes: int = 0
    is_constant: bool = True
    not_judged: str = ""
    floor: float = 0.0
    _compiled: float = 0.0
    _eager: float = 0.0
    _exact: float = 0.0
    _largest: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _first: Tensor | None = None

    def add(self, compiled: Tensor, eager: Tensor, exact: Tensor) -> None:
        """Add the results of one seed."""
        self.dtype = eager.dtype
        if self._first is None:
            self._first = exact
        elif not torch.equal(self._first, exact):
            self.is_constant = False
        if not (eager.is_floating_point() or eager.is_complex()):
            self.count += exact.numel()
            self._compiled += int((compiled != exact).sum())
            self._eager += int((eager != exact).sum())
            self._exact += int(exact.count_nonzero())
            return
        kept = exact.isfinite() & eager.isfinite()
        extremes = ~exact.isfinite() & _same(eager.to(exact.dtype), exact)
        self.other_extremes += int((extremes & ~_same(compiled.to(exact.dtype), exact)).sum())
        exact = exact[kept]
        self.count += exact.numel()
        self.left_out += kept.numel() - exact.numel()
        errors = (compiled[kept].to(exact.dtype) - exact).abs().nan_to_num(math.inf)
        of_eager = (eager[kept].to(exact.dtype) - exact).abs()
        self._compiled += float(errors.square().sum())
        self._eager += float(of_eager.square().sum())
        self._exact += float(exact.abs().square().sum())
        if exact.numel():
            now = [float(each.abs().max()) for each in (errors, of_eager, exact)]
            first, second, third = map(max, self._largest, now)
            self._largest = first, second, third

    def _mean(self, squares: float) -> float:
        return math.sqrt(squares / self.count) if self.count else 0.0

    @property
    def compiled(self) -> float:
        """The error of the compiled side."""
        return self._mean(self._compiled)

    @property
    def eager(self) -> float:
        """The error of eager."""
        return self._mean(self._eager)

    @property
    def exact(self) -> float:
        """The root mean square of the numbers themselves."""
        return self._mean(self._exact)

    @property
    def largest(self) -> float:
        """The largest of the numbers themselves; 0 for whole numbers."""
        return self._largest[2]

    @property
    def _half_a_unit(self) -> float:
        """Half a unit in the last place of 1; 0 for whole numbers."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.finfo(self.dtype).eps / 2
        return 0.0

    @property
    def least(self) -> float:
        """The error to compare with: that of eager, or half a unit in the last place."""
        return max(self.eager, self.exact * self._half_a_unit)

    @property
    def ratio(self) -> float:
        """The error of compiled code, as a multiple of eager's."""
        if not self.compiled:
            return 0.0
        return self.compiled / self.least if self.least else math.inf

    @property
    def ratio_of_largest(self) -> float:
        """The largest error of an element of compiled code, as a multiple of eager's largest."""
        compiled, eager, exact = self._largest
        if not compiled:
            return 0.0
        eager = max(eager, exact * self._half_a_unit)
        return compiled / eager if eager else math.inf

    def excess(self, factor: float) -> float:
        """Return how near an error is to what is allowed; above 1 it is larger."""
        if self.other_extremes:
            return math.inf
        if self.not_judged and self._half_a_unit:
            largest = self._largest[0]
            if not self.floor:
                return math.inf if largest else 0.0
            return largest / self.floor
        most = max(self.ratio, self.ratio_of_largest / _FOR_ONE)
        return most / self.allowed(factor)

    def allowed(self, factor: float) -> float:
        """Return the largest ratio that chance explains, besides ``factor``."""
        return factor * math.exp(3 / math.sqrt(max(self.count, 1)))

    def set_aside(self, factor: float, scale: float, *, varies: bool) -> None:
        """Say why this tensor shows no ratio, if so, and which error of an element it may have.

        Eager's own error may be zero by chance, where numbers cancel. The cancelled numbers are
        seen nowhere; ``scale``, the largest number among all results of this kind, is near them.
        """
        if self.not_judged:
            return
        _, error, largest = self._largest
        is_noise = self.exact <= self.allowed(factor) * self.least
        if not self.count:
            self.not_judged = "empty"
            if self.left_out:
                self.not_judged = "no element is finite in eager and in float64"
        elif varies and self.is_constant:
            self.not_judged = "the same for all inputs"
            # A gradient of zero is rather a sum that cancels than a constant of the program.
            may_cancel = self.name.startswith("gradient of ") and not largest
            if not error and not may_cancel:
                return
        elif is_noise:
            self.not_judged = "zeros in its place would pass: eager's numbers are nothing but error"
        if not is_noise:
            scale = largest
        # Four units in the last place, or eager's own error as that of one element elsewhere.
        self.floor = _FOR_ONE * max(self.allowed(factor) * error, scale * self._half_a_unit)

    def in_words(self, factor: float) -> str:
        """Return the error, with what it is measured by and how much is allowed."""
        if self.other_extremes:
            return (
                f"{counted(self.other_extremes, 'element')} unlike the inf or NaN that eager and "
                "float64 agree on"
            )
        if self.not_judged and self._half_a_unit:
            return (
                f"an element is {self._largest[0]:.3g} off ({self.floor:.3g} allowed; "
                f"{self.not_judged})"
            )
        allowed = self.allowed(factor)
        of_one = self.ratio_of_largest / _FOR_ONE
        if of_one > max(allowed, self.ratio):
            return (
                f"one element has {self.ratio_of_largest:.3g} times the largest error of eager "
                f"({_FOR_ONE * allowed:.3g} allowed)"
            )
        return (
            f"{self.ratio:.3g} times the error of eager "
            f"({allowed:.3g} allowed for {counted(self.count, 'number')})"
        )

    def in_order(self, factor: float) -> str:
        """Return a line that begins with the number by which ``Accuracy`` sorts, if there is one.

        Few numbers are allowed a larger ratio than many, so ratios alone are in another order.
        """
        excess, words = self.excess(factor), self.in_words(factor)
        if math.isinf(excess):
            return f"{self.name}: {words}"
        return f"{self.name}: {excess:.3g} times what is allowed: {words}"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The errors of all results; ``str(accuracy)`` is written for a terminal.

    Attributes:
        tensors: those that were judged, and those that failed otherwise; the worst first.
        not_judged: a line for each result that shows no ratio of errors, and is no other.
        factor: how many times eager's error is allowed.
        seeds: how many runs.
    """

    tensors: tuple[TensorErrors, ...]
    not_judged: tuple[str, ...] = ()
    factor: float = 2.0
    seeds: int = 1

    @property
    def worst(self) -> TensorErrors:
        """The tensor that exceeds most, or comes nearest to, what is allowed."""
        return self.tensors[0]

    @property
    def failing(self) -> tuple[TensorErrors, ...]:
        """The tensors whose error is larger than allowed, the worst first."""
        return tuple(each for each in self.tensors if each.excess(self.factor) > 1)

    def __str__(self) -> str:
        worst, failing = self.worst, self.failing
        of = f", of {worst.module}" if worst.module else ""
        lines = [
            f"{'less' if failing else 'no less'} accurate than eager: "
            f"{len(failing)} of {counted(len(self.tensors), 'tensor')} on "
            f"{counted(self.seeds, 'seed')} with a larger error",
            f"  worst {worst.name}{of}: {worst.in_words(self.factor)}",
            f"    errors {worst.compiled:.2g} and {worst.eager:.2g} of numbers of {worst.exact:.2g}"
            f", root mean squares against float64",
        ]
        lines += cut("then, the worst first", [each.in_order(self.factor) for each in failing[1:]])
        left_out = [each for each in self.tensors if each.left_out]
        title = "not finite in eager or in float64, and left out"
        lines += cut(title, [f"{each.name}: {each.left_out}" for each in left_out])
        lines += cut("not judged", self.not_judged)
        return "\n".join(lines)


class LessAccurate(FailedCheck):
    """Compiled code has larger errors than eager; ``accuracy`` has all of them."""

    __module__ = "pytest_gtrainer"

    def __init__(self, message: str, accuracy: Accuracy) -> None:
        super().__init__(message)
        self.accuracy = accuracy


@facts.check
def assert_no_less_accurate(
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    *inputs: Any,
    make_inputs: Callable[[int], Sequence[Any]] | None = None,
    factor: float = 2.0,
    seeds: Sequence[int] = range(4),
) -> Accuracy:
    """Fail unless the results of compiled code are as near to those in float64 as eager's.

    Compared are outputs, gradients of parameters and of inputs that require them, and what is
    written to buffers, attributes of modules, and inputs. Modules are put back after each run. If
    the function leaves no gradients, its outputs are multiplied by random numbers for the backward,
    and a single number by one. The run in float64 is of a copy of ``eager``: parameters and inputs
    are cast, and casts to other floating-point dtypes inside are set aside.

    A result of which no ratio of errors can be judged must be the same as far as it is known. A
    constant without error in eager, infinities, NaNs, and results that are no numbers must be
    equal. Numbers that are nothing but error may be ``8 * factor`` times as large as those of
    eager, or four units in the last place of the largest output (of gradients: gradient).

    Args:
        compiled, eager: modules or functions; ``torch.compile(model)`` and ``model``, for example.
            Parameters are those of modules, which are called or are among the inputs.
        inputs: of a call. For each seed but the first, elements of floating-point inputs are drawn
            from those that the input holds; whole numbers stay.
        make_inputs: returns the inputs for a seed instead.
        factor: how many times the error of eager is allowed, above 0. For few numbers more is, by
            chance: 4.5 times as much for four, 1.1 times for a thousand.
        seeds: of the inputs and of the backward.

    Raises:
        LessAccurate: with the worst tensor, its module and the ratio; or the sides have other
            results, dtypes or shapes.
        VacuousCheck: nothing could have failed: constant results, nothing finite, nothing but
            errors.
        ValueError: ``factor`` is no such number; random numbers are drawn, which nobody can draw
            alike in float64; eager computes in float64 already; it does not run in float64; sides
            with other parameters.
    """
    __tracebackhide__ = True
    facts.check_callable(compiled=compiled, eager=eager)
    if make_inputs is not None and inputs:
        raise ValueError("inputs and make_inputs=: give one of them")
    if not 0 < factor < math.inf:  # so that nan is refused, too
        raise ValueError(f"factor={factor!r}: give a finite number above 0, as 2.0")
    if isinstance(seeds, int):
        raise TypeError(f"seeds={seeds}: give the seeds themselves, such as range({seeds})")
    if not seeds:
        raise ValueError("seeds=() runs nothing: give one or more")
    if compiled is eager:
        raise ValueError("compiled and eager are one object, which is as accurate as itself")
    captured_by(eager)  # refuses what cannot be cast
    found: dict[str, TensorErrors] = {}
    first: Sequence[Any] | None = None
    varies = False
    for number, seed in enumerate(seeds):
        given = _resampled(inputs, seed) if number else inputs
        if make_inputs is not None:
            given = make_inputs(seed)
        first = given if first is None else first
        varies |= _differ(given, first)
        _require_equal_state(compiled, eager, given)
        _add_errors(found, compiled, eager, given, seed)

    accuracy = _judged(found, factor, len(seeds), varies=varies)
    outcome = "less accurate" if accuracy.failing else "no less accurate"
    if any(each.left_out for each in accuracy.tensors):
        outcome += " (not finite)"
    facts.emit(
        "verdict", outcome=outcome, tensors=len(accuracy.tensors), what="compiled against float64"
    )
    if accuracy.failing:
        raise LessAccurate(str(accuracy), accuracy)
    if not any(each.compiled or each.eager for each in accuracy.tensors):
        facts.emit("idle", what="no error on either side: nothing that was computed here rounds")
    return accuracy


def _judged(found: dict[str, TensorErrors], factor: float, seeds: int, *, varies: bool) -> Accuracy:
    """Set aside the results that could not have failed, and sort the others."""
    __tracebackhide__ = True
    judged, not_judged = [], []
    scales = {True: 0.0, False: 0.0}
    for each in found.values():
        is_gradient = each.name.startswith("gradient of ")
        scales[is_gradient] = max(scales[is_gradient], each.largest)
    for each in found.values():
        each.set_aside(factor, scales[each.name.startswith("gradient of ")], varies=varies)
        if each.not_judged and each.excess(factor) <= 1:
            not_judged.append(f"{each.name}: {each.not_judged}")
        else:
            judged.append(each)
    if not judged:
        lines = cut("not judged", not_judged) or ["  it returns no numbers, and leaves none"]
        raise VacuousCheck(
            "\n".join(["no result could have been less accurate: this check cannot fail", *lines])
        )
    if all(each.dtype == torch.float64 and not each.eager for each in judged):
        raise ValueError("eager computes in float64 already: no run is more exact")
    judged.sort(key=lambda each: each.excess(factor), reverse=True)
    return Accuracy(tuple(judged), tuple(not_judged), factor, seeds)


def _add_errors(
    found: dict[str, TensorErrors], compiled: Any, eager: Any, inputs: Sequence[Any], seed: int
) -> None:
    """Run all three, and add the errors of each result."""
    __tracebackhide__ = True
    with random_states_kept():
        expected = _run_and_put_back(eager, inputs, seed, refuse_random=True)
        actual = _run_and_put_back(compiled, inputs, seed)
        exact = _run_in_float64(eager, inputs, seed)
    owners = {name: owner for name, _, owner in _state(eager, inputs)}
    for name in [*expected, *actual]:
        if (name in expected) != (name in actual):
            side = "eager" if name in expected else "compiled"
            raise FailedCheck(f"{name}: only {side} has it")
    for name, wanted in expected.items():
        got = actual[name]
        if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
            _add_plain(found, name, got, wanted, exact.get(name))
            continue
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            raise FailedCheck(
                f"{name}: compiled gives {got.dtype} of {list(got.shape)}, "
                f"eager {wanted.dtype} of {list(wanted.shape)}"
            )
        if name not in exact:
            raise ValueError(f"{name}: eager makes it, but not in float64")
        owner = owners.get(name.removeprefix("gradient of ").removesuffix(AFTERWARDS), "")
        errors = found.setdefault(name, TensorErrors(name, owner))
        errors.add(got.cpu(), wanted.cpu(), exact[name].cpu())


def _add_plain(
    found: dict[str, TensorErrors], name: str, compiled: Any, eager: Any, exact: Any
) -> None:
    """Require that a result which is no number, such as None or a text, is the same."""
    __tracebackhide__ = True
    same_type = type(compiled) is type(eager)
    if same_type and compiled == eager:
        return
    # A text may hold numbers, and a function may be made by each call.
    if same_type and eager != exact and not isinstance(eager, torch.dtype):
        reason = f"a {type(eager).__name__} that is another in float64"
        found.setdefault(name, TensorErrors(name, not_judged=reason))
        return
    shown = [
        f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        for value in (compiled, eager)
    ]
    raise FailedCheck(f"{name}: compiled gives {shown[0]}, eager {shown[1]}")


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Return where the elements of two tensors are equal, or both NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def _state(function: Any, inputs: Sequence[Any]) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the tensors that a call is given: by FQN, with the module in words, or by place."""
    is_first = True
    for place, value in enumerate([function, *inputs], -1):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            where = f"input {place}{pytree.keystr(path)}"
            if isinstance(leaf, Tensor) and place >= 0:
                yield where, leaf, ""
            elif isinstance(leaf, nn.Module):
                prefix, is_first = "" if is_first else f"{where}.", False
                for fqn, part in leaf.named_modules():
                    # torch.compile wraps modules, also inside of others
                    fqn = ".".join(name for name in fqn.split(".") if name != "_orig_mod")
                    owner = f"{fqn} ({type(part).__name__})" if fqn else type(part).__name__
                    own = [
                        *part.named_parameters(recurse=False),
                        *part.named_buffers(recurse=False),
                    ]
                    for name, tensor in own:
                        yield f"{prefix}{fqn}{'.' if fqn else ''}{name}", tensor, owner


def _state_and_attributes(function: Any, inputs: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a call is given, and those that are plain attributes of modules."""
    for name, tensor, _ in _state(function, inputs):
        yield name, tensor
    for leaf in pytree.tree_leaves([function, *inputs]):
        if isinstance(leaf, nn.Module):
            for fqn, part in leaf.named_modules():
                fqn = "".join(
                    f"{name}." for name in fqn.split(".") if name not in ("", "_orig_mod")
                )
                for name, value in vars(part).items():
                    if type(value) is Tensor:
                        yield f"attribute {fqn}{name}", value


def _require_equal_state(compiled: Any, eager: Any, inputs: Sequence[Any]) -> None:
    """Refuse sides that are not one function of the same numbers, and tensors in parts."""
    __tracebackhide__ = True
    named_state(eager, inputs)  # refuses compiled code, hooks, and objects
    ours, theirs = (
        {name: tensor for name, tensor, _ in _state(side, inputs)} for side in (compiled, eager)
    )
    if ours.keys() != theirs.keys():
        unlike = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"compiled and eager hold other tensors: {', '.join(unlike[:3])}")
    for name, tensor in theirs.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, which cannot be cast to float64"
            )
        other = ours[name]
        if other.dtype != tensor.dtype or not torch.equal(other, tensor):
            raise ValueError(f"compiled and eager hold other numbers in {name}: copy the state")


def _run_and_put_back(
    function: Any, inputs: Sequence[Any], seed: int, *, refuse_random: bool = False
) -> dict[str, Any]:
    """Run, and leave modules and their gradients as they were before."""
    __tracebackhide__ = True
    module = function if isinstance(function, nn.Module) else nn.Identity()
    held = HeldState(module, pytree.tree_leaves(list(inputs)))
    try:
        return _run(function, inputs, seed, refuse_random=refuse_random)
    finally:
        held.put_back()


def _run(
    function: Any, inputs: Sequence[Any], seed: int, *, refuse_random: bool = False
) -> dict[str, Any]:
    """Run forward and backward; return results, gradients, and the state that was written."""
    leaves, spec = pytree.tree_flatten(list(inputs))
    given = pytree.tree_unflatten(copies(leaves, keep_grad=True), spec)
    before = random_state()
    state = dict(_state_and_attributes(function, given))
    numbers = {name: tensor.detach().clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.grad = None
    found = _results_of(function, given, state, seed)
    # A call may also put another tensor in the place of a buffer, or add one to a list.
    for name, tensor in _state_and_attributes(function, given):
        known = numbers.get(name)
        if known is None or tensor.dtype != known.dtype or not torch.equal(tensor, known):
            found[f"{name}{AFTERWARDS}"] = tensor
    after = random_state()
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = value.detach().clone()
    drawn = [name for name in before if not torch.equal(before[name], after[name])]
    if refuse_random and drawn:
        raise ValueError(
            f"eager draws random numbers ({', '.join(drawn)}), and nobody draws the same ones in "
            "float64 or in compiled code: call eval(), or set dropout to 0"
        )
    return found


def _results_of(
    function: Any, given: Sequence[Any], state: dict[str, Tensor], seed: int
) -> dict[str, Any]:
    outputs = function(*given)
    check_outputs(outputs)
    found: dict[str, Any] = {}
    ends = []
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, int | float | complex):
            leaf = torch.tensor(leaf)
        found[f"output{pytree.keystr(path)}"] = leaf
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            ends.append(leaf)
    if ends and all(tensor.grad is None for tensor in state.values()):
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for end in ends:
            # Whole numbers up to 128 are the same in bfloat16 and in float64.
            drawn = torch.ones(end.shape, dtype=torch.int64)
            if end.numel() > 1:
                drawn = torch.randint(-128, 129, end.shape, generator=generator)
            weights.append(drawn.to(end.device, end.dtype) / 64)
        torch.autograd.backward(ends, weights)
    for name, tensor in state.items():
        if tensor.grad is not None:
            found[f"gradient of {name}"] = tensor.grad
    return found


def _run_in_float64(eager: Any, inputs: Sequence[Any], seed: int) -> dict[str, Any]:
    __tracebackhide__ = True
    function, *given = copy_of([eager, *inputs])
    if isinstance(function, nn.Module):
        function.double()

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf.double()
        if isinstance(leaf, Tensor) and _is_narrow(leaf.dtype):
            return _widened(leaf.detach()).requires_grad_(leaf.requires_grad)
        return leaf

    try:
        with _InFloat64(), _default_dtype(torch.float64):
            return _run(function, pytree.tree_map(cast, given), seed)
    except Exception as error:
        raise ValueError(
            f"eager does not run in float64: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in _WIDE or (dtype.is_floating_point and dtype != torch.float64)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, torch.float64))


class _InFloat64(TorchDispatchMode):
    """Compute in float64, whatever dtypes a program asks for."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        def widen(value: Any) -> Any:
            if isinstance(value, torch.dtype) and _is_narrow(value):
                return _WIDE.get(value, torch.float64)
            if isinstance(value, Tensor) and _is_narrow(value.dtype):
                return _widened(value)
            return value

        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            arguments = schema(func).arguments
            named = kwargs | {each.name: at for each, at in zip(arguments, args, strict=False)}
            for argument in arguments:
                value = named.get(argument.name)
                if argument.is_write and isinstance(value, Tensor) and _is_narrow(value.dtype):
                    raise TypeError(f"{func} writes to a tensor of {value.dtype} made elsewhere")
        if str(func) == "aten.view.dtype":
            raise TypeError("memory is read as another dtype")
        results = func(*pytree.tree_map(widen, args), **pytree.tree_map(widen, kwargs))
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor) and _is_narrow(leaf.dtype):
                raise TypeError(f"{func} computes in {leaf.dtype}, whatever it is given")
        return results


def _differ(inputs: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(pytree.tree_leaves(list(inputs)), pytree.tree_leaves(list(others)), strict=False)
    for one, other in pairs:
        if isinstance(one, Tensor) and isinstance(other, Tensor) and not torch.equal(one, other):
            return True
    return False


def _resampled(inputs: Sequence[Any], seed: int) -> Any:
    """Return the inputs, with elements of floating-point tensors drawn from those that they hold.

    So they keep their range. In another order alone, the mean of all would be the same.
    """
    generator = torch.Generator().manual_seed(seed)

    def resample(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            return leaf
        places = torch.randint(leaf.numel(), leaf.shape, generator=generator).to(leaf.device)
        made = torch.empty_like(leaf).copy_(leaf.detach().reshape(-1)[places])
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(resample, list(inputs))
