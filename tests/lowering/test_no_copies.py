"""No FP8 data is copied between a quantizer and a product, on Hopper, whose matrix instructions read K-major operands.

The models run on the CPU, while every decision is the one for an sm90.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import fp8fn
from fp8fn.lowering.graph.nodes import arguments_of
from fp8fn.ops import gemm as gemm_op
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.recipe import PRESETS
from fp8fn.ops.scaled_mm import SCALED_MM, along_k
from support.models import SIZES, VOCABULARY, all_but_logits

FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
aten = torch.ops.aten
VIEWS: Final = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.detach.default, aten.alias.default,
}  # fmt: skip
SCALED_PRODUCTS: Final = [name for name in PRESETS if name != "mxfp8"]


@pytest.fixture(autouse=True)
def sm90(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM90)


def assert_takes_as_they_lie(given: dict[str, Any]) -> None:
    """Hopper's kernel multiplies the operands of `fp8fn::scaled_mm` without a copy."""
    given = pytree.tree_map_only(Tensor, on_meta, given)
    tensors = tuple(given[name] for name in SCALED_MM.inputs)
    product = SCALED_MM.operands(tensors, (tuple(given["a_block"]), tuple(given["b_block"]), given["out_dtype"]))
    assert along_k(product) is None, {name: x.stride() for name, x in given.items() if isinstance(x, Tensor)}
    assert cuda.accepts(product) is None


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class Watch(TorchDispatchMode):
    """Checks the operands of every product; `copies` are ATen's ops that write FP8 data."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.fp8fn.scaled_mm.default:
            names = [argument.name for argument in func._schema.arguments]
            assert_takes_as_they_lie(dict.fromkeys(names) | dict(zip(names, args, strict=False)))
            self.products += 1
        elif func.namespace != "fp8fn" and func not in VIEWS and any(x.dtype in FP8 for x in tensors_in(out)):
            self.copies.append(str(func))
        return out


def tensors_in(out: Any) -> Iterator[Tensor]:
    return (x for x in pytree.tree_leaves(out) if isinstance(x, Tensor))


@pytest.mark.parametrize("recipe", SCALED_PRODUCTS)
@pytest.mark.parametrize(("shape", "n"), [((256, 384), 128), ((2, 77, 141), 99)], ids=["even", "ragged"])
def test_eager_linear(recipe: str, shape: Sequence[int], n: int) -> None:
    weight = nn.Parameter(torch.randn(n, shape[-1], dtype=torch.bfloat16))
    bias = nn.Parameter(torch.randn(n, dtype=torch.bfloat16))
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with Watch() as watch:
        fp8fn.linear(x, weight, bias, recipe=recipe).sum().backward()
    assert (watch.products, watch.copies) == (3, [])


@pytest.mark.parametrize("recipe", SCALED_PRODUCTS)
@pytest.mark.parametrize("wanted", ["input", "weight", "none"])
def test_eager_linear_of_which_a_gradient_is_left_out(recipe: str, wanted: str) -> None:
    weight = torch.randn(96, 160, dtype=torch.bfloat16, requires_grad=wanted == "weight")
    x = torch.randn(80, 160, dtype=torch.bfloat16, requires_grad=wanted == "input")
    with Watch() as watch:
        out = fp8fn.linear(x, weight, recipe=recipe)
        if wanted != "none":
            out.backward(torch.randn(80, 96, dtype=torch.bfloat16))
    assert (watch.products, watch.copies) == (1 + (wanted != "none"), [])


@pytest.mark.parametrize("recipe", SCALED_PRODUCTS)
@pytest.mark.parametrize("columns", [(True, True), (True, False), (False, False)], ids=str)
def test_eager_product_of_matrices_that_lie_either_way(recipe: str, columns: tuple[bool, bool]) -> None:
    """Also of an `a` whose columns are contiguous, and of a `b` whose rows are."""
    a, b = (torch.randn(128, 128, dtype=torch.bfloat16) for _ in range(2))
    a, b = (x.mT if turned else x for x, turned in zip((a, b), columns, strict=True))
    with Watch() as watch:
        fp8fn.gemm(a.requires_grad_(), b.requires_grad_(), recipe=recipe).sum().backward()
    assert (watch.products, watch.copies) == (3, [])


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).bfloat16()  # type: ignore[no-any-return]


def graphs_of(step: Callable[[], None]) -> list[Graph]:
    """The forward's and the backward's graph as Inductor lowers them; they run without Inductor's code."""
    found: list[Graph] = []

    def inner(gm: GraphModule, inputs: Any, **_: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # as Inductor does before its passes
        torch._inductor.config.post_grad_custom_pre_pass(gm.graph)  # type: ignore[misc]
        gm.recompile()
        found.append(gm.graph)

        def run(args: list[Any]) -> Any:
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with pytest.MonkeyPatch.context() as patch, torch._functorch.config.patch(enable_autograd_cache=False):
        patch.setattr(compile_fx, "compile_fx_inner", inner)  # which fp8fn's backend calls
        step()
    return found


def writers_of_fp8(graph: Graph) -> list[str]:
    """The nodes that make FP8 data and are neither ops of fp8fn nor views."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target in VIEWS or "getitem" in node.name:
            continue
        outs = tensors_in(node.meta["val"])
        if getattr(node.target, "namespace", "") != "fp8fn" and any(x.dtype in FP8 for x in outs):
            found.append(f"{node} = {node.target}")
    return found


def products_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is torch.ops.fp8fn.scaled_mm.default]


# transformers asks for PyTorch's version in a cached function, which Dynamo traces through.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("recipe", SCALED_PRODUCTS)
def test_compiled_llama(recipe: str) -> None:
    model, ids = llama(), torch.randint(VOCABULARY, (2, 64))
    compiled = torch.compile(model, backend="fp8fn", options={"recipe": recipe, "where": all_but_logits})
    graphs = graphs_of(lambda: compiled(ids).logits.float().square().mean().backward())
    assert [len(products_of(graph)) for graph in graphs] == [7, 14]
    for graph in graphs:
        assert writers_of_fp8(graph) == []
        for node in products_of(graph):
            assert_takes_as_they_lie(
                {name: arg.meta["val"] if isinstance(arg, Node) else arg for name, arg in arguments_of(node).items()}
            )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_inductors_code_writes_no_fp8(recipe: str) -> None:
    """Buffers of FP8 are the results of fp8fn's quantizers only."""
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128)).bfloat16()
    x = torch.randn(48, 256, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="fp8fn", options={"recipe": recipe, "where": "*"})
    with fresh_cache():
        _, codes = run_and_get_code(lambda: compiled(x).float().sum().backward())
    products = [line for code in codes for line in code.splitlines() if "= torch.ops.fp8fn.scaled_mm.default(" in line]
    assert len(products) == 5
    assert not [line for code in codes for line in code.splitlines() if re.search(r"empty_strided.*float8", line)]


def test_copies_are_found() -> None:
    """Operands that a caller quantized along the other axis."""
    a = torch.ops.fp8fn.quantize(torch.randn(64, 64).mT, (-1, -1))
    with Watch() as watch:
        a[0].clone()
        with pytest.raises(AssertionError, match="a_scale"):
            torch.ops.fp8fn.scaled_mm(*a, (-1, -1), *a, (-1, -1))
    assert watch.copies == ["aten.clone.default"]
    assert gemm_op.quantize(torch.randn(64, 64).mT, (-1, -1), None, "fp32").data.stride() == (64, 1)
