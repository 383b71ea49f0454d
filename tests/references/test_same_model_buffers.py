"""Buffers that a step changes are compared, each rank's with those of its own batch."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import AnotherFunction, assert_same_model


class Model(nn.Module):
    """Has buffers of each kind, which ``update`` changes: a mean, a count, flags, the largest."""

    def __init__(self, update=None):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.mask = nn.Buffer(torch.full((2,), -torch.inf))
        self.table = nn.Buffer(torch.tensor([torch.nan, 2.0]), persistent=False)
        self.mean = nn.Buffer(torch.zeros(4))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.seen = nn.Buffer(torch.zeros(2, dtype=torch.bool))
        self.update = update or (lambda model, x: None)

    def forward(self, x):
        with torch.no_grad():
            self.update(self, x)
        return self.down(self.norm(x) + self.up(x).tanh())


def step(model, x):
    return model(x).square().mean()


def batch(coordinate):
    return (torch.randn(3, 4),)


def updates_mean(model, x):
    model.mean.lerp_(x.mean(0), 0.5)


def replaces_mean(model, x):
    model.mean = 0.5 * model.mean + 0.5 * x.mean(0)


def counts(model, x):
    model.count += len(x)


def marks(model, x):
    model.seen[0] = True


def registers(model, x):
    model.register_buffer("late", x.mean(0), persistent=False)


def doubled(update):
    def twice(model, x):
        update(model, x)
        update(model, 3 * x)

    return twice


def clears(model, x):
    model.count.zero_()
    model.mean.zero_()
    model.seen.logical_not_()


UPDATES = [updates_mean, replaces_mean, counts, marks, registers]
OTHERS = {
    "nothing of a mean": (updates_mean, None, "buffer mean of data coordinate 0"),
    "a mean alone": (None, updates_mean, "buffer mean of data coordinate 0"),
    "a mean twice": (updates_mean, doubled(updates_mean), "buffer mean of data coordinate 0"),
    "a replaced mean": (replaces_mean, doubled(replaces_mean), "buffer mean of data coordinate 0"),
    "a count twice": (counts, doubled(counts), "buffer count of data coordinate 0"),
    "no count": (counts, None, "buffer count of data coordinate 0"),
    "a flag": (marks, clears, "buffer seen of data coordinate 0"),
    "no flag": (None, marks, "buffer seen of data coordinate 0"),
    "of a later buffer": (registers, None, "buffer late"),
}


@pytest.mark.parametrize("update", UPDATES)
def test_buffers_that_both_sides_change_alike(update):
    proof = assert_same_model(lambda: Model(update), lambda: Model(update), step, batch)
    assert proof.kind == "reordered", str(proof)
    assert proof.compared == 1 + 6 + 3 + 1, "the three of the norm, and the one of the update"


@pytest.mark.parametrize("case", OTHERS)
def test_a_buffer_that_one_side_changes_otherwise(case):
    expected, found, name = OTHERS[case]
    with pytest.raises(AnotherFunction, match="a step changes a buffer otherwise") as failure:
        assert_same_model(lambda: Model(found), lambda: Model(expected), step, batch)
    proof = failure.value.proof
    assert (proof.kind, proof.first.result) == ("another function", name)
    if name != "buffer late":  # whose name alone is compared
        assert proof.origin.startswith("the whole model itself, which changes it")
        own = name.split()[1]
        same = assert_same_model(
            lambda: Model(found), lambda: Model(expected), step, batch, ignore_buffers=[own]
        )
        assert same.assumes[-1] == f"ignore_buffers: not compared: {own}"


def test_a_buffer_of_the_parallel_side_alone_is_named():
    proof = assert_same_model(lambda: Model(registers), Model, step, batch)
    assert "buffers that the reference has not are not compared: late" in proof.assumes


def test_statistics_that_a_checkpoint_takes_twice():
    """The forward runs again for the backward, and takes its statistics again."""

    def checkpointed():
        model = Model()
        own = model.norm.forward
        model.norm.forward = lambda x: checkpoint(own, x, use_reentrant=False)
        return model

    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(checkpointed, Model, step, batch)
    assert failure.value.proof.first.result.startswith("buffer norm.")
    assert failure.value.proof.origin.startswith("norm itself, which changes it")
    assert assert_same_model(checkpointed, checkpointed, step, batch).kind == "reordered"


class Averaging(nn.Module):
    """Has a frozen parameter, which ``rate`` mixes with the rows."""

    def __init__(self, rate):
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), rate
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x.mean(0), self.rate)
        return self.linear(x)


def test_parameters_that_a_step_changes():
    def optimised():
        def own_step(model, x):
            loss = step(model, x)
            loss.backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            return loss.detach()

        return nn.Sequential(nn.Linear(4, 4)), own_step

    def plain():
        return nn.Sequential(nn.Linear(4, 4))

    with pytest.raises(
        AnotherFunction, match="the step changes it on rank 0, and not in the refer"
    ):
        assert_same_model(optimised, plain, step, batch)
    with pytest.raises(AnotherFunction, match="the step of the reference changes it, and not that"):
        assert_same_model(lambda: Averaging(0), lambda: Averaging(0.5), step, batch)
    proof = assert_same_model(lambda: Averaging(0.5), lambda: Averaging(0.5), step, batch)
    assert "parameters that the step changes are not compared after it: average" in proof.assumes


def test_patterns_that_name_no_buffer():
    with pytest.raises(ValueError, match=r"\('mena',\): the reference has no buffer of that name"):
        assert_same_model(Model, Model, step, batch, ignore_buffers=("mena",))
    with pytest.raises(TypeError, match="ignore_buffers is 'mean': give a tuple of names"):
        assert_same_model(Model, Model, step, batch, ignore_buffers="mean")
    with pytest.raises(TypeError, match="one of ignore_buffers is 3: give the name of a buffer"):
        assert_same_model(Model, Model, step, batch, ignore_buffers=(3,))


def make(update):
    return lambda: Model(update)


def sharded(update):
    return lambda mesh: fully_shard(Model(update), mesh=mesh["dp"])


def in_ddp(update):
    def build(mesh):
        return DistributedDataParallel(Model(update), process_group=mesh["dp"].get_group())

    return build


def with_dtensors(update):
    """Return a model whose mean is a DTensor, which each rank updates by its own rows."""

    def build(mesh):
        model = Model(update)
        model.mean = distribute_tensor(model.mean, mesh["dp"], [Replicate()])
        return fully_shard(model, mesh=mesh["dp"])

    return build


def counts_all(model, x):
    count = torch.tensor(len(x))
    dist.all_reduce(count)
    model.count += count


@pytest.mark.second_tier("in_ddp")
@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
@pytest.mark.parametrize("parallel", [sharded, in_ddp])
def test_each_rank_has_the_statistics_of_its_batch(parallel, gt_mesh):
    for update in (updates_mean, replaces_mean):
        proof = assert_same_model(parallel(update), make(update), step, batch, mesh=gt_mesh)
        assert proof.kind == "reordered", str(proof)
        assert proof.compared == 2 * (1 + 6 + 3 + 1)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"dp": 2})
def test_real_ranks_compare_buffers(gt_mesh):
    for parallel in (sharded, in_ddp):
        proof = assert_same_model(parallel(counts), make(counts), step, batch, mesh=gt_mesh)
        # DDP broadcasts the variance 1, a known number: it stays one, whose product is rounded.
        assert proof.kind == "reordered", proof
    with pytest.raises(AnotherFunction) as failure:
        assert_same_model(sharded(counts_all), make(counts), step, batch, mesh=gt_mesh)
    assert failure.value.proof.first.result == "buffer count of data coordinate 0"


def squares_of(output, target):
    return (output - target).square().mean()


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def pipeline(mesh, *, infers, microbatches=1):
    """Return the last layer on the second rank, and the others with the norm on the first one."""
    index = mesh.get_local_rank("pp")
    whole = dict(layers().named_children())
    names = ("2",) if index else ("0", "1")
    module = nn.Sequential(OrderedDict((name, whole[name]) for name in names))
    shapes = {}
    if not infers:
        shapes["input_args"] = torch.zeros(4, 4, requires_grad=bool(index))
        shapes["output_args"] = torch.zeros(4, 4, requires_grad=True)
    device, group = torch.device("cpu"), mesh.get_group("pp")
    stage = PipelineStage(module, index, 2, device, group=group, **shapes)
    schedule = ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=squares_of)

    def step_of_stage(model, x, target):
        if not index:
            schedule.step(x)
            return None
        losses = []
        schedule.step(target=target, losses=losses)
        return torch.stack(losses).mean().detach()

    return module, step_of_stage


@pytest.mark.gt_world("simulated", size=2, mesh={"pp": 2})
def test_a_schedule_that_infers_shapes_runs_a_norm_once_more(gt_mesh):
    """So does torch where it trains. With shapes, and one microbatch, the statistics are equal."""

    def whole_step(model, x, target):
        return squares_of(model(x), target)

    def both(coordinate):
        return torch.randn(4, 4), torch.randn(4, 4)

    arguments = {"reference": layers, "step": whole_step, "batch": both, "mesh": gt_mesh}
    with pytest.raises(AnotherFunction, match=r"first buffer 1\.") as failure:
        assert_same_model(partial(pipeline, infers=True), **arguments, data_dims=())
    assert "once more to infer shapes unless PipelineStage has input_args=" in str(failure.value)
    assert_same_model(partial(pipeline, infers=False), **arguments, data_dims=())


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_a_count_of_all_ranks_is_no_count_of_one(gt_mesh):
    with pytest.raises(AnotherFunction, match="first buffer count of data coordinate 0, rank 0"):
        assert_same_model(sharded(counts_all), make(counts), step, batch, mesh=gt_mesh)
    proof = assert_same_model(
        sharded(counts_all), make(counts), step, batch, mesh=gt_mesh, ignore_buffers=("count",)
    )
    assert proof.assumes[-1] == "ignore_buffers: not compared: count"


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
def test_buffers_of_tensor_parallel_ranks(gt_mesh):
    """A buffer may be a DTensor; it is compared as a whole."""

    def parallel(update):
        def build(mesh):
            model = Model(update)
            model.mean = distribute_tensor(model.mean, mesh["tp"], [Replicate()])
            parallelize_module(model.up, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
            parallelize_module(model.down, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
            return model

        return build

    def updates_whole(model, x):
        mean = x.mean(0)
        if isinstance(model.mean, DTensor):
            mean = distribute_tensor(mean, model.mean.device_mesh, [Replicate()])
        model.mean.lerp_(mean, 0.5)

    proof = assert_same_model(
        parallel(updates_whole), make(updates_whole), step, batch, mesh=gt_mesh
    )
    assert proof.compared == 2 * (1 + 6 + 3 + 1)
    with pytest.raises(AnotherFunction, match="first buffer mean of data coordinate 0, rank 0"):
        assert_same_model(
            parallel(doubled(updates_whole)), make(updates_whole), step, batch, mesh=gt_mesh
        )


class Halved(nn.Module):
    """Counts rows for each of its experts; a rank has some of them."""

    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, 4))
        self.rows = nn.Buffer(torch.zeros(experts))

    def forward(self, x):
        with torch.no_grad():
            self.rows += len(x)
        return x @ self.weight.T


@pytest.mark.gt_world("simulated", size=2, mesh={"ep": 2})
def test_parts_of_a_buffer_that_was_sliced_by_hand(gt_mesh):
    given = {"data_dims": (), "loss_dims": ("ep",), "combine": "sum"}
    proof = assert_same_model(
        lambda mesh: Halved(2),
        lambda: Halved(4),
        lambda model, x: model(x).square().sum(),
        batch,
        mesh=gt_mesh,
        local={"weight": ("ep", 0), "rows": ("ep", 0)},
        **given,
    )
    assert proof.compared == 2 * (1 + 1 + 1)


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 2})
def test_a_backward_that_changes_a_buffer_of_several_batches_is_named(gt_mesh):
    """One backward of the reference serves both batches."""

    class InBackward(Model):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: self.count.add_(1) and None)
            return y

    def parallel(mesh):
        return fully_shard(InBackward(), mesh=mesh["dp"])

    proof = assert_same_model(parallel, InBackward, step, batch, mesh=gt_mesh)
    assert proof.assumes[-1] == (
        "buffers that the reference changes in its backward, once for all batches, are not "
        "compared: count"
    )
