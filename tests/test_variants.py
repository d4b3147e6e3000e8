"""Every option of the attention and of the model does what it says, alone and from fairseq-train.

An option that silently does nothing is a bug that no other test would find: so each attention
variant is compared with its formula and with the paper's attention, each of its parameters must
receive a gradient, and each model option is recognized by what the model then does.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

import qknorm_fairseq
from qknorm_fairseq.modules.attention import QKNormMultiheadAttention

T, S, B, E, H = 4, 5, 3, 16, 2
D = E // H
G0 = 2.5

# name: (options of the module, shapes of the parameters it adds, is it another function at once?)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], bool]] = {
    "paper": ({"g0": G0}, {"g": ()}, False),
    "g per head": ({"g0": G0, "g_per": "head"}, {"g": (H, 1, 1)}, False),
    "fixed g": ({"g0": G0, "g_per": "fixed"}, {}, False),
    "groups": ({"g0": G0, "groups": 4}, {"g": ()}, True),
    "scale": (
        {"g0": G0, "elementwise_scale": True},
        {"g": (), "q_scale": (H, 1, D), "k_scale": (H, 1, D)},
        False,
    ),
    "rms": ({"norm": "rms"}, {}, True),
    "rms and scale": (
        {"norm": "rms", "elementwise_scale": True},
        {"q_scale": (H, 1, D), "k_scale": (H, 1, D)},
        True,
    ),
    "layer": ({"norm": "layer"}, {}, True),
    "layer and scale": (
        {"norm": "layer", "elementwise_scale": True},
        {"q_scale": (H, 1, D), "k_scale": (H, 1, D)},
        True,
    ),
    "none": ({"norm": "none"}, {}, True),
    "head, groups and scale": (
        {"g0": G0, "g_per": "head", "groups": 2, "elementwise_scale": True},
        {"g": (H, 1, 1), "q_scale": (H, 1, D), "k_scale": (H, 1, D)},
        True,
    ),
}
KINDS: dict[str, dict[str, bool]] = {
    "self": {"self_attention": True},
    "cross": {"encoder_decoder_attention": True},
}


# ---------------------------------------------------------------------------------------------
# The formulas
# ---------------------------------------------------------------------------------------------


def formula(
    p: dict[str, Tensor],
    query: Tensor,
    memory: Tensor,
    *,
    norm: str = "l2",
    groups: int = 1,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The attention, one sentence and head at a time. p: weights by name. T x B x E."""
    outputs = []
    for b in range(query.shape[1]):
        heads = []
        for h in range(H):
            part = slice(h * D, (h + 1) * D)
            q, k, v = (
                (x[:, b] @ p[f"{name}_proj.weight"].T + p[f"{name}_proj.bias"])[:, part]
                for name, x in (("q", query), ("k", memory), ("v", memory))
            )
            q, k = (torch.stack([normalized(row, norm, groups) for row in x]) for x in (q, k))
            if "q_scale" in p:
                q, k = q * p["q_scale"][h, 0], k * p["k_scale"][h, 0]
            scale = p["g"].expand(H, 1, 1)[h, 0, 0] if "g" in p else 1 / math.sqrt(D)
            logits = scale * (q @ k.T)
            if attn_mask is not None:
                logits = logits + attn_mask
            if key_padding_mask is not None:
                logits = logits.masked_fill(key_padding_mask[b], -math.inf)
            heads.append(logits.softmax(-1) @ v)
        outputs.append(torch.cat(heads, dim=-1) @ p["out_proj.weight"].T + p["out_proj.bias"])
    return torch.stack(outputs, dim=1)


def normalized(x: Tensor, norm: str, groups: int) -> Tensor:
    """One vector of a head, D numbers."""
    if norm == "l2":  # each group by itself
        return torch.cat([part / (part * part).sum().sqrt() for part in x.chunk(groups)])
    if norm == "rms":
        return x / (x * x).mean().sqrt()
    if norm == "layer":
        return (x - x.mean()) / ((x - x.mean()) ** 2).mean().sqrt()
    return x


# ---------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------


def make(name: str, kind: str = "self") -> QKNormMultiheadAttention:
    """A float64 variant whose projections are random, the same for all variants."""
    module = QKNormMultiheadAttention(E, H, **VARIANTS[name][0], **KINDS[kind]).double().eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "_proj" in key:
                parameter.copy_(0.5 * randn(*parameter.shape, seed=len(key) + ord(key[0])))
    return module


def disturb(module: nn.Module) -> None:
    """Give each number of the added parameters another value."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "_proj" not in key:
                parameter.copy_(1 + 0.5 * randn(*parameter.shape, seed=len(key) + ord(key[0])))


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs(kind: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Query, memory and masks; self attention is causal, cross attention has padding."""
    query = randn(T, B, E, seed=1)
    if kind == "self":
        return query, query, {"attn_mask": torch.full((T, T), -math.inf).double().triu(1)}
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, :2] = padding[2, :1] = True
    return query, randn(S, B, E, seed=2), {"key_padding_mask": padding}


# ---------------------------------------------------------------------------------------------
# Variants of the attention
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_its_formula_and_so_are_its_gradients(name: str, kind: str) -> None:
    module = make(name, kind)
    disturb(module)
    query, memory, masks = inputs(kind)
    out = module(query, memory, memory, **masks)[0]
    (out * randn(*out.shape, seed=3)).sum().backward()

    p = {key: value.detach().clone() for key, value in module.state_dict().items()}
    for value in p.values():
        value.requires_grad_()
    expected = formula(p, query, memory, **VARIANTS[name][0], **masks)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    (expected * randn(*out.shape, seed=3)).sum().backward()
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, p[key].grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_parameters_it_names_and_each_number_gets_a_gradient(name: str) -> None:
    module, plain = make(name), MultiheadAttention(E, H, self_attention=True)
    added = {key: tuple(value.shape) for key, value in module.named_parameters()}
    for key, value in plain.named_parameters():
        assert added.pop(key) == tuple(value.shape)
    assert added == VARIANTS[name][1]
    query, memory, masks = inputs("self")
    module(query, memory, memory, **masks)[0].square().sum().backward()
    for key in added:
        assert module.get_parameter(key).grad.abs().min() > 1e-6, key


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "paper"])
def test_variant_changes_the_output(name: str) -> None:
    """At once, or, where it starts from the paper's, as soon as its own parameters move."""
    query, memory, masks = inputs("self")
    paper = make("paper")(query, memory, memory, **masks)[0]
    module = make(name)
    at_start = module(query, memory, memory, **masks)[0]
    changed = (at_start - paper).abs().max() > 1e-3
    assert changed == VARIANTS[name][2]
    if name == "fixed g":  # the paper's at the start, and it stays there
        assert not any(key.startswith("g") for key, _ in module.named_parameters())
        assert "g" in module.state_dict()
    elif not changed:
        disturb(module)
        assert (module(query, memory, memory, **masks)[0] - paper).abs().max() > 1e-3


def test_each_heads_g_scales_its_own_head() -> None:
    """With g = 0 a head attends evenly; the other one doesn't notice."""
    module = make("g per head")
    query, _, _ = inputs("self")
    before = module(query, query, query, need_head_weights=True)[1]
    with torch.no_grad():
        module.g[1] = 0
    after = module(query, query, query, need_head_weights=True)[1]
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[1], torch.full_like(after[1], 1 / T))
    assert (before[1] - 1 / T).abs().max() > 0.01


def test_groups_are_normalized_each_by_itself() -> None:
    """A group's length doesn't matter: doubling one group of the keys changes nothing."""
    query, _, _ = inputs("self")
    changes = {}
    for name in ("groups", "paper"):
        module = make(name)
        before = module(query, query, query)[0]
        with torch.no_grad():
            module.k_proj.weight[: D // 4] *= 2
            module.k_proj.bias[: D // 4] *= 2
        changes[name] = (module(query, query, query)[0] - before).abs().max().item()
    assert changes["groups"] < 1e-12 and changes["paper"] > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_decodes_step_by_step_as_all_at_once(name: str) -> None:
    module = make(name)
    disturb(module)
    query, memory, masks = inputs("self")
    together = module(query, memory, memory, **masks)[0]
    cache: dict[str, Any] = {}
    for t in range(T):
        step = query[t : t + 1]
        out = module(step, step, step, incremental_state=cache)[0]
        torch.testing.assert_close(out[0], together[t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_none_is_fairseqs_own_attention(kind: str, need_weights: bool) -> None:
    ours = make("none", kind)
    theirs = MultiheadAttention(E, H, **KINDS[kind]).double().eval()
    theirs.load_state_dict(ours.state_dict())
    query, memory, masks = inputs(kind)
    out, weights = ours(query, memory, memory, need_weights=need_weights, **masks)
    expected, their_weights = theirs(query, memory, memory, need_weights=need_weights, **masks)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    if need_weights:
        # fairseq returns its weights in fp32.
        torch.testing.assert_close(weights.float(), their_weights.float())
    out.square().sum().backward()
    expected.square().sum().backward()
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(key).grad, parameter.grad)


# ---------------------------------------------------------------------------------------------
# Exchange of weights
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_of_fairseqs_attention_load_and_the_rest_starts_anew(name: str) -> None:
    plain = MultiheadAttention(E, H, self_attention=True).double()
    module = make(name)
    disturb(module)
    state = {f"layer.{key}": value for key, value in plain.state_dict().items()}
    module.upgrade_state_dict_named(state, "layer")
    module.load_state_dict({key.removeprefix("layer."): value for key, value in state.items()})
    for key, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)
    starts = {"g": G0, "q_scale": 1.0, "k_scale": 1.0}
    for key in set(module.state_dict()) - set(plain.state_dict()):
        assert module.state_dict()[key].unique().tolist() == [starts[key]]


@pytest.mark.parametrize("name", VARIANTS)
def test_trained_values_survive_saving_and_loading(name: str) -> None:
    trained, new = make(name), make(name)
    disturb(trained)
    state = trained.state_dict()
    new.upgrade_state_dict_named(state, "")
    new.load_state_dict(state)
    query, memory, masks = inputs("self")
    expected = trained(query, memory, memory, **masks)[0]
    assert torch.equal(new(query, memory, memory, **masks)[0], expected)


def test_learned_and_fixed_g_exchange_their_value() -> None:
    learned, fixed = make("paper"), make("fixed g")
    disturb(learned)
    fixed.load_state_dict(learned.state_dict())
    assert fixed.g.item() == learned.g.item() != G0


# ---------------------------------------------------------------------------------------------
# What doesn't go together
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "g0"),
        ({"g0": None, "g_per": "head"}, "g0"),
        ({"norm": "l1", "g0": G0}, "l1"),
        ({"g_per": "layer", "g0": G0}, "layer"),
        ({"g0": G0, "groups": 3}, "groups"),
        ({"g0": G0, "groups": 0}, "groups"),
        ({"g0": G0, "groups": 16}, "groups"),
        ({"norm": "rms", "groups": 2}, "rms"),
        ({"norm": "layer", "g_per": "head"}, "layer"),
        ({"norm": "none", "g_per": "fixed"}, "none"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QKNormMultiheadAttention(E, H, self_attention=True, **options)


# ---------------------------------------------------------------------------------------------
# From fairseq-train's command line
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"norm": "l2", "groups": 1, "g": ()}),
        (["--g-per", "head"], {"norm": "l2", "groups": 1, "g": (2, 1, 1)}),
        (["--g-per", "fixed"], {"norm": "l2", "groups": 1, "g": ()}),
        (["--attention-norm-groups", 2], {"norm": "l2", "groups": 2, "g": ()}),
        (["--attention-norm-scale"], {"norm": "l2", "groups": 1, "g": (), "scale": (2, 1, 4)}),
        (["--attention-norm", "rms"], {"norm": "rms", "groups": 1}),
        (["--attention-norm", "layer"], {"norm": "layer", "groups": 1}),
        (["--attention-norm", "none"], {"norm": "none", "groups": 1}),
    ],
    ids=str,
)
def test_attention_options_reach_every_attention_and_train(
    data: Path, arguments: list[object], expected: dict[str, Any]
) -> None:
    """d = 8 in 2 heads of 4; encoder self, decoder self and cross attention in 2 layers each."""
    model, criterion, task = tiny.build(data, *arguments)
    modules = [m for m in model.modules() if isinstance(m, QKNormMultiheadAttention)]
    assert len(modules) == 6
    criterion(model, tiny.batch(task))[0].backward()
    for module in modules:
        found: dict[str, Any] = {"norm": module.norm, "groups": module.groups}
        if module.g is not None:
            found["g"] = tuple(module.g.shape)
            assert module.g.flatten()[0].item() == pytest.approx(math.log2(72 * 72 - 72))
            assert isinstance(module.g, nn.Parameter) == ("fixed" not in arguments)
        if module.q_scale is not None:
            found["scale"] = tuple(module.q_scale.shape)
        assert found == expected
        for key, parameter in module.named_parameters():
            if "k_proj.bias" not in key:  # without a norm the keys' bias shifts all logits alike
                assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--qknorm-g0", 3.5], 3.5),
        (["--qknorm-length", 75], math.log2(75 * 75 - 75)),
        (["--qknorm-g0-from", "head_dim"], math.sqrt(4)),
    ],
    ids=str,
)
def test_start_of_g(data: Path, arguments: list[object], expected: float) -> None:
    """8 dimensions in 2 heads: a head has 4."""
    model = tiny.build(data, *arguments).model
    starts = [m.g.item() for m in model.modules() if isinstance(m, QKNormMultiheadAttention)]
    assert starts == pytest.approx([expected] * 6)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--attention-norm", "rms", "--g-per", "head"],
        ["--attention-norm", "none", "--attention-norm-groups", 2],
        ["--attention-norm-groups", 3],
    ],
    ids=str,
)
def test_command_line_refuses_what_does_not_go_together(data: Path, arguments: list[Any]) -> None:
    with pytest.raises(ValueError, match="groups"):
        tiny.build(data, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [["--attention-norm", "l1"], ["--g-per", "layer"], ["--residual-norm", "rms"]],
    ids=str,
)
def test_command_line_refuses_unknown_values(data: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        tiny.build(data, *arguments)
    assert error.value.code == 2


OPTIONS = {  # name: (on, off)
    "residual_norm": (["--residual-norm", "scale"], ["--residual-norm", "layer"]),
    "fixnorm": (["--fixnorm"], ["--no-fixnorm"]),
    "output_bias": (["--output-bias"], ["--no-output-bias"]),
    "small_init": (["--small-init"], ["--no-small-init"]),
    "word_dropout": (["--word-dropout", "0.5"], ["--word-dropout", "0"]),
    "logit_mask": (["--logit-mask"], ["--no-logit-mask"]),
}


def effects(built: tiny.Built) -> set[str]:
    """Which options are on, judged by what the model does and not by what it was told."""
    model, _, task = built
    found = set()
    # SmallInit: at a width of 64, sqrt(2 / 320) = 0.079 rather than Xavier's sqrt(1 / 64) = 0.125.
    if model.encoder.layers[0].self_attn.out_proj.weight.std() < 0.1:
        found.add("small_init")
    # ScaleNorm's output has the length g, whatever its input.
    out = model.encoder.layer_norm(torch.randn(20, 64) + 3).norm(dim=-1)
    mean = model.encoder.layer_norm(torch.randn(20, 64) + 3).mean(-1)
    assert out.std() < 0.1  # either norm's
    if mean.min() > 0.1:  # LayerNorm takes out the mean, ScaleNorm doesn't
        found.add("residual_norm")
    sample = tiny.batch(task)
    net_input = sample["net_input"]
    model.eval()
    before = model(**net_input)[0]
    if before.isinf().any():
        found.add("logit_mask")
    # A bias for everything that may be predicted can learn the frequencies of the words.
    before[before.isfinite()].sum().backward()
    if any(p.dim() == 1 and len(p) == 18 and p.grad.abs().max() > 0 for p in model.parameters()):
        found.add("output_bias")
    model.train()
    if not torch.equal(model(**net_input)[0], model(**net_input)[0]):  # no other dropout is on
        found.add("word_dropout")
    model.eval()
    with torch.no_grad():
        model.encoder.embed_tokens.weight *= 3
    if torch.allclose(before, model(**net_input)[0], atol=1e-5):
        found.add("fixnorm")
    return found


def build_wide(data: Path, *arguments: str, arch: str = "transformer_qknorm") -> tiny.Built:
    width = ["--encoder-embed-dim", "64", "--decoder-embed-dim", "64"]
    return tiny.build(data, *width, *arguments, arch=arch)


def test_all_model_options_can_be_off_and_on(data: Path) -> None:
    on = [part for arguments, _ in OPTIONS.values() for part in arguments]
    off = [part for _, arguments in OPTIONS.values() for part in arguments]
    assert effects(build_wide(data, *off)) == set()
    assert effects(build_wide(data, *on)) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_model_option_can_be_switched_on_by_itself(data: Path, name: str) -> None:
    off = [part for _, arguments in OPTIONS.values() for part in arguments]
    assert effects(build_wide(data, *off, *OPTIONS[name][0])) == {name}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_model_option_can_be_switched_off_by_itself(data: Path, name: str) -> None:
    on = [part for arguments, _ in OPTIONS.values() for part in arguments]
    assert effects(build_wide(data, *on, *OPTIONS[name][1])) == set(OPTIONS) - {name}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("transformer_qknorm", set(OPTIONS) - {"residual_norm"}),
        ("transformer_scalenorm", set(OPTIONS)),
    ],
)
def test_architectures_have_the_papers_options_on(
    data: Path, arch: str, expected: set[str]
) -> None:
    built = build_wide(data, arch=arch)
    assert effects(built) == expected
    attentions = [m for m in built.model.modules() if isinstance(m, QKNormMultiheadAttention)]
    norms = {module.norm for module in attentions}
    assert norms == ({"l2"} if arch == "transformer_qknorm" else {"none"})


# ---------------------------------------------------------------------------------------------
# Architectures
# ---------------------------------------------------------------------------------------------

ARCHITECTURES = {  # layers, heads, width, feed-forward width, dropout
    "": (6, 8, 512, 2048, 0.3),
    "_gl_en": (4, 4, 512, 2048, 0.4),
    "_tiny": (2, 4, 256, 512, 0.3),
}
V = 18  # of the tests' dictionary


@pytest.mark.parametrize("size", ARCHITECTURES)
@pytest.mark.parametrize("model", ["qknorm", "scalenorm"])
def test_architecture_is_the_papers(model: str, size: str) -> None:
    """The values Hydra sees; fairseq's argparse takes them from the same dataclass."""
    qknorm_fairseq.register()
    layers, heads, width, ffn, dropout = ARCHITECTURES[size]
    options = MODEL_DATACLASS_REGISTRY[f"transformer_{model}{size}"]()
    for side in ("encoder", "decoder"):
        assert getattr(options, f"{side}_layers") == layers
        assert getattr(options, f"{side}_attention_heads") == heads
        assert getattr(options, f"{side}_embed_dim") == width
        assert getattr(options, f"{side}_ffn_embed_dim") == ffn
        assert getattr(options, f"{side}_normalize_before") is True
        assert getattr(options, f"{side}_learned_pos") is False
    assert options.dropout == options.attention_dropout == options.activation_dropout == dropout
    assert options.activation_fn == "relu"
    assert options.share_all_embeddings is True
    assert options.attention_norm == ("l2" if model == "qknorm" else "none")
    assert options.residual_norm == ("layer" if model == "qknorm" else "scale")
    assert options.fixnorm and options.output_bias and options.small_init
    assert options.word_dropout == 0.1
    assert options.g_per == "module" and options.attention_norm_groups == 1
    assert options.attention_norm_scale is False


@pytest.mark.parametrize("size", ARCHITECTURES)
def test_the_two_models_differ_by_their_norms_parameters_only(data: Path, size: str) -> None:
    """LayerNorm: 2 d numbers; ScaleNorm: 1; QKNorm: one g an attention.

    L + L layers have 2 L + 3 L residual norms and one at the end of each stack; 3 L attentions.
    """
    layers, _, d, d_ff, _ = ARCHITECTURES[size]
    models = {
        arch: tiny.build(data, arch=f"transformer_{arch}{size}", sizes=False).model
        for arch in ("qknorm", "scalenorm")
    }
    counts = {arch: sum(p.numel() for p in model.parameters()) for arch, model in models.items()}
    norms, attentions = 5 * layers + 2, 3 * layers
    assert counts["qknorm"] - counts["scalenorm"] == norms * 2 * d + attentions - norms

    # ... and what they share is all there is: attention, feed-forward, one table, one bias.
    shared = attentions * 4 * (d * d + d) + 2 * layers * (2 * d * d_ff + d_ff + d) + V * d + V
    assert counts["scalenorm"] == shared + norms

    def others(model: nn.Module) -> dict[str, torch.Size]:
        parameters = model.named_parameters()
        return {key: p.shape for key, p in parameters if "norm" not in key and key[-2:] != ".g"}

    assert others(models["qknorm"]) == others(models["scalenorm"])
