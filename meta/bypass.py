"""When a call leaves PyTorch's dispatcher out: the only file that decides it.

The dispatcher takes 6 µs of the host, a third of a small product's call. A call may leave it out where the dispatch
keys below autograd are those of a dense tensor on a CPU or a GPU alone. Any other key is work to be done before a
kernel reads memory: to negate (the bit of `z.conj().imag`), to fill in zeros (`torch._efficientzerotensor`), to call a
mode or a subclass, to refuse a sparse tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch
from torch import Tensor

from fp8fn.meta.levels import inside_transform, is_tracked

T = TypeVar("T")
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_keys_of = torch._C._dispatch_keys


def shortest(
    dispatched: Callable[..., T], direct: Callable[..., T], *tensors: Tensor | None, below_autograd: bool = False
) -> Callable[..., T]:
    """The function to call on these tensors: `direct` where the dispatcher may be left out, else `dispatched`.

    Args:
        dispatched: calls ops, each through the dispatcher.
        direct: computes the same bits with the GPU's kernels, without the dispatcher.
        tensors: all that the function reads; the first one's device decides.
        below_autograd: the caller has told autograd of the call, and is not traced by Dynamo.
    """
    if not below_autograd and torch.compiler.is_compiling():
        return dispatched
    first = tensors[0]
    if first is None or not first.is_cuda:
        return dispatched
    unseen = nothing_watches(*tensors) if below_autograd else goes_unseen(*tensors)
    return direct if unseen else dispatched


def _keys_with_work() -> int:
    """The bits of the dispatch keys below autograd, but for those that every dense tensor of a CPU or a GPU has."""
    key, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
    work = int(torch._C._dispatch_keyset_full_after(key.AutogradOther).raw_repr())
    for passed in (key.CPU, key.CUDA, key.BackendSelect, key.ADInplaceOrView):
        work &= ~int(key_set(passed).raw_repr())
    return work


_WITH_WORK: Final = _keys_with_work()


def is_last(keys: torch._C.DispatchKeySet) -> bool:
    """Whether the dispatcher, at autograd, would call the CPU's or the GPU's implementation next; `keys` of the call.

    The keys are of all the tensors of a call, and of the modes and transforms that are on.
    """
    return keys.raw_repr() & _WITH_WORK == 0


def goes_unseen(*tensors: Tensor | None) -> bool:
    """Whether a call of an op on these tensors concerns its kernel alone, so that the dispatcher may be left out.

    That is: no autograd, transform, mode, subclass, trace or profiler, and of each tensor the memory holds its values.
    """
    return nothing_watches(*tensors) and not is_tracked(*tensors)


def nothing_watches(*tensors: Tensor | None) -> bool:
    """Whether nothing but autograd, at this level, sees which ops are called on these tensors, or prepares them."""
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or inside_transform()
    ):
        return False
    for tensor in tensors:  # a subclass without `__torch_dispatch__` has no key, but a `__torch_function__`
        if tensor is not None and (type(tensor) not in _PLAIN or _keys_of(tensor).raw_repr() & _WITH_WORK):
            return False
    return True
