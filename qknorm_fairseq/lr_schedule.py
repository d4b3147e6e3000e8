"""The paper's learning rate: warm up, stay flat, decay on dev BLEU, stop.

For update s <= warm-up: lr * s / warm-up, which is scale * d^-0.5 * s * warm-up^-1.5 for the peak
lr = scale * (d * warm-up)^-0.5 (4.94e-4 for d = 512 and 8,000 updates). Then flat; after each
epoch past the warm-up whose dev BLEU is below the lowest of the 3 epochs before it, lr is
multiplied by 0.8; under the least rate, training stops.
"""

# No `from __future__ import annotations` here: fairseq reads the options' annotations as types.

from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035 - fairseq knows no `list[float]`

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II


@dataclass
class DecayOnBleuConfig(FairseqDataclass):  # type: ignore[misc]
    warmup_updates: int = field(
        default=8000,
        metadata={"help": "warm up linearly for so many updates; 0: start at --lr"},
    )
    bleu_patience: int = field(
        default=3,
        metadata={"help": "decay when dev BLEU is below the lowest of so many epochs before"},
    )
    lr_decay: float = field(default=0.8, metadata={"help": "factor of each decay"})
    least_lr: float = field(
        default=1e-5,
        metadata={"help": "stop under this rate (--stop-min-lr would stop in the warm-up)"},
    )
    stop_min_lr: float = II("optimization.stop_min_lr")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    lr: List[float] = II("optimization.lr")  # noqa: UP006, RUF009


@register_lr_scheduler("decay_on_bleu", dataclass=DecayOnBleuConfig)
class DecayOnBleu(FairseqLRScheduler):  # type: ignore[misc]
    """See the module. Needs --best-checkpoint-metric bleu and --stop-min-lr 0.

    Raises:
        ValueError: several rates are given, fairseq would not notice the stop, or would give
            another number than BLEU.
    """

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise ValueError("decay_on_bleu takes one --lr, its peak")
        if cfg.stop_min_lr != 0:
            raise ValueError("decay_on_bleu stops by a rate of 0: it needs --stop-min-lr 0")
        if cfg.best_checkpoint_metric != "bleu":
            raise ValueError(
                "decay_on_bleu decays on dev BLEU: it needs --eval-bleu, --best-checkpoint-metric "
                "bleu and --maximize-best-checkpoint-metric"
            )
        self.flat = float(cfg.lr[0])
        self.history: list[float] = []
        self.epoch = 0  # the last one in the history
        self.updates = 0
        self.step_update(0)

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """Note an epoch's dev BLEU. fairseq calls this after each epoch, and when it resumes:
        then without a BLEU, and with the epoch to come."""
        if val_loss is not None:
            self._observe(epoch, float(val_loss))
        return self.step_update(self.updates)

    def _observe(self, epoch: int, bleu: float) -> None:
        if epoch <= self.epoch:
            return
        before = self.history[-self.cfg.bleu_patience :]
        self.history.append(bleu)
        self.epoch = epoch
        past_warmup = self.updates >= self.cfg.warmup_updates
        if past_warmup and len(before) == self.cfg.bleu_patience and bleu < min(before):
            self.flat *= self.cfg.lr_decay

    def step_update(self, num_updates: int) -> float:
        self.updates = num_updates
        warmup = self.cfg.warmup_updates
        if self.flat < self.cfg.least_lr:
            rate = 0.0
        elif num_updates < warmup:
            rate = self.flat * (num_updates + 1) / warmup  # of the update to come
        else:
            rate = self.flat
        self.optimizer.set_lr(rate)
        return rate

    def state_dict(self) -> dict[str, Any]:
        return {
            "flat": self.flat,
            "history": list(self.history),
            "epoch": self.epoch,
            "updates": self.updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flat = state_dict["flat"]
        self.history = list(state_dict["history"])
        self.epoch = state_dict["epoch"]
        self.updates = state_dict["updates"]
