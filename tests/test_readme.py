"""The README's commands do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import PROJECT, Files

README = (PROJECT / "README.md").read_text(encoding="utf-8")


def test_own_pair(parallel_files: Files, tmp_path: Path) -> None:
    """The block for one's own pair, to the letter but for the number of updates."""
    names = {"train": "train", "valid": "dev", "test": "test"}
    for split, (source, target) in parallel_files.items():
        (tmp_path / f"{names[split]}.gl").write_bytes(source.read_bytes())
        (tmp_path / f"{names[split]}.en").write_bytes(target.read_bytes())
    block = re.search(r"<!-- tested: own pair -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert block is not None
    commands, changed = re.subn(r"--max-update \d+", "--max-update 2", block[1])
    assert changed == 1
    (tmp_path / "qknorm_fairseq").symlink_to(PROJECT / "qknorm_fairseq")  # the README is at home
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hypotheses = (tmp_path / "hypothesis.en").read_text(encoding="utf-8")
    references = (tmp_path / "test.en").read_text(encoding="utf-8")
    assert hypotheses.count("\n") == references.count("\n")
    assert "BLEU (tokenized)" in done.stdout


def test_scripts_and_files_it_names_are_there() -> None:
    for name in re.findall(r"`((?:scripts|configs|data|qknorm_fairseq|\.ci)/[\w./-]+)`", README):
        assert (PROJECT / name.rstrip("/")).exists() or name.startswith("data/prepared"), name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (PROJECT / link).exists(), link
