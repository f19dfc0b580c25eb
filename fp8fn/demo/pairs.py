"""Pairs of runs, each pair with its own seed, and the statistics that tell a difference from chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fp8fn.demo.train import Run


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs from the weights and on the batches of one seed."""

    seed: int
    baseline: Run
    fp8: Run

    @property
    def difference(self) -> float:
        """The relative difference of the final validation loss in FP8 from the baseline's."""
        return relative_difference(self.baseline.final_loss, self.fp8.final_loss)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.baseline.final_loss) and math.isfinite(self.fp8.final_loss)


def relative_difference(baseline: float, fp8: float) -> float:
    """`(fp8 - baseline) / baseline`."""
    return (fp8 - baseline) / baseline


def standard_deviation(values: Sequence[float]) -> float:
    """The standard deviation of two or more values. NaN if a value is not finite, where `statistics.stdev` raises."""
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of two or more independent values."""
    return standard_deviation(values) / math.sqrt(len(values))
