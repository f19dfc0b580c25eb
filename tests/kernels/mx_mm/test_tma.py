"""The MX product by TMA on Blackwell: interpreted, which problems it takes, and its machine code."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.ops.layout import empty_data, empty_scale, turned
from fp8fn.ops.mx_mm import KERNELS, MX_MM, choose, problem_of
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import GFX950, SM89, SM90, SM100, SM120, Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mx_mm_tma import plan_mx_mm_tma
from fp8fn.ops.tuning.mx import MxConfig
from fp8fn.ops.tuning.mx_triton import accepts_tma, candidates_tma, configure_tma
from support.compilers import assert_no_spills, instructions, skip_frames_of_calls
from support.operands.mx import assert_near, on, operands
from support.products import mx_product, scaled_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
SM103: Final = replace(SM100, arch=103)
BY_TMA: Final = (SM100, SM120)
each_target = pytest.mark.parametrize("target", BY_TMA, ids=lambda target: target.name)


def interpreted(
    a: ScaledTensor, b: ScaledTensor, target: Target, bias: Tensor | None = None, config: MxConfig | None = None,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    out = torch.full((a.shape[-2], b.shape[-1]), 7.0)
    product = scaled_product(a, b, out, target, bias=bias)
    for launch in plan_mx_mm_tma(product, config or candidates_tma(target)[0]):
        launch.constexprs["WIDE"] |= wide  # type: ignore[index]
        launch.interpret()
    return out


@pytest.mark.parametrize(
    "shape", [(70, 1, 1), (65, 40, 31), (128, 128, 128), (129, 257, 300), (300, 136, 1100)], ids=str
)
@each_target
def test_shapes_and_tails(target: Target, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operands(m, n, k)
    bias = torch.randn(n)
    found = interpreted(a, b, target, bias)
    assert_near(found, a, b, bias)
    assert torch.equal(interpreted(a, b, target, bias, wide=True), found)


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
@each_target
def test_types_and_every_configuration(target: Target, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = operands(150, 270, 300, dtypes=dtypes, scale="rceil")
    for config in candidates_tma(target):
        assert_near(interpreted(a, b, target, config=config), a, b)


@each_target
def test_a_nan_stays_in_its_row_or_column(target: Target) -> None:
    """Also one of the last row, beside which the tile is empty."""
    a, b = operands(130, 140, 300)
    clean = interpreted(a, b, target)
    a.data.view(torch.uint8)[129, 299] = 0x7F
    a.scale.view(torch.uint8)[3, 9] = 255
    b.scale.view(torch.uint8)[3, 5] = 255
    found = interpreted(a, b, target)
    touched = torch.zeros(130, 140, dtype=torch.bool)
    touched[[3, 129]] = touched[:, 5] = True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


def test_on_sm100_scales_may_lie_in_any_way() -> None:
    a, b = operands(130, 140, 300)
    other = [ScaledTensor(q.data, turned(q.scale, column_major=q.scale.stride(-1) == 1), q.block) for q in (a, b)]
    assert torch.equal(interpreted(*other, SM100), interpreted(a, b, SM100))


@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,))], ids=str)
@each_target
def test_batches(target: Target, batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Each matrix has the bits of its own product; one is NaN in all that it has, and the others' boxes end before."""
    a, b = operands(130, 140, 300, batch=batch)
    bias = torch.randn(140)
    for q in (a, b):
        if q.ndim == 3:
            q.data.view(torch.uint8)[1] = 0x7F
            q.scale.view(torch.uint8)[1] = 255
    for config in candidates_tma(target):
        out = torch.full((3, 130, 140), 7.0)
        product = scaled_product(a, b, out, target, bias=bias)
        for launch in plan_mx_mm_tma(product, config):
            launch.interpret()
        assert out[1].isnan().all()
        for matrix in (0, 2):
            left, right = (q if q.ndim == 2 else matrix_of(q, matrix) for q in (a, b))
            assert torch.equal(out[matrix], interpreted(left, right, target, bias, config))


def matrix_of(q: ScaledTensor, matrix: int) -> ScaledTensor:
    return ScaledTensor(q.data[matrix], q.scale[matrix], q.block)


@each_target
def test_a_batch_of_one_is_a_matrix(target: Target) -> None:
    a, b = operands(70, 40, 300)
    expected = interpreted(a, b, target)
    lead = [ScaledTensor(q.data[None], q.scale[None], q.block) for q in (a, b)]
    for left, right in ((lead[0], b), (lead[0], lead[1])):
        out = torch.full((1, 70, 40), 7.0)
        product = scaled_product(left, right, out, target)
        assert accepts_tma(problem_of(left.data, right.data, target, left.scale, right.scale)) is None
        for launch in plan_mx_mm_tma(product, candidates_tma(target)[0]):
            launch.interpret()
        assert torch.equal(out[0], expected)


def test_what_it_takes() -> None:
    """The choice for many rows, and why not elsewhere; Hopper's and AMD's choices stay."""
    for target in (SM100, SM103, SM120):
        for m in (65, 4096):
            assert choose(on(target, m=m), {}).name == "triton_tma"
        assert choose(on(target, m=64), {}).name == "triton_scaled"
    for target in (SM89, SM90, GFX950):
        choice = choose(on(target, m=4096), {})
        assert choice.name in ("triton_widened", "triton_scaled")
        assert ("triton_tma", f"{target.name} is none of sm100, sm103, sm120") in choice.refused
    short = choose(on(SM100, m=512, k=1024), {})
    assert short.name == "triton_scaled"
    assert "8 K tiles a multiprocessor are too few for a launch that swizzles the scales" in short.describe()
    for target, sizes in ((SM120, {}), (SM120, {"batch": 2}), (SM100, {"batch": 4})):  # more tiles, more K tiles
        assert choose(on(target, m=512, k=1024, **sizes), {}).name == "triton_tma"
    for change, reason in (
        ({"m": 64}, "M=64 is 64 or below"), ({"k": 0}, "K is 0"),
        ({"in_boxes": False}, "an operand does not lie as bulk copies take it"),
        ({"b_dtype": torch.float8_e4m3fnuz}, "torch.float8_e4m3fnuz has no kernel on sm100"),
    ):  # fmt: skip
        assert accepts_tma(replace(on(SM100, m=512), **change)) == reason  # type: ignore[arg-type]
    apart = replace(on(SM100, m=512), scales_in_boxes=False)
    assert accepts_tma(apart) is None
    assert accepts_tma(replace(apart, target=SM120)) == "the scales do not lie as bulk copies take them"


def test_views_that_tma_cannot_address_take_pointers() -> None:
    a, b = operands(130, 144, 4096)

    def chosen(a: ScaledTensor, b: ScaledTensor, target: Target = SM120) -> str:
        return MX_MM.choose(scaled_product(a, b, torch.empty(a.shape[0], b.shape[1]), target)).name

    assert chosen(a, b) == chosen(a, b, SM100) == "triton_tma"
    rows = ScaledTensor(turned(b.data, column_major=False), b.scale, b.block)
    assert chosen(a, rows) == chosen(a, rows, SM100) == "triton_scaled"
    along = ScaledTensor(a.data, turned(a.scale, column_major=False), a.block)
    assert (chosen(along, b), chosen(along, b, SM100)) == ("triton_scaled", "triton_tma")
    shifted = torch.empty(130 * 4096 + 1, dtype=torch.uint8)[1:].view(130, 4096).view(E4M3)
    assert chosen(ScaledTensor(shifted, a.scale, a.block), b, SM100) == "triton_scaled"


def test_the_log_names_the_product_and_not_the_launch_before_it(caplog: pytest.LogCaptureFixture) -> None:
    a, b = operands(130, 144, 4096)
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        launches = MX_MM.plan(scaled_product(a, b, torch.empty(130, 144), SM100))
    assert [launch.name for launch in launches] == ["swizzle_scales", "mx_mm_tma"]
    assert "mx_mm_tma[BM=128,BN=128,BK=128] grid=4x1x1" in caplog.text


def planned(
    target: Target, m: int, n: int, k: int, *, config: MxConfig | None = None, out: torch.dtype = BF16,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), bias: bool = False, batch: tuple[int, ...] = (),
) -> tuple[TritonLaunch, ...]:  # fmt: skip
    """The launches for operands as the quantizers lay them out."""
    x, w = torch.empty(*batch, m, k, device="meta"), torch.empty(*batch, k, n, device="meta")
    a, b = empty_data(x, (1, 32), dtypes[0]), empty_data(w, (32, 1), dtypes[1])
    scales = empty_scale(a, (1, 32), "e8m0"), empty_scale(b, (32, 1), "e8m0")
    problem = problem_of(a, b, target, *scales)
    assert accepts_tma(problem) is None
    rest: dict[str, Any] = {"bias": x.new_empty(n, dtype=FP32)} if bias else {}
    product: ScaledProduct = mx_product((a, b), scales, x.new_empty(*batch, m, n, dtype=out), target, **rest)
    return plan_mx_mm_tma(product, config or configure_tma(problem))


@pytest.mark.parametrize("target", [SM100, SM103, SM120], ids=lambda target: target.name)
def test_no_candidate_spills(target: Target) -> None:
    """At full tiles, and at partial ones, whose masks take registers; the latter of a batch too."""
    skip_frames_of_calls(target)
    for (m, n, k), batch in (((4096, 4096, 4096), ()), ((4095, 4093, 4001), ()), ((4095, 4093, 4001), (3,))):
        for config in candidates_tma(target):
            for launch in planned(target, m, n, k, config=config, batch=batch):
                assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
@each_target
def test_no_default_spills(target: Target, out: torch.dtype) -> None:
    skip_frames_of_calls(target)
    for m, n, k in ((4096, 4096, 4096), (4096, 4093, 4096), (67, 33, 31)):
        for launch in planned(target, m, n, k, out=out, bias=True, dtypes=(E5M2, E4M3)):
            assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_sm100_copies_scales_to_tensor_memory(batch: tuple[int, ...], tmp_path: Path) -> None:
    """In the loop no thread loads or stores: the only `tcgen05.st` makes the sums zero."""
    swizzle, multiply = planned(SM100, 4096, 4096, 4096, batch=batch)
    axes = 2 + len(batch)
    compiled = multiply.compile()
    ptx = compiled.asm["ptx"]
    assert re.search(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale", ptx)
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx
    assert ptx.count("tcgen05.st.") == 1
    assert {int(rank) for rank in re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", ptx)} == {axes, 4}
    assert not re.search(r"ld\.global|cp\.async\.c[ag]", ptx)
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text.split()[0]} == {"UTCQMMA"}
    for name in ("UTCCP.T.S.4x32dp128bit", f"UTMALDG.{axes}D", "UTMALDG.4D"):
        assert any(name in text for text in sass), name
    # A product waits for the one before it: the operands of two are in use.
    assert re.search(r"wait_barrier .* deps ", compiled.asm["ttgir"])
    assert re.search(r"ld\.global(\.\w+)*\.v\d", swizzle.compile().asm["ptx"])


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_sm120_loads_scales_by_tma(batch: tuple[int, ...], tmp_path: Path) -> None:
    """As the quantizers store them: no launch comes before, and no thread loads from global memory."""
    (multiply,) = planned(SM120, 4096, 4096, 4096, batch=batch)
    axes = 2 + len(batch)
    compiled = multiply.compile()
    ptx = compiled.asm["ptx"]
    scaled = "row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
    assert set(re.findall(r"mma\.sync\.[\w.:]+", ptx)) == {
        f"mma.sync.aligned.m16n8k32.{scaled}.f32.e4m3.e4m3.f32.ue8m0"
    }
    assert {int(rank) for rank in re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", ptx)} == {axes}
    assert not re.search(r"ld\.global|cp\.async\.c[ag]", ptx)
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text} == {"QMMA.SF.16832.F32.E4M3.E4M3.E8"}
    assert any(f"UTMALDG.{axes}D" in text for text in sass)


def test_it_comes_before_the_kernel_by_pointers() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert names.index("triton_few") < names.index("triton_tma") < names.index("triton_scaled")
