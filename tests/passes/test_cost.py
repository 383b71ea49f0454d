"""Cost of the joint pass in counts, which do not flake; times are in ``benchmarks/passes.py``."""

from collections import Counter

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from pytest_gtrainer import apply_graph_passes, construct_default_graph_passes
from pytest_gtrainer.passes.joint import (
    joint_transformer_block_bucketing_reordering_pass as joint_pass,
)

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


PATCHED = {"walks": "nodes", "searches": "find_nodes", "lints": "lint", "recompiles": "python_code"}


@pytest.fixture
def counted(monkeypatch, shared_joint):
    """``counted(n_layers, run)``: what ``run(gm, plan)`` does to the graph, and operators it runs
    to make values.
    """

    def count(n_layers, run):
        gm = shared_joint(n_layers=n_layers).gm
        plan = [
            "tok_embeddings",
            *(f"layers.{index}" for index in range(n_layers)),
            ["norm", "lm_head"],
        ]
        found = Counter()
        with monkeypatch.context() as patch:
            for what, name in PATCHED.items():
                patch.setattr(fx.Graph, name, counting(found, what, getattr(fx.Graph, name)))
            patch.setattr(
                FakeTensorMode, "dispatch", counting(found, "operators", FakeTensorMode.dispatch)
            )
            run(gm, plan)
            with _mode_of(gm):
                torch.empty(1)
        return found

    return count


def counting(found, what, original):
    """A method, or the getter of a property, that counts its calls."""

    def counted(*args, **kwargs):
        found[what] += 1
        return (original.fget if isinstance(original, property) else original)(*args, **kwargs)

    return property(counted) if isinstance(original, property) else counted


def _mode_of(gm):
    return next(node.meta["val"].fake_mode for node in gm.graph.nodes if node.op == "placeholder")


def bucketing(gm, plan):
    assert joint_pass.gt_rewrite(gm, None, bucket_plan=plan)


def pipeline(gm, plan):
    apply_graph_passes(
        gm, None, construct_default_graph_passes(bucket_plan=plan, reshard_after_forward=True)
    )


def test_no_walk_over_the_graph_and_no_operator_per_bucket(counted):
    """The number of walks does not grow with the layers; the one operator is the probe's own, so
    counting works.

    Merging is built from shapes alone: where upstream traces a merge for each new signature, there
    is no trace.
    """
    two, four = counted(2, bucketing), counted(4, bucketing)
    assert two == four
    assert two["walks"] + two["searches"] <= 20
    assert two["operators"] == 1


def test_a_pipeline_lints_and_recompiles_once_whatever_the_depth(counted):
    """Neither does any other pass of it walk the graph once a bucket, a parameter or a node."""
    two, four = counted(2, pipeline), counted(4, pipeline)
    assert two == four
    assert (two["lints"], two["recompiles"], two["operators"]) == (1, 1, 1)
    assert two["walks"] + two["searches"] <= 80
