"""Four classes for 2 to 8 GPUs, in fake worlds: they trace, and judge graphs."""

from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_passes as theirs

TestReassignCollectivePgsPass = on_world(theirs.TestReassignCollectivePgsPass, "fake", 8)
TestOverlapPgIsolationPass = on_world(theirs.TestOverlapPgIsolationPass, "fake", 8)
TestAsyncTensorParallelPass = on_world(theirs.TestAsyncTensorParallelPass, "fake", 2)
TestBucketingPrefetchOrder = on_world(theirs.TestBucketingPrefetchOrder, "fake", 8)
