"""Which vocabulary a model was trained with: its checkpoints say it, and it is compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary


def fingerprint(source: Any, target: Any) -> str:
    """The SHA-256 of all symbols of two fairseq dictionaries, in their order."""
    words = "\n".join([*source.symbols, "", *target.symbols])
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()


def of_folder(folder: Path, source_lang: str, target_lang: str) -> str | None:
    """The same of a folder's dictionaries; None where it has none that can be read."""
    files = [folder / f"dict.{language}.txt" for language in (source_lang, target_lang)]
    if not all(file.is_file() for file in files):
        return None
    try:
        return fingerprint(*(Dictionary.load(str(file)) for file in files))
    except Exception:  # fairseq's are many; whoever needs the dictionary will complain
        return None
