"""Draw the pictures of the documentation, in ``docs/pictures``, again from real runs.

``python docs/pictures.py DIR`` draws all; ``--only NAME`` one. Timelines are those that ``timeline`` tells of a traced
graph, the terminal is a run of ``examples/downstream`` with its bug, the page is made by ``--gt-report`` and
photographed by headless Chromium; the other drawings are laid out here. All but the pages are light or dark as
the reader's system is.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
.small { font-size: 11px; } .dim { fill: #656d76; } .bold { font-weight: 600; } .middle { text-anchor: middle; }
.mono { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre; }
.box { fill: #f6f8fa; stroke: #afb8c1; } .soft { fill: none; stroke: #d8dee4; stroke-dasharray: 4 3; }
.rank { fill: #ddf4ff; stroke: #0b5cad; } .arrow { stroke: #656d76; fill: none; stroke-width: 1.4; }
.head { fill: #656d76; } .compute { fill: #8fb8de; } .collective { fill: #7fbf7b; } .exposed { fill: #e5786d; }
.back { fill: #fff; } .red { fill: #b42318; } .green { fill: #1a7f37; } .cut { stroke: #b42318; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .dim, .head { fill: #8d96a0; } .box { fill: #161b22; stroke: #484f58; }
  .soft { stroke: #30363d; }
  .rank { fill: #10243e; stroke: #58a6ff; } .arrow { stroke: #8d96a0; } .back { fill: #0d1117; } .red { fill: #ff7b72; }
  .green { fill: #3fb950; }
}
"""


@dataclass
class Drawing:
    """An SVG that is put together from boxes, texts, circles and arrows; lengths in pixels."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>')

    def rect(
        self, x: float, y: float, w: float, h: float, kind: str = "box", hint: str = "", r: int = 5
    ) -> None:
        told = f"<title>{html.escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.6g}" y="{y:g}" width="{w:.6g}" height="{h:g}" rx="{r}" class="{kind}">{told}</rect>'
        )

    def box(self, x: float, y: float, w: float, h: float, *lines: str) -> None:
        """A box with lines in its middle, the first one bold."""
        self.rect(x, y, w, h)
        for place, line in enumerate(lines):
            top = y + h / 2 + 5 + (place - (len(lines) - 1) / 2) * 16
            self.text(x + w / 2, top, line, "middle bold" if place == 0 else "middle small dim")

    def rank(self, x: float, y: float, name: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="15" class="rank"/>')
        self.text(x, y + 4, name, "middle small")

    def arrow(self, *points: tuple[float, float], words: str = "") -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" class="arrow" marker-end="url(#head)"/>')
        if words:
            (x, y), (u, v) = points[:2]
            self.text((x + u) / 2, (y + v) / 2 - 6, words, "middle small dim")

    def svg(self) -> str:
        marker = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            'role="img">'
            f"<title>{html.escape(self.title)}</title><style>{STYLE}</style>"
            f'<defs>{marker}<path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" class="back"/>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


def flow() -> str:
    d = Drawing(880, 300, "How data flows: model, graph, golden, record, verdict")
    d.box(10, 30, 120, 56, "model, step", "yours")
    d.box(200, 30, 140, 56, "joint graph", "FX: fwd, loss, bwd")
    d.box(430, 30, 150, 56, "rewritten graph", "after each pass")
    d.box(700, 10, 170, 44, "golden", "graph text, reviewed")
    d.box(700, 66, 170, 44, "layout, schedule", "who sits at which byte")
    d.box(200, 210, 140, 56, "reference run", "eager FSDP2, chunking")
    d.box(430, 210, 150, 56, "graph's run", "replayed in a world")
    d.box(700, 210, 170, 56, "verdict", "equal, or the first bit")
    d.arrow((130, 58), (200, 58), words="trace_step")
    d.arrow((340, 58), (430, 58), words="passes")
    d.arrow((580, 50), (700, 32), words="gt_golden")
    d.arrow((580, 66), (700, 88))
    d.arrow((70, 86), (70, 238), (200, 238))
    d.arrow((505, 86), (505, 210))
    d.arrow((580, 238), (700, 238), words="record")
    d.arrow((270, 266), (270, 288), (785, 288), (785, 266))
    d.text(530, 282, "record", "middle small dim")
    d.text(515, 150, "fake, simulated, ranks, torchrun", "small dim")
    return d.svg()


def worlds() -> str:
    d = Drawing(880, 250, "The worlds: who is a process, and who moves data")

    def world(x: float, w: float, name: str, lines: tuple[str, ...]) -> None:
        d.text(x + w / 2, 20, name, "middle bold")
        for place, line in enumerate(lines):
            d.text(x + w / 2, 200 + 18 * place, line, "middle small dim")

    d.rect(10, 34, 190, 140)
    d.rank(60, 90, "0")
    for place in range(3):
        d.parts.append(f'<circle cx="{105 + 32 * place}" cy="90" r="13" class="soft"/>')
    d.text(105, 145, "the test's process", "middle small dim")
    world(10, 190, "fake, size=4", ("one rank's graph, no data moves", "structure at 4,096 ranks"))
    d.rect(225, 34, 190, 140)
    for place in range(4):
        d.rank(257 + 42 * place, 90, str(place))
    d.arrow((257, 112), (383, 112))
    d.text(320, 145, "the test's process", "middle small dim")
    world(
        225,
        190,
        "simulated, size=4, nodes=2",
        ("all ranks, true values,", "sums in a ring's or tree's order"),
    )
    for place in range(4):
        d.rect(440 + 50 * place, 50, 42, 80)
        d.rank(461 + 50 * place, 90, str(place))
    d.arrow((461, 142), (611, 142))
    d.text(536, 164, "gloo, NCCL", "middle small dim")
    world(
        440,
        192,
        "ranks, size=4",
        ("a process each, from a warm pool:", "a pytest session on every rank"),
    )
    for node in range(2):
        d.rect(660 + 108 * node, 34, 100, 140, "soft")
        for place in range(2):
            d.rect(666 + 108 * node + 46 * place, 50, 40, 80)
            d.rank(686 + 108 * node + 46 * place, 90, str(2 * node + place))
        d.text(710 + 108 * node, 166, f"machine {node}", "middle small dim")
    d.arrow((686, 142), (840, 142))
    world(
        660,
        208,
        "the same under torchrun",
        ("one machine or several;", "rank 0's process reports for all"),
    )
    return d.svg()


def ring() -> str:
    """Two channels of a reduce-scatter over two nodes, as ``NetModel`` draws them, and in which order each adds."""
    from pytest_gtrainer.worlds.simulated.rings import rail_rings

    d = Drawing(880, 330, "Two channels of one reduce-scatter add in different orders")
    rings = rail_rings(2, 4, 2)
    for node in range(2):
        d.rect(10 + 460 * node, 10, 400, 150, "soft")
        d.text(20 + 460 * node, 28, f"node {node}", "small dim")
    for channel, ring in enumerate(rings):
        y = 62 + 66 * channel
        d.text(440, y - 6, f"channel {channel}", "middle small dim")
        xs = [(70 if place < 4 else 530) + 92 * (place % 4) for place in range(8)]
        for place, (x, name) in enumerate(zip(xs, ring, strict=True)):
            d.rank(x, y, str(name))
            if place:
                d.arrow((xs[place - 1] + 16, y), (x - 17, y))
        d.arrow((xs[7], y + 17), (xs[7], y + 29), (xs[0], y + 29), (xs[0], y + 18))
    d.text(
        10,
        190,
        "A bucket's bytes are dealt out to channels. What rank 0 keeps of it comes around each channel's ring:",
    )
    for channel, ring in enumerate(rings):
        start = ring.index(0)
        order = [*ring[start + 1 :], *ring[: start + 1]]
        d.text(30, 216 + 24 * channel, f"by channel {channel}", "bold")
        d.text(
            150,
            216 + 24 * channel,
            "(" * 6 + f"g{order[0]}" + "".join(f" + g{n})" for n in order[1:7]) + f" + g{order[7]}",
            "mono",
        )
    words = (
        "Addition of floats is not associative. A parameter that a pass packs at another byte of the bucket goes by",
        "another channel, is added in another order, and its last bit changes. On one node whose channels are alike,",
        "both orders are the same: no test on 8 GPUs shows it. The simulated world does, and the layout names it.",
    )
    for place, line in enumerate(words):
        d.text(10, 274 + 20 * place, line)
    return d.svg()


def timeline_of(title: str, sides: list[tuple[str, object]], mesh: dict[str, int]) -> str:
    """Schedules that ``timeline`` has told, above each other and to one scale."""
    from pytest_gtrainer import timeline

    told = [(name, timeline(gm, mesh=mesh)) for name, gm in sides]  # type: ignore[arg-type]
    longest = max(each.seconds for _, each in told)
    height = 30 + sum(62 + 26 * len(each.lanes) for _, each in told)
    d = Drawing(880, height, title)
    y = 8.0
    for name, each in told:
        d.text(10, y + 16, name, "bold")
        d.text(10, y + 32, each.summary, "small dim")
        y += 16
        for lane, where in enumerate(each.lanes):
            d.text(10, y + 42 + 26 * lane, where if len(where) < 14 else where[:12] + "…", "small")
        for span in each.merged():
            lane = each.lanes.index(span.lane)
            left, w = 90 + span.start / longest * 780, max(0.3, span.duration / longest * 780)
            d.rect(left, y + 28 + 26 * lane, w, 19, span.kind, span.label, r=1)
        y += 46 + 26 * len(each.lanes)
    for place, (kind, words) in enumerate(
        (("compute", "compute"), ("collective", "communication"), ("exposed", "compute waits"))
    ):
        d.rect(10 + 150 * place, y + 2, 12, 12, kind)
        d.text(28 + 150 * place, y + 13, words, "small dim")
    d.text(470, y + 13, "estimated by the default CostModel, not measured", "small dim")
    return d.svg()


def buckets() -> str:
    """Llama 3 with the layers of the 8B model, of which four: one step on 64 ranks, before and after bucketing."""
    import torch

    from fixtures.models import llama3
    from fixtures.models.loss import ce_step
    from pytest_gtrainer import (
        apply_graph_passes,
        construct_default_graph_passes,
        data_parallel,
        trace_step,
    )
    from pytest_gtrainer.worlds.fake import fake_world, make_mesh
    from pytest_gtrainer.worlds.spec import make_spec

    config = replace(llama3.FLAVORS["8B"], n_layers=4)
    with fake_world(make_spec("fake", size=64)) as world, torch.device("meta"):
        model = data_parallel(llama3.Llama3(config), make_mesh(world))
        tokens = torch.zeros(2, 8192, dtype=torch.int64)
        traced = trace_step(model, ce_step, (tokens, tokens))
        passes = construct_default_graph_passes(n_layers=4)
        after = apply_graph_passes(traced.gm, traced.example_inputs, passes)
        sides: list[tuple[str, object]] = [
            ("as traced: a collective a parameter", traced.gm),
            ("bucketed and reordered", after),
        ]
        return timeline_of("A training step before and after bucketing", sides, dict(world.mesh))


def chunking() -> str:
    """An expert layer in one piece and in two chunks: what may run beside what. Laid out by hand, not to scale."""
    d = Drawing(880, 190, "An expert layer before chunking and in two chunks")
    whole = (("router", 0, 60), ("dispatch", 1, 150), ("experts", 0, 230), ("combine", 1, 150))
    halves = (
        ("router 0", 0, 0, 54),
        ("dispatch 0", 1, 54, 90),
        ("router 1", 0, 54, 54),
        ("dispatch 1", 1, 144, 90),
        ("experts 0", 0, 144, 118),
        ("experts 1", 0, 262, 118),
        ("combine 0", 1, 262, 90),
        ("combine 1", 1, 380, 90),
    )
    at = 0.0
    for name, lane, w in whole:
        d.rect(110 + at, 28 + 26 * lane, w, 21, ("compute", "collective")[lane], r=2)
        d.text(110 + at + w / 2, 43 + 26 * lane, name, "middle small")
        if lane:
            d.rect(110 + at, 28, w, 21, "exposed", r=2)
            d.text(110 + at + w / 2, 43, "waits", "middle small")
        at += w
    for name, lane, left, w in halves:
        d.rect(110 + left, 112 + 26 * lane, w, 21, ("compute", "collective")[lane], r=2)
        d.text(110 + left + w / 2, 127 + 26 * lane, name, "middle small")
    d.rect(110 + 108, 112, 36, 21, "exposed", r=2)
    d.rect(110 + 380, 112, 90, 21, "exposed", r=2)
    for y, title in ((28, "in one piece"), (112, "in two chunks")):
        d.text(10, y - 10, title, "bold")
        d.text(10, y + 15, "compute", "small")
        d.text(10, y + 41, "all-to-all", "small")
    d.text(
        10,
        182,
        "One chunk's exchange runs beside the other's compute. Not to scale; `timeline` tells yours.",
        "small dim",
    )
    return d.svg()


_COLOURS = {"31": "red", "32": "green", "1": "bold", "33": "dim", "36": "dim"}


def terminal() -> str:
    """The words of a failing run of ``examples/downstream``: the golden's difference and the first bit."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--color=yes",
        "--tb=short",
        "--with-bug",
        "-p",
        "no:cacheprovider",
        "tests/test_step.py",
    ]
    environ = {**os.environ, "COLUMNS": "110"}
    run = subprocess.run(
        command,
        cwd=ROOT / "examples" / "downstream",
        capture_output=True,
        text=True,
        env=environ,
        timeout=600,
    )
    lines = run.stdout.splitlines()
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    first = next(n for n, line in enumerate(plain) if "differs" in line and line.startswith("E"))
    other = next(
        n for n, line in enumerate(plain) if "BitwiseDifference" in line and line.startswith("E")
    )
    last = next(n for n, line in enumerate(plain) if "gtrainer" in line and line.startswith("==="))
    shown = [
        *lines[first : first + 5],
        "E   …",
        *lines[other : other + 6],
        "",
        *lines[last : last + 4],
    ]
    d = Drawing(
        880,
        46 + 17 * len(shown),
        "A failing run in a terminal: the golden's difference in words, and the first bit",
    )
    d.text(14, 22, "$ pytest -q --tb=short --with-bug", "mono bold")
    for place, line in enumerate(shown):
        kind = ""
        spans = []
        for code, words in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]*)", line):
            if code is not None and code != "":
                kind = " ".join(_COLOURS.get(each, "") for each in code.split(";")).strip()
            if words:
                spans.append(f'<tspan class="{kind}">{html.escape(words[:120])}</tspan>')
        d.parts.append(
            f'<text x="14" y="{46 + 17 * place}" class="mono" xml:space="preserve">{"".join(spans)}</text>'
        )
    return d.svg()


DRAWINGS: dict[str, Callable[[], str]] = {
    "flow": flow,
    "worlds": worlds,
    "ring": ring,
    "buckets": buckets,
    "chunking": chunking,
    "terminal": terminal,
}


def changed_page() -> Path:
    """The page of a run that differs from an earlier one."""
    folder = ROOT / "build" / "pictures"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "report" / "changing.py", folder / "test_it.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for variant, options in (
        ("then", ["--gt-create-goldens"]),
        ("now", ["--gt-report-against=then.html"]),
    ):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--gt-device=cpu",
            f"--gt-report={variant}.html",
            *options,
        ]
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "VARIANT": variant},
            timeout=600,
            capture_output=True,
        )
    if not (folder / "now.html").is_file():  # where CI is set nothing writes goldens
        raise SystemExit("the runs wrote no page; is CI set?")
    return folder / "now.html"


def judged_page() -> Path:
    """A page of two layouts and two records that differ."""
    sys.path.insert(0, str(ROOT / "tests" / "report"))
    import browser_check

    page = ROOT / "build" / "judged.html"
    page.write_text(browser_check.judged_page())
    return page


def site_page() -> Path:
    """A page of the documentation, as ``make docs`` builds it."""
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / "build" / "site" / "tutorial.html"


PAGES = {"report": (changed_page, 860), "differences": (judged_page, 930), "site": (site_page, 860)}
"""What makes a page, and how many pixels of it are shown."""


def photograph(page: Path, height: int, target: Path) -> None:
    """What headless Chromium shows of a page whose first test is open."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("there is no chromium here: apt-get install chromium fonts-dejavu-core")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    # without the first of these a picture was taken before its heading had been painted
    flags += ["--run-all-compositor-stages-before-draw", f"--window-size=1280,{height}"]
    source = page.as_uri() + "#,t0"  # opens the test, and does not scroll to it
    done = subprocess.run(
        [browser, *flags, "--virtual-time-budget=60000", f"--screenshot={target}", source],
        capture_output=True,
    )
    if done.returncode or not target.is_file():
        raise SystemExit(f"chromium took no picture: {done.stderr.decode()[-500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=[*DRAWINGS, *PAGES])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        if given.only in (None, name):
            (given.folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
            print(f"{name}.svg")
    for name, (make, height) in PAGES.items():
        if given.only in (None, name):
            photograph(make(), height, given.folder / f"{name}.png")
            print(f"{name}.png")


if __name__ == "__main__":
    main()
