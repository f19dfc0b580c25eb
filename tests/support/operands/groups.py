"""Groups of tokens: sizes, ends, and the recipes that grouped products are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch
from torch import Tensor

import fp8fn

# Sizes of groups, and tokens past the last one.
GROUPS: Final[dict[str, tuple[list[int], int]]] = {
    "odd": ([0, 1, 127, 128, 129], 5),
    "units": ([31, 32, 33, 0, 95, 97, 260], 70),
    "gaps": ([128, 128, 96, 32], 0),
    "tiny": ([3] * 40, 0),
    "one": ([300], 0),
    "all": ([0, 300, 0, 0], 0),
    "empty": ([0, 0, 200, 0], 130),
    "none": ([0, 0], 7),
    "large": ([700, 450], 10),
    "large gaps": ([640, 512, 384], 0),
}


def ends(sizes: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Offsets, as grouped products take them: where each group ends."""
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32)


RECIPES = {
    "blockwise": fp8fn.BLOCKWISE, "blockwise_pow2": fp8fn.BLOCKWISE_POW2, "hybrid": fp8fn.HYBRID,
    "blockwise_square": fp8fn.BLOCKWISE_SQUARE, "rowwise": fp8fn.ROWWISE, "mxfp8": fp8fn.MXFP8,
}  # fmt: skip

EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

# Sizes that break kernels: no token, one, one less and one more than a block, groups alone with everything.
SIZES: dict[str, tuple[int, ...]] = {
    "around a block": (0, 1, 127, 128, 129),
    "one with everything": (0, 0, 300, 0),
    "many of three": (3,) * 40,
    "one": (130,),
    "none": (0, 0),
}

LEFT = 5  # tokens past the last offset


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
