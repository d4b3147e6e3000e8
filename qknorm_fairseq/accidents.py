"""fairseq's handling of accidents, made to work with these models and today's torch.

When a gradient is not finite, fairseq runs the batch again, and its NanDetector logs the first
module whose output, or its gradient, isn't. Two things are in its way:

- torch's old module hooks for gradients fail on modules that return a dict of lists, as each
  encoder does: a StopIteration then hides what was wrong. Hooks on the tensors work on any.
- A logit mask gives -inf to the tokens that are never targets. That is no fault, and where -inf is
  one, NaN follows.

A batch for which memory does not suffice is left out. Where that is all of them, fairseq would go
through epoch after epoch without an update, for ever.

A process that reads data ends once its training is gone. torch lets it remember who its parent is
when it is ready: if the training was killed before that, it took whoever adopts orphans for it, and
stayed for ever.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils.data._utils.worker import ManagerWatchdog

from qknorm_fairseq.around import around
from qknorm_fairseq.errors import QKNormError


def install() -> None:
    """Put the layer around fairseq's functions. Repeatable."""
    around(NanDetector, "add_hooks", _add_hooks)
    around(NanDetector, "_detect", _detect)
    around(Trainer, "_log_oom", _log_oom)
    around(Trainer, "begin_epoch", _begin_epoch)
    around(ManagerWatchdog, "__init__", _know_parent)


def _add_hooks(inner: Any, detector: Any, module: Any) -> None:
    backward, detector.backward = detector.backward, False
    inner(detector, module)
    detector.backward = backward
    if not backward:
        return

    def watch(module: Any, inputs: Any, output: Any) -> None:
        def check(grad: Tensor) -> None:
            detector.bhook_fn(module, (), grad)

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    detector.bhooks.append(module.register_forward_hook(watch))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (dict, list, tuple)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)


def _detect(inner: Any, detector: Any, tensor: Tensor, name: str, backward: bool) -> Any:
    if torch.is_floating_point(tensor) and not backward:
        tensor = tensor.masked_fill(tensor == -math.inf, 0)
    return inner(detector, tensor, name, backward)


def _log_oom(inner: Any, trainer: Any, error: Any) -> None:
    trainer.qknorm_left_out = True
    inner(trainer, error)


def _begin_epoch(inner: Any, trainer: Any, epoch: int) -> None:
    updates = trainer.get_num_updates()
    if getattr(trainer, "qknorm_left_out", False) and updates == trainer.qknorm_updates:
        raise QKNormError(f"epoch {epoch - 1}: out of memory with every batch")
    trainer.qknorm_left_out, trainer.qknorm_updates = False, updates
    inner(trainer, epoch)


def _know_parent(inner: Any, watchdog: Any) -> None:
    inner(watchdog)
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.get_start_method() == "fork":
        watchdog.manager_pid = parent.pid  # as it was before the fork
