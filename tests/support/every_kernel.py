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
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, gemv_mx, mm_a16w8, mx_tiles, splitk_a16w8
from fp8fn.ops.cuda.gemm import scaled_grouped_mm as grouped
from fp8fn.ops.cuda.gemm import scaled_mm as dense
from fp8fn.ops.cuda.gemm.scaled_mm import BK, KINDS, Config
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize import quantize_rows, stream_columns, walk_columns
from fp8fn.ops.cuda.quantize.fused_quantize import plan_rms_norm, plan_row_rstd
from fp8fn.ops.cuda.quantize.quantize import BLOCK_SHAPES, Quantized, plan
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import Target, target_of
from fp8fn.ops.tuning.candidates import SMALLEST, X, tiles
from fp8fn.ops.tuning.problem import Problem
from support import kernel_info
from support.configs import (
    COLUMN_TILES,
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
from support.operands.groups import GROUPS, ends

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
RUNS: Final = 3
ROW, COLUMN, SQUARE = BLOCK_SHAPES
FORWARD, WGRAD = KINDS[:2]
WEIGHT_BLOCKS: Final = tuple(gemv_a16w8.SCALES)
META: Final = Place(torch.device("meta"))

Launches: TypeAlias = Iterator[tuple[str, CudaLaunch]]


def launches(device: torch.device | str, target: Target) -> Launches:
    """Names, and launches on operands of `device`; on `meta` they only compile."""
    for info in CUDA:
        for form in info.forms(Place(torch.device(device), framed=False), target):
            for launch in form.launches:
                yield f"{info.file} {form.name}", launch


# ---- products of two FP8 operands -----------------------------------------------------------------------------------


def _few(target: Target) -> Target:
    """So few multiprocessors that a persistent block has tile after tile."""
    return replace(target, multiprocessors=2)


def _scaled_mm(place: Place, target: Target) -> Forms:
    yield from _dense(place, _few(target))
    yield from _grouped(place, _few(target))


def _dense(place: Place, target: Target) -> Forms:
    def form(
        kinds: tuple[str, str], shape: str, config: Config, out: str = "bfloat16", *, bias: bool = False, batch: int = 1
    ) -> Form:
        # Their outputs leave by bulk stores, by pairs and by lines.
        m, n = {
            "even": (3 * config.BM, 2 * config.BN), "ragged": (config.BM + 9, config.BN + 13),
            "low": (config.BM, 2 * config.BN),
        }[shape]  # fmt: skip
        made = partial(_scaled_operands, m, n, blocks=Problem(1, 1, 1, *kinds).blocks, batch=batch, out=out, bias=bias)
        stages = int(dense.plan(*_given(made(META, BK)), target, config).options["STAGES"])
        operands = made(place, 2 * stages * config.SPLIT * BK + (24 if shape == "ragged" else 0))
        name = f"{'x'.join(kinds)} {config} {shape} {out}{' bias' * bias}{f' batch{batch}' * (batch > 1)}"
        return Form(name, (dense.plan(*_given(operands), target, config),), operands[0])

    for kinds in KINDS:
        for config, shape in product(tiles(Problem(1, 1, 1, *kinds)), ("even", "ragged")):
            yield form(kinds, shape, config)
    yield form(FORWARD, "low", X, bias=True)
    yield form(FORWARD, "even", Config(), "float16", batch=2)
    yield form(WGRAD, "ragged", X, "float32", bias=True)
    yield form(FORWARD, "low", Config(SPLIT=2))
    yield form(FORWARD, "ragged", replace(SMALLEST, SPLIT=4))
    for config in (replace(X, CLUSTER=2), Config(CLUSTER=2, SHARE_B=False)):
        yield form(FORWARD, "even", config)
        yield form(KINDS[2], "ragged", config)


Blocks: TypeAlias = "tuple[Block, Block]"


def _scaled_operands(
    m: int, n: int, place: Place, k: int, *, blocks: Blocks, batch: int, out: str, bias: bool
) -> tuple[Operands, Blocks]:
    operands, lead = Operands(place), (batch,) * (batch > 1)
    a = operands.quantized("a", (*lead, m, k), blocks[0], column_major=False)
    b = operands.quantized("b", (*lead, k, n), blocks[1], column_major=True)
    added = operands.input("bias", (n,), FP32) if bias else None
    operands.output("out", (*lead, m, n), getattr(torch, out))
    operands.expected = lambda: {
        "out": kernel_info.product(dequantized(*a, blocks[0]), dequantized(*b, blocks[1]), added)
    }
    return operands, blocks


def _given(made: tuple[Operands, Blocks]) -> Any:
    """`a, a_scale, a_block, b, b_scale, b_block, bias, out`, as the plans of scaled products take them."""
    operands, (a_block, b_block) = made
    x = operands.inputs
    return x["a"], x["a_scale"], a_block, x["b"], x["b_scale"], b_block, x.get("bias"), operands.outputs["out"]


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
        given = (*a, blocks[0], *b, blocks[1], offsets, added)
        operands.expected = partial(kernel_info.grouped_product, given)
        launch = grouped.plan(*given, out, target, config)
        yield Form(f"JAGGED_M {'x'.join(kinds)} {config}", (launch,), operands)
    m, n = 200, 136
    for (sizes, rest), config in product((GROUPS["units"], GROUPS["large gaps"]), (X, SMALLEST)):
        operands = Operands(place)
        offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
        spread = [
            kernel_info.spread(operands, name, sum(sizes) + rest, width, ends(sizes), COLUMN)
            for name, width in (("a", m), ("b", n))
        ]
        out = operands.output("out", (len(sizes), m, n), BF16)
        given = (spread[0][0].mT, spread[0][1].mT, ROW, *spread[1], COLUMN, offsets, None)
        operands.expected = partial(kernel_info.grouped_product, given)
        launch = grouped.plan(*given, out, target, config)
        unit = dict(launch.kernel.macros)["SPREAD_UNIT"]
        yield Form(f"JAGGED_K unit{unit} {config}", (launch,), operands)


# ---- 16-bit rows by an FP8 weight -----------------------------------------------------------------------------------


def _rows_by_weight(
    m: int, n: int, k: int, block: Block, place: Place, *, dtype: torch.dtype = BF16, column_major: bool = True
) -> Operands:
    operands = Operands(place)
    x = operands.input("x", (m, k), dtype)
    w, w_scale = operands.quantized("w", (k, n), block, column_major=column_major)
    bias = operands.input("bias", (n,), FP32)
    operands.output("out", (m, n), dtype)
    operands.expected = lambda: {"out": kernel_info.product(x, dequantized(w, w_scale, block), bias)}
    return operands


def _weight_form(
    name: str, planner: Any, operands: Operands, block: Block, target: Target, *args: Any, **how: Any
) -> Form:
    """`planner(x, w, w_scale, w_block, bias, out, target, *args)`, as the plans for 16 by 8 bits take them."""
    x = operands.inputs
    launch = planner(x["x"], x["w"], x["w_scale"], block, x["bias"], operands.outputs["out"], target, *args, **how)
    return Form(name, (launch,), operands)


def _gemv_a16w8(place: Place, target: Target) -> Forms:
    """K in chunks of x, of which a block has two and more."""
    configs = (*((config, True) for config in GEMVS[::2]), *((config, False) for config in ROW_MAJOR))
    for (config, lines), block in zip(configs, cycle(WEIGHT_BLOCKS), strict=False):
        m, n = config.ROWS + 3, 33
        endless = _rows_by_weight(m, n, 1 << 20, block, META, column_major=lines)
        (launch,) = _weight_form("", gemv_a16w8.plan, endless, block, target, config).launches
        chunk = int(launch.options["CHUNK"])
        operands = _rows_by_weight(m, n, 2 * chunk * config.CLUSTER + 24, block, place, column_major=lines)
        name = f"K{'' if lines else ' not'} contiguous {config}"
        yield _weight_form(name, gemv_a16w8.plan, operands, block, target, config)


def _a16w8_tiles(place: Place, target: Target) -> Forms:
    rows = {8: cycle((1, 8)), 16: cycle((16, 13))}
    for config, constant in zip(WEIGHT_TILES, cycle((False, True, True)), strict=False):
        m, block = next(rows[config.ROWS]), WEIGHT_BLOCKS[0]
        operands = _rows_by_weight(m, 200, 2 * config.STAGES * config.CLUSTER * BK, block, place)
        name = f"M{m}{' constant' * constant} {config}"
        yield _weight_form(name, a16w8_tiles.plan, operands, block, target, config, constant=constant)
    block = WEIGHT_BLOCKS[1]
    for m, held in a16w8_tiles._HELD.items():
        of_others = set()
        configs = dict.fromkeys(entry.config for entry in held)
        for (config, cluster), dtype in zip(product(configs, (2, 1)), cycle((FP16, BF16, BF16, FP16)), strict=False):
            # Those without stages hold a block's part as a whole, which zeros follow here.
            stages, beyond = config.STAGES or config.HELD, 0 if config.STAGES else 48
            count = config.HELD - (dtype == FP16 and m == 16 and config.HELD > 3)
            config = replace(config, CLUSTER=cluster, STAGES=stages, HELD=count, READY=min(config.READY, count))
            k = cluster * stages * BK - beyond
            operands = _rows_by_weight(m, 200, k, block, place, dtype=dtype)
            name = f"M{m} K{k} constant {config}"
            yield _weight_form(name, a16w8_tiles.plan, operands, block, target, config, constant=True)
            config = replace(config, READY=0)
            if config not in of_others:
                yield _weight_form(f"M{m} K{k} {config}", a16w8_tiles.plan, operands, block, target, config)
            of_others.add(config)


def _mm_a16w8(place: Place, target: Target) -> Forms:
    few, first = _few(target), WEIGHT_BLOCKS[0]
    for config, block in zip(MANY[::3], cycle(WEIGHT_BLOCKS), strict=False):
        k = 2 * config.STAGES * config.K_PARTS * BK + 16
        operands = _rows_by_weight(2 * config.BM + 9, 2 * config.BN + 8, k, block, place)
        yield _weight_form(f"{config}", mm_a16w8.plan, operands, block, few, config)
    for config in (mm_a16w8.Config(128, 1, 1, MATH=1, RESIDENT=4), mm_a16w8.Config(64, 1, 3, K_PARTS=2, RESIDENT=1)):
        operands = _rows_by_weight(config.BM + 9, config.BN + 8, config.STAGES * BK, first, place)
        for constant in (False, True):
            name = f"{'constant ' * constant}{config} all of K in flight"
            yield _weight_form(name, mm_a16w8.plan, operands, first, few, config, constant=constant)
    for config in (mm_a16w8.Config(32, 1, 4, K_PARTS=2, RESIDENT=2), mm_a16w8.Config(32, 1, 2, RESIDENT=2)):
        for k in (config.STAGES * BK, 2 * config.STAGES * BK + 144):
            operands = _rows_by_weight(config.BM + 9, config.BN + 8, k, first, place)
            yield _weight_form(f"constant K{k} {config}", mm_a16w8.plan, operands, first, few, config, constant=True)


def _splitk_a16w8(place: Place, target: Target) -> Forms:
    for config, block in zip(SPLITS, cycle(WEIGHT_BLOCKS), strict=False):
        stages = config.STAGES if config.HELD else 2 * config.STAGES + 1
        k = stages * config.CLUSTER * BK + (-112 if config.HELD else 16)
        operands = _rows_by_weight(config.ROWS + 9, config.BN + 6, k, block, place)
        for constant in (False, True):
            name = f"{'constant ' * constant}{config}"
            yield _weight_form(name, splitk_a16w8.plan, operands, block, target, config, constant=constant)


# ---- MX -------------------------------------------------------------------------------------------------------------


def _mx(m: int, n: int, k: int, place: Place) -> tuple[Operands, tuple[Any, ...]]:
    """And `a, a_scale, b, b_scale, bias, out`, as the plans of MX products take them."""
    operands = Operands(place)
    a = operands.quantized("a", (m, k), (1, 32), column_major=False, scale="e8m0")
    b = operands.quantized("b", (k, n), (32, 1), column_major=True, scale="e8m0")
    out = operands.output("out", (m, n), BF16)
    operands.expected = lambda: {"out": kernel_info.product(dequantized(*a, (1, 32)), dequantized(*b, (32, 1)))}
    return operands, (*a, *b, None, out)


def _gemv_mx(place: Place, target: Target) -> Forms:
    for config in MX_GEMVS[::3]:
        m, n = config.ROWS + 3, 33
        chunk = int(gemv_mx.plan(*_mx(m, n, 1 << 20, META)[1], target, config)[0].options["CHUNK"])
        operands, given = _mx(m, n, 2 * chunk * config.CLUSTER + 24, place)
        yield Form(f"dense {config}", gemv_mx.plan(*given, target, config), operands)
    tokens, choices, experts, block_m, n, k = 9, 2, 3, 16, 70, 1056
    chosen = torch.arange(tokens * choices).view(tokens, choices) * 7 % 5 - 1  # also experts that there are not
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    for config in (gemv_a16w8.Config(8, 1, 4, 2, 6, 1, 2), gemv_a16w8.Config(16, 1, 2, 2, 2, 2, 2)):
        operands = Operands(place)
        layout = [
            operands.input(name, part.shape, part.dtype, values=part)
            for name, part in zip(names, sort_tokens(chosen, experts, block_m), strict=True)
        ]
        a = operands.quantized("a", (tokens, k), (1, 32), column_major=False, scale="e8m0")
        w = operands.quantized("b", (experts, k, n), (32, 1), column_major=True, scale="e8m0")
        weights = operands.input("token_weights", (tokens * choices,), FP32)
        out = operands.output("out", (tokens * choices, n), BF16)
        operands.expected = partial(kernel_info.routed_product, (*a, (1, 32)), (*w, (32, 1)), layout, choices, weights)
        launch = gemv_mx.plan_moe(*a, *w, layout[0], layout[1], layout[2], choices, weights, out, target, config)
        yield Form(f"routed {config}", (launch,), operands)


def _mx_tiles(place: Place, target: Target) -> Forms:
    for config, constant in zip(MX_TILES[::2], cycle((False, True)), strict=False):
        operands, given = _mx(config.ROWS + 3, 70, 2 * config.STAGES * config.CLUSTER * BK, place)
        name = f"{config}{' constant' * constant}"
        yield Form(name, mx_tiles.plan(*given, target, config, constant=constant), operands)


# ---- quantizers -----------------------------------------------------------------------------------------------------


def _quantize(place: Place, target: Target) -> Forms:
    yield from _quantize_matrices(place, target)
    yield from _quantize_groups(place, target)


def _quantize_matrices(place: Place, target: Target) -> Forms:
    def form(name: str, shape: tuple[int, int], *sides: str, source: str = "PLAIN", square: bool = False) -> Form:
        operands, scale = Operands(place), "e8m0" if square and len(sides) == 2 else "fp32"
        x = operands.input("x", shape, BF16)
        blocks = {"row": SQUARE if square else ROW, "col": SQUARE if square else COLUMN}
        out: dict[str, Quantized | None] = {"row": None, "col": None}
        for side in sides:
            major = side == "col" if len(sides) == 2 or not square else None
            data, scales = empty_data(x, blocks[side], E4M3, major), empty_scale(x, blocks[side], scale, major)
            out[side] = Quantized(
                operands.like(f"{side}_data", data, output=True), operands.like(f"{side}_scale", scales, output=True)
            )
        other = rstd = None
        if source == "SILU_MUL":
            other = operands.input("other", shape, BF16)
        elif source == "RMS_NORM":
            other, rstd = operands.input("other", shape[1:], BF16), operands.input("rstd", shape[:1], FP32)

        def value() -> Tensor:
            if source == "SILU_MUL":
                assert other is not None
                return reference.silu_mul(x, other)
            if source == "RMS_NORM":
                assert other is not None
                return reference.rms_norm(x, other, 0.0, rstd)
            return x

        operands.expected = lambda: _quantized_parts(
            value(), {side: blocks[side] for side in sides}, scale, near=source == "SILU_MUL"
        )
        launch = plan(x, out["row"], out["col"], square, scale, target, source=source, other=other, rstd=rstd)
        return Form(name, (launch,), operands)

    ragged = (131, 261)
    yield form("dual even", (256, 384), "row", "col")
    yield form(f"{ROW}", ragged, "row")
    yield form(f"{COLUMN}", ragged, "col")
    yield form(f"{SQUARE}", ragged, "row", square=True)
    yield form("dual", ragged, "row", "col")
    yield form("dual (128, 128)", ragged, "row", "col", square=True)
    yield form("silu_mul", ragged, "row", "col", source="SILU_MUL")
    yield form("rms_norm", ragged, "row", "col", source="RMS_NORM")


def _quantized_parts(x: Tensor, blocks: dict[str, Block], scale: str, *, near: bool = False) -> dict[str, Expected]:
    expected = {}
    for side, block in blocks.items():
        data, scales = reference.quantize(x, block, E4M3, scale)
        expected[f"{side}_data"], expected[f"{side}_scale"] = Expected(data, near=near), Expected(scales, near=near)
    return expected


def _quantize_groups(place: Place, target: Target) -> Forms:
    for name, (sizes, rest) in {"small": GROUPS["units"], "large": GROUPS["large gaps"]}.items():
        for source in ("PLAIN", "SILU_MUL", "SILU_MUL_GRAD", "columns"):
            operands, inner, tokens = Operands(place), 136, sum(sizes) + rest
            offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
            x = hidden = operands.input("x", (tokens, 2 * inner), BF16)
            other = None
            if source == "SILU_MUL":
                x, other = hidden[:, :inner], hidden[:, inner:]
            elif source == "SILU_MUL_GRAD":
                other = operands.input("other", (tokens, inner), BF16)
            row, col = (None if source == "columns" else _side(operands, x, "row")), _side(operands, x, "col", offsets)
            operands.expected = partial(_grouped_parts, source, x, other, offsets)
            given: dict[str, Any] = {"source": "PLAIN" if source == "columns" else source, "other": other}
            launch = plan(x, row, col, False, "fp32", target, **given, offsets=offsets)
            form = f"grouped {COLUMN if source == 'columns' else source} {name}"
            yield Form(form, (launch,), operands)


def _side(operands: Operands, x: Tensor, side: str, offsets: Tensor | None = None) -> Quantized:
    """Where rows or columns of `x` go, in blocks of 128; columns spread where there are groups."""
    if offsets is None:
        parts: Any = empty_data(x, ROW, E4M3), empty_scale(x, ROW, "fp32")
    else:
        parts = empty_grouped(x, offsets.shape[0], COLUMN, E4M3, "fp32")
    return Quantized(
        *(operands.like(f"{side}_{n}", p, output=True) for n, p in zip(("data", "scale"), parts, strict=True))
    )


def _grouped_parts(source: str, x: Tensor, other: Tensor | None, offsets: Tensor) -> dict[str, Expected]:
    value, near = x, source.startswith("SILU")
    if source == "SILU_MUL":
        assert other is not None
        value = reference.silu_mul(x, other)
    elif source == "SILU_MUL_GRAD":
        assert other is not None
        value = reference.silu_mul_grad(other, x)
    col = reference.quantize_grouped(value, offsets, COLUMN, E4M3, "fp32")
    expected = {} if source == "columns" else _quantized_parts(value, {"row": ROW}, "fp32", near=near)
    return expected | {"col_data": Expected(col[0], near=near), "col_scale": Expected(col[1], near=near)}


def _whole(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype, block: Block
) -> tuple[Operands, Tensor, Quantized]:
    """A matrix quantized by whole rows or columns."""
    operands = Operands(place)
    x = operands.input("x", shape, dtype)
    out = Quantized(*operands.written("data", x, block))
    operands.outputs["scale"] = operands.outputs.pop("data_scale")
    if "data_scale" in operands._memory:
        operands._memory["scale"] = operands._memory.pop("data_scale")
    operands.expected = lambda: _whole_parts(reference.quantize(x, block, E4M3, "fp32"))
    return operands, x, out


def _whole_parts(parts: tuple[Tensor, Tensor], span: tuple[int, int] | None = None) -> dict[str, Expected]:
    """Of a `span` of columns the rest keeps its poison."""
    expected = {}
    for name, part in zip(("data", "scale"), parts, strict=True):
        written = torch.zeros(part.shape, dtype=torch.bool)
        written[..., slice(*span) if span else slice(None)] = True
        expected[name] = Expected(part, written=written)
    return expected


def _whole_rows(place: Place, target: Target) -> Forms:
    for shape, dtype in (((2, 33, 1030), FP32), ((9, 8192), BF16)):
        operands, x, out = _whole(place, shape, dtype, (1, -1))
        yield Form(f"{shape}", (quantize_rows.plan(x, out, "fp32", target),), operands)


SIZES: Final = ([0, 1, 1000, 17, 500], 5)
WIDTH: Final = 200


def _tokens(place: Place) -> tuple[Operands, Tensor, Quantized, Tensor]:
    """Groups of tokens quantized by whole columns, a scale for each group."""
    (sizes, rest), operands = SIZES, Operands(place)
    offsets = operands.input("offsets", (len(sizes),), torch.int32, values=ends(sizes))
    x = operands.input("x", (sum(sizes) + rest, WIDTH), BF16)
    parts = empty_grouped(x, len(sizes), (-1, 1), E4M3, "fp32")
    out = Quantized(*(operands.like(n, p, output=True) for n, p in zip(("data", "scale"), parts, strict=True)))
    operands.expected = lambda: _whole_parts(reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32"))
    return operands, x, out, offsets


def _quantize_columns(place: Place, target: Target) -> Forms:
    for tile, kept in COLUMN_TILES[:2]:
        operands, x, out = _whole(place, (sum(SIZES[0]) + SIZES[1], 99), FP16, (-1, 1))
        launch = columns.plan_panels(x, out, "fp32", target, None, tile, kept)
        yield Form(f"{tile} kept {kept}", (launch,), operands)
        operands, x, out, offsets = _tokens(place)
        launch = columns.plan_panels(x, out, "fp32", target, offsets, tile, kept)
        yield Form(f"grouped {tile} kept {kept}", (launch,), operands)


def _stream_columns(place: Place, target: Target) -> Forms:
    # One cluster has panel after panel; the first ring does not hold one.
    whole = (
        STREAMS[0],
        stream_columns._STREAMS[0][1],
        stream_columns._STREAMS[3][1],
        *(tile for _, tile in stream_columns._STREAMS_OF_FEW[3:5]),
    )
    divided = ((stream_columns._STREAMS_OF_FEW[-1][1], (0, 128)), (stream_columns._BESIDE, (128, WIDTH)))
    for stream, span in (*((tile, None) for tile in whole), *divided):
        rows = max(64 * stream.STAGES * stream.CLUSTER, 600) + 5
        operands, x, out = _whole(place, (rows, WIDTH), BF16, (-1, 1))
        operands.expected = partial(_span_of_columns, x, span)
        name = f"{stream}" + (f" of columns {span[0]} to {span[1]}" if span else "")
        launch = stream_columns.plan_part(x, out, "fp32", target, None, stream, 1, span)
        yield Form(name, (launch,), operands)
    for stream in (STREAMS[0], stream_columns._STREAMS_OF_GROUPS[0][1], stream_columns._STREAMS_OF_GROUPS[-1][1]):
        operands, x, out, offsets = _tokens(place)
        launch = stream_columns.plan_part(x, out, "fp32", target, offsets, stream, 1)
        yield Form(f"grouped {stream}", (launch,), operands)


def _span_of_columns(x: Tensor, span: tuple[int, int] | None) -> dict[str, Expected]:
    return _whole_parts(reference.quantize(x, (-1, 1), E4M3, "fp32"), span)


def _walk_columns(place: Place, target: Target) -> Forms:
    for walk in (*(walk for _, walk in walk_columns._WALKS), WALKS[1]):
        operands, x, out, offsets = _tokens(place)
        yield Form(f"{walk}", (walk_columns.plan(x, out, "fp32", target, offsets, walk, 2),), operands)


def _rms_norm(place: Place, target: Target) -> Forms:
    for shape, dtype in (((16, 2048), BF16), ((3, 5, 2056), FP16)):
        operands = Operands(place)
        x, weight = operands.input("x", shape, dtype), operands.input("weight", shape[-1:], dtype)
        out = Quantized(*operands.written("row", x, ROW))
        operands.expected = partial(_normalized, x, weight)
        yield Form(f"{shape}", (plan_rms_norm(x, weight, 1e-6, out, "fp32", target),), operands)


def _normalized(x: Tensor, weight: Tensor) -> dict[str, Expected]:
    data, scales = reference.quantize(reference.rms_norm(x, weight, 1e-6), ROW, E4M3, "fp32")
    return {"row": Expected(data), "row_scale": Expected(scales)}


def _row_rstd(place: Place, target: Target) -> Forms:
    operands = Operands(place)
    x, rstd = operands.input("x", (7, 261), FP32), operands.output("rstd", (7,), FP32)
    operands.expected = lambda: {"rstd": Expected(1.0 / (x.double().square().mean(-1) + 1e-6).sqrt(), torch.ones(7))}
    yield Form("rows", (plan_row_rstd(x, rstd, 1e-6, target),), operands)


_WEIGHT_NAN: Final = ("x", "w", "w_scale", "bias")
_WEIGHT_FAR: Final = (("x", -2), ("w", -1), ("w_scale", -1), ("bias", -1))
# A constant weight is read early, and its scales.
_WEIGHT_EARLY: Final = frozenset({"w", "w_scale"})
_MX_NAN: Final = ("a", "a_scale", "b", "b_scale")

CUDA: Final = (
    KernelInfo(
        "scaled_mm.cu", _scaled_mm, 1e-5, 2.0**-10,
        emulated=(
            f"{'x'.join(FORWARD)} {SMALLEST} ragged", f"{'x'.join(WGRAD)} {X} ragged float32", "JAGGED_M", "JAGGED_K",
        ),
        nan=("a", "a_scale", "b", "b_scale", "bias"),
    ),
    KernelInfo(
        "gemv_a16w8.cu", _gemv_a16w8, 1e-5, 1e-4, overlaps=True,
        emulated=("K contiguous", "K not contiguous"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
    ),
    KernelInfo(
        "a16w8_tiles.cu", _a16w8_tiles, 1e-5, 2.0**-12, overlaps=True, early=_WEIGHT_EARLY,
        emulated=("M1 8x64", "M8 constant", "M16 K"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
    ),
    KernelInfo(
        "mm_a16w8.cu", _mm_a16w8, 1e-5, 1e-4, overlaps=True, early=_WEIGHT_EARLY,
        emulated=("128x64/1 stages1", "constant K"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
    ),
    KernelInfo(
        "splitk_a16w8.cu", _splitk_a16w8, 1e-5, 1e-4, overlaps=True, early=_WEIGHT_EARLY,
        emulated=("32x64", "constant 32x64"), nan=_WEIGHT_NAN, far=_WEIGHT_FAR,
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
        "quantize.cu", _quantize, nan=("x", "other", "rstd"), far=(("x", -2),),
        emulated=("(1, 128)", "dual", "silu_mul", "rms_norm", "grouped PLAIN", "grouped SILU_MUL_GRAD"),
    ),
    KernelInfo("quantize_rows.cu", _whole_rows, nan=("x",), far=(("x", -2),)),
    KernelInfo("quantize_columns.cu", _quantize_columns, emulated=("Tile", "grouped"), nan=("x",), far=(("x", -2),)),
    KernelInfo(
        "stream_columns.cu", _stream_columns, overlaps=True, early=frozenset({"x", "data", "scale", "offsets"}),
        emulated=("Stream", "grouped"), nan=("x",),
    ),
    KernelInfo("walk_columns.cu", _walk_columns, nan=("x",)),
    KernelInfo("rms_norm.cu", _rms_norm, nan=("x", "weight"), far=(("x", -2),)),
    KernelInfo("row_rstd.cu", _row_rstd, 1e-6, 1e-6, nan=("x",), far=(("x", -2),)),
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
