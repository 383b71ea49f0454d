"""A dispatch mode in which a program computes in an arithmetic, beside its real numbers.

Every operator runs as it is, and its result says shapes, strides and dtypes. If an operand is
abstract, the elements of the result are computed, too. So unmodified programs run: eager code and
its autograd, graphs, and a net that adds for simulated ranks.

A number that the program asks for (``item``) is the real one, and counted.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_gtrainer import facts
from pytest_gtrainer._torch.arithmetic import (
    HigherOrderOperator,
    TorchDispatchMode,
    dense_kernel_of,
    functional_of,
    is_taken_apart,
    run_kernel,
    take_apart,
    watching_freed_storages,
)
from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer._torch.values import FakeTensor, FakeTensorMode, schema
from pytest_gtrainer.arithmetic import hashing
from pytest_gtrainer.arithmetic.base import FEW_NUMBERS, Arithmetic, Call, mapped
from pytest_gtrainer.arithmetic.complexes import MAKERS, compute_by_parts
from pytest_gtrainer.arithmetic.complexes import ROUND_NOTHING as EACH_PART_ALONE
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.formulas import given_meaning, parts_of
from pytest_gtrainer.arithmetic.kernels import KERNELS
from pytest_gtrainer.arithmetic.numbers import Numbers, in_float64, numbers_of
from pytest_gtrainer.arithmetic.operators import (
    ACCUMULATIONS,
    CASTS,
    COMPARISONS,
    FACTORIES,
    FINITE,
    MOVES,
    SOFTMAXES,
    SORTS,
    STABILISED,
    TRUTHS,
    UNINITIALISED,
    base_name,
    is_narrow,
    is_pointwise,
    names,
)
from pytest_gtrainer.arithmetic.prime import meant_numbers
from pytest_gtrainer.arithmetic.shadows import Marks, Shadows, whole_storage
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.graph.nodes import (
    COMMUNICATING,
    is_random,
    is_view,
    named_arguments,
    tensors_in,
)
from pytest_gtrainer.graph.nodes import Call as OperatorCall

__tracebackhide__ = facts.hides_frames

_OUT_OF_PLACE = names("all_reduce all_reduce_coalesced broadcast")
_READS = names("_local_scalar_dense allclose equal is_nonzero item")
_OF_ALL = names("all amax amin any argmax argmin max min prod")
_READS_OF_ONE = names("__array__ __repr__ numpy tolist")
_UNSEEN_WRITES = names("apply_ map_ map2_")
_SIZED_BY_MASKS = names("index masked_select")
"""Their results have sizes that depend on masks of bools, which are known."""
_READS_OF_LISTS = names("as_tensor asarray new_tensor tensor")
_UNDISPATCHED = _READS_OF_ONE | _UNSEEN_WRITES | _READS_OF_LISTS
"""They use memory and no operator is dispatched: see ``CountReads``."""
_ON_STORAGES = names("set_ resize_ record_stream is_pinned _pin_memory")


class ArithmeticMode(TorchDispatchMode):
    """Follow what a program does with abstract tensors.

    Attributes:
        shadows: which tensors are abstract, and their elements.
        reads: operators by which the program asked for a real number of an abstract tensor.
        decided: known tensors that depend on what was compared.
        on_result: called after each operator with an abstract operand, with the operator, its
            operands, its results, and ``shadows.read``.
        exchange: carries out a collective of this rank, given this mode, the operator, and its
            arguments; None where no ranks communicate.
        has_communicated: the program has come to a collective.
    """

    supports_higher_order_operators = True

    def __init__(self, arithmetic: Arithmetic, shadows: Shadows | None = None, owner: int = 0):
        super().__init__()
        self.arithmetic = arithmetic
        self.shadows = shadows or Shadows()
        self.reads: Counter[str] = Counter()
        self.decided = Marks()
        self.on_result: Callable[..., None] | None = None
        self.exchange: Callable[[ArithmeticMode, Any, Any, Any], Any] | None = None
        self.has_communicated = False
        self._asked: Counter[str] = Counter()  # operators on what was compared
        self._digits = Shadows()  # of known numbers in float32, the bits in float64
        self._inside: list[Any] = []  # operators that are being taken apart
        self._owner = owner
        self._communicates = False

    def on_another_thread(self) -> "ArithmeticMode":
        """Return a mode that follows the same tensors, as a mode is of one thread.

        Under it ranks on threads may communicate: what a collective computes is under such a mode.
        """
        other = ArithmeticMode(self.arithmetic, self.shadows, self._owner)
        other.reads, other.on_result = self.reads, self.on_result
        other.decided, other._digits = self.decided, self._digits
        other._communicates = True
        return other

    def make_abstract(self, tensor: Tensor, name: Any) -> None:
        """Give a tensor the elements of the input ``name``."""
        self.shadows.write(tensor, self.arithmetic.of_input(name, tensor))

    def write(self, target: Tensor, elements: Tensor, fits: torch.dtype) -> None:
        """Write elements to a tensor, which may be part of known memory."""
        if not _covers_storage(target):
            self._lift_storage(target)
        self.shadows.write(target, elements, fits)

    def write_known(self, target: Tensor) -> None:
        """Note that real numbers were written to a target."""
        self._digits.drop(target)
        if _covers_storage(target):
            self.shadows.drop(target)
        elif self.shadows.has(target):
            self.shadows.write(target, self.arithmetic.lift(target))

    def free(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor is freed."""

        def uninitialised(count: int) -> Tensor:
            with without_modes():
                return self.arithmetic.uninitialised(count, self._owner)

        self.shadows.free(tensor, uninitialised)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            parts = dense_kernel_of(func)
            if parts is None:
                raise NoMeaning(f"{func} runs functions in a way that nobody follows")
            if func.name() == "cond" and isinstance(args[0], Tensor):
                # By a given number one branch runs, and nobody knows the other one.
                self.reads[str(func)] += args[0] not in self.decided
            with self:
                return parts(*args, **kwargs)
        foreign = [each for each in types if each not in (Tensor, nn.Parameter)]
        if any(issubclass(each, FakeTensor) for each in foreign):
            return func(*args, **kwargs)  # a fake tensor asks for shapes
        if foreign:
            return NotImplemented  # DTensor first: its local operators come back here
        if func.namespace in COMMUNICATING:
            self.has_communicated = True
            if self.exchange is not None:
                return self.exchange(self, func, args, kwargs)
        base = base_name(func)
        tensors = tensors_in(args, kwargs)
        if not any(map(self.shadows.has, tensors)):
            return self._known(func, base, args, kwargs)
        try:
            return self._abstract(func, base, args, kwargs)
        except NoMeaning:
            raise
        except Exception as error:
            # Not a collective: the other ranks would not come to it a second time.
            if func.namespace not in COMMUNICATING and _refuses(func, args, kwargs):
                error.add_note(f"in the arithmetic {self.arithmetic.kind!r}, at {func}")
                raise
            words = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
            raise NoMeaning(f"{func} runs on real numbers alone ({words})") from error

    def _known(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operator that has no abstract operand."""
        written = self._written_in_float64(func, args, kwargs)
        result = func(*args, **kwargs)
        if base in UNINITIALISED and isinstance(result, Tensor):
            self._mark_uninitialised(result)
        if self.decided and any(tensor in self.decided for tensor in tensors_in(args, kwargs)):
            self._follow_decided(func, base, result)
        if not self.arithmetic.rounds:
            self._keep_digits(func, args, kwargs, result, written)
        return result

    def _follow_decided(self, func: Any, base: str, result: Any) -> None:
        """Note what depends on comparisons, and by which numbers the program goes on."""
        if base in _READS:
            note_branch(self.arithmetic, result)
        asks = base not in MOVES and not is_view(func) and not self.arithmetic.stabilises
        for tensor in tensors_in(result):
            if tensor.layout is not torch.strided:
                continue
            self.decided.add(tensor)
            if asks and tensor.numel() and (tensor.dtype == torch.bool or base in _OF_ALL):
                # Of one element of many each answer shows; of all together perhaps only one.
                self._asked[base] += 1
                for answer in tensor.aminmax():
                    note_branch(self.arithmetic, answer.item(), f"{base} {self._asked[base]}")

    def _written_in_float64(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return the known table that an operator is about to write, and its numbers in float64.

        None if no such digits are kept, or nobody can compute them.
        """
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not self._keeps_tables or is_drawn or not schema(func).is_mutable:
            return None
        functional, named = functional_of(func), named_arguments(func, args, kwargs)
        targets = [named[each.name] for each in schema(func).arguments if each.is_write]
        target = targets[0]
        is_one = len(targets) == 1 and isinstance(target, Tensor) and target.is_floating_point()
        if functional is None or not is_one or target.is_meta:
            return None
        options = {name: value for name, value in kwargs.items() if not _is_out(func, name)}
        wide = self._in_float64(functional, args, options)
        return (target, wide) if wide is not None and wide.shape == target.shape else None

    @property
    def _keeps_tables(self) -> bool:
        return isinstance(self.arithmetic, Numbers) and self.arithmetic.keeps_digits

    def _in_float64(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return what an operator computes of known numbers in float64; None if it has none."""
        try:
            args, kwargs = mapped(self._with_digits, (tuple(args), dict(kwargs)))
            with without_modes():
                wide = in_float64(func, args, kwargs)
        except Exception:
            return None  # such as an operator of a user for one dtype
        return wide if isinstance(wide, Tensor) and wide.dtype == torch.float64 else None

    def _keep_digits(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        written: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Compute known numbers in float64, too, of which a narrower dtype loses digits.

        So 1 - 0.9**step is one number for a step in a tensor, and in Python. The arithmetic of
        numbers keeps whole tables, such as those of rotary embeddings, however they are made.
        """
        if written is not None:
            target, wide = written
            with without_modes():
                if not self._digits.has(target):
                    whole = whole_storage(target)
                    self._digits.write(whole, whole.double().view(torch.int64))
                self._digits.write(target, wide.view(torch.int64))
            return
        if schema(func).is_mutable:
            for tensor in tensors_in(args, kwargs):
                self._digits.drop(tensor)
            return
        if not isinstance(result, Tensor) or result.is_meta or not result.numel():
            return  # without numbers
        if torch.Tag.nondeterministic_seeded in func.tags:
            return  # it would draw twice
        if isinstance(self.arithmetic, Numbers):
            self._keep_table(func, args, kwargs, result)
            return
        if result.dtype != torch.float32 or result.numel() > FEW_NUMBERS or not is_pointwise(func):
            return
        with without_modes():
            wide = func(*mapped(self._with_digits, args), **mapped(self._with_digits, kwargs))
        self._keep_wide(result, wide)

    def _keep_table(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """Compute a known table in float64, too, if digits are kept; else note that it is there."""
        if is_view(func) or not result.is_floating_point() or result.dtype == torch.float64:
            return
        if base_name(func) in UNINITIALISED:
            return
        if not self.arithmetic.keeps_digits:
            self.arithmetic.has_digits = True
            return
        self._keep_wide(result, self._in_float64(func, args, kwargs))

    def _keep_wide(self, result: Tensor, wide: Tensor | None) -> None:
        """Keep the digits that a known result lacks, which has been computed in float64, too."""
        if wide is None:
            return
        with without_modes():
            has_more = wide.dtype == torch.float64 and not torch.equal(wide, result.double())
        self.arithmetic.has_digits = self.arithmetic.has_digits or has_more
        if has_more and self.arithmetic.keeps_digits:
            self._digits.write(result, wide.view(torch.int64))

    def _with_digits(self, leaf: Any) -> Any:
        """Return known numbers in float64, with the digits that they were meant to have.

        Only few may be meant as fractions: most numbers are near one by chance.
        """
        if not isinstance(leaf, Tensor) or leaf.is_meta or not leaf.is_floating_point():
            return leaf
        value = self._digits.read(leaf)
        if value is not None:
            return value.elements.view(torch.float64)
        is_few = leaf.dtype == torch.float32 and leaf.numel() <= FEW_NUMBERS
        return meant_numbers(leaf) if is_few else leaf

    def _mark_uninitialised(self, tensor: Tensor) -> None:
        """Make uninitialised memory equal to nothing; integers may be sizes, and stay."""
        # DTensor makes fake tensors for the shapes of each operator.
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            elements = self.arithmetic.uninitialised(tensor.numel(), self._owner)
            self.shadows.write(tensor, elements.view(tensor.shape))

    def _abstract(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operator that has an abstract operand."""
        if base in _READS:
            return self._read(func, args, kwargs)
        reference = given_meaning(func)
        if reference is not None:
            self.arithmetic.meanings.add(str(func))
            # Instead of the operator, which may have a kernel on other devices only.
            with self:
                result = reference(*args, **kwargs)
            _check_meaning(func, args, kwargs, result)
            return result
        if is_taken_apart(func):
            # Without autograd such operators come here whole.
            with self:
                return take_apart(func, args, kwargs)
        if base in _ON_STORAGES or is_view(func) or base in FACTORIES:
            return func(*args, **kwargs)
        if base == "nonzero":
            with self:
                return func(args[0] != 0, *args[1:], **kwargs)  # how many there are is decided
        self._note_size(func, base)
        if base in UNINITIALISED:
            result = func(*args, **kwargs)
            self._mark_uninitialised(result)
            return result
        if func.namespace in COMMUNICATING:
            return self._communicate(func, base, args, kwargs)
        if base.startswith("_foreach_") or func.namespace == "fsdp":
            return self._of_each(func, args, kwargs)
        if base in MAKERS or self._have_parts(tensors_in(args, kwargs)):
            return self._of_complex(func, base, args, kwargs)
        if base.startswith(("_unsafe_index", "_unsafe_masked_index")):
            _check_places(func, args, kwargs)
        if schema(func).is_mutable:
            return self._write(func, base, args, kwargs)
        result = func(*args, **kwargs)
        results = tensors_in(result)
        self._note_empty(func, base, tensors_in(args, kwargs), results)
        self._compute(func, base, args, kwargs, results)
        self._report(func, (args, kwargs), results)
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a number that the program asks for, and count that."""
        self.reads[str(func)] += 1
        number = func(*args, **kwargs)
        value = self.shadows.read(args[0])
        if value is None or not isinstance(number, float):
            return number
        return numbers_of(value.elements).item() if self.arithmetic.kind == "numbers" else number

    def _note_size(self, func: Any, base: str) -> None:
        """Note a read if the result's size depends on abstract numbers, as that of ``unique``."""
        if torch.Tag.dynamic_output_shape in func.tags and base not in _SIZED_BY_MASKS:
            self.reads[str(func)] += 1

    def _note_empty(
        self, func: Any, base: str, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Note an operator that computes something of an abstract tensor without elements."""
        if base in MOVES or base in CASTS or self._inside:
            return
        if any(not each.numel() and self.shadows.has(each) for each in operands):
            makes_elements = any(each.numel() for each in results)
            empty = self.arithmetic.empty
            empty[str(func)] = empty.get(str(func), False) or makes_elements

    def _of_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operator whose kernel calls another one for each tensor."""
        with self:
            result = run_kernel(func, args, kwargs)
        if not self._is_followed(args, result):
            raise NoMeaning(f"{func} computes in a way that no dispatch mode sees")
        return result

    def _have_parts(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether there are complex numbers, and all of them have parts.

        Those that an opaque operator has made, as of a Fourier transform, have none.
        """
        of_complex = [tensor for tensor in tensors if tensor.is_complex()]
        return bool(of_complex) and not any(map(self.shadows.has_complex, of_complex))

    def _of_complex(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operator on complex numbers by operators on their parts."""
        if schema(func).is_mutable:
            raise NoMeaning(f"{func} writes complex numbers")
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_complex():
            raise NoMeaning(f"{func} of complex numbers")
        if base in CASTS and result.dtype != args[0].dtype:
            raise NoMeaning(f"{func} casts complex numbers")
        with self:
            named = named_arguments(func, args, kwargs)
            pair = compute_by_parts(func, base, named)
            pairs = torch.stack([part.expand(result.shape) for part in pair], -1)
        whole = torch.view_as_real(result)
        self._adopt([whole], [pairs])
        if not self.arithmetic.takes_apart and base not in EACH_PART_ALONE:
            # A kernel of its own, which adds and rounds as nobody says.
            value = self.shadows.read(whole)
            if value is not None:
                hashed = hashing.mix(hashing.of_name("complex", str(func)), [value.elements])
                self.shadows.write(whole, hashed)
        return result

    def _is_followed(self, args: Any, result: Any) -> bool:
        """Return whether each result that is made of an abstract tensor is abstract."""
        found = tensors_in(result)
        given = args[0] if args and isinstance(args[0], list | tuple) else []
        if len(found) != len(given):
            return all(map(self.shadows.has, found))
        pairs = zip(given, found, strict=True)
        return all(self.shadows.has(own) or not self.shadows.has(tensor) for tensor, own in pairs)

    def _report(self, func: Any, given: Any, results: Sequence[Tensor]) -> None:
        if self.on_result is not None and not self._inside:
            operands = tensors_in(given)
            self.on_result(func, operands, results, self.shadows.read)

    def _compute(
        self, func: Any, base: str, args: Any, kwargs: Any, results: Sequence[Tensor]
    ) -> None:
        """Give the results of an operator without side effects their elements."""
        arithmetic = self.arithmetic
        call = self._call(func, base, args, kwargs, results)
        if is_random(OperatorCall(func, tuple(args), kwargs)):
            return self._draw(call, args)
        if self._decide(call):
            return None
        if base in CASTS:
            elements, fits = arithmetic.cast(call.args[0], call.result.dtype)
            return self.shadows.write(call.result, elements, fits)
        if base in SORTS:
            return self._set(call, arithmetic.sort(call))
        reduces = call.named.get("accumulate") or call.named.get("reduce")
        adds = base in ACCUMULATIONS and (reduces or "index_put" not in base)
        if adds and arithmetic.rounds and is_narrow(call.result.dtype):
            return self._set(call, arithmetic.whole(call, is_known=True))
        # Before what is pointwise, as torch tags some moves, such as clone, as that.
        if base in MOVES and not reduces:
            for tensor, (elements, fits) in zip(results, arithmetic.move(call), strict=True):
                self.shadows.write(tensor, elements, fits)
            return None
        found = arithmetic.compute(call)
        if found is not NotImplemented:
            return self._set(call, found)
        parts = parts_of(func, self.arithmetic.is_exact)
        # Some of torch's decompositions end at the operator itself.
        if parts is not None and arithmetic.takes_apart and func not in self._inside:
            return self._compute_by_parts(call, parts, args, kwargs)
        if is_pointwise(func) and len(results) == 1:
            return self._set(call, [arithmetic.pointwise(call)])
        is_torchs = not arithmetic.takes_apart and func.namespace == "aten"
        return self._set(call, arithmetic.whole(call, is_known=parts is not None or is_torchs))

    def _compute_by_parts(
        self, call: Call, parts: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        arithmetic = self.arithmetic
        with arithmetic.deciding_nothing() if call.base in STABILISED else nullcontext():
            wanted = call.named.get("output_mask")
            found = self._by_parts(parts, args, kwargs, call.operator, wanted)
            self._adopt(call.results, found, call)
        value = self.shadows.read(call.result) if call.base in SOFTMAXES else None
        if value is not None and isinstance(arithmetic, Field):
            arithmetic.note_softmax(call, value)

    def _communicate(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Issue a collective of ranks on threads, which compute it under a mode."""
        if not self._communicates:
            raise NoMeaning(
                f"{func} communicates: give the world of its ranks, world=, or its mesh, mesh="
            )
        if base not in _OUT_OF_PLACE:
            return func(*args, **kwargs)
        # Its kernel copies the operand, which no dispatch mode sees, and reduces the copy.
        with self:
            copies = mapped(torch.clone, args[0])
        in_place = getattr(getattr(torch.ops, func.namespace), f"{base}_")
        return in_place(copies, *args[1:], **kwargs)

    def _decide(self, call: Call) -> bool:
        """Compare elements, or all numbers; return whether the operator does nothing else."""
        arithmetic, base = self.arithmetic, call.base
        if isinstance(arithmetic, Numbers):
            for tensor, own in zip(call.results, arithmetic.by_kernel(call), strict=True):
                if tensor.is_floating_point():
                    self.shadows.write(tensor, own)
                else:
                    self._know(tensor, own)
            return True

        if base in CASTS and call.result.dtype == torch.bool:
            arithmetic.never_equal.add(str(call.operator))
            self._know(call.result, arithmetic.order(call.args[0].elements) != 0)
        elif base in TRUTHS:
            self._know(call.result, arithmetic.truth(call))
        elif base in COMPARISONS:
            self._know(call.result, arithmetic.compare(call))
        elif base in FINITE:
            minus, plus, nan = arithmetic.not_finite(arithmetic.lift(call.args[0]))
            answers = {
                "isfinite": ~(minus | plus | nan),
                "isinf": minus | plus,
                "isnan": nan,
                "isneginf": minus,
                "isposinf": plus,
            }
            if not arithmetic.stabilises:
                arithmetic.finite.add(str(call.operator))
            self._know(call.result, answers[base])
        else:
            return False
        return True

    def _draw(self, call: Call, args: Any) -> None:
        """Leave what is drawn as it is: known numbers."""
        self.arithmetic.drawn.add(str(call.operator))
        if call.base == "native_dropout":
            self._drop_out(call, args)
            return
        probability = call.named.get("p") if call.base == "bernoulli" else None
        # These read nothing of their operand but its shape.
        if not call.base.endswith("_like") and not isinstance(probability, int | float):
            raise NoMeaning(f"{call.operator} draws random numbers that depend on abstract ones")

    def _call(
        self, func: Any, base: str, args: Any, kwargs: Any, results: Sequence[Tensor]
    ) -> Call:
        def value_of(leaf: Any) -> Any:
            value = self.shadows.read(leaf) if isinstance(leaf, Tensor) else None
            if value is not None:
                return value
            return self._with_digits(leaf) if self.arithmetic.keeps_digits else leaf

        args, kwargs = mapped(value_of, (tuple(args), dict(kwargs)))
        return Call(func, base, args, kwargs, results)

    def _set(self, call: Call, found: Sequence[Any]) -> None:
        for tensor, elements in zip(call.results, found, strict=True):
            if tensor.is_floating_point():
                self.shadows.write(tensor, elements)
            elif call.base in SORTS:
                self._know(tensor, elements)
            elif tensor.dtype == torch.bool:
                self._know(tensor, elements & 1)  # an unknown choice, the same in all programs
            else:
                self.shadows.write(tensor, elements)

    def _know(self, tensor: Tensor, numbers: Tensor) -> None:
        """Make a result the known numbers that were decided."""
        tensor.copy_(numbers)
        self.decided.add(tensor)

    def _by_parts(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        operator: Any = None,
        wanted: Sequence[bool] | None = None,
    ) -> list[Any]:
        """Return what a function computes; ``wanted`` says which results the operator has."""
        self._inside.append(operator)
        try:
            with self:
                found = function(*args, **kwargs)
        except IndexError as error:
            raise NoMeaning(f"places that depend on abstract numbers: {error}") from error
        finally:
            self._inside.pop()
        if wanted is not None and isinstance(found, tuple) and len(found) == len(wanted):
            # Of a batch norm the decomposition returns the input's gradient, wanted or not.
            found = [each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted]
        return tensors_in(found)

    def _adopt(
        self, results: Sequence[Tensor], found: Sequence[Tensor], call: Call | None = None
    ) -> None:
        """Give the results of an operator the elements of those of its parts."""
        unknown: Sequence[Any] = ()
        for place, tensor in enumerate(results):
            part = found[place] if place < len(found) else None
            if part is None or part.numel() != tensor.numel():
                if call is None:
                    raise NoMeaning("a reference returns other shapes than its operator")
                # A decomposition leaves out what only a kernel's backward reads.
                unknown = unknown or self.arithmetic.whole(call, is_known=True)
                self.shadows.write(tensor, unknown[place])
                continue
            value = self.shadows.read(part)
            if value is None:
                tensor.copy_(part.reshape(tensor.shape))
            else:
                elements, fits = self.arithmetic.cast(value, tensor.dtype)
                self.shadows.write(tensor, elements.reshape(tensor.shape), fits)

    def _drop_out(self, call: Call, args: Any) -> None:
        """Multiply by what is drawn: the real operator has drawn the known mask."""
        kept, mask = call.results
        probability = call.named["p"]
        with self:
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            product = args[0] * mask * scale if call.named["train"] is not False else args[0]
        self._adopt([kept], [product])

    # --- writes

    def _write(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operator that writes to operands."""
        named = named_arguments(func, args, kwargs)
        targets: list[Tensor] = []
        for argument in schema(func).arguments:
            if argument.is_write:
                targets += tensors_in(named[argument.name])

        if base in ("copy_", "fill_", "zero_"):
            return self._overwrite(func, base, args, kwargs, named)
        if torch.Tag.nondeterministic_seeded in func.tags:
            others = [each for each in tensors_in(args, kwargs) if each is not targets[0]]
            if any(map(self.shadows.has, others)) or not schema(func).returns[0].is_write:
                raise NoMeaning(f"{func} draws random numbers that depend on abstract ones")
            result = func(*args, **kwargs)  # drawn numbers are known
            self.arithmetic.drawn.add(str(func))
            for target in targets:
                self.write_known(target)
            return result

        if self.arithmetic.is_exact and func in KERNELS:
            with self:
                return KERNELS[func](*args, **kwargs)
        self._note_empty(func, base, tensors_in(args, kwargs), targets)
        operator = functional_of(func)
        if operator is None:
            return self._write_whole(func, base, args, kwargs, targets)

        # Compute what the functional operator of the name returns, and let the targets have it.
        inputs = {name: value for name, value in named.items() if not _is_out(func, name)}
        given = [inputs[each.name] for each in schema(operator).arguments if not each.kwarg_only]
        options = {
            each.name: inputs[each.name] for each in schema(operator).arguments if each.kwarg_only
        }
        for target in targets:
            self._lift_storage(target)
        found = self._by_parts(operator, given, options)
        result = func(*args, **kwargs)
        self._adopt(targets, found)
        self._report(func, (args, kwargs), targets)
        return result

    def _write_whole(
        self, func: Any, base: str, args: Any, kwargs: Any, targets: Sequence[Tensor]
    ) -> Any:
        """Carry out an operator that writes, and of which no other computes the same."""
        parts = parts_of(func, self.arithmetic.is_exact)
        if parts is not None and self.arithmetic.takes_apart:
            with self:
                return parts(*args, **kwargs)
        for target in targets:
            self._lift_storage(target)
        call = self._call(func, base, args, kwargs, [])
        result = func(*args, **kwargs)
        made = tensors_in(result)
        call = replace(call, results=[*made, *targets])
        found = self.arithmetic.whole(call, is_known=parts is not None)
        for tensor, own in zip(call.results, found, strict=True):
            self.shadows.write(tensor, own)
        return result

    def _overwrite(self, func: Any, base: str, args: Any, kwargs: Any, named: Any) -> Any:
        """Carry out an operator that gives a target other numbers, whatever it has held."""
        target = args[0]
        source: Any = named.get("src", named.get("value", 0.0))
        value = self.shadows.read(source) if isinstance(source, Tensor) else None
        is_whole = _covers_storage(target)
        if value is None and is_whole:
            result = func(*args, **kwargs)
            self.shadows.drop(target)
            self._digits.drop(target)
            return result

        self._lift_storage(target)
        fits = target.dtype
        if value is None:
            if isinstance(source, Tensor):
                source = self._with_digits(source) if self._keeps_tables else source.to(fits)
                elements = self.arithmetic.lift(source)
            else:
                elements = self.arithmetic.filled_in(source, target.dtype)
        else:
            elements, fits = self.arithmetic.cast(value, target.dtype)
            elements = elements.clone()  # source and target may be one memory

        result = func(*args, **kwargs)
        self.shadows.write(target, elements.expand(target.shape), fits)
        self._report(func, (args, kwargs), [target])
        return result

    def _lift_storage(self, target: Tensor) -> None:
        """Make a tensor abstract, with all memory that it is a view of."""
        if not self.shadows.has(target):
            if not target.is_floating_point():
                raise NoMeaning(f"abstract numbers are written to a known tensor of {target.dtype}")
            whole = whole_storage(target)
            known = self._with_digits(whole) if self._keeps_tables else whole
            self.shadows.write(whole, self.arithmetic.lift(known))
            self._digits.drop(target)


class CountReads(TorchFunctionMode):
    """Follow what a program does with memory where no operator is dispatched.

    ``x.tolist()``, ``str(x)``, NumPy, and ``torch.tensor`` of a list of tensors read it themselves:
    that is counted. ``x.map_(y, function)`` writes it, and is refused. A storage that is freed and
    made again has memory that nobody wrote.
    """

    def __init__(self, mode: ArithmeticMode) -> None:
        super().__init__()
        self._mode = mode
        self._watching = watching_freed_storages(mode.free)

    def __enter__(self) -> "CountReads":
        self._watching.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _UNDISPATCHED:
            return func(*args, **kwargs)
        if name in _UNSEEN_WRITES and any(map(self._mode.shadows.has, tensors_in(args))):
            raise NoMeaning(f"Tensor.{name} computes where no dispatch mode sees it")
        read: Any = ()
        if name in _READS_OF_ONE:
            read = args[:1]
        elif name in _READS_OF_LISTS:
            read = [each for each in (*args, kwargs.get("data")) if isinstance(each, list | tuple)]
        tensors = tensors_in(read)
        if any(map(self._mode.shadows.has, tensors)):
            self._mode.reads[name] += 1
        result = func(*args, **kwargs)
        if name == "tolist" and any(tensor in self._mode.decided for tensor in tensors):
            note_branch(self._mode.arithmetic, result)
        return result


_MOST_ANSWERS = 1000
_MOST_SECONDS = 10.0
"""Equal answers at one line, one after the other, and the CPU time that they take, of a loop that
ends. Elements have no size. A long loop that asks of many elements exceeds the first alone."""


def note_branch(arithmetic: Arithmetic, number: Any, asks: str = "") -> None:
    """Note a number that a program reads of what was compared, and where it does.

    Args:
        asks: an operator that makes it, and which call of it that is; it may go to ``where``.
    """
    line = line_of_program()
    if line:
        where = f"{line} ({asks.split()[0]})" if asks else line
    else:
        where = f"the graph ({asks})" if asks else "the graph"
    arithmetic.branches.setdefault(where, set()).add(str(number))
    if asks:
        return
    last, times, begun = arithmetic.asked.get(where, ("", 0, 0.0))
    if last != str(number):
        times, begun = 0, time.process_time()
    arithmetic.asked[where] = str(number), times + 1, begun
    # The clock is read seldom: most lines ask a few times.
    if times >= _MOST_ANSWERS and time.process_time() - begun > _MOST_SECONDS:
        raise NoMeaning(
            f"{where} reads the same answer more than {_MOST_ANSWERS:,} times, for "
            f"{_MOST_SECONDS:g} CPU seconds: the end of a loop depends on numbers, which elements "
            "do not have, or it is long: give it fewer rounds"
        )


def line_of_program() -> str:
    """Return which line of the program runs, as ``model.py:7``; "" in a graph."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame):
        if frame.f_globals.get("__name__") == "torch.fx.interpreter":
            return ""
        frame = frame.f_back
    if _is_of_library(frame):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_of_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("torch", "pytest_gtrainer")


def _refuses(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator raises on real numbers too, as one of shapes that do not fit."""
    try:
        func(*args, **kwargs)
    except Exception:
        return True
    return False


def _check_meaning(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Refuse the result of a given meaning that is no result of the operator, by its fake kernel.

    Broadcasting may hide another shape from all that comes later.
    """
    fake = new_fake_mode(real_inputs=True)
    try:
        with fake:
            expected = func(*mapped(_copy_for(fake), args), **mapped(_copy_for(fake), kwargs))
    except Exception:
        return  # it has no fake kernel, or one that asks for numbers
    wanted, found = _kinds_of(expected), _kinds_of(result)
    if wanted != found:
        raise NoMeaning(
            f"the meaning(...) of {func} returns {found or 'no tensor'}, and the operator "
            f"{wanted or 'no tensor'}"
        )


def _copy_for(fake: FakeTensorMode) -> Callable[[Any], Any]:
    def copied(value: Any) -> Any:
        return fake.from_tensor(value) if isinstance(value, Tensor) else value

    return copied


def _kinds_of(result: Any) -> str:
    kinds = []
    for tensor in tensors_in(result):
        dtype = str(tensor.dtype).removeprefix("torch.")
        kinds.append(f"{dtype}{list(tensor.shape)}")
    return ", ".join(kinds)


def _check_places(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse places outside of a tensor, which the kernel does not check.

    Decisions about abstract numbers may lead to them.
    """
    named = named_arguments(func, args, kwargs)
    for extent, places in zip(named["self"].shape, named["indices"], strict=False):
        if places is None or places.dtype == torch.bool or not places.numel():
            continue
        if int(places.min()) < -extent or int(places.max()) >= extent:
            raise NoMeaning(f"{func} at places that depend on abstract numbers")


def _covers_storage(tensor: Tensor) -> bool:
    # Strides that overlap would cover less.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous() and whole_storage(tensor).numel() == tensor.numel()


def _is_out(func: Any, name: str) -> bool:
    return any(each.is_out and each.name == name for each in schema(func).arguments)
