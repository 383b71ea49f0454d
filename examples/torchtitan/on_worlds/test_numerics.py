"""``simple_fsdp`` against ``fully_shard`` and DDP, on four gloo ranks."""

from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_numerics as theirs

TestSimpleFSDP = on_world(theirs.TestSimpleFSDP, "ranks", 4)
