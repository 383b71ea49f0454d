"""The layout read from fully_shard's parameter groups, against the bytes that it really sends."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from pytest_gtrainer import eager_bucket_layout
from pytest_gtrainer._torch.fsdp2 import FSDP2Policy, fully_shard


class Inner(nn.Module):
    """A module with children and parameters of its own.

    The bias is registered before the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(7, 3))
        self.child = nn.Linear(5, 6)
        self.register_parameter("late", nn.Parameter(torch.empty(9)))


class Net(nn.Module):
    """Sizes that 4 ranks do not divide; the frozen parameter is gathered and never reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.second = Inner()
        self.second.own.requires_grad_(False)
        for value, parameter in enumerate(self.parameters(), 1):
            nn.init.constant_(parameter, value)


class Reader(nn.Module):
    """Gradient k of its loss is 10 k in every element, so a payload shows who sits where."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        for inner in (net.first, net.second):
            inner.forward = lambda scale, inner=inner: [scale * p.sum() for p in inner.parameters()]

    def forward(self, scale):
        sums = [total for inner in (self.net.first, self.net.second) for total in inner(scale)]
        return sum(10 * value * total for value, total in enumerate(sums, 1) if total.requires_grad)


@pytest.fixture
def sent(monkeypatch):
    """The payloads that FSDP2 hands to its collectives: ("all_gather" | "reduce_scatter", flat
    tensor).
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    seen = []

    def watch(name, kind, which):
        original = getattr(dist, name)

        def watched(*args, **kwargs):
            payload = kwargs.get(which, args[1] if len(args) > 1 else None)
            seen.append((kind, payload.detach().clone()))
            return original(*args, **kwargs)

        monkeypatch.setattr(fsdp.dist, name, watched)

    watch("all_gather_single", "all_gather", "input")
    watch("reduce_scatter_single", "reduce_scatter", "input")
    return seen


@pytest.mark.gt_world("ranks", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize(
    "policy", [FSDP2Policy(), FSDP2Policy(torch.bfloat16, torch.float32)], ids=["fp32", "mixed"]
)
def test_every_parameter_sits_where_the_layout_says(gt_mesh, sent, policy):
    """D4: in the all-gather's slice of this rank, and in every rank's row of the reduce-scatter."""
    model = Reader(Net())
    values = {name: p.flatten()[0].item() for name, p in model.named_parameters()}
    for module in (model.net.first, model.net.second, model):
        fully_shard(module, mesh=gt_mesh, mp_policy=policy)
    shards = {name: p.to_local().numel() for name, p in model.named_parameters()}
    model(torch.ones(())).backward()
    layout = eager_bucket_layout(model)
    payloads = [(p.collective, p) for p in layout.payloads]
    checked = 0
    for kind, payload in payloads:
        width = sum(slot.nbytes for slot in payload.slots) // payload.dtype.itemsize
        rows = 1 if kind == "all_gather" else 4
        candidates = [
            t.reshape(rows, -1) for k, t in sent if k == kind and t.numel() == width * rows
        ]
        assert candidates
        assert all(t.dtype == payload.dtype for t in candidates)
        message = f"no {kind} was sent with {payload.parameters} where the layout has them"
        assert any(holds(t, payload, values, shards) for t in candidates), message
        checked += len(payload.slots)
    assert checked == 8 + 7


def holds(rows, payload, values, shards):
    """Return whether each parameter's columns hold its value (or gradient), and the rest is
    padding.
    """
    for slot in payload.slots:
        start, width = slot.offset // payload.dtype.itemsize, slot.nbytes // payload.dtype.itemsize
        columns = rows[:, start : start + width]
        wanted = values[slot.parameter] * (1 if payload.collective == "all_gather" else 10)
        if payload.collective == "all_gather":
            columns = columns[:, : shards[slot.parameter]]
        elif (columns != 0).sum() < sum_of_elements(slot.parameter):
            return False
        if not torch.isin(columns, torch.tensor([0.0, wanted], dtype=rows.dtype)).all():
            return False
    return True


def sum_of_elements(name):
    return {"own": 21, "late": 9, "weight": 30, "bias": 6}[name.rpartition(".")[2]]


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_an_unused_parameter_is_gathered_and_not_reduced(gt_mesh, sent):
    """FSDP2 reduces what got a gradient: 16 elements, not 24."""
    model = nn.Linear(4, 4, bias=False)
    model.unused = nn.Parameter(torch.zeros(8))
    fully_shard(model, mesh=gt_mesh)
    model(torch.ones(1, 4)).sum().backward()
    layout = eager_bucket_layout(model)
    assert [payload.parameters for payload in layout.of("all_gather")] == [("weight", "unused")]
    assert [payload.parameters for payload in layout.of("reduce_scatter")] == [("weight",)]
    assert [payload.numel() for kind, payload in sent if kind == "reduce_scatter"] == [16]


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_a_frozen_parameter_of_another_dtype_decides_nothing(gt_mesh, sent):
    """Adapters beside frozen weights: a reduction has the dtype of the trained parameters."""
    net = nn.Module()
    net.frozen = nn.Parameter(torch.ones(8, dtype=torch.bfloat16), requires_grad=False)
    net.adapter = nn.Parameter(torch.ones(8))
    net.forward = lambda x: (x * net.frozen.float() * net.adapter).sum()
    fully_shard(net, mesh=gt_mesh)
    net(torch.ones(8)).backward()
    (payload,) = eager_bucket_layout(net).of("reduce_scatter")
    (reduced,) = [tensor for kind, tensor in sent if kind == "reduce_scatter"]
    assert (
        (payload.dtype, payload.parameters)
        == (reduced.dtype, ("adapter",))
        == (torch.float32, ("adapter",))
    )


@pytest.mark.gt_world("ranks", size=4, mesh={"fsdp": 4})
def test_a_parameter_that_is_sharded_by_columns(gt_mesh, sent):
    """6 rows of 8: two columns a rank, and no row of padding, as two of 8 rows would be if rows
    were shared out.
    """
    model = nn.Linear(8, 6, bias=False)
    fully_shard(model, mesh=gt_mesh, shard_placement_fn=lambda parameter: Shard(1))
    model(torch.ones(1, 8)).sum().backward()
    (payload,) = eager_bucket_layout(model).of("reduce_scatter")
    assert [slot.nbytes for slot in payload.slots] == [12 * 4]
    assert [payload.numel() for kind, payload in sent if kind == "reduce_scatter"] == [4 * 12]


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_a_model_without_fully_shard_or_gradients_is_refused(gt_mesh):
    with pytest.raises(ValueError, match="Linear has no parameters managed by fully_shard"):
        eager_bucket_layout(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="Linear has no gradients: run a backward first, and keep them"
    ):
        eager_bucket_layout(fully_shard(nn.Linear(2, 2), mesh=gt_mesh))


@pytest.mark.gt_world("fake", size=4, mesh={"replicate": 2, "fsdp": 2})
@pytest.mark.parametrize(
    ("factor", "ops"),
    [
        (None, ["avg", "avg"]),
        (1.0, ["premul_sum(1.0)", "sum"]),
        (8.0, ["premul_sum(0.125)", "sum"]),
        (2.0, ["avg", "sum"]),
    ],
)
def test_a_premultiplied_sum_is_named_with_its_factor(gt_mesh, factor, ops):
    """D16, D18: and the replicas' sum is plain then, as the reduce-scatter has divided already."""
    model = fully_shard(nn.Linear(4, 4), mesh=gt_mesh)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.ones(1, 4)).sum().backward()
    _, *reductions = eager_bucket_layout(model).payloads
    assert [(payload.collective, payload.op, payload.ranks) for payload in reductions] == [
        ("reduce_scatter", ops[0], (0, 1)),
        ("all_reduce", ops[1], (0, 2)),
    ]
