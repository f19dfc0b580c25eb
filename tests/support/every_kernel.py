"""Every CUDA kernel in each of its main forms, at small shapes that fill its rings more than once, for a sanitizer.

    compute-sanitizer --tool memcheck python tests/support/every_kernel.py [substring ...]
    compute-sanitizer --tool racecheck --racecheck-report all python tests/support/every_kernel.py [substring ...]

On a Hopper GPU each launch, or each whose name has one of the substrings in it, runs three times on random operands;
then a line for each kernel file says how many launches ran. What they compute `tests/kernels/test_generated.py`
compares with what `CUDA` expects: the declaration of each kernel for its generated tests.

PyTorch's cache rounds tensors up to 512 bytes. Where each is an allocation of its own
(`PYTORCH_NO_CUDA_MEMORY_CACHING=1`) memcheck also reports loads of 16 aligned bytes, or of four scales, that begin in a
tensor and end past it: they stay in its page, and what lies there goes into no result.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

if __name__ == "__main__":  # a script has its own folder on the path, and not the one above
    sys.path[0] = str(Path(__file__).parent.parent)


from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, gemv_mx, mm_a16w8, mx_tiles, parts_a16w8, splitk_a16w8
from fp8fn.ops.cuda.gemm import scaled_mm as dense
from fp8fn.ops.cuda.gemm.scaled_mm import BK, KINDS, ScaledMmConfig
from fp8fn.ops.cuda.operands import PARTS, SCALES
from fp8fn.ops.cuda.quantize import (
    quantize,
    quantize_rows,
    quantize_whole,
    rms_norm,
    silu_mul,
    stream_columns,
    turn,
    walk_columns,
)
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize.quantize import BLOCK_SHAPES
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block, matrix_strides
from fp8fn.ops.operands import (
    PLAIN,
    RMS_NORM,
    SILU_MUL,
    SILU_MUL_GRAD,
    Beside,
    Quantization,
    Quantized,
    RoutedProduct,
    Routing,
    ScaledProduct,
    Source,
    WeightProduct,
)
from fp8fn.ops.quantize_silu_mul import (
    quantize_silu_mul_backward_reference,
    quantize_silu_mul_saved_reference,
)
from fp8fn.ops.silu_mul import BACKWARD_OUTPUTS, SAVED_BLOCK, SAVED_OUTPUTS, SavedSiluMul, SiluMulBackward
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import SM90, Target, target_of
from fp8fn.ops.tuning.model import SMALLEST, X, pairs, runs, tiles
from fp8fn.ops.tuning.problem import Problem
from support import kernel_info
from support.configs import (
    COLUMN_TILES,
    GATED,
    GEMVS,
    MANY,
    MX_GEMVS,
    MX_TILES,
    ROW_MAJOR,
    SPLITS,
    STREAMS,
    WALKS,
    WEIGHT_TILES,
)
from support.kernel_info import Expected, Form, Forms, KernelInfo, Operands, Place, dequantized
from support.operands.groups import GROUPS, ends, spans
from support.quantizers import quantization

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
RUNS: Final = 3
ROW, COLUMN, SQUARE = BLOCK_SHAPES
FORWARD, WGRAD = KINDS[:2]
# Pairs of which one operand has scales for all of K, and the other for 128 of K; or one of them one scale.
OTHER_KINDS: Final = tuple(
    kinds
    for kinds in product(("VECTOR", "BLOCK", "LINE", "WHOLE"), repeat=2)
    if kinds not in (*KINDS, ("BLOCK", "BLOCK"), ("BLOCK", "VECTOR"))
)
WEIGHT_BLOCKS: Final = tuple(SCALES)
META: Final = Place(torch.device("meta"))

Launches: TypeAlias = Iterator[tuple[str, CudaLaunch]]


def launches(device: torch.device | str, target: Target) -> Launches:
    """Names, and launches on operands of `device`; on `meta` they only compile."""
    for info in CUDA:
        found: set[CudaKernel] = set()
        for form in info.forms(Place(torch.device(device), framed=False), target):
            *before, last = form.launches
            for launch in before:  # many forms may have the same one
                if launch.kernel not in found:
                    found.add(launch.kernel)
                    yield f"{launch.kernel.file} {form.name}", launch
            yield f"{last.kernel.file} {form.name}", last


# ---- products of two FP8 operands -----------------------------------------------------------------------------------


def _few(target: Target) -> Target:
    """So few multiprocessors that a persistent block has tile after tile."""
    return replace(target, multiprocessors=2)


def _scaled_mm(place: Place, target: Target) -> Forms:
    yield from _dense(place, _few(target))
    yield from _grouped(place, _few(target))


def _dense(place: Place, target: Target) -> Forms:
    def form(
        kinds: tuple[str, str],
        shape: str,
        config: ScaledMmConfig,
        out: str = "bfloat16",
        *,
        bias: bool = False,
        batch: int = 1,
    ) -> Form:
        # Their outputs leave by bulk stores, by pairs and by lines.
        m, n = {
            "even": (3 * config.BM, 2 * config.BN), "ragged": (config.BM + 9, config.BN + 13),
            "low": (config.BM, 2 * config.BN),
        }[shape]  # fmt: skip
        made = partial(
            _scaled_product, m, n, target, blocks=Problem(1, 1, 1, *kinds).blocks, batch=batch, out=out, bias=bias
        )
        stages = int(dense.plan(made(META, BK)[1], config)[0].options["STAGES"])
        operands, given = made(place, 2 * stages * config.SPLIT * BK + (24 if shape == "ragged" else 0))
        name = f"{'x'.join(kinds)} {config} {shape} {out}{' bias' * bias}{f' batch{batch}' * (batch > 1)}"
        return Form(name, dense.plan(given, config), operands)

    for kinds in KINDS:
        problem = Problem(1, 1, 1, *kinds)
        free = (config for config in (replace(X, TURNS=False),) if runs(problem, config))
        for config, shape in product((*tiles(problem), *pairs(problem), *free), ("even", "ragged")):
            yield form(kinds, shape, config)
    for kinds, shape in ((KINDS[2], "ragged"), (KINDS[3], "even")):
        for config in tiles(Problem(1, 1, 1, *kinds, fast=True)):
            yield form(kinds, shape, config)
    for kinds in (("BLOCK", "BLOCK"), ("BLOCK", "VECTOR")):
        for config, shape in zip(tiles(Problem(1, 1, 1, *kinds)), cycle(("ragged", "even")), strict=False):
            yield form(kinds, shape, config)
    for kinds, config in zip(OTHER_KINDS, cycle((X, SMALLEST)), strict=False):
        yield form(kinds, "ragged", config)
    yield form(("BLOCK", "BLOCK"), "even", ScaledMmConfig(SPLIT=2))
    yield form(("BLOCK", "BLOCK"), "even", ScaledMmConfig(), "float16", batch=2)
    yield form(FORWARD, "low", X, bias=True)
    yield form(FORWARD, "even", ScaledMmConfig(), "float16", batch=2)
    yield form(WGRAD, "ragged", X, "float32", bias=True)
    yield form(FORWARD, "low", ScaledMmConfig(SPLIT=2))
    yield form(FORWARD, "ragged", replace(SMALLEST, SPLIT=4))
    for config in (replace(X, CLUSTER=2), ScaledMmConfig(CLUSTER=2, SHARE_B=False)):
        yield form(FORWARD, "even", config)
        yield form(KINDS[2], "ragged", config)


def _scaled_product(
    m: int, n: int, target: Target, place: Place, k: int, *, blocks: tuple[Block, Block], batch: int, out: str,
    bias: bool,
) -> tuple[Operands, ScaledProduct]:  # fmt: skip
    operands, lead = Operands(place), (batch,) * (batch > 1)
    a = operands.quantized("a", (*lead, m, k), blocks[0], column_major=False)
    b = operands.quantized("b", (*lead, k, n), blocks[1], column_major=True)
    added = operands.input("bias", (n,), FP32) if bias else None
    into = operands.output("out", (*lead, m, n), getattr(torch, out))
    operands.expected = lambda: {"out": kernel_info.product(dequantized(a), dequantized(b), added)}
    return operands, ScaledProduct(a=a, b=b, out=into, bias=added, target=target)


def _grouped(place: Place, target: Target) -> Forms:
    sizes, rest = GROUPS["odd"]
    n, k, tokens, experts = 136, 24 * BK + 24, sum(sizes) + rest, len(sizes)  # no ring has more than 12 stages
    for kinds, config, bias in zip(KINDS, cycle((X, SMALLEST)), (True, False, False, True), strict=False):
        blocks, operands = Problem(1, 1, 1, *kinds).blocks, Operands(place)
        offsets = operands.input("offsets", (experts,), torch.int32, values=ends(sizes))
        a = operands.quantized("a", (tokens, k), blocks[0], column_major=False)
        b = operands.quantized("b", (experts, k, n), blocks[1], column_major=True)
        added = operands.input("bias", (experts, n), BF16) if bias else None
        out = operands.output("out", (tokens, n), BF16)
        given = ScaledProduct(a=a, b=b, out=out, bias=added, offsets=offsets, target=target)
        operands.expected = partial(kernel_info.grouped_product, given)
        yield Form(f"JAGGED_M {'x'.join(kinds)} {config}", dense.plan(given, config), operands)
    for kinds, config, zeros in zip(KINDS, (SMALLEST, X) * 2, (True, False) * 2, strict=True):
        blocks, operands = Problem(1, 1, 1, *kinds).blocks, Operands(place)
        counts = operands.input("counts", (experts,), torch.int32, values=torch.tensor(sizes, dtype=torch.int32))
        a = operands.quantized("a", (experts, max(sizes) + rest, k), blocks[0], column_major=False)
        b = operands.quantized("b", (experts, k, n), blocks[1], column_major=True)
        added = operands.input("bias", (experts, n), BF16) if zeros else None
        out = operands.output("out", (experts, max(sizes) + rest, n), BF16)
        given = ScaledProduct(a=a, b=b, out=out, bias=added, counts=counts, zeros=zeros, target=target)
        operands.expected = partial(kernel_info.counted_product, given, config.BM)
        unwritten = "" if zeros else " unwritten"
        yield Form(f"MASKED{unwritten} {'x'.join(kinds)} {config}", dense.plan(given, config), operands)
    m, n = 200, 136
    summed = {"": (COLUMN, COLUMN), " squares of a": (SQUARE, COLUMN), " squares of b": (COLUMN, SQUARE)}
    for (sizes, rest), (name, blocks), config in product(
        (GROUPS["units"], GROUPS["large gaps"]), summed.items(), (X, SMALLEST)
    ):
        if (name, config) == (" squares of a", X):  # it spills, and is never chosen
            continue
        operands = Operands(place)
        offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
        a, b = (
            kernel_info.spread(operands, side, sum(sizes) + rest, width, ends(sizes), block)
            for side, width, block in zip("ab", (m, n), blocks, strict=True)
        )
        out = operands.output("out", (len(sizes), m, n), BF16)
        given = ScaledProduct(a=a.mT, b=b, out=out, offsets=offsets, target=target)
        operands.expected = partial(kernel_info.grouped_product, given)
        (launch,) = dense.plan(given, config)
        unit = dict(launch.kernel.macros)["SPREAD_UNIT"]
        yield Form(f"JAGGED_K unit{unit}{name} {config}", (launch,), operands)


# ---- 16-bit rows by an FP8 weight -----------------------------------------------------------------------------------


def _rows_by_weight(
    m: int, n: int, k: int, block: Block, place: Place, *, dtype: torch.dtype = BF16, column_major: bool = True,
    target: Target = SM90,
) -> tuple[Operands, WeightProduct]:  # fmt: skip
    operands = Operands(place)
    x = operands.input("x", (m, k), dtype)
    w = operands.quantized("w", (k, n), block, column_major=column_major)
    bias = operands.input("bias", (n,), FP32)
    out = operands.output("out", (m, n), dtype)
    operands.expected = lambda: {"out": kernel_info.product(x, dequantized(w), bias)}
    return operands, WeightProduct(x=x, w=w, bias=bias, out=out, target=target)


def _gated_rows_by_weight(m: int, n: int, k: int, place: Place, dtype: torch.dtype) -> tuple[Operands, WeightProduct]:
    """Rows `silu(gate) * up` with gates from 2 to 4, so that a row's largest value is not far from the others."""
    operands = Operands(place)
    gates = None if place.device.type == "meta" else 2 + 2 * torch.rand(m, k).to(dtype)
    gate, up = operands.input("gate", (m, k), dtype, values=gates), operands.input("up", (m, k), dtype)
    w = operands.quantized("w", (k, n), (128, 128), column_major=True)
    out = operands.output("out", (m, n), dtype)
    operands.expected = lambda: {"out": kernel_info.product(reference.silu_mul(gate, up).to(dtype), dequantized(w))}
    return operands, WeightProduct(x=gate, up=up, w=w, out=out, target=SM90)


def _sibling_products(
    m: int, widths: tuple[int, ...], k: int, place: Place, dtype: torch.dtype, block: Block = (128, 128)
) -> tuple[Operands, WeightProduct]:
    """Products of one `x` by weights of `widths` columns."""
    operands = Operands(place)
    x = operands.input("x", (m, k), dtype)
    made = {}
    for name, n in zip(("", "_second", "_third"), widths, strict=False):
        w = operands.quantized(f"w{name}", (k, n), block, column_major=True)
        bias = operands.input(f"bias{name}", (n,), torch.float32)
        made[f"out{name}"] = Beside(w, bias, operands.output(f"out{name}", (m, n), dtype))
    operands.expected = lambda: {
        name: kernel_info.product(x, dequantized(each.w), each.bias) for name, each in made.items()
    }
    first, *beside = made.values()
    product = WeightProduct(x=x, w=first.w, bias=first.bias, out=first.out, beside=tuple(beside), target=SM90)
    return operands, product


def _gated_product(
    m: int, n: int, k: int, block: Block, place: Place, target: Target, dtype: torch.dtype
) -> tuple[Operands, WeightProduct]:
    """Integers times powers of two, whose sums are exact: gate and up are rounded alike in every order of the sums."""
    operands, meta = Operands(place), place.device.type == "meta"
    x = operands.input("x", (m, k), dtype, values=None if meta else torch.randint(-2, 3, (m, k)).to(dtype))
    weights = []
    for name in ("w", "w_up"):
        w = operands.quantized(name, (k, n), block, column_major=True)
        if not meta:
            w.data.copy_(torch.randint(-4, 5, (k, n)).to(E4M3))
            w.scale.copy_(torch.exp2(torch.randint(-7, -4, w.scale.shape).float()))
        weights.append(w)
    out = operands.output("out", (m, n), dtype)

    def expected() -> dict[str, Expected]:
        gate, up = ((x.double() @ dequantized(w)).to(dtype) for w in weights)
        rows = reference.silu_mul(gate, up).double()
        return {"out": Expected(rows, rows.abs().nan_to_num(0.0, 0.0, 0.0))}

    operands.expected = expected
    return operands, WeightProduct(x=x, w=weights[0], w_up=weights[1], out=out, target=target)


def _gemv_a16w8(place: Place, target: Target) -> Forms:
    """K in chunks of x, of which a block has two and more."""
    configs = (*((config, True) for config in GEMVS[::2]), *((config, False) for config in ROW_MAJOR))
    for (config, lines), block in zip(configs, cycle(WEIGHT_BLOCKS), strict=False):
        m, n = config.ROWS + 3, 33
        made = partial(_rows_by_weight, column_major=lines, target=target)
        (launch,) = gemv_a16w8.plan(made(m, n, 1 << 20, block, META)[1], config)
        k = 2 * int(launch.options["K_CHUNK"]) * config.CLUSTER + 24
        operands, given = made(m, n, k, block, place)
        yield Form(f"K{'' if lines else ' not'} contiguous {config}", gemv_a16w8.plan(given, config), operands)


def _a16w8_tiles(place: Place, target: Target) -> Forms:
    rows = {8: cycle((1, 8)), 16: cycle((16, 13))}
    made = partial(_rows_by_weight, target=target)
    for config, constant in zip(WEIGHT_TILES, cycle((False, True, True)), strict=False):
        m = next(rows[config.ROWS])
        operands, given = made(m, 200, 2 * config.STAGES * config.CLUSTER * BK, WEIGHT_BLOCKS[0], place)
        name = f"M{m}{' constant' * constant} {config}"
        yield Form(name, a16w8_tiles.plan(replace(given, constant=constant), config), operands)
    for config, (constant, dtype) in zip(WEIGHT_TILES[:4], product((False, True), (BF16, FP16)), strict=True):
        operands, given = _gated_rows_by_weight(min(config.ROWS, 8), 200, 2 * config.CLUSTER * BK + 16, place, dtype)
        launches = a16w8_tiles.plan(replace(given, constant=constant, target=target), config)
        yield Form(f"gated{' constant' * constant} {config}", launches, operands)
        widths = (130, 3, 200) if constant else (70, 130)
        operands, given = _sibling_products(config.ROWS, widths, 2 * config.CLUSTER * BK + 16, place, dtype)
        launches = a16w8_tiles.plan(replace(given, constant=constant, target=target), config)
        yield Form(f"siblings{' constant' * constant} {config}", launches, operands)
    for (constant, m), divisions in a16w8_tiles.divisions().items():
        if not constant:
            continue
        of_others = set()
        configs = dict.fromkeys(division.config for division in divisions)
        for (config, cluster), dtype in zip(product(configs, (2, 1)), cycle((FP16, BF16, BF16, FP16)), strict=False):
            # Configurations without stages hold a block's part as a whole, which zeros follow here.
            stages, beyond = config.STAGES or config.HELD, 0 if config.STAGES else 48
            count = config.HELD - (dtype == FP16 and m == 16 and config.HELD > 3)
            config = replace(config, CLUSTER=cluster, STAGES=stages, HELD=count, READY=min(config.READY, count))
            k = cluster * stages * BK - beyond
            operands, given = made(m, 200, k, WEIGHT_BLOCKS[1], place, dtype=dtype)
            launches = a16w8_tiles.plan(replace(given, constant=True), config)
            yield Form(f"M{m} K{k} constant {config}", launches, operands)
            if m <= 8:
                operands, given = _gated_rows_by_weight(m, 200, k, place, dtype)
                launches = a16w8_tiles.plan(replace(given, constant=True, target=target), config)
                yield Form(f"gated M{m} K{k} constant {config}", launches, operands)
                operands, given = made(m, 200, k, WEIGHT_BLOCKS[1], place, dtype=dtype)
            config = replace(config, READY=0)
            if config not in of_others:
                yield Form(f"M{m} K{k} {config}", a16w8_tiles.plan(given, config), operands)
            of_others.add(config)


def _mm_a16w8(place: Place, target: Target) -> Forms:
    first, made = WEIGHT_BLOCKS[0], partial(_rows_by_weight, target=_few(target))
    for config, block in zip(MANY[::3], cycle(WEIGHT_BLOCKS), strict=False):
        k = 2 * config.STAGES * config.K_PARTS * BK + 16
        operands, given = made(2 * config.BM + 9, 2 * config.BN + 8, k, block, place)
        if config.BM >= 256 and SCALES[block] == "BLOCK":
            operands.expected = partial(_of_rounded_weight, given)
        yield Form(f"{config}", mm_a16w8.plan(given, config), operands)
    tall, odd, low = ((160, 2, 2), (160, 1, 3), (64, 1, 4))  # of 10, 5 and 2 parts of the output
    for sizes, dtype in product((tall, odd, low), (BF16, FP16)):
        config = mm_a16w8.ManyRowsConfig(*sizes, TURNS=True)
        k = 33 * BK + 16  # scales of 128 columns are loaded anew on the way
        operands, given = made(config.BM + 9, config.BN + 8, k, first, place, dtype=dtype)
        if config.BM >= 256 and dtype == BF16:
            operands.expected = partial(_of_rounded_weight, given)
        yield Form(f"long {dtype} {config}", mm_a16w8.plan(given, config), operands)
    for config in (
        mm_a16w8.ManyRowsConfig(128, 1, 1, MATH=1, RESIDENT=4),
        mm_a16w8.ManyRowsConfig(64, 1, 3, K_PARTS=2, RESIDENT=1),
    ):
        operands, given = made(config.BM + 9, config.BN + 8, config.STAGES * BK, first, place)
        for constant in (False, True):
            name = f"{'constant ' * constant}{config} all of K in flight"
            yield Form(name, mm_a16w8.plan(replace(given, constant=constant), config), operands)
    for config in (
        mm_a16w8.ManyRowsConfig(32, 1, 4, K_PARTS=2, RESIDENT=2),
        mm_a16w8.ManyRowsConfig(32, 1, 2, RESIDENT=2),
    ):
        for k in (config.STAGES * BK, 2 * config.STAGES * BK + 144):
            operands, given = made(config.BM + 9, config.BN + 8, k, first, place)
            launches = mm_a16w8.plan(replace(given, constant=True), config)
            yield Form(f"constant K{k} {config}", launches, operands)
    for (config, dtype), block in zip(product(GATED, (BF16, FP16)), cycle(WEIGHT_BLOCKS), strict=False):
        m, n, k = 2 * config.BM + 9, 2 * config.BN + 8, 2 * config.STAGES * BK + 16
        operands, given = _gated_product(m, n, k, block, place, _few(target), dtype)
        yield Form(f"gated {dtype} {config}", mm_a16w8.plan(given, config), operands)


def _of_rounded_weight(given: WeightProduct) -> dict[str, Expected]:
    """Tiles of more than 128 rows of bfloat16 round the weight, scaled, to it."""
    return {"out": kernel_info.product(given.x, dequantized(given.w).to(BF16), given.bias)}


def _splitk_a16w8(place: Place, target: Target) -> Forms:
    for config, block in zip(SPLITS, cycle(WEIGHT_BLOCKS), strict=False):
        stages = config.STAGES if config.HELD else 2 * config.STAGES + 1
        k = stages * config.CLUSTER * BK + (-112 if config.HELD else 16)
        operands, given = _rows_by_weight(config.ROWS + 9, config.BN + 6, k, block, place, target=target)
        for constant in (False, True):
            launches = splitk_a16w8.plan(replace(given, constant=constant), config)
            yield Form(f"{'constant ' * constant}{config}", launches, operands)


def _parts_a16w8(place: Place, target: Target) -> Forms:
    configs = [replace(tile, SPLIT=split) for tile in parts_a16w8.TILES for split in (1, 2)]
    given_types, rows = cycle((BF16, FP16, BF16)), cycle((-7, 9))
    for config, block, dtype in zip(configs, cycle(WEIGHT_BLOCKS), given_types, strict=False):
        dtype = dtype if parts_a16w8.fits(config, PARTS[dtype]) else BF16
        if config.SPLIT > 1 and not parts_a16w8.shares_k(config):
            continue
        m, k = config.BM + next(rows), 24 * config.SPLIT * BK + 24  # no ring has more than 12 stages
        operands, given = _rows_by_weight(m, 2 * config.BN + 6, k, block, place, target=_few(target), dtype=dtype)
        yield Form(f"M{m} {dtype} {config}", parts_a16w8.plan(given, config), operands)
    for config, block, widths in zip(
        configs[1:8:2], cycle(WEIGHT_BLOCKS), cycle(((130, 3, 200), (136, 64))), strict=False
    ):
        operands, given = _sibling_products(config.BM + 9, widths, 24 * config.SPLIT * BK + 24, place, BF16, block)
        given = replace(given, target=_few(target))
        yield Form(f"siblings {config}", parts_a16w8.plan(given, config), operands)
    for tile, block, dtype in zip(parts_a16w8.TILES, cycle(WEIGHT_BLOCKS), cycle((BF16, BF16, FP16)), strict=False):
        dtype = dtype if parts_a16w8.fits(tile, PARTS[dtype]) else BF16
        if tile.BM < 256:
            operands, given = _groups_by_weights(tile.BN + 6, 24 * BK + 24, place, dtype, block)
            given = replace(given, target=_few(target))
            yield Form(f"groups {dtype} {tile}", parts_a16w8.plan(given, tile), operands)


def _groups_by_weights(
    n: int, k: int, place: Place, dtype: torch.dtype, block: Block
) -> tuple[Operands, WeightProduct]:
    sizes, rest = GROUPS["odd"]
    operands, tokens = Operands(place), sum(sizes) + rest
    offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
    x = operands.input("x", (tokens, k), dtype)
    w = operands.quantized("w", (len(sizes), k, n), block, column_major=True)
    bias, out = operands.input("bias", (len(sizes), n), BF16), operands.output("out", (tokens, n), dtype)
    given = WeightProduct(x=x, w=w, bias=bias, out=out, offsets=offsets, target=SM90)
    operands.expected = partial(_of_groups, given)
    return operands, given


def _of_groups(given: WeightProduct) -> dict[str, Expected]:
    """Each group by its weight, and zeros where no group is."""
    rows, bias, w = spans(given.group_ends), given.bias, dequantized(given.w)
    assert bias is not None
    each = [kernel_info.product(given.x[start:stop], w[group], bias[group]) for group, (start, stop) in enumerate(rows)]
    zeros = torch.zeros(given.m - rows[-1][1], given.n, dtype=torch.float64, device=given.x.device)
    return {
        "out": Expected(torch.cat([*(e.value for e in each), zeros]), torch.cat([*(e.magnitude for e in each), zeros]))
    }


# ---- MX -------------------------------------------------------------------------------------------------------------


def _mx(m: int, n: int, k: int, place: Place, target: Target) -> tuple[Operands, ScaledProduct]:
    operands = Operands(place)
    a = operands.quantized("a", (m, k), (1, 32), column_major=False, scale="e8m0")
    b = operands.quantized("b", (k, n), (32, 1), column_major=True, scale="e8m0")
    out = operands.output("out", (m, n), BF16)
    operands.expected = lambda: {"out": kernel_info.product(dequantized(a), dequantized(b))}
    return operands, ScaledProduct(a=a, b=b, out=out, target=target)


def _gemv_mx(place: Place, target: Target) -> Forms:
    for config in MX_GEMVS[::3]:
        m, n = config.ROWS + 3, 33
        (launch,) = gemv_mx.plan(_mx(m, n, 1 << 20, META, target)[1], config)
        k = 2 * int(launch.options["K_CHUNK"]) * config.CLUSTER + 24
        operands, given = _mx(m, n, k, place, target)
        yield Form(f"dense {config}", gemv_mx.plan(given, config), operands)
    tokens, choices, experts, block_m, n, k = 9, 2, 3, 16, 70, 1056
    chosen = torch.arange(tokens * choices).view(tokens, choices) * 7 % 5 - 1  # also experts that there are not
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    for config in (gemv_a16w8.GemvConfig(8, 1, 4, 2, 6, 1, 2), gemv_a16w8.GemvConfig(16, 1, 2, 2, 2, 2, 2)):
        operands = Operands(place)
        layout = [
            operands.input(name, part.shape, part.dtype, values=part)
            for name, part in zip(names, sort_tokens(chosen, experts, block_m), strict=True)
        ]
        routed = RoutedProduct(
            a=operands.quantized("a", (tokens, k), (1, 32), column_major=False, scale="e8m0"),
            w=operands.quantized("b", (experts, k, n), (32, 1), column_major=True, scale="e8m0"),
            routing=Routing(*layout), a_div=choices,
            token_weights=operands.input("token_weights", (tokens * choices,), FP32),
            out=operands.output("out", (tokens * choices, n), BF16), target=target,
        )  # fmt: skip
        operands.expected = partial(kernel_info.routed_product, routed)
        yield Form(f"routed {config}", gemv_mx.plan_moe(routed, config), operands)


def _mx_tiles(place: Place, target: Target) -> Forms:
    for config, constant in zip(MX_TILES[::2], cycle((False, True)), strict=False):
        operands, given = _mx(config.ROWS + 3, 70, 2 * config.STAGES * config.CLUSTER * BK, place, target)
        launches = mx_tiles.plan(replace(given, constant=constant), config)
        yield Form(f"{config}{' constant' * constant}", launches, operands)


# ---- quantizers -----------------------------------------------------------------------------------------------------


def _quantize(place: Place, target: Target) -> Forms:
    yield from _quantize_matrices(place, target)
    yield from _quantize_groups(place, target)


def _quantize_form(name: str, operands: Operands, q: Quantization) -> Form:
    q = kernel_info.with_outputs(operands, q)
    operands.expected = partial(_quantized, q)
    return Form(name, quantize.plan(q, quantize.configure(q)), operands)


def _quantize_matrices(place: Place, target: Target) -> Forms:
    def form(
        name: str, shape: tuple[int, int], block: Block, *, source: Source = PLAIN, dual: bool = True,
        dual_block: Block | None = None, scale: str = "fp32", column_major: bool | None = None,
    ) -> Form:  # fmt: skip
        operands, other, rstd = Operands(place), None, None
        x = operands.input("x", shape, BF16)
        if source is SILU_MUL:
            other = operands.input("other", shape, BF16)
        elif source is RMS_NORM:
            other, rstd = operands.input("other", shape[1:], BF16), operands.input("rstd", shape[:1], FP32)
        rest: dict[str, Any] = {"source": source, "other": other, "rstd": rstd, "dual_block": dual_block}
        rest["column_major"] = column_major
        q = quantization(x, block, dual=dual, scale=scale, target=target, **rest)
        return _quantize_form(name, operands, q)

    ragged = (131, 261)
    yield form("dual even", (256, 384), ROW)
    for block in BLOCK_SHAPES:
        yield form(f"{block}", ragged, block, dual=False)
    yield form("dual", ragged, ROW)
    yield form("dual (128, 128)", ragged, SQUARE, scale="e8m0")
    for given in (FP32, BF16):
        yield _given_amax(place, target, ragged, given)
    for block in (ROW, COLUMN):
        yield form(f"{block} and (128, 128)", ragged, block, dual_block=SQUARE)
    for source in (SILU_MUL, RMS_NORM):
        yield form(f"{source.macro} {ROW} and (128, 128)", ragged, ROW, source=source, dual_block=SQUARE)
    for source in (PLAIN, SILU_MUL, RMS_NORM):
        yield form(
            f"{source.macro} column-major (128, 128)", ragged, SQUARE, source=source, dual=False, column_major=True
        )
    yield form("silu_mul", ragged, ROW, source=SILU_MUL)
    yield form("rms_norm", ragged, ROW, source=RMS_NORM)


def _given_amax(place: Place, target: Target, shape: tuple[int, int], dtype: torch.dtype) -> Form:
    """A whole matrix by the largest of maxima that come with it, of which the last one exceeds the matrix's."""
    operands = Operands(place)
    x = operands.input("x", shape, BF16)
    maxima = operands.input("amax", (1, 300 if dtype == FP32 else 1), dtype, values=torch.full((), 30.0))
    q = kernel_info.with_outputs(operands, quantization(x, (-1, -1), dual=True, amax=maxima, target=target))
    operands.expected = partial(_quantized, q)
    return Form(f"given {dtype}", quantize.plan(q, quantize.configure(q)), operands)


def _amax(place: Place, target: Target) -> Forms:
    """One block of threads takes a matrix, or a block takes each of the tiles below each other."""
    shapes = (((2, 300, 261), BF16, 1), ((256, 256), FP16, 1), ((3, 7), FP32, 1), ((300, 96), BF16, 3))
    for shape, dtype, blocks in shapes:
        operands = Operands(place)
        x, out = operands.input("x", shape, dtype), operands.output("amax", (*shape[:-2], blocks, 1), FP32)
        operands.expected = partial(_largest, x, shape[-2] if blocks == 1 else 128)
        launch = quantize_whole.plan_maxima(x, target, quantize_whole.configure_amax(x), out)
        yield Form(f"{shape}", (launch,), operands)


def _largest(x: Tensor, rows: int) -> dict[str, Expected]:
    parts = [part.float().abs().amax((-2, -1), keepdim=True) for part in x.split(rows, -2)]
    return {"amax": Expected(torch.cat(parts, -2))}


def _quantize_groups(place: Place, target: Target) -> Forms:
    for name, (sizes, rest) in {"small": GROUPS["units"], "large": GROUPS["large gaps"]}.items():
        sources = (PLAIN, SILU_MUL, SILU_MUL_GRAD)
        alone = ((source, block, None) for source in (PLAIN, SILU_MUL) for block in (COLUMN, SQUARE))
        beside = ((PLAIN, ROW, SQUARE), (SILU_MUL, ROW, SQUARE))
        for source, block, dual_block in (*((source, ROW, None) for source in sources), *alone, *beside):
            operands, inner, tokens = Operands(place), 136, sum(sizes) + rest
            offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
            x = hidden = operands.input("x", (tokens, 2 * inner), BF16)
            other = None
            if source is SILU_MUL:
                x, other = hidden[:, :inner], hidden[:, inner:]
            elif source is SILU_MUL_GRAD:
                other = operands.input("other", (tokens, inner), BF16)
            rest_: dict[str, Any] = {"source": source, "other": other, "offsets": offsets}
            q = quantization(x, block, dual=block == ROW, dual_block=dual_block, target=target, **rest_)
            form = source.macro if block == ROW else f"{block}" if source is PLAIN else f"{block} {source.macro}"
            form += "" if dual_block is None else f" {dual_block}"
            yield _quantize_form(f"grouped {form} {name}", operands, q)


def _value(q: Quantization) -> Tensor:
    """The tensor to quantize, by the reference."""
    if q.source is PLAIN:
        return q.x
    assert q.other is not None
    if q.source is SILU_MUL:
        return reference.silu_mul(q.x, q.other)
    if q.source is SILU_MUL_GRAD:
        return reference.silu_mul_grad(q.other, q.x)
    return reference.rms_norm(_rows(q), q.other, q.eps, q.rstd)


def _rows(q: Quantization) -> Tensor:
    """The rows of a norm: rounded sums where a residual is added."""
    return q.x if q.residual is None else q.x + q.residual


def _quantized(q: Quantization) -> dict[str, Expected]:
    """The outputs of a quantization by the reference, in each of its blocks."""
    value, near, parts = _value(q), q.source in (SILU_MUL, SILU_MUL_GRAD), []
    for block in q.blocks:
        if q.offsets is None or block[0] == 1:
            given = None if q.amax is None else q.amax.float().amax().view(1, 1)
            parts.extend(reference.quantize(value, block, q.dtype, q.scale, given))
        else:
            parts.extend(reference.quantize_grouped(value, q.offsets, block, q.dtype, q.scale))
    if q.residual is not None:
        parts.append(_rows(q))
    return {name: Expected(part, near=near) for name, part in zip(q.outputs.tensors, parts, strict=True)}


def _whole(place: Place, shape: tuple[int, ...], dtype: torch.dtype, block: Block, target: Target) -> Any:
    """The operands of a matrix quantized by whole rows or columns, and the quantization."""
    operands = Operands(place)
    q = kernel_info.with_outputs(operands, quantization(operands.input("x", shape, dtype), block, target=target))
    operands.expected = partial(_quantized, q)
    return operands, q


def _whole_rows(place: Place, target: Target) -> Forms:
    for shape, dtype in (((2, 33, 1030), FP32), ((9, 8192), BF16)):
        operands, q = _whole(place, shape, dtype, (1, -1), target)
        yield Form(f"{shape}", quantize_rows.plan(q, quantize_rows.configure(q)), operands)
    for shape, dtype in (((2, 33, 1030), FP32), ((9, 4096), BF16), ((3, 14336), BF16), ((70, 2056), FP16)):
        operands = Operands(place)
        gate, up = (operands.input(name, shape, dtype) for name in ("x", "other"))
        q = quantization(gate, (1, -1), target=target, other=up, source=SILU_MUL)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(_quantized, q)
        yield Form(f"silu_mul {shape}", quantize_rows.plan(q, quantize_rows.configure(q)), operands)


def _turn(place: Place, target: Target) -> Forms:
    """Whole tiles, and a batch of those that do not fit."""
    for name, shape in (("even", (256, 512)), ("ragged", (2, 170, 300))):
        operands = Operands(place)
        x = operands.input("x", shape, E4M3, strides=matrix_strides(shape, False, 16))
        out = operands.output("out", shape, E4M3, strides=matrix_strides(shape, True, 16))
        operands.expected = partial(_same, x)
        yield Form(name, turn.plan_turn(x, out, target), operands)


def _same(x: Tensor) -> dict[str, Expected]:
    return {"out": Expected(x)}


SIZES: Final = ([0, 1, 1000, 17, 500], 5)
WIDTH: Final = 200


def _tokens(place: Place, target: Target) -> tuple[Operands, Quantization]:
    """Groups of tokens quantized by whole columns, a scale for each group."""
    (sizes, rest), operands = SIZES, Operands(place)
    offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
    x = operands.input("x", (sum(sizes) + rest, WIDTH), BF16)
    q = kernel_info.with_outputs(operands, quantization(x, (-1, 1), offsets=offsets, target=target))
    operands.expected = partial(_quantized, q)
    return operands, q


def _quantize_columns(place: Place, target: Target) -> Forms:
    for config, kept in COLUMN_TILES[:2]:
        operands, q = _whole(place, (sum(SIZES[0]) + SIZES[1], 99), FP16, (-1, 1), target)
        yield Form(f"{config} kept {kept}", columns.plan(q, config, kept), operands)
        operands, q = _tokens(place, target)
        yield Form(f"grouped {config} kept {kept}", columns.plan(q, config, kept), operands)


def _stream_columns(place: Place, target: Target) -> Forms:
    # One cluster has panel after panel; the first ring does not hold one.
    whole = (
        STREAMS[0],
        stream_columns._STREAMS[0][1],
        stream_columns._STREAMS[3][1],
        *(config for _, config in stream_columns._STREAMS_OF_FEW[3:5]),
    )
    divided = ((stream_columns._STREAMS_OF_FEW[-1][1], (0, 128)), (stream_columns._BESIDE, (128, WIDTH)))
    for stream, span in (*((config, None) for config in whole), *divided):
        rows = max(64 * stream.STAGES * stream.CLUSTER, 600) + 5
        operands, q = _whole(place, (rows, WIDTH), BF16, (-1, 1), target)
        operands.expected = partial(_span_of_columns, q, span)
        name = f"{stream}" + (f" of columns {span[0]} to {span[1]}" if span else "")
        yield Form(name, (stream_columns.plan_part(q, stream, 1, span),), operands)
    for stream in (STREAMS[0], stream_columns._STREAMS_OF_GROUPS[0][1], stream_columns._STREAMS_OF_GROUPS[-1][1]):
        operands, q = _tokens(place, target)
        yield Form(f"grouped {stream}", (stream_columns.plan_part(q, stream, 1),), operands)


def _span_of_columns(q: Quantization, span: tuple[int, int] | None) -> dict[str, Expected]:
    """Beside a `span` of columns the outputs keep their poison."""
    expected = _quantized(q)
    for name, part in expected.items():
        written = torch.zeros(part.value.shape, dtype=torch.bool)
        written[..., slice(*span) if span else slice(None)] = True
        expected[name] = part._replace(written=written)
    return expected


def _walk_columns(place: Place, target: Target) -> Forms:
    for walk in (*(walk for _, walk in walk_columns._WALKS), WALKS[1]):
        operands, q = _tokens(place, target)
        yield Form(f"{walk}", walk_columns.plan(q, walk, 2), operands)


def _rms_norm(place: Place, target: Target) -> Forms:
    for shape, dtype, block, added in (
        ((16, 2048), BF16, ROW, False),
        ((3, 5, 2056), FP16, ROW, False),
        ((3, 5, 2056), BF16, (1, -1), False),
        ((16, 4096), BF16, ROW, True),
        ((3, 5, 2056), BF16, ROW, True),
        ((9, 1032), FP32, (1, -1), True),
    ):
        operands = Operands(place)
        x, weight = operands.input("x", shape, dtype), operands.input("weight", shape[-1:], dtype)
        residual = operands.input("residual", shape, dtype) if added else None
        q = quantization(x, block, source=RMS_NORM, other=weight, eps=1e-6, residual=residual, target=target)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(_quantized, q)
        name = f"{shape}{' whole' * (block != ROW)}{' residual' * added}"
        yield Form(name, rms_norm.plan(q, rms_norm.configure(q)), operands)


def _silu_mul_saved(place: Place, target: Target) -> Forms:
    for name, shape, dtype, scale in (
        ("even", (128, 256), BF16, "fp32"),
        ("ragged", (67, 264), BF16, "e8m0"),
        ("float16", (2, 70, 136), FP16, "pow2"),
    ):
        operands = Operands(place)
        gate, up = operands.input("gate", shape, dtype), operands.input("up", shape, dtype)
        made = [
            quantization(gate, ROW, source=SILU_MUL, other=up, scale=scale, target=target),
            *(quantization(x, SAVED_BLOCK, target=target) for x in (gate, up)),
        ]
        names = iter(SAVED_OUTPUTS)
        parts = [
            replace(q, into=(_outputs_like(operands, names, replace(q, x=torch.empty_like(q.x, device="meta")).out),))
            for q in made
        ]
        saved = SavedSiluMul(product=parts[0], gate=parts[1], up=parts[2])
        operands.expected = partial(_saved, gate, up, scale)
        yield Form(name, silu_mul.plan_saved(saved, silu_mul.configure_saved(saved)), operands)


def _outputs_like(operands: Operands, names: Iterator[str], like: Quantized) -> Quantized:
    return Quantized(*(operands.like(next(names), part, output=True) for part in like[:2]), like.block)


def _saved(gate: Tensor, up: Tensor, scale: str) -> dict[str, Expected]:
    """The product's bytes may round otherwise, as its exponential does; those of gate and up are exact."""
    parts = quantize_silu_mul_saved_reference(gate, up, ROW, E4M3, scale)
    near = (True, True, False, False, False, False)
    return {name: Expected(part, near=of) for name, part, of in zip(SAVED_OUTPUTS, parts, near, strict=True)}


def _silu_mul_backward(place: Place, target: Target) -> Forms:
    forms: tuple[tuple[str, tuple[int, ...], torch.dtype, dict[str, Any]], ...] = (
        ("even", (128, 256), BF16, {}),
        ("ragged", (131, 264), BF16, {"dtype": torch.float8_e5m2}),
        ("square", (131, 264), BF16, {"product_block": SQUARE}),
        ("even square", (256, 128), BF16, {"product_block": SQUARE, "dtype": torch.float8_e5m2}),
        ("float16", (2, 70, 136), FP16, {"scale": "pow2"}),
        ("values even", (128, 256), BF16, {}),
        ("values ragged", (131, 264), BF16, {"dtype": torch.float8_e5m2}),
        ("values square", (131, 264), BF16, {"product_block": SQUARE}),
        ("values float16", (2, 70, 136), FP16, {"scale": "pow2"}),
    )
    for name, shape, dtype, given in forms:
        operands = Operands(place)
        grad = operands.input("grad", shape, dtype)
        values = name.startswith("values")
        gate, up = (
            operands.input(of, shape, dtype)
            if values
            else operands.quantized(of, shape, SAVED_BLOCK, column_major=False)
            for of in ("gate", "up")
        )
        form = {"block": ROW, "dtype": E4M3, "scale": "fp32", "product_block": COLUMN, "product_dtype": E4M3, **given}
        backward = partial(SiluMulBackward, target=target, **form)
        like = backward(grad=torch.empty_like(grad, device="meta"), gate=gate, up=up).outputs.tensors
        into = tuple(operands.like(of, part, output=True) for of, part in like.items())
        operands.expected = partial(_backward, grad, gate, up, form)
        problem = backward(grad=grad, gate=gate, up=up, into=into)
        yield Form(name, silu_mul.plan_backward(problem, silu_mul.configure_backward(problem)), operands)


def _backward(
    grad: Tensor, gate: Quantized | Tensor, up: Quantized | Tensor, form: dict[str, Any]
) -> dict[str, Expected]:
    kept = [part for x in (gate, up) for part in ((x, None) if isinstance(x, Tensor) else x[:2])]
    parts = quantize_silu_mul_backward_reference(grad, *kept, **form)
    return {
        name: Expected(part, near=True, rounded=None if kept[1] is None and "product" in name else grad.dtype)
        for name, part in zip(BACKWARD_OUTPUTS, parts, strict=True)
    }


def _row_rstd(place: Place, target: Target) -> Forms:
    operands = Operands(place)
    x, rstd = operands.input("x", (7, 261), FP32), operands.output("rstd", (7,), FP32)
    operands.expected = lambda: {"rstd": Expected(1.0 / (x.double().square().mean(-1) + 1e-6).sqrt(), torch.ones(7))}
    q = quantization(x, ROW, source=RMS_NORM, eps=1e-6, target=target)
    yield Form("rows", (rms_norm.plan_row_rstd(q, rstd),), operands)


_WEIGHT_NAN: Final = ("x", "w", "w_scale", "bias")
_WEIGHT_FAR: Final = (("x", -2), ("w", -1), ("w_scale", -1), ("bias", -1))
# A constant weight is read early, and its scales.
_WEIGHT_EARLY: Final = frozenset({"w", "w_scale"})
_BESIDE: Final = ("w_second", "w_second_scale", "w_third", "w_third_scale")
_MX_NAN: Final = ("a", "a_scale", "b", "b_scale")

CUDA: Final = (
    KernelInfo(
        "scaled_mm.cu", _scaled_mm, 1e-5, 2.0**-10,
        emulated=(
            f"{'x'.join(FORWARD)} {SMALLEST} ragged", f"{'x'.join(WGRAD)} {X} ragged float32", "JAGGED_M", "JAGGED_K",
            "MASKED VECTOR", "MASKED unwritten", "BLOCKxBLOCK 64x64",
        ),
        nan=("a", "a_scale", "b", "b_scale", "bias"),
    ),
    KernelInfo(
        "gemv_a16w8.cu", _gemv_a16w8, 1e-5, 1e-4, overlaps=True,
        emulated=("K contiguous", "K not contiguous"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
    ),
    KernelInfo(
        # x is multiplied in FP8 parts: on an H100 one of 1600 sums is off by more than 2**-12.
        "a16w8_tiles.cu", _a16w8_tiles, 1e-5, 2.0**-11, overlaps=True, early=_WEIGHT_EARLY | {*_BESIDE},
        emulated=(
            "M1 8x64", "M8 constant", "M16 K", "gated 8x64", "gated constant", "siblings 8x64", "siblings constant",
        ),
        nan=(*_WEIGHT_NAN, "gate", "up", *_BESIDE, "bias_second", "bias_third"),
        far=(*_WEIGHT_FAR, ("gate", -2), ("up", -2), ("w_second", -1), ("w_third", -1)),
    ),
    KernelInfo(
        "mm_a16w8.cu", _mm_a16w8, 1e-5, 1e-4, overlaps=True, early=_WEIGHT_EARLY,
        emulated=("128x64/1 stages1", "constant K", f"long {BF16} 64x128", f"gated {BF16} 128x64"),
        nan=(*_WEIGHT_NAN, "w_up", "w_up_scale"), far=(*_WEIGHT_FAR, ("w_up", -1)),
    ),
    KernelInfo(
        "splitk_a16w8.cu", _splitk_a16w8, 1e-5, 1e-4, overlaps=True, early=_WEIGHT_EARLY,
        emulated=("32x64", "constant 32x64"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
    ),
    KernelInfo(
        "split_rows.cu", _parts_a16w8, 1e-5, 2.0**-11, overlaps=True,
        early=frozenset(f"{name}{of}" for name in ("b", "b_scale") for of in ("", "_second", "_third")) | {"offsets"},
        emulated=(f"M57 {BF16} 64x32", "M73", "M121", "siblings", "groups"),
        nan=(*_WEIGHT_NAN, *_BESIDE, "bias_second"), far=(*_WEIGHT_FAR[:2], ("w_second", -1)),
    ),
    KernelInfo(
        "gemv_mx.cu", _gemv_mx, 1e-5, 2.0**-12, overlaps=True, emulated=("dense", "routed"), nan=_MX_NAN,
        spilling=("dense 8x16 warps1x8 unroll4 cluster1 resident3",),
    ),
    KernelInfo(
        "mx_tiles.cu", _mx_tiles, 1e-5, 2.0**-12, overlaps=True, early=frozenset({"b", "b_scale"}),
        emulated=("8x64", "16x128"), nan=_MX_NAN,
    ),
    KernelInfo(
        "quantize.cu", _quantize, nan=("x", "other", "rstd", "amax"), far=(("x", -2),),
        emulated=("(1, 128)", "dual", "given", "silu_mul", "rms_norm", "grouped PLAIN", "grouped SILU_MUL_GRAD"),
    ),
    KernelInfo("amax.cu", _amax, nan=("x",), far=(("x", -2),)),
    KernelInfo(
        "quantize_rows.cu", _whole_rows, emulated=("(2", "(9", "silu_mul (2", "silu_mul (70"), nan=("x", "other"),
        far=(("x", -2), ("other", -2)),
    ),
    KernelInfo("quantize_columns.cu", _quantize_columns, emulated=("Columns", "grouped"), nan=("x",), far=(("x", -2),)),
    KernelInfo(
        "stream_columns.cu", _stream_columns, overlaps=True, early=frozenset({"x", "data", "scale", "offsets"}),
        emulated=("Stream", "grouped"), nan=("x",),
    ),
    KernelInfo("walk_columns.cu", _walk_columns, nan=("x",)),
    KernelInfo(
        "rms_norm.cu", _rms_norm, emulated=("(16, 2", "(3, 5, 2056)", "(16, 4", "(9"),
        nan=("x", "weight", "residual"), far=(("x", -2), ("residual", -2)),
    ),
    KernelInfo(
        "silu_mul_saved.cu", _silu_mul_saved, emulated=("even", "ragged", "float16"), nan=("gate", "up"),
        far=(("gate", -2), ("up", -2)),
    ),
    KernelInfo(
        "silu_mul_backward.cu", _silu_mul_backward,
        emulated=(
            "even", "ragged", "square", "even square", "float16", "values even", "values ragged", "values square",
            "values float16",
        ),
        nan=("grad", "gate", "gate_scale", "up", "up_scale"),
        far=(("grad", -2), ("gate", -2), ("up", -2), ("gate_scale", -1)),
    ),
    KernelInfo("row_rstd.cu", _row_rstd, 1e-6, 1e-6, nan=("x",), far=(("x", -2),)),
    KernelInfo("turn.cu", _turn, emulated=("even", "ragged"), far=(("x", -2),)),
)  # fmt: skip


def main(substrings: list[str]) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a Hopper GPU, and torch.cuda.is_available() is False")
    device = torch.device("cuda")
    target = target_of(device)
    if target.name != "sm90" or nvrtc.unavailable():
        raise SystemExit(nvrtc.unavailable() or f"the kernels are Hopper's, and this device is {target.name}")
    torch.manual_seed(0)
    ran: Counter[str] = Counter()
    for name, launch in launches(device, target):
        if substrings and not any(part in name for part in substrings):
            continue
        try:
            for _ in range(RUNS):
                launch.run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise SystemExit(f"{name}: {error}") from None
        ran[launch.kernel.file] += 1
    for file, count in ran.items():
        print(f"{file}: {count} launches")


if __name__ == "__main__":
    main(sys.argv[1:])
