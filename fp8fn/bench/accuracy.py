"""Signal-to-noise ratios: of whole tensors, and of sampled rows and columns of a product against float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

# Sums run over slices of this many elements, so that a huge tensor is never copied to float32 whole.
_SLICE = 2**26


def snr_db(reference: Tensor, found: Tensor) -> float:
    """`10 log10(‖ref‖² / ‖ref - x‖²)` of two tensors `(M, N)`: inf where they are equal, NaN where one has a NaN."""
    if reference.shape != found.shape:
        raise ValueError(f"snr_db: reference has shape {tuple(reference.shape)} and found {tuple(found.shape)}")
    signal = noise = 0.0
    rows = max(1, _SLICE // max(1, reference.shape[-1]))
    for expected, value in zip(reference.split(rows), found.split(rows), strict=True):
        wide = expected.to(torch.promote_types(expected.dtype, torch.float32))
        signal += wide.square().sum(dtype=torch.float64).item()
        noise += (wide - value).square().sum(dtype=torch.float64).item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else math.nan if math.isnan(signal + noise) else -math.inf


def worst(values: Iterable[float]) -> float | None:
    """The lowest value: NaN if any value is NaN, None if there are no values."""
    return min(values, key=lambda value: -math.inf if math.isnan(value) else value, default=None)


class SampledProduct:
    """Up to 1024 x 1024 elements of `a (M, K) @ b (K, N)`, spread evenly from the first row and column to the last.

    The elements are computed in float64 on the device, at the first comparison. In the benchmarks' shapes, neighbouring
    samples lie less than 128 rows or columns apart, so that a wrong tile is found wherever it is.
    """

    def __init__(self, a: Tensor, b: Tensor, most: int = 1024) -> None:
        self._a, self._b = a, b
        self._rows, self._columns = (
            torch.linspace(0, size - 1, min(size, most), dtype=torch.float64).round().long().to(a.device)
            for size in (a.shape[0], b.shape[1])
        )

    @cached_property
    def _expected(self) -> Tensor:
        rows = self._a.index_select(0, self._rows).double()
        return rows @ self._b.index_select(1, self._columns).double()

    def snr_db(self, found: Tensor) -> float:
        """SNR of a product `(M, N)` at the sampled elements."""
        return snr_db(self._expected, found.index_select(0, self._rows).index_select(1, self._columns))
