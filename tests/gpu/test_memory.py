"""Memory of a GPU: memory that a test leaves there is reported, and a training run leaves none."""

import gc

import pytest
import torch

from fixtures.training import llama3_training
from pytest_gtrainer import peak_memory, train_eager, train_graph
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.tracing.model import ModelState, local

SUITE = """
import pytest, torch
KEPT = []
@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_leaves_memory(gt_world):
    KEPT.append(torch.zeros(8 << 20, dtype=torch.uint8, device="cuda"))
@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_leaves_none(gt_world):
    torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_multiplies(gt_world):
    a = torch.ones(64, 64, device="cuda")
    assert (a @ a)[0, 0] == 64
"""


def test_memory_that_a_test_leaves_is_told(cuda, pytester):
    """The summary names test and amount, or there is an error on request; one that frees its memory
    is not named.

    What cuBLAS takes for its first product is no test's.
    """
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("--gt-gpus=1")
    result.assert_outcomes(passed=3)
    assert "8 MiB of GPU memory" in result.stdout.str()
    assert "test_leaves_memory" in result.stdout.str()
    assert "test_leaves_none" not in result.stdout.str()
    assert "test_multiplies" not in result.stdout.str()
    failed = pytester.runpytest_subprocess("--gt-gpus=1", "--gt-leaked-resources=fail")
    failed.assert_outcomes(passed=3, errors=1)
    failed.stdout.fnmatch_lines(["the test has left 8 MiB of GPU memory behind*"])


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_training_leaves_nothing(gt_mesh, record_property):
    """Both sides, two steps each, twice: what is allocated afterwards does not grow."""
    held = []
    for _ in range(3):
        train_eager(llama3_training(gt_mesh, "bf16_fp32", steps=2))
        train_graph(llama3_training(gt_mesh, "bf16_fp32", steps=2))
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    record_property(
        "measured",
        " ".join(f"{each / 2**20:.1f}" for each in held) + " MiB after each of three runs",
    )
    assert held[2] - held[1] < 2**20


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_the_peak_of_a_step(gt_mesh, record_property):
    """A step's peak is that of its largest live set, not of all it ever makes: the graph frees as
    it goes.
    """
    run = GraphRun(llama3_training(gt_mesh, "bf16_fp32", steps=1))
    made = sum(
        value.numel() * value.element_size()
        for node in run.traced.gm.graph.nodes
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor) and node.op == "call_function"
    )
    run.run()  # libraries take workspaces once
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.run()
    peak = torch.cuda.max_memory_allocated() - before
    record_property(
        "measured", f"peak {peak / 2**20:.1f} MiB, of {made / 2**20:.1f} MiB that the graph makes"
    )
    assert peak < made


@pytest.mark.gt_world("ranks", size=1, device="cuda")
def test_the_peak_that_liveness_tells(gt_mesh, record_property):
    """The allocator held, beside the inputs, the peak of the graph within 5%, each tensor rounded
    up to 512 bytes.
    """
    run = GraphRun(llama3_training(gt_mesh, "bf16_fp32", steps=1))
    estimate = peak_memory(run.traced.gm)
    held = ("parameter", "buffer", "input")
    expected = sum(-(-one.nbytes // 512) * 512 for one in estimate.alive if one.kind not in held)
    inputs = [local(tensor).detach() for tensor in ModelState.of(run.model).tensors]
    inputs += pytree.tree_leaves(run.config.inputs(0, 0))
    with torch.no_grad():
        run.traced.gm(*inputs)  # libraries take workspaces once
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.traced.gm(*inputs)
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    record_property("measured", f"{measured / 2**20:.2f} MiB, expected {expected / 2**20:.2f} MiB")
    assert abs(measured - expected) <= 0.05 * expected
