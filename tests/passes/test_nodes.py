"""Classification of nodes: where a node belongs, and its effects beside its value."""

import math
import operator

import pytest
import torch
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer._torch.passes import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    add_control_dependencies,
)
from pytest_gtrainer.graph.collectives import PlanError, fsdp_reduce_scatters, wait_of
from pytest_gtrainer.graph.nodes import (
    direction,
    has_effect,
    is_collective,
    is_random,
    is_view,
    mutates,
    node_fqn,
    storage_of,
    writes,
    written_operands,
)

aten = torch.ops.aten
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default


def call(target, *args, **kwargs):
    """A node that calls ``target``; the letters x, y and z among its arguments, in lists too, are
    nodes.
    """
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in "xyz"}

    def mapped(value):
        return (
            [mapped(item) for item in value]
            if isinstance(value, list)
            else inputs.get(value, value)
        )

    given = {key: mapped(value) for key, value in kwargs.items()}
    return graph.call_function(target, tuple(map(mapped, args)), given)


def target_of(value):
    """Return the id of a case."""
    return (
        str(value.target).partition(" at 0x")[0] if isinstance(value, fx.Node) else None
    )  # alike in every worker


STACK = {"0": ("layers.0", object), "1": ("layers.0.w", object)}


@pytest.mark.parametrize(
    ("meta", "fqn"),
    [
        ({}, ""),
        ({"custom": {"module_fqn": "loss"}, "nn_module_stack": STACK}, "loss"),
        ({"custom": {"chunk_id": 1}, "nn_module_stack": STACK}, "layers.0.w"),
        ({"custom": None, "fwd_nn_module_stack": STACK}, "layers.0.w"),
        ({"custom": {"module_fqn": ""}, "nn_module_stack": {}}, ""),
    ],
)
def test_the_module_of_a_node(meta, fqn):
    """D12: the annotation, else the innermost module of the stack."""
    node = call(aten.neg.default, "x")
    node.meta.update(meta)
    assert node_fqn(node) == fqn


def test_the_direction_of_a_node():
    """A3: the mark, and nothing else."""
    node = call(aten.neg.default, "x")
    assert direction(node) == "fwd"
    node.meta["autograd_backward"] = True
    assert direction(node) == "bwd"


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((False, False), "fwd"),
        ((True, True), "bwd"),
        ((False, True), "fwd"),
        ((True, False), "fwd"),
    ],
)
def test_the_direction_of_a_bucket_of_torch(marks, expected):
    """A3: that of what it serves; the forward's if both directions read it, as it stands before
    both.
    """
    bucket = call(ALL_GATHER, "x", 2, "a group")
    bucket.meta["bucketing_custom_sources"] = []
    for mark in marks:
        bucket.graph.call_function(aten.neg.default, (bucket,)).meta["autograd_backward"] = mark
    assert direction(bucket) == expected


@pytest.mark.parametrize(
    ("node", "random"),
    [
        (call(aten.rand_like.default, "x"), True),
        (call(aten.bernoulli_.float, "x"), True),
        (call(aten.neg.default, "x"), False),
        (call(SDPA, "x", "y", "z", 0.5), True),
        (call(SDPA, "x", "y", "z", 0.0, True), False),
        (call(SDPA, "x", "y", "z", dropout_p=0.5), True),
        (call(SDPA, "x", "y", "z", dropout_p=0.0), False),
        (call(SDPA, "x", "y", "z"), False),
        (call(torch.ops.higher_order.run_and_save_rng_state, aten.neg.default, "x"), True),
        (call(torch.ops.higher_order.cond, "x", "y", "z", []), False),
        (call(operator.getitem, "x", 0), False),
    ],
    ids=target_of,
)
def test_what_draws_random_numbers(node, random):
    """M5: attention draws only with dropout, however that is written."""
    assert is_random(node) == random, node.format_node()


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (call(aten.add_.Tensor, "x", "y"), ["x"]),
        (call(aten.add.Tensor, "x", "y"), []),
        (call(aten.add.out, "x", "y", out="z"), ["z"]),
        (call(aten._foreach_add_.List, ["x", "y"], ["z", "z"]), ["x", "y"]),
        (call(aten.native_batch_norm.default, "x", None, None, "y", "z", True, 0.1, 1e-5), []),
        (
            call(aten._native_batch_norm_legit.default, "x", None, None, "y", "z", True, 0.1, 1e-5),
            ["y", "z"],
        ),
        (call(operator.iadd, "x", "y"), ["x"]),
        (call(operator.imatmul, "x", "y"), ["x"]),
        (call(operator.setitem, "x", 0, "y"), ["x"]),
        (call(operator.add, "x", "y"), []),
        (call(operator.iadd, 2, "y"), []),
    ],
    ids=target_of,
)
def test_what_is_written_to(node, written):
    """Operands are written by position or by keyword, one or several; batch norm says so in one of
    its two spellings.
    """
    assert [operand.name for operand in written_operands(node)] == written
    assert mutates(node) == bool(written)


def test_a_number_is_not_written_to():
    """``size += 1`` in a graph of Dynamo makes another number."""
    node = call(operator.iadd, "x", 1)
    node.args[0].meta["example_value"] = 3
    assert written_operands(node) == []


def test_the_memory_of_what_python_writes_to():
    """``x += y`` gives ``x``, and ``x[0] = y`` gives nothing."""
    added, item = call(operator.iadd, "x", "y"), call(operator.setitem, "x", 0, "y")
    assert storage_of(added) is added.args[0]
    assert storage_of(item) is item
    assert writes(added.graph) == {added.args[0]: [added]}


def test_the_memory_of_what_a_collective_in_place_gives():
    """Its wait shows the operand, too: who writes to that writes to the operand."""
    reduced = call(torch.ops._c10d_functional.all_reduce_.default, "x", "sum", "a group")
    waited = reduced.graph.call_function(WAIT, (reduced,))
    added = reduced.graph.call_function(aten.add_.Tensor, (waited, 1))
    assert storage_of(waited) is reduced.args[0]
    assert writes(reduced.graph) == {reduced.args[0]: [reduced, added]}


def test_what_shows_the_memory_of_its_operand():
    views = (
        aten.view.default,
        aten.t.default,
        aten._unsafe_view.default,
        aten.split.Tensor,
        aten.detach.default,
    )
    assert [target for target in views if not is_view(target)] == []
    others = (aten.add_.Tensor, aten.clone.default, aten.neg.default, operator.getitem)
    assert [target for target in others if is_view(target)] == []


def of_users(x):
    return x


@pytest.mark.parametrize(
    ("node", "effect"),
    [
        (call(aten.neg.default, "x"), False),
        (call(aten.rand_like.default, "x"), True),
        (call(aten.add_.Tensor, "x", "y"), True),
        (call(aten._assert_async.msg, "x", "words"), True),
        (call(ALL_GATHER, "x", 2, "a group"), True),
        (call(WAIT, "x"), True),
        (call(torch.ops._dtensor.shard_dim_alltoall.default, "x", 0, 1, "a group"), True),
        (call(torch.ops.higher_order.cond, "x", "y", "z", []), True),
        (call(operator.mul, "x", 2), False),
        (call(math.ceil, "x"), False),
        (call(max, "x", 2), False),
        (call(getattr, "x", "shape"), False),
        (call(operator.setitem, "x", 0, 1), True),
        (call(operator.delitem, "x", 0), True),
        (call(operator.iadd, "x", "y"), True),
        (call(operator.imatmul, "x", "y"), True),
        (call(operator.and_, "x", "y"), False),
        (call(operator.index, "x"), False),
        (call(operator.inv, "x"), False),
        (call(setattr, "x", "grad", "y"), True),
        (call(delattr, "x", "grad"), True),
        (call(of_users, "x"), True),
    ],
    ids=target_of,
)
def test_what_must_stay_though_nobody_reads_it(node, effect):
    """M5: and what cannot be judged from here."""
    assert has_effect(node) == effect, node.format_node()
    assert not is_collective(node) or effect


def test_inputs_outputs_and_calls_of_modules_stay_and_constants_go():
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [
        x,
        graph.call_method("neg", (x,)),
        graph.call_module("a", (x,)),
        graph.get_attr("b"),
        graph.output(x),
    ]
    assert [node.op for node in nodes if not has_effect(node)] == ["get_attr"]


TWO_GRADIENTS = """
one = group([0, 1])
other = group([0, 1])
if P:
  P.a: f32[2]
  P.b: f32[2]
if I:
  I.x: f32[4]
if bwd:
  with layers[0]:
    first: f32[2] = _c10d_functional.reduce_scatter_tensor(I.x, "sum", 2, one)
    wait_first: f32[2] = _c10d_functional.wait_tensor(first)
    second: f32[2] = _c10d_functional.reduce_scatter_tensor(I.x, "sum", 2, one)
    wait_second: f32[2] = _c10d_functional.wait_tensor(second)
if out:
  a = bwd.layers[0].wait_first
  b = bwd.layers[0].wait_second
"""


def add_of_replicas(group):
    """A change to a reduce-scatter: an all-reduce behind it, in a group."""

    def change(launch):
        (wait,) = launch.users
        with launch.graph.inserting_after(wait):
            reduced = launch.graph.call_function(ALL_REDUCE, (wait, "sum", group))
        with launch.graph.inserting_after(reduced):
            waited = launch.graph.call_function(WAIT, (reduced,))
        wait.replace_all_uses_with(waited, lambda user: user is not reduced)

    return change


CHANGED = {
    "reduction": lambda launch: setattr(launch, "args", (launch.args[0], "avg", *launch.args[2:])),
    "number of ranks": lambda launch: setattr(
        launch, "args", (*launch.args[:2], 4, launch.args[3])
    ),
    "group": lambda launch: setattr(launch, "args", (*launch.args[:3], "other")),
    "dtype": lambda launch: launch.meta.update(val=launch.meta["val"].bfloat16()),
    "device": lambda launch: launch.meta.update(val=torch.empty(2, device="cpu")),
    "replicas": add_of_replicas("replicas"),
}


def signatures(*changes):
    """Those of two reduce-scatters of gradients, changed."""
    gm = graphtext.parse(TWO_GRADIENTS)
    launches = gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    for launch, change in zip(launches, changes, strict=False):
        launch.meta["val"] = torch.empty(2, device="meta")
        change(launch)
    return [member.signature for member in fsdp_reduce_scatters(gm)]


def nothing(launch):
    """No change."""


@pytest.mark.parametrize("what", CHANGED)
def test_members_that_differ_in_anything_have_other_signatures(what):
    """D7: and so are never merged; the twins agree."""
    change = CHANGED[what]
    message = f"collectives that differ in their {what} would travel in one bucket"
    assert len(signatures(nothing, change)) == 2
    assert len(set(signatures(nothing, change))) == 2, message
    assert len(set(signatures(change, change))) == len(set(signatures(nothing, nothing))) == 1
    of_other_replicas = signatures(add_of_replicas("replicas"), add_of_replicas("others"))
    assert len(set(of_other_replicas)) == 2, (
        "gradients that other replicas share would travel in one bucket"
    )


def test_a_gradient_that_is_returned_twice_has_its_first_name():
    """A10: of a tied parameter, whose gradient stands in two places of the output."""
    gm = graphtext.parse(
        TWO_GRADIENTS.replace("b = bwd.layers[0].wait_second", "b = bwd.layers[0].wait_first")
    )
    (member,) = fsdp_reduce_scatters(gm)
    assert (member.parameter, member.position) == ("a", 0), (
        "the name of a gradient that is returned as a and as b"
    )


def test_a_reduction_that_nobody_waits_for_is_none_of_a_gradient():
    """A pass has cut the graph short; the other reduction is found."""
    gm = graphtext.parse(TWO_GRADIENTS)
    wait = next(node for node in gm.graph.nodes if node.name == "wait_first")
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    (member,) = fsdp_reduce_scatters(gm)
    assert (member.parameter, member.wait.name) == ("b", "wait_second")


def test_a_control_dependency_that_reads_a_collective_is_no_wait():
    """It is one if the operator in it is; a reader, or one that only comes later, is none."""
    gm = graphtext.parse(TWO_GRADIENTS)
    launch, _ = gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    wait = next(iter(launch.users))
    with gm.graph.inserting_before(wait):
        reader = gm.graph.call_function(torch.ops.aten.neg.default, (launch,))
        later = gm.graph.call_function(torch.ops.aten.neg.default, (launch.args[0],))
    for node in (reader, later):
        node.meta["val"] = torch.empty(2, device="meta")
    first = launch.args[0]
    add_control_dependencies(gm.graph, {reader: first, later: launch, wait: first})
    assert wait_of(launch).name == wait.name
    kept = next(node for node in gm.graph.nodes if node.name == wait.name)
    kept.replace_all_uses_with(first)
    gm.graph.erase_node(kept)
    with pytest.raises(PlanError, match="nothing waits for the collective"):
        wait_of(launch)
