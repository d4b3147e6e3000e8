"""`qknorm bench run`: whole fairseq-train runs, but for validation and saving, side by side."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qknorm_fairseq.bench import SIZES, Result, arguments_of, baseline, variants
from qknorm_fairseq.errors import QKNormError


def measure(
    data: Path, *, size: str, device: str, turns: int, updates: int, say: Callable[[str], None]
) -> list[Result]:
    """Train every variant in turns, each time in a process of its own; nothing is saved.

    Args:
        data: a folder that `qknorm prepare` or fairseq-preprocess made.
        updates: of each run.

    Raises:
        QKNormError: a run failed.
    """
    compared = variants("train", device)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    peak_mb = dict.fromkeys(compared, 0.0)
    for turn in range(turns):
        for name, arguments in compared.items():
            line = arguments_of(SIZES[size], data, arguments, device=device)
            line += ["--max-update", str(updates), "--no-save", "--disable-validation"]
            program = str(Path(sys.executable).with_name("fairseq-train"))
            taken, peak = timed([program, *line, "--required-batch-size-multiple", "1"], name)
            seconds[name].append(taken)
            peak_mb[name] = max(peak_mb[name], peak)
        times = ", ".join(f"{name} {all_[-1]:.1f} s" for name, all_ in seconds.items())
        say(f"turn {turn + 1} of {turns}: {times}")
    results = []
    for name, ours in seconds.items():
        base = seconds[baseline(name, compared)]
        ratios = [theirs / each for theirs, each in zip(base, ours, strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        rate = updates / statistics.median(ours)
        results.append(Result(name, rate, spread, peak_mb[name], products=None, bound=None))
    return results


def timed(command: Sequence[str], name: str) -> tuple[float, float]:
    """Seconds from a command's start to its end, and the most memory of its process in MB.

    Raises:
        QKNormError: it failed; the message ends in what it said last.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise QKNormError(f"{name}: {(said.strip().splitlines() or ['it said nothing'])[-1]}")
    return time.perf_counter() - started, round(usage.ru_maxrss / 1024)
