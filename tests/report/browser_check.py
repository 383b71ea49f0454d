"""The page of ``--gt-report`` in a real browser: ``make report-check`` (Debian's ``chromium``); not in ``make test``.

Each check opens a copy of a page with a script behind it that clicks, types, and leaves what it saw in the title.
Screenshots at 1,280 pixels lie in ``build/report-check`` afterwards, for a person to look at.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gtrainer.facts import packed
from pytest_gtrainer.graphtext.differences.lines import changed_lines
from pytest_gtrainer.report.collected import Test as Collected
from pytest_gtrainer.report.html import Run, render_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = Path(__file__).parents[2] / "build" / "report-check"
SUITE = Path(__file__).parent / "suite.py"
CHANGING = Path(__file__).parent / "changing.py"
HELPERS = """
<script>
const settled = () => new Promise((done) => setTimeout(done, 300));
const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const named = (text, within = document) => all("button", within).find((b) => b.textContent.includes(text));
const test = (name) => all(".test").find((t) => one(".name", t).textContent.endsWith(name));
const type = (field, text) => { field.value = text; field.dispatchEvent(new Event("input")); };
async function open(name) { one("h2 button", test(name)).click(); await settled(); return one(".body", test(name)); }
(async () => { await settled(); document.title = JSON.stringify(await (async () => { %s })()); })()
  .catch((error) => { document.title = JSON.stringify({ error: String(error.stack) }); });
</script>
"""


def chromium(*arguments):
    if BROWSER is None:
        pytest.fail("there is no chromium here: apt-get install chromium", pytrace=False)
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,900",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=True)
    complaints = re.findall(r'CONSOLE[^"]*"(.*)"', done.stderr)
    assert not complaints
    return done.stdout


def does(page, folder, actions):
    """What the script ``actions`` returns in the page."""
    acted = folder / "acted.html"
    acted.write_text(page.replace("</body>", HELPERS.replace("%s", actions) + "</body>"))
    seen = re.search(r"<title>(.*?)</title>", chromium("--dump-dom", acted.as_uri()), re.DOTALL)[1]
    return json.loads(html.unescape(seen))


def picture(page, name, height, what="", *flags):
    """A screenshot, 1,280 pixels wide; ``what`` says what to open, as ``#t0,t1.2``."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    source, target = PICTURES / f"{name}.html", PICTURES / f"{name}.png"
    source.write_text(page)
    target.unlink(missing_ok=True)
    chromium(*flags, f"--window-size=1280,{height}", f"--screenshot={target}", source.as_uri() + what)
    assert target.stat().st_size > 20_000
    return target


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of a run in which a test fails, and of one in which all pass."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(SUITE, folder / "test_it.py")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for name, which in (("failing", ""), ("passing", "not differs")):
        command = [sys.executable, "-m", "pytest", "-q", f"--gt-report={name}.html", "--gt-device=cpu", "-k", which]
        subprocess.run(command, cwd=folder, env=environ, timeout=240, capture_output=True)
    return {name: (folder / f"{name}.html").read_text() for name in ("failing", "passing")}


def test_search_and_outcomes_sift_the_tests(pages, tmp_path):
    seen = does(
        pages["failing"],
        tmp_path,
        """
        const name = (t) => one(".name", t).textContent.split("::")[1];
        const shown = () => all(".test").filter((t) => !t.hidden).map(name);
        const told = { all: shown() };
        type(one("#search"), "RANKS equal"); told.search = shown(); told.count = one("#shown").textContent;
        type(one("#search"), "bucketing"); told.pass = shown();
        type(one("#search"), ""); one("input[data-outcome=passed]").click(); told.failed = shown();
        return told;
    """,
    )
    assert seen["all"][0] == "test_that_differs"
    assert len(seen["all"]) == 4
    assert (seen["search"], seen["count"]) == (["test_equal_on_ranks"], "1 of 4 tests")
    assert seen["pass"] == ["test_pipeline"]
    assert seen["failed"] == ["test_that_differs"]


def test_a_test_opens_and_closes(pages, tmp_path):
    seen = does(
        pages["passing"],
        tmp_path,
        """
        const body = await open("test_silent"), opened = [body.hidden, body.textContent];
        named("Captured", body).click();
        const output = one("pre", body).textContent;
        one("h2 button", test("test_silent")).click();
        return { opened, output, closed: body.hidden, expanded: one("h2 button", test("test_silent")).ariaExpanded };
    """,
    )
    assert seen["opened"] == [False, "▸ Captured stdout call"]
    assert seen["output"] == "nothing <b>of ours</b>\n"
    assert (seen["closed"], seen["expanded"]) == (True, "false")


def test_graphs_stand_side_by_side_and_are_searched(pages, tmp_path):
    """A line of the graph leads to everything of its module."""
    seen = does(
        pages["passing"],
        tmp_path,
        """
        const body = await open("test_pipeline");
        const row = all("table.passes tr", body).find((r) => r.textContent.includes("joint_transformer"));
        named("side by side", row).click(); await settled();
        const panel = all(".panel", body).find((p) => !p.hidden), told = { bar: one(".bar", panel).textContent };
        told.gained = all("td.gained", panel).some((cell) => cell.textContent.includes("with bucket(layers[0])"));
        type(one(".bar input", panel), "reduce_scatter_tensor:");
        told.found = all(".found-list div", panel).length;
        all(".found-list button", panel).pop().click();
        told.revealed = one("tr.found", panel).textContent;
        all("td.no", one("tr.found", panel)).find((cell) => cell.title).click();
        told.module = all(".bar .dim", panel).pop().textContent;
        return told;
    """,
    )
    assert seen["bar"].startswith("joint_transformer_block_bucketing_reordering_pass")
    assert seen["gained"]
    assert seen["found"] >= 2
    assert "reduce_scatter_tensor" in seen["revealed"]
    assert re.match(r".+: \d+ lines", seen["module"])


def test_layout_schedule_and_digests_are_drawn(pages, tmp_path):
    seen = does(
        pages["failing"],
        tmp_path,
        """
        const body = await open("test_pipeline");
        const bars = all(".layout rect title", body).map((t) => t.textContent);
        const row = all("table.passes tr", body).find((r) => r.textContent.includes("joint_transformer"));
        named("schedule", row).click(); await settled();
        const [left, right] = all(".sides > div", body);
        const [a, b] = [left, right].map((side) => side.getBoundingClientRect());
        const beside = a.top === b.top && a.right <= b.left && b.right <= 1280;
        const lanes = all("svg text", right).map((t) => t.textContent);
        const sums = all(".sides p", body).map((p) => p.textContent).filter((t) => t.includes("exposed "));
        const unchanged = all("table.passes tr", body).find((r) => r.textContent.includes("deduplicate"));
        const silent = named("schedule", unchanged) === undefined;
        named("memory by liveness", body).click(); await settled();
        const curves = all("svg path", body).length, told = all(".sides pre", body).map((p) => p.textContent);
        const differs = await open("test_that_differs");
        return { bars, curves, told, lanes, sums, beside, silent,
                 first: all("td.first", differs).length, wrong: all("td.differs", differs).length,
                 equal: all("td.equal", differs).length };
    """,
    )
    assert any(re.match(r"layers.0.weight: bytes \d+ to \d+", bar) for bar in seen["bars"])
    assert {"compute", "fsdp"} <= set(seen["lanes"])
    assert len([line for line in seen["sums"] if "in all" in line]) == 2  # before and after
    assert seen["curves"] == 2
    assert all(told.startswith("peak ") for told in seen["told"])
    assert (seen["beside"], seen["silent"]) == (True, True)
    assert (seen["first"], seen["wrong"], seen["equal"]) == (1, 1, 7)


def test_a_golden_that_differs_and_what_changed_since_are_told_at_once_and_open_side_by_side(tmp_path):
    shutil.copy(CHANGING, tmp_path / "test_it.py")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "--gt-device=cpu"]
    for variant, options in (("then", ["--gt-create-goldens"]), ("now", ["--gt-report-against=then.html"])):
        run = [*command, f"--gt-report={variant}.html", *options]
        subprocess.run(run, cwd=tmp_path, env={**environ, "VARIANT": variant}, timeout=240, capture_output=True)
    page = (tmp_path / "now.html").read_text()
    seen = does(
        page,
        tmp_path,
        """
        const front = one(".changed", test("test_graph")).textContent;
        const golden = await open("test_graph"), told = all("h3", golden).map((h) => h.textContent);
        const lost = one("td.lost", golden).textContent, gained = one("td.gained", golden).textContent;
        const gap = one("tr.gap", golden), rows = all("table.lines tr", golden).length;
        gap.focus(); gap.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        const unfolded = all("table.lines tr", golden).length - rows;
        const passed = await open("test_pass");
        named("then, and now", passed).click(); await settled();
        return { front, told, lost, gained, unfolded, then: one(".panel:not([hidden]) td.lost", passed).textContent };
    """,
    )
    assert "lost aten.sin, gained aten.cos" in seen["front"]
    assert seen["told"][:2] == [
        "Golden golden/test_it/test_graph.fxgraph: accepted, and obtained",
        "Since the earlier report",
    ]
    assert ("aten.sin" in seen["lost"], "aten.cos" in seen["gained"], "aten.sin" in seen["then"]) == (True, True, True)
    assert seen["unfolded"] > 10  # by the keyboard
    picture(page, "changed", 1400, "#t0")
    dark = picture(page, "changed-dark", 1400, "#t0", "--force-dark-mode")
    assert dark.read_bytes() != (PICTURES / "changed.png").read_bytes()


def large_page():
    """A thousand tests, one with a pass on a graph of 40,000 nodes that changes every tenth."""

    def graph(name):
        lines = []
        for n in range(40_000):
            operator = name if n % 10 == 0 else "mm"
            lines.append(f"  with layers[{n // 100}].mlp:\n    mm_{n}: f32[{n}, 64] = aten.{operator}(x_{n})\n")
        return "if fwd:\n" + "".join(lines)

    before, after = graph("mm"), graph("bmm")
    changes = changed_lines(before, after)
    one_pass = {"kind": "pass", "pipeline": 0, "name": "my_pass", "fingerprint": "", "seconds": 0.5,
                "nodes": [40_000, 40_000], "words": ["4,000 aten.mm became aten.bmm"]}  # fmt: skip
    large = Collected("test_large")
    facts = [{"kind": "graph_text", "key": key, "packed": packed(text)} for key, text in (("b", before), ("a", after))]
    large.add(_report([*facts, {**one_pass, "before": "b", "after": "a", "changes": changes}]))
    small = []
    for number in range(999):
        small.append(Collected(f"tests/test_many.py::test_number[{number}]"))
        key, text = f"s{number}", packed(f"if P:\n  P.w{number}: f32[2]\n")
        told = {**one_pass, "before": key, "after": key, "changes": []}
        small[-1].add(_report([{"kind": "graph_text", "key": key, "packed": text}, told]))
    return render_page(Run("a large run", "", [], [large, *small]))


def _report(facts):
    report = pytest.TestReport("a", ("a.py", 0, "a"), {}, "passed", None, "call")
    report.gt_facts = facts
    return report


def test_a_thousand_tests_and_a_large_graph_stay_usable(tmp_path):
    """What is in the page's tree stays small, whatever is opened; the last line of the graph can be found."""
    page = large_page()
    seen = does(
        page,
        tmp_path,
        """
        const first = all("*").length, body = await open("test_large");
        named("side by side", body).click(); await settled(); await settled();
        const drawn = all("*").length;
        type(one(".bar input", body), "mm_39999");
        const found = all(".found-list button", body); found[0].click();
        return { first, drawn, found: found.length, shown: one("tr.found", body).textContent };
    """,
    )
    print(f"a page of {len(page) / 1e6:.1f} MB; elements at first {seen['first']}, with the graph {seen['drawn']}")
    assert seen["first"] < 16_000
    assert seen["drawn"] < 20_000
    assert seen["found"] == 2
    assert "mm_39999" in seen["shown"]
    picture(page, "large", 900, "#t0,")


def test_pictures_of_a_passing_and_a_failing_run(pages):
    """To be looked at: make report-check says where they are."""
    picture(pages["failing"], "failing", 1000, "#t0")
    picture(pages["passing"], "passing", 2600, "#t0.4")
    picture(pages["failing"], "failing-list", 600)
    picture(pages["passing"], "schedules", 1700, "#t0.7")
    print(f"\nscreenshots in {PICTURES}")
