"""The surroundings of a run are put back: variables, and Python's garbage collector."""

import contextlib
import gc
import os
import stat

import pytest

from pytest_gtrainer.environment import (
    collector_off,
    lasting_environment,
    private_folder,
    variable,
)


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


@pytest.mark.parametrize("mode", [None, 0o700, 0o755, 0o777, 0o500])
def test_no_other_user_enters_a_private_folder(tmp_path, mode):
    """Also one that was there, and was open."""
    folder = tmp_path / "of" / "runs"
    if mode is not None:
        folder.mkdir(parents=True)
        folder.chmod(mode)
    assert private_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a file", "a link to a file", "a link to a folder"])
def test_what_is_no_folder_of_ones_own_is_refused(tmp_path, kind):
    """A link may lead to a folder of anybody."""
    folder, target = tmp_path / "runs", tmp_path / "target"
    if kind.endswith("folder"):
        target.mkdir()
    else:
        target.touch()
    if kind == "a file":
        folder.touch()
    else:
        folder.symlink_to(target)
    with pytest.raises(PermissionError, match=r"runs, where files .* is no folder: remove it"):
        private_folder(folder)
