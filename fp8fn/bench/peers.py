"""Other implementations of the same products and quantizers, each as a call on fp8fn's operands.

Each function imports its peer, converts scales to the peer's layout, and returns the call that is timed. The function
raises where the peer is not installed or refuses the operands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn import GroupedScaledTensor, ScaledTensor
from fp8fn.ops.groups import spread_unit
from fp8fn.timing import Call

PEERS: Final = ("torch", "torchao", "deep_gemm", "triton")


def torch_scaled_mm(a: ScaledTensor, b: ScaledTensor) -> Call:
    """`torch._scaled_mm` with fast accumulation: `a (M, K) @ b (K, N)`, tensorwise or rowwise."""
    if a.block == (-1, -1):
        a_scale, b_scale = a.scale.reshape(()), b.scale.reshape(())
    else:
        a_scale, b_scale = a.scale.flatten()[:, None], b.scale.flatten()[None]
    return partial(torch._scaled_mm, a.data, b.data, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def torch_blockwise(a: ScaledTensor, b: ScaledTensor) -> Call:
    """cuBLASLt through `F.scaled_mm`: `a (M, K)` in (1, 128), `b (K, N)` in (128, 128) or (128, 1).

    Layouts of scales, by ATen's checks (ScaledBlas.cpp), where L is `K / 128` rounded up to a multiple of 4:

    - a in (1, 128): `(M, K / 128)` with strides `(1, M)`,
    - b in (128, 1): `(N, K / 128)` with strides `(1, N)`,
    - b in (128, 128): `(L, N / 128)` with strides `(1, L)`.
    """
    kinds = F.ScalingType
    if b.block == (128, 128):
        b_kind, b_scale = kinds.BlockWise128x128, b.scale.mT
        b_scale = F.pad(b_scale, (0, -b_scale.shape[-1] % 4)).contiguous().mT
    else:
        b_kind, b_scale = kinds.BlockWise1x128, b.scale.contiguous().mT
    return partial(
        F.scaled_mm, a.data, b.data, scale_a=a.scale.mT.contiguous().mT, scale_recipe_a=kinds.BlockWise1x128,
        scale_b=b_scale, scale_recipe_b=b_kind, output_dtype=torch.bfloat16,
    )  # fmt: skip


def torchao_gemm(a: ScaledTensor, b: ScaledTensor) -> Call:
    """torchao's Triton kernels: `a (M, K)` in (1, 128), `b (K, N)` in (128, 128) or (128, 1)."""
    kernels = _torchao("kernels")
    gemm = kernels.triton_fp8_gemm_1x128_128x128 if b.block == (128, 128) else kernels.triton_fp8_gemm_1x128_128x1
    return partial(gemm, a.data, b.data, a.scale, b.scale, out_dtype=torch.bfloat16)


def torchao_linear(use_triton: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of torchao's `Float8BlockwiseLinear`: quantizers by Triton, products by Triton or cuBLASLt."""
    function = _torchao("linear").fp8_blockwise_mm
    _torchao_one_stage()
    return lambda x, w: function.apply(x, w, 128, torch.bfloat16, use_triton)


def torchao_quantizer(name: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`triton_fp8_blockwise_{name}` of torchao: `x (M, N)` → data and dequantizing scales."""
    _torchao_one_stage()
    quantizer: Callable[[Tensor], tuple[Tensor, Tensor]] = getattr(_torchao("kernels"), f"triton_fp8_blockwise_{name}")
    return quantizer


def torchao_column_scales(x: Tensor, offsets: Tensor) -> Call:
    """torchao's quantizer of groups of rows of `x (M, N)`, with a scale for each group and column.

    Its kernels are tuned anew. The tuner's keys leave out N, and for groups of up to 2048 rows the number of groups:
    64 groups of 260 rows would be read in the tiles of 2048 rows that were found for 16 groups.
    """
    kernels: Any = importlib.import_module("torchao.prototype.moe_training.kernels.jagged_float8_scales")
    for kernel in ("colwise_scales_kernel", "colwise_scales_fused_kernel"):
        getattr(kernels, f"_triton_fp8_per_group_{kernel}").cache.clear()
    return partial(kernels.triton_fp8_per_group_colwise_scales, x, offsets)


def torchao_row_scales(w: Tensor) -> Call:
    """torchao's quantizer of experts `w (E, K, N)`, with a scale for each row of N elements, which then are a line."""
    kernels: Any = importlib.import_module("torchao.prototype.moe_training.kernels.float8_rowwise")
    return partial(kernels.triton_fp8_rowwise_3d_transpose_rhs, w)


def deep_gemm(a: ScaledTensor, b: ScaledTensor) -> Call:
    """DeepGEMM's `fp8_gemm_nt`: `a (M, K)` in (1, 128), `b (K, N)` in (128, 128), into an output made beforehand."""
    module: Any = importlib.import_module("deep_gemm")
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=torch.bfloat16)
    a_scale = module.get_mn_major_tma_aligned_tensor(a.scale)
    b_scale = b.scale.mT.contiguous()

    def call() -> Tensor:
        module.fp8_gemm_nt((a.data, a_scale), (b.data.mT, b_scale), out, disable_ue8m0_cast=True)
        return out

    return call


def deep_gemm_wgrad(a: ScaledTensor, b: ScaledTensor) -> Call:
    """DeepGEMM's `fp8_gemm_nt` of `a (M, K)` in (1, 128) and `b (K, N)` in (128, 1), added to a float32 output."""
    module: Any = importlib.import_module("deep_gemm")
    out = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    left, right = (a.data, a.scale), (b.data.mT, b.scale.mT)

    def call() -> Tensor:
        module.fp8_gemm_nt(left, right, out, c=out, recipe=(1, 1, 128), disable_ue8m0_cast=True)
        return out

    return call


def deep_gemm_groups(a: ScaledTensor, b: ScaledTensor, sizes: Sequence[int]) -> Call:
    """DeepGEMM's contiguous groups of rows: `a (M, K)` in (1, 128) by `b (E, K, N)` in (128, 128).

    Raises ValueError for groups of other than whole 128 rows.
    """
    module: Any = importlib.import_module("deep_gemm")
    _whole_blocks(sizes)
    group = torch.arange(len(sizes), device=a.device, dtype=torch.int32)
    rows = group.repeat_interleave(torch.tensor(sizes, device=a.device))
    out = torch.empty(a.shape[0], b.shape[2], device=a.device, dtype=torch.bfloat16)
    left = a.data, module.get_mn_major_tma_aligned_tensor(a.scale)
    right = b.data.mT, b.scale.mT.contiguous()

    def call() -> Tensor:
        module.m_grouped_fp8_gemm_nt_contiguous(left, right, out, rows, disable_ue8m0_cast=True)
        return out

    return call


def deep_gemm_masked(a: ScaledTensor, b: ScaledTensor, counts: Tensor, expected: int) -> Call:
    """DeepGEMM's masked layout: the first rows of each `a (E, M, K)` in (1, 128) by `b (E, K, N)` in (128, 128).

    `expected` is the mean of the counts, which DeepGEMM chooses its tile by. It leaves the other rows unwritten.
    """
    module: Any = importlib.import_module("deep_gemm")
    out = torch.empty(*a.shape[:2], b.shape[2], device=a.device, dtype=torch.bfloat16)
    left = a.data, module.get_mn_major_tma_aligned_tensor(a.scale)
    right = b.data.mT, b.scale.mT.contiguous()

    def call() -> Tensor:
        module.m_grouped_fp8_gemm_nt_masked(left, right, out, counts, expected, disable_ue8m0_cast=True)
        return out

    return call


def deep_gemm_groups_wgrad(a: GroupedScaledTensor, b: GroupedScaledTensor, sizes: Sequence[int]) -> Call:
    """DeepGEMM's groups along K: `aᵀ b` of tokens `a (M, N)` and `b (M, K)` in (128, 1), added to float32 `(E, N, K)`.

    Raises ValueError for groups of other than whole 128 tokens.
    """
    module: Any = importlib.import_module("deep_gemm")
    _whole_blocks(sizes)
    if spread_unit(sum(sizes), len(sizes)) != 128:
        raise ValueError(f"groups of {sizes} tokens; with fewer than 4 blocks each they begin within blocks")
    counts = torch.tensor(sizes, device=a.data.device, dtype=torch.int32)
    out = torch.zeros(len(sizes), a.data.shape[1], b.data.shape[1], device=a.data.device)

    starts = [sum(sizes[:group]) // 128 + group for group in range(len(sizes))]  # in blocks, as `ops.groups` has it

    def laid(x: GroupedScaledTensor) -> tuple[Tensor, Tensor]:
        places = list(zip(starts, sizes, strict=True))
        rows = x.data.view(torch.uint8)
        groups = [rows[128 * start : 128 * start + size].mT.flatten() for start, size in places]
        scales = [x.scale[start : start + size // 128] for start, size in places]
        return torch.cat(groups).view(x.data.dtype), torch.cat(scales).mT

    left, right = laid(a), laid(b)

    def call() -> Tensor:
        module.k_grouped_fp8_gemm_nt_contiguous(left, right, out, list(sizes), counts, out)
        return out

    return call


def _whole_blocks(sizes: Sequence[int]) -> None:
    if any(size % 128 for size in sizes):
        raise ValueError(f"groups of {sizes} tokens; DeepGEMM takes multiples of 128")


def _torchao(name: str) -> Any:
    return importlib.import_module(f"torchao.prototype.blockwise_fp8_training.{name}")


def _torchao_one_stage() -> None:
    """Keep only one of torchao's quantizer configurations that differ in `num_stages` alone.

    The kernels have no loop to pipeline: 2, 4 and 6 stages give the same PTX (sm90, Triton 3.7.1). Autotuning then
    compiles 15 variants for a size in place of 45.
    """
    kernels = _torchao("kernels")
    for name, kernel in vars(kernels).items():
        if name.startswith("triton_fp8_blockwise_") and name.endswith("_kernel"):
            kernel.configs = [config for config in kernel.configs if config.num_stages == 2]
