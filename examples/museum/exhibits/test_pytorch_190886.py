"""A fusion pass stops matching after an update of torch, and nothing is wrong but slow.

pytorch#190886 (2026): a nightly traced a norm into other operators, and the pass that fuses it
found 0 places instead of 1, which only a count in a test showed. Here the square is captured as a
product instead of a power, and the pass looks for the power.
"""

import torch
from museum import exhibit

from pytest_gtrainer import NotRecorded, gt_compile

aten = torch.ops.aten


def fuse(graph):
    """Make one operator of a square and its mean."""
    for square in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        (mean,) = square.users
        with graph.inserting_before(mean):
            fused = graph.call_function(
                aten.linalg_vector_norm.default, (square.args[0], 2, [-1], True)
            )
            fused = graph.call_function(aten.mul.Tensor, (fused, fused))
            size = square.args[0].meta["val"].shape[-1]
            fused = graph.call_function(aten.div.Tensor, (fused, size))
        for node in fused.all_input_nodes:
            node.meta = dict(mean.meta)
        fused.meta = dict(mean.meta)
        mean.replace_all_uses_with(fused)
        graph.erase_node(mean)
        graph.erase_node(square)


def norm(x, bug):
    square = x * x if bug else x.pow(2)
    return x / (square.mean(-1, keepdim=True) + 1e-6).sqrt()


@exhibit(
    "pytorch#190886",
    2026,
    kind="compile",
    found_by="record",
    raises=NotRecorded,
    says="0 runs of 'fuse' that changed the graph, not 1: the pass matched nothing",
    usual="nobody: all values are equal",
)
def test_the_norm_is_fused(bug):
    compiled = torch.compile(norm, options={"post_grad_custom_post_pass": fuse})
    with gt_compile() as record, torch.no_grad():
        compiled(torch.randn(4, 16), bug)
    record.only_pass("fuse", changed=True)
