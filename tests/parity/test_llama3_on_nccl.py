"""The main job over NCCL, which needs GPUs. The other tests of this folder use GPUs where there are
any.
"""

import pytest

from fixtures.training import PRECISIONS, llama3_training


@pytest.mark.gt_world("ranks", size=[2, 8], device="cuda")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_fsdp2_over_nccl(gt_mesh, gt_deterministic, check_parity, precision):
    check_parity(llama3_training(gt_mesh, precision))
