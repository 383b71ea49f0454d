"""The ring that torch has for CUDA's attention, over the CPU's: that of the whole sequence."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from ring_attention import HANDLERS, SEQUENCE
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import _context_parallel


@pytest.mark.gt_world("ranks", size=2, mesh={"cp": 2})
def test_the_ring_attends_to_the_whole_sequence(gt_mesh, monkeypatch):
    attention = _context_parallel._attention
    monkeypatch.setattr(attention._cp_options, "enable_load_balance", False)
    for operator, handler in HANDLERS.items():
        monkeypatch.setitem(attention.custom_ops, operator, handler)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 1, 2, 16, 8, generator=generator)
    *inputs, grad = (each.clone().requires_grad_() for each in whole)

    out = scaled_dot_product_attention(*inputs, is_causal=True)
    expected = [out, *torch.autograd.grad(out, inputs, grad)]

    sharded = [distribute_tensor(each, gt_mesh, [Shard(SEQUENCE)]) for each in whole]
    *inputs, grad = (each.requires_grad_() for each in sharded)
    attention._enable_context_parallel_dispatcher()
    try:
        out = scaled_dot_product_attention(*inputs, is_causal=True)
        actual = [out, *torch.autograd.grad(out, inputs, grad)]
    finally:
        attention._disable_context_parallel_dispatcher()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
