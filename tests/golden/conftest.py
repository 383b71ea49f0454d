"""A small project with goldens, run by a real pytest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updating is refused where CI is set; these tests update."""
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """``run(source, *arguments)``: write ``test_it.py`` if a source is given, and run pytest."""
    pytester.makeini("[pytest]")

    def run(source: str | None, *arguments: str) -> pytest.RunResult:
        if source is not None:
            pytester.makepyfile(test_it=source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    return run


@pytest.fixture
def goldens(pytester: pytest.Pytester) -> Callable[[], dict[str, str]]:
    """All files under ``golden/`` with their text, hidden and temporary ones included."""

    def read() -> dict[str, str]:
        files = (file for file in Path(pytester.path, "golden").rglob("*") if file.is_file())
        return {file.relative_to(pytester.path / "golden").as_posix(): file.read_text() for file in files}

    return read
