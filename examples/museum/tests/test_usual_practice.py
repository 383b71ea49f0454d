"""Runs what people do without this package, on the fixed version and on the bug of each exhibit."""

import importlib
import pkgutil

import exhibits
import pytest
from museum.exhibit import EXHIBITS
from museum.usual import Practice, look_at

for found in pkgutil.iter_modules(exhibits.__path__, "exhibits."):
    importlib.import_module(found.name)

COMPARED = [each for each in EXHIBITS.values() if isinstance(each.usual, Practice)]


@pytest.mark.parametrize("exhibit", COMPARED, ids=lambda each: each.module)
def test_usual_practice(exhibit, gt_ranks, record_property):
    seen = {}
    for bug in (False, True):
        if exhibit.usual.ranks == 1:
            seen[bug] = look_at(exhibit.module, bug)
        else:
            seen[bug] = gt_ranks.run(look_at, exhibit.module, bug, size=exhibit.usual.ranks)[0]
    record_property("usual", (exhibit.module, seen))
    assert not seen[False].close, "assert_close raises an alarm on the fixed version"
    assert not seen[False].curve
