"""`explain`: which matrix products of a model go to FP8, by which kernel, and why the others do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8fn.lowering.rewrite import Decision, decide
from fp8fn.ops import targets
from fp8fn.ops.formats import scale_dtype
from fp8fn.ops.layout import Block, matrix_strides, scale_is_column_major, scale_shape
from fp8fn.ops.recipe import BLOCKWISE, Recipe, parse_recipe, recipe_key
from fp8fn.site import Site, Where, check_where


@dataclass(frozen=True, kw_only=True)
class Row:
    """One product: the node, where the user wrote it, its sizes, and its kernel or the reason why it stays."""

    node: str
    source: str
    op: str
    weight: str
    shape: tuple[int, int, int]
    kernel: str | None
    reason: str | None


@dataclass(frozen=True)
class Explanation:
    """The rows of `explain`, one for each product, over all graphs; `str()` is the table.

    In the table, layers that differ in their number alone share a line: `layers.*.mlp.up.weight`, `12x`.
    """

    rows: tuple[Row, ...]
    recipe: str
    graphs: int

    @property
    def substituted(self) -> int:
        return sum(row.reason is None for row in self.rows)

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            outcome = row.kernel or f"- {row.reason}"
            name = re.sub(r"\b\d+\b", "*", row.weight)
            alike.setdefault((row.source, name, ",".join(map(str, row.shape)), outcome), []).append(row)
        body = [
            (rows[0].node, f"{len(rows)}x", source, rows[0].weight if len(rows) == 1 else name, shape, outcome)
            for (source, name, shape, outcome), rows in alike.items()
        ]
        head = ("node", "", "source", "weight", "M,N,K", "kernel, or why not")
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        rule = tuple("-" * width for width in widths)
        lines = ["  ".join(map(str.ljust, line, widths)) for line in (head, rule, *body)]
        count = f"{self.substituted} of {len(self.rows)} products in FP8, recipe {self.recipe}, {self.graphs} graph(s)"
        return "\n".join(line.rstrip() for line in (*lines, count))


def explain(
    model: Callable[..., Any],
    *args: Any,
    recipe: Recipe | str = BLOCKWISE,
    where: Where = None,
    show: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Runs `model(*args, **kwargs)` once, uncompiled, and says what `backend="fp8fn"` would do with each product.

    `recipe` and `where` are the backend's options. Prints the table, unless `show=False`, and returns it. The model's
    buffers and the random state are as before afterwards.
    """
    check_where(where)
    key = recipe_key(recipe)
    rows: list[Row] = []
    graphs = 0

    def record(gm: GraphModule, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        rows.extend(_row(decision, parse_recipe(key)) for decision in decide(gm.graph, where))
        return gm.forward

    with _unchanged(model):
        torch._dynamo.reset()
        torch.compile(model, backend=record)(*args, **kwargs)
        torch._dynamo.reset()
    explanation = Explanation(tuple(rows), key, graphs)
    if show:
        print(explanation)
    return explanation


def _row(decision: Decision, recipe: Recipe) -> Row:
    gemm, site = decision.gemm, decision.gemm.site
    return Row(
        node=gemm.node.name,
        source=gemm.source,
        op=site.op,
        weight=site.weight,
        shape=(site.m, site.n, site.k),
        kernel=kernel_name(site, recipe) if decision.reason is None else None,
        reason=decision.reason,
    )


def kernel_name(site: Site, recipe: Recipe) -> str:
    """The kernel that multiplies at this site, as its launch describes it; the plan runs nothing."""
    target = targets.target_of(site.device)
    if target.backend == "cpu":
        return "reference (plain PyTorch)"
    from fp8fn.ops.tuning.choose import plan_scaled_mm

    # Of a symbolic size, the one that it was traced with.
    m, n, k = (size if isinstance(size, int) else size.node.hint for size in (site.m, site.n, site.k))
    native = targets.native_e4m3(target)
    a = _operand((m, k), recipe.activation_block, recipe.activation_dtype or native, recipe, False)
    b = _operand((k, n), recipe.weight_block, recipe.weight_dtype or native, recipe, True)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return plan_scaled_mm(*a, *b, None, out, target).describe()


def _operand(
    shape: tuple[int, int], block: Block, dtype: torch.dtype, recipe: Recipe, column_major: bool
) -> tuple[Tensor, Tensor, Block]:
    data = torch.empty_strided(shape, matrix_strides(shape, column_major, 16), dtype=dtype, device="meta")
    scales, kind = scale_shape(shape, block), scale_dtype(recipe.scale)
    strides = matrix_strides(scales, scale_is_column_major(column_major, block), 16 // kind.itemsize)
    return data, torch.empty_strided(scales, strides, dtype=kind, device="meta"), block


@contextmanager
def _unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Restores the buffers of a module and the random state."""
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])
