"""Arguments that are numbers: one that is no bound, count or time is refused in one sentence.

A comparison with nan is false, so a bound of nan would let everything pass.
"""

import math
import os

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    CostModel,
    LossConfig,
    NetModel,
    assert_no_less_accurate,
    assert_peak_memory,
    assert_resumes,
    balanced_loss,
    construct_default_graph_passes,
    data_parallel,
    get_default_transformer_block_buckets,
    peak_memory,
)
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.over_time.recorder import Recorder
from pytest_gtrainer.worlds.simulated.threads.run import run_threads

NAN, INF = math.nan, math.inf


def double(x):
    return x * 2


def dynamic_graph():
    return make_fx(torch.relu, tracing_mode="symbolic")(torch.ones(5, 3))


def size_of(gm):
    """Return the name of the first dynamic size of a graph."""
    return str(next(iter(gm.graph.nodes)).meta["val"].shape[0])


def accuracy(value):
    assert_no_less_accurate(lambda x: x * 2.5, double, torch.ones(8), factor=value)


def memory(value):
    assert_peak_memory(make_fx(double)(torch.ones(4)), at_most=value)


def sizes(value):
    gm = dynamic_graph()
    peak_memory(gm, sizes={size_of(gm): value})


def resumes(value):
    assert_resumes(None, None, None, at=1, steps=2, bound=value)


def fuzz(option, value):
    if main(["fuzz", "--gt-pass", "math:floor", f"--{option}={value}"]) == 2:
        raise ValueError


TABLE = [
    (accuracy, [NAN, INF, -1, 0]),
    (memory, [NAN, INF, -1, 0, 1.5]),
    (sizes, [NAN, INF, -1, 1.5]),
    (resumes, [NAN, INF, -1, 0]),
    (lambda value: CostModel(flops_per_second=value), [NAN, -1, 0]),
    (lambda value: CostModel(bytes_per_second=value), [NAN, -1, 0]),
    (lambda value: CostModel(link=value), [NAN, -1, 0]),
    (lambda value: CostModel(overhead=value), [NAN, INF, -1]),
    (lambda value: CostModel(latency=value), [NAN, INF, -1]),
    (lambda value: LossConfig("chunked_cross_entropy", value), [NAN, INF, -1, 0, 1.5]),
    (lambda value: data_parallel(None, None, gradient_divide_factor=value), [NAN, INF, -1, 0]),
    (get_default_transformer_block_buckets, [NAN, INF, -1, 0, 1.5]),
    (
        lambda value: get_default_transformer_block_buckets(2, expert_fsdp_degree=value),
        [NAN, INF, -1, 0],
    ),
    (
        lambda value: construct_default_graph_passes(n_layers=2, tensor_parallel_degree=value),
        [NAN, INF, -1, 0],
    ),
    (lambda value: balanced_loss(torch.ones(()), value), [NAN, INF, -1, 1.5]),
    (
        lambda value: run_threads(2, print, net=NetModel(ranks_per_node=2), timeout=value),
        [NAN, INF, -1, 0],
    ),
    (
        lambda value: Recorder(os.path.join(os.devnull, "record"), every=value),
        [NAN, INF, -1, 0, 1.5],
    ),
    (lambda value: NetModel(nodes=value), [NAN, INF, -1, 0]),
    (lambda value: NetModel(chunk_bytes=value), [NAN, INF, -1, 0]),
    (lambda value: fuzz("minutes", value), [NAN, -1, 0]),
    (lambda value: fuzz("timeout", value), [NAN, INF, -1, 0]),
    (lambda value: fuzz("nodes", value), [-1, 0]),
    (lambda value: fuzz("failures", value), [-1, 0]),
]
ROWS = [(call, value) for call, values in TABLE for value in values]


@pytest.mark.parametrize(("call", "value"), ROWS)
def test_a_number_that_bounds_nothing_is_refused(call, value, capsys):
    with pytest.raises(ValueError) as caught:
        call(value)
    said = str(caught.value) or capsys.readouterr().err.strip()
    assert str(value) in said
    assert "\n" not in said


def test_a_size_that_no_tensor_has_is_refused():
    """Its number would change nothing, and the bound would be one of the traced example."""
    gm = dynamic_graph()
    known = {str(each) for each in next(iter(gm.graph.nodes)).meta["val"].shape}
    with pytest.raises(ValueError) as caught:
        assert_peak_memory(gm, at_most="1 KiB", sizes={"nope": 2})
    assert str(caught.value) == (
        "sizes names nope, which no tensor of the graph has; its dynamic sizes are "
        f"{', '.join(sorted(known))}"
    )
    assert assert_peak_memory(gm, at_most="1 KiB", sizes={size_of(gm): 7}).peak == 2 * 7 * 3 * 4
