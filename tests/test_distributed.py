"""Several processes train what one process does with as many batches an update: real ones, by gloo.

Dropout is off: each process draws its masks from the start of the same row of numbers, one process
draws on for its next batch, so with dropout the masks differ.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import PROJECT, clean_environment
from faults import Fault

import qknorm_fairseq

MODULE = ("-m", "qknorm_fairseq.distributed")
EPOCHS, BATCHES = 6, 5  # an epoch's batches, for each process
SIZES = {"layers": 1, "embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2}
# The plugin's parts that could be for one process only: packed batches, the fused optimizer, the
# logit mask and its loss, dev BLEU, the schedule that decays on it, epochs of so many batches.
OPTIONS = [
    *("--user-dir", "qknorm_fairseq", "--task", "translation_qknorm"),
    *("--arch", "transformer_qknorm_tiny", "--qknorm-length", "12", "--logit-mask"),
    *(
        part
        for side in ("encoder", "decoder")
        for name, size in SIZES.items()
        for part in (f"--{side}-{name.replace('_', '-')}", str(size))
    ),
    *("--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0"),
    *("--word-dropout", "0"),
    *("--criterion", "label_smoothed_cross_entropy_allowed", "--label-smoothing", "0.1"),
    *("--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-tokenized-bleu"),
    *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
    *("--optimizer", "adam_fused", "--lr", "0.02", "--clip-norm", "1", "--stop-min-lr", "0"),
    *("--lr-scheduler", "decay_on_bleu", "--warmup-updates", "4", "--bleu-patience", "1"),
    # 3 batches of dev sentences: the second of two processes has none of its own for the third.
    *("--max-tokens", "100", "--batch-size-valid", "4", "--max-epoch", str(EPOCHS)),
    *("--no-epoch-checkpoints", "--log-format", "json", "--log-interval", "1", "--cpu"),
]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed") / "data"
    return tiny.write_data(folder, tiny.larger_text(train=75, valid=11))


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """`start("torchrun", ...)`: at work in a session of its own, until the module's end."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [Path(sys.executable).with_name(command), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=PROJECT,
            env=clean_environment() | env,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finished(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def logged(output: str) -> list[dict[str, str]]:
    """The numbers of each update and validation in fairseq's log.

    Without how long they took, and how large the batches of a step were: a step of the validation
    takes one batch of each process.
    """
    time_and_size = ("wps", "ups", "wpb", "bsz", "wall", "train_wall")
    return [
        {
            key: value
            for key, value in json.loads(match).items()
            if key.removeprefix("train_").removeprefix("valid_") not in time_and_size
        }
        for match in re.findall(r'(\{"epoch".*\})', output)
    ]


def weights(save_dir: Path) -> dict[str, torch.Tensor]:
    qknorm_fairseq.register()  # lets torch's safe loader read fairseq's checkpoints
    model: Any = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)["model"]
    return dict(model)


def assert_the_same(found: Path, expected: Path) -> None:
    """The final weights, within rounding."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def alone(data: Path, start: Start) -> tuple[Path, str]:
    """The folder and log of one process that takes two batches for each update."""
    save_dir = data.parent / "alone"
    settings = ("--update-freq", 2, "--epoch-batches", 2 * BATCHES, "--save-dir", save_dir)
    return save_dir, finished(start("fairseq-train", data, *OPTIONS, *settings))


# Each process has a folder of its own here, where it says what its schedule did after an epoch.
WATCHED = """
import json, os, pathlib, sys
from fairseq.trainer import Trainer
from qknorm_fairseq import distributed

folder = pathlib.Path(sys.argv[1], os.environ["RANK"])
folder.mkdir(parents=True)
step = Trainer.lr_step

def watched(self, epoch, bleu=None):
    rate = step(self, epoch, bleu)
    with (folder / "rates").open("a") as file:
        print(json.dumps([epoch, bleu, rate]), file=file)
    return rate

Trainer.lr_step = watched
sys.argv[1:] = [*sys.argv[2:], "--save-dir", str(folder)]
distributed.main()
"""


def test_two_nodes_train_what_one_process_does(
    data: Path, alone: tuple[Path, str], start: Start, tmp_path: Path
) -> None:
    """Two torchruns that find each other, with one process each."""
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        start(
            "torchrun",
            *("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
            *(script, tmp_path / "nodes", data, *OPTIONS, "--epoch-batches", BATCHES),
        )
        for _ in range(2)
    ]
    log = "".join(finished(node) for node in nodes)  # only process 0 logs numbers

    assert logged(log) == logged(alone[1])
    assert_the_same(tmp_path / "nodes" / "0", alone[0])

    # Both processes saw the dev BLEU that one process has, and decayed after the same epochs.
    first, second = ((tmp_path / "nodes" / rank / "rates").read_text() for rank in "01")
    assert first == second
    epochs = [json.loads(line) for line in first.splitlines()]
    expected = [
        float(record["valid_bleu"]) for record in logged(alone[1]) if "valid_bleu" in record
    ]
    assert [bleu for _, bleu, _ in epochs if bleu is not None] == expected
    assert len(expected) == EPOCHS
    assert any(later[2] < before[2] for before, later in pairwise(epochs)), (
        f"no test of the decay with {expected}"
    )

    # Only process 0 writes checkpoints.
    assert {file.name for file in (tmp_path / "nodes" / "0").iterdir()} == {
        *("rates", "checkpoint_best.pt", "checkpoint_last.pt")
    }
    assert [file.name for file in (tmp_path / "nodes" / "1").iterdir()] == ["rates"]


def test_killed_and_started_again_it_ends_the_same(
    data: Path, alone: tuple[Path, str], start: Start, tmp_path: Path
) -> None:
    command = (
        *("torchrun", "--standalone", "--nproc-per-node", 2, *MODULE, data, *OPTIONS),
        *("--epoch-batches", BATCHES, "--save-dir", tmp_path / "killed"),
    )
    killed = start(*command)
    assert killed.stdout is not None
    said = []
    for line in killed.stdout:
        said.append(line)
        if "Saved checkpoint" in line:
            break
    else:
        pytest.fail("".join(said))
    assert len(at_work(tmp_path)) >= 3  # torchrun, what it started, and what that reads data with
    os.killpg(killed.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left := at_work(tmp_path):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)

    rest = finished(start(*command))
    begun = re.search(r"Loaded checkpoint .* \(epoch (\d+) @ (\d+) updates\)", rest)
    assert begun is not None and 0 < int(begun[2]) < EPOCHS * BATCHES, rest
    records = logged(alone[1])
    ours = logged(rest)
    assert ours == records[-len(ours) :]
    assert_the_same(tmp_path / "killed", alone[0])


def at_work(folder: Path) -> list[str]:
    """The processes that a command line with this folder in it started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
        if str(folder) in line and "python" in line:
            found.append(f"{file.parent.name} {line}")
    return found


def test_four_processes_and_hydra_on_the_plain_path(
    data: Path, start: Start, tmp_path: Path
) -> None:
    """Passes over the data, whose last batches are not enough for all."""
    settings = [
        *("--config-dir", "configs", "--config-name", "demo", f"task.data={data}"),
        *("task.source_lang=xx", "task.target_lang=yy", "+model.fast=false"),
        *(
            f"model.{side}_{name}={n}"
            for side in ("encoder", "decoder")
            for name, n in SIZES.items()
        ),
        *("model.dropout=0", "model.attention_dropout=0", "model.activation_dropout=0"),
        *("+model.qknorm_length=12", "dataset.max_tokens=100", "optimization.max_update=12"),
        "common.log_interval=1",
    ]
    one = finished(
        start(
            *("fairseq-hydra-train", *settings, f"checkpoint.save_dir={tmp_path / 'one'}"),
            "optimization.update_freq=[4]",
        )
    )
    four = finished(
        start(
            *("torchrun", "--standalone", "--nproc-per-node", 4, *MODULE, *settings),
            f"checkpoint.save_dir={tmp_path / 'four'}",
        )
    )
    assert logged(four) == logged(one)
    assert_the_same(tmp_path / "four", tmp_path / "one")


def test_the_command_of_the_readme(prepared: Path, tmp_path: Path) -> None:
    """To the letter but for the number of updates."""
    readme = (PROJECT / "README.md").read_text("utf-8")
    block = re.search(r"<!-- tested: torchrun -->\n```bash\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    command, changed = re.subn(r"--max-update \d+", "--max-update 2", block[1])
    assert changed == 1
    (tmp_path / "qknorm_fairseq").symlink_to(PROJECT / "qknorm_fairseq")  # the README is at home
    (tmp_path / "data" / "prepared").mkdir(parents=True)
    (tmp_path / "data" / "prepared" / "mine").symlink_to(prepared)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env=clean_environment() | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine" / "checkpoint_best.pt").is_file()
    log = done.stdout + done.stderr
    assert "training on 2 devices" in log and "max tokens per device = 500" in log


# Process 1 alone is told another folder.
ASTRAY = """
import os, sys
from qknorm_fairseq import distributed
sys.argv[1] += os.environ["RANK"].replace("0", "")
distributed.main()
"""


@pytest.mark.parametrize("missing", ["of one process", "of all"])
def test_an_error_in_one_process_ends_all_and_is_said_once(
    missing: str, data: Path, start: Start, tmp_path: Path, fault: Fault
) -> None:
    script = tmp_path / "astray.py"
    script.write_text(ASTRAY)
    folder = data if missing == "of one process" else tmp_path / "none"
    process = start(
        *("torchrun", "--standalone", "--nproc-per-node", 2, script, folder, *OPTIONS),
        *("--save-dir", tmp_path / "save"),
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    [line] = [line for line in output.splitlines() if "qknorm: process" in line]
    process_of_it = 1 if missing == "of one process" else r"\d"
    assert re.search(rf"qknorm: process {process_of_it}: .*(No such file|Could not infer)", line)
    fault("distributed", f"torchrun with a data folder missing, {missing}", line)


def test_without_torchrun_it_says_what_to_type(start: Start, fault: Fault) -> None:
    process = start("python", *MODULE, "data", "--arch", "transformer_qknorm")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.startswith("qknorm: ") and output.count("\n") == 1
    assert "torchrun --nproc-per-node 2 -m qknorm_fairseq.distributed" in output
    fault("distributed", "`python -m qknorm_fairseq.distributed` without torchrun", output)
