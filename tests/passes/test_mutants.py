"""Mutants of our passes, and what fails because of each; the table is in ``docs/passes.md``.

A mutant replaces a part of a pass. Its killer passes without it and must fail with it: a pass file,
a conformance rule, or a test. A suite that lets a mutant live is vacuous where the mutant sits.
"""

import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_gtrainer import facts, get_default_transformer_block_buckets
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import RULES, judge
from pytest_gtrainer.graph import collectives
from pytest_gtrainer.graph.bucket_plan import Plan, sort_key
from pytest_gtrainer.passes import canonicalize, joint, pipeline, remat
from pytest_gtrainer.passes import collectives as single
from pytest_gtrainer.passes.joint import BucketBuilder
from pytest_gtrainer.testing import run_pass_file
from tests.passes import test_bucketing

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
MUTANTS = {}


def mutant(words, killed_by):
    """Register ``plant(monkeypatch)``; ``killed_by`` is a pass file, "kind of pass::conformance
    rule", or "test module::test function".
    """

    def register(plant):
        MUTANTS[words] = SimpleNamespace(plant=plant, killed_by=killed_by)
        return plant

    return register


@mutant("members in execution order", "bucketing::D2")
def execution_order(patch):
    patch.setattr(joint, "sort_key", lambda order, *args: sort_key("execution", *args))


@mutant("members of one module in another order than registered", "bucketing::D2")
def by_module(patch):
    def key(order, parameters, position, managed=None):
        place = {}
        for fqn in managed or parameters:
            place.setdefault(fqn.rpartition(".")[0], len(place))
        return lambda bucket, member: (
            place[member.parameter.rpartition(".")[0]],
            -position(member),
        )

    patch.setattr(joint, "sort_key", key)


@mutant("forward and backward in one bucket", "joint/recomputed_gathers.fxgraph")
def one_direction(patch):
    merges = joint._merge_members
    patch.setattr(
        joint,
        "_merge_members",
        lambda gm, plan, members, order, direction: merges(gm, plan, members, order, "fwd"),
    )


@mutant(
    "a wait placed after its use",
    "test_reordering::test_a_launch_stands_behind_its_inputs_and_before_its_wait",
)
def late_wait(patch):
    def late(*args):
        return [
            replace(m, first_wait=max(member.wait for member in m.members)) for m in merges(*args)
        ]

    merges = joint._merge_members
    patch.setattr(joint, "_merge_members", late)
    patch.setattr("torch.fx.Graph.lint", lambda graph: None)  # the test has to see it by itself


@mutant(
    "a prefetch across the boundary of forward and backward", "joint/recomputed_gathers.fxgraph"
)
def across_the_boundary(patch):
    kept = []

    def both(merges, prefetch):
        kept.extend(merges)
        return build(kept, prefetch) if any(m.direction == "bwd" for m in merges) else {}

    build = joint._build_all_gathers
    patch.setattr(joint, "_build_all_gathers", both)


@mutant(
    'the final bucket without "loss"',
    "test_pipeline::test_the_loss_is_in_the_last_bucket_if_it_is_chunked_cross_entropy",
)
def without_loss(patch):
    def plan(n_layers, **options):
        return get_default_transformer_block_buckets(
            n_layers, **{**options, "chunked_loss_enabled": False}
        )

    patch.setattr(pipeline, "get_default_transformer_block_buckets", plan)


@mutant(
    'the final bucket always with "loss"',
    "test_pipeline::test_the_loss_is_in_the_last_bucket_if_it_is_chunked_cross_entropy",
)
def always_loss(patch):
    def plan(n_layers, **options):
        return get_default_transformer_block_buckets(
            n_layers, **{**options, "chunked_loss_enabled": True}
        )

    patch.setattr(pipeline, "get_default_transformer_block_buckets", plan)


@mutant("a dropped parameter", "bucketing::D1")
def dropped(patch):
    merges = joint._merge_members
    patch.setattr(
        joint,
        "_merge_members",
        lambda gm, plan, given, *rest: merges(gm, plan, [given[0], *given[2:]], *rest),
    )


@mutant("a parameter in no bucket is not reported", "joint/refused_uncovered_parameter.fxgraph")
def no_coverage(patch):
    patch.setattr(joint, "_check_plan", lambda *args: None)


@mutant("an all-gather in the wrong group", "joint/groups_stay_apart.fxgraph")
def groups_merged(patch):
    signature = collectives.FsdpCollective.signature.fget
    patch.setattr(
        collectives.FsdpCollective, "signature", property(lambda member: signature(member)[:1])
    )


@mutant("all-gathers stay in their group", "reassignment::F1")
def no_extra_group(patch):
    patch.setattr(single, "extra_group", lambda name: name)


@mutant("every all-gather of a group moves", "process_groups/fsdp_moves.fxgraph")
def all_move(patch):
    def every(gm):
        launches = gm.graph.find_nodes(op="call_function", target=collectives.ALL_GATHER)
        return [SimpleNamespace(launch=launch, parameter="") for launch in launches]

    patch.setattr(single, "fsdp_all_gathers", every)


@mutant("gathered members leave as strided views", "bucketing::D9")
def strided(patch):
    patch.setattr(BucketBuilder, "contiguous", lambda build, node: node)


@mutant("new nodes of the backward are not marked", "bucketing::D1")
def unmarked(patch):
    init = BucketBuilder.__init__

    def without_mark(build, *args):
        init(build, *args)
        build.meta.pop("autograd_backward", None)

    patch.setattr(BucketBuilder, "__init__", without_mark)


@mutant(
    "the next all-gather is launched behind the wait",
    "test_reordering::test_the_next_all_gather_is_launched_before_the_wait_of_this_one",
)
def no_prefetch(patch):
    build = joint._build_all_gathers
    patch.setattr(joint, "_build_all_gathers", lambda merges, prefetch: build(merges, False))


@mutant(
    "a reduce-scatter is waited for at once",
    "test_reordering::test_a_reduce_scatter_is_waited_for_after_the_launch_of_the_next",
)
def no_deferral(patch):
    build = joint._build_reduce_scatters
    patch.setattr(
        joint, "_build_reduce_scatters", lambda graph, merges, defer: build(graph, merges, False)
    )


@mutant(
    "ranks that pad do not prefetch",
    "test_bucketing::test_uneven_shards_do_not_change_the_sequence_of_collectives",
)
def pads_decide(patch):
    def unless_padded(merges, prefetch):
        chains = (node for merge in merges for member in merge.members for node in member.chain)
        padded = any(node.target is aten.constant_pad_nd.default for node in chains)
        return build(merges, prefetch and not padded)

    build = joint._build_all_gathers
    patch.setattr(joint, "_build_all_gathers", unless_padded)


@mutant(
    "the backward's first all-gather where its parameter is read",
    "test_first_backward_gather::test_a_chain_that_leads_to_it_marks_no_place",
)
def not_ahead(patch):
    patch.setattr(
        joint, "_hoist_first_backward_all_gather", lambda gm, plan, merges, direction: merges
    )


@mutant("a collective crosses a write", "joint/refused_write_between.fxgraph")
def writes_unseen(patch):
    patch.setattr(joint, "writes", lambda graph: {})


@mutant("a draw crosses another one", "joint/refused_draw_among_three_members.fxgraph")
def draws_unseen(patch):
    patch.setattr(joint, "is_random", lambda node: False)


@mutant(
    "a tie is not reported",
    "test_tied_parameters::test_graph_and_eager_refuse_it_in_the_same_words",
)
def ties_unseen(patch):
    patch.setattr(Plan, "check_ties", lambda plan, tied: None)


@mutant("replicas reduce the whole gradient first", "hsdp/both_are_bucketed.fxgraph")
def not_swapped(patch):
    patch.setattr(single, "_swap_of", lambda member: None)


@mutant("a duplicate of another dtype is dropped", "deduplicate/no_duplicates.fxgraph")
def any_duplicate(patch):
    patch.setattr(collectives.FsdpCollective, "signature", property(lambda member: ()))


@mutant("recomputed nodes share the metadata of the first", "remat::M2")
def shared_metadata(patch):
    patch.setattr(remat, "copy", SimpleNamespace(deepcopy=lambda value: value))


@mutant("random numbers are drawn again", "remat/refused_random_numbers.fxgraph")
def drawn_again(patch):
    patch.setattr(remat, "is_random", lambda node: False)


@mutant(
    "a view of another shape is an identity",
    "canonicalize/views_that_change_something_stay.fxgraph",
)
def any_view(patch):
    patch.setattr(canonicalize, "_same_layout", lambda before, after: True)


@mutant("what nobody reads has no effect", "dead_code/what_has_an_effect_stays.fxgraph")
def no_effect(patch):
    patch.setattr(canonicalize, "has_effect", lambda node: node.op in ("placeholder", "output"))


PASSES = {
    "bucketing": joint.joint_transformer_block_bucketing_reordering_pass,
    "reassignment": single.reassign_collective_pgs_pass,
    "remat": remat.selective_activation_remat_pass,
}
FILES = [words for words, one in MUTANTS.items() if one.killed_by.endswith(".fxgraph")]
BY_RULES = [words for words, one in MUTANTS.items() if one.killed_by.partition("::")[0] in PASSES]
TESTS = [words for words in MUTANTS if words not in (*FILES, *BY_RULES)]
KILLED = (AssertionError, pytest.fail.Exception, RuntimeError)  # the last is what a lint raises


uneven_joint_of = test_bucketing.uneven_joint_of  # a fixture of killers there


def run_file(name):
    run_pass_file(ROOT / "fixtures" / "graphs" / name)


def run_test(request, name):
    """Every case of a test function, with its fixtures."""
    module, function = name.split("::")
    test = getattr(importlib.import_module(f"tests.passes.{module}"), function)
    for given in cases_of(test):
        fixtures = [
            fixture for fixture in inspect.signature(test).parameters if fixture not in given
        ]
        test(**given, **{fixture: request.getfixturevalue(fixture) for fixture in fixtures})


def cases_of(test):
    marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    for names, values in marks:
        rows = [(value,) for value in values] if isinstance(names, str) else values
        names = [names] if isinstance(names, str) else names
        yield from (dict(zip(names, row, strict=True)) for row in rows)
    if not marks:
        yield {}


@pytest.mark.parametrize("words", FILES)
def test_a_pass_file_kills_the_mutant(words, monkeypatch):
    run_file(MUTANTS[words].killed_by)
    MUTANTS[words].plant(monkeypatch)
    with pytest.raises(KILLED):
        run_file(MUTANTS[words].killed_by)


@pytest.mark.gt_world("fake", size=4, rank=1)
@pytest.mark.parametrize("words", BY_RULES)
def test_a_conformance_rule_kills_the_mutant(request, words, monkeypatch):
    """``tests/conformance/test_ours.py`` shows that the rule holds without it."""
    kind, rule = MUTANTS[words].killed_by.split("::")
    MUTANTS[words].plant(monkeypatch)
    # The summary of the suite says nothing of broken rules that this test provokes.
    monkeypatch.setattr(facts, "_sinks", [])
    with pytest.raises(AssertionError, match=f"^{rule} "):
        judge(RULES[rule], Adapter(PASSES[kind], kind, strict=True), request)


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize("words", TESTS)
def test_a_test_kills_the_mutant(request, joint, words, monkeypatch):
    """The graph is traced before: no mutant is in it."""
    MUTANTS[words].plant(monkeypatch)
    with pytest.raises(KILLED):
        run_test(request, MUTANTS[words].killed_by)


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize("name", sorted({MUTANTS[words].killed_by for words in TESTS}))
def test_without_a_mutant_the_killer_passes(request, name):
    """The twin: it was the mutant that failed there."""
    run_test(request, name)


def test_the_documentation_lists_every_mutant():
    """And nothing that is not planted here."""
    lines = (ROOT / "docs" / "passes.md").read_text().partition("## Mutants")[2].splitlines()
    rows = [
        tuple(cell.strip(" `") for cell in line.strip("|").split(" | "))
        for line in lines
        if line.startswith("| ")
    ]
    assert rows[1:] == [(words, one.killed_by) for words, one in MUTANTS.items()]
