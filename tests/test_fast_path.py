"""The fast path of training against the plain one: the same loss, gradients and statistics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq import utils
from tiny import Text, batch, build, larger_text, randomize, write_data
from torch import Tensor

from qknorm_fairseq.modules.dropout import LEVELS, dropout, dropout_add, keep_mask, relu_dropout
from qknorm_fairseq.modules.packing import Layout

TEXTS: Text = larger_text(train=12, valid=2)  # sentences of 2 to 9 words: much padding


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), TEXTS)


def loss_and_gradients(data: Path, *options: object, arch: str) -> tuple[float, dict[str, Tensor]]:
    """Of all training sentences in one batch, with random parameters and no dropout."""
    built = build(data, "--word-dropout", 0, *options, arch=arch)
    randomize(built.model)
    built.model.train()
    loss, _, _ = built.criterion(built.model, batch(built.task))
    loss.backward()
    gradients = {n: p.grad for n, p in built.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


VARIANTS = [
    ("transformer_qknorm", ()),
    ("transformer_qknorm", ("--g-per", "head", "--attention-norm-scale")),
    ("transformer_qknorm", ("--g-per", "fixed", "--attention-norm-groups", 2)),
    ("transformer_qknorm", ("--attention-norm", "rms")),
    ("transformer_qknorm", ("--attention-norm", "layer", "--residual-norm", "scale")),
    ("transformer_qknorm", ("--no-encoder-normalize-before", "--no-decoder-normalize-before")),
    ("transformer_qknorm", ("--no-fixnorm", "--no-output-bias", "--layernorm-embedding")),
    ("transformer_qknorm", ("--activation-fn", "gelu")),
    ("transformer_qknorm", ("--left-pad-source",)),
    ("transformer_scalenorm", ()),
]


@pytest.mark.parametrize(("arch", "options"), VARIANTS)
def test_loss_and_gradients_are_those_of_the_plain_path(
    data: Path, arch: str, options: tuple[object, ...]
) -> None:
    fast, fast_gradients = loss_and_gradients(data, *options, arch=arch)
    plain, plain_gradients = loss_and_gradients(data, *options, "--no-fast", arch=arch)
    assert fast == pytest.approx(plain, rel=1e-5)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(
            fast_gradients[name], gradient, rtol=1e-5, atol=1e-5 * size + 1e-7
        )


def test_padding_before_the_target_changes_nothing(data: Path) -> None:
    """fairseq's own Transformer gives NaN there: its padding attends to nothing at all."""
    right, right_gradients = loss_and_gradients(data, arch="transformer_qknorm")
    left, left_gradients = loss_and_gradients(data, "--left-pad-target", arch="transformer_qknorm")
    assert left == pytest.approx(right, rel=1e-5)
    for name, gradient in right_gradients.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(left_gradients[name], gradient, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("arch", ["transformer_qknorm", "transformer_scalenorm"])
def test_bfloat16_is_within_its_rounding(data: Path, arch: str) -> None:
    """bfloat16 has 8 bits: the loss within 1%, each large gradient within 10% of its length."""
    low, low_gradients = loss_and_gradients(data, "--bf16-autocast", arch=arch)
    full, full_gradients = loss_and_gradients(data, "--no-fast", arch=arch)
    assert low == pytest.approx(full, rel=0.01)
    assert low != full
    longest = max(gradient.norm() for gradient in full_gradients.values())
    for name, gradient in full_gradients.items():
        error = (low_gradients[name] - gradient).norm()
        assert error < 0.1 * gradient.norm() + 0.01 * longest, name


def test_a_short_training_goes_the_same_way(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 updates without dropout, in double precision, where rounding has no time to grow."""
    monkeypatch.setattr(  # fairseq's is in single precision
        utils, "log_softmax", lambda x, dim, onnx_trace=False: F.log_softmax(x, dim)
    )
    ways = []
    for switch in ((), ("--no-fast",)):
        built = build(data, "--word-dropout", 0, *switch)
        optimizer = torch.optim.Adam(built.model.double().parameters(), lr=0.01)
        sample = batch(built.task)
        built.model.train()
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss, _, _ = built.criterion(built.model, sample)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ways.append(losses)
    assert ways[0][-1] < 0.7 * ways[0][0]
    assert ways[0] == pytest.approx(ways[1], rel=1e-6)


def test_without_the_fast_path_the_batch_stays_padded(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way: what the option switches is really another path."""
    shapes: list[tuple[int, ...]] = []
    linear = F.linear

    def spy(x: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(x.shape[:-1]))
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", spy)
    sentences = len(TEXTS["train"])
    sides = [sum(len(pair[side].split()) + 1 for pair in TEXTS["train"]) for side in (0, 1)]
    longest = max(len(pair[0].split()) + 1 for pair in TEXTS["train"])
    for switch, sizes in (((), set(sides)), (("--no-fast",), {sentences * longest})):
        shapes.clear()
        loss_and_gradients(data, *switch, arch="transformer_qknorm")
        assert {math.prod(shape) for shape in shapes} == sizes


def test_a_loss_that_repeats_repeats(data: Path) -> None:
    """Dropout follows torch's seed."""
    losses = []
    for seed in (1, 1, 2):
        options = ("--dropout", 0.3, "--attention-dropout", 0.3, "--activation-dropout", 0.3)
        built = build(data, *options)
        built.model.train()
        sample = batch(built.task)
        torch.manual_seed(seed)
        losses.append(built.criterion(built.model, sample)[0].item())
    assert losses[0] == losses[1] != losses[2]


def test_the_average_over_masks_is_the_loss_without(data: Path) -> None:
    """Of the linear part: the expected output of a block with dropout is that without."""
    x, residual = torch.randn(50, 40), torch.randn(50, 40)
    torch.manual_seed(1)
    mean = torch.stack([dropout_add(x, residual, 0.3) for _ in range(4000)]).mean(0)
    deviation = x.abs() * math.sqrt(0.3 / 0.7 / 4000)
    assert ((mean - residual - x).abs() < 5 * deviation + 1e-5).all()


# ---------------------------------------------------------------------------------------------
# Dropout masks
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.3, 0.4, 0.5, 0.9999, 1e-6])
def test_masks_keep_as_many_as_they_say(p: float) -> None:
    torch.manual_seed(3)
    size = 4_000_000
    mask, scale = keep_mask(torch.empty(size), p)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    keep = 1 / scale
    assert abs(keep - (1 - p)) <= 0.5 / LEVELS + 1e-12 or keep == 1 / LEVELS
    deviation = math.sqrt(keep * (1 - keep) / size)
    assert abs(mask.double().mean().item() - keep) <= 5 * deviation


def test_elements_of_one_draw_are_independent() -> None:
    """Four elements share a 64-bit draw: each keeps as often, and no two go together."""
    torch.manual_seed(4)
    mask, scale = keep_mask(torch.empty(1_000_000, 4), 0.3)
    keep = 1 / scale
    centred = mask.double() - keep
    covariance = centred.T @ centred / len(mask)
    variance = keep * (1 - keep)
    deviation = variance / math.sqrt(len(mask))
    torch.testing.assert_close(
        covariance, variance * torch.eye(4, dtype=torch.double), rtol=0, atol=6 * deviation
    )
    following = (centred[1:].flatten() * centred[:-1].flatten()).mean().item()
    assert abs(following) < 6 * variance / math.sqrt(mask.numel())


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1, 2), (0, 4)])
def test_any_number_of_elements(shape: tuple[int, ...]) -> None:
    assert dropout(torch.ones(shape), 0.5).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_is_a_mask_and_a_scale_both_ways(dtype: torch.dtype) -> None:
    x = torch.randn(40, 30, dtype=dtype).requires_grad_()
    residual = torch.randn(40, 30, dtype=dtype).requires_grad_()
    torch.manual_seed(5)
    mask, scale = keep_mask(x, 0.3)
    cases = [
        (lambda: dropout(x, 0.3), lambda: x * mask * scale),
        (lambda: dropout_add(x, residual, 0.3), lambda: residual + x * mask * scale),
        (lambda: relu_dropout(x, 0.3), lambda: torch.relu(x) * mask * scale),
    ]
    for ours, formula in cases:
        results = []
        for function in (ours, formula):
            x.grad = residual.grad = None
            torch.manual_seed(5)
            y = function()
            (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
            results.append((y.detach(), x.grad, residual.grad))
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **tolerance)


def test_a_half_precision_branch_keeps_the_stream_in_full() -> None:
    residual = torch.randn(20, 8).requires_grad_()
    x = torch.randn(20, 8).bfloat16().requires_grad_()
    y = dropout_add(x, residual, 0.3)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert residual.grad is not None and residual.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------
# Batches without padding
# ---------------------------------------------------------------------------------------------

PADDING = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_tokens_are_the_real_ones_in_order(multiple: int) -> None:
    layout = Layout(PADDING, multiple)
    x = torch.randn(4, 4, 6)
    packed = layout.pack(x)
    assert len(packed) == -(-11 // multiple) * multiple
    torch.testing.assert_close(packed[:11], x[~PADDING])
    expected = x.masked_fill(PADDING[:, :, None], 0)
    torch.testing.assert_close(layout.unpack(packed), expected)


@pytest.mark.parametrize("multiple", [1, 8])
def test_heads_and_back_with_gradients(multiple: int) -> None:
    """N x H x d to B x H x T x d and back is the identity; so is the gradient, and the rows that
    only fill up get none."""
    layout = Layout(PADDING, multiple)
    tokens = len(layout.real)
    x = torch.randn(tokens, 2, 3, requires_grad=True)
    heads = layout.to_heads(x)
    assert heads.shape == (4, 2, 4, 3)
    for b, t in (~PADDING).nonzero().tolist():
        position = (~PADDING).flatten()[: b * 4 + t].sum()
        torch.testing.assert_close(heads[b, :, t], x[position])
    back = layout.from_heads(heads)
    torch.testing.assert_close(back[:11], x[:11])
    weights = torch.randn(11, 2, 3)
    (back[:11] * weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:11], weights)
    assert (x.grad[11:] == 0).all()


def test_both_kernels_of_the_dot_product_agree(data: Path) -> None:
    """The one for GPUs runs on a CPU too."""
    attention = build(data).model.encoder.layers[0].self_attn.eval()
    q, k, v = (torch.randn(3, 2, 5, 4) for _ in range(3))
    mask = torch.zeros(3, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = True
    for allowed in (None, mask):
        results = [attention._dot_product(q, k, v, allowed, fused=way) for way in (True, False)]
        torch.testing.assert_close(*results)
