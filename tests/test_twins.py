"""Every test module that asserts bitwise equality also has a run that must differ (L5)."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
# Equality is asserted here without a control yet; the list may only get shorter.
OWED: set[str] = set()
TWINS = {
    "assert_bitwise_different",
    "BitwiseDifference",
    "ControlFailed",
    "assert_simulated_parity",
}


def names_in(source: str) -> set[str]:
    """Every name that code uses, strings and comments left out."""
    nodes = list(ast.walk(ast.parse(source)))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }


def lacks_its_twin(source: str) -> bool:
    names = names_in(source)
    return "assert_bitwise_equal" in names and not names & TWINS


def test_bitwise_equality_comes_with_a_control():
    """L5"""
    modules = {str(path.relative_to(TESTS)): path for path in TESTS.rglob("*.py")}
    modules = {
        name: path for name, path in modules.items() if path.stem.startswith(("test_", "conftest"))
    }
    lacking = {name for name, path in modules.items() if lacks_its_twin(path.read_text())}
    assert lacking == OWED & set(modules), (
        "equality of bits is asserted and nothing there must differ"
    )


def test_the_listing_sees_a_missing_twin():
    """The twin of this listing."""
    assert lacks_its_twin("def test_it(): assert_bitwise_equal(run(), run())")
    assert not lacks_its_twin(
        "def test_it(): assert_bitwise_equal(a, b); assert_bitwise_different(c, b)"
    )
