"""Adam in one pass over the parameters: fairseq's `adam`, by torch's fused kernel.

fairseq adds eps to the second moment's root before the bias correction, torch after it:

    fairseq   lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
    torch     lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps')

which are the same for eps' = eps / sqrt(1 - b2^t).
"""

# No `from __future__ import annotations` here: fairseq reads the options' annotations as types.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035 - fairseq knows no `list[float]`

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, ListConfig


@dataclass
class FusedAdamConfig(FairseqDataclass):  # type: ignore[misc]
    adam_betas: Any = field(default="(0.9, 0.999)", metadata={"help": "betas for Adam optimizer"})
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon for Adam optimizer"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay, decoupled"})
    lr: List[float] = II("optimization.lr")  # noqa: UP006, RUF009


class _Adam(torch.optim.AdamW):
    """torch's, with `eps` as fairseq means it."""

    def __init__(self, params: Any, *, eps: float, **options: Any) -> None:
        super().__init__(params, eps=eps, fused=True, **options)
        self.eps = eps

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            states = (self.state[p] for p in group["params"] if p.grad is not None)
            done = max((float(state["step"]) for state in states if state), default=0.0)
            group["eps"] = self.eps / (1 - group["betas"][1] ** (done + 1)) ** 0.5
        return super().step(closure)


@register_optimizer("adam_fused", dataclass=FusedAdamConfig)
class FusedAdam(FairseqOptimizer):  # type: ignore[misc]
    """The options are those of fairseq's `adam`; so is what it computes, up to rounding."""

    def __init__(self, cfg: Any, params: Any) -> None:
        super().__init__(cfg)
        betas = cfg.adam_betas
        betas = eval_pair(betas) if isinstance(betas, str) else tuple(betas)
        self._optimizer = _Adam(
            params,
            lr=cfg.lr[0] if isinstance(cfg.lr, (Sequence, ListConfig)) else cfg.lr,
            betas=betas,
            eps=cfg.adam_eps,
            weight_decay=cfg.weight_decay,
        )

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """What counts over a checkpoint's own settings when it is loaded."""
        group = self._optimizer.param_groups[0]
        return {
            "lr": group["lr"],
            "betas": group["betas"],
            "eps": self._optimizer.eps,
            "weight_decay": group["weight_decay"],
        }

    @property
    def supports_flat_params(self) -> bool:
        return True


def eval_pair(text: str) -> tuple[float, float]:
    """ "(0.9, 0.98)" as fairseq's options write it.

    Raises:
        ValueError: it is something else.
    """
    try:
        first, second = (float(part) for part in text.strip("()[] ").split(","))
    except ValueError:
        raise ValueError(f"--adam-betas {text!r}: write two numbers, as '(0.9, 0.98)'") from None
    return first, second
