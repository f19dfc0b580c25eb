"""Computes the largest magnitude of a matrix in the kernel of Inductor that makes the matrix.

    fp8fn::quantize_dual(gelu(h), (-1, -1))    # becomes
    fp8fn::quantize_dual(y, (-1, -1), amax=y.abs().amax())    # with y = gelu(h)

A quantizer with one scale for a matrix reads the matrix twice: for the largest magnitude, and for the data. Inductor
fuses the first of these reads with the computation of the matrix, which saves 2 bytes an element. The magnitudes of
rows are reduced first, because a norm, too, is a kernel over rows; Inductor would compute a reduction of the whole
matrix in another kernel.

The pattern changes no bit. Inductor computes the maximum of the unrounded values, and rounds it when it stores it in
the type of the matrix: rounding to nearest is monotonic, so the rounded maximum is the maximum of the rounded values.

A matrix that another kernel makes, such as a weight or a product, is left to the quantizer's own launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import input_of, source_of
from fp8fn.lowering.graph.quantizers import Quantizer, computed, find_quantizers, replace_quantizer, reshaped_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten
from fp8fn.ops import targets
from fp8fn.ops.layout import WHOLE

NAME: Final = "given_amax"


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Gives the largest magnitude to the quantizers of whole matrices that Inductor computes, and reports each."""
    for quantizer in find_quantizers(graph):
        product = _without_alias(quantizer.x)
        if quantizer.block != (WHOLE, WHOLE) or not computed(product) or len(quantizer.shape) != 2:
            continue
        reason = _why_not(quantizer)
        name, made = str(quantizer.node), "" if reason else f"{quantizer.node.target}, amax given"
        at, (m, k) = source_of(product) or source_of(quantizer.node), quantizer.shape
        if reason is None:
            _emit(graph, quantizer)
        yield Substitution(NAME, name, at, str(product), (m, 0, k), made, reason)


def _without_alias(x: Node) -> Node:
    """The tensor before reshapes and the alias by which `saved.exact` hides it from patterns that change bits."""
    x = reshaped_of(x)
    return reshaped_of(input_of(x)) if x.target is aten.alias.default else x


def _why_not(quantizer: Quantizer) -> str | None:
    if any(isinstance(size, int) and size == 0 for size in quantizer.shape):
        return "x is empty"
    target = targets.target_of(quantizer.device)
    if quantizer.dtype not in targets.fp8_dtypes(target):
        return f"{target.name} has no instruction for {quantizer.dtype}"
    return None


def _emit(graph: Graph, quantizer: Quantizer) -> None:
    node, x = quantizer.node, quantizer.x
    with graph.inserting_before(node):
        rows = call(graph, aten.amax.default, call(graph, aten.abs.default, x), [-1], True)
        amax = call(graph, aten.amax.default, rows, [-2], True)
        form = list(quantizer.block), quantizer.dtype, quantizer.scale
        new = call(graph, node.target, x, *form, amax, **quantizer.beside)
    replace_quantizer(graph, node, new)
