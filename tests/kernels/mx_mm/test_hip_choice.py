"""The MX problems that go to the kernels in HIP: all shapes of models that decode, refusals, tables, faults."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor, cli
from fp8fn.cli import aot, tune_op
from fp8fn.ops import moe_gemm, mx_mm, reference
from fp8fn.ops.hip import build, envelope, variants
from fp8fn.ops.hip import launch as hip_launch
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.envelope import accepts_gemv, accepts_mfma, accepts_moe, configure_moe, untuned_moe
from fp8fn.ops.hip.launch import HipLaunch, check_parameters
from fp8fn.ops.hip.runtime import HipError
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.mx_mm import KERNELS, MX_MM, _problem, choose, problem_of
from fp8fn.ops.operands import Routing, ScaledProduct
from fp8fn.ops.targets import CPU, GFX942, GFX950, SM90, SM100, Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.tuning.mx import MoeProblem, Problem, Row, Table, shipped
from support.compilers import needs_hip_compiler
from support.mx_tables import mx_table
from support.operands.mx import DENSE, assert_near, on, operands
from support.products import mx_product, quantized, routed_product

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2

NO_TABLE: Final[Table] = {}
# Fewer blocks of 16 columns than 256 compute units, and so much of K that two blocks can share it.
SPLIT: Final = {
    (6144, 2304),
    (6144, 1152),
    (6144, 576),
    (6144, 288),
    (6144, 1536),
    (6144, 768),
    (6144, 384),
    (6144, 192),
}


def meta(m: int, n: int, k: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """`a, a_scale, b, b_scale`, unwritten."""
    a, b = (torch.empty(lines, k, dtype=dtype, device="meta") for lines in (m, n))
    return a, empty_scale(a, (1, 32), "e8m0"), b.mT, empty_scale(b.mT, (32, 1), "e8m0")


def planned(
    m: int, n: int, k: int, table: str | None = None, out: torch.dtype = BF16
) -> tuple[TritonLaunch | HipLaunch, ...]:
    rows = mx_table(table or "")  # none but these: the defaults
    product = unwritten(torch.empty(m, n, dtype=out, device="meta"), k)
    return choose(_problem(product), rows).plan(product)  # type: ignore[return-value]


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("shape", dict.fromkeys(DENSE), ids=str)
def test_every_dense_shape_has_its_kernel_and_configuration(shape: tuple[int, int], m: int) -> None:
    k, n = shape
    choice = choose(on(GFX950, m=m, n=n, k=k), NO_TABLE)
    assert choice.source == "default"
    launches = planned(m, n, k)
    if m < 8 or (m <= 16 and k == 192):  # 192 is no multiple of 128, which an instruction multiplies
        assert (choice.name, choice.config, choice.refused) == ("hip_gemv", HipConfig(rows=m), ())
        (product,) = launches
        assert isinstance(product, HipLaunch)
        columns = {1: 4, 2: 4, 4: 8, 8: 8, 16: 16}[m]
        assert (product.name, product.grid, product.threads) == ("mxfp8_gemv", (-(-n // columns), 1, 1), 256)
    elif m <= 16:
        splits = 2 if shape in SPLIT else 1
        assert (choice.name, choice.config) == ("hip_mfma", HipConfig(n_sub=1, k_splits=splits))
        assert choice.refused == (("hip_gemv", f"M={m} is 8 or more, for the matrix instruction"),)
        product = launches[0]
        assert isinstance(product, HipLaunch)
        assert (product.name, product.grid, product.threads) == ("mxfp8_mfma", (-(-n // 16), splits, 1), 256)
        assert [launch.name for launch in launches[1:]] == ["mxfp8_sum_parts"] * (splits - 1)
    else:
        assert choice.name == "triton_scaled"
        assert choice.refused[:2] == (
            ("hip_gemv", f"M={m} is above 16"),
            ("hip_mfma", f"M={m} is above 16, for tables alone" if k != 192 else "K=192 is no multiple of 128"),
        )
        assert isinstance(launches[0], TritonLaunch)


@pytest.mark.parametrize("m", [3, 5, 6, 7, 9, 11, 15])
def test_other_numbers_of_rows_are_padded(m: int) -> None:
    choice = choose(on(GFX950, m=m, k=96), NO_TABLE)
    assert (choice.name, choice.config) == ("hip_gemv", HipConfig(rows=4 if m < 4 else 8 if m < 8 else 16))
    assert choose(on(GFX950, m=m), NO_TABLE).name == ("hip_gemv" if m < 8 else "hip_mfma")


@pytest.mark.parametrize(
    ("n", "k", "batch", "config"),
    [
        (16 * 255, 4096, 1, HipConfig(n_sub=1, k_splits=2)), (16 * 256, 4096, 1, HipConfig(n_sub=1)),
        (32 * 255, 4096, 1, HipConfig(n_sub=1)), (32 * 256, 4096, 1, HipConfig(n_sub=2)),
        (64 * 256, 4096, 1, HipConfig(n_sub=4)), (64, 4096, 256, HipConfig(n_sub=4)),
        (64, 4095 // 128 * 128, 1, HipConfig()), (64, 16384, 1, HipConfig(k_splits=8)),
        (64, 8192, 1, HipConfig(k_splits=4)), (64, 2**20, 1, HipConfig(k_splits=8)), (1, 128, 1, HipConfig()),
    ],
)  # fmt: skip
def test_blocks_for_every_core_and_parts_no_smaller_than_what_is_in_flight(
    n: int, k: int, batch: int, config: HipConfig
) -> None:
    assert choose(on(GFX950, m=16, n=n, k=k, batch=batch), NO_TABLE).config == config


def test_fewer_cores_are_fewer_parts() -> None:
    problem = replace(on(GFX950, m=16, n=64, k=16384), target=Target("hip", "gfx950", 64, 8))
    assert choose(problem).config == HipConfig(k_splits=2)


LINES: Final = "the K of an operand is not in consecutive bytes from a multiple of 16"
REFUSED: Final = [
    ("gfx942", replace(on(GFX950), target=GFX942), "gfx942 is not gfx950", "gfx942 is not gfx950"),
    ("sm90", on(SM90), "sm90 is not gfx950", "sm90 is not gfx950"),
    ("sm100", on(SM100), "sm100 is not gfx950", "sm100 is not gfx950"),
    ("cpu", on(CPU), "cpu is not gfx950", "cpu is not gfx950"),
    ("a of e5m2", replace(on(GFX950), a_dtype=E5M2), f"{E5M2} is not float8_e4m3fn", f"{E5M2} is not float8_e4m3fn"),
    ("b of e5m2", replace(on(GFX950), b_dtype=E5M2), f"{E5M2} is not float8_e4m3fn", f"{E5M2} is not float8_e4m3fn"),
    ("K 6160", on(GFX950, k=6160), "K=6160 is no multiple of 32", "K=6160 is no multiple of 128"),
    ("K 6176", on(GFX950, k=6176), None, "K=6176 is no multiple of 128"),
    ("K 0", on(GFX950, k=0), "K=0 is no multiple of 32", "K=0 is no multiple of 128"),
    ("M 17", on(GFX950, m=17), "M=17 is above 16", None),
    ("M 65", on(GFX950, m=65), "M=65 is above 16", "M=65 is above 64"),
    ("2 GiB less a byte", on(GFX950, largest=2**31 - 1), None, None),
    ("2 GiB", on(GFX950, largest=2**31), *["a tensor spans 2147483648 bytes, past 32-bit offsets"] * 2),
    (
        "lines",
        on(GFX950, k_lines=False),
        *["the K of an operand is not in consecutive bytes from a multiple of 16"] * 2,
    ),
    ("grid", on(GFX950, n=1, k=128, batch=2**24), *["16777216 blocks are more than a grid has"] * 2),
]


@pytest.mark.parametrize(("problem", "gemv", "mfma"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_every_refusal_leaves_the_next_kernel_and_its_reason(
    problem: Problem, gemv: str | None, mfma: str | None
) -> None:
    """Also where a table names the kernel."""
    assert (accepts_gemv(problem), accepts_mfma(problem)) == (gemv, mfma)
    choice = choose(problem, NO_TABLE)
    reasons = dict(choice.refused)
    if gemv is None:
        assert choice.name == "hip_gemv"
    else:
        assert reasons["hip_gemv"] == gemv
        assert choice.name != "hip_gemv"
    if mfma is not None and gemv is not None:
        assert reasons["hip_mfma"] == mfma
    for name, reason in (("hip_gemv", gemv), ("hip_mfma", mfma)):
        rows = {17: 32, 65: 128}.get(problem.m, problem.m)
        tuned = choose(problem, {(problem.target.name, problem.k, problem.n, rows): Row(name, {})})
        if reason is None:
            assert (tuned.name, tuned.source) == (name, "the table")
        elif problem.batch == 1:
            assert tuned.name != name
            assert tuned.refused[0] == (name, f"the table names it, but {reason}")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda a: a, True), (lambda a: a[:, :96], True), (lambda a: a[:1, :], True), (lambda a: a[::2], True),
        (lambda a: a[:, 16:112], True), (lambda a: a[:, 8:104], False), (lambda a: a[:, ::2], False),
        (lambda a: a.view(torch.uint8).mT.contiguous().mT.view(E4M3), False),
        (lambda a: torch.empty(8, 136, dtype=E4M3)[:, :128], False),
        (lambda a: a[:1].as_strided((1, 128), (3, 1)), True),
        (lambda a: a.expand(2, 8, 128), True), (lambda a: a.as_strided((2, 8, 64), (8, 128, 1)), False),
    ],
)  # fmt: skip
def test_operands_that_are_not_laid_in_lines(change: Any, lines: bool) -> None:
    """Neither `a` nor `b.mT`: they go to Triton's kernels, and nothing is copied."""
    a = torch.empty(8, 128, dtype=E4M3)
    changed = change(a)
    b = torch.empty(32, changed.shape[-1], dtype=E4M3).mT
    assert problem_of(changed, b, GFX950).k_lines is lines
    assert problem_of(b.mT, changed.mT, GFX950).k_lines is lines
    assert (choose(problem_of(changed, b, GFX950)).name == "triton_few") is not lines


def test_what_spans_2_gib() -> None:
    a, a_scale, b, b_scale = meta(16, 2**19, 4096)
    assert problem_of(a, b, GFX950, a_scale, b_scale).largest == 2**31
    assert problem_of(a, b[:, :-1], GFX950, a_scale, b_scale[:, :-1]).largest == 2**31 - 4096
    assert choose(problem_of(a, b[:, :-1], GFX950, a_scale, b_scale)).name == "hip_mfma"
    out = torch.empty(16, 2**19, dtype=BF16, device="meta")
    launches = MX_MM.plan(mx_product((a, b), (a_scale, b_scale), out, GFX950))
    assert isinstance(launches[0], TritonLaunch)
    assert "not hip_mfma: a tensor spans 2147483648 bytes" in launches[0].describe()
    # An output of float32, scales with long strides, and one line whose stride would not fit an argument.
    assert problem_of(*(meta(16, 2**25, 32)[i] for i in (0, 2)), GFX950).largest == 2**31  # type: ignore[misc]
    a, a_scale, b, b_scale = meta(2, 64, 128)
    assert problem_of(a, b, GFX950, a_scale.as_strided((2, 4), (2**31, 1)), b_scale).largest == 2**31 + 4
    assert problem_of(a[:1].as_strided((1, 128), (2**32, 1)), b, GFX950).largest == 2**32


TABLE: Final = """
gfx950,6144,2304,4,hip_mfma,n_sub=4 k_splits=8
gfx950,6144,2304,16,hip_gemv,
gfx950,6144,2304,32,hip_mfma,n_sub=2 k_splits=4
gfx950,6144,2304,64,hip_mfma,n_sub=1 k_splits=1 use_hip=0
gfx950,6144,2304,8,hip_gemv,use_hip=0
gfx950,6144,2304,2,triton_few,SPLITS=2 use_hip=0
gfx942,6144,2304,32,hip_mfma,
"""


@pytest.mark.parametrize(
    ("m", "name", "config", "source"),
    [
        (4, "hip_mfma", HipConfig(n_sub=4, k_splits=8), "the table"),
        (16, "hip_gemv", HipConfig(rows=16), "the table"),
        (32, "hip_mfma", HipConfig(n_sub=2, k_splits=4), "the table"),
        (64, "triton_scaled", None, "default"), (8, "triton_few", None, "default"),
        (2, "triton_few", None, "the table"), (1, "hip_gemv", HipConfig(rows=1), "default"),
    ],
)  # fmt: skip
def test_a_table_names_kernels_and_where_triton_is_faster(
    m: int, name: str, config: HipConfig | None, source: str
) -> None:
    choice = choose(on(GFX950, m=m), mx_table(TABLE))
    assert (choice.name, choice.source) == (name, source)
    if config is not None:
        assert choice.config == config
    if m in (64, 8):
        assert choice.refused[:2] == (("hip_gemv", "the table has use_hip=0"), ("hip_mfma", "the table has use_hip=0"))
    assert mx_table(TABLE)["gfx950", 6144, 2304, 64] == Row("hip_mfma", {"n_sub": 1, "k_splits": 1}, use_hip=False)


# (K, N) of one GPU by projection, at tensor parallelism 1, 2, 4 and 8; gate_up and mlp_down coincide at 1.
AITER: Final = {
    *((6144, 9216 // tp) for tp in (1, 2, 4, 8)), *((8192 // tp, 6144) for tp in (1, 2, 4, 8)),
    *((6144, 6144 // tp) for tp in (1, 2, 4, 8)), *((6144 // tp, 6144) for tp in (1, 2, 4, 8)),
}  # fmt: skip
# Where aiter measured that Triton is as fast (o_proj at TP 4) or faster.
TRITONS: Final = {(6144, 9216), (4096, 6144), (3072, 6144), (2048, 6144)}


def test_the_shipped_table_has_the_shapes_of_aiters() -> None:
    table = shipped()
    assert len(AITER) == 15
    assert set(table) == {("gfx950", *side, m) for side in AITER for m in (1, 2, 4, 8, 16, 32, 64)}
    assert {row.source for row in table.values()} == {"aiter's table"}
    assert {("gfx950", k, n, m) for m, n, k in tune_op.OPS["mx_mm"].shapes} == set(table)  # which tune measures again
    assert {(k, n) for (_, k, n, m), row in table.items() if not row.use_hip} == TRITONS
    assert {m for (_, _, _, m), row in table.items() if not row.use_hip} == {64}
    for (_, _, _, m), row in table.items():
        assert row.kernel == ("hip_gemv" if m < 8 else "hip_mfma")
        assert set(row.options) == (set() if m < 8 else {"n_sub", "k_splits"})
        assert row.options.get("n_sub", 1) in (1, 2, 4)
        assert row.options.get("k_splits", 1) in (1, 2, 4, 8)


@pytest.mark.parametrize("shape", sorted(AITER), ids=str)
def test_shapes_of_the_shipped_table_are_chosen_by_it(shape: tuple[int, int]) -> None:
    k, n = shape
    for m in (1, 2, 4, 8, 16, 32, 64):
        choice = choose(on(GFX950, m=m, n=n, k=k))
        row = shipped()["gfx950", k, n, m]
        if m == 64 and shape in TRITONS:
            assert (choice.name, choice.source) == ("triton_scaled", "default")
            assert choice.refused[:2] == (
                ("hip_gemv", "aiter's table has use_hip=0"),
                ("hip_mfma", "aiter's table has use_hip=0"),
            )
            continue
        assert (choice.name, choice.source, choice.refused) == (row.kernel, "aiter's table", ())
        config = HipConfig(rows=m) if m < 8 else HipConfig(**row.options)
        assert choice.config == config
        launches = choice.plan(unwritten(torch.empty(m, n, dtype=BF16, device="meta"), k))
        assert [launch.name for launch in launches[1:]] == ["mxfp8_sum_parts"] * (config.k_splits > 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("m", "name", "config"),
    [
        (3, "hip_gemv", HipConfig(rows=4)), (7, "hip_gemv", HipConfig(rows=8)), (8, "hip_mfma", HipConfig(k_splits=2)),
        (9, "hip_mfma", HipConfig(k_splits=8)), (16, "hip_mfma", HipConfig(k_splits=8)),
        (17, "hip_mfma", HipConfig(n_sub=2, k_splits=8)), (33, "hip_mfma", HipConfig(n_sub=2, k_splits=4)),
        (64, "hip_mfma", HipConfig(n_sub=2, k_splits=4)), (65, "triton_scaled", None),
    ],
)  # fmt: skip
def test_numbers_of_rows_between_those_of_the_shipped_table(m: int, name: str, config: HipConfig | None) -> None:
    choice = choose(on(GFX950, m=m, n=1536, k=6144))
    assert choice.name == name
    if config is not None:
        assert choice.config == config
    other = choose(on(GFX950, m=m, n=1536, k=6144, batch=2))
    assert other.source == "default"
    for target in (GFX942, SM90, SM100):
        assert choose(on(target, m=m, n=1536, k=6144)).source == "default"


def test_a_table_of_another_architecture_is_no_way_in() -> None:
    problem = replace(on(GFX950, m=32), target=GFX942)
    assert choose(problem, mx_table(TABLE)).refused[0] == ("hip_mfma", "the table names it, but gfx942 is not gfx950")


def test_the_options_of_a_row_reach_the_launch() -> None:
    product, summation = planned(32, 2304, 6144, "gfx950,6144,2304,32,hip_mfma,n_sub=2 k_splits=4")
    assert product.options == {"TILES_M": 2, "N_SUB": 2, "SPLITS": 4}
    assert product.grid == (72, 4, 1)
    assert summation.options == {"PARTS": 4}
    with pytest.raises(ValueError, match="n_sub=3"):
        planned(32, 2304, 6144, "gfx950,6144,2304,32,hip_mfma,n_sub=3")


@needs_hip_compiler
def test_plans_compile_to_kernels_that_take_their_arguments() -> None:
    launches = [
        *planned(1, 2304, 6144), *planned(7, 100, 96), *planned(16, 100, 96), *planned(16, 2304, 6144),
        *planned(64, 2304, 6144, "gfx950,6144,2304,64,hip_mfma,n_sub=4 k_splits=4", FP32), [*variants.routed(BF16)][-1],
    ]  # fmt: skip
    names = [*["mxfp8_gemv"] * 3, *["mxfp8_mfma", "mxfp8_sum_parts"] * 2, "mxfp8_moe"]
    assert [launch.name for launch in launches] == names
    for launch in launches:
        assert isinstance(launch, HipLaunch)
        code = launch.compile()
        assert code[:4] == b"\x7fELF"
        check_parameters(code, launch.name, launch.format)
        assert launch.resources().scratch == 0


@needs_hip_compiler
@pytest.mark.parametrize("entry", ["mxfp8_gemv", "mxfp8_mfma", "mxfp8_sum_parts", "mxfp8_moe"])
def test_no_configuration_spills(entry: str) -> None:
    launches = {launch.kernel: launch for launch in (*variants.dense(BF16), *variants.routed(BF16))}
    for kernel, launch in launches.items():
        if kernel.entry == entry and ("BIAS", "Element::BF16") not in kernel.macros:
            check_parameters(launch.compile(), entry, launch.format)
            found = launch.resources()
            assert (found.spills, found.scratch) == (0, 0)
            assert found.registers <= 256  # two blocks of four waves on a compute unit


def test_all_that_a_table_can_name_is_compiled_ahead() -> None:
    kernels = set(variants.kernels(BF16))
    assert {kernel.arch for kernel in kernels} == {"gfx950"}
    bias = torch.empty(2304, dtype=BF16, device="meta")
    out = {m: torch.empty(m, 2304, dtype=BF16, device="meta") for m in (1, 3, 8, 16, 33, 64)}
    for k in (96, 640, 6144):
        for m, n_sub, splits in ((m, n, s) for m in out for n in (1, 2, 4) for s in (1, 2, 4, 8)):
            for name, options in (("hip_gemv", ""), ("hip_mfma", f"n_sub={n_sub} k_splits={splits}")):
                table = mx_table(f"gfx950,{k},2304,{m},{name},{options}")
                for added in (None, bias):
                    product = replace(unwritten(out[m], k), bias=added)
                    launches = choose(_problem(product), table).plan(product)
                    assert {launch.kernel for launch in launches if isinstance(launch, HipLaunch)} <= kernels


def test_aot_compiles_every_kernel_in_hip_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "unavailable", lambda: None)
    monkeypatch.setattr(build, "_compile_by_first", lambda kernel: repr(kernel).encode())
    count = len(variants.kernels(torch.float16))
    for new in (count, 0):
        assert cli.main(["aot", "--arch", "gfx950", "--dtype", "float16"]) == 0
        said = capsys.readouterr().out
        assert "every kernel in HIP for gfx950, with outputs in float16" in said
        assert f"{count} kernels, {new} compiled now, {count - new} there before, in {tmp_path / 'hip'}" in said
    contents = {file.read_bytes()[:-32].decode() for file in (tmp_path / "hip").iterdir()}
    assert contents == {repr(kernel) for kernel in variants.kernels(torch.float16)}


def test_aot_for_gfx950_needs_a_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.build, "unavailable", lambda: "no compiler for HIP is here")
    with pytest.raises(SystemExit) as leave:
        cli.main(["aot", "--arch", "gfx950"])
    assert leave.value.code == 2
    assert "no compiler for HIP is here" in capsys.readouterr().err


@pytest.fixture
def gfx950(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The CPU passes for a gfx950: Triton's kernels are interpreted; the names of all that are launched."""
    launched: list[str] = []

    def interpret(launch: TritonLaunch) -> None:
        launched.append(launch.name)
        launch.interpret()

    for module in (mx_mm, moe_gemm):
        monkeypatch.setattr(module.targets, "target_of", lambda device: GFX950)
    monkeypatch.setattr(TritonLaunch, "run", interpret)
    monkeypatch.setattr(HipLaunch, "run", lambda launch: launched.append(launch.name))
    monkeypatch.setattr(HipLaunch, "fault", lambda launch: None)
    faults = mx_mm.MX_MM.faults, moe_gemm.MOE_GEMM.faults
    with patch.dict(faults[0], clear=True), patch.dict(faults[1], clear=True):
        yield launched


def unwritten(out: Tensor, k: int) -> ScaledProduct:
    a, a_scale, b, b_scale = meta(*out.shape, k)
    return mx_product((a, b), (a_scale, b_scale), out, GFX950)


def product(a: ScaledTensor, b: ScaledTensor) -> Tensor:
    return mx_mm.mx_mm_kernel(a.data, a.scale, b.data, b.scale, None, FP32)


def test_the_op_launches_the_kernels_in_hip_and_triton_serves_the_rest(gfx950: list[str]) -> None:
    product(*operands(4, 48, 128))
    product(*operands(16, 48, 4096))
    assert gfx950 == ["mxfp8_gemv", "mxfp8_mfma", "mxfp8_sum_parts"]
    gfx950.clear()
    for m, k in ((4, 100), (32, 128)):
        a, b = operands(m, 48, k)
        assert_near(product(a, b), a, b)
    assert gfx950 == ["mx_mm", "mx_mm_scaled"]


def test_a_kernel_that_cannot_be_loaded_is_tried_once_and_the_next_of_the_list_serves(
    gfx950: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def fault(launch: HipLaunch) -> str | None:
        asked.append(launch.name)
        return "mxfp8_mfma can't be loaded" if launch.name == "mxfp8_mfma" else None

    monkeypatch.setattr(HipLaunch, "fault", fault)
    a, b = operands(16, 48, 128)
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        for _ in range(2):
            assert_near(product(a, b), a, b)
    assert gfx950[0] == "mx_mm"
    assert "mxfp8_mfma" not in gfx950
    assert asked == ["mxfp8_mfma"]
    assert "triton_few by default; not hip_gemv: M=16 is 8 or more, for the matrix instruction; not hip_mfma: " in (
        caplog.text
    )
    assert "not hip_mfma: mxfp8_mfma can't be loaded" in caplog.text
    product(*operands(4, 48, 128))  # the other kernel is none the worse
    assert gfx950[-1] == "mxfp8_gemv"


def test_without_a_compiler_triton_serves_and_the_log_says_so_once(
    gfx950: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HipLaunch, "fault", lambda launch: hip_launch._fault(launch.kernel, launch.format, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    for module in (build, hip_launch):
        monkeypatch.setattr(module, "unavailable", lambda: "no compiler for HIP is here")
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    caches = (hip_launch._fault, hip_launch._warn)
    for cached in caches:
        cached.cache_clear()
    for _ in range(2):
        for m in (2, 4, 16):
            a, b = operands(m, 48, 128)
            assert_near(product(a, b), a, b)
        routed(*experts(), *LAYOUT)
    for cached in caches:
        cached.cache_clear()
    assert set(gfx950) == {"mx_mm", "moe_gemm"}
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage() == "Triton's kernels serve where kernels in HIP would: no compiler for HIP is here"


def test_an_error_of_a_launch_is_raised(gfx950: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launch: HipLaunch) -> None:
        raise HipError(f"launching {launch.name}: out of memory (2)")

    monkeypatch.setattr(HipLaunch, "run", fail)
    with pytest.raises(HipError, match="launching mxfp8_gemv: out of memory"):
        product(*operands(4, 48, 128))
    with pytest.raises(HipError, match="launching mxfp8_moe: out of memory"):
        routed(*experts(), *LAYOUT)


def test_what_no_kernel_takes_is_an_error_before_any_launch(gfx950: list[str]) -> None:
    """The op's errors name the argument; a plan that no dispatch makes is an error too."""
    a, b = operands(4, 48, 128)
    for wrong, error, words in (
        (b.data.float().bfloat16(), TypeError, r"mx_mm: b: data has dtype torch\.bfloat16; it must be an FP8 type"),
        (b.data[:64], ValueError, r"mx_mm: b: scale has shape"),
    ):
        with pytest.raises(error, match=words):
            mx_mm.mx_mm_kernel(a.data, a.scale, wrong, b.scale)
    with pytest.raises(TypeError, match=r"b_scale has dtype torch\.float32; it must be float8_e8m0fnu"):
        mx_mm.mx_mm_kernel(a.data, a.scale, b.data, b.scale.float())
    out = torch.empty(17, 48, device="meta")
    for kernel, config, words in (
        (KERNELS[0], HipConfig(rows=16), "rows=16 and M=17"), (KERNELS[1], HipConfig(n_sub=3), "n_sub=3"),
        (KERNELS[1], HipConfig(k_splits=5), "k_splits=5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            kernel.plan(unwritten(out, 128), config)
    for kernel, config in ((KERNELS[0], HipConfig(rows=16)), (KERNELS[1], HipConfig())):
        with pytest.raises(ValueError, match="K=100; it must be a multiple of 32"):
            kernel.plan(unwritten(out[:16], 100), config)
    assert not gfx950


def routing(**changes: Any) -> MoeProblem:
    return replace(MoeProblem(ids=4, n=1536, k=6144, experts=64, tiles=4, block_m=16, target=GFX950), **changes)


MOE: Final = [
    ("as it is", {}, None, None),
    ("gfx942", {"target": GFX942}, "gfx942 is not gfx950", None),
    ("sm90", {"target": SM90}, "sm90 is not gfx950", None),
    ("blockwise", {"a_block": (1, 128)}, "blocks of (1, 128) are not those of MX", None),
    ("a of e5m2", {"a_dtype": E5M2}, f"{E5M2} is not float8_e4m3fn", None),
    ("w of e5m2", {"w_dtype": E5M2}, f"{E5M2} is not float8_e4m3fn", None),
    ("K 6128", {"k": 6128}, "K=6128 is no multiple of 32", None),
    ("K 384", {"k": 384}, None, None),
    ("lines", {"k_lines": False}, LINES, None),
    ("no EP", {"experts": 256, "largest": 256 * 1536 * 6144}, "a tensor spans 2415919104 bytes, past 32-bit", None),
    ("no EP, down", {"experts": 256, "k": 768, "n": 6144, "largest": 256 * 768 * 6144}, None, None),
    ("grid", {"tiles": 2**20, "n": 128}, "16777216 blocks are more than a grid has", None),
    ("16 ids", {"ids": 16}, None, None),
    ("17 ids", {"ids": 17}, None, "17 ids are above 16, for K=6144 and 64 experts"),
    ("64 ids, EP2", {"ids": 64, "experts": 128}, None, None),
    ("65 ids, EP2", {"ids": 65, "experts": 128}, None, "65 ids are above 64, for K=6144 and 128 experts"),
    ("down, 8 ids", {"ids": 8, "k": 768, "n": 6144}, None, None),
    ("down, 9 ids", {"ids": 9, "k": 768, "experts": 128}, None, "9 ids are above 8, for K=768 and 128 experts"),
]


@pytest.mark.parametrize(("changes", "refused", "untuned"), [row[1:] for row in MOE], ids=[row[0] for row in MOE])
def test_routed_tokens(changes: dict[str, Any], refused: str | None, untuned: str | None) -> None:
    problem = routing(**changes)
    reason = accepts_moe(problem)
    assert reason == refused or (refused is not None and reason is not None and reason.startswith(refused))
    assert untuned_moe(problem) == untuned


@pytest.mark.parametrize(
    ("changes", "block_n"),
    [({}, 16), ({"ids": 2}, 8), ({"tiles": 2}, 8), ({"ids": 8, "tiles": 8, "n": 512}, 16), ({"n": 1000}, 8)],
    ids=str,
)
def test_columns_of_a_block_of_routed_tokens(changes: dict[str, Any], block_n: int) -> None:
    assert configure_moe(routing(**changes)) == HipConfig(block_n=block_n)


LAYOUT: Final = fp8fn.sort_tokens(torch.tensor([[0, 2], [1, 2]]), 3, 16)


def experts(k: int = 128, rows: int = 2) -> tuple[ScaledTensor, ScaledTensor]:
    a = fp8fn.quantize(torch.randn(rows, k), (1, 32), scale="e8m0")
    return a, fp8fn.quantize(torch.randn(3, 40, k), (1, 32), scale="e8m0").mT


def routed(a: ScaledTensor, w: ScaledTensor, *layout: Tensor) -> Tensor:
    operands = (a.data, a.scale, a.block, w.data, w.scale, w.block)
    return moe_gemm.moe_gemm_kernel(*operands, *layout, top_k=2, a_div=2, out_dtype=FP32)  # type: ignore[misc]


def test_routed_tokens_go_to_the_kernel_in_hip_or_to_triton(gfx950: list[str]) -> None:
    routed(*experts(), *LAYOUT)
    assert gfx950 == ["mxfp8_moe"]
    a, w = experts(100)
    found = routed(a, w, *LAYOUT)
    expected = reference.moe_gemm(quantized(a), quantized(w), Routing(*LAYOUT), 2, None, FP32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert gfx950[1:] == ["moe_gemm"]


def test_a_wrong_length_is_an_error_before_any_launch(gfx950: list[str]) -> None:
    with pytest.raises(ValueError, match="sorted_token_ids has 47 ids and expert_ids 3 tiles"):
        routed(*experts(), LAYOUT[0][:-1], *LAYOUT[1:])
    assert not gfx950


def test_routed_tokens_without_the_kernel_in_hip(gfx950: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fault(launch: HipLaunch) -> str:
        asked.append(launch.name)
        return "mxfp8_moe can't be loaded"

    monkeypatch.setattr(HipLaunch, "fault", fault)
    a, w = experts()
    for _ in range(2):
        routed(a, w, *LAYOUT)
    assert asked == ["mxfp8_moe"]
    assert gfx950 == ["moe_gemm"] * 2
    out = torch.empty(4, 40)
    moe_gemm.MOE_GEMM.faults["hip_moe"] = "of a reason"
    (launch,) = moe_gemm.MOE_GEMM.plan(routed_product(a, w, LAYOUT, 2, out, GFX950))
    assert isinstance(launch, TritonLaunch)
    assert launch.reason.startswith("triton_moe by default; not hip_moe: of a reason; not cuda_moe: ")


def test_the_names_say_which_kernels_are_in_hip() -> None:
    assert [kernel.name for kernel in KERNELS if kernel.backend == "hip"] == ["hip_gemv", "hip_mfma"]
    assert (envelope.GEMV_ROWS, envelope.MFMA_ROWS, envelope.MOST_BYTES) == (16, 64, 2**31 - 1)
