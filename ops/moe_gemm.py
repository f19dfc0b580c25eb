"""The op `fp8fn::moe_gemm`, products of routed tokens with their experts at decode time: schema, checks, dispatch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import gemv_mx
from fp8fn.ops.cuda.runtime import call_cache, nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, Prepared
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.hip import envelope
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.mx_mm import has_lines, span
from fp8fn.ops.scaled_mm import check_operand
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.tuning.mx import MoeProblem

MOE_GEMM_SCHEMA: Final = (
    "moe_gemm(Tensor a, Tensor a_scale, int[2] a_block, Tensor w, Tensor w_scale, int[2] w_block,"
    " Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, int top_k, int a_div,"
    " Tensor? token_weights=None, ScalarType? out_dtype=None) -> Tensor"
)

# Of the activations and of the weight: MX, and blockwise.
BLOCKS: Final[tuple[tuple[Block, Block], ...]] = (((1, 32), (32, 1)), ((1, 128), (128, 128)))

# The kernel in HIP, and why, where it could not be compiled or loaded in this process.
_FAULTS: Final[dict[str, str]] = {}

_log = logging.getLogger("fp8fn")


def check_moe_gemm(
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None, out_dtype: torch.dtype | None,
) -> tuple[Block, Block]:  # fmt: skip
    """The blocks as tuples, or the error that says which argument is wrong and what would work."""
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
    _check_layout(sorted_token_ids, expert_ids, num_tokens_post_padded)
    if token_weights is not None and (token_weights.dtype != torch.float32 or tuple(token_weights.shape) != (ids,)):
        given = f"{token_weights.dtype} of shape {tuple(token_weights.shape)}"
        raise ValueError(f"moe_gemm: token_weights is {given}; it must be torch.float32 of shape ({ids},), one an id")
    for name, tensor in (
        ("a_scale", a_scale), ("w", w), ("w_scale", w_scale), ("sorted_token_ids", sorted_token_ids),
        ("expert_ids", expert_ids), ("num_tokens_post_padded", num_tokens_post_padded),
        ("token_weights", token_weights),
    ):  # fmt: skip
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"moe_gemm: a is on {a.device} and {name} on {tensor.device}; move them to one device")
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"moe_gemm: out_dtype={out_dtype} is not an output type; use bfloat16, float16 or float32")
    return left, right


def _check_layout(sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor) -> None:
    layout = {
        "sorted_token_ids": sorted_token_ids, "expert_ids": expert_ids,
        "num_tokens_post_padded": num_tokens_post_padded,
    }  # fmt: skip
    for name, tensor in layout.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"moe_gemm: {name} has dtype {tensor.dtype}; use {name}.to(torch.int32)")
        if tensor.ndim != 1:
            raise ValueError(f"moe_gemm: {name} has shape {tuple(tensor.shape)}; it must have one dimension")
    if num_tokens_post_padded.shape[0] != 1:
        given = tuple(num_tokens_post_padded.shape)
        raise ValueError(f"moe_gemm: num_tokens_post_padded has shape {given}; it must be (1,)")
    places, tiles = sorted_token_ids.shape[0], expert_ids.shape[0]
    if (places != 0) if tiles == 0 else (places == 0 or places % tiles != 0):
        raise ValueError(
            f"moe_gemm: sorted_token_ids has {places} ids and expert_ids {tiles} tiles; the length must be block_m "
            "times the number of tiles, as fp8fn.sort_tokens makes it"
        )


def output_shape(a: Tensor, w: Tensor, a_div: int) -> tuple[int, int]:
    return a.shape[0] * a_div, w.shape[2]


def problem_of(
    a: Tensor, a_scale: Tensor, a_block: Block, w: Tensor, w_scale: Tensor, sorted_token_ids: Tensor,
    expert_ids: Tensor, out: Tensor, target: Target,
) -> MoeProblem:  # fmt: skip
    tiles = expert_ids.shape[0]
    return MoeProblem(
        ids=out.shape[0], n=out.shape[1], k=a.shape[1], experts=w.shape[0], tiles=tiles,
        block_m=sorted_token_ids.shape[0] // tiles, target=target, a_block=a_block, a_dtype=a.dtype, w_dtype=w.dtype,
        largest=max(*map(span, (a, w, a_scale, w_scale)), out.itemsize * out.numel()),
        k_lines=has_lines(a) and has_lines(w.mT),
    )  # fmt: skip


def plan(
    a: Tensor, a_scale: Tensor, a_block: Block, w: Tensor, w_scale: Tensor, w_block: Block, sorted_token_ids: Tensor,
    expert_ids: Tensor, num_tokens_post_padded: Tensor, a_div: int, token_weights: Tensor | None, out: Tensor,
    target: Target, fault: str | None = None,
) -> TritonLaunch | HipLaunch | CudaLaunch:  # fmt: skip
    """The launch that fills the rows of `out` that ids name: by a kernel in HIP or CUDA C++ where it takes the problem.

    `fault` is why the one in HIP can't be loaded here.
    """
    layout = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    problem = problem_of(a, a_scale, a_block, w, w_scale, sorted_token_ids, expert_ids, out, target)
    if target.backend == "cuda":
        name, reason = "cuda_moe", nvrtc.unavailable() or gemv_mx.accepts_moe(problem, a, a_scale, w, w_scale)
        if reason is None:
            config = gemv_mx.configure_moe(problem)
            cuda = gemv_mx.plan_moe(a, a_scale, w, w_scale, *layout, a_div, token_weights, out, target, config)
            return replace(cuda, reason="cuda_moe by default")
    else:
        name, reason = "hip_moe", fault or envelope.accepts_moe(problem) or envelope.untuned_moe(problem)
        if reason is None:
            from fp8fn.ops.hip.moe_gemm import plan_moe

            settings = envelope.configure_moe(problem)
            hip = plan_moe(a, a_scale, w, w_scale, *layout, a_div, token_weights, out, target, settings)
            return replace(hip, reason="hip_moe by default")
    from fp8fn.ops.triton.moe_gemm import plan_moe_gemm

    launch = plan_moe_gemm(a, a_scale, a_block, w, w_scale, w_block, *layout, a_div, token_weights, out, target)
    return replace(launch, reason=f"not {name}: {reason}")


def moe_gemm_reference(
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    layout = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    left, right = check_moe_gemm(
        a, a_scale, a_block, w, w_scale, w_block, *layout, top_k, a_div, token_weights, out_dtype
    )  # fmt: skip
    operands = (a, a_scale, left, w, w_scale, right)
    return reference.moe_gemm(*operands, *layout, a_div, token_weights, out_dtype or torch.bfloat16)


def moe_gemm_kernel(
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    layout = sorted_token_ids.contiguous(), expert_ids.contiguous(), num_tokens_post_padded.contiguous()
    weights = None if token_weights is None else token_weights.contiguous()
    tensors = (a, a_scale, w, w_scale, *layout, weights)
    key = (
        "moe_gemm", tuple(a_block), tuple(w_block), top_k, a_div, out_dtype,
        *(None if x is None else call_cache.kind(x) for x in tensors),
    )  # fmt: skip
    kept = call_cache.recall(key)
    if kept is not None:  # the key holds all that the checks read
        return _start(kept, tensors, _zeros(a, w, a_div, out_dtype))
    left, right = check_moe_gemm(a, a_scale, a_block, w, w_scale, w_block, *layout, top_k, a_div, weights, out_dtype)
    target = targets.target_of(a.device)
    targets.check_supported(target, a.device)
    if not {a.dtype, w.dtype} <= set(targets.fp8_dtypes(target)):
        _log.debug("moe_gemm: %s @ %s has no kernel on %s; plain PyTorch serves", a.dtype, w.dtype, target.name)
        given = (a, a_scale, left, w, w_scale, right)
        return reference.moe_gemm(*given, *layout, a_div, weights, out_dtype or torch.bfloat16)
    out = _zeros(a, w, a_div, out_dtype)
    if out.numel() == 0 or expert_ids.shape[0] == 0 or w.shape[0] == 0:
        return out
    operands = (a, a_scale, left, w, w_scale, right, *layout, a_div, weights, out, target)
    launch = plan(*operands, _FAULTS.get("hip_moe"))
    if isinstance(launch, HipLaunch) and (fault := launch.fault()) is not None:
        _FAULTS["hip_moe"] = fault
        launch = plan(*operands, fault)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("moe_gemm %s x %s: %s", tuple(a.shape), tuple(w.shape), launch.describe())
    if isinstance(launch, CudaLaunch):
        return _start(call_cache.keep(key, launch.prepare()), tensors, out)
    launch.run()
    return out


def _zeros(a: Tensor, w: Tensor, a_div: int, out_dtype: torch.dtype | None) -> Tensor:
    """The output; rows of no id stay zero."""
    return a.new_zeros(output_shape(a, w, a_div), dtype=out_dtype or torch.bfloat16)


def _start(launch: Prepared, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
    """A kept launch in CUDA C++ on other tensors of the same kinds."""
    a, a_scale, w, w_scale, *routing = tensors
    given = (a, a_scale, w, w_scale, None, out, *routing)  # there is no bias
    call_cache.start(launch, [0 if x is None else x.data_ptr() for x in given])
    return out
