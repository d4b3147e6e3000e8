"""fairseq imports this folder of a user directory; what has no folder of its own comes with it."""

from qknorm_fairseq import criterion, lr_schedule, optimizer
from qknorm_fairseq.tasks import translation_qknorm

__all__ = ["criterion", "lr_schedule", "optimizer", "translation_qknorm"]
