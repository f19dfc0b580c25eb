"""The grouped product on Hopper in CUDA C++: what it accepts, and its launch (`scaled_mm.cu`, walking over groups)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.launch import Argument, CudaLaunch, TensorMap
from fp8fn.ops.cuda.nvrtc import CudaKernel
from fp8fn.ops.cuda.prepared import Call, Step, geometry
from fp8fn.ops.cuda.scaled_mm import (
    BK,
    LARGEST,
    OUT,
    TMA_ALIGNMENT,
    TYPES,
    Config,
    as_batch,
    map_fault,
    scale_kind,
    stages_that_fit,
    wgmma_source,
)
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import OCP, Target

PAIRS: Final = (("VECTOR", "BLOCK"), ("VECTOR", "VECTOR"), ("LINE", "LINE"), ("WHOLE", "WHOLE"))
INPUTS: Final = ("a", "a_scale", "b", "b_scale", "offsets")


def accepts(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    offsets: Tensor, bias: Tensor | None, target: Target,
) -> str | None:  # fmt: skip
    """None where `plan` takes these operands, which the op has checked, else the reason why not."""
    if target.name != "sm90":
        return f"{target.name} is not sm90"
    if a.dtype not in OCP or b.dtype not in OCP:
        return f"{a.dtype} and {b.dtype} are not both types of the tensor core"
    if a_scale.dtype != torch.float32 or 32 in (a_block[1], b_block[0]):
        return "a scale is e8m0 or holds for 32 elements along K"
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    if kinds not in PAIRS:
        return f"blocks {a_block} and {b_block} are no pair of this kernel"
    if b.dim() == 2 and kinds != ("VECTOR", "VECTOR"):
        return f"blocks {a_block} and {b_block}: tokens that are summed over have to be spread"
    if a.shape[-1] == 0:
        return "K is 0"
    for name, operand in (("a", a), ("b.mT", b.mT)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    for name, scale, kind in (("a_scale", a_scale.mT, kinds[0]), ("b_scale", b_scale, kinds[1])):
        if kind == "VECTOR" and (fault := map_fault(scale)) is not None:
            return f"{name} {fault}"
        if kind == "LINE" and scale.shape[-1] > 1 and scale.stride(-1) != 1:
            return f"{name} has stride {scale.stride(-1)} from line to line, not 1"
    if not offsets.is_contiguous():
        return f"offsets has stride {offsets.stride(0)}, not 1"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}"
    if max(*a.shape, *b.shape, *a_scale.stride(), *b_scale.stride()) > LARGEST:
        return "a size, or a stride of the scales, is past 32 bits"
    return None


def plan(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    offsets: Tensor, bias: Tensor | None, out: Tensor, target: Target, config: Config,
) -> CudaLaunch:  # fmt: skip
    """The launch of `out (M, N) = a (M, K) @ b (E, K, N)[group of the row] + bias (E, N)`.

    Or, of a matrix `b`, of `out (E, M, N)[g] = a (M, P) @ b (P, N)` over the spread tokens of each group. K contiguous
    in both operands; see `accepts`.
    """
    jagged_m = b.dim() == 3
    (m, k), n, groups = a.shape, b.shape[-1], offsets.shape[0]
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    # A bulk store writes pieces of 16 bytes: the last one of a single row would reach past its end.
    whole_pieces = n * out.element_size() % TMA_ALIGNMENT == 0 and map_fault(out) is None
    through_tma = out.dtype != torch.float32 and config.BN % 64 == 0 and whole_pieces
    out_chunks = 2 if config.BN > 64 else 1
    # Bulk copies begin at multiples of 16 bytes, and a group's first scale anywhere.
    scales_of_a = config.BM + (4 if jagged_m else 0)
    stages, shared = stages_that_fit(config, kinds, out_chunks if through_tma else 0, scales_of_a)
    macros: dict[str, int | str] = {
        "MATH": config.MATH, "SLICES_M": config.SLICES_M, "BN": config.BN, "SLICES_N": config.SLICES_N,
        "DEPTH": config.DEPTH, "STAGES": stages, "CLUSTER": 1, "SHARE_B": 1, "GROUP": config.GROUP,
        "GROUPED": "JAGGED_M" if jagged_m else "JAGGED_K", "A_SCALE": kinds[0], "B_SCALE": kinds[1],
        "PROMOTE": config.PROMOTE, "OUT": OUT[out.dtype], "OUT_TMA": int(through_tma), "OUT_CHUNKS": out_chunks,
        "BIAS": 0 if bias is None else OUT[bias.dtype],
    }  # fmt: skip
    a_scales: Argument = TensorMap(as_batch(a_scale.mT), (1, 1, scales_of_a)) if kinds[0] == "VECTOR" else a_scale
    b_scales: Argument = TensorMap(as_batch(b_scale), (1, 1, config.BN)) if kinds[1] == "VECTOR" else b_scale
    args: dict[str, Argument] = {
        "a": TensorMap(as_batch(a), (1, config.BM, BK), 128),
        "b": TensorMap(as_batch(b.mT), (1, config.BN, BK), 128),
        "out": TensorMap(as_batch(out), (1, 64, 64), 128) if through_tma else out,
        "a_scale": a_scales, "b_scale": b_scales, "bias": bias,
        "problem": (m, n, k, groups, 1),
        "a_batched": 0, "b_batched": int(jagged_m), "out_m": out.stride(-2),
        "as_batch": 0, "bs_batch": b_scale.stride(0) if jagged_m else 0,
        "bs_n": b_scale.stride(-1), "bs_k": b_scale.stride(-2),
        "offsets": offsets, "out_rows": out,
    }  # fmt: skip
    source = wgmma_source(config.BN // config.SLICES_N, TYPES[a.dtype], TYPES[b.dtype])
    # Of groups of tokens, each may end in a tile of its own, and so may the tokens in none.
    rows = m // config.BM + groups + 1 if jagged_m else -(-m // config.BM) * groups
    return CudaLaunch(
        kernel=CudaKernel("scaled_mm.cu", "scaled_mm", tuple(macros.items()), source),
        grid=(min(rows * -(-n // config.BN), target.cores), 1, 1),
        threads=128 * (config.MATH + 1),
        shared=shared,
        args=args,
        target=target,
        options={"BM": config.BM, "BN": config.BN, "STAGES": stages, "GROUPED": macros["GROUPED"]},
    )


def call(launch: CudaLaunch, out: Tensor, has_bias: bool) -> Call:
    """A planned launch as a call on tensors of the same kinds: `INPUTS`, and `bias` if `has_bias`."""
    places = {name: i for i, name in enumerate([*INPUTS, *(["bias"] if has_bias else []), "out"])}
    places["out_rows"] = places["out"]
    names = [name for name, arg in launch.args.items() if not isinstance(arg, (int, float, tuple))]
    pointers = tuple(None if launch.args[name] is None else places[name] for name in names)
    return Call((Step(launch.prepare(), pointers),), (geometry(out),), 1)
