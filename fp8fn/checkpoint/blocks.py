"""The blocks and the FP8 types in which formats of checkpoints store weights."""

from __future__ import annotations

from typing import Final

import torch

from fp8fn.ops.layout import WHOLE, Block

TENSOR: Final[Block] = (WHOLE, WHOLE)
CHANNEL: Final[Block] = (1, WHOLE)
SQUARE: Final[Block] = (128, 128)
GROUP: Final[Block] = (1, 128)
MX: Final[Block] = (1, 32)
E4M3: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
