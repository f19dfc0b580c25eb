"""Every HIP kernel in every configuration that the dispatch or a table can choose, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.envelope import GEMV_ROWS, MFMA_ROWS, MOST_SPLITS
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.hip.moe_gemm import plan_moe
from fp8fn.ops.hip.mx_mm import plan_gemv, plan_mfma
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing, ScaledProduct
from fp8fn.ops.targets import GFX950


def kernels(dtype: torch.dtype) -> tuple[HipKernel, ...]:
    """The kernels with outputs of `dtype`, with a bias of that type or none; each once."""
    return tuple(dict.fromkeys(launch.kernel for launch in (*dense(dtype), *routed(dtype))))


def dense(dtype: torch.dtype) -> Iterator[HipLaunch]:
    """Launches of `mx_mm`, of each configuration one at least."""
    for bias in (None, torch.empty(16, dtype=dtype, device="meta")):
        for rows in (1, 2, 4, 8, GEMV_ROWS):
            yield from plan_gemv(_operands(rows, 128, dtype, bias), HipConfig(rows=rows))
        for m in range(16, MFMA_ROWS + 1, 16):
            for n_sub in (1, 2, 4):
                for parts in range(1, MOST_SPLITS + 1):  # parts of one step each: any number of them may be left to sum
                    config = HipConfig(n_sub=n_sub, k_splits=MOST_SPLITS)
                    yield from plan_mfma(_operands(m, 128 * parts, dtype, bias), config)


def routed(dtype: torch.dtype) -> Iterator[HipLaunch]:
    """Launches of `moe_gemm`: tiles of more than 64 ids are several blocks of 64."""
    dense = _operands(16, 128, dtype, None)
    w = Quantized(dense.b.data[None], dense.b.scale[None], (32, 1))
    ids, number = (torch.empty(size, dtype=torch.int32, device="meta") for size in (64, 1))
    for weights in (None, torch.empty(16, device="meta")):
        for block_m in (16, 32, 48, 64):
            for block_n in (8, 16):
                product = RoutedProduct(
                    a=dense.a, w=w, routing=Routing(ids[:block_m], number, number), a_div=1, token_weights=weights,
                    out=dense.out, target=GFX950,
                )  # fmt: skip
                yield from plan_moe(product, HipConfig(block_n=block_n))


def _operands(m: int, k: int, dtype: torch.dtype, bias: Tensor | None) -> ScaledProduct:
    def fp8(lines: int) -> Tensor:
        return torch.empty(lines, k, dtype=torch.float8_e4m3fn, device="meta")

    def scale(lines: int) -> Tensor:
        return torch.empty(lines, k // 32, dtype=torch.float8_e8m0fnu, device="meta")

    a, b = Quantized(fp8(m), scale(m), (1, 32)), Quantized(fp8(16), scale(16), (1, 32)).mT
    return ScaledProduct(a=a, b=b, out=torch.empty(m, 16, dtype=dtype, device="meta"), bias=bias, target=GFX950)
