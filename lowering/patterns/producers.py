"""Fuses `silu(gate) * up` and `rms_norm(x) * weight` with the quantizer of their result into one op.

    mlp.down_proj(F.silu(gate) * up)                                  # fp8fn::quantize_silu_mul, …_dual, …_grouped_dual
    x = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + eps)
    linear(weight * x.to(bf16))                                       # fp8fn::quantize_rms_norm, …_dual
    x = x + residual                                                  # before a norm: fp8fn::quantize_add_rms_norm

The pattern runs on the forward and backward graphs that Inductor compiles, because only these show all readers of a
tensor. If the backward needs a norm's statistics, the op receives them. Memory traffic decides: the fusion saves
writing and reading the 16-bit tensor, 4 bytes an element. But Inductor cannot fuse the op with other kernels, so the op
reads its inputs again, 2 bytes for each input that a neighbouring kernel reads or computes. Before a norm, the op adds
a residual where both addends are in memory: Inductor would read both in a kernel of its own.

The op rounds once, to FP8, whereas the model also rounds to 16 bits before. This changes 2 to 3 % of the bytes by one
step, and a product by 1.3 to 1.5 % in norm. That is half of FP8's own error and more than the 1 % that exact
substitutions may differ, so only `backend="fp8fn"` fuses, never `lowering.substitution()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.dequantized import FLOATS
from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import input_of, source_of, tensor_of, value
from fp8fn.lowering.graph.quantizers import (
    Quantizer,
    begins_aligned,
    computed,
    find_grouped_quantizers,
    find_quantizers,
    like,
    readers,
    replace_quantizer,
    reshaped_of,
    same_layout,
)
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import Size, as_shape, aten, equal, same_sizes, sized
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.operands import RMS_NORM, SILU_MUL, Quantization
from fp8fn.ops.quantize_fused import why_not_rms_norm, why_not_silu_mul

NAME: Final = "producers"
_CAST: Final = torch.ops.prims.convert_element_type.default
_MUL: Final = aten.mul.Tensor
_OPS: Final = torch.ops.fp8fn


@dataclass(frozen=True)
class SiluMul:
    """`silu(gate) * up`."""

    gate: Node
    up: Node

    name = "quantize_silu_mul"

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.gate, self.up

    def fault(self) -> str | None:
        gate, up = (node.meta["val"] for node in self.inputs)
        if gate.dtype != up.dtype or gate.dtype not in INPUT_DTYPES:
            return f"gate is {gate.dtype} and up {up.dtype}"
        return None

    def rejected(self, quantizer: Quantizer, target: targets.Target) -> str | None:
        gate, up = (sized(node.meta["val"], quantizer.shape) for node in self.inputs)
        if gate is None or up is None:
            return "a size is not known"
        return why_not_silu_mul(_quantization(quantizer, target, x=gate, other=up, source=SILU_MUL))

    def emit(self, graph: Graph, quantizer: Quantizer, known: bool) -> tuple[Any, ...]:
        operands = [like(graph, node, quantizer.x) for node in self.inputs]
        return (*operands, *([] if quantizer.offsets is None else [quantizer.offsets]), *quantizer.form)


@dataclass(frozen=True)
class RmsNorm:
    """`x * rstd * weight`; with `eps`, `rstd` is `1 / sqrt(mean(x²) + eps)`, which the op can compute."""

    x: Node
    weight: Node
    rstd: Node
    eps: float | None

    name = "quantize_rms_norm"

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.x,)

    def fault(self) -> str | None:
        for node in (self.x, self.weight):
            if node.meta["val"].dtype not in INPUT_DTYPES:
                return f"{node} is {node.meta['val'].dtype}"
        return None

    def rejected(self, quantizer: Quantizer, target: targets.Target) -> str | None:
        x, weight = sized(self.x.meta["val"], quantizer.shape), sized(self.weight.meta["val"], None)
        if x is None or weight is None:
            return "a size is not known"
        return why_not_rms_norm(_quantization(quantizer, target, x=x, other=weight, source=RMS_NORM))

    def emit(self, graph: Graph, quantizer: Quantizer, known: bool) -> tuple[Any, ...]:
        x, rstd = like(graph, self.x, quantizer.x), None
        if known:
            rstd = call(graph, aten.reshape.default, self.rstd, [-1])
        block, dtype, scale, *last = quantizer.form
        eps = 0.0 if self.eps is None else self.eps
        return (x, self.weight, eps, block, dtype, scale, *([rstd, *last] if rstd or last else []))


@dataclass(frozen=True)
class AddRmsNorm:
    """The `RmsNorm` of a sum of two tensors in memory, which the op computes too."""

    norm: RmsNorm
    total: Node
    addends: tuple[Node, Node]
    shape: list[Size]
    """The shape of the sum, for a reshape."""

    def rejected(self, quantizer: Quantizer, target: targets.Target) -> str | None:
        x, residual = (sized(node.meta["val"], quantizer.shape) for node in self.addends)
        weight = sized(self.norm.weight.meta["val"], None)
        if x is None or residual is None or weight is None:
            return "a size is not known"
        given = {"x": x, "residual": residual, "other": weight, "source": RMS_NORM}
        return why_not_rms_norm(_quantization(quantizer, target, **given))


Producer = SiluMul | RmsNorm


def _quantization(quantizer: Quantizer, target: targets.Target, **operands: Any) -> Quantization:
    offsets = None if quantizer.offsets is None else sized(tensor_of(quantizer.offsets))
    return Quantization(
        block=quantizer.block, dtype=quantizer.dtype, scale=quantizer.scale, dual=quantizer.dual,
        dual_block=quantizer.dual_block, column_major=quantizer.column_major, offsets=offsets, target=target,
        **operands,
    )  # fmt: skip


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Fuses where this saves memory traffic and the device has a kernel, and reports each known producer."""
    for quantizer in (*find_quantizers(graph), *find_grouped_quantizers(graph)):
        product = reshaped_of(quantizer.x)
        found = _producer(quantizer)
        if found is None:
            continue
        known, reason = _known(quantizer, found), found.fault()
        reason = reason or _why_not(quantizer, product, found, known)
        made = ""
        name, (m, k) = str(quantizer.node), quantizer.shape
        at = source_of(product) or source_of(quantizer.node)
        if not reason:
            new = _with_sum(graph, quantizer, found, known) or _fused(graph, quantizer, found, known)
            if new is not None:
                replace_quantizer(graph, quantizer.node, new)
                made = str(new.target)
            else:
                reason = "its result lies otherwise than the op's"
        yield Substitution(NAME, name, at, str(product), (m, 0, k), made, reason)


def fusible(graph: Graph) -> dict[Node, Producer]:
    """The producer of each quantizer that `substitute` would try to fuse; changes nothing."""
    producers = {}
    for quantizer in (*find_quantizers(graph), *find_grouped_quantizers(graph)):
        found = _producer(quantizer)
        if found is not None and found.fault() is None:
            known = _known(quantizer, found)
            if _why_not(quantizer, reshaped_of(quantizer.x), found, known) is None:
                producers[quantizer.node] = found
    return producers


def fuse(graph: Graph, quantizer: Quantizer, found: Producer) -> Node | None:
    """Adds the op for `quantizer` before it, or returns None if the device has no kernel for it.

    A norm's statistics are given to the op.
    """
    target = targets.target_of(quantizer.device)
    if target.backend != "cpu" and found.rejected(quantizer, target) is not None:
        return None
    return _fused(graph, quantizer, found, known=isinstance(found, RmsNorm))


def find_silu_mul(product: Node) -> SiluMul | None:
    """The factors of `product = silu(gate) * up`, or None."""
    return _silu_mul(product)


def _producer(quantizer: Quantizer) -> Producer | None:
    product = reshaped_of(quantizer.x)
    found = _silu_mul(product) or (None if quantizer.offsets is not None else _rms_norm(product))
    return found if found is not None and _is_matrix(quantizer, product) else None


def _fused(graph: Graph, quantizer: Quantizer, found: Producer, known: bool) -> Node | None:
    """The op before the quantizer, or None if its results have other strides than the quantizer's."""
    form = f"{'' if quantizer.offsets is None else '_grouped'}{'_dual' if quantizer.dual else ''}"
    op = getattr(_OPS, f"{found.name}{form}").default
    with graph.inserting_before(quantizer.node):
        new = call(graph, op, *found.emit(graph, quantizer, known))
    if all(map(same_layout, new.meta["val"], quantizer.outs)):
        return new
    graph.erase_node(new)
    return None


def _with_sum(graph: Graph, quantizer: Quantizer, found: Producer, known: bool) -> Node | None:
    """The op that adds too, in the place of the sum; None where the kernel does not, or where nothing is added."""
    if isinstance(found, SiluMul) or known or quantizer.dual or quantizer.column_major is not None:
        return None
    added, target = _addends(found), targets.target_of(quantizer.device)
    if added is None or (target.backend != "cpu" and added.rejected(quantizer, target) is not None):
        return None
    total = added.total
    with graph.inserting_before(total.next):  # all that reads the sum comes later
        x, residual = (like(graph, node, quantizer.x) for node in added.addends)
        weight = found.weight  # constant folding leaves one where its value was computed
        weight = graph.node_copy(weight) if weight.op == "get_attr" else weight
        form = (found.eps, quantizer.block, quantizer.dtype, quantizer.scale)
        new = call(graph, _OPS.quantize_add_rms_norm.default, x, residual, weight, *form)
        out = call(graph, operator.getitem, new, 2)
        if not same_sizes(out.meta["val"].shape, total.meta["val"].shape):
            out = call(graph, aten.reshape.default, out, added.shape)
    replace(graph, total, out)
    return new


def _addends(norm: RmsNorm) -> AddRmsNorm | None:
    """The sum that is normalised, where both addends are in memory anyway, aligned, and have its shape and type."""
    total = reshaped_of(norm.x)
    if total.target is not aten.add.Tensor or total.kwargs or norm.weight.op not in ("placeholder", "get_attr"):
        return None
    if any(not isinstance(arg, Node) for arg in total.args):
        return None
    addends = input_of(total, 0), input_of(total, 1)
    whole = total.meta["val"]
    for node in addends:
        val = node.meta["val"]
        if val.dtype != whole.dtype or not same_sizes(val.shape, whole.shape) or not begins_aligned(node):
            return None
        others = (reader for reader in readers(reshaped_of(node)) if reader is not total)
        if computed(reshaped_of(node)) and all(map(computed, others)):
            return None
    contiguous = torch.empty_like(whole, memory_format=torch.contiguous_format)
    shape = as_shape(whole.shape)
    if shape is None or not all(map(equal, whole.stride(), contiguous.stride())):
        return None
    return AddRmsNorm(norm, total, addends, shape)


def _is_matrix(quantizer: Quantizer, product: Node) -> bool:
    """Whether the quantizer reads a matrix `(M, N)`, with a known N, of a product `(..., N)`."""
    shape = quantizer.shape
    return len(shape) == 2 and isinstance(shape[1], int) and equal(product.meta["val"].shape[-1], shape[1])


def _silu_mul(product: Node) -> SiluMul | None:
    for silu, up in _factors(_narrowed(product)):
        gate, up = _silu_of(silu), _widened(up)
        if gate is not None and _same_shape(gate, up) and _same_shape(gate, product):
            return SiluMul(gate, up)
    return None


def _silu_of(node: Any) -> Node | None:
    """The `x` of a SiLU: `x / (1 + exp(-x))`, PyTorch's decomposition, or `x * sigmoid(x)`; None for another node."""
    node = _narrowed(node)
    if node.target is aten.div.Tensor:
        x, below = node.args
        inside = _argument(_argument(_argument(below, aten.add.Tensor, 1), aten.exp.default), aten.neg.default)
        return _widened(x) if isinstance(x, Node) and inside is x else None
    if node.target is aten.silu.default:
        return _widened(node.args[0])
    return next((_widened(x) for x, gate in _factors(node) if _argument(gate, aten.sigmoid.default) is x), None)


def _rms_norm(product: Node) -> RmsNorm | None:
    for scale, normalised in _factors(_narrowed(product)):
        weight = _widened(scale)
        for rstd, rows in _factors(_narrowed(normalised)):
            x, column, row = _widened(rows), rstd.meta["val"], weight.meta["val"]
            if row.dim() != 1 or column.dtype != torch.float32 or not _same_shape(x, product):
                continue
            if equal(row.shape[0], x.meta["val"].shape[-1]) and _is_column(column, x.meta["val"]):
                return RmsNorm(x, weight, rstd, _eps_of(rstd, x))
    return None


def _eps_of(rstd: Node, x: Node) -> float | None:
    """The `eps` of `rstd = 1 / sqrt(mean(x²) + eps)`, or None if `rstd` is computed otherwise."""
    inside: Any = _argument(rstd, aten.rsqrt.default) or _argument(rstd, aten.pow.Tensor_Scalar, -0.5)
    if inside is None or inside.target not in (aten.add.Tensor, aten.add.Scalar) or inside.kwargs:
        return None
    mean, eps = inside.args
    last = x.meta["val"].dim() - 1
    squares: Any = _argument(mean, aten.mean.dim, [-1], True) or _argument(mean, aten.mean.dim, [last], True)
    if squares is None or not isinstance(eps, int | float):
        return None
    base = _argument(squares, aten.pow.Tensor_Scalar, 2)
    if base is None and squares.target is _MUL and squares.args[0] is squares.args[1]:
        base = squares.args[0]
    return float(eps) if base is not None and _widened(base) is x else None


def _known(quantizer: Quantizer, found: Producer) -> bool:
    """Whether the graph computes a norm's statistics anyway, so that the op need not."""
    if isinstance(found, SiluMul):
        return False
    gone = unread_beside(quantizer.node, quantizer.x, (found.x,))
    return found.eps is None or any(reader not in gone for reader in found.rstd.users)


def _why_not(quantizer: Quantizer, product: Node, found: Producer, known: bool) -> str | None:
    others = [reader for reader in readers(product) if reader is not quantizer.node]
    if others:
        return f"{others[0]} reads it too, so that it has to be written"
    saved = _saved(quantizer, found, known)
    if saved <= 0:
        return "another kernel reads or makes the op's inputs, so that no memory traffic is saved"
    target = targets.target_of(quantizer.device)
    if target.backend == "cpu":
        return None
    reason = found.rejected(quantizer, target) or nvrtc.unavailable()
    return None if reason is None else f"no kernel for it: {reason}"


def _saved(quantizer: Quantizer, found: Producer, known: bool) -> int:
    """The bytes of memory traffic that the op saves for each element."""
    stop = (*found.inputs, *([found.rstd] if isinstance(found, RmsNorm) and known else []))
    gone, later = unread_beside(quantizer.node, quantizer.x, stop), _after(quantizer.node)
    saved: int = 2 * quantizer.x.meta["val"].dtype.itemsize  # one kernel writes the tensor, the next one reads it
    for node in found.inputs:
        size = node.meta["val"].dtype.itemsize
        others = [reader for reader in readers(reshaped_of(node)) if reader not in gone]
        beside = any(computed(reader) and reader not in later for reader in others)
        if not computed(reshaped_of(node)):
            saved -= size * beside  # the kernel that reads it would also have written the product
        elif any(reader in later or not computed(reader) for reader in others):
            saved -= size  # it was in registers when the product was computed
        else:
            saved -= 2 * size  # it would not have been written at all
    return saved


def unread_beside(reader: Node, x: Node, stop: tuple[Node, ...]) -> set[Node]:
    """`reader`, and the nodes that become unused when it reads `stop` in place of `x`."""
    gone, pending = {reader}, [x]
    while pending:
        node = pending.pop()
        if node in gone or node in stop or node.op != "call_function" or not all(user in gone for user in node.users):
            continue
        gone.add(node)
        pending += node.all_input_nodes
    return gone


def _after(node: Node) -> set[Node]:
    """The nodes that depend on `node`, which no earlier kernel can contain."""
    found, pending = set(), [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def _factors(node: Any) -> list[tuple[Node, Node]]:
    """The operands of a product, in both orders; none for another node."""
    if node.target is not _MUL or any(value(arg) is None for arg in node.args):
        return []
    a, b = node.args
    return [(a, b), (b, a)]


def _narrowed(node: Any) -> Any:
    """`node` before its casts between floating-point types of at least 16 bits."""
    while node.target is _CAST and {node.args[1], node.args[0].meta["val"].dtype} <= {*FLOATS}:
        node = node.args[0]
    return node


def _widened(node: Node) -> Node:
    """`node` before its casts to wider types, which are exact."""
    while node.target is _CAST and node.args[1] in FLOATS:
        narrow, wide = tensor_of(node.args[0]).dtype, tensor_of(node).dtype
        if narrow not in INPUT_DTYPES or narrow.itemsize > wide.itemsize:
            break
        node = input_of(node)
    return node


def _argument(node: Any, target: Callable[..., Any], *rest: Any) -> Node | None:
    """The first argument of `node` if it is a call of `target` with the other arguments `rest`, else None."""
    if not isinstance(node, Node) or node.target is not target or node.kwargs or node.args[1:] != rest:
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def _same_shape(a: Node, b: Node) -> bool:
    return same_sizes(a.meta["val"].shape, b.meta["val"].shape)


def _is_column(column: Tensor, rows: Tensor) -> bool:
    """Whether `column` is `(..., M, 1)` for rows `(..., M, N)`."""
    return same_sizes(column.shape, (*rows.shape[:-1], 1))
