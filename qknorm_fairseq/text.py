"""Lines of text: how they are read, and what a line is."""

from __future__ import annotations

from pathlib import Path

from qknorm_fairseq.errors import QKNormError


def one_spaced(line: str) -> str:
    """The line with each run of white space, of any Unicode kind, as one plain space.

    fairseq splits lines at every kind of white space (U+0085 and U+2028 among them), while
    sentencepiece splits at U+0020 only; after this the two agree.
    """
    return " ".join(line.split())


def read_lines(path: Path) -> list[str]:
    """All lines of a UTF-8 file, one-spaced, a byte-order mark dropped.

    A line ends at a line feed (or CR LF) and nowhere else, so that a Unicode line separator
    inside a sentence doesn't shift the lines after it.

    Raises:
        QKNormError: the file is missing, not readable, or not valid UTF-8 (naming the line).
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise QKNormError(f"{path}: no such file") from None
    except OSError as error:
        raise QKNormError(f"{path}: {error.strerror}") from None
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    lines = raw.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return [decode_line(line, path, number) for number, line in enumerate(lines, start=1)]


def decode_line(line: bytes, path: Path | str, number: int) -> str:
    """One line's text, one-spaced.

    Raises:
        QKNormError: it is not valid UTF-8; the message names file, line and byte.
    """
    try:
        return one_spaced(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise QKNormError(
            f"{path}, line {number}: not valid UTF-8 (byte {error.start + 1} is "
            f"0x{line[error.start]:02x}); convert the file, e.g. with iconv -t UTF-8"
        ) from None
