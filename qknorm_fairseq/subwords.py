"""Joint byte-pair encoding by sentencepiece, and the fairseq dictionary that is its vocabulary."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import write_lines
from qknorm_fairseq.text import one_spaced

MOST_BYTES = 100_000  # of a line that is learned from
SPACE, RESERVED = "▁", "▅"  # sentencepiece has these for itself, and learns from no line with ▅


class Subwords:
    """A sentencepiece model: raw text to pieces and back.

    The text is not normalized beyond its white space, so that what a model learns to write is
    what the references say.
    """

    def __init__(self, file: Path) -> None:
        """
        Raises:
            QKNormError: there is no such file, or it is no sentencepiece model.
        """
        self.model = sentencepiece.SentencePieceProcessor()
        try:
            # Not by its name, which sentencepiece only takes as UTF-8.
            self.model.LoadFromSerializedProto(file.read_bytes())
        except (OSError, RuntimeError):
            raise QKNormError(f"{file}: missing, or not a sentencepiece model") from None
        self.pieces = self.model.id_to_piece(list(range(self.model.get_piece_size())))

    def encode(self, lines: Sequence[str]) -> list[list[str]]:
        """The pieces of each line; what the vocabulary lacks is `<unk>`, as fairseq writes it."""
        return [[self.pieces[number] for number in line] for line in self.encode_numbers(lines)]

    def encode_numbers(self, lines: Sequence[str]) -> list[list[int]]:
        """The same as places in `pieces`."""
        threads = os.cpu_count() or 1
        return self.model.encode(list(lines), num_threads=threads)  # type: ignore[no-any-return]

    def decode(self, pieces: Sequence[str]) -> str:
        return one_spaced("".join(pieces).replace(SPACE, " "))

    @property
    def vocabulary(self) -> list[str]:
        """All pieces that stand for text, in the model's own order."""
        special = (self.model.is_control, self.model.is_unknown)
        return [
            piece
            for number, piece in enumerate(self.pieces)
            if not any(is_special(number) for is_special in special)
        ]

    def write_dictionary(self, file: Path) -> None:
        """The vocabulary as a fairseq dictionary: every piece, in the model's own order.

        The counts mean nothing; fairseq adds its <s>, <pad>, </s> and <unk> itself.
        """
        write_lines(file, [f"{piece} 1" for piece in self.vocabulary])


def train_subwords(
    lines: Sequence[str], vocab_size: int, file: Path, *, name: str = "the text"
) -> int:
    """Train a BPE model on `lines` (both languages together) and write it to `file`.

    Args:
        name: of the text, for the message.

    Returns:
        the size of the vocabulary: less than `vocab_size` where the text is too small for it.

    Raises:
        QKNormError: the text has too little in it, or too many characters for `vocab_size`.
    """
    if not any(map(_is_learned_from, lines)):
        raise QKNormError(
            f"{name}: no line to learn subwords from: each is longer than {MOST_BYTES:,} bytes, "
            f"holds {RESERVED} (U+2585) or nothing but {SPACE} (U+2581); write one sentence a "
            "line, and leave these two characters out"
        )
    characters = len({character for line in lines for character in line})
    # Every character becomes a piece of its own, unless a large writing system would fill the
    # vocabulary with its rarest ones.
    coverage = 1.0 if characters < vocab_size // 4 else 0.9995
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=coverage,
            normalization_rule_name="identity",
            max_sentence_length=MOST_BYTES,
            num_threads=1,  # more don't speed up BPE; one gives the same model everywhere
            minloglevel=2,
        )
    except RuntimeError as error:
        possible = re.search(r"too high.*?<= (\d+)", str(error))
        if possible and int(possible[1]) > 4:
            return train_subwords(lines, int(possible[1]), file, name=name)
        reason = str(error).strip().rpartition("] ")[2]
        if needed := re.search(r"smaller than required_chars.*? vs (\d+)", reason):
            reason = f"at least {needed[1]} are needed (--vocab-size)"
        raise QKNormError(
            f"{name}: sentencepiece can't make {vocab_size} subwords of {len(lines)} lines with "
            f"{characters} different characters: {reason}"
        ) from None
    file.write_bytes(model.getvalue())
    return Subwords(file).model.get_piece_size()  # type: ignore[no-any-return]


def _is_learned_from(line: str) -> bool:
    text = set(line) - {SPACE, " "}
    return bool(text) and RESERVED not in text and len(line.encode()) <= MOST_BYTES
