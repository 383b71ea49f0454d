"""After a load each rank has its own weights anew, and those of the others as they were made.

Megatron-LM#6920 (2026): an optimiser that is split over ranks keeps the main weights of its part,
and an all-gather brings all parts into the model. After a load that all-gather was skipped, as the
list of models to gather was empty, so a resumed run went on from another model than the one saved,
without an error and with a loss curve that looked normal.
"""

import pytest
import torch
import torch.distributed as dist
from museum import exhibit, resume
from torch import nn

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Job:
    def __init__(self, bug):
        torch.manual_seed(0)
        self.bug = bug
        self.rank = dist.get_rank()
        self.model = nn.Linear(4, 4, bias=False)
        self.parts = list(self.model.weight.detach().chunk(2))
        self.main = self.parts[self.rank].clone()
        self.x = torch.randn(8, 4)

    def synchronize(self):
        dist.all_gather(self.parts, self.main)

    def step(self):
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.main -= 0.1 * self.model.weight.grad.chunk(2)[self.rank]
        self.synchronize()
        self.model.zero_grad()
        return loss

    def state(self):
        return {"weight of the model": self.model.weight, "main weights": self.main}

    def file(self, folder):
        return folder.with_suffix(f".{self.rank}.pt")

    def save(self, folder):
        torch.save(self.main, self.file(folder))

    def load(self, folder):
        self.main = torch.load(self.file(folder))
        self.parts[self.rank].copy_(self.main)
        to_gather = [] if self.bug else [self]
        for each in to_gather:
            each.synchronize()


@exhibit(
    "Megatron-LM#6920",
    2026,
    kind="resume and reshard",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at before step 2: weight of the model",
    usual=resume.practice(Job, ranks=2),
)
@pytest.mark.gt_world("ranks", size=2)
def test_a_resumed_run_goes_on(gt_world, tmp_path, bug):
    resumed = resume.run(lambda: Job(bug), tmp_path)
    assert_bitwise_equal(resumed, resume.run(lambda: Job(bug)), what="resumed against run through")
