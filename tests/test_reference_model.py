"""One training step of the whole model against a plain reference: the loss and every gradient.

The reference below was written from the paper's formulas before the model's code was read, and
shares nothing with it: plain functions over a dictionary of float64 tensors. It takes one sentence
pair at a time, so it has no batch, no padding and no padding mask; where the model lets padding
leak into a sentence, or counts it in the loss, the two differ.

Names of sizes: S source tokens, T target tokens, d model width, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Parameters = dict[str, Tensor]

# ---------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------


def reference_loss(
    p: Parameters,
    pairs: list[tuple[list[int], list[int]]],
    *,
    heads: int,
    padding: int,
    eos: int,
    allowed: list[int],
    smoothing: float,
) -> Tensor:
    """The label-smoothed loss, summed over all target tokens of all sentence pairs.

    p: the model's parameters by their names in fairseq.
    pairs: token numbers of (source, target), both with their final eos and without padding.
    """
    total = torch.zeros((), dtype=torch.float64)
    for source, target in pairs:
        memory = encode(p, source, heads, padding)
        previous = [eos, *target[:-1]]  # the decoder sees the target one step late
        log_p = decode(p, previous, memory, heads, padding, allowed)
        for t, token in enumerate(target):
            nll = -log_p[t, token]
            spread = -sum(log_p[t, other] for other in allowed) / len(allowed)
            total = total + (1 - smoothing) * nll + smoothing * spread
    return total


def encode(p: Parameters, tokens: list[int], heads: int, padding: int) -> Tensor:
    """S tokens -> S x d."""
    x = embed(p, tokens, padding)
    for layer in range(depth(p, "encoder")):
        name = f"encoder.layers.{layer}"
        normed = norm(p, f"{name}.self_attn_layer_norm", x)
        x = x + attention(p, f"{name}.self_attn", normed, normed, heads, causal=False)
        x = x + feed_forward(p, name, norm(p, f"{name}.final_layer_norm", x))
    return norm(p, "encoder.layer_norm", x)


def decode(
    p: Parameters, tokens: list[int], memory: Tensor, heads: int, padding: int, allowed: list[int]
) -> Tensor:
    """T tokens and the encoder's S x d -> log probabilities, T x V, -inf for what isn't allowed."""
    x = embed(p, tokens, padding)
    for layer in range(depth(p, "decoder")):
        name = f"decoder.layers.{layer}"
        normed = norm(p, f"{name}.self_attn_layer_norm", x)
        x = x + attention(p, f"{name}.self_attn", normed, normed, heads, causal=True)
        normed = norm(p, f"{name}.encoder_attn_layer_norm", x)
        x = x + attention(p, f"{name}.encoder_attn", normed, memory, heads, causal=False)
        x = x + feed_forward(p, name, norm(p, f"{name}.final_layer_norm", x))
    x = norm(p, "decoder.layer_norm", x)
    logits = x @ unit_rows(p["encoder.embed_tokens.weight"]).T + p["decoder.output_projection.bias"]
    may_be_predicted = torch.zeros(logits.shape[1], dtype=torch.bool)
    may_be_predicted[allowed] = True
    logits = logits.masked_fill(~may_be_predicted, -math.inf)
    return logits - logits.exp().sum(dim=1, keepdim=True).log()


def embed(p: Parameters, tokens: list[int], padding: int) -> Tensor:
    """FixNorm: unit rows times sqrt(d), plus positions."""
    table = unit_rows(p["encoder.embed_tokens.weight"])
    d = table.shape[1]
    positions = [sinusoid(padding + 1 + place, d) for place in range(len(tokens))]
    return math.sqrt(d) * table[tokens] + torch.tensor(positions, dtype=torch.float64)


def sinusoid(position: int, d: int) -> list[float]:
    """First half sin, second half cos, of geometric wavelengths from 2 pi to 10000 * 2 pi."""
    half = d // 2
    angles = [position / 10000 ** (i / (half - 1)) for i in range(half)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def attention(
    p: Parameters, name: str, query: Tensor, memory: Tensor, heads: int, causal: bool
) -> Tensor:
    """QKNorm where the module has a g, otherwise softmax(Q K^T / sqrt(d_head)) V. -> T x d."""
    q_all, k_all, v_all = (
        linear(p, f"{name}.{projection}", x)
        for projection, x in (("q_proj", query), ("k_proj", memory), ("v_proj", memory))
    )
    width = query.shape[1] // heads
    contexts = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        q, k, v = q_all[:, part], k_all[:, part], v_all[:, part]
        if f"{name}.g" in p:
            logits = p[f"{name}.g"] * unit_rows(q) @ unit_rows(k).T
        else:
            logits = q @ k.T / math.sqrt(width)
        if causal:
            later = torch.ones(logits.shape).triu(1).bool()
            logits = logits.masked_fill(later, -math.inf)
        weights = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        contexts.append(weights @ v)
    return linear(p, f"{name}.out_proj", torch.cat(contexts, dim=1))


def feed_forward(p: Parameters, name: str, x: Tensor) -> Tensor:
    return linear(p, f"{name}.fc2", linear(p, f"{name}.fc1", x).clamp(min=0))


def norm(p: Parameters, name: str, x: Tensor) -> Tensor:
    """LayerNorm where the norm has a weight and a bias, ScaleNorm where it has one g."""
    if f"{name}.g" in p:
        lengths = (x * x).sum(dim=1, keepdim=True).sqrt().clamp(min=1e-5)
        return p[f"{name}.g"] * x / lengths
    centred = x - x.mean(dim=1, keepdim=True)
    variance = (centred * centred).mean(dim=1, keepdim=True)
    return p[f"{name}.weight"] * centred / (variance + 1e-5).sqrt() + p[f"{name}.bias"]


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def unit_rows(x: Tensor) -> Tensor:
    """Each row divided by its length. A row of zeros (the padding's) has none and stays."""
    lengths = (x * x).sum(dim=1, keepdim=True).sqrt()
    return x / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def depth(p: Parameters, side: str) -> int:
    return len({name.split(".")[2] for name in p if name.startswith(f"{side}.layers.")})
