"""Linear layers for few rows.

A step of decoding multiplies each weight with as few rows as there are hypotheses. Libraries for
CPUs are made for many rows and use neither their cache nor their threads well with four; the
other way round, the weight is the one with many rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Where something is gained (`qknorm bench decode`): few rows, or somewhat more and many outputs.
FEW, SOME = 16, 256  # rows
MANY = 2048  # outputs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `torch.nn.functional.linear`, for N x C rows."""
    few = x.size(0) <= (SOME if weight.size(0) >= MANY else FEW)
    if x.device.type != "cpu" or not few:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t().contiguous()


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer makes of N x C rows, if it is an `nn.Linear` in the way of :func:`linear`."""
    if type(layer) is nn.Linear:
        return linear(x, layer.weight, layer.bias)
    return layer(x)  # type: ignore[no-any-return]
