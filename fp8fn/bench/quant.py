"""Quantizers beside torchao's and a copy: `python -m fp8fn bench quant`.

TB/s count the ideal bytes: x `(M, N)` in bf16 read once, each output and its scales written once. With one scale for
the matrix, x is read a second time unless its largest magnitude is given. SNR is that of the dequantized outputs. The
ceiling is a copy of x. The L2 is flushed by reads: after a flush by writes, dirty lines would be written back while the
quantizer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench import command, peers, silu_mul, tables
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.command import Suite
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.bench.shapes import QUANT, SILU_MUL
from fp8fn.ops.layout import Block, scale_shape
from fp8fn.ops.turn import column_major
from fp8fn.timing import Call, Schedule

ROW, COL, SQUARE, WHOLE = (1, 128), (128, 1), (128, 128), (-1, -1)
SCHEDULE: Final = Schedule(flush="reads")

# Converts a call's result to ScaledTensors of x, in the orientation of x.
Read: TypeAlias = Callable[[Any], Sequence[ScaledTensor]]


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N)`: peer, name, blocks of the outputs, the call, and how to read its result."""
    m, n = shape
    x = normal(m, n, device, 0)

    def case(peer: str, name: str, blocks: Sequence[Block], build: Callable[[], Call], read: Read) -> Case:
        def accuracy(result: Any) -> dict[str, float]:
            return {str(q.block): snr_db(x, fp8fn.dequantize(q, torch.float32)) for q in read(result)}

        return Case(peer, name, build, accuracy, bytes=bytes_moved(m, n, blocks))

    def torchao(name: str) -> Callable[[], Call]:
        def build() -> Call:
            quantizer = peers.torchao_quantizer(name)
            return lambda: quantizer(x)

        return build

    def torchao_pair() -> Call:
        rows, columns = (peers.torchao_quantizer(name) for name in ("act_quant_lhs", "act_quant_rhs"))
        return lambda: (rows(x), columns(x))

    def given_amax() -> Call:
        amax = torch.ops.fp8fn.amax(x, WHOLE)
        return lambda: torch.ops.fp8fn.quantize_dual(x, WHOLE, None, "fp32", amax)

    def other_layout() -> Call:
        data = fp8fn.quantize(x, SQUARE).data
        return lambda: column_major(data)

    copy = torch.empty_like(x)
    return [
        case("fp8fn", "(1,128)", [ROW], lambda: lambda: fp8fn.quantize(x, ROW), _single),
        case("fp8fn", "(128,1)", [COL], lambda: lambda: fp8fn.quantize(x, COL), _single),
        case("fp8fn", "(128,128)", [SQUARE], lambda: lambda: fp8fn.quantize(x, SQUARE), _single),
        case("fp8fn", "(1,128) and (128,1)", [ROW, COL], lambda: lambda: fp8fn.quantize_dual(x), _unchanged),
        case("fp8fn", "(-1,-1) both ways", [WHOLE] * 2, lambda: lambda: fp8fn.quantize_dual(x, WHOLE), _unchanged),
        case("fp8fn", "(-1,-1) both ways, amax given", [WHOLE] * 2, given_amax, _from_pair(WHOLE)),
        case(
            "fp8fn",
            "(1,128) and (128,128)",
            [ROW, SQUARE],
            lambda: lambda: fp8fn.quantize_dual(x, dual_block=SQUARE),
            _unchanged,
        ),
        case("torchao", "(1,128)", [ROW], torchao("act_quant_lhs"), _from_parts(ROW)),
        case("torchao", "(128,1)", [COL], torchao("act_quant_rhs"), _from_parts(COL)),
        case("torchao", "(128,1) transposed", [COL], torchao("act_quant_transposed_lhs"), _from_transposed(ROW)),
        case("torchao", "(128,128)", [SQUARE], torchao("weight_quant_rhs"), _from_parts(SQUARE)),
        case(
            "torchao",
            "(128,128) transposed",
            [SQUARE],
            torchao("weight_quant_transposed_rhs"),
            _from_transposed(SQUARE),
        ),
        case(
            "torchao",
            "(1,128) and (128,1)",
            [ROW, COL],
            torchao_pair,
            lambda result: [*_from_parts(ROW)(result[0]), *_from_parts(COL)(result[1])],
        ),
        Case("fp8fn", "FP8 to the other layout", other_layout, bytes=2.0 * m * n),
        Case("torch", "copy", lambda: lambda: copy.copy_(x), None, bytes=4.0 * m * n, ceiling=True),
    ]


def bytes_moved(m: int, n: int, blocks: Sequence[Block]) -> float:
    """Bytes of x `(m, n)` in bf16 read once, and for each block FP8 data and float32 scales written once."""
    scales = (scale_shape((m, n), block) for block in blocks)
    return float(2 * m * n + sum(m * n + 4 * rows * columns for rows, columns in scales))


def _single(q: ScaledTensor) -> Sequence[ScaledTensor]:
    return [q]


def _unchanged(qs: Sequence[ScaledTensor]) -> Sequence[ScaledTensor]:
    return qs


def _from_parts(block: Block) -> Read:
    def read(result: tuple[Tensor, Tensor]) -> Sequence[ScaledTensor]:
        return [ScaledTensor(*result, block)]

    return read


def _from_pair(block: Block) -> Read:
    def read(result: tuple[Tensor, ...]) -> Sequence[ScaledTensor]:
        data, scale, dual_data, dual_scale = result
        return [ScaledTensor(data, scale, block), ScaledTensor(dual_data, dual_scale, block)]

    return read


def _from_transposed(block: Block) -> Read:
    def read(result: tuple[Tensor, Tensor]) -> Sequence[ScaledTensor]:
        return [ScaledTensor(*result, block).mT]

    return read


SUITES = {
    "quant": Suite(QUANT, cases, tables.quant, SCHEDULE),
    "silu_mul": Suite(SILU_MUL, silu_mul.cases, tables.quant, SCHEDULE),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("quant", __doc__, SUITES, argv)
