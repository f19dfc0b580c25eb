"""Counts the bytes that a forward pass keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def bytes_saved(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds after `forward()`, without the parameters and buffers of `model`.

    Whole storages are counted, each once, because whole storages stay allocated. A copy of a weight in another type
    counts. Call this function on a compiled module after its first call, so that no compilation runs under the hook.
    """
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_saved(model, forward))


def tensors_saved(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that `bytes_saved` counts, one for each storage."""
    held = (part for tensor in (*model.parameters(), *model.buffers()) for part in _parts(tensor))
    owned = {part.untyped_storage().data_ptr() for part in held}
    # Tensors are held until the end: the address of a freed storage could be another storage's, counted as the same.
    found: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        for part in _parts(tensor):
            address = part.untyped_storage().data_ptr()
            if address not in owned:
                found.setdefault(address, part)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = forward()
    for tensor in _unchecked(out):
        count(tensor)
    return list(found.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a wrapper such as `FP8Weight` holds: it has no storage."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _unchecked(out: Tensor) -> list[Tensor]:
    """Tensors that AOTAutograd keeps as attributes of its nodes, where no hook sees them (torch 2.10 and later)."""
    found: list[Tensor] = []
    pending, seen = [out.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += getattr(node, "_tensors_no_vc_check", None) or []
            pending += [following for following, _ in node.next_functions]
    return found
