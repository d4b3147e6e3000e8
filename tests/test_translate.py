"""`qknorm translate`: raw text to raw text by a real, very small checkpoint."""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, Files, Run, clean_environment
from faults import Fault

from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.scores import score
from qknorm_fairseq.subwords import Subwords, train_subwords
from qknorm_fairseq.translator import Translator

QKNORM = Path(sys.executable).with_name("qknorm")
SMALL_FILES = ("sentencepiece.model", "dict.xx.txt", "dict.yy.txt", "qknorm.json")


@pytest.fixture(scope="module")
def sentences(parallel_files: Files) -> list[str]:
    """The test set's sources."""
    return parallel_files["test"][0].read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def unusual(sentences: list[str]) -> list[str]:
    """Lines that are easily lost, doubled or put out of order."""
    first, second, third = sentences[:3]
    return [
        first,
        "",
        second,
        f"{second}\r",
        first,
        " \t\u3000 ",
        first.replace(" ", "\u2028"),
        second.replace(" ", "\u0085"),
        f"  {second.replace(' ', '   ')}\t",
        third.replace(" ", "\u00a0"),
        "完全 ☃ 😀",
        "<unk> </s> <pad>",
        "▁",
        " ".join(["kalo"] * 5000),
        third,
    ]


@pytest.fixture(scope="module")
def piped(
    run: Run, checkpoint: Path, unusual: list[str], sentences: list[str]
) -> subprocess.CompletedProcess[str]:
    """`qknorm translate` of the unusual lines and the test set; the last line has no end."""
    return run(
        *("qknorm", "translate", "--checkpoint", checkpoint, "--cpu"),
        input="\n".join([*unusual, *sentences]),
        env={"PYTHONIOENCODING": "ascii"},  # UTF-8 comes out whatever the terminal is set to
    )


@pytest.fixture(scope="module")
def translations(
    piped: subprocess.CompletedProcess[str], unusual: list[str], sentences: list[str]
) -> list[str]:
    """What came out, line by line."""
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.endswith("\n")
    lines = piped.stdout.removesuffix("\n").split("\n")
    assert len(lines) == len(unusual) + len(sentences)
    return lines


@pytest.fixture(scope="module")
def of_test_set(translations: list[str], unusual: list[str]) -> list[str]:
    """The translations of the test set."""
    return translations[len(unusual) :]


# In a pipe


def test_most_words_are_translated_right(of_test_set: list[str], parallel_files: Files) -> None:
    """After so little training not all are, but nothing that shifts lines would get this far."""
    references = parallel_files["test"][1].read_text(encoding="utf-8").splitlines()
    scores = score(of_test_set, references, tokenized=False)
    assert scores.bleu > 60


def test_each_line_has_its_translation_in_its_place(
    translations: list[str], of_test_set: list[str]
) -> None:
    first, second, third = of_test_set[:3]
    assert translations[:3] == [first, "", second]
    assert translations[3:5] == [second, first]  # CR LF; a repeated line
    assert translations[5] == ""  # nothing but white space
    assert translations[6:10] == [first, second, second, third]  # other kinds of white space
    assert translations[14] == third


def test_a_line_too_long_is_cut_with_a_warning_and_stays_one_line(
    piped: subprocess.CompletedProcess[str], translations: list[str], fault: Fault
) -> None:
    assert translations[13]
    (warning,) = piped.stderr.splitlines()
    assert warning.startswith("qknorm: a line of ")
    assert "cut to the 199" in warning
    fault("translate", "a line of 5,000 words", warning)


def test_a_file_gives_what_a_pipe_gives_whatever_the_batches(
    run: Run,
    checkpoint: Path,
    unusual: list[str],
    sentences: list[str],
    translations: list[str],
    tmp_path: Path,
) -> None:
    lines = [*unusual, *sentences]
    expected = dict(zip(lines, translations, strict=True))
    lines = [line for line in lines if len(line) < 1000]  # the long one takes its time
    text = tmp_path / "text"
    text.write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\n" for line in lines).encode())
    done = run(
        *("qknorm", "translate", "-c", checkpoint, "--cpu", text),
        *("--batch-size", 5, "--buffer-size", 7),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [expected[line] for line in lines]


def test_a_line_is_answered_before_the_next_is_read(checkpoint: Path, sentences: list[str]) -> None:
    expected = Translator(checkpoint, beam=2, lenpen=0.5, cpu=True).translate(sentences[:2])
    process = subprocess.Popen(
        [
            *(Path(sys.executable).parent / "qknorm", "translate", "-c", checkpoint, "--cpu"),
            *("--buffer-size", "1", "--beam", "2", "--lenpen", "0.5"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
    )
    assert process.stdin and process.stdout
    for sentence, translation in zip(sentences, expected, strict=False):
        process.stdin.write(f"{sentence}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline().decode() == f"{translation}\n"
    process.stdin.close()
    assert process.wait() == 0
    assert process.stdout.read() == b""


def test_a_reader_that_stops_early_sees_no_traceback(
    checkpoint: Path, parallel_files: Files, of_test_set: list[str], tmp_path: Path
) -> None:
    """The train set's translations fill the pipe long before they are all written."""
    text = tmp_path / "text"
    test, train_set = (parallel_files[split][0].read_bytes() for split in ("test", "train"))
    text.write_bytes(test + 5 * train_set)
    qknorm = Path(sys.executable).parent / "qknorm"
    done = subprocess.run(
        f"{qknorm} translate -c {checkpoint} --cpu --beam 1 --buffer-size 30 {text} | head -n 1",
        shell=True,
        env=clean_environment(),
        capture_output=True,
        check=False,
    )
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_a_closed_standard_input_is_told(checkpoint: Path, fault: Fault) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" translate -c "$1" --cpu <&-', QKNORM, checkpoint],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "qknorm: standard input is closed: name a file, or give the text in a pipe\n"
    )
    fault("translate", "a closed standard input", done.stderr)


def test_nothing_in_nothing_out(checkpoint: Path) -> None:
    translator = Translator(checkpoint, cpu=True)
    assert translator.translate([]) == []
    assert translator.translate(["", ""]) == ["", ""]


def test_long_lines_are_read_and_segmented_a_few_at_a_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of text, of which never more than a few are in use; each line stays in its place."""
    translator = Translator(checkpoint, cpu=True, beam=1)
    encode, translate, most = translator.subwords.encode, translator._translate, [0, 0]

    def encoding(lines: list[str]) -> list[list[str]]:
        most[0] = max(most[0], sum(map(len, lines)))
        return encode([line[:20] for line in lines])  # the search is not what is tested

    def translating(lines: list[str]) -> list[str]:
        most[1] = max(most[1], sum(map(len, lines)))
        return translate(lines)

    monkeypatch.setattr(translator.subwords, "encode", encoding)
    monkeypatch.setattr(translator, "_translate", translating)
    starts = ["Kalo mitu.", "Neka.", "", "Tulo kami."] * 16
    expected = list(map(translator.translate, [[start] for start in starts[:4]]))
    mib = 1 << 20
    long = (start and f"{start}{' ' * mib}"[:mib] for start in starts)
    found = list(translator.translate_in_chunks(long, 1024))
    assert found == [line for (line,) in expected] * 16
    assert most[0] <= mib + (1 << 18)
    assert most[1] <= 5 * mib


# The same as fairseq's own command


def test_translations_are_those_of_fairseq_generate(
    run: Run, checkpoint: Path, prepared: Path, of_test_set: list[str]
) -> None:
    done = run(
        *("fairseq-generate", prepared, "--user-dir", PROJECT / "qknorm_fairseq"),
        *("--path", checkpoint, "--beam", 4, "--max-len-a", 1, "--max-len-b", 50, "--cpu"),
        *("--remove-bpe", "sentencepiece"),
        *("--required-batch-size-multiple", 1),  # or fairseq leaves some sentences out
    )
    assert done.returncode == 0, done.stderr
    hypotheses = {
        int(number): text
        for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    }
    assert [hypotheses[number] for number in range(len(of_test_set))] == of_test_set


def test_a_checkpoint_of_fairseqs_own_transformer_translates_too(
    transformer_checkpoint: Path, parallel_files: Files, sentences: list[str]
) -> None:
    assert isinstance(load(transformer_checkpoint)["cfg"]["model"], Namespace)  # unlike ours
    translations = Translator(transformer_checkpoint, cpu=True).translate(sentences)
    references = parallel_files["test"][1].read_text(encoding="utf-8").splitlines()
    assert score(translations, references, tokenized=False).bleu > 60


# Where the files are


def moved(checkpoint: Path, prepared: Path, folder: Path) -> Path:
    """The checkpoint with its small files in a folder, its training data gone."""
    folder.mkdir()
    for name in SMALL_FILES:
        shutil.copyfile(prepared / name, folder / name)
    state = load(checkpoint)
    assert state["cfg"]["task"]["data"] == str(prepared)
    state["cfg"]["task"]["data"] = str(folder / "gone")
    torch.save(state, folder / "checkpoint_best.pt")
    return folder / "checkpoint_best.pt"


def test_a_checkpoint_moved_with_its_small_files_works_without_the_data(
    checkpoint: Path, prepared: Path, sentences: list[str], of_test_set: list[str], tmp_path: Path
) -> None:
    path = moved(checkpoint, prepared, tmp_path / "elsewhere")
    assert Translator(path, cpu=True).translate(sentences) == of_test_set


def test_the_data_option_names_the_folder(
    checkpoint: Path, prepared: Path, sentences: list[str], of_test_set: list[str], tmp_path: Path
) -> None:
    path = moved(checkpoint, prepared, tmp_path / "elsewhere")
    for name in SMALL_FILES:
        (path.parent / name).unlink()
    with pytest.raises(QKNormError, match=f"{path.parent} or {path.parent}/gone.*--data"):
        Translator(path, cpu=True)
    assert Translator(path, data=prepared, cpu=True).translate(sentences) == of_test_set


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_that_is_missing_is_named(
    name: str, checkpoint: Path, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    path = moved(checkpoint, prepared, tmp_path / "elsewhere")
    (path.parent / name).unlink()
    with pytest.raises(QKNormError) as refusal:
        Translator(path, data=path.parent, cpu=True)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)
    fault("translate", f"{name} is missing", str(refusal.value))


def test_another_vocabulary_does_not_fit(
    checkpoint: Path, prepared: Path, sentences: list[str], tmp_path: Path, fault: Fault
) -> None:
    train_subwords(sentences, 60, tmp_path / "sentencepiece.model")
    for side in ("xx", "yy"):
        Subwords(tmp_path / "sentencepiece.model").write_dictionary(tmp_path / f"dict.{side}.txt")
    shutil.copy(prepared / "qknorm.json", tmp_path)
    with pytest.raises(QKNormError) as refusal:
        Translator(checkpoint, data=tmp_path, cpu=True)
    assert f"does not fit the vocabulary in {tmp_path}" in str(refusal.value)
    assert "size mismatch" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    fault("translate", "a vocabulary of another size", str(refusal.value))


# Checkpoints that are none


def cut_in_half(checkpoint: Path, path: Path) -> None:
    content = checkpoint.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def overwritten_in_the_middle(checkpoint: Path, path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    content[2000:6000] = bytes(4000)
    path.write_bytes(content)


def with_another_task(checkpoint: Path, path: Path) -> None:
    state = load(checkpoint)
    state["cfg"]["task"]["_name"] = "of_a_plugin_that_is_not_here"
    torch.save(state, path)


def with_another_architecture(checkpoint: Path, path: Path) -> None:
    state = load(checkpoint)
    state["cfg"]["model"]["_name"] = state["cfg"]["model"]["arch"] = "of_a_plugin_that_is_not_here"
    torch.save(state, path)


def with_flipped_weights(checkpoint: Path, path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    with zipfile.ZipFile(checkpoint) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        name, extra = struct.unpack_from("<HH", content, largest.header_offset + 26)
        content[largest.header_offset + 30 + name + extra + 400] ^= 0x41
    path.write_bytes(content)


NO_CHECKPOINTS: dict[str, tuple[Any, str]] = {
    "missing": (lambda _, path: None, "no such checkpoint"),
    "a folder": (lambda _, path: path.mkdir(), "a folder; name the checkpoint in it, like"),
    "empty": (lambda _, path: path.touch(), "damaged"),
    "text": (lambda _, path: path.write_text("hello\n"), "damaged"),
    "cut in half": (cut_in_half, "damaged"),
    "overwritten": (overwritten_in_the_middle, "damaged"),
    "with one byte of the weights changed": (with_flipped_weights, "damaged"),
    "a list": (lambda _, path: torch.save([1], path), "not a fairseq checkpoint"),
    "weights only": (lambda _, path: torch.save({"w": torch.ones(2)}, path), "not a fairseq"),
    "an empty model": (lambda _, path: torch.save({"model": {}}, path), "of another model"),
    "another task": (with_another_task, "of another model"),
    "another architecture": (with_another_architecture, "of another model"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_of_ours_ends_in_one_line(
    kind: str, checkpoint: Path, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    make, expected = NO_CHECKPOINTS[kind]
    path = tmp_path / "checkpoint.pt"
    make(checkpoint, path)
    with pytest.raises(QKNormError) as refusal:
        Translator(path, data=prepared, cpu=True)
    message = str(refusal.value)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message
    assert len(message) < 600
    fault("translate", f"a checkpoint that is {kind}", message)


class Payload:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (self.command,)


def test_a_checkpoint_with_a_payload_is_refused_by_name_and_never_runs_it(
    run: Run, checkpoint: Path, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    state = load(checkpoint)
    state["extra_state"]["payload"] = Payload(f"touch {tmp_path}/ran")
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    done = run("qknorm", "translate", "-c", path, "--data", prepared, "--cpu", input="kalo\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "posix.system" in done.stderr
    assert not (tmp_path / "ran").exists()
    fault("strangers' checkpoints", "a shell command (reduce) at the command line", done.stderr)
    torch.load(
        path, weights_only=False
    )  # the payload is a real one: it runs where nothing stops it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["transformer", "fconv", "user_dir"])
def test_options_of_a_checkpoint_are_not_run(
    kind: str, run: Run, checkpoint: Path, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    """fairseq evaluates some options, and imports a --user-dir."""
    state = load(checkpoint)
    code = f"__import__('os').system('touch {tmp_path}/ran')"
    if kind == "user_dir":
        (tmp_path / "plugin").mkdir()
        (tmp_path / "plugin" / "__init__.py").write_text(code)
        state["cfg"]["common"]["user_dir"] = str(tmp_path / "plugin")
    else:
        option = {"transformer": "adaptive_softmax_cutoff", "fconv": "encoder_layers"}[kind]
        state["cfg"]["model"] = Namespace(_name=kind, arch=kind, **{option: code})
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    done = run("qknorm", "translate", "-c", path, "--data", prepared, "--cpu", input="Kalo.\n")
    assert not (tmp_path / "ran").exists()
    if kind == "user_dir":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
    happened = done.stderr or "it is not imported"
    fault("strangers' checkpoints", f"code in an option of the {kind}", happened)


# Bad input


def test_invalid_utf_8_names_file_and_line_after_what_came_before(
    run: Run, checkpoint: Path, sentences: list[str], of_test_set: list[str], fault: Fault
) -> None:
    text = f"{sentences[0]}\n{sentences[1]}\n".encode() + b"caf\xe9\n"
    done = run("qknorm", "translate", "-c", checkpoint, "--cpu", "--buffer-size", 2, input=text)
    assert done.returncode == 1
    assert done.stdout.splitlines() == of_test_set[:2]
    assert done.stderr.count("\n") == 1
    assert "standard input, line 3: not valid UTF-8 (byte 4 is 0xe9)" in done.stderr
    fault("translate", "invalid UTF-8 after two good lines, which are translated", done.stderr)


def test_a_missing_input_file_is_named_at_once(run: Run, tmp_path: Path, fault: Fault) -> None:
    for what, file in (("a missing text", tmp_path / "missing"), ("a folder for a text", tmp_path)):
        done = run("qknorm", "translate", "-c", "any.pt", file)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert str(file) in done.stderr
        fault("translate", what, done.stderr)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    checkpoint: Path, of_test_set: list[str], sentences: list[str], fault: Fault
) -> None:
    """It is still being written when the command ends, and what came before is translated."""
    command = [Path(sys.executable).with_name("qknorm"), "translate", "-c", checkpoint, "--cpu"]
    with subprocess.Popen(
        [*command, "--buffer-size", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr
        process.stdin.write(f"{sentences[0]}\n".encode())
        with pytest.raises(BrokenPipeError):
            for _ in range(1000):  # MiB; memory would show it, were they all read
                process.stdin.write(b"a" * (1 << 20))
        message = process.stderr.read().decode()
        assert process.wait(60) == 1
        assert process.stdout.read().decode().splitlines() == of_test_set[:1]
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    assert "standard input, line 2: longer than 1,048,576 bytes" in message
    assert message.count("\n") == 1
    fault("translate", "a line of 1,000 MiB in a pipe", message)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-c", "any.pt", "--beam", "0"),
        ("-c", "any.pt", "--buffer-size", "0"),
        ("-c", "any.pt", "--lenpen", "nan"),
    ],
)
def test_wrong_use_exits_2(options: tuple[str, ...], run: Run) -> None:
    done = run("qknorm", "translate", *options)
    assert done.returncode == 2
    assert "Error" in done.stderr
