"""A training killed at any moment and started again ends as one that ran through, bit for bit.

Real processes get a real SIGKILL: at random moments (their seed is fixed), while a checkpoint is
being written, and during a validation. `--kills 200` kills more often.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from fairseq import checkpoint_utils
from faults import Fault
from forks import Forks

import qknorm_fairseq

MODEL = (
    *("--arch", "transformer_qknorm_tiny", "--qknorm-length", 12),
    *("--encoder-layers", 1, "--decoder-layers", 1),
    *("--encoder-embed-dim", 16, "--decoder-embed-dim", 16),
    *("--encoder-ffn-embed-dim", 32, "--decoder-ffn-embed-dim", 32),
    *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
    *("--dropout", 0.2, "--attention-dropout", 0.1, "--activation-dropout", 0.1),
    *("--word-dropout", 0.1),
    *("--max-tokens", 200, "--required-batch-size-multiple", 1, "--cpu", "--seed", 1),
    *("--no-epoch-checkpoints", "--log-format", "json", "--log-interval", 5),
)
RECIPES = {
    # The paper's: its schedule decays on the dev BLEU; epochs are cut from an endless row.
    "paper": (
        *("--task", "translation_qknorm", "--epoch-batches", 8, "--extra-length", 3),
        *("--criterion", "label_smoothed_cross_entropy_allowed", "--label-smoothing", 0.1),
        "--logit-mask",
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-tokenized-bleu"),
        *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
        *("--optimizer", "adam_fused", "--lr", 0.005, "--lr-scheduler", "decay_on_bleu"),
        *("--warmup-updates", 6, "--bleu-patience", 1, "--stop-min-lr", 0),
        *("--save-interval-updates", 3, "--keep-interval-updates", 1, "--max-update", 36),
    ),
    # The same schedule with fairseq's own task, which knows nothing of it.
    "fairseq's task": (
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-tokenized-bleu"),
        *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
        *("--optimizer", "adam", "--lr", 0.005, "--lr-scheduler", "decay_on_bleu"),
        *("--warmup-updates", 4, "--bleu-patience", 1, "--stop-min-lr", 0),
        *("--no-fast", "--max-update", 40),
    ),
    # Half precision, whose loss scale grows and is halved. fairseq asks for a GPU at an overflow.
    "half precision": (
        *("--fp16", "--fp16-no-flatten-grads", "--fp16-scale-window", 3, "--fp16-init-scale", 1024),
        *("--optimizer", "adam_fused", "--lr", 0.005, "--max-update", 40),
        *("--save-interval-updates", 4, "--keep-interval-updates", 1),
    ),
    # The README's, which stops by patience: the loss gets worse, at such a rate.
    "patience": (
        *("--optimizer", "adam_fused", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0),
        *("--lr", 0.3, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", 5),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--update-freq", 2, "--patience", 4, "--max-update", 200),
    ),
}
KILLS = {"paper": 8, "fairseq's task": 4, "half precision": 4, "patience": 4}  # by default
WITHOUT_GPU = "import torch; torch.Tensor.cuda = lambda tensor: tensor"
CLOCK = re.compile(r"(.*_)?(wall|wps|ups|time)$")  # what no two trainings have alike
LOADED = re.compile(r"Loaded checkpoint \S+ \(epoch \d+ @ (\d+) updates\)")
LOGGED = re.compile(r"\| (train_inner|valid|train) \| (\{.*\})$", re.M)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tiny.larger_text(train=150, valid=12)
    return tiny.write_data(tmp_path_factory.mktemp("data"), text)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qknorm_fairseq.register()
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    checkpoint_utils.torch_persistent_save({"model": {}}, str(tmp_path / "a.pt"))
    assert done == ["sync a.pt.tmp", "rename a.pt.tmp", f"sync {tmp_path.name}"]


def command(data: Path, save_dir: Path, *recipe: object) -> list[object]:
    return [data, "--user-dir", tiny.USER_DIR, *MODEL, *recipe, "--save-dir", save_dir]


def content(save_dir: Path, name: str = "checkpoint_last.pt") -> dict[str, Any]:
    """A checkpoint without what tells the time, the folder and the former processes."""
    qknorm_fairseq.register()  # lets torch's safe loader read fairseq's checkpoints
    state: dict[str, Any] = torch.load(save_dir / name, weights_only=True)
    del state["extra_state"]["previous_training_time"]
    state["optimizer_history"] = state["optimizer_history"][-1:]  # fairseq adds one a process
    del state["cfg"]["checkpoint"]["save_dir"]
    state["cfg"].pop("job_logging_cfg", None)  # Hydra's; it names the folder too
    state["extra_state"]["metrics"] = {
        kind: [meter for meter in values if not CLOCK.match(meter[1])]
        for kind, values in state["extra_state"]["metrics"].items()
    }
    return state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two checkpoints differ, to the last bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = [] if list(one) == list(other) else [f"{path}: {list(one)} and {list(other)}"]
        for key in one.keys() & other.keys():
            found += differences(one[key], other[key], f"{path}.{key}")
        return found
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, both in pairs for line in differences(*both, f"{path}.{n}")]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
    else:
        same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return [] if same else [f"{path}: {one} and {other}"]


def losses(log: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What was logged of each update, averages over intervals and epochs included."""
    found = {}
    for kind, numbers in LOGGED.findall(log.read_text("utf-8", errors="replace")):
        record = json.loads(numbers)
        key = next(name for name in record if name.endswith("num_updates"))
        values = {name: value for name, value in record.items() if not CLOCK.match(name)}
        # A process that goes on says again what its killed predecessor said.
        assert found.setdefault((kind, record[key]), values) == values
    return found


def moments(
    numbers: random.Random, save_dir: Path, log: Path, longest: float
) -> Iterator[Callable[[], bool]]:
    """When to kill, in turns: at a random moment, in a save, in a validation."""
    while True:
        until = time.monotonic() + numbers.uniform(0, longest)
        yield lambda until=until: time.monotonic() > until  # type: ignore[misc]
        yield written(save_dir, numbers)
        yield validating(log, numbers)


def written(save_dir: Path, numbers: random.Random) -> Callable[[], bool]:
    """A checkpoint or a copy of one is half there: the first of this process, or a later one."""
    seen = {file: file.stat().st_mtime_ns for file in save_dir.glob("*.tmp")}
    left = numbers.randint(0, 3)

    def now() -> bool:
        nonlocal left
        for file in save_dir.glob("*.tmp"):
            try:
                time_written = file.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            if seen.get(file) != time_written:
                seen[file] = time_written
                left -= 1
        return left < 0

    return now


def validating(log: Path, numbers: random.Random) -> Callable[[], bool]:
    def begun() -> int:
        return log.read_text("utf-8").count("begin validation") if log.exists() else 0

    last = begun() + numbers.randint(0, 2)
    return lambda: begun() > last


@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_again_and_again_it_ends_the_same(
    recipe: str,
    forks: Forks,
    data: Path,
    tmp_path: Path,
    fault: Fault,
    request: pytest.FixtureRequest,
) -> None:
    straight = tmp_path / "straight"
    begun = time.monotonic()
    said = forks.run(
        tmp_path / "straight.log", *command(data, straight, *RECIPES[recipe]), before=WITHOUT_GPU
    )
    assert ("gradient overflow detected" in said) == (recipe == "half precision")
    longest = (time.monotonic() - begun) / 2
    assert ("early stop since valid performance" in said) == (recipe == "patience")

    numbers = random.Random(1)
    wanted = KILLS[recipe] * request.config.getoption("--kills") / sum(KILLS.values())
    kills = trainings = resumed = 0
    while kills < wanted:  # it may end before it was killed often enough
        trainings += 1
        killed, log = tmp_path / f"killed{trainings}", tmp_path / f"killed{trainings}.log"
        killed.mkdir()
        when, status = moments(numbers, killed, log, longest), -9
        while status == -9:
            training = command(data, killed, *RECIPES[recipe])
            process = forks.start(log, *training, before=WITHOUT_GPU)
            status = process.kill_when(next(when)) if kills < wanted else process.wait()
            kills += status == -9
        assert status == 0, log.read_text("utf-8")
        for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
            assert differences(content(straight, name), content(killed, name)) == []
        expected, found = losses(tmp_path / "straight.log"), losses(log)
        last = max(int(update) for _, update in expected)
        loaded = map(int, LOADED.findall(log.read_text("utf-8", errors="replace")))
        resumed += sum(0 < update < last for update in loaded)
        assert found == {update: expected[update] for update in found}
        # fairseq logs an epoch's averages after it has saved: killed between, they stay unsaid.
        assert {kind for kind, _ in expected.keys() - found.keys()} <= {"train"}
        if not resumed and trainings < 8:  # killed too early each time
            wanted = max(wanted, kills + 1)
    assert resumed  # or each training may just have begun anew
    happened = f"same weights, state and losses; {resumed} went on from a checkpoint"
    fault("training", f"killed {kills} times ({recipe})", happened)


SHORT = ("--optimizer", "adam_fused", "--lr", 0.01, "--max-update", 6)


def test_a_training_that_has_ended_does_nothing_more(
    forks: Forks, data: Path, tmp_path: Path
) -> None:
    """fairseq alone would do one more update each time."""
    arguments = command(data, tmp_path / "run", *SHORT)
    forks.run(tmp_path / "log", *arguments)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()}
    said = forks.run(tmp_path / "again", *arguments)
    assert "the training has ended before, with update 6: nothing is done" in said
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()} == before


def cut_in_half(content: bytearray) -> None:
    del content[len(content) // 2 :]


def with_a_flipped_byte(content: bytearray) -> None:
    """In the largest array, where torch itself sees nothing wrong."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        arrays = [member for member in archive.infolist() if "/data/" in member.filename]
    largest = max(arrays, key=lambda member: member.file_size)
    name, extra = struct.unpack_from("<HH", content, largest.header_offset + 26)
    content[largest.header_offset + 30 + name + extra] ^= 0x41
    torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.parametrize("damage", [cut_in_half, with_a_flipped_byte])
def test_a_damaged_checkpoint_is_named_and_left(
    damage: Callable[[bytearray], None], forks: Forks, data: Path, tmp_path: Path, fault: Fault
) -> None:
    arguments = command(data, tmp_path / "run", *SHORT)
    forks.run(tmp_path / "log", *arguments)
    last = tmp_path / "run" / "checkpoint_last.pt"
    content = bytearray(last.read_bytes())
    damage(content)
    last.write_bytes(content)
    assert forks.start(tmp_path / "again", *arguments).wait() == 1
    line = (tmp_path / "again").read_text("utf-8").splitlines()[-1]
    assert line.endswith(f"{last}: damaged, or no torch checkpoint; take another copy")
    assert last.read_bytes() == content
    done = damage.__name__.replace("_", " ")
    fault("training", f"fairseq-train goes on from a checkpoint {done}", line)


def test_each_training_of_a_process_has_a_best_checkpoint_of_its_own(
    forks: Forks, data: Path, tmp_path: Path
) -> None:
    """As in a Hydra sweep: the second one is worse at its best than the first one was."""
    first = [str(part) for part in command(data, tmp_path / "first", *SHORT)]
    second = command(data, tmp_path / "second", *SHORT, "--lr", 1e-6)
    before = (
        "import fairseq_cli.train, forks\n"
        f"fairseq_cli.train.main(forks.configuration(tuple({first!r})))"
    )
    forks.run(tmp_path / "log", *second, before=before)
    best = [content(tmp_path / run, "checkpoint_best.pt") for run in ("first", "second")]
    losses = [state["extra_state"]["best"] for state in best]
    assert losses[0] < losses[1]
