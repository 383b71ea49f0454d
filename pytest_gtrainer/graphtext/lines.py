"""The lines of the full view, in their sections: inputs, what is computed, results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from pytest_gtrainer.graphtext.operators import Operator
from pytest_gtrainer.graphtext.paths import Layer, spell_from, split_layer
from pytest_gtrainer.graphtext.scopes import Input, Scope, Scopes
from pytest_gtrainer.graphtext.sections import Key, Line, Section, section_keys, stretches
from pytest_gtrainer.graphtext.spelling import Speller
from pytest_gtrainer.graphtext.tags import tags_of


def input_sections(scopes: Scopes, speller: Speller) -> Iterable[Section]:
    """One line an input, of neighbouring layers."""
    inputs = list(scopes.inputs)
    keys = [Key(source.space, _layer_of_input(source)) for source in scopes.inputs.values()]
    for key, here in stretches(keys):
        speller.enter_section(key)
        spelled = [(speller.reference(node), speller.type_of(node.meta.get("val"))) for node in inputs[here]]
        yield Section(key, tuple([Line("", f"{name}: {kind}") for name, kind in spelled]))


def _layer_of_input(source: Input) -> Layer | None:
    return split_layer(source.fqn)[0] if source.space in ("P", "B") else None


def schedule_sections(
    scopes: Scopes, names: Mapping[fx.Node, tuple[Scope, str]], speller: Speller
) -> Iterable[Section]:
    """One line a computed value, in the order of the schedule; ``names`` begin with theirs."""
    every = zip(scopes.operators, scopes.owners, strict=True)
    floating = [operator.is_collective or scope.floats for operator, scope in every]
    columns = (scopes.computed, [name for _, name in names.values()], scopes.values, scopes.operators, scopes.owners)
    lines = _Lines(scopes, speller)
    for key, here in stretches(section_keys([scope.key for scope in scopes.owners], floating)):
        speller.enter_section(key)
        yield Section(key, tuple(lines.of(zip(*[column[here] for column in columns], strict=True))))


class _Lines:
    """Makes the lines of computed values. Equal lines are one object: layers repeat them, by the thousand."""

    def __init__(self, scopes: Scopes, speller: Speller) -> None:
        self._tagged, self._unowned, self._speller = scopes.tagged, scopes.unowned, speller
        self._known: defaultdict[str, dict[str, Line]] = defaultdict(dict)

    def of(self, computed: Iterable[tuple[fx.Node, str, Any, Operator, Scope]]) -> list[Line]:
        """The lines of neighbours in the section that the speller has entered."""
        types, spell_call = self._speller.types, self._speller.call
        lines: list[Line] = []
        entered = None
        for node, name, value, operator, scope in computed:
            if scope is not entered:
                entered, heading = scope, self._speller.enter_scope(scope)
                known = self._known[heading]
            kind = types[type(value)](value)
            if node in self._tagged:
                kind = " | ".join([kind, *tags_of(node, node in self._unowned, self._speller.module)])
            text = f"{name}: {kind} = {spell_call(node, operator)}"
            line = known.get(text)
            if line is None:
                line = known[text] = Line(heading, text)
            lines.append(line)
        return lines


def output_sections(output: fx.Node, scopes: Scopes, speller: Speller) -> Iterable[Section]:
    """One line a returned value: by the name the tracer gives it, else in the layer it comes from."""
    result: Any = output.args[0]
    told = output.meta.get("gt_outputs")
    leaves = list(result) if isinstance(result, list | tuple) else [result]
    if isinstance(result, dict) or any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
        yield from _nested_output(result, speller)
        return
    if told is not None and len(told) == len(leaves):
        layers = [split_layer(fqn)[0] for fqn in told]
    else:
        told, layers = [None] * len(leaves), _layers_of(leaves, scopes.of)
    for key, here in stretches([Key("out", layer) for layer in layers]):
        speller.enter_section(key)
        named = zip(told[here], leaves[here], strict=True)
        yield Section(key, tuple([_output_line(fqn, leaf, key, speller) for fqn, leaf in named]))


def _output_line(fqn: str | None, leaf: Any, key: Key, speller: Speller) -> Line:
    value = speller.argument(leaf)
    return Line("", f"yield {value}" if fqn is None else f"{spell_from(fqn, key.layer)} = {value}")


def _layers_of(leaves: Sequence[Any], scopes: Any) -> list[Layer | None]:
    """The layers that values come from; a constant stands with its neighbour."""
    layers: list[Layer | None] = []
    for leaf in leaves:
        known = isinstance(leaf, fx.Node) and leaf in scopes
        layers.append(scopes[leaf].layer if known else layers[-1] if layers else None)
    return layers


def _nested_output(result: Any, speller: Speller) -> Iterable[Section]:
    key = Key("out", None)
    speller.enter_section(key)
    yield Section(key, (Line("", f"yield from {speller.argument(result)}"),))
