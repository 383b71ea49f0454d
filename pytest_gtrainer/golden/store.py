"""Read and write golden files, and source files with inline expectations.

A golden is a regular file below the root directory, UTF-8 text of at most ``LONGEST`` bytes;
anything else in its place is refused. A file is replaced in one step: a *temporary* beside it is
written whole and takes its name. The next writer in the folder removes a *stale* temporary, which a
killed writer has left.
"""

import codecs
import contextlib
import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath

from pytest_gtrainer.environment import private_folder
from pytest_gtrainer.golden.naming import FOLDER, stem_of_golden

# Five times the longest graph text seen: 126 layers, unbucketed and unfolded, are 3.2 MB.
LONGEST = 16 * 2**20
_LOCK_SECONDS = 60.0
_STALE_SECONDS = 60.0  # writing a golden takes milliseconds
_TEMPORARY = re.compile(r"\.gt-[0-9a-f]{16}\.tmp")


class GoldenFileError(Exception):
    """A golden file that cannot be read or written; the message is one sentence."""


class DamagedGolden(GoldenFileError):
    """A golden whose content cannot be compared with anything; an update may replace it."""


def read(path: Path, root: Path) -> str | None:
    """Return the text of a golden, with ``\\n`` line ends and no byte-order mark; None for no file.

    Raises:
        DamagedGolden: it is not text.
        GoldenFileError: it is no file inside ``root``, or cannot be read.
    """
    status = _status(path, root)
    if status is None:
        return None
    size, raw = status.st_size, b""
    try:
        # A file that is too long is refused without reading it.
        if size <= LONGEST:
            with open(path, "rb", opener=_open_without_waiting) as file:
                raw = file.read(LONGEST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenFileError(_unreachable(error, path, root)) from error

    if damage := _damage(raw, max(size, len(raw))):
        raise DamagedGolden(f"{spell_path(path, root)} {damage}: restore or remake it")
    return normal(raw.decode("utf-8"))


def _open_without_waiting(name: str, flags: int) -> int:
    # A pipe may have taken the place of the file, and its writer may never come.
    return os.open(name, flags | os.O_NONBLOCK)


def goldens_below(root: Path) -> list[PurePosixPath]:
    """Return the sorted paths of all goldens below the root; links to folders are not followed."""
    found = []
    for folder, _, names in os.walk(root / FOLDER):
        below = PurePosixPath(Path(folder).relative_to(root).as_posix())
        found += [below / name for name in names if stem_of_golden(below / name) is not None]
    return sorted(found)


def linked_folders(root: Path) -> list[Path]:
    """Return the folders that links among the goldens lead to: they have goldens of two names."""
    found = []
    for folder, names, _ in os.walk(root / FOLDER):
        for name in names:
            place = Path(folder, name)
            if place.is_symlink():
                found.append(Path(os.path.realpath(place)))
    return found


def normal(text: str) -> str:
    """Return a text with ``\\n`` as its line ends, with one at the end, and without a byte-order
    mark at its beginning.
    """
    # Of both sides, as an editor may add the mark to a file, and a text may begin with its own.
    text = text.removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") else text + "\n"


def write(path: Path, root: Path, text: str, merge: Callable[[str], str] | None = None) -> None:
    """Replace a golden in one step.

    With ``merge``, the new text is made from the old one while no other process writes.
    """
    _refuse_case_twin(path, root)
    with _sole_writer(path, root) as target:
        if merge is not None and (golden := read(path, root)) is not None:
            text = merge(golden)
        raw = text.encode("utf-8", errors="surrogatepass")
        if damage := _damage(raw, len(raw)):
            raise GoldenFileError(
                f"{spell_path(path, root)} was not written: the obtained text {damage}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, raw)


def rewrite(path: Path, root: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace an existing file in one step by what ``change`` makes of its content."""
    with _sole_writer(path, root) as target:
        old = target.read_bytes()
        if (new := change(old)) != old:
            _replace(target, new)


def _lock(root: Path) -> AbstractContextManager[object]:
    """Return the lock that a process holds while it writes goldens."""
    from filelock import FileLock  # it loads asyncio, which a run that writes nothing needs not

    return FileLock(_lock_file(root), timeout=_LOCK_SECONDS)


def remove(path: Path, root: Path) -> None:
    """Remove a golden, or the link in its place, and the folders that it leaves empty.

    Raises:
        GoldenFileError: it lies behind a link, or cannot be removed.
    """
    if not _is_inside(path.parent, root):
        raise GoldenFileError(
            f"{spell_path(path, root)} was not removed: it lies out of the tree, behind a link"
        )

    try:
        with _lock(root):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the first folder that is not empty
                for folder in path.relative_to(root).parents[:-1]:
                    (root / folder).rmdir()
    except OSError as error:
        raise GoldenFileError(
            f"{spell_path(path, root)} was not removed: {reason(error)}"
        ) from error


def _status(path: Path, root: Path) -> os.stat_result | None:
    """Return the status of a file inside the tree, None for no file; refuse anything else."""
    name = spell_path(path, root)
    if not _is_inside(path, root):
        raise GoldenFileError(f"{name} leads out of the tree by a link: replace it by a file")
    if path.is_relative_to(root / FOLDER) and not _is_inside(path, root / FOLDER):
        there = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
        raise GoldenFileError(
            f"{name} leads to {there}, which is no golden, by a link: replace it by a file"
        )

    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenFileError(_unreachable(error, path, root)) from error

    if stat.S_ISDIR(status.st_mode):
        raise GoldenFileError(f"{name} is a directory, expected a file: remove it")
    if not stat.S_ISREG(status.st_mode):
        raise GoldenFileError(f"{name} is a pipe, a socket or a device, expected a file: remove it")
    return status


def _is_inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _unreachable(error: OSError, path: Path, root: Path) -> str:
    if error.errno == errno.ELOOP:
        return f"{spell_path(path, root)} is a link that leads back to itself: replace it by a file"
    if error.errno == errno.ENOTDIR:
        blocking = next(parent for parent in path.parents if parent.exists())
        return f"{spell_path(blocking, root)} is a file, expected a directory: remove it"
    return f"{spell_path(path, root)} cannot be read: {error.strerror}"


def _damage(raw: bytes, size: int) -> str | None:
    """Return why a file of ``size`` that begins with ``raw`` is no golden, None if it may be."""
    if size > LONGEST:
        return f"has {size / 2**20:.0f} MiB, where a golden has at most {LONGEST // 2**20}"
    if not raw.removeprefix(codecs.BOM_UTF8):
        return "is empty"
    if b"\0" in raw:
        return f"has a NUL byte at byte {raw.index(0)}"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 at byte {error.start}"
    return None


def _refuse_case_twin(path: Path, root: Path) -> None:
    """Refuse a new name that differs from another only in case, as some systems ignore case."""
    folder = root
    for part in path.relative_to(root).parts:
        twins = []
        if folder.is_dir():
            twins = [name for name in os.listdir(folder) if name.lower() == part.lower()]
        if twins and part not in twins:
            raise GoldenFileError(
                f"{spell_path(path, root)} was not written: "
                f"{spell_path(folder / twins[0], root)} differs from {part} only in case, and is "
                "the same file on some systems: rename one of the tests"
            )
        folder /= part


@contextmanager
def _sole_writer(path: Path, root: Path) -> Iterator[Path]:
    """Yield the file to replace, while no other process replaces one.

    Raises:
        GoldenFileError: ``path`` cannot be written, or another process has the lock for too long.
    """
    _status(path, root)
    try:
        with _lock(root):
            # A link inside the tree stays a link.
            yield Path(os.path.realpath(path))
    except OSError as error:
        raise GoldenFileError(
            f"{spell_path(path, root)} was not written: {reason(error)}"
        ) from error


def reason(error: OSError | ValueError) -> str:
    """Return the reason of an error, in the words of the operating system if it has some."""
    from filelock import Timeout

    if isinstance(error, Timeout):
        return (
            f"another run has held the lock {error.lock_file} for {_LOCK_SECONDS:.0f} seconds: "
            "let it end"
        )
    return getattr(error, "strerror", None) or str(error)


def _replace(path: Path, content: bytes) -> None:
    _sweep(path.parent)
    import secrets  # a run that writes nothing needs none

    temporary = path.with_name(f".gt-{secrets.token_hex(8)}.tmp")
    try:
        # ``tempfile`` makes files that only their owner may read.
        with open(temporary, "xb") as file:
            if path.exists():
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            # Without it a machine that crashes may keep the new name and lose the content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove stale temporaries."""
    for found in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):
            if time.time() - (folder / found).stat().st_mtime > _STALE_SECONDS:
                (folder / found).unlink()


def _lock_file(root: Path) -> str:
    """Return the lock of a tree, in a folder of the user's own.

    In the tree it would be committed; in a folder of all users another one could put a link there.
    """
    key = hashlib.sha256(str(root.resolve()).encode(errors="backslashreplace")).hexdigest()[:32]
    folder = private_folder(Path(tempfile.gettempdir()) / f"gtrainer-locks-{os.getuid()}")
    return str(folder / f"golden-{key}.lock")


def spell_path(path: Path, root: Path) -> str:
    """Return a path below the root as it stands in messages and reports, else the whole path."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
