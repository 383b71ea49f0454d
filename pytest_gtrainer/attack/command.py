"""``python -m pytest_gtrainer reduce`` and ``fuzz``: arguments, and what is written and said."""

import argparse
import hashlib
import math
import sys
import tempfile
import time
from pathlib import Path

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack.claims import check_claims
from pytest_gtrainer.attack.extract import computed
from pytest_gtrainer.attack.fuzz import Fuzzer
from pytest_gtrainer.attack.generate import mesh_of_ranks
from pytest_gtrainer.attack.guarded import guarded
from pytest_gtrainer.attack.ingredients import models_over
from pytest_gtrainer.attack.models import graphs_of, load_model
from pytest_gtrainer.attack.oracles import (
    NOT_JUDGED,
    Failure,
    Oracle,
    by_command,
    by_proof,
    check_kind,
    load_pass,
    world_of,
)
from pytest_gtrainer.attack.reduce import Reduction, pass_file, spell, write_whole
from pytest_gtrainer.graphtext.header import TextError

_EVERY = 2.0
"""Seconds between lines of progress."""


class UsageError(ValueError):
    """An argument cannot be used; the message says what to give instead."""


def run(given: argparse.Namespace) -> int:
    """Run ``reduce`` or ``fuzz``; return the exit status."""
    try:
        if given.command == "fuzz":
            return _fuzz(given)
        return _Reduce(given).run()
    except ValueError as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 2


def _fuzz(given: argparse.Namespace) -> int:
    """Fuzz a pass; return 0 if it fails on no graph, 1 if it does or nothing is proven."""

    def note(line: str) -> None:
        print(f"fuzz: {line}", file=sys.stderr, flush=True)

    _check_numbers(given)
    check_kind(given.at_least)
    claims = check_claims(given.claims)
    a_pass, name = load_pass(given.gt_pass, "--gt-pass"), given.gt_pass.rpartition(":")[2]
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--folder={given.folder} cannot be made: {error}") from None

    # Names are looked up before the world is set up, so that a wrong one costs no time.
    make = None
    if given.gt_model is not None:
        make = load_model(given.gt_model)

    text = ""
    if given.ranks:
        text = f"# gtrainer graph v2\n# mesh: {mesh_of_ranks(given.ranks)}\n"

    begun, is_interrupted = time.monotonic(), False
    with world_of(text) as ranks:
        limited = guarded(a_pass, given.timeout, note)
        own = {}
        if make is not None:
            own = graphs_of(make, f"--gt-model={given.gt_model}")
        models = [each.gm for each in own.values()]
        make_model = models_over(ranks) if given.models else None

        fuzzer = Fuzzer(
            a_pass=limited,
            name=name,
            at_least=given.at_least,
            ranks=ranks,
            folder=given.folder,
            note=note,
            models=models,
            functional=given.functional,
            claims=claims,
            make_model=make_model,
        )
        try:
            fuzzer.run(given.seed, 60 * given.minutes, given.nodes, given.failures)
        except KeyboardInterrupt:
            is_interrupted = True
            note("interrupted")

    note(fuzzer.state(time.monotonic() - begun))
    for words, count in (fuzzer.refused + fuzzer.unknown).most_common(5):
        note(f"not judged, {count} times: {words}")

    proven = fuzzer.changed - fuzzer.unknown.total()
    others = fuzzer.refused.total() + fuzzer.unknown.total()
    if fuzzer.found:
        return 1
    if proven <= others:
        note(
            f"too little is proven: of {fuzzer.tried} graphs {name} changed {proven} that could be "
            f"judged, and {others} were refused or could not be. Rules for passes of other kinds: "
            "python -m pytest --pyargs pytest_gtrainer.conformance"
        )
        return 1

    if make is None and not given.models and 10 * proven < fuzzer.tried:
        note(
            f"{name} changed only {proven} of {fuzzer.tried} graphs: a model of your own has more "
            "of what it looks for, --gt-model=my_models:tiny; --models makes some"
        )
    if is_interrupted:
        return 130
    return 0


def _check_numbers(given: argparse.Namespace) -> None:
    """Refuse numbers with which ``fuzz`` would try nothing."""
    for name in ("minutes", "nodes", "failures"):
        if not getattr(given, name) > 0:  # so that nan is refused, too
            raise UsageError(f"--{name}={getattr(given, name)}: give a number above 0")

    _check_timeout(given.timeout)
    if given.models and given.gt_model is not None:
        raise UsageError("--models and --gt-model: graphs are made from one or the other")
    if given.ranks < 0 or given.ranks == 1:
        raise UsageError(f"--ranks={given.ranks}: give 2 or more, or 0 for graphs of one rank")
    if given.models and given.ranks % 2:
        raise UsageError(
            f"--models --ranks={given.ranks}: give an even number, as layers and experts of these "
            "models are divided among two ranks"
        )


def _check_timeout(seconds: float) -> None:
    """Refuse what is no limit: 0, nan, and inf, for which the system has no timer."""
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout={seconds}: give seconds above 0")


class _Reduce:
    """One run of the command."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        _check_timeout(given.timeout)
        self._output = given.output or given.file.with_suffix(".reduced.fxgraph")
        self._said = 0.0
        try:
            source = given.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{given.file} cannot be read: {error}") from None

        # Of another oracle the smallest graph is another one.
        asked = f"{source} {given.proof} {given.at_least} {given.test}{given.claims or ''}"
        self._digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
        if self._output.is_dir() or not self._output.parent.is_dir():
            raise UsageError(f"--output={self._output} is no file of a folder that exists")

        self._text = self._begin(source)

    def _begin(self, source: str) -> str:
        """Return the text to begin with: that of an earlier run that was cut, else the source's."""
        text = source
        if self._output.exists():
            text = self._output.read_text(encoding="utf-8")
            if f"# note: reduced from {self._digest}" not in text:
                raise UsageError(
                    f"{self._output} exists and was not reduced from {self._given.file} by the "
                    "same pass or command: remove it, or give another --output"
                )

            self._say(f"goes on with {self._output}")

        try:
            with world_of(text):
                return spell(graphtext.parse(text), text)
        except TextError as error:
            raise UsageError(f"{self._given.file}, {error}") from None

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="gtrainer-reduce-") as folder:
            return self._reduce(self._oracle(Path(folder)))

    def _oracle(self, folder: Path) -> Oracle:
        if self._given.proof is not None:
            a_pass = guarded(load_pass(self._given.proof), self._given.timeout, self._say)
            return by_proof(a_pass, self._given.at_least, check_claims(self._given.claims))
        return by_command(self._given.test, folder, self._given.timeout)

    def _reduce(self, judge: Oracle) -> int:
        """Reduce the graph, print what is left, and return the exit status."""
        failure = judge(self._text)
        if failure is None:
            print(
                f"reduce: {self._given.file} does not fail, so there is nothing to reduce",
                file=sys.stderr,
            )
            return 1

        if failure.kind in NOT_JUDGED:
            raise UsageError(f"{self._given.file} cannot be judged: {failure.words}")

        reduction = Reduction(self._text, failure, judge, self._save, self._progress)
        before = self._count(self._text)
        self._save(self._text)
        try:
            reduction.run()
        except KeyboardInterrupt:
            self._say(
                f"interrupted; {self._output} holds the smallest so far. Run it again to go on"
            )
            return 130

        print(reduction.text, end="")
        self._say(f"{before} nodes are {self._count(reduction.text)}, in {self._output}")
        self._say(f"{reduction.failure.kind}: {reduction.failure.words}")
        if reduction.other is not None:
            self._tell_other(*reduction.other)
        return 0

    def _tell_other(self, text: str, failure: Failure) -> None:
        path = self._output.with_suffix(".other.fxgraph")
        write_whole(path, text)
        self._say(f"another graph fails otherwise, with {failure.kind}: it is in {path}")

    def _count(self, text: str) -> int:
        with world_of(text):
            return len(computed(graphtext.parse(text)))

    def _save(self, text: str) -> None:
        """Write the smallest graph so far, at once, so that a run that is cut can go on."""
        note = f"reduced from {self._digest}, {self._given.file.name}"
        name, at_least = "", ""
        if self._given.proof is not None:
            name, at_least = self._given.proof.rpartition(":")[2], self._given.at_least
        write_whole(self._output, pass_file(text, note, name, at_least))

    def _progress(self, line: str) -> None:
        if time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            self._say(line)

    def _say(self, line: str) -> None:
        print(f"reduce: {line}", file=sys.stderr, flush=True)
