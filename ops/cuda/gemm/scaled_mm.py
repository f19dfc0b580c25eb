"""The scaled product on Hopper in CUDA C++: its configurations, what it accepts, and its launch (`scaled_mm.cu`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import LARGEST, SHARED_LIMIT, TMA_ALIGNMENT
from fp8fn.ops.cuda.operands import ELEMENT, WGMMA_FP8, map_fault, tma_batch
from fp8fn.ops.cuda.runtime.counters import MOST_LISTS
from fp8fn.ops.cuda.runtime.launch import Argument, CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.groups import unit_of
from fp8fn.ops.layout import WHOLE, round_up
from fp8fn.ops.operands import BESIDE, ScaledProduct
from fp8fn.ops.targets import OCP, hopper_fault

BK: Final = 128
# The scales of 128 x 128 blocks: runs of them in shared memory, and the bytes of one run of one chunk of lines.
_RUNS: Final = 2
_RUN_BYTES: Final = 32 * 4
# The ring of tiles in shared memory, and its mbarriers.
_TILES_BYTES: Final = 4 * (32 + 16)
# The least K of a product whose tiles are dealt out while it runs.
_DEALT_K: Final = 1024
# The ring of tiles' numbers, which are dealt out, and its mbarriers.
_DEAL_BYTES: Final = 2 * (4 + 16)
# The pairs of scale kinds, of a and of b, that are tuned; `scale_kind` names them.
KINDS: Final = (("VECTOR", "BLOCK"), ("VECTOR", "VECTOR"), ("LINE", "LINE"), ("WHOLE", "WHOLE"))
# The pairs with which it sums over tokens of groups.
SUMMED_KINDS: Final = (("VECTOR", "VECTOR"), ("VECTOR", "BLOCK"), ("BLOCK", "VECTOR"))


@dataclass(frozen=True)
class ScaledMmConfig:
    """The tile of a block and how it is computed; `scaled_mm.cu` says what each does.

    `MATH` warpgroups of `SLICES_M` x 64 rows, `BN` columns in `SLICES_N` products, `DEPTH` temporaries (0: all of K
    stays in the tensor core's accumulator), `STAGES` k-blocks in shared memory (0: as many as fit), `CLUSTER` blocks
    that share B (or A), or `SPLIT` blocks that share K of a tile (2, 4 or 8), `GROUP` rows of tiles walked together,
    `PROMOTE` k-blocks a promotion where scales hold for all K, `TURNS` whether warpgroups may take turns.
    """

    MATH: int = 2
    SLICES_M: int = 1
    BN: int = 128
    SLICES_N: int = 1
    DEPTH: int = 2
    STAGES: int = 0
    CLUSTER: int = 1
    SHARE_B: bool = True
    SPLIT: int = 1
    GROUP: int = 8
    PROMOTE: int = 4
    TURNS: bool = True

    @cached_property
    def BM(self) -> int:
        return 64 * self.SLICES_M * self.MATH

    def __str__(self) -> str:
        slices = f"/{self.SLICES_M}x{self.SLICES_N}" if self.SLICES_M * self.SLICES_N > 1 else ""
        shared = f" cluster{self.CLUSTER}{'B' if self.SHARE_B else 'A'}" if self.CLUSTER > 1 else ""
        split = f" split{self.SPLIT}" if self.SPLIT > 1 else ""
        free = "" if self.TURNS else " without turns"
        return f"{self.BM}x{self.BN}{slices} depth{self.DEPTH}{shared} group{self.GROUP}{split}{free}"


def scale_kind(line: int, along_k: int) -> str:
    """How the kernel reads the scales of an operand whose block is `line` rows (of a) or columns (of b), `along_k`.

    "OTHER" is a block that the kernel does not multiply: its K tile has `BK` elements and one scale a line.
    """
    if along_k == WHOLE:
        return {WHOLE: "WHOLE", 1: "LINE"}.get(line, "OTHER")
    return {1: "VECTOR", BK: "BLOCK"}.get(line, "OTHER") if along_k == BK else "OTHER"


def accepts(product: ScaledProduct) -> str | None:
    """None where `plan` takes these operands, else the reason why not."""
    places = product.offsets if product.counts is None else product.counts
    if places is not None and (reason := _refuses_groups(product, places)) is not None:
        return reason
    (a, a_scale, a_block), (b, b_scale, b_block), target = product.a, product.b, product.target
    if (reason := hopper_fault(target)) is not None:
        return reason
    if a.dtype not in OCP or b.dtype not in OCP:
        return f"{a.dtype} and {b.dtype} are not both types of the tensor core"
    if a_scale.dtype != torch.float32:
        return f"the scales are {a_scale.dtype}, not float32"
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    if "OTHER" in kinds:
        return f"blocks {a_block} and {b_block} are no pair of this kernel"
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
    if max(*a.shape, *b.shape, *a_scale.stride(), *b_scale.stride()) > LARGEST:
        return "a size, or a stride of the scales, is past 32 bits"
    return None


def _refuses_groups(product: ScaledProduct, places: Tensor) -> str | None:
    """Why the kernel takes no groups that lie as `places` says, the product's offsets or counts, or None."""
    a_block, b_block, bias = product.a.block, product.b.block, product.bias
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    if product.parts == 1 and kinds not in (KINDS if product.b.data.dim() == 3 else SUMMED_KINDS):
        spread = "" if product.b.data.dim() == 3 else ": tokens that are summed over have to be spread"
        return f"blocks {a_block} and {b_block} are no pair of this kernel{spread}"
    if not places.is_contiguous():
        return f"{'offsets' if product.counts is None else 'counts'} has stride {places.stride(0)}, not 1"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {bias.stride()}"
    return None


def plan(product: ScaledProduct, config: ScaledMmConfig) -> tuple[CudaLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, K contiguous in both; see `accepts`.

    With `offsets (E,)` the launch walks over the tiles of all groups: `out (M, N) = a (M, K) @ b (E, K, N)[group of the
    row] + bias (E, N)`, or `out (E, M, N)[g] = a (M, P) @ b (P, N)` over the spread tokens of each group. With `counts
    (E,)` it walks over the tiles of the first rows of each matrix of a batch, and then, for `zeros`, over the others.
    With `parts` it begins while the launch before it, which splits rows, still runs.
    """
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, offsets, counts, target = product.bias, product.offsets, product.counts, product.target
    m, n, k = product.m, product.n, product.k
    batches = out.shape[0] if out.dim() == 3 else 1
    grouped = "DENSE"
    if offsets is not None:
        batches, grouped = offsets.shape[0], "JAGGED_M" if b.dim() == 3 else "JAGGED_K"
    elif counts is not None:
        grouped = "MASKED"
    # Bulk copies begin at multiples of 16 bytes, and a group's first scale anywhere.
    scales_of_a = config.BM + (4 if grouped == "JAGGED_M" else 0)
    kinds = scale_kind(*a_block), scale_kind(b_block[1], b_block[0])
    # A bulk store writes pieces of 16 bytes: the last one of a single row would reach past its end.
    outs = (out, *(each.out for each in product.beside))
    whole_pieces = all(x.shape[-1] * x.element_size() % TMA_ALIGNMENT == 0 and map_fault(x) is None for x in outs)
    staged = out.dtype != torch.float32 and config.BN % 64 == 0 and whole_pieces
    # Few rows of tiles run together, each block by its own loads; a b that serves a whole batch is read for each of it.
    once = m <= 2 * config.BM and config.CLUSTER == 1 and grouped == "DENSE" and (batches == 1 or b.dim() == 3)
    # A bulk store overlaps with the next tile, and few rows have few tiles.
    out_via = "PAIRS" if not staged else "LINES" if once or config.SPLIT > 1 or product.beside else "BULK"
    width = config.BN // config.SLICES_N
    out_chunks = 2 if config.BN % 64 == 0 and config.BN > 64 else 1
    stages, shared = _stages(config, kinds, out_chunks if staged else 0, scales_of_a, product.parts)
    multicast = config.CLUSTER > 1
    macros: dict[str, int | str] = {
        "MATH": config.MATH, "SLICES_M": config.SLICES_M, "BN": config.BN, "SLICES_N": config.SLICES_N,
        "DEPTH": config.DEPTH, "STAGES": stages, "CLUSTER": config.CLUSTER, "SHARE_B": int(config.SHARE_B),
        "SPLIT": config.SPLIT, "GROUP": config.GROUP, "GROUPED": grouped, "A_SCALE": kinds[0], "B_SCALE": kinds[1],
        "PROMOTE": config.PROMOTE, "TURNS": int(config.TURNS), "OUT": ELEMENT[out.dtype], "OUT_VIA": out_via,
        "OUT_CHUNKS": out_chunks, "B_ONCE": int(once), "PARTS": product.parts, "BESIDE": len(product.beside),
        "BIAS": 0 if bias is None else ELEMENT[bias.dtype],
    }  # fmt: skip
    if grouped == "JAGGED_K":
        macros["SPREAD_UNIT"] = unit_of(k, batches)
    if grouped == "MASKED":
        macros["ZEROS"] = int(product.zeros)
    a_rows = config.BM // (config.CLUSTER if multicast and not config.SHARE_B else 1)
    a_rows = min(a.shape[-2], config.BM) if once else a_rows
    b_rows = config.BN // (config.CLUSTER if multicast and config.SHARE_B else 1)
    a_scales: Argument = TensorMap(tma_batch(a_scale.mT), (1, 1, scales_of_a)) if kinds[0] == "VECTOR" else a_scale
    b_scales: Argument = TensorMap(tma_batch(b_scale), (1, 1, config.BN)) if kinds[1] == "VECTOR" else b_scale
    args: dict[str, Argument] = {
        "a": TensorMap(tma_batch(a), (1, a_rows, BK), 128),
        # L2 promotion: an operand that is read once comes in lines of 128 bytes, 2 % faster than 256.
        "b": TensorMap(tma_batch(b.mT), (1, b_rows, BK), 128, promotion=128 if once else 256),
        "out": TensorMap(tma_batch(out), (1, 64, 64), 128) if out_via == "BULK" else out,
        "a_scale": a_scales, "b_scale": b_scales, "bias": bias,
        "problem": (m, n, k, batches), "counters": None,
        "a_batched": int(a.dim() == 3 and product.parts == 1), "b_batched": int(b.dim() == 3), "out_m": out.stride(-2),
        "as_batch": a_scale.stride(0) if a.dim() == 3 else 0, "bs_batch": b_scale.stride(0) if b.dim() == 3 else 0,
        "bs_n": b_scale.stride(-1), "bs_k": b_scale.stride(-2),
    }  # fmt: skip
    options: dict[str, Any] = {
        "BM": config.BM,
        "BN": config.BN,
        "STAGES": stages,
        "CLUSTER": config.CLUSTER,
        "SPLIT": config.SPLIT,
    }
    if product.parts > 1:
        options["PARTS"] = product.parts
    if config.DEPTH == 0:
        options["DEPTH"] = 0
    if config.GROUP != ScaledMmConfig.GROUP:
        options["GROUP"] = config.GROUP
    if not config.TURNS:
        options["TURNS"] = 0
    if kinds[0] == "BLOCK":
        args |= {"as_m": a_scale.stride(-2), "as_k": a_scale.stride(-1)}
    binds = {"out_rows": "out"}
    if grouped != "DENSE":
        args |= {"offsets": offsets if counts is None else counts, "out_rows": out}
        options["GROUPED"] = grouped
    if counts is not None:
        binds["offsets"] = "counts"
        options["ZEROS"] = int(product.zeros)
    if product.beside:  # their tiles follow one another
        n = sum(round_up(x.shape[-1], config.BN) for x in outs)
        args["problem"] = m, n, k, batches
    early = ["b", "b_scale"] + ["offsets"] * (offsets is not None)
    for name, each in zip(BESIDE, product.beside, strict=False):
        early += [f"b_{name}", f"b_scale_{name}"]
        scale = TensorMap(tma_batch(each.w.scale), (1, 1, config.BN)) if kinds[1] == "VECTOR" else each.w.scale
        args |= {
            f"b_{name}": TensorMap(tma_batch(each.w.data.mT), (1, b_rows, BK), 128, promotion=128 if once else 256),
            f"b_scale_{name}": scale, f"bias_{name}": each.bias, f"out_{name}": each.out,
            f"columns_{name}": each.out.shape[-1],
        }  # fmt: skip
    blocks = _blocks(m, n, batches, grouped, config)
    programs = blocks  # where a cluster shares K, it computes one tile
    if config.SPLIT == 1:
        programs = min(blocks, max(target.cores // config.CLUSTER, 1) * config.CLUSTER)
    # Tiles of few K tiles are done before a dealer finds the next one.
    deals = programs < blocks and not once and grouped in ("DENSE", "JAGGED_M") and k >= _DEALT_K
    deals = deals and programs // config.CLUSTER <= MOST_LISTS and product.parts == 1
    launch = CudaLaunch(
        kernel=CudaKernel(
            "scaled_mm.cu", "scaled_mm", tuple(macros.items()), (Wgmma(width, WGMMA_FP8[a.dtype], WGMMA_FP8[b.dtype]),)
        ),
        grid=(programs, 1, 1),
        threads=128 * (config.MATH + 1),
        shared=shared,
        args=args,
        target=target,
        options=options,
        binds=binds,
        counted="counters" if deals else "",
        overlaps=product.parts > 1,
        constant=tuple(early) if product.parts > 1 else (),
    )
    return (launch,)


def _blocks(m: int, n: int, batches: int, grouped: str, config: ScaledMmConfig) -> int:
    """Blocks that would have one tile each."""
    pair_m = config.CLUSTER if config.SHARE_B else 1
    pair_n = config.CLUSTER if not config.SHARE_B else 1
    rows = -(-m // (config.BM * pair_m)) * batches
    if grouped == "JAGGED_M":  # each group may end in a tile of its own, and so may the tokens in none
        rows = m // config.BM + batches + 1
    return rows * -(-n // (config.BN * pair_n)) * config.CLUSTER * config.SPLIT


def _stages(
    config: ScaledMmConfig, kinds: tuple[str, str], out_chunks: int, scales_of_a: int, parts: int
) -> tuple[int, int]:
    """The number of stages that fit (or `config.STAGES`), and the bytes of shared memory they take."""
    a_scale = 4 * scales_of_a if kinds[0] == "VECTOR" else 0
    b_scale = 4 * config.BN if kinds[1] == "VECTOR" else 0
    stage = (parts * config.BM + config.BN) * BK + round_up(a_scale, 128) + round_up(b_scale, 128) + 16
    fixed = config.MATH * out_chunks * 64 * 128
    if config.SPLIT > 1:  # sums of the other blocks, and their barrier
        fixed = (config.SPLIT - 1) * config.BM // config.SPLIT * config.BN * 4 + 16
    chunks = config.BN // math.gcd(config.BN, 128) if kinds[1] == "BLOCK" else 0
    chunks += config.MATH if kinds[0] == "BLOCK" else 0
    if chunks:
        fixed += _RUNS * (_RUN_BYTES * chunks + 16)
    fixed += _TILES_BYTES + _DEAL_BYTES
    stages = config.STAGES or min((SHARED_LIMIT - fixed) // stage, 12)
    return stages, fixed + stages * stage
