"""Training by fairseq-hydra-train, watched: a log, the numbers in it, and a progress bar."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from qknorm_fairseq.advice import LEFT_OUT, failure
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import copy, write_lines, write_text
from qknorm_fairseq.runs import BEST, CONFIG, LAST, Run

console = Console(stderr=True, highlight=False, soft_wrap=True)
DONE = "training.done"
RECORDS = "train.jsonl"
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # before a fork needs it
HYDRA_LEAVES_NOTHING = (  # no folder and no file of its own: it writes to the console only
    *("hydra.run.dir=.", "hydra.output_subdir=null"),
    *("hydra.job_logging.root.handlers=[console]", "++hydra.job_logging.handlers.file.delay=true"),
)
LOG_LINE = re.compile(r"\[(train_inner|train|valid)\]\[INFO\] - (\{.*\})$")


def train(run: Run) -> None:
    """Run fairseq-hydra-train to its end, showing how far it is.

    The end is the configured number of updates, or what else stops fairseq: epochs, or a learning
    rate that got too small. It is given the configuration that the folder holds.

    Raises:
        QKNormError: fairseq failed; the message says what it said last, and where the log is.
    """
    max_update: int = run.config.optimization.max_update
    begun = _updates_done(run.folder)
    if (run.folder / DONE).is_file() or 0 < max_update <= begun:  # it would do one more update
        return
    if begun:
        console.print(f"{run.title}: going on from update {begun}")
        _forget_after(begun, run.folder / RECORDS)
    command = [
        str(Path(sys.executable).with_name("fairseq-hydra-train")),
        # Not --config-dir: fairseq has a folder of its own with a config.yaml, looked in before.
        *("--config-path", str(run.folder.resolve()), "--config-name", Path(CONFIG).stem),
        *HYDRA_LEAVES_NOTHING,
        f"common.user_dir={Path(__file__).resolve().parent}",
    ]
    log_file = run.folder / "train.log"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=end_with_parent,
    )
    assert process.stdout is not None
    left_out = 0
    try:
        with (
            log_file.open("a", encoding="utf-8") as log,
            (run.folder / RECORDS).open("a", encoding="utf-8") as records,
            _bar(run.title, max_update, begun) as show,
        ):
            for line in process.stdout:
                log.write(line)
                left_out += LEFT_OUT in line
                match = LOG_LINE.search(line)
                if match:
                    record = _numbers(match[1], json.loads(match[2]))
                    print(json.dumps(record), file=records, flush=True)
                    show(record)
        code = process.wait()
    finally:
        if process.poll() is None:  # we were interrupted: so is the training
            process.terminate()
            process.wait()
    if code:
        reason = failure(log_file.read_text("utf-8"), code)
        raise QKNormError(f"training failed: {reason} (exit status {code}; see {log_file})")
    if left_out:
        console.print(
            f"{run.title}: {left_out} batches left out, for which memory did not suffice; "
            "a smaller dataset.max_tokens, with a larger optimization.update_freq, keeps them"
        )
    write_text(run.folder / DONE, "")


def _forget_after(updates: int, records: Path) -> None:
    """Take out of a log what came after the checkpoint from which training goes on."""
    kept = []
    text = records.read_text("utf-8", errors="replace") if records.is_file() else ""
    for line in text.splitlines():
        # One that is no record was cut off when it was killed.
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            if json.loads(line).get("num_updates", 0) <= updates:
                kept.append(line)
    write_lines(records, kept)


def end_with_parent() -> None:
    """For a child to call: Linux then ends it when its parent ends, even if that was killed.

    A training that goes on unseen would write into the folder of the one started after it.
    """
    if PRCTL:
        set_parent_death_signal = 1
        PRCTL(set_parent_death_signal, signal.SIGTERM)


def _numbers(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """fairseq's log record with its numbers as numbers and without its prefixes."""
    record: dict[str, Any] = {"kind": kind}
    for key, value in values.items():
        try:
            record[key.removeprefix(f"{kind}_")] = float(value)
        except (TypeError, ValueError):
            record[key.removeprefix(f"{kind}_")] = value
    return record


@contextmanager
def _bar(title: str, total: int, begun: int) -> Iterator[Any]:
    """A progress bar at a terminal, a line now and then in a file. `total` 0: nobody knows."""
    latest = {"loss": "", "dev": ""}
    last_line = time.monotonic()
    narrow = console.width < 100
    with Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=10 if narrow else 20),
        TextColumn("{task.completed:.0f}{task.fields[of]}", table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        of = f"/{total}" if total else " updates"
        task = progress.add_task(
            title, total=total or None, completed=begun, of=of, state="starting"
        )

        def show(record: Mapping[str, Any]) -> None:
            nonlocal last_line
            if record["kind"] == "valid" and "bleu" in record:
                latest["dev"] = f"dev BLEU {record['bleu']:.1f}"
            elif record["kind"] == "valid":
                latest["dev"] = f"dev perplexity {record['ppl']:.1f}"
            elif record["kind"] == "train_inner":
                latest["loss"] = f"perplexity {record['ppl']:.1f}"
            done = record.get("num_updates", 0)
            states = [state for state in latest.values() if state]
            shown = states[-1:] if narrow else states
            progress.update(task, completed=done, state=", ".join(shown))
            if not console.is_terminal and time.monotonic() - last_line > 20:
                last_line = time.monotonic()
                of = f" of {total}" if total else ""
                console.print(f"{title}: " + ", ".join([f"update {done:.0f}{of}", *states]))

        yield show


def _updates_done(folder: Path) -> int:
    """Updates in the folder's last checkpoint, mended if need be; 0 without one."""
    last = folder / LAST
    for half in folder.glob("*.pt.tmp"):  # it was killed while it wrote
        half.unlink()
    if not last.is_file():
        return 0
    try:
        updates: int = progress_of(last)["updates"]
    except QKNormError as error:
        # The plugin lets fairseq write each checkpoint whole or not at all; a disk can fail yet.
        if not (folder / BEST).is_file():
            raise QKNormError(f"{error}; delete it to begin anew") from None
        updates = progress_of(folder / BEST)["updates"]
        copy(folder / BEST, last)
    return updates


def progress_of(checkpoint: Path) -> dict[str, Any]:
    """Updates, seconds and target tokens that went into a checkpoint, over all its resumptions.

    Raises:
        QKNormError: there is no such checkpoint, or it is damaged.
    """
    from qknorm_fairseq.checkpoints import load

    state = load(checkpoint)
    try:
        meters = {key: value for _, key, _, value in state["extra_state"]["metrics"]["default"]}
        return {
            "updates": state["optimizer_history"][-1]["num_updates"],
            "seconds": float(meters["train_wall"]["sum"]),
            "tokens": float(meters["wpb"]["sum"]),
        }
    except (KeyError, TypeError, ValueError, IndexError):
        raise QKNormError(f"{checkpoint}: does not say how far its training got") from None
