"""Graph text: a canonical, readable text of an FX graph, in a subset of Python. Importing it does
not import torch.

``render`` writes it and ``parse`` reads it back; ``lines_of`` gives the lines unfolded, ``unfold``
those of a text; ``diff`` says how two texts differ. ``render_layout`` writes the layout of an eager
model as that of a graph.

- The *space* of a value: ``P`` parameters, ``B`` buffers, ``I`` inputs, ``A`` arguments of which no
  tracer says what they are, ``fwd`` and ``bwd`` computed values. ``out`` is the section of what the
  graph returns.
- The *scope* of a value: the module (or bucket) that it belongs to, and its space. A value's name
  is its operator and a counter inside its scope, so a change in one module renumbers nothing in
  another.
- A *layer*: an element of a numbered container, ``layers[3]``.
- A *section*: a stretch of the schedule of one layer in one space, with relative references: equal
  layers, equal text.
- A *graph line*: one line of one section, unfolded. Graphs are compared line by line; folding is
  presentation only.

What the text leaves out, on purpose: node names, process group names, storage offsets, the index of
the only device of a type, ``requires_grad``, aliasing, ranges of symbols, strides of dimensions of
one element, dead ``getitem`` nodes, whether two uses of a constant share it, values of parameters.
docs/graph-text.md has it all.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_gtrainer.graphtext.folding import unfold
from pytest_gtrainer.graphtext.header import TextError
from pytest_gtrainer.graphtext.sections import GraphLine

if TYPE_CHECKING:
    from pytest_gtrainer.graphtext.differences import diff
    from pytest_gtrainer.graphtext.parsing import parse
    from pytest_gtrainer.graphtext.rendering import lines_of, render, render_layout
    from pytest_gtrainer.graphtext.spelling import constants

__all__ = [
    "GraphLine",
    "TextError",
    "constants",
    "diff",
    "lines_of",
    "parse",
    "render",
    "render_layout",
    "unfold",
]
_HOME = {"constants": "spelling", "diff": "differences", "parse": "parsing"}
_HOME |= dict.fromkeys(("lines_of", "render", "render_layout"), "rendering")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
