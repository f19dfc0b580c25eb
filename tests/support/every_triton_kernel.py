"""Every kernel in Triton in its main forms, at small shapes and tiles that make several tiles along every axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference
from fp8fn.ops.layout import BLOCKS, WHOLE, Block, matrix_strides, scale_shape
from fp8fn.ops.operands import Quantization, Quantized, RoutedProduct, Routing, ScaledProduct, WeightProduct
from fp8fn.ops.quantize import BESIDE_SQUARE, SQUARE
from fp8fn.ops.quantize_grouped import GROUPED_BLOCKS
from fp8fn.ops.reference.statistics import statistics
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.statistics import WIDTH, Column, Watched
from fp8fn.ops.targets import Target
from fp8fn.ops.triton import grouped_mm_a16w8, grouped_tma, mm_a16w8, scaled_grouped_mm, scaled_mm, scaled_mm_tma
from fp8fn.ops.triton.amax import plan_amax
from fp8fn.ops.triton.dequantize import DequantizeTile, plan_dequantize
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.moe_gemm import plan_moe_gemm
from fp8fn.ops.triton.mx_mm import plan_mx_mm
from fp8fn.ops.triton.mx_mm_scaled import plan_mx_mm_scaled
from fp8fn.ops.triton.mx_mm_tma import plan_mx_mm_tma
from fp8fn.ops.triton.pull_rows import Places, Source, plan_pull_rows
from fp8fn.ops.triton.quantize import plan_quantize
from fp8fn.ops.triton.quantize_dual import DUAL_BLOCKS, plan_quantize_dual
from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped, plan_quantize_grouped_dual
from fp8fn.ops.triton.statistics import PROGRAMS, SUMS, Row, plan_statistics
from fp8fn.ops.triton.swizzle_scales import SCRATCH, plan_swizzle
from fp8fn.ops.triton.turn import TurnTile, plan_turn
from fp8fn.ops.triton.views import ceil_div
from fp8fn.ops.tuning import mx
from support import kernel_info
from support.kernel_info import Expected, Form, Forms, KernelInfo, Operands, Place, dequantized
from support.operands.experts import FORMATS
from support.operands.groups import ends
from support.quantizers import quantization

BF16, FP32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
M, N, K = 70, 130, 300
PAIRS: Final[dict[str, tuple[Block, Block, str]]] = {
    "forward": ((1, 128), (128, 128), "fp32"), "wgrad": ((1, 128), (128, 1), "fp32"),
    "rowwise": ((1, -1), (-1, 1), "fp32"), "tensorwise": ((-1, -1), (-1, -1), "fp32"),
    "MX": ((1, 32), (32, 1), "e8m0"),
}  # fmt: skip

SOURCES: Final = ("x", "codes", "silu_mul", "rms_norm")
STATISTICS: Final = tuple((block, "e8m0" if 32 in block else "fp32") for block in BLOCKS)


def _product(
    place: Place, kind: str, target: Target, k: int = K, *, turned: bool = False, batch: tuple[int, ...] = ()
) -> tuple[Operands, ScaledProduct]:
    """A product of operands contiguous along K, or with `turned` along M and N; `batch` is of a and of the output."""
    (a_block, b_block, scale), operands = PAIRS[kind], Operands(place)
    a = operands.quantized("a", (*batch, M, k), a_block, column_major=turned, scale=scale)
    b = operands.quantized("b", (k, N), b_block, column_major=not turned, scale=scale)
    bias, out = operands.input("bias", (N,), BF16), operands.output("out", (*batch, M, N), FP32)
    operands.expected = lambda: {"out": kernel_info.product(dequantized(a), dequantized(b), bias)}
    return operands, ScaledProduct(a=a, b=b, bias=bias, out=out, target=target)


def _scaled_mm(place: Place, target: Target) -> Forms:
    for kind in PAIRS:
        operands, given = _product(place, kind, target)
        yield Form(kind, scaled_mm.plan_scaled_mm(given, GemmConfig(32, 64, 4, 2, GROUP=2)), operands)


def _scaled_mm_tma(place: Place, target: Target) -> Forms:
    for kind in ("forward", "wgrad", "rowwise", "tensorwise"):
        operands, given = _product(place, kind, target)
        config = scaled_mm_tma.TmaConfig(BM=64, BN=64, GROUP=2)
        yield Form(kind, scaled_mm_tma.plan_scaled_mm_tma(given, config), operands)
    for name, of in (("TN", {"turned": True}), ("batch", {"batch": (3,)})):
        operands, given = _product(place, "wgrad", target, **of)  # type: ignore[arg-type]
        yield Form(name, scaled_mm_tma.plan_scaled_mm_tma(given, config), operands)


def _mx(plan: Callable[..., Any], config: mx.MxConfig, place: Place, target: Target) -> Forms:
    for k in (K, 256):
        operands, given = _product(place, "MX", target, k)
        yield Form(f"K{k}", plan(given, config), operands)


def _mx_tma(place: Place, target: Target) -> Forms:
    config = mx.MxConfig(128, 128, 128, 8, 3, GROUP=2)
    yield from _mx(plan_mx_mm_tma, config, place, target)
    operands, given = _product(place, "MX", target, batch=(3,))
    yield Form("batch", plan_mx_mm_tma(given, config), operands)


def _mx_mm(place: Place, target: Target) -> Forms:
    for splits in (1, 3):
        config = mx.MxConfig(16, 32, 64, 4, 2, SPLITS=splits)
        for form in _mx(plan_mx_mm, config, place, target):
            yield form._replace(name=f"{form.name} splits{splits}")


def _swizzle_scales(place: Place, target: Target) -> Forms:
    """Blocks of 128 lines by 4 scales along K; 10 blocks along K make a second program of few; groups along K."""
    for m, n, k in ((70, 130, 300), (256, 128, 1200)):
        operands, (a_block, b_block, scale) = Operands(place), PAIRS["MX"]
        a = operands.quantized("a", (m, k), a_block, column_major=False, scale=scale)
        b = operands.quantized("b", (k, n), b_block, column_major=True, scale=scale)
        out = torch.empty(m, n, dtype=BF16, device=place.device)
        sizes = zip(SCRATCH.values(), (m, n), strict=True)
        into = {
            name: operands.output(name, (ceil_div(size, 128), ceil_div(k, 128), 2, 256), torch.uint8)
            for name, size in sizes
        }
        launch = plan_swizzle(ScaledProduct(a=a, b=b, out=out, target=target), into)
        operands.expected = partial(_in_blocks, {"a_swizzled": a.scale, "b_swizzled": b.scale.mT})
        yield Form(f"K{k}", (launch,), operands)
    yield _swizzled_groups(place, target)


def _swizzled_groups(place: Place, target: Target) -> Form:
    """Groups along K: the scales of each are in blocks of its own, and the rest of the last one is zeros."""
    operands, ends_, tokens, experts = Operands(place), ends(SIZES), sum(SIZES) + REST, len(SIZES)
    offsets = operands.input("offsets", (experts,), torch.int32, values=ends_)
    a, b = (kernel_info.spread(operands, name, tokens, size, ends_, (32, 1)) for name, size in (("a", M), ("b", N)))
    blocks_k = (tokens + 31) // 128 + experts
    into = {
        name: operands.output(name, (ceil_div(size, 128), blocks_k, 2, 256), torch.uint8)
        for name, size in zip(SCRATCH.values(), (M, N), strict=True)
    }
    out = torch.empty(experts, M, N, dtype=BF16, device=place.device)
    product = ScaledProduct(
        a=Quantized(a.data.mT, a.scale.mT, (1, 32)), b=b, offsets=offsets, out=out, target=target
    )  # fmt: skip

    def apart(scale: Tensor) -> Tensor:
        """The scales `(lines, parts)` with each group's from a multiple of 4 on."""
        made, start = torch.zeros(len(scale), 4 * blocks_k, dtype=torch.uint8), 0
        for group, size in enumerate(SIZES):
            own = scale.view(torch.uint8)[:, start // 32 + group :][:, : ceil_div(size, 32)]
            made[:, (start // 128 + group) * 4 :][:, : own.shape[1]] = own
            start += size
        return made

    operands.expected = lambda: _in_blocks({"a_swizzled": apart(a.scale.mT), "b_swizzled": apart(b.scale.mT)})
    return Form("groups along K", (plan_swizzle(product, into),), operands)


def _in_blocks(scales: dict[str, Tensor]) -> dict[str, Expected]:
    """Byte `16 i + 4 j + l` of a block is the scale of its line `i + 32 j` at place `l` along K."""
    found = {}
    for name, scale in scales.items():
        lines, depth = (ceil_div(size, of) for size, of in zip(scale.shape, (128, 4), strict=True))
        whole = torch.zeros(128 * lines, 4 * depth, dtype=torch.uint8)
        whole[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
        blocks = whole.view(lines, 4, 32, depth, 4).permute(0, 3, 2, 1, 4)
        found[name] = Expected(blocks.reshape(lines, depth, 2, 256))
    return found


def _mm_a16w8(place: Place, target: Target) -> Forms:
    for block in BLOCKS:
        operands = Operands(place)
        x = operands.input("x", (40, K), BF16)
        w = operands.quantized("w", (K, N), block, column_major=True, scale="e8m0" if 32 in block else "fp32")
        bias, out = operands.input("bias", (N,), FP32), operands.output("out", (40, N), FP32)
        given = WeightProduct(x=x, w=w, bias=bias, out=out, target=target)
        operands.expected = partial(_weight_product, given)
        config = mm_a16w8.A16W8Config(32, 64, 32, 4, 2, GROUP=2)
        yield Form(f"{block}", mm_a16w8.plan_mm_a16w8(given, config), operands)


def _weight_product(given: WeightProduct) -> dict[str, Expected]:
    value, magnitude, *_ = kernel_info.product(given.x, dequantized(given.w), given.bias)
    assert magnitude is not None
    # If a scale changes with each element along K, `w * scale` is rounded to the type of x.
    return {"out": Expected(value, magnitude * (2**-8 / 1e-5 if given.w.block[0] == 1 else 1.0))}


def _moe_gemm(place: Place, target: Target) -> Forms:
    tokens, choices, experts, block_m, n, k = 9, 2, 3, 16, 70, 200
    chosen = torch.arange(tokens * choices).view(tokens, choices) * 7 % 5 - 1  # also experts that there are not
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    for kind, config in (("mx", mx.MxConfig(16, 32, 64, 4, 2)), ("blockwise", mx.MxConfig(16, 32, 128, 4, 2))):
        operands, (a_block, w_block, scale) = Operands(place), FORMATS[kind]
        layout = [
            operands.input(name, part.shape, part.dtype, values=part)
            for name, part in zip(names, sort_tokens(chosen, experts, block_m), strict=True)
        ]
        a = operands.quantized("a", (tokens, k), a_block, column_major=False, scale=scale)
        w = operands.quantized("w", (experts, k, n), w_block, column_major=True, scale=scale)
        weights = operands.input("token_weights", (tokens * choices,), FP32)
        out = operands.output("out", (tokens * choices, n), FP32)
        routed = RoutedProduct(
            a=a, w=w, routing=Routing(*layout), a_div=choices, token_weights=weights, out=out, target=target
        )
        operands.expected = partial(kernel_info.routed_product, routed)
        yield Form(kind, plan_moe_gemm(routed, config), operands)


SIZES, REST = (0, 1, 40, 33, 129), 5
GROUPED: Final = ("forward", "rowwise", "MX")


def _rows_of_groups(
    plan: Callable[..., Any], config: GemmConfig, kinds: tuple[str, ...], place: Place, target: Target
) -> Forms:
    """Contiguous groups of rows, and the first rows of each expert's matrix."""
    offsets_, tokens, experts = ends(SIZES), sum(SIZES) + REST, len(SIZES)
    for kind in kinds:
        (a_block, b_block, scale), operands = PAIRS[kind], Operands(place)
        offsets = operands.input("offsets", (experts,), torch.int32, values=offsets_)
        a = operands.quantized("a", (tokens, K), a_block, column_major=False, scale=scale)
        b = operands.quantized("b", (experts, K, N), b_block, column_major=True, scale=scale)
        bias, out = operands.input("bias", (experts, N), BF16), operands.output("out", (tokens, N), FP32)
        given = ScaledProduct(a=a, b=b, bias=bias, offsets=offsets, out=out, target=target)
        operands.expected = partial(kernel_info.grouped_product, given)
        yield Form(f"rows {kind}", plan(given, config), operands)
    room = max(SIZES) + REST
    for kind, zeros in zip(kinds, (True, False, True), strict=True):
        (a_block, b_block, scale), operands = PAIRS[kind], Operands(place)
        counts = operands.input("counts", (experts,), torch.int32, values=torch.tensor(SIZES, dtype=torch.int32))
        a = operands.quantized("a", (experts, room, K), a_block, column_major=False, scale=scale)
        b = operands.quantized("b", (experts, K, N), b_block, column_major=True, scale=scale)
        bias, out = operands.input("bias", (experts, N), BF16), operands.output("out", (experts, room, N), FP32)
        given = ScaledProduct(a=a, b=b, bias=bias, counts=counts, zeros=zeros, out=out, target=target)
        operands.expected = partial(kernel_info.counted_product, given, config.BM)
        yield Form(f"counts {kind}", plan(given, config), operands)


def _scaled_grouped_mm(place: Place, target: Target) -> Forms:
    plan, config = scaled_grouped_mm.plan_scaled_grouped_mm, GemmConfig(32, 64, 4, 2, GROUP=2)
    yield from _rows_of_groups(plan, config, GROUPED, place, target)
    yield from _groups_of_tokens(plan, config, GROUPED_BLOCKS, place, target)


def _grouped_tma(place: Place, target: Target) -> Forms:
    plan, config = grouped_tma.plan_grouped_tma, GemmConfig(128, 128, 8, 3, GROUP=2)
    yield from _rows_of_groups(plan, config, GROUPED, place, target)
    yield from _groups_of_tokens(plan, config, [block for block in GROUPED_BLOCKS if block[0] > 0], place, target)


def _groups_of_tokens(
    plan: Callable[..., Any], config: GemmConfig, blocks: Sequence[Block], place: Place, target: Target
) -> Forms:
    """Groups along K, whose tokens are summed over."""
    offsets_, tokens, experts = ends(SIZES), sum(SIZES) + REST, len(SIZES)
    for block in blocks:
        operands = Operands(place)
        offsets = operands.input("offsets", (experts,), torch.int32, values=offsets_)
        beside = (block[0], 1)  # of one side only, squares have one scale
        a, b = (
            kernel_info.spread(operands, name, tokens, width, offsets_, of)
            for name, width, of in (("a", M, beside), ("b", N, block))
        )
        out = operands.output("out", (experts, M, N), FP32)
        given = ScaledProduct(a=a.mT, b=b, offsets=offsets, out=out, target=target)
        operands.expected = partial(kernel_info.grouped_product, given)
        yield Form(f"tokens {block}", plan(given, config), operands)


def _grouped_mm_a16w8(place: Place, target: Target) -> Forms:
    tokens, groups = sum(SIZES) + REST, len(SIZES)
    config = mm_a16w8.A16W8Config(32, 64, 32, 4, 2, GROUP=2)
    for block in ((128, 128), (1, 128), (-1, 1), (32, 1)):
        operands = Operands(place)
        offsets = operands.input("offsets", (groups,), torch.int32, values=ends(SIZES))
        x = operands.input("x", (tokens, K), BF16)
        w = operands.quantized("w", (groups, K, N), block, column_major=True, scale="e8m0" if 32 in block else "fp32")
        bias, out = operands.input("bias", (groups, N), FP32), operands.output("out", (tokens, N), FP32)
        given = WeightProduct(x=x, w=w, bias=bias, offsets=offsets, out=out, target=target)
        operands.expected = partial(_grouped_weight_product, given)
        yield Form(f"{block}", grouped_mm_a16w8.plan_grouped_mm_a16w8(given, config), operands)


def _grouped_weight_product(given: WeightProduct) -> dict[str, Expected]:
    """One product for each group, and zeros for the rows past the last."""
    value, magnitude = torch.zeros(2, given.m, given.n, dtype=F64)
    end = 0
    for group, size in enumerate(SIZES):
        rows, end = slice(end, end + size), end + size
        assert given.bias is not None
        part = replace(given, x=given.x[rows], w=Quantized(given.w.data[group], given.w.scale[group], given.w.block))
        found = _weight_product(replace(part, bias=given.bias[group]))["out"]
        assert found.magnitude is not None
        value[rows], magnitude[rows] = found.value, found.magnitude
    return {"out": Expected(value, magnitude)}


def _quantize(place: Place, target: Target) -> Forms:
    for block, scale in product(BLOCKS, ("fp32", "e8m0")):
        operands = Operands(place)
        q = quantization(operands.input("x", (137, 261), BF16), block, scale=scale, target=target)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(_parts, q, partial(reference.quantize, q.x, block, E4M3, scale))
        yield Form(f"{block} {scale}", plan_quantize(q), operands)
    yield from _quantize_in_parts(place, target)
    yield from _quantize_given(place, target)


def _quantize_in_parts(place: Place, target: Target) -> Forms:
    """Whole columns of a row-major matrix, which more than one program takes."""
    for scale in ("fp32", "e8m0"):
        operands = Operands(place)
        q = quantization(operands.input("x", (2051, 137), BF16), (WHOLE, 1), scale=scale, target=target)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(_parts, q, partial(reference.quantize, q.x, q.block, E4M3, scale))
        yield Form(f"in parts {scale}", plan_quantize(q, in_parts=True), operands)


def _quantize_given(place: Place, target: Target) -> Forms:
    """The maxima are given, and twice as large as those of `x`."""
    for block in BLOCKS:
        operands = Operands(place)
        x = operands.input("x", (137, 261), BF16)
        largest = operands.input("amax", scale_shape(x.shape, block), FP32, values=_maxima(x, block))
        q = kernel_info.with_outputs(operands, quantization(x, block, amax=largest, target=target))
        operands.expected = partial(_parts, q, partial(reference.quantize, x, block, E4M3, "fp32", largest))
        yield Form(f"given {block}", plan_quantize(q), operands)


def _maxima(x: Tensor, block: Block) -> Tensor | None:
    return None if x.is_meta else 2 * reference.amax(x.cpu(), block)


def _amax(place: Place, target: Target) -> Forms:
    for block in BLOCKS:
        operands = Operands(place)
        x = operands.input("x", (137, 261), BF16)
        out = operands.output("amax", scale_shape(x.shape, block), FP32)
        operands.expected = partial(_largest, x, block)
        yield Form(f"{block}", plan_amax(x, block, out, target), operands)


def _largest(x: Tensor, block: Block) -> dict[str, Expected]:
    return {"amax": Expected(reference.amax(x, block))}


def _quantize_dual(place: Place, target: Target) -> Forms:
    for block in DUAL_BLOCKS:
        operands, scale = Operands(place), "e8m0" if 32 in block else "fp32"
        q = quantization(operands.input("x", (137, 261), BF16), block, dual=True, scale=scale, target=target)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(_parts, q, partial(reference.quantize_dual, q.x, block, E4M3, scale))
        yield Form(f"{block}", plan_quantize_dual(q), operands)
    for block in BESIDE_SQUARE:
        operands = Operands(place)
        x = operands.input("x", (137, 261), BF16)
        q = quantization(x, block, dual=True, dual_block=SQUARE, target=target)
        q = kernel_info.with_outputs(operands, q)
        operands.expected = partial(
            _parts, q, partial(reference.quantize_dual, q.x, block, E4M3, "fp32", dual_block=SQUARE)
        )
        yield Form(f"{block} and {SQUARE}", plan_quantize_dual(q), operands)


def _quantize_grouped(place: Place, target: Target) -> Forms:
    for block in GROUPED_BLOCKS:
        operands, q = _tokens(place, target, block)
        made = partial(reference.quantize_grouped, q.x, operands.inputs["offsets"], block, E4M3, q.scale)
        operands.expected = partial(_parts, q, made)
        yield Form(f"{block}", plan_quantize_grouped(q), operands)
    for block, beside in (((1, 128), None), ((1, 32), None), ((1, 128), SQUARE)):
        operands, q = _tokens(place, target, block, dual=True, dual_block=beside)
        made = partial(reference.quantize_grouped_dual, q.x, operands.inputs["offsets"], block, E4M3, q.scale, beside)
        operands.expected = partial(_parts, q, made)
        yield Form(
            f"dual {block}" if beside is None else f"dual {block} {beside}", plan_quantize_grouped_dual(q), operands
        )


def _tokens(
    place: Place, target: Target, block: Block, *, dual: bool = False, dual_block: Block | None = None
) -> tuple[Operands, Quantization]:
    operands = Operands(place)
    offsets = operands.input("offsets", (len(SIZES),), torch.int32, values=ends(SIZES))
    x = operands.input("x", (sum(SIZES) + REST, N), BF16)
    scale = "rceil" if 32 in block else "fp32"
    form: dict[str, Any] = {"scale": scale, "dual": dual, "dual_block": dual_block}
    q = quantization(x, block, offsets=offsets, target=target, **form)
    return operands, kernel_info.with_outputs(operands, q)


def _statistics(place: Place, target: Target) -> Forms:
    """Statistics of operands whose data is of larger values, so that some of `x` saturates, and some is flushed."""
    for source, (block, scale) in product(SOURCES, STATISTICS):
        operands, shape = Operands(place), (137, 261)
        wide = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 261, base=2)
        made = reference.quantize(wide.flip(1) if source == "x" else wide, block, E4M3, scale)
        data, scales = (
            operands.input(name, part.shape, part.dtype, strides=part.stride(), values=part)
            for name, part in zip(("data", "scale"), made, strict=True)
        )
        inputs = {"x": ("x",), "silu_mul": ("x", "up"), "rms_norm": ("x", "weight", "rstd")}.get(source, ())
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
        shapes = {"x": (shape, BF16), "up": (shape, BF16), "weight": (shape[1:], BF16), "rstd": (shape[:1], FP32)}
        given = tuple(operands.input(name, *shapes[name]) for name in inputs)
        watched = Watched(Quantized(data, scales, block), source, given)
        ended = operands.input("ended", (1,), torch.int32, values=torch.zeros(1, dtype=torch.int32))
        into = Row(operands.output("row", (WIDTH,), F64), operands.output("sums", (PROGRAMS, SUMS), F64), ended)
        operands.expected = partial(_row, watched, into)
        yield Form(f"{source} {block} {scale}", (plan_statistics(watched, into, target),), operands)


def _row(watched: Watched, into: Row) -> dict[str, Expected]:
    """All columns but `BEGUN`, which holds the pattern of an unwritten output; so does `STEP` then."""
    value, written = torch.zeros(WIDTH, dtype=F64), torch.zeros(WIDTH, dtype=torch.bool)
    value[: Column.STEP] = statistics(watched)
    value[Column.STEP] = into.row[Column.BEGUN]
    written[: Column.BEGUN] = written[Column.DUE] = True
    sums = torch.zeros(WIDTH, dtype=F64)
    # The largest magnitude that is no element of memory is rounded to float32.
    for column in (Column.SIGNAL, Column.NOISE, *([] if watched.source == "x" else [Column.AMAX])):
        sums[column] = value[column]
    return {"row": Expected(value, sums, written)}


def _turn(place: Place, target: Target) -> Forms:
    """Tiles that do not fit, a batch, and tiles that do."""
    for name, shape in (("ragged", (70, 130)), ("batch", (3, 33, 64)), ("even", (64, 128))):
        operands = Operands(place)
        x = operands.input("x", shape, E4M3, strides=matrix_strides(shape, False, 16))
        out = operands.output("out", shape, E4M3, strides=matrix_strides(shape, True, 16))
        operands.expected = partial(_same, x)
        yield Form(name, plan_turn(x, out, target, TurnTile(32, 64, 4)), operands)


def _same(x: Tensor) -> dict[str, Expected]:
    return {"out": Expected(x)}


def _dequantize(place: Place, target: Target) -> Forms:
    for block in ((1, 128), (128, 128), (1, -1), (-1, -1)):
        operands = Operands(place)
        q = operands.quantized("data", (140, 700), block, column_major=False)
        out = operands.output("out", (140, 700), BF16)
        operands.expected = partial(_times_scales, q)
        yield Form(f"{block}", (plan_dequantize(q, out, target, DequantizeTile(32, 256)),), operands)


def _times_scales(q: Quantized) -> dict[str, Expected]:
    return {"out": Expected(reference.dequantize(*q).to(BF16))}


def _pull_rows(place: Place, target: Target) -> Forms:
    """Rows of two ranks: FP8 with scales, rows of whole 16 bytes and not, and another type; some rows are absent."""
    for dtype, width in ((E4M3, 200), (E4M3, 256), (BF16, 131), (FP32, 260)):
        operands, rows = Operands(place), 9
        x = [torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        made = [reference.quantize(part, (1, 128), E4M3, "pow2") if dtype == E4M3 else (part.to(dtype),) for part in x]
        after = ceil_div(rows * width, 16) * 16 if dtype == E4M3 else 0
        parts = [_in_bytes(part, after) for part in made]
        ranks = [operands.input(f"rank{i}", part.shape, torch.uint8, values=part) for i, part in enumerate(parts)]
        addresses = torch.tensor([part.data_ptr() for part in ranks])
        rank = torch.tensor([0, 1, -1, 1, 0, 0, -1], dtype=torch.int32)
        row = torch.tensor([8, 0, 0, 4, 1, 1, 9])
        places = Places(
            operands.input("rank", rank.shape, torch.int32, values=rank),
            operands.input("row", row.shape, torch.int64, values=row),
            operands.input("absent", (), FP32, values=torch.tensor(-3.0)),
        )
        source = Source(operands.input("addresses", (2,), torch.int64, values=addresses), dtype, after)
        out = operands.output("out", (len(rank), width), FP32 if dtype == FP32 else BF16)
        values = torch.stack(
            [reference.dequantize(*part, (1, 128)) if len(part) == 2 else part[0].float() for part in made]
        )
        expected = torch.where(rank[:, None] < 0, -3.0, values[rank, row.clamp_max(rows - 1)])
        operands.expected = partial(_pulled, expected.to(out.dtype))
        yield Form(f"{dtype} {width}", (plan_pull_rows(source, places, out, target),), operands)


def _in_bytes(parts: tuple[Tensor, ...], scales_at: int) -> Tensor:
    """Data, and from `scales_at` on the scales as e8m0."""
    data, *scales = parts
    made = data.contiguous().view(torch.uint8).flatten()
    if not scales:
        return made
    between = made.new_zeros(scales_at - made.numel())
    return torch.cat([made, between, scales[0].to(torch.float8_e8m0fnu).contiguous().view(torch.uint8).flatten()])


def _values(data: Tensor, scale: Tensor | None = None) -> Tensor:
    return data.float() if scale is None else reference.dequantize(data, scale, (1, 128))


def _pulled(expected: Tensor) -> dict[str, Expected]:
    return {"out": Expected(expected)}


def _parts(q: Quantization, made: Callable[[], tuple[Tensor, ...]]) -> dict[str, Expected]:
    return {name: Expected(part) for name, part in zip(q.outputs.tensors, made(), strict=True)}


_NAN: Final = ("a", "a_scale", "b", "b_scale", "bias")
_FAR: Final = (("a", -2), ("b", -1))
_SCALED: Final = ("forward", "wgrad", "rowwise", "tensorwise")
_TOKENS: Final = ("rows", *(f"counts {kind}" for kind in GROUPED[:2]), *(f"tokens {block}" for block in GROUPED_BLOCKS))

TRITON: Final = (
    KernelInfo("scaled_mm.py", _scaled_mm, 1e-5, 2.0**-10, emulated=tuple(PAIRS), nan=_NAN, far=_FAR),
    KernelInfo("scaled_mm_tma.py", _scaled_mm_tma, 1e-5, 2.0**-10, emulated=(*_SCALED, "batch"), nan=_NAN),
    KernelInfo("scaled_grouped_mm.py", _scaled_grouped_mm, 1e-5, 2.0**-10, emulated=_TOKENS, nan=_NAN),
    KernelInfo(
        "grouped_tma.py", _grouped_tma, 1e-5, 2.0**-10,
        emulated=(
            *(f"{groups} {kind}" for groups in ("rows", "counts") for kind in GROUPED),
            *(f"tokens {block}" for block in GROUPED_BLOCKS if block[0] > 0),
        ),
        nan=_NAN,
        targets=("sm100",),
    ),
    KernelInfo(
        "mm_a16w8.py", _mm_a16w8, 1e-5, 1e-5, overlaps=True, emulated=tuple(str(block) for block in BLOCKS),
        nan=("x", "w", "w_scale", "bias"), far=(("x", -2), ("w", -1)),
    ),
    KernelInfo(
        "grouped_mm_a16w8.py", _grouped_mm_a16w8, 1e-5, 1e-5, overlaps=True,
        emulated=("(128, 128)", "(1", "(-1", "(32"),
        nan=("x", "w", "w_scale", "bias"), far=(("x", -2),),
    ),
    KernelInfo("mx_mm.py", _mx_mm, 1e-5, 2.0**-12, emulated=("K300 splits1", "K300 splits3"), nan=_NAN, far=_FAR),
    KernelInfo(
        "mx_mm_scaled.py", partial(_mx, plan_mx_mm_scaled, mx.MxConfig(32, 32, 64, 4, 2, GROUP=2)), 1e-5, 2.0**-12,
        emulated=("K300", "K256"), nan=_NAN, far=_FAR, targets=("gfx950", "sm100"),
    ),
    KernelInfo(
        "mx_mm_tma.py", _mx_tma, 1e-5, 2.0**-12, emulated=("K300", "K256", "batch"), nan=_NAN, targets=("sm100",),
    ),
    KernelInfo(
        "swizzle_scales.py", _swizzle_scales, emulated=("K300", "K1200", "groups"),
        far=(("a_scale", -2), ("b_scale", -1)), targets=("sm100",),
    ),
    KernelInfo(
        "moe_gemm.py", _moe_gemm, 1e-5, 2.0**-10, emulated=("mx", "blockwise"),
        nan=("a", "a_scale", "w", "w_scale", "token_weights"), far=(("a", -2),),
    ),
    KernelInfo(
        "quantize.py", _quantize, nan=("x",), far=(("x", -2),),
        emulated=(
            *(f"{block} {scale}" for block in BLOCKS for scale in ("fp32", "e8m0")),
            *(f"given {block}" for block in BLOCKS), "in parts fp32", "in parts e8m0",
        ),
    ),
    KernelInfo("amax.py", _amax, emulated=tuple(map(str, BLOCKS)), nan=("x",), far=(("x", -2),)),
    KernelInfo(
        "quantize_dual.py", _quantize_dual, emulated=(*map(str, DUAL_BLOCKS), "(128, 1) and"), nan=("x",),
        far=(("x", -2),),
    ),
    KernelInfo(
        "quantize_grouped.py", _quantize_grouped, emulated=(*map(str, GROUPED_BLOCKS), "dual"), nan=("x",),
        far=(("x", -2),),
    ),
    KernelInfo(
        "statistics.py", _statistics, 1e-6, 1e-5, far=(("x", -2), ("data", -2)),
        emulated=(*(f"x {block}" for block in BLOCKS), "codes (1, 128)", "codes (1, 32)", "silu_mul", "rms_norm"),
    ),
    KernelInfo("turn.py", _turn, emulated=("ragged", "batch", "even"), far=(("x", -2),)),
    KernelInfo(
        "dequantize.py", _dequantize, emulated=("(1, 128", "(128, 128", "(1, -1", "(-1, -1"),
        nan=("data", "data_scale"), far=(("data", -2),),
    ),
    KernelInfo("pull_rows.py", _pull_rows, emulated=(f"{E4M3} 200", f"{E4M3} 256", f"{BF16}", f"{FP32}")),
)  # fmt: skip
