"""How a training shows how far it is: a bar that fits the terminal, a plain line in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from qknorm_fairseq import training

TITLE = "en-vi transformer_scalenorm_tiny seed 1"
RECORDS = (
    {"kind": "train_inner", "ppl": 81.84, "num_updates": 400.0},
    {"kind": "valid", "bleu": 14.21, "ppl": 70.0, "num_updates": 400.0},
)


def shown(console: Console, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that were on the screen or in the file at the end, without control codes."""
    monkeypatch.setattr(training, "console", console)
    with training._bar(TITLE, 800, 0) as show:
        for record in RECORDS:
            show(record)
    assert isinstance(console.file, io.StringIO)
    text = Text.from_ansi(console.file.getvalue().replace("\r", "\n")).plain
    return [line for line in text.splitlines() if TITLE[:20] in line]


@pytest.mark.parametrize(
    ("width", "whole"),
    [(80, "400/800 dev BLEU 14.2 0:00:00"), (110, "perplexity 81.8, dev BLEU 14.2 0:00:00")],
)
def test_the_bar_fits_the_terminal(width: int, whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    last = shown(console, monkeypatch)[-1]
    assert last.startswith(TITLE)
    assert last.rstrip().endswith(whole)
    assert last.count("━") == (5 if width < 100 else 10)  # half of the bar, half of the updates
    assert len(last.rstrip()) <= width


def test_a_file_gets_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 21))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(clock)))
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    assert shown(console, monkeypatch) == [
        f"{TITLE}: update 400 of 800, perplexity 81.8",
        f"{TITLE}: update 400 of 800, perplexity 81.8, dev BLEU 14.2",
    ]
