"""``assert_parity`` on real ranks: equal layouts and bits, and a check that could have failed (S3,
L5).
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pytest_gtrainer import (
    MixedPrecisionPolicy,
    Record,
    TrainConfig,
    VacuousCheck,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_parity,
    construct_default_graph_passes,
    facts,
    train_eager,
    train_graph,
)
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.passes.graph_pass import bind_options
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.references.parity import _note_idle_clipping
from pytest_gtrainer.references.replicas import texts_of_ranks
from pytest_gtrainer.tracing.sharding import default_reduce_dtype

PLAN = [f"layers.{index}" for index in range(3)]
FOUR = pytest.mark.gt_world("ranks", size=4)


class Block(nn.Module):
    """A block that registers its modules in another order than it runs them.

    Over 4 ranks it has 28 elements on each, and one more for 4 of ``scale``.
    """

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.first(x), 0.1).sin()) * self.scale.mean()


class Model(nn.Module):
    """Three blocks, a buffer that is updated.

    Weights and dropout are drawn from the generator as it is.
    """

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(scale) for _ in range(3))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        for layer in self.layers:
            x = x + layer(x)
        return (x / self.seen).square().mean()


@pytest.fixture
def training(gt_mesh):
    """``training(scale=4)``: 29 elements a rank and bucket, in which gloo shows an order.

    30 by 8, and it does not.
    """

    def batch(step, rank):
        return (torch.randn(5, 6, generator=torch.Generator().manual_seed(9 * step + rank)),)

    def make(scale=4, **changes):
        fields = {
            "model": lambda: Model(scale),
            "step": lambda model, x: model(x),
            "batch": batch,
            "steps": 1,
        }
        return TrainConfig(**{**fields, "bucket_plan": PLAN, "mesh": gt_mesh, **changes})

    return make


@FOUR
def test_a_step_adds_the_gradients_of_several_batches(training, gt_world):
    """Steps 0 and 1 take batches 0 to 3; the sum is that of two batches, one after the other."""
    parity = assert_parity(training(accumulate=2, steps=2, max_norm=1e-3), gt_world)
    losses = [(key.step, key.name) for key in parity.graph.select(phase="loss")]
    assert losses == [(0, "batch 0"), (0, "batch 1"), (1, "batch 2"), (1, "batch 3")]

    def model():
        torch.manual_seed(0)
        return nn.Linear(6, 8)

    def gradients(**changes):
        config = training(model=model, bucket_plan=[""], **changes)
        config = replace(config, step=lambda model, x: model(x).square().mean())
        return train_eager(config).select(step=0, phase="gradient")

    added, first = gradients(accumulate=2), gradients()
    second = gradients(batch=lambda step, rank: training().batch(1, rank))
    by_hand = {key: first[key] + second[key] for key in first}
    assert_bitwise_equal(added, by_hand)
    assert_bitwise_different(added, first)


@pytest.mark.second_tier("own trace")
@FOUR
@pytest.mark.parametrize("trace_once", [False, True], ids=["own trace", "handed over"])
def test_equal_and_an_odd_payload_shows_it(training, gt_world, trace_once):
    """The control sees other gradients on some rank, and the records have both steps."""
    parity = assert_parity(training(steps=2, trace_once=trace_once), gt_world)
    assert "different" in seen_by_all(parity)
    assert len(parity.graph.select(step=1)) == len(parity.eager.select(step=0)) > 0
    assert [
        sum(slot.nbytes for slot in payload.slots) for payload in parity.layout.of("reduce_scatter")
    ] == [29 * 4] * 3


def last_input_doubled(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A pass that writes to the last input behind all that reads it."""
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.aten.mul_.Tensor, (inputs[-1], 2))
    gm.recompile()
    return gm


def draws_at_the_end(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.aten.rand.default, ([3],))
    gm.recompile()
    return gm


def check_what_passes_do_besides(config, world, plan):
    """Nothing reads what they do: each batch is a new tensor, and the last step draws no more."""
    passes = construct_default_graph_passes(bucket_plan=plan)
    with pytest.raises(facts.FailedCheck, match="writes to input 1 of the step, which belongs"):
        assert_parity(config, world, passes=[*passes, last_input_doubled])
    with pytest.raises(BitwiseDifference, match=r"torch.cpu at the end"):
        assert_parity(config, world, passes=[*passes, draws_at_the_end])
    assert_parity(config, world, passes=passes)


def two_inputs(model, x, y):
    return model(x + y)


@FOUR
def test_what_a_pass_does_besides_its_results(training, gt_world):
    config = training(record_rng=True)
    batch = config.batch
    config = replace(config, step=two_inputs, batch=lambda *at: (*batch(*at), *batch(*at)))
    check_what_passes_do_besides(config, gt_world, PLAN)


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_what_a_pass_does_besides_its_results_on_simulated_ranks(gt_world):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def config(mesh):
        return TrainConfig(
            model=model,
            step=lambda model, x, y: model(x + y).square().mean(),
            batch=lambda step, rank: (torch.ones(5, 8) + rank, torch.full((5, 8), 0.1)),
            bucket_plan=["0", "1"],
            mesh=mesh,
            steps=1,
            record_rng=True,
        )

    check_what_passes_do_besides(config, gt_world, ["0", "1"])


@FOUR
def test_a_check_that_cannot_fail_is_refused_with_the_cause(training, gt_world):
    """W4: two more elements a rank, and gloo adds whole shards."""
    with pytest.raises(VacuousCheck) as refused:
        assert_parity(training(8), gt_world)
    assert str(refused.value) == (
        "payloads packed in another order give the same bits on these ranks, because gloo adds "
        "whole shards where a "
        "rank's payload has an even number of elements (30 in layers.0 and 2 more); so this check "
        "cannot fail: take "
        "sizes that make it odd, "
        'or gt_world("simulated", nodes=2), or accept the layouts and the other bits as proof '
        '(invisible="report"), or prove it for any numbers: assert_parity(config, gt_world, '
        'proof=True) in gt_world("simulated", size=4, nodes=2)'
    )


@pytest.mark.second_tier
@FOUR
def test_where_no_order_shows_that_can_be_reported(training, gt_world):
    """The control repeats the step: same weights, buffers and dropout, or it would see a
    difference.
    """
    assert assert_parity(training(8), gt_world, invisible="report").control.outcome == "equal"


@pytest.mark.second_tier("fully_shard")
@pytest.mark.gt_world("ranks", size=2)
@pytest.mark.parametrize("changes", [{}, {"replicate": True}], ids=["fully_shard", "ddp"])
def test_two_ranks_show_no_order(training, gt_world, changes):
    """The control has the weights, buffers and random numbers of the run: those of a new model
    would differ.
    """
    with pytest.raises(
        VacuousCheck, match=r"two ranks add a \+ b, whichever is first; .*take 3 ranks or more"
    ):
        assert_parity(training(2, **changes), gt_world)


class Sums(nn.Module):
    """Gradients of 1 and 2, whose sums are exact."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((place + 1) * value.sum() for place, value in enumerate(self.values))


class Roots(Sums):
    """The root of the first element is 0, and its gradient infinite, on the rank that has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum((value.flatten()[0] - 1).sqrt() for value in self.values)


@FOUR
def test_an_order_that_infinite_gradients_hide(training, gt_world):
    """V6: every rank says so, also if its own shards are finite; it names no exact sums."""
    with pytest.raises(
        VacuousCheck, match=r"because gradients or losses hold NaN or inf, .*are finite, or accept"
    ):
        assert_parity(
            training(model=lambda: Roots((8, 3), (8,)), bucket_plan=[["values", ""]]), gt_world
        )


@pytest.mark.second_tier
@FOUR
@pytest.mark.parametrize("ranks", [[0], [3], range(4)], ids=["rank 0", "rank 3", "all ranks"])
def test_a_run_that_is_not_finite_is_no_parity(training, gt_world, ranks):
    """V6: a loss of one rank is NaN, so all gradients are: on every rank that is said, and nothing
    about an order.
    """

    def batch(step, rank):
        return (torch.full((5, 6), float("nan") if rank in ranks else 1.0),)

    what = "loss" if gt_world.rank in ranks else "gradient of "
    with pytest.raises(
        BitwiseDifference, match=f"the run is not finite: step 0, rank {gt_world.rank}, {what}"
    ):
        assert_parity(training(batch=batch), gt_world)


def nan_at_call(number: int, rank: int):
    """A batch function that gives NaN when it is called for the last time, by the control."""
    calls: list[int] = []

    def batch(step, coordinate):
        calls.extend([coordinate] * (coordinate == rank))
        generator = torch.Generator().manual_seed(9 * step + coordinate)
        scale = float("nan") if coordinate == rank and len(calls) == number else 1.0
        return (scale * torch.randn(5, 6, generator=generator),)

    return batch


NO_PROOF = "in another order the control run differs only where one side is NaN or infinite"


@pytest.mark.second_tier
@FOUR
@pytest.mark.parametrize("rank", [1, 3])
def test_a_control_that_differs_by_nan_alone_proves_nothing(training, gt_world, rank):
    """W4, V6: all ranks refuse. Each traces, runs eagerly, runs the graph, and runs the control."""
    with pytest.raises(VacuousCheck, match=NO_PROOF):
        assert_parity(training(8, batch=nan_at_call(4, rank)), gt_world)
    parity = assert_parity(training(8, batch=nan_at_call(4, rank)), gt_world, invisible="report")
    assert set(texts_of_ranks(parity.control.outcome)) == {"unverified"}


@pytest.mark.gt_world("simulated", size=4, nodes=2)
def test_a_control_that_differs_by_nan_alone_proves_nothing_under_a_net(gt_world):
    """W4, V6: rank 1 does not trace."""

    def config(mesh):
        return TrainConfig(
            model=lambda: Sums((8, 3), (8,)),
            step=lambda model, x: model(x) * x.mean(),
            batch=batch,
            bucket_plan=[["values", ""]],
            mesh=mesh,
            steps=1,
        )

    batch = nan_at_call(3, 1)
    with facts.collecting() as seen, pytest.raises(VacuousCheck, match=NO_PROOF):
        assert_parity(config, gt_world)
    batch = nan_at_call(3, 1)
    assert assert_parity(config, gt_world, invisible="report").control.outcome == "unverified"
    assert [fact["result"] for fact in seen if fact["kind"] == "net"] == [
        "equal, but the control proves nothing"
    ]


@pytest.mark.second_tier
@FOUR
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            [(8, 3)],
            "no bucket holds two parameters with gradients; .*give a bucket_plan that packs more "
            "than one",
        ),
        ([(8, 3), (4,)], "or its sums are exact.*take other sizes or dtypes, or gt_world"),
    ],
    ids=["one parameter", "whole numbers"],
)
def test_what_else_hides_an_order(training, gt_world, shapes, words):
    with pytest.raises(VacuousCheck, match=words):
        assert_parity(training(model=lambda: Sums(*shapes), bucket_plan=[["values", ""]]), gt_world)


@pytest.mark.second_tier
@FOUR
def test_execution_order_is_told_by_layout_and_by_bits_where_they_show(training, gt_world):
    """L5, W4: rank 0 adds its elements in one order, whatever the order of the payload."""
    with pytest.raises(
        LayoutDifference, match=r"all_gather: layers\.0\.second\.weight sits at byte 56, exp"
    ) as raised:
        assert_parity(training(), gt_world, payload_order="execution")
    equal = "all bits are equal on this rank: only the layout shows it"
    assert str(raised.value).endswith(equal) or "\nand therefore bits are different: " in str(
        raised.value
    )
    assert set(texts_of_ranks(str(str(raised.value).endswith(equal)))) == {"True", "False"}
    with pytest.raises(LayoutDifference, match=equal):
        assert_parity(training(8), gt_world, payload_order="execution")


@pytest.mark.second_tier
@FOUR
def test_a_difference_on_one_rank_fails_there_and_holds_nobody_up(training, gt_world):
    """The others know of it, and make no control, which would wait for the one that has failed."""

    def step(model, x):
        with torch.no_grad():
            model.count.add_(2 if gt_world.rank == 1 and get_proxy_mode() is None else 1)
        return model(x)

    def model():
        built = Model(4)
        built.register_buffer("count", torch.zeros(()))
        return built

    if gt_world.rank == 1:
        with pytest.raises(BitwiseDifference, match=r"first at step 0, rank 1, buffer of count"):
            assert_parity(training(model=model, step=step), gt_world)
    else:
        assert assert_parity(training(model=model, step=step), gt_world).control is None
    torch.distributed.barrier()


@FOUR
def test_an_optimiser_that_holds_some_parameters(training, gt_world):
    """Gradients of the others are those of one step, too, though it does not clear them."""

    def some(parameters):
        return torch.optim.SGD(parameters[:1], lr=0.1)

    assert_parity(training(optimizer=some, steps=2), gt_world)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_runs_from_other_weights_are_told_before_their_first_bit(training, gt_world):
    """The loss differs first, and is not the cause; from one seed nothing is said."""
    torch.manual_seed(0)
    config = training()
    eager, other = (
        train_eager(config),
        train_graph(config),
    )  # the first has drawn its weights from the generator
    with pytest.raises(BitwiseDifference) as raised:
        assert_bitwise_equal(other, eager, what="graph against eager")
    words = "the two runs start from different weights, on rank {}: seed both sides alike"
    assert str(raised.value).splitlines()[:2] == [
        "graph against eager",
        words.format(gt_world.rank),
    ]
    torch.manual_seed(0)
    assert_bitwise_equal(train_graph(config), eager)


@pytest.mark.second_tier
@FOUR
def test_a_pipeline_of_ones_own(training, gt_world):
    """A pipeline without buckets has not FSDP2's layout; the default pipeline passes."""
    with pytest.raises(LayoutDifference):
        assert_parity(training(), gt_world, passes=[])
    passes = construct_default_graph_passes(bucket_plan=PLAN)
    assert "different" in seen_by_all(assert_parity(training(), gt_world, passes=passes))
    with pytest.raises(VacuousCheck):
        assert_parity(training(8), gt_world, passes=passes)


@pytest.mark.gt_world("fake", size=4)
def test_passes_of_ones_own_are_all_that_run(training):
    seen = []

    def look(gm, example_inputs=None):
        seen.append([node for node in gm.graph.nodes if "fsdp_bucket" in node.meta])
        return gm

    GraphRun(training(), passes=[bind_options(look)])
    assert seen == [[]]
    GraphRun(
        training(), passes=[*construct_default_graph_passes(bucket_plan=PLAN), bind_options(look)]
    )
    assert len(seen) == 2
    assert seen[1]


def seen_by_all(parity):
    return texts_of_ranks(parity.control.outcome)


BF16 = MixedPrecisionPolicy(torch.bfloat16)


@pytest.mark.second_tier
@FOUR
def test_gradients_are_reduced_in_the_dtype_of_parameters_unless_told(training, gt_world):
    """A12: on both sides; the twin reduces in fp32."""

    def step(model, x):
        return model(x.bfloat16()).float()

    torch.manual_seed(0)
    parity = assert_parity(
        training(mp_policy=BF16, step=step), gt_world, invisible="report"
    )  # fp32 sums may be exact
    default = default_reduce_dtype(
        torch.bfloat16, torch.float32
    )  # torch 2.15 follows the parameter's own
    assert {payload.dtype for payload in parity.layout.of("reduce_scatter")} == {default}
    torch.manual_seed(0)
    unlike = torch.float32 if default is torch.bfloat16 else torch.bfloat16
    other = train_graph(training(mp_policy=MixedPrecisionPolicy(torch.bfloat16, unlike), step=step))
    assert_bitwise_different(other.select(phase="gradient"), parity.graph.select(phase="gradient"))
    assert_bitwise_equal(other.select(phase="loss"), parity.graph.select(phase="loss"))


class Residual(Block):
    """Keeps its input in fp32, and computes in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32
        return x + super().forward(x.bfloat16()).float()


@pytest.mark.second_tier
@FOUR
def test_inputs_are_not_cast_where_a_module_begins(training, gt_world):
    """A12: FSDP2 would by default (``cast_forward_inputs``), a graph has no such place.

    The twin does it by hand.
    """

    def model():
        built = Model(4)
        built.layers = nn.ModuleList(Residual(4) for _ in range(3))
        return built

    torch.manual_seed(0)
    parity = assert_parity(training(mp_policy=BF16, model=model), gt_world, invisible="report")
    torch.manual_seed(0)
    rounded = train_graph(
        training(mp_policy=BF16, model=model, step=lambda model, x: model(x.bfloat16().float()))
    )
    assert_bitwise_different(rounded.select(phase="loss"), parity.graph.select(phase="loss"))


class ReadBefore(Block):
    """Its scale is read where no gradients are kept, and used where they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.scale
        return self.second(self.first(x).sin()) * scale.mean()


@pytest.mark.second_tier
@FOUR
def test_a_parameter_read_under_no_grad_has_its_gradient(training, gt_world):
    """A10: as a plain parameter, and as FSDP2's; it had none."""

    def model():
        built = Model(4)
        built.layers = nn.ModuleList(ReadBefore(4) for _ in range(3))
        return built

    parity = assert_parity(training(model=model), gt_world)
    assert "layers.0.scale" in {key.name for key in parity.graph if key.phase == "gradient"}


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=3)
def test_ddp_against_buckets_of_its_own_making(training, gt_world):
    """D10: a ring adds an element in an order that depends on its place in the bucket.

    A third is rounded first.
    """
    config = training(replicate=True)
    assert "different" in seen_by_all(assert_parity(config, gt_world))


class TwoExperts(nn.Module):
    """The second has work in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).sum() + (self.other(x).sum() if x[0, 0] == 0 else 0)


@pytest.mark.gt_world("ranks", size=2)
def test_a_parameter_without_a_gradient_in_a_step_has_none_in_its_record(training):
    """Nor zeros, by which an optimizer would decay it."""
    plan = {"model": TwoExperts, "bucket_plan": ["one", "other"], "steps": 2}
    config = training(**plan, batch=lambda step, _: (torch.full((1, 2), float(step)),))
    graded = {(key.step, key.name) for key in train_eager(config) if key.phase == "gradient"}
    assert graded == {(0, "one.weight"), (0, "other.weight"), (1, "one.weight")}


@pytest.mark.gt_world("ranks", size=4, mesh={"other": 2, "dp": 2})
def test_ddp_has_the_ranks_of_its_mesh(training, gt_mesh):
    """It gives all of them the state of the first; beside them another model may be trained."""

    def model():
        return nn.Linear(2, 2).apply(lambda net: nn.init.constant_(net.weight, dist.get_rank()))

    run = EagerRun(training(model=model, mesh=gt_mesh["dp"], bucket_plan=[], replicate=True))
    assert run.model.weight.unique().tolist() == [dist.get_rank() // 2 * 2]


def idle_in(found):
    """Return what the summary says of clipping."""
    idle = [fact["what"] for fact in facts.of_kind(found, "idle")]
    return [what for what in idle if what.startswith("max_norm")]


IDLE = "max_norm=1000 has changed no gradient: a smaller one tests it"


@FOUR
def test_clipping_that_clips_nothing_is_said(training, gt_world):
    for max_norm in (1e3, 1e-3, float("inf"), None):
        with facts.collecting() as found:
            assert_parity(training(max_norm=max_norm), gt_world)
        assert idle_in(found) == [IDLE] * (max_norm == 1e3)


@pytest.mark.parametrize(
    ("before", "clipped", "says"),
    [
        ([2.0, 0.0], [2.0, 0.0], True),
        ([2.0, 0.0], [1.0, 0.0], False),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([], [], False),
    ],
)
def test_a_rank_without_gradients_knows_of_no_clipping(before, clipped, says):
    record = Record()
    for phase, values in (("gradient", before), ("clipped", clipped)):
        record.add(0, 0, phase, "weight", torch.tensor(values))
        record.add(0, 0, phase, "bias", torch.zeros(1))
    with facts.collecting() as found:
        _note_idle_clipping(SimpleNamespace(max_norm=1e3), record)
    assert bool(idle_in(found)) is says


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), nn.Linear(8, 4))


@pytest.mark.second_tier("reduced in bf16")
@pytest.mark.gt_world("simulated", size=4, nodes=2)
@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({"replicate": True}, set()),
        ({"max_norm": 1e-2}, {"clipped"}),
        ({"max_norm": 1e3}, {"clipped"}),
        ({"replicate": True, "max_norm": 1e-2}, {"clipped"}),
        ({"model": dropping}, set()),  # other elements in the second step
        (
            {"mp_policy": MixedPrecisionPolicy(None, torch.bfloat16)},
            set(),
        ),  # its layout has their width
        ({"accumulate": 3, "max_norm": 1e-2}, {"clipped"}),
    ],
    ids=[
        "ddp",
        "clipped",
        "not clipped",
        "ddp, clipped",
        "dropout",
        "reduced in bf16",
        "accumulated",
    ],
)
def test_two_steps_in_a_simulated_world(gt_world, changes, phases):
    """D10: under DDP the control is DDP with torch's buckets, trained for one step.

    Clipping is recorded.
    """

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def config(mesh):
        fields = {
            "model": model,
            "step": lambda model, x: model(x).square().mean(),
            "batch": lambda step, rank: (
                torch.randn(5, 8, generator=torch.Generator().manual_seed(9 * step + rank)),
            ),
            "bucket_plan": ["0", "1"],
            "mesh": mesh,
            "steps": 2,
        }
        return TrainConfig(**{**fields, **changes})

    with facts.collecting() as found:
        parity = assert_parity(config, gt_world)
    assert idle_in(found) == [IDLE] * (changes.get("max_norm") == 1e3)
    assert {key.step for key in parity.graph} == {0, 1}
    assert {key.phase for key in parity.eager} == {
        "loss",
        "gradient",
        "weight",
        "optimizer",
    } | phases
    assert parity.control.outcome == "different"


@pytest.mark.gt_world("ranks", size=1)
def test_one_rank_adds_nothing(training, gt_world):
    with pytest.raises(
        ValueError, match=r"a world of 1 rank adds nothing, so no order can show: take gt_world"
    ):
        assert_parity(training(), gt_world)


@FOUR
def test_a_word_that_is_no_choice(training, gt_world):
    with pytest.raises(ValueError, match="invisible='hide'"):
        assert_parity(training(), gt_world, invisible="hide")
