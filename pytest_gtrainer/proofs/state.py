"""Name the tensors that a call is given and may leave changed; refuse what nobody can follow.

A proof is about what a program makes of its inputs. What it holds besides, such as a module in a
closure or an optimiser, would be read, or written to, without a trace. So it is refused.
"""

import argparse
import copy
import functools
import hashlib
import inspect
import sys
import threading
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gtrainer import facts
from pytest_gtrainer._torch.arithmetic import is_compiled
from pytest_gtrainer._torch.autograd import hooks_of, method_of_hook
from pytest_gtrainer._torch.modes import MODES, SETTINGS, spell_mode
from pytest_gtrainer._torch.values import buffers_of, parameters_of, pytree
from pytest_gtrainer.graphtext.identity import code_of
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.numerics.compare import compare
from pytest_gtrainer.numerics.graph_run import has_storage, spell_values

__tracebackhide__ = facts.hides_frames

_MOST_ITEMS = 10_000
"""Of a container in a user's object; more are data."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_TORCH = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_is_buffer", "persistent")
"""Prefixes of attributes of tensors that change no number.

These are hints, such as those of ``mark_dynamic``, and the attributes of an ``nn.Buffer``, which a
tensor that replaces it does not have.
"""

# Values of these types hold no tensors, so nothing in them has to be followed.
_WITHOUT_TENSORS = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, type),
)


def named_state(
    function: Any, inputs: Sequence[Any], *, has_run: bool = False
) -> dict[str, Tensor]:
    """Return the tensors that a call is given: of the first module by FQN, of others by place too.

    Args:
        has_run: the call is over. Hooks that it has left on parameters are no error then:
            ``python_values`` compares them.

    Raises:
        ValueError: compiled code, a hook on a parameter, or an object that may hold tensors.
    """
    found: dict[str, Tensor] = {}
    for where, prefix, leaf in _leaves(function, inputs):
        if isinstance(leaf, Tensor):
            found[where] = leaf
        elif isinstance(leaf, nn.Module):
            for name, tensor in _tensors_of(leaf, where, has_run=has_run):
                found[prefix + name] = tensor
        elif not isinstance(leaf, _WITHOUT_TENSORS):
            raise ValueError(
                f"{where} is a {type(leaf).__name__}, and nobody follows what it holds: give "
                "tensors and modules, in tuples, lists and dicts, and make the rest inside of "
                "the function"
            )

    return found | attributes_of_tensors(found)


def attributes_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are attributes of tensors, such as ``weight.main_grad``, by name.

    A gradient may have attributes, too. Each tensor comes once.
    """
    found: dict[str, Tensor] = {}
    seen = {id(tensor) for tensor in tensors.values()}
    left = list(tensors.items())
    while left:
        name, tensor = left.pop()
        if tensor.is_leaf and tensor.grad is not None:
            left.append((f"gradient of {name}", tensor.grad))
        if type(tensor) not in (Tensor, nn.Parameter):
            continue  # others keep their own parts in attributes
        for attribute, value in vars(tensor).items():
            for at, leaf in _tensors_in(attribute, value, seen):
                if isinstance(leaf, Tensor) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    whole = f"{name}.{at}"
                    found[f"buffer {whole.removeprefix('buffer ')}"] = leaf
                    left.append((whole, leaf))
    return found


def _leaves(function: Any, inputs: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield what a call is given, each module once: its place, a prefix of names, and itself."""
    leaves: list[tuple[str, Any]] = []
    if isinstance(function, nn.Module):
        leaves.append(("the function", function))
    for place, value in enumerate(inputs):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            leaves.append((f"input {place}{pytree.keystr(path)}", leaf))

    modules: set[int] = set()
    for where, leaf in leaves:
        prefix = ""
        if isinstance(leaf, nn.Module):
            if id(leaf) in modules:
                continue
            # FQNs alone, so a module that is called and one that a function is given have the same
            # names: the one is often compared with the other.
            prefix = f"{where}." if modules else ""
            modules.add(id(leaf))
        yield where, prefix, leaf


def python_values(function: Any, inputs: Sequence[Any]) -> dict[str, str]:
    """Return the Python values of a call that it may change, each as a text.

    These are values in lists and dicts, and of modules: which submodules are in training mode,
    which parameters require a gradient, numbers that are plain attributes, such as counters, and
    hooks and functions of a module's own. Of tensors they are hooks, attributes, and of inputs
    whether they require a gradient. Hooks and functions are equal if their code is, whatever it
    closes over.
    Settings of torch, such as autocast, are among them.
    """
    modes: list[bool] = []
    trainable: list[bool] = []
    objects: set[int] = set()
    found: dict[str, str] = {}
    for place, value in enumerate(inputs):
        if isinstance(value, list | tuple | dict):
            found[f"input {place}"] = spell_values(value)
    for where, prefix, leaf in _leaves(function, inputs):
        if isinstance(leaf, Tensor):
            found[f"requires_grad of {where}"] = str(leaf.requires_grad)
            found[f"hooks and attributes of {where}"] = spell_values(_beside_numbers(leaf))
        if not isinstance(leaf, nn.Module):
            continue
        functions = {path: _functions_in(part) for path, part in leaf.named_modules()}
        tensors = [*leaf.named_parameters(), *leaf.named_buffers()]
        beside = {name: _beside_numbers(each) for name, each in tensors}
        of_parts = {name: each for name, each in (functions | beside).items() if each}
        found[f"hooks and attributes of {where}"] = spell_values(of_parts)
        trainable += [parameter.requires_grad for parameter in leaf.parameters()]
        for path, part in leaf.named_modules(prefix=prefix.removesuffix(".")):
            modes.append(part.training)
            for name, value in vars(part).items():
                if name in _OF_EVERY_MODULE:
                    continue
                whole = f"{path}.{name}" if path else name
                if _is_number(value):
                    found[f"attribute {whole}"] = spell_values(value)
                for own, number in _numbers_of_objects(whole, value, objects):
                    found[f"attribute {own}"] = spell_values(number)
    for name, value in modes_of_torch().items():
        found[f"setting {name!r} of torch"] = spell_mode(value)
    found["training modes"] = str(modes)
    found["parameters that require a gradient"] = str(trainable)
    return found


# Each has an entry of its own above, or belongs to a compiler that a call may load.
_ELSEWHERE = ("torch:", "torch._inductor")
_SWITCHES = [
    knob
    for knob in knobs.GUARDED
    if not knob.path.startswith(_ELSEWHERE) and knob.read() != knobs.NOT_LOADED
]


def _put_switches_back(before: Mapping[str, Any]) -> None:
    for knob in _SWITCHES:
        if knob.read() != before[knob.name]:
            knob.write(before[knob.name])


_MODES = (
    MODES
    | SETTINGS
    | {"torch.backends and other switches": (lambda: knobs.values(_SWITCHES), _put_switches_back)}
)


def modes_of_torch() -> dict[str, Any]:
    """Return the modes and settings of torch that a call may leave changed, by name."""
    return {name: read() for name, (read, _) in _MODES.items()}


def put_modes_back(before: Mapping[str, Any]) -> None:
    """Put back the modes and settings that are no longer as they were.

    The next program would begin with what this one has left, and leave nothing that is new.
    """
    for name, (read, put_back) in _MODES.items():
        if read() != before[name]:
            put_back(before[name])


def _beside_numbers(tensor: Tensor) -> list[Any]:
    """Return the hooks and attributes that a user has given to a tensor."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return []  # others keep their own parts in attributes
    found: list[Any] = list(_functions_in(tensor))
    found += map(_code_of, hooks_of(tensor))
    for name, value in vars(tensor).items():
        if not callable(value) and not name.startswith(_OF_TORCH):
            found.append({name: value})
    return found


def _functions_in(holder: nn.Module | Tensor) -> list[str]:
    """Return the code of the functions that are attributes of an object, and of its hooks."""
    found = []
    for name, value in vars(holder).items():
        functions = [value]
        if name.endswith(("_hooks", "_pre_hooks")) and isinstance(value, dict):
            functions = list(value.values())
        elif isinstance(value, nn.Module):
            continue
        found += [f"{name} {_code_of(each)}" for each in functions if callable(each)]
    return found


def _code_of(function: Any) -> str:
    """Return the code of a function as a text, or the name of another object that is called."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    # An object may answer every name with something.
    if not isinstance(code, types.CodeType):
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return _text_of(code)


# Each run asks twice, for every function of every module, and a file of torch has many functions.
_text_of = functools.lru_cache(maxsize=1024)(code_of)


def number_of(text: str) -> Tensor:
    """Return a number that stands for a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64)


def _tensors_of(module: nn.Module, where: str, *, has_run: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module by FQN; refuse what a copy of the module would not follow."""
    registered = _registered_in(module)
    for path, part in module.named_modules():
        if is_compiled(part):
            raise ValueError(
                f"{where} is compiled: give the module as it was, or the graph of a stage"
            )
        dot = f"{path}." if path else ""
        for name, tensor in part.named_parameters(recurse=False):
            method = method_of_hook(tensor)
            if method and not has_run:
                raise ValueError(f"{dot}{name} has a hook of {method}(), which a copy would lose")
            yield dot + name, tensor
        for name, tensor in part.named_buffers(recurse=False):
            yield f"buffer {dot}{name}", tensor
        _refuse_captured_modules(part, f"{where} has {dot}")
        # A tensor that is a plain attribute, such as a cache of rotary frequencies, is in no
        # ``state_dict``, and a call may write to it all the same.
        for name, leaf in _attributes_of(part):
            if id(leaf) in registered:
                continue
            if isinstance(leaf, Tensor):
                yield f"buffer {dot}{name}", leaf
            else:
                raise ValueError(
                    f"{where} holds {dot}{name}, a {type(leaf).__name__} that is none of its "
                    "modules, whose numbers would stay as they are: register it, as in a "
                    "ModuleList"
                )


def _registered_in(module: nn.Module) -> set[int]:
    """Return the ids of all parts, parameters and buffers, which a module may hold twice.

    An ``nn.LSTM`` has a list of its parameters.
    """
    return {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}


def _attributes_of(part: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the tensors and modules that are plain attributes of a module, or stand in one."""
    seen: set[int] = set()
    for name, value in vars(part).items():
        if name not in _OF_EVERY_MODULE:
            yield from _tensors_in(name, value, seen)


def _tensors_in(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the tensors and modules in containers and in objects of a user, with their places.

    A NumPy array counts as a tensor in its memory.

    Args:
        seen: ids of objects that were looked into.
    """
    for at, leaf in pytree.tree_flatten_with_path(value)[0]:
        where = f"{name}{pytree.keystr(at)}"
        if isinstance(leaf, Tensor | nn.Module):
            yield where, leaf
        elif _is_array_of_numbers(leaf):
            yield where, torch.from_numpy(leaf)
        elif _is_an_object(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            for own, each in _directly_held_by(leaf):
                if _is_long(each):
                    continue
                for at, held in _tensors_in(f"{where}.{own}", each, seen):
                    if isinstance(held, nn.Module):  # it is copied with the object
                        for path, tensor in (*held.named_parameters(), *held.named_buffers()):
                            yield f"{at}.{path}", tensor
                    else:
                        yield at, held


def _is_long(value: Any) -> bool:
    """Return whether a value is a container of so many items that nobody looks through them."""
    return isinstance(value, list | tuple | dict | deque) and len(value) > _MOST_ITEMS


def _is_array_of_numbers(value: Any) -> bool:
    """Return whether a value is a NumPy array of floats or integers that torch takes."""
    numpy = sys.modules.get("numpy")  # torch runs without it
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    kind = value.dtype
    has_whole_steps = all(step >= 0 and step % kind.itemsize == 0 for step in value.strides)
    return kind.kind in "fi" and kind.isnative and kind.itemsize <= 8 and has_whole_steps


def _is_an_object(value: Any) -> bool:
    """Return whether a value is an object of a user's class, such as a cache of keys."""
    is_plain = isinstance(value, _WITHOUT_TENSORS) or inspect.isroutine(value)
    return not is_plain and _is_of_a_user(value) and not isinstance(value, functools.partial)


def _numbers_of_objects(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and containers that are attributes of a user's object, with names."""
    if not _is_an_object(value) or id(value) in seen:
        return
    seen.add(id(value))
    for own, each in _directly_held_by(value):
        if _is_number(each) and not _is_long(each):
            yield f"{name}.{own}", each
        yield from _numbers_of_objects(f"{name}.{own}", each, seen)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number or a container.

    A bool or a text is a switch: the caller of a model sets it to choose what runs.
    """
    return isinstance(value, list | tuple | dict) or type(value) in (int, float)


def known_numbers(module: nn.Module) -> list[str]:
    """Return the names of what has numbers in a module, and is no parameter.

    Floating-point buffers, plain attributes, and modules that are not registered.
    """
    registered = _registered_in(module)
    found = []
    for name, tensor in module.named_buffers():
        if tensor.is_floating_point() and tensor.numel():
            found.append(f"buffer {name}")
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for name, leaf in _attributes_of(part):
            is_module = isinstance(leaf, nn.Module)
            if id(leaf) not in registered and (is_module or leaf.is_floating_point()):
                found.append(f"{dot}{name}")
    return found


def _refuse_captured_modules(part: nn.Module, has: str) -> None:
    """Refuse hooks, and a ``forward`` of a module's own, that hold a module.

    A copy of the module has the same functions, which hold what was there before.
    """
    for name, value in vars(part).items():
        functions = list(value.values()) if isinstance(value, dict) else [value]
        for function in functions:
            if not inspect.isfunction(function) or not _is_of_a_user(function):
                continue
            for held, leaf in _held_by(function):
                if isinstance(leaf, nn.Module):
                    raise ValueError(
                        f"{has}{name.strip('_')}, a function that holds {held}, a "
                        f"{type(leaf).__name__}, whose numbers would stay as they are: make it a "
                        "method, or a module"
                    )


def captured_by(function: Any) -> dict[str, Tensor]:
    """Return the tensors that a function holds, which are known numbers to it.

    A generator of random numbers counts by its state.

    Raises:
        ValueError: it is compiled, or holds a module or an optimiser.
    """
    found: dict[str, Tensor] = {}
    if is_compiled(function):
        raise ValueError(
            "the function is compiled, and a dispatch mode sees no compiled code: give the "
            "function as it was, or the graph of a stage that gt_compile records"
        )

    for name, value in _held_by(function):
        if isinstance(value, nn.Module | torch.optim.Optimizer) or is_compiled(value):
            kind = f"a {type(value).__name__}"
            if is_compiled(value):
                kind = "compiled code"
            raise ValueError(
                f"the function holds {name}, {kind}, whose numbers would stay as they are: "
                "make it an input"
            )
        if isinstance(value, torch.Generator):
            found[f"captured {name}"] = value.get_state()
        # Tensors of other classes have operators of their own, and so no elements.
        if type(value) in (Tensor, nn.Parameter):
            found[f"captured {name}"] = value

    return found


def tensors_held_by(function: Any) -> dict[str, Tensor]:
    """Return the tensors that a function, a module or a graph can reach besides its inputs."""
    found: dict[str, Tensor] = {}
    for name, value in [("", function), *_held_by(function)]:
        if isinstance(value, Tensor):
            found[name] = value
        if not isinstance(value, nn.Module):
            continue
        dot = f"{name}." if name else ""
        for path, part in value.named_modules():
            at = f"{dot}{path}." if path else dot
            own = {**dict(part.named_parameters(recurse=False)), **dict(_attributes_of(part))}
            for tensor_name, leaf in (own | dict(part.named_buffers(recurse=False))).items():
                if isinstance(leaf, Tensor):
                    found[at + tensor_name] = leaf
    return found


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function can reach, by name: also in containers, objects and other functions.

    An object also reaches what its class gives it: attributes and methods whose names one of
    these functions reads, and methods that Python calls by itself.
    """
    seen: set[int] = set()
    names = set(_CALLED_BY_PYTHON) | _names_in_function(function)
    objects: list[tuple[str, Any]] = [("self", function)]
    left = list(_directly_held_by(function))
    if isinstance(function, nn.Module):
        left += _tensors_read_by_classes(function)
    while True:
        if not left:
            # Last, as each function that was found may read more names.
            left = _held_by_classes(objects, names, seen)
        if not left:
            return
        name, value = left.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        names |= _names_in_function(value)
        if isinstance(value, list | tuple | set | frozenset | deque):
            left += [(f"{name}[{place}]", each) for place, each in enumerate(value)]
        elif isinstance(value, dict):
            left += [(f"{name}[{key!r}]", each) for key, each in value.items()]
        elif inspect.ismethod(value):
            left += [(f"{name}.self", value.__self__), (name, value.__func__)]
        elif not isinstance(value, nn.Module | Tensor) and _is_of_a_user(value):
            left += [(f"{name}.{own}", each) for own, each in _directly_held_by(value)]
            objects.append((name, value))
        yield name, value


def _tensors_read_by_classes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the global tensors that the ``forward`` of a user's modules reads."""
    found = []
    for cls in {type(part): None for part in module.modules()}:
        forward = vars(cls).get("forward")
        if inspect.isfunction(forward) and not _is_of_a_library(cls):
            for name, value in _globals_of(forward).items():
                if isinstance(value, Tensor):
                    found.append((name, value))
    return found


def _held_by_classes(
    objects: Sequence[tuple[str, Any]], names: set[str], seen: set[int]
) -> list[tuple[str, Any]]:
    """Return what classes of a user give to objects under ``names``, and was not ``seen`` yet."""
    found = []
    for name, value in objects:
        for cls in type(value).__mro__:
            if _is_of_a_library(cls):
                continue
            for key in names & vars(cls).keys():
                held = vars(cls)[key]
                if isinstance(held, property):
                    held = held.fget
                held = getattr(held, "__func__", held)  # of a class method, or a static one
                if id(held) not in seen:
                    found.append((f"{name}.{key}", held))
    return found


_CALLED_BY_PYTHON = (
    *("__call__", "__getitem__", "__setitem__", "__getattr__", "__iter__", "__next__"),
    *("__enter__", "__exit__", "__len__", "__bool__", "__add__", "__mul__", "__matmul__"),
)
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, threading.local, UserDict, UserList)
"""Classes of Python that users keep tensors in."""


def _names_in_function(value: Any) -> set[str]:
    """Return the names that a function reads; none of anything else."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return _names_in(value.__code__) if inspect.isfunction(value) else set()


def _is_of_a_user(value: Any) -> bool:
    """Return whether a function, or the class of an object, belongs to the user.

    What belongs to a library is not followed: it holds much, such as tables of operators, and no
    numbers of the program.
    """
    of = value if inspect.isroutine(value) else type(value)
    if isinstance(value, (functools.partial, *_HOLDERS)):
        return True
    if isinstance(value, type | types.ModuleType):
        return False
    return not _is_of_a_library(of)


def _is_of_a_library(of: Any) -> bool:
    """Return whether a function, class or module is one of a library."""
    name = of.__name__ if isinstance(of, types.ModuleType) else getattr(of, "__module__", None)
    package = (name or "builtins").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


_LIBRARIES = ("torch", "numpy", "pytest", "_pytest", "pytest_gtrainer", "pluggy", "triton")


def _directly_held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, is bound to, has by default, or reads of its module.

    For an object these are its attributes.
    """
    while isinstance(function, functools.partial):
        for place, value in enumerate(function.args):
            yield f"argument {place}", value
        yield from function.keywords.items()
        function = function.func
    if inspect.ismethod(function):
        yield "self", function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        yield from inspect.getclosurevars(function).nonlocals.items()
        yield from _globals_of(function).items()
        for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                yield name, parameter.default
    elif not isinstance(function, nn.Module | type | types.ModuleType):
        yield from getattr(function, "__dict__", {}).items()
        yield from _slots_of(function).items()


def _slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has in slots."""
    found = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            is_slot = inspect.ismemberdescriptor(slot) and not name.startswith("__")
            if is_slot and not _is_of_a_library(cls) and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function may read: also in functions and lambdas inside of it.

    Attributes of a user's classes and modules count too, such as ``settings.SCALE``.
    """
    names = _names_in(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in list(found.items()):
        if isinstance(value, type | types.ModuleType) and not _is_of_a_library(value):
            for attribute in names & vars(value).keys():
                found[f"{name}.{attribute}"] = vars(value)[attribute]
    return found


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the code inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def restorer_of_contents(function: Any) -> Callable[[], None]:
    """Return a function that restores the contents of all objects that ``function`` holds.

    A call may replace a tensor of an object, of a list, or of a closure. The objects are the
    user's, so the next run, and the user, would find what was put there.
    """
    undo: list[Callable[[], object]] = []
    for _, value in [("", function), *_held_by(function)]:
        undo += _undo_of(value)

    def put_back() -> None:
        for each in undo:
            each()

    return put_back


def _undo_of(value: Any) -> list[Callable[[], object]]:
    """Return functions that put back what is in a container, a function or an object now."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, torch.Generator):
        return [functools.partial(value.set_state, value.get_state())]
    if isinstance(value, list | dict | set | deque):
        return [functools.partial(_refill, value, value.copy())]
    if isinstance(value, nn.Module | Tensor) or not _is_of_a_user(value):
        return []
    undo: list[Callable[[], object]] = []
    if inspect.isfunction(value):
        for cell in filter(_is_assigned, value.__closure__ or ()):
            undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        own_names = _globals_of(value).keys() & value.__globals__.keys()
        named = {name: value.__globals__[name] for name in own_names}
        return [*undo, functools.partial(value.__globals__.update, named)]
    own = getattr(value, "__dict__", {})
    undo.append(functools.partial(_refill, own, dict(own)))
    for name, attribute in _slots_of(value).items():
        # Not the class's own, which a frozen dataclass refuses.
        undo.append(functools.partial(object.__setattr__, value, name, attribute))
    return undo


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


class HeldState:
    """The tensors that a call may write to besides its inputs, as they are before it.

    These are parameters, buffers and plain attributes of the modules that the function is, holds or
    is given; tensors that it holds; and gradients of all of them. Tensors of other classes, such as
    DTensors, are left alone, and so are tensors that replace them.
    """

    def __init__(self, function: Any, inputs: Sequence[Any]) -> None:
        """Keep what ``function`` and the leaves ``inputs`` hold."""
        others = {}
        for place, leaf in enumerate(inputs):
            if not isinstance(leaf, Tensor):
                others[f"input {place}"] = leaf
        self._function = function
        self._holder = functools.partial(function, **others)
        self._put_back_contents = restorer_of_contents(self._holder)
        self._places = list(self._find())
        self._numbers: dict[int, Tensor] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        for _, _, _, tensor in self._places:
            if tensor is None or not has_storage(tensor) or id(tensor) in self._numbers:
                continue
            self._numbers[id(tensor)] = tensor.detach().clone()
            if tensor.is_leaf:
                self._gradients[id(tensor)] = tensor, tensor.grad
                # A backward adds to the gradient in place, so the call gets a copy.
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.clone()

    def _find(self) -> Iterator[tuple[str, dict[str, Any] | None, str, Tensor | None]]:
        """Yield each tensor, or None where one may be put, with its name, container and key."""
        for where, value in [("", self._function), *_held_by(self._holder)]:
            if isinstance(value, nn.Module):
                for path, part in value.named_modules(prefix=where):
                    dot = f"{path}." if path else ""
                    kinds = {"": parameters_of(part), "buffer ": buffers_of(part)}
                    for kind, container in (kinds | {"attribute ": vars(part)}).items():
                        for key, held in container.items():
                            if held is None or isinstance(held, Tensor):
                                yield f"{kind}{dot}{key}", container, key, held
                    for name, leaf in _attributes_of(part):
                        if isinstance(leaf, Tensor) and name not in vars(part):  # in a list
                            yield f"attribute {dot}{name}", None, "", leaf
            elif isinstance(value, Tensor):
                yield f"captured {where}", None, "", value

    def written(self) -> dict[str, Tensor]:
        """Return the tensors and gradients that have changed, by name."""
        before = {name: tensor for name, _, _, tensor in self._places}
        found: dict[str, Tensor] = {}
        for name, _, _, tensor in self._find():
            known = before.get(name)
            if not _is_empty_or_has_storage(tensor) or not _is_empty_or_has_storage(known):
                continue
            if tensor is None:
                continue
            if known is None or _differ(tensor, self._numbers[id(known)]):
                found[f"{name}, which is written to"] = tensor
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is None or not has_storage(gradient):
                continue
            _, at_first = self._gradients.get(id(tensor), (tensor, None))
            if at_first is None or _differ(gradient, at_first):
                found[f"gradient of {name}"] = gradient
        return found

    def put_back(self) -> None:
        """Put the tensors, their numbers and their gradients back in their places."""
        self._put_back_contents()
        known = {(id(container), key) for _, container, key, _ in self._places}
        for _, container, key, tensor in list(self._find()):
            is_new = container is not None and (id(container), key) not in known
            if container is not None and is_new and tensor is not None:
                del container[key]
        for _, container, key, tensor in self._places:
            ours = container is not None and _is_empty_or_has_storage(container.get(key))
            if container is not None and ours and _is_empty_or_has_storage(tensor):
                container[key] = tensor
            if tensor is not None and id(tensor) in self._numbers:
                numbers = self._numbers[id(tensor)]
                if _differ(tensor, numbers):
                    tensor.detach().copy_(numbers)
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient


def _is_empty_or_has_storage(tensor: Tensor | None) -> bool:
    """Return whether this is an empty place or a tensor of numbers in memory."""
    return tensor is None or has_storage(tensor)


def _differ(one: Tensor, other: Tensor) -> bool:
    return compare([one], [other]).outcome == "different"


def _is_assigned(cell: types.CellType) -> bool:
    """Return whether a closed-over name has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def tensors_of_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are attributes of a module and of its submodules, of any kind."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for path, part in model.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def _copy_computed(value: Any, memo: dict[int, Any]) -> None:
    """Note copies of the tensors that a module keeps of a run, for ``deepcopy``.

    It refuses to copy what autograd has computed.
    """
    if isinstance(value, nn.Module):
        for tensor in tensors_of_model(value).values():
            if not tensor.is_leaf and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()


def copy_of(values: list[Any]) -> list[Any]:
    """Return copies of the tensors and modules in a structure; what is shared stays shared.

    Gradients that a module has are copied, too, which ``deepcopy`` leaves behind.
    """
    memo: dict[int, Any] = {}

    have_attributes: set[int] = set()

    def copy_attributes(own: Tensor, new: Tensor) -> None:
        if id(own) in have_attributes:
            return  # an attribute may be its own owner
        have_attributes.add(id(own))
        # A parameter's own ``deepcopy`` leaves them behind.
        for name in vars(own).keys() - vars(new).keys():
            setattr(new, name, pytree.tree_map(copied_with_objects, vars(own)[name]))

    def copied_with_objects(leaf: Any) -> Any:
        return copy.deepcopy(leaf, memo) if _is_an_object(leaf) else copied(leaf)

    def copied(leaf: Any) -> Any:
        # ``deepcopy`` refuses tensors that autograd has computed.
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            leaf = leaf.detach()
        if not isinstance(leaf, nn.Module | Tensor):
            return leaf
        _copy_computed(leaf, memo)
        made = copy.deepcopy(leaf, memo)
        if isinstance(leaf, nn.Module):
            for own, new in zip(leaf.parameters(), made.parameters(), strict=True):
                if own.grad is not None and new.grad is None:
                    new.grad = copy.deepcopy(own.grad, memo)
                copy_attributes(own, new)
        elif isinstance(leaf, nn.Parameter):
            copy_attributes(leaf, made)
        return made

    return pytree.tree_map(copied, values)


def check_outputs(outputs: Any) -> None:
    """Refuse results that are no tensors and may hold some."""
    for leaf in pytree.tree_leaves(outputs):
        if not isinstance(leaf, (Tensor, *_WITHOUT_TENSORS)):
            name = type(leaf).__name__
            raise ValueError(
                f"the function returns a {name}, in which nothing can be compared: return tensors, "
                f"in tuples, lists and dicts, or register {name} as a pytree"
            )
