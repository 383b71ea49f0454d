"""Set-up shared by all tests of the repository."""

import pytest

pytest_plugins = ["pytester"]
collect_ignore = ["fixtures/suites"]  # runs of their own, which tests start

# Runs and traces that several tests of a module look at; the last one is of the whole session.
SHARED = {"module_suite", "traced_joints", "installed"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep such tests on one worker (``--dist loadgroup``); all others go wherever a worker is free."""
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        shared = SHARED.intersection(item.fixturenames) if isinstance(item, pytest.Function) else ()
        if shared:
            item.add_marker(pytest.mark.xdist_group("installed" if "installed" in shared else item.path.name))


@pytest.fixture
def pytester(pytester: pytest.Pytester) -> pytest.Pytester:
    """Its processes do without hypothesis, which would be imported to say a word at the end of each run."""
    pytester.plugins.append("no:hypothesispytest")
    return pytester
