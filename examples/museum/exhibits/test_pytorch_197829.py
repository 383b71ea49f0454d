"""A row is copied from the row before it, in place and without the copy that kept the old rows.

pytorch#197829 (2026): ``x[1:] = x[:-1].clone()`` compiled to a copy between overlapping parts of x,
on CPU and CUDA, so the first row ran through. One pass had dropped the clone while the graph was
functional, the next one made the write in place. Rows are copied one by one here, as a kernel may.
"""

import copy

import torch
from museum import exhibit, usual
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_pass_bitwise

aten = torch.ops.aten
ROWS = 4


def shift(x):
    """Move rows down by one, as a cache of past tokens does."""
    x[1:] = x[:-1].clone()
    return x.sum(1)


def in_place(gm, bug):
    """Write row by row; the fixed pass leaves the copy in front of the write."""
    gm = copy.deepcopy(gm)
    (write,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    to, source = write.args
    if bug:
        source = source.args[0]  # the part of x itself
    with gm.graph.inserting_before(write):
        for row in range(ROWS - 1):
            target = gm.graph.call_function(aten.select.int, (to, 0, row))
            given = gm.graph.call_function(aten.select.int, (source, 0, row))
            gm.graph.call_function(aten.copy_.default, (target, given))
    gm.graph.erase_node(write)
    gm.recompile()
    return gm


BEFORE = make_fx(shift)(torch.ones(ROWS, 3))
AFTER = {bug: in_place(BEFORE, bug) for bug in (False, True)}


@exhibit(
    "pytorch#197829",
    2026,
    kind="aliasing",
    found_by="bits",
    raises=BitwiseDifference,
    says="input x_1 afterwards: 6 of 12",
    usual=usual.of_functions(lambda bug, x: AFTER[bug](x), shift, lambda: (torch.randn(ROWS, 3),)),
)
def test_rows_move_by_one(bug):
    assert_pass_bitwise((BEFORE, AFTER[bug]))
