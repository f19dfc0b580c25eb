"""The ops `fp8fn::quantize`, `fp8fn::quantize_dual` and `fp8fn::amax`: schemas, checks, and dispatch.

`amax` gives the largest magnitude of each block, and the quantizers take it as an argument: whoever made `x` may have
computed it, or several processes that hold parts of one block have to agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_FORMATS
from fp8fn.ops.kernel import Dispatch, Kernel, deferred, no_config, takes_all
from fp8fn.ops.layout import (
    WHOLE,
    Block,
    contracts_rows,
    empty_data,
    empty_scale,
    is_column_major,
    is_square,
    known_block,
    scale_shape,
    swap,
    turned,
    unknown_block,
)
from fp8fn.ops.operands import Quantization, empty_dual
from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
    from fp8fn.ops.cuda.quantize import quantize_columns as cuda_columns
    from fp8fn.ops.cuda.quantize import quantize_rows as cuda_rows
    from fp8fn.ops.cuda.quantize import quantize_whole as cuda_whole
    from fp8fn.ops.cuda.quantize import stream_columns as cuda_stream
    from fp8fn.ops.triton import amax as triton_amax
    from fp8fn.ops.triton import quantize as triton_blocks
    from fp8fn.ops.triton import quantize_dual as triton_dual
else:
    cuda_blocks = deferred("fp8fn.ops.cuda.quantize.quantize")
    cuda_columns = deferred("fp8fn.ops.cuda.quantize.quantize_columns")
    cuda_rows = deferred("fp8fn.ops.cuda.quantize.quantize_rows")
    cuda_whole = deferred("fp8fn.ops.cuda.quantize.quantize_whole")
    cuda_stream = deferred("fp8fn.ops.cuda.quantize.stream_columns")
    triton_amax, triton_blocks = deferred("fp8fn.ops.triton.amax"), deferred("fp8fn.ops.triton.quantize")
    triton_dual = deferred("fp8fn.ops.triton.quantize_dual")

QUANTIZE_SCHEMA: Final = (
    'quantize(Tensor x, int[2] block, ScalarType? dtype=None, str scale="fp32", Tensor? amax=None, '
    "bool? column_major=None) -> (Tensor, Tensor)"
)
QUANTIZE_DUAL_SCHEMA: Final = (
    'quantize_dual(Tensor x, int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32", Tensor? amax=None, '
    "int[2]? dual_block=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
AMAX_SCHEMA: Final = "amax(Tensor x, int[2] block) -> Tensor"
SQUARE: Final[Block] = (128, 128)
# Blocks beside which a second result may have square blocks.
BESIDE_SQUARE: Final[tuple[Block, ...]] = ((1, 128), (128, 1))


def check_quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str = "quantize", arg: str = "x"
) -> tuple[Block, torch.dtype]:
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = check_amax(x, block, name, arg)
    if scale not in SCALE_FORMATS:
        raise ValueError(f"{name}: scale={scale!r} is not a scale format; use one of {SCALE_FORMATS}")
    if dtype is None:
        dtype = targets.native_e4m3(targets.target_of(x.device))
    elif dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: dtype={dtype} is not an FP8 type; use one of {FP8_DTYPES}")
    return pair, dtype


def check_amax(x: Tensor, block: Sequence[int], name: str = "amax", arg: str = "x") -> Block:
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    pair = checked_block(name, block)
    if x.dtype not in INPUT_DTYPES:
        remedy = "use bfloat16, float16 or float32, x.to(torch.float32) for one"
        raise TypeError(f"{name}: {arg} has dtype {x.dtype}; {remedy}")
    if x.ndim < 2:
        raise ValueError(f"{name}: {arg} has shape {tuple(x.shape)}; it needs at least two dimensions, x[None] for one")
    return pair


def check_given_amax(name: str, x: Tensor, block: Block, amax: Tensor | None) -> None:
    """Checks the magnitudes that a quantizer in `block` is given."""
    if amax is None:
        return
    if name == "quantize_dual" and not is_square(block):
        raise ValueError(f"{name}: amax is given for block {block}, whose transpose needs another; call quantize twice")
    if amax.dtype not in (torch.float32, x.dtype):
        raise TypeError(f"{name}: amax has dtype {amax.dtype}; use float32, or {x.dtype} as x has it")
    if tuple(amax.shape) != (needed := scale_shape(x.shape, block)):
        raise ValueError(f"{name}: amax has shape {tuple(amax.shape)}; x {tuple(x.shape)} in {block} needs {needed}")
    if amax.device != x.device:
        raise ValueError(f"{name}: x is on {x.device} and amax on {amax.device}; move them to one device")


def check_layout(name: str, block: Block, column_major: bool | None) -> None:
    """Checks the layout that a quantizer in `block` is given."""
    if column_major is not None and not is_square(block):
        needed = "column-major" if contracts_rows(block) else "row-major"
        raise ValueError(f"{name}: column_major={column_major} is given for block {block}, which is always {needed}")


def amax_reference(x: Tensor, block: Sequence[int]) -> Tensor:
    return reference.amax(x, check_amax(x, block))


def amax_fake(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, check_amax(x, block)), dtype=torch.float32)


def amax_kernel(x: Tensor, block: Sequence[int]) -> Tensor:
    return AMAX((x,), (checked_block("amax", block),))[0]


def quantize_reference(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale)
    check_given_amax("quantize", x, pair, amax)
    check_layout("quantize", pair, column_major)
    return reference.quantize(x, pair, fp8, scale, amax, column_major)


def quantize_fake(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale)
    check_given_amax("quantize", x, pair, amax)
    check_layout("quantize", pair, column_major)
    return empty_data(x, pair, fp8, column_major), empty_scale(x, pair, scale, column_major)


def quantize_kernel(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize", block)
    data, scales = QUANTIZE((x, _contiguous(amax)), (False, pair, dtype, scale, None, column_major))
    return data, scales


def quantize_dual_reference(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    check_given_amax("quantize_dual", x, pair, amax)
    return reference.quantize_dual(x, pair, fp8, scale, amax, checked_dual_block("quantize_dual", pair, dual_block))


def quantize_dual_fake(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    check_given_amax("quantize_dual", x, pair, amax)
    return empty_dual(x, pair, fp8, scale, checked_dual_block("quantize_dual", pair, dual_block))


def quantize_dual_kernel(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_dual", block)
    other = checked_dual_block("quantize_dual", pair, dual_block)
    if WHOLE in pair and not is_square(pair):  # a whole row or column does not fit on chip: two launches, two reads
        check_quantize(x, pair, dtype, scale, "quantize_dual")
        check_given_amax("quantize_dual", x, pair, amax)
        return *quantize_kernel(x, pair, dtype, scale), *quantize_kernel(x, swap(pair), dtype, scale)
    data, scales, dual_data, dual_scales = QUANTIZE((x, _contiguous(amax)), (True, pair, dtype, scale, other, None))
    return data, scales, dual_data, dual_scales


def _contiguous(amax: Tensor | None) -> Tensor | None:
    return amax if amax is None else amax.contiguous()


def checked_block(name: str, block: Sequence[int]) -> Block:
    """The block as a tuple of constants, as the key of a kept call has it."""
    pair = known_block(block)
    if pair is None:
        raise unknown_block(f"{name}: block", block)
    return pair


def checked_dual_block(name: str, block: Block, dual_block: Sequence[int] | None) -> Block | None:
    """The second block of two, None for the transpose of the first, or the error that says what would work."""
    if dual_block is None:
        return None
    pair = known_block(dual_block)
    if pair is None:
        raise unknown_block(f"{name}: dual_block", dual_block)
    if pair == swap(block):
        return None
    if pair != SQUARE or block not in BESIDE_SQUARE:
        beside = f", or {SQUARE}" if block in BESIDE_SQUARE else f"; {SQUARE} goes with {BESIDE_SQUARE}"
        raise ValueError(f"{name}: dual_block={pair} does not go with block={block}; use {swap(block)}{beside}")
    return pair


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (x, amax), (dual, block, dtype, scale, dual_block, column_major) = tensors, values
    name, target = "quantize_dual" if dual else "quantize", targets.target_of(x.device)
    pair, fp8 = check_quantize(x, block, dtype, scale, name)
    check_given_amax(name, x, pair, amax)
    check_layout(name, pair, column_major)
    return Quantization(
        x=x, block=pair, dtype=fp8, scale=scale, target=target, dual=dual, dual_block=dual_block, amax=amax,
        column_major=column_major,
    )  # fmt: skip


def unserved(q: Quantization) -> str | None:
    """Why no kernel quantizes to a format on a device, or None."""
    if any(x.numel() == 0 for x in q.operands.values()):
        return "x is empty"
    if q.dtype not in targets.fp8_dtypes(q.target):
        return f"{q.dtype} has no kernel on {q.target.name}"
    return None


def _unserved(q: Quantization) -> str | None:
    cuda = cuda_whole if WHOLE in q.block else cuda_blocks
    if q.dual and is_square(q.block) and (reason := cuda.accepts(q)) is not None:
        return unserved(q) or f"the second output is a copy of the first: {reason}"
    return unserved(q)


def _reference(q: Quantization) -> Sequence[Tensor]:
    """By plain PyTorch; the second output in square blocks is a copy of the first."""
    form = q.x, q.block, q.dtype, q.scale, q.amax
    if not q.dual:
        return reference.quantize(*form, q.column_major)
    if unserved(q) is not None:
        return reference.quantize_dual(*form, q.dual_block)
    return _both_sides(q.x, *quantize_kernel(*form))


def _both_sides(x: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The one result of a square block, which lies as `x` does, and a copy that lies the other way."""
    if is_column_major(x):
        return turned(data, False), turned(scales, False), data, scales
    return data, scales, turned(data, True), turned(scales, True)


def _accepts_triton(q: Quantization) -> str | None:
    return "one launch writes one orientation" if q.dual else None


def _accepts_triton_dual(q: Quantization) -> str | None:
    if not q.dual or is_square(q.block) or WHOLE in q.block:
        return f"block {q.block}{' and its transpose' * q.dual} is not two orientations of one read"
    return None


def _without_amax(accepts: Callable[[Quantization], str | None]) -> Callable[[Quantization], str | None]:
    """For a kernel that computes the largest magnitudes itself: `accepts`, and a reason where they are given."""
    return lambda q: accepts(q) if q.amax is None else "amax is given"


KERNELS: Final = (
    Kernel("cuda_blocks", _without_amax(cuda_blocks.accepts), cuda_blocks.configure, cuda_blocks.plan),
    Kernel("cuda_whole", cuda_whole.accepts, cuda_whole.configure, cuda_whole.plan),
    Kernel("cuda_rows", _without_amax(cuda_rows.accepts), cuda_rows.configure, cuda_rows.plan),
    Kernel(
        "cuda_stream", _without_amax(cuda_stream.accepts), cuda_stream.configure, cuda_stream.plan, cuda_stream.untuned
    ),
    Kernel("cuda_columns", _without_amax(cuda_columns.accepts), cuda_columns.configure, cuda_columns.plan),
    Kernel("triton_dual", _without_amax(_accepts_triton_dual), no_config, triton_dual.plan_quantize_dual),
    Kernel("triton_blocks", _accepts_triton, no_config, triton_blocks.plan_quantize),
)

QUANTIZE: Final = Dispatch(
    op="quantize",
    inputs=("x", "amax"),
    operands=_operands,
    kernels=KERNELS,
    reference=_reference,
    unserved=_unserved,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Maxima:
    """A matrix or a batch `(..., M, N)`, whose largest magnitudes in `block` are to be found."""

    x: Tensor
    block: Block
    target: Target

    @cached_property
    def out(self) -> Tensor:
        """The magnitudes, uninitialised."""
        return self.x.new_empty(scale_shape(self.x.shape, self.block), dtype=torch.float32)

    @property
    def outputs(self) -> Outputs:
        return Outputs({"amax": self.out}, 1)


def _maxima(tensors: Sequence[Any], values: Sequence[Any]) -> Maxima:
    (x,), (block,) = tensors, values
    return Maxima(x=x, block=check_amax(x, block), target=targets.target_of(x.device))


AMAX: Final = Dispatch(
    op="amax",
    inputs=("x",),
    operands=_maxima,
    kernels=(
        Kernel(
            "cuda_amax",
            lambda maxima: cuda_whole.amax_fault(maxima.x, maxima.block, maxima.target),
            lambda maxima: cuda_whole.configure_amax(maxima.x),
            lambda maxima, config: cuda_whole.plan_amax(maxima.x, maxima.out, maxima.target, config),
        ),
        Kernel(
            "triton_amax",
            takes_all,
            no_config,
            lambda maxima, _: triton_amax.plan_amax(maxima.x, maxima.block, maxima.out, maxima.target),
        ),
    ),
    reference=lambda maxima: (reference.amax(maxima.x, maxima.block),),
    unserved=lambda maxima: "x is empty" if maxima.x.numel() == 0 else None,
)
