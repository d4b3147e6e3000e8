"""BLEU, chrF and TER by sacreBLEU, each with the signature that reproduces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF, TER

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.text import read_lines
from qknorm_fairseq.tokenization import detokenize, tokenize, unescape

# sacreBLEU's own tokenizers for languages that write no spaces (those without a dependency).
BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char", "my": "char", "km": "char"}


@dataclass(frozen=True)
class Scores:
    """Corpus scores, in percent.

    Attributes:
        bleu_tok: BLEU over Moses tokens, as multi-bleu.perl counts it: what papers report.
        bleu, chrf, ter: on detokenized text, with sacreBLEU's defaults.
        signatures: for each of them, sacreBLEU's signature.
    """

    bleu_tok: float
    bleu: float
    chrf: float
    ter: float
    signatures: dict[str, str]


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, lang: str = "en", tokenized: bool
) -> Scores:
    """Score one reference per hypothesis.

    Args:
        lang: the target language, for Moses' rules and for BLEU where no spaces are written.
        tokenized: the lines are Moses tokens (as in IWSLT'15 and TED), escaped or not; otherwise
            they are text.

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
    tokens: tuple[Sequence[str], Sequence[str]]
    texts: tuple[Sequence[str], Sequence[str]]
    if tokenized:
        hypotheses, references = unescape(hypotheses), unescape(references)
        tokens = hypotheses, references
        texts = detokenize(hypotheses, lang), detokenize(references, lang)
    else:
        tokens = tokenize(hypotheses, lang), tokenize(references, lang)
        texts = hypotheses, references
    metrics = {
        # force: sacreBLEU warns of tokenized text, which is what is meant here. multi-bleu.perl
        # knows no smoothing: a text without any common 4-gram has 0.
        "bleu_tok": (BLEU(tokenize="none", force=True, smooth_method="none"), tokens),
        "bleu": (BLEU(tokenize=BLEU_TOKENIZERS.get(lang, "13a"), force=True), texts),
        "chrf": (CHRF(), texts),
        "ter": (TER(), texts),
    }
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for name, (metric, (hypothesis, reference)) in metrics.items():
        values[name] = metric.corpus_score(list(hypothesis), [list(reference)]).score
        signatures[name] = str(metric.get_signature())
    return Scores(**values, signatures=signatures)


def score_files(hyp: Path, ref: Path, *, lang: str = "en", tokenized: bool = False) -> Scores:
    """:func:`score` of two files, one sentence a line.

    Raises:
        QKNormError: a file is missing or not UTF-8, or the numbers of lines differ.
    """
    hypotheses, references = read_lines(hyp), read_lines(ref)
    if len(hypotheses) != len(references):
        raise QKNormError(
            f"{hyp} has {len(hypotheses)} lines and {ref} has {len(references)}: "
            "each hypothesis needs its reference on the same line"
        )
    return score(hypotheses, references, lang=lang, tokenized=tokenized)
