"""Traces of sharded models, on gloo ranks."""

from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_trace_module as theirs

TestTraceFSDP = on_world(theirs.TestTraceFSDP, "ranks", 4)
TestTraceContextParallel = on_world(theirs.TestTraceContextParallel, "ranks", 2)
TestAutogradGradVsBackwardFSDP = on_world(theirs.TestAutogradGradVsBackwardFSDP, "ranks", 4)
