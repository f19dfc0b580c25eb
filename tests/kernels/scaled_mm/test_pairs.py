"""The kernel that serves each pair of blocks of the two operands on Hopper."""

from __future__ import annotations

import pytest
import torch

from fp8fn.ops.layout import BLOCKS, Block, contracts_rows, empty_data, empty_scale, is_square
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import SM90

LEFT = [block for block in BLOCKS if not contracts_rows(block)]
RIGHT = [block for block in BLOCKS if contracts_rows(block) or is_square(block)]


def operand(shape: tuple[int, int], block: Block, column_major: bool) -> Quantized:
    x = torch.empty(shape, device="meta")
    data = empty_data(x, block, torch.float8_e4m3fn, column_major)
    return Quantized(data, empty_scale(x, block, "fp32", column_major), block)


@pytest.mark.parametrize("b_block", RIGHT, ids=str)
@pytest.mark.parametrize("a_block", LEFT, ids=str)
def test_the_kernel_of_each_pair_of_blocks(a_block: Block, b_block: Block) -> None:
    """Every pair of blocks of 128 or all of K is the CUDA kernel's; blocks of 32 along K with float32 scales, Triton's.

    Blocks of 32 with e8m0 scales on both sides are another op's, `mx_mm`, which has CUDA kernels of its own.
    """
    a, b = operand((256, 512), a_block, False), operand((512, 384), b_block, True)
    out = torch.empty(256, 384, dtype=torch.bfloat16, device="meta")
    (launch,) = SCALED_MM.plan(ScaledProduct(a=a, b=b, out=out, target=SM90))
    by_cuda = 32 not in (*a_block, *b_block)
    assert type(launch).__name__ == ("CudaLaunch" if by_cuda else "TritonLaunch"), launch.describe()
