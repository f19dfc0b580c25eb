"""The op `fp8fn::moe_gemm`, products of routed tokens with their experts at decode time: schema, checks, dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.kernel import Dispatch, Kernel, Named, Tensors, deferred, takes_all
from fp8fn.ops.layout import Block
from fp8fn.ops.mx_mm import has_lines, span
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing
from fp8fn.ops.scaled_mm import Parts, check_operand
from fp8fn.ops.targets import chip_of

if TYPE_CHECKING:
    from fp8fn.ops.cuda.gemm import gemv_mx
    from fp8fn.ops.hip import envelope
    from fp8fn.ops.hip import moe_gemm as hip
    from fp8fn.ops.triton import moe_gemm as triton
    from fp8fn.ops.tuning import mx
    from fp8fn.ops.tuning.mx import MoeProblem
else:
    gemv_mx, envelope = deferred("fp8fn.ops.cuda.gemm.gemv_mx"), deferred("fp8fn.ops.hip.envelope")
    hip, triton = deferred("fp8fn.ops.hip.moe_gemm"), deferred("fp8fn.ops.triton.moe_gemm")
    mx = deferred("fp8fn.ops.tuning.mx")

MOE_GEMM_SCHEMA: Final = (
    "moe_gemm(Tensor a, Tensor a_scale, int[2] a_block, Tensor w, Tensor w_scale, int[2] w_block,"
    " Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, int top_k, int a_div,"
    " Tensor? token_weights=None, ScalarType? out_dtype=None) -> Tensor"
)

# Blocks of the activations and of the weight: MX, and blockwise.
BLOCKS: Final[tuple[tuple[Block, Block], ...]] = (((1, 32), (32, 1)), ((1, 128), (128, 128)))


def check_moe_gemm(
    a_parts: Parts, w_parts: Parts, routing: Routing, top_k: int, a_div: int, token_weights: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Quantized, Quantized]:  # fmt: skip
    """The operands with known blocks, or the error that says which argument is wrong and what would work."""
    (a, a_scale, a_block), (w, w_scale, w_block) = a_parts, w_parts
    left = check_operand("moe_gemm: a", a, a_scale, a_block)
    right = check_operand("moe_gemm: w", w, w_scale, w_block)
    if (left, right) not in BLOCKS:
        pairs = " or ".join(f"{pair[0]} with {pair[1]}" for pair in BLOCKS)
        raise ValueError(f"moe_gemm: a has blocks {left} and w {right}; use {pairs}")
    if a_scale.dtype != w_scale.dtype or (left[1] == 32 and a_scale.dtype != torch.float8_e8m0fnu):
        needed = "float8_e8m0fnu, of fp8fn.quantize(x, block, scale='e8m0')" if left[1] == 32 else "of one format"
        raise TypeError(f"moe_gemm: a_scale has dtype {a_scale.dtype} and w_scale {w_scale.dtype}; use {needed}")
    if a.ndim != 2 or w.ndim != 3:
        shapes = f"a has shape {tuple(a.shape)} and w {tuple(w.shape)}"
        raise ValueError(f"moe_gemm: {shapes}; they must be (R, K) and (E, K, N), E experts")
    if a.shape[1] != w.shape[1]:
        raise ValueError(
            f"moe_gemm: a {tuple(a.shape)} has K={a.shape[1]} and w {tuple(w.shape)} has K={w.shape[1]}; "
            "w must be (E, K, N), so pass weight.mT for a weight of shape (E, N, K)"
        )
    if top_k < 1 or a_div < 1:
        raise ValueError(f"moe_gemm: top_k={top_k} and a_div={a_div}; both must be 1 at least")
    ids = a.shape[0] * a_div
    if ids % top_k != 0:
        raise ValueError(
            f"moe_gemm: a has {a.shape[0]} rows, for {ids} ids with a_div={a_div}; that is no multiple of "
            f"top_k={top_k}: use a_div=top_k where a has a row for each token, a_div=1 where it has one for each id"
        )
    _check_layout(routing)
    if token_weights is not None and (token_weights.dtype != torch.float32 or tuple(token_weights.shape) != (ids,)):
        given = f"{token_weights.dtype} of shape {tuple(token_weights.shape)}"
        raise ValueError(f"moe_gemm: token_weights is {given}; it must be torch.float32 of shape ({ids},), one an id")
    for name, tensor in (
        ("a_scale", a_scale),
        ("w", w),
        ("w_scale", w_scale),
        *routing._asdict().items(),
        ("token_weights", token_weights),
    ):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"moe_gemm: a is on {a.device} and {name} on {tensor.device}; move them to one device")
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"moe_gemm: out_dtype={out_dtype} is not an output type; use bfloat16, float16 or float32")
    return Quantized(a, a_scale, left), Quantized(w, w_scale, right)


def _check_layout(routing: Routing) -> None:
    for name, tensor in routing._asdict().items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"moe_gemm: {name} has dtype {tensor.dtype}; use {name}.to(torch.int32)")
        if tensor.ndim != 1:
            raise ValueError(f"moe_gemm: {name} has shape {tuple(tensor.shape)}; it must have one dimension")
    if routing.num_tokens_post_padded.shape[0] != 1:
        given = tuple(routing.num_tokens_post_padded.shape)
        raise ValueError(f"moe_gemm: num_tokens_post_padded has shape {given}; it must be (1,)")
    places, tiles = routing.sorted_token_ids.shape[0], routing.tiles
    if (places != 0) if tiles == 0 else (places == 0 or places % tiles != 0):
        raise ValueError(
            f"moe_gemm: sorted_token_ids has {places} ids and expert_ids {tiles} tiles; the length must be block_m "
            "times the number of tiles, as fp8fn.sort_tokens makes it"
        )


def output_shape(a: Tensor, w: Tensor, a_div: int) -> tuple[int, int]:
    return a.shape[0] * a_div, w.shape[2]


def problem_of(product: RoutedProduct) -> MoeProblem:
    (a, a_scale, a_block), (w, w_scale, _), routing = product.a, product.w, product.routing
    operands = a, w, a_scale, w_scale
    return mx.MoeProblem(
        ids=product.ids, n=product.n, k=product.k, experts=product.experts, tiles=routing.tiles,
        block_m=routing.block_m, target=product.target, a_block=a_block, a_dtype=a.dtype, w_dtype=w.dtype,
        largest=max(*map(span, operands), product.out.itemsize * product.out.numel()),
        k_lines=has_lines(a) and has_lines(w.mT), longest_step=max(max(x.stride()) for x in operands),
        chip=chip_of(a.device, product.target),
    )  # fmt: skip


def moe_gemm_reference(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    routing = Routing(sorted_token_ids, expert_ids, num_tokens_post_padded)
    parts = (a, a_scale, a_block), (w, w_scale, w_block)
    left, right = check_moe_gemm(*parts, routing, top_k, a_div, token_weights, out_dtype)
    return reference.moe_gemm(left, right, routing, a_div, token_weights, out_dtype or torch.bfloat16)


def moe_gemm_fake(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    routing = Routing(sorted_token_ids, expert_ids, num_tokens_post_padded)
    check_moe_gemm((a, a_scale, a_block), (w, w_scale, w_block), routing, top_k, a_div, token_weights, out_dtype)
    return a.new_empty(output_shape(a, w, a_div), dtype=out_dtype or torch.bfloat16)


def moe_gemm_kernel(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    layout = sorted_token_ids, expert_ids, num_tokens_post_padded
    values = tuple(a_block), tuple(w_block), top_k, a_div, out_dtype
    return MOE_GEMM((a, a_scale, w, w_scale, *layout, token_weights), values)[0]


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> RoutedProduct:
    (a, a_scale, w, w_scale, ids, owners, number, token_weights), (a_block, w_block, top_k, a_div, out_dtype) = (
        tensors,
        values,
    )
    routing = Routing(ids, owners, number)
    parts = (a, a_scale, a_block), (w, w_scale, w_block)
    left, right = check_moe_gemm(*parts, routing, top_k, a_div, token_weights, out_dtype)
    return RoutedProduct(
        a=left, w=right, routing=routing, a_div=a_div,
        out=a.new_zeros(output_shape(a, w, a_div), dtype=out_dtype or torch.bfloat16),
        target=targets.target_of(a.device), token_weights=token_weights,
    )  # fmt: skip


def _unserved(product: RoutedProduct) -> str | None:
    a, w = product.a.data.dtype, product.w.data.dtype
    if not {a, w} <= set(targets.fp8_dtypes(product.target)):
        return f"{a} @ {w} has no kernel on {product.target.name}"
    return None if _has_work(product) else "there is no tile or no expert"


def _has_work(product: RoutedProduct) -> bool:
    return product.routing.tiles > 0 and product.experts > 0


def _settled(product: RoutedProduct) -> Tensors | None:
    """With a contiguous routing and contiguous factors, as every kernel reads them."""
    read: list[Tensor] = [*product.routing, *([] if product.token_weights is None else [product.token_weights])]
    if all(x.is_contiguous() for x in read):
        return None
    weights = None if product.token_weights is None else product.token_weights.contiguous()
    return *product.a[:2], *product.w[:2], *(x.contiguous() for x in product.routing), weights


def _reference(product: RoutedProduct) -> tuple[Tensor]:
    if not _has_work(product):
        return (product.out,)
    operands = product.a, product.w, product.routing, product.a_div, product.token_weights
    return (reference.moe_gemm(*operands, product.out.dtype),)


def _named(problem: MoeProblem) -> Named | None:
    """The verdict of the tables of the operands' GPU; other devices have no tables."""
    if problem.chip is None:
        return None
    from fp8fn.ops.tuning.mx_table import moe_named

    return moe_named(problem)


KERNELS: Final = (
    Kernel(
        "hip_moe",
        envelope.accepts_moe,
        envelope.configure_moe,
        hip.plan_moe,
        envelope.untuned_moe,
        fault=envelope.fault,
    ),
    Kernel("cuda_moe", gemv_mx.accepts_moe, gemv_mx.configure_moe, gemv_mx.plan_moe),
    Kernel("triton_moe", takes_all, triton.configure, triton.plan_moe_gemm),
)

MOE_GEMM: Final = Dispatch(
    op="moe_gemm",
    inputs=(
        "a", "a_scale", "w", "w_scale", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "token_weights",
    ),
    operands=_operands,
    problem=problem_of,
    kernels=KERNELS,
    reference=_reference,
    unserved=_unserved,
    settled=_settled,
    named=_named,
    by_value=True,
)  # fmt: skip
