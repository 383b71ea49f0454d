"""Differences of texts that are no graphs: the views ``layout`` and ``schedule``.

A payload of a layout is compared as a bucket. Other lines are lost, gained, or in another order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pytest_gtrainer.graphtext.differences.buckets import Bucket
from pytest_gtrainer.graphtext.differences.remarks import Remark, Weight, listed
from pytest_gtrainer.graphtext.references import Scope, absolute, dotted, place_of
from pytest_gtrainer.graphtext.sections import Record

_PAYLOAD = re.compile(r"payload\((?P<told>.*)\)")
_SLOT = re.compile(r"(?P<path>.+): at\(.*\)")
_KINDS = {"all_gather": "AG", "reduce_scatter": "RS"}


def payloads_of(records: Iterable[Record]) -> list[Bucket]:
    """The payloads of a layout."""
    found: list[tuple[str, Scope, list[str]]] = []
    for section, _, text in records:
        space, layer = place_of(section)
        slot = _SLOT.fullmatch(text)
        if _PAYLOAD.fullmatch(text):
            path = str(layer) if layer else "_"
            found.append((_KINDS.get(space, space), Scope("layout", f"bucket({path})"), []))
        elif slot and found:
            found[-1][2].append(dotted(absolute(slot["path"], layer)))
    return [Bucket(kind, scope, tuple(members)) for kind, scope, members in found]


def line_remarks(old: Sequence[Record], new: Sequence[Record]) -> Iterator[Remark]:
    """Lines lost and gained by section, or in another order."""
    before, after = _by_section(old), _by_section(new)
    for section in dict.fromkeys([*before, *after]):
        was, now = before.get(section, []), after.get(section, [])
        if was == now:
            continue
        changes = (("lost", Counter(was) - Counter(now)), ("gained", Counter(now) - Counter(was)))
        told = ", ".join(f"{verb} {listed(list(lines), 2)}" for verb, lines in changes if lines)
        space, _, module = dotted(section).partition(".")
        text = f"{space} {module}".rstrip() + f": {told or 'lines in another order'}"
        yield Remark(Weight.REST, text, module, told)
    if list(before) != list(after) and set(before) == set(after):
        yield Remark(Weight.REST, "sections stand in another order")


def _by_section(records: Iterable[Record]) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = defaultdict(list)
    for record in records:
        sections[record.section].append(record.text)
    return sections
