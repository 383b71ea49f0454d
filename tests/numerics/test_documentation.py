"""The examples of docs/numerics.md run, one after the other."""

from pathlib import Path

from fixtures.pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_the_examples_run(capsys):
    examples = [text for language, text in blocks(PAGE) if language == "python"]
    assert len(examples) == 7
    namespace = {"__name__": "numerics.md", "train": lambda: None}
    for example in examples:
        exec(compile(example, "numerics.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "first at aten.addmm.default in the forward, of no module, call 0" in printed
    assert "not judged   another process: another process cannot import step" in printed
