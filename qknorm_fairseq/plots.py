"""Figures of trainings and of attention, as SVG and PNG files or inside an HTML page.

`histories` maps a model's name to the `train.jsonl` records of each of its finished seeds,
`unfinished` to those of the others, which are thin lines and count for no mean. Each model has a
colour of Okabe and Ito's (told apart by colour-blind readers) and a line style, marker or hatch of
its own (told apart in print). A seed is a thin line, the mean of several a thick one, drawn at the
updates that all of them have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qknorm_fairseq.figures import INK, styled
from qknorm_fairseq.figures import save as save
from qknorm_fairseq.figures import svg as svg
from qknorm_fairseq.growth import SHORT, TOKENS, Point

Records = Sequence[Mapping[str, Any]]
Histories = Mapping[str, Sequence[Records]]
Line = list[tuple[float, float]]
NOTHING: Histories = {}

# Okabe & Ito's palette without its yellow and black, which vanish on a light or a dark page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (9, 3)))
MARKERS = "os^Dv*"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")


def line_of(kind: str, value: str, records: Records) -> Line:
    """(update, value) in order, of the records of one kind that have it.

    A resumed training repeats updates: the last record of each is the one that counts.
    """
    points = {
        float(record["num_updates"]): float(record[value])
        for record in records
        if record.get("kind") == kind and value in record and "num_updates" in record
    }
    return sorted(points.items())


@styled
def training(histories: Histories, unfinished: Histories = NOTHING) -> Figure:
    """Training and validation loss over updates: without label smoothing, in bits a subword."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, kind, title in ((left, "train_inner", "Training"), (right, "valid", "Validation")):
        _draw(axes, histories, unfinished, partial(line_of, kind, "nll_loss"))
        axes.set_title(title)
    left.set_ylabel("loss (bits per subword)")
    _legend(figure, _models(histories, unfinished))
    return figure


@styled
def dev_bleu(histories: Histories, unfinished: Histories = NOTHING) -> Figure:
    """BLEU of the development set over updates, as measured while training."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    _draw(axes, histories, unfinished, partial(line_of, "valid", "bleu"))
    axes.set_ylabel("dev BLEU")
    _legend(figure, _models(histories, unfinished))
    return figure


@styled
def learning_rate(histories: Histories, unfinished: Histories = NOTHING) -> Figure:
    """The learning rate over updates."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    _draw(axes, histories, unfinished, partial(line_of, "train_inner", "lr"))
    axes.set_ylabel("learning rate")
    axes.ticklabel_format(axis="y", style="plain")
    _legend(figure, _models(histories, unfinished))
    return figure


@styled
def g(histories: Histories, unfinished: Histories = NOTHING) -> Figure | None:
    """The learned g of every attention over updates: a row for each model, a line for each layer.

    None where no record has one.
    """
    found = {
        model: _modules([*histories.get(model, ()), *unfinished.get(model, ())])
        for model in _models(histories, unfinished)
    }
    found = {model: modules for model, modules in found.items() if modules}
    if not found:
        return None
    kinds = [kind for kind in KINDS if any(m[2] == kind for ms in found.values() for m in ms)]
    layers = sorted({layer for modules in found.values() for _, layer, _ in modules})
    figure = Figure(
        figsize=(max(3.1 * len(kinds), 4), 0.5 + 2.7 * len(found)), layout="constrained"
    )
    grid = figure.subplots(len(found), len(kinds), squeeze=False, sharex=True, sharey=True)
    for row, (model, modules) in zip(grid, found.items(), strict=True):
        row[0].set_ylabel(f"g of {model}" if len(found) > 1 else "g")
        for axes, kind in zip(row, kinds, strict=True):
            axes.set_title(KINDS[kind])
            for name, layer, of_kind in modules:
                if of_kind == kind:
                    seeds, others = (
                        [line_of("valid", name, records) for records in of.get(model, ())]
                        for of in (histories, unfinished)
                    )
                    _draw_seeds(axes, seeds, others, f"{model}, {kind} {layer}", layer - 1)
            _axis_of_updates(axes)
            axes.label_outer()
    handles = [_handle(layer - 1) for layer in layers]
    _place_legend(figure, handles, [f"layer {layer}" for layer in layers])
    return figure


KINDS = {
    "encoder self": "Encoder self-attention",
    "decoder self": "Decoder self-attention",
    "decoder cross": "Cross-attention",
}


def _modules(seeds: Sequence[Records]) -> list[tuple[str, int, str]]:
    """(`g_encoder_1_self`, 1, "encoder self") for each attention that has a g."""
    names = {key for records in seeds for record in records for key in record}
    matches = [re.fullmatch(r"g_(encoder|decoder)_(\d+)_(self|cross)", name) for name in names]
    return sorted((m[0], int(m[2]), f"{m[1]} {m[3]}") for m in matches if m)


@styled
def bleu_by_length(
    series: Mapping[str, Sequence[Sequence[float | None]]],
    bins: Sequence[str],
    counts: Sequence[int],
) -> Figure:
    """BLEU of the sentences of each length: bars of the mean, a dot for each seed.

    Args:
        series: for each model, for each seed, BLEU in each bin; None where it has no sentence.
        bins: what the bins are called.
        counts: how many sentences each has.
    """
    figure = Figure(figsize=(max(6.4, 0.9 * len(bins) + 2), 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(series), 1)
    for number, (model, seeds) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        dots = [
            (place + shift, value)
            for seed in seeds
            for place, value in enumerate(seed)
            if value is not None
        ]
        places = sorted({x for x, _ in dots})
        of_place = [[value for x, value in dots if x == place] for place in places]
        axes.bar(
            places,
            [sum(values) / len(values) for values in of_place],
            width=0.92 * width,
            label=model,
            color=COLOURS[number % len(COLOURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            linewidth=0,
        )
        if len(seeds) > 1:
            axes.plot(*zip(*dots, strict=True), ".", color=INK, markersize=4)
        for place, values in zip(places, of_place, strict=True):
            if not any(values):  # no bar to be seen
                axes.text(place, 0, "0", ha="center", va="bottom")
    labels = [f"{name}\nn = {count:,}" for name, count in zip(bins, counts, strict=True)]
    axes.set_xticks(range(len(bins)), labels)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("BLEU")
    _place_legend(figure, axes.containers, list(series))
    return figure


@styled
def attention(statistics: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> Figure:
    """Entropy and saturation of every attention: a marker for the mean, a small one for each seed.

    Args:
        statistics: for each model, for each seed, for each module (`encoder_1_self`) `entropy`,
            as a share of its maximum, and the share of rows that are `saturated`.
    """
    present = {name for seeds in statistics.values() for seed in seeds for name in seed}
    modules = sorted(present, key=_module_order)
    figure = Figure(figsize=(8.4, 1.6 + 0.3 * len(modules)), layout="constrained")
    for axes, value, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("entropy", "saturated"),
        ("Entropy, as a share of its maximum", "Share of saturated rows"),
        strict=True,
    ):
        for number, (model, seeds) in enumerate(statistics.items()):
            shift = (number - (len(statistics) - 1) / 2) * min(0.22, 0.7 / len(statistics))
            look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": "none"}
            look["marker"] = MARKERS[number % len(MARKERS)]
            points = [
                (name, [seed[name][value] for seed in seeds if name in seed]) for name in modules
            ]
            known = [(modules.index(name) + shift, values) for name, values in points if values]
            if len(seeds) > 1:
                each = [(x, y) for y, values in known for x in values]
                axes.plot(*zip(*each, strict=True), **look, markersize=3, alpha=0.5)
            means = [(sum(values) / len(values), y) for y, values in known]
            axes.plot(*zip(*means, strict=True), **look, markersize=6, label=model)
        axes.set_title(title)
        most = 1 if value == "entropy" else max(max(line.get_xdata()) for line in axes.lines) or 1
        axes.set_xlim(-0.03 * most, 1.03 * most)
    names = [name.replace("_", " ") for name in modules]
    axes.set_yticks(range(len(modules)), names)
    axes.set_ylim(len(modules) - 0.5, -0.5)
    handles, labels = axes.get_legend_handles_labels()
    _place_legend(figure, handles, labels)
    return figure


@styled
def growth(points: Sequence[Point]) -> Figure:
    """Seconds and memory of an update over the length of sentences and the size of batches."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col")
    columns = (
        ("length", f"subwords a sentence ({TOKENS:,} a batch)"),
        ("sentences", f"sentences a batch ({SHORT} subwords each)"),
    )
    rows = (("seconds", "seconds an update"), ("peak_mb", "peak memory (MB)"))
    for column, (what, name) in enumerate(columns):
        for row, (value, title) in enumerate(rows):
            axes = grid[row][column]
            for look, variant in enumerate(dict.fromkeys(point.variant for point in points)):
                line = [p for p in points if p.variant == variant and p.growing == what]
                xs, ys = [getattr(p, what) for p in line], [getattr(p, value) for p in line]
                axes.plot(xs, ys, label=variant, marker="o", markersize=3, **_look(look))
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            if row:
                axes.set_xlabel(name)
                axes.set_xticks(xs, [f"{x:,}" for x in xs])
            if not column:
                axes.set_ylabel(title)
    handles, labels = grid[0][0].get_legend_handles_labels()
    _place_legend(figure, handles, labels)
    return figure


def _module_order(name: str) -> tuple[int, int]:
    side, layer, kind = name.split("_")
    return list(KINDS).index(f"{side} {kind}"), int(layer)


def _models(histories: Histories, unfinished: Histories) -> list[str]:
    return list(dict.fromkeys([*histories, *unfinished]))


def _draw(
    axes: Axes, histories: Histories, unfinished: Histories, line: Callable[[Records], Line]
) -> None:
    for number, model in enumerate(_models(histories, unfinished)):
        seeds, others = (
            [line(records) for records in of.get(model, ())] for of in (histories, unfinished)
        )
        _draw_seeds(axes, seeds, others, model, number)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes)
    _axis_of_updates(axes)


def _draw_seeds(
    axes: Axes, seeds: Sequence[Line], unfinished: Sequence[Line], label: str, look: int
) -> None:
    """A thin line for each seed and their mean; one finished seed alone is a thick line.

    The mean is of the finished ones only: it would end where the least of the others has come to.
    """
    lines, others = [line for line in seeds if line], [line for line in unfinished if line]
    thick = _look(look)
    thin: dict[str, Any] = {**thick, "linewidth": 0.7, "alpha": 0.55}
    for line in others:
        axes.plot(*zip(*line, strict=True), **thin, label=f"{label}: unfinished")
    if len(lines) > 1:
        for number, line in enumerate(lines, start=1):
            axes.plot(*zip(*line, strict=True), **thin, label=f"{label}: seed {number}")
        common = sorted(set.intersection(*({x for x, _ in line} for line in lines)))
        values = [dict(line) for line in lines]
        lines = [[(x, sum(value[x] for value in values) / len(values)) for x in common]]
    for line in lines:
        if line:
            marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(line) == 1 else {}
            axes.plot(*zip(*line, strict=True), **thick, **marker, label=label)


def _look(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.8,
    }


def _axis_of_updates(axes: Axes) -> None:
    axes.set_xlabel("updates")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _handle(look: int) -> Line2D:
    return Line2D([], [], **_look(look))


def _legend(figure: Figure, models: Sequence[str]) -> None:
    _place_legend(figure, [_handle(number) for number in range(len(models))], models)


def _place_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    columns = max(1, int(figure.get_figwidth() * 11 / (8 + max(map(len, labels), default=1))))
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=min(columns, len(labels) or 1),
        handlelength=3.2,
    )
