"""From a text to the graph again: ``parse(render(gm))`` is ``gm``, runnable.

A text may be what a person writes, with another indentation, lines that go on, comments. It is read by the standard
library's ``ast``; what is not in the grammar is refused, and nothing is ever evaluated as Python. A line is made into
one node for each layer that it stands for. Linear in nodes.

Terms: a *definition* is an assignment at the head; a *body* is a graph inside the graph.

``unfaithful`` says whether a text is all that it takes to make its graph again: asked before it becomes a golden.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer._torch.values import OpOverload
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.folding import MOST_LAYERS, TextBlock, counted, expand
from pytest_gtrainer.graphtext.header import TextError, nearest
from pytest_gtrainer.graphtext.literals import constants as constants_of
from pytest_gtrainer.graphtext.operands import Operands, Sizes, may_be_symbolic
from pytest_gtrainer.graphtext.operators import UnknownOperator, function_of, is_method, names_of_groups, operator_named
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.graphtext.scopes import write_tags
from pytest_gtrainer.graphtext.sections import Layer, Line, SectionKey
from pytest_gtrainer.graphtext.syntax import (
    COMPUTED_SPACES,
    Computed,
    LinePlace,
    chain,
    computed,
    input_key_at,
    integer,
    links_of,
    path_at,
    refuse,
    scope_at,
    shown,
    static_path,
)

_KIND_OF_SPACE = {"P": "parameter", "B": "buffer", "I": "input"}
_MOST_RANKS = 1 << 20
_SPACES = ("P", "B", "I", "A", "fwd", "bwd", "out")
_EDITS = ("like", "drop", "after")
_BODY_NAME = re.compile(r"\w+_graph_\d+", re.ASCII)


def parse(
    text: str,
    *,
    constants: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> fx.GraphModule:
    """The graph of a text, with the metadata that passes read.

    Args:
        text: graph text, written by ``render`` or by a person.
        constants: what the text tells by a digest or a path only, from ``graphtext.constants(gm)``.
        groups: names of process groups by their symbol in the text. By default the group of this
            process that has the ranks which the text says; where there is none the symbol itself.
        allow: namespaces of registered operators that the text may call beside torch's own.

    Raises:
        TextError: the text is not graph text; says line, column and what was expected.
    """
    return _parsed(text, constants, groups, allow).module()


def parse_graph(text: str) -> fx.Graph:
    """As ``parse``, before anything is compiled."""
    return _parsed(text, None, None, ()).graph


def _parsed(
    text: str, constants: Mapping[str, Any] | None, groups: Mapping[str, str] | None, allow: Iterable[str]
) -> _Parser:
    statements, sizes = _statements(text), Sizes(symbolic=may_be_symbolic(text))
    try:
        return _Parser(statements, sizes, constants or {}, groups or {}, tuple(allow))
    except RecursionError:
        raise TextError("something in this text is nested too deeply", 1) from None


def _statements(text: str) -> list[ast.stmt]:
    """The statements of a text.

    Raises:
        TextError: it is not Python, or of another version of the format, or only a view.
    """
    fields, version = header.read(text), header.version_of(text)
    if (view := fields.get("view")) in header.PARTIAL_VIEWS:
        raise TextError(f"this is the {view} view of a graph, a part of it: render the full view to parse it", 1)
    if version is not None and version != header.VERSION:
        advice = f"remake it with `{fields['remake']}`" if "remake" in fields else "render the graph again"
        if version > header.VERSION:
            advice = "it was made by a newer pytest-gtrainer, so upgrade"
        raise TextError(f"format v{version}, and this pytest-gtrainer reads v{header.VERSION}: {advice}", 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # an odd escape in a string is no news to anybody
            return ast.parse(text).body
    except SyntaxError as error:
        raise TextError(f"{error.msg}: graph text is a part of Python", error.lineno or 1, error.offset or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise TextError(f"this cannot be read as Python: {reason}", 1) from None


def _keys_of(node: ast.For | ast.If) -> list[SectionKey]:
    """The sections that ``if fwd:`` or ``for i in fwd.layers[0:8]:`` stands for."""
    if node.orelse:
        raise refuse(node.orelse[0], "a section has no `else`")
    if isinstance(node, ast.If):
        if isinstance(node.test, ast.Name) and node.test.id in _SPACES:
            return [SectionKey(node.test.id, None)]
        found = shown(node.test)
        raise refuse(node.test, f"expected one of {', '.join(_SPACES)}, found `{found}`{nearest(found, _SPACES)}")
    expected = "expected `for i in fwd.layers[0]:` or `for i in fwd.layers[0:8]:`"
    if not isinstance(node.target, ast.Name) or node.target.id != "i" or not isinstance(node.iter, ast.Subscript):
        raise refuse(node, f"{expected}, found `{shown(node)}`")
    numbers = _numbers(node.iter.slice, expected)
    space, *path = chain(node.iter.value)
    if space.kind != "name" or space.value not in _SPACES or not path:
        raise refuse(node.iter, f"{expected}, found `{shown(node.iter)}`")
    if any(link.relative for link in path):
        raise refuse(node.iter, "a section's own path is not relative")
    container = static_path(path)
    return [SectionKey(str(space.value), Layer(container, number)) for number in numbers]


def _numbers(place: ast.expr, expected: str) -> Sequence[int]:
    """The layers of ``[3]`` and ``[0:8]``."""
    if (number := integer(place)) is not None and number >= 0:
        return [number]
    if not isinstance(place, ast.Slice):
        raise refuse(place, f"{expected}, found the index `{shown(place)}`")
    first, step = integer(place.lower), integer(place.step) if place.step else 1
    stop = integer(place.upper) if place.upper else (-1 if step == -1 else None)
    if first is None or stop is None or step not in (1, -1) or first < 0:
        raise refuse(place, f"{expected}: a range has a first layer, an end and at most the step -1")
    count = max(0, (stop - first) * step)  # len(range(...)) has no number beyond a machine word
    if not 0 < count <= MOST_LAYERS:
        raise refuse(place, f"expected 1 to {MOST_LAYERS} layers, found {count}")
    return range(first, stop, step)


def _lines(statements: Sequence[ast.stmt], scope: ast.expr | None = None) -> Iterator[Line]:
    """Statements under their names, each with its syntax tree and that of the module or bucket it stands under."""
    heading = "" if scope is None else ast.unparse(scope)
    for node in statements:
        if isinstance(node, ast.With) and scope is None:
            if len(node.items) != 1 or node.items[0].optional_vars is not None:
                raise refuse(node, "expected one module or bucket, `with layers[0].attention:`")
            yield from _lines(node.body, node.items[0].context_expr)
            continue
        value = node.value if isinstance(node, ast.Expr) else None
        is_edit = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _EDITS
        if isinstance(node, ast.AnnAssign):
            name = node.target.id if isinstance(node.target, ast.Name) else ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = ast.unparse(node.targets[0]) + " ="
        elif is_edit or isinstance(value, ast.Yield | ast.YieldFrom):
            name = ast.unparse(node)
        else:
            raise refuse(node, f"expected `mm: f32[2, 4] = aten.mm(x, y)`, found `{shown(node)}`")
        yield Line(heading, name, (node, scope))


def _spelled(key: SectionKey) -> str:
    """As ``ast.unparse`` spells it in ``like(...)``."""
    text = str(key)
    return text if text.isascii() and '"' not in text else ast.unparse(ast.parse(text, mode="eval"))


class _Parser:
    """Makes one graph; a body has a parser of its own."""

    def __init__(
        self,
        statements: Sequence[ast.stmt],
        sizes: Sizes,
        given: Mapping[str, Any],
        group_names: Mapping[str, str],
        allow: tuple[str, ...],
    ) -> None:
        self.graph = fx.Graph()
        self.groups: dict[str, tuple[int, ...] | None] = {}
        self._sizes, self._given, self._group_names, self._allow = sizes, given, group_names, allow
        self.operands = Operands(self.graph, sizes, given, allow)
        self._settings: dict[str, Any] = {}
        self._targets: dict[ast.expr, tuple[str, Any]] = {}
        self._results: list[Any] = []
        self._result_names: list[str] = []
        self._whole: list[Any] = []
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        self._blocks: list[TextBlock] = []
        self._keys: dict[str, SectionKey] = {}  # by what ``like(...)`` calls them
        bodies = self._read(statements)
        for symbol, name in names_of_groups(self._ranks, group_names).items():
            self.groups[name] = self._ranks[symbol]
            self.operands.names[symbol] = name
        for body in bodies:
            parser = _Parser(body.body, sizes.body(), given, group_names, allow)
            self.operands.names[body.name] = parser.module()
        for name, lines in expand(self._blocks):
            for line in lines:
                self._run(self._keys[name], *line.source)
        self._finish()

    def module(self) -> fx.GraphModule:
        gm = fx.GraphModule(_root(self.operands.attributes), self.graph)
        gm.meta["gt_groups"] = self.groups
        return gm

    def _read(self, statements: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
        """Evaluate the definitions, keep the sections as blocks; gives the bodies."""
        definitions: set[str] = set()
        bodies: dict[str, ast.FunctionDef] = {}
        total = 0
        for node in statements:
            if isinstance(node, ast.FunctionDef):
                if node.decorator_list or node.returns:
                    raise refuse(node, f"expected `def {node.name}():` and no more")
                if ast.unparse(node.args):
                    raise refuse(node, f"a body takes its inputs in a section `if A:`: expected `def {node.name}():`")
                if node.name in bodies or not _BODY_NAME.fullmatch(node.name):
                    raise refuse(node, f"a body's name is its own and ends like `cond_graph_0`, found `{node.name}`")
                bodies[node.name] = node
            elif isinstance(node, ast.Assign):
                name = node.targets[0]
                if len(node.targets) > 1 or not isinstance(name, ast.Name):
                    raise refuse(node, f"expected a definition like `fsdp = group(range(0, 8))`, found `{shown(node)}`")
                if name.id in definitions:
                    raise refuse(node, f"`{name.id}` is defined twice")
                definitions.add(name.id)
                self._define(name.id, node.value)
            elif isinstance(node, ast.For | ast.If):
                named = {_spelled(key): key for key in _keys_of(node)}
                self._keys |= named
                self._blocks.append(TextBlock(node.lineno, tuple(named), tuple(_lines(node.body))))
                total = counted(self._blocks[-1], self._blocks[-1].lines, total)
            else:
                raise refuse(node, f"expected a section (`if fwd:`, `for i in fwd.layers[0]:`), found `{shown(node)}`")
        return list(bodies.values())

    # -- definitions

    def _define(self, name: str, node: ast.expr) -> None:
        call = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        argument = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None
        nowhere = LinePlace("fwd", None)
        if call == "group" and argument is not None:
            ranks = self.operands.operand(argument, nowhere)
            is_short = isinstance(ranks, range | list) and len(ranks) <= _MOST_RANKS
            if ranks is not None and not (is_short and all(type(rank) is int and rank >= 0 for rank in ranks)):
                told = shown(argument)
                raise refuse(argument, f"expected the ranks of a group, `range(0, 8)` or `[0, 4]`, found `{told}`")
            self._ranks[name] = None if ranks is None else tuple(ranks)
        elif shown(node) == "size()":
            self._sizes.define(name, None)
        elif call == "size" and argument is not None:
            example = argument.value if isinstance(argument, ast.Constant) else integer(argument)
            if not isinstance(example, int | float) or isinstance(example, bool):
                raise refuse(argument, f"expected the example of a symbol, `size(16)`, found `{shown(argument)}`")
            self._sizes.define(name, example)
        elif name == "default" and call == "device":
            self._sizes.device = self.operands.operand(node, nowhere)
        elif (name, shown(node)) in (("owners", "inferred"), ("returns", "list"), ("returns", "value")):
            self._settings[name] = shown(node)
        elif name == "managed" and isinstance(node, ast.List):
            for item in node.elts:
                if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                    raise refuse(item, f"expected a list of parameter names, found `{shown(item)}`")
            self._settings[name] = tuple(ast.literal_eval(node))
        else:
            raise refuse(node, f"expected a definition like `{name} = group(range(0, 8))`, found `{shown(node)}`")

    # -- statements

    def _run(self, key: SectionKey, node: ast.stmt, heading: ast.expr | None) -> None:
        place = LinePlace(*key)
        if key.space == "out":
            self._result(node, place)
        elif key.space not in COMPUTED_SPACES and isinstance(node, ast.AnnAssign):
            self._input(node, place)
        elif key.space in COMPUTED_SPACES and (parts := computed(node)) is not None:
            self._computed(parts, heading, place)
        else:
            raise refuse(node, f"expected `name: type = operator(...)`, found `{shown(node)}`")

    def _input(self, node: ast.AnnAssign, place: LinePlace) -> None:
        links, space = chain(node.target), place.space
        if node.value is not None or len(links) < 2 or links[0].value != space:
            raise refuse(node, f"expected an input like `{space}.layers[0].w: f32[2, 4]`, found `{shown(node)}`")
        _, fqn, _ = key = input_key_at(links, place.layer)
        name = fqn.replace(".", "_") or "arg"
        made = append_node(self.graph, name if name.isidentifier() else f"arg_{name}", "placeholder", name, (), {})
        made.target = made.name
        if space in _KIND_OF_SPACE:
            made.meta["gt_input"] = {"kind": _KIND_OF_SPACE[space], "fqn": fqn}
        elif not fqn.isdecimal():
            made.meta["gt_argument"] = fqn
        self._set_value(made, node.annotation, place)
        self.operands.add_input(key, made, node.target)

    def _computed(self, parts: Computed, heading: ast.expr | None, place: LinePlace) -> None:
        place.scope = scope_at(links_of("_") if heading is None else chain(heading), place)
        name, call = parts.name.id, parts.call
        op, target = self._targets.get(call.func) or self._target(call.func)
        args = tuple([self.operands.operand(argument, place) for argument in call.args])
        kwargs = {}
        for item in call.keywords:
            if item.arg is None:
                raise refuse(item.value, "expected named arguments, found `**`")
            kwargs[item.arg.removesuffix("__kw")] = self.operands.operand(item.value, place)
        made = append_node(self.graph, name, op, target, args, kwargs)
        write_tags(made.meta, parts.tags, place, owned=self._settings.get("owners") != "inferred")
        self._set_value(made, parts.type, place)
        self.operands.add(place.scope, name, made, parts.name)

    def _set_value(self, node: fx.Node, kind: ast.expr, place: LinePlace) -> None:
        value = self._sizes.value(kind, place)
        if value is not None:
            node.meta["val"] = value

    def _target(self, node: ast.expr) -> tuple[str, Any]:
        """What a line calls; looked up once, as a line may stand for a hundred layers."""
        links = chain(node)
        first, word = links[0].value, str(links[-1].value)
        if first == "module" and len(links) > 1:
            path = path_at(links[1:], None)
            if path not in self._given:
                raise refuse(node, f"no text holds the module `{path}`: give constants={{{path!r}: module}}")
            self.operands.attributes.setdefault(path, self._given[path])
            found: tuple[str, Any] = "call_module", path
        elif first == "method" and len(links) == 2:
            if not is_method(word):
                raise refuse(node, f"`{word}` is no operator of a tensor, so no text may call it")
            found = "call_method", word
        else:
            try:
                found = "call_function", operator_named(ast.unparse(node), self._allow)
            except UnknownOperator as error:
                raise refuse(node, str(error)) from None
        self._targets[node] = found
        return found

    # -- results

    def _result(self, node: ast.stmt, place: LinePlace) -> None:
        if isinstance(node, ast.Assign):
            self._result_names.append(path_at(chain(node.targets[0]), place.layer))
            self._results.append(self.operands.operand(node.value, place))
            return
        inner = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(inner, ast.Yield | ast.YieldFrom) or inner.value is None:
            raise refuse(node, f"expected `loss = ...` or `yield ...`, found `{shown(node)}`")
        into = self._whole if isinstance(inner, ast.YieldFrom) else self._results
        into.append(self.operands.operand(inner.value, place))

    def _finish(self) -> None:
        results: Any = tuple(self._results)
        if self._whole:
            results = self._whole[0]
        elif self._settings.get("returns") == "list":
            results = self._results
        elif self._settings.get("returns") == "value":
            results = self._results[0] if self._results else None
        output = append_node(self.graph, "output", "output", "output", (results,), {})
        if self._result_names:
            output.meta["gt_outputs"] = tuple(self._result_names)
        if "managed" in self._settings:
            output.meta["gt_managed_order"] = self._settings["managed"]


def _root(attributes: Mapping[str, Any]) -> nn.Module:
    root = nn.Module()
    for path, value in attributes.items():
        *parents, name = path.split(".")
        owner = root
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        if isinstance(value, torch.Tensor):
            owner.register_buffer(name, value)
        else:
            setattr(owner, name, value)
    return root


def unfaithful(
    gm: fx.GraphModule, text: str, *, mesh: Mapping[str, int] | None = None, sizes: str = "both"
) -> str | None:
    """Where ``text``, the full view of ``gm``, would be read back as another graph; None if nowhere.

    A graph that calls what no text may call (a function of Python, a lambda) cannot be read back at all;
    its text is only compared, and nothing is said of it.
    """
    namespaces = _namespaces(gm)
    if namespaces is None:
        return None
    try:
        reread = render(parse(text, constants=constants_of(gm), allow=namespaces), mesh=mesh, sizes=sizes)
    except TextError as error:
        return f"{error}\n  text:  {_shown(text.splitlines()[error.line - 1])}"
    told, again = header.body(text).splitlines(), header.body(reread).splitlines()
    first = len(text.splitlines()) - len(told) + 1
    for number, (one, other) in enumerate(zip_longest(told, again), start=first):
        if one != other:
            return f"line {number}\n  text:  {_shown(one)}\n  again: {_shown(other)}"
    return None


def _shown(line: str | None) -> str:
    return "(ends here)" if line is None else line.strip()


def _namespaces(gm: fx.GraphModule) -> set[str] | None:
    """The namespaces of the operators that a graph calls, bodies included; None if it calls anything else."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    calls = [node for graph in graphs for node in graph.nodes]
    targets = {node.target for node in calls if node.op == "call_function"}
    namespaces = {target.namespace for target in targets if isinstance(target, OpOverload)}
    methods = {str(node.target) for node in calls if node.op == "call_method"}
    try:
        are_known = all(operator_named(function_of(target).text, namespaces) is target for target in targets)
    except UnknownOperator:
        return None
    return namespaces if are_known and all(map(is_method, methods)) else None
