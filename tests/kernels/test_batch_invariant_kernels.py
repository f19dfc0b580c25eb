"""The kernels of batch-invariant products: one choice for every number of rows, and equal bits of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import mm_a16w8, scaled_mm
from fp8fn.ops.targets import SM89, SM90, SM100, Target
from fp8fn.ops.tuning.problem import Problem, empty_product
from support.cuda_emulator import emulate, needs_compiler
from support.operands.weights import assert_right, operand, operands
from support.products import weight_product

WIDTHS = ((6144, 4096), (4096, 14336), (128256, 4096), (72, 768), (64, 100))


@pytest.mark.parametrize("target", [SM89, SM90, SM100], ids=lambda target: target.name)
def test_rows_do_not_decide(target: Target) -> None:
    for n, k in WIDTHS:
        weights = [
            replace(operands(m, n, k, constant=constant), target=target)
            for m in (1, 2, 9, 16, 17, 33, 128, 129, 256)
            for constant in (False, True)
        ]
        chosen = {(choice.name, choice.config) for choice in map(mm_a16w8.MM_A16W8_INVARIANT.choose, weights)}
        assert len(chosen) == 1
        products = [empty_product(Problem(m, n, k), "meta", target) for m in (1, 16, 17, 64, 129, 256, 4096)]
        found = {(choice.name, choice.config) for choice in map(scaled_mm.SCALED_MM_INVARIANT.choose, products)}
        assert len(found) == 1
        if target is SM90:
            assert next(iter(found))[1].SPLIT == 1


@needs_compiler
def test_a_row_has_the_same_bits_in_cuda() -> None:
    """K is shared by a cluster; rows fill several tiles, more than the kernel takes by default."""
    x, w = torch.randn(150, 768).bfloat16(), operand(768, 72, (128, 128))
    kernel = mm_a16w8.MM_A16W8_INVARIANT.kernels[0]

    def product(x: Tensor) -> Tensor:
        out = torch.empty(len(x), 72)
        given = weight_product(x, w, out)
        assert kernel.accepts(given) is None
        config = kernel.configure(given)
        assert config.CLUSTER > 1
        emulate(kernel.plan(given, config)[0])
        return out

    whole = product(x)
    assert_right(whole, x, w)
    for start, end in ((0, 1), (7, 24), (11, 140), (149, 150)):
        assert torch.equal(product(x[start:end]), whole[start:end])


def test_a_row_has_the_same_bits_in_triton() -> None:
    """Rows at the same places of their tiles: the interpreter multiplies tiles by NumPy, whose sums places decide."""
    x, w = torch.randn(150, 300).bfloat16(), operand(300, 72, (128, 128))
    kernel = mm_a16w8.MM_A16W8_INVARIANT.kernels[1]

    def product(x: Tensor) -> Tensor:
        out = torch.empty(len(x), 72)
        given = weight_product(x, w, out, SM89)
        for launch in kernel.plan(given, kernel.configure(given)):
            launch.interpret()
        return out

    whole = product(x)
    assert_right(whole, x, w)
    for start, end in ((0, 1), (0, 24), (64, 70), (64, 150)):
        assert torch.equal(product(x[start:end]), whole[start:end])
