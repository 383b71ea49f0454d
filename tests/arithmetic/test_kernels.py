"""Kernels that torch does not decompose have a meaning: pools, reductions by index, optimisers."""

import pytest
import torch

from pytest_gtrainer import meaning, prove
from pytest_gtrainer.arithmetic.formulas import given_meaning
from pytest_gtrainer.arithmetic.kernels import KERNELS

F = torch.nn.functional
aten = torch.ops.aten
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
AT = torch.tensor([0, 1, 1, 2])
ROWS = AT[:, None].expand(4, 6)
OFFSETS = torch.tensor([3, 3, 8], dtype=torch.int32)


def gradient_of(function):
    def step(*inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad((function(*inputs) ** 2).sum(), inputs)

    return step


def pooled(x):
    return F.avg_pool2d(x[None], 2)


def pooled_by_views(x):
    return x.view(1, 2, 2, 3, 2).mean((2, 4))


def grouped(a, b):
    return torch._grouped_mm(a, b, offs=OFFSETS)


def group_by_group(a, b):
    return torch.cat([a[:3] @ b[0], a[3:3] @ b[1], a[3:] @ b[2]])


def other_groups(a, b):
    return torch.cat([a[:3] @ b[0], a[3:3] @ b[2], a[3:] @ b[1]])


GROUPS = (torch.randn(8, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16())
EQUAL = {
    "avg_pool2d": (pooled, pooled_by_views, lambda x: x.view(1, 2, 2, 3, 2).sum((2, 4)), (X,)),
    "avg_pool2d's gradient": (
        gradient_of(pooled),
        gradient_of(pooled_by_views),
        gradient_of(lambda x: 2 * pooled(x)),
        (X,),
    ),
    "_grouped_mm": (grouped, group_by_group, other_groups, GROUPS),
    "_grouped_mm's gradient": (
        gradient_of(grouped),
        gradient_of(group_by_group),
        gradient_of(other_groups),
        GROUPS,
    ),
    "scatter_reduce": (
        lambda x: x.new_ones(3, 6).scatter_reduce(0, ROWS, x, "mean", include_self=False),
        lambda x: torch.stack([x[0], (x[1] + x[2]) / 2, x[3]]),
        lambda x: torch.stack([x[0], x[1] + x[2], x[3]]),
        (X,),
    ),
    "scatter_reduce of maxima": (
        lambda x: x.new_zeros(3, 6).scatter_reduce(0, ROWS, x, "amax"),
        lambda x: torch.stack([x[0], torch.maximum(x[1], x[2]), x[3]]).clamp(min=0),
        lambda x: torch.stack([x[0], x[1], x[3]]).clamp(min=0),
        (X,),
    ),
    "index_reduce": (
        lambda x: x.new_ones(3, 6).index_reduce(0, AT, x, "prod"),
        lambda x: torch.stack([x[0], x[1] * x[2], x[3]]),
        lambda x: torch.stack([x[0], x[1] * x[1], x[3]]),
        (X,),
    ),
    "cdist": (
        lambda x: torch.cdist(x, x + 1),
        lambda x: ((x[:, None] - (x + 1)) ** 2).sum(-1).sqrt(),
        lambda x: torch.cdist(x + 1, x),
        (X,),
    ),
    "cummax": (
        lambda x: x.cummax(0)[0][-1],
        lambda x: x.amax(0),
        lambda x: x.cummin(0)[0][-1],
        (X,),
    ),
    "erfinv": (
        lambda x: torch.erfinv(2 * x),
        lambda x: torch.erfinv(x + x),
        lambda x: torch.erfinv(x),
        (X,),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_kernel_is_what_its_parts_are(name):
    actual, expected, twin, inputs = EQUAL[name]
    proof = prove(actual, expected, inputs=inputs)
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    assert prove(twin, expected, inputs=inputs).kind == "another function"


POOLS = {
    "pads": ((3, 2, 1), False, True),
    "rounded up": ((3, 2, 1), True, True),
    "rounded up without pads": ((3, 2, 1), True, False),
    "gaps": ((2, 3, 0), False, True),
    "gaps rounded up": ((2, 3, 0), True, True),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_are_those_of_the_kernels_in_real_numbers(name):
    window, ceil, includes_pads = POOLS[name]
    options = [[each] for each in window]
    for dims, shape in ((2, (2, 7, 8)), (3, (2, 5, 7, 8))):
        x = torch.randn(shape, dtype=torch.float64)
        pool = getattr(aten, f"avg_pool{dims}d").default
        back = getattr(aten, f"avg_pool{dims}d_backward").default
        args = (*options, ceil, includes_pads, None)
        expected = pool(x, *args)
        assert torch.allclose(KERNELS[pool](x, *args), expected)
        gradient = torch.randn_like(expected)
        assert torch.allclose(KERNELS[back](gradient, x, *args), back(gradient, x, *args))


def steps_of(optimiser, **options):
    def train(model, x):
        own = optimiser(model.parameters(), lr=1e-2, **options)
        for _ in range(2):
            own.zero_grad()
            (model(x) ** 2).mean().backward()
            own.step()
        return x.sum()

    return train


OPTIMISERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD without momentum": (torch.optim.SGD, {"maximize": True}),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_fused_optimiser_is_the_same_function(name):
    optimiser, options = OPTIMISERS[name]
    inputs = (torch.nn.Linear(6, 2), X)
    fused = steps_of(optimiser, fused=True, **options)
    proof = prove(fused, steps_of(optimiser, foreach=False, **options), inputs=inputs)
    assert proof.is_at_least("rounds elsewhere"), str(proof)
    other = steps_of(optimiser, foreach=False, **{**options, "weight_decay": 0.2})
    assert prove(fused, other, inputs=inputs).kind == "another function"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("operator", ["aten::digamma", "aten::digamma.default"])
def test_meanings_end_in_any_order(order, operator):
    """Fixtures and generators do so; the last one that is left counts."""
    blocks = []
    for number in range(3):
        blocks.append(meaning(operator, lambda x, number=number: number))
        blocks[-1].__enter__()
    left = [0, 1, 2]
    for number in order:
        assert given_meaning(aten.digamma.default)(X) == left[-1]
        blocks[number].__exit__(None, None, None)
        left.remove(number)
    assert given_meaning(aten.digamma.default) is None


@pytest.mark.parametrize("name", ["digamma", "aten::no_such", "aten::", "aten::digamma.no_such", 3])
def test_a_meaning_of_no_operator_is_refused(name):
    with (
        pytest.raises(ValueError, match=f"there is no operator {name!r}"),
        meaning(name, torch.sin),
    ):
        pass


def sgd(grad_scale, writes_back):
    """Return a step of SGD by the fused kernel, or by hand if ``writes_back`` says how."""

    def fused(param, grad):
        options = {
            "weight_decay": 0.0,
            "momentum": 0.0,
            "lr": 0.5,
            "dampening": 0.0,
            "nesterov": False,
        }
        aten._fused_sgd_(
            [param],
            [grad],
            [],
            **options,
            maximize=False,
            is_first_step=True,
            grad_scale=grad_scale,
        )
        return param + 0, grad + 0

    def by_hand(param, grad):
        unscaled = grad.div_(grad_scale) if writes_back else grad / grad_scale
        param.sub_(0.5 * unscaled)
        return param + 0, grad + 0

    return fused if writes_back is None else by_hand


@pytest.mark.parametrize(("writes_back", "is_same"), [(True, True), (False, False)])
def test_a_fused_step_leaves_unscaled_gradients(writes_back, is_same):
    scale = torch.tensor(3.0)
    inputs = X.clone(), X.flip(0).clone()
    proof = prove(sgd(scale, None), sgd(scale, writes_back), inputs=inputs)
    assert (proof.kind in ("identical", "other kernels", "reordered", "rounds elsewhere")) == (
        is_same
    ), str(proof)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("by_hand", "is_same"), [(1.0, True), (1.5, False)])
def test_attention_and_its_gradient_have_the_scale_that_is_given(scale, by_hand, is_same):
    q, k, v = (
        torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)
    )
    factor = by_hand * (8**-0.5 if scale is None else scale)

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    def formula(q, k, v):
        return (factor * q @ k.transpose(-2, -1)).softmax(-1) @ v

    for actual, expected in (
        (attention, formula),
        (gradient_of(attention), gradient_of(formula)),
    ):
        proof = prove(actual, expected, inputs=(q, k, v))
        assert (proof.kind != "another function") == is_same, str(proof)
        assert proof.kind != "unknown", str(proof)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_reductions_by_index_are_those_of_torch(reduce, include_self):
    """Of scalars, too, and where nothing or several elements go to one place."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (4,), (4, 3)):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        index = torch.tensor([0, 2, 2]) if shape else torch.tensor([0])
        rows = torch.randn(x[index].shape if shape else (), generator=generator).double()
        how = {"reduce": reduce, "include_self": include_self}
        found = KERNELS[aten.index_reduce.default](x, 0, index, rows, **how)
        torch.testing.assert_close(found, x.index_reduce(0, index, rows, **how))
        for dim in (0, -1):
            places = torch.randint(0, 3 if shape else 1, shape, generator=generator)
            source = torch.randn(shape, generator=generator, dtype=torch.float64)
            found = KERNELS[aten.scatter_reduce.two](x, dim, places, source, **how)
            torch.testing.assert_close(found, x.scatter_reduce(dim, places, source, **how))
