"""Autograd at one functorch level at a time: the only file that uses PyTorch's private single-level functions.

An op registered as CompositeImplicitAutograd is called once for each level of `torch.func` transforms, the innermost
first. `apply` records a function at that level; `below` runs its forward with that level peeled off and the outer ones
still listening.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

_functorch = torch._C._functorch
_DIFFERENTIATING = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
T = TypeVar("T")

below_autograd = torch._C._AutoDispatchBelowAutograd
SingleLevelFunction = _SingleLevelFunction


def inside_transform() -> bool:
    """Whether a `torch.func` transform is running."""
    return _functorch.maybe_current_level() is not None


def has_forward_mode() -> bool:
    """Whether forward-mode differentiation is on at this level."""
    stack = _functorch.get_interpreter_stack()
    if stack:  # a compiled jvp enters its level without the Python counter below
        return bool(stack[-1].key() == _functorch.TransformType.Jvp)
    return forward_ad._current_level >= 0


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd has to know of a function of these tensors at this level."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return has_forward_mode()


def forward_mode_depth() -> int:
    stack = _functorch.get_interpreter_stack() or ()
    return sum(level.key() == _functorch.TransformType.Jvp for level in stack)


def is_tracked_below(*tensors: Tensor | None) -> bool:
    """Whether a level under the current one differentiates as well, so that a second derivative can be asked for.

    Forward mode outside of torch.func has no level of its own: it differentiates whatever runs, a backward too.
    """
    if forward_ad._current_level >= 0:
        return True
    stack = _functorch.get_interpreter_stack() or ()
    if any(level.key() in _DIFFERENTIATING for level in stack[:-1]):
        return True
    return bool(stack) and any(t is not None and _innermost(t).requires_grad for t in tensors)


def below(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`function(*args)` under autograd of this level, visible to the levels outside it."""
    if not inside_transform():
        with below_autograd():
            return function(*args, **kwargs)
    # A Function's forward runs with gradients off; the outer levels would record nothing and give zeros.
    with below_autograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        return function(*args, **kwargs)


def apply(function: type[Any], *args: Any) -> Any:
    """`function.apply(*args)` at the current level alone."""
    if not inside_transform():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def _innermost(tensor: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
