"""`scripts/reproduce.sh`: a pair from the published files to the table, in very small sizes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT, Run, clean_environment
from publisher import publishing, write_registry
from test_iwslt15 import published
from test_iwslt15 import registry as iwslt15_registry
from test_ted import TABLES, WHOLE
from test_ted import registry as ted_registry

from qknorm_fairseq.reproduction import plan_shared

MODELS = ("transformer_scalenorm_tiny", "transformer_qknorm_tiny")
SMALL = (
    *("model.encoder_layers=1", "model.decoder_layers=1"),
    *("model.encoder_embed_dim=32", "model.decoder_embed_dim=32"),
    *("optimization.max_update=6", "task.epoch_batches=3", "dataset.num_workers=0"),
)


def reproduce(
    run: Run, folder: Path, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = ("-m", "qknorm_fairseq.reproduction", "--in", folder)
    return run("python", *command, *arguments, env=env)


def score(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "score.json").read_text("utf-8"))
    return content


def written(folder: Path) -> dict[str, int]:
    """When each file of a run was written; the lock is taken by each call."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if file.name != ".lock"}


def test_english_vietnamese_from_a_folder_of_published_files(run: Run, tmp_path: Path) -> None:
    """Both models; then another seed, for which nothing is done again that was done."""
    local = tmp_path / "published"
    local.mkdir()
    for name, content in published().items():
        (local / name).write_bytes(content)
    registry = iwslt15_registry(tmp_path)
    arguments = (
        "--tiny",
        "--cpu",
        "--corpus",
        "iwslt15",
        "--from",
        local,
        "--registry",
        registry,
        "en-vi",
        *SMALL,
    )
    done = reproduce(run, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "runs/iwslt15/en-vi" / model / "seed1" for model in MODELS]
    for folder, model in zip(folders, MODELS, strict=True):
        found = score(folder)
        assert (found["pair"], found["model"], found["seed"]) == ("en-vi", model, 1)
        assert found["updates"] == 6
        assert "tok:none" in found["signatures"]["bleu_tok"]
        assert len((folder / "hyp.tok.txt").read_text().splitlines()) == found["test_sentences"]
    steps = [line.partition("] ")[2] for line in done.stderr.splitlines() if line[:1] == "["]
    assert steps[0] == "en-vi iwslt15: fetched"
    assert steps[1].startswith("en-vi iwslt15: prepared (train ")
    for model, line in zip(MODELS, steps[2::2], strict=True):
        assert line == f"en-vi {model} seed 1: trained, 6 updates"
    rows = [line.split()[0] for line in done.stdout.splitlines() if " transformer_" in line]
    assert rows == list(MODELS)

    before = written(folders[1])
    again = reproduce(run, tmp_path, "--models", MODELS[1], "--seeds", "1,2", *arguments)
    assert again.returncode == 0, again.stderr
    assert written(folders[1]) == before
    assert f"en-vi {MODELS[1]} seed 1: done before" in again.stderr
    assert score(folders[1].with_name("seed2"))["seed"] == 2


def test_galician_english_from_a_server(run: Run, tmp_path: Path) -> None:
    with publishing() as publisher:
        publisher.files["/copies/ted_talks.tar.gz"] = WHOLE
        registry = ted_registry(tmp_path, counts=(100, 25, 25))
        done = reproduce(
            run,
            tmp_path,
            *(
                "gl_en",
                "--tiny",
                "--cpu",
                "--corpus",
                "ted",
                "--mirror",
                f"{publisher.address}copies",
            ),
            *("--registry", registry, "--models", MODELS[1], *SMALL),
            env={"no_proxy": "127.0.0.1"},
        )
    assert done.returncode == 0, done.stderr
    found = score(tmp_path / "runs/ted/gl-en" / MODELS[1] / "seed1")
    assert (found["pair"], found["test_sentences"], found["updates"]) == ("gl-en", 25, 6)


def test_all_pairs_where_one_corpus_is_not_to_be_had(run: Run, tmp_path: Path) -> None:
    """Only gl-en is: its runs end, fairseq's own transformer among them; the others are told."""
    local = tmp_path / "published"
    local.mkdir()
    (local / "ted_talks.tar.gz").write_bytes(WHOLE)
    file = {"name": "ted_talks.tar.gz", "members": dict.fromkeys(TABLES.values(), 100_000)}
    counts = {"gl-en": (100, 25, 25)}
    registry = write_registry(tmp_path / "corpora.yaml", "ted", [file], counts, [])
    done = reproduce(
        run,
        tmp_path,
        *("all", "--tiny", "--cpu", "--corpus", "ted", "--from", local, "--registry", registry),
        *SMALL,
    )
    assert done.returncode == 1
    for pair in ("en-vi", "ar-en", "en-he", "sk-en"):
        assert f"{pair} ted: " in done.stderr
    assert done.stderr.endswith("8 of 11 runs failed; the same command retries them\n")
    for model in (*MODELS, "transformer"):
        assert score(tmp_path / "runs/ted/gl-en" / model / "seed1")["updates"] == 6
    assert "gl-en, 25 test sentences" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("xx-yy", "--cpu"), 2, "no pair 'xx-yy'"),
        (("gl-en", "--fp16", "--bf16"), 2, "give either --fp16 or --bf16"),
        (("gl-en", "--cpu", "--fp16"), 1, "--fp16 is for GPUs"),
        (("gl-en", "--cpu", "--gpus", "2"), 1, "--gpus is for GPUs"),
        (("gl-en",), 1, "no GPU found; --cpu does without"),
        (("gl-en", "--cpu", "--models", "nope"), 1, "Could not find 'model/nope'"),
        (("gl-en", "--cpu", "model.heads=3"), 1, "model.heads"),
        (("gl-en", "--cpu", "--corpus", "bible"), 1, "Could not find 'corpus/bible'"),
    ],
)
def test_wrong_use_is_told_before_anything_is_done(
    arguments: tuple[str, ...], status: int, message: str, run: Run, tmp_path: Path
) -> None:
    done = reproduce(run, tmp_path, *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == status
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_gpus_share_the_batch(gpus: int) -> None:
    (run,) = plan_shared("en-vi", [], gpus)
    world = run.config.distributed_training.distributed_world_size
    assert world == gpus
    assert world * run.config.dataset.max_tokens == 4096
    # torch would refuse the checkpoint that one process sends to the others (see test_distributed).
    assert run.config.checkpoint.load_checkpoint_on_all_dp_ranks == (gpus > 1)


@pytest.mark.parametrize("pair", ["en_vi", "ar_en", "en_he", "gl_en", "sk_en"])
def test_each_pair_has_a_script(pair: str) -> None:
    """--help needs no environment and no network."""
    script = PROJECT / f"scripts/reproduce_{pair}.sh"
    assert os.access(script, os.X_OK)
    done = subprocess.run(
        [script, "--help"], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--corpus NAME" in done.stdout
    assert script.read_text().splitlines()[-1].split()[1:4] == [
        '"$(dirname',
        "--",
        '"${BASH_SOURCE[0]}")/reproduce.sh"',
    ]
    assert f' {pair.replace("_", "-")} "$@"' in script.read_text()
