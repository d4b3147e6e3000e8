"""Output projection and label-smoothed cross-entropy in one, with the gradient at once.

With logits z = W x + b and p = softmax(z) over the allowed tokens A, the loss of a target y is

    n (-log p_y) + s sum over A of (-log p_v)
    d loss / d z_v = (n + s |A|) p_v - n [v = y] - s

so that one array of N x V is read and written a few times; torch's own functions make several of
the padded batch, there and back (`qknorm bench train` shows what all of it brings).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Smoothing(NamedTuple):
    """What the loss is made of.

    Attributes:
        target: B x T; padding there is left out.
        padding_idx: the number that stands for padding.
        shares: n and s, given the number of allowed tokens.
    """

    target: Tensor
    padding_idx: int
    shares: Callable[[int], tuple[float, float]]


def smoothed_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    target: Tensor,
    smoothing: Smoothing,
) -> tuple[Tensor, Tensor]:
    """The loss and the nll, each summed over the targets; the nll has no gradient.

    Under autocast the products are in its precision, the rest in that of the features.

    Args:
        features: N x C.
        weight, bias: V x C and V, or no bias.
        allowed: V booleans, false where nothing may be predicted; None: all may. A target that is
            not allowed has no nll.
        target: N.
    """
    return _SmoothedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        features, weight, bias, allowed, target, smoothing
    )


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allowed: Tensor | None,
        target: Tensor,
        smoothing: Smoothing,
    ) -> tuple[Tensor, Tensor]:
        device = features.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        x, w = features.to(low or features.dtype), weight.to(low or weight.dtype)
        logits = torch.mm(x, w.t()).to(weight.dtype)
        if bias is not None:
            logits += bias
        if allowed is not None:
            logits.masked_fill_(~allowed, float("-inf"))
        log_p = torch.log_softmax(logits, dim=1)

        column = target.unsqueeze(1)
        counts = target.ne(smoothing.padding_idx)
        has_nll = counts if allowed is None else counts & allowed[target]
        predicted = len(weight) if allowed is None else int(allowed.sum())
        n, s = smoothing.shares(predicted)
        nll = -log_p.gather(1, column).squeeze(1).masked_fill(~has_nll, 0).sum()
        finite = log_p if allowed is None else log_p.masked_fill(~allowed, 0)
        spread = -finite.sum(dim=1).masked_fill(~counts, 0).sum()

        grad = log_p.exp_()
        grad.mul_((n * has_nll + s * predicted * counts).to(grad.dtype).unsqueeze(1))
        grad.sub_(s * counts.to(grad.dtype).unsqueeze(1))
        if allowed is not None:
            grad.masked_fill_(~allowed, 0)
        grad.scatter_add_(1, column, -n * has_nll.to(grad.dtype).unsqueeze(1))
        of_bias = None if bias is None else grad.sum(dim=0)
        grad = grad.to(x.dtype)
        of_features = torch.mm(grad, w).to(features.dtype)
        of_weight = torch.mm(grad.t(), x).to(weight.dtype)
        ctx.save_for_backward(of_features, of_weight, of_bias)
        ctx.mark_non_differentiable(nll)
        return n * nll + s * spread, nll

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        of_features, of_weight, of_bias = ctx.saved_tensors
        bias = None if of_bias is None else of_bias * grad
        return of_features * grad, of_weight * grad, bias, None, None, None
