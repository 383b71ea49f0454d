"""Descriptions of what a graph calls and holds: modules, functions, classes, objects, kernels.

Equal things have equal descriptions, in every process. The *description* of a value is a text in
Python's syntax: literals as they are, tensors and arrays by type and content, functions by name and
code, objects by class and state. The description of a module stands in the graph text,
``Dropout(inplace=False, p=0.1)``; others are represented by their digest. A value that cannot be
described, such as an object of a C extension whose ``repr`` is an address, raises ``CannotShow``.

Functions and classes of torch and of Python's standard library are described by their names: the
header records the torch that made a text, and a digest of their code would change with each
release. A name is trusted only if it leads back to the value, and if the code lies in a file of
torch or of the standard library. An operator is its name, whoever has registered it: a graph shows
that it calls ``my_library::norm``, and not the kernels of it. A function of any other C extension
is its name and a digest of the extension's file.
"""

import ast
import contextlib
import enum
import functools
import hashlib
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import types
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
# Flags of classes in CPython (Py_TPFLAGS_...): allocated at run time, as ``class`` does; its
# attributes cannot be set; only C makes its instances.
_HEAP, _IMMUTABLE, _NOT_CALLED = 1 << 9, 1 << 8, 1 << 7
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
    try:
        return _Describer().describe(value)
    except RecursionError:
        raise CannotShow(f"{name_of(value)} calls too many functions in a chain") from None


def digest_of(value: Any) -> str:
    """Return the digest of a value's description; raises CannotShow if it has none."""
    return digest_of_text(description(value))


def digest_of_text(text: str) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of a text."""
    # A string of a user may hold lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]


def name_of(value: Any) -> str:
    """Return the qualified name of a function or class; of another object, the name of its class.

    >>> name_of(name_of), name_of(CannotShow("x"))
    ('pytest_gtrainer.graphtext.identity.name_of', 'CannotShow')
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (type, *_FUNCTIONS)):
        return qualified_name(value)
    return type(value).__name__


def qualified_name(value: Any) -> str:
    """Return module and qualified name of a function or class; of a class method, of its class."""
    home = getattr(value, "__module__", None) or ""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    owner = getattr(value, "__self__", None)
    if isinstance(owner, type):
        return f"{qualified_name(owner)}.{word(getattr(value, '__name__', name))}"
    return ".".join(word(part) for part in [*home.split("."), *str(name).split(".")] if part)


def is_known_by_name(value: Any) -> bool:
    """Return whether a function or class is an operator, or torch's, NumPy's or Python's own.

    A name of Python code counts only if it leads back to the value.
    """
    if isinstance(value, (*_OPERATORS, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return True
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType):
        if _is_of_a_module(value):
            return (value.__module__ or "builtins").partition(".")[0].lstrip("_") in _BY_NAME
        return isinstance(owner, type) and is_known_by_name(owner)

    if owner is not None or not _is_of_torch(value):
        return False
    # ``functools.wraps`` copies names, and a closure of torch has a name that leads nowhere.
    found: Any = sys.modules[value.__module__]
    for part in value.__qualname__.split("."):
        found = inspect.getattr_static(found, part, None)
    return found is value or getattr(found, "__func__", None) is value


def _is_of_a_module(value: types.BuiltinFunctionType) -> bool:
    """Return whether a function of C belongs to a module, and not to an object or class."""
    owner = value.__self__
    # The functions of pybind11, such as those of ``torch._C``, are bound to a capsule.
    return (
        owner is None or isinstance(owner, types.ModuleType) or type(owner).__name__ == "PyCapsule"
    )


@functools.lru_cache(maxsize=64)
def _digest_of_file(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:12]


def _is_of_torch(value: Any) -> bool:
    """Return whether a class or function belongs to torch or the standard library."""
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
    """Return whether a file lies in the standard library or in a package described by names."""
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
    """Return the description of a Triton kernel: its code and the settings of autotuning."""
    parts = []
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        # The rest of the state changes with every launch, as the cache of ``Autotuner`` does.
        settings = {}
        for name in ("configs", "values", "kwargs"):
            if name in vars(kernel):
                settings[name] = vars(kernel)[name]
        parts.append(f"{type(kernel).__name__}({description(settings)})")
        kernel = kernel.fn
    return " of ".join([*parts, description(kernel)])


def function_under(kernel: Any) -> Any:
    """Return the Python function of a Triton kernel, below ``JITFunction`` and ``Autotuner``."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


class _Describer:
    """Describes one value and what it holds. A reference back to an open value is ``up(n)``.

    Functions and classes are described once: functions that call each other are many paths, and
    each path would be walked. So the cost is linear in the code that can be reached.
    """

    def __init__(self) -> None:
        self._open: list[int] = []  # ids of the values being described, outermost first
        self._depth = 0  # how many of these are data, and no code
        self._code: dict[int, tuple[Any, str]] = {}  # by id; the value, so that its id stays taken

    def describe(self, value: Any) -> str:
        """Return the description of a value.

        Raises:
            CannotShow: the value, or one inside it, has no description.
        """
        literal = spell_literal(value)
        if literal is not None:
            return literal
        # A list may hold itself, and a module its parent: only the distance to that is written.
        if id(value) in self._open:
            return f"up({len(self._open) - self._open.index(id(value))})"
        is_code = isinstance(value, types.FunctionType | type)
        if is_code and id(value) in self._code:
            return self._code[id(value)][1]
        if not is_code and self._depth > _DEEPEST:
            raise CannotShow(
                f"what {name_of(value)} belongs to is nested more than {_DEEPEST} deep"
            )

        self._open.append(id(value))
        self._depth += not is_code
        try:
            text = self._describe_by_kind(value)
        finally:
            self._depth -= not is_code
            self._open.pop()

        if is_code:
            self._code[id(value)] = value, text
        return text

    def _describe_by_kind(self, value: Any) -> str:
        """Describe a value as its type asks for."""
        # The order counts: a parameter is a tensor, and an enum may be a number.
        match value:
            case enum.Enum():
                return f"{self._describe_class(type(value))}.{value.name or value.value}"
            case torch.Tensor():
                return _describe_tensor(value)
            case list() | tuple() | set() | frozenset() | dict() | types.MappingProxyType():
                return self._describe_container(value)
            case functools.partial():
                return f"partial({self.describe((value.func, value.args, value.keywords))})"
            case weakref.ReferenceType():
                return f"ref({self.describe(value())})"
            case types.ModuleType():
                return str(value.__name__)
            case type():
                return self._describe_class(value)
            case property():
                return f"property({self.describe((value.fget, value.fset))})"
            case nn.Module():
                return self._describe_module(value)

        if isinstance(value, (OpOverloadPacket, sympy.Basic, *SYMBOLIC)):
            return str(value)
        if isinstance(value, (*_FUNCTIONS, staticmethod, classmethod)):
            return self._describe_function(value)
        return self._describe_object(value)

    def _describe_call(self, name: str, keywords: Mapping[str, Any], *positional: str) -> str:
        """Return ``Dropout(inplace=False, p=0.1)``, the keywords in their order.

        Keywords that Python would not accept as names are written as ``**{'a-b': 1}``.
        """
        arguments = [*positional]
        for are_words, keys in itertools.groupby(keywords, is_word):
            if are_words:
                arguments += [f"{key}={self.describe(keywords[key])}" for key in keys]
            else:
                arguments.append(f"**{self.describe({key: keywords[key] for key in keys})}")
        return f"{name}({', '.join(arguments)})"

    def _describe_container(self, value: Any) -> str:
        """Describe a container as Python writes it; a subclass with its name and attributes."""
        kind = type(value)
        if isinstance(value, dict | types.MappingProxyType):
            pairs = [f"{self.describe(key)}: {self.describe(item)}" for key, item in value.items()]
            inner = f"{{{', '.join(pairs)}}}"
        else:
            items = [self.describe(item) for item in value]
            if isinstance(value, set | frozenset):
                # Strings hash differently in every process, so the order of a set does, too.
                inner = f"{{{', '.join(sorted(items))}}}"
            elif isinstance(value, list):
                inner = f"[{', '.join(items)}]"
            else:
                comma = "," if len(items) == 1 else ""
                inner = f"({', '.join(items)}{comma})"

        # FX replaces lists and dicts among the arguments of a node by immutable subclasses.
        is_plain = kind in (dict, list, tuple, set)
        if is_plain or kind.__module__.startswith("torch.fx.immutable"):
            return inner
        state = _state_of(value)
        if isinstance(value, defaultdict):
            state["default_factory"] = value.default_factory
        return self._describe_call(self._describe_class(kind), state, inner)

    def _describe_array(self, value: Any) -> str:
        """Describe an array or number of NumPy by its bytes; an array of objects by its items."""
        shape, dtype = list(value.shape), value.dtype
        if dtype.hasobject:
            return f"{type(value).__name__}({shape}, {self.describe(value.tolist())})"
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{type(value).__name__}({shape}, {dtype.descr}, {content})"

    def _describe_class(self, value: type) -> str:
        """Describe a class by its name, the code of its methods, and its plain attributes."""
        name = qualified_name(value)
        # The last open value may be the class itself; an earlier one means a reference back to it.
        if is_known_by_name(value) or id(value) in self._open[:-1]:
            return name
        parts = [self._describe_class(base) for base in value.__bases__ if base is not object]
        for key, member in sorted(vars(value).items()):
            function = inspect.unwrap(member) if callable(member) else member
            code = getattr(function, "__code__", None)
            is_dunder = key.startswith("__") and key.endswith("__")
            if is_dunder and (code is None or code.co_filename.startswith("<")):
                continue  # written by the interpreter or by ``dataclass``
            is_code = isinstance(member, types.FunctionType | staticmethod | classmethod | property)
            if is_code or hasattr(member, "__wrapped__") or _is_plain(member):
                parts.append(f"{key}={self.describe(member)}")

        return f'{name}["{digest_of_text("; ".join(parts))}"]'

    def _describe_function(self, value: Any) -> str:
        """Describe a function by its name; one of a user also by all that decides what it does.

        That is its code, the globals that it reads, defaults, attributes, and closure.
        """
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__}({self.describe(value.__func__)})"
        name = qualified_name(value)
        if is_known_by_name(value):
            return name
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType):
            if isinstance(owner, type):
                prefix = self._describe_class(owner)
            else:
                prefix = self.describe(owner)
            return f"{prefix}.{self.describe(value.__func__)}"

        if not isinstance(value, types.FunctionType):
            return self._describe_function_of_c(value)

        parts = [name]
        if not _is_of_torch(value) or value.__name__ == "<lambda>":
            parts += [code_of(value.__code__), *self._describe_globals(value)]
        parts.append(self.describe((value.__defaults__, value.__kwdefaults__)))
        # The effect of attributes that ``functools.wraps`` leaves is in the code or in a cell.
        attributes = {}
        for key, item in vars(value).items():
            if not key.startswith(("__", "_torch")):
                attributes[key] = item
        if attributes:
            parts.append(self.describe(_sorted(attributes)))
        for cell in value.__closure__ or ():
            content: tuple[Any, ...] = ()
            # A cell is empty until the enclosing function assigns its variable.
            with contextlib.suppress(ValueError):
                content = (cell.cell_contents,)
            parts.append(self.describe(content))

        return f'{name}["{digest_of_text("; ".join(parts))}"]'

    def _describe_function_of_c(self, value: Any) -> str:
        name = qualified_name(value)
        if not _is_of_a_module(value):
            return f"{self.describe(value.__self__)}.{name}"
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file is None:
            raise CannotShow(f"{name} is a function of C, and its module has no file")
        return f'{name}["{_digest_of_file(file)}"]'

    def _describe_globals(self, function: types.FunctionType) -> Iterator[str]:
        """Yield what the code reads from its module: plain values, and code of the same package."""
        for name in sorted({name for code in _codes(function.__code__) for name in code.co_names}):
            if name not in function.__globals__:
                continue
            value = function_under(function.__globals__[name])
            # A Triton kernel reads its global constants as ``tl.constexpr``; Triton may be missing.
            if type(value).__name__ == "constexpr":
                value = value.value
            is_code = isinstance(value, types.FunctionType | type) and not is_known_by_name(value)
            if _is_plain(value) or (is_code and _packages_of(value) & _packages_of(function)):
                yield f"{name}={self.describe(value)}"

    def _describe_module(self, value: nn.Module) -> str:
        kind = type(value)
        if isinstance(value, torch.jit.ScriptModule):
            raise CannotShow(
                f"{kind.__name__} is compiled by TorchScript, whose code no text shows"
            )

        if isinstance(getattr(value, "graph", None), fx.Graph):
            raise CannotShow(f"{kind.__name__} is a graph that another object holds")
        # Private attributes of torch's own modules change with its releases.
        is_from_torch = is_known_by_name(kind)
        attributes: dict[str, Any] = {} if value.training else {"training": False}
        for name, attribute in vars(value).items():
            is_internal = is_from_torch and name.startswith("_")
            if name not in _MODULE_ATTRIBUTES and not is_internal:
                attributes[name] = attribute

        # The order of these tables counts: the forward of ``Sequential`` walks over its modules.
        tables = parameters_of(value) | buffers_of(value) | modules_of(value) | hooks_of(value)
        return self._describe_call(self._describe_class(kind), _sorted(attributes) | tables)

    def _describe_object(self, value: Any) -> str:
        kind = type(value)
        # NumPy is not imported for this: a graph that holds no array does not need it.
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            return self._describe_array(value)
        state = _state_of(value)
        for base in (int, float, str, complex):
            if isinstance(value, base):  # an instance of a subclass, or it would be a literal
                return self._describe_call(self._describe_class(kind), state, base.__repr__(value))
        is_of_python = _is_of_python(kind)
        if is_of_python and (state or kind.__repr__ is object.__repr__):
            return self._describe_call(self._describe_class(kind), state)
        # An object of a C extension keeps its state out of sight. Its `repr` may show it, unless a
        # class of Python has another one; else its pickle does. Those of torch's own classes, such
        # as the placements of DTensors, are trusted.
        is_of_torch = kind.__module__.partition(".")[0] == "torch" and _is_of_torch(kind)
        is_of_c = not isinstance(kind.__repr__, types.FunctionType)
        is_whole = is_of_python or is_of_torch or is_of_c
        try:
            text = repr(value)
        except Exception as error:
            raise CannotShow(
                f"the `repr` of {qualified_name(kind)} raises {type(error).__name__}"
            ) from error

        if state or not is_whole:
            hidden = repr(digest_of_text(self._describe_pickled(value)))
            return self._describe_call(self._describe_class(kind), state, hidden)
        if re.search(r"(at|@) 0x", text):  # ``hashlib`` writes "@"
            raise CannotShow(
                f"{qualified_name(kind)} has no state that Python sees, "
                "and its `repr` is an address"
            )

        return self._describe_call(self._describe_class(kind), {}, repr(text))

    def _describe_pickled(self, value: Any) -> str:
        """Describe an object of C by the arguments and the state that pickle would write."""
        kind = type(value)
        reduced = None
        if (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
            with contextlib.suppress(Exception):  # whatever a class raises that has no pickle
                reduced = value.__reduce_ex__(2)
        if reduced is None:
            raise CannotShow(
                f"{qualified_name(kind)} is made by C, and neither its `repr` nor a pickle shows "
                "all of its state"
            )

        if isinstance(reduced, str):
            return reduced
        _, arguments, *rest = reduced
        items = [tuple(item) if isinstance(item, Iterator) else item for item in rest]
        return self.describe((arguments, *items))


def _is_of_python(kind: type) -> bool:
    """Return whether a class and its bases are made by ``class`` statements, not by C."""
    for base in kind.__mro__[:-1]:
        if not isinstance(vars(base).get("__module__"), str) or not base.__flags__ & _HEAP:
            return False
        # C makes classes at run time, too. As ``copyreg`` does: such have a ``__new__`` of their
        # own, or nobody may call or change them.
        is_new_of_c = getattr(base.__new__, "__self__", None) is base
        if is_new_of_c or base.__flags__ & (_IMMUTABLE | _NOT_CALLED):
            return False
    return True


def _state_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots included."""
    state = {str(name): item for name, item in getattr(value, "__dict__", {}).items()}
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            # Python mangles private names of a class.
            attribute = f"_{owner.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if hasattr(value, attribute):
                state[attribute] = getattr(value, attribute)
    return _sorted(state)


def _sorted(named: dict[str, Any]) -> dict[str, Any]:
    """Sort by name; names that are Python identifiers come first."""
    return dict(sorted(named.items(), key=lambda item: (not is_word(item[0]), item[0])))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a literal, a tensor, an enum member, or a container of them."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in PLAIN or isinstance(value, torch.dtype | torch.Tensor | enum.Enum)


def _packages_of(value: Any) -> set[str]:
    """Return the packages of a function or class: of its ``__module__``, and of its code."""
    modules = [value.__module__, getattr(value, "__globals__", {}).get("__name__")]
    return {module.partition(".")[0] for module in modules if module}


def _describe_tensor(value: torch.Tensor) -> str:
    """Return ``f32[2]`` for a parameter, ``const(f32[2], [1.0, 2.0])`` for any other tensor."""
    kind = f"{spell_dtype(value.dtype)}[{', '.join(map(str, value.shape)) or '()'}]"
    # Training changes the numbers of a parameter; which module it is does not depend on them.
    if isinstance(value, nn.Parameter):
        return kind
    return f"const({kind}, {tensor_content(value)})"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def code_of(code: types.CodeType) -> str:
    """Return the code of a function as text: its source without comments and docstring.

    Bytecode differs between versions of Python, so it is used only where no source is found.
    """
    found = [node for node in _functions_of(code.co_filename) if _is_source_of(node, code)]
    if found:
        # The instructions of a lambda lie inside the enclosing lambdas, too: take the innermost.
        node = min(
            found,
            key=lambda node: (
                (node.end_lineno or 0) - node.lineno,
                (node.end_col_offset or 0) - node.col_offset,
            ),
        )
        if isinstance(node, ast.Lambda):
            return ast.unparse(node)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        return "\n".join([ast.unparse(node.args), *map(ast.unparse, body)])

    constants = []
    for constant in code.co_consts:
        is_code = isinstance(constant, types.CodeType)
        constants.append(code_of(constant) if is_code else repr(constant))
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return repr((code.co_code.hex(), constants, *names, code.co_flags))


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=256)
def _functions_of(filename: str) -> list[_Function]:
    """Parse a source file and return its functions; none if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _Function)]


def _is_source_of(node: _Function, code: types.CodeType) -> bool:
    """Return whether a function of a source file was compiled to this code."""
    if not isinstance(node, ast.Lambda):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
        return False
    # Several lambdas may stand in one line: the instructions of one lie inside its body.
    body: ast.expr = node.body
    begin, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    for line, last_line, column, last_column in code.co_positions():
        if line is None or last_line is None or column is None or last_column is None:
            continue
        if column == last_column == 0:
            continue  # an instruction that the compiler adds, such as RESUME
        if (line, column) < begin or (last_line, last_column) > end:
            return False

    return True
