"""How the HIP kernels for MX-FP8 divide a product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HipConfig:
    """`rows` of `a` that `mxfp8_gemv` keeps sums of: 1, 2, 4, 8 or 16, and M at least.

    `n_sub` tiles of 16 columns a wave of `mxfp8_mfma`, and `k_splits` groups of blocks that share its K; `block_n`
    columns a block of `mxfp8_moe`, 8 or 16.
    """

    rows: int = 16
    n_sub: int = 1
    k_splits: int = 1
    block_n: int = 16
