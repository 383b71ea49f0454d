"""Partition and split of a sharded stage, on two gloo ranks."""

from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_graph_pp_passes as theirs

GraphPPPartitionFSDPTest = on_world(theirs.GraphPPPartitionFSDPTest, "ranks", 2)
GraphPPFSDPCollectiveSplitDsv3Test = on_world(theirs.GraphPPFSDPCollectiveSplitDsv3Test, "ranks", 2)
