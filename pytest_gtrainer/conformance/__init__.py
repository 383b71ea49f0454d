"""The rules of ``docs/behaviours.txt``, run against anybody's pass.

From the command line, for a pass that is called ``(gm, example_inputs, *, bucket_plan=...)``, or as one of Inductor's::

    pytest --pyargs pytest_gtrainer.conformance --gt-pass my_package.passes:my_bucketing --gt-kind bucketing -k D2

or from a test file, where an adapter says how the pass is called and what it does not claim::

    from pytest_gtrainer.conformance import bucketing

    test_mine = bucketing(my_pass, call=lambda gm, plan: my_pass(gm, buckets=plan), not_claimed={"D8": "no marks"})

Each rule is one test and one line of the table at the end of the run. Its result is *held*; *broken*, with the smallest
graph and a sentence; *not claimed*; *error*, if the pass itself raised; or *proves nothing*, if it could not have
failed, as when a pass that merges nothing is asked for the order in which it packs.

Read ``adapter`` first, then ``rules``; ``recipes`` makes the graphs, ``table`` gathers the results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_gtrainer.conformance.adapter import Adapter

if TYPE_CHECKING:
    from pytest_gtrainer.conformance.cases import any_pass, bucketing

__all__ = ["Adapter", "any_pass", "bucketing"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("pytest_gtrainer.conformance.cases"), name)  # it imports torch
