"""What changed, in words: of one test against what it expects, and against an earlier page of ``--gt-report``."""

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer.facts import escaped, unpacked
from pytest_gtrainer.numerics.verdict import page_order
from pytest_gtrainer.report.collected import Test

MOST = 3  # sentences of one difference; the rest is counted
_MOST_GRAPHS = 20  # pairs of graphs of a run that are compared in words, a few seconds each where they are large
BAD = frozenset({"failed", "error"})
_KEYS = frozenset({"name", "outcome", "comparisons", "pipelines"})
_LARGEST_PAGE = 1 << 30  # bytes
_MOST_DETAILS = 16 << 20  # bytes of a test's details, unpacked
_MOST_OF_ALL_DETAILS = 256 << 20
_PART = re.compile(r'<script type="text/plain" id="([dg])-?(\w+)">([^<]*)</script>')


def what_changed(test: Test) -> list[str]:
    """A failed test's golden differences, first differing bits and layout problems; empty if its own words say all."""
    if test.outcome not in BAD:
        return []
    lines = [f"{fact['name']}: {cut(fact['words'])}" for fact in test.of("golden_difference")]
    for told in test.comparisons():
        if told["outcome"] != ("different" if told["must_differ"] else "equal"):
            what = told["what"] or "comparison"
            said = (
                f"{told['told'].partition(chr(10))[0]}{', and had to differ' * told['must_differ']}"
            )
            if told["first"] is not None:
                step, rank, phase, name = told["first"]
                where = " ".join(filter(None, (phase, name)))
                said = f"first different at step {step}, rank {rank}" + (
                    f", {where}" if where else ""
                )
            lines.append(f"{what}: {said}")
    return lines + [
        f"layout: {cut(fact['problems'])}" for fact in test.of("layout") if fact["problems"]
    ]


def cut(sentences: Sequence[str]) -> str:
    """The first few, and how many more there are.

    >>> cut(["lost silu", "gained relu", "c", "d", "e"])
    'lost silu; gained relu; c; and 2 more'
    """
    left = len(sentences) - MOST
    return "; ".join([*sentences[:MOST], *([f"and {left} more"] if left > 0 else [])])


@dataclass(slots=True)
class Earlier:
    """An earlier page: tests by name, packed graphs by key; ``counts`` of changes, ``shown`` graphs to open beside."""

    path: Path
    tests: Mapping[str, Mapping[str, Any]]
    graphs: Mapping[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    shown: set[str] = field(default_factory=set)
    _words: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, given: str, path: Path) -> "Earlier":
        """The page at ``path``; pytest.UsageError if there is none, or it is no page of ``--gt-report``."""
        option = f"--gt-report-against={given}"
        try:
            parts = _PART.findall(_read(path))
            tests = _tests_of(text for kind, _, text in parts if kind == "d")
        except FileNotFoundError:
            raise pytest.UsageError(
                f"{option}: there is no such file; name a page that --gt-report wrote"
            ) from None
        except KeyError:
            told = "was written by an older pytest-gtrainer, whose pages contain less of a test: write it again"
            raise pytest.UsageError(f"{option} {told}") from None
        except (
            OSError,
            ValueError,
            zlib.error,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise pytest.UsageError(f"{option} cannot be read: {error}") from None
        if not parts:
            raise pytest.UsageError(f"{option} holds no test; name a page that --gt-report wrote")
        return cls(path, tests, {key: text for kind, key, text in parts if kind == "g"})

    def compare(
        self, test: Test, details: Mapping[str, Any], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """What a test did otherwise than in the earlier run: ``lines`` in words, ``graphs`` as name and two keys.
        ``texts`` are the packed graphs of this run's test by key. Counts what it finds."""
        if (then := self.tests.get(escaped(test.name))) is None:
            self.counts["new"] += 1
            self.counts["newly failing"] += test.outcome in BAD
            return {"lines": ["new: it is not in the earlier report"], "graphs": []}
        lines: list[str] = []
        is_bad = test.outcome in BAD
        if then["outcome"] != test.outcome:
            lines.append(f"{then['outcome']} then, {test.outcome} now")
            is_fixed = then["outcome"] in BAD and test.outcome in ("passed", "xpassed")
            is_new = is_bad and then["outcome"] not in BAD
            self.counts[
                "newly failing" if is_new else "fixed" if is_fixed else "with another outcome"
            ] += 1
        elif is_bad:
            self.counts["failing as then"] += 1
        numbers, not_paired = _numbers(then["comparisons"], details["comparisons"])
        graphs = list(_graphs(then["pipelines"], details["pipelines"]))
        layouts = list(_layouts(then["pipelines"], details["pipelines"]))
        changes = (
            ("with other numbers", numbers),
            ("with another graph", graphs),
            ("with another layout", layouts),
        )
        for what, found in changes:
            self.counts[what] += bool(found)
        for sentences in (
            numbers,
            [] if is_bad else not_paired,
        ):  # a test that fails may come to no comparison
            lines += [cut(sentences)] if sentences else []
        shown = []
        for name, old, new in graphs:
            if old and new:
                shown.append((name, old, new))
                self.shown.add(old)
                lines.append(f"{name}: {cut(self._between(old, new, texts))}")
            else:
                lines.append(name)
        return {"lines": lines + ([cut(layouts)] if layouts else []), "graphs": shown}

    def _between(self, old: str, new: str, texts: Mapping[str, str]) -> list[str]:
        from pytest_gtrainer.graphtext import TextError, unfold
        from pytest_gtrainer.graphtext.differences import words

        if (old, new) not in self._words:
            if len(self._words) >= _MOST_GRAPHS:
                return ["another graph (many differ, so it is not told in words)"]
            try:
                self._words[old, new] = words(
                    unfold(unpacked(self.graphs[old])), unfold(unpacked(texts[new]))
                )
            except (TextError, KeyError, ValueError, zlib.error) as error:
                self._words[old, new] = [
                    f"another graph, and the earlier one cannot be read: {error}"
                ]
        return self._words[old, new]

    def summary(self, names: set[str]) -> str:
        """One line for all tests; ``names`` are those of this run."""
        counts = {**self.counts, "not in this run": len(set(self.tests) - set(map(escaped, names)))}
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"against {self.path.name}: {told or 'nothing changed'}"


def _read(path: Path) -> str:
    """Read a page, which is a file of bounded size: a device would never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > _LARGEST_PAGE:
        raise ValueError(f"it has more than {_LARGEST_PAGE >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _tests_of(packed_details: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Unpack the details of each test, one after the other, and keep what is compared; a KeyError if it is not there.

    What a test has printed is most of it, and is not compared. A page of 4 MB may hold gigabytes.
    """
    tests: dict[str, Mapping[str, Any]] = {}
    left = _MOST_OF_ALL_DETAILS
    for packed_text in packed_details:
        text = unpacked(packed_text, most=min(_MOST_DETAILS, left))
        left -= len(text)
        each = json.loads(text)
        kept = {name: each[name] for name in _KEYS}
        if not all("number" in one for one in kept["pipelines"]):
            raise KeyError
        tests[each["name"]] = kept
    return tests


def _numbered(items: Iterable[Any], *names: str) -> dict[Any, Any]:
    """Items by what they are called and the how-many-th so called each is."""
    seen: Counter[Any] = Counter()
    found = {}
    for item in items:
        key = tuple(item[name] for name in names)
        found[key, seen[key]] = item
        seen[key] += 1
    return found


def _numbers(then: Sequence[Any], now: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Where the digests of this run's own side differ first, and which comparisons have no other to go with."""
    sides = [_numbered(side, "what") for side in (then, now)]
    changed, lonely = [], []
    for place in dict.fromkeys([*sides[0], *sides[1]]):
        what = place[0][0] or "comparison"
        old, new = (side.get(place) for side in sides)
        if old is None or new is None:
            lonely.append(f"{what}: {'no longer compared' if new is None else 'newly compared'}")
            continue
        was, has = ({tuple(row[:3]): row[3] for row in each["actual"]} for each in (old, new))
        if places := [at for at in was.keys() & has.keys() if was[at] != has[at]]:
            step, rank, phase = min(places, key=lambda at: page_order(*at))
            changed.append(
                f"{what}: other numbers than then, first at step {step}, rank {rank}, {phase}"
            )
        elif was.keys() != has.keys():
            lonely.append(f"{what}: other steps, ranks or phases were compared")
    return changed, lonely


def _graphs(then: Sequence[Any], now: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """What made another graph, with the keys of the two: the trace, or a pass that was given the same graph as then.
    Without keys: passes that one of the two runs did not have."""
    sides = [
        {each["number"]: each["passes"] for each in side if each["passes"]} for side in (then, now)
    ]
    for number in sorted({*sides[0], *sides[1]}):
        old, new = (side.get(number, []) for side in sides)
        if not old or not new:
            what = "no passes ran, as they did then" if old else "passes ran, as none did then"
            yield f"pipeline {number + 1}: {what}", "", ""
            continue
        start, end = (
            (old[at][which], new[at][which]) for at, which in ((0, "before"), (-1, "after"))
        )
        if start[0] != start[1]:
            yield "the graph before all passes", *start
        told = False
        earlier = _numbered(old, "name")
        for place, each in _numbered(new, "name").items():
            was = earlier.get(place)
            if (
                was is not None
                and was["before"] == each["before"]
                and was["after"] != each["after"]
            ):
                told = True
                yield f"pass {each['name']}", was["after"], each["after"]
        if not told and start[0] == start[1] and end[0] != end[1]:
            yield "the graph after all passes", *end


def _layouts(then: Sequence[Any], now: Sequence[Any]) -> Iterator[str]:
    """Which payload of a pipeline's result came or went, or is otherwise made up."""
    sides = [{each["number"]: each["layouts"] for each in side} for side in (then, now)]
    for number in sorted({*sides[0], *sides[1]}):
        given = [side.get(number) for side in sides]
        was, has = (
            _numbered(each[0]["sides"][0][1] if each else [], "label", "collective")
            for each in given
        )
        for what, side, other in (("payloads gone", was, has), ("new payloads", has, was)):
            labels = {label for (label, _), _ in other}
            lonely = [name for name, nth in side if (name, nth) not in other]
            if found := dict.fromkeys(
                one if one not in labels else f"{how} of {one}" for one, how in lonely
            ):
                yield f"{what}: {', '.join(found)}"
        for place in [place for place in was if place in has and was[place] != has[place]]:
            (label, collective), _ = place
            one, other = was[place], has[place]
            names = [[slot[0] for slot in each["slots"]] for each in (one, other)]
            told = (
                (name, one.get(name), other.get(name))
                for name in ("op", "dtype", "ranks", "directions")
            )
            fields = [f"{name} {old} became {new}" for name, old, new in told if old != new]
            if names[0] != names[1]:
                is_order = sorted(names[0]) == sorted(names[1])
                fields.insert(
                    0, "the same parameters in another order" if is_order else "other parameters"
                )
            yield f"{collective} of {label}: {', '.join(fields) or 'other sizes'}"
