"""Parse graph text: ``parse(render(gm))`` is ``gm`` again, and it runs.

A person may write the text, too, with another indentation, lines that go on, and comments. The
standard library's ``ast`` reads it. What is not in the grammar is refused, and nothing is ever
evaluated as Python. Cost: linear in nodes.

A *definition* is an assignment at the head of a text; a *body* is a graph inside the graph.
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
from pytest_gtrainer.graph.nodes import graphs_in
from pytest_gtrainer.graph.same_on_ranks import nodes_within
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
from pytest_gtrainer.graphtext.sections import Line, SectionKey
from pytest_gtrainer.graphtext.spelling import constants as constants_of
from pytest_gtrainer.graphtext.spelling import spell_description
from pytest_gtrainer.graphtext.syntax import (
    COMPUTED_SPACES,
    LinePlace,
    chain,
    excerpt,
    path_at,
    refuse,
    unexpected,
)

_KIND_OF_SPACE = {"P": "parameter", "B": "buffer", "I": "input"}
_MOST_RANKS = 1 << 20
_SPACES = (*syntax.INPUT_SPACES, *COMPUTED_SPACES, "out")
_CONVENTIONS = {"owners": ("inferred",), "returns": ("list", "value")}
_BODY_NAME = re.compile(r"\w+_graph_\d+", re.ASCII)


def parse(
    text: str,
    *,
    constants: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> fx.GraphModule:
    """Return the graph of a text, with the metadata that passes read.

    Args:
        text: graph text, written by ``render`` or by a person; or one graph of ``print_readable``,
            tlparse or an ``fx_graph_runnable`` file. Such a dump has neither modules nor
            directions, and of constants it has the types only.
        constants: values that the text gives by a digest or a path only, from
            ``graphtext.constants(gm)``.
        groups: names of process groups by their symbol in the text; by default this process's group
            with the ranks of the text, or the symbol itself.
        allow: namespaces of operators that the text may call besides torch's.

    Raises:
        TextError: the text is not graph text; says line, column and what was expected.
    """
    gm = parser_of(text, constants, groups, allow).module()
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    has_types = any("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    # An ``fx_graph_runnable`` file has the types of inputs only.
    if is_dump(text) and not has_types and mode is not None:
        try:
            FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
        except Exception as error:
            raise TextError(
                f"the file has types of inputs only, and no fake tensor passes: {error}", 1
            ) from error

    return gm


def parser_of(
    text: str,
    constants: Mapping[str, Any] | None = None,
    groups: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
) -> "_Parser":
    """Parse a text up to its ``graph``, without compiling a module. Arguments as of ``parse``."""
    fields, version = header.read(text), header.version_of(text)
    if (view := fields.get("view")) in header.PARTIAL_VIEWS:
        raise TextError(
            f"this is the {view} view of a graph, a part of it: render the full view to parse it", 1
        )

    if version is not None and version != header.VERSION:
        advice = "render the graph again"
        if version > header.VERSION:
            advice = "it was made by a newer pytest-gtrainer, so upgrade"
        elif "remake" in fields:
            advice = f"remake it with `{fields['remake']}`"
        raise TextError(
            f"format v{version}, and this pytest-gtrainer reads v{header.VERSION}: {advice}", 1
        )

    try:
        # Python warns of an odd escape in a string of the text, which nobody needs to know.
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(
            f"{error.msg}: graph text is a part of Python", error.lineno or 1, error.offset or 0
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "it is nested too deeply"
        if isinstance(error, ValueError):
            reason = str(error)
        raise TextError(f"this cannot be read as Python: {reason}", 1) from None

    try:
        statements = tree.body
        if is_dump(text):
            statements = translated(tree)
        sizes = Sizes(symbolic=may_be_symbolic(text))
        limits = _Limits(LineBudget(MOST_ADDED + text.count("\n")))
        return _Parser(statements, sizes, constants or {}, tuple(allow), limits).make(groups or {})
    except RecursionError:
        raise TextError("something in this text is nested too deeply", 1) from None


def _sections_of(node: ast.For | ast.If) -> dict[str, SectionKey]:
    """Return the sections of ``if fwd:`` or ``for i in fwd.layers[0:8]:``, by name."""
    if node.orelse:
        raise refuse(node.orelse[0], "a section has no `else`")
    if isinstance(node, ast.If):
        where, word, expected = node.test, "if", f"one of {', '.join(_SPACES)}"
    else:
        where, word = node.iter, f"for {ast.unparse(node.target)} in"
        expected = "`for i in fwd.layers[0:8]:`"

    names = section_names(f"{word} {ast.unparse(where)}:", node.lineno, where.col_offset + 1)
    # The index of a heading, ``[0:8]``, is no link of a chain.
    space, *path = chain(where.value if isinstance(where, ast.Subscript) else where)
    if not names[0] or space.value not in _SPACES or bool(path) == isinstance(node, ast.If):
        found = excerpt(where)
        raise refuse(where, f"expected {expected}, found `{found}`{nearest(found, _SPACES)}")
    if any(link.relative for link in path):
        raise refuse(where, "a section's own path is not relative")
    # ``key_of`` takes a name that it cannot read for a space, so a wrong path is refused here.
    syntax.static_path(path)
    return {name: syntax.key_of(name) for name in names}


def _parameter_name(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(name)):
            return name
    raise unexpected(node, "a list of parameter names")


def _lines(statements: Sequence[ast.stmt], scope: ast.expr | None = None) -> Iterator[Line]:
    """Yield statements by their names, with their syntax tree and that of their ``with``."""
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
                raise unexpected(node, "`mm: f32[2, 4] = aten.mm(x, y)`")

        yield Line(heading, name, (node, scope))


@dataclass
class _Limits:
    """The size that a text may have, bodies included: a small text must not take all memory."""

    lines: LineBudget
    ranks: int = _MOST_RANKS


class _Parser:
    """Makes one graph; a body has a parser of its own.

    The whole text is read and counted before any node is made.
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
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        self._blocks: list[TextBlock] = []
        # sections by the name that ``like(...)`` takes, and definitions of called modules by path
        self._keys: dict[str, SectionKey] = {}
        self._modules: dict[str, ast.expr] = {}
        self._bodies: dict[str, _Parser] = {}
        self._read(statements)
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
                    self._make_line(self._keys[name], *line.source)
        self._finish()
        return self

    def module(self) -> fx.GraphModule:
        try:
            gm = fx.GraphModule(self.operands.attributes, self.graph)
        except (SyntaxError, AttributeError) as error:
            # FX writes the `repr` of a constant that was given into its code.
            raise TextError(f"torch.fx cannot write the code of this graph: {error}", 1) from error
        gm.meta["gt_groups"] = self.groups
        return gm

    def _read(self, statements: Sequence[ast.stmt]) -> None:
        """Evaluate the definitions, and keep sections and bodies for ``make``."""
        defined: set[str] = set()
        bodies: list[ast.FunctionDef] = []

        for node in statements:
            match node:
                # A body of a graph that a node calls.
                case ast.FunctionDef(name):
                    if node.decorator_list or node.returns or ast.unparse(node.args):
                        raise refuse(
                            node,
                            "a body takes its inputs in a section `if A:`: "
                            f"expected `def {name}():`",
                        )
                    if name in defined or not _BODY_NAME.fullmatch(name):
                        raise refuse(
                            node,
                            "a body's name is its own and ends like `cond_graph_0`, "
                            f"found `{name}`",
                        )
                    defined.add(name)
                    bodies.append(node)

                # A group, a size, a device or a setting.
                case ast.Assign([ast.Name(name)]):
                    if name in defined:
                        raise refuse(node, f"`{name}` is defined twice")
                    defined.add(name)
                    self._define(name, node.value)

                # A module that a node calls, ``module.layers[0].up = ...``.
                case ast.Assign([ast.Attribute() | ast.Subscript() as target]) if (
                    chain(target)[0].value == "module"
                ):
                    path = path_at(chain(target)[1:], None)
                    if path in self._modules:
                        raise refuse(node, f"the module `{path}` is defined twice")
                    self._modules[path] = node.value
                case ast.Assign():
                    raise unexpected(node, "a definition like `fsdp = group([0, 4])`")

                # A section, whose lines are read by ``make``.
                case ast.For() | ast.If():
                    sections = _sections_of(node)
                    self._keys |= sections
                    block = TextBlock(node.lineno, tuple(sections), tuple(_lines(node.body)))
                    self._limits.lines.spend(block, max(len(block.lines), 1))
                    self._blocks.append(block)
                case _:
                    raise unexpected(node, "a section (`if fwd:`, `for i in fwd.layers[0]:`)")

        for body in bodies:
            # Bodies share the symbols of the graph, all of which are defined now.
            self._bodies[body.name] = _Parser(
                body.body, self._sizes.body(), self._given, self._allow, self._limits
            )

    def _define(self, name: str, node: ast.expr) -> None:
        """Keep a definition: a group, a size, a device or a setting of the graph."""
        nowhere = LinePlace("fwd", None)
        match node:
            case ast.Call(ast.Name("group"), [argument]):
                self._ranks[name] = self._group(argument, self.operands.operand(argument, nowhere))
            case ast.Call(ast.Name("size"), [], []):
                self._sizes.define(name, None)
            case ast.Call(ast.Name("size"), [argument]):
                example = self.operands.operand(argument, nowhere)
                if type(example) not in (int, float):
                    raise unexpected(argument, "the example of a symbol, `size(16)`")
                self._sizes.define(name, example)
            case ast.Call(ast.Name("device")) if name == "default":
                self._sizes.device = self.operands.operand(node, nowhere)
            case ast.Name(word) if word in _CONVENTIONS.get(name, ()):
                self._settings[name] = word
            case _ if name == "hooks":
                raise refuse(
                    node,
                    "no text holds the hooks of a graph: remove this line to read the graph "
                    "without them",
                )
            case _ if name == "structure":
                self._settings[name] = ast.unparse(node)
            case ast.List(items) if name == "managed":
                self._settings[name] = tuple(map(_parameter_name, items))
            case _:
                raise unexpected(node, f"a definition like `{name} = group(range(0, 8))`")

    def _group(self, node: ast.expr, ranks: Any) -> tuple[int, ...] | None:
        """Return the ranks of a group, ``range(0, 8)``, ``[0, 4]`` or None."""
        if ranks is None:
            return None
        # A range of 2**60 ranks is a short text, so its length is checked before its items.
        if isinstance(ranks, range | list) and ranks[self._limits.ranks :]:
            raise refuse(
                node,
                f"the groups of a text have at most {_MOST_RANKS} ranks together, and with "
                f"`{excerpt(node)}` they have more",
            )

        if not isinstance(ranks, range | list) or not all(
            type(rank) is int and rank >= 0 for rank in ranks
        ):
            raise unexpected(node, "the ranks of a group, `range(0, 8)` or `[0, 4]`")

        self._limits.ranks -= len(ranks)
        return tuple(ranks)

    def _make_line(self, key: SectionKey, node: ast.stmt, heading: ast.expr | None) -> None:
        """Make the node of one statement, or keep a result."""
        place = LinePlace(*key)
        match node:
            case _ if key.space == "out":
                self._result(node, place)
            case ast.AnnAssign() if key.space not in COMPUTED_SPACES:
                self._input(node, place)
            case ast.AnnAssign(ast.Name(name), kind, ast.Call() as call) if (
                key.space in COMPUTED_SPACES
            ):
                links = syntax.links_of("_") if heading is None else chain(heading)
                place.scope = syntax.scope_at(links, place)
                made = self._computed(name, kind, call, place)
                self.operands.add(place.scope, name, made, node.target)
            case _:
                raise unexpected(node, "`name: type = operator(...)`")

    def _input(self, node: ast.AnnAssign, place: LinePlace) -> None:
        """Add the placeholder of a line such as ``P.layers[0].w: f32[2, 4]``."""
        links, space = chain(node.target), place.space
        may_have_value = node.value is None or space in ("A", "I")
        if not may_have_value or len(links) < 2 or links[0].value != space:
            raise unexpected(node, f"an input like `{space}.layers[0].w: f32[2, 4]`")

        key = syntax.input_key_at(links, place.layer)
        name = key.fqn.replace(".", "_") or "arg"
        default: tuple[Any, ...] = ()
        if node.value is not None:
            default = (self.operands.operand(node.value, place),)

        name_of_node = name if name.isidentifier() else f"arg_{name}"
        made = append_node(self.graph, name_of_node, "placeholder", name, default, {})
        # The namespace of the graph may have changed a name that is taken.
        made.target = made.name
        # Arguments of a foreign graph are identified by their position, or by their use.
        if space in _KIND_OF_SPACE:
            made.meta["gt_input"] = {"kind": _KIND_OF_SPACE[space], "fqn": key.fqn}
        elif not key.fqn.isdecimal():
            made.meta["gt_argument"] = key.fqn

        self._write_annotation(made, node.annotation, place, owned=False)
        self.operands.add_input(key, made, node.target)

    def _computed(
        self, name: str, annotation: ast.expr, call: ast.Call, place: LinePlace
    ) -> fx.Node:
        op, target = self._targets.get(call.func) or self._target(call.func)
        args = tuple([self.operands.operand(argument, place) for argument in call.args])
        kwargs = {}
        for item in call.keywords:
            if item.arg is None:
                raise refuse(item.value, "expected named arguments, found `**`")
            kwargs[item.arg.removesuffix("__kw")] = self.operands.operand(item.value, place)
        made = append_node(self.graph, name, op, target, args, kwargs)
        owned = self._settings.get("owners") != "inferred"
        self._write_annotation(made, annotation, place, owned=owned)
        return made

    def _write_annotation(
        self, node: fx.Node, annotation: ast.expr, place: LinePlace, *, owned: bool
    ) -> None:
        """Write type and tags, ``f32[2] | must_save``, into the metadata of a node."""
        tags: list[ast.expr] = []
        while isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            tags.insert(0, annotation.right)
            annotation = annotation.left
        write_tags(node.meta, tags, place, owned=owned)
        if (value := self._sizes.value(annotation, place)) is not None:
            node.meta["val"] = value

    def _target(self, node: ast.expr) -> tuple[str, Any]:
        """Return kind and target of the node that a line makes.

        A line may stand for a hundred layers, so the result is kept.
        """
        links = chain(node)
        first, word = links[0].value, str(links[-1].value)
        if first == "module" and len(links) > 1:
            found: tuple[str, Any] = "call_module", self._module(path_at(links[1:], None), node)
        elif links[-1].kind == "word" and len(links) > 1:
            if word not in self._given:
                raise refuse(
                    node,
                    f"no text holds the function `{excerpt(node)}`: give "
                    "constants=graphtext.constants(gm) of the graph that was rendered, or "
                    f"{{{word!r}: function}}",
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
        """Attach the module that a line calls, a body of the text or a given one; return its path.

        A given module has to be the one that the text describes.
        """
        definition = self._modules.get(path)
        module = self._given.get(path)
        if isinstance(definition, ast.Name) and definition.id in self._bodies:
            module = self.operands.names[definition.id]
        elif path not in self._given:
            raise refuse(
                node, f"no text holds the module `{path}`: give constants={{{path!r}: module}}"
            )
        elif definition is not None and isinstance(module, nn.Module):
            found = ast.unparse(ast.parse(spell_description(module), mode="eval"))
            if found != ast.unparse(definition):
                raise refuse(
                    definition,
                    f"the module given for `{path}` is another one than the text's: expected "
                    f"`{ast.unparse(definition)}`, found `{found}`",
                )

        self.operands.attributes.setdefault(path, module)
        return path

    def _result(self, node: ast.stmt, place: LinePlace) -> None:
        """Read one result; ``yield from`` has all of them in one structure."""
        has_all = isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom)
        if "whole" in self._settings or (has_all and self._results):
            raise refuse(node, "`yield from` has all results of a graph: no other stands beside it")
        if self._results and self._settings.get("returns") == "value":
            raise refuse(node, "this is a second result, and `returns = value` is of one")
        match node:
            case ast.Assign([target], value):
                self._result_names.append(path_at(chain(target), place.layer))
                self._results.append(self.operands.operand(value, place))
            case ast.Expr(ast.Yield(ast.expr() as value)):
                self._results.append(self.operands.operand(value, place))
            case ast.Expr(ast.YieldFrom(value)):
                self._settings["whole"] = self.operands.operand(value, place)
            case _:
                raise unexpected(node, "`loss = ...` or `yield ...`")

    def _finish(self) -> None:
        results: Any = tuple(self._results)
        if "whole" in self._settings:
            results = self._settings["whole"]
        elif self._settings.get("returns") == "list":
            results = self._results
        elif self._settings.get("returns") == "value":
            results = next(iter(self._results), None)

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
    """Return the first difference between the full view ``text`` and the text of what it parses to.

    Returns None if there is none, or if the graph calls functions of Python, which no text holds.
    """
    namespaces = _namespaces(gm)
    if namespaces is None:
        return None
    try:
        again = parse(text, constants=constants_of(gm), allow=namespaces)
        reread = render(again, mesh=mesh, sizes=sizes)
    except TextError as error:
        return f"{error}\n  text:  {text.splitlines()[error.line - 1].strip()}"

    old, new = header.body(text).splitlines(), header.body(reread).splitlines()
    first = len(text.splitlines()) - len(old) + 1
    end = "(ends here)"
    for number, (line, other) in enumerate(zip_longest(old, new, fillvalue=end), start=first):
        if line != other:
            return f"line {number}\n  text:  {line.strip()}\n  again: {other.strip()}"
    return None


def _namespaces(gm: fx.GraphModule) -> set[str] | None:
    """Return the namespaces of the operators that a graph and its bodies call.

    Returns None if they call anything else, or have hooks.
    """
    if any(map(hooks_of, graphs_in(gm))):
        return None
    targets: set[Any] = set()
    namespaces: set[str] = set()
    for node in nodes_within(gm):
        if node.op == "call_function":
            targets.add(node.target)
            if isinstance(node.target, OpOverload):
                namespaces.add(node.target.namespace)
        elif node.op == "call_method" and not is_method(str(node.target)):
            return None

    try:
        for target in targets:
            if operator_named(function_of(target).text, namespaces) is not target:
                return None
    except UnknownOperator:
        return None
    return namespaces
