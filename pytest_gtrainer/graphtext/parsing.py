"""From a text to the graph again: ``parse(render(gm))`` is ``gm``, runnable.

A line is compiled once, whatever the number of layers it stands for, and then made into one
node for each. Linear in nodes; nothing of the text is ever evaluated as Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer.graph.chunks import EAGER, MATERIALIZATION, SPLIT_BOUNDARY, told_in_words
from pytest_gtrainer.graphtext.errors import TextError, nearest
from pytest_gtrainer.graphtext.groups import names_of_groups
from pytest_gtrainer.graphtext.operands import Operands, input_key_at
from pytest_gtrainer.graphtext.registry import UnknownOperator, is_method, operator_named
from pytest_gtrainer.graphtext.scopes import Scope, scope_of
from pytest_gtrainer.graphtext.scoping import PathAt, Place, ScopeAt, path_at, scope_at
from pytest_gtrainer.graphtext.sections import Key
from pytest_gtrainer.graphtext.sizes import At, Sizes, may_be_symbolic
from pytest_gtrainer.graphtext.syntax import Program, Statement, chain, integer, read, refuse, shown
from pytest_gtrainer.graphtext.tags import AT, CHUNK, MISMARKED, TAGS, UNOWNED, apply_tag

_KIND_OF_SPACE = {"P": "parameter", "B": "buffer", "I": "input"}
_FOREIGN = {"fwd": "fwd", "bwd": "bwd"}
_MOST_RANKS = 1 << 20
_Make = Callable[[Place], None]


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
    graph, attributes, known = parse_graph(text, constants=constants, groups=groups, allow=allow)
    gm = fx.GraphModule(_root(attributes), graph)
    gm.meta["gt_groups"] = known
    return gm


def parse_graph(
    text: str,
    *,
    constants: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> tuple[fx.Graph, dict[str, Any], dict[str, tuple[int, ...] | None]]:
    """As ``parse``, before anything is compiled: the graph, its attributes, and ranks of groups by name."""
    try:
        parser = _Parser(read(text), Sizes(symbolic=may_be_symbolic(text)), constants or {}, groups or {}, tuple(allow))
    except RecursionError:
        raise TextError("something in this text is nested too deeply", 1) from None
    return parser.graph, parser.operands.attributes, parser.groups


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


class _Parser:
    """Makes one graph; a body has a parser of its own."""

    def __init__(
        self,
        program: Program,
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
        self._compiled: dict[tuple[int, str], _Make] = {}
        self._results: list[Any] = []
        self._result_names: list[str] = []
        self._whole: list[Any] = []
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        for name, value in program.definitions.items():
            self._define(name, value)
        for symbol, name in names_of_groups(self._ranks, group_names).items():
            self.groups[name] = self._ranks[symbol]
            self.operands.names[symbol] = name
        for name, body in program.bodies.items():
            self.operands.names[name] = self._body(body)
        for key, statement in program.statements():
            self._run(key, statement)
        self._finish()

    def _body(self, program: Program) -> fx.GraphModule:
        parser = _Parser(program, self._sizes.body(), self._given, self._group_names, self._allow)
        gm = fx.GraphModule(_root(parser.operands.attributes), parser.graph)
        gm.meta["gt_groups"] = parser.groups
        return gm

    # -- definitions

    def _define(self, name: str, node: ast.expr) -> None:
        call = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        argument = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None
        if call == "group" and argument is not None:
            self._define_group(name, argument)
        elif call == "size" and argument is not None:
            self._sizes.define(name, self._example(argument))
        elif name == "default" and call == "device":
            self._sizes.device = self.operands.operand_at(node)(Place("fwd", None))
        elif (name, shown(node)) in (("owners", "inferred"), ("returns", "list"), ("returns", "value")):
            self._settings[name] = shown(node)
        elif name == "managed" and isinstance(node, ast.List):
            self._settings[name] = tuple([_fqn(item) for item in node.elts])
        else:
            raise refuse(node, f"expected a definition like `{name} = group(range(0, 8))`, found `{shown(node)}`")

    def _example(self, node: ast.expr) -> int | float:
        if (number := integer(node)) is not None:
            return number
        if isinstance(node, ast.Constant) and type(node.value) is float:
            return node.value
        raise refuse(node, f"expected the example of a symbol, `size(16)`, found `{shown(node)}`")

    def _define_group(self, symbol: str, node: ast.expr) -> None:
        ranks: tuple[int, ...] | None = None
        if not (isinstance(node, ast.Constant) and node.value is None):
            value = self.operands.operand_at(node)(Place("fwd", None))
            if not _are_ranks(value):
                raise refuse(node, f"expected the ranks of a group, `range(0, 8)` or `[0, 4]`, found `{shown(node)}`")
            ranks = tuple(value)
        self._ranks[symbol] = ranks

    # -- statements

    def _run(self, key: Key, statement: Statement) -> None:
        made = self._compiled.get((id(statement), key.space))
        if made is None:
            made = self._compiled[id(statement), key.space] = self._compile(key, statement)
        made(Place(*key))

    def _compile(self, key: Key, statement: Statement) -> _Make:
        node = statement.node
        if key.space == "out":
            return self._output(node)
        if not isinstance(node, ast.AnnAssign):
            raise refuse(node, f"expected `name: type = operator(...)`, found `{shown(node)}`")
        if key.space in ("fwd", "bwd"):
            return self._computed(key, node, statement.scope)
        return self._input(key, node)

    def _input(self, key: Key, node: ast.AnnAssign) -> _Make:
        tokens = chain(node.target)
        if node.value is not None or len(tokens) < 2 or tokens[0].value != key.space:
            raise refuse(node, f"expected an input like `{key.space}.layers[0].w: f32[2, 4]`, found `{shown(node)}`")
        key_at, type_at = input_key_at(tokens), self._sizes.type_at(node.annotation)

        def make(place: Place) -> None:
            source = key_at(place)
            name = source[1].replace(".", "_") or "arg"
            made = append_node(self.graph, name if name.isidentifier() else f"arg_{name}", "placeholder", name, (), {})
            made.target = made.name
            if source[0] in _KIND_OF_SPACE:
                made.meta["gt_input"] = {"kind": _KIND_OF_SPACE[source[0]], "fqn": source[1]}
            _set_value(made, type_at(place))
            self.operands.add_input(source, made, node.target)

        return make

    def _computed(self, key: Key, node: ast.AnnAssign, scope: ast.expr | None) -> _Make:
        if not isinstance(node.target, ast.Name) or not isinstance(node.value, ast.Call):
            raise refuse(node, f"expected `name: type = operator(...)`, found `{shown(node)}`")
        find_scope: ScopeAt = scope_at(chain(scope), _FOREIGN) if scope is not None else _nowhere
        name, call = node.target.id, node.value
        kind, tags = _split_tags(node.annotation)
        type_at, tagged = self._sizes.type_at(kind), self._tags(tags)
        op, target = self._operator(call.func)
        arguments = [self.operands.operand_at(argument) for argument in call.args]
        keywords = {_keyword(item): self.operands.operand_at(item.value) for item in call.keywords}
        at = node.target

        def make(place: Place) -> None:
            place.scope = find_scope(place)
            args = tuple([argument(place) for argument in arguments])
            kwargs = {word: value(place) for word, value in keywords.items()} if keywords else {}
            made = append_node(self.graph, name, op, target, args, kwargs)
            tagged(made, place)
            _set_value(made, type_at(place))
            self.operands.add(place.scope, name, made, at)

        return make

    def _operator(self, node: ast.expr) -> tuple[str, Any]:
        tokens = chain(node)
        first = tokens[0].value
        if first == "module" and len(tokens) > 1:
            path = path_at(tokens[1:])(None)
            if path not in self._given:
                raise refuse(node, f"no text holds the module `{path}`: give constants={{{path!r}: module}}")
            self.operands.attributes.setdefault(path, self._given[path])
            return "call_module", path
        if first == "method" and len(tokens) == 2:
            if not is_method(str(tokens[1].value)):
                raise refuse(node, f"`{tokens[1].value}` is no operator of a tensor, so no text may call it")
            return "call_method", tokens[1].value
        try:
            return "call_function", operator_named(ast.unparse(node), self._allow)
        except UnknownOperator as error:
            raise refuse(node, str(error)) from None

    def _tags(self, nodes: list[ast.expr]) -> Callable[[fx.Node, Place], None]:
        """What a line's scope and tags say, as metadata."""
        owned, mismarked = self._settings.get("owners") != "inferred", False
        own_path: PathAt | None = None
        chunked: tuple[PathAt, list[Any]] | None = None
        extra: dict[str, Any] = {}
        for node in nodes:
            name, values = _tag(node)
            if name == UNOWNED:
                owned = False
            elif name == MISMARKED:
                mismarked = True
            elif name == AT:
                own_path = path_at(chain(values["path"]))
            elif name == CHUNK:
                chunked = path_at(chain(values["path"])), values["words"]
            elif not apply_tag(extra, name, values):
                raise refuse(node, f"`{name}` is no tag{nearest(name, TAGS)}")
        custom = extra.pop("custom", None)

        def apply(node: fx.Node, place: Place) -> None:
            meta, scope = node.meta, place.scope
            if (scope.space == "bwd") != mismarked:
                meta["autograd_backward"] = True
            fqn = scope.owners[0] if owned else ""
            if scope.is_bucket:
                meta["fsdp_bucket"] = {"plan_fqns": list(scope.owners), "direction": scope.space}
                fqn = own_path(place.layer) if own_path else ""
            told = told_in_words(chunked[0](place.layer), *chunked[1]) if chunked else {}
            if fqn or custom or told:
                meta["custom"] = ({"module_fqn": fqn} if fqn else {}) | told | (custom or {})
            if extra:
                meta.update(extra)

        return apply

    # -- results

    def _output(self, node: ast.stmt) -> _Make:
        if isinstance(node, ast.Assign):
            path, value = path_at(chain(node.targets[0])), self.operands.operand_at(node.value)

            def named(place: Place) -> None:
                self._result_names.append(path(place.layer))
                self._results.append(value(place))

            return named
        inner = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(inner, ast.Yield | ast.YieldFrom) or inner.value is None:
            raise refuse(node, f"expected `loss = ...` or `yield ...`, found `{shown(node)}`")
        result: At = self.operands.operand_at(inner.value)
        into = self._whole if isinstance(inner, ast.YieldFrom) else self._results
        return lambda place: into.append(result(place))

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


def _fqn(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise refuse(node, f"expected a list of parameter names, found `{shown(node)}`")


def _are_ranks(value: Any) -> bool:
    is_short = isinstance(value, range | list) and len(value) <= _MOST_RANKS
    return is_short and all(type(rank) is int and rank >= 0 for rank in value)


def _nowhere(place: Place) -> Scope:
    return scope_of(("",), place.space)


def _set_value(node: fx.Node, value: Any) -> None:
    if value is not None:
        node.meta["val"] = value


def _keyword(item: ast.keyword) -> str:
    if item.arg is None:
        raise refuse(item.value, "expected named arguments, found `**`")
    return item.arg.removesuffix("__kw")


def _split_tags(node: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
    """``f32[2] | must_save`` as the type and its tags."""
    tags: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        tags.append(node.right)
        node = node.left
    return node, tags[::-1]


class _Numbers(ast.NodeTransformer):
    """The numbers that Python has no literal for."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(float(node.id)), node) if node.id in ("inf", "nan") else node


def _chunk(node: ast.Call) -> dict[str, Any]:
    """``chunk(path, 0)``, ``chunk(path, split_boundary, eager)``."""
    words = [item.id if isinstance(item, ast.Name) else getattr(item, "value", None) for item in node.args[1:]]
    known = len(words) in (1, 2) and (type(words[0]) is int or words[0] in (SPLIT_BOUNDARY, MATERIALIZATION))
    if not known or words[1:] not in ([], [EAGER]):
        raise refuse(node, f"expected `chunk(path, 0)` or `chunk(path, split_boundary)`, found `{shown(node)}`")
    return {"path": node.args[0], "words": words}


def _tag(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == AT and len(node.args) == 1:
        return AT, {"path": node.args[0]}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == CHUNK:
        return CHUNK, _chunk(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        values: dict[str, Any] = {}
        for item in node.keywords:
            try:
                value = ast.literal_eval(_Numbers().visit(item.value))
            except (ValueError, TypeError):
                raise refuse(item.value, f"expected a literal, found `{shown(item.value)}`") from None
            values |= value if item.arg is None and isinstance(value, dict) else {str(item.arg): value}
        return node.func.id, values
    raise refuse(node, f"expected a tag like `must_save` or `custom(stage=1)`, found `{shown(node)}`")
