"""What users read is free of codes: behaviours keep their ids in tests, and on their reference page."""

from __future__ import annotations

import inspect
import re

import pytest_gtrainer

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
