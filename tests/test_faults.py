"""Faults of one kind in every command: what a stranger's or a careless hand gives it.

What only one command can meet is tested with it; `python -m pytest --faults FILE` has all of it in
one table. Commands run in this process, as it takes seconds to load torch; an exception that would
be a traceback fails the test.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from conftest import Files, Run, clean_environment
from faults import Fault
from test_report import run_folder

from qknorm_fairseq import cli
from qknorm_fairseq.attention_statistics import of_run
from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.subwords import Subwords, train_subwords
from qknorm_fairseq.translator import Translator

Done = subprocess.CompletedProcess[str]
SMALL_FILES = ("sentencepiece.model", "dict.xx.txt", "dict.yy.txt", "qknorm.json")
SHELL = "$(touch ran);touch ran&`touch ran`"  # leaves a file behind, if any shell reads it


class QKNorm(Protocol):
    """`qknorm("score", hyp, ref)`: the command in this process."""

    def __call__(self, *arguments: object, input: bytes = b"") -> Done: ...


@pytest.fixture
def qknorm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> QKNorm:
    """In a folder of its own, in which it must leave nothing of a shell's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QKNORM_DEBUG", raising=False)

    def call(*arguments: object, input: bytes = b"") -> Done:
        words = ["qknorm", *map(str, arguments)]
        monkeypatch.setattr("sys.argv", words)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(input)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert not list(tmp_path.rglob("ran"))
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), said.out, said.err)

    return call


def refused(done: Done, *expected: str) -> str:
    """One line with all that was expected, and exit status 1."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("qknorm: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in expected:
        assert part in done.stderr
    return done.stderr


# A folder for a file, and the reverse

BOTH = ("--train", "here/t.xx", "here/t.yy", "--valid", "here/t.xx", "here/t.yy")
FOLDER, FILE, MISSING = "here/a folder", "here/a file", "here/nothing"
MIXED_UP: dict[str, tuple[Sequence[str], str]] = {
    "score: folder for text": (("score", FOLDER, FILE), "a folder, where a file is needed"),
    "compare: folder for text": (("compare", FILE, FOLDER, FILE), "a folder, where a file is"),
    "translate: folder for text": (("translate", "-c", FILE, FOLDER), "a folder, where a file"),
    "translate: folder for checkpoint": (("translate", "-c", FOLDER), "a folder; name the check"),
    "attention: folder for checkpoint": (
        ("attention", "-c", FOLDER, "--source", "a"),
        "a folder; name the checkpoint in it",
    ),
    "report: file for runs": (("report", FILE), "a file, where a folder of runs is needed"),
    "fetch: file for --from": (
        ("fetch", "iwslt15", "--from", FILE),
        "no such folder; --from names the one",
    ),
    "fetch: file for --data-dir": (
        ("fetch", "iwslt15", "--data-dir", FILE, "--mirror", "http://127.0.0.1:9"),
        "a file stands where a folder is needed",
    ),
    "fetch: folder for --registry": (
        ("fetch", "iwslt15", "--registry", FOLDER),
        "a folder, where a file is needed",
    ),
    "prepare: file below --out": (
        ("prepare", *BOTH, "--out", f"{FILE}/out"),
        "where a folder is needed",
    ),
    "prepare: missing test references": (
        ("prepare", *BOTH, "--test", "here/t.xx", MISSING),
        f"{MISSING}: no such file",
    ),
    "prepare: pipe for text": (
        ("prepare", "--train", "here/pipe", "here/t.yy", "--valid", "here/t.xx", "here/t.yy"),
        "here/pipe: no ordinary file, and it is read more than once",
    ),
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "a folder").mkdir(parents=True)
    (folder / "a file").write_text("one\n")
    for side in ("xx", "yy"):
        (folder / f"t.{side}").write_text("one two three\n")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("name", MIXED_UP)
def test_a_folder_for_a_file_and_the_reverse(
    name: str, qknorm: QKNorm, here: Path, fault: Fault
) -> None:
    arguments, expected = MIXED_UP[name]
    before = sorted(here.rglob("*"))
    message = refused(qknorm(*arguments), expected)
    assert sorted(here.rglob("*")) == before
    command, _, what = name.partition(": ")
    fault(command, what, message)


# Text

TEXT = {
    "NUL": (b"one\na\0b\n", "line 2: not text (byte 2 is a NUL)"),
    "UTF-16 without a mark": (
        "one\ntwo\n".encode("utf-16-le"),
        "line 1: not text (byte 2 is a NUL)",
    ),
    "invalid UTF-8": (b"one\ntw\xf6\n", "line 2: not valid UTF-8 (byte 3 is 0xf6)"),
    "half a surrogate pair": (b"one\n\xed\xa0\x80\n", "line 2: not valid UTF-8 (byte 1 is 0xed)"),
    "a line over 1 MiB": (b"one\n" + b"a" * (1 << 20) + b"\n", "line 2: longer than 1,048,576 by"),
}


@pytest.mark.parametrize("command", ["prepare", "score", "compare"])
@pytest.mark.parametrize("name", TEXT)
def test_what_is_no_text(name: str, command: str, qknorm: QKNorm, here: Path, fault: Fault) -> None:
    content, expected = TEXT[name]
    bad, good = here / "bad.xx", here / "good.yy"
    bad.write_bytes(content)
    good.write_text("one\ntwo\n")
    arguments: dict[str, tuple[object, ...]] = {
        "prepare": ("--train", bad, good, "--valid", bad, good),
        "score": (bad, good),
        "compare": (good, bad, good),
    }
    message = refused(qknorm(command, *arguments[command]), f"{bad}, {expected}")
    assert not (here.parent / "data").exists()
    fault(command, name, message)


@pytest.mark.parametrize("name", TEXT)
def test_what_is_no_text_to_translate(
    name: str, qknorm: QKNorm, checkpoint: Path, fault: Fault
) -> None:
    content, expected = TEXT[name]
    done = qknorm("translate", "-c", checkpoint, "--cpu", "--buffer-size", 1, input=content)
    fault("translate", name, refused(done, f"standard input, {expected}"))


HOSTILE = {
    "control characters": "kalo \x01\x1b[31m\x07\x7f mitu",
    "writing from right to left and back": "\u202ekalo\u2066 \u2069mitu\u202c",
    "combining characters only": "\u0301\u0308" * 500,
    "unknown characters only": "\u2603\u5b8c" * 500,
    "a line of 1 MiB without a space": "k" * ((1 << 20) - 1),
    "Unicode line separators": "kalo\u2028mitu\u0085neka\x0b\x0c\x1c\x1dkalo",
    "no characters, but format ones": "\u200b\u200d\ufeff",
    "what a vocabulary has special": "<s> </s> <pad> <unk> <mask> \u2581\u2581",
}


def test_hostile_text_stays_in_its_lines(qknorm: QKNorm, checkpoint: Path, fault: Fault) -> None:
    lines = [line for name in HOSTILE for line in (HOSTILE[name], "Kalo mitu.")]
    text = "".join(f"{line}\n" for line in lines).encode()
    done = qknorm("translate", "-c", checkpoint, "--cpu", input=text)
    assert done.returncode == 0, done.stderr
    translations = done.stdout.removesuffix("\n").split("\n")
    assert len(translations) == len(lines)
    (usual,) = set(translations[1::2])  # in its place each time
    assert usual
    for name, line in zip(HOSTILE, translations[::2], strict=True):
        assert len(line) < 3000
        fault("translate", name, "a translation in its line")


def used(*arguments: object) -> tuple[float, float]:
    """MB of memory at most and seconds of a processor that a command takes, in its own process."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("qknorm"), *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        env=clean_environment(),
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def test_hostile_text_takes_little_memory_and_time(
    checkpoint: Path, tmp_path: Path, fault: Fault
) -> None:
    """More than a short sentence takes: neither grows with a line's length, nor with their number.

    A megabyte of one line, kept with all that is searched for it, would take gigabytes.
    """
    files = {"short": ["Kalo mitu."], "hostile": [line for line in HOSTILE.values()] * 5}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    model = ("translate", "-c", checkpoint, "--cpu")
    short, hostile = (used(*model, tmp_path / name) for name in files)
    memory, seconds = (more - less for more, less in zip(hostile, short, strict=True))
    assert memory < 400
    assert seconds < 60
    fault("translate", "40 hostile lines, 5 of them of 1 MiB", "at most 400 MB and 60 s more")


def test_a_million_empty_lines(qknorm: QKNorm, checkpoint: Path, fault: Fault) -> None:
    started = time.process_time()
    done = qknorm("translate", "-c", checkpoint, "--cpu", input=b"\n" * 1_000_000)
    seconds = time.process_time() - started
    assert done.stdout == "\n" * 1_000_000
    assert seconds < 60
    fault("translate", "a million empty lines", "as many, within a minute of one processor")


def test_a_hypothesis_ends_50_subwords_after_its_source(
    checkpoint: Path, prepared: Path, tmp_path: Path
) -> None:
    """Of a model that never writes an end of sentence."""
    state = load(checkpoint)
    bias = state["model"]["decoder.output_projection.bias"].clone()
    bias[2] = -1e6  # </s>
    state["model"]["decoder.output_projection.bias"] = bias
    torch.save(state, tmp_path / "endless.pt")
    translator = Translator(tmp_path / "endless.pt", data=prepared, cpu=True)
    for source in ("Kalo mitu.", "Kalo mitu neka."):
        (pieces,) = translator.subwords.encode([source])
        tokens = translator._indices(pieces)
        dataset = translator.task.build_dataset_for_inference([tokens], [len(tokens)])
        batch = dataset.collater([dataset[0]])
        ((best, *_),) = translator.task.inference_step(
            translator.generator, translator.models, batch
        )
        assert len(best["tokens"]) == len(tokens) + 50 + 1  # and its end


# Language codes, settings, and what a shell would make of them


@pytest.mark.parametrize("command", ["score", "compare"])
@pytest.mark.parametrize("lang", [SHELL, "", "../../etc/passwd", "x" * 300, "e n"])
def test_what_is_no_language_code(
    lang: str, command: str, qknorm: QKNorm, here: Path, fault: Fault
) -> None:
    files = [here / "t.xx"] * (2 if command == "score" else 3)
    message = refused(qknorm(command, *files, "--lang", lang), "language code", "such as en")
    fault(command, f"--lang {lang[:40]!r}", message if len(lang) < 50 else f"{message[:60]}...")


def test_a_language_that_moses_has_no_rules_for(qknorm: QKNorm, here: Path, fault: Fault) -> None:
    files = (here / "t.xx", here / "t.xx")
    unknown, english = (qknorm("score", *files, "--lang", lang) for lang in ("zz", "en"))
    assert (unknown.returncode, unknown.stdout) == (0, english.stdout)
    fault("score", "--lang zz", "scored by Moses' general rules")


@pytest.mark.parametrize("seed", ["x", "-1", "", "1e3", "9" * 30, "0x7"])
def test_what_is_no_seed(
    seed: str, qknorm: QKNorm, here: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    message = refused(qknorm("compare", *[here / "t.xx"] * 3), f"SACREBLEU_SEED={seed}: no seed")
    fault("compare", f"SACREBLEU_SEED={seed}", message)


def test_names_that_a_shell_would_run(
    qknorm: QKNorm, checkpoint: Path, prepared: Path, parallel_files: Files, fault: Fault
) -> None:
    """As file names they are names like others; as codes and settings they are refused."""
    odd = Path(SHELL)
    odd.mkdir()
    for split, sides in parallel_files.items():
        for side, file in zip(("xx", "yy"), sides, strict=True):
            shutil.copy(file, odd / f"{split}.{side}")
    train, valid = (
        [odd / f"{split}.{side}" for side in ("xx", "yy")] for split in ("train", "valid")
    )
    out = odd / "out"
    done = qknorm(
        "prepare", "--train", *train, "--valid", *valid, "--vocab-size", 160, "--out", out
    )
    assert done.returncode == 0, done.stderr
    shutil.copy(checkpoint, odd)
    done = qknorm(
        "translate", "-c", odd / checkpoint.name, "--data", prepared, "--cpu", odd / "valid.xx"
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 40)
    assert qknorm("score", odd / "valid.yy", odd / "valid.yy").returncode == 0
    for arguments in (
        ("fetch", SHELL),
        ("fetch", "ted", "--pair", SHELL),
        ("fetch", "ted", "--pair", "gl-en", "--mirror", SHELL),
        ("prepare", "--pair", "gl-en", "--corpus", SHELL),
        ("prepare", "--train", *train, "--valid", *valid, "-s", SHELL),
        ("compare", *[odd / "valid.yy"] * 3, "--metric", SHELL),
    ):
        fault(arguments[0], " ".join(map(str, arguments[-2:])), refused(qknorm(*arguments)))
    fault("prepare", f"files in a folder called {SHELL}", "prepared; no shell reads a name")


def test_a_setting_that_a_shell_would_run(
    prepared: Path, run: Run, tmp_path: Path, fault: Fault
) -> None:
    """A run kept in a folder of that name is trained, translated and scored as any other."""
    from test_experiment import command

    settings = (f"checkpoint.save_dir='{SHELL}'", "optimization.max_update=1")
    done = run("python", *command(prepared, *settings), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / SHELL / "score.json").is_file()
    assert not list(tmp_path.rglob("ran"))
    fault("configurations", settings[0], "a folder of that name; no shell reads it")


def test_a_name_can_do_nothing_to_the_terminal(qknorm: QKNorm, fault: Fault) -> None:
    name = "a\x1b]0;title\x07\nb\u202ec"
    message = refused(qknorm("score", name, name), r"a\x1b]0;title\x07\nb\u202ec: no such file")
    fault("score", "a file's name with control characters", message)


NO_UTF8 = os.fsdecode(b"a\xff")
ESCAPED = r"a\udcff"


@pytest.mark.parametrize("command", ["score", "compare", "report", "report --json", "prepare"])
def test_a_name_that_is_no_utf8(
    command: str, run: Run, here: Path, parallel_files: Files, fault: Fault
) -> None:
    """Files may be called by any bytes; a terminal or a pipe gets what it can show."""
    folder = here / NO_UTF8
    folder.mkdir()
    lines, missing = folder / "lines", folder / "missing"
    lines.write_text("one two three four five\n")
    if command.startswith("report"):
        run_folder(folder, seed=1)
    both = [*parallel_files["train"], "--valid", *parallel_files["valid"]]
    calls: dict[str, tuple[object, ...]] = {
        "score": (lines, missing),
        "compare": (lines, lines, lines),
        "report": (folder / "runs", "--no-attention"),
        "report --json": (folder / "runs", "--no-attention", "--json"),
        "prepare": ("--train", *both, "--vocab-size", 160, "--out", folder / "out", "--json"),
    }
    name = command.partition(" ")[0]
    strict = {"PYTHONIOENCODING": "utf-8:strict"}  # as where there is a locale
    done = run("qknorm", name, *calls[command], env=strict)
    assert done.returncode == (command == "score"), done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout if command == "compare" else done.stderr
    assert ESCAPED in said
    if "--json" in command:
        json.loads(done.stdout)
    fault(name, "a file's name that is no UTF-8", f"shown as {ESCAPED}")


# Checkpoints and vocabularies that don't belong together


@pytest.fixture(scope="module")
def other_vocabulary(
    prepared: Path, parallel_files: Files, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A prepared folder with a vocabulary as large as that of `prepared`, but another."""
    folder = tmp_path_factory.mktemp("other")
    description = json.loads((prepared / "qknorm.json").read_text())
    lines = [
        line[::-1].strip()
        for file in parallel_files["train"]
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    size = len((prepared / "dict.xx.txt").read_text(encoding="utf-8").splitlines())
    file = folder / "sentencepiece.model"
    train_subwords(lines, Subwords(prepared / file.name).model.get_piece_size(), file)
    for side in ("xx", "yy"):
        Subwords(file).write_dictionary(folder / f"dict.{side}.txt")
    assert len((folder / "dict.xx.txt").read_text(encoding="utf-8").splitlines()) == size
    (folder / "qknorm.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize("model", ["checkpoint", "transformer_checkpoint"])
def test_another_vocabulary_of_the_same_size(
    model: str,
    other_vocabulary: Path,
    qknorm: QKNorm,
    request: pytest.FixtureRequest,
    fault: Fault,
) -> None:
    """fairseq's own model does not say what it was trained with, but the folder is still there."""
    path = request.getfixturevalue(model)
    done = qknorm("translate", "-c", path, "--cpu", "--data", other_vocabulary, input=b"Kalo.\n")
    message = refused(done, f"{other_vocabulary}: its vocabulary is as large", "but another")
    assert done.stdout == ""
    fault("translate", f"another vocabulary of the same size ({model})", message)


def test_another_vocabulary_where_the_first_is_gone(
    checkpoint: Path, other_vocabulary: Path, qknorm: QKNorm, tmp_path: Path
) -> None:
    state = load(checkpoint)
    state["cfg"]["task"]["data"] = "gone"
    torch.save(state, tmp_path / "moved.pt")
    for arguments in (("translate",), ("attention", "--source", "Kalo.")):
        done = qknorm(*arguments, "-c", "moved.pt", "--cpu", "--data", other_vocabulary)
        refused(done, "its vocabulary is as large")


def test_subwords_of_another_vocabulary_than_the_dictionaries(
    checkpoint: Path, prepared: Path, other_vocabulary: Path, qknorm: QKNorm, fault: Fault
) -> None:
    Path("mixed").mkdir()
    for name in SMALL_FILES:
        shutil.copy((other_vocabulary if name.endswith(".model") else prepared) / name, "mixed")
    done = qknorm("translate", "-c", checkpoint, "--cpu", "--data", "mixed", input=b"Kalo.\n")
    message = refused(done, "mixed: sentencepiece.model is not of the vocabulary of its diction")
    fault("translate", "sentencepiece.model of one vocabulary, dictionaries of another", message)


def test_languages_the_other_way_round(
    checkpoint: Path, prepared: Path, qknorm: QKNorm, fault: Fault
) -> None:
    Path("turned").mkdir()
    for name in SMALL_FILES:
        shutil.copy(prepared / name, "turned")
    description = json.loads((prepared / "qknorm.json").read_text())
    turned = description | {"source_lang": "yy", "target_lang": "xx"}
    Path("turned/qknorm.json").write_text(json.dumps(turned))
    done = qknorm("translate", "-c", checkpoint, "--cpu", "--data", "turned", input=b"Kalo.\n")
    message = refused(done, f"{checkpoint}: translates xx-yy, but turned is of yy-xx")
    fault("translate", "language codes swapped", message)


@pytest.mark.parametrize("cfg", [[], 7, {"task": [1]}, {"task": {"data": 7}, "model": "x"}, None])
def test_a_checkpoint_with_odd_options(
    cfg: Any, checkpoint: Path, prepared: Path, qknorm: QKNorm, fault: Fault
) -> None:
    state = load(checkpoint)
    state["cfg"] = cfg
    torch.save(state, "odd.pt")
    refused(qknorm("translate", "-c", "odd.pt", "--cpu"), "no qknorm.json in")
    done = qknorm("translate", "-c", "odd.pt", "--cpu", "--data", prepared, input=b"Kalo.\n")
    fault("translate", f"a checkpoint whose options are {cfg}", refused(done, "odd.pt"))


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[]", '{"source_lang": "xx"}'])
def test_a_damaged_description(
    content: str, checkpoint: Path, prepared: Path, qknorm: QKNorm, fault: Fault
) -> None:
    Path("data").mkdir()
    for name in SMALL_FILES:
        shutil.copy(prepared / name, "data")
    Path("data/qknorm.json").write_text(content)
    done = qknorm("translate", "-c", checkpoint, "--cpu", "--data", "data")
    message = refused(done, "data/qknorm.json: not written by this version of qknorm prepare")
    fault("translate", f"qknorm.json is {content[:20]!r}", message)


def test_a_run_carried_elsewhere(
    checkpoint: Path, prepared: Path, qknorm: QKNorm, tmp_path: Path
) -> None:
    """With its data, and called from another folder: relative paths are seen from above the run."""
    state = load(checkpoint)
    state["cfg"]["task"]["data"] = "data/mine"
    run = tmp_path / "carried" / "runs" / "mine"
    run.mkdir(parents=True)
    torch.save(state, run / "checkpoint_best.pt")
    shutil.copytree(prepared, tmp_path / "carried" / "data" / "mine")
    done = qknorm("translate", "-c", run / "checkpoint_best.pt", "--cpu", input=b"Kalo.\n")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    for name in SMALL_FILES:
        shutil.copy(prepared / name, run)
    (run / "config.yaml").write_text("task:\n  data: data/mine\n")
    assert "decoder_1_cross" in of_run(run, cpu=True)


# Folders of runs

RUN_FILES = {
    "config.yaml: lists for groups": ("config.yaml", "task: [1]\nmodel: 7\n", "no configuration"),
    "config.yaml: nested without end": ("config.yaml", "[" * 50_000, "config.yaml: "),
    "config.yaml: code": ("config.yaml", "!!python/object/apply:os.system [touch ran]", "not YAML"),
    "score.json: nested without end": ("score.json", "[" * 100_000, "score.json: not JSON"),
    "score.json: no finite number": ("score.json", '{"bleu_tok": NaN}', "has no number 'bleu_to"),
    "score.json: words for numbers": ("score.json", '{"bleu_tok": "high"}', "has no number 'bleu"),
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_damaged_run(name: str, qknorm: QKNorm, tmp_path: Path, fault: Fault) -> None:
    file, content, expected = RUN_FILES[name]
    (run_folder(tmp_path, seed=1) / file).write_text(content)
    run_folder(tmp_path, seed=2)
    message = refused(qknorm("report", "--no-attention"), file, expected)
    assert not (tmp_path / "runs" / "report").exists()
    fault("report", name, message)


def test_a_record_that_is_none_is_left_out(qknorm: QKNorm, tmp_path: Path, fault: Fault) -> None:
    folder = run_folder(tmp_path)
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"num_updates": "x"}\n[1]\n\0\n{"num_updates": null}\n' + "[" * 100_000 + "\n")
    done = qknorm("report", "--no-attention")
    assert done.returncode == 0, done.stderr
    fault("report", "train.jsonl with lines that are no records", "they are left out")
