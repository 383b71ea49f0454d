"""A graph to check: one bucketed layer, a head, and the layer's backward."""

import pytest

from pytest_gtrainer.graphtext import parse

TEXT = """\
fsdp = group(range(0, 2))
if P:
  P.layers[0].wq.weight: f32[4, 8]
  P.layers[0].wo.weight: f32[4, 8]
if I:
  I.x: f32[3, 8]
if fwd:
  with bucket(layers[0]):
    cat: f32[8, 8] = aten.cat([P.layers[0].wq.weight, P.layers[0].wo.weight])
    all_gather_into_tensor: f32[16, 8] = _c10d_functional.all_gather_into_tensor(cat, 2, fsdp)
    wait_tensor: f32[16, 8] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    split: (f32[8, 8], f32[8, 8]) = aten.split.Tensor(wait_tensor, 8)
  with layers[0].wq:
    mm: f32[3, 8] = aten.mm(I.x, bucket(layers[0]).split[0])
  with layers[0].wo:
    t: f32[8, 8][1, 8] = aten.t(bucket(layers[0]).split[1])
    mm: f32[3, 8] = aten.mm(layers[0].wq.mm, t)
  with head:
    _to_copy: bf16[3, 8] = aten._to_copy(layers[0].wo.mm, dtype=bf16)
    sum: bf16[()] = aten.sum(_to_copy)
if bwd:
  with layers[0].wo:
    mm: f32[8, 8] = aten.mm(saved.layers[0].wo.t, saved.layers[0].wo.t)
  with bucket(layers[0]):
    reduce_scatter_tensor: f32[4, 8] = _c10d_functional.reduce_scatter_tensor(layers[0].wo.mm, "avg", 2, fsdp)
    wait_tensor: f32[4, 8] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
if out:
  yield fwd.head.sum
  yield bwd.bucket(layers[0]).wait_tensor
"""


@pytest.fixture
def gm():
    """12 nodes in the schedule, the output the last."""
    return parse(TEXT)
