"""From a text to the graph again: ``parse(render(gm))`` is ``gm``, runnable.

A line is made into one node for each layer that it stands for. Linear in nodes; nothing of the text is ever
evaluated as Python.

``unfaithful`` says whether a text is all that it takes to make its graph again: asked before it becomes a golden.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from pytest_gtrainer._torch.graph_text import append_node
from pytest_gtrainer._torch.operators import OpOverload
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.literals import constants as constants_of
from pytest_gtrainer.graphtext.operands import Operands, Sizes, may_be_symbolic
from pytest_gtrainer.graphtext.operators import (
    UnknownOperator,
    is_method,
    names_of_groups,
    operator_named,
    operator_text,
)
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.graphtext.sections import SectionKey
from pytest_gtrainer.graphtext.syntax import (
    COMPUTED_SPACES,
    Computed,
    LinePlace,
    ScopeAt,
    chain,
    computed,
    input_key_at,
    integer,
    links_of,
    path_at,
    refuse,
    scope_at,
    shown,
)
from pytest_gtrainer.graphtext.tags import write_tags
from pytest_gtrainer.graphtext.unfolding import Source, TextProgram, read

_KIND_OF_SPACE = {"P": "parameter", "B": "buffer", "I": "input"}
_MOST_RANKS = 1 << 20


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
        program: TextProgram,
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
        self._scopes: dict[ast.expr | None, ScopeAt] = {}
        self._targets: dict[ast.expr, tuple[str, Any]] = {}
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
        for key, source in program.statements():
            self._run(key, source)
        self._finish()

    def _body(self, program: TextProgram) -> fx.GraphModule:
        parser = _Parser(program, self._sizes.body(), self._given, self._group_names, self._allow)
        gm = fx.GraphModule(_root(parser.operands.attributes), parser.graph)
        gm.meta["gt_groups"] = parser.groups
        return gm

    # -- definitions

    def _define(self, name: str, node: ast.expr) -> None:
        call = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        argument = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None
        nowhere = LinePlace("fwd", None)
        if call == "group" and argument is not None:
            ranks = self.operands.operand(argument, nowhere)
            if ranks is not None and not _are_ranks(ranks):
                told = shown(argument)
                raise refuse(argument, f"expected the ranks of a group, `range(0, 8)` or `[0, 4]`, found `{told}`")
            self._ranks[name] = None if ranks is None else tuple(ranks)
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

    def _run(self, key: SectionKey, source: Source) -> None:
        node, place = source.node, LinePlace(*key)
        if key.space == "out":
            self._result(node, place)
        elif key.space not in COMPUTED_SPACES and isinstance(node, ast.AnnAssign):
            self._input(node, place)
        elif key.space in COMPUTED_SPACES and (parts := computed(node)) is not None:
            self._computed(parts, source.scope, place)
        else:
            raise refuse(node, f"expected `name: type = operator(...)`, found `{shown(node)}`")

    def _input(self, node: ast.AnnAssign, place: LinePlace) -> None:
        links, space = chain(node.target), place.space
        if node.value is not None or len(links) < 2 or links[0].value != space:
            raise refuse(node, f"expected an input like `{space}.layers[0].w: f32[2, 4]`, found `{shown(node)}`")
        _, fqn, _ = key = input_key_at(links)(place.layer)
        name = fqn.replace(".", "_") or "arg"
        made = append_node(self.graph, name if name.isidentifier() else f"arg_{name}", "placeholder", name, (), {})
        made.target = made.name
        if space in _KIND_OF_SPACE:
            made.meta["gt_input"] = {"kind": _KIND_OF_SPACE[space], "fqn": fqn}
        self._set_value(made, node.annotation, place)
        self.operands.add_input(key, made, node.target)

    def _computed(self, parts: Computed, heading: ast.expr | None, place: LinePlace) -> None:
        if heading not in self._scopes:
            self._scopes[heading] = scope_at(links_of("_") if heading is None else chain(heading))
        place.scope = self._scopes[heading](place)
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
            path = path_at(links[1:])(None)
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
            self._result_names.append(path_at(chain(node.targets[0]))(place.layer))
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


def _are_ranks(value: Any) -> bool:
    is_short = isinstance(value, range | list) and len(value) <= _MOST_RANKS
    return is_short and all(type(rank) is int and rank >= 0 for rank in value)


def unfaithful(gm: fx.GraphModule, text: str, *, mesh: Mapping[str, int] | None = None) -> str | None:
    """Where ``text``, the full view of ``gm``, would be read back as another graph; None if nowhere.

    A graph that calls what no text may call (a function of Python, a lambda) cannot be read back at all;
    its text is only compared, and nothing is said of it.
    """
    namespaces = _namespaces(gm)
    if namespaces is None:
        return None
    try:
        reread = render(parse(text, constants=constants_of(gm), allow=namespaces), mesh=mesh)
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
        are_known = all(operator_named(operator_text(target), namespaces) is target for target in targets)
    except UnknownOperator:
        return None
    return namespaces if are_known and all(map(is_method, methods)) else None
