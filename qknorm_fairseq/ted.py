"""The `ted` corpus: talks in sixty languages, by Qi et al. 2018 (arXiv 1804.06323).

One archive holds a table for each split: a sentence a row, a language a column, Moses-tokenized
and escaped. A pair's text is the rows in which both languages have something. The archive is read
as a stream; nothing of it is ever written to the disk.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from qknorm_fairseq.corpora import Corpus, Counts
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.published_text import ParallelText
from qknorm_fairseq.text import decode_line
from qknorm_fairseq.tokenization import unescape

ARCHIVE = "ted_talks.tar.gz"
TABLES = {
    "all_talks_train.tsv": "train",
    "all_talks_dev.tsv": "valid",
    "all_talks_test.tsv": "test",
}
FIRST_COLUMN = b"talk_name"
# A sentence that a language lacks is `__NULL__`, or `_ _ NULL _ _` where the tokenizer got at it,
# now and then with something around it. The published counts are without all of these.
MISSING = b"NULL"
MAX_ROW = 4 * 1024 * 1024  # bytes
MAX_READ = 1024 * 1024  # bytes; more at once can only be an archive's header


def needed(pair: str) -> list[str]:
    """The published files that `read` asks for, whatever the pair."""
    return [ARCHIVE]


def read(corpus: Corpus, paths: Mapping[str, Path], pair: str) -> ParallelText:
    """The pair's rows of the three tables.

    Raises:
        QKNormError: the archive is damaged, or holds anything but the three tables as ordinary
            files within their bounds, or a table is not in its format.
    """
    archive = paths[ARCHIVE]
    (published,) = (file for file in corpus.files if file.name == ARCHIVE)
    splits: dict[str, list[tuple[str, str]]] = {}
    try:
        for name, table in _members(archive, published.members):
            splits[TABLES[name]] = list(_rows(table, f"{archive}: {name}", pair))
    except _UNREADABLE as error:
        raise QKNormError(f"{archive}: damaged ({error}); remove it and fetch again") from None
    for name, split in TABLES.items():
        if split not in splits:
            raise QKNormError(f"{archive}: has no {name}")
    return ParallelText(splits, Counts(**{split: len(rows) for split, rows in splits.items()}))


# What tarfile and gzip raise for bytes that are no such archive.
_UNREADABLE = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, RecursionError)


def _members(archive: Path, bounds: Mapping[str, int]) -> Iterator[tuple[str, IO[bytes]]]:
    """The archive's files, one after the other; anything that isn't one of them is refused."""
    seen = set()
    with _Gzip(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
        for member in tar:
            problem = None
            if member.name not in TABLES or member.name not in bounds:
                problem = "is none of the published files"
            elif member.name in seen:
                problem = "is there twice"
            elif member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                problem = "is no ordinary file"
            elif member.size > bounds[member.name]:
                problem = (
                    f"has more than the {bounds[member.name]:,} bytes that the registry allows"
                )
            if problem:
                raise QKNormError(f"{archive}: refused, since {member.name!r} in it {problem}")
            seen.add(member.name)
            content = tar.extractfile(member)
            assert content is not None  # as it is an ordinary file
            yield member.name, content


class _Gzip(gzip.GzipFile):
    """Unpacks what is read, but no large piece at once.

    tarfile reads a header of long names or attributes whole, however large it says it is.
    """

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MAX_READ:
            raise tarfile.ReadError("a header of implausible size")
        return super().read(size)


def _rows(table: IO[bytes], where: str, pair: str) -> Iterator[tuple[str, str]]:
    """The rows of a table in which both of the pair's languages have something."""
    lines = iter(lambda: table.readline(MAX_ROW + 1), b"")
    header = _cells(next(lines, b""))
    wanted = [language.encode() for language in pair.split("-")]
    if header[0] != FIRST_COLUMN or not set(wanted) <= set(header):
        raise QKNormError(
            f"{where}, line 1: must begin with {FIRST_COLUMN.decode()} and have the languages "
            f"{' and '.join(pair.split('-'))}"
        )
    columns = [header.index(language) for language in wanted]
    for number, line in enumerate(lines, start=2):
        if len(line) > MAX_ROW:
            raise QKNormError(f"{where}, line {number}: longer than {MAX_ROW:,} bytes")
        cells = _cells(line)
        if len(cells) != len(header) and line.strip():
            raise QKNormError(
                f"{where}, line {number}: {len(cells)} cells, but the first line has {len(header)}"
            )
        if not line.strip() or any(MISSING in cells[column] for column in columns):
            continue
        source, target = unescape([decode_line(cells[column], where, number) for column in columns])
        if source and target:
            yield source, target


def _cells(line: bytes) -> list[bytes]:
    return line.rstrip(b"\r\n").split(b"\t")
