"""Label smoothing over the tokens that may be predicted."""

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor


@register_criterion(
    "label_smoothed_cross_entropy_allowed", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyAllowed(LabelSmoothedCrossEntropyCriterion):  # type: ignore[misc]
    """(1 - eps) * nll + eps * mean of -log p over the allowed tokens, summed over the targets.

    A token is allowed if the model gives it any probability: with a logit mask, others have none,
    and fairseq's own criterion would sum up their infinite losses. Without a mask all are allowed.
    A target that isn't allowed (one of the dev set that no training target has) adds no nll.
    """

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
