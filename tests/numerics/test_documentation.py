"""The examples of docs/numerics.md and docs/determinism.md run, one after the other."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def examples(name: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize(
    ("name", "least", "given"),
    [
        ("numerics.md", 5, {}),
        ("determinism.md", 1, {"train": lambda: None}),
    ],
)
def test_the_examples_run(name: str, least: int, given: dict, capsys):
    blocks, namespace = examples(name), {"__name__": name, **given}
    assert len(blocks) >= least
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    if name == "numerics.md":
        printed = capsys.readouterr().out
        assert "first at aten.addmm.default in the forward, of no module, call 0" in printed
        assert "not judged   another process: another process cannot import step" in printed
