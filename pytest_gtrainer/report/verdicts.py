"""A failed comparison shows its origin on the terminal and leaves the whole table in the artifacts."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_gtrainer.golden import artifacts

NAME = "differences.tsv"


class VerdictTables:
    """Saves the table of the verdict that a test failed with, if ``--gt-artifacts`` says where."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        verdict = _verdict_of(call)
        if verdict is not None and report.failed:
            from pytest_gtrainer.numerics.verdict import table

            path = artifacts.save(item, NAME, table(verdict))
            if path is not None:
                report.sections.append(("gtrainer differences", f"all of them: {artifacts.shown(path)}"))
        return report


def _verdict_of(call: pytest.CallInfo[Any]) -> Any:
    """The verdict of the comparison that failed, None for every other outcome; imports nothing."""
    assertions = sys.modules.get("pytest_gtrainer.numerics.compare")
    if call.excinfo is None or assertions is None or not isinstance(call.excinfo.value, assertions.VerdictError):
        return None
    return call.excinfo.value.verdict
