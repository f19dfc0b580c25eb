"""Sample inputs of every op of `torch.ops.fp8fn`; `SAMPLES[name](seed, device)` has the same shapes for all seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.layout import Block

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Sample(NamedTuple):
    """One call. Tensors stand among `args`, never among `kwargs`, so that a test can map over them."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, Tensor))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """`args` with other tensors in the places of its own."""
        left = iter(tensors)
        return tuple(next(left) if isinstance(arg, Tensor) else arg for arg in self.args)


class _Normal:
    """Normal values from a seed of their own, so that a sample doesn't depend on the samples before it."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)


def quantize(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(128, 256), (1, 128)), {}),
        Sample("plain_columns", (x(128, 256), (128, 1)), {"dtype": torch.float8_e5m2}),
        Sample("ragged", (x(77, 99), (1, 128)), {"scale": "pow2"}),
        Sample("ragged_square", (x(130, 131, dtype=FP32), (128, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP16), (-1, 1)), {}),
        Sample("strided", (x(64, 96).mT, (1, -1)), {"dtype": torch.float8_e4m3fnuz}),
        Sample("strided_every_second", (x(64, 192)[::2, ::2], (-1, -1)), {}),
        Sample("strided_square", (x(64, 96).mT, (128, 128)), {}),
        Sample("mx", (x(40, 80), (1, 32)), {"scale": "e8m0"}),
        Sample("mx_columns", (x(40, 80, dtype=FP32), (32, 1)), {"scale": "e8m0", "dtype": torch.float8_e5m2fnuz}),
        Sample("empty", (x(0, 40), (1, 128)), {}),
    ]


def quantize_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(128, 256),), {}),
        Sample("ragged", (x(77, 99), (1, 128)), {"scale": "pow2"}),
        Sample("batched", (x(3, 40, 50, dtype=FP32), (1, 32)), {"scale": "e8m0"}),
        Sample("strided", (x(64, 96).mT, (128, 1)), {"dtype": torch.float8_e5m2}),
        Sample("whole", (x(30, 40, dtype=FP16), (1, -1)), {}),
        Sample("ragged_square", (x(130, 140), (128, 128)), {}),
        Sample("strided_square", (x(64, 200).mT, (128, 128)), {"scale": "e8m0"}),
        Sample("batched_square", (x(2, 30, 40, dtype=FP32), (-1, -1)), {}),
        Sample("empty_square", (x(0, 40), (128, 128)), {}),
        Sample("empty", (x(7, 0),), {}),
    ]


def quantize_silu_mul(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(64, 256), x(64, 256)), {}),
        Sample("ragged", (x(77, 99), x(77, 99), (128, 1)), {"scale": "pow2"}),
        Sample("ragged_square", (x(70, 131, dtype=FP32), x(70, 131, dtype=FP32), (128, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP16), x(2, 3, 33, 70, dtype=FP16), (1, -1)), {}),
        Sample("strided", (x(96, 64).mT, x(64, 192)[:, ::2], (1, 32)), {"scale": "e8m0", "dtype": torch.float8_e5m2}),
        Sample("empty", (x(0, 40), x(0, 40)), {}),
    ]


def quantize_rms_norm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(64, 256), x(256)), {}),
        Sample("ragged", (x(77, 99), x(99), 1e-3, (128, 1)), {"scale": "pow2"}),
        Sample("ragged_square", (x(70, 2131, dtype=FP32), x(2131), 1e-5, (128, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP16), x(70, dtype=FP16), 1e-6, (1, -1)), {}),
        Sample("strided", (x(96, 64).mT, x(192)[::2], 1e-6, (1, 32)), {"scale": "e8m0", "dtype": torch.float8_e5m2}),
        Sample("empty", (x(7, 0), x(0)), {}),
    ]


def _operand(x: Tensor, block: Block, **kwargs: Any) -> tuple[Tensor, Tensor, Block]:
    return *torch.ops.fp8fn.quantize(x, block, **kwargs), block


def scaled_mm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2, mx = {"dtype": torch.float8_e5m2}, {"scale": "e8m0"}
    row, col, square, whole = (1, 128), (128, 1), (128, 128), (-1, -1)
    return [
        Sample("plain", (*_operand(x(128, 256), row), *_operand(x(256, 128), square)), {}),
        Sample("plain_columns", (*_operand(x(64, 256), row), *_operand(x(256, 96), col)), {"out_dtype": FP32}),
        Sample("ragged", (*_operand(x(33, 190), row), *_operand(x(190, 65), square), x(65)), {}),
        Sample("batched", (*_operand(x(2, 48, 80), (1, -1)), *_operand(x(2, 80, 32), (-1, 1)), x(32, dtype=FP32)), {}),
        Sample("batched_left", (*_operand(x(3, 24, 160), row), *_operand(x(160, 32), col)), {"out_dtype": FP16}),
        Sample("strided", (*_operand(x(160, 48).mT, whole), *_operand(x(64, 160).mT, whole)), {}),
        Sample("e5m2", (*_operand(x(48, 160), row, **e5m2), *_operand(x(160, 64), square)), {}),
        Sample("mx", (*_operand(x(24, 96), (1, 32), **mx), *_operand(x(96, 40), (32, 1), **mx)), {}),
        Sample("empty", (*_operand(x(16, 0), row), *_operand(x(0, 16), square), x(16)), {}),
    ]


def gemm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(128, 256), x(384, 256).mT), {}),
        Sample("plain_bias", (x(64, 128), x(128, 96), x(96, dtype=FP32)), {"recipe": "hybrid"}),
        Sample("ragged", (x(33, 190), x(65, 190).mT, x(65)), {"out_dtype": FP32}),
        Sample("batched", (x(2, 33, 70, dtype=FP16), x(2, 70, 40, dtype=FP16)), {"recipe": "rowwise"}),
        Sample("batched_left", (x(2, 3, 16, 128), x(96, 128, dtype=FP32).mT), {"recipe": "mxfp8"}),
        Sample("strided", (x(160, 48).mT, x(64, 320)[:, ::2].mT), {"recipe": "tensorwise"}),
        Sample("empty", (x(0, 64), x(64, 32)), {}),
    ]


def mm_a16w8(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2, mx = {"dtype": torch.float8_e5m2}, {"scale": "e8m0"}
    col, square = (128, 1), (128, 128)
    return [
        Sample("plain", (x(64, 256), *_operand(x(384, 256).mT, square)), {}),
        Sample("plain_row_major", (x(16, 160), *_operand(x(160, 96), (1, 128), **e5m2)), {"out_dtype": FP32}),
        Sample("ragged", (x(33, 190), *_operand(x(65, 190).mT, square), x(65)), {}),
        Sample("ragged_float32", (x(5, 70, dtype=FP32), *_operand(x(70, 33), (1, -1)), x(33, dtype=FP16)), {}),
        Sample("batched", (x(2, 24, 80, dtype=FP16), *_operand(x(2, 80, 32), (-1, 1)), x(2, 32)), {}),
        Sample("batched_left", (x(3, 24, 160), *_operand(x(160, 32), col), x(3, 1, 32)), {"out_dtype": FP16}),
        Sample("batched_right", (x(24, 160), *_operand(x(3, 160, 32), col), x(32, dtype=FP32)), {}),
        Sample("strided", (x(160, 48).mT, *_operand(x(64, 160).mT, (-1, -1)), x(128)[::2]), {}),
        Sample("mx", (x(24, 96), *_operand(x(96, 40), (32, 1), **mx)), {}),
        Sample("mx_dgrad", (x(24, 40), *_operand(x(40, 96), (1, 32), **mx)), {}),
        Sample("empty", (x(16, 0), *_operand(x(0, 16), square), x(16)), {}),
    ]


SAMPLES: Final[dict[str, Callable[..., list[Sample]]]] = {
    "quantize": quantize,
    "quantize_dual": quantize_dual,
    "quantize_silu_mul": quantize_silu_mul,
    "quantize_silu_mul_dual": quantize_silu_mul,
    "quantize_rms_norm": quantize_rms_norm,
    "quantize_rms_norm_dual": quantize_rms_norm,
    "scaled_mm": scaled_mm,
    "mm_a16w8": mm_a16w8,
    "gemm": gemm,
}
