"""Data movement against torch's own simulation of ranks, LocalTensorMode: another implementation,
the same bits.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer.worlds.simulated.interpreter import PerRank
from pytest_gtrainer.worlds.simulated.interpreter.values import at
from tests.worlds.simulated.graphs import data_movement, different, interpreter_of


@pytest.mark.gt_world("fake", size=6, mesh={"dp": 3, "ep": 2})
@pytest.mark.parametrize("dimension", ["dp", "ep", "all"])
def test_data_moves_as_in_local_tensor_mode(gt_world, gt_mesh, dimension):
    """Every group of the mesh, and the result of one collective as the operand of the next."""
    group = dist.group.WORLD if dimension == "all" else gt_mesh[dimension].get_group()
    x = different(6, 2, 3)
    # it takes the root of a broadcast by its rank in the world; real groups by that in the group
    gm = make_fx(data_movement(group.group_name, group.size(), root=0))(x[0])
    actual = interpreter_of(gm, gt_mesh).run([x])
    with LocalTensorMode(6):
        expected = gm(LocalTensor(dict(enumerate(x))))
    for value, wanted in zip(actual, expected, strict=True):
        for rank in range(6):
            assert torch.equal(at(value, rank), wanted._local_tensors[rank])
    assert type(actual[1]) is PerRank
    assert not torch.equal(actual[1][0], actual[1][5])
