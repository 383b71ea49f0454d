"""What a test has left on its ranks is attributed to it: as a fact for the summary, or as its failure."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.outcome import Outcome


def tell(item: pytest.Item, outcome: Outcome, merged: list[pytest.TestReport]) -> None:
    """Add what the ranks say was left to the last of the merged reports, as ``--gt-leaked-resources`` has it."""
    answers = [answer for answer in outcome.answers.values() if isinstance(answer, wire.ItemDone)]
    left = dict.fromkeys(what for answer in answers for what in answer.left)
    reaction = options.get(item.config, "leaked-resources") if left else "ignore"
    if reaction == "ignore":
        return
    last: Any = merged[-1]
    facts = [{"kind": "left", "test": item.nodeid, "what": what} for what in left]
    last.gt_facts = [*getattr(last, "gt_facts", []), *facts]
    if reaction == "fail" and not last.failed:
        last.outcome = "failed"
        last.longrepr = (
            f"the test has left {', '.join(left)} behind: destroy the groups that it makes, and drop the references to "
            "tensors on the GPU"
        )
