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

    def __str__(self) -> str:
        """`"256x128w8s2n16k2hg8x8"`, the name that `fp8fn.ops.tuning.amd.config_of` reads."""
        return f"{self.code}g{self.GROUP}x{self.XCDS}"

    @property
    def code(self) -> str:
        """The name without the order of tiles, in which configurations of one machine code differ."""
        letters = {"matrix_instr_nonkdim": "n", "kpack": "k", "waves_per_eu": "e", "maxnreg": "r"}
        given = dict(self.options)
        options = "".join(f"{letter}{given[name]}" for name, letter in letters.items() if name in given)
        store = "h" * self.HALVES + "t" * self.WGRAD_TRANS_STORE
        return f"{self.BM}x{self.BN}w{self.num_warps}s{self.num_stages}{options}{store}"
