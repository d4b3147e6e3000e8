"""What goes wrong at the keyboard: one line that says which file, which line and what to do."""

from __future__ import annotations

import unicodedata

# What the system says of a file and a folder taken for each other, in words that help.
MISTAKEN = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a folder, where a file is needed",
    NotADirectoryError: "a file stands where a folder is needed",
    FileExistsError: "a file, where a folder is needed",
}

TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


class QKNormError(Exception):
    """A failure that the user can do something about. The command line prints it and exits 1."""


def reason(error: OSError) -> str:
    """What the system complains of."""
    return MISTAKEN.get(type(error)) or error.strerror or str(error)


def complaint(error: QKNormError | OSError) -> str:
    """What to say of a failure: the message, or the file that the system complains of."""
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {reason(error)}"
    return str(error)


def printable(text: str) -> str:
    """The text in one line that can do nothing to a terminal, whatever a file is called.

    Control characters, and those that turn the direction of writing, become `\\x1b`, `\\u202e`.
    """
    return "".join(
        character.encode("unicode_escape").decode() if _controls(character) else character
        for character in text
    )


def _controls(character: str) -> bool:
    turns = unicodedata.bidirectional(character) in TURNS
    return turns or unicodedata.category(character) in ("Cc", "Zl", "Zp")
