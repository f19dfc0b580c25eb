"""Products of groups under the backend: the graphs of each spelling, values, what is left alone, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import fp8fn
from fp8fn.lowering import joint_pass
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.recipe import BLOCKWISE
from fp8fn.site import Site, takes_everything
from support.accuracy import snr
from support.graphs import aot_into, readable, same_graphs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# An expert without tokens, and rows past the last group.
ENDS = (48, 48, 208)
ROWS, K, N, EXPERTS = 224, 128, 256, len(ENDS)


def offsets() -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


class Rows(nn.Module):
    """Rows by experts, by one of the names that PyTorch has for it."""

    def __init__(self, call: Callable[..., Tensor] = torch._grouped_mm) -> None:
        super().__init__()
        self.call, self.experts = call, nn.Parameter(randn(EXPERTS, K, N) / 11)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.call(x, self.experts, offs=offs)


class Summed(nn.Module):
    """A product for each part of K."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x.mT, torch.relu(x), offs=offs)


class Batched(nn.Module):
    """As many rows for each expert, with no offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(randn(EXPERTS, N, K) / 11)

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.experts.mT)


def graphs_of(model: nn.Module, *inputs: Tensor) -> dict[str, str]:
    """The Dynamo graph before and after the rewrite, and what AOTAutograd makes of it, forward and backward."""
    texts: dict[str, str] = {}
    aot = aot_into(texts, kwargs=True)

    def backend(gm: GraphModule, inputs: list[Tensor]) -> Any:
        texts["before"] = readable(gm, kwargs=True)
        rewrite(gm, BLOCKWISE, "*")
        texts["after"] = readable(gm, kwargs=True)
        return aot(gm, inputs)

    out = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (out * torch.ones_like(out)).sum().backward()
    return texts


@same_graphs
def test_graphs_of_rows() -> None:
    texts = graphs_of(Rows(), randn(ROWS, K).requires_grad_(), offsets())
    assert_expected_inline(
        texts["before"], """_grouped_mm = _grouped_mm(l_x_, l_self_parameters_experts_, offs=l_offs_)"""
    )
    assert_expected_inline(
        texts["after"],
        """grouped_gemm_default = grouped_gemm(l_x_, l_self_parameters_experts_, l_offs_, None, blockwise, torch.bfloat16)""",
    )
    assert_expected_inline(
        texts["forward"],
        """\
quantize_grouped_dual = quantize_grouped_dual(primals_2, primals_3)
quantize = quantize(primals_1, [128, 128])
scaled_grouped_mm = scaled_grouped_mm(quantize_grouped_dual[0], quantize_grouped_dual[1], [1, 128], quantize[0], quantize[1], [128, 128], primals_3, None, torch.bfloat16)""",
    )
    assert_expected_inline(
        texts["backward"],
        """\
quantize_grouped_dual_1 = quantize_grouped_dual(tangents_1, primals_3)
transpose = transpose.int(getitem_4, -2, -1)
transpose_1 = transpose.int(getitem_5, -2, -1)
scaled_grouped_mm_1 = scaled_grouped_mm(quantize_grouped_dual_1[0], quantize_grouped_dual_1[1], [1, 128], transpose, transpose_1, [128, 128], primals_3, None, torch.bfloat16)
transpose_2 = transpose.int(getitem_2, -2, -1)
transpose_3 = transpose.int(getitem_3, -2, -1)
scaled_grouped_mm_2 = scaled_grouped_mm(transpose_2, transpose_3, [1, 128], quantize_grouped_dual_1[2], quantize_grouped_dual_1[3], [128, 1], primals_3, None, torch.bfloat16)""",
    )


@same_graphs
def test_graphs_of_parts_of_k() -> None:
    texts = graphs_of(Summed(), randn(ROWS, K).requires_grad_(), offsets())
    assert_expected_inline(
        texts["before"],
        """\
getattr_1 = getattr(l_x_, mT)
relu = relu(l_x_)
_grouped_mm = _grouped_mm(getattr_1, relu, offs=l_offs_)""",
    )
    assert_expected_inline(
        texts["after"],
        """\
getattr_1 = getattr(l_x_, mT)
relu = relu(l_x_)
grouped_gemm_default = grouped_gemm(getattr_1, relu, l_offs_, None, blockwise, torch.bfloat16)""",
    )
    assert_expected_inline(
        texts["forward"],
        """\
transpose = transpose.int(primals_1, -2, -1)
relu = relu(primals_1)
detach = detach(relu)
transpose_1 = transpose.int(transpose, -2, -1)
quantize_grouped_dual = quantize_grouped_dual(transpose_1, primals_2)
quantize_grouped_dual_1 = quantize_grouped_dual(relu, primals_2)
transpose_2 = transpose.int(quantize_grouped_dual[2], -2, -1)
transpose_3 = transpose.int(quantize_grouped_dual[3], -2, -1)
scaled_grouped_mm = scaled_grouped_mm(transpose_2, transpose_3, [1, 128], quantize_grouped_dual_1[2], quantize_grouped_dual_1[3], [128, 1], primals_2, None, torch.bfloat16)""",
    )
    assert_expected_inline(
        texts["backward"],
        """\
quantize_dual = quantize_dual(tangents_1)
transpose_4 = transpose.int(quantize_dual[0], -2, -1)
transpose_5 = transpose.int(quantize_dual[1], -2, -1)
scaled_grouped_mm_1 = scaled_grouped_mm(getitem_4, getitem_5, [1, 128], transpose_4, transpose_5, [128, 1], primals_2, None, torch.bfloat16)
transpose_6 = transpose.int(scaled_grouped_mm_1, -2, -1)
scaled_grouped_mm_2 = scaled_grouped_mm(getitem, getitem_1, [1, 128], quantize_dual[2], quantize_dual[3], [128, 1], primals_2, None, torch.bfloat16)
detach_1 = detach(detach)
threshold_backward = threshold_backward(scaled_grouped_mm_2, detach_1, 0)
transpose_7 = transpose.int(transpose_6, -2, -1)
add = add.Tensor(threshold_backward, transpose_7)""",
    )


@same_graphs
def test_graphs_of_a_batch() -> None:
    texts = graphs_of(Batched(), randn(EXPERTS, 32, K).requires_grad_())
    assert_expected_inline(
        texts["before"],
        """\
getattr_1 = getattr(l_self_parameters_experts_, mT)
_grouped_mm = _grouped_mm(l_x_, getattr_1)""",
    )
    assert_expected_inline(
        texts["after"],
        """\
getattr_1 = getattr(l_self_parameters_experts_, mT)
grouped_gemm_default = grouped_gemm(l_x_, getattr_1, None, None, blockwise, torch.bfloat16)""",
    )
    assert_expected_inline(
        texts["forward"],
        """\
transpose = transpose.int(primals_1, -2, -1)
expand = expand(primals_2, [3, 32, 128])
expand_1 = expand(transpose, [3, 128, 256])
quantize_dual = quantize_dual(expand)
quantize = quantize(expand_1, [128, 128])
scaled_mm = scaled_mm(quantize_dual[0], quantize_dual[1], [1, 128], quantize[0], quantize[1], [128, 128], None, torch.bfloat16)
view = view(scaled_mm, [3, 32, 256])""",
    )
    assert_expected_inline(
        texts["backward"],
        """\
view_1 = view(tangents_1, [3, 32, 256])
quantize_dual_1 = quantize_dual(view_1)
transpose_1 = transpose.int(getitem_4, -2, -1)
transpose_2 = transpose.int(getitem_5, -2, -1)
scaled_mm_1 = scaled_mm(quantize_dual_1[0], quantize_dual_1[1], [1, 128], transpose_1, transpose_2, [128, 128], None, torch.bfloat16)
transpose_3 = transpose.int(quantize_dual_1[2], -2, -1)
transpose_4 = transpose.int(quantize_dual_1[3], -2, -1)
scaled_mm_2 = scaled_mm(transpose_3, transpose_4, [1, 128], getitem_2, getitem_3, [128, 1], None, torch.bfloat16)
transpose_5 = transpose.int(scaled_mm_2, -2, -1)
transpose_6 = transpose.int(transpose_5, -2, -1)""",
    )


SPELLINGS = {
    "torch": torch._grouped_mm,
    "functional": F.grouped_mm,
    "aten": torch.ops.aten._grouped_mm,
    "overload": torch.ops.aten._grouped_mm.default,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_name_in_values(spelling: str) -> None:
    """The same bits as `fp8fn.grouped_gemm`, out and gradients, near those of the product itself."""
    model, x = Rows(SPELLINGS[spelling]), randn(ROWS, K).requires_grad_()
    weight = randn(ROWS, N)
    weight[ENDS[-1] :] = 0  # rows that PyTorch leaves unwritten
    inputs = (x, model.experts)
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True)
    out = compiled(x, offsets())
    found = torch.autograd.grad((out * weight).sum(), inputs)
    same = fp8fn.grouped_gemm(x, model.experts, offsets(), recipe="blockwise_square")
    expected = model(x, offsets())
    assert torch.equal(out, same)
    assert snr(out[: ENDS[-1]], expected[: ENDS[-1]]) > 25
    near = torch.autograd.grad((expected[: ENDS[-1]] * weight[: ENDS[-1]]).sum(), inputs)
    for grad, other, ours in zip(near, found, torch.autograd.grad((same * weight).sum(), inputs), strict=True):
        assert torch.equal(other, ours)
        assert other.stride() == grad.stride()
        assert snr(other[: ENDS[-1]], grad[: ENDS[-1]]) > 25


def test_parts_of_k_and_batches_in_values() -> None:
    for model, inputs in ((Summed(), (randn(ROWS, K), offsets())), (Batched(), (randn(EXPERTS, 32, K),))):
        inputs[0].requires_grad_()
        parameters = (inputs[0], *model.parameters())
        out = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True)(*inputs)
        expected = model(*inputs)
        weight = torch.randn_like(expected)
        grads, others = (torch.autograd.grad((y * weight).sum(), parameters) for y in (expected, out))
        assert snr(out, expected) > 25
        for grad, other in zip(grads, others, strict=True):
            used = slice(ENDS[-1]) if isinstance(model, Summed) else slice(None)
            assert snr(other[used], grad[used]) > 25


def test_it_does_not_follow_autocast() -> None:
    """As PyTorch's own product of groups: its output has its operands' type."""
    model = Rows()
    with torch.autocast("cpu", torch.float16):
        out = torch.compile(model, backend="fp8fn", options={"where": "*"})(randn(ROWS, K), offsets())
    assert out.dtype == torch.bfloat16


def test_one_compile_serves_every_count_of_tokens() -> None:
    model = Rows()
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for rows in (224, 1000, 17, 384):
            x, ends = randn(rows, K), torch.tensor([rows // 3, rows // 2, rows], dtype=torch.int32)
            assert torch.equal(compiled(x, ends), fp8fn.grouped_gemm(x, model.experts, ends))


class Layer(nn.Module):
    """The products of a mixture of experts: a router, wide and narrow experts, some of them stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(randn(EXPERTS, 512, 512))
        self.wide, self.narrow = nn.Parameter(randn(EXPERTS, 512, 640)), nn.Parameter(randn(EXPERTS, 512, 256))
        self.each = nn.ParameterList(randn(512, 512) for _ in range(EXPERTS))

    def forward(self, x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
        stacked = torch.stack(list(self.each)).mT
        return tuple(torch._grouped_mm(x, w, offs=offs) for w in (self.router, self.wide, self.narrow, stacked))


def test_what_is_left_out_by_default() -> None:
    model, x = Layer(), randn(ROWS, 512)
    rows = {row.weight: row.reason for row in fp8fn.explain(model, x, offsets(), show=False).rows}
    assert rows == {
        "router": "sensitive: router; where='*' takes it too",
        "wide": None,
        "narrow": "small: N=256 is under 512; where='*' takes it too",
        "each.0": None,
    }
    everything = fp8fn.explain(model, x, offsets(), where="*", show=False)
    assert everything.substituted == len(everything.rows) == 4
    chosen = fp8fn.explain(model, x, offsets(), where="each*", show=False)
    assert [row.weight for row in chosen.rows if row.reason is None] == ["each.0"]


def test_where_sees_the_groups() -> None:
    sites: list[Site] = []
    where = lambda site: bool(sites.append(site)) or site.groups == EXPERTS  # noqa: E731
    fp8fn.explain(Rows(), randn(ROWS, K), offsets(), where=where, show=False)
    fp8fn.explain(Summed(), randn(ROWS, K), offsets(), where=where, show=False)
    fp8fn.explain(Batched(), randn(EXPERTS, 32, K), where=where, show=False)
    assert [(s.op, s.m, s.n, s.k, s.groups, s.batch, s.weight) for s in sites] == [
        ("grouped_mm", ROWS, N, K, EXPERTS, 1, "experts"),
        ("grouped_mm", K, K, ROWS, EXPERTS, 1, ""),
        ("grouped_mm", 32, N, K, 0, EXPERTS, "experts"),
    ]


def test_the_text_of_explain() -> None:
    text = str(fp8fn.explain(Layer(), randn(ROWS, 512), offsets(), show=False))
    kernel, left = "reference (plain PyTorch)", "left alone: sensitive: router; where='*' takes it too"
    head, _, *lines = text.splitlines()
    assert head.split()[:4] == ["weight,", "or", "node", "(E,)M,N,K"]
    assert [line.split()[1:3] if line[1] == "x" else line for line in lines[:7]] == [
        left, ["router", "3,224,512,512"],
        kernel, ["wide", "3,224,640,512"], ["each.0", "3,224,512,512"],
        lines[5], ["narrow", "3,224,256,512"],
    ]  # fmt: skip
    assert lines[5].startswith("left alone: small: ")
    assert all(line.split()[3].startswith("test_grouped_lowering.py:") for line in lines[:7] if line[1] == "x")
    assert lines[7:9] == [
        "2 of 4 products in FP8, recipe blockwise_square, 1 graph(s)",
        "60.0 % of the operations of all products are in FP8",
    ]


def test_the_kernel_of_a_target() -> None:
    """By the launch of the groups' own kernel; its time depends on the groups, so there is no estimate."""
    for model, kind in ((Rows(), "JAGGED_M"), (Summed(), "JAGGED_K")):
        (row,) = fp8fn.explain(model, randn(ROWS, K), offsets(), where="*", target="sm90", show=False).rows
        assert row.estimated is None
        assert row.kernel is not None
        assert "sm90" in row.kernel
        assert kind in row.kernel or "no CUDA C++" in row.kernel


def columns(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(w.mT, x.mT, offs=offs)


@pytest.mark.parametrize(
    ("function", "recipe", "reason"),
    [
        (columns, "blockwise", "groups of columns: pass b.mT and a.mT for out.mT, whose groups are rows"),
        (Rows.forward, "tensorwise", "grouped_gemm: the recipe's activation_block=(-1, -1) does not fit groups"),
        (Rows.forward, "rowwise", None),
        (Rows.forward, "hybrid", None),
        (Rows.forward, "mxfp8", None),
    ],
)
def test_why_one_is_left_alone(function: Any, recipe: str, reason: str | None) -> None:
    model = Rows()
    args = (randn(ROWS, K), model.experts, offsets()) if function is columns else (randn(ROWS, K), offsets())
    called = function if function is columns else model
    (row,) = fp8fn.explain(called, *args, recipe=recipe, where="*", show=False).rows
    assert (row.reason or "").startswith(reason or "")
    assert (row.reason is None) == (reason is None)
    options = {"recipe": recipe, "where": "*"}
    if reason is None:
        out = torch.compile(called, backend="fp8fn", options=options, fullgraph=True)(*args)
        assert snr(out[: ENDS[-1]], called(*args)[: ENDS[-1]]) > 25


class Choosing(nn.Module):
    """Experts by loops and by gathered weights; of stacked weights, and of modules."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.Parameter(torch.randn(EXPERTS, N, K) / 11)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.how == "gather":
            return torch.bmm(self.up[chosen], x[..., None])[..., 0]
        if self.how == "all":
            return sum((chosen == i)[:, None] * (x @ w.T) for i, w in enumerate(self.up))
        out = x.new_zeros(x.shape[0], N)
        for i in range(EXPERTS):
            rows = torch.where(chosen == i)[0]
            out = out.index_add(0, rows, F.linear(x[rows], self.up[i]))
        return out


def choices() -> tuple[Tensor, Tensor]:
    return torch.randn(64, K), torch.arange(64) % EXPERTS


def test_a_loop_over_all_tokens() -> None:
    """`w[i]`, and a loop over `w`, are a weight."""
    model = Choosing("all")
    rows = fp8fn.explain(model, *choices(), where="*", show=False).rows
    assert [(row.weight, row.shape, row.reason) for row in rows] == [("up", (64, N, K), None)] * EXPERTS
    out = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True)(*choices_of(0))
    assert snr(out, model(*choices_of(0))) > 25


def choices_of(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return choices()


def test_a_loop_over_chosen_tokens() -> None:
    """If Dynamo captures it, each expert's product has a size that depends on data; else no graph has the weight."""
    model, args = Choosing("loop"), choices_of(0)
    explanation = fp8fn.explain(model, *args, where="*", show=False)
    assert explanation.rows == ()
    ((weight, reason),) = explanation.outside
    assert weight == "up"
    assert reason.endswith("torch._dynamo.config.capture_dynamic_output_shape_ops = True")
    assert f" 1x up: {reason}" in " ".join(str(explanation).split())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explanation = fp8fn.explain(model, *args, where="*", show=False)
        assert [row.reason for row in explanation.rows] == [None] * EXPERTS
        assert explanation.outside == ()
        out = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True)(*args)
    expected = model(*args)
    assert snr(out, expected) > 25
    grads = [torch.autograd.grad(y.square().sum(), model.up)[0] for y in (expected, out)]
    expected, found = grads
    assert snr(found, expected) > 20


def test_gathered_weights_are_left_alone_with_a_reason() -> None:
    (row,) = fp8fn.explain(Choosing("gather"), *choices(), where="*", show=False).rows
    assert (row.weight, row.kernel) == ("up", None)
    assert row.reason is not None
    assert row.reason.startswith("its weights are gathered, one matrix for each row: sort the rows by expert and call")


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_export_of_a_grouped_gemm(recipe: str) -> None:
    """With a dynamic count of tokens, and the program's own graph compiled."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(randn(EXPERTS, K, N) / 11)

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return fp8fn.grouped_gemm(x, self.experts, offs, recipe=recipe)

    model = Model().eval()
    inputs = (randn(ROWS, K), offsets())
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=({0: torch.export.Dim.AUTO}, None))
        module = program.module()
        for rows in (ROWS, 500):
            x = randn(rows, K)
            assert torch.equal(module(x, offsets()), model(x, offsets()))
        assert torch.equal(torch.compile(module, backend="fp8fn")(*inputs), model(*inputs))


def test_an_exported_product_of_groups() -> None:
    """PyTorch's own product, exported by `torch.export`, is substituted when it is compiled."""
    model, inputs = Rows().eval(), (randn(ROWS, K), offsets())
    with torch.no_grad():
        module = torch.export.export(model, inputs).module()
        out = torch.compile(module, backend="fp8fn", options={"where": "*"}, fullgraph=True)(*inputs)
    assert torch.equal(out, fp8fn.grouped_gemm(inputs[0], model.experts, inputs[1]))


def quantized(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`x` in e4m3 by rows or columns, and the scales with no dimension of one."""
    scale = x.abs().amax(dim, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)


def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b.mT, a_scale, b_scale, offs=offs, out_dtype=torch.bfloat16)


def scaled_operands() -> tuple[Tensor, ...]:
    (a, a_scale), (b, b_scale) = quantized(randn(ROWS, K), 1), quantized(randn(EXPERTS, N, K), 2)
    return a, b, a_scale, b_scale, offsets()


def test_a_scaled_product_of_rows() -> None:
    a, b, a_scale, b_scale, offs = args = scaled_operands()
    with joint_pass.recorded() as record, torch._inductor.config.patch(fx_graph_cache=False):
        out = torch.compile(scaled, backend="fp8fn", fullgraph=True)(*args)
    assert [(found.made, found.reason) for found in record] == [("fp8fn.scaled_grouped_mm.default", None)]
    experts = (b.float() * b_scale[..., None]).mT
    expected = torch._grouped_mm(a.float() * a_scale[:, None], experts, offs=offs)[: ENDS[-1]]
    assert snr(out[: ENDS[-1]], expected) > 50
    (row,) = fp8fn.explain(scaled, *args, show=False).rows
    assert (row.kernel, row.shape) == ("fp8fn::scaled_grouped_mm", (ROWS, N, K))


def test_a_scaled_product_of_parts_of_k() -> None:
    """Each row has a scale for each group, those of a group together."""
    ends = (0, *ENDS)
    parts = [[randn(rows, ends[g + 1] - ends[g]) for rows in (K, N)] for g in (0, 2)]
    sides = []
    for side in (0, 1):
        made = [quantized(part[side], 1) for part in parts]
        data = torch.cat([q.view(torch.uint8) for q, _ in made], 1).view(torch.float8_e4m3fn)
        sides.append((data, torch.cat([made[0][1], torch.ones_like(made[0][1]), made[1][1]])))
    (a, a_scale), (b, b_scale) = sides
    out = torch.compile(scaled, backend="fp8fn", fullgraph=True)(a, b, a_scale, b_scale, offsets())
    assert out.shape == (EXPERTS, K, N)
    assert out[1].abs().sum() == 0
    for g, (left, right) in zip((0, 2), parts, strict=True):
        assert snr(out[g], left.float() @ right.float().mT) > 25


def test_a_scaled_product_on_a_gpu_is_left_alone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a CPU that passes for one."""
    from fp8fn.lowering.patterns import scaled_grouped_mm

    target = fp8fn.ops.targets.Target("cuda", 90, 32, 132)
    monkeypatch.setattr(scaled_grouped_mm.targets, "target_of", lambda device: target)
    graph: list[Any] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graph.append(gm.graph)
        return make_boxed_func(gm.forward)

    with pytest.raises(NotImplementedError):  # PyTorch has none for a CPU
        torch.compile(scaled, backend=aot_autograd(fw_compiler=keep))(*scaled_operands())
    (found,) = scaled_grouped_mm.substitute(graph[0])
    assert found.reason == "by rows PyTorch's product of groups is not measured to be slower; where='*' takes it"
    (found,) = scaled_grouped_mm.substitute(graph[0], everything=True)
    assert (found.made, found.reason) == ("fp8fn.scaled_grouped_mm.default", None)


def test_the_pass_knows_what_where_takes() -> None:
    assert [takes_everything(where) for where in ("*", ["a.*", "*"], "a.*", None, lambda site: True)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    patches = joint_pass.with_pass({}, everything=True)
    own = patches["joint_custom_pre_pass"]
    assert own.uuid() != joint_pass.SubstitutionPass().uuid()
    assert joint_pass.with_pass(patches, everything=True) is patches
    assert joint_pass.with_pass(patches)["joint_custom_pre_pass"].uuid() == joint_pass.SubstitutionPass().uuid()
