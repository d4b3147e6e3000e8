"""Parallel text made ready for fairseq: `qknorm prepare`.

A prepared folder holds

    train|valid|test.SRC-TGT.{SRC,TGT}.{bin,idx}, dict.{SRC,TGT}.txt   fairseq's binarized text
    sentencepiece.model                                                the joint subwords
    {valid,test}.{SRC,TGT}                                             the text as it was read
    qknorm.json                                                        L, counts, how it was made
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from qknorm_fairseq import corpus_folder
from qknorm_fairseq.corpora import SPLITS, VOCAB_SIZE, load_registry
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import new_directory, sha256, sole_maker, write_json, write_lines
from qknorm_fairseq.parallel_text import ParallelText, Say
from qknorm_fairseq.reading import Unreadable, read_json
from qknorm_fairseq.subwords import Subwords, train_subwords
from qknorm_fairseq.tokenization import MOSES, NONE, TOKENIZATIONS

DESCRIPTION = "qknorm.json"
SUBWORDS = "sentencepiece.model"
MOST_TRAINING_LINES = 500_000  # of the subwords: enough for stable merges, in bounded memory
L_PERCENTILE = 97.5  # Henry et al. 2020, section 3


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
            description = cls(**read_json(file))
        except FileNotFoundError:
            raise QKNormError(f"{file}: no such file; `qknorm prepare` makes it") from None
        except NotADirectoryError:
            raise QKNormError(f"{folder}: a file; name the folder that it is in") from None
        except (Unreadable, TypeError):
            description = None
        if description is None or description.tokenization not in TOKENIZATIONS:
            raise QKNormError(f"{file}: not written by this version of qknorm prepare")
        return description


def locate(data: Path, near: Path) -> Path | None:
    """The prepared folder that a run in the folder `near` calls `data`; None if it isn't here.

    A path that is not absolute was meant from where the run was trained: usually a folder above
    its own, with which it may have been carried elsewhere, or else the current one.
    """
    for folder in (*near.resolve().parents, Path.cwd()):
        if (folder / data / DESCRIPTION).is_file():
            return folder / data
    return None


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
    if not re.fullmatch(r"\w[\w.+-]*", corpus):
        raise QKNormError(f"no corpus {corpus!r}; a corpus is called as `qknorm fetch` calls it")
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
    for split, sides in files.items():
        for file in sides:
            _check_file(split, file)
    _check_languages(source_lang, target_lang)
    started = time.monotonic()
    texts = {
        split: ParallelText(
            split,
            files[split],
            moses=tokenization == MOSES,
            skip_empty=skip_empty,
            limit=limit if split == "train" else None,
            say=say,
        )
        for split in files
    }
    made_from: dict[str, object] = {
        "sha256": {split: [sha256(side) for side in files[split]] for split in files},
        "vocab_size": vocab_size,
        "limit": limit,
        "skip_empty": skip_empty,
    }
    with sole_maker(out):
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
        _mention_overlap(texts, say)

        with new_directory(out) as folder:
            train = texts["train"]
            step = -(-2 * train.count // MOST_TRAINING_LINES)
            sample = list(islice(train.lines(), 0, None, step))
            name = " and ".join(map(str, train.files))
            learned = train_subwords(sample, vocab_size, folder / SUBWORDS, name=name)
            del sample
            if learned < vocab_size:
                say(f"The text is too small for {vocab_size} subwords: {learned} learned")
            say(f"{learned} joint subwords learned ({time.monotonic() - started:.0f} s)")

            subwords = Subwords(folder / SUBWORDS)
            length = _binarize(texts, subwords, source_lang, target_lang, folder)
            for split in ("valid", "test"):
                if split in texts:
                    for number, language in enumerate((source_lang, target_lang)):
                        lines = list(chain.from_iterable(texts[split].side(number)))
                        write_lines(folder / f"{split}.{language}", lines)
            description = Description(
                source_lang=source_lang,
                target_lang=target_lang,
                length=length,
                vocab_size=learned,
                sentences={split: text.count for split, text in texts.items()},
                corpus=corpus,
                made_from=made_from,
                tokenization=tokenization,
            )
            write_json(folder / DESCRIPTION, asdict(description))
    counts = ", ".join(f"{count:,} {split}" for split, count in description.sentences.items())
    say(f"{out}: {counts} pairs, L = {length:g} ({time.monotonic() - started:.0f} s)")
    return description


def _check_file(split: str, file: Path) -> None:
    if not file.exists():
        raise QKNormError(f"{file}: no such file")
    if file.is_dir():
        raise QKNormError(f"{file}: a folder, where a file is needed (--{split})")
    if not file.is_file():  # a pipe, say
        raise QKNormError(f"{file}: no ordinary file, and it is read more than once; make it one")


def _check_languages(source_lang: str, target_lang: str) -> None:
    for language in (source_lang, target_lang):
        if not re.fullmatch(r"\w{1,20}", language):
            raise QKNormError(
                f"language code {language!r}: use letters, digits and underscores only, at most "
                "20; fairseq makes file names of it (give it with --source-lang and --target-lang)"
            )
    if source_lang == target_lang:
        raise QKNormError(
            f"both sides have the language code {source_lang!r}: tell them apart with "
            "--source-lang and --target-lang"
        )


def _mention_overlap(texts: Mapping[str, ParallelText], say: Say) -> None:
    """A test sentence that stands in the training text makes the scores too good."""
    sources = {
        split: list(chain.from_iterable(texts[split].side(0)))
        for split in ("valid", "test")
        if split in texts
    }
    wanted = set(chain.from_iterable(sources.values()))
    known = {line for part in texts["train"].side(0) for line in part if line in wanted}
    for split, lines in sources.items():
        if seen := sum(line in known for line in lines):
            say(f"Note: {seen:,} of {len(lines):,} {split} sources also stand in train")


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
    texts: Mapping[str, ParallelText],
    subwords: Subwords,
    source_lang: str,
    target_lang: str,
    folder: Path,
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

    lengths = array("L")
    for split, text in texts.items():
        for side, language in enumerate((source_lang, target_lang)):
            stem = folder / f"{split}.{source_lang}-{target_lang}.{language}"
            builder = indexed_dataset.make_builder(
                f"{stem}.bin", impl="mmap", vocab_size=len(dictionary)
            )
            for lines in text.side(side):
                for numbers in subwords.encode_numbers(lines):
                    builder.add_item(torch.IntTensor([indices[n] for n in numbers] + end))
                    if split == "train":
                        lengths.append(len(numbers))
            builder.finalize(f"{stem}.idx")
    return float(np.percentile(lengths, L_PERCENTILE))
