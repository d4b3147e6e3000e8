"""Runs put together: means over seeds, differences to a baseline, and what they can show.

BLEU in differences and tests is tokenized BLEU, which the paper reports.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qknorm_fairseq import test_set
from qknorm_fairseq.differences import differences
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.results import Result
from qknorm_fairseq.seeds import Spread, welch, what_they_show
from qknorm_fairseq.test_set import Lengths, Missing

# Henry et al. 2020: en-vi by the official repository's scoring of its published output.
PAPER = {
    ("iwslt15", "en-vi", "transformer_qknorm"): 33.24,
    ("iwslt15", "en-vi", "transformer_scalenorm"): 32.79,
}
FAIRSEQ, SCALENORM = "transformer", "transformer_scalenorm"
PAPER_CORPORA = ("iwslt15", "ted")  # of the five pairs, en-vi is from the first
PAPER_PAIRS = {"ar-en", "en-he", "en-vi", "gl-en", "sk-en"}
PAPER_AVERAGE = 0.928  # tokenized BLEU, over all of these


@dataclass(frozen=True)
class SeedTest:
    """Two runs of one seed, compared over the test set."""

    seed: int
    difference: float
    interval: tuple[float, float]
    p_bootstrap: float
    p_randomization: float
    signatures: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A model's mean minus the baseline's.

    Attributes:
        tests: for each seed that both have, as far as the test set is there.
        welch_p, welch_interval: Welch's t-test on the seeds' BLEU and the 95% interval of the
            difference by it; None with fewer than two seeds on a side, or where none varies.
    """

    base: str
    bleu_tok: float
    bleu: float
    chrf: float
    tests: list[SeedTest]
    welch_p: float | None
    welch_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """A model on a pair, over its finished seeds."""

    model: str
    seeds: list[int]
    bleu_tok: Spread
    bleu: Spread
    chrf: Spread
    params: Spread
    updates: Spread
    train_seconds: Spread
    tokens_per_second: Spread
    paper: float | None
    difference: Difference | None
    signatures: dict[str, str]
    commands: list[str]
    flags: list[str]


@dataclass(frozen=True)
class Group:
    """All models on one pair of one corpus."""

    corpus: str
    pair: str
    test_sentences: int | None
    rows: list[Row]
    lengths: Lengths | None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.pair}, {self.corpus}"


@dataclass(frozen=True)
class Average:
    """The mean over pairs of a model's differences to the baseline.

    Attributes:
        unequal: the pairs where the two have not finished the same seeds.
        paper: only where the pairs are the paper's five.
    """

    corpora: str
    model: str
    base: str
    pairs: list[str]
    difference: float
    unequal: list[str]
    paper: float | None


@dataclass(frozen=True)
class Unfinished:
    """A run without a score, or without a folder though others let expect one."""

    folder: str
    corpus: str
    pair: str
    model: str
    seed: int
    state: str


@dataclass(frozen=True)
class Summary:
    groups: list[Group]
    averages: list[Average]
    unfinished: list[Unfinished]
    notes: list[str]


def summarize(
    results: Sequence[Result], runs: Path, *, base: str | None, say: Callable[[str], None]
) -> Summary:
    """
    Args:
        runs: the folder they are in.
        base: the model to compare with; None chooses for each model: transformer_scalenorm of
            the same size (fairseq's transformer: the only transformer_scalenorm there is),
            otherwise the first model.
        say: hears of each comparison that takes a while.

    Raises:
        QKNormError: no run is of the model `base`.
    """
    models = sorted({result.model for result in results})
    if base is not None and base not in models:
        raise QKNormError(f"--base {base}: no run of that model; there is {', '.join(models)}")
    by_pair: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_pair[result.corpus, result.pair].append(result)
    groups = [_group(corpus, pair, own, base, say) for (corpus, pair), own in by_pair.items()]
    unfinished = [
        Unfinished(
            str(result.folder.relative_to(runs)),
            *(result.corpus, result.pair, result.model, result.seed),
            result.state,
        )
        for result in results
        if result.score is None
    ]
    for own in by_pair.values():
        unfinished += _without_folder(own, runs)
    unfinished.sort(key=lambda run: (run.corpus, run.pair, run.model, run.seed))
    counts = [len(row.seeds) for group in groups for row in group.rows]
    notes = [what_they_show(counts)] if counts else []
    return Summary(groups, averages(groups), unfinished, notes)


def _without_folder(results: Sequence[Result], runs: Path) -> list[Unfinished]:
    """The seeds that some models of a pair have a folder for, and others not."""
    seeds = sorted({result.seed for result in results})
    there = {(result.model, result.seed) for result in results}
    first = {result.model: result for result in reversed(results)}
    return [
        Unfinished(
            str(like.folder.relative_to(runs).parent / f"seed{seed}"),
            *(like.corpus, like.pair, model, seed),
            "missing: no folder, though another model has this seed",
        )
        for model, like in first.items()
        for seed in seeds
        if (model, seed) not in there
    ]


def baseline_of(model: str, models: Sequence[str], wanted: str | None) -> str | None:
    """What a model is compared with; None for the baseline itself, and where there is none."""
    size = model.partition("+")[0].removeprefix("transformer")
    for kind in ("_qknorm", "_scalenorm"):
        size = size.removeprefix(kind)
    scalenorm = f"{SCALENORM}{size}"
    there = [name for name in models if name.startswith(SCALENORM) and "+" not in name]
    if scalenorm not in models and model.partition("+")[0] == FAIRSEQ and len(there) == 1:
        scalenorm = there[0]  # the name of fairseq's own says nothing of its size
    base = wanted or (scalenorm if scalenorm in models else models[0])
    return base if base in models and base != model else None


def _group(
    corpus: str,
    pair: str,
    results: Sequence[Result],
    wanted: str | None,
    say: Callable[[str], None],
) -> Group:
    finished: dict[str, dict[int, Result]] = defaultdict(dict)
    missing = Missing()
    for result in results:
        if result.score is not None:
            finished[result.model][result.seed] = result
    models, notes = list(finished), []
    if wanted is not None and models and wanted not in models:
        notes.append(f"no finished run of {wanted}: nothing to compare with")
    rows = []
    for model, of_seed in finished.items():
        base = baseline_of(model, models, wanted)
        difference = None
        if base is not None:
            difference = _difference(of_seed, finished[base], missing, say)
            notes += _seeds_of_one_only(of_seed, finished[base])
        rows.append(_row(corpus, pair, of_seed, finished[base or model], difference))
    rows.sort(key=lambda row: row.difference is not None)  # baselines first
    counts = sorted({int(r.score["test_sentences"]) for r in results if r.score is not None})
    if len(counts) > 1:
        notes.append(f"the runs were scored on test sets of {counts} sentences: not comparable")
    notes += _signatures_that_differ(results)
    lengths = test_set.lengths(finished, missing, say)
    notes = [*dict.fromkeys(notes), *missing.lines()]
    return Group(corpus, pair, counts[0] if counts else None, rows, lengths, notes)


def _signatures_that_differ(results: Sequence[Result]) -> list[str]:
    """A line for each metric that not all runs were scored by in the same way."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in results:
        for metric, signature in (run.score or {}).get("signatures", {}).items():
            found[metric][str(signature)].append(f"{run.model} seed {run.seed}")
    return [
        f"{metric}: not all runs were scored in the same way: "
        + "; ".join(f"{signature} for {', '.join(runs)}" for signature, runs in of.items())
        for metric, of in found.items()
        if len(of) > 1 and metric != "ter"  # which is not shown here
    ]


def _row(
    corpus: str,
    pair: str,
    of_seed: Mapping[int, Result],
    base: Mapping[int, Result],
    difference: Difference | None,
) -> Row:
    first = next(iter(of_seed.values()))
    flags: dict[str, list[int]] = defaultdict(list)
    for seed, run in of_seed.items():
        # A baseline's seeds are compared among themselves.
        like = first if base is of_seed else base.get(seed, next(iter(base.values())))
        for what in differences(run, like):
            flags[what].append(seed)
    return Row(
        model=first.model,
        seeds=list(of_seed),
        **{key: Spread.of(_values(of_seed, key)) for key in SPREADS},
        paper=PAPER.get((corpus, pair, first.model)),
        difference=difference,
        signatures=dict((first.score or {})["signatures"]),
        commands=_commands(of_seed),
        flags=[
            what if len(seeds) == len(of_seed) else f"{what} (seed {_list(seeds)})"
            for what, seeds in flags.items()
        ],
    )


SPREADS = (
    *("bleu_tok", "bleu", "chrf", "params", "updates"),
    *("train_seconds", "tokens_per_second"),
)


def _values(of_seed: Mapping[int, Result], key: str) -> list[float]:
    return [float(run.score[key]) for run in of_seed.values() if run.score is not None]


def _seeds_of_one_only(of_seed: Mapping[int, Result], base: Mapping[int, Result]) -> list[str]:
    model, name = (next(iter(runs.values())).model for runs in (of_seed, base))
    return [
        f"seed {_list(only)}: finished with {one}, but not with {other}; "
        "the difference is that of the means of all finished seeds"
        for one, other, only in (
            (model, name, sorted(of_seed.keys() - base.keys())),
            (name, model, sorted(base.keys() - of_seed.keys())),
        )
        if only
    ]


def _difference(
    of_seed: Mapping[int, Result],
    base: Mapping[int, Result],
    missing: Missing,
    say: Callable[[str], None],
) -> Difference:
    name = next(iter(base.values())).model
    tests = []
    for seed in sorted(of_seed.keys() & base.keys()):
        run = of_seed[seed]
        try:
            found, known = test_set.significance(run, base[seed], test_set.locate(run), missing)
        except QKNormError as error:
            missing.add("significance over the test set", run, error)
            continue
        if not known:
            say(f"{run.title} against {name}: p = {found['p_bootstrap']:.3f}")
        low, high = found["interval"]
        tests.append(
            SeedTest(
                *(seed, found["difference"], (low, high)),
                *(found["p_bootstrap"], found["p_randomization"], found["signatures"]),
            )
        )
    values = {
        key: (_values(of_seed, key), _values(base, key)) for key in ("bleu_tok", "bleu", "chrf")
    }
    bleu_tok, bleu, chrf = (statistics.fmean(a) - statistics.fmean(b) for a, b in values.values())
    return Difference(name, bleu_tok, bleu, chrf, tests, *welch(*values["bleu_tok"]))


def averages(groups: Sequence[Group]) -> list[Average]:
    """Over at least two pairs; the paper's two corpora count as one, all others by themselves."""
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    unequal: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for group in groups:
        paper = group.corpus in PAPER_CORPORA
        corpora = " and ".join(PAPER_CORPORA) if paper else group.corpus
        seeds = {row.model: row.seeds for row in group.rows}
        for row in group.rows:
            if row.difference is not None:
                key = corpora, row.model, row.difference.base
                found[key][group.pair] = row.difference.bleu_tok
                if set(row.seeds) != set(seeds[row.difference.base]):
                    unequal[key].append(group.pair)
    return [
        Average(
            *(corpora, model, base, list(pairs), statistics.fmean(pairs.values())),
            unequal=unequal[corpora, model, base],
            paper=PAPER_AVERAGE
            if (model, base) == ("transformer_qknorm", "transformer_scalenorm")
            and corpora == " and ".join(PAPER_CORPORA)
            and set(pairs) == PAPER_PAIRS
            else None,
        )
        for (corpora, model, base), pairs in found.items()
        if len(pairs) > 1
    ]


def _commands(of_seed: Mapping[int, Result]) -> list[str]:
    """What reproduces the runs: one command where they differ in the seed alone."""
    commands = {seed: run.command for seed, run in of_seed.items() if run.command}
    texts = {c.replace(f"common.seed={seed}", "common.seed=*") for seed, c in commands.items()}
    if len(texts) == 1 and "common.seed=*" in (text := texts.pop()):
        return [text.replace("=*", "=" + ",".join(map(str, commands)))]
    return list(dict.fromkeys(commands.values()))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
