"""Losses of ranks make the reference's, and parameters sliced by hand find their places."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from pytest_gtrainer import AnotherFunction, assert_same_model

DIM, VOCABULARY, EXPERTS = 4, 10, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def batch(coordinate):
    """Tokens and labels, of which other coordinates ignore another number."""
    generator = torch.Generator().manual_seed(coordinate)
    tokens, labels = torch.randint(VOCABULARY, (2, 4, 8), generator=generator)
    labels[0, : 1 + coordinate] = -100
    return tokens, labels


def step(model, tokens, labels):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def summed_step(model, tokens, labels):
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def averaging(mesh):
    return fully_shard(Model(), mesh=mesh["dp"])


def adding(mesh):
    model = averaging(mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return model


def tokens_of(coordinate):
    return int((batch(coordinate)[1] != -100).sum())


def mean_of_tokens(losses):
    counts = [tokens_of(coordinate) for coordinate in range(len(losses))]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def weighted(mesh):
    """Each rank weighs its loss by its share of all tokens."""
    counts = [tokens_of(coordinate) for coordinate in range(mesh["dp"].size())]
    share = counts[mesh.get_local_rank("dp")] / sum(counts)
    model = adding(mesh)
    model.head.register_full_backward_pre_hook(lambda module, given: (given[0] * share,))
    return model


def sharing(mesh, of_all=True):
    """Each rank returns the sum of its tokens, over the mean of the counts of ranks."""

    def step_of_rank(model, tokens, labels):
        count = (labels != -100).sum()
        if of_all:
            count = funcol.all_reduce(count, "sum", mesh["dp"]) / mesh["dp"].size()
        return summed_step(model, tokens, labels) / count

    return averaging(mesh), step_of_rank


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_ranks_may_return_shares_of_a_weighted_loss(gt_mesh):
    """Their losses are not those of the step, and so a right model was another function."""
    options = {"mesh": gt_mesh, "combine": mean_of_tokens}
    assert assert_same_model(sharing, Model, step, batch, **options).kind == "reordered"
    with pytest.raises(
        AnotherFunction, match='it takes the mean of the losses of ranks, as combine="mean"'
    ):
        assert_same_model(lambda mesh: sharing(mesh, of_all=False), Model, step, batch, **options)


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_losses_are_combined_as_the_user_says(gt_mesh):
    kind = assert_same_model(averaging, Model, step, batch, mesh=gt_mesh).kind
    assert kind == "reordered"
    kind = assert_same_model(adding, Model, summed_step, batch, mesh=gt_mesh, combine="sum").kind
    assert kind == "reordered"
    kind = assert_same_model(
        weighted, Model, step, batch, mesh=gt_mesh, combine=mean_of_tokens
    ).kind
    assert kind == "rounds elsewhere"  # a share is rounded where the whole sum is not
    with pytest.raises(AnotherFunction, match="1/2 times what is expected"):
        assert_same_model(averaging, Model, summed_step, batch, mesh=gt_mesh, combine="sum")
    with pytest.raises(AnotherFunction, match=r"gradient of embed\.weight") as failure:
        assert_same_model(averaging, Model, step, batch, mesh=gt_mesh, combine=mean_of_tokens)
    begins = failure.value.proof.origin
    assert begins.startswith("no module: outputs, and their gradients, are right")
    assert begins.endswith("count 1/2, 1/2, expected 31/61, 30/61")
    with pytest.raises(ValueError, match="combine='median': take"):
        assert_same_model(averaging, Model, step, batch, mesh=gt_mesh, combine="median")


def part_of_the_sequence(mesh):
    """Each rank reads its part of the tokens, and returns the loss of them."""
    own, count = mesh.get_local_rank("cp"), mesh["cp"].size()

    def step_of_part(model, tokens, labels):
        return summed_step(model, tokens.chunk(count, 1)[own], labels.chunk(count, 1)[own])

    model = fully_shard(Model(), mesh=mesh["cp"])
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return model, step_of_part


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, mesh={"cp": 2})
def test_ranks_return_parts_of_one_loss(gt_mesh):
    given = (part_of_the_sequence, Model, summed_step, batch)
    whole = {"mesh": gt_mesh, "data_dims": (), "combine": "sum"}
    assert assert_same_model(*given, **whole, loss_dims=("cp",)).kind == "reordered"
    with pytest.raises(AnotherFunction, match=r"loss of data coordinate 0"):
        assert_same_model(*given, **whole)
    with pytest.raises(ValueError, match=r"loss_dims=\('sp',\): the mesh has 'cp'"):
        assert_same_model(*given, **whole, loss_dims=("sp",))
    with pytest.raises(ValueError, match="nobody knows how parts"):
        assert_same_model(*given, mesh=gt_mesh, data_dims=(), combine=sum, loss_dims=("cp",))


class Experts(nn.Module):
    """Every token goes through the expert of its place in the batch."""

    def __init__(self, count=EXPERTS, ep=None):
        super().__init__()
        self.weight, self.ep = nn.Parameter(torch.randn(count, DIM, DIM)), ep

    def forward(self, x):
        if self.ep is None:
            return torch.bmm(x, self.weight)
        rows = funcol.all_to_all_single_autograd(x, *self._splits(len(x)), self.ep)
        mine = rows.unflatten(0, (self.ep.size(), -1)).transpose(0, 1).flatten(1, 2)
        made = torch.bmm(mine, self.weight).unflatten(1, (self.ep.size(), -1)).transpose(0, 1)
        there, back = self._splits(len(x))
        return funcol.all_to_all_single_autograd(made.flatten(0, 1), back, there, self.ep)

    def _splits(self, rows):
        own = [len(self.weight)] * self.ep.size()
        return own, own


class Mixture(nn.Module):
    def __init__(self, count=EXPERTS, ep=None):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.experts = Experts(count, ep)

    def forward(self, x):
        return self.experts(self.inner(x))


def squares(model, x):
    return (model(x) ** 2).mean()


def vectors(coordinate):
    return (torch.randn(EXPERTS, 3, DIM),)


def expert_parallel(mesh, divides=True):
    """Experts are local; gradients of experts, and of what all ranks hold, are means."""
    ep = mesh["ep"]
    model = Mixture(EXPERTS // ep.size(), ep)
    if divides:
        model.experts.weight.register_hook(lambda gradient: gradient / ep.size())

    def reduced(gradient):
        return funcol.all_reduce(gradient, "avg", ep).wait()

    for parameter in model.inner.parameters():
        parameter.register_hook(reduced)
    return model


def sharded_experts(mesh):
    """FSDP2 shards what is local to a rank of "ep" further."""
    model = Mixture(EXPERTS // mesh["ep"].size(), mesh["ep"])
    fully_shard(model.experts, mesh=mesh["dp"])
    model.experts.set_gradient_divide_factor(mesh.size())
    return fully_shard(model, mesh=mesh)


LOCAL = {"experts.*": ("ep", 0)}


@pytest.mark.gt_world("simulated", size=2, mesh={"ep": 2})
def test_local_parameters_are_placed(gt_mesh):
    given = {"mesh": gt_mesh, "data_dims": ("ep",)}
    proof = assert_same_model(expert_parallel, Mixture, squares, vectors, **given, local=LOCAL)
    assert proof.kind == "reordered"

    def forgets_to_divide(mesh):
        return expert_parallel(mesh, divides=False)

    with pytest.raises(AnotherFunction, match=r"experts\.weight, rank 0(.|\n)*2 times what is"):
        assert_same_model(forgets_to_divide, Mixture, squares, vectors, **given, local=LOCAL)


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "ep": 2})
def test_local_parameters_may_be_sharded_too(gt_mesh):
    proof = assert_same_model(
        sharded_experts,
        Mixture,
        squares,
        vectors,
        mesh=gt_mesh,
        data_dims=("dp", "ep"),
        local=LOCAL,
    )
    assert proof.kind == "reordered"


@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_local_parameters_are_placed_on_real_ranks(gt_mesh):
    proof = assert_same_model(
        expert_parallel, Mixture, squares, vectors, mesh=gt_mesh, data_dims=("ep",), local=LOCAL
    )
    assert proof.kind == "reordered"


REFUSED = {
    "no mapping": ({}, r"experts\.weight has shape \[2, 4, 4\], and \[4, 4, 4\] in the ref"),
    "another dimension": (
        {"experts.*": ("ep", 1)},
        r"local\['experts\.\*'\], \[4, 2, 4\] is expected",
    ),
    "matches nothing": ({"expert.*": ("ep", 0)}, "no parameter of that name; did you mean 'exp"),
    "no such ranks": ({"experts.*": ("tp", 0)}, "the mesh has 'ep'"),
    "no such dimension": ({"experts.*": ("ep", 3)}, "and no dimension 3"),
}


@pytest.mark.gt_world("simulated", size=2, mesh={"ep": 2})
@pytest.mark.parametrize("case", REFUSED)
def test_local_parameters_in_other_places_are_refused(case, gt_mesh):
    local, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        assert_same_model(
            expert_parallel,
            Mixture,
            squares,
            vectors,
            mesh=gt_mesh,
            data_dims=("ep",),
            local=local,
        )


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_other_names_are_told(gt_mesh):
    class More(Model):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(DIM, DIM)

    def without_a_bias():
        model = Model()
        model.head.bias = None
        return model

    with pytest.raises(ValueError, match=r"the parallel model has more\.weight"):
        assert_same_model(More, Model, step, batch, mesh=gt_mesh, data_dims=())
    with pytest.raises(AnotherFunction, match=r"parameter head\.bias: no rank has it"):
        assert_same_model(without_a_bias, Model, step, batch, mesh=gt_mesh, data_dims=())


@pytest.mark.gt_world("simulated", size=4, mesh={"dp": 2, "tp": 2})
def test_shards_that_do_not_divide_are_loaded(gt_mesh):
    """Tensor parallelism leaves 5 rows on a rank, which FSDP2 shards into 3 and 2."""

    def parallel(mesh):
        plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
        model = parallelize_module(Model(), mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"])

    assert assert_same_model(parallel, Model, step, batch, mesh=gt_mesh).kind == "reordered"
