"""`qknorm bench growth`: what an update costs as sentences get longer and batches larger.

Each point is measured in a process of its own, since its peak memory counts from its start.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from qknorm_fairseq.bench import FAIRSEQ, FAST, PLAIN, SIZES, Worker, variants, write_text

TOKENS = 1024  # of a batch, while the sentences get longer
LENGTHS = (32, 64, 128, 256, 512, 1024)
SHORT = 32  # subwords of a sentence, while the batches get larger
SENTENCES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Point:
    """One update of one variant.

    Attributes:
        growing: "length" or "sentences", whichever is varied.
        length: subwords of each sentence, on both sides, with their end of sentence.
        seconds: median of the turns.
        peak_mb: most memory of its process (on a GPU: of its tensors).
    """

    variant: str
    growing: str
    sentences: int
    length: int
    seconds: float
    peak_mb: float


def measure(*, size: str, device: str, turns: int, say: Callable[[str], None]) -> list[Point]:
    """Measure all variants at all shapes, one variant after the other, each so many turns.

    Raises:
        QKNormError: a variant failed.
    """
    compared = {
        name: arguments
        for name, arguments in variants("train", device).items()
        if name.split(", fp16")[0] in (FAIRSEQ, PLAIN, FAST)
    }
    shapes = [("length", TOKENS // length, length) for length in LENGTHS]
    shapes += [("sentences", sentences, SHORT) for sentences in SENTENCES]
    points = []
    for growing, sentences, length in shapes:
        sized = replace(
            SIZES[size],
            words=length - 1,
            alike=True,
            max_tokens=sentences * length,
            batches=1,
        )
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder), sized)
            given = {"kind": "train", "device": device, "batch_size": sentences}
            given |= {"size": asdict(sized), "data": folder}
            for name, arguments in compared.items():
                with Worker(name, given | {"arguments": arguments}) as worker:
                    seconds = [worker.ask("work")["seconds"] for _ in range(turns)]
                    peak = worker.ask("finish")["peak_mb"]
                median = statistics.median(seconds)
                points.append(Point(name, growing, sentences, length, median, peak))
                say(f"{sentences} x {length}, {name}: {median:.3f} s, {peak:,} MB")
    return points


def table(points: Sequence[Point]) -> str:
    """Seconds and peak MB of each variant, a line for each shape."""
    names = list(dict.fromkeys(point.variant for point in points))
    lines = [f"{'sentences x length':<20}" + "".join(f"{name:>28}" for name in names)]
    for shape in dict.fromkeys((p.growing, p.sentences, p.length) for p in points):
        row = [p for p in points if (p.growing, p.sentences, p.length) == shape]
        lines.append(
            f"{f'{shape[1]} x {shape[2]}':<20}"
            + "".join(f"{f'{p.seconds:.3f} s {p.peak_mb:,.0f} MB':>28}" for p in row)
        )
    return "\n".join(lines)
