"""The `qknorm` command as a whole: help, exit statuses, what it imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import PROJECT, Run, clean_environment

COMMANDS = (
    *("user-dir", "fetch", "prepare", "translate", "score", "compare", "report", "attention"),
    "bench",
)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(flag: str, run: Run) -> None:
    done = run("qknorm", flag)
    assert done.returncode == 0
    assert done.stderr == ""
    for command in COMMANDS:
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    ("command", "mentioned"),
    [
        (("user-dir",), "--user-dir"),
        (("fetch",), "catalogues"),
        (("fetch",), "--pair"),
        (("prepare",), "--train"),
        (("translate",), "--checkpoint"),
        (("score",), "--tokenized"),
        (("compare",), "--metric"),
        (("report",), "--base"),
        (("attention",), "--source"),
        (("bench",), "--turns"),
    ],
)
def test_every_command_has_help(command: tuple[str, ...], mentioned: str, run: Run) -> None:
    done = run("qknorm", *command, "--help")
    assert done.returncode == 0
    assert f"Usage: qknorm {' '.join(command)}" in done.stdout
    assert mentioned in done.stdout


def test_without_a_command_it_shows_the_help(run: Run) -> None:
    done = run("qknorm")
    assert done.returncode == 2
    assert "Usage: qknorm" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("--nonsense",), ("--debug",), ("fetch",), ("prepare", "one", "two")],
)
def test_wrong_use_exits_2_and_says_how_it_is_used(arguments: tuple[str, ...], run: Run) -> None:
    done = run("qknorm", *arguments)
    assert done.returncode == 2
    assert "Usage: qknorm" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_packages(run: Run) -> None:
    done = run("qknorm", "--version")
    assert (done.returncode, done.stdout) == (0, f"{version('qknorm-fairseq')}\n")


def test_user_dir_is_one_that_fairseq_can_use(run: Run, tmp_path: Path) -> None:
    done = run("qknorm", "user-dir", cwd=tmp_path)
    assert done.returncode == 0
    folder = Path(done.stdout.removesuffix("\n"))
    assert folder.is_absolute()
    assert (folder / "models" / "transformer_qknorm.py").is_file()
    assert folder.samefile(PROJECT / "qknorm_fairseq")


@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"], ["user-dir"]])
def test_help_comes_without_loading_torch_or_fairseq(arguments: list[str]) -> None:
    """They take seconds to load; nobody should wait for them to read a help page."""
    code = (
        "import sys\n"
        "from qknorm_fairseq.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=True,
    )
    loaded = done.stdout.rpartition("LOADED ")[2].split()
    assert "qknorm_fairseq" in loaded
    assert not {"torch", "fairseq", "fairseq_cli", "numpy", "sentencepiece", "sacrebleu"} & {
        *loaded
    }


def test_a_failure_is_one_line_and_with_debug_a_traceback(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    plain = run("qknorm", "score", missing, missing)
    assert plain.returncode == 1
    assert plain.stderr == f"qknorm: {missing}: no such file\n"
    debug = run("qknorm", "--debug", "score", missing, missing)
    assert debug.returncode == 1
    assert debug.stderr.startswith("Traceback (most recent call last):")
    assert "in read_lines" in debug.stderr
    assert f"QKNormError: {missing}: no such file" in debug.stderr


def test_a_failure_of_the_system_is_one_line_too(run: Run, tmp_path: Path) -> None:
    """An output folder below a file can't be made."""
    for side in ("xx", "yy"):
        (tmp_path / f"text.{side}").write_text("one two three\n")
    both = (tmp_path / "text.xx", tmp_path / "text.yy")
    done = run(
        *("qknorm", "prepare", "--train", *both, "--valid", *both),
        *("--out", tmp_path / "text.xx" / "below" / "out"),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"qknorm: {tmp_path / 'text.xx'}")
