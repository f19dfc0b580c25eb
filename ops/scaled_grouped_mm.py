"""The op `fp8fn::scaled_grouped_mm`, products of groups of tokens in FP8: schema, checks, and dispatch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES
from fp8fn.ops.groups import (
    LARGE,
    ROWS,
    STEP,
    check_counts,
    check_ends,
    check_offsets,
    spread_blocks,
    spread_rows,
    spread_unit,
    unit_of,
)
from fp8fn.ops.kernel import Dispatch, Kernel, Named, Tensors, no_config, takes_all
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import BLOCKS, WHOLE, Block, blocks_along, known_block, swap
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_mm import Parts, along_k, by_cuda, check_operand, check_product, configure_cuda, foreign_types

if TYPE_CHECKING:
    from fp8fn.ops.triton.gemm_config import GemmConfig

SCALED_GROUPED_MM_SCHEMA: Final = (
    "scaled_grouped_mm(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block,"
    " Tensor? offsets=None, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? counts=None, bool zeros=True,"
    " SymInt? expected_rows=None) -> Tensor"
)

# No scale holds for two rows of tokens, since the border of a group may lie between them, unless it holds for all.
TOKEN_BLOCKS: Final[tuple[Block, ...]] = tuple(block for block in BLOCKS if block[0] == 1 or block == (WHOLE, WHOLE))
EXPERT_BLOCKS: Final[tuple[Block, ...]] = tuple(block for block in BLOCKS if block[0] != 1)
# Blocks of tokens that are summed over: 128 or 32 tokens of the spread layout, or all tokens of a group.
SUMMED_BLOCKS: Final[tuple[Block, ...]] = ((1, ROWS), (1, WHOLE), (1, STEP))
# One of the two operands may have a scale for each square.
SUMMED_SQUARE: Final[Block] = (ROWS, ROWS)

_NAME: Final = "scaled_grouped_mm"


class Groups(NamedTuple):
    """Where the groups of a product lie: they end at the `offsets (E,)`, or each has the first `counts (E,)` rows.

    With `counts`, `zeros` says whether the other rows of the result become zeros, or may stay unwritten, and a tile is
    chosen by `expected_rows`, those of an expert in the mean: any number of them gives the same result.
    """

    offsets: Tensor | None
    counts: Tensor | None = None
    zeros: bool = True
    expected_rows: int | None = None


def check_scaled_grouped_mm(
    a_parts: Parts, b_parts: Parts, groups: Groups, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Quantized, Quantized]:
    """The operands with known blocks, or the error that says which argument is wrong and what would work."""
    (a, a_scale, a_block), (b, b_scale, b_block) = a_parts, b_parts
    offsets, counts, zeros, expected_rows = groups
    if expected_rows is not None:
        _check_expected(expected_rows, counts)
    if counts is not None:
        check_masked(_NAME, a, b, offsets, counts)
    elif offsets is None:
        raise ValueError(
            f"{_NAME}: offsets and counts are both None; give the offsets where groups of rows of a (M, K) end, or the "
            "counts of rows of each expert in a (E, M, K); fp8fn.gemm multiplies a batch without either"
        )
    elif not zeros:
        raise ValueError(f"{_NAME}: zeros=False needs counts; rows past the last of the offsets always become zeros")
    else:
        check_grouping(_NAME, a, b, offsets)
    if b.ndim == 3:
        left = check_operand(f"{_NAME}: a", a, a_scale, a_block)
        right = check_operand(f"{_NAME}: b", b, b_scale, b_block)
        for name, block, allowed in (("a", left, TOKEN_BLOCKS), ("b", right, EXPERT_BLOCKS)):
            if block not in allowed:
                raise ValueError(
                    f"{_NAME}: {name}_block={block} does not fit groups of rows of a; use one of {allowed}"
                )
    else:
        assert offsets is not None
        left = _check_summed("a", a, a_scale, a_block, offsets)
        right = _check_summed("b", b, b_scale, b_block, offsets)
        if left[1] != right[0]:
            raise ValueError(
                f"{_NAME}: a_block={left} and b_block={right} lay the tokens differently; "
                f"with a_block={left} use b_block={(left[1], 1)}"
            )
        if left == right:
            raise ValueError(f"{_NAME}: a_block and b_block are both {left}; use {(1, ROWS)} or {(ROWS, 1)} for one")
    check_product(_NAME, a, b, None, out_dtype)
    check_group_bias(_NAME, b, b.shape[0] if offsets is None else offsets.shape[0], bias)
    if a_scale.dtype != b_scale.dtype:
        raise ValueError(
            f"{_NAME}: a_scale has dtype {a_scale.dtype} and b_scale {b_scale.dtype}; both must have one format"
        )
    for name, tensor in (("a_scale", a_scale), ("b_scale", b_scale)):
        if tensor.device != a.device:
            raise ValueError(f"{_NAME}: a is on {a.device} and {name} on {tensor.device}; move them to one device")
    return Quantized(a, a_scale, left), Quantized(b, b_scale, right)


def check_grouping(name: str, a: Tensor, b: Tensor, offsets: Tensor) -> None:
    """Checks that `offsets` cuts rows of `a (M, K)` beside `b (E, K, N)`, or K of two matrices."""
    if a.ndim != 2 or b.ndim not in (2, 3):
        remedy = f"; that is {name}(b.mT, a.mT, offsets).mT" if (a.ndim, b.ndim) == (3, 2) else ""
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; with offsets, groups are rows of a (M, K) "
            f"beside b (E, K, N), or parts of K of a (M, K) and b (K, N){remedy}"
        )
    check_offsets(name, offsets, "a", a)
    if b.ndim == 3:
        check_group_count(name, offsets, "b", b)


def _check_expected(rows: int, counts: Tensor | None) -> None:
    if counts is None:
        raise ValueError(f"{_NAME}: expected_rows={rows} needs counts; offsets say the rows of all groups together")
    if rows < 1:
        raise ValueError(f"{_NAME}: expected_rows={rows}; give the rows of an expert in the mean, 1 or more, or None")


def check_masked(name: str, a: Tensor, b: Tensor, offsets: Tensor | None, counts: Tensor) -> None:
    """Checks that `counts` counts rows of `a (E, M, K)` beside `b (E, K, N)`."""
    if offsets is not None:
        raise ValueError(
            f"{name}: offsets and counts are both given; use counts for the first rows of each expert in a (E, M, K), "
            "or offsets for groups of rows of a (M, K)"
        )
    if a.ndim != 3 or b.ndim != 3:
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; with counts both are batches, a (E, M, K) "
            "and b (E, K, N); give offsets for groups of rows of a (M, K)"
        )
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{name}: a has {a.shape[0]} experts and b {b.shape[0]}; they must be equal")
    check_counts(name, counts, a)


def check_group_count(op: str, offsets: Tensor, name: str, experts: Tensor) -> None:
    """Checks that there is an end for each of `experts (E, K, N)`, the argument `name`."""
    if offsets.shape[0] != experts.shape[0]:
        raise ValueError(
            f"{op}: offsets has {offsets.shape[0]} ends and {name} {tuple(experts.shape)} has {experts.shape[0]} "
            "experts; give one end for each, equal to the one before it for an expert without tokens"
        )


def check_group_bias(name: str, b: Tensor, groups: int, bias: Tensor | None) -> None:
    """Checks a bias `(E, N)`."""
    if bias is None:
        return
    expected = (groups, b.shape[-1])
    if tuple(bias.shape) != expected:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; it must be {expected}, a row for each group")
    if bias.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: bias has dtype {bias.dtype}; use bfloat16, float16 or float32")
    if bias.device != b.device:
        raise ValueError(f"{name}: the experts are on {b.device} and bias on {bias.device}; move them to one device")


def _check_summed(name: str, data: Tensor, scale: Tensor, block: Sequence[int], offsets: Tensor) -> Block:
    """The block of an operand whose tokens are summed over: columns of `a (R, P)`, rows of `b (P, N)`."""
    pair = known_block(block)
    allowed = (*(SUMMED_BLOCKS if name == "a" else map(swap, SUMMED_BLOCKS)), SUMMED_SQUARE)
    if pair is None or pair not in allowed:
        raise ValueError(f"{_NAME}: {name}_block={tuple(block)} does not fit groups along K; use one of {allowed}")
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"{_NAME}: {name} has dtype {data.dtype}; it must be an FP8 type, of fp8fn.quantize_grouped")
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{_NAME}: {name}_scale has dtype {scale.dtype}; it must be float32 or float8_e8m0fnu")
    groups = offsets.shape[0]
    (summed, other) = (data.shape[1], data.shape[0]) if name == "a" else (data.shape[0], data.shape[1])
    parts = groups
    if WHOLE not in pair:
        size = max(pair)
        unit = unit_of(summed, groups, size)
        tokens = summed - unit * groups
        if _holds(tokens < 0) or _holds(tokens % unit != 0) or _holds(spread_unit(tokens, groups, size) != unit):
            many = LARGE * ROWS * groups
            needed = f"a multiple of {STEP} of at least {STEP * groups}"
            if size == ROWS:
                needed = (
                    f"a multiple of {STEP} from {STEP * groups} to {spread_rows(many - 1, groups)}, or one of {ROWS} "
                    f"of at least {spread_rows(many, groups)}"
                )
            raise ValueError(
                f"{_NAME}: {name} has {summed} rows of spread tokens; {groups} groups need {needed}, as "
                "fp8fn.quantize_grouped makes it"
            )
        parts = spread_blocks(tokens, groups, size)
    lines = blocks_along(other, pair[0 if name == "a" else 1])
    expected = (lines, parts) if name == "a" else (parts, lines)
    if scale.ndim != 2 or any(map(_holds, map(operator.ne, scale.shape, expected))):
        raise ValueError(
            f"{_NAME}: {name}_scale has shape {tuple(scale.shape)}; {name} {tuple(data.shape)} in blocks of {pair} "
            f"with {groups} groups needs {expected}"
        )
    return pair


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes does. Not where they are data, when traced: the call itself sees them."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads SymPy

    return guard_or_false(condition)


def empty_grouped_output(a: Tensor, b: Tensor, offsets: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Uninitialised `(M, N)`, or `(E, M, N)` of groups along K, or of a batch `a (E, M, K)`; row-major."""
    lead = a.shape[:-2] if b.ndim == 3 or offsets is None else offsets.shape
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=out_dtype or torch.bfloat16)


def scaled_grouped_mm_reference(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    offsets: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    counts: Tensor | None = None, zeros: bool = True, expected_rows: int | None = None,
) -> Tensor:  # fmt: skip
    groups, out_dtype = Groups(offsets, counts, zeros, expected_rows), out_dtype or torch.bfloat16
    left, right = check_scaled_grouped_mm((a, a_scale, a_block), (b, b_scale, b_block), groups, bias, out_dtype)
    if counts is not None:
        return reference.scaled_masked_mm(left, right, counts, bias, out_dtype)
    assert offsets is not None
    check_ends(_NAME, offsets)
    return reference.scaled_grouped_mm(left, right, offsets, bias, out_dtype)


def scaled_grouped_mm_fake(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    offsets: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    counts: Tensor | None = None, zeros: bool = True, expected_rows: int | None = None,
) -> Tensor:  # fmt: skip
    groups = Groups(offsets, counts, zeros, expected_rows)
    check_scaled_grouped_mm((a, a_scale, a_block), (b, b_scale, b_block), groups, bias, out_dtype)
    return empty_grouped_output(a, b, offsets, out_dtype)


def scaled_grouped_mm_kernel(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    offsets: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    counts: Tensor | None = None, zeros: bool = True, expected_rows: int | None = None,
) -> Tensor:  # fmt: skip
    tensors = (a, a_scale, b, b_scale, offsets, bias, counts)
    if expected_rows is not None and expected_rows > 0:  # by powers of two, so that few calls are prepared
        expected_rows = ceil_power_of_two(expected_rows)
    return SCALED_GROUPED_MM(tensors, (tuple(a_block), tuple(b_block), out_dtype, zeros, expected_rows))[0]


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> ScaledProduct:
    a, a_scale, b, b_scale, offsets, bias, counts = tensors
    a_block, b_block, out_dtype, zeros, expected_rows = values
    groups = Groups(offsets, counts, zeros, expected_rows)
    left, right = check_scaled_grouped_mm((a, a_scale, a_block), (b, b_scale, b_block), groups, bias, out_dtype)
    out, target = empty_grouped_output(a, b, offsets, out_dtype), targets.target_of(a.device)
    return ScaledProduct(
        a=left, b=right, offsets=offsets, counts=counts, zeros=zeros, expected_rows=expected_rows, bias=bias, out=out,
        target=target,
    )  # fmt: skip


def _settled(product: ScaledProduct) -> Tensors | None:
    """Operands with K contiguous on Hopper, contiguous offsets, counts and bias, as every kernel takes them."""
    (a, a_scale, _), (b, b_scale, _) = product.a, product.b
    copies, small = along_k(product), (product.offsets, product.bias, product.counts)
    if copies is None and all(x is None or x.is_contiguous() for x in small):
        return None
    a, b = copies or (a, b)
    return a, a_scale, b, b_scale, *(None if x is None else x.contiguous() for x in small)


def _reference(product: ScaledProduct) -> tuple[Tensor]:
    a, b, out_dtype = product.a, product.b, product.out.dtype
    if product.counts is not None:
        return (reference.scaled_masked_mm(a, b, product.counts, product.bias, out_dtype),)
    return (reference.scaled_grouped_mm(a, b, product.group_ends, product.bias, out_dtype),)


def _plan_triton(product: ScaledProduct, config: GemmConfig | None) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm

    return plan_scaled_grouped_mm(product, config)


def _by_tma(product: ScaledProduct) -> str | None:
    from fp8fn.ops.triton import grouped_tma

    return grouped_tma.accepts(product)


def _untuned_by_tma(product: ScaledProduct) -> str | None:
    from fp8fn.ops.triton import grouped_tma

    return grouped_tma.untuned(product)


def _plan_tma(product: ScaledProduct, config: GemmConfig | None) -> tuple[Launch, ...]:
    from fp8fn.ops.triton import grouped_tma

    return grouped_tma.plan_grouped_tma(product, config)


def _named(product: ScaledProduct) -> Named | None:
    """The verdict of the tables of a GPU; other devices have no tables, and no table has products with counts."""
    if product.counts is not None or (product.chip is None and product.a.data.device.type != "cuda"):
        return None
    from fp8fn.ops.tuning.grouped_mm_table import named

    return named(product)


SCALED_GROUPED_MM: Final = Dispatch(
    op=_NAME,
    inputs=("a", "a_scale", "b", "b_scale", "offsets", "bias", "counts"),
    operands=_operands,
    kernels=(
        Kernel("cuda", by_cuda, configure_cuda, cuda.plan, source="the model"),
        Kernel("triton_tma", _by_tma, no_config, _plan_tma, _untuned_by_tma),
        Kernel("triton", takes_all, no_config, _plan_triton),
    ),
    reference=_reference,
    unserved=foreign_types,
    settled=_settled,
    named=_named,
)
