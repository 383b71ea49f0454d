"""How a text shows what a graph calls and holds that is no tensor: modules, functions, classes, objects, kernels.

Equal things have equal descriptions, in every process. The *description* of a value is a text in Python's syntax:
literals as they are, tensors and arrays by type and content, functions by name and code, objects by class and state. A
module's stands in the text, ``Dropout(inplace=False, p=0.1)``; others by their digest. What cannot be described, such
as an object of a C extension whose ``repr`` is an address, is a ``CannotShow``.

Functions and classes of torch and of Python's standard library are described by their names: the header says which
torch made a text, and a digest of their code would change with each release. A name is believed only where it leads
back to the value, and where the code lies in a file of torch or of the standard library.
"""

import ast
import enum
import functools
import hashlib
import inspect
import itertools
import linecache
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_text import hooks_of
from pytest_gtrainer._torch.values import (
    SYMBOLIC,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    buffers_of,
    modules_of,
    parameters_of,
)
from pytest_gtrainer.graph.nodes import spell_dtype
from pytest_gtrainer.graphtext.literals import PLAIN, spell_literal, tensor_content
from pytest_gtrainer.graphtext.operators import word
from pytest_gtrainer.graphtext.sections import is_word

_DEEPEST = 40
_HEAP = 1 << 9
"""The flag of a class that a ``class`` statement made."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module holds: its tables of parameters and hooks, and ``training``."""
_FROZEN = "<frozen "
"""The file of a module that is part of the interpreter."""
_BY_NAME = frozenset({"torch", "numpy", "sympy", *sys.stdlib_module_names, "__future__"})
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)


class CannotShow(ValueError):
    """A value that no text can show; the message says which, and why."""


def description(value: Any) -> str:
    """Return the description of a value; raises CannotShow if it has none.

    >>> description({"p": (0.5, None)})
    "{'p': (0.5, None)}"
    """
    return _Describer().of(value)


def digest_of(value: Any) -> str:
    """Return the digest of a value's description; raises CannotShow if it has none."""
    return hashlib.sha256(description(value).encode(errors="backslashreplace")).hexdigest()[:12]


def name_of(value: Any) -> str:
    """Return what a reader calls a value: a function or class by its qualified name, another object by its class.

    >>> name_of(name_of), name_of(CannotShow("x"))
    ('pytest_gtrainer.graphtext.identity.name_of', 'CannotShow')
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (type, *_FUNCTIONS)):
        return qualified_name(value)
    return type(value).__name__


def qualified_name(value: Any) -> str:
    """Return the module and the qualified name of a function or class; a method has the class that it is bound to."""
    home = getattr(value, "__module__", None) or ""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, type):
        return f"{qualified_name(owner)}.{word(getattr(value, '__name__', name))}"
    return ".".join(word(part) for part in [*home.split("."), *str(name).split(".")] if part)


def is_known_by_name(value: Any) -> bool:
    """Return whether a function or class says by its name what it does: one of torch or of the standard library."""
    if isinstance(value, (*_OPERATORS, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return True
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType):
        in_module = (
            owner is None
            or isinstance(owner, types.ModuleType)
            or type(owner).__name__ == "PyCapsule"
        )
        return in_module or (isinstance(owner, type) and is_known_by_name(owner))
    if owner is not None or not _is_of_torch(value):
        return False
    # a name can be copied, as `functools.wraps` does, and a closure of torch's is not found by its name
    found: Any = sys.modules[value.__module__]
    for part in value.__qualname__.split("."):
        found = inspect.getattr_static(found, part, None)
    return found is value or getattr(found, "__func__", None) is value


def _is_of_torch(value: Any) -> bool:
    """Return whether a class or function belongs to torch or the standard library, by name and by file."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or not isinstance(value, type | types.FunctionType):
        return False
    if module.__name__.partition(".")[0] not in _BY_NAME:
        return False
    files = [getattr(module, "__file__", None) or _FROZEN]
    if isinstance(value, types.FunctionType):
        files.append(value.__code__.co_filename)
    return all(file.startswith(_FROZEN) or _is_file_of_torch(file) for file in files)


@functools.lru_cache(maxsize=1 << 12)
def _is_file_of_torch(file: str) -> bool:
    """Return whether a file lies below the standard library, or in a package that is described by names."""
    path = os.path.realpath(file)
    for folder in ("site-packages", "dist-packages"):
        _, is_package, inside = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if is_package:
            return inside.split(os.sep)[0] in _BY_NAME
    own = [
        os.path.dirname(torch.__file__),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    ]
    return path.startswith(tuple(os.path.realpath(folder) + os.sep for folder in own))


def kernel_description(kernel: Any) -> str:
    """Return the description of a Triton kernel: its name, code, and the settings that autotuning chooses from."""
    parts = []
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        settings = {
            name: vars(kernel)[name]
            for name in ("configs", "values", "kwargs")
            if name in vars(kernel)
        }
        parts.append(f"{type(kernel).__name__}({description(settings)})")
        kernel = kernel.fn
    return " of ".join([*parts, description(kernel)])


def function_under(kernel: Any) -> Any:
    """Return the Python function of a Triton kernel, below what tunes and compiles it."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


class _Describer:
    """Describes one value; a value that holds itself is described once."""

    def __init__(self) -> None:
        self._open: list[int] = []  # ids of what is being described, outermost first

    def of(self, value: Any) -> str:
        """The description of a value."""
        if (known := spell_literal(value)) is not None:
            return known
        if id(value) in self._open:
            return f"up({len(self._open) - self._open.index(id(value))})"
        if len(self._open) > _DEEPEST:
            raise CannotShow(
                f"what {name_of(value)} belongs to is nested more than {_DEEPEST} deep"
            )
        self._open.append(id(value))
        try:
            return self._new(value)
        finally:
            self._open.pop()

    def _call(self, name: str, named: Mapping[str, Any], *positional: str) -> str:
        """``Dropout(inplace=False, p=0.1)``: as Python would write the call, named values in their order."""
        arguments = [*positional]
        for are_words, keys in itertools.groupby(named, is_word):
            if are_words:
                arguments += [f"{key}={self.of(named[key])}" for key in keys]
            else:
                arguments.append(f"**{self.of({key: named[key] for key in keys})}")
        return f"{name}({', '.join(arguments)})"

    def _new(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name or value.value}"
        for kinds, describe in self._by_kind:
            if isinstance(value, kinds):
                return describe(value)
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            return self._array(value)
        return self._object(value)

    @functools.cached_property
    def _by_kind(self) -> list[tuple[tuple[type, ...], Callable[[Any], str]]]:
        """How values of a kind are described; the first that fits counts."""
        return [
            ((nn.Parameter,), functools.partial(_tensor, shows_content=False)),
            ((torch.Tensor,), _tensor),
            ((list, tuple, set, frozenset, dict, types.MappingProxyType), self._container),
            (
                (functools.partial,),
                lambda one: f"partial({self.of((one.func, one.args, one.keywords))})",
            ),
            ((weakref.ReferenceType,), lambda one: f"ref({self.of(one())})"),
            ((types.ModuleType,), lambda one: str(one.__name__)),
            ((OpOverloadPacket, sympy.Basic, *SYMBOLIC), str),
            ((type,), self._class),
            ((*_FUNCTIONS, staticmethod, classmethod), self._function),
            ((property,), lambda one: f"property({self.of((one.fget, one.fset))})"),
            ((nn.Module,), self._module),
        ]

    def _container(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, dict | types.MappingProxyType):
            inner = (
                "{"
                + ", ".join(f"{self.of(key)}: {self.of(item)}" for key, item in value.items())
                + "}"
            )
        elif isinstance(value, set | frozenset):
            inner = "{" + ", ".join(sorted(map(self.of, value))) + "}"
        else:
            items = [self.of(item) for item in value]
            comma = "," if len(items) == 1 else ""
            inner = (
                f"[{', '.join(items)}]"
                if isinstance(value, list)
                else f"({', '.join(items)}{comma})"
            )
        is_plain = kind in (dict, list, tuple, set) or kind.__module__.startswith(
            "torch.fx.immutable"
        )
        if is_plain:
            return inner
        return self._call(self._class(kind), _state_of(value), inner)

    def _array(self, value: Any) -> str:
        """An array of NumPy, or one of its numbers, by its bytes; an array of objects by these."""
        shape, dtype = list(value.shape), value.dtype
        if dtype.hasobject:
            return f"{type(value).__name__}({shape}, {self.of(value.tolist())})"
        return f"{type(value).__name__}({shape}, {dtype.descr}, {hashlib.sha256(value.tobytes()).hexdigest()})"

    def _class(self, value: type) -> str:
        """A class by its name, the code of its methods, and its plain attributes."""
        name = qualified_name(value)
        if is_known_by_name(value):
            return name
        if id(value) in self._open[:-1]:
            return name
        members = []
        for key, member in sorted(vars(value).items()):
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            is_dunder = key.startswith("__") and key.endswith("__")
            if is_dunder and (code is None or code.co_filename.startswith("<")):
                continue  # what the interpreter or ``dataclass`` writes
            is_code = isinstance(member, types.FunctionType | staticmethod | classmethod | property)
            if is_code or hasattr(member, "__wrapped__") or _is_plain(member):
                members.append(f"{key}={self.of(member)}")
        bases = [self._class(base) for base in value.__bases__ if base is not object]
        content = "; ".join([*bases, *members])
        return f'{name}["{_short(content)}"]'

    def _function(self, value: Any) -> str:
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__}({self.of(value.__func__)})"
        name = qualified_name(value)
        if is_known_by_name(value):
            return name
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType):
            return f"{self._class(owner) if isinstance(owner, type) else self.of(owner)}.{self.of(value.__func__)}"
        if not isinstance(value, types.FunctionType):  # a method of an object of C
            if owner is None or isinstance(owner, types.ModuleType):
                return name
            return f"{self.of(owner)}.{name}"
        parts = [name]
        if not _is_of_torch(value) or value.__name__ == "<lambda>":
            parts += [code_of(value.__code__), *self._globals(value)]
        parts.append(self.of((value.__defaults__, value.__kwdefaults__)))
        # what decorators leave is in the code or in a cell, too
        own = {
            key: item for key, item in vars(value).items() if not key.startswith(("__", "_torch"))
        }
        if own:
            parts.append(self.of(_sorted(own)))
        held: tuple[Any, ...]
        for cell in value.__closure__ or ():
            try:
                held = (cell.cell_contents,)
            except ValueError:  # nothing has filled the cell yet
                held = ()
            parts.append(self.of(held))
        return f'{name}["{_short("; ".join(parts))}"]'

    def _globals(self, function: types.FunctionType) -> Iterator[str]:
        """Plain values that the code reads from its module, and functions and classes of the same package."""
        for name in sorted({name for code in _codes(function.__code__) for name in code.co_names}):
            if name not in function.__globals__:
                continue
            value = function_under(function.__globals__[name])
            if type(value).__name__ == "constexpr":  # of Triton
                value = value.value
            is_code = isinstance(value, types.FunctionType | type) and not is_known_by_name(value)
            if _is_plain(value) or (is_code and _packages_of(value) & _packages_of(function)):
                yield f"{name}={self.of(value)}"

    def _module(self, value: nn.Module) -> str:
        if isinstance(value, torch.jit.ScriptModule):
            raise CannotShow(
                f"{type(value).__name__} is compiled by TorchScript, whose code no text shows"
            )
        if isinstance(getattr(value, "graph", None), fx.Graph):
            raise CannotShow(f"{type(value).__name__} is a graph that another object holds")
        is_torchs = is_known_by_name(type(value))
        attributes: dict[str, Any] = {} if value.training else {"training": False}
        for name, attribute in vars(value).items():
            if name not in _MODULE_ATTRIBUTES and not (is_torchs and name.startswith("_")):
                attributes[name] = attribute
        # a forward may walk over its tables, as that of `Sequential` does, so their order counts
        tables = {
            **parameters_of(value),
            **buffers_of(value),
            **modules_of(value),
            **hooks_of(value),
        }
        return self._call(self._class(type(value)), _sorted(attributes) | tables)

    def _object(self, value: Any) -> str:
        kind = type(value)
        for base in (int, float, str, complex):
            if isinstance(value, base):  # of a subclass of it
                return self._call(self._class(kind), _state_of(value), base.__repr__(value))
        state = _state_of(value)
        if state or (kind.__repr__ is object.__repr__ and _is_of_python(kind)):
            return self._call(self._class(kind), state)
        try:
            text = repr(value)
        except Exception as error:
            raise CannotShow(
                f"the `repr` of {qualified_name(kind)} raises {type(error).__name__}"
            ) from error
        if " at 0x" in text:
            raise CannotShow(
                f"{qualified_name(kind)} has no state that Python sees, and its `repr` is an address"
            )
        return self._call(self._class(kind), {}, repr(text))


def _is_of_python(kind: type) -> bool:
    """Return whether ``class`` statements made a class and its bases, so that attributes are all that objects hold."""
    return all(
        isinstance(vars(base).get("__module__"), str) and base.__flags__ & _HEAP
        for base in kind.__mro__[:-1]
    )


def _state_of(value: Any) -> dict[str, Any]:
    """What an object of Python holds: its attributes, also those in slots."""
    held = {str(name): item for name, item in getattr(value, "__dict__", {}).items()}
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            attribute = f"_{owner.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, attribute):
                held[attribute] = getattr(value, attribute)
    return _sorted(held)


def _sorted(named: dict[str, Any]) -> dict[str, Any]:
    """Return the same, words in front of other names."""
    return dict(sorted(named.items(), key=lambda item: (not is_word(item[0]), item[0])))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a literal, a tensor or an enum's, or a container of them."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in PLAIN or isinstance(value, torch.dtype | torch.Tensor | enum.Enum)


def _packages_of(value: Any) -> set[str]:
    """Return the packages of a function or class: the one that it names, and the one of its code."""
    modules = [value.__module__, getattr(value, "__globals__", {}).get("__name__")]
    return {module.partition(".")[0] for module in modules if module}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]


def _tensor(value: torch.Tensor, *, shows_content: bool = True) -> str:
    """``f32[2]`` for a parameter, ``const(f32[2], [1.0, 2.0])`` for any other tensor."""
    kind = f"{spell_dtype(value.dtype)}[{', '.join(map(str, value.shape)) or '()'}]"
    return f"const({kind}, {tensor_content(value)})" if shows_content else kind


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def code_of(code: types.CodeType) -> str:
    """Return the code of a function as a text: its source without comments, annotations' places and docstring.

    Bytecode differs between versions of Python, so it is used only where no source is found.
    """
    found = [node for node in _functions_of(code.co_filename) if _is_source_of(node, code)]
    if found:
        node = min(found, key=_extent)  # the innermost
        if isinstance(node, ast.Lambda):
            return ast.unparse(node)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        return "\n".join([ast.unparse(node.args), *map(ast.unparse, body)])
    constants = [
        code_of(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts
    ]
    return repr(
        (
            code.co_code.hex(),
            constants,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_flags,
        )
    )


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=256)
def _functions_of(filename: str) -> list[_Function]:
    """The functions in a source file; none if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _Function)]


def _extent(node: _Function) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


def _is_source_of(node: _Function, code: types.CodeType) -> bool:
    """Return whether a function of a source file was compiled to this code."""
    if not isinstance(node, ast.Lambda):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
        return False
    # several lambdas may stand in a line: the instructions of one lie inside its body
    body: ast.expr = node.body
    begin, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    for line, last_line, column, last_column in code.co_positions():
        if (
            line is None
            or last_line is None
            or column is None
            or last_column is None
            or column == last_column == 0
        ):
            continue  # what the compiler adds
        if (line, column) < begin or (last_line, last_column) > end:
            return False
    return True
