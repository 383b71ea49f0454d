"""Record a training run that nobody edits, step by step, without changing a bit of it.

``record_training`` is the library's form; the command ``record`` runs a script with a ``Recorder``
that finds model and optimisers by itself. It hooks modules and optimisers as torch offers it to
everybody, and watches ``backward``. The phases of a *step* are, in order:

- load: modules beside the model; in the first recorded step, and after a state dict has been
  loaded, also weights, buffers and moments
- random: the states of random generators when the forward begins
- data: the tensors that the model is called with
- forward: what the chosen modules return
- loss: what each backward starts from
- gradient: gradients as backward leaves them
- clip: gradients as the optimiser takes them
- optimiser: the options of the step, and weights, buffers and moments after it

After the last step comes the end: weights and buffers as the trainer leaves them.

No hook says that a step is over: an optimiser that has stepped may be one of several. So the next
*step* begins at the first of these events, whichever a trainer shows:

- the model is called under gradients, after an optimiser has stepped;
- a backward begins, after all optimisers have stepped: compiled code shows no forward;
- an optimiser begins to step that has stepped before in this step.

A step counts if a backward precedes it, or gradients that are new and not 0.

The first step, and with it the recording, begins where the model is called, or else (the model is
compiled, or an optimiser was made too late for that) after the first backward that reaches it, or
else where an optimiser steps.
"""

import fnmatch
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from os import PathLike
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from pytest_gtrainer._torch.autograd import watching_roots
from pytest_gtrainer._torch.modes import dispatch_modes
from pytest_gtrainer._torch.random_states import random_state, without_modes
from pytest_gtrainer._torch.values import FakeTensorMode, pytree, writes_to
from pytest_gtrainer._torch.wrapped_modules import COMPILED, wrapped_by
from pytest_gtrainer.facts import check_switches, check_type
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.bits import NoBytes, is_dtensor
from pytest_gtrainer.numerics.calls import line_of_user
from pytest_gtrainer.numerics.record import normalised
from pytest_gtrainer.over_time import found
from pytest_gtrainer.over_time.files import Writer, entry_of, rank_of_process, rows_of

Hook = Callable[..., None]
# Models may be called before an optimiser is made. So many calls are looked at: each costs a walk
# over all objects of the process.
_MOST_LOOKS = 16


def _hook(*, always: bool) -> Callable[[Hook], Hook]:
    """Make a method a hook: it computes outside of the trainer's modes, and what it raises ends the
    recording and not the training. Unless ``always``, it is called in recorded steps alone.
    """

    def decorate(method: Hook) -> Hook:
        @wraps(method)
        def run(self: "Recorder", *args: Any) -> None:
            # Dynamo traces hooks of modules that are compiled in place: it must see nothing here.
            if torch.compiler.is_compiling() or self.is_over:
                return
            if not (always or self.is_recorded):
                return
            # A trace of a step calls the model, and backward, with tensors that hold nothing.
            if any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes()):
                return
            # A copy to the host would break the capture of a CUDA graph, and so the training.
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                return
            is_training = torch.is_grad_enabled()
            try:
                with torch.no_grad(), without_modes():
                    self.is_training = is_training
                    method(self, *args)
            except Exception as error:
                self.give_up(error)

        return run

    return decorate


class _HookOfModule:
    """A hook that stays behind when a trainer copies or pickles the module.

    A copy of the model, as an average or the best one so far, is not recorded; and a pickle of it
    must not ask for this package where it is read. What is copied instead takes any arguments, does
    nothing, and is of Python itself.
    """

    def __init__(self, run: Hook) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Recorder:
    """Write what a training run does into ``folder``, a file for each rank.

    Attributes:
        step: the number of the current step. The first one is the number of steps that the
            optimisers have taken, which a resumed run does not begin at 0.
        recorded: how many steps were recorded.
        is_over: whether the recording has ended, by ``stop`` or by an error.
        has_failed: whether it was an error, which then has been said.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        every: int = 1,
        activations: Sequence[str] = (),
        values: bool = False,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is a number of steps, at least 1, not {every}")
        self.every, self.activations = every, activations
        self.writer = Writer(folder, values=values)
        self.step = self.recorded = self.last_step = 0
        self.has_failed = self.is_over = self.begun = self.is_recorded = self.is_in_forward = False
        self.is_training = self.had_backward = self.has_loaded = False
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.beside: list[tuple[str, nn.Module]] = []
        # Modules of this process that are older than the script which is recorded.
        self.earlier: WeakSet[nn.Module] = WeakSet()
        # Ids of optimisers.
        self.stepped_in_step: set[int] = set()
        self.stepped_since_backward: set[int] = set()
        # By the id of an optimiser, the first gradient of its last step, and its version.
        self.last_gradients: dict[int, tuple[ref[Tensor], int]] = {}
        self.looked_at: WeakSet[nn.Module] = WeakSet()
        self.looks = 0
        self.phases: dict[str, dict[str, Any]] = {}
        self.places: dict[str, str] = {}
        self.hooks = ExitStack()

    def start(self) -> None:
        """Hook the optimisers, every backward, and the first module that is called."""
        handles = []
        for optimizer in self.optimizers:
            handles.append(optimizer.register_step_pre_hook(self._before_step))
            handles.append(optimizer.register_step_post_hook(self._after_step))
        if self.model is None:
            self.earlier = found.living_modules()
            handles.append(register_optimizer_step_pre_hook(self._before_step))
            handles.append(register_optimizer_step_post_hook(self._after_step))
            self.finder = register_module_forward_pre_hook(self._first_call)
            handles.append(self.finder)
        self._until_stop(handles)
        self.hooks.enter_context(watching_roots(self._before_backward, self._after_backward))

    def _until_stop(self, handles: Iterable[RemovableHandle]) -> None:
        for handle in handles:
            self.hooks.callback(handle.remove)

    def stop(self, error: BaseException | None = None) -> None:
        """Write the last line and take all hooks away."""
        self.hooks.close()
        if self.begun and not self.is_over:
            try:
                if error is None and self.recorded:
                    self._write_end()
                self.writer.end(error)
            except Exception as failure:
                self.give_up(failure)
        self.is_over = True
        self.writer.close()

    def _write_end(self) -> None:
        """Record what a trainer has done to the weights after the last step, as an average."""
        self.phases = {}
        with torch.no_grad(), without_modes():
            if self.model is not None:
                _reshard(self.model)
                self._add("end", _state_of(self.model))
            self._add_beside("end")
            if self.phases:
                self.writer.left(self.last_step, self.phases)

    def give_up(self, error: Exception) -> None:
        """End the recording with one line; the training goes on."""
        # Hooks stay until ``stop``: torch may be walking through the table of them.
        self.is_over = self.has_failed = True
        self.writer.close()
        reason = str(error).partition("\n")[0]
        print(
            f"recording ended at step {self.step}: {type(error).__name__}: {reason}",
            file=sys.stderr,
            flush=True,
        )

    def attach(self, model: nn.Module, called: nn.Module | None = None) -> None:
        """Hook the model, and the modules whose results are recorded.

        ``called`` is the part of it that the trainer calls, if not the whole.
        """
        self.model = model
        handles: list[RemovableHandle] = []
        missed = set(self.activations)
        for name, module in model.named_modules():
            is_called = any(module is each for each in (model, called))
            if is_called:
                # Before the hook of FSDP2, which puts other parameters into the module.
                before = _HookOfModule(self._before_forward)
                handles.append(module.register_forward_pre_hook(before, prepend=True))
            is_chosen = False
            for pattern in self.activations:
                # Patterns are written for the model, whatever it is wrapped into.
                names = name, normalised(name)
                if any(fnmatch.fnmatchcase(each, pattern) for each in names):
                    missed.discard(pattern)
                    is_chosen = True
            if is_chosen:
                hook = _HookOfModule(partial(self._activation, name or "the whole model"))
                handles.append(module.register_forward_hook(hook))
            if is_called:
                # After the hook that records what this module returns.
                after = _HookOfModule(self._after_forward)
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._until_stop(handles)
        handles = [model.register_load_state_dict_post_hook(_HookOfModule(self._loaded))]
        for optimizer in self.optimizers:
            handles.append(optimizer.register_load_state_dict_post_hook(self._loaded))
        self._until_stop(handles)
        for pattern in sorted(missed):
            print(f"no module has a name like {pattern!r}", file=sys.stderr, flush=True)

    @_hook(always=True)
    def _first_call(self, module: nn.Module, args: Any) -> None:
        if not self.is_training or module in self.looked_at:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        gc.collect()  # an earlier trainer of this process would still be found
        if found.is_trained(module):
            self._find(found.outermost(module), module)
            # Hooks that are made within a call are not called before it.
            self._begin_forward()
            return
        # A teacher, or a first call that shows shapes. The module itself may get an optimiser
        # later; what it calls is not looked at again.
        self.looked_at.update(module.modules())
        self.looked_at.discard(module)
        self.looks += 1
        if self.looks >= _MOST_LOOKS:
            self.finder.remove()

    def _find(self, model: nn.Module, called: nn.Module | None = None) -> None:
        self.finder.remove()
        self.optimizers = found.optimizers_of(model)
        self.attach(model, called)
        self.beside = list(found.modules_beside(model, self.earlier))

    def _begin_step(self, *, is_next: bool) -> None:
        """Begin the recording, if it has not begun; otherwise the next step, if ``is_next``."""
        if not self.begun:
            self._begin_recording()
        elif is_next:
            self._begin_next_step()

    def _begin_recording(self) -> None:
        """Write the header, and what the first step starts with."""
        self.begun = self.is_recorded = True
        # A resumed run counts on from the steps that its optimisers have taken.
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                if isinstance(state, Mapping) and "step" in state:
                    self.step = max(self.step, int(state["step"]))
        self.writer.begin(_header(self.model, self.optimizers, self.every))
        self._add_loaded()
        self._add_beside()

    def _begin_next_step(self) -> None:
        self.step += 1
        # What was gathered since the last line belongs to a step that nobody ended.
        self.stepped_in_step.clear()
        self.phases = {}
        # A resumed run records the same steps as the whole one.
        self.is_recorded = self.step % self.every == 0
        if self.is_recorded and self.has_loaded:
            self._add_loaded()
        if self.is_recorded:
            self._add_beside()
        self.has_loaded = False

    def _add_loaded(self) -> None:
        self.has_loaded = False
        if self.model is not None:
            self._add("load", _state_of(self.model))
        for optimizer in self.optimizers:
            self._add("load", self._moments(optimizer))

    @_hook(always=True)
    def _loaded(self, *args: Any) -> None:
        self.has_loaded = True

    def _add_beside(self, phase: str = "load") -> None:
        for name, module in self.beside:
            self._add(
                phase, ((f"beside {name}.{key}", tensor) for key, tensor in _state_of(module))
            )

    # Entries are read at once, on the device: trainers go on to change the tensors in place.

    def _add(self, phase: str, tensors: Iterable[tuple[str, Any]]) -> None:
        entries = self.phases.setdefault(phase, {})
        for name, value in tensors:
            entries[name] = self._entry(value)

    def _add_call(self, phase: str, name: str, entry: Any) -> None:
        calls = self.phases.setdefault(phase, {}).setdefault(name, {"calls": []})
        calls["calls"].append(entry)

    def _entry(self, value: Any, *, rows: bool = False) -> Any:
        try:
            if rows:
                return rows_of(value)
            return entry_of(value, keep=self.writer.values)
        except (NoBytes, NotImplementedError) as error:
            # Tensors inside of a transform of torch.func have no storage: the latter.
            return f"not recorded: {error}"

    @_hook(always=True)
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self.is_training:
            self._begin_forward()

    def _begin_forward(self) -> None:
        self.is_in_forward = True
        self._begin_step(is_next=bool(self.stepped_in_step))
        if self.is_recorded and "random" not in self.phases:
            self._add("random", random_state().items())

    @_hook(always=False)
    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.is_in_forward:
            for name, tensor in _tensors((args, kwargs)):
                self._add_call("data", f"input {name}", self._entry(tensor, rows=True))
        self.is_in_forward = False

    @_hook(always=False)
    def _activation(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # A checkpointed module runs again in the backward: that is outside.
        if self.is_in_forward:
            for path, tensor in _tensors(output):
                self._add_call("forward", f"{name}{path}", self._entry(tensor))

    @_hook(always=True)
    def _before_backward(self, roots: list[Tensor]) -> None:
        self.had_backward = True
        self.stepped_since_backward.clear()
        self.places["backward"] = line_of_user()
        # Compiled code shows no forward: then the backward is the first that is seen of a step.
        if self.stepped_in_step and self.stepped_in_step.issuperset(map(id, self.optimizers)):
            self._begin_next_step()
        if not self.begun:
            self.phases.clear()  # the backward before was of another model
        elif not self.is_recorded:
            return
        for root in roots:
            # Others are edges of the graph, which have no value.
            if isinstance(root, Tensor) and root.numel() == 1:
                if not is_dtensor(root):  # a view of one might communicate
                    root = root.view(())
                self._add_call("loss", "root", self._entry(root))

    @_hook(always=True)
    def _after_backward(self) -> None:
        if self.model is None and self.looks < _MOST_LOOKS:
            self.looks += 1
            model = found.model_with_gradients()
            if model is not None:
                self._find(found.outermost(model))
        if self.model is not None and not self.begun:
            if all(parameter.grad is None for parameter in self.model.parameters()):
                return
            self._begin_recording()
        # DDP and FSDP reduce until a backward returns: hooks of parameters would be too early. Of
        # several backwards of a step, the last leaves the sum.
        if self.model is not None and self.is_recorded:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self._add("gradient", [(name, parameter.grad)])

    @_hook(always=True)
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            # Forward and backward come within the step, and then what they leave for it.
            if self.model is not None or self.begun:
                self._begin_step(is_next=id(optimizer) in self.stepped_in_step)
        elif self._is_trained_by(optimizer):
            self.places["step"] = line_of_user()
            self._begin_step_of(optimizer)
            self._add_gradients(optimizer)

    @_hook(always=True)
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_trained_by(optimizer):
            return
        if _has_closure(args, kwargs):
            self.places["step"] = line_of_user()
            self._begin_step_of(optimizer)
            self._add_gradients(optimizer)
        self.stepped_since_backward.add(id(optimizer))
        for gradient in _gradients(optimizer):
            self.last_gradients[id(optimizer)] = ref(gradient), writes_to(gradient)
            break
        self.stepped_in_step.add(id(optimizer))
        self.last_step = self.step
        if not self.is_recorded:
            return
        self._add("optimiser", self._options(optimizer))
        self._add("optimiser", self._parameters(optimizer))
        self._add("optimiser", self._untrained())
        self._add("optimiser", self._moments(optimizer))
        self.writer.step(self.step, self.phases, self.places)
        self.recorded += len(self.stepped_in_step) == 1
        self.phases = {}

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        if self.had_backward and id(optimizer) not in self.stepped_since_backward:
            return True
        # A graph that has the backward in it gives gradients without one. Checkpoints of torch step
        # an optimiser, too, to make its state, of which plain SGD has none: so they do it each
        # time. Their gradients are 0.
        gradients = list(_gradients(optimizer))
        last, version = self.last_gradients.get(id(optimizer), (None, 0))
        first = gradients[0] if gradients else None
        if first is not None and last is not None and last() is first:
            return writes_to(first) != version and any(map(_is_not_zero, gradients))
        return any(map(_is_not_zero, gradients))

    def _begin_step_of(self, optimizer: Optimizer) -> None:
        """Begin a step if nothing has before ``optimizer`` steps; find the model by it."""
        if self.model is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            model = found.holder_of(parameters)
            if model is not None:
                self._find(found.outermost(model))
        self._begin_step(is_next=id(optimizer) in self.stepped_in_step)

    def _add_gradients(self, optimizer: Optimizer) -> None:
        if not self.is_recorded:
            return
        for name, parameter in self._parameters(optimizer):
            if parameter.grad is not None:
                self._add("clip", [(name, parameter.grad)])

    def _prefix(self, optimizer: Optimizer) -> str:
        """Return what stands before ``param_groups`` in names: nothing for the first optimiser."""
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
        if self.optimizers[0] is optimizer:
            return ""
        return f"optimizers.{self.optimizers.index(optimizer)}."

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        # Names are read each time: a trainer may wrap modules and add groups at any step.
        names = {}
        for prefix, module in self.beside:
            for name, tensor in module.named_parameters():
                names[id(tensor)] = f"beside {prefix}.{name}"
        if self.model is not None:
            for name, tensor in self.model.named_parameters():
                names[id(tensor)] = name
        begin = self._prefix(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                default = f"{begin}param_groups.{number}.{place}"
                yield names.get(id(parameter), default), parameter

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers, and weights that no optimiser has, as an average inside of the model."""
        trained: set[int] = set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                trained.update(map(id, group["params"]))
        if self.model is not None:
            for name, tensor in _state_of(self.model):
                if id(tensor) not in trained:
                    yield name, tensor

    def _moments(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._parameters(optimizer):
            state = optimizer.state.get(parameter)
            if not isinstance(state, Mapping):
                continue
            for key, value in state.items():
                # LBFGS keeps lists of tensors.
                for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                    if isinstance(leaf, Tensor | int | float):
                        yield f"{name}.{key}{pytree.keystr(path)}", leaf

    def _options(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        begin = self._prefix(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                parts = [value]
                if isinstance(value, Sequence) and not isinstance(value, str):
                    parts = list(value)
                for place, part in enumerate(parts):
                    name = f"{begin}param_groups.{number}.{key}"
                    if len(parts) > 1:
                        name += f".{place}"
                    if isinstance(part, Tensor | int | float):
                        yield name, part
                    elif isinstance(part, str):
                        yield f"{name}={part!r}", 1


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _is_not_zero(gradient: Tensor) -> bool:
    """Return whether an element is not 0; of a DTensor, one of this rank's."""
    own: Any = gradient
    if is_dtensor(gradient):
        own = own.to_local()
    if own.is_sparse:
        own = own.coalesce().values()
    return bool(own.any())


def _has_closure(args: Any, kwargs: Any) -> bool:
    # The first argument is the optimiser itself.
    return any(callable(each) for each in (*args[1:], *kwargs.values()))


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a structure, each with its place, as ``[0]['tokens']``."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 free what a validation has gathered: its copies may have another dtype."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else nothing is sharded by it
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _header(model: nn.Module | None, optimizers: Iterable[Optimizer], every: int) -> dict[str, Any]:
    """Return what is worth knowing before two records are compared."""
    compiled = []
    if model is not None:
        for name, module in model.named_modules():
            if wrapped_by(module) == COMPILED:
                compiled.append(normalised(f"{name}.")[:-1] or "the whole model")
    device = "cpu"
    if torch.cuda.is_initialized():
        device = torch.cuda.get_device_name()
    is_distributed = dist.is_available() and dist.is_initialized()
    return {
        "rank": rank_of_process(),
        "world_size": dist.get_world_size() if is_distributed else 1,
        "model": "" if model is None else found.class_of(model),
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "every": every,
        "torch": torch.__version__,
        "python": sys.version.partition(" ")[0],
        "device": device,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "arguments": sys.argv[1:],
        "settings": {name: repr(value) for name, value in knobs.values().items()},
    }


@contextmanager
def record_training(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    folder: str | PathLike[str],
    *,
    every: int = 1,
    activations: Sequence[str] | str = (),
    values: bool = False,
    beside: Mapping[str, nn.Module] | None = None,
) -> Iterator[Recorder]:
    """Record the training steps in the block, on every rank, into a file of ``folder``.

    No bit of the training changes. ``python -m pytest_gtrainer compare A B`` compares two such
    folders. A step is recorded when an optimiser has stepped; what goes wrong while recording, as a
    full disk, ends it with one line on stderr.

    Args:
        model: the module that the loop calls, wrapped and sharded as it is trained.
        optimizer: the optimiser of the model, or several.
        folder: where the record goes. It must not hold one.
        every: record the first step, and those whose number is a multiple of it.
        activations: patterns of names of modules, as ``"layers.*"``, whose results are recorded.
        values: also keep all bytes, so that ``compare`` names elements. They are copied to the host
            and written step by step.
        beside: other modules with state to record by name, as an average of the weights.

    Yields:
        The recorder; ``recorded`` counts the steps.

    Raises:
        RecordError: the folder holds a record, or cannot be made.
    """
    check_switches(values=values)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    check_type(model, nn.Module, "model", "the nn.Module that the loop calls")
    check_type(optimizers, Sequence, "optimizer", "a torch.optim.Optimizer, or a list of them")
    for each in optimizers:
        check_type(each, Optimizer, "optimizer", "a torch.optim.Optimizer, or a list of them")
    check_type(beside or {}, Mapping, "beside", 'modules by name, {"average": module}')
    for name, module in (beside or {}).items():
        check_type(module, nn.Module, f"beside[{name!r}]", "an nn.Module")
    check_type(activations, (str, Sequence), "activations", "patterns of names of modules")
    patterns = [activations] if isinstance(activations, str) else activations
    recorder = Recorder(folder, every=every, activations=patterns, values=values)
    recorder.optimizers = list(optimizers)
    recorder.beside = list((beside or {}).items())
    recorder.attach(model)
    recorder.start()
    try:
        yield recorder
    except BaseException as error:
        recorder.stop(error)
        raise
    recorder.stop()
