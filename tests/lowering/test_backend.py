"""The torch.compile backend: the graphs it makes, their values, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import GraphModule

import fp8fn
from fp8fn.lowering.graph.nodes import source_of
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.recipe import BLOCKWISE, Recipe, parse_recipe
from fp8fn.site import Site
from support.accuracy import snr
from support.graphs import aot_into, readable, same_graphs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mlp(nn.Module):
    """Two layers with bias, as anybody writes them."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def graphs_of(model: nn.Module, x: Tensor, dynamic: bool) -> dict[str, str]:
    """The Dynamo graph after the rewrite, and the forward and backward graphs that AOTAutograd makes of it."""
    texts: dict[str, str] = {}
    aot = aot_into(texts)

    def backend(gm: GraphModule, inputs: list[Tensor]) -> Any:
        rewrite(gm, BLOCKWISE, "*")
        gm.recompile()
        texts["dynamo"] = readable(gm)
        return aot(gm, inputs)

    torch.compile(model, backend=backend, dynamic=dynamic)(x).sum().backward()
    return texts


@same_graphs
def test_dynamo_graph() -> None:
    texts = graphs_of(Mlp(), torch.randn(32, 128), dynamic=False)
    assert_expected_inline(
        texts["dynamo"],
        """\
transpose = transpose(l_self_modules_up_parameters_weight_, -2, -1)
gemm_default = gemm(l_x_, transpose, l_self_modules_up_parameters_bias_, blockwise, None)
relu = relu(gemm_default)
transpose_1 = transpose(l_self_modules_down_parameters_weight_, -2, -1)
gemm_default_1 = gemm(relu, transpose_1, l_self_modules_down_parameters_bias_, blockwise, None)""",
    )


@same_graphs
def test_forward_graph_static() -> None:
    texts = graphs_of(Mlp(), torch.randn(32, 128), dynamic=False)
    assert_expected_inline(
        texts["forward"],
        """\
transpose = transpose.int(primals_1, -2, -1)
quantize_dual = quantize_dual(primals_3)
quantize = quantize(transpose, [128, 128])
scaled_mm = scaled_mm(quantize_dual[0], quantize_dual[1], [1, 128], quantize[0], quantize[1], [128, 128], primals_2, torch.float32)
relu = relu(scaled_mm)
detach = detach(relu)
transpose_1 = transpose.int(primals_4, -2, -1)
quantize_dual_1 = quantize_dual(relu)
quantize_1 = quantize(transpose_1, [128, 128])
scaled_mm_1 = scaled_mm(quantize_dual_1[0], quantize_dual_1[1], [1, 128], quantize_1[0], quantize_1[1], [128, 128], primals_5, torch.float32)""",
    )


@same_graphs
@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_graph(dynamic: bool) -> None:
    texts = graphs_of(Mlp(), torch.randn(32, 128), dynamic=dynamic)
    assert_expected_inline(
        texts["backward"],
        """\
sum_1 = sum.dim_IntList(tangents_1, [0])
quantize_dual_2 = quantize_dual(tangents_1)
transpose_2 = transpose.int(getitem_10, -2, -1)
transpose_3 = transpose.int(getitem_11, -2, -1)
scaled_mm_2 = scaled_mm(quantize_dual_2[0], quantize_dual_2[1], [1, 128], transpose_2, transpose_3, [128, 128], None, torch.float32)
transpose_4 = transpose.int(quantize_dual_2[2], -2, -1)
transpose_5 = transpose.int(quantize_dual_2[3], -2, -1)
scaled_mm_3 = scaled_mm(transpose_4, transpose_5, [1, 128], getitem_8, getitem_9, [128, 1], None, torch.float32)
transpose_6 = transpose.int(scaled_mm_3, -2, -1)
transpose_7 = transpose.int(transpose_6, -2, -1)
detach_1 = detach(detach)
threshold_backward = threshold_backward(scaled_mm_2, detach_1, 0)
sum_2 = sum.dim_IntList(threshold_backward, [0])
quantize_2 = quantize(threshold_backward, [128, 1])
transpose_8 = transpose.int(quantize_2[0], -2, -1)
transpose_9 = transpose.int(quantize_2[1], -2, -1)
scaled_mm_4 = scaled_mm(transpose_8, transpose_9, [1, 128], getitem_2, getitem_3, [128, 1], None, torch.float32)
transpose_10 = transpose.int(scaled_mm_4, -2, -1)
transpose_11 = transpose.int(transpose_10, -2, -1)""",
    )


@same_graphs
def test_forward_graph_dynamic() -> None:
    texts = graphs_of(Mlp(), torch.randn(32, 128), dynamic=True)
    assert_expected_inline(
        texts["forward"],
        """\
transpose = transpose.int(primals_1, -2, -1)
quantize_dual = quantize_dual(primals_4)
quantize = quantize(transpose, [128, 128])
scaled_mm = scaled_mm(quantize_dual[0], quantize_dual[1], [1, 128], quantize[0], quantize[1], [128, 128], primals_2, torch.float32)
relu = relu(scaled_mm)
detach = detach(relu)
transpose_1 = transpose.int(primals_5, -2, -1)
quantize_dual_1 = quantize_dual(relu)
quantize_1 = quantize(transpose_1, [128, 128])
scaled_mm_1 = scaled_mm(quantize_dual_1[0], quantize_dual_1[1], [1, 128], quantize_1[0], quantize_1[1], [128, 128], primals_6, torch.float32)""",
    )


class Spellings(nn.Module):
    """Every way to multiply by a parameter that the pass knows, and some that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.w = nn.Parameter(torch.randn(128, 128) / 11)
        self.experts = nn.Parameter(torch.randn(2, 128, 128) / 11)
        self.small = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y + x @ self.w
        y = y + x @ self.w.T
        y = y + torch.matmul(x, self.w.mT)
        y = y + x.matmul(self.w.t())
        y = y + torch.mm(x, self.w)
        y = y + torch.addmm(self.linear.bias, x, self.w)
        y = y + (self.w @ x.mT).mT
        y = y + torch.bmm(x.expand(2, -1, -1), self.experts).sum(0)
        y = y + torch.softmax(x @ x.mT / 128, -1) @ x
        return self.small(y)


def test_every_spelling_in_values() -> None:
    """Compiled and substituted, output and gradients are near those of the model as it is."""
    model, x = Spellings(), torch.randn(48, 128)
    weight = torch.randn(48, 64)
    expected = model(x)
    grads = torch.autograd.grad((expected * weight).sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True)
    out = compiled(x)
    found = torch.autograd.grad((out * weight).sum(), list(model.parameters()))
    assert snr(out, expected) > 25
    for grad, other in zip(grads, found, strict=True):
        assert snr(other, grad) > 25
        assert other.stride() == grad.stride()


def test_what_is_substituted() -> None:
    rows = fp8fn.explain(Spellings(), torch.randn(48, 128), where="*", show=False).rows
    assert [row.reason for row in rows] == [
        None, None, None, None, None, None, None, None, None,
        "no parameter: activation by activation", "no parameter: activation by activation",
        "small: N=64 is under 128",
    ]  # fmt: skip
    assert [row.weight for row in rows][:3] == ["linear.weight", "w", "w"]
    assert rows[8].shape == (48, 128, 128)


def test_compiled_equals_functional() -> None:
    """The backend adds nothing to `fp8fn.linear`: the same bits, but for sums over the batch, which Inductor orders."""
    model, x = Mlp(), torch.randn(40, 128)
    out = torch.compile(model, backend="fp8fn", options={"where": "*"})(x)
    out.square().sum().backward()
    hidden = torch.relu(fp8fn.linear(x, model.up.weight, model.up.bias, recipe="blockwise_square"))
    expected = fp8fn.linear(hidden, model.down.weight, model.down.bias, recipe="blockwise_square")
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        if parameter.ndim > 1:
            assert torch.equal(parameter.grad, grad)
        else:
            torch.testing.assert_close(parameter.grad, grad)


def test_no_recompilation_over_batch_sizes() -> None:
    """Ragged M needs no guard on its divisibility."""
    model = Mlp()
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, dynamic=True)
    with torch.no_grad():
        for rows in (130, 257, 64, 999):
            x = torch.randn(rows, 128)
            expected = fp8fn.linear(
                torch.relu(fp8fn.linear(x, model.up.weight, model.up.bias)), model.down.weight, model.down.bias
            )
            assert torch.equal(compiled(x), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_operands_of_two_types_are_pytorchs_error(types: tuple[torch.dtype, torch.dtype], fresh_dynamo: None) -> None:
    """As in eager mode, and not a product that nobody has asked for; under autocast they are multiplied in FP8."""
    layer = nn.Linear(256, 256, dtype=types[1])
    x = torch.randn(64, 256).to(types[0])
    compiled = torch.compile(layer, backend="fp8fn", options={"where": "*"})
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(x)
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(x)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        (row,) = fp8fn.explain(layer, x, show=False, where="*").rows
        assert row.reason is None
        assert snr(compiled(x), layer.float()(x.float())) > 25


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    """The output type is autocast's, wherever the region begins; the weights are quantized from float32."""
    model, x = Mlp(), torch.randn(32, 128)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    if inside:
        out = torch.compile(forward, backend="fp8fn", options={"where": "*"})(x)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.compile(model, backend="fp8fn", options={"where": "*"})(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.dtype == torch.float32
    assert snr(out, Mlp.forward(model, x)) > 22


def test_recipe_and_where() -> None:
    """The recipe reaches the op; patterns and predicates choose by the weight's name and the sizes."""

    def keys(recipe: Recipe, where: Any) -> list[str]:
        seen: list[str] = []

        def backend(gm: GraphModule, _: Any) -> Any:
            rewrite(gm, recipe, where)
            gm.recompile()
            seen.extend(node.args[3] for node in gm.graph.nodes if node.target is torch.ops.fp8fn.gemm.default)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(Mlp(), backend=backend)(torch.randn(32, 128))
        return seen

    custom = Recipe(weight_dtype=torch.float8_e5m2, scale="pow2")
    assert keys(custom, "*") == [custom.key, custom.key]
    assert parse_recipe(custom.key) == custom
    assert keys(BLOCKWISE, "up.*") == ["blockwise"]
    assert keys(BLOCKWISE, ["nothing", "*.weight"]) == ["blockwise", "blockwise"]
    sites: list[Site] = []
    assert keys(BLOCKWISE, lambda site: sites.append(site) or site.weight == "down.weight") == ["blockwise"]
    assert [(s.op, s.m, s.n, s.k, s.weight) for s in sites] == [
        ("linear", 32, 256, 128, "up.weight"), ("linear", 32, 128, 256, "down.weight"),
    ]  # fmt: skip


class Language(nn.Module):
    """Layers that FP8 is for, and those that it is known to hurt."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1024, 512)
        self.router = nn.Linear(512, 640)
        self.narrow, self.wide, self.lm_head = nn.Linear(512, 256), nn.Linear(512, 512), nn.Linear(512, 1024)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = self.embed_tokens(tokens)
        x = self.wide(x)
        return self.router(x), self.narrow(x), self.lm_head(x), F.linear(x, self.embed_tokens.weight)


def test_by_default_what_fp8_hurts_stays(fresh_dynamo: None) -> None:
    model, tokens = Language(), torch.randint(0, 1024, (2, 32))
    rows = {row.weight: row.reason for row in fp8fn.explain(model, tokens, show=False).rows}
    assert rows == {
        "wide.weight": None,
        "router.weight": "sensitive: router; where='*' takes it too",
        "narrow.weight": "small: N=256 is under 512; where='*' takes it too",
        "lm_head.weight": "sensitive: lm_head; where='*' takes it too",
        "embed_tokens.weight": "sensitive: embed_tokens; where='*' takes it too",
    }
    assert all(row.reason is None for row in fp8fn.explain(model, tokens, where="*", show=False).rows)


def test_options_reach_inductor() -> None:
    options = {"recipe": "rowwise", "max_autotune": False}
    out = torch.compile(Mlp(), backend="fp8fn", options=options)(torch.randn(32, 128))
    assert out.shape == (32, 128)
    with pytest.raises(Exception, match=r"options\['speed'\] is neither an option of fp8fn"):
        torch.compile(Mlp(), backend="fp8fn", options={"speed": 11})(torch.randn(32, 128))
    with pytest.raises(Exception, match=r"recipe='blokwise' does not exist; did you mean 'blockwise'"):
        torch.compile(Mlp(), backend="fp8fn", options={"recipe": "blokwise"})(torch.randn(32, 128))


def test_compiled_keeps_fp8_for_the_backward() -> None:
    """AOTAutograd saves a layer's input in FP8, with no 16- or 32-bit copy."""
    model, x = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)), torch.randn(64, 256)
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"})
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(x)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    floats = [t for t in saved if t.data_ptr() not in parameters and t.element_size() > 1 and t.numel() >= 64 * 256]
    assert floats == []
    assert sum(t.numel() for t in saved if t.element_size() == 1 and t.shape[0] in (64, 256, 512)) > 0


def test_found_with_nothing_imported() -> None:
    """A fresh process that imports torch alone finds the backend by its name."""
    script = (
        "import torch, sys\n"
        "model = torch.nn.Linear(128, 128)\n"
        "assert 'fp8fn' in torch._dynamo.list_backends(exclude_tags=()) and 'fp8fn' not in sys.modules\n"
        "x = torch.randn(16, 128)\n"
        "y = torch.compile(model, backend='fp8fn', options={'where': '*'})(x)\n"
        "error = (y - model(x)).norm() / model(x).norm()\n"
        "assert 0.001 < error < 0.06, error\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_explain_leaves_the_model_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explanation = fp8fn.explain(model, torch.randn(32, 128, generator=torch.Generator().manual_seed(0)), where="*")
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert capsys.readouterr().out == f"{explanation}\n"
    assert "1 of 1 products in FP8, recipe blockwise_square, 1 graph(s)" in str(explanation)
    assert explanation.rows[0].kernel == "reference (plain PyTorch)"


def test_explain_names_line_and_reason() -> None:
    def double(x: Tensor, w: nn.Parameter) -> Tensor:
        return F.linear(x.double(), w.double())

    explanation = fp8fn.explain(
        double, torch.randn(32, 128), nn.Parameter(torch.randn(128, 128)), where="*", show=False
    )
    (row,) = explanation.rows
    assert row.source.startswith("test_backend.py:")
    assert row.reason == "float64 operands; FP8 takes bfloat16, float16 and float32"


def test_a_cell_of_a_notebook_has_no_number_for_a_name() -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = 'File "/tmp/ipykernel_7/1432963372.py", line 21, in forward'
    assert source_of(node) == "cell:21"
