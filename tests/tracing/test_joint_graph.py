"""The traced joint graph: inputs, outputs and the metadata that passes read."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from pytest_gtrainer import trace_step
from pytest_gtrainer.graph.nodes import node_fqn


def nodes_of(traced):
    return [node for node in traced.gm.graph.nodes if node.op == "call_function"]


def test_outputs_are_the_loss_and_the_gradients_of_trainable_parameters_in_order(
    net, inputs, train_step
):
    """A1: compared with .backward() bit for bit, so that a swapped pair would show."""
    traced = trace_step(net, train_step, inputs)
    loss, *gradients = traced.gm(*[*net.parameters(), *net.buffers(), *inputs])
    reference = copy.deepcopy(net)
    expected = train_step(reference, *inputs)
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    assert "layers.0.w.bias" not in wanted
    assert traced.trainable_fqns == tuple(wanted)
    assert torch.equal(loss, expected.detach())
    torch.testing.assert_close(dict(zip(wanted, gradients, strict=True)), wanted, rtol=0, atol=0)


def test_every_module_stamps_its_own_fqn_and_the_code_around_the_model_is_the_loss(
    net, inputs, train_step
):
    """A2: two instances of one class differ, a parameterless module has a name, the root
    has none.
    """
    traced = trace_step(net, train_step, inputs)
    forward = [node for node in nodes_of(traced) if not node.meta.get("autograd_backward")]
    by_fqn = {node_fqn(node) for node in forward}
    assert {
        "layers.0",
        "layers.1",
        "layers.0.w",
        "layers.1.w",
        "layers.1.act",
        "head",
        "loss",
    } <= by_fqn
    (counter,) = [node for node in forward if node.target is torch.ops.aten.add_.Tensor]
    assert node_fqn(counter) == ""


def test_the_name_of_a_module_ends_with_its_call(inputs, train_step):
    """A2: also where the call raises; and autograd's addition of two gradients is of no module
    (A4).
    """

    class Failing(nn.Module):
        def forward(self, x):
            raise NotImplementedError

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast, self.slow = Failing(), nn.Linear(8, 4)

        def forward(self, x):
            try:
                return self.fast(x)
            except NotImplementedError:
                h = x.exp() * self.slow.bias.sum()
                return self.slow(h + h.sin())

    nodes = nodes_of(trace_step(nn.Sequential(Trying()), train_step, inputs))
    named = {
        str(node.target).split(".")[1]: node_fqn(node)
        for node in nodes
        if not node.meta.get("autograd_backward")
    }
    assert named["exp"] == "0", "what follows a call that has raised"
    gradient_sums = [node for node in nodes if node.meta.get("is_gradient_acc")]
    assert [node_fqn(node) for node in gradient_sums] == [""] * len(gradient_sums) != [], (
        "additions of gradients"
    )


def test_only_nodes_of_the_backward_are_marked(net, inputs, train_step):
    """A3: forward operators come before the first mark, and every node after it is marked."""
    nodes = nodes_of(trace_step(net, train_step, inputs))
    marked = [node for node in nodes if node.meta.get("autograd_backward")]
    assert 0 < len(marked) < len(nodes)
    assert nodes[-len(marked) :] == marked


def test_a_backward_node_has_its_own_copy_of_the_forward_annotation(net, inputs, train_step):
    """A4: the gradient of layers.1's weight belongs to layers.1.w; editing it leaves the forward
    alone.
    """
    traced = trace_step(net, train_step, inputs)
    backward = [node for node in nodes_of(traced) if node.meta.get("autograd_backward")]
    assert {"layers.0.w", "layers.1.w", "head", "loss"} <= {node_fqn(node) for node in backward}
    products = {node_fqn(node) for node in backward if node.target is torch.ops.aten.mul.Tensor}
    assert products == {"layers.0", "layers.1"}, (
        "not that of a forward node without a gradient, which came next"
    )
    customs = [id(node.meta["custom"]) for node in nodes_of(traced) if "custom" in node.meta]
    assert len(customs) == len(set(customs))


def test_what_a_users_hook_computes_belongs_to_the_module_that_it_hooks(inputs, train_step):
    """A4: on its inputs and on its output; in eager code the hook is the module's, too."""
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    net[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    net[1].register_forward_hook(lambda module, args, output: output.cos())
    nodes = nodes_of(trace_step(net, train_step, inputs))
    of_hooks = {
        str(node.target): node_fqn(node) for node in nodes if not node.meta.get("autograd_backward")
    }
    assert (of_hooks["aten.sin.default"], of_hooks["aten.cos.default"]) == ("1", "1")


def test_behind_a_module_that_failed_and_was_caught_nodes_belong_to_its_parent(inputs, train_step):
    """A4: who tries a fast path and falls back to another."""

    class Fast(nn.Module):
        def forward(self, x):
            raise NotImplementedError

    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast = Fast()

        def forward(self, x):
            try:
                return self.fast(x)
            except NotImplementedError:
                return x.sin()

    nodes = nodes_of(trace_step(nn.Sequential(nn.Linear(8, 4), Trying()), train_step, inputs))
    assert [node_fqn(node) for node in nodes if node.target is torch.ops.aten.sin.default] == ["1"]


def test_nodes_of_nested_graphs_have_names_and_directions_too(inputs, train_step):
    """A3, A4: a ``cond`` runs graphs; those of its backward are differentiated apart and have no
    forward node.
    """

    class Branching(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    traced = trace_step(nn.Sequential(nn.Linear(8, 4), Branching()), train_step, inputs)
    nested = [
        module
        for name, module in traced.gm.named_modules()
        if name and isinstance(module, fx.GraphModule)
    ]
    nodes = [node for gm in nested for node in gm.graph.nodes if node.op == "call_function"]
    assert {node_fqn(node) for node in nodes} == {"1"}
    forward = [node for node in nodes if not node.meta.get("autograd_backward")]
    assert [node.target for node in forward] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.cos.default,
    ]
    assert torch.ops.aten.mul.Tensor in {
        node.target for node in nodes if node.meta.get("autograd_backward")
    }
    assert len({id(node.meta["custom"]) for node in nodes}) == len(nodes)


def test_inputs_are_parameters_buffers_then_user_inputs(net, inputs, train_step):
    """A5, without DTensors."""
    traced = trace_step(net, train_step, inputs)
    names = [node.meta["gt_input"] for node in traced.gm.graph.nodes if node.op == "placeholder"]
    expected = [("parameter", name) for name, _ in net.named_parameters()]
    expected += [("buffer", "seen"), ("input", "0"), ("input", "1")]
    assert [(name["kind"], name["fqn"]) for name in names] == expected
    assert traced.state_fqns == (*dict(net.named_parameters()), "seen")
    assert traced.num_static_inputs == len(traced.state_fqns)


def test_the_output_says_what_it_returns_and_in_which_order_fsdp2_manages_parameters(
    net, inputs, train_step
):
    """A1, D2: children before a module's own; and whether a parameter that is read again was
    gathered again.
    """
    for once in (True, False):
        meta = trace_step(net, train_step, inputs, reuse_gathers=once).gm.graph.output_node().meta
        assert meta["gt_outputs"] == (
            "loss",
            *(name for name, p in net.named_parameters() if p.requires_grad),
        )
        block = ("w.weight", "w.bias", "scale")
        assert meta["gt_managed_order"] == (
            *(f"layers.{i}.{name}" for i in (0, 1) for name in block),
            "head.weight",
        )
        assert meta["gt_gathers_once"] is once


def test_a_nested_pytree_of_inputs_is_flattened(net, inputs):
    x, y = inputs
    traced = trace_step(
        net, lambda m, batch: nn.functional.mse_loss(m(batch["x"]), batch["y"]), ({"x": x, "y": y},)
    )
    assert traced.replay(net, {"x": x, "y": y}).ndim == 0
    with pytest.raises(ValueError, match="structured as"):
        traced.replay(net, x, y)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("a word", r"inputs\[1\] is a str"),
        (nn.ReLU(), r"inputs\[1\] is a module \(ReLU\)"),
        ({1, 2}, "is a set"),
    ],
)
def test_an_input_that_is_no_tensor_or_scalar_is_refused_by_name(
    net, inputs, train_step, bad, words
):
    """A6."""
    with pytest.raises(TypeError, match=words):
        trace_step(net, train_step, (inputs[0], bad))


def test_a_tensor_is_no_sequence_of_inputs(net, inputs, train_step):
    """A6: its rows would be taken for inputs."""
    with pytest.raises(
        TypeError, match=r"inputs is a tensor: give a sequence of .* inputs, \(tensor,\) for one"
    ):
        trace_step(net, train_step, inputs[0])


def test_a_loss_that_is_no_scalar_and_a_model_without_gradients_are_refused(net, inputs):
    with pytest.raises(ValueError, match=r"scalar loss, it returned \(6, 4\)"):
        trace_step(net, lambda m, x, y: m(x), inputs)
    with pytest.raises(
        ValueError, match="the loss does not depend on a parameter that requires a gradient"
    ):
        trace_step(net, lambda m, x, y: m(x).sum().detach(), inputs)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        trace_step(net, lambda m, x, y: m(x).sum(), inputs)


@pytest.mark.gt_world("fake", size=2, mesh={"tp": 2})
def test_a_loss_that_ranks_have_not_reduced_is_refused(gt_mesh):
    """Each rank would get its own term. The twin returns the sum."""
    model = parallelize_module(
        nn.Linear(2, 4, bias=False), gt_mesh, ColwiseParallel(use_local_output=False)
    )
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"not reduced, a DTensor of .*: return loss.full_tensor"):
        trace_step(model, lambda m, x: m(x).sum(), (x,))
    trace_step(model, lambda m, x: m(x).sum().full_tensor(), (x,))


def test_a_forward_that_replaces_a_buffer_is_refused_by_name(net, inputs, train_step):
    """A graph updates buffers in place only; dropping the update silently would be worse."""

    def replacing(model, x, y):
        model.seen = model.seen + 1
        return train_step(model, x, y)

    net.layers[0].register_buffer("count", net.seen)  # a second holder, which keeps it
    with pytest.raises(
        ValueError, match=r"the forward replaces seen by another tensor.*in place \(copy_, add_\)"
    ):
        trace_step(net, replacing, inputs)
    assert net.seen.item() == 0


def test_tracing_leaves_threads_and_the_model_as_they_were(net, inputs, train_step):
    """A7: autograd's threads are off while tracing, and back as they were; no hook, gradient or
    value stays.
    """
    during = []

    def watching(model, x, y):
        during.append(torch.autograd.is_multithreading_enabled())
        return train_step(model, x, y)

    before = {name: value.clone() for name, value in net.state_dict().items()}
    trace_step(net, watching, inputs)
    assert during == [False]
    assert torch.autograd.is_multithreading_enabled()
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert not [
        name
        for name, module in net.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is not None]


def test_a_failing_step_leaves_the_model_usable(net, inputs, train_step):
    def failing(model, x, y):
        model(x)
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        trace_step(net, failing, inputs)
    assert isinstance(trace_step(net, train_step, inputs).gm, fx.GraphModule)


def test_meta_tensors_are_traced_for_the_cpu(inputs, train_step):
    with torch.device("meta"):
        model = nn.Linear(8, 4)
        model.weight = nn.Parameter(torch.empty(8, 4).t())
    traced = trace_step(model, train_step, tuple(t.to("meta") for t in inputs))
    assert {t.device.type for t in traced.example_inputs} == {"cpu"}
    assert traced.example_inputs[0].stride() == (1, 4), "strides of a transposed parameter"


@pytest.mark.parametrize("mode", ["detect_anomaly", "set_detect_anomaly"])
@pytest.mark.parametrize("check_nan", [True, False])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_step_is_traced_in_anomaly_mode(mode, check_nan):
    """The graph has no check of NaN, and the mode stays as it was."""

    def nodes():
        model = nn.Linear(4, 4)
        step = trace_step(model, lambda model, x: model(x).square().mean(), (torch.ones(2, 4),))
        return [str(node.target) for node in step.gm.graph.nodes]

    plain = nodes()
    arguments = {"check_nan": check_nan} | ({"mode": True} if mode == "set_detect_anomaly" else {})
    with getattr(torch.autograd, mode)(**arguments):
        assert nodes() == plain
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled() == check_nan
    assert not torch.is_anomaly_enabled()
