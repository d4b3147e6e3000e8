"""What fairseq leaves out when it resumes, so that a training ends as if it had run through.

fairseq restores weights, optimizer, schedule and the place in the data. What it leaves out:

- A checkpoint gets its name before its content is on the disk, and is read unchecked.
- `checkpoint_last.pt` is often a copy made in place; killed meanwhile, half a file is left.
- The batches are formed by the number of the epoch in which the process started.
- An epoch's validation result reaches the schedule only after the epoch's checkpoint is written.
- How long `--patience` has waited is not saved.
- In half precision, neither are the weights' full-precision originals, nor when the loss scale is
  to grow.
- A training that has ended does one more update when it is called again.
- The sums of the log (seconds trained, say) stand still or begin anew, and at the start of an epoch
  so do the averages of an interval that began in the one before.
- The best score outlives its training in the process: the next one of a Hydra sweep would have to
  beat it before it writes `checkpoint_best.pt`.

`install` puts a layer around a few functions of fairseq's that sees to each of these. What is not
resumed keeps fairseq's numbers.
"""

from __future__ import annotations

import logging
import sys
import zipfile
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, file_io
from fairseq.logging import meters, metrics
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from qknorm_fairseq import checkpoints
from qknorm_fairseq.around import around
from qknorm_fairseq.files import copy, settle

logger = logging.getLogger(__name__)
KEY = "qknorm_resume"  # in a checkpoint's extra_state
COUNTS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")
PATIENCE = ("best", "num_runs")  # fairseq keeps them as attributes of a function


def install() -> None:
    """Put the layer around fairseq's functions. Repeatable."""
    around(Trainer, "save_checkpoint", _save)
    around(Trainer, "load_checkpoint", _load)
    around(FairseqTask, "get_batch_iterator", _get_batch_iterator)
    around(file_io.PathManager, "copy", _copy)
    around(file_io.PathManager, "rename", _rename)


def _copy(inner: Any, source: str, target: str, overwrite: bool = False) -> Any:
    if file_io.IOPathManager is not None:  # the file may be where there is no renaming
        return inner(source, target, overwrite=overwrite)
    copy(Path(source), Path(target))
    return target


def _rename(inner: Any, source: str, target: str) -> None:
    """A checkpoint gets its name when it is on the disk, or a power cut leaves neither."""
    settle(Path(source), Path(target))


def _save(inner: Any, trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    scaler, stop = _loss_scaler(trainer), getattr(_command(), "should_stop_early", None)
    left_out = {
        "patience": {name: getattr(stop, name) for name in PATIENCE if hasattr(stop, name)},
        "loss_scaler": {name: getattr(scaler, name) for name in COUNTS} if scaler else {},
        "fp32_params": [weights.detach().cpu() for weights in _originals(trainer)],
    }
    return inner(trainer, filename, {**extra_state, KEY: left_out})


def _load(
    inner: Any,
    trainer: Any,
    filename: str,
    reset_optimizer: bool = False,
    reset_lr_scheduler: bool = False,
    optimizer_overrides: Any = None,
    reset_meters: bool = False,
) -> Any:
    """fairseq calls this once, before it trains, whether there is a checkpoint or not."""
    command = _command()
    if command is not None:
        around(command, "train", _train)
        _forget(command.should_stop_early, PATIENCE)
    _forget(checkpoint_utils.save_checkpoint, ("best",))
    if zipfile.is_zipfile(filename):
        checkpoints.check_bytes(Path(filename))
    try:
        extra_state = inner(
            trainer,
            filename,
            reset_optimizer,
            reset_lr_scheduler,
            optimizer_overrides,
            reset_meters,
        )
    except Exception:
        if Path(filename).is_file():
            checkpoints.load(Path(filename))  # it says what is wrong with the file, if that is it
        raise
    if extra_state is None or reset_optimizer:
        return extra_state
    left_out = extra_state.get(KEY, {})
    if command is not None:
        for name, value in left_out.get("patience", {}).items():
            setattr(command.should_stop_early, name, value)
    for name, value in left_out.get("loss_scaler", {}).items():
        if scaler := _loss_scaler(trainer):
            setattr(scaler, name, value)
    for weights, saved in zip(_originals(trainer), left_out.get("fp32_params", ()), strict=False):
        weights.data.copy_(saved)
    place = extra_state["train_iterator"]
    at_start = place.get("iterations_in_epoch", 0) == 0  # saved at the end of the epoch before
    if at_start and not reset_lr_scheduler:
        trainer.lr_step(place["epoch"] - 1, extra_state["val_loss"])
    if not reset_meters:
        _restore_meters(extra_state["metrics"], at_start)
    return extra_state


def _restore_meters(state: Any, at_start: bool) -> None:
    metrics.load_state_dict(state)
    overall = metrics.get_meters("default")
    metrics._active_aggregators["default"] = overall  # where fairseq adds to it
    for meter in overall.values():
        if isinstance(meter, meters.TimeMeter):
            meter.reset()
    if at_start:
        metrics.reset_meters("train")


def _train(inner: Any, cfg: Any, trainer: Any, *args: Any) -> Any:
    """An epoch's training: none, where the training has ended before."""
    max_update, patience = cfg.optimization.max_update, cfg.checkpoint.patience
    updates = trainer.get_num_updates()
    waited = getattr(_command().should_stop_early, "num_runs", 0)
    if 0 < max_update <= updates or 0 < patience <= waited:
        logger.info(f"the training has ended before, with update {updates}: nothing is done")
        return [None], True
    return inner(cfg, trainer, *args)


def _get_batch_iterator(inner: Any, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Batches that serve for all epochs are formed as in the first; loading sets the epoch."""
    for_all = task.can_reuse_epoch_itr(dataset) and not kwargs.get("disable_iterator_cache")
    if for_all and "epoch" in kwargs:
        kwargs["epoch"] = 1
    return inner(task, dataset, *args, **kwargs)


def _command() -> Any:
    """The module of fairseq-train, if this process is one."""
    for name in ("__main__", "fairseq_cli.train"):
        module = sys.modules.get(name)
        if hasattr(module, "should_stop_early"):
            return module
    return None


def _loss_scaler(trainer: Any) -> Any:
    scaler = getattr(trainer.optimizer, "scaler", None)
    return scaler if isinstance(scaler, DynamicLossScaler) else None


def _originals(trainer: Any) -> list[Any]:
    """The weights that --fp16 and --bf16 train, of which the model has rounded copies."""
    weights = getattr(trainer.optimizer, "fp32_params", [])
    return list(weights.values()) if isinstance(weights, dict) else list(weights)


def _forget(function: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(function, name):
            delattr(function, name)
