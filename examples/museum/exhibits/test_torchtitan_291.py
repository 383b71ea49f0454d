"""A resumed run reads its data from the beginning.

torchtitan#291 (2024): the position in the data was not part of a checkpoint, so each resumed run
saw the same samples again and never those behind them. Losses look better than they are.
"""

import torch
from museum import exhibit, resume
from torch import nn

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Data:
    def __init__(self):
        self.position = torch.zeros((), dtype=torch.int64)

    def next(self):
        generator = torch.Generator().manual_seed(int(self.position))
        self.position += 1
        return torch.randn(8, 4, generator=generator)


class Job:
    def __init__(self, bug):
        torch.manual_seed(0)
        self.bug = bug
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data = Data()

    def step(self):
        loss = (self.model(self.data.next()) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self):
        return {"weight": self.model.weight, "position in the data": self.data.position}

    def save(self, folder):
        torch.save((self.model.state_dict(), self.data.position), folder.with_suffix(".pt"))

    def load(self, folder):
        weights, position = torch.load(folder.with_suffix(".pt"))
        self.model.load_state_dict(weights)
        if not self.bug:
            self.data.position = position


@exhibit(
    "torchtitan#291",
    2024,
    kind="resume and reshard",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at before step 2: position in the data",
    usual=resume.practice(Job),
)
def test_a_resumed_run_goes_on(tmp_path, bug):
    resumed = resume.run(lambda: Job(bug), tmp_path)
    assert_bitwise_equal(resumed, resume.run(lambda: Job(bug)), what="resumed against run through")
