"""The files a corpus is published as: downloaded, or from a folder; and always checked.

A download that was cut off goes on where it stopped, if the server can do that and still has the
same file. What a file must be is its SHA-256 in the registry; where that has none, the one it had
when it was first taken, which is written down in `sha256.json` beside the downloads.
"""

from __future__ import annotations

import fcntl
import http.client
import re
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from qknorm_fairseq import __version__, files
from qknorm_fairseq.corpora import Corpus, PublishedFile
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.progress import Report, downloading
from qknorm_fairseq.reading import Unreadable, read_json

RECORD = "sha256.json"
TIMEOUT = 30.0  # seconds without a byte
PIECE = 1 << 16  # bytes
MAX_REDIRECTS = 5


def obtain(
    corpus: Corpus,
    folder: Path,
    *,
    local: Path | None = None,
    mirror: str | None = None,
    progress: bool = True,
) -> dict[str, Path]:
    """All files of the corpus, each checked, by their names.

    Args:
        folder: where downloads are kept. What is there already is not downloaded again.
        local: take the files from this folder instead; they stay there.
        mirror: download from this address instead of the registry's.
        progress: show on stderr what is being downloaded.

    Raises:
        QKNormError: a file is missing, larger than it may be or not the right one, or the
            server can't be reached or stopped half-way. What had arrived is kept then.
    """
    if local is not None and not local.is_dir():
        raise QKNormError(f"{local}: no such folder; --from names the one with the corpus's files")
    addresses = corpus.addresses if mirror is None else (_checked_mirror(mirror),)
    paths = {file.name: folder / file.name for file in corpus.files}
    with _sole_user(folder, progress):
        files.clear(folder)
        if local is not None:
            return {file.name: _local(file, local, folder) for file in corpus.files}
        missing = [file for file in corpus.files if not _is_there(file, folder)]
        with downloading({file.name: file.max_bytes for file in missing}, progress) as report:
            for file in missing:
                _download_from_one_of(addresses, file, folder, report)
    return paths


def digests(corpus: Corpus, folder: Path) -> dict[str, str | None]:
    """The SHA-256 that each file must have; None where any will do."""
    recorded = _recorded(folder)
    return {file.name: file.sha256 or recorded.get(file.name) for file in corpus.files}


# --- checks ---------------------------------------------------------------------------------


def _local(file: PublishedFile, local: Path, folder: Path) -> Path:
    path = local / file.name
    if not path.is_file():
        raise QKNormError(f"{path}: no such file")
    if path.stat().st_size > file.max_bytes:
        raise QKNormError(f"{path}: {_too_large(file)}")
    _check(file, files.sha256(path), path, folder)
    return path


def _is_there(file: PublishedFile, folder: Path) -> bool:
    path = folder / file.name
    wanted = file.sha256 or _recorded(folder).get(file.name)
    return wanted is not None and path.is_file() and files.sha256(path) == wanted


def _check(file: PublishedFile, digest: str, origin: Path | str, folder: Path) -> None:
    """Compare with the registry, or else with the record; or begin the record."""
    recorded = _recorded(folder)
    wanted = file.sha256 or recorded.get(file.name)
    if wanted is None:
        files.write_json(folder / RECORD, recorded | {file.name: digest})
    elif digest != wanted and file.sha256:
        raise _Refused(
            f"{origin}: not the published file: its sha256 begins with {digest[:12]}, the "
            f"registry's with {wanted[:12]}"
        )
    elif digest != wanted:
        raise _Refused(
            f"{origin}: changed since the first time: its sha256 began with {wanted[:12]}, now "
            f"with {digest[:12]}; if you trust the new file, remove {folder / RECORD}"
        )


def _recorded(folder: Path) -> dict[str, str]:
    path = folder / RECORD
    try:
        recorded = read_json(path)
    except FileNotFoundError:
        return {}
    except Unreadable:
        recorded = None
    if not isinstance(recorded, dict) or not all(isinstance(v, str) for v in recorded.values()):
        raise QKNormError(f"{path}: damaged; remove it to take the files as they are now")
    return recorded


def _too_large(file: PublishedFile) -> str:
    return f"larger than the {file.max_bytes:,} bytes that the registry allows"


# --- downloads ------------------------------------------------------------------------------


class _Unavailable(QKNormError):
    """An address gives no file: perhaps the next one does."""


class _Refused(QKNormError):
    """A file is not the wanted one: there is no use in keeping it, or a part of it."""


def _download_from_one_of(
    addresses: tuple[str, ...], file: PublishedFile, folder: Path, report: Report
) -> None:
    for number, address in enumerate(addresses, start=1):
        try:
            return _download(address + file.name, file, folder, report)
        except _Unavailable:
            if number == len(addresses):
                raise


def _download(url: str, file: PublishedFile, folder: Path, report: Report) -> None:
    """Have the file in the folder: it gets its name when it is complete and checked."""
    part = folder / f"{file.name}.part"
    origin = folder / f"{file.name}.part.json"  # which address's which version it is a part of
    try:
        _receive(url, file, part, origin, report)
        _check(file, files.sha256(part), url, folder)
        files.settle(part, folder / file.name)
    except _Refused:
        part.unlink(missing_ok=True)
        origin.unlink(missing_ok=True)
        raise
    origin.unlink(missing_ok=True)


def _receive(url: str, file: PublishedFile, part: Path, origin: Path, report: Report) -> None:
    """Fill `part`, going on at its end if it is a part of what the address still has."""
    version = _version_of_part(origin, url)
    done = part.stat().st_size if version and part.is_file() else 0
    response = _open(url, done, version)
    if response.status != http.client.PARTIAL_CONTENT:
        done = 0
    elif not _goes_on(response, done, version):
        response.close()
        response, done = _open(url), 0
    size = None if response.length is None else done + response.length
    with response, part.open("ab" if done else "wb") as output:
        if not done:
            files.write_json(origin, {"url": url, "version": _version(response.headers)})
        report(file.name, done, size)
        while max(done, size or 0) <= file.max_bytes:
            try:
                piece = response.read(PIECE)
            except (OSError, http.client.HTTPException) as error:
                raise _cut_off(url, done, size, error) from None
            if not piece:
                if size is not None and done < size:
                    raise _cut_off(url, done, size)
                return
            output.write(piece)
            done += len(piece)
            report(file.name, done, size)
    raise _Refused(f"{url}: {_too_large(file)}")


def _version_of_part(origin: Path, url: str) -> str | None:
    """What the server called the version that a part is of; None if it can't be continued."""
    try:
        found = read_json(origin)
        return str(found["version"]) if found["version"] and found["url"] == url else None
    except (OSError, Unreadable, KeyError, TypeError):
        return None


def _version(headers: Message) -> str | None:
    """What `If-Range` takes: a strong entity tag, or else a date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified")


def _goes_on(response: http.client.HTTPResponse, done: int, version: str | None) -> bool:
    """Whether this is the rest of the same version, from the right place on."""
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    same = _version(response.headers) in (None, version)
    return same and found is not None and int(found[1]) == done


def _cut_off(url: str, done: int, size: int | None, error: Exception | None = None) -> QKNormError:
    arrived = f"{done:,} bytes" if size is None else f"{done:,} of {size:,} bytes"
    reason = f" ({_reason(error)})" if error else ""
    return QKNormError(
        f"{url}: broke off after {arrived}{reason}; they are kept: call it again to go on"
    )


# --- HTTP -----------------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow a few redirects, to http(s) only, and never from https to http."""

    max_redirections = MAX_REDIRECTS

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise _Unavailable(f"{req.full_url}: redirects to {newurl}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, done: int = 0, version: str | None = None) -> http.client.HTTPResponse:
    """Ask for the file, or for what comes after its first `done` bytes."""
    headers = {"User-Agent": f"qknorm-fairseq/{__version__}"}
    if done and version:
        headers |= {"Range": f"bytes={done}-", "If-Range": version}
    opener = urllib.request.build_opener(_Redirects)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            return _open(url)
        if 300 <= error.code < 400:
            raise _Unavailable(f"{url}: redirects to nowhere, or too often") from None
        raise _Unavailable(f"{url}: the server says {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Unavailable(
            f"{url}: no connection ({_reason(error)}); call it again when there is one, or take "
            "the file from a folder with --from, or from elsewhere with --mirror"
        ) from None
    assert isinstance(response, http.client.HTTPResponse)  # as the address is one for HTTP
    if response.status not in (http.client.OK, http.client.PARTIAL_CONTENT):
        response.close()
        raise _Unavailable(f"{url}: the server says {response.status} {response.reason}")
    return response


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(words).split())


def _checked_mirror(mirror: str) -> str:
    try:
        address = urlsplit(mirror)
        whole = address.scheme in ("http", "https") and bool(address.hostname)
        address.port  # noqa: B018  (an address has one that is a number, or none)
    except ValueError:  # "http://[", "http://a:b"
        whole = False
    if not whole:
        raise QKNormError(f"{mirror!r} is no http:// or https:// address")
    return mirror.rstrip("/") + "/"


@contextmanager
def _sole_user(folder: Path, progress: bool) -> Iterator[None]:
    """Wait until no other process downloads into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"{folder}: waiting for another download", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
