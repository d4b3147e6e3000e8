"""`scripts/reproduce.sh` killed at each of its steps and started again: the same `score.json`.

The process is forked from one that has imported torch and fairseq; all it starts itself, such as
fairseq-hydra-train, it starts as ever, and SIGKILL is for all of them. By default one model and the
steps that differ most; with `--kills 100`, say, both models and all steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import Fault
from forks import Forks, Training
from publisher import Publisher
from test_reproduction import MODELS, SMALL
from test_resume import content, differences
from test_ted import WHOLE
from test_ted import registry as ted_registry

CODE = """
import os, runpy, sys
os.environ["no_proxy"] = "127.0.0.1"
sys.argv = ["reproduction", *{arguments!r}]
runpy.run_module("qknorm_fairseq.reproduction", run_name="__main__")
"""
SMALL_WORK = re.compile(r"\..*\.tmp$")
# What appears in the folder when a step is at work: {run} is a model's folder.
OF_DATA = {
    "fetching": "data/**/*.part*",
    "unpacking": "data/corpora/**/.gl-en.*",
    "preparing": "data/prepared/**/.gl-en.*",
    "prepared": "data/prepared/**/qknorm.json",
}
OF_A_RUN = {
    "starting a training": "{run}/train.log",
    "writing a checkpoint": "{run}/*.pt.tmp",
    "training": "{run}/checkpoint_last.pt",
    "translating": "{run}/training.done",
    "translated": "{run}/hyp*",
    "scored": "{run}/score.json",
}
DEFAULT = ("writing a checkpoint", "translating", "scored")


def appears(folder: Path, pattern: str) -> Callable[[], bool]:
    """Something of this pattern that is not there yet."""
    there = set(folder.glob(pattern))

    def now() -> bool:
        try:
            return not there.issuperset(folder.glob(pattern))
        except FileNotFoundError:  # a folder was renamed while it was looked through
            return False

    return now


def names(folder: Path) -> set[Path]:
    """All that lies in a folder: no step's work half done may stay.

    What a kill can leave is a small file under a name of its own, of those written at one go.
    """
    return {
        file.relative_to(folder)
        for file in folder.rglob("*")
        if not (file.is_file() and SMALL_WORK.match(file.name))
    }


def result(folder: Path) -> dict[str, Any]:
    """score.json without what the clock says."""
    found: dict[str, Any] = json.loads((folder / "score.json").read_text("utf-8"))
    return {key: found[key] for key in found.keys() - {"train_seconds", "tokens_per_second"}}


def test_killed_at_each_step(
    forks: Forks,
    publisher: Publisher,
    tmp_path: Path,
    fault: Fault,
    request: pytest.FixtureRequest,
) -> None:
    all_steps = request.config.getoption("--kills") > 20
    models = MODELS if all_steps else MODELS[1:]
    publisher.files["/copies/ted_talks.tar.gz"] = WHOLE
    registry = ted_registry(tmp_path, counts=(100, 25, 25))

    def start(folder: Path) -> Training:
        folder.mkdir(exist_ok=True)
        options = ("--tiny", "--cpu", "--corpus", "ted", "--mirror", f"{publisher.address}copies")
        chosen = ("--registry", registry, "--models", ",".join(models), "--in", folder)
        arguments = [str(part) for part in ("gl-en", *options, *chosen, *SMALL)]
        return forks.start(tmp_path / "log", before=CODE.format(arguments=arguments))

    def said() -> str:
        return (tmp_path / "log").read_text("utf-8")

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert start(straight).wait() == 0, said()

    runs = [f"runs/ted/gl-en/{model}/seed1" for model in models]
    steps = dict(OF_DATA)
    of_a_run = {step: pattern for step, pattern in OF_A_RUN.items() if all_steps or step in DEFAULT}
    for run in runs:
        steps |= {f"{step} {run}": pattern.format(run=run) for step, pattern in of_a_run.items()}
    for step, pattern in steps.items():
        publisher.stalls_after = 1000 if step == "fetching" else None
        status = start(killed).kill_when(appears(killed, pattern))
        publisher.finished.set()
        assert status == -9, f"not killed while {step}: {said()}"
    assert start(killed).wait() == 0, said()

    for run in runs:
        assert result(killed / run) == result(straight / run)
        for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
            assert differences(content(straight / run, name), content(killed / run, name)) == []
        assert (killed / run / "hyp.tok.txt").read_bytes() == (
            straight / run / "hyp.tok.txt"
        ).read_bytes()
        assert names(killed / run) == names(straight / run)
    assert names(killed / "data") == names(straight / "data")
    fault("reproduce", f"killed at {len(steps)} steps", "the same score.json and checkpoints")
