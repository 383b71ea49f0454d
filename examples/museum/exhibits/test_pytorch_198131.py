"""A copy of an input is dropped as doing nothing, and the input is updated before it is read.

pytorch#198131 (2026): ``dst[:] = src[:]; src.add_(1)`` gave dst the updated values under Inductor.
The write to dst stood at the end of the graph, and the copy that kept the old src was removed as a
no-op. Here the graph is written as AOTAutograd leaves it, with writes to inputs last.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_pass_bitwise

aten = torch.ops.aten


def update(dst, src):
    kept, mean = src.clone(), src.clone().mean(0)
    updated = src + 1
    src.copy_(updated)
    dst.copy_(kept)
    return mean


def remove_no_ops(gm, bug):
    """Remove copies; the fixed pass keeps one that is read behind a write to what it copies."""
    gm = copy.deepcopy(gm)
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
        source = node.args[0]
        writes = []
        for user in source.users:
            if user.target is aten.copy_.default and user.args[0] is source:
                writes.append(place[user])
        last_read = max(place[user] for user in node.users)
        if bug or not any(write < last_read for write in writes):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


BEFORE = make_fx(update)(torch.ones(3, 4), torch.ones(3, 4))
AFTER = {bug: remove_no_ops(BEFORE, bug) for bug in (False, True)}


def inputs():
    return torch.zeros(3, 4), torch.randn(3, 4)


def with_what_is_written(run):
    def call(dst, src):
        mean = run(dst, src)
        return {"mean": mean, "dst": dst, "src": src}

    return call


@exhibit(
    "pytorch#198131",
    2026,
    kind="aliasing",
    found_by="bits",
    raises=BitwiseDifference,
    says="dst_1 afterwards",
    usual=usual.of_functions(
        lambda bug, *args: with_what_is_written(AFTER[bug])(*args),
        with_what_is_written(update),
        inputs,
    ),
)
def test_what_inputs_hold_afterwards(bug):
    assert_pass_bitwise((BEFORE, AFTER[bug]))
