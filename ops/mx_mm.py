"""The op `fp8fn::mx_mm`, the product of two MX-FP8 matrices: schema, checks, and the list of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import kernel, reference, targets
from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.kernel import Choice, Dispatch, Kernel, Named, Tensors, deferred
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import MX_A_BLOCK, MX_B_BLOCK
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_mm import check_operand, check_product, empty_output
from fp8fn.ops.targets import Target, chip_of
from fp8fn.ops.triton.views import largest_offset

if TYPE_CHECKING:
    from fp8fn.ops.cuda.gemm import gemv_mx, mx_tiles
    from fp8fn.ops.hip import envelope
    from fp8fn.ops.hip.config import HipConfig
    from fp8fn.ops.tuning import mx, mx_triton
    from fp8fn.ops.tuning.mx import MxConfig, Problem, Table
else:
    gemv_mx, mx_tiles = deferred("fp8fn.ops.cuda.gemm.gemv_mx"), deferred("fp8fn.ops.cuda.gemm.mx_tiles")
    envelope = deferred("fp8fn.ops.hip.envelope")
    mx, mx_triton = deferred("fp8fn.ops.tuning.mx"), deferred("fp8fn.ops.tuning.mx_triton")

MX_MM_SCHEMA: Final = (
    "mx_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias=None, ScalarType? out_dtype=None, "
    "bool constant=False) -> Tensor"
)


def check_mx_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Nothing, or the error that says which argument is wrong and what would work."""
    for name, data, scale, block in (("a", a, a_scale, MX_A_BLOCK), ("b", b, b_scale, MX_B_BLOCK)):
        check_operand(f"mx_mm: {name}", data, scale, block)
        if scale.dtype != torch.float8_e8m0fnu:
            raise TypeError(
                f"mx_mm: {name}_scale has dtype {scale.dtype}; it must be float8_e8m0fnu, as "
                f"fp8fn.quantize(x, {block}, scale='e8m0') makes it"
            )
        if scale.device != a.device:
            device = scale.device
            raise ValueError(f"mx_mm: a is on {a.device} and {name}_scale on {device}; move them to one device")
    check_product("mx_mm", a, b, bias, out_dtype)
    if a.ndim > 3 or b.ndim > 3:
        raise ValueError(f"mx_mm: a has {a.ndim} dimensions and b {b.ndim}; flatten the leading ones into one")
    if a.ndim == 3 and b.ndim == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"mx_mm: a has batch {a.shape[0]} and b {b.shape[0]}; they must be equal")


def choose(
    problem: Problem,
    table: Table | None = None,
    kernels: tuple[Kernel, ...] | None = None,
    faults: Mapping[str, str] | None = None,
) -> Choice:
    """The kernel that a table names, where it takes the problem, else the first of the list that does.

    `faults` are kernels that this machine can't load, by name, each with the reason.
    """
    return kernel.choose(problem, KERNELS if kernels is None else kernels, named(problem, table), faults)


def named(problem: Problem, table: Table | None = None) -> Named | None:
    """A table's verdict on a problem: by default the tables of the chip, then the shipped one."""
    if table is None and problem.chip is not None:
        from fp8fn.ops.tuning.mx_table import mx_named

        if (measured := mx_named(problem)) is not None:
            return measured
    row = mx.lookup(problem, mx.shipped() if table is None else table)
    if row is None:
        return None
    slower = {} if row.use_hip else dict.fromkeys(_HIP, f"{row.source} has use_hip=0")
    fastest = None if row.kernel in slower else row.kernel
    changes: dict[str, Any] = dict(row.options)
    return Named(fastest, row.source, lambda config: replace(config, **changes), slower)


def problem_of(a: Tensor, b: Tensor, target: Target, *scales: Tensor, constant: bool = False) -> Problem:
    """The problem of `a (B?, M, K) @ b (B?, K, N)` with `scales` of a and of b."""
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = a.shape[0] if a.ndim == 3 else b.shape[0] if b.ndim == 3 else 1
    largest = max(*map(span, (a, b, *scales)), 4 * batch * m * n)
    k_lines = has_lines(a) and has_lines(b.mT)
    words = all(mx_tiles.has_words(lines) for lines in (scales[0], scales[1].mT)) if scales else True
    in_boxes = map_fault(a) is None and map_fault(b.mT) is None
    scales_in_boxes = not scales or (map_fault(scales[0].mT) is None and map_fault(scales[1]) is None)
    return mx.Problem(
        m, n, k, target, batch, a.dtype, b.dtype, largest, k_lines, in_boxes, words, scales_in_boxes, constant
    )  # fmt: skip


def _problem(product: ScaledProduct) -> Problem:
    (a, a_scale, _), (b, b_scale, _) = product.a, product.b
    problem = problem_of(a, b, product.target, a_scale, b_scale, constant=product.constant)
    return replace(problem, chip=product.chip or chip_of(a.device, product.target))


def span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of the last one, or a stride that is longer."""
    return x.itemsize * max(largest_offset(x) + 1, *x.stride())


def has_lines(x: Tensor) -> bool:
    """Whether the last axis lies in consecutive bytes, and always from a multiple of 16."""
    *steps, step = x.stride()
    aligned = all(stride % 16 == 0 for size, stride in zip(x.shape, steps, strict=False) if size > 1)
    return (step == 1 or x.shape[-1] == 1) and aligned and x.data_ptr() % 16 == 0


def mx_mm_reference(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    left, right = Quantized(a, a_scale, MX_A_BLOCK), Quantized(b, b_scale, MX_B_BLOCK)
    return reference.scaled_mm(left, right, bias, out_dtype or torch.bfloat16)


def mx_mm_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    return empty_output(a, b, out_dtype)


def mx_mm_kernel(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    constant = constant or graph_capture.readable(b, b_scale)
    return MX_MM((a, a_scale, b, b_scale, bias), (out_dtype, constant))[0]


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> ScaledProduct:
    (a, a_scale, b, b_scale, bias), (out_dtype, constant) = tensors, values
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    return ScaledProduct(
        a=Quantized(a, a_scale, MX_A_BLOCK), b=Quantized(b, b_scale, MX_B_BLOCK), bias=bias,
        out=empty_output(a, b, out_dtype), target=targets.target_of(a.device), constant=constant,
    )  # fmt: skip


def _settled(product: ScaledProduct) -> Tensors | None:
    """With a contiguous bias, as every kernel reads it."""
    if product.bias is None or product.bias.is_contiguous():
        return None
    return *product.a[:2], *product.b[:2], product.bias.contiguous()


def _reference(product: ScaledProduct) -> tuple[Tensor]:
    return (reference.scaled_mm(product.a, product.b, product.bias, product.out.dtype),)


def _plan_widened(product: ScaledProduct, config: MxConfig) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.mx_mm import plan_mx_mm

    return plan_mx_mm(product, config)


def _plan_scaled(product: ScaledProduct, config: MxConfig) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.mx_mm_scaled import plan_mx_mm_scaled

    return plan_mx_mm_scaled(product, config)


def _plan_tma(product: ScaledProduct, config: MxConfig) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.mx_mm_tma import plan_mx_mm_tma

    return plan_mx_mm_tma(product, config)


def _plan_gemv(product: ScaledProduct, config: HipConfig) -> tuple[Launch, ...]:
    from fp8fn.ops.hip.mx_mm import plan_gemv

    return plan_gemv(product, config)


def _plan_mfma(product: ScaledProduct, config: HipConfig) -> tuple[Launch, ...]:
    from fp8fn.ops.hip.mx_mm import plan_mfma

    return plan_mfma(product, config)


KERNELS: Final = (
    Kernel(
        "hip_gemv",
        envelope.accepts_gemv,
        envelope.configure_gemv,
        _plan_gemv,
        envelope.untuned_gemv,
        fault=envelope.fault,
    ),
    Kernel(
        "hip_mfma",
        envelope.accepts_mfma,
        envelope.configure_mfma,
        _plan_mfma,
        envelope.untuned_mfma,
        fault=envelope.fault,
    ),
    Kernel("cuda_tiles", mx_tiles.accepts, mx_tiles.configure, mx_tiles.plan, mx_tiles.untuned),
    Kernel("cuda_gemv", gemv_mx.accepts, gemv_mx.configure, gemv_mx.plan),
    Kernel("triton_few", mx_triton.accepts_few, mx_triton.configure_few, _plan_widened),
    Kernel("triton_tma", mx_triton.accepts_tma, mx_triton.configure_tma, _plan_tma, mx_triton.untuned_tma),
    Kernel("triton_scaled", mx_triton.accepts_scaled, mx_triton.configure_scaled, _plan_scaled),
    Kernel("triton_widened", mx_triton.foreign, mx_triton.configure_widened, _plan_widened),
)
_HIP: Final = [kernel.name for kernel in KERNELS if kernel.backend == "hip"]

MX_MM: Final = Dispatch(
    op="mx_mm",
    inputs=("a", "a_scale", "b", "b_scale", "bias"),
    operands=_operands,
    problem=_problem,
    kernels=KERNELS,
    reference=_reference,
    settled=_settled,
    named=named,
    by_value=True,
)
