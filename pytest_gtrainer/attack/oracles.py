"""Judge whether a graph still shows a mistake: by a proof of a pass, or by a command."""

import copy
import importlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts, graphtext
from pytest_gtrainer._torch.process_groups import group_ranks, names_of_live_groups
from pytest_gtrainer.attack.claims import broken_claim
from pytest_gtrainer.attack.extract import inputs_of
from pytest_gtrainer.attack.pairs import cut_to_pairs, find_false_metadata
from pytest_gtrainer.graph.collectives import find_early_read, launches
from pytest_gtrainer.graph.nodes import short_name
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.passes.graph_pass import (
    Pass,
    as_pass,
    lint,
    refusing_written_constants,
    returned,
)
from pytest_gtrainer.proofs.proof import KINDS
from pytest_gtrainer.proofs.prove import prove_at_once
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulate import AnyWorld
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.spec import World, make_spec

_WORLD = re.compile(r"\b(\d+)\b")
_DIMENSION = re.compile(r"(\w+)=(\d+)")
_ERROR = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Failure|Difference|Mismatch|Function)\b")


@dataclass(frozen=True)
class Failure:
    """The way in which a graph fails.

    Attributes:
        kind: a kind of equal, the class of an error, or the exit status of a command with the
            class of the error that it names. Two failures of one kind count as the same.
        words: what a reader is shown.
    """

    kind: str
    words: str


_NO_COMMAND = (126, 127)
"""How a shell says that there is no such command, or that it cannot be run."""

NOT_JUDGED = ("unknown", "not proven")
"""Kinds of failure that say nothing about a pass."""

RAISED = (Exception, SystemExit)
"""What a pass or a graph may raise, and what then counts as its failure.

A pass that calls ``sys.exit(0)`` would else end the command with the status of a success. An
interrupt is not among them: it is the user's.
"""

Oracle = Callable[[str], Failure | None]
"""Takes graph text; None if the graph does not fail."""


@contextmanager
def world_of(text: str) -> Iterator[int]:
    """Enter a fake world of the size and mesh that a text's header names, and yield the size.

    It is 0 for none. A world that is up already is used as it is.
    """
    if dist.is_initialized():
        yield dist.get_world_size()
        return

    fields = header.read(text)
    size = _WORLD.search(fields.get("world", ""))
    mesh = {name: int(extent) for name, extent in _DIMENSION.findall(fields.get("mesh", ""))}
    if size is None and not mesh:
        yield 0
        return

    given: dict[str, Any] = {"mesh": mesh}
    if not mesh:
        assert size is not None
        given = {"size": int(size[1])}

    with fake_world(make_spec("fake", **given)) as world:
        make_mesh(world)
        yield world.size


def load_named(path: str, option: str, example: str) -> Any:
    """Return what ``module:name`` names, as given by an option.

    Args:
        path: the module and the name.
        option: which has this value, for messages.
        example: of a value.

    Raises:
        ValueError: there is no such module or name.
    """
    module, colon, name = path.partition(":")
    if not colon or not name:
        raise ValueError(f"{option}={path}: expected module:name, as {example}")
    # As ``python -m`` does, and an installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{option}={path}: {error}") from None
    except SystemExit as error:
        raise ValueError(
            f"{option}={path}: importing {module} calls sys.exit({error.code!r}): a script needs "
            'if __name__ == "__main__"'
        ) from None

    return found


def load_pass(path: str, option: str = "--proof") -> Pass:
    """Return the pass that ``module:name`` names, as given by a command's option.

    Raises:
        ValueError: there is no such module or name, or it cannot be called.
    """
    found = load_named(path, option, "my_package.passes:my_pass")
    if not callable(found):
        name = path.rpartition(":")[2]
        raise ValueError(f"{option}={path}: {name} is of type {type(found).__name__}, not a pass")
    return as_pass(found)


def check_kind(at_least: str) -> None:
    """Raise a ValueError for what is no kind of equal."""
    if at_least not in KINDS:
        raise ValueError(f"--at-least={at_least}: the kinds are {', '.join(KINDS)}")


def by_proof(a_pass: Pass, at_least: str, claims: Sequence[str] = ()) -> Oracle:
    """Judge a graph by the proof of it before and after a pass.

    Args:
        a_pass: ``(gm, example_inputs) -> gm``; it may also raise, which is a failure of its class.
        at_least: the weakest kind of equal that is right.
        claims: what the pass keeps besides, of ``claims.CLAIMS``.
    """
    check_kind(at_least)

    def judge(text: str) -> Failure | None:
        with world_of(text) as size:
            gm, before = graphtext.parse(text), graphtext.parse(text)
            early = find_early_read(before.graph)
            if early is not None:
                # A reduction may return a launch itself, and the lint would blame the pass for it.
                return Failure(
                    NOT_JUDGED[1], f"{early[1]} reads {early[0]}, which may not be there"
                )
            try:
                with refusing_written_constants(gm, "the pass"):
                    after = returned(a_pass(gm, inputs_of(gm)))
                lint(after.graph, "the pass")
            except RAISED as error:
                return Failure(type(error).__name__, f"the pass raises {_first_line(error)}")

            failure = judge_graphs(after, before, at_least, size)
            return failure or judge_claims(claims, a_pass, after, before)

    return judge


def judge_claims(
    claims: Sequence[str], a_pass: Pass, after: fx.GraphModule, before: fx.GraphModule
) -> Failure | None:
    """Return which claim of a pass does not hold for two versions; None if all do.

    The kind of the failure is the word of the claim. ``after`` may be changed.
    """
    try:
        broken = broken_claim(claims, a_pass, after, before)
    except (ValueError, KeyError) as error:
        return Failure(NOT_JUDGED[1], f"no claim is judged: {_first_line(error)}")
    return Failure(*broken) if broken else None


def judge_graphs(
    after: fx.GraphModule, before: fx.GraphModule, at_least: str, ranks: int
) -> Failure | None:
    """Return how a graph differs from the one before a pass; None if it does not.

    Args:
        at_least: the weakest kind of equal that is right.
        ranks: of the world in which graphs that communicate are proven, 0 without one.
    """
    # A graph that cannot run in a world fails a check there, and is a finding here.
    with facts.failing_checks(lambda error: None):
        failure = None
        if not _differ_in_equal_pairs(after, before, at_least, ranks):
            failure = _judge_whole(after, before, at_least, ranks)
        return failure or _judge_metadata(after, before)


def _judge_metadata(after: fx.GraphModule, before: fx.GraphModule) -> Failure | None:
    """Return which traced value a pass has made untrue; later passes read it, and so does Inductor.

    Values that were untrue before say nothing about the pass.
    """
    try:
        words = find_false_metadata(after, before)
        if not words or find_false_metadata(before, before):
            return None
    except RAISED:
        return None  # it runs on other devices, or in a world that is not up
    return Failure("metadata", words)


def _judge_whole(
    after: fx.GraphModule, before: fx.GraphModule, at_least: str, ranks: int
) -> Failure | None:
    """Return how a graph differs from the one before, by a proof of whole graphs."""
    net = _net_for(before, ranks)
    try:
        # Memory that nobody has written differs from itself: then nothing is known.
        again = fx.GraphModule(before, copy.deepcopy(before.graph))
        proof = prove_at_once(after, before, at_least, world=net)
        if proof.is_at_least(at_least):
            return None

        itself = prove_at_once(again, before, at_least, world=net)
    except RAISED as error:
        return _why_not_run(before, at_least, net, error)

    if not itself.is_at_least(at_least):
        return Failure(NOT_JUDGED[1], f"without the pass it is {itself}")

    if _equal_for_any_draws(after, before, at_least, net):
        return None

    # A search for weaker kinds would say "another function", at twice the time.
    kind = f"not {at_least}"
    if kind not in proof.reason:
        return Failure(proof.kind, str(proof))

    words = f"first {proof.first}"
    if proof.origin:
        words += f"; it begins at {proof.origin}"
    return Failure(kind, words)


def _equal_for_any_draws(
    after: fx.GraphModule, before: fx.GraphModule, at_least: str, net: AnyWorld | None
) -> bool:
    """Return whether two versions that draw alike are equal for any numbers in place of the drawn.

    Drawn numbers are known, so a sum of them in another order rounds otherwise: that is no mistake.
    """
    versions, draws = [], []
    for gm in (after, before):
        version = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        draws.append(_replace_draws_by_inputs(version.graph))
        version.recompile()
        versions.append(version)
    if not draws[0] or draws[0] != draws[1]:
        return False
    try:
        return prove_at_once(versions[0], versions[1], at_least, world=net).is_at_least(at_least)
    except RAISED:
        return False


def _replace_draws_by_inputs(graph: fx.Graph) -> list[str]:
    """Make inputs of drawn tensors; return what was drawn, in order."""
    drawn: list[str] = []
    behind_inputs = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        value = node.meta.get("val")
        # These read nothing of their operand but its layout.
        if short_name(node) not in ("rand_like", "randn_like") or not isinstance(value, Tensor):
            continue
        with graph.inserting_before(behind_inputs):
            made = graph.placeholder(f"drawn_{len(drawn)}")
        made.meta = {"val": value, "gt_input": {"kind": "input", "fqn": made.name}}
        node.replace_all_uses_with(made)
        if node is behind_inputs:
            behind_inputs = node.next
        graph.erase_node(node)
        drawn.append(f"{node.target} {value.dtype} {value.shape} {value.stride()}")
    return drawn


def _net_for(gm: fx.GraphModule, ranks: int) -> AnyWorld | None:
    """Return the world that a graph needs, None if it does not communicate."""
    communicates = any(launches(node.target) for node in nodes_within(gm))
    if not communicates or not ranks:
        return None
    net, extents = NetModel.of_world(ranks), _extents(ranks)
    mesh = {f"dimension{place}": extent for place, extent in enumerate(extents)}
    return World("simulated", ranks, None, 1, mesh, "cpu", "fake", net)


def _extents(size: int) -> list[int]:
    """Return the extents of the mesh that is up, read from its groups: the first varies slowest."""
    by_stride = {}
    for name in names_of_live_groups().values():
        ranks = group_ranks(name)
        if 1 < len(ranks) < size:
            by_stride[ranks[1] - ranks[0]] = len(ranks)
    extents = [by_stride[stride] for stride in sorted(by_stride, reverse=True)]
    return extents if math.prod(extents) == size else [size]


def _differ_in_equal_pairs(
    after: fx.GraphModule, before: fx.GraphModule, at_least: str, ranks: int
) -> bool:
    """Return whether the values in which two versions differ are equal, which is proven sooner.

    Whatever raises here is looked at again by the proof of whole graphs, which says what it is.
    """
    if not before.graph.output_node().all_input_nodes:
        # Without results no value can differ: the proof of whole graphs says so, in words.
        return False

    try:
        for options in ({}, {"only_results": True}, {"is_deeper": True}):
            cut = cut_to_pairs(after, before, **options)
            if cut is None:
                return True
            net = _net_for(cut[1], ranks)
            if prove_at_once(*cut, at_least, world=net, explains=False).is_at_least(at_least):
                return True
    except RAISED:
        pass
    return False


def _why_not_run(before: fx.GraphModule, at_least: str, net: Any, error: BaseException) -> Failure:
    """Return whose fault it is that two graphs cannot be run: the pass's, or nobody's."""
    try:
        again = fx.GraphModule(before, copy.deepcopy(before.graph))
        itself = prove_at_once(again, before, at_least, world=net)
    except RAISED as also:
        return Failure(NOT_JUDGED[1], f"the proof raises {_first_line(also)}")

    if not itself.is_at_least(at_least):
        return Failure(NOT_JUDGED[1], f"without the pass it is {itself}")
    return Failure("cannot run", f"what the pass leaves raises {_first_line(error)}")


def by_command(command: str, folder: Path, seconds: float) -> Oracle:
    """Judge a graph by a command: it fails if the exit status is not 0.

    Args:
        command: for a shell; ``{}`` stands for the file with the graph, which else is the last
            argument.
        folder: for that file.
        seconds: the limit of one run.
    """
    path = folder / "candidate.fxgraph"
    spelled = command if "{}" in command else f"{command} {{}}"

    def judge(text: str) -> Failure | None:
        """Run the command on a graph. Its last line with an error, or its status, is the kind."""
        path.write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            spelled.replace("{}", shlex.quote(str(path))),
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that what the shell has started ends with it
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Failure("timeout", f"no end within {seconds:g} s")

        if process.returncode == 0:
            return None
        if process.returncode in _NO_COMMAND:
            raise ValueError(f"--test={command!r}: {output.strip()}")

        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("E ")] or lines
        named = _ERROR.findall("\n".join(lines))
        kind = f"exit status {process.returncode}"
        if named:
            kind += f", {named[-1].rpartition('.')[2]}"
        if not errors:
            return Failure(kind, kind)
        return Failure(kind, errors[-1].strip())

    return judge


def _first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message}"
