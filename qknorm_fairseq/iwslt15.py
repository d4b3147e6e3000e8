"""The `iwslt15` corpus: TED talks in English and Vietnamese, as the Stanford NLP group has them.

One file for each split and language, a sentence a line, Moses-tokenized and escaped. The training
text has some lines that are empty on one side; they count in the published number of pairs, but
nothing can be learned from them, so they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qknorm_fairseq.corpora import Corpus, Counts
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.published_text import ParallelText
from qknorm_fairseq.text import read_lines
from qknorm_fairseq.tokenization import unescape

FILES = {"train": "train", "valid": "tst2012", "test": "tst2013"}


def needed(pair: str) -> list[str]:
    """The published files that `read` asks for."""
    return [f"{stem}.{language}" for stem in FILES.values() for language in pair.split("-")]


def read(corpus: Corpus, paths: Mapping[str, Path], pair: str) -> ParallelText:
    """The splits of the six files.

    Raises:
        QKNormError: two sides have different numbers of lines, or a file is not UTF-8.
    """
    splits = {}
    published = {}
    for split, stem in FILES.items():
        files = [paths[f"{stem}.{language}"] for language in pair.split("-")]
        source, target = (unescape(read_lines(file)) for file in files)
        if len(source) != len(target):
            raise QKNormError(
                f"{files[0]} has {len(source):,} lines and {files[1]} has {len(target):,}: these "
                "are not the two sides of one text"
            )
        pairs = list(zip(source, target, strict=True))
        published[split] = len(pairs)
        splits[split] = [both for both in pairs if all(both)]
    empty = sum(published.values()) - sum(map(len, splits.values()))
    return ParallelText(splits, Counts(**published), empty)
