"""Epochs of a set number of batches, as the paper counts them, rather than one pass each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator


class FixedEpochs(EpochBatchIterator):  # type: ignore[misc]
    """Cuts the endless row of passes over the data, each newly shuffled, into equal epochs.

    Which batches an epoch has follows from the seed and the epoch's number alone, so a resumed
    training sees the same ones.

    Args:
        batches: how many an epoch has, for each shard.
    """

    def __init__(self, *args: Any, batches: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> list[Any]:
        size = self.batches * self.num_shards
        ours = islice(self._endless(shuffle), (epoch - 1) * size, epoch * size)
        return list(ours)[self.shard_id :: self.num_shards]

    def _endless(self, shuffle: bool) -> Iterator[Any]:
        for number in count(1):
            batches = list(self.frozen_batches)
            if shuffle and not self.disable_shuffling:
                with data_utils.numpy_seed(self.seed + number):
                    np.random.shuffle(batches)
            yield from batches
