"""What stopped a training, in one line: what was said last, and what to change."""

from __future__ import annotations

import re
import signal

# What a log says -> what to change. The first that fits counts.
ADVICE = (
    (
        r"Minimum loss scale reached",
        "the half-precision gradients overflow at any scale: lower optimization.lr, set "
        "optimization.clip_norm=1, or train without --fp16 (--bf16 has no such limit)",
    ),
    (
        r"gradients are Nan/Inf",
        "lower optimization.lr, set optimization.clip_norm=1, or warm up longer "
        "(lr_scheduler.warmup_updates); the log names the first module that went wrong",
    ),
    (
        r"out of memory|can't allocate memory|Cannot allocate memory|MemoryError",
        "set a smaller dataset.max_tokens, and as much larger an optimization.update_freq",
    ),
    (r"No space left on device", "make room on the disk"),
)
KILLED = "it was killed: perhaps for its memory; if so, set a smaller dataset.max_tokens"
LEFT_OUT = "attempting to recover from OOM"  # fairseq goes on without the batch


def failure(log: str, status: int) -> str:
    """Why a training ended with this exit status, as far as its log tells.

    Args:
        log: what this training said, standard error included.
    """
    if status == -signal.SIGKILL:
        return KILLED
    said = last_error(log)
    for pattern, advice in ADVICE:
        if re.search(pattern, said):
            return f"{said.rstrip('.')}: {advice}"
    return said


def last_error(log: str) -> str:
    """The last unindented line and what is indented below it: how Python and Hydra say it."""
    lines = [line for line in log.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    begins = [number for number, line in enumerate(lines) if not line[0].isspace()]
    return " ".join(" ".join(lines[begins[-1] :]).split()) if begins else "it said nothing"
