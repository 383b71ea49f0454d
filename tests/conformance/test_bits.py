"""The rules of bits can fail: another order of a payload is told, on real ranks and on simulated
nodes.
"""

import pytest

from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import RULES, judge


def packs_as_executed(gm, plan):
    return ours(gm, bucket_plan=plan, payload_order="execution")


@pytest.mark.gt_world("ranks", size=3)
def test_another_order_has_other_bits_on_ranks(request):
    with pytest.raises(
        AssertionError, match=r"bucket layouts differ(?s:.)*bits are (different|equal on this rank)"
    ):
        judge(
            RULES["bits"], Adapter(packs_as_executed, "bucketing", call=packs_as_executed), request
        )


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_another_order_has_other_bits_on_simulated_nodes(request):
    with pytest.raises(AssertionError, match="bits are different"):
        judge(
            RULES["nodes"], Adapter(packs_as_executed, "bucketing", call=packs_as_executed), request
        )
