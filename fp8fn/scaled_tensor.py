"""`ScaledTensor`: FP8 data with the scales that dequantize it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.formats import SCALE_DTYPES, fp8_max, short_name
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.layout import Block, known_block, moved, swap, unknown_block
from fp8fn.ops.scaled_mm import check_operand
from fp8fn.ops.torch_private.core import pytree
from fp8fn.ops.values import can_be_read

# Codes are counted for this many elements at a time: `bincount` needs eight bytes for each.
_SLICE: Final = 2**24


class Stored:
    """A frozen dataclass of FP8 `data`, `scale` and more, which pickle and copy do not support: its state has bytes."""

    data: Tensor
    scale: Tensor
    __post_init__: Callable[[], None]

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "data": self.data.view(torch.uint8), "dtypes": (self.data.dtype, self.scale.dtype)}
        return state if self.scale.dtype == torch.float32 else {**state, "scale": self.scale.view(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = dict(zip(("data", "scale"), state["dtypes"], strict=True))
        for name, value in state.items():
            if name != "dtypes":
                object.__setattr__(self, name, value.view(dtypes[name]) if name in dtypes else value)
        self.__post_init__()


def register_pytree(of: type[Any], tensors: tuple[str, ...], context: tuple[str, ...]) -> None:
    """Registers a frozen dataclass, whose fields are `tensors` and then `context`; one field is the context itself."""

    def flatten(q: Any) -> tuple[list[Any], Any]:
        rest = tuple(getattr(q, name) for name in context)
        return [getattr(q, name) for name in tensors], rest if len(rest) > 1 else rest[0]

    def flatten_with_keys(q: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        leaves, rest = flatten(q)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(tensors, leaves, strict=True)], rest

    def unflatten(leaves: Any, rest: Any) -> Any:
        values = (*leaves, *(rest if len(context) > 1 else (rest,)))
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return of(*values)
        # pytree.tree_map may make any object a leaf.
        made = object.__new__(of)
        for name, value in zip((*tensors, *context), values, strict=True):
            object.__setattr__(made, name, value)
        return made

    pytree.register_pytree_node(
        of,
        flatten,
        unflatten,
        serialized_type_name=f"fp8fn.{of.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )


@dataclass(frozen=True, eq=False)
class ScaledTensor(Stored):
    """FP8 data, the scale that dequantizes it, and the block of elements that shares one scale: a frozen pytree.

    `x ≈ data.float() * scale`, with `scale` repeated over `block`. The shape is logical: `quantize` chooses the strides
    that the kernels load, and `.mT` moves no data. `==` and `hash` go by identity; compare values with `torch.equal` of
    the parts.

    Args:
        data: Tensor of one of the four FP8 types.
        scale: Tensor of float32 or float8_e8m0fnu.
        block: `(r, c)`, where -1 means the whole axis.

    Shape:
        `data (..., M, N)`, `scale (..., ceil(M / r), ceil(N / c))`.

    Raises:
        TypeError: A part has another type.
        ValueError: The shapes do not fit the block, or the block does not exist.

    Example:
        >>> data = torch.ones(128, 256).to(torch.float8_e4m3fn)
        >>> fp8fn.ScaledTensor(data, torch.ones(1, 2), (128, 128)).mT.shape
        torch.Size([256, 128])
    """

    data: Tensor
    scale: Tensor
    block: Block

    def __post_init__(self) -> None:
        if isinstance(self.data, Tensor) and isinstance(self.scale, Tensor):
            object.__setattr__(self, "block", check_operand("ScaledTensor", self.data, self.scale, self.block))
            return
        check_parts("ScaledTensor", data=self.data, scale=self.scale)
        pair = known_block(self.block)
        if pair is None:
            raise unknown_block("ScaledTensor: block", self.block)
        object.__setattr__(self, "block", pair)

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
        """Copies the tensor to another device with its strides; `Tensor.to` would drop the padding."""
        check_device("ScaledTensor.to", device)
        return ScaledTensor(moved(self.data, device), moved(self.scale, device), self.block)

    def cuda(self, device: torch.device | int | None = None) -> ScaledTensor:
        """Copies the tensor to a GPU, the current one by default."""
        if device is None or isinstance(device, int):
            device = torch.device("cuda" if device is None else f"cuda:{device}")
        return self.to(device)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Computes `data * scale` in float32 and rounds it once; the method of `fp8fn.dequantize`."""
        import fp8fn

        return fp8fn.dequantize(self, dtype)

    def __matmul__(self, other: Tensor | ScaledTensor) -> Tensor:
        """`fp8fn.gemm(self, other)`."""
        import fp8fn

        return fp8fn.gemm(self, other) if isinstance(other, (Tensor, ScaledTensor)) else NotImplemented

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """`fp8fn.gemm(other, self)`, which `tensor @ self` calls."""
        import fp8fn

        return fp8fn.gemm(other, self) if isinstance(other, Tensor) else NotImplemented

    def __getitem__(self, index: Any) -> ScaledTensor:
        """Indexes leading dimensions, as `experts[3]`; the two dimensions of the matrix stay whole."""
        entries = index if isinstance(index, tuple) else (index,)
        if any(each is None or each is Ellipsis for each in entries):
            raise TypeError(
                f"ScaledTensor: index {reprlib.repr(index)} has None or ...; use integers, slices or tensors"
            )
        entries = tuple(map(_entry, entries))
        if self.ndim == 2 or _dimensions(entries) > self.ndim - 2:
            raise IndexError(
                f"ScaledTensor: index {reprlib.repr(index)} reaches into the matrix; shape {tuple(self.shape)} has "
                f"{self.ndim - 2} leading dimensions. For elements use q.dequantize()"
            )
        return ScaledTensor(self.data[entries], self.scale[entries], self.block)

    def __iter__(self) -> Iterator[ScaledTensor]:
        """The matrices along the first dimension."""
        if self.ndim == 2:
            raise TypeError(
                f"ScaledTensor: a matrix of shape {tuple(self.shape)} has no leading dimension to iterate over"
            )
        return map(self.__getitem__, range(self.shape[0]))

    def __repr__(self) -> str:
        """Shape, block and scale format, and a summary of the values if they can be read."""
        rows, columns = self.block
        where = f", device={str(self.device)!r}" if self.device.type != "cpu" else ""
        found = summary(self)
        values = "" if found is None else f", {found}"
        return (
            f"ScaledTensor({short_name(self.dtype)}{list(self.shape)}, block=({rows}, {columns}), "
            f"scale={_scale_kind(self)}{values}{where})"
        )

    def _repr_html_(self) -> str:
        """The content of `repr` as a table for notebooks, with a histogram of the data's binades."""
        size = (self.data.nbytes + self.scale.nbytes) / 2**10
        lines = {
            "data": f"{short_name(self.dtype)} {list(self.shape)}, {self.device.type}, {size:,.1f} KiB with scales",
            "block": f"{self.block[0]} x {self.block[1]}",
            "scales": f"{_scale_kind(self)} {list(self.scale.shape)}",
        }
        found = summary(self)
        if found is not None:
            lines["scales"] += f", {found.least_scale:.3g} to {found.largest_scale:.3g}"
            lines["saturated"] = f"{found.saturated:.2%} at the largest value, ±{fp8_max(self.dtype):.0f}"
            lines["zero"] = f"{found.zero:.2%} (zero before, or flushed)"
            if found.not_finite:
                lines["NaN or Inf"] = f"{found.not_finite:.2%}"
            first, last = found.exponents
            lines["|data|"] = f"<code>{found.bars}</code> by binade, 2^{first} to 2^{last}"
        body = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in lines.items())
        return f"<table><tr><th colspan=2>ScaledTensor</th></tr>{body}</table>"


@dataclass(frozen=True)
class Summary:
    """A summary of a `ScaledTensor`'s values: the range of its scales, shares of its elements, and a histogram.

    `binades[i]` counts the elements of magnitude from `2 ** (exponents[0] + i)` up to the next power of two.
    """

    least_scale: float
    largest_scale: float
    saturated: float
    zero: float
    not_finite: float
    exponents: tuple[int, int]
    binades: tuple[int, ...]

    @property
    def bars(self) -> str:
        """The histogram as one line: `▁` for no or few elements, `█` for the fullest binade."""
        most = max(*self.binades, 1)
        return "".join("▁▂▃▄▅▆▇█"[min(7, 8 * count // most)] for count in self.binades)

    def __str__(self) -> str:
        text = (
            f"{self.least_scale:.3g} to {self.largest_scale:.3g}, saturated={self.saturated:.2%}, zero={self.zero:.2%}"
        )
        return text + (f", not finite={self.not_finite:.2%}" if self.not_finite else "")


def summary(q: ScaledTensor) -> Summary | None:
    """The summary of `q`, or None if its values cannot be read: `q` is empty, on `meta`, or being traced or mapped.

    The summary is derived from the counts of the 256 codes, which takes one read of the data and no float copy.
    """
    if not (can_be_read(q.data) and can_be_read(q.scale)):
        return None
    codes = torch.zeros(256, dtype=torch.int64, device=q.device)
    for part in q.data.detach().view(torch.uint8).reshape(-1).split(_SLICE):
        codes += torch.bincount(part, minlength=256)
    counts, values = codes.cpu(), torch.arange(256, dtype=torch.uint8).view(q.dtype).double().abs()
    total = counts.sum().item()

    def share(mask: Tensor) -> float:
        return counts[mask].sum().item() / total

    exponents = torch.frexp(values).exponent - 1
    inside = values.isfinite() & (values > 0)
    first, last = int(exponents[inside].min()), int(exponents[inside].max())
    binades = tuple(int(counts[inside & (exponents == exponent)].sum()) for exponent in range(first, last + 1))
    scale = q.scale.detach().float()
    return Summary(
        least_scale=scale.min().item(),
        largest_scale=scale.max().item(),
        saturated=share(values == fp8_max(q.dtype)),
        zero=share(values == 0),
        not_finite=share(~values.isfinite()),
        exponents=(first, last),
        binades=binades,
    )


def check_device(name: str, device: object) -> None:
    """Raises TypeError for an object that is no device, such as a dtype."""
    if not isinstance(device, (torch.device, str, int)):
        remedy = "use a torch.device or its name; fp8fn.dequantize(q, dtype) gives another type"
        raise TypeError(f"{name}: device={device!r} is {kind_of(device)}; {remedy}")


def check_parts(name: str, **parts: object) -> None:
    """Raises TypeError unless all parts are tensors, or all stand for some: in `in_dims` of `vmap`, or in a graph."""
    some = any(isinstance(part, Tensor) for part in parts.values())
    for part, value in parts.items():
        if not isinstance(value, Tensor) and (some or not isinstance(value, (int, type(None), torch.fx.Proxy))):
            remedy = f"use tensors for {' and '.join(parts)}, or ints and None for all, as in_dims of torch.vmap"
            raise TypeError(f"{name}: {part}={reprlib.repr(value)} is {kind_of(value)}; {remedy}")


def _entry(entry: Any) -> Any:
    """An entry of an index, with a sequence as the tensor that it stands for.

    PyTorch reads some lists of lists as a tuple, and would then index the matrix.
    """
    if isinstance(entry, (Tensor, slice, int, torch.SymInt)):
        return entry
    try:
        if isinstance(entry, (list, tuple)) and any(isinstance(each, Tensor) for each in entry):
            raise TypeError  # PyTorch reads a list of tensors as a tuple
        made = torch.as_tensor(entry)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"ScaledTensor: index {reprlib.repr(entry)} is no tensor; use integers, slices or tensors, and a tuple of "
            "them for several dimensions"
        ) from None
    return made.long() if made.numel() == 0 else made


def _dimensions(entries: tuple[Any, ...]) -> int:
    """The number of dimensions that the entries of an index name; a mask names as many as it has."""
    masks = (torch.bool, torch.uint8)
    return sum(each.ndim if isinstance(each, Tensor) and each.dtype in masks else 1 for each in entries)


def _scale_kind(q: ScaledTensor) -> str:
    return "e8m0" if q.scale.dtype == SCALE_DTYPES[1] else "fp32"


register_pytree(ScaledTensor, ("data", "scale"), ("block",))

# `torch.load(..., weights_only=True)` reads files that hold it.
torch.serialization.add_safe_globals([ScaledTensor])
