"""Quantizers around `silu(gate) * up`: `bench quant --suite silu_mul`.

In training `forward` and `backward` keep gate and up in FP8. `backward bf16` reads gate and up in bf16, as the default
mode does. `whole rows` is what a model computes whose FP8 weights have one scale for each output.

Each direction is measured as one launch and as the launches that it merges. In the backward these are a kernel that
Inductor generates (PyTorch's own operations on a CPU), two quantizers of a gradient and one of the product. TB/s count
the bytes of the one launch: gate, up and their gradients `(M, N)` are bf16 outside, and no product is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.ops import reference
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.timing import Call

ROW, COLUMN, WHOLE_ROW = (1, 128), (128, 1), (1, WHOLE)
_ops: Final = torch.ops.fp8fn


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N)`."""
    m, n = shape
    gate, up, grad = (normal(m, n, device, seed) for seed in range(3))
    kept = [part for x in (gate, up) for part in _ops.quantize(x, ROW)]
    copy = torch.empty_like(gate)
    scales = 4 * m * n / 128
    forward = 7.0 * m * n + 3 * scales  # reads 2 in bf16, writes 3 in FP8
    backward = 9.0 * m * n + 7 * scales  # reads 2 in FP8 and 1 in bf16, writes 5 in FP8

    values = 11.0 * m * n + 5 * scales  # reads 3 in bf16, writes 5 in FP8
    given = (gate, None, up, None)

    def product() -> dict[str, Tensor]:
        return {"product": F.silu(gate.float()) * up.float()}

    def saved() -> dict[str, Tensor]:
        return {**product(), "gate": gate, "up": up}

    def gradients(inputs: Sequence[Any]) -> dict[str, Tensor]:
        names = ("grad_gate", "grad_gate_columns", "grad_up", "grad_up_columns", "product")
        of_gate, of_up, wide_gate, wide_up = dequantized_gradients(grad, *inputs)
        made = F.silu(wide_gate.float()) * wide_up.float()
        return dict(zip(names, (of_gate, of_gate, of_up, of_up, made), strict=True))

    return [
        _case("forward", lambda: lambda: _ops.quantize_silu_mul_saved(gate, up), saved, forward),
        _case("whole rows", lambda: lambda: _ops.quantize_silu_mul(gate, up, WHOLE_ROW), product, 5.0 * m * n + 4 * m),
        _case("forward, 3 launches", lambda: lambda: forward_apart(gate, up), saved, forward),
        _case(
            "backward", lambda: lambda: _ops.quantize_silu_mul_backward(grad, *kept), partial(gradients, kept), backward
        ),
        _case("backward, 4 launches", lambda: backward_apart(grad, kept), partial(gradients, kept), backward),
        _case(
            "backward bf16",
            lambda: lambda: _ops.quantize_silu_mul_backward(grad, *given),
            partial(gradients, given),
            values,
        ),
        _case("backward bf16, 4 launches", lambda: backward_apart(grad, given), partial(gradients, given), values),
        Case("torch", "copy", lambda: lambda: copy.copy_(gate), None, bytes=4.0 * m * n, ceiling=True),
    ]


def _case(name: str, build: Callable[[], Call], exact: Callable[[], Mapping[str, Tensor]], moved: float) -> Case:
    def accuracy(results: Sequence[Tensor]) -> dict[str, float]:
        pairs = zip(exact().items(), results[::2], results[1::2], strict=True)
        return {
            of: snr_db(value, reference.dequantize(data, scale, _block(of, name))) for (of, value), data, scale in pairs
        }

    return Case("fp8fn", name, build, accuracy, bytes=moved)


def _block(of: str, name: str) -> Block:
    if name == "whole rows":
        return WHOLE_ROW
    by_column = of.endswith("columns") or (of == "product" and name.startswith("backward"))
    return COLUMN if by_column else ROW


def forward_apart(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """The results of `quantize_silu_mul_saved` by the op of each."""
    return (*_ops.quantize_silu_mul(gate, up), *_ops.quantize(gate, ROW), *_ops.quantize(up, ROW))


def dequantized_gradients(
    grad: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gate and of up, and gate and up, in the type of `grad`."""
    wide = [_dequantized(data, scale).to(grad.dtype) for data, scale in ((gate, gate_scale), (up, up_scale))]
    of_gate = torch.ops.aten.silu_backward(grad * wide[1], wide[0])
    return of_gate, grad * F.silu(wide[0]), wide[0], wide[1]


def _dequantized(data: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return data
    wide: Tensor = data.float().unflatten(-1, (-1, ROW[1])) * scale[..., None]
    return wide.flatten(-2)


def backward_apart(grad: Tensor, kept: Sequence[Any]) -> Callable[[], tuple[Any, ...]]:
    """A call with the results of `quantize_silu_mul_backward` by a kernel of Inductor's and the op of each."""
    compute = torch.compile(dequantized_gradients, fullgraph=True) if grad.is_cuda else dequantized_gradients

    def call() -> tuple[Any, ...]:
        of_gate, of_up, gate, up = compute(grad, *kept)
        return (*_ops.quantize_dual(of_gate), *_ops.quantize_dual(of_up), *_ops.quantize_silu_mul(gate, up, COLUMN))

    return call
