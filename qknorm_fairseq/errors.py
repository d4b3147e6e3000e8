"""What goes wrong at the keyboard: one line that says which file, which line and what to do."""

from __future__ import annotations


class QKNormError(Exception):
    """A failure that the user can do something about. The command line prints it and exits 1."""
