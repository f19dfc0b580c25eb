"""Operands of products for tests of a kernel's own plan, which the op's checks have not made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.kernel import choose
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import Block
from fp8fn.ops.mm_a16w8 import KERNELS
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing, ScaledProduct, WeightProduct
from fp8fn.ops.scaled_grouped_mm import SCALED_GROUPED_MM
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import SM90, Chip, Target
from fp8fn.ops.tuning.problem import Problem, empty_product
from fp8fn.scaled_tensor import ScaledTensor


def quantized(q: ScaledTensor) -> Quantized:
    return Quantized(q.data, q.scale, q.block)


def scaled_product(a: ScaledTensor, b: ScaledTensor, out: Tensor, target: Target, **rest: Any) -> ScaledProduct:
    return ScaledProduct(a=quantized(a), b=quantized(b), out=out, target=target, **rest)


def mx_product(
    data: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], out: Tensor, target: Target, **rest: Any
) -> ScaledProduct:
    """In blocks of 32 along K."""
    a, b = Quantized(data[0], scales[0], (1, 32)), Quantized(data[1], scales[1], (32, 1))
    return ScaledProduct(a=a, b=b, out=out, target=target, **rest)


class Parts(NamedTuple):
    """A product's tensors and blocks one by one, for tests that change one of them."""

    a: Tensor
    a_scale: Tensor
    a_block: Block
    b: Tensor
    b_scale: Tensor
    b_block: Block
    bias: Tensor | None
    out: Tensor

    def product(self, target: Target, chip: Chip | None = None, offsets: Tensor | None = None) -> ScaledProduct:
        return ScaledProduct(
            a=Quantized(self.a, self.a_scale, self.a_block), b=Quantized(self.b, self.b_scale, self.b_block),
            bias=self.bias, out=self.out, offsets=offsets, target=target, chip=chip,
        )  # fmt: skip


def empty_operands(problem: Problem, device: torch.device | str) -> Parts:
    """The operands of `fp8fn.ops.tuning.problem.empty_product`."""
    product = empty_product(problem, device, SM90)
    return Parts(*product.a, *product.b, None, product.out)


def dispatched(product: ScaledProduct) -> Any:
    """The launch of `scaled_mm`, or of `scaled_grouped_mm` where the product has offsets."""
    (launch,) = (SCALED_MM if product.offsets is None else SCALED_GROUPED_MM).plan(product)
    return launch


def weight_product(x: Tensor, w: ScaledTensor, out: Tensor, target: Target = SM90, **rest: Any) -> WeightProduct:
    return WeightProduct(x=x, w=quantized(w), out=out, target=target, **rest)


def with_parts(product: WeightProduct, **parts: Any) -> WeightProduct:
    """With other parts: `data`, `scale` and `block` of w, and fields of the product."""
    of_w = {name: parts.pop(name) for name in ("data", "scale", "block") if name in parts}
    return replace(product, w=product.w._replace(**of_w), **parts)


def entry_without_parts(product: WeightProduct) -> str:
    """The name of the launch that computes a product of rows which are not split into FP8 parts."""
    product = product.as_matrix()
    (launch,) = choose(product, [kernel for kernel in KERNELS if kernel.name != "cuda_parts"]).plan(product)
    return launch.name


def routed_product(
    a: ScaledTensor, w: ScaledTensor, layout: Sequence[Tensor], a_div: int, out: Tensor, target: Target = SM90,
    token_weights: Tensor | None = None,
) -> RoutedProduct:  # fmt: skip
    return RoutedProduct(
        a=quantized(a), w=quantized(w), routing=Routing(*layout), a_div=a_div, out=out, target=target,
        token_weights=token_weights,
    )  # fmt: skip


def planned(kernel: Any, product: Any, config: Any = None) -> Any:
    """The only launch of a kernel's module, by its default configuration unless one is given."""
    launches: tuple[Launch, ...] = kernel.plan(product, kernel.configure(product) if config is None else config)
    (launch,) = launches
    return launch
