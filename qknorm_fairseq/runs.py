"""A run: one training, as a configuration means it, and the folder that keeps it."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

import qknorm_fairseq
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.reading import one_line, read_object

BEST, LAST = "checkpoint_best.pt", "checkpoint_last.pt"
CONFIG, SCORE = "config.yaml", "score.json"
NUMBERS = (
    *("bleu_tok", "bleu", "chrf", "ter"),
    *("params", "updates", "train_seconds", "tokens_per_second", "test_sentences"),
)


@dataclass(frozen=True)
class Run:
    """One training: its Hydra overrides, its resolved configuration, and its folder.

    Attributes:
        config: complete, fairseq's defaults included; what is trained with.
        name: how its folder, its table row and a cluster's queue call it: the model and, where
            there is one, the ablation (`transformer_qknorm+fixed_g`).
        ablation: the choice in `configs/ablation/`, None without one.
        launcher: the settings of Hydra's submitit launcher, if the run is to be a job; what is
            trained does not depend on them, so that they are neither in `config` nor `overrides`.
    """

    config_name: str
    overrides: tuple[str, ...]
    config: DictConfig
    name: str
    ablation: str | None = None
    launcher: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.checkpoint.save_dir)

    @property
    def data(self) -> Path:
        return Path(self.config.task.data)

    @property
    def pair(self) -> str:
        return f"{self.config.task.source_lang}-{self.config.task.target_lang}"

    @property
    def seed(self) -> int:
        return int(self.config.common.seed)

    @property
    def title(self) -> str:
        return f"{self.pair} {self.name} seed {self.seed}"

    def score(self) -> Mapping[str, Any]:
        """What `score.json` says: see :func:`read_score`; only for a finished run."""
        return read_score(self.folder)


def read_score(folder: Path) -> Mapping[str, Any]:
    """The `score.json` of a run's folder.

    Raises:
        QKNormError: it is missing or damaged.
    """
    file = folder / SCORE
    content = read_object(file)
    for key in NUMBERS:
        value = content.get(key)
        if key == "ter" and key in content and value is None:
            continue  # left out: a line was too long for it
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise QKNormError(f"{file}: has no number {key!r}; remove it and score the run again")
    if not isinstance(content.get("signatures"), dict):
        raise QKNormError(f"{file}: has no 'signatures'; remove it and score the run again")
    return content


def config_folder() -> Path:
    """The project's configurations: `configs/` of the checkout, or those in the package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "configs"
    return checkout if checkout.is_dir() else package / "share" / "configs"


def plan(config_dir: Path, config_name: str, overrides: Sequence[str]) -> list[Run]:
    """The runs that a configuration and its overrides mean: one for each combination of values.

    As with Hydra's own sweeps, `model=a,b common.seed=1,2` are four runs.

    Raises:
        QKNormError: there is no such configuration, a key or value in it is unknown, or two of
            the runs would share a folder.
    """
    if any(o.startswith("hydra/launcher=submitit") for o in overrides) and not find_spec(
        "submitit"
    ):
        raise QKNormError(
            "runs as jobs need hydra-submitit-launcher (on Python 3.11 or later): "
            "pip install 'qknorm-fairseq[cluster]'"
        )
    swept: list[list[str]] = []
    for override in overrides:
        key, equals, values = override.partition("=")
        if not equals:
            raise QKNormError(f"{override!r} is not a setting: write key=value")
        several = values.split(",") if re.fullmatch(r"[\w.+-]+(,[\w.+-]+)+", values) else [values]
        swept.append([f"{key}={value}" for value in several])
    with _hydra(config_dir, config_name):
        runs = [
            _resolve(config_dir, config_name, combination)
            for combination in itertools.product(*swept)
        ]
    owners: dict[Path, Run] = {}
    for run in runs:
        other = owners.setdefault(run.folder, run)
        if other is not run:
            raise QKNormError(
                f"{' '.join(other.overrides)} and {' '.join(run.overrides)} are both to be kept in "
                f"{run.folder}: set checkpoint.save_dir so that it differs"
            )
    return runs


@contextmanager
def _hydra(config_dir: Path, config_name: str) -> Iterator[None]:
    """Hydra with these files, and with all that fairseq and the plugin say of options."""
    import hydra
    from fairseq.dataclass.initialize import hydra_init

    if hydra.__version__.startswith("1.0."):
        raise QKNormError(
            f"configurations need Hydra 1.1, this is {hydra.__version__}: use Python 3.11 or 3.12, "
            "whose fairseq takes it, or train with fairseq-train's options"
        )
    if not (config_dir / f"{config_name}.yaml").is_file():
        there = ", ".join(sorted(file.stem for file in config_dir.glob("*.yaml"))) or "none"
        raise QKNormError(f"{config_dir / config_name}.yaml: no such file; there is {there}")
    qknorm_fairseq.register()
    hydra_init(config_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq matches files to schemas as Hydra 1.0 did
        # 1.1 as in fairseq-hydra-train; after a later one fairseq's own options can't be built.
        with hydra.initialize_config_dir(str(config_dir.resolve()), version_base="1.1"):
            yield


def _resolve(config_dir: Path, config_name: str, overrides: tuple[str, ...]) -> Run:
    from fairseq.dataclass.initialize import add_defaults
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)  # the files refer to ${hydra:job.name}
        job = HydraConfig.get()
        launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        name, ablation = str(job.job.name), job.runtime.choices.get("ablation")
        with open_dict(config):
            del config["hydra"]
        for group in ("model", "task"):
            if not isinstance(config[group], DictConfig):
                raise ValueError(f"{group} must be a group of settings, not {config[group]!r}")
        given = {group: set(config[group]) for group in ("model", "task")}
        add_defaults(config)
        plain: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise QKNormError(f"{config_dir / config_name}.yaml: {_reason(error)}") from None
    except (yaml.YAMLError, RecursionError) as error:  # says in which of the files, if it can
        raise QKNormError(
            f"{config_dir / config_name}.yaml: not YAML, or a file of its defaults is not: "
            f"{one_line(error)}"
        ) from None
    if not isinstance(plain["task"].get("data"), str):
        raise QKNormError(
            f"{config_dir / config_name}.yaml: task.data must name the prepared folder, not "
            f"{plain['task'].get('data')!r}"
        )
    for group, keys in given.items():
        kind = plain[group]["_name"]
        if unknown := sorted(keys - _options(group, kind)):
            raise QKNormError(
                f"{config_dir / config_name}.yaml: {group}.{unknown[0]}: {kind} has no such option"
            )
    return Run(
        config_name,
        tuple(o for o in overrides if not o.startswith(("hydra/launcher", "hydra.launcher"))),
        OmegaConf.create(plain),
        name,
        None if ablation in (None, "none") else str(ablation),
        launcher if "submitit" in str(launcher.get("_target_")) else None,
    )


def _options(group: str, name: str) -> set[str]:
    """What a model or task may be told. fairseq's own Transformer is told what ours is."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if group == "task":
        known = TASK_DATACLASS_REGISTRY.get(name)
    else:
        known = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
        known = known or MODEL_DATACLASS_REGISTRY["transformer_qknorm"]
    return {"_name", *known.__dataclass_fields__}


def _reason(error: BaseException) -> str:
    """An error of Hydra's and what it came from, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    # Hydra advises +key=value for a key that is not there; all that there are, are.
    reason = " ".join(line for line in lines if line and "To append to your config" not in line)
    cause = error.__cause__
    return f"{reason}: {str(cause).splitlines()[0]}" if cause and str(cause) else reason
