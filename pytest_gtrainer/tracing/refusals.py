"""Refuse what a trace cannot hold.

A trace calls the step once, on stand-ins for the parameters, and asks autograd for their gradients.
A graph has no node for what else a step does to the model: what hooks of a wrapper or of a
parameter do, what is added to ``.grad`` inside the step, an optimiser's update. Such a step would
give a wrong graph without an error, so each is refused here, by name and with the way out. Hooks on
the ``AccumulateGrad`` node of a parameter cannot be seen.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_gtrainer._torch.autograd import (
    GuardedGradient,
    TorchDispatchMode,
    dispatch_below,
    method_of_hook,
)
from pytest_gtrainer._torch.graph_text import hooks_of
from pytest_gtrainer._torch.modes import MODES, spell_mode
from pytest_gtrainer._torch.random_states import (
    UNUSUAL_SEED,
    GeneratorStates,
    random_state,
    without_modes,
)
from pytest_gtrainer._torch.tracing import AutocastAround, current_annotation
from pytest_gtrainer._torch.values import parts_of, storage_id
from pytest_gtrainer._torch.wrapped_modules import (
    COMPILED,
    is_about_compiled_code,
    is_compiled,
    wrapped_by,
)
from pytest_gtrainer.facts import check_callable, check_type
from pytest_gtrainer.graph.nodes import Call, is_random
from pytest_gtrainer.tracing.model import KEY, ModelState

_REPLICATE = (
    "a trace does not see its all-reduces. Give the plain model to "
    'data_parallel(model, mesh, mode="replicate"), or use TrainConfig(replicate=True)'
)
_SHARD = (
    "a trace does not see its collectives. "
    "Give the plain model to data_parallel(model, mesh) in its place"
)
_COMPILE = "a trace cannot look into compiled code. Give the module as it was before torch.compile"
_WAYS_OUT = {
    "DistributedDataParallel": _REPLICATE,
    "replicate": _REPLICATE,
    "DataParallel": _REPLICATE,
    "fully_shard": _SHARD,
    "FullyShardedDataParallel": _SHARD,
    COMPILED: _COMPILE,
    "torch.jit": "a trace cannot look into a ScriptModule. Give the nn.Module that it was made of",
}


def refuse_model(model: nn.Module, step: Callable[..., Any] | None = None) -> None:
    """Refuse wrapped modules and hooks on parameters, which a graph would lose, and compiled steps.

    Raises:
        ValueError: names the module or parameter, and what to give instead.
    """
    check_type(model, nn.Module, "model", "an nn.Module")
    if step is not None:
        check_callable(step=step)
    for fqn, module in model.named_modules():
        _refuse_wrapped(module, f"the submodule {fqn}" if fqn else "the model")
    for fqn, parameter in model.named_parameters():
        refuse_hooks(parameter, f"the parameter {fqn}")
    for fqn, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise ValueError(
                f"the buffer {fqn} requires a gradient, and a graph gives those of parameters: "
                "make it a parameter, or register its detach()"
            )
    if step is not None and is_compiled(step):
        raise ValueError(
            "the step is a function of torch.compile: "
            "give the function as it was before torch.compile"
        )


def refuse_reentrant(outputs: Sequence[torch.Tensor]) -> None:
    """Refuse results after a reentrant checkpoint.

    Its backward writes gradients itself, where a trace does not see them, and runs not at all if
    nothing before it trains.
    """
    todo = [output.grad_fn for output in outputs]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # By its name: Megatron-LM and others have a class of their own.
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "the step uses checkpoint(..., use_reentrant=True), whose backward writes "
                "gradients where a trace does not see them: take use_reentrant=False"
            )
        todo += [behind for behind, _ in node.next_functions]


def refuse_operators(gm: fx.GraphModule) -> None:
    """Refuse a graph with an operator that a replay cannot call.

    The workspace of oneDNN's LSTM has no value in a trace, and its backward needs it.
    """
    if gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default
    ):
        raise ValueError(
            "the step calls oneDNN's LSTM, whose backward no graph can replay: trace it, and run "
            "eager, inside torch.backends.mkldnn.flags(enabled=False)"
        )


def refuse_compiled_code(error: RuntimeError, place: str) -> None:
    """Raise torch's ``error`` about compiled code in our words; return if it is another one."""
    if is_about_compiled_code(error):
        raise ValueError(
            f"the step calls compiled code{place}, which a trace cannot look into: "
            "call the module or function as it was before torch.compile"
        ) from error


def refuse_unknown_tensors(error: AssertionError, place: str) -> None:
    """Raise torch's ``error`` about a tensor that is not fake in our words; return if it is another
    one.
    """
    # torch: "Please convert all Tensors to FakeTensors first ... Found in aten.mul.Tensor(...)".
    _, is_about_one, call = str(error).partition("Please convert all Tensors to FakeTensors first")
    if is_about_one:
        operator = call.partition("Found in ")[2].partition("(")[0] or "an operator"
        raise ValueError(
            f"{operator} of the step reads a tensor{place} that is neither an input nor a "
            "parameter or buffer of the model, as one in a closure or in a plain attribute: "
            "register it as a buffer, or give it as an input"
        ) from error


def _refuse_wrapped(module: nn.Module, where: str) -> None:
    wrapper = wrapped_by(module)
    if wrapper:
        raise ValueError(
            f"{where} ({type(module).__name__}) is wrapped by {wrapper}: {_WAYS_OUT[wrapper]}"
        )


def refuse_hooks(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor with hooks of its own.

    Raises:
        ValueError: names the tensor and the method that has registered the hook.
    """
    method = method_of_hook(tensor)
    if method:
        raise ValueError(
            f"{where} has a hook of {method}(), which a graph would not run: remove the hook "
            "before the trace and the replay, and do its work on .grad after the replay. Hooks on "
            "modules and on tensors that the forward computes are traced"
        )


def refuse_input(tensor: torch.Tensor, where: str, *, may_have_history: bool) -> None:
    """Refuse an input with a hook, and a nested tensor.

    Unless it ``may_have_history``, an input whose gradient eager code would compute is refused,
    too.

    Raises:
        ValueError: names the input.
    """
    refuse_hooks(tensor, where)
    if tensor.grad_fn is not None and not may_have_history:
        raise ValueError(
            f"{where} is the result of {tensor.grad_fn.name()}, and a trace would lose the "
            "gradients that flow on through it: compute it inside the step, or give its detach()"
        )
    if tensor.requires_grad and not may_have_history:
        raise ValueError(
            f"{where} requires a gradient, and the graph of a step gives those of the model's "
            "parameters: read a parameter from the model inside the step, give detach() of "
            "another tensor, or use trace_stage, which gives gradients of inputs"
        )
    if tensor.is_nested:
        raise ValueError(
            f"{where} is a nested tensor, which a trace cannot take: give a padded one, or its "
            "values() and offsets()"
        )


@contextmanager
def refusing_side_effects(
    model: nn.Module, state: ModelState, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Refuse what the user's code inside does to the model and a graph would lose.

    The code runs on ``tensors`` in the place of the model's ``state``.

    Raises:
        ValueError: names the tensor or module, and the way out.
    """
    owners = [*zip(state.fqns, tensors, strict=True), *zip(state.fqns, state.tensors, strict=True)]
    guards = []
    with ExitStack() as stack:
        for fqn, tensor in owners:
            if not tensor.requires_grad or not tensor.is_leaf:
                continue
            message = (
                f"the step calls backward(), or reads, adds to or clears the .grad of {fqn} in "
                "another way, and a graph would lose that: a trace computes gradients of the loss "
                "that the step returns. To accumulate gradients, return the sum of the losses. "
                "Call backward(), zero_grad() and clip_grad_norm_() outside of the step"
            )
            guard = GuardedGradient(tensor, message)
            stack.callback(setattr, tensor, "grad", tensor.grad)
            tensor.grad = guard
            guards.append((tensor, guard, message))
        stack.enter_context(_refusing_calls())
        memory = _memory_of(tensors)
        yield
        for tensor, guard, message in guards:
            if tensor.grad is not guard:
                raise ValueError(message)
        _refuse_changes(model, state, tensors, memory)


@contextmanager
def _refusing_calls() -> Iterator[None]:
    """Refuse calls of wrapped modules and optimisers, wherever the user's code holds them."""
    thread = threading.get_ident()  # threads of a simulated world may train meanwhile

    def refuse_module(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() == thread:
            _refuse_wrapped(module, "a module that the step calls")

    def refuse_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == thread:
            raise ValueError(
                f"the step calls {type(optimizer).__name__}.step(), and a graph would lose the "
                "update: a step ends with its loss. Call the optimiser after the replay"
            )

    modules = register_module_forward_pre_hook(refuse_module)
    optimizers = register_optimizer_step_pre_hook(refuse_optimizer)
    try:
        yield
    finally:
        modules.remove()
        optimizers.remove()


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return storage, shape and strides of the parts of each tensor."""
    return [
        [(storage_id(part), part.shape, part.stride()) for part in parts_of(tensor)]
        for tensor in tensors
    ]


def _refuse_changes(
    model: nn.Module,
    state: ModelState,
    tensors: Sequence[torch.Tensor],
    memory: Sequence[list[Any]],
) -> None:
    """Refuse state that the step has replaced, added, frozen or hooked.

    ``memory`` is that of ``tensors`` before the step.
    """
    in_place = "update it in place (copy_, add_)"
    for fqn in state.reassigned(tensors):
        raise ValueError(
            f"the forward replaces {fqn} by another tensor, which a graph cannot: {in_place}"
        )
    memory_now = _memory_of(tensors)
    for fqn, tensor, own, before, now in zip(
        state.fqns, tensors, state.tensors, memory, memory_now, strict=True
    ):
        if now != before:
            raise ValueError(
                f"the step gives {fqn} other memory, another shape or other strides (.data =, "
                f"t_(), resize_()), which a graph cannot: {in_place}"
            )
        if tensor.requires_grad != own.requires_grad:
            raise ValueError(
                f"the step changes requires_grad of {fqn}, which a graph cannot: "
                "set it before the trace"
            )
        if isinstance(own, nn.Parameter):
            refuse_hooks(tensor, f"inside the step the parameter {fqn}")
    added = sorted(set(ModelState.of(model).fqns) - set(state.fqns))
    for fqn in added:
        # A tensor of the trace has no values, so no later call could use it.
        owner, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(owner), name, None)
    if added:
        raise ValueError(
            f"the step registers {', '.join(added)}, which a graph cannot: "
            "register it before the trace"
        )


class _UserMode(TorchDispatchMode):
    """A mode around the code of the user, which hands every operator on."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let operators such as ``cond`` compile what they run, as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        return dispatch_below(func, types, args, kwargs)

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        raise NotImplementedError


class _Draws(_UserMode):
    """Refuse operators that draw random numbers after the step has changed the random state.

    Operators draw nothing while they are traced. Here each one that would draw leaves the generator
    of the CPU at a new seed. One that finds another seed comes after code that has set the state:
    a checkpoint that recomputes, ``torch.manual_seed``, ``fork_rng``. Such code sets the CPU's
    generator beside those of other devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = UNUSUAL_SEED
        torch.default_generator.manual_seed(self._seed)

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        if not is_random(Call(func, args, kwargs)):
            return
        fqn = current_annotation(KEY)
        what = f"{func} in {fqn}" if fqn else str(func)
        if any(isinstance(each, torch.Generator) for each in [*args, *kwargs.values()]):
            raise ValueError(
                f"{what} draws from a torch.Generator of the user, whose state no graph holds: "
                "draw outside of the step, and give the numbers as an input"
            )
        self.refuse_changes(what)
        self._seed += 1
        torch.default_generator.manual_seed(self._seed)

    def refuse_changes(self, what: str) -> None:
        """Refuse a random state that is not the one after the last draw."""
        if torch.default_generator.initial_seed() != self._seed:
            raise ValueError(
                f"{what} comes after code of the step that sets the random state, so a graph, "
                "which never sets it, would draw other numbers. checkpoint() does so before it "
                "recomputes: give it preserve_rng_state=False, also where eager code runs, or "
                "train without dropout. Call torch.manual_seed() and the like outside of the step"
            )


class RefusingSecondCasts(_UserMode):
    """Refuse a second cast of a parameter that eager code would not make.

    Autocast keeps the cast of a parameter for its next use, so eager code adds the gradients of
    both uses in the lower precision. It keeps casts of leaves only, and a trace has views.

    Args:
        state: the tensors that stand for parameters and buffers in the trace, by FQN.
        autocast: that around the trace.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], autocast: AutocastAround) -> None:
        super().__init__()
        self._autocast = autocast
        self._fqns = {id(tensor): fqn for fqn, tensor in state.items() if tensor.requires_grad}
        self._cast: set[str] = set()

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is not torch.ops.aten._to_copy.default:
            return
        fqn = self._fqns.get(id(args[0]))
        if fqn is None or not self._autocast.eager_keeps_casts():
            return
        if fqn in self._cast:
            raise ValueError(
                f"{fqn} is cast twice inside torch.autocast. Eager code keeps the first cast of "
                "autocast for the second use, and a trace cannot, so gradients differ: give "
                "torch.autocast(..., cache_enabled=False), also where eager code runs, or cast the "
                "parameter once yourself"
            )
        self._cast.add(fqn)


@contextmanager
def refusing_random_states() -> Iterator[None]:
    """Refuse code inside that draws other random numbers than its graph would.

    All random states are put back on exit.

    Raises:
        ValueError: names the operator or the generator.
    """
    with without_modes():
        before, kept = random_state(), GeneratorStates.now()
    try:
        draws = _Draws()
        with draws:
            yield
        draws.refuse_changes("the end of the step")
        with without_modes():
            for name, state in random_state().items():
                if name != "torch.cpu" and not torch.equal(state, before.get(name, state)):
                    raise ValueError(
                        f"the step draws from, or sets, the random numbers of {name} beside the "
                        "operators that a graph holds: draw outside of the step, and give the "
                        "numbers as an input"
                    )
    finally:
        kept.put_back()


_AROUND = ("global module hooks", "saved-tensor hooks", "torch function modes")


@dataclass(frozen=True, slots=True)
class RunMode:
    """The mode that a model was called in: a graph holds the computation of one mode.

    Attributes:
        evaluating: FQNs of the modules in eval mode, "" for the model itself.
        autocast: device types for which autocast is on, each with its dtype, and whether it keeps
            casts, which decides in which dtype gradients of a parameter are added.
        modules: FQNs of all modules, each with its class and the number of its hooks, in words.
        around: what else would change what eager code computes here, in words: hooks of all modules
            and of saved tensors, and function modes.
    """

    evaluating: tuple[str, ...] = ()
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    around: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, tensors: Sequence[Any]) -> "RunMode":
        """Return the mode of now, of a model with ``tensors`` as its state and inputs."""
        devices = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
        autocast = []
        for device in sorted(devices - {"meta"}):  # which has no autocast
            if torch.is_autocast_enabled(device):
                keeps_casts = torch.is_autocast_cache_enabled()
                autocast.append((device, torch.get_autocast_dtype(device), keeps_casts))
        evaluating, modules = [], []
        for fqn, module in model.named_modules():
            if not module.training:
                evaluating.append(fqn)
            count = sum(map(len, hooks_of(module).values()))
            modules.append((fqn, f"a {type(module).__qualname__} with {count} hooks"))
        around = []
        for name in _AROUND:
            read, _ = MODES[name]
            around.append((name, spell_mode(read())))
        return cls(tuple(evaluating), tuple(autocast), tuple(modules), tuple(around))

    def refuse_other(self, other: "RunMode") -> None:
        """Refuse a replay in the mode ``other`` of a step that was traced in this one.

        Raises:
            ValueError: names the module, or the device of autocast.
        """
        own, others = dict(self.modules), dict(other.modules)
        for fqn in {**own, **others}:
            was, now = own.get(fqn, "not there"), others.get(fqn, "gone")
            if now != was:
                raise ValueError(
                    f"{fqn or 'the model'} was {was} at the trace and is {now}, which a graph does "
                    "not run: trace again"
                )
        changed = sorted(set(self.evaluating) ^ set(other.evaluating))
        if changed:
            fqn = changed[0]
            was, now = ("eval", "train") if fqn in self.evaluating else ("train", "eval")
            more = f", and so are {len(changed) - 1} more modules" if len(changed) > 1 else ""
            raise ValueError(
                f"{fqn or 'the model'} was in {was} mode at the trace and is in {now} mode{more}: "
                f"call {was}() on it, or trace again"
            )
        if self.autocast != other.autocast:
            raise ValueError(
                f"the step was traced {_spell(self.autocast)} and is replayed "
                f"{_spell(other.autocast)}: replay it in the context of its trace, or trace again"
            )

        for (name, was), (_, now) in zip(self.around, other.around, strict=True):
            if was != now:
                raise ValueError(
                    f"{name} were {was} at the trace and are {now}, which a graph does not run: "
                    "replay it in the context of its trace, or trace again"
                )

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Turn autocast off: a graph has its casts, and its backward takes no others."""
        with ExitStack() as stack:
            for device, *_ in self.autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield


def _spell(autocast: tuple[tuple[str, torch.dtype, bool], ...]) -> str:
    entered = []
    for device, dtype, keeps_casts in autocast:
        option = "" if keeps_casts else ", cache_enabled=False"
        entered.append(f"autocast({device!r}, {dtype}{option})")
    if not entered:
        return "without autocast"
    return f"under {' and '.join(entered)}"
