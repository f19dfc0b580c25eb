"""`GemmConfig`: the tile and the compiler's options of the scaled products in Triton."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GemmConfig:
    """Tile and compiler options of `scaled_mm`."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    GROUP: int = 8
    HALVES: bool = False
    XCDS: int = 1
    WGRAD_TRANS_STORE: bool = False
    options: tuple[tuple[str, int], ...] = field(default=())
