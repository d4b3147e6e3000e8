"""What the project's figures look like, and how they become SVG and PNG files or part of a page."""

from __future__ import annotations

import hashlib
import io
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from html import escape
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib import ft2font
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import Formatter, FuncFormatter

from qknorm_fairseq.files import write_bytes

RIGHT_TO_LEFT = "\u200f"  # Unicode's mark
INK = "#1b1b1b"  # in a page: the colour of its text
STYLE: Any = {
    "text.parse_math": False,  # a name or subword with dollar signs is no formula
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#80808040",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, which the reader's program shapes
    "svg.hashsalt": "qknorm",  # the same figure gives the same file
    "savefig.dpi": 150,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}
P = ParamSpec("P")
R = TypeVar("R")


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Draw with STYLE, whatever the settings are outside."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return inner


@styled
def save(figure: Figure, stem: Path) -> None:
    """Write `stem`.svg and `stem`.png, each whole or not at all, on a white ground."""
    picture, drawing = io.BytesIO(), io.BytesIO()
    with _texts(figure, _for_svg):
        figure.savefig(drawing, format="svg", facecolor="white", metadata={"Date": None})
    with _texts(figure, _for_bitmap):
        figure.savefig(picture, format="png", facecolor="white")
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".svg", drawing), (".png", picture)):
        write_bytes(stem.with_name(stem.name + suffix), content.getvalue())


@styled
def svg(figure: Figure, title: str = "") -> str:
    """The figure as an <svg> element for an HTML page, as wide as there is room for.

    Its ground is transparent and its ink `currentColor`, so that it can be read on a light and on
    a dark page. The ids in it begin with a hash of figure and title, which keeps those of several
    figures apart. The same figure gives the same text.
    """
    file = io.StringIO()
    with _texts(figure, _for_svg):
        metadata = {"Date": None, "Creator": None}
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # A style sheet in it would be one of the whole page.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    own = "f" + hashlib.sha256((title + text).encode()).hexdigest()[:10]
    text = re.sub(r'\b(id="|xlink:href="#)|(url\(#)', lambda m: f"{m[0]}{own}-", text)
    name = f' role="img" aria-label="{escape(title)}"' if title else ' role="img"'
    style = "stroke-linejoin: round; stroke-linecap: butt; max-width: 100%; height: auto"
    return text.replace("<svg", f'<svg{name} style="{style}"', 1)


@contextmanager
def _texts(figure: Figure, change: Callable[[str], str]) -> Iterator[None]:
    """The figure with each of its texts changed, for as long as the block runs."""
    before = {text: text.get_text() for text in figure.findobj(Text)}
    # Names at an axis are texts that are written anew whenever it is drawn.
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    named = [(axis, axis.get_major_formatter()) for axis in axes]
    named = [(axis, names) for axis, names in named if isinstance(names, FuncFormatter)]
    try:
        for text, content in before.items():
            text.set_text(change(content))
        for axis, names in named:
            axis.set_major_formatter(FuncFormatter(partial(_changed, change, names)))
        yield
    finally:
        for text, content in before.items():
            text.set_text(content)
        for axis, names in named:
            axis.set_major_formatter(names)


def _changed(change: Callable[[str], str], names: Formatter, x: float, place: int | None) -> str:
    return change(names(x, place))


def _for_svg(text: str) -> str:
    """A reader's program shapes it, but takes each text to run from left to right: ▁ would be at
    the end of an Arabic subword."""
    return f"{RIGHT_TO_LEFT}{text}{RIGHT_TO_LEFT}" if _runs_to_the_left(text) else text


def _for_bitmap(text: str) -> str:
    """Arabic letters joined, text from right to left in the order in which it is seen.

    matplotlib does so itself from 3.11 on, the first to have raqm.
    """
    if hasattr(ft2font, "__libraqm_version__") or not _runs_to_the_left(text):
        return text
    from arabic_reshaper import reshape
    from bidi.algorithm import get_display

    return str(get_display(reshape(text)))


def _runs_to_the_left(text: str) -> bool:
    """As the Unicode algorithm has it: the first letter with a direction says it."""
    directions = (unicodedata.bidirectional(character) for character in text)
    return next((d for d in directions if d in ("L", "R", "AL")), "L") != "L"


def without_controls(text: str) -> str:
    """Text with each control character, which no SVG may hold, as U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
