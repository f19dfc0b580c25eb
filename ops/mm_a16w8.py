"""The op `fp8fn::mm_a16w8`, the product of a 16- or 32-bit matrix and an FP8 weight: schema, checks, and dispatch."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, splitk_a16w8
from fp8fn.ops.cuda.gemm import mm_a16w8 as cuda
from fp8fn.ops.cuda.gemm.operands import as_matrix
from fp8fn.ops.cuda.runtime import graph_capture, nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.layout import Block
from fp8fn.ops.scaled_mm import check_operand, empty_output
from fp8fn.ops.triton.launch import TritonLaunch

MM_A16W8_SCHEMA: Final = (
    "mm_a16w8(Tensor x, Tensor w, Tensor w_scale, int[2] w_block, Tensor? bias=None, ScalarType? out_dtype=None, "
    "bool constant=False) -> Tensor"
)

_log = logging.getLogger("fp8fn")


def check_mm_a16w8(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype | None
) -> Block:
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"mm_a16w8: x has dtype {x.dtype}; use bfloat16, float16 or float32")
    block = check_operand("mm_a16w8: w", w, w_scale, w_block)
    for name, operand, matrix in (("x", x, "M, K"), ("w", w, "K, N")):
        if operand.ndim not in (2, 3):
            shape = tuple(operand.shape)
            raise ValueError(f"mm_a16w8: {name} has shape {shape}; it must be ({matrix}) or (B, {matrix})")
    if x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"mm_a16w8: x {tuple(x.shape)} has K={x.shape[-1]} and w {tuple(w.shape)} has K={w.shape[-2]}; "
            "w must be (K, N), so pass weight.mT for a weight of shape (N, K)"
        )
    if x.ndim == 3 and w.ndim == 3 and x.shape[0] != w.shape[0]:
        raise ValueError(f"mm_a16w8: x has batch {x.shape[0]} and w {w.shape[0]}; they must be equal")
    for name, tensor in (("w", w), ("w_scale", w_scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"mm_a16w8: x is on {x.device} and {name} on {tensor.device}; move them to one device")
    if bias is not None:
        _check_bias(x, w, bias)
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"mm_a16w8: out_dtype={out_dtype} is not an output type; use bfloat16, float16 or float32")
    return block


def _check_bias(x: Tensor, w: Tensor, bias: Tensor) -> None:
    columns = w.shape[-1]
    allowed: list[tuple[int, ...]] = [(columns,)]
    if x.ndim == 3 or w.ndim == 3:
        size = x.shape[0] if x.ndim == 3 else w.shape[0]
        allowed += [(size, columns), (size, 1, columns)]
    if tuple(bias.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"mm_a16w8: bias has shape {tuple(bias.shape)}; it must be {shapes}, N of w")
    if bias.dtype not in INPUT_DTYPES:
        raise TypeError(f"mm_a16w8: bias has dtype {bias.dtype}; use bfloat16, float16 or float32")


def mm_a16w8_reference(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    """Whether the weight is `constant` is nothing to PyTorch's own operations, which read it in their turn."""
    block = check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    return reference.mm_a16w8(x, w, w_scale, block, bias, out_dtype or x.dtype)


def mm_a16w8_kernel(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    operands = (x, w, w_scale) if bias is None else (x, w, w_scale, bias)
    constant = constant or graph_capture.readable(w, w_scale)
    key = ("mm_a16w8", tuple(w_block), out_dtype, constant, *map(kind, operands))
    call = recall(key)
    if call is not None:  # the key holds all that the checks read
        return call(*operands)[0]  # type: ignore[no-any-return]
    block = check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    target = targets.target_of(x.device)
    targets.check_supported(target, x.device)
    out = empty_output(x, w, out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    if x.shape[-1] == 0:  # an empty sum is zero, and a kernel would multiply it by the scale, which may be NaN
        return reference.mm_a16w8(x, w, w_scale, block, bias, out.dtype)
    if w.dtype not in targets.fp8_dtypes(target):
        _log.debug("mm_a16w8: %s has no kernel on %s; plain PyTorch serves", w.dtype, target.name)
        return reference.mm_a16w8(x, w, w_scale, block, bias, out.dtype)
    launch = _plan(x, w, w_scale, block, bias, out, target, constant)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("mm_a16w8 %s x %s: %s", tuple(x.shape), tuple(w.shape), launch.describe())
    if isinstance(launch, CudaLaunch):
        return keep(key, cuda.call(launch, out))(*operands)[0]  # type: ignore[no-any-return]
    launch.run()
    return out


def _plan(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: targets.Target,
    constant: bool = False,
) -> TritonLaunch | CudaLaunch:  # fmt: skip
    """In CUDA C++: of up to 128 rows by `splitk_a16w8` where that has few tiles, of others up to 16 by `a16w8_tiles` or
    `gemv_a16w8`, of more by `mm_a16w8`; what none takes in Triton.

    A `constant` weight is nothing to `gemv_a16w8` and Triton: they wait for what came before them, then read it.
    """
    operands = (x, w, w_scale, w_block, bias, out, target)
    missing = nvrtc.unavailable()
    m = as_matrix(x, w, bias, out)[0].shape[-2]
    sizes = m, out.shape[-1], x.shape[-1], math.prod(out.shape[:-1]) // m
    split = missing or splitk_a16w8.accepts(*operands)
    if split is None and splitk_a16w8.untuned(*sizes, w_block, target.cores, constant=constant) is None:
        return splitk_a16w8.plan(*operands, constant=constant)
    if missing is None and (a16w8_tiles.accepts(*operands) or a16w8_tiles.untuned(x, w, constant)) is None:
        return a16w8_tiles.plan(*operands, constant=constant)
    few = missing or gemv_a16w8.accepts(*operands)
    many = missing or cuda.accepts(*operands)
    if split is None and many is not None and m > a16w8_tiles.MOST_ROWS:
        return splitk_a16w8.plan(*operands, constant=constant)
    if few is None and (many is not None or cuda.is_slow(*sizes, target.cores, constant=constant)):
        return gemv_a16w8.plan(*operands)
    if many is None:
        return cuda.plan(*operands, constant=constant)
    from fp8fn.ops.triton.mm_a16w8 import plan_mm_a16w8

    because = f"no CUDA C++: {few}" if few == many else f"no CUDA C++: {few}; {many}"
    return replace(plan_mm_a16w8(*operands), reason=because)
