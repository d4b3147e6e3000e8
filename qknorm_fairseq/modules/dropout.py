"""Dropout whose masks cost little on a CPU.

There torch draws a mask element by element on one thread, a quarter of a training step. Here one
64-bit draw gives four elements: each keeps its value with a probability that is exact to 1/65536,
and the scale is that of the true probability, so the expectation is the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor

LEVELS = 2**16


def keep_mask(like: Tensor, p: float) -> tuple[Tensor, float]:
    """Which elements dropout keeps, drawn from torch's generator for the CPU.

    Args:
        like: gives shape and dtype.
        p: probability of being dropped, below 1.

    Returns:
        1 where kept and 0 elsewhere, in the shape and dtype of `like`; and what to multiply by.
    """
    kept = max(1, round((1 - p) * LEVELS))
    draws = torch.empty((like.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    lanes = draws.view(torch.int16)[: like.numel()].view(like.shape)
    mask = lanes < kept - LEVELS // 2 if kept < LEVELS else torch.ones_like(lanes)
    return mask.to(like.dtype), LEVELS / kept


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask, scale = keep_mask(x, p)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.mul(x, mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.mul(grad, mask).mul_(ctx.scale), None


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, p: float) -> Tensor:
        mask, scale = keep_mask(x, p)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        if x.dtype != residual.dtype:  # a half-precision branch of a full-precision stream
            return residual + torch.mul(x, mask).mul_(scale)
        return torch.addcmul(residual, x, mask, value=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.mul(grad.to(mask.dtype), mask).mul_(ctx.scale), grad, None


class _ReluDropout(torch.autograd.Function):
    """Saves the output alone: it is positive just where the input was and was kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask, scale = keep_mask(x, p)
        y = torch.relu(x).mul_(mask.mul_(scale))
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0).mul_(ctx.scale), None


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout in training; on a GPU torch's own, which is fast."""
    if p <= 0:
        return x
    if x.device.type != "cpu" or p >= 1:
        return F.dropout(x, p)
    return _Dropout.apply(x, p)  # type: ignore[no-any-return, no-untyped-call]


def dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(x)."""
    if 0 < p < 1 and x.device.type == "cpu":
        return _DropoutAdd.apply(x, residual, p)  # type: ignore[no-any-return, no-untyped-call]
    return residual + dropout(x, p)


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """dropout(relu(x))."""
    if 0 < p < 1 and x.device.type == "cpu":
        return _ReluDropout.apply(x, p)  # type: ignore[no-any-return, no-untyped-call]
    return dropout(torch.relu(x), p)


class FastDropout(FairseqDropout):  # type: ignore[misc]
    """fairseq's dropout module with these masks.

    Args:
        after_relu: apply ReLU first; the layer's own activation is then the identity.
    """

    def __init__(self, like: FairseqDropout, *, after_relu: bool = False) -> None:
        super().__init__(like.p, like.module_name)
        self.after_relu = after_relu

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        if not (self.training or self.apply_during_inference):
            return torch.relu(x) if self.after_relu else x
        return relu_dropout(x, self.p) if self.after_relu else dropout(x, self.p)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + dropout(x)."""
        if not (self.training or self.apply_during_inference):
            return residual + x
        return dropout_add(x, residual, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", after_relu=True" if self.after_relu else "")
