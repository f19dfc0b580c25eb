"""Kernels in CUDA C++, in the emulator, on operands of which a part lies more than 2**31 elements from the first.

Those of MX-FP8 refuse operands whose offsets are past 32 bits (mx_mm/test_gemv.py), so Triton's kernel takes them.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from fp8fn import ScaledTensor
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, mm_a16w8, splitk_a16w8
from fp8fn.ops.cuda.quantize.quantize import configure, plan
from fp8fn.ops.operands import Quantized
from fp8fn.ops.reference.quantize import quantize
from support.cuda_emulator import emulate, needs_compiler
from support.far import FAR, far
from support.operands.weights import exact, weight
from support.products import planned, weight_product
from support.quantizers import quantization

pytestmark = needs_compiler
E4M3: Final = torch.float8_e4m3fn
B, M, N, K = 3, 4, 16, 256


def apart_along(x: Tensor, axis: int) -> Tensor:
    """`x` with the elements along an axis far apart."""
    return far(x, [FAR if a == axis % x.dim() else s for a, s in enumerate(x.stride())])


# The operand and the axis that is far: of x (B?, M, K), w (B?, K, N), its scales and the bias (B?, N).
APART: Final = {
    "x batch": ("x", -3), "x rows": ("x", -2), "w batch": ("w", -3), "w columns": ("w", -1),
    "scale batch": ("scale", -3), "scale columns": ("scale", -1), "bias batch": ("bias", -2), "bias": ("bias", -1),
}  # fmt: skip
WITHOUT_BATCH: Final = ("x rows", "w columns", "scale columns", "bias")
KERNELS: Final = {"gemv": gemv_a16w8, "splitk": splitk_a16w8, "many rows": mm_a16w8, "tiles": a16w8_tiles}


@pytest.mark.parametrize(
    ("name", "apart"), [(name, a) for name in KERNELS for a in (WITHOUT_BATCH if name == "tiles" else APART)]
)
def test_a_weight_in_fp8(name: str, apart: str) -> None:
    kernel, (named, axis) = KERNELS[name], APART[apart]
    batch = () if name == "tiles" else (B,)
    w = weight(K, N, (128, 1), batch=batch)
    x, bias = torch.randn(*batch, M, K).bfloat16(), torch.randn(*batch, N)
    expected = exact(x, w, bias)
    parts = {"x": x, "w": w.data.view(torch.uint8), "scale": w.scale, "bias": bias}
    parts[named] = apart_along(parts[named], axis)
    found = torch.full((*batch, M, N), 7.0, dtype=torch.float32 if name in ("gemv", "splitk") else torch.bfloat16)
    scaled = ScaledTensor(parts["w"].view(w.data.dtype), parts["scale"], w.block)
    given = weight_product(parts["x"], scaled, found, bias=parts["bias"])
    assert kernel.accepts(given) is None
    emulate(planned(kernel, given))
    assert (found.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("case", ["second block of rows", "rows of a row-major weight", "columns of square blocks"])
def test_gemv_a16w8_of_several_tiles(case: str) -> None:
    square = case == "columns of square blocks"
    k, n = (128, 400) if square else (32, 16)
    rows = case == "rows of a row-major weight"
    w = weight(k, n, (128, 128) if square else (128, 1), contiguous="N" if rows else "K")
    x, data, scale = torch.randn(12, k).bfloat16(), w.data.view(torch.uint8), w.scale
    expected = exact(x, w)
    if square:
        scale = apart_along(scale, -1)
    elif rows:
        data = apart_along(data, -2)
    else:
        x = apart_along(x, -2)
    found = torch.full((12, n), 7.0)
    given = weight_product(x, ScaledTensor(data.view(w.data.dtype), scale, w.block), found)
    assert gemv_a16w8.accepts(given) is None
    emulate(planned(gemv_a16w8, given, None if rows else gemv_a16w8.GemvConfig(ROWS=8, WARPS_K=1)))
    assert (found.double() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("square", [False, True])
def test_quantize(square: bool, dtype: torch.dtype) -> None:
    """The third matrix of the input, of both forms of data and of both forms of scales, and rows of the input."""
    m, n, block = 3, 8, (128, 128) if square else (1, 128)
    step = 2**29  # of 3 rows, or of a line of scales, so that two matrices are past 2**31
    x = far(torch.randn(B, m, n, dtype=dtype), (m * step, step, 1))
    row = far(torch.zeros(B, m, n, dtype=torch.uint8), (m * step, step, 1)).view(E4M3)
    col = far(torch.zeros(B, m, n, dtype=torch.uint8), (n * step // 2, 1, step // 2)).view(E4M3)
    if square:
        row_scale, col_scale = (far(torch.zeros(B, 1, 1), strides) for strides in ((FAR, FAR, 1), (FAR, 1, FAR)))
    else:  # a line along the rows of each block of columns, and the other way around
        row_scale, col_scale = far(torch.zeros(B, m, 1), (FAR, 1, FAR)), far(torch.zeros(B, 1, n), (FAR, FAR, 1))
    into = Quantized(row, row_scale, block), Quantized(col, col_scale, block[::-1])
    q = quantization(x, block, dual=True, into=into)
    emulate(*plan(q, configure(q)))
    for data, scale, of in ((row, row_scale, block), (col, col_scale, block[::-1])):
        expected_data, expected_scale = quantize(x.contiguous(), of, E4M3, "fp32")
        assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
        assert torch.equal(scale, expected_scale)
