"""A folder that is replaced is there before and after, whatever happens in between."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from qknorm_fairseq import files


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "out", "old")
    return tmp_path / "out"


def write(path: Path, text: str) -> None:
    with files.sole_maker(path), files.new_directory(path) as work:
        (work / "text").write_text(text)


def test_a_folder_is_exchanged_in_one_step(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not files._exchange(out, out):
        pytest.skip("this file system exchanges no names")
    monkeypatch.setattr(files, "_replace", None)
    write(out, "new")
    assert (out / "text").read_text() == "new"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["error", "kill"])
def test_a_fault_between_two_renames(kind: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def failing(path: Path, target: Path) -> Path:
        if target == out and path.name != "out":  # the new one gets its name
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "Input/output error")
        return replace(path, target)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
        monkeypatch.setattr(Path, "replace", failing)
        try:
            write(out, "new")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert out.exists() == (kind == "error")
    with files.sole_maker(out):
        assert (out / "text").read_text() == "old"
        assert list(out.parent.iterdir()) == [out]


def test_half_a_file_that_a_kill_left_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("score.json", ".lock", ".hidden", "checkpoint_last.pt.tmp"):
        (tmp_path / name).write_text("old")
    before = set(tmp_path.iterdir())
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            files.write_text(tmp_path / "score.json", "new")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "score.json").read_text() == "old"
    assert len(set(tmp_path.iterdir()) - before) == 1
    files.clear(tmp_path)
    assert set(tmp_path.iterdir()) == before
