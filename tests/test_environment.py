"""The surroundings of a run are put back: variables, and Python's garbage collector."""

import contextlib
import gc
import os

import pytest

from pytest_gtrainer.environment import collector_off, lasting_environment, variable


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was(is_on):
    """Also one that the user has switched off, and behind an error."""
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with contextlib.suppress(KeyError), collector_off():
            with collector_off():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("before", [None, "", "set"])
def test_a_variable_is_as_it_was_and_ranks_never_start_with_it(monkeypatch, before):
    monkeypatch.setenv("GT_TRIED", before or "")
    if before is None:
        monkeypatch.delenv("GT_TRIED")
    with contextlib.suppress(KeyError), variable("GT_TRIED", "outer"):
        with variable("GT_TRIED", "inner"):
            assert os.environ["GT_TRIED"] == "inner"
            assert lasting_environment().get("GT_TRIED") == before
        assert os.environ["GT_TRIED"] == "outer"
        assert lasting_environment().get("GT_TRIED") == before
        raise KeyError
    assert os.environ.get("GT_TRIED") == before
    assert lasting_environment() == dict(os.environ)
