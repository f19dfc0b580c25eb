"""`GroupedScaledTensor`: FP8 data of tokens in groups, with scales for tokens of one group only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8fn.ops import reference
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES, short_name
from fp8fn.ops.groups import ROWS, STEP, spread_blocks, spread_rows
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.layout import WHOLE, moved
from fp8fn.scaled_tensor import Stored, check_device, check_parts, register_pytree


@dataclass(frozen=True, eq=False)
class GroupedScaledTensor(Stored):
    """FP8 data of tokens in groups, with scales that hold for tokens of one group: a frozen pytree.

    `x ≈ data.float() * scale`, with each scale repeated over its tokens. Group `g` is tokens `offsets[g-1]` to
    `offsets[g]`. With `block` 128 or 32 group `g` begins at row `unit * (start // unit + g)` of `data`, where `start`
    is its first token and `unit` is 128 rows for `block` 128 where `size // 128 >= 4 * E`, else 32; its scales, one for
    `block` tokens, begin at row `start // block + g`. With `block` -1 tokens stay in place. Bytes of rows without a
    token are zero. No value is read to check this; `==` and `hash` go by identity.

    Args:
        data: Tensor of one of the four FP8 types.
        scale: Tensor of float32 or float8_e8m0fnu.
        offsets: int32, ascending; an offset past `size` counts as `size`.
        axis: 0 where rows are tokens; with 1 both matrices are transposed.
        block: 128 or 32 tokens of a group share a scale, or -1 for all tokens of the group.
        size: Number of tokens.

    Shape:
        `data (unit * (size // unit + E), N)`, `scale (size // block + E, N)` for `block` 128 and 32; `data (size, N)`,
        `scale (E, N)` for -1; `offsets (E)`.

    Raises:
        TypeError: A part has another type.
        ValueError: The shapes do not fit, or the axis or the block does not exist.

    Example:
        >>> ends = torch.tensor([100, 256], dtype=torch.int32)
        >>> q = fp8fn.quantize_grouped(torch.randn(256, 64), ends, block=-1)
        >>> q.groups, q.mT.shape
        (2, torch.Size([64, 256]))
    """

    data: Tensor
    scale: Tensor
    offsets: Tensor
    axis: int
    block: int
    size: int

    def __post_init__(self) -> None:
        check_parts("GroupedScaledTensor", data=self.data, scale=self.scale, offsets=self.offsets)
        if isinstance(self.data, Tensor):
            _check(self)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that was quantized, `(size, N)` or `(N, size)`."""
        lead, columns = self.data.shape[:-2], self.data.shape[-1 - self.axis]
        return torch.Size((*lead, *((self.size, columns) if self.axis == 0 else (columns, self.size))))

    @property
    def groups(self) -> int:
        return self.offsets.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def mT(self) -> GroupedScaledTensor:
        """The transpose, with the groups along the other axis; no data moves."""
        return GroupedScaledTensor(self.data.mT, self.scale.mT, self.offsets, 1 - self.axis, self.block, self.size)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Computes `data * scale` in float32, rounded once to `dtype`, with the tokens in their original order.

        Tokens past the last offset are zeros. For a batch, such as a result of `vmap`, use `vmap` of this method.
        """
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"dequantize: dtype={dtype} is not an output type; use bfloat16, float16 or float32")
        if self.axis == 1:
            return self.mT.dequantize(dtype).mT
        block = (self.block, 1)
        return reference.dequantize_grouped(self.data, self.scale, self.offsets, block, self.size).to(dtype)

    def to(self, device: torch.device | str) -> GroupedScaledTensor:
        """Copies the tensor to another device with its strides; `Tensor.to` would drop the padding."""
        check_device("GroupedScaledTensor.to", device)
        data, scale = moved(self.data, device), moved(self.scale, device)
        return GroupedScaledTensor(data, scale, self.offsets.to(device), self.axis, self.block, self.size)

    def __repr__(self) -> str:
        kind = "e8m0" if self.scale.dtype == SCALE_DTYPES[1] else "fp32"
        where = f", device={str(self.device)!r}" if self.device.type != "cpu" else ""
        return (
            f"GroupedScaledTensor({short_name(self.dtype)}{list(self.shape)}, groups={self.groups}, axis={self.axis}, "
            f"block={self.block}, scale={kind}{where})"
        )


def _check(q: GroupedScaledTensor) -> None:
    name = "GroupedScaledTensor"
    for field in ("axis", "block", "size"):
        value = getattr(q, field)
        if not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{name}: {field}={value!r} is {kind_of(value)}; use an int")
    if q.axis not in (0, 1):
        raise ValueError(f"{name}: axis={q.axis} is none of a matrix; use 0 for groups of rows, 1 for columns")
    if q.block not in (ROWS, STEP, WHOLE):
        remedy = f"use {ROWS}, {STEP}, or {WHOLE} for a group"
        raise ValueError(f"{name}: block={q.block} is no block of grouped tokens; {remedy}")
    if q.data.dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: data has dtype {q.data.dtype}, not an FP8 type; fp8fn.quantize_grouped makes one")
    if q.scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name}: scale has dtype {q.scale.dtype}; use float32 or float8_e8m0fnu")
    if q.offsets.dtype != torch.int32:
        raise TypeError(f"{name}: offsets has dtype {q.offsets.dtype}; use int32, offsets.to(torch.int32) for one")
    if q.data.ndim < 2 or q.offsets.ndim < 1:
        given = tuple(q.data.shape), tuple(q.offsets.shape)
        raise ValueError(f"{name}: data has shape {given[0]} and offsets {given[1]}; use (P, N) and (E,)")
    tokens, scales = q.size, q.groups
    if q.block != WHOLE:
        tokens, scales = spread_rows(q.size, q.groups, q.block), spread_blocks(q.size, q.groups, q.block)
    if q.data.shape[-2 + q.axis] != tokens:
        raise ValueError(
            f"{name}: data has shape {tuple(q.data.shape)}; size={q.size} in {q.groups} groups and blocks of {q.block} "
            f"needs {tokens} along axis {q.axis}"
        )
    columns = q.data.shape[-1 - q.axis]
    expected = (*q.data.shape[:-2], *((scales, columns) if q.axis == 0 else (columns, scales)))
    if tuple(q.scale.shape) != expected:
        raise ValueError(f"{name}: scale has shape {tuple(q.scale.shape)}; data {tuple(q.data.shape)} needs {expected}")


register_pytree(GroupedScaledTensor, ("data", "scale", "offsets"), ("axis", "block", "size"))
