"""Gradients, second derivatives, and what a forward saves for its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradients(fn: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = fn(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad.to(out.dtype))


def saved_by(forward: Callable[[], Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return saved


def second_derivative(fn: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    first = torch.autograd.grad(fn(a, b).square().sum(), (a, b), create_graph=True)
    return torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), (a, b))
