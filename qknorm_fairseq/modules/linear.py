"""Linear layers for a few rows.

A step of decoding multiplies each weight with as few rows as there are hypotheses. Libraries for
CPUs are made for many rows and use neither their cache nor their threads well with four; the
other way round, the weight is the one with many rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16  # rows; above, nothing is gained


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `torch.nn.functional.linear`, for N x C rows."""
    if x.device.type != "cpu" or x.size(0) > FEW:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t().contiguous()


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer makes of N x C rows, if it is an `nn.Linear` in the way of :func:`linear`."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias)
    return layer(x)  # type: ignore[no-any-return]
