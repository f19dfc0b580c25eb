"""The op `fp8fn::mm_a16w8_siblings`: products of one matrix by two or three FP8 weights, such as those of q, k and v.

One launch computes the products of up to 16 rows. More rows are split into FP8 parts by a launch before it. Passes over
compiled graphs call the op. Its schema is in `ops/mm_a16w8.py`: a process that never calls it does not import this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.kernel import Dispatch, Kernel, deferred
from fp8fn.ops.mm_a16w8 import check_matrices, check_weight_operands, unserved
from fp8fn.ops.operands import Beside, Quantized, WeightProduct
from fp8fn.ops.scaled_mm import empty_output
from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from fp8fn.ops.cuda.gemm import a16w8_tiles, parts_a16w8
else:
    a16w8_tiles = deferred("fp8fn.ops.cuda.gemm.a16w8_tiles")
    parts_a16w8 = deferred("fp8fn.ops.cuda.gemm.parts_a16w8")

FEWEST_SIBLINGS: Final = 2
MOST_SIBLINGS: Final = 3
MOST_SIBLING_ROWS: Final = 768
_NAME: Final = "mm_a16w8_siblings"


def _checked(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], bias: Sequence[Tensor | None], w_block: Sequence[int]
) -> list[Quantized]:
    """The weights, or the error that says which argument is wrong and what would work."""
    if not len(w) == len(w_scale) == len(bias) or not FEWEST_SIBLINGS <= len(w) <= MOST_SIBLINGS:
        raise ValueError(f"{_NAME}: {len(w)} w, {len(w_scale)} w_scale and {len(bias)} bias; pass two or three of each")
    blocks = []
    for i, (data, scale, row) in enumerate(zip(w, w_scale, bias, strict=True)):
        check_matrices(_NAME, **{"x": x, f"w[{i}]": data})
        blocks.append(check_weight_operands(_NAME, x, (data, scale, w_block), row, None))
        if row is not None and row.shape != data.shape[1:]:
            raise ValueError(f"{_NAME}: bias[{i}] has shape {tuple(row.shape)}; it must be ({data.shape[1]},)")
    return [Quantized(*each) for each in zip(w, w_scale, blocks, strict=True)]


def mm_a16w8_siblings_reference(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], bias: Sequence[Tensor | None], w_block: Sequence[int],
    constant: bool = False,
) -> list[Tensor]:  # fmt: skip
    """`constant` has no effect here."""
    weights = _checked(x, w, w_scale, bias, w_block)
    return [reference.mm_a16w8(x, *each, x.dtype) for each in zip(weights, bias, strict=True)]


def mm_a16w8_siblings_fake(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], bias: Sequence[Tensor | None], w_block: Sequence[int],
    constant: bool = False,
) -> list[Tensor]:  # fmt: skip
    return [empty_output(x, each.data, x.dtype) for each in _checked(x, w, w_scale, bias, w_block)]


def mm_a16w8_siblings_kernel(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], bias: Sequence[Tensor | None], w_block: Sequence[int],
    constant: bool = False,
) -> list[Tensor]:  # fmt: skip
    constant = constant or graph_capture.readable(*w, *w_scale)
    given = [*chain.from_iterable(zip(w, w_scale, bias, strict=True)), None, None, None]
    return [*MM_A16W8_SIBLINGS((x, *given[: 3 * MOST_SIBLINGS]), (tuple(w_block), constant))]


def serves_siblings(
    x: Tensor, weights: Sequence[Quantized], biases: Sequence[Tensor | None], target: Target, *, constant: bool = False
) -> str | None:
    """None where one launch computes the products on a GPU, else why not."""
    product = _product(x, weights, biases, target, constant)
    if (reason := unserved(product)) is not None:
        return reason
    reasons = [kernel.accepts(product) or kernel.untuned(product) for kernel in _KERNELS]
    return None if None in reasons else "; ".join(map(str, dict.fromkeys(reasons)))


def _product(
    x: Tensor, weights: Sequence[Quantized], biases: Sequence[Tensor | None], target: Target, constant: bool
) -> WeightProduct:
    (w, bias, out), *others = (
        Beside(each, row, empty_output(x, each.data, x.dtype)) for each, row in zip(weights, biases, strict=True)
    )
    return WeightProduct(x=x, w=w, bias=bias, out=out, beside=tuple(others), target=target, constant=constant)


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (x, *given), (w_block, constant) = tensors, values
    count = sum(each is not None for each in given[::3])
    w, w_scale, bias = (given[place::3][:count] for place in range(3))
    weights = _checked(x, w, w_scale, bias, w_block)
    return _product(x, weights, bias, targets.target_of(x.device), constant)


def _one_by_one(product: WeightProduct) -> list[Tensor]:
    every = (Beside(product.w, product.bias, product.out), *product.beside)
    return [torch.ops.fp8fn.mm_a16w8(product.x, *w, bias, constant=product.constant) for w, bias, _ in every]


_KERNELS: Final = (
    Kernel("cuda_parts", parts_a16w8.accepts_beside, parts_a16w8.configure, parts_a16w8.plan, parts_a16w8.untuned),
    Kernel("cuda_tiles", a16w8_tiles.accepts_beside, a16w8_tiles.configure, a16w8_tiles.plan, a16w8_tiles.untuned),
)

MM_A16W8_SIBLINGS: Final = Dispatch(
    op=_NAME,
    inputs=(
        "x", "w", "w_scale", "bias", "w_second", "w_second_scale", "bias_second", "w_third", "w_third_scale",
        "bias_third",
    ),
    operands=_operands,
    kernels=_KERNELS,
    reference=_one_by_one,
    unserved=unserved,
)  # fmt: skip
