"""Set-up shared by all tests of the repository."""

import pytest

pytest_plugins = ["pytester"]
collect_ignore = ["fixtures/suites"]  # runs of their own, which tests start


@pytest.fixture
def pytester(pytester: pytest.Pytester) -> pytest.Pytester:
    """Its processes do without hypothesis, which would be imported to say a word at the end of each run."""
    pytester.plugins.append("no:hypothesispytest")
    return pytester
