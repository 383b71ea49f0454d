"""``simple_fsdp`` against ``fully_shard`` and DDP, on four gloo ranks; and whole trainers against
each other, which torchtitan's script compares, on eight.
"""

from pathlib import Path

import pytest
from rebase import on_world
from torchtitan.experiments.graph_trainer.tests import test_numerics as theirs
from unskipped import body_of

TestSimpleFSDP = on_world(theirs.TestSimpleFSDP, "ranks", 4)


class TestGraphTrainerNumerics(theirs.TestGraphTrainerNumerics):
    # torchtitan skips these, as NCCL's all-to-all crashed or was not deterministic. gloo's is.
    test_moe_dsv3_aot_fx_trace_vs_eager = body_of(
        theirs.TestGraphTrainerNumerics.test_moe_dsv3_aot_fx_trace_vs_eager
    )
    test_graph_pp_moe_dsv3_aot_fx_trace_vs_eager = body_of(
        theirs.TestGraphTrainerNumerics.test_graph_pp_moe_dsv3_aot_fx_trace_vs_eager
    )


@pytest.fixture(autouse=True)
def in_a_folder_with_scripts(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1] / "companions")
