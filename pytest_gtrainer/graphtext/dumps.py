"""Text of ``print_readable``, which tlparse shows and ``fx_graph_runnable`` files hold, as graph
text.

``translated`` makes the syntax tree of the one into that of the other; nothing of the dump is ever
run. Lines keep their numbers, so errors tell those of the file. A dump tells neither modules nor
directions: all values stand in ``fwd`` of ``_``, and inputs in ``A`` by the names that they have
there.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from pytest_gtrainer.graphtext.literals import TORCH_WORDS
from pytest_gtrainer.graphtext.syntax import refuse, shown

_CLASS = re.compile(r"^class \w+\((torch\.)?nn\.Module\):", re.MULTILINE)
_TENSOR = re.compile(r"(\w+)\[([^\[\]]*)\](?:\[([^\[\]]*)\])?([a-z]*)[:\d]*")
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
    """The statements of graph text for a dump; a TextError if it holds several graphs, or an
    unreadable line.
    """
    first, *others = (node for node in tree.body if isinstance(node, ast.ClassDef))
    if others:
        raise refuse(
            others[0],
            f"this holds several graphs, {first.name} and {others[0].name}: give the text of one",
        )
    types = _types_in_load_args(tree)
    statements = _Dump(first, types).statements
    symbols = sorted(set(_BACKED.findall(" ".join([*map(_told, ast.walk(tree)), *types]))))
    return [*ast.parse("\n".join(f"{name} = size()" for name in symbols)).body, *statements]


def _told(node: ast.AST) -> str:
    """The annotation of a line or an argument, where a dump writes types."""
    annotation = getattr(node, "annotation", None)
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ""


def _types_in_load_args(tree: ast.Module) -> list[str]:
    """The types of the inputs of an ``fx_graph_runnable`` file, which tells no others."""
    types = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if (name := ast.unparse(call.func)) == "reader.symint":
            told = [item.value for item in call.keywords if item.arg == "expr"]
            types.append(f"Sym({ast.literal_eval(told[0]) if told else ast.unparse(call.args[0])})")
        elif name == "reader.tensor":
            sizes = "".join(
                f"[{ast.unparse(argument).strip('(,)')}]" for argument in call.args[1:3]
            )
            dtypes = [
                _CONSTANTS[ast.unparse(item.value)] for item in call.keywords if item.arg == "dtype"
            ]
            types.append((dtypes or ["f32"])[0] + sizes)
    return types


def _type(told: str, at: ast.AST) -> ast.expr:
    """``f32[2, 8][8, 1]cuda:0`` or ``Sym(s0)`` as a type of graph text; ``_`` where nothing is
    told.
    """
    spelled = told or "_"
    if (number := _NUMBER.fullmatch(told)) is not None:
        spelled = f"{'float' if re.search(r'[.]|[0-9]e', number[1]) else 'int'}[{number[1]}]"
    elif (tensor := _TENSOR.fullmatch(told)) is not None:
        dtype, shape, strides, device = tensor.groups()
        spelled = f"{dtype}[{shape or '()'}]" + (f"[{strides}]" if strides else "")
        spelled += f" @ {device}" if device not in ("", "cpu") else ""
    elif told:
        raise refuse(at, f"expected a type like `f32[2, 4][4, 1]cpu` or `Sym(s0)`, found `{told}`")
    return _expression(spelled)


def _expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


def _at(place: ast.AST, made: Any) -> Any:
    """``made`` with the line of what it stands for."""
    for node in ast.walk(made):
        node.lineno, node.col_offset = place.lineno, place.col_offset  # type: ignore[attr-defined]
    return made


class _Dump(ast.NodeTransformer):
    """One class as sections: ``statements``."""

    def __init__(self, graph: ast.ClassDef, types: Sequence[str] = ()) -> None:
        forward = next(
            (node for node in graph.body if getattr(node, "name", "") == "forward"), None
        )
        if not isinstance(forward, ast.FunctionDef):
            raise refuse(graph, f"{graph.name} has no forward, so it holds no graph's code")
        self.statements: list[ast.stmt]
        self._bodies = {node.name: node for node in graph.body if isinstance(node, ast.ClassDef)}
        self._names: dict[str, ast.expr] = {}
        self._inputs: list[ast.stmt] = []
        self._values: dict[str, ast.AnnAssign] = {}
        self._results: list[ast.stmt] = []
        head: list[ast.stmt] = []
        has_lines = any(
            "tree_flatten_spec" in ast.unparse(node) for node in forward.body
        )  # the inputs, of their own
        arguments = [] if has_lines else forward.args.args[1:]
        told = [_told(argument) for argument in arguments]
        if not any(told) and types:
            if len(types) != len(arguments):
                raise refuse(
                    forward, f"there are {len(arguments)} inputs, and load_args tells {len(types)}"
                )
            told = list(types)
        for argument, kind in zip(arguments, told, strict=True):
            self._input(argument.arg, kind, argument)
        for node in forward.body:
            if isinstance(node, ast.Return):
                head = self._return(node.value, node)
            else:
                self._line(node)
        for body in self._bodies.values():
            made: Any = ast.parse(f"def {body.name}_graph_0(): pass").body[0]
            made.body = _Dump(body).statements
            head.append(made)
        sections = (
            ("A", self._inputs),
            ("fwd", list[ast.stmt](self._values.values())),
            ("out", self._results),
        )
        made_of = (ast.If(ast.Name(name), lines, []) for name, lines in sections if lines)
        self.statements = [
            ast.fix_missing_locations(ast.copy_location(node, graph)) for node in (*head, *made_of)
        ]

    def _input(self, name: str, told: str, at: ast.AST) -> None:
        self._names[name] = _expression(f"A.{name}")
        self._inputs.append(
            _at(at, ast.AnnAssign(_expression(f"A.{name}"), _type(told, at), None, 0))
        )

    def _line(self, node: ast.stmt) -> None:
        """A line of the code, whose value is an input, another name for a value, or computed."""
        value, told = getattr(node, "value", None), _told(node)
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign) and (
            ast.unparse(value or node) == "None" or isinstance(target, ast.Tuple)
        ):
            # `mm = None`, where nobody reads it any more; or the inputs, which have lines of their
            # own
            return
        if not isinstance(target, ast.Name) or not isinstance(node, ast.Assign | ast.AnnAssign):
            raise refuse(node, f"expected a line of a graph's code, found `{shown(node)}`")
        name = target.id
        if value is None:
            self._input(name, told, node)
        elif isinstance(value, ast.Name):  # Dynamo's `l_x_ = L_x_`
            self._names[name] = self.visit(value)
        elif isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
            if value.attr not in self._bodies and not told:
                raise refuse(
                    node, f"the dump does not hold `{shown(value)}`: render the graph itself"
                )
            body = ast.Name(f"{value.attr}_graph_0")  # of a constant a dump tells the type alone
            kept = ast.Call(ast.Name("const"), [_type(told, node), ast.Constant(None)], [])
            self._names[name] = body if value.attr in self._bodies else kept
        else:
            kind, source = _type(told, node), getattr(value, "value", None)
            if (
                told
                and isinstance(value, ast.Subscript)
                and isinstance(source, ast.Name)
                and source.id in self._values
            ):
                self._tell_item(self._values[source.id], value.slice, kind)
            self._values[name] = _at(
                node, ast.AnnAssign(ast.Name(name), kind, self._call(value), 1)
            )

    def _tell_item(self, source: ast.AnnAssign, index: ast.expr, kind: ast.expr) -> None:
        """Of several outputs a dump tells the types of those that are read."""
        whole = source.annotation
        if (
            isinstance(index, ast.Constant)
            and type(index.value) is int
            and isinstance(whole, ast.Name | ast.Tuple)
        ):
            known = whole.elts if isinstance(whole, ast.Tuple) else []
            items = [*known, *(ast.Name("_") for _ in range(index.value + 1 - len(known)))]
            items[index.value] = kind
            source.annotation = _at(source, ast.Tuple(items))

    def _return(self, value: ast.expr | None, at: ast.Return) -> list[ast.stmt]:
        """Fills the results; gives how they are returned, unless as a tuple."""
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "pytree.tree_unflatten":
            value = value.args[0]
        several = value.elts if isinstance(value, ast.Tuple | ast.List) else None
        for result in [value or ast.Constant(None)] if several is None else several:
            named = self.visit(result)
            for node in ast.walk(named):
                if isinstance(node, ast.Name) and node.id in self._values:
                    node.id = f"fwd._.{node.id}"
            self._results.append(_at(at, ast.Expr(ast.Yield(_expression(ast.unparse(named))))))
        how = "value" if several is None else "list"
        return [] if isinstance(value, ast.Tuple) else ast.parse(f"returns = {how}").body

    def _call(self, value: ast.expr) -> ast.Call:
        """Return what a line computes, as a call of an operator."""
        keywords: list[ast.keyword] = []
        match value:
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]) if (
                type(sign) in _OPERATORS
            ):
                name, given = f"operator.{_OPERATORS[type(sign)]}", [left, right]
            case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
                name, given = f"operator.{_OPERATORS[type(sign)]}", [operand]
            case ast.Subscript(source, index):
                name, given = "operator.getitem", [source, index]
            case ast.Call(ast.Attribute(source, method) as function, given, keywords):
                name = ast.unparse(function)
                if name.partition(".")[0] in {*self._values, *self._names}:
                    name, given = f"method.{method}", [source, *given]
                name = (
                    name.removeprefix("torch.ops.")
                    .replace("higher_order.", "hop.", 1)
                    .removesuffix(".default")
                )
            case _:
                raise refuse(value, f"expected a call of an operator, found `{shown(value)}`")
        named = [ast.keyword(each.arg, self.visit(each.value)) for each in keywords]
        return ast.Call(_expression(name), [self.visit(argument) for argument in given], named)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._names.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        spelled = _CONSTANTS.get(ast.unparse(node))
        return node if spelled is None else ast.Name(spelled)

    def visit_Call(self, node: ast.Call) -> Any:
        if ast.unparse(node.func) == "device" and node.keywords:
            return _expression(f"device({ast.unparse(node.keywords[0].value)})")
        return self.generic_visit(node)
