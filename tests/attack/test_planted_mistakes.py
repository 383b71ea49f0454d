"""``fuzz`` finds mistakes that are planted in passes; docs/conformance.md has the figures.

All of them, and none where no mistake is: ``python -m tests.attack.planted_mistakes``.
"""

import pytest

from tests.attack.planted_mistakes import (
    NEWCOMERS,
    OURS,
    SECONDS,
    SETTINGS,
    planted,
    search,
    unchanged,
)

SHORT = (
    "a transpose that others read is erased",
    "draws have no effect",
    "any parameter is the first one",
    "copies stand behind their reader",
)


def spelled(mistake):
    return f"{mistake.setting}: {mistake.words}"


def cases():
    for mistake in OURS:
        marks = [] if mistake.words in SHORT else [pytest.mark.long]
        yield pytest.param(mistake, id=spelled(mistake), marks=marks)


@pytest.mark.parametrize("mistake", OURS + NEWCOMERS, ids=spelled)
def test_what_is_replaced_stands_there_once(mistake):
    """A mistake that is planted nowhere, or in two places, is another one."""
    assert mistake.path.read_text().count(mistake.old) == 1
    assert mistake.old != mistake.new


@pytest.mark.second_tier
@pytest.mark.parametrize("mistake", list(cases()))
def test_a_planted_mistake_is_found(mistake):
    found = search(SETTINGS[mistake.setting], planted(mistake), SECONDS)
    assert found.words, found.state


@pytest.mark.long
@pytest.mark.parametrize("mistake", NEWCOMERS, ids=spelled)
def test_a_newcomers_mistake_is_found_and_reduced(mistake):
    found = search(SETTINGS[mistake.setting], planted(mistake), 2 * SECONDS, reducing=True)
    assert found.words, found.state
    assert 0 < found.nodes <= 10, found.file


@pytest.mark.second_tier
@pytest.mark.parametrize("name", SETTINGS)
def test_without_a_mistake_nothing_is_found(name):
    """The twin: it is the mistake that is found."""
    setting = SETTINGS[name]
    found = search(setting, unchanged(setting.module), seconds=1)
    assert not found.words, f"{found.words}\n{found.file}"
    assert found.proven, found.state
