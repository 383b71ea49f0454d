"""What a failed comparison leaves: the whole table of its verdict, and the pass that the difference came in by."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_gtrainer import facts
from pytest_gtrainer.golden import artifacts

TABLE = "differences.tsv"


class VerdictTables:
    """Saves the table of the verdict that a test failed with, if ``--gt-artifacts`` says where."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        comparing = sys.modules.get("pytest_gtrainer.numerics.compare")  # a test that compares has imported it
        if report.failed and comparing and call.excinfo and isinstance(call.excinfo.value, comparing.VerdictError):
            from pytest_gtrainer.numerics.verdict import table

            path = artifacts.save(item, TABLE, table(call.excinfo.value.verdict))
            if path is not None:
                report.sections.append(("gtrainer differences", f"all of them: {artifacts.shown(path)}"))
        return report


class BisectPlugin:
    """``--gt-bisect``: watches every test's pipelines and replays, and bisects a comparison that fails over them.

    Costs a copy of the graph a pass, and one of the inputs.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if "torch" not in sys.modules:  # a test that rewrites graphs has imported it while it was collected
            return (yield)
        from pytest_gtrainer.bisect import PassWitness

        with facts.watching(PassWitness().watchers()):
            return (yield)
