"""A tensor as planners see it: the batched view, the strides, and whether 32-bit offsets reach every element."""

from __future__ import annotations

from torch import Tensor

_LARGEST_INT32 = 2**31 - 1


def batched(x: Tensor) -> Tensor:
    """`(M, N)` as `(1, M, N)`; a batch as it is."""
    return x.unsqueeze(0) if x.dim() == 2 else x


def batch_stride(x: Tensor, batch: int) -> int:
    """From a matrix to the next; 0 where one serves the whole batch."""
    return x.stride(0) if x.shape[0] == batch and batch > 1 else 0


def is_wide(*tensors: Tensor | None) -> bool:
    """Whether an element lies at an offset that needs more than 32 bits."""
    return any(largest_offset(tensor) > _LARGEST_INT32 for tensor in tensors if tensor is not None)


def largest_offset(x: Tensor) -> int:
    """The offset of the last element from the first, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def strides(prefix: str, x: Tensor) -> dict[str, int]:
    """The strides of a batch of matrices, by the names of a kernel's arguments."""
    return {f"{prefix}_b": x.stride(0), f"{prefix}_m": x.stride(1), f"{prefix}_n": x.stride(2)}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
