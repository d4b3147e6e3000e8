"""transformer_qknorm as a model: its options, its parameters, how it learns and how it decodes.

Models are built as fairseq-train builds them, from its command line. Where it matters that a
command does it, the command runs as a process of its own.
"""

from __future__ import annotations

import math
import shutil
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, Run, train
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from qknorm_fairseq.checkpoints import load
from qknorm_fairseq.models.transformer_qknorm import starting_g
from qknorm_fairseq.modules.attention import QKNormMultiheadAttention

PLUGIN = PROJECT / "qknorm_fairseq"

# 1+1 layers of 32 dimensions.
SMALL = [
    *("--encoder-layers", 1, "--decoder-layers", 1),
    *("--encoder-embed-dim", 32, "--decoder-embed-dim", 32),
    *("--encoder-ffn-embed-dim", 64, "--decoder-ffn-embed-dim", 64),
    *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
]
NO_DROPOUT = [
    *("--dropout", 0, "--attention-dropout", 0, "--activation-dropout", 0, "--word-dropout", 0),
]
# Without the paper's other blocks the attention is all that differs from fairseq's transformer.
ATTENTION_ONLY = [
    *("--no-fixnorm", "--no-output-bias", "--no-small-init", "--word-dropout", 0),
]


def build(data: Path, arch: str, *arguments: object) -> tuple[Any, Any, Any]:
    """Configuration, task and model of `fairseq-train DATA --arch ARCH ...`."""
    command = [data, "--user-dir", PLUGIN, "--arch", arch, *arguments]
    namespace = options.parse_args_and_arch(options.get_training_parser(), [*map(str, command)])
    cfg = convert_namespace_to_omegaconf(namespace)
    task = tasks.setup_task(cfg.task)
    return cfg, task, task.build_model(cfg.model)


def batch(task: Any, split: str = "train", sentences: int = 8) -> dict[str, Any]:
    """The first sentences of a split as one batch."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    return dataset.collater([dataset[index] for index in range(sentences)])


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention)
    }


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def plain(cfg: Any) -> dict[str, Any]:
    """A model's configuration from a checkpoint, as a dict."""
    return dict(cfg) if isinstance(cfg, dict) else vars(cfg)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def test_transformer_qknorm_is_the_papers_model(prepared: Path) -> None:
    """Henry et al. 2020: 6+6 layers, 512/2048, 8 heads, PreNorm, shared embeddings, dropout."""
    _, _, model = build(prepared, "transformer_qknorm")
    assert len(model.encoder.layers) == len(model.decoder.layers) == 6
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        assert layer.normalize_before
        assert (layer.fc1.in_features, layer.fc1.out_features) == (512, 2048)
        assert layer.self_attn.num_heads == 8
        assert layer.residual_dropout.p == 0.3
        assert layer.activation_dropout_module.p == 0.3
        assert layer.self_attn.dropout_module.p == 0.3
    assert isinstance(model.encoder.layer_norm, nn.LayerNorm)
    assert isinstance(model.decoder.layer_norm, nn.LayerNorm)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight


def test_transformer_qknorm_tiny_is_small(prepared: Path) -> None:
    _, _, model = build(prepared, "transformer_qknorm_tiny")
    assert len(model.encoder.layers) == len(model.decoder.layers) == 2
    layer = model.decoder.layers[0]
    assert (layer.fc1.in_features, layer.fc1.out_features) == (256, 512)
    assert layer.encoder_attn.num_heads == 4
    assert layer.normalize_before
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight


@pytest.mark.parametrize(
    ("flag", "before"),
    [
        ([], True),
        (["--encoder-normalize-before"], True),
        (["--no-encoder-normalize-before"], False),
    ],
)
def test_a_flag_means_what_it_says(prepared: Path, flag: list[str], before: bool) -> None:
    """PreNorm is on by default; the flag of fairseq's name keeps it on, --no-... ends it."""
    _, _, model = build(prepared, "transformer_qknorm_tiny", *SMALL, *flag)
    assert model.encoder.layers[0].normalize_before is before
    assert model.decoder.layers[0].normalize_before is True


def test_sizes_can_be_given_one_by_one(prepared: Path) -> None:
    _, _, model = build(prepared, "transformer_qknorm", *SMALL, "--no-share-all-embeddings")
    assert len(model.encoder.layers) == 1
    assert model.encoder.layers[0].fc1.out_features == 64
    assert model.decoder.output_projection.weight.shape[1] == 32  # follows the embeddings
    assert model.encoder.embed_tokens.weight is not model.decoder.embed_tokens.weight


def test_argparse_and_hydra_train_the_same_model(run: Run, prepared: Path, tmp_path: Path) -> None:
    """The same settings by fairseq-train and by fairseq-hydra-train: the same configuration,
    parameter names and, after ten updates with dropout, the same weights but for rounding."""
    by_argparse = [
        *("fairseq-train", prepared, "--user-dir", "qknorm_fairseq"),
        *("--arch", "transformer_qknorm_tiny", "--encoder-embed-dim", 32, "--dropout", 0.2),
        *("--decoder-embed-dim", 32, "--attention-dropout", 0.1, "--activation-dropout", 0.1),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", 0.002),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 300, "--clip-norm", 1.0),
        *("--max-tokens", 2000, "--max-update", 10, "--disable-validation", *ATTENTION_ONLY),
        *("--no-epoch-checkpoints", "--seed", 1, "--cpu", "--save-dir", tmp_path / "argparse"),
    ]
    by_hydra = [
        *("fairseq-hydra-train", "--config-dir", "configs", "--config-name", "demo"),
        *("model=transformer_qknorm_tiny", "model.encoder_embed_dim=32", "model.dropout=0.2"),
        *("model.decoder_embed_dim=32", "model.attention_dropout=0.1"),
        *("model.activation_dropout=0.1", "criterion.label_smoothing=0.1"),
        *("optimizer.adam_betas='(0.9, 0.98)'", "optimization.lr=[0.002]"),
        *("lr_scheduler.warmup_updates=300", "optimization.clip_norm=1.0"),
        *("dataset.max_tokens=2000", "dataset.required_batch_size_multiple=8"),
        *("optimization.max_update=10", "dataset.disable_validation=true", "common.seed=1"),
        *("task.source_lang=xx", "task.target_lang=yy", f"task.data={prepared}"),
        f"checkpoint.save_dir={tmp_path / 'hydra'}",
    ]
    with ThreadPoolExecutor(2) as pool:
        calls = pool.map(lambda command: run(*command, cwd=PROJECT), (by_argparse, by_hydra))
    for done in calls:
        assert done.returncode == 0, done.stderr
    first, second = (load(tmp_path / way / "checkpoint_last.pt") for way in ("argparse", "hydra"))
    assert plain(first["cfg"]["model"]) == plain(second["cfg"]["model"])
    assert list(first["model"]) == list(second["model"])
    for name, weights in first["model"].items():
        # Another order of batches, or another dropout mask, moves them by 1e-4.
        assert (weights - second["model"][name]).abs().mean() < 1e-6, name


# ---------------------------------------------------------------------------------------------
# Attention and g
# ---------------------------------------------------------------------------------------------


def test_every_attention_is_query_key_normalized(prepared: Path) -> None:
    _, _, model = build(prepared, "transformer_qknorm_tiny")
    found = attentions(model)
    assert list(found) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.encoder_attn",
    ]
    assert all(type(module) is QKNormMultiheadAttention for module in found.values())


def test_it_has_one_parameter_for_each_attention_more_than_fairseqs_transformer(
    prepared: Path,
) -> None:
    _, _, ours = build(prepared, "transformer_qknorm_tiny", *ATTENTION_ONLY)
    same = ["--share-all-embeddings"]
    for side in ("encoder", "decoder"):
        same += [f"--{side}-layers=2", f"--{side}-embed-dim=256", f"--{side}-ffn-embed-dim=512"]
        same += [f"--{side}-attention-heads=4", f"--{side}-normalize-before"]
    _, _, theirs = build(prepared, "transformer", *same)
    assert count(ours) == count(theirs) + 6
    extra = set(ours.state_dict()) - set(theirs.state_dict())
    assert extra == {f"{name}.g" for name in attentions(ours)}
    assert set(theirs.state_dict()) <= set(ours.state_dict())


@pytest.mark.parametrize(
    ("given", "g0"),
    [
        (["--qknorm-g0", "2.5"], 2.5),
        (["--qknorm-length", "72"], 12.3197),  # log2(72 * 72 - 72), the paper's 12.32
        (["--qknorm-length", "72", "--qknorm-g0", "2.5"], 2.5),
    ],
)
def test_g_starts_where_it_is_told(prepared: Path, given: list[str], g0: float) -> None:
    cfg, _, model = build(prepared, "transformer_qknorm_tiny", *SMALL, *given)
    for module in attentions(model).values():
        assert module.g.item() == pytest.approx(g0, abs=1e-4)
    assert cfg.model.qknorm_g0 == pytest.approx(g0, abs=1e-4)  # what the checkpoint will say


def test_g_starts_from_the_length_that_prepare_stored(prepared: Path) -> None:
    _, task, model = build(prepared, "transformer_qknorm_tiny", *SMALL)
    task.load_dataset("train")
    data = task.dataset("train")
    # The stored lengths count the end of sentence, L doesn't.
    lengths = torch.tensor([*data.src_sizes, *data.tgt_sizes]).double() - 1
    length = torch.quantile(lengths, 0.975).item()
    for module in attentions(model).values():
        assert module.g.item() == pytest.approx(math.log2(length * length - length), rel=1e-6)


def test_the_first_of_several_data_folders_tells_the_length(prepared: Path, tmp_path: Path) -> None:
    assert starting_g(None, None, f"{prepared}:{tmp_path}") == starting_g(None, None, str(prepared))
    with pytest.raises(ValueError, match="does not know where g starts"):
        starting_g(None, None, f"{tmp_path}:{prepared}")


@pytest.fixture(scope="module")
def undescribed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data as fairseq-preprocess leaves it: nothing about L."""
    folder = tmp_path_factory.mktemp("undescribed") / "data"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("qknorm.json"))
    return folder


def test_not_knowing_where_g_starts_is_an_error(
    run: Run, undescribed: Path, tmp_path: Path
) -> None:
    done = run(
        "fairseq-train",
        *(undescribed, "--user-dir", PLUGIN, "--arch", "transformer_qknorm_tiny", *SMALL),
        *("--optimizer", "adam", "--max-tokens", 600, "--cpu", "--save-dir", tmp_path),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ValueError: QKNorm does not know where g starts: {undescribed} holds no qknorm.json "
        "(`qknorm prepare` writes it). Give L with --qknorm-length (model.qknorm_length=...) or "
        "g itself with --qknorm-g0 (model.qknorm_g0=...)"
    )


@pytest.mark.parametrize("length", [1.9, 0, -5, math.nan, math.inf])
def test_a_length_without_a_g_is_an_error(length: float) -> None:
    message = f"--qknorm-length: L must be a length of at least 2 subwords .* not {length}"
    with pytest.raises(ValueError, match=message):
        starting_g(None, length, None)


@pytest.mark.parametrize("g0", [0.0, -3.0, math.nan, math.inf])
def test_g_starts_above_zero(g0: float) -> None:
    with pytest.raises(ValueError, match="--qknorm-g0: g starts from a number above 0"):
        starting_g(g0, None, None)


def test_a_stored_length_without_a_g_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "qknorm.json"
    file.write_text('{"length": 1.0}', encoding="utf-8")
    with pytest.raises(ValueError, match=f"{file}: L must be a length of at least 2 subwords"):
        starting_g(None, None, str(tmp_path))


def test_a_checkpoint_knows_its_g0_where_the_data_does_not(
    run: Run, checkpoint: Path, prepared: Path, undescribed: Path
) -> None:
    """g0 came from the prepared data; translating other data needs no qknorm.json there."""
    g0 = plain(load(checkpoint)["cfg"]["model"])["qknorm_g0"]
    assert g0 == starting_g(None, None, str(prepared))
    done = run(
        "fairseq-generate",
        *(undescribed, "--user-dir", PLUGIN, "--path", checkpoint, "--gen-subset", "test"),
        *("--cpu", "--beam", 1, "--required-batch-size-multiple", 1),  # else fairseq drops some
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nH-") == len((prepared / "test.xx").read_text("utf-8").splitlines())


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def test_g_is_trained(checkpoint: Path, prepared: Path) -> None:
    """After 100 updates of fairseq-train, each g has left g0, and they differ."""
    weights = load(checkpoint)["model"]
    learned = [weights[name].item() for name in weights if name.endswith("attn.g")]
    assert len(learned) == 3  # encoder, decoder, cross attention of one layer each
    g0 = starting_g(None, None, str(prepared))
    assert all(abs(g - g0) > 0.01 for g in learned), (g0, learned)
    assert len({round(g, 4) for g in learned}) == 3


def greedy(task: Any, model: Any, sample: dict[str, Any]) -> list[list[int]]:
    """The best hypothesis of each sentence with a beam of 1."""
    model.eval()
    generator = task.build_generator([model], Namespace(beam=1, max_len_a=1, max_len_b=20))
    with torch.inference_mode():
        hypotheses = task.inference_step(generator, [model], sample)
    return [best[0]["tokens"].tolist() for best in hypotheses]


def test_it_learns_a_handful_of_sentences_by_heart(prepared: Path) -> None:
    """Without dropout or smoothing the loss goes to nearly 0, and decoding says the targets."""
    torch.manual_seed(1)
    cfg, task, model = build(prepared, "transformer_qknorm_tiny", *SMALL, *NO_DROPOUT)
    sample = batch(task)
    targets = [
        [token for token in row.tolist() if token != task.target_dictionary.pad()]
        for row in sample["target"]
    ]
    assert greedy(task, model, sample) != targets  # nothing learned yet
    criterion = task.build_criterion(cfg.criterion)  # cross entropy
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    model.train()
    for _ in range(250):
        optimizer.zero_grad()
        loss, tokens, _ = criterion(model, sample)
        (loss / tokens).backward()
        optimizer.step()
    assert loss.item() / tokens < 0.02  # nats a token; a guess costs about 4.8
    assert greedy(task, model, sample) == targets


def test_the_seed_makes_the_weights(prepared: Path) -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(build(prepared, "transformer_qknorm_tiny", *SMALL)[2].state_dict().values())

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_finetuning_from_fairseqs_transformer(
    run: Run, prepared: Path, transformer_checkpoint: Path, tmp_path: Path
) -> None:
    """--finetune-from-model takes over every weight, and g starts at g0. (The learning rate is
    0, so that one update leaves all as it was.)"""
    train(
        run,
        prepared,
        tmp_path,
        *("--arch", "transformer_qknorm_tiny", "--finetune-from-model", transformer_checkpoint),
        *ATTENTION_ONLY,
        *("--lr", 0, "--lr-scheduler", "fixed", "--disable-validation"),
        updates=1,
    )
    theirs = load(transformer_checkpoint)["model"]
    ours = load(tmp_path / "checkpoint_last.pt")["model"]
    for name, weights in theirs.items():
        assert torch.equal(ours[name], weights), name
    g = {name: ours[name].item() for name in ours if name not in theirs}
    g0 = starting_g(None, None, str(prepared))
    assert g == {
        "encoder.layers.0.self_attn.g": pytest.approx(g0),
        "decoder.layers.0.self_attn.g": pytest.approx(g0),
        "decoder.layers.0.encoder_attn.g": pytest.approx(g0),
    }


@pytest.mark.parametrize(
    "option",
    [
        "--checkpoint-activations",
        "--offload-activations",
        "--cross-self-attention",
        "--no-cross-attention --no-encoder-normalize-before",
        "--quant-noise-pq 0.5 --quant-noise-pq-block-size 4",
        "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding",
        "--encoder-layerdrop 0.5 --decoder-layerdrop 0.5",
    ],
)
def test_fairseqs_own_options_work(prepared: Path, option: str) -> None:
    """A step of training reaches the embeddings, and changes the loss of the same batch."""
    torch.manual_seed(3)
    given = [*SMALL, "--encoder-layers", 2, "--decoder-layers", 2, *option.split()]
    cfg, task, model = build(prepared, "transformer_qknorm_tiny", *given)
    sample = batch(task)
    criterion = task.build_criterion(cfg.criterion)
    model.train()
    loss, tokens, _ = criterion(model, sample)
    (loss / tokens).backward()
    embeddings = model.decoder.embed_tokens.weight
    assert loss.isfinite() and embeddings.grad.isfinite().all() and embeddings.grad.any()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    after, _, _ = criterion(model, sample)
    assert after.isfinite() and after.item() != loss.item()


def test_recomputed_activations_give_the_same_gradients(prepared: Path) -> None:
    """--checkpoint-activations trades time for memory, and nothing else."""

    def gradients(*option: str) -> dict[str, Tensor]:
        torch.manual_seed(1)
        given = [*SMALL, *NO_DROPOUT, *option]
        cfg, task, model = build(prepared, "transformer_qknorm_tiny", *given)
        loss, _, _ = task.build_criterion(cfg.criterion)(model, batch(task))
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, recomputed = gradients(), gradients("--checkpoint-activations")
    assert list(plain) == list(recomputed)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


# ---------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------


def ready(checkpoint: Path) -> tuple[Any, Any]:
    """A trained checkpoint's task and model, ready to decode."""
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    models[0].eval()
    models[0].prepare_for_inference_(cfg)
    return task, models[0]


def log_probabilities(model: Any, sample: dict[str, Any], index: int, tokens: Tensor) -> Tensor:
    """log p of each token of one hypothesis, by one full forward over all of it at once.

    The sentence is taken out of its batch, without padding.
    """
    length = sample["net_input"]["src_lengths"][index]
    source = sample["net_input"]["src_tokens"][index, -length:][None]  # padding is on the left
    previous = torch.cat([tokens[-1:], tokens[:-1]])[None]  # </s> comes first
    output = model(source, length[None], previous)
    every = model.get_normalized_probs(output, log_probs=True)[0]
    return every.gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("told", [False, True], ids=["", "decoder told of the beam"])
def test_step_by_step_decoding_equals_the_full_forward(
    checkpoint: Path, beam: int, told: bool
) -> None:
    """Cached keys, reordered beams and padded batches change no hypothesis's probability.

    A decoder that is told of the beam's size keeps a sentence's keys once for all hypotheses.
    """
    task, model = ready(checkpoint)
    _, whole = ready(checkpoint)
    if told:
        model.decoder.set_beam_size(beam)
    sample = batch(task, "test", 12)
    assert len(set(sample["net_input"]["src_lengths"].tolist())) > 3  # so there is padding
    generator = task.build_generator([model], Namespace(beam=beam, max_len_a=1, max_len_b=20))
    with torch.inference_mode():
        hypotheses = task.inference_step(generator, [model], sample)
        for index, kept in enumerate(hypotheses):
            assert len(kept) == beam
            for hypothesis in kept:
                tokens = hypothesis["tokens"]
                expected = log_probabilities(whole, sample, index, tokens)
                torch.testing.assert_close(
                    hypothesis["positional_scores"], expected, atol=2e-5, rtol=1e-4
                )
                score = expected.sum().item() / len(tokens)
                assert hypothesis["score"].item() == pytest.approx(score, abs=2e-5)


def test_a_wider_beam_finds_translations_at_least_as_likely(checkpoint: Path) -> None:
    """Summed over sentences; the search maximizes the score, the mean log p of the tokens."""
    task, model = ready(checkpoint)
    sample = batch(task, "test", 12)
    totals = []
    for beam in (1, 4):
        generator = task.build_generator([model], Namespace(beam=beam, max_len_a=1, max_len_b=20))
        with torch.inference_mode():
            hypotheses = task.inference_step(generator, [model], sample)
        totals.append(sum(kept[0]["score"].item() for kept in hypotheses))
    assert totals[1] >= totals[0] - 1e-6  # both may find the same ones


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_nearly_the_same_probabilities(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    model = models[0].eval()
    inputs = batch(task, "test", 4)["net_input"]
    with torch.inference_mode():
        full = model.get_normalized_probs(model(**inputs), log_probs=False)
        model.to(dtype)
        half = model.get_normalized_probs(model(**inputs), log_probs=False)
    assert half.isfinite().all()
    assert (half.float() - full).abs().max() < 0.1
    assert (half.float() - full).abs().mean() < 0.001
