"""Query-Key Normalization (Henry et al. 2020, arXiv 2010.04245, section 3).

For one head with queries Q (T x d), keys K (S x d) and values V (S x d):

    QKNorm(Q, K, V) = softmax(g * Qn Kn^T + mask) V,    Qn = Q / |Q|_2,  Kn = K / |K|_2

The norms run along the head dimension, after the projection and the split into heads. `g` is one
learned scalar for each attention module; it stands where 1/sqrt(d) stood. A dot product of unit
vectors lies in [-1, 1], so the logits lie in [-g, g] whatever the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from qknorm_fairseq.modules.decoding import DecoderCache
from qknorm_fairseq.modules.linear import project
from qknorm_fairseq.modules.packing import Packed

NORMS = ("l2", "rms", "layer", "none")
G_PER = ("module", "head", "fixed")

IncrementalState = dict[str, dict[str, Tensor | None]]


def g0_from_length(length: float) -> float:
    """The paper's start value of `g`: log2(L^2 - L).

    Args:
        length: L, the 97.5th percentile of the training sequences' lengths in subwords, source
            and target together. 72 gives 12.32.

    Raises:
        ValueError: L is under 2, where the formula gives less than 1 or nothing at all.
    """
    if not length >= 2 or math.isinf(length):
        raise ValueError(f"L must be a length of at least 2 subwords to start g from, not {length}")
    return math.log2(length * length - length)


def unit(x: Tensor) -> Tensor:
    """x / |x|_2 along the last dimension; finite, with finite gradients, whatever x is.

    A vector shorter than 1e-12 (in half precision: than its smallest normal number) has no
    direction: it becomes zero and gets no gradient, so it attends to all keys alike.

    Shape: any, returned as given, in the dtype of `x`. The norms are computed in at least fp32.
    """
    shortest = max(1e-12, torch.finfo(x.dtype).tiny)
    wide = x if x.dtype == torch.float64 else x.float()
    if x.device.type == "cpu":  # elsewhere it would cost more to ask than to be careful
        norm = torch.linalg.vector_norm(wide.detach(), dim=-1, keepdim=True)
        if norm.numel() and norm.max() < math.inf:
            reciprocal = torch.where(norm > shortest, norm.reciprocal(), 0)
            if not torch.is_grad_enabled():
                return (wide * reciprocal).type_as(x)
            return _Unit.apply(wide, reciprocal).type_as(x)  # type: ignore[no-any-return, no-untyped-call]
    # The direction doesn't depend on the length, so the length is first taken out roughly, as a
    # constant: the squares of what remains can't overflow, and the gradient stays the right one.
    largest = wide.detach().abs().amax(-1, keepdim=True).clamp_min(shortest)
    wide = wide / largest
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    # The clamp cuts the gradient of vectors that are zeroed anyway (0 / 0 otherwise).
    has_direction = norm.detach() * largest > shortest
    normed: Tensor = wide / norm.clamp_min(0.5) * has_direction
    return normed.type_as(x)


class _Unit(torch.autograd.Function):
    """y = x / |x|, given 1 / |x|; backward dx = (dy - y (y . dy)) / |x|."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reciprocal: Tensor) -> Tensor:
        y = x * reciprocal
        ctx.save_for_backward(y, reciprocal)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, reciprocal = ctx.saved_tensors
        along = (y * grad).sum(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(reciprocal), None


class QKNormMultiheadAttention(MultiheadAttention):  # type: ignore[misc]
    """fairseq's `MultiheadAttention` with queries and keys normalized, scaled by a learned `g`.

    Arguments, call signature, shapes and parameter names are those of fairseq's module, plus the
    scalar parameter `g`. Keys are normalized once, before they are cached for decoding.

    With another `norm` than the paper's it is another known attention, along the same path:

    ======  =================================  ===========  ==================================
    norm    q and k become                     scale        known as
    ======  =================================  ===========  ==================================
    l2      q / |q|                            g            QKNorm (Henry et al. 2020)
    rms     q / rms(q)                         1 / sqrt(d)  RMSNorm on q and k
    layer   (q - mean(q)) / std(q)             1 / sqrt(d)  LayerNorm on q and k (ViT-22B)
    none    q                                  1 / sqrt(d)  scaled dot-product attention
    ======  =================================  ===========  ==================================

    Args:
        g0: the value `g` starts from (see :func:`g0_from_length`); only `l2` has a `g`.
        norm: one of the above.
        g_per: one `g` for the "module" (the paper) or for each "head", or a "fixed" one.
        groups: for `l2`, normalize so many equal parts of the head dimension, each by itself.
        elementwise_scale: multiply the normalized q and k by learned scales, one for each head
            and dimension (`q_scale`, `k_scale`, starting at 1).

    Raises:
        ValueError: an option is unknown, or does not go with another one.
    """

    g: Tensor | None

    def __init__(
        self,
        *args: Any,
        g0: float | None = None,
        norm: str = "l2",
        g_per: str = "module",
        groups: int = 1,
        elementwise_scale: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.use_xformers:
            raise ValueError("QKNorm has an attention of its own: leave xformers_att_config unset")
        if norm not in NORMS:
            raise ValueError(f"attention norm {norm!r}: there is {', '.join(NORMS)}")
        if g_per not in G_PER:
            raise ValueError(f"g per {g_per!r}: there is {', '.join(G_PER)}")
        if groups < 1 or self.head_dim % groups:
            raise ValueError(f"a head of {self.head_dim} dimensions has no {groups} equal groups")
        if norm != "l2" and (groups != 1 or g_per != "module"):
            raise ValueError(f"g and groups belong to the l2 norm, not to {norm!r}")
        if norm == "l2" and g0 is None:
            raise ValueError("the l2 norm needs g0, where its scale g starts")
        self.norm, self.groups = norm, groups

        self.g0 = None if norm != "l2" else float(g0)  # type: ignore[arg-type]
        if self.g0 is None:
            self.g = None
        elif g_per == "fixed":
            self.register_buffer("g", torch.tensor(self.g0))
        else:
            shape = (self.num_heads, 1, 1) if g_per == "head" else ()
            self.g = nn.Parameter(torch.full(shape, self.g0))

        shape = (self.num_heads, 1, self.head_dim)
        self.q_scale = nn.Parameter(torch.ones(shape)) if elementwise_scale else None
        self.k_scale = nn.Parameter(torch.ones(shape)) if elementwise_scale else None

    def normalized(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Queries or keys, (..., H, head_dim), as they enter the dot product."""
        if self.norm == "l2":
            parts = x.reshape(*x.shape[:-1], self.groups, -1)
            x = unit(parts).flatten(-2)
        elif self.norm == "rms":
            x = unit(x) * self.head_dim**0.5
        elif self.norm == "layer":
            x = unit(x - x.mean(-1, keepdim=True)) * self.head_dim**0.5
        return x if scale is None else x * scale.squeeze(1)

    def scaled(self, q: Tensor) -> Tensor:
        """Normalized queries, (..., H, head_dim), times `g` (or 1 / sqrt(head_dim))."""
        if self.g is None:
            return q * float(self.scaling)
        return q * (self.g.squeeze(1) if self.g.dim() else self.g)

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}, norm={self.norm}"]
        if self.groups > 1:
            parts.append(f"groups={self.groups}")
        if self.g is not None:
            parts.append(f"g={self.g.mean().item():.4g}")
        return ", ".join(parts)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | Packed | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each query to all keys.

        With B sentences, H heads, `T` queries, `S` keys:

        Args:
            query: T x B x embed_dim.
            key, value: S x B x kdim and S x B x vdim; None where `static_kv` and cached.
            key_padding_mask: B x S, true at keys that are padding; or how queries and keys
                without padding are laid out, which are then N x 1 x embed_dim.
            incremental_state: cache of decoding; new keys and values are appended to it.
            need_weights: return the weights, averaged over the heads (B x T x S).
            static_kv: the keys are the same at each step (encoder-decoder attention).
            attn_mask: T x S, either true where masked or a number to add to the logits.
            before_softmax: return the logits (B*H x T x S) and the values (B*H x S x d) instead.
            need_head_weights: return the weights of each head (H x B x T x S).

        Returns:
            the output (T x B x embed_dim), and the weights before dropout or None.
        """
        if isinstance(key_padding_mask, Packed):
            assert key is not None
            return self._attend_packed(query, key, key_padding_mask), None
        padding: Tensor | None = key_padding_mask
        tgt_len, bsz, _ = query.size()
        cache = {} if incremental_state is None else self._get_input_buffer(incremental_state)

        # Project, split into heads, normalize.
        if static_kv and "prev_key" in cache:
            k, v = cache["prev_key"], cache["prev_value"]
            padding = cache.get("prev_key_padding_mask")
        else:
            assert key is not None and value is not None
            if (
                self.beam_size > 1
                and self.encoder_decoder_attention
                and key.size(1) == bsz
                and incremental_state is not None
            ):
                # Decoding repeats each sentence for each hypothesis of the beam: once is enough.
                key, value = key[:, :: self.beam_size], value[:, :: self.beam_size]
                if padding is not None:
                    padding = padding[:: self.beam_size]
            k, v = self.k_proj(key), self.v_proj(value)
            if self.bias_k is not None:
                k = torch.cat([k, self.bias_k.expand(-1, k.size(1), -1)])
                v = torch.cat([v, self.bias_v.expand(-1, v.size(1), -1)])
                padding, attn_mask = self._pad_masks(padding, attn_mask)
            k = self.normalized(self._heads(k), self.k_scale).permute(1, 2, 0, 3)
            v = self._heads(v).permute(1, 2, 0, 3)
            if "prev_key" in cache:
                k = torch.cat([cache["prev_key"], k], dim=2)
                v = torch.cat([cache["prev_value"], v], dim=2)
                padding = self._append_prev_key_padding_mask(
                    padding,
                    cache.get("prev_key_padding_mask"),
                    k.size(0),
                    k.size(2),
                    False,
                )
            if incremental_state is not None:
                cache["prev_key"], cache["prev_value"] = k, v
                cache["prev_key_padding_mask"] = padding
                self._set_input_buffer(incremental_state, cache)
        q = self.normalized(self._heads(self.q_proj(query)), self.q_scale)
        q = self.scaled(q).permute(1, 2, 0, 3)

        if self.add_zero_attn:
            k = torch.cat([k, torch.zeros_like(k[:, :, :1])], dim=2)
            v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
            padding, attn_mask = self._pad_masks(padding, attn_mask)

        # The hypotheses of one sentence (`beam` of them; 1 outside decoding) share its keys:
        # they are simply more queries.
        sentences, heads, src_len, head_dim = k.shape
        beam = bsz // sentences
        q = q.view(sentences, beam, heads, tgt_len, head_dim).transpose(1, 2)
        rows = q.reshape(sentences, heads, beam * tgt_len, head_dim)
        logits = torch.matmul(rows, k.transpose(2, 3))
        logits = logits.view(sentences, heads, beam, tgt_len, src_len)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                logits = logits.masked_fill(attn_mask, float("-inf"))
            else:
                logits = logits + attn_mask
        if padding is not None:
            masked = padding.bool().view(sentences, 1, 1, 1, src_len)
            logits = logits.masked_fill(masked, float("-inf"))
        if before_softmax:
            return logits.transpose(1, 2).reshape(-1, tgt_len, src_len), v.flatten(0, 1)

        wide = torch.promote_types(logits.dtype, torch.float32)
        weights = torch.softmax(logits, dim=-1, dtype=wide)
        kept = self.dropout_module(weights.type_as(logits)).flatten(2, 3)
        attended = torch.matmul(kept, v).view(sentences, heads, beam, tgt_len, head_dim)
        attended = attended.permute(3, 0, 2, 1, 4).reshape(tgt_len, bsz, self.embed_dim)
        output = self.out_proj(attended)

        if not (need_weights or need_head_weights):
            return output, None
        weights = weights.transpose(0, 1).reshape(heads, bsz, tgt_len, src_len)
        return output, weights if need_head_weights else weights.mean(dim=0)

    def _heads(self, x: Tensor) -> Tensor:
        """(..., embed_dim) to (..., H, head_dim)."""
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim)

    def _attend_packed(self, query: Tensor, key: Tensor, packed: Packed) -> Tensor:
        """The same for N x 1 x embed_dim queries and M x 1 x embed_dim keys without padding.

        Under autocast only the projections are in lower precision.
        """
        device = query.device.type
        query, same = query.squeeze(1), key is query
        autocast = torch.is_autocast_enabled(device)
        if autocast:  # once for all projections
            query = query.to(torch.get_autocast_dtype(device))
        key = query if same else key.squeeze(1)
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(key)
        with torch.autocast(device, enabled=False):
            q, k, v = (self._heads(x.float() if autocast else x) for x in projected)
            q = packed.queries.to_heads(self.scaled(self.normalized(q, self.q_scale)))
            k = packed.keys.to_heads(self.normalized(k, self.k_scale))
            attended = self._dot_product(
                q, k, packed.keys.to_heads(v), packed.mask, fused=device != "cpu"
            )
            attended = packed.queries.from_heads(attended)
        output: Tensor = self.out_proj(attended.flatten(1)).unsqueeze(1)
        return output

    def _dot_product(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, fused: bool
    ) -> Tensor:
        """softmax(q k^T + mask) v, for B x H x T x d queries and B x H x S x d keys and values.

        `fused` is by torch's kernels for GPUs; on a CPU they are the slower ones with dropout.
        """
        if fused:
            p = self.dropout_module.p if self.dropout_module.training else 0.0
            allowed = None if mask is None else ~mask
            return F.scaled_dot_product_attention(
                q, k.type_as(q), v.type_as(q), attn_mask=allowed, dropout_p=p, scale=1.0
            )
        return torch.matmul(self.dropout_module(self._weights(q, k, mask)), v)

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k^T + mask), B x H x T x S."""
        logits = torch.matmul(q, k.transpose(2, 3))
        if mask is not None:
            logits = logits.masked_fill(mask, float("-inf"))
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits, dim=-1, dtype=wide).type_as(logits)

    def source(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """B x S x kdim to the source's keys and values, B x H x S x d both, for decoding."""
        k = self.normalized(self._heads(self.k_proj(encoded)), self.k_scale)
        v = self._heads(self.v_proj(encoded))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def attend_to_past(self, x: Tensor, layer: int, cache: DecoderCache) -> Tensor:
        """The newest token of N hypotheses, N x embed_dim, to all up to it, when decoding."""
        q = self.scaled(self.normalized(self._heads(project(self.q_proj, x)), self.q_scale))
        k = self.normalized(self._heads(project(self.k_proj, x)), self.k_scale)
        keys, values = cache.append(layer, k, self._heads(project(self.v_proj, x)))
        attended = self._dot_product(
            q.unsqueeze(2), keys, values, None, fused=x.device.type != "cpu"
        )
        return project(self.out_proj, attended.flatten(1))

    def attend_to_source(
        self, x: Tensor, layer: int, cache: DecoderCache, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The newest token of N hypotheses, N x embed_dim, to their sources, when decoding.

        Returns:
            the output, N x embed_dim, and the weights averaged over the heads, N x S, or None.
        """
        k, v = cache.sources[layer]
        q = self.scaled(self.normalized(self._heads(project(self.q_proj, x)), self.q_scale))
        q = q.view(len(k), cache.beam, *q.shape[1:]).transpose(1, 2)
        weights = None
        if need_weights:
            of_heads = self._weights(q, k, cache.mask)
            attended = torch.matmul(of_heads, v)
            weights = of_heads.mean(1).flatten(0, 1)
        else:
            fused = x.device.type != "cpu"
            attended = self._dot_product(q, k, v, cache.mask, fused=fused)
        return project(self.out_proj, attended.transpose(1, 2).reshape(x.shape)), weights

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Let the weights of a plain attention in; what they lack starts as in a new module."""
        super().upgrade_state_dict_named(state_dict, name)
        for own in ("g", "q_scale", "k_scale"):
            value = getattr(self, own)
            if value is not None:
                key = f"{name}.{own}" if name else own
                start = torch.tensor(self.g0 if own == "g" else 1.0)
                state_dict.setdefault(key, start.expand(value.shape).clone())
