"""Which parameters travel in which collective, and what has become of that: read off the dataflow
in one walk.

An all-gather's *members* are the parameters that go into its payload, in its order; those of a
reduction the outputs that come out of it. Collectives without members are left out; a payload of
the view ``layout`` is a bucket.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from pytest_gtrainer.graphtext.dataflow import HOLE, Dataflow
from pytest_gtrainer.graphtext.differences.remarks import (
    Remark,
    Weight,
    communicates,
    kind_of,
    listed,
    module_of,
)
from pytest_gtrainer.graphtext.sections import GraphLine, Scope
from pytest_gtrainer.graphtext.syntax import absolute, key_of

_REDUCTIONS = ("RS", "AR")
_ITEM = re.compile(rf"{HOLE}((?:\[\d+\])+)")


@dataclass(frozen=True, slots=True)
class LaunchedBucket:
    """A collective of parameters or of their gradients."""

    kind: str
    scope: Scope
    members: tuple[str, ...]

    @property
    def label(self) -> str:
        """``bucket layers.3/bwd``; a collective outside of buckets is called by its module."""
        path = f"{module_of(self.scope)}/{self.scope.space}"
        return f"bucket {path}" if self.scope.is_bucket else path

    @property
    def sort(self) -> str:
        """Return what others may stand for it in a sentence: an AG's order is of no account for a
        gradient's bits.
        """
        return f"{self.kind}/{self.scope.space}"

    @property
    def about(self) -> str:
        return self.scope.owners[0]


def buckets_of(graph: Dataflow) -> list[LaunchedBucket]:
    """The buckets of a graph in the order in which it launches them."""
    launches = {
        place: kind
        for place, value in enumerate(graph.values)
        if (kind := kind_of(value)) is not None
    }
    returned = _returned(graph, {place for place, kind in launches.items() if kind in _REDUCTIONS})
    found = []
    for place, kind in launches.items():
        launch, members = graph.values[place], []
        if kind in _REDUCTIONS:
            members = [name for _, name in sorted(returned[place])]
        elif launch.sources:
            payload = _root(graph, launch.sources[0])
            value = graph.values[payload]
            parts = (
                [payload] if value.is_input else [_root(graph, source) for source in value.sources]
            )
            inputs = [graph.values[part].scope for part in parts]
            if all(
                scope.space == "P" for scope in inputs
            ):  # none if anything else is in the payload
                members = [scope.owners[0] for scope in inputs]
        if members:
            found.append(LaunchedBucket(kind, launch.scope, tuple(members)))
    return found


def _root(graph: Dataflow, place: int) -> int:
    """The value that one is made of by operators of one operand, collectives apart."""
    while len(set((value := graph.values[place]).sources)) == 1 and not communicates(value):
        place = value.sources[0]
    return place


def _returned(graph: Dataflow, reductions: Set[int]) -> Mapping[int, list[tuple[str, str]]]:
    """For each reduction its outputs, each with the items by which it was taken apart."""
    outputs: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for number, (name, arguments, operands, _) in enumerate(graph.results):
        sources = [operand for operand in operands if isinstance(operand, int) and operand >= 0]
        items = ""
        while len(set(sources)) == 1:
            if found := _ITEM.search(arguments):
                items = "".join(f"{int(item):06}" for item in re.findall(r"\d+", found[1])) + items
            if (place := sources[0]) in reductions:
                outputs[place].append((items, name or f"output {number}"))
            arguments, sources = graph.values[place].arguments, list(graph.values[place].sources)
    return outputs


Said = tuple[Remark, Sequence[LaunchedBucket]]


def bucket_remarks(old: Sequence[LaunchedBucket], new: Sequence[LaunchedBucket]) -> Iterator[Said]:
    """Sentences on buckets merged, split, lost, gained or reordered, each with the buckets that it
    is about.
    """
    for sort in dict.fromkeys(bucket.sort for bucket in (*old, *new)):
        yield from _Change(
            *[[bucket for bucket in side if bucket.sort == sort] for side in (old, new)]
        ).remarks()


class _Change:
    """What has become of the buckets of one kind and direction."""

    def __init__(self, old: Sequence[LaunchedBucket], new: Sequence[LaunchedBucket]) -> None:
        self.old, self.new = old, new
        # each with the times that it stood there before: a parameter that stands there twice is two
        # members
        self._members = [
            [
                [(name, b.members[:place].count(name)) for place, name in enumerate(b.members)]
                for b in side
            ]
            for side in (old, new)
        ]
        self._homes = [
            {each: place for place, told in enumerate(side) for each in told}
            for side in self._members
        ]
        self._heirs, self._origins = (
            [Counter(homes[member] for member in members if member in homes) for members in side]
            for side, homes in zip(self._members, self._homes[::-1], strict=True)
        )
        self._partner = {
            place: heir
            for place, heirs in enumerate(self._heirs)
            if (heir := _most(heirs)) is not None and _most(self._origins[heir]) == place
        }

    def remarks(self) -> Iterator[Said]:
        yield from self._merged()
        yield from self._split()
        for verb, buckets, homes in (
            ("lost", self.old, self._heirs),
            ("gained", self.new, self._origins),
        ):
            for place, bucket in enumerate(buckets):
                if not homes[place]:
                    text = f"{verb} {bucket.kind} {bucket.label} of {listed(_inside(bucket, bucket.members))}"
                    yield (
                        Remark(Weight.BUCKET, text, bucket.about, f"{verb} {bucket.sort} buckets"),
                        [bucket],
                    )
                elif verb == "lost" and place in self._partner:
                    yield from self._members_changed(place, self._partner[place])

    def _merged(self) -> Iterator[Said]:
        """Buckets of which all that is left is in another one's heir."""
        into: dict[int, list[int]] = defaultdict(list)
        for place, heirs in enumerate(self._heirs):
            if place not in self._partner and len(heirs) == 1:
                into[next(iter(heirs))].append(place)
        for heir, places in into.items():
            partner = [old for old, new in self._partner.items() if new == heir]
            sources = [self.old[place] for place in sorted([*places, *partner])]
            target, labels, prefix = self.new[heir], [source.label for source in sources], ""
            if all(source.scope.is_bucket for source in sources):
                prefix, labels = "buckets ", [label.removeprefix("bucket ") for label in labels]
            told = (
                " and ".join(labels)
                if len(labels) == 2
                else listed(labels, 3 if len(labels) == 3 else 1)
            )
            text = f"{target.kind} {prefix}{told} merged into {target.label}"
            yield Remark(Weight.BUCKET, text, sources[0].about), [*sources, target]

    def _split(self) -> Iterator[Said]:
        for origin, source in enumerate(self.old):
            new = [self.new[place] for place in self._parts(origin)]
            if len(new) < 2:
                continue
            into = listed([f"{part.label} ({len(part.members)} members)" for part in new])
            if not any(part.scope.is_bucket for part in new):
                into = f"{len(new)} collectives, of {listed(_inside(source, [part.members[0] for part in new]))}"
            yield (
                Remark(
                    Weight.BUCKET, f"{source.kind} {source.label} split into {into}", source.about
                ),
                [source, *new],
            )

    def _parts(self, origin: int) -> list[int]:
        """The new buckets that are made of one old one only; what is a single parameter left over
        is none.
        """
        heir = self._partner.get(origin)
        made = [
            place
            for place in sorted(self._heirs[origin])
            if len(self._origins[place]) == 1 or place == heir
        ]
        if heir is not None and not self.new[heir].scope.is_bucket:
            return made
        return [
            place
            for place in made
            if self.new[place].scope.is_bucket or len(self.new[place].members) > 1
        ]

    def _members_changed(self, place: int, heir: int) -> Iterator[Said]:
        """Members that came, that went, and those that are in another order."""
        bucket, now = self.old[place], self.new[heir]
        mine, theirs = self._members[0][place], self._members[1][heir]
        left: dict[int | None, list[str]] = defaultdict(
            list
        )  # by the new bucket that they are in, None for none
        for member in mine:
            left[self._homes[1].get(member)].append(member[0])
        come = [name for name, count in theirs if (name, count) not in self._homes[0]]
        changes = [("gained", come, "")] if come else []
        told = {heir, *self._parts(place)}
        for where, names in left.items():
            if where not in told:
                changes.append(
                    ("lost", names, "" if where is None else f" to {self.new[where].label}")
                )
        for verb, names, to in changes:
            text = f"{now.kind} {now.label} {verb} {listed(names)}{to}"
            yield (
                Remark(Weight.BUCKET, text, now.about, f"{verb} members of {now.sort}"),
                [bucket, now],
            )

        common = set(mine) & set(theirs)
        kept, order = (
            [name for name, count in side if (name, count) in common] for side in (mine, theirs)
        )
        if kept != order:
            stands, was = _inside(
                now, next([b, a] for a, b in zip(kept, order, strict=True) if a != b)
            )
            text = f"{now.kind} {now.label}: members in another order: {stands} where {was} was"
            yield (
                Remark(Weight.BUCKET, text, now.about, f"order of members of {now.sort}"),
                [bucket, now],
            )


def _inside(bucket: LaunchedBucket, members: Sequence[str]) -> list[str]:
    """Names as seen from the bucket's module, if it has one."""
    prefix = f"{bucket.about}."
    is_inside = all(member.startswith(prefix) for member in members)
    return [member.removeprefix(prefix) if is_inside else member for member in members]


def _most(homes: Counter[int]) -> int | None:
    """Return where most members are, the first such bucket."""
    return min(homes, key=lambda place: (-homes[place], place), default=None)


_SLOT = re.compile(r"(?P<path>.+): at\(.*\)")
_KINDS = {"all_gather": "AG", "reduce_scatter": "RS"}


def payloads_of(lines: Iterable[GraphLine]) -> list[LaunchedBucket]:
    """The payloads of a layout."""
    found: list[tuple[str, Scope, list[str]]] = []
    for section, _, text in lines:
        space, layer = key_of(section)
        slot = _SLOT.fullmatch(text)
        if text.startswith("payload("):
            path = f"{layer.container}.{layer.number}" if layer else ""
            found.append((_KINDS.get(space, space), Scope((path,), "layout", is_bucket=True), []))
        elif slot and found:
            found[-1][2].append(absolute(slot["path"], layer))
    return [LaunchedBucket(kind, scope, tuple(members)) for kind, scope, members in found]
