"""Tensors that are quantized beside each other: the bytes of their concatenation, with a launch for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.ops import quantize_joined as ops
from fp8fn.ops import reference
from support.accuracy import assert_same_bits
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.operands.values import random

SQUARE = (128, 128)
op = torch.ops.fp8fn


def weights(*widths: int, rows: int = 136) -> tuple[Tensor, ...]:
    """As the forward multiplies by them."""
    return tuple(random(width, rows, dtype=torch.bfloat16, seed=seed).mT for seed, width in enumerate(widths))


def assert_all_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@needs_compiler
@pytest.mark.parametrize(
    ("xs", "form"),
    [
        (weights(256, 128, 128), {"block": SQUARE, "column_major": True}),
        (weights(128, 256), {"block": SQUARE, "column_major": False, "scale": "pow2"}),
        (tuple(x.contiguous() for x in weights(128, 256, rows=70)), {"block": (1, 128), "dtype": torch.float8_e5m2}),
    ],
    ids=["forward", "dgrad", "rows"],
)
def test_one_orientation(xs: tuple[Tensor, ...], form: dict[str, Any]) -> None:
    with hopper_on_cpu() as launches:
        found = [ops.quantize_joined_kernel(*xs, *[None] * (3 - len(xs)), **form) for _ in range(2)]
    dtype, layout = form.get("dtype", torch.float8_e4m3fn), form.get("column_major")
    wanted = reference.quantize(torch.cat(xs, -1), form["block"], dtype, form.get("scale", "fp32"), None, layout)
    for each in found:
        assert_all_same(each, wanted)
    assert len(launches) == len({(x.shape, x.stride()) for x in xs})  # planned once, then started again


@needs_compiler
@pytest.mark.parametrize("rows", [256, 300])
def test_both_orientations(rows: int) -> None:
    xs = tuple(random(rows, width, dtype=torch.bfloat16, seed=width) for width in (256, 128, 384))
    with hopper_on_cpu() as launches:
        found = ops.quantize_joined_dual_kernel(*xs)
    assert len(launches) == 3
    assert_all_same(found, reference.quantize_dual(torch.cat(xs, -1), (1, 128), torch.float8_e4m3fn, "fp32"))


def test_without_a_kernel_parts_are_copied() -> None:
    """Hopper has no kernel for AMD's types."""
    xs = tuple(random(40, width, dtype=torch.float16, seed=width) for width in (128, 256))
    form = {"dtype": torch.float8_e4m3fnuz}
    with hopper_on_cpu() as launches:
        found = ops.quantize_joined_dual_kernel(*xs, **form)
    assert not launches
    assert_all_same(found, ops.quantize_joined_dual_reference(*xs, **form))


X = torch.ones(64, 128)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: op.quantize_joined(X, X[:, :100]), ValueError, "second has 100 columns, no multiple of 128"),
        (lambda: op.quantize_joined(X, X[:32]), ValueError, "numbers of rows"),
        (lambda: op.quantize_joined(X, X, X.half()), TypeError, "third torch.float16"),
        (lambda: op.quantize_joined(X, X, None, (1, -1)), ValueError, "use one of"),
        (lambda: op.quantize_joined_dual(X[None], X), ValueError, "must be a matrix"),
        (lambda: op.quantize_joined(X, X, None, (1, 128), column_major=True), ValueError, "always row-major"),
    ],
)
def test_errors(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
