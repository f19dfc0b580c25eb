"""Forward and backward of a linear layer, quantization included, beside its peers: `python -m fp8fn bench linear`.

Forward and backward have three products, 6MNK operations, by `torch.autograd.grad`. The ceiling is the forward product
alone, on quantized operands. The suite llm84 times forward and backward separately (`fp8fn.bench.llm84`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8fn
from fp8fn.bench import command, llm84, peers, tables
from fp8fn.bench.command import Suite
from fp8fn.bench.dense import ceiling_case
from fp8fn.bench.layer import Layer
from fp8fn.bench.measure import Case
from fp8fn.bench.shapes import TRAINING
from fp8fn.timing import Call

Linear: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`. A case's `find` imports the peer's function."""
    layer = Layer(shape, device)

    def case(peer: str, name: str, find: Callable[[], Linear]) -> Case:
        def build() -> Call:
            return step(layer, find())

        def accuracy(result: Any) -> dict[str, float]:
            out, dA, dB = result
            return {"out": layer.out.snr_db(out), "dA": layer.dA.snr_db(dA), "dB": layer.dB.snr_db(dB)}

        return Case(peer, name, build, accuracy, 3 * layer.operations, layer.step_bytes_moved())

    return [
        case("fp8fn", "linear", lambda: fp8fn.linear),
        case("fp8fn", "linear, BLOCKWISE_SQUARE", lambda: partial(fp8fn.linear, recipe=fp8fn.BLOCKWISE_SQUARE)),
        case("torch", "bf16 linear", lambda: F.linear),
        case("torchao", "linear, cuBLASLt", lambda: peers.torchao_linear(use_triton=False)),
        case("torchao", "linear, Triton", lambda: peers.torchao_linear(use_triton=True)),
        ceiling_case(layer),
    ]


def step(layer: Layer, linear: Linear) -> Call:
    """The call that runs forward and backward, and returns out, dA and dB."""
    x, w = layer.leaves
    g = layer.g

    def call() -> tuple[Tensor, ...]:
        out = linear(x, w)
        return out, *torch.autograd.grad(out, (x, w), g)

    return call


SUITES = {
    "linear": Suite(TRAINING, cases, tables.products),
    "llm84": Suite(llm84.SHAPES, llm84.cases, tables.llm84, llm84.SCHEDULE),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("linear", __doc__, SUITES, argv)
