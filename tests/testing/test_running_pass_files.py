"""Each expectation of a pass file holds where it should and fails where it should."""

import operator
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from pytest_gtrainer import AnotherFunction, bind_options, extensions, facts
from pytest_gtrainer.checks import CheckError, CheckFailure
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.testing import PassFileError, run_pass_file
from tests.testing.conftest import BODY

FAKE = ("# world: fake 2", "# mesh: fsdp=2")


def negs(gm):
    return gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)


def twice_pass(gm, example_inputs):
    """One more neg at each run."""
    (last, *_) = reversed(negs(gm))
    with gm.graph.inserting_after(last):
        another = gm.graph.call_function(torch.ops.aten.neg.default, (last,))
    another.meta.update(last.meta)
    last.replace_all_uses_with(another, delete_user_cb=lambda user: user is not another)
    return gm


def half_done_pass(gm, example_inputs):
    twice_pass(gm, example_inputs)
    raise ValueError("no such bucket")


def refuses_pass(gm, example_inputs):
    raise ValueError("no such bucket")


def unordered_pass(gm, example_inputs):
    (neg,) = negs(gm)
    next(iter(gm.graph.nodes)).append(neg)
    return gm


OWN = {function.__name__: function for function in (twice_pass, half_done_pass, unordered_pass)}


def run(path):
    return run_pass_file(path, passes=OWN)


def test_a_pass_that_is_given_goes_before_one_of_the_hook_and_that_before_ours(write, monkeypatch):
    path = write("# check: count 1 neg")
    run_pass_file(path)
    hook = {"canonicalize_graph_pass": twice_pass}
    monkeypatch.setattr(extensions, "passes", lambda: hook)
    with pytest.raises(CheckFailure, match="the graph has 2"):
        run_pass_file(path)
    run_pass_file(path, passes={"canonicalize_graph_pass": lambda gm, example_inputs: gm})


@pytest.mark.parametrize(
    ("directives", "idle"),
    [
        (("idle_pass", "# values: same", "# check: then neg", *FAKE), ["idle_pass"]),
        (("idle_pass", "# check: then neg"), ["idle_pass"]),
        (("idle_pass", "# check: then neg", "# again: unchanged"), ["idle_pass"]),
        (("twice_pass; idle_pass", "# check: then neg"), ["idle_pass"]),
        (("idle_pass; twice_pass", "# check: then neg"), ["idle_pass"]),
        (("twice_pass", "# check: then neg"), []),
        (("idle_pass", "# result: unchanged"), []),
        (("half_done_pass", "# raises: ValueError: no such bucket"), []),
    ],
)
def test_a_pass_that_changed_nothing_is_counted(write, directives, idle):
    """A pass that no longer matches kept `values: same` and checks of the input green."""
    own = OWN | {"idle_pass": lambda gm: gm, "half_done_pass": refuses_pass}
    passes, *expectations = directives
    path = write(*expectations, passes=passes)
    with facts.collecting() as collected:
        run_pass_file(path, golden=None, passes=own)
    found = [fact["what"] for fact in facts.of_kind(collected, "idle")]
    assert found == [f"a.fxgraph: {name} changed nothing" for name in idle]


def test_checks_say_file_and_line(write):
    run(write("# check: then wait_tensor", "# check: next neg"))
    with pytest.raises(CheckFailure, match=r"^a.fxgraph:4: next detach\n"):
        run(write("# check: then wait_tensor", "# check: next detach"))


def test_a_check_may_stand_beside_what_it_is_about(write):
    """The checks run in their order, and the second one fails at its line."""
    body = "# check: then neg\nif I:\n  I.x: f32[2]\nif fwd:\n  # check: next {what}\n"
    body += "  neg: f32[2] = aten.neg(I.x)\nif out:\n  yield fwd._.neg\n"
    run(write(body=body.format(what="output")))
    with pytest.raises(CheckFailure, match=r"^a.fxgraph:\d+: next neg\n"):
        run(write(body=body.format(what="neg")))


def test_passes_run_in_order_with_their_options(write):
    passes = "record_pass(level=2, names=['a']); record_pass; canonicalize_graph_pass"
    path = write("# check: count 1 detach", passes=passes)
    seen = []

    def record_pass(gm, example_inputs, **options):
        seen.append(
            (options, [tuple(value.shape) for value in example_inputs], len(gm.graph.nodes))
        )
        return gm

    with pytest.raises(CheckFailure, match="the graph has 0"):
        run_pass_file(path, passes={"record_pass": record_pass})
    assert seen == [({"level": 2, "names": ["a"]}, [(2,)], 6), ({}, [(2,)], 6)]


def test_a_pass_may_come_with_its_options(write):
    """Options come by ``bind_options`` or ``functools.partial``; the file may say more."""

    def record_pass(gm, example_inputs=None, *, level=0, names=()):
        seen.append((level, names))
        return gm

    seen = []
    for bound in (bind_options(record_pass, level=2), partial(record_pass, level=2)):
        path = write(
            "# result: unchanged",
            passes="record_pass; record_pass(names=['a']); record_pass(level=3)",
        )
        run_pass_file(path, passes={"record_pass": bound})
    assert seen == [(2, ()), (2, ["a"]), (3, ())] * 2


def test_a_check_may_speak_of_a_module_that_the_passes_have_emptied(write):
    head = (
        "  with head:\n    detach: f32[4] = aten.detach(_.wait_tensor)\n"
        "  neg: f32[4] = aten.neg(head.detach)"
    )
    body = BODY.replace(
        "  detach: f32[4] = aten.detach(wait_tensor)\n  neg: f32[4] = aten.neg(detach)", head
    )
    run(write("# check: never neg in head", "# check: count 0 detach", body=body))
    with pytest.raises(CheckError, match="nothing in the graph lies in 'tail'"):
        run(write("# check: never neg in tail", body=body))


def test_values_must_be_those_of_before(write):
    run(write(*FAKE, "# values: same", "# check: then neg"))
    with pytest.raises(BitwiseDifference, match=r"a\.fxgraph, after the passes against before"):
        run(write(*FAKE, "# values: same", "# check: then neg", passes="twice_pass"))


OF_SUMS = """\
if I:
  I.x: f32[4, 6]
  I.y: f32[6]
if fwd:
  sum: f32[6] = aten.sum.dim_IntList(I.x, [0])
  add: f32[6] = aten.add.Tensor(sum, I.y)
if out:
  yield fwd._.add
"""


def other_sum_pass(gm, example_inputs):
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    node.args = (node.args[0], [1])
    return gm


def run_other_sum(write, values, body):
    directives = f"# values: {values}", "# check: count 1 aten.sum"
    path = write(*directives, body=body, passes="other_sum_pass")
    run_pass_file(path, passes={"other_sum_pass": other_sum_pass})


@pytest.mark.parametrize("values", ["same", "reordered"])
def test_a_graph_that_does_not_run_any_more_is_a_sentence_with_file_and_node(write, values):
    with pytest.raises(facts.FailedCheck) as failure:
        run_other_sum(write, values, OF_SUMS)
    assert str(failure.value).startswith(
        "a.fxgraph, after the passes against before: the graph after the passes does not run, "
        "node add (aten.add.Tensor) raises RuntimeError: The size of tensor a (4) must match"
    )
    assert "\n" not in str(failure.value)
    assert failure.value.__suppress_context__


@pytest.mark.parametrize("values", ["same", "reordered", "identical"])
def test_a_graph_that_never_ran_is_a_mistake_of_the_file(write, values):
    never = OF_SUMS.replace("I.y: f32[6]", "I.y: f32[5]")
    with pytest.raises(PassFileError, match=r"the graph before the passes does not run, node add "):
        run_other_sum(write, values, never)


def asserting_pass(gm, example_inputs):
    """Adds what refuses NaN and inf."""
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    with gm.graph.inserting_before(node):
        given = node.args[0]
        finite = gm.graph.call_function(torch.ops.aten.isfinite.default, (given,))
        all_of_it = gm.graph.call_function(torch.ops.aten.all.default, (finite,))
        gm.graph.call_function(torch.ops.aten._assert_async.msg, (all_of_it, "not finite"))
    return gm


def test_where_only_some_inputs_end_the_run_they_are_named(write):
    path = write(
        "# values: same", "# check: count 1 aten.sum", body=OF_SUMS, passes="asserting_pass"
    )
    with pytest.raises(
        facts.FailedCheck, match=r"against before, on .*: the graph after the passes"
    ):
        run_pass_file(path, passes={"asserting_pass": asserting_pass})


def test_values_that_differ_are_named_as_the_file_names_them(write):
    """An output by its name there, else by its place."""
    named = BODY.replace("yield fwd._.neg", "w = fwd._.neg")
    for body, name in ((BODY, "output 0"), (named, "output w")):
        with pytest.raises(BitwiseDifference, match=f"first at {name}, element"):
            run(write(*FAKE, "# values: same", "# check: then neg", passes="twice_pass", body=body))


def test_a_second_run_must_change_nothing(write):
    run(write("# again: unchanged", "# check: then neg"))
    with pytest.raises(
        AssertionError,
        match=r"run on their own output, the passes changed it\n(.*\n)*.*gained.*neg",
    ):
        run(write("# again: unchanged", "# check: then neg", passes="twice_pass"))


def test_the_graph_must_stay_as_it_was(write):
    run(write("# result: unchanged", passes="deduplicate_fsdp_unshard_chains_pass"))
    wrong = (
        r"canonicalize_graph_pass changed the graph, which had to stay as it "
        r"was\n(.*\n)*.*lost.*detach"
    )
    with pytest.raises(AssertionError, match=wrong):
        run(write("# result: unchanged"))


def test_a_refusal_must_come_with_its_words_and_change_nothing(write):
    """D11."""
    refused = 'joint_transformer_block_bucketing_reordering_pass(bucket_plan=["layers.0"])'
    run(write("# raises: PlanError: the bucket plan names 'layers.0'", passes=refused))
    run(write("# raises: 'layers.0'", passes=f"deduplicate_fsdp_unshard_chains_pass; {refused}"))
    for words, passes, found in (
        (
            "PlanError: no bucket",
            refused,
            "but it says\n  PlanError: the bucket plan names 'layers.0'",
        ),
        ("PlanError", "canonicalize_graph_pass", "but none was raised"),
        ("no such bucket", "half_done_pass", "which had to stay as it was"),
        ("Plan", refused, "but it says\n  PlanError"),
        ("rror: the bucket plan", refused, "but it says\n  PlanError"),
        ("the bucket plan name", refused, "but it says\n  PlanError"),
        (
            "PlanError: the bucket plan",
            f"{refused}; canonicalize_graph_pass; {refused}",
            "joint_transformer_block_bucketing_reordering_pass raised the expected error, so "
            "canonicalize_graph_pass, joint_transformer_block_bucketing_reordering_pass did not "
            "run: end the passes with the one that raises\n  PlanError: the bucket plan names",
        ),
    ):
        with pytest.raises(AssertionError) as failure:
            run(write(f"# raises: {words}", passes=passes))
        assert found in str(failure.value)


def test_the_graph_is_linted_after_each_pass(write):
    """E6: a use before its definition is reported with node, pass and file."""
    path = write("# check: then neg", passes="canonicalize_graph_pass; unordered_pass")
    with pytest.raises(
        RuntimeError, match=r"unordered_pass left a graph out of order: \w+ \(.*\) reads \w+"
    ) as error:
        run(path)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "# passes:" in text)
    assert error.value.__notes__ == [f"in unordered_pass, of {path.name}:{line}"]


def test_groups_are_those_of_the_files_world(write):
    """The pass sees real groups of the mesh; none is left afterwards."""
    seen = []

    def look_pass(gm, example_inputs):
        from pytest_gtrainer._torch.passes import ALL_GATHER
        from pytest_gtrainer._torch.process_groups import group_ranks

        seen.extend(
            group_ranks(node.args[-1])
            for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
        )
        return gm

    directives = ("# world: fake 4, rank 1", "# mesh: fsdp=2, ep=2", "# check: then neg")
    path = write(*directives, passes="look_pass")
    path.write_text(path.read_text().replace("range(0, 2)", "range(1, 4, 2)"))
    run_pass_file(path, passes={"look_pass": look_pass})
    assert seen == [(1, 3)]
    assert not torch.distributed.is_initialized()


@pytest.mark.gt_world("fake", size=4)
def test_a_world_that_is_up_is_used_if_it_fits(write, gt_world):
    run(write("# world: fake 4", "# check: then neg"))
    with pytest.raises(PassFileError, match="the file's world has 2 ranks, and one of 4 is up"):
        run(write(*FAKE, "# check: then neg"))
    with pytest.raises(PassFileError, match="world is that of rank 3, and that of rank 0 is up"):
        run(write("# world: fake 4, rank 3", "# check: then neg"))


def test_the_rewritten_graph_is_returned(write):
    gm = run(write("# check: then neg"))
    assert operator.countOf([node.op for node in gm.graph.nodes], "call_function") == 3


JOINT = Path(__file__).parents[2] / "fixtures/graphs/joint/without_reordering.fxgraph"


def halved_pass(gm, example_inputs):
    """A mistake: half of a gradient."""
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    with gm.graph.inserting_after(node):
        half = gm.graph.call_function(torch.ops.aten.mul.Scalar, (node, 0.5))
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    half.meta.update(node.meta)
    return gm


@pytest.mark.parametrize("kind", ["identical", "other kernels", "reordered", "rounds elsewhere"])
@pytest.mark.parametrize("passes", ["", "; halved_pass"], ids=["right", "wrong"])
def test_values_are_equal_in_a_kind_on_all_ranks(tmp_path, kind, passes):
    """One sum of two ranks is added in one order, so a bucket changes no bit of it."""
    text = JOINT.read_text().replace("# values: same", f"# values: {kind}")
    text = re.sub(r"# (check|again): .*\n", "", text)
    text = re.sub(r"(# passes: .*)\n", rf"\1{passes}\n# check: then mm\n", text)
    path = tmp_path / "joint.fxgraph"
    path.write_text(text)
    if not passes:
        run_pass_file(path)
        return
    with pytest.raises(
        AnotherFunction, match=r"(?s)after the passes against before: .*another function"
    ):
        run_pass_file(path, passes={"halved_pass": halved_pass})


def test_an_integer_without_a_range_is_refused_with_the_file(write):
    body = """\
if I:
  I.x: f32[3]
  I.n: i64[3]
if fwd:
  mul: f32[3] = aten.mul.Tensor(I.x, I.n)
if out:
  yield fwd._.mul
"""
    path = write("# values: identical", "# check: then mul", body=body)
    with pytest.raises(PassFileError, match=r"a.fxgraph.*n is torch.int64 and is no index of any"):
        run_pass_file(path)
