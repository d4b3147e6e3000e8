"""Corpora that are published as parallel text: fetched, checked, and split as their authors did."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qknorm_fairseq import corpus_folder, downloads
from qknorm_fairseq.corpora import Corpus, Counts, Registry, load_registry
from qknorm_fairseq.corpus_folder import Pairs
from qknorm_fairseq.errors import QKNormError

VERSION = 1  # to be raised when a change here, or in how a corpus is read, changes the corpora


@dataclass(frozen=True)
class ParallelText:
    """What was read of a pair.

    Attributes:
        splits: the pairs to be written, source and target, for train, valid and test.
        published: how many there are in each split by the count that the registry has.
        empty: how many of those are not written, since they have an empty side.
    """

    splits: Mapping[str, Pairs]
    published: Counts
    empty: int = 0


class Reader(Protocol):
    """A module that knows a corpus's format."""

    def needed(self, pair: str) -> list[str]:
        """The names of the published files that `read` asks for."""

    def read(self, corpus: Corpus, paths: Mapping[str, Path], pair: str) -> ParallelText:
        """Turn the published files into pairs."""


def fetch(
    name: str,
    pair: str,
    data_dir: Path,
    *,
    reader: Reader,
    local: Path | None = None,
    mirror: str | None = None,
    registry: Registry | None = None,
    progress: bool = True,
) -> Path:
    """Build the pair's corpus in data_dir/corpora/<name>/<pair>, and return that folder.

    It holds {train,valid,test}.<language> and corpus.json, which says what they were made from.
    One that is there already and up to date is left as it is.

    Args:
        local: a folder that holds the published files, to be used instead of downloads.
        mirror: the address to download them from instead of the registry's.
        progress: show on stderr what is being downloaded.

    Raises:
        QKNormError: the pair is unknown, a file can't be had or isn't the right one, or is
            not in the format it should be in.
    """
    registry = registry or load_registry()
    corpus = registry.corpus(name)
    corpus.counts(pair)
    if missing := sorted(set(reader.needed(pair)) - {file.name for file in corpus.files}):
        raise QKNormError(f"{registry.path}: {name} has no file {' or '.join(missing)}")
    folder = data_dir / "corpora" / name / pair
    kept = data_dir / "downloads" / name
    if corpus_folder.is_current(folder, _origin(corpus, pair, kept)):
        return folder

    paths = downloads.obtain(corpus, kept, local=local, mirror=mirror, progress=progress)
    text = reader.read(corpus, paths, pair)
    corpus_folder.write(
        folder,
        pair,
        text.splits,
        origin=_origin(corpus, pair, kept),
        dropped={"empty": text.empty},
        tokenization=corpus.tokenization,
    )
    corpus_folder.compare(corpus, pair, text.published)
    if text.empty:
        print(f"{name} {pair}: {text.empty:,} pairs with an empty side left out", file=sys.stderr)
    return folder


def _origin(corpus: Corpus, pair: str, kept: Path) -> dict[str, object]:
    """All that the corpus follows from."""
    digests = downloads.digests(corpus, kept)
    published = [{"name": name, "sha256": digest} for name, digest in digests.items()]
    return {"corpus": corpus.name, "pair": pair, "reading": VERSION, "published": published}
