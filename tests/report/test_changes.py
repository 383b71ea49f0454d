"""``--gt-report-against`` and ``--gt-summary``: what a second run says that it did otherwise than a
first one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gtrainer.facts import packed, unpacked
from pytest_gtrainer.report import changes, markdown
from pytest_gtrainer.report.changes import Earlier
from pytest_gtrainer.report.collected import Test as Collected

SUITE = Path(__file__).parent / "changing.py"


def run(folder, *options, variant="then"):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:hypothesispytest",
        "--gt-device=cpu",
        *options,
    ]
    environ["VARIANT"] = variant
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        env=environ,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The suite three times: as it was, as it is now, and as it was again; the folder and what the
    last two said.
    """
    folder = tmp_path_factory.mktemp("changing")
    shutil.copy(SUITE, folder / "test_it.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    first = run(folder, "--gt-create-goldens", "--gt-report=one.html")
    assert "report in one.html" in first.stdout, first.stdout + first.stderr
    against = ("--gt-report-against=one.html",)
    return (
        folder,
        run(
            folder, "--gt-report=two.html", "--gt-summary=out/two.md", *against, variant="now"
        ).stdout,
        run(folder, *against).stdout,
    )


@pytest.fixture(scope="module")
def tests(runs):
    """Details of the second run's tests, by name."""
    parts = re.findall(r'id="d\d+">([^<]*)<', (runs[0] / "two.html").read_text())
    return {
        each["name"].partition("::")[2]: each
        for each in (json.loads(unpacked(part)) for part in parts)
    }


@pytest.mark.second_tier
def test_the_terminal_counts_what_changed_and_a_run_that_did_not_change_says_so(runs):
    message = (
        "2 newly failing, 2 with other numbers, 1 with another graph, 1 with another layout, 1 "
        "fixed, 1 new"
    )
    message += ", 1 not in this run"
    (line,) = (line for line in runs[1].splitlines() if "against" in line and "one.html" in line)
    head, _, counts = line.partition("one.html: ")
    assert (head, sorted(counts.split(", "))) == ("gtrainer: against ", sorted(message.split(", ")))
    assert "gtrainer: against one.html: 1 failing as then\n" in runs[2]


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["test_graph", "test_graph_on_ranks"])
def test_a_golden_that_differs_is_told_in_words_and_shown_side_by_side(tests, runs, name):
    found = tests[name]
    (line,) = found["changed"]
    assert line.startswith(f"golden/test_it/{name}.fxgraph: the dataflow differs, first at")
    assert "fwd layers.1: lost aten.sin, gained aten.cos" in line
    (golden,) = found["goldens"]
    page = (runs[0] / "two.html").read_text()
    old, new = (
        unpacked(re.search(rf'id="g-{key}">([^<]*)<', page)[1]).splitlines()
        for key in golden["keys"]
    )
    first, _, begin, _ = golden["changes"][0]
    assert "aten.sin(" in old[first]
    assert "aten.cos(" in new[begin]
    assert old[:first] == new[:begin]
    assert not any(line.startswith("#") for line in old[:1])  # a header is no difference
    assert found["earlier"]["lines"] == ["passed then, failed now"]
    assert line in page.replace("&#34;", '"')  # on the front page, without opening anything


@pytest.mark.second_tier
def test_the_pass_that_makes_another_graph_is_named_and_not_those_behind_it(tests, runs):
    found = tests["test_pass"]["earlier"]
    assert [name for name, *_ in found["graphs"]] == ["pass swap"]
    assert "pass swap: the dataflow differs" in found["lines"][0]
    page = (runs[0] / "two.html").read_text()
    for key in found["graphs"][0][1:]:
        assert f'id="g-{key}"' in page  # the earlier graph, too
    assert found["lines"][1] == "payloads gone: norm, lm_head; new payloads: norm+lm_head"


@pytest.mark.second_tier
def test_a_test_that_passes_both_times_and_trains_otherwise_is_told(tests):
    assert tests["test_numbers"]["earlier"]["lines"] == [
        "graph against eager: other numbers than then, first at step 1, rank 0, weight"
    ]
    assert tests["test_tensors"]["earlier"]["lines"] == ["sum: other numbers than then"]
    assert tests["test_same"]["earlier"]["lines"] == []
    assert tests["test_fixed"]["earlier"]["lines"] == ["failed then, passed now"]
    assert tests["test_new"]["earlier"]["lines"] == ["new: it is not in the earlier report"]


@pytest.mark.second_tier
def test_the_summary_is_markdown_with_failures_their_commands_and_what_changed(runs):
    text = (runs[0] / "out" / "two.md").read_text()
    assert text.startswith("## pytest-gtrainer: ")
    assert ": 2 failed, 6 passed\n" in text
    assert (
        text.index("### Failed")
        < text.index("**`test_it.py::test_graph`**")
        < text.index("### Changed since the earlier report")
    )
    assert "lost aten.sin, gained aten.cos" in text
    assert "Run it again: `pytest test_it.py::test_graph --gt-device=cpu`" in text
    assert "- graph against eager: other numbers than then" in text
    assert "test_same" not in text
    assert text.count("```") % 2 == 0


@pytest.mark.second_tier("<script")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; name a page that --gt-report wrote"),
        ("<html>", "holds no test; name a page that --gt-report wrote"),
        ('<script type="text/plain" id="d0">AAAA</script>', "cannot be read: "),
        (
            '<script type="text/plain" id="d0">eJyrrgUAAXUA+Q==</script>',
            "was written by an older pytest-gtrainer",
        ),
    ],
)
def test_an_earlier_page_that_is_none_ends_the_run_before_it_begins(tmp_path, content, message):
    if content is not None:
        (tmp_path / "page.html").write_text(content)
    (tmp_path / "test_it.py").write_text("def test_it(): print('has run')")
    done = run(tmp_path, "-s", "--gt-report-against=page.html")
    assert done.returncode == 4
    assert f"--gt-report-against=page.html {message}" in done.stderr.replace(
        ": there is", " there is"
    )
    assert "has run" not in done.stdout


def test_a_long_failure_keeps_its_beginning_and_its_end(monkeypatch):
    monkeypatch.setattr(markdown, "_MOST_OUTPUT", 8)
    report = pytest.TestReport("test_it", ("a.py", 0, "a"), {}, "failed", "what 12345 next", "call")
    found = markdown._render_test(Collected("test_it", [report]), [], "")
    assert "what\n[…]\nnext" in found
    assert "123" not in found


def test_nothing_in_a_summary_mentions_a_person_or_an_issue_or_is_an_emoji():
    """GitHub links ``@name`` and ``#12`` also behind a backslash, but not in code."""
    found = markdown.text("by @someone, #12, GH-12, owner/name#12 :smile: |a| `b` c@d e: f ::g")
    in_code = "by `@someone,` `#12,` `GH-12,` `owner/name#12` `:smile:`"
    assert found == f"{in_code} \\|a\\| \\`b\\` `c@d` e: f ::g"
    assert markdown.text("`@x`") == "`` `@x` ``"
    assert markdown.code("test_it.py::test_a[@x|:y:]") == "`test_it.py::test_a[@x|:y:]`"


@pytest.mark.parametrize("name", ["a``b", "a`", "t[<b>_*]"])
def test_names_stay_what_they_are_in_markdown(name):
    shown = markdown.code(name)
    ticks = re.match("`+", shown)[0]
    assert shown.endswith(ticks)
    assert ticks not in name
    assert shown.strip("`").strip() in (name, name.strip("`"))
    assert "<" not in markdown.text(name)
    assert markdown.fenced(f"```\n{name}\n```").startswith("````text\n")


def pipeline(*payloads):
    layouts = [{"sides": [["rewritten graph", list(payloads)]]}]
    return [{"number": 0, "passes": [], "layouts": layouts}]


def payload(label, *slots, collective="all_gather", **fields):
    return {
        "label": label,
        "collective": collective,
        **fields,
        "slots": [list(slot) for slot in slots],
    }


@pytest.mark.parametrize(
    ("now", "reported"),
    [
        ([payload("b", ("w", 0, 4), ("v", 4, 4))], []),
        (
            [payload("b", ("v", 0, 4), ("w", 4, 4))],
            ["all_gather of b: the same parameters in another order"],
        ),
        ([payload("b", ("w", 0, 4), ("u", 4, 4))], ["all_gather of b: other parameters"]),
        ([payload("b", ("w", 0, 8), ("v", 8, 4))], ["all_gather of b: other sizes"]),
        (
            [payload("b", ("w", 0, 4), ("v", 4, 4), op="sum")],
            ["all_gather of b: op None became sum"],
        ),
        *(
            (
                [payload("b", ("w", 0, 4), ("v", 4, 4), **{field: "x"})],
                [f"all_gather of b: {field} None became x"],
            )
            for field in ("dtype", "ranks", "directions")
        ),
        (
            [payload("b", ("v", 0, 4), ("w", 4, 4), op="sum", dtype="bf16")],
            [
                "all_gather of b: the same parameters in another order, op None became sum, "
                "dtype None became bf16"
            ],
        ),
        (
            [payload("b", ("w", 0, 4), collective="all_reduce")],
            ["payloads gone: all_gather of b", "new payloads: all_reduce of b"],
        ),
        ([], ["payloads gone: b"]),
        ([payload("c", ("w", 0, 4), ("v", 4, 4))], ["payloads gone: b", "new payloads: c"]),
    ],
)
def test_a_layout_says_what_changed_in_a_bucket(now, reported):
    then = pipeline(payload("b", ("w", 0, 4), ("v", 4, 4)))
    assert list(changes._compare_layouts(then, pipeline(*now))) == reported


def test_the_first_other_number_is_that_of_the_first_step_and_phase_and_not_of_the_first_row():
    rows = [[1, 0, "loss", "a"], [0, 1, "weight", "b"], [0, 0, "gradient", "c"]]
    found = {"what": "mine", "actual": rows}
    (line,), _ = changes._compare_numbers(
        [found], [{"what": "mine", "actual": [[*row[:3], "x"] for row in rows]}]
    )
    assert line == "mine: other numbers than then, first at step 0, rank 0, gradient"
    assert changes._compare_numbers([found], [found]) == ([], [])
    lonely = "mine: other steps, ranks or phases were compared"
    assert changes._compare_numbers([found], [{**found, "actual": rows[:2]}]) == ([], [lonely])
    assert changes._compare_numbers([found], []) == ([], ["mine: no longer compared"])
    before = {"what": "before", "actual": [[0, 0, "loss", "z"]]}
    assert changes._compare_numbers([found, found], [before, found, found]) == (
        [],
        ["before: newly compared"],
    )


def test_a_comparison_that_a_passing_test_no_longer_makes_is_a_change():
    rows = [[0, 0, "loss", "a"]]
    then = {"outcome": "passed", "comparisons": [{"what": "mine", "actual": rows}], "pipelines": []}
    earlier = changes.Earlier(Path("one.html"), {"test_it": then}, {})
    now = {"comparisons": [], "pipelines": []}
    found = earlier.compare(SimpleNamespace(name="test_it", outcome="passed"), now, {})
    assert found["lines"] == ["mine: no longer compared"]
    assert earlier.summary({"test_it"}) == "against one.html: 1 with other comparisons"


def test_a_check_that_a_passing_test_no_longer_calls_is_a_change():
    """Z5: checks without numbers, too, and proofs that find another kind."""
    then = {"outcome": "passed", "comparisons": [], "pipelines": []}
    then |= {"checks": ["assert_graph", "assert_invariant", "assert_graph"]}
    then |= {"kinds": ["identical", "identical"]}
    then |= {"verdicts": [["proof", "identical"], ["", "equal"], ["model", "reordered"]]}
    now = then | {"checks": ["assert_graph"], "kinds": ["identical", "reordered"]}
    now |= {"verdicts": [["proof", "identical"], ["", "different as required"], ["sum", "equal"]]}
    test = SimpleNamespace(name="test_it", outcome="passed")
    earlier = changes.Earlier(Path("one.html"), {"test_it": then}, {})
    found = earlier.compare(test, now, {})
    assert found["lines"] == [
        "in exact arithmetic identical then, reordered now; "
        "a verdict: equal then, different as required now",
        "assert_graph: called 1 times, 2 then; assert_invariant: no longer called",
    ]
    assert found["moved"]
    assert earlier.summary({"test_it"}) == (
        "against one.html: 1 with other numbers, 1 with other comparisons"
    )
    assert not changes.Earlier(Path("one.html"), {"test_it": then}, {}).compare(test, then, {})[
        "moved"
    ]
    bad = SimpleNamespace(name="test_it", outcome="failed")
    ended = changes.Earlier(Path("one.html"), {"test_it": then | {"outcome": "failed"}}, {})
    shorter = {"kinds": ["identical"], "verdicts": [["proof", "identical"]]}
    assert ended.compare(bad, now | shorter, {})["lines"] == []
    old = {name: then[name] for name in ("outcome", "comparisons", "pipelines")}
    assert (
        changes.Earlier(Path("one.html"), {"test_it": old}, {}).compare(test, now, {})["lines"]
        == []
    )


def made(name, before, after):
    return {"name": name, "before": before, "after": after}


@pytest.mark.parametrize(
    ("now", "reported"),
    [
        ([made("f", "A", "B"), made("f", "B", "C")], []),
        ([made("f", "A", "X"), made("f", "X", "Y")], [("pass f", "B", "X")]),
        ([made("f", "A", "B"), made("f", "B", "Z")], [("pass f", "C", "Z")]),
        ([made("f", "A", "B")], [("the graph after all passes", "C", "B")]),
        ([made("f", "a", "b"), made("f", "b", "c")], [("the graph before all passes", "A", "a")]),
        ([], [("pipeline 1: no passes ran, as they did then", "", "")]),
    ],
)
def test_the_first_that_makes_another_graph_is_named_also_where_a_name_comes_twice(now, reported):
    then = [{"number": 0, "passes": [made("f", "A", "B"), made("f", "B", "C")], "layouts": []}]
    assert (
        list(changes._compare_graphs(then, [{"number": 0, "passes": now, "layouts": []}]))
        == reported
    )


@pytest.mark.parametrize(
    ("then", "now", "counted"),
    [
        ("passed", "failed", "newly failing"),
        ("failed", "passed", "fixed"),
        ("failed", "skipped", "with another outcome"),
        ("passed", "xpassed", "with another outcome"),
        ("failed", "failed", "failing as then"),
        ("failed", "xpassed", "fixed"),
        ("error", "passed", "fixed"),
        ("error", "failed", "with another outcome"),
        ("xfailed", "passed", "with another outcome"),
        ("skipped", "failed", "newly failing"),
    ],
)
def test_what_is_skipped_is_not_fixed(then, now, counted):
    report = pytest.TestReport("t", ("t.py", 0, "t"), {}, now.removeprefix("x"), "", "call")
    if now.startswith("x"):
        report.wasxfail = ""
    test = Collected("t")
    test.add(report)
    earlier = changes.Earlier(
        Path("then.html"), {"t": {"outcome": then, "comparisons": [], "pipelines": []}}, {}
    )
    earlier.compare(test, {"comparisons": [], "pipelines": []}, {})
    assert {what for what, count in earlier.counts.items() if count} == {counted}


def test_of_many_graphs_that_differ_the_first_are_described(monkeypatch):
    """Also where one of them comes again behind the limit: it is described already."""
    monkeypatch.setattr(changes, "_MOST_GRAPHS", 3)

    def text(number):
        return packed(f"# gtrainer graph v2\nif out:\n  out[0] = {number}\n")

    graphs = {f"old{number}": text(number) for number in range(6)}
    texts = {f"new{number}": text(number + 10) for number in range(6)}
    earlier = Earlier(Path(), {}, graphs)
    said = []
    for number in (0, 1, 1, 2, 3, 4, 0, 2):
        words = earlier._describe_graph_change(f"old{number}", f"new{number}", texts)
        said.append("many differ" not in "".join(words))
    assert said == [True, True, True, True, False, False, True, True]


def test_a_file_that_is_not_collected_is_an_error_and_odd_characters_end_no_run(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_bad.py").write_text("import no_such_module\n")
    (tmp_path / "test_odd.py").write_text(
        "def test_odd():\n    raise ValueError('bad \\udc80 name')\n"
    )
    result = run(
        tmp_path, "--continue-on-collection-errors", "--gt-summary=s.md", "--gt-report=r.html"
    )
    assert "summary in s.md" in result.stdout, result.stdout + result.stderr
    summary = (tmp_path / "s.md").read_text()
    assert "1 failed, 1 error" in summary
    assert "**`test_bad.py`** error" in summary
    assert "no_such_module" in (tmp_path / "s.md").read_text()
    assert "udc80" in (tmp_path / "r.html").read_text()


def test_a_run_without_a_test_leaves_what_an_earlier_one_has_written(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "s.md").write_text("mine")
    result = run(tmp_path, "--gt-summary=s.md")
    assert "gtrainer: no summary in s.md: no test has run" in result.stdout
    assert (tmp_path / "s.md").read_text() == "mine"


def test_a_test_that_is_run_again_keeps_its_graphs():
    """A witness sends each once, in the first of its runs."""
    test = Collected("t")
    for attempt in range(2):
        for when in ("setup", "call"):
            report = pytest.TestReport("t", ("t.py", 0, "t"), {}, "passed", None, when)
            sent = [{"kind": "graph_text", "key": "k", "packed": "p"}] if attempt == 0 else []
            report.gt_facts = [*sent, {"kind": "comparison"}] if when == "call" else []
            test.add(report)
    assert len(test.find("graph_text")) == len(test.find("comparison")) == 1


def test_only_what_came_out_wrong_is_told_of_a_failed_test():
    def compared(outcome, must_differ, first=None):
        return {
            "kind": "comparison",
            "what": outcome,
            "outcome": outcome,
            "must_differ": must_differ,
            "tensors": 1,
            "actual": [],
            "expected": [],
            "first": first,
            "differing": [],
            "more": 0,
            "verdict": f"{outcome}: 1 tensor",
        }

    report = pytest.TestReport("t", ("t.py", 0, "t"), {}, "failed", "no", "call")
    report.gt_facts = [
        compared("equal", must_differ=False),
        compared("different", must_differ=True, first=[0, 0, "loss", "loss"]),
        compared("equal", must_differ=True),
        compared("different", must_differ=False, first=[3, 1, "gradient", "w"]),
        {
            "kind": "layout",
            "pipeline": None,
            "sides": [],
            "problems": ["bucket 'b': w sits at byte 4"],
        },
    ]
    test = Collected("t")
    test.add(report)
    assert changes.describe_failure(test) == [
        "equal: equal: 1 tensor, and had to differ",
        "different: first different at step 3, rank 1, gradient w",
        "layout: bucket 'b': w sits at byte 4",
    ]


def page_of(*details: str) -> str:
    return "".join(
        f'<script type="text/plain" id="d{n}">{text}</script>' for n, text in enumerate(details)
    )


def detail(name: str, **others: Any) -> str:
    return packed(
        json.dumps(
            {"name": name, "outcome": "passed", "comparisons": [], "pipelines": [], **others}
        )
    )


HUGE = {
    "one text": lambda: page_of(packed('{"name": "' + "a" * (40 << 20) + '"}')),
    "empty lists": lambda: page_of(packed("[" + "[]," * (12 << 20) + "0]")),
    "a part of many": lambda: page_of(detail("a"), packed(" " * (100 << 20)), detail("b")),
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_page_that_unpacks_to_more_than_a_page_holds_is_refused_before_it_is_parsed(
    tmp_path, kind
):
    """A few bytes stand for a thousand times as many."""
    path = tmp_path / "page.html"
    path.write_text(HUGE[kind]())
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(
            pytest.UsageError, match="cannot be read: a part of it holds more than 16777216"
        ):
            Earlier.read("page.html", path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 << 20


def test_all_details_together_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "_MOST_OF_ALL_DETAILS", 10_000)
    path = tmp_path / "page.html"
    path.write_text(page_of(*(detail(str(number), sections="x" * 3000) for number in range(3))))
    assert len(Earlier.read("page.html", path).tests) == 3
    path.write_text(page_of(*(detail(str(number), sections="x" * 3000) for number in range(4))))
    with pytest.raises(pytest.UsageError, match="a part of it holds more than"):
        Earlier.read("page.html", path)


def test_what_a_test_has_printed_is_not_kept(tmp_path):
    """It is most of a page, and is not compared."""
    path = tmp_path / "page.html"
    path.write_text(page_of(detail("a", sections=[["stdout", "x" * 1000]])))
    assert Earlier.read("page.html", path).tests["a"].keys() == {
        "name",
        "outcome",
        "comparisons",
        "pipelines",
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (page_of(packed("[" * 100_000)), "cannot be read: "),
        (page_of(packed("null")), "cannot be read: "),
        (page_of(packed('{"name": []}')), "was written by an older"),
        (page_of(detail("a")[:-8]), "cannot be read: "),
        (page_of("A" + detail("a")[1:]), "cannot be read: "),
    ],
    ids=["deep", "null", "an odd name", "cut off", "damaged"],
)
def test_a_page_that_is_damaged_is_a_sentence(tmp_path, content: str, reason: str):
    path = tmp_path / "page.html"
    path.write_text(content)
    with pytest.raises(pytest.UsageError, match=reason):
        Earlier.read("page.html", path)


@pytest.mark.parametrize("place", ["/dev/zero", "a folder"])
def test_what_is_no_file_is_not_read(tmp_path, place: str):
    with pytest.raises(pytest.UsageError, match="cannot be read: it is no file"):
        Earlier.read(place, Path(place) if place[0] == "/" else tmp_path)


def test_a_large_page_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "_LARGEST_PAGE", 1 << 20)
    path = tmp_path / "page.html"
    path.write_text("a" * ((1 << 20) + 1))
    with pytest.raises(pytest.UsageError, match="it has more than 1 MiB"):
        Earlier.read("page.html", path)


def test_tensors_that_are_no_record_have_other_numbers_too():
    then, now = (
        {"what": "mine", "actual": [], "values": values} for values in (["a", "b"], ["a", "c"])
    )
    assert changes._compare_numbers([then], [now]) == (["mine: other numbers than then"], [])
    assert changes._compare_numbers([then], [then]) == ([], [])
    assert changes._compare_numbers([{"what": "mine", "actual": []}], [now]) == (
        [],
        [],
    )  # an old page
