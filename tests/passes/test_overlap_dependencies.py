"""Control dependencies: the order of launches and waits, for a compiler that schedules by
itself.
"""

import copy
from itertools import pairwise

import pytest
import torch

from pytest_gtrainer import bucket_layout
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer._torch.passes import ALL_GATHER, REDUCE_SCATTER, is_control_dependency

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def dependencies(gm):
    """(kind, bucket waited for, bucket launched before) of each control dependency, in
    graph order.
    """
    found = []
    for node in gm.graph.nodes:
        if is_control_dependency(node):
            (launch,), waited = node.args[0], node.args[2]
            kind = {ALL_GATHER: "AG", REDUCE_SCATTER: "RS"}[launch.target]
            assert waited.target is launch.target
            found.append((kind, *(n.meta["fsdp_bucket"]["plan_fqns"][0] for n in (waited, launch))))
    return found


def test_each_wait_depends_on_the_launch_in_front_of_it(joint, plan):
    """E6, E7: of the next bucket in the direction; the values, the layout and a second run are as
    without.
    """
    plain = joint_pass(copy.deepcopy(joint.gm), bucket_plan=plan)
    assert dependencies(plain) == []
    gm = joint_pass(joint.gm, bucket_plan=plan, insert_overlap_deps=True)
    names = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"]
    ascending = list(pairwise(names))
    assert dependencies(gm) == [
        *(("AG", *pair) for pair in ascending),
        *(("RS", later, earlier) for earlier, later in reversed(ascending)),
    ]
    assert bucket_layout(gm) == bucket_layout(plain)
    inputs = [torch.zeros(t.shape, dtype=t.dtype) + 0.5 for t in joint.example_inputs[:-1]]
    inputs.append(torch.ones(joint.example_inputs[-1].shape, dtype=torch.int64))
    torch.testing.assert_close(list(gm(*inputs)), list(plain(*inputs)), rtol=0, atol=0)
    code = gm.code
    assert joint_pass(gm, bucket_plan=plan, insert_overlap_deps=True).code == code


def test_without_reordering_there_is_nothing_to_depend_on(joint, plan):
    """The twin."""
    assert (
        dependencies(
            joint_pass(joint.gm, bucket_plan=plan, reorder=False, insert_overlap_deps=True)
        )
        == []
    )
