"""`python -m qknorm_fairseq.experiment`: what a run leaves, and that nothing is done twice or lost.

The runs are real: each trains by fairseq-hydra-train with the project's configurations, in very
small sizes, on the two invented languages. They run in a folder of their own, so that `runs/`
is made there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, Run, clean_environment
from faults import Fault
from omegaconf import OmegaConf

from qknorm_fairseq import cli
from qknorm_fairseq import experiment as runner
from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.scores import score_files, tokenize

SMALL = (
    *("model.encoder_layers=1", "model.decoder_layers=1"),
    *("model.encoder_embed_dim=32", "model.decoder_embed_dim=32"),
    *("model.encoder_ffn_embed_dim=64", "model.decoder_ffn_embed_dim=64"),
    *("model.encoder_attention_heads=2", "model.decoder_attention_heads=2"),
    *("task.source_lang=xx", "task.target_lang=yy", "++dataset.num_workers=0"),
)
QKNORM = Path("runs/demo/xx-yy/transformer_qknorm_tiny/seed1")  # as configs/corpus names it
TRANSFORMER = Path("runs/demo/xx-yy/transformer/seed1")

TWELVE = ("model=transformer_qknorm_tiny,transformer", "optimization.max_update=12")

Experiment = Callable[..., subprocess.CompletedProcess[str]]


def command(data: Path, *settings: object) -> list[str]:
    """The runner with the demo's configuration. A later setting counts over an earlier one."""
    return [
        *("-m", "qknorm_fairseq.experiment", "demo", "--config-dir", str(PROJECT / "configs")),
        *(*SMALL, f"task.data={data}", *map(str, settings)),
    ]


@pytest.fixture(scope="session")
def experiment(run: Run, prepared: Path) -> Experiment:
    """`experiment(cwd, settings...)`: the runner to its end."""

    def call(cwd: Path, *settings: object) -> subprocess.CompletedProcess[str]:
        return run("python", *command(prepared, *settings), cwd=cwd)

    return call


@pytest.fixture(scope="module")
def both(
    experiment: Experiment, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder and the outcome of the demo's comparison: two models, 12 updates each."""
    folder = tmp_path_factory.mktemp("both")
    done = experiment(folder, *TWELVE)
    assert done.returncode == 0, done.stderr
    return folder, done


def score(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "score.json").read_text("utf-8"))
    return content


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of train.jsonl; the last one may be cut, where a run was killed."""
    lines = (folder / "train.jsonl").read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


# ---------------------------------------------------------------------------------------------
# What a run leaves
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run_folder", "model"),
    [(QKNORM, "transformer_qknorm_tiny"), (TRANSFORMER, "transformer")],
)
def test_score_says_what_was_trained(
    both: tuple[Path, subprocess.CompletedProcess[str]],
    prepared: Path,
    run_folder: Path,
    model: str,
) -> None:
    folder = both[0] / run_folder
    found = score(folder)
    assert (found["pair"], found["model"], found["seed"]) == ("xx-yy", model, 1)
    assert found["updates"] == 12
    assert found["test_sentences"] == len((prepared / "test.yy").read_text("utf-8").splitlines())
    # Shared weights stand in the file several times, but in one place of memory.
    weights = torch.load(folder / "checkpoint_best.pt", weights_only=True)["model"]
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.numel()
        for name, tensor in weights.items()
        if name.rpartition(".")[2] in ("weight", "bias", "g")
    }
    assert found["params"] == sum(sizes.values())


def test_the_models_differ_by_three_parameters(
    both: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """One g for each attention of 1+1 layers; all else is the same size."""
    folder, _ = both
    assert score(folder / QKNORM)["params"] == score(folder / TRANSFORMER)["params"] + 3


def test_scores_are_those_of_the_translations_it_keeps(
    both: tuple[Path, subprocess.CompletedProcess[str]], prepared: Path
) -> None:
    folder = both[0] / QKNORM
    found = score(folder)
    expected = score_files(folder / "hyp.detok.txt", prepared / "test.yy", lang="yy")
    for key in ("bleu", "chrf", "ter", "bleu_tok", "signatures"):
        assert found[key] == getattr(expected, key), key
    assert set(found["signatures"]) == {"bleu", "chrf", "ter", "bleu_tok"}
    text = (folder / "hyp.detok.txt").read_text("utf-8").splitlines()
    assert len(text) == found["test_sentences"]
    assert (folder / "hyp.tok.txt").read_text("utf-8").splitlines() == tokenize(text, "yy")
    assert found["chrf"] > 0


def test_the_speed_is_that_of_the_log(
    both: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Target tokens over seconds of training, validation and start not counted."""
    folder = both[0] / QKNORM
    tokens, updates = 0.0, 0.0
    for record in records(folder):
        if record["kind"] == "train":  # at the end of each epoch; wpb: tokens in an update
            tokens += record["wpb"] * (record["num_updates"] - updates)
            updates = record["num_updates"]
    found = score(folder)
    assert 0 < found["train_seconds"] <= records(folder)[-1]["wall"] + 1
    assert updates == 12
    # The seconds are rounded to tenths.
    low, high = (tokens / (found["train_seconds"] + error) for error in (0.06, -0.06))
    assert low * 0.99 < found["tokens_per_second"] < high * 1.01


def test_the_log_has_numbers(both: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    found = records(both[0] / QKNORM)
    assert {record["kind"] for record in found} == {"train", "train_inner", "valid"}
    losses = [record["loss"] for record in found if record["kind"] == "valid"]
    assert all(isinstance(loss, float) for loss in losses)
    assert losses[-1] < losses[0]
    steps = [record["num_updates"] for record in found if record["kind"] == "train"]
    assert steps == sorted(set(steps))


def test_the_log_has_g_of_every_attention(
    both: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """The last validation's are those of the checkpoint written after it."""
    found = [record for record in records(both[0] / QKNORM) if record["kind"] == "valid"][-1]
    weights = load(both[0] / QKNORM / "checkpoint_last.pt")["model"]
    expected = {}
    for key, value in weights.items():
        side, _, layer, attention, name = (key.split(".") + [""] * 4)[:5]
        if name == "g":
            kind = {"self_attn": "self", "encoder_attn": "cross"}[attention]
            expected[f"g_{side}_{int(layer) + 1}_{kind}"] = value.item()
    assert len(expected) >= 3
    logged = {key: value for key, value in found.items() if key.startswith("g_")}
    assert logged == pytest.approx(expected, abs=1e-4)


def test_a_run_keeps_its_configuration_and_environment(
    both: tuple[Path, subprocess.CompletedProcess[str]], prepared: Path
) -> None:
    folder, _ = both
    config = OmegaConf.load(folder / TRANSFORMER / "config.yaml")
    assert config.model._name == "transformer"
    assert config.model.encoder_embed_dim == 32
    assert config.optimization.max_update == 12
    assert config.checkpoint.save_dir == str(TRANSFORMER)  # resolved
    environment = json.loads((folder / TRANSFORMER / "environment.json").read_text("utf-8"))
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["command"].startswith("python -m qknorm_fairseq.experiment demo ")
    assert environment["command"].endswith("model=transformer optimization.max_update=12")


def test_one_table_shows_both(both: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = both
    for name, run_folder in (
        ("transformer_qknorm_tiny", QKNORM),
        ("transformer", TRANSFORMER),
    ):
        found = score(folder / run_folder)
        row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert row[1:6] == [
            "1",
            f"{found['bleu_tok']:.1f}",
            f"{found['bleu']:.1f}",
            f"{found['chrf']:.1f}",
            f"{found['params']:,}",
        ]
        assert str(run_folder) in done.stdout
        assert found["signatures"]["bleu"] in done.stdout


# ---------------------------------------------------------------------------------------------
# Called again
# ---------------------------------------------------------------------------------------------


def test_what_is_done_is_not_done_again(
    experiment: Experiment, both: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, first = both
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*.*t*")}
    assert folder / QKNORM / "checkpoint_last.pt" in before
    started = time.monotonic()
    again = experiment(folder, *TWELVE)
    assert again.returncode == 0, again.stderr
    assert time.monotonic() - started < 10  # a training takes longer to start
    assert again.stdout == first.stdout
    assert again.stderr.count("done before") == 2
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*.*t*")} == before


def test_a_folder_is_not_used_for_another_configuration(
    experiment: Experiment, both: tuple[Path, subprocess.CompletedProcess[str]], fault: Fault
) -> None:
    folder, _ = both
    before = (folder / QKNORM / "config.yaml").read_text("utf-8")
    done = experiment(folder, "optimization.max_update=13")
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{QKNORM}: holds a run with another configuration" in done.stderr
    assert "(optimization.max_update is 12 there, 13 here)" in done.stderr
    assert (folder / QKNORM / "config.yaml").read_text("utf-8") == before
    fault(
        "configurations",
        "a folder with a run of another configuration",
        done.stderr.splitlines()[0],
    )


@pytest.fixture
def copied(both: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """The comparison's folder, for a test to change."""
    shutil.copytree(both[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_folder_is_not_used_for_other_data(
    experiment: Experiment, prepared: Path, copied: Path, fault: Fault
) -> None:
    """The data was prepared anew under the same name: the vocabulary may be another."""
    description = copied / QKNORM / "qknorm.json"
    before = json.loads(description.read_text("utf-8"))
    description.write_text(json.dumps(before | {"vocab_size": 99}), encoding="utf-8")
    done = experiment(copied, "optimization.max_update=12")
    assert done.returncode == 1
    assert f"{QKNORM}: was trained on other data than {prepared} holds now" in done.stderr
    fault("configurations", "a folder with a run on other data", done.stderr.splitlines()[0])


@pytest.fixture
def again(
    prepared: Path,
    copied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Experiment:
    """`again(settings...)`: the comparison once more, in `copied` and in this process.

    An exception that would be a traceback fails the test; nothing is to be trained.
    """
    monkeypatch.chdir(copied)
    monkeypatch.delenv("QKNORM_DEBUG", raising=False)
    monkeypatch.setattr(runner, "train", None)

    def call(*settings: object) -> subprocess.CompletedProcess[str]:
        words = [*SMALL, f"task.data={prepared}", *map(str, (*TWELVE, *settings))]
        capsys.readouterr()
        code = 0
        try:
            cli.run_app(lambda: runner.main("demo", words, PROJECT / "configs"))
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return call


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_run_with_a_score_is_kept_without_its_checkpoints(
    again: Experiment, copied: Path, fault: Fault
) -> None:
    """They may have been removed for their size."""
    for checkpoint in copied.glob("runs/**/*.pt"):
        checkpoint.unlink()
    before = content_of(copied / QKNORM)
    assert {"score.json", "train.log", "train.jsonl"} <= before.keys()
    done = again()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("done before") == 2
    other = again("optimization.max_update=13")
    assert other.returncode == 1
    assert "(optimization.max_update is 12 there, 13 here)" in other.stderr
    assert content_of(copied / QKNORM) == before
    fault(
        "configurations",
        "another configuration for a run with a score, but without checkpoints",
        other.stderr.splitlines()[0],
    )


def test_a_score_without_a_configuration_is_nobody_s(
    again: Experiment, copied: Path, fault: Fault
) -> None:
    (copied / QKNORM / "config.yaml").unlink()
    before = content_of(copied / QKNORM)
    done = again()
    assert done.returncode == 1
    (failure,) = [line for line in done.stderr.splitlines() if "score.json" in line]
    assert f"{QKNORM}/config.yaml: missing, so that score.json may be of any run" in failure
    assert done.stderr.count("done before") == 1
    assert content_of(copied / QKNORM) == before
    fault("configurations", "a score without its config.yaml", failure)


DAMAGED_CONFIGS = {
    "no YAML": b"model: [",
    "no UTF-8": b"model: \xff",
    "nested without end": b"[" * 50_000,
    "no value": b"model: 2024-13-45",
    "a number": b"7",
    "empty": b"",
}


@pytest.mark.parametrize("kind", DAMAGED_CONFIGS)
def test_a_damaged_configuration_of_a_run(
    kind: str, again: Experiment, copied: Path, fault: Fault
) -> None:
    (copied / QKNORM / "config.yaml").write_bytes(DAMAGED_CONFIGS[kind])
    done = again()
    assert done.returncode == 1
    failure, *others = done.stderr.splitlines()
    assert f"{QKNORM}: holds a run with another configuration (" in failure
    assert "done before" in others[0]
    assert others[1:] == ["qknorm: 1 of 2 runs failed; the same command retries them"]
    assert done.stdout.splitlines()[-1].strip() == str(TRANSFORMER)
    fault("configurations", f"config.yaml of a run is damaged: {kind}", failure)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", '{"bleu_tok": NaN}', "{}", ""])
def test_a_damaged_score_does_not_lose_the_other_run(
    content: str, again: Experiment, copied: Path, fault: Fault
) -> None:
    (copied / QKNORM / "score.json").write_text(content)
    done = again()
    assert done.returncode == 1
    failure, *others = done.stderr.splitlines()
    assert f"{QKNORM}/score.json: " in failure
    assert "done before" in others[0]
    assert done.stdout.splitlines()[-1].strip() == str(TRANSFORMER)
    fault("experiment", f"score.json of a run is {content[:20]!r}", failure)


def test_what_the_system_refuses_one_run_does_not_lose_the_other(
    again: Experiment, copied: Path, fault: Fault
) -> None:
    """A file stands where the first run's folder is to be."""
    shutil.rmtree(copied / QKNORM)
    (copied / QKNORM).touch()
    done = again()
    assert done.returncode == 1
    failure, *others = done.stderr.splitlines()
    assert f"{QKNORM}: a file, where a folder is needed" in failure
    assert "done before" in others[0]
    assert done.stdout.splitlines()[-1].strip() == str(TRANSFORMER)
    fault("experiment", "a file where a run's folder is to be", failure)


# ---------------------------------------------------------------------------------------------
# Interrupted
# ---------------------------------------------------------------------------------------------

LONG = ("checkpoint.save_dir=long", "optimization.max_update=45")
ENDLESS = ("checkpoint.save_dir=endless", "optimization.max_update=1000000")


class Running:
    """The runner in the background, in a process group of its own."""

    def __init__(self, data: Path, cwd: Path, *settings: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command(data, *settings)],
            cwd=cwd,
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Where the tests run in the background, SIGINT may be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for(self, file: Path, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not file.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"no {file}"
            time.sleep(0.02)

    def members(self) -> list[int]:
        """Living processes of the group: the runner, its training, and what that started."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it has just ended
                continue
            if int(group) == self.process.pid and state != "Z":
                found.append(int(stat.parent.name))
        return found

    def wait_until_all_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := self.members():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)


@pytest.fixture
def background(prepared: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`background(settings...)`: the runner at work in `tmp_path`, until the test's end."""
    started: list[Running] = []

    def start(*settings: object) -> Running:
        started.append(Running(prepared, tmp_path, *settings))
        return started[-1]

    yield start
    for running in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


@pytest.mark.parametrize(
    "stop",
    [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_no_training_outlives_its_runner(
    background: Callable[..., Running], tmp_path: Path, stop: signal.Signals
) -> None:
    running = background(*ENDLESS)
    running.wait_for(tmp_path / "endless" / "train.log")  # fairseq-hydra-train is at work
    assert len(running.members()) == 2
    running.process.send_signal(stop)
    assert running.process.wait(10) != 0
    running.wait_until_all_ended(10)


def test_a_killed_run_goes_on_from_its_checkpoint(
    experiment: Experiment, background: Callable[..., Running], tmp_path: Path
) -> None:
    """SIGKILL in the middle of training; the same command ends at exactly the last update."""
    running = background(*LONG)
    running.wait_for(tmp_path / "long" / "checkpoint_last.pt")
    running.process.kill()
    running.process.wait()
    running.wait_until_all_ended(10)
    killed = records(tmp_path / "long")

    done = experiment(tmp_path, *LONG)
    assert done.returncode == 0, done.stderr
    begun = int(done.stderr.partition("going on from update ")[2].split()[0])
    assert 0 < begun < 45
    found = score(tmp_path / "long")
    assert found["updates"] == 45
    after = records(tmp_path / "long")
    kept = [record for record in killed if record["num_updates"] <= begun]
    assert after[: len(kept)] == kept  # the log goes on from the checkpoint too
    assert all(record["num_updates"] > begun for record in after[len(kept) :])
    assert after[-1]["num_updates"] == 45


def test_a_checkpoint_cut_short_is_mended_from_the_best(
    experiment: Experiment, copied: Path, fault: Fault
) -> None:
    """fairseq without the plugin copies checkpoint_best.pt over it; it can be killed meanwhile."""
    last = copied / QKNORM / "checkpoint_last.pt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    (copied / QKNORM / "score.json").unlink()
    done = experiment(copied, "optimization.max_update=12")
    assert done.returncode == 0, done.stderr
    assert score(copied / QKNORM)["updates"] == 12
    assert last.read_bytes() == (copied / QKNORM / "checkpoint_best.pt").read_bytes()
    fault(
        "files",
        "a last checkpoint cut short by a kill",
        "mended from the best one; the experiment goes on",
    )


def test_two_at_once_on_one_folder(
    experiment: Experiment, background: Callable[..., Running], tmp_path: Path, fault: Fault
) -> None:
    first = background(*ENDLESS)
    first.wait_for(tmp_path / "endless" / "config.yaml")
    second = experiment(tmp_path, *ENDLESS)
    assert first.process.poll() is None  # it was at work all the time
    assert second.returncode == 1
    assert "endless: another process is at work on this run" in second.stderr
    fault("files", "two experiments on one folder at once", second.stderr.splitlines()[0])


# ---------------------------------------------------------------------------------------------
# What can be wrong
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("task.sauce_lang=xx", "configs/demo.yaml: Could not override 'task.sauce_lang'"),
        ("optimization.max_updat=3", "Key 'max_updat' not in 'OptimizationConfig'"),
        ("optimization.max_update=many", "max_update=many: Value 'many' of type 'str'"),
        ("model.g_per=hed", "configs/demo.yaml: Error merging override model.g_per=hed"),
        ("++model.heads=3", "configs/demo.yaml: model.heads: transformer_qknorm_tiny has no such"),
        ("ablation=nope", "Could not find 'ablation/nope' Available options in 'ablation': fixed_"),
        ("model=transfromer", "configs/demo.yaml: In 'demo': Could not find 'model/transfromer'"),
        ("corpus=bible", "configs/demo.yaml: In 'demo': Could not find 'corpus/bible'"),
        ("common.seed=${nowhere}", "configs/demo.yaml: Interpolation key 'nowhere' not found"),
        ("common.seed", "'common.seed' is not a setting: write key=value"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_done(
    experiment: Experiment, tmp_path: Path, setting: str, named: str, fault: Fault
) -> None:
    done = experiment(tmp_path, setting)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr
    assert list(tmp_path.iterdir()) == []
    fault("configurations", setting, done.stderr)


def test_unprepared_data_is_named(experiment: Experiment, tmp_path: Path, fault: Fault) -> None:
    done = experiment(tmp_path, f"task.data={tmp_path / 'nothing'}")
    assert done.returncode == 1
    assert f"{tmp_path / 'nothing'}: not prepared yet; see `qknorm prepare --help`" in done.stderr
    assert list(tmp_path.iterdir()) == []
    fault("configurations", "data that is not prepared", done.stderr.splitlines()[0])


def test_one_failing_run_does_not_lose_the_other(experiment: Experiment, tmp_path: Path) -> None:
    """The first of two runs fails (g can't start from a length of 1; the other model has no g).
    The message names it; the second run is done and shown all the same."""
    done = experiment(
        tmp_path,
        *("model=transformer_qknorm_tiny,transformer", "++model.qknorm_length=1"),
        "optimization.max_update=1",
    )
    assert done.returncode == 1
    failure = next(line for line in done.stderr.splitlines() if "training failed: " in line)
    assert "L must be a length of at least 2 subwords to start g from, not 1" in failure
    assert str(QKNORM / "train.log") in failure
    assert done.stderr.splitlines()[-1] == (
        "qknorm: 1 of 2 runs failed; the same command retries them"
    )
    assert not (tmp_path / QKNORM / "score.json").exists()
    assert score(tmp_path / TRANSFORMER)["updates"] == 1
    assert done.stdout.splitlines()[-1].split() == [str(TRANSFORMER)]


def test_a_folder_that_a_failed_run_began_is_used_again(
    experiment: Experiment, tmp_path: Path
) -> None:
    """What failed at once left no checkpoint: another configuration may have its folder."""
    failed = experiment(tmp_path, "model.qknorm_length=1", "optimization.max_update=1")
    assert failed.returncode == 1
    done = experiment(tmp_path, "model.qknorm_g0=3", "optimization.max_update=1")
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / QKNORM / "checkpoint_last.pt", weights_only=True)["model"]
    assert weights["encoder.layers.0.self_attn.g"].item() == pytest.approx(3, abs=0.01)


def test_two_runs_are_not_kept_in_one_folder(
    experiment: Experiment, tmp_path: Path, fault: Fault
) -> None:
    done = experiment(tmp_path, "model.dropout=0.1,0.2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"are both to be kept in {QKNORM}: set checkpoint.save_dir" in done.stderr
    assert list(tmp_path.iterdir()) == []
    fault("configurations", "two runs for one folder", done.stderr)
