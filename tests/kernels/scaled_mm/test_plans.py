"""Hopper's scaled product in CUDA C++: its machine code, what it accepts, its plans, its walk."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import BK, ScaledMmConfig, accepts, plan
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel, compile_kernel
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import GFX942, SM89, SM90, SM100, Target
from fp8fn.ops.tuning.model import pairs, tiles
from fp8fn.ops.tuning.problem import Problem as TunedProblem
from support.compilers import SHARED_LIMIT, assert_well_compiled, instructions, needs_nvrtc
from support.configs import KINDS, OTHER_PAIRS, SCALED_MM, VARIANTS, every_variant
from support.products import Parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Problem:
    """Unwritten operands as the quantizers lay them out, and `plan`'s and `accepts`' arguments made of them."""

    def __init__(
        self, kind: str = "forward", shape: tuple[int, int, int] = (4096, 4096, 4096), out: torch.dtype = BF16, *,
        bias: torch.dtype | None = None, a_batch: int | None = None, b_batch: int | None = None,
        types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), device: str = "meta",
    ) -> None:  # fmt: skip
        m, n, k = shape
        self.a_block, self.b_block = {**KINDS, **OTHER_PAIRS}[kind]
        lead_a, lead_b = (() if size is None else (size,) for size in (a_batch, b_batch))
        of_a = torch.empty(*lead_a, m, k, device=device, dtype=BF16)
        of_b = torch.empty(*lead_b, k, n, device=device, dtype=BF16)
        self.a, self.b = empty_data(of_a, self.a_block, types[0], False), empty_data(of_b, self.b_block, types[1], True)
        self.a_scale = empty_scale(of_a, self.a_block, "fp32", False)
        self.b_scale = empty_scale(of_b, self.b_block, "fp32", True)
        self.bias = None if bias is None else torch.empty(n, device=device, dtype=bias)
        self.out = torch.empty(*(lead_a or lead_b), m, n, device=device, dtype=out)
        self.target = SM90

    @property
    def product(self) -> ScaledProduct:
        parts = Parts(
            self.a, self.a_scale, self.a_block, self.b, self.b_scale, self.b_block, self.bias, self.out
        )  # fmt: skip
        return parts.product(self.target)

    def plan(self, config: ScaledMmConfig | None = None) -> CudaLaunch:
        return plan(self.product, config or ScaledMmConfig())[0]

    def refusal(self) -> str | None:
        return accepts(self.product)


def names(sass: list[tuple[int, str]]) -> set[str]:
    """Opcodes, without the predicates before them."""
    return {re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for _, text in sass}


def main_loops(sass: list[tuple[int, str]]) -> list[list[str]]:
    """The innermost loops that multiply: a branch back, and all from where it goes to.

    The slow path of a wait lies behind the kernel's end and branches back too, over much that is no part of the loop.
    Those are no loops, and of loops that overlap, the shortest counts.
    """
    loops = []
    end = max(address for address, text in sass if "EXIT" in text)
    for address, text in sass:
        branch = re.search(r"\bBRA\b.*?\b(0x[0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address < end:
            loops.append((int(branch[1], 16), address))
    multiplying = [address for address, text in sass if "QGMMA" in text]
    inner: list[tuple[int, int]] = []
    for start, stop in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        multiplies = any(start <= at <= stop for at in multiplying)
        if multiplies and all(stop < other_start or start > other_stop for other_start, other_stop in inner):
            inner.append((start, stop))
    return [[text for address, text in sass if start <= address <= stop] for start, stop in inner]


@needs_nvrtc
@every_variant
def test_machine_code_of_every_configuration(config: str, kind: str, tmp_path: Path) -> None:
    launch = Problem(kind).plan(SCALED_MM[config])
    compiled = launch.compile(verbose=True)
    assert_well_compiled(compiled.log, launch.shared)
    if kind == "tensorwise":  # the loop is that of rowwise scales, and disassembling takes as long as compiling
        return
    sass = instructions(compiled.cubin, tmp_path)
    opcodes = names(sass)
    width = SCALED_MM[config].BN // SCALED_MM[config].SLICES_N
    assert {name for name in opcodes if "GMMA" in name} == {f"QGMMA.64x{width}x32.F32.E4M3.E4M3"}
    clustered = SCALED_MM[config].CLUSTER > 1
    assert "UTMALDG.3D" in opcodes
    assert ("UTMALDG.3D.MULTICAST" in opcodes) == clustered
    assert ("UTMASTG.3D" in opcodes) == (SCALED_MM[config].SPLIT == 1)
    # Sums, and numbers of tiles, go to the other blocks of a cluster.
    assert bool([name for name in opcodes if name.startswith("STAS")]) == (SCALED_MM[config].SPLIT > 1 or clustered)
    assert not {name for name in opcodes if name.startswith(("LDL", "STL"))}
    # A fence over the GPU costs hundreds of cycles: two of a cluster that shares loads, at its start and end, and two
    # of the warp that deals out tiles, when there are no more; none in a loop.
    fences = Counter(text for _, text in sass if re.search(r"MEMBAR\.\w+\.(GPU|SYS)", text))
    assert fences.total() == 2 * clustered + 2 * (SCALED_MM[config].SPLIT == 1)
    multiplying = [i for i, (_, text) in enumerate(sass) if "QGMMA" in text]
    loops = main_loops(sass)
    assert loops
    # The compiler puts the end of a kernel with an early start among its products.
    has_early_start = SCALED_MM[config].SLICES_M * SCALED_MM[config].SLICES_N > 1
    walk = [text for _, text in sass[multiplying[0] : multiplying[-1]]]
    for loop in loops if has_early_start else (*loops, walk):
        assert any("QGMMA" in text for text in loop)
        assert not [text for text in loop if "MEMBAR" in text and ".CTA" not in text]


@needs_nvrtc
@pytest.mark.parametrize("out", [FP16, FP32], ids=str)
@pytest.mark.parametrize("config", [name for name in SCALED_MM if "depth" not in name])
def test_no_output_type_spills(config: str, out: torch.dtype) -> None:
    kind = "forward" if out == FP16 or config.startswith("256x128") else "rowwise"
    launch = Problem(kind, out=out).plan(SCALED_MM[config])
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


@needs_nvrtc
@pytest.mark.parametrize("bias", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("config", ["192x128", "128x256", "64x64", "256x128", "256x128 cluster"])
def test_no_bias_spills(config: str, bias: torch.dtype) -> None:
    launch = Problem("forward", bias=bias).plan(SCALED_MM[config])
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
def test_no_output_with_an_odd_stride_spills(kind: str) -> None:
    launch = Problem(kind, (333, 111, 777), bias=BF16).plan(SCALED_MM["192x128"])
    assert dict(launch.kernel.macros)["OUT_VIA"] == "PAIRS"
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


@needs_nvrtc
@pytest.mark.parametrize("types", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_the_instruction_has_the_operands_types_in_order(
    types: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    launch = Problem("wgrad", types=types).plan(SCALED_MM["192x128"])
    found = {name for name in names(instructions(launch.compile().cubin, tmp_path)) if "GMMA" in name}
    short = {E4M3: "E4M3", E5M2: "E5M2"}
    assert found == {f"QGMMA.64x128x32.F32.{short[types[0]]}.{short[types[1]]}"}


@needs_nvrtc
@pytest.mark.parametrize("config", ["192x128", "128x128", "128x256", "64x64", "64x64 split"])
def test_a_stage_is_given_back_when_the_last_of_its_scales_is_there(config: str, tmp_path: Path) -> None:
    """The arrival depends on the load before it; what comes through the copy engine would else be too early."""
    launch = Problem("wgrad").plan(SCALED_MM[config])
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    # The mbarriers of the rings of tiles and their numbers come after those of the stages.
    of_tiles = launch.shared - 2 * (4 + 16) - 4 * 16 - (16 if SCALED_MM[config].SPLIT > 1 else 0)
    arrivals = 0
    for i, text in enumerate(sass):
        if "SYNCS.ARRIVE.TRANS64.A1T0" not in text or int(text.split("+")[-1].split("]")[0], 16) >= of_tiles:
            continue
        needed = set(re.findall(r"\bR\d+", text))
        for before in reversed(sass[:i]):
            target, *others = re.findall(r"\bR\d+", before) or [""]
            if "LDS.64" in before:
                assert {target, f"R{int(target[1:]) + 1}"} & needed, (before, text)
                arrivals += 1
                break
            if target in needed:
                needed |= {*others}
    assert arrivals >= 1


@needs_nvrtc
def test_a_cluster_may_share_a(tmp_path: Path) -> None:
    launch = Problem("forward").plan(ScaledMmConfig(MATH=3, DEPTH=1, CLUSTER=2, SHARE_B=False))
    compiled = launch.compile(verbose=True)
    assert_well_compiled(compiled.log, launch.shared)
    assert "UTMALDG.3D.MULTICAST" in names(instructions(compiled.cubin, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_may_be_chosen_is_among_what_is_tested_here(kind: str) -> None:
    (a_line, a_along_k), (b_along_k, b_line) = KINDS[kind]
    kinds = cuda.scale_kind(a_line, a_along_k), cuda.scale_kind(b_line, b_along_k)
    tested = {SCALED_MM[config] for config, of in VARIANTS if of == kind}
    for fast in (False, True):
        problem = TunedProblem(1, 1, 1, *kinds, fast=fast)
        assert {*tiles(problem), *pairs(problem)} <= tested


@needs_nvrtc
def test_resources_are_those_of_the_machine_code() -> None:
    launch = Problem("forward").plan(SCALED_MM["192x128"])
    used = launch.resources()
    assert (used.spills, used.scratch, used.shared) == (0, 0, launch.shared)
    assert used.registers * launch.threads <= 65536


@needs_nvrtc
@pytest.mark.parametrize("width", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma_source_names_every_accumulator(width: int, a_in_registers: bool) -> None:
    source = Wgmma(width, "e4m3", "e5m2", a_in_registers=a_in_registers).source
    assert f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e5m2" in source
    for i in range(width // 2):
        assert f"(d[{i}])" in source
        assert f"%{i}," in source or f"%{i}}}" in source
    assert f"d[{width // 2}]" not in source


@pytest.mark.parametrize("kind", KINDS)
def test_accepts_all_sizes_that_the_quantizers_lay_out(kind: str) -> None:
    for shape in ((1, 1, 1), (1, 17, 129), (193, 65, 127), (64, 64, 128), (7, 1, 385), (1, 3, 1), (4096, 4097, 4098)):
        for out in (BF16, FP16, FP32):
            assert Problem(kind, shape, out, bias=BF16).refusal() is None
    for types in ((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)):
        assert Problem(kind, (33, 44, 55), types=types).refusal() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("a_batch", "b_batch"), [(3, 3), (3, None), (None, 3), (1, 1), (1, None)])
def test_accepts_batches(kind: str, a_batch: int | None, b_batch: int | None) -> None:
    for shape in ((1, 1, 1), (1, 17, 129), (65, 33, 127), (128, 128, 128)):
        assert Problem(kind, shape, a_batch=a_batch, b_batch=b_batch).refusal() is None


@pytest.mark.parametrize("target", [SM89, SM100, GFX942], ids=lambda target: target.name)
def test_refuses_another_processor(target: Target) -> None:
    problem = Problem()
    problem.target = target
    assert problem.refusal() == f"{target.name} is not sm90"


def test_refuses_types_of_another_processor() -> None:
    assert Problem(types=(torch.float8_e4m3fnuz, E4M3)).refusal() == (
        "torch.float8_e4m3fnuz and torch.float8_e4m3fn are not both types of the tensor core"
    )
    assert "not both types" in str(Problem(types=(E4M3, torch.float8_e5m2fnuz)).refusal())


def test_refuses_e8m0_and_blocks_of_32() -> None:
    problem = Problem()
    problem.a_scale, problem.b_scale = (
        torch.empty_strided(s.shape, s.stride(), dtype=torch.float8_e8m0fnu, device="meta")
        for s in (problem.a_scale, problem.b_scale)
    )
    assert problem.refusal() == "the scales are torch.float8_e8m0fnu, not float32"
    problem = Problem()
    problem.a_block, problem.a_scale = (1, 32), meta(4096, 128, dtype=FP32)
    assert problem.refusal() == "blocks (1, 32) and (128, 128) are no pair of this kernel"
    problem = Problem("wgrad")
    problem.b_block, problem.b_scale = (32, 1), meta(128, 4096, dtype=FP32)
    assert problem.refusal() == "blocks (1, 128) and (32, 1) are no pair of this kernel"


@pytest.mark.parametrize("b_block", [(128, 1), (128, 128), (-1, 1), (-1, -1)], ids=str)
@pytest.mark.parametrize("a_block", [(1, 128), (128, 128), (1, -1), (-1, -1)], ids=str)
def test_accepts_every_pair_of_blocks_of_128_or_all_of_k(a_block: Block, b_block: Block) -> None:
    problem = Problem()
    problem.a_block, problem.b_block = a_block, b_block
    problem.a_scale = empty_scale(problem.a, a_block, "fp32", False)
    problem.b_scale = empty_scale(problem.b, b_block, "fp32", True)
    assert problem.refusal() is None


def test_refuses_an_empty_contraction() -> None:
    assert Problem(shape=(64, 64, 0)).refusal() == "K is 0"


def test_refuses_operands_that_tma_cannot_address() -> None:
    problem = Problem("rowwise", (64, 64, 128))
    problem.a = meta(128, 64, dtype=E4M3).mT
    assert problem.refusal() == "a has stride 64 along its contiguous axis, not 1"
    problem = Problem("rowwise", (64, 64, 128))
    problem.b = meta(128, 64, dtype=E4M3)
    assert problem.refusal() == "b.mT has stride 64 along its contiguous axis, not 1"
    problem = Problem("rowwise", (64, 64, 129))
    problem.a = meta(64, 129, dtype=E4M3)
    assert problem.refusal() == "a has a stride of 129 bytes, no multiple of 16"
    problem = Problem("rowwise", (64, 64, 128), a_batch=3)
    problem.a = meta(1, 64, 128, dtype=E4M3).expand(3, 64, 128)
    assert problem.refusal() == "a has a stride of 0 bytes, no multiple of 16"
    problem = Problem("rowwise", (64, 64, 128))
    problem.a = torch.empty_strided((64, 128), (64, 1), dtype=E4M3, device="meta")
    assert problem.refusal() == "a has lines of 128 elements at a stride of 64"


def test_refuses_views_that_start_between_16_bytes() -> None:
    problem = Problem("rowwise", (64, 64, 128), device="cpu")
    assert problem.refusal() is None
    wide = torch.empty(64, 144, dtype=E4M3)
    problem.a = wide[:, 16:]
    assert problem.refusal() is None
    problem.a = wide[:, 1:129]
    assert problem.refusal() == "a starts at an address that is no multiple of 16"
    problem = Problem("rowwise", (64, 64, 128), device="cpu")
    problem.b = wide[:, 8:136].mT
    assert problem.refusal() == "b.mT starts at an address that is no multiple of 16"


def test_refuses_vectors_of_scales_that_tma_cannot_address() -> None:
    problem = Problem("wgrad", (64, 66, 256))
    problem.a_scale = meta(64, 2, dtype=FP32)
    assert problem.refusal() == "a_scale has stride 2 along its contiguous axis, not 1"
    problem = Problem("wgrad", (64, 66, 256))
    problem.b_scale = meta(2, 66, dtype=FP32)
    assert problem.refusal() == "b_scale has a stride of 264 bytes, no multiple of 16"


def test_refuses_scales_of_lines_that_do_not_follow_each_other() -> None:
    """The kernel reads `scale[line]`: one scale expanded to all lines, and every second one, go elsewhere."""
    problem = Problem("rowwise", (64, 66, 256))
    problem.a_scale = meta(1, 1, dtype=FP32).expand(64, 1)
    assert problem.refusal() == "a_scale has stride 0 from line to line, not 1"
    problem = Problem("rowwise", (64, 66, 256))
    problem.b_scale = meta(1, 132, dtype=FP32)[:, ::2]
    assert problem.refusal() == "b_scale has stride 2 from line to line, not 1"


def test_refuses_sizes_past_32_bits() -> None:
    assert Problem("tensorwise", (2**31, 1, 16)).refusal() == "a size, or a stride of the scales, is past 32 bits"
    assert Problem("rowwise", (16, 2**31 - 1, 16)).refusal() is not None
    assert Problem("rowwise", (2**31 - 1024, 1, 16)).refusal() is None


def parameters(file: str, entry: str, *, of_blocks: bool = False) -> list[str]:
    """The names of a kernel's parameters, in order, from its source."""
    source = re.sub(r"//.*", "", nvrtc.sources()[file].read_text())
    found = re.search(rf"\b{entry}\((.*?)\)\s*\{{", source, re.DOTALL)
    assert found is not None
    plain = found[1].removesuffix(" GROUP_PARAMETERS")
    blocks = re.search(r"#define BLOCK_PARAMETERS (, .*)", source)
    plain = plain.replace(" SECOND_WEIGHT THIRD_WEIGHT", "")
    plain = plain.replace(" BLOCK_PARAMETERS", blocks[1] if blocks and of_blocks else "")
    return [re.findall(r"\w+", parameter)[-1] for parameter in plain.split(",")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [None, 2])
def test_arguments_are_the_kernels_parameters_in_order(kind: str, batch: int | None) -> None:
    for config in SCALED_MM.values():
        launch = Problem(kind, bias=BF16, a_batch=batch, b_batch=batch).plan(config)
        assert list(launch.args) == parameters("scaled_mm.cu", "scaled_mm")


@pytest.mark.parametrize("kind", OTHER_PAIRS)
def test_arguments_and_shared_memory_of_every_other_pair_of_blocks(kind: str) -> None:
    """Runs of A's blocks have a line for each warpgroup, and steps that other kinds have not."""
    of_blocks = OTHER_PAIRS[kind][0] == (128, 128)
    for config in (SCALED_MM["64x64"], SCALED_MM["128x256"], SCALED_MM["192x128"], SCALED_MM["split"]):
        launch = Problem(kind).plan(config)
        assert list(launch.args) == parameters("scaled_mm.cu", "scaled_mm", of_blocks=of_blocks)
        assert launch.shared == shared_layout(config, dict(launch.kernel.macros))


def shared_layout(config: ScaledMmConfig, macros: dict[str, int | str]) -> int:
    """Bytes up to the end of the last barrier: a mirror of the `AT_...` constants of scaled_mm.cu."""
    stages = int(macros["STAGES"])
    chunk = next(size for size in (128, 64, 32, 16) if config.BN % size == 0)
    a_scale = 4 * config.BM if macros["A_SCALE"] == "VECTOR" else 0
    b_scale = 4 * config.BN if macros["B_SCALE"] == "VECTOR" else 0
    lines = config.BN // chunk if macros["B_SCALE"] == "BLOCK" else 0
    lines += config.MATH if macros["A_SCALE"] == "BLOCK" else 0
    runs = 2 * (lines * 32 * 4 + 16) if lines else 0
    out = config.MATH * int(macros["OUT_CHUNKS"]) * 64 * 128 if macros["OUT_VIA"] != "PAIRS" else 0
    if config.SPLIT > 1:  # sums in place of lines, and their barrier
        out = (config.SPLIT - 1) * (config.BM // config.SPLIT) * config.BN * 4 + 16
    padded = sum(-(-size // 128) * 128 for size in (a_scale, b_scale))
    tiles, numbers = 4 * (32 + 16), 2 * (4 + 16)
    return stages * ((config.BM + config.BN) * BK + padded + 16) + out + runs + tiles + numbers


@every_variant
def test_shared_memory_is_what_the_kernel_lays_out(config: str, kind: str) -> None:
    for out in (BF16, FP32):
        launch = Problem(kind, out=out).plan(SCALED_MM[config])
        macros = dict(launch.kernel.macros)
        assert launch.shared == shared_layout(SCALED_MM[config], macros)
        stage = shared_layout(SCALED_MM[config], {**macros, "STAGES": int(macros["STAGES"]) + 1}) - launch.shared
        assert launch.shared <= SHARED_LIMIT
        assert launch.shared + stage > SHARED_LIMIT or macros["STAGES"] == 12  # as many as fit
        assert int(macros["STAGES"]) >= 2


def test_stages_may_be_given() -> None:
    launch = Problem().plan(ScaledMmConfig(STAGES=3))
    assert dict(launch.kernel.macros)["STAGES"] == 3
    assert launch.options["STAGES"] == 3


def test_grid_has_a_block_a_tile_or_a_multiprocessor() -> None:
    for config in SCALED_MM.values():
        small = Problem(shape=(config.BM * 2 + 1, config.BN + 1, 1000)).plan(config)
        tiles = (4 if config.CLUSTER == 2 and config.SHARE_B else 3) * 2 * config.SPLIT
        assert small.grid == (tiles, 1, 1)
        assert small.threads == 128 * (config.MATH + 1)
        large = Problem(shape=(2**14, 2**14, 128)).plan(config)
        tiles = -(-(2**14) // config.BM) * -(-(2**14) // config.BN)
        assert large.grid == (132 if config.SPLIT == 1 else tiles * config.SPLIT, 1, 1)
    assert Problem(shape=(64, 64, 64), a_batch=7, b_batch=7).plan(ScaledMmConfig()).grid == (7, 1, 1)


def test_grid_of_clusters_is_whole_on_an_odd_number_of_multiprocessors() -> None:
    problem = Problem()
    problem.target = replace(SM90, multiprocessors=113)
    assert problem.plan(SCALED_MM["192x128 cluster"]).grid == (112, 1, 1)
    assert problem.plan(SCALED_MM["192x128"]).grid == (113, 1, 1)


def test_scalars_say_sizes_batches_and_strides() -> None:
    launch = Problem("forward", (70, 130, 300), FP32, a_batch=3).plan(ScaledMmConfig())
    assert launch.args["problem"] == (70, 130, 300, 3)
    assert (launch.args["a_batched"], launch.args["b_batched"], launch.args["out_m"]) == (1, 0, 130)
    assert (launch.args["bs_batch"], launch.args["bs_n"], launch.args["bs_k"]) == (0, 4, 1)
    launch = Problem("rowwise", (70, 130, 300), a_batch=3, b_batch=3).plan(ScaledMmConfig())
    assert (launch.args["a_batched"], launch.args["b_batched"]) == (1, 1)
    assert (launch.args["as_batch"], launch.args["bs_batch"]) == (72, 132)


def test_macros_follow_blocks_types_and_bias() -> None:
    seen = {}
    for kind in KINDS:
        macros = dict(Problem(kind).plan().kernel.macros)
        seen[kind] = (macros["A_SCALE"], macros["B_SCALE"])
    assert seen == {
        "forward": ("VECTOR", "BLOCK"), "wgrad": ("VECTOR", "VECTOR"), "rowwise": ("LINE", "LINE"),
        "tensorwise": ("WHOLE", "WHOLE"),
    }  # fmt: skip
    for dtype, name in ((BF16, "Element::BF16"), (FP16, "Element::FP16"), (FP32, "Element::FP32")):
        macros = dict(Problem(out=dtype, bias=dtype).plan().kernel.macros)
        assert (macros["OUT"], macros["BIAS"]) == (name, name)
    assert dict(Problem().plan().kernel.macros)["BIAS"] == 0


def test_how_a_tile_leaves() -> None:
    def way(shape: tuple[int, int, int], out: torch.dtype, config: ScaledMmConfig | None = None) -> str:
        launch = Problem("forward", shape, out).plan(config)
        found = str(dict(launch.kernel.macros)["OUT_VIA"])
        assert isinstance(launch.args["out"], TensorMap) == (found == "BULK")
        return found

    for rows, staged in ((1000, "BULK"), (100, "LINES"), (1, "LINES")):
        assert way((rows, 128, 128), BF16) == staged
        assert way((rows, 136, 128), FP16) == staged
        assert way((rows, 104, 128), BF16) == staged
        assert way((rows, 132, 128), BF16) == "PAIRS"  # rows of 264 bytes
        assert way((rows, 101, 128), BF16) == "PAIRS"
        assert way((rows, 128, 128), FP32) == "PAIRS"
        assert way((rows, 128, 128), BF16, ScaledMmConfig(BN=96)) == "PAIRS"


def test_a_weight_that_is_read_once_leaves_the_l2_first() -> None:
    def once(m: int, config: ScaledMmConfig, **batches: int) -> bool:
        launch = Problem("forward", (m, 256, 256), **batches).plan(config)
        return bool(dict(launch.kernel.macros)["B_ONCE"])

    assert once(128, ScaledMmConfig(MATH=1))
    assert once(256, ScaledMmConfig())
    assert not once(129, ScaledMmConfig(MATH=1))
    assert not once(257, ScaledMmConfig())
    assert not once(128, ScaledMmConfig(CLUSTER=2))
    assert once(128, ScaledMmConfig(), a_batch=3, b_batch=3)
    assert not once(128, ScaledMmConfig(), a_batch=3)  # b is read for each matrix of the batch


def test_a_padded_output_keeps_its_stride_and_its_padding() -> None:
    problem = Problem(shape=(1000, 104, 128))
    problem.out = torch.empty_strided((1000, 104), (112, 1), dtype=BF16, device="meta")
    launch = problem.plan()
    assert isinstance(launch.args["out"], TensorMap)
    assert launch.args["out"].tensor.stride() == (112000, 112, 1)
    few = Problem(shape=(100, 104, 128))
    few.out = problem.out[:100]
    assert few.plan().args["out"] is few.out
    assert few.plan().args["out_m"] == 112
    ragged = Problem(shape=(100, 101, 128))
    ragged.out = torch.empty_strided((100, 101), (104, 1), dtype=BF16, device="meta")
    assert ragged.plan().args["out"] is ragged.out  # TMA would write columns 101 to 103


def maps(launch: CudaLaunch) -> dict[str, TensorMap]:
    return {name: arg for name, arg in launch.args.items() if isinstance(arg, TensorMap)}


def assert_encodable(launch: CudaLaunch) -> None:
    """Asserts cuTensorMapEncodeTiled's conditions on its arguments (CUDA driver API, Tensor Map Object Management)."""
    for name, map_ in maps(launch).items():
        size = map_.tensor.element_size()
        assert map_.tensor.dim() == len(map_.box) == 3, name
        assert all(1 <= extent <= 256 for extent in map_.box), name
        assert map_.box[-1] * size % 16 == 0, name
        if map_.swizzle:
            assert map_.box[-1] * size == map_.swizzle, name
        assert map_.tensor.stride(-1) == 1 or map_.tensor.shape[-1] == 1, name
        assert all(0 < stride * size < 2**40 and stride * size % 16 == 0 for stride in map_.tensor.stride()[:-1]), name
        assert all(1 <= extent <= 2**32 for extent in map_.tensor.shape), name


@every_variant
def test_descriptors_keep_the_drivers_rules(config: str, kind: str) -> None:
    for shape in ((1, 1, 1), (1, 17, 129), (193, 65, 127), (64, 64, 128), (7, 1, 385), (300, 264, 1000)):
        for a_batch, b_batch in ((None, None), (3, 3), (3, None), (None, 3), (1, 1)):
            for out in (BF16, FP32):
                assert_encodable(Problem(kind, shape, out, a_batch=a_batch, b_batch=b_batch).plan(SCALED_MM[config]))


def test_strides_of_axes_of_size_1_do_not_reach_a_descriptor() -> None:
    """Contiguous operands of one row have strides of K, which need not be a multiple of 16 bytes."""
    problem = Problem("wgrad", (1, 1, 129), a_batch=1, b_batch=1)
    problem.a, problem.b = meta(1, 1, 129, dtype=E4M3), meta(1, 1, 129, dtype=E4M3).mT
    problem.a_scale, problem.b_scale = meta(1, 2, 1, dtype=FP32).mT, meta(1, 2, 1, dtype=FP32)
    if problem.refusal() is None:
        assert_encodable(problem.plan())
    problem = Problem("rowwise", (1, 3, 129), a_batch=1, b_batch=1)
    problem.a = torch.empty_strided((1, 1, 129), (7, 5, 1), dtype=E4M3, device="meta")
    assert problem.refusal() is None
    assert_encodable(problem.plan())


@every_variant
def test_boxes_are_the_bytes_that_a_stage_expects(config: str, kind: str) -> None:
    """Each block of a cluster loads its part of the shared operand, and gets the other's."""
    chosen = SCALED_MM[config]
    boxes = {name: map_.box for name, map_ in maps(Problem(kind).plan(chosen)).items()}
    shares_a, shares_b = (chosen.CLUSTER if share == chosen.SHARE_B else 1 for share in (False, True))
    assert boxes["a"] == (1, chosen.BM // shares_a, BK)
    assert boxes["b"] == (1, chosen.BN // shares_b, BK)
    assert boxes.get("a_scale") == ((1, 1, chosen.BM) if kind in ("forward", "wgrad") else None)
    assert boxes.get("b_scale") == ((1, 1, chosen.BN) if kind == "wgrad" else None)
    assert boxes.get("out") == ((1, 64, 64) if chosen.SPLIT == 1 else None)


def test_descriptors_are_of_the_transposed_b_and_the_transposed_scales() -> None:
    launch = Problem("wgrad", (70, 130, 300)).plan()
    shapes = {name: tuple(map_.tensor.shape) for name, map_ in maps(launch).items()}
    assert shapes == {"a": (1, 70, 300), "b": (1, 130, 300), "a_scale": (1, 3, 70), "b_scale": (1, 3, 130)}
    assert maps(launch)["a"].swizzle == maps(launch)["b"].swizzle == 128
    assert maps(launch)["a_scale"].swizzle == 0


def test_description_names_the_tile_and_the_grid() -> None:
    assert Problem().plan(SCALED_MM["192x128"]).describe() == (
        "scaled_mm[BM=192,BN=128,STAGES=4,CLUSTER=1,SPLIT=1] grid=132x1x1 sm90"
    )
    assert "SPLIT=4" in Problem().plan(SCALED_MM["split"]).describe()
    assert "SPLIT=1,GROUP=5]" in Problem().plan(replace(SCALED_MM["192x128"], GROUP=5)).describe()
    assert "SPLIT=1,DEPTH=0]" in Problem("rowwise").plan(SCALED_MM["192x128 depth 0"]).describe()
    described = [str(config) for config in SCALED_MM.values()]
    assert len(set(described)) == len(described)
    assert str(SCALED_MM["128x256 cluster"]) == "128x256/1x2 depth1 cluster2B group8"


def walk(m: int, n: int, k: int, batches: int, config: ScaledMmConfig, programs: int) -> list[tuple[int, ...]]:
    """`(m, n, batch, rank, k_start, k_stop)` of each block's tiles, `rank` in a cluster that shares K: mirrors
    `Tile` and `Walk` in tiles.cuh.
    """
    pair_m, pair_n = (config.CLUSTER, 1) if config.SHARE_B else (1, config.CLUSTER)
    tiles_m, tiles_n = -(-m // (config.BM * pair_m)), -(-n // (config.BN * pair_n))
    visited: list[tuple[int, ...]] = []
    together = config.CLUSTER * config.SPLIT
    for block in range(programs):
        rank = block % together
        for index in range(block // together, tiles_m * tiles_n * batches, programs // together):
            batch, within = divmod(index, tiles_m * tiles_n)
            heights = _bands(tiles_m, config.GROUP)
            while within >= heights[0] * tiles_n:
                within -= heights.pop(0) * tiles_n
            tile_m, tile_n = tiles_m - sum(heights) + within % heights[0], within // heights[0]
            if config.CLUSTER == 1 and m <= 2 * config.BM:  # B_ONCE
                tile_m, tile_n = index % (tiles_m * tiles_n) & tiles_m - 1, index % (tiles_m * tiles_n) >> tiles_m - 1
            if config.CLUSTER > 1:
                tile_m, tile_n = (
                    (tile_m * config.CLUSTER + rank, tile_n)
                    if config.SHARE_B
                    else (tile_m, tile_n * config.CLUSTER + rank)
                )
            blocks = -(-k // BK)
            part = rank if config.SPLIT > 1 else 0
            start, stop = blocks * part // config.SPLIT, blocks * (part + 1) // config.SPLIT
            visited.append((tile_m * config.BM, tile_n * config.BN, batch, part, start, stop))
    return visited


def _bands(tiles_m: int, group: int) -> list[int]:
    """The rows of tiles in each band: as many bands as come nearest to `group` rows, the higher ones first."""
    bands = max(1, (tiles_m + group // 2) // group)
    return [len(range(band, tiles_m, bands)) for band in range(bands)]


def test_bands_are_as_high_as_each_other() -> None:
    assert _bands(11, 8) == [11]
    assert _bands(86, 8) == [8] * 9 + [7] * 2
    assert _bands(11, 3) == [3, 3, 3, 2]


def test_the_walk_is_the_one_of_the_source() -> None:
    """`walk` mirrors these lines, so that a change of the source asks for a change of the mirror."""
    source = "".join(nvrtc.sources()[name].read_text() for name in ("tiles.cuh", "deal.cuh", "scaled_mm.cu"))
    for line in (
        "batch = B_ONCE && problem.batches == 1 ? 0 : index / (tiles_m * tiles_n);",
        "m = index & tiles_m - 1;",
        "n = index >> tiles_m - 1;",
        "const int bands = max(1, (tiles_m + GROUP / 2) / GROUP);",
        "const int low = tiles_m / bands, higher = tiles_m % bands * (low + 1);",
        "const bool high = index < higher * tiles_n;",
        "const int height = low + high, before = high ? 0 : higher;",
        "index -= before * tiles_n;",
        "m = before + index / (height * tiles_n) * height;",
        "index %= height * tiles_n;",
        "m += index % height;",
        "n = index / height;",
        "m = SHARE_B ? m * CLUSTER + cluster_rank() : m;",
        "n = SHARE_B ? n : n * CLUSTER + cluster_rank();",
        "const int part = SPLIT > 1 ? cluster_rank() : 0;",
        "tile.k_start = blocks * part / SPLIT;",
        "tile.k_stop = blocks * (part + 1) / SPLIT;",
        "static INLINE int own() { return blockIdx.x / (CLUSTER * SPLIT); }",
        "static INLINE int step() { return gridDim.x / (CLUSTER * SPLIT); }",
    ):
        assert line in source, line


def test_every_tile_and_share_of_k_is_visited_exactly_once() -> None:
    random = Random(0)
    configs = [
        *SCALED_MM.values(),
        ScaledMmConfig(MATH=3, CLUSTER=2, SHARE_B=False, GROUP=4),
        ScaledMmConfig(GROUP=1, SPLIT=2),
        ScaledMmConfig(BN=64, GROUP=16, CLUSTER=2),
        ScaledMmConfig(MATH=1, BN=64, GROUP=3, CLUSTER=2, SHARE_B=False),
    ]
    for _ in range(400):
        config = random.choice(configs)
        m, n = random.choice((1, 64, 65, random.randint(1, 3000))), random.randint(1, 3000)
        k, batch = random.randint(1, 3000), random.choice((None, None, 1, 2, 5))
        problem = Problem("tensorwise", (m, n, k), a_batch=batch)
        problem.target = replace(SM90, multiprocessors=random.choice((132, 114, 7, 2)))
        visited = walk(m, n, k, batch or 1, config, problem.plan(config).grid[0])
        inside = Counter(tile for tile in visited if tile[0] < m and tile[1] < n)
        assert set(inside.values()) == {1}
        assert {tile[:4] for tile in inside} == set(
            itertools.product(range(0, m, config.BM), range(0, n, config.BN), range(batch or 1), range(config.SPLIT))
        )
        spans = {part: (start, stop) for _, _, _, part, start, stop in visited}
        assert {(tile[3], tile[4:]) for tile in visited} == set(spans.items())
        # Every k-block is in one share, in order.
        assert [i for part in range(config.SPLIT) for i in range(*spans[part])] == list(range(-(-k // BK)))


@cache
def bad_kernel() -> CudaKernel:
    return CudaKernel("row_rstd.cu", "row_rstd", (("INPUT", "0 +"),))


def test_scales_of_columns_cannot_be_folded_over_two_k_blocks() -> None:
    """In the tensor core's sum all columns of a tile would have to keep their scales, see docs/tuning.md."""
    x = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(0))
    scale = fp8fn.quantize(x, (BK, 1), scale="pow2").scale
    same = scale[0::2] == scale[1::2]
    assert same.shape == (16, 2048)
    assert same.float().mean().item() == pytest.approx(0.89, abs=0.01)
    assert not same.view(16, -1, 128).all(2).any()


@needs_nvrtc
def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(nvrtc.CompilationError, match=r"does not compile row_rstd\.cu(?s:.*)error"):
        compile_kernel(bad_kernel(), SM90.cubin, verbose=True)
