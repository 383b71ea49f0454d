"""What the clean-up removes, and what it must keep."""

import pytest
import torch
from torch import fx

from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.tracing._torch import new_fake_mode

aten = torch.ops.aten


class Builder:
    """A graph over one fp32 [2, 3] input, nodes with values."""

    def __init__(self, shape=(2, 3)) -> None:
        self.graph = fx.Graph()
        self.mode = new_fake_mode()
        self.x = self.graph.placeholder("x")
        with self.mode:
            self.x.meta["val"] = torch.empty(shape)

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def returning(self, *nodes):
        self.graph.output(nodes)
        return canonicalize_graph_pass(fx.GraphModule({}, self.graph))


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "identity",
    [
        [aten.detach.default],
        [aten.view.default, [2, 3]],
        [aten.reshape.default, [2, -1]],
        [aten.expand.default, [2, 3]],
    ],
    ids=lambda identity: identity[0]._schema.name,
)
def test_detaches_and_identity_views_go(identity):
    build = Builder()
    doubled = build.call(aten.mul.Tensor, build.x, 2)
    operator, *shape = identity
    same = build.call(operator, doubled, *shape)
    gm = build.returning(build.call(aten.neg.default, same))
    assert targets(gm) == [aten.mul.Tensor, aten.neg.default]
    assert gm(torch.ones(2, 3))[0].tolist() == [[-2.0] * 3] * 2


@pytest.mark.parametrize("change", [(aten.view.default, [3, 2]), (aten.view.dtype, torch.int32), (aten.t.default,)])
def test_views_that_change_something_stay(change):
    build = Builder()
    changed = build.call(change[0], build.x, *change[1:])
    assert targets(build.returning(build.call(aten.neg.default, changed))) == [change[0], aten.neg.default]


def test_an_output_does_not_become_an_input():
    build = Builder()
    assert targets(build.returning(build.call(aten.detach.default, build.x))) == [aten.detach.default]


def test_data_dependent_extents_are_recognised_where_equal_and_kept_where_unknown():
    """Rows of experts have sizes that no trace knows: comparing them must not guard."""
    build = Builder()
    with build.mode:
        rows = build.mode.shape_env.create_unbacked_symint()
        build.x.meta["val"] = torch.empty(rows, 4)
    same = build.graph.call_function(aten.view.default, (build.x, [-1, 4]))
    split = build.graph.call_function(aten.view.default, (same, [-1, 2]))
    with build.mode:
        same.meta["val"] = torch.empty(rows, 4)
        split.meta["val"] = torch.empty(rows * 2, 2)
    gm = build.returning(build.graph.call_function(aten.neg.default, (split,)))
    assert [node.args[1] for node in gm.graph.nodes if node.target is aten.view.default] == [[-1, 2]]
