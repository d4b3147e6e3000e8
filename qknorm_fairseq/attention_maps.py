"""Which subwords attend to which, in one sentence and its translation: `qknorm attention`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fairseq import utils
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from qknorm_fairseq.attention_weights import AttentionRecorder, pair_dataset
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.figures import styled, without_controls
from qknorm_fairseq.files import write_text
from qknorm_fairseq.text import one_spaced
from qknorm_fairseq.tokenization import tokenize
from qknorm_fairseq.translator import Translator

MOST_SUBWORDS = 120  # of one side: more can't be read in a picture
KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
}
SCALE = 10_000  # the page has its weights as whole numbers, of this many parts

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AttentionMaps:
    """All attention weights of a model that reads a source and writes a target.

    Attributes:
        source: S subwords, the last one </s>.
        target: T subwords, the last one </s>. The decoder's row t is for the query that writes
            target[t]; what it has read by then is </s>, target[0], ... target[t-1].
        weights: for each kind, layer after layer, H x T x S (self-attention: H x S x S, H x T x T).
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: dict[str, list[Weights]]

    def labels(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the rows (queries) and the columns (keys) stand for."""
        if kind == "encoder":
            return self.source, self.source
        if kind == "decoder":
            return self.target, (self.target[-1], *self.target[:-1])
        return self.target, self.source

    def chosen(self, kind: str, layer: int | None, head: int | None) -> tuple[int, list[int]]:
        """The layer (the last one, if none is named) and the heads (all), numbered from 1.

        Raises:
            LookupError: there is no such layer or head; the message says what there is.
        """
        layers = self.weights[kind]
        if not layers:
            there = ", ".join(other for other, weights in self.weights.items() if weights)
            raise LookupError(f"no attention of the kind {kind!r} in this model: there is {there}")
        layer = len(layers) if layer is None else layer
        if not 1 <= layer <= len(layers):
            raise LookupError(f"layer {layer}: the {kind} attention has layers 1 to {len(layers)}")
        heads = len(layers[layer - 1])
        if head is not None and not 1 <= head <= heads:
            raise LookupError(f"head {head}: layer {layer} has heads 1 to {heads}")
        return layer, list(range(1, heads + 1)) if head is None else [head]


def attend(translator: Translator, source: str, target: str | None = None) -> AttentionMaps:
    """The weights for one sentence and its translation.

    Args:
        translator: the model.
        source, target: text; without a target it is the model's own translation.

    Raises:
        QKNormError: a text is empty or too long.
    """
    tokenized, languages = translator.description.tokenized, translator.description
    pieces = _pieces(translator, "source", source, languages.source_lang if tokenized else None)
    dictionary = translator.task.source_dictionary
    source_row = torch.tensor([*map(dictionary.index, pieces), dictionary.eos()])
    dictionary = translator.task.target_dictionary
    if target is None:
        target_row = _translation(translator, source_row)
    else:
        given = _pieces(translator, "target", target, languages.target_lang if tokenized else None)
        target_row = torch.tensor([*map(dictionary.index, given), dictionary.eos()])
    dataset = pair_dataset(translator.task, [source_row], [target_row])
    batch = _on_device(translator, dataset.collater([dataset[0]]))
    with torch.inference_mode(), AttentionRecorder(translator.models[0]) as recorder:
        translator.models[0](**batch["net_input"])
    weights: dict[str, list[Weights]] = {kind: [] for kind in KINDS}
    for name, each in recorder.weights.items():
        side, _, of = name.split("_")
        weights["cross" if of == "cross" else side].append(each[:, 0].cpu().numpy())
    return AttentionMaps(
        tuple(translator.task.source_dictionary[index] for index in source_row.tolist()),
        tuple(dictionary[index] for index in target_row.tolist()),
        weights,
    )


def _pieces(translator: Translator, what: str, text: str, moses_lang: str | None) -> list[str]:
    text = one_spaced(text)
    if not text:
        raise QKNormError(f"the {what} is empty: give it a sentence")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QKNormError(f"the {what} is not valid UTF-8") from None
    if moses_lang:  # the model reads tokens
        text = tokenize([text], moses_lang)[0]
    pieces = translator.subwords.encode([text])[0]
    most = min(MOST_SUBWORDS, translator.longest - 1)
    if len(pieces) > most:
        raise QKNormError(
            f"the {what} has {len(pieces)} subwords, and a map has room for {most}: "
            "give a shorter sentence"
        )
    return pieces


def _translation(translator: Translator, source: torch.Tensor) -> torch.Tensor:
    """The best hypothesis, a row of indices that ends with </s>."""
    dataset = translator.task.build_dataset_for_inference([source], [len(source)])
    batch = _on_device(translator, dataset.collater([dataset[0]]))
    hypotheses = translator.task.inference_step(translator.generator, translator.models, batch)
    best: torch.Tensor = hypotheses[0][0]["tokens"].cpu()
    return best


def _on_device(translator: Translator, batch: dict[str, Any]) -> dict[str, Any]:
    return utils.move_to_cuda(batch) if translator.device.type == "cuda" else batch  # type: ignore[no-any-return]


def as_json(maps: AttentionMaps, kind: str, layer: int, heads: Sequence[int]) -> str:
    """The chosen maps with every number: `weights[row][column]` of `queries` and `keys`."""
    queries, keys = maps.labels(kind)
    chosen = [
        {
            **{"kind": kind, "layer": layer, "head": head, "queries": queries, "keys": keys},
            "weights": maps.weights[kind][layer - 1][head - 1].tolist(),
        }
        for head in heads
    ]
    return json.dumps({"source": maps.source, "target": maps.target, "maps": chosen})


@styled
def figure(maps: AttentionMaps, kind: str, layer: int, heads: Sequence[int]) -> Figure:
    """Heat maps of some heads of a layer side by side, on one colour scale that starts at 0.

    The rows are named at the left, the columns at the top. All places are computed here, in
    inches: matplotlib's own layouts take a minute for a few hundred labels.
    """
    queries, keys = (list(map(without_controls, labels)) for labels in maps.labels(kind))
    cell = max(0.06, min(0.24, 9 / max(len(queries), len(keys))))
    font = min(9.0, 0.75 * 72 * cell)  # points
    left, above = 0.4 + _widest(queries, font), 0.65 + _widest(keys, font)
    right, below, gap, title = 1.0, 0.45, 0.3, 0.3
    width, height = max(cell * len(keys), 0.6), cell * len(queries)
    columns = min(len(heads), 2 if len(heads) <= 4 else 3)
    rows = -(-len(heads) // columns)
    whole_width = left + columns * width + (columns - 1) * gap + right
    whole_height = above + rows * (height + title) + (rows - 1) * gap + below
    whole_width = max(whole_width, 4.5)  # for the titles
    result = Figure(figsize=(whole_width, whole_height))

    def add_axes(x: float, y: float, width: float, height: float) -> Axes:
        """At so many inches from the left and from the top."""
        bottom = (whole_height - y - height) / whole_height
        place = (x / whole_width, bottom, width / whole_width, height / whole_height)
        return result.add_axes(place)

    weights = maps.weights[kind][layer - 1][[head - 1 for head in heads]]
    for place, (head, each) in enumerate(zip(heads, weights, strict=True)):
        row, column = divmod(place, columns)
        y = above + row * (height + title + gap)
        axes = add_axes(left + column * (width + gap), y, width, height)
        image = axes.imshow(each, cmap="Blues", vmin=0, vmax=weights.max(), aspect="auto")
        axes.hlines(np.arange(1, len(queries)) - 0.5, -0.5, len(keys) - 0.5, **GRID)
        axes.vlines(np.arange(1, len(keys)) - 0.5, -0.5, len(queries) - 0.5, **GRID)
        axes.set_xlabel(f"head {head}", fontsize=9, labelpad=4)
        axes.tick_params(length=0, labelbottom=False, labeltop=True)
        axes.set_xticks([])
        axes.set_yticks([])
        if row == 0:
            axes.set_xticks(range(len(keys)), keys)
        if column == 0:
            axes.set_yticks(range(len(queries)), queries)
        axes.tick_params(axis="x", labelrotation=90, labelsize=font)
        axes.tick_params(axis="y", labelsize=font)
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color("#80808080")
        axes.grid(visible=False)
    tall = min(height * rows, 3.0)
    bar = add_axes(whole_width - right + 0.3, above, 0.12, tall)
    result.colorbar(image, cax=bar, label="weight")
    inch = 1 / whole_height
    result.suptitle(f"{KINDS[kind]}, layer {layer}", fontsize=11, y=1 - 0.1 * inch, va="top")
    row_title, column_title = axis_titles(kind)
    result.text(
        *(0.1 / whole_width, 0.12 * inch, f"rows: {row_title}; columns: {column_title}"),
        fontsize=8,
    )
    return result


GRID: dict[str, Any] = {"colors": "#80808030", "linewidths": 0.5}


def _widest(labels: Sequence[str], font: float) -> float:
    """Inches that the longest of some labels takes."""
    prop = FontProperties(size=font)
    sizes = (text_to_path.get_text_width_height_descent(label, prop, False) for label in labels)
    return max(float(width) for width, _, _ in sizes) / 72


def axis_titles(kind: str) -> tuple[str, str]:
    """What rows and columns are, in words."""
    return {
        "encoder": ("subword of the source", "subword of the source"),
        "decoder": ("subword being written", "subwords written before, after a start </s>"),
        "cross": ("subword being written", "subword of the source"),
    }[kind]


def write_page(
    file: Path, maps: AttentionMaps, kind: str, layer: int, head: int | None, *, model: str
) -> None:
    """One HTML page with all maps in it, which needs nothing else; it opens with the chosen ones.

    Args:
        head: None for the average of the heads.
        model: what the page calls the model.
    """
    kinds = {}
    for name, layers in maps.weights.items():
        if layers:
            queries, keys = maps.labels(name)
            kinds[name] = {
                **{
                    "title": KINDS[name],
                    "short": KINDS[name].split("-")[0].lower(),
                    "queries": queries,
                    "keys": keys,
                },
                **dict(zip(("rows", "columns"), axis_titles(name), strict=True)),
                "layers": [np.rint(each * SCALE).astype(int).tolist() for each in layers],
            }
    data = {"kinds": kinds, "scale": SCALE, "kind": kind, "layer": layer, "head": head or 0}
    environment = Environment(
        loader=PackageLoader("qknorm_fairseq"), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("attention.html").render(
        model=model,
        source=_text(maps.source),
        target=_text(maps.target),
        data=_for_script(data),
    )
    write_text(file, page)


def _text(pieces: Sequence[str]) -> str:
    return one_spaced("".join(pieces[:-1]).replace("▁", " "))


def _for_script(value: Any) -> str:
    """JSON that can't end the <script> element it stands in, whatever its strings are."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
