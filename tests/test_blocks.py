"""The paper's building blocks, each against its formula."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from qknorm_fairseq.modules.attention import QKNormMultiheadAttention
from qknorm_fairseq.modules.embeddings import FixNormEmbedding, OutputProjection
from qknorm_fairseq.modules.scale_norm import ScaleNorm
from qknorm_fairseq.modules.word_dropout import drop_words

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # fairseq's


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data"))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------
# ScaleNorm: g x / max(|x|, 1e-5)
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e6])
def test_scale_norm_is_the_formula(size: float) -> None:
    """Vectors shorter than 1e-5 are divided by 1e-5."""
    module = ScaleNorm(6).double()
    nn.init.constant_(module.g, 1.7)
    x = size * randn(3, 2, 6)
    out = module(x)
    for i in range(3):
        for j in range(2):
            numbers = x[i, j].tolist()
            length = math.sqrt(sum(number**2 for number in numbers))
            for k in range(6):
                expected = 1.7 * numbers[k] / max(length, 1e-5)
                assert out[i, j, k].item() == pytest.approx(expected, rel=1e-12)


def test_scale_norm_learns_one_number_that_starts_at_sqrt_d() -> None:
    module = ScaleNorm(512)
    assert {name: value.shape for name, value in module.named_parameters()} == {"g": ()}
    assert module.g.item() == pytest.approx(math.sqrt(512))
    assert module(torch.randn(4, 512)).norm(dim=-1).tolist() == pytest.approx([512**0.5] * 4)


def test_scale_norm_gradients() -> None:
    module = ScaleNorm(4).double()
    assert torch.autograd.gradcheck(module, randn(2, 3, 4).requires_grad_())
    x = randn(5, 4)
    module(x).sum().backward()
    expected = sum((row / math.sqrt(sum(n * n for n in row.tolist()))).sum().item() for row in x)
    assert module.g.grad.item() == pytest.approx(expected, rel=1e-12)


def test_scale_norm_of_zero_is_zero_with_finite_gradients() -> None:
    module = ScaleNorm(4)
    x = torch.zeros(2, 4, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert out.tolist() == [[0] * 4] * 2
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scale_norm_in_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    """The squares of 1000 don't fit in fp16; the norm is taken in fp32."""
    module = ScaleNorm(64)
    x = (1000 * torch.randn(3, 64)).to(dtype)
    out = module.to(dtype)(x)
    assert out.dtype == dtype
    expected = 8 * x.double() / x.double().norm(dim=-1, keepdim=True)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05)


def test_scale_norm_replaces_every_layer_norm_of_the_model(data: Path) -> None:
    """Two norms an encoder layer, three a decoder layer, and one at the end of each stack."""
    layers = tiny.SIZES["layers"]
    model = tiny.build(data, "--residual-norm", "scale").model
    names = [name for name, module in model.named_modules() if isinstance(module, ScaleNorm)]
    assert len(names) == layers * 2 + 1 + layers * 3 + 1
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())

    plain = tiny.build(data).model
    layer_norms = [n for n, module in plain.named_modules() if isinstance(module, nn.LayerNorm)]
    assert sorted(layer_norms) == sorted(names)
    assert not any(isinstance(module, ScaleNorm) for module in plain.modules())


# ---------------------------------------------------------------------------------------------
# FixNorm
# ---------------------------------------------------------------------------------------------


def test_fixnorm_rows_have_length_one_and_padding_is_zero() -> None:
    embedding = FixNormEmbedding(20, 7, PAD).double()
    nn.init.normal_(embedding.weight)
    with torch.no_grad():
        embedding.weight[PAD] = 0
    tokens = torch.tensor([[5, 0, 19, PAD], [PAD, PAD, 5, 3]])
    out = embedding(tokens)
    for i in range(2):
        for j in range(4):
            row = embedding.weight[tokens[i, j]].tolist()
            length = math.sqrt(sum(number**2 for number in row))
            expected = [number / length for number in row] if tokens[i, j] != PAD else [0.0] * 7
            assert out[i, j].tolist() == pytest.approx(expected, rel=1e-12)


def test_fixnorm_start_is_uniform_within_a_hundredth() -> None:
    torch.manual_seed(0)
    weight = FixNormEmbedding(1000, 64, PAD).weight.detach()
    assert weight[PAD].tolist() == [0.0] * 64
    rest = torch.cat([weight[:PAD], weight[PAD + 1 :]]).flatten().double()
    assert rest.abs().max() <= 0.01
    # Ten equal bins hold a tenth each: 5 standard errors of a count.
    counts = torch.histc(rest, bins=10, min=-0.01, max=0.01) / len(rest)
    assert (counts - 0.1).abs().max() < 5 * math.sqrt(0.1 * 0.9 / len(rest))


def test_fixnorm_gradient_is_that_of_the_formula_and_none_for_padding() -> None:
    """d (w / |w|) / dw takes out the component along w."""
    embedding = FixNormEmbedding(6, 3, PAD).double()
    nn.init.normal_(embedding.weight)
    with torch.no_grad():
        embedding.weight[PAD] = 0
    towards = randn(3, 3)
    (embedding(torch.tensor([4, PAD, 4])) * towards).sum().backward()
    w = embedding.weight[4].detach()
    along = towards[0] + towards[2]
    expected = (along - (along @ w) * w / (w @ w)) / (w @ w).sqrt()
    torch.testing.assert_close(embedding.weight.grad[4], expected)
    assert embedding.weight.grad[[0, PAD, 2, 3, 5]].abs().max() == 0


def test_fixnorm_input_of_the_model_has_length_sqrt_d(data: Path) -> None:
    """Whatever the table's rows; without FixNorm they are as long as the table says."""
    for options, expected in ((["--fixnorm"], math.sqrt(8)), (["--no-fixnorm"], 6 * math.sqrt(8))):
        model = tiny.build(data, *options).model
        with torch.no_grad():
            model.encoder.embed_tokens.weight[7] = torch.tensor([0.0, 6, 0, 0, 0, 0, 0, 0])
        _, scaled = model.encoder.forward_embedding(torch.tensor([[7]]))
        assert scaled.norm().item() == pytest.approx(expected)


def test_length_of_the_table_changes_nothing_with_fixnorm(data: Path) -> None:
    model, _, task = tiny.build(data, "--fixnorm")
    tiny.randomize(model)
    model.double().eval()
    net_input = tiny.batch(task)["net_input"]
    before = model(**net_input)[0]
    with torch.no_grad():
        model.encoder.embed_tokens.weight *= torch.linspace(0.1, 20, 18).double().unsqueeze(1)
    torch.testing.assert_close(model(**net_input)[0], before)


@pytest.mark.parametrize("mask", ["--logit-mask", "--no-logit-mask"])
def test_padding_row_of_the_shared_table_gets_no_gradient_with_fixnorm(
    data: Path, mask: str
) -> None:
    """Not at the output either, where without a mask padding is a token like any other."""
    model, criterion, task = tiny.build(data, mask)
    criterion(model, tiny.batch(task))[0].backward()
    assert model.encoder.embed_tokens.weight.grad[PAD].abs().max() == 0


@pytest.mark.parametrize("arch", ["transformer_qknorm", "transformer_scalenorm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_in_half_precision_is_finite_on_padded_text(
    data: Path, arch: str, dtype: torch.dtype
) -> None:
    """fairseq's --fp16 and --bf16 turn the whole model to half precision."""
    model, criterion, task = tiny.build(data, arch=arch)
    sample = tiny.batch(task)
    expected = criterion(model.eval(), sample)[0].item()
    model.to(dtype)
    loss, *_ = criterion(model, sample)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------
# The output layer
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fixnorm", [False, True])
def test_output_projection_is_the_formula(fixnorm: bool, bias: bool, masked: bool) -> None:
    """logit = features . row (/ |row|) (+ bias), or -inf where not allowed."""
    allowed = [True, False, True, True, False]
    table = nn.Parameter(randn(5, 4))
    module = OutputProjection(
        table, fixnorm=fixnorm, bias=bias, allowed=torch.tensor(allowed) if masked else None
    ).double()
    if bias:
        assert module.bias.tolist() == [0.0] * 5  # where it starts
        with torch.no_grad():
            module.bias.copy_(randn(5, seed=1))
    features = randn(2, 3, 4, seed=2)
    logits = module(features)
    assert logits.shape == (2, 3, 5)
    for i in range(2):
        for j in range(3):
            for v in range(5):
                expected = sum((features[i, j, k] * table[v, k]).item() for k in range(4))
                if fixnorm:
                    expected /= math.sqrt(sum(table[v, k].item() ** 2 for k in range(4)))
                if bias:
                    expected += module.bias[v].item()
                if masked and not allowed[v]:
                    expected = -math.inf
                assert logits[i, j, v].item() == pytest.approx(expected, rel=1e-12)


def test_input_and_output_share_one_table(data: Path) -> None:
    model = tiny.build(data).model
    assert model.decoder.output_projection.weight is model.encoder.embed_tokens.weight
    assert model.decoder.embed_tokens is model.encoder.embed_tokens
    shapes = {parameter.shape for parameter in model.parameters() if 18 in parameter.shape}
    assert shapes == {(18, 8), (18,)}  # the table and the bias, once each


# ---------------------------------------------------------------------------------------------
# SmallInit
# ---------------------------------------------------------------------------------------------

D, D_FF = 64, 128


def wide(data: Path, *options: str, arch: str = "transformer_qknorm") -> Any:
    """A model with enough weights to tell a standard deviation; 3 attentions, 2 feed-forwards."""
    sizes: list[object] = []
    for side in ("encoder", "decoder"):
        sizes += [f"--{side}-layers", 1, f"--{side}-embed-dim", D, f"--{side}-ffn-embed-dim", D_FF]
    return tiny.build(data, *sizes, *options, arch=arch).model


@pytest.mark.parametrize("arch", ["transformer_qknorm", "transformer_scalenorm"])
def test_small_init_draws_each_weight_from_its_normal(data: Path, arch: str) -> None:
    """Attention: sqrt(2 / (5 d)); feed-forward: sqrt(2 / (d + d_ff)); biases 0."""
    parameters = dict(wide(data, arch=arch).named_parameters())
    kinds = {"_proj.weight": math.sqrt(2 / (5 * D)), "fc": math.sqrt(2 / (D + D_FF))}
    seen = {"_proj.weight": 0, "fc": 0}
    for name, parameter in parameters.items():
        if ".layers." not in name or "norm" in name or name.endswith(".g"):
            continue
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
            continue
        kind = "fc" if ".fc" in name else "_proj.weight"
        seen[kind] += 1
        n, std = parameter.numel(), kinds[kind]
        values = parameter.detach().double().flatten()
        # 5 standard errors each: of a standard deviation, of a mean, of a share.
        assert abs(values.std().item() - std) < 5 * std / math.sqrt(2 * n), name
        assert abs(values.mean().item()) < 5 * std / math.sqrt(n), name
        # The normal distribution: 31.73% lie further out than one standard deviation (of a
        # uniform one of this deviation, 42%).
        share = (values.abs() > std).double().mean().item()
        assert abs(share - 0.3173) < 5 * math.sqrt(0.3173 * 0.6827 / n), name
    assert seen == {"_proj.weight": 3 * 4, "fc": 2 * 2}


def test_small_init_can_be_switched_off(data: Path) -> None:
    """fairseq's own start then holds: Xavier's uniform, whose bound is sqrt(6 / (in + out))."""
    weight = wide(data, "--no-small-init").decoder.layers[0].encoder_attn.out_proj.weight
    assert weight.abs().max() <= math.sqrt(6 / (2 * D))
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (2 * D)), rel=0.05)


def test_small_init_leaves_norms_scales_and_embeddings_alone(data: Path) -> None:
    model = wide(data)
    assert model.encoder.layer_norm.weight.tolist() == [1.0] * D
    assert model.encoder.layers[0].self_attn.g.item() == pytest.approx(12.32, abs=0.005)
    assert 0.0099 < model.encoder.embed_tokens.weight.abs().max() <= 0.01


# ---------------------------------------------------------------------------------------------
# Word dropout
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_a_share_p_of_the_tokens_becomes_unk_but_never_padding(p: float) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(4, 50, (200, 300))
    tokens[:, 250:] = PAD
    before = tokens.clone()
    dropped = drop_words(tokens, p, unk=UNK, pad=PAD)
    assert torch.equal(tokens, before)  # the batch itself isn't touched
    assert dropped[:, 250:].eq(PAD).all()
    changed = dropped[:, :250] != tokens[:, :250]
    assert dropped[:, :250][changed].eq(UNK).all()
    error = math.sqrt(p * (1 - p) / changed.numel())
    assert abs(changed.double().mean().item() - p) <= 5 * error


def test_words_are_dropped_independently() -> None:
    """Pairs of neighbours, and of words in the same place of two draws, fall together by p^2."""
    torch.manual_seed(0)
    tokens = torch.full((300, 300), 7)
    first = drop_words(tokens, 0.3, unk=UNK, pad=PAD).eq(UNK)
    second = drop_words(tokens, 0.3, unk=UNK, pad=PAD).eq(UNK)
    for one, other in ((first[:, 1:], first[:, :-1]), (first[1:], first[:-1]), (first, second)):
        both = (one & other).double().mean().item()
        assert abs(both - 0.09) < 5 * math.sqrt(0.09 * 0.91 / one.numel())


def read_tokens(model: Any, net_input: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model's own embedding is given: tokens of the encoder, then of the decoder."""
    read: list[Tensor] = []
    hook = model.encoder.embed_tokens.register_forward_hook(
        lambda module, arguments, output: read.append(arguments[0])
    )
    model(**net_input)
    hook.remove()
    source, target = read
    return source, target


def test_word_dropout_falls_on_both_inputs_in_training_only(data: Path) -> None:
    model, _, task = tiny.build(data, "--word-dropout", 0.3)
    net_input = tiny.batch(task)["net_input"]
    inputs = (net_input["src_tokens"], net_input["prev_output_tokens"])
    model.eval()
    for given, read in zip(inputs, read_tokens(model, net_input), strict=True):
        assert torch.equal(given, read)
    model.train()
    torch.manual_seed(0)
    draws = 200
    dropped = [0, 0]
    real = [given[given.ne(PAD)] for given in inputs]  # in training it reads nothing else
    for _ in range(draws):
        for side, (given, read) in enumerate(zip(real, read_tokens(model, net_input), strict=True)):
            assert read[read != given].eq(UNK).all()
            dropped[side] += int((read != given).sum())
    for side, given in enumerate(inputs):
        n = draws * int(given.ne(PAD).sum())
        assert abs(dropped[side] / n - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n)


def test_word_dropout_does_not_touch_what_is_to_be_predicted(data: Path) -> None:
    model, criterion, task = tiny.build(data, "--word-dropout", 1)
    sample = tiny.batch(task)
    target = sample["target"].clone()
    criterion(model.train(), sample)
    assert torch.equal(sample["target"], target)
    assert not target.eq(UNK).any()


@pytest.mark.parametrize("arch", ["transformer_qknorm", "transformer_scalenorm"])
def test_word_dropout_of_the_architectures_is_a_tenth(data: Path, arch: str) -> None:
    assert tiny.build(data, arch=arch).model.cfg.word_dropout == 0.1


@pytest.mark.parametrize("final", [False, True])
def test_the_normed_table_of_a_search_follows_the_weights(final: bool) -> None:
    """In validations while it is trained by any optimizer; and of a model in use, when it is
    loaded anew."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    layer = OutputProjection(weight, fixnorm=True, bias=False, allowed=None).eval()
    if final:
        layer.make_generation_fast_()
    features = torch.randn(3, 4)
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
    weight.grad = torch.randn(6, 4)
    changes: list[Callable[[], object]] = [lambda: None, lambda: weight.mul_(torch.rand(6, 4))]
    for change in [*changes, *([] if final else [optimizer.step])]:
        with torch.no_grad():
            change()
            expected = features @ (weight / weight.norm(dim=1, keepdim=True)).T
            for _ in range(2):
                torch.testing.assert_close(layer(features), expected)
    layer.train()
    optimizer.step()
    with torch.no_grad():
        expected = features @ (weight / weight.norm(dim=1, keepdim=True)).T
        torch.testing.assert_close(layer.eval()(features), expected)


# ---------------------------------------------------------------------------------------------
# Logit mask
# ---------------------------------------------------------------------------------------------


def target_words(pairs: list[tuple[str, str]], side: int = 1) -> set[str]:
    return {word for pair in pairs for word in pair[side].split()}


def allowed_words(model: Any, task: Any) -> set[str]:
    flags = model.decoder.output_projection.allowed.tolist()
    return {task.target_dictionary[token] for token, flag in enumerate(flags) if flag}


def test_mask_allows_the_training_texts_target_words_unk_and_eos(data: Path) -> None:
    model, _, task = tiny.build(data)
    expected = target_words(tiny.TEXT["train"]) | {"<unk>", "</s>"}
    assert allowed_words(model, task) == expected
    assert expected < {task.target_dictionary[n] for n in range(18)}  # it masks something


def test_masked_logits_are_minus_infinity_and_no_others(data: Path) -> None:
    model, _, task = tiny.build(data)
    net_input = tiny.batch(task)["net_input"]
    logits = model(**net_input)[0][net_input["prev_output_tokens"].ne(PAD)]
    allowed = model.decoder.output_projection.allowed
    assert logits[..., ~allowed].eq(-math.inf).all()
    assert logits[..., allowed].isfinite().all()


def test_mask_of_data_prepared_for_the_other_direction(data: Path) -> None:
    """fairseq translates yy to xx from the same folder: its target side is the former source."""
    model, _, task = tiny.build(data, "--source-lang", "yy", "--target-lang", "xx")
    expected = target_words(tiny.TEXT["train"], side=0) | {"<unk>", "</s>"}
    assert allowed_words(model, task) == expected


def test_mask_counts_all_folders_and_parts_of_the_training_text(data: Path, tmp_path: Path) -> None:
    """fairseq trains on DATA1:DATA2 in turn, and on train1 beside train. "n" and "a" are new."""
    second = tmp_path / "second"
    shutil.copytree(data, second)
    for suffix in ("bin", "idx"):
        for language in ("xx", "yy"):
            (second / f"train.xx-yy.{language}.{suffix}").unlink()
            (second / f"valid.xx-yy.{language}.{suffix}").rename(
                second / f"train1.xx-yy.{language}.{suffix}"
            )
    model, _, task = tiny.build(Path(f"{data}:{second}"))
    text = tiny.TEXT["train"] + tiny.TEXT["valid"]
    assert target_words(tiny.TEXT["valid"]) - target_words(tiny.TEXT["train"]) == {"n", "a"}
    assert allowed_words(model, task) == target_words(text) | {"<unk>", "</s>"}


def test_mask_is_stored_with_the_weights(data: Path, tmp_path: Path) -> None:
    """A checkpoint keeps it where there is no training text."""
    trained = tiny.build(data).model
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for dictionary in data.glob("dict.*"):
        shutil.copy(dictionary, elsewhere)
    other = tiny.build(elsewhere, "--source-lang", "xx", "--target-lang", "yy").model
    assert other.decoder.output_projection.allowed.all()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    mask = trained.decoder.output_projection.allowed
    assert torch.equal(other.decoder.output_projection.allowed, mask)
    assert not mask.all()


def test_weights_of_a_model_without_mask_and_bias_get_new_ones(data: Path) -> None:
    """--finetune-from-model with a checkpoint of fairseq's own transformer, say."""
    plain = tiny.build(data, "--no-logit-mask", "--no-output-bias").model
    full = tiny.build(data).model
    mask = full.decoder.output_projection.allowed.clone()
    full.load_state_dict(plain.state_dict())
    assert torch.equal(full.decoder.output_projection.allowed, mask)
    assert full.decoder.output_projection.bias.abs().max() == 0


# ---------------------------------------------------------------------------------------------
# Positions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [8, 512])
def test_positions_of_the_model_are_right_sinusoids(data: Path, d: int) -> None:
    """Dimension i < d/2: sin(n / 10000^(i / (d/2 - 1))); from d/2 on the cos of the same.

    The first word's n is 2, one more than padding's index; padding has zeros and takes no number.
    """
    model = tiny.build(data, "--encoder-embed-dim", d, "--decoder-embed-dim", d).model
    rows = [[PAD, PAD, 7, 8, 9, EOS], [7, 8, 9, 7, 8, EOS], [7, EOS, PAD, PAD, PAD, PAD]]
    for part in (model.encoder, model.decoder):
        positions = part.embed_positions(torch.tensor(rows))
        for i, row in enumerate(rows):
            number = PAD
            for j, token in enumerate(row):
                if token == PAD:
                    assert positions[i, j].abs().max() == 0
                    continue
                number += 1
                expected = sinusoid(number, d, math.sin) + sinusoid(number, d, math.cos)
                assert positions[i, j].tolist() == pytest.approx(expected, abs=1e-5)


def sinusoid(number: int, d: int, function: Callable[[float], float]) -> list[float]:
    half = d // 2
    return [function(number / 10000 ** (i / (half - 1))) for i in range(half)]


def test_positions_have_no_parameters_and_go_into_the_input_unscaled(data: Path) -> None:
    model = tiny.build(data).model
    assert not list(model.encoder.embed_positions.parameters())
    x, scaled = model.encoder.forward_embedding(torch.tensor([[7, 8, EOS]]))
    positions = model.encoder.embed_positions(torch.tensor([[7, 8, EOS]]))
    torch.testing.assert_close(x, scaled + positions)


def test_every_attention_of_the_model_is_the_projects(data: Path) -> None:
    """Encoder self, decoder self, cross: one g each in each layer."""
    model = tiny.build(data).model
    found = [n for n, m in model.named_modules() if isinstance(m, QKNormMultiheadAttention)]
    names = {name for name, _ in model.named_parameters() if name.endswith("attn.g")}
    assert names == {f"{name}.g" for name in found}
    assert len(found) == 3 * tiny.SIZES["layers"]
