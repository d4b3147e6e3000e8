"""BLEU, chrF and TER by sacreBLEU, each with the signature that reproduces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.text import read_lines
from qknorm_fairseq.tokenization import check_language, detokenize, tokenize, unescape

# sacreBLEU's own tokenizers for languages that write no spaces (those without a dependency).
BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "my": "char", "km": "char"}


# Of a line that differs from its reference. TER looks for phrases that were moved: for up to 2 s in
# a line of 100 words, 9 s in one of 300, 14 s in one of 400.
MOST_WORDS_FOR_TER = 300

BOTH = ("the hypotheses", "the references")


@dataclass(frozen=True)
class Scores:
    """Corpus scores, in percent.

    Attributes:
        bleu_tok: BLEU over Moses tokens, as multi-bleu.perl counts it: what papers report.
        bleu, chrf, ter: on detokenized text, with sacreBLEU's defaults. There is no TER (None)
            where a line is too long for it.
        signatures: for each that there is, sacreBLEU's signature.
    """

    bleu_tok: float
    bleu: float
    chrf: float
    ter: float | None
    signatures: dict[str, str]


METRICS = ("bleu_tok", "bleu", "chrf", "ter")


def metric_of(name: str, lang: str) -> Metric:
    """sacreBLEU's metric for one of METRICS.

    Raises:
        QKNormError: there is no such metric.
    """
    if name == "bleu_tok":
        # force: sacreBLEU warns of tokenized text, which is what is meant here. multi-bleu.perl
        # knows no smoothing: a text without any common 4-gram has 0.
        return BLEU(tokenize="none", force=True, smooth_method="none")
    if name == "bleu":
        return BLEU(tokenize=BLEU_TOKENIZERS.get(lang, "13a"), force=True)
    if name == "chrf":
        return CHRF()
    if name == "ter":
        return TER()
    raise QKNormError(f"no metric {name!r}; there is {', '.join(METRICS)}")


def as_tokens(lines: Sequence[str], lang: str, *, tokenized: bool) -> Sequence[str]:
    """What tokenized BLEU is counted over: Moses tokens, nothing escaped."""
    return unescape(lines) if tokenized else tokenize(lines, lang)


def as_text(lines: Sequence[str], lang: str, *, tokenized: bool) -> Sequence[str]:
    """What all other metrics read."""
    return detokenize(unescape(lines), lang) if tokenized else lines


def as_scored(lines: Sequence[str], metric: str, lang: str, *, tokenized: bool) -> Sequence[str]:
    """Hypotheses or references as a metric reads them."""
    form = as_tokens if metric == "bleu_tok" else as_text
    return form(lines, lang, tokenized=tokenized)


def check_parallel(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """
    Raises:
        QKNormError: the numbers of lines differ, or there are none.
    """
    if len(hypotheses) != len(references):
        raise QKNormError(
            f"{len(hypotheses)} hypotheses, but {len(references)} references: "
            "each needs its counterpart on the same line"
        )
    if not references:
        raise QKNormError("nothing to score: no lines")


def too_long_for_ter(
    hypotheses: Sequence[str], references: Sequence[str], names: tuple[str, str] = BOTH
) -> str | None:
    """The first line that TER is not counted of, and why; None if there is none.

    Args:
        names: of the two texts, for the message.
    """
    for number, lines in enumerate(zip(hypotheses, references, strict=True), start=1):
        words = [line.split() for line in lines]
        if words[0] != words[1]:
            for name, side in zip(names, words, strict=True):
                if len(side) > MOST_WORDS_FOR_TER:
                    return (
                        f"{name}, line {number}: {len(side):,} words, and TER takes too long over "
                        f"more than {MOST_WORDS_FOR_TER}; write one sentence a line"
                    )
    return None


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lang: str = "en",
    tokenized: bool,
    names: tuple[str, str] = BOTH,
    say: Callable[[str], None] = print,
) -> Scores:
    """Score one reference per hypothesis.

    Args:
        lang: the target language, for Moses' rules and for BLEU where no spaces are written.
        tokenized: the lines are Moses tokens (as in IWSLT'15 and TED), escaped or not; otherwise
            they are text.
        names: of the two texts, for messages.
        say: hears why there is no TER, if so.

    Raises:
        QKNormError: the numbers of lines differ, or there are none; `lang` is no code.
    """
    check_language(lang)
    check_parallel(hypotheses, references)
    both = (hypotheses, references)
    tokens = [as_tokens(lines, lang, tokenized=tokenized) for lines in both]
    texts = [as_text(lines, lang, tokenized=tokenized) for lines in both]
    values: dict[str, Any] = {}
    signatures: dict[str, str] = {}
    for name in METRICS:
        metric = metric_of(name, lang)
        hypothesis, reference = tokens if name == "bleu_tok" else texts
        if name == "ter" and (problem := too_long_for_ter(hypothesis, reference, names)):
            say(f"no TER: {problem}")
            values[name] = None
            continue
        values[name] = metric.corpus_score(list(hypothesis), [list(reference)]).score
        signatures[name] = str(metric.get_signature())
    return Scores(**values, signatures=signatures)


def score_files(
    hyp: Path,
    ref: Path,
    *,
    lang: str = "en",
    tokenized: bool = False,
    say: Callable[[str], None] = print,
) -> Scores:
    """:func:`score` of two files, one sentence a line.

    Raises:
        QKNormError: a file is missing or not UTF-8, or the numbers of lines differ.
    """
    hypotheses, references = read_parallel(hyp, ref)
    names = (str(hyp), str(ref))
    return score(hypotheses, references, lang=lang, tokenized=tokenized, names=names, say=say)


def read_parallel(hyp: Path, ref: Path) -> tuple[list[str], list[str]]:
    """The lines of hypotheses and references.

    Raises:
        QKNormError: a file is missing, not UTF-8 or empty, or the numbers of lines differ.
    """
    hypotheses, references = read_lines(hyp), read_lines(ref)
    if len(hypotheses) != len(references):
        raise QKNormError(
            f"{hyp} has {len(hypotheses)} lines and {ref} has {len(references)}: "
            "each hypothesis needs its reference on the same line"
        )
    if not references:
        raise QKNormError(f"{ref}: nothing to score: no lines")
    return hypotheses, references
