"""A small project with goldens, run by a real pytest."""

from collections.abc import Callable
from pathlib import Path

import pytest

# Once: a run in this process forgets what it imports, and parts of torch cannot be imported again.
import torch._inductor.test_operators  # noqa: F401

import pytest_gtrainer.graph.foreign  # noqa: F401
from pytest_gtrainer import facts

QUICK = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
"""For the runs of these tests: hypothesis is imported to say a word at the end of each."""


@pytest.fixture
def run(pytester: pytest.Pytester, warm_python: None) -> Callable[..., pytest.RunResult]:
    """``run(source, *arguments)``: write ``test_it.py`` if a source is given, and run pytest."""
    pytester.makeini("[pytest]")

    def run(source: str | None, *arguments: str) -> pytest.RunResult:
        if source is not None:
            pytester.makepyfile(test_it=source)
        return pytester.runpytest_subprocess(*QUICK, *arguments)

    return run


@pytest.fixture
def run_here(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """Like ``run``, in this process, which is faster; the outer run does not count what it does.

    Several files are given by name: ``run_here(None, "-x", test_one="...", test_two="...")``.
    """
    pytester.makeini("[pytest]")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a test file may change within a second
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def run_here(
        source: str | None, *arguments: str, with_cache: bool = False, **files: str
    ) -> pytest.RunResult:
        if source is not None:
            files["test_it"] = source
        if files:
            pytester.makepyfile(**files)
        with monkeypatch.context() as isolated:
            isolated.setattr(facts, "_sinks", [])
            return pytester.runpytest_inprocess(*QUICK[with_cache * 2 :], *arguments)

    return run_here


@pytest.fixture
def goldens(pytester: pytest.Pytester) -> Callable[[], dict[str, str]]:
    """All files under ``golden/`` with their text, hidden and temporary ones included."""

    def read() -> dict[str, str]:
        files = (file for file in Path(pytester.path, "golden").rglob("*") if file.is_file())
        return {
            file.relative_to(pytester.path / "golden").as_posix(): file.read_text()
            for file in files
        }

    return read


@pytest.fixture
def put_goldens(pytester: pytest.Pytester) -> Callable[..., None]:
    """``put_goldens("test_it/test_a.txt", ...)``: files below ``golden/``; a text's content is its
    test's name.
    """

    def put(*names: str, text: str | None = None) -> None:
        for name in names:
            file = pytester.path / "golden" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if text is not None else file.name.partition(".")[0] + "\n")

    return put
