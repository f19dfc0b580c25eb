"""AMD's configurations of the kernels that have one each, as data: by processor, and by what decides.

Those of the scaled product are candidates of a model (`fp8fn.ops.tuning.amd`). The figures here are what
`python -m fp8fn isa` prints; nothing of them was timed.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Options: TypeAlias = tuple[tuple[str, int], ...]

# Products whose scales the model has no figures for, and those of groups, by the rows of the output up to which they
# hold. From 32x32 products v_permlane32_swap makes 16-byte stores on gfx950; from 16x16 they need `h`.
# On gfx942 32x32 products spill in TN and wgrad of ragged groups; `k2` reads LDS by 16 bytes.
SCALED_MM: Final[dict[str, tuple[tuple[int | None, str], ...]]] = {
    "gfx942": ((16, "16x64w4s2n16k2h"), (64, "32x64w4s2n16k2h"), (None, "128x128w4s2n16k2h")),
    "gfx950": ((16, "16x64w4s2n16h"), (64, "32x64w4s2n16"), (None, "128x128w4s2n32")),
}
# Groups along K in blocks of 128 tokens have a vector of scales on either side: a step of 32x32 products loads 256
# bytes a lane, a step of 16x16 products 192.
GROUPED_K: Final[dict[str, str]] = {"gfx942": "128x128w4s2n16k2h", "gfx950": "128x128w4s2n16h"}

# The matrix instruction of 16-bit activations; 257 registers at 128x128 on gfx942 leave a SIMD one wave, `kpack` two.
MM_A16W8: Final[dict[str, Options]] = {
    "gfx942": (("matrix_instr_nonkdim", 16), ("kpack", 2)),
    "gfx950": (("matrix_instr_nonkdim", 16),),
}

# Warps of a quantizer's 128x128 tile. 4 issue 13 to 27 % fewer vector instructions than 8, for half of a reduction over
# rows passes through LDS. With both results of one read 152 registers leave a SIMD 3 waves, and a bound of 4 takes 128,
# but on gfx942 spills one with Triton 3.6.
QUANTIZE_WARPS: Final = 4
QUANTIZE_DUAL: Final[dict[str, Options]] = {"gfx942": (("waves_per_eu", 3),), "gfx950": (("waves_per_eu", 4),)}
