"""The digest of generated graphs: no order of the schedule changes it, every change of the dataflow
does.
"""

import copy
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

from pytest_gtrainer.graphtext import lines_of
from pytest_gtrainer.graphtext.dataflow import dataflow
from pytest_gtrainer.graphtext.equivalence import Numbers, digests_of
from pytest_gtrainer.graphtext.scopes import is_computed
from tests.graphtext.generated import graphs

pytestmark = pytest.mark.second_tier

aten = torch.ops.aten


def in_another_order(gm: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The same nodes in another topological order, inputs first and the output last."""
    draw = random.Random(seed)
    graph, copies = fx.Graph(), {}
    waiting = [node for node in gm.graph.nodes if node.op != "output"]
    while waiting:
        inputs = [node for node in waiting if node.op == "placeholder"][:1]
        ready = inputs or [
            node for node in waiting if all(operand in copies for operand in node.all_input_nodes)
        ]
        node = draw.choice(ready)
        waiting.remove(node)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.node_copy(gm.graph.output_node(), copies.__getitem__)
    return fx.GraphModule(gm, graph)


def assert_same_dataflow(gm: fx.GraphModule, other: fx.GraphModule) -> None:
    numbers = Numbers()
    one, another = (digests_of(dataflow(lines_of(graph)), numbers) for graph in (gm, other))
    assert one.whole == another.whole
    assert sorted(one.values) == sorted(another.values)


@settings(max_examples=60)
@given(graphs(), st.integers(0, 1000))
def test_no_topological_order_changes_the_digest(drawn, seed):
    gm, _ = drawn
    assert_same_dataflow(gm, in_another_order(gm, seed))


def computed(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_computed(node)]


@st.composite
def changed(draw: st.DrawFn) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A graph, and the same with one operator, literal, operand or type changed."""
    gm, _ = draw(graphs())
    other = copy.deepcopy(gm)
    node = draw(st.sampled_from(computed(other)))
    change = draw(st.sampled_from([change_operator, change_literal, change_operand, change_type]))
    assume(change(draw, other, node))
    return gm, other


def change_operator(draw: st.DrawFn, gm: fx.GraphModule, node: fx.Node) -> bool:
    node.target = aten.tan.default if node.target is not aten.tan.default else aten.cos.default
    return True


def change_literal(draw: st.DrawFn, gm: fx.GraphModule, node: fx.Node) -> bool:
    node.args = (*node.args, 17)
    return True


def change_operand(draw: st.DrawFn, gm: fx.GraphModule, node: fx.Node) -> bool:
    """Another value that is not computed alike."""
    nodes = [known for known in gm.graph.nodes if known.op == "placeholder"] + computed(gm)
    graph = dataflow(lines_of(gm))
    known_digests = dict(zip(nodes, digests_of(graph, Numbers()).values, strict=True))
    now = draw(st.sampled_from(nodes))
    was = next((operand for operand in node.all_input_nodes if operand in known_digests), None)
    is_before = list(gm.graph.nodes).index(now) < list(gm.graph.nodes).index(node)
    if was is None or not is_before or known_digests[was] == known_digests[now]:
        return False
    node.replace_input_with(was, now)
    return True


def change_type(draw: st.DrawFn, gm: fx.GraphModule, node: fx.Node) -> bool:
    node.meta["val"] = [torch.empty(7, 5, device="meta")]
    return True


@settings(max_examples=100)
@given(changed())
def test_every_change_of_the_dataflow_changes_it(pair):
    numbers = Numbers()
    one, another = (digests_of(dataflow(lines_of(graph)), numbers) for graph in pair)
    assert one.whole != another.whole
