"""A resumed run begins with moments of zero.

KempnerForge#115 (2026): a new AdamW has no moments before its first step, so its ``state_dict()``
offered the checkpoint nothing to load them into, and the saved moments were dropped without a word.
Weights, schedule, data and random states all came back. The getters and setters of torch's DCP
allocate them first.
"""

import torch
import torch.distributed.checkpoint as dcp
from museum import exhibit, resume
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Job:
    def __init__(self, bug):
        torch.manual_seed(0)
        self.bug = bug
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x = torch.randn(8, 4)

    def step(self):
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self):
        # AdamW takes moments that are not there yet for zero.
        moments = self.optimizer.state.get(self.model.weight, {})
        zero = torch.zeros_like(self.model.weight)
        return {
            "weight": self.model.weight,
            "exp_avg": moments.get("exp_avg", zero),
            "exp_avg_sq": moments.get("exp_avg_sq", zero),
        }

    def states(self):
        if self.bug:
            optimizer = self.optimizer.state_dict()
        else:
            optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def save(self, folder):
        dcp.save(self.states(), checkpoint_id=folder)

    def load(self, folder):
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        self.model.load_state_dict(states["model"])
        if self.bug:
            self.optimizer.load_state_dict(states["optimizer"])
        else:
            set_optimizer_state_dict(self.model, self.optimizer, states["optimizer"])


@exhibit(
    "KempnerForge#115",
    2026,
    kind="resume and reshard",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at before step 2: exp_avg",
    usual=resume.practice(Job),
)
def test_a_resumed_run_goes_on(tmp_path, bug):
    resumed = resume.run(lambda: Job(bug), tmp_path)
    assert_bitwise_equal(resumed, resume.run(lambda: Job(bug)), what="resumed against run through")
