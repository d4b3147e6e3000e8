"""The main path in one piece, for any Python, fairseq and torch: train, resume, translate, score.

scripts/test.sh tests/test_smoke.py
"""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Files, Run, train


def test_train_resume_translate_and_score(
    run: Run, prepared: Path, parallel_files: Files, tmp_path: Path
) -> None:
    arguments = (run, prepared, tmp_path / "run", "--arch", "transformer_qknorm_tiny")
    train(*arguments, updates=100)
    resumed = train(*arguments, updates=200)
    assert "checkpoint_last.pt (epoch" in resumed
    assert "@ 100 updates)" in resumed

    source, reference = parallel_files["test"]
    checkpoint = tmp_path / "run" / "checkpoint_best.pt"
    translated = run("qknorm", "translate", "--checkpoint", checkpoint, "--data", prepared, source)
    assert translated.returncode == 0, translated.stderr
    hypothesis = tmp_path / "hypothesis.yy"
    hypothesis.write_text(translated.stdout, encoding="utf-8")
    assert len(translated.stdout.splitlines()) == len(source.read_text("utf-8").splitlines())

    scored = run("qknorm", "score", "--json", hypothesis, reference)
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["bleu"] > 30  # the language is easy: it has learned it
