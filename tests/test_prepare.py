"""`qknorm prepare` on the user's own parallel files, and what a line of text is."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece
from conftest import Files, Run, clean_environment
from fairseq.data import Dictionary, indexed_dataset
from faults import Fault
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.prepared_data import prepare
from qknorm_fairseq.subwords import Subwords, train_subwords
from qknorm_fairseq.text import one_spaced, read_lines


def binarized(folder: Path, split: str, language: str) -> list[list[str]]:
    """The pieces of each line of a prepared split, by fairseq's own reader."""
    pair = "-".join(side.stem.split(".")[1] for side in sorted(folder.glob("dict.*.txt")))
    dictionary = Dictionary.load(str(folder / f"dict.{language}.txt"))
    data = indexed_dataset.make_dataset(str(folder / f"{split}.{pair}.{language}"), "mmap")
    lines = []
    for line in data:
        *pieces, end = line.tolist()
        assert end == dictionary.eos()
        lines.append([dictionary[piece] for piece in pieces])
    return lines


def text_of(pieces: list[str]) -> str:
    """What fairseq's --remove-bpe sentencepiece makes of pieces."""
    return "".join(pieces).replace("▁", " ").strip()


def parts(files: Files) -> list[str]:
    """The files as options: --train SOURCE TARGET --valid ..."""
    return [word for split, both in files.items() for word in (f"--{split}", *map(str, both))]


def write_files(folder: Path, contents: dict[str, bytes]) -> Files:
    """Files named like train.xx, in a folder of their own."""
    folder.mkdir(exist_ok=True)
    files: Files = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for split in ("train", "valid", "test"):
        if f"{split}.xx" in contents:
            files[split] = (folder / f"{split}.xx", folder / f"{split}.yy")
    return files


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# A real run


def test_the_prepared_folder_holds_the_text_that_went_in(
    prepared: Path, parallel_files: Files
) -> None:
    for split, sides in parallel_files.items():
        for language, file in zip(("xx", "yy"), sides, strict=True):
            lines = file.read_text(encoding="utf-8").splitlines()
            pieces = binarized(prepared, split, language)
            assert [text_of(line) for line in pieces] == lines
            assert "<unk>" not in {piece for line in pieces for piece in line}


def test_the_dictionaries_are_the_sentencepiece_vocabulary_in_its_order(prepared: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "sentencepiece.model"))
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    assert pieces[:3] == ["<unk>", "<s>", "</s>"]
    for language in ("xx", "yy"):
        dictionary = Dictionary.load(str(prepared / f"dict.{language}.txt"))
        assert dictionary.symbols[:4] == ["<s>", "<pad>", "</s>", "<unk>"]  # fairseq's own
        assert dictionary.symbols[4:] == pieces[3:]


def test_the_stored_length_is_the_97_5th_percentile_of_both_sides(
    prepared: Path, unusual: tuple[Path, str]
) -> None:
    for folder in (prepared, unusual[0]):
        lengths = sorted(
            len(line) for language in ("xx", "yy") for line in binarized(folder, "train", language)
        )
        position = 0.975 * (len(lengths) - 1)
        below, share = int(position), position % 1
        expected = (1 - share) * lengths[below] + share * lengths[below + 1]
        stored = json.loads((folder / "qknorm.json").read_text())["length"]
        assert stored == pytest.approx(expected)
        assert 2 < stored <= lengths[-1]


def test_the_description_tells_languages_and_counts(prepared: Path) -> None:
    description = json.loads((prepared / "qknorm.json").read_text())
    assert (description["source_lang"], description["target_lang"]) == ("xx", "yy")
    assert description["sentences"] == {"train": 400, "valid": 40, "test": 30}
    assert description["vocab_size"] == 160


def test_the_text_that_scores_refer_to_lies_beside_the_binarized_data(
    prepared: Path, parallel_files: Files
) -> None:
    for split in ("valid", "test"):
        for language, file in zip(("xx", "yy"), parallel_files[split], strict=True):
            assert (prepared / f"{split}.{language}").read_bytes() == file.read_bytes()


def test_nothing_lies_beside_the_prepared_folder(prepared: Path) -> None:
    assert [path.name for path in prepared.parent.iterdir()] == [prepared.name]


# A second call


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A prepared folder that a test may change."""
    return Path(shutil.copytree(prepared, tmp_path / "out" / "xx-yy"))


def test_a_second_call_reuses_the_folder(run: Run, copy: Path, parallel_files: Files) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    done = run(
        "qknorm", "prepare", *parts(parallel_files), "--vocab-size", 160, "--out", copy, "--json"
    )
    assert done.returncode == 0
    assert "already prepared" in done.stderr
    assert json.loads(done.stdout) == json.loads((copy / "qknorm.json").read_text())
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before


@pytest.mark.parametrize("options", [("--vocab-size", 100), ("--limit", 50), ("-s", "zz")])
def test_other_options_need_force(
    run: Run, copy: Path, parallel_files: Files, options: tuple[object, ...]
) -> None:
    before = contents(copy)
    done = run(
        *("qknorm", "prepare", *parts(parallel_files), "--vocab-size", 160, "--out", copy),
        *options,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--force" in done.stderr
    assert contents(copy) == before


def test_changed_files_need_force(run: Run, copy: Path, tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "other",
        {f"{split}.{side}": b"ka lo\n" for split in ("train", "valid") for side in ("xx", "yy")},
    )
    done = run("qknorm", "prepare", *parts(files), "--vocab-size", 160, "--out", copy)
    assert done.returncode == 1
    assert "--force" in done.stderr


def test_force_replaces_the_folder_and_limit_and_no_test_split_work(
    run: Run, copy: Path, parallel_files: Files
) -> None:
    files = {split: parallel_files[split] for split in ("train", "valid")}
    done = run(
        *("qknorm", "prepare", *parts(files), "--out", copy),
        *("--vocab-size", 90, "--limit", 50, "--force", "--json"),
    )
    assert done.returncode == 0, done.stderr
    description = json.loads(done.stdout)
    assert description["sentences"] == {"train": 50, "valid": 40}
    assert description["vocab_size"] == 90
    first = parallel_files["train"][0].read_text().splitlines()[:50]
    assert [text_of(line) for line in binarized(copy, "train", "xx")] == first
    assert not list(copy.glob("test*"))
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_a_failed_force_leaves_the_old_folder(
    run: Run, copy: Path, parallel_files: Files, tmp_path: Path
) -> None:
    before = contents(copy)
    bad = write_files(
        tmp_path / "bad",
        {"train.xx": b"a\n", "train.yy": b"\xff\n", "valid.xx": b"a\n", "valid.yy": b"a\n"},
    )
    unreadable = run("qknorm", "prepare", *parts(bad), "--out", copy, "--force")
    assert unreadable.returncode == 1
    assert "train.yy, line 1: not valid UTF-8" in unreadable.stderr
    # This one fails later, when the new folder is half made.
    too_few = run(
        *("qknorm", "prepare", *parts(parallel_files), "--vocab-size", 6, "--out", copy, "--force")
    )
    assert too_few.returncode == 1
    assert too_few.stderr.splitlines()[-1].startswith("qknorm: ")
    assert "at least 33 are needed (--vocab-size)" in too_few.stderr
    assert contents(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_force_does_not_replace_a_folder_that_prepare_did_not_make(
    run: Run, parallel_files: Files, tmp_path: Path
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    done = run("qknorm", "prepare", *parts(parallel_files), "--out", tmp_path / "thesis", "--force")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert names_below(tmp_path) == ["thesis", "thesis/chapter1.tex"]


# Bad input

GOOD = {
    "train.xx": b"one\ntwo\nthree\n",
    "train.yy": b"uno\ndos\ntres\n",
    "valid.xx": b"four\n",
    "valid.yy": b"cuatro\n",
}
BAD: dict[str, tuple[dict[str, bytes | None], tuple[str, ...]]] = {
    "different line counts": (
        {"train.yy": b"uno\ndos\n"},
        ("train.xx has 3 lines", "train.yy has 2", "line 3"),
    ),
    "an empty file and a full one": (
        {"train.yy": b""},
        ("train.xx has 3 lines", "train.yy has 0", "line 1"),
    ),
    "invalid UTF-8": (
        {"train.yy": b"uno\nma\xf1ana\ntres\n"},
        ("train.yy, line 2", "byte 3", "f1"),
    ),
    "cut-off UTF-8": ({"valid.xx": "über".encode()[:1] + b"\n"}, ("valid.xx, line 1", "byte 1")),
    "UTF-16": ({"train.xx": "one\ntwo\nthree\n".encode("utf-16")}, ("train.xx, line 1", "byte 1")),
    "a missing file": ({"valid.yy": None}, ("valid.yy: no such file",)),
    "an empty target": ({"train.yy": b"uno\n\ntres\n"}, ("train.yy, line 2: empty",)),
    "an empty source": ({"train.xx": b"one\ntwo\n\n"}, ("train.xx, line 3: empty",)),
    "nothing but white space": (
        {"train.yy": "uno\n \t\u2003\u2028\ntres\n".encode()},
        ("train.yy, line 2: empty",),
    ),
    "two empty files": ({"valid.xx": b"", "valid.yy": b""}, ("valid.xx: no lines",)),
    "empty lines only": ({"valid.xx": b"\n\n", "valid.yy": b"\r\n\n"}, ("valid.xx", "empty")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_end_in_one_line_and_nothing_half_written(
    name: str, run: Run, tmp_path: Path, fault: Fault
) -> None:
    changes, expected = BAD[name]
    files = write_files(tmp_path / "text", GOOD)
    for file, content in changes.items():
        if content is None:
            (tmp_path / "text" / file).unlink()
        else:
            (tmp_path / "text" / file).write_bytes(content)
    before = names_below(tmp_path)
    done = run("qknorm", "prepare", *parts(files), "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for part in expected:
        assert part in done.stderr
    assert names_below(tmp_path) == before
    fault("prepare", name, done.stderr)


def test_a_directory_instead_of_a_file(run: Run, tmp_path: Path, fault: Fault) -> None:
    files = write_files(tmp_path / "text", GOOD)
    files["train"] = (tmp_path / "text", files["train"][1])
    done = run("qknorm", "prepare", *parts(files), "-s", "xx", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "text") in done.stderr
    assert "a folder, where a file is needed" in done.stderr
    assert names_below(tmp_path) == ["text", *(f"text/{name}" for name in sorted(GOOD))]
    fault("prepare", "a folder given for a text", done.stderr)


@pytest.mark.parametrize(
    ("languages", "expected"),
    [
        (("-t", "xx"), "'xx'"),
        (("-s", "pt-br"), "'pt-br'"),
        (("-s", "../up"), "'../up'"),
        (("-t", "a b"), "'a b'"),
        (("-t", "$(touch ran)"), "'$(touch ran)'"),
        (("-t", "x" * 21), "at most 20"),
    ],
)
def test_bad_language_codes(
    languages: tuple[str, str], expected: str, run: Run, tmp_path: Path, fault: Fault
) -> None:
    files = write_files(tmp_path / "text", GOOD)
    before = names_below(tmp_path)
    done = run("qknorm", "prepare", *parts(files), *languages, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert "--source-lang" in done.stderr
    assert names_below(tmp_path) == before
    fault("prepare", " ".join(languages), done.stderr)


def test_files_without_suffixes_need_language_codes(run: Run, tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text("one\n")
    both = (str(tmp_path / "source"), str(tmp_path / "target"))
    done = run("qknorm", "prepare", "--train", *both, "--valid", *both, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "--source-lang" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_of_the_folder(run: Run, tmp_path: Path, fault: Fault) -> None:
    files = write_files(tmp_path / "text", GOOD)
    (tmp_path / "out").write_text("mine")
    done = run("qknorm", "prepare", *parts(files), "--out", tmp_path / "out", "--force")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "out") in done.stderr
    assert (tmp_path / "out").read_text() == "mine"
    fault("prepare", "a file where the folder should be made", done.stderr)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--train", "a.xx", "a.yy"),
        ("--train", "a.xx"),
        ("--corpus", "catalogues"),
        ("--corpus", "catalogues", "--pair", "glen"),
        ("--corpus", "catalogues", "--pair", "gl-en-fr"),
        ("--corpus", "catalogues", "--pair", "../gl-en"),
        ("--corpus", "catalogues", "--pair", "gl-en", "--train", "a.xx", "a.yy"),
        ("--corpus", "catalogues", "--pair", "gl-en", "--vocab-size", "2"),
        ("--corpus", "catalogues", "--pair", "gl-en", "--limit", "0"),
        ("--unknown",),
    ],
)
def test_wrong_use_exits_2(options: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    done = run("qknorm", "prepare", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr
    assert names_below(tmp_path) == []


def test_a_corpus_that_was_not_fetched_names_the_command_that_fetches_it(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        *("qknorm", "prepare", "--corpus", "catalogues", "--pair", "sk-en", "--data-dir", tmp_path)
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "qknorm fetch catalogues --pair sk-en" in done.stderr
    assert names_below(tmp_path) == []


# Unusual text

# What stands in a file, and what is meant by it.
UNUSUAL = {
    "plain": "plain",
    "  spaces \t around  ": "spaces around",
    "a\tb": "a b",
    "no\u00a0break": "no break",
    "line\u2028separator": "line separator",
    "next\u0085line": "next line",
    "para\u2029graph": "para graph",
    "form\x0cfeed \x1c file": "form feed file",
    "carriage\rreturn": "carriage return",
    "wide\u3000space": "wide space",
    "zero\u200bwidth": "zero\u200bwidth",
    "<s> </s> <pad> <unk> / k n": "<s> </s> <pad> <unk> / k n",
    "x<s>y</s>z<pad>w<unk>v": "x<s>y</s>z<pad>w<unk>v",
    "madeupword0000 1 #fairseq:overwrite": "madeupword0000 1 #fairseq:overwrite",
    "100 % of %s and %(name)s, 50%": "100 % of %s and %(name)s, 50%",
    "\"double\" 'single' “curly” «French»": "\"double\" 'single' “curly” «French»",
    "&quot; &amp; @-@ |||": "&quot; &amp; @-@ |||",
    "Ǆ ﬁ ① é e\u0301 İ": "Ǆ ﬁ ① é e\u0301 İ",  # nothing is normalized
    "עברית العربية Tiếng Việt": "עברית العربية Tiếng Việt",
    "😀 👩\u200d💻": "😀 👩\u200d💻",
    "a\ufeffb": "a\ufeffb",
}


@pytest.fixture(scope="module")
def unusual(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A prepared folder of UNUSUAL in most kinds of line ends, and what the command said.

    The source has Windows' line ends and byte-order mark, the target neither, nor a last line end.
    """
    folder = tmp_path_factory.mktemp("unusual")
    target = [str(number) for number in range(len(UNUSUAL))]
    both = {
        "xx": b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in UNUSUAL).encode(),
        "yy": "\n".join(target).encode(),
    }
    files = write_files(
        folder / "text", {f"{split}.{side}": both[side] for split in SPLITS for side in both}
    )
    done = run("qknorm", "prepare", *parts(files), "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stderr


SPLITS = ("train", "valid", "test")


@pytest.mark.parametrize("split", SPLITS)
def test_unusual_text_keeps_its_lines_and_characters(split: str, unusual: tuple[Path, str]) -> None:
    folder, _ = unusual
    source = [text_of(line) for line in binarized(folder, split, "xx")]
    target = [text_of(line) for line in binarized(folder, split, "yy")]
    assert source == list(UNUSUAL.values())
    assert target == [str(number) for number in range(len(UNUSUAL))]


def test_a_text_too_small_for_the_vocabulary_makes_it_smaller_with_a_note(
    unusual: tuple[Path, str],
) -> None:
    folder, said = unusual
    size = json.loads((folder / "qknorm.json").read_text())["vocab_size"]
    assert size < 8000
    assert f"too small for 8000 subwords: {size} learned" in said


def test_overlap_with_the_training_text_is_mentioned(unusual: tuple[Path, str]) -> None:
    assert f"{len(UNUSUAL)} of {len(UNUSUAL)} test sources also stand in train" in unusual[1]


def test_empty_pairs_can_be_skipped_and_others_keep_their_counterparts(
    run: Run, tmp_path: Path
) -> None:
    files = write_files(
        tmp_path / "text",
        {
            "train.xx": b"one\n\nthree\n\nfive\n",
            "train.yy": b"uno\ndos\n\n\ncinco\n",
            # A line that is empty on both sides is no error, and no pair either.
            "valid.xx": b"\nfive one\n",
            "valid.yy": b"\ncinco uno\n",
        },
    )
    done = run("qknorm", "prepare", *parts(files), "--skip-empty", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "train: 3 pairs with an empty side left out" in done.stderr
    kept = [
        [text_of(line) for line in binarized(tmp_path / "out", split, language)]
        for split in ("train", "valid")
        for language in ("xx", "yy")
    ]
    assert kept == [["one", "five"], ["uno", "cinco"], ["five one"], ["cinco uno"]]


def test_a_writing_system_of_thousands_of_characters(run: Run, tmp_path: Path) -> None:
    random_numbers = random.Random(1)
    characters = [chr(0x4E00 + number) for number in range(4000)]
    frequent_first = [1 / (number + 1) for number in range(4000)]
    source = [
        "".join(random_numbers.choices(characters, frequent_first, k=12)) + "。"
        for _ in range(3000)
    ]
    target = [" ".join(random_numbers.choices("abcdefgh", k=5)) for _ in source]
    text = {"xx": "\n".join(source).encode(), "yy": "\n".join(target).encode()}
    files = write_files(
        tmp_path / "text",
        {f"{split}.{side}": text[side] for split in ("train", "valid") for side in text},
    )
    done = run("qknorm", "prepare", *parts(files), "--vocab-size", 5000, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    pieces = binarized(tmp_path / "out", "train", "xx")
    unknown = sum(piece == "<unk>" for line in pieces for piece in line)
    assert unknown <= 0.001 * sum(map(len, source))  # only the very rarest
    rest = [(text_of(line), text) for line, text in zip(pieces, source, strict=True)]
    assert all(found == text for found, text in rest if "<unk>" not in found)

    too_few = run("qknorm", "prepare", *parts(files), "--vocab-size", 500, "--out", tmp_path / "no")
    assert too_few.returncode == 1
    assert too_few.stderr.splitlines()[-1].startswith("qknorm: ")
    assert "different characters" in too_few.stderr
    assert "are needed (--vocab-size)" in too_few.stderr
    assert not (tmp_path / "no").exists()


# Stopped in the middle; two at once


def start(files: Files, out: Path, vocab_size: int = 160) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(Path(sys.executable).parent / "qknorm", "prepare", *parts(files)),
            *("--vocab-size", str(vocab_size), "--out", out),
        ],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_it_leaves_no_folder_that_looks_finished(
    kind: signal.Signals, run: Run, parallel_files: Files, tmp_path: Path, fault: Fault
) -> None:
    out = tmp_path / "out"
    many: Files = {}  # lines enough that it isn't finished before this process looks again
    for split, files in parallel_files.items():
        many[split] = (tmp_path / files[0].name, tmp_path / files[1].name)
        for file, copy in zip(files, many[split], strict=True):
            copy.write_bytes(file.read_bytes() * 50)
    process = start(many, out)
    while not list(tmp_path.glob(".out.*/sentencepiece.model")):  # the new folder is half made
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, kind)
    assert process.wait() != 0
    assert not out.exists()
    if kind == signal.SIGINT:  # Ctrl-C leaves time to tidy up
        assert not list(tmp_path.glob(".out*"))
    fault("prepare", f"stopped in the middle ({kind.name})", "no folder that looks finished")


def test_two_at_once_and_after_one_was_killed(
    run: Run, parallel_files: Files, prepared: Path, tmp_path: Path, fault: Fault
) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.abcdefgh").mkdir()  # what a killed call leaves behind
    (tmp_path / ".out.abcdefgh" / "sentencepiece.model").write_bytes(b"half")
    processes = [start(parallel_files, out), start(parallel_files, out)]
    assert [process.wait() for process in processes] == [0, 0]
    assert contents(out) == contents(prepared)  # the same bytes as whenever it is made
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    fault(
        "prepare",
        "two at once of one corpus, beside what a killed one left",
        "one waits; both succeed, with the same bytes; what was left is gone",
    )


def test_two_at_once_with_different_options_do_not_overwrite_each_other(
    parallel_files: Files, tmp_path: Path, fault: Fault
) -> None:
    """One is made; the other is told so, as if it had come later."""
    out = tmp_path / "out"
    processes = [start(parallel_files, out, size) for size in (160, 150)]
    assert sorted(process.wait() for process in processes) == [0, 1]
    made = json.loads((out / "qknorm.json").read_text())["made_from"]["vocab_size"]
    assert made == (160, 150)[[process.returncode for process in processes].index(0)]
    fault(
        "prepare",
        "two at once into one folder, with different options",
        "one is made, whole; the other is told that the folder is there",
    )


# The text path, with any text


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    """Subwords of UNUSUAL."""
    file = tmp_path_factory.mktemp("subwords") / "sentencepiece.model"
    train_subwords(list(UNUSUAL.values()), 8000, file)
    return Subwords(file)


CHARACTERS = sorted({character for line in UNUSUAL.values() for character in line})
WHITE_SPACE = [
    " ",
    "\t",
    "\r",
    "\x0b",
    "\x0c",
    "\x1f",
    "\x85",
    "\xa0",
    "\u2028",
    "\u2029",
    "\u3000",
]
ANY_LINE = st.lists(st.sampled_from([*CHARACTERS, *WHITE_SPACE, *UNUSUAL])).map("".join)


@given(lines=st.lists(ANY_LINE), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
@example(lines=["\ufeff"], end="\n", mark=False)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_come_back_as_many_and_in_order(
    lines: list[str], end: str, mark: bool, subwords: Subwords, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_bytes(
        (b"\xef\xbb\xbf" if mark else b"") + "".join(line + end for line in lines).encode()
    )
    if lines and not mark:
        lines = [lines[0].removeprefix("\ufeff"), *lines[1:]]  # it is a mark there
    read = read_lines(file)
    assert len(read) == len(lines)
    for found, line in zip(read, lines, strict=True):
        letters = [character for character in line if not character.isspace()]
        assert [character for character in found if character != " "] == letters
    assert [subwords.decode(pieces) for pieces in subwords.encode(read)] == read


@given(line=st.text())
def test_one_spaced_is_what_fairseq_and_sentencepiece_both_split_alike(line: str) -> None:
    spaced = one_spaced(line)
    assert spaced.split() == spaced.split(" ") if spaced else line.split() == []
    assert spaced.split() == line.split()
    assert one_spaced(spaced) == spaced


@given(line=ANY_LINE.map(one_spaced))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fairseq_reads_every_piece_as_the_subwords_wrote_it(
    line: str, subwords: Subwords, tmp_path: Path
) -> None:
    subwords.write_dictionary(tmp_path / "dict.txt")
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    (pieces,) = subwords.encode([line])
    numbers = dictionary.encode_line(" ".join(pieces), add_if_not_exist=False).tolist()
    assert [dictionary[number] for number in numbers] == [*pieces, "</s>"]
    assert dictionary.unk() not in numbers


def test_something_else_than_a_subword_model_is_refused(tmp_path: Path) -> None:
    from qknorm_fairseq.errors import QKNormError

    (tmp_path / "sentencepiece.model").write_bytes(b"\x00garbage")
    for file in (tmp_path / "sentencepiece.model", tmp_path / "missing.model"):
        with pytest.raises(QKNormError, match="not a sentencepiece model"):
            Subwords(file)


def test_binarized_as_by_fairseq_preprocess(
    prepared: Path, parallel_files: Files, run: Run, tmp_path: Path
) -> None:
    """Byte for byte what fairseq's own command makes of the same pieces and dictionary."""
    subwords = Subwords(prepared / "sentencepiece.model")
    options: list[object] = []
    for split, files in parallel_files.items():
        options += [f"--{split}pref", tmp_path / split]
        for file in files:
            lines = file.read_text(encoding="utf-8").splitlines()
            pieces = [" ".join(line) for line in subwords.encode(lines)]
            text = "".join(f"{line}\n" for line in pieces)
            (tmp_path / f"{split}{file.suffix}").write_text(text, encoding="utf-8")
    subwords.write_dictionary(tmp_path / "dictionary.txt")
    done = run(
        "fairseq-preprocess",
        *("--source-lang", "xx", "--target-lang", "yy", "--joined-dictionary"),
        *("--srcdict", tmp_path / "dictionary.txt", "--destdir", tmp_path / "out", *options),
    )
    assert done.returncode == 0, done.stderr
    made = [file for file in (tmp_path / "out").iterdir() if file.name != "preprocess.log"]
    assert len(made) == 14  # .bin and .idx for three splits and two sides; two dictionaries
    for file in made:
        assert file.read_bytes() == (prepared / file.name).read_bytes(), file.name


def test_swapped_files_are_refused(
    run: Run, parallel_files: Files, tmp_path: Path, fault: Fault
) -> None:
    """The suffixes of --valid contradict those of --train."""
    train, valid = parallel_files["train"], parallel_files["valid"]
    done = run(
        "qknorm", "prepare", "--train", *train, "--valid", *valid[::-1], "--out", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "--valid" in done.stderr and "the other way round" in done.stderr
    assert not (tmp_path / "out").exists()
    fault("prepare", "source and target of --valid swapped", done.stderr)


NOT_LEARNED_FROM = {
    "lines of more than 100,000 bytes": "one two " * 15_000,
    "U+2585 in every line": "one \u2585 two",
    "nothing but U+2581": "\u2581 \u2581",
}


@pytest.mark.parametrize("name", NOT_LEARNED_FROM)
def test_text_that_no_subwords_are_learned_from(name: str, tmp_path: Path, fault: Fault) -> None:
    sides = (tmp_path / "t.xx", tmp_path / "t.yy")
    for file in sides:
        file.write_text(f"{NOT_LEARNED_FROM[name]}\n" * 3, encoding="utf-8")
    splits = {"train": sides, "valid": sides}
    with pytest.raises(QKNormError) as error:
        prepare(splits, source_lang="xx", target_lang="yy", out=tmp_path / "out", say=list)
    message = str(error.value)
    assert message.startswith(f"{sides[0]} and {sides[1]}: no line to learn subwords from")
    assert "write one sentence a line" in message
    assert "\n" not in message
    assert set(tmp_path.iterdir()) == set(sides)
    fault("prepare", name, message)


def test_a_few_lines_that_no_subwords_are_learned_from_do_no_harm(tmp_path: Path) -> None:
    sides = (tmp_path / "t.xx", tmp_path / "t.yy")
    for file in sides:
        usual = "".join(f"one two three word{n % 7}\n" for n in range(100))
        odd = "".join(f"{line}\n" for line in NOT_LEARNED_FROM.values())
        file.write_text(usual + odd, encoding="utf-8")
    splits = {"train": sides, "valid": sides}
    out = tmp_path / "out"
    made = prepare(splits, source_lang="xx", target_lang="yy", out=out, vocab_size=60, say=list)
    assert made.sentences["train"] == 103
