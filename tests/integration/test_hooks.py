"""The hooks of a downstream repository: the project of docs/options.md as it stands there, and bad
implementations.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.second_tier

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def test_the_project_of_the_page(pytester):
    """Every hook has done its work: in this process, on two ranks, and when the ranks have
    ended.
    """
    for name, text in FILES.items():
        (pytester.path / name).write_text(text)
    made = pytester.runpytest_subprocess(
        "--gt-create-goldens", "--gt-device=cpu", "--gt-report=page.html", "-v"
    )
    made.assert_outcomes(passed=10)
    made.stdout.fnmatch_lines(
        [
            "*::test_it_runs_with_every_model[[]small] PASSED*",
            "*::test_it_runs_with_every_model[[]wide] PASSED*",
            "*::test_it_runs_under_every_net[[]one rail] PASSED*",
            "*::test_it_runs_under_every_net[[]four] PASSED*",
        ]
    )
    made.stdout.fnmatch_lines(["worlds *1 test in alone(1, gloo on cpu)*"])
    golden = pytester.path / "golden" / "test_hooks"
    graph = (golden / "test_what_drifts_is_not_in_the_golden.fxgraph").read_text()
    assert "aten.mul.Tensor(I[0], 3.14)" in graph
    assert (
        '"driver": "12.9"'
        in (golden / "test_numbers_belong_to_an_environment@losses.numbers.json").read_text()
    )
    assert sorted((pytester.path / "ended.txt").read_text().splitlines()) == [
        "rank 0 ends",
        "rank 1 ends",
    ]
    assert "driver 12.9" in (pytester.path / "page.html").read_text()


BAD = [
    (
        "def test_it(gt_model): pass",
        "",
        "test_it.py::test_it takes gt_model, and no hook pytest_gtrainer_models gives a model",
    ),
    (
        "def test_it(gt_model): pass",
        "def pytest_gtrainer_models(config): return {'a': int, 'b': int}\n"
        "class Other:\n    def pytest_gtrainer_models(self, config): return {'a': float}\n"
        "def pytest_configure(config): config.pluginmanager.register(Other())",
        "two hooks give a model called 'a': rename one of them",
    ),
    (
        "import pytest\n@pytest.mark.gt_world('mine')\ndef test_it(gt_world): pass",
        "def pytest_gtrainer_worlds(config): return {'other': None}",
        "gt_world has no kind 'mine'; it has fake, simulated, ranks, other",
    ),
    (
        "import pytest\n@pytest.mark.gt_world('mine')\ndef test_it(gt_world): pass",
        "def pytest_gtrainer_worlds(config): return {'fake': None}",
        "pytest_gtrainer_worlds: 'fake' is a world of pytest-gtrainer: rename yours",
    ),
    (
        "def test_it(gt_golden): gt_golden.check({'a': 1})",
        "def pytest_gtrainer_environment(config): return {'driver': 12.9}",
        "pytest_gtrainer_environment: driver is a text or a whole number, not 12.9",
    ),
]


@pytest.mark.parametrize(
    ("test", "conftest", "sentence"),
    BAD,
    ids=["nothing given", "given twice", "no such world", "our world", "a float"],
)
def test_what_cannot_be_is_one_sentence(pytester, test, conftest, sentence):
    pytester.makepyfile(test_it=test)
    pytester.makeconftest(conftest)
    result = pytester.runpytest_inprocess()
    assert result.ret != pytest.ExitCode.OK
    assert sentence in result.stdout.str() + result.stderr.str()


def test_an_unknown_hook_of_ours_is_refused_by_pytest(pytester):
    """The twin: hooks are specified, so a slip in a name is found."""
    pytester.makeconftest("def pytest_gtrainer_passses(config): return {}")
    result = pytester.runpytest_inprocess()
    assert result.ret != pytest.ExitCode.OK
    assert "unknown hook 'pytest_gtrainer_passses'" in result.stderr.str() + result.stdout.str()
