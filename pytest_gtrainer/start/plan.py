"""``python -m pytest_gtrainer plan``: a bucket plan to paste, with its reasons as comments."""

import argparse
import re
import sys
from collections.abc import Sequence

from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.suggest import SuggestedPlan, Suggestion, suggest_plan
from pytest_gtrainer.references.config import bucket_modules
from pytest_gtrainer.start.model import UsageError, load_model

_FEWEST = 4
"""Layers in a row from which on a plan is written as a loop."""


def run(given: argparse.Namespace) -> int:
    """Print the plan of a model; return the exit status."""
    try:
        model = load_model(given.model)
        suggested = suggest_plan(model, split_experts=given.experts)
        bucket_modules(model, suggested.plan)  # as both sides of a parity would read it
    except (UsageError, PlanError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(spell(suggested))
    return 0


def spell(suggested: SuggestedPlan) -> str:
    """Return a plan as Python: each entry with its reason in a comment."""
    lines = []
    for buckets in _rows(suggested.buckets):
        entry = repr(buckets[0].entry).replace("'", '"')
        why = buckets[0].why
        if len(buckets) >= _FEWEST:
            before, begin, behind = _parts(buckets[0])
            end = int(begin) + len(buckets)
            numbers = f"{end}" if begin == "0" else f"{begin}, {end}"
            entry = f'*(f"{before}{{i}}{behind}" for i in range({numbers}))'
            why = why.replace("a layer", f"{len(buckets)} layers")
        lines.append((f"    {entry},", why))
    width = min(44, max(len(entry) for entry, _ in lines))
    text = ["bucket_plan = ["]
    for entry, why in lines:
        text.append(f"{entry:<{width}}  # {why}")
    text.append("]")
    for note in suggested.notes:
        text.append(f"# {note}")
    return "\n".join(text)


def _rows(buckets: Sequence[Suggestion]) -> list[list[Suggestion]]:
    """Return the buckets; many layers of one stack whose indices follow each other as one row."""
    rows: list[list[Suggestion]] = []
    for bucket in buckets:
        if rows and _follows(rows[-1][-1], bucket):
            rows[-1].append(bucket)
        else:
            rows.append([bucket])
    found = []
    for row in rows:
        found += [row] if len(row) >= _FEWEST else [[bucket] for bucket in row]
    return found


def _follows(first: Suggestion, second: Suggestion) -> bool:
    before, index, behind = _parts(first)
    return bool(index) and _parts(second) == (before, str(int(index) + 1), behind)


def _parts(bucket: Suggestion) -> tuple[str, str, str]:
    """Return what is before, in and behind the index of a layer's FQN; "" without an index."""
    parts = re.fullmatch(r"(.*?)\b(\d+)\b(.*)", bucket.fqns[0]) if bucket.is_layer else None
    if parts is None:
        return "", "", ""
    return parts[1], parts[2], parts[3]
