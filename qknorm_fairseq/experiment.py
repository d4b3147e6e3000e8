"""One run after the other: train, translate the test set, score; then one table.

    python -m qknorm_fairseq.experiment demo model=transformer_qknorm_tiny,transformer

Training is `fairseq-hydra-train` with the same configuration; a run's folder is the
configuration's `checkpoint.save_dir`. What is done is not done again; what was interrupted goes
on from fairseq's last checkpoint.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.files import write_json, write_lines, write_text
from qknorm_fairseq.prepared_data import DESCRIPTION, SUBWORDS, Description

console = Console(stderr=True, highlight=False, soft_wrap=True)
COMMAND = "python -m qknorm_fairseq.experiment"
BEST, LAST = "checkpoint_best.pt", "checkpoint_last.pt"
DONE = "training.done"
LOG_LINE = re.compile(r"\[(train_inner|train|valid)\]\[INFO\] - (\{.*\})$")


@dataclass(frozen=True)
class Run:
    """One training: its Hydra overrides, its resolved configuration, and its folder."""

    config_name: str
    overrides: tuple[str, ...]
    config: DictConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.checkpoint.save_dir)

    @property
    def data(self) -> Path:
        return Path(self.config.task.data)

    @property
    def pair(self) -> str:
        return f"{self.config.task.source_lang}-{self.config.task.target_lang}"

    @property
    def name(self) -> str:
        return f"{self.pair} {self.config.model._name} seed {self.config.common.seed}"

    def score(self) -> dict[str, Any]:
        """What `score.json` says; only for a finished run."""
        content: dict[str, Any] = json.loads((self.folder / "score.json").read_text("utf-8"))
        return content


def plan(config_dir: Path, config_name: str, overrides: Sequence[str]) -> list[Run]:
    """The runs that a configuration and its overrides mean: one for each combination of values.

    As with Hydra's own sweeps, `model=a,b common.seed=1,2` are four runs.

    Raises:
        QKNormError: there is no such configuration, or a key or value in it is unknown.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    swept: list[list[str]] = []
    for override in overrides:
        key, equals, values = override.partition("=")
        if not equals:
            raise QKNormError(f"{override!r} is not a setting: write key=value")
        several = values.split(",") if re.fullmatch(r"[\w.+-]+(,[\w.+-]+)+", values) else [values]
        swept.append([f"{key}={value}" for value in several])
    runs = []
    with initialize_config_dir(str(config_dir.resolve()), version_base=None):
        for combination in itertools.product(*swept):
            try:
                config = compose(config_name, overrides=list(combination))
                OmegaConf.resolve(config)
            except (HydraException, OmegaConfBaseException) as error:
                reason = str(error).strip().splitlines()[0]
                if reason.startswith("Could not override"):  # fairseq's options are not all there
                    reason += " (to set what the file does not mention, write ++key=value)"
                raise QKNormError(f"{config_dir / config_name}.yaml: {reason}") from None
            runs.append(Run(config_name, combination, config))
    return runs


def execute(run: Run, config_dir: Path) -> None:
    """Bring a run to its `score.json`, from wherever it stands.

    Raises:
        QKNormError: the data is not prepared, the folder belongs to another configuration,
            another process is at work in it, or training failed (the message names the log).
    """
    if not (run.data / DESCRIPTION).is_file():
        raise QKNormError(f"{run.data}: not prepared yet; see `qknorm prepare --help`")
    with _sole_user(run.folder):
        _claim(run)
        if (run.folder / "score.json").is_file():
            console.print(f"{run.name}: done before")
            return
        started = time.monotonic()
        _train(run, config_dir)
        _translate_and_score(run)
        result = run.score()
        console.print(
            f"{run.name}: BLEU {result['bleu']:.1f} ({time.monotonic() - started:.0f} s this time)"
        )


@contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QKNormError(f"{folder}: another process is at work on this run") from None
        yield


def _claim(run: Run) -> None:
    """Store configuration, environment and vocabulary in the folder, or check they are the same.

    A folder without a checkpoint holds nothing worth keeping: an attempt that failed at once.
    """
    settings = OmegaConf.to_yaml(run.config)
    file = run.folder / "config.yaml"
    description = (run.data / DESCRIPTION).read_text("utf-8")
    if file.is_file() and (run.folder / LAST).is_file():
        known = run.folder / DESCRIPTION
        if file.read_text("utf-8") != settings:
            raise QKNormError(
                f"{run.folder}: holds a run with another configuration (see its config.yaml); "
                "move it away, or choose another checkpoint.save_dir"
            )
        if known.is_file() and known.read_text("utf-8") != description:
            raise QKNormError(
                f"{run.folder}: was trained on other data than {run.data} holds now; move it away"
            )
        return
    for name in ("train.log", "train.jsonl", DONE):
        (run.folder / name).unlink(missing_ok=True)
    # The run's folder is enough to translate with, wherever it is taken.
    for name in (SUBWORDS, *(f"dict.{side}.txt" for side in run.pair.split("-")), DESCRIPTION):
        shutil.copyfile(run.data / name, run.folder / name)
    write_json(run.folder / "environment.json", environment(run))
    write_text(file, settings)


def environment(run: Run) -> dict[str, Any]:
    """What a result depends on beside the configuration, and the command that repeats it."""
    return {
        "command": f"{COMMAND} {shlex.join((run.config_name, *run.overrides))}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


_PACKAGES = (
    *("qknorm-fairseq", "torch", "fairseq-fixed", "fairseq", "numpy", "hydra-core", "omegaconf"),
    *("sentencepiece", "sacrebleu", "sacremoses"),
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _train(run: Run, config_dir: Path) -> None:
    """Run fairseq-hydra-train to its end, showing how far it is.

    The end is the configured number of updates, or what else stops fairseq: epochs, or a learning
    rate that got too small.
    """
    max_update = OmegaConf.select(run.config, "optimization.max_update") or 0
    if not isinstance(max_update, int):
        raise QKNormError(f"optimization.max_update={max_update}: must be a whole number")
    begun = _updates_done(run.folder)
    if (run.folder / DONE).is_file() or 0 < max_update <= begun:  # it would do one more update
        return
    if begun:
        console.print(f"{run.name}: going on from update {begun}")
    command = [
        str(Path(sys.executable).with_name("fairseq-hydra-train")),
        *("--config-dir", str(config_dir.resolve()), "--config-name", run.config_name),
        *run.overrides,
        f"common.user_dir={Path(__file__).resolve().parent}",
    ]
    log_file = run.folder / "train.log"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_end_with_parent() if sys.platform == "linux" else None,
    )
    assert process.stdout is not None
    try:
        with (
            log_file.open("a", encoding="utf-8") as log,
            (run.folder / "train.jsonl").open("a", encoding="utf-8") as records,
            _bar(run.name, max_update, begun) as show,
        ):
            for line in process.stdout:
                log.write(line)
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
        reason = _last_error(log_file.read_text("utf-8"))
        raise QKNormError(f"training failed: {reason} (exit status {code}; see {log_file})")
    write_text(run.folder / DONE, "")


def _end_with_parent() -> Callable[[], object]:
    """For a child to call: Linux then ends it when we end, even if we are killed.

    A training that goes on unseen would write into the folder of the one started after it.
    """
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_parent_death_signal, signal.SIGTERM)


def _last_error(log: str) -> str:
    """The last unindented line and what is indented below it: how Python and Hydra say it."""
    lines = [line for line in log.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    begins = [number for number, line in enumerate(lines) if not line[0].isspace()]
    return " ".join(" ".join(lines[begins[-1] :]).split()) if begins else "it said nothing"


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
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}{task.fields[of]}{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        of = f"/{total}" if total else " updates"
        task = progress.add_task(
            title, total=total or None, completed=begun, of=of, state=" starting"
        )

        def show(record: Mapping[str, Any]) -> None:
            nonlocal last_line
            if record["kind"] == "valid" and "bleu" in record:
                latest["dev"] = f", dev BLEU {record['bleu']:.1f}"
            elif record["kind"] == "valid":
                latest["dev"] = f", dev perplexity {record['ppl']:.1f}"
            elif record["kind"] == "train_inner":
                latest["loss"] = f", perplexity {record['ppl']:.1f}"
            done = record.get("num_updates", 0)
            state = latest["loss"] + latest["dev"]
            progress.update(task, completed=done, state=state)
            if not console.is_terminal and time.monotonic() - last_line > 20:
                last_line = time.monotonic()
                of = f" of {total}" if total else ""
                console.print(f"{title}: update {done:.0f}{of}{state}")

        yield show


def _updates_done(folder: Path) -> int:
    """Updates in the folder's last checkpoint, mended if need be; 0 without one."""
    last = folder / LAST
    if not last.is_file():
        return 0
    try:
        updates: int = _progress_of(last)["updates"]
    except QKNormError:
        # fairseq writes the best checkpoint whole or not at all, then copies it over the last
        # one: it was stopped in the middle of that.
        updates = _progress_of(folder / BEST)["updates"]
        shutil.copyfile(folder / BEST, last)
    return updates


def _progress_of(checkpoint: Path) -> dict[str, Any]:
    """Updates, seconds and target tokens that went into a checkpoint, over all its resumptions.

    Raises:
        QKNormError: there is no such checkpoint, or it is damaged.
    """
    from qknorm_fairseq.checkpoints import load

    state = load(checkpoint)
    meters = {key: value for _, key, _, value in state["extra_state"]["metrics"]["default"]}
    return {
        "updates": state["optimizer_history"][-1]["num_updates"],
        "seconds": float(meters["train_wall"]["sum"]),
        "tokens": float(meters["wpb"]["sum"]),
    }


def _translate_and_score(run: Run) -> None:
    from qknorm_fairseq.scores import score
    from qknorm_fairseq.text import read_lines
    from qknorm_fairseq.tokenization import detokenize, tokenize
    from qknorm_fairseq.translator import Translator

    description = Description.load(run.data)
    target = description.target_lang
    source = read_lines(run.data / f"test.{description.source_lang}")
    references = read_lines(run.data / f"test.{target}")
    translator = Translator(
        run.folder / BEST,
        data=run.folder,
        cpu=bool(OmegaConf.select(run.config, "common.cpu")),
        tokenized=description.tokenized,
    )
    hypotheses: list[str] = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{run.name}: translating", total=len(source))
        for hypothesis in translator.translate_in_chunks(source, 128):
            hypotheses.append(hypothesis)
            progress.update(task, completed=len(hypotheses))
    # A model of tokens is scored by its own tokens, as in the papers on such a corpus.
    own_tokens = description.tokenized
    tokens = hypotheses if own_tokens else tokenize(hypotheses, target)
    texts = detokenize(hypotheses, target) if own_tokens else hypotheses
    write_lines(run.folder / "hyp.tok.txt", tokens)
    write_lines(run.folder / "hyp.detok.txt", texts)
    result = score(hypotheses, references, lang=target, tokenized=own_tokens)
    trained = _progress_of(run.folder / LAST)
    write_json(
        run.folder / "score.json",
        {
            **asdict(result),
            "pair": run.pair,
            "model": str(run.config.model._name),
            "seed": int(run.config.common.seed),
            "params": sum(p.numel() for p in translator.models[0].parameters()),
            "updates": trained["updates"],
            "train_seconds": round(trained["seconds"], 1),
            "tokens_per_second": round(trained["tokens"] / trained["seconds"], 1),
            "test_sentences": len(source),
        },
    )


def table(runs: Sequence[Run]) -> Table:
    """Finished runs, a row each."""
    title = f"{runs[0].pair}, {runs[0].score()['test_sentences']} test sentences"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("model", "seed"):
        shown.add_column(column, no_wrap=True)
    for column in ("BLEU", "chrF", "parameters", "training", "tokens/s"):
        shown.add_column(column, justify="right")
    for run in runs:
        result = run.score()
        minutes, seconds = divmod(round(result["train_seconds"]), 60)
        shown.add_row(
            result["model"],
            str(result["seed"]),
            *(f"{result[key]:.1f}" for key in ("bleu", "chrf")),
            f"{result['params']:,}",
            f"{minutes}m{seconds:02d}s",
            f"{result['tokens_per_second']:,.0f}",
        )
    return shown


def main(
    config_name: Annotated[str, typer.Argument(help="A file in the configuration folder: demo.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra settings: key=a,b.")] = None,
    config_dir: Annotated[Path, typer.Option(help="Where configurations are.")] = Path("configs"),
) -> None:
    """Train, translate and score every combination of the settings, then print one table."""
    runs = plan(config_dir, config_name, overrides or [])
    failed = []
    for run in runs:
        try:
            execute(run, config_dir)
        except QKNormError as error:  # one failing run does not lose the others
            console.print(f"{run.name}: {error}", style="red")
            failed.append(run)
    finished = [run for run in runs if run not in failed]
    if finished:
        Console().print(table(finished))
        for metric, signature in finished[0].score()["signatures"].items():
            print(f"  {metric:<9}{signature}")
        print("Translations, scores, logs and checkpoints:")
        for run in finished:
            print(f"  {run.folder}")
    if failed:
        raise QKNormError(
            f"{len(failed)} of {len(runs)} runs failed; the same command retries them"
        )


if __name__ == "__main__":
    from qknorm_fairseq.cli import run_app

    run_app(lambda: typer.run(main))
