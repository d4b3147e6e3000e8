"""FixNorm embeddings (Nguyen & Chiang 2018; used by Nguyen & Salazar 2019 and Henry et al. 2020).

Each row of the table is divided by its own length before use, at the input and at the output, so
that a rare word's vector is as long as a frequent one's. The padding row has no length and stays
zero, without a gradient (torch's `normalize` would give it a huge one at the output).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qknorm_fairseq.modules.attention import unit
from qknorm_fairseq.modules.linear import linear

START = 0.01  # the raw table starts uniform in [-START, START]


class FixNormEmbedding(nn.Embedding):
    """Token embeddings of unit length; the padding row stays zero.

    The factor sqrt(d_model) at the input is fairseq's `embed_scale`.
    """

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -START, START)
        self._fill_padding_idx_with_zero()

    def forward(self, tokens: Tensor) -> Tensor:
        """B x T token indices to B x T x dim."""
        return unit(super().forward(tokens))


class OutputProjection(nn.Module):
    """Features to logits over the vocabulary.

    Args:
        weight: V x dim, usually the target embedding's own table.
        fixnorm: divide each row by its length first.
        bias: add a learned bias for each token (starts at 0).
        allowed: V booleans, false at tokens that are never to be predicted (their logits become
            -inf); None allows all. Stored with the weights.

    Shape: (..., dim) to (..., V).
    """

    allowed: Tensor | None

    def __init__(
        self, weight: nn.Parameter, *, fixnorm: bool, bias: bool, allowed: Tensor | None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.fixnorm = fixnorm
        self.bias = nn.Parameter(torch.zeros(len(weight))) if bias else None
        self.register_buffer("allowed", allowed)

    def forward(self, features: Tensor) -> Tensor:
        rows = features.dim() == 2 and not torch.is_grad_enabled()
        logits = (linear if rows else F.linear)(features, self.rows(), self.bias)
        return logits if self.allowed is None else logits.masked_fill(~self.allowed, float("-inf"))

    def rows(self) -> Tensor:
        """The table as it is multiplied with."""
        if not self.fixnorm:
            return self.weight
        if not self._final or torch.is_grad_enabled():
            return unit(self.weight)
        state = (self.weight.data_ptr(), self.weight.dtype, self.weight._version)
        if self._known is None or self._known[0] != state:
            self._known = (state, unit(self.weight))
        return self._known[1]

    # A search asks for the table at each step. Once fairseq says that the weights are final, one
    # answer is enough; while they are trained they change unnoticed (fused optimizers don't count
    # a tensor's versions), also between two validations.
    _final = False
    _known: tuple[object, Tensor] | None = None

    def make_generation_fast_(self, **kwargs: object) -> None:
        """fairseq calls this when a trained model is to be used."""
        self._final = True

    def train(self, mode: bool = True) -> OutputProjection:
        self._final, self._known = self._final and not mode, None
        return super().train(mode)
