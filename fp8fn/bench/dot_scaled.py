"""MX products by a plain Triton kernel with `tl.dot_scaled`: the peer of fp8fn's products of few rows."""

# The bodies of kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn import ScaledTensor
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch

BM: Final = 64
BN: Final = 128
BK: Final = 128
_STAGES: Final = 3


@triton.jit
def product(
    a, b, a_scale, b_scale, row, inside_m, offset_n, N, K, a_m, b_n, as_m, bs_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile `(BM, BN)` of rows `row` of a by columns `offset_n` of b."""
    offset_k, block_k = tl.arange(0, BK), tl.arange(0, BK // 32)
    inside_n = offset_n[:, None] < N
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a_tile = tl.load(a + row[:, None] * a_m + k + offset_k[None, :], mask=inside_m, other=0.0)
        b_tile = tl.load(b + offset_n[:, None] * b_n + k + offset_k[None, :], mask=inside_n, other=0.0)
        a_stored = tl.load(a_scale + row[:, None] * as_m + k // 32 + block_k[None, :], mask=inside_m, other=0)
        b_stored = tl.load(b_scale + offset_n[:, None] * bs_n + k // 32 + block_k[None, :], mask=inside_n, other=0)
        acc = tl.dot_scaled(a_tile, a_stored, "e4m3", tl.trans(b_tile), b_stored, "e4m3", acc)
    return acc


@triton.jit
def dense(
    a, b, out, a_scale, b_scale, M, N, K, a_m, b_n, as_m, bs_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """One tile of `out (M, N) = a (M, K) @ b (K, N)`; K and blocks along K are contiguous in all operands."""
    offset_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offset_n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside_m = offset_m[:, None] < M
    acc = product(a, b, a_scale, b_scale, offset_m, inside_m, offset_n, N, K, a_m, b_n, as_m, bs_n, BM=BM, BN=BN, BK=BK)
    pointers = out + offset_m[:, None] * N + offset_n[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside_m & (offset_n[None, :] < N))


@triton.jit
def routed(
    a, w, out, a_scale, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, token_weights,
    ids, N, K, a_div, a_m, w_e, w_n, as_m, ws_e, ws_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`BM` ids of one expert: rows `id // a_div` of a become rows `id` of out, times their weights."""
    tile = tl.program_id(0)
    if tile * BM >= tl.load(num_tokens_post_padded):
        return
    expert = tl.load(expert_ids + tile).to(tl.int64)
    row = tl.load(sorted_token_ids + tile * BM + tl.arange(0, BM))
    valid = row < ids
    source = row // a_div
    offset_n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside_m = valid[:, None]
    w += expert * w_e
    w_scale += expert * ws_e
    acc = product(a, w, a_scale, w_scale, source, inside_m, offset_n, N, K, a_m, w_n, as_m, ws_n, BM=BM, BN=BN, BK=BK)
    acc *= tl.load(token_weights + row, mask=valid, other=0.0)[:, None]
    pointers = out + row[:, None] * N + offset_n[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside_m & (offset_n[None, :] < N))


def plan_dense(a: ScaledTensor, b: ScaledTensor, out: Tensor, target: Target) -> TritonLaunch:
    """The launch of `out (M, N) = a (M, K) @ b (K, N)`."""
    _check(a, b)
    (m, n), k = out.shape, a.shape[-1]
    a_scale, b_scale = _lines(a.scale), _lines(b.scale.mT)
    return _launch(
        dense, (-(-m // BM), -(-n // BN), 1),
        {
            "a": a.data, "b": b.data, "out": out, "a_scale": a_scale, "b_scale": b_scale, "M": m, "N": n, "K": k,
            "a_m": a.data.stride(0), "b_n": b.data.stride(1), "as_m": a_scale.stride(0), "bs_n": b_scale.stride(0),
        },
        BM, 8, target,
    )  # fmt: skip


def plan_routed(
    a: ScaledTensor, w: ScaledTensor, layout: tuple[Tensor, Tensor, Tensor], a_div: int, token_weights: Tensor,
    out: Tensor, target: Target,
) -> TritonLaunch:  # fmt: skip
    """The launch that fills rows of `out (R * a_div, N)` by `w (E, K, N)`, of a layout by `fp8fn.sort_tokens`."""
    _check(a, w)
    ids, experts, number = layout
    a_scale, w_scale = _lines(a.scale), _lines(w.scale.mT)
    return _launch(
        routed, (experts.shape[0], -(-out.shape[1] // BN), 1),
        {
            "a": a.data, "w": w.data, "out": out, "a_scale": a_scale, "w_scale": w_scale,
            "sorted_token_ids": ids, "expert_ids": experts, "num_tokens_post_padded": number,
            "token_weights": token_weights, "ids": out.shape[0], "N": out.shape[1], "K": a.shape[-1], "a_div": a_div,
            "a_m": a.data.stride(0), "w_e": w.data.stride(0), "w_n": w.data.stride(2),
            "as_m": a_scale.stride(0), "ws_e": w_scale.stride(0), "ws_n": w_scale.stride(1),
        },
        ids.shape[0] // experts.shape[0], 4, target,
    )  # fmt: skip


def _launch(
    kernel: Callable[..., Any], grid: tuple[int, int, int], args: dict[str, Any], bm: int, warps: int, target: Target
) -> TritonLaunch:
    return TritonLaunch(
        kernel=kernel,
        grid=grid,
        args=args,
        constexprs={"BM": bm, "BN": BN, "BK": BK},
        options={"num_warps": warps, "num_stages": _STAGES},
        target=target,
    )


def _lines(scale: Tensor) -> Tensor:
    """The bytes of e8m0 scales, contiguous along K."""
    return scale.view(torch.uint8).contiguous()


def _check(a: ScaledTensor, b: ScaledTensor) -> None:
    k = a.shape[-1]
    if k % BK or a.data.dtype != torch.float8_e4m3fn or b.data.dtype != torch.float8_e4m3fn:
        raise ValueError(f"K={k}, {a.data.dtype} and {b.data.dtype}: only e4m3fn with K a multiple of {BK}")
    steps = a.data.stride(-1), b.data.stride(-2)
    if steps != (1, 1):
        raise ValueError(f"strides along K are {steps}; all must be 1")
