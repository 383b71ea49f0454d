"""Changes in words.

``describe_failure`` compares a failed test with its expectation, ``Earlier`` a run with an earlier
page of ``--gt-report``.
"""

import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_gtrainer.facts import escaped, spell_counts, unpacked
from pytest_gtrainer.numerics.verdict import page_order
from pytest_gtrainer.report.collected import Test

MOST = 3  # sentences of one difference; the rest is counted
_MOST_GRAPHS = 20  # pairs of graphs described in words; large graphs take seconds each
BAD = frozenset({"failed", "error"})
_KEYS = frozenset({"name", "outcome", "comparisons", "pipelines"})
_NEW_KEYS = frozenset({"claims", "seconds", "imported", "checks", "kinds", "verdicts"})
"""Keys that pages of older versions do not have."""
_HEADS = ("--- ", "+++ ", "@@ ", "in this environment (")
_SLOWER, _SECONDS = 2.0, 0.5
"""A time is another one if it differs by this factor, and by this much."""
_LARGEST_PAGE = 1 << 30  # bytes
_MOST_DETAILS = 16 << 20  # bytes of a test's details, unpacked
_MOST_OF_ALL_DETAILS = 256 << 20
# Details of tests (d0, d1, ...) and graphs (g-KEY), as ``template/report.html.j2`` writes them.
_PART = re.compile(r'<script type="text/plain" id="([dg])-?(\w+)">([^<]*)</script>')


def describe_failure(test: Test) -> list[str]:
    """Describe what failed in a test: goldens, first differing bits, layouts.

    Empty for a test that has not failed, and for one whose checks held: its own message says why it
    failed.
    """
    if test.outcome not in BAD:
        return []
    lines = []
    for fact in test.find("golden_difference"):
        lines.append(f"{fact['name']}: {shorten(fact['words'])}")
    for comparison in test.comparisons():
        must_differ = comparison["must_differ"]
        if comparison["outcome"] == ("different" if must_differ else "equal"):
            continue
        if comparison["first"] is None:
            found = comparison["verdict"].partition("\n")[0]
            if must_differ:
                found += ", and had to differ"
        else:
            step, rank, phase, name = comparison["first"]
            found = f"first different at step {step}, rank {rank}"
            # Comparisons of plain tensors have neither a phase nor, for a single tensor, a name.
            place = f"{phase} {name}".strip()
            if place:
                found += f", {place}"

        lines.append(f"{comparison['what'] or 'comparison'}: {found}")

    for fact in test.find("layout"):
        if fact["problems"]:
            lines.append(f"layout: {shorten(fact['problems'])}")
    return lines


def shorten(sentences: Sequence[str]) -> str:
    """Join the first sentences, and count the others.

    >>> shorten(["lost silu", "gained relu", "c", "d", "e"])
    'lost silu; gained relu; c; and 2 more'
    """
    shown = list(sentences[:MOST])
    if len(sentences) > MOST:
        shown.append(f"and {len(sentences) - MOST} more")
    return "; ".join(shown)


@dataclass(slots=True)
class Earlier:
    """An earlier page, with what the comparison against it has found so far.

    Attributes:
        path: the page.
        tests: the details that are compared, by name of the test.
        graphs: packed graph texts by key.
        counts: tests by kind of change.
        shown: keys of earlier graphs that the new page shows beside its own.
        name: the run in the summary, if it is not the name of the page.
        where: the place of its tests in words.
        times: whether times are compared.
    """

    path: Path
    tests: Mapping[str, Mapping[str, Any]]
    graphs: Mapping[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    shown: set[str] = field(default_factory=set)
    name: str = ""
    where: str = "in the earlier report"
    times: bool = False
    _words: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, given: str, path: Path) -> "Earlier":
        """Read the page at ``path``, which the command line names ``given``.

        Raises:
            pytest.UsageError: there is no such file, or it is not a page of ``--gt-report``.
        """
        option = f"--gt-report-against={given}"
        details: list[str] = []
        graphs: dict[str, str] = {}
        try:
            for kind, key, text in _PART.findall(_read_page(path)):
                if kind == "d":
                    details.append(text)
                else:
                    graphs[key] = text
            tests = _unpack_tests(details)
        except FileNotFoundError:
            raise pytest.UsageError(
                f"{option}: there is no such file; name a page that --gt-report wrote"
            ) from None
        except KeyError:
            raise pytest.UsageError(
                f"{option} was written by an older pytest-gtrainer, whose pages contain less of a "
                "test: write it again"
            ) from None
        # A damaged page fails in base64, zlib, JSON or in the types of what JSON holds.
        except (
            OSError,
            ValueError,
            zlib.error,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise pytest.UsageError(f"{option} cannot be read: {error}") from None

        if not details and not graphs:
            raise pytest.UsageError(f"{option} holds no test; name a page that --gt-report wrote")
        return cls(path, tests, graphs)

    def compare(
        self, test: Test, details: Mapping[str, Any], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """Compare a test with the earlier run and count the changes.

        Args:
            test: the test of this run.
            details: its details, as ``html.build_details`` makes them.
            texts: packed texts of its graphs by key.

        Returns:
            ``lines``: the changes in words; ``graphs``: name, earlier key and key of each changed
            graph; ``moved``: whether anything but a time changed in a test of both runs.
        """
        then = self.tests.get(escaped(test.name))
        if then is None:
            return {"lines": [self._describe_new(test)], "graphs": [], "moved": False}

        lines = self._compare_outcomes(then["outcome"], test.outcome)
        is_bad = test.outcome in BAD
        numbers, unpaired = _compare_numbers(then["comparisons"], details["comparisons"])
        graphs = list(_compare_graphs(then["pipelines"], details["pipelines"]))
        layouts = list(_compare_layouts(then["pipelines"], details["pipelines"]))
        claims, unclaimed = self._compare_claims(
            then.get("claims", ()), details.get("claims", ()), texts
        )
        unpaired += unclaimed
        if "checks" in then:
            unpaired += _compare_checks(then["checks"], details["checks"])
            numbers += _compare_kinds(then["kinds"], details["kinds"])
        if "verdicts" in then:
            numbers += _compare_verdicts(then["verdicts"], details["verdicts"])
        self.counts["with other numbers"] += bool(numbers or claims["numbers"])
        self.counts["with another graph"] += bool(graphs or claims["graph"])
        self.counts["with another layout"] += bool(layouts)
        self.counts["with another text"] += bool(claims["text"])
        for changes in claims.values():
            lines += changes
        if numbers:
            lines.append(shorten(numbers))
        # A test that fails may end before some of its comparisons: their absence is no change.
        if unpaired and not is_bad:
            self.counts["with other comparisons"] += 1
            lines.append(shorten(unpaired))
        shown = []
        for name, old, new in graphs:
            if old and new:
                shown.append((name, old, new))
                self.shown.add(old)
                name += f": {shorten(self._describe_graph_change(old, new, texts))}"
            lines.append(name)

        if layouts:
            lines.append(shorten(layouts))
        has_moved = bool(lines)
        lines += self._compare_times(then.get("seconds"), details.get("seconds"))
        return {"lines": lines, "graphs": shown, "moved": has_moved}

    def _describe_new(self, test: Test) -> str:
        self.counts["newly failing"] += test.outcome in BAD
        file = self.tests.get(escaped(test.name.partition("::")[0]))
        if file is None:
            self.counts["new"] += 1
            return f"new: it is not {self.where}"
        self.counts["not collected then"] += 1
        reason = file.get("reason", "for an unknown reason")
        return f"not compared: its file cannot be collected {self.where}: {reason}"

    def _compare_outcomes(self, then: str, now: str) -> list[str]:
        is_bad, was_bad = now in BAD, then in BAD
        if then == now:
            self.counts["failing as then"] += is_bad
            return []
        change = "with another outcome"  # also of a test that failed and is skipped now
        if is_bad and not was_bad:
            change = "newly failing"
        elif was_bad and now in ("passed", "xpassed"):
            change = "fixed"
        self.counts[change] += 1
        return [f"{then} then, {now} now"]

    def _compare_claims(
        self, then: Sequence[Any], now: Sequence[Any], texts: Mapping[str, str]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Compare what a test claims for its goldens with what it claimed in the other run.

        Returns:
            Sentences on claims that differ, by kind of the golden, and sentences on goldens that
            only one run checked.
        """
        earlier, current = _index(then, "name"), _index(now, "name")
        changed: dict[str, list[str]] = {"graph": [], "numbers": [], "text": []}
        unpaired = []
        for key in dict.fromkeys([*earlier, *current]):
            name = key[0][0]
            if key not in current:
                unpaired.append(f"{name}: no longer checked")
            elif key not in earlier:
                unpaired.append(f"{name}: newly checked")
            elif earlier[key]["key"] != current[key]["key"]:
                kind = current[key]["of"]
                old, new = earlier[key]["key"], current[key]["key"]
                described = self._describe_claim(kind, old, new, texts)
                if described:
                    changed[kind].append(f"{name}: {described}")
        return changed, unpaired

    def _describe_claim(self, kind: str, old: str, new: str, texts: Mapping[str, str]) -> str:
        """Describe how a claim differs; "" if nothing counts, as the spelling of a number."""
        from pytest_gtrainer.golden.compare import judge

        if len(self._words) >= _MOST_GRAPHS:
            return "another one (many differ, so the change is not described)"
        finding = judge(kind, unpacked(self.graphs[old]), unpacked(texts[new]))
        said = []
        for line in finding.reasons.splitlines():
            # Both sides are runs in this environment, and their names stand beside.
            if line.strip() and not line.startswith(_HEADS):
                said.append(line)
        self._words[old, new] = said
        return "" if finding.outcome == "equal" else shorten(self._words[old, new])

    def _compare_times(self, then: float | None, now: float | None) -> list[str]:
        if not self.times or then is None or now is None or abs(then - now) < _SECONDS:
            return []
        change = "slower" if now > then else "faster"
        if max(then, now) < _SLOWER * min(then, now):
            return []
        self.counts[change] += 1
        return [f"{change}: {then:.1f} s then, {now:.1f} s now"]

    def _describe_graph_change(self, old: str, new: str, texts: Mapping[str, str]) -> list[str]:
        from pytest_gtrainer.graphtext import TextError, unfold
        from pytest_gtrainer.graphtext.differences import words

        if (old, new) not in self._words:
            if len(self._words) >= _MOST_GRAPHS:
                return ["another graph (many differ, so the change is not described)"]
            try:
                described = words(unfold(unpacked(self.graphs[old])), unfold(unpacked(texts[new])))
            except (TextError, KeyError, ValueError, zlib.error) as error:
                described = [f"another graph, and the earlier one cannot be read: {error}"]
            self._words[old, new] = described
        return self._words[old, new]

    def summary(self, names: set[str]) -> str:
        """Summarize the comparison in one line; ``names`` are the tests of this run."""
        counts = {**self.counts, "not in this run": len(set(self.tests) - set(map(escaped, names)))}
        return f"against {self.name or self.path.name}: {spell_counts(counts) or 'nothing changed'}"


def _read_page(path: Path) -> str:
    # Reading a device as /dev/zero would never end.
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > _LARGEST_PAGE:
        raise ValueError(f"it has more than {_LARGEST_PAGE >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _unpack_tests(packed_details: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Unpack the details of each test and keep what is compared.

    One test at a time, within ``_MOST_OF_ALL_DETAILS``: a page of 4 MB may hold gigabytes, and most
    of it is captured output, which is not compared.

    Raises:
        KeyError: an older version wrote the page, and something that is compared is missing.
    """
    tests: dict[str, Mapping[str, Any]] = {}
    left = _MOST_OF_ALL_DETAILS
    for packed_text in packed_details:
        text = unpacked(packed_text, most=min(_MOST_DETAILS, left))
        left -= len(text)
        details = json.loads(text)
        kept = {name: details[name] for name in [*_KEYS, *(_NEW_KEYS & details.keys())]}
        if "::" not in details["name"] and details.get("failures"):
            # A file that was not collected: the last line names the exception.
            kept["reason"] = details["failures"][-1][1].strip().rpartition("\n")[2]
        tests[details["name"]] = kept
        if not all("number" in pipeline for pipeline in details["pipelines"]):
            raise KeyError("number")
    return tests


def _index(items: Iterable[Any], *names: str) -> dict[Any, Any]:
    """Index items by the values of ``names`` and a count, as several items may have the same."""
    # Without the count the second of two equal passes would hide the first.
    seen: Counter[Any] = Counter()
    found = {}
    for item in items:
        key = tuple(item[name] for name in names)
        found[key, seen[key]] = item
        seen[key] += 1
    return found


def _compare_numbers(then: Sequence[Any], now: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Compare the digests of the ``actual`` side of each comparison with the earlier run's.

    Returns:
        Sentences about other numbers, and sentences about comparisons that only one run made.
    """
    earlier, current = _index(then, "what"), _index(now, "what")
    changed, unpaired = [], []
    for key in dict.fromkeys([*earlier, *current]):
        what = key[0][0] or "comparison"
        if key not in current:
            unpaired.append(f"{what}: no longer compared")
            continue
        if key not in earlier:
            unpaired.append(f"{what}: newly compared")
            continue
        # Digests by step, rank and phase.
        old = {tuple(place): digest for *place, digest in earlier[key]["actual"]}
        new = {tuple(place): digest for *place, digest in current[key]["actual"]}
        places = [place for place, digest in old.items() if new.get(place, digest) != digest]
        if places:
            step, rank, phase = min(places, key=lambda place: page_order(*place))
            where = f"step {step}, rank {rank}, {phase}"
            changed.append(f"{what}: other numbers than then, first at {where}")
        elif old.keys() != new.keys():
            unpaired.append(f"{what}: other steps, ranks or phases were compared")
        elif earlier[key].get("values", values := current[key].get("values")) != values:
            changed.append(f"{what}: other numbers than then")

    return changed, unpaired


def _compare_checks(then: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return a sentence for each check that a test calls more or less often than it did."""
    was, has = Counter(then), Counter(now)
    changed = []
    for name in dict.fromkeys([*was, *has]):
        if was[name] and not has[name]:
            changed.append(f"{name}: no longer called")
        elif was[name] != has[name]:
            changed.append(f"{name}: called {has[name]} times, {was[name]} then")
    return changed


def _compare_kinds(then: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return a sentence for the first proof that has found another kind of equal."""
    for old, new in zip(then, now, strict=False):
        if old != new:
            return [f"in exact arithmetic {old} then, {new} now"]
    return []


def _compare_verdicts(then: Sequence[list[str]], now: Sequence[list[str]]) -> list[str]:
    """Return a sentence for the first verdict that is another one, such as the kind of a proof."""
    for (what, old), (of, new) in zip(then, now, strict=False):
        if what == of and old != new:
            return [f"{what or 'a verdict'}: {old} then, {new} now"]
    return []


def _pair_pipelines(
    then: Sequence[Any], now: Sequence[Any], part: str
) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """Yield number, earlier ``part`` and ``part`` of each pipeline that has one in either run."""
    pairs: dict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, pipelines in enumerate((then, now)):
        for pipeline in pipelines:
            pairs[pipeline["number"]][side].extend(pipeline[part])
    for number, (old, new) in sorted(pairs.items()):
        if old or new:
            yield number, old, new


def _compare_graphs(then: Sequence[Any], now: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield where a pipeline's graph first became another: name, earlier key and key of the graph.

    This is the trace, or a pass that made another graph from the same one. Passes after it are not
    named, since they were given another graph. Both keys are "" if only one run had passes.
    """
    for number, old, new in _pair_pipelines(then, now, "passes"):
        if not new:
            yield f"pipeline {number + 1}: no passes ran, as they did then", "", ""
            continue
        if not old:
            yield f"pipeline {number + 1}: passes ran, as none did then", "", ""
            continue
        is_named = old[0]["before"] != new[0]["before"]
        if is_named:
            yield "the graph before all passes", old[0]["before"], new[0]["before"]
        earlier = _index(old, "name")
        for key, run in _index(new, "name").items():
            was = earlier.get(key)
            if was and was["before"] == run["before"] and was["after"] != run["after"]:
                is_named = True
                yield f"pass {run['name']}", was["after"], run["after"]

        if not is_named and old[-1]["after"] != new[-1]["after"]:
            yield "the graph after all passes", old[-1]["after"], new[-1]["after"]


def _compare_layouts(then: Sequence[Any], now: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for the payloads of a pipeline's result that came, went, or changed."""
    for _, old, new in _pair_pipelines(then, now, "layouts"):
        was, has = _index_payloads(old), _index_payloads(new)
        for what, side, other in (("payloads gone", was, has), ("new payloads", has, was)):
            labels = {label for (label, _), _ in other}
            names: dict[str, None] = {}
            for key in side:
                (label, collective), _ = key
                if key in other:
                    continue
                if label in labels:  # another collective of the bucket is still there
                    label = f"{collective} of {label}"
                names[label] = None
            if names:
                yield f"{what}: {', '.join(names)}"

        for key, payload in was.items():
            if key in has and has[key] != payload:
                (label, collective), _ = key
                changes = _describe_payload_change(payload, has[key])
                yield f"{collective} of {label}: {', '.join(changes) or 'other sizes'}"


def _index_payloads(layouts: Sequence[Any]) -> dict[Any, Any]:
    if not layouts:
        return {}
    _, payloads = layouts[0]["sides"][0]  # the name of the side, and its payloads
    return _index(payloads, "label", "collective")


def _describe_payload_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changes = []
    parameters = [slot[0] for slot in old["slots"]]
    parameters_now = [slot[0] for slot in new["slots"]]
    if sorted(parameters) != sorted(parameters_now):
        changes.append("other parameters")
    elif parameters != parameters_now:
        changes.append("the same parameters in another order")
    for name in ("op", "dtype", "ranks", "directions"):
        if old.get(name) != new.get(name):
            changes.append(f"{name} {old.get(name)} became {new.get(name)}")
    return changes
