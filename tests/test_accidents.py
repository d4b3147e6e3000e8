"""What can happen in a training: a loss that is no number, a loss scale that collapses, no memory.

fairseq handles each in its own way. Here it does so with the plugin's models, on the fast path and
without, and the line at the end says what to change.
"""

from __future__ import annotations

import logging
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import PROJECT, Run
from fairseq.nan_detector import NanDetector
from faults import Fault
from forks import Forks
from test_experiment import QKNORM, command
from test_experiment import score as score_of
from test_resume import WITHOUT_GPU, content, differences

import qknorm_fairseq
from qknorm_fairseq.advice import ADVICE, failure

SMALL = (
    *("--arch", "transformer_qknorm_tiny", "--qknorm-length", 12),
    *("--encoder-layers", 1, "--decoder-layers", 1),
    *("--encoder-embed-dim", 16, "--decoder-embed-dim", 16),
    *("--encoder-ffn-embed-dim", 32, "--decoder-ffn-embed-dim", 32),
    *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
    *("--dropout", 0.2, "--optimizer", "adam_fused", "--max-tokens", 200, "--cpu", "--seed", 1),
    *("--required-batch-size-multiple", 1),
    *("--no-epoch-checkpoints", "--log-format", "json"),
)
PATHS = {"fast": (), "no-fast": ("--no-fast",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tiny.larger_text(train=60, valid=6)
    return tiny.write_data(tmp_path_factory.mktemp("data"), text)


def training(data: Path, save_dir: Path, *options: object) -> list[object]:
    return [data, "--user-dir", tiny.USER_DIR, *SMALL, *options, "--save-dir", save_dir]


# ---------------------------------------------------------------------------------------------
# A loss that is no number
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("transformer", ()),
        ("transformer_qknorm", ()),
        ("transformer_qknorm", ("--no-fast",)),
        ("transformer_scalenorm", ()),
    ],
)
def test_fairseqs_detector_names_the_module(
    arch: str,
    options: tuple[str, ...],
    where: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also with a logit mask, whose -inf is no fault, and behind the encoder's dict of lists."""
    qknorm_fairseq.register()
    model, criterion, task = tiny.build(tiny.write_data(tmp_path / "data"), *options, arch=arch)
    model.train()
    spoilt = model.encoder.layers[0].fc2
    if where == "forward":
        with torch.no_grad():
            spoilt.bias[0] = torch.nan
    else:
        spoilt.register_forward_hook(spoil_gradient)
    with caplog.at_level(logging.WARNING), NanDetector(model):
        criterion(model, tiny.batch(task))[0].backward()
    said = [
        record.message for record in caplog.records if "detected in output of" in record.message
    ]
    if where == "forward":
        assert said[0].startswith("NaN detected in output of encoder.layers.0.fc2, ")
    else:  # the first on the way back whose output has such a gradient: it feeds fc2
        (line,) = said
        assert line.startswith("NaN detected in output of encoder.layers.0.activation_dropout_m")
        assert line.endswith(", backward")


def spoil_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return Spoilt.apply(output)  # type: ignore[no-any-return, no-untyped-call]


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf)


@pytest.mark.parametrize("path", PATHS)
def test_a_healthy_model_is_not_accused(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, criterion, task = tiny.build(tiny.write_data(tmp_path / "data"), *PATHS[path])
    model.train()
    with caplog.at_level(logging.INFO), NanDetector(model):
        criterion(model, tiny.batch(task))[0].backward()
    assert not [record for record in caplog.records if "etected" in record.message]


@pytest.mark.parametrize("path", PATHS)
def test_a_training_that_explodes_ends_in_what_it_is(
    path: str, forks: Forks, data: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    exploding = training(data, tmp_path / "run", "--lr", 1e30, "--max-update", 20, *PATHS[path])
    assert forks.start(log, *exploding).wait() == 1
    said = log.read_text("utf-8")
    assert " detected in output of " in said
    assert said.splitlines()[-1] == "FloatingPointError: gradients are Nan/Inf"


def test_the_experiment_says_what_to_change(
    run: Run, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    settings = ("optimization.lr=[1e30]", "lr_scheduler.warmup_updates=1")
    done = run("python", *command(prepared, *settings, "optimization.max_update=30"), cwd=tmp_path)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "training failed: " in line)
    assert "FloatingPointError: gradients are Nan/Inf: lower optimization.lr, set " in line
    assert str(QKNORM / "train.log") in line
    fault("training", "a learning rate at which the loss is no number", line)


# ---------------------------------------------------------------------------------------------
# Half precision
# ---------------------------------------------------------------------------------------------

FP16 = ("--fp16", "--fp16-no-flatten-grads", "--lr", 0.005)


@pytest.mark.parametrize("path", PATHS)
def test_a_scale_that_is_too_large_is_halved_until_it_fits(
    path: str, forks: Forks, data: Path, tmp_path: Path
) -> None:
    options = ("--fp16-init-scale", 2**30, "--max-update", 5)
    halving = training(data, tmp_path / "run", *FP16, *options, *PATHS[path])
    said = forks.run(tmp_path / "log", *halving, before=WITHOUT_GPU)
    assert said.count("gradient overflow detected, ignoring gradient") >= 10
    state = content(tmp_path / "run")
    assert state["optimizer_history"][-1]["num_updates"] == 5
    assert 1 <= state["last_optimizer_state"]["loss_scale"] <= 2**20
    assert all(bool(x.isfinite().all()) for x in state["model"].values())


@pytest.mark.parametrize("path", PATHS)
def test_a_scale_that_collapses_ends_the_training(
    path: str, forks: Forks, data: Path, tmp_path: Path, fault: Fault
) -> None:
    log = tmp_path / "log"
    exploding = training(data, tmp_path / "run", *FP16, "--lr", 1e30, *PATHS[path])
    assert forks.start(log, *exploding, "--max-update", 100, before=WITHOUT_GPU).wait() == 1
    said = failure(log.read_text("utf-8"), 1)
    assert said.startswith("FloatingPointError: Minimum loss scale reached (0.0001).")
    assert said.endswith("or train without --fp16 (--bf16 has no such limit)")
    if path == "fast":
        fault("training", "a half-precision loss scale that collapses", said)


# ---------------------------------------------------------------------------------------------
# No memory
# ---------------------------------------------------------------------------------------------

# Runs out of memory in calls number {calls} of the training: {where} it.
NO_MEMORY = """
import torch
from fairseq.tasks.fairseq_task import FairseqTask
from qknorm_fairseq.modules.attention import QKNormMultiheadAttention

inner, calls = FairseqTask.train_step, []
error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

def fail(*arguments):
    raise error

def train_step(task, sample, model, *arguments, **options):
    calls.append(1)
    if len(calls) not in {calls}:
        return inner(task, sample, model, *arguments, **options)
    if {where!r} == "before":
        raise error
    if {where!r} == "within":  # the forward pass: the decoder's feed-forward layer is late in it
        hook = model.decoder.layers[-1].fc2.register_forward_hook(fail)
        try:
            return inner(task, sample, model, *arguments, **options)
        finally:
            hook.remove()
    inner(task, sample, model, *arguments, **options)
    raise error

FairseqTask.train_step = train_step
"""


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_without_memory_is_left_out_and_leaves_nothing_behind(
    path: str, forks: Forks, data: Path, tmp_path: Path
) -> None:
    """Wherever in the batch's work memory ran out, the training ends the same."""
    for where in ("before", "within", "after"):
        folder = tmp_path / where
        options = ("--lr", 0.005, "--max-update", 6, *PATHS[path])
        before = NO_MEMORY.format(calls={3}, where=where)
        said = forks.run(
            tmp_path / f"{where}.log", *training(data, folder, *options), before=before
        )
        assert said.count("attempting to recover from OOM in forward/backward pass") == 1
        assert differences(content(folder), content(tmp_path / "before")) == []
    state = content(tmp_path / "before")
    assert state["optimizer_history"][-1]["num_updates"] == 6


def test_a_training_whose_every_batch_is_too_large_ends(
    forks: Forks, data: Path, tmp_path: Path, fault: Fault
) -> None:
    """fairseq alone would go on without an update for ever."""
    log = tmp_path / "log"
    before = NO_MEMORY.format(calls="range(10**6)", where="before")
    arguments = training(data, tmp_path / "run", "--lr", 0.005, "--max-update", 6)
    assert forks.start(log, *arguments, before=before).wait() == 1
    said = failure(log.read_text("utf-8"), 1)
    assert "epoch 1: out of memory with every batch: set a smaller dataset.max_tokens" in said
    fault("training", "memory suffices for no batch", said)


SITE = """
import sys
if any("fairseq-hydra-train" in argument for argument in sys.orig_argv):
    code = {code!r}
    exec(code, {{}})
"""


def test_the_experiment_says_how_many_batches_were_left_out(
    run: Run, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    """The failing training is made so by a sitecustomize of Python's."""
    site = tmp_path / "site"
    site.mkdir()
    code = NO_MEMORY.format(calls={2, 5}, where="before")
    (site / "sitecustomize.py").write_text(SITE.format(code=code))
    done = run(
        "python",
        *command(prepared, "optimization.max_update=6"),
        cwd=tmp_path,
        env={"PYTHONPATH": f"{site}:{PROJECT}"},
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "left out" in line)
    assert "2 batches left out, for which memory did not suffice; a smaller dataset.max_" in line
    assert score_of(tmp_path / QKNORM)["updates"] == 6
    fault("training", "two batches for which memory does not suffice", line)


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", 1, "set a smaller dataset.max_tokens"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate "
         "memory: you tried to allocate 9 bytes.", 1, "set a smaller dataset.max_tokens"),
        ("step 3", -signal.SIGKILL, "it was killed: perhaps for its memory"),
        ("OSError: [Errno 28] No space left on device", 1, "make room on the disk"),
        ("KeyError: 'x'", 1, "KeyError: 'x'"),
        ("", 1, "it said nothing"),
    ],
)  # fmt: skip
def test_each_cause_has_its_advice(said: str, status: int, expected: str) -> None:
    log = f"Traceback (most recent call last):\n  File\n{said}\n" if said else ""
    assert expected in failure(log, status)


def test_no_advice_hides_another() -> None:
    """The first pattern that fits counts, so no text of one may fit an earlier one."""
    for number, (pattern, _) in enumerate(ADVICE):
        said = pattern.split("|")[0]
        assert failure(said, 1).endswith(ADVICE[number][1])


# ---------------------------------------------------------------------------------------------
# Queries and keys of any length
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("path", [*PATHS, "bfloat16"])
def test_a_model_whose_queries_and_keys_are_so_long(
    path: str, length: float, tmp_path: Path
) -> None:
    """Training and decoding: finite, and the same as with ordinary ones, if they have a direction.

    Below 1e-12 they have none, so each attention is even.
    """
    options = PATHS | {"bfloat16": ("--bf16-autocast",)}
    plain = ("--word-dropout", 0, *options[path])
    model, criterion, task = tiny.build(tiny.write_data(tmp_path / "data"), *plain)
    tiny.randomize(model)
    sample = tiny.batch(task)
    ordinary = criterion(model, sample)[0].item()
    hypotheses = translate(model, task, sample)
    projections = [
        parameter
        for name, parameter in model.named_parameters()
        if ".q_proj." in name or ".k_proj." in name
    ]
    assert len(projections) == 2 * 2 * 3 * tiny.SIZES["layers"]  # weight and bias; 3 attentions
    with torch.no_grad():
        for parameter in projections:
            parameter *= length
    model.train()
    loss = criterion(model, sample)[0]
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert all(bool(parameter.grad.any()) == (length > 1e-12) for parameter in projections[::2])
    found = translate(model, task, sample)
    if length > 1e-12:
        assert loss.item() == pytest.approx(ordinary, rel=1e-2 if path == "bfloat16" else 1e-5)
        if path != "bfloat16":
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in hypotheses]
    else:
        assert abs(loss.item() - ordinary) > 1e-3
    assert all(torch.tensor(score).isfinite() for _, score in found)


def translate(model: Any, task: Any, sample: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The best hypothesis of each sentence and its score, by beam search."""
    model.eval()
    generator = task.build_generator([model], Namespace(beam=3, max_len_b=12))
    with torch.no_grad():
        best = [both[0] for both in generator.generate([model], sample)]
    model.train()
    return [(one["tokens"].tolist(), float(one["score"])) for one in best]


def test_a_reader_of_data_ends_that_begins_after_its_training_was_killed(run: Run) -> None:
    """The moment is forced here: the parent is gone before the child looks who that is."""
    program = """
import multiprocessing, os, sys, time
import qknorm_fairseq
from torch.utils.data._utils.worker import ManagerWatchdog

qknorm_fairseq.register()

def reader(parent, end):
    watchdog = ManagerWatchdog()
    assert watchdog.is_alive()
    if end:
        while os.getppid() == parent:
            time.sleep(0.01)
        print(ManagerWatchdog().is_alive(), watchdog.is_alive(), flush=True)

def begin(end):
    process = multiprocessing.Process(target=reader, args=(os.getpid(), end))
    process.start()
    return process

assert (begin(False).join() or True)
begin(True)
os._exit(0)
"""
    done = run("python", "-c", program)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
