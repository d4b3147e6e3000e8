"""`qknorm compare`: against sacreBLEU's own command, the definitions, and cases that are clear."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from conftest import Run
from faults import Fault

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.significance import compare, compare_files
from qknorm_fairseq.tokenization import tokenize

WORDS = ["the", "old", "house", "door", "shop", "opened", "closed", "slowly", "again", "in"]


def sentences(count: int) -> list[str]:
    numbers = random.Random(1)
    return [
        f"{' '.join(numbers.choices(WORDS, k=numbers.randint(4, 12)))}, {n}." for n in range(count)
    ]


def spoilt(lines: list[str], share: float, seed: int) -> list[str]:
    """The lines with some of their words replaced."""
    numbers = random.Random(seed)
    return [
        " ".join("wrong" if numbers.random() < share else word for word in line.split())
        for line in lines
    ]


REFERENCES = sentences(60)
BASE, SYSTEM = spoilt(REFERENCES, 0.20, 2), spoilt(REFERENCES, 0.16, 3)


def write(folder: Path, **texts: list[str]) -> list[Path]:
    files = []
    for name, lines in texts.items():
        files.append(folder / name)
        files[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files


def by_sacrebleu(run: Run, test: str, *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What sacreBLEU's own command says of the base and of the system."""
    done = run("sacrebleu", *arguments, f"--paired-{test}", "--format", "json")
    assert done.returncode == 0, done.stderr
    base, system = json.loads(done.stdout)
    return base["BLEU"], system["BLEU"]


def test_figures_are_those_of_the_sacrebleu_command(run: Run, tmp_path: Path) -> None:
    base, system, ref = write(tmp_path, base=BASE, system=SYSTEM, ref=REFERENCES)
    done = run("qknorm", "compare", base, system, ref, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_against_sacrebleu(found, run, ref, "-i", base, system)
    assert found["signatures"]["bootstrap"].startswith("nrefs:1|bs:1000|seed:12345|")
    assert found["signatures"]["randomization"].startswith("nrefs:1|ar:10000|seed:12345|")

    shown = run("qknorm", "compare", base, system, ref)
    for value in ("base", "system", "difference"):
        assert f"{found[value]:.2f}" in shown.stdout
    assert f"{found['p_bootstrap']:.4f}" in shown.stdout
    assert f"{found['p_randomization']:.4f}" in shown.stdout
    assert found["signatures"]["randomization"] in shown.stdout


def test_figures_of_tokens_are_those_of_the_sacrebleu_command(run: Run, tmp_path: Path) -> None:
    tokens = [tokenize(lines, "en") for lines in (BASE, SYSTEM, REFERENCES)]
    found = asdict(compare(*tokens, metric="bleu_tok", tokenized=True))
    base, system, ref = write(tmp_path, base=tokens[0], system=tokens[1], ref=tokens[2])
    options = ("--tokenize", "none", "--force", "--smooth-method", "none")
    check_against_sacrebleu(found, run, ref, "-i", base, system, *options)


def check_against_sacrebleu(found: dict[str, Any], run: Run, *arguments: object) -> None:
    for test, p in (("bs", "p_bootstrap"), ("ar", "p_randomization")):
        first, second = by_sacrebleu(run, test, *arguments)
        assert found["base"] == pytest.approx(first["score"], abs=1e-9)
        assert found["system"] == pytest.approx(second["score"], abs=1e-9)
        assert 0.001 < second["p_value"] < 0.5  # neither end, or every seed would do
        assert found[p] == second["p_value"]
    assert found["difference"] == found["system"] - found["base"]


def test_tokens_compare_as_the_text_they_stand_for() -> None:
    text = compare(BASE, SYSTEM, REFERENCES)
    both = (tokenize(BASE, "en"), tokenize(SYSTEM, "en"), tokenize(REFERENCES, "en"))
    assert compare(*both, tokenized=True) == text


def test_interval_is_that_of_resampled_texts() -> None:
    """From the definition: texts are drawn, both systems' drawn lines scored by sacreBLEU."""
    base, system, references = BASE[:12], SYSTEM[:12], REFERENCES[:12]
    found = compare(base, system, references)
    differences = []
    for numbers in np.random.default_rng(12345).choice(12, size=(1000, 12), replace=True):
        of = [[references[n] for n in numbers]]
        scores = [
            sacrebleu.corpus_bleu([lines[n] for n in numbers], of).score for lines in (base, system)
        ]
        differences.append(scores[1] - scores[0])
    ends = np.percentile(differences, [2.5, 97.5])
    assert found.interval == pytest.approx(tuple(ends), abs=0.1)
    assert found.interval[0] < found.difference < found.interval[1]


def test_identical_systems_do_not_differ() -> None:
    found = compare(BASE, BASE, REFERENCES)
    assert (found.p_bootstrap, found.p_randomization) == (1, 1)
    assert found.interval == (0, 0)
    assert found.differing == 0


def test_a_few_better_lines_are_no_evidence(run: Run, tmp_path: Path) -> None:
    """3 better lines of 60: of the 8 ways to swap them, 2 differ as much, so p is 1/4."""
    system = [*REFERENCES[:3], *BASE[3:]]
    base = [line.replace("the", "wrong", 1) + " wrong" for line in REFERENCES[:3]] + BASE[3:]
    found = compare(base, system, REFERENCES)
    assert found.differing == 3
    assert found.p_randomization == 0.25
    files = write(tmp_path, base=base, system=system, ref=REFERENCES)
    _, theirs = by_sacrebleu(run, "ar", files[2], "-i", *files[:2])
    assert theirs["p_value"] < 0.001  # what sacreBLEU alone makes of it


def test_a_clearly_better_system() -> None:
    worse = spoilt(REFERENCES, 0.5, 4)
    for base, system, sign in ((worse, SYSTEM, 1), (SYSTEM, worse, -1)):
        found = compare(base, system, REFERENCES)
        assert found.p_bootstrap < 0.005
        assert found.p_randomization < 0.001
        assert sign * found.difference > 10
        assert all(sign * end > 0 for end in found.interval)


def test_the_seed_is_sacrebleus(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compare(BASE, SYSTEM, REFERENCES)
    assert compare(BASE, SYSTEM, REFERENCES) == first
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    other = compare(BASE, SYSTEM, REFERENCES)
    assert "seed:7" in other.signatures["bootstrap"]
    assert other.p_randomization != first.p_randomization
    assert other.difference == first.difference


@pytest.mark.parametrize("metric", ["chrf", "ter"])
def test_other_metrics(metric: str) -> None:
    found = compare(spoilt(REFERENCES, 0.6, 4), SYSTEM, REFERENCES, metric=metric)
    assert found.p_bootstrap < 0.01
    assert (found.difference > 0) == (metric == "chrf")  # fewer errors are better


def test_bad_input_is_one_line(run: Run, tmp_path: Path, fault: Fault) -> None:
    base, system, short, empty = write(
        tmp_path, base=BASE, system=SYSTEM, short=BASE[:-1], empty=[]
    )
    for files, metric, says in (
        ((base, short, system), "bleu", f"{short} has 59 lines and {system} has 60"),
        ((base, system, tmp_path / "none"), "bleu", "none: no such file"),
        ((base, system, system), "bleurt", "no metric 'bleurt'; there is bleu_tok,"),
    ):
        with pytest.raises(QKNormError, match=says) as refusal:
            compare_files(*files, metric=metric)
        fault("compare", says.rpartition("/")[2], str(refusal.value))
    done = run("qknorm", "compare", empty, empty, empty)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"qknorm: {empty}: nothing to score: no lines\n"
    fault("compare", "three empty files", done.stderr)
    with pytest.raises(QKNormError, match="60 hypotheses, but 59 references"):
        compare(BASE, SYSTEM, REFERENCES[:-1])


@pytest.mark.parametrize("long", ["base", "system", "reference"])
def test_a_line_too_long_for_ter(long: str, run: Run, tmp_path: Path, fault: Fault) -> None:
    texts = {name: ["one two", "one two three"] for name in ("base", "system", "reference")}
    texts[long] = ["one two", " ".join(["word"] * 301)]
    files = write(tmp_path, **texts)
    done = run("qknorm", "compare", *files, "--metric", "ter")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"qknorm: {tmp_path / long}, line 2: 301 words, and TER takes too long over more than 300; "
        "write one sentence a line\n"
    )
    fault("compare", f"--metric ter and a {long} with a line of 301 words", done.stderr)
