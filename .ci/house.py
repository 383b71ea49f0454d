"""Count how the code reads: statements, density, comprehensions, comments and the words of our old
dialect.

    python .ci/house.py            # a table for the package and for the tests
    python .ci/house.py --rooms    # the same, a row for each room of the package

Size is counted in statements (``ast.stmt``): white space, comments and plain loops cost nothing.
The goals are those that the field's own packages keep (pytest, torch's ``_fully_shard``); no test
enforces them.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DIALECT = re.compile(r"\b(told|tell|tells|telling)\b", re.IGNORECASE)
NOMINAL = re.compile(r"(What|Whether|Of|Where|Who|Which|How|From|By|In|As|That)\b")
CODE_OF_A_BEHAVIOUR = re.compile(r"\([A-Z]\d{1,2}(, [A-Z]\d{1,2})*\)")
LONGEST_LINE = 100


def count(path: Path) -> Counter[str]:
    """Count one Python file."""
    text = path.read_text()
    found: Counter[str] = Counter(files=1)
    lines = text.splitlines()
    found["lines"] = len(lines)
    found["long lines"] = sum(len(line) > LONGEST_LINE for line in lines)
    found["told"] = len(DIALECT.findall(text))
    found["codes"] = len(CODE_OF_A_BEHAVIOUR.findall(text))
    for node in ast.walk(ast.parse(text)):
        found["statements"] += isinstance(node, ast.stmt)
        found["comprehensions"] += isinstance(node, COMPREHENSIONS)
        found["conditional expressions"] += isinstance(node, ast.IfExp)
        if isinstance(node, DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            found["docstrings"] += bool(docstring)
            found["nominal docstrings"] += bool(NOMINAL.match(docstring))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        alone = token.line.strip().startswith("#")
        found["comment lines"] += token.type == tokenize.COMMENT and alone
    return found


def row(name: str, found: Counter[str]) -> str:
    """Return the counts of one place as a row of the table."""
    thousand = found["lines"] / 1000
    cells = [
        f"{found['files']}",
        f"{found['lines']:,}",
        f"{found['statements']:,}",
        f"{found['statements'] / found['lines']:.2f}",
        f"{found['comprehensions'] / thousand:.0f}",
        f"{found['conditional expressions'] / thousand:.0f}",
        f"{found['comment lines'] / thousand:.0f}",
        f"{found['long lines']:,}",
        f"{found['told']}",
        f"{found['nominal docstrings']} of {found['docstrings']:,}",
        f"{found['codes']}",
    ]
    return "| " + " | ".join([name, *cells]) + " |"


HEAD = (
    "| place | files | lines | statements | a line | comprehensions / 1,000 | conditional expressions / 1,000 "
    "| comment lines / 1,000 | lines over 100 | told, tell | docstrings that begin What, Of, ... | codes |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rooms", action="store_true", help="a row for each room of the package")
    options = parser.parse_args()
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|")
    places = {"package": sorted((ROOT / "pytest_gtrainer").rglob("*.py"))}
    if options.rooms:
        for path in places["package"]:
            room = path.relative_to(ROOT / "pytest_gtrainer").parts[0].removesuffix(".py")
            places.setdefault(room, []).append(path)
    places["tests"] = sorted((ROOT / "tests").rglob("*.py"))
    for name, paths in places.items():
        total: Counter[str] = Counter()
        for path in paths:
            total += count(path)
        print(row(name, total))


if __name__ == "__main__":
    main()
