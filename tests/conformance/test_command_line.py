"""``pytest --pyargs pytest_gtrainer.conformance``: the table, its file, and what a wrong option
says.
"""

import json
import re

import pytest

from pytest_gtrainer.conformance.judging import KINDS
from pytest_gtrainer.facts import unpacked
from pytest_gtrainer.options import OPTIONS
from pytest_gtrainer.testing import run_project

pytestmark = [pytest.mark.second_tier, pytest.mark.usefixtures("warm_python")]

PASSES = """
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer.conformance import Adapter

def as_executed(gm, plan):
    return ours(gm, bucket_plan=plan, payload_order="execution")

def as_fsdp(gm, plan):
    return ours(gm, bucket_plan=plan)

executed = Adapter(as_executed, "bucketing", call=as_executed, not_claimed={"D8": "says nothing"})
fsdp = Adapter(as_fsdp, "bucketing", call=as_fsdp)
nothing = Adapter(lambda gm: gm, "bucketing")
known = Adapter(as_executed, "bucketing", call=as_executed, broken={"D2": "issue 12"})
mended = Adapter(as_fsdp, "bucketing", call=as_fsdp, broken={"D2": "issue 12"})
nothing_claimed = {"D8": "marks nothing"}
fsdp_claims_nothing = Adapter(as_fsdp, "bucketing", call=as_fsdp, not_claimed=nothing_claimed)
not_a_pass = 3

def does_nothing(gm):
    return gm
"""
CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--skip-all", action="store_true")

@pytest.fixture(autouse=True)
def skip(pytestconfig):
    if pytestconfig.getoption("--skip-all"):
        pytest.skip("not here")
"""
COMMAND = (
    "--pyargs",
    "pytest_gtrainer.conformance",
    "-k",
    "D2 or D8 or D1]",
    "--gt-gpus=4",
    "-p",
    "no:cacheprovider",
)


def run(folder, *options):
    return run_project(
        folder, *COMMAND, *options, files={"passes.py": PASSES, "conftest.py": CONFTEST}
    )


def test_the_table_and_its_change(tmp_path):
    executed = run(
        tmp_path,
        "--gt-pass=passes:executed",
        "--gt-conformance=table.json",
        "--gt-report=page.html",
    )
    assert executed.status == 1
    assert "conformance of as_executed" in executed.output
    assert "1 held, 1 not claimed, 1 broken" in executed.output
    assert "rules     1 D2 of as_executed broken, 1 held, 1 not claimed" in executed.output
    page = (tmp_path / "page.html").read_text()
    assert "1 D2 of as_executed broken" in page
    (said,) = json.loads(unpacked(re.findall(r'id="d\d+">([^<]*)<', page)[0]))["said"]
    assert said.startswith(
        "rule D2 (payloads are in FSDP2's managed order, never the order of the graph) of "
        "as_executed: broken. "
    )
    table = json.loads((tmp_path / "table.json").read_text())["as_executed"]
    assert {rule: row["result"] for rule, row in table.items()} == {
        "D1": "held",
        "D2": "broken",
        "D8": "not claimed",
    }
    assert table["D2"]["why"].startswith(
        "bucket 'layers.0', all_gather: layers.0.norm.weight stands where FSDP2 packs"
    )
    fsdp = run(tmp_path, "--gt-pass=passes:fsdp", "--gt-conformance-against=table.json", "-n", "2")
    assert fsdp.status == 0
    assert "3 held" in fsdp.output
    assert "D2: was broken, is held" in fsdp.output
    assert "D8: was not claimed, is held" in fsdp.output
    assert "D1: was" not in fsdp.output
    again = run(tmp_path, "--gt-pass=passes:executed", "--gt-conformance-against=table.json")
    assert "no rule has another result than before" in again.output
    part = run(
        tmp_path, "--gt-pass=passes:fsdp", "--gt-conformance-against=table.json", "-k", "D8]"
    )
    assert part.status == 0
    assert "in the table before and not in this run: D1 (held), D2 (broken)" in part.output
    assert "no rule has another result" not in part.output


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--gt-conformance-against=table.json",), 1, "--gt-conformance-against"),
        (("--gt-conformance=new.json", "-n", "1"), 1, "--gt-conformance"),
        (("--gt-pass=passes:fsdp",), 1, "--gt-pass"),
        (
            ("--gt-pass=passes:fsdp", "--gt-kind=bucketing", "--gt-conformance=new.json"),
            1,
            "--gt-pass and --gt-kind and --gt-conformance",
        ),
        (("--gt-kind=bucketing",), 4, "--gt-kind"),
        ((), 0, None),
    ],
)
def test_options_of_conformance_in_a_run_without_it_are_no_success(tmp_path, options, status, said):
    """Q4"""
    files = {"test_it.py": "def test_it(): pass\n", "table.json": "{}", "passes.py": PASSES}
    done = run_project(tmp_path, "-p", "no:cacheprovider", *options, files=files)
    assert done.status == status
    if status == 4:
        assert "--gt-kind chooses the rules of --gt-pass, and no pass is given" in done.output
    elif status == 1:
        assert f"no rule was judged for {said}: no test of conformance has run" in done.output


@pytest.mark.parametrize("option", ["conformance", "report", "summary"])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("test_it.py/x/file", "its directory cannot be made: "),
        ("test_it.py/file", "its directory cannot be made: "),
        ("folder", "is a directory; name a file, as folder/"),
    ],
)
def test_a_file_that_cannot_be_written_ends_the_run_at_its_start(tmp_path, option, place, words):
    """Not after hours of tests."""
    files = {"test_it.py": "def test_it(): pass\n", "folder/a": "", "passes.py": PASSES}
    command = ("-p", "no:cacheprovider", f"--gt-{option}={place}")
    done = run_project(tmp_path, *command, files=files)
    assert done.status == 4
    assert f"ERROR: --gt-{option}={place}" in done.output
    assert words in done.output
    assert "1 passed" not in done.output


LEAVES = """
import os, pytest
from pytest_gtrainer.conformance import any_pass

test_rules = any_pass(lambda gm: gm, not_claimed={"*": "later"})

@pytest.mark.skipif("LEAVE" not in os.environ, reason="by the environment")
def test_leaves_the_folder(tmp_path):
    os.chdir(tmp_path)
"""


def test_the_table_of_conformance_gets_its_folder_and_is_kept_if_no_test_runs(
    tmp_path, monkeypatch
):
    """The folder is that of the command, wherever a test has gone."""
    monkeypatch.setenv("LEAVE", "1")
    command = ("-p", "no:cacheprovider", "--gt-gpus=4", "--gt-conformance=no/folder/table.json")
    run_project(tmp_path, *command, files={"test_it.py": LEAVES})
    table = (tmp_path / "no/folder/table.json").read_text()
    assert "not claimed" in table
    run_project(tmp_path, *command, "--collect-only", files={})
    assert (tmp_path / "no/folder/table.json").read_text() == table


UNCLAIMED = """
from pytest_gtrainer.conformance import any_pass

def does_nothing(gm):
    return gm

test_rules = any_pass(does_nothing, not_claimed={"*": "later"})
"""


def test_a_pass_that_claims_no_rule_is_named(tmp_path):
    """Q4: a test in a project's own suite."""
    done = run_project(
        tmp_path, "-p", "no:cacheprovider", "--gt-gpus=4", files={"test_it.py": UNCLAIMED}
    )
    assert done.status == 0
    assert "idle      1 conformance of does_nothing: no rule is claimed" in done.output


def test_a_run_without_its_table_fails(tmp_path):
    """The disk is full at the end of the run."""
    command = ("-p", "no:cacheprovider", "--gt-gpus=4", "--gt-conformance=/dev/full")
    done = run_project(tmp_path, *command, files={"test_it.py": UNCLAIMED})
    assert done.status == 1
    assert "no table of conformance: OSError" in done.output


def test_the_ini_twins_of_these_options_ask_for_nothing(tmp_path):
    """The twin: a project may set them for all runs."""
    ini = "[pytest]\ngt_conformance_against = table.json\ngt_kind = bucketing\n"
    files = {"test_it.py": "def test_it(): pass\n", "table.json": "{}", "pytest.ini": ini}
    assert run_project(tmp_path, "-p", "no:cacheprovider", files=files).status == 0


def test_what_is_known_to_be_broken_is_an_xfail(tmp_path):
    done = run(tmp_path, "--gt-pass=passes:known", "-k", "D2]")
    assert done.status == 0
    assert "1 xfailed" in done.output
    mended = run(tmp_path, "--gt-pass=passes:mended", "-k", "D2]")
    assert mended.status == 1
    assert "[XPASS(strict)] issue 12" in mended.output


def test_a_pass_that_no_rule_could_have_judged_is_no_success(tmp_path):
    """A pass that does nothing leaves its process as it was: beside others, this is no proof."""
    done = run(tmp_path, "--gt-pass=passes:nothing", "-k", "D2 or D8 or state")
    assert done.status == 1
    assert re.search(r"1 held, .*2 proves nothing|2 proves nothing, .*1 held", done.output)
    assert "no rule could have failed: <lambda> finds nothing to do in these graphs" in done.output
    alone = run(tmp_path, "--gt-pass=passes:nothing", "-k", "state")
    assert alone.status == 0  # it was asked for, and could have failed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--gt-pass=passes:nothing", "-k", "D2]"),
            "no rule could have failed: <lambda> finds nothing to do in these",
        ),
        (
            ("--gt-pass=passes:nothing", "-k", "E6]", "-n", "1"),
            "no rule could have failed: <lambda> finds nothing",
        ),
        (
            ("--gt-pass=passes:fsdp_claims_nothing", "-k", "D8]"),
            "no rule was judged: as_fsdp claims none of the rules",
        ),
        (
            ("--gt-pass=passes:fsdp", "-k", "D8]", "--skip-all"),
            "no rule was judged for --gt-pass: no test of conformance has run. * -rs says why",
        ),
    ],
)
def test_a_choice_of_rules_that_proves_nothing_is_no_success(tmp_path, options, said):
    """Q4: with ``-k``, also of rules that are not claimed or whose tests are skipped."""
    done = run(tmp_path, *options)
    for words in said.split(" * "):
        assert words in done.output
    assert done.status == 1


FILE = """
from pytest_gtrainer.conformance import bucketing
import passes

test_nothing = bucketing(passes.does_nothing)
test_fsdp = bucketing(passes.as_fsdp, call=passes.as_fsdp)
"""


def test_a_pass_of_a_test_file_that_proves_nothing_is_no_success_beside_one_that_does(tmp_path):
    """Q4: each pass counts for itself. Of the other one alone the run is green."""
    (tmp_path / "test_mine.py").write_text(FILE)
    (tmp_path / "passes.py").write_text(PASSES)
    both = run_project(tmp_path, "test_mine.py", "-k", "D2", "-p", "no:cacheprovider")
    assert "no rule could have failed: does_nothing finds nothing to do" in both.output
    assert both.status == 1
    one = run_project(tmp_path, "test_mine.py", "-k", "D2 and fsdp", "-p", "no:cacheprovider")
    assert one.status == 0


def test_each_kind_can_be_given():
    (option,) = [each for each in OPTIONS if each.name == "kind"]
    assert option.choices == KINDS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "judges a pass: give --gt-pass=my_package.passes:my_pass"),
        (
            ("--gt-pass=passes",),
            "--gt-pass=passes: expected module:name, as my_package.passes:my_bucketing",
        ),
        (("--gt-pass=nowhere:it",), "--gt-pass=nowhere:it: No module named 'nowhere'"),
        (
            ("--gt-pass=passes:none",),
            "--gt-pass=passes:none: module 'passes' has no attribute 'none'",
        ),
        (
            ("--gt-pass=passes:not_a_pass",),
            "--gt-pass=passes:not_a_pass: a pass is a function, and 3 is none",
        ),
        (
            ("--gt-pass=passes:fsdp", "--gt-kind=any"),
            "--gt-kind=any: passes:fsdp is an adapter of kind 'bucketing'",
        ),
        (
            ("--gt-pass=passes:fsdp", "--gt-kind=fast"),
            "--gt-kind=fast: expected one of any, bucketing, separate",
        ),
        (
            ("--gt-pass=passes:fsdp", "--gt-conformance-against=passes.py"),
            "this is no table that --gt-conformance wrote",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_option_is_one_sentence(tmp_path, options, said):
    done = run(tmp_path, *options)
    assert done.status != 0
    assert said in done.output
    assert "INTERNALERROR" not in done.output
