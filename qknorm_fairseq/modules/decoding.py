"""What a decoder keeps while it translates, so that a step works on the newest token alone.

fairseq keeps keys and values in each attention and copies them twice a step: to append the new
ones, and to put the hypotheses of the beam in their new order. Here one buffer holds those of all
layers, with room for the tokens to come; a step writes its row, and a reordering is one copy.
The keys and values of the source are kept once a sentence, whatever the size of the beam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

EncoderOut = Mapping[str, Any]
ROOM = 16  # tokens by which the buffer starts, and at least grows


class Reordered(Mapping[str, Any]):
    """An encoder's output in another order, made only if somebody reads it.

    Beam search repeats and reorders it at each step, while the decoder needs it at the first one
    alone. Other decoders find what they expect.

    Args:
        original: what the encoder gave.
        order: which of its sentences, for each hypothesis.
        reorder: how fairseq does it.
    """

    def __init__(
        self,
        original: EncoderOut,
        order: Tensor,
        reorder: Callable[[EncoderOut, Tensor], EncoderOut],
    ) -> None:
        self.original, self.order, self.reorder = original, order, reorder
        self.made: EncoderOut | None = None

    def reordered(self, order: Tensor) -> Reordered:
        return Reordered(self.original, self.order.index_select(0, order), self.reorder)

    def _read(self) -> EncoderOut:
        if self.made is None:
            self.made = self.reorder(self.original, self.order)
        return self.made

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class DecoderCache:
    """Keys and values of N hypotheses of B sentences, `beam` of each sentence side by side.

    Attributes:
        sources: of each layer the keys and values of the source, B x H x S x d both.
        padding: B x S, true where the source is padding; None where nothing is.
        length: T, the tokens that are kept.
    """

    def __init__(self) -> None:
        self.sources: list[tuple[Tensor, Tensor]] = []
        self.padding: Tensor | None = None
        self.beam = 1
        self.length = 0
        self._buffer: Tensor | None = None  # room x 2 layers x N x C
        self._other: Tensor | None = None  # of the same size: where a reordering goes

    @classmethod
    def begin(cls, encoder_out: EncoderOut, layers: Iterable[Any]) -> DecoderCache:
        """Project and normalize the source for each of the decoder's layers."""
        cache = cls()
        if isinstance(encoder_out, Reordered):
            original, order = encoder_out.original, encoder_out.order
            sentences = original["encoder_out"][0].size(1)
            beam, rest = divmod(len(order), sentences)
            each = torch.arange(sentences, device=order.device).repeat_interleave(beam)
            if not rest and torch.equal(order, each):
                encoder_out, cache.beam = original, beam
        encoded = encoder_out["encoder_out"][0].transpose(0, 1)
        padding = [mask for mask in encoder_out["encoder_padding_mask"] if mask.any()]
        cache.padding = padding[0] if padding else None
        cache.sources = [layer.encoder_attn.source(encoded) for layer in layers]
        return cache

    @property
    def mask(self) -> Tensor | None:
        """B x 1 x 1 x S."""
        return None if self.padding is None else self.padding[:, None, None, :]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest token's key and value, N x H x d each; the first layer comes first.

        Returns:
            all keys and all values, N x H x T x d.
        """
        hypotheses, heads, head_dim = k.shape
        if layer == 0:
            self._make_room(hypotheses, heads * head_dim, k)
            self.length += 1
        assert self._buffer is not None
        row = self._buffer[self.length - 1]
        row[2 * layer].view(k.shape).copy_(k)
        row[2 * layer + 1].view(v.shape).copy_(v)
        both = self._buffer[: self.length, 2 * layer : 2 * layer + 2]
        both = both.view(self.length, 2, hypotheses, heads, head_dim).permute(1, 2, 3, 0, 4)
        return both[0], both[1]

    def _make_room(self, hypotheses: int, dim: int, like: Tensor) -> None:
        room = 0 if self._buffer is None else len(self._buffer)
        if self.length < room:
            return
        old, kept = self._buffer, self.length
        shape = (room + max(ROOM, room // 2), 2 * len(self.sources), hypotheses, dim)
        self._buffer, self._other = like.new_empty(shape), None
        if old is not None:
            self._buffer[:kept] = old[:kept]

    def reorder(self, order: Tensor) -> None:
        """Keep these hypotheses, in this order; sentences that are left out have ended."""
        self._reorder_sources(order.div(self.beam, rounding_mode="floor"))
        assert self._buffer is not None
        room, rows, _, dim = self._buffer.shape
        shape = (room, rows, len(order), dim)
        if self._other is None or self._other.shape != shape:
            self._other = self._buffer.new_empty(shape)
        torch.index_select(
            self._buffer[: self.length].flatten(0, 1),
            1,
            order,
            out=self._other[: self.length].flatten(0, 1),
        )
        self._buffer, self._other = self._other, self._buffer

    def _reorder_sources(self, sentences: Tensor) -> None:
        """`sentences`: which one each hypothesis belongs to."""
        there = torch.arange(len(self.sources[0][0]), device=sentences.device)
        if torch.equal(sentences, there.repeat_interleave(self.beam)):
            return
        first = sentences[:: self.beam]
        if torch.equal(sentences, first.repeat_interleave(self.beam)[: len(sentences)]):
            sentences = first
        else:
            self.beam = 1
        self.sources = [
            (k.index_select(0, sentences), v.index_select(0, sentences)) for k, v in self.sources
        ]
        if self.padding is not None:
            self.padding = self.padding.index_select(0, sentences)
