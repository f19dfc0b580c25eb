"""The kernels that linear layers launch, found by planning on `meta` tensors: in CUDA C++ for Hopper, else in Triton.

A layer `(M, N, K)` is `x (M, K) @ w (N, K)ᵀ`. The plans are those of the ops themselves, so that a kernel is the one
that a call launches. Products and quantizers that anything else serves are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops import mx_mm
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.kernel import Choice, Dispatch
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import WHOLE, Block, contracts_rows, is_column_major, is_mx, is_square, scale_shape, swap
from fp8fn.ops.operands import RMS_NORM, SILU_MUL, Quantization, Quantized, ScaledProduct
from fp8fn.ops.quantize import AMAX, QUANTIZE, Maxima
from fp8fn.ops.quantize_fused import QUANTIZE_RMS_NORM, QUANTIZE_SILU_MUL
from fp8fn.ops.quantize_silu_mul import QUANTIZE_SILU_MUL_BACKWARD, QUANTIZE_SILU_MUL_SAVED
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.scaled_mm import dispatch_of
from fp8fn.ops.silu_mul import SAVED_BLOCK, SavedSiluMul, SiluMulBackward
from fp8fn.ops.targets import Chip, Target, hopper_fault, native_e4m3

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerSetting:
    """What layers are computed with.

    Args:
        dtype: the type of `x`, `w` and the output.
        bias: whether the forward is also wanted with a bias.
        fused: whether the quantizers are also wanted that compiled models launch: fused with RMSNorm and with
            `silu(gate) * up`, and those of a matrix whose largest magnitude another launch finds.
    """

    recipe: Recipe
    dtype: torch.dtype
    target: Target
    chip: Chip
    bias: bool = False
    fused: bool = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def quantization(self, **values: Any) -> Quantization:
        return Quantization(scale=self.recipe.scale, target=self.target, **values)


def kernels_of(shapes: Sequence[Shape], setting: LayerSetting) -> tuple[CudaKernel, ...]:
    """The kernels of layers `(M, N, K)`, forward and backward, each once."""
    found = launches_of(shapes, setting)
    return tuple(dict.fromkeys(launch.kernel for launch in found if isinstance(launch, CudaLaunch)))


def launches_of(shapes: Sequence[Shape], setting: LayerSetting) -> Iterator[Launch]:
    """The launches of layers `(M, N, K)`, forward and backward.

    Raises:
        ValueError: Nothing but Triton serves the products on Hopper.
    """
    for shape in shapes:
        yield from _products(shape, setting)
        yield from _quantizers(shape, setting)
    recipe = setting.recipe
    problems = (problem for shape in shapes for problem in _problems(shape, setting).values())
    if _on_hopper(setting.target) and all(_language(_choice(*problem)) == "triton" for problem in problems):
        raise ValueError(
            f"no kernel in CUDA C++ multiplies blocks {recipe.activation_block} by {recipe.weight_block} of these "
            "sizes; use blockwise, rowwise or tensorwise"
        )


def first_product(shape: Shape, setting: LayerSetting) -> tuple[CudaKernel, ...]:
    """The kernels of a layer's forward without gradients, each once: the quantizers of x and w, and the product."""
    x, w, _ = _operands(shape, setting)
    forward = (_launches(QUANTIZE, replace(q, dual=False, dual_block=None)) for q in (x, w))
    dispatch, product = next(iter(_problems(shape, setting).values()))
    launches = (*(launch for each in forward for launch in each), *_launches(dispatch, product))
    return tuple(dict.fromkeys(launch.kernel for launch in launches if isinstance(launch, CudaLaunch)))


def _problems(shape: Shape, setting: LayerSetting) -> dict[str, tuple[Dispatch, ScaledProduct]]:
    """The products of a layer, each with what serves it, the forward first, as `fp8fn.ops.gemm` makes them."""
    (m, n, k), recipe = shape, setting.recipe
    (x, x_later), (w_later, w), (g, g_later) = (_sides(q) for q in _operands(shape, setting))
    found = {}
    for name, a, b, size in (
        ("forward", x, w, (m, n)),
        ("dgrad", g, w_later.mT, (m, k)),
        ("wgrad", g_later.mT, x_later, (n, k)),
    ):
        fast, invariant = recipe.accumulate == "fast" and name == "forward", recipe.batch_invariant and name != "wgrad"
        product = ScaledProduct(
            a=a, b=b, out=setting.empty(*size), target=setting.target, chip=setting.chip, fast=fast
        )  # fmt: skip
        in_mx = not (invariant or fast) and is_mx(a.scale, a.block, b.scale, b.block)
        found[name] = mx_mm.MX_MM if in_mx else dispatch_of(invariant, fast), product
    return found


def _sides(both: Quantization) -> tuple[Quantized, Quantized]:
    """A matrix for the product that sums over its columns' axis, and for that over its rows' axis."""
    if is_square(both.block) and not _on_hopper(both.target):
        one = replace(both, dual=False, dual_block=None).out
        return one, one
    first, second = both.outs
    return (second, first) if contracts_rows(both.block) else (first, second)


def _on_hopper(target: Target) -> bool:
    return hopper_fault(target) is None


def _products(shape: Shape, setting: LayerSetting) -> Iterator[Launch]:
    for name, (dispatch, product) in _problems(shape, setting).items():
        yield from _launches(dispatch, product)
        if setting.bias and name == "forward":
            yield from _launches(dispatch, replace(product, bias=setting.empty(product.n)))


def _operands(shape: Shape, setting: LayerSetting) -> tuple[Quantization, Quantization, Quantization]:
    """The quantizations of x, w and g for training."""
    (m, n, k), recipe = shape, setting.recipe

    def of(x: Tensor, block: Block, dual_block: Block | None, dtype: torch.dtype | None) -> Quantization:
        fp8 = dtype or native_e4m3(setting.target)
        return setting.quantization(x=x, block=block, dtype=fp8, dual=True, dual_block=dual_block)

    return (
        of(setting.empty(m, k), recipe.activation_block, recipe.wgrad_activation_block, recipe.activation_dtype),
        of(setting.empty(n, k).mT, recipe.weight_block, None, recipe.weight_dtype),
        of(setting.empty(m, n), recipe.gradient_block, None, recipe.gradient_dtype),
    )


def _quantizers(shape: Shape, setting: LayerSetting) -> Iterator[Launch]:
    """The quantizers of x, w and g for training, of x and w for inference, and those that a backward calls again."""
    operands = _operands(shape, setting)
    for q in operands:
        for form in _forms(q):
            yield from _launches(QUANTIZE, form)
            if setting.fused and q.block == (WHOLE, WHOLE):
                amax = setting.empty(*scale_shape(q.x.shape, q.block))
                yield from _launches(QUANTIZE, replace(form, amax=amax))
        if setting.fused and q.block == (WHOLE, WHOLE):
            yield from _launches(AMAX, Maxima(x=q.x, block=q.block, target=q.target))
    if setting.fused:
        yield from _fused_quantizers(operands[0], setting)


def _forms(both: Quantization) -> Iterator[Quantization]:
    """A quantization in both blocks, in each of them alone, and in the second one as a backward makes it later."""
    alone, (_, beside) = replace(both, dual=False, dual_block=None), both.blocks
    turned = is_square(beside) and _on_hopper(both.target)  # elsewhere one result of a square block serves both axes
    if not is_square(both.block) or turned:
        yield both
    yield alone
    if beside != both.block or turned:
        yield replace(alone, block=beside, column_major=not is_column_major(both.x) if turned else None)


def _fused_quantizers(x: Quantization, setting: LayerSetting) -> Iterator[Launch]:
    """The quantizers of a layer's input that compute it: a norm, or an MLP's activation, and its gradient."""
    m, k = x.x.shape
    norm = replace(x, source=RMS_NORM, other=setting.empty(k))
    known = replace(norm, rstd=setting.empty(m, dtype=torch.float32))
    activation = replace(x, source=SILU_MUL, other=setting.empty(m, k))
    for dispatch, q in ((QUANTIZE_RMS_NORM, norm), (QUANTIZE_RMS_NORM, known), (QUANTIZE_SILU_MUL, activation)):
        for form in _forms(q):
            yield from _launches(dispatch, form)
    recipe, fp8 = setting.recipe, native_e4m3(setting.target)
    kept = replace(setting.quantization(x=setting.empty(m, k), block=SAVED_BLOCK, dtype=fp8), scale="fp32")
    yield from _launches(QUANTIZE, kept)
    alone = replace(activation, dual=False, dual_block=None)
    yield from _launches(QUANTIZE_SILU_MUL_SAVED, SavedSiluMul(product=alone, gate=kept, up=kept))
    if is_square(recipe.gradient_block):  # the op writes two orientations of rows
        return
    for values in (setting.empty(m, k), Quantized(*kept.out[:2], SAVED_BLOCK)):
        for product_block in dict.fromkeys((recipe.wgrad_block, swap(recipe.gradient_block))):
            if not is_square(product_block) and not contracts_rows(product_block):
                continue
            backward = SiluMulBackward(
                grad=setting.empty(m, k), gate=values, up=values, block=recipe.gradient_block,
                dtype=recipe.gradient_dtype or fp8, scale=recipe.scale, product_block=product_block,
                product_dtype=x.dtype, target=setting.target,
            )  # fmt: skip
            yield from _launches(QUANTIZE_SILU_MUL_BACKWARD, backward)


def _launches(dispatch: Dispatch, operands: Any) -> tuple[Launch, ...]:
    """The launches of an op, or none where the kernel that is chosen is in another language than the target's."""
    choice = _choice(dispatch, operands)
    language = "cuda" if _on_hopper(operands.target) else "triton"
    return tuple(choice.plan(operands)) if choice is not None and _language(choice) == language else ()


def _choice(dispatch: Dispatch, operands: Any) -> Choice | None:
    """The kernel for operands; None where no kernel serves the op."""
    return dispatch.choose(operands) if dispatch.unserved(operands) is None else None


def _language(choice: Choice | None) -> str | None:
    """What compiles the kernel of a choice, or the name of its library; None where there is none."""
    return None if choice is None or choice.kernel is None else choice.kernel.backend
