"""A run that is resumed inside an epoch shuffles as in the first epoch.

accelerate#4071 (2026): to skip the batches that were seen, ``skip_first_batches`` made a new loader,
whose count of epochs was zero. When its iteration began it gave that to the sampler, so the rest of
the epoch came in the order of epoch 0. Resuming between two epochs was right.
"""

import torch
from museum import exhibit, resume
from torch import nn

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal

SAMPLES, BATCH = 12, 4
DATA = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))


class Loader:
    """Counts its epochs, which seed the order of samples."""

    def __init__(self, skip=0, epoch=0):
        self.skip, self.epoch = skip, epoch

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(SAMPLES, generator=generator).split(BATCH)
            yield from order[self.skip :]
            self.skip, self.epoch = 0, self.epoch + 1


class Job:
    def __init__(self, bug):
        torch.manual_seed(0)
        self.bug = bug
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0
        self.read(iter(Loader()))

    def read(self, batches):
        self.batches, self.samples = batches, next(batches)

    def step(self):
        loss = (self.model(DATA[self.samples]) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.samples = next(self.batches)
        return loss

    def state(self):
        return {"weight": self.model.weight, "samples": self.samples}

    def save(self, folder):
        torch.save((self.model.state_dict(), self.steps), folder.with_suffix(".pt"))

    def load(self, folder):
        weights, self.steps = torch.load(folder.with_suffix(".pt"))
        self.model.load_state_dict(weights)
        epoch, skip = divmod(self.steps, SAMPLES // BATCH)
        self.read(iter(Loader(skip, epoch=0 if self.bug else epoch)))


IN_AN_EPOCH = (4,)


@exhibit(
    "accelerate#4071",
    2026,
    kind="resume and reshard",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at before step 4: samples",
    usual=resume.practice(Job, interrupted=IN_AN_EPOCH),
)
def test_a_resumed_run_goes_on(tmp_path, bug):
    resumed = resume.run(lambda: Job(bug), tmp_path, interrupted=IN_AN_EPOCH, steps=6)
    through = resume.run(lambda: Job(bug), steps=6)
    assert_bitwise_equal(resumed, through, what="resumed against run through")
