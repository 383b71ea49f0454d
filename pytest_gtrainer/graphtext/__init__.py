"""Graph text: a canonical, readable text of an FX graph, in a subset of Python.

``render`` writes it, ``records`` gives the same unfolded; ``unfold`` reads a text back into
records. Importing this package does not import torch: a golden is read and compared without.

Terms:

- The *space* of a value: ``P`` parameters, ``B`` buffers, ``I`` inputs, ``fwd`` and ``bwd``
  computed values. ``out`` is the section of what the graph returns.
- The *scope* of a value: the module (or bucket) that it belongs to, and its space. A value's
  name is its operator and a counter inside its scope, so a change in one module renumbers
  nothing in another.
- A *layer*: an element of a numbered container, ``layers[3]``.
- A *section*: a stretch of the schedule that belongs to one layer in one space. References
  inside are relative to it, so that equal layers have equal text.
- A *record*: one line of one section, unfolded. Graphs are compared as records, so the way
  of folding is presentation only.

What the text leaves out, on purpose: node names, process group names, storage offsets,
device indices, ``requires_grad``, ranges of symbols, dead ``getitem`` nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gtrainer.graphtext.sections import Record
from pytest_gtrainer.graphtext.unfolding import TextError, unfold

if TYPE_CHECKING:
    from pytest_gtrainer.graphtext.rendering import records, render

__all__ = ["Record", "TextError", "records", "render", "unfold"]


def __getattr__(name: str) -> Any:
    if name not in ("records", "render"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_gtrainer.graphtext import rendering

    return getattr(rendering, name)
