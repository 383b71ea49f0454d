"""Graphs before and after each pass in the log that ``TORCH_TRACE`` asks for, and in what tlparse
makes of it.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from pytest_gtrainer import apply_graph_passes, bind_options, eliminate_dead_code_pass
from pytest_gtrainer.passes import pipeline
from pytest_gtrainer.passes.graph_pass import graph_pass

PIPELINE = """
from pytest_gtrainer import apply_graph_passes, bind_options, graphtext
from pytest_gtrainer import canonicalize_graph_pass, eliminate_dead_code_pass

gm = graphtext.parse('''if I:
  I[0]: f32[4]
if fwd:
  with _:
    detach: f32[4] = aten.detach(I[0])
    neg: f32[4] = aten.neg(detach)
if out:
  out[0] = neg
''')
passes = [bind_options(eliminate_dead_code_pass), bind_options(canonicalize_graph_pass)]
apply_graph_passes(gm, None, passes)
"""
BESIDE = Path(__file__).parents[2] / ".venv" / "beside" / "bin" / "tlparse"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a pipeline of two passes."""
    folder = tmp_path_factory.mktemp("trace")
    environ = {**os.environ, "TORCH_TRACE": str(folder)}
    subprocess.run([sys.executable, "-c", PIPELINE], env=environ, check=True, timeout=120)
    (path,) = folder.iterdir()
    return path


def artefacts(path):
    """Name, encoding and content of each artefact, by the rules of the format: the content follows,
    behind tabs.
    """
    found, lines = {}, path.read_text().splitlines()
    for number, line in enumerate(lines):
        head = re.match(r"V[0-9.]+ [\d:.]+ \d+ [^]]+\] (\{.*\})$", line)
        header = json.loads(head[1]) if head else {}
        if "artifact" not in header:
            continue
        end = next(
            (at for at in range(number + 1, len(lines)) if not lines[at].startswith("\t")),
            len(lines),
        )
        content = "\n".join(line[1:] for line in lines[number + 1 : end])
        sums = {hashlib.md5(text.encode()).hexdigest() for text in (content, content + "\n")}
        assert header["has_payload"] in sums
        found[header["artifact"]["name"]] = header["artifact"]["encoding"], content
    return found


@pytest.mark.second_tier
def test_each_pass_that_changes_a_graph_leaves_it_before_and_after(log):
    found = {
        name: content for name, content in artefacts(log).items() if name.startswith("gt_passes_0")
    }
    stem = "gt_passes_0_01_canonicalize_graph_pass"
    assert list(found) == [f"{stem}_before", f"{stem}_after", "gt_passes_0_overview"]
    (kind, before), (_, after) = found[f"{stem}_before"], found[f"{stem}_after"]
    assert kind == "string"
    assert "aten.detach" in before
    assert "aten.detach" not in after
    assert "aten.neg" in after


@pytest.mark.second_tier
def test_the_overview_tells_every_pass(log):
    kind, content = artefacts(log)["gt_passes_0_overview"]
    passes = json.loads(content)
    assert kind == "json"
    assert [(each["name"], each["changed"]) for each in passes] == [
        ("eliminate_dead_code_pass", False),
        ("canonicalize_graph_pass", True),
    ]
    assert all(each["seconds"] >= 0 and each["fingerprint"] for each in passes)


@pytest.mark.second_tier
def test_tlparse_reads_it(log, tmp_path):
    """Run the tool where ``make`` has installed it; the checks above pin the format elsewhere."""
    tlparse = shutil.which("tlparse", path=f"{BESIDE.parent}{os.pathsep}{os.environ['PATH']}")
    if tlparse is None:
        pytest.skip("tlparse is not installed: make env")
    command = [tlparse, log, "-o", tmp_path / "out", "--no-browser", "--strict"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "out").rglob("gt_passes_0*")}
    after = next(text for name, text in pages.items() if "canonicalize_graph_pass_after" in name)
    assert "aten.neg" in after
    assert len(pages) == 3
    assert (
        "gt_passes_0_01_canonicalize_graph_pass_after"
        in (tmp_path / "out" / "index.html").read_text()
    )


@graph_pass
def adding_pass(gm, example_inputs=None, *, often=1):
    for _ in range(often):
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),))
    return often > 0


def test_the_same_process_sees_what_is_logged(monkeypatch):
    """Each pipeline has its own number, and a pass begins with the graph of the one before."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(
        (record.metadata.get("artifact", {}).get("name"), record.payload)
    )
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [handler])
    monkeypatch.setenv("TORCH_TRACE", "folder")
    passes = [bind_options(adding_pass, often=often) for often in (1, 0, 2)]
    for _ in range(2):
        done = apply_graph_passes(fx.symbolic_trace(torch.nn.ReLU()), None, passes)
    names = [name for name, _ in found]
    numbers = [
        int(number)
        for number in re.findall(r"\bgt_passes_(\d+)_overview\b", " ".join(map(str, names)))
    ]
    ends = [
        *(f"{place}_adding_pass_{side}" for place in ("00", "02") for side in ("before", "after")),
        "overview",
    ]
    assert names == [f"gt_passes_{number}_{end}" for number in numbers for end in ends]
    assert len(set(numbers)) == 2, "each pipeline has a number of its own"
    before, middle, again, after, overview = (text for _, text in found[5:])
    assert [text.count("torch.neg") for text in (before, middle, after)] == [0, 1, 3]
    assert again == middle
    runs = done.meta["gt_passes"]
    assert json.loads(overview) == [
        {
            "name": run.name,
            "fingerprint": run.fingerprint,
            "seconds": run.seconds,
            "changed": changed,
        }
        for run, changed in zip(runs, (True, False, True), strict=True)
    ]


def test_a_pass_that_raises_leaves_an_overview_of_those_before(monkeypatch):
    found = {}
    monkeypatch.setattr(pipeline, "log_artefact", found.__setitem__)
    monkeypatch.setenv("TORCH_TRACE", "folder")

    def failing_pass(gm):
        raise ValueError("on purpose")

    passes = [bind_options(adding_pass), failing_pass]
    with pytest.raises(ValueError, match="on purpose"):
        apply_graph_passes(fx.symbolic_trace(torch.nn.ReLU()), None, passes)
    (overview,) = [runs for name, runs in found.items() if name.endswith("_overview")]
    assert [run["name"] for run in overview] == ["adding_pass"]


def test_without_the_variable_nothing_is_rendered(monkeypatch):
    """The twin."""
    rendered = []
    monkeypatch.setattr(pipeline, "render", lambda gm: rendered.append(gm) or "")
    gm = fx.symbolic_trace(torch.nn.ReLU())
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    apply_graph_passes(gm, None, [bind_options(eliminate_dead_code_pass)])
    assert not rendered
    monkeypatch.setenv("TORCH_TRACE", "folder")
    apply_graph_passes(gm, None, [bind_options(eliminate_dead_code_pass)])
    assert len(rendered) == 2
