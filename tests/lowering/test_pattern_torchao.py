"""torchao's blockwise training ops become fp8fn's: the graph, shapes and strides, the values, and what stays.

Without torchao, ops of the same names and schemas stand in; they are opaque, where torchao's own are seen as kernels.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fp8fn.lowering import joint_pass
from support.accuracy import assert_close
from support.graphs import code, compiled_step, graphs, step

# PyTorch's own, on tracing an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K = 384, 256, 128
X = "Tensor x, int block_size=128, ScalarType dtype=float8_e4m3fn) -> (Tensor, Tensor)"
AB = "Tensor a, Tensor b, Tensor a_s, Tensor b_s, int block_size=128, ScalarType out_dtype=float) -> Tensor"
RECIPES = "Tensor a, Tensor b, Tensor a_s, int scale_recipe_a, Tensor b_s, int scale_recipe_b, ScalarType out_dtype)"
# Each quantizer's block, whether its results are transposed, and whether data and scales are then column-major.
QUANTIZERS = {
    "act_quant_lhs": ((1, 128), False, False, True),
    "act_quant_rhs": ((128, 1), False, True, False),
    "act_quant_transposed_lhs": ((128, 1), True, False, True),
    "weight_quant_rhs": ((128, 128), False, True, True),
    "weight_quant_transposed_rhs": ((128, 128), True, True, True),
}


def quantized(name: str, x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """As torchao defines it: `s = FP8_MAX / amax` in float64, rounded; the data of `x * s`, and `1 / s`."""
    (r, c), transposed, *column_major = QUANTIZERS[name]
    blocks = x.float().unflatten(1, (-1, c)).unflatten(0, (-1, r))
    most = torch.finfo(dtype).max
    s = (most / blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12).double()).float()
    data = (blocks * s).clamp(-most, most).reshape(x.shape).to(dtype)
    results = []
    for part, columns in zip((data, 1 / s.flatten(2).flatten(0, 1)), column_major, strict=True):
        turned = part.t() if transposed else part
        results.append(turned.t().contiguous().t() if columns else turned.contiguous())
    return results[0], results[1]


def dequantized(data: Tensor, scale: Tensor) -> Tensor:
    rows, columns = (-(-size // count) for size, count in zip(data.shape, scale.shape, strict=True))
    return data.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def product(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, size: int = 128, out_dtype: Any = torch.float32) -> Tensor:
    return (dequantized(a, a_s) @ dequantized(b, b_s)).to(out_dtype)


def by_recipes(a: Tensor, b: Tensor, a_s: Tensor, left: int, b_s: Tensor, right: int, dtype: torch.dtype) -> Tensor:
    return product(a, b, a_s, b_s.t() if right == 4 else b_s, 128, dtype)


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    """torchao's own ops if it is installed, else stand-ins of the same schemas."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import torchao.prototype.blockwise_fp8_training.kernels  # noqa: F401

        yield
        return
    functions: dict[str, Callable[..., Any]] = {
        f"triton_fp8_blockwise_{name}({X}": lambda x, size=128, dtype=E4M3, name=name: quantized(name, x, dtype)
        for name in QUANTIZERS
    }
    functions |= {f"triton_fp8_gemm_1x128_{name}({AB}": product for name in ("128x128", "128x1")}
    with torch.library._scoped_library("torchao", "FRAGMENT") as library:
        for schema, function in {**functions, f"blockwise_scaled_mm({RECIPES} -> Tensor": by_recipes}.items():
            library.define(schema)
            for key in ("CPU", "Meta"):
                library.impl(schema.split("(")[0], function, key)
        yield


def op(name: str) -> Any:
    return getattr(torch.ops.torchao, f"triton_fp8_{'gemm_1x128' if 'x' in name else 'blockwise'}_{name}")


class Linear(torch.autograd.Function):
    """torchao's `fp8_blockwise_mm` with `use_triton`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (a, a_s), (b, b_s) = op("act_quant_lhs")(x), op("weight_quant_transposed_rhs")(w)
        return op("128x128")(a, b, a_s, b_s, out_dtype=BF16)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (x, w), g = ctx.saved_tensors, g.contiguous()
        (a, a_s), (b, b_s) = op("act_quant_lhs")(g), op("weight_quant_rhs")(w)
        dx = op("128x128")(a, b, a_s, b_s, out_dtype=BF16)
        (a, a_s), (b, b_s) = op("act_quant_transposed_lhs")(g), op("act_quant_rhs")(x)
        return dx, op("128x1")(a, b, a_s, b_s, out_dtype=BF16)


def inputs(m: int = M) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(m, K, dtype=BF16).requires_grad_(), torch.randn(N, K, dtype=BF16).requires_grad_()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name: str, dtype: torch.dtype, fresh_dynamo: None) -> None:
    x = torch.randn(M, 5 * 128, dtype=dtype)
    with graphs() as found:
        data, scale = torch.compile(lambda x: op(name)(x), fullgraph=True)(x)
    calls = [str(node.target) for node in found[0].nodes if node.op == "call_function"]
    assert not any("torchao" in call or "triton" in call for call in calls)
    expected, expected_scale = quantized(name, x)
    for got, want in ((data, expected), (scale, expected_scale)):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    torch.testing.assert_close(scale, expected_scale, rtol=2.0**-23, atol=0)  # an ulp
    assert (data.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("recipe", [5, 4])
def test_blockwise_scaled_mm(recipe: int, fresh_dynamo: None) -> None:
    x, w = (tensor.detach() for tensor in inputs())
    (a, a_s), (b, b_s) = quantized("act_quant_lhs", x), quantized("weight_quant_transposed_rhs", w)
    if recipe == 4:
        b, b_s = quantized("act_quant_rhs", w.t().contiguous())
        b_s = b_s.t()

    def function(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor) -> Tensor:
        return torch.ops.torchao.blockwise_scaled_mm(a, b, a_s, 4, b_s, recipe, BF16)

    with graphs(), joint_pass.recorded() as record:
        out = torch.compile(function, fullgraph=True)(a, b, a_s, b_s)
    assert [made.target for made in record if made.reason is None] == ["torchao.blockwise_scaled_mm.default"]
    assert_close((out,), (by_recipes(a, b, a_s, 4, b_s, recipe, BF16),))


def test_a_training_step(fresh_dynamo: None) -> None:
    """A tensor that is read along rows and columns is quantized once."""
    with graphs() as found:
        actual, record = compiled_step(Linear.apply, *inputs())
    assert [(made.made, made.shape) for made in record] == [
        ("fp8fn.scaled_mm.default", shape) for shape in ((M, N, K), (M, K, N), (N, K, M))
    ]
    assert_close(actual, step(torch.nn.functional.linear, *inputs()), 0.06)
    assert_expected_inline(
        re.sub(r"\w+ (?=\[)", "", code(found[0])),
        """\
fp8fn.quantize_dual.default(
    [384, 128],
    (1, 128),
    torch.float8_e4m3fn)
fp8fn.quantize_dual.default(
    [256, 128],
    (128, 128),
    torch.float8_e4m3fn)
fp8fn.scaled_mm.default(
    [384, 128],
    [384, 1],
    (1, 128),
    [128, 256],
    [1, 2],
    (128, 128),
    None,
    torch.bfloat16)
fp8fn.quantize_dual.default(
    [384, 256],
    (1, 128),
    torch.float8_e4m3fn)
fp8fn.scaled_mm.default(
    [384, 256],
    [384, 2],
    (1, 128),
    [256, 128],
    [2, 1],
    (128, 128),
    None,
    torch.bfloat16)
fp8fn.scaled_mm.default(
    [256, 384],
    [256, 3],
    (1, 128),
    [384, 128],
    [3, 128],
    (128, 1),
    None,
    torch.bfloat16)""",
    )


def test_tokens_of_any_number(fresh_dynamo: None) -> None:
    _, w = inputs()

    def function(x: Tensor, w: Tensor) -> Tensor:
        (a, a_s), (b, b_s) = op("act_quant_lhs")(x), op("weight_quant_transposed_rhs")(w)
        return op("128x128")(a, b, a_s, b_s, out_dtype=BF16)

    compiled = torch.compile(function, fullgraph=True)
    with (
        graphs(),
        joint_pass.recorded() as record,
        torch._dynamo.config.patch(error_on_recompile=True),
        torch.no_grad(),
    ):
        for m in (4096, 100, 3):
            x = inputs(m)[0].detach()
            if m == 4096:
                torch._dynamo.mark_dynamic(x, 0)
            assert_close((compiled(x, w.detach()),), (x @ w.t(),), 0.06)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"]


def test_other_blocks_are_left_alone(fresh_dynamo: None) -> None:
    a, b = torch.zeros(M, K, dtype=E4M3), torch.zeros(N, K, dtype=E4M3).t()
    a_s, b_s = torch.ones(K // 64, M).t(), torch.ones(N // 64, K // 64).t()
    with graphs(), joint_pass.recorded() as record, contextlib.suppress(Exception):
        # torchao's kernels do not run on a CPU.
        torch.compile(lambda *t: op("128x128")(*t, 64), fullgraph=True)(a, b, a_s, b_s)
    assert [made.reason for made in record] == ["block_size is 64; fp8fn has blocks of 128"]


@pytest.mark.parametrize("driver", ["of this machine", "of a GPU"])
@pytest.mark.parametrize("use_triton", [True, False])
def test_torchaos_linear(use_triton: bool, driver: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmodified model; with a driver PyTorch sees what a kernel writes, without it takes all for written."""
    pytest.importorskip("torchao")
    if not use_triton and torch.__version__ < "2.13":
        pytest.skip("Dynamo does not trace F.scaled_mm in this PyTorch")
    from torchao.prototype.blockwise_fp8_training import linear as module
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver as runtime

    if driver == "of a GPU":
        monkeypatch.setattr(runtime, "_active", type("Driver", (), {
            "get_current_target": lambda self: GPUTarget("cuda", 90, 32), "get_current_device": lambda self: 0,
        })())  # fmt: skip
    monkeypatch.setattr(module, "is_sm_at_least_90", lambda: True)
    (x, _), plain = inputs(), torch.nn.Linear(K, N, bias=False, dtype=BF16)
    model = module.Float8BlockwiseLinear.from_float(plain)
    model.use_triton = use_triton
    actual, record = compiled_step(lambda x, w: model(x.unflatten(0, (3, -1))), x, model.weight)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"] * 3
    assert_close(actual, step(lambda x, w: plain(x.unflatten(0, (3, -1))), x, plain.weight), 0.06)
