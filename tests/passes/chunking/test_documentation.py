"""The examples of docs/chunking.md run, in order."""

import re
from pathlib import Path

import torch

from fixtures.models import chunkable
from fixtures.models.chunkable import Net
from fixtures.models.loss import ce_step


def test_the_examples_run():
    text = Path(__file__).parents[3].joinpath("docs/chunking.md").read_text()
    inputs = tuple(torch.randint(0, chunkable.VOCAB, (2, 8, 6)).unbind(0))
    torch.manual_seed(0)
    model, reference = Net(chunkable.grouped_moe), Net(chunkable.grouped_moe)
    reference.load_state_dict(model.state_dict())
    names = {"model": model, "reference": reference, "step": ce_step, "inputs": inputs}
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, names)
