"""Mistakes planted into ``examples/trainer``: each is named by step, phase and tensor, and the
trainer is edited only to make the mistake.
"""

import pytest

from tests.over_time.trainers import SCRIPT, compare, planted, record

SAVE = '            "ema": dict(self.ema.state_dict()),\n'
LOAD = '        self.ema.load_state_dict(state["ema"])\n'
ZERO_MOMENT = '        self.optimizer.state[self.model.head.weight]["exp_avg"].zero_()\n'
BACKWARD = "        (loss * self.options.loss_scale).backward()\n"
FREEZE = "        self.model.layers[1].requires_grad_(self.batches.position < 3)\n"
COMPILE = "    if options.compile:\n"
CHANGED = (
    "    def other(gm, inputs):\n"
    "        return lambda *args: [out + 0.01 for out in gm(*args)]\n"
    "    model.layers[1].compile(backend=other)\n"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Records of a run of four steps, ``whole``, and of its second half, resumed."""
    folder = tmp_path_factory.mktemp("good")
    options = ["--activations=layers.*"]
    whole = ("--steps=4", f"--save={folder}", "--save-at=2")
    assert record(folder / "whole", SCRIPT, *whole, options=options) == 0
    resumed = ("--steps=4", f"--resume={folder}/step2")
    assert record(folder / "resumed", SCRIPT, *resumed, options=options) == 0
    return folder


def test_a_run_that_was_resumed_is_equal(good, capsys):
    """Z1, Z3: what is loaded is compared with what the step before has left."""
    status, printed = compare(capsys, good / "whole", good / "resumed")
    assert status == 0, printed
    assert "equal: " in printed
    assert "only in A: 2 steps, 0 to 1" in printed


@pytest.mark.second_tier("the data", "a layer", "bf16", "clip", "a compiled")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param(
            [("(step + 1)", "step")],
            "step 0, optimiser: param_groups.0.lr, rank 0: 0.0025 in A, 0.0 in B",
            id="the learning rate is off by one step",
        ),
        pytest.param(
            [("self.position = 0", "self.position = 1")],
            "step 0, data: input [0][0], rank 0",
            id="the data are shifted by one batch",
        ),
        pytest.param(
            [(BACKWARD, FREEZE + BACKWARD)],
            "step 2, gradient: layers.1.attention_norm.weight: only in A",
            id="a layer is frozen late",
        ),
        pytest.param(
            [("self.head(self.norm(x))", "self.head(self.norm(x)).bfloat16()")],
            "step 0, loss: root, rank 0: f32[] in A, bf16[] in B",
            id="bf16 where fp32 was",
        ),
        pytest.param(
            [
                (
                    "        self.unscale()\n        self.clip()\n",
                    "        self.clip()\n        self.unscale()\n",
                )
            ],
            "step 0, clip: embeddings.weight, rank 0",
            id="clip before unscale",
        ),
        pytest.param(
            [(COMPILE, CHANGED + COMPILE)],
            "step 0, loss: root, rank 0: 34.2",
            id="a compiled layer differs",
        ),
    ],
)
def test_a_mistake_in_the_loop(good, tmp_path, capsys, changes, named):
    """Z2: the first step, phase and tensor."""
    script, options = planted(tmp_path, *changes), ["--activations=layers.*"]
    assert record(tmp_path / "record", script, "--steps=4", options=options) == 0
    status, printed = compare(capsys, good / "whole", tmp_path / "record")
    assert status == 1
    assert f"first difference: {named}" in printed


@pytest.mark.second_tier("the state", "the average", "the schedule", "the data")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param(
            [(LOAD, LOAD + ZERO_MOMENT)],
            "step 2, load: head.weight.exp_avg, rank 0",
            id="a moment is missing",
        ),
        pytest.param(
            [('        torch.set_rng_state(state[f"random.{self.rank}"])\n', "")],
            "step 2, random: torch.cpu, rank 0",
            id="the state of dropout is not restored",
        ),
        pytest.param(
            [(SAVE, ""), (LOAD, "")],
            "step 2, load: beside Decoder.embeddings.weight, rank 0",
            id="the average is not saved",
        ),
        pytest.param(
            [('        self.schedule.load_state_dict(state["schedule"])\n', "")],
            "step 3, optimiser: param_groups.0.lr, rank 0: 0.01 in A, 0.005 in B",
            id="the schedule is not restored",
        ),
        pytest.param(
            [('self.batches.position = state["position"]', "self.batches.position = 1")],
            "step 2, data: input [0][0], rank 0",
            id="the data go back",
        ),
    ],
)
def test_a_mistake_in_a_resume(good, tmp_path, capsys, changes, named):
    """Z2, Z3: a piece of state that is lost is named directly after the load."""
    script = planted(tmp_path, *changes)
    assert record(tmp_path / "record", script, "--steps=4", f"--resume={good}/step2") == 0
    status, printed = compare(capsys, good / "whole", tmp_path / "record")
    assert status == 1
    assert f"first difference: {named}" in printed
