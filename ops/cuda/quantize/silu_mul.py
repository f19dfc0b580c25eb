"""`silu(gate) * up` on Hopper, in training: the launches of both directions.

`silu_mul_saved.cu` quantizes the product, `gate` and `up` in one read. `silu_mul_backward.cu` computes the gradients
from `gate` and `up`, in FP8 or in 16 bits, and quantizes them both ways, and the product for the weight's gradient of
the layer behind.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.operands import ELEMENT, FP8, OCTET, TILE_ROWS, quantization_types, rows_fault
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.cuda.quantize.quantize import QuantizeConfig
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block, is_square
from fp8fn.ops.operands import Quantized
from fp8fn.ops.silu_mul import SavedSiluMul, SiluMulBackward
from fp8fn.ops.targets import OCP, hopper_fault

_ROW: Final[Block] = (1, 128)
_PRODUCT_BLOCKS: Final[tuple[Block, ...]] = ((128, 1), (128, 128))
_TILE_COLUMNS: Final = 128
_BYTES: Final = 8  # that a thread loads of a row in FP8


def accepts_saved(saved: SavedSiluMul) -> str | None:
    """Why `silu_mul_saved.cu` cannot quantize, or None."""
    product = saved.product
    if (reason := quantize.accepts(product)) is not None:
        return reason
    if product.block != _ROW:
        return f"block {product.block} is not {_ROW}"
    return _octets_fault("gate", saved.gate.x) or _octets_fault("up", saved.up.x)


def accepts_backward(given: SiluMulBackward) -> str | None:
    """Why `silu_mul_backward.cu` cannot compute a gradient that is not empty, or None."""
    if (reason := hopper_fault(given.target)) is not None:
        return reason
    kept = [x.data.dtype for x in (given.gate, given.up) if isinstance(x, Quantized)]
    for dtype in (given.dtype, given.product_dtype, *kept):
        if dtype not in OCP:
            return f"{dtype} is no type of the hardware"
    if given.block != _ROW or given.product_block not in _PRODUCT_BLOCKS:
        return f"blocks {given.block} and {given.product_block} are not {_ROW} and one of {_PRODUCT_BLOCKS}"
    reason = rows_fault(given.grad, "grad") or _octets_fault("grad", given.grad)
    return reason or _kept_fault("gate", given.gate, given.grad) or _kept_fault("up", given.up, given.grad)


def _octets_fault(name: str, x: Tensor) -> str | None:
    """Why 8 columns of a row cannot be loaded at once as 16 bytes, or None."""
    if x.element_size() != 2:
        return f"{name} is {x.dtype}, not of 16 bits"
    if x.shape[-1] % OCTET:
        return f"{name} has {x.shape[-1]} columns, no multiple of {OCTET}"
    return _alignment_fault(name, x, OCTET * x.element_size())


def _kept_fault(name: str, kept: Quantized | Tensor, grad: Tensor) -> str | None:
    """Why the kernel cannot load values of the type of `grad`, or FP8 data and its scales, or None."""
    if isinstance(kept, Tensor):
        if kept.dtype != grad.dtype:
            return f"{name} is {kept.dtype} and grad {grad.dtype}"
        return rows_fault(kept, name) or _octets_fault(name, kept)
    data, scale = kept.data, kept.scale
    if (reason := rows_fault(data, name)) is not None:
        return reason
    return _alignment_fault(name, data, _BYTES) or rows_fault(scale.mT, f"{name}_scale")


def _alignment_fault(name: str, x: Tensor, size: int) -> str | None:
    """Why rows do not begin at multiples of `size` bytes, or None; a graph's tensors have no address."""
    address = 0 if x.device.type == "meta" else x.data_ptr()
    if address % size or x.stride(-2) * x.element_size() % size:
        return f"rows of {name} do not begin at multiples of {size} bytes"
    return None


def configure_saved(saved: SavedSiluMul) -> QuantizeConfig:
    """Tiles of 64 rows, three blocks a multiprocessor; two where float16 is converted, which takes registers."""
    return QuantizeConfig(ROWS=4, BLOCKS=3 if saved.gate.x.dtype == torch.bfloat16 else 2)


def configure_backward(given: SiluMulBackward) -> QuantizeConfig:
    """Two blocks a multiprocessor; one where float16 is converted, which takes registers."""
    return QuantizeConfig(BLOCKS=2 if given.grad.dtype == torch.bfloat16 else 1)


def plan_saved(saved: SavedSiluMul, config: QuantizeConfig) -> tuple[CudaLaunch]:
    """The launch of `quantize_silu_mul_saved`."""
    product, gate, up = saved.product, saved.gate, saved.up
    m, n = product.m, product.n
    macros = {**quantization_types(product), **_tile(config, m, n)}
    launch = CudaLaunch(
        kernel=CudaKernel("silu_mul_saved.cu", "silu_mul_saved", tuple(macros.items())),
        grid=(-(-n // _TILE_COLUMNS), -(-m // config.rows), product.matrices),
        threads=32 * config.WARPS,
        shared=0,
        args={
            "gate": gate.x, "up": up.x, **saved.outputs.tensors, "M": m, "N": n, "gate_m": gate.x.stride(-2),
            "up_m": up.x.stride(-2), "row_m": product.out.data.stride(-2), "scale_lead": product.out.scale.stride(-1),
            "saved_lead": gate.out.scale.stride(-1),
        },
        target=saved.target,
        options=macros,
    )  # fmt: skip
    return (launch,)


def plan_backward(given: SiluMulBackward, config: QuantizeConfig) -> tuple[CudaLaunch]:
    """The launch of `quantize_silu_mul_backward`."""
    grad, m, n = given.grad, *given.grad.shape[-2:]
    gate, gate_scale, gate_lead = _kept_parts(given.gate)
    up, up_scale, up_lead = _kept_parts(given.up)
    square, scaled = is_square(given.product_block), gate_scale is not None
    macros: dict[str, int | str] = {
        "INPUT": ELEMENT[grad.dtype], "KEPT": FP8[gate.dtype] if scaled else ELEMENT[gate.dtype],
        "FP8": FP8[given.dtype], "PRODUCT_FP8": FP8[given.product_dtype], "FORMAT": f"Format::{given.scale.upper()}",
        "PRODUCT_SQUARE": int(square), **_tile(config, m, n),
    }  # fmt: skip
    out = given.outputs.tensors
    launch = CudaLaunch(
        kernel=CudaKernel("silu_mul_backward.cu", "silu_mul_backward", tuple(macros.items())),
        grid=(-(-n // _TILE_COLUMNS), -(-m // TILE_ROWS), math.prod(grad.shape[:-2])),
        threads=32 * config.WARPS,
        shared=_shared(config, scaled),
        args={
            "grad": grad, "gate": gate, "gate_scale": gate_scale, "up": up, "up_scale": up_scale, **out, "M": m, "N": n,
            "grad_m": grad.stride(-2), "gate_m": gate.stride(-2), "up_m": up.stride(-2), "gate_lead": gate_lead,
            "up_lead": up_lead,
            "row_m": out["grad_gate"].stride(-2), "row_lead": out["grad_gate_scale"].stride(-1),
            "col_n": out["product"].stride(-1), "col_lead": out["grad_gate_columns_scale"].stride(-2),
            "product_lead": out["product_scale"].stride(-1 if square else -2),
        },
        target=given.target,
        options=macros,
    )  # fmt: skip
    return (launch,)


def _tile(config: QuantizeConfig, m: int, n: int) -> dict[str, int | str]:
    """The macros of `fp8_tile.cuh` and `values.cuh`."""
    return {
        "SOURCE": "Source::PLAIN", "PARTIAL": 0, "ALIGNED": 1,
        "EVEN": int(m % config.rows == 0 and n % _TILE_COLUMNS == 0), "WARPS": config.WARPS, "ROWS": config.ROWS,
        "BLOCKS": config.BLOCKS, "LOAD": f"Load::{config.LOAD}", "STORE": f"Store::{config.STORE}",
        "ROW_BYTES": config.ROW_BYTES,
    }  # fmt: skip


def _kept_parts(kept: Quantized | Tensor) -> tuple[Tensor, Tensor | None, int]:
    """The values or their FP8 data, its scales, and how far apart the scales of neighbouring columns lie."""
    if isinstance(kept, Tensor):
        return kept, None, 0
    return kept.data, kept.scale, kept.scale.stride(-1)


def _shared(config: QuantizeConfig, scaled: bool) -> int:
    """The bytes of `Shared` in `silu_mul_backward.cu`; a product that is not rounded is parked in float32."""
    tile, words = TILE_ROWS * _TILE_COLUMNS, 1 if scaled else 2
    maxima = config.WARPS * _TILE_COLUMNS * 2
    return 2 * tile * words + 2 * tile + (2 + words) * maxima + 3 * _TILE_COLUMNS * 4 + 2 * TILE_ROWS * 4
