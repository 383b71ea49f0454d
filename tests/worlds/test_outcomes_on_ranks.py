"""The table of mark, phase, and what each rank did: a test on ranks comes to what plain pytest
makes of it.

The same file runs without ranks as rank 0, without ranks as rank 1, and on two ranks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.conftest import SUITES

pytestmark = pytest.mark.second_tier

STRICT = "[XPASS(strict)]"


@dataclass(frozen=True)
class Outcomes:
    """The outcomes that one run reports of each test, by reporter."""

    reports: dict[str, list[dict[str, Any]]]
    status: int
    output: str
    junit: dict[str, Counter[str]]
    """Numbers of the elements of each test's entries: "failure", "error", "skipped"."""
    page: dict[str, str]
    last_failed: set[str]

    def counted_as_failed(self, name: str) -> bool:
        """Return whether pytest counts a report of the test for its exit status."""
        return any(
            each["outcome"] == "failed" and each["xfail"] is None for each in self.reports[name]
        )

    def result(self, name: str) -> str:
        """failed, strict, xfailed, skipped, xpassed or passed."""
        own = [each for each in self.reports[name] if not each["is_subtest"]]
        failed = [each for each in self.reports[name] if each["outcome"] == "failed"]
        if failed:
            return "strict" if all(each["text"].startswith(STRICT) for each in failed) else "failed"
        skipped = [each for each in own if each["outcome"] == "skipped"]
        if skipped:
            return "skipped" if skipped[0]["xfail"] is None else "xfailed"
        return "xpassed" if any(each["xfail"] is not None for each in own) else "passed"


def run(folder: Path, *args: str, as_rank: int | None = None) -> Outcomes:
    """Run the suite, in this folder."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"RECORDS": str(folder / "records")}
    if as_rank is not None:
        environ["AS_RANK"] = str(as_rank)
    for path in SUITES.joinpath("ranks_outcomes").glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--rootdir={folder}",
        "--gt-device=cpu",
        "--gt-gpus=2",
        "-rA",
        "--tb=no",
        "-p",
        "no:xdist",
        "-p",
        "no:randomly",
        *args,
    ]
    command += ["--junitxml=junit.xml", "--gt-report=page.html"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400
    )
    reports: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "records").read_text().splitlines():
        record = json.loads(line)
        reports.setdefault(record["name"], []).append(record)
    junit: dict[str, Counter[str]] = {}
    for case in ET.parse(folder / "junit.xml").getroot().iter("testcase"):
        name = case.get("classname", "").replace(".", "::").partition("::")[2]
        name = f"{name}::{case.get('name')}" if name else str(case.get("name"))
        junit.setdefault(name, Counter()).update(child.tag for child in case)
    sections = re.findall(
        r'data-outcome="(\w+)" data-words.*?<span class="name">[^<]*?::(.*?)</span>',
        (folder / "page.html").read_text(),
    )
    page = {unescape(name): outcome for outcome, name in sections}
    cache = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    last_failed = set(json.loads(cache.read_text())) if cache.exists() else set()
    return Outcomes(
        reports,
        done.returncode,
        done.stdout + done.stderr,
        junit,
        page,
        {name.partition("::")[2] for name in last_failed},
    )


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The goldens of the tests that check the right text, with or without a mark."""
    folder = tmp_path_factory.mktemp("goldens")
    run(folder, "--gt-create-goldens", "--runxfail", "-k", "right", as_rank=0)
    return folder / "golden"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, goldens: Path) -> dict[str, Outcomes]:
    found = {}
    for name, as_rank in (("rank 0", 0), ("rank 1", 1), ("ranks", None)):
        folder = tmp_path_factory.mktemp("run")
        shutil.copytree(goldens, folder / "golden")
        found[name] = run(folder, as_rank=as_rank)
    return found


GOES_ON = {
    "test_check[wrong_then_raises-raises_assertion]",
    "test_check[control_then_raises-raises_assertion]",
    "test_check[added_mark_wrong-skipif_on_rank_1]",
}
"""Ranks go on behind a check that the parent judges: some do the unexpected, or others skip."""


def of_both(one: str, other: str) -> str:
    """Return the outcome of a test whose ranks had these results."""
    found = {one, other}
    if "failed" in found:
        return "failed"
    if "skipped" in found:
        return "skipped" if len(found) == 1 else "failed"
    if "xfailed" in found:
        return "xfailed"
    return next(result for result in ("strict", "xpassed", "passed") if result in found)


def test_a_test_on_ranks_comes_to_what_its_ranks_come_to_without(runs: dict[str, Outcomes]) -> None:
    """V1"""
    ranks = runs["ranks"]
    assert len(ranks.reports) > 400
    wrong = []
    for name in ranks.reports:
        alone = [runs[f"rank {rank}"] for rank in (0, 1)]
        expected = of_both(*(each.result(name) for each in alone))
        skips = [skipped_subtests(each.reports[name]) for each in alone]
        if name in GOES_ON or (skips[0] != skips[1] and expected != "xfailed"):
            expected = "failed"
        if ranks.result(name) != expected:
            said = " and ".join(each.result(name) for each in alone)
            wrong.append(f"{name}: {ranks.result(name)}, not {expected}; without ranks {said}")
    assert not wrong, "\n".join(wrong)


def skipped_subtests(reports: list[dict[str, Any]]) -> int:
    return sum(
        each["is_subtest"] and each["outcome"] == "skipped" and each["xfail"] is None
        for each in reports
    )


def test_every_result_is_in_the_table(runs: dict[str, Outcomes]) -> None:
    every = {"failed", "strict", "xfailed", "skipped", "xpassed", "passed"}
    assert {runs["ranks"].result(name) for name in runs["ranks"].reports} == every


def test_reports_where_all_ranks_do_the_same_are_those_of_plain_pytest(
    runs: dict[str, Outcomes],
) -> None:
    """V1: phases, marks and subtests, but that a subtest that failed is its test's failure."""
    compared = 0
    for name, reported in runs["ranks"].reports.items():
        plain = runs["rank 0"].reports[name]
        is_other = (
            name in GOES_ON or "-1-" in name or name.startswith("test_check_in_subtest[wrong")
        )
        if shape(plain) == shape(runs["rank 1"].reports[name]) and not is_other:
            assert shape(reported) == shape(plain), name
            compared += 1
    assert compared > 200


def shape(reports: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Phase, outcome and mark of each report. pytest leaves the mark on a call that failed for a
    subtest.
    """
    found = []
    for each in reports:
        is_failed = each["outcome"] == "failed"
        if not (is_failed and each["is_subtest"]):
            found.append(
                (
                    each["when"],
                    each["outcome"],
                    each["is_subtest"],
                    None if is_failed else each["xfail"],
                )
            )
    return found


def test_exit_status_junit_summary_page_and_cache_agree(runs: dict[str, Outcomes]) -> None:
    """V1"""
    ranks = runs["ranks"]
    assert ranks.status == pytest.ExitCode.TESTS_FAILED, ranks.output[-3000:]
    lines = re.findall(
        r"^(FAILED|ERROR|SUBFAILED\S*) \S+?::(.*?)(?: - .*)?$", ranks.output, re.MULTILINE
    )
    in_summary = {name for _, name in lines}
    wrong = []
    for name in ranks.reports:
        is_failed = ranks.result(name) in ("failed", "strict")
        said = {
            "exit status": ranks.counted_as_failed(name),
            "junit": bool(ranks.junit[name].keys() & {"failure", "error"}),
            "summary": name in in_summary,
            "page": ranks.page[name] in ("failed", "error"),
        }
        # pytest's cache forgets a failure of the call when the teardown skips, or fails as expected
        if "teardown" not in name:
            said["--lf"] = name in ranks.last_failed
        if set(said.values()) != {is_failed}:
            wrong.append(f"{name} is {ranks.result(name)}: {said}")
        elif not is_failed and ranks.page[name] not in {
            runs["rank 0"].page[name],
            runs["rank 1"].page[name],
        }:
            wrong.append(f"{name} is {ranks.result(name)}, and {ranks.page[name]} on the page")
    assert not wrong, "\n".join(wrong)
