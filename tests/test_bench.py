"""`qknorm bench`: that it measures what it says. How fast things are is not tested."""

from __future__ import annotations

import json

import pytest
from conftest import Run

from qknorm_fairseq import bench


def test_training_is_compared_in_turns(run: Run) -> None:
    done = run("qknorm", "bench", "train", "--turns", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["variant"] for each in found["results"]] == list(bench.variants("train", "cpu"))
    baseline = found["results"][0]
    assert baseline["ratio"] == [1, 1, 1]
    for each in found["results"]:
        assert each["per_second"] / baseline["per_second"] == pytest.approx(each["ratio"][0])
        assert each["peak_mb"] > 100
    assert 0 < found["padding"] < 0.5
    assert found["machine"]["packages"]["torch"]
    assert done.stderr.count("turn 1 of 1: fairseq transformer ") == 1


def test_decoding_is_compared_as_a_table(run: Run) -> None:
    done = run("qknorm", "bench", "decode", "--turns", 1, "--batch-size", 1)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["sentences/s", "ratio"]
    assert lines[1].startswith("fairseq transformer ")
    assert " 1.00 (1.00 - 1.00) " in lines[1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("fly",), 2, "there is train and decode"),
        (("train", "--size", "huge"), 2, "there is tiny and full"),
        (("train", "--device", "tpu"), 1, "--device tpu: not on this machine"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], status: int, message: str, run: Run) -> None:
    done = run("qknorm", "bench", *arguments)
    assert done.returncode == status
    assert message in done.stderr


def test_a_variant_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": ["--arch", "transformer", "--optimizer", "none"]}
    monkeypatch.setattr(bench, "variants", lambda kind, device: broken)
    with pytest.raises(bench.QKNormError, match=r"broken: .*none"):
        bench.bench("train", size="tiny", device="cpu", turns=1)
