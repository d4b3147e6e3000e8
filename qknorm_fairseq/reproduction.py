"""The paper's experiment on one pair or all, from nothing to a table: `scripts/reproduce.sh`.

Fetch, prepare, then each model and seed: train, translate, score. What is done is not done again;
what was interrupted goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from qknorm_fairseq.corpora import load_registry
from qknorm_fairseq.distributed import RESUME
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.experiment import run_all
from qknorm_fairseq.fetch import fetch
from qknorm_fairseq.prepared_data import prepare_corpus
from qknorm_fairseq.progress import Steps
from qknorm_fairseq.runs import Run, config_folder, plan
from qknorm_fairseq.training import console

PAPER_CORPORA = {
    "en-vi": "iwslt15",
    **dict.fromkeys(("ar-en", "en-he", "gl-en", "sk-en"), "ted"),
}
MODELS = ("transformer_scalenorm", "transformer_qknorm")  # the baseline first
DATA = Path("data")  # as configs/corpus/ names it


def main(
    pair: Annotated[str, typer.Argument(help="en-vi, ar-en, en-he, gl-en, sk-en, or all.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="More Hydra settings: ablation=none,fixed_g.")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="(default: the paper's, iwslt15 or ted; with --tiny catalogues)"),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help=f"(default: {','.join(MODELS)}, with --tiny their tiny ones; with all pairs "
            "fairseq's own transformer too, on gl-en)"
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="One run each: 1,2,3.")] = "1",
    tiny: Annotated[bool, typer.Option("--tiny", help="2+2 layers, a few minutes a run.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Without a GPU.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Half precision (GPU).")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="bfloat16, on a CPU as well.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="Share each batch among so many GPUs.")] = 1,
    launcher: Annotated[
        str | None,
        typer.Option(help="Each run as a job: submitit_slurm, submitit_local (configs/hydra/)."),
    ] = None,
    local: Annotated[
        Path | None, typer.Option("--from", help="Folder with the corpus's published files.")
    ] = None,
    mirror: Annotated[str | None, typer.Option(help="Another address to download from.")] = None,
    registry: Annotated[
        Path | None, typer.Option(help="Another file like data/corpora.yaml.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--in", help="Folder to have data/ and runs/ in.")
    ] = Path(),
) -> None:
    """Run the experiment of Henry et al. 2020 and its baseline on one language pair, or on all."""
    pair = pair.replace("_", "-")
    pairs = list(PAPER_CORPORA) if pair == "all" else [pair]
    if pairs[0] not in PAPER_CORPORA:
        raise typer.BadParameter(f"no pair {pair!r}; there is {', '.join(PAPER_CORPORA)} and all")
    if fp16 and bf16:
        raise typer.BadParameter("give either --fp16 or --bf16")
    check_device(cpu=cpu, gpus=gpus, fp16=fp16, here=launcher != "submitit_slurm")
    if cpu and bf16 and "transformer" in (models or "").split(","):
        raise QKNormError("fairseq's own transformer has no bfloat16 on a CPU: leave out --bf16")
    options = [
        f"common.seed={seeds}",
        *(["size=tiny"] if tiny else []),
        *(["common.cpu=true"] if cpu else []),
        *(["common.fp16=true"] if fp16 else []),
        # fairseq's own bfloat16 needs a GPU; fairseq's own Transformer then has none on a CPU.
        *([f"{'model.bf16_autocast' if cpu else 'common.bf16'}=true"] if bf16 else []),
        *([f"hydra/launcher={launcher}"] if launcher else []),
        *(settings or []),
    ]
    known, local = load_registry(registry), local and local.resolve()
    os.chdir(folder)
    steps = Steps(console)
    # All of them before hours of work: are the settings right?
    corpora = {one: corpus or ("catalogues" if tiny else PAPER_CORPORA[one]) for one in pairs}
    planned: dict[str, list[Run]] = {}
    for one in pairs:
        chosen = models or ",".join(
            [f"{model}_tiny" if tiny else model for model in MODELS]
            + (["transformer"] if one == "gl-en" and len(pairs) > 1 and not (cpu and bf16) else [])
        )
        overrides = [f"model={chosen}", f"corpus={corpora[one]}", *options]
        planned[one] = plan_shared(one, overrides, gpus)
    if planned[pairs[0]][0].launcher:
        from qknorm_fairseq.jobs import cluster_of

        cluster_of(planned[pairs[0]])
    runs, failed = [], 0
    for one in pairs:
        try:
            fetch(corpora[one], one, DATA, local=local, mirror=mirror, registry=known)
            steps.done(f"{one} {corpora[one]}: fetched")
            description = prepare_corpus(
                corpora[one],
                one,
                data_dir=DATA,
                vocab_size=known.corpus(corpora[one]).vocab_size,
                say=lambda line: None,
            )
        except QKNormError as error:
            if len(pairs) == 1:
                raise
            steps.failed(f"{one} {corpora[one]}: {error}")
            failed += len(planned[one])
            continue
        counts = ", ".join(f"{split} {count:,}" for split, count in description.sentences.items())
        steps.done(f"{one} {corpora[one]}: prepared ({counts})")
        runs += planned[one]
    run_all(runs, steps, failed=failed)


def plan_shared(pair: str, overrides: Sequence[str], gpus: int) -> list[Run]:
    """The pair's runs, each batch shared among so many GPUs: an update sees as much as with one."""
    configs, name = config_folder(), pair.replace("-", "_")
    runs = plan(configs, name, overrides)
    if gpus == 1:
        return runs
    shared = (
        f"distributed_training.distributed_world_size={gpus}",
        f"dataset.max_tokens={runs[0].config.dataset.max_tokens // gpus}",
        *(f"{name}={value}" for name, value in RESUME.items()),
    )
    return plan(configs, name, [*overrides, *shared])


def check_device(*, cpu: bool, gpus: int, fp16: bool, here: bool = True) -> None:
    """
    Args:
        here: the runs are trained on this machine.

    Raises:
        QKNormError: this machine does not have what is asked for.
    """
    there = torch.cuda.device_count()
    if cpu:
        if fp16 or gpus > 1:
            option = "--fp16" if fp16 else "--gpus"
            raise QKNormError(f"{option} is for GPUs: leave it out, or leave out --cpu")
    elif not here:
        return
    elif not there:
        raise QKNormError("no GPU found; --cpu does without, best with --tiny")
    elif gpus > there:
        raise QKNormError(f"--gpus {gpus}: this machine has {there}")


if __name__ == "__main__":
    from qknorm_fairseq.cli import run_app

    os.environ.pop("QKNORM_DATA", None)  # the configurations name the folder data/
    run_app(lambda: typer.run(main))
