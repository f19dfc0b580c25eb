"""The weight's gradient of a linear layer on quantized operands, beside its peers: `python -m fp8fn bench wgrad`.

`dB (N, K) = g (M, N)ᵀ @ x (M, K)`, both quantized in (128, 1), so that the product is 1x128·128x1; or x in (128, 128),
as the recipe `BLOCKWISE_SQUARE` has it, so that the product is 1x128·128x128 as a forward's is. 2MNK operations.
Shapes are the layer's M,N,K. The ceiling is `torch._scaled_mm` of the same product, tensorwise.
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
from fp8fn.bench.shapes import ANCHORS, TRAINING
from fp8fn.timing import Call


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`."""
    layer = Layer(shape, device)

    def case(peer: str, name: str, build: Callable[[], Call], element: int = 1, ceiling: bool = False) -> Case:
        def accuracy(out: Any) -> dict[str, float]:
            return {"dB": layer.dB.snr_db(out)}

        return Case(peer, name, build, accuracy, layer.operations, layer.wgrad_bytes_moved(element), ceiling)

    return [
        case("fp8fn", "1x128·128x1", lambda: partial(fp8fn.gemm, layer.g_col.mT, layer.x_col)),
        case("fp8fn", "1x128·128x128", lambda: partial(fp8fn.gemm, layer.g_col.mT, layer.x_square)),
        case("torch", "cuBLASLt 1x128·128x1", lambda: peers.torch_blockwise(layer.g_col.mT, layer.x_col)),
        case(
            "torch",
            "tensorwise, fast accumulation",
            lambda: peers.torch_scaled_mm(layer.g_whole_t, layer.x_whole_t.mT),
            ceiling=True,
        ),
        case("torch", "bf16", lambda: partial(torch.mm, layer.g.mT, layer.x), element=2),
        case("torchao", "Triton 1x128·128x1", lambda: peers.torchao_gemm(layer.g_col.mT, layer.x_col)),
        case("deep_gemm", "1x128·128x1, added to float32", lambda: peers.deep_gemm_wgrad(layer.g_col.mT, layer.x_col)),
    ]


SUITES = {
    "wgrad": Suite(TRAINING, cases, tables.products),
    "anchors": Suite(ANCHORS, cases, tables.products),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("wgrad", __doc__, SUITES, argv)
