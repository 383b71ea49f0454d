"""docs/compile.md, docs/inductor-passes.md, docs/trainers.md: their tests pass, and print
what the pages show.

And in docs/which-test.md what replaces each habit runs.
"""

import re
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import pytest_gtrainer
from benchmarks.compiled_operators import OPERATORS
from fixtures.pages import blocks, fits

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("page", "tests"), [("compile", 15), ("inductor-passes", 5), ("trainers", 6)]
)
def test_the_tests_of_a_page(pytester, page, tests):
    shown = blocks(DOCS / f"{page}.md")
    for language, text in shown:
        if language == "python" and (name := re.match(r"# (test_\w+\.py)\n", text)):
            (pytester.path / name[1]).write_text(text)
    run = pytester.runpytest_subprocess(
        "--gt-create-goldens", "-rP", "-p", "no:randomly", "--rootdir=."
    )
    run.assert_outcomes(passed=tests)
    for language, text in shown:
        if language == "text":
            assert not fits(run.stdout.str(), text)


class Goldens:
    def check(self, graph):
        assert "I.x" in pytest_gtrainer.graphtext.render(graph)


def two_products(x):
    return torch.relu(torch.relu(x @ x) @ x)


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_what_the_page_of_tests_recommends_runs(monkeypatch):
    """Every second block of its section on torch.compile, on the model and the pass of
    ``examples/fusion``.
    """
    monkeypatch.syspath_prepend(ROOT / "examples" / "fusion")
    from serve.fusion import FuseNormAndQuant
    from serve.model import Model

    section = (DOCS / "which-test.md").read_text().partition("## From tests of torch.compile")[2]
    ours = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)[1::2]
    assert len(ours) == 5
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = {
        name: getattr(pytest_gtrainer, name)
        for name in ("gt_compile", "assert_graph", "assert_pass_bitwise")
    }
    names |= {"torch": torch, "gt_golden": Goldens(), "noop_pass": lambda graph: None}
    square = torch.randn(8, 8)
    for block in ours:
        given = {
            "x": square if "compiled(x)" in block and "[:2]" not in block else x,
            "model": Model(),
        }
        given |= {"compiled": torch.compile(two_products), "gm": make_fx(two_products)(square)}
        given |= {"fusion_pass": FuseNormAndQuant()}
        with torch.no_grad():
            exec(block, {**names, **given})


def test_the_table_of_operators_is_the_benchmarks():
    table = (
        (DOCS / "compile.md")
        .read_text()
        .partition("| operator | fp32 | bf16 |\n")[2]
        .partition("\n\n")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]
    ]
    assert [name for name, *_ in rows] == list(OPERATORS)
    assert {outcome for _, *outcomes in rows for outcome in outcomes} == {
        "equal",
        "decomposition",
        "code generation",
    }


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_each_harness_of_the_page_of_tests_has_its_counterpart(pytester):
    """Every second block of its section on harnesses, as one test file; the first ones name torch's
    and others' own.
    """
    section = (
        (DOCS / "which-test.md")
        .read_text()
        .partition("## Harness by harness")[2]
        .partition("\n## ")[0]
    )
    shown = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    theirs, ours = shown[::2], shown[1::2]
    assert len(theirs) == len(ours) == 7
    assert not [block for block in theirs if "gt_" in block]
    head = """
import copy, pytest, torch, torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from pytest_gtrainer import assert_bitwise_equal, data_parallel, trace_step
"""
    pytester.makepyfile("\n".join([head, *ours]))
    writing = ("--gt-create-goldens", "--gt-goldens-in-ci")
    run = pytester.runpytest_subprocess(
        "--gt-device=cpu", "--gt-require=ranks", *writing, "-p", "no:randomly"
    )
    run.assert_outcomes(passed=7)
    run.stdout.fnmatch_lines(["goldens   2 created"])


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
def test_two_pairs_of_the_page_of_tests_test_the_same(pytester):
    """The pairs are torch's ``MultiProcessTestCase`` and expecttest, whose blocks run here, too; a
    wrong number fails both.
    """
    section = (DOCS / "which-test.md").read_text().partition("## Harness by harness")[2]
    theirs = re.findall(
        r"```python\n(class Test(?:ReduceScatter|Graph)\(.*?)```", section, re.DOTALL
    )
    head = """
import expecttest, torch, torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_distributed import MultiProcessTestCase
"""
    pytester.makepyfile("\n".join([head, *theirs]))
    pytester.runpytest_subprocess("--gt-device=cpu", "-p", "no:randomly").assert_outcomes(passed=2)
    wrong = (
        "\n".join([head, *theirs])
        .replace("[self.rank] * 2", "[self.rank] * 3")
        .replace("sin()", "cos()")
    )
    pytester.makepyfile(wrong)
    pytester.runpytest_subprocess("--gt-device=cpu", "-p", "no:randomly").assert_outcomes(failed=2)
