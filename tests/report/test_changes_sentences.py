"""Each sentence about a test of two runs, and what is counted for it."""

import json
from pathlib import Path

import pytest

from pytest_gtrainer.facts import packed
from pytest_gtrainer.report.changes import Earlier, describe_failure, shorten
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import build_details


def collected(name="test_a.py::test", outcome="passed", *facts, seconds=1.0):
    """A test with these facts in the report of its call."""
    test = Collected(name)
    wrong = {"failed": "call", "error": "setup"}.get(outcome)
    for when in ("setup", "call", "teardown"):
        result = "failed" if when == wrong else "passed"
        report = pytest.TestReport(name, ("a.py", 0, "a"), {}, result, "no", when)
        report.duration = seconds if when == "call" else 0.0
        report.gt_facts = list(facts) if when == "call" else []
        test.add(report)
    assert test.outcome == outcome
    return test


def comparison(what="loss", rows=((0, 0, "loss", "a"),), **fields):
    made = {"kind": "comparison", "what": what, "outcome": "equal", "must_differ": False}
    made |= {"tensors": 1, "actual": rows, "expected": [], "first": None, "differing": []}
    return made | {"more": 0, "verdict": "equal: 1 tensor\nmore"} | fields


def compared(then, now, graphs=None, texts=None, **fields):
    """Compare two tests; return what is found, and the counts that are not 0."""
    details = build_details(then)
    earlier = Earlier(Path("one.html"), {then.name: details}, graphs or {}, **fields)
    found = earlier.compare(now, build_details(now), texts or {})
    counts = {what: count for what, count in earlier.counts.items() if count}
    return found, counts


def lines(*given, **how):
    return compared(*given, **how)[0]["lines"]


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        (comparison(), None),
        (comparison(outcome="different", must_differ=True, first=[0, 0, "", "w"]), None),
        (comparison(outcome="unverified"), "loss: equal: 1 tensor"),
        (comparison("", outcome="unverified"), "comparison: equal: 1 tensor"),
        (comparison(must_differ=True), "loss: equal: 1 tensor, and had to differ"),
        (
            comparison(outcome="different", first=[1, 2, "gradient", "w"]),
            "loss: first different at step 1, rank 2, gradient w",
        ),
        (
            comparison(outcome="different", first=[1, 2, "", "w"]),
            "loss: first different at step 1, rank 2, w",
        ),
        (
            comparison(outcome="different", first=[1, 2, "", ""]),
            "loss: first different at step 1, rank 2",
        ),
        ({"kind": "layout", "problems": [], "pipeline": None}, None),
        ({"kind": "layout", "problems": ["a", "b"], "pipeline": None}, "layout: a; b"),
        (
            {"kind": "golden_difference", "name": "g", "words": list("abcd")},
            "g: a; b; c; and 1 more",
        ),
    ],
)
def test_what_failed_in_a_test_is_a_sentence_for_each_check(fact, line):
    expected = [] if line is None else [line]
    assert describe_failure(collected("t", "failed", fact)) == expected
    assert describe_failure(collected("t", "error", fact)) == expected
    assert describe_failure(collected("t", "passed", fact)) == []


@pytest.mark.parametrize("count", range(7))
def test_three_sentences_are_shown_and_the_others_counted(count):
    words = "; ".join("abcdef"[: min(count, 3)])
    if count > 3:
        words += f"; and {count - 3} more"
    assert shorten("abcdef"[:count]) == words


@pytest.mark.parametrize(
    ("outcome", "more"),
    [("passed", {}), ("failed", {"newly failing": 1}), ("error", {"newly failing": 1})],
)
def test_a_test_that_the_other_run_does_not_have(outcome, more):
    file = collected("test_a.py", "error")
    known = {**build_details(file), "reason": "ImportError: no b"}
    test = collected("test_a.py::test[1]", outcome)
    for tests, line, count in (
        ({}, "new: it is not at abc", "new"),
        (
            {"test_a.py": known},
            "not compared: its file cannot be collected at abc: ImportError: no b",
            "not collected then",
        ),
        (
            {"test_a.py": build_details(file)},
            "not compared: its file cannot be collected at abc: for an unknown reason",
            "not collected then",
        ),
    ):
        earlier = Earlier(Path("one.html"), tests, {}, where="at abc")
        found = earlier.compare(test, build_details(test), {})
        assert found == {"lines": [line], "graphs": [], "moved": False}
        assert {what: n for what, n in earlier.counts.items() if n} == {count: 1, **more}


def test_other_numbers_and_other_comparisons(*_):
    then = collected("t", "passed", comparison(), comparison(), comparison("only then"))
    other = comparison(rows=((0, 0, "loss", "b"),))
    now = collected("t", "passed", comparison(), other, comparison("only now"))
    found, counts = compared(then, now)
    assert found["lines"] == [
        "loss: other numbers than then, first at step 0, rank 0, loss",
        "only then: no longer compared; only now: newly compared",
    ]
    assert found["moved"]
    assert counts == {"with other numbers": 1, "with other comparisons": 1}
    # A test that fails may end before its other comparisons.
    found, counts = compared(then, collected("t", "failed", comparison()))
    assert found["lines"] == ["passed then, failed now"]
    assert counts == {"newly failing": 1}
    found, counts = compared(collected("t", "failed"), collected("t", "error", comparison()))
    assert (found["lines"], counts) == (["failed then, error now"], {"with another outcome": 1})


def test_digests_of_one_run_alone_are_other_steps_and_not_other_numbers():
    rows = [(step, 0, "loss", "a") for step in range(3)]
    then, now = (collected("t", "passed", comparison(rows=each)) for each in (rows[:2], rows))
    words = ["loss: other steps, ranks or phases were compared"]
    assert lines(then, now) == lines(now, then) == words
    now.facts.clear()
    changed = [(0, 0, "loss", "z"), *rows[1:]]
    now = collected("t", "passed", comparison(rows=changed))
    assert lines(then, now) == ["loss: other numbers than then, first at step 0, rank 0, loss"]


def text(name):
    lines = ["if I:", "  I[0]: f32[2]", "if fwd:", "  with _:"]
    lines += [f"    a: f32[2] = aten.{name}(I[0])", "if out:", "  out[0] = a", ""]
    return packed("\n".join(["# gtrainer graph v2", *lines]))


def a_pass(pipeline, name, before, after):
    return {"kind": "pass", "pipeline": pipeline, "name": name, "before": before, "after": after}


def test_a_graph_that_is_another_one_is_described_and_shown_beside():
    then = collected("t", "passed", a_pass(0, "f", "a", "b"), a_pass(1, "g", "c", "d"))
    now = collected("t", "passed", a_pass(0, "f", "a", "x"), a_pass(1, "g", "c", "d"))
    graphs, texts = {"b": text("neg")}, {"x": text("exp")}
    found, counts = compared(then, now, graphs, texts)
    assert found["graphs"] == [("pass f", "b", "x")]
    words = (
        "the dataflow differs, first at aten.exp in fwd _; fwd _: lost aten.neg, gained aten.exp"
    )
    assert found["lines"] == [f"pass f: {words}"]
    assert (found["moved"], counts) == (True, {"with another graph": 1})
    [line] = compared(then, now, {"b": text("neg")[:-8]}, texts)[0]["lines"]
    assert line.startswith("pass f: another graph, and the earlier one cannot be read: ")
    [line] = compared(then, now, {}, texts)[0]["lines"]
    assert line == "pass f: another graph, and the earlier one cannot be read: 'b'"


@pytest.mark.parametrize("second", [False, True])
def test_passes_of_one_run_alone_are_named_by_their_pipeline(second):
    common = [a_pass(0, "f", "a", "b")] * second
    own = a_pass(1 if second else 0, "g", "c", "d")
    then, now = collected("t", "passed", *common, own), collected("t", "passed", *common)
    number = 2 if second else 1
    found, counts = compared(then, now)
    assert found == {
        "lines": [f"pipeline {number}: no passes ran, as they did then"],
        "graphs": [],
        "moved": True,
    }
    assert counts == {"with another graph": 1}
    assert lines(now, then) == [f"pipeline {number}: passes ran, as none did then"]


def test_payloads_that_came_went_or_changed_in_any_pipeline():
    def payload(label, *slots, collective="all_gather", **fields):
        made = {"label": label, "collective": collective, "op": None, "dtype": "f32", "ranks": 2}
        made |= {"directions": ["fwd"], "slots": [[slot, 0, 4] for slot in slots]}
        return made | fields

    def layouts(*pipelines):
        facts = []
        for number, payloads in enumerate(pipelines):
            sides = [["rewritten graph", list(payloads)]]
            facts.append({"kind": "layout", "pipeline": number, "sides": sides, "problems": []})
        return collected("t", "passed", *facts)

    b, c = payload("b", "w", "v", "v"), payload("c", "u")
    reduced = payload("b", "w", collective="reduce_scatter")
    then = layouts([b, c, reduced], [c])
    found, counts = compared(then, layouts([payload("b", "w", "v", "w", ranks=4)], [c, c]))
    assert found["lines"] == [
        "payloads gone: c, reduce_scatter of b; "
        "all_gather of b: other parameters, ranks 2 became 4; new payloads: all_gather of c"
    ]
    assert counts == {"with another layout": 1}
    for before, now, words in (
        ({"op": "sum"}, {"op": "avg"}, "op sum became avg"),
        ({"dtype": "f32"}, {"dtype": "bf16"}, "dtype f32 became bf16"),
        ({"directions": ["fwd"]}, {"directions": ["bwd"]}, "directions ['fwd'] became ['bwd']"),
    ):
        sides = layouts([payload("b", "w", **before)]), layouts([payload("b", "w", **now)])
        assert lines(*sides) == [f"all_gather of b: {words}"]


def claim(name, of, key):
    return {"kind": "golden_text", "name": name, "of": of, "key": key, "packed": "p"}


def test_claims_for_goldens_of_each_kind():
    then = collected("t", "passed", claim("a", "text", "1"), claim("b", "text", "1"))
    now = collected("t", "passed", claim("a", "text", "2"), claim("c", "text", "1"))
    graphs, texts = {"1": packed("one\n")}, {"1": packed("one\n"), "2": packed("two\n")}
    found, counts = compared(then, now, graphs, texts)
    changed, unpaired = found["lines"]
    assert changed.startswith("a: ")
    assert ("one" in changed, "two" in changed) == (True, True)
    assert unpaired == "b: no longer checked; c: newly checked"
    assert counts == {"with another text": 1, "with other comparisons": 1}

    sides = [collected("t", "passed", claim("g", "graph", key)) for key in ("1", "2")]
    found, counts = compared(*sides, {"1": text("neg")}, {"2": text("exp")})
    assert (len(found["lines"]), counts) == (1, {"with another graph": 1})
    sides = [collected("t", "passed", claim("n", "numbers", key)) for key in ("1", "2")]
    found, counts = compared(*sides, {"1": packed("loss 1.0\n")}, {"2": packed("loss 2.0\n")})
    assert (len(found["lines"]), counts) == (1, {"with other numbers": 1})


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (1.0, 1.49, None),
        (0.5, 1.0, "slower: 0.5 s then, 1.0 s now"),
        (1.0, 0.5, "faster: 1.0 s then, 0.5 s now"),
        (1.0, 1.99, None),
        (1.0, 2.0, "slower: 1.0 s then, 2.0 s now"),
        (2.0, 1.0, "faster: 2.0 s then, 1.0 s now"),
        (10.0, 15.0, None),
        (0.0, 0.4, None),
        (0.0, 0.6, "slower: 0.0 s then, 0.6 s now"),
    ],
)
def test_a_time_is_another_one_if_it_doubles_and_moves_nothing(then, now, line):
    sides = [collected("t", "passed", seconds=each) for each in (then, now)]
    found, counts = compared(*sides, times=True)
    assert found == {"lines": [line] if line else [], "graphs": [], "moved": False}
    assert counts == ({line.partition(":")[0]: 1} if line else {})
    assert compared(*sides)[0]["lines"] == []


def test_the_summary_counts_in_one_line_and_names_the_run():
    tests = {name: {} for name in ("a", "b", "odd\\x00")}
    earlier = Earlier(Path("x/one.html"), tests, {})
    assert earlier.summary({"a", "b", "odd\0"}) == "against one.html: nothing changed"
    earlier.counts.update({"fixed": 2, "new": 0})
    assert earlier.summary({"a"}) == "against one.html: 2 fixed, 2 not in this run"
    earlier.name = "main (abc)"
    assert earlier.summary({"a", "b", "odd\0", "c"}) == "against main (abc): 2 fixed"


def page(*details, graphs=()):
    parts = []
    for number, each in enumerate(details):
        parts.append(
            f'<script type="text/plain" id="d{number}">{packed(json.dumps(each))}</script>'
        )
    for key, content in graphs:
        parts.append(f'<script type="text/plain" id="g-{key}">{content}</script>')
    return "".join(parts)


BARE = {"name": "t", "outcome": "passed", "comparisons": [], "pipelines": []}


def test_what_is_read_of_a_page(tmp_path):
    path = tmp_path / "page.html"
    failures = [["collect", "first\nKeyError: 1\n"], ["collect", "x\n\nImportError: no b \n"]]
    file = {**BARE, "name": "test_b.py", "failures": failures, "sections": ["x"]}
    own = {**BARE, "name": "a::b", "failures": failures, "seconds": 2.0, "claims": []}
    path.write_text(page(file, own, graphs=[("k1", "p1"), ("k2", "p2")]))
    found = Earlier.read("given", path)
    assert found.tests == {
        "test_b.py": {**BARE, "name": "test_b.py", "reason": "ImportError: no b"},
        "a::b": {**BARE, "name": "a::b", "seconds": 2.0, "claims": []},
    }
    assert found.graphs == {"k1": "p1", "k2": "p2"}
    path.write_text(page(graphs=[("k1", "p1")]))
    assert Earlier.read("given", path).tests == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ": there is no such file; name a page that --gt-report wrote"),
        ("", " holds no test; name a page that --gt-report wrote"),
        (
            page({**BARE, "pipelines": [{"passes": []}]}),
            " was written by an older pytest-gtrainer, whose pages contain less of a test: write "
            "it again",
        ),
        (
            page({name: value for name, value in BARE.items() if name != "comparisons"}),
            " was written by an older pytest-gtrainer, whose pages contain less of a test: write "
            "it again",
        ),
    ],
)
def test_what_is_no_page_is_one_sentence(tmp_path, content, words):
    path = tmp_path / "page.html"
    if content is not None:
        path.write_text(content)
    with pytest.raises(pytest.UsageError) as caught:
        Earlier.read("a/page.html", path)
    assert str(caught.value) == f"--gt-report-against=a/page.html{words}"
