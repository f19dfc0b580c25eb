"""Autograd at one functorch level at a time, by PyTorch's private single-level functions.

PyTorch calls an op registered as CompositeImplicitAutograd once for each level of `torch.func` transforms, from the
innermost level outwards. `apply` records a function at the current level. `below` runs the function's forward without
the current level, while the outer levels still record it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8fn.ops.torch_private.core import (
    BelowAutograd,
    TransformType,
    enable_single_level_autograd_function,
    forward_ad,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    set_forward_mode,
)

_DIFFERENTIATING = (TransformType.Grad, TransformType.Jvp)
T = TypeVar("T")

below_autograd = BelowAutograd


def inside_transform() -> bool:
    """Whether the call is inside a `torch.func` transform."""
    return maybe_current_level() is not None


def has_forward_mode() -> bool:
    """Whether forward-mode differentiation is active at this level."""
    stack = get_interpreter_stack()
    if stack:  # a compiled jvp enters its level without changing the Python counter below
        return bool(stack[-1].key() == TransformType.Jvp)
    return forward_ad._current_level >= 0


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd must record a function of these tensors at this level."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return has_forward_mode()


def forward_mode_depth() -> int:
    stack = get_interpreter_stack() or ()
    return sum(level.key() == TransformType.Jvp for level in stack)


def is_tracked_below(*tensors: Tensor | None) -> bool:
    """Whether an outer level differentiates as well, so that the user may ask for a second derivative.

    Forward mode outside of `torch.func` has no level. It differentiates everything that runs, including a backward.
    """
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack() or ()
    if any(level.key() in _DIFFERENTIATING for level in stack[:-1]):
        return True
    return bool(stack) and any(t is not None and _innermost(t).requires_grad for t in tensors)


def below(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls `function(*args)` below autograd of this level; the outer levels record the call."""
    if not inside_transform():
        with below_autograd():
            return function(*args, **kwargs)
    # PyTorch runs a Function's forward with gradients off. The outer levels would record nothing and return zeros.
    with below_autograd(), torch.enable_grad(), set_forward_mode(True):
        return function(*args, **kwargs)


def apply(function: type[Any], *args: Any) -> Any:
    """Calls `function.apply(*args)` at the current level only."""
    if not inside_transform():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def outlives_forward(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one: keeping it for the backward takes no memory."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def _innermost(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
