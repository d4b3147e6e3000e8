"""Statistics over the seeds of a model."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05


@dataclass(frozen=True)
class Spread:
    """Values of several seeds: their mean and standard deviation (n - 1; None for one seed)."""

    mean: float
    sd: float | None
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, list(values))


def welch(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float | None, tuple[float, float] | None]:
    """Welch's t-test of two means: p and the 95% interval of first - second.

    None with fewer than two values on a side, or where none varies.
    """
    from scipy.stats import ttest_ind

    varies = len(set(first)) > 1 or len(set(second)) > 1
    if min(len(first), len(second)) < 2 or not varies:
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of one side that does not vary
        test = ttest_ind(first, second, equal_var=False)
    low, high = test.confidence_interval(1 - LEVEL)
    return float(test.pvalue), (float(low), float(high))


def what_they_show(counts: Sequence[int]) -> str:
    """What a t-test of so many seeds, or none, can show; the least number above one decides."""
    from scipy.stats import t

    several = sorted(n for n in counts if n > 1)
    if not several:
        return (
            "One seed each: nothing is known of how much another seed would change. Significance "
            "over the test set is of these translations, not of the method."
        )
    n = several[0]
    least = t.ppf(1 - LEVEL / 2, 2 * n - 2) * math.sqrt(2 / n)
    return (
        f"With {n} seeds a side, Welch's t-test finds a difference (p < {LEVEL}) only if it is "
        f"over about {least:.1f} standard deviations of the seeds; that it finds none does not "
        "show that there is none. It takes the seeds' scores for normally distributed. "
        "Significance over the test set is of these translations, seed by seed, not of the "
        "method. p is not corrected for the number of comparisons."
    )
