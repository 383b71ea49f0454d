"""``--gt-model``: rules are judged on graphs of the user's own model, beside ours."""

import json
import re

import pytest

from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.testing import run_project

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]

PASSES = """
from torch._ops import OpOverload
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer.conformance import Adapter

def merge(gm):
    "Merges equal calls; fresh buffers, too, which is wrong if they are written to."
    seen = {}
    for node in list(gm.graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            continue
        key = node.target, str(node.args), str(node.kwargs)
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
        seen.setdefault(key, node)
    gm.recompile()
    return gm

def as_executed(gm, plan):
    return ours(gm, bucket_plan=plan, payload_order="execution")

fsdp, executed = Adapter(ours, "bucketing"), Adapter(as_executed, "bucketing", call=as_executed)
apart = Adapter(ours, "separate", models=("models:sharded",))
"""
MODELS = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from pytest_gtrainer.references.config import TrainConfig

class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        one, other = torch.empty_like(x), torch.empty_like(x)
        one.fill_(2)
        other.fill_(3)
        return self.up(x * one).relu() + self.up(x * other).relu()

class Tiny(nn.Module):
    def __init__(self, x=4, y=8):
        super().__init__()
        self.late, self.early = nn.Linear(y, x), nn.Linear(x, y)

    def forward(self, x):
        return torch.tanh(self.late(torch.tanh(self.early(x))))

def buffers():
    return Buffers(), torch.ones(2, 4)

def plain():
    return Tiny(), torch.ones(2, 4)

def no_inputs():
    return Tiny()

def sharded():
    return TrainConfig(
        model=lambda: nn.Sequential(Tiny(), Tiny()),
        step=lambda model, x: model(x).square().mean(),
        batch=lambda step, coordinate: (torch.ones(2, 4),),
        bucket_plan=["0", "1"],
        mesh=init_device_mesh("cpu", (4,)),
    )
"""
CONFTEST = """
import models

def pytest_gtrainer_models(config):
    return {"hooked": models.buffers}
"""
COMMAND = ("--pyargs", "pytest_gtrainer.conformance", "--gt-gpus=4", "-p", "no:cacheprovider")


def run(folder, *options):
    files = {"passes.py": PASSES, "models.py": MODELS, "conftest.py": CONFTEST}
    return run_project(folder, *COMMAND, *options, files=files)


def test_a_mistake_shows_on_the_model_that_has_it(tmp_path):
    options = ("--gt-pass=passes:merge", "--gt-model=models:buffers,hooked", "-k", "E6 or D9")
    done = run(tmp_path, *options, "--gt-conformance=table.json")
    assert done.status == 1
    assert "D9 (every output has the bits of before" in done.output
    tables = json.loads((tmp_path / "table.json").read_text())
    # Beside ours, each in a table of its own.
    assert set(tables) == {"merge", "merge on models:buffers", "merge on hooked"}
    for model in ("models:buffers", "hooked"):
        rows = tables[f"merge on {model}"]
        assert (rows["E6"]["result"], rows["E6"]["why"]) == (
            "held",
            "could have failed on 1 graph",
        )
        assert (rows["D9"]["result"], rows["D9"]["graph"]) == ("broken", model)


def test_a_rule_says_on_which_graphs_it_could_have_failed(tmp_path):
    done = run(tmp_path, "--gt-pass=passes:merge", "-k", "E6]", "--gt-conformance=table.json")
    (row,) = json.loads((tmp_path / "table.json").read_text())["merge"].values()
    assert (done.status, row["result"]) == (0, "held")
    assert row["why"].startswith("could have failed on ")
    assert " of 7 graphs: " in row["why"], "most of ours leave nothing to merge"


def test_a_model_on_which_nothing_could_fail_is_no_success(tmp_path):
    """Although rules are held on another one."""
    options = ("--gt-pass=passes:merge", "--gt-model=models:plain,models:buffers")
    done = run(tmp_path, *options, "-k", "E6-models or state-models")
    assert done.status == 1
    assert "no rule could have failed: merge on models:plain finds nothing to do" in done.output
    assert "failed" not in done.output.splitlines()[-1]


def test_a_sharded_model(tmp_path):
    held = run(tmp_path, "--gt-pass=passes:fsdp", "--gt-model=models:sharded", "-k", "models:")
    assert held.status == 0, held.output
    rules = re.findall(r"^(\w+) +held .* could have failed on 1 graph$", held.output, re.MULTILINE)
    assert {"E6", "D9", "D1", "D2", "D11", "state", "ranks", "process"} <= set(rules)
    found = run(
        tmp_path, "--gt-pass=passes:executed", "--gt-model=models:sharded", "-k", "D2-models"
    )
    assert found.status == 1
    assert "early.weight stands where FSDP2 packs" in found.output
    parts = run(tmp_path, "--gt-pass=passes:apart", "-k", "E6-models or D1-models or D9-models")
    assert parts.status == 0, parts.output
    assert "could have failed on 2 graphs" in parts.output


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (
            ("--gt-pass=passes:merge", "--gt-model=models:none"),
            2,
            "--gt-model=models:none: module 'models' has no attribute 'none'",
        ),
        (
            ("--gt-pass=passes:merge", "--gt-model=models:no_inputs", "-k", "E6-models"),
            1,
            "--gt-model=models:no_inputs: it returns a model without inputs",
        ),
        (
            ("--gt-pass=passes:fsdp", "--gt-model=models:plain", "-k", "E6-models"),
            1,
            "models:plain has no bucket plan: let its function return a TrainConfig",
        ),
        (("--gt-model=models:plain",), 4, "--gt-model gives --gt-pass further graphs"),
    ],
)
def test_a_model_that_cannot_be_used(tmp_path, options, status, says):
    done = run(tmp_path, *options)
    assert done.status == status, done.output
    assert says in done.output


def test_chunking_is_judged_on_our_models_alone():
    with pytest.raises(ValueError, match="kind='chunking' is judged against eager chunking"):
        Adapter(len, "chunking", models=("models:plain",))


def test_the_setting_of_a_project(tmp_path):
    """Its ini twin; a run of other tests, without a pass, is none of its business."""
    files = {"models.py": MODELS, "test_it.py": "def test_it(): pass\n"}
    (tmp_path / "pytest.ini").write_text("[pytest]\ngt_model = models:buffers\n")
    assert run_project(tmp_path, "-p", "no:cacheprovider", "test_it.py", files=files).status == 0
    done = run(tmp_path, "--gt-pass=passes:merge", "-k", "D9-models")
    assert done.status == 1
    assert "D9 of merge on models:buffers broken" in done.output
