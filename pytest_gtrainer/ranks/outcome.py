"""What happened on the ranks of a world during one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gtrainer.ranks import wire


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that befell a rank from outside its test's phases: a death, a limit, disagreement.

    Attributes:
        time: on the host's monotonic clock.
        rank: None if it concerns all of them.
        details: titled texts for the report: stacks, last output.
        is_consequence: whether it only befell the rank because another one had failed before.
    """

    time: float
    rank: int | None
    text: str
    details: tuple[tuple[str, str], ...] = ()
    is_consequence: bool = False


@dataclass(slots=True)
class Outcome:
    """Everything that the ranks said in answer to one command.

    Attributes:
        answers: the final answer of every rank that gave one.
        raised: the first exception of every rank that told one, a skip included.
        dead: ranks whose process ended; ``killed`` if it was we who ended them all.
        unblocked_at: when ranks blocked in a collective were made to raise; None if never.
    """

    size: int
    answers: dict[int, wire.ItemDone | wire.CallDone] = field(default_factory=dict)
    raised: dict[int, wire.Raised] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    killed: bool = False
    unblocked_at: float | None = None

    @property
    def is_troubled(self) -> bool:
        """Whether a rank raised, if only to skip, or died, or anything befell one."""
        return bool(self.raised or self.incidents or self.dead or self.killed or self.unblocked_at is not None)

    def agreed(self) -> wire.ItemDone | None:
        """Any rank's answer, where all of them ran a test without trouble and said the same of it; else None."""
        answers = list(self.answers.values())
        first = answers[0] if answers else None
        if self.is_troubled or len(answers) < self.size or not isinstance(first, wire.ItemDone):
            return None
        alike = (isinstance(each, wire.ItemDone) and each.reports == first.reports and each.state == first.state
                 for each in answers)  # fmt: skip
        return first if first.state.intact and all(alike) else None

    def is_consequence(self, rank: int) -> bool:
        """Whether the rank only failed because another one had ended the collective they shared."""
        told = self.raised.get(rank)
        if told is None or told.waiting_in is None or told.origin is not None:
            return False
        return bool(self.dead) or (self.unblocked_at is not None and told.time >= self.unblocked_at)


def disagreement(states: Mapping[int, wire.GroupState]) -> str | None:
    """How ranks differ in the collectives they issued (None: they do not).

    >>> state = wire.GroupState(intact=True, groups_made=1, issued={"all ranks": 3})
    >>> disagreement({0: state, 1: state._replace(issued={"all ranks": 4})})
    'the ranks issued different numbers of collectives on all ranks: 3 (rank 0), 4 (rank 1)'
    """
    for label in dict.fromkeys(label for state in states.values() for label in state.issued):
        counts = {rank: state.issued[label] for rank, state in states.items() if label in state.issued}
        if len(set(counts.values())) > 1:
            return f"the ranks issued different numbers of collectives on {label}: {by_value(counts)}"
    made = {rank: state.groups_made for rank, state in states.items()}
    if len(set(made.values())) > 1:
        return f"the ranks made different numbers of process groups: {by_value(made)}"
    return None


def by_value(values: Mapping[int, object]) -> str:
    """Values with the ranks that have them, each value once.

    >>> by_value({0: "a", 1: "b", 2: "a"})
    'a (ranks 0, 2), b (rank 1)'
    """
    ranks: dict[object, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return ", ".join(f"{value} ({rank_list(members)})" for value, members in ranks.items())


def rank_list(ranks: list[int]) -> str:
    """Ranks as a reader says them.

    >>> rank_list([3]), rank_list([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
