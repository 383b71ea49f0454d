"""The one place that reads and writes golden files."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from pathlib import Path

from filelock import FileLock


class GoldenFileError(Exception):
    """A golden file that cannot be read or written; the message is one sentence."""


def read(path: Path, root: Path) -> str | None:
    """The text of a golden, with ``\\n`` line ends and no byte-order mark; None if there is none.

    Raises:
        GoldenFileError: it is there and is not a readable text file inside ``root``.
    """
    _check_inside(path, root)
    if path.is_dir():
        raise GoldenFileError(f"{_shown(path, root)} is a directory, expected a file: remove it")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenFileError(f"{_shown(path, root)} cannot be read: {error.strerror}") from error
    try:
        return normal(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        place = f"{_shown(path, root)} is not valid UTF-8 at byte {error.start}"
        raise GoldenFileError(f"{place}: restore or remake it") from None


def normal(text: str) -> str:
    """Line ends as ``\\n``, one at the end.

    >>> normal("a\\r\\nb")
    'a\\nb\\n'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") else text + "\n"


def write(path: Path, root: Path, text: str) -> None:
    """Replace a golden: at any moment, and after a crash, the file is the old or the new one.

    Raises:
        GoldenFileError: it could not be written; the old file is as it was.
    """
    _check_inside(path, root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock_file(root)):
            _replace(path, text.encode("utf-8"))
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GoldenFileError(f"{_shown(path, root)} was not written: {reason}") from error


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # not `tempfile`: it makes files that only their owner may read
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself durable, where the system lets a directory be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock_file(root: Path) -> str:
    """One a tree, in the system's temporary folder: a lock in the tree would be left there and committed."""
    key = hashlib.sha256(str(root.resolve()).encode(errors="backslashreplace")).hexdigest()[:32]
    return os.path.join(tempfile.gettempdir(), f"gtrainer-golden-{key}.lock")


def _check_inside(path: Path, root: Path) -> None:
    if not path.resolve().is_relative_to(root.resolve()):
        raise GoldenFileError(f"{_shown(path, root)} leads out of the tree by a link: replace it by a file")


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
