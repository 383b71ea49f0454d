"""A trace refuses what its graph would lose: wrapped modules, hooks, gradients in the step."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import (
    assert_bitwise_different,
    assert_bitwise_equal,
    data_parallel,
    trace_stage,
    trace_step,
)

FAKE = pytest.mark.gt_world("fake", size=4)


def trace_as_stage(model, step, inputs):
    return trace_stage(model, inputs, step=step)


TRACERS = pytest.mark.parametrize("trace", [trace_step, trace_as_stage], ids=["step", "stage"])


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_container(model, wrap):
    """A module inside two containers is wrapped."""
    model.head = nn.Sequential(nn.ModuleDict({"inner": wrap(model.head)})["inner"])
    return model


def with_compiled_call(module):
    module.compile(backend="eager")
    return module


def with_compiled_forward(module):
    module.forward = torch.compile(module.forward, backend="eager")
    return module


REPLICATED = (
    r'wrapped by {}.* data_parallel\(.*, mode="replicate"\), .*TrainConfig\(replicate=True\)'
)
SHARDED = r"wrapped by fully_shard.* Give the plain model to data_parallel\(model, mesh\)"
COMPILED = "wrapped by torch.compile.* as it was before torch.compile"
WRAPPERS = {
    "DDP": (DistributedDataParallel, REPLICATED.format("DistributedDataParallel")),
    "replicate": (replicate, REPLICATED.format("replicate")),
    "replicate of FSDP2": (
        lambda module: replicate_with_fsdp(module),
        REPLICATED.format("replicate"),
    ),
    "DataParallel": (nn.DataParallel, REPLICATED.format("DataParallel")),
    "fully_shard": (fully_shard, SHARDED),
    "torch.compile": (lambda module: torch.compile(module, backend="eager"), COMPILED),
    "module.compile": (with_compiled_call, COMPILED),
    "compiled forward": (with_compiled_forward, COMPILED),
    "torch.jit": (torch.jit.script, "wrapped by torch.jit.* Give the nn.Module"),
}


@FAKE
@pytest.mark.parametrize(("wrap", "words"), WRAPPERS.values(), ids=list(WRAPPERS))
def test_a_wrapped_model_is_refused_wherever_it_is(net, inputs, train_step, wrap, words, gt_mesh):
    """V5: as the model, inside containers, in a closure; each with what to give instead."""
    plain = nn.Linear(8, 4)
    wrapped = wrap(copy.deepcopy(plain))
    with pytest.raises(ValueError, match=f"the model .*{words}"):
        trace_step(wrapped, train_step, inputs)
    with pytest.raises(ValueError, match=f"the submodule head.0 .*{words}"):
        trace_step(in_container(net, wrap), train_step, inputs)
    # a compiled call runs before any hook of modules
    called = "the step calls compiled code at .*test_refusals.py:.* before torch.compile"
    with pytest.raises(ValueError, match=f"a module that the step calls .*{words}|{called}"):
        trace_step(
            plain, lambda model, x, y: train_step(model, x, y) + [wrapped][0](x).sum(), inputs
        )
    with pytest.raises(ValueError, match=f"the model .*{words}"):
        trace_stage(wrapped, [inputs[0]])


@FAKE
def test_the_module_inside_of_a_wrapper_is_traced(net, inputs, train_step, gt_mesh):
    """V5: the way out of the message: unwrapped, the graph is that of the plain model."""
    wrapped = DistributedDataParallel(copy.deepcopy(net))
    unwrapped, plain = (
        trace_step(model, train_step, inputs).gm.graph for model in (wrapped.module, net)
    )
    assert [node.target for node in unwrapped.nodes] == [node.target for node in plain.nodes]


def test_a_compiled_step_is_refused(net, inputs, train_step):
    """V5."""
    with pytest.raises(
        ValueError, match=r"the step is a function of torch.compile: give the function as it was"
    ):
        trace_step(net, torch.compile(train_step, backend="eager"), inputs)


def test_a_compiled_function_inside_the_step_is_refused(net, inputs, train_step):
    """V5: it is found only as it runs, so the message names the line."""
    compiled = torch.compile(train_step, backend="eager")
    with pytest.raises(
        ValueError, match=r"the step calls compiled code at .*test_refusals.py:\d+, .* before torch"
    ):
        trace_step(net, lambda *given: compiled(*given), inputs)


def accumulate(model, x, y):
    """Accumulate gradients, as a loop with microbatches does."""
    nn.functional.mse_loss(model(x[:3]), y[:3]).backward()
    return nn.functional.mse_loss(model(x[3:]), y[3:])


def accumulate_by_hand(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter, gradient in zip(
        trained, torch.autograd.grad(loss, trained, retain_graph=True), strict=True
    ):
        parameter.grad = gradient
    return loss


def clear(model, x, y):
    model.zero_grad()
    return nn.functional.mse_loss(model(x), y)


def clear_to_zeros(model, x, y):
    model.zero_grad(set_to_none=False)
    return nn.functional.mse_loss(model(x), y)


def clip(model, x, y):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return nn.functional.mse_loss(model(x), y)


def read(model, x, y):
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return nn.functional.mse_loss(model(x), y) + sum(norms)


def scale(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    torch.amp.GradScaler("cpu").scale(loss).backward(retain_graph=True)
    return loss


STEPS = [accumulate, accumulate_by_hand, clear, clear_to_zeros, clip, read, scale]


@TRACERS
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_uses_gradients_is_refused_and_leaves_them_alone(net, inputs, step, trace):
    """V5: a `.backward()` inside the step gave a graph without its gradients, and no error."""
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    before = {name: gradient.clone() for name, gradient in gradients(net).items()}
    with pytest.raises(ValueError, match=r"\.grad of .* return the sum of the losses"):
        trace(net, step, inputs)
    assert_bitwise_equal(gradients(net), before)


@FAKE
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
@pytest.mark.parametrize("reuse_gathers", [True, False])
def test_a_backward_inside_the_step_of_a_sharded_model_is_refused(
    net, inputs, gt_mesh, mode, reuse_gathers
):
    """V5: there gradients are DTensors."""
    model = data_parallel(net, gt_mesh, mode=mode)
    with pytest.raises(ValueError, match="return the sum of the losses"):
        trace_step(model, accumulate, inputs, reuse_gathers=reuse_gathers)
    assert not gradients(model)


def test_the_sum_of_the_losses_accumulates(net, inputs, train_step):
    """V5: the way out gives the gradients of a loop with microbatches; the twin lacks one."""
    x, y = inputs

    def total(model, x, y):
        return train_step(model, x[:3], y[:3]) + train_step(model, x[3:], y[3:])

    eager, short = copy.deepcopy(net), copy.deepcopy(net)
    trace_step(net, total, inputs).replay(net, x, y)
    for half in (
        slice(3, None),
        slice(None, 3),
    ):  # autograd adds the microbatch that it reaches last
        train_step(eager, x[half], y[half]).backward()
    assert_bitwise_equal(gradients(net), gradients(eager))
    trace_step(short, train_step, (x[3:], y[3:])).replay(short, x[3:], y[3:])
    assert_bitwise_different(gradients(net), gradients(short))


def test_gradients_that_the_loss_is_made_of_are_traced(net, inputs, train_step):
    """V5: `torch.autograd.grad` leaves `.grad` alone, so a gradient penalty is not refused."""

    def penalised(model, x, y):
        loss = train_step(model, x, y)
        trained = [p for p in model.parameters() if p.requires_grad]
        return loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, trained, create_graph=True)
        )

    eager = copy.deepcopy(net)
    trace_step(net, penalised, inputs).replay(net, *inputs)
    penalised(eager, *inputs).backward()
    assert_bitwise_equal(gradients(net), gradients(eager))


@TRACERS
@pytest.mark.parametrize("held", [True, False], ids=["outside", "made inside"])
def test_an_optimiser_inside_the_step_is_refused(net, inputs, train_step, trace, held):
    """V5: also one of the model's own parameters, which are not those of the trace."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def update(model, x, y):
        (optimizer if held else torch.optim.SGD(model.parameters(), lr=0.1)).step()
        return train_step(model, x, y)

    with pytest.raises(
        ValueError, match=r"the step calls SGD.step\(\).* Call the optimiser after the replay"
    ):
        trace(net, update, inputs)


def test_zero_grad_of_an_optimiser_inside_the_step_is_refused(net, inputs, train_step):
    """V5: it clears the model's own gradients, which a trace does not read; they stay."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.head.weight.grad = kept = torch.ones_like(net.head.weight)

    def update(model, x, y):
        optimizer.zero_grad()
        return train_step(model, x, y)

    with pytest.raises(ValueError, match=r"\.grad of layers.0.scale"):
        trace_step(net, update, inputs)
    assert net.head.weight.grad is kept
    assert len(gradients(net)) == 1


def test_a_tied_parameter_that_is_replaced_under_one_name_is_refused():
    """Whichever of its names it is: a graph has one tensor for both."""
    for place in (0, 1):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight

        def step(model, x, place=place):
            model[place].weight = nn.Parameter(model[place].weight * 2)
            return model(x).sum()

        with pytest.raises(ValueError, match=r"the forward replaces 0\.weight by another tensor"):
            trace_step(model, step, (torch.ones(2, 4),))
        assert model[1].weight is model[0].weight


def replace(model):
    model.head.weight = nn.Parameter(model.head.weight * 2)


def give_other_memory(model):
    model.head.weight.data = model.head.weight.data * 2


def freeze(model):
    model.head.weight.requires_grad_(False)


def register_buffer(model):
    model.head.register_buffer("cache", torch.zeros(1))


def register_two_buffers(model):
    for name in ("first", "second"):
        model.head.register_buffer(name, torch.zeros(1))


def register_parameter(model):
    model.head.register_parameter("bias", nn.Parameter(torch.zeros(4)))


CHANGES = {
    replace: "the forward replaces head.weight by another tensor",
    give_other_memory: r"the step gives head.weight other memory, another shape or other strides "
    r"\(.data =,",
    freeze: "the step changes requires_grad of head.weight",
    register_buffer: "the step registers head.cache",
    register_two_buffers: r"the step registers head\.first, head\.second, which a graph cannot",
    register_parameter: "the step registers head.bias",
}


@pytest.mark.parametrize(
    ("change", "words"), CHANGES.items(), ids=[change.__name__ for change in CHANGES]
)
def test_a_step_that_changes_what_the_model_holds_is_refused(
    net, inputs, train_step, change, words
):
    """V5: other memory for a parameter was lost without an error. The model stays as it was."""

    def changing(model, x, y):
        change(model)
        return train_step(model, x, y)

    before = copy.deepcopy(net)
    with pytest.raises(ValueError, match=words):
        trace_step(net, changing, inputs)
    assert_bitwise_equal(dict(net.state_dict()), dict(before.state_dict()))
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in before.parameters()
    ]
    trace_step(net, train_step, inputs)


HOOKS = pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])


@TRACERS
@HOOKS
def test_a_hook_on_a_parameter_is_refused_until_it_is_removed(
    net, inputs, train_step, trace, method
):
    """V5: a graph would not run it. Registered inside the step, it adds up in eager code."""

    def hook(tensor):
        return None

    handle = getattr(net.head.weight, method)(hook)
    with pytest.raises(ValueError, match=rf"the parameter head.weight has a hook of {method}\(\)"):
        trace(net, train_step, inputs)
    handle.remove()

    def hooking(model, x, y):
        getattr(model.head.weight, method)(hook)
        return train_step(model, x, y)

    with pytest.raises(
        ValueError, match=rf"inside the step the parameter head.weight has a hook of {method}\(\)"
    ):
        trace(net, hooking, inputs)
    trace(net, train_step, inputs)


@FAKE
@HOOKS
def test_a_hook_is_refused_where_parameters_are_sharded(net, gt_mesh, method):
    """V5: the shard is another parameter, without the hook."""
    getattr(net.head.weight, method)(lambda tensor: None)
    with pytest.raises(ValueError, match=rf"the parameter head.weight has a hook of {method}\(\)"):
        data_parallel(net, gt_mesh)


def test_a_hook_that_is_registered_before_the_replay_is_refused(net, inputs, train_step):
    """V5: a replay adds to `.grad` without autograd, so no hook runs."""
    traced = trace_step(net, train_step, inputs)
    net.head.weight.register_hook(lambda gradient: gradient * 2)
    for run in (traced.replay, traced.results):
        with pytest.raises(ValueError, match=r"the parameter head.weight has a hook"):
            run(net, *inputs)


@FAKE
def test_a_model_that_is_wrapped_before_the_replay_is_refused(net, inputs, train_step, gt_mesh):
    """V5: `replicate` keeps every name, and its all-reduces would not run."""
    traced = trace_step(net, train_step, inputs)
    with pytest.raises(ValueError, match="wrapped by replicate"):
        traced.replay(replicate(net), *inputs)


def hook_activation(net, hook):
    net.layers[0].register_forward_hook(
        lambda module, args, output: output.register_hook(hook) and None
    )


TRACED_HOOKS = {
    "on an activation": lambda net: hook_activation(net, lambda gradient: gradient * 3),
    "forward": lambda net: net.layers[0].register_forward_hook(
        lambda module, args, output: output * 3
    ),
    "forward pre": lambda net: net.layers[1].register_forward_pre_hook(
        lambda module, args: (args[0] * 3,)
    ),
    "full backward": lambda net: net.layers[1].register_full_backward_hook(
        lambda module, gi, go: (gi[0] * 3,)
    ),
    "full backward pre": lambda net: net.layers[0].register_full_backward_pre_hook(
        lambda module, go: (go[0] * 3,)
    ),
    "backward": lambda net: net.layers[1].act.register_backward_hook(
        lambda module, gi, go: (gi[0] * 3,)
    ),
}


@pytest.mark.parametrize("register", TRACED_HOOKS.values(), ids=list(TRACED_HOOKS))
def test_hooks_on_modules_and_activations_are_traced(net, inputs, train_step, register):
    """V5: the graph has what they do; without the hook gradients differ."""
    plain = copy.deepcopy(net)
    register(net)
    results = trace_step(net, train_step, inputs).results(net, *inputs)
    traced = {
        name.removeprefix("gradient of "): value
        for name, value in results.items()
        if name.startswith("gradient of ")
    }
    for model in (net, plain):
        train_step(model, *inputs).backward()
    assert_bitwise_equal(traced, gradients(net))
    assert_bitwise_different(traced, gradients(plain))


def double(module, inputs, output):
    return 2 * output


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def global_hook(register, hook):
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


AROUND_A_STEP = {
    "forward hook": lambda: global_hook(nn.modules.module.register_module_forward_hook, double),
    "forward pre-hook": lambda: global_hook(
        nn.modules.module.register_module_forward_pre_hook, lambda module, inputs: None
    ),
    "backward hook": lambda: global_hook(
        nn.modules.module.register_module_full_backward_hook, lambda module, gave, got: None
    ),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    ),
    "function mode": Doubling,
}


@pytest.mark.parametrize("around", AROUND_A_STEP.values(), ids=list(AROUND_A_STEP))
@pytest.mark.parametrize("at", ["trace", "replay"])
def test_what_stands_around_all_modules_is_the_same_at_the_replay(
    net, inputs, train_step, around, at
):
    """V5: eager code would run it, a graph does only if the trace did."""
    with around() if at == "trace" else contextlib.nullcontext():
        traced = trace_step(net, train_step, inputs)
        if at == "trace":
            traced.replay(net, *inputs)
    what = "(global module hooks|saved-tensor hooks|torch function modes) were .* at the trace"
    with (
        around() if at == "replay" else contextlib.nullcontext(),
        pytest.raises(ValueError, match=what),
    ):
        traced.replay(net, *inputs)


def test_an_input_that_autograd_computed_is_refused(net, inputs, train_step):
    """V5: its gradient would flow on into parameters. A stage gives it back instead."""
    hidden = net.layers[0](inputs[0])
    with pytest.raises(
        ValueError, match=r"inputs\[0\] is the result of MulBackward0.* give its detach\(\)"
    ):
        trace_step(net, train_step, (hidden, inputs[1]))
    trace_step(net, train_step, (hidden.detach(), inputs[1]))
    stage = trace_stage(net, [hidden])
    assert stage.differentiated == (0,)


@TRACERS
def test_an_input_with_a_hook_is_refused(net, inputs, train_step, trace):
    """V5."""
    x = inputs[0].clone().requires_grad_()
    x.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match=r"inputs\[0\] has a hook of register_hook\(\)"):
        trace(net, train_step, (x, inputs[1]))


SUBMODULES = {
    "": "the model was in {} mode at the trace and is in {} mode, and so are 8 more modules"
}
SUBMODULES["layers.1.act"] = "layers.1.act was in {} mode at the trace and is in {} mode: call {}"
SUBMODULES["layers.1"] = (
    "layers.1 was in {} mode at the trace and is in {} mode, and so are 2 more modules: call {}"
)


@pytest.mark.parametrize("fqn", SUBMODULES)
@pytest.mark.parametrize(
    "modes", [("train", "eval"), ("eval", "train")], ids=["train first", "eval first"]
)
@pytest.mark.parametrize("run", ["replay", "results"])
def test_a_replay_in_another_mode_is_refused(net, inputs, train_step, fqn, modes, run):
    """V5: a graph holds what one mode computes, of each submodule."""
    at_trace, at_replay = modes
    getattr(net, at_trace)()
    traced = trace_step(net, train_step, inputs)
    getattr(net.get_submodule(fqn), at_replay)()
    with pytest.raises(ValueError, match=SUBMODULES[fqn].format(at_trace, at_replay, at_trace)):
        getattr(traced, run)(net, *inputs)
    getattr(net.get_submodule(fqn), at_trace)()
    getattr(traced, run)(net, *inputs)


HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize(
    ("at_trace", "at_replay"), [(None, "bfloat16"), ("bfloat16", None), ("bfloat16", "float16")]
)
def test_a_replay_under_another_autocast_is_refused(net, inputs, train_step, at_trace, at_replay):
    """V5: a replay without the casts of its trace, or with others, is another computation."""

    def context(name):
        return torch.autocast("cpu", HALF.get(name, torch.bfloat16), enabled=name is not None)

    with context(at_trace):
        traced = trace_step(net, train_step, inputs)
    said = [
        f"under autocast\\('cpu', torch.{name}\\)" if name else "without autocast"
        for name in (at_trace, at_replay)
    ]
    with (
        context(at_replay),
        pytest.raises(ValueError, match=f"traced {said[0]} and is replayed {said[1]}"),
    ):
        traced.replay(net, *inputs)


@pytest.mark.parametrize("at_trace", [True, False])
def test_a_replay_under_autocast_that_keeps_other_casts_is_refused(
    net, inputs, train_step, at_trace
):
    """V5: eager code adds the gradients of a cast that is kept in its dtype."""

    def context(keeps_casts):
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps_casts)

    with context(at_trace):
        traced = trace_step(net, train_step, inputs)
        traced.replay(net, *inputs)
    said = [r"torch.bfloat16\)", r"torch.bfloat16, cache_enabled=False\)"]
    if not at_trace:
        said.reverse()
    words = rf"traced under .*{said[0]} and is replayed under .*{said[1]}"
    with context(not at_trace), pytest.raises(ValueError, match=words):
        traced.replay(net, *inputs)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(8, 6),
        lambda x: x.as_strided_((6, 8), (1, 6)),
    ],
    ids=["t_", "unsqueeze_", "resize_", "as_strided_"],
)
@pytest.mark.parametrize("last", [False, True])
def test_an_input_that_gets_another_shape_in_place_is_refused(net, inputs, change, last):
    """V5: the trace refuses it, and says how to write it. One that has its shape again is taken."""

    def step(model, x, y):
        change(y if last else x)
        return model(torch.ones(2, 8)).sum() + y.sum() + x.sum()

    given = [inputs[0].clone(), inputs[0].clone()]
    words = rf"the step changes input {int(last)} in place from float32\[6, 8\] to float32"
    with pytest.raises(ValueError, match=words):
        trace_step(net, step, given)

    def there_and_back(model, x, y):
        return model(x.t_().t_()).sum() + y.unsqueeze_(0).squeeze_(0).sum()

    trace_step(net, there_and_back, given).replay(net, *given)


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: nn.init.trunc_normal_(torch.empty(4)),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * bool(x[0, 0] == 1),
    ],
    ids=["trunc_normal_", "if", "bool"],
)
def test_a_decision_by_the_value_of_a_tensor_is_refused(net, inputs, train_step, decide):
    """V5: with the place in the step."""

    def step(model, x, y):
        decide(x)
        return train_step(model, x, y)

    words = r"the step decides in Python by the value of a tensor at .*test_refusals\.py:\d+"
    with pytest.raises(ValueError, match=words):
        trace_step(net, step, inputs)


def test_a_replay_under_the_autocast_of_its_trace_casts_as_eager_does(net, inputs, train_step):
    """V5: the backward, which eager code runs outside of autocast, takes no other casts."""
    eager, plain = copy.deepcopy(net), copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace_step(net, train_step, inputs)
        traced.replay(net, *inputs)
        loss = train_step(eager, *inputs)
    loss.backward()
    train_step(plain, *inputs).backward()
    assert_bitwise_equal(gradients(net), gradients(eager))
    assert_bitwise_different(gradients(net), gradients(plain))


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_a_replay_does_not_depend_on_the_mode_of_autograd(net, inputs, train_step, context):
    """V5: it runs without autograd in any case; a trace without gradients is refused."""
    eager, traced = copy.deepcopy(net), trace_step(net, train_step, inputs)
    with context():
        traced.replay(net, *inputs)
    train_step(eager, *inputs).backward()
    assert_bitwise_equal(gradients(net), gradients(eager))
    with torch.no_grad(), pytest.raises(ValueError, match="is the step under no_grad"):
        trace_step(net, train_step, inputs)


class ScalesByAnAttribute(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = torch.ones(4)

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("where", ["closure", "attribute", "second element of a list"])
def test_a_tensor_that_is_neither_input_nor_state_is_refused_with_a_way_out(where):
    model, outside = nn.Linear(4, 4), [torch.ones(4), torch.ones(4)]

    def step(model, x):
        y = model(x)
        if where == "closure":
            y = y * outside[0]
        if where == "second element of a list":
            y = torch.addcmul(y, y, outside[1])
        return y.mean()

    if where == "attribute":
        model = ScalesByAnAttribute()
    words = r"aten\.\w+\.\w+ of the step reads a tensor at .*test_refusals.py:\d+ that is neither"
    with pytest.raises(ValueError, match=words):
        trace_step(model, step, (torch.ones(2, 4),))
    model.register_buffer("known", outside[0])
    trace_step(model, lambda model, x: (x @ model.weight * model.known).mean(), (torch.ones(2, 4),))


class InCheckpoints(nn.Module):
    """Two layers, of which the first, or what is before it, trains or not."""

    def __init__(self, reentrant):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        if not x.requires_grad:
            x.requires_grad_()  # as transformers' enable_input_require_grads does
        return self.head(checkpoint(self.layer, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("trained", ["all", "layer", "head"])
def test_a_reentrant_checkpoint_is_refused_with_a_way_out(trained):
    """Without the refusal the layer has no gradient if the embedding is frozen."""
    tokens = torch.tensor([1, 2, 3])
    for reentrant in (True, False):
        model = InCheckpoints(reentrant)
        model.embedding.requires_grad_(trained == "all")
        model.layer.requires_grad_(trained != "head")
        if reentrant:
            with pytest.raises(ValueError, match="take use_reentrant=False"):
                trace_step(model, lambda model, x: model(x).square().mean(), (tokens,))
            continue
        traced = trace_step(model, lambda model, x: model(x).square().mean(), (tokens,))
        traced.replay(model, tokens)
        got = {name for name, each in model.named_parameters() if each.grad is not None}
        assert ("layer.weight" in got) == (trained != "head")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_reentrant_checkpoint_behind_any_output_of_a_stage_is_refused(place):
    class SeveralOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            outputs = [self.layer(x) * scale for scale in range(3)]
            outputs[place] = checkpoint(self.layer, x, use_reentrant=True)
            return tuple(outputs)

    with pytest.raises(ValueError, match="take use_reentrant=False"):
        trace_stage(SeveralOutputs(), (torch.ones(2, 4, requires_grad=True),))


@pytest.mark.parametrize("shape", [(4, 2, 6), (4, 6)], ids=["batched", "unbatched"])
def test_an_lstm_of_onednn_is_refused_with_a_way_out(shape):
    model, x = nn.Sequential(nn.LSTM(6, 5)), torch.randn(shape)

    def step(model, x):
        return model(x)[0].square().sum()

    with pytest.raises(ValueError, match=r"trace it, and run eager, inside torch.backends.mkldnn"):
        trace_step(model, step, (x,))
    eager = copy.deepcopy(model)
    with torch.backends.mkldnn.flags(enabled=False):
        trace_step(model, step, (x,)).replay(model, x)
        step(eager, x).backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    gru = nn.GRU(6, 5)
    trace_step(gru, step, (x,)).replay(gru, x)
