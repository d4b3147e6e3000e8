"""Padded batches without their padding.

A batch of sentences is as long as its longest. Everything but the attention works on each token
alone, so it can do without the padding: `N` real tokens of all sentences one after the other
instead of B x T. Only the dot products need the sentences side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Layout:
    """Where a batch's real tokens are.

    Args:
        padding: B x T, true at padding.
        multiple: N is rounded up to a multiple of this by copies of the first token, of which
            nothing is made. Kernels that are compiled for each size (oneDNN's) then see few.
    """

    def __init__(self, padding: Tensor, multiple: int = 1) -> None:
        self.padding = padding
        self.batch, self.length = padding.shape
        flat = padding.reshape(-1)
        real = (~flat).nonzero().squeeze(1)
        self.tokens = len(real)
        self.real = F.pad(real, (0, -len(real) % multiple))  # N: where in the B*T positions
        self.pads = flat.nonzero().squeeze(1)
        # B*T: which of the N; at padding it doesn't matter, as nothing looks there.
        self.source = (~flat).cumsum(0).sub_(1).clamp_min_(0)
        self._of_heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def pack(self, x: Tensor) -> Tensor:
        """B x T x C to N x C."""
        return x.reshape(self.batch * self.length, -1).index_select(0, self.real)

    def unpack(self, x: Tensor) -> Tensor:
        """N x C to B x T x C, with zeros at padding."""
        rows = x[: self.tokens]
        if len(self.pads):
            empty = x.new_zeros(self.batch * self.length, x.size(1))
            rows = empty.index_copy(0, self.real[: self.tokens], rows)
        return rows.view(self.batch, self.length, -1)

    def to_heads(self, x: Tensor) -> Tensor:
        """N x H x d to B x H x T x d; at padding are vectors of other tokens."""
        heads, head_dim = x.shape[1:]
        source, real, _ = self.of_heads(heads)
        rows = _Rows.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, head_dim), source, real, self.tokens * heads
        )
        return rows.view(self.batch, heads, self.length, head_dim)  # type: ignore[no-any-return]

    def from_heads(self, x: Tensor) -> Tensor:
        """B x H x T x d to N x H x d."""
        _, heads, _, head_dim = x.shape
        source, real, pads = self.of_heads(heads)
        rows = _RealRows.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, head_dim), source, real, pads
        )
        return rows.view(-1, heads, head_dim)  # type: ignore[no-any-return]

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """`source`, `real` and `pads` for the rows of heads, in the orders N*H and B*H*T."""
        if heads not in self._of_heads:
            head = torch.arange(heads, device=self.real.device)
            b, t = self.real // self.length, self.real % self.length
            real = ((b * heads)[:, None] + head) * self.length + t[:, None]
            source = self.source.view(self.batch, 1, self.length) * heads + head[:, None]
            b, t = self.pads // self.length, self.pads % self.length
            pads = ((b * heads)[:, None] + head) * self.length + t[:, None]
            self._of_heads[heads] = source.reshape(-1), real.reshape(-1), pads.reshape(-1)
        return self._of_heads[heads]


@dataclass(frozen=True)
class Packed:
    """How an attention's queries and keys are laid out; stands where fairseq has a padding mask.

    Attributes:
        mask: what no query may attend to, true there; broadcasts over B x H x T x S. None: all
            may attend to all.
    """

    queries: Layout
    keys: Layout
    mask: Tensor | None


class _Rows(torch.autograd.Function):
    """x[source]. What comes back at padding is nothing, since nothing was made of it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, real: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(real)
        ctx.tokens = tokens
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (real,) = ctx.saved_tensors
        rows = grad.contiguous().index_select(0, real)
        rows[ctx.tokens :] = 0
        return rows, None, None, None


class _RealRows(torch.autograd.Function):
    """x[real], the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, real: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(source, pads)
        return x.index_select(0, real)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, pads = ctx.saved_tensors
        return grad.index_select(0, source).index_fill_(0, pads, 0), None, None, None
