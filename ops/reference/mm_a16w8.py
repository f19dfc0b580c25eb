"""The definition of a product with an FP8 weight, in plain PyTorch: dequantize in float32, multiply, round once."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.operands import Quantized
from fp8fn.ops.reference.quantize import dequantize
from fp8fn.ops.reference.scaled_mm import matmul


def mm_a16w8(
    x: Tensor, w: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False
) -> Tensor:
    """`x (B?, M, K) @ w (B?, K, N) + bias` → `(B?, M, N)`, row-major; `bias` is `(N)`, `(B, N)` or `(B, 1, N)`."""
    with torch.autocast(x.device.type, enabled=False):  # which would multiply in 16 bits
        out = matmul(x.float(), dequantize(*w), batch_invariant)
    if bias is not None:
        out = out + (bias.unsqueeze(1) if bias.ndim == 2 else bias).float()
    return out.to(out_dtype).contiguous()
