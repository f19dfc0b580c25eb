"""The op `fp8fn::gather_scaled_mm`: products of rows that ranks hold parts of, computed while the rows are gathered.

Each rank holds some rows of `a`, quantized in (1, 128). The op returns all rows and their products with each `b`. On
GPUs whose memory is symmetric for the group, PyTorch's pipeline copies one rank's rows while the rows of the rank
before are multiplied. Elsewhere two all-gathers come before the products.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from fp8fn.ops import scaled_mm, targets
from fp8fn.ops.cuda.runtime.call_cache import Outputs, call_of, keep, kind, recall
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.symmetric_memory import gather_and_consume, not_pipelined
from fp8fn.ops.torch_private import collectives

GATHER_SCALED_MM_SCHEMA: Final = (
    "gather_scaled_mm(Tensor a, Tensor a_scale, Tensor[] b, Tensor[] b_scale, int[2] b_block, Tensor?[] bias,"
    " ScalarType out_dtype, int group_size, str group_name, bool batch_invariant=False,"
    " bool fast_accumulation=False) -> (Tensor, Tensor, Tensor[])"
)
A_BLOCK: Final[Block] = (1, 128)
_log = logging.getLogger("fp8fn")


def _check(  # noqa: PLR0913 - as the op
    a: Tensor, a_scale: Tensor, b: Sequence[Tensor], b_scale: Sequence[Tensor], b_block: Sequence[int],
    bias: Sequence[Tensor | None], out_dtype: torch.dtype, group_size: int,
) -> None:  # fmt: skip
    if a.ndim != 2:
        raise ValueError(f"gather_scaled_mm: a has {a.ndim} dimensions; flatten the leading ones into one")
    if group_size < 1:
        raise ValueError(f"gather_scaled_mm: group_size={group_size}; a group has one rank at least")
    if not len(b) == len(b_scale) == len(bias):
        raise ValueError(
            f"gather_scaled_mm: {len(b)} b, {len(b_scale)} b_scale and {len(bias)} bias; pass one of each a product"
        )
    for data, scale, row in zip(b, b_scale, bias, strict=True):
        scaled_mm.check_scaled_mm((a, a_scale, A_BLOCK), (data, scale, b_block), row, out_dtype)


def gather_scaled_mm_fake(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, b: Sequence[Tensor], b_scale: Sequence[Tensor], b_block: Sequence[int],
    bias: Sequence[Tensor | None], out_dtype: torch.dtype, group_size: int, group_name: str,
    batch_invariant: bool = False, fast_accumulation: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    _check(a, a_scale, b, b_scale, b_block, bias, out_dtype, group_size)
    data, scale = (x.new_empty((group_size * x.shape[0], *x.shape[1:])) for x in (a, a_scale))
    return data, scale, [a.new_empty((data.shape[0], each.shape[-1]), dtype=out_dtype) for each in b]


def gather_scaled_mm_reference(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, b: Sequence[Tensor], b_scale: Sequence[Tensor], b_block: Sequence[int],
    bias: Sequence[Tensor | None], out_dtype: torch.dtype, group_size: int, group_name: str,
    batch_invariant: bool = False, fast_accumulation: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """All rows first, and then their products."""
    _check(a, a_scale, b, b_scale, b_block, bias, out_dtype, group_size)
    started = [_start_gather(x, group_size, group_name) for x in (a, a_scale)]
    data, scale = (collectives.wait(x).view(like.dtype) for x, like in zip(started, (a, a_scale), strict=True))
    outs = [
        torch.ops.fp8fn.scaled_mm(
            data, scale, A_BLOCK, each, each_scale, b_block, row, out_dtype, batch_invariant, fast_accumulation
        )
        for each, each_scale, row in zip(b, b_scale, bias, strict=True)
    ]
    return data, scale, outs


def _start_gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """Types of one byte are sent as bytes, which every backend can."""
    sent = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    started: Tensor = collectives.all_gather(sent, group_size, group_name)
    return started


def gather_scaled_mm_kernel(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, b: Sequence[Tensor], b_scale: Sequence[Tensor], b_block: Sequence[int],
    bias: Sequence[Tensor | None], out_dtype: torch.dtype, group_size: int, group_name: str,
    batch_invariant: bool = False, fast_accumulation: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    reason = not_pipelined(group_name, group_size) or ("a is empty" if a.numel() == 0 else None)
    form = out_dtype, group_size, group_name, batch_invariant, fast_accumulation
    if reason is not None:
        _log.debug("gather_scaled_mm %s: gathered first: %s", tuple(a.shape), reason)
        return gather_scaled_mm_reference(a, a_scale, b, b_scale, b_block, bias, *form)
    data, scale, outs = gather_scaled_mm_fake(a, a_scale, b, b_scale, b_block, bias, *form)
    parts = [out.chunk(group_size) for out in outs]
    block = (b_block[0], b_block[1])

    def multiply(shard: list[Tensor], rank: int) -> None:
        rows_scale, rows = shard[0].view(a_scale.dtype), shard[1].view(a.dtype)
        for each, each_scale, row, out in zip(b, b_scale, bias, parts, strict=True):
            tensors = (rows, rows_scale, each, each_scale, row)
            multiply_into(out[rank], tensors, block, batch_invariant, fast_accumulation)

    # Scales first: float32 elements have to be aligned within the pipeline's buffer, and bytes need not be.
    shards = [_as_sent(a_scale.contiguous()), _as_sent(a.contiguous())]
    gathered = [_as_sent(scale), _as_sent(data)]
    gather_and_consume(shards, multiply, gathered, group_name)
    return data, scale, outs


def _as_sent(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def multiply_into(
    out: Tensor, tensors: Sequence[Tensor | None], b_block: Block, batch_invariant: bool, fast_accumulation: bool
) -> None:
    """`scaled_mm` of `tensors`, its inputs, with the result in `out`: planned once for tensors of the same kinds."""
    key = ("gather_scaled_mm", b_block, batch_invariant, fast_accumulation, kind(out), *map(kind, tensors))
    call = recall(key) or keep(key, _planned(out, tensors, b_block, batch_invariant, fast_accumulation))
    call(*tensors, out)


def _planned(
    out: Tensor, tensors: Sequence[Tensor | None], b_block: Block, batch_invariant: bool, fast_accumulation: bool
) -> Any:
    """The kernel's own call where its launches can be kept, else the op and a copy."""
    dispatch = scaled_mm.dispatch_of(batch_invariant, fast_accumulation)
    values = (A_BLOCK, b_block, out.dtype)
    product = replace(dispatch.operands(tuple(tensors), values), out=out)
    if dispatch.unserved(product) is None and dispatch.settled(product) is None:
        _, launches = dispatch.loadable(product)
        if launches and all(isinstance(launch, CudaLaunch) for launch in launches):
            return call_of(cast(Any, launches), (*dispatch.inputs, "out"), Outputs({}, 0))

    def copied(*given: Tensor) -> None:
        given[-1].copy_(dispatch(given[:-1], values)[0])

    targets.check_supported(product.target, out.device)
    return copied
