"""The examples of chunking in docs/passes.md run, in order."""

from pathlib import Path

import torch

from fixtures.models import chunkable
from fixtures.models.chunkable import Net
from fixtures.models.loss import ce_step
from fixtures.pages import blocks


def test_the_examples_run():
    page = Path(__file__).parents[3] / "docs" / "passes.md"
    inputs = tuple(torch.randint(0, chunkable.VOCAB, (2, 8, 6)).unbind(0))
    torch.manual_seed(0)
    model, reference = Net(chunkable.grouped_moe), Net(chunkable.grouped_moe)
    reference.load_state_dict(model.state_dict())
    names = {"model": model, "reference": reference, "step": ce_step, "inputs": inputs}
    examples = [text for language, text in blocks(page, "Chunking") if language == "python"]
    assert len(examples) == 3
    for example in examples:
        exec(example, names)
