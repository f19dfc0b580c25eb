"""`Statistics`: what `fp8fn.read_monitor` tells of one operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fp8fn.ops.statistics import Column

# A layer's gradient underflows if more than this share of its elements becomes zero in FP8.
UNDERFLOW: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of one operand of a layer, in one step: an entry of `read_monitor`.

    Args:
        saturated: Share of elements with `|x| > fp8_max * scale`, which saturate.
        flushed: Share of elements that are 0 in FP8 and not in `x`.
        amax: The largest `|x|`; NaN if `x` has a NaN.
        snr_db: `10 log10(Σ x² / Σ (x - q)²)`; inf if no element has an error.
        exact: Whether `x` itself was read. If not, `x` was in no memory: `flushed` counts all zeros, `saturated` is an
            upper bound, `amax` is that of the FP8 data, and `snr_db` is estimated from the spacing of the FP8 numbers.
        step: How many steps came before, counted from 0.

    Raises:
        TypeError: A field is missing, or given by its position.

    Example:
        >>> fp8fn.Statistics(saturated=0.0, flushed=0.25, amax=1.0, snr_db=30.0, exact=True, step=0).flushed
        0.25
    """

    saturated: float
    flushed: float
    amax: float
    snr_db: float
    exact: bool
    step: int


def statistics_of(values: Sequence[float]) -> Statistics:
    """The statistics of a row, whose columns are those of `Column`."""
    elements, signal, noise = (values[column] for column in (Column.ELEMENTS, Column.SIGNAL, Column.NOISE))
    if math.isnan(signal) or math.isnan(noise):
        snr = math.nan
    elif noise == 0:
        snr = math.inf
    else:
        snr = 10 * math.log10(signal / noise) if signal else -math.inf
    return Statistics(
        saturated=values[Column.SATURATED] / elements,
        flushed=values[Column.FLUSHED] / elements,
        amax=values[Column.AMAX],
        snr_db=snr,
        exact=bool(values[Column.EXACT]),
        step=int(values[Column.STEP]),
    )
