"""``assert_rank_agnostic``: a graph of one rank on all ranks, and the constants of its rank."""

import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, VacuousCheck, assert_rank_agnostic

PART = 4


def embed(tokens, weight, offset):
    own = tokens - offset
    is_here = (own >= 0) & (own < PART)
    rows = weight[own.clamp(0, PART - 1)] * is_here.unsqueeze(-1)
    return funcol.wait_tensor(funcol.all_reduce(rows, "sum", dist.group.WORLD)).relu()


def by_rank(tokens, weight, offset):
    return embed(tokens, weight, PART * dist.get_rank())


def by_constant(tokens, weight, offset):
    return embed(tokens, weight, torch.tensor(PART * dist.get_rank()))


def by_slice(tokens, weight, offset):
    rank = dist.get_rank()
    return weight[rank : rank + 1].relu() * 2


def by_branch(tokens, weight, offset):
    return weight.sin() if dist.get_rank() % 2 == 0 else weight.cos()


def inputs_of(rank, size=3):
    weight = torch.randn(PART, 2, generator=torch.Generator().manual_seed(rank))
    return torch.arange(size * PART), weight, torch.tensor(PART * rank)


def traced(function):
    return make_fx(function)(*inputs_of(0))


@pytest.mark.gt_world("simulated", size=3)
def test_a_graph_that_serves_all_ranks(gt_world):
    """Z5: inputs that the graph writes to stay as they are."""
    assert len(assert_rank_agnostic(traced(embed), embed, inputs_of, gt_world)) == 3

    def writes(tokens, weight, offset):
        return weight.add_(1) * 2

    inputs = [inputs_of(rank) for rank in range(3)]
    before = inputs[0][1].clone()
    assert_rank_agnostic(traced(writes), writes, inputs, gt_world)
    assert torch.equal(inputs[0][1], before)


@pytest.mark.gt_world("simulated", size=3)
@pytest.mark.parametrize(
    ("function", "ranks", "operator", "numbers"),
    [
        (by_rank, "0, 1, 2", "aten.sub.Tensor", "0 in the graph, 4 on rank 1"),
        (by_constant, "0, 1, 2", "aten.sub.Tensor", "0 in the graph, none on rank 1"),
        (by_slice, "1, 2", "aten.slice.Tensor", "0, 0, 1 in the graph, 0, 1, 2 on rank 1"),
    ],
)
def test_a_constant_of_the_rank_that_traced(gt_world, function, ranks, operator, numbers):
    """Z5: torchtitan#4730; a number, a tensor of one, and a slice, by operator and line."""
    with pytest.raises(BitwiseDifference) as error:
        assert_rank_agnostic(traced(function), function, inputs_of, gt_world, what="embed")
    first, named, own, *_ = str(error.value).splitlines()
    assert first == f"embed does not give the results of ranks {ranks}, of 3"
    begin = "first operator whose value is another, on rank 1: "
    assert named.startswith(f"{begin}{operator} at test_rank_agnostic.py:")
    assert own == f"  its numbers: {numbers}"


@pytest.mark.gt_world("simulated", size=3)
def test_other_programs(gt_world):
    """Z5: the ranks between the ends, too; a program with another branch, or of other results."""
    with pytest.raises(BitwiseDifference) as error:
        assert_rank_agnostic(traced(by_branch), by_branch, inputs_of, gt_world)
    text = str(error.value)
    assert text.startswith("the graph does not give the results of rank 1, of 3\n")
    assert "rank 1 calls aten.cos.default at test_rank_agnostic.py:" in text
    with pytest.raises(BitwiseDifference, match="this is so on every rank, also on the one that"):
        assert_rank_agnostic(
            traced(lambda *own: own[1] * 2), lambda *own: own[1] * 3, inputs_of, gt_world
        )


@pytest.mark.gt_world("simulated", size=3)
def test_what_could_not_fail(gt_world):
    with pytest.raises(VacuousCheck, match="in a world of one rank"):
        assert_rank_agnostic(traced(embed), embed, inputs_of, 1)

    def nan(tokens, weight, offset):
        return weight * float("nan")

    with pytest.raises(VacuousCheck, match="no result of rank 0 is finite"):
        assert_rank_agnostic(traced(nan), nan, inputs_of, gt_world)
    with pytest.raises(ValueError, match="the graph returns 1 tensor, the function 2"):
        assert_rank_agnostic(traced(embed), lambda *own: own[:2], inputs_of, gt_world)


def writes_its_rank(x, cache):
    cache.add_(dist.get_rank())
    return x * 2


def returns_its_rank(x, cache):
    return x * 2, float(dist.get_rank())


def with_keys_of_its_rank(x, cache):
    return {"a": x * 2, f"b{dist.get_rank()}": x * 3}


def with_none_by_rank(x, cache):
    return (x * 2, None) if dist.get_rank() == 0 else (None, x * 2)


OTHER_THAN_TENSORS = {
    writes_its_rank: "input_1 after the call",
    returns_its_rank: "first at output_1",
    with_keys_of_its_rank: r"on rank 1 .* \(a: a tensor, b1: a tensor\), on rank 0 \(a: .*, b0:",
    with_none_by_rank: r"on rank 1 the function returns \(None, a tensor\), on rank 0 \(a ten",
}


def two(rank):
    return torch.ones(3), torch.zeros(3)


@pytest.mark.gt_world("simulated", size=2)
@pytest.mark.parametrize("function", OTHER_THAN_TENSORS, ids=lambda each: each.__name__)
def test_what_a_rank_gives_besides_tensors(gt_world, function):
    """Z5: an input that is written, a number, a key, and the place of None."""
    graph = make_fx(function)(*two(0))
    with pytest.raises(BitwiseDifference, match=OTHER_THAN_TENSORS[function]):
        assert_rank_agnostic(graph, function, two, gt_world)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("function", OTHER_THAN_TENSORS, ids=lambda each: each.__name__)
def test_what_a_rank_gives_besides_tensors_on_ranks(gt_world, function):
    def artefact(x, cache):
        others = {returns_its_rank: (x * 2, 0.0), with_keys_of_its_rank: {"a": x * 2, "b0": x * 3}}
        return others.get(function, x * 2)

    with pytest.raises(BitwiseDifference, match=OTHER_THAN_TENSORS[function]):
        assert_rank_agnostic(artefact, function, two, gt_world)


@pytest.mark.gt_world("simulated", size=2)
def test_a_functional_graph_returns_what_the_function_writes(gt_world):
    def writes(x, cache):
        return cache.add_(x), x * 2

    graph = make_fx(lambda x, cache: (cache + x, x * 2))(*two(0))
    assert assert_rank_agnostic(graph, writes, [two(0), two(1)], gt_world)[1].compared == 2


@pytest.mark.gt_world("simulated", size=2)
def test_state_that_is_no_input(gt_world):
    """Z5: a tensor of a closure, or a buffer, of which only the last rank changes a bit."""
    held = torch.zeros(3)

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x, cache):
            self.count.add_(dist.get_rank())
            return x * 2

    def writes(x, cache):
        held.add_(dist.get_rank())
        return x * 2

    graph = make_fx(writes)(*two(0))
    for function, name in ((writes, "held"), (Counts(), "count")):
        with pytest.raises(ValueError, match=f"the function writes {name}, which is none of its"):
            assert_rank_agnostic(graph, function, two, gt_world)
    assert not held.any()


class Shared:
    """Holds a tensor as an attribute of the class."""

    held = torch.zeros(3)


def _adds_to(held, x):
    held.add_(dist.get_rank())
    return x * 2


def by_default(x, cache, held=Shared.held):
    return _adds_to(held, x)


def by_lambda(x, cache):
    return (lambda: _adds_to(Shared.held, x))()


def by_comprehension(x, cache):
    return next(_adds_to(Shared.held, each) for each in (x,))


def by_helper(x, cache):
    return by_lambda(x, cache)


by_partial = functools.partial(
    lambda held, x, cache: _adds_to(held["x"][0], x), {"x": [Shared.held]}
)
HOLDERS = {
    "default": by_default,
    "lambda": by_lambda,
    "comprehension": by_comprehension,
    "helper": by_helper,
    "partial": by_partial,
    "nested": lambda x, cache: by_partial(x, cache) * 1,
}


@pytest.mark.gt_world("simulated", size=2)
@pytest.mark.parametrize("holder", HOLDERS)
def test_state_that_a_helper_holds_is_no_input_either(gt_world, holder):
    """Whatever holds it: a class, a lambda, a partial, or a function that is called."""
    graph = make_fx(lambda x, cache: x * 2)(*two(0))
    with pytest.raises(ValueError, match=r"the function writes .*, which is none of its inputs"):
        assert_rank_agnostic(graph, HOLDERS[holder], two, gt_world)
    assert not Shared.held.any()


class Backward(torch.autograd.Function):
    """Multiplies by two; a graph of rank 0 has its factor of the backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_a_backward_on_ranks(gt_world):
    """Z5: results that require gradients have a backward; gradients that are there stay."""

    def inputs(rank):
        return (torch.ones(3, requires_grad=True),)

    def function(x):
        return Backward.apply(x, dist.get_rank())

    def leaves_a_gradient(x):
        loss = function(x).sum()
        loss.backward()
        return loss.detach()

    assert_rank_agnostic(function, function, inputs, gt_world)
    assert_rank_agnostic(leaves_a_gradient, leaves_a_gradient, inputs, gt_world)
    with pytest.raises(BitwiseDifference, match="first at gradient of input_0"):
        assert_rank_agnostic(lambda x: Backward.apply(x, 0), function, inputs, gt_world)
    with pytest.raises(BitwiseDifference, match="gradient of input_0"):
        assert_rank_agnostic(lambda x: x.sum() * 2, leaves_a_gradient, inputs, gt_world)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_on_ranks(gt_world):
    """Z5: each rank runs the graph, and an artefact that was traced as rank 0."""

    def inputs(rank):
        return inputs_of(rank, 2)

    graph = make_fx(embed)(*inputs(0))
    assert len(assert_rank_agnostic(graph, embed, inputs, gt_world)) == 2

    def artefact(*own):
        return embed(*own[:2], 0)

    with pytest.raises(BitwiseDifference) as error:
        assert_rank_agnostic(artefact, by_rank, inputs, gt_world)
    text = str(error.value)
    assert text.startswith("the graph does not give the results of ranks 0, 1, of 2\n")
    assert "on rank 1: aten.sub.Tensor at test_rank_agnostic.py:" in text
    assert "its numbers: 0 in the graph, 4 on rank 1" in text


class Embed(torch.nn.Module):
    """With the offset as an input, or as a number that the export takes from its rank."""

    def __init__(self, offset=None):
        super().__init__()
        self.offset = offset

    def forward(self, weight, tokens, offset):
        return embed(tokens, weight, offset if self.offset is None else self.offset)


def exported(module, inputs):
    """Export a module, and load what was saved."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs), file)
    file.seek(0)
    return torch.export.load(file)


def assert_artefacts(world):
    def inputs(rank):
        tokens, weight, offset = inputs_of(rank, 2)
        return weight, tokens, offset

    for form in (lambda program: program, lambda program: program.module()):
        good = form(exported(Embed(), inputs(0)))
        assert len(assert_rank_agnostic(good, Embed(), inputs, world)) == 2
        baked = form(exported(Embed(0), inputs(0)))
        with pytest.raises(BitwiseDifference) as error:
            assert_rank_agnostic(baked, Embed(), inputs, world)
        text = str(error.value)
        assert text.startswith("the graph does not give the results of ranks 0, 1, of 2\n")
        assert "on rank 1: aten.sub.Tensor at test_rank_agnostic.py:" in text
        assert "its numbers: 0 in the graph, none on rank 1" in text


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2)
def test_an_artefact_that_was_saved_and_loaded(gt_world):
    """Z5: of ``torch.export``, as a program and as its module."""
    assert_artefacts(gt_world)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_an_artefact_on_ranks(gt_world):
    """Z5: each rank loads and runs it; an ``ExportedProgram`` has a ``__call__`` that raises."""
    assert_artefacts(gt_world)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2)
def test_weights_of_an_exported_program_are_its_first_inputs(gt_world):
    class Scale(torch.nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]) + rank)

        def forward(self, x):
            return x * self.weight

    program = exported(Scale(0), (torch.ones(2),))

    def inputs(rank):
        return Scale(rank).weight.detach(), torch.arange(2.0)

    assert_rank_agnostic(program, lambda weight, x: x * weight, inputs, gt_world)
