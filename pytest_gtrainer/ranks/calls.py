"""Which collectives the ranks have called, as torch records them: who is the odd one out, and who waits for ever.

A *call* is a collective that a rank has issued on a group; its *number* counts the calls on that group. A rank *lacks*
the calls that have a higher number than its own last one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from pytest_gtrainer.worlds.wording import by_value, ranks_by, ranks_text

# Collectives whose ranks must give equally many elements of one dtype; of others, roots and splits may differ.
_ALIKE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
KEPT = 64
"""How many of its last calls on a group a rank tells."""


class Call(NamedTuple):
    """A collective of one rank: ``place`` is the user's line, ``pending`` whether it has not come to its end."""

    op: str
    dtype: str
    shape: Sequence[int]
    elements: int
    place: str
    pending: bool

    def kind(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return (self.op, self.dtype, self.elements) if self.op in _ALIKE else (self.op,)

    def __str__(self) -> str:
        return f"{self.op}{f' of {self.dtype}{list(self.shape)}' if self.dtype else ''} at {self.place}"


class GroupCalls(NamedTuple):
    """The calls of a rank on a group of ``ranks``: the number of the last one, and those of this test by number."""

    label: str
    ranks: Sequence[int]
    last: int
    calls: Mapping[int, Call]


Calls = Mapping[int, Mapping[str, GroupCalls]]
"""By rank, its groups by their name."""


def read_calls(texts: Mapping[int, str]) -> Calls:
    """What ranks have answered; one that did not, or not to the end, is missing."""
    return {
        rank: {
            name: GroupCalls(label, ranks, last, {number: Call(*call) for number, *call in calls})
            for name, (label, ranks, last, calls) in json.loads(text).items()
        }
        for rank, text in texts.items()
        if text.endswith("}")
    }


def _by_group(calls: Calls) -> Iterator[tuple[str, dict[int, GroupCalls], list[int]]]:
    """Each group's name, what its ranks say of it, and the numbers of all calls on it."""
    for name in dict.fromkeys(name for groups in calls.values() for name in groups):
        on = {rank: groups[name] for rank, groups in sorted(calls.items()) if name in groups}
        yield name, on, sorted({number for group in on.values() for number in group.calls})


def never_ending(calls: Calls, waiting: Collection[int]) -> str | None:
    """Why all the ``waiting`` ranks will wait for ever, if that is certain; the others have ended.

    It is certain if each of them is in a call that another rank lacks, or has called otherwise: that rank has ended, or
    waits for ever as well. A call that all ranks of its group have issued alike may end, however slow it is.

    >>> call = Call("barrier", "", (), 0, "test_it.py:3 in test_it", True)
    >>> inside, ended = GroupCalls("all ranks", (0, 1), 1, {1: call}), GroupCalls("all ranks", (0, 1), 0, {})
    >>> never_ending({0: {"0": inside}, 1: {"0": ended}}, {0})
    'rank 0 waits in barrier at test_it.py:3 in test_it on all ranks: rank 1 ended without it'
    >>> never_ending({0: {"0": inside}, 1: {"0": inside}}, {0, 1})
    """
    differing = differing_call(calls)
    stuck = [_stuck_calls(calls, rank) for rank in waiting]
    if not all(stuck):
        return None
    if differing is not None:
        return differing
    name, number = min(place for places in stuck for place in places)
    on = next(on for each, on, _ in _by_group(calls) if each == name)
    inside = [rank for rank, group in on.items() if number in group.calls]
    lacking = [rank for rank, group in on.items() if group.last < number]
    ended = [rank for rank in lacking if rank not in waiting]
    wait = "waits" if len(inside) == 1 else "wait"
    where = f"{ranks_text(inside)} {wait} in {on[inside[0]].calls[number]} on {on[inside[0]].label}"
    if ended:
        why = f"{ranks_text(ended)} ended without it"
    else:
        of = {rank: [call for group in calls[rank].values() for call in group.calls.values()] for rank in lacking}
        pending = {rank: next((call for call in of[rank] if call.pending), "no call") for rank in lacking}
        why = ", ".join(f"rank {rank} waits in {call}" for rank, call in pending.items())
    return f"{where}: {why}{_parting(on, number)}"


def called_by_some(calls: Calls) -> str:
    """The first call that other ranks of its group lack, to be added to a sentence."""
    for _, on, numbers in _by_group(calls):
        for number in numbers:
            inside = [rank for rank, group in on.items() if number in group.calls]
            if any(group.last < number for group in on.values()):
                return f"; {ranks_text(inside)} alone called {on[inside[0]].calls[number]}{_parting(on, number)}"
    return ""


def differing_call(calls: Calls) -> str | None:
    """The first call that ranks of a group have issued differently: another collective, dtype, or number of elements.

    >>> one, two = Call("barrier", "", (), 0, "it.py:3", True), Call("all_reduce", "int64", (2,), 2, "it.py:5", True)
    >>> told = {rank: {"0": GroupCalls("all ranks", (0, 1, 2), 1, {1: two if rank else one})} for rank in range(3)}
    >>> differing_call(told)
    'rank 0 called barrier at it.py:3, ranks 1, 2 called all_reduce of int64[2] at it.py:5, as call 1 on all ranks'
    """
    for _, on, numbers in _by_group(calls):
        for number in numbers:
            issued = {rank: group.calls[number] for rank, group in on.items() if number in group.calls}
            kinds = ranks_by((rank, call.kind()) for rank, call in issued.items())
            if len(kinds) > 1:
                sides = sorted(kinds.values(), key=len)
                text = ", ".join(f"{ranks_text(side)} called {issued[side[0]]}" for side in sides)
                return f"{text}, as call {number} on {on[sides[0][0]].label}"
    return None


def _stuck_calls(calls: Calls, rank: int) -> list[tuple[str, int]]:
    """Group and number of the calls that a rank is in and another one lacks, or has issued differently."""
    found = []
    for name, own in calls.get(rank, {}).items():
        others = [calls[other][name] for other in own.ranks if name in calls.get(other, {})]
        for number, call in own.calls.items():
            lacked = any(other.last < number or other.calls.get(number, call).kind() != call.kind() for other in others)
            if call.pending and lacked:
                found.append((name, number))
    return found


def _parting(on: Mapping[int, GroupCalls], before: int) -> str:
    """Where the ranks of a group first called from different lines, before the call of that number."""
    for number in range(1, before):
        places = {rank: group.calls[number].place for rank, group in on.items() if number in group.calls}
        if len(set(places.values())) > 1:
            return f"; they part at call {number}: {by_value(places)}"
    return ""
