"""The tests of offloading, whose graphs hold CUDA tensors: here they are fake ones."""

import pytest
from torchtitan.experiments.graph_trainer.tests.test_cpu_offload import TestCpuOffloadPass

__all__ = ["TestCpuOffloadPass"]


@pytest.fixture(autouse=True)
def fake_cuda(gt_fake_tensors):
    pass
