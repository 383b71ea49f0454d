"""Sweeps over nets: one test under many of them, and the table at the end of the run."""

import re
from pathlib import Path

import pytest

from pytest_gtrainer import NetModel, sweep_nets

pytestmark = pytest.mark.second_tier

DOCUMENTATION = Path("docs/worlds.md").read_text()
EXAMPLE = re.search(r"```python\n(# test_nets\.py\n.*?)```", DOCUMENTATION, re.DOTALL)[1]
NOTHING = "equal, but proves nothing: so is the control"
TABLE = f"""\
ranks  nodes  channels  algorithm  partition   accumulate  result
    8      1         1  ring       contiguous  wire        {NOTHING}
    8      1         4  ring       contiguous  wire        {NOTHING}
    8      2         1  ring       contiguous  wire        {NOTHING}
    8      2         4  ring       contiguous  wire        equal"""


WRONG_ORDER = """

@pytest.mark.gt_world("simulated", size=8)
@pytest.mark.parametrize("net", sweep_nets(8, nodes=[1, 2, 4], channels=[4]))
def test_wrong(gt_world, net):
    world = replace(gt_world, net=net)
    if net.nodes == 4:
        world = replace(world, mesh={"fsdp": 3})
    assert_simulated_parity(training, world, payload_order="execution")
"""
DIFFERENT = "DIFFERENT at step 0, gradient of second.weight"
TABLE_OF_WRONG_ORDER = f"""\
ranks  nodes  channels  algorithm  partition   accumulate  result
    8      1         4  ring       contiguous  wire        layouts differ, bits do not
    8      2         4  ring       contiguous  wire        {DIFFERENT}
    8      4         4  ring       contiguous  wire        stopped by ValueError"""


def test_a_sweep_ends_in_a_table(pytester):
    """S1: the example of the documentation; and a test that fails, of which no net is left out."""
    pytester.makepyfile(test_nets=EXAMPLE + WRONG_ORDER)
    result = pytester.runpytest_subprocess("-q", "--tb=no")
    result.assert_outcomes(passed=4, failed=3)
    lines = [line.rstrip() for line in result.outlines]
    for test, table in (("test_order_of_buckets", TABLE), ("test_wrong", TABLE_OF_WRONG_ORDER)):
        begin = (
            next(at for at, line in enumerate(lines) if f"- nets of test_nets.py::{test} -" in line)
            + 1
        )
        assert lines[begin : begin + len(table.splitlines())] == table.splitlines()
    assert TABLE in DOCUMENTATION


def test_every_combination_is_a_parameter():
    nets = sweep_nets(
        16, nodes=[1, 2], channels=[1, 2], accumulate=["wire", "fp32"], average="divide"
    )
    assert len(nets) == len({net.__name__ for net in nets}) == 8
    assert nets[-1].__name__ == "nodes2-channels2-ring-contiguous-fp32"
    assert nets[-1] == NetModel(2, 8, channels=2, accumulate="fp32", average="divide")
    with pytest.raises(ValueError, match="16 ranks do not divide over 3 nodes: change one of them"):
        sweep_nets(16, nodes=[3])


@pytest.mark.parametrize("name", ["nodes", "channels", "algorithm", "partition", "accumulate"])
def test_no_net_at_all_is_refused(name):
    """A loop over the nets checked nothing, and the test was green."""
    with pytest.raises(ValueError, match=f"sweep_nets: {name} is empty, so there is no net"):
        sweep_nets(16, **{name: []})
