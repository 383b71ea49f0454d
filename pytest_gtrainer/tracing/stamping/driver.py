"""Trace the cut model, prove, stamp: what ``trace_step(..., repeat_layers=)`` calls.

Python state that a step changes makes a call depend on how many came before it, and nothing can be proven. Looked at is
what can be reached from the modules, their classes, and the step: attributes, containers, objects, what functions close
over, globals that they name, their own module's and those of modules that they name. All of it is put back. What cannot
be seen: state in extensions in C, in files, in modules of torch and of Python, and behind a name that is computed.
"""

import functools
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_modules import finished
from pytest_gtrainer.tracing.model import ModelState
from pytest_gtrainer.tracing.stamping.copying import stamp
from pytest_gtrainer.tracing.stamping.outline import check_outline, recorded_calls
from pytest_gtrainer.tracing.stamping.runs import FullLayers, Names, RepeatedLayers, find_runs
from pytest_gtrainer.tracing.stamping.signature import INSIDE, TABLES
from pytest_gtrainer.tracing.stamping.units import Units
from pytest_gtrainer.tracing.stamping.verdict import Refused, first_difference

OF_TORCH = (torch.Tensor, torch.Size, torch.dtype, torch.device)
NO_STATE = (int, float, complex, str, bytes, *OF_TORCH, types.ModuleType, logging.Logger)
OPAQUE = ("_contextvars", "_io", "_queue", "array")
FOREIGN = ("torch", "pytest_gtrainer", "builtins")


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A step's graph, and the placements of its gradients, in the order of its outputs."""

    gm: fx.GraphModule
    gradient_placements: tuple[Any, ...]


Trace = Callable[[], TracedModel]  # traces the step of the model as it stands


def stamped_graph(
    model: nn.Module, step: Callable[..., Any], trace: Trace, state: ModelState, ignore: Sequence[str]
) -> tuple[TracedModel | None, RepeatedLayers]:
    """The step's graph from a cut model, None where nothing is proven alike; and what was done. ``trace`` traces
    ``step`` of ``model`` as it stands, whose ``state`` names inputs and outputs. Attributes in ``ignore`` are out of
    sight meanwhile. Runs that a proof refuses are left out, the others tried again."""
    ignored = _Ignored(model, ignore)
    with ignored.showing(ignored.out_of_sight):
        runs, full = find_runs(model)
        while runs:
            names = Names(model, runs)
            kept = unchanged_state(model, step, names.slots)
            try:
                return _stamped(names, kept, trace, state, ignored), RepeatedLayers(tuple(runs), tuple(full))
            except Refused as refused:
                where = [run for run in runs if run.container == refused.module] or runs
                full += [FullLayers(run.container, refused.reason) for run in where]
                runs = [run for run in runs if run not in where]
    return None, RepeatedLayers((), tuple(full))


class Unread:
    """Stands for an attribute that only counts layers: may be passed on; all else that numbers do is refused."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self, *given: Any) -> Any:
        raise Refused("", f"`{self.name}`, which ignore= names, is read")


for _operation in {*vars(int), *vars(str)} - {"__new__", "__doc__", "__getattribute__", "__getnewargs__", "__sizeof__"}:
    if _operation.startswith("__"):
        setattr(Unread, _operation, Unread.refuse)


class _Ignored:
    """The attributes of these names, of all modules, with their values; ValueError if they do not count layers."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.places = [(vars(module), name) for module in model.modules() for name in names if name in vars(module)]
        for name in names:
            kinds = {type(table[name]) for table, own in self.places if own == name}
            if kinds not in ({int}, {str}):  # of another type it may be told without being read
                types = " and ".join(sorted(kind.__name__ for kind in kinds))
                told = f"it is of type {types}" if kinds else "no module has it"
                raise ValueError(f"ignore={name!r}: an attribute that counts layers is an int, or a str, and {told}")
        self.values = [table[name] for table, name in self.places]
        unread = {name: Unread(name) for name in names}
        self.out_of_sight = [unread[name] for _, name in self.places]

    @contextmanager
    def showing(self, values: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for (table, name), value in zip(self.places, values, strict=True):
                stack.callback(table.__setitem__, name, table[name])
                table[name] = value
            yield


def _stamped(
    names: Names, kept: AbstractContextManager[None], trace: Trace, state: ModelState, ignored: _Ignored
) -> TracedModel:
    with kept:
        with names.cut(), recorded_calls(names) as calls:
            small = _traced(trace)
            if ignored.places:  # what asks for its type, say, is not refused, and sees another one
                with ignored.showing(ignored.values):
                    as_it_is = _traced(trace)
                if found := first_difference(as_it_is.gm.graph, small.gm.graph):
                    raise Refused("", f"without what ignore= names the graph is another: {found}")
        check_outline(names, calls, lambda: _traced(trace).gm)
    graph = stamp(Units(small.gm.graph, names), state.trainable)
    inputs = [node.meta["gt_input"] for node in graph.find_nodes(op="placeholder")]
    if [given["fqn"] for given in inputs if given["kind"] != "input"] != list(state.fqns):
        raise Refused("", "parameters and buffers of the layers are not registered one layer after another")
    outputs = zip(small.gm.graph.output_node().meta["gt_outputs"][1:], small.gradient_placements, strict=True)
    placed = {name: placements for fqn, placements in outputs for _, name in names.stands_for(fqn)}
    attributes = {str(node.target): getattr(small.gm, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    return TracedModel(finished(graph, small.gm, attributes), tuple(placed[fqn] for fqn in state.trainable))


def _traced(trace: Trace) -> TracedModel:
    try:
        return trace()
    except Refused:
        raise
    except Exception as error:  # whatever user code makes of fewer layers
        reason = f"with fewer layers, or none inside, the step cannot be traced: {type(error).__name__}: {error}"
        raise Refused("", reason) from error


@dataclass(frozen=True, slots=True)
class _Held:
    """What ``target`` holds, and what it held: a container, or names of an object (``put`` writes one)."""

    where: str
    target: Any
    content: Any
    put: Callable[[Any, str, Any], None] | None = None

    def now(self) -> Any:
        if self.put is None:
            return self.target.copy()
        if self.put is _fill:
            return {"": self.target.copy()}
        held = vars(self.target) if isinstance(self.target, type) else self.target  # not through descriptors
        if isinstance(held, dict | types.MappingProxyType):
            return {name: held.get(name) for name in self.content}
        return {name: getattr(held, name, None) for name in self.content}

    def change(self) -> str | None:
        now, before = self.now(), self.content
        if isinstance(now, dict):
            names = [name for name in {**before, **now} if (name in now) != (name in before)]
            names += [name for name in now if name in before and not _same(now[name], before[name])]
            return f"{self.where}{names[0]}" if names else None
        return None if len(now) == len(before) and all(map(_same, now, before)) else self.where

    def restore(self) -> None:
        if self.put is not None:
            for name, value in self.content.items():
                if not _same(self.now()[name], value):
                    self.put(self.target, name, value)
        elif self.change() is not None:
            self.target.clear()
            (self.target.update if isinstance(self.target, dict | set) else self.target.extend)(self.content)


def _same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    return one.tobytes() == other.tobytes() if _is_array(one) else isinstance(one, int | float | str) and one == other


@contextmanager
def unchanged_state(model: nn.Module, step: Callable[..., Any], layers: Iterable[nn.Module]) -> Iterator[None]:
    """``step`` runs several times inside; all state is put back, and Refused if it, or a random state, had changed, or
    if something holds some of ``layers``, which may be told apart by it."""
    numpy, held = sys.modules.get("numpy"), list(_watched(model, step, layers))
    drawn, by_numpy = (random.getstate(), torch.get_rng_state()), numpy.random.get_state() if numpy is not None else ()
    try:
        yield
        changed = next(filter(None, (each.change() for each in held)), None)
        same = random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
        same &= numpy is None or all(map(_same, numpy.random.get_state(), by_numpy))
    finally:
        for each in held:
            each.restore()
        random.setstate(drawn[0])
        torch.set_rng_state(drawn[1])
        if numpy is not None:
            numpy.random.set_state(by_numpy)
    if changed is not None:
        raise Refused("", f"the step changes {changed}")
    if not same:
        raise Refused("", "the step draws random numbers that are not in its graph")


def _watched(model: nn.Module, step: Callable[..., Any], layers: Iterable[nn.Module]) -> Iterator[_Held]:
    """Everything that holds something and can be reached."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    of_modules = [(f"the attribute {fqn}.".replace(" .", " "), module) for fqn, module in model.named_modules()]
    todo = deque([*of_modules, ("what the step holds or names: ", step)])
    seen: set[int] = set()
    while todo:
        where, value = todo.popleft()
        if value is None or isinstance(value, NO_STATE) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set):
            items = [*value, *value.values()] if isinstance(value, dict) else value
            meant = (item() if isinstance(item, weakref.ref) else item for item in items)
            if any((item if type(item) is int else id(item)) in inside for item in meant):
                raise Refused("", f"{where.rstrip('.: ')} holds layers, or their ids, which tell them apart")
        for held, inner in _looked_into(where, value):
            if held is not None:
                yield held
            todo += inner


def _looked_into(where: str, value: Any) -> Iterator[tuple[_Held | None, list[tuple[str, Any]]]]:
    kind, home = type(value), str(type(value).__module__)  # a descriptor, of some types of C
    if isinstance(value, dict | list | set | deque | bytearray):
        items = [*value.values()] if isinstance(value, dict) else [*value]
        yield _Held(where, value, value.copy()), [(where, item) for item in items]
    elif isinstance(value, tuple | frozenset):
        yield None, [(where, item) for item in value]
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            content: dict[str, Any] = {}
            with suppress(ValueError):  # a cell that is not filled yet
                content["cell_contents"] = cell.cell_contents
            yield _Held(where, cell, content, setattr), [(where, each) for each in content.values()]
        if not _is_foreign(str(value.__globals__.get("__name__"))):
            yield from _named_of(value.__globals__, where, _names_in(value.__code__))
            yield None, [(where, vars(value))]
        yield None, [(where, each) for each in (value.__defaults__, value.__kwdefaults__)]
    elif kind in INSIDE:
        yield None, [(where, getattr(value, name)) for name in INSIDE[kind]]
    elif isinstance(value, type):
        if not _is_foreign(str(value.__module__)):
            run = {name for name, held in vars(value).items() if isinstance(held, types.FunctionType)} - {"__init__"}
            named = {name: held for name, held in vars(value).items() if name in run or not name.startswith("__")}
            inner = [(where, held) for held in (*named.values(), *value.__bases__)]
            yield _Held(f"the attribute of the class {value.__qualname__}.", value, named, setattr), inner
    elif home in OPAQUE or (hasattr(kind, "__next__") and home in ("builtins", "itertools")):
        what = f"a {home}.{kind.__name__}" if home in OPAQUE else f"an iterator ({kind.__name__})"
        raise Refused("", f"{where.rstrip('.: ')} holds {what}, whose state cannot be seen")
    elif _is_array(value):
        yield _Held(where, value, {"": value.copy()}, _fill), []
    is_foreign = home.partition(".")[0] in FOREIGN or kind in INSIDE or isinstance(value, type)
    if isinstance(value, nn.Module) or not is_foreign:
        own = getattr(value, "__dict__", {})
        of_values = [(where + name, held) for name, held in own.items() if name not in TABLES]
        yield _Held(where, own, dict(own)), [*of_values, (f"what the class {kind.__qualname__} names: ", kind)]
        slots = {name: getattr(value, name) for name in _slots_of(kind.__mro__) if hasattr(value, name)}
        in_slots = [(where + name, held) for name, held in slots.items()]
        yield _Held(where, value, slots, setattr) if slots else None, in_slots


def _names_in(code: types.CodeType) -> list[str]:
    """The globals and attributes that a function names, those inside it too."""
    inside = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*code.co_names, *(name for each in inside for name in _names_in(each))]


def _named_of(table: dict[str, Any], where: str, names: list[str]) -> Iterator[tuple[_Held, list[Any]]]:
    """What a module holds by these names, and by them again what modules among it hold."""
    tables = [table]
    for table in tables:
        named = {name: table[name] for name in names if name in table}
        told = f"the global {table.get('__name__')}."
        yield _Held(told, table, named, dict.__setitem__), [(where, each) for each in named.values()]
        modules = [each for each in named.values() if isinstance(each, types.ModuleType)]
        inner = [vars(each) for each in modules if not _is_foreign(each.__name__)]
        tables += [each for each in inner if not any(each is other for other in tables)]


def _fill(array: Any, name: str, value: Any) -> None:
    array[...] = value


@functools.cache
def _slots_of(classes: tuple[type, ...]) -> list[str]:
    told = [vars(cls).get("__slots__", ()) for cls in classes]
    return [name for slots in told for name in ([slots] if isinstance(slots, str) else slots)]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_foreign(module: str) -> bool:
    """Whether what a module holds is not state of the user's: caches of Python and torch change, and decide nothing."""
    return (name := module.partition(".")[0]) in FOREIGN or name in sys.stdlib_module_names - {"__main__"}
