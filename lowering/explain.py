"""`explain`: which matrix products of a model go to FP8, by which kernel, and why the others do not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8fn.lowering.rewrite import Decision, decide
from fp8fn.lowering.substitute import Substitution
from fp8fn.ops import targets
from fp8fn.ops.formats import FP8_DTYPES, scale_dtype
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
        decided = [_row(decision, parse_recipe(key)) for decision in decide(gm, where)]
        forward: Callable[..., Any] = gm.forward
        substitutions: list[Substitution] = []
        if _holds_fp8(gm):
            forward = _traced(gm, example_inputs, substitutions)
        rows.extend(_with_substitutions(decided, substitutions))
        return forward

    with _unchanged(model):
        torch._dynamo.reset()
        if "transformers.integrations.finegrained_fp8" in sys.modules:
            from fp8fn.lowering.patterns import transformers_fp8

            transformers_fp8.serve()
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


def _holds_fp8(gm: GraphModule) -> bool:
    """Whether a graph has tensors of FP8, without which no exact pattern is in it."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype in FP8_DTYPES for value in values)


def _traced(gm: GraphModule, example_inputs: Sequence[Tensor], found: list[Substitution]) -> Callable[..., Any]:
    """Down to the joint graph, or that of an inference, where exact patterns are found and substituted."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    from fp8fn.lowering import joint

    def partition(joint_module: GraphModule, inputs: Any, **options: Any) -> Any:
        found.extend(joint.apply(joint_module.graph))
        joint_module.recompile()
        return default_partition(joint_module, inputs, **options)

    def unchanged(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    def inference(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend(joint.apply(module.graph))
        module.recompile()
        return unchanged(module, inputs)

    compile_graph = aot_autograd(
        fw_compiler=unchanged, bw_compiler=unchanged, inference_compiler=inference, partition_fn=partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    compiled: Callable[..., Any] = compile_graph(gm, example_inputs)
    return compiled


def _with_substitutions(rows: Sequence[Row], substitutions: Sequence[Substitution]) -> list[Row]:
    """A product that is in both lists once, as the pattern has it; those of the backward after all."""
    by_origin = {found.origin: found for found in substitutions if not found.backward}
    merged = []
    for row in rows:
        found = by_origin.pop(row.node, None)
        merged.append(row if found is None else replace(row, kernel=_made(found), reason=found.reason))
    backward = [found for found in substitutions if found.backward]
    for found in (*by_origin.values(), *backward):
        op = f"{found.target}, backward of {found.origin}" if found.backward else found.target
        merged.append(Row(node=found.node, source=found.source, op=op, weight="", shape=found.shape,
                          kernel=_made(found), reason=found.reason))  # fmt: skip
    return merged


def _made(found: Substitution) -> str | None:
    return None if found.reason else found.made.replace(".default", "").replace(".", "::")


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
