"""The test set of a run, and what takes long to compute from it, kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qknorm_fairseq import prepared_data
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import sha256, write_json
from qknorm_fairseq.prepared_data import DESCRIPTION, Description
from qknorm_fairseq.reading import read_object
from qknorm_fairseq.results import Result
from qknorm_fairseq.text import read_lines

METRIC = "bleu_tok"  # what papers on these corpora report
CACHE = "comparisons.json"
# Words of the source sentence, from and to. Where a test set has fewer than LEAST in one, it is put
# together with its neighbour: BLEU of so few says nothing.
BINS = ((0, 5), (6, 10), (11, 15), (16, 20), (21, 30), (31, 40), (41, 10**9))
LEAST = 20


@dataclass(frozen=True)
class TestSet:
    """Where a run's test set is, and what it is."""

    source: Path
    references: Path
    description: Description

    @property
    def lang(self) -> str:
        return self.description.target_lang

    def lengths(self) -> list[int]:
        """Words of each source sentence."""
        return [len(line.split()) for line in read_lines(self.source)]

    def hypotheses(self, run: Result) -> Path:
        """What the model itself wrote: tokens, if it was trained on such."""
        name = "hyp.tok.txt" if self.description.tokenized else "hyp.detok.txt"
        return run.folder / name


class Missing:
    """What could not be computed or kept, and why: a line for all runs with the same reason."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)

    def add(self, what: str, run: Result, error: QKNormError) -> None:
        self.runs[f"no {what} for", str(error)][f"{run.model} seed {run.seed}"] = None

    def add_unkept(self, run: Result, error: OSError) -> None:
        reason = f"{error.strerror or error}; it is computed anew each time"
        what = "what takes long could not be kept in the folder of"
        self.runs[what, reason][f"{run.model} seed {run.seed}"] = None

    def lines(self) -> list[str]:
        return [f"{what} {', '.join(of)}: {why}" for (what, why), of in self.runs.items()]


@dataclass(frozen=True)
class Lengths:
    """BLEU by the words of the source sentence: for each model, for each seed, for each bin."""

    bins: list[str]
    sentences: list[int]
    bleu: dict[str, list[list[float]]]


def locate(run: Result) -> TestSet:
    """The test set that a run was scored on.

    Where it is looked for: see :func:`qknorm_fairseq.prepared_data.locate`.

    Raises:
        QKNormError: it isn't there (the runs were copied here, say), or has changed.
    """
    folder = prepared_data.locate(run.data, run.folder)
    if folder is None:
        raise QKNormError(f"{run.data}: its test set is not here")
    description = Description.load(folder)
    if read_object(run.folder / DESCRIPTION) != read_object(folder / DESCRIPTION):
        raise QKNormError(f"{run.data}: holds other data now than the run was trained on")
    source, references = (
        folder / f"test.{lang}" for lang in (description.source_lang, description.target_lang)
    )
    return TestSet(source, references, description)


def significance(
    run: Result, base: Result, where: TestSet, missing: Missing
) -> tuple[dict[str, Any], bool]:
    """The fields of :class:`qknorm_fairseq.significance.Comparison`, and whether they were known.

    Args:
        missing: hears if they can't be kept.

    Raises:
        QKNormError: hypotheses are missing, or the references are not those of the scores.
    """
    files = [where.hypotheses(base), where.hypotheses(run), where.references]

    def compute() -> dict[str, Any]:
        from qknorm_fairseq.significance import compare_files

        tokenized = where.description.tokenized
        return asdict(compare_files(*files, metric=METRIC, lang=where.lang, tokenized=tokenized))

    found, known = _kept(run, f"against {base.model} seed {base.seed}", files, compute, missing)
    for result, value in ((base, found["base"]), (run, found["system"])):
        if result.score is None or abs(result.score[METRIC] - value) > 0.005:
            raise QKNormError(
                f"{result.folder / 'score.json'}: says another BLEU than hypotheses and "
                f"{where.references} give ({value:.2f})"
            )
    return found, known


def bleu_by_length(run: Result, where: TestSet, missing: Missing) -> tuple[list[float], bool]:
    """BLEU over the sentences of each of the test set's bins, and if it was known.

    Args:
        missing: hears if it can't be kept.

    Raises:
        QKNormError: the run's hypotheses are missing, or too few.
    """
    hyp, ref = where.hypotheses(run), where.references

    def compute() -> list[float]:
        from qknorm_fairseq.scores import as_scored, metric_of, read_parallel

        form = {"tokenized": where.description.tokenized}
        hypotheses, references = (
            list(as_scored(lines, METRIC, where.lang, **form)) for lines in read_parallel(hyp, ref)
        )
        lengths, metric = where.lengths(), metric_of(METRIC, where.lang)
        scores = []
        for numbers in in_bins(lengths).values():
            some = [hypotheses[n] for n in numbers], [[references[n] for n in numbers]]
            scores.append(float(metric.corpus_score(*some).score))
        return scores

    found, known = _kept(run, "BLEU by length", [hyp, ref, where.source], compute, missing)
    return list(found), known


def lengths(
    finished: Mapping[str, Mapping[int, Result]], missing: Missing, say: Callable[[str], None]
) -> Lengths | None:
    """BLEU by length of all finished runs, by model and seed; None where there is none.

    The runs are of one pair, whose test set they share.
    """
    scores: dict[str, list[list[float]]] = {}
    bins: dict[str, list[int]] = {}
    for model, of_seed in finished.items():
        for run in of_seed.values():
            try:
                where = locate(run)
                found, known = bleu_by_length(run, where, missing)
                bins = bins or in_bins(where.lengths())
            except QKNormError as error:
                missing.add("BLEU by length", run, error)
                continue
            if not known:
                say(f"{run.title}: BLEU by length")
            scores.setdefault(model, []).append(found)
    if not scores:
        return None
    return Lengths(list(bins), list(map(len, bins.values())), scores)


def in_bins(lengths: Sequence[int]) -> dict[str, list[int]]:
    """{"1-5": the numbers of the sentences of so many words}, of BINS; LEAST or more in each.

    Only a test set of fewer has a smaller one. Bins without a sentence are not there.
    """
    bins: list[tuple[int, int, list[int]]] = []
    for low, high in BINS:
        numbers = [n for n, words in enumerate(lengths) if low <= words <= high]
        if bins and numbers and len(bins[-1][2]) < LEAST:
            low, _, before = bins.pop()
            numbers = before + numbers
        if numbers:
            bins.append((low, high, numbers))
    if len(bins) > 1 and len(bins[-1][2]) < LEAST:
        (low, _, before), (_, high, numbers) = bins[-2:]
        bins[-2:] = [(low, high, before + numbers)]
    return {
        f"{max(low, 1)}-{high}" if high < 10**9 else f"{low}+": numbers
        for low, high, numbers in bins
    }


def _kept(
    run: Result,
    what: str,
    files: Sequence[Path],
    compute: Callable[[], Any],
    missing: Missing,
) -> tuple[Any, bool]:
    """What was computed from files and kept in the run's folder; computed where they changed."""
    for file in files:
        if not file.is_file():
            raise QKNormError(f"{file}: no such file")
    depends = [
        *map(sha256, files),
        *(METRIC, version("sacrebleu"), str(BINS), LEAST, os.environ.get("SACREBLEU_SEED", "")),
    ]
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    cache = run.folder / CACHE
    try:
        known = dict(read_object(cache))
    except (QKNormError, OSError):  # damaged: it is only a copy
        known = {}
    entry = known.get(what)
    if isinstance(entry, dict) and entry.get("key") == key:
        return entry["value"], True
    value = compute()
    try:
        write_json(cache, known | {what: {"key": key, "value": value}})
    except OSError as error:  # costs time only
        missing.add_unkept(run, error)
    return value, False
