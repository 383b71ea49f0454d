"""Parallel models, by torch's own code, compute the unsharded one; planted mistakes do not."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fixtures.models.gated import DIM, VOCABULARY, GatedModel
from fixtures.models.gated import own_token_step as step
from pytest_gtrainer import AnotherFunction, VacuousCheck, assert_same_model

SEQ = 4
make_model = partial(GatedModel, blocks=1)


def batch(coordinate):
    generator = torch.Generator().manual_seed(coordinate)
    return (torch.randint(VOCABULARY, (8, SEQ), generator=generator),)


TENSOR = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.gate": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data_parallel(mesh):
    return sharded(make_model(), mesh["dp"])


def mixed_precision(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(make_model(), mesh["dp"], mp_policy=policy)


def ddp(mesh):
    return DistributedDataParallel(make_model(), process_group=mesh["dp"].get_group())


def tensor_parallel(mesh):
    model = make_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TENSOR)
    return model


def sequence_parallel(mesh):
    return parallelize_module(make_model(), mesh["tp"], SEQUENCE)


def all_three(mesh):
    return sharded(sequence_parallel(mesh), mesh["dp"])


def two_dimensional(mesh):
    return sharded(tensor_parallel(mesh), mesh["dp"])


def norms_of_its_own(mesh):
    """Each rank has a plain norm, whose gradient is that of its part of the sequence."""
    model = make_model()
    plan = {name: style for name, style in SEQUENCE.items() if name != "blocks.*.norm"}
    return parallelize_module(model, mesh["tp"], plan)


def adds_gradients(mesh):
    """Nobody divides."""
    model = data_parallel(mesh)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def loses_half_a_gradient(mesh):
    """Return a model whose last block has half the gradient."""
    model = tensor_parallel(mesh)
    model.blocks[-1].norm.register_forward_pre_hook(lambda module, given: Halved.apply(given[0]))
    return model


def forgets_to_reduce(mesh):
    """The gradient of the embedding is this rank's own."""
    model = make_model()
    group = mesh["dp"].get_group()
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, keeps_its_own)
    return wrapped


def keeps_its_own(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


RIGHT = [data_parallel, ddp, tensor_parallel, sequence_parallel, two_dimensional, all_three]
SIMULATED = [parallel for parallel in RIGHT if parallel is not ddp]
ALONG_TENSORS = (tensor_parallel, sequence_parallel)


# The first tier has DDP in ``test_gradients_of_whole_numbers_alone_count``.
@pytest.mark.second_tier(*(parallel.__name__ for parallel in RIGHT if parallel is not all_three))
@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("parallel", RIGHT, ids=lambda function: function.__name__)
def test_torchs_parallel_models_are_the_unsharded_one_on_ranks(parallel, gt_mesh):
    dims = () if parallel in ALONG_TENSORS else ("dp",)
    proof = assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh, data_dims=dims)
    assert proof.kind == "reordered", str(proof)
    assert proof.compared == 4 * (1 + 7)


# The others are on ranks above, and larger ones of their kinds in test_same_model_combinations.
@pytest.mark.second_tier
@pytest.mark.long("tensor_parallel", "sequence_parallel", "two_dimensional")
@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
@pytest.mark.parametrize("parallel", SIMULATED, ids=lambda function: function.__name__)
def test_they_are_in_a_simulated_world(parallel, gt_mesh):
    dims = () if parallel in ALONG_TENSORS else ("dp",)
    proof = assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh, data_dims=dims)
    assert proof.kind == "reordered", str(proof)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_mixed_precision_is_set_aside(gt_mesh):
    proof = assert_same_model(mixed_precision, make_model, step, batch, mesh=gt_mesh)
    assert proof.kind == "rounds elsewhere", str(proof)
    policy = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"
    said = "mixed precision is set aside, so its casts change nothing"
    assert proof.assumes == (f"{said}: MixedPrecisionPolicy({policy})",)
    assert "not reordered: first loss of data coordinate 0" in str(proof)
    assert proof.origin == "the output of embed"


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2})
def test_real_ranks_say_where_they_round_otherwise(gt_mesh):
    proof = assert_same_model(mixed_precision, make_model, step, batch, mesh=gt_mesh)
    assert (proof.kind, proof.origin) == ("rounds elsewhere", "the output of embed")


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_mixed_precision_that_the_reference_has_is_carried(gt_mesh):
    """Both reduce in float32 what they compute in float32."""

    def parallel(mesh):
        return sharded(make_model(), mesh["dp"], mp_policy=policy)

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    proof = assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh)
    assert proof.kind == "reordered", str(proof)
    said = "mixed precision is carried, and both sides round alike"
    assert proof.assumes == (f"{said}: MixedPrecisionPolicy(reduce_dtype=torch.float32)",)


MISTAKES = {
    adds_gradients: "2 times what is expected",
    forgets_to_reduce: "equal after a mean over 'dp'",
}


@pytest.mark.second_tier("adds")
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2, "tp": 1})
@pytest.mark.parametrize("parallel", MISTAKES, ids=lambda function: function.__name__)
def test_a_mistake_along_data_is_told_with_its_factor(parallel, gt_mesh):
    words = MISTAKES[parallel]
    with pytest.raises(AnotherFunction, match=words) as failure:
        assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh)
    assert failure.value.proof.kind == "another function"


@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2, "tp": 1})
def test_gradients_of_whole_numbers_alone_count(gt_mesh):
    """The gradient of a sum of embeddings counts tokens, which no parameter changes."""

    def counts(model, tokens):
        return model(tokens).sum()

    def own(mesh):
        wrapped = DistributedDataParallel(Counting(), process_group=mesh["dp"].get_group())
        wrapped.register_comm_hook(None, keeps_its_own)
        return wrapped

    def reduced(mesh):
        return DistributedDataParallel(Counting(), process_group=mesh["dp"].get_group())

    assert assert_same_model(reduced, Counting, counts, batch, mesh=gt_mesh).kind == "reordered"
    with pytest.raises(AnotherFunction, match="equal after a mean over 'dp'"):
        assert_same_model(own, Counting, counts, batch, mesh=gt_mesh)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)

    def forward(self, tokens):
        return self.embed(tokens)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
def test_a_reduction_that_nobody_makes_is_named(gt_mesh):
    with pytest.raises(AnotherFunction, match="equal after a sum over 'tp'") as failure:
        assert_same_model(norms_of_its_own, make_model, step, batch, mesh=gt_mesh)
    assert failure.value.proof.first.result == "gradient of blocks.0.norm.weight"


class Dropping(nn.Sequential):
    def __init__(self, rate=0.5):
        super().__init__(nn.Linear(4, 8), nn.Dropout(rate), nn.Linear(8, 4))


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_numbers_that_ranks_draw_otherwise_are_said(gt_mesh):
    """Without the draws it is the same function: no plan is wrong."""

    def parallel(mesh):
        return parallelize_module(
            Dropping(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )

    def check(step):
        rows = (torch.randn(3, 4),)
        assert_same_model(parallel, Dropping, step, lambda at: rows, mesh=gt_mesh, data_dims=())

    with pytest.raises(AnotherFunction, match=r"the step draws random numbers \(aten\..*eval\(\)"):
        check(lambda model, rows: model(rows).square().mean())
    check(lambda model, rows: model.eval()(rows).square().mean())
    with pytest.raises(AnotherFunction) as failure:
        check(lambda model, rows: model.eval()(rows).square().mean() * (1 + dist.get_rank()))
    assert "draws" not in str(failure.value)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
def test_a_mistake_along_tensors_is_told_with_its_parameter(gt_mesh):
    with pytest.raises(AnotherFunction, match=r"gradient of embed\.weight, rank 0"):
        assert_same_model(loses_half_a_gradient, make_model, step, batch, mesh=gt_mesh)


def test_one_process():
    def checkpointed():
        model = make_model()
        forward = model.blocks[0].forward
        model.blocks[0].forward = lambda x: torch.utils.checkpoint.checkpoint(
            forward, x, use_reentrant=False
        )
        return model

    def doubles_a_block():
        model = make_model()
        forward = model.blocks[0].forward
        model.blocks[0].forward = lambda x: 2 * forward(x)
        return model

    assert assert_same_model(checkpointed, make_model, step, batch).kind == "reordered"
    with pytest.raises(AnotherFunction, match="loss of data coordinate 0"):
        assert_same_model(doubles_a_block, make_model, step, batch)


def test_a_parameter_without_a_gradient_is_told():
    def frozen():
        model = make_model()
        model.head.requires_grad_(False)
        return model

    with pytest.raises(AnotherFunction, match=r"head\.weight.*has no gradient on rank 0"):
        assert_same_model(frozen, make_model, step, batch)
    with pytest.raises(AnotherFunction, match=r"head\.weight.*has a gradient on rank 0"):
        assert_same_model(make_model, frozen, step, batch)


def test_an_operator_without_a_meaning_is_no_alarm():
    def transformed(model, tokens):
        return torch.view_as_complex(model(tokens).unflatten(-1, (-1, 2))).abs().mean()

    with pytest.raises(AnotherFunction, match="nobody knows whether") as failure:
        assert_same_model(make_model, make_model, transformed, batch)
    assert failure.value.proof.kind == "unknown"


def test_a_parallel_model_that_changes_the_reference_is_refused(monkeypatch):
    """Libraries of kernels replace methods of a class, and so the reference's, too."""
    forward = GatedModel.forward

    def patched():
        monkeypatch.setattr(GatedModel, "forward", lambda self, tokens: forward(self, tokens) * 2)
        return make_model()

    with pytest.raises(ValueError, match="of the reference is another one since"):
        assert_same_model(patched, make_model, step, batch)


@pytest.mark.parametrize("factor", [100, float("nan"), float("inf")])
def test_what_no_mode_sees_is_unknown(factor):
    """A loss that is not finite is apart from one that is."""

    def doubles_in_numpy():
        model = make_model()
        model.blocks[0].register_forward_hook(lambda module, args, y: double(y))
        return model

    def double(y):
        array = y.detach().numpy()
        array *= factor
        return y

    with pytest.raises(AnotherFunction, match=r"nobody knows.*\n.*the real loss on rank 0 is"):
        assert_same_model(doubles_in_numpy, make_model, step, batch)


@pytest.mark.parametrize("factor", [3, 0, float("nan")])
def test_what_no_mode_sees_of_gradients_is_unknown(factor):
    """The loss is that of the reference, and so are the elements of all gradients."""

    def scales_in_numpy():
        model = make_model()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)
        return model

    def scale(parameter):
        array = parameter.grad.numpy()
        array *= factor

    with pytest.raises(AnotherFunction, match=r"nobody knows.*\n.*the real gradient of .* is"):
        assert_same_model(scales_in_numpy, make_model, step, batch)


class MaskedAttention(nn.Module):
    """Multiplies scores and their mask by a number that it learns."""

    def __init__(self, scale=1):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.scale = scale

    def forward(self, x):
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = self.scale * self.query(x) @ self.key(x).T
        return (scores.masked_fill(mask, -torch.inf) * self.temperature).softmax(-1) @ x


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("in_loss", [True, False], ids=["loss", "gradients alone"])
def test_elements_that_are_nan_prove_nothing(scale, in_loss):
    """Nobody knows which infinity -inf times a learned number is, and all NaN are equal."""

    def masked_step(model, x):
        found = model(x)
        loss = found.square().mean()
        if in_loss:
            return loss
        return loss - loss.detach() + torch.zeros_like(loss).fill_(1.0)

    with pytest.raises(AnotherFunction, match="NaN or infinite in exact arithmetic") as failure:
        assert_same_model(
            lambda: MaskedAttention(scale),
            MaskedAttention,
            masked_step,
            lambda coordinate: (torch.ones(3, 4),),
        )
    assert failure.value.proof.kind == "unknown"


def test_what_has_no_gradient_is_named():
    def with_more():
        model = make_model()
        model.unused = nn.Linear(2, 2, bias=False)
        return model

    def step_with_more(model, *inputs):
        return step(model, *inputs) + 0 * model.unused.weight.sum()

    for a_step in (step, step_with_more):
        proof = assert_same_model(with_more, with_more, a_step, batch)
        assert "no gradient but 0 of unused.weight: nothing else" in proof.assumes[0]


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_a_step_that_reads_nothing_of_the_batch_is_refused(gt_mesh):
    """No rank reduces, and nothing would show it."""

    def ignores(model, tokens):
        return step(model, torch.arange(SEQ)[None])

    with pytest.raises(ValueError, match="the loss of all data coordinates is equal"):
        assert_same_model(lambda mesh: make_model(), make_model, ignores, batch, mesh=gt_mesh)


def test_a_reference_without_gradients_is_refused():
    def ignores(model, tokens):
        return torch.ones((), requires_grad=True) * 2

    with pytest.raises(ValueError, match="no parameter of the reference has a gradient but 0"):
        assert_same_model(make_model, make_model, ignores, batch)


def squares(model, x):
    return model(x).square().mean()


def linear():
    return nn.Sequential(nn.Linear(DIM, 4))


def a_plan_that_matches_nothing(mesh):
    return parallelize_module(linear(), mesh["tp"], {"layers.*": ColwiseParallel()})


def nothing_parallel(mesh):
    """Return a model whose ranks only agree on something when it is built."""
    dist.broadcast(torch.ones(1), 0)
    return linear()


def rows_of_the_batch(mesh):
    wrapped = DistributedDataParallel(linear(), process_group=mesh["dp"].get_group())
    return parallelize_module(wrapped, mesh["tp"], {"layers.*": ColwiseParallel()})


def own(coordinate):
    return (torch.randn(2, DIM),)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
@pytest.mark.parametrize("parallel", [a_plan_that_matches_nothing, nothing_parallel])
def test_a_model_of_which_nothing_is_parallel(parallel, gt_mesh):
    with pytest.raises(VacuousCheck, match="on a mesh of 2 ranks no rank came to a collective in"):
        assert_same_model(parallel, linear, squares, own, mesh=gt_mesh)


def log_by_all_reduce(loss, group):
    dist.all_reduce(loss, group=group)
    return loss


def log_by_functional_all_reduce(loss, group):
    return funcol.wait_tensor(funcol.all_reduce(loss, "avg", group))


def log_by_all_gather(loss, group):
    dist.all_gather([torch.empty_like(loss), torch.empty_like(loss)], loss, group=group)


def log_by_broadcast(loss, group):
    dist.broadcast(loss, group=group, group_src=0)


def log_by_count(loss, group):
    dist.all_reduce(torch.tensor(3), group=group)  # of tokens


def log_by_objects(loss, group):
    dist.all_gather_object([None, None], {"tokens": 3}, group=group)


def log_by_message(loss, group):
    """Send the loss to the first rank, as for its log."""
    if dist.get_rank(group):
        dist.send(loss, group=group, group_dst=0)
    else:
        dist.recv(loss, group=group, group_src=1)


COLLECTIVE_LOGS = [
    *(log_by_all_reduce, log_by_functional_all_reduce, log_by_all_gather, log_by_broadcast),
    *(log_by_count, log_by_objects),
]


def only_logs(log, mesh):
    """Return a model of which each rank has all, and a step in which ranks write a log."""

    def step_with_log(model, x):
        loss = squares(model, x)
        model.logged = log(loss.detach().clone(), mesh["tp"].get_group())
        return loss

    return linear(), step_with_log


ONLY_A_LOG = "numbers that ranks get of each other in a step, as for a log, change no"


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
@pytest.mark.parametrize("log", [*COLLECTIVE_LOGS, log_by_message])
def test_ranks_that_only_write_a_log_are_not_parallel(log, gt_mesh):
    """The control: other numbers in what a rank gets of others have to change a result."""
    with pytest.raises(VacuousCheck, match=ONLY_A_LOG):
        assert_same_model(partial(only_logs, log), linear, squares, own, mesh=gt_mesh)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 1, "tp": 2})
@pytest.mark.parametrize("log", COLLECTIVE_LOGS)
def test_ranks_that_only_write_a_log_are_not_parallel_on_ranks(log, gt_mesh):
    with pytest.raises(VacuousCheck, match=ONLY_A_LOG):
        assert_same_model(partial(only_logs, log), linear, squares, own, mesh=gt_mesh)


def rows_of_the_batch_and_a_log(mesh):
    def step_with_log(model, x):
        loss = squares(model, x)
        log_by_all_reduce(loss.detach().clone(), mesh["tp"].get_group())
        return loss

    return rows_of_the_batch(mesh), step_with_log


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_a_dimension_along_which_ranks_only_write_a_log(gt_mesh):
    proof = assert_same_model(rows_of_the_batch_and_a_log, linear, squares, own, mesh=gt_mesh)
    says = (
        "nothing is parallel along 'tp': the floating-point numbers that ranks get of each other "
        "there, as for a log, change no loss, gradient or buffer, so this says nothing of "
        "parallelism there"
    )
    assert proof.assumes == (says,)


def normalised(mesh):
    """Return a model whose ranks add in front of a norm, which takes out a factor and a summand."""

    def added(model, x):
        half = x / 2
        total = funcol.all_reduce(half, "sum", mesh["tp"].get_group())
        return squares(model, nn.functional.layer_norm(total, total.shape[-1:]))

    return linear(), added


def squares_of_norm(model, x):
    return squares(model, nn.functional.layer_norm(x, x.shape[-1:]))


def scaled_by_a_number(mesh):
    """Return a model whose ranks agree on a number that the step reads, and multiplies by."""

    def step_of_rank(model, x):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mesh["tp"].get_group())
        return squares(model, x) * (ones.item() / 2)

    return linear(), step_of_rank


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
@pytest.mark.parametrize(
    ("parallel", "step"), [(normalised, squares_of_norm), (scaled_by_a_number, squares)]
)
def test_what_ranks_exchange_is_no_log_if_results_depend_on_it(parallel, step, gt_mesh):
    proof = assert_same_model(parallel, linear, step, own, mesh=gt_mesh)
    assert not any("along 'tp'" in each for each in proof.assumes)


def checked_by_one_rank(mesh):
    """Return a model of which one rank alone refuses other numbers."""

    def step_of_rank(model, x):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mesh["tp"].get_group())
        if dist.get_rank() == 0 and ones.item() != 2:
            raise RuntimeError("a rank is lost")
        return squares(model, x)

    return linear(), step_of_rank


@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 1, "tp": 2})
def test_a_rank_that_alone_refuses_other_numbers_waits_for_the_others(gt_mesh):
    """Nobody knows whether results depend on them, and all ranks go on together."""
    proof = assert_same_model(checked_by_one_rank, linear, squares, own, mesh=gt_mesh)
    assert proof.kind in ("identical", "reordered")
    assert not any("along 'tp'" in each for each in proof.assumes)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 1, "tp": 2})
def test_a_model_of_which_nothing_is_parallel_on_ranks(gt_mesh):
    with pytest.raises(VacuousCheck, match="on a mesh of 2 ranks no rank came to a collective in"):
        assert_same_model(nothing_parallel, linear, squares, own, mesh=gt_mesh)


@pytest.mark.gt_world("simulated", size=1, mesh={"dp": 1})
def test_a_mesh_of_one_rank(gt_mesh):
    with pytest.raises(VacuousCheck, match="a mesh of one rank: nothing is parallel on it"):
        assert_same_model(data_parallel, make_model, step, batch, mesh=gt_mesh)


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2, "pp": 1})
def test_a_dimension_along_which_nothing_is_parallel(gt_mesh):
    """The proof says of a second dimension, too, that nothing is proven there."""
    proof = assert_same_model(rows_of_the_batch, linear, squares, own, mesh=gt_mesh)
    says = "nothing is parallel along 'tp' or 'pp', so this says nothing of parallelism there"
    assert proof.assumes == (says,)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
@pytest.mark.parametrize("dims", [(), ("dp",)], ids=["one batch", "a batch each"])
def test_one_batch_for_ranks_that_reduce_gradients_is_named(dims, gt_mesh):
    """A mean of equal gradients is what each rank has: a reduction left out would not show."""

    def sharded(mesh):
        return fully_shard(linear(), mesh=mesh["dp"])

    def replicated(mesh):
        return DistributedDataParallel(linear(), process_group=mesh["dp"].get_group())

    for parallel in (sharded, replicated):
        proof = assert_same_model(parallel, linear, squares, own, mesh=gt_mesh, data_dims=dims)
        says = (
            "all ranks along 'dp' have one batch, as data_dims= says, so a gradient that nobody "
            "reduces there would not show"
        )
        assert proof.assumes == (() if dims else (says,))


class OwnHeads(nn.Module):
    """Has some rows of a weight on each rank, and a loss of these; nobody communicates."""

    def __init__(self, rows):
        super().__init__()
        self.head = nn.Parameter(torch.ones(rows, DIM))

    def forward(self, x):
        return x @ self.head.T


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_parts_of_parameters_are_parallel_without_a_collective(gt_mesh):
    def total(model, x):
        return model(x).square().sum()

    proof = assert_same_model(
        lambda mesh: OwnHeads(2),
        lambda: OwnHeads(4),
        total,
        own,
        mesh=gt_mesh,
        data_dims=(),
        loss_dims=("tp",),
        combine="sum",
        local={"head": ("tp", 0)},
    )
    assert proof.assumes == ()


@pytest.mark.gt_world("simulated", size=4, mesh={"tp": 4})
@pytest.mark.parametrize("rows", [(2, 2, 1, 0), (2, 2, 2, 0)], ids=str)
def test_the_last_rank_may_have_no_part_of_a_parameter(rows, gt_mesh):
    """Rows that do not divide lie on the ranks as torch.chunk cuts them."""

    def total(model, x):
        return model(x).square().sum()

    assert_same_model(
        lambda mesh: OwnHeads(rows[mesh.get_rank()]),
        lambda: OwnHeads(sum(rows)),
        total,
        own,
        mesh=gt_mesh,
        data_dims=(),
        loss_dims=("tp",),
        combine="sum",
        local={"head": ("tp", 0)},
    )


def rename(model, state, prefix, metadata):
    for name in ("gate", "value"):
        state[f"{prefix}{name}.weight"] = state[f"{prefix}both.weight"].chunk(2)[name == "value"]
    del state[f"{prefix}both.weight"]


def copy(model, state, prefix, metadata):
    state[f"{prefix}both.weight"] = state[f"{prefix}both.weight"].clone()


def leave_out(model, state, prefix, metadata):
    del state[f"{prefix}both.weight"]


class Checkpointed(nn.Module):
    """A hook of its state dict writes checkpoints in another layout."""

    def __init__(self, hook):
        super().__init__()
        self.both = nn.Linear(DIM, 2 * DIM, bias=False)
        self.register_buffer("scale", torch.ones(DIM))
        self.register_state_dict_post_hook(hook)

    def forward(self, x):
        gate, value = self.both(x).chunk(2, -1)
        return self.scale * gate.tanh() * value


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
@pytest.mark.parametrize("hook", [rename, copy, leave_out], ids=lambda each: each.__name__)
def test_a_state_dict_that_is_no_list_of_parameters(hook, gt_mesh):
    """Parameters and buffers are loaded by their own names, whatever a checkpoint calls them."""

    def parallel(mesh):
        model = Checkpointed(hook)
        model.scale.fill_(2)  # that of the reference is loaded
        return fully_shard(model, mesh=mesh["dp"])

    assert_same_model(parallel, lambda: Checkpointed(hook), squares, own, mesh=gt_mesh)


class Rotated(nn.Module):
    """Computes a table when it is built."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("table", 1 / 10000.0 ** (torch.arange(DIM) / DIM), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.table


def test_models_that_are_built_on_the_meta_device():
    """Tensors there have shapes, and no numbers of which digits could be lost."""

    def materialised():
        with torch.device("meta"):
            model = Rotated()
        model.to_empty(device="cpu")
        model.linear.reset_parameters()
        model.table.copy_(Rotated().table)
        return model

    assert_same_model(materialised, Rotated, squares, own)


class Named(nn.Module):
    """Has parameters whose names differ in the name that DDP gives to what it wraps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM, DIM))
        self.module = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.module((x @ self.weight).tanh())


@pytest.mark.second_tier("module.weight")
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
@pytest.mark.parametrize("name", ["weight", "module.weight"])
def test_a_module_that_is_named_module(name, gt_mesh):
    """Neither ``weight`` nor ``module.weight`` hides the gradient of the other, wrapped or not."""

    def reduces_one(mesh):
        def reduce(parameter):
            parameter.grad.copy_(funcol.all_reduce(parameter.grad, "avg", mesh["dp"]))

        model = Named()
        model.get_parameter(name).register_post_accumulate_grad_hook(reduce)
        return model

    def wrapped(mesh):
        return DistributedDataParallel(Named(), process_group=mesh["dp"].get_group())

    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(reduces_one, Named, squares, own, mesh=gt_mesh)
    other = "weight" if name == "module.weight" else "module.weight"
    assert failure.value.proof.first.result == f"gradient of {other}"
    proof = assert_same_model(wrapped, Named, squares, own, mesh=gt_mesh)
    assert proof.compared == 2 * (1 + 2)


@pytest.mark.gt_world("simulated", size=2, mesh={"fsdp": 2})
def test_what_would_hide_a_reduction_is_refused(gt_mesh):
    def parallel(mesh):
        return sharded(make_model(), mesh)

    with pytest.raises(ValueError, match=r"data_dims=\('dp',\): the mesh has 'fsdp'"):
        assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh)
    with pytest.raises(ValueError, match=r"batch\(0\) and batch\(1\) are equal"):
        assert_same_model(
            parallel, make_model, step, lambda place: batch(0), mesh=gt_mesh, data_dims=("fsdp",)
        )
    proof = assert_same_model(parallel, make_model, step, batch, mesh=gt_mesh, data_dims=("fsdp",))
    assert proof.kind == "reordered"


class Routed(nn.Module):
    """A token goes to one of two experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
        self.swaps = False

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1, keepdim=True)
        if self.swaps:
            best = 1 - best
        weight = scores.gather(-1, best)
        chosen = torch.where(best == 0, self.experts[0](x), self.experts[1](x))
        return weight * chosen


def test_a_router_that_chooses_otherwise_is_seen():
    def swapped():
        model = Routed()
        model.swaps = True
        return model

    def inputs(coordinate):
        return (torch.randn(1, DIM),)

    def squares(model, x):
        return (model(x) ** 2).sum()

    assert assert_same_model(Routed, Routed, squares, inputs).kind == "reordered"
    with pytest.raises(AnotherFunction):
        assert_same_model(swapped, Routed, squares, inputs)


class Attention(nn.Module):
    """Over all keys at once, or over the halves of them with their maxima."""

    def __init__(self, in_halves=False):
        super().__init__()
        self.qkv, self.in_halves = nn.Linear(DIM, 3 * DIM, bias=False), in_halves

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        if not self.in_halves:
            return scores.softmax(-1) @ v
        top = totals = 0
        for own, values in zip(scores.chunk(2, -1), v.chunk(2, -2), strict=True):
            weights = own.exp()
            top, totals = top + weights @ values, totals + weights.sum(-1, keepdim=True)
        return top / totals


def test_softmax_in_parts_is_the_same_function():
    """Without its maxima it overflows for large numbers: there the real losses are apart."""

    def squares(model, x):
        return (model(x) ** 2).sum()

    def in_halves():
        return Attention(in_halves=True)

    small, large = [lambda _, s=scale: (s * torch.randn(SEQ, DIM),) for scale in (0.1, 1000.0)]
    proof = assert_same_model(in_halves, Attention, squares, small)
    assert proof.kind == "reordered", str(proof)
    with pytest.raises(AnotherFunction, match=r"is nan, .* numbers overflow on one side, or"):
        assert_same_model(in_halves, Attention, squares, large)


def of_no_parameter(model, tokens):
    return torch.ones((), requires_grad=False)


def detached(model, tokens):
    return step(model, tokens).detach()


NO_LOSSES = {
    "None": (lambda model, tokens: None, TypeError, "returns None for the reference: return the"),
    "a number": (lambda model, tokens: 1.0, TypeError, "returns a value of type float for the ref"),
    "a constant": (of_no_parameter, ValueError, "depends on no parameter that requires a gradient"),
    "detached": (detached, ValueError, "depends on no parameter that requires a gradient"),
}


@pytest.mark.parametrize("case", NO_LOSSES)
def test_a_step_without_a_loss_to_differentiate(case):
    own_step, error, words = NO_LOSSES[case]
    with pytest.raises(error, match=words):
        assert_same_model(make_model, make_model, own_step, batch)


def test_a_model_of_which_nothing_is_trained():
    def frozen():
        return make_model().requires_grad_(False)

    with pytest.raises(ValueError, match=r"depends on no parameter .* or is the model frozen"):
        assert_same_model(frozen, frozen, step, batch)


def test_a_parallel_step_that_returns_no_tensor():
    def with_its_own_step():
        return make_model(), lambda model, tokens: 1.0

    with pytest.raises(TypeError, match="returns a value of type float for the parallel model"):
        assert_same_model(with_its_own_step, make_model, step, batch)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2, "cp": 1})
def test_a_dimension_of_batches_and_of_parts_of_a_loss(gt_mesh):
    with pytest.raises(ValueError, match="data_dims and loss_dims both have 'dp': along a dim"):
        assert_same_model(ddp, make_model, step, batch, mesh=gt_mesh, loss_dims=("cp", "dp"))


@pytest.mark.gt_world("simulated", size=2, mesh={"cp": 2})
@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_its_part_of_a_loss(gt_mesh, without):
    def parallel(mesh):
        def on_some_ranks(model, tokens):
            loss = step(model, tokens)
            loss.backward()
            return None if mesh.get_local_rank() == without else loss.detach()

        return make_model(), on_some_ranks

    parts = {"mesh": gt_mesh, "data_dims": (), "loss_dims": ("cp",)}
    with pytest.raises(ValueError, match=f"returns no loss on rank {without}, and a part of it on"):
        assert_same_model(parallel, make_model, step, batch, **parts)


class Counted(nn.Linear):
    """Counts how often this rank calls it by itself; FSDP2 calls another class."""

    calls = 0

    def forward(self, x):
        if type(self) is Counted:
            Counted.calls += 1
        return super().forward(x)


def counted_in_parallel(mesh):
    return fully_shard(Counted(DIM, 4), mesh=mesh["dp"])


def communicating_squares(model, x):
    ones = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ones)
    return squares(model, x) * ones / dist.get_world_size()


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2})
@pytest.mark.parametrize("own_step", [squares, communicating_squares])
def test_the_reference_runs_on_one_rank_unless_it_communicates(own_step, gt_mesh):
    Counted.calls = 0
    proof = assert_same_model(
        counted_in_parallel, lambda: Counted(DIM, 4), own_step, own, mesh=gt_mesh
    )
    assert proof.kind == "reordered"
    batches = gt_mesh.size()
    # Once before the parallel model is built, on all ranks.
    ran_again = Counted.calls > batches
    assert ran_again == (dist.get_rank() == 0 or own_step is communicating_squares)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_autocast_around_the_check_is_that_of_both_sides(gt_mesh):
    def parallel(mesh):
        return fully_shard(nn.Linear(8, 8), mesh=mesh)

    def step(model, x):
        y = model(x)
        assert y.dtype == torch.bfloat16
        return y.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        proof = assert_same_model(
            parallel, lambda: nn.Linear(8, 8), step, lambda _: (torch.randn(4, 8),), mesh=gt_mesh
        )
    # Losses are equal with their casts. Ranks round gradients before the mean of these is taken.
    assert proof.kind == "rounds elsewhere"
    assert proof.first.result == "gradient of weight"
