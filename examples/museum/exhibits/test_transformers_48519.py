"""A converter that moves rows between heads runs on a shard, and takes the head size from it.

transformers#48519 (2026): while a checkpoint is loaded into sharded parameters, each rank cut its
shard first and converted that. The permutation for rotary embeddings reads the head size off the
shape, which is the shard's, so queries and keys were permuted wrongly. Shapes fit, nothing failed.
"""

import pytest
import torch
from museum import exhibit, usual
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal, simulate_eager

HEADS = 2
WEIGHT = torch.arange(32.0).reshape(16, 2)


def for_rotary(weight):
    """Bring the two halves of each head, which the checkpoint interleaves, one behind the other."""
    return weight.view(HEADS, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def load(bug):
    mesh = init_device_mesh("cpu", (2,))
    if bug:
        shard = WEIGHT.chunk(2)[mesh.get_local_rank()]
        weight = DTensor.from_local(for_rotary(shard), mesh, [Shard(0)])
    else:
        weight = distribute_tensor(for_rotary(WEIGHT), mesh, [Shard(0)])
    return {"q_proj.weight": weight.full_tensor()}


def load_on_one_rank():
    return {"q_proj.weight": for_rotary(WEIGHT)}


@exhibit(
    "transformers#48519",
    2026,
    kind="resume and reshard",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at [0].q_proj.weight, element (2, 0)",
    usual=usual.of_results(load, load_on_one_rank, ranks=2),
)
@pytest.mark.gt_world("simulated", size=2)
def test_two_ranks_load_what_one_loads(gt_world, bug):
    loaded = simulate_eager(load, lambda rank: (bug,), gt_world)
    assert_bitwise_equal(loaded, [load_on_one_rank()] * 2, what="loaded by two ranks")
