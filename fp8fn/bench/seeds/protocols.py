"""What each seed measured: its shapes, and how fp8fn and bf16 do the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

import fp8fn
from fp8fn.bench import decode, llm84, moe, shapes
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.timing import Schedule

Shape = tuple[int, ...]

# Short turns: all protocols together have 267 shapes, and a machine is often lent for ten minutes.
_SHORT: Final = Schedule(rounds=3, burst_ms=10.0, warm_s=0.1)
_READS: Final = replace(_SHORT, flush="reads")


@dataclass(frozen=True)
class Part:
    """Shapes that are measured in the same way; with `graphs`, CUDA graphs are timed too."""

    axes: str
    shapes: tuple[Shape, ...]
    cases: Callable[[Shape, torch.device], list[Case]]
    schedule: Schedule = _SHORT
    graphs: bool = False


@dataclass(frozen=True)
class Seed:
    """A published protocol, by its parts."""

    title: str
    about: str
    parts: dict[str, Part]


def scaled_down(shape: Shape) -> Shape:
    """A shape for a CPU: sizes from 512 on are divided by 64, to a multiple of 32, and those above 64 by 8."""
    return tuple(max(32, size // 64 // 32 * 32) if size >= 512 else size // 8 if size > 64 else size for size in shape)


DENSE: Final = tuple((m, n, k) for k, n in shapes.MX_WEIGHTS for m in decode.MX_ROWS)
# (E, ids, N, K): the first product of an MLP at TP 4 and 8, and the second at TP 4; experts on 2, 4 and 8 GPUs.
ROUTED_SIDES: Final = ((1536, 6144), (768, 6144), (6144, 768))
ROUTED: Final = tuple(
    (experts, ids, *sides) for sides in ROUTED_SIDES for experts in (128, 64, 32) for ids in (4, 8, 16, 32, 64)
)
BATCHED: Final = (*(shape for shape in shapes.BATCHED if shape[1] <= 128), (16, 8192, 8192, 8192))
# (E, N, K): Llama 4's, then DeepSeek-V3's that torchao measured later.
WEIGHTS: Final = (*moe.WEIGHTS, (8, 2048, 1408), (8, 1408, 2048))
TRANSPOSED: Final = "a scale for each row of N"
BY_GROUP: Final = "one scale a group and column"


def routed_cases(shape: Shape, device: torch.device) -> list[Case]:
    """The cases of `(E, ids, N, K)`: an MLP's first product where N is less than K, whose ids share rows, or second."""
    experts, ids, n, k = shape
    first = n < k
    a_div = decode.TOP_K if first else 1
    tokens = (ids // decode.TOP_K, n, k)
    return decode.routed_cases(decode.Tokens(tokens, device, experts=experts, a_div=a_div, weighted=not first))


def weight_cases(shape: Shape, device: torch.device) -> list[Case]:
    """The cases of `(E, N, K)`: of the transposed weights, a scale for each row of N elements, written along N.

    Bytes are counted as torchao counts them, without scales: read twice in 16 bits, written once in 8.
    """
    count, n, k = shape
    stored = normal(count * n, k, device, 0).unflatten(0, (count, n))
    w, copy = stored.mT, torch.empty_like(stored)
    elements = float(count * k * n)

    def accuracy(q: fp8fn.ScaledTensor) -> dict[str, float]:
        return {"y": snr_db(w[-1], fp8fn.dequantize(q[-1], torch.float32))}

    return [
        Case(
            "fp8fn", TRANSPOSED, lambda: partial(fp8fn.quantize, w, (1, -1), scale="pow2"), accuracy, 0.0, 5 * elements
        ),
        Case("torch", "copy", lambda: partial(copy.copy_, stored), bytes=4 * elements),
    ]


def token_cases(shape: Shape, device: torch.device) -> list[Case]:
    """The cases of `(G, M, N)` by groups along M, or, of the transposed matrix, by groups along its rows."""
    return [case for case in moe.quant_cases(shape, device) if case.name in (BY_GROUP, "copy")]


def layer_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Forward and backward of one of the 84 layers, by `BLOCKWISE`, by `BLOCKWISE_SQUARE`, and in bf16."""
    return llm84.cases(shape, device)


# In the order of their lengths, so that a short run has figures of most of them.
SEEDS: Final[dict[str, Seed]] = {
    "003": Seed(
        "torchao's quantizers for mixtures of experts",
        "Weights (E,N,K), transposed, with a scale for each row of N elements, scales powers of two; and tokens (M,N) "
        "in G groups with a scale for each group and column. torchao has two kernels for weights, by atomics and by a "
        "reduction.",
        {
            "weights": Part("E,N,K", WEIGHTS, weight_cases, _READS),
            "tokens": Part("G,M,N", moe.TOKENS, token_cases, _READS),
        },
    ),
    "001": Seed(
        "torchao's blockwise layers of experts",
        "The product of quantized operands, the forward with quantization, and forward with backward. torchao "
        "publishes these beside a loop over experts and beside bf16.",
        {"layers": Part("E,M,N,K", moe.LAYERS, moe.layer_cases)},
    ),
    "002": Seed(
        "aiter's batched products by FP8 weights",
        "A batch of B products of 16-bit rows, each by its own weight in 128x128 blocks.",
        {"products": Part("B,M,N,K", BATCHED, decode.batched_cases, _READS, graphs=True)},
    ),
    "000": Seed(
        "Primus-Turbo's 84 layers",
        "Forward (2MNK operations) and backward (4MNK) timed separately with quantization counted; combined is 6MNK "
        "over the sum of both times. Layers of equal sizes are measured once.",
        {"layers": Part("M,N,K", llm84.SHAPES, layer_cases, llm84.SCHEDULE)},
    ),
    "004": Seed(
        "aiter's MX-FP8 products for decoding",
        "Dense products of 1 to 64 rows by the weights of one GPU at tensor parallelism 1, 2, 4 and 8, and products of "
        "routed rows by experts spread over 2, 4 and 8 GPUs, four experts a token. aiter publishes them over a plain "
        "Triton kernel with `tl.dot_scaled`, which is measured here too.",
        {
            "dense": Part("M,N,K", DENSE, decode.mx_cases, _READS, graphs=True),
            "experts": Part("E,ids,N,K", ROUTED, routed_cases, _READS, graphs=True),
        },
    ),
}
