"""Machine code of every default configuration, compiled offline: the matrix instructions, the stores, no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.cli.isa import OPS, assembly, product_launch
from fp8fn.ops.layout import BLOCKS, Block, empty_data, empty_scale
from fp8fn.ops.operands import ScaledProduct, empty_dual
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch, resources
from fp8fn.ops.triton.scaled_mm import plan_scaled_mm
from fp8fn.ops.triton.scaled_mm_tma import accepts as tma_accepts
from fp8fn.ops.triton.scaled_mm_tma import candidates, configs, plan_scaled_mm_tma
from fp8fn.ops.tuning.amd import CANDIDATES, config_of
from fp8fn.ops.tuning.amd_isa import Mix
from fp8fn.ops.tuning.amd_model import PROCESSORS, waves_per_simd
from support.compilers import SHARED, assert_no_spills, instructions, skip_frames_of_calls
from support.products import Parts
from support.quantizers import plan_quantize, plan_quantize_dual

NEW = tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 7)
TARGETS = (SM89, SM90, SM100, SM120, GFX942, GFX950)

# The products of a Linear: forward, dgrad with the weight as it was quantized for the forward, wgrad; rowwise and MX.
PRODUCTS: dict[str, tuple[Block, Block, str, str, str]] = {
    "forward": ((1, 128), (128, 128), "K", "K", "fp32"),
    "dgrad": ((1, 128), (128, 128), "K", "N", "fp32"),
    "wgrad": ((1, 128), (128, 1), "K", "K", "fp32"),
    "TN": ((1, 128), (128, 1), "M", "N", "fp32"),
    "rowwise": ((1, -1), (-1, 1), "K", "K", "fp32"),
    "MX": ((1, 32), (32, 1), "K", "K", "e8m0"),
}


def product_of(
    target: Target, kind: str, m: int = 4096, n: int = 4096, k: int = 4096, out_dtype: torch.dtype = torch.bfloat16
) -> ScaledProduct:
    a_block, b_block, a_contiguous, b_contiguous, scale = PRODUCTS[kind]
    dtype = native_e4m3(target)
    a = torch.empty(m, k, dtype=dtype, device="meta")
    b = torch.empty(k, n, dtype=dtype, device="meta")
    if a_contiguous == "M":
        a = a.mT.contiguous().view(k, m).mT
    if b_contiguous == "K":
        b = torch.empty(n, k, dtype=dtype, device="meta").mT
    scales = empty_scale(a, a_block, scale), empty_scale(b, b_block, scale)
    out = torch.empty(m, n, dtype=out_dtype, device="meta")
    return Parts(a, scales[0], a_block, b, scales[1], b_block, None, out).product(target)


def product(
    target: Target, kind: str, m: int = 4096, n: int = 4096, k: int = 4096, planner: Any = plan_scaled_mm,
    config: Any = None,
) -> TritonLaunch:  # fmt: skip
    launch: TritonLaunch
    (launch,) = planner(product_of(target, kind, m, n, k), config)
    return launch


def lines(product: ScaledProduct) -> ScaledProduct:
    """The same product, its operands in lines of a multiple of 16 bytes, as the quantizers lay them out."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        turned = x.stride(1) != 1
        rows, columns = (x.mT if turned else x).shape
        line = -(-columns // 16) * 16
        made = torch.empty_strided((rows, columns), (line, 1), dtype=x.dtype, device="meta")
        return made.mT if turned else made

    a, b = product.a, product.b
    return replace(product, a=a._replace(data=padded(a.data)), b=b._replace(data=padded(b.data)))


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("m", [16, 32, 64, 4096])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_product_spills(target: Target, m: int, kind: str) -> None:
    assert_no_spills(product(target, kind, m=m).resources(), target)


ODD = [
    pytest.param(target, m, kind, id=f"{target.name} {m} {kind}", marks=[] if m == 127 else pytest.mark.slow)
    for target in TARGETS[:4]
    for m in (13, 30, 127)
    for kind in PRODUCTS
    if kind != "MX"
]


@pytest.mark.parametrize(("target", "m", "kind"), ODD)
def test_no_product_of_odd_sizes_spills(target: Target, m: int, kind: str) -> None:
    """Loads of single bytes, masked along K: the default tile with 4 warps spilled up to 1162 registers."""
    assert_no_spills(product(target, kind, m=m, n=130, k=33).resources(), target)


@pytest.mark.parametrize("kind", ["forward", "wgrad", "dgrad"])
@pytest.mark.parametrize("target", [SM89, SM120], ids=lambda target: target.name)
def test_no_product_with_a_partial_k_tile_spills(target: Target, kind: str) -> None:
    """As in the gradient of weights by 1008 tokens."""
    assert_no_spills(product(target, kind, k=1008).resources(), target)


# Bytes of shared memory of a multiprocessor, of which each program takes one KiB more than it asks for.
MULTIPROCESSOR = {"sm90": 228 << 10, "sm100": 228 << 10, "sm120": 100 << 10}
BY_TMA = (SM90, SM100, SM120)


@pytest.mark.parametrize("kind", ["forward", "wgrad", "rowwise"])
@pytest.mark.parametrize("target", BY_TMA, ids=lambda target: target.name)
def test_no_tma_candidate_spills_and_as_many_fit_as_it_says(target: Target, kind: str) -> None:
    skip_frames_of_calls(target)
    for config in candidates(target, vectors=kind == "wgrad"):
        used = product(target, kind, planner=plan_scaled_mm_tma, config=config).resources()
        assert_no_spills(used, target)
        # A multiprocessor has 65536 registers, given out by 8 a thread.
        assert config.OCCUPANCY * (used.shared + 1024) <= MULTIPROCESSOR[target.name], config
        assert config.OCCUPANCY * config.num_warps * 32 * (-(-used.registers // 8) * 8) <= 65536, config


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad", "TN", "rowwise"])
@pytest.mark.parametrize("target", [SM100, SM120], ids=lambda target: target.name)
def test_no_default_by_tma_spills(target: Target, kind: str, out: torch.dtype) -> None:
    """At full tiles, and at partial ones along M, N and both, whose masks take registers."""
    skip_frames_of_calls(target)
    for m, n, k in ((4096, 4096, 4096), (4096, 4093, 4096), (4095, 4096, 4001), (4095, 4093, 4096), (67, 33, 31)):
        made = lines(product_of(target, kind, m, n, k, out))
        if tma_accepts(made) is None:
            assert_no_spills(plan_scaled_mm_tma(made)[0].resources(), target)
        else:
            assert target is SM120
            assert kind in ("dgrad", "TN")


def batch_of(product: ScaledProduct) -> ScaledProduct:
    """Three such products."""

    def repeated(x: torch.Tensor) -> torch.Tensor:
        step = max(size * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return torch.empty_strided((3, *x.shape), (step, *x.stride()), dtype=x.dtype, device="meta")

    a, b = (q._replace(data=repeated(q.data), scale=repeated(q.scale)) for q in (product.a, product.b))
    return replace(product, a=a, b=b, out=repeated(product.out))


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad", "TN", "rowwise"])
@pytest.mark.parametrize("target", [SM100, SM120], ids=lambda target: target.name)
def test_no_batch_by_tma_spills(target: Target, kind: str) -> None:
    """Every candidate at full tiles, and the default at partial ones, whose masks take registers."""
    skip_frames_of_calls(target)
    for shape, out in (((4096, 4096, 4096), torch.bfloat16), ((4095, 4093, 4001), torch.float32)):
        made = batch_of(lines(product_of(target, kind, *shape, out)))
        if tma_accepts(made) is not None:
            assert (target, kind in ("dgrad", "TN")) == (SM120, True)
            return
        for config in configs(made) if shape[0] == 4096 else (None,):
            assert_no_spills(plan_scaled_mm_tma(made, config)[0].resources(), target)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("a_block", [(128, 128), (-1, -1), (1, -1)], ids=str)
def test_no_vector_of_scales_of_b_alone_spills_on_sm100(a_block: Block, out: torch.dtype) -> None:
    """Loops over tiles and over K that are fused spilled up to 28 registers here."""
    for m, n in ((4096, 4096), (129, 136)):
        made = lines(product_of(SM100, "wgrad", m, n, 4096, out))
        a = made.a.data
        made = replace(made, a=made.a._replace(scale=empty_scale(a, a_block, "fp32"), block=a_block))
        assert tma_accepts(made) is None
        assert_no_spills(plan_scaled_mm_tma(made)[0].resources(), SM100)


@pytest.mark.parametrize("planner", [plan_scaled_mm, plan_scaled_mm_tma], ids=lambda planner: planner.__name__)
@pytest.mark.parametrize("kind", ["forward", "wgrad"])
def test_hopper_multiplies_e4m3_in_warpgroups(kind: str, planner: Any) -> None:
    ptx = product(SM90, kind, planner=planner).compile().asm["ptx"]
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)
    assert ("cp.async.bulk.tensor.2d.shared" in ptx) == (planner is plan_scaled_mm_tma)


@pytest.mark.parametrize("kind", ["forward", "rowwise"])
def test_three_blocks_by_pointers_find_room_on_hopper(kind: str) -> None:
    """Registers and shared memory suffice for three. Where they don't, the compiler is not limited."""
    launch = product(SM90, kind)
    found = launch.resources()
    assert launch.options["maxnreg"] == 168
    assert 3 * 32 * launch.options["num_warps"] * found.registers <= 65536
    assert 3 * (found.shared + 1024) <= 233472
    for other in (
        product(SM90, "wgrad"),
        product(SM90, "dgrad"),
        product(SM90, kind, n=4080),
        product(SM90, kind, k=4112),
    ):
        assert "maxnreg" not in other.options


@pytest.mark.parametrize("blocks", [((1, 128), (-1, 1)), ((1, 128), (128, 128)), ((1, 128), (-1, -1))], ids=str)
@pytest.mark.parametrize("m", [4096 + 4, 2**19 + 4])
def test_no_masked_rows_with_a_bias_spill_on_hopper(m: int, blocks: tuple[Block, Block]) -> None:
    """With 168 registers 6 to 8 spilled: scales by columns, float32 results, rows past 2**31 elements."""
    a, b = (torch.empty(size, 4096, dtype=torch.float8_e4m3fn, device="meta") for size in (m, 4096))
    a_block, b_block = blocks
    scales = empty_scale(a, a_block, "fp32"), empty_scale(b.mT, b_block, "fp32")
    out, bias = torch.empty(m, 4096, device="meta"), torch.empty(4096, dtype=torch.bfloat16, device="meta")
    parts = Parts(a, scales[0], a_block, b.mT, scales[1], b_block, bias, out)
    (launch,) = plan_scaled_mm(parts.product(SM90))
    assert launch.constexprs["WIDE"] is (m > 2**19)
    assert_no_spills(launch.resources(), SM90)


def test_ada_and_blackwell_multiply_fp8_by_pointers() -> None:
    for target in (SM89, SM120):
        ptx = product(target, "forward").compile().asm["ptx"]
        assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in ptx
    assert "tcgen05.mma.cta_group::1.kind::f8f6f4" in product(SM100, "forward").compile().asm["ptx"]


# The product in PTX and in SASS.
BLACKWELL = {
    "sm100": (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", "UTCQMMA"),
    "sm120": (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", "QMMA.16832.F32.E4M3.E4M3"),
}


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad", "TN", "rowwise"])
@pytest.mark.parametrize("target", [SM100, SM120], ids=lambda target: target.name)
def test_blackwell_loads_by_tma(target: Target, kind: str, batch: bool, tmp_path: Path) -> None:
    """What is chosen: on sm100 whichever axis is contiguous; on sm120 K, as other tiles would be read by bytes."""
    made, axes = product_of(target, kind), 3 if batch else 2
    (launch,) = SCALED_MM.plan(batch_of(made) if batch else made)
    assert isinstance(launch, TritonLaunch)
    by_tma = target is SM100 or kind not in ("dgrad", "TN")
    assert launch.name == ("scaled_mm_tma" if by_tma else "scaled_mm")
    compiled = launch.compile()
    ptx, (pattern, name) = compiled.asm["ptx"], BLACKWELL[target.name]
    assert re.search(pattern, ptx)
    assert bool(re.search(rf"cp\.async\.bulk\.tensor\.{axes}d\.shared::\w+\.global", ptx)) == by_tma
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text.split()[0]} == {name}
    assert any(f"UTMALDG.{axes}D" in text for text in sass) == by_tma
    if by_tma:  # scales alone are loaded by threads, by 16 bytes too in a batch by Triton 3.6, and no matrix
        assert not re.search(r"cp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], 0x10", ptx) or (batch and not NEW)
        assert f"UTMASTG.{axes}D" in "".join(sass)


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
def test_cdna_multiplies_mx_blocks_by_pointers(target: Target) -> None:
    found = assembly(product(target, "MX"))
    assert all(matrix.type in ("fp8", "f8f6f4") for matrix in found.loop.matrix)
    assert (set(found.whole.widths("store")), found.spills) == ({16}, 0)


# Matrix instructions on AMD, and the least bytes of a store, in layers of 4096: op, its kernel, gfx942, gfx950, bytes.
# The moves to and from accumulators of NN from 256 rows were 405 in Primus-Turbo's kernel, a tenth is the most here.
CDNA = (
    ("forward", 0, "32x32x16_fp8_fp8", "32x32x64_f8f6f4", 16),
    ("dgrad", 0, "16x16x32_fp8_fp8", "16x16x128_f8f6f4", 16),
    ("wgrad", 0, "16x16x32_fp8_fp8", "16x16x128_f8f6f4", 16),
    ("TN", 0, "16x16x32_fp8_fp8", "16x16x128_f8f6f4", 16),
    ("rowwise", 0, "16x16x32_fp8_fp8", "32x32x64_f8f6f4", 16),
    ("grouped", 0, "16x16x32_fp8_fp8", "32x32x64_f8f6f4", 16),
    ("grouped", 1, "16x16x32_fp8_fp8", "16x16x128_f8f6f4", 16),
    ("a16w8", 0, "16x16x16_bf16", "16x16x32_bf16", 16),
)


@pytest.mark.parametrize(("op", "index", "gfx942", "gfx950", "width"), CDNA, ids=lambda value: str(value))
@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
def test_machine_code_of_cdna(target: Target, op: str, index: int, gfx942: str, gfx950: str, width: int) -> None:
    launch = OPS[op](target, 4096, 4096, 4096)[index]
    found = assembly(launch)
    assert {matrix.name for matrix in found.loop.matrix} == {f"v_mfma_f32_{gfx942 if target is GFX942 else gfx950}"}
    assert (found.spills, found.scratch) == (0, 0)
    assert found.lds <= SHARED[target.name]
    assert min(found.whole.widths("store")) == width
    warps = int(launch.options["num_warps"])
    if warps == 8 or NEW:  # before, 4 warps kept sums in accumulators and read them for every step
        assert found.whole.count("v_accvgpr") < 40
        # Two waves at least on a SIMD, so that one multiplies while another promotes.
        assert waves_per_simd(found.vgprs, found.lds, warps, PROCESSORS[target.name]) >= 2
    assert not any("short" in name for name in found.whole.names if "_store_" in name)
    assert max(found.loop.widths("load")) == 16
    # Only scales and offsets are loaded by 4 bytes.
    assert set(found.loop.widths("load")) <= {16, 4}


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
def test_buffers_are_addressed_where_32_bits_reach(kind: str, target: Target) -> None:
    """Buffer loads take offsets of 32 bits: for tensors under 2 GiB, all but scales, and for the others none."""

    def by_address(code: Mix) -> int:  # Triton 3.8 loads into shared memory
        return code.count("global_load_dwordx4") + code.count("global_load_lds_dwordx4")

    near = assembly(product_launch(kind, 4096, 4096, 4096, target)).whole
    assert near.count("buffer_load_dwordx4") > 0
    assert near.count("global_store") == 0
    if NEW:
        assert by_address(near) == 0
    far = product_launch(kind, 32768, 16384, 106496, target)  # a has 3.5e9 bytes
    code = assembly(far).whole
    assert far.constexprs["WIDE"] is True
    assert by_address(code) > 0
    assert code.count("buffer_load_dwordx4") > 0  # of b
    assert code.count("global_store") == 0


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
def test_no_candidate_of_cdna_spills_where_it_may_be_chosen(target: Target) -> None:
    """At multiples of 16, and of 4 warps at any sizes; full tiles are those whose figures the tables have."""
    for kind, names in CANDIDATES[target.name].items():
        for name in names[::3]:
            config = config_of(name)
            rows = 4080 if kind == "TN" else 4095  # along which TN is contiguous
            ragged = (rows, 4080, 4080) if config.num_warps > 4 else (4095, 4093, 4091)
            found = assembly(product_launch(kind, *ragged, target, config))
            assert (found.spills, found.scratch) == (0, 0), (kind, name)


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


@pytest.mark.parametrize(("block", "dual_block"), [((1, 128), None), ((1, 32), None), ((1, 128), (128, 128))], ids=str)
@pytest.mark.parametrize("target", [SM89, SM90, GFX942, GFX950], ids=lambda target: target.name)
def test_dual_reads_once_and_does_not_spill(target: Target, block: Block, dual_block: Block | None) -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    dtype, scale = native_e4m3(target), "e8m0" if block == (1, 32) else "fp32"
    outs = empty_dual(x, block, dtype, scale, dual_block)
    compiled = plan_quantize_dual(x, outs, block, scale, target, dual_block=dual_block).compile()
    assert_no_spills(resources(compiled), target)
    assert_wide_accesses(compiled, target)
    threads = compiled.metadata.num_warps * target.warp_size
    assert len(wide_loads(compiled)) * threads * 16 == 128 * 128 * x.element_size()


def wide_loads(compiled: Any) -> list[str]:
    if "ptx" in compiled.asm:
        return re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", compiled.asm["ptx"])
    return re.findall(r"(?:buffer|global)_load_dwordx4", compiled.asm["amdgcn"])


def assert_wide_accesses(compiled: Any, target: Target) -> None:
    """The matrices are loaded and stored by 16 bytes; kernels of partial maxima store no matrix."""
    assert wide_loads(compiled)
    stores = r"st\.global\.v4\.b32" if target.backend == "cuda" else r"(?:buffer|global)_store_dwordx4"
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert re.search(stores, text) or compiled.name in ("partial_amax", "partial_amax_rows")
