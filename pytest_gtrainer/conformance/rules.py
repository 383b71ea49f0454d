"""The rules, each with its sentence, the graphs and the world that it needs, and the function that judges it.

A judge raises ``AssertionError`` where the rule is broken, and ``Nothing`` where the rule could not have failed.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import pstats
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.fake_groups import fake_group_beside
from pytest_gtrainer.conformance.adapter import Adapter
from pytest_gtrainer.conformance.recipes import LINEARS, Recipe, graph_of, mesh_of
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graph.bucket_plan import Plan
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, fsdp_reduce_scatters, group_of, kind_of, wait_of
from pytest_gtrainer.graph.layout import Payload, assert_same_layout, bucket_layout
from pytest_gtrainer.graph.nodes import BACKWARD, FORWARD, direction, is_collective, is_wait, node_fqn
from pytest_gtrainer.graph.packing import ACTIVATION, computes, packed
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.graph_pass import BoundPass, bind_options, lint
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.eager import eager_bucket_layout, shard_eagerly
from pytest_gtrainer.references.parity import VacuousCheck, assert_parity
from pytest_gtrainer.testing.running import assert_same_values

World = tuple[str, dict[str, Any]]
FAKE: World = ("fake", {"size": 4, "rank": 1})
DENSE, ODD, TIED = Recipe(), Recipe(dim=10), Recipe(tied=True)
HYBRID = Recipe(mesh=(("replicate", 2), ("fsdp", 2)))
BESIDE = Recipe(mesh=(("fsdp", 2), ("tp", 2)))
MIXED, AGAIN = Recipe(mixed=True), Recipe(gathers_again=True)


EXAMPLES, MOST_RUNS = 20, 30
"""Generated models a run, and how many there are with those that shrink what fails."""


class Nothing(Exception):
    """The rule says nothing of this pass on this graph."""


class Raised(Exception):
    """The pass itself raised."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a pass: the graph that it was given, and its result. Both are the judge's own."""

    adapter: Adapter
    recipe: Recipe
    before: fx.GraphModule
    after: fx.GraphModule

    @classmethod
    def of(cls, adapter: Adapter, recipe: Recipe) -> Run:
        return cls(adapter, recipe, graph_of(recipe), run_pass(adapter, graph_of(recipe), recipe))

    @property
    def merged(self) -> list[Payload]:
        """The payloads with several parameters.

        Raises:
            Nothing: there are none.
        """
        found = [payload for payload in bucket_layout(self.after).payloads if len(payload.slots) > 1]
        if not found:
            raise Nothing("it merges no collectives of parameters")
        return found


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its id in ``docs/behaviours.txt`` or a word, what it says, and how it is judged.

    ``graphs`` are recipes from small to large; a judge that takes the fixtures runs once, in ``world``.
    """

    id: str
    says: str
    kinds: tuple[str, ...]
    graphs: tuple[Recipe, ...]
    world: World
    judge: Callable[..., None]


RULES: dict[str, Rule] = {}
BOTH, BUCKETING = ("any", "bucketing"), ("bucketing",)


def rule(id: str, says: str, kinds: tuple[str, ...], *graphs: Recipe, world: World = FAKE) -> Callable[[Any], Any]:
    """Register a judge."""

    def register(judge: Any) -> Any:
        RULES[id] = Rule(id, says, kinds, graphs, world, judge)
        return judge

    return register


def judge(rule: Rule, adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Judge a rule in the running test, and tell the table."""
    __tracebackhide__ = True

    def tell(result: str, why: str = "", graph: object = "") -> None:
        of = {"pass": adapter.name, "rule": rule.id, "says": rule.says}
        facts.emit("conformance", **of, result=result, why=why.strip().partition("\n")[0], graph=str(graph))

    if (reason := adapter.unclaimed(rule.id)) is not None:
        tell("not claimed", reason)
        pytest.skip(f"not claimed: {reason}")
    silent = []
    for recipe in rule.graphs or (DENSE,):
        try:
            if not rule.graphs:
                rule.judge(adapter, request)
            else:
                run = Run.of(adapter, recipe)
                if rule.id != "D1" and render(run.before) == render(run.after):
                    raise Nothing("it changes nothing")
                rule.judge(run)
        except Nothing as error:
            silent.append(f"{recipe}: {error}")
        except Exception as error:
            is_told = isinstance(error, AssertionError | Raised)
            why = str(error) if is_told else f"the graph cannot be judged: {type(error).__name__}: {error}"
            tell("broken" if isinstance(error, AssertionError) else "error", why, recipe)
            kept = _keep(rule, adapter, recipe, request) if rule.graphs else ""
            cause = error.__cause__ if is_told else error
            raise AssertionError(f"{rule.id} ({rule.says}), on {recipe}:\n{why}\n{kept}") from cause
    if len(silent) == len(rule.graphs or (DENSE,)):
        tell("proves nothing", silent[0].partition(": ")[2])
        if adapter.strict:
            raise AssertionError(f"{rule.id} ({rule.says}) proves nothing: {silent[0]}")
        pytest.skip(f"proves nothing: {silent[0]}")
    tell("held")


def _keep(rule: Rule, adapter: Adapter, recipe: Recipe, request: pytest.FixtureRequest) -> str:
    """Keep the graph that broke a rule as a pass file; a sentence that says where."""
    path = request.getfixturevalue("gt_artifacts") / f"{adapter.name}-{rule.id}.fxgraph"
    plan = f"(bucket_plan={recipe.plan})" if adapter.takes_plan and adapter.call is None else ""
    mesh = ", ".join(f"{name}={extent}" for name, extent in recipe.mesh)
    head = [f"# {rule.id}: {rule.says}", f"# world: fake {recipe.size}, rank 1", f"# mesh: {mesh}"]
    head += [f"# passes: {adapter.name}{plan}", "# values: same", ""]
    path.write_text("\n".join(head) + render(graph_of(recipe), mesh=dict(recipe.mesh)), encoding="utf-8")
    return f"The graph that it was given is kept as a pass file: {path}"


def run_pass(adapter: Adapter, gm: fx.GraphModule, recipe: Recipe, plan: Any = None) -> fx.GraphModule:
    """The pass's result; what it raises is ``Raised``."""
    try:
        return adapter.run(gm, recipe.plan if plan is None else plan)
    except Exception as error:
        first = (str(error).strip() or "no message").partition("\n")[0]
        raise Raised(f"{adapter.name} raised {type(error).__name__}: {first}") from error


# --- any pass ---------------------------------------------------------------------------------


@rule("E6", "the result is topologically valid and lints", BOTH, DENSE, ODD, TIED, BESIDE, HYBRID, AGAIN, MIXED)
def is_valid(run: Run) -> None:
    try:
        lint(run.after.graph, run.adapter.name)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


@rule("E7", "running a pass on its own output changes nothing", BOTH, DENSE, ODD, BESIDE)
def is_idempotent(run: Run) -> None:
    once = render(run.after)
    twice = render(run_pass(run.adapter, run.after, run.recipe))
    if twice != once:
        raise AssertionError(f"the second run changes the graph\n{difference('graph', once, twice)}")


@rule("D11", "a pass that cannot finish raises and leaves the graph as it was", BOTH)
def leaves_what_it_refuses(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    if not adapter.takes_plan:
        raise Nothing("it is given no plan that could name a module which is not there")
    gm = graph_of(DENSE)
    text = render(gm)
    try:
        adapter.run(gm, [*DENSE.plan, "no.such.module"])
    except Exception:
        if render(gm) != text:
            told = difference("graph", text, render(gm))
            raise AssertionError(f"it refused a plan and left the graph half rewritten\n{told}") from None
        return
    raise AssertionError("a plan that names 'no.such.module', which the model does not have, was taken in silence")


@rule("D9", "every output has the bits of before, where reductions do not move", BOTH, DENSE, ODD, TIED, HYBRID, AGAIN)
def keeps_values(run: Run) -> None:
    """In a fake world an all-gather repeats the shard and a reduction leaves it, so payloads add alike."""
    try:
        assert_same_values(run.after, run.before, f"after {run.adapter.name} against before")
    except (RuntimeError, TypeError, ValueError) as error:
        raise AssertionError(f"the result does not run: {type(error).__name__}: {error}") from None


@rule("metadata", "what a pass leaves keeps module and direction; what it makes has a value", BOTH, DENSE, AGAIN)
def keeps_metadata(run: Run) -> None:
    told = {node.name: (node_fqn(node), direction(node)) for node in run.before.graph.nodes}
    for node in run.after.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise AssertionError(f'{node} = {node.target} has no meta["val"]')
        if node.name in told and told[node.name] != (node_fqn(node), direction(node)):
            was, now = " ".join(told[node.name]), f"{node_fqn(node)} {direction(node)}"
            raise AssertionError(f"{node} was of {was} and is of {now}")


@rule("ranks", "the graph is the same on every rank that holds as much", BOTH, DENSE, TIED)
def is_same_on_ranks(run: Run) -> None:
    mesh = dict(run.recipe.mesh)  # by which groups are named
    here = render(run.after, mesh=mesh)
    for rank in (0, run.recipe.size - 1):
        with fake_group_beside(rank, run.recipe.size):
            there = render(Run.of(run.adapter, run.recipe).after, mesh=mesh)
        if there != here:
            told = difference("graph", here, there)
            raise AssertionError(f"rank {rank} has another graph than rank {dist.get_rank()}\n{told}")


@rule("growth", "linear in nodes: 4 times the layers cost at most 5 times the calls", BOTH)
def is_linear(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    calls = []
    for layers in (4, 16):
        recipe = replace(DENSE, layers=layers)
        gm, profile = graph_of(recipe), cProfile.Profile()
        run_pass(adapter, graph_of(recipe), recipe)  # what is made once
        gc.disable()
        try:
            profile.enable()
            after = run_pass(adapter, gm, recipe)
            profile.disable()
        finally:
            gc.enable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    if render(after) == render(graph_of(recipe)):
        raise Nothing("it changes nothing")
    if calls[1] > 5 * calls[0]:
        raise AssertionError(f"{calls[0]} calls for 4 layers, {calls[1]} for 16: {calls[1] / calls[0]:.1f} times")


@rule("generated", "E6, D9 and D17 on generated models, shrunk to the smallest that breaks one", BOTH)
def holds_on_generated(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    """Orders of registration and execution, biases, ties, odd extents, dtypes and meshes, by hypothesis."""
    try:
        import hypothesis
        from hypothesis import Verbosity, strategies
    except ImportError:
        raise Nothing("it needs hypothesis: pip install 'pytest-gtrainer[conformance]'") from None
    recipes = strategies.builds(
        Recipe,
        layers=strategies.integers(1, 2),
        dim=strategies.sampled_from((4, 6, 10)),
        registered=strategies.permutations(LINEARS).map(tuple),
        executed=strategies.permutations(LINEARS).map(tuple),
        bias=strategies.sets(strategies.sampled_from(LINEARS)).map(lambda names: tuple(sorted(names))),
        tied=strategies.booleans(),
        reduced=strategies.sampled_from((torch.float32, torch.bfloat16, None)),
        mesh=strategies.sampled_from((DENSE.mesh, HYBRID.mesh, BESIDE.mesh)),
        gathers_again=strategies.booleans(),
    )
    judges = (is_valid, keeps_values, can_be_read) if adapter.kind == "bucketing" else (is_valid, keeps_values)
    told: dict[Recipe, str] = {}
    changed = False

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, verbosity=Verbosity.quiet
    )
    @hypothesis.given(recipes)
    def hold(recipe: Recipe) -> None:
        nonlocal changed
        if recipe not in told and len(told) < MOST_RUNS:
            try:
                run = Run.of(adapter, recipe)
                changed |= render(run.before) != render(run.after)
                for judge in judges:
                    judge(run)
                told[recipe] = ""
            except (AssertionError, Raised) as error:
                told[recipe] = str(error).strip()
        assert not told.get(recipe)

    try:
        hold()
    except AssertionError:
        recipe, why = [pair for pair in told.items() if pair[1]][-1]
        raise AssertionError(f"{why}\nthe smallest model: {recipe}") from None
    if not changed:
        raise Nothing("it changes nothing")


# --- bucketing --------------------------------------------------------------------------------


@rule("D17", "every parameter's place in its payload can be read", BUCKETING, DENSE, ODD, TIED, HYBRID, BESIDE, AGAIN)
def can_be_read(run: Run) -> None:
    def held(gm: fx.GraphModule) -> set[str]:
        return {
            f"{payload.collective} of {slot.parameter} in {way}, {slot.nbytes} bytes a rank"
            for payload in bucket_layout(gm).payloads
            for slot in payload.slots
            for way in payload.directions
        }

    try:
        before, after = held(run.before), held(run.after)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    for told in sorted(before - after):
        raise AssertionError(f"it is gone: {told}")
    for told in sorted(after - before):
        raise AssertionError(f"it was not there before: {told}")


@rule(
    "D1", "one collective a bucket, direction, group, reduction and dtype", BUCKETING, DENSE, TIED, HYBRID, AGAIN, MIXED
)
def merges_each_bucket(run: Run) -> None:
    plan, expected = Plan(run.recipe.plan), dict[Any, list[str]]()
    for kind, members in (("all_gather", fsdp_all_gathers), ("reduce_scatter", fsdp_reduce_scatters)):
        for member in members(run.before):
            bucket = plan.bucket_of(member.parameter)
            label = bucket.label if bucket else "the root"
            expected.setdefault((kind, member.direction, label, member.signature), []).append(member.parameter)
    if all(len(parameters) == 1 for parameters in expected.values()):
        raise Nothing("no bucket has two members")
    found = [(payload.collective, set(payload.parameters), payload) for payload in bucket_layout(run.after).payloads]
    for (kind, way, label, _), parameters in expected.items():
        parts = [
            held
            for each, held, payload in found
            if each == kind and held & set(parameters) and way in payload.directions
        ]
        if parts != [set(parameters)]:
            told = "; ".join(", ".join(sorted(part)) for part in parts) or "none"
            raise AssertionError(
                f"bucket {label!r}, {kind} in {way}: expected one of {', '.join(parameters)}, found {len(parts)}, "
                f"{told}"
            )


@rule("D2", "payloads are in FSDP2's managed order, never the order of the graph", BUCKETING, DENSE, ODD, TIED, HYBRID)
def packs_in_managed_order(run: Run) -> None:
    managed = run.before.graph.output_node().meta["gt_managed_order"]
    place = {fqn: at for at, fqn in enumerate(managed)}
    executed = [member.parameter for member in fsdp_all_gathers(run.before)]
    could_fail = False
    for payload in run.merged:
        order = sorted(payload.parameters, key=lambda fqn: place[fqn])
        could_fail |= order != sorted(payload.parameters, key=executed.index)
        for packed_one, expected in zip(payload.parameters, order, strict=True):
            if packed_one != expected:
                raise AssertionError(
                    f"bucket {payload.label!r}, {payload.collective}: {packed_one} stands where FSDP2 packs "
                    f"{expected}; packed are {', '.join(payload.parameters)}"
                )
    if not could_fail:
        raise Nothing("in each payload the order of the graph is FSDP2's, too")


@rule("D4", "payloads are those of eager fully_shard, to the byte", BUCKETING, DENSE, ODD, TIED, HYBRID)
def packs_as_eager(run: Run) -> None:
    run.merged  # noqa: B018 - it raises Nothing
    config = run.recipe.config(mesh_of(run.recipe))
    eager = new_model(config)
    shard_eagerly(eager, config)
    config.step(eager, *config.batch(0, 1)).backward()
    assert_same_layout(bucket_layout(run.after), eager_bucket_layout(eager))


@rule("D6", "collectives of other parallelism stay as they are", BUCKETING, BESIDE)
def leaves_other_collectives(run: Run) -> None:
    tp = mesh_of(run.recipe).get_group("tp").group_name

    def of_tp(gm: fx.GraphModule) -> Counter[str]:
        nodes = [node for node in gm.graph.nodes if is_collective(node) and group_of(node) == tp]
        return Counter(f"{kind_of(node)} of {list(node.meta['val'].shape)} over tp" for node in nodes)

    run.merged  # noqa: B018 - it raises Nothing
    before, after = of_tp(run.before), of_tp(run.after)
    for told in (before - after) + (after - before):
        raise AssertionError(f"{told}: {before[told]} before the pass, {after[told]} behind it")


@rule("D7", "members that differ in dtype are never merged", BUCKETING, MIXED)
def keeps_dtypes_apart(run: Run) -> None:
    dtypes = {
        (payload.collective, slot.parameter): payload.dtype
        for payload in bucket_layout(run.before).payloads
        for slot in payload.slots
    }
    for payload in run.merged:
        for parameter in payload.parameters:
            if dtypes[payload.collective, parameter] is not payload.dtype:
                was = dtypes[payload.collective, parameter]
                raise AssertionError(
                    f"bucket {payload.label!r}, {payload.collective}: {parameter} travelled as {was}, now as "
                    f"{payload.dtype}"
                )


@rule("D8", 'every node of a bucket carries meta["fsdp_bucket"]', BUCKETING, DENSE)
def marks_its_nodes(run: Run) -> None:
    run.merged  # noqa: B018 - it raises Nothing
    known = {node.name for node in run.before.graph.nodes}
    for node in run.after.graph.nodes:
        if node.name not in known and is_collective(node) and "fsdp_bucket" not in node.meta:
            raise AssertionError(f'{node}, a {kind_of(node)}, has no meta["fsdp_bucket"]')


@rule("D13", "what a member leaves has the strides of before", BUCKETING, DENSE, ODD, HYBRID)
def keeps_strides(run: Run) -> None:
    """A strided view in the place of a contiguous tensor changes the bits of a later sum."""

    def operands(gm: fx.GraphModule) -> dict[str, list[tuple[int, ...]]]:
        nodes = [node for node in gm.graph.nodes if node.op == "call_function" and computes(node) and not is_wait(node)]
        return {
            node.name: [
                each.meta["val"].stride() for each in node.all_input_nodes if hasattr(each.meta.get("val"), "stride")
            ]
            for node in nodes
            if not is_collective(node)
        }

    run.merged  # noqa: B018 - it raises Nothing
    before, after = operands(run.before), operands(run.after)
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            raise AssertionError(f"{name} reads operands of strides {after[name]}, before the pass {before[name]}")


def _spans(gm: fx.GraphModule, kind: str, way: str) -> list[tuple[str, int, int]]:
    """The collectives of a kind and direction that are not for activations: name, place of launch, place of wait."""
    place, sent = {node: at for at, node in enumerate(gm.graph.nodes)}, packed(gm)
    found = [node for node in place if is_collective(node) and kind_of(node) == kind and direction(node) == way]
    if kind == "all_gather":
        found = [node for node in found if ACTIVATION not in sent.get(node, ())]
    return [(node.name, place[node], place[wait_of(node)]) for node in found]


@rule("E1", "the next all-gather of the forward is launched before this one is waited for", BUCKETING, DENSE, HYBRID)
def prefetches(run: Run) -> None:
    run.merged  # noqa: B018 - it raises Nothing
    spans = _spans(run.after, "all_gather", FORWARD)
    for (name, _, wait), (later, launch, _) in itertools.pairwise(spans):
        if launch > wait:
            raise AssertionError(f"{later} is launched behind the wait of {name}: the gather of a bucket hides nothing")


@rule("E2", "a reduce-scatter is waited for behind the launch of the next one", BUCKETING, DENSE, HYBRID)
def waits_late(run: Run) -> None:
    run.merged  # noqa: B018 - it raises Nothing
    spans = _spans(run.after, "reduce_scatter", BACKWARD)
    for (name, _, wait), (later, launch, _) in itertools.pairwise(spans):
        if wait < launch:
            raise AssertionError(f"{name} is waited for before {later} is launched: nothing runs beside it")


@rule("E4", "only collective chains move", BUCKETING, DENSE, AGAIN)
def moves_no_compute(run: Run) -> None:
    moving = {
        node.name
        for member in (*fsdp_all_gathers(run.before), *fsdp_reduce_scatters(run.before))
        for node in (member.launch, member.wait, *member.chain)
    }
    left = {node.name for node in run.after.graph.nodes}
    before = [node.name for node in run.before.graph.nodes if node.name in left - moving]
    known = set(before)
    after = [node.name for node in run.after.graph.nodes if node.name in known]
    for was, now in zip(before, after, strict=True):
        if was != now:
            raise AssertionError(f"{now} runs where {was} ran: compute has moved")


@rule(
    "bits", "on real ranks gradients and weights have eager fully_shard's bits", BUCKETING, world=("ranks", {"size": 3})
)
def has_eagers_bits(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    _trains_as_eager(adapter, request, Recipe(mesh=(("fsdp", 3),), dim=9, bias=("w1", "w2"), reduced=None))


@rule(
    "nodes",
    "on two simulated nodes, too, where the order of a payload shows",
    BUCKETING,
    world=("simulated", {"size": 4, "nodes": 2}),
)
def has_eagers_bits_on_nodes(adapter: Adapter, request: pytest.FixtureRequest) -> None:
    _trains_as_eager(adapter, request, Recipe(reduced=torch.bfloat16))


def _trains_as_eager(adapter: Adapter, request: pytest.FixtureRequest, recipe: Recipe) -> None:
    """Both sides train for two steps; the control packs backwards and must differ."""

    def run_it(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        return run_pass(adapter, gm, recipe)

    passes = [bind_options(canonicalize_graph_pass), BoundPass(adapter.name, (), run_it, {})]
    world = request.getfixturevalue("gt_world")
    try:
        assert_parity(recipe.config, world, passes=passes)
    except VacuousCheck as error:
        raise Nothing(str(error)) from None
