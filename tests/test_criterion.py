"""Label smoothing over the allowed tokens, against plain loops.

    loss = sum over target tokens of (1 - eps) * nll + eps * mean over allowed tokens of -log p

with padding left out. What isn't allowed has a logit of -inf.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from torch import Tensor, nn

from qknorm_fairseq.criterion import (
    LabelSmoothedCrossEntropyAllowed,
    LabelSmoothedCrossEntropyFused,
)
from qknorm_fairseq.models import transformer_qknorm
from qknorm_fairseq.modules.smoothed_loss import smoothed_loss

EPS = 0.1
V = 9
PAD = 1
ALLOWED = [2, 3, 4, 6, 8]
TARGET = torch.tensor([[4, 6, 2, PAD], [8, 3, 4, 2]])  # all allowed; one padding


class Logits(nn.Module):
    """A model whose logits (B x T x V) are its parameters."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, **net_input: Any) -> tuple[Tensor, None]:
        return self.logits, None

    def get_normalized_probs(self, net_output: Any, log_probs: bool) -> Tensor:
        return net_output[0].log_softmax(-1)

    def get_targets(self, sample: Any, net_output: Any) -> Tensor:
        return sample["target"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.build(tiny.write_data(tmp_path_factory.mktemp("data"))).task


def random_logits(allowed: list[int] | None = None) -> Tensor:
    """B x T x V in float64; -inf outside `allowed`."""
    logits = torch.randn(*TARGET.shape, V, generator=torch.Generator().manual_seed(3)).double()
    if allowed is not None:
        forbidden = [token for token in range(V) if token not in allowed]
        logits[..., forbidden] = -math.inf
    return logits


def sample(target: Tensor = TARGET) -> dict[str, Any]:
    return {"net_input": {}, "target": target, "ntokens": int(target.ne(PAD).sum())}


def loops(logits: Tensor, target: Tensor, allowed: list[int], eps: float) -> tuple[float, float]:
    """(loss, nll), one token at a time."""
    loss = total_nll = 0.0
    for row, tokens in zip(logits.tolist(), target.tolist(), strict=True):
        for numbers, token in zip(row, tokens, strict=True):
            if token == PAD:
                continue
            log_sum = math.log(sum(math.exp(numbers[other]) for other in allowed))
            nll = log_sum - numbers[token]
            spread = sum(log_sum - numbers[other] for other in allowed) / len(allowed)
            loss += (1 - eps) * nll + eps * spread
            total_nll += nll
    return loss, total_nll


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["all allowed", "masked"])
def test_loss_is_that_of_plain_loops(task: Any, allowed: list[int] | None, eps: float) -> None:
    criterion = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=eps)
    logits = random_logits(allowed)
    loss, sample_size, logged = criterion(Logits(logits), sample())
    expected, nll = loops(logits, TARGET, allowed or list(range(V)), eps)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert logged["loss"].item() == pytest.approx(expected, rel=1e-12)
    assert logged["nll_loss"].item() == pytest.approx(nll, rel=1e-12)
    assert sample_size == 7  # the gradient is divided by the number of target tokens


def test_loss_of_each_token_without_reduction(task: Any) -> None:
    criterion = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=EPS)
    model = Logits(random_logits(ALLOWED))
    each, nll = criterion.compute_loss(model, model(), sample(), reduce=False)
    assert each.shape == nll.shape == (TARGET.numel(),)
    assert each.view_as(TARGET)[0, 3] == 0  # padding
    for position, token in enumerate(TARGET.flatten().tolist()):
        one = model.logits.detach().view(-1, 1, 1, V)[position]
        expected, expected_nll = loops(one, torch.tensor([[token]]), ALLOWED, EPS)
        assert each[position].item() == pytest.approx(expected, rel=1e-12)
        assert nll[position].item() == pytest.approx(expected_nll, rel=1e-12)


def test_gradient_is_the_formulas(task: Any) -> None:
    """d loss / d logit = p - (1 - eps) [target] - eps / allowed, for allowed ones; else 0."""
    criterion = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=EPS)
    model = Logits(random_logits(ALLOWED))
    criterion(model, sample())[0].backward()
    p = model.logits.detach().softmax(-1)
    for b in range(TARGET.shape[0]):
        for t in range(TARGET.shape[1]):
            for v in range(V):
                target = int(TARGET[b, t])
                expected = 0.0
                if target != PAD and v in ALLOWED:
                    expected = p[b, t, v].item() - (1 - EPS) * (v == target) - EPS / len(ALLOWED)
                assert model.logits.grad[b, t, v].item() == pytest.approx(expected, abs=1e-12)


def test_without_a_mask_it_is_fairseqs_with_another_eps(task: Any) -> None:
    """fairseq spreads eps over the V - 1 other tokens: this criterion with eps * V / (V - 1).

    In its words: (1 - eps - i) * nll + i * sum over all, with i = eps / (V - 1).
    """
    model = Logits(random_logits())
    theirs = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=EPS)
    ours = LabelSmoothedCrossEntropyAllowed(
        task, sentence_avg=False, label_smoothing=EPS * V / (V - 1)
    )
    expected = theirs(model, sample())[0].item()
    assert ours(model, sample())[0].item() == pytest.approx(expected, rel=1e-12)
    same_eps = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=EPS)
    assert same_eps(model, sample())[0].item() != pytest.approx(expected, rel=1e-4)


def test_mask_leaves_loss_and_gradients_finite_where_fairseqs_is_not(task: Any) -> None:
    ours = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=EPS)
    theirs = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=EPS)
    for dtype in (torch.float32, torch.float64):
        model = Logits(random_logits(ALLOWED).to(dtype))
        assert theirs(model, sample())[0].isinf()
        loss = ours(model, sample())[0]
        loss.backward()
        assert loss.isfinite()
        assert model.logits.grad.isfinite().all()


def test_a_dev_target_that_is_not_allowed_adds_no_nll(task: Any) -> None:
    """Token 5 is none that the training text has; it may stand in the dev text all the same."""
    criterion = LabelSmoothedCrossEntropyAllowed(task, sentence_avg=False, label_smoothing=EPS)
    logits = random_logits(ALLOWED)
    foreign = TARGET.clone()
    foreign[0, 0] = 5
    _, without = loops(logits[:, 1:], TARGET[:, 1:], ALLOWED, EPS)
    _, second = loops(logits[1:, :1], TARGET[1:, :1], ALLOWED, EPS)
    loss, _, logged = criterion(Logits(logits), sample(foreign))
    assert logged["nll_loss"].item() == pytest.approx(without + second, rel=1e-12)
    assert loss.isfinite()


def test_whole_model_with_a_mask_has_finite_loss_and_gradients_on_any_text(tmp_path: Path) -> None:
    """On the dev text too, whose "n" no training target has."""
    model, criterion, task = tiny.build(tiny.write_data(tmp_path))
    assert criterion.__class__ is LabelSmoothedCrossEntropyAllowed
    for split in ("train", "valid"):
        model.zero_grad()
        loss, *_ = criterion(model, tiny.batch(task, split))
        loss.backward()
        assert loss.isfinite()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_loss_goes_down_in_training(tmp_path: Path) -> None:
    model, criterion, task = tiny.build(tiny.write_data(tmp_path), "--word-dropout", 0)
    sample = tiny.batch(task)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss, size, _ = criterion(model, sample)
        (loss / size).backward()
        optimizer.step()
        losses.append(loss.item() / size)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("bias", ["--output-bias", "--no-output-bias"])
@pytest.mark.parametrize("fixnorm", ["--fixnorm", "--no-fixnorm"])
def test_the_fused_loss_is_fairseqs(tmp_path: Path, fixnorm: str, bias: str) -> None:
    """And what is logged; with its gradients, of a whole model on a padded batch."""
    data = tiny.write_data(tmp_path)
    built = tiny.build(data, "--word-dropout", 0, "--no-logit-mask", fixnorm, bias)
    tiny.randomize(built.model)
    model, sample = built.model.train(), tiny.batch(built.task)
    assert (sample["target"] == PAD).any()
    results = []
    for kind in (LabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyFused):
        criterion = kind(built.task, sentence_avg=False, label_smoothing=EPS)
        model.zero_grad()
        loss, size, logged = criterion(model, sample)
        (loss * 3).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((loss.item(), size, {k: float(v) for k, v in logged.items()}, gradients))
    (*expected, expected_gradients), (*found, gradients) = results
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == expected[1]
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
    for name, gradient in expected_gradients.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("criterion", ["allowed", "fused"])
def test_in_training_the_loss_is_fused_and_else_the_logits_are_asked_for(
    tmp_path: Path, criterion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = []

    def watch(*arguments: Any) -> tuple[Tensor, Tensor]:
        fused.append(True)
        return smoothed_loss(*arguments)

    monkeypatch.setattr(transformer_qknorm, "smoothed_loss", watch)
    name = f"label_smoothed_cross_entropy_{criterion}"
    data = tiny.write_data(tmp_path)
    for options, training, expected in (
        ((), True, True),
        ((), False, False),
        (("--no-fast",), True, False),
        (("--report-accuracy",), True, False),
    ):
        fused.clear()
        built = tiny.build(data, "--no-logit-mask", "--criterion", name, *options)
        built.model.train(training)
        loss, _, logged = built.criterion(built.model, tiny.batch(built.task))
        assert loss.isfinite()
        assert bool(fused) == expected, options
        assert ("n_correct" in logged) == ("--report-accuracy" in options)
    built = tiny.build(data, "--criterion", name, arch="transformer")  # it knows of no such thing
    built.criterion(built.model.train(), tiny.batch(built.task))[0].backward()
