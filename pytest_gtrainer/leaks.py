"""The guard that names a test which left a global switch of torch changed.

Before and after each test the switches of ``numerics.knobs`` are read (0.1 ms; nothing before torch
is loaded), and the modes and hooks of ``_torch.modes``. A mode or hook that a test leaves behind is
also
ended: it would run in each later test. A fixture of a wider scope may set a switch and later put it
back: this is no leak of the test that happens to run first or last.
"""

import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_gtrainer import facts, options

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
            # Both ways: its teardown, in that of the last test that uses it, puts the value back.
            for name, (old, new) in _changes_since(before).items():
                self._by_wide_fixtures.add((name, str(old), str(new)))
                self._by_wide_fixtures.add((name, str(new), str(old)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        before, self._before = self._before, None
        leaked = {}
        for name, (old, new) in _changes_since(before).items():
            if (name, str(old), str(new)) not in self._by_wide_fixtures:
                leaked[name] = old, new
        if leaked:
            self.blame(item, _end_modes(leaked))

    def blame(self, item: pytest.Item, leaked: Changes) -> None:
        """Warn that the test has changed these switches, or fail it (``--gt-leaked-flags``)."""
        changes = []
        for name, values in leaked.items():
            old, new = ("unset" if value is None else value for value in values)
            changes.append(f"{name} from {old} to {new}")
        what = "; ".join(changes)
        facts.emit("leak", test=item.nodeid, what=what)
        message = (
            f"{item.nodeid} changed {what} and did not put it back: "
            "use the fixture gt_deterministic, deterministic(), or monkeypatch"
        )
        if self._reaction == "fail":
            pytest.fail(message, pytrace=False)
        item.warn(LeakedFlagWarning(facts.escaped(message)))


def _read() -> Values | None:
    """Return the switches, modes and hooks; None while torch is not loaded, as none is set then."""
    if "torch" not in sys.modules:
        return None
    from pytest_gtrainer._torch.modes import MODES
    from pytest_gtrainer.numerics import knobs

    return knobs.values(knobs.GUARDED) | {name: read() for name, (read, _) in MODES.items()}


def _end_modes(leaked: Changes) -> Changes:
    """Put back modes and hooks that leaked; return the changes with their values in words."""
    from pytest_gtrainer._torch.modes import MODES, spell_mode

    changes = dict(leaked)
    for name, (_, put_back) in MODES.items():
        if name in leaked:
            old, new = leaked[name]
            changes[name] = spell_mode(old), spell_mode(new)
            put_back(old)
    return changes


def _changes_since(before: Values | None) -> Changes:
    """Return old and new values by name; loading a module in between is not a change."""
    if before is None:
        return {}
    from pytest_gtrainer.numerics.knobs import NOT_LOADED

    after = _read() or {}
    changes = {}
    for name, old in before.items():
        if old != after[name] and NOT_LOADED not in (old, after[name]):
            changes[name] = old, after[name]
    return changes
