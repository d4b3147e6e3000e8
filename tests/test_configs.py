"""The configurations of the five pairs: that they are the paper's, and that sweeps of them run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from conftest import PROJECT, Run
from faults import Fault
from omegaconf import OmegaConf

from qknorm_fairseq import runs
from qknorm_fairseq.corpora import load_registry
from qknorm_fairseq.errors import QKNormError

# Henry et al. 2020 and their repository: corpus, layers, heads, dropout, batches an epoch, epochs
# at most, the rate under which training stops, and the sizes of train, dev and test.
PAPER = {
    "en-vi": ("iwslt15", 6, 8, 0.3, 1500, 200, 1e-5, (133_317, 1_553, 1_268)),
    "ar-en": ("ted", 6, 8, 0.3, 2000, 200, 1e-5, (214_111, 4_714, 5_953)),
    "en-he": ("ted", 6, 8, 0.3, 2000, 200, 1e-5, (211_819, 4_515, 5_508)),
    "gl-en": ("ted", 4, 4, 0.4, 100, 1000, 5e-5, (10_017, 682, 1_007)),
    "sk-en": ("ted", 6, 8, 0.3, 600, 200, 1e-5, (61_470, 2_271, 2_445)),
}
MODELS = ("transformer_qknorm", "transformer_scalenorm", "transformer")
COMMON = {
    "task._name": "translation_qknorm",
    "task.gnmt_lenpen": 0.6,
    "task.extra_length": 50,
    "task.eval_bleu": True,
    "task.eval_tokenized_bleu": True,
    "task.eval_bleu_remove_bpe": "sentencepiece",
    "model.encoder_embed_dim": 512,
    "model.decoder_embed_dim": 512,
    "model.encoder_ffn_embed_dim": 2048,
    "model.decoder_ffn_embed_dim": 2048,
    "model.encoder_normalize_before": True,
    "model.decoder_normalize_before": True,
    "model.share_all_embeddings": True,
    "criterion._name": "label_smoothed_cross_entropy_allowed",
    "criterion.label_smoothing": 0.1,
    "optimizer._name": "adam_fused",
    "optimizer.adam_betas": "(0.9, 0.999)",
    "optimizer.adam_eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler._name": "decay_on_bleu",
    "lr_scheduler.warmup_updates": 8000,
    "lr_scheduler.bleu_patience": 3,
    "lr_scheduler.lr_decay": 0.8,
    "optimization.clip_norm": 1.0,
    "optimization.sentence_avg": False,
    "optimization.update_freq": [1],
    "dataset.max_tokens": 4096,
    "dataset.batch_size": None,
    "distributed_training.distributed_world_size": 1,
    "checkpoint.best_checkpoint_metric": "bleu",
    "checkpoint.maximize_best_checkpoint_metric": True,
}
PAPER_BLOCKS = {"fixnorm": True, "output_bias": True, "small_init": True, "word_dropout": 0.1}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pair", PAPER)
def test_a_pair_is_trained_as_the_paper_says(pair: str, model: str) -> None:
    corpus, layers, heads, dropout, batches, epochs, least_lr, _ = PAPER[pair]
    name = pair.replace("-", "_")
    (run,) = runs.plan(PROJECT / "configs", name, [f"model={model}"])
    expected = COMMON | {
        "model._name": model,
        **{f"model.{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"model.{side}_attention_heads": heads for side in ("encoder", "decoder")},
        **{f"model.{kind}dropout": dropout for kind in ("", "attention_", "activation_")},
        "task.data": f"data/prepared/{corpus}/{pair}",
        "task.epoch_batches": batches,
        "optimization.max_epoch": epochs,
        "lr_scheduler.least_lr": least_lr,
    }
    if model != "transformer":
        expected |= {f"model.{key}": value for key, value in PAPER_BLOCKS.items()}
        expected |= {"model.activation_fn": "relu", "model.logit_mask": True}
        expected["model.attention_norm"] = "l2" if model == "transformer_qknorm" else "none"
        expected["model.residual_norm"] = "layer" if model == "transformer_qknorm" else "scale"
    assert {key: OmegaConf.select(run.config, key) for key in expected} == expected
    assert json.loads(run.config.task.eval_bleu_args) == {"beam": 4}
    (peak,) = run.config.optimization.lr
    assert peak == pytest.approx(512**-0.5 * 8000 * 8000**-1.5, rel=1e-12)
    assert run.folder == Path(f"runs/{corpus}/{pair}/{model}/seed1")


def test_an_old_hydra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the last official fairseq wants, on Python 3.10."""
    monkeypatch.setattr("hydra.__version__", "1.0.7")
    with pytest.raises(QKNormError, match=r"need Hydra 1\.1, this is 1\.0\.7: use Python 3\.11"):
        runs.plan(PROJECT / "configs", "gl_en", [])


def test_no_warmup_starts_where_the_paper_does() -> None:
    settings = ["lr_scheduler.warmup_updates=0", "optimization.lr=[3e-4]"]
    (run,) = runs.plan(PROJECT / "configs", "gl_en", settings)
    assert run.config.lr_scheduler.warmup_updates == 0
    assert run.config.optimization.lr == [3e-4]


def test_the_corpora_are_as_large_as_the_paper_s() -> None:
    registry = load_registry()
    for pair, (corpus, *_, sizes) in PAPER.items():
        counts = registry.corpus(corpus).counts(pair)
        assert (counts.train, counts.valid, counts.test) == sizes


def test_two_models_differ_in_nothing_but_the_model() -> None:
    first, second = runs.plan(
        PROJECT / "configs", "gl_en", ["model=transformer_scalenorm,transformer_qknorm"]
    )
    settings = [OmegaConf.to_container(run.config) for run in (first, second)]
    differing = {
        f"{group}.{key}"
        for group, content in settings[0].items()  # type: ignore[union-attr]
        for key in content or ()
        if content[key] != settings[1][group][key]  # type: ignore[index, call-overload]
    }
    assert differing == {
        *("model._name", "model.attention_norm", "model.residual_norm", "checkpoint.save_dir")
    }


ABLATIONS = {
    "fixed_g": {"g_per": "fixed"},
    "g_per_head": {"g_per": "head"},
    "g0_sqrt_d": {"qknorm_g0_from": "head_dim"},
    "no_fixnorm": {"fixnorm": False},
    "scalenorm": {"residual_norm": "scale"},
    "postnorm": {"encoder_normalize_before": False, "decoder_normalize_before": False},
    **{
        f"heads{heads}": {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
        for heads in (4, 8, 16)
    },
    "no_word_dropout": {"word_dropout": 0.0},
    "no_logit_mask": {"logit_mask": False},
}


def test_every_ablation_changes_what_it_says_and_has_a_folder_of_its_own() -> None:
    files = {file.stem for file in (PROJECT / "configs/ablation").glob("*.yaml")}
    assert files == {"none", *ABLATIONS}
    plain, *ablated = runs.plan(
        PROJECT / "configs", "sk_en", [f"ablation={','.join(['none', *ABLATIONS])}"]
    )
    for run, (name, change) in zip(ablated, ABLATIONS.items(), strict=True):
        differing = {
            key: value
            for key, value in run.config.model.items()
            if value != plain.config.model[key]
        }
        if name != "heads8":  # what sk-en has anyway
            assert differing == change
        assert run.folder == Path(f"runs/ted/sk-en/transformer_qknorm+{name}/seed1")
        assert (run.name, run.ablation) == (f"transformer_qknorm+{name}", name)


TINY_SWEEP = (
    *("size=tiny", "common.cpu=true", "task.source_lang=xx", "task.target_lang=yy"),
    *("model.encoder_layers=1", "model.decoder_layers=1"),
    *("model.encoder_embed_dim=32", "model.decoder_embed_dim=32"),
    *("optimization.max_update=4", "task.epoch_batches=2"),
)


def test_fairseq_sweeps_over_ablations(prepared: Path, run: Run, tmp_path: Path) -> None:
    """The command of the README, by fairseq's own program: a folder for each."""
    done = run(
        "fairseq-hydra-train",
        *("-m", "--config-dir", PROJECT / "configs", "--config-name", "gl_en"),
        *("ablation=none,fixed_g,g_per_head", *TINY_SWEEP),
        *(f"task.data={prepared}", f"common.user_dir={PROJECT / 'qknorm_fairseq'}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    from qknorm_fairseq.checkpoints import load

    shapes = {}
    for name in (
        "transformer_qknorm",
        "transformer_qknorm+fixed_g",
        "transformer_qknorm+g_per_head",
    ):
        folder = tmp_path / "runs/ted/xx-yy" / name / "seed1"
        state = load(folder / "checkpoint_last.pt")
        assert state["optimizer_history"][-1]["num_updates"] == 4
        g = state["model"]["encoder.layers.0.self_attn.g"]
        shapes[name] = tuple(g.shape)
        length = json.loads((prepared / "qknorm.json").read_text())["length"]
        unmoved = bool((g == g.new_tensor(math.log2(length**2 - length))).all())
        assert unmoved == name.endswith("fixed_g")
    assert list(shapes.values()) == [(), (), (4, 1, 1)]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("ablation=nope", "Could not find 'ablation/nope'"),
        ("optimization.max_updat=3", "Could not override 'optimization.max_updat'"),
        ("lr_scheduler.least_rate=3", "Could not override 'lr_scheduler.least_rate'"),
        ("model.heads=3", "Could not override 'model.heads'"),
        ("optimization.max_update=many", "optimization.max_update=many"),
        ("nonsense=1", "Could not override 'nonsense'"),
    ],
)
def test_fairseq_refuses_an_unknown_key_or_value(
    setting: str, named: str, run: Run, tmp_path: Path
) -> None:
    done = run(
        "fairseq-hydra-train",
        *("--config-dir", PROJECT / "configs", "--config-name", "gl_en", setting),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert named in done.stderr
    assert list(tmp_path.iterdir()) == []


DEFAULTS = "defaults: [{model: transformer}, _self_, {corpus: demo}, {ablation: none}]\n"
# Configurations that are none: (file, what it holds, settings, what is said).
NO_CONFIGURATIONS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "model is a number": ("mine.yaml", f"{DEFAULTS}model: 7\n", (), ""),
    "task is a list": ("mine.yaml", f"{DEFAULTS}task: [1]\n", (), ""),
    "no data": ("mine.yaml", "{whole}", ("task.data=null",), "task.data must name the prepared f"),
    "no YAML": ("mine.yaml", "model: [\n", (), "not YAML, or a file of its defaults is not: "),
    "a default is no YAML": ("model/transformer.yaml", "a: b: c", ("model=transformer",), "YAML"),
    "nested without end": ("mine.yaml", "[" * 5_000, (), "not YAML, or a file of its defaults"),
    "a list": ("mine.yaml", "[1, 2]\n", (), ""),
    "empty": ("mine.yaml", "", (), ""),
    "no UTF-8": ("mine.yaml", "model: \udcff\n", (), ""),
    "no date": ("mine.yaml", "model: 2024-13-45\n", (), ""),
    "code": ("mine.yaml", "model: !!python/object/apply:os.system [touch ran]\n", (), "YAML"),
}


@pytest.mark.parametrize("name", NO_CONFIGURATIONS)
def test_what_is_no_configuration(name: str, tmp_path: Path, fault: Fault) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(PROJECT / "configs", configs)
    whole = (configs / "demo.yaml").read_text(encoding="utf-8")
    (configs / "mine.yaml").write_text(whole, encoding="utf-8")
    file, content, settings, expected = NO_CONFIGURATIONS[name]
    text = content.replace("{whole}", whole)
    (configs / file).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(QKNormError) as error:
        runs.plan(configs, "mine", list(settings))
    message = str(error.value)
    assert message.startswith(f"{configs}/mine.yaml: ")
    assert expected in message
    assert "\n" not in message
    assert not Path("ran").exists()
    fault("configurations", f"a file of one: {name}", message)
