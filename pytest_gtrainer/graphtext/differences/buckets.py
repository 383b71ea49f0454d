"""Buckets of parameters in two graphs, and sentences on how they differ.

The *members* of an all-gather are the parameters that go into its payload, in its order. The
members of a reduction are the gradients that come out of it, by the names of the outputs. A
collective without members is left out. In the view ``layout``, each payload is a bucket.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gtrainer.facts import spell_some
from pytest_gtrainer.graphtext.dataflow import HOLE, Dataflow
from pytest_gtrainer.graphtext.differences.remarks import (
    Remark,
    Weight,
    communicates,
    kind_of,
    module_of,
)
from pytest_gtrainer.graphtext.sections import GraphLine, Scope
from pytest_gtrainer.graphtext.syntax import absolute, key_of

_REDUCTIONS = ("RS", "AR")
_ITEM = re.compile(rf"{HOLE}((?:\[\d+\])+)")

Member = tuple[str, int]
"""A parameter, and how many members of the bucket before it are the same parameter."""


@dataclass(frozen=True, slots=True)
class LaunchedBucket:
    """A collective of parameters or of their gradients."""

    kind: str
    scope: Scope
    members: tuple[Member, ...]

    @property
    def label(self) -> str:
        """``bucket layers.3/bwd``; ``layers.3/bwd`` for a collective outside of buckets."""
        path = f"{module_of(self.scope)}/{self.scope.space}"
        return f"bucket {path}" if self.scope.is_bucket else path

    @property
    def sort(self) -> str:
        """Kind and direction, ``RS/bwd``: only buckets that share them are compared."""
        return f"{self.kind}/{self.scope.space}"

    @property
    def about(self) -> str:
        return self.scope.owners[0]


def _bucket(kind: str, scope: Scope, names: Sequence[str]) -> LaunchedBucket:
    # A parameter that stands twice in a payload is two members.
    seen: Counter[str] = Counter()
    members = []
    for name in names:
        members.append((name, seen[name]))
        seen[name] += 1
    return LaunchedBucket(kind, scope, tuple(members))


def buckets_of(graph: Dataflow) -> list[LaunchedBucket]:
    """Return the buckets of a graph in the order in which it launches them."""
    outputs = _outputs_of_reductions(graph)
    found = []
    for place, value in enumerate(graph.values):
        kind = kind_of(value)
        if kind is None:
            continue
        names: list[str] = []
        if kind in _REDUCTIONS:
            names = [name for _, name in sorted(outputs[place])]
        elif value.sources:
            names = _parameters_of_payload(graph, value.sources[0])
        if names:
            found.append(_bucket(kind, value.scope, names))

    return found


def _parameters_of_payload(graph: Dataflow, place: int) -> list[str]:
    """Return the parameters that a payload is made of; none if anything else is in it."""
    origin = _origin(graph, place)
    value = graph.values[origin]
    names = []
    for part in [origin] if value.is_input else value.sources:
        scope = graph.values[_origin(graph, part)].scope
        if scope.space != "P":
            return []
        names.append(scope.owners[0])
    return names


def _origin(graph: Dataflow, place: int) -> int:
    """Return the value that one is made of by operators of one operand, collectives apart."""
    while len(set(graph.values[place].sources)) == 1 and not communicates(graph.values[place]):
        place = graph.values[place].sources[0]
    return place


def _outputs_of_reductions(graph: Dataflow) -> Mapping[int, list[tuple[str, str]]]:
    """Return the outputs of each reduction with a key of their order in its payload.

    Each output is followed back through operators of one operand. The items that are taken on the
    way, ``split[3]``, are the key, so the order of the outputs of the graph does not count.
    """
    outputs: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for number, (name, arguments, operands, _) in enumerate(graph.results):
        sources = [operand for operand in operands if isinstance(operand, int) and operand >= 0]
        key = ""
        while len(set(sources)) == 1:
            if found := _ITEM.search(arguments):
                # Strings of six digits sort as the numbers do.
                key = "".join(f"{int(item):06}" for item in re.findall(r"\d+", found[1])) + key
            value = graph.values[sources[0]]
            if kind_of(value) in _REDUCTIONS:
                outputs[sources[0]].append((key, name or f"output {number}"))
            arguments, sources = value.arguments, list(value.sources)

    return outputs


BucketRemark = tuple[Remark, Sequence[LaunchedBucket]]
"""A remark, and the buckets that it explains."""


def _remark(text: str, *buckets: LaunchedBucket, gist: str = "") -> BucketRemark:
    return Remark(Weight.BUCKET, text, buckets[0].about, gist), buckets


def bucket_remarks(
    old: Sequence[LaunchedBucket], new: Sequence[LaunchedBucket]
) -> Iterator[BucketRemark]:
    """Yield remarks on buckets that were merged, split, lost, gained or reordered."""
    sides: dict[str, tuple[list[LaunchedBucket], list[LaunchedBucket]]] = {}
    for number, buckets in enumerate((old, new)):
        for bucket in buckets:
            sides.setdefault(bucket.sort, ([], []))[number].append(bucket)
    for ours, theirs in sides.values():
        yield from _Matching(ours, theirs).remarks()


class _Matching:
    """The buckets of one kind and direction in two graphs, matched by the members that they share.

    ``_heirs`` counts the members of each old bucket by the new bucket that they are in, and
    ``_origins`` those of each new bucket by the old one. Two buckets are *partners* if the most
    members of either are in the other.
    """

    def __init__(self, old: Sequence[LaunchedBucket], new: Sequence[LaunchedBucket]) -> None:
        self.old, self.new = old, new
        self._old_home, self._new_home = _homes(old), _homes(new)
        self._heirs = [_count_homes(bucket, self._new_home) for bucket in old]
        self._origins = [_count_homes(bucket, self._old_home) for bucket in new]
        self._partner: dict[int, int] = {}
        for place, heirs in enumerate(self._heirs):
            heir = _largest(heirs)
            if heir is not None and _largest(self._origins[heir]) == place:
                self._partner[place] = heir

    def remarks(self) -> Iterator[BucketRemark]:
        yield from self._merged()
        yield from self._split()
        yield from self._changed()

    def _merged(self) -> Iterator[BucketRemark]:
        """Yield a remark for each new bucket that took all that is left of several old ones."""
        sources: dict[int, list[int]] = defaultdict(list)
        for place, heirs in enumerate(self._heirs):
            if place not in self._partner and len(heirs) == 1:
                sources[next(iter(heirs))].append(place)
        for place, heir in self._partner.items():
            if heir in sources:
                sources[heir].append(place)
        for heir, places in sources.items():
            buckets = [self.old[place] for place in sorted(places)]
            labels, prefix = [], ""
            if all(bucket.scope.is_bucket for bucket in buckets):
                prefix = "buckets "
            for bucket in buckets:
                labels.append(bucket.label.removeprefix("bucket ") if prefix else bucket.label)
            target = self.new[heir]
            names = " and ".join(labels)
            # Three names are as short as two and a number.
            if len(labels) > 2:
                names = spell_some(labels, 3 if len(labels) == 3 else 1)
            text = f"{target.kind} {prefix}{names} merged into {target.label}"
            yield _remark(text, *buckets, target)

    def _split(self) -> Iterator[BucketRemark]:
        """Yield a remark for each old bucket whose members are in several new ones."""
        for place, source in enumerate(self.old):
            parts = [self.new[part] for part in self._parts(place)]
            if len(parts) < 2:
                continue
            if any(part.scope.is_bucket for part in parts):
                into = spell_some([f"{part.label} ({len(part.members)} members)" for part in parts])
            else:
                names = _names(source, [part.members[0] for part in parts])
                into = f"{len(parts)} collectives, of {spell_some(names)}"
            text = f"{source.kind} {source.label} split into {into}"
            yield _remark(text, source, *parts)

    def _parts(self, place: int) -> list[int]:
        """Return the new buckets that are made of one old bucket only.

        A single parameter that was left over when a bucket lost it is no part.
        """
        heir = self._partner.get(place)
        takes_single = heir is not None and not self.new[heir].scope.is_bucket
        parts = []
        for new in sorted(self._heirs[place]):
            if new != heir and len(self._origins[new]) > 1:
                continue
            bucket = self.new[new]
            if takes_single or bucket.scope.is_bucket or len(bucket.members) > 1:
                parts.append(new)
        return parts

    def _changed(self) -> Iterator[BucketRemark]:
        """Yield remarks on buckets lost and gained whole, and on changed members of partners."""
        for verb, buckets, homes in (
            ("lost", self.old, self._heirs),
            ("gained", self.new, self._origins),
        ):
            for place, bucket in enumerate(buckets):
                if not homes[place]:
                    names = spell_some(_names(bucket, bucket.members))
                    text = f"{verb} {bucket.kind} {bucket.label} of {names}"
                    yield _remark(text, bucket, gist=f"{verb} {bucket.sort} buckets")
        for place, heir in self._partner.items():
            yield from self._members_changed(place, heir)

    def _members_changed(self, place: int, heir: int) -> Iterator[BucketRemark]:
        """Yield remarks on members gained, lost, and in another order."""
        was, now = self.old[place], self.new[heir]
        changes = []
        gained = [member[0] for member in now.members if member not in self._old_home]
        if gained:
            changes.append(("gained", gained, ""))
        lost: dict[int | None, list[str]] = defaultdict(list)
        for member in was.members:
            lost[self._new_home.get(member)].append(member[0])
        explained = {heir, *self._parts(place)}
        for home, names in lost.items():
            if home is None:
                changes.append(("lost", names, ""))
            elif home not in explained:
                changes.append(("lost", names, f" to {self.new[home].label}"))

        for verb, names, to in changes:
            text = f"{now.kind} {now.label} {verb} {spell_some(names)}{to}"
            yield _remark(text, now, was, gist=f"{verb} members of {now.sort}")

        # A member occurs once in a bucket, so both sides are as long.
        before = [member for member in was.members if member in now.members]
        after = [member for member in now.members if member in was.members]
        for stands, stood in zip(after, before, strict=True):
            if stands != stood:
                first, second = _names(now, [stands, stood])
                text = f"{now.kind} {now.label}: members in another order: "
                text += f"{first} where {second} was"
                yield _remark(text, now, was, gist=f"order of members of {now.sort}")
                break


def _homes(buckets: Sequence[LaunchedBucket]) -> dict[Member, int]:
    """Return the place of each member's bucket."""
    homes: dict[Member, int] = {}
    for place, bucket in enumerate(buckets):
        homes.update(dict.fromkeys(bucket.members, place))
    return homes


def _count_homes(bucket: LaunchedBucket, homes: Mapping[Member, int]) -> Counter[int]:
    return Counter(homes[member] for member in bucket.members if member in homes)


def _largest(homes: Counter[int]) -> int | None:
    """Return the first bucket that most members are in; None if there is no member."""
    return min(homes, key=lambda place: (-homes[place], place), default=None)


def _names(bucket: LaunchedBucket, members: Sequence[Member]) -> list[str]:
    """Return the names of members as seen from the bucket's module, if all of them lie in it."""
    names = [name for name, _ in members]
    prefix = f"{bucket.about}."
    if all(name.startswith(prefix) for name in names):
        names = [name.removeprefix(prefix) for name in names]
    return names


_SLOT = re.compile(r"(?P<path>.+): at\(.*\)")
_KINDS = {"all_gather": "AG", "reduce_scatter": "RS"}


def payloads_of(lines: Iterable[GraphLine]) -> list[LaunchedBucket]:
    """Return the payloads of a layout as buckets."""
    payloads: list[tuple[str, Scope, list[str]]] = []
    for section, _, text in lines:
        space, layer = key_of(section)
        slot = _SLOT.fullmatch(text)
        if text.startswith("payload("):
            module = f"{layer.container}.{layer.number}" if layer else ""
            scope = Scope((module,), "layout", is_bucket=True)
            payloads.append((_KINDS.get(space, space), scope, []))
        elif slot and payloads:
            payloads[-1][2].append(absolute(slot["path"], layer))
    return [_bucket(kind, scope, names) for kind, scope, names in payloads]
