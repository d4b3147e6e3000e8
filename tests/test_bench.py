"""`qknorm bench`: that it measures what it says. How fast things are is not tested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Run
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset

from qknorm_fairseq import bench, growth, plots


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
        assert 0.2 < each["products"] < 1
        assert each["bound"] == pytest.approx(each["ratio"][0] / each["products"])
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


def test_what_is_compared_with_what() -> None:
    """fairseq's own transformer in the same precision, on a GPU; in full precision, on a CPU."""
    fairseq, plain, fast = "fairseq transformer", "plugin, plain", "plugin"
    assert list(bench.variants("decode", "cpu")) == [fairseq, plain, fast]
    assert list(bench.variants("train", "cpu"))[:3] == [fairseq, plain, fast]
    of_cpu = [fairseq, plain, fast, "plugin, bf16"]
    assert {bench.baseline(name, of_cpu) for name in of_cpu} == {fairseq}
    of_gpu = bench.variants("train", "cuda")
    assert {name: bench.baseline(name, of_gpu) for name in of_gpu} == {
        f"{name}, {precision}": f"{fairseq}, {precision}"
        for precision in ("fp16", "bf16")
        for name in (fairseq, plain, fast)
    }


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("fly",), 2, "there is train, decode, run, growth, prepare"),
        (("train", "--size", "huge"), 2, "there is tiny, full"),
        (("train", "--out", "plots"), 2, "--out is for growth"),
        (("prepare", "--pairs", "many"), 2, "write numbers"),
        (("run", "--data", "nowhere"), 1, "nowhere: no such folder"),
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


def test_growth_has_a_point_for_each_shape_and_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And its plot has a line for each variant, through its points."""
    monkeypatch.setattr(growth, "LENGTHS", (128,))
    monkeypatch.setattr(growth, "SENTENCES", ())
    said: list[str] = []
    points = growth.measure(size="tiny", device="cpu", turns=1, say=said.append)
    assert [point.variant for point in points] == [bench.FAIRSEQ, bench.PLAIN, bench.FAST]
    assert {(point.growing, point.sentences, point.length) for point in points} == {
        ("length", 8, 128)
    }
    assert all(point.seconds > 0 and point.peak_mb > 100 for point in points)
    assert said[0].startswith("8 x 128, fairseq transformer: ")
    assert growth.table(points).splitlines()[1].startswith("8 x 128 ")

    more = [*points, *(replace(p, length=256, sentences=4, seconds=2 * p.seconds) for p in points)]
    figure = plots.growth([*more, *(replace(p, growing="sentences") for p in points)])
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == [point.variant for point in points]
    assert list(lines[0].get_xdata()) == [128, 256]
    assert list(lines[0].get_ydata()) == [points[0].seconds, 2 * points[0].seconds]


def test_alike_sentences_have_the_length_they_are_to_have(tmp_path: Path) -> None:
    sized = replace(bench.SIZES["tiny"], words=31, alike=True, max_tokens=128)
    bench.write_text(tmp_path, sized)
    dictionary = Dictionary.load(str(tmp_path / "dict.xx.txt"))
    for side in bench.LANGUAGES:
        text = load_indexed_dataset(str(tmp_path / f"train.xx-yy.{side}"), dictionary)
        assert [len(text[number]) for number in range(len(text))] == [32] * 4


def test_whole_runs_are_compared(run: Run, prepared: Path) -> None:
    """A process each, for as many updates as said, on the given data."""
    options = ("--data", prepared, "--updates", 2, "--turns", 1)
    done = run("qknorm", "bench", "run", *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["variant"] for each in found["results"]] == list(bench.variants("train", "cpu"))
    assert found["results"][0]["ratio"] == [1, 1, 1]
    for each in found["results"]:
        assert 0.005 < each["per_second"] < 2  # a program starts in a second or more
        assert each["peak_mb"] > 200
    failed = run("qknorm", "bench", "run", "--data", prepared.parent, "--turns", 1)
    assert failed.returncode == 1
    assert "fairseq transformer: " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_prepare_is_measured_at_each_size(run: Run) -> None:
    done = run("qknorm", "bench", "prepare", "--pairs", "2000,3000", "--json")
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)["calls"]
    assert [call["pairs"] for call in calls] == [2000, 3000]
    assert all(call["seconds"] > 0 and call["peak_mb"] > 50 for call in calls)
    assert "2,000 pairs: " in done.stderr
