"""Models compiled by `backend="fp8fn"`, with the substitutions of one pattern in the graphs that Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.graph.substitute import Substitution


def substituted(model: Callable[..., Any], x: Tensor, pattern: str, **options: Any) -> tuple[Any, list[Substitution]]:
    """The result without gradients, and the reports of `pattern`; `options` are those of `torch.compile`."""
    torch._dynamo.reset()
    patch = torch._inductor.config.patch(fx_graph_cache=False)
    with torch.no_grad(), patch, post_grad_pass.recorded() as reports:
        found = torch.compile(model, backend="fp8fn", fullgraph=True, **options)(x)
    return found, [report for report in reports if report.pattern == pattern]


def gradients(
    model: Callable[..., Any], x: Tensor, pattern: str
) -> tuple[list[Tensor], list[list[tuple[str, str | None]]]]:
    """The gradient of `x` with the patterns and without them, and what each of `pattern`'s reports says."""
    grads, said = [], []
    for fuse in (None, False):
        torch._dynamo.reset()
        each = x.clone().requires_grad_()
        patch = torch._inductor.config.patch(fx_graph_cache=False)
        with patch, post_grad_pass.recorded() as reports:
            compiled = torch.compile(model, backend="fp8fn", fullgraph=True, options={"fuse_quantize": fuse})
            out = compiled(each)
            sum(part.square().sum() for part in ([out] if isinstance(out, Tensor) else out)).backward()
        assert each.grad is not None
        grads.append(each.grad)
        said.append([(report.made, report.reason) for report in reports if report.pattern == pattern])
    return grads, said
