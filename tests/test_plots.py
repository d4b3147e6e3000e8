"""Figures: they show what they were given, and survive in a file and in a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from qknorm_fairseq import plots

SVG = "{http://www.w3.org/2000/svg}"


def records(*values: float, g: bool = False) -> list[dict[str, Any]]:
    """A train.jsonl: at each 100 updates a training and a validation record."""
    found: list[dict[str, Any]] = []
    for number, value in enumerate(values, start=1):
        at = {"num_updates": 100.0 * number}
        found.append({"kind": "train_inner", **at, "nll_loss": value, "loss": 99.0, "lr": value})
        found.append({"kind": "valid", **at, "nll_loss": value + 1, "bleu": value + 2})
        if g:
            found[-1] |= {
                "g_encoder_1_self": value + 3,
                "g_decoder_2_self": value + 4,
                "g_decoder_10_cross": value + 5,
            }
    return found


def lines(figure: Figure) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """(number of the axes, label): the points of a line."""
    return {
        (number, str(line.get_label())): [(float(x), float(y)) for x, y in line.get_xydata()]
        for number, axes in enumerate(figure.axes)
        for line in axes.lines
    }


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_the_records() -> None:
    histories = {"one": [records(5, 3, 2)], "two": [records(8, 7, 6)]}
    shown = lines(plots.training(histories))
    assert shown[0, "one"] == [(100, 5), (200, 3), (300, 2)]
    assert shown[1, "one"] == [(100, 6), (200, 4), (300, 3)]
    assert shown[0, "two"] == [(100, 8), (200, 7), (300, 6)]
    assert shown[1, "two"] == [(100, 9), (200, 8), (300, 7)]
    assert lines(plots.dev_bleu(histories))[0, "two"] == [(100, 10), (200, 9), (300, 8)]
    assert lines(plots.learning_rate(histories))[0, "one"] == [(100, 5), (200, 3), (300, 2)]
    for figure in (plots.training, plots.dev_bleu, plots.learning_rate):
        assert legend(figure(histories)) == ["one", "two"]


def test_a_resumed_training_counts_once_and_in_order() -> None:
    twice = [*records(5, 3, 2), *records(50, 30, 20)[2:4]]  # update 200 was done again
    shown = lines(plots.dev_bleu({"one": [twice]}))
    assert shown == {(0, "one"): [(100, 7), (200, 32), (300, 4)]}


def test_seeds_and_their_mean_where_all_have_one() -> None:
    figure = plots.dev_bleu({"one": [records(5, 3, 2), records(7, 9)]})
    assert lines(figure) == {
        (0, "one: seed 1"): [(100, 7), (200, 5), (300, 4)],
        (0, "one: seed 2"): [(100, 9), (200, 11)],
        (0, "one"): [(100, 8), (200, 8)],
    }
    thin, other, mean = figure.axes[0].lines
    assert thin.get_linewidth() == other.get_linewidth() < mean.get_linewidth()
    assert thin.get_color() == mean.get_color()


def test_a_run_that_is_not_finished_counts_for_no_mean() -> None:
    finished = {"one": [records(5, 3, 1), records(7, 9, 3)]}
    unfinished = {"one": [records(50)], "two": [records(8)]}
    figure = plots.dev_bleu(finished, unfinished)
    assert lines(figure) == {
        (0, "one: unfinished"): [(100, 52)],
        (0, "one: seed 1"): [(100, 7), (200, 5), (300, 3)],
        (0, "one: seed 2"): [(100, 9), (200, 11), (300, 5)],
        (0, "one"): [(100, 8), (200, 8), (300, 4)],
        (0, "two: unfinished"): [(100, 10)],
    }
    *thin, mean = [line for line in figure.axes[0].lines if "two" not in str(line.get_label())]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in thin)
    assert legend(figure) == ["one", "two"]
    g = plots.g({"one": [records(5, 3, g=True)]}, {"one": [records(5, g=True)]})
    assert g is not None
    assert lines(g)[0, "one, encoder self 1"] == [(100, 8), (200, 6)]


def test_models_differ_in_colour_and_in_line() -> None:
    figure = plots.dev_bleu({f"model {number}": [records(5, 3)] for number in range(5)})
    looks = figure.axes[0].lines
    assert len({line.get_color() for line in looks}) == 5
    assert len({str(line._dash_pattern) for line in looks}) == 5  # type: ignore[attr-defined]


def test_g_of_each_layer_and_nothing_without_g() -> None:
    without = records(5, 3)
    assert plots.g({"plain": [without]}) is None
    figure = plots.g({"plain": [without], "qknorm": [records(5, 3, g=True)]})
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Encoder self-attention", "Decoder self-attention", "Cross-attention"]
    assert lines(figure) == {
        (0, "qknorm, encoder self 1"): [(100, 8), (200, 6)],
        (1, "qknorm, decoder self 2"): [(100, 9), (200, 7)],
        (2, "qknorm, decoder cross 10"): [(100, 10), (200, 8)],
    }
    assert legend(figure) == ["layer 1", "layer 2", "layer 10"]


def test_what_was_not_recorded_is_said() -> None:
    nothing = [{"kind": "valid", "num_updates": 100.0, "nll_loss": 3.0}]
    figure = plots.dev_bleu({"one": [nothing]})
    assert [text.get_text() for text in figure.axes[0].texts] == ["not recorded"]


def test_bars_of_bleu_by_length() -> None:
    figure = plots.bleu_by_length(
        {"one": [[30, None, 10], [40, None, 14]], "two": [[20, 5, None]]},
        ["1-9", "10-19", "20-"],
        [70, 1, 1234],
    )
    axes = figure.axes[0]
    one, two = ([(bar.get_center()[0], bar.get_height()) for bar in c] for c in axes.containers)
    assert one == [(pytest.approx(-0.2), 35), (pytest.approx(1.8), 12)]
    assert two == [(pytest.approx(0.2), 20), (pytest.approx(1.2), 5)]
    dots = axes.lines[0].get_xydata().tolist()
    assert sorted(y for _, y in dots) == [10, 14, 30, 40]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1-9\nn = 70", "10-19\nn = 1", "20-\nn = 1,234"]
    assert legend(figure) == ["one", "two"]


def test_a_bleu_of_zero_is_written_where_no_bar_is_to_be_seen() -> None:
    figure = plots.bleu_by_length({"one": [[3, 0], [4, 0]]}, ["1-5", "6+"], [20, 30])
    assert [(text.get_text(), *text.get_position()) for text in figure.axes[0].texts] == [
        ("0", 1, 0)
    ]


def test_points_of_attention_statistics() -> None:
    def seed(value: float) -> dict[str, dict[str, float]]:
        names = ("decoder_1_cross", "encoder_10_self", "encoder_2_self", "decoder_1_self")
        return {
            name: {"entropy": value + number / 10, "saturated": value / 2}
            for number, name in enumerate(names)
        }

    figure = plots.attention({"one": [seed(0.2), seed(0.4)], "two": [seed(0.5)]})
    entropy, saturated = figure.axes
    names = [label.get_text() for label in entropy.get_yticklabels()]
    assert names == ["encoder 2 self", "encoder 10 self", "decoder 1 self", "decoder 1 cross"]
    each, mean, two = entropy.lines
    assert sorted(each.get_xdata()) == pytest.approx(
        sorted([0.4, 0.6, 0.3, 0.5, 0.5, 0.7, 0.2, 0.4])
    )
    assert list(mean.get_xdata()) == pytest.approx([0.5, 0.4, 0.6, 0.3])
    assert list(two.get_xdata()) == pytest.approx([0.7, 0.6, 0.8, 0.5])
    assert [round(y) for y in mean.get_ydata()] == [0, 1, 2, 3]
    assert list(saturated.lines[1].get_xdata()) == pytest.approx([0.15] * 4)
    assert legend(figure) == ["one", "two"]


def ids_and_references(svg: str) -> tuple[list[str], list[str]]:
    return re.findall(r'\bid="([^"]*)"', svg), re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)


def test_two_figures_share_no_id_in_one_page() -> None:
    histories = {"one": [records(5, 3, g=True)], "two": [records(8, 7)]}
    bars = plots.bleu_by_length({"one": [[3]], "two": [[4]]}, ["1-9"], [7])
    inlined = [plots.svg(plots.training(histories)), plots.svg(bars)]
    for text in inlined:
        assert text.startswith("<svg ")
        assert text.endswith("</svg>")
        ElementTree.fromstring(text)
        assert "<style" not in text  # it would be one of the whole page
        ids, references = ids_and_references(text)
        assert len(ids) == len(set(ids)) > 10
        targets = {"".join(each) for each in references}
        assert targets
        assert targets <= set(ids)
    assert not set(ids_and_references(inlined[0])[0]) & set(ids_and_references(inlined[1])[0])


def test_equal_figures_of_two_pairs_have_their_own_ids() -> None:
    """Learning rates that follow one schedule look the same."""
    history = [{"kind": "train_inner", "num_updates": n, "lr": n / 100} for n in (1, 2)]
    figure = plots.learning_rate({"model": [history]})
    first, second = (set(ids_and_references(plots.svg(figure, of))[0]) for of in ("gl-en", "sk-en"))
    assert first and not first & second


def test_an_inlined_figure_is_text_in_the_pages_colour_and_always_the_same() -> None:
    def draw() -> str:
        return plots.svg(plots.dev_bleu({"a model": [records(5, 3)]}), "dev <BLEU>")

    assert draw() == draw()
    root = ElementTree.fromstring(draw())
    assert root.get("aria-label") == "dev <BLEU>"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a model", "updates", "dev BLEU"} <= set(texts)
    assert "currentColor" in draw()
    assert plots.INK not in draw()
    assert "#ffffff" not in draw()  # no ground of its own


@pytest.mark.parametrize("name", ["</svg><script>alert(1)</script>", "$x^{$ & \\frac"])
def test_a_name_is_only_a_name(name: str) -> None:
    root = ElementTree.fromstring(plots.svg(plots.dev_bleu({name: [records(5, 3)]})))
    assert name in [element.text for element in root.iter(f"{SVG}text")]
    assert not [element for element in root.iter() if "script" in element.tag]


def test_files_are_written_both_or_none(tmp_path: Path) -> None:
    class Unwilling(Artist):
        def draw(self, renderer: Any) -> None:
            if "Agg" in type(renderer).__name__:
                raise RuntimeError("no")

    stem = tmp_path / "below" / "g0=1.5"
    figure = plots.dev_bleu({"one": [records(5, 3)]})
    plots.save(figure, stem)
    before = {file.name: file.read_bytes() for file in stem.parent.iterdir()}
    assert set(before) == {"g0=1.5.svg", "g0=1.5.png"}
    ElementTree.fromstring(before["g0=1.5.svg"])
    assert before["g0=1.5.png"].startswith(b"\x89PNG")
    other = plots.dev_bleu({"another": [records(50, 30)]})
    other.axes[0].add_artist(Unwilling())
    with pytest.raises(RuntimeError, match="no"):
        plots.save(other, stem)
    assert {file.name: file.read_bytes() for file in stem.parent.iterdir()} == before


def ink(text: str, folder: Path) -> np.ndarray:
    """Where there is ink in the bitmap of a text: a number for each column, ends trimmed."""
    figure = Figure(figsize=(4, 1))
    figure.text(0.5, 0.5, text, fontsize=30, ha="center", color="black")
    plots.save(figure, folder / "text")
    picture = matplotlib.image.imread(folder / "text.png")[..., 0]
    columns = (1 - picture).sum(axis=0)
    seen = np.flatnonzero(columns)
    return columns[seen[0] : seen[-1] + 1]


def test_arabic_is_joined_and_hebrew_runs_to_the_left_in_a_bitmap(tmp_path: Path) -> None:
    joined = ink("كتاب", tmp_path)
    apart = ink("\u200c".join("كتاب"), tmp_path)
    assert len(joined) < 0.8 * len(apart)  # letters that stand alone are wider
    assert (joined == 0).sum() < (apart == 0).sum()  # and have gaps between them
    wide_first = ink("שווווו", tmp_path)
    middle = len(wide_first) // 2
    gaps = wide_first == 0
    assert gaps[:middle].sum() > gaps[middle:].sum()  # the narrow letters are at the left


def test_a_vector_file_says_in_which_direction_a_text_runs(tmp_path: Path) -> None:
    """Otherwise a viewer puts what is neither Arabic nor Latin, like ▁, at the wrong end."""
    figure = Figure()
    axes = figure.subplots()
    axes.set_xticks([0, 1], ["▁في", "▁a"])
    axes.set_yticks([0], ["▁ספר"])
    for text in ("▁كتاب", "▁שלום", "▁casa"):
        axes.text(0.5, 0.5, text)

    def written() -> set[str | None]:
        plots.save(figure, tmp_path / "texts")
        root = ElementTree.fromstring((tmp_path / "texts.svg").read_bytes())
        return {element.text for element in root.iter(f"{SVG}text")}

    marked = {f"\u200f{text}\u200f" for text in ("▁في", "▁ספר", "▁كتاب", "▁שלום")}
    assert written() == {*marked, "▁a", "▁casa"}
    assert [text.get_text() for text in axes.texts] == ["▁كتاب", "▁שלום", "▁casa"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["▁في", "▁a"]
    assert written() == {*marked, "▁a", "▁casa"}  # marked once, however often it is saved


def test_the_name_at_an_axis_is_joined_too(tmp_path: Path) -> None:
    def picture(name: str) -> np.ndarray:
        figure = Figure(figsize=(4, 1))
        figure.add_axes((0.5, 0.1, 0.4, 0.8)).set_yticks([0], [name])
        plots.save(figure, tmp_path / "axis")
        return matplotlib.image.imread(tmp_path / "axis.png")

    assert not np.array_equal(picture("كتاب"), picture("\u200c".join("كتاب")))
