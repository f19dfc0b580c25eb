"""The shapes that tests and benchmarks use: the 84 layers of Primus-Turbo's suite, and those of fp8fn's own suites."""

from __future__ import annotations

from typing import Final, NamedTuple


class Shape(NamedTuple):
    """A linear layer's product `(M, K) @ (K, N)`; `id` is the suite's, from 1."""

    id: int
    model: str
    M: int
    N: int
    K: int


_MODELS: Final = (
    ("Llama-2-7B", 4096, ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))),
    ("Llama-2-70B", 4096, ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))),
    ("Llama-3.1-8B", 8192, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    ("Llama-3.1-405B", 8192, ((18432, 16384), (16384, 16384), (106496, 16384), (16384, 53248))),
    ("Qwen2.5-7B", 8192, ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))),
    ("Qwen2.5-72B", 8192, ((10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568))),
    ("Mistral-7B", 4096, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
)


def _llm84() -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for model, sequence, layers in _MODELS:
        for micro_batch in (1, 2, 4):
            shapes += [Shape(len(shapes) + i, model, sequence * micro_batch, *nk) for i, nk in enumerate(layers, 1)]
    return tuple(shapes)


# In the order of the suite's ids: by model, by micro-batch, then qkv, out, gate_up, down.
LLM84: Final = _llm84()

ANCHORS: Final = ((4096, 4096, 4096), (8192, 6144, 4096), (8192, 28672, 4096), (16384, 8192, 8192), (8192, 8192, 28672))

# DeepGEMM's own list: (M, N, K) of products; (E, M, N, K) of groups, M tokens in all; those of wgrad by groups; and (E,
# M, C, N, K) of experts with room for M rows each, of which C are there in the mean.
DEEPGEMM: Final = tuple(
    (m, n, k)
    for m in (1, 128, 4096)
    for n, k in (
        (2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
    )
)  # fmt: skip
DEEPGEMM_GROUPS: Final = tuple(
    (experts, 32768, n, k)
    for experts in (4, 8)
    for n, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
)  # fmt: skip
DEEPGEMM_MASKED: Final = tuple(
    (experts, 4096, mean, n, k)
    for experts, mean in ((32, 192), (6, 1024), (32, 20), (6, 20))
    for n, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
)  # fmt: skip
DEEPGEMM_WGRAD: Final = tuple((experts, 32768, n, k) for experts in (4, 8, 16) for n, k in ((4096, 7168), (7168, 2048)))

# Layers for forward and backward; their wgrad is `(N, M) @ (M, K)`.
TRAINING: Final = ((8192, 6144, 4096), (8192, 28672, 4096), (16384, 8192, 8192))

# Few rows or columns: less than one wave of tiles, so that launches and tails matter. 2112 is no multiple of 128.
SMALL: Final = ((128, 7168, 2048), (64, 24576, 1536), (4096, 2112, 7168), (4096, 2176, 7168))


# (K, N) of aiter's MX products for decoding: of one GPU at tensor parallelism 4.
MX_DECODE: Final = ((6144, 2304), (2048, 6144), (6144, 1536), (1536, 6144))

# The same by projection and tensor parallelism; gate_up and mlp_down coincide at 1.
MX_PARALLEL: Final[dict[str, dict[int, tuple[int, int]]]] = {
    "qkv": {tp: (6144, 9216 // tp) for tp in (1, 2, 4, 8)},
    "o_proj": {tp: (8192 // tp, 6144) for tp in (1, 2, 4, 8)},
    "gate_up": {tp: (6144, 6144 // tp) for tp in (1, 2, 4, 8)},
    "mlp_down": {tp: (6144 // tp, 6144) for tp in (1, 2, 4, 8)},
}
# The 15 weights of a GPU that the shipped table of MX products has.
MX_WEIGHTS: Final = tuple(dict.fromkeys(side for sides in MX_PARALLEL.values() for side in sides.values()))


def _decode() -> tuple[tuple[int, int], ...]:
    shapes: list[tuple[int, int]] = []
    for k, n in MX_DECODE:
        shapes += [(k, n), *((k, n // parts) for parts in (2, 4, 8)), *((k // parts, n) for parts in (2, 4, 8))]
    return tuple(dict.fromkeys(shapes))


# Whole weights, and the same divided among 2, 4 and 8 GPUs along N or K.
DECODE: Final = _decode()

# (K, N) of weights for batches of sequences: the whole weights above, and Llama-3.1-8B's attention and MLP.
BATCH_DECODE: Final = (*MX_DECODE, (4096, 4096), (4096, 14336), (14336, 4096))

# (M, N, B, K) of q with N columns, and k and v with B each: of Llama-3.2-1B and 3B, Llama-3.1-8B, Qwen2.5-7B and
# Llama-3.1-70B.
QKV: Final = tuple(
    (m, n, b, k)
    for n, b, k in ((2048, 512, 2048), (3072, 1024, 3072), (4096, 1024, 4096), (3584, 512, 3584), (8192, 1024, 8192))
    for m in (1, 8, 16)
)
# (M, N, K) of their gate and up.
GATE_UP: Final = tuple(
    (m, n, k) for n, k in ((8192, 2048), (8192, 3072), (14336, 4096), (18944, 3584), (28672, 8192)) for m in (1, 8, 16)
)

# (T, N, K) of tokens by the weights of their experts.
MX_MOE: Final = tuple((tokens, 1536, 6144) for tokens in (1, 2, 4, 8, 16, 32, 64))

# (B, M, N, K) of aiter's batched products by an FP8 weight, and one that is bound by the tensor cores.
BATCHED: Final = (
    *((b, m, n, k) for b in (16, 32, 64, 128) for n, k in ((512, 128), (128, 512)) for m in (1, 32, 128)),
    (16, 4096, 4096, 4096),
)

# (M, N) of activations and gradients that are quantized.
QUANT: Final = ((8192, 4096), (16384, 8192), (16384, 28672))
# Tokens, and the width of an MLP: of Llama 1B and 8B.
SILU_MUL: Final = ((16384, 8192), (16384, 14336))


def shape(id: int) -> Shape:
    """The suite's shape with this id, from 1 to 84."""
    return LLM84[id - 1]
