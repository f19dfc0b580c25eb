"""The op `fp8fn::mm_a16w8_siblings`: products of one matrix by two or three FP8 weights, such as those of q, k and v.

One launch computes those of few rows. Passes over compiled graphs call the op. Its schema is in `ops/mm_a16w8.py`: a
process that never calls it does not import this file.
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
from fp8fn.ops.mm_a16w8 import check_weight_operands, unserved
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import WeightProduct
from fp8fn.ops.scaled_mm import empty_output
from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from fp8fn.ops.cuda.gemm import a16w8_tiles
else:
    a16w8_tiles = deferred("fp8fn.ops.cuda.gemm.a16w8_tiles")

FEWEST_SIBLINGS: Final = 2
MOST_SIBLINGS: Final = 3
_NAME: Final = "mm_a16w8_siblings"


def _checked(x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], w_block: Sequence[int]) -> list[Quantized]:
    """The weights, or the error that says which argument is wrong and what would work."""
    if len(w) != len(w_scale) or not FEWEST_SIBLINGS <= len(w) <= MOST_SIBLINGS:
        raise ValueError(f"{_NAME}: {len(w)} w and {len(w_scale)} w_scale; pass two or three of each")
    for name, tensor, sizes in (("x", x, "M, K"), *((f"w[{i}]", each, "K, N") for i, each in enumerate(w))):
        if tensor.ndim != 2:
            raise ValueError(f"{_NAME}: {name} has shape {tuple(tensor.shape)}; it must be ({sizes})")
    blocks = [check_weight_operands(_NAME, x, (*each, w_block), None, None) for each in zip(w, w_scale, strict=True)]
    return [Quantized(*each) for each in zip(w, w_scale, blocks, strict=True)]


def mm_a16w8_siblings_reference(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], w_block: Sequence[int], constant: bool = False
) -> list[Tensor]:
    """`constant` has no effect here."""
    return [reference.mm_a16w8(x, each, None, x.dtype) for each in _checked(x, w, w_scale, w_block)]


def mm_a16w8_siblings_fake(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], w_block: Sequence[int], constant: bool = False
) -> list[Tensor]:
    return [empty_output(x, each.data, x.dtype) for each in _checked(x, w, w_scale, w_block)]


def mm_a16w8_siblings_kernel(
    x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], w_block: Sequence[int], constant: bool = False
) -> list[Tensor]:
    constant = constant or graph_capture.readable(*w, *w_scale)
    weights = [*chain.from_iterable(zip(w, w_scale, strict=True)), None, None]
    return [*MM_A16W8_SIBLINGS((x, *weights[: 2 * MOST_SIBLINGS]), (tuple(w_block), constant))]


def serves_siblings(x: Tensor, weights: Sequence[Quantized], target: Target, *, constant: bool = False) -> str | None:
    """None where one launch computes the products on a GPU, else why not."""
    product = _product(x, weights, target, constant)
    return unserved(product) or _accepts(product)


def _product(x: Tensor, weights: Sequence[Quantized], target: Target, constant: bool) -> WeightProduct:
    (first, out), *others = ((each, empty_output(x, each.data, x.dtype)) for each in weights)
    return WeightProduct(x=x, w=first, out=out, beside=tuple(others), target=target, constant=constant)


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (x, *given), (w_block, constant) = tensors, values
    w, w_scale = ([each for each in part if each is not None] for part in (given[::2], given[1::2]))
    return _product(x, _checked(x, w, w_scale, w_block), targets.target_of(x.device), constant)


def _accepts(product: WeightProduct) -> str | None:
    return a16w8_tiles.accepts_beside(product) or a16w8_tiles.untuned(product)


def _one_by_one(product: WeightProduct) -> list[Tensor]:
    weights = (product.w, *(each for each, _ in product.beside))
    return [torch.ops.fp8fn.mm_a16w8(product.x, *each, constant=product.constant) for each in weights]


MM_A16W8_SIBLINGS: Final = Dispatch(
    op=_NAME,
    inputs=("x", "w", "w_scale", "w_second", "w_second_scale", "w_third", "w_third_scale"),
    operands=_operands,
    kernels=(Kernel("cuda_tiles", _accepts, a16w8_tiles.configure, a16w8_tiles.plan),),
    reference=_one_by_one,
    unserved=unserved,
)
