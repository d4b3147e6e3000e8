"""Word dropout: some input tokens become <unk> while training."""

from __future__ import annotations

import torch
from torch import Tensor


def drop_words(tokens: Tensor, p: float, *, unk: int, pad: int) -> Tensor:
    """Replace each token by `unk` with probability `p`, but never padding.

    Shape: any, returned as given.
    """
    dropped = torch.rand(tokens.shape, device=tokens.device) < p
    return tokens.masked_fill(dropped & tokens.ne(pad), unk)
