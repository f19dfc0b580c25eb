"""`gemm` and `fp8` under torch.func, forward mode, vmap, torch.compile and torch.export, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

import fp8fn
from fp8fn import Recipe, Site
from fp8fn.ops.recipe import PRESETS

BF16 = torch.bfloat16
M, N, K = 48, 160, 256

Function = Callable[..., Any]
jvp: Function = torch.func.jvp  # annotated as a pair or a triple
vjp: Function = torch.func.vjp


def product(a: Tensor, w: Tensor) -> Tensor:
    return fp8fn.gemm(a, w.mT)


def product64(a: Tensor, w: Tensor) -> Tensor:
    return a @ w.mT


def loss(a: Tensor, w: Tensor) -> Tensor:
    return product(a, w).float().square().sum()


def loss64(a: Tensor, w: Tensor) -> Tensor:
    return product64(a, w).square().sum()


@pytest.fixture
def a() -> Tensor:
    return torch.randn(M, K).to(BF16)


@pytest.fixture
def w() -> Tensor:
    return torch.randn(N, K).to(BF16)


def assert_close(got: Any, want: Any, bound: float = 0.056) -> None:
    """Relative error in norm; 0.056 is 25 dB. `want` comes from float64."""
    got, want = (torch.utils._pytree.tree_leaves(tree) for tree in (got, want))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        g, w = g.detach().double(), w.detach().double()
        assert float((g - w).norm() / w.norm()) < bound


def same(fn: Function, reference: Function, *args: Tensor, bound: float = 0.056) -> None:
    assert_close(fn(*args), reference(*(arg.double() for arg in args)), bound)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)], ids=str)
def test_grad(argnums: int | tuple[int, ...], a: Tensor, w: Tensor) -> None:
    same(grad(loss, argnums), grad(loss64, argnums), a, w)


@pytest.mark.parametrize("recipe", PRESETS)
def test_grad_is_the_eager_backward(recipe: str, a: Tensor, w: Tensor) -> None:
    def loss(a: Tensor, w: Tensor) -> Tensor:
        return fp8fn.linear(a, w, recipe=recipe).float().square().sum()

    leaves = [x.clone().requires_grad_() for x in (a, w)]
    eager = torch.autograd.grad(loss(*leaves), leaves)
    for got, want in zip(grad(loss, (0, 1))(a, w), eager, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_vjp(a: Tensor, w: Tensor) -> None:
    cotangent = torch.randn(M, N).to(BF16)
    out, pull = vjp(product, a, w)
    want, pull64 = vjp(product64, a.double(), w.double())
    assert_close(out, want)
    assert_close(pull(cotangent), pull64(cotangent.double()))


def test_jvp(a: Tensor, w: Tensor) -> None:
    tangents = torch.randn_like(a), torch.randn_like(w)
    got = jvp(product, (a, w), tangents)
    want = jvp(product64, (a.double(), w.double()), tuple(t.double() for t in tangents))
    assert_close(got, want)
    assert torch.equal(got[0], product(a, w))


@pytest.mark.parametrize("which", [(True, False), (False, True)], ids=["a", "w"])
def test_jvp_of_one_operand_is_its_product(which: tuple[bool, bool], a: Tensor, w: Tensor) -> None:
    if which[0]:
        t = torch.randn_like(a)
        _, got = jvp(lambda a: product(a, w), (a,), (t,))
        assert torch.equal(got, product(t, w))
    else:
        t = torch.randn_like(w)
        _, got = jvp(lambda w: product(a, w), (w,), (t,))
        assert torch.equal(got, product(a, t))


def test_jvp_of_the_bias(a: Tensor, w: Tensor) -> None:
    bias, tangent = torch.randn(N), torch.randn(N)
    out, got = jvp(lambda bias: fp8fn.linear(a, w, bias), (bias,), (tangent,))
    assert torch.equal(out, fp8fn.linear(a, w, bias))
    assert torch.equal(got, tangent.to(BF16).expand(M, N))
    t = torch.randn_like(a)
    _, both = jvp(lambda a, bias: fp8fn.linear(a, w, bias), (a, bias), (t, tangent))
    assert_close(both, t.double() @ w.double().mT + tangent.double())


def test_forward_ad(a: Tensor, w: Tensor) -> None:
    tangent = torch.randn_like(a)
    with forward_ad.dual_level():
        out = product(forward_ad.make_dual(a, tangent), w)
        primal, got = forward_ad.unpack_dual(out)
        assert torch.equal(primal, product(a, w))
        assert torch.equal(got, product(tangent, w))


def test_jacrev_and_jacfwd(w: Tensor) -> None:
    """The function has few inputs, since a Jacobian of all of `a` takes a tangent for each element."""
    basis = torch.randn(3, M, K)

    def of(product: Function) -> Function:
        return lambda c: product((c[:, None, None] * basis.to(c.dtype)).sum(0), w.to(c.dtype)).sum(0)[:5]

    c = torch.randn(3)
    want = jacrev(of(product64))(c.double())
    assert want.shape == (5, 3)
    assert_close(jacrev(of(product))(c), want, 0.15)  # a sum over M of rounding errors against one of signed terms
    assert_close(jacfwd(of(product))(c), want, 0.15)


def test_jacrev_of_all_elements(a: Tensor, w: Tensor) -> None:
    same(jacrev(lambda a, w: product(a, w)[:3, :2].float()), jacrev(lambda a, w: product64(a, w)[:3, :2]), a[:16], w)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (2, 1)], ids=str)
def test_vmap(in_dims: tuple[int | None, int | None], a: Tensor, w: Tensor) -> None:
    batched = [
        x if dim is None else torch.stack([x, x.flip(0), -x.flip(1)], dim)
        for x, dim in zip((a, w), in_dims, strict=True)
    ]
    same(vmap(product, in_dims), vmap(product64, in_dims), *batched)


@pytest.mark.parametrize("argnums", [0, 1], ids=["a", "w"])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_grad(in_dims: tuple[int | None, int | None], argnums: int, a: Tensor, w: Tensor) -> None:
    """Per-sample gradients: each sample has its own scales, so they are those of a loop."""
    batched = [x if dim is None else torch.stack([x, x.flip(0)]) for x, dim in zip((a, w), in_dims, strict=True)]
    got = vmap(grad(loss, argnums), in_dims)(*batched)
    assert_close(got, vmap(grad(loss64, argnums), in_dims)(*(x.double() for x in batched)))
    one = [x if dim is None else x[1] for x, dim in zip(batched, in_dims, strict=True)]
    assert_close(got[1], grad(loss, argnums)(*one), 2e-3)


def test_grad_of_vmap(a: Tensor, w: Tensor) -> None:
    batch = torch.stack([a, a.flip(0)])

    def total(product: Function) -> Function:
        return lambda batch, w: vmap(product, (0, None))(batch, w).square().sum()

    same(grad(total(product), (0, 1)), grad(total(product64), (0, 1)), batch, w)


def test_vmap_of_vjp_and_jvp(a: Tensor, w: Tensor) -> None:
    cotangents, tangents = torch.randn(3, M, N).to(BF16), torch.randn(3, M, K).to(BF16)
    got = vmap(vjp(product, a, w)[1])(cotangents)
    assert_close(got, vmap(vjp(product64, a.double(), w.double())[1])(cotangents.double()))
    got = vmap(lambda t: jvp(lambda a: product(a, w), (a,), (t,))[1])(tangents)
    assert_close(got, tangents.double() @ w.double().mT)


def test_jvp_of_vmap(a: Tensor, w: Tensor) -> None:
    batch, tangent = torch.stack([a, a.flip(0)]), torch.randn(2, M, K).to(BF16)
    got = jvp(lambda b: vmap(product, (0, None))(b, w), (batch,), (tangent,))
    assert_close(got, (batch.double() @ w.double().mT, tangent.double() @ w.double().mT))


@pytest.mark.parametrize("argnums", [0, 1], ids=["a", "w"])
def test_grad_of_grad(argnums: int, a: Tensor, w: Tensor) -> None:
    def twice(loss: Function) -> Function:
        return grad(lambda a, w: grad(loss)(a, w).float().square().sum() * 1e-4, argnums)

    def twice64(a: Tensor, w: Tensor) -> Tensor:
        return grad(lambda a, w: grad(loss64)(a, w).square().sum() * 1e-4, argnums)(a, w)

    same(twice(loss), twice64, a, w, bound=0.1)


def test_hessian_vector_product(a: Tensor, w: Tensor) -> None:
    tangent = torch.randn_like(a)
    forward_over_reverse = jvp(lambda a: grad(loss)(a, w), (a,), (tangent,))[1]
    want = jvp(lambda a: grad(loss64)(a, w.double()), (a.double(),), (tangent.double(),))[1]
    assert_close(forward_over_reverse, want)
    reverse_over_forward = grad(lambda a: jvp(lambda a: loss(a, w), (a,), (tangent,))[1])(a)
    assert_close(reverse_over_forward, want)
    reverse_over_reverse = vjp(lambda a: grad(loss)(a, w), a)[1](tangent)[0]
    assert_close(reverse_over_reverse, want)


def test_vmap_of_hessian_vector_products(a: Tensor, w: Tensor) -> None:
    tangents = torch.randn(2, M, K).to(BF16)
    got = vmap(lambda t: jvp(lambda a: grad(loss)(a, w), (a,), (t,))[1])(tangents)
    want = 2 * tangents.double() @ w.double().mT @ w.double()
    assert_close(got, want)


def forward_over_reverse(how: str, linear: bool, product: Function, a: Tensor, w: Tensor, tangent: Tensor) -> Tensor:
    """The tangent of the weight's gradient, along one of `a`, by PyTorch's forward mode around one of its backwards."""

    def loss(a: Tensor, w: Tensor) -> Tensor:
        out = product(a, w).float() if linear else product(a, w).float().square() / 2
        return out.sum()

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        if how == "func.grad":
            got = grad(loss, 1)(dual, w)
        else:
            leaf = w.clone().requires_grad_()
            (got,) = torch.autograd.grad(loss(dual, leaf), leaf)
        found: Tensor = forward_ad.unpack_dual(got).tangent
        return found


@pytest.mark.parametrize("linear", [True, False], ids=["linear loss", "quadratic loss"])
@pytest.mark.parametrize("how", ["func.grad", "autograd.grad"])
def test_forward_ad_over_a_backward(how: str, linear: bool, a: Tensor, w: Tensor) -> None:
    """The result is no silent zero, as `a` in FP8 has no tangent, and no error of `quantize`, which nobody called."""
    tangent = torch.randn_like(a)
    got = forward_over_reverse(how, linear, product, a, w, tangent)
    da, a64, w64 = tangent.double(), a.double(), w.double()
    ones = torch.ones(M, N, dtype=torch.float64)
    want = ones.mT @ da if linear else (da @ w64.mT).mT @ a64 + (a64 @ w64.mT).mT @ da
    assert_close(got, want, 0.1)


@pytest.mark.parametrize(
    ("op", "how"), [("grouped_gemm", "func.grad"), ("grouped_gemm", "autograd.grad"), ("expert_mlp", "func.grad")]
)
def test_forward_ad_over_a_backward_of_groups(op: str, how: str) -> None:
    """PyTorch's own `silu_backward` has no forward mode: of `expert_mlp` only the transforms' backward has one."""
    ends = torch.tensor([40, 96], dtype=torch.int32)
    x, tangent, w = torch.randn(96, 128), torch.randn(96, 128), torch.randn(2, 128, 256) / 11
    down = torch.randn(2, 128, 128) / 11

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return fp8fn.grouped_gemm(x, w, ends) if op == "grouped_gemm" else fp8fn.expert_mlp(x, w, down, ends)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        parts = []
        for i, rows in enumerate((x[:40], x[40:])):
            out = rows @ w[i]
            if op == "expert_mlp":
                gate, up = out.chunk(2, -1)
                out = (F.silu(gate) * up) @ down[i].to(out.dtype)
            parts.append(out)
        return torch.cat(parts)

    got = forward_over_reverse(how, False, ours, x, w, tangent)
    x64, w64 = x.double(), w.double()
    want = jvp(lambda x: grad(lambda w: plain(x, w).square().sum() / 2)(w64), (x64,), (tangent.double(),))[1]
    assert_close(got, want, 0.12)


def test_eager_backward_through_a_transform(a: Tensor, w: Tensor) -> None:
    """torch.func.grad inside, autograd outside: the outer derivative is not lost."""
    leaf = w.clone().requires_grad_()
    grad(lambda a: loss(a, leaf))(a).float().square().sum().mul(1e-4).backward()
    want = grad(lambda w: grad(loss64)(a.double(), w).square().sum() * 1e-4)(w.double())
    assert leaf.grad is not None
    assert_close(leaf.grad, want, 0.1)


def test_jvp_of_jvp_raises(a: Tensor, w: Tensor) -> None:
    t = torch.randn_like(a)
    with pytest.raises(NotImplementedError, match="jvp of jvp is not supported; use jvp of grad"):
        jvp(lambda x: jvp(lambda a: product(a, w), (x,), (t,))[1], (a,), (t,))


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return fp8fn.linear(x, self.weight)


def test_functional_call(a: Tensor, w: Tensor) -> None:
    layer = Layer(w)
    parameters = dict(layer.named_parameters())
    got = grad(lambda p: functional_call(layer, p, (a,)).float().square().sum())(parameters)
    assert_close(got["weight"], grad(loss64, 1)(a.double(), w.double()))
    ensemble = {"weight": torch.stack([w, -w])}
    out = vmap(lambda p: functional_call(layer, p, (a,)))(ensemble)
    assert_close(out, torch.stack([product64(a.double(), w.double()), -product64(a.double(), w.double())]))


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*is deprecated:FutureWarning")  # torch.export's own
def test_export_with_symbolic_rows(a: Tensor, w: Tensor) -> None:
    layer = Layer(w)
    program = torch.export.export(layer, (a,), dynamic_shapes=({0: torch.export.Dim("m", max=4096)},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert "fp8fn.gemm.default" in targets
    for rows in (16, 48, 77):
        assert torch.equal(program.module()(a[:1].expand(rows, -1)), layer(a[:1].expand(rows, -1)))
    lowered = program.run_decompositions()
    targets = [str(node.target) for node in lowered.graph.nodes]
    assert [t for t in targets if t.startswith("fp8fn.")] == ["fp8fn.quantize.default"] * 2 + [
        "fp8fn.scaled_mm.default"
    ]
    assert torch.equal(lowered.module()(a[:33]), layer(a[:33]))


COMPILED: dict[str, Function] = {
    "grad": grad(loss, (0, 1)),
    "vmap": lambda a, w: vmap(product, (0, None))(torch.stack([a, -a]), w),
    "vmap of grad": lambda a, w: vmap(grad(loss, (0, 1)), (0, None))(torch.stack([a, -a]), w),
    "jvp": lambda a, w: jvp(product, (a, w), (a + 1, w + 1)),
    "grad of grad": lambda a, w: grad(lambda a: grad(loss)(a, w).float().square().sum() * 1e-4)(a),
    "jvp of grad": lambda a, w: jvp(lambda a: grad(loss)(a, w), (a,), (a + 1,)),
    "vjp": lambda a, w: vjp(product, a, w)[1](torch.ones(M, N, dtype=BF16)),
    "jacfwd": lambda a, w: jacfwd(lambda c: product(c[0] * a + c[1], w).sum(0)[:3])(torch.ones(2, dtype=BF16)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_transform_is_the_eager_one(name: str, a: Tensor, w: Tensor, fresh_dynamo: None) -> None:
    fn = COMPILED[name]
    got = torch.compile(fn, fullgraph=True, backend="aot_eager")(a, w)
    assert_close(got, fn(a, w), 2e-3)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_forward_and_backward(dynamic: bool, a: Tensor, w: Tensor, fresh_dynamo: None) -> None:
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    sizes = [(M, N)] if not dynamic else [(M, N), (M - 3, N - 5)]
    for m, n in sizes:
        leaves = [x.clone().requires_grad_() for x in (a[:m], w[:n])]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        want = torch.autograd.grad(loss(*leaves), leaves)
        assert_close(got, want, 2e-3)
        assert_close(got, grad(loss64, (0, 1))(a[:m].double(), w[:n].double()))


def test_second_order_recipe_compiled_forward(a: Tensor, w: Tensor, fresh_dynamo: None) -> None:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        return fp8fn.linear(a, w, recipe=Recipe(second_order=True)).float().square().sum()

    leaves = [x.clone().requires_grad_() for x in (a, w)]
    got = torch.autograd.grad(torch.compile(fn, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    assert_close(got, torch.autograd.grad(fn(*leaves), leaves), 2e-3)


QUANTIZED: dict[str, Function] = {
    "quantize": lambda a: fp8fn.dequantize(fp8fn.quantize(a, (1, 128))).float().sum(),
    "quantize_dual": lambda a: fp8fn.dequantize(fp8fn.quantize_dual(a)[1]).float().sum(),
    "scaled_mm": lambda a: fp8fn.gemm(fp8fn.quantize(a, (1, 128)), fp8fn.quantize(a.mT, (128, 1))).float().sum(),
}


@pytest.mark.parametrize("how", ["grad", "jvp", "backward", "forward_ad", "vmap of grad", "compiled grad"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_derivative_through_quantized_values_raises(name: str, how: str, a: Tensor, fresh_dynamo: None) -> None:
    """Zeros would be a wrong answer. Dequantization ends in quantize, so that is the op that speaks."""
    fn = QUANTIZED[name]
    op = "quantize" if how in ("jvp", "forward_ad") and name != "quantize_dual" else name

    def forward_mode() -> None:
        with forward_ad.dual_level():
            fn(forward_ad.make_dual(a, a))

    ways: dict[str, Callable[[], Any]] = {
        "grad": lambda: grad(fn)(a),
        "jvp": lambda: jvp(fn, (a,), (a,)),
        "backward": lambda: fn(a.clone().requires_grad_()).backward(),
        "forward_ad": forward_mode,
        "vmap of grad": lambda: vmap(grad(fn))(torch.stack([a, a])),
        "compiled grad": lambda: torch.compile(grad(fn), fullgraph=True, backend="aot_eager")(a),
    }
    error: Any = Exception if how == "compiled grad" else NotImplementedError  # Dynamo wraps it
    with pytest.raises(error, match=rf"fp8fn\.{op} has no derivative: use fp8fn\.gemm"):
        ways[how]()


def test_quantized_values_of_a_detached_input(a: Tensor) -> None:
    leaf = a.clone().requires_grad_()
    q = fp8fn.quantize(leaf.detach(), (1, 128))
    assert not q.data.requires_grad
    with torch.no_grad():
        q = fp8fn.quantize(leaf, (1, 128))
    assert not q.data.requires_grad


# fp8(fn)


def network(p: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(x, p["first"], p["bias"]))
    return torch.tanh(hidden @ p["second"])


@pytest.fixture
def p() -> dict[str, Tensor]:
    return {"first": torch.randn(N, K) / 16, "bias": torch.randn(N), "second": torch.randn(N, 128) / 12}


def test_fp8_substitutes_linear_and_matmul(p: dict[str, Tensor], a: Tensor) -> None:
    x = a.float()
    got = fp8fn.fp8(network)(p, x)
    want = torch.tanh(fp8fn.gemm(F.gelu(fp8fn.linear(x, p["first"], p["bias"])), p["second"]))
    assert torch.equal(got, want)
    assert not torch.equal(got, network(p, x))
    assert_close(got, network(p, x), 0.08)


SPELLINGS: dict[str, Function] = {
    "@": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "matmul(other=)": lambda a, b: torch.matmul(a, other=b),
    "matmul(input=, other=)": lambda a, b: torch.matmul(input=a, other=b),
    "matmul(out=)": lambda a, b: torch.matmul(a, b, out=torch.empty(32, 128)),
    "mm": torch.mm,
    "mm(input=, mat2=)": lambda a, b: torch.mm(input=a, mat2=b),
    "mm(mat2=)": lambda a, b: torch.mm(a, mat2=b),
    "mm(out=)": lambda a, b: torch.mm(a, b, out=torch.empty(32, 128)),
    ".matmul": lambda a, b: a.matmul(b),
    ".matmul(other=)": lambda a, b: a.matmul(other=b),
    ".mm": lambda a, b: a.mm(b),
    ".mm(mat2=)": lambda a, b: a.mm(mat2=b),
    "__matmul__": lambda a, b: a.__matmul__(b),
    "__rmatmul__": lambda a, b: b.__rmatmul__(a),
    "linalg.matmul": torch.linalg.matmul,
    "linalg.matmul(other=)": lambda a, b: torch.linalg.matmul(a, other=b),
    "linalg.matmul(out=)": lambda a, b: torch.linalg.matmul(a, b, out=torch.empty(32, 128)),
    "inner": lambda a, b: torch.inner(a, b.mT),
    "inner(other=)": lambda a, b: torch.inner(a, other=b.mT),
    ".inner": lambda a, b: a.inner(b.mT),
    "addmm": lambda a, b: torch.addmm(torch.zeros(128), a, b),
    "addmm(mat1=)": lambda a, b: torch.addmm(torch.zeros(128), mat1=a, mat2=b, beta=1, alpha=1.0),
    ".addmm": lambda a, b: torch.zeros(128).addmm(a, b),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "einsum of a list": lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
    "einsum of sublists": lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]),
    "einsum with an ellipsis": lambda a, b: torch.einsum("...j,jk->...k", a, b),
    "einsum with an ellipsis last": lambda a, b: torch.einsum("jk,...j->...k", b, a),
    "einsum turned": lambda a, b: torch.einsum("ij,jk->ki", a, b).mT,
    "einsum of the transpose": lambda a, b: torch.einsum("ij,kj->ik", a, b.mT),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "tensordot(dims=)": lambda a, b: torch.tensordot(a, b, dims=([-1], [0])),
    "tensordot of the transpose": lambda a, b: torch.tensordot(a, b.mT, ((1,), (1,))),
    "linear": lambda a, b: F.linear(a, b.mT),
    "linear(input=)": lambda a, b: F.linear(input=a, weight=b.mT),
    "linear(weight=)": lambda a, b: F.linear(a, weight=b.mT),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_fp8_takes_every_spelling(name: str) -> None:
    a, b = torch.randn(32, 256), torch.randn(256, 128)
    assert torch.equal(fp8fn.fp8(SPELLINGS[name])(a, b), fp8fn.gemm(a, b))


def test_fp8_takes_every_spelling_compiled(fresh_dynamo: None) -> None:
    a, b = torch.randn(32, 256), torch.randn(256, 128)
    traced = {name: call for name, call in SPELLINGS.items() if "out=" not in name}

    def all_of_them(a: Tensor, b: Tensor) -> list[Tensor]:
        return [call(a, b) for call in traced.values()]

    compiled = torch.compile(fp8fn.fp8(all_of_them), backend="aot_eager", fullgraph=True)
    for name, got in zip(traced, compiled(a, b), strict=True):
        assert torch.equal(got, fp8fn.gemm(a, b)), name


def test_fp8_of_contractions_of_more_axes() -> None:
    x, into, out = torch.randn(2, 32, 256), torch.randn(256, 4, 64), torch.randn(4, 64, 256)
    heads = fp8fn.fp8(lambda x, w: torch.einsum("bsd,dhe->bhse", x, w))(x, into)
    assert torch.equal(heads, fp8fn.gemm(x, into.flatten(1)).unflatten(-1, (4, 64)).transpose(1, 2))
    for call in (
        lambda x, w: torch.einsum("bhse,hed->bsd", x, w),
        lambda x, w: torch.tensordot(x.transpose(1, 2), w, 2),
        lambda x, w: torch.tensordot(x, w, ([-3, -1], [0, -2])),
    ):
        got = fp8fn.fp8(call)(heads, out)
        assert torch.equal(got, fp8fn.gemm(heads.transpose(1, 2).flatten(2), out.flatten(0, 1)))
    # More rows than a matrix has on the right, as `inner` and `linear` of PyTorch take them.
    assert torch.equal(fp8fn.fp8(torch.inner)(x, into.flatten(1).mT), fp8fn.gemm(x, into.flatten(1)))


@pytest.mark.parametrize(
    "equation",
    ["bd,fd->fb", "fd,bd->bf", "bsd,df->fsb", "bsd,fd->sbf", "bsd,dhe->bhse", "bsd,dhe->hbse", "bsd,dhe->hebs"],
)
def test_an_einsum_is_laid_out_as_pytorch_does(equation: str) -> None:
    """A view of the result, which relies on it, would raise an error otherwise."""
    sizes = {"b": 136, "s": 18, "d": 128, "h": 2, "e": 64, "f": 128}
    x, w = (torch.randn([sizes[axis] for axis in term]) for term in equation.partition("->")[0].split(","))
    found, wanted = (
        fn(x, w)
        for fn in (fp8fn.fp8(functools.partial(torch.einsum, equation)), functools.partial(torch.einsum, equation))
    )
    assert found.stride() == wanted.stride()
    assert_close(found, wanted)
    assert not torch.equal(found, wanted)


def test_fp8_of_a_bias() -> None:
    a, b, bias = torch.randn(32, 256), torch.randn(256, 128), torch.randn(128)
    want = fp8fn.gemm(a, b, bias=bias)
    assert torch.equal(fp8fn.fp8(torch.addmm)(bias, a, b), want)
    assert torch.equal(fp8fn.fp8(F.linear)(a, b.mT, bias), want)
    out = torch.empty(32, 128)
    assert fp8fn.fp8(torch.addmm)(bias, a, b, out=out) is out
    assert torch.equal(out, want)


LEFT_ALONE: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "bmm": (torch.bmm, (2, 32, 256), (2, 256, 128)),
    "batches of matmul": (torch.matmul, (2, 32, 256), (2, 256, 128)),
    "a batch of weights": (torch.matmul, (32, 256), (2, 256, 128)),
    "baddbmm": (lambda a, b: torch.baddbmm(torch.ones(1), a, b, beta=2, alpha=3), (2, 32, 256), (2, 256, 128)),
    "addbmm": (lambda a, b: torch.addbmm(torch.ones(128), a, b), (2, 32, 256), (2, 256, 128)),
    "mv": (torch.mv, (128, 256), (256,)),
    "addmv": (lambda a, b: torch.addmv(torch.ones(128), a, b), (128, 256), (256,)),
    "dot": (torch.dot, (256,), (256,)),
    "vector inner": (torch.inner, (256,), (128, 256)),
    "inner of more": (torch.inner, (32, 256), (2, 128, 256)),
    "chain_matmul": (lambda a, b: torch.linalg.multi_dot((a, b, b.mT)), (32, 256), (256, 128)),
    "bilinear": (lambda a, b: F.bilinear(a, a, b), (32, 128), (128, 128, 128)),
    "linear of a vector": (F.linear, (32, 256), (256,)),
    "addmm by beta": (lambda a, b: torch.addmm(torch.ones(128), a, b, beta=2), (32, 256), (256, 128)),
    "addmm by alpha": (lambda a, b: torch.addmm(torch.ones(128), a, b, alpha=0.5), (32, 256), (256, 128)),
    "addmm of a matrix": (lambda a, b: torch.addmm(torch.ones(32, 128), a, b), (32, 256), (256, 128)),
    "addmm of a number": (lambda a, b: torch.addmm(torch.ones(()), a, b), (32, 256), (256, 128)),
    "addmm_": (lambda a, b: torch.ones(32, 128).addmm_(a, b), (32, 256), (256, 128)),
    "einsum of a batch": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 32, 256), (2, 256, 128)),
    "einsum of scores": (lambda a, b: torch.einsum("bshe,bthe->bhst", a, b), (2, 32, 2, 128), (2, 128, 2, 128)),
    "einsum with a sum": (lambda a, b: torch.einsum("ij,jk->k", a, b), (32, 256), (256, 128)),
    "einsum without an arrow": (lambda a, b: torch.einsum("ij,jk", a, b), (32, 256), (256, 128)),
    "einsum of a diagonal": (lambda a, b: torch.einsum("ii,ij->j", a, b), (128, 128), (128, 128)),
    "einsum of one": (lambda a, b: torch.einsum("ij->ji", a), (32, 256), (1,)),
    "einsum of three": (lambda a, b: torch.einsum("ij,jk,kl->il", a, b, b.mT), (32, 256), (256, 128)),
    "einsum that repeats an axis": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (32, 1), (256, 128)),
    "outer": (lambda a, b: torch.einsum("i,j->ij", a, b), (128,), (128,)),
    "tensordot of nothing": (lambda a, b: torch.tensordot(a, b, 0), (32, 4), (4, 128)),
    "tensordot of everything": (lambda a, b: torch.tensordot(a, b, 2), (128, 128), (128, 128)),
    "tensordot that repeats an axis": (lambda a, b: torch.tensordot(a, b, 1), (32, 1), (256, 128)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_fp8_leaves_what_is_no_product_of_matrices_alone(name: str) -> None:
    call, *shapes = LEFT_ALONE[name]
    a, b = (torch.randn(shape) for shape in shapes)
    assert torch.equal(fp8fn.fp8(call)(a, b), call(a, b))


@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("baddbmm", "baddbmm", "not matched"), ("addmm_", "addmm_", "not matched"), ("bmm", "bmm", "not matched"),
        ("chain_matmul", "linalg_multi_dot", "not matched"), ("bilinear", "bilinear", "not matched"),
        ("addmm by beta", "addmm", "not matched"), ("a batch of weights", "matmul", "no matrix"),
    ],
)  # fmt: skip
def test_fp8_logs_what_it_leaves_alone(name: str, function: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each reason, however many calls."""
    call, *shapes = LEFT_ALONE[name]
    a, b = (torch.randn(shape) for shape in shapes)
    with caplog.at_level("INFO", logger="fp8fn"):
        transformed = fp8fn.fp8(call)
        for _ in range(2):
            transformed(a, b)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"fp8: a {function} is left as it is: ")
    assert reason in caplog.messages[0]


def test_fp8_logs_small_products(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fp8fn"):
        fp8fn.fp8(torch.matmul)(torch.randn(32, 256), torch.randn(256, 128))
        fp8fn.fp8(torch.matmul)(torch.randn(32, 64), torch.randn(64, 128))
    assert caplog.messages == ["fp8: a matmul is left as it is: small: K=64 is under 128"]


A32, B32 = torch.ones(32, 256), torch.ones(256, 128)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (torch.matmul, (A32.bfloat16(), B32)), (torch.matmul, (A32, B32.bfloat16())), (F.linear, (A32, B32.mT.half())),
        (F.linear, (A32, B32.mT, torch.ones(128).bfloat16())), (torch.matmul, (A32, B32.mT)), (F.linear, (A32, B32)),
        (torch.mm, (A32[None], B32)), (torch.mm, (A32, B32, A32)), (torch.addmm, (torch.ones(3), A32, B32)),
        (torch.addmm, (torch.ones(128), A32[None], B32)), (F.linear, (A32, B32.mT, torch.ones(127))),
        (torch.einsum, ("ij,jk->ik", A32, B32.mT)), (torch.einsum, ("ij,jk->ik", A32)), (torch.inner, (A32, B32)),
        (torch.tensordot, (A32, B32, ([5], [0]))), (torch.tensordot, (A32, B32, ([1, 1], [0, 0]))),
        (torch.tensordot, (A32, B32, 3)), (torch.tensordot, (A32, B32, -1)), (torch.matmul, (A32, None)),
        (torch.matmul, (A32,)), (torch.einsum, (A32, [0, -1], B32, [-1, 2], [0, 2])),
        (torch.einsum, (A32, [0, 52], B32, [52, 2], [0, 2])), (lambda a, b: a @ b, (A32, [1])),
        (lambda a, b: torch.mm(a, b, out=torch.empty(32, 128, dtype=torch.float64)), (A32, B32)),
        (lambda a, b: torch.mm(a, b, out=torch.empty(32, 128)), (A32, B32.clone().requires_grad_())),
        (lambda a, b: torch.mm(a, b, out=torch.empty(32, 128).requires_grad_()), (A32, B32)),
        (lambda a, b: torch.matmul(a, b, out=3), (A32, B32)),
    ],
    ids=range(27),
)  # fmt: skip
def test_fp8_has_the_errors_of_pytorch(call: Function, args: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as plain:  # noqa: PT011
        call(*args)
    with pytest.raises(type(plain.value)) as ours:
        fp8fn.fp8(call)(*args)
    assert str(ours.value) == str(plain.value)


def test_fp8_out_of_another_shape_is_pytorchs() -> None:
    a, b = torch.randn(32, 256), torch.randn(256, 128)
    out = torch.empty(0)
    assert fp8fn.fp8(torch.mm)(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    out = torch.full((32, 256), 7.0)[:, ::2]  # any strides
    assert fp8fn.fp8(torch.mm)(a, b, out=out) is out
    assert torch.equal(out, fp8fn.gemm(a, b))
    square = torch.randn(128, 128)
    want = fp8fn.gemm(square, b[:128])
    assert torch.equal(fp8fn.fp8(torch.mm)(square, b[:128], out=square), want)  # over an operand
    with torch.autocast("cpu", torch.bfloat16):  # whose result is bfloat16, and `out` is left to PyTorch
        out = torch.empty(32, 128, dtype=torch.bfloat16)
        torch.mm(a.bfloat16(), b.bfloat16(), out=out)
        assert torch.equal(fp8fn.fp8(torch.mm)(a.bfloat16(), b.bfloat16(), out=torch.empty_like(out)), out)


def test_fp8_under_autocast_takes_operands_of_two_types() -> None:
    a, b, bias = torch.randn(32, 256).bfloat16(), torch.randn(256, 128), torch.randn(128)
    with torch.autocast("cpu", torch.bfloat16):
        got = fp8fn.fp8(torch.matmul)(a, b)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, fp8fn.gemm(a, b))
        assert torch.equal(fp8fn.fp8(F.linear)(a, b.mT, bias), fp8fn.linear(a, b.mT, bias))


@pytest.mark.parametrize("kind", ["nested", "sparse", "subclass"])
def test_fp8_leaves_tensors_without_strides_alone(kind: str) -> None:
    a, b = torch.randn(32, 256), torch.randn(256, 128)
    if kind == "nested":
        x = torch.nested.nested_tensor([a, a], layout=torch.jagged)
        assert torch.equal(fp8fn.fp8(torch.matmul)(x, b).values(), (x @ b).values())
    elif kind == "sparse":
        assert torch.equal(fp8fn.fp8(torch.mm)(a.to_sparse(), b), torch.mm(a.to_sparse(), b))
    else:
        from torch.testing._internal.two_tensor import TwoTensor

        got = fp8fn.fp8(torch.matmul)(a, TwoTensor(b, 2 * b))
        assert torch.equal(got.a, a @ b)
        assert torch.equal(got.b, a @ (2 * b))


class _Async:
    async def __call__(self, x: Tensor) -> Tensor:
        return x


class _Generates(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield x @ x


def _generator(x: Tensor) -> Any:
    yield x @ x


async def _coroutine(x: Tensor) -> Tensor:
    return x @ x


async def _async_generator(x: Tensor) -> Any:
    yield x @ x


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (_generator, ("fn=_generator", "a generator")),
        (_coroutine, ("fn=_coroutine", "a coroutine")),
        (_async_generator, ("fn=_async_generator", "an async_generator")),
        (functools.partial(_coroutine), ("a coroutine",)),
        (_Async(), ("a coroutine",)),
        (_Async().__call__, ("fn=_Async.__call__", "a coroutine")),
        (_Generates(), ("a generator",)),
    ],
    ids=["generator", "coroutine", "async_generator", "partial", "object", "method", "generates"],
)
def test_fp8_of_what_runs_later(fn: Function, words: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="whose body runs after fp8 has ended; transform the function") as raised:
        fp8fn.fp8(fn)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("fn", [_generator, _coroutine, _async_generator])
def test_fp8_of_what_returns_such(fn: Function) -> None:
    transformed = fp8fn.fp8(lambda x: fn(x))
    with pytest.raises(TypeError, match=r"fn=.*<lambda> returns an? .*whose body runs after fp8 has ended"):
        transformed(A32)


def test_fp8_of_a_class_a_partial_and_a_module() -> None:
    a, layer = torch.randn(32, 256), nn.Linear(256, 128, bias=False)
    want = fp8fn.linear(a, layer.weight)
    for fn in (layer, functools.partial(layer), layer.forward):
        assert torch.equal(fp8fn.fp8(fn)(a), want)
    assert isinstance(fp8fn.fp8(_Async)(), _Async)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((2, 32, 128), (2, 128, 128)), torch.float32),
        (((15, 128), (128, 128)), torch.float32),
        (((32, 127), (127, 128)), torch.float32),
        (((32, 128), (128, 127)), torch.float32),
        (((128,), (128, 128)), torch.float32),
        (((32, 128), (128,)), torch.float32),
        (((32, 128), (128, 128)), torch.float64),
    ],
    ids=["batches", "small M", "small K", "small N", "vector a", "vector b", "float64"],
)
def test_fp8_leaves_others_alone(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    a, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    assert torch.equal(fp8fn.fp8(torch.matmul)(a, b), a @ b)


def test_fp8_has_no_effect_outside_its_function(p: dict[str, Tensor], a: Tensor) -> None:
    x = a.float()
    before = network(p, x)
    transformed = fp8fn.fp8(network)
    transformed(p, x)
    assert torch.equal(network(p, x), before)
    assert transformed.__name__ == "network"

    def fails(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fp8fn.fp8(fails)(x, x)
    assert torch.equal(network(p, x), before)


def test_fp8_where(p: dict[str, Tensor], a: Tensor) -> None:
    x, seen = a.float(), []

    def linears(site: Site) -> bool:
        seen.append(site)
        return site.op == "linear"

    got = fp8fn.fp8(network, where=linears)(p, x)
    assert torch.equal(got, torch.tanh(F.gelu(fp8fn.linear(x, p["first"], p["bias"])) @ p["second"]))
    assert [(s.op, s.m, s.n, s.k, s.batch, s.dtype) for s in seen] == [
        ("linear", M, N, K, 1, torch.float32),
        ("matmul", M, 128, N, 1, torch.float32),
    ]
    assert torch.equal(fp8fn.fp8(network, where=lambda site: False)(p, x), network(p, x))


def test_fp8_recipe_and_nesting(a: Tensor, w: Tensor) -> None:
    got = fp8fn.fp8(F.linear, recipe="rowwise")(a, w)
    assert torch.equal(got, fp8fn.linear(a, w, recipe=fp8fn.ROWWISE))
    inner = fp8fn.fp8(F.linear, recipe="rowwise")
    outer = fp8fn.fp8(lambda a, w: inner(a, w), recipe=fp8fn.TENSORWISE)
    assert torch.equal(outer(a, w), got)  # the inner one decides first


def test_fp8_under_grad_vmap_and_jvp(p: dict[str, Tensor], a: Tensor) -> None:
    x = a.float()
    fn = fp8fn.fp8(network)

    def total(network: Function) -> Function:
        return lambda p, x: network(p, x).square().sum()

    p64, x64 = {name: value.double() for name, value in p.items()}, x.double()
    assert_close(grad(total(fn))(p, x), grad(total(network))(p64, x64), 0.1)
    # Inside or outside: the transform is of the function, whichever order they are applied in.
    assert_close(fp8fn.fp8(grad(total(network)))(p, x), grad(total(network))(p64, x64), 0.1)
    batch = torch.stack([x, -x])
    assert_close(vmap(fn, (None, 0))(p, batch), torch.stack([fn(p, x), fn(p, -x)]), 1e-3)
    assert_close(vmap(grad(total(fn)), (None, 0))(p, batch)["first"][0], grad(total(fn))(p, x)["first"], 1e-2)
    tangent = torch.randn_like(x)
    got = jvp(lambda x: fn(p, x), (x,), (tangent,))
    assert_close(got, jvp(lambda x: network(p64, x), (x64,), (tangent.double(),)), 0.1)


def test_fp8_compiled(p: dict[str, Tensor], a: Tensor, fresh_dynamo: None) -> None:
    x, fn = a.float(), fp8fn.fp8(network)
    got = torch.compile(fn, fullgraph=True)(p, x)
    assert_close(got, fn(p, x), 2e-2)  # gelu differs in the last bit, which can move an FP8 code
    assert not torch.allclose(got, network(p, x), rtol=1e-4, atol=1e-4)
    assert_close(got, network(p, x), 0.08)


def test_fp8_of_a_module_with_functional_call(a: Tensor, w: Tensor) -> None:
    layer = nn.Linear(K, N, bias=False)
    params = {"weight": w.float()}
    got = fp8fn.fp8(lambda params, x: functional_call(layer, params, (x,)))(params, a.float())
    assert torch.equal(got, fp8fn.linear(a.float(), w.float()))
