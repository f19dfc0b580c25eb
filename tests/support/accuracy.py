"""How near a result is to what it should be: in dB, relative to its norm, and bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def snr(found: Tensor, expected: Tensor) -> float:
    """`10 log10(‖expected‖² / ‖found - expected‖²)` in dB, infinite where nothing differs.

    Sums over slices in float64: a float64 copy of a whole large tensor would not fit on a GPU.
    """
    assert found.shape == expected.shape
    signal = noise = 0.0
    slices = (torch.atleast_1d(x.detach()).split(4096) for x in (found, expected))
    for got, want in zip(*slices, strict=True):
        signal += float(want.double().square().sum())
        noise += float((got.double() - want.double()).square().sum())
    return math.inf if noise == 0 else float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """`‖found - expected‖ / ‖expected‖`; NaN where `found` is not finite."""
    found, expected = found.detach().double(), expected.detach().double()
    error = (found - expected).norm()
    return float(error / expected.norm().clamp_min(1e-30)) if error.isfinite() else math.nan


def assert_close(actual: Iterable[Tensor], expected: Iterable[Tensor], bound: float = 1e-2) -> None:
    """Equal shapes and types, and relative errors of at most `bound`."""
    for got, want in zip(actual, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert (got.double() - want.double()).norm() <= bound * want.double().norm()


def differing(found: Tensor, expected: Tensor) -> int:
    """The number of elements that differ in their bits; one NaN equals any other."""
    found = found.to(expected.device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    nan = found.float().isnan() & expected.float().isnan()
    return int(((found.view(bits) != expected.view(bits)) & ~nan).sum())


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits, or NaN in both, and the same memory layout."""
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    count = differing(found, expected)
    assert count == 0, f"{count} of {found.numel()} differ"


def same_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Whether pairs of tensors have equal bits, or NaN in both, and the same memory layouts."""
    return all(
        (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()) and differing(got, want) == 0
        for got, want in zip(found, expected, strict=True)
    )
