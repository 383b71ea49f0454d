"""Translate the code of a graph, as ``print_readable`` writes it, into graph text.

Tlparse shows this code, and ``fx_graph_runnable`` files hold it. ``translated`` turns its syntax
tree into that of graph text; no code of the dump is ever run. Lines keep their numbers, so errors
name those of the file. A dump has neither modules nor directions: all values stand in ``fwd`` of
``_``, and inputs in ``A`` by their names in the dump.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from pytest_gtrainer.graphtext.literals import TORCH_WORDS
from pytest_gtrainer.graphtext.syntax import excerpt, refuse, unexpected

_CLASS = re.compile(r"^class \w+\((torch\.)?nn\.Module\):", re.MULTILINE)
_TENSOR = re.compile(r"(\w+)\[([^\[\]]*)\](?:\[([^\[\]]*)\])?([a-z]*)(?::(\d+))?")
_NUMBER = re.compile(r"Sym\((.*)\)")
_BACKED = re.compile(r"\b(?:s|zf)\d+\b")
_OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.USub: "neg",
    ast.Invert: "invert",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
_CONSTANTS = {str(value): word for word, value in TORCH_WORDS.items()}


def is_dump(text: str) -> bool:
    """Return whether a text holds the code of a graph, as ``print_readable`` writes it."""
    return _CLASS.search(text) is not None


def translated(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of graph text for a dump.

    Raises:
        TextError: it holds several graphs, or a line that cannot be read.
    """
    first, *others = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if others:
        raise refuse(
            others[0],
            f"this holds several graphs, {first.name} and {others[0].name}: give the text of one",
        )
    types = _types_in_load_args(tree)
    statements = _Dump(first, types).statements
    # Symbols are named in types only; a dump does not have their values.
    symbols = set(_BACKED.findall(" ".join([*map(_annotation, ast.walk(tree)), *types])))
    definitions = [f"{name} = size()" for name in sorted(symbols)]
    return [*ast.parse("\n".join(definitions)).body, *statements]


def _annotation(node: ast.AST) -> str:
    """Return the type of a line or an argument, ``"f32[2, 8][8, 1]cpu"``; "" if there is none."""
    annotation = getattr(node, "annotation", None)
    if isinstance(annotation, ast.Constant):
        return str(annotation.value)
    return ""


def _types_in_load_args(tree: ast.Module) -> list[str]:
    """Return the types of inputs in ``load_args`` of an ``fx_graph_runnable`` file."""
    types = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        keywords = {item.arg: item.value for item in call.keywords}
        name = ast.unparse(call.func)
        if name == "reader.symint":
            expression = ast.unparse(call.args[0])
            if "expr" in keywords:
                expression = ast.literal_eval(keywords["expr"])
            types.append(f"Sym({expression})")
        elif name == "reader.tensor":
            spelled = "f32"
            if "dtype" in keywords:
                spelled = _CONSTANTS[ast.unparse(keywords["dtype"])]
            for argument in call.args[1:3]:  # shape and strides
                spelled += f"[{ast.unparse(argument).strip('(,)')}]"
            types.append(spelled)

    return types


def _type(text: str, at: ast.AST) -> ast.expr:
    """Return ``f32[2, 8][8, 1]cuda:0`` or ``Sym(s0)`` as a type of graph text, "" as ``_``."""
    spelled = text or "_"
    if number := _NUMBER.fullmatch(text):
        # A dump does not say the kind of a number; sizes have neither points nor exponents.
        kind = "float" if re.search(r"[.]|[0-9]e|\bzf", number[1]) else "int"
        spelled = f"{kind}[{number[1]}]"
    elif tensor := _TENSOR.fullmatch(text):
        dtype, shape, strides, device, index = tensor.groups()
        spelled = f"{dtype}[{shape or '()'}]"
        if strides:
            spelled += f"[{strides}]"
        if device not in ("", "cpu"):
            # The index of the first device is left out when the graph is written again.
            spelled += f" @ {device}" if index in (None, "0") else f' @ device("{device}:{index}")'
    elif text:
        raise refuse(at, f"expected a type like `f32[2, 4][4, 1]cpu` or `Sym(s0)`, found `{text}`")

    return _expression(spelled)


def _expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


def _at(place: ast.AST, made: Any) -> Any:
    """Give ``made`` the line of the statement that it stands for."""
    for node in ast.walk(made):
        node.lineno, node.col_offset = place.lineno, place.col_offset  # type: ignore[attr-defined]
    return made


class _Dump(ast.NodeTransformer):
    """Translates one class into the ``statements`` of graph text."""

    def __init__(self, graph: ast.ClassDef, types: Sequence[str] = ()) -> None:
        functions = [node for node in graph.body if isinstance(node, ast.FunctionDef)]
        forward = next((node for node in functions if node.name == "forward"), None)
        if forward is None:
            raise refuse(graph, f"{graph.name} has no forward, so it holds no graph's code")
        self._bodies = {node.name: node for node in graph.body if isinstance(node, ast.ClassDef)}
        self._names: dict[str, ast.expr] = {}
        self._inputs: list[ast.stmt] = []
        self._values: dict[str, ast.AnnAssign] = {}
        self._results: list[ast.stmt] = []
        self.statements: list[ast.stmt] = []
        # Code that flattens its arguments has a line for each input.
        arguments = forward.args.args[1:]
        if any("tree_flatten_spec" in ast.unparse(node) for node in forward.body):
            arguments = []
        annotations = list(map(_annotation, arguments))
        if not any(annotations) and types:
            if len(types) != len(arguments):
                raise refuse(
                    forward, f"there are {len(arguments)} inputs, and load_args has {len(types)}"
                )
            annotations = list(types)

        for argument, annotation in zip(arguments, annotations, strict=True):
            self._input(argument.arg, annotation, argument)
        for node in forward.body:
            if isinstance(node, ast.Return):
                self.statements = self._return(node.value, node)
            else:
                self._line(node)

        for body in self._bodies.values():
            made: Any = ast.parse(f"def {body.name}_graph_0(): pass").body[0]
            made.body = _Dump(body).statements
            self.statements.append(made)

        computed: list[ast.stmt] = list(self._values.values())
        for name, lines in (("A", self._inputs), ("fwd", computed), ("out", self._results)):
            if lines:
                self.statements.append(ast.If(ast.Name(name), lines, []))
        for node in self.statements:
            ast.fix_missing_locations(ast.copy_location(node, graph))

    def _input(self, name: str, annotation: str, at: ast.AST) -> None:
        self._names[name] = _expression(f"A.{name}")
        kind = _type(annotation, at)
        self._inputs.append(_at(at, ast.AnnAssign(_expression(f"A.{name}"), kind, None, 0)))

    def _line(self, node: ast.stmt) -> None:
        """Read a line of the code: an input, another name of a value, or a computed value."""
        value, annotation = getattr(node, "value", None), _annotation(node)
        target = getattr(node, "target", None)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            # ``mm = None`` frees a value; a tuple is that of the inputs, which have their lines.
            if ast.unparse(node.value) == "None" or isinstance(target, ast.Tuple):
                return

        if not isinstance(target, ast.Name) or not isinstance(node, ast.Assign | ast.AnnAssign):
            raise unexpected(node, "a line of a graph's code")
        name = target.id
        if value is None:
            self._input(name, annotation, node)
        elif isinstance(value, ast.Name):  # Dynamo's `l_x_ = L_x_`
            self._names[name] = self.visit(value)
        elif isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
            if value.attr in self._bodies:
                self._names[name] = ast.Name(f"{value.attr}_graph_0")
                return
            if not annotation:
                raise refuse(
                    node, f"the dump does not hold `{excerpt(value)}`: render the graph itself"
                )
            # Of a constant, a dump has the type only.
            constant = [_type(annotation, node), ast.Constant(None)]
            self._names[name] = ast.Call(ast.Name("const"), constant, [])
        else:
            kind = _type(annotation, node)
            if annotation and isinstance(value, ast.Subscript):
                self._note_type_of_item(value, kind)
            call = self._call(value)
            self._values[name] = _at(node, ast.AnnAssign(ast.Name(name), kind, call, 1))

    def _note_type_of_item(self, item: ast.Subscript, kind: ast.expr) -> None:
        """Write the type of an item into that of its source.

        Of several outputs, a dump has only the types of those that are read.
        """
        source = self._values.get(ast.unparse(item.value))
        index = getattr(item.slice, "value", None)
        if source is None or type(index) is not int:
            return
        if not isinstance(source.annotation, ast.Name | ast.Tuple):
            return
        items: list[ast.expr] = []
        if isinstance(source.annotation, ast.Tuple):
            items += source.annotation.elts
        while len(items) <= index:
            items.append(ast.Name("_"))
        items[index] = kind
        source.annotation = _at(source, ast.Tuple(items))

    def _return(self, value: ast.expr | None, at: ast.Return) -> list[ast.stmt]:
        """Read the results; return the convention ``returns = list``, none of a tuple."""
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "pytree.tree_unflatten":
            value = value.args[0]
        convention, results = "value", [value or ast.Constant(None)]
        if isinstance(value, ast.Tuple | ast.List):
            convention, results = "list", value.elts
        for result in results:
            named = self.visit(result)
            for node in ast.walk(named):
                if isinstance(node, ast.Name) and node.id in self._values:
                    node.id = f"fwd._.{node.id}"
            self._results.append(_at(at, ast.Expr(ast.Yield(_expression(ast.unparse(named))))))

        if isinstance(value, ast.Tuple):
            return []
        return ast.parse(f"returns = {convention}").body

    def _call(self, value: ast.expr) -> ast.Call:
        """Return the right-hand side of a line as a call of an operator."""
        keywords: list[ast.keyword] = []
        match value:
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]) if (
                type(sign) in _OPERATORS
            ):
                name, operands = f"operator.{_OPERATORS[type(sign)]}", [left, right]
            case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
                name, operands = f"operator.{_OPERATORS[type(sign)]}", [operand]
            case ast.Subscript(source, index):
                name, operands = "operator.getitem", [source, index]
            case ast.Call(ast.Attribute(source, method) as function, operands, keywords):
                name = ast.unparse(function).removeprefix("torch.ops.").removesuffix(".default")
                name = name.replace("higher_order.", "hop.", 1)
                first = name.partition(".")[0]
                if first in self._values or first in self._names:
                    name, operands = f"method.{method}", [source, *operands]
            case _:
                raise unexpected(value, "a call of an operator")

        named = [ast.keyword(each.arg, self.visit(each.value)) for each in keywords]
        return ast.Call(_expression(name), [self.visit(operand) for operand in operands], named)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._names.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        spelled = _CONSTANTS.get(ast.unparse(node))
        if spelled is None:
            return node
        return ast.Name(spelled)

    def visit_Call(self, node: ast.Call) -> Any:
        if ast.unparse(node.func) == "device" and node.keywords:
            return _expression(f"device({ast.unparse(node.keywords[0].value)})")
        return self.generic_visit(node)
