"""The rules: each with its sentence, its graphs and its world, and the function that judges it."""

import cProfile
import itertools
import json
import os
import pickle
import pstats
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.fake_groups import fake_group_beside, new_group_names
from pytest_gtrainer._torch.modes import MODES, spell_mode
from pytest_gtrainer._torch.passes import ALL_TO_ALL
from pytest_gtrainer._torch.process_groups import group_ranks, plain_reduction
from pytest_gtrainer._torch.random_states import random_state
from pytest_gtrainer._torch.values import pytree, strides_that_count
from pytest_gtrainer.attack.deadlock import Calls, calls_of, find_luck, find_waits
from pytest_gtrainer.attack.queues import Schedule
from pytest_gtrainer.bisect import run_on_all
from pytest_gtrainer.conformance.judging import (
    IN_PLACE,
    KINDS,
    MERGING,
    Nothing,
    PassRun,
    Raised,
    Refused,
    adapter_at,
    as_given,
    rule,
)
from pytest_gtrainer.conformance.recipes import (
    LINEARS,
    PREFIXES,
    VOCABULARY,
    OwnRecipe,
    Recipe,
    graph_of,
    mesh_of,
    step,
)
from pytest_gtrainer.environment import collector_off
from pytest_gtrainer.facts import counted
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graph.bucket_plan import Plan
from pytest_gtrainer.graph.collectives import (
    fsdp_all_gathers,
    fsdp_reduce_scatters,
    group_of,
    kind_of,
    launches,
    reduction_of,
    wait_of,
)
from pytest_gtrainer.graph.layout import assert_same_layout, bucket_layout
from pytest_gtrainer.graph.memory import peak_memory
from pytest_gtrainer.graph.nodes import (
    BACKWARD,
    FORWARD,
    direction,
    is_collective,
    is_random,
    node_fqn,
)
from pytest_gtrainer.graph.packing import ACTIVATION, computes, read_sent_states
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.compare import assert_bitwise_equal, compare_entries
from pytest_gtrainer.numerics.graph_inputs import sample_tensor
from pytest_gtrainer.numerics.knobs import NOT_LOADED
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.passes.graph_pass import BoundPass, bind_options, lint
from pytest_gtrainer.proofs.prove import prove
from pytest_gtrainer.references.chunked import eager_chunked
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.eager import eager_bucket_layout, shard_eagerly
from pytest_gtrainer.references.parity import assert_parity
from pytest_gtrainer.report.timeline import CostModel, timeline
from pytest_gtrainer.testing.running import NothingShows, assert_same_values, sample
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.interpreter import PerRank, RankGraph
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.spec import World, WorldSpec

ANY, JOINT, CANONICAL, DEDUPLICATION = (
    ("any",),
    ("bucketing",),
    ("canonicalisation",),
    ("deduplication",),
)
AGAINST_MEMORY, REASSIGNMENT, DDP, CHUNKING = (
    ("remat", "memory_policy"),
    ("reassignment",),
    ("ddp",),
    ("chunking",),
)
DENSE, ODD, TIED = Recipe(), Recipe(dim=10), Recipe(tied=True)
HYBRID = Recipe(mesh=(("replicate", 2), ("fsdp", 2)))
WITH_TP = Recipe(mesh=(("fsdp", 2), ("tp", 2)))
MIXED, AGAIN, MOE = Recipe(mixed=True), Recipe(gathers_again=True), Recipe(moe=True, batch=4)
DEEP = Recipe(layers=4)
ORDERS = (DENSE, ODD, TIED, HYBRID, MOE)
EXAMPLES = 20  # generated models of a run
FEWEST_NODES = 200  # of a graph on which the cost of a pass counts
MOST_RUNS = 30  # with those that shrink a failure


@rule(
    "E6",
    "the result is topologically valid and lints",
    KINDS,
    DENSE,
    ODD,
    TIED,
    WITH_TP,
    HYBRID,
    AGAIN,
    MIXED,
)
def is_valid(run: PassRun) -> None:
    try:
        lint(run.after.graph, run.adapter.name)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


@rule("E7", "running a pass on its own output changes nothing", IN_PLACE, DENSE, ODD, WITH_TP)
def is_idempotent(run: PassRun) -> None:
    once = render(run.after)
    twice = render(run.of(run.after))
    if twice != once:
        raise AssertionError(
            f"the second run changes the graph\n{difference('graph', once, twice)}"
        )


@rule(
    "D11",
    "a pass that cannot finish raises and leaves the graph as it was",
    KINDS,
    any_model=True,
)
def leaves_what_it_refuses(run: PassRun) -> None:
    """Give the pass a collective without a value, random numbers, and options that do not fit."""
    refuses_any = False
    for what, gm, options in _unfit_graphs(run):
        before, metadata = str(gm.graph).splitlines(), _metadata(gm)
        try:
            run.of(gm, **options)
        except Raised:
            refuses_any = True
            now = str(gm.graph).splitlines()
            changed_metadata = set(metadata.items()) ^ set(_metadata(gm).items())
            if now == before and changed_metadata:
                (name, key), _ = min(changed_metadata)
                raise AssertionError(
                    f'it refused {what} and left {name} with another meta["{key}"]'
                ) from None
            if now != before:
                added = [line.strip() for line in now if line not in before]
                changed = added[0] if added else "nodes are gone"
                raise AssertionError(
                    f"it refused {what} and left the graph half rewritten: {changed}"
                ) from None
        else:
            if options:
                raise AssertionError(f"{options} does not fit the model, and was taken in silence")
    if not refuses_any:
        raise Nothing("it refuses none of the graphs")


def _unfit_graphs(run: PassRun) -> Iterator[tuple[str, fx.GraphModule, dict[str, Any]]]:
    """Yield what does not fit a pass, in words, the graph, and options."""
    spoilt = graph_of(run.recipe)
    collectives = [node for node in spoilt.graph.nodes if launches(node.target)]
    if collectives:  # the last: before it a pass may have rewritten others
        del collectives[-1].meta["val"]
    yield "a collective without a value", spoilt, {}
    if not isinstance(run.recipe, OwnRecipe):  # nobody knows where to draw in another model
        yield "random numbers", graph_of(replace(run.recipe, inside="drops")), {}
    unfit: dict[str, Any] = {}
    if run.adapter.kind == "chunking":
        unfit = {"config": replace(run.recipe, chunks=3).chunking}
    elif run.adapter.takes_plan and run.recipe.plan:
        unfit = {"bucket_plan": [*run.recipe.plan, "no.such.module"]}
    yield "what does not fit", run.before, unfit


def _metadata(gm: fx.GraphModule) -> dict[tuple[str, str], str]:
    """Return the metadata of all nodes, spelled, by the node's name and the key."""
    found = {}
    for node in gm.graph.nodes:
        for key, value in node.meta.items():
            found[node.name, str(key)] = repr(value)
    return found


@rule(
    "state",
    "a pass leaves seeds, switches and modes of the process as they were",
    KINDS,
    any_model=True,
)
def leaves_the_process(run: PassRun) -> None:
    given = graph_of(run.recipe)
    before = _state_of_the_process()
    run.of(given)
    changed = []
    for name, now in _state_of_the_process().items():
        was = before.get(name, NOT_LOADED)
        if was == now or NOT_LOADED in (was, now):
            continue
        what = name
        if not name.startswith("the random state"):
            what += f" from {spell_mode(was)} to {spell_mode(now)}"
        changed.append(what)
    if changed:
        raise AssertionError(f"it changes {', '.join(changed)}")


def _state_of_the_process() -> dict[str, Any]:
    """Return the random states, global switches, and modes and hooks that are active, by name."""
    found = knobs.values()
    for name, (read, _) in MODES.items():
        found[name] = read()
    for generator, state in random_state().items():
        found[f"the random state of {generator}"] = state.tolist()
    return found


@rule(
    "D9",
    "every output has the bits of before, if reductions do not move",
    IN_PLACE,
    DENSE,
    ODD,
    TIED,
    HYBRID,
    AGAIN,
    WITH_TP,
    MOE,
    DEEP,
    MIXED,
)
def keeps_values_of_all_shards(run: PassRun) -> None:
    """Judge the graphs of this rank; where shards are uneven, also those of the other ranks."""
    keeps_values(run)
    for rank in _ranks_with_other_shards(run.recipe):
        with fake_group_beside(rank, run.recipe.size):
            there = replace(run)
            try:
                keeps_values(there)
            except AssertionError as error:
                raise AssertionError(f"on rank {rank}: {error}") from None


def _ranks_with_other_shards(recipe: Recipe) -> set[int]:
    """Return the first and the last rank but this one, if the ranks' shards differ in extent."""
    if isinstance(recipe, OwnRecipe):
        # Nobody knows its extents: a graph without collectives is the same on all ranks.
        if not any(launches(node.target) for node in graph_of(recipe).graph.nodes):
            return set()
        return {0, recipe.size - 1} - {dist.get_rank()}
    extents = dict(recipe.mesh)
    sharders = extents.get("fsdp", 1)
    if all(extent % sharders == 0 for extent in (recipe.dim, VOCABULARY)):
        return set()
    return {0, recipe.size - 1} - {dist.get_rank()}


def keeps_values(run: PassRun) -> None:
    """Compare values and what the graphs communicate.

    A run and a look at the collectives come first: most mistakes show there. For the others, a
    proof takes less time than runs with extreme numbers do, and says more. But nothing is proven
    where an operator has no meaning, or where kernels take other strides: runs judge there.
    """
    nothing: Nothing | None = None
    try:
        # In any case: it shows the strides of results, and what is left of random states.
        _keep_values_here(run, extremes=False)
    except Nothing as error:
        nothing = error  # on ordinary numbers; extreme ones may show a difference
    _communicate_as_much(run)
    if not _are_identical(run):
        _keep_values_here(run, extremes=True)
        _keep_values_on_all_ranks(run)
    elif nothing is not None:
        raise nothing


def _are_identical(run: PassRun) -> bool:
    """Return whether a proof says that all ranks get the same bits, for any numbers."""
    size = dist.get_world_size()
    net = NetModel(ranks_per_node=size, accumulate="fp32")
    world = World("simulated", size, None, 1, dict(run.recipe.mesh), "cpu", "fake", net)
    try:
        proof = prove(run.after, run.before, world=world, at_least="identical")
    except (RuntimeError, TypeError, ValueError):
        return False  # runs say what is wrong
    return proof.kind == "identical"


def _keep_values_here(run: PassRun, *, extremes: bool) -> None:
    """Fail unless the graphs of this rank give the same bits."""
    try:
        with facts.failing_checks(lambda error: None):  # a vacuous check judges nothing here
            silent = assert_same_values(
                run.after,
                run.before,
                f"after {run.adapter.name} against before",
                extremes=extremes,
            )
    except NothingShows as error:
        raise Nothing(str(error)) from None
    except (RuntimeError, TypeError, ValueError) as error:
        raise AssertionError(f"the result does not run: {type(error).__name__}: {error}") from None
    for inputs in silent:
        facts.emit(
            "idle", what=f"{run.adapter.name}: every result of {run.recipe} is NaN on {inputs}"
        )


def _communicate_as_much(run: PassRun) -> None:
    """Fail unless the graphs reduce the same elements, and send no more bytes.

    In a fake world an all-gather repeats the shard and a reduction leaves it. So no value depends
    on the kind of a reduction, nor on the ranks that take part: these are read from the graphs.
    """
    before, after = map(_communication, run.graphs)
    for what in sorted(before.keys() | after.keys()):
        # A pass that recomputes may repeat the collectives of the forward.
        if run.adapter.kind in AGAINST_MEMORY and 0 < before[what] <= after[what]:
            continue
        if before[what] != after[what]:
            raise AssertionError(
                f"{what}: {before[what]} elements before the pass, {after[what]} after it"
            )
    if run.adapter.kind not in AGAINST_MEMORY:
        before, after = map(_sent, run.graphs)
        for what, size in after.items():
            if size > before[what]:
                raise AssertionError(
                    f"{what}: {before[what]} bytes before the pass, {size} after it"
                )


def _keep_values_on_all_ranks(run: PassRun) -> None:
    """Fail unless the graphs give the same bits if each rank holds other shards and tokens.

    A fake all-gather repeats the shard of one rank, whose order among the others does not show. The
    net adds all ranks in one order, so a place in a payload does not show in a sum.
    """
    for node in (*run.before.graph.nodes, *run.after.graph.nodes):
        # The simulated world has no collectives of several tensors.
        if launches(node.target) and isinstance(node.meta.get("val"), list | tuple):
            name = run.adapter.name
            what = f"{name}: {node} takes several tensors, so no world of all ranks runs it"
            facts.emit("idle", what=what)
            return
    meshes = [mesh_of(run.recipe)] if run.recipe.mesh else []
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    # Our tokens are below the vocabulary; of other integers it is only known that 0 and 1 fit.
    integers = 2 if isinstance(run.recipe, OwnRecipe) else VOCABULARY
    inputs: list[PerRank] = []
    for node in run.before.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        values = []
        for _ in range(size):
            values.append(
                sample_tensor(like, like.shape, like.stride(), generator, integers=integers)
            )
        inputs.append(PerRank(values))
    net = NetModel(ranks_per_node=size, accumulate="fp32")
    run_ranks = run_on_all(lambda gm: RankGraph.of(gm, *meshes), net, inputs)
    verdict = compare_entries(run_ranks(run.after), run_ranks(run.before))
    if verdict.outcome != "equal":
        raise AssertionError(f"with other shards and tokens on each rank\n{verdict}")


def _operands(launch: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a collective takes, alone, in a list, or by a node that gives one."""
    nodes = pytree.tree_leaves(launch.args[0])
    return pytree.tree_leaves([node.meta["val"] for node in nodes])


def _communication(gm: fx.GraphModule) -> Counter[str]:
    """Count the reduced elements by reduction, dtype and ranks.

    Other collectives count as one for each kind and ranks: a pass may gather once what was gathered
    twice, and gather as bytes. It may not reduce more, less or otherwise.
    """
    found = Counter[str]()
    for launch in gm.graph.nodes:
        if not launches(launch.target):
            continue
        ranks = group_ranks(str(group_of(launch)))
        reduction = reduction_of(launch)
        if reduction is None:
            found[f"{kind_of(launch)} over ranks {list(ranks)}"] = 1
            continue
        kind = f"{kind_of(launch)} {plain_reduction(reduction, len(ranks))}"
        for value in _operands(launch):
            found[f"{kind} of {value.dtype} over ranks {list(ranks)}"] += value.numel()
    return found


def _sent(gm: fx.GraphModule) -> Counter[str]:
    """Count the bytes of collectives that do not reduce, by kind and ranks."""
    found = Counter[str]()
    for launch in gm.graph.nodes:
        if launches(launch.target) and reduction_of(launch) is None:
            ranks = list(group_ranks(str(group_of(launch))))
            sizes = [value.numel() * value.element_size() for value in _operands(launch)]
            found[f"{kind_of(launch)} over ranks {ranks}"] += sum(sizes)
    return found


@rule(
    "metadata",
    "what a pass leaves keeps module and direction; what it makes has a value, and values are true",
    KINDS,
    DENSE,
    AGAIN,
)
def keeps_metadata(run: PassRun) -> None:
    given = graph_of(run.recipe)
    before = {node: f"{node_fqn(node)} {direction(node)}" for node in given.graph.nodes}
    # The trace itself leaves results that no kernel computes, such as a gradient nobody asks for.
    without = {node for node in before if "val" not in node.meta}
    names_without = {(node.name, node.target) for node in without}
    after = run.of(given)
    # By the names that the pass may have given them, before it made a copy.
    by_name = {(node.name, node.target): words for node, words in before.items()}
    # A pass that makes a new graph leaves no node of the given one. A namesake may be another node,
    # so of these it only counts that none has lost its module.
    is_new = before.keys().isdisjoint(after.graph.nodes)
    for node in after.graph.nodes:
        lacked = node in without or (is_new and (node.name, node.target) in names_without)
        if node.op == "call_function" and "val" not in node.meta and not lacked:
            raise AssertionError(f'{node} = {node.target} has no meta["val"]')
        now = f"{node_fqn(node)} {direction(node)}"
        was = before.get(node, now)
        if is_new and not node_fqn(node):
            was = by_name.get((node.name, node.target), now)
        if was != now:
            raise AssertionError(f"{node} was of {was} and is of {now}")
    wrong = _wrong_values(run.before)
    for name, why in _wrong_values(after).items():
        if name not in wrong:
            raise AssertionError(why)
    if is_new:
        _refuse_other_names(given, after)


def _refuse_other_names(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raise ``Nothing`` if no operator has its name of before: none can be compared with itself."""
    names = {node.name for node in before.graph.nodes if node.op == "call_function"}
    if names.isdisjoint(node.name for node in after.graph.nodes):
        raise Nothing("it gives all operators other names, so none is known again")


def _wrong_values(gm: fx.GraphModule) -> dict[str, str]:
    """Run a graph; return what is wrong, for each node whose ``meta["val"]`` says another dtype,
    shape or strides than the node has.
    """
    wrong: dict[str, str] = {}

    class Values(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made, says = super().run_node(n), n.meta.get("val")
            if isinstance(made, torch.Tensor) and isinstance(says, torch.Tensor):
                is_so, is_said = map(_spell_layout, (made, says))
                if is_so != is_said:
                    wrong[n.name] = f'{n} is {is_so}, and its meta["val"] says {is_said}'
            return made

    generator = torch.Generator().manual_seed(0)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        Values(gm).run(*(sample(node.meta["val"], generator, "") for node in placeholders))
    return wrong


def _spell_layout(tensor: torch.Tensor) -> str:
    strides = list(strides_that_count(tensor))
    return f"{tensor.dtype}{list(tensor.shape)} with strides {strides}"


@rule(
    "ranks",
    "the graph is the same on ranks that hold as much, and collectives are the same on all ranks",
    IN_PLACE,
    DENSE,
    TIED,
    HYBRID,
    WITH_TP,
    ODD,
)
def is_same_on_ranks(run: PassRun) -> None:
    mesh = dict(run.recipe.mesh)
    launched = _in_order(run.after)
    # The rank that was first with its shapes of inputs, and its text.
    texts = {_shapes(run.before): (dist.get_rank(), _without_ranks(render(run.after, mesh=mesh)))}
    for rank in sorted(set(range(run.recipe.size)) - {dist.get_rank()}):
        with fake_group_beside(rank, run.recipe.size):
            elsewhere = replace(run)
            there = _without_ranks(render(elsewhere.after, mesh=mesh))
            launched_there = _in_order(elsewhere.after)
            first, here = texts.setdefault(_shapes(elsewhere.before), (rank, there))
        # Ranks whose collectives differ wait for each other forever.
        for own, other in itertools.zip_longest(launched, launched_there, fillvalue="nothing"):
            if own != other:
                raise AssertionError(
                    f"rank {rank} launches {other} where rank {dist.get_rank()} launches {own}"
                )
        if there != here:
            raise AssertionError(
                f"rank {rank} has another graph than rank {first}\n"
                f"{difference('graph', here, there)}"
            )


def _shapes(gm: fx.GraphModule) -> str:
    """Return the shapes of a graph's inputs and results, by which ranks hold as much.

    A backward alone takes whole tensors, and only what it returns are shards.
    """
    ends = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.output_node().all_input_nodes]
    return str([tuple(node.meta["val"].shape) for node in ends])


def _without_ranks(text: str) -> str:
    """Return a graph's text without the lines that list the ranks of its groups."""
    return "".join(line for line in text.splitlines(keepends=True) if " = group(" not in line)


def _in_order(gm: fx.GraphModule) -> list[str]:
    """Describe the collectives of a graph in the order of their launches."""
    found = []
    for launch in gm.graph.nodes:
        if launches(launch.target):
            sizes = [f"{value.dtype}{list(value.shape)}" for value in _operands(launch)]
            found.append(f"{kind_of(launch) or launch.target} of {', '.join(sizes)}")
    return found


MESSAGES = Recipe(inside="sends", mesh=WITH_TP.mesh)


def _calls_on_all_ranks(run: PassRun) -> tuple[dict[int, Calls], dict[int, Calls]]:
    """Return what each rank calls before and after the pass.

    All worlds name their groups from one number, so a group has one name on all its ranks.

    Raises:
        Nothing: the ranks wait for ever without the pass.
    """
    names, size = new_group_names(), run.recipe.size
    before, after = {}, {}
    for rank in range(size):
        with fake_group_beside(rank, size, names):
            there = replace(run)
            before[rank] = calls_of(there.before)
            result = there.after
            try:
                after[rank] = calls_of(result)
            except ValueError as error:
                raise AssertionError(f"on rank {rank}: {error}") from None
    waits = find_waits(_schedules(before))
    if waits:
        raise Nothing(f"without the pass ranks wait for ever, too: {waits}")
    return before, after


def _schedules(calls: dict[int, Calls]) -> dict[int, Schedule]:
    return {rank: each.schedule for rank, each in calls.items()}


@rule(
    "order",
    "collectives keep one order in each group, no rank waits for ever, and luck decides no order",
    tuple(kind for kind in IN_PLACE if kind not in CANONICAL),
    HYBRID,
    WITH_TP,
    ODD,
)
def keeps_one_order(run: PassRun) -> None:
    """Put the collectives of all ranks into the queues of their groups."""
    before, after = _calls_on_all_ranks(run)
    if not any(calls.schedule for calls in before.values()):
        raise Nothing("its graphs do not communicate")
    waits = find_waits(_schedules(after))
    if waits:
        raise AssertionError(f"ranks wait for each other\n{waits}")
    lucky = find_luck(_schedules(after))
    if lucky and not find_luck(_schedules(before)):
        raise AssertionError(f"only luck keeps this order: {lucky[0]}")


@rule(
    "p2p",
    "sends and receives of all ranks match: peer, order, tag, shape and dtype, each once",
    tuple(kind for kind in IN_PLACE if kind not in DDP),
    MESSAGES,
    may_refuse=True,
)
def keeps_messages(run: PassRun) -> None:
    """Compare the messages of each rank with those of before, and match those of all ranks."""
    before, after = _calls_on_all_ranks(run)
    if not any(calls.messages for calls in before.values()):
        raise Nothing("its graphs send no messages")
    for rank, calls in before.items():
        was, now = (Counter(words for words, _ in each.messages) for each in (calls, after[rank]))
        for words, where in (*calls.messages, *after[rank].messages):
            if was[words] != now[words]:
                raise AssertionError(
                    f"rank {rank}: {words} ({where}): {counted(was[words], 'message')} before the "
                    f"pass, {now[words]} after it"
                )
    waits = find_waits(_schedules(after))
    if waits:
        raise AssertionError(f"ranks wait for each other\n{waits}")


def print_texts() -> None:
    """Print the texts of the graphs as a line of JSON, or the error of importing the pass.

    This runs in the other process, which reads pass and recipes from its standard input.
    """
    path, kind, adapter, recipes = pickle.load(sys.stdin.buffer)
    try:
        adapter = adapter_at(path, kind) if path else pickle.loads(adapter)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
        return
    with fake_world(WorldSpec("fake", 4, {}, rank=1)):
        # A run needs its request only to keep a graph.
        runs = [PassRun(adapter, recipe, None) for recipe in recipes]  # type: ignore[arg-type]
        print(json.dumps([render(run.after, mesh=dict(run.recipe.mesh)) for run in runs]))


@rule("process", "another process, with another hash seed, gets the same graph", KINDS, DENSE)
def is_same_elsewhere(run: PassRun) -> None:
    adapter = run.adapter
    runs = [run]
    if not isinstance(run.recipe, OwnRecipe):
        recipes = as_given(adapter.kind, (DENSE, TIED, HYBRID))
        runs = [replace(run, recipe=each) for each in recipes]
    try:
        pickled = b"" if adapter.path else pickle.dumps(adapter)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Nothing(f"another process cannot import it: {error}") from None
    given = pickle.dumps((adapter.path, adapter.kind, pickled, [each.recipe for each in runs]))
    # The order of a set of strings depends on the seed.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    # The other process has to find modules as this one does.
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from pytest_gtrainer.conformance import rules; rules.print_texts()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, env=environment, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        message = lines[-1] if lines else "no message"
        raise AssertionError(f"it raises in another process: {message}")
    there = json.loads(done.stdout.splitlines()[-1])
    if isinstance(there, str):
        raise Nothing(f"another process cannot import it: {there}")
    for each, text in zip(runs, there, strict=True):
        here = render(each.after, mesh=dict(each.recipe.mesh))
        if here != text:
            raise AssertionError(
                f"another process has another graph of {each.recipe}\n"
                f"{difference('graph', here, text)}"
            )


def _calls(function: Callable[..., Any], *args: Any) -> int:
    """Count the calls of functions, Python's and built-in ones, while ``function`` runs.

    The number is the same in each run; a time is not.
    """
    profile = cProfile.Profile()
    # A collection may begin at any call, and runs finalizers.
    with collector_off():
        profile.runcall(function, *args)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


@rule("growth", "linear in nodes: 4 times the layers cost at most 5 times the calls", KINDS)
def is_linear(run: PassRun) -> None:
    calls = []
    for layers in (4, 16):
        larger = replace(run, recipe=replace(run.recipe, layers=layers))
        # The first run imports modules and fills caches.
        given, after = larger.before, larger.after
        calls.append(_calls(larger.of, given))
    if render(after) == render(graph_of(larger.recipe)):
        raise Nothing("it changes nothing")
    if calls[1] > 5 * calls[0]:
        raise AssertionError(
            f"{calls[0]} calls for 4 layers, {calls[1]} for 16: {calls[1] / calls[0]:.1f} times"
        )


@rule(
    "cost",
    "16 layers cost at most 10 times the calls of one recompile of the graph",
    KINDS,
    Recipe(layers=16),
)
def is_cheap(run: PassRun) -> None:
    if len(run.before.graph.nodes) < FEWEST_NODES:
        raise Nothing(f"a graph of fewer than {FEWEST_NODES} nodes says nothing about cost")
    _ = run.after  # the first run imports modules and fills caches
    calls, recompile = _calls(run.of, graph_of(run.recipe)), _calls(run.before.recompile)
    if calls > 10 * recompile:
        raise AssertionError(
            f"{calls} calls, a recompile {recompile}: {calls / recompile:.1f} times"
        )


@rule(
    "generated",
    "E6, D9 and D17 on generated models, shrunk to the smallest that breaks one",
    IN_PLACE,
)
def holds_on_generated(run: PassRun) -> None:
    """Judge models that hypothesis generates, and report the smallest one that breaks a rule."""
    try:
        import hypothesis
        from hypothesis import Verbosity, strategies
    except ImportError:
        raise Nothing("it needs hypothesis: pip install 'pytest-gtrainer[conformance]'") from None
    kind = run.adapter.kind
    judges = [is_valid, keeps_values]
    if kind in (*MERGING, *DDP):
        judges.append(can_be_read)
    failures: dict[Recipe, str] = {}
    changed, smallest = False, DENSE

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        # A loaded machine is slow, and that is no fault of the pass.
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(_recipes(), strategies.integers(0, len(as_given(kind, [DENSE])) - 1))
    def hold(recipe: Recipe, part: int) -> None:
        nonlocal changed, smallest
        recipe = as_given(kind, [recipe])[part]
        # Shrinking runs the same models again, and may try any number of new ones.
        if recipe not in failures and len(failures) < MOST_RUNS:
            model = replace(run, recipe=recipe)
            try:
                changed |= render(model.before) != render(model.after)
                for judge in judges:
                    judge(model)
                failures[recipe] = ""
            except (AssertionError, Raised) as error:
                failures[recipe] = str(error).strip()
        if failures.get(recipe):
            # Hypothesis ends with the smallest model that fails.
            smallest = recipe
            raise AssertionError(failures[recipe])

    try:
        hold()
    except AssertionError:
        raise AssertionError(f"{failures[smallest]}\nthe smallest model: {smallest}") from None
    if not changed:
        raise Nothing("it changes nothing")


def _recipes() -> Any:
    """Return the strategy of generated models.

    They differ in orders, names, biases, ties, extents, dtypes, meshes, and in late and aliased
    waits.
    """
    from hypothesis import strategies

    def with_names(names: tuple[str, ...]) -> Any:
        biases = strategies.sets(strategies.sampled_from(names))
        return strategies.builds(
            Recipe,
            layers=strategies.integers(1, 2),
            dim=strategies.sampled_from((4, 6, 10)),
            registered=strategies.permutations(names).map(tuple),
            executed=strategies.permutations(names).map(tuple),
            bias=biases.map(lambda chosen: tuple(sorted(chosen))),
            tied=strategies.booleans(),
            reduced=strategies.sampled_from((torch.float32, torch.bfloat16, None)),
            mesh=strategies.sampled_from((DENSE.mesh, HYBRID.mesh, WITH_TP.mesh)),
            gathers_again=strategies.booleans(),
            waits=strategies.sampled_from(("", "late", "alias")),
        )

    return strategies.sampled_from((LINEARS, PREFIXES)).flatmap(with_names)


@rule(
    "D17",
    "every parameter's place in its payload can be read",
    (*MERGING, *DDP),
    DENSE,
    ODD,
    TIED,
    HYBRID,
    WITH_TP,
    AGAIN,
)
def can_be_read(run: PassRun) -> None:
    def slots(gm: fx.GraphModule) -> set[str]:
        found = set[str]()
        for payload in bucket_layout(gm).payloads:
            # A reduction of gradients may be unmarked; it is always of the backward.
            is_gather = payload.collective == "all_gather"
            directions = payload.directions if is_gather else (BACKWARD,)
            for way, slot in itertools.product(directions, payload.slots):
                what = f"{payload.collective} of {slot.parameter} in {way}"
                found.add(f"{what}, {slot.nbytes} bytes a rank")
        return found

    try:
        before, after = map(slots, run.graphs)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    if not before and not after:
        raise Nothing("the graph communicates no parameter and no gradient")
    for slot in sorted(before - after):
        raise AssertionError(f"it is gone: {slot}")
    for slot in sorted(after - before):
        raise AssertionError(f"it was not there before: {slot}")


@rule(
    "D1",
    "one collective a bucket, direction, group, reduction and dtype",
    MERGING,
    DENSE,
    TIED,
    HYBRID,
    AGAIN,
    MIXED,
)
def merges_each_bucket(run: PassRun) -> None:
    if not run.recipe.plan:
        raise Nothing("its model has no bucket plan: return a TrainConfig")
    plan = Plan(run.recipe.plan)
    buckets: dict[Any, list[str]] = {}
    for kind, members in (
        ("all_gather", fsdp_all_gathers(run.before)),
        ("reduce_scatter", fsdp_reduce_scatters(run.before)),
    ):
        for member in members:
            bucket = plan.bucket_of(member.parameter)
            label = bucket.label if bucket else "the root"
            key = kind, member.direction, label, member.signature
            buckets.setdefault(key, []).append(member.parameter)
    if all(len(parameters) == 1 for parameters in buckets.values()):
        raise Nothing("no bucket has two members")
    layout = bucket_layout(run.after)
    for (kind, way, label, _), parameters in buckets.items():
        found = []
        for payload in layout.of(kind):
            shares_any = not set(parameters).isdisjoint(payload.parameters)
            if way in payload.directions and shares_any:
                found.append(set(payload.parameters))
        if found != [set(parameters)]:
            listed = "; ".join(", ".join(sorted(names)) for names in found) or "none"
            raise AssertionError(
                f"bucket {label!r}, {kind} in {way}: expected one of {', '.join(parameters)}, "
                f"found {len(found)}, {listed}"
            )


@rule("D2", "payloads are in FSDP2's managed order, never the order of the graph", MERGING, *ORDERS)
def packs_in_managed_order(run: PassRun) -> None:
    managed = run.before.graph.output_node().meta.get("gt_managed_order")
    if managed is None:
        raise Nothing("the graph does not say in which order FSDP2 manages its parameters")
    # The graph of a backward alone has reduce-scatters only.
    members = (*fsdp_all_gathers(run.before), *fsdp_reduce_scatters(run.before))
    executed = [member.parameter for member in members]
    could_fail = False
    for payload in run.merged:
        expected = sorted(payload.parameters, key=managed.index)
        could_fail |= expected != sorted(payload.parameters, key=executed.index)
        for parameter, other in zip(payload.parameters, expected, strict=True):
            if parameter != other:
                raise AssertionError(
                    f"bucket {payload.label!r}, {payload.collective}: {parameter} stands where "
                    f"FSDP2 packs {other}; packed are {', '.join(payload.parameters)}"
                )
    if not could_fail:
        raise Nothing("in each payload the order of the graph is FSDP2's, too")


@rule(
    "D4",
    "payloads are those of eager fully_shard, to the byte",
    JOINT,
    *ORDERS,
    merging=True,
    any_model=False,
)
def packs_as_eager(run: PassRun) -> None:
    config = run.recipe.config(mesh_of(run.recipe))
    eager = new_model(config)
    shard_eagerly(eager, config)
    config.step(eager, *config.batch(0, 1)).backward()
    assert_same_layout(bucket_layout(run.after), eager_bucket_layout(eager))


@rule(
    "D6",
    "collectives of other parallelism stay as they are",
    MERGING,
    WITH_TP,
    merging=True,
    any_model=False,
)
def leaves_other_collectives(run: PassRun) -> None:
    tp = mesh_of(run.recipe).get_group("tp").group_name

    def of_tp(gm: fx.GraphModule) -> Counter[str]:
        found = Counter[str]()
        for node in gm.graph.nodes:
            if is_collective(node) and group_of(node) == tp:
                found[f"{kind_of(node)} of {list(node.meta['val'].shape)} over tp"] += 1
        return found

    before, after = map(of_tp, run.graphs)
    for kind in (before - after) + (after - before):
        raise AssertionError(f"{kind}: {before[kind]} before the pass, {after[kind]} after it")


@rule("D7", "members that differ in dtype are never merged", MERGING, MIXED)
def keeps_dtypes_apart(run: PassRun) -> None:
    dtypes = {}
    for payload in bucket_layout(run.before).payloads:
        for parameter in payload.parameters:
            dtypes[payload.collective, parameter] = payload.dtype
    for payload in run.merged:
        for parameter in payload.parameters:
            was = dtypes[payload.collective, parameter]
            if was is not payload.dtype:
                raise AssertionError(
                    f"bucket {payload.label!r}, {payload.collective}: {parameter} travelled as "
                    f"{was}, now as {payload.dtype}"
                )


@rule(
    "D8",
    'every node that the pass creates carries meta["fsdp_bucket"]',
    MERGING,
    DENSE,
    merging=True,
)
def marks_its_nodes(run: PassRun) -> None:
    known = {node.name for node in run.before.graph.nodes}
    for node in run.after.graph.nodes:
        is_new = node.op == "call_function" and node.name not in known
        if is_new and "fsdp_bucket" not in node.meta:
            raise AssertionError(f'{node} = {node.target} has no meta["fsdp_bucket"]')


@rule(
    "D13",
    "operands have the strides of before",
    (*MERGING, *CANONICAL),
    DENSE,
    ODD,
    HYBRID,
    merging=True,
)
def keeps_strides(run: PassRun) -> None:
    """Compare the strides of what each node of the model reads.

    A strided view in the place of a contiguous tensor changes the bits of a later sum.
    """

    def strides_of_operands(gm: fx.GraphModule) -> dict[str, list[tuple[int, ...]]]:
        found = {}
        for node in gm.graph.nodes:
            if computes(node):  # leaves collectives out
                values = [operand.meta.get("val") for operand in node.all_input_nodes]
                found[node.name] = [value.stride() for value in values if hasattr(value, "stride")]
        return found

    _refuse_other_names(*run.graphs)
    before, after = map(strides_of_operands, run.graphs)
    for name, was in before.items():
        if after.get(name, was) != was:
            raise AssertionError(
                f"{name} reads operands of strides {after[name]}, before the pass {was}"
            )


def _spans(gm: fx.GraphModule, kind: str, way: str) -> list[tuple[str, int, int]]:
    """Return name, place of launch and place of wait of each collective of a kind and direction.

    All-gathers of activations are left out: tensor parallelism places them.
    """
    place = {node: at for at, node in enumerate(gm.graph.nodes)}
    sent = read_sent_states(gm)
    found = []
    for node in place:
        if not is_collective(node) or kind_of(node) != kind or direction(node) != way:
            continue
        if kind != "all_gather" or ACTIVATION not in sent.get(node, ()):
            found.append((node.name, place[node], place[wait_of(node)]))
    return found


_NEXT_FIRST = "the next all-gather of the forward is launched before this one is waited for"


@rule("E1", _NEXT_FIRST, MERGING, DENSE, HYBRID, merging=True)
def prefetches(run: PassRun) -> None:
    spans = _spans(run.after, "all_gather", FORWARD)
    for (name, _, wait), (later, launch, _) in itertools.pairwise(spans):
        if launch > wait:
            raise AssertionError(
                f"{later} is launched after the wait of {name}: "
                "the gather of a bucket hides nothing"
            )


@rule(
    "E2",
    "a reduce-scatter is waited for after the launch of the next one",
    MERGING,
    DENSE,
    HYBRID,
    merging=True,
)
def waits_late(run: PassRun) -> None:
    spans = _spans(run.after, "reduce_scatter", BACKWARD)
    for (name, _, wait), (later, launch, _) in itertools.pairwise(spans):
        if wait < launch:
            raise AssertionError(
                f"{name} is waited for before {later} is launched: nothing runs beside it"
            )


@rule("E4", "only collective chains move", (*MERGING, *DEDUPLICATION, *REASSIGNMENT), DENSE, AGAIN)
def moves_no_compute(run: PassRun) -> None:
    given = graph_of(run.recipe)
    moving = set[fx.Node]()
    for member in (*fsdp_all_gathers(given), *fsdp_reduce_scatters(given)):
        moving.update((member.launch, member.wait, *member.chain))
    before: list[Any] = [node for node in given.graph.nodes if node not in moving]
    result = run.of(given)
    after: list[Any] = list(result.graph.nodes)
    # A pass may rename nodes. One that makes a new graph leaves none of the given one.
    if set(before).isdisjoint(after):
        _refuse_other_names(given, result)
        before = [node.name for node in before]
        after = [node.name for node in after]
    staying = set(before).intersection(after)
    for was, now in zip(
        [each for each in before if each in staying],
        [each for each in after if each in staying],
        strict=True,
    ):
        if was != now:
            raise AssertionError(f"{now} runs where {was} ran: compute has moved")


# Each kernel takes 1 s and each collective 0.5 s, so a collective is hidden if one kernel runs
# between its launch and its wait.
SLOW = CostModel(flops_per_second=1e30, bytes_per_second=1e30, link=1e30, overhead=1.0, latency=0.5)


@rule(
    "E8",
    "behind slow compute all but the first and the last collective are hidden",
    MERGING,
    DENSE,
    AGAIN,
)
def hides_collectives(run: PassRun) -> None:
    """Count the exposed collectives.

    Eager FSDP2 exposes two: nothing runs before the first all-gather has arrived, nor after the
    last reduce-scatter.
    """
    after = timeline(run.after, SLOW, mesh=dict(run.recipe.mesh))
    exposed = [span.label for span in after.spans if span.kind == "exposed"]
    if len(exposed) > 2:
        raise AssertionError(
            f"{len(exposed)} collectives are exposed where eager exposes at most 2: "
            f"{', '.join(exposed)}"
        )


def _aliases_of_outputs(gm: fx.GraphModule) -> list[str]:
    """Run the graph; return the inputs and earlier outputs that each output shares memory with."""
    generator = torch.Generator().manual_seed(0)
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [sample(node.meta["val"], generator, "") for node in placeholders]
    names: dict[int, list[str]] = {}
    for at, value in enumerate(inputs):
        names.setdefault(value.untyped_storage().data_ptr(), []).append(f"input {at}")
    # A pass may leave the code of the graph before.
    gm.recompile()
    found = []
    # The outputs stay alive here: freed memory could be that of a later one.
    outputs = pytree.tree_leaves(gm(*inputs))
    for at, value in enumerate(outputs):
        shared = names.setdefault(value.untyped_storage().data_ptr(), [])
        found.append(", ".join(shared) or "nothing")
        shared.append(f"output {at}")
    return found


TRAP, NOISE = Recipe(traps=True), Recipe(inside="noise")
FOUR = Recipe(chunks=4, executed=("w1", "w3", "w2", "w1"))
EXPERTS = Recipe(moe=True, sequence=8)
FOUR_OF_EXPERTS = replace(FOUR, moe=True, sequence=8)


@rule(
    "aliases", "outputs keep strides and aliases; copies that matter stay", CANONICAL, DENSE, TRAP
)
def keeps_aliases(run: PassRun) -> None:
    keeps_values(run)
    for at, (was, now) in enumerate(zip(*map(_aliases_of_outputs, run.graphs), strict=True)):
        if was != now:
            raise AssertionError(f"output {at} shared memory with {was}, and shares it with {now}")


@rule(
    "spelling",
    "views and transposes that change nothing do not show in the text",
    CANONICAL,
    NOISE,
    any_model=False,
)
def has_one_spelling(run: PassRun) -> None:
    plain = render(replace(run, recipe=replace(run.recipe, inside="")).after)
    noisy = render(run.after)
    if plain != noisy:
        raise AssertionError(
            f"the same step in two spellings has two texts\n{difference('graph', plain, noisy)}"
        )


@rule(
    "A11",
    "a parameter that is read twice is gathered once a direction, the first time",
    DEDUPLICATION,
    DENSE,
    TIED,
    AGAIN,
)
def gathers_once(run: PassRun) -> None:
    def launches_by_value(gm: fx.GraphModule) -> dict[Any, list[str]]:
        found: dict[Any, list[str]] = {}
        for member in fsdp_all_gathers(gm):
            key = member.parameter, member.direction, member.signature
            found.setdefault(key, []).append(member.launch.name)
        return found

    before, after = map(launches_by_value, run.graphs)
    if all(len(names) == 1 for names in before.values()):
        raise Nothing("no parameter is gathered twice")
    for key, (first, *_) in before.items():
        left = after.get(key, [])
        if left != [first]:
            parameter, way, _ = key
            raise AssertionError(
                f"{parameter} in {way}: expected the first gather, {first}, alone; "
                f"found {', '.join(left) or 'none'}"
            )


_WRITTEN = "a write in between is seen: it is refused, or bits stay"
_FRESH = (
    "equal fresh buffers that are written to stay apart, and so do equal draws: "
    "bits stay, or it is refused"
)

rule(
    "written",
    _WRITTEN,
    (*DEDUPLICATION, *AGAINST_MEMORY),
    Recipe(updates=True),
    may_refuse=True,
    any_model=False,
)(keeps_values)
rule(
    "fresh",
    _FRESH,
    (*ANY, *DEDUPLICATION),
    Recipe(inside="buffers"),
    may_refuse=True,
    any_model=False,
)(keeps_values)


@rule(
    "M2",
    "recomputed nodes are the backward's, named *_recomputed, with metadata of their own",
    AGAINST_MEMORY,
    DENSE,
    TIED,
)
def marks_what_it_recomputes(run: PassRun) -> None:
    names = {node.name for node in run.before.graph.nodes}
    owners: dict[int, str] = {}
    for node in run.after.graph.nodes:
        is_new = node.name not in names
        if is_new and node.op == "call_function":
            if direction(node) != BACKWARD:
                raise AssertionError(f"{node} is computed again and not marked as the backward's")
            if "_recomputed" not in node.name:
                raise AssertionError(
                    f"{node} is computed again in the backward and not named *_recomputed"
                )
        # A later pass that annotates the copy would annotate the original, too.
        custom = node.meta.get("custom")
        if custom is not None:
            if is_new and id(custom) in owners:
                raise AssertionError(f'{node} shares its meta["custom"] with {owners[id(custom)]}')
            owners[id(custom)] = node.name


@rule(
    "random",
    "what draws random numbers is not computed again",
    AGAINST_MEMORY,
    DENSE,
    any_model=False,
)
def draws_once(run: PassRun) -> None:
    """Look for new nodes that draw; the pass may refuse the region, or save what was drawn."""
    drops = replace(run, recipe=replace(run.recipe, inside="drops"))
    known = {node.name for node in drops.before.graph.nodes}
    try:
        after = drops.after
    except Refused:
        return
    for node in after.graph.nodes:
        if is_random(node) and node.name not in known:
            raise AssertionError(f"{node} draws again, other numbers than the forward had")


@rule("memory", "the peak of memory is smaller than before", AGAINST_MEMORY, DENSE, TIED)
def needs_less_memory(run: PassRun) -> None:
    before, after = map(peak_memory, run.graphs)
    if after.peak >= before.peak:
        raise AssertionError(
            f"the peak was {before.peak:,} bytes and is {after.peak:,}, at {after.where}"
        )


def _groups(gm: fx.GraphModule) -> dict[str, str]:
    """Return the group of each launch, by the launch's name."""
    return {node.name: str(group_of(node)) for node in gm.graph.nodes if launches(node.target)}


@rule(
    "F1",
    "the all-gathers of parameters move to one other group of the same ranks; all else stays",
    REASSIGNMENT,
    DENSE,
    HYBRID,
    WITH_TP,
    Recipe(activation_dim="fsdp"),
)
def moves_gathers(run: PassRun) -> None:
    parameters = {member.launch.name: member.parameter for member in fsdp_all_gathers(run.before)}
    before, after = map(_groups, run.graphs)
    if len(run.before.graph.nodes) != len(run.after.graph.nodes) or before.keys() != after.keys():
        raise AssertionError("the graph has other nodes than before")
    extras: dict[str, str] = {}
    for name, was in before.items():
        now = after[name]
        if name not in parameters:
            if was != now:
                raise AssertionError(
                    f"{name} is no all-gather of a parameter and has moved from {was} to {now}"
                )
            continue
        if now == was or group_ranks(now) != group_ranks(was):
            raise AssertionError(
                f"the gather of {parameters[name]} is in {now}: "
                f"expected another group of {was}'s ranks"
            )
        if extras.setdefault(was, now) != now:
            raise AssertionError(
                f"the all-gathers of {was} are in two groups, {extras[was]} and {now}"
            )


@rule("F4", "a new world has new groups", REASSIGNMENT, DENSE, HYBRID, any_model=False)
def forgets_groups(run: PassRun) -> None:
    """Run the pass in two worlds, one after the other, whose groups have equal names.

    Two tests in one process have such worlds. A pass that keeps a table of groups, by name or by
    ranks, finds an entry of the first world in the second.
    """
    names = new_group_names()
    sources = []
    for _ in range(2):
        with fake_group_beside(dist.get_rank(), dist.get_world_size(), names):
            fresh = replace(run)
            sources.append(_groups(fresh.before))
            before, after = (_groups(gm) for gm in fresh.graphs)
            for name, group in after.items():
                try:
                    ranks = group_ranks(group)
                except (KeyError, ValueError):
                    raise AssertionError(
                        f"{name} is in {group}, a group of a world that is gone"
                    ) from None
                expected = group_ranks(before[name]) if name in before else ranks
                if ranks != expected:
                    raise AssertionError(
                        f"{name} is in {group}, which was a group of a world that is gone and now "
                        f"has other ranks: {list(ranks)}, expected {list(expected)}"
                    )
    if sources[0] != sources[1]:
        raise Nothing("the groups of the second world have other names than those of the first")


@rule(
    "G1",
    "gradients have the bits of eager chunking",
    CHUNKING,
    DENSE,
    FOUR,
    EXPERTS,
    FOUR_OF_EXPERTS,
)
def has_bits_of_chunks(run: PassRun) -> None:
    """Compare the chunked graph with eager chunking; unchunked bits must differ.

    With four chunks and a weight that is used twice, a wrong order of addition shows.
    """
    mesh = mesh_of(run.recipe) if run.recipe.mesh else None
    model, tokens = run.recipe.model(mesh), run.recipe.tokens(0, 0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    names = ("loss", *names)
    # A pass may leave the code of the graph before.
    run.after.recompile()
    values = pytree.tree_leaves(run.after(*(each.detach() for each in parameters), *tokens))

    def eager() -> list[torch.Tensor]:
        loss = step(model, *tokens)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    whole = eager()
    with eager_chunked(model, run.recipe.chunking):
        chunked = eager()
    if all(map(torch.equal, whole, chunked)):
        raise Nothing("unchunked bits are those of chunks, too")
    assert_bitwise_equal(
        dict(zip(names, values, strict=True)),
        dict(zip(names, chunked, strict=True)),
        what="chunked graph against eager chunking",
    )


@rule(
    "routes",
    "experts exchange once a chunk, with the bits of eager chunking",
    CHUNKING,
    EXPERTS,
    FOUR_OF_EXPERTS,
)
def exchanges_by_chunk(run: PassRun) -> None:
    routed = replace(run, recipe=replace(run.recipe, inside="routes", mesh=(("tp", 4),)))
    before = len(routed.before.graph.find_nodes(op="call_function", target=ALL_TO_ALL))
    after = len(routed.after.graph.find_nodes(op="call_function", target=ALL_TO_ALL))
    if after != before * run.recipe.chunks or not before:
        raise AssertionError(
            f"{before} all-to-alls became {after}: expected {run.recipe.chunks} for each"
        )
    has_bits_of_chunks(routed)


@rule("G5", "a chunk that is contiguous is not copied", CHUNKING, DENSE, EXPERTS)
def copies_no_chunk(run: PassRun) -> None:
    known = {node.name for node in run.before.graph.nodes}
    for node in run.after.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        if node.name not in known and node.args[0].meta["val"].is_contiguous():
            raise AssertionError(f"{node} copies {node.args[0]}, which is contiguous")


def _refuses(run: PassRun, **wrong: Any) -> None:
    made = replace(run, recipe=replace(run.recipe, **wrong))
    try:
        _ = made.after
    except Refused:
        return
    raise AssertionError(f"{made.recipe} was taken in silence")


@rule("G8", "a collective that every chunk would run is refused", CHUNKING, DENSE, EXPERTS)
def refuses_exchanges(run: PassRun) -> None:
    _refuses(run, inside="exchanges", mesh=(("tp", 4),))


@rule("G24", "an operator that mixes the rows of chunks is refused", CHUNKING, DENSE, EXPERTS)
def refuses_mixing(run: PassRun) -> None:
    _refuses(run, inside="mixes")


_BITS = "on real ranks gradients and weights have eager fully_shard's bits"
_NODES = "on two simulated nodes, too, where the order of a payload shows"


@rule("bits", _BITS, JOINT, world=("ranks", {"size": 3}))
def has_bits_of_eager(run: PassRun) -> None:
    _train_as_eager(run, Recipe(mesh=(("fsdp", 3),), dim=9, bias=("w1", "w2"), reduced=None))


@rule("nodes", _NODES, JOINT, world=("simulated", {"size": 4, "nodes": 2}))
def has_bits_of_eager_on_nodes(run: PassRun) -> None:
    _train_as_eager(run, Recipe(reduced=torch.bfloat16))


def _train_as_eager(run: PassRun, recipe: Recipe) -> None:
    """Train both sides for two steps; the control packs backwards and must differ."""
    run = replace(run, recipe=recipe)
    mine = BoundPass(run.adapter.name, (), lambda gm, example_inputs=None: run.of(gm), {})
    world = run.request.getfixturevalue("gt_world")
    try:
        with facts.failing_checks(lambda error: None):  # a vacuous check judges nothing here
            assert_parity(
                run.recipe.config, world, passes=[bind_options(canonicalize_graph_pass), mine]
            )
    except VacuousCheck as error:
        raise Nothing(str(error)) from None
