"""Run the communication of all ranks without values: who waits for whom, for ever.

The model is NCCL's. Launches of a rank go into *queues*, one for each communicator, and run in the
order of the queue; the rank goes on until it waits for one. A collective runs when it is first in
the queue of all its ranks. A message runs when both ends are first. Launches that are made together
(``batch_isend_irecv``) are first together.

Source: NCCL's user guide, "Using multiple NCCL communicators concurrently" and "Group calls".
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SEND, RECEIVE = "send", "recv"


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective, or one end of a message.

    Attributes:
        kind: "all_gather", ...; SEND or RECEIVE for a message.
        ranks: those that have to call it; of a message the sender, then the receiver.
        payload: what has to be equal on all ranks of a collective, and on both ends of a message;
            "" for a message of which the graph does not show it.
        sent, received: of an all-to-all, the elements that the rank sends to each of ``ranks``, and
            those that it expects from each; None where no graph shows the number. They differ
            between ranks, so they take no part in a comparison of operations.
    """

    kind: str
    ranks: tuple[int, ...]
    payload: str = ""
    sent: tuple[int | None, ...] = field(default=(), compare=False)
    received: tuple[int | None, ...] = field(default=(), compare=False)

    @property
    def is_message(self) -> bool:
        return self.kind in (SEND, RECEIVE)

    def __str__(self) -> str:
        if self.kind == SEND:
            return f"send to {self.ranks[1]}"
        if self.kind == RECEIVE:
            return f"recv from {self.ranks[0]}"
        return f"{self.kind} of {list(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Launch:
    """Operations that a rank starts together, in the queue of one communicator.

    Attributes:
        where: node and module, for what users read.
    """

    operations: tuple[Operation, ...]
    queue: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank goes on when a launch of its own is complete, by place in its schedule."""

    launch: int


Schedule = Sequence[Launch | Wait]


@dataclass
class _Rank:
    """The progress of a rank.

    Attributes:
        place: of the next step in the schedule.
        queues: places of launches that are not complete, by queue.
        missing: operations of these launches that have not run.
    """

    schedule: Schedule
    place: int = 0
    queues: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[int, list[Operation]] = field(default_factory=dict)

    def go_on(self) -> bool:
        """Launch up to the next wait for what is not complete; return whether anything was done."""
        before = self.place
        while self.place < len(self.schedule):
            step = self.schedule[self.place]
            if isinstance(step, Wait):
                if step.launch in self.missing:
                    break
            else:
                self.queues.setdefault(step.queue, []).append(self.place)
                self.missing[self.place] = list(step.operations)

            self.place += 1

        return self.place > before

    def first(self, queue: str) -> int | None:
        """Return the launch that is first in a queue."""
        waiting = self.queues.get(queue)
        if not waiting:
            return None
        return waiting[0]

    def first_with(self, queue: str, operation: Operation) -> Operation | None:
        """Return this rank's part in an operation, if it can run now."""
        place = self.first(queue)
        if place is None:
            return None
        for own in self.missing[place]:
            # What messages carry is compared when both ends are there.
            is_end = operation.is_message and (own.kind, own.ranks) == (
                operation.kind,
                operation.ranks,
            )
            if is_end or own == operation:
                return own
        return None

    def complete(self, queue: str, operation: Operation) -> None:
        place = self.queues[queue][0]
        own = self.first_with(queue, operation)
        assert own is not None
        self.missing[place].remove(own)
        if not self.missing[place]:
            del self.missing[place]
            self.queues[queue].pop(0)


class Mismatch(Exception):
    """Ranks call different collectives as the next one of a communicator."""


class Queues:
    """The queues of all ranks."""

    def __init__(self, schedules: Mapping[int, Schedule]) -> None:
        self.ranks = {rank: _Rank(schedule) for rank, schedule in schedules.items()}

    def run(self) -> str:
        """Run until nothing moves; return what ranks wait for, "" if all is complete.

        Raises:
            Mismatch: ranks call different collectives of a communicator, or exchange what does not
                fit.
        """
        # Whoever moves may be what others wait for, so all are asked again.
        moved = True
        while moved:
            moved = False
            for rank in self.ranks.values():
                moved |= rank.go_on()

            for number in self.ranks:
                moved |= self._run_first(number)

        stuck = [rank for rank, state in self.ranks.items() if state.missing]
        if not stuck:
            return ""
        return self._explain(stuck[0])

    def _run_first(self, number: int) -> bool:
        """Run what is first in the queues of a rank, and of all others that it needs."""
        moved = False
        state = self.ranks[number]
        for queue in list(state.queues):
            place = state.first(queue)
            if place is None:
                continue

            for operation in list(state.missing[place]):
                if not self._blocking(number, queue, operation):
                    self._check_splits(queue, operation)
                    self._complete(queue, operation)
                    moved = True

        return moved

    def _blocking(self, number: int, queue: str, operation: Operation) -> list[int]:
        """Return the ranks that are not there for an operation of a rank.

        Raises:
            Mismatch: one of them is there for another collective.
        """
        absent = []
        for rank in operation.ranks:
            if rank == number:
                continue

            other = self.ranks.get(rank)
            if other is None:
                raise Mismatch(f"rank {number} calls {operation}, and rank {rank} has no graph")

            wanted = operation
            if operation.is_message:
                wanted = _other_end(operation)
            part = other.first_with(queue, wanted)
            if part is not None:
                if operation.payload and part.payload and operation.payload != part.payload:
                    mine, theirs = self._place_of(number, queue), self._place_of(rank, queue)
                    raise Mismatch(
                        f"rank {number} calls {_spelled(operation)}{mine}, where rank {rank} calls "
                        f"{_spelled(part)}{theirs}"
                    )
                continue

            place = other.first(queue)
            # Messages of a pair may be matched later: their queue holds both directions.
            if place is not None and not operation.is_message:
                self._refuse(number, queue, operation, rank, place)

            absent.append(rank)

        return absent

    def _refuse(self, number: int, queue: str, operation: Operation, rank: int, place: int) -> None:
        """Raise: both are there, each for another collective of one communicator."""
        mine = self.ranks[number].schedule[self.ranks[number].queues[queue][0]]
        theirs = self.ranks[rank].schedule[place]
        other = self.ranks[rank].missing[place][0]
        assert isinstance(mine, Launch)
        assert isinstance(theirs, Launch)
        if other.is_message:
            return

        raise Mismatch(
            f"rank {number} calls {_spelled(operation)}{_at(mine)}, where rank {rank} calls "
            f"{_spelled(other)}{_at(theirs)}"
        )

    def _check_splits(self, queue: str, operation: Operation) -> None:
        """Check that each rank of an all-to-all sends as much as the other one expects of it.

        Raises:
            Mismatch: two ranks disagree.
        """
        if not operation.sent:
            return

        own: list[Operation] = []
        for rank in operation.ranks:
            state = self.ranks[rank]
            waiting = state.missing[state.queues[queue][0]]
            own.append(waiting[waiting.index(operation)])

        for source, sender in enumerate(operation.ranks):
            for target, receiver in enumerate(operation.ranks):
                sent, expected = own[source].sent[target], own[target].received[source]
                if sent is None or expected is None or sent == expected:
                    continue

                raise Mismatch(
                    f"rank {sender} sends {sent} elements to rank {receiver} in {operation}"
                    f"{self._place_of(sender, queue)}, where rank {receiver} expects {expected}"
                    f"{self._place_of(receiver, queue)}"
                )

    def _place_of(self, number: int, queue: str) -> str:
        """Return where the first launch of a rank's queue is, for a message."""
        launch = self.ranks[number].schedule[self.ranks[number].queues[queue][0]]
        assert isinstance(launch, Launch)
        return _at(launch)

    def _complete(self, queue: str, operation: Operation) -> None:
        if not operation.is_message:
            for rank in operation.ranks:
                self.ranks[rank].complete(queue, operation)
            return
        for rank, end in zip(operation.ranks, (SEND, RECEIVE), strict=True):
            self.ranks[rank].complete(queue, Operation(end, operation.ranks))

    def _explain(self, start: int) -> str:
        """Follow who waits for whom until a rank comes again, or has ended."""
        lines: list[str] = []
        seen: list[int] = []
        rank = start
        while rank not in seen:
            seen.append(rank)
            state = self.ranks[rank]
            if not state.missing:
                lines.append(f"rank {rank} has ended")
                break

            line, rank = self._waits(rank)
            lines.append(line)
        else:
            lines = lines[seen.index(rank) :]  # what leads into the cycle is no part of it

        return "\n".join(lines)

    def _waits(self, number: int) -> tuple[str, int]:
        """Return in words for what a rank waits, and one rank that is not there."""
        state = self.ranks[number]
        place = min(state.missing)
        if state.place < len(state.schedule):
            step = state.schedule[state.place]
            assert isinstance(step, Wait)
            place = step.launch

        launch = state.schedule[place]
        assert isinstance(launch, Launch)
        first = state.queues[launch.queue][0]
        running = state.schedule[first]
        assert isinstance(running, Launch)
        words = f"rank {number} waits in {state.missing[place][0]}{_at(launch)}"
        if first != place:
            words += f", behind {state.missing[first][0]}{_at(running)}"

        for operation in state.missing[first]:
            absent = self._blocking(number, launch.queue, operation)
            if absent:
                return f"{words}, which rank {absent[0]} has not reached", absent[0]

        raise AssertionError("what can run has run")


def _other_end(operation: Operation) -> Operation:
    kind = RECEIVE if operation.kind == SEND else SEND
    return Operation(kind, operation.ranks, operation.payload)


def _at(launch: Launch) -> str:
    if not launch.where:
        return ""
    return f" ({launch.where})"


def _spelled(operation: Operation) -> str:
    if not operation.payload:
        return str(operation)
    return f"{operation} with {operation.payload}"


def orders_by_luck(schedules: Mapping[int, Schedule]) -> Iterator[str]:
    """Yield pairs of launches of two communicators that two ranks start in opposite order.

    The first of the two ranks does not wait between them, so the streams of a device decide which
    runs first, and devices may decide differently. One pair for any two ranks is enough.
    """
    places = {rank: _places(schedule) for rank, schedule in schedules.items()}
    said: set[tuple[int, int]] = set()
    for one, schedule in sorted(schedules.items()):
        numbers = {place: number for number, place in places[one].items()}
        for first, second in _running_together(schedule):
            earlier, later = schedule[first], schedule[second]
            assert isinstance(earlier, Launch)
            assert isinstance(later, Launch)
            for other in sorted(_ranks_of(earlier) & _ranks_of(later)):
                theirs = places.get(other, {})
                before = theirs.get(numbers[first], -1)
                after = theirs.get(numbers[second], -1)
                if before <= after or (min(one, other), max(one, other)) in said:
                    continue

                said.add((min(one, other), max(one, other)))
                yield (
                    f"rank {one} starts {earlier.operations[0]}{_at(earlier)} before "
                    f"{later.operations[0]}{_at(later)}, rank {other} after it, and nobody waits "
                    "between them"
                )


def rings_of_luck(schedules: Mapping[int, Schedule]) -> Iterator[str]:
    """Yield rings of launches that only luck keeps from standing still, one for each knot of them.

    On each rank of a ring one launch is started before the next one of the ring. If the device runs
    them in that order, each rank waits in its launch for the rank before. A ring of waits alone is
    a deadlock, which ``Queues`` finds; here one order at least is left to the streams of a device.

    Nodes are operations, and for each rank its waits; an edge leads to what cannot begin before.
    Cost: linear in the steps, and in the launches that run together.
    """
    lucky: dict[Node, dict[Node, tuple[int, Launch, Launch]]] = {}
    edges: dict[Node, set[Node]] = {}
    for rank, schedule in sorted(schedules.items()):
        _add_edges(rank, schedule, edges, lucky)

    for knot in _knots(edges):
        for first, others in lucky.items():
            second = next((each for each in others if first in knot and each in knot), None)
            if second is not None:
                path = _shortest(edges, second, first, knot)
                yield _spell_ring([first, *path], edges, lucky)
                break


Node = tuple[Any, ...]
"""An operation that all its ranks name alike, or a wait of a rank."""


def _add_edges(
    rank: int,
    schedule: Schedule,
    edges: dict[Node, set[Node]],
    lucky: dict[Node, dict[Node, tuple[int, Launch, Launch]]],
) -> None:
    """Add what a rank runs before what."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    nodes: dict[int, list[Node]] = {}
    running: dict[int, Launch] = {}
    latest: dict[str, list[Node]] = {}
    waited: Node | None = None
    for place, step in enumerate(schedule):
        # A node for each wait, else each launch before it had an edge to each one behind it.
        if isinstance(step, Wait):
            point: Node = ("wait", rank, place)
            before = list(nodes[step.launch])
            if waited:
                before.append(waited)
            for each in before:
                edges.setdefault(each, set()).add(point)

            waited = point
            running.pop(step.launch, None)
            continue

        own = []
        for operation in step.operations:
            which = step.queue, operation.ranks
            own.append((*which, counts[which]))
            counts[which] += 1

        earlier = list(latest.get(step.queue, []))
        if waited:
            earlier.append(waited)
        for each in earlier:
            edges.setdefault(each, set()).update(own)

        for other, launch in running.items():
            if launch.queue == step.queue:
                continue

            for each in nodes[other]:
                edges.setdefault(each, set()).update(own)
                for made in own:
                    lucky.setdefault(each, {}).setdefault(made, (rank, launch, step))

        latest[step.queue], nodes[place], running[place] = list(own), list(own), step


def _knots(edges: Mapping[Node, set[Node]]) -> list[set[Node]]:
    """Return the sets of nodes that all lead to each other, by Kosaraju's algorithm."""
    order: list[Node] = []
    seen: set[Node] = set()
    for start in edges:
        if start not in seen:
            order += _behind(edges, start, seen)

    back: dict[Node, set[Node]] = {}
    for node, others in edges.items():
        for other in others:
            back.setdefault(other, set()).add(node)

    knots, seen = [], set()
    for node in reversed(order):
        if node in seen:
            continue

        knot = set(_behind(back, node, seen))
        if len(knot) > 1:
            knots.append(knot)

    return knots


def _behind(edges: Mapping[Node, set[Node]], start: Node, seen: set[Node]) -> list[Node]:
    """Return what a node leads to and is not in ``seen``, each behind what it leads to."""
    found: list[Node] = []
    seen.add(start)
    # A stack of its own, as schedules are longer than Python recurses.
    stack = [(start, iter(edges.get(start, ())))]
    while stack:
        node, others = stack[-1]
        other = next((each for each in others if each not in seen), None)
        if other is None:
            found.append(node)
            stack.pop()
            continue

        seen.add(other)
        stack.append((other, iter(edges.get(other, ()))))

    return found


def _shortest(
    edges: Mapping[Node, set[Node]], start: Node, end: Node, within: set[Node]
) -> list[Node]:
    """Return a shortest path between two nodes of a knot, with both."""
    came: dict[Node, Node | None] = {start: None}
    queue = deque([start])
    while end not in came:
        node = queue.popleft()
        for other in sorted(edges.get(node, ()), key=str):
            if other in within and other not in came:
                came[other] = node
                queue.append(other)

    path: list[Node] = []
    at: Node | None = end
    while at is not None:
        path.append(at)
        at = came[at]

    return path[::-1]


def _spell_ring(
    ring: Sequence[Node],
    edges: Mapping[Node, set[Node]],
    lucky: Mapping[Node, Mapping[Node, tuple[int, Launch, Launch]]],
) -> str:
    """Return a ring in words: on which rank what starts before what."""
    parts = []
    for first, second in pairwise(ring):
        if second not in lucky.get(first, {}):
            continue  # a wait, or one queue: this order is sure

        rank, earlier, later = lucky[first][second]
        parts.append(
            f"rank {rank} starts {earlier.operations[0]}{_at(earlier)} before "
            f"{later.operations[0]}{_at(later)}"
        )

    return f"{', '.join(parts)}: a ring, and nobody waits between them"


Number = tuple[str, tuple[int, ...], int]
"""A launch by its queue, its ranks, and its number among these, which all its ranks count alike."""


def _places(schedule: Schedule) -> dict[Number, int]:
    """Return the places of launches by queue and number."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    places = {}
    for place, step in enumerate(schedule):
        if isinstance(step, Launch):
            which = step.queue, tuple(sorted(_ranks_of(step)))
            places[*which, counts[which]] = place
            counts[which] += 1

    return places


def _running_together(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield pairs of launches of two queues, the second started before the first is waited for."""
    running: dict[int, str] = {}
    for place, step in enumerate(schedule):
        if isinstance(step, Wait):
            running.pop(step.launch, None)
            continue

        for before, queue in running.items():
            if queue != step.queue:
                yield before, place

        running[place] = step.queue


def _ranks_of(launch: Launch) -> set[int]:
    ranks: set[int] = set()
    for operation in launch.operations:
        ranks.update(operation.ranks)
    return ranks
