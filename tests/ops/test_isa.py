"""AMD's machine code as it is read, the model made of it, the tables of configurations, and `python -m fp8fn isa`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn import cli
from fp8fn.bench import isa as bench
from fp8fn.bench import record
from fp8fn.bench.shapes import LLM84
from fp8fn.cli import isa
from fp8fn.cli.isa import TARGETS, assembly, of_layer, product_launch
from fp8fn.ops.targets import GFX942, GFX950, Target
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.tuning import amd
from fp8fn.ops.tuning.amd_isa import Mix, matrix_of, parse
from fp8fn.ops.tuning.amd_model import (
    PROCESSORS,
    Cost,
    Kernel,
    cycles,
    groups_per_cu,
    kernel_of,
    matrix_cycles,
    product_time,
    waves_per_simd,
)
from support.accuracy import relative_error
from support.operands.scaled import Operands

ARCHS = tuple(TARGETS)
MI300X, MI355X = PROCESSORS["gfx942"], PROCESSORS["gfx950"]

# A prologue, an outer loop whose body holds the loop that multiplies, and an end.
ASSEMBLY = """
kernel:
; %bb.0:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	v_mul_lo_u32 v1, v0, s0
	global_load_dword v2, v1, s[0:1]
.LBB0_1:
	s_waitcnt vmcnt(0)
	buffer_load_dwordx4 v[4:7], v1, s[0:3], 0 offen
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	buffer_load_dwordx4 v[4:7], v1, s[0:3], 0 offen
	buffer_load_ushort v9, v1, s[0:3], 0 offen
	ds_write_b128 v8, v[4:7]
	ds_read2st64_b64 v[4:7], v8 offset1:1
	ds_read_b64_tr_b8 v[4:5], v8
	v_mfma_f32_16x16x128_f8f6f4 v[12:15], v[16:23], v[24:31], 0
	v_mfma_f32_16x16x128_f8f6f4 v[12:15], v[16:23], v[24:31], v[12:15]
	v_pk_fma_f32 v[12:13], v[14:15], v[16:17], v[18:19]
	v_fma_f32 v12, v13, v14, v15
	v_cmp_lt_i32_e32 vcc, v1, v2
	s_cbranch_scc1 .LBB0_2
	v_accvgpr_read_b32 v3, a0
	s_cbranch_vccnz .LBB0_1
	global_store_short_d16_hi v1, v2, s[0:1]
	buffer_store_dwordx2 v[2:3], v1, s[0:3], 0 offen
	s_endpgm
	.vgpr_count:     224
	.agpr_count:     16
	.sgpr_count:     50
	.vgpr_spill_count: 3
	.private_segment_fixed_size: 12
"""


def test_the_loop_that_multiplies_is_the_inner_one() -> None:
    found = parse(ASSEMBLY, lds=49152)
    assert found.loop.names["v_mfma_f32_16x16x128_f8f6f4"] == 2
    assert found.rest.matrix == {}
    assert (found.loop.widths("load"), found.loop.widths("store")) == ({16: 1, 2: 1}, {})
    assert (found.rest.widths("load"), found.rest.widths("store")) == ({16: 1, 4: 1}, {8: 1, 2: 1})
    assert found.loop.lds_bytes == 16 + 16 + 8
    assert found.loop.memory_bytes == 18
    assert (found.loop.vector, found.rest.vector) == (3, 2)
    assert found.rest.vector_issues == 2 + 3  # v_mul_lo_u32
    assert found.whole.count("v_accvgpr") == 1
    assert (found.vgprs, found.agprs, found.sgprs, found.spills, found.scratch) == (224, 16, 50, 3, 12)
    assert found.lds == 49152


def test_a_kernel_that_multiplies_nothing_has_no_loop() -> None:
    text = "\n".join(line for line in ASSEMBLY.splitlines() if "mfma" not in line)
    assert parse(text, lds=0).loop == Mix({})
    with pytest.raises(ValueError, match="no loop that multiplies"):
        kernel_of(parse(text, lds=0), 256, 128, 128, 8, MI355X)


@pytest.mark.parametrize(
    ("name", "processor", "expected"),
    [
        ("v_mfma_f32_16x16x32_fp8_fp8", MI300X, 16), ("v_mfma_f32_32x32x16_fp8_bf8", MI300X, 32),
        ("v_mfma_f32_16x16x16_bf16", MI300X, 16), ("v_mfma_f32_32x32x8_f16", MI300X, 32),
        ("v_mfma_f32_32x32x2_f32", MI300X, 64),
        ("v_mfma_f32_16x16x128_f8f6f4", MI355X, 32), ("v_mfma_f32_32x32x64_f8f6f4", MI355X, 64),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", MI355X, 32), ("v_mfma_f32_16x16x32_fp8_fp8", MI355X, 16),
        ("v_mfma_f32_16x16x32_bf16", MI355X, 16), ("v_mfma_f32_32x32x16_f16", MI355X, 32),
        ("v_mfma_f32_16x16x16_bf16", MI355X, 16),
    ],
)  # fmt: skip
def test_cycles_of_matrix_instructions(name: str, processor: Any, expected: int) -> None:
    matrix = matrix_of(name)
    assert matrix is not None
    assert matrix_cycles(matrix, processor) == expected


def test_rates_give_the_data_sheets_peaks() -> None:
    assert MI300X.peak("fp8") == pytest.approx(2614.9e12, rel=1e-3)
    assert MI300X.peak("bf16") == pytest.approx(1307.4e12, rel=1e-3)
    assert MI355X.peak("f8f6f4") == pytest.approx(5033e12, rel=1e-3)
    assert MI355X.peak("bf16") == pytest.approx(2516.6e12, rel=1e-3)
    assert matrix_of("v_pk_fma_f32") is None


@pytest.mark.parametrize(
    ("vgprs", "lds", "warps", "processor", "waves"),
    [
        (236, 32768, 4, MI300X, 2), (236, 49152, 8, MI300X, 2), (257, 32768, 4, MI300X, 1), (128, 16384, 4, MI300X, 4),
        (96, 32768, 4, MI300X, 2), (96, 32768, 4, MI355X, 5), (24, 0, 4, MI355X, 8), (300, 49152, 8, MI355X, 0),
    ],
)  # fmt: skip
def test_waves_of_a_simd(vgprs: int, lds: int, warps: int, processor: Any, waves: int) -> None:
    assert waves_per_simd(vgprs, lds, warps, processor) == waves


KERNEL = Kernel(128, 128, 128, 4, Cost(512, 256, 24576, 8960), Cost(512, 2000, 24576, 17152), 1.0, 236, 32768)


def test_units_run_beside_each_other_only_with_two_waves() -> None:
    assert cycles(KERNEL.step, 4, 2) == {"matrix": 512, "vector": 256, "LDS": 768, "L1": 560}
    assert cycles(KERNEL.step, 4, 1) == {"matrix + vector": 768, "LDS": 768, "L1": 560}
    assert cycles(KERNEL.step, 8, 1) == {"matrix": 1024, "vector": 512, "LDS": 1536, "L1": 1120}


def test_a_product_takes_its_rounds_of_tiles() -> None:
    assert groups_per_cu(KERNEL, MI355X) == 2
    # 1024 tiles: two rounds of 256 CUs with 2 tiles each, 31 steps in the loop and 1 in the 2000 cycles around it.
    found = product_time((4096, 4096, 4096), KERNEL, 8, 8, MI355X)
    assert found.cu == pytest.approx(1e6 * 2 * 2 * (31 * 768 + 2000) / 2.4e9)
    assert (found.bound, found.us) == ("LDS", found.cu)
    # One tile more is a round more, of one tile whose wave has its SIMD for itself.
    more = product_time((4096 + 1, 128 * 32, 4096), KERNEL, 8, 8, MI355X)
    assert more.cu == pytest.approx(found.cu + 1e6 * (31 * 768 + 2512) / 2.4e9)
    # Few steps leave the output's bytes to decide.
    assert product_time((65536, 65536, 128), KERNEL, 8, 8, replace(MI355X, hbm=1e11)).bound == "HBM"


def test_a_run_of_tiles_for_each_chiplet_reads_less_from_the_cache() -> None:
    apart, together = (product_time((8192, 8192, 8192), KERNEL, 4, xcds, MI355X) for xcds in (1, 8))
    # Dealt out in turn, the programs of a chiplet are 8 apart: of a column of 4 tiles it has every second one.
    assert together.cache < apart.cache
    assert together.cu == apart.cu


def test_names_of_configurations() -> None:
    found = amd.config_of("256x128w8s2n16k2e2hg4x8")
    options = (("matrix_instr_nonkdim", 16), ("kpack", 2), ("waves_per_eu", 2))
    assert found == GemmConfig(256, 128, 8, 2, GROUP=4, HALVES=True, XCDS=8, options=options)
    turned = amd.config_of("128x128w4s2n32t")
    assert (turned.WGRAD_TRANS_STORE, turned.HALVES, turned.GROUP, turned.XCDS) == (True, False, 8, 1)
    with pytest.raises(ValueError, match="'128x128' names no configuration; 256x128w8s2n16h is one"):
        amd.config_of("128x128")
    with pytest.raises(ValueError, match="'300x128w8s2' has 300 as BM, which has to be one of 16, 32, 64, 128, 256"):
        amd.config_of("300x128w8s2")
    with pytest.raises(ValueError, match="'128x128w8s2n4' has 4 as n, which has to be one of 16, 32"):
        amd.config_of("128x128w8s2n4")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_has_every_candidate_and_every_product_of_the_84_layers(arch: str) -> None:
    found = amd.table(arch)
    assert set(found.kernels) == {(product, name) for product, names in amd.CANDIDATES[arch].items() for name in names}
    assert set(found.rows) == set(isa.layer_products())
    assert {(s.M, s.N, s.K) for s in LLM84} == {row[1:] for row in found.rows if row[0] == "forward"}
    for kernel in found.kernels.values():
        assert kernel.lds <= PROCESSORS[arch].lds
        assert waves_per_simd(kernel.vgprs, kernel.lds, kernel.warps, PROCESSORS[arch]) >= 2
        # A step's matrix cycles are the product's operations at the rate of FP8, and no more.
        rate = PROCESSORS[arch].rates["f8f6f4" if arch == "gfx950" else "fp8"]
        assert kernel.step.matrix * kernel.warps * rate == kernel.operations


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_is_what_the_model_makes_of_its_figures(arch: str) -> None:
    for (product, m, n, k), name in amd.table(arch).rows.items():
        assert amd.modelled(product, m, n, k, arch).name == name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_the_84_layers_get_the_tables_configurations(arch: str, product: str) -> None:
    for shape in LLM84:
        sizes = of_layer(product, shape.M, shape.N, shape.K)
        launch = product_launch(product, *sizes, TARGETS[arch])
        name = amd.table(arch).rows[(product, *sizes)]
        assert launch.reason == f"{name} modelled, by amd_{arch}.json"
        assert launch.describe().endswith(f"{arch} ({launch.reason})")
        config = amd.config_of(name)
        assert config.num_stages <= 2
        assert {
            key: launch.constexprs[key] for key in ("BM", "BN", "GROUP", "HALVES", "XCDS", "WGRAD_TRANS_STORE")
        } == {key: getattr(config, key) for key in ("BM", "BN", "GROUP", "HALVES", "XCDS", "WGRAD_TRANS_STORE")}
        assert launch.options == {"num_warps": config.num_warps, "num_stages": 2, **dict(config.options)}
        if product == "dgrad" and config.BM == 256:
            assert launch.options["matrix_instr_nonkdim"] == 16


def test_other_products_get_what_the_model_has() -> None:
    few = product_launch("forward", 16, 4096, 4096, GFX950)
    assert few.constexprs["BM"] == 16
    assert few.reason.endswith(" modelled")
    again = product_launch("forward", 16, 4096, 4096, GFX950)
    assert again.describe() == few.describe()
    # 8 warps spill where loads are of bytes.
    assert product_launch("forward", 4096, 4096, 4096, GFX950).options["num_warps"] == 8
    assert product_launch("forward", 4096, 4093, 4091, GFX950).options["num_warps"] == 4
    # 64-bit offsets take two registers more than this one has.
    assert "128x256w8s2n16k2h" in product_launch("dgrad", 32768, 16384, 106496, GFX942).reason


def test_no_turned_store_with_a_bias() -> None:
    times = amd.candidate_times("wgrad", 4096, 4096, 4096, "gfx950")
    biased = amd.candidate_times("wgrad", 4096, 4096, 4096, "gfx950", bias=True)
    assert {name for name in times if name not in biased} == {name for name in times if "t" in name}
    assert any("t" in name for name in times)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("product", "index"), [("forward", 0), ("dgrad", 0), ("wgrad", 1)])
def test_the_tables_figures_are_the_compilers(arch: str, product: str, index: int) -> None:
    import triton

    found = amd.table(arch)
    if found.origin["triton"] != triton.__version__:
        pytest.skip(f"made with Triton {found.origin['triton']}, this is {triton.__version__}")
    name = amd.CANDIDATES[arch][product][index]
    config = amd.config_of(name)
    code = assembly(product_launch(product, *isa.SHAPE, TARGETS[arch], config))
    made = kernel_of(code, config.BM, config.BN, 128, config.num_warps, PROCESSORS[arch])
    kept = found.kernels[product, name]
    assert made[:4] == kept[:4]
    assert made.step == pytest.approx(kept.step, abs=1e-3)
    assert made.rest == pytest.approx(kept.rest, abs=1e-3)
    assert made[6:] == kept[6:]


@pytest.mark.parametrize(("target", "largest"), [(GFX942, 240.0), (GFX950, 448.0)], ids=["gfx942", "gfx950"])
def test_each_processor_has_its_own_e4m3(target: Target, largest: float) -> None:
    launches = [launch for op in ("quantize", "quantize_dual") for launch in isa.OPS[op](target, 256, 256, 256)]
    assert {launch.constexprs["LARGEST"] for launch in launches if launch.name != "partial_amax"} == {largest}


def test_another_file_is_no_table() -> None:
    with pytest.raises(ValueError, match="no AMD table of format 1: run `python -m fp8fn isa --write-tables`"):
        amd.parse({"format": 2})


@pytest.mark.parametrize("config", [
    GemmConfig(32, 64, 4, 2, GROUP=2, XCDS=8), GemmConfig(32, 64, 4, 2, GROUP=2, XCDS=2, HALVES=True),
    GemmConfig(32, 64, 4, 2, GROUP=4, WGRAD_TRANS_STORE=True), GemmConfig(64, 32, 4, 2, XCDS=4, WGRAD_TRANS_STORE=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("axes", ["KK", "MN"])
def test_the_order_of_tiles_and_the_turned_store_change_no_result(config: GemmConfig, axes: str) -> None:
    operands = Operands(
        200, 330, 300, (1, 128), (128, 1), a_contiguous=axes[0], b_contiguous="N" if axes[1] == "N" else "K"
    )
    plain = operands.product(config=GemmConfig(32, 64, 4, 2))
    assert relative_error(plain, operands.expected()) < 1e-6
    torch.testing.assert_close(operands.product(config=config), plain, rtol=1e-6, atol=1e-5)


def test_a_batch_with_a_run_of_tiles_for_each_chiplet() -> None:
    operands = Operands(70, 130, 256, (1, 128), (128, 128), batch=(3, 3))
    found = operands.product(config=GemmConfig(32, 64, 4, 2, GROUP=2, XCDS=8))
    assert relative_error(found, operands.expected()) < 1e-6


def test_a_turned_store_refuses_a_bias() -> None:
    operands = Operands(64, 64, 128, (1, 128), (128, 1), bias=torch.float32)
    with pytest.raises(ValueError, match="WGRAD_TRANS_STORE computes outᵀ"):
        operands.product(config=GemmConfig(32, 64, 4, 2, WGRAD_TRANS_STORE=True))


def run(*argv: str) -> int:
    try:
        return cli.main(["isa", *argv])
    except SystemExit as leave:
        return int(leave.code or 0)


def test_the_command_prints_and_writes_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run("--arch", "gfx950", "--op", "dgrad", "--compare", "128x128w4s2n32", "--json", str(path)) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "dgrad, 4096,4096,4096, gfx950 (MI355X); cycles are modelled" in lines
    assert lines["matrix"].split() == [
        "matrix",
        "32",
        "v_mfma_f32_16x16x128_f8f6f4",
        "16",
        "v_mfma_f32_32x32x64_f8f6f4",
    ]
    assert lines["spills"].split() == ["spills", "0", "0"]
    assert lines["stores"].split() == ["stores", "8", "16", "B", "8", "16", "B"]
    (found,) = json.loads(path.read_text())["dgrad"]
    assert found["cycles a step"]["matrix"] == 1024
    assert found["operations a byte"]["tile"] == 171
    assert found["peak, TFLOP/s"] == 5033


def test_a_product_names_its_architecture() -> None:
    assert [isa.architecture(name) for name in ("gfx950", "MI300X", "AMD Instinct MI355X")] == [
        "gfx950", "gfx942", "gfx950",
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["isa", "--write-tables"], ["bench", "isa"]], ids=" ".join)
def test_an_old_triton_needs_a_process_for_each_architecture(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", "3.6.0")
    with pytest.raises(SystemExit, match="2"):
        cli.main(command)
    assert "--arch is missing, and Triton before 3.7 compiles for one AMD architecture" in capsys.readouterr().err


def test_a_shape_that_no_kernel_in_triton_serves_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--op", "mx", "--shape", "16,4096,4096") == 0
    assert capsys.readouterr().out.splitlines()[1] == "no kernel in Triton: kernels in HIP serve this shape"


def test_wrong_use_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--op", "gemm") == 2
    assert "'gemm' is not an op; choose from forward, dgrad, wgrad" in capsys.readouterr().err
    assert run("--compare", "large") == 2
    assert "'large' names no configuration" in capsys.readouterr().err
    assert run("--op", "forward", "--compare", "128x128w3s2") == 2
    assert "--compare: '128x128w3s2' has 3 as w, which has to be one of 1, 2, 4, 8, 16" in capsys.readouterr().err
    assert run("--arch", "H100") == 2
    assert "'H100' is no AMD processor; choose from gfx942, gfx950, or name a product" in capsys.readouterr().err
    assert run("--op", "quantize", "--compare", "128x128w4s2n32") == 2
    assert "--compare is for the products forward" in capsys.readouterr().err


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
def test_what_primus_turbo_says_of_its_code_beside_ours(target: Target) -> None:
    found = {row["claim"]: row for row in bench.claims(target)}
    ours = {name: row["ours"] for name, row in found.items()}
    moves = ours["`v_accvgpr` moves of NN at 256x128, 8 warps"]
    assert [int(words.split()[0]) < 405 / 10 for words in moves.split("; ")] == [True, True]
    assert ours["accumulators of one matrix instruction of it"] == "4"
    assert ours["2-byte stores of wgrad"] == "0"
    assert ours["2-byte stores of wgrad into a transposed output"] == "64 stored straight, 0 turned"
    assert ours["masks in a step of K"] == "0"
    assert ours["reads of x for both quantized forms"] == "1"
    assert (found["16-byte stores of wgrad"]["theirs"] is None) == (target is GFX942)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_of_the_committed_results(arch: str) -> None:
    run = record.committed(f"isa-{arch}")
    text = bench.table(run)
    assert "modelled, not measured" in text
    assert text.startswith("| | Primus-Turbo | fp8fn |" if arch == "gfx950" else "| | fp8fn |")
    assert len(run["results"]["layers"]) == 84
    for row in run["results"]["layers"]:
        shape = LLM84[row["id"] - 1]
        for product in bench.PRODUCTS:
            sizes = of_layer(product, shape.M, shape.N, shape.K)
            assert row[product]["config"] == amd.table(arch).rows[(product, *sizes)]
