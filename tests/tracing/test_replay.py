"""Running the traced step on the live model."""

import copy

import pytest
import torch
from torch import nn

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    trace_step,
)
from pytest_gtrainer.numerics.operators import OperatorCapture
from pytest_gtrainer.tracing.step import _describe
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import make_spec


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_replay_equals_eager_and_adds_to_gradients(net, inputs, train_step):
    """A9: a second replay adds to what is there, as a second backward does."""
    traced, eager = trace_step(net, train_step, inputs), copy.deepcopy(net)
    for _ in range(2):
        loss = traced.replay(net, *inputs)
        expected = train_step(eager, *inputs)
        expected.backward()
    assert torch.equal(loss, expected.detach())
    assert_bitwise_equal(gradients(net), gradients(eager))
    assert torch.equal(net.seen, eager.seen)


def test_replay_on_other_inputs_differs(net, inputs, train_step):
    """The twin: the graph computes from its inputs, nothing is baked in."""
    traced, other = trace_step(net, train_step, inputs), copy.deepcopy(net)
    traced.replay(net, *inputs)
    traced.replay(other, inputs[0] + 1, inputs[1])
    assert_bitwise_different(gradients(net), gradients(other))


def test_results_are_all_that_a_step_computes_and_leave_gradients_alone(net, inputs, train_step):
    """A broken backward has the loss of the right one: a comparison of replays does not see it, one
    of results does.
    """
    traced, eager = trace_step(net, train_step, inputs), copy.deepcopy(net)
    results = traced.results(net, *inputs)
    assert not gradients(net)
    train_step(eager, *inputs).backward()
    assert_bitwise_equal(
        {
            name.removeprefix("gradient of "): value
            for name, value in results.items()
            if name.startswith("gradient of ")
        },
        gradients(eager),
    )
    broken = copy.deepcopy(traced.gm)
    output = broken.graph.output_node()
    loss, first, *others = output.args[0]
    with broken.graph.inserting_before(output):
        output.args = (
            (loss, broken.graph.call_function(torch.ops.aten.neg.default, (first,)), *others),
        )
    broken.recompile()
    wrong = traced.with_graph(broken)
    assert_bitwise_equal(
        wrong.replay(copy.deepcopy(net), *inputs), traced.replay(copy.deepcopy(net), *inputs)
    )
    with pytest.raises(AssertionError, match=f"first at gradient of {traced.trainable_fqns[0]}"):
        assert_bitwise_equal(
            wrong.results(copy.deepcopy(net), *inputs), traced.results(copy.deepcopy(net), *inputs)
        )


def test_gradients_are_in_the_order_in_which_the_backward_makes_them(net, inputs, train_step):
    """A mistake in the head is reported at the head, and not at the first parameter."""
    traced = trace_step(net, train_step, inputs)
    names = list(traced.results(net, *inputs))
    assert (names[0], names.pop()) == ("loss", "seen afterwards")
    made = [name.removeprefix("gradient of ").partition(".")[0] for name in names[1:]]
    assert (made[0], made[-1]) == ("head", "layers")
    assert traced.trainable_fqns[0].startswith("layers")
    assert sorted(names[1:]) == sorted(f"gradient of {fqn}" for fqn in traced.trainable_fqns)


def test_replay_builds_no_autograd_graph(net, inputs, train_step):
    """A8."""
    traced = trace_step(net, train_step, inputs)
    assert not traced.replay(net, *inputs).requires_grad
    assert not any(gradient.requires_grad for gradient in gradients(net).values())


def test_a_model_with_other_names_is_refused(net, inputs, train_step):
    """A8: says what is missing and what is new."""
    traced = trace_step(net, train_step, inputs)
    net.tail = net.head
    del net.head
    with pytest.raises(
        ValueError, match=r"missing \['head.weight'\], unexpected \['tail.weight'\]"
    ):
        traced.replay(net, *inputs)


def test_a_model_with_its_names_in_another_order_is_refused(net, inputs, train_step):
    """A8: its gradients would go to the wrong parameters where shapes agree."""
    traced = trace_step(net, train_step, inputs)
    layers = net.layers
    del net.layers
    net.layers = layers
    with pytest.raises(
        ValueError, match="the model is not the traced one: its state is in another order"
    ):
        traced.replay(net, *inputs)


def test_scalars_shapes_dtypes_and_requires_grad_are_those_of_the_trace(net, inputs, train_step):
    """Values that the graph has baked in are checked, and the message names them."""
    x, y = inputs
    traced = trace_step(net, lambda m, x, y, scale: scale * train_step(m, x, y), (x, y, 2.0))
    with pytest.raises(
        ValueError, match=r"input 2 is 3.0, the step was traced with 2.0: trace again"
    ):
        traced.replay(net, x, y, 3.0)
    with pytest.raises(
        ValueError, match=r"(?s)inputs are structured as .*: unpack the tuple, \(model, \*inputs\)"
    ):
        traced.results(net, (x, y, 2.0))
    with pytest.raises(
        ValueError, match=r"input 0 is float32\[5, 8\], the step was traced with float32\[6, 8\]"
    ):
        traced.replay(net, x[:5], y[:5], 2.0)
    net.head.weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"requires_grad has changed since the trace: head\.weight"
    ):
        traced.replay(net, x, y, 2.0)
    net.head.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"layers.0.scale is float64\[8\], the step was traced with float32\[8\]"
    ):
        traced.replay(net.double(), x, y, 2.0)


def test_a_gradient_has_memory_and_strides_of_its_own(inputs):
    """A9: two parameters with one gradient do not share it, and a transposed parameter's is
    transposed.
    """
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3, 4).t())
    model.c = nn.Parameter(torch.zeros(4, 3))
    traced = trace_step(model, lambda m, x: ((m.a + m.b + m.c) * x).sum(), (torch.ones(4, 3),))
    traced.replay(model, torch.ones(4, 3))
    memory = {parameter.grad.data_ptr() for parameter in model.parameters()}
    assert len(memory) == 3, "gradients share memory: what is added to one is added to another"
    assert model.a.grad.stride() == (3, 1)
    assert model.b.grad.stride() == (1, 4)


def test_an_existing_gradient_is_added_to_in_place(net, inputs, train_step):
    """A9: as autograd does; a hook or a bucket view of it stays valid."""
    traced = trace_step(net, train_step, inputs)
    traced.replay(net, *inputs)
    first = net.head.weight.grad
    once = first.clone()
    traced.replay(net, *inputs)
    assert net.head.weight.grad is first
    assert torch.equal(first, once + once)


@pytest.mark.parametrize(
    "names", [("unused", "weight", "bias"), ("weight", "unused", "bias")], ids=" ".join
)
def test_an_unused_parameter_keeps_no_gradient_and_those_behind_it_have_theirs(inputs, names):
    """A9: None is skipped, wherever it stands."""
    shapes = {"unused": (3,), "weight": (4, 8), "bias": (4,)}
    model = nn.ParameterDict({name: torch.ones(shapes[name]) for name in names})

    def step(m, x, y):
        return nn.functional.mse_loss(nn.functional.linear(x, m["weight"], m["bias"]), y)

    eager = copy.deepcopy(model)
    step(eager, *inputs).backward()
    trace_step(model, step, inputs).replay(model, *inputs)
    assert model["unused"].grad is None
    assert gradients(model).keys() == {"weight", "bias"}
    assert_bitwise_equal(gradients(model), gradients(eager))


def test_a_graph_of_another_rank_is_refused(net, inputs, train_step):
    """D15: pads and group names are baked in, also where the shards of two ranks have one shape."""
    traced = {}
    for rank in (0, 3):
        with fake_world(make_spec("fake", size=4, rank=rank)) as world:
            model = data_parallel(copy.deepcopy(net), make_mesh(world))
            traced[rank] = trace_step(model, train_step, inputs)
            if rank == 3:
                with pytest.raises(
                    ValueError, match=r"traced as rank 0 and this is rank 3: .*trace on every rank"
                ):
                    traced[0].replay(model, *inputs)
    assert trace_step(net, train_step, inputs).rank is None


@pytest.mark.gt_world("fake", size=4)
@pytest.mark.parametrize("run", ["replay", "results"])
def test_numbers_of_a_fake_world_are_refused(net, inputs, train_step, gt_mesh, run):
    """A sum in the place of an average gave equal bits there. A model that is whole has no
    collective.
    """
    getattr(trace_step(net, train_step, inputs), run)(net, *inputs)
    sharded = data_parallel(copy.deepcopy(net), gt_mesh)
    with pytest.raises(
        ValueError, match=r'the traced step has all_gather.* fake world moves no data, .*"ranks"'
    ):
        getattr(trace_step(sharded, train_step, inputs), run)(sharded, *inputs)
    traced, noted = trace_step(sharded, train_step, inputs), OperatorCapture()
    with pytest.raises(ValueError, match="the traced step has all_gather"):
        getattr(traced.with_graph(noted.watch(traced.gm)), run)(sharded, *inputs)
    with pytest.raises(
        ValueError,
        match="the traced step has no graph to look into, and a fake world moves no data",
    ):
        getattr(traced.with_graph(lambda *flat: flat), run)(sharded, *inputs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_results_of_a_step_that_raises_leave_its_buffer_alone(net, inputs, train_step, error):
    """V5: the step writes to the buffer first, then a node raises."""
    traced = trace_step(net, train_step, inputs)

    def fail(value):
        raise error("at last")

    output = traced.gm.graph.output_node()
    with traced.gm.graph.inserting_before(output):
        traced.gm.graph.call_function(fail, (output.args[0][0],))
    traced.gm.recompile()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(error, match="at last"):
        traced.results(net, *inputs)
    assert_bitwise_equal(dict(net.state_dict()), before)
    assert torch.get_rng_state().equal(random_state)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.empty(2, 3), "float32[2, 3]"),
        (torch.empty(2, 3, dtype=torch.int8), "int8[2, 3]"),
        (torch.empty(3, 2).t(), "float32[2, 3] with strides [1, 2]"),
        (torch.empty(2, 3, device="meta"), "float32[2, 3] on meta"),
        (torch.empty(3, 2, device="meta").t(), "float32[2, 3] with strides [1, 2] on meta"),
        (torch.eye(2).to_sparse(), "float32[2, 2] of layout torch.sparse_coo"),
        (3, "3"),
        ("a", "'a'"),
    ],
    ids=["plain", "dtype", "strides", "device", "strides there", "sparse", "number", "text"],
)
def test_what_a_graph_bakes_in_of_an_input(value, words):
    """Another dtype, shape, device or order in memory is another input."""
    assert _describe(value) == words
