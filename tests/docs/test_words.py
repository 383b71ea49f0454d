"""Texts for users are free of codes: behaviours keep their ids in tests, and on their reference
page.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest_gtrainer
from pytest_gtrainer.facts import counted

PACKAGE = Path(pytest_gtrainer.__file__).parent
CODE = re.compile(r"\([A-Z]\d{1,2}(, [A-Z]\d{1,2})*\)")


def docstrings():
    for name in pytest_gtrainer.__all__:
        found = getattr(pytest_gtrainer, name)
        yield name, inspect.getdoc(found) or ""
        if inspect.isclass(found):
            own = {each: value for each, value in vars(found).items() if not each.startswith("_")}
            yield from (
                (f"{name}.{each}", inspect.getdoc(value) or "") for each, value in own.items()
            )


def test_public_docstrings_have_no_ids_of_behaviours():
    texts = dict(docstrings())
    assert len(texts) > 100
    assert not [
        f"{name}: {CODE.search(text)[0]}" for name, text in texts.items() if CODE.search(text)
    ]


def bases(node):
    return getattr(node, "bases", ())


def said(tree):
    """The texts of a module that a user may meet: strings that are no docstrings, and the
    docstrings of its errors.
    """
    holders = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = {node: node.body[0].value for node in holders if ast.get_docstring(node)}
    inner = {
        each
        for node, each in docstrings.items()
        if "Error" not in str(list(map(ast.unparse, bases(node))))
    }
    texts = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [node.value for node in texts if node not in inner]


def test_messages_and_errors_have_no_ids_of_behaviours():
    """Options, messages and the docstrings of exceptions; the rules of conformance are called by
    their ids.
    """
    sources = [path for path in PACKAGE.rglob("*.py") if "conformance" not in path.parts]
    texts = [text for path in sources for text in said(ast.parse(path.read_text()))]
    assert len(texts) > 5_000
    assert [text for text in texts if CODE.search(text)] == []
    twin = (
        'class A(ValueError):\n  """Wrong (A1)."""\n  def b(self):\n    """Right (A1)."""\n    '
        'print("Also (A1)")'
    )
    assert said(ast.parse(twin)) == ["Wrong (A1).", "Also (A1)"]


OURS_BY_CONVENTION = {"gm", "example_inputs"}
"""The first two arguments of every pass, which docs/passes.md describes once."""


def untold(name, function):
    """Arguments that the docstring does not name, and "raises" where the function itself raises and
    nothing says so.
    """
    text = inspect.getdoc(function) or ""
    arguments = set(inspect.signature(function).parameters) - OURS_BY_CONVENTION
    missing = {argument for argument in arguments if not re.search(rf"\b{argument}\b", text)}
    source = inspect.getsource(inspect.unwrap(function))
    raising = re.search(r"^    +raise [A-Z]", source, re.MULTILINE) and not re.search(
        "Raises:|Error", text
    )
    return [f"{name}: {what}" for what in sorted(missing | ({"raises"} if raising else set()))]


def test_public_functions_say_what_they_take_and_raise():
    functions = {name: getattr(pytest_gtrainer, name) for name in pytest_gtrainer.__all__}
    functions = {name: each for name, each in functions.items() if inspect.isfunction(each)}
    assert len(functions) > 40
    assert [line for name, function in functions.items() for line in untold(name, function)] == []

    def twin(first, second):
        """The twin of the first."""
        raise ValueError

    assert untold("twin", twin) == ["twin: raises", "twin: second"]


_PLURALS = "lines|tensors|tests|operators|differences"
COUNTS = re.compile(
    rf"\{{(?!counted|facts)[^{{}}]*len\([^{{}}]*\}}( more)? ({_PLURALS})\b(?! are called)"
)
"""A number that may be one, before a plural: ``facts.counted`` spells it."""


def test_one_is_no_plural():
    """Messages of the package are checked.

    The page of the report has a function of its own for it.
    """
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    assert [match[0] for match in COUNTS.finditer(source)] == []
    assert COUNTS.search("f'{len(self)} tensors'")
    page = (PACKAGE / "report" / "template" / "report.js").read_text()
    plurals = re.findall(r"\$\{[^{}()]*(?:length|tensors|left_out)\} [a-z ]*s\b", page)
    assert plurals == ["${tests.length} tests"]  # of those, some are hidden
    assert (counted(1, "more line"), counted(2, "more line")) == ("1 more line", "2 more lines")
