"""`gemm` and `fp8` under torch.func, forward mode, vmap, torch.compile and torch.export, against float64."""

from __future__ import annotations

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
    """Of a function of a few numbers, for a Jacobian of all of `a` is the tangent of each element."""
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


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a @ b, torch.matmul, torch.mm, lambda a, b: a.matmul(b), lambda a, b: a.mm(b),
        lambda a, b: F.linear(a, b.mT), lambda a, b: F.linear(input=a, weight=b.mT),
        lambda a, b: F.linear(a, weight=b.mT),
    ],
    ids=["@", "matmul", "mm", ".matmul", ".mm", "linear", "linear(input=)", "linear(weight=)"],
)  # fmt: skip
def test_fp8_takes_every_spelling(call: Function) -> None:
    a, b = torch.randn(32, 256), torch.randn(256, 128)
    assert torch.equal(fp8fn.fp8(call)(a, b), fp8fn.gemm(a, b))


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
