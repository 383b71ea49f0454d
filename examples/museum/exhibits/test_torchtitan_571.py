"""The second checkpoint of a resumed run holds what the first one had.

torchtitan#571 (2024): ``dcp.load`` replaced the objects in the manager's dict by loaded ones, while
the loop went on with its own, so later checkpoints saved an object that nobody advanced. A job that
was interrupted twice went back to the step of its first resume; torchtitan#647 worked around it.
"""

import torch
from museum import exhibit, resume
from torch import nn

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class TrainState:
    def __init__(self, step=0):
        self.step = step


class Manager:
    def __init__(self, states, bug):
        self.states, self.bug = states, bug

    def save(self, folder):
        content = (self.states["model"].state_dict(), self.states["train_state"].step)
        torch.save(content, folder.with_suffix(".pt"))

    def load(self, folder):
        weights, step = torch.load(folder.with_suffix(".pt"))
        self.states["model"].load_state_dict(weights)
        self.states["train_state"].step = step
        if self.bug:
            self.states["train_state"] = TrainState(step)


class Job:
    def __init__(self, bug):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4, bias=False)
        self.train_state = TrainState()
        self.manager = Manager({"model": self.model, "train_state": self.train_state}, bug)
        self.save, self.load = self.manager.save, self.manager.load
        self.x = torch.randn(8, 4)

    def rate(self):
        return 0.2 / (1 + self.train_state.step)

    def step(self):
        loss = self.model(self.x).square().mean()
        loss.backward()
        with torch.no_grad():
            self.model.weight -= self.rate() * self.model.weight.grad
        self.model.zero_grad()
        self.train_state.step += 1
        return loss

    def state(self):
        return {"weight": self.model.weight, "learning rate": torch.tensor(self.rate())}


TWICE = (1, 3)


@exhibit(
    "torchtitan#571",
    2024,
    kind="stale or baked values",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at before step 3: learning rate",
    usual=resume.practice(Job, interrupted=TWICE),
)
def test_a_run_that_is_resumed_twice_goes_on(tmp_path, bug):
    resumed = resume.run(lambda: Job(bug), tmp_path, interrupted=TWICE)
    assert_bitwise_equal(resumed, resume.run(lambda: Job(bug)), what="resumed against run through")
