"""From a text to the graph again: ``parse(render(gm))`` is ``gm``, runnable.

A text may be what a person writes, with another indentation, lines that go on, comments. It is read
by the standard library's ``ast``; what is not in the grammar is refused, and nothing is ever
evaluated as Python. Linear in nodes. A *definition* is an assignment at the head; a *body* is a
graph inside the graph.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from pytest_gtrainer._torch.graph_text import append_node, hooks_of
from pytest_gtrainer._torch.values import FakeTensor, OpOverload
from pytest_gtrainer.graphtext import header, syntax
from pytest_gtrainer.graphtext.dumps import is_dump, translated
from pytest_gtrainer.graphtext.folding import (
    MOST_ADDED,
    LineBudget,
    TextBlock,
    expand,
    section_names,
)
from pytest_gtrainer.graphtext.header import TextError, nearest
from pytest_gtrainer.graphtext.operands import Operands, Sizes, may_be_symbolic
from pytest_gtrainer.graphtext.operators import (
    UnknownOperator,
    function_of,
    is_method,
    names_of_groups,
    operator_named,
)
from pytest_gtrainer.graphtext.rendering import render
from pytest_gtrainer.graphtext.scopes import write_tags
from pytest_gtrainer.graphtext.sections import Layer, Line, SectionKey
from pytest_gtrainer.graphtext.spelling import constants as constants_of
from pytest_gtrainer.graphtext.spelling import spell_description
from pytest_gtrainer.graphtext.syntax import (
    COMPUTED_SPACES,
    LinePlace,
    chain,
    integer,
    path_at,
    refuse,
    shown,
)

_KIND_OF_SPACE = {"P": "parameter", "B": "buffer", "I": "input"}
_MOST_RANKS = 1 << 20
_SPACES = (*syntax.INPUT_SPACES, *COMPUTED_SPACES, "out")
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
        text: graph text, written by ``render`` or by a person; or one graph of ``print_readable``,
            tlparse or an ``fx_graph_runnable`` file, without modules and directions, and with the
            types of constants only.
        constants: values that the text gives by a digest or a path only, from
            ``graphtext.constants(gm)``.
        groups: names of process groups by their symbol in the text; by default this process's group
            with the ranks of the text, or the symbol itself. ``allow``: namespaces of operators
            that the text may call besides torch's.

    Raises:
        TextError: the text is not graph text; says line, column and what was expected.
    """
    gm = parser_of(text, constants, groups, allow).module()
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    is_told = any("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    if (
        is_dump(text) and not is_told and mode is not None
    ):  # its file tells the types of inputs alone
        try:
            FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
        except Exception as error:
            raise TextError(
                f"the file tells types of inputs alone, and no fake tensor passes: {error}", 1
            ) from error
    return gm


def parser_of(
    text: str,
    constants: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> "_Parser":
    """As ``parse``, before anything is compiled: the ``graph`` of what comes back."""
    fields, version = header.read(text), header.version_of(text)
    if (view := fields.get("view")) in header.PARTIAL_VIEWS:
        raise TextError(
            f"this is the {view} view of a graph, a part of it: render the full view to parse it", 1
        )
    if version is not None and version != header.VERSION:
        advice = (
            f"remake it with `{fields['remake']}`"
            if "remake" in fields
            else "render the graph again"
        )
        if version > header.VERSION:
            advice = "it was made by a newer pytest-gtrainer, so upgrade"
        raise TextError(
            f"format v{version}, and this pytest-gtrainer reads v{header.VERSION}: {advice}", 1
        )
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # an odd escape in a string is no news to anybody
            tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(
            f"{error.msg}: graph text is a part of Python", error.lineno or 1, error.offset or 0
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise TextError(f"this cannot be read as Python: {reason}", 1) from None
    try:
        statements = translated(tree) if is_dump(text) else tree.body
        sizes = Sizes(symbolic=may_be_symbolic(text))
        limits = _Limits(LineBudget(MOST_ADDED + text.count("\n")))
        return _Parser(statements, sizes, constants or {}, tuple(allow), limits).make(groups or {})
    except RecursionError:
        raise TextError("something in this text is nested too deeply", 1) from None


def _keys_of(node: ast.For | ast.If) -> dict[str, SectionKey]:
    """The sections that ``if fwd:`` or ``for i in fwd.layers[0:8]:`` stands for, by what
    ``like(...)`` calls them.
    """
    if node.orelse:
        raise refuse(node.orelse[0], "a section has no `else`")
    where = node.test if isinstance(node, ast.If) else node.iter
    word = "if" if isinstance(node, ast.If) else f"for {ast.unparse(node.target)} in"
    names = section_names(f"{word} {ast.unparse(where)}:", node.lineno, where.col_offset + 1)
    space, *path = chain(where.value if isinstance(where, ast.Subscript) else where)
    if not names[0] or space.value not in _SPACES or bool(path) == isinstance(node, ast.If):
        found = shown(where)
        expected = (
            f"one of {', '.join(_SPACES)}"
            if isinstance(node, ast.If)
            else "`for i in fwd.layers[0:8]:`"
        )
        raise refuse(where, f"expected {expected}, found `{found}`{nearest(found, _SPACES)}")
    if any(link.relative for link in path):
        raise refuse(where, "a section's own path is not relative")
    if not path:
        return {names[0]: SectionKey(names[0], None)}
    container, numbers = (
        syntax.static_path(path),
        [int(name[name.rindex("[") + 1 : -1]) for name in names],
    )
    return {
        name: SectionKey(str(space.value), Layer(container, n))
        for name, n in zip(names, numbers, strict=True)
    }


def _lines(statements: Sequence[ast.stmt], scope: ast.expr | None = None) -> Iterator[Line]:
    """Statements under their names, each with its syntax tree and that of the module or bucket it
    stands under.
    """
    heading = "" if scope is None else ast.unparse(scope)
    for node in statements:
        match node:
            case ast.With([ast.withitem(context, None)], body) if scope is None:
                yield from _lines(body, context)
                continue
            case ast.With() if scope is None:
                raise refuse(node, "expected one module or bucket, `with layers[0].attention:`")
            case ast.AnnAssign(target):
                name = ast.unparse(target)
            case ast.Assign([target]):
                name = ast.unparse(target) + " ="
            case ast.Expr(
                ast.Yield() | ast.YieldFrom() | ast.Call(ast.Name("like" | "drop" | "after"))
            ):
                name = ast.unparse(node)
            case _:
                raise refuse(
                    node, f"expected `mm: f32[2, 4] = aten.mm(x, y)`, found `{shown(node)}`"
                )
        yield Line(heading, name, (node, scope))


def _kind_and_tags(node: ast.expr) -> tuple[ast.expr, list[ast.expr]]:
    """Split ``f32[2] | must_save`` at its bars."""
    tags: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        tags.insert(0, node.right)
        node = node.left
    return node, tags


@dataclass
class _Limits:
    """What a text may come to, with the graphs inside it: a small one must not take all memory."""

    lines: LineBudget
    ranks: int = _MOST_RANKS


class _Parser:
    """Makes one graph; a body has a parser of its own. All of a text is read and counted before
    anything is made.
    """

    def __init__(
        self,
        statements: Sequence[ast.stmt],
        sizes: Sizes,
        given: Mapping[str, Any],
        allow: tuple[str, ...],
        limits: _Limits,
    ) -> None:
        self.graph = fx.Graph()
        self.groups: dict[str, tuple[int, ...] | None] = {}
        self._sizes, self._given, self._allow, self._limits = sizes, given, allow, limits
        self.operands = Operands(self.graph, sizes, given, allow)
        self._settings: dict[str, Any] = {}
        self._targets: dict[ast.expr, tuple[str, Any]] = {}
        self._results: list[Any] = []
        self._result_names: list[str] = []
        self._whole: list[Any] = []
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        self._blocks: list[TextBlock] = []
        self._keys: dict[str, SectionKey] = {}  # by what ``like(...)`` calls them
        self._modules: dict[str, ast.Assign] = {}  # definitions of called modules, by path
        self._bodies = {
            body.name: _Parser(body.body, sizes.body(), given, allow, limits)
            for body in self._read(statements)
        }
        self._sections = expand(self._blocks, limits.lines)

    def make(self, group_names: Mapping[str, str]) -> "_Parser":
        """Make the graph; ``group_names`` are names of process groups by their symbols."""
        for symbol, name in names_of_groups(self._ranks, group_names).items():
            self.groups[name] = self._ranks[symbol]
            self.operands.names[symbol] = name
        for body, parser in self._bodies.items():
            self.operands.names[body] = parser.make(group_names).module()
        for block, lines in self._sections:
            for name in block.keys:
                for line in lines:
                    self._run(self._keys[name], *line.source)
        self._finish()
        return self

    def module(self) -> fx.GraphModule:
        try:
            gm = fx.GraphModule(self.operands.attributes, self.graph)
        except (
            SyntaxError,
            AttributeError,
        ) as error:  # of a constant that is given and has no `repr` in Python
            raise TextError(f"torch.fx cannot write the code of this graph: {error}", 1) from error
        gm.meta["gt_groups"] = self.groups
        return gm

    def _read(self, statements: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
        """Evaluate the definitions, keep the sections as blocks; gives the bodies."""
        defined: set[str] = set()
        bodies: dict[str, ast.FunctionDef] = {}
        for node in statements:
            match node:
                case ast.FunctionDef(name):
                    if node.decorator_list or node.returns or ast.unparse(node.args):
                        raise refuse(
                            node,
                            f"a body takes its inputs in a section `if A:`: expected `def {name}():`",
                        )
                    if name in bodies or not _BODY_NAME.fullmatch(name):
                        raise refuse(
                            node,
                            f"a body's name is its own and ends like `cond_graph_0`, found `{name}`",
                        )
                    bodies[name] = node
                case ast.Assign([ast.Name(name)]):
                    if name in defined:
                        raise refuse(node, f"`{name}` is defined twice")
                    defined.add(name)
                    self._define(name, node.value)
                case ast.Assign([ast.Attribute() | ast.Subscript() as target]) if (
                    chain(target)[0].value == "module"
                ):
                    path = path_at(chain(target)[1:], None)
                    if path in self._modules:
                        raise refuse(node, f"the module `{path}` is defined twice")
                    self._modules[path] = node
                case ast.For() | ast.If():
                    named = _keys_of(node)
                    self._keys |= named
                    block = TextBlock(node.lineno, tuple(named), tuple(_lines(node.body)))
                    self._limits.lines.spend(block, max(len(block.lines), 1))
                    self._blocks.append(block)
                case _:
                    expected = "a section (`if fwd:`, `for i in fwd.layers[0]:`)"
                    expected = (
                        "a definition like `fsdp = group([0, 4])`"
                        if isinstance(node, ast.Assign)
                        else expected
                    )
                    raise refuse(node, f"expected {expected}, found `{shown(node)}`")
        return list(bodies.values())

    def _define(self, name: str, node: ast.expr) -> None:
        nowhere = LinePlace("fwd", None)
        match node:
            case ast.Call(ast.Name("group"), [argument]):
                self._ranks[name] = self._group(argument, self.operands.operand(argument, nowhere))
            case ast.Call(ast.Name("size"), [], []):
                self._sizes.define(name, None)
            case ast.Call(ast.Name("size"), [argument]):
                example = (
                    argument.value if isinstance(argument, ast.Constant) else integer(argument)
                )
                if not isinstance(example, int | float) or isinstance(example, bool):
                    raise refuse(
                        argument,
                        f"expected the example of a symbol, `size(16)`, found `{shown(argument)}`",
                    )
                self._sizes.define(name, example)
            case ast.Call(ast.Name("device")) if name == "default":
                self._sizes.device = self.operands.operand(node, nowhere)
            case ast.Name(word) if (name, word) in (
                ("owners", "inferred"),
                ("returns", "list"),
                ("returns", "value"),
            ):
                self._settings[name] = word
            case _ if name == "hooks":
                raise refuse(
                    node,
                    "no text holds the hooks of a graph: remove this line to read the graph without them",
                )
            case _ if name == "structure":
                self._settings[name] = ast.unparse(node)
            case ast.List(items) if name == "managed":
                for item in items:
                    if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                        raise refuse(
                            item, f"expected a list of parameter names, found `{shown(item)}`"
                        )
                self._settings[name] = tuple(ast.literal_eval(node))
            case _:
                raise refuse(
                    node,
                    f"expected a definition like `{name} = group(range(0, 8))`, found `{shown(node)}`",
                )

    def _group(self, node: ast.expr, ranks: Any) -> tuple[int, ...] | None:
        """The ranks of a group, ``range(0, 8)``, ``[0, 4]`` or None."""
        if ranks is None:
            return None
        if isinstance(ranks, range | list) and ranks[self._limits.ranks :]:
            said = f"the groups of a text have at most {_MOST_RANKS} ranks together"
            raise refuse(node, f"{said}, and with `{shown(node)}` they have more")
        if not isinstance(ranks, range | list) or not all(
            type(rank) is int and rank >= 0 for rank in ranks
        ):
            raise refuse(
                node,
                f"expected the ranks of a group, `range(0, 8)` or `[0, 4]`, found `{shown(node)}`",
            )
        self._limits.ranks -= len(ranks)
        return tuple(ranks)

    def _run(self, key: SectionKey, node: ast.stmt, heading: ast.expr | None) -> None:
        place = LinePlace(*key)
        match node:
            case _ if key.space == "out":
                self._result(node, place)
            case ast.AnnAssign() if key.space not in COMPUTED_SPACES:
                self._input(node, place)
            case ast.AnnAssign(ast.Name(name), kind, ast.Call() as call) if (
                key.space in COMPUTED_SPACES
            ):
                place.scope = syntax.scope_at(
                    syntax.links_of("_") if heading is None else chain(heading), place
                )
                self.operands.add(
                    place.scope, name, self._computed(name, kind, call, place), node.target
                )
            case _:
                raise refuse(node, f"expected `name: type = operator(...)`, found `{shown(node)}`")

    def _input(self, node: ast.AnnAssign, place: LinePlace) -> None:
        links, space = chain(node.target), place.space
        has_default = node.value is not None and space in ("A", "I")
        if (
            (node.value is not None and not has_default)
            or len(links) < 2
            or links[0].value != space
        ):
            raise refuse(
                node,
                f"expected an input like `{space}.layers[0].w: f32[2, 4]`, found `{shown(node)}`",
            )
        _, fqn, _ = key = syntax.input_key_at(links, place.layer)
        name = fqn.replace(".", "_") or "arg"
        default = () if node.value is None else (self.operands.operand(node.value, place),)
        name_of_node = name if name.isidentifier() else f"arg_{name}"
        made = append_node(self.graph, name_of_node, "placeholder", name, default, {})
        made.target = made.name
        if space in _KIND_OF_SPACE:
            made.meta["gt_input"] = {"kind": _KIND_OF_SPACE[space], "fqn": fqn}
        elif not fqn.isdecimal():
            made.meta["gt_argument"] = fqn
        kind, tags = _kind_and_tags(node.annotation)
        write_tags(made.meta, tags, place, owned=False)
        self._set_value(made, kind, place)
        self.operands.add_input(key, made, node.target)

    def _computed(self, name: str, kind: ast.expr, call: ast.Call, place: LinePlace) -> fx.Node:
        kind, tags = _kind_and_tags(kind)
        op, target = self._targets.get(call.func) or self._target(call.func)
        args = tuple([self.operands.operand(argument, place) for argument in call.args])
        kwargs = {}
        for item in call.keywords:
            if item.arg is None:
                raise refuse(item.value, "expected named arguments, found `**`")
            kwargs[item.arg.removesuffix("__kw")] = self.operands.operand(item.value, place)
        made = append_node(self.graph, name, op, target, args, kwargs)
        write_tags(made.meta, tags, place, owned=self._settings.get("owners") != "inferred")
        self._set_value(made, kind, place)
        return made

    def _set_value(self, node: fx.Node, kind: ast.expr, place: LinePlace) -> None:
        if (value := self._sizes.value(kind, place)) is not None:
            node.meta["val"] = value

    def _target(self, node: ast.expr) -> tuple[str, Any]:
        """Return what a line calls; looked up once, as a line may stand for a hundred layers."""
        links = chain(node)
        first, word = links[0].value, str(links[-1].value)
        if first == "module" and len(links) > 1:
            found: tuple[str, Any] = "call_module", self._module(path_at(links[1:], None), node)
        elif links[-1].kind == "word" and len(links) > 1:
            if word not in self._given:
                raise refuse(
                    node,
                    f"no text holds the function `{shown(node)}`: give constants=graphtext.constants(gm) of the "
                    f"graph that was rendered, or {{{word!r}: function}}",
                )
            found = "call_function", self._given[word]
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

    def _module(self, path: str, node: ast.expr) -> str:
        """Add the module that a line calls: a body of the text, or one that was given and is what
        the text says.
        """
        definition = self._modules.get(path)
        said = None if definition is None else definition.value
        if isinstance(said, ast.Name) and isinstance(
            body := self.operands.names.get(said.id), fx.GraphModule
        ):
            self.operands.attributes.setdefault(path, body)
            return path
        if path not in self._given:
            raise refuse(
                node, f"no text holds the module `{path}`: give constants={{{path!r}: module}}"
            )
        if said is not None and isinstance(given := self._given[path], nn.Module):
            found = ast.unparse(ast.parse(spell_description(given), mode="eval"))
            if found != ast.unparse(said):
                raise refuse(
                    said,
                    f"the module given for `{path}` is another one than the text's: expected "
                    f"`{ast.unparse(said)}`, found `{found}`",
                )
        self.operands.attributes.setdefault(path, self._given[path])
        return path

    def _result(self, node: ast.stmt, place: LinePlace) -> None:
        match node:
            case ast.Assign([_], value) | ast.Expr(ast.Yield(ast.expr() as value)):
                if isinstance(node, ast.Assign):
                    self._result_names.append(path_at(chain(node.targets[0]), place.layer))
                self._results.append(self.operands.operand(value, place))
            case ast.Expr(ast.YieldFrom(value)):
                self._whole.append(self.operands.operand(value, place))
            case _:
                raise refuse(node, f"expected `loss = ...` or `yield ...`, found `{shown(node)}`")

    def _finish(self) -> None:
        by_convention = {
            "list": self._results,
            "value": self._results[0] if self._results else None,
        }
        results: Any = by_convention.get(
            self._settings.get("returns", "tuple"), tuple(self._results)
        )
        results = self._whole[0] if self._whole else results
        output = append_node(self.graph, "output", "output", "output", (results,), {})
        if self._result_names:
            output.meta["gt_outputs"] = tuple(self._result_names)
        if "structure" in self._settings:
            output.meta["gt_structure"] = self._settings["structure"]
        if "managed" in self._settings:
            output.meta["gt_managed_order"] = self._settings["managed"]


def unfaithful(
    gm: fx.GraphModule, text: str, *, mesh: Mapping[str, int] | None = None, sizes: str = "both"
) -> str | None:
    """Return where the full view ``text`` reads back as another graph; None if nowhere, or if it
    calls functions of Python.
    """
    if (namespaces := _namespaces(gm)) is None:
        return None
    try:
        reread = render(
            parse(text, constants=constants_of(gm), allow=namespaces), mesh=mesh, sizes=sizes
        )
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
    """The namespaces of the operators that a graph calls, bodies included.

    None if it calls anything else, as hooks.
    """
    if any(isinstance(module, fx.GraphModule) and hooks_of(module) for module in gm.modules()):
        return None
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    calls = [node for graph in graphs for node in graph.nodes]
    targets = {node.target for node in calls if node.op == "call_function"}
    namespaces = {target.namespace for target in targets if isinstance(target, OpOverload)}
    methods = {str(node.target) for node in calls if node.op == "call_method"}
    try:
        are_known = all(
            operator_named(function_of(target).text, namespaces) is target for target in targets
        )
    except UnknownOperator:
        return None
    return namespaces if are_known and all(map(is_method, methods)) else None
