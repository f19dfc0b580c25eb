"""Replaces transformers' fine-grained FP8: the `FP8Linear` of checkpoints like DeepSeek-V3's, in blocks of 128x128.

    model = AutoModelForCausalLM.from_pretrained(…)  # "quantization_config": {"quant_method": "fp8", …}

`FP8Linear` quantizes the activation in (1, 128) and multiplies with a Triton kernel from the Hugging Face Hub. If
transformers can download the kernel, a joint graph contains the op or its kernel, which become `fp8fn::quantize` and
`fp8fn::scaled_mm`. If it cannot (no `kernels` package, no network, a CPU), transformers raises an error before there is
a graph, in eager mode too. `serve` then gives transformers these products spelled in PyTorch, and `dequantized_matmul`
replaces them. Products of groups of rows are `fp8fn::scaled_grouped_mm` in both cases. Left alone are the Hub's kernel
that reads an expert for each row, and DeepGEMM's, which transformers prefers on Hopper if its package and nvcc exist.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, input_of, source_of, triton_function
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import as_matrix, aten, same_sizes
from fp8fn.ops import targets
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES, short_name
from fp8fn.ops.layout import WHOLE, Block, scale_shape

NAME: Final = "transformers_fp8"
PRODUCT: Final = "w8a8_block_dynamic_fp8_matmul"
GROUPED, BATCHED = f"{PRODUCT}_grouped", f"{PRODUCT}_batched"
_ROW_BY_ROW: Final = "an expert for each row, and fp8fn multiplies groups; use experts_implementation='grouped_mm'"
_MODULE: Final = "transformers.integrations.finegrained_fp8"
_LOADED: Final = "_FINEGRAINED_FP8"
_LOG: Final = logging.getLogger("fp8fn")


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Replaces the products of the Hub's kernel, and reports each, including those with a weight per expert."""
    for node in list(graph.nodes):
        found = _read(node)
        if found is None:
            continue
        name, given, outs = found
        reason = _ROW_BY_ROW if name == BATCHED else _why_not(given, outs)
        made = "" if reason else _emit(graph, node, given, outs)
        a, b = given["A"].meta["val"], given["B"].meta["val"]
        shape = (prod(a.shape[:-1]), b.shape[-2], b.shape[-1])
        yield Substitution(NAME, str(node), source_of(node), name, shape, made, reason)


def _read(node: Node) -> tuple[str, dict[str, Any], list[Node]] | None:
    """The product's name, its arguments, and the nodes of its result; None for another node."""
    if node.op != "call_function":
        return None
    if node.target is triton_kernel_wrapper_functional:
        if triton_function(node).__name__ != f"{PRODUCT}_kernel":
            return None
        given = dict(node.kwargs["kwargs"])  # type: ignore[arg-type]
        given["block_size"] = (given.get("BLOCK_SIZE_N"), given.get("BLOCK_SIZE_K"))
        items = [user for user in node.users if user.target is operator.getitem]
        return PRODUCT, given, [item for item in items if item.args[1] == "C"]
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else ""  # the Hub's namespaces end in a hash
    if name not in (PRODUCT, GROUPED, BATCHED):
        return None
    return name, arguments_of(node), [node]


def _why_not(given: dict[str, Any], outs: list[Node]) -> str | None:
    a, b, scale = given["A"].meta["val"], given["B"].meta["val"], _scale(given).meta["val"]
    target = targets.target_of(a.device)
    if tuple(given["block_size"]) != (128, 128):
        return f"weight_block_size is {list(given['block_size'])}; fp8fn has blocks of 128x128"
    if scale.dtype not in SCALE_DTYPES or not same_sizes(scale.shape, scale_shape(b.shape, (128, 128))):
        return f"the weight's scales are {short_name(scale.dtype)} of shape {tuple(scale.shape)}"
    for x in (a, *(out.meta["val"] for out in outs)):
        if x.dtype not in INPUT_DTYPES:
            return f"the product is in {short_name(x.dtype)}"
    if "offsets" in given and scale.dtype != torch.float32:
        return "the weight's scales are e8m0, and fp8fn's groups have scales of one format"
    if b.dtype not in targets.fp8_dtypes(target):
        return f"{target.name} has no kernel for {short_name(b.dtype)}"
    return None


def _scale(given: dict[str, Any]) -> Node:
    """The weight's scales; the kernel takes e8m0 scales as bytes."""
    scale: Node = given["Bs"]
    return input_of(scale) if scale.target is aten.view.dtype else scale


def _emit(graph: Graph, node: Node, given: dict[str, Any], outs: list[Node]) -> str:
    """Replaces the kernel by a quantizer and a product, and returns the name of the product's op."""
    a, b, offsets = given["A"], given["B"], given.get("offsets")
    n = b.meta["val"].shape[-2]
    target, turned, groups = torch.ops.fp8fn.scaled_mm.default, [1, 0], []
    if offsets is not None:
        target, turned, groups = torch.ops.fp8fn.scaled_grouped_mm.default, [0, 2, 1], [offsets]
    for out in outs:
        with graph.inserting_before(out):
            value = a.meta["val"]
            rows = a if value.dim() == 2 else call(graph, aten.reshape.default, a, as_matrix(value.shape))
            quantized = call(graph, torch.ops.fp8fn.quantize.default, rows, (1, 128), b.meta["val"].dtype)
            left = [call(graph, operator.getitem, quantized, place) for place in (0, 1)]
            right = [call(graph, aten.permute.default, part, turned) for part in (b, _scale(given))]
            wanted = out.meta["val"]
            made = call(graph, target, *left, (1, 128), *right, (128, 128), *groups, None, wanted.dtype)
            if wanted.dim() != 2:
                made = call(graph, aten.reshape.default, made, [*wanted.shape[:-1], n])
        replace(graph, out, made)
    if node not in outs:
        # Without a GPU to analyse the kernel, PyTorch assumes that it writes all its tensors.
        for item in list(node.users):
            item.replace_all_uses_with(given[str(item.args[1])])
            graph.erase_node(item)
        graph.erase_node(node)
    return str(target)


def serve(*_: Any) -> None:
    """Gives transformers the products of the kernel that it cannot load, so that its models can be traced.

    Has no effect before transformers' FP8 is imported, or if its kernel is loaded. Dynamo calls this function when a
    compilation starts, until `torch._dynamo.reset()`; the passes call it when they are enabled.
    """
    if serve not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(serve)
    module = sys.modules.get(_MODULE)
    if module is None or getattr(module, _LOADED, module) is not None:
        return
    try:
        module._load_finegrained_fp8_kernel()
    except Exception as error:  # a download may fail with any error
        _LOG.info("transformers' FP8 kernel is not here, PyTorch serves: %s", error)
        setattr(
            module,
            _LOADED,
            module.FineGrainedFP8(matmul=matmul, batched_matmul=batched_matmul, grouped_matmul=grouped_matmul),
        )


def matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None, activation_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`a @ b.T`, as the Hub's `matmul_2d`: quantizes `a` in blocks along K, or by its static scale."""
    rows, right = a.reshape(prod(a.shape[:-1]), a.shape[-1]), _dequantized(b, b_scale, block_size)
    if activation_scale is None:
        left = _requantized(rows, b, block_size)
    else:
        scale = activation_scale.detach().float()
        left = (rows.float() / scale).clamp(*_range(b)).to(b.dtype).float() * scale
    out = F.linear(left, right).to(output_dtype or a.dtype)
    return out.view(*a.shape[:-1], b.shape[0])


def grouped_matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, tokens_per_expert: Tensor, block_size: Sequence[int] | None
) -> Tensor:
    """Each expert's rows of `a` by its weight, as the Hub's `matmul_grouped`: by fp8fn's own ops, in eager mode too."""
    a_block, b_block = _blocks(b, block_size)
    b, scale = b.detach(), b_scale.detach().float()  # the Hub's kernel has no gradient for the weight
    if WHOLE in b_block:
        scale = scale.reshape(-1, 1, 1).expand(b.shape[0], 1, 1)
    left = torch.ops.fp8fn.quantize(a, a_block, b.dtype)
    right = b.mT, scale.mT, b_block
    out: Tensor = torch.ops.fp8fn.scaled_grouped_mm(*left, a_block, *right, offsets, None, a.dtype)
    return out


def batched_matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, block_size: Sequence[int] | None, expert_ids: Tensor
) -> Tensor:
    """Each row of `a` by its expert's weight, as the Hub's `matmul_batched`."""
    ids, order = torch.sort(expert_ids)
    experts = torch.arange(b.shape[0], device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, experts, right=True).to(torch.int32)
    out = grouped_matmul(a[order], b, b_scale, offsets, offsets, block_size)
    return torch.empty_like(out).index_copy(0, order, out)


def _requantized(a: Tensor, b: Tensor, block_size: Sequence[int] | None) -> Tensor:
    """`a` quantized to the weight's FP8 type and dequantized: one scale for each row, or for 128 elements of it."""
    parts: tuple[Tensor, Tensor] = torch.ops.fp8fn.quantize(a, _blocks(b, block_size)[0], b.dtype)
    data, scale = parts
    return data.float() * _along(scale, -1, a.shape[-1])


def _dequantized(b: Tensor, scale: Tensor, block_size: Sequence[int] | None) -> Tensor:
    _, block = _blocks(b, block_size)
    # The Hub's kernel has no gradient for the weight.
    b, scale = b.detach(), scale.detach().float()
    if WHOLE in block:
        return b.float() * scale.reshape(*scale.shape[:-2], 1, 1)
    return b.float() * _along(_along(scale, -2, b.shape[-2]), -1, b.shape[-1])


def _blocks(b: Tensor, block_size: Sequence[int] | None) -> tuple[Block, Block]:
    """The blocks of activations and of the weight `b`."""
    if b.dtype not in FP8_DTYPES:
        raise NotImplementedError(f"fp8fn: a weight in {b.dtype}; without the Hub's kernel there is FP8 alone")
    if block_size is None or tuple(block_size) == tuple(b.shape[-2:]):
        return (1, WHOLE), (WHOLE, WHOLE)
    if tuple(block_size) != (128, 128):
        raise NotImplementedError(f"fp8fn: weight_block_size is {list(block_size)}; there are blocks of 128x128")
    return (1, 128), (128, 128)


def _along(scale: Tensor, dim: int, size: int) -> Tensor:
    """The scales of blocks of 128, repeated for each of `size` elements."""
    return scale if scale.shape[dim] == 1 else scale.repeat_interleave(128, dim).narrow(dim, 0, size)


def _range(b: Tensor) -> tuple[float, float]:
    info = torch.finfo(b.dtype)
    return info.min, info.max


serve()
