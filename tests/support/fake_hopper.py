"""A Llama's graphs as they are on Hopper, at real widths, without a GPU and without any arithmetic.

Tensors are fake and on the CPU, because PyTorch without CUDA has no autograd for fake CUDA tensors. fp8fn takes the CPU
for an sm90. `scaled_dot_product_attention` is cuDNN's, which expands no keys or values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fp8fn.bench.train import attention, models
from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.recipe import BLOCKWISE, Recipe
from fp8fn.weights.form import Form
from fp8fn.weights.fp8_weight import weight_of
from support.kept import OpByOp

BF16 = torch.bfloat16
Saved = tuple[int, tuple[int, ...], torch.dtype]


def _cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert attn_mask is None
    assert dropout_p == 0
    assert enable_gqa or q.shape == k.shape
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = op(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    return out


@contextmanager
def _as_on_hopper() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "target_of", lambda device: targets.SM90)
        patch.setattr(nvrtc, "unavailable", lambda: None)
        patch.setattr(F, "scaled_dot_product_attention", _cudnn_attention)
        yield


def compiled_llama(
    name: str, batch: tuple[int, int], plan: SavePlan | None, recipe: Recipe | None, layers: int
) -> OpByOp:
    """The graphs of `bench train`'s model `name`; `recipe=None` is bf16, `plan=None` keeps what PyTorch keeps."""
    attention.register()
    torch._dynamo.reset()
    backend = OpByOp(plan, recipe, "model.layers.*")
    with _as_on_hopper(), FakeTensorMode():
        size = replace(models.SIZES[name], layers=layers)
        model = models.build(size, batch[1], attention.CAUSAL, torch.device("cpu"), 0)
        ids = torch.zeros(batch, dtype=torch.int64)
        torch.compile(model, backend=backend, dynamic=False)(input_ids=ids, labels=ids)
    torch._dynamo.reset()
    return backend


def compiled_layer(layer: Callable[[], nn.Module], *, rows: tuple[int, ...], gathered: str, dynamic: bool) -> OpByOp:
    """The graphs of a layer in bf16, with the weights whose names match `gathered` as FSDP has gathered them in FP8."""
    torch._dynamo.reset()
    backend = OpByOp(SavePlan(), BLOCKWISE)
    with _as_on_hopper(), FakeTensorMode():
        model = layer()
        for name, parameter in list(model.named_parameters()):
            weight = parameter.detach().bfloat16()
            if re.fullmatch(gathered, name):
                scale = torch.empty([-(-size // 128) for size in weight.shape])
                weight = weight_of(weight.to(torch.float8_e4m3fn), scale, Form((128, 128), BF16, gathered=True))
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(weight))
        torch.compile(model, backend=backend, dynamic=dynamic)(torch.empty(rows, dtype=BF16, requires_grad=True))
    torch._dynamo.reset()
    return backend


def saved_by(backend: OpByOp, vocabulary: int) -> list[Saved]:
    """The bytes, shape and type of each tensor that the forward saves, without inputs of the graph and logits."""
    (forward,) = backend.forward
    found: dict[int, Saved] = {}
    results: Any = forward.graph.output_node().args[0]
    for node in results:
        x = getattr(node, "meta", {}).get("val")
        if not isinstance(x, Tensor) or node.op == "placeholder" or vocabulary in x.shape:
            continue
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes(), tuple(x.shape), x.dtype
    return list(found.values())


def fused(module: GraphModule) -> GraphModule:
    """A copy of a graph after the fusions that run on what Inductor compiles."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = GraphModule(module, graph)
    with _as_on_hopper():
        post_grad_pass.fuse(copy.graph)
    return copy


def calls(module: GraphModule, op: str) -> int:
    return sum(str(node.target) == op for node in module.graph.nodes)


def per_token_and_layer(saved: list[Saved], batch: tuple[int, int], layers: int) -> float:
    return sum(nbytes for nbytes, _, _ in saved) / math.prod(batch) / layers
