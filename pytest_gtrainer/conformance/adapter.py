"""How somebody's pass is called, and what it claims. No torch here."""

from __future__ import annotations

import fnmatch
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gtrainer import options

if TYPE_CHECKING:
    from torch import fx

    from pytest_gtrainer.graph.bucket_plan import BucketPlan

KINDS = {
    "any": "whatever rewrites a graph",
    "bucketing": "merges the collectives of parameters and gradients of a joint graph, and may reorder them",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A pass as the rules call it.

    Attributes:
        function: the pass: ``(gm, example_inputs, *, options) -> gm``, ``gm -> gm``, or an ``fx.Graph`` in place.
        kind: which rules it is held to: a key of ``KINDS``.
        call: ``call(gm, plan)``, for any other signature. A ``bucket_plan`` option is given without it.
        options: of the pass, if there is no ``call``.
        in_place: the pass returns nothing, and the graph that it was given is its result.
        not_claimed: reasons by rule, which may be a pattern such as ``"E*"``: the rule is not run.
        strict: a rule that proves nothing fails; else it is skipped.
        broken: reasons by rule of what is known to be broken: a strict xfail.
    """

    function: Callable[..., Any]
    kind: str = "any"
    call: Callable[[fx.GraphModule, BucketPlan], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False
    strict: bool = False
    not_claimed: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a pass is a function, and {self.function!r} is none")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")

    @property
    def name(self) -> str:
        """Of the pass, for tables."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def takes_plan(self) -> bool:
        """Whether the pass is told which modules a bucket is made of."""
        from pytest_gtrainer.passes.graph_pass import options_of

        return self.call is not None or "bucket_plan" in options_of(self.function)

    def run(self, gm: fx.GraphModule, plan: BucketPlan) -> fx.GraphModule:
        """The pass's result on a graph, which it may rewrite.

        Raises:
            TypeError: what it returned is no graph.
        """
        from torch import fx

        from pytest_gtrainer.passes.graph_pass import as_pass

        if self.call is not None:
            result = self.call(gm, plan)
        else:
            told = {"bucket_plan": plan} if self.takes_plan else {}
            inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
            result = as_pass(self.function)(gm, inputs, **{**told, **self.options})
        if result is None and self.in_place:
            result = gm
        if not isinstance(result, fx.GraphModule):
            way_out = "; if it works in place, say in_place=True" if result is None else ""
            raise TypeError(f"{self.name} returned {type(result).__name__}, expected a GraphModule{way_out}")
        return result

    def unclaimed(self, rule: str) -> str | None:
        """Why a rule is not claimed; None if it is."""
        return next((why for pattern, why in self.not_claimed.items() if fnmatch.fnmatch(rule, pattern)), None)


def given(config: pytest.Config) -> Adapter:
    """The adapter that ``--gt-pass module:name`` names; a function is adapted by its signature.

    Raises:
        pytest.UsageError: there is none, it cannot be imported, or it is no pass.
    """
    path, kind = options.get(config, "pass"), options.get(config, "kind")
    if path is None:
        raise pytest.UsageError("pytest_gtrainer.conformance judges a pass: give --gt-pass=my_package.passes:my_pass")
    module, _, name = path.partition(":")
    if not name:
        raise pytest.UsageError(f"--gt-pass={path}: expected module:name, as my_package.passes:my_bucketing")
    if os.getcwd() not in sys.path:  # as ``python -m`` has it
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        adapter = found if isinstance(found, Adapter) else Adapter(found, kind or "any")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise pytest.UsageError(f"--gt-pass={path}: {error}") from None
    if kind not in (None, adapter.kind):
        raise pytest.UsageError(f"--gt-kind={kind}: {path} is an adapter of kind {adapter.kind!r}")
    return adapter
