"""Every CUDA kernel in each of its main forms, at small shapes that fill its rings more than once, for a sanitizer.

    compute-sanitizer --tool memcheck python tests/support/every_kernel.py [substring ...]
    compute-sanitizer --tool racecheck --racecheck-report all python tests/support/every_kernel.py [substring ...]

On a Hopper GPU each launch, or each whose name has one of the substrings in it, runs three times on random operands;
then a line for each kernel file says how many launches ran. What they compute is for other tests to compare.

PyTorch's cache rounds tensors up to 512 bytes. Where each is an allocation of its own
(`PYTORCH_NO_CUDA_MEMORY_CACHING=1`) memcheck also reports loads of 16 aligned bytes, or of four scales, that begin in a
tensor and end past it: they stay in its page, and what lies there goes into no result.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Final, TypeAlias

import torch
from test_cuda_a16w8 import CONFIGS as GEMVS
from test_cuda_a16w8 import MANY, ROW_MAJOR
from test_cuda_a16w8_tiles import CONFIGS as WEIGHT_TILES
from test_cuda_grouped import GROUPS, ends
from test_cuda_mx import CONFIGS as MX_GEMVS
from test_cuda_mx_tiles import CONFIGS as MX_TILES
from test_cuda_quantize_columns import SMALL, STREAMS, WALKS
from test_cuda_splitk_a16w8 import CONFIGS as SPLITS
from torch import Tensor

from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, gemv_mx, mm_a16w8, mx_tiles, splitk_a16w8
from fp8fn.ops.cuda.gemm import scaled_mm as dense
from fp8fn.ops.cuda.gemm.operands import SCALES
from fp8fn.ops.cuda.gemm.scaled_mm import BK, KINDS, Config
from fp8fn.ops.cuda.quantize import quantize, quantize_rows, rms_norm, stream_columns, walk_columns
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize.quantize import BLOCK_SHAPES
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operand import Quantized as Operand
from fp8fn.ops.products import RoutedProduct, Routing, ScaledProduct, WeightProduct
from fp8fn.ops.quantization import PLAIN, RMS_NORM, SILU_MUL, SILU_MUL_GRAD, Quantization
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import Target, target_of
from fp8fn.ops.tuning.candidates import SMALLEST, X, tiles
from fp8fn.ops.tuning.problem import Problem, empty_product
from support.products import Parts, mx_product
from support.quantizers import quantization

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
RUNS: Final = 3
ROW, COLUMN, SQUARE = BLOCK_SHAPES
FORWARD, WGRAD = KINDS[:2]
WEIGHT_BLOCKS: Final = tuple(SCALES)
META: Final = torch.device("meta")

Launches: TypeAlias = Iterator[tuple[str, CudaLaunch]]


def launches(device: torch.device | str, target: Target) -> Launches:
    """Names, and launches on operands of `device`, unwritten but for offsets and ids; on `meta` they only compile."""
    made = torch.device(device)
    few = replace(target, multiprocessors=2)  # so that a persistent block has tile after tile
    for kernels, on in (
        (_scaled_mm, few), (_scaled_grouped_mm, few), (_gemv_a16w8, target), (_a16w8_tiles, target),
        (_mm_a16w8, few), (_splitk_a16w8, target), (_gemv_mx, target), (_mx_tiles, target), (_quantize, target),
        (_quantize_grouped, target), (_whole_rows, target), (_whole_columns, target), (_norms, target),
    ):  # fmt: skip
        for form, launch in kernels(made, on):
            yield f"{launch.kernel.file} {form}", launch


def _scaled_mm(device: torch.device, target: Target) -> Launches:
    def form(
        kinds: tuple[str, str], shape: str, config: Config, out: str = "bfloat16", *, bias: bool = False, batch: int = 1
    ) -> tuple[str, CudaLaunch]:
        # Their outputs leave by bulk stores, by pairs and by lines.
        m, n = {
            "even": (3 * config.BM, 2 * config.BN), "ragged": (config.BM + 9, config.BN + 13),
            "low": (config.BM, 2 * config.BN),
        }[shape]  # fmt: skip
        problem = Problem(m, n, BK, *kinds, batch=batch, out_type=out)
        (launch,) = dense.plan(empty_product(problem, "meta", target), config)
        stages = int(launch.options["STAGES"])
        k = 2 * stages * config.SPLIT * BK + (24 if shape == "ragged" else 0)
        operands = empty_product(replace(problem, k=k), device, target)
        if bias:
            operands = replace(operands, bias=torch.empty(n, device=device))
        name = f"{'x'.join(kinds)} {config} {shape} {out}{' bias' * bias}{f' batch{batch}' * (batch > 1)}"
        return name, dense.plan(operands, config)[0]

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


def _scaled_grouped_mm(device: torch.device, target: Target) -> Launches:
    sizes, rest = GROUPS["odd"]
    n, k, tokens, experts = 136, 24 * BK + 24, sum(sizes) + rest, len(sizes)  # no ring has more than 12 stages
    for kinds, config, bias in zip(KINDS, cycle((X, SMALLEST)), (True, False, False, True), strict=False):
        a_block, b_block = Problem(1, 1, 1, *kinds).blocks
        a = _quantized((tokens, k), a_block, device, column_major=False)
        b = _quantized((experts, k, n), b_block, device, column_major=True)
        added, out = (torch.empty(rows, n, dtype=BF16, device=device) for rows in (experts, tokens))
        parts = Parts(*a, a_block, *b, b_block, added if bias else None, out)
        of_groups = parts.product(target, offsets=ends(sizes, str(device)))
        yield f"JAGGED_M {'x'.join(kinds)} {config}", dense.plan(of_groups, config)[0]
    m, n = 200, 136
    for (sizes, rest), config in product((GROUPS["units"], GROUPS["large gaps"]), (X, SMALLEST)):
        a, b = (
            empty_grouped(torch.empty(sum(sizes) + rest, width, device=device), len(sizes), COLUMN, E4M3, "fp32")
            for width in (m, n)
        )
        out = torch.empty(len(sizes), m, n, dtype=BF16, device=device)
        parts = Parts(a[0].mT, a[1].mT, ROW, *b, COLUMN, None, out)
        (launch,) = dense.plan(parts.product(target, offsets=ends(sizes, str(device))), config)
        yield f"JAGGED_K unit{dict(launch.kernel.macros)['SPREAD_UNIT']} {config}", launch


def _rows_by_weight(
    shape: tuple[int, int, int], block: Block, device: torch.device, target: Target, *, dtype: torch.dtype = BF16,
    column_major: bool = True, constant: bool = False,
) -> WeightProduct:  # fmt: skip
    """With a bias of float32."""
    m, n, k = shape
    x, out = (torch.empty(m, size, dtype=dtype, device=device) for size in (k, n))
    w = Operand(*_quantized((k, n), block, device, column_major=column_major), block)
    bias = torch.empty(n, device=device)
    return WeightProduct(x=x, w=w, bias=bias, out=out, target=target, constant=constant)


def _gemv_a16w8(device: torch.device, target: Target) -> Launches:
    """K in chunks of x, of which a block has two and more."""
    configs = (*((config, True) for config in GEMVS[::2]), *((config, False) for config in ROW_MAJOR))
    for (config, lines), block in zip(configs, cycle(WEIGHT_BLOCKS), strict=False):
        m, n = config.ROWS + 3, 33
        endless = _rows_by_weight((m, n, 1 << 20), block, META, target, column_major=lines)
        k = 2 * int(gemv_a16w8.plan(endless, config)[0].options["K_CHUNK"]) * config.CLUSTER + 24
        given = _rows_by_weight((m, n, k), block, device, target, column_major=lines)
        yield f"K{'' if lines else ' not'} contiguous {config}", gemv_a16w8.plan(given, config)[0]


def _a16w8_tiles(device: torch.device, target: Target) -> Launches:
    rows = {8: cycle((1, 8)), 16: cycle((16, 13))}
    for config, constant in zip(WEIGHT_TILES, cycle((False, True, True)), strict=False):
        m = next(rows[config.ROWS])
        shape = m, 200, 2 * config.STAGES * config.CLUSTER * BK
        given = _rows_by_weight(shape, WEIGHT_BLOCKS[0], device, target, constant=constant)
        yield f"M{m}{' constant' * constant} {config}", a16w8_tiles.plan(given, config)[0]
    for (constant, m), divisions in a16w8_tiles.divisions().items():
        if not constant:
            continue
        of_others = set()
        configs = dict.fromkeys(division.config for division in divisions)
        for (config, cluster), dtype in zip(product(configs, (2, 1)), cycle((FP16, BF16, BF16, FP16)), strict=False):
            # Those without stages hold a block's part as a whole, which zeros follow here.
            stages, beyond = config.STAGES or config.HELD, 0 if config.STAGES else 48
            count = config.HELD - (dtype == FP16 and m == 16 and config.HELD > 3)
            config = replace(config, CLUSTER=cluster, STAGES=stages, HELD=count, READY=min(config.READY, count))
            k = cluster * stages * BK - beyond
            given = _rows_by_weight((m, 200, k), WEIGHT_BLOCKS[1], device, target, dtype=dtype, constant=True)
            yield f"M{m} K{k} constant {config}", a16w8_tiles.plan(given, config)[0]
            config = replace(config, READY=0)
            if config not in of_others:
                yield f"M{m} K{k} {config}", a16w8_tiles.plan(replace(given, constant=False), config)[0]
            of_others.add(config)


def _mm_a16w8(device: torch.device, target: Target) -> Launches:
    for config, block in zip(MANY[::3], cycle(WEIGHT_BLOCKS), strict=False):
        k = 2 * config.STAGES * config.K_PARTS * BK + 16
        given = _rows_by_weight((2 * config.BM + 9, 2 * config.BN + 8, k), block, device, target)
        yield f"{config}", mm_a16w8.plan(given, config)[0]
    for config in (mm_a16w8.Config(128, 1, 1, MATH=1, RESIDENT=4), mm_a16w8.Config(64, 1, 3, K_PARTS=2, RESIDENT=1)):
        for constant in (False, True):
            shape = config.BM + 9, config.BN + 8, config.STAGES * BK
            given = _rows_by_weight(shape, WEIGHT_BLOCKS[0], device, target, constant=constant)
            yield f"{'constant ' * constant}{config} all of K in flight", mm_a16w8.plan(given, config)[0]
    for config in (mm_a16w8.Config(32, 1, 4, K_PARTS=2, RESIDENT=2), mm_a16w8.Config(32, 1, 2, RESIDENT=2)):
        for k in (config.STAGES * BK, 2 * config.STAGES * BK + 144):
            shape = config.BM + 9, config.BN + 8, k
            given = _rows_by_weight(shape, WEIGHT_BLOCKS[0], device, target, constant=True)
            yield f"constant K{k} {config}", mm_a16w8.plan(given, config)[0]


def _splitk_a16w8(device: torch.device, target: Target) -> Launches:
    for config, block in zip(SPLITS, cycle(WEIGHT_BLOCKS), strict=False):
        stages = config.STAGES if config.HELD else 2 * config.STAGES + 1
        k = stages * config.CLUSTER * BK + (-112 if config.HELD else 16)
        for constant in (False, True):
            shape = config.ROWS + 9, config.BN + 6, k
            given = _rows_by_weight(shape, block, device, target, constant=constant)
            yield f"{'constant ' * constant}{config}", splitk_a16w8.plan(given, config)[0]


def _mx(shape: tuple[int, int, int], device: torch.device, target: Target, *, constant: bool = False) -> ScaledProduct:
    m, n, k = shape
    a = _quantized((m, k), (1, 32), device, column_major=False, scale="e8m0")
    b = _quantized((k, n), (32, 1), device, column_major=True, scale="e8m0")
    out = torch.empty(m, n, dtype=BF16, device=device)
    return mx_product((a[0], b[0]), (a[1], b[1]), out, target, constant=constant)


def _gemv_mx(device: torch.device, target: Target) -> Launches:
    for config in MX_GEMVS[::3]:
        m, n = config.ROWS + 3, 33
        chunk = int(gemv_mx.plan(_mx((m, n, 1 << 20), META, target), config)[0].options["K_CHUNK"])
        product = _mx((m, n, 2 * chunk * config.CLUSTER + 24), device, target)
        yield f"dense {config}", gemv_mx.plan(product, config)[0]
    tokens, choices, experts, block_m, n, k = 9, 2, 3, 16, 70, 1056
    chosen = torch.arange(tokens * choices).view(tokens, choices) * 7 % 5 - 1  # also experts that there are not
    layout = [part.to(device) for part in sort_tokens(chosen, experts, block_m)]
    for config in (gemv_a16w8.Config(8, 1, 4, 2, 6, 1, 2), gemv_a16w8.Config(16, 1, 2, 2, 2, 2, 2)):
        a = _quantized((tokens, k), (1, 32), device, column_major=False, scale="e8m0")
        w = _quantized((experts, k, n), (32, 1), device, column_major=True, scale="e8m0")
        weights = torch.empty(tokens * choices, device=device)
        out = torch.empty(tokens * choices, n, dtype=BF16, device=device)
        given = RoutedProduct(
            a=Operand(*a, (1, 32)), w=Operand(*w, (32, 1)), routing=Routing(*layout), a_div=choices, out=out,
            target=target, token_weights=weights,
        )  # fmt: skip
        yield f"routed {config}", gemv_mx.plan_moe(given, config)[0]


def _mx_tiles(device: torch.device, target: Target) -> Launches:
    for config, constant in zip(MX_TILES[::2], cycle((False, True)), strict=False):
        shape = config.ROWS + 3, 70, 2 * config.STAGES * config.CLUSTER * BK
        product = _mx(shape, device, target, constant=constant)
        yield f"{config}{' constant' * constant}", mx_tiles.plan(product, config)[0]


def _quantize(device: torch.device, target: Target) -> Launches:
    even, x, gate = (torch.empty(shape, dtype=BF16, device=device) for shape in ((256, 384), (131, 261), (131, 261)))
    weight, rstd = torch.empty(x.shape[1], dtype=BF16, device=device), torch.empty(x.shape[0], device=device)
    forms: dict[str, Quantization] = {
        "dual even": quantization(even, ROW, dual=True, target=target),
        **{f"{block}": quantization(x, block, target=target) for block in BLOCK_SHAPES},
        "dual": quantization(x, ROW, dual=True, target=target),
        "dual (128, 128)": quantization(x, SQUARE, dual=True, scale="e8m0", target=target),
        "silu_mul": quantization(gate, ROW, dual=True, source=SILU_MUL, other=x, target=target),
        "rms_norm": quantization(x, ROW, dual=True, source=RMS_NORM, other=weight, rstd=rstd, target=target),
    }
    for name, q in forms.items():
        yield name, quantize.plan(q, quantize.configure(q))[0]


def _quantize_grouped(device: torch.device, target: Target) -> Launches:
    for name, (sizes, rest) in {"small": GROUPS["units"], "large": GROUPS["large gaps"]}.items():
        offsets, inner = ends(sizes, str(device)), 136
        hidden = torch.empty(sum(sizes) + rest, 2 * inner, dtype=BF16, device=device)
        gate, up, grad = hidden[:, :inner], hidden[:, inner:], torch.empty_like(hidden[:, :inner])
        for source, x, other in ((PLAIN, hidden, None), (SILU_MUL, gate, up), (SILU_MUL_GRAD, hidden, grad)):
            q = quantization(x, ROW, dual=True, source=source, other=other, offsets=offsets, target=target)
            yield f"grouped {source.macro} {name}", quantize.plan(q, quantize.configure(q))[0]
        q = quantization(hidden, COLUMN, offsets=offsets, target=target)
        yield f"grouped (128, 1) {name}", quantize.plan(q, quantize.configure(q))[0]


def _whole_rows(device: torch.device, target: Target) -> Launches:
    for shape, dtype in (((2, 33, 1030), FP32), ((9, 8192), BF16)):
        q = quantization(torch.empty(shape, dtype=dtype, device=device), (1, -1), target=target)
        yield f"{shape}", quantize_rows.plan(q, quantize_rows.configure(q))[0]


def _whole_columns(device: torch.device, target: Target) -> Launches:
    sizes, rest, width = [0, 1, 1000, 17, 500], 5, 200
    offsets, rows = ends(sizes, str(device)), sum(sizes) + rest
    tokens = torch.empty(rows, width, dtype=BF16, device=device)
    grouped = quantization(tokens, (-1, 1), offsets=offsets, target=target)
    for config, kept in SMALL[:2]:
        q = quantization(torch.empty(rows, 99, dtype=FP16, device=device), (-1, 1), target=target)
        yield f"{config} kept {kept}", columns.plan(q, config, kept)[0]
        yield f"grouped {config} kept {kept}", columns.plan(grouped, config, kept)[0]
    # One cluster has panel after panel; the first ring does not hold one.
    whole = (
        STREAMS[0],
        stream_columns._STREAMS[0][1],
        stream_columns._STREAMS[3][1],
        *(config for _, config in stream_columns._STREAMS_OF_FEW[3:5]),
    )
    divided = ((stream_columns._STREAMS_OF_FEW[-1][1], (0, 128)), (stream_columns._BESIDE, (128, width)))
    for stream, span in (*((config, None) for config in whole), *divided):
        x = torch.empty(max(64 * stream.STAGES * stream.CLUSTER, 600) + 5, width, dtype=BF16, device=device)
        name = f"{stream}" + (f" of columns {span[0]} to {span[1]}" if span else "")
        yield name, stream_columns.plan_part(quantization(x, (-1, 1), target=target), stream, 1, span)
    for stream in (STREAMS[0], stream_columns._STREAMS_OF_GROUPS[0][1], stream_columns._STREAMS_OF_GROUPS[-1][1]):
        yield f"grouped {stream}", stream_columns.plan_part(grouped, stream, 1)
    for walk in (*(walk for _, walk in walk_columns._WALKS), WALKS[1]):
        yield f"{walk}", walk_columns.plan(grouped, walk, 2)[0]


def _norms(device: torch.device, target: Target) -> Launches:
    for shape, dtype in (((16, 2048), BF16), ((3, 5, 2056), FP16)):
        x, weight = (torch.empty(size, dtype=dtype, device=device) for size in (shape, shape[-1:]))
        q = quantization(x, ROW, source=RMS_NORM, other=weight, eps=1e-6, target=target)
        yield f"{shape}", rms_norm.plan(q, rms_norm.configure(q))[0]
    q = quantization(torch.empty(7, 261, device=device), ROW, source=RMS_NORM, eps=1e-6, target=target)
    yield "rows", rms_norm.plan_row_rstd(q, torch.empty(7, device=device))


def _quantized(
    shape: tuple[int, ...], block: Block, device: torch.device, *, column_major: bool, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Data and scales of an operand as the quantizers lay them."""
    data = empty_data(torch.empty(shape, device="meta"), block, E4M3, column_major)
    data = torch.empty_strided(data.shape, data.stride(), dtype=E4M3, device=device)
    return data, empty_scale(data, block, scale, column_major)


def fill(launch: CudaLaunch) -> None:
    """Random finite values into all tensors of a launch, but for integers."""
    for arg in launch.args.values():
        x = arg.tensor if isinstance(arg, TensorMap) else arg
        if not isinstance(x, Tensor) or x.dtype == torch.int32:
            continue
        if x.dtype == torch.float8_e8m0fnu:
            x.view(torch.uint8).copy_(torch.randint(120, 135, x.shape, device=x.device))
        else:
            x.copy_(torch.randn(x.shape, device=x.device))


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
        fill(launch)
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
