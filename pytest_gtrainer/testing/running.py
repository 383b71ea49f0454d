"""Run a pass file: parse its graph, run the passes, and judge the result."""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import pytest_gtrainer
from pytest_gtrainer import extensions, facts, graphtext
from pytest_gtrainer._torch.random_states import GeneratorStates, random_states_kept
from pytest_gtrainer.checks.checker import run_checks
from pytest_gtrainer.checks.subject import Subject
from pytest_gtrainer.checks.syntax import parse_check
from pytest_gtrainer.golden.check import Golden
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.numerics.compare import BitwiseDifference, assert_bitwise_equal, compare
from pytest_gtrainer.numerics.graph_inputs import (
    InputsRefused,
    sample_tensor,
    try_extremes,
)
from pytest_gtrainer.numerics.graph_run import (
    all_nan,
    copies,
    run_graph,
    why_nothing_shows,
    with_one_nan,
)
from pytest_gtrainer.passes.graph_pass import (
    BoundPass,
    Pass,
    as_pass,
    lint,
    refusing_written_constants,
    returned,
)
from pytest_gtrainer.proofs.proof import AnotherFunction
from pytest_gtrainer.proofs.prove import assert_same_function
from pytest_gtrainer.testing.pass_file import PassFile, PassFileError, read_pass_file
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.spec import World, WorldSpec


def run_pass_file(
    path: str | os.PathLike[str],
    *,
    golden: Golden | None = None,
    passes: Mapping[str, Pass] | None = None,
) -> fx.GraphModule:
    """Run the passes of a file on its graph and judge the result by what the file expects.

    Args:
        path: the pass file.
        golden: the fixture ``gt_golden``; needed by files that have no ``# check:`` lines.
        passes: passes by name, besides ours and those of the hook ``pytest_gtrainer_passes``.

    Returns:
        The rewritten graph.

    Raises:
        PassFileError: the file cannot be read, or expects nothing.
        AssertionError: the result is not as expected.
    """
    __tracebackhide__ = True
    file = read_pass_file(path)
    if file.golden and golden is None:
        raise PassFileError(
            f"{file.file} has no check and so is compared with a golden: "
            "give run_pass_file(path, golden=gt_golden), or write `# check:` lines"
        )

    known: dict[str, Pass] = {}
    for name in pytest_gtrainer.__all__:
        if name.endswith("_pass"):
            known[name] = getattr(pytest_gtrainer, name)
    known.update(extensions.passes())
    known.update(passes or {})
    for name, each in known.items():
        if isinstance(each, BoundPass):  # options of a call in the file replace the bound ones
            known[name] = partial(each.function, **each.options)
    for call in file.passes:
        if call.name not in known:
            hint = nearest(call.name, known) or f"; there are {', '.join(sorted(known))}"
            raise PassFileError(f"{call.place}: no pass is called {call.name!r}{hint}")
        try:
            inspect.signature(known[call.name]).bind_partial(**call.options)
        except TypeError as error:
            # Else ``# raises: TypeError`` would hold of a misspelled option.
            raise PassFileError(f"{call.place}: {call.name}: {error}") from None

    with _enter_world(file.world):
        return _PassFileRun(file, known).judge(golden)


@contextmanager
def _enter_world(spec: WorldSpec | None) -> Iterator[None]:
    """Enter the file's world with the groups of its mesh, or use one of its size that is up."""
    if spec is None:
        yield
    elif dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        if size != spec.size:
            raise PassFileError(f"the file's world has {spec.size} ranks, and one of {size} is up")
        if spec.rank and rank != spec.rank:
            raise PassFileError(
                f"the file's world is that of rank {spec.rank}, and that of rank {rank} is up: "
                "give the test the same rank, or no world"
            )
        make_mesh(World("fake", spec.size, spec.rank, spec.nodes, spec.mesh, "cpu", "fake"))
        yield
    else:
        with fake_world(spec) as world:
            facts.emit(
                "world",
                world=world.kind,
                size=world.size,
                device=world.device,
                backend=world.backend,
            )
            make_mesh(world)
            yield


class _PassFileRun:
    """The graph of a pass file, before and after its passes."""

    def __init__(self, file: PassFile, known: Mapping[str, Pass]) -> None:
        self._file, self._known = file, known
        self._running = 0  # place of the pass that runs, or ran last
        self._idle: list[str] = []  # names of the passes that changed nothing
        self._mesh = file.world.mesh if file.world else None
        try:
            self._before, self._gm = graphtext.parse(file.text), graphtext.parse(file.text)
        except graphtext.TextError as error:
            raise PassFileError(f"{file.file}, {error}") from None
        placeholders = self._gm.graph.find_nodes(op="placeholder")
        self._inputs = [node.meta.get("val") for node in placeholders]

    def judge(self, golden: Golden | None) -> fx.GraphModule:
        """Run the passes and check each expectation of the file; return the rewritten graph."""
        __tracebackhide__ = True
        file = self._file
        self._run_to_error()
        # With ``# result:`` or ``# raises:`` the file asks for an unchanged graph.
        if not file.result and file.raises is None:
            for name in self._idle:
                facts.emit("idle", what=f"{file.file}: {name} changed nothing")
        # A pass that raises must leave the graph as it was, too.
        if file.result or file.raises is not None:
            names = ", ".join(dict.fromkeys(call.name for call in file.passes))
            expected = graphtext.render(self._before, mesh=self._mesh)
            self._assert_text(expected, f"{names} changed the graph, which had to stay as it was")

        what = f"{file.file}, after the passes against before"
        if file.values not in ("", "same"):
            self._assert_proof(file.values, what)
        elif file.values:
            for inputs in assert_same_values(self._gm, self._before, what):
                idle = f"every result is NaN on {inputs}, so these inputs prove nothing"
                facts.emit("idle", what=f"{file.file}: {idle}")

        if file.checks:
            checks = [parse_check(directive.value, directive.place) for directive in file.checks]
            run_checks(Subject(self._gm, before=self._before, mesh=self._mesh), checks)
        if file.golden and golden is not None:
            golden.check(self._gm, view=file.golden)
        if file.again:
            expected = graphtext.render(self._gm, mesh=self._mesh)
            self._run()
            self._assert_text(expected, "run on their own output, the passes changed it")
        return self._gm

    def _run_to_error(self) -> None:
        """Run the passes; if the file expects an error, fail unless they raise it."""
        __tracebackhide__ = True
        expected = self._file.raises
        found = "but none was raised"
        try:
            self._run()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if expected is None:
                raise
            if facts.has_words(message, expected):
                self._refuse_passes_left(message)
                return
            found = f"but it says\n  {message}"

        if expected is not None:
            raise facts.FailedCheck(
                f"{self._file.file}: expected an error that says\n  {expected}\n{found}"
            )

    def _refuse_passes_left(self, message: str) -> None:
        """Fail if the pass that raised the expected error is not the last one."""
        __tracebackhide__ = True
        names = [call.name for call in self._file.passes]
        left = names[self._running + 1 :]
        if left:
            raise facts.FailedCheck(
                f"{self._file.file}: {names[self._running]} raised the expected error, so "
                f"{', '.join(left)} did not run: end the passes with the one that raises\n  "
                f"{message}"
            )

    def _run(self) -> None:
        text = graphtext.render(self._gm, mesh=self._mesh)
        self._idle.clear()
        for place, call in enumerate(self._file.passes):
            self._running = place
            before = text
            try:
                a_pass = as_pass(self._known[call.name])
                with refusing_written_constants(self._gm, call.name):
                    self._gm = returned(a_pass(self._gm, self._inputs, **call.options))
                lint(self._gm.graph, call.name)
            except Exception as error:
                error.add_note(f"in {call.name}, of {call.place}")
                raise
            text = graphtext.render(self._gm, mesh=self._mesh)
            if text == before:
                self._idle.append(call.name)

    def _assert_proof(self, at_least: str, what: str) -> None:
        """Fail unless the graphs before and after are equal in a kind, for any numbers."""
        __tracebackhide__ = True
        communicates = any(launches(node.target) for node in nodes_within(self._before))
        net = None
        if communicates and self._file.world is not None:
            net = NetModel.of_world(self._file.world.size)
        try:
            assert_same_function(self._gm, self._before, at_least=at_least, world=net)
        except AnotherFunction as error:
            raise AnotherFunction(f"{what}: {error}", error.proof) from None
        except ValueError as error:
            raise PassFileError(f"{what}: {error}") from None
        except Exception as error:
            inputs = _samples(self._before, what) if net is None else []
            if net is None and (end := _why_it_does_not_run(self._before, inputs)) is not None:
                raise _never_ran(end, what) from None
            if net is not None or _why_it_does_not_run(self._gm, inputs) is None:
                error.add_note(what)
                raise
            raise _runs_no_more(self._gm, inputs, error, what) from None

    def _assert_text(self, expected: str, what: str) -> None:
        __tracebackhide__ = True
        found = graphtext.render(self._gm, mesh=self._mesh)
        if found != expected:
            change = difference("graph", expected, found)
            raise facts.FailedCheck(f"{self._file.file}: {what}\n{change}")


@facts.check
def assert_same_values(
    gm: fx.GraphModule, before: fx.GraphModule, what: str, *, extremes: bool = True
) -> list[str]:
    """Fail unless two graphs do the same bit for bit, on the same inputs and random states.

    Compared are results, inputs and attributes as the graphs leave them, and the states of random
    generators. The inputs are normally distributed numbers. Then elements of them are replaced by
    large, infinite, NaN, zero, subnormal and equal numbers, and rows by large negative ones and
    -inf; there all NaNs are equal. Integers become as large as ``before`` takes them. Without
    ``extremes``, ordinary numbers are all: who has a proof knows the rest.

    Returns:
        The extreme inputs, in words, on which every result was NaN, so that nothing could differ.

    Raises:
        BitwiseDifference: the graphs differ.
        NothingShows: on ordinary inputs a result is NaN in every element, or all are empty.
        PassFileError: an input is not a tensor of known sizes, or ``before`` does not run.
        FailedCheck: ``gm`` does not run; with the node.
    """
    __tracebackhide__ = True
    inputs = _samples(before, what)
    start = GeneratorStates.now()
    # A pass may leave the code of the graph stale: only the end of a pipeline recompiles.
    gm.recompile()

    def run_after(
        given: list[Any], where: str
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        __tracebackhide__ = True
        try:
            return _run_named(gm, given, start)
        except Exception as error:
            raise _runs_no_more(gm, given, error, where) from None

    def check(description: str, changed: list[Any]) -> bool:
        __tracebackhide__ = True
        try:
            outputs, state = _run_named(before, changed, start)
        except Exception as error:
            raise InputsRefused(f"{what}: it does not run on {description}: {error}") from error
        outputs_after, state_after = run_after(changed, f"{what}, on {description}")
        # Not ``assert_bitwise_equal``: it reports results that are not finite, and here they are
        # meant.
        verdict = compare(with_one_nan(outputs_after | state_after), with_one_nan(outputs | state))
        if verdict.outcome != "equal":
            raise BitwiseDifference(f"{what}, on {description}\n{verdict}", verdict)
        return not all_nan(outputs)

    try:
        outputs, state = _run_named(before, inputs, start)
    except Exception as error:
        raise _never_ran(_end_of_run(before, inputs, error), what) from None
    outputs_after, state_after = run_after(inputs, what)
    assert_bitwise_equal(outputs_after | state_after, outputs | state, what=what)
    silent = try_extremes(inputs, check) if extremes else []
    nothing = why_nothing_shows(outputs)
    if nothing:
        raise NothingShows(
            f"{what}: {nothing} on normally distributed inputs, "
            "where no difference shows: take a graph that gives numbers, or leave out `# values:`"
        )
    return silent


def _samples(before: fx.GraphModule, what: str) -> list[Any]:
    """Return a random tensor for each input."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in before.graph.find_nodes(op="placeholder"):
        inputs.append(sample(node.meta.get("val"), generator, what))
    return inputs


def _why_it_does_not_run(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, str] | None:
    """Run a graph node by node; return the node that raises, and its error; None if none does."""
    nodes: list[fx.Node] = []
    try:
        with (
            facts.watching({"node": lambda node, rank: nodes.append(node)}),
            random_states_kept(),
            torch.no_grad(),
        ):
            NodeByNode(gm, None).run(*copies(inputs))
    except Exception as error:
        if not nodes:
            return None
        words = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"node {nodes[-1].name} ({nodes[-1].target})", words
    return None


def _end_of_run(gm: fx.GraphModule, inputs: Sequence[Any], error: Exception) -> tuple[str, str]:
    """Return where a run of a graph ended with an error, and the error in a line."""
    words = f"{type(error).__name__}: {error}".partition("\n")[0]
    return _why_it_does_not_run(gm, inputs) or ("the graph", words)


def _never_ran(end: tuple[str, str], what: str) -> PassFileError:
    where, words = end
    return PassFileError(
        f"{what}: the graph before the passes does not run, {where} raises {words}"
    )


def _runs_no_more(
    gm: fx.GraphModule, inputs: Sequence[Any], error: Exception, what: str
) -> facts.FailedCheck:
    """Return a failure in one sentence, with the node, for a rewritten graph that does not run."""
    where, words = _end_of_run(gm, inputs, error)
    return facts.FailedCheck(
        f"{what}: the graph after the passes does not run, {where} raises {words}"
    )


def _run_named(
    gm: fx.GraphModule, inputs: Sequence[Any], start: GeneratorStates
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run a graph; return its outputs, named as in a file, and the state that it leaves."""
    found = run_graph(gm, inputs, start)
    outputs = {}
    for name, value in found.outputs.items():
        outputs[f"output {name.removeprefix('output ')}"] = value
    return outputs, found.state


class NothingShows(facts.FailedCheck):
    """Two graphs are equal on ordinary inputs, but a result is all NaN, or all are empty."""


def sample(value: Any, generator: torch.Generator, what: str) -> torch.Tensor:
    """Return a random tensor like a graph input; integers are 0 or 1, as they may be indices."""
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or any(type(size) is not int for size in (*value.shape, *value.stride())):
        raise PassFileError(f"{what}: `# values:` needs inputs that are tensors of known sizes")
    return sample_tensor(value, value.shape, value.stride(), generator)
