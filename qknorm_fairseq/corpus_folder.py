"""A corpus as `qknorm fetch` leaves it: {train,valid,test}.<language> and corpus.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qknorm_fairseq import __version__, files
from qknorm_fairseq.corpora import SPLITS, Corpus, Counts
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.reading import Unreadable, read_json
from qknorm_fairseq.tokenization import NONE, TOKENIZATIONS

DESCRIPTION = "corpus.json"

Pairs = Sequence[tuple[str, str]]  # source, target


def is_current(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether the folder was made from this, and its files are still as they were written."""
    try:
        made = read_json(folder / DESCRIPTION)
        return origin.items() <= made.items() and all(
            files.sha256(folder / name) == digest for name, digest in made["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write(
    folder: Path,
    pair: str,
    splits: Mapping[str, Pairs],
    *,
    origin: Mapping[str, Any],
    dropped: Mapping[str, int],
    tokenization: str,
) -> Counts:
    """Write the pairs of each split and say what they were made from; whole or not at all.

    Args:
        pair: "gl-en".
        origin: all that the corpus follows from; `is_current` compares it.
        dropped: how many pairs are not there for which reason.
    """
    counts = {split: len(splits[split]) for split in SPLITS}
    with files.sole_maker(folder), files.new_directory(folder) as work:
        names = []
        for split in SPLITS:
            for side, language in enumerate(pair.split("-")):
                names.append(f"{split}.{language}")
                files.write_lines(work / names[-1], [both[side] for both in splits[split]])
        description = {
            **origin,
            "tokenization": tokenization,
            "tool": f"qknorm-fairseq {__version__}",
            "counts": counts,
            "dropped": dict(sorted(dropped.items())),
            "files": {name: files.sha256(work / name) for name in names},
        }
        files.write_json(work / DESCRIPTION, description)
    return Counts(**counts)


def compare(corpus: Corpus, pair: str, found: Counts) -> None:
    """Warn in one line if these are not the counts that the registry has."""
    expected = corpus.counts(pair)
    if found != expected:
        print(
            f"warning: {corpus.name} {pair}: {found}; the registry has {expected}", file=sys.stderr
        )


def tokenization(folder: Path) -> str:
    """What corpus.json says of the text's tokenization; where there is none, the text has none.

    Raises:
        QKNormError: corpus.json can't be read, or says something unknown.
    """
    file = folder / DESCRIPTION
    if not file.exists():
        return NONE
    try:
        found = read_json(file).get("tokenization", NONE)
    except (Unreadable, AttributeError):
        found = None
    if found not in TOKENIZATIONS:
        raise QKNormError(f"{file}: not written by this version of qknorm fetch; fetch again")
    return str(found)
