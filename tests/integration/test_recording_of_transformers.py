"""Recording changes no bit of the training of models of the ``transformers`` package.

Skipped where the package is not installed: ``make test-transformers`` installs the extra of that
name and runs this.
"""

import pytest
import torch

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, record_training
from pytest_gtrainer.over_time.files import read_run
from tests.integration.test_ordinary_models_of_transformers import (
    MODELS,
    SIZES,
    VOCABULARY,
    step,
)

pytestmark = pytest.mark.second_tier


def train(name, folder=None, seed=0):
    """Train three steps, with dropout where the model has some, and return all that is left."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    config_name, model_name, changes, _ = MODELS[name]
    sizes = {**SIZES, "attention_dropout": 0.1, **changes}
    if name == "t5":
        sizes["dropout_rate"] = 0.1
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**sizes)
    model = getattr(transformers, model_name)(config).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        for _ in range(3):
            step(model, torch.randint(3, VOCABULARY, (2, 9))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    if folder is None:
        run()
    else:
        with record_training(model, optimizer, folder, activations="*", values=True) as recorder:
            run()
        assert recorder.recorded == 3
    left = {"random": torch.get_rng_state(), **model.state_dict()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            left[f"{number}.{key}"] = value
    return left


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "t5"])
def test_recording_changes_no_bit(name, tmp_path):
    """Z1: weights, moments and random states; each module, every value. Another seed differs."""
    plain = train(name)
    assert_bitwise_equal(train(name, tmp_path / "record"), plain, what=f"{name}, recorded")
    assert_bitwise_different(train(name, tmp_path / "other", seed=1), plain, what="another seed")
    phases = read_run(tmp_path / "record").steps[2]
    assert {"data", "forward", "loss", "gradient", "clip", "optimiser"} <= phases.keys()
    assert len(phases["forward"]) > 10
