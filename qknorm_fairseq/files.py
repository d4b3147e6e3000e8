"""Files that are written whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux
HALF = (
    ".tmp"  # what a file is called that is being written, hidden as it is: .score.json.x7_k2a.tmp
)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with Unix line ends: a reader sees the old file or the new one."""
    # A name of bytes that are no UTF-8 is escaped, as JSON does it.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name[:100]}."
        descriptor, name = tempfile.mkstemp(HALF, prefix, path.parent)
        work = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            work.chmod(0o666 & ~_umask())  # mkstemp makes private files; ours are ordinary ones
            work.replace(path)
        except BaseException:
            work.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def clear(folder: Path) -> None:
    """Take away what killed processes left half-written, of a folder that is ours alone now."""
    for left in folder.glob(f".*{HALF}"):
        left.unlink()


def copy(source: Path, path: Path) -> None:
    """Copy a file of any size; one that stood at `path` is replaced when all is there."""
    work = path.with_name(f"{path.name}.tmp")  # as fairseq names half a checkpoint
    with _naming(path):
        try:
            shutil.copyfile(source, work)
            settle(work, path)
        except BaseException:
            work.unlink(missing_ok=True)
            raise


def settle(work: Path, path: Path) -> None:
    """Give a file that is complete its name, once it is on the disk."""
    _sync(work)
    work.replace(path)
    _sync(path.parent)


def write_lines(path: Path, lines: list[str]) -> None:
    """Write one line each. The lines must not hold a line feed themselves."""
    write_text(path, "".join(f"{line}\n" for line in lines))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that appears at `path` complete, when the block ends without an exception.

    What stood at `path` before is replaced then, and left as it was otherwise.
    """
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield work
            for file in work.iterdir():
                _sync(file)
            _sync(work)
            work.chmod(0o777 & ~_umask())
            if not path.is_dir() or path.is_symlink() or not _exchange(work, path):
                _replace(work, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def sole_maker(path: Path, say_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait until nobody else makes a directory beside `path`; take away what killed ones left.

    The lock is the folder's own, so no file stays behind. Where a network file system has no
    locks, there is no waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say_waiting()
                fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass
        else:
            for left in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}"):
                shutil.rmtree(left, ignore_errors=True)
            for left in path.parent.glob(f".{glob.escape(path.name)}.old.{'[a-z0-9_]' * 8}"):
                if not path.exists() and (left / path.name).exists():  # killed in `_replace`
                    (left / path.name).replace(path)
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(folder)


def _exchange(work: Path, path: Path) -> bool:
    """Swap two folders' names in one step, where the system and the file system can."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(work), os.fsencode(path)
    return renameat2 is not None and not renameat2(
        AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE
    )


def _replace(work: Path, path: Path) -> None:
    """Put `work` at `path` in two steps; what stood there comes back if the second one fails."""
    if not path.exists():
        work.replace(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    path.replace(old / path.name)
    try:
        work.replace(path)
    except BaseException:
        (old / path.name).replace(path)
        old.rmdir()
        raise
    shutil.rmtree(old)


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have what the system refuses (a full disk, say) name what was to be written, whole.

    Otherwise it names a temporary file, or none.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):  # it names what is in the way
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
