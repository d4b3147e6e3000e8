"""Is one system's score better by more than chance? Paired tests over a test set, by sacreBLEU.

Paired bootstrap resampling (Koehn 2004) and paired approximate randomization (Riezler & Maxwell
2005), with sacreBLEU's numbers of trials (1,000 and 10,000) and its seed: SACREBLEU_SEED, or
12345 where that is not set, so that the same files give the same figures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.significance import PairedTest, _bootstrap_resample

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.scores import (
    BOTH,
    as_scored,
    check_parallel,
    metric_of,
    read_parallel,
    too_long_for_ter,
)
from qknorm_fairseq.tokenization import check_language


@dataclass(frozen=True)
class Comparison:
    """Two systems on one test set.

    Attributes:
        metric: `bleu_tok`, `bleu`, `chrf` or `ter`, as in :class:`qknorm_fairseq.scores.Scores`.
        base, system: the systems' scores, in percent.
        difference: system - base. More is better, but for TER.
        interval: the 95% interval of the difference: between the 2.5th and the 97.5th percentile
            of what it is in sacreBLEU's bootstrap resamples.
        p_bootstrap, p_randomization: the two-sided p-values.
        sentences: of the test set.
        differing: of these, how many the metric does not count alike for the two systems.
        signatures: sacreBLEU's, for each of the two tests.
    """

    metric: str
    base: float
    system: float
    difference: float
    interval: tuple[float, float]
    p_bootstrap: float
    p_randomization: float
    sentences: int
    differing: int
    signatures: dict[str, str]


def compare(
    base: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    *,
    metric: str = "bleu",
    lang: str = "en",
    tokenized: bool = False,
    names: tuple[str, str, str] = ("the baseline", "the system", BOTH[1]),
) -> Comparison:
    """Compare two systems' hypotheses, line by line with the references.

    The p-values are sacreBLEU's, with a lower limit. It counts only the trials that differ by
    *more* than the systems do, so two identical ones would get the smallest p there is. Where the
    systems differ on k lines, though, two of the 2^k ways to swap these differ by just as much:
    approximate randomization is never under 2^(1 - k). Without any such line both p are 1.

    sacreBLEU gives an interval for each system, but none for their difference. Here it is that of
    the same resamples, the difference being computed for each from both systems' statistics.

    Args:
        metric, lang, tokenized: as for :func:`qknorm_fairseq.scores.score`.
        names: of the three texts, for messages.

    Raises:
        QKNormError: the numbers of lines differ, or there are none; there is no such metric;
            a line is too long for TER; SACREBLEU_SEED is no seed.
    """
    check_language(lang)
    _check_seed()
    for hypotheses in (base, system):
        check_parallel(hypotheses, references)
    measure = metric_of(metric, lang)
    *texts, reference = (
        list(as_scored(lines, metric, lang, tokenized=tokenized))
        for lines in (base, system, references)
    )
    for text, name in zip(texts, names[:2], strict=True):
        if metric == "ter" and (problem := too_long_for_ter(text, reference, (name, names[2]))):
            raise QKNormError(problem)
    statistics = [np.array(measure._extract_corpus_statistics(text, [reference])) for text in texts]
    # Counting takes longest: the tests are given what was counted instead of hypotheses.
    measure._extract_corpus_statistics = lambda counted, references: counted
    systems = list(zip(("base", "system"), statistics, strict=True))
    p, signatures = {}, {}
    for test in ("bs", "ar"):
        found_signatures, found = PairedTest(systems, {metric: measure}, None, test)()
        ((name, signature),) = found_signatures.items()
        first, second = found[name]
        p[test], signatures[test] = float(second.p_value), str(signature)
    differing = int((statistics[0] != statistics[1]).any(axis=1).sum())
    return Comparison(
        metric=metric,
        base=float(first.score),
        system=float(second.score),
        difference=float(second.score - first.score),
        interval=_interval(measure, *statistics),
        p_bootstrap=p["bs"] if differing else 1.0,
        p_randomization=max(p["ar"], min(1.0, 2.0 ** (1 - differing))),
        sentences=len(references),
        differing=differing,
        signatures={"bootstrap": signatures["bs"], "randomization": signatures["ar"]},
    )


def compare_files(
    base: Path,
    system: Path,
    ref: Path,
    *,
    metric: str = "bleu",
    lang: str = "en",
    tokenized: bool = False,
) -> Comparison:
    """:func:`compare` of files, one sentence a line.

    Raises:
        QKNormError: a file is missing or not UTF-8, the numbers of lines differ, or there are
            none; there is no such metric.
    """
    (first, references), (second, _) = read_parallel(base, ref), read_parallel(system, ref)
    return compare(
        first,
        second,
        references,
        metric=metric,
        lang=lang,
        tokenized=tokenized,
        names=(str(base), str(system), str(ref)),
    )


def _check_seed() -> None:
    seed = os.environ.get("SACREBLEU_SEED", "0")
    if not re.fullmatch(r"none|[0-9]{1,20}", seed, re.IGNORECASE):
        raise QKNormError(
            f"SACREBLEU_SEED={seed}: no seed; give a whole number from 0 on, or none, or unset it"
        )


class _Difference:
    """For sacreBLEU's resampling: scores both systems' statistics, side by side, in one number."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def _compute_score_from_stats(self, statistics: Any) -> float:
        base, system = np.split(statistics, 2)
        score = self.metric._compute_score_from_stats
        return float(score(system).score - score(base).score)


def _interval(metric: Any, base: Any, system: Any) -> tuple[float, float]:
    """The 95% interval of the difference, by the percentiles that sacreBLEU takes."""
    both = np.concatenate([base, system], axis=1)
    samples = np.sort(_bootstrap_resample(both, _Difference(metric), 1000)[1])
    outside = len(samples) // 40
    return float(samples[outside]), float(samples[-outside - 1])
