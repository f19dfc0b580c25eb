"""The launches of dense MX-FP8 products on gfx950: `mxfp8_gemv` for up to 16 rows, `mxfp8_mfma` for up to 64."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch, Wide
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.views import batched, ceil_div, largest_offset

TYPES: Final = {torch.bfloat16: "Element::BF16", torch.float16: "Element::FP16", torch.float32: "Element::FP32"}
# Lanes and waves of every block, as the sources have them.
WAVES: Final = 4
THREADS: Final = 64 * WAVES
# Bytes of one operand that a wave reaches: its offsets are positive numbers of 32 bits.
LARGEST_SPAN: Final = 2**31 - 1
MOST_MFMA_ROWS: Final = 64
_INSTRUCTION_K: Final = 128  # elements of K in one instruction
_LARGEST_GRID: Final = 2**32 - 1  # in threads
_PIECE: Final = 16  # bytes of a load


def plan_gemv(product: ScaledProduct, config: HipConfig) -> tuple[HipLaunch, ...]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, which is not empty.

    M is `config.rows` at most, K a multiple of 32; `out` and `bias` are contiguous, and a 2-D operand serves a batch.
    """
    target, out, rows, m = product.target, product.out, config.rows, product.m
    if rows not in (1, 2, 4, 8, 16) or m > rows:
        raise ValueError(f"mxfp8_gemv: rows={rows} and M={m}; rows must be 1, 2, 4, 8 or 16, and M at least")
    columns = 1 if rows <= 2 else 2 if rows <= 8 else 4  # a wave's
    macros = (("ROWS", rows), *_types(out.dtype, product.bias))
    return (
        HipLaunch(
            kernel=HipKernel("mxfp8_gemv.hip", "mxfp8_gemv", str(target.arch), macros),
            grid=grid("mxfp8_gemv", ceil_div(out.shape[-1], WAVES * columns) * product.batch),
            threads=THREADS,
            args=_args("mxfp8_gemv", product, product.bias, out, columns, {}),
            target=target,
            options={"ROWS": rows},
        ),
    )


def plan_mfma(product: ScaledProduct, config: HipConfig) -> tuple[HipLaunch, ...]:
    """The launches of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`; the second sums the parts of K.

    M is 64 at most, K a multiple of 32; otherwise as `plan_gemv`.
    """
    target, out, bias = product.target, product.out, product.bias
    n_sub, m = config.n_sub, product.m
    if n_sub not in (1, 2, 4) or config.k_splits not in (1, 2, 4, 8) or m > MOST_MFMA_ROWS:
        raise ValueError(
            f"mxfp8_mfma: n_sub={n_sub}, k_splits={config.k_splits} and M={m}; n_sub must be 1, 2 or 4, k_splits 1, 2, "
            f"4 or 8, and M {MOST_MFMA_ROWS} at most"
        )
    all_steps = ceil_div(product.k, _INSTRUCTION_K)
    steps = max(ceil_div(all_steps, config.k_splits), 1)
    splits = max(ceil_div(all_steps, steps), 1)  # none is empty
    sums = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device) if splits > 1 else out
    added = bias if splits == 1 else None
    tiles_m, columns = ceil_div(m, 16), 16 * n_sub
    macros = (("TILES_M", tiles_m), ("N_SUB", n_sub), *_types(sums.dtype, added))
    extra = {"steps": steps}
    multiply = HipLaunch(
        kernel=HipKernel("mxfp8_mfma.hip", "mxfp8_mfma", str(target.arch), macros),
        grid=grid("mxfp8_mfma", ceil_div(out.shape[-1], columns) * product.batch, splits),
        threads=THREADS,
        args={
            **_args("mxfp8_mfma", product, added, sums, columns, extra),
            "out_part": Wide(out.numel()),
        },
        target=target,
        options={"TILES_M": tiles_m, "N_SUB": n_sub, "SPLITS": splits},
    )
    if splits == 1:
        return (multiply,)
    total = out.numel()
    summation = HipLaunch(
        kernel=HipKernel(
            "mxfp8_sum_parts.hip", "mxfp8_sum_parts", str(target.arch), (("PARTS", splits), *_types(out.dtype, bias))
        ),
        grid=grid("mxfp8_sum_parts", ceil_div(total, THREADS)),
        threads=THREADS,
        args={"parts": sums, "bias": bias, "out": out, "N": out.shape[-1], "total": Wide(total)},
        target=target,
        options={"PARTS": splits},
    )
    return multiply, summation


def grid(kernel: str, x: int, y: int = 1) -> tuple[int, int, int]:
    """Blocks along x and y, as far as a grid goes."""
    if x * THREADS > _LARGEST_GRID:
        raise ValueError(f"{kernel}: {x} blocks of {THREADS} threads are more than a grid has; divide the product")
    return x, y, 1


def stride(x: Tensor, axis: int) -> int:
    """0 along an axis of one element, whatever the tensor says."""
    return x.stride(axis) if x.shape[axis] > 1 else 0


def lines(x: Tensor) -> Tensor:
    """`x (…, K)` in FP8 where its lines can be loaded by 16 bytes, else a contiguous copy."""
    starts = (x.storage_offset(), *(stride(x, axis) for axis in range(x.dim() - 1)))
    if (stride(x, -1) == 1 or x.shape[-1] <= 1) and all(start % _PIECE == 0 for start in starts):
        return x
    return x.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(x.dtype)


def check_span(kernel: str, name: str, x: Tensor, lines: int) -> None:
    """ValueError where `lines` lines of `x (…, lines, K)` do not lie within what a wave reaches."""
    span = largest_offset(x[..., : min(lines, x.shape[-2]), :][(0,) * (x.dim() - 2)]) + 1
    if span > LARGEST_SPAN:
        raise ValueError(
            f"{kernel}: {min(lines, x.shape[-2])} lines of {name} span {span} bytes, and a wave reaches "
            f"{LARGEST_SPAN}; pass contiguous operands, or use Triton's kernels"
        )


def _types(out: torch.dtype, bias: Tensor | None) -> tuple[tuple[str, int | str], ...]:
    return (("OUT", TYPES[out]), ("BIAS", 0 if bias is None else TYPES[bias.dtype]))


def _args(
    kernel: str, product: ScaledProduct, bias: Tensor | None, out: Tensor, columns: int, extra: dict[str, int]
) -> dict[str, Tensor | int | None]:
    """The arguments that both kernels share; `extra` ones follow the sizes. A wave reads `columns` of `b`."""
    (a, a_scale, _), (b, b_scale, _), k = product.a, product.b, product.k
    if k % 32 != 0:
        raise ValueError(f"{kernel}: K={k}; it must be a multiple of 32")
    left, right = batched(lines(a)), batched(lines(b.mT))
    left_scale, right_scale = batched(a_scale), batched(b_scale.mT)
    for name, operand, most in (
        ("a", left, left.shape[1]),
        ("a_scale", left_scale, left.shape[1]),
        ("b", right, columns),
        ("b_scale", right_scale, columns),
    ):
        check_span(kernel, name, operand, most)
    return {
        "a": left, "a_scale": left_scale, "b": right, "b_scale": right_scale, "bias": bias, "out": out,
        "M": left.shape[1], "N": right.shape[1], "K": k, **extra,
        "a_row": stride(left, 1), "as_row": stride(left_scale, 1), "as_block": stride(left_scale, 2),
        "b_column": stride(right, 1), "bs_column": stride(right_scale, 1), "bs_block": stride(right_scale, 2),
        "a_batch": Wide(stride(left, 0)), "as_batch": Wide(stride(left_scale, 0)),
        "b_batch": Wide(stride(right, 0)), "bs_batch": Wide(stride(right_scale, 0)),
    }  # fmt: skip
