"""Every reduce-scatter keeps its operand until the end of the step, where all are waited for.

Megatron-LM#4940 (2026): with overlap each bucket's all-to-all buffer lived until the last wait, so
the peak grew by the number of buckets times their size. The mend waits for the bucket before when
the next one starts. Here a backward of eight layers is one graph.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_peak_memory

LAYERS, WIDTH = 8, 64


def backward(gradient, x):
    """Reduce the gradient of a square weight for each layer."""
    reduced = []
    for _ in range(LAYERS):
        weight = x.T @ gradient
        reduced.append(collectives.reduce_scatter_single(weight, "sum", 0, dist.group.WORLD))
        gradient = gradient.sin()
    return reduced


def schedule_waits(gm, bug):
    """Move each wait behind the launch of the next collective, or all waits to the end."""
    c10d = torch.ops._c10d_functional
    launches = gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)
    output = gm.graph.output_node()
    for place, launch in enumerate(launches):
        (wait,) = launch.users
        if bug or launch is launches[-1]:
            output.prepend(wait)
        else:
            launches[place + 1].append(wait)
    gm.recompile()
    return gm


@exhibit(
    "Megatron-LM#4940",
    2026,
    kind="memory",
    found_by="memory",
    raises=AssertionError,
    says="peak",
    usual="nobody: all values are equal",
)
@pytest.mark.gt_world("fake", size=8)
def test_two_buckets_are_in_flight(gt_world, bug):
    rows = torch.ones(16, WIDTH)
    gm = make_fx(backward, tracing_mode="fake")(rows, rows)
    weight = WIDTH * WIDTH * 4
    shards, activations = LAYERS * weight // 8, 3 * rows.nbytes
    assert_peak_memory(schedule_waits(gm, bug), at_most=2 * weight + shards + activations)
