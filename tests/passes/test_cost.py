"""What the joint pass costs, in counts, which do not flake; times are in ``benchmarks/passes.py``."""

from collections import Counter

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from pytest_gtrainer.passes.graph_pass import rewrite_of
from pytest_gtrainer.passes.joint import joint_transformer_block_bucketing_reordering_pass as joint_pass

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


@pytest.fixture
def counted(monkeypatch, make_joint):
    """``counted(n_layers)``: walks over the graph, and operators run to make values, of one rewrite."""

    def count(n_layers):
        gm = make_joint(n_layers).gm
        plan = ["tok_embeddings", *(f"layers.{index}" for index in range(n_layers)), ["norm", "lm_head"]]
        found = Counter()
        nodes, dispatch = fx.Graph.nodes.fget, FakeTensorMode.dispatch

        def walked(graph):
            found["walks"] += 1
            return nodes(graph)

        def dispatched(mode, func, *args, **kwargs):
            found["operators"] += 1
            return dispatch(mode, func, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(fx.Graph, "nodes", property(walked))
            patch.setattr(FakeTensorMode, "dispatch", dispatched)
            assert rewrite_of(joint_pass)(gm, None, bucket_plan=plan)
            with _mode_of(gm):
                torch.empty(1)
        return found

    return count


def _mode_of(gm):
    return next(node.meta["val"].fake_mode for node in gm.graph.nodes if node.op == "placeholder")


def test_no_walk_over_the_graph_and_no_operator_per_bucket(counted):
    """The number of walks does not grow with the layers; the one operator is the probe's own, so counting works."""
    two, four = counted(2), counted(4)
    assert two["walks"] == four["walks"] <= 12
    assert two["operators"] == four["operators"] == 1
