"""What users read is free of codes: behaviours keep their ids in tests, and on their reference page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest_gtrainer
from pytest_gtrainer.facts import counted

CODE = re.compile(r"\([A-Z]\d{1,2}(, [A-Z]\d{1,2})*\)")


def docstrings():
    for name in pytest_gtrainer.__all__:
        found = getattr(pytest_gtrainer, name)
        yield name, inspect.getdoc(found) or ""
        if inspect.isclass(found):
            own = {each: value for each, value in vars(found).items() if not each.startswith("_")}
            yield from ((f"{name}.{each}", inspect.getdoc(value) or "") for each, value in own.items())


def test_public_docstrings_have_no_ids_of_behaviours():
    texts = dict(docstrings())
    assert len(texts) > 100
    assert not [f"{name}: {CODE.search(text)[0]}" for name, text in texts.items() if CODE.search(text)]


OURS_BY_CONVENTION = {"gm", "example_inputs"}
"""The first two arguments of every pass, which docs/passes.md tells once."""


def untold(name, function):
    """Arguments that the docstring does not name, and "raises" where the function itself raises and nothing says so."""
    text = inspect.getdoc(function) or ""
    arguments = set(inspect.signature(function).parameters) - OURS_BY_CONVENTION
    missing = {argument for argument in arguments if not re.search(rf"\b{argument}\b", text)}
    source = inspect.getsource(inspect.unwrap(function))
    raising = re.search(r"^    +raise [A-Z]", source, re.MULTILINE) and not re.search("Raises:|Error", text)
    return [f"{name}: {what}" for what in sorted(missing | ({"raises"} if raising else set()))]


def test_public_functions_say_what_they_take_and_raise():
    functions = {name: getattr(pytest_gtrainer, name) for name in pytest_gtrainer.__all__}
    functions = {name: each for name, each in functions.items() if inspect.isfunction(each)}
    assert len(functions) > 40
    assert [line for name, function in functions.items() for line in untold(name, function)] == []

    def twin(first, second):
        """Of the first."""
        raise ValueError

    assert untold("twin", twin) == ["twin: raises", "twin: second"]


_PLURALS = "lines|tensors|tests|operators|differences"
COUNTS = re.compile(rf"\{{(?!counted|facts)[^{{}}]*len\([^{{}}]*\}}( more)? ({_PLURALS})\b(?! are called)")
"""A number that may be one, before a plural: ``facts.counted`` spells it."""


def test_one_is_no_plural():
    """In what the package says; the page of the report has a function of its own for it."""
    package = Path(pytest_gtrainer.__file__).parent
    source = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    assert [match[0] for match in COUNTS.finditer(source)] == []
    assert COUNTS.search("f'{len(self)} tensors'")
    page = (package / "report" / "template" / "report.js").read_text()
    plurals = re.findall(r"\$\{[^{}()]*(?:length|tensors|left_out)\} [a-z ]*s\b", page)
    assert plurals == ["${tests.length} tests"]  # of those, some are hidden
    assert (counted(1, "more line"), counted(2, "more line")) == ("1 more line", "2 more lines")
