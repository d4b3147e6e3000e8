"""ScaleNorm (Nguyen & Salazar 2019, arXiv 1910.05895, section 3): the baseline's residual norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaleNorm(nn.Module):
    """g x / max(|x|_2, eps) along the last dimension, with one learned scalar `g`.

    Stands where a LayerNorm stands. `g` starts from sqrt(dim), the expected length of a vector of
    `dim` unit normals, as LayerNorm's output has it.

    Shape: (..., dim), returned as given. The norm is computed in at least fp32.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.g = nn.Parameter(torch.tensor(dim**0.5))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).clamp_min(self.eps)
        scaled: Tensor = self.g / norm * x
        return scaled.type_as(x)

    def extra_repr(self) -> str:
        return f"{self.dim}, g={self.g.item():.4g}"
