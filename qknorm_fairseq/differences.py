"""In what two runs' settings differ, beyond what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from qknorm_fairseq.prepared_data import DESCRIPTION
from qknorm_fairseq.reading import read_object
from qknorm_fairseq.results import Result
from qknorm_fairseq.runs import config_folder

# What may differ between two runs that are compared: which repetition it is, where it is kept,
# and how it was watched.
NEUTRAL = {
    *("common.seed", "checkpoint.save_dir", "common.user_dir", "dataset.num_workers"),
    *("common.log_interval", "common.log_format", "common.log_file", "common.no_progress_bar"),
    *("common.tensorboard_logdir", "common.wandb_project", "common.aim_repo"),
    *("common.aim_run_hash", "distributed_training.distributed_port"),
}
# What the experiment compares: the attention, and the norm of the residual blocks with it.
FACTOR = {
    *("model._name", "model.attention_norm", "model.residual_norm"),
    *("model.qknorm_g0", "model.qknorm_length", "model.qknorm_g0_from", "model.g_per"),
    *("model.attention_norm_groups", "model.attention_norm_scale"),
}


def differences(run: Result, base: Result) -> list[str]:
    """What sets a run apart from its baseline beyond the factor that is compared.

    Left out are NEUTRAL, FACTOR between two models, and the settings of the ablation that the
    model's name says; these and FACTOR as long as they are what the name means. A setting that
    others repeat (`optimization.lr`, `optimizer.lr`) is named once.

    Returns:
        "dataset.max_tokens: 1000, not 4096" and so on: the run's value, then the baseline's.
    """
    allowed = NEUTRAL | _ablation(run.model).keys() | _ablation(base.model).keys()
    if run.model != base.model:
        allowed |= FACTOR
    here, there = _settings(run), _settings(base)
    if not (here and there):
        return ["config.yaml: not there, so nothing is known of the settings"]
    if _made_from(run) and _made_from(run) == _made_from(base):
        allowed |= {"task.data"}  # the same data, wherever it was
    found, named = list[str](), set[tuple[str, ...]]()
    for key, value in _of_name(run.model).items():
        if key in here and here[key] != value:
            named.add((key.rpartition(".")[2], str(here[key]), str(there.get(key))))
            found.append(f"{key}: {here[key]}, not {value} as {run.model} has it")
    for key in dict.fromkeys([*here, *there]):
        values = here.get(key), there.get(key)
        what = (key.rpartition(".")[2], *map(str, values))
        if values[0] != values[1] and key not in allowed and what not in named:
            named.add(what)
            found.append(f"{key}: {values[0]}, not {values[1]}")
    if _made_from(run) != _made_from(base):
        found.append("qknorm.json: other data, or prepared in another way")
    for key in ("processor", "cores"):
        values = run.environment.get(key), base.environment.get(key)
        if values[0] != values[1]:
            found.append(f"{key}: {values[0]}, not {values[1]}")
    packages = [result.environment.get("packages", {}) for result in (run, base)]
    for name in dict.fromkeys([*packages[0], *packages[1]]):
        versions = packages[0].get(name), packages[1].get(name)
        if versions[0] != versions[1]:
            found.append(f"{name}: {versions[0]}, not {versions[1]}")
    return found


def _made_from(run: Result) -> Mapping[str, Any]:
    return read_object(run.folder / DESCRIPTION)


def _settings(run: Result) -> dict[str, Any]:
    """{"model.dropout": 0.3, ...}"""
    settings = flat(run.config)
    if settings.get("model._name") != "transformer":
        return settings
    # fairseq's own takes no notice of our options, and has its defaults for what was not said.
    from fairseq.models.transformer import TransformerConfig

    from qknorm_fairseq.models.transformer_qknorm import QKNormOptions

    settings |= {f"model.{one.name}": one.default for one in fields(QKNormOptions)}
    for key, value in _defaults(TransformerConfig).items():
        if str(value).startswith("${model."):  # as wide as the decoder, say
            value = settings.get(str(value)[2:-1].replace("model.decoder.", "model.decoder_"))
        settings.setdefault(f"model.{key}", value)
    return settings


def _defaults(options: Any, path: str = "") -> dict[str, Any]:
    """fairseq's defaults, with nested options written out: `encoder_layers`."""
    found: dict[str, Any] = {}
    for one in fields(options):
        name = f"{path}{one.name}"
        nested = is_dataclass(one.type)
        found |= _defaults(one.type, f"{name}_") if nested else {name: one.default}
    return found


def flat(content: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys."""
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{path}.{key}" if path else str(key)
        settings |= flat(value, name) if isinstance(value, dict) else {name: value}
    return settings


def _of_name(model: str) -> dict[str, Any]:
    """The settings of FACTOR and of ablations as a model's name means them."""
    from qknorm_fairseq.models.transformer_qknorm import SCALENORM, QKNormOptions

    own = {one.name: one.default for one in fields(QKNormOptions) if one.name != "_name"}
    if model.startswith("transformer_scalenorm"):
        own |= SCALENORM
    factor = {f"model.{name}": value for name, value in own.items() if f"model.{name}" in FACTOR}
    return factor | _ablation(model)


def _ablation(model: str) -> dict[str, Any]:
    """The settings that the ablations in a model's name are about, by configs/ablation/."""
    files = [config_folder() / "ablation" / f"{name}.yaml" for name in model.split("+")[1:]]
    contents = [yaml.safe_load(file.read_text("utf-8")) for file in files if file.is_file()]
    settings = {key: value for content in contents for key, value in flat(content).items()}
    return {key: value for key, value in settings.items() if not key.startswith("hydra.")}
