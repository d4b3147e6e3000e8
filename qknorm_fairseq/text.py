"""Lines of text: how they are read, and what a line is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from qknorm_fairseq.errors import QKNormError, reason

LONGEST = 1 << 20  # bytes of a line


def one_spaced(line: str) -> str:
    """The line with each run of white space, of any Unicode kind, as one plain space.

    fairseq splits lines at every kind of white space (U+0085 and U+2028 among them), while
    sentencepiece splits at U+0020 only; after this the two agree.
    """
    return " ".join(line.split())


def read_lines(path: Path) -> list[str]:
    """All lines of a file: see :func:`iter_lines`."""
    return list(iter_lines(path))


def iter_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, one-spaced, a byte-order mark dropped.

    A line ends at a line feed (or CR LF) and nowhere else, so that a Unicode line separator
    inside a sentence doesn't shift the lines after it.

    Raises:
        QKNormError: the file is missing, not readable, or no text (naming the line).
    """
    try:
        with path.open("rb") as file:
            yield from decode_lines(file, path)
    except OSError as error:
        raise QKNormError(f"{path}: {reason(error)}") from None


def decode_lines(stream: BinaryIO, name: Path | str) -> Iterator[str]:
    """The same for an open stream, a line as soon as it is there.

    Raises:
        QKNormError: a line is no text, or longer than any sentence; the message has its number.
            So no input, however long, fills the memory.
    """
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise QKNormError(
                f"{name}, line {number}: longer than {LONGEST:,} bytes, which is no sentence; "
                "write one sentence a line"
            )
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
            if not line:
                continue
        yield decode_line(line.removesuffix(b"\n"), name, number)


def portions(lines: Iterable[str], most: int, characters: int) -> Iterator[list[str]]:
    """The lines in lists, each of which ends with `most` lines or with so many characters."""
    portion: list[str] = []
    length = 0
    for line in lines:
        portion.append(line)
        length += len(line)
        if len(portion) == most or length >= characters:
            yield portion
            portion, length = [], 0
    if portion:
        yield portion


def decode_line(line: bytes, path: Path | str, number: int) -> str:
    """One line's text, one-spaced.

    Raises:
        QKNormError: it is not valid UTF-8, or has a NUL, which no text has but UTF-16 and other
            files have; the message names file, line and byte.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise QKNormError(
            f"{path}, line {number}: not valid UTF-8 (byte {error.start + 1} is "
            f"0x{line[error.start]:02x}); convert the file, e.g. with iconv -t UTF-8"
        ) from None
    if (nul := line.find(b"\0")) >= 0:
        raise QKNormError(
            f"{path}, line {number}: not text (byte {nul + 1} is a NUL); if the file is UTF-16, "
            "convert it with iconv -f UTF-16 -t UTF-8"
        )
    return one_spaced(text)
