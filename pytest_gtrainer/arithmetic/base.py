"""The base of terms and field: constants, casts, moves, decisions and unknown functions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.operators import COMPARISONS, FILLED, holds_exactly
from pytest_gtrainer.arithmetic.values import NoMeaning, Value, spell
from pytest_gtrainer.graph.nodes import leaves_of, named_arguments

# An int64 tensor.
Elements: TypeAlias = Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator.

    Attributes:
        args, kwargs: as given; a ``Value`` stands for an abstract tensor.
        results: the tensors that the real operator has returned, which say shapes and dtypes.
    """

    operator: Any
    base: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the names of the schema, with defaults."""
        return named_arguments(self.operator, self.args, self.kwargs)

    @property
    def result(self) -> Tensor:
        return self.results[0]


def values_in(*arguments: Any) -> list[Value]:
    return [leaf for leaf in leaves_of(arguments) if isinstance(leaf, Value)]


def mapped(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return arguments with ``function`` applied to each leaf."""
    if isinstance(argument, list | tuple):
        return type(argument)([mapped(function, item) for item in argument])
    if isinstance(argument, dict):
        return {name: mapped(function, item) for name, item in argument.items()}
    return function(argument)


def dims_of(call: Call, ndim: int) -> list[int]:
    """Return the dimensions that a reduction reduces; none given, or an empty list, means all."""
    dims = call.named.get("dim", call.named.get("dims"))
    if isinstance(dims, int):
        dims = [dims]
    return [dim % ndim for dim in dims] if dims and ndim else list(range(ndim))


class Arithmetic(ABC):
    """The elements that stand for numbers, and the results that operators have for them.

    Attributes:
        kind: what equal results in it prove, see ``Proof``.
        rounds: narrow dtypes round what is computed.
        is_exact: a formula may compute in other steps than an operator, such as log(1 + x).
        takes_apart: kernels are seen through: operators are made of others where torch says how.
        seed: another seed gives other elements to the same inputs.
        opaque: operators of which nothing is known, and hashes of the arguments that they got.
        meanings: operators that a ``meaning`` stood in for.
        bias: how comparisons order abstract elements: 1 above every known number, -1 below, 0
            among them.
        decisions: how often elements were compared or sorted.
        roots: square roots were taken.
        limits: known numbers besides 0 that elements were compared with: their elements and keys.
        has_many_limits: more of them than anyone would tell apart.
        rivals: elements that were compared with each other or sorted, without their signs.
        gaps: keys that elements have beside limits, as intervals of sizes; of all if there are
            none.
        favoured: rivals that are larger, or smaller, than all others.
        fewest_roots: of how few different elements square roots were taken, ``FEW`` if of that many
            or more; their signs, one of two for each, may agree by chance.
        few: how often few different elements were compared with each other, or sorted.
        chosen: operators that have sorted or chosen elements.
        finite: operators that ask whether elements are infinite or NaN: no abstract one is.
        never_equal: operators that ask whether elements are equal: they never are by chance.
        branches: by place in the program's code, numbers that it read of what was compared.
        asked: by such a place, the last answer, how often it has come one after the other, and when
            it came first, in CPU seconds of this process.
        exponentials: how often ``exp`` or ``log`` was computed as an unknown function.
        masks: exp was taken of a number that a mask of a large negative number was added to.
        lowest: such a number was compared with others.
        empty: operators that computed something of no elements, and whether that has elements, as
            a sum has.
        empty_inputs: names of inputs without elements.
        coarsest: the largest epsilon of a dtype that elements were rounded to.
        keeps_digits: known numbers that a program computes in float32, such as 1 - 0.9**step, have
            the digits of float64.
        has_digits: there are such numbers.
        drawn: operators that have drawn random numbers, which are known.
    """

    kind: str
    is_exact: bool = False
    takes_apart: bool = True
    rounds: bool = True
    keeps_digits: bool = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.opaque: dict[str, set[int]] = {}
        self.meanings: set[str] = set()
        self.finite: set[str] = set()
        self.never_equal: set[str] = set()
        self.chosen: set[str] = set()
        self.drawn: set[str] = set()
        self.empty: dict[str, bool] = {}
        self.empty_inputs: list[str] = []
        self.branches: dict[str, set[str]] = {}
        self.asked: dict[str, tuple[str, int, float]] = {}
        self.bias = self.sign = 0
        self.stabilises = False  # a largest number is sought that changes nothing
        self.masks = self.lowest = self.roots = self.has_many_limits = self.has_digits = False
        self.limits: dict[int, int] = {}
        self.rivals = self.favoured = torch.empty(0, dtype=torch.int64)
        self.gaps: Sequence[tuple[int, int]] = ()
        self.decisions = self.few = self.exponentials = 0
        self.fewest_roots = FEW
        self.coarsest = 0.0
        self._uninitialised = 0

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def order_as(self, other: "Arithmetic") -> None:
        """Give inputs the elements that they have in another run, and the same order."""
        self.set_seed(other.seed)
        self.bias, self.sign = other.bias, other.sign
        self.gaps, self.favoured = other.gaps, other.favoured

    def settings(self) -> tuple[Any, ...]:
        """Return what a program's results depend on, besides the program."""
        favoured = tuple(self.favoured.tolist())
        order = (self.seed, self.bias, self.sign, tuple(self.gaps), favoured)
        return (type(self), self.kind, self.keeps_digits, *order)

    # --- elements

    @abstractmethod
    def narrow(self, hashes: Tensor) -> Elements:
        """Return pseudo-random elements for 64-bit hashes."""

    @abstractmethod
    def lift(self, value: Any) -> Elements:
        """Return the elements of a known tensor, a number, or a ``Value``."""

    @abstractmethod
    def order(self, elements: Elements) -> Tensor:
        """Return numbers that put elements in an order: infinities at the ends, 0 at 0."""

    @abstractmethod
    def not_finite(self, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
        """Return where elements are -inf, inf and NaN."""

    def order_of_two(self, left: Any, right: Any) -> tuple[Tensor, Tensor]:
        """Return the keys of two operands, of which one may be a known number.

        By ``bias`` abstract elements are above or below all known ones. So what is asked of a whole
        tensor, such as whether any element is above a limit, has both answers in some run.
        """
        if isinstance(left, Value) and isinstance(right, Value):
            self._note_decision(left.elements, right.elements)
            return self.order(left.elements), self.order(right.elements)
        self.decisions += 1  # by bias it goes both ways, also for few elements
        place = 0 if isinstance(left, Value) else 1
        abstract_one, known_one = (left, right) if place == 0 else (right, left)
        of_known = self.order_of_known(known_one)
        keys = [of_known, of_known]
        keys[place] = self.order_by_limits(abstract_one.elements)
        self._note_limits(abstract_one.elements, known_one, of_known)
        if not self.bias:
            return keys[0], keys[1]
        # Next to the ends, which infinities have.
        limits = torch.iinfo(torch.int64)
        end = limits.max - 1 if self.bias > 0 else limits.min + 1
        stays = self.has_order(abstract_one.elements) | ~self.may_be_biased(known_one)
        keys[place] = torch.where(stays, keys[place], end)
        return keys[0], keys[1]

    def order_by_limits(self, elements: Elements) -> Tensor:
        """Return numbers that put elements in an order among known numbers."""
        return self.order(elements)

    def order_of_known(self, operand: Any) -> Tensor:
        """Return numbers that put known numbers in an order."""
        return self.order(self.lift(operand))

    def has_order(self, elements: Elements) -> Tensor:
        """Return where an element of an abstract tensor is known, as an infinity is."""
        minus, plus, nan = self.not_finite(elements)
        return minus | plus | nan

    def may_be_biased(self, known: Any) -> Tensor:
        """Return which known numbers all abstract ones may be above, or below."""
        return torch.tensor(True)

    def _note_limits(self, elements: Elements, known: Any, keys: Tensor) -> None:
        """Note the known numbers that elements are compared with, but 0."""
        numbers = torch.as_tensor(known).double()
        counts = (numbers != 0) & numbers.isfinite() & (numbers.abs() < NO_LIMIT)
        if not bool(counts.any()):
            return
        self.few += count_different(elements) < FEW
        lifted = self.compared(self.lift(known)).expand(numbers.shape)[counts]
        pairs = torch.stack([lifted, keys.expand(numbers.shape)[counts]], 1).unique(dim=0)
        self.has_many_limits = self.has_many_limits or len(pairs) + len(self.limits) > _MOST_LIMITS
        if not self.has_many_limits:
            for element, key in pairs.tolist():
                self.limits.setdefault(element, key)

    def aim(self, keys: Tensor, elements: Elements, stays: Tensor) -> Tensor:
        """Return keys of an order in which elements lie in ``gaps``, and some are ``favoured``.

        Signs are those of ``keys``, so what is above 0 in all orders stays so.

        Args:
            stays: elements that keep their keys, as those of known numbers.
        """
        if self.gaps:
            lowest, width = torch.tensor(self.gaps).unbind(1)
            size = hashing.scramble(keys.abs()) & torch.iinfo(torch.int64).max
            place = size % len(self.gaps)
            aimed = lowest[place] + (size >> 8) % width[place]
            keys = torch.where(stays, keys, keys.sign() * aimed)
        if len(self.favoured):
            is_favoured = torch.isin(self._unsigned(elements), self.favoured) & ~stays
            if self.has_masks:
                is_favoured = is_favoured & (keys > 0)  # nothing is below a mask
            keys = torch.where(is_favoured, keys.sign() * (_ABOVE_ALL + (keys.abs() >> 4)), keys)
        return keys

    @property
    def has_masks(self) -> bool:
        """Return whether a number stands for one that is far below all others."""
        return False

    def _unsigned(self, elements: Elements) -> Tensor:
        """Return elements, equal for a number and its negative where that is known."""
        return self.compared(elements)

    def _note_decision(self, *operands: Elements, are_rivals: bool = True) -> None:
        """Note that elements are compared: few of them may all decide alike by chance.

        Args:
            operands: the elements.
            are_rivals: whether with each other, and not each with 0.
        """
        self.decisions += 1
        self.few += all(count_different(elements) < FEW for elements in operands)
        if not are_rivals:
            return
        for elements in operands:
            self._note_rivals(self._unsigned(elements))

    def _note_rivals(self, elements: Elements) -> None:
        if len(self.rivals) < MOST_RIVALS:
            found = elements.reshape(-1)[:MOST_RIVALS]
            self.rivals = torch.cat([self.rivals, found]).unique()

    @contextmanager
    def deciding_nothing(self) -> Iterator[None]:
        """Do not count the decisions inside: which way they go changes no real number."""
        before = self.decisions, self.few, self.lowest, self.rivals
        limits, chosen = dict(self.limits), set(self.chosen)
        outside, self.stabilises = self.stabilises, True
        try:
            yield
        finally:
            self.stabilises = outside
            self.decisions, self.few, self.lowest, self.rivals = before
            self.limits, self.chosen = limits, chosen

    def compared(self, elements: Elements) -> Elements:
        """Return the part of elements that results are compared by."""
        return elements

    def compared_instead(self, elements: Elements) -> Elements | None:
        """Return another part, by which results are equal, too; None if there is none."""
        return None

    def leaf(self, name: Any, shape: Sequence[int]) -> Elements:
        """Return elements that depend on a name, a place and the seed: an input."""
        count = torch.Size(shape).numel()
        seed = hashing.of_name("leaf", self.seed, name)
        return self.narrow(hashing.mix(seed, [torch.arange(1, count + 1)]).view(tuple(shape)))

    def of_input(self, name: Any, tensor: Tensor) -> Elements:
        """Return the elements of an input, whose numbers do not count."""
        return self.leaf(name, tensor.shape)

    def uninitialised(self, count: int, owner: int) -> Elements:
        """Return elements that equal no others: memory that nobody has written."""
        self._uninitialised += 1
        return self.leaf(("uninitialised", owner, self._uninitialised), (count,))

    @abstractmethod
    def rounded(self, value: Value, dtype: torch.dtype) -> Elements:
        """Return a value's elements as ``dtype``, which does not hold them exactly."""

    def filled_in(self, number: float, dtype: torch.dtype) -> Elements:
        """Return the element of a number that a program writes, in memory of ``dtype``."""
        if not self.rounds or not dtype.is_floating_point:
            return self.lift(float(number))
        return self.lift(torch.tensor(number, dtype=dtype))

    def cast(self, value: Value, dtype: torch.dtype) -> tuple[Elements, torch.dtype]:
        """Return elements as ``dtype``, and a dtype that holds them."""
        if holds_exactly(dtype, value.fits):
            return value.elements, value.fits
        if dtype.is_floating_point:
            self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)
        return self.rounded(value, dtype), dtype

    # --- operators

    @abstractmethod
    def compute(self, call: Call) -> Any:
        """Return the elements of each result of an operator that this arithmetic knows by itself.

        ``NotImplemented`` for others.
        """

    def pointwise(self, call: Call) -> Elements:
        """Return an unknown function of each element."""
        operands, constants = [], []
        for name, value in call.named.items():
            if isinstance(value, Value | Tensor | bool | int | float) and name not in _OPTIONS:
                operands.append(self.lift(value))
            else:
                constants.append((name, spell(value)))
        seed = hashing.of_name(self.tag(call), constants, str(call.result.dtype))
        return self.narrow(hashing.mix(seed, torch.broadcast_tensors(*operands)))

    def tag(self, call: Call) -> Any:
        """Return what the result of a kernel depends on, besides its operands' elements."""
        return call.base

    def compare(self, call: Call) -> Tensor:
        """Return a comparison of elements: a known tensor of bools."""
        assert call.base in COMPARISONS
        left, right = list(call.named.values())[:2]
        # An infinity is equal to itself, as a mask is, and to nothing else.
        if not isinstance(right, float) or not math.isinf(right):
            self.never_equal.add(str(call.operator))
        function = getattr(torch, call.base)
        elements = self.lift(left), self.lift(right)
        if call.base in ("eq", "ne"):
            found = function(*elements)
        else:
            found = function(*self.order_of_two(left, right))
        is_nan = self.not_finite(elements[0])[2] | self.not_finite(elements[1])[2]
        return found | is_nan if call.base == "ne" else found & ~is_nan

    def truth(self, call: Call) -> Tensor:
        """Return a logical function of elements, which are true unless they are 0."""
        self.never_equal.add(str(call.operator))
        self.decisions += 1
        operands = []
        for operand in call.named.values():
            if isinstance(operand, Value):
                is_signbit = call.base == "signbit"
                key = self.order(operand.elements)
                operands.append(key < 0 if is_signbit else key != 0)
            else:
                operands.append(operand.bool())
        found: Tensor = operands[0] if call.base == "signbit" else call.operator(*operands)
        return found

    def sort(self, call: Call) -> list[Any]:
        """Return the results of sorting, choosing or ranking: elements, and known places."""
        value = call.args[0]
        if not isinstance(value, Value):
            raise NoMeaning(f"{call.operator} of known numbers by abstract ones")
        self._note_decision(value.elements)
        self.chosen.add(str(call.operator))
        key = self.order(value.elements)
        found = call.operator(key, *call.args[1:], **call.kwargs)
        if isinstance(found, Tensor):
            if call.result.dtype == value.dtype:  # max(x), median(x)
                place = (key == found).reshape(-1).nonzero()[0, 0]
                return [value.elements.reshape(-1)[place]]
            return [found]
        _, places = found
        dim = call.named.get("dim", -1)
        keep = places if places.ndim == value.elements.ndim else places.unsqueeze(dim)
        chosen = value.elements if not keep.ndim else value.elements.gather(dim, keep)
        return [chosen.reshape(places.shape), places]

    def move(self, call: Call) -> list[tuple[Elements, torch.dtype]]:
        """Return each result of an operator that only moves elements, and the dtype that fits."""
        result = call.result
        fits = {value.fits for value in values_in(call.args, call.kwargs)}

        def elements(argument: Any) -> Any:
            if isinstance(argument, Value):
                if not argument.dtype.is_floating_point:
                    raise NoMeaning(f"{call.operator} at places that depend on abstract numbers")
                if argument.dtype == result.dtype:
                    return argument.elements
                cast, fitting = self.cast(argument, result.dtype)
                fits.add(fitting)
                return cast
            if isinstance(argument, Tensor) and argument.dtype.is_floating_point:
                fits.add(result.dtype)
                return self.lift(argument)
            if isinstance(argument, list | tuple):
                return type(argument)(map(elements, argument))
            return argument

        named = {}
        for name, argument in call.named.items():
            named[name] = elements(argument)
            if isinstance(argument, int | float) and name in FILLED:
                fill = self.filled_in(argument, result.dtype)
                named[name] = fill if _takes_tensor(call, name) else int(fill)
                if argument != 0:
                    fits.add(result.dtype)
        found = _on_elements(call.operator, named)
        common = fits.pop() if len(fits) == 1 else result.dtype
        return [(each, common) for each in leaves_of(found)]

    def whole(self, call: Call, *, is_known: bool) -> list[Elements]:
        """Return an unknown function of all arguments together.

        Args:
            is_known: torch can decompose the operator, but this arithmetic does not.
        """
        parts = []
        named = call.named  # a program may give an argument by place or by name, or leave it out
        for leaf in leaves_of(list(named.values())):
            if isinstance(leaf, Value | Tensor):
                elements = self.lift(leaf)
                parts.append(hashing.fold(elements.reshape(-1), [0]))
        # The spelling keeps lists apart.
        seed = hashing.of_name(str(call.operator), spell(named))
        key = hashing.mix(seed, parts)
        if not is_known:
            self.opaque.setdefault(str(call.operator), set()).add(int(key))
        found = []
        for place, result in enumerate(call.results):
            seed = hashing.of_name("result", place, tuple(result.shape))
            own = hashing.mix(seed, [torch.arange(1, result.numel() + 1), key.reshape(1)])
            found.append(self.narrow(own).view(result.shape))
        return found


FEW_NUMBERS = 16
"""So many known numbers are looked at one by one."""

NO_LIMIT = 1e30
"""No abstract number is so large: what is filled in for an infinity limits nothing."""
_MOST_LIMITS = 64
MOST_RIVALS = 1 << 18
"""So many rivals are noted about; of more, nobody knows whether two programs have the same."""
_ABOVE_ALL = 3 << 61
FEW = 16
"""So few different elements may all decide alike by chance."""


def count_different(elements: Elements) -> int:
    """Return how many of the first elements are different.

    An expanded tensor has many places, and one element.
    """
    return len(elements.reshape(-1)[: 1 << 12].unique())


_OPTIONS = ("alpha", "rounding_mode", "approximate", "dtype", "layout", "device", "memory_format")


def _takes_tensor(call: Call, name: str) -> bool:
    for argument in schema(call.operator).arguments:
        if argument.name == name:
            return str(argument.type) == "Tensor"
    return False


def _on_elements(operator: Any, named: dict[str, Any]) -> Any:
    """Call an operator that moves elements, on int64 tensors."""
    arguments = schema(operator).arguments
    args = [named[argument.name] for argument in arguments if not argument.kwarg_only]
    kwargs = {each.name: named[each.name] for each in arguments if each.kwarg_only}
    kwargs = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    if str(operator).startswith("aten.embedding."):
        args = args[:2]  # the others are options of the gradient
    return operator(*args, **kwargs)
