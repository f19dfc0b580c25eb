"""Quantizers that take in what produces their input: the graphs, the numbers of kernels, the values, and what stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule, Node

import fp8fn
from fp8fn.lowering import joint_pass, post_grad_pass
from fp8fn.lowering.graph.quantizers import computed, find_quantizers, reshaped_of
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.layout import Block as ScaleBlock
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.targets import GFX942, SM89, SM90, Target
from support.accuracy import snr

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BF16, FP32 = torch.bfloat16, torch.float32
M, N, WIDTH = 64, 256, 128
EPS = 1e-5


exact_on_gpus = torch.__version__ >= "2.13"
INEXACT = "before PyTorch 2.13 Inductor divides approximately on a GPU, and no quantizer is inlined there"
on_gpus = pytest.mark.skipif(not exact_on_gpus, reason=INEXACT)


class Norm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return by_transformers(x, self.weight)


class Block(nn.Module):
    """A norm before three projections, then one before a gated MLP."""

    def __init__(self, norm: Callable[..., nn.Module] = Norm) -> None:
        super().__init__()
        self.norm, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, N, bias=False) for _ in range(2))
        self.down = nn.Linear(N, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.q(y) * torch.tanh(self.k(y)) + self.v(y)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def uncompiled() -> Iterator[list[Graph]]:
    """Inductor's graphs, forward and backward, run as they are after the passes: its C++ would take minutes."""
    original, found = compile_fx.compile_fx, list[Graph]()

    def run(gm: GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # as Inductor does before its passes
        if torch._inductor.config.post_grad_custom_pre_pass is not None:
            torch._inductor.config.post_grad_custom_pre_pass(gm.graph)
        gm.recompile()
        found.append(gm.graph)
        return make_boxed_func(gm.forward)  # type: ignore[no-any-return]

    def compile_without_code(gm: GraphModule, inputs: Any, inner_compile: Any = run, **options: Any) -> Any:
        return original(gm, inputs, inner_compile, **options)

    with pytest.MonkeyPatch.context() as patch, torch._functorch.config.patch(enable_autograd_cache=False):
        patch.setattr(compile_fx, "compile_fx", compile_without_code)
        patch.setattr(compile_fx, "compile_fx_inner", run)  # which fp8fn's backend calls
        yield found


def fp8(function: Callable[..., Any], fuse: bool | None = None, **options: Any) -> Callable[..., Any]:
    dynamic = options.pop("dynamic", None)
    settings = {"where": "*", "fuse_quantize": fuse, **options}
    return torch.compile(function, backend="fp8fn", fullgraph=True, dynamic=dynamic, options=settings)


def materialised(graph: Graph) -> int:
    """Tensors of 16 bits that a kernel of Inductor writes, and a quantizer reads."""
    return len({source for q in find_quantizers(graph) if computed(source := reshaped_of(q.x))})


def calls(graph: Graph) -> list[str]:
    """The ops of fp8fn in a graph, weights' quantizers left out."""
    names = []
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and name.startswith("fp8fn.") and not of_weight(node):
            names.append(name.removeprefix("fp8fn.").removesuffix(".default"))
    return names


def of_weight(node: Node) -> bool:
    return node.target is torch.ops.fp8fn.quantize.default and node.args[1][0] != 1  # type: ignore[index]


def own_silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transformers": lambda gate, up: F.silu(gate) * up,
    "the other way round": lambda gate, up: up * F.silu(gate),
    "x * sigmoid(x)": lambda gate, up: own_silu(gate) * up,
    "in float32": lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype),
    "float32 SiLU": lambda gate, up: F.silu(gate.float()).to(gate.dtype) * up,
    "three dimensions": lambda gate, up: F.silu(gate.view(2, -1, N)) * up.view(2, -1, N),
}


@pytest.mark.parametrize("spelling", GATED)
def test_silu_mul_in_every_spelling(spelling: str) -> None:
    """The bits of the op, which computes in float32."""
    down, gate, up = random(WIDTH, N), random(M, N), random(M, N, seed=1)

    def mlp(gate: Tensor, up: Tensor) -> Tensor:
        return F.linear(GATED[spelling](gate, up), nn.Parameter(down))

    with torch.no_grad(), uncompiled() as graphs, post_grad_pass.recorded() as record:
        out = fp8(mlp)(gate, up)
    assert [made.made for made in record] == ["fp8fn.quantize_silu_mul.default"]
    assert (record[0].shape, record[0].reason) == ((M, 0, N), None)
    assert record[0].source.startswith("test_pattern_producers.py:")
    assert calls(graphs[0]) == ["quantize_silu_mul", "scaled_mm"]
    expected = fp8fn.gemm(fp8fn.quantize_silu_mul(gate, up), fp8fn.quantize(down.mT, (128, 128)))
    assert torch.equal(out.flatten(0, -2), expected)


def by_transformers(x: Tensor, weight: Tensor) -> Tensor:
    """The `forward` of Llama's, Qwen2's, Mixtral's and DeepSeek-V3's norm."""
    given = x.dtype
    x = x.to(FP32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * x.to(given)


def by_pow(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.pow(y.square().mean(-1, True) + EPS, -0.5)).type_as(x) * weight


def by_product(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (weight.float() * (torch.rsqrt((y * y).mean(-1, keepdim=True) + EPS) * y)).to(x.dtype)


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.rms_norm": lambda x, weight: F.rms_norm(x, (N,), weight, EPS),
    "transformers": by_transformers,
    "pow": by_pow,
    "product": by_product,
    "three dimensions": lambda x, weight: F.rms_norm(x.view(2, -1, N), (N,), weight, EPS),
}


@pytest.mark.parametrize("spelling", NORMS)
def test_rms_norm_in_every_spelling(spelling: str) -> None:
    w, x, weight = random(WIDTH, N), random(M, N), random(N, seed=1)

    def projection(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(NORMS[spelling](x, weight), nn.Parameter(w))

    with torch.no_grad(), uncompiled() as graphs, post_grad_pass.recorded() as record:
        out = fp8(projection)(x, weight)
    assert [made.made for made in record] == ["fp8fn.quantize_rms_norm.default"]
    assert calls(graphs[0]) == ["quantize_rms_norm", "scaled_mm"]
    assert not [node for node in graphs[0].nodes if node.target is torch.ops.aten.rsqrt.default]
    expected = fp8fn.gemm(fp8fn.quantize_rms_norm(x, weight, EPS), fp8fn.quantize(w.mT, (128, 128)))
    assert torch.equal(out.flatten(0, -2), expected)


def text(graph: Graph) -> str:
    """The activations' calls on tensors, one a line, without views."""
    names: dict[Any, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op != "call_function":
            names[node] = node.name
            continue
        target = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        source = node.args[0]
        if target == "getitem":
            names[node] = f"{names[source]}[{node.args[1]}]"
        elif target in ("reshape", "permute"):
            names[node] = names[source]
        else:
            names[node] = node.name.replace("_default", "")
            given = [names[arg] for arg in node.args if isinstance(arg, Node)]
            if not of_weight(node):
                lines.append(f"{names[node]} = {target}({', '.join(given)})")
    return "\n".join(lines)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the graphs are torch 2.13's")
def test_forward_graph_of_a_training_step() -> None:
    """A norm's statistics stay: the backward reads them, and the op takes them as an argument."""
    with uncompiled() as graphs:
        fp8(Block().bfloat16())(random(2, M, WIDTH).requires_grad_()).sum()
    assert_expected_inline(
        text(graphs[0]),
        """\
convert_element_type = convert_element_type(primals_2)
pow_1 = pow.Tensor_Scalar(convert_element_type)
mean = mean.dim(pow_1)
add = add.Tensor(mean)
rsqrt = rsqrt(add)
quantize_rms_norm_dual = quantize_rms_norm_dual(primals_2, primals_1, rsqrt)
scaled_mm = scaled_mm(quantize_rms_norm_dual[0], quantize_rms_norm_dual[1], quantize[0], quantize[1])
scaled_mm_1 = scaled_mm(quantize_rms_norm_dual[0], quantize_rms_norm_dual[1], quantize_1[0], quantize_1[1])
tanh = tanh(scaled_mm_1)
mul_2 = mul.Tensor(scaled_mm, tanh)
add_1 = add.Tensor(primals_2, mul_2)
scaled_mm_2 = scaled_mm(quantize_rms_norm_dual[0], quantize_rms_norm_dual[1], quantize_2[0], quantize_2[1])
add_2 = add.Tensor(add_1, scaled_mm_2)
convert_element_type_2 = convert_element_type(add_2)
pow_2 = pow.Tensor_Scalar(convert_element_type_2)
mean_1 = mean.dim(pow_2)
add_3 = add.Tensor(mean_1)
rsqrt_1 = rsqrt(add_3)
quantize_rms_norm_dual_1 = quantize_rms_norm_dual(add_2, primals_6, rsqrt_1)
scaled_mm_3 = scaled_mm(quantize_rms_norm_dual_1[0], quantize_rms_norm_dual_1[1], quantize_3[0], quantize_3[1])
scaled_mm_4 = scaled_mm(quantize_rms_norm_dual_1[0], quantize_rms_norm_dual_1[1], quantize_4[0], quantize_4[1])
quantize_silu_mul_dual = quantize_silu_mul_dual(scaled_mm_3, scaled_mm_4)
scaled_mm_5 = scaled_mm(quantize_silu_mul_dual[0], quantize_silu_mul_dual[1], quantize_5[0], quantize_5[1])
add_5 = add.Tensor(add_2, scaled_mm_5)""",
    )


class Keep(CustomGraphPass):
    """Records each graph's quantizers of activations, and the number of 16-bit tensors that are written for them."""

    def __init__(self) -> None:
        self.found: list[tuple[list[str], int]] = []

    def __call__(self, graph: Graph) -> None:
        self.found.append(([name for name in calls(graph) if name.startswith("quantize")], materialised(graph)))

    def uuid(self) -> None:
        return None


Counts = list[tuple[list[str], int, int]]


def counts(model: Callable[[Tensor], Tensor], x: Tensor, fuse: bool | None, **options: Any) -> Counts:
    """`Keep`'s records, and how many Triton kernels Inductor launches besides fp8fn's; and for the backward.

    Inductor makes its code for a GPU, which needs none, of graphs on the CPU. The kernels do nothing.
    """
    torch._dynamo.reset()
    keep = Keep()

    def step() -> None:
        out = fp8(model, fuse, **options)(x)
        if x.requires_grad:
            out.float().square().sum().backward()

    patch = torch._inductor.config.patch(post_grad_custom_post_pass=keep)
    with triton_code(), patch, torch.set_grad_enabled(x.requires_grad):
        _, codes = run_and_get_code(step)
    kernels = [len(re.findall(r"^ +triton_\w+\.run\(", code, re.MULTILINE)) for code in codes]
    return [(*found, count) for found, count in zip(keep.found, kernels, strict=True)]


@contextmanager
def triton_code() -> Iterator[None]:
    """Inductor's backend for Triton, with a driver that knows a target and has no device."""
    driver, backend = pytest.importorskip("triton").runtime.driver, pytest.importorskip("triton.backends.driver")

    class Nothing(backend.DriverBase):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            return SM90.to_triton()

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            return None

    class Kernel:
        def run(self, *_: Any, **__: Any) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch, torch._functorch.config.patch(enable_autograd_cache=False):
        patch.setattr(driver, "_active", Nothing())
        patch.setattr(AsyncCompile, "triton", lambda *_, **__: Kernel())
        with torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False):
            yield


def test_numbers_of_kernels_in_an_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten launches before weights and products, then seven without doubles, then five: and no tensor in between."""
    model, x = Block().bfloat16(), random(2, M, WIDTH)
    assert counts(model, x, None) == [(["quantize_rms_norm", "quantize_rms_norm", "quantize_silu_mul"], 0, 2)]
    assert counts(model, x, False) == [(["quantize"] * 3, 3, 4)]
    monkeypatch.setattr(joint_pass, "merge_quantizers", lambda graph: 0)
    assert counts(model, x, False) == [(["quantize"] * 6, 3, 4)]


def test_numbers_of_kernels_in_a_training_step() -> None:
    """A norm's statistics are computed for its backward; one op quantizes both gradients of a gated activation."""
    backward = (["quantize_dual"] * 6, 5, 4)
    x = random(2, M, WIDTH).requires_grad_()
    assert counts(Block().bfloat16(), x, False) == [(["quantize_dual"] * 3, 3, 4), backward]
    fused = ["quantize_rms_norm_dual", "quantize_rms_norm_dual", "quantize_silu_mul_dual"]
    merged = ["quantize_dual", "quantize_silu_mul_backward", *["quantize_dual"] * 3]
    assert counts(Block().bfloat16(), x, None) == [(fused, 0, 3), (merged, 3, 3)]


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"), "relu²": lambda x: F.relu(x).square(),
}  # fmt: skip


@pytest.mark.parametrize("producer", ELEMENTWISE)
def test_numbers_of_kernels_of_other_producers(producer: str) -> None:
    """One that writes 16 bits and one that reads them, then one."""
    linear = nn.Linear(N, WIDTH).bfloat16()

    def layer(x: Tensor) -> Tensor:
        return linear(ELEMENTWISE[producer](x))

    x = random(M, N)
    assert counts(layer, x, False) == [(["quantize"], 1, 1)]
    assert counts(layer, x, None) == [([], 0, 1)]


@on_gpus
def test_the_norm_of_other_devices_is_inlined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm without an op takes a kernel for the statistics, and one that normalises and quantizes."""
    monkeypatch.setattr(targets, "target_of", lambda device: SM89)
    linear, norm = nn.Linear(N, WIDTH).bfloat16(), nn.RMSNorm(N).bfloat16()
    assert counts(lambda x: linear(norm(x)), random(M, N), None) == [([], 0, 2)]


def test_rows_are_inlined_if_asked_for() -> None:
    linear, x = nn.Linear(N, WIDTH).bfloat16(), random(M, N)

    def layer(x: Tensor) -> Tensor:
        return linear(F.gelu(x))

    assert counts(layer, x, None, recipe="rowwise") == [(["quantize"], 1, 1)]
    assert counts(layer, x, True, recipe="rowwise") == [([], 0, 1)]


@on_gpus
def test_whole_rows_have_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    linear, norm = nn.Linear(N, WIDTH).bfloat16(), nn.RMSNorm(N).bfloat16()
    with torch.no_grad(), triton_code(), post_grad_pass.recorded() as record:
        fp8(lambda gate, up: linear(F.silu(gate) * up), recipe="rowwise")(random(M, N), random(M, N))
        fp8(lambda x: linear(norm(x)), recipe="rowwise")(random(M, N))
    assert [found.made for found in record] == ["fp8fn.quantize_silu_mul.default", "fp8fn.quantize_rms_norm.default"]


class Residual(nn.Module):
    """A product that is added to its input, a norm of the sum and a product again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, N, bias=False), nn.Linear(N, WIDTH, bias=False)
        self.norm = nn.RMSNorm(N, EPS)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = residual + self.first(x)
        return x.narrow(-1, 0, WIDTH) + self.second(self.norm(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_a_residual_is_added_by_the_op(recipe: str, dynamic: bool) -> None:
    batch = 1 if dynamic else 2  # of two sizes that are not known the graph can't make one
    model, x, residual = Residual().bfloat16(), random(batch, M, WIDTH), random(batch, M, N, seed=1)
    with torch.no_grad(), uncompiled() as graphs, post_grad_pass.recorded() as record:
        found = fp8(model, recipe=recipe, dynamic=dynamic)(x, residual)
        product = fp8(lambda x: model.first(x), recipe=recipe)(x)
    assert [made.made for made in record] == ["fp8fn.quantize_add_rms_norm.default"]
    assert calls(graphs[0]) == ["quantize", "scaled_mm", "quantize_add_rms_norm", "scaled_mm"]
    graphs[0].eliminate_dead_code()
    added = [node.args[0] for node in graphs[0].nodes if node.target is torch.ops.aten.add.Tensor]
    assert len(added) == 1  # the last one
    total = residual + product
    settings = parse_recipe(recipe)
    rows = fp8fn.quantize_rms_norm(total, model.norm.weight, EPS, settings.activation_block)
    columns = fp8fn.quantize(model.second.weight.mT, settings.weight_block)
    second = fp8fn.gemm(rows.flatten(0, 1) if rows.ndim > 3 else rows, columns)
    assert torch.equal(found, total.narrow(-1, 0, WIDTH) + second.view(batch, M, WIDTH))


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "both in memory": (lambda x, residual: x + residual, True),
    "scaled": (lambda x, residual: torch.add(x, residual, alpha=2), False),
    "of a number": (lambda x, residual: x + 1, False),
    "broadcast": (lambda x, residual: x + residual[:1], False),
    "of float32": (lambda x, residual: x + residual.float(), False),
    "computed": (lambda x, residual: x + torch.tanh(residual), False),
    "misaligned": (lambda x, residual: x + residual.view(-1)[3 : 3 + N].expand(M, N), False),
    "aligned": (lambda x, residual: x + residual.view(-1)[8 : 8 + N].expand(M, N), True),
    "turned": (lambda x, residual: (x.mT.contiguous() + residual.mT.contiguous()).mT, False),
}


@pytest.mark.parametrize("spelling", SUMS)
def test_which_sums_the_op_adds(spelling: str) -> None:
    total, wanted = SUMS[spelling]
    linear, weight = nn.Linear(N, WIDTH).bfloat16(), random(N, seed=2)

    def forward(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = total(x, residual)
        return x, linear(by_transformers(x, weight).to(BF16))

    inputs = random(M, N), random(M, N, seed=1)
    with torch.no_grad(), uncompiled() as graphs:
        found = fp8(forward)(*inputs)
        expected = forward(*inputs)
    assert ("quantize_add_rms_norm" in calls(graphs[0])) == wanted
    assert torch.equal(found[0], expected[0])
    assert snr(found[1], expected[1]) > 20


def test_a_weight_that_freezing_computes_after_the_sum() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(random(N, seed=2)), nn.Linear(N, WIDTH).bfloat16()

        def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            x = x + residual
            return x, self.linear(by_transformers(x, self.scale + 1).to(BF16))

    model, inputs = Model().eval(), (random(M, N), random(M, N, seed=1))
    with torch.no_grad(), torch._inductor.config.patch(freezing=True), uncompiled() as graphs:
        found, expected = fp8(model)(*inputs), model(*inputs)
    assert calls(graphs[0]) == ["quantize_add_rms_norm", "scaled_mm"]
    assert torch.equal(found[0], expected[0])
    assert snr(found[1], expected[1]) > 20


def test_a_sum_that_nothing_else_reads_stays_in_inductors_kernel() -> None:
    linear, norm = nn.Linear(N, WIDTH).bfloat16(), nn.RMSNorm(N).bfloat16()
    with torch.no_grad(), uncompiled() as graphs:
        fp8(lambda x, residual: linear(norm(x + residual)))(random(M, N), random(M, N, seed=1))
    assert calls(graphs[0]) == ["scaled_mm"]


def test_no_sum_is_added_where_the_backward_reads_statistics() -> None:
    model, x = Residual().bfloat16(), random(M, WIDTH).requires_grad_()
    with uncompiled() as graphs:
        fp8(model)(x, random(M, N, seed=1)).sum().backward()
    assert "quantize_add_rms_norm" not in [name for graph in graphs for name in calls(graph)]
    assert x.grad is not None


@on_gpus
@pytest.mark.parametrize(("target", "made"), [(SM90, "fp8fn.quantize_silu_mul"), (SM89, "inlined"), (GFX942, "")])
def test_what_a_device_has(target: Target, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    linear = nn.Linear(N, WIDTH).bfloat16()
    e4m3 = torch.float8_e4m3fn  # named: PyTorch keeps the type of a fake output, which was another target's
    recipe = Recipe(activation_dtype=e4m3, weight_dtype=e4m3, gradient_dtype=e4m3)
    with torch.no_grad(), triton_code(), post_grad_pass.recorded() as record:
        fp8(lambda gate, up: linear(F.silu(gate) * up), recipe=recipe)(random(M, N), random(M, N))
    assert [made in found.made for found in record if found.reason is None] == [True] * bool(made)
    if target is not SM90:
        assert record[0].reason == f"no kernel for it: {target.name} is not sm90"


def reasons(function: Callable[..., Any], *inputs: Tensor) -> list[str | None]:
    with uncompiled() as graphs, post_grad_pass.recorded() as record:
        fp8(function)(*inputs)
    assert [name for name in calls(graphs[0]) if "mul" in name or "norm" in name] == []
    return [found.reason for found in record if found.target.startswith(("mul", "convert"))]


def test_what_stays() -> None:
    """Producers stay where nothing would be saved, or where the op computes something else."""
    weight, square = nn.Parameter(random(WIDTH, N)), nn.Parameter(random(WIDTH, M))
    gate, up, scale = random(M, N), random(M, N), random(N)

    def shared(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(gate) * up
        return F.linear(y, weight), y

    def made_here(gate: Tensor, up: Tensor) -> Tensor:
        return F.linear(F.silu(gate + 1) * (up - 1), weight)

    def broadcast(gate: Tensor, up: Tensor) -> Tensor:
        return F.linear(F.silu(gate) * up[:1], weight)

    def summed(x: Tensor, _: Tensor) -> Tensor:
        return F.linear(x.view(M // 4, 4, N).sum(1), weight)

    def other_norm(x: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x * x.float().abs().mean(-1, True).to(x.dtype) * scale, weight)

    def of_columns(gate: Tensor, up: Tensor) -> Tensor:
        return F.linear((F.silu(gate) * up).mT.contiguous(), square)

    needs_it = "reads it too, so that it has to be written"
    with torch.no_grad():
        (reason, inlined) = reasons(shared, gate, up)
        assert (reason or "").endswith(needs_it)
        assert inlined is None
        (reason, inlined) = reasons(made_here, gate, up)
        assert reason == "another kernel reads or makes the op's inputs, so that no memory traffic is saved"
        assert inlined is None
        assert reasons(broadcast, gate, up) == [None]
        assert reasons(other_norm, gate, scale) == [None]
        assert reasons(of_columns, gate, up) == []
        assert reasons(summed, gate, up) == []


def test_the_gradient_of_up_stays() -> None:
    """`silu(gate) * grad`, whose inputs the kernel for the gradient of gate reads as well."""
    linear, gate, up = (nn.Linear(N, N, bias=False).bfloat16() for _ in range(3))
    with uncompiled(), post_grad_pass.recorded() as record:
        fp8(lambda x: linear(F.silu(gate(x)) * up(x)))(random(M, N).requires_grad_()).sum().backward()
    forward, backward, both = record
    assert forward.made == "fp8fn.quantize_silu_mul_dual.default"
    assert (backward.reason or "").endswith("no memory traffic is saved")
    assert both.made == "fp8fn.quantize_silu_mul_backward.default"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("norm", [Norm, lambda width: nn.RMSNorm(width, EPS)], ids=["transformers", "nn.RMSNorm"])
def test_values_and_gradients(norm: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    """As near to those of the model as without the fusion."""
    model, x = Block(norm).to(dtype), random(2, M, WIDTH, dtype=dtype).requires_grad_()
    parameters = list(model.parameters())

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]

    expected = step(model)
    with uncompiled():
        unfused, fused = (step(fp8(model, fuse)) for fuse in (False, None))
    for want, plain, found in zip(expected, unfused, fused, strict=True):
        assert snr(found, want) > snr(plain, want) - 1.5
        assert snr(found, want) > 20


def test_square_blocks_of_activations_are_fused_too() -> None:
    """By the recipe `blockwise_square`: the same ops as by `blockwise`, with another block of their columns."""
    model, x = Block().bfloat16(), random(2, M, WIDTH).requires_grad_()
    parameters = list(model.parameters())

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]

    expected = step(model)
    with uncompiled() as graphs:
        plain, square = (step(fp8(model, recipe=recipe)) for recipe in ("blockwise", "blockwise_square"))
    names, square_names = calls(graphs[0]), calls(graphs[2])
    assert names == square_names
    assert names.count("quantize_rms_norm_dual") == 2
    assert names.count("quantize_silu_mul_dual") == 1
    for node in graphs[2].nodes:
        if str(node.target).endswith("_dual.default"):
            assert tuple(node.args[-1]) == (128, 128), node.format_node()
    for name, want, found in zip(("out", "dx"), plain, square, strict=False):
        assert torch.equal(want, found), name
    for want, found in zip(expected, square, strict=True):
        assert snr(found, want) > 20
    assert any(not torch.equal(want, found) for want, found in zip(plain, square, strict=True))


def test_of_inductors_code() -> None:
    """Compiled in earnest."""
    model, x = Block().bfloat16(), random(2, M, WIDTH).requires_grad_()
    results = []
    with torch._inductor.config.patch(fx_graph_cache=False), post_grad_pass.recorded() as record:
        for function in (model, fp8(model)):
            out = function(x)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])])
    assert sum(found.reason is None for found in record) == 4
    for want, found in zip(*results, strict=True):
        assert (found.shape, found.stride()) == (want.shape, want.stride())
        assert snr(found, want) > 20


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INLINED: list[tuple[ScaleBlock, str, torch.dtype]] = [
    ((1, 128), "fp32", E4M3), ((1, 128), "pow2", E5M2), ((1, 32), "fp32", E5M2), ((1, 32), "pow2", E4M3),
    ((1, -1), "fp32", E4M3), ((1, -1), "pow2", E4M3),
]  # fmt: skip


def test_inlined_quantizers_have_the_same_bits(device: torch.device) -> None:
    """The producers are exact in 16 bits: all blocks and scales, zeros, NaN, Inf, and the least and largest."""
    if device.type == "cuda" and not exact_on_gpus:
        pytest.skip(INEXACT)

    def quantized(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [torch.ops.fp8fn.quantize(torch.neg(x), block, dtype, scale) for block, scale, dtype in INLINED]

    x = random(68, 512)
    x *= torch.logspace(-38, 38, 68)[:, None]
    x[0], x[1, 3], x[2, 200], x[3, 7] = 0, float("nan"), float("inf"), float("-inf")
    x = x.to(device)
    with post_grad_pass.recorded() as record, torch._inductor.config.patch(fx_graph_cache=False):
        found = torch.compile(quantized, backend="fp8fn", fullgraph=True, options={"fuse_quantize": True})(x)
    assert [made.made for made in record] == ["fp8fn.quantize.default, inlined"] * len(INLINED)
    for outs, expected in zip(found, quantized(x), strict=True):
        for actual, wanted in zip(outs, expected, strict=True):
            nan = wanted.float().isnan()
            assert torch.equal(actual.float().isnan(), nan)
            bits = torch.uint8 if wanted.element_size() == 1 else torch.int32
            assert torch.equal(actual.view(bits)[~nan], wanted.view(bits)[~nan])


@pytest.mark.parametrize(
    ("shape", "options"),
    [((M, N - 16), {}), ((M + 2, N), {}), ((M, N), {"recipe": "mxfp8"}), ((M, N), {"dynamic": True})],
    ids=["partial block", "padded scales", "e8m0", "dynamic"],
)
def test_what_is_not_inlined(shape: tuple[int, int], options: dict[str, Any]) -> None:
    linear = nn.Linear(shape[1], WIDTH).bfloat16()
    with torch.no_grad(), uncompiled() as graphs:
        fp8(lambda x: linear(F.gelu(x)), True, **options)(random(*shape))
    assert calls(graphs[0]) == ["quantize", "mx_mm" if "recipe" in options else "scaled_mm"]


def test_dynamic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for every count of tokens, and no guard on what the kernel takes."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    model, made = Block().bfloat16(), ["quantize_rms_norm", "quantize_rms_norm", "quantize_silu_mul"]
    with torch.no_grad(), uncompiled() as graphs, torch._dynamo.config.patch(error_on_recompile=True):
        compiled = fp8(model, dynamic=True)
        for count in (40, 3, 129, 1024):
            x = random(2, count, WIDTH)
            assert snr(compiled(x), model(x)) > 20
    assert [[name for name in calls(graph) if name != "scaled_mm"] for graph in graphs] == [made]


def test_one_quantizer_for_all_that_read_a_tensor() -> None:
    """The same bits; also where one reads rows alone and another both orientations."""

    def quantized(x: Tensor) -> list[Tensor]:
        y = torch.relu(x)
        row = torch.ops.fp8fn.quantize(y.view(-1, N), (1, 128))
        again = torch.ops.fp8fn.quantize(y.view(-1, N), (1, 128), torch.float8_e4m3fn)
        dual = torch.ops.fp8fn.quantize_dual(y.reshape(-1, N))
        column = torch.ops.fp8fn.quantize(y.view(-1, N), (128, 1))
        other = torch.ops.fp8fn.quantize(y.view(-1, N), (1, 128), torch.float8_e5m2)
        square = torch.ops.fp8fn.quantize(y.view(-1, N), (128, 128))
        beside = torch.ops.fp8fn.quantize_dual(y.view(-1, N), dual_block=(128, 128))
        same = torch.ops.fp8fn.quantize_dual(y.view(-1, N), (1, 128), None, "fp32", None, (128, 128))
        return [*row, *again, *dual, *column, *other, *square, *beside, *same]

    x = random(2, M, N)
    with uncompiled() as graphs, fp8fn.lowering.substitution():
        found = torch.compile(quantized, backend="inductor", fullgraph=True)(x)
    names = [str(node.target) for node in graphs[0].nodes if "quantize" in str(node.target)]
    assert names == [f"fp8fn.{op}.default" for op in ("quantize_dual", "quantize", "quantize", "quantize_dual")]
    for actual, expected in zip(found, quantized(x), strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.float(), expected.float())


def test_exact_substitution_fuses_nothing() -> None:
    """The value that the user wrote is the value that is rounded: fusing would be 1.3 % away, and the limit is 1 %."""
    w, gate, up = fp8fn.quantize(random(WIDTH, N).mT, (128, 128)), random(M, N), random(M, N, seed=1)

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return fp8fn.gemm(fp8fn.quantize(F.silu(gate) * up, (1, 128)), w)

    with uncompiled() as graphs, post_grad_pass.recorded() as record, fp8fn.lowering.substitution():
        exact = torch.compile(product, fullgraph=True)(gate, up)
        torch._dynamo.reset()
        assert record == []
        fused = torch.compile(product, fullgraph=True, backend="fp8fn")(gate, up)
    assert [calls(graph) for graph in graphs] == [["quantize", "scaled_mm"], ["quantize_silu_mul", "scaled_mm"]]
    reference = product(gate, up)
    assert torch.equal(exact, reference)
    error = float((fused.double() - reference.double()).norm() / reference.double().norm())
    assert 0.01 < error < 0.02


def test_options_and_caches() -> None:
    uuids = [post_grad_pass.FusionPass(*blocks).uuid() for blocks in ((), ((),), (((1, -1),),))]
    assert len({str(uuid) for uuid in uuids}) == 3
    assert post_grad_pass.FusionPass().uuid() == uuids[0]
    assert post_grad_pass.with_fusion({}, False) == {}
    theirs = post_grad_pass.FusionPass()
    mine = post_grad_pass.with_fusion({"post_grad_custom_pre_pass": theirs}, None)["post_grad_custom_pre_pass"]
    assert mine.before is theirs
    assert mine.uuid() != theirs.uuid()
    with pytest.raises(Exception, match=r"options\['fuse_quantize'\] is 'all'; use True, False, or None"):
        torch.compile(torch.relu, backend="fp8fn", options={"fuse_quantize": "all"})(random(M, N))


def test_known_statistics_are_checked() -> None:
    x, weight = random(M, N), random(N)
    for rstd in (torch.ones(M, 1), torch.ones(M, dtype=BF16)):
        with pytest.raises(ValueError, match=r"rstd is .* it must be torch.float32 of shape \(64,\), one for each row"):
            torch.ops.fp8fn.quantize_rms_norm(x, weight, 0.0, rstd=rstd)


def test_the_log_says_what_was_fused(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad(), uncompiled(), caplog.at_level("INFO", logger="fp8fn"):
        fp8(Block().bfloat16())(random(2, M, WIDTH))
    lines = [record.getMessage() for record in caplog.records]
    assert "2 quantizers of tensors that another one quantizes so: left out" not in lines
    assert "3 quantizers of tensors that another one quantizes so: left out" in lines
    ends = [line.partition(" ")[2] for line in lines if "quantized: " in line]
    assert [end.partition(" ")[2] for end in ends] == [
        "(M,K)=(128,128) quantized: fp8fn.quantize_rms_norm.default",
        "(M,K)=(128,128) quantized: fp8fn.quantize_rms_norm.default",
        "(M,K)=(128,256) quantized: fp8fn.quantize_silu_mul.default",
    ]


@pytest.mark.slow
def test_a_llama_trains_as_without() -> None:
    """20 steps from the same weights on the same tokens: each loss is within 1 %."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    runs = []
    for fuse in (False, None):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = transformers.LlamaForCausalLM(config)
        with uncompiled(), post_grad_pass.recorded() as record:
            # Otherwise the partitioner fuses silu_mul, each orientation for itself.
            step = fp8(model, fuse, where=lambda site: "lm_head" not in site.weight, save="all")
            runs.append(losses(step, model))
        made = [found.made for found in record if found.reason is None]
        layer = [f"fp8fn.quantize_{name}_dual.default" for name in ("rms_norm", "rms_norm", "silu_mul")]
        assert made == ([] if fuse is False else layer * 2)
    assert runs[0][-1] < 0.9 * runs[0][0]
    for unfused, fused in zip(*runs, strict=True):
        assert abs(fused / unfused - 1) < 0.01


def losses(call: Callable[..., Any], model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    found = []
    for step in range(20):
        tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(step % 4))
        loss = call(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
