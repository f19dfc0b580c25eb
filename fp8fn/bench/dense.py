"""The forward product of a linear layer on quantized operands, beside its peers: `python -m fp8fn bench dense`.

`out (M, N) = x (M, K) @ w (N, K)ᵀ` with x in blocks of (1, 128) and w in (128, 128), also rowwise and tensorwise; 2MNK
operations. The ceiling is `torch._scaled_mm`, tensorwise with fast accumulation. SNR compares the bf16 output with the
float64 product of the bf16 operands, so that it includes quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import fp8fn
from fp8fn.bench import command, peers, tables
from fp8fn.bench.command import Suite
from fp8fn.bench.layer import Layer
from fp8fn.bench.measure import Case
from fp8fn.bench.shapes import ANCHORS, DEEPGEMM, SMALL
from fp8fn.timing import Call


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`."""
    layer = Layer(shape, device)

    def case(peer: str, name: str, build: Callable[[], Call], element: int = 1, ceiling: bool = False) -> Case:
        def accuracy(out: Any) -> dict[str, float]:
            return {"out": layer.out.snr_db(out)}

        return Case(peer, name, build, accuracy, layer.operations, layer.bytes_moved(element), ceiling)

    return [
        case("fp8fn", "1x128·128x128", lambda: partial(fp8fn.gemm, layer.x_row, layer.w_square.mT)),
        case("fp8fn", "rowwise", lambda: partial(fp8fn.gemm, layer.x_line, layer.w_line.mT)),
        case("fp8fn", "tensorwise", lambda: partial(fp8fn.gemm, layer.x_whole, layer.w_whole.mT)),
        case("torch", "cuBLASLt 1x128·128x128", lambda: peers.torch_blockwise(layer.x_row, layer.w_square.mT)),
        case("torch", "rowwise, fast accumulation", lambda: peers.torch_scaled_mm(layer.x_line, layer.w_line.mT)),
        ceiling_case(layer),
        case("torch", "bf16", lambda: partial(torch.mm, layer.x, layer.w.mT), element=2),
        case("torchao", "Triton 1x128·128x128", lambda: peers.torchao_gemm(layer.x_row, layer.w_square.mT)),
        case("deep_gemm", "1x128·128x128", lambda: peers.deep_gemm(layer.x_row, layer.w_square.mT)),
    ]


def ceiling_case(layer: Layer) -> Case:
    """The fastest forward product of the machine: one scale for each operand, and sums in the tensor core."""
    return Case(
        "torch",
        "tensorwise, fast accumulation",
        lambda: peers.torch_scaled_mm(layer.x_whole, layer.w_whole.mT),
        lambda out: {"out": layer.out.snr_db(out)},
        layer.operations,
        layer.bytes_moved(1),
        ceiling=True,
    )


SUITES = {
    "anchors": Suite(ANCHORS, cases, tables.products),
    "small": Suite(SMALL, cases, tables.small, graphs=True),
    "deepgemm": Suite(DEEPGEMM, cases, tables.layers),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("dense", __doc__, SUITES, argv)
