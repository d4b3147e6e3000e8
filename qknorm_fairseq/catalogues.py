"""The `catalogues` corpus: human translations from the message catalogues of Python packages.

A wheel is a zip archive, and some hold GNU gettext catalogues: what the program says in English,
and the same in another language. They are read as data, never installed or
imported. The same registry gives the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polib

from qknorm_fairseq import cleaning, corpus_folder, wheels
from qknorm_fairseq.corpora import SPLITS, Corpus, Counts, Package, Registry, load_registry
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.tokenization import NONE

NAME = "catalogues"
MAX_CATALOGUE = 50 * 1024 * 1024  # bytes; the largest of the pinned ones has 1.3 MB
MO_MAGIC = (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde")  # either byte order

# Of a thousand English sentences: these many for testing, the next ones for validation.
TEST_PER_MILLE = 80
VALID_PER_MILLE = 60


@dataclass(frozen=True)
class Candidate:
    """A text and its translation, from a package's catalogue."""

    package: Package
    english: str
    foreign: str


def fetch(
    pair: str, data_dir: Path, *, registry: Registry | None = None, progress: bool = True
) -> Path:
    """Build the pair's corpus in data_dir/corpora/catalogues/<pair>, and return that folder.

    It holds {train,valid,test}.<language> and corpus.json, which says what they were made from.
    One that is there already and up to date is left as it is. The wheels are kept in
    data_dir/downloads/catalogues. `progress` shows on stderr what is being downloaded.

    Raises:
        QKNormError: the pair is unknown, a wheel can't be had or isn't the pinned one, or a
            catalogue can't be read.
    """
    corpus = (registry or load_registry()).corpus(NAME)
    corpus.counts(pair)
    folder = data_dir / "corpora" / NAME / pair
    origin = _origin(corpus, pair)
    if corpus_folder.is_current(folder, origin):
        return folder

    downloads = data_dir / "downloads" / NAME
    wheels.download(corpus.packages, downloads, progress=progress)
    language = foreign_language(pair)
    candidates = [
        candidate
        for package in corpus.packages
        for candidate in extract(downloads / package.wheel, package, language)
    ]
    kept, dropped = clean(candidates, language)
    counts = _write(folder, pair, select(kept), origin, dropped)
    corpus_folder.compare(corpus, pair, counts)
    return folder


def foreign_language(pair: str) -> str:
    source, target = pair.split("-")
    return target if source == "en" else source


# --- catalogues -----------------------------------------------------------------------------


def extract(wheel: Path, package: Package, language: str) -> list[Candidate]:
    """All translated texts in the wheel's catalogues for the language, in a stable order.

    The language's own catalogues come first, then those for a region (`ar_EG`).

    Raises:
        QKNormError: the wheel or a catalogue is damaged, or a catalogue is implausibly large.
    """
    candidates = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in _catalogues(archive, language):
                if member.file_size > MAX_CATALOGUE:
                    raise QKNormError(f"{wheel}: {member.filename} is too large to be read")
                try:
                    texts = _read_mo(archive.read(member))
                except _UNREADABLE as error:
                    problem = f"{wheel}: {member.filename} is damaged ({error})"
                    raise QKNormError(problem) from None
                candidates += [Candidate(package, english, foreign) for english, foreign in texts]
    except _UNREADABLE as error:
        raise QKNormError(f"{wheel} is damaged ({error}); remove it and fetch again") from None
    return candidates


# What zipfile and polib raise for bytes that are no zip archive or no catalogue.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    NotImplementedError,  # an unknown compression
    RuntimeError,  # encryption
    ValueError,  # text that isn't in the declared encoding
)


def _catalogues(archive: zipfile.ZipFile, language: str) -> list[zipfile.ZipInfo]:
    pattern = re.compile(rf"(?:.*/)?locale/({language}(?:_[A-Za-z]+)?)/LC_MESSAGES/[^/]+\.mo")
    found = [
        (match[1], member.filename, member)
        for member in archive.infolist()
        if (match := pattern.fullmatch(member.filename))
    ]
    return [member for *_, member in sorted(found, key=lambda item: item[:2])]


def _read_mo(content: bytes) -> list[tuple[str, str]]:
    """The (English, foreign) texts of a compiled catalogue."""
    # polib takes bytes for a file's name where there is such a file; this is no such name.
    if content[:4] not in MO_MAGIC:
        raise ValueError("not a compiled catalogue")
    _check_lengths(content)
    texts = []
    for entry in polib.mofile(content):
        if entry.msgid_plural:
            # The plural rules of the five languages all end with the general case ("other").
            forms = entry.msgstr_plural
            texts.append((entry.msgid_plural, forms[max(forms)] if forms else ""))
        else:
            texts.append((entry.msgid, entry.msgstr))
    return texts


def _check_lengths(content: bytes) -> None:
    """Refuse strings that share their bytes: a small file could be as large as one likes then."""
    order = "<" if content[:4] == MO_MAGIC[0] else ">"
    count, *tables = struct.unpack_from(f"{order}3I", content, 8)
    total = 0
    for table in tables:
        for number in range(count):
            total += struct.unpack_from(f"{order}I", content, table + 8 * number)[0]
            if total > len(content):
                raise ValueError("its strings are longer than the file")


# --- sentence pairs -------------------------------------------------------------------------


def clean(candidates: list[Candidate], language: str) -> tuple[list[Candidate], Counter[str]]:
    """The candidates worth having, made plain; and how many were dropped for which reason."""
    tidy = [
        Candidate(each.package, cleaning.tidy(each.english), cleaning.tidy(each.foreign))
        for each in candidates
    ]
    ordinary = (
        cleaning.vocabulary(each.english for each in tidy),
        cleaning.vocabulary(each.foreign for each in tidy),
    )
    kept = []
    dropped: Counter[str] = Counter()
    for each in tidy:
        english, foreign = each.english, each.foreign
        if each.package.accelerators:
            plain = cleaning.without_accelerators(english, foreign, ordinary)
            if plain is None:
                dropped["accelerator"] += 1
                continue
            english, foreign = plain
        if reason := cleaning.refusal(english, foreign, language):
            dropped[reason] += 1
        else:
            kept.append(Candidate(each.package, english, foreign))
    return kept, dropped


def select(candidates: list[Candidate]) -> dict[str, Candidate]:
    """One candidate for each English key, in which no foreign key stands twice either.

    Of several translations of the same, the one that most packages have is taken; of equals,
    the first.
    """
    translations: dict[str, dict[str, list[Candidate]]] = {}
    for each in candidates:
        by_foreign = translations.setdefault(cleaning.key(each.english), {})
        by_foreign.setdefault(cleaning.key(each.foreign), []).append(each)
    selected = {}
    seen = set()
    for english_key, by_foreign in translations.items():
        foreign_key = max(
            by_foreign, key=lambda key: len({c.package.name for c in by_foreign[key]})
        )
        if foreign_key not in seen:
            seen.add(foreign_key)
            selected[english_key] = by_foreign[foreign_key][0]
    return selected


def split_of(english_key: str) -> str:
    """Where a sentence belongs: by its English side alone, so the same for every pair."""
    bucket = int(_digest(english_key), 16) % 1000
    if bucket < TEST_PER_MILLE:
        return "test"
    return "valid" if bucket < TEST_PER_MILLE + VALID_PER_MILLE else "train"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# --- files ----------------------------------------------------------------------------------


def _origin(corpus: Corpus, pair: str) -> dict[str, Any]:
    """All that the corpus follows from."""
    packages = [
        {"name": package.name, "version": package.version, "sha256": package.sha256}
        for package in corpus.packages
    ]
    return {"corpus": NAME, "pair": pair, "cleaning": cleaning.VERSION, "packages": packages}


def _write(
    folder: Path,
    pair: str,
    selected: dict[str, Candidate],
    origin: dict[str, Any],
    dropped: Counter[str],
) -> Counts:
    splits: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    # By digest: as good as shuffled, and the same on every machine.
    for english_key in sorted(selected, key=_digest):
        each = selected[english_key]
        both = (
            (each.english, each.foreign) if pair.startswith("en-") else (each.foreign, each.english)
        )
        splits[split_of(english_key)].append(both)
    return corpus_folder.write(
        folder, pair, splits, origin=origin, dropped=dropped, tokenization=NONE
    )
