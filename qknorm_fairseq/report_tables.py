"""A summary's numbers as tables of text, which the terminal, Markdown and the page show alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qknorm_fairseq.seeds import LEVEL, Spread
from qknorm_fairseq.sharpness import Sharpness
from qknorm_fairseq.summary import (
    PAPER,
    PAPER_AVERAGE,
    Average,
    Difference,
    Group,
    Row,
    Unfinished,
)

NONE = "–"
NOTE = (
    f"A seed is better or worse where both the paired bootstrap and the approximate randomization "
    f"give p < {LEVEL} over the test set; p over the seeds is Welch's t-test's."
)


@dataclass(frozen=True)
class Table:
    """Text in rows; the first `left` columns are words, the others numbers. A note goes below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""


def of_group(group: Group) -> list[Table]:
    """Scores, significance over the test set, cost; those that have a row."""
    paper = any(row.paper is not None for row in group.rows)
    bases = {row.difference.base for row in group.rows if row.difference is not None}
    scores = Table(
        "Scores: mean ± standard deviation over the seeds",
        (
            *("model", "seeds", "tokenized BLEU", "BLEU", "chrF", "difference"),
            *(f"p < {LEVEL} on the test set", "p over seeds"),
            *(["paper's tokenized BLEU"] if paper else []),
        ),
        [
            [
                *(row.model, ", ".join(map(str, row.seeds))),
                *map(spread, (row.bleu_tok, row.bleu, row.chrf)),
                *_difference(row.difference, is_base=row.model in bases),
                *([f"{row.paper:.2f}" if row.paper is not None else NONE] if paper else []),
            ]
            for row in group.rows
        ],
        note=NOTE if bases else "",
    )
    against = f", against {', '.join(bases)}" if len(bases) == 1 else ""
    tests = Table(
        f"Tokenized BLEU over the test set, seed by seed{against}",
        (
            *("model", *([] if against else ["against"]), "seed", "difference", "95% interval"),
            *("p (bootstrap)", "p (randomization)"),
        ),
        [
            [
                *(row.model, *([] if against else [row.difference.base]), str(test.seed)),
                *(f"{test.difference:+.2f}", interval(test.interval)),
                *map(p_value, (test.p_bootstrap, test.p_randomization)),
            ]
            for row in group.rows
            if row.difference is not None
            for test in row.difference.tests
        ],
        left=2 if against else 3,
    )
    cost = Table(
        "Cost (mean over the seeds)",
        ("model", "parameters", "updates", "training", "tokens/s"),
        [[row.model, *_cost(row)] for row in group.rows],
    )
    return [table for table in (scores, tests, cost) if table.rows]


def of_attention(sharpness: Sequence[Sharpness]) -> list[Table]:
    """Entropy and saturated rows of each attention of the models beside their baselines'."""
    rows = []
    for one in sharpness:
        for name, own in one.modules.items():
            rows.append([name.replace("_", " "), one.model, *_sharp(own, one.base_modules[name])])
        rows.append(["mean", one.model, *_sharp(one.mean, one.base_mean)])
    table = Table(
        "Attention: entropy, as a share of its maximum, and rows with a weight over 0.99 "
        "(mean over the seeds)",
        (
            *("module", "model", "entropy", "baseline's entropy"),
            *("saturated rows", "baseline's saturated rows"),
        ),
        rows,
        left=2,
    )
    return [table] if rows else []


def attention_line(one: Sharpness, where: str = "") -> str:
    """What the attention of a model is beside its baseline's, in a sentence."""
    n = len(one.modules)
    return (
        f"Attention of {one.model} against {one.base}{where}: fewer saturated rows (one weight "
        f"over 0.99) in {one.fewer_saturated} of {n} modules, {one.mean['saturated']:.1%} against "
        f"{one.base_mean['saturated']:.1%} on average; higher entropy in {one.higher_entropy} of "
        f"{n}, {one.mean['entropy']:.2f} against {one.base_mean['entropy']:.2f} of its maximum"
    )


def of_averages(averages: Sequence[Average]) -> Table:
    paper = any(one.paper is not None for one in averages)
    return Table(
        "Average difference over pairs (tokenized BLEU)",
        ("model", "against", "corpora", "pairs", "difference", *(["paper"] if paper else [])),
        [
            [
                *(one.model, one.base, one.corpora, ", ".join(one.pairs)),
                f"{one.difference:+.3f}",
                *([f"{one.paper:+.3f}" if one.paper is not None else NONE] if paper else []),
            ]
            for one in averages
        ],
        left=4,
        note="; ".join(
            f"{one.model} and {one.base} have not finished the same seeds of "
            f"{', '.join(one.unequal)}: the difference there is that of the means of all"
            for one in averages
            if one.unequal
        ),
    )


def of_unfinished(unfinished: Sequence[Unfinished]) -> Table:
    return Table(
        "Runs without a score",
        ("run", "state"),
        [[one.folder, one.state] for one in unfinished],
        left=2,
    )


def seed_line(row: Row) -> str | None:
    """What the seeds say of a model, in a sentence."""
    d = row.difference
    if d is None:
        return None
    line = (
        f"{row.model} against {d.base}: {d.bleu_tok:+.2f} tokenized BLEU, {d.bleu:+.2f} BLEU, "
        f"{d.chrf:+.2f} chrF"
    )
    if d.welch_p is None or d.welch_interval is None:
        return f"{line}; no test over the seeds, which takes two on each side that vary"
    return (
        f"{line}; over the seeds, 95% interval {interval(d.welch_interval)}, "
        f"p = {p_value(d.welch_p)} (Welch's t-test, tokenized BLEU)"
    )


_OF_PAPER = {model: bleu for (_, _, model), bleu in PAPER.items()}
PAPER_LINE = (
    f"The paper reports {PAPER_AVERAGE:+.3f} BLEU on average over its five pairs at full size, and "
    f"for en-vi a tokenized BLEU of {_OF_PAPER['transformer_qknorm']} against "
    f"{_OF_PAPER['transformer_scalenorm']} of the baseline."
)


def spread(values: Spread) -> str:
    return f"{values.mean:.2f}" + (f" ± {values.sd:.2f}" if values.sd is not None else "")


def interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:+.2f} to {ends[1]:+.2f}"


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _difference(d: Difference | None, *, is_base: bool) -> tuple[str, str, str]:
    """The difference, in how many seeds it is significant over the test set, and p over seeds."""
    if d is None:
        return ("baseline" if is_base else "nothing to compare with", NONE, NONE)
    clear = [test for test in d.tests if max(test.p_bootstrap, test.p_randomization) < LEVEL]
    worse = sum(test.difference < 0 for test in clear)
    parts = [(len(clear) - worse, "better"), (worse, "worse")]
    counts = ", ".join(f"{n} {word}" for n, word in parts if n) or "none"
    return (
        f"{d.bleu_tok:+.2f}",
        f"{counts} of {len(d.tests)}" if d.tests else NONE,
        p_value(d.welch_p) if d.welch_p is not None else NONE,
    )


def _sharp(own: Mapping[str, float], base: Mapping[str, float]) -> list[str]:
    entropies = [f"{of['entropy']:.2f}" for of in (own, base)]
    return [*entropies, *(f"{of['saturated']:.1%}" for of in (own, base))]


def _cost(row: Row) -> list[str]:
    return [
        f"{row.params.mean:,.0f}",
        f"{row.updates.mean:,.0f}",
        duration(row.train_seconds.mean),
        f"{row.tokens_per_second.mean:,.0f}",
    ]
