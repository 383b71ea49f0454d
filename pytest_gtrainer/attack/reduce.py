"""Reduce a graph that shows a mistake: delta debugging on its nodes, results, sizes and ranks.

What is judged is always text that parses, which is what the file will hold. A smaller graph is
accepted if it fails in the same kind as the graph did at first.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack.extract import computed, extract, results_of, without_dead_code
from pytest_gtrainer.attack.oracles import NOT_JUDGED, Failure, Oracle, world_of
from pytest_gtrainer.attack.sizes import Change, resize, sizes_in, with_ranks
from pytest_gtrainer.graphtext import header

Item = TypeVar("Item")
_KEPT = ("world", "mesh")
"""Fields of the header without which a graph means something else."""

_NO_GRAPH = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError)
"""What operators raise for sizes that do not fit, and text for what cannot be written or made."""


@dataclass
class Reduction:
    """A graph that is made smaller, step by step, as long as it fails.

    Attributes:
        text: the smallest graph so far.
        failure: how it fails.
        judge: says how a text fails.
        accepted: is called with each smaller text, to save it.
        note: is called with a line of progress.
        tried: the number of graphs that were judged.
        other: the smallest graph that failed in another kind, and how.
    """

    text: str
    failure: Failure
    judge: Oracle
    accepted: Callable[[str], None]
    note: Callable[[str], None]
    tried: int = 0
    other: tuple[str, Failure] | None = None
    _seen: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Reduce until nothing more can go."""
        with world_of(self.text) as ranks:
            self._reduce()
        # Two ranks show most mistakes; the number has to divide sizes, so it doubles.
        fewer = 2
        while fewer < ranks:
            if self._try_ranks(ranks, fewer):
                break
            fewer *= 2

    def _reduce(self) -> None:
        before = ""
        while before != self.text:
            before = self.text
            self._keep_windows()
            self._drop_results()
            self._drop_nodes()
            self._shrink_sizes()

    def graph(self) -> fx.GraphModule:
        """Return the smallest graph so far. Its world has to be up."""
        return graphtext.parse(self.text)

    def _try(self, make: Callable[[], fx.GraphModule]) -> bool:
        """Accept the graph that ``make`` returns if it fails in the same kind."""
        try:
            text = spell(make(), self.text)
            graphtext.parse(text)
        except _NO_GRAPH:
            return False
        return self._try_text(text)

    def _try_text(self, text: str) -> bool:
        # Steps come to the same graph in several ways, and a judgement is dear.
        if text in self._seen:
            return False
        self._seen.add(text)
        self.tried += 1
        failure = self.judge(text)
        if failure is None:
            return False
        if failure.kind != self.failure.kind:
            is_smaller = self.other is None or len(text) < len(self.other[0])
            if is_smaller and failure.kind not in NOT_JUDGED:
                self.other = text, failure
            return False
        self.text, self.failure = text, failure
        self.accepted(text)
        return True

    def _report(self, what: str) -> None:
        self.note(f"{len(computed(self.graph()))} nodes, {self.tried} graphs tried: {what}")

    def _keep_windows(self) -> None:
        """Keep a half of the schedule, as long as one fails by itself."""
        is_smaller = True
        while is_smaller:
            gm = self.graph()
            nodes = computed(gm)
            length = len(nodes) // 2
            self._report("halves of the schedule")
            is_smaller = False
            step = max(length // 2, 1)
            for start in range(0, len(nodes) - length + 1, step):
                window = nodes[start : start + length]
                if window and self._try(partial(extract, gm, window)):
                    is_smaller = True
                    break

    def _drop_results(self) -> None:
        """Return less, and compute only what is returned."""
        gm = self.graph()
        results = results_of(gm)
        self._report(f"{len(results)} results")

        def fails(kept: Sequence[fx.Node]) -> bool:
            return self._try(lambda: without_dead_code(extract(gm, computed(gm), kept)))

        minimize(results, fails)

    def _drop_nodes(self) -> None:
        """Make inputs of the values of nodes."""
        gm = self.graph()
        self._report("nodes")
        minimize(computed(gm), lambda kept: self._try(partial(extract, gm, kept)))

    def _shrink_sizes(self) -> None:
        """Make extents smaller."""
        self._report("sizes")
        for size in sizes_in(self.graph()):
            for smaller in (1, 2, 3, size // 2):
                if smaller >= size:
                    continue
                if self._try(partial(resize, self.graph(), _replacing(size, smaller))):
                    break

    def _try_ranks(self, ranks: int, fewer: int) -> bool:
        """Reduce in a world of fewer ranks, if the graph fails there."""
        text = with_ranks(self.text, ranks, fewer)
        changes: tuple[Change, ...] = (
            _replacing(ranks, fewer),
            lambda size: size if size % ranks else size // ranks * fewer,
        )
        with world_of(text) as now:
            if now != fewer:
                return False
            for change in changes:
                try:
                    smaller = spell(resize(graphtext.parse(text), change), text)
                except _NO_GRAPH:
                    continue
                if self._try_text(smaller):
                    self._report(f"{fewer} ranks in place of {ranks}")
                    self._reduce()
                    return True
        return False


def _replacing(size: int, smaller: int) -> Change:
    return lambda each: smaller if each == size else each


def spell(gm: fx.GraphModule, like: str) -> str:
    """Return the text of a graph, with the world and mesh of another text."""
    fields = header.read(like)
    mesh = {}
    for dimension in fields.get("mesh", "").split(","):
        name, equals, extent = dimension.strip().partition("=")
        if equals:
            mesh[name] = int(extent)
    return _with_world(graphtext.render(gm, mesh=mesh), like)


def _with_world(text: str, like: str) -> str:
    """Return a text with the world and mesh of another one, if it has groups."""
    fields = header.read(like)
    kept = {}
    if "group(" in text:
        kept = {name: fields[name] for name in _KEPT if name in fields}
    return "\n".join([*header.write(kept), header.body(text)])


def minimize(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """Return a part of the items that still fails.

    If more items fail whenever fewer do, no single one of them can go.

    Args:
        items: they fail together.
        fails: whether a part of them, in order, fails.

    >>> minimize(range(100), lambda part: {17, 60} <= set(part))
    [17, 60]
    """
    kept = list(items)
    length = max(len(kept) // 2, 1)
    while length:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + length :]
            if fewer and fails(fewer):
                kept = fewer
            else:
                start += length
        length //= 2
    return kept


def pass_file(text: str, note: str, pass_name: str = "", at_least: str = "") -> str:
    """Return graph text as a pass file, which fails until the pass is mended.

    Args:
        note: for the reader.
        pass_name, at_least: the pass and the kind of equal that it has to keep; "" for a file that
            a command judges.
    """
    lines = [*header.write({}), f"# note: {' '.join(note.split())}"]
    for name, value in header.read(text).items():
        if name == "world":
            size = re.search(r"\d+", value)
            value = f"fake {size[0]}" if size else value
        lines.append(f"# {name}: {value}")
    if pass_name:
        lines += [f"# passes: {pass_name}", f"# values: {at_least}", "# golden: none"]
    return "\n".join([*lines, header.body(text)])


def write_whole(path: Path, text: str) -> None:
    """Write a file at once, so that a run that is cut leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
