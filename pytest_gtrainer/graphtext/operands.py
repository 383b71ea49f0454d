"""Evaluate the operands and types of a text: nodes, literals, constants, sizes, fake tensors."""

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pytest_gtrainer._torch.graph_text import (
    append_node,
    backed_symbol,
    functions,
    symbolic,
    unbacked_symbol,
)
from pytest_gtrainer._torch.values import FakeTensor, FakeTensorMode
from pytest_gtrainer.graph.nodes import spell_dtype
from pytest_gtrainer.graphtext import syntax
from pytest_gtrainer.graphtext.header import nearest
from pytest_gtrainer.graphtext.literals import CONSTANTS, DTYPE_OF, PLAIN, bytes_of
from pytest_gtrainer.graphtext.operators import UnknownOperator, operator_named
from pytest_gtrainer.graphtext.sections import Layer, Scope, split_layer
from pytest_gtrainer.graphtext.syntax import (
    InputKey,
    LinePlace,
    excerpt,
    integer,
    refuse,
    unexpected,
)

_NUMBERS = {"int": int, "float": float, "bool": bool}
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(functions, name) for name in functions.__all__ if name[0].isupper()},
    "Max": functions.Max,
    "Min": functions.Min,
    "Eq": sympy.Eq,
    "Ne": sympy.Ne,
    "Abs": sympy.Abs,
    "ceiling": sympy.ceiling,
    "floor": sympy.floor,
    "And": sympy.And,
    "Or": sympy.Or,
    "Not": sympy.Not,
}
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: functions.FloorDiv,
    ast.Mod: functions.Mod,
    ast.Pow: operator.pow,
    ast.BitAnd: sympy.And,
    ast.BitOr: sympy.Or,
    ast.USub: operator.neg,
    ast.Invert: sympy.Not,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_Layout = tuple[torch.dtype, tuple[Any, ...], tuple[Any, ...]]
_LARGEST = 2**62  # of a size, and of a base that is raised to a power
_NO_TENSOR = (
    RuntimeError,
    TypeError,
    ValueError,
    OverflowError,
    AttributeError,
    AssertionError,
    KeyError,
)
"""What torch may raise for the shape and strides of a text that nobody has checked."""
_QUANTISED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
# What ``repr`` writes; Python's own ``int`` and ``float`` read ``+5`` and ``-infinity``, too.
_NUMBER = re.compile(r"-?(inf|nan|\d)(?!inity)")
_POWERS = (
    operator.pow,
    functions.FloatPow,
    functions.PowByNatural,
    functions.LShift,
    functions.RShift,
)
# The highest power in a size: sympy evaluates numbers at once, which could take forever.
_HIGHEST = 64
_ITEM_META = ("custom", "autograd_backward", "fsdp_bucket", "nn_module_stack")
_ANY_SIZE = 61  # the example of a symbol whose text gives none
_SYMBOL = re.compile(r"\b(s|u|zf|zuf)\d+\b")


def may_be_symbolic(text: str) -> bool:
    """Return whether a text may name a symbol.

    Most texts do not, and the first shape environment of a process takes seconds to make.
    """
    return _SYMBOL.search(text) is not None


class Sizes:
    """The sizes, symbols and types of one parsed text.

    Backed symbols are defined at the head; an unbacked one is new where it is first named.
    """

    def __init__(self, *, symbolic: bool) -> None:
        self._env: Any = ShapeEnv() if symbolic else None
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.device = torch.device("cpu")
        self._backed: dict[str, Any] = {}
        self._unbacked: dict[tuple[Layer | None, str], Any] = {}

    def body(self) -> "Sizes":
        """Return the sizes of a body: the same backed symbols, unbacked ones of its own."""
        other = Sizes(symbolic=False)
        other._env, other.mode, other._backed = self._env, self.mode, self._backed
        return other

    def define(self, name: str, example: int | float | None) -> None:
        place = len(self._backed)
        if example is None:
            # Guards are evaluated on examples, where two symbols of one example are equal.
            example = _ANY_SIZE + place
        self._backed[name] = backed_symbol(self._env, place, example)

    def number(self, node: ast.expr, place: LinePlace, kind: type = int) -> Any:
        """Return a number of the given kind (int, float or bool), symbolic or not."""
        if (number := integer(node)) is not None:
            if abs(number) > _LARGEST:
                raise refuse(node, f"{number} is no size of a tensor")
            return kind(number)

        match node:
            case ast.Constant(literal) if kind is type(literal):
                return literal
            case ast.Name("inf" | "nan" as word) if kind is float:
                return float(word)
            case ast.UnaryOp(_, ast.Constant() | ast.Name() as positive) if kind is float:
                return -self.number(positive, place, kind)

        value = self._expression(node, place)
        try:
            if value.free_symbols:
                return symbolic(self._env, value, kind)
            if kind is not int or float(value).is_integer():
                return kind(value)
        except (TypeError, ValueError, OverflowError):
            pass

        raise refuse(node, f"`{excerpt(node)}` is no number of the kind `{kind.__name__}`")

    def operand(self, node: ast.expr, place: LinePlace) -> Any:
        """Return the number ``sym(...)``, of the kind that its expression has."""
        expression = self._expression(node, place)
        kind: type = float
        if expression.is_Relational or expression.is_Boolean:
            kind = bool
        elif expression.is_integer or expression.is_rational:
            kind = int
        return self.number(node, place, kind)

    def _expression(self, node: ast.expr, place: LinePlace) -> Any:
        """Return a size, such as ``2*u0 + 1``, as an expression of sympy."""
        parts: Sequence[ast.expr] = ()
        function: Callable[..., Any] | None = None
        match node:
            case _ if (number := integer(node)) is not None:
                return sympy.Integer(number)
            case ast.Constant(float(number)):
                return sympy.Float(number)
            case ast.Name() | ast.Attribute():
                return self._symbol(node, place)
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
                function, parts = _OPERATORS.get(type(sign)), [left, right]
            case ast.UnaryOp(sign, operand):
                function, parts = _OPERATORS.get(type(sign)), [operand]
            case ast.Call(ast.Name(name), parts):
                function = _FUNCTIONS.get(name)

        if function is None:
            raise unexpected(node, "a size like `4`, `s0` or `2*u0 + 1`")
        values = [self._expression(part, place) for part in parts]
        if function in _POWERS and not self._is_moderate(values):
            raise unexpected(node, f"a power of a symbol, at most {_HIGHEST}")
        try:
            return function(*values)
        except (TypeError, ValueError, ZeroDivisionError, AssertionError) as error:
            reason = error or type(error).__name__
            raise refuse(node, f"`{excerpt(node)}` is no size: {reason}") from None

    def _is_moderate(self, values: Sequence[Any]) -> bool:
        """Return whether a power is quick to evaluate, with the examples of its symbols too."""
        if len(values) != 2 or not any(value.free_symbols for value in values):
            return False
        base, exponent = (abs(value.xreplace(self._env.backed_var_to_val)) for value in values)
        if exponent.is_number and not exponent <= _HIGHEST:
            return False
        return not base.is_number or bool(base <= _LARGEST)

    def _symbol(self, node: ast.expr, place: LinePlace) -> Any:
        *path, last = syntax.chain(node)
        name = str(last.value)
        if not path and name in self._backed:
            return self._backed[name]
        if not name.startswith(("u", "zuf")) or not name.lstrip("uzf").isdecimal():
            raise refuse(node, f"`{name}` is no symbol: define it at the head, `{name} = size(16)`")
        # An unbacked symbol belongs to the layer that it is spelled with, ``L.u0``.
        owner = None
        if path:
            owner, _ = split_layer(syntax.path_at(path, place.layer))
        if (owner, name) not in self._unbacked:
            self._unbacked[owner, name] = unbacked_symbol(self._env, name.startswith("z"))
        return self._unbacked[owner, name]

    def value(self, node: ast.expr, place: LinePlace) -> Any:
        """Return a fake tensor of a type, a number, a container of them, or None for ``_``."""
        device = self.device
        match node:
            case ast.Name("_"):
                return None
            case ast.Tuple(items):
                return tuple(self.value(item, place) for item in items)
            case ast.List(items):
                return [self.value(item, place) for item in items]
            case ast.Subscript(ast.Name("int"), size) if (number := integer(size)) is not None:
                return number
            case ast.Subscript(ast.Name("int" | "float" | "bool" as word), size):
                return self.number(size, place, _NUMBERS[word])
            case ast.BinOp(
                kind, ast.MatMult(), ast.Call(ast.Name("device"), [ast.Constant(str(name))]) as at
            ):
                device, node = device_named(name, at), kind
            case ast.BinOp(kind, ast.MatMult(), name):
                device, node = device_named(excerpt(name), name), kind

        dtype, shape, strides = self._layout(node, place)
        try:
            # With numbers only, the constructor saves the dispatch through the fake tensor mode.
            if all(type(number) is int for number in shape + strides):
                meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                return FakeTensor(self.mode, meta, device)
            with self.mode:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        except _NO_TENSOR as error:
            reason = str(error).partition("\n")[0]
            if isinstance(error, KeyError):  # a miss in torch's table of the ranges of symbols
                reason = f"the bounds of {error} are not known"
            raise refuse(node, f"there is no tensor `{excerpt(node)}`: {reason}") from None

    def _layout(self, node: ast.expr, place: LinePlace) -> _Layout:
        """Return dtype, shape and strides of ``f32[2, 4]`` or ``f32[2, 4][1, 2]``."""
        whole, steps = node, None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            steps, node = _elements(node.slice), node.value
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            raise unexpected(whole, "a type like `f32[2, 4]`, `int[u0]` or `_`")
        if (dtype := DTYPE_OF.get(node.value.id)) is None:
            raise refuse(node, f"`{node.value.id}` is no dtype: expected `f32`, `bf16`, `i64`, ...")
        shape = tuple([self.number(extent, place) for extent in _elements(node.slice)])
        if steps is not None:
            if len(steps) != len(shape):
                raise refuse(whole, f"{len(shape)} extents and {len(steps)} strides")
            return dtype, shape, tuple([self.number(step, place) for step in steps])

        strides: list[Any] = [1]
        for extent in shape[:0:-1]:
            # Contiguous strides of torch count an empty dimension as one of a single element.
            extent = max(extent, 1) if type(extent) is int else extent
            strides.insert(0, strides[0] * extent)

        return dtype, shape, tuple(strides[: len(shape)])


def is_quantised(kind: ast.expr) -> bool:
    """Return whether a type is that of a quantised tensor, ``quint8[2]``."""
    match kind:
        case ast.Subscript(ast.Name(name)):
            return DTYPE_OF.get(name) in _QUANTISED
    return False


def _elements(node: ast.expr) -> Sequence[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def device_named(name: str, node: ast.expr) -> torch.device:
    """Return the device that a text names at ``node``."""
    try:
        return torch.device(name)
    except RuntimeError:
        raise refuse(node, f"`{name}` is no device: expected `cpu`, `cuda`, ...") from None


class Operands:
    """The values that a graph has so far, and how a text names them."""

    def __init__(
        self, graph: fx.Graph, sizes: Sizes, given: Mapping[str, Any], allow: tuple[str, ...]
    ) -> None:
        self._graph, self._sizes, self._given, self._allow = graph, sizes, given, allow
        self.names: dict[str, Any] = {}  # definitions and bodies
        self.attributes: dict[str, Any] = {}
        self._inputs: dict[InputKey, fx.Node] = {}
        self._values: dict[Scope, dict[str, fx.Node]] = {}
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}
        self._getters: dict[str, fx.Node] = {}

    def add_input(self, key: InputKey, node: fx.Node, at: ast.expr) -> None:
        if key in self._inputs:
            raise refuse(at, f"there is an input `{excerpt(at)}` already")
        self._inputs[key] = node

    def add(self, scope: Scope, name: str, node: fx.Node, at: ast.expr) -> None:
        values = self._values.setdefault(scope, {})
        if name in values:
            raise refuse(
                at, f"`{name}` is defined twice in this module: values are named once, `{name}_1`"
            )
        values[name] = node

    def operand(self, node: ast.expr, place: LinePlace) -> Any:
        """Return what an operand stands for; a TextError if it is none."""
        match node:
            case ast.Constant(value) if type(value) in PLAIN:
                return value
            case ast.Attribute() | ast.Subscript() | ast.Name():
                return self._named(node, place)
            case ast.Tuple(items):
                return tuple(self.operand(item, place) for item in items)
            case ast.List(items):
                return [self.operand(item, place) for item in items]
            case ast.Dict(keys, values) if all(
                isinstance(key, ast.Constant) or integer(key) is not None for key in keys
            ):
                pairs = zip(filter(None, keys), values, strict=True)
                return {ast.literal_eval(key): self.operand(value, place) for key, value in pairs}
            case ast.Call():
                return self._called(node, place)

        spelled = ast.unparse(node).replace(" ", "")
        if _NUMBER.match(spelled):
            # ``-1``, ``-inf``, ``-0-1j``: arithmetic would lose the signs of zeros.
            for kind in (int, float, complex):
                with contextlib.suppress(ValueError):
                    return kind(spelled)

        raise unexpected(node, "an operand")

    def _named(self, node: ast.expr, place: LinePlace) -> Any:
        """Return the value of a name.

        It is an input, a computed value or an item of it, a definition, a constant or an operator.
        """
        head, name, items = syntax.reference(node)
        if not name:
            key = syntax.input_key_at(head, place.layer)
            if key not in self._inputs:
                names = [f"{known.space}.{known.fqn}" for known in self._inputs]
                advice = nearest(f"{key.space}.{key.fqn}", names)
                raise refuse(node, f"there is no input `{excerpt(node)}`{advice}")
            return self._inputs[key]

        if not head and name in self.names:
            found = self.names[name]
            if isinstance(found, fx.GraphModule):
                found = self._getter(name, lambda: found)
        else:
            scope = syntax.scope_at(head, place) if head else place.scope
            if (found := self._values.get(scope, {}).get(name)) is None:
                found = self._constant_named(node, name, scope, is_bare=not head)

        for item in items:
            found = self._item(found, item, node)
        return found

    def _constant_named(self, node: ast.expr, name: str, scope: Scope, *, is_bare: bool) -> Any:
        """Return the constant of a name: a word of torch, or an operator as an argument."""
        if is_bare and name in CONSTANTS:
            return CONSTANTS[name]
        if not is_bare:
            with contextlib.suppress(UnknownOperator):
                return operator_named(ast.unparse(node), self._allow)
        where = ", ".join(scope.owners) or "_"
        if scope in self._values:
            hint = nearest(name, self._values[scope])
            raise refuse(node, f"no `{name}` before this line in {scope.space} of `{where}`{hint}")
        modules = [", ".join(known.owners) for known in self._values if known.space == scope.space]
        hint = nearest(where, modules)
        raise refuse(
            node, f"no `{name}`: nothing before this line is in {scope.space} of `{where}`{hint}"
        )

    def _item(self, source: Any, item: int, at: ast.expr) -> fx.Node:
        """Return the node that takes one of several outputs, or a row of a tensor."""
        if not isinstance(source, fx.Node):
            raise refuse(at, f"`{excerpt(at)}`: only a value of several outputs has items")
        if (source, item) in self._items:
            return self._items[source, item]
        value, known = source.meta.get("val"), None
        if isinstance(value, tuple | list):
            if not -len(value) <= item < len(value):
                raise refuse(at, f"`{excerpt(at)}`: there are {len(value)} outputs")
            known = value[item]
        elif isinstance(value, torch.Tensor):
            try:
                known = value.select(0, item)
            except (IndexError, RuntimeError) as error:
                raise refuse(at, f"`{excerpt(at)}`: {error}") from None

        taken = append_node(
            self._graph, "getitem", "call_function", operator.getitem, (source, item), {}
        )
        for key in _ITEM_META:
            if key in source.meta:
                taken.meta[key] = source.meta[key]
        if known is not None:
            taken.meta["val"] = known
        self._items[source, item] = taken
        return taken

    def _called(self, node: ast.Call, place: LinePlace) -> Any:
        """Return the value of an operand that is spelled as a call, such as ``slice(0, 4)``."""
        match node:
            case ast.Call(ast.Name("const"), [ast.Constant(digest)], []):
                return self._by_digest(str(digest), node)
            case ast.Call(ast.Name("const"), [ast.Constant(), ast.Constant(digest)], []):
                return self._by_digest(str(digest), node)  # `const("Enum", "digest")`
            case ast.Call(ast.Name("const"), [kind, *content], []) if len(content) < 2:
                # `const(f32[2], [1.0, 2.0])` or `const(f32[64], "sha256:...")`
                return self._getter(
                    ast.unparse(node), lambda: self._tensor(kind, content, node, place)
                )
            case ast.Call(ast.Name("slice" | "range" as name), [_, *more], []) if len(more) < 3:
                ends = [self.operand(end, place) for end in node.args]
                try:
                    if name == "slice":
                        return slice(*ends)
                    return range(*ends)
                except (TypeError, ValueError) as error:
                    raise refuse(node, f"`{excerpt(node)}`: {error}") from None
            case ast.Call(ast.Name("namedtuple"), [ast.Constant(str(name))], _):
                raise refuse(
                    node,
                    f"no text holds the class of the named tuple `{name}`: write a tuple, `(x, y)`",
                )
            case ast.Call(ast.Name("sym"), [size]):
                return self._sizes.operand(size, place)
            case ast.Call(ast.Name("device"), [ast.Constant(name)]):
                return device_named(str(name), node)

        raise refuse(
            node,
            f"expected an operand, found `{excerpt(node)}`: an operator stands in a line of its "
            "own",
        )

    def _getter(self, key: str, make: Callable[[], Any]) -> fx.Node:
        """Return the ``get_attr`` of a body or constant, one for all its uses."""
        if key not in self._getters:
            value = make()
            name = key if key.isidentifier() else f"_constant{len(self.attributes)}"
            self.attributes[name] = value
            node = self._getters[key] = append_node(self._graph, name, "get_attr", name, (), {})
            if isinstance(value, torch.Tensor) and not value.is_quantized:
                node.meta["val"] = self._sizes.mode.from_tensor(value, static_shapes=True)
        return self._getters[key]

    def _by_digest(self, digest: str, node: ast.Call) -> Any:
        if digest not in self._given:
            give = "give constants=graphtext.constants(gm) of the graph that was rendered"
            raise refuse(node, f"`{excerpt(node)}` is given by its digest only: {give}")
        return self._given[digest]

    def _tensor(
        self, kind: ast.expr, content: Sequence[ast.expr], node: ast.Call, place: LinePlace
    ) -> Any:
        """Return a constant tensor: given by its digest, with its elements, or fake (``None``)."""
        # No text holds the scales of a quantised tensor, and torch has no fake ones.
        quantised = is_quantised(kind)
        like = None if quantised else self._sizes.value(kind, place)
        is_tensor = isinstance(like, torch.Tensor)
        match content:
            case [ast.Constant(str(digest))] if like is None or is_tensor:
                given = self._by_digest(digest, node)
                if not quantised:
                    return _view_as(given, like, node)
                found = f"{spell_dtype(given.dtype)}[{', '.join(map(str, given.shape)) or '()'}]"
                if found != ast.unparse(kind):
                    raise refuse(node, f"the constant given is {found}, not `{excerpt(kind)}`")
                return given
            case _ if quantised:
                raise unexpected(node, '`const(quint8[2], "sha256:...")`')
            case [ast.Constant(None)] if is_tensor:
                return like
            case [elements] if is_tensor:
                return self._tensor_of(elements, like, node)

        raise unexpected(node, "`const(f32[2], [1.0, 2.0])`")

    def _tensor_of(self, elements: ast.expr, like: torch.Tensor, node: ast.Call) -> torch.Tensor:
        values = self.operand(elements, LinePlace("fwd", None))
        try:
            tensor = torch.tensor(values, dtype=like.dtype).reshape(like.shape)
            made = _laid_out(tensor, like)
            # One without elements may still have many rows.
            if made.numel() and repr(made.tolist()) != repr(tensor.tolist()):
                raise ValueError("elements of one place in memory differ")
        except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
            message = str(error).partition("\n")[0]
            raise refuse(node, f"these values do not make the constant's type: {message}") from None
        return made


def _type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    # A sparse tensor has no strides.
    strides = tensor.layout is torch.strided and tensor.stride()
    return tensor.dtype, tensor.shape, tensor.device.type, strides


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values with strides and device of ``like``."""
    strides, stored = like.stride(), list(like.shape)
    for dim, stride in enumerate(strides):
        # What is expanded is stored once.
        if stride == 0 and stored[dim]:
            stored[dim] = 1
            values = values.narrow(dim, 0, 1)
    dense = torch.empty_strided(stored, strides, dtype=values.dtype).copy_(values)
    return dense.to(like.device).expand(like.shape)


def _view_as(given: Any, like: torch.Tensor | None, node: ast.Call) -> Any:
    """Return a given constant with the type of the text.

    A digest is of bytes, so constants of equal bytes and other types have one digest.
    """
    if like is None or not isinstance(given, torch.Tensor):
        return given
    if _type_of(given) == _type_of(like):
        return given
    flat = bytes_of(given)
    if flat.numel() != like.numel() * like.element_size():
        found = f"{given.dtype} {list(given.shape)}"
        raise refuse(node, f"the constant given is {found}, not `{excerpt(node.args[0])}`")
    return _laid_out(flat.view(like.dtype).reshape(like.shape), like)
