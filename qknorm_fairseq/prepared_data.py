"""Parallel text made ready for fairseq: `qknorm prepare`.

A prepared folder holds

    train|valid|test.SRC-TGT.{SRC,TGT}.{bin,idx}, dict.{SRC,TGT}.txt   fairseq's binarized text
    sentencepiece.model                                                the joint subwords
    {valid,test}.{SRC,TGT}                                             the text as it was read
    qknorm.json                                                        L, counts, how it was made
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from qknorm_fairseq import corpus_folder
from qknorm_fairseq.corpora import SPLITS, VOCAB_SIZE, load_registry
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import new_directory, sha256, write_json, write_lines
from qknorm_fairseq.subwords import Subwords, train_subwords
from qknorm_fairseq.text import read_lines
from qknorm_fairseq.tokenization import MOSES, NONE, TOKENIZATIONS, unescape

DESCRIPTION = "qknorm.json"
SUBWORDS = "sentencepiece.model"
CHUNK = 10_000  # lines to segment at a time
L_PERCENTILE = 97.5  # Henry et al. 2020, section 3

Pair = tuple[list[str], list[str]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Description:
    """`qknorm.json`: what a prepared folder holds, and what it was made from."""

    source_lang: str
    target_lang: str
    length: float  # L: the start of g is log2(L^2 - L)
    vocab_size: int
    sentences: dict[str, int]
    corpus: str
    made_from: dict[str, object]
    tokenization: str = NONE  # what the text is: see the module of that name

    @property
    def tokenized(self) -> bool:
        return self.tokenization == MOSES

    @classmethod
    def load(cls, folder: Path) -> Description:
        """
        Raises:
            QKNormError: the folder was not made by `qknorm prepare`.
        """
        file = folder / DESCRIPTION
        try:
            description = cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise QKNormError(f"{file}: no such file; `qknorm prepare` makes it") from None
        except (ValueError, TypeError):
            description = None
        if description is None or description.tokenization not in TOKENIZATIONS:
            raise QKNormError(f"{file}: not written by this version of qknorm prepare")
        return description


def prepare_corpus(
    corpus: str,
    pair: str,
    *,
    data_dir: Path,
    out: Path | None = None,
    vocab_size: int | None = None,
    limit: int | None = None,
    skip_empty: bool = False,
    force: bool = False,
    say: Say = print,
) -> Description:
    """:func:`prepare` for what `qknorm fetch` left in data_dir.

    Args:
        pair: "gl-en".
        out: by default data_dir/prepared/<corpus>/<pair>.
        vocab_size: by default the registry's for this corpus.

    Raises:
        QKNormError: the corpus was not fetched, or what `prepare` raises.
    """
    folder = data_dir / "corpora" / corpus / pair
    if not folder.is_dir():
        raise QKNormError(f"{folder}: not there yet; first: qknorm fetch {corpus} --pair {pair}")
    if vocab_size is None:
        known = load_registry().corpora
        vocab_size = known[corpus].vocab_size if corpus in known else VOCAB_SIZE
    source_lang, target_lang = pair.split("-")
    return prepare(
        {
            split: (folder / f"{split}.{source_lang}", folder / f"{split}.{target_lang}")
            for split in SPLITS
        },
        source_lang=source_lang,
        target_lang=target_lang,
        out=out or data_dir / "prepared" / corpus / pair,
        vocab_size=vocab_size,
        limit=limit,
        corpus=corpus,
        tokenization=corpus_folder.tokenization(folder),
        skip_empty=skip_empty,
        force=force,
        say=say,
    )


def prepare(
    files: Mapping[str, tuple[Path, Path]],
    *,
    source_lang: str,
    target_lang: str,
    out: Path,
    vocab_size: int = VOCAB_SIZE,
    limit: int | None = None,
    corpus: str = "own",
    tokenization: str = NONE,
    skip_empty: bool = False,
    force: bool = False,
    say: Say = print,
) -> Description:
    """Check, segment and binarize parallel files into the folder `out`.

    Args:
        files: for each of "train", "valid" and, if there is one, "test": source, target.
        vocab_size: the most joint subwords to learn.
        limit: use only the first so many training pairs.
        tokenization: what the files hold: text ("none"), or Moses tokens ("moses"), which are
            unescaped if need be.
        skip_empty: leave out pairs with an empty side instead of refusing them.
        force: replace a folder that was made from something else.
        say: receives one line for each step.

    Raises:
        QKNormError: bad input (the message names file and line), or `out` holds something else.
            Nothing is left half-written.
    """
    _check_languages(source_lang, target_lang)
    started = time.monotonic()
    pairs = {split: _read_pair(split, files[split], skip_empty, say) for split in files}
    if tokenization == MOSES:
        pairs = {split: (unescape(left), unescape(right)) for split, (left, right) in pairs.items()}
    made_from: dict[str, object] = {
        "sha256": {split: [sha256(side) for side in files[split]] for split in files},
        "vocab_size": vocab_size,
        "limit": limit,
        "skip_empty": skip_empty,
    }
    if out.exists():
        if not (out / DESCRIPTION).is_file():  # never somebody's other work, force or not
            raise QKNormError(
                f"{out}: already there, and not made by `qknorm prepare`; choose another --out"
            )
        if _is_made_from(out, made_from, source_lang, target_lang, tokenization):
            say(f"{out}: already prepared from these files")
            return Description.load(out)
        if not force:
            raise QKNormError(
                f"{out}: already there, but not from these files and options; "
                "choose another --out or replace it with --force"
            )
    if limit is not None:
        pairs["train"] = (pairs["train"][0][:limit], pairs["train"][1][:limit])
    _mention_overlap(pairs, say)

    with new_directory(out) as folder:
        train = pairs["train"]
        learned = train_subwords(train[0] + train[1], vocab_size, folder / SUBWORDS)
        if learned < vocab_size:
            say(f"The text is too small for {vocab_size} subwords: {learned} learned")
        say(f"{learned} joint subwords learned ({time.monotonic() - started:.0f} s)")

        subwords = Subwords(folder / SUBWORDS)
        length = _binarize(pairs, subwords, source_lang, target_lang, folder)
        for split in ("valid", "test"):
            if split in pairs:
                for language, lines in zip((source_lang, target_lang), pairs[split], strict=True):
                    write_lines(folder / f"{split}.{language}", lines)
        description = Description(
            source_lang=source_lang,
            target_lang=target_lang,
            length=length,
            vocab_size=learned,
            sentences={split: len(source) for split, (source, _) in pairs.items()},
            corpus=corpus,
            made_from=made_from,
            tokenization=tokenization,
        )
        write_json(folder / DESCRIPTION, asdict(description))
    counts = ", ".join(f"{count:,} {split}" for split, count in description.sentences.items())
    say(f"{out}: {counts} pairs, L = {length:g} ({time.monotonic() - started:.0f} s)")
    return description


def _check_languages(source_lang: str, target_lang: str) -> None:
    for language in (source_lang, target_lang):
        if not language or not all(c.isalnum() or c == "_" for c in language):
            raise QKNormError(
                f"language code {language!r}: use letters, digits and underscores only; fairseq "
                "makes file names of it (give it with --source-lang and --target-lang)"
            )
    if source_lang == target_lang:
        raise QKNormError(
            f"both sides have the language code {source_lang!r}: tell them apart with "
            "--source-lang and --target-lang"
        )


def _read_pair(split: str, files: tuple[Path, Path], skip_empty: bool, say: Say) -> Pair:
    """Both sides of a split, line by line; pairs that are empty on both sides left out."""
    source_file, target_file = files
    source, target = read_lines(source_file), read_lines(target_file)
    if len(source) != len(target):
        shorter, longer = sorted((source_file, target_file), key=lambda f: len(read_lines(f)))
        raise QKNormError(
            f"{source_file} has {len(source)} lines and {target_file} has {len(target)}: "
            f"from line {min(len(source), len(target)) + 1} on, {longer} has no counterpart in "
            f"{shorter}; parallel files need the same number of lines"
        )
    if not source:
        raise QKNormError(f"{source_file}: no lines at all in the {split} set")
    kept: Pair = ([], [])
    for number, (left, right) in enumerate(zip(source, target, strict=True), start=1):
        if left and right:
            kept[0].append(left)
            kept[1].append(right)
        elif (left or right) and not skip_empty:
            empty = target_file if left else source_file
            raise QKNormError(
                f"{empty}, line {number}: empty, while its counterpart is not; mend it, or leave "
                "such pairs out with --skip-empty"
            )
    if not kept[0]:
        raise QKNormError(f"{source_file}: nothing but empty lines")
    if len(kept[0]) < len(source):
        say(f"{split}: {len(source) - len(kept[0]):,} pairs with an empty side left out")
    return kept


def _mention_overlap(pairs: Mapping[str, Pair], say: Say) -> None:
    """A test sentence that stands in the training text makes the scores too good."""
    known = set(pairs["train"][0])
    for split in ("valid", "test"):
        if split in pairs:
            seen = sum(line in known for line in pairs[split][0])
            if seen:
                total = len(pairs[split][0])
                say(f"Note: {seen:,} of {total:,} {split} sources also stand in train")


def _is_made_from(
    out: Path,
    made_from: dict[str, object],
    source_lang: str,
    target_lang: str,
    tokenization: str,
) -> bool:
    try:
        found = Description.load(out)
    except QKNormError:
        return False
    same = (found.source_lang, found.target_lang) == (source_lang, target_lang)
    return same and (found.made_from, found.tokenization) == (made_from, tokenization)


def _binarize(
    pairs: Mapping[str, Pair], subwords: Subwords, source_lang: str, target_lang: str, folder: Path
) -> float:
    """Segment all splits and binarize them into `folder`; returns L.

    The files are byte for byte those of `fairseq-preprocess --joined-dictionary` (a test compares
    them). They are written by fairseq's own builder, but from the subwords' numbers: looking each
    piece up as text again, as that command does, takes most of the time.
    """
    import torch
    from fairseq.data import Dictionary, indexed_dataset

    for language in (source_lang, target_lang):
        subwords.write_dictionary(folder / f"dict.{language}.txt")
    dictionary = Dictionary.load(str(folder / f"dict.{source_lang}.txt"))
    indices = [dictionary.index(piece) for piece in subwords.pieces]
    end = [dictionary.eos()]

    lengths: list[int] = []
    for split, sides in pairs.items():
        for language, lines in zip((source_lang, target_lang), sides, strict=True):
            stem = folder / f"{split}.{source_lang}-{target_lang}.{language}"
            builder = indexed_dataset.make_builder(
                f"{stem}.bin", impl="mmap", vocab_size=len(dictionary)
            )
            for start in range(0, len(lines), CHUNK):
                for numbers in subwords.encode_numbers(lines[start : start + CHUNK]):
                    builder.add_item(torch.IntTensor([indices[n] for n in numbers] + end))
                    if split == "train":
                        lengths.append(len(numbers))
            builder.finalize(f"{stem}.idx")
    return float(np.percentile(lengths, L_PERCENTILE))
