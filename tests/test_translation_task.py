"""The search of the paper: GNMT's length penalty and at most 50 subwords more than the source.

    score(Y | X) = log P(Y | X) / ((5 + |Y|) / 6)^0.6,  |Y| counting the end of the sentence

Scores are recomputed by a full forward pass of each hypothesis, without search or cache.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import tiny
import torch
from conftest import Run, train
from fairseq.sequence_generator import SequenceGenerator

from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.tasks.translation_qknorm import GNMTSequenceGenerator

EOS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return tiny.write_data(folder, tiny.larger_text(train=150, valid=12, test=12))


@pytest.fixture(scope="module")
def weights(data: Path) -> dict[str, Any]:
    """Of a model trained so little that its hypotheses end soon or late."""
    model, criterion, task = tiny.build(data, "--word-dropout", 0)
    sample = tiny.batch(task, numbers=list(range(60)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        loss, size, _ = criterion(model, sample)
        (loss / size).backward()
        optimizer.step()
    with torch.no_grad():
        model.decoder.output_projection.bias[EOS] += 1
    state: dict[str, Any] = model.state_dict()
    return state


Build = Callable[..., tiny.Built]


@pytest.fixture(scope="module")
def build(data: Path, weights: dict[str, Any]) -> Build:
    """`build(*arguments)`: that model for the project's task with these arguments."""

    def build_with(*arguments: object) -> tiny.Built:
        built = tiny.build(data, "--task", "translation_qknorm", *arguments)
        built.model.load_state_dict(weights)
        built.model.eval()
        return built

    return build_with


def search(built: tiny.Built, sample: Any, **settings: object) -> list[list[dict[str, Any]]]:
    """The hypotheses of each sentence in a batch, best first, found with a beam of 4."""
    model, _, task = built
    generator = task.build_generator([model], Namespace(**{"beam": 4, **settings}))
    found: list[list[dict[str, Any]]] = task.inference_step(generator, [model], sample)
    return found


@torch.no_grad()
def log_probability(built: tiny.Built, sample: Any, row: int, tokens: torch.Tensor) -> float:
    """log P(tokens | source): one forward pass over the sentence alone, without padding."""
    source = sample["net_input"]["src_tokens"][row]
    source = source[source != built.task.source_dictionary.pad()].unsqueeze(0)
    previous = torch.cat([torch.tensor([EOS]), tokens[:-1]]).unsqueeze(0)
    logits = built.model(source, torch.tensor([source.shape[1]]), previous)[0]
    return float(logits[0].log_softmax(-1).gather(1, tokens.unsqueeze(1)).sum())


# ---------------------------------------------------------------------------------------------
# Length penalty
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [None, 0.0, 0.6, 1.0, 2.5])
def test_scores_are_log_probabilities_over_gnmts_penalty(build: Build, alpha: float | None) -> None:
    """None: the task's own value, 0.6. Ending with eos, which counts."""
    built = build(*([] if alpha is None else ["--gnmt-lenpen", alpha]))
    sample = tiny.batch(built.task, "valid")
    lengths = set()
    for row, hypotheses in enumerate(search(built, sample)):
        assert len(hypotheses) == 4
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            assert tokens[-1] == EOS and not tokens[:-1].eq(EOS).any()
            penalty = ((5 + len(tokens)) / 6) ** (0.6 if alpha is None else alpha)
            expected = log_probability(built, sample, row, tokens) / penalty
            assert float(hypothesis["score"]) == pytest.approx(expected, rel=1e-4)
            lengths.add(len(tokens))
        scores = [float(hypothesis["score"]) for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
    assert len(lengths) > 5 and min(lengths) < 6  # a penalty that hardly varies tests nothing


def test_penalty_prefers_longer_hypotheses(build: Build) -> None:
    def mean_length(alpha: float) -> float:
        built = build("--gnmt-lenpen", alpha)
        best = [found[0]["tokens"] for found in search(built, tiny.batch(built.task, "valid"))]
        return sum(map(len, best)) / len(best)

    lengths = [mean_length(alpha) for alpha in (0.0, 0.6, 2.5)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_negative_alpha_gives_fairseqs_own_penalty(data: Path, build: Build) -> None:
    """log P / |Y|^lenpen, by the same hypotheses as fairseq's own task finds."""
    built = build("--gnmt-lenpen", -1, "--extra-length", -1)
    sample = tiny.batch(built.task, "valid")
    generator = built.task.build_generator([built.model], Namespace(beam=4, lenpen=0.7))
    assert type(generator) is SequenceGenerator
    plain = tiny.build(data, "--task", "translation").task
    own = plain.build_generator([built.model], Namespace(beam=4, lenpen=0.7))
    expected = plain.inference_step(own, [built.model], sample)
    for row, hypotheses in enumerate(built.task.inference_step(generator, [built.model], sample)):
        for hypothesis, same in zip(hypotheses, expected[row], strict=True):
            assert hypothesis["tokens"].tolist() == same["tokens"].tolist()
            assert float(hypothesis["score"]) == float(same["score"])
            tokens = hypothesis["tokens"]
            score = log_probability(built, sample, row, tokens) / len(tokens) ** 0.7
            assert float(hypothesis["score"]) == pytest.approx(score, rel=1e-4)


def test_unnormalized_scores_stay_plain_log_probabilities(build: Build) -> None:
    """fairseq's --unnormalized wins over the penalty."""
    built = build()
    sample = tiny.batch(built.task, "valid")
    for row, hypotheses in enumerate(search(built, sample, unnormalized=True)):
        expected = log_probability(built, sample, row, hypotheses[0]["tokens"])
        assert float(hypotheses[0]["score"]) == pytest.approx(expected, rel=1e-4)


def test_never_predicts_what_the_training_text_has_not(build: Build) -> None:
    """Its target words are h ... n; with a bias for all others, they still are all it says."""
    built = build()
    with torch.no_grad():
        built.model.decoder.output_projection.bias[4:11] += 10
    sample = tiny.batch(built.task, "valid")
    words = {built.task.target_dictionary.index(word) for word in "hijklmn"} | {EOS, 3}
    said = {t for found in search(built, sample) for h in found for t in h["tokens"].tolist()}
    assert said <= words
    built.model.decoder.output_projection.allowed.fill_(True)
    said = {t for found in search(built, sample) for h in found for t in h["tokens"].tolist()}
    assert not said <= words


# ---------------------------------------------------------------------------------------------
# Length limit
# ---------------------------------------------------------------------------------------------


def endless(build: Build, *arguments: object) -> tiny.Built:
    """A model that never ends a sentence by itself."""
    built = build(*arguments)
    with torch.no_grad():
        built.model.decoder.output_projection.bias[EOS] = -1e4
    return built


def test_hypothesis_has_at_most_fifty_subwords_more_than_its_source(build: Build) -> None:
    """As fairseq counts, and the official code: the source with its end, the hypothesis without.

    "a b c" and its end are 4; so 54 subwords, then the end.
    """
    built = endless(build)
    for number in range(4):
        sample = tiny.batch(built.task, "valid", numbers=[number])
        source_length = len(tiny.larger_text(train=150, valid=12)["valid"][number][0].split()) + 1
        for hypothesis in search(built, sample)[0]:
            assert hypothesis["tokens"].tolist().index(EOS) == source_length + 50
            assert len(hypothesis["tokens"]) == source_length + 50 + 1


def test_longest_source_of_a_batch_sets_the_limit_for_all_of_it(build: Build) -> None:
    """fairseq's search has one limit for a batch. fairseq batches sentences of similar length."""
    built = endless(build)
    sample = tiny.batch(built.task, "valid")
    longest = sample["net_input"]["src_tokens"].shape[1]
    assert sample["net_input"]["src_lengths"].min() < longest
    for hypotheses in search(built, sample):
        assert {len(hypothesis["tokens"]) for hypothesis in hypotheses} == {longest + 51}


def test_extra_length_is_an_option_and_negative_gives_fairseqs_own(build: Build) -> None:
    built = endless(build, "--extra-length", 3)
    sample = tiny.batch(built.task, "valid", numbers=[0])
    source_length = sample["net_input"]["src_tokens"].shape[1]
    assert len(search(built, sample)[0][0]["tokens"]) == source_length + 3 + 1

    built = endless(build, "--extra-length", -1)
    found = search(built, sample, max_len_a=2, max_len_b=5)
    assert len(found[0][0]["tokens"]) == 2 * source_length + 5 + 1


# ---------------------------------------------------------------------------------------------
# BLEU in training
# ---------------------------------------------------------------------------------------------


def validation_bleu(built: tiny.Built) -> float:
    """What fairseq-train's validation of the one batch of the dev set adds up to."""
    model, criterion, task = built
    logged = task.valid_step(tiny.batch(task, "valid"), model, criterion)[2]
    bleu = sacrebleu.BLEU.compute_bleu(
        correct=[logged[f"_bleu_counts_{n}"] for n in range(4)],
        total=[logged[f"_bleu_totals_{n}"] for n in range(4)],
        sys_len=logged["_bleu_sys_len"],
        ref_len=logged["_bleu_ref_len"],
        smooth_method="exp",
    )
    return float(bleu.score)


def test_validation_bleu_is_that_of_the_same_search(build: Build) -> None:
    """Tokenized BLEU of beam 4 and the penalty, from text made here; it depends on the penalty."""
    results = {}
    for alpha in (0.0, 0.6, 2.5):
        built = build(
            *("--gnmt-lenpen", alpha, "--eval-bleu", "--eval-bleu-args", '{"beam": 4}'),
            "--eval-tokenized-bleu",
        )
        assert isinstance(built.task.sequence_generator, GNMTSequenceGenerator)
        sample = tiny.batch(built.task, "valid")
        dictionary = built.task.target_dictionary
        hypotheses = [
            " ".join(dictionary[token] for token in found[0]["tokens"].tolist()[:-1])
            for found in search(built, sample)
        ]
        text = tiny.larger_text(train=150, valid=12)["valid"]
        references = [text[number][1] for number in sample["id"].tolist()]
        expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none").score
        results[alpha] = validation_bleu(built)
        assert results[alpha] == pytest.approx(expected, rel=1e-6)
    assert results[0.0] != results[2.5] and max(results.values()) > 1


# ---------------------------------------------------------------------------------------------
# By fairseq's commands
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(data: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint_best.pt of a short fairseq-train with fairseq's own task and validation."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = [
        part
        for side in ("encoder", "decoder")
        for name, size in {"layers": 1, "embed-dim": 32, "ffn-embed-dim": 64}.items()
        for part in (f"--{side}-{name}", size)
    ]
    done = run(
        "fairseq-train",
        data,
        *("--user-dir", tiny.USER_DIR, "--task", "translation_qknorm"),
        *("--logit-mask", "--arch", "transformer_qknorm_tiny", "--qknorm-length", 12, *sizes),
        *("--criterion", "label_smoothed_cross_entropy_allowed", "--label-smoothing", 0.1),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 4}', "--eval-tokenized-bleu"),
        *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
        *("--optimizer", "adam", "--lr", 0.01, "--max-tokens", 600, "--max-epoch", 3),
        *("--save-dir", folder, "--no-epoch-checkpoints", "--seed", 1, "--cpu"),
    )
    assert done.returncode == 0, done.stderr
    return folder / "checkpoint_best.pt"


def test_fairseq_generate_scores_by_the_task(data: Path, trained: Path, run: Run) -> None:
    """H lines: base-2 scores; P lines: of each subword.

    All 12 sentences are there, though 12 is neither a multiple of 5 nor of 8: fairseq-fixed itself
    leaves out a last batch that is no multiple of 8.
    """
    done = run(
        "fairseq-generate",
        data,
        *("--user-dir", tiny.USER_DIR, "--task", "translation_qknorm", "--path", trained),
        *("--beam", 4, "--lenpen", 3.0, "--batch-size", 5, "--cpu"),  # --lenpen has no effect
    )
    assert done.returncode == 0, done.stderr
    scores = dict(re.findall(r"^H-(\d+)\t(\S+)\t", done.stdout, flags=re.MULTILINE))
    subwords = dict(re.findall(r"^P-(\d+)\t(.+)$", done.stdout, flags=re.MULTILINE))
    assert len(scores) == len(subwords) == 12
    for number, score in scores.items():
        each = [float(part) for part in subwords[number].split()]
        assert float(score) == pytest.approx(sum(each) / ((5 + len(each)) / 6) ** 0.6, abs=1e-3)
    assert re.search(r"BLEU4 = \d", done.stdout)


def test_fairseq_validate_reads_a_checkpoint_of_the_task(
    data: Path, trained: Path, run: Run
) -> None:
    """Its BLEU is that of the training's own validation of this checkpoint."""
    done = run(
        "fairseq-validate",
        data,
        *("--user-dir", tiny.USER_DIR, "--task", "translation_qknorm", "--path", trained),
        *("--valid-subset", "valid", "--max-tokens", 600, "--cpu"),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 4}', "--eval-tokenized-bleu"),
    )
    assert done.returncode == 0, done.stderr
    bleu = re.search(r"\| bleu ([\d.]+)", done.stdout + done.stderr)
    assert bleu
    saved = torch.load(trained, weights_only=True)
    assert float(bleu[1]) == pytest.approx(saved["extra_state"]["val_loss"], abs=0.011)
    assert not math.isinf(float(bleu[1]))
    allowed = saved["model"]["decoder.output_projection.allowed"]
    assert int(allowed.sum()) == 7 + 2  # h ... n, <unk> and </s>: the mask is in the checkpoint


def test_dev_bleu_while_training_is_that_of_the_checkpoint(
    prepared: Path, run: Run, tmp_path: Path
) -> None:
    """The third validation of a training gives what translating with its checkpoint gives: nothing
    of the earlier ones is left over. Dev BLEU picks the checkpoint and lowers the rate."""
    train(
        run,
        prepared,
        tmp_path,
        *("--arch", "transformer_qknorm_tiny", "--optimizer", "adam_fused"),
        *("--task", "translation_qknorm", "--eval-bleu", "--eval-bleu-args", '{"beam": 4}'),
        *("--eval-bleu-remove-bpe", "sentencepiece", "--best-checkpoint-metric", "bleu"),
        "--maximize-best-checkpoint-metric",
        updates=150,
    )
    checkpoint = tmp_path / "checkpoint_last.pt"
    bleu = load(checkpoint)["extra_state"]["val_loss"]
    done = run(
        "qknorm",
        *("translate", "--cpu", "--data", prepared, "--checkpoint", checkpoint),
        prepared / "valid.xx",
    )
    hypotheses = done.stdout.splitlines()
    references = (prepared / "valid.yy").read_text("utf-8").splitlines()
    assert bleu > 20
    assert bleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=0.01)
