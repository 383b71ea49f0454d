"""Operators along the chunk dimension: refused by graph and eager chunking alike, or equal to the
whole model (G3).
"""

import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixtures.chunking import chunked, strict, token_batch
from fixtures.models import chunkable
from fixtures.models.chunkable import DIM, HEADS, Attention, Net, Then, net
from fixtures.models.loss import ce_step
from pytest_gtrainer import (
    ChunkConfig,
    ChunkError,
    ChunkWarning,
    assert_bitwise_different,
    eager_chunked,
    trace_step,
)
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.passes.chunking.mixing import Call, Operand, Rows, Statistic, propagate

REFUSED = (ChunkError, ChunkWarning)
pytestmark = pytest.mark.filterwarnings("error::pytest_gtrainer.ChunkWarning")


def model_of(then, extra=None):
    torch.manual_seed(0)
    return Net(lambda: Then(then, extra))


def by_graph(model, config, inputs):
    traced = trace_step(model, ce_step, inputs, chunk=config)
    return traced.with_graph(chunked(traced, config)).replay(model, *inputs)


def by_eager_code(model, config, inputs):
    with eager_chunked(model, config):
        return ce_step(model, *inputs)


SIDES = pytest.mark.parametrize("side", [by_graph, by_eager_code])
BATCH = strict("layers.*")


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)


def folded_attention(x):
    q = heads(x.flatten(0, 1))
    return x + F.scaled_dot_product_attention(q[None], q[None], q[None])[0].transpose(0, 1).flatten(
        1
    ).unflatten(0, x.shape[:2])


def folded_plain_attention(x):
    rows = x.flatten(0, 1)
    return ((rows @ rows.T).softmax(-1) @ rows).unflatten(0, x.shape[:2])


def contrastive(x):
    rows = F.normalize(x.mean(1), dim=-1)
    return x * torch.logsumexp(rows @ rows.T, 1)[:, None, None]


def sorted_rows(x):
    return x.sort(0).values


def as_complex(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def real(x):
    return torch.view_as_real(x).flatten(-2)


def column(rows):
    return rows.view(-1, 1, 1)


def numbered_memory(x):
    memory = x.new_zeros(x.shape[0], 2)
    memory[:, 1] = torch.arange(x.shape[0])
    return x + memory.sum(1)[:, None, None]


def routed_order(rows):
    return rows[(rows[:, 0] > 0).long().argsort(stable=True)]


def by_ranks(x):
    return x * (x[:, 0, 0] > 0).cumsum(0)[:, None, None]


def kinds_of(x):
    return x.detach().argmax(-1)[:, 0]


def by_its_number(numbers):
    return numbers.float()[:, None, None]


def numbered_among_others(x):
    """Scale the rows with a mask by their own numbers, which ``nonzero`` gives."""
    chosen = (x[:, 0, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, chosen, x[chosen] * by_its_number(chosen))


def tokens_of(x):
    """Return the rows of all positions and the expert of each, 0 to 2."""
    rows = x.flatten(0, 1)
    return rows, (rows[:, 0] > 0).long() + (rows[:, 1] > 0).long()


def places_of(experts):
    """Return how many rows up to this one have each row's expert."""
    chosen = F.one_hot(experts, 3)
    return (chosen.cumsum(0) * chosen).sum(1)


def dropped(mask):
    """Set the rows to zero that ``mask(experts)`` names, or numbers."""

    def then(x):
        rows, experts = tokens_of(x)
        kept = rows.clone()
        kept[mask(experts)] = 0
        return kept.view(x.shape)

    return then


def only(chosen):
    """Add the rows that ``chosen(experts)`` numbers once more."""

    def then(x):
        rows, experts = tokens_of(x)
        places = chosen(experts)
        return rows.index_add(0, places, rows[places]).view(x.shape)

    return then


def order_of(experts):
    return experts.argsort(stable=True)


def counted(function):
    """Bring ``function(rows, counts, experts)`` into rows, where the counts are bincount's."""

    def then(x):
        rows, experts = tokens_of(x)
        return function(rows, torch.bincount(experts, minlength=DIM), experts).view(x.shape)

    return then


def filled_beyond_a_capacity(x):
    rows, experts = tokens_of(x)
    return rows.index_fill(0, (places_of(experts) > 4).nonzero()[:, 0], 0.0).view(x.shape)


def selected_within_a_capacity(x):
    rows, experts = tokens_of(x)
    return x + rows.masked_select(places_of(experts)[:, None] <= 4).sum()


def repeated_within_a_capacity(x):
    rows, experts = tokens_of(x)
    return x + rows.repeat_interleave((places_of(experts) <= 4).long(), dim=0).sum()


def in_parts_of_equal_size(x):
    rows, experts = tokens_of(x)
    order = order_of(experts)
    first, second = rows[order].chunk(2)
    return torch.cat([first * 2, second])[order.argsort()].view(x.shape)


def experts_of_equal_size(x):
    rows, experts = tokens_of(x)
    order = order_of(experts)
    out = rows[order].view(3, -1, DIM) * torch.arange(3.0)[:, None, None]
    return out.flatten(0, 1)[order.argsort()].view(x.shape)


def grouped_by_fixed_numbers(x):
    rows, experts = tokens_of(x)
    order = order_of(experts)
    ends = ((torch.arange(2) + 1) * (len(rows) // 2)).int()
    weights = torch.ones(2, DIM, DIM, dtype=torch.bfloat16)
    out = torch._grouped_mm(rows[order].bfloat16(), weights, offs=ends)
    return out[order.argsort()].float().view(x.shape)


def aligned_places_of(experts):
    """Return the order of rows, and their places where each expert's begin at a multiple of 4."""
    order = order_of(experts)
    counts = torch.bincount(experts, minlength=3)
    room = (counts.clamp(min=4) + 3) // 4 * 4
    numbers = torch.arange(len(experts)) - (counts.cumsum(0) - counts)[experts[order]]
    return order, (room.cumsum(0) - room)[experts[order]] + numbers


def with_room(places_to_read):
    """Send rows to their experts with room for alignment; read ``places_to_read(order, places)``."""

    def then(x):
        rows, experts = tokens_of(x)
        order, places = aligned_places_of(experts)
        sent = rows.new_zeros(len(rows) + 3 * 4, DIM).index_copy(0, places, rows[order]).tanh()
        order, places = places_to_read(order, places)
        return rows.index_add(0, order, sent[places]).view(x.shape)

    return then


def with_room_by_elements(x):
    rows, experts = tokens_of(x)
    order, places = aligned_places_of(experts)
    places = places[:, None].expand(-1, DIM)
    sent = rows.new_zeros(len(rows) + 3 * 4, DIM).scatter(0, places, rows[order])
    return rows.index_add(0, order, (sent * 2).relu().gather(0, places)).view(x.shape)


def half(numbers):
    return numbers.topk(len(numbers) // 2).indices


def aligned_places_up_to_the_last_row(x):
    """Places with room for alignment are beyond the last row, so this guard moves some of them."""
    rows, experts = tokens_of(x)
    order, places = aligned_places_of(experts)
    places = places.clamp(max=len(rows) - 1)
    sent = torch.zeros_like(rows).index_copy(0, places, rows[order])
    return rows.index_add(0, order, sent[places]).view(x.shape)


def bias_of_repeated_experts(x):
    """In any order but that of the experts, a row would get another one's."""
    rows, experts = tokens_of(x)
    bias = torch.arange(3.0 * DIM).view(3, DIM)
    counts = torch.bincount(experts, minlength=3)
    return (rows + bias.repeat_interleave(counts, dim=0)).view(x.shape)


def bias_of_its_expert(x):
    rows, experts = tokens_of(x)
    order = order_of(experts)
    bias = torch.arange(3.0 * DIM).view(3, DIM)
    return (
        torch.zeros_like(rows).index_add(0, order, rows[order] + bias[experts[order]]).view(x.shape)
    )


def guarded_order(x):
    """Clamp an order to the rows, which it never leaves."""
    rows, experts = tokens_of(x)
    order = order_of(experts).clamp(0, len(rows) - 1).clamp_max(len(rows))
    return rows.index_add(0, order, rows[order].tanh()).view(x.shape)


MIXING = {
    "half of what has room": (
        with_room(lambda order, places: (half(order), places[half(order)])),
        None,
        r"aten\.index\.Tensor.* leaves out rows of dimension 0",
    ),
    "half of the elements of an order": (
        lambda x: x + x.gather(0, half(kinds_of(x))[:, None, None].expand(-1, *x.shape[1:])).mean(),
        None,
        r"gather.* leaves out rows of dimension 0",
    ),
    "places with room, up to the last row": (
        aligned_places_up_to_the_last_row,
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "an order up to half of the rows": (
        only(lambda experts: order_of(experts).clamp(0, len(experts) // 2)),
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "a capacity": (
        dropped(lambda experts: places_of(experts) > 4),
        None,
        r"index_put.* leaves out rows of dimension 0 by integers .* as a capacity does",
    ),
    "a capacity, filled": (
        filled_beyond_a_capacity,
        None,
        r"index_fill.* leaves out rows of dimension 0",
    ),
    "a capacity, selected": (
        selected_within_a_capacity,
        None,
        r"masked_select.* leaves out rows of dimension 0",
    ),
    "a capacity, repeated": (
        repeated_within_a_capacity,
        None,
        r"index_select.* leaves out rows of dimension 0",
    ),
    "a capacity, in its order": (
        only(lambda experts: order_of(experts)[places_of(experts)[order_of(experts)] <= 4]),
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "a capacity, the last place for all others": (
        only(lambda experts: places_of(experts).clamp(max=4)),
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "a capacity, one place for all others": (
        only(lambda experts: torch.where(places_of(experts) > 4, 0, order_of(experts))),
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "ranks below a number": (
        dropped(lambda experts: order_of(experts).argsort() < 5),
        None,
        r"index_put.* leaves out rows of dimension 0",
    ),
    "the first half of an order": (
        only(lambda experts: order_of(experts)[: len(experts) // 2]),
        None,
        r"index.* leaves out rows of dimension 0",
    ),
    "a row of a folded order": (
        only(lambda experts: order_of(experts).view(2, -1)[0]),
        None,
        r"index.* leaves out rows of dimension 0|index_add.* brings into rows",
    ),
    "the first four of an order": (
        dropped(lambda experts: order_of(experts)[:4]),
        None,
        r"index_put.* leaves out rows of dimension 0",
    ),
    "experts over their capacity": (
        dropped(lambda experts: (F.one_hot(experts, 3).sum(0) > 7)[experts]),
        None,
        r"index_put.* leaves out rows of dimension 0",
    ),
    "the expert of most rows": (
        dropped(lambda experts: experts == torch.bincount(experts, minlength=3).argmax()),
        None,
        r"index_put.* leaves out rows of dimension 0",
    ),
    "rows among unique ones": (
        dropped(lambda experts: experts.unique(return_inverse=True)[1] == 0),
        None,
        r"index_put.* leaves out rows of dimension 0",
    ),
    "data for row numbers": (
        lambda x: x + x[kinds_of(x) % 2],
        None,
        r"index.* takes data for the numbers of rows of dimension 0",
    ),
    "sums of rows by their data": (
        lambda x: x + torch.zeros_like(x).index_add(0, kinds_of(x) % 2, x)[kinds_of(x) % 2],
        None,
        r"index.* takes data for the numbers of rows of dimension 0",
    ),
    "an order in two halves": (
        in_parts_of_equal_size,
        None,
        r"split.* splits dimension 0, whose order the data decide, inside",
    ),
    "an order folded behind experts": (experts_of_equal_size, None, r"view.* folds rows into"),
    "an order grouped by fixed numbers": (
        grouped_by_fixed_numbers,
        None,
        r"grouped_mm.* groups rows of dimension 0 by fixed numbers",
    ),
    "times counts": (
        counted(lambda rows, counts, _: rows * counts.float()),
        None,
        r"mul.* brings into rows a value over all of them \(.*bincount",
    ),
    "divided by counts": (
        counted(lambda rows, counts, _: rows / (counts + 1)),
        None,
        r"div.* brings into rows a value over all of them \(.*bincount",
    ),
    "where counts are large": (
        counted(lambda rows, counts, _: torch.where(counts > 3, rows, 0.0)),
        None,
        r"where.* brings into rows a value over all of them \(.*bincount",
    ),
    "logarithms of counts": (
        counted(lambda rows, counts, _: rows * torch.log(counts + 1.0)),
        None,
        r"mul.* brings into rows a value over all of them \(.*bincount",
    ),
    "counts of each row's kind": (
        counted(lambda rows, counts, experts: rows * counts[experts][:, None]),
        None,
        r"mul.* brings into rows .* \(integers computed across rows",
    ),
    "attention, folded": (
        folded_attention,
        None,
        r"_scaled_dot_product_.* attends over dimension 2",
    ),
    "plain attention, folded": (
        folded_plain_attention,
        None,
        r"mm.* relates every row to every other one",
    ),
    "softmax": (lambda x: x.softmax(0), None, r"_softmax.* takes the softmax over dimension 0"),
    "glu": (
        lambda x: torch.cat([torch.nn.functional.glu(x, 0)] * 2),
        None,
        r"glu.* gates one half by the other along dimension 0",
    ),
    "cumsum": (lambda x: x.cumsum(0), None, r"cumsum.* accumulates along dimension 0"),
    "complex numbers": (
        lambda x: torch.fft.ifft2(torch.fft.fft2(x, dim=(0, 2)), dim=(0, 2)).real,
        None,
        r"_fft_c2c.* transforms dimension 0",
    ),
    "the largest of complex numbers": (
        lambda x: real(as_complex(x) / as_complex(x).abs().amax()),
        None,
        r"div.* brings into rows a value over all of them \(.*amax",
    ),
    "sort": (sorted_rows, None, r"sort.* orders the rows of dimension 0"),
    "flip": (lambda x: x.flip(0), None, r"flip.* reverses dimension 0"),
    "roll": (lambda x: x.roll(1, 0), None, r"roll.* rolls dimension 0"),
    "summed up in the order of experts": (
        lambda x: routed_order(x.flatten(0, 1)).cumsum(0).unflatten(0, x.shape[:2]),
        None,
        r"cumsum.* accumulates along dimension 0",
    ),
    "roll of everything": (
        lambda x: x.roll(1),
        None,
        r"roll.* rolls dimension|view.* folds rows into",
    ),
    "pad": (
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))[1:],
        None,
        r"constant_pad_nd.* pads dimension 0",
    ),
    "first row": (lambda x: x - x[:1], None, r"slice.* takes a part of dimension 0"),
    "mean": (
        lambda x: x - x.mean(0),
        None,
        r"sub.* brings into rows a value over all of them \(.*mean",
    ),
    "largest": (
        lambda x: x / x.abs().amax(),
        None,
        r"div.* brings into rows a value over all of them \(.*amax",
    ),
    "count": (
        lambda x: x / (x > 0).sum(),
        None,
        r"div.* brings into rows a value over all of them \(.*sum",
    ),
    "gram matrix": (
        lambda x: x @ (x.flatten(0, 1).T @ x.flatten(0, 1)),
        None,
        r"brings into rows a value over all of them \(.*mm",
    ),
    "einsum": (
        lambda x: torch.einsum("bsd,csd->bcs", x, x).mean(1)[..., None] * x,
        None,
        r"every row to every other",
    ),
    "contrastive": (
        contrastive,
        None,
        r"relates every row to every other one \(dimensions 0 and 1\)",
    ),
    "batch norm": (
        lambda x, norm: norm(x.transpose(1, 2)).transpose(1, 2).contiguous(),
        lambda: nn.BatchNorm1d(DIM),
        r"batch_norm.* takes batch statistics over dimension 0",
    ),
    "group norm, folded": (
        lambda x, norm: norm(x.flatten(0, 1).T[None])[0].T.unflatten(0, x.shape[:2]),
        lambda: nn.GroupNorm(2, DIM),
        r"group_norm.* normalises over dimension 2",
    ),
    "layer norm, folded": (
        lambda x: F.layer_norm(x.transpose(0, 2), x.shape[:1]).transpose(0, 2),
        None,
        r"native_layer_norm.* normalises over dimension 2",
    ),
    "convolution, folded": (
        lambda x, conv: conv(x.flatten(0, 1).T[None])[0].T.unflatten(0, x.shape[:2]),
        lambda: nn.Conv1d(DIM, DIM, 3, padding=1),
        r"convolution.* convolves over dimension 2",
    ),
    "fixed order": (
        lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
        None,
        r"index.* chooses rows of dimension 0 by a fixed number",
    ),
    "the first half by its numbers": (
        lambda x: x + x[torch.arange(x.shape[0] // 2)].mean(0),
        None,
        r"index.* chooses rows of dimension 0 by a fixed number",
    ),
    "row numbers": (
        lambda x: x * column(torch.arange(x.shape[0])),
        None,
        r"mul.* brings into rows what depends on their",
    ),
    "the first two rows": (
        lambda x: torch.where(column(torch.arange(x.shape[0])) < 2, x, 0.0),
        None,
        r"where.* brings into rows what depends on their number",
    ),
    "row numbers in memory": (
        numbered_memory,
        None,
        r"add.* brings into rows what depends on their number",
    ),
    "the batch's size": (lambda x: x / x.shape[0], None, r"div.* \(how many rows there are\)"),
    "one by the batch's size": (
        lambda x: x * (1.0 / x.shape[0]),
        None,
        r"mul.* \(how many rows there are\)",
    ),
    "a scalar of the batch's size": (
        lambda x: x * torch.full((), float(x.shape[0])),
        None,
        r"mul.* a value over all of them \(full.*, by how many rows there are\)",
    ),
    "a constant of the batch's size": (
        lambda x: x / torch.tensor(float(x.shape[0])),
        None,
        r"div.* a value over all of them \(.*, by how many rows there are\)",
    ),
    "a constant for each row": (
        lambda x: x * column(torch.tensor([float(i) for i in range(x.shape[0])])),
        None,
        r"mul.* brings into rows what depends on their number",
    ),
    "a constant of equal rows": (
        lambda x: x * column(torch.tensor([1.0 / x.shape[0]] * x.shape[0])),
        None,
        r"mul.* brings into rows what depends on their number",
    ),
    "row numbers alone": (
        lambda x: column(torch.arange(x.shape[0]).float()).expand(x.shape).contiguous(),
        None,
        r"depends on their number, or on how many rows there are, and leaves the module in "
        r"dimension 0",
    ),
    "looked up by a count of rows": (
        lambda x: x + torch.ones(9, 3)[(x[:, 0, 0] > 0).long().cumsum(0)].sum(1)[:, None, None],
        None,
        r"index.* looks up numbers by integers computed across rows",
    ),
    "rows of a parameter": (
        lambda x, table: x + table.weight[: x.shape[0], None],
        lambda: nn.Embedding(6, DIM),
        r"add.* brings into rows what depends on their number",
    ),
    "row numbers that are looked up": (
        lambda x, table: x + table(torch.arange(x.shape[0]))[:, None],
        lambda: nn.Embedding(4, DIM),
        r"add.* brings into rows what depends on their number",
    ),
    "ones that are counted": (
        lambda x: x * x.new_ones(x.shape[0]).sum(),
        None,
        r"mul.* a value over all of them \(sum",
    ),
    "ones that are accumulated": (
        lambda x: x * column(torch.ones(x.shape[0]).cumsum(0)),
        None,
        r"cumsum.* accumulates along dimension 0",
    ),
    "an exchange matrix": (
        lambda x: (torch.eye(x.shape[0]).flip(0) @ x.flatten(1)).view(x.shape),
        None,
        r"eye.* relates every row to every other one",
    ),
    "a triangle": (
        lambda x: (torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x.flatten(1)).view(x.shape),
        None,
        r"ones.* relates every row to every other one",
    ),
    "copied in another order": (
        lambda x: x.index_copy(0, torch.arange(x.shape[0] - 1, -1, -1), x),
        None,
        r"index_copy.* chooses rows of dimension 0 by a fixed number",
    ),
    "folded, mean": (
        lambda x: x + x.reshape(2, -1, DIM).mean(0).mean(0),
        None,
        r"reshape|view.* folds rows into",
    ),
    "folded, reversed": (
        lambda x: x.reshape(2, -1, DIM).flip(0).reshape(x.shape),
        None,
        r"view.* folds rows into",
    ),
    "folded behind positions": (
        lambda x: x + x.transpose(0, 1).reshape(4, -1, DIM).mean((0, 1)),
        None,
        r"reshape|view.* folds rows into",
    ),
    "two orders of rows": (
        lambda x: (x.flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)).view(x.shape),
        None,
        r"add.* puts rows beside others, in another order",
    ),
    "searched among rows": (
        lambda x: x + torch.searchsorted(x[:, 0, 0].detach(), x),
        None,
        r"searchsorted.* searches along dimension 0",
    ),
    "rows that are counted by the data": (
        lambda x: (
            x
            * column(
                torch.zeros(x.shape[0]).index_add(
                    0, (x[:, 0, 0] > 0).long(), torch.ones(x.shape[0])
                )
            )
        ),
        None,
        r"mul.* brings into rows .* \(integers computed across rows",
    ),
    "numbers across rows": (
        by_ranks,
        None,
        r"mul.* brings into rows .* \(integers computed across rows",
    ),
    "numbers of unique rows": (
        lambda x: x + by_its_number(kinds_of(x).unique(return_inverse=True)[1]),
        None,
        r"_to_copy.* brings into rows .* \(integers computed across rows",
    ),
    "looked up by numbers of unique rows": (
        lambda x: (
            x
            + torch.ones(9, 3)[kinds_of(x).unique_consecutive(return_inverse=True)[1]].sum(1)[
                :, None, None
            ]
        ),
        None,
        r"index.* looks up numbers by integers computed across rows",
    ),
    "row numbers that a mask chooses": (
        numbered_among_others,
        None,
        r"_to_copy.* brings into rows .* \(integers computed across rows",
    ),
    "rows that are found among others": (
        lambda x: torch.where(torch.isin(kinds_of(x), kinds_of(x) + 1)[:, None, None], x, -x),
        None,
        r"where.* brings into rows .* \(integers computed across rows",
    ),
    "integers of an operator nobody knows": (
        lambda x: x + by_its_number(torch.ops.gtrainer_tests.ranked(kinds_of(x))),
        None,
        r"_to_copy.* brings into rows .* \(integers computed across rows",
    ),
    "an operator nobody knows": (
        lambda x: x + torch.cdist(x.transpose(0, 1), x.transpose(0, 1)).sum(-1).T[..., None],
        None,
        "relates every row to every other one|may mix dimension 1: .* not known.*row_wise",
    ),
}


@pytest.mark.second_tier(
    "plain attention, folded-by_graph",
    "pad-by_graph",
    "einsum-by_graph",
    "layer norm, folded-by_graph",
    "fixed order-by_graph",
    "the first two rows-by_graph",
    "the batch's size-by_graph",
    "a scalar of the batch's size-by_graph",
    "row numbers that are looked up-by_graph",
    "ones that are accumulated-by_graph",
    "a triangle-by_graph",
    "folded, mean-by_graph",
    "folded behind positions-by_graph",
    "searched among rows-by_graph",
    "numbers across rows-by_graph",
    "gram matrix-by_graph",
    "attention, folded-by_graph",
    "a capacity, selected-by_graph",
    "a capacity, repeated-by_graph",
    "a capacity, in its order-by_graph",
    "a capacity, the last place for all others-by_graph",
    "a capacity, one place for all others-by_graph",
    "ranks below a number-by_graph",
    "a row of a folded order-by_graph",
    "rows among unique ones-by_graph",
    "sums of rows by their data-by_graph",
    "an order folded behind experts-by_graph",
    "divided by counts-by_graph",
    "where counts are large-by_graph",
    "logarithms of counts-by_graph",
)
@SIDES
@pytest.mark.parametrize(("then", "extra", "message"), MIXING.values(), ids=MIXING)
def test_an_operator_that_mixes_rows_is_refused(side, then, extra, message):
    """The message has operator, module and dimension."""
    with pytest.raises(REFUSED, match=message) as refused:
        side(model_of(then, extra), BATCH, token_batch(0, 4, 6))
    assert "inside layers.0: there lies the batch dimension" in str(refused.value)


def last_of(x):
    last = x[..., 0].argmax(1)
    return x * x[torch.arange(x.shape[0]), last].unsqueeze(1)


def routed(x):
    rows = x.flatten(0, 1)
    order = (rows[:, 0] > 0).long().argsort(stable=True)
    out = torch.zeros_like(rows)
    return x + out.index_add(0, order, rows[order].tanh()).unflatten(0, x.shape[:2])


def routed_by_counts(x):
    """Route by an order that follows from counts of the data alone, as an index of rows and as one
    of every element.
    """
    rows = x.flatten(0, 1)
    kind = (rows[:, 0] > 0).long()
    order = kind.argsort(stable=True)
    by_kind = torch.repeat_interleave(torch.bincount(kind, minlength=3), output_size=rows.shape[0])
    again = by_kind.argsort(stable=True)
    moved = rows[order][again] + rows[order].gather(0, again[:, None].expand(-1, DIM))
    return x + torch.zeros_like(rows).index_add(0, order, moved).unflatten(0, x.shape[:2])


def made_by_itself(x):
    """Rows that are all the same, memory that is written to, sums of rows into themselves."""
    batch, seq = x.shape[:2]
    rows = x.new_full((batch, seq, DIM), 0.5).copy_(x) + torch.ones(batch, 1, 1) * x.new_zeros(
        batch, seq, 1
    )
    itself = x.new_zeros(batch).index_add(0, torch.arange(batch), x.mean((1, 2)))
    return rows * torch.empty_like(x).fill_(2.0) + column(itself)


def in_the_place_of_its_expert(x):
    """Lay rows of an expert side by side, by counts and places that stay whole numbers."""
    rows, experts = tokens_of(x)
    counts = torch.bincount(experts, minlength=3)
    places = (counts.cumsum(0) - counts)[experts] + places_of(experts) - 1
    by_expert = torch.zeros_like(rows).index_copy(0, places, rows)
    inverse = torch.empty_like(places).index_copy(0, places, torch.arange(len(rows)))
    return by_expert.tanh()[places].view(x.shape) + rows[inverse][places].view(x.shape)


def expert_by_expert(x):
    """Choose rows of an order by their own numbers, sorted with it or looked up by it."""
    rows, experts = tokens_of(x)
    numbers, order = experts.sort(stable=True)
    out = torch.zeros_like(rows)
    for expert in range(3):
        mask = numbers == expert
        again = experts[order] == expert
        out = out.index_add(0, order[mask], rows[order][again] * (expert + 1.0))
        out[experts == expert] += rows[experts == expert]
    return out.view(x.shape)


def twice_each(x):
    """Give each row to two experts, one expert's rows after another's, with pads behind."""
    rows, experts = tokens_of(x)
    order = torch.stack([experts, 2 - experts]).flatten().argsort(stable=True)
    padded = torch.cat([rows[order % len(rows)], rows.new_zeros(1, DIM)]).tanh()[:-1]
    return padded[order.argsort()].view(2, len(rows), DIM).sum(0).view(x.shape)


def load_of_experts(x, observer):
    """Count into a buffer; no count comes back to rows."""
    counts = torch.bincount(tokens_of(x)[1], minlength=3)
    observer.seen += (counts.float() / 2 + 1.0)[:3]
    return x


ROW_WISE = {
    "with room for alignment": (with_room(lambda order, places: (order, places)), None),
    "with room, by elements": (with_room_by_elements, None),
    "bias of its expert": (bias_of_its_expert, None),
    "guarded order": (guarded_order, None),
    "in the place of its expert": (in_the_place_of_its_expert, None),
    "expert by expert": (expert_by_expert, None),
    "twice each": (twice_each, None),
    "load of experts": (load_of_experts, lambda: Observer()),
    "fills in NaN": (
        lambda x: torch.where(x.masked_fill(x > 1, float("nan")).isnan(), 0.5 * x, x),
        None,
    ),
    "buckets": (
        lambda x: (
            x
            + torch.bucketize(x, torch.tensor([-1.0, 0.0]))
            + torch.searchsorted(torch.tensor([0.0, 0.5]), x)
        ),
        None,
    ),
    "searched in each row": (
        lambda x: x + torch.searchsorted(x.detach().sort(-1).values, x.detach()),
        None,
    ),
    "made by itself": (made_by_itself, None),
    "folded behind positions": (
        lambda x: (
            x
            + x.transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (x.shape[1], -1)).transpose(0, 1)
        ),
        None,
    ),
    "softmax of others": (
        lambda x: x.softmax(1) + x.cumsum(2) + x.flip(1) + F.pad(x, (1, 0))[..., :-1],
        None,
    ),
    "attention": (
        lambda x: (
            x
            + F.scaled_dot_product_attention(heads(x), heads(x), heads(x))
            .transpose(1, 2)
            .flatten(2)
        ),
        None,
    ),
    "layer norm": (
        lambda x, norm: norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
        lambda: nn.LayerNorm(DIM),
    ),
    # of positions; of a transposed sequence torch 2.14 traces a backward that does not run
    "group norm": (
        lambda x, norm: norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
        lambda: nn.GroupNorm(2, DIM),
    ),
    "batch norm that does not train": (
        lambda x, norm: norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
        lambda: nn.BatchNorm1d(DIM).eval(),
    ),
    "convolution": (
        lambda x, conv: conv(x.transpose(1, 2)).transpose(1, 2).contiguous(),
        lambda: nn.Conv1d(DIM, DIM, 3, padding=1),
    ),
    "row numbers": (last_of, None),
    "chosen positions": (lambda x: x + x[:, torch.tensor([0, 2, 1, 0, 0, 5])], None),
    "rows that a mask chooses": (
        lambda x: x.index_add(
            0, (x[:, 0, 0] > 0).nonzero()[:, 0], x[(x[:, 0, 0] > 0).nonzero()[:, 0]]
        ),
        None,
    ),
    "found among fixed numbers": (
        lambda x: torch.where(torch.isin(kinds_of(x), torch.tensor([1, 5]))[:, None, None], x, -x),
        None,
    ),
    "routing": (routed, None),
    "routing by counts": (routed_by_counts, None),
    "einsum": (lambda x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x, None),
    "complex numbers": (
        lambda x: (
            real(
                as_complex(x)
                * torch.polar(torch.ones(x.shape[-1] // 2), torch.arange(x.shape[-1] / 2))
            )
            + torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1).real
        ),
        None,
    ),
}


@pytest.mark.second_tier(
    "einsum-by_graph",
    "made by itself-by_graph",
    "folded behind positions-by_graph",
    "softmax of others-by_graph",
    "routing by counts-by_graph",
    "convolution-by_graph",
)
@SIDES
@pytest.mark.parametrize(("then", "extra"), ROW_WISE.values(), ids=ROW_WISE)
def test_the_same_along_other_dimensions_gives_the_numbers_of_the_whole_model(side, then, extra):
    """Nothing that a row computes for itself is refused; equal up to rounding, as kernels see other
    extents.
    """
    inputs = token_batch(0, 4, 6)
    expected = ce_step(model_of(then, extra), *inputs)
    torch.testing.assert_close(side(model_of(then, extra), BATCH, inputs), expected)


def deciding(then):
    """A forward that decides on its data, which fake tensors do not have."""
    return lambda x, *extra: then(x, *extra) if x.isfinite().all() else x


OF_TWINS_ALONE = (
    "row numbers",
    "the first two rows",
    "row numbers in memory",
    "the batch's size",
    "one by the batch's size",
    "a scalar of the batch's size",
    "a constant of the batch's size",
    "a constant for each row",
    "rows of a parameter",
    "a constant of equal rows",
    "row numbers alone",
    "row numbers that are looked up",
    "ones that are counted",
    "ones that are accumulated",
    "an exchange matrix",
    "a triangle",
    "rows that are counted by the data",
    "folded, mean",
    "folded, reversed",
    "folded behind positions",
    "the first half of an order",
    "the first four of an order",
    "sums of rows by their data",
    "an order in two halves",
    "an order folded behind experts",
    "an order grouped by fixed numbers",
    "half of what has room",
    "half of the elements of an order",
)
WITH_ROOM = ("with room for alignment", "with room, by elements")  # their extents tell it
FOLLOWED = {name: case for name, case in MIXING.items() if name not in OF_TWINS_ALONE}


@pytest.mark.parametrize(("then", "extra", "message"), FOLLOWED.values(), ids=FOLLOWED)
def test_a_forward_that_has_no_twin_is_followed_while_it_runs(then, extra, message):
    """It sees neither row numbers nor sizes, and refuses operators that mix rows with one text."""
    with pytest.raises(REFUSED, match=message) as refused:
        by_eager_code(model_of(deciding(then), extra), BATCH, token_batch(0, 4, 6))
    assert "inside layers.0: there lies the batch dimension" in str(refused.value)


FOLLOWED_ROWS = {name: case for name, case in ROW_WISE.items() if name not in WITH_ROOM}


@pytest.mark.parametrize(("then", "extra"), FOLLOWED_ROWS.values(), ids=FOLLOWED_ROWS)
def test_a_row_wise_forward_that_has_no_twin(then, extra):
    inputs = token_batch(0, 4, 6)
    expected = ce_step(model_of(then, extra), *inputs)
    torch.testing.assert_close(
        by_eager_code(model_of(deciding(then), extra), BATCH, inputs), expected
    )


def test_a_bias_that_is_repeated_by_counts_is_refused_with_the_way_out():
    with pytest.raises(ChunkError, match=r"repeated: write bias\[expert\[order\]\] in place of"):
        by_eager_code(model_of(bias_of_repeated_experts), BATCH, token_batch(0, 4, 6))


class FoldedAttention(Attention):
    """Attention on ``[tokens, DIM]``: all tokens see all tokens in front of them."""

    def forward(self, x):
        return super().forward(x[None])[0]


@pytest.mark.second_tier("False-by_graph")
@SIDES
@pytest.mark.parametrize("plain", [False, True])
def test_attention_over_a_batch_that_is_folded_into_tokens(side, plain):
    """A block by "batch" cuts what its attention attends over: other logits, in graph and eager
    code alike.
    """

    class Tokens(Net):
        def forward(self, tokens):
            x = self.tok_embeddings(tokens).flatten(0, 1)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x).unflatten(0, tokens.shape)

    model = Tokens(lambda: FoldedAttention(plain))
    with pytest.raises(
        REFUSED,
        match=(
            r"(attends over dimension 2|every row to every other|over dimension \d).* inside "
            r"layers\.0"
        ),
    ):
        side(model, BATCH, token_batch(0, 4, 6))
    logits, vouched = (
        model(token_batch(0, 4, 6)[0]),
        ChunkConfig("layers.*", row_wise=("layers.*",)),
    )
    with eager_chunked(model, vouched):
        assert_bitwise_different(
            model(token_batch(0, 4, 6)[0]), logits, what="what would have come"
        )


@SIDES
def test_rows_that_leave_in_another_order_are_refused(side):
    """Position after position, so chunks joined one behind the other would have all positions of
    one chunk first.
    """

    class Turned(Net):
        def forward(self, tokens):
            x = self.lm_head(self.layers[0](self.tok_embeddings(tokens)))
            return x.unflatten(0, tokens.T.shape).transpose(0, 1)

    model = Turned(lambda: Then(lambda x: x.transpose(0, 1).flatten(0, 1), None))
    with pytest.raises(
        REFUSED,
        match=r"rows in another order and leaves the module in dimension 0 inside layers\.0",
    ):
        side(model, BATCH, token_batch(0, 4, 6))


@SIDES
def test_who_answers_for_an_operator_is_believed(side):
    """``row_wise`` by the operator's full name."""

    def then(x):
        return x + torch.ops.gtrainer_tests.halved(x)

    inputs = token_batch(0, 4, 6)
    with pytest.raises(
        REFUSED,
        match=(
            r"halved.* may mix dimension 0: .* if it treats each row by itself, say so: "
            r".*row_wise"
        ),
    ):
        side(model_of(then), BATCH, inputs)
    vouched = ChunkConfig(
        "layers.*", early_grad_accumulation=False, row_wise=("gtrainer_tests::halved",)
    )
    torch.testing.assert_close(
        side(model_of(then), vouched, inputs), ce_step(model_of(then), *inputs)
    )


@torch.library.custom_op("gtrainer_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    """Nobody has registered what shape it gives."""
    return x * 3


def test_what_a_vouched_operator_returns_has_rows_where_their_extent_is():
    """Its shapes cannot be computed at other extents, so the present extents must decide."""

    def then(x):
        return x + torch.ops.gtrainer_tests.tripled(x.transpose(0, 1).contiguous()).transpose(0, 1)

    inputs = token_batch(0, 4, 6)
    vouched = ChunkConfig(
        "layers.*", early_grad_accumulation=False, row_wise=("gtrainer_tests::tripled",)
    )
    torch.testing.assert_close(
        by_eager_code(model_of(deciding(then)), vouched, inputs), ce_step(model_of(then), *inputs)
    )


@torch.library.custom_op("gtrainer_tests::ranked", mutates_args=())
def ranked(kinds: torch.Tensor) -> torch.Tensor:
    return kinds.argsort(stable=True).argsort()


ranked.register_fake(torch.empty_like)


@torch.library.custom_op("gtrainer_tests::observed", mutates_args=("seen",))
def observed(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    seen += 1
    return x * 0.5


observed.register_fake(lambda x, seen: torch.empty_like(x))


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


@SIDES
def test_rows_that_an_operator_returns_which_writes_to_a_buffer_are_rows(side):
    def then(x, observer):
        return x + torch.ops.gtrainer_tests.observed(x.detach(), observer.seen)

    def mixed(x, observer):
        return x + torch.ops.gtrainer_tests.observed(x.detach(), observer.seen).mean(0)

    inputs = token_batch(0, 4, 6)
    vouched = replace(BATCH, row_wise=("gtrainer_tests::observed",))
    expected = ce_step(model_of(then, Observer), *inputs)
    torch.testing.assert_close(side(model_of(then, Observer), vouched, inputs), expected)
    with pytest.raises(REFUSED, match=r"add.* brings into rows a value over all of them \(.*mean"):
        side(model_of(mixed, Observer), vouched, inputs)


@SIDES
def test_integers_of_an_operator_that_somebody_answers_for_are_data(side):
    def then(x):
        return x + by_its_number(torch.ops.gtrainer_tests.ranked(kinds_of(x)) * 0)

    inputs = token_batch(0, 4, 6)
    vouched = replace(BATCH, row_wise=("gtrainer_tests::ranked",))
    expected = ce_step(model_of(then), *inputs)
    torch.testing.assert_close(side(model_of(then), vouched, inputs), expected)


@torch.library.custom_op("gtrainer_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


halved.register_fake(lambda x: torch.empty_like(x))
halved.register_autograd(lambda ctx, grad: grad * 0.5)


@torch.library.custom_op("gtrainer_tests::norm", mutates_args=())
def norm(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


norm.register_fake(lambda x: torch.empty_like(x))
norm.register_autograd(lambda ctx, grad: grad - grad.mean(0))


@SIDES
def test_another_librarys_operator_is_not_taken_for_torchs_of_that_name(side):
    """``aten.norm`` without a dimension is a statistic; nobody knows what ``gtrainer_tests::norm``
    is.
    """
    with pytest.raises(REFUSED, match=r"norm.* may mix dimension 0: "):
        side(model_of(lambda x: x + torch.ops.gtrainer_tests.norm(x)), BATCH, token_batch(0, 4, 6))


@SIDES
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("block", [chunkable.Factories, chunkable.Literals])
def test_numbers_of_a_chunk_are_told_unless_somebody_answers_for_them(side, block, answers):
    """G15: row numbers and sizes are recomputed for each chunk, with a warning unless ``row_wise``
    names the module.
    """
    config = replace(BATCH, row_wise=("layers.*",) if answers else ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        side(net(block)(), config, token_batch(0, 4, 6))
    messages = [str(one.message) for one in caught if one.category is ChunkWarning]
    assert bool(messages) is not answers
    assert all(
        "if you mean those of each chunk, say so: ChunkConfig(row_wise=('layers.*',))" in one
        for one in messages
    )


class Centred(torch.autograd.Function):
    """The identity, whose backward takes the mean over rows away."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def hooked(hook):
    def then(x):
        y = x * 1
        y.register_hook(hook)
        return y * 2

    return then


@SIDES
@pytest.mark.parametrize(
    "then", [hooked(lambda grad: grad - grad.mean(0)), Centred.apply], ids=["hook", "function"]
)
def test_a_backward_of_the_models_own_that_mixes_rows_is_refused(side, then):
    """G3: of a hook on an activation, and of an ``autograd.Function``."""
    with pytest.raises(REFUSED, match=r"sub.* a value over all of them \(mean.*inside layers\.0"):
        side(model_of(then), BATCH, token_batch(0, 4, 6))


@SIDES
def test_a_backward_of_the_models_own_that_is_row_wise_gives_the_numbers_of_the_whole(side):
    def then(x):
        y = Halves.apply(x)
        y.register_hook(lambda grad: grad * grad.abs().amax(-1, keepdim=True))
        return y

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 0.5

        @staticmethod
        def backward(ctx, grad):
            return grad * 0.5

    inputs = token_batch(0, 4, 6)
    torch.testing.assert_close(
        side(model_of(then), BATCH, inputs), ce_step(model_of(then), *inputs)
    )


def test_a_hook_that_reads_numbers_is_left_out():
    seen = []
    inputs, model = (
        token_batch(0, 4, 6),
        model_of(hooked(lambda grad: seen.append(grad.sum().item()))),
    )
    with eager_chunked(model, BATCH):
        ce_step(model, *inputs).backward()
    assert len(seen) == 2
    mixing = model_of(lambda x: hooked(lambda grad: grad * grad.sum().item())(x).softmax(0))
    with pytest.raises(REFUSED, match="takes the softmax over dimension 0"):
        by_eager_code(mixing, BATCH, inputs)


aten = torch.ops.aten
TABLE = [
    (aten._softmax.default, (1, False), {1}),
    (aten._log_softmax.default, (-1, False), {2}),
    (aten.cumsum.default, (0,), {0}),
    (aten.cumprod.default, (2,), {2}),
    (aten.logcumsumexp.default, (-2,), {1}),
    (aten.sort.default, (1,), {1}),
    (aten.sort.default, (), {2}),
    (aten.topk.default, (1, 0), {0}),
    (aten.native_layer_norm.default, ([4], None, None, 1e-5), {2}),
    (aten.native_layer_norm.default, ([3, 4], None, None, 1e-5), {1, 2}),
    (aten.native_group_norm.default, (None, None, 2, 3, 4, 1, 1e-5), {1, 2}),
    (aten.native_batch_norm.default, (None, None, None, None, True, 0.1, 1e-5), {0, 2}),
    (
        aten.native_batch_norm.default,
        (None, None, torch.ones(3), torch.ones(3), False, 0.1, 1e-5),
        set(),
    ),
    (
        aten._batch_norm_with_update.default,
        (None, None, torch.zeros(3), torch.ones(3), 0.1, 1e-5),
        {0, 2},
    ),
    (
        aten._batch_norm_no_update.default,
        (None, None, torch.zeros(3), torch.ones(3), 0.1, 1e-5),
        set(),
    ),
    (
        aten._native_batch_norm_legit_no_training.default,
        (None, None, torch.ones(3), torch.ones(3), 0.1, 1e-5),
        set(),
    ),
    (aten.convolution.default, (torch.ones(5, 3, 1), None, [1], [0], [1], False, [0], 1), {1, 2}),
    (aten.avg_pool1d.default, ([2],), {2}),
    (aten.max_pool2d_with_indices.default, ([1, 2],), {1, 2}),
    (aten._fft_c2c.default, ([1], 0, True), {1}),
    (aten.flip.default, ([0, 2],), {0, 2}),
    (aten.roll.default, ([1], [1]), {1}),
    (aten.roll.default, ([1],), {0, 1, 2}),
    (aten.rot90.default, (2, [0, 1]), {0, 1}),
    (aten.slice.Tensor, (1, 1), {1}),
    (aten.slice.Tensor, (1, 0, 2), {1}),
    (aten.slice.Tensor, (2, 0, 9223372036854775807, 2), {2}),
    (aten.slice.Tensor, (1, 0, 9223372036854775807), set()),
    (aten.slice.Tensor, (-1, -2), {2}),
    (aten.select.int, (1, 0), {1}),
    (aten.unbind.int, (-1,), {2}),
    (aten.split.Tensor, (1, 1), {1}),
    (aten.split_with_sizes.default, ([1, 3], 2), {2}),
    (aten.unfold.default, (1, 2, 1), {1}),
    (aten.as_strided.default, ([2, 3], [12, 4]), {0, 1, 2}),
    (aten.diagonal.default, (0, 0, 2), {0, 2}),
    (aten.tril.default, (), {1, 2}),
    (aten.triu.default, (), {1, 2}),
    (aten.repeat.default, ([1, 2, 1],), {1}),
    (aten.repeat.default, ([3, 1, 1, 2],), {2}),
    (aten.constant_pad_nd.default, ([0, 0, 1, 0],), {1}),
    (aten.constant_pad_nd.default, ([0, -1],), {2}),
    (aten.constant_pad_nd.default, ([0, 0, 0, 0, 0, 2],), {0}),
    (aten.constant_pad_nd.default, ([0, 0, 0, 0],), set()),
    (aten.reflection_pad1d.default, ([1, 0],), {2}),
    (aten.relu.default, (), set()),
    (aten.transpose.int, (0, 2), set()),
]


@pytest.mark.parametrize(("operator", "arguments", "mixed"), TABLE, ids=str)
def test_an_operator_is_refused_along_exactly_the_dimensions_that_it_mixes(
    operator, arguments, mixed
):
    """G3, G24: of a tensor of three dimensions each in turn is that of the rows."""
    x = torch.arange(24.0).add(1).sin().view(2, 3, 4)
    x = x.to(torch.complex64) if "fft" in str(operator) else x
    results = [
        leaf
        for leaf in pytree.tree_leaves(operator(x, *arguments))
        if isinstance(leaf, torch.Tensor)
    ]
    refused = set()
    for dim in range(3):
        call = Call(
            operator,
            [Operand(x, Rows((dim,))), *arguments],
            {},
            [(result, (dim,) if dim < result.ndim else ()) for result in results],
        )
        try:
            propagate(call, str(operator), "layers.0", BATCH, set())
        except ChunkError:
            refused.add(dim)
    assert refused == mixed, (
        f"{operator}{arguments} is refused along {refused}, and mixes along {mixed}"
    )


GRAD = (2, 3, 4)
BACKWARDS = [
    (aten._softmax_backward_data.default, [GRAD, GRAD], (0, torch.float32), {0}),
    (aten._softmax_backward_data.default, [GRAD, GRAD], (-1, torch.float32), {2}),
    (aten._log_softmax_backward_data.default, [GRAD, GRAD], (1, torch.float32), {1}),
    (aten.glu_backward.default, [(2, 3, 2), GRAD], (-1,), {2}),
    (aten.gelu_backward.default, [GRAD, GRAD], (), set()),
    (aten.threshold_backward.default, [GRAD, GRAD], (0,), set()),
    (aten.native_dropout_backward.default, [GRAD, GRAD], (2.0,), set()),
    (aten.slice_backward.default, [GRAD], ([2, 3, 9], 2, 0, 4, 1), set()),
    (aten.mse_loss_backward.default, [GRAD, GRAD, GRAD], (0,), {0, 1, 2}),
    (aten._cdist_backward.default, [(2, 3, 3), GRAD, GRAD], (2.0, (2, 3, 3)), {0, 1, 2}),
    (aten.huber_loss_backward.default, [GRAD, GRAD, GRAD], (0, 1.0), {0, 1, 2}),
    (aten.replication_pad3d_backward.default, [GRAD, GRAD], ([0] * 6,), {0, 1, 2}),
]


@pytest.mark.parametrize(("operator", "shapes", "arguments", "mixed"), BACKWARDS, ids=str)
def test_a_backward_is_judged_by_the_entry_of_its_forward(operator, shapes, arguments, mixed):
    """G3: a forward may call it, too, so its name alone says nothing."""
    refused = {}
    for dim in range(3):
        rows = [Operand(torch.ones(shape), Rows((dim,))) for shape in shapes]
        call = Call(operator, [*rows, *arguments], {}, [(torch.ones(shapes[-1]), (dim,))])
        try:
            propagate(call, str(operator), "layers.0", BATCH, set())
        except ChunkError as error:
            refused[dim] = str(error)
    assert refused.keys() == mixed
    is_known = "_softmax" in str(operator) or "glu" in str(operator)
    for message in refused.values():
        assert ("is not known" in message) != is_known


def test_the_words_of_a_refusal_do_not_decide_its_kind():
    """G3: a module or operator may be named as the messages are."""
    for what, made_by in (
        ("how many rows there are", "their number"),
        ("what is not known", "how many rows there are"),
    ):
        operands = [
            Operand(torch.ones(2, 3), Rows((0,))),
            Operand(torch.ones(3), Statistic(made_by)),
        ]
        call = Call(aten.sub.Tensor, operands, {}, [(torch.ones(2, 3), (0,))])
        with pytest.raises(ChunkError) as error:
            propagate(call, what, what, BATCH, set())
        assert "row_wise" not in str(error.value)
    operands = [operands[0], Operand(torch.ones(3), Statistic("a size", is_count=True))]
    call = Call(aten.sub.Tensor, operands, {}, [(torch.ones(2, 3), (0,))])
    with pytest.warns(ChunkWarning, match="if you mean those of each chunk, say so"):
        propagate(call, "sub", "what is not known", BATCH, set())


def test_rows_that_are_put_behind_others_are_refused():
    """G3: along their own dimension; one tensor alone is put behind nothing."""
    x = torch.ones(2, 3)
    for tensors, dim, is_refused in [
        ((x, x), 0, True),
        ((x, x), 1, False),
        ((x, x), -2, True),
        ((x,), 0, False),
    ]:
        given = [Operand(tensor, Rows((0,))) for tensor in tensors]
        call = Call(aten.cat.default, [given, dim], {}, [(torch.cat(tensors, dim), (0,))])
        with (
            pytest.raises(ChunkError, match="puts rows after each other")
            if is_refused
            else nullcontext()
        ):
            propagate(call, "cat", "layers.0", BATCH, set())


@pytest.mark.parametrize(
    ("repeats", "is_refused"),
    [((1, 1), False), ((1, 3), False), ((1, 0), False), ((2, 1), True), ((0, 1), True)],
    ids=str,
)
def test_rows_that_are_repeated_or_dropped_are_refused(repeats, is_refused):
    """G3: a repeat of 0 leaves none of them."""
    x = torch.ones(2, 3)
    call = Call(
        aten.repeat.default,
        [Operand(x, Rows((0,))), list(repeats)],
        {},
        [(x.repeat(repeats), (0,))],
    )
    with pytest.raises(ChunkError, match="repeats") if is_refused else nullcontext():
        propagate(call, "repeat", "layers.0", BATCH, set())


NUMBERS = {
    "item of a mean": lambda x: x * x.mean().item(),
    "float of a sum": lambda x: x * float(x.sum()),
    "largest": lambda x: x / x.abs().max().item(),
}


class Reads(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize("read", NUMBERS.values(), ids=list(NUMBERS))
def test_a_number_that_python_code_reads_of_rows_is_told(read):
    """G3: nobody sees what becomes of it; a whole number is a size, as a router's counts are."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Reads(read)])})
    x = torch.randn(4, 2, 4)
    with (
        pytest.raises(ChunkWarning, match=r"the number of float32\[\] is read by Python code"),
        eager_chunked(model, BATCH),
    ):
        model.layers[0](x)
    answered = replace(BATCH, row_wise=(BATCH.module_fqn,))
    with eager_chunked(model, answered):
        model.layers[0](x)


def test_a_number_that_no_row_decides_is_read():
    model = nn.ModuleDict({"layers": nn.ModuleList([Reads(None)])})
    layer = model.layers[0]
    layer.function = lambda x: x * layer.linear.weight.sum().item() + int((x > 0).sum()) * 0
    x = torch.randn(4, 2, 4)
    with eager_chunked(model, BATCH):
        chunked = layer(x)
    assert torch.equal(chunked, layer(x))
