"""The hooks of a project, put together in one process; ``integration/test_hooks.py`` has
a project.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gtrainer import extensions


def config(**hooks):
    """A configuration whose hooks return these lists, an entry for each implementation."""
    made = {}
    for name, found in hooks.items():
        made[f"pytest_gtrainer_{name}"] = lambda config, found=found, **_: found
    return SimpleNamespace(hook=SimpleNamespace(**made))


@pytest.mark.parametrize(
    ("scrubbers", "text"),
    [
        ([], "a"),
        ([[]], "a"),
        ([[str.upper]], "A"),
        ([[lambda text: text + "b", lambda text: text + "c"]], "abc"),
        ([[lambda text: text + "b"], [], [lambda text: text + "c", str.upper]], "ABC"),
    ],
    ids=["no hook", "none of a hook", "one", "two of a hook", "of two hooks"],
)
def test_every_scrubber_of_every_hook_is_applied_in_order(scrubbers, text):
    assert extensions.scrubbed(config(scrubbers=scrubbers), "a") == text


def test_parts_of_the_environment_are_put_together():
    found = extensions.environment(config(environment=[{"a": "1"}, {}, {"b": 2, "c": "x"}]))
    assert found == {"a": "1", "b": 2, "c": "x"}


@pytest.mark.parametrize("value", [1.5, None, True, ["a"]])
def test_a_part_of_the_environment_of_another_type_is_named(value):
    words = re.escape(f"environment: b is a text or a whole number, not {value!r}")
    with pytest.raises(pytest.UsageError, match=words):
        extensions.environment(config(environment=[{"a": "1", "b": value}]))


@pytest.mark.parametrize("names", [("fake",), ("mine", "ranks")])
def test_a_world_of_ours_is_no_name_for_another(names):
    ours = ("fake", "simulated", "ranks")
    with pytest.raises(pytest.UsageError, match=f"'{names[-1]}' is a world of pytest-gtrainer"):
        extensions.worlds(config(worlds=[dict.fromkeys(names, print)]), ours)
    assert extensions.worlds(config(worlds=[{"mine": print}, {"yours": repr}]), ours) == {
        "mine": print,
        "yours": repr,
    }


HOOKS = """
def pytest_gtrainer_models(config): return {names!r}
def pytest_gtrainer_nets(config): return {names!r}
"""


@pytest.mark.parametrize("fixture", extensions.GIVEN)
def test_a_test_gets_what_conftests_above_it_give_and_nothing_of_other_folders(pytester, fixture):
    """Folders beside each other may also give the same name."""
    for folder, names in {
        ".": ["of_all"],
        "a": ["of_a", "own"],
        "a/inner": ["of_inner"],
        "b": ["own"],
    }.items():
        above = pytester.path / folder
        above.mkdir(exist_ok=True)
        given = {name: f"{name} in {folder}" for name in names}
        (above / "conftest.py").write_text(HOOKS.format(names=given))
    for folder in (".", "a", "a/inner", "b", "c"):
        (pytester.path / folder).mkdir(exist_ok=True)
        (pytester.path / folder / "test_it.py").write_text(
            f"def test_it({fixture}): print('gets', __file__, {fixture})"
        )
    result = pytester.runpytest_inprocess("--import-mode=importlib", "-s")
    found = {}
    for file, name in re.findall(r"gets (\S+) (.*)", result.stdout.str()):
        folder = Path(file).parent.relative_to(pytester.path).as_posix()
        found.setdefault(folder, set()).add(name)
    of_a = {"of_all in .", "of_a in a", "own in a"}
    assert found == {
        ".": {"of_all in ."},
        "a": of_a,
        "a/inner": {*of_a, "of_inner in a/inner"},
        "b": {"of_all in .", "own in b"},
        "c": {"of_all in ."},
    }, result.stdout.str() + result.stderr.str()
