"""Fuzz a pass: thousands of generated graphs, each proven before against after it."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer._torch.graph_modules import copied_lazily
from pytest_gtrainer.attack.claims import shape_of
from pytest_gtrainer.attack.extract import computed, inputs_of
from pytest_gtrainer.attack.generate import generate, mesh_of_ranks
from pytest_gtrainer.attack.oracles import (
    NOT_JUDGED,
    RAISED,
    Failure,
    by_proof,
    judge_claims,
    judge_graphs,
)
from pytest_gtrainer.attack.reduce import Reduction, pass_file, write_whole
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.passes.graph_pass import Pass, lint, refusing_written_constants, returned

REFUSALS = (ValueError, NotImplementedError)
"""Errors by which a pass says that a graph is not for it.

If it says so of most graphs, nothing is proven.
"""

GRAPHS_OF_A_MODEL = 50
"""Graphs that are made of a model which is traced for them; the first one is its whole graph."""


@dataclass
class Fuzzer:
    """A run of the fuzzer.

    Attributes:
        a_pass: ``(gm, example_inputs) -> gm``.
        name: of the pass, for the files.
        at_least: the kind of equal that the pass has to keep.
        ranks: of the world that is up, 0 without one.
        folder: for a pass file of each failure, reduced.
        note: is called with a line of progress.
        models: graphs of the user's model, from which others are made; empty for none.
        functional: nothing is written to in generated nodes.
        claims: what the pass keeps besides values, of ``claims.CLAIMS``.
        make_model: takes a number and returns the graph of a model, in place of ``models``. Each is
            tried as it is, then others are made from it.
        tried, changed: graphs that were made, and that the pass has changed.
        refused, unknown: by their words, graphs that the pass refused or that no proof judges.
        found: the files of failures, by kind and operators: each is written once.
        reducing: seconds that went into reducing failures.
    """

    a_pass: Pass
    name: str
    at_least: str
    ranks: int
    folder: Path
    note: Callable[[str], None]
    models: Sequence[fx.GraphModule] = ()
    functional: bool = False
    claims: Sequence[str] = ()
    make_model: Callable[[int], fx.GraphModule] | None = None
    tried: int = 0
    changed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    found: dict[str, Path] = field(default_factory=dict)
    reducing: float = 0.0
    _made: tuple[int, fx.GraphModule] | None = None

    def run(self, seed: int, seconds: float, nodes: int, most: int) -> None:
        """Try graphs of one seed after the other.

        Args:
            seed: of the first graph.
            seconds: when to end; a failure that is found before is reduced to its end.
            nodes: of a graph, about.
            most: end after so many different failures.
        """
        begun = said = time.monotonic()
        while time.monotonic() - begun < seconds and len(self.found) < most:
            self._try(seed + self.tried, nodes)
            if time.monotonic() - said > 5:
                said = time.monotonic()
                self.note(self.state(said - begun))

    def state(self, seconds: float) -> str:
        """Return how far the run is, in a line, and how much of the time went into what."""
        line = (
            f"{self.tried} graphs in {seconds:.0f} s, {self.changed} changed, "
            f"{counted(len(self.found), 'failure')}"
        )
        if self.reducing:
            tries = max(0.0, seconds - self.reducing)
            line += f" ({tries:.1f} s to try graphs, {self.reducing:.1f} s to reduce failures)"
        return line

    def _try(self, seed: int, nodes: int) -> None:
        """Generate one graph, run the pass on it, and judge the result."""
        gm = self._graph_of(seed, nodes)
        self.tried += 1
        before = copied_lazily(gm)
        for name, body in gm.named_children():
            if isinstance(body, fx.GraphModule):
                before.add_module(name, copied_lazily(body))
        old = shape_of(gm)  # before the pass, which may change the graph in place

        try:
            with refusing_written_constants(gm, self.name):
                after = returned(self.a_pass(gm, inputs_of(gm)))
            lint(after.graph, self.name)
        except REFUSALS as error:
            self.refused[str(error).partition("\n")[0]] += 1
            return
        except RAISED as error:
            words = f"the pass raises {type(error).__name__}: {error}".partition("\n")[0]
            failure = Failure(type(error).__name__, words)
            self.changed += 1
            self._report(before, seed, nodes, failure)
            return

        if shape_of(after) == old:
            return

        self.changed += 1
        found = judge_graphs(after, before, self.at_least, self.ranks)
        found = found or judge_claims(self.claims, self.a_pass, after, before)
        if found is not None and found.kind in NOT_JUDGED:
            self.unknown[found.words] += 1
        elif found is not None:
            self._report(before, seed, nodes, found)

    def _graph_of(self, seed: int, nodes: int) -> fx.GraphModule:
        """Return the graph of a seed, which the pass may change."""
        model = None
        if self.make_model is not None:
            number, place = divmod(seed, GRAPHS_OF_A_MODEL)
            if self._made is None or self._made[0] != number:
                self._made = number, self.make_model(number)
            model = self._made[1]
            if place == 0:
                return copy.deepcopy(model)
        elif self.models:
            model = self.models[seed % len(self.models)]
        return generate(seed, nodes, self.ranks, model, self.functional)

    def _report(self, before: fx.GraphModule, seed: int, nodes: int, failure: Failure) -> None:
        """Write the graph of a failure, then reduce it and write what is left."""
        text = graphtext.render(before)
        if self.ranks:
            fields = {"world": f"fake {self.ranks}", "mesh": mesh_of_ranks(self.ranks)}
            text = "\n".join([*header.write(fields), header.body(text)])

        made = f"seed {seed}, {nodes} nodes, {self.ranks} ranks"
        if self.make_model is not None:
            made += ", from a model of --models"
        elif self.models:
            made += ", from a model"
        if self.functional:
            made += ", --functional"

        path = self._free_path(seed)
        self.found[made] = path
        # At once: a run that is interrupted while it reduces has found it all the same.
        self._write(path, text, f"{made}: {failure.words}")

        judge = by_proof(self.a_pass, self.at_least, self.claims)
        again = judge(text)
        if again is None or again.kind in NOT_JUDGED:
            words = "the same graph, run again, does not fail: the pass remembers, or draws"
            self._write(path, text, f"{made}: {failure.words}; {words}")
            self.note(f"{path}\n{failure.kind}: {failure.words}\n{words}")
            return

        reduction = Reduction(text, again, judge, lambda _: None, self.note)
        begun = time.monotonic()
        try:
            reduction.run()
        finally:  # also if the user interrupts it
            self.reducing += time.monotonic() - begun
        operators = sorted({str(node.target) for node in computed(reduction.graph())})
        which = f"{reduction.failure.kind}: {', '.join(operators)}"
        del self.found[made]
        if which in self.found:
            path.unlink()  # it was seen before
            return

        self.found[which] = path
        self._write(path, reduction.text, f"{made}: {reduction.failure.words}")
        self.note(f"{path}\n{reduction.failure.kind}: {reduction.failure.words}")

    def _free_path(self, seed: int) -> Path:
        """Return a name that no file has: those of earlier runs stay."""
        path, count = self.folder / f"{self.name}_{seed}.fxgraph", 1
        while path.exists():
            count += 1
            path = self.folder / f"{self.name}_{seed}_{count}.fxgraph"
        return path

    def _write(self, path: Path, text: str, words: str) -> None:
        note = f"found by fuzzing with {words}"
        write_whole(path, pass_file(text, note, self.name, self.at_least))
