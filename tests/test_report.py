"""`qknorm report` on folders of runs made by hand, whose figures can be computed by hand too."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Run
from faults import Fault

from qknorm_fairseq import report_tables as tables
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.report import make as make_report
from qknorm_fairseq.report import markdown, page, show, signatures
from qknorm_fairseq.results import find
from qknorm_fairseq.scores import score
from qknorm_fairseq.summary import Group, Row, SeedTest, Summary, summarize
from qknorm_fairseq.test_set import in_bins

BASE, QKNORM = "transformer_scalenorm_tiny", "transformer_qknorm_tiny"
SIGNATURES = {name: f"nrefs:1|{name}" for name in ("bleu_tok", "bleu", "chrf", "ter")}
SECRET = "zebra"  # a word of the test set: no report may hold it
REFERENCES = [f"the {SECRET} number {n} of the row ran over {n + 7} old hills ." for n in range(40)]
DATA = "data/prepared/catalogues/gl-en"


def run_folder(
    root: Path,
    model: str = QKNORM,
    seed: int = 1,
    bleu: float | None = 20.0,
    *,
    corpus: str = "catalogues",
    pair: str = "gl-en",
    config: Mapping[str, Any] | None = None,
    hypotheses: Sequence[str] | None = None,
    updates: Sequence[int] = (50, 100),
) -> Path:
    """A run as experiment.py leaves it: trained, and scored unless `bleu` is None.

    Args:
        config: settings that are not as usual: {"model.dropout": 0.5}.
        hypotheses: what the scores are computed from; otherwise they are `bleu` and a multiple.
    """
    folder = root / "runs" / corpus / pair / model / f"seed{seed}"
    folder.mkdir(parents=True)
    settings = {
        "model._name": model.partition("+")[0],
        "model.attention_norm": "none" if "scalenorm" in model else "l2",
        "model.residual_norm": "scale" if "scalenorm" in model else "layer",
        "model.dropout": 0.3,
        "common.seed": seed,
        "task.data": f"data/prepared/{corpus}/{pair}",
        "optimization.max_update": 1000,
        "optimization.lr": [0.002],
        "optimizer.lr": [0.002],
        "checkpoint.save_dir": str(folder),
    } | dict(config or {})
    nested: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        nested.setdefault(group, {})[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(nested))
    command = f"python -m qknorm_fairseq.experiment gl_en model={model} common.seed={seed}"
    packages = {"torch": "2.13.0"}
    write_json(folder / "environment.json", {"command": command, "packages": packages})
    write_json(folder / "qknorm.json", description(corpus))
    records = [
        {"kind": kind, "num_updates": n, "loss": 9 - n / 50, "nll_loss": 8 - n / 50, **more}
        for n in updates
        for kind, more in (
            ("train_inner", {"ppl": 30.0, "lr": 0.002}),
            ("valid", {"ppl": 20.0, "bleu": n / 10}),
        )
    ]
    if "qknorm" in model:
        records[-1]["g_encoder_1_self"] = 9.5
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "train.jsonl").write_text(lines)
    if bleu is None:
        return folder
    (folder / "training.done").touch()
    values: dict[str, Any] = {"bleu_tok": bleu, "bleu": bleu * 2, "chrf": bleu * 3, "ter": 50.0}
    values["signatures"] = SIGNATURES
    if hypotheses is not None:
        for name in ("hyp.tok.txt", "hyp.detok.txt"):
            write_lines(folder / name, hypotheses)
        values = asdict(score(hypotheses, REFERENCES, lang="en", tokenized=True))
    numbers = {"params": 3_000_000, "updates": 100, "train_seconds": 90.0 + seed}
    more = {"tokens_per_second": 2000.0, "test_sentences": len(REFERENCES)}
    write_json(folder / "score.json", {**values, **numbers, **more})
    return folder


def description(corpus: str) -> dict[str, Any]:
    return {
        **{"source_lang": "gl", "target_lang": "en", "length": 30.0, "vocab_size": 4000},
        **{"sentences": {"test": 40}, "corpus": corpus, "made_from": {}, "tokenization": "moses"},
    }


def prepared_folder(root: Path) -> None:
    """The prepared folder, as far as a report reads it: 20 sources of 4 words, 20 of 12."""
    folder = root / DATA
    folder.mkdir(parents=True)
    write_json(folder / "qknorm.json", description("catalogues"))
    write_lines(folder / "test.en", REFERENCES)
    write_lines(folder / "test.gl", ["a b c d"] * 20 + ["a b c d e f g h i j k l"] * 20)


def translations(wrong: int) -> list[str]:
    """The references, the second half without as many of their words."""
    return [
        " ".join(["wrong"] * wrong + line.split()[wrong:]) if n >= 20 else line
        for n, line in enumerate(REFERENCES)
    ]


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def write_lines(file: Path, lines: Sequence[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def summary_of(
    root: Path, base: str | None = None, say: Callable[[str], None] = lambda line: None
) -> Summary:
    return summarize(find(root / "runs")[0], root / "runs", base=base, say=say)


def rows_of(group: Group) -> dict[str, Row]:
    return {row.model: row for row in group.rows}


def test_mean_deviation_and_t_test(tmp_path: Path) -> None:
    for seed, (base, qknorm) in enumerate([(20, 22), (21, 24), (22, 23)], start=1):
        run_folder(tmp_path, BASE, seed, base)
        run_folder(tmp_path, QKNORM, seed, qknorm)
    (group,) = summary_of(tmp_path).groups
    rows = rows_of(group)
    assert list(rows) == [BASE, QKNORM]
    assert rows[BASE].difference is None
    row = rows[QKNORM]
    assert (row.bleu_tok.mean, row.bleu_tok.sd) == (23, 1)
    assert (row.bleu.mean, row.chrf.mean) == (46, 69)
    assert row.train_seconds.mean == 92
    difference = row.difference
    assert difference is not None and difference.base == BASE
    assert (difference.bleu_tok, difference.bleu, difference.chrf) == (2, 4, 6)
    # t = 2 / sqrt(1/3 + 1/3) with 4 degrees of freedom, for which the distribution function is
    # elementary: p = 1 - sin a (1 + cos^2 a / 2), tan a = t / 2. The interval: 2.776 errors.
    assert difference.welch_p == pytest.approx(0.070484, abs=1e-6)
    assert difference.welch_interval == pytest.approx((-0.2670, 4.2670), abs=1e-4)
    command = "python -m qknorm_fairseq.experiment gl_en model=transformer_qknorm_tiny"
    assert row.commands == [f"{command} common.seed=1,2,3"]
    assert row.flags == []
    # The runs were taken from where they were made: what can't be known is said.
    assert difference.tests == [] and group.lengths is None
    runs = ", ".join(f"{QKNORM} seed {seed}" for seed in (1, 2, 3))
    reason = f"{DATA}: its test set is not here"
    assert f"no significance over the test set for {runs}: {reason}" in group.notes


def test_one_seed_has_no_deviation_and_no_t_test(tmp_path: Path) -> None:
    run_folder(tmp_path, BASE, 1, 20)
    run_folder(tmp_path, QKNORM, 1, 21)
    summary = summary_of(tmp_path)
    row = rows_of(summary.groups[0])[QKNORM]
    assert row.bleu_tok.sd is None
    assert row.difference is not None and row.difference.welch_p is None
    assert "nothing is known of how much another seed would change" in summary.notes[0]


def test_seeds_of_one_model_only_are_said(tmp_path: Path) -> None:
    for seed in (1, 2):
        run_folder(tmp_path, BASE, seed)
    for seed in (2, 3, 4):
        run_folder(tmp_path, QKNORM, seed)
    summary = summary_of(tmp_path)
    of_all = "the difference is that of the means of all finished seeds"
    notes = summary.groups[0].notes
    assert f"seed 3, 4: finished with {QKNORM}, but not with {BASE}; {of_all}" in notes
    assert f"seed 1: finished with {BASE}, but not with {QKNORM}; {of_all}" in notes
    missing = [run.folder for run in summary.unfinished if run.state.startswith("missing: ")]
    of = "catalogues/gl-en"
    assert missing == [f"{of}/{QKNORM}/seed1", f"{of}/{BASE}/seed3", f"{of}/{BASE}/seed4"]


def test_signatures_of_all_seeds_are_looked_at(tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = run_folder(tmp_path, BASE, seed)
    run_folder(tmp_path, QKNORM, 1)
    content = json.loads((folder / "score.json").read_text())
    content["signatures"] |= {"chrf": "nrefs:1|other", "ter": "nrefs:1|other"}
    write_json(folder / "score.json", content)
    notes = [note for note in summary_of(tmp_path).groups[0].notes if "same way" in note]
    assert notes == [
        "chrf: not all runs were scored in the same way: "
        f"nrefs:1|chrf for {QKNORM} seed 1, {BASE} seed 1; nrefs:1|other for {BASE} seed 2"
    ]


def test_duplicates_and_links_are_said(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    kept = run_folder(tmp_path, BASE, 1, 20)
    shutil.copytree(kept, kept.with_name("seed01"))
    (kept.with_name("seed01") / "score.json").unlink()  # which sorts first, but isn't finished
    moved = run_folder(tmp_path, BASE, 2, 21)
    moved.rename(tmp_path / "moved")
    moved.symlink_to(tmp_path / "moved")
    results, left_out = find(runs)
    assert [result.folder for result in results] == [kept]
    of = f"catalogues/gl-en/{BASE}"
    assert left_out == [
        f"{of}/seed01: the same pair, model and seed as {of}/seed1; left out",
        f"{of}/seed2: a link to {tmp_path / 'moved'}, not followed; left out",
    ]
    made = make_report(runs, tmp_path / "out", command="", attention=False, say=lambda line: None)
    assert set(left_out) <= set(made.summary.notes)
    shutil.rmtree(kept)
    shutil.rmtree(kept.with_name("seed01"))
    with pytest.raises(QKNormError, match=r"no runs in it .*/seed2: a link to "):
        find(runs)


def test_settings_that_differ_are_flagged(tmp_path: Path) -> None:
    run_folder(tmp_path, BASE, 1)
    run_folder(tmp_path, BASE, 2, config={"dataset.max_tokens": 500})
    lr = {"optimization.lr": [0.001], "optimizer.lr": [0.001]}
    run_folder(tmp_path, QKNORM, 1, config=lr)
    run_folder(tmp_path, QKNORM, 2, config=lr | {"dataset.max_tokens": 500})
    no_word_dropout = {"model.word_dropout": 0.0}
    run_folder(tmp_path, f"{QKNORM}+no_word_dropout", 1, config=no_word_dropout)
    unasked = {"model.g_per": "fixed", "model.dropout": 0.1}
    run_folder(tmp_path, f"{QKNORM}+fixed_g", 1, config=unasked)
    other_value = {"model.g_per": "head", "model.attention_norm": "rms"}
    run_folder(tmp_path, f"{QKNORM}+fixed_g", 2, config=other_value)
    run_folder(tmp_path, f"{QKNORM}+heads4", 1, config=no_word_dropout)
    other = run_folder(tmp_path, f"{QKNORM}+postnorm", 1)
    write_json(other / "qknorm.json", description("catalogues") | {"vocab_size": 99})
    write_json(other / "environment.json", {"packages": {"torch": "2.6.0"}})
    flags = {row.model: row.flags for row in summary_of(tmp_path).groups[0].rows}
    assert flags == {
        BASE: ["dataset.max_tokens: 500, not None (seed 2)"],
        QKNORM: ["optimization.lr: [0.001], not [0.002]"],
        f"{QKNORM}+no_word_dropout": [],  # what the ablation is
        f"{QKNORM}+fixed_g": [
            "model.dropout: 0.1, not 0.3 (seed 1)",
            f"model.attention_norm: rms, not l2 as {QKNORM}+fixed_g has it (seed 2)",
            f"model.g_per: head, not fixed as {QKNORM}+fixed_g has it (seed 2)",
            "dataset.max_tokens: None, not 500 (seed 2)",
        ],
        f"{QKNORM}+heads4": ["model.word_dropout: 0.0, not None"],
        f"{QKNORM}+postnorm": [
            "qknorm.json: other data, or prepared in another way",
            "torch: 2.6.0, not 2.13.0",
        ],
    }


def test_average_over_pairs(tmp_path: Path) -> None:
    for corpus, pair, base, qknorm in (
        ("ted", "gl-en", 20, 21),
        ("ted", "sk-en", 25, 24),
        ("iwslt15", "en-vi", 30, 33),
        ("catalogues", "gl-en", 1, 90),
    ):
        run_folder(tmp_path, "transformer_scalenorm", 1, base, corpus=corpus, pair=pair)
        run_folder(tmp_path, "transformer_qknorm", 1, qknorm, corpus=corpus, pair=pair)
    summary = summary_of(tmp_path)
    (average,) = summary.averages  # one pair of the catalogues is no average
    assert average.corpora == "iwslt15 and ted"
    assert average.pairs == ["en-vi", "gl-en", "sk-en"]
    assert average.difference == pytest.approx(1.0)
    assert average.paper is None and average.unequal == []  # these are not the paper's five
    for pair in ("ar-en", "en-he"):
        run_folder(tmp_path, "transformer_scalenorm", 1, 20, corpus="ted", pair=pair)
        run_folder(tmp_path, "transformer_qknorm", 1, 21, corpus="ted", pair=pair)
    run_folder(tmp_path, "transformer_qknorm", 2, 23, corpus="ted", pair="ar-en")
    summary = summary_of(tmp_path)
    (average,) = summary.averages
    assert average.paper == 0.928
    assert average.difference == pytest.approx(6 / 5)
    assert average.unequal == ["ar-en"]
    assert "have not finished the same seeds of ar-en" in tables.of_averages([average]).note
    papers = {
        (group.corpus, group.pair, row.model): row.paper
        for group in summary.groups
        for row in group.rows
        if row.paper is not None
    }
    assert papers == {
        ("iwslt15", "en-vi", "transformer_qknorm"): 33.24,
        ("iwslt15", "en-vi", "transformer_scalenorm"): 32.79,
    }


def test_the_baseline_is_of_the_same_size_or_the_one_asked_for(tmp_path: Path) -> None:
    for model in (BASE, QKNORM, "transformer_scalenorm", "transformer_qknorm+fixed_g"):
        run_folder(tmp_path, model)
    run_folder(tmp_path, "transformer", corpus="demo")
    run_folder(tmp_path, QKNORM, corpus="demo")

    def bases(base: str | None) -> dict[str, str | None]:
        return {
            f"{group.corpus} {row.model}": row.difference and row.difference.base
            for group in summary_of(tmp_path, base).groups
            for row in group.rows
        }

    assert bases(None) == {
        f"catalogues {BASE}": None,
        f"catalogues {QKNORM}": BASE,
        "catalogues transformer_scalenorm": None,
        "catalogues transformer_qknorm+fixed_g": "transformer_scalenorm",
        "demo transformer": None,
        f"demo {QKNORM}": "transformer",
    }
    run_folder(tmp_path, "transformer", corpus="three", config={"model.dropout": 0.1})
    for model in (BASE, QKNORM):
        run_folder(tmp_path, model, corpus="three")
    of_three = {key: base for key, base in bases(None).items() if key.startswith("three")}
    assert of_three == {
        f"three {BASE}": None,
        "three transformer": BASE,
        f"three {QKNORM}": BASE,
    }
    assert set(bases(QKNORM).values()) == {None, QKNORM}
    with pytest.raises(QKNormError, match="--base nothing: no run of that model; there is"):
        summary_of(tmp_path, "nothing")


def test_fairseqs_own_is_compared_and_its_settings_flagged(tmp_path: Path) -> None:
    run_folder(tmp_path, "transformer", config={"model.dropout": 0.1})
    for model in (BASE, QKNORM):
        run_folder(tmp_path, model)
    (group,) = summary_of(tmp_path).groups
    assert "model.dropout: 0.1, not 0.3" in rows_of(group)["transformer"].flags
    column = tables.of_group(group)[0].columns.index("difference")
    said = {row[0]: row[column] for row in tables.of_group(group)[0].rows}
    assert said == {BASE: "baseline", "transformer": "+0.00", QKNORM: "+0.00"}


def test_a_model_alone_is_no_baseline(tmp_path: Path) -> None:
    run_folder(tmp_path, QKNORM)
    (group,) = summary_of(tmp_path).groups
    assert "nothing to compare with" in tables.of_group(group)[0].rows[0]


@pytest.fixture(scope="module")
def reported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with finished and other runs and their report; what the command printed."""
    root = tmp_path_factory.mktemp("reported")
    prepared_folder(root)
    for seed in (1, 2):
        run_folder(root, BASE, seed, hypotheses=translations(5))
        run_folder(root, QKNORM, seed, hypotheses=translations(4 if seed == 1 else 5))
    run_folder(root, QKNORM, 3, None, updates=(50, 120), pair="ar-en")
    trained = run_folder(root, f"{QKNORM}+fixed_g", 1, None, pair="ar-en")
    (trained / "training.done").touch()
    (root / "runs" / "catalogues" / "gl-en" / "transformer" / "seed1").mkdir(parents=True)
    run_folder(root, BASE, 1, 20, pair="sk-en")
    dropout = {"model.dropout": 0.5}
    run_folder(root, QKNORM, 1, 22, pair="sk-en", config=dropout)
    (root / "runs" / "mine").mkdir()
    (root / "runs" / "mine" / "checkpoint_best.pt").touch()
    done = run("qknorm", "report", "--cpu", "--out", "out", cwd=root)
    assert done.returncode == 0, done.stderr
    return root, done.stdout, done.stderr


def in_all(reported: tuple[Path, str, str], *texts: str) -> None:
    """The terminal, Markdown and the page say it."""
    root, printed, _ = reported
    parser = PageText()
    parser.feed((root / "out" / "report.html").read_text("utf-8"))
    written = (root / "out" / "report.md").read_text("utf-8")
    for text in texts:
        for shown in (printed, written, parser.text):
            assert text in shown.replace("`", ""), text


class PageText(HTMLParser):
    """A page's text, and a check that each element that begins ends in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.open, self.addresses = "", list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "wbr", "br"):
            self.open.append(tag)
        loading = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        self.addresses += [value or "" for name, value in attrs if name in loading]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_unfinished_runs_are_listed(reported: tuple[Path, str, str]) -> None:
    folder = "catalogues/ar-en"
    in_all(
        reported,
        f"{folder}/{QKNORM}/seed3",
        "training: 120 updates of at most 1,000",
        f"{folder}/{QKNORM}+fixed_g/seed1",
        "trained (100 updates), not scored",
        "catalogues/gl-en/transformer/seed1",
        "no config.yaml: not begun, or not a run's folder",
        "mine: checkpoints, but no run's folder; left out",
        "2 runs without a score: thin lines among the curves, and in no mean",
    )


def test_figures_and_what_they_lack_are_everywhere(reported: tuple[Path, str, str]) -> None:
    values = [
        score(translations(n), REFERENCES, lang="en", tokenized=True).bleu_tok for n in (5, 4)
    ]
    mean, sd = sum(values) / 2, (values[1] - values[0]) / 2**0.5
    in_all(
        reported,
        f"{mean:.2f} ± {sd:.2f}",
        f"{mean - values[0]:+.2f}",
        "1 better of 2",
        "model.dropout: 0.5, not 0.3",
        "Average difference over pairs",
        f"{(2 + mean - values[0]) / 2:+.3f}",
        "data/prepared/catalogues/sk-en: its test set is not here",
        f"seed 2: runs/catalogues/gl-en/{BASE}/seed2/checkpoint_best.pt: no such checkpoint",
    )
    assert not list((reported[0] / "out" / "plots").glob("*attention*"))  # of nothing known
    written = (reported[0] / "out" / "report.md").read_text("utf-8")
    assert f"experiment gl_en model={QKNORM} common.seed=1,2\n" in written
    assert "nrefs:1|bs:1000|seed:12345|" in written


def test_significance_is_that_of_compare(run: Run, reported: tuple[Path, str, str]) -> None:
    root = reported[0]
    content = json.loads((root / "out" / "report.json").read_text("utf-8"))
    (group,) = (g for g in content["groups"] if g["pair"] == "gl-en")
    (row,) = (row for row in group["rows"] if row["model"] == QKNORM)
    first, second = row["difference"]["tests"]
    files = [root / "runs/catalogues/gl-en" / m / "seed1/hyp.tok.txt" for m in (BASE, QKNORM)]
    reference = root / DATA / "test.en"
    options = ("--tokenized", "--metric", "bleu_tok", "--json")
    compared = json.loads(run("qknorm", "compare", *files, reference, *options).stdout)
    for key in ("difference", "interval", "p_bootstrap", "p_randomization", "signatures"):
        assert first[key] == compared[key]
    assert first["p_bootstrap"] < 0.05
    assert (second["p_bootstrap"], second["p_randomization"]) == (1, 1)  # the same translations


def test_bleu_by_length_is_of_the_sentences_of_that_length(
    reported: tuple[Path, str, str],
) -> None:
    content = json.loads((reported[0] / "out" / "report.json").read_text("utf-8"))
    (group,) = (g for g in content["groups"] if g["pair"] == "gl-en")
    lengths = group["lengths"]
    assert (lengths["bins"], lengths["sentences"]) == (["1-5", "11-15"], [20, 20])
    half = score(translations(5)[20:], REFERENCES[20:], lang="en", tokenized=True).bleu_tok
    assert lengths["bleu"][BASE][0] == pytest.approx([100, half])


@pytest.mark.parametrize(
    ("words", "bins"),
    [
        ([3] * 20 + [7] * 20, {"1-5": 20, "6-10": 20}),
        ([3] * 20 + [7] * 4, {"1-10": 24}),  # too few at the end
        ([3] * 20 + [7] * 4 + [50] * 16, {"1-5": 20, "6+": 20}),
        ([3] * 4 + [12] * 30, {"1-15": 34}),
        ([3] * 4 + [12], {"1-15": 5}),
        ([], {}),
    ],
)
def test_bins_of_few_sentences_are_put_together(words: list[int], bins: dict[str, int]) -> None:
    found = in_bins(words)
    assert {name: len(numbers) for name, numbers in found.items()} == bins
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(len(words)))


def test_no_text_of_the_corpus_in_it(reported: tuple[Path, str, str]) -> None:
    files = [file for file in (reported[0] / "out").rglob("*") if file.suffix not in ("", ".png")]
    assert len(files) > 10
    for file in files:
        assert SECRET not in file.read_text("utf-8"), file


def test_what_takes_long_is_kept_until_a_translation_changes(
    reported: tuple[Path, str, str], tmp_path: Path
) -> None:
    compared = f"catalogues gl-en {QKNORM} seed 1 against {BASE}"
    assert compared in reported[2]
    for name in ("runs", "data"):
        shutil.copytree(reported[0] / name, tmp_path / name)
    heard: list[str] = []
    summary_of(tmp_path, say=heard.append)
    assert heard == []
    folder = tmp_path / "runs/catalogues/gl-en" / QKNORM / "seed1"
    write_lines(folder / "hyp.tok.txt", translations(3))
    summary = summary_of(tmp_path, say=heard.append)
    assert heard == [f"catalogues gl-en {QKNORM} seed 1: BLEU by length"]
    (group,) = (group for group in summary.groups if group.pair == "gl-en")
    assert "score.json: says another BLEU than hypotheses" in " ".join(group.notes)
    difference = rows_of(group)[QKNORM].difference
    assert difference is not None and [test.seed for test in difference.tests] == [2]


def test_the_page_is_whole_and_loads_nothing(reported: tuple[Path, str, str]) -> None:
    text = (reported[0] / "out" / "report.html").read_text("utf-8")
    parser = PageText()
    parser.feed(text)
    assert parser.open == []
    assert {"data:,", "#pair-1"} <= set(parser.addresses)
    assert all(address.startswith(("#", "data:,")) for address in parser.addresses)
    assert "@import" not in text
    assert text.count("<svg") >= 2 * 4 + 1  # gl-en has lengths too
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) > 0
    for file in (reported[0] / "out" / "plots").glob("*.svg"):
        assert file.with_suffix(".png").stat().st_size > 1000


def test_better_is_what_both_tests_say(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        run_folder(tmp_path, BASE, seed, 20)
        run_folder(tmp_path, QKNORM, seed, 21)
    (group,) = summary_of(tmp_path).groups
    (row,) = (row for row in group.rows if row.difference)
    assert row.difference is not None
    row.difference.tests.extend(
        SeedTest(1, difference, (0.0, 1.0), bootstrap, randomization, {})
        for difference, bootstrap, randomization in (
            (1.0, 0.04, 0.06),
            (1.0, 0.06, 0.04),
            (1.0, 0.04, 0.04),
            (-1.0, 0.01, 0.01),
        )
    )
    scores = tables.of_group(group)[0]
    assert "1 better, 1 worse of 4" in scores.rows[1]
    assert "both the paired bootstrap and the approximate randomization" in scores.note


STATISTICS = {
    BASE: {"encoder_1_self": (0.4, 0.3), "decoder_1_cross": (0.6, 0.1)},
    QKNORM: {"encoder_1_self": (0.5, 0.1), "decoder_1_cross": (0.5, 0.1)},
}


def test_attention_beside_the_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_run(folder: Path, **options: Any) -> dict[str, dict[str, float]]:
        more = 0.02 if folder.name == "seed2" else 0.0
        return {
            module: {"entropy": entropy, "saturated": saturated + more}
            for module, (entropy, saturated) in STATISTICS[folder.parent.name].items()
        }

    monkeypatch.setattr("qknorm_fairseq.attention_statistics.of_run", of_run)
    for pair in ("gl-en", "sk-en"):
        for model, seed in ((BASE, 1), (QKNORM, 1), (QKNORM, 2)):
            run_folder(tmp_path, model, seed, 20, pair=pair)
    made = make_report(tmp_path / "runs", tmp_path / "out", command="", say=lambda line: None)
    # The mean of two seeds is 0.11: fewer than 0.3, but not than 0.1.
    sentence = (
        f"Attention of {QKNORM} against {BASE}: fewer saturated rows (one weight over 0.99) in 1 "
        "of 2 modules, 11.0% against 20.0% on average; higher entropy in 1 of 2, 0.50 against 0.50"
    )
    over_pairs = sentence.replace(":", " over all pairs:", 1).replace("1 of 2", "2 of 4")
    monkeypatch.setenv("COLUMNS", "500")
    show(made, tmp_path / "out")
    printed = capsys.readouterr().out
    parser = PageText()
    parser.feed((tmp_path / "out" / "report.html").read_text("utf-8"))
    written = (tmp_path / "out" / "report.md").read_text("utf-8")
    for text in (printed, parser.text, written):
        assert text.count(sentence) == 2
        assert text.count(over_pairs) == 1
    row = f"| encoder 1 self | {QKNORM} | 0.50 | 0.40 | 11.0% | 30.0% |"
    assert written.count(row) == 2
    assert written.index(sentence) < written.index(row)
    assert "30.0%" in parser.text and "30.0%" not in printed
    content = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    (over,) = content["attention_compared"]
    assert (over["fewer_saturated"], over["higher_entropy"], len(over["modules"])) == (2, 2, 4)
    (one,) = content["groups"][0]["attention_compared"]
    assert one["modules"]["encoder_1_self"]["saturated"] == pytest.approx(0.11)
    assert one["base_mean"] == pytest.approx({"entropy": 0.5, "saturated": 0.2})


def test_a_folder_that_can_not_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_run(folder: Path, *, cpu: bool, not_kept: Callable[[OSError], None]) -> dict[str, Any]:
        not_kept(PermissionError(errno.EACCES, "Permission denied", str(folder)))
        return {"encoder_1_self": {"entropy": 0.5, "saturated": 0.1}}

    monkeypatch.setattr("qknorm_fairseq.attention_statistics.of_run", of_run)
    prepared_folder(tmp_path)
    for model in (BASE, QKNORM):
        folder = run_folder(tmp_path, model, hypotheses=translations(5))
        (folder / "comparisons.json").mkdir()  # even root can't write a file there
    made = make_report(tmp_path / "runs", tmp_path / "out", command="", say=lambda line: None)
    (group,) = made.summary.groups
    (difference,) = [row.difference for row in group.rows if row.difference]
    assert len(difference.tests) == 1 and group.lengths is not None
    said = "what takes long could not be kept in the folder of"
    anew = "it is computed anew each time"
    assert [note for note in group.notes if "not be kept" in note] == [
        f"{said} {QKNORM} seed 1, {BASE} seed 1: Is a directory; {anew}",
        f"{said} {QKNORM} seed 1, {BASE} seed 1: Permission denied; {anew}",
    ]


def test_the_terminals_tables_fit_into_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_folder(tmp_path)
    for model, wrong in ((BASE, 5), (QKNORM, 4), ("transformer", 5)):
        for seed in (1, 2, 3):
            run_folder(tmp_path, model, seed, hypotheses=translations(wrong))
    run_folder(tmp_path, f"{QKNORM}+no_word_dropout", 4, None)
    for model in (BASE, QKNORM):
        run_folder(tmp_path, model, 1, 20, pair="sk-en")
    out = tmp_path / "out"
    made = make_report(
        tmp_path / "runs", out, command="", attention=False, base=BASE, say=lambda line: None
    )
    monkeypatch.setenv("COLUMNS", "80")
    show(made, Path("out"))
    printed = capsys.readouterr().out
    known = [signature for _, signature in signatures(made.summary)]
    lines = [line.rstrip() for line in printed.splitlines() if not line.endswith(tuple(known))]
    assert len(lines) > 40 and max(map(len, lines)) <= 80
    # What stands in a cell is there whole, but for line breaks between its words or names' parts.
    groups = [table for section in made.sections for table in tables.of_group(section.group)]
    rest = tables.of_averages(made.summary.averages), tables.of_unfinished(made.summary.unfinished)
    cells = " ".join(cell for table in (*groups, *rest) for row in table.rows for cell in row)
    parts = set(re.split(r"[\s_/+]+", cells))
    assert {"scalenorm", "dropout", "3,000,000"} <= parts
    assert parts <= set(re.split(r"[\s_/+]+", printed))
    for signature in known:
        assert signature in printed
    assert "The commands that reproduce the rows: below each pair's tables in out/report.md" in (
        " ".join(printed.split())
    )


def test_a_bar_in_a_name_is_no_column(tmp_path: Path) -> None:
    run_folder(tmp_path, "a|b")
    report = make_report(
        tmp_path / "runs", tmp_path / "out", command="", attention=False, say=lambda line: None
    )
    rows = [line for line in markdown(report).splitlines() if line.startswith("| a")]
    assert rows and all(row.startswith(r"| a\|b | ") for row in rows)


def test_names_are_no_markup(tmp_path: Path) -> None:
    """A folder may be called anything."""
    model = "<img src=x onerror=alert(1)>[red]"
    run_folder(tmp_path, model)
    report = make_report(
        tmp_path / "runs", tmp_path / "out", command="<b>", attention=False, say=lambda line: None
    )
    assert "<img" not in page(report)
    assert model in markdown(report)


def test_a_resumed_training_counts_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, bleu=None, updates=(100, 200, 300))
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"kind": "valid", "num_up\n')
        file.write('{"kind": "valid", "num_updates": 200.0, "loss": 0.5}\n')
    (result,), _ = find(tmp_path / "runs")
    losses = [(r["num_updates"], r["loss"]) for r in result.history if r["kind"] == "valid"]
    assert losses == [(100, 7.0), (200, 0.5)]


def test_bad_input_is_one_line(run: Run, tmp_path: Path, fault: Fault) -> None:
    with pytest.raises(QKNormError, match="runs: no such folder") as refusal:
        find(tmp_path / "runs")
    fault("report", "no folder of runs", str(refusal.value))
    (tmp_path / "runs").mkdir()
    with pytest.raises(QKNormError, match="runs: no runs in it") as refusal:
        find(tmp_path / "runs")
    fault("report", "a folder without runs", str(refusal.value))
    folder = run_folder(tmp_path)
    good = (folder / "score.json").read_text()
    for content, says in (
        ("[]", "score.json: not a JSON object"),
        (good.replace("params", "x"), "score.json: has no number 'params'"),
    ):
        (folder / "score.json").write_text(content)
        with pytest.raises(QKNormError, match=says) as refusal:
            find(tmp_path / "runs")
        fault("report", f"score.json is {content[:12]}", str(refusal.value))
    (folder / "score.json").write_text(good)
    (folder / "config.yaml").write_text("model: [")
    with pytest.raises(QKNormError, match=r"config\.yaml: not YAML: ") as refusal:
        summary_of(tmp_path)
    fault("report", "config.yaml is no YAML", str(refusal.value))
    (folder / "score.json").write_text(good[:-9])
    done = run("qknorm", "report", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"qknorm: {folder.relative_to(tmp_path) / 'score.json'}: not JSON"
    )
    assert done.stderr.count("\n") == 1
    fault("report", "score.json is cut off", done.stderr)
