"""Einsums as products: which are, and that a compiled model's go to FP8 with the values of a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn.contraction import as_product
from fp8fn.lowering.graph.nodes import tensor_of
from support.accuracy import snr
from support.traced import both_passes


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("ij,jk->ik", (4, 5), (5, 6)), ("bmk,nk->bmn", (2, 3, 4), (5, 4)), ("...d,de->...e", (2, 3, 4), (4, 5)),
        ("bsd,dhe->bshe", (2, 3, 4), (4, 5, 6)), ("bshe,hed->bsd", (2, 3, 5, 6), (5, 6, 4)),
        ("bdhw,od->bohw", (2, 4, 3, 3), (5, 4)), ("bseh,hed->dsb", (2, 3, 6, 5), (5, 6, 4)), ("d,de->e", (4,), (4, 5)),
    ],
)  # fmt: skip
def test_products(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, w = torch.randn(a, dtype=torch.float64), torch.randn(b, dtype=torch.float64)
    product = as_product(equation, x.dim(), w.dim())
    assert product is not None
    left = x.permute(product.a).flatten(x.dim() - product.contracted)
    right = w.permute(product.b).flatten(0, product.contracted - 1).flatten(1)
    free = [x.shape[axis] for axis in product.a[: -product.contracted]]
    free += [w.shape[axis] for axis in product.b[product.contracted :]]
    out = (left @ right).reshape(free).permute(product.out)
    torch.testing.assert_close(out, torch.einsum(equation, x, w))


@pytest.mark.parametrize(
    "equation", ["bnpd,ndf->bnpf", "nbd,nfd->bnf", "bshe,hde->bshd", "hnbd,hndf->bfnh", "dnb,nd->nb"]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_batches_of_weights(equation: str, dynamic: bool, fresh_dynamo: None) -> None:
    """Experts and heads with a matrix each: a product of batches, but for one without columns."""
    sizes = {"b": 17, "s": 18, "p": 16, "n": 3, "h": 2, "d": 128, "e": 128, "f": 256}
    left, right = equation.partition("->")[0].split(",")
    weight, backend = nn.Parameter(torch.randn([sizes[axis] for axis in right])), both_passes()
    compiled = torch.compile(
        lambda x: torch.einsum(equation, x, weight), backend=backend, fullgraph=True, dynamic=dynamic
    )
    for b, p in ((17, 16), (33, 20)):
        x = torch.randn([(sizes | {"b": b, "p": p})[axis] for axis in left], requires_grad=True)
        out, expected = compiled(x), torch.einsum(equation, x, weight)
        found, wanted = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (out, expected))
        assert {decision.reason for decision in backend.decided} == {
            "einsum is not matched" if equation == "dnb,nd->nb" else None
        }
        for got, want in ((out, expected), *zip(found, wanted, strict=True)):
            assert got.shape == want.shape
            assert snr(got, want) > 24


@pytest.mark.parametrize(
    "equation",
    ["bd,fd->fb", "fd,bd->fb", "bsd,fd->sbf", "bsd,dhe->bhse", "bpnd,ndf->npbf", "nbd,nfd->nfb", "hnbd,hndf->nhbf",
     "nbd,ndhe->nebh", "ndhe,nbd->nebh"],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_result_is_laid_out_as_pytorch_does(equation: str, dynamic: bool, fresh_dynamo: None) -> None:
    """A view of it, which only some layouts allow, would otherwise fail when the model is compiled."""
    sizes = {"b": 17, "s": 18, "p": 16, "n": 3, "h": 2, "d": 128, "e": 128, "f": 256}
    operands = [torch.randn([sizes[axis] for axis in term]) for term in equation.partition("->")[0].split(",")]
    left = "b" not in equation.partition(",")[0]
    weight, x = nn.Parameter(operands[not left]), operands[left]
    backend = both_passes()
    compiled = torch.compile(
        lambda x: torch.einsum(equation, *((weight, x) if left else (x, weight))),
        backend=backend, fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    wanted = torch.einsum(equation, *operands)
    found = compiled(x)
    assert [decision.reason for decision in backend.decided] == [None]
    assert found.stride() == wanted.stride()
    assert snr(found, wanted) > 24


@pytest.mark.parametrize("equation", ["bd,fd->bf", "bnd,ndf->bnf", "nbd,nfd->nfb"])
def test_autocast_of_operands_of_two_types(equation: str, fresh_dynamo: None) -> None:
    sizes = {"b": 17, "n": 3, "d": 128, "f": 256}
    left, right = equation.partition("->")[0].split(",")
    weight, backend = nn.Parameter(torch.randn([sizes[axis] for axis in right])), both_passes()
    x = torch.randn([sizes[axis] for axis in left], dtype=torch.bfloat16)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum(equation, x, weight)

    found, wanted = torch.compile(function, backend=backend, fullgraph=True)(x), function(x)
    assert [decision.reason for decision in backend.decided] == [None]
    assert tensor_of(backend.decided[0].gemm.node).dtype == found.dtype == torch.bfloat16
    assert found.stride() == wanted.stride()
    assert snr(found, wanted) > 24


@pytest.mark.parametrize(
    "equation", ["bij,bjk->bik", "ij,jk->k", "ii,ij->j", "ij,jk", "ij,jk,kl->il", "i,j->ij", "ij,jk->ikk"]
)
def test_what_is_no_product(equation: str) -> None:
    assert as_product(equation, 3 if equation.startswith("b") else 2, 3 if "bjk" in equation else 2) is None


class Heads(nn.Module):
    """Attention's projections as JAX-minded code spells them."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(256, 4, 64) / 16)
        self.out = nn.Parameter(torch.randn(4, 64, 256) / 16)
        self.mix = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bsd,dhe->bshe", x, self.into)
        scores = torch.einsum("bshe,bthe->bhst", heads, heads)
        x = torch.einsum("bshe,hed->bsd", heads, self.out) + torch.tanh(scores.mean())
        return torch.einsum("od,bsd->bso", self.mix, x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_models_einsums(dynamic: bool, fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(2, 32, 256, requires_grad=True)
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, fullgraph=True, dynamic=dynamic)
    out, expected = compiled(x), model(x)
    (grad,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, expected))
    for got, want in ((out, expected), (grad, wanted)):
        assert got.shape == want.shape
        assert 5e-3 < float((got - want).detach().norm() / want.detach().norm()) < 0.1  # FP8, and no more


@pytest.mark.parametrize(("a", "b", "repeats"), [((32, 1), (256, 128), True), ((32, 9), (1, 8), True),
                                                 ((32, 1), (1, 128), False), ((1, 256), (256, 1), False)])  # fmt: skip
def test_an_axis_of_one_element_is_repeated(a: tuple[int, ...], b: tuple[int, ...], repeats: bool) -> None:
    """As PyTorch does: that is no product of matrices."""
    product = as_product("ij,jk->ik", 2, 2)
    assert product is not None
    assert product.repeats(a, b) == repeats


def test_a_model_that_repeats_an_axis(fresh_dynamo: None) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ij,jk->ik", x, self.weight)

    model, x = Sums(), torch.randn(32, 1)
    (row,) = fp8fn.explain(model, x, where="*", show=False).rows  # what the backend decides, without a compilation
    assert row.reason == "einsum is not matched"


@pytest.mark.parametrize(
    ("equation", "a", "b", "axis"),
    [("hnbd,hndf->hnbf", (4, 3, 17, 128), (1, 3, 128, 256), 0),
     ("hnbd,hndf->hnbf", (4, 3, 17, 128), (4, 1, 128, 256), 1),
     ("bde,edf->bf", (17, 128, 4), (1, 128, 256), 2), ("bd,df->bf", (17, 128), (1, 256), 1)],
)  # fmt: skip
def test_an_axis_of_one_element_is_repeated_to_a_symbolic_size(
    equation: str, a: tuple[int, ...], b: tuple[int, ...], axis: int, fresh_dynamo: None
) -> None:
    x, weight, backend = torch.randn(a), nn.Parameter(torch.randn(b)), both_passes()
    torch._dynamo.mark_dynamic(x, axis)
    compiled = torch.compile(lambda x: torch.einsum(equation, x, weight), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.einsum(equation, x, weight))
    assert [decision.reason for decision in backend.decided] == ["einsum is not matched"]


def test_explain_names_their_weights(fresh_dynamo: None) -> None:
    rows = fp8fn.explain(Heads(), torch.randn(2, 32, 256), where="*", show=False).rows
    assert [(row.weight, row.shape, row.reason is None) for row in rows if row.weight] == [
        ("into", (64, 256, 256), True), ("out", (64, 256, 256), True), ("mix", (64, 256, 256), True),
    ]  # fmt: skip
    assert [row.reason for row in rows if not row.weight] == ["no parameter: activation by activation"]
