"""Wheels that the registry pins, downloaded by pip from wherever pip is set up to look."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from qknorm_fairseq import files
from qknorm_fairseq.corpora import Package
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.progress import Report, downloading


def download(packages: tuple[Package, ...], folder: Path, *, progress: bool) -> None:
    """Have every package's wheel in `folder`. What is there with the right hash stays.

    One after the other, each complete before it gets its name: an interrupted call loses no
    more than the wheel it was at.

    Raises:
        QKNormError: pip can't be used, or a wheel can't be had or isn't the pinned one.
    """
    if all(_is_there(package, folder) for package in packages):
        return

    def say_waiting() -> None:
        if progress:
            print(f"{folder}: waiting for another download", file=sys.stderr)

    # pip's files are in .pip.xxxxxxxx: what a killed call left of them is taken away.
    with files.sole_maker(folder / "pip", say_waiting):
        missing = [package for package in packages if not _is_there(package, folder)]
        sizes = {str(package): package.size for package in missing}
        with downloading(sizes, progress) as report:
            for package in missing:
                report(str(package), 0)
                with tempfile.TemporaryDirectory(dir=folder, prefix=".pip.") as work:
                    _pip_download(package, Path(work), report)
                    wheel = Path(work) / "wheel" / package.wheel
                    if not wheel.is_file():
                        raise QKNormError(f"{package}: pip brought no {package.wheel}")
                    files.settle(wheel, folder / package.wheel)


def _is_there(package: Package, folder: Path) -> bool:
    path = folder / package.wheel
    return path.is_file() and files.sha256(path) == package.sha256


def _pip_download(package: Package, work: Path, report: Report) -> None:
    """Let pip put the wheel into work/wheel."""
    requirement = f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
    files.write_text(work / "requirements.txt", requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-deps"]
    # The wheel is read, not run: it needn't fit this Python.
    command += ["--only-binary=:all:", "--ignore-requires-python", "--require-hashes"]
    command += [f"--requirement={work / 'requirements.txt'}", f"--dest={work / 'wheel'}"]
    # With its temporary files in here too, the progress can be seen, and nothing is left behind.
    environment = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    ) as pip:
        try:
            while True:
                try:
                    complaint = pip.communicate(timeout=0.2)[1].decode(errors="replace")
                    break
                except subprocess.TimeoutExpired:
                    report(str(package), min(package.size, _bytes_below(work)))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise QKNormError(_pip_problem(package, complaint))
    report(str(package), package.size)


def _pip_problem(package: Package, complaint: str) -> str:
    """One line for what pip said in many."""
    if "No module named pip" in complaint:
        return f"{package}: {sys.executable} has no pip; get it with: python -m ensurepip"
    if "DO NOT MATCH THE HASHES" in complaint:
        return f"{package}: the wheel offered is not the pinned one (sha256 {package.sha256})"
    if re.search(r"Retrying \(|Connection|NameResolution|Timeout|ProxyError|SSLError", complaint):
        return f"{package}: no connection to the package index; run again when there is one"
    if "No matching distribution found" in complaint:
        return f"{package}: pip finds no such version; check the network and pip's index settings"
    errors = [line for line in complaint.splitlines() if line.startswith("ERROR:")]
    return f"{package}: pip download failed: {(errors or ['no reason given'])[-1][:200]}"


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip may have moved it meanwhile
                total += Path(root, name).stat().st_size
    return total
