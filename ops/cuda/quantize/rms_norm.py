"""Activations and norms that leave as FP8: what the kernels on Hopper accept, and their launches.

`silu(gate) * up` is one launch of `quantize.cu`. `rms_norm(x, weight)` in blocks `(1, 128)` is one launch of
`rms_norm.cu` that holds whole rows; other blocks, both orientations at once, and rows of more than 16384 columns take a
small launch for the rows' statistics and a second read of `x`, unless the statistics are given.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.quantize.quantize import CHUNK, Quantized, accepts, batched, input_type, is_aligned, plan, types
from fp8fn.ops.cuda.runtime.call_cache import Call, Geometry, Step, geometry
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block, contracts_rows, empty_data, empty_scale, is_column_major, is_square, swap
from fp8fn.ops.targets import Target

# `rms_norm.cu`: 256 threads with 8 chunks of 8 columns each.
_PASS: Final = 2048
_CHUNKS: Final = 8
_MOST_ROWS: Final = 2**30
_CHUNKWISE: Final[dict[str, int | str]] = {
    "SOURCE": "Source::PLAIN", "PARTIAL": 0, "ALIGNED": 1, "LOAD": "Load::PAST_L1", "STORE": "Store::NORMAL",
}  # fmt: skip


def accepts_silu_mul(gate: Tensor, up: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    """None where `call_silu_mul` takes this call, else the reason why not."""
    for name, x in (("gate", gate), ("up", up)):
        if is_column_major(x):
            return f"{name} has strides {x.stride()}, not contiguous rows"
        if (reason := accepts(x, block, dtype, target)) is not None:
            return reason.replace("x has", f"{name} has")
    return None


def accepts_rms_norm(x: Tensor, weight: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    """None where `call_rms_norm` takes this call, else the reason why not."""
    if weight.dtype != x.dtype:
        return f"weight has dtype {weight.dtype} and x {x.dtype}"
    if weight.stride(0) != 1 and weight.numel() > 1:
        return f"weight has stride {weight.stride(0)}"
    if x.numel() // x.shape[-1] > _MOST_ROWS:
        return f"x has shape {tuple(x.shape)}, more than {_MOST_ROWS} rows"
    if is_column_major(x):
        return f"x has strides {x.stride()}, not contiguous rows"
    return accepts(x, block, dtype, target)


def call_silu_mul(
    gate: Tensor, up: Tensor, block: Block, dtype: torch.dtype, scale: str, target: Target, *, dual: bool
) -> Call:
    """`silu(gate) * up` in `block`, with `dual` in its transpose as well, on tensors of the kinds of these."""
    outs = _outputs(gate, block, dtype, scale, dual)
    sides, square = _sides(outs, block), is_square(block)
    launch = plan(batched(gate), *sides, square, scale, target, source="SILU_MUL", other=batched(up))
    return Call((Step(launch.prepare(), (0, 1, None, *_places(outs, block, 2))),), _geometries(outs), 2 * len(outs))


def call_rms_norm(
    x: Tensor, weight: Tensor, eps: float, block: Block, dtype: torch.dtype, scale: str, target: Target,
    rstd: Tensor | None = None, *, dual: bool,
) -> Call:  # fmt: skip
    """`x / sqrt(mean(x²) + eps) * weight` in `block`, with `dual` in its transpose as well, like `call_silu_mul`.

    Where there is `rstd (..., M)`, contiguous, it is the call's third input.
    """
    outs = _outputs(x, block, dtype, scale, dual)
    if rstd is not None:
        launch = plan(
            batched(x),
            *_sides(outs, block),
            is_square(block),
            scale,
            target,
            source="RMS_NORM",
            other=weight,
            rstd=rstd,
        )
        return Call((Step(launch.prepare(), (0, 1, 2, *_places(outs, block, 3))),), _geometries(outs), 2 * len(outs))
    if block == (1, 128) and not dual and holds_rows(x, weight):
        launch = plan_rms_norm(batched(x), weight, eps, outs[0].batch, scale, target)
        return Call((Step(launch.prepare(), (0, 1, 2, 3)),), _geometries(outs), 2)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    statistics = plan_row_rstd(batched(x), rstd, eps, target)
    sides, square = _sides(outs, block), is_square(block)
    launch = plan(batched(x), *sides, square, scale, target, source="RMS_NORM", other=weight, rstd=rstd)
    made = (*_geometries(outs), geometry(rstd))
    last = 1 + len(made)  # of the inputs and all that is made
    steps = Step(statistics.prepare(), (0, last)), Step(launch.prepare(), (0, 1, last, *_places(outs, block, 2)))
    return Call(steps, made, 2 * len(outs))


def holds_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm.cu` quantizes `x` in one launch: whole rows fit, in chunks of 8 aligned columns."""
    columns = x.shape[-1]
    return columns <= _PASS * _CHUNKS and columns % CHUNK == 0 and is_aligned(x) and is_aligned(weight)


def plan_rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Quantized, scale: str, target: Target, blocks: int | None = None
) -> CudaLaunch:
    """The launch of `quantize(rms_norm(x, weight), (1, 128))`; `holds_rows(x, weight)`."""
    *_, m, n = x.shape
    total = x.numel() // n
    passes = -(-n // _PASS)
    rows = 1 << (_CHUNKS // passes).bit_length() - 1
    even = n == passes * _PASS and total % rows == 0
    if blocks is None:  # as many as have the registers
        blocks = (3 if even else 2) if x.element_size() == 2 else (2 if even else 1)
    macros: dict[str, int | str] = {
        **types(x, out, scale), **_CHUNKWISE, "EVEN": int(even), "ROWS": rows, "PASSES": passes, "BLOCKS": blocks,
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("rms_norm.cu", "quantize_rms_norm", tuple(macros.items())),
        grid=(-(-total // rows), 1, 1),
        threads=256,
        shared=0,
        args={
            "x": x, "weight": weight, "row_data": out.data, "row_scale": out.scale, "M": total, "N": n, "matrix_m": m,
            "x_m": x.stride(-2), "row_m": out.data.stride(-2), "row_scale_lead": out.scale.stride(-1), "eps": eps,
        },
        target=target,
        options=macros,
    )  # fmt: skip


def plan_row_rstd(x: Tensor, rstd: Tensor, eps: float, target: Target) -> CudaLaunch:
    """The launch of `rstd (B?, M) = 1 / sqrt(mean(x²) + eps)`."""
    n = x.shape[-1]
    macros: dict[str, int | str] = {
        **_CHUNKWISE, "INPUT": input_type(x), "EVEN": 0, "ROWS": 1, "PARTIAL": int(n % CHUNK != 0),
        "ALIGNED": int(is_aligned(x)),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("row_rstd.cu", "row_rstd", tuple(macros.items())),
        grid=(rstd.numel(), 1, 1),
        threads=256,
        shared=0,
        args={"x": x, "rstd": rstd, "M": rstd.numel(), "N": n, "x_m": x.stride(-2), "eps": eps},
        target=target,
        options=macros,
    )


def _outputs(x: Tensor, block: Block, dtype: torch.dtype, scale: str, dual: bool) -> tuple[Quantized, ...]:
    """What is returned: in `block`, and with `dual` in its transpose; row-major first where the block is square."""
    column_major = contracts_rows(block)
    sides = ((block, column_major), (swap(block), not column_major))[: 1 + dual]
    return tuple(Quantized(empty_data(x, of, dtype, side), empty_scale(x, of, scale, side)) for of, side in sides)


def _sides(outs: tuple[Quantized, ...], block: Block) -> tuple[Quantized | None, Quantized | None]:
    """The row-major output and the column-major one."""
    first, second = (*(out.batch for out in outs), None)[:2]
    return (second, first) if contracts_rows(block) else (first, second)


def _places(outs: tuple[Quantized, ...], block: Block, inputs: int) -> tuple[int | None, ...]:
    """The places of the pointers of `quantize.cu` from `row_data` on, of which `offsets` is none here; see `Step`."""
    first = (inputs, inputs + 1)
    second = (inputs + 2, inputs + 3) if len(outs) == 2 else (None, None)
    return (*second, *first, None) if contracts_rows(block) else (*first, *second, None)


def _geometries(outs: tuple[Quantized, ...]) -> tuple[Geometry, ...]:
    return tuple(geometry(tensor) for out in outs for tensor in out)
