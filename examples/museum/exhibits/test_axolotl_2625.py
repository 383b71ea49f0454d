"""The loss is computed in chunks of logits that were all computed before.

axolotl#2625 (2025): in the review of a chunked cross entropy somebody asked whether it does
nothing, as the model had made all logits before; only the casts to float32 were saved. Here the
chunks are cut before or behind the head, and the memory of the step is bounded by what one chunk
needs.
"""

import torch
import torch.nn.functional as F
from museum import exhibit
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_peak_memory

TOKENS, WIDTH, VOCABULARY, CHUNKS = 64, 8, 512, 8


def loss(head, hidden, labels, bug):
    """Return the mean loss and the gradient of hidden, chunk by chunk."""
    total, gradients = hidden.new_zeros(()), []
    if bug:
        parts = (hidden @ head.T).chunk(CHUNKS)
    else:
        parts = hidden.chunk(CHUNKS)
    for part, target in zip(parts, labels.chunk(CHUNKS), strict=True):
        logits = part if bug else part @ head.T
        probabilities = logits.softmax(-1)
        total = total - probabilities.log().gather(1, target[:, None]).sum()
        difference = probabilities - F.one_hot(target, VOCABULARY)
        gradients.append(difference @ head)
    return total / TOKENS, torch.cat(gradients) / TOKENS


@exhibit(
    "axolotl#2625",
    2025,
    kind="memory",
    found_by="memory",
    raises=AssertionError,
    says=f"float32[{TOKENS}, {VOCABULARY}]",
    usual="nobody: all values are equal",
)
def test_one_chunk_of_logits_is_alive(bug):
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).weight.detach()
    hidden, labels = torch.randn(TOKENS, WIDTH), torch.randint(0, VOCABULARY, (TOKENS,))
    gm = make_fx(lambda *args: loss(*args, bug), tracing_mode="fake")(head, hidden, labels)
    chunk = TOKENS // CHUNKS * VOCABULARY * 8  # one_hot is int64
    assert_peak_memory(gm, at_most=head.nbytes + 4 * hidden.nbytes + 4 * chunk)
