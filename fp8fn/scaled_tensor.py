"""`ScaledTensor`, the one data type of the library: FP8 data with the scales that turn it back into numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fp8fn.ops.formats import SCALE_DTYPES, short_name
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.scaled_mm import check_operand


@dataclass(frozen=True)
class ScaledTensor:
    """FP8 `data`, the `scale` that DEquantizes it, and the `block` that shares one scale: a frozen pytree.

    Invariants:

    - `x ≈ data.float() * scale`, with `scale` repeated over `block`;
    - `scale.shape[-2:] == ceil(data.shape[-2:] / block)` with equal leading dimensions, where `-1` in a block means the
      whole axis;
    - `data` is one of the four FP8 types, `scale` is float32 or float8_e8m0fnu;
    - the shape is logical, the strides are the kernel's business: `quantize` stores both as the GEMM loads them.

    Raises `ValueError` or `TypeError` where one of them does not hold.
    """

    data: Tensor
    scale: Tensor
    block: Block

    def __post_init__(self) -> None:
        # Under pytree.tree_map a leaf may be anything, an in_dim of vmap for one.
        if isinstance(self.data, Tensor) and isinstance(self.scale, Tensor):
            check_operand("ScaledTensor", self.data, self.scale, self.block)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def mT(self) -> ScaledTensor:
        """The transpose of the last two dimensions; no data moves."""
        return ScaledTensor(self.data.mT, self.scale.mT, swap(self.block))

    def to(self, device: torch.device | str) -> ScaledTensor:
        """The same values on another device, with the same strides: `Tensor.to` would drop the padding."""
        data, scale = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
            for t in (self.data, self.scale)
        )
        return ScaledTensor(data, scale, self.block)

    def __getstate__(self) -> dict[str, Any]:
        # pickle and copy know no storage of FP8: they get the bytes, and the types beside them.
        data, scale = self.data.view(torch.uint8), self.scale
        if scale.dtype != torch.float32:
            scale = scale.view(torch.uint8)
        return {"data": data, "scale": scale, "dtypes": (self.dtype, self.scale.dtype), "block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, dtype in zip(("data", "scale"), state["dtypes"], strict=True):
            object.__setattr__(self, name, state[name].view(dtype))
        object.__setattr__(self, "block", state["block"])
        self.__post_init__()

    def __repr__(self) -> str:
        rows, columns = self.block
        kind = "e8m0" if self.scale.dtype == SCALE_DTYPES[1] else "fp32"
        where = f", device={str(self.device)!r}" if self.device.type != "cpu" else ""
        return (
            f"ScaledTensor({short_name(self.dtype)}{list(self.shape)}, block=({rows}, {columns}), scale={kind}{where})"
        )


def _flatten(q: ScaledTensor) -> tuple[list[Any], Block]:
    return [q.data, q.scale], q.block


def _flatten_with_keys(q: ScaledTensor) -> tuple[list[tuple[pytree.KeyEntry, Any]], Block]:
    return [(pytree.GetAttrKey("data"), q.data), (pytree.GetAttrKey("scale"), q.scale)], q.block


def _unflatten(leaves: Any, block: Block) -> ScaledTensor:
    data, scale = leaves
    return ScaledTensor(data, scale, block)


pytree.register_pytree_node(
    ScaledTensor,
    _flatten,
    _unflatten,
    serialized_type_name="fp8fn.ScaledTensor",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
