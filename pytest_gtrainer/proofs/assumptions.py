"""Say in words what a proof takes for granted, and why another one is "unknown"."""

from collections.abc import Sequence

from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.proofs.further_runs import ORDERS
from pytest_gtrainer.proofs.proof import Unchecked

_MOST_LIMITS_OF_FEW = 8
"""With more limits than this, a few elements seldom lie between two of them."""
_ANSWERS = {"True", "False"}
"""What a comparison gives; a program that reads anything else has read a number."""


def describe_known(names: Sequence[str]) -> tuple[str, ...]:
    """Say which tensors begin a proof with known numbers. A program may change them."""
    if not names:
        return ()
    return (f"runs begin with the given numbers of {spell_some(names)}: others are not judged",)


_TAKEN_ON_TRUST = {
    "masks": "exp is 0 where a mask of -1e4 or less is filled in, or added",
    "lowest": "a number plus a mask of -1e4 or less is below every number without a mask",
    "has_many_limits": "limits that only decide, as .5 in where(x > .5, a, b), have the same "
    "values: there are more than are compared",
}
"""By the attribute of an arithmetic that is true if it was taken for granted: the sentence."""


def describe_opaque(operators: Sequence[str]) -> tuple[str, ...]:
    """Say what is taken for granted of operators of unknown meaning."""
    if not operators:
        return ()
    depend = "depend on nothing but their arguments, and write to none of them"
    return (Unchecked(f"{', '.join(operators)} {depend}"),)


def describe_empty(
    arithmetics: Sequence[Arithmetic], results: Sequence[str], *, in_world: bool
) -> tuple[str, ...]:
    """Say what has no elements, so that nothing of it is compared.

    Args:
        results: names of results without elements.
        in_world: a rank may have no part of a parameter, which other ranks have. Then operators on
            such parts are left out, and so are these parts themselves.
    """
    found = []
    inputs: dict[str, None] = {}
    operators = set()
    for arithmetic in arithmetics:
        inputs.update(dict.fromkeys(arithmetic.empty_inputs))
        for name, makes_elements in arithmetic.empty.items():
            if makes_elements or not in_world:
                operators.add(name)
    named = [] if in_world else [*inputs, *results]
    if named:
        have = "has" if len(named) == 1 else "have"
        found.append(f"{spell_some(named)} {have} no elements: nothing of that is compared")
    if operators:
        found.append(
            f"{spell_some(sorted(operators))} got tensors without elements: nothing that a "
            "program makes of those is compared"
        )
    return tuple(map(Unchecked, found))


def taken_on_trust(arithmetics: Sequence[Arithmetic], reads: int) -> list[str]:
    """Say what equal results of these arithmetics take for granted.

    Args:
        reads: how many real numbers the programs have asked for.
    """
    found = []
    opaque: set[str] = set()
    meant: set[str] = set()
    chosen: set[str] = set()
    compared: set[str] = set()
    finite: set[str] = set()
    for arithmetic in arithmetics:
        opaque.update(arithmetic.opaque)
        meant.update(arithmetic.meanings)
        chosen.update(arithmetic.chosen)
        compared.update(arithmetic.never_equal)
        finite.update(arithmetic.finite)

    for attribute, words in _TAKEN_ON_TRUST.items():
        if any(getattr(arithmetic, attribute) for arithmetic in arithmetics):
            found.append(words)
    found += describe_opaque(sorted(opaque))
    if meant:
        their = "its" if len(meant) == 1 else "their"
        says = f"{_they_compute(sorted(meant))} what {their} meaning(...) says"
        found.append(Unchecked(says))
    if reads:
        found.append(f"numbers that the program reads stay what they are ({reads} are read)")
    if chosen:
        found.append(
            f"what {', '.join(sorted(chosen))} chose in {len(ORDERS) + 1} orders shows every choice"
        )
    if compared:
        found.append(f"no two compared numbers are equal ({', '.join(sorted(compared))})")
    if finite:
        found.append(f"abstract numbers are finite ({', '.join(sorted(finite))})")
    most = max((len(arithmetic.limits) for arithmetic in arithmetics), default=0)
    if most > _MOST_LIMITS_OF_FEW and any(arithmetic.few for arithmetic in arithmetics):
        found.append(f"few numbers are compared with {most} limits, and seldom lie between two")
    return found + _describe_branches(arithmetics)


def _describe_branches(arithmetics: Sequence[Arithmetic]) -> list[str]:
    """Say where programs have gone on by comparisons, of which not all answers have shown."""
    found = []
    branches: dict[str, set[str]] = {}
    for arithmetic in arithmetics:
        for where, numbers in arithmetic.branches.items():
            branches.setdefault(where, set()).update(numbers)
    # Lines at which all orders gave one answer. An operator of a line, "model.py:7 (aten.any)", is
    # not named beside the line itself.
    alike = {where for where, numbers in branches.items() if len(numbers) == 1}
    shown = []
    for where in sorted(alike):
        around = where.partition(" (")[0]
        if around == where or around not in alike:
            shown.append(where)
    if shown:
        found.append(
            f"all {len(ORDERS) + 1} orders take the same branch at {', '.join(shown)}: of the "
            "other one nothing is known"
        )
    read = {where for where in branches.keys() - alike if " (" not in where}
    counts = sorted(where for where in read if not branches[where] <= _ANSWERS)
    if counts:
        found.append(
            f"numbers that are read of comparisons at {', '.join(counts)} are those of "
            f"{len(ORDERS) + 1} orders: of others nothing is known"
        )
    return found


def unlike_operators(actual: Sequence[Arithmetic], expected: Sequence[Arithmetic]) -> list[str]:
    """Return the operators of unknown meaning that two sides call with other arguments."""
    sides: list[dict[str, set[int]]] = []
    for arithmetics in (actual, expected):
        calls: dict[str, set[int]] = {}
        for arithmetic in arithmetics:
            for name, hashes in arithmetic.opaque.items():
                calls[name] = calls.get(name, set()) | hashes
        sides.append(calls)
    ours, theirs = sides
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def describe_unlike(operators: Sequence[str]) -> str:
    """Say that a difference may come from operators of unknown meaning."""
    return (
        f"the results differ, and nobody knows what {_they_compute(operators)}: "
        "say it with meaning(operator, reference)"
    )


def _they_compute(operators: Sequence[str]) -> str:
    """Return names with their verb: "a computes", "a, b compute"."""
    verb = "computes" if len(operators) == 1 else "compute"
    return f"{', '.join(operators)} {verb}"
