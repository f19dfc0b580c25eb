"""The grouped product on Hopper in CUDA C++: what it accepts, and its launch (`scaled_mm.cu`, walking over groups)."""

from __future__ import annotations

from torch import Tensor

from fp8fn.ops.cuda.gemm import scaled_mm
from fp8fn.ops.cuda.gemm.scaled_mm import KINDS, Config, operands_fault, scale_kind
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Target


def accepts(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    offsets: Tensor, bias: Tensor | None, target: Target,
) -> str | None:  # fmt: skip
    """None where `plan` takes these operands, which the op has checked, else the reason why not."""
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    if kinds not in KINDS:
        return f"blocks {a_block} and {b_block} are no pair of this kernel"
    if b.dim() == 2 and kinds != ("VECTOR", "VECTOR"):
        return f"blocks {a_block} and {b_block}: tokens that are summed over have to be spread"
    if not offsets.is_contiguous():
        return f"offsets has stride {offsets.stride(0)}, not 1"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}"
    return operands_fault(a, a_scale, a_block, b, b_scale, b_block, target)


def plan(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    offsets: Tensor, bias: Tensor | None, out: Tensor, target: Target, config: Config,
) -> CudaLaunch:  # fmt: skip
    """The launch of `out (M, N) = a (M, K) @ b (E, K, N)[group of the row] + bias (E, N)`.

    Or, of a matrix `b`, of `out (E, M, N)[g] = a (M, P) @ b (P, N)` over the spread tokens of each group. K contiguous
    in both operands; see `accepts`.
    """
    return scaled_mm.plan(a, a_scale, a_block, b, b_scale, b_block, bias, out, target, config, offsets)
