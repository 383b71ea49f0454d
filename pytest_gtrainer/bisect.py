"""Which pass of a pipeline changes a bit, and at which node: on request, and for a comparison that
fails.

The graph is replayed after a prefix of the passes, from the same inputs, random states and buffers.
Halving finds two neighbours, of which the longer alone changes a bit, in ``log2(passes) + 2``
replays. Of the graphs before and after that pass, the first node of one name whose value differs is
reported, with the new nodes that it is computed from. Results are compared, and what a graph
leaves: its inputs, written attributes, and the states of random generators.

A ``PassWitness`` sees each pipeline that runs, and the inputs of the first replays of its result. A
comparison that differs then bisects each of them. On real ranks every rank must come to the same
comparison: they vote, and replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer._torch.graph_modules import compiled, copied_lazily
from pytest_gtrainer._torch.random_states import GeneratorStates
from pytest_gtrainer._torch.values import OpOverload, pytree, schema
from pytest_gtrainer.facts import Watcher
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import BACKWARD, direction, is_random, node_fqn, walked
from pytest_gtrainer.numerics.bits import NoBytes
from pytest_gtrainer.numerics.compare import compare_entries, difference_of
from pytest_gtrainer.numerics.graph_inputs import InputsRefused, copies, try_extremes
from pytest_gtrainer.numerics.graph_run import (
    AFTERWARDS,
    all_nan,
    inputs_afterwards,
    named_outputs,
    only_nan,
    random_states_afterwards,
    run_graph,
    with_one_nan,
)
from pytest_gtrainer.numerics.record import Record, Tensors
from pytest_gtrainer.numerics.verdict import Difference, Key, Outcome, Verdict, cut
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass, all_bound
from pytest_gtrainer.passes.pipeline import apply_graph_passes
from pytest_gtrainer.references.replicas import on_any_rank
from pytest_gtrainer.tracing.model import ModelState, local
from pytest_gtrainer.tracing.step import TracedStep

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.interpreter import RankGraph, RankRandomStates
    from pytest_gtrainer.worlds.simulated.net import Net
    from pytest_gtrainer.worlds.spec import World

MOST_REPLAYS = 8  # of how many replays of a graph the inputs are kept

Values = dict[
    Key, Tensor
]  # by ``Key(0, rank, "", name)``; where a process has one rank only, that is 0
Run = Callable[[fx.GraphModule], Values]


def flat_inputs(inputs: Sequence[Any]) -> list[Any]:
    """The graph's inputs: the state of a model, then the leaves of the batch; flat ones as they
    are.
    """
    if not inputs or not isinstance(inputs[0], nn.Module):
        return list(inputs)
    return [
        local(tensor)
        for tensor in [*ModelState.of(inputs[0]).tensors, *pytree.tree_leaves(inputs[1:])]
    ]


def local_run(flat: Sequence[Any]) -> Run:
    """Runs a graph in this process, from its random states of now."""
    kept, random_states = copies(flat), GeneratorStates.now()

    def run(gm: fx.GraphModule) -> Values:
        return _keyed(run_graph(gm, copies(kept), random_states).everything)

    return run


def run_on_all(
    ranked: Callable[[fx.GraphModule], RankGraph],
    net: Net,
    inputs: Sequence[Any],
    random: RankRandomStates | None = None,
) -> Run:
    """Runs a graph on all ranks of a simulated world as ``Interpreter(ranked(gm), net,
    random=random).run(inputs)``.
    """
    from pytest_gtrainer.worlds.simulated.interpreter import Interpreter
    from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank

    kept, states = copies(inputs), random.copy() if random else None

    def run(gm: fx.GraphModule) -> Values:
        given = copies(kept)
        interpreter = Interpreter(ranked(gm), net, random=states.copy() if states else None)
        output = interpreter.run(given)
        values: Values = {}
        for rank in range(net.size):
            found = named_outputs(of_rank(output, rank), gm)
            found |= inputs_afterwards(gm, [of_rank(value, rank) for value in given])
            found |= random_states_afterwards(
                {"torch.cpu": of_rank(interpreter.random.states, rank)}
            )
            values |= _keyed(found, rank)
        return values

    return run


def _keyed(values: Mapping[str, Tensor], rank: int = 0) -> Values:
    return {Key(0, rank, "", name): value for name, value in values.items()}


def _results_of(values: Values) -> dict[str, Tensor]:
    """The results of all ranks in this process, without the state that the graph leaves."""
    return {
        f"{key.rank} {key.name}": value
        for key, value in values.items()
        if not key.name.endswith(AFTERWARDS)
    }


@dataclass(frozen=True, slots=True)
class Stage:
    """A graph after a pass: ``name`` is the pass with its options, empty before the first."""

    name: str
    gm: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Bisection:
    """What a bisection found; ``str(bisection)`` is written for a terminal."""

    outcome: Outcome  # "equal" if no pass changes a bit, else "different"
    total: int
    number: int = 0  # the pass's place among all, from 1
    name: str = ""  # the pass that changes a bit, with its options
    verdict: Verdict | None = (
        None  # how the results behind that pass differ from those before all passes, on this rank
    )
    node: Difference | None = (
        None  # the first value that both graphs have and that differs here; else the first result
    )
    where: str = ""  # that node in words, with the rank where all ranks are in this process
    made: tuple[
        str, ...
    ] = ()  # the nodes that it is computed from and that the pass made, in words, in graph order
    replays: int = 0
    inputs: str = (
        ""  # the inputs on which it changes a bit, in words, if they are not those that were given
    )
    silent: tuple[
        str, ...
    ] = ()  # inputs on which every result was NaN: there, no pass could be seen to change a bit
    nan: tuple[
        str, ...
    ] = ()  # results that are nothing but NaN on the given inputs, if others are numbers

    def __str__(self) -> str:
        if self.outcome == "equal":
            text = f"no pass of {self.total} changes a bit ({self.replays} replays)"
            if self.silent:
                text += f"; every result is NaN on {', '.join(self.silent)}, so nothing could differ there"
            if self.nan:
                text += f"; nothing but NaN, so nothing could differ: {', '.join(self.nan)}"
            return text
        where = f", on {self.inputs}" if self.inputs else ""
        lines = [
            f"introduced by pass {self.number} of {self.total}, {self.name} ({self.replays} replays){where}"
        ]
        is_state = self.where.endswith(AFTERWARDS)
        made = cut("the pass made" if is_state else "computed from what the pass made", self.made)
        what = "every result is equal, but not" if is_state else "first node whose value differs:"
        if self.node is not None:
            place = self.node.place if self.node.kind == "bits" else ""
            lines += [f"  {what} {self.where}{place}", *self.node.sides()]
        elif is_state:
            lines.append(f"  {what} {self.where}, which one of the two graphs alone writes to")
        else:
            lines.append("  no value that both graphs have differs on this rank")
        return "\n".join([*lines, *made])


def bisect_passes(
    traced: TracedStep,
    passes: Iterable[BoundPass | Pass],
    inputs: Sequence[Any],
    *,
    world: World | None = None,
    meshes: Sequence[DeviceMesh] = (),
    every: bool = False,
) -> Bisection:
    """Find the pass that changes a bit, by replaying the graph after prefixes of ``passes``.

    What a graph leaves counts as its results do: inputs, buffers, states of random generators. If
    no bit differs on ``inputs``, the graph is replayed on copies of them with large, infinite, NaN,
    zero and subnormal elements. There all NaNs are equal. In one process, integers become as large as
    the graph before the passes takes them. Inputs that share memory share it in each replay.

    Args:
        traced: the step before the passes; it is not changed, nor are the inputs.
        passes: as for ``apply_graph_passes``.
        inputs: what the graph is run on, real tensors: ``(model, *batch)`` as for
            ``TracedStep.replay``, or the graph's own flat inputs. In a simulated world a list of
            flat inputs, one for each rank.
        world: the simulated world to run in; on real ranks every rank calls this with its own
            inputs, and all name the same pass.
        meshes: in a simulated world, the meshes whose dimensions the graph's groups are.
        every: replay every prefix instead of halving.

    Raises:
        ValueError: under a fake process group, whose collectives move no data.
    """
    run_on: Callable[[Sequence[Any]], Run]
    stages = [Stage("", traced.gm)]
    bound = all_bound(passes)

    def keep(name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
        stages.append(Stage(str(bound[len(stages) - 1]), after))

    apply_graph_passes(traced.gm, traced.example_inputs, bound, observer=keep, progress=None)
    if world is not None and world.kind == "simulated":
        from pytest_gtrainer.worlds.fake import net_of
        from pytest_gtrainer.worlds.simulated.interpreter import PerRank, RankGraph

        flat: list[Any] = [PerRank(values) for values in zip(*inputs, strict=True)]
        run_on = partial(run_on_all, lambda gm: RankGraph.of(gm, *meshes), net_of(world))
    elif dist.is_initialized() and dist.get_backend() == "fake":
        raise ValueError(
            'a fake world moves no data, so no replay in it means anything: use gt_world("ranks")'
        )
    else:
        flat, run_on = flat_inputs(inputs), local_run
    found = bisect_stages(stages, run_on(flat), every=every)
    if found.outcome == "different":
        return found
    extreme = bisect_extremes(stages, run_on, flat, every=every)
    replays = found.replays + extreme.replays
    return replace(extreme, replays=replays, silent=found.silent + extreme.silent, nan=found.nan)


def bisect_stages(stages: Sequence[Stage], run: Run, *, every: bool = False) -> Bisection:
    """The same for graphs that are there already, the first of them before all passes."""
    return _PassSearch(stages, run).first_difference(every)


def bisect_extremes(
    stages: Sequence[Stage],
    run_on: Callable[[Sequence[Any]], Run],
    inputs: Sequence[Any],
    *,
    every: bool = False,
) -> Bisection:
    """The same on copies of ``inputs`` with extreme values, until one shows a difference; all NaNs
    are equal.
    """
    different: list[Bisection] = []
    replays = 0

    def check(description: str, changed: list[Any]) -> bool:
        nonlocal replays
        if different:
            return True
        run = run_on(changed)
        try:
            search = _PassSearch(stages, lambda gm: with_one_nan(run(gm)))
        except Exception as error:
            raise InputsRefused(f"the graph does not run on {description}: {error}") from error
        found = search.first_difference(every)
        replays += found.replays
        if found.outcome == "different":
            different.append(replace(found, inputs=description))
        return on_any_rank(not search.is_all_nan)

    silent = tuple(try_extremes(inputs, check))
    found = different[0] if different else Bisection("equal", len(stages) - 1, silent=silent)
    return replace(found, replays=replays)


def bisect_towards(stages: Sequence[Stage], run: Run, expected: Values) -> Bisection | None:
    """The pass behind the longest prefix that gives ``expected``, a part of the results; "equal" if
    all passes give it, None if no prefix does.
    """
    search, last = _PassSearch(stages, run, expected), len(stages) - 1
    if not search.differs(last):
        return Bisection("equal", last, replays=search.replays)
    right = next((number for number in range(last - 1, -1, -1) if not search.differs(number)), None)
    return None if right is None else search.found(right + 1)


class _PassSearch:
    """Replays stages, compares with what the first gives, or with a part that is ``expected``; all
    ranks agree.
    """

    def __init__(self, stages: Sequence[Stage], run: Run, expected: Values | None = None) -> None:
        self._stages, self._run, self._part = stages, run, expected is not None
        self.verdicts: dict[int, Verdict] = {}
        self.replays = 0 if self._part else 1
        self._expected = run(stages[0].gm) if expected is None else expected

    @property
    def is_all_nan(self) -> bool:
        """Return whether every result before the passes is NaN, on this process's ranks: then
        nothing could differ.
        """
        return all_nan(_results_of(self._expected))

    def first_difference(self, every: bool) -> Bisection:
        """The first pass that changes a bit, by halving or by replaying every prefix."""
        last = len(self._stages) - 1
        if every:
            guilty = next(filter(self.differs, range(1, last + 1)), 0)
        elif guilty := last if last and self.differs(last) else 0:
            # halving goes from the last pass down to the first: the equal prefixes are behind the
            # different ones
            guilty -= bisect_left(
                range(last - 1, 0, -1), True, key=lambda number: not self.differs(number)
            )
        if guilty:
            return self.found(guilty)
        equal = Bisection("equal", last, replays=self.replays)
        if self.is_all_nan:
            return replace(equal, silent=("the inputs as they were given",))
        return replace(equal, nan=tuple(only_nan(_results_of(self._expected))))

    def differs(self, number: int) -> bool:
        """Return whether the graph behind that many passes gives other bits, on any rank."""
        self.replays += 1
        values = self._run(self._stages[number].gm)
        if self._part:
            values = {key: value for key, value in values.items() if key in self._expected}
        self.verdicts[number] = verdict = compare_entries(values, self._expected)
        return on_any_rank(verdict.outcome != "equal")

    def found(self, guilty: int) -> Bisection:
        """The pass of that number, with the node at which it changes a bit."""
        found = Bisection(
            "different",
            len(self._stages) - 1,
            guilty,
            self._stages[guilty].name,
            self.verdicts[guilty],
        )
        found = _with_node(found, self._stages[guilty - 1].gm, self._stages[guilty].gm, self._run)
        return replace(found, replays=self.replays + 2)


def _with_node(
    found: Bisection, before: fx.GraphModule, after: fx.GraphModule, run: Run
) -> Bisection:
    """The first node that both graphs have and whose value differs; if there is none, what gives
    the first result.
    """
    if not on_any_rank(_results_differ(found.verdict)):
        return _with_state(found, before, after)
    expected, actual = run(_exposed(before)), run(_exposed(after))
    old = {node.name for node in before.graph.nodes}
    kept = {node.name: node for node in after.graph.nodes if node.name in old}
    new, several = (
        set(after.graph.nodes).difference(kept.values()),
        len({key.rank for key in actual}) > 1,
    )
    for key in sorted((key for key in actual if key.name in kept), key=lambda key: kept[key.name]):
        node = kept[key.name]
        try:
            difference = difference_of(key, actual[key], expected[key])
        except (KeyError, NoBytes):
            continue
        if difference is not None:
            where = _words(node) + f" on rank {key.rank}" * several
            return replace(found, node=difference, where=where, made=_made(node, new))
    output, first = (
        after.graph.output_node(),
        found.verdict.first if found.verdict is not None else None,
    )
    if first is None:
        return replace(found, made=_made(output, new))
    gives = dict(
        zip(output.meta.get("gt_outputs") or (), pytree.tree_leaves(output.args[0]), strict=False)
    )
    given = gives.get(first.key.name)
    where = f"the result {first.key.name}" + (
        f" = {_words(given)}" if isinstance(given, fx.Node) else ""
    )
    made = _made(given if isinstance(given, fx.Node) else output, new)
    return replace(
        found, node=first, where=where + f" on rank {first.key.rank}" * several, made=made
    )


def _differing_names(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return []
    differing = [difference.key for difference in verdict.differences]
    return [key.name for key in (*differing, *verdict.only_actual, *verdict.only_expected)]


def _results_differ(verdict: Verdict | None) -> bool:
    return any(not name.endswith(AFTERWARDS) for name in _differing_names(verdict))


def _with_state(found: Bisection, before: fx.GraphModule, after: fx.GraphModule) -> Bisection:
    """The state that differs behind equal results, with new nodes that write in place or draw
    random numbers.
    """
    names = _differing_names(found.verdict)
    if not names or found.verdict is None:
        return found  # it differs on another rank
    old = {node.name for node in before.graph.nodes}
    made: list[str] = []
    for node in after.graph.nodes:
        if node.name in old or not isinstance(node.target, OpOverload):
            continue
        if schema(node.target).is_mutable or is_random(node):
            made.append(_words(node))
    return replace(found, node=found.verdict.first, where=names[0], made=tuple(made))


def _exposed(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with the value of every node as a result, named after it; waited for, where it
    travels.
    """
    copy = copied_lazily(gm)
    shown = [node for node in copy.graph.nodes if _has_value(node)]
    output = copy.graph.output_node()
    output.args = (tuple(shown),)
    output.meta = {"gt_outputs": tuple(node.name for node in shown)}
    return compiled(copy)


def _has_value(node: fx.Node) -> bool:
    if node.target is getitem:
        return isinstance(node.meta.get("val"), Tensor)
    if not isinstance(node.target, OpOverload) or launches(node.target):
        return False
    return [str(each.type) for each in schema(node.target).returns] == ["Tensor"]


def _made(node: fx.Node, new: set[fx.Node]) -> tuple[str, ...]:
    """The new nodes from which ``node`` is computed by way of new nodes alone, in graph order."""
    made = walked(node.all_input_nodes, attrgetter("all_input_nodes"), new.__contains__)
    return tuple(map(_words, sorted(made)))


def _words(node: fx.Node) -> str:
    fqn = node_fqn(node)
    pass_ = "backward" if direction(node) == BACKWARD else "forward"
    operator = node.target if isinstance(node.target, (str, OpOverload)) else node.target.__name__
    return f"{node.name} = {operator} in the {pass_}" + (f" of {fqn}" if fqn else "")


@dataclass(slots=True)
class _Pipeline:
    """The graphs between passes, and how to run them from the inputs of each of the result's first
    replays.
    """

    stages: list[Stage]
    result: fx.GraphModule
    runs: list[Run] = field(default_factory=list)

    def explained(self, step: int | None, expected: Tensors) -> str:
        wanted: Values = {}
        if isinstance(expected, Record) and step is not None and step < len(self.runs):
            wanted, runs, where = (
                _results(expected, step),
                self.runs[step : step + 1],
                f"bisection of step {step}",
            )
        elif (
            isinstance(expected, dict) and "loss" in expected
        ):  # as ``TracedStep.results`` names them
            wanted = {
                Key(0, 0, "", name.removeprefix("gradient of ")): tensor
                for name, tensor in expected.items()
            }
            runs, where = self.runs, "bisection"
        for run in runs if wanted else ():
            towards = bisect_towards(self.stages, run, wanted)
            if towards is None:
                continue
            if towards.outcome == "different":
                return f"{where}: {towards}"
            # The results are as expected. A pass may still have changed an input, or drawn random
            # numbers.
            found = bisect_stages(self.stages, _only_state(run, wanted))
            if found.outcome == "different":
                return f"{where}: {found}"
            return f"{where}: a pipeline of {towards.total} passes gives what is expected"
        replays, only_nan = 0, 0
        for number, run in enumerate(self.runs, 1):
            found = bisect_stages(self.stages, run)
            if found.outcome == "different":
                return f"bisection{f' of replay {number}' if number > 1 else ''}: {found}"
            replays += found.replays
            only_nan += bool(found.silent)
        text = f"bisection: no pass of {len(self.stages) - 1} changes a bit ({replays} replays)"
        if len(self.runs) > 1:
            text += f", on the inputs of the first {len(self.runs)} replays"
        if only_nan:
            text += f"; every result is NaN in {only_nan} of {len(self.runs)} replays, so nothing could differ there"
        return text


def _only_state(run: Run, known: Values) -> Run:
    """Replays that give what a graph leaves, without its results and without what is ``known`` to
    be as expected.
    """

    def state(gm: fx.GraphModule) -> Values:
        values = run(gm)
        return {
            key: value
            for key, value in values.items()
            if key.name.endswith(AFTERWARDS) and key not in known
        }

    return state


def _results(expected: Record, step: int) -> Values:
    """Return what a graph has to give at a step: losses, gradients before clipping and buffers, by
    rank and name.
    """
    values: Values = {}
    for (_, rank, phase, name), tensor in expected.select(step=step).items():
        if phase in ("loss", "gradient", "buffer"):
            place = 0 if expected.rank is not None else rank  # a process of one rank calls it 0
            values[Key(0, place, "", name if phase != "buffer" else f"{name} afterwards")] = tensor
    return values


@dataclass(slots=True)
class PassWitness:
    """Remembers pipelines and their first inputs; tells, once a comparison differs, where it came
    from.
    """

    _running: list[Stage] = field(default_factory=list)
    _pipelines: list[_Pipeline] = field(default_factory=list)

    def watchers(self) -> Mapping[str, Watcher]:
        """Return what to hand to ``facts.watching``."""
        return {
            "graph_pass": self._see_pass,
            "graph_passes": self._see_pipeline,
            "replay": lambda gm, inputs: self._keep(gm, lambda: local_run(inputs)),
            "replay_on_all": lambda graph, net, inputs, random: self._keep(
                graph.gm, lambda: run_on_all(graph.with_graph, net, inputs, random)
            ),
            "judged": self._see_judged,
        }

    def _see_pass(self, run: Any, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self._running = [*(self._running or [Stage("", before)]), Stage(run.name, after)]

    def _see_pipeline(self, given: fx.GraphModule, result: fx.GraphModule) -> None:
        self._pipelines += [_Pipeline(self._running, result)] if self._running else []
        self._running = []

    def _keep(self, gm: fx.GraphModule, run: Callable[[], Run]) -> None:
        for pipeline in self._pipelines:
            if pipeline.result is gm and len(pipeline.runs) < MOST_REPLAYS:
                pipeline.runs.append(run())

    def _see_judged(self, verdict: Verdict, expected: Tensors, explanations: list[str]) -> None:
        if on_any_rank(verdict.outcome == "different"):
            first = verdict.first.key.step if verdict.first is not None else None
            step = next((step for step in range(MOST_REPLAYS) if on_any_rank(first == step)), None)
            replayed = [pipeline for pipeline in self._pipelines if pipeline.runs]
            explanations += [pipeline.explained(step, expected) for pipeline in replayed]
            if not replayed:
                explanations.append(
                    "bisection: no graph was rewritten by apply_graph_passes and replayed before this comparison"
                )
