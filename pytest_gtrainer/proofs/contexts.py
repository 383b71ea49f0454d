"""Context managers that compute a block in an arithmetic: eager code, autograd and real ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_gtrainer._torch.threads import BACKEND
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.facts import check_switches, check_type
from pytest_gtrainer.proofs.on_ranks import exchange_on_ranks
from pytest_gtrainer.tracing.model import local


class Elements:
    """The elements of tensors in a block."""

    def __init__(self, mode: ArithmeticMode) -> None:
        self._mode = mode

    def make_abstract(self, subject: Tensor | nn.Module, name: Any = "") -> None:
        """Let a tensor, or all parameters of a module, stand for any numbers.

        Equal names give equal elements, also on other ranks: parameters have their FQNs. Make a
        module abstract before it is sharded: sharding moves elements as it moves numbers.

        Raises:
            ValueError: a tensor without a name, or one that does not hold floating-point numbers.
        """
        if isinstance(subject, nn.Module):
            for fqn, parameter in subject.named_parameters():
                self.make_abstract(parameter, (name, fqn) if name else fqn)
            return
        check_type(subject, Tensor, "what is made abstract", "a tensor, or a module")
        if name == "":
            raise ValueError("a tensor has no name of its own: give name=, equal for equal numbers")
        if not subject.is_floating_point():
            raise ValueError(f"{name} is {subject.dtype}: only floating-point numbers are abstract")
        self._mode.make_abstract(local(subject.detach()), name)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the elements of a tensor, int64 of its shape; of a DTensor those of its shard.

        None: the tensor depends on no abstract one, so its numbers are its value.
        """
        check_type(tensor, Tensor, "what has elements", "a tensor, one at a time")
        value = self._mode.shadows.read(local(tensor.detach()))
        return None if value is None else self._mode.arithmetic.compared(value.elements).clone()


@contextmanager
def field_arithmetic(
    *, casts: Literal["opaque", "identity"] = "opaque", seed: int = 0
) -> Iterator[Elements]:
    """Compute modulo a prime inside, beside the real numbers.

    Programs that compute the same function make equal elements, in any order of additions; others
    make other elements, but for a chance of about one in a billion. On real ranks every rank has to
    be inside: the elements travel with the real numbers.

        with field_arithmetic() as elements:
            elements.make_abstract(model)
            loss = step(parallelize(model), batch)
            loss.backward()
            found = elements.of(loss)

    Args:
        casts: "opaque": a cast to a narrower dtype is a rounding, so equal programs round at the
            same places; "identity": it changes nothing.
        seed: another one gives other elements to the same names.

    Raises:
        ValueError: other ``casts``.
        NoMeaning: inside, an operator that nobody knows how to follow.
    """
    if casts not in ("opaque", "identity"):
        raise ValueError(f'casts={casts!r}: take "opaque" or "identity"')
    with _in_arithmetic(Field(casts=casts, seed=seed)) as elements:
        yield elements


@contextmanager
def term_arithmetic(*, strict: bool = True, seed: int = 0) -> Iterator[Elements]:
    """Compute fingerprints of expressions inside, beside the real numbers.

    Equal elements are the same operators on the same operands in the same order. The order in
    which real ranks add is not known, so in a ranks world take ``field_arithmetic``.

    Args:
        strict: False: a kernel may be called with other shapes and strides.
        seed: as for ``field_arithmetic``.
    """
    check_switches(strict=strict)
    with _in_arithmetic(Terms(strict=strict, seed=seed)) as elements:
        yield elements


def has_real_ranks() -> bool:
    """Return whether this process is a rank whose collectives reach other processes."""
    return dist.is_initialized() and dist.get_backend() not in (BACKEND, "fake")


@contextmanager
def _in_arithmetic(arithmetic: Arithmetic) -> Iterator[Elements]:
    mode = ArithmeticMode(arithmetic)
    if isinstance(arithmetic, Field) and has_real_ranks():
        mode.exchange = exchange_on_ranks
    with mode, torch.compiler.set_stance("force_eager"):
        yield Elements(mode)
