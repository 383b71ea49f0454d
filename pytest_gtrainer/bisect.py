"""Find the pass of a pipeline that changes a bit, and the node: on request, and for a comparison
that fails. For a proof that fails, find the pass that makes another function.

The graph is replayed after a prefix of the passes, from the same inputs, random states and buffers.
Halving the passes takes ``log2(passes) + 2`` replays. It finds a pass such that the prefix with it
changes a bit and the prefix without it does not. The graphs before and after that pass then run
once more with the value of every node as a result. The first node of one name whose value differs
is reported, with the new nodes that it is computed from. Results are compared, and what a graph
leaves: its inputs, written attributes, and the states of random generators.

A ``PassWitness`` sees each pipeline that runs, and the inputs of the first replays of its result. A
comparison that differs then bisects each of them. A proof that fails for the result of a pipeline
is made again after prefixes of its passes. On real ranks every rank must come to the same
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
from pytest_gtrainer.facts import Watcher, check_switches, counted
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import (
    AFTERWARDS,
    BACKWARD,
    direction,
    distinct,
    is_collective,
    is_random,
    node_fqn,
    walk,
)
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.numerics.compare import compare_entries
from pytest_gtrainer.numerics.graph_inputs import InputsRefused, try_extremes
from pytest_gtrainer.numerics.graph_run import (
    all_nan,
    copies,
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
from pytest_gtrainer.proofs.filled import FilledGraph, takes_state
from pytest_gtrainer.proofs.proof import Proof, kind_in_words, offer_proof
from pytest_gtrainer.proofs.prove import prove
from pytest_gtrainer.references.replicas import on_any_rank
from pytest_gtrainer.tracing.model import ModelState, local
from pytest_gtrainer.tracing.step import TracedStep

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.simulated.interpreter import RankGraph, RankRandomStates
    from pytest_gtrainer.worlds.simulated.net import Net
    from pytest_gtrainer.worlds.spec import World

MOST_REPLAYS = 8  # of how many replays of a graph the inputs are kept

# Values are by ``Key(0, rank, "", name)``; in a process of one rank that rank is 0.
Values = dict[Key, Tensor]
RunGraph = Callable[[fx.GraphModule], Values]


def flat_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph: ``(model, *batch)`` as its state, then the leaves of the batch.

    Inputs that are flat already stay as they are.
    """
    if not inputs or not isinstance(inputs[0], nn.Module):
        return list(inputs)
    leaves = [*ModelState.of(inputs[0]).tensors, *pytree.tree_leaves(inputs[1:])]
    return [local(leaf) for leaf in leaves]


def local_run(flat: Sequence[Any]) -> RunGraph:
    """Return a function that runs graphs in this process, each from these inputs and the random
    states of now.
    """
    kept, start = copies(flat), GeneratorStates.now()
    return lambda gm: _keyed(run_graph(gm, kept, start).everything)


def run_on_all(
    ranked: Callable[[fx.GraphModule], RankGraph],
    net: Net,
    inputs: Sequence[Any],
    random: RankRandomStates | None = None,
) -> RunGraph:
    """Return a function that runs graphs on all ranks of a simulated world, each from these inputs.

    It runs ``Interpreter(ranked(gm), net, random=random).run(inputs)``.
    """
    from pytest_gtrainer.worlds.simulated.interpreter import Interpreter
    from pytest_gtrainer.worlds.simulated.interpreter.values import of_rank

    kept, start = copies(inputs), random.copy() if random else None

    def run(gm: fx.GraphModule) -> Values:
        given = copies(kept)
        interpreter = Interpreter(ranked(gm), net, random=start.copy() if start else None)
        output = interpreter.run(given)
        values: Values = {}
        for rank in range(net.size):
            random_state = {"torch.cpu": of_rank(interpreter.random.states, rank)}
            found = named_outputs(of_rank(output, rank), gm)
            found |= inputs_afterwards(gm, [of_rank(value, rank) for value in given])
            found |= random_states_afterwards(random_state)
            values |= _keyed(found, rank)
        return values

    return run


def _keyed(values: Mapping[str, Tensor], rank: int = 0) -> Values:
    return {Key(0, rank, "", name): value for name, value in values.items()}


def _is_result(key: Key) -> bool:
    """Return whether a value is a result of the graph, and no state that it leaves."""
    return not key.name.endswith(AFTERWARDS)


@dataclass(frozen=True, slots=True)
class Stage:
    """A graph after a pass: ``name`` is the pass with its options, empty before the first."""

    name: str
    gm: fx.GraphModule


# The first value that differs, as ``node``, ``where`` and ``made`` of a ``Bisection``.
Origin = tuple[Difference | None, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Bisection:
    """The result of a bisection; ``str(bisection)`` is written for a terminal.

    Attributes:
        outcome: "equal" if no pass changes a bit, else "different".
        total: the number of passes.
        number: the place among all, from 1, of the pass that changes a bit.
        name: that pass, with its options.
        verdict: how the results after that pass differ from those before all passes, on this rank.
        node: how the first value differs that both graphs have, or else the first result; None if
            none differs on this rank.
        where: that node in words, with the rank where all ranks are in this process; or the state.
        made: the nodes that it is computed from and that the pass made, in words, in graph order.
        inputs: the inputs on which it changes a bit, in words, if they are not those that were
            given.
        silent: inputs on which every result was NaN: there, no pass could be seen to change a bit.
        nan: results that are nothing but NaN on the given inputs, if others are numbers.
        refuses: the error of the graph after that pass, if it raises and the one before does not.
        every: whether every prefix of the passes was replayed. If not, "equal" says that all of
            them together change no bit.
    """

    outcome: Outcome
    total: int
    number: int = 0
    name: str = ""
    verdict: Verdict | None = None
    node: Difference | None = None
    where: str = ""
    made: tuple[str, ...] = ()
    replays: int = 0
    inputs: str = ""
    silent: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()
    refuses: str = ""
    every: bool = False

    def __str__(self) -> str:
        if self.outcome == "equal":
            text = f"{_spell_equal(self.total, self.every)} ({self.replays} replays)"
            if self.silent:
                text += (
                    f"; every result is NaN on {', '.join(self.silent)}, so nothing could differ "
                    "there"
                )
            if self.nan:
                text += f"; nothing but NaN, so nothing could differ: {', '.join(self.nan)}"
            return text
        on = f", on {self.inputs}" if self.inputs else ""
        lines = [
            f"introduced by pass {self.number} of {self.total}, {self.name} "
            f"({self.replays} replays){on}"
        ]
        if self.refuses:
            return f"{lines[0]}\n  {self.refuses}"
        what, made = "first node whose value differs:", "computed from what the pass made"
        is_state = self.where.endswith(AFTERWARDS)
        if is_state:
            what, made = "every result is equal, but not", "the pass made"
        if self.node is not None:
            place = self.node.place if self.node.kind == "bits" else ""
            lines += [f"  {what} {self.where}{place}", *self.node.sides()]
        elif is_state:
            lines.append(f"  {what} {self.where}, which one of the two graphs alone writes to")
        else:
            lines.append("  no value that both graphs have differs on this rank")
        return "\n".join([*lines, *cut(made, self.made)])


def _spell_equal(total: int, every: bool = False) -> str:
    # Halving has compared the last graph alone: one pass may take back what another did.
    if total > 1 and not every:
        return f"all {total} passes together change no bit"
    return f"no pass of {total} changes a bit"


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
    zero, subnormal and equal elements, and with rows of large negative numbers and of -inf. There
    all NaNs are equal. In one process, integers become as
    large as the graph before the passes takes them. Inputs that share memory share it in each
    replay.

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
        ValueError: under a fake process group, whose collectives move no data; or no passes.
        TypeError: ``traced`` is a graph, which does not know its inputs.
    """
    check_switches(every=every)
    if isinstance(traced, fx.GraphModule):
        raise TypeError(
            "bisect_passes takes what trace_step returns, and was given a GraphModule: give the "
            "TracedStep; two graphs of another tracer are compared by prove or assert_same_values"
        )
    run_on: Callable[[Sequence[Any]], RunGraph]
    stages = [Stage("", traced.gm)]
    bound = all_bound(passes)
    if not bound:
        raise ValueError(
            "bisect_passes was given no pass, so nothing would be compared: give the passes of the "
            "run, of which a filter may have left none"
        )

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


def bisect_stages(stages: Sequence[Stage], run: RunGraph, *, every: bool = False) -> Bisection:
    """Find the pass that changes a bit among finished graphs, the first before all passes."""
    return _PassSearch(stages, run).find(every)


def bisect_extremes(
    stages: Sequence[Stage],
    run_on: Callable[[Sequence[Any]], RunGraph],
    inputs: Sequence[Any],
    *,
    every: bool = False,
) -> Bisection:
    """Bisect on copies of ``inputs`` with extreme values, until one shows a difference.

    All NaNs are equal.
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
        found = search.find(every)
        replays += found.replays
        if found.outcome == "different":
            different.append(replace(found, inputs=description))
        return on_any_rank(not search.is_all_nan)

    silent = tuple(try_extremes(inputs, check))
    if different:
        return replace(different[0], replays=replays)
    return Bisection("equal", len(stages) - 1, silent=silent, replays=replays, every=every)


def bisect_towards(stages: Sequence[Stage], run: RunGraph, expected: Values) -> Bisection | None:
    """Find the pass that comes after the longest prefix which gives ``expected``.

    The outcome is "equal" if all passes together give it. Returns None if no prefix does.

    Args:
        expected: some of the values that a graph gives, or all.
    """
    search, last = _PassSearch(stages, run, expected), len(stages) - 1
    if not search.differs(last):
        return Bisection("equal", last, replays=search.replays)
    for number in range(last - 1, -1, -1):
        if not search.differs(number):
            return search.describe(number + 1)
    return None


class _PassSearch:
    """Replays stages, and compares what they give with what the first gives, or with ``expected``.

    All ranks come to the same answer: one that sees a difference is enough.
    """

    def __init__(
        self, stages: Sequence[Stage], run: RunGraph, expected: Values | None = None
    ) -> None:
        self._stages, self._run, self._is_part = stages, run, expected is not None
        self._verdicts: dict[int, Verdict] = {}
        self._refused: dict[int, str] = {}
        self.replays = 0 if self._is_part else 1
        self._expected = run(stages[0].gm) if expected is None else expected
        self._results = {
            f"{key.rank} {key.name}": value
            for key, value in self._expected.items()
            if _is_result(key)
        }

    @property
    def is_all_nan(self) -> bool:
        """Return whether every result before the passes is NaN, so that nothing could differ."""
        return all_nan(self._results)

    def find(self, every: bool) -> Bisection:
        """Find the first pass that changes a bit, by halving or by replaying ``every`` prefix."""
        last, guilty = len(self._stages) - 1, 0
        if every:
            guilty = next(filter(self.differs, range(1, last + 1)), 0)
        elif last and self.differs(last):
            # Ordered from the longest prefix down, those that differ come before those that do not.
            downwards = range(last - 1, 0, -1)
            different = bisect_left(downwards, True, key=lambda number: not self.differs(number))
            guilty = last - different
        if guilty:
            return self.describe(guilty)
        equal = Bisection("equal", last, replays=self.replays, every=every)
        if self.is_all_nan:
            return replace(equal, silent=("the inputs as they were given",))
        return replace(equal, nan=tuple(only_nan(self._results)))

    def differs(self, number: int) -> bool:
        """Return whether the graph after that many passes gives other bits, on any rank.

        Every rank must call it.
        """
        self.replays += 1
        try:
            values = self._run(self._stages[number].gm)
        except dist.DistError:
            raise  # another rank has ended, or is late
        except Exception as error:
            self._refused[number] = (
                "the graph after the pass refuses the inputs that the graph before it takes: "
                f"{type(error).__name__}: {error}"
            ).partition("\n")[0]
            self._verdicts[number] = Verdict("different", reasons=(self._refused[number],))
            return on_any_rank(True)
        if self._is_part:
            values = {key: value for key, value in values.items() if key in self._expected}
        self._verdicts[number] = verdict = compare_entries(values, self._expected)
        return on_any_rank(verdict.outcome != "equal")

    def describe(self, guilty: int) -> Bisection:
        """Return the pass of that number, with the node at which it changes a bit.

        Every rank must call it.
        """
        last, name = len(self._stages) - 1, self._stages[guilty].name
        before, after = self._stages[guilty - 1].gm, self._stages[guilty].gm
        verdict = self._verdicts[guilty]
        own = self._refused.get(guilty, "")
        if on_any_rank(bool(own)):
            refuses = own or "on another rank the graph after the pass refuses the inputs"
            found = Bisection("different", last, guilty, name, verdict, refuses=refuses)
            return replace(found, replays=self.replays)
        differing = [one.key for one in verdict.differences]
        differing += [*verdict.only_actual, *verdict.only_expected]
        if on_any_rank(any(map(_is_result, differing))):
            origin = _find_node(verdict.first, before, after, self._run)
        else:
            origin = _find_state(verdict.first, differing, before, after)
        replays = self.replays + 2
        return Bisection("different", last, guilty, name, verdict, *origin, replays=replays)


def _find_node(
    result: Difference | None, before: fx.GraphModule, after: fx.GraphModule, run: RunGraph
) -> Origin:
    """Find the first node that both graphs have and whose value differs.

    Without such a node, take the one that gives ``result``, the first result that differs.
    """
    old = {node.name for node in before.graph.nodes}
    kept = {node.name: node for node in after.graph.nodes if node.name in old}
    new = set(after.graph.nodes).difference(kept.values())
    expected, actual = run(_exposed(before)), run(_exposed(after))
    has_ranks = len({key.rank for key in actual}) > 1
    verdict = compare_entries(actual, expected)
    inner = [one for one in verdict.differences if one.key.name in kept]
    if inner:
        result = min(inner, key=lambda one: (kept[one.key.name], one.key.rank))
        node = kept[result.key.name]
        where = _words(node)
    elif result is None:  # it differs on another rank
        return None, "", _made(after.graph.output_node(), new)
    else:
        node, where = after.graph.output_node(), f"the result {result.key.name}"
        names = node.meta.get("gt_outputs") or ()
        given = dict(zip(distinct(names), pytree.tree_leaves(node.args[0]), strict=False))
        if isinstance(given.get(result.key.name), fx.Node):
            node = given[result.key.name]
            where += f" = {_words(node)}"
    if has_ranks:
        where += f" on rank {result.key.rank}"
    return result, where, _made(node, new)


def _find_state(
    state: Difference | None,
    differing: Sequence[Key],
    before: fx.GraphModule,
    after: fx.GraphModule,
) -> Origin:
    """Return the state that differs although all results are equal.

    With it come the new nodes that write in place or draw random numbers.
    """
    if not differing:
        return None, "", ()  # it differs on another rank
    old = {node.name for node in before.graph.nodes}
    made: list[str] = []
    for node in after.graph.nodes:
        if node.name in old or not isinstance(node.target, OpOverload):
            continue
        if schema(node.target).is_mutable or is_random(node):
            made.append(_words(node))
    return state, differing[0].name, tuple(made)


def _exposed(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph whose results are the values of all nodes, by their names."""
    copy = copied_lazily(gm)
    shown = [node for node in copy.graph.nodes if _has_value(node)]
    output = copy.graph.output_node()
    output.args = (tuple(shown),)
    output.meta = {"gt_outputs": tuple(node.name for node in shown)}
    return compiled(copy)


def _has_value(node: fx.Node) -> bool:
    """Return whether a node gives one tensor; that of a launch is there only after its wait."""
    if node.target is getitem:
        return isinstance(node.meta.get("val"), Tensor)
    if not isinstance(node.target, OpOverload) or launches(node.target):
        return False
    return [str(each.type) for each in schema(node.target).returns] == ["Tensor"]


def _made(node: fx.Node, new: set[fx.Node]) -> tuple[str, ...]:
    """Return the new nodes from which ``node`` is computed by way of new nodes alone, in order."""
    made = walk(node.all_input_nodes, attrgetter("all_input_nodes"), new.__contains__)
    return tuple(map(_words, sorted(made)))


def _words(node: fx.Node) -> str:
    pass_ = "backward" if direction(node) == BACKWARD else "forward"
    operator = node.target if isinstance(node.target, (str, OpOverload)) else node.target.__name__
    text = f"{node.name} = {operator} in the {pass_}"
    fqn = node_fqn(node)
    return f"{text} of {fqn}" if fqn else text


@dataclass(slots=True)
class _Pipeline:
    """The graphs between passes, and functions that run them on the inputs of first replays."""

    stages: list[Stage]
    result: fx.GraphModule
    runs: list[RunGraph] = field(default_factory=list)
    # Of the same replays; None on several ranks.
    inputs: list[Sequence[Any] | None] = field(default_factory=list)

    def explain(self, step: int | None, expected: Tensors) -> str:
        """Bisect towards what is ``expected``, if a replay has to give it; else on every replay."""
        wanted: Values = {}
        runs, where = list(zip(self.runs, self.inputs, strict=True)), "bisection"
        if isinstance(expected, Record) and step is not None and step < len(self.runs):
            wanted = results_of_step(expected, step)
            runs, where = runs[step : step + 1], f"bisection of step {step}"
        elif isinstance(expected, dict) and "loss" in expected:  # from ``TracedStep.results``
            names = [name.removeprefix("gradient of ") for name in expected]
            wanted = _keyed(dict(zip(names, expected.values(), strict=True)))
        for run, inputs in runs if wanted else ():
            towards = bisect_towards(self.stages, run, wanted)
            if towards is None:
                continue
            if towards.outcome == "different":
                return f"{where}: {towards}\n{self._kind(towards, inputs)}"
            # The results are as expected. A pass may still have changed an input, or drawn random
            # numbers.
            found = bisect_stages(self.stages, _only_state(run, wanted))
            if found.outcome == "different":
                return f"{where}: {found}\n{self._kind(found, inputs)}"
            return f"{where}: a pipeline of {towards.total} passes gives what is expected"
        return self._explain_replays()

    def _kind(self, found: Bisection, inputs: Sequence[Any] | None) -> str:
        """Return in a line which kind of equal the graphs before and after the pass are."""
        before, after = self.stages[found.number - 1].gm, self.stages[found.number].gm
        call = "prove(after, before), of the graphs that apply_graph_passes(observer=...) gives,"
        if inputs is None or any(map(is_collective, nodes_within(before))):
            return offer_proof(f"{call} with world=")  # other ranks may have other answers
        return kind_in_words(
            lambda: prove(after, before, inputs=inputs), nodes=len(before.graph.nodes), call=call
        )

    def _explain_replays(self) -> str:
        replays, silent = 0, 0
        for number, run in enumerate(self.runs, 1):
            found = bisect_stages(self.stages, run)
            if found.outcome == "different":
                kind = self._kind(found, self.inputs[number - 1])
                return f"bisection{f' of replay {number}' if number > 1 else ''}: {found}\n{kind}"
            replays += found.replays
            silent += bool(found.silent)
        text = f"bisection: {_spell_equal(len(self.stages) - 1)} ({replays} replays)"
        if len(self.runs) > 1:
            text += f", on the inputs of the first {len(self.runs)} replays"
        if silent:
            text += (
                f"; every result is NaN in {silent} of {len(self.runs)} replays, so nothing could "
                "differ there"
            )
        return text


def _only_state(run: RunGraph, known: Values) -> RunGraph:
    """Return a function that runs graphs, and gives the state that they leave, except ``known``."""

    def state(gm: fx.GraphModule) -> Values:
        values = run(gm)
        return {
            key: value for key, value in values.items() if not _is_result(key) and key not in known
        }

    return state


def results_of_step(expected: Record, step: int) -> Values:
    """Return what a graph has to give at a step: losses, gradients before clipping and buffers."""
    values: Values = {}
    for (_, rank, phase, name), tensor in expected.select(step=step).items():
        if phase in ("loss", "gradient", "buffer"):
            place = 0 if expected.rank is not None else rank  # a process of one rank calls it 0
            values[Key(0, place, "", name + AFTERWARDS * (phase == "buffer"))] = tensor
    return values


@dataclass(slots=True)
class PassWitness:
    """Remembers pipelines and their first inputs, and bisects them once a comparison differs."""

    _running: list[Stage] = field(default_factory=list)
    _pipelines: list[_Pipeline] = field(default_factory=list)

    def watchers(self) -> Mapping[str, Watcher]:
        """Return what to hand to ``facts.watching``."""
        return {
            "graph_pass": self._see_pass,
            "graph_passes": self._see_pipeline,
            "replay": lambda gm, inputs: self._keep(gm, lambda: local_run(inputs), inputs),
            "replay_on_all": lambda graph, net, inputs, random: self._keep(
                graph.gm, lambda: run_on_all(graph.with_graph, net, inputs, random)
            ),
            "judged": self._see_judged,
            "unproven": self._see_unproven,
        }

    def _see_pass(self, run: Any, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self._running = [*(self._running or [Stage("", before)]), Stage(run.name, after)]

    def _see_pipeline(self, given: fx.GraphModule, result: fx.GraphModule) -> None:
        stages, self._running = self._running, []
        if not stages:
            return
        # Passes may be applied in several calls: the one that changed a bit may be of an earlier.
        for earlier in reversed(self._pipelines):
            if earlier.result is given:
                stages = [*earlier.stages, *stages[1:]]
                break
        self._pipelines.append(_Pipeline(stages, result))

    def _keep(
        self, gm: fx.GraphModule, run: Callable[[], RunGraph], inputs: Sequence[Any] | None = None
    ) -> None:
        for pipeline in self._pipelines:
            if pipeline.result is gm and len(pipeline.runs) < MOST_REPLAYS:
                pipeline.runs.append(run())
                pipeline.inputs.append(inputs if inputs is None else copies(inputs))

    def _see_judged(self, verdict: Verdict, expected: Tensors, explanations: list[str]) -> None:
        if not on_any_rank(verdict.outcome == "different"):
            return
        # All ranks replay the first step in which one of them differs.
        first = verdict.first.key.step if verdict.first is not None else None
        step = next((step for step in range(MOST_REPLAYS) if on_any_rank(first == step)), None)
        replayed = [pipeline for pipeline in self._pipelines if pipeline.runs]
        explanations += [pipeline.explain(step, expected) for pipeline in replayed]
        if not replayed:
            explanations.append(
                "bisection: no graph was rewritten by apply_graph_passes and replayed before this "
                "comparison"
            )

    def _see_unproven(
        self,
        sides: Sequence[tuple[str, fx.GraphModule, Any]],
        options: Sequence[Any],
        explanations: list[str],
    ) -> None:
        for name, gm, other in sides:
            title = "bisection" if len(sides) == 1 else f"bisection of {name}"
            stages = self._stages_of(gm, other)
            if not stages:
                explanations.append(
                    f"{title}: this test has not seen its passes run, or it is a copy: give what "
                    "apply_graph_passes returned, itself"
                )
                continue
            try:
                is_found, text = _bisect_proofs(stages, other, *options)
            except dist.DistError:
                raise  # another rank has ended, or is late
            except Exception as error:  # the proof that failed is about to be reported
                is_found = False
                text = f"unknown, {type(error).__name__}: {error}".partition("\n")[0]
            explanations.append(f"{title}: {text}")
            if is_found:
                return

    def _stages_of(self, gm: fx.GraphModule, other: Any) -> Sequence[Stage]:
        """Return the stages of a result, those after ``other`` if that is one of them."""
        stages: Sequence[Stage] = []
        for pipeline in self._pipelines:
            if pipeline.result is gm:
                stages = pipeline.stages
        for pipeline in self._pipelines:
            number = len(pipeline.stages)
            is_before = pipeline.result is getattr(other, "gm", other) and number < len(stages)
            if is_before and list(stages[:number]) == pipeline.stages:
                return stages[number - 1 :]
        return stages


def _bisect_proofs(
    stages: Sequence[Stage], other: Any, inputs: Any, world: Any, at_least: str
) -> tuple[bool, str]:
    """Find a pass before which a graph is proven equal to ``other``, and after which it is not.

    On real ranks every rank must call it: a proof is the same on all of them.

    Returns:
        Whether there is one, and it in words.
    """
    proofs: dict[int, Proof] = {}

    def is_apart(number: int) -> bool:
        proofs[number] = prove(
            stages[number].gm, other, inputs=inputs, world=world, at_least=at_least
        )
        return not proofs[number].is_at_least(at_least)

    last = len(stages) - 1
    if is_apart(0):
        kind = proofs[0].kind
        return False, f"no pass of {last}; the graph before the first one is {kind!r} already"
    numbers = range(1, last)
    number = 1 + bisect_left(numbers, True, key=is_apart)
    before, after = stages[number - 1].gm, stages[number].gm
    spent = counted(len(proofs) + 1, "proof")
    text = f"introduced by pass {number} of {last}, {stages[number].name} ({spent}); "
    try:
        own = prove(after, before, inputs=_inputs_of(before, other, inputs), world=world)
    except dist.DistError:
        raise
    except Exception as error:  # the pass is known all the same
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return True, f"{text}how the graph after it differs is unknown, {reason}"
    own = replace(own, assumes=())  # the proof that failed has named them
    return True, f"{text}the graph after it against the one before it:\n{own}"


def _inputs_of(gm: fx.GraphModule, other: Any, inputs: Any) -> Any:
    """Return the inputs of a graph, of those for a proof against ``other``."""
    if isinstance(getattr(other, "gm", other), fx.GraphModule):
        return inputs
    # Dynamo's graph and its model have been given the inputs of the model.
    if takes_state(gm, other, inputs):
        return FilledGraph(gm, other, inputs).inputs_of_graph()
    return inputs
