"""A run accepts some inline expectations of the reports of its tests: in one process."""

from types import SimpleNamespace

import pytest

pytest.importorskip("expecttest")

from pytest_gtrainer.golden.inline import AcceptancePlugin, Expectation, digest_of

SOURCE = 'check(1, """old""")\ncheck(2, """old""")\n'


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "t.py").write_text(SOURCE)
    said = []
    config = SimpleNamespace(
        rootpath=tmp_path,
        said=said,
        pluginmanager=SimpleNamespace(getplugin=lambda _: SimpleNamespace(late_facts=said)),
        hook=SimpleNamespace(pytest_runtest_logreport=lambda report: said.append(report.longrepr)),
    )
    return AcceptancePlugin(config)


def attempt(plugin, outcome, obtained="new", line=1, name="test_it", when=("setup", "teardown")):
    """Report one attempt of a test: setup, a call with its expectation, and teardown."""
    file = plugin.root / "t.py"
    each = Expectation("t.py", line, "old", obtained, digest_of(file), line, 19)
    for phase in (when[0], "call", when[1]):
        result = outcome if phase == "call" else "passed"
        made = pytest.TestReport(name, ("t.py", 1, name), {}, result, None, phase)
        made.gt_inline = [each._asdict()] if phase == "call" else []
        plugin.pytest_runtest_logreport(made)
    return made


def accepted(plugin):
    plugin._accept()
    return (plugin.root / "t.py").read_text()


def test_what_a_test_that_passes_obtained_is_accepted(plugin):
    attempt(plugin, "passed")
    assert accepted(plugin) == SOURCE.replace("old", "new", 1)
    assert plugin.config.said == [{"kind": "inline", "outcome": "updated", "name": "t.py:1"}]


def test_what_a_test_that_fails_obtained_is_not(plugin):
    attempt(plugin, "failed")
    assert accepted(plugin) == SOURCE


@pytest.mark.parametrize(("first", "then"), [("failed", "passed"), ("passed", "failed")])
def test_of_a_test_that_is_repeated_the_last_attempt_counts(plugin, first, then):
    attempt(plugin, first, "first")
    attempt(plugin, then, "then")
    expected = SOURCE.replace("old", "then", 1) if then == "passed" else SOURCE
    assert accepted(plugin) == expected


def test_the_second_of_two_expectations_is_accepted_by_itself(plugin):
    attempt(plugin, "failed", line=1, name="test_one")
    attempt(plugin, "passed", line=2, name="test_two")
    assert accepted(plugin) == 'check(1, """old""")\ncheck(2, """new""")\n'


def test_two_tests_that_disagree_change_nothing(plugin):
    attempt(plugin, "passed", "one", name="test_one")
    attempt(plugin, "passed", "two", name="test_two")
    assert accepted(plugin) == SOURCE
    (problem,) = plugin.config.said
    assert "test_one: 'one'\n  test_two: 'two'" in problem


def test_a_file_that_has_changed_meanwhile_stays(plugin):
    attempt(plugin, "passed")
    (plugin.root / "t.py").write_text(f"# new\n{SOURCE}")
    assert accepted(plugin) == f"# new\n{SOURCE}"
    (problem,) = plugin.config.said
    assert problem.startswith("t.py was changed while the tests ran: none of its")
