"""Running a pass file: parse its graph, run the passes, judge what comes out."""

import copy
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
from pytest_gtrainer._torch.random_states import GeneratorStates
from pytest_gtrainer.checks.checker import run_checks
from pytest_gtrainer.checks.subject import Subject
from pytest_gtrainer.checks.syntax import parse_check
from pytest_gtrainer.golden.check import Golden
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.numerics.compare import BitwiseDifference, assert_bitwise_equal, compare
from pytest_gtrainer.numerics.graph_inputs import sample_tensor, try_extremes
from pytest_gtrainer.numerics.graph_run import all_nan, only_nan, run_graph, with_one_nan
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass, as_pass, lint, returned
from pytest_gtrainer.testing.pass_file import PassFile, PassFileError, read_pass_file
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import World, WorldSpec


def run_pass_file(
    path: str | os.PathLike[str],
    *,
    golden: Golden | None = None,
    passes: Mapping[str, Pass] | None = None,
) -> fx.GraphModule:
    """Run the passes of a file on its graph and judge the result by what the file expects.

    Args:
        golden: the fixture ``gt_golden``; needed by files that have no ``# check:`` lines.
        passes: passes by name, beside ours and those that hooks give (``pytest_gtrainer_passes``).

    Returns:
        the rewritten graph.

    Raises:
        PassFileError: the file cannot be read, or expects nothing.
        AssertionError: the result is not what is expected.
    """
    __tracebackhide__ = True
    file = read_pass_file(path)
    if file.golden and golden is None:
        wrong = f"{file.file} has no check and so is compared with a golden"
        raise PassFileError(
            f"{wrong}: give run_pass_file(path, golden=gt_golden), or write `# check:` lines"
        )
    ours = {
        name: getattr(pytest_gtrainer, name)
        for name in pytest_gtrainer.__all__
        if name.endswith("_pass")
    }
    given = {**ours, **extensions.passes(), **(passes or {})}
    known = {
        n: partial(p.function, **p.options) if isinstance(p, BoundPass) else p
        for n, p in given.items()
    }
    for call in file.passes:
        if call.name not in known:
            hint = nearest(call.name, known) or f"; there are {', '.join(sorted(known))}"
            raise PassFileError(f"{call.place}: no pass is called {call.name!r}{hint}")
    with _world_of(file.world):
        return _Run(file, known).judge(golden)


@contextmanager
def _world_of(spec: WorldSpec | None) -> Iterator[None]:
    """The file's world with the groups of its mesh; one that is up already is used if it has the size."""
    if spec is None:
        yield
    elif dist.is_initialized():
        if dist.get_world_size() != spec.size:
            raise PassFileError(
                f"the file's world has {spec.size} ranks, and one of {dist.get_world_size()} is up"
            )
        make_mesh(
            World("fake", spec.size, spec.rank, spec.nodes, spec.mesh, device="cpu", backend="fake")
        )
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


class _Run:
    """One file's graph, before and after its passes."""

    def __init__(self, file: PassFile, known: Mapping[str, Pass]) -> None:
        self._file, self._known = file, known
        self._mesh = file.world.mesh if file.world else None
        try:
            self._before, self._gm = graphtext.parse(file.text), graphtext.parse(file.text)
        except graphtext.TextError as error:
            raise PassFileError(f"{file.file}, {error}") from None
        self._inputs = [
            node.meta.get("val") for node in self._gm.graph.find_nodes(op="placeholder")
        ]

    def _text(self, gm: fx.GraphModule) -> str:
        return graphtext.render(gm, mesh=self._mesh)

    def judge(self, golden: Golden | None) -> fx.GraphModule:
        __tracebackhide__ = True
        file = self._file
        said = None
        try:
            self._run()
        except Exception as error:
            if file.raises is None:
                raise
            said = f"{type(error).__name__}: {error}"
        if file.raises is not None and (said is None or file.raises not in said):
            found = f"but it says\n  {said}" if said is not None else "but none was raised"
            raise AssertionError(
                f"{file.file}: expected an error that says\n  {file.raises}\n{found}"
            )
        if file.result or file.raises is not None:
            names = ", ".join(dict.fromkeys(call.name for call in file.passes))
            self._assert_text(
                self._text(self._before), f"{names} changed the graph, which had to stay as it was"
            )
        if file.values:
            for each in assert_same_values(
                self._gm, self._before, f"{file.file}, after the passes against before"
            ):
                facts.emit(
                    "idle",
                    what=f"{file.file}: every result is NaN on {each}, so these inputs prove nothing",
                )
        if file.checks:
            checks = [parse_check(directive.value, directive.place) for directive in file.checks]
            run_checks(Subject(self._gm, before=self._before, mesh=self._mesh), checks)
        if file.golden and golden is not None:
            golden.check(self._gm, view=file.golden)
        if file.again:
            told = self._text(self._gm)
            self._run()
            self._assert_text(told, "run on their own output, the passes changed it")
        return self._gm

    def _run(self) -> None:
        for call in self._file.passes:
            try:
                self._gm = returned(
                    as_pass(self._known[call.name])(self._gm, self._inputs, **call.options)
                )
                lint(self._gm.graph, call.name)
            except Exception as error:
                error.add_note(f"in {call.name}, of {call.place}")
                raise

    def _assert_text(self, expected: str, what: str) -> None:
        __tracebackhide__ = True
        found = self._text(self._gm)
        if found != expected:
            raise AssertionError(
                f"{self._file.file}: {what}\n{difference('graph', expected, found)}"
            )


def assert_same_values(gm: fx.GraphModule, before: fx.GraphModule, what: str) -> list[str]:
    """Run two graphs on the same inputs from the same random states, and fail unless they do the same bit for bit.

    Compared are results, inputs and attributes as the graphs leave them, and the states of random generators. The
    inputs are normally distributed numbers. Then elements of them are replaced by large, infinite, NaN, zero and
    subnormal numbers; there all NaNs are equal.

    Returns:
        the extreme inputs, in words, on which every result was NaN, so that nothing could differ.

    Raises:
        BitwiseDifference: the graphs differ.
        NothingButNan: a result is NaN in every element on ordinary inputs.
        PassFileError: an input that is no tensor of known sizes.
    """
    __tracebackhide__ = True
    generator = torch.Generator().manual_seed(0)
    inputs = [
        sample(node.meta.get("val"), generator, what)
        for node in before.graph.find_nodes(op="placeholder")
    ]
    start = GeneratorStates.now()
    gm.recompile()  # passes leave that to the end of a pipeline

    def run(
        each: fx.GraphModule, given: Sequence[Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = run_graph(each, copy.deepcopy(given), start)
        # as the file names them, ``output layers.0.w``
        outputs = {
            name if name.startswith("output ") else f"output {name}": value
            for name, value in found.outputs.items()
        }
        return outputs | found.state, outputs

    def check(description: str, changed: list[Any]) -> bool:
        __tracebackhide__ = True
        (mine, _), (expected, outputs) = run(gm, changed), run(before, changed)
        # no `assert_bitwise_equal`: the summary would name results that are not finite, and here they are meant
        verdict = compare(with_one_nan(mine), with_one_nan(expected))
        if verdict.outcome != "equal":
            raise BitwiseDifference(f"{what}, on {description}\n{verdict}", verdict)
        return not all_nan(outputs)

    (mine, _), (expected, outputs) = run(gm, inputs), run(before, inputs)
    assert_bitwise_equal(mine, expected, what=what)
    silent = try_extremes(inputs, check)
    if nan := only_nan(outputs):
        wrong = f"{what}: {', '.join(nan)}: nothing but NaN on normally distributed inputs, where no difference shows"
        raise NothingButNan(f"{wrong}: take a graph that gives numbers, or leave out `# values:`")
    return silent


class NothingButNan(AssertionError):
    """Two graphs are equal on ordinary inputs, and a result is nothing but NaN."""


def sample(value: Any, generator: torch.Generator, what: str) -> torch.Tensor:
    """A real tensor like a graph input, each with values of its own; integers 0 or 1, so that they may be indices."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (None,)
    if not all(type(size) is int for size in sizes):
        raise PassFileError(f"{what}: `# values:` needs inputs that are tensors of known sizes")
    return sample_tensor(value, value.shape, value.stride(), generator)
