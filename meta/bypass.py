"""The decision to call a kernel without PyTorch's dispatcher: the only file that takes it.

The dispatcher takes 6 µs of host time, a third of a small product's call. A call may bypass it if the only dispatch
keys below autograd are those of a dense CPU or GPU tensor. Every other key stands for work that must happen before a
kernel reads memory: negation (the negative bit of `z.conj().imag`), filling in zeros (`torch._efficientzerotensor`),
calling a mode or a subclass, or rejecting a sparse tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch
from torch import Tensor

from fp8fn.meta.levels import inside_transform, is_tracked
from fp8fn.ops.torch_private.core import (
    DispatchKey,
    DispatchKeySet,
    dispatch_depth,
    function_depth,
    is_profiling,
    keys_after,
    keys_of,
    parse_key,
    tracing_state,
)

T = TypeVar("T")
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def shortest(
    dispatched: Callable[..., T], direct: Callable[..., T], *tensors: Tensor | None, below_autograd: bool = False
) -> Callable[..., T]:
    """Returns `direct` if a call on these tensors may bypass the dispatcher, else `dispatched`.

    Args:
        dispatched: Function that calls ops through the dispatcher.
        direct: Function that computes the same bits by launching GPU kernels itself.
        tensors: All tensors that the function reads; the device of the first one decides.
        below_autograd: Whether the caller has already recorded the call for autograd and is not traced by Dynamo.
    """
    if not below_autograd and torch.compiler.is_compiling():
        return dispatched
    first = tensors[0]
    if first is None or not first.is_cuda:
        return dispatched
    if nothing_watches(*tensors) and (below_autograd or not is_tracked(*tensors)):
        return direct
    return dispatched


def _keys_with_work() -> int:
    """The bits of all dispatch keys below autograd, except the keys of a dense CPU or GPU tensor."""
    key, key_set = DispatchKey, DispatchKeySet
    work = int(keys_after(key.AutogradOther).raw_repr())
    for passed in (key.CPU, key.CUDA, key.BackendSelect, key.ADInplaceOrView):
        work &= ~int(key_set(passed).raw_repr())
    # Above autograd, and no `torch.func` transform: the tensors of `torch.autograd.grad(..., is_grads_batched=True)`.
    batched = parse_key("Batched")
    assert batched is not None
    return work | int(key_set(batched).raw_repr())


_WITH_WORK: Final = _keys_with_work()


def is_last(keys: DispatchKeySet) -> bool:
    """Whether the dispatcher, which is at autograd, would call the CPU or GPU implementation next.

    `keys` are the dispatch keys of the call: those of all its tensors and of the active modes and transforms.
    """
    return keys.raw_repr() & _WITH_WORK == 0


def is_watched() -> bool:
    """Whether something observes all ops of this thread: a mode, a transform, a tracer or a profiler."""
    return bool(
        dispatch_depth() > 0
        or function_depth() > 0
        or tracing_state() is not None
        or is_profiling()
        or inside_transform()
    )


def nothing_watches(*tensors: Tensor | None) -> bool:
    """Whether nothing except autograd observes ops on these tensors or prepares the tensors for a kernel."""
    if is_watched():
        return False
    for tensor in tensors:  # a subclass without `__torch_dispatch__` has no key, but may have `__torch_function__`
        if tensor is not None and (type(tensor) not in _PLAIN or keys_of(tensor).raw_repr() & _WITH_WORK):
            return False
    return True
