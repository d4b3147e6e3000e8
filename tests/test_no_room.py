"""A full disk, and folders that nobody may write into: one line, and nothing half-made.

Both are real ones: file systems of a few kilobytes, mounted where only the command sees them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Files, Run, clean_environment
from faults import Fault
from publisher import write_registry
from test_experiment import command as experiment
from test_iwslt15 import ENGLISH, VIETNAMESE, text
from test_report import run_folder

QKNORM = Path(sys.executable).with_name("qknorm")
MOUNTS = subprocess.run(
    ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
)
needs_mounts = pytest.mark.skipif(MOUNTS.returncode != 0, reason="this machine allows no mounts")
DISKS = {
    "full disk": (
        "mount -t tmpfs -o size=8k tmpfs full && echo old > full/old",
        "No space left on device",
    ),
    "read-only folder": (
        "echo old > full/old && mount --bind full full && mount -o remount,ro,bind full",
        "Read-only file system",
    ),
}
# Only what something complete may stand in already; nothing half-made beside it.
MAY_STAND = {
    "prepare": set[str](),
    "fetch": {"downloads", "corpora"},
    "report": {"report"},
    "attention": {"maps"},
    "experiment": {"run"},
}


@needs_mounts
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("command", MAY_STAND)
def test_no_room_to_write(
    command: str,
    disk: str,
    checkpoint: Path,
    prepared: Path,
    parallel_files: Files,
    tmp_path: Path,
    fault: Fault,
) -> None:
    for folder in ("full", "local"):
        (tmp_path / folder).mkdir()
    files: list[dict[str, object]] = []
    for stem in ("train", "tst2012", "tst2013"):
        for side, lines in (("en", ENGLISH), ("vi", VIETNAMESE)):
            (tmp_path / "local" / f"{stem}.{side}").write_bytes(text(lines) * 20)
            files.append({"name": f"{stem}.{side}"})
    write_registry(tmp_path / "corpora.yaml", "iwslt15", files, {"en-vi": (800, 800, 800)})
    run_folder(tmp_path)
    splits = [part for split, both in parallel_files.items() for part in (f"--{split}", *both)]
    published = ("--from", "local", "--registry", "corpora.yaml", "--data-dir", "full")
    model = ("-c", checkpoint, "--data", prepared, "--cpu")
    calls: dict[str, list[object]] = {
        "prepare": [QKNORM, command, *splits, "--vocab-size", 160, "--out", "full/out"],
        "fetch": [QKNORM, command, "iwslt15", *published],
        "report": [QKNORM, command, "runs", "--no-attention", "--out", "full/report"],
        "attention": [QKNORM, command, *model, "--source", "Kalo.", "--out", "full/maps"],
        "experiment": [sys.executable, *experiment(prepared, "checkpoint.save_dir=full/run")],
    }
    mount, said = DISKS[disk]
    script = f'{mount} && "$@"; code=$?; ls -A full; exit $code'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, calls[command])],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (message,) = [line for line in done.stderr.splitlines() if said in line]
    assert "full" in message  # which file or folder
    names = set(done.stdout.split())
    assert "old" in names
    assert names - {"old"} <= MAY_STAND[command]
    fault("files", f"{command}: a {disk}", message)


DISKS_IN_USE = {  # with what is in the folder `kept`
    "full disk": (
        "mount -t tmpfs -o size=8m tmpfs full && cp -R kept/. full && "
        "{ dd if=/dev/zero of=full/rest bs=4k 2>/dev/null || true; }"
    ),
    "read-only folder": (
        "cp -R kept/. full && mount --bind full full && mount -o remount,ro,bind full"
    ),
}


@needs_mounts
@pytest.mark.parametrize("disk", DISKS_IN_USE)
@pytest.mark.parametrize("command", ["prepare", "fetch", "report"])
def test_what_was_there_is_left_where_there_is_no_room_for_the_new(
    command: str,
    disk: str,
    parallel_files: Files,
    run: Run,
    tmp_path: Path,
    fault: Fault,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "local").mkdir()
    files: list[dict[str, object]] = []
    for stem in ("train", "tst2012", "tst2013"):
        for side, lines in (("en", ENGLISH), ("vi", VIETNAMESE)):
            (tmp_path / "local" / f"{stem}.{side}").write_bytes(text(lines))
            files.append({"name": f"{stem}.{side}"})
    write_registry(tmp_path / "corpora.yaml", "iwslt15", files, {"en-vi": (40, 40, 40)})
    run_folder(tmp_path)
    splits = [part for split, both in parallel_files.items() for part in (f"--{split}", *both)]
    published = ("--from", "local", "--registry", "corpora.yaml")
    calls: dict[str, tuple[object, ...]] = {
        "prepare": (*splits, "--vocab-size", 160, "--force", "--out", "{}/out"),
        "fetch": ("iwslt15", *published, "--data-dir", "{}"),
        "report": ("runs", "--no-attention", "--out", "{}/report"),
    }
    before, after = (
        [str(part).format(folder) for part in calls[command]] for folder in ("kept", "full")
    )
    done = run("qknorm", command, *before, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if command == "prepare":
        after += ["--limit", "300"]
    elif command == "fetch":  # what is made from is another text now
        shutil.rmtree(tmp_path / "kept/downloads")
        (tmp_path / "local/train.en").write_bytes(text(ENGLISH[::-1]))
    elif command == "report":
        run_folder(tmp_path, seed=2)
    same = "diff -r -x rest -x downloads kept full"  # what was downloaded is complete and may stay
    script = f'{DISKS_IN_USE[disk]} && "$@"; code=$?; {same} || exit 9; exit $code'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(QKNORM), command, *after],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    fault("files", f"{command} over an older output: a {disk}", f"{done.stderr.strip()}; it stays")


@pytest.mark.parametrize("command", ["translate", "score", "compare", "user-dir"])
def test_an_output_without_room(
    command: str, checkpoint: Path, tmp_path: Path, fault: Fault
) -> None:
    """/dev/full is as a full disk is, when what was printed is written at last."""
    file = tmp_path / "text"
    file.write_text("Kalo mitu.\n")
    arguments: dict[str, tuple[object, ...]] = {
        "translate": ("-c", checkpoint, "--cpu", file),
        "score": (file, file),
        "compare": (file, file, file),
        "user-dir": (),
    }
    buffered = {n: v for n, v in clean_environment().items() if n != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [QKNORM, command, *map(str, arguments[command])],
            stdout=full,
            stderr=subprocess.PIPE,
            env=buffered,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr == "qknorm: input or output: No space left on device\n"
    fault("files", f"{command}: standard output on a full disk", done.stderr)
