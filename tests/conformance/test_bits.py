"""The rules of bits can fail: they report another order of a payload, on real ranks and on
simulated nodes.
"""

import pytest

from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import RULES, judge
from tests.conformance.test_rules import packs_as_executed

BITS = r"bucket layouts differ(?s:.)*bits are (different|equal on this rank)"
ON_RANKS = pytest.mark.gt_world("ranks", size=3)
ON_NODES = pytest.mark.gt_world("simulated", size=4, nodes=2)


@pytest.mark.second_tier("bits-")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        pytest.param("bits", BITS, marks=ON_RANKS),
        pytest.param("nodes", "bits are different", marks=ON_NODES),
    ],
)
def test_another_order_has_other_bits(rule, words, request):
    adapter = Adapter(packs_as_executed, "bucketing", call=packs_as_executed)
    with pytest.raises(AssertionError, match=words):
        judge(RULES[rule], adapter, request)
