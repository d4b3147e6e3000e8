"""Translation as the paper decodes and validates: beam search with GNMT's length penalty.

A hypothesis Y of a source X scores log P(Y | X) / ((5 + |Y|) / 6)^alpha (Wu et al. 2016, arXiv
1609.08144, section 7), |Y| counting its end of sentence; it has at most |X| + 50 subwords. This
holds in fairseq-generate, fairseq-interactive and the BLEU validation during training alike.
"""

# No `from __future__ import annotations` here: fairseq reads the options' annotations as types.

import math
from dataclasses import dataclass, field
from typing import Any

from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from qknorm_fairseq.epochs import FixedEpochs

EXTRA_LENGTH = 50
ALPHA = 0.6


@dataclass
class TranslationQKNormConfig(TranslationConfig):  # type: ignore[misc]
    gnmt_lenpen: float = field(
        default=ALPHA,
        metadata={"help": "alpha of GNMT's length penalty; negative: fairseq's own --lenpen"},
    )
    extra_length: int = field(
        default=EXTRA_LENGTH,
        metadata={
            "help": "a hypothesis has at most so many subwords more than its source; negative: "
            "fairseq's own --max-len-a and --max-len-b"
        },
    )
    epoch_batches: int = field(
        default=0,
        metadata={"help": "validate and save after so many batches; 0: after each pass"},
    )


class GNMTSequenceGenerator(SequenceGenerator):  # type: ignore[misc]
    """fairseq's beam search with GNMT's length penalty instead of a power of the length.

    Args:
        alpha: strength of the penalty; 0 compares the plain log-probabilities.
    """

    def __init__(self, *args: Any, alpha: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def finalize_hypos(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """As fairseq's, which divides by |Y|^len_penalty, where |Y| = step + 1.

        So the power is chosen for this length such that it gives ((5 + |Y|) / 6)^alpha.
        """
        length = step + 1
        if length > 1:  # a length of 1 divides by 1 either way
            self.len_penalty = self.alpha * math.log((5 + length) / 6) / math.log(length)
        return super().finalize_hypos(step, *args, **kwargs)


@register_task("translation_qknorm", dataclass=TranslationQKNormConfig)
class TranslationQKNormTask(TranslationTask):  # type: ignore[misc]
    """fairseq's translation task with the paper's search; all its options stay."""

    def build_generator(
        self,
        models: Any,
        args: Any,
        seq_gen_cls: Any = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
    ) -> Any:
        extra = dict(extra_gen_cls_kwargs or {})
        own_class = seq_gen_cls is None and not getattr(args, "print_alignment", None)
        if own_class and self.cfg.gnmt_lenpen >= 0 and not getattr(args, "unnormalized", False):
            seq_gen_cls = GNMTSequenceGenerator
            extra["alpha"] = self.cfg.gnmt_lenpen
        generator = super().build_generator(
            models, args, seq_gen_cls, extra, prefix_allowed_tokens_fn
        )
        if self.cfg.extra_length >= 0 and hasattr(generator, "max_len_b"):
            generator.max_len_a, generator.max_len_b = 1, self.cfg.extra_length
        return generator

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # fairseq-fixed leaves out a last batch whose size is no multiple of this, by default 8:
        # the longest sentences of the training, dev and test text.
        kwargs["required_batch_size_multiple"] = 1
        known = self.dataset_to_epoch_iter.get(dataset)
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        if iterator is known:
            return iterator
        is_train = dataset is self.datasets.get(self.cfg.train_subset)
        if not (is_train and self.cfg.epoch_batches):
            return iterator
        fixed = FixedEpochs(
            iterator.dataset,
            iterator.collate_fn,
            iterator.frozen_batches,
            seed=iterator.seed,
            num_shards=iterator.num_shards,
            shard_id=iterator.shard_id,
            num_workers=iterator.num_workers,
            epoch=iterator.epoch,
            buffer_size=iterator.buffer_size,
            batches=self.cfg.epoch_batches,
        )
        if dataset in self.dataset_to_epoch_iter:
            self.dataset_to_epoch_iter[dataset] = fixed
        return fixed
