"""``-p means``: what torchtitan's tests need of CUDA beside ``--gt-cuda-as=cpu``, without an edit."""

import sys
from types import ModuleType

import pytest
import torch
from cpu_device import ANSWERS, NAN
from ring_attention import HANDLERS
from torch.distributed.tensor.experimental._context_parallel import _attention


def annotate_trace(trace, annotations):
    """Write what was noted of a graph's node into its events; return how many events there were.

    Stands for a module of torch's nightly that torch 2.15 lacks.
    """
    count = 0
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        for note in annotations.get(arguments.get("graph node id"), ()):
            arguments.update(note)
            count += 1
    return count


_nightly = ModuleType("torch.cuda._annotate_cuda_graph_trace")
_nightly.annotate_trace = annotate_trace
sys.modules.setdefault(_nightly.__name__, _nightly)


@pytest.hookimpl(tryfirst=True)
def pytest_collection():
    """Let skip marks find a GPU whose memory holds the kernels of FlexAttention: the CPU has none."""
    from torchtitan.tools import utils

    utils.has_cuda_capability = lambda major, minor: (major, minor) <= (9, 0)


@pytest.fixture(autouse=True)
def means(request, monkeypatch, gt_dense_flex_attention):
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(torch.cpu, name, answer, raising=False)
    for operator, handler in HANDLERS.items():
        monkeypatch.setitem(_attention.custom_ops, operator, handler)
    # gt_cuda_as refuses these: the CPU has no such numbers, and a test that judges them fails.
    monkeypatch.setattr(torch.cuda, "memory_stats", ANSWERS["memory_stats"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: NAN)

    # The check refuses expert parallelism, also in a test that captures no CUDA graph.
    trainer = sys.modules.get("torchtitan.trainer")
    if trainer is not None:
        monkeypatch.setattr(trainer.Trainer.Config, "_validate_cuda_graphs", lambda self: None)
    # torchtitan's own way without a CUDA graph: the graph runs as it is.
    graphs = sys.modules.get("torchtitan.experiments.graph_trainer.cudagraph")
    if graphs is not None and request.config.getoption("--gt-cuda-as"):
        monkeypatch.setattr(graphs, "is_cudagraph_compatible", lambda gm, **options: False)


@pytest.fixture(autouse=True)
def ranges_of_an_older_torch(monkeypatch):
    """Leave a set of ranges on a tensor that is marked without one, as torch did in its nightlies."""
    mark = torch._dynamo.mark_dynamic

    def mark_dynamic(tensor, index, **options):
        mark(tensor, index, **options)
        if not hasattr(tensor, "_dynamo_dynamic_range"):
            tensor._dynamo_dynamic_range = set()

    monkeypatch.setattr(torch._dynamo, "mark_dynamic", mark_dynamic)
