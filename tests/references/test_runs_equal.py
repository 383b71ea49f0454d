"""``assert_runs_equal``: two trainers of any kind, compared in bits, with a control or a proof."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    AnotherFunction,
    BitwiseDifference,
    BucketLayout,
    LayoutDifference,
    Record,
    VacuousCheck,
    assert_runs_equal,
    bucket_layout,
    compare,
)
from pytest_gtrainer.graph.layout import Payload, Slot

THREE = pytest.mark.gt_world("ranks", size=3)
TWO_NODES = pytest.mark.gt_world("simulated", size=4, nodes=2)


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step, rank=0):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients_of(loss, parameters):
    return torch.autograd.grad(loss, parameters)


def trainer(reduce=None, lr=0.1, steps=2):
    """Return a side that trains with SGD; ``reduce`` changes the gradients of a step in place."""

    def train(run):
        net = run.start(model())
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(run.input(f"batch {step}, {rank}", batch(step, rank))).square().mean()
            loss.backward()
            if reduce is not None:
                reduce([each.grad for each in net.parameters()])
            run.gradients(net)
            optimizer.step()
            run.step(loss, net, optimizer)

    return train


def each(grads):
    for grad in grads:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())


def bucketed(grads):
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket)
    bucket.div_(dist.get_world_size())
    for grad, own in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(own.view_as(grad))


def gathered(grads, backwards=False):
    """Add the gradients of all ranks one after the other, from the last one if ``backwards``."""
    for grad in grads:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad)
        if backwards:
            parts.reverse()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        grad.copy_(total / len(parts))


def gathered_backwards(grads):
    gathered(grads, backwards=True)


def eager():
    net, x = model(), batch(0)
    loss = net(x).square().mean()
    return {"loss": loss, "gradients": list(gradients_of(loss, list(net.parameters())))}


def traced():
    """The same step as a graph of another tracer."""
    net, x = model(), batch(0)
    weights = dict(net.named_parameters())

    def step(weights, x):
        loss = torch.func.functional_call(net, weights, (x,)).square().mean()
        return loss, gradients_of(loss, list(weights.values()))

    loss, grads = make_fx(step)(weights, x)(weights, x)
    return {"loss": loss, "gradients": list(grads)}


def scaled(by=1.001):
    def run():
        return {"loss": eager()["loss"] * by}

    return run


def test_a_graph_of_another_tracer_and_eager_code():
    runs = assert_runs_equal(traced, eager, control=scaled())
    assert runs.control.outcome == "different"
    assert sorted(runs.actual) == ["gradients[0]", *(f"gradients[{n}]" for n in (1, 2, 3)), "loss"]


def test_a_difference_names_the_first_step_and_tensor():
    with pytest.raises(BitwiseDifference) as failure:
        assert_runs_equal(trainer(lr=0.11), trainer(), control=trainer(lr=0.2))
    assert "first at step 0, rank 0, weight of 0.weight, element (0, 0)" in str(failure.value)
    assert "rounding or a bug? assert_runs_equal(..., proof=True)" in str(failure.value)


def test_what_is_drawn_is_drawn_alike_and_the_states_of_the_caller_stay():
    torch.manual_seed(9)
    before = torch.get_rng_state()

    def draws():
        return {"noise": torch.randn(3)}

    assert_runs_equal(draws, draws, control=lambda: {"noise": torch.randn(6)[3:]})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("control", [eager, scaled(1.0), scaled(float("nan"))])
def test_a_control_that_shows_nothing(control):
    with pytest.raises(VacuousCheck, match=r"the control run is equal|differs only where"):
        assert_runs_equal(eager, eager, control=control)


@pytest.mark.parametrize(
    "other", [{"los": torch.ones(())}, {"loss": torch.ones(2)}, {}], ids=["name", "shape", "none"]
)
def test_a_control_of_other_names_or_shapes(other):
    with pytest.raises(VacuousCheck, match=r"other names, shapes or dtypes|nothing was captured"):
        assert_runs_equal(eager, eager, control=lambda: other)


def records_and_returns(run):
    run.step(torch.ones(()))
    return {"loss": torch.ones(())}


@pytest.mark.parametrize(
    ("side", "says"),
    [
        (lambda: None, "returned nothing and takes no recorder: return tensors"),
        (lambda run: None, "returned nothing and recorded nothing"),
        (records_and_returns, "records_and_returns records and returns a dict: do one of them"),
    ],
)
def test_sides_without_a_result(side, says):
    with pytest.raises(ValueError, match=says) as failure:
        assert_runs_equal(side, eager, control=eager)
    assert failure.value.__notes__ == ["raised by the actual side of assert_runs_equal"]


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        (lambda: {}, lambda: [], "nothing was captured"),
        (lambda: {"loss": torch.ones(())}, eager, "only in expected\n    gradients"),
        (scaled(float("nan")), scaled(float("nan")), "loss is NaN or infinite in every element"),
        (Record, Record, "nothing was captured"),
    ],
    ids=["no tensors", "other names", "not finite", "empty records"],
)
def test_sides_of_which_nothing_follows(actual, expected, says):
    with pytest.raises(BitwiseDifference, match=says):
        assert_runs_equal(actual, expected, control=scaled())


def test_a_loss_that_is_not_finite_in_a_recorded_run():
    def diverged(run):
        run.step(torch.tensor(float("inf")))

    with pytest.raises(BitwiseDifference, match="the run is not finite: step 0, rank 0, loss"):
        assert_runs_equal(diverged, diverged, control=diverged)


def test_sides_that_return_one_result():
    kept = eager()
    with pytest.raises(BitwiseDifference, match="both sides return the same memory"):
        assert_runs_equal(lambda: kept, lambda: kept, control=scaled())


def test_sides_that_go_on_with_one_model():
    net = model()

    def train(run):
        run.start(net)
        loss = net(batch(0)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        run.step(loss)

    with pytest.raises(BitwiseDifference, match="the two runs start from different weights"):
        assert_runs_equal(train, train, control=train)


@pytest.mark.parametrize("options", [{"control": None}, {"control": eager, "proof": True}])
def test_neither_or_both_of_control_and_proof(options):
    with pytest.raises(ValueError, match="needs a run that has other bits, control=, or a proof"):
        assert_runs_equal(eager, eager, **options)


@pytest.mark.gt_world("fake", size=2)
def test_a_fake_world_moves_no_data(gt_world):
    with pytest.raises(ValueError, match="this world of 2 ranks moves no data"):
        assert_runs_equal(eager, eager, control=scaled())


@pytest.mark.gt_world("fake", size=1)
def test_a_fake_world_of_one_rank(gt_world):
    assert_runs_equal(traced, eager, control=scaled())


def test_a_proof_in_one_process():
    def twice(run):
        net = run.start(model())
        loss = net(run.input("x", batch(0))).square().mean()
        return {"loss": loss * 2, "gradient": gradients_of(loss + loss, [net[0].weight])}

    def added(run):
        net = run.start(model())
        loss = net(run.input("x", batch(0))).square().mean()
        return {"loss": loss + loss, "gradient": gradients_of(loss + loss, [net[0].weight])}

    assert assert_runs_equal(twice, twice, control=None, proof=True).proof.kind == "identical"
    # Doubling is exact, so no numbers would show that these add and multiply.
    with pytest.raises(AnotherFunction, match="bits are equal for these numbers, and not for any"):
        assert_runs_equal(twice, added, control=None, proof=True)


def test_a_difference_is_told_with_its_kind_where_a_proof_is_asked_for():
    with pytest.raises(BitwiseDifference, match="in exact arithmetic: another function"):
        assert_runs_equal(trainer(lr=0.11, steps=1), trainer(steps=1), control=None, proof=True)


def test_a_proof_of_sides_that_have_only_numbers_of_their_own():
    with pytest.raises(ValueError, match=r"a side made nothing abstract.*run.start\(model\)"):
        assert_runs_equal(eager, eager, control=None, proof=True)


@TWO_NODES
def test_a_simulated_world(gt_world):
    runs = assert_runs_equal(
        trainer(gathered), trainer(gathered), control=trainer(gathered_backwards), world=gt_world
    )
    assert runs.actual.ranks == (0, 1, 2, 3)
    # On two nodes a ring adds an element in an order that depends on its place in the payload.
    with pytest.raises(BitwiseDifference, match="first at step 0, rank 0, gradient of"):
        assert_runs_equal(
            trainer(bucketed), trainer(each), control=trainer(gathered), world=gt_world
        )


@pytest.mark.second_tier
@TWO_NODES
def test_proofs_in_a_simulated_world(gt_world):
    one = trainer(gathered, steps=1)
    runs = assert_runs_equal(one, one, control=None, proof=True, world=gt_world)
    assert (runs.proof.kind, runs.control) == ("identical", None)
    with pytest.raises(BitwiseDifference, match="in exact arithmetic: reordered"):
        assert_runs_equal(
            trainer(bucketed, steps=1),
            trainer(each, steps=1),
            control=None,
            proof=True,
            world=gt_world,
        )


@TWO_NODES
def test_returned_tensors_have_the_name_of_their_rank(gt_world):
    def own(by):
        return lambda: {"x": torch.ones(2) * (dist.get_rank() + by)}

    runs = assert_runs_equal(own(1), own(1), control=own(2), world=gt_world)
    assert sorted(runs.actual) == [f"rank {rank}.x" for rank in range(4)]


@THREE
def test_ranks(gt_world):
    runs = assert_runs_equal(
        trainer(gathered), trainer(gathered), control=trainer(gathered_backwards)
    )
    assert runs.actual.ranks == (gt_world.rank,)
    with pytest.raises(VacuousCheck, match="the control run is equal: this check cannot fail"):
        assert_runs_equal(trainer(gathered), trainer(gathered), control=trainer(gathered))
    with pytest.raises(ValueError, match="proof=True on real ranks"):
        assert_runs_equal(trainer(each), trainer(each), control=None, proof=True)


@THREE
def test_a_control_that_one_rank_sees_is_enough(gt_world):
    def own(by):
        return lambda: {"x": torch.ones(2) + by * (gt_world.rank == 2)}

    runs = assert_runs_equal(own(0), own(0), control=own(1))
    assert runs.control.outcome == ("different" if gt_world.rank == 2 else "equal")


@THREE
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_a_side_that_raises_on_one_rank(gt_world):
    def raises():
        1 / (gt_world.rank - 1)
        x = torch.ones(2)
        dist.all_reduce(x)
        return x

    assert_runs_equal(raises, raises, control=raises)


@THREE
@pytest.mark.xfail(raises=BitwiseDifference, strict=True)
def test_a_difference_on_one_rank(gt_world):
    def own(by):
        return lambda: {"x": torch.ones(2) + by * (gt_world.rank == 2)}

    def control():
        raise RuntimeError("this rank has started it alone")

    assert_runs_equal(own(1), own(0), control=control)


@pytest.mark.gt_world("fake", size=2)
def test_layouts(gt_world):
    weights = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})

    def graph_of(*order):
        def step(a, b):
            both = torch.cat([(a, b)[index] for index in order])
            return collectives.wait_tensor(collectives.all_gather_tensor(both, 0, dist.group.WORLD))

        return bucket_layout(make_fx(step)(*weights.values()), names=weights)

    layouts = graph_of(0, 1), graph_of(1, 0)
    dist.destroy_process_group()

    def side(layout, value=1.0):
        def train(run):
            run.layout_of(layout)
            run.step(torch.tensor(value))

        return train

    assert assert_runs_equal(
        side(layouts[0]), side(layouts[0]), control=side(layouts[0], 2.0)
    ).layout
    with pytest.raises(LayoutDifference, match="all bits are equal here: only the layout shows it"):
        assert_runs_equal(side(layouts[0]), side(layouts[1]), control=side(layouts[0], 2.0))
    with pytest.raises(ValueError, match="the expected side noted no layout, and the other did"):
        assert_runs_equal(
            side(layouts[0]), lambda run: run.step(torch.tensor(1.0)), control=side(layouts[0], 2.0)
        )


PAYLOADS = {
    order: BucketLayout(
        (
            Payload(
                "all_gather",
                torch.float32,
                (0, 1, 2),
                "",
                tuple(Slot(name, 8 * place, 8) for place, name in enumerate(order)),
            ),
        )
    )
    for order in ("ab", "ba")
}


def with_layouts(orders, value=1.0):
    """A side whose rank r notes the layout orders[r]; None for none."""

    def train(run):
        order = orders[dist.get_rank()]
        if order is not None:
            run.layout_of(PAYLOADS[order])
        run.step(torch.tensor(value))

    return train


SIMULATED = pytest.mark.gt_world("simulated", size=3)


@SIMULATED
@pytest.mark.parametrize("rank", range(3))
def test_layouts_of_all_simulated_ranks_are_compared(gt_world, rank):
    orders = ["ab"] * 3
    orders[rank] = "ba"
    control = with_layouts(["ab"] * 3, 2.0)
    with pytest.raises(LayoutDifference, match=f"on rank {rank}: "):
        assert_runs_equal(
            with_layouts(["ab"] * 3), with_layouts(orders), control=control, world=gt_world
        )
    assert assert_runs_equal(
        with_layouts(orders), with_layouts(orders), control=control, world=gt_world
    ).layout


@SIMULATED
@pytest.mark.parametrize("rank", range(3))
def test_a_simulated_rank_without_a_layout_is_named(gt_world, rank):
    orders: list[str | None] = ["ab"] * 3
    orders[rank] = None
    some, all_of_them = with_layouts(orders), with_layouts(["ab"] * 3)
    control = with_layouts(["ab"] * 3, 2.0)
    for sides, words in (
        ((some, all_of_them), f"the actual side noted no layout on rank {rank}, and the other did"),
        ((all_of_them, some), f"the expected side noted no layout on rank {rank}"),
        ((some, some), f"noted no layout on rank {rank}, and neither side did"),
    ):
        with pytest.raises(ValueError, match=words):
            assert_runs_equal(*sides, control=control, world=gt_world)


def test_a_second_layout_is_refused():
    def twice(run):
        run.layout_of(PAYLOADS["ba"])
        run.layout_of(PAYLOADS["ab"])

    with pytest.raises(ValueError, match="called twice"):
        assert_runs_equal(twice, twice, control=twice)


def test_a_step_without_an_optimizer_records_weights():
    def side(scale):
        def train(run):
            model = run.start(nn.Linear(2, 2))
            loss = scale * model(torch.ones(1, 2)).sum()
            loss.backward()
            run.gradients(model)
            run.step(loss, model)

        return train

    found = assert_runs_equal(side(1), side(1), control=side(2))
    assert {key.phase for key in found.actual} == {"gradient", "loss", "weight"}
    with pytest.raises(BitwiseDifference):
        assert_runs_equal(side(1), side(2), control=side(3))


class Counting(torch.optim.SGD):
    """Keeps more than tensors, as L-BFGS does."""

    def __init__(self, parameters, keep):
        super().__init__(parameters, lr=0.1)
        self.keep = keep

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("count", 0)
            state.setdefault("old", []).append(torch.zeros(2))
            state["of"] = {"mean": [0.5]}
            self.keep(state)


KEPT = {
    "a number": lambda state: state.update(count=state["count"] + 1),
    "the last tensor of a list": lambda state: state["old"][-1].add_(1),
    "one tensor more": lambda state: state["old"].append(torch.zeros(2)),
    "a number in a dict": lambda state: state["of"].update(mean=[0.25]),
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_an_optimizer_keeps_beside_tensors_is_compared(kept):
    def side(keep):
        def train(run):
            net = run.start(model())
            optimizer = Counting(net.parameters(), keep)
            net(batch(0)).square().mean().backward()
            optimizer.step()
            run.step(None, net, optimizer)

        return train

    plain, other = side(lambda state: None), side(KEPT[kept])
    with pytest.raises(BitwiseDifference, match="optimizer"):
        assert_runs_equal(other, plain, control=trainer(steps=1))


def test_a_result_kept_in_inference_mode_is_refused():
    with torch.inference_mode():
        kept = torch.ones(3)
    with pytest.raises(BitwiseDifference, match="no write to it was counted between them"):
        assert_runs_equal(lambda: kept, lambda: kept, control=lambda: torch.zeros(3))


def dtensor(placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.ones(3), mesh, [placement], run_check=False)


OTHER_MEANINGS = {
    "sum and value": (Partial(), Replicate()),
    "value and sum": (Replicate(), Partial()),
    "part and value": (Shard(0), Replicate()),
    "sum and mean": (Partial("sum"), Partial("avg")),
    "sum and plain": (Partial(), None),
}


@pytest.mark.gt_world("simulated", size=3)
@pytest.mark.parametrize("case", OTHER_MEANINGS)
def test_equal_parts_of_other_dtensors_on_simulated_ranks(gt_world, case):
    check_other_meanings(case, gt_world)


@THREE
@pytest.mark.parametrize("case", OTHER_MEANINGS)
def test_equal_parts_of_other_dtensors_on_ranks(gt_world, case):
    check_other_meanings(case, None)


def check_other_meanings(case, world):
    """The local part of a sum is one summand; the local parts of both sides are ones."""

    def side(placement, value=1.0):
        if placement is None:
            return lambda: value * torch.ones(3)
        return lambda: value * dtensor(placement)

    own, theirs = OTHER_MEANINGS[case]
    with pytest.raises((BitwiseDifference, ValueError), match=r"placements|terms of a sum"):
        assert_runs_equal(side(own), side(theirs), control=side(own, 2.0), world=world)
    for placement in (Replicate(), Shard(0)):
        assert_runs_equal(
            side(placement), side(placement), control=side(placement, 2.0), world=world
        )


def adds(run, placement, value):
    run.add("gradient", "w", value * (torch.ones(3) if placement is None else dtensor(placement)))


def records_gradients(run, placement, value):
    model = nn.ParameterDict({"v": torch.ones(1), "w": torch.ones(3)})
    if placement is not None:
        own = placement if placement.is_shard() else Replicate()
        model["w"] = nn.Parameter(dtensor(own))
    model["w"].grad = value * (torch.ones(3) if placement is None else dtensor(placement))
    run.gradients(model)


def records_weights(run, placement, value):
    own = torch.ones(3) if placement is None else dtensor(placement)
    run.step(torch.ones(()), nn.ParameterDict({"v": torch.ones(1), "w": value * own}))


@pytest.mark.parametrize("records", [adds, records_gradients, records_weights])
@pytest.mark.parametrize("case", OTHER_MEANINGS)
@pytest.mark.gt_world("simulated", size=3)
def test_equal_parts_of_other_dtensors_in_a_record(gt_world, case, records):
    def side(placement, value=1.0):
        def train(run):
            records(run, placement, value)
            run.step(torch.ones(()))

        return train

    own, theirs = OTHER_MEANINGS[case]
    with pytest.raises(BitwiseDifference, match=r"w is \(.*\) of \[\d\] (in actual|on one side)"):
        assert_runs_equal(side(own), side(theirs), control=side(own, 2.0), world=gt_world)
    assert_runs_equal(side(own), side(own), control=side(own, 2.0), world=gt_world)


@pytest.mark.gt_world("fake", size=2)
def test_a_record_keeps_placements_through_a_file_and_a_merge(gt_world, tmp_path):
    records = [Record(2, rank) for rank in range(2)]
    for rank, record in enumerate(records):
        record.add(0, rank, "weight", "w", dtensor(Shard(0)))
        record.add(0, rank, "weight", "plain", torch.ones(2))
        record.save(tmp_path / f"{rank}")
    whole = Record.merged([Record.load(tmp_path / f"{rank}") for rank in range(2)])
    assert [(key.rank, key.name) for key in whole.placements] == [(0, "w"), (1, "w")]
    assert set(whole.placements.values()) == {"(Shard(dim=0),) of [6]"}
    other = Record(2, 1)
    other.add(0, 1, "weight", "w", dtensor(Replicate()))
    other.add(0, 1, "weight", "plain", torch.ones(2))
    assert "rank 1, weight of w is (Shard(dim=0),) of [6] in actual" in str(
        compare(records[1], other)
    )
    assert compare(records[1], Record.load(tmp_path / "1")).outcome == "equal"
