"""The moments of a checkpoint are not loaded, as the template to load into has no place for them.

AReaL#1468 (2026): a checkpoint of Megatron's distributed optimiser was loaded into a template that
was built as for saving, where a new optimiser has no moments yet, and those of the checkpoint were
dropped without a word. Here the trainer is recorded as it is, and two records are compared.
"""

import subprocess
import sys

import torch
from museum import exhibit
from torch import nn

from pytest_gtrainer import record_training


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, record, steps):
        x = torch.ones(2, 4)
        with record_training(self.model, self.optimizer, record):
            for _ in range(steps):
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def template(self, is_loading):
        """Name the states; with ``is_loading`` also those that the first step would make."""
        states = {"model": self.model.state_dict(), "moments": {}}
        for name, parameter in self.model.named_parameters():
            if is_loading and parameter not in self.optimizer.state:
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
            states["moments"][name] = dict(self.optimizer.state.get(parameter, {}))
        return states

    def load(self, saved, bug):
        states = self.template(is_loading=not bug)
        self.model.load_state_dict(saved["model"])
        for name, moments in states["moments"].items():
            for key, value in moments.items():
                value.copy_(saved["moments"][name][key])


@exhibit(
    "AReaL#1468",
    2026,
    kind="resume and reshard",
    found_by="record",
    raises=AssertionError,
    says="first difference: step 2, load: weight",
    usual="nobody has the moments before and behind a load at hand, and the first loss is right",
)
def test_a_resumed_run_goes_on(tmp_path, bug):
    Trainer().train(tmp_path / "whole", steps=4)
    first = Trainer()
    first.train(tmp_path / "first", steps=2)
    resumed = Trainer()
    resumed.load(first.template(is_loading=True), bug)
    resumed.train(tmp_path / "resumed", steps=2)

    compare = [sys.executable, "-m", "pytest_gtrainer", "compare", "whole", "resumed", "--at", "2"]
    run = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
