"""Whether a product of rows by an FP8 weight reads its activations in 16 bits or quantizes them to FP8.

A few rows wait for the weight's bytes, and quantizing them gains nothing. Many rows are bound by the tensor cores,
which multiply FP8 twice as fast: there the tables and the model of the chip decide. The choice is made when the product
runs, so that one compiled graph serves every length.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime.call_cache import chained, kind
from fp8fn.ops.layout import BLOCKS, WHOLE, Block, swap
from fp8fn.ops.operands import Quantized
from fp8fn.ops.targets import Chip

Activations = Literal["16bit", "fp8", "fp8_fast"]
ACTIVATIONS: Final[tuple[Activations, ...]] = get_args(Activations)
# The way whose sums over K may stay in the tensor core's accumulator: a permission, which one order of sums overrules.
FAST: Final[Activations] = "fp8_fast"

FEW_ROWS: Final = 128
# The activation's block for each block of a weight (K, N) that an FP8 product takes.
ACTIVATION_BLOCKS: Final[dict[Block, Block]] = {
    block: block if block == (WHOLE, WHOLE) else (1, block[0]) for block in BLOCKS if block[0] != 1
}


def check_activations(op: str, value: object, block: Block | None = None) -> None:
    """ValueError where `value` is none, or does not fit a weight with scales of `block`.

    Products sum over one axis of the weight, and their gradients over the other.
    """
    if value not in ACTIVATIONS:
        raise ValueError(f"{op}: activations={value!r} is no way to read activations; use one of {ACTIVATIONS}")
    if value != FAST or block is None:
        return
    for size in block:
        if size not in (1, WHOLE):
            raise ValueError(
                f"{op}: activations={FAST!r}, and the weight has a scale for each {size} elements of an axis, over "
                "which sums are promoted; use activations='fp8', or a weight with one scale for each output or in all"
            )


def is_fast(activations: str, batch_invariant: bool) -> bool:
    """Whether sums over K may stay in the tensor core's accumulator."""
    return activations == FAST and not batch_invariant


def why_16_bits(x: Tensor, w: Quantized, batch_invariant: bool = False, groups: int = 1) -> str | None:
    """The reason to multiply `x (B?, M, K) @ w (B?, K, N)` in 16 bits, or None where `x` should be quantized.

    `batch_invariant` fixes the choice, which then reads neither the number of rows nor a time. Rows of `groups` are
    counted as a batch of equal groups: where groups end is on the device.
    """
    block, target = w.block, targets.target_of(x.device)
    if block not in ACTIVATION_BLOCKS:
        return "the weight has a scale for each element of K"
    if target.backend != "cpu" and w.data.dtype not in targets.fp8_dtypes(target):
        return f"{w.data.dtype} has no product on {target.name}"
    if batch_invariant:
        return None
    rows, batch = x.shape[-2] // groups, max(x.shape[:-2].numel(), w.data.shape[:-2].numel())
    if rows <= FEW_ROWS:  # of each matrix, so that vmap decides as a loop does
        return f"{rows} rows, of which {FEW_ROWS} are few"
    if target.name != "sm90":
        return None
    chip = targets.chip_of(x.device, target)
    return (
        None if chip is None else _slower((rows, w.data.shape[-1], x.shape[-1], batch), block, x.element_size(), chip)
    )


@lru_cache(maxsize=4096)
def _slower(sizes: tuple[int, int, int, int], block: Block, itemsize: int, chip: Chip) -> str | None:
    """The times of both, if quantizing is the slower one; `sizes` are M, N, K and the batch."""
    from fp8fn.ops.cuda.gemm.scaled_mm import scale_kind
    from fp8fn.ops.tuning.estimate import prequantized_us
    from fp8fn.ops.tuning.problem import Problem

    m, n, k, batch = sizes
    kinds = scale_kind(*activation_block(block)), scale_kind(*swap(block))
    if "OTHER" in kinds:
        return f"no kernel in CUDA C++ multiplies blocks of {block} in FP8"
    fp8, bf16 = prequantized_us(Problem(m, n, k, *kinds, batch), chip, itemsize)
    return None if fp8 < bf16 else f"quantizing takes longer: {fp8:.1f} µs, and {bf16:.1f} µs in 16 bits, estimated"


def activation_block(block: Block) -> Block:
    """The block of activations that rows share no scale of, for a weight's block."""
    return 1, block[0]


def quantized_product(
    x: Tensor, w: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False,
    *, fast: bool = False,
) -> Tensor:  # fmt: skip
    """`x (B?, M, K) @ w (B?, K, N) + bias` with `x` quantized to fit the weight, each row by itself."""
    from fp8fn.ops.gemm import product, quantize

    rows = x.flatten(0, -2) if w.data.ndim == 2 else x
    scale = "fp32" if w.scale.dtype == torch.float32 else "e8m0"
    a, shape = quantize(rows, activation_block(w.block), None, scale), (*x.shape[:-1], w.data.shape[-1])
    if bias is None or bias.ndim == 1:
        out = product(a, w, bias, out_dtype, batch_invariant, fast=fast)
        return out if w.data.ndim == 3 else out.reshape(shape)
    sums = product(a, w, None, torch.float32, batch_invariant, fast=fast)
    sums = sums if w.data.ndim == 3 else sums.reshape(shape)
    return (sums + (bias.unsqueeze(1) if bias.ndim == 2 else bias).float()).to(out_dtype)


def quantized_at_once(
    x: Tensor, w: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False,
    *, fast: bool = False,
) -> Tensor:  # fmt: skip
    """`quantized_product` on a GPU, below the dispatcher: from the second call on its launches are started together."""
    inputs = tuple(part for part in (x, w.data, w.scale, bias) if part is not None)
    key = ("quantized_product", w.block, out_dtype, batch_invariant, fast, *map(kind, inputs))
    out = chained(key, inputs, lambda: [quantized_product(x, w, bias, out_dtype, batch_invariant, fast=fast)])[0]
    assert out is not None
    return out


def quantized_grouped_product(
    x: Tensor, w: Quantized, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`x (M, K) @ w (E, K, N) + bias (E, N)` of each group, with each row of `x` quantized by itself."""
    from fp8fn.ops.gemm import quantize
    from fp8fn.ops.grouped_gemm import product

    scale = "fp32" if w.scale.dtype == torch.float32 else "e8m0"
    return product(quantize(x, activation_block(w.block), None, scale), w, offsets, bias, out_dtype)
