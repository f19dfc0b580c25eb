"""Signal-to-noise ratios of results: of whole tensors, and of a product by rows and columns of it in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

# Summed over slices of this many elements, so that no float32 copy of a huge tensor is made.
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
    """The least, NaN where there is one, None where there are none."""
    return min(values, key=lambda value: -math.inf if math.isnan(value) else value, default=None)


class SampledProduct:
    """Up to 1024 x 1024 elements of `a (M, K) @ b (K, N)`, evenly spread from the first row and column to the last.

    In float64, on the device, and made when first compared with. Spread, so that a wrong tile anywhere is met: no two
    sampled rows or columns of the benchmarks' shapes lie 128 apart.
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
        """Of a whole `(M, N)`."""
        return snr_db(self._expected, found.index_select(0, self._rows).index_select(1, self._columns))
