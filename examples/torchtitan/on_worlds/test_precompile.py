"""Graphs whose nodes hold CUDA tensors that nobody reads: here they are fake ones."""

import unittest

import pytest
from torchtitan.experiments.graph_trainer.tests import test_precompile as theirs


class TestCudagraphPass(unittest.TestCase):
    # The skip mark asks for a GPU; the body, in which the CUDA graph is a mock, does not.
    test_minimal_async_ep_custom_ops_are_wrapped_by_cudagraph_pass = (
        theirs.TestCudagraphPass.test_minimal_async_ep_custom_ops_are_wrapped_by_cudagraph_pass
    ).__wrapped__


@pytest.fixture(autouse=True)
def fake_cuda(gt_fake_tensors):
    pass
