"""``assert_invariant``: bits of a row in any batch and on any mesh; what depends on it is named."""

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import BitwiseDifference, VacuousCheck, assert_invariant

ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
SIZES = {"batch": [1, 3, 8]}


def product(x, weight=WEIGHT):
    """A product whose order of additions is that of the columns, whatever else is there."""
    total = torch.zeros(len(x), weight.shape[1])
    for column in range(weight.shape[0]):
        total = total + x[:, column, None] * weight[column]
    return total


def in_halves(x):
    return product(x[:, :8], WEIGHT[:8]) + product(x[:, 8:], WEIGHT[8:])


def test_rows_that_depend_on_nothing_else():
    """Z4: each size in two orders; random states are those of the caller afterwards."""
    before = torch.get_rng_state()
    result = assert_invariant(lambda x: {"y": product(x).relu() + torch.rand(1)}, ROWS, SIZES)
    assert result.rows == 8
    assert result.settings[0] == "batch=1"
    assert set(result.settings[1:]) == {
        *("batch=3", "batch=3, reordered", "batch=8", "batch=8, reordered")
    }
    assert torch.equal(torch.get_rng_state(), before)


def of_the_batch(x):
    scale = x.abs().sum(0)  # a sum over the batch
    return product(x) / (1 + scale)


def of_its_size(x):
    y = in_halves(x) if len(x) > 2 else product(x)
    return y.relu()


def of_its_place(x):
    y = product(x).relu()
    return y + torch.arange(len(x)).view(-1, 1)


def dropout(x):
    return torch.nn.functional.dropout(product(x), 0.5)


def transposed(x):
    y = x.t().contiguous()
    return (y * y.sum(1, keepdim=True)).t() + 0


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (of_the_batch, "first operator that depends on it: aten.sum.dim_IntList at "),
        (of_its_size, "other operators are called: aten.zeros.default at "),
        (of_its_place, "first operator that depends on it: aten.arange.default at "),
        (dropout, "first operator that depends on it: aten.bernoulli_.float at "),
        (transposed, "first operator that depends on it: aten.sum.dim_IntList at "),
    ],
)
def test_what_depends_on_the_batch(function, named):
    """Z4: company, size, place and random numbers, by operator and line."""
    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(function, ROWS, SIZES, what="the layer")
    text = str(error.value)
    assert text.startswith("the layer depends on batch=3; compared with batch=1\n")
    assert f"{named}test_invariant.py:" in text


def test_company_alone():
    """Z4: the same size, other rows."""
    with pytest.raises(
        BitwiseDifference, match="depends on batch=2, reordered; compared with"
    ) as e:
        assert_invariant(lambda x: x * x.amax(0), ROWS, {"batch": [2, 4]})
    assert "operator that depends on it: aten.amax.default at test_invariant.py:" in str(e.value)


def test_what_could_not_fail():
    with pytest.raises(VacuousCheck, match="has one setting, which nothing can be compared with"):
        assert_invariant(product, ROWS, {"batch": [4, 4]})
    with pytest.raises(VacuousCheck, match=r"^all rows are equal, so"):
        assert_invariant(product, ROWS[:1].expand(8, 16), SIZES)
    with pytest.raises(VacuousCheck, match="the results of all rows are equal"):
        assert_invariant(lambda x: torch.ones(len(x), 2), ROWS, SIZES)
    with pytest.raises(VacuousCheck, match="y has no finite element"):
        assert_invariant(lambda x: {"y": x * float("nan")}, ROWS, SIZES)
    with pytest.raises(VacuousCheck, match="the function returns no tensor"):
        assert_invariant(lambda x: {}, ROWS, SIZES)
    drawn = iter(range(1000))
    with pytest.raises(BitwiseDifference, match="the function does not repeat itself"):
        assert_invariant(lambda x: x + next(drawn), ROWS, SIZES)
    some = ROWS.clone()
    some[2, 3] = torch.inf
    assert "1 of 128 elements" in str(assert_invariant(lambda x: x.relu(), some, SIZES))


@pytest.mark.parametrize("other", [0, 1, 2])
def test_one_input_with_rows_of_its_own_is_enough(other):
    """The other inputs, and the other results, may be equal for all rows."""
    inputs = [ROWS[:1].expand(8, 16)] * 3
    inputs[other] = ROWS

    def fn(inputs):
        results = [torch.ones(len(ROWS[:1]), 2).expand(len(inputs[0]), 2)] * 3
        results[(other + 1) % 3] = inputs[other] * 2 + inputs[other - 1]
        return results

    assert assert_invariant(fn, inputs, {"batch": [1, 4]}).rows == 8
    for kept in range(3):
        if kept != other:
            with pytest.raises(VacuousCheck, match=r"^all rows are equal, so a row has no other"):
                assert_invariant(fn, [inputs[kept]] * 3, {"batch": [1, 4]})


def test_sizes_and_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"over\['batch'\] is \[0, 2\]: give sizes, at least 1"):
        assert_invariant(product, ROWS, {"batch": [0, 2]})
    with pytest.raises(ValueError, match="a batch of 9 rows, of 8: give as many rows"):
        assert_invariant(product, ROWS, {"batch": [1, 9]})
    with pytest.raises(ValueError, match=r"here are 2 tensors of .7, 8. rows"):
        assert_invariant(product, {"x": ROWS, "y": ROWS[:7]}, SIZES)
    with pytest.raises(ValueError, match=r"here are 0 tensors of .. rows"):
        assert_invariant(product, {}, SIZES)
    with pytest.raises(ValueError, match=r"the result has shape .16. for a batch of 1 row"):
        assert_invariant(lambda x: x.sum(0), ROWS, SIZES)


def row_parallel(x, mesh):
    """Each rank has a part of the contraction; a ring adds the partial sums."""
    tp = mesh["tp"]
    own = slice(16 // tp.size() * tp.get_local_rank(), 16 // tp.size() * (tp.get_local_rank() + 1))
    partial = product(x[:, own], WEIGHT[own])
    dist.all_reduce(partial, group=tp.get_group())
    return partial.relu()


def column_parallel(x, mesh):
    """Each rank has columns, which are put together: nobody adds."""
    tp = mesh["tp"]
    own = product(x, WEIGHT.chunk(tp.size(), 1)[tp.get_local_rank()])
    parts = [torch.empty_like(own) for _ in range(tp.size())]
    dist.all_gather(parts, own.contiguous(), group=tp.get_group())
    return torch.cat(parts, 1).relu()


def test_columns_on_any_mesh():
    """Z4: batch and tensor parallelism, every combination."""
    result = assert_invariant(column_parallel, ROWS, {"batch": [1, 8], "tp": [1, 2, 4]})
    assert len(result.settings) == 9
    assert "batch=8, reordered, tp=4" in result.settings


def multiplied(x, mesh):
    tp = mesh["tp"]
    rank = tp.get_local_rank()
    partial = x.chunk(tp.size(), 1)[rank] @ WEIGHT.chunk(tp.size())[rank]
    dist.all_reduce(partial, group=tp.get_group())
    return partial.relu()


def test_a_sum_over_ranks():
    """Z4: the collective; or where each rank adds in an order of its own, the product before it."""
    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(row_parallel, ROWS, {"tp": [1, 2, 4]})
    text = str(error.value)
    assert text.startswith("a row depends on tp=2, on rank 0; compared with tp=1\n")
    named = "all_reduce (sum) of float32[128] at test_invariant.py:"
    assert f"first collective that depends on it: {named}" in text
    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(multiplied, ROWS, {"tp": [1, 2, 4]})
    text = str(error.value)
    assert "first operator that depends on it: aten.mm.default at test_invariant.py:" in text
    assert f"the collective after it: {named}" in text


def test_partial_sums_that_a_collective_completes():
    """Z4: whole numbers are added exactly, so the first product is no cause."""

    def exact_first(x, mesh):
        tp = mesh["tp"]
        whole = (x * 8).round().chunk(tp.size(), 1)[tp.get_local_rank()].sum(1, keepdim=True)
        dist.all_reduce(whole, group=tp.get_group())
        return multiplied(x + whole, mesh)

    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(exact_first, ROWS, {"tp": [1, 2, 4]})
    assert "depends on it: aten.mm.default at test_invariant.py:" in str(error.value)


def of_large_payloads(x, mesh):
    """vllm#50136: small payloads are added in the order of ranks, large ones by a ring."""
    tp = mesh["tp"]
    shards = torch.stack([ROWS[:4] + rank for rank in range(tp.size())])
    assert len(shards) == tp.size()
    partial = x * (1 + tp.get_local_rank()) * 0.1
    if x.numel() > 64:
        dist.all_reduce(partial, group=tp.get_group())
        return partial
    parts = [torch.empty_like(partial) for _ in range(tp.size())]
    dist.all_gather(parts, partial, group=tp.get_group())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def test_a_batch_that_chooses_another_collective():
    """Z4: neither size alone shows it."""
    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(of_large_payloads, ROWS, {"batch": [1, 8], "tp": [4, 4]})
    text = str(error.value)
    assert "depends on batch=8, on rank 0; compared with batch=1, tp=4" in text
    assert "other operators are called: all_reduce (sum) of float32[128] at test_inva" in text
    assert "and all_gather into a list of float32 at test_invariant.py:" in text


def test_a_mesh_that_is_not_used_and_ranks_that_differ():
    with pytest.raises(VacuousCheck, match="on a mesh of 2 ranks no rank came to a collective"):
        assert_invariant(lambda x, mesh: product(x), ROWS, {"tp": [1, 2]})

    def own(x, mesh):
        dist.all_reduce(torch.ones(1))
        return product(x) + mesh.get_rank()

    with pytest.raises(BitwiseDifference, match="a row depends on the rank: on rank 1; compared"):
        assert_invariant(own, ROWS, {"tp": [2, 4]})


def reduced_in(group_of):
    def reduced(x, mesh):
        dist.all_reduce(torch.ones(1), group=group_of(mesh))
        return product(x)

    return reduced


def barrier(x, mesh):
    dist.barrier()
    return product(x)


def of_one_rank(mesh):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


TP = reduced_in(lambda mesh: mesh["tp"].get_group())


@pytest.mark.parametrize(
    ("function", "over", "says"),
    [
        (reduced_in(of_one_rank), {"tp": [1, 2]}, "on a mesh of 2 ranks no rank came to a"),
        (barrier, {"tp": [1, 2]}, "on a mesh of 2 ranks no rank came to a collective"),
        (TP, {"tp": [1], "dp": [1, 2]}, "on a mesh of 2 ranks no rank came to a collective"),
        (TP, {"tp": [2], "dp": [1, 2]}, "no rank came to a collective along 'dp', of 2 ranks"),
        (TP, {"dp": [1, 2], "tp": [2]}, "no rank came to a collective along 'dp', of 2 ranks"),
        (TP, {"dp": [1, 3], "tp": [1, 2]}, "no rank came to a collective"),
    ],
)
def test_a_dimension_along_which_no_tensor_is_sent_is_refused(function, over, says):
    with pytest.raises(VacuousCheck, match=says):
        assert_invariant(function, ROWS, over)


def test_a_dimension_of_one_size_may_stay_unused():
    assert_invariant(TP, ROWS, {"dp": [2], "tp": [1, 2]})


@pytest.mark.parametrize("batch", [3, 5])
def test_rows_that_fill_up_the_last_batch_are_compared_there_too(batch):
    """A function that knows which rows it has had already, as a cache does."""
    seen = set()

    def wrong_again(x):
        rows = [tuple(row.tolist()) for row in x]
        known = torch.tensor([row in seen for row in rows])
        seen.update(rows)
        if len(seen) == len(ROWS):
            seen.clear()
            return product(x) + known[:, None]
        return product(x)

    says = f"a row that fills up the last batch depends on batch={batch}; compared with batch=1"
    with pytest.raises(BitwiseDifference, match=says):
        assert_invariant(wrong_again, ROWS, {"batch": [1, batch]})


def test_results_that_hold_nothing_of_a_row_are_refused_on_a_mesh_too():
    def constant(x, mesh):
        dist.all_reduce(torch.ones(1))
        return torch.ones(len(x), 2)

    with pytest.raises(VacuousCheck, match="the results of all rows are equal"):
        assert_invariant(constant, ROWS, {"tp": [1, 2]})


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=4)
def test_on_ranks(gt_world):
    """Z4: real processes; a mesh of two ranks stands twice beside itself, and all ranks fail."""
    result = assert_invariant(column_parallel, ROWS, {"batch": [1, 8], "tp": [1, 2, 4]})
    assert len(result.settings) == 9
    with pytest.raises(BitwiseDifference) as error:
        assert_invariant(multiplied, ROWS, {"tp": [1, 2]})
    assert "first operator that depends on it: aten.mm.default at test_in" in str(error.value)
    assert "the collective after it: c10d.allreduce_.default at test_invar" in str(error.value)
    with pytest.raises(VacuousCheck, match="no rank came to a collective"):
        assert_invariant(lambda x, mesh: product(x), ROWS, {"tp": [1, 2]})
    with pytest.raises(ValueError, match="a mesh of 3 ranks does not divide the world of 4"):
        assert_invariant(column_parallel, ROWS, {"tp": [1, 3]})
