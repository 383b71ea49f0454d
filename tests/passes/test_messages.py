"""Messages for a user whose graph, model or pass is at fault: the cause by name, not its
consequences.
"""

import operator

import pytest
import torch
from torch import fx

from pytest_gtrainer import (
    apply_graph_passes,
    bind_options,
    bucket_layout,
    data_parallel,
    graphtext,
    joint_transformer_block_bucketing_reordering_pass,
    trace_step,
)
from pytest_gtrainer._torch.passes import ALL_GATHER, WAIT
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.passes import joint as bucketing
from pytest_gtrainer.passes.graph_pass import lint
from pytest_gtrainer.references.eager import shard_eagerly

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def wait_first(gm, example_inputs=None):
    """A pass with a mistake: the first wait stands in front of its launch."""
    launch = next(node for node in gm.graph.nodes if node.target is ALL_GATHER)
    launch.prepend(next(iter(launch.users)))
    return gm


def test_a_graph_out_of_order_is_told_with_pass_bucket_and_parameter(joint, plan):
    """E6: lint alone says "Argument 'all_gather_into_tensor' was used before it has been
    defined".
    """
    step = bind_options(joint_transformer_block_bucketing_reordering_pass, bucket_plan=plan)
    steps = [step, bind_options(wait_first), bind_options(keep)]
    message = (
        r"wait_first left a graph out of order: wait_tensor\w* \(fwd, bucket 'tok_embeddings', "
        r"made from "
        r"tok_embeddings.weight\) reads all_gather_into_tensor\w* \(fwd, bucket 'tok_embeddings'"
    )
    with pytest.raises(RuntimeError, match=message):
        apply_graph_passes(joint.gm, None, steps)


def test_a_node_out_of_order_names_the_users_input_that_it_is_made_from(make_net):
    """The FQN of the batch is a number alone."""
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    traced = trace_step(make_net(1, 8), lambda m, t: m(t).sum(), (tokens,))

    def embed_last(gm, example_inputs=None):
        embedding = next(
            node
            for node in gm.graph.nodes
            if "embedding" in node.name and node.op == "call_function"
        )
        gm.graph.output_node().prepend(embedding)
        return gm

    with pytest.raises(
        RuntimeError,
        match=r"embed_last left .* reads embedding \(.*made from .*weight, input \w+\)",
    ):
        apply_graph_passes(traced.gm, None, [embed_last])


@pytest.mark.parametrize(("inputs", "more"), [(3, ""), (5, " and 2 more")])
def test_a_node_out_of_order_names_three_of_the_inputs_that_it_is_made_from(inputs, more):
    """The node is in no module."""
    graph = fx.Graph()
    given = [graph.placeholder(f"{name}_1") for name in "abcde"[:inputs]]
    for name, node in zip("abcde", given, strict=False):
        node.meta["gt_input"] = {"kind": "input", "fqn": name}
    joined = graph.call_function(torch.stack, (given,))
    graph.output(graph.call_function(torch.neg, (joined,)))
    graph.output_node().prepend(joined)
    message = (
        rf"reads stack \(fwd, no module, made from input a, input b, input c{more}\), which "
        rf"comes after it"
    )
    with pytest.raises(RuntimeError, match=message):
        lint(graph, "last")


def keep(gm, example_inputs=None):
    return gm


def test_a_pass_of_ours_on_its_own_says_so_too(joint, plan, monkeypatch):
    """E6: of a mistake in bucketing, planted here."""
    move = _swapped(monkeypatch)
    with pytest.raises(
        RuntimeError,
        match=r"joint_\w+_pass left a graph out of order: \w+ \(fwd, bucket 'layers.0', made",
    ):
        joint_transformer_block_bucketing_reordering_pass(joint.gm, bucket_plan=plan)
    assert move


def _swapped(monkeypatch):
    """Launches of ``layers.0`` stand behind its wait."""
    build, seen = bucketing._wait_all_gather, []

    def wait(merge, launch):
        found = build(merge, launch)
        if merge.bucket.label == "layers.0":
            seen.append(launch)
            found.append(launch)
        return found

    monkeypatch.setattr(bucketing, "_wait_all_gather", wait)
    return seen


@pytest.mark.parametrize(
    ("results", "words"), [((0, 1), "returns 2 results, the step has"), ((), "returns 0 results")]
)
def test_a_graph_that_lost_outputs_is_no_step(make_net, results, words):
    """A8: it was "not enough values to unpack"."""
    model = make_net(1, 8)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    traced = trace_step(model, lambda m, t: m(t).sum(), (tokens,))
    output = traced.gm.graph.output_node()
    output.args = (tuple(output.args[0][place] for place in results),)
    traced.gm.recompile()
    with pytest.raises(ValueError, match=f"{words}.*did a pass drop or add outputs"):
        traced.replay(model, tokens)


def test_an_activation_that_is_taken_for_a_parameter_can_be_named(gt_mesh):
    """D6: a graph of elsewhere does not say which inputs are parameters; a gathered sequence looks
    like one.
    """
    gm = graphtext.parse(SAVED)
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("gt_input", None)
    with pytest.raises(
        PlanError, match=r"; if (\w+) is no parameter .* say so: \1.meta\['gt_input'\]"
    ) as failure:
        joint_transformer_block_bucketing_reordering_pass(gm, bucket_plan=["layers.0"])
    named = str(failure.value).partition("if ")[2].split()[0]
    (saved,) = [node for node in gm.graph.find_nodes(op="placeholder") if node.name == named]
    saved.meta["gt_input"] = {"kind": "input", "fqn": named}
    joint_transformer_block_bucketing_reordering_pass(gm, bucket_plan=["layers.0"])
    marked = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
        if "fsdp_bucket" in node.meta
    ]
    assert len(marked) == 1


SAVED = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].weight: f32[2]
if I:
  I.saved: f32[2]
if fwd:
  with layers[0]:
    gather: f32[8] = _c10d_functional.all_gather_into_tensor(P.layers[0].weight, 4, fsdp)
    wait: f32[8] = _c10d_functional.wait_tensor(gather)
    sequence: f32[8] = _c10d_functional.all_gather_into_tensor(I.saved, 4, fsdp)
    wait_1: f32[8] = _c10d_functional.wait_tensor(sequence)
    again: f32[8] = _c10d_functional.all_gather_into_tensor(I.saved, 4, fsdp)
    wait_2: f32[8] = _c10d_functional.wait_tensor(again)
if out:
  yield fwd.layers[0].wait
  yield fwd.layers[0].wait_1
  yield fwd.layers[0].wait_2
"""


def test_a_collective_that_nobody_waits_for_is_named(joint, plan):
    """The layout used to raise StopIteration."""
    gm = joint_transformer_block_bucketing_reordering_pass(joint.gm, bucket_plan=plan)
    launch = next(
        n for n in gm.graph.nodes if str(n.target).startswith("_c10d_functional.reduce_scatter")
    )
    (wait,) = launch.users
    wait.target = torch.ops.aten.clone.default
    with pytest.raises(PlanError, match=f"nothing waits for the collective {launch} of "):
        bucket_layout(gm)
    assert WAIT is not wait.target


def test_a_model_that_is_sharded_already_is_not_sharded_again(gt_mesh, make_net, plan):
    """Torch says "Cannot concatenate overlapping meshes", without a parameter."""
    from fixtures.training import llama3_training

    config = llama3_training(gt_mesh, "fp32")
    model = data_parallel(config.model(), gt_mesh)
    with pytest.raises(
        ValueError,
        match=r"weight of the bucket '[\w.+]+' is sharded already, over .* has the same ranks",
    ):
        shard_eagerly(model, config)


def test_what_else_lint_finds_is_told_in_its_words():
    gm = fx.symbolic_trace(lambda x: x + 1)
    gm.graph.find_nodes(op="call_function", target=operator.add)[0].prepend(
        gm.graph.get_attr("missing")
    )
    with pytest.raises(RuntimeError, match="references nonexistent attribute missing"):
        lint(gm.graph, "last")
