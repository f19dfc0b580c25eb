"""`accumulate="fast"`: what it asks of blocks, which kernel it lets serve, and that only the forward takes it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import fp8fn
from fp8fn.ops import scaled_mm
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.model import modelled
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.rates import NAMED
from support.accuracy import snr
from support.tuning import operands, quantized

pytestmark = pytest.mark.usefixtures("cache")

FAST_ROWS = replace(fp8fn.ROWWISE, accumulate="fast")
FAST_TENSORS = replace(fp8fn.TENSORWISE, accumulate="fast")
BF16 = torch.bfloat16


def rows(m: int = 4096, n: int = 4096, k: int = 4096, kind: str = "LINE") -> ScaledProduct:
    return replace(operands(Problem(m, n, k, kind, kind)).product(SM90), fast=True)


def test_the_key_of_a_recipe_keeps_it() -> None:
    for recipe in (FAST_ROWS, FAST_TENSORS):
        assert parse_recipe(recipe.key) == recipe
        assert (recipe.dgrad.accumulate, recipe.wgrad.accumulate) == ("promoted", "promoted")
    assert "accumulate" not in fp8fn.ROWWISE.key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accumulate": "fast"}, r"blocks \(1, 128\) and \(128, 128\) have several scales along K"),
        ({"accumulate": "quick"}, r"accumulate='quick' is no way to add; use one of \('promoted', 'fast'\)"),
        (
            {"activation_block": (1, -1), "weight_block": (-1, 1), "gradient_block": (1, -1), "accumulate": "fast",
             "batch_invariant": True},
            "leave one of them out",
        ),
    ],
)  # fmt: skip
def test_recipes_that_can_not(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


def test_the_op_says_what_it_needs() -> None:
    a, b = fp8fn.quantize(torch.randn(32, 128), (1, 128)), fp8fn.quantize(torch.randn(128, 32), (128, 128))
    args = (a.data, a.scale, a.block, b.data, b.scale, b.block, None, BF16)
    with pytest.raises(ValueError, match="scaled_mm: fast_accumulation=True, and blocks"):
        torch.ops.fp8fn.scaled_mm(*args, False, True)
    with pytest.raises(ValueError, match="batch_invariant=True asks for one order of sums"):
        torch.ops.fp8fn.scaled_mm(*args, True, True)


def test_a_gpus_op_says_the_same_and_first_what_is_wrong_with_a_block() -> None:
    a, b = fp8fn.quantize(torch.randn(32, 128), (1, 128)), fp8fn.quantize(torch.randn(128, 32), (128, 128))
    for op in (torch.ops.fp8fn.scaled_mm, scaled_mm.scaled_mm_kernel):
        for block, invariant, message in (
            ((1,), False, r"scaled_mm: a: block=\(1,\) is not a block"),
            (a.block, False, "scaled_mm: fast_accumulation=True, and blocks"),
            (a.block, True, "batch_invariant=True asks for one order of sums"),
        ):
            with pytest.raises(ValueError, match=message):
                op(a.data, a.scale, block, b.data, b.scale, b.block, None, BF16, invariant, True)


def test_large_products_by_rows_go_to_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    (launch,) = scaled_mm.SCALED_MM_FAST.plan(rows())
    assert launch.describe().startswith("torch._scaled_mm[rowwise, fast accumulation] sm90 (cublaslt_fast by default")
    assert scaled_mm.SCALED_MM.choose(replace(rows(), fast=False)).name == "cuda"


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize(
    ("kind", "m", "n", "k"),
    [("LINE", 64, 1536, 24576), ("LINE", 3968, 4096, 7168), ("WHOLE", 2048, 8192, 16384), ("WHOLE", 16384, 4096, 4096)],
)
def test_small_products_and_tensors_have_no_temporary(
    card: str, kind: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables hold the promoting kernel's times, which do not choose for this one."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    product = replace(rows(m, n, k, kind), chip=NAMED[card])
    chosen, ever = scaled_mm.SCALED_MM_FAST.choose(product), scaled_mm.SCALED_MM.choose(replace(product, fast=False))
    assert (chosen.name, chosen.config.DEPTH, chosen.source) == ("cuda", 0, "the model")
    assert ever.name == "cublaslt" or ever.config.DEPTH > 0


# Some of 18 products on an H100 (2026-11-26), in which the next tile is slower by 1 % or more.
@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "tile"),
    [
        ("LINE", 4096, 4096, 4096, "128x256"), ("WHOLE", 16384, 1024, 4096, "128x256"),
        ("LINE", 512, 4096, 4096, "128x128"), ("LINE", 128, 2112, 7168, "64x64"),
        ("WHOLE", 16384, 4096, 14336, "192x128"),
    ],
)  # fmt: skip
def test_the_tile_is_the_one_that_was_measured_to_be_fastest(kind: str, m: int, n: int, k: int, tile: str) -> None:
    config = modelled(rows(m, n, k, kind))
    assert f"{config.BM}x{config.BN}" == tile


def test_gradients_of_every_order_are_promoted() -> None:
    x, w = torch.randn(32, 128), torch.randn(128, 64)
    for recipe in (FAST_ROWS, replace(FAST_ROWS, second_order=True)):
        a = x.clone().requires_grad_()
        with Flags() as flags:
            out = fp8fn.gemm(a, w, recipe=recipe)
            found = list(flags.found)
            out.square().sum().backward()
        assert found == [True]
        assert not any(flags.found[1:])
    mixed = Recipe(activation_block=(1, -1), weight_block=(-1, 1), gradient_block=(1, 128), accumulate="fast")

    def loss(x: Tensor) -> Tensor:
        return fp8fn.gemm(x, w, recipe=mixed).square().sum()

    assert torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x).shape == x.shape


def test_one_order_of_sums_overrules_it(fresh_dynamo: None) -> None:
    w = torch.nn.Parameter(torch.randn(512, 512))

    def product(x: Tensor) -> Tensor:
        return fp8fn.gemm(x, w, recipe=FAST_ROWS)

    x = torch.randn(48, 512)
    compiled = torch.compile(product, backend="fp8fn", options={"batch_invariant": True})
    with torch.no_grad():
        assert torch.equal(compiled(x)[5:6], compiled(x[5:6]))


def test_what_cublaslt_can_not_take_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    choice = scaled_mm.SCALED_MM_FAST.choose(rows(n=4104))
    assert choice.name == "cuda"
    assert ("cublaslt_fast", "K is 4096 and N 4104, not both multiples of 16") in choice.refused
    with cublaslt.left_out():
        assert scaled_mm.SCALED_MM_FAST.choose(rows()).name == "cuda"


@pytest.mark.parametrize(("m", "kernel"), [(1, "cuda"), (128, "cuda"), (129, "cublaslt_fast")])
def test_few_rows_by_a_large_vocabulary_stay(m: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1188 tiles of 128x128, but few rows: the kernel that reads b once is faster than cuBLASLt's."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    choice = scaled_mm.SCALED_MM_FAST.choose(rows(m, 152064, 4096))
    assert choice.name == kernel
    few = ("cublaslt_fast", "with 128 rows or fewer it was measured to be slower")
    assert (few in choice.refused) == (kernel == "cuda")


@pytest.mark.parametrize("fast", [False, True])
def test_pytorch_is_asked_for_it(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = quantized(Problem(48, 64, 160, "LINE", "LINE"))
    (launch,) = cublaslt.plan(replace(made.product(SM90), fast=fast))
    asked: list[bool] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **out: asked.append(args[-1]))
    launch.run()
    launch.call()(made.a, made.a_scale, made.b, made.b_scale)
    assert asked == [fast, fast]


class Flags(TorchDispatchMode):
    """The last argument of each scaled product that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fp8fn.scaled_mm.default:
            self.found.append(len(args) > 9 and args[9])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [FAST_ROWS, FAST_TENSORS], ids=["rows", "tensors"])
def test_the_forward_alone_is_fast(recipe: Recipe) -> None:
    """The reference has float32 sums: values and gradients are those of the promoted recipe."""
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(256, 128).bfloat16()

    def run(recipe: Recipe) -> tuple[list[bool], list[Tensor]]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with Flags() as flags:
            out = fp8fn.gemm(a, b, recipe=recipe)
            out.float().square().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return flags.found, [out, a.grad, b.grad]

    found, fast = run(recipe)
    promoted, values = run(replace(recipe, accumulate="promoted"))
    assert found == [True, False, False]
    assert promoted == [False, False, False]
    assert all(map(torch.equal, fast, values))


def test_groups_are_promoted() -> None:
    """Products with counts too, whose derivatives come from the product of a batch."""
    x, w = torch.randn(3, 32, 128), torch.randn(3, 128, 64, requires_grad=True)
    counts, offsets = (torch.tensor(of, dtype=torch.int32) for of in ([5, 0, 32], [5, 40, 96]))
    with Flags() as flags:
        fp8fn.grouped_gemm(x, w, counts=counts, recipe=FAST_ROWS).sum().backward()
        fp8fn.grouped_gemm(x.flatten(0, 1), w, offsets, recipe=FAST_ROWS).sum().backward()
    assert flags.found
    assert not any(flags.found)


def test_under_the_backend(fresh_dynamo: None) -> None:
    layer, x = torch.nn.Linear(512, 512, bias=False).bfloat16(), torch.randn(64, 512).bfloat16()
    compiled = torch.compile(layer, backend="fp8fn", options={"recipe": FAST_ROWS})
    out, (code, *_) = run_and_get_code(compiled, x)
    (call,) = re.findall(r"torch\.ops\.fp8fn\.scaled_mm\.default\((.*)\)", code)
    assert call.split(", ")[-2:] == ["False", "True"]
    assert torch.equal(out, fp8fn.linear(x, layer.weight, recipe="rowwise"))


def test_explain_names_it() -> None:
    with torch.device("meta"):
        layer, x = torch.nn.Linear(4096, 4096, bias=False, dtype=BF16), torch.empty(8192, 4096, dtype=BF16)
    (row,) = fp8fn.explain(layer, x, recipe=FAST_ROWS, target="h200", where="*", show=False).rows
    assert row.kernel is not None
    assert row.kernel.startswith("torch._scaled_mm[rowwise, fast accumulation] sm90")


@pytest.mark.parametrize(("bias", "dtype"), [(True, BF16), (False, torch.float16), (False, torch.float32)], ids=str)
def test_explain_names_the_kernel_of_what_cublaslt_does_not_take(bias: bool, dtype: torch.dtype) -> None:
    """By rows its output is bfloat16 without a bias."""
    with torch.device("meta"):
        layer, x = torch.nn.Linear(4096, 4096, bias=bias, dtype=dtype), torch.empty(8192, 4096, dtype=dtype)
    (row,) = fp8fn.explain(layer, x, recipe=FAST_ROWS, target="h200", where="*", show=False).rows
    assert row.kernel is not None
    assert row.kernel.startswith("scaled_mm[")
    assert "DEPTH=0" in row.kernel
    assert "not cublaslt_fast: " in row.kernel


def test_explain_takes_the_output_of_autocast() -> None:
    layer, x = torch.nn.Linear(512, 4096, bias=False), torch.empty(4096, 512)
    with torch.autocast("cpu", BF16):
        (row,) = fp8fn.explain(layer, x, recipe=FAST_ROWS, target="h200", where="*", show=False).rows
    assert row.kernel is not None
    assert row.kernel.startswith("torch._scaled_mm[rowwise, fast accumulation] sm90")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [FAST_ROWS, FAST_TENSORS], ids=["rows", "tensors"])
@pytest.mark.parametrize("k", [512, 16384])
def test_on_a_gpu(recipe: Recipe, k: int) -> None:
    x = torch.randn(256, k, device="cuda", dtype=BF16)
    w = torch.randn(512, k, device="cuda", dtype=BF16)
    expected = x.double() @ w.double().mT
    fast = fp8fn.linear(x, w, recipe=recipe)
    promoted = fp8fn.linear(x, w, recipe=replace(recipe, accumulate="promoted"))
    assert snr(fast, expected) > 25
    assert snr(fast, promoted.double()) > 35
