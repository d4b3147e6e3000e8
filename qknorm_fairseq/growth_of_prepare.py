"""`qknorm bench prepare`: seconds and memory of `qknorm prepare` over the size of the text."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from qknorm_fairseq.whole_runs import timed

PAIRS = (10_000, 100_000, 1_000_000)
WORDS = 20  # of a sentence, on average


@dataclass(frozen=True)
class Preparation:
    """One call; `peak_mb` is the most memory of its process."""

    pairs: int
    seconds: float
    peak_mb: float


def measure(sizes: Sequence[int], say: Callable[[str], None]) -> list[Preparation]:
    """Prepare invented text of so many pairs, each in a process of its own.

    Raises:
        QKNormError: `qknorm prepare` failed.
    """
    found = []
    for pairs in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for split, count in (("train", pairs), ("valid", 500)):
                for seed, language in enumerate(("xx", "yy")):
                    write_text(folder / f"{split}.{language}", count, seed)
            both = [f"{folder}/{s}.{side}" for s in ("train", "valid") for side in ("xx", "yy")]
            command = [sys.executable, "-m", "qknorm_fairseq.cli", "prepare", "--train", *both[:2]]
            command += ["--valid", *both[2:], "--out", f"{folder}/out"]
            seconds, peak_mb = timed(command, "qknorm prepare")
        found.append(Preparation(pairs, seconds, peak_mb))
        say(f"{pairs:,} pairs: {seconds:.0f} s, {found[-1].peak_mb:,.0f} MB")
    return found


def write_text(file: Path, lines: int, seed: int) -> None:
    """Invented words with the frequencies of a language's (Zipf's law), made of syllables."""
    numbers = np.random.default_rng(seed)
    syllables = np.array([c + v for c in "bdfgklmnprstvz" for v in "aeiou"])
    words = ["".join(numbers.choice(syllables, numbers.integers(1, 5))) for _ in range(30_000)]
    share = 1 / np.arange(1, len(words) + 1)
    share /= share.sum()
    with file.open("w", encoding="utf-8") as out:
        for start in range(0, lines, 10_000):
            lengths = numbers.poisson(WORDS - 1, min(10_000, lines - start)) + 1
            chosen = iter(numbers.choice(len(words), lengths.sum(), p=share).tolist())
            for length in lengths:
                out.write(" ".join(words[number] for number in islice(chosen, length)) + "\n")
