"""cuBLASLt's launch of a scaled product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import SM90, SM100
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.rates import NAMED
from support.tuning import expected, operands, quantized

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(("kinds", "recipe"), [(("WHOLE", "WHOLE"), "tensorwise"), (("LINE", "LINE"), "rowwise")])
def test_the_librarys_launch_multiplies(kinds: tuple[str, str], recipe: str) -> None:
    made = quantized(Problem(48, 64, 160, *kinds))
    assert cublaslt.accepts(made.product(SM90)) is None
    launch = replace(cublaslt.plan(made.product(SM90))[0], reason="why")
    assert (launch.name, launch.recipe, launch.describe()) == (
        "torch._scaled_mm", recipe, f"torch._scaled_mm[{recipe}] sm90 (why)",
    )  # fmt: skip
    made.out.fill_(torch.nan)
    launch.run()
    torch.testing.assert_close(made.out.double(), expected(made), rtol=1e-2, atol=2e-2)
    other = quantized(Problem(48, 64, 160, *kinds))
    (out,) = launch.call()(other.a, other.a_scale, other.b, other.b_scale)
    torch.testing.assert_close(out.double(), expected(other), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("b_scale", "recipe"), [("BLOCK", F.ScalingType.BlockWise128x128), ("VECTOR", F.ScalingType.BlockWise1x128)]
)
def test_the_librarys_launch_of_blocks_asks_as_pytorch_does(
    b_scale: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = operands(Problem(256, 512, 1024, "VECTOR", b_scale))
    assert cublaslt.accepts(made.product(SM90)) is None
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *args, **kwargs: seen.append((args, kwargs)))
    cublaslt.plan(made.product(SM90))[0].run()
    scale = made.b_scale if b_scale == "BLOCK" else made.b_scale.mT
    F.scaled_mm(
        made.a, made.b, scale_a=made.a_scale, scale_recipe_a=F.ScalingType.BlockWise1x128, scale_b=scale,
        scale_recipe_b=recipe, output_dtype=torch.bfloat16,
    )  # fmt: skip
    (ours, ours_named), (theirs, theirs_named) = seen
    assert (ours_named, theirs_named) == ({"out": made.out}, {})
    for mine, its in zip(ours, theirs, strict=True):
        if isinstance(mine, list) and mine and isinstance(mine[0], Tensor):
            assert [(x.shape, x.stride()) for x in mine] == [(x.shape, x.stride()) for x in its]
        else:
            assert mine is its or mine == its
    # ATen's checks of ScaledBlas.cpp: (M, K / 128) at (1, M), and b's at (1, K / 128) or (1, N).
    assert (ours[2][0].shape, ours[2][0].stride()) == ((256, 8), (1, 256))
    assert (scale.shape, scale.stride()) == (((8, 4), (1, 8)) if b_scale == "BLOCK" else ((512, 8), (1, 512)))


@pytest.mark.parametrize(
    ("problem", "change", "reason"),
    [
        (Problem(256, 512, 1024), {"target": SM100}, "no recipe of cuBLASLt's"),
        (Problem(256, 512, 1024, batch=2), {}, "a has 3 dimensions and b 3, not 2"),
        (Problem(256, 512, 1024, a_type=torch.float8_e5m2, b_type=torch.float8_e5m2), {}, "both operands are e5m2"),
        (Problem(256, 500, 1024), {}, "K is 1024 and N 500, not both multiples of 16"),
        (Problem(256, 512, 1000), {}, "K is 1000 and N 512, not both multiples of 16"),
        (Problem(256, 512, 1024, out_type=torch.float32), {}, "not 16 bits wide"),
        (Problem(256, 512, 1024, out_type=torch.float16), {}, "is for bfloat16 without a bias"),
        (Problem(256, 512, 1024), {"bias": torch.bfloat16}, "is for bfloat16 without a bias"),
        (Problem(256, 512, 1024, "LINE", "LINE"), {"bias": torch.bfloat16}, "is for bfloat16 without a bias"),
        (Problem(256, 512, 1024, "WHOLE", "WHOLE"), {"bias": torch.float32}, "bias is torch.float32"),
        (Problem(256, 512, 1024, "WHOLE", "WHOLE"), {"bias": torch.bfloat16}, None),
        (Problem(256, 512, 1024, "WHOLE", "WHOLE", out_type=torch.float16), {}, None),
        (Problem(250, 512, 1024), {}, "a_scale has strides (1, 252), not (1, 250)"),
        (Problem(256, 512, 1152), {}, "b_scale has strides (1, 12), not (1, 9) with a multiple of 4"),
        (Problem(256, 512, 1152, "VECTOR", "VECTOR"), {}, None),
        (Problem(256, 512, 1024), {"row_major": True}, "K is not contiguous in both"),
    ],
)
def test_what_the_library_does_not_take(problem: Problem, change: dict[str, Any], reason: str | None) -> None:
    made = operands(problem)
    if "bias" in change:
        made = made._replace(bias=torch.empty(problem.n, dtype=change["bias"], device="meta"))
    if "row_major" in change:
        made = made._replace(b=made.b.contiguous())
    found = cublaslt.accepts(made.product(change.get("target", SM90)))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


@pytest.mark.parametrize(
    ("cuda", "taken"), [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True), (None, True)]
)
@pytest.mark.parametrize(
    "kinds", [("LINE", "LINE"), ("VECTOR", "BLOCK"), ("VECTOR", "VECTOR"), ("WHOLE", "WHOLE")], ids="·".join
)
def test_builds_for_an_older_cuda_have_scales_by_tensor_only(
    kinds: tuple[str, str], cuda: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch._scaled_mm_v2` raises there: "requires cublasLt >= 12.9"."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = cublaslt.accepts(operands(Problem(256, 512, 1024, *kinds)).product(SM90))
    if taken or kinds == ("WHOLE", "WHOLE"):
        assert found is None
    else:
        assert found is not None
        assert f"PyTorch is built for CUDA {cuda}, and cuBLASLt has the scales of" in found
        assert found.endswith("from CUDA 12.9 on")


@pytest.mark.parametrize(("cuda", "kernel"), [("12.8", "cuda"), ("13.0", "cublaslt")])
def test_a_table_names_it_where_the_build_has_it(cuda: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This gradient of a weight is one of those for which the H200's table names cuBLASLt."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    product = replace(operands(Problem(4096, 4096, 8192, "VECTOR", "VECTOR")).product(SM90), chip=NAMED["h200"])
    assert SCALED_MM.choose(product).name == kernel
