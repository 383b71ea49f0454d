"""``--gt-report``: what reaches the page from tests in this process and on ranks, and in which
order.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest

from pytest_gtrainer.facts import Fact, packed
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import PageContent, build_details, render_page

SUITE = Path(__file__).parent / "suite.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the suite beside this file, with a page and a JUnit file: four tests, one
    fails.
    """
    folder = tmp_path_factory.mktemp("reported")
    shutil.copy(SUITE, folder / "test_it.py")
    (folder / "pytest.ini").write_text("[pytest]\ngt_report = out/page.html\n")
    options = ["-q", "-p", "no:hypothesispytest", "--junitxml=out/junit.xml", "--gt-device=cpu"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *options]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env=environ
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return folder / "out", result.stdout


@pytest.fixture(scope="module")
def page(run):
    return (run[0] / "page.html").read_text()


def names(page):
    return re.findall(r'<span class="name">test_it.py::(\w+)', page)


def unpacked(text):
    """Unpack like the page's script: "deflate" of base64."""
    return zlib.decompress(base64.b64decode(text)).decode()


def details(page, name):
    place = names(page).index(name)
    return json.loads(
        unpacked(re.search(rf'<script type="text/plain" id="d{place}">([^<]*)<', page)[1])
    )


@pytest.mark.second_tier
def test_failures_come_first_and_the_terminal_says_where_the_page_is(run, page):
    assert names(page) == [
        "test_that_differs",
        "test_pipeline",
        "test_equal_on_ranks",
        "test_silent",
    ]
    assert "gtrainer: report in out/page.html" in run[1]


def test_the_page_needs_nothing_else(page):
    """No address, and a policy that lets the browser fetch none."""
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "http://www.w3.org/2000/svg" in page  # a name, not an address


def test_a_pass_is_shown_with_its_time_its_graphs_and_what_changed(page):
    (pipeline,) = details(page, "test_pipeline")["pipelines"]
    passes = {each["name"]: each for each in pipeline["passes"]}
    bucketing = passes["joint_transformer_block_bucketing_reordering_pass"]
    assert bucketing["seconds"] > 0
    assert any("merged into bucket" in sentence for sentence in bucketing["words"])
    before, after = (text_of(page, bucketing[side]) for side in ("before", "after"))
    assert "bucket(" in after
    assert "bucket(" not in before
    assert "4, fsdp)" in before  # groups are called by the mesh of the test's world
    first, last, begin, end = bucketing["changes"][0]
    assert before.splitlines()[first:last] != after.splitlines()[begin:end]
    unchanged = passes["deduplicate_fsdp_unshard_chains_pass"]
    assert (unchanged["before"], unchanged["words"]) == (unchanged["after"], [])


def text_of(page, key, kind="g"):
    return unpacked(re.search(rf'<script type="text/plain" id="{kind}-{key}">([^<]*)<', page)[1])


def test_the_graph_is_shown_once_where_two_passes_share_it(page):
    (pipeline,) = details(page, "test_pipeline")["pipelines"]
    keys = {each[side] for each in pipeline["passes"] for side in ("before", "after")}
    assert len(re.findall(r'id="g-\w+"', page)) == len(keys) < 2 * len(pipeline["passes"])


def test_a_layout_belongs_to_the_pipeline_and_a_schedule_to_each_of_its_graphs(page):
    (pipeline,) = details(page, "test_pipeline")["pipelines"]
    (layout,) = pipeline["layouts"]
    ((name, payloads),) = layout["sides"]
    assert name == "rewritten graph"
    assert {payload["collective"] for payload in payloads} == {"all_gather", "reduce_scatter"}
    bucketing = pipeline["passes"][-1]
    before, after = (
        json.loads(text_of(page, bucketing[side], "s")) for side in ("before", "after")
    )
    assert "exposed" in after["summary"]
    assert len(after["spans"]) < len(before["spans"])  # fewer collectives
    assert set(re.findall(r'id="s-(\w+)"', page)) == set(re.findall(r'id="g-(\w+)"', page))
    curve = json.loads(text_of(page, bucketing["after"], "m"))
    assert f"({max(curve['curve']):,} bytes) at " in curve["summary"]
    assert curve["curve"][curve["at"]] == max(curve["curve"])


def test_digests_of_every_rank_are_in_one_table_with_the_first_difference(page):
    (comparison,) = details(page, "test_that_differs")["comparisons"]
    assert {tuple(row[:3]) for row in comparison["actual"]} == {
        (step, rank, phase) for step in (0, 1) for rank in (0, 1) for phase in ("loss", "weight")
    }
    assert comparison["first"] == [0, 1, "weight", "w"]
    assert comparison["differing"] == [comparison["first"]]
    differs = {
        tuple(ours[:3])
        for ours, theirs in zip(comparison["actual"], comparison["expected"], strict=True)
        if ours != theirs
    }
    assert differs == {(0, 1, "weight")}


def test_a_test_that_does_nothing_of_ours_has_only_its_output(page):
    detail = details(page, "test_silent")
    assert detail["sections"] == [["Captured stdout call", "nothing <b>of ours</b>\n"]]
    assert not any(
        detail[name] for name in ("failures", "comparisons", "layouts", "pipelines", "said")
    )


def test_junit_carries_world_ranks_and_digests(run):
    cases = ElementTree.parse(run[0] / "junit.xml").iter("testcase")
    properties = {
        case.get("name"): [(p.get("name"), p.get("value")) for p in case.iter("property")]
        for case in cases
    }
    equal, differs = properties["test_equal_on_ranks"], properties["test_that_differs"]
    assert equal[:2] == [("gt_world", "ranks(2, gloo on cpu)"), ("gt_ranks", "2")]
    digests = [value for name, value in equal if name == "gt_digest"]
    assert [re.sub(r"\b[0-9a-f]{16}\b", "…", value) for value in digests] == [
        "the same twice, step 0: actual …, expected …",
        "the same twice, step 1: actual …, expected …",
    ]
    ours, theirs = re.findall(r"[0-9a-f]{16}", digests[0])
    assert ours == theirs
    (at_0, at_1) = (
        re.findall(r"[0-9a-f]{16}", value) for name, value in differs if name == "gt_digest"
    )
    assert at_0[0] != at_0[1]
    assert at_1[0] == at_1[1]
    assert properties["test_silent"] == []


@pytest.mark.parametrize("where", ["parent/../", "a_file/page.html"])
def test_a_page_that_cannot_be_written_stops_the_run_before_it_starts(pytester, where):
    (pytester.path / "a_file").write_text("")
    (pytester.path / "parent").mkdir()
    result = pytester.runpytest_inprocess(f"--gt-report={where}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gt-report={where}*"])


@pytest.mark.parametrize("options", [(), ("-p", "no:terminal")], ids=["terminal", "silent"])
@pytest.mark.parametrize("full", ["report", "summary"])
def test_a_run_fails_without_a_file_that_was_asked_for(pytester, full, options):
    """The disk is full at the end of the run; the other file is written."""
    pytester.makepyfile("def test_green(): pass")
    files = {"report": "r.html", "summary": "s.md", full: "/dev/full"}
    given = [f"--gt-{name}={file}" for name, file in files.items()]
    result = pytester.runpytest_inprocess(*options, *given)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    if not options:
        result.stdout.fnmatch_lines([f"gtrainer: no {full} in /dev/full: OSError: *No space left*"])
    other = "summary" if full == "report" else "report"
    assert (pytester.path / files[other]).read_text()


def report(outcome, when="call", **attributes):
    made = pytest.TestReport("a", ("a.py", 0, "a"), {}, outcome, None, when)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([report("passed")], "passed"),
        ([report("failed"), report("failed", "teardown")], "failed"),
        ([report("failed", "setup")], "error"),
        ([report("skipped")], "skipped"),
        ([report("skipped", wasxfail="known")], "xfailed"),
        ([report("passed", wasxfail="known")], "xpassed"),
        (
            [
                report("passed", "setup"),
                report("failed"),
                report("passed", "setup"),
                report("passed"),
            ],
            "passed",
        ),
    ],
)
def test_outcomes(reports, outcome):
    test = Collected("a")
    for each in reports:
        test.add(each)
    assert test.outcome == outcome


def a_test(name, text, lines=0):
    """A test of one pass that gave a graph of so many lines."""
    facts: list[Fact] = [
        {"kind": "graph_text", "key": name, "lines": lines, "packed": packed(text)},
        {
            "kind": "pass",
            "pipeline": 0,
            "name": "my_pass",
            "fingerprint": "",
            "seconds": 0.5,
            "nodes": [1, 1],
            "before": name,
            "after": name,
            "words": [],
            "changes": [],
        },
    ]
    test = Collected(name)
    test.add(report("passed", gt_facts=facts, duration=0.1))
    return test


def test_a_thousand_tests_and_a_large_graph_are_a_small_first_page():
    """The browser lays out a line a test; the rest is packed."""
    large = "".join(
        f"  with layers[{n}].mlp:\n    mm: f32[{n}, 64] = aten.mm(t_{n}, x)\n"
        for n in range(20_000)
    )
    tests = [a_test(f"test_{number}", f"if P:\n  P.w{number}: f32[2]\n") for number in range(1_000)]
    page = render_page(PageContent("run", "", [], [*tests, a_test("test_large", large, 40_000)]))
    seen = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    assert seen.count("<section") == 1_001
    assert len(seen) < 700_000
    assert "aten.mm" not in seen
    assert build_details(tests[0])["pipelines"][0]["passes"][0]["name"] == "my_pass"
