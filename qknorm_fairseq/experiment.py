"""One run after the other: train, translate the test set, score; then one table.

    python -m qknorm_fairseq.experiment demo model=transformer_qknorm_tiny,transformer

Training is `fairseq-hydra-train` with the same configuration; a run's folder is the
configuration's `checkpoint.save_dir`. What is done is not done again; what was interrupted goes
on from fairseq's last checkpoint.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from qknorm_fairseq.environment import environment
from qknorm_fairseq.errors import QKNormError, complaint
from qknorm_fairseq.files import clear, copy, write_json, write_lines, write_text
from qknorm_fairseq.prepared_data import DESCRIPTION, SUBWORDS, Description
from qknorm_fairseq.progress import Steps
from qknorm_fairseq.reading import Unreadable, read_yaml
from qknorm_fairseq.runs import BEST, CONFIG, LAST, SCORE, Run, config_folder, plan
from qknorm_fairseq.training import DONE, RECORDS, console, progress_of, train


def run_all(runs: Sequence[Run], steps: Steps, *, failed: int = 0) -> None:
    """Bring every run to its score, whatever happens to the others; then print their tables.

    Args:
        failed: runs that had to be left out already, since their data is not there.

    Raises:
        QKNormError: some failed; why was said when it happened.
    """
    if runs and runs[0].launcher:
        from qknorm_fairseq.jobs import run_as_jobs

        finished = run_as_jobs(runs, steps)
    else:
        finished = _run_in_turn(runs, steps)
    # In a file or a pipe rich assumes 80 columns, which would cut the numbers off.
    terminal = Console()
    width = terminal.width if terminal.is_terminal else 120
    for pair in dict.fromkeys(run.pair for run in finished):
        Console(width=width).print(table([run for run in finished if run.pair == pair]))
    if finished:
        for metric, signature in finished[0].score()["signatures"].items():
            print(f"  {metric:<9}{signature}")
        print("Translations, scores, logs and checkpoints:")
        for run in finished:
            print(f"  {run.folder}")
    total, failed = len(runs) + failed, len(runs) - len(finished) + failed
    if failed:
        raise QKNormError(f"{failed} of {total} runs failed; the same command retries them")


def _run_in_turn(runs: Sequence[Run], steps: Steps) -> list[Run]:
    finished = []
    for run in runs:
        try:
            execute(run, steps)
            finished.append(run)
        except (QKNormError, OSError) as error:
            steps.failed(f"{run.title}: {complaint(error)}")
    return finished


def execute(run: Run, steps: Steps) -> None:
    """Bring a run to its `score.json`, from wherever it stands.

    Raises:
        QKNormError: the data is not prepared, the folder belongs to another configuration,
            another process is at work in it, its score is damaged, or training failed (the
            message names the log).
    """
    check_data(run)
    with _sole_user(run.folder):
        clear(run.folder)
        _claim(run)
        if is_done(run):
            steps.done(f"{run.title}: done before")
            return
        train(run)
        steps.done(f"{run.title}: trained, {progress_of(run.folder / LAST)['updates']:,} updates")
        _translate_and_score(run, steps)
        result = run.score()
        steps.done(
            f"{run.title}: translated and scored, BLEU {result['bleu']:.1f} "
            f"(tokenized {result['bleu_tok']:.1f})"
        )


def check_data(run: Run) -> None:
    """
    Raises:
        QKNormError: the data is not prepared.
    """
    if not (run.data / DESCRIPTION).is_file():
        raise QKNormError(f"{run.data}: not prepared yet; see `qknorm prepare --help`")


@contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QKNormError(f"{folder}: another process is at work on this run") from None
        except OSError:  # a network file system without locks: nobody can know
            pass
        yield


def is_begun(run: Run) -> bool:
    """Whether the folder holds a checkpoint or a score, and so is to go on.

    A score is kept without its checkpoints, which may have been removed for their size. A folder
    with neither holds nothing worth keeping: an attempt that failed at once.

    Raises:
        QKNormError: what it holds is of another configuration or of other data, or nobody can
            know.
    """
    file, known = run.folder / CONFIG, run.folder / DESCRIPTION
    scored = (run.folder / SCORE).is_file()
    if scored and not file.is_file():
        raise QKNormError(f"{file}: missing, so that {SCORE} may be of any run; move it away")
    if not (scored or (file.is_file() and (run.folder / LAST).is_file())):
        return False
    if file.read_bytes() != OmegaConf.to_yaml(run.config).encode():
        raise QKNormError(
            f"{run.folder}: holds a run with another configuration "
            f"({_difference(file, run.config)}); "
            "move it away, or choose another checkpoint.save_dir"
        )
    description = (run.data / DESCRIPTION).read_bytes()
    if known.is_file() and known.read_bytes() != description:
        raise QKNormError(
            f"{run.folder}: was trained on other data than {run.data} holds now; move it away"
        )
    return True


def is_done(run: Run) -> bool:
    """
    Raises:
        QKNormError: the score is damaged.
    """
    if not (run.folder / SCORE).is_file():
        return False
    run.score()
    return True


def _claim(run: Run) -> None:
    """Store configuration, environment and vocabulary in the folder, or check they are the same."""
    if is_begun(run):
        return
    for name in ("train.log", RECORDS, DONE):
        (run.folder / name).unlink(missing_ok=True)
    # The run's folder is enough to translate with, wherever it is taken.
    for name in (SUBWORDS, *(f"dict.{side}.txt" for side in run.pair.split("-")), DESCRIPTION):
        copy(run.data / name, run.folder / name)
    write_json(run.folder / "environment.json", environment(run))
    write_text(run.folder / CONFIG, OmegaConf.to_yaml(run.config))


def _difference(file: Path, config: Any) -> str:
    """The first setting in which the configuration in a file differs from this one."""
    try:
        there = read_yaml(file)
    except Unreadable as error:
        return f"its {file.name} is {error}"
    here = yaml.safe_load(OmegaConf.to_yaml(config))  # read alike: YAML has its ways with 1e-5
    old, new = (dict(_leaves(content)) for content in (there, here))
    for key in (*new, *old):
        if old.get(key) != new.get(key):
            return f"{key} is {old.get(key)} there, {new.get(key)} here"
    return "see its config.yaml"


def _leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(content, dict):
        yield path, content
        return
    for key, value in content.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _translate_and_score(run: Run, steps: Steps) -> None:
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
        cpu=run.config.common.cpu,
        tokenized=description.tokenized,
    )
    hypotheses: list[str] = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{run.title}: translating", total=len(source))
        for hypothesis in translator.translate_in_chunks(source, 128):
            hypotheses.append(hypothesis)
            progress.update(task, completed=len(hypotheses))
    # A model of tokens is scored by its own tokens, as in the papers on such a corpus.
    own_tokens = description.tokenized
    tokens = hypotheses if own_tokens else tokenize(hypotheses, target)
    texts = detokenize(hypotheses, target) if own_tokens else hypotheses
    write_lines(run.folder / "hyp.tok.txt", tokens)
    write_lines(run.folder / "hyp.detok.txt", texts)
    result = score(
        *(hypotheses, references),
        lang=target,
        tokenized=own_tokens,
        names=("translations", str(run.data / f"test.{target}")),
        say=lambda line: steps.done(f"{run.title}: {line}"),
    )
    trained = progress_of(run.folder / LAST)
    write_json(
        run.folder / SCORE,
        {
            **asdict(result),
            "pair": run.pair,
            "model": str(run.config.model._name),
            "ablation": run.ablation,
            "seed": run.seed,
            "params": sum(p.numel() for p in translator.models[0].parameters()),
            "updates": trained["updates"],
            "train_seconds": round(trained["seconds"], 1),
            "tokens_per_second": round(trained["tokens"] / trained["seconds"], 1),
            "test_sentences": len(source),
        },
    )


def table(runs: Sequence[Run]) -> Table:
    """Finished runs, a row each."""
    title = f"{runs[0].pair}, {runs[0].score()['test_sentences']:,} test sentences"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("model", "seed"):
        shown.add_column(column, no_wrap=True)
    for column in ("tok. BLEU", "BLEU", "chrF", "parameters", "training", "tokens/s"):
        shown.add_column(column, justify="right")
    for run in runs:
        result = run.score()
        minutes, seconds = divmod(round(result["train_seconds"]), 60)
        shown.add_row(
            run.name,
            str(run.seed),
            *(f"{result[key]:.1f}" for key in ("bleu_tok", "bleu", "chrf")),
            f"{result['params']:,}",
            f"{minutes}m{seconds:02d}s",
            f"{result['tokens_per_second']:,.0f}",
        )
    return shown


def main(
    config_name: Annotated[str, typer.Argument(help="A file in the configuration folder: demo.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra settings: key=a,b.")] = None,
    config_dir: Annotated[
        Path | None, typer.Option(help="Where configurations are (default: the project's).")
    ] = None,
) -> None:
    """Train, translate and score every combination of the settings, then print one table."""
    steps = Steps(console)
    run_all(plan(config_dir or config_folder(), config_name, overrides or []), steps)


if __name__ == "__main__":
    from qknorm_fairseq.cli import run_app

    run_app(lambda: typer.run(main))
