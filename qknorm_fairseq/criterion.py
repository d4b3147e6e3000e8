"""Label smoothing: fairseq's, computed faster, and that over the tokens that may be predicted."""

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor

from qknorm_fairseq.modules.smoothed_loss import Smoothing


@register_criterion(
    "label_smoothed_cross_entropy_fused", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyFused(LabelSmoothedCrossEntropyCriterion):  # type: ignore[misc]
    """fairseq's `label_smoothed_cross_entropy`: its options, and what it computes, up to rounding.

    A model that can makes the loss together with its last product while it is trained
    (`modules/smoothed_loss.py`); any other model is asked for its logits, as by fairseq.
    """

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        usual = reduce and not self.report_accuracy and not self.ignore_prefix_size
        if not (usual and model.training and getattr(model, "fuses_loss", False)):
            return super().forward(model, sample, reduce)  # type: ignore[no-any-return]
        target = sample["target"]
        smoothing = Smoothing(target, self.padding_idx, self.shares)
        loss, nll = model(**sample["net_input"], smoothing=smoothing)
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        logged = {
            "loss": loss.data,
            "nll_loss": nll.data,
            "ntokens": sample["ntokens"],
            "nsentences": target.size(0),
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    def shares(self, allowed: int) -> tuple[float, float]:
        """What counts the target's -log p, and each allowed token's."""
        other = self.eps / (allowed - 1)
        return 1 - self.eps - other, other


@register_criterion(
    "label_smoothed_cross_entropy_allowed", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyAllowed(LabelSmoothedCrossEntropyFused):
    """(1 - eps) * nll + eps * mean of -log p over the allowed tokens, summed over the targets.

    A token is allowed if the model gives it any probability: with a logit mask, others have none,
    and fairseq's own criterion would sum up their infinite losses. Without a mask all are allowed.
    A target that isn't allowed (one of the dev set that no training target has) adds no nll.
    """

    def shares(self, allowed: int) -> tuple[float, float]:
        return 1 - self.eps, self.eps / allowed

    def compute_loss(
        self, model: Any, net_output: Any, sample: Any, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        allowed = lprobs > float("-inf")
        lprobs = lprobs.masked_fill(~allowed, 0)
        nll = -lprobs.gather(1, target.unsqueeze(1)).squeeze(1)
        spread = -lprobs.sum(dim=1) / allowed.sum(dim=1)
        padding = target.eq(self.padding_idx)
        nll, spread = nll.masked_fill(padding, 0), spread.masked_fill(padding, 0)
        loss = (1 - self.eps) * nll + self.eps * spread
        return (loss.sum(), nll.sum()) if reduce else (loss, nll)
