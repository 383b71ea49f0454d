"""Small modules from a grammar: both chunkers give one verdict, and what they accept is the whole
model's (G3).
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models.chunkable import DIM, Net, Then
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ChunkError,
    ChunkWarning,
    assert_bitwise_different,
    assert_bitwise_equal,
    eager_chunked,
    trace_step,
)

REFUSED = (ChunkError, ChunkWarning)
pytestmark = pytest.mark.filterwarnings("error::pytest_gtrainer.ChunkWarning")


def column(rows):
    return rows.view(-1, 1, 1)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x)


def folded(then):
    """All rows and positions as one dimension, the rows in front."""
    return lambda x: then(x.flatten(0, 1)).unflatten(0, (x.shape[0], -1))


def turned(then):
    """The same, with the positions in front."""
    return lambda x: (
        then(x.transpose(0, 1).flatten(0, 1))
        .unflatten(0, (x.shape[1], -1))
        .transpose(0, 1)
        .contiguous()
    )


def counted(x):
    return torch.arange(x.shape[0], dtype=x.dtype)


def buffered(x):
    """Memory of the batch's size, written to by parts."""
    memory = x.new_zeros(x.shape)
    memory[:, :2] = x[:, 2:4]
    return x + memory


OPERATORS = {
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1) * 3,
    "cumsum": lambda x: x.cumsum(1) / 3,
    "sort": lambda x: x.sort(1).values,
    "flip": lambda x: x.flip(1),
    "norm": lambda x: F.layer_norm(x, (DIM,)),
    "attend": attend,
    "pairs": lambda x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x,
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "last": lambda x: x + x[torch.arange(x.shape[0]), x[..., 0].argmax(1)][:, None],
    "into themselves": lambda x: (
        x + x.new_zeros(x.shape).index_add(0, torch.arange(x.shape[0]), x.tanh())
    ),
    "zeros": lambda x: x * x.new_ones(x.shape[0], 1, 1) + torch.zeros(x.shape[0], 1, 1),
    "buckets": lambda x: x + torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])) / 4,
    "buffered": buffered,
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "folded": folded(torch.tanh),
    "folded norm": folded(lambda rows: F.layer_norm(rows, (DIM,))),
    "turned": turned(torch.sin),
    "where": lambda x: torch.where(x > 0, x, x / 4),
    # they mix rows
    "softmax of rows": lambda x: x.softmax(0) * 3,
    "cumsum of rows": lambda x: x.cumsum(0) / 3,
    "flip of rows": lambda x: x.flip(0),
    "mean of rows": lambda x: x - x.mean(0),
    "first row": lambda x: x - x[:1],
    "number": lambda x: x * column(1 + counted(x)),
    "first two": lambda x: torch.where(column(counted(x)) < 2, x, x / 2),
    "share": lambda x: x * (8.0 / x.shape[0]),
    "count": lambda x: x / x.new_ones(x.shape[0]).sum(),
    "steps": lambda x: x + column(torch.linspace(-1, 1, x.shape[0])),
    "running count": lambda x: x * column(torch.ones(x.shape[0]).cumsum(0)),
    "identity": lambda x: (torch.eye(x.shape[0]) @ x.flatten(1)).view(x.shape),
    "folded in two": lambda x: x + x.reshape(2, -1, DIM).mean(1, keepdim=True).mean(0),
    "folded in two, flip": lambda x: x.reshape(2, -1, DIM).flip(0).reshape(x.shape),
    "folded attention": folded(lambda rows: attend(rows[None])[0]),
    "turned mean": turned(lambda rows: rows - rows.mean(0)),
    "two orders": lambda x: folded(lambda rows: rows + x.transpose(0, 1).flatten(0, 1))(x),
    "copied in reverse": lambda x: x.index_copy(0, torch.arange(x.shape[0] - 1, -1, -1), x),
    "numbered memory": lambda x: (
        x + x.new_zeros(x.shape[0], 2).add_(counted(x)[:, None]).sum(1)[:, None, None]
    ),
}
MIXES = set(list(OPERATORS)[list(OPERATORS).index("softmax of rows") :])


def programs(seed, number):
    """One to three operators, one behind the other, or added to what they read; every fourth mixes
    nowhere.
    """
    choose = random.Random(seed)
    for place in range(number):
        names = [name for name in OPERATORS if place % 4 or name not in MIXES]
        yield tuple(
            (choose.choice(names), choose.random() < 0.3) for _ in range(choose.randint(1, 3))
        )


def forward_of(program):
    def forward(x):
        for name, is_added in program:
            x = x + OPERATORS[name](x) if is_added else OPERATORS[name](x)
        return x

    return forward


def new_model(program):
    torch.manual_seed(0)
    return Net(lambda: Then(forward_of(program)))


def results(model, loss):
    return {
        "loss": loss.detach(),
        **{name: parameter.grad for name, parameter in model.named_parameters()},
    }


def whole(program, inputs):
    model = new_model(program)
    loss = ce_step(model, *inputs)
    loss.backward()
    return results(model, loss)


def by_graph(program, inputs, config):
    model = new_model(program)
    traced = trace_step(model, ce_step, inputs, chunk=config)
    return results(model, traced.with_graph(chunked(traced, config)).replay(model, *inputs))


def by_eager_code(program, inputs, config):
    model = new_model(program)
    with eager_chunked(model, config):
        loss = ce_step(model, *inputs)
        loss.backward()
    return results(model, loss)


def verdict(side, *given):
    try:
        return side(*given)
    except REFUSED as error:
        return None if "layers.0" in str(error) else str(error)


def check(program, config):
    """Return whether both sides accept a program. Assert that they agree, and that an accepted one
    is the whole model up to rounding.
    """
    inputs = token_batch(0, 4, 6)
    graph, eager = (verdict(side, program, inputs, config) for side in (by_graph, by_eager_code))
    assert (graph is None) == (eager is None), (
        f"{program}: graph refuses {graph is None}, eager {eager is None}"
    )
    if graph is None or eager is None:
        return False
    assert_bitwise_equal(graph, eager, what=f"{program} by graph against eager chunking")
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(
        graph, whole(program, inputs), **close, msg=lambda text: f"{program}: {text}"
    )
    return True


CONFIG = strict("layers.*")


@pytest.mark.second_tier
def test_some_programs():
    accepted = [check(program, CONFIG) for program in programs(seed=5, number=6)]
    assert {*accepted} == {True, False}


@pytest.mark.second_tier
@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator(name):
    """Those that mix are refused, by both; all others are accepted."""
    assert check(((name, False),), CONFIG) == (name not in MIXES)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]
)
def test_many_programs(seed):
    accepted = [check(program, CONFIG) for program in programs(seed, number=40)]
    assert {*accepted} == {True, False}


def test_what_a_mixing_module_would_give():
    """The twin: where somebody answers for it, both sides give another model's numbers."""
    program, inputs, answered = (
        (("number", False),),
        token_batch(0, 4, 6),
        replace(strict("layers.*"), row_wise=("layers.*",)),
    )
    graph = by_graph(program, inputs, answered)
    assert_bitwise_equal(graph, by_eager_code(program, inputs, answered))
    assert_bitwise_different(graph, whole(program, inputs), what="row numbers of chunks")
