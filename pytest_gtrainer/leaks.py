"""Which test left a global switch of torch other than it found it (K3).

Before and after each test the switches of ``numerics.knobs`` are read (0.1 ms; nothing before torch is loaded), and the
modes and hooks of ``_torch.modes``. A mode or hook that a test leaves behind is also ended: it would run in each later
test. What a fixture of a wider scope sets, and later puts back, is no leak of the test that happens to run first or
last.
"""

import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_gtrainer import facts, options
from pytest_gtrainer.numerics import knobs

_GUARDED = [knob for knob in knobs.KNOBS if knob.guarded]
Values = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]


class LeakedFlagWarning(pytest.PytestWarning):
    """A test left a global switch changed."""


class LeakGuard:
    """Compares the switches before a test's setup with those after its teardown."""

    def __init__(self, config: pytest.Config) -> None:
        self._reaction = options.get(config, "leaked-flags")
        self._before: Values | None = None
        self._by_wide_fixtures: set[tuple[str, str, str]] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        self._before = _read()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = _read()
        try:
            return (yield)
        finally:
            for name, (old, new) in _changes_since(before).items():
                self._by_wide_fixtures |= {(name, str(old), str(new)), (name, str(new), str(old))}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        before, self._before = self._before, None
        changes = _changes_since(before).items()
        known = self._by_wide_fixtures
        if leaked := {name: both for name, both in changes if (name, *map(str, both)) not in known}:
            self.blame(item, _modes_ended(leaked))

    def blame(self, item: pytest.Item, leaked: Changes) -> None:
        """Say that the test has left these switches changed; fails it if that is asked for."""
        shown = {
            name: ["unset" if each is None else each for each in both]
            for name, both in leaked.items()
        }
        what = "; ".join(f"{name} from {old} to {new}" for name, (old, new) in shown.items())
        facts.emit("leak", test=item.nodeid, what=what)
        message = (
            f"{item.nodeid} changed {what} and did not put it back: use the fixture gt_deterministic, "
            "deterministic(), or monkeypatch"
        )
        if self._reaction == "fail":
            pytest.fail(message, pytrace=False)
        item.warn(LeakedFlagWarning(facts.escaped(message)))


def _read() -> Values | None:
    """The switches, modes and hooks now.

    None while torch is not loaded: importing it changes nothing that anyone had set.
    """
    if "torch" not in sys.modules:
        return None
    from pytest_gtrainer._torch.modes import MODES

    return {**knobs.values(_GUARDED), **{name: read() for name, (read, _) in MODES.items()}}


def _modes_ended(leaked: Changes) -> Changes:
    """Put back modes and hooks, under which the next test would run; returns the changes with values to be shown."""
    from pytest_gtrainer._torch.modes import MODES, shown

    told = dict(leaked)
    for name, (_, put_back) in MODES.items():
        if name in leaked:
            told[name] = shown(leaked[name][0]), shown(leaked[name][1])
            put_back(leaked[name][0])
    return told


def _changes_since(before: Values | None) -> Changes:
    """What changed, by name; a module that was loaded in between is no change."""
    after = _read() or {}
    return {
        name: (old, after[name])
        for name, old in (before or {}).items()
        if old != after[name] and knobs.NOT_LOADED not in (old, after[name])
    }
