"""What the compiler makes of every default configuration, offline: the matrix instructions, the stores, no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.launch import Launch, Resources, resources
from fp8fn.ops.layout import BLOCKS, Block, empty_data, empty_scale, swap
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.quantize import plan_quantize
from fp8fn.ops.triton.quantize_dual import plan_quantize_dual
from fp8fn.ops.triton.scaled_mm import plan_scaled_mm
from fp8fn.ops.triton.scaled_mm_tma import candidates, plan_scaled_mm_tma

TARGETS = (SM89, SM90, SM100, SM120, GFX942, GFX950)
# Shared memory a program may have, in bytes.
SHARED = {
    "sm89": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "sm120": 99 << 10,
    "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip

# What a Linear multiplies: forward, dgrad with the weight as it was quantized for the forward, wgrad; rowwise and MX.
PRODUCTS: dict[str, tuple[Block, Block, str, str, str]] = {
    "forward": ((1, 128), (128, 128), "K", "K", "fp32"),
    "dgrad": ((1, 128), (128, 128), "K", "N", "fp32"),
    "wgrad": ((1, 128), (128, 1), "K", "K", "fp32"),
    "TN": ((1, 128), (128, 1), "M", "N", "fp32"),
    "rowwise": ((1, -1), (-1, 1), "K", "K", "fp32"),
    "MX": ((1, 32), (32, 1), "K", "K", "e8m0"),
}


def product(
    target: Target, kind: str, m: int = 4096, n: int = 4096, k: int = 4096, planner: Any = plan_scaled_mm,
    config: Any = None,
) -> Launch:  # fmt: skip
    a_block, b_block, a_contiguous, b_contiguous, scale = PRODUCTS[kind]
    dtype = native_e4m3(target)
    a = torch.empty(m, k, dtype=dtype, device="meta")
    b = torch.empty(k, n, dtype=dtype, device="meta")
    if a_contiguous == "M":
        a = a.mT.contiguous().view(k, m).mT
    if b_contiguous == "K":
        b = torch.empty(n, k, dtype=dtype, device="meta").mT
    scales = empty_scale(a, a_block, scale), empty_scale(b, b_block, scale)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    launch: Launch = planner(a, scales[0], a_block, b, scales[1], b_block, None, out, target, config=config)
    return launch


def assert_no_spills(used: Resources, target: Target) -> None:
    assert (used.spills, used.scratch) == (0, 0), used
    assert used.shared <= SHARED[target.name], used


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("m", [16, 32, 64, 4096])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_product_spills(target: Target, m: int, kind: str) -> None:
    assert_no_spills(product(target, kind, m=m).resources(), target)


@pytest.mark.parametrize("kind", ["forward", "wgrad", "rowwise"])
@pytest.mark.parametrize("config", candidates(4096, 4096, 4096), ids=str)
def test_no_tma_candidate_spills_and_as_many_fit_as_it_says(config: Any, kind: str) -> None:
    used = product(SM90, kind, planner=plan_scaled_mm_tma, config=config).resources()
    assert_no_spills(used, SM90)
    # A multiprocessor has 228 KiB, of which each program takes one more, and 65536 registers, given out by 8 a thread.
    assert config.OCCUPANCY * (used.shared + 1024) <= 228 << 10
    assert config.OCCUPANCY * config.num_warps * 32 * (-(-used.registers // 8) * 8) <= 65536


@pytest.mark.parametrize("planner", [plan_scaled_mm, plan_scaled_mm_tma], ids=lambda planner: planner.__name__)
@pytest.mark.parametrize("kind", ["forward", "wgrad"])
def test_hopper_multiplies_e4m3_in_warpgroups(kind: str, planner: Any) -> None:
    ptx = product(SM90, kind, planner=planner).compile().asm["ptx"]
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)
    assert ("cp.async.bulk.tensor.2d.shared" in ptx) == (planner is plan_scaled_mm_tma)


def test_ada_and_blackwell_multiply_fp8() -> None:
    assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in product(SM89, "forward").compile().asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::f8f6f4" in product(SM100, "forward").compile().asm["ptx"]


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
def test_cdna_multiplies_fp8_and_stores_16_bytes(target: Target, kind: str) -> None:
    text = product(target, kind).compile().asm["amdgcn"]
    if target is GFX942:
        assert re.search(r"v_mfma_f32_16x16x32_fp8_fp8", text)
    elif kind == "MX":
        assert re.search(r"v_mfma_f32_\d+x\d+x\d+_(f8f6f4|fp8_fp8)", text)
    else:
        assert re.search(r"v_mfma_f32_32x32x64_f8f6f4", text)
    assert "scratch_" not in text
    assert not re.search(r"(buffer|global)_store_(short|dwordx2)", text)
    assert re.search(r"(buffer|global)_store_dwordx4", text)


@pytest.mark.parametrize("shape", [(8192, 4096), (8191, 4093)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("target", [SM89, SM90, GFX942, GFX950], ids=lambda target: target.name)
def test_no_quantizer_spills(target: Target, block: Block, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    scale = "e8m0" if 32 in block else "fp32"
    data, scales = empty_data(x, block, native_e4m3(target)), empty_scale(x, block, scale)
    for launch in plan_quantize(x, data, scales, block, scale, target):
        compiled = launch.compile()
        assert_no_spills(resources(compiled), target)
        if shape == (8192, 4096):
            assert_wide_accesses(compiled, target)


@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("target", [SM89, SM90, GFX942, GFX950], ids=lambda target: target.name)
def test_dual_reads_once_and_does_not_spill(target: Target, block: Block) -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    dtype, scale = native_e4m3(target), "e8m0" if block == (1, 32) else "fp32"
    row, row_scales = empty_data(x, block, dtype), empty_scale(x, block, scale)
    col, col_scales = empty_data(x, swap(block), dtype), empty_scale(x, swap(block), scale)
    compiled = plan_quantize_dual(x, row, row_scales, col, col_scales, block, scale, target).compile()
    assert_no_spills(resources(compiled), target)
    assert_wide_accesses(compiled, target)
    threads = compiled.metadata.num_warps * target.warp_size
    assert len(wide_loads(compiled)) * threads * 16 == 128 * 128 * x.element_size()


def wide_loads(compiled: Any) -> list[str]:
    if "ptx" in compiled.asm:
        return re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", compiled.asm["ptx"])
    return re.findall(r"(?:buffer|global)_load_dwordx4", compiled.asm["amdgcn"])


def assert_wide_accesses(compiled: Any, target: Target) -> None:
    """The matrices are loaded and stored by 16 bytes; `partial_amax` stores no matrix."""
    assert wide_loads(compiled)
    stores = r"st\.global\.v4\.b32" if target.backend == "cuda" else r"(?:buffer|global)_store_dwordx4"
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert re.search(stores, text) or compiled.name == "partial_amax"
