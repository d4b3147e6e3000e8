"""What fairseq-train writes can be read with torch's safe loader on; nothing else can.

The checkpoints are real ones of fairseq-train. The bad ones are the same files with one object
more in them, which would leave a mark if it ever came to life.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, Run, train
from faults import Fault
from omegaconf import OmegaConf

from qknorm_fairseq.checkpoints import ALLOWED, allow_fairseq_classes, load
from qknorm_fairseq.errors import QKNormError

PLUGIN = PROJECT / "qknorm_fairseq"
EVAL_BLEU = [
    *("--arch", "transformer_qknorm_tiny", "--eval-bleu", "--eval-bleu-remove-bpe"),
    *("--eval-bleu-args", '{"beam": 2, "max_len_a": 1, "max_len_b": 5}'),
    *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
    *("--validate-interval-updates", 1),
]
KINDS = (
    "transformer_qknorm",
    "fairseq's transformer",
    "validated with BLEU",
    "validated with BLEU by two processes",
)


@pytest.fixture(scope="module")
def bleu_checkpoint(run: Run, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates with --eval-bleu, then the same command again, up to three updates."""
    save_dir = tmp_path_factory.mktemp("bleu")
    train(run, prepared, save_dir, *EVAL_BLEU, updates=2)
    shutil.copy(save_dir / "checkpoint_last.pt", save_dir / "after_two.pt")
    train(run, prepared, save_dir, *EVAL_BLEU, updates=3)
    return save_dir / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def two_processes_checkpoint(
    run: Run, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same validation, trained by two processes on the CPU."""
    save_dir = tmp_path_factory.mktemp("two_processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    together = [
        *("--distributed-world-size", 2, "--distributed-init-method", address),
        *("--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"),
    ]

    def process(rank: int) -> None:
        options = [*EVAL_BLEU, *together, "--distributed-rank", rank]
        train(run, prepared, save_dir, *options, updates=1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(process, (0, 1)))
    return save_dir / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def saved(
    checkpoint: Path,
    transformer_checkpoint: Path,
    bleu_checkpoint: Path,
    two_processes_checkpoint: Path,
) -> dict[str, Path]:
    """Checkpoints of each kind that users of the plugin meet."""
    paths = (checkpoint, transformer_checkpoint, bleu_checkpoint, two_processes_checkpoint)
    return dict(zip(KINDS, paths, strict=True))


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_fairseq_train_writes_can_be_read(saved: dict[str, Path], kind: str) -> None:
    allow_fairseq_classes()
    state = torch.load(saved[kind], map_location="cpu", weights_only=True)
    assert state["cfg"]["task"] is not None
    assert state["model"]["encoder.layers.0.self_attn.q_proj.weight"].shape == (32, 32)


@pytest.mark.parametrize("needless", ALLOWED, ids=str)
def test_no_class_is_allowed_that_no_checkpoint_needs(
    saved: dict[str, Path], needless: Any
) -> None:
    """Without any one of the allowed classes, one of the checkpoints is refused."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([one for one in ALLOWED if one is not needless])
    try:
        refused = []
        for path in saved.values():
            try:
                torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                refused.append(str(error))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    assert refused
    assert all("weights_only" in message for message in refused)


def test_training_goes_on_from_a_checkpoint_with_bleu(bleu_checkpoint: Path) -> None:
    """The same fairseq-train, with one update more: it goes on with model, optimizer, meters."""
    before, after = load(bleu_checkpoint.with_name("after_two.pt")), load(bleu_checkpoint)
    assert before["optimizer_history"][-1]["num_updates"] == 2
    assert after["optimizer_history"][-1]["num_updates"] == 3
    # Adam counts its steps: one who started anew would be at 1.
    steps = {state["step"] for state in after["last_optimizer_state"]["state"].values()}
    assert steps == {3}
    changed = [
        name
        for name in before["model"]
        if not torch.equal(before["model"][name], after["model"][name])
    ]
    assert "encoder.layers.0.self_attn.g" in changed
    best = after["extra_state"]["best"]
    assert best is not None and best >= before["extra_state"]["best"] >= 0  # a BLEU


# ---------------------------------------------------------------------------------------------
# Refusing
# ---------------------------------------------------------------------------------------------

MARK = "came-to-life"  # the file that each of these would leave behind


class Returned:
    """Unpickled, it is what a function returns: any function."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.copy, (__file__, self.mark)


class Restored:
    """Unpickled, its state is given to code of its own."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["mark"]).touch()


class Evaluated:
    """Unpickled, a shell runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.mark}'",)


def at_the_top(state: dict[str, Any], payload: object) -> None:
    state["more"] = payload


def in_the_options(state: dict[str, Any], payload: object) -> None:
    state["cfg"]["model"] = argparse.Namespace(_name="transformer_qknorm_tiny", more=payload)


def in_extra_state(state: dict[str, Any], payload: object) -> None:
    state["extra_state"]["train_iterator"]["more"] = [{"deep": payload}]


def in_omegaconf(state: dict[str, Any], payload: object) -> None:
    config = OmegaConf.create({"more": 0}, flags={"allow_objects": True})
    config._get_node("more")._val = payload  # as create would copy it, and so run it
    state["cfg"]["more"] = config


PAYLOADS = {
    "a shell command": (Evaluated, at_the_top, "posix.system"),
    "a shell command in the options": (Evaluated, in_the_options, "posix.system"),
    "a function call deep in extra_state": (Returned, in_extra_state, "shutil.copy"),
    "a shell command in OmegaConf": (Evaluated, in_omegaconf, "omegaconf.dictconfig.DictConfig"),
    "an object with state": (Restored, at_the_top, f"{__name__}.Restored"),
    "an object with state in the options": (Restored, in_the_options, f"{__name__}.Restored"),
}


@pytest.fixture(params=PAYLOADS)
def bad(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint with a payload, and the name of what the payload needs."""
    payload, place, name = PAYLOADS[request.param]
    state = torch.load(checkpoint, weights_only=True)
    place(state, payload(tmp_path / MARK))
    torch.save(state, tmp_path / "bad.pt")
    return tmp_path / "bad.pt", name


@pytest.fixture(autouse=True)
def nothing_came_to_life(tmp_path: Path) -> Iterator[None]:
    yield
    assert not (tmp_path / MARK).exists()


def test_a_payload_works_where_it_is_let(bad: tuple[Path, str]) -> None:
    """What the other tests rely on: these files are no duds."""
    path, _ = bad
    torch.load(path, weights_only=False)
    (path.parent / MARK).unlink()  # it was there


def test_a_checkpoint_with_a_payload_is_refused_by_name(
    bad: tuple[Path, str], request: pytest.FixtureRequest, fault: Fault
) -> None:
    path, name = bad
    with pytest.raises(QKNormError) as refusal:
        load(path)
    assert str(refusal.value) == (
        f"{path}: refused, since it carries {name}, which no fairseq checkpoint needs and which "
        "could run code"
    )
    fault("strangers' checkpoints", request.node.callspec.params["bad"], str(refusal.value))


@pytest.mark.parametrize("bad", ["an object with state in the options"], indirect=True)
def test_fairseq_generate_refuses_it_by_name(
    run: Run, prepared: Path, bad: tuple[Path, str]
) -> None:
    path, name = bad
    done = run(
        "fairseq-generate",
        *(prepared, "--user-dir", PLUGIN, "--path", path, "--gen-subset", "test", "--cpu"),
    )
    assert done.returncode == 1
    assert re.search(rf"[Uu]nsupported (global: )?GLOBAL {re.escape(name)} ", done.stderr)
