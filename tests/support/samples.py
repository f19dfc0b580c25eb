"""Sample inputs of every op of `torch.ops.fp8fn`; `SAMPLES[name](seed, device)` has the same shapes for all seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops import reference
from fp8fn.ops.layout import Block
from fp8fn.ops.sort_tokens import sort_tokens

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


def _largest(x: Tensor, rows: int = 0) -> Tensor:
    """The largest magnitude of each matrix, or of each run of so many of its rows, as PyTorch computes it."""
    runs = x.unflatten(-2, (-1, rows or x.shape[-2]))
    return runs.abs().amax((-2, -1))[..., None]


def amax(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(128, 256), (-1, -1)), {}),
        Sample("plain_blocks", (x(128, 256), (128, 128)), {}),
        Sample("ragged", (x(77, 99), (-1, -1)), {}),
        Sample("ragged_rows", (x(77, 99, dtype=FP16), (1, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP32), (-1, -1)), {}),
        Sample("batched_columns", (x(2, 33, 70), (-1, 1)), {}),
        Sample("strided", (x(64, 96).mT, (-1, -1)), {}),
        Sample("strided_every_second", (x(64, 192)[::2, ::2], (1, -1)), {}),
        Sample("empty", (x(0, 40), (-1, -1)), {}),
    ]


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
        Sample("mx_rounded_up", (x(2, 40, 80), (1, 32)), {"scale": "rceil"}),
        Sample("plain_amax", (y := x(128, 256), (-1, -1), None, "fp32", _largest(y)), {}),
        Sample("ragged_amax", (y := x(40, 99), (1, -1), torch.float8_e5m2, "pow2", _largest(y, 1).float()), {}),
        Sample("batched_amax", (y := x(2, 3, 40, 96), (-1, -1), None, "e8m0", _largest(y)), {}),
        Sample("square_amax", (x(2, 130, 70), (128, 128), None, "fp32", 2 * torch.ones(2, 2, 1, device=device)), {}),
        Sample("ragged_turned", (x(130, 131), (128, 128)), {"column_major": True}),
        Sample("batched_turned", (x(2, 3, 40, 70, dtype=FP32), (-1, -1)), {"column_major": True, "scale": "pow2"}),
        Sample("strided_turned", (x(64, 200).mT, (128, 128), None, "e8m0", None, False), {}),
        Sample("turned_amax", (y := x(96, 48).mT, (-1, -1), None, "fp32", _largest(y)), {"column_major": False}),
        Sample("empty_turned", (x(0, 40), (-1, -1)), {"column_major": True}),
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
        Sample("plain_amax", (y := x(128, 256), (-1, -1), None, "fp32", _largest(y)), {}),
        Sample("strided_amax", (y := x(2, 40, 70).mT, (-1, -1), None, "fp32", _largest(y).float()), {}),
        Sample("empty_square", (x(0, 40), (128, 128)), {}),
        Sample("ragged_beside_square", (x(130, 140),), {"dual_block": (128, 128)}),
        Sample("strided_beside_square", (x(64, 200).mT, (128, 1), None, "pow2", None, (128, 128)), {}),
        Sample("empty_beside_square", (x(0, 40),), {"dual_block": (128, 128)}),
        Sample("empty", (x(7, 0),), {}),
    ]


def _ends(*ends: int, device: torch.device | str) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def quantize_grouped(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    few, many = _ends(100, 100, 131, device=device), _ends(0, 1, 1, 30 + seed % 7, 70, device=device)
    return [
        Sample("plain", (x(256, 128), few), {}),
        Sample("plain_whole", (x(256, 128), few, (-1, 1)), {"dtype": torch.float8_e5m2}),
        Sample("ragged", (x(131, 99), many), {"scale": "pow2"}),
        Sample("ragged_whole", (x(77, 33, dtype=FP32), many, (-1, 1)), {"scale": "pow2"}),
        Sample("ragged_large", (x(1030, 20), _ends(500 + seed % 7, 1025, device=device)), {}),
        Sample("strided", (x(64, 160).mT, few), {"scale": "e8m0"}),
        Sample("strided_whole", (x(160, 64)[:, ::2], few, (-1, 1)), {"dtype": torch.float8_e4m3fnuz}),
        Sample("mx", (x(131, 99), many, (32, 1)), {"scale": "rceil"}),
        Sample("plain_square", (x(256, 256), few, (128, 128)), {}),
        Sample("ragged_square", (x(131, 199), many, (128, 128)), {"scale": "pow2"}),
        Sample("one_group", (x(30, 40, dtype=FP16), _ends(30, device=device)), {}),
        Sample("empty", (x(0, 40), few), {}),
    ]


def quantize_grouped_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    few, many = _ends(100, 100, 131, device=device), _ends(0, 1, 1, 30 + seed % 7, 70, device=device)
    return [
        Sample("plain", (x(256, 128), few), {}),
        Sample("ragged", (x(131, 99), many), {"scale": "pow2"}),
        Sample("ragged_large", (x(1030, 20), _ends(500 + seed % 7, 1025, device=device)), {}),
        Sample("strided", (x(64, 160).mT, few), {"dtype": torch.float8_e5m2}),
        Sample("whole", (x(77, 40, dtype=FP16), many, (1, -1)), {}),
        Sample("mx", (x(131, 99), many, (1, 32)), {"scale": "rceil"}),
        Sample("plain_square", (x(256, 256), few), {"dual_block": (128, 128)}),
        Sample("ragged_square", (x(131, 199), many), {"scale": "pow2", "dual_block": (128, 128)}),
        Sample("empty", (x(7, 0), few), {}),
    ]


def quantize_silu_mul(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(64, 256), x(64, 256)), {}),
        Sample("ragged", (x(77, 99), x(77, 99), (128, 1)), {"scale": "pow2"}),
        Sample("ragged_square", (x(70, 131, dtype=FP32), x(70, 131, dtype=FP32), (128, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP16), x(2, 3, 33, 70, dtype=FP16), (1, -1)), {}),
        Sample("strided", (x(96, 64).mT, x(64, 192)[:, ::2], (1, 32)), {"scale": "e8m0", "dtype": torch.float8_e5m2}),
        Sample("mx", (x(2, 33, 70), x(2, 33, 70), (1, 32)), {"scale": "rceil"}),
        Sample("turned", (x(70, 131), x(70, 131), (128, 128)), {"column_major": True}),
        Sample("empty", (x(0, 40), x(0, 40)), {}),
    ]


def quantize_silu_mul_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    beside = Sample("ragged_beside_square", (x(70, 131), x(70, 131)), {"dual_block": (128, 128)})
    return [*(sample for sample in quantize_silu_mul(seed, device) if sample.label != "turned"), beside]


def quantize_silu_mul_saved(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    return [sample for sample in quantize_silu_mul(seed, device) if "column_major" not in sample.kwargs]


def _kept(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the forward keeps a tensor."""
    return reference.quantize(x, (1, 128), torch.float8_e4m3fn, "fp32")


def quantize_silu_mul_backward(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)

    def given(*shape: int, dtype: torch.dtype = BF16, strided: bool = False) -> tuple[Tensor, ...]:
        kept = [part for _ in range(2) for part in _kept(x(*shape))]
        return x(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT if strided else x(*shape, dtype=dtype), *kept

    e5m2 = torch.float8_e5m2
    return [
        Sample("plain", given(64, 256), {}),
        Sample("plain_gradients", given(64, 256), {"dtype": e5m2, "scale": "pow2", "product_dtype": e5m2}),
        Sample("ragged", given(77, 99), {"product_block": (128, 128)}),
        Sample("batched", given(2, 3, 33, 70, dtype=FP16), {}),
        Sample("strided", given(64, 96, strided=True), {"block": (1, 32), "product_block": (32, 1), "scale": "e8m0"}),
        Sample("whole", given(33, 70, dtype=FP32), {"block": (1, -1), "product_block": (-1, 1)}),
        Sample("empty", given(0, 40), {}),
        Sample("values", (x(64, 256), x(64, 256), None, x(64, 256), None), {"product_dtype": e5m2}),
        Sample("values_ragged", (x(77, 99), x(77, 99), None, x(77, 99), None), {"product_block": (128, 128)}),
        Sample("values_batched", (x(2, 33, 70, dtype=FP16), x(2, 33, 70), None, x(2, 33, 70), None), {}),
    ]


def quantize_silu_mul_grouped(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    return [_by_groups_alone(sample) for sample in quantize_silu_mul_grouped_dual(seed, device)]


def _by_groups_alone(sample: Sample) -> Sample:
    """The same in the block of the groups."""
    named = dict(sample.kwargs)
    block = named.pop("dual_block", (-1, 1) if sample.args[3:] else (128, 1))
    return sample._replace(args=(*sample.args[:3], block), kwargs=named)


def quantize_silu_mul_grouped_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x, few, many = _Normal(seed, device), _ends(40, 40, 64, device=device), _ends(0, 1, 128, 131, device=device)
    return [
        Sample("plain", (x(64, 256), x(64, 256), few), {}),
        Sample("ragged", (x(140, 99), x(140, 99), many), {"scale": "pow2"}),
        Sample("strided", (x(64, 64)[:, :32], x(64, 64)[:, 32:], few), {"dtype": torch.float8_e5m2}),
        Sample("whole", (x(140, 40, dtype=FP16), x(140, 40, dtype=FP16), many, (1, -1)), {}),
        Sample("square", (x(140, 200), x(140, 200), many), {"dual_block": (128, 128)}),
        Sample("empty", (x(0, 40), x(0, 40), few), {}),
    ]


def quantize_silu_mul_grad_grouped_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x, few, many = _Normal(seed, device), _ends(40, 40, 64, device=device), _ends(0, 1, 128, 131, device=device)
    return [
        Sample("plain", (x(64, 256), x(64, 512), few), {}),
        Sample("ragged", (x(140, 99), x(140, 198), many), {"scale": "pow2"}),
        Sample("strided", (x(64, 64)[:, :32], x(64, 64), few), {"dtype": torch.float8_e5m2}),
        Sample("whole", (x(140, 40, dtype=FP16), x(140, 80, dtype=FP16), many, (1, -1)), {}),
        Sample("empty", (x(0, 40), x(0, 80), few), {}),
    ]


def quantize_rms_norm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(64, 256), x(256)), {}),
        Sample("ragged", (x(77, 99), x(99), 1e-3, (128, 1)), {"scale": "pow2"}),
        Sample("ragged_square", (x(70, 2131, dtype=FP32), x(2131), 1e-5, (128, 128)), {}),
        Sample("batched", (x(2, 3, 33, 70, dtype=FP16), x(70, dtype=FP16), 1e-6, (1, -1)), {}),
        Sample("strided", (x(96, 64).mT, x(192)[::2], 1e-6, (1, 32)), {"scale": "e8m0", "dtype": torch.float8_e5m2}),
        Sample("plain_rstd", (x(2, 64, 256), x(256), 0.0, (1, 128), None, "fp32", x(2, 64, dtype=FP32).abs()), {}),
        Sample("mx", (x(2, 33, 70), x(70), 1e-5, (1, 32)), {"scale": "rceil"}),
        Sample("turned", (x(70, 131), x(131), 1e-5, (128, 128)), {"column_major": True}),
        Sample("empty", (x(7, 0), x(0)), {}),
    ]


def quantize_rms_norm_dual(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    beside = Sample("ragged_beside_square", (x(70, 131), x(131)), {"dual_block": (128, 128)})
    return [*(sample for sample in quantize_rms_norm(seed, device) if sample.label != "turned"), beside]


def quantize_add_rms_norm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    return [
        Sample("plain", (x(64, 256), x(64, 256), x(256)), {}),
        Sample("ragged", (x(77, 99), x(77, 99), x(99), 1e-3, (128, 1)), {"scale": "pow2"}),
        Sample("whole", (x(2, 33, 72, dtype=FP16), x(2, 33, 72, dtype=FP16), x(72, dtype=FP16), 1e-5, (1, -1)), {}),
        Sample("strided", (x(96, 64).mT, x(64, 192)[:, ::2], x(192)[::2]), {"dtype": torch.float8_e5m2}),
        Sample("empty", (x(7, 0), x(7, 0), x(0)), {}),
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
        Sample("invariant", (*_operand(x(33, 96), row), *_operand(x(96, 40), square)), {"batch_invariant": True}),
        Sample("fast", (*_operand(x(32, 96), (1, -1)), *_operand(x(96, 48), (-1, 1))), {"fast_accumulation": True}),
        Sample("batched", (*_operand(x(2, 48, 80), (1, -1)), *_operand(x(2, 80, 32), (-1, 1)), x(32, dtype=FP32)), {}),
        Sample("batched_left", (*_operand(x(3, 24, 160), row), *_operand(x(160, 32), col)), {"out_dtype": FP16}),
        Sample("strided", (*_operand(x(160, 48).mT, whole), *_operand(x(64, 160).mT, whole)), {}),
        Sample("e5m2", (*_operand(x(48, 160), row, **e5m2), *_operand(x(160, 64), square)), {}),
        Sample("mx", (*_operand(x(24, 96), (1, 32), **mx), *_operand(x(96, 40), (32, 1), **mx)), {}),
        Sample("empty", (*_operand(x(16, 0), row), *_operand(x(0, 16), square), x(16)), {}),
    ]


def _summed(
    a: Tensor, b: Tensor, offsets: Tensor, block: int = 128, square: str = ""
) -> tuple[Tensor, Tensor, Block, Tensor, Tensor, Block, Tensor]:
    """Operands of a product that sums over each group's tokens: `a (M, R)` and `b (M, N)`, one of them in squares."""
    columns = {name: block if name == square else 1 for name in ("a", "b")}
    form: Any = None, "rceil" if block == 32 else "fp32"
    data, scale = torch.ops.fp8fn.quantize_grouped(a, offsets, (block, columns["a"]), *form)
    right = torch.ops.fp8fn.quantize_grouped(b, offsets, (block, columns["b"]), *form)
    return data.mT, scale.mT, (columns["a"], block), *right, (block, columns["b"]), offsets


def mx_mm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2: dict[str, Any] = {"scale": "e8m0", "dtype": torch.float8_e5m2}

    def pair(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, ...]:
        options = options or {"scale": "e8m0"}
        return *_operand(a, (1, 32), **options)[:2], *_operand(b, (32, 1), **options)[:2]

    return [
        Sample("plain", pair(x(64, 256), x(384, 256).mT), {}),
        Sample("plain_row", (*pair(x(1, 160), x(160, 96), **e5m2), x(96, dtype=FP32)), {"out_dtype": FP32}),
        Sample("ragged", (*pair(x(33, 190), x(190, 65), scale="rceil"), x(65)), {}),
        Sample("batched", pair(x(2, 24, 80, dtype=FP16), x(2, 80, 32, dtype=FP16)), {"out_dtype": FP16}),
        Sample("batched_left", (*pair(x(3, 24, 96), x(96, 40)), x(40)), {}),
        Sample("strided", (*pair(x(160, 48).mT, x(160, 64)), x(128)[::2]), {}),
        Sample("constant", (*pair(x(20, 128), x(128, 72)), x(72)), {"constant": True}),
        Sample("empty", (*pair(x(0, 64), x(64, 48)), x(48)), {}),
        Sample("empty_k", (*pair(x(16, 0), x(0, 48)), x(48)), {}),
    ]


def _routed(seed: int, tokens: int, top_k: int, experts: int, block_m: int, device: Any) -> tuple[Tensor, ...]:
    """The layout of tokens that chose among one expert too many, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    return tuple(part.to(device) for part in sort_tokens(chosen, experts, block_m))


def moe_gemm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    mx: dict[str, Any] = {"scale": "e8m0"}

    def block(a: Tensor, w: Tensor) -> tuple[Any, ...]:
        return *_operand(a, (1, 128)), *_operand(w, (128, 128))

    def small(a: Tensor, w: Tensor) -> tuple[Any, ...]:
        return *_operand(a, (1, 32), **mx), *_operand(w, (32, 1), **mx)

    def routed(tokens: int, top_k: int, experts: int, block_m: int) -> tuple[Tensor, ...]:
        return _routed(seed, tokens, top_k, experts, block_m, device)

    weights, strided = x(22, dtype=FP32), x(44, dtype=FP32)[::2]
    return [
        Sample("plain", (*small(x(12, 64), x(4, 48, 64).mT), *routed(12, 2, 4, 16), 2, 2), {}),
        Sample("plain_blockwise", (*block(x(12, 256), x(3, 48, 256).mT), *routed(6, 2, 3, 16), 2, 1), {}),
        Sample("ragged", (*small(x(11, 70), x(5, 70, 33)), *routed(11, 2, 5, 16), 2, 2, weights), {"out_dtype": FP32}),
        Sample("strided", (*block(x(160, 11).mT, x(5, 160, 40)), *routed(11, 2, 5, 4), 2, 2, strided), {}),
        Sample("empty", (*small(x(0, 64), x(3, 64, 32)), *routed(0, 2, 3, 16), 2, 2), {}),
    ]


def scaled_grouped_mm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2, mx = {"dtype": torch.float8_e5m2}, {"scale": "e8m0"}
    row, col, square, whole = (1, 128), (128, 1), (128, 128), (1, -1)
    few, many = _ends(50, 50, 64, device=device), _ends(0, 3, 20 + seed % 7, 33, device=device)
    large = _ends(500 + seed % 7, 1025, device=device)
    return [
        Sample("plain", (*_operand(x(64, 256), row), *_operand(x(3, 256, 128), square), few), {}),
        Sample("plain_columns", (*_operand(x(70, 256), row, **e5m2), *_operand(x(3, 256, 96), col), few), {}),
        Sample("plain_summed", _summed(x(64, 128), x(64, 256), few), {"out_dtype": FP16}),
        Sample("ragged", (*_operand(x(41, 190), row), *_operand(x(4, 190, 65), square), many, x(4, 65)), {}),
        Sample("ragged_summed", (*_summed(x(41, 33), x(41, 70), many), x(4, 70)), {}),
        Sample("ragged_summed_large", _summed(x(1030, 33), x(1030, 20), large), {}),
        Sample("summed_square_a", _summed(x(41, 256), x(41, 70), many, square="a"), {}),
        Sample("summed_square_b", (*_summed(x(41, 33), x(41, 270), many, square="b"), x(4, 270)), {}),
        Sample("ragged_summed_mx", _summed(x(41, 33), x(41, 70), many, 32), {}),
        Sample("ragged_summed_whole", _summed(x(41, 33), x(41, 70), many, -1), {"out_dtype": FP32}),
        Sample("strided", (*_operand(x(80, 64).mT, whole), *_operand(x(3, 48, 80).mT, (-1, 1)), few), {}),
        Sample("strided_whole", (*_operand(x(40, 80), (-1, -1)), *_operand(x(4, 80, 48), (-1, -1)), many), {}),
        Sample("mx", (*_operand(x(40, 80), (1, 32), **mx), *_operand(x(4, 80, 48), (32, 1), **mx), many), {}),
        Sample("empty", (*_operand(x(0, 40), row), *_operand(x(3, 40, 16), square), few, x(3, 16)), {}),
        Sample("empty_summed", _summed(x(0, 40), x(0, 16), few), {}),
        *_masked_scaled_mm(x, seed, device),
    ]


def _masked_scaled_mm(x: _Normal, seed: int, device: torch.device | str) -> list[Sample]:
    """`scaled_grouped_mm` of the first rows of each expert, with counts below 0 and above the room for rows."""
    row, square = (1, 128), (128, 128)
    few, many = _ends(24, 0, 7, device=device), _ends(seed % 7, -1, 41, 50, device=device)
    whole = _ends(24, 25, 99, device=device)  # leaves no row unwritten, which would have no value to compare
    return [
        Sample(
            "plain_masked",
            (*_operand(x(3, 24, 256), row), *_operand(x(3, 256, 128), square), None, None, FP32, few),
            {},
        ),
        Sample(
            "ragged_masked",
            (*_operand(x(4, 41, 190), row), *_operand(x(4, 190, 65), square), None, x(4, 65), FP32, many),
            {},
        ),
        Sample(
            "masked_whole",
            (*_operand(x(3, 24, 96), (1, -1)), *_operand(x(3, 96, 48), (-1, 1)), None, None, None, few),
            {},
        ),
        Sample(
            "masked_unwritten",
            (*_operand(x(3, 24, 96), row), *_operand(x(3, 96, 48), (128, 1)), None, None, FP16, whole),
            {"zeros": False},
        ),
        Sample(
            "masked_expected",
            (*_operand(x(3, 24, 96), row), *_operand(x(3, 96, 48), square), None, None, FP32, few),
            {"expected_rows": 10},
        ),
        Sample(
            "empty_masked",
            (*_operand(x(3, 0, 40), row), *_operand(x(3, 40, 16), square), None, x(3, 16), FP32, few),
            {},
        ),
    ]


def grouped_gemm(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    few, many = _ends(50, 50, 64, device=device), _ends(0, 3, 20 + seed % 7, 33, device=device)
    return [
        Sample("plain", (x(64, 128), x(3, 96, 128).mT, few), {}),
        Sample("plain_bias", (x(70, 128), x(3, 128, 48), few, x(3, 48, dtype=FP32)), {"recipe": "hybrid"}),
        Sample("ragged", (x(41, 190), x(4, 190, 65), many, x(4, 65)), {"out_dtype": FP32}),
        Sample("ragged_whole", (x(41, 70, dtype=FP16), x(4, 70, 33, dtype=FP16), many), {"recipe": "rowwise"}),
        Sample("ragged_mx", (x(41, 70), x(4, 70, 33), many), {"recipe": "mxfp8"}),
        Sample("ragged_square", (x(41, 190), x(4, 190, 65), many), {"recipe": "blockwise_square"}),
        Sample("plain_square", (x(64, 256), x(3, 96, 256).mT, few), {"recipe": "blockwise_square"}),
        Sample("ragged_k", (x(33, 41), x(41, 70), many, x(4, 70)), {"recipe": "blockwise_pow2"}),
        Sample("ragged_k_whole", (x(33, 41), x(41, 70), many), {"recipe": "rowwise"}),
        Sample("strided", (x(96, 64).mT, x(3, 96, 80)[..., ::2], few), {}),
        Sample("strided_k", (x(64, 48).mT, x(40, 64).mT, few), {}),
        Sample("batched", (x(3, 24, 96), x(3, 96, 40)), {"recipe": "mxfp8"}),
        Sample("empty", (x(0, 64), x(3, 64, 32), few), {}),
        Sample("empty_k", (x(16, 0), x(0, 32), few), {}),
        Sample("masked", (x(3, 24, 96), x(3, 96, 40), None, None, "blockwise", None, few), {}),
        Sample("masked_bias", (x(4, 41, 70), x(4, 70, 33), None, x(4, 33), "rowwise", FP32, many), {}),
    ]


def expert_mlp(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    few, many = _ends(50, 50, 64, device=device), _ends(0, 3, 20 + seed % 7, 33, device=device)
    return [
        Sample("plain", (x(64, 128), x(3, 256, 128).mT, x(3, 128, 128).mT, few), {}),
        Sample("ragged", (x(41, 70), x(4, 70, 66), x(4, 33, 70), many), {"recipe": "blockwise_pow2"}),
        Sample("ragged_whole", (x(41, 70), x(4, 70, 66), x(4, 33, 40), many), {"recipe": "rowwise"}),
        Sample("ragged_square", (x(41, 190), x(4, 190, 66), x(4, 33, 70), many), {"recipe": "blockwise_square"}),
        Sample("strided", (x(48, 64).mT, x(3, 48, 160)[..., ::2], x(3, 48, 40).mT, few), {"recipe": "hybrid"}),
        Sample("empty", (x(0, 64), x(3, 64, 32), x(3, 16, 64), few), {}),
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
        Sample("constant", (x(8, 256), *_operand(x(160, 256).mT, square)), {"constant": True}),
        Sample("ragged", (x(33, 190), *_operand(x(65, 190).mT, square), x(65)), {}),
        Sample("ragged_float32", (x(5, 70, dtype=FP32), *_operand(x(70, 33), (1, -1)), x(33, dtype=FP16)), {}),
        Sample("batched", (x(2, 24, 80, dtype=FP16), *_operand(x(2, 80, 32), (-1, 1)), x(2, 32)), {}),
        Sample("batched_left", (x(3, 24, 160), *_operand(x(160, 32), col), x(3, 1, 32)), {"out_dtype": FP16}),
        Sample("batched_right", (x(24, 160), *_operand(x(3, 160, 32), col), x(32, dtype=FP32)), {}),
        Sample("strided", (x(160, 48).mT, *_operand(x(64, 160).mT, (-1, -1)), x(128)[::2]), {}),
        Sample("mx", (x(24, 96), *_operand(x(96, 40), (32, 1), **mx)), {}),
        Sample("mx_dgrad", (x(24, 40), *_operand(x(40, 96), (1, 32), **mx)), {}),
        Sample("quantized", (x(2, 130, 160), *_operand(x(96, 160).mT, square), x(96)), {"activations": "fp8"}),
        Sample("plain_fast", (x(300, 160), *_operand(x(96, 160).mT, (-1, 1)), x(96)), {"activations": "fp8_fast"}),
        Sample("invariant", (x(33, 96), *_operand(x(40, 96).mT, square), x(40)), {"batch_invariant": True}),
        Sample("empty", (x(16, 0), *_operand(x(0, 16), square), x(16)), {}),
    ]


def silu_mul_mm_a16w8(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2, square = {"dtype": torch.float8_e5m2}, (128, 128)
    beside = x(8, 512)
    return [
        Sample("plain", (x(1, 256), x(1, 256), *_operand(x(384, 256).mT, square)), {}),
        Sample("strided", (beside[:, :256], beside[:, 256:], *_operand(x(160, 256).mT, square)), {"constant": True}),
        Sample("ragged", (x(5, 190, dtype=FP16), x(5, 190, dtype=FP16), *_operand(x(65, 190).mT, (128, 1))), {}),
        Sample("float32", (x(3, 70, dtype=FP32), x(3, 70, dtype=FP32), *_operand(x(70, 33), (1, 128), **e5m2)), {}),
        Sample("many", (x(130, 128), x(130, 128), *_operand(x(96, 128).mT, (-1, 1))), {}),
        Sample("empty", (x(0, 128), x(0, 128), *_operand(x(16, 128).mT, square)), {}),
    ]


def mm_a16w8_silu_mul(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)

    def weights(n: int, k: int, block: tuple[int, int], **options: Any) -> tuple[Any, ...]:
        """The second one without its block, which is that of the first."""
        gate, up = (_operand(x(n, k).mT, block, **options) for _ in range(2))
        return (*gate[:2], *up[:2], gate[2])

    square = (128, 128)
    return [
        Sample("plain", (x(130, 256), *weights(384, 256, square)), {}),
        Sample("strided", (x(160, 144).mT, *weights(64, 160, (128, 1))), {}),
        Sample("ragged", (x(33, 190, dtype=FP16), *weights(65, 190, square)), {}),
        Sample("float32", (x(3, 70, dtype=FP32), *weights(33, 70, (-1, 1), dtype=torch.float8_e5m2)), {}),
        Sample("empty", (x(0, 128), *weights(16, 128, square)), {}),
    ]


def grouped_mm_a16w8(seed: int = 0, device: torch.device | str = "cpu") -> list[Sample]:
    x = _Normal(seed, device)
    e5m2, mx, square = {"dtype": torch.float8_e5m2}, {"scale": "e8m0"}, (128, 128)
    few, many = _ends(50, 50, 64, device=device), _ends(0, 3, 20 + seed % 7, 33, device=device)
    return [
        Sample("plain", (x(64, 256), *_operand(x(3, 96, 256).mT, square), few), {}),
        Sample("plain_row_major", (x(70, 160), *_operand(x(3, 160, 48), (1, 128), **e5m2), few), {"out_dtype": FP32}),
        Sample("ragged", (x(41, 190), *_operand(x(4, 190, 65), square), many, x(4, 65)), {}),
        Sample("ragged_float32", (x(41, 70, dtype=FP32), *_operand(x(4, 70, 33), (-1, 1)), many), {}),
        Sample("strided", (x(80, 64).mT, *_operand(x(3, 48, 80).mT, (-1, -1)), few, x(3, 96)[:, ::2]), {}),
        Sample("mx", (x(40, 80, dtype=FP16), *_operand(x(4, 80, 48), (32, 1), **mx), many), {}),
        Sample(
            "quantized",
            (x(400, 160), *_operand(x(3, 96, 160).mT, square), _ends(40, 40, 390, device=device), x(3, 96)),
            {"activations": "fp8"},
        ),
        Sample(
            "plain_fast",
            (x(400, 160), *_operand(x(3, 96, 160).mT, (-1, 1)), _ends(40, 40, 390, device=device), x(3, 96)),
            {"activations": "fp8_fast"},
        ),
        Sample("empty", (x(0, 40), *_operand(x(3, 40, 16), square), few, x(3, 16)), {}),
        Sample("empty_k", (x(16, 0), *_operand(x(3, 0, 16), square), few), {}),
    ]


SAMPLES: Final[dict[str, Callable[..., list[Sample]]]] = {
    "amax": amax,
    "quantize": quantize,
    "quantize_dual": quantize_dual,
    "quantize_grouped": quantize_grouped,
    "quantize_grouped_dual": quantize_grouped_dual,
    "quantize_silu_mul_grouped": quantize_silu_mul_grouped,
    "quantize_silu_mul_grouped_dual": quantize_silu_mul_grouped_dual,
    "quantize_silu_mul_grad_grouped_dual": quantize_silu_mul_grad_grouped_dual,
    "quantize_silu_mul": quantize_silu_mul,
    "quantize_silu_mul_saved": quantize_silu_mul_saved,
    "quantize_silu_mul_backward": quantize_silu_mul_backward,
    "quantize_silu_mul_dual": quantize_silu_mul_dual,
    "quantize_rms_norm": quantize_rms_norm,
    "quantize_rms_norm_dual": quantize_rms_norm_dual,
    "quantize_add_rms_norm": quantize_add_rms_norm,
    "scaled_mm": scaled_mm,
    "mm_a16w8": mm_a16w8,
    "grouped_mm_a16w8": grouped_mm_a16w8,
    "silu_mul_mm_a16w8": silu_mul_mm_a16w8,
    "mm_a16w8_silu_mul": mm_a16w8_silu_mul,
    "mx_mm": mx_mm,
    "moe_gemm": moe_gemm,
    "gemm": gemm,
    "scaled_grouped_mm": scaled_grouped_mm,
    "grouped_gemm": grouped_gemm,
    "expert_mlp": expert_mlp,
}
