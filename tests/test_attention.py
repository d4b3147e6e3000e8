"""Query-key normalized attention against a slow reference written from the formula.

The reference below is plain loops over sentence, head, query and key, in float64. It shares no
code with the module, so a slip in a transpose, a mask or the normalization shows as a difference.
Sizes: T queries, S keys, B sentences, H heads, E model width, d = E / H. Tensors are T x B x E.
"""

import copy
import math

import pytest
import torch
from fairseq.modules import MultiheadAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qknorm_fairseq.modules.attention import QKNormMultiheadAttention, g0_from_length

T, B, E, H = 4, 2, 8, 2
D = E // H
G0 = 3.7
NEG_INF = float("-inf")

# How the module is used in a transformer; cross attention sees encoder states of another width.
KINDS = {
    "self": {"self_attention": True},
    "cross": {"encoder_decoder_attention": True, "kdim": 6, "vdim": 6},
    "separate key and value": {"kdim": 6, "vdim": 5},
}
MASKS = ["none", "padding", "causal", "bool", "finite", "padding and causal", "padding and bool"]


# ---------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------


def normalize(vector: Tensor) -> Tensor:
    """x / |x|; a vector without a direction stays zero and passes no gradient."""
    length = (vector * vector).sum().sqrt()
    return torch.zeros_like(vector) if length < 1e-12 else vector / length


def project(weights: dict[str, Tensor], name: str, vector: Tensor) -> Tensor:
    projected = weights[f"{name}.weight"] @ vector
    return projected + weights[f"{name}.bias"] if f"{name}.bias" in weights else projected


def reference_attention(
    weights: dict[str, Tensor],
    num_heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    add_zero_attn: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(g * Qn Kn^T + mask) V, one number at a time.

    Everything is float64. `weights` is the module's state dict; `bias_k` and `bias_v`, where
    present, are one more key and value for every query, and `add_zero_attn` adds a zero one.

    Returns: output (T x B x E), weights (H x B x T x S), logits (H x B x T x S).
    """
    tgt_len, bsz, width = query.shape
    src_len = key.shape[0]
    d = width // num_heads
    outputs, all_weights, all_logits = [], [], []
    for b in range(bsz):
        queries = [project(weights, "q_proj", query[t, b]) for t in range(tgt_len)]
        keys = [project(weights, "k_proj", key[s, b]) for s in range(src_len)]
        values = [project(weights, "v_proj", value[s, b]) for s in range(src_len)]
        if "bias_k" in weights:
            keys.append(weights["bias_k"][0, 0])
            values.append(weights["bias_v"][0, 0])
        if add_zero_attn:
            keys.append(torch.zeros(width, dtype=torch.float64))
            values.append(torch.zeros(width, dtype=torch.float64))
        contexts: list[list[Tensor]] = [[] for _ in range(tgt_len)]
        for h in range(num_heads):
            head = slice(h * d, (h + 1) * d)
            for t in range(tgt_len):
                q = normalize(queries[t][head])
                logits = []
                for s in range(len(keys)):
                    logit = weights["g"] * (q * normalize(keys[s][head])).sum()
                    extra = s >= src_len  # the added keys are never masked
                    if not extra and attn_mask is not None:
                        if attn_mask.dtype == torch.bool:
                            logit = logit + (NEG_INF if attn_mask[t, s] else 0.0)
                        else:
                            logit = logit + attn_mask[t, s].double()
                    if not extra and key_padding_mask is not None and key_padding_mask[b, s]:
                        logit = torch.tensor(NEG_INF, dtype=torch.float64)
                    logits.append(logit)
                largest = max(logit.item() for logit in logits)
                exps = [
                    torch.zeros((), dtype=torch.float64)
                    if logit.item() == NEG_INF
                    else torch.exp(logit - largest)
                    for logit in logits
                ]
                total = sum(exps)
                row = [e / total for e in exps]
                contexts[t].append(sum(row[s] * values[s][head] for s in range(len(values))))
                all_weights.append(torch.stack(row))
                all_logits.append(torch.stack(logits))
        for t in range(tgt_len):
            outputs.append(project(weights, "out_proj", torch.cat(contexts[t])))
    output = torch.stack(outputs).view(bsz, tgt_len, width).transpose(0, 1)
    shape = (bsz, num_heads, tgt_len, -1)
    head_weights = torch.stack(all_weights).view(shape).transpose(0, 1)
    logits = torch.stack(all_logits).view(shape).transpose(0, 1)
    return output, head_weights, logits


# ---------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------


def make_module(
    embed_dim: int = E, num_heads: int = H, g0: float = G0, seed: int = 1, **options: object
) -> QKNormMultiheadAttention:
    """A float64 module in evaluation mode whose every weight and bias is random, but not g."""
    module = QKNormMultiheadAttention(embed_dim, num_heads, g0=g0, **options).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name != "g":
                parameter.copy_(0.5 * randn(*parameter.shape, generator=generator))
    return module


def make_identity_module(embed_dim: int, num_heads: int, **options: object):
    """All four projections are the identity without bias, so that q, k, v are the inputs."""
    module = QKNormMultiheadAttention(embed_dim, num_heads, **{"g0": G0, **options}).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("weight"):
                parameter.copy_(torch.eye(embed_dim))
            elif name.endswith("bias"):
                parameter.zero_()
    return module


def randn(*shape: int, generator: torch.Generator | None = None, seed: int = 0) -> Tensor:
    generator = generator or torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_inputs(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value; the same tensor where such a layer gets the same one."""
    query = randn(T, B, E, seed=10).to(dtype)
    if kind == "self":
        return query, query, query
    source = randn(5, B, 6, seed=11).to(dtype)
    if kind == "cross":
        return query, source, source
    return query, source, randn(5, B, 5, seed=12).to(dtype)


def causal_mask(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((rows, columns), NEG_INF, dtype=dtype).triu(1)


def make_masks(name: str, src_len: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Arguments for forward(). No mask hides all keys of a query."""
    masks: dict[str, Tensor] = {}
    if "padding" in name:
        padding = torch.zeros(B, src_len, dtype=torch.bool)
        padding[1, -2:] = True
        masks["key_padding_mask"] = padding
    if "causal" in name:
        masks["attn_mask"] = causal_mask(T, src_len, dtype)
    if "bool" in name:
        masks["attn_mask"] = randn(T, src_len, seed=13) > 0.3
        masks["attn_mask"][:, 0] = False
    if "finite" in name:
        masks["attn_mask"] = randn(T, src_len, seed=14).to(dtype)
    return masks


def float64_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's weights as float64 leaves for the reference."""
    state = module.state_dict().items()
    return {name: weight.detach().double().clone().requires_grad_() for name, weight in state}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Largest difference at most `tolerance`, relative to the largest entry if that exceeds 1."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    scale = max(1.0, expected.abs().max().item())
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance * scale, f"{what}: differs by {error:.3g}, values up to {scale:.3g}"


def assert_matches_reference(
    module: QKNormMultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    masks: dict[str, Tensor],
    tolerance: float,
    add_zero_attn: bool = False,
) -> None:
    """Output, weights of each head and every gradient, with and without returned weights."""
    leaves = {id(x): x.detach().double().requires_grad_() for x in inputs}
    weights = float64_weights(module)
    expected, expected_weights, _ = reference_attention(
        weights, module.num_heads, *(leaves[id(x)] for x in inputs), **masks,
        add_zero_attn=add_zero_attn,
    )  # fmt: skip
    upstream = randn(*expected.shape, seed=20)
    wanted = {**weights, **{f"input {i}": leaf for i, leaf in enumerate(leaves.values())}}
    grads = torch.autograd.grad((expected * upstream).sum(), list(wanted.values()))
    expected_grads = dict(zip(wanted, grads, strict=True))

    for need_head_weights in (True, False):
        module.zero_grad()
        own = {id(x): x.detach().clone().requires_grad_() for x in inputs}
        output, head_weights = module(
            *(own[id(x)] for x in inputs),
            need_weights=False,
            need_head_weights=need_head_weights,
            **masks,
        )
        case = "with weights" if need_head_weights else "without weights"
        assert output.dtype == inputs[0].dtype
        assert_near(output, expected, tolerance, f"output {case}")
        if need_head_weights:
            assert_near(head_weights, expected_weights, tolerance, "head weights")
        else:
            assert head_weights is None
        (output * upstream.to(output.dtype)).sum().backward()
        actual = {name: p.grad for name, p in module.named_parameters()}
        actual |= {f"input {i}": leaf.grad for i, leaf in enumerate(own.values())}
        assert actual.keys() == expected_grads.keys()
        for name, grad in expected_grads.items():
            assert_near(actual[name], grad, tolerance, f"gradient of {name} {case}")


# ---------------------------------------------------------------------------------------------
# 1. The formula
# ---------------------------------------------------------------------------------------------


def test_reference_against_a_case_worked_out_by_hand() -> None:
    # q = (3, 4) has direction (0.6, 0.8); keys (2, 0) and (0, 5) have directions (1, 0), (0, 1).
    # With g = 10 the logits are 6 and 8, whatever the lengths were.
    eye = torch.eye(2, dtype=torch.float64)
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    weights = {f"{name}.weight": eye for name in names} | {"g": torch.tensor(10.0).double()}
    query = torch.tensor([[[3.0, 4.0]]]).double()
    keys = torch.tensor([[[2.0, 0.0]], [[0.0, 5.0]]]).double()
    output, head_weights, logits = reference_attention(weights, 1, query, keys, keys)
    torch.testing.assert_close(logits[0, 0, 0], torch.tensor([6.0, 8.0]).double())
    second = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(head_weights[0, 0, 0, 1].item(), second)
    expected = torch.tensor([2 * (1 - second), 5 * second]).double()
    torch.testing.assert_close(output[0, 0], expected)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_reference_in_float64(kind: str, mask: str, bias: bool) -> None:
    module = make_module(bias=bias, **KINDS[kind])
    inputs = make_inputs(kind)
    assert_matches_reference(module, inputs, make_masks(mask, len(inputs[1])), 1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_reference_in_float32(kind: str, mask: str) -> None:
    module = make_module(**KINDS[kind]).float()
    inputs = make_inputs(kind, torch.float32)
    masks = make_masks(mask, len(inputs[1]), torch.float32)
    assert_matches_reference(module, inputs, masks, 1e-5)


def test_training_mode_without_dropout_matches_reference() -> None:
    module = make_module(self_attention=True, dropout=0.0).train()
    assert_matches_reference(module, make_inputs("self"), make_masks("padding", T), 1e-9)


@pytest.mark.parametrize("num_heads", [1, 8], ids=["one head", "heads of one number"])
def test_matches_reference_with_extreme_head_counts(num_heads: int) -> None:
    module = make_module(num_heads=num_heads, self_attention=True)
    assert_matches_reference(module, make_inputs("self"), {}, 1e-9)


def test_byte_padding_mask_means_the_same_as_bool() -> None:
    module = make_module(self_attention=True)
    x, _, _ = make_inputs("self")
    padding = make_masks("padding", T)["key_padding_mask"]
    expected, _ = module(x, x, x, key_padding_mask=padding)
    actual, _ = module(x, x, x, key_padding_mask=padding.to(torch.uint8))
    assert_near(actual, expected, 1e-12)


def test_forward_changes_none_of_its_arguments() -> None:
    module = make_module(self_attention=True)
    x, _, _ = make_inputs("self")
    masks = make_masks("padding and causal", T)
    before = copy.deepcopy((x, masks, module.state_dict()))
    module(x, x, x, **masks)
    torch.testing.assert_close((x, masks, module.state_dict()), before, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------
# 2. Attention dropout
# ---------------------------------------------------------------------------------------------


def make_dropout_probe(dropout: float, length: int, num_heads: int, bsz: int, tgt_len: int):
    """A module whose output *is* its attention weights, after dropout.

    Value s is the s-th unit vector in every head, and v_proj and out_proj are the identity, so
    output[t, b, h * length + s] is the weight that head h of query t gives to key s.
    """
    width = length * num_heads
    module = make_module(width, num_heads, g0=1.0, dropout=dropout)
    with torch.no_grad():
        for projection in (module.v_proj, module.out_proj):
            projection.weight.copy_(torch.eye(width))
            projection.bias.zero_()
    module = module.float().train()
    query = randn(tgt_len, bsz, width, seed=30).float()
    key = randn(length, bsz, width, seed=31).float()
    value = torch.eye(length).repeat(1, num_heads).unsqueeze(1).expand(length, bsz, width)

    def dropped_weights(need_weights: bool = False) -> Tensor:
        output, _ = module(query, key, value, need_weights=need_weights)
        return output.detach().view(tgt_len, bsz, num_heads, length).permute(2, 1, 0, 3)

    def returned_weights() -> Tensor:
        return module(query, key, value, need_head_weights=True)[1].detach()

    return module, dropped_weights, returned_weights


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_zeroes_a_share_p_of_the_weights_and_scales_up_the_rest(
    dropout: float, need_weights: bool
) -> None:
    module, dropped_weights, _ = make_dropout_probe(dropout, 16, 2, 4, 64)
    torch.manual_seed(0)
    dropped = dropped_weights(need_weights)
    module.eval()
    weights = dropped_weights(need_weights)
    zeroed = dropped == 0
    assert abs(zeroed.float().mean().item() - dropout) < 0.03  # 8,192 draws: 5 sigma
    torch.testing.assert_close(
        dropped[~zeroed], weights[~zeroed] / (1 - dropout), rtol=1e-4, atol=1e-7
    )


def test_dropout_masks_of_different_weights_are_independent() -> None:
    # A mask read from the bits of shared random numbers could repeat itself at some distance.
    _, dropped_weights, _ = make_dropout_probe(0.3, 16, 2, 4, 64)
    torch.manual_seed(1)
    zeroed = (dropped_weights() == 0).flatten().float()
    assert 0.2 < zeroed.mean() < 0.4
    for distance in (1, 2, 3, 4, 8, 16, 64, 1024, 2048, 4096):
        both = (zeroed * zeroed.roll(distance)).mean().item()
        assert abs(both - 0.3**2) < 0.02, f"weights {distance} apart are dropped together"


def test_every_weight_is_dropped_equally_often_and_the_mean_is_kept() -> None:
    # 15 weights: a number that no power of two divides.
    module, dropped_weights, _ = make_dropout_probe(0.3, 5, 1, 1, 3)
    torch.manual_seed(2)
    draws = torch.stack([dropped_weights() for _ in range(600)])
    module.eval()
    weights = dropped_weights()
    share = (draws == 0).float().mean(dim=0)
    assert (share - 0.3).abs().max() < 0.1  # sigma is 0.019
    # The kept weight is w / 0.7, so one draw has a deviation of w * sqrt(0.3 / 0.7).
    sigma = weights * math.sqrt(0.3 / 0.7 / 600)
    assert ((draws.mean(dim=0) - weights).abs() < 5 * sigma).all()


def test_dropout_differs_between_calls_and_repeats_with_the_seed() -> None:
    _, dropped_weights, _ = make_dropout_probe(0.3, 16, 2, 2, 8)
    torch.manual_seed(3)
    first, second = dropped_weights(), dropped_weights()
    torch.manual_seed(3)
    again = dropped_weights()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_dropout_is_off_in_evaluation_mode() -> None:
    module, dropped_weights, returned_weights = make_dropout_probe(0.5, 16, 2, 2, 8)
    assert (dropped_weights() == 0).any()
    module.eval()
    assert_near(dropped_weights(), returned_weights(), 1e-6)
    assert_near(dropped_weights().sum(-1), torch.ones(2, 2, 8), 1e-5)


def test_returned_weights_are_those_before_dropout() -> None:
    module, dropped_weights, returned_weights = make_dropout_probe(0.5, 16, 2, 2, 8)
    training = returned_weights()
    assert (dropped_weights() == 0).any()
    module.eval()
    assert_near(training, returned_weights(), 1e-7)


@pytest.mark.parametrize("need_weights", [False, True])
def test_gradient_uses_the_same_dropout_mask_as_the_output(need_weights: bool) -> None:
    module = make_module(4, 2, dropout=0.4).train()
    inputs = [randn(3, 1, 4, seed=seed).requires_grad_() for seed in (40, 41, 42)]

    def seeded(query: Tensor, key: Tensor, value: Tensor, g: Tensor) -> Tensor:
        torch.manual_seed(4)
        arguments = ((query, key, value), {"need_weights": need_weights})
        return torch.func.functional_call(module, {"g": g}, *arguments)[0]

    g = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        dropped = seeded(*inputs, g)
        assert not torch.allclose(dropped, module.eval()(*inputs)[0])
    module.train()
    assert torch.autograd.gradcheck(seeded, (*inputs, g))


# ---------------------------------------------------------------------------------------------
# 3. Returned weights
# ---------------------------------------------------------------------------------------------


def test_no_weights_unless_asked_for() -> None:
    module = make_module(**KINDS["cross"])
    inputs = make_inputs("cross")
    with_weights, weights = module(*inputs, need_weights=True)
    without_weights, none = module(*inputs, need_weights=False)
    assert none is None
    assert weights.shape == (B, T, 5)
    assert_near(without_weights, with_weights, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_average_weights_are_the_mean_over_heads(kind: str) -> None:
    module = make_module(**KINDS[kind])
    inputs = make_inputs(kind)
    _, average = module(*inputs, need_weights=True)
    _, by_head = module(*inputs, need_head_weights=True)
    assert by_head.shape == (H, B, T, len(inputs[1]))
    assert not torch.allclose(by_head[0], by_head[1])
    assert_near(average, by_head.mean(dim=0), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_sum_to_one_and_masked_keys_get_exactly_nothing(dtype: torch.dtype) -> None:
    module = make_module(**KINDS["cross"]).to(dtype)
    inputs = make_inputs("cross", dtype)
    masks = make_masks("padding and causal", 5, dtype)
    _, weights = module(*inputs, need_head_weights=True, **masks)
    hidden = masks["key_padding_mask"][:, None, :] | (masks["attn_mask"] == NEG_INF)
    hidden = hidden.expand(H, B, T, 5)
    assert hidden.any()
    assert (weights[hidden] == 0).all()
    assert (weights[~hidden] > 0).all()
    rounding = 8 * torch.finfo(dtype).eps
    assert_near(weights.double().sum(-1), torch.ones(H, B, T).double(), rounding)


def test_content_of_padded_keys_does_not_matter() -> None:
    module = make_module(**KINDS["cross"])
    query, source, _ = make_inputs("cross")
    padding = make_masks("padding", 5)["key_padding_mask"]
    expected, _ = module(query, source, source, key_padding_mask=padding)
    changed = source.clone()
    changed[padding.T] = 1e6
    actual, _ = module(query, changed, changed, key_padding_mask=padding)
    assert_near(actual, expected, 1e-12)


# ---------------------------------------------------------------------------------------------
# 4. Incremental decoding
# ---------------------------------------------------------------------------------------------


def cached(module: QKNormMultiheadAttention, state: dict) -> dict[str, Tensor | None]:
    return module._get_input_buffer(state)


@pytest.mark.parametrize("add_zero_attn", [False, True])
def test_self_attention_step_by_step_equals_full_causal_attention(add_zero_attn: bool) -> None:
    module = make_module(self_attention=True, add_zero_attn=add_zero_attn)
    x = randn(6, 3, E, seed=50)
    full, full_weights = module(x, x, x, attn_mask=causal_mask(6, 6))
    state: dict = {}
    for t in range(6):
        step = x[t : t + 1]
        output, weights = module(step, step, step, incremental_state=state)
        assert_near(output, full[t : t + 1], 1e-12, f"step {t}")
        assert weights.shape == (3, 1, t + 1 + add_zero_attn)
        assert_near(weights[:, 0, : t + 1], full_weights[:, t, : t + 1], 1e-12, f"step {t}")


def test_padding_that_comes_and_goes_step_by_step_equals_full_attention() -> None:
    # As fairseq's decoder does it: a step has a padding mask only if a token of it is padding.
    module = make_module(self_attention=True)
    x = randn(6, 3, E, seed=51)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 2] = padding[2, 2] = padding[2, 4] = True
    full, full_weights = module(x, x, x, key_padding_mask=padding, attn_mask=causal_mask(6, 6))
    state: dict = {}
    for t in range(6):
        step = x[t : t + 1]
        mask = padding[:, t : t + 1] if padding[:, t].any() else None
        output, weights = module(step, step, step, key_padding_mask=mask, incremental_state=state)
        assert_near(output, full[t : t + 1], 1e-12, f"step {t}")
        assert_near(weights[:, 0], full_weights[:, t, : t + 1], 1e-12, f"step {t}")
        assert (weights[:, 0][padding[:, : t + 1]] == 0).all()


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_step_by_step_uses_the_source_of_the_first_step(padded: bool) -> None:
    module = make_module(**KINDS["cross"])
    query, source, _ = make_inputs("cross")
    mask = make_masks("padding", 5)["key_padding_mask"] if padded else None
    full, full_weights = module(query, source, source, key_padding_mask=mask)
    state: dict = {}
    for t in range(T):
        # After the first step the source is cached: what is passed again must not be looked at.
        given = source if t == 0 else torch.full_like(source, float("nan"))
        output, weights = module(
            query[t : t + 1],
            given,
            given,
            key_padding_mask=mask,
            incremental_state=state,
            static_kv=True,
        )
        assert_near(output, full[t : t + 1], 1e-12, f"step {t}")
        assert_near(weights, full_weights[:, t : t + 1], 1e-12, f"step {t}")


def test_static_source_without_incremental_state_is_plain_attention() -> None:
    # So fairseq's decoder layer calls its cross attention in training.
    module = make_module(**KINDS["cross"])
    inputs = make_inputs("cross")
    masks = make_masks("padding", 5)
    expected, _ = module(*inputs, **masks)
    actual, _ = module(*inputs, static_kv=True, **masks)
    assert_near(actual, expected, 1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_cached_keys_have_length_one(padded: bool) -> None:
    module = make_module(self_attention=True)
    x = randn(3, B, E, seed=52) * 7
    state: dict = {}
    for t in range(3):
        step = x[t : t + 1]
        mask = torch.tensor([[False], [t == 1]]) if padded else None
        module(step, step, step, key_padding_mask=mask, incremental_state=state)
    keys, values = cached(module, state)["prev_key"], cached(module, state)["prev_value"]
    assert keys.shape == values.shape == (B, H, 3, D)
    assert_near(keys.norm(dim=-1), torch.ones(B, H, 3), 1e-12)
    weights = float64_weights(module)
    for b in range(B):
        for t in range(3):
            key = project(weights, "k_proj", x[t, b]).view(H, D)
            value = project(weights, "v_proj", x[t, b]).view(H, D)
            for h in range(H):
                assert_near(keys[b, h, t], normalize(key[h]), 1e-12)
                assert_near(values[b, h, t], value[h], 1e-12)


def test_cached_keys_of_cross_attention_have_length_one() -> None:
    module = make_module(**KINDS["cross"])
    query, source, _ = make_inputs("cross")
    state: dict = {}
    for t in range(2):
        step = query[t : t + 1]
        module(step, source, source, incremental_state=state, static_kv=True)
        keys = cached(module, state)["prev_key"]
        assert keys.shape == (B, H, 5, D)
        assert_near(keys.norm(dim=-1), torch.ones(B, H, 5), 1e-12)


def test_cached_keys_are_not_normalized_again() -> None:
    # Halve the cached keys: logits against them must halve too, so no work is done twice.
    module = make_module(**KINDS["cross"])
    query, source, _ = make_inputs("cross")
    state: dict = {}
    options = {"incremental_state": state, "static_kv": True, "before_softmax": True}
    logits, _ = module(query, source, source, **options)
    buffer = cached(module, state)
    module._set_input_buffer(state, {**buffer, "prev_key": buffer["prev_key"] / 2})
    halved, _ = module(query, source, source, **options)
    assert_near(halved, logits / 2, 1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_reordering_beams_moves_the_cached_history(padded: bool) -> None:
    module = make_module(self_attention=True)
    history, new = randn(3, 3, E, seed=53), randn(1, 3, E, seed=54)
    order = torch.tensor([2, 0, 0])
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[2, 1] = padded
    state: dict = {}
    for t in range(3):
        step = history[t : t + 1]
        mask = padding[:, t : t + 1] if padded else None
        module(step, step, step, key_padding_mask=mask, incremental_state=state)
    module.reorder_incremental_state(state, order)
    output, weights = module(new, new, new, incremental_state=state)

    sequence = torch.cat([history[:, order], new])
    masks = {"key_padding_mask": padding[order]} if padded else {}
    options = {"attn_mask": causal_mask(4, 4), **masks}
    expected, expected_weights = module(sequence, sequence, sequence, **options)
    assert_near(output, expected[3:], 1e-12)
    assert_near(weights, expected_weights[:, 3:], 1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_finished_sentences_leave_the_cached_source(padded: bool) -> None:
    # Beams only change places within a sentence, so fairseq skips a reordering that keeps the
    # number of sources; when a sentence ends, the sources of the others must stay.
    module = make_module(**KINDS["cross"])
    query, source, _ = make_inputs("cross")
    mask = make_masks("padding", 5)["key_padding_mask"] if padded else None
    state: dict = {}
    options = {"incremental_state": state, "static_kv": True}
    module(query[:1], source, source, key_padding_mask=mask, **options)
    module.reorder_incremental_state(state, torch.tensor([1]))
    rest, rest_mask = source[:, 1:], None if mask is None else mask[1:]
    output, _ = module(query[1:2, 1:], rest, rest, key_padding_mask=rest_mask, **options)
    expected, _ = module(query[1:2, 1:], rest, rest, key_padding_mask=rest_mask)
    assert_near(output, expected, 1e-12)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_history_can_be_given_without_a_padding_mask(kind: str) -> None:
    # fairseq's decoder layer takes (keys, values) of earlier steps and stores just these two.
    module = make_module(**KINDS[kind])
    query, source, _ = make_inputs(kind)
    static = kind == "cross"
    options = {"incremental_state": {}, "static_kv": static}
    module(query[:1], source[: None if static else 1], source[: None if static else 1], **options)
    buffer = cached(module, options["incremental_state"])
    history = {"prev_key": buffer["prev_key"].clone(), "prev_value": buffer["prev_value"].clone()}
    step = (query[1:2], source, source) if static else (query[1:2],) * 3
    expected, _ = module(*step, **options)

    state: dict = {}
    module._set_input_buffer(state, history)
    output, _ = module(*step, incremental_state=state, static_kv=static)
    assert_near(output, expected, 1e-12)


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated source", "one source"])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_of_a_sentence_share_its_source(repeated: bool, padded: bool) -> None:
    """set_beam_size: one cached source a sentence serves all of its beams.

    fairseq gives such a module the encoder output repeated for each beam, or once a sentence
    (BART); in both cases it keeps one copy and the result is that of plain attention.
    """
    beam, sentences = 3, 2
    module = make_module(**KINDS["cross"])
    source = randn(5, sentences, 6, seed=55)
    query = randn(3, sentences * beam, E, seed=56)
    mask = make_masks("padding", 5)["key_padding_mask"] if padded else None
    every = source.repeat_interleave(beam, dim=1)
    every_mask = None if mask is None else mask.repeat_interleave(beam, dim=0)
    full, full_weights = module(query, every, every, key_padding_mask=every_mask)

    module.set_beam_size(beam)
    given, given_mask = (every, every_mask) if repeated else (source, mask)
    state: dict = {}
    options = {"incremental_state": state, "static_kv": True, "key_padding_mask": given_mask}
    for t in range(3):
        output, weights = module(query[t : t + 1], given, given, **options)
        assert cached(module, state)["prev_key"].shape == (sentences, H, 5, D)
        assert_near(output, full[t : t + 1], 1e-12, f"step {t}")
        assert_near(weights, full_weights[:, t : t + 1], 1e-12, f"step {t}")
        # Beams change places within their sentence, which shares one source.
        module.reorder_incremental_state(state, torch.tensor([1, 0, 2, 5, 5, 3]))


def test_finished_sentences_leave_the_shared_source() -> None:
    # Three sentences of two beams; the first one ends, so fairseq keeps beams 2 to 5.
    module = make_module(**KINDS["cross"])
    source = randn(5, 3, 6, seed=57)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[2, 3:] = True
    query = randn(1, 6, E, seed=58)
    every, every_mask = source.repeat_interleave(2, dim=1), padding.repeat_interleave(2, dim=0)
    remaining = torch.tensor([2, 3, 4, 5])
    query_after = randn(1, 4, E, seed=59)
    expected, _ = module(
        query_after, every[:, remaining], every[:, remaining], key_padding_mask=every_mask[2:]
    )

    module.set_beam_size(2)
    state: dict = {}
    options = {"incremental_state": state, "static_kv": True}
    module(query, every, every, key_padding_mask=every_mask, **options)
    module.reorder_incremental_state(state, remaining)
    assert cached(module, state)["prev_key"].size(0) == 2
    after, _ = module(
        query_after,
        every[:, remaining],
        every[:, remaining],
        key_padding_mask=every_mask[2:],
        **options,
    )
    assert_near(after, expected, 1e-12)


def test_beam_size_does_not_change_attention_without_a_cache() -> None:
    # Scoring a batch of different sentences with a model that has generated before.
    module = make_module(**KINDS["cross"])
    inputs = make_inputs("cross")
    expected, _ = module(*inputs)
    module.set_beam_size(2)
    actual, _ = module(*inputs)
    assert_near(actual, expected, 1e-12)


# ---------------------------------------------------------------------------------------------
# 5. Numerics
# ---------------------------------------------------------------------------------------------

LOW_PRECISION = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A vector below the first length has no direction; one of the second length has.
SHORT = {
    torch.float64: (1e-13, 1e-11),
    torch.float32: (1e-13, 1e-11),
    torch.bfloat16: (1e-13, 1e-11),
    torch.float16: (2.0**-15, 2.0**-13),
}


def all_finite(module: torch.nn.Module, *tensors: Tensor) -> bool:
    grads = [p.grad for p in module.parameters()] + [x.grad for x in tensors if x.is_leaf]
    return all(x is not None and bool(torch.isfinite(x).all()) for x in [*grads, *tensors])


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_low_precision_is_near_the_reference(dtype: torch.dtype) -> None:
    module = make_module(**KINDS["cross"]).to(dtype)
    inputs = make_inputs("cross", dtype)
    masks = make_masks("padding and causal", 5, dtype)
    expected, weights, _ = reference_attention(
        float64_weights(module), H, *(x.double() for x in inputs), **masks
    )
    output, by_head = module(*inputs, need_head_weights=True, **masks)
    assert output.dtype == dtype
    assert_near(output, expected, LOW_PRECISION[dtype])
    assert_near(by_head, weights, LOW_PRECISION[dtype])


def test_bfloat16_autocast_is_near_the_reference() -> None:
    module = make_module(**KINDS["cross"]).float()
    query, source, _ = make_inputs("cross", torch.float32)
    masks = make_masks("padding", 5)
    expected, _, _ = reference_attention(
        float64_weights(module), H, query.double(), source.double(), source.double(), **masks
    )
    query.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = module(query, source, source, need_weights=False, **masks)
    assert_near(output, expected, 3e-2)
    output.float().sum().backward()
    assert all_finite(module, query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_zero_queries_and_keys_attend_evenly_with_zero_gradient(
    dtype: torch.dtype, need_weights: bool
) -> None:
    module = make_module()
    with torch.no_grad():
        module.q_proj.bias.zero_()
        module.k_proj.bias.zero_()
    module = module.to(dtype)
    query = torch.zeros(T, B, E, dtype=dtype, requires_grad=True)
    key = torch.zeros(5, B, E, dtype=dtype, requires_grad=True)
    value = randn(5, B, E, seed=60).to(dtype).requires_grad_()
    output, _ = module(query, key, value, need_weights=need_weights)
    even = module.out_proj(module.v_proj(value)).mean(0, keepdim=True).expand(T, B, E)
    assert_near(output, even, 8 * torch.finfo(dtype).eps)
    output.sum().backward()
    assert all_finite(module, query, key, value)
    assert (query.grad == 0).all()
    assert (key.grad == 0).all()
    assert (value.grad != 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_query_among_others_gives_no_gradient_to_itself_only(dtype: torch.dtype) -> None:
    module = make_identity_module(E, H).to(dtype)
    query, key, value = (randn(4, 1, E, seed=seed).to(dtype) for seed in (61, 62, 63))
    query[1] = 0
    query.requires_grad_()
    output, weights = module(query, key, value)
    output.square().sum().backward()
    assert all_finite(module, query)
    assert (query.grad[1] == 0).all()
    assert (query.grad[[0, 2, 3]].abs().sum(-1) > 0).all()
    assert_near(weights[0, 1], torch.full((4,), 0.25), 1e-6)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_too_short_to_have_a_direction_counts_as_zero(
    dtype: torch.dtype, side: str
) -> None:
    module = make_identity_module(4, 1, g0=2.0).to(dtype)
    unit = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=dtype).view(1, 1, 4)
    for length, expected_logit in zip(SHORT[dtype], (0.0, 2.0), strict=True):
        short = (unit * length).requires_grad_()
        query, key = (short, unit) if side == "query" else (unit, short)
        logits, _ = module(query, key, key, before_softmax=True)
        assert_near(logits.view(1), torch.tensor([expected_logit]), 4e-3)
        # The direction across the vector is the one in which its logit could change.
        other = torch.ones_like(unit)
        query, key = (short, other) if side == "query" else (other, short)
        logits, _ = module(query, key, key, before_softmax=True)
        (grad,) = torch.autograd.grad(logits.sum(), short)
        assert torch.isfinite(grad).all()
        assert (grad == 0).all() == (expected_logit == 0)


@pytest.mark.parametrize("exponent", [-100, -50, -36, -20, 20, 60, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lengths_from_1e_minus_30_to_1e30(dtype: torch.dtype, exponent: int) -> None:
    """Queries and keys 2^exponent times as long: same output, gradients 2^-exponent times."""
    module = make_identity_module(E, H).to(dtype)
    value = randn(4, 1, E, seed=66).to(dtype)

    def run(scale: float) -> tuple[Tensor, Tensor, Tensor]:
        query, key = (
            (randn(4, 1, E, seed=seed).to(dtype) * scale).requires_grad_() for seed in (64, 65)
        )
        module.zero_grad()
        output, _ = module(query, key, value, need_weights=False)
        output.square().sum().backward()
        assert all_finite(module, query, key)
        return output.detach(), query.grad * scale, key.grad * scale

    scaled, plain = run(2.0**exponent), run(1.0)
    if exponent > -40:
        for actual, expected in zip(scaled, plain, strict=True):
            assert_near(actual, expected, 4 * torch.finfo(dtype).eps)
    else:  # shorter than 1e-12: no direction
        assert_near(scaled[0], value.mean(0, keepdim=True).expand(4, 1, E), 1e-2)
        assert (scaled[1] == 0).all()
        assert (scaled[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_vectors_whose_squares_overflow_keep_their_direction(dtype: torch.dtype) -> None:
    # float16 holds up to 65504: the entries fit, their sum of squares and even their length not.
    large = 6e4 if dtype == torch.float16 else 1e30
    module = make_identity_module(E, H).to(dtype)
    signs = [randn(4, 1, E, seed=seed).sign().to(dtype) for seed in (67, 68)]
    value = randn(4, 1, E, seed=69).to(dtype)
    expected, expected_weights = module(*signs, value)
    query, key = ((x * large).requires_grad_() for x in signs)
    output, weights = module(query, key, value)
    output.square().sum().backward()
    assert all_finite(module, query, key)
    assert_near(output, expected, 8 * torch.finfo(dtype).eps)
    assert_near(weights, expected_weights, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_output_does_not_depend_on_the_scale_of_queries_or_keys(projection: str) -> None:
    module = make_module(**KINDS["separate key and value"])
    inputs = make_inputs("separate key and value")
    expected, expected_weights = module(*inputs)
    with torch.no_grad():
        for parameter in getattr(module, projection).parameters():
            parameter.mul_(1000)
    output, weights = module(*inputs)
    assert_near(output, expected, 1e-12)
    assert_near(weights, expected_weights, 1e-12)


def test_output_is_linear_in_the_values() -> None:
    # Values are not normalized.
    module = make_module(bias=False)
    query, key, value = (randn(T, B, E, seed=seed) for seed in (70, 71, 72))
    once, _ = module(query, key, value)
    thousandfold, _ = module(query, key, 1000 * value)
    assert_near(thousandfold, 1000 * once, 1e-12)


# ---------------------------------------------------------------------------------------------
# 6. g
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [12.32, 0.5, -2.0])
def test_logits_are_g_times_cosines(kind: str, g: float) -> None:
    module = make_module(g0=g, **KINDS[kind])
    inputs = tuple(100 * x for x in make_inputs(kind))
    if kind != "separate key and value":
        inputs = (inputs[0], inputs[1], inputs[1])
    if kind == "self":
        inputs = (inputs[0],) * 3
    logits, _ = module(*inputs, before_softmax=True)
    assert logits.shape == (B * H, T, len(inputs[1]))
    assert logits.abs().max() <= abs(g) * (1 + 1e-12)
    _, _, expected = reference_attention(float64_weights(module), H, *inputs)
    assert_near(logits.view(B, H, T, -1).transpose(0, 1), expected, 1e-9)


def test_a_key_along_the_query_has_the_logit_g() -> None:
    module = make_identity_module(4, 1, g0=12.32)
    query = randn(1, 1, 4, seed=73)
    logits, _ = module(query, torch.cat([5 * query, -query]), query.repeat(2, 1, 1),
                       before_softmax=True)  # fmt: skip
    assert_near(logits.flatten(), torch.tensor([12.32, -12.32]).double(), 1e-6)


def test_g_is_one_learnable_number_that_starts_at_g0() -> None:
    module = QKNormMultiheadAttention(E, H, self_attention=True, g0=12.32)
    assert isinstance(module.g, torch.nn.Parameter)
    assert module.g.shape == ()
    assert module.g.item() == pytest.approx(12.32)
    x = randn(T, B, E, seed=74).float()
    module(x, x, x)[0].square().sum().backward()
    assert module.g.grad != 0
    before = module.g.item()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert module.g.item() != before


def test_g0_must_be_given() -> None:
    with pytest.raises(ValueError, match="g0"):
        QKNormMultiheadAttention(E, H)


@pytest.mark.parametrize(
    ("length", "expected"), [(72, 12.32), (75, 12.44), (79, 12.59), (2, 1.0), (72.0, 12.32)]
)
def test_g0_from_length(length: float, expected: float) -> None:
    assert round(g0_from_length(length), 2) == expected


@pytest.mark.parametrize("length", [1, 0, -72, 1.9])
def test_g0_needs_a_length_of_two(length: float) -> None:
    with pytest.raises(ValueError):
        g0_from_length(length)


# ---------------------------------------------------------------------------------------------
# 7. State dict
# ---------------------------------------------------------------------------------------------

STATE_OPTIONS = [
    {"self_attention": True},
    {"encoder_decoder_attention": True, "kdim": 6, "vdim": 6},
    {"bias": False, "kdim": 6, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
]


@pytest.mark.parametrize("options", STATE_OPTIONS)
def test_state_dict_is_that_of_fairseq_and_g(options: dict) -> None:
    ours = QKNormMultiheadAttention(E, H, g0=G0, **options).state_dict()
    theirs = MultiheadAttention(E, H, **options).state_dict()
    assert set(ours) == {*theirs, "g"}
    assert {name: ours[name].shape for name in theirs} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize("options", STATE_OPTIONS)
def test_weights_of_fairseqs_attention_load(options: dict) -> None:
    theirs = MultiheadAttention(E, H, **options)
    module = QKNormMultiheadAttention(E, H, g0=5.5, **options)
    state = theirs.state_dict()
    module.upgrade_state_dict_named(state, "")
    module.load_state_dict(state, strict=True)
    assert module.g.item() == 5.5
    for name, weight in theirs.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name


def test_weights_load_into_fairseqs_attention_except_g() -> None:
    module = make_module(self_attention=True)
    theirs = MultiheadAttention(E, H, self_attention=True)
    result = theirs.load_state_dict(module.state_dict(), strict=False)
    assert result.unexpected_keys == ["g"]
    assert result.missing_keys == []


def test_upgrade_adds_g_under_the_modules_name_only() -> None:
    prefix = "decoder.layers.0.encoder_attn"
    theirs = MultiheadAttention(E, H)
    state = {f"{prefix}.{name}": weight for name, weight in theirs.state_dict().items()}
    state["decoder.layers.1.encoder_attn.out_proj.bias"] = torch.zeros(E)
    before = set(state)
    module = QKNormMultiheadAttention(E, H, g0=5.5)
    module.upgrade_state_dict_named(state, prefix)
    assert set(state) - before == {f"{prefix}.g"}
    assert before <= set(state)
    assert state[f"{prefix}.g"].shape == ()
    assert state[f"{prefix}.g"].item() == 5.5


def test_upgrade_keeps_a_trained_g() -> None:
    module = QKNormMultiheadAttention(E, H, g0=5.5)
    state = {"layer.g": torch.tensor(9.25)}
    module.upgrade_state_dict_named(state, "layer")
    assert state == {"layer.g": torch.tensor(9.25)}


def test_upgrade_splits_the_joint_projection_of_old_checkpoints() -> None:
    module = QKNormMultiheadAttention(E, H, self_attention=True, g0=5.5)
    old = {name: w for name, w in module.state_dict().items() if name.startswith("out_proj")}
    joint, joint_bias = randn(3 * E, E, seed=75).float(), randn(3 * E, seed=76).float()
    old |= {"in_proj_weight": joint, "in_proj_bias": joint_bias}
    module.upgrade_state_dict_named(old, "")
    module.load_state_dict(old, strict=True)
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        projection = getattr(module, name)
        assert torch.equal(projection.weight, joint[part * E : (part + 1) * E])
        assert torch.equal(projection.bias, joint_bias[part * E : (part + 1) * E])


def test_save_and_load_give_the_same_output() -> None:
    module = make_module(self_attention=True)
    with torch.no_grad():
        module.g.fill_(9.25)
    other = make_module(self_attention=True, seed=2)
    x, _, _ = make_inputs("self")
    assert not torch.allclose(other(x, x, x)[0], module(x, x, x)[0])
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])


# ---------------------------------------------------------------------------------------------
# 8. Against fairseq's scaled dot-product attention
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_equals_fairseqs_attention_where_all_lengths_are_known(mask: str) -> None:
    """If |q| = a and |k| = b everywhere, q k / sqrt(d) = (a b / sqrt(d)) cos: g = a b / sqrt(d).

    Each head's projection is a rotation, so projecting keeps the lengths of the inputs' heads.
    """
    a, b = 3.0, 2.5
    module = make_module(g0=a * b / math.sqrt(D))
    with torch.no_grad():
        for seed, projection in enumerate((module.q_proj, module.k_proj)):
            rotations = [torch.linalg.qr(randn(D, D, seed=80 + H * seed + h))[0] for h in range(H)]
            projection.weight.copy_(torch.block_diag(*rotations))
            projection.bias.zero_()

    def with_length(length: float, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (H, D))
        return (length * heads / heads.norm(dim=-1, keepdim=True)).flatten(-2)

    query, key = with_length(a, randn(T, B, E, seed=85)), with_length(b, randn(5, B, E, seed=86))
    value = randn(5, B, E, seed=87)
    theirs = MultiheadAttention(E, H).double().eval()
    theirs.load_state_dict(module.state_dict(), strict=False)
    masks = make_masks(mask, 5)
    expected, expected_weights = theirs(query, key, value, **masks)
    output, weights = module(query, key, value, **masks)
    assert_near(output, expected, 1e-12)
    assert_near(weights, expected_weights, 1e-12)

    # Without the known lengths they differ: the case above does not hold for trivial reasons.
    unequal = query * torch.linspace(0.5, 4.0, T).view(T, 1, 1).double()
    differing, _ = theirs(unequal, key, value, **masks)
    unchanged, _ = module(unequal, key, value, **masks)
    assert not torch.allclose(differing, expected)
    assert_near(unchanged, output, 1e-12)


# ---------------------------------------------------------------------------------------------
# 9. Added keys
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("add_bias_kv", "add_zero_attn"), [(True, False), (False, True), (True, True)]
)
def test_added_keys_match_the_reference(mask: str, add_bias_kv: bool, add_zero_attn: bool) -> None:
    module = make_module(
        add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, **KINDS["separate key and value"]
    )
    inputs = make_inputs("separate key and value")
    masks = make_masks(mask, 5)
    assert_matches_reference(module, inputs, masks, 1e-9, add_zero_attn=add_zero_attn)


def test_the_added_key_is_normalized_and_the_zero_key_has_logit_zero() -> None:
    module = make_module(add_bias_kv=True, add_zero_attn=True)
    query, key, value = (randn(T, B, E, seed=seed) for seed in (90, 91, 92))
    logits, _ = module(query, key, value, before_softmax=True)
    assert logits.shape == (B * H, T, T + 2)
    with torch.no_grad():
        module.bias_k.mul_(1000)
    longer, _ = module(query, key, value, before_softmax=True)
    assert_near(longer, logits, 1e-12)
    assert (logits[..., -1] == 0).all()
    assert (logits[..., :-1] != 0).all()


# ---------------------------------------------------------------------------------------------
# 10. Properties
# ---------------------------------------------------------------------------------------------

sizes = st.integers(min_value=1, max_value=5)
seeds = st.integers(min_value=0, max_value=10_000)


@settings(max_examples=25, deadline=None)
@given(tgt_len=sizes, src_len=sizes, bsz=sizes, heads=sizes, d=sizes, seed=seeds)
def test_order_of_keys_does_not_matter(
    tgt_len: int, src_len: int, bsz: int, heads: int, d: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    module = make_module(heads * d, heads, seed=seed)
    query = randn(tgt_len, bsz, heads * d, generator=generator)
    key, value = (randn(src_len, bsz, heads * d, generator=generator) for _ in range(2))
    padding = randn(bsz, src_len, generator=generator) > 0.5
    mask = randn(tgt_len, src_len, generator=generator)
    padding[:, 0] = False
    order = torch.randperm(src_len, generator=generator)
    expected, expected_weights = module(query, key, value, key_padding_mask=padding, attn_mask=mask)
    output, weights = module(
        query, key[order], value[order], key_padding_mask=padding[:, order],
        attn_mask=mask[:, order],
    )  # fmt: skip
    assert_near(output, expected, 1e-10)
    assert_near(weights, expected_weights[..., order], 1e-10)


@settings(max_examples=25, deadline=None)
@given(
    tgt_len=sizes,
    src_len=sizes,
    bsz=sizes,
    heads=sizes,
    d=sizes,
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e3]),
    need_weights=st.booleans(),
)
def test_outputs_and_gradients_are_finite_for_all_shapes(
    tgt_len: int,
    src_len: int,
    bsz: int,
    heads: int,
    d: int,
    seed: int,
    dtype: torch.dtype,
    scale: float,
    need_weights: bool,
) -> None:
    module = make_module(heads * d, heads, g0=12.32, bias=False, seed=seed).to(dtype)
    query = (randn(tgt_len, bsz, heads * d, seed=seed) * scale).to(dtype).requires_grad_()
    key = (randn(src_len, bsz, heads * d, seed=seed + 1) * scale).to(dtype).requires_grad_()
    value = randn(src_len, bsz, heads * d, seed=seed + 2).to(dtype).requires_grad_()
    output, weights = module(query, key, value, need_weights=need_weights)
    assert output.shape == (tgt_len, bsz, heads * d)
    assert weights.shape == (bsz, tgt_len, src_len) if need_weights else weights is None
    output.sum().backward()
    assert all_finite(module, query, key, value)
    assert torch.isfinite(output).all()
