"""Cross entropy, whole and in chunks: C1 to C3."""

from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fixtures.models.chunked_loss import ChunkedCrossEntropy, chunked_ce_step
from fixtures.models.loss import cross_entropy
from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    trace_step,
)

FLAVOR = "llama3/debug_odd"
Results = dict[str, torch.Tensor]


@pytest.fixture
def head() -> torch.nn.Linear:
    torch.manual_seed(11)
    return torch.nn.Linear(72, 136, bias=False)


@pytest.fixture
def hidden() -> torch.Tensor:
    """``[8, 16, 72]``, larger from sequence to sequence, so that the chunks' losses differ
    in size.
    """
    values = torch.randn(8, 16, 72, generator=torch.Generator().manual_seed(5))
    return (values * torch.linspace(0.1, 3, 8).view(8, 1, 1)).requires_grad_()


def grads_of(loss: torch.Tensor, hidden: torch.Tensor, head: torch.nn.Linear) -> Results:
    """The loss and its gradients, ``.grad`` untouched."""
    inputs, weight = torch.autograd.grad(loss, [hidden, head.weight])
    return {"loss": loss.detach(), "hidden": inputs, "head": weight}


def loop(
    hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Linear, chunks: int, **fold
) -> dict[str, Any]:
    """Chunk by chunk with everyday autograd; losses and weight gradients added up by ``folded``."""
    losses, slices, weights = [], [], []
    for h, y in zip(
        hidden.detach().flatten(0, 1).chunk(chunks), labels.flatten().chunk(chunks), strict=True
    ):
        leaf = h.clone().requires_grad_()
        loss = F.cross_entropy(head(leaf).float(), y, reduction="sum") / labels.numel()
        found = torch.autograd.grad(loss, [leaf, head.weight])
        for terms, term in zip((losses, slices, weights), (loss.detach(), *found), strict=True):
            terms.append(term)
    inputs = torch.cat(slices).view_as(hidden)
    return {"loss": folded(losses, **fold), "hidden": inputs, "head": folded(weights, **fold)}


def folded(
    terms: list[torch.Tensor], order: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The sum of ``terms`` in ``dtype``, first to last, or with ``order`` -1 last to first."""
    return reduce(add, [term.to(dtype) for term in terms[::order]])


def test_cross_entropy_is_the_mean_over_tokens_in_fp32(batch):
    logits = torch.randn(8, 16, 136).bfloat16()
    loss = cross_entropy(logits, batch[1])
    assert loss.dtype is torch.float32
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())
    )


@pytest.mark.parametrize("chunks", [3, 0, -1, 256])
def test_tokens_that_do_not_divide_are_refused(batch, hidden, head, chunks):
    """C1."""
    with pytest.raises(ValueError, match=f"128 tokens do not divide into {chunks} chunks"):
        ChunkedCrossEntropy(chunks)(hidden, batch[1], head)


def test_chunks_are_contiguous_and_of_one_size(batch, hidden, head, monkeypatch):
    """C1."""
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: (seen.append(x.detach()), linear(x, w))[1])
    ChunkedCrossEntropy(4)(hidden, batch[1], head)
    assert [len(part) for part in seen] == [32] * 4
    assert_bitwise_equal(torch.cat(seen), hidden.detach().flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_chunk_equals_the_whole_loss(batch, hidden, head, dtype):
    """C2: one chunk has the same arithmetic; with four chunks the bits of the weight differ."""
    hidden, head = hidden.detach().to(dtype).requires_grad_(), head.to(dtype)
    whole = grads_of(cross_entropy(head(hidden), batch[1]), hidden, head)
    one, four = (
        grads_of(ChunkedCrossEntropy(n)(hidden, batch[1], head), hidden, head) for n in (1, 4)
    )
    assert_bitwise_equal(one, whole, what="one chunk against the whole")
    assert_bitwise_different(four["head"], whole["head"], what="four chunks against the whole")
    torch.testing.assert_close(four, whole, atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_chunks_add_up_in_their_order(batch, hidden, head, chunks):
    """C2 and C3: equal to a loop over chunks; the control adds them up backwards."""
    actual = grads_of(ChunkedCrossEntropy(chunks)(hidden, batch[1], head), hidden, head)
    assert_bitwise_equal(actual, loop(hidden, batch[1], head, chunks), what="against the loop")
    if chunks > 2:  # a + b is b + a
        backwards = loop(hidden, batch[1], head, chunks, order=-1)
        assert_bitwise_different(actual["loss"], backwards["loss"], what="losses backwards")
        assert_bitwise_different(actual["head"], backwards["head"], what="gradients backwards")


@pytest.mark.parametrize("chunks", [4, 8])
def test_chunks_add_up_in_fp32(batch, hidden, head, chunks):
    """C3: in a bf16 model; the control adds up in bf16."""
    hidden, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    actual = grads_of(ChunkedCrossEntropy(chunks)(hidden, batch[1], head), hidden, head)
    expected = loop(hidden, batch[1], head, chunks)
    assert_bitwise_equal(
        actual, {**expected, "head": expected["head"].bfloat16()}, what="against the loop"
    )
    narrow = loop(hidden, batch[1], head, chunks, dtype=torch.bfloat16)
    assert_bitwise_different(actual["head"], narrow["head"], what="added up in bf16")


def test_gradients_are_scaled_before_their_one_cast(batch, hidden, head):
    """C3: the control casts to bf16, then scales."""
    hidden, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    actual = grads_of(ChunkedCrossEntropy(4)(hidden, batch[1], head) / 3, hidden, head)["head"]
    wide = loop(hidden, batch[1], head, 4)["head"]
    assert_bitwise_equal(actual, (wide * (torch.tensor(1.0) / 3)).bfloat16())
    assert_bitwise_different(
        actual, (wide.bfloat16().float() / 3).bfloat16(), what="cast, then scaled"
    )


@pytest.mark.parametrize("chunks", [1, 4])
def test_no_gradient_is_set_before_the_backward(build, batch, chunks):
    """C2."""
    model = build(FLAVOR, n_layers=1)
    loss = chunked_ce_step(chunks)(model, *batch)
    assert [
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    ] == []
    loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_gradients_of_two_losses_add_up(batch, hidden, head):
    loss = ChunkedCrossEntropy(4)
    (loss(hidden, batch[1], head) + loss(hidden, batch[1].flip(0), head)).backward()
    once, other = (
        grads_of(loss(hidden, y, head), hidden, head) for y in (batch[1], batch[1].flip(0))
    )
    torch.testing.assert_close(head.weight.grad, once["head"] + other["head"])


def test_without_gradients_the_loss_is_the_same(batch, hidden, head):
    loss = ChunkedCrossEntropy(4)(hidden, batch[1], head)
    with torch.no_grad():
        assert_bitwise_equal(ChunkedCrossEntropy(4)(hidden, batch[1], head), loss.detach())
    head.weight.requires_grad_(False)
    ChunkedCrossEntropy(4)(hidden, batch[1], head).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_a_head_with_a_bias_is_refused(batch, hidden):
    with pytest.raises(ValueError, match="without bias"):
        ChunkedCrossEntropy(2)(hidden, batch[1], torch.nn.Linear(72, 136))


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_traced_loss_equals_the_eager_one(build, batch, run_step, chunks):
    step = chunked_ce_step(chunks)
    expected, model = run_step(build(FLAVOR, n_layers=1), step, batch), build(FLAVOR, n_layers=1)
    actual = {"loss": trace_step(model, step, batch).replay(model, *batch)}
    actual |= {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_bitwise_equal(actual, expected, what="traced against eager")
