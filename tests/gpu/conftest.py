"""Tests for one GPU, and the table of results that ends such a run (``make gpu``)."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from pytest_gtrainer import facts, options

HERE = "tests/gpu/"


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """``"cuda"``, with nothing of the test left in its memory; without a GPU the test is not
    judged.
    """
    import torch

    if not torch.cuda.is_available():
        cause = "needs a GPU: not judged"
        if options.get(request.config, "require") == "cuda":
            pytest.fail(
                f"{cause}, and --gt-require=cuda lets no such test be skipped", pytrace=False
            )
        facts.emit("skip", cause=cause)
        pytest.skip(cause)
    yield "cuda"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each claim, by topic: held, failed or not judged, with what was measured."""
    topics: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for outcome, said in (
        ("passed", "held"),
        ("skipped", "not judged"),
        ("failed", "FAILED"),
        ("error", "FAILED"),
    ):
        for report in terminalreporter.getreports(outcome):
            if not isinstance(report, pytest.TestReport) or not report.nodeid.startswith(HERE):
                continue  # of collection, or of another folder
            if outcome == "passed" and report.when != "call":
                continue
            topic, _, test = report.nodeid.removeprefix(HERE).partition("::")
            measured = "; ".join(
                str(value) for key, value in report.user_properties if key == "measured"
            )
            topics[topic][test.removeprefix("test_").replace("_", " ")] = said, measured
    if not any(said != "not judged" for tests in topics.values() for said, _ in tests.values()):
        return
    terminalreporter.section("what held on this GPU")
    for topic, tests in sorted(topics.items()):
        terminalreporter.line(topic.removeprefix("test_").removesuffix(".py").replace("_", " "))
        for claim, (said, measured) in tests.items():
            terminalreporter.line(f"  {said:<10}  {claim}{f'  ({measured})' if measured else ''}")
