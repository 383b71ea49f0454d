"""FlexAttention without a GPU: forward and backward by its dense formula, in numbers and proofs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.regional_inductor import regional_inductor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from pytest_gtrainer import (
    AnotherFunction,
    assert_runs_equal,
    assert_same_function,
    assert_same_model,
    dense_flex_attention,
    trace_step,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
REFUSED = "FlexAttention does not support backward on CPU"
SIZE = 32
compiled = torch.compile(flex_attention, options={"max_autotune": True})


def is_earlier(b, h, q, kv):
    return q >= kv


def mask():
    return create_block_mask(is_earlier, None, None, SIZE, SIZE, device="cpu", BLOCK_SIZE=16)


def inputs():
    generator = torch.Generator().manual_seed(1)
    shapes = *(3 * [(1, 2, SIZE, 8)]), (SIZE,)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def gradients(attention, q, k, v, bias, cap=5):
    """Return the gradients of attention whose scores have a bias and a soft cap."""
    given = [each.detach().clone().requires_grad_() for each in (q, k, v, bias)]
    own = given[3]

    def score(value, b, h, row, column):
        return torch.tanh((value + own[column]) / cap) * cap

    out = attention(*given[:3], score_mod=score, block_mask=mask())
    return list(torch.autograd.grad(out.square().sum(), given))


def written_out(q, k, v, score_mod, block_mask):
    rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    scores = score_mod((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5, None, None, rows, columns)
    return scores.masked_fill(rows < columns, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    "attention", [flex_attention, pytest.param(compiled, marks=pytest.mark.second_tier)]
)
def test_gradients_are_those_of_the_formula(attention):
    """Those of q, k, v, and of what the score function captures."""
    with dense_flex_attention():
        found = gradients(attention, *inputs())
    for own, wanted in zip(found, gradients(written_out, *inputs()), strict=True):
        torch.testing.assert_close(own, wanted)
        assert own.abs().max() > 0.01
    with pytest.raises(NotImplementedError, match=REFUSED):
        gradients(attention, *inputs())


@pytest.mark.parametrize(
    "attention", [flex_attention, pytest.param(compiled, marks=pytest.mark.second_tier)]
)
def test_maxima_of_scores(attention):
    """Beside the log of the sum, and without an end of the gradient."""
    q, k, v, _ = (each.detach().requires_grad_() for each in inputs())
    wanted = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    wanted = wanted.masked_fill(torch.arange(SIZE)[:, None] < torch.arange(SIZE), -torch.inf)
    for lse in (False, True):
        aux = AuxRequest(lse=lse, max_scores=True)
        with dense_flex_attention():
            out, found = attention(q, k, v, block_mask=mask(), return_aux=aux)
            (gradient,) = torch.autograd.grad(out.sum(), q)
        torch.testing.assert_close(found.max_scores, wanted.amax(-1))
        assert (found.lse is not None) == lse
        assert gradient.abs().max() > 0.01
    with pytest.raises(NotImplementedError, match="max scores is not supported"):
        attention(q.detach(), k.detach(), v.detach(), return_aux=aux)


@pytest.mark.second_tier
def test_a_region_for_inductor_stays_as_it_is():
    """A trainer that traces for itself marks FlexAttention as a region that Inductor compiles."""

    def step(q, k, v):
        given = [each.detach().requires_grad_() for each in (q, k, v)]
        out = flex_attention(*given, block_mask=mask())
        return torch.autograd.grad(out.square().sum(), given)

    def marked():
        gm = make_fx(step, tracing_mode="fake")(*given)
        for node in gm.graph.nodes:
            if "flex_attention" in str(node.target):
                for each in [node, *(x for x in node.all_input_nodes if x.op == "get_attr")]:
                    each.meta["custom"] = {"compile_with_inductor": {}}
        fake_mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
        with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
            return regional_inductor(gm)

    given = [each.detach() for each in inputs()[:3]]
    with dense_flex_attention():
        wanted = step(*given)
        found = marked()(list(given))
    for own, gradient in zip(found, wanted, strict=True):
        assert torch.equal(own, gradient)


def test_other_graphs_go_to_their_backend():
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm

    torch.compiler.reset()
    with dense_flex_attention():
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert len(seen) == 1


def halves(q, k, v, score_mod, block_mask):
    """Attention of one head after the other."""
    heads = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), strict=True)
    parts = [flex_attention(*each, score_mod=score_mod, block_mask=block_mask) for each in heads]
    return torch.cat(parts, 1)


@pytest.mark.second_tier
def test_a_proof_sees_the_backward():
    def run(attention, cap):
        def function(q, k, v):
            given = [each.detach().clone().requires_grad_() for each in (q, k, v)]
            out = attention(
                *given,
                score_mod=lambda value, b, h, row, column: torch.tanh(value / cap) * cap,
                block_mask=mask(),
            )
            return list(torch.autograd.grad(out.square().sum(), given))

        return function

    given = [each.detach() for each in inputs()[:3]]
    with dense_flex_attention():
        assert_same_function(run(flex_attention, 5), run(halves, 5), inputs=given)
        with pytest.raises(AnotherFunction, match="another function"):
            assert_same_function(run(flex_attention, 5), run(halves, 6), inputs=given)


class Attention(nn.Module):
    """Two heads; ``heads`` of them on this rank."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )

        def score(value, b, h, row, column):
            return torch.tanh(value / 5) * 5 - (row - column) * 0.1

        out = flex_attention(q, k, v, score_mod=score, block_mask=mask())
        return self.o(out.transpose(1, 2).flatten(2))


def loss_of(model, x):
    return model(x).square().mean()


def batch(coordinate=0):
    return (torch.randn(2, SIZE, 8, generator=torch.Generator().manual_seed(coordinate)),)


def test_a_traced_step_and_eager_code_have_the_same_bits():
    torch.manual_seed(0)
    model = Attention()

    def eager():
        loss = loss_of(model, *batch())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def graph():
        traced = trace_step(model, loss_of, batch())
        result = traced.gm(*(each.detach() for each in model.parameters()), *batch())
        return [each for each in result if each is not None]

    def other():
        return [2 * each for each in eager()]

    with dense_flex_attention():
        assert_runs_equal(graph, eager, control=other)


def train(run, backwards=False):
    """Train with all-reduced gradients; ``backwards``: all ranks in the opposite order."""
    torch.manual_seed(0)
    model = run.start(Attention())
    loss = loss_of(model, run.input(f"x {dist.get_rank()}", *batch(dist.get_rank())))
    loss.backward()
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.grad)
        parameter.grad = sum(reversed(parts) if backwards else parts)
    run.gradients(model)
    run.step(loss)


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_ranks_that_are_threads(gt_world):
    with dense_flex_attention():
        assert_runs_equal(
            train, train, control=lambda run: train(run, backwards=True), world=gt_world
        )


def test_gradients_on_a_thread_are_those_of_the_formula():
    """There the backward of a score function is derived, not traced."""

    def capped(attention):
        given = [each.detach().clone().requires_grad_() for each in inputs()[:3]]

        def score(value, b, h, row, column):
            return torch.tanh(value / 5) * 5

        out = attention(*given, score_mod=score, block_mask=mask())
        return list(torch.autograd.grad(out.square().sum(), given))

    with dense_flex_attention(), ThreadPoolExecutor(1) as pool:
        found = pool.submit(capped, flex_attention).result()
    for own, wanted in zip(found, capped(written_out), strict=True):
        torch.testing.assert_close(own, wanted)


@pytest.mark.gt_world("simulated", size=2)
def test_a_captured_gradient_is_refused_on_threads(gt_world):
    with (
        dense_flex_attention(),
        pytest.raises(NotImplementedError, match="captures a tensor that requires a gradient"),
    ):
        assert_runs_equal(
            lambda: gradients(flex_attention, *inputs()), inputs, control=inputs, world=gt_world
        )


def sharded(mesh):
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}
    return parallelize_module(Attention(heads=1), mesh["tp"], plan)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_heads_on_other_ranks_are_the_unsharded_model(gt_world, gt_mesh):
    with dense_flex_attention():
        proof = assert_same_model(sharded, Attention, loss_of, batch, mesh=gt_mesh, data_dims=())
    assert proof.kind == "reordered"
