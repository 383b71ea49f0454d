"""Real ranks in the field: parallel training computes the function of the unsharded model."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer import (
    data_parallel,
    field_arithmetic,
    joint_transformer_block_bucketing_reordering_pass,
    prove,
    term_arithmetic,
    trace_step,
)
from pytest_gtrainer.arithmetic.values import NoMeaning

c10d = torch.ops._c10d_functional
DIM, ROWS = 4, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def batch(elements, coordinate):
    x = torch.randn(ROWS, DIM)
    elements.make_abstract(x, ("batch", coordinate))
    return x


def loss_of(model, x):
    return (model(x) ** 2).sum()


def unsharded(coordinates, factor=1.0, casts="opaque"):
    """Return the elements of each gradient of the mean over data coordinates."""
    with field_arithmetic(casts=casts) as elements:
        model = Model()
        elements.make_abstract(model)
        losses = [loss_of(model, batch(elements, coordinate)) for coordinate in range(coordinates)]
        loss = factor * sum(losses) / coordinates
        loss.backward()
        return {name: elements.of(own.grad) for name, own in model.named_parameters()}


def gradients(elements, model):
    found = {}
    for name, own in model.named_parameters():
        gradient = own.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
            gradient = gradient.to_local()
        found[name.removeprefix("module.")] = elements.of(gradient)
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    assert not any(each is None for each in (*found.values(), *expected.values()))
    return all(torch.equal(found[name], expected[name]) for name in expected)


def sharded(elements, mesh):
    model = Model()
    elements.make_abstract(model)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(elements, mesh):
    model = Model()
    elements.make_abstract(model)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def ddp(elements, mesh):
    model = Model()
    elements.make_abstract(model)
    return DistributedDataParallel(model, process_group=mesh.get_group())


@pytest.mark.gt_world("ranks", size=3, mesh={"fsdp": 3})
@pytest.mark.parametrize("parallel", [sharded, ddp])
def test_data_parallel_gradients_are_the_mean(parallel, gt_world, gt_mesh):
    """With three ranks, gradients are multiplied by 1/3, which is rounded."""
    with field_arithmetic(casts="identity") as elements:
        model = parallel(elements, gt_mesh)
        loss_of(model, batch(elements, gt_world.rank)).backward()
        found = gradients(elements, model)
    assert same(found, unsharded(3, casts="identity"))
    assert not same(found, unsharded(3, factor=3.0, casts="identity"))
    assert not same(found, unsharded(2, casts="identity"))


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_a_forgotten_division_is_another_function(gt_world, gt_mesh):
    with field_arithmetic() as elements:
        model = sharded(elements, gt_mesh)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        loss_of(model, batch(elements, gt_world.rank)).backward()
        found = gradients(elements, model)
    assert not same(found, unsharded(2))
    assert same(found, unsharded(2, factor=2.0))


@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
@pytest.mark.parametrize("wrong", [False, True])
def test_tensor_parallel_is_the_unsharded_model(wrong, gt_mesh):
    with field_arithmetic() as elements:
        model = tensor_parallel(elements, gt_mesh)
        if wrong:  # each rank adds what the other ranks would have to add
            model.down.register_forward_hook(lambda module, given, out: 2 * out)
        loss_of(model, batch(elements, 0)).backward()
        found = gradients(elements, model)
    assert same(found, unsharded(1)) != wrong


def all_to_all(x):
    rank = dist.get_rank()
    receives = [1, 1, 1] if rank else [2, 2, 2]  # rank 0 gets two rows of each, others get one
    sends = [2, 1, 1]
    out = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(out, x[:4].contiguous(), receives, sends)
    return out


def gathered_list(x):
    out = [torch.empty_like(x) for _ in range(3)]
    dist.all_gather(out, x)
    return torch.cat(out)


def functional_scatter(x):
    return functional.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD) + 0


def scattered_list(x):
    out = torch.empty_like(x)
    dist.scatter(out, [x, 2 * x, 3 * x] if dist.get_rank() == 1 else None, src=1)
    return out


def broadcast_in_part(x):
    """Broadcast from the last rank into a part of memory that holds known numbers."""
    whole = torch.ones(ROWS + 2, DIM)
    whole[:ROWS] = x
    dist.broadcast(whole[1:3], src=2)
    return whole


def of(elements, rank):
    x = torch.zeros(ROWS, DIM)
    elements.make_abstract(x, ("x", rank))
    return x


EXPECTED = {
    all_to_all: lambda xs, rank: torch.cat(
        [x[:2] if rank == 0 else x[rank + 1 : rank + 2] for x in xs]
    ),
    gathered_list: lambda xs, rank: torch.cat(xs),
    functional_scatter: lambda xs, rank: (sum(xs) / 3).chunk(3)[rank],
    scattered_list: lambda xs, rank: (rank + 1) * xs[1],
    broadcast_in_part: lambda xs, rank: torch.cat(
        [xs[rank][:1], xs[2][1:3], xs[rank][3:], torch.ones(2, DIM)]
    ),
}


@pytest.mark.gt_world("ranks", size=3)
@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_a_collective_moves_elements_as_numbers(function, gt_world):
    with field_arithmetic() as elements:
        found = elements.of(function(of(elements, gt_world.rank)))
    with field_arithmetic() as elements:
        xs = [of(elements, rank) for rank in range(3)]
        expected = elements.of(EXPECTED[function](xs, gt_world.rank))
        other = elements.of(EXPECTED[function](xs, (gt_world.rank + 1) % 3))
    assert torch.equal(found, expected)
    if function is not gathered_list:
        assert found.shape != other.shape or not torch.equal(found, other)


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
def test_each_reduction_is_itself(op, gt_world):
    results = {
        "SUM": lambda a, b: a + b,
        "AVG": lambda a, b: (a + b) / 2,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "PRODUCT": lambda a, b: a * b,
    }
    with field_arithmetic() as elements:
        x = of(elements, gt_world.rank)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        found = elements.of(x)
        pair = of(elements, 0), of(elements, 1)
        expected = {name: elements.of(function(*pair)) for name, function in results.items()}
    for name, wanted in expected.items():
        assert torch.equal(found, wanted) == (name == op)


@pytest.mark.gt_world("ranks", size=2)
def test_known_and_abstract_numbers_meet(gt_world):
    """One rank has known zeros, the other abstract numbers: both take part in the exchange."""
    with field_arithmetic() as elements:
        x = of(elements, 1) if gt_world.rank else torch.zeros(ROWS, DIM)
        dist.all_reduce(x)
        found = elements.of(x)
        expected = elements.of(of(elements, 1))
    assert torch.equal(found, expected)


@pytest.mark.gt_world("ranks", size=2)
def test_messages_and_terms_are_refused(gt_world):
    pass_on = dist.send if gt_world.rank else dist.recv
    with field_arithmetic() as elements:
        x = of(elements, 0)
        with pytest.raises(NoMeaning, match=r"c10d\.(send|recv_) between real ranks"):
            pass_on(x, 1 - gt_world.rank)
    with term_arithmetic() as elements:
        x = of(elements, 0)
        with pytest.raises(NoMeaning, match="communicates"):
            dist.all_reduce(x)


@pytest.mark.gt_world("ranks", size=2)
def test_abstract_numbers_in_another_form_are_refused(gt_world):
    """Else their bytes would travel without elements, and arrive as known numbers."""
    with field_arithmetic() as elements:
        given = of(elements, gt_world.rank).view(torch.uint8).reshape(-1)
        gathered = given.new_empty(2 * len(given))
        with pytest.raises(NoMeaning, match=r"is read as torch\.uint8"):
            dist.all_gather_into_tensor(gathered, given)
    with field_arithmetic() as elements:
        x = of(elements, gt_world.rank)
        # ``torch.distributed`` sends complex numbers as pairs; these operators do not.
        with pytest.raises(NoMeaning, match="of complex numbers between real ranks"):
            functional.broadcast(torch.complex(x, x), 0, dist.group.WORLD)
    # Bytes that hold no abstract numbers are known.
    with field_arithmetic() as elements:
        gathered = torch.empty(4, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, torch.ones(2, dtype=torch.uint8))
        assert elements.of(gathered) is None


def test_what_is_no_number_is_refused():
    with field_arithmetic() as elements:
        with pytest.raises(ValueError, match="give name="):
            elements.make_abstract(torch.zeros(2))
        with pytest.raises(ValueError, match=r"tokens is torch\.int64"):
            elements.make_abstract(torch.tensor([1]), "tokens")
        assert elements.of(torch.ones(2)) is None
    with pytest.raises(ValueError, match="casts='none'"), field_arithmetic(casts="none"):
        pass


@pytest.mark.parametrize("arithmetic", [field_arithmetic, term_arithmetic])
def test_equal_names_and_no_others_give_equal_elements(arithmetic):
    """A name of the module stands before those of its parameters: a teacher is not its student."""
    with arithmetic() as elements:
        student, teacher, again = (torch.nn.Linear(3, 3) for _ in range(3))
        for model, name in ((student, ""), (teacher, "teacher"), (again, "teacher")):
            elements.make_abstract(model, name)
        weights = [elements.of(model.weight) for model in (student, teacher, again)]
        assert torch.equal(weights[1], weights[2])
        assert not bool((weights[0] == weights[1]).any())
        assert not bool((weights[1][0] == elements.of(teacher.bias)).any())


def test_fake_memory_has_no_elements():
    """DTensor makes some for every operator, to know its shape."""
    with field_arithmetic() as elements, FakeTensorMode():
        fake = torch.empty(3)
        assert elements.of(fake) is None
        assert elements.of(fake + 1) is None


def test_terms_keep_the_order_of_additions():
    with term_arithmetic() as elements:
        x, y, z = torch.zeros(3), torch.zeros(3), torch.zeros(3)
        for name, tensor in zip("xyz", (x, y, z), strict=True):
            elements.make_abstract(tensor, name)
        left, right = elements.of((x + y) + z), elements.of(x + (y + z))
        assert torch.equal(left, elements.of((y + x) + z))
        assert not torch.equal(left, right)


def step(model, x):
    return loss_of(model, x)


def traced(mesh):
    torch.manual_seed(0)
    return trace_step(data_parallel(Model(), mesh), step, (torch.randn(ROWS, DIM),)).gm


@pytest.mark.gt_world("ranks", size=3, mesh={"fsdp": 3})
def test_a_pass_is_proven_on_real_ranks(gt_mesh, gt_world):
    """Buckets change the order of additions; every rank gets the same answer."""
    gm = traced(gt_mesh)
    bucketed = joint_transformer_block_bucketing_reordering_pass(
        copy.deepcopy(gm), bucket_plan=[["up"], ["down"], ["norm"]]
    )
    proof = prove(bucketed, gm, world=gt_world)
    assert proof.kind == "reordered", str(proof)
    # The loss and six gradients on each of three ranks.
    assert proof.compared == 3 * (1 + 6)
    with pytest.raises(ValueError, match=r"at_least='identical' on real ranks"):
        prove(bucketed, gm, world=gt_world, at_least="identical")

    # The last rank alone adds twice what it has.
    wrong = copy.deepcopy(gm)
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    launch = wrong.graph.find_nodes(op="call_function", target=scatter)[0]
    with wrong.graph.inserting_before(launch):
        factor = 2.0 if gt_world.rank == 2 else 1.0
        scaled = wrong.graph.call_function(torch.ops.aten.mul.Tensor, (launch.args[0], factor))
    launch.replace_input_with(launch.args[0], scaled)
    wrong.recompile()
    proof = prove(wrong, gm, world=gt_world)
    assert proof.kind == "another function", str(proof)
    assert proof.first.rank == 0
    assert proof.origin


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_a_difference_on_the_last_rank_alone_is_told_on_all(gt_mesh, gt_world):
    gm = traced(gt_mesh)
    wrong = copy.deepcopy(gm)
    output = wrong.graph.output_node()
    first, *rest = output.args[0]
    if gt_world.rank == 1:
        with wrong.graph.inserting_before(output):
            first = wrong.graph.call_function(torch.ops.aten.mul.Tensor, (first, 3))
    output.args = ((first, *rest),)
    wrong.recompile()
    proof = prove(wrong, gm, world=gt_world)
    assert proof.kind == "another function", str(proof)
    assert (proof.first.rank, proof.factor) == (1, 3)
    assert proof.compared == 2 * (1 + 6)
    assert "begins at node mul" in str(proof)


@torch.library.custom_op("gt_proofs::of_one_rank", mutates_args=())
def of_one_rank(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@of_one_rank.register_fake
def _(x):
    return torch.empty_like(x)


ON_ONE_RANK = {
    "exp": (torch.ops.aten.exp.default, "another function"),
    "an unknown operator": (torch.ops.gt_proofs.of_one_rank.default, "unknown"),
}


@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_all_ranks_make_the_attempts_that_one_rank_needs(name, gt_world):
    """The last rank alone has the reason for further runs; the first one goes along."""
    operator, kind = ON_ONE_RANK[name]

    def graph(is_wrong):
        graph = fx.Graph()
        x = graph.placeholder("x")
        group = dist.group.WORLD.group_name
        total = graph.call_function(c10d.all_reduce.default, (x, "sum", group))
        total = graph.call_function(c10d.wait_tensor.default, (total,))
        if is_wrong:
            total = graph.call_function(operator, (total,))
        graph.output((total,))
        return fx.GraphModule(torch.nn.Module(), graph)

    proof = prove(graph(gt_world.rank == 1), graph(False), inputs=(torch.randn(4),), world=gt_world)
    assert (proof.kind, proof.first.rank) == (kind, 1), str(proof)
    assert ("of_one_rank" in proof.reason) == (kind == "unknown")
