"""Four classes for 2 to 8 GPUs, in fake worlds: they trace, and judge graphs. One test of a graph
that asks for CUDA's driver, and does not call it."""

import unittest
from unittest import mock

import torch
from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_passes as theirs

TestReassignCollectivePgsPass = on_world(theirs.TestReassignCollectivePgsPass, "fake", 8)
TestOverlapPgIsolationPass = on_world(theirs.TestOverlapPgIsolationPass, "fake", 8)
TestAsyncTensorParallelPass = on_world(theirs.TestAsyncTensorParallelPass, "fake", 2)
TestBucketingPrefetchOrder = on_world(theirs.TestBucketingPrefetchOrder, "fake", 8)


class TestAnnotateModuleFqns(unittest.TestCase):
    _theirs = theirs.TestAnnotateModuleFqns
    _build_annotated_gm = _theirs._build_annotated_gm
    _body = _theirs.test_insert_kernel_annotations_pass_inserts_calls

    def test_insert_kernel_annotations_pass_inserts_calls(self):
        annotations = torch.cuda._graph_annotations
        with (
            mock.patch.object(theirs, "_is_tools_id_unavailable", return_value=False),
            mock.patch.object(annotations, "_is_tools_id_unavailable", return_value=False),
        ):
            self._body()
