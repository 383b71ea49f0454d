"""The whole table of a failed comparison is among the artifacts; the terminal shows the origin."""

import pytest

# The runs inside forget what they imported, and torch cannot be imported twice.
import torch  # noqa: F401

from pytest_gtrainer import facts

TEST = """
    import pytest, torch
    from pytest_gtrainer import assert_bitwise_equal

    def sides(spoiled):
        return {f"w{i}": torch.full((2,), float(i + (i in spoiled))) for i in range(300)}

    def test_different():
        assert_bitwise_equal(sides(range(40, 80)), sides(()), what="graph against eager")

    def test_equal():
        assert_bitwise_equal(sides(()), sides(()))
"""


@pytest.fixture(autouse=True)
def told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_sinks", [])


def test_the_table_is_saved_and_named(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("--gt-artifacts=kept")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E*different: 40 of 300 tensors, 80 elements*",
            "*and 31 more*",
            "all of them: kept/test_it/test_different/differences.tsv",
        ]
    )
    [path] = (pytester.path / "kept").rglob("*.tsv")
    heading, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(rows) == 40
    assert dict(zip(heading, rows[0], strict=True)) == {
        "side": "both",
        "step": "0",
        "rank": "0",
        "phase": "",
        "name": "w40",
        "layout": "f32[2]",
        "kind": "bits",
        "element": "(0)",
        "actual": "41",
        "actual_bits": "0x42240000",
        "expected": "40",
        "expected_bits": "0x42200000",
        "ulp": "262144",
        "differing": "2",
        "of": "2",
    }


def test_without_a_place_nothing_is_saved(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    pytester.runpytest_inprocess().stdout.no_fnmatch_line("*all of them*")
    assert not list(pytester.path.rglob("*.tsv"))
