"""One training step of the whole model against a plain reference: the loss and every gradient.

The reference below was written from the paper's formulas before the model's code was read, and
shares nothing with it: plain functions over a dictionary of float64 tensors. It takes one sentence
pair at a time, so it has no batch, no padding and no padding mask; where the model lets padding
leak into a sentence, or counts it in the loss, the two differ.

Names of sizes: S source tokens, T target tokens, d model width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
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
    squares = (x * x).sum(dim=1, keepdim=True)
    return x / torch.where(squares > 0, squares, torch.ones_like(squares)).sqrt()


def depth(p: Parameters, side: str) -> int:
    return len({name.split(".")[2] for name in p if name.startswith(f"{side}.layers.")})


# ---------------------------------------------------------------------------------------------
# The tests
# ---------------------------------------------------------------------------------------------

ARCHITECTURES = {
    "transformer_qknorm": [],
    "transformer_scalenorm": [],
    # The two combinations between them: each half of the difference alone.
    "transformer_qknorm with ScaleNorm": ["--residual-norm", "scale"],
    "transformer_scalenorm with LayerNorm": ["--residual-norm", "layer"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data"))


def test_reference_gives_a_case_worked_out_by_hand() -> None:
    """No layers, d = 4, one target token: the loss by pencil.

    Padding is token 0, so the first position is 1, with the two frequencies 1 and 1/10000. The
    previous token is eos (2), whose row is (0, 3, 0, 0): unit (0, 1, 0, 0), times sqrt(4) is
    (0, 2, 0, 0), plus (sin 1, sin 0.0001, cos 1, cos 0.0001). The final norm is ScaleNorm, g = 2.
    """
    p = {
        "encoder.embed_tokens.weight": torch.tensor(
            [[0, 0, 0, 0], [5, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0.5, 0]], dtype=torch.float64
        ),
        "decoder.output_projection.bias": torch.tensor([0.0, 0.25, 0, 0], dtype=torch.float64),
        "encoder.layer_norm.g": torch.tensor(1.0, dtype=torch.float64),
        "decoder.layer_norm.g": torch.tensor(2.0, dtype=torch.float64),
    }
    x = [math.sin(1), 2 + math.sin(1e-4), math.cos(1), math.cos(1e-4)]
    length = math.sqrt(sum(number * number for number in x))
    logits = {1: 2 * x[0] / length + 0.25, 2: 2 * x[1] / length}  # token 3 is not allowed
    log_sum = math.log(math.exp(logits[1]) + math.exp(logits[2]))
    nll = [log_sum - logits[1], log_sum - logits[2]]
    expected = 0.9 * nll[1] + 0.1 * (nll[0] + nll[1]) / 2

    loss = reference_loss(p, [([2], [2])], heads=1, padding=0, eos=2, allowed=[1, 2], smoothing=0.1)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_training_step_is_that_of_the_reference(data: Path, name: str) -> None:
    model, criterion, task = tiny.build(
        data, "--word-dropout", 0, *ARCHITECTURES[name], arch=name.split()[0]
    )
    tiny.randomize(model)
    model.double().train()
    use_exact_positions(model)
    # fairseq takes log-probabilities in fp32 whatever the model's precision; here in fp64.
    model.get_normalized_probs = lambda output, log_probs, sample=None: output[0].log_softmax(-1)
    sample = tiny.batch(task)
    assert_padded_on_the_left_and_right(sample, task)

    loss, sample_size, _ = task.train_step(sample, model, criterion, Backward(), update_num=0)

    p = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    expected, pairs = expected_loss(p, task)
    expected.backward()
    assert sample_size == sum(len(target) for _, target in pairs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            p[key].grad,
            rtol=1e-9,
            atol=1e-9 * loss.item(),
            msg=lambda text, key=key: f"{key}: {text}",
        )
        # ... and nothing is equal just because it is zero. The keys' biases shift all logits of
        # a query alike where the keys aren't normalized, so there their gradient is zero.
        if not (key.endswith("k_proj.bias") and name.startswith("transformer_scalenorm")):
            assert parameter.grad.abs().max() > 1e-6, key


def test_loss_in_single_precision_is_near_the_reference(data: Path) -> None:
    """The same without a hand laid on anything: fairseq's own precision and positions."""
    model, criterion, task = tiny.build(data, "--word-dropout", 0)
    tiny.randomize(model)
    model.train()
    loss, *_ = criterion(model, tiny.batch(task))
    p = {key: value.detach().double() for key, value in model.named_parameters()}
    expected, _ = expected_loss(p, task)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_padding_changes_no_sentence(data: Path) -> None:
    """A pair's log-probabilities in the whole batch are those it has alone."""
    model, _, task = tiny.build(data)
    tiny.randomize(model)
    model.double().eval()
    together = tiny.batch(task)
    for row, number in enumerate(together["id"].tolist()):
        alone = tiny.batch(task, numbers=[number])
        length = alone["target"].shape[1]
        torch.testing.assert_close(
            model(**together["net_input"])[0][row, :length],
            model(**alone["net_input"])[0][0],
            rtol=1e-10,
            atol=1e-10,
        )


# ---------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------


class Backward:
    """All that task.train_step asks of an optimizer."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def expected_loss(p: Parameters, task: Any) -> tuple[Tensor, list[tuple[list[int], list[int]]]]:
    """The reference's loss of the training text, which is read from the text, not from a batch."""
    dictionary = task.target_dictionary
    eos = dictionary.eos()
    pairs = [
        tuple([*map(dictionary.index, side.split()), eos] for side in pair)
        for pair in tiny.TEXT["train"]
    ]
    seen = {token for _, target in pairs for token in target}
    loss = reference_loss(
        p,
        pairs,
        heads=tiny.SIZES["attention-heads"],
        padding=dictionary.pad(),
        eos=eos,
        allowed=sorted(seen | {dictionary.unk()}),
        smoothing=0.1,
    )
    return loss, pairs


def use_exact_positions(model: Any) -> None:
    """Replace fairseq's table of positions, rounded to fp32, by the formula's in fp64.

    They agree to fp32's precision, which is checked first.
    """
    for part in (model.encoder, model.decoder):
        padding, d = part.padding_idx, part.embed_tokens.embedding_dim
        exact = torch.tensor([sinusoid(n, d) for n in range(40)], dtype=torch.float64)
        exact[padding] = 0
        torch.testing.assert_close(part.embed_positions.weights[:40], exact, rtol=0, atol=1e-5)
        part.embed_positions.weights = exact


def assert_padded_on_the_left_and_right(sample: dict[str, Any], task: Any) -> None:
    """The batch is what the test is for: padding before sources and after targets."""
    pad = task.source_dictionary.pad()
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    assert source[:, 0].eq(pad).any() and not source[:, -1].eq(pad).any()
    assert target[:, -1].eq(pad).any() and not target[:, 0].eq(pad).any()
    assert len(set(source.ne(pad).sum(1).tolist())) > 2
    assert len(set(target.ne(pad).sum(1).tolist())) > 2
