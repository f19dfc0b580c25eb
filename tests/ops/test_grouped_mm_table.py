"""Products of groups are tuned: the keys, the candidates, a sweep, and the dispatch that reads its table."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.cli import tune_op
from fp8fn.ops import grouped_gemm, reference
from fp8fn.ops.layout import swap
from fp8fn.ops.operands import Quantized
from fp8fn.ops.scaled_grouped_mm import SCALED_GROUPED_MM
from fp8fn.ops.targets import SM90, Chip, Target, named_target, target_of_chip
from fp8fn.ops.tuning import chain_device, grouped_mm_table, measured
from fp8fn.ops.tuning.compare import geomean
from fp8fn.ops.tuning.grouped_mm_table import FORM, LAYOUTS, GroupsProblem, key_of
from fp8fn.ops.tuning.measured import candidate_name
from support.accuracy import snr
from support.tuning import DriftingBench

H100 = Chip("NVIDIA H100 80GB HBM3", 132)
H200 = Chip("NVIDIA H200", 132)
HOPPER = replace(SM90, multiprocessors=132)
CPU = torch.device("cpu")
SIZES = {layout: (4096, 512, 1024) for layout, found in LAYOUTS.items() if found.of_rows}
SUMMED = (512, 1024, 4096)
ON_HOPPER = [layout for layout, found in LAYOUTS.items() if found.b_axis == "K"]
OTHERS = ("gfx942", "gfx950", "sm89", "sm100", "sm120")


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    measured.forget()
    yield
    measured.forget()


def problem_of(layout: str, groups: int = 4) -> GroupsProblem:
    return GroupsProblem(layout, *SIZES.get(layout, SUMMED), groups, HOPPER)


def tuned(layout: str, fastest: str, chip: Chip = H100) -> Any:
    """The user's table after a sweep in which one candidate is the fastest."""
    key = (layout, *SIZES.get(layout, SUMMED), 4)
    bench = DriftingBench(chip, lambda name: 100.0 if name == fastest else 150.0)
    assert tune_op.sweep(tune_op.OPS["scaled_grouped_mm"], [key], bench, {}).left == 0  # type: ignore[arg-type]
    assert bench.asked == [replace_target(problem_of(layout), target_of_chip(chip))._replace(chip=chip)]
    return measured.users(FORM, chip).rows[key]


def replace_target(problem: GroupsProblem, target: Target) -> GroupsProblem:
    return problem._replace(target=target)


@pytest.mark.parametrize("layout", ON_HOPPER)
def test_what_is_tuned_is_what_the_dispatch_takes(layout: str) -> None:
    problem = problem_of(layout)
    product = replace(problem.product(), chip=H100)
    before = SCALED_GROUPED_MM.choose(product)
    assert before.name == "cuda"
    assert candidate_name("cuda", before.config) == grouped_mm_table.default(problem)
    timed = FORM.candidates(problem)["cuda"]
    assert timed[0] == before.config
    assert len(set(timed)) == len(timed) > 5
    wanted = next(config for config in timed if (config.BM, config.GROUP) != (before.config.BM, before.config.GROUP))
    row = tuned(layout, candidate_name("cuda", wanted))
    assert (row.kernel, row.config) == ("cuda", wanted)
    choice = SCALED_GROUPED_MM.choose(product)
    assert (choice.name, choice.config) == ("cuda", wanted)
    assert choice.source == measured.user_path(FORM, H100).name
    (launch,) = choice.plan(product)
    assert int(dict(launch.kernel.macros)["GROUP"]) == wanted.GROUP  # type: ignore[attr-defined]
    assert choice.source in launch.reason  # type: ignore[attr-defined]
    for other in (replace(product, chip=Chip(H100.name, 66)), replace(problem_of(layout, 8).product(), chip=H100)):
        assert SCALED_GROUPED_MM.choose(other).source != choice.source


@pytest.mark.parametrize(
    ("layout", "chip", "default"),
    [
        ("rows", Chip("AMD Instinct MI300X", 304), "triton"),
        ("turned rows", Chip("AMD Instinct MI355X", 256), "triton"),
        ("tokens", Chip("NVIDIA L40S", 142), "triton"),
        ("squares of a", Chip("NVIDIA B200", 148), "triton_tma"),
    ],
)
def test_elsewhere_the_kernels_in_triton_are_tuned(layout: str, chip: Chip, default: str) -> None:
    target = target_of_chip(chip)
    problem = replace_target(problem_of(layout), target)
    product = replace(problem.product(), chip=chip)
    assert key_of(product) == (layout, *SIZES.get(layout, SUMMED), 4)
    before = SCALED_GROUPED_MM.choose(product)
    assert (before.name, before.config) == (default, None)
    timed, first = (FORM.candidates(problem)[name] for name in ("triton", default))
    assert len(set(timed)) == len(timed) > 10
    (launch,) = before.plan(product)
    assert candidate_name(default, first[0]) == grouped_mm_table.default(problem)
    assert (launch.constexprs["BM"], launch.constexprs["BN"]) == (first[0].BM, first[0].BN)  # type: ignore[attr-defined]
    wanted = next(config for config in timed if config.BM == 64 or config.BM == 256)
    row = tuned(layout, candidate_name("triton", wanted), chip)
    assert (row.kernel, row.config) == ("triton", wanted)
    choice = SCALED_GROUPED_MM.choose(product)
    assert (choice.config, choice.source) == (wanted, measured.user_path(FORM, chip).name)
    (launch,) = choice.plan(product)
    assert launch.constexprs["BM"] == wanted.BM  # type: ignore[attr-defined]
    assert launch.options["num_warps"] == wanted.num_warps
    other = "rows" if layout == "turned rows" else "tokens" if layout == "rows" else "squares"
    odd = problem._replace(**({"k": 1040} if LAYOUTS[layout].of_rows else {"m": 528}))
    for unlike in (
        replace(replace_target(problem_of(other), target).product(), chip=chip),
        replace(odd.product(), chip=chip),
        replace(product, chip=Chip(chip.name, 8)),
    ):
        assert SCALED_GROUPED_MM.choose(unlike).config is None
    with pytest.raises(ValueError, match=r"products are found by multiples of 128 alone"):
        FORM.problem((layout, *odd[1:5]), chip)


@pytest.mark.parametrize("chip", [Chip("NVIDIA B200", 148), Chip("NVIDIA GeForce RTX 5090", 170)], ids=str)
def test_a_row_of_a_kernel_by_tma_serves_every_product_of_its_key(chip: Chip) -> None:
    """Where the key's groups have 86 rows in the mean, some of its products have 43: the table names their kernel."""
    pytest.importorskip("triton")
    key = ("rows", 2048, 512, 1024, 24)
    config = FORM.candidates(FORM.problem(key, chip))["triton_tma"][1]
    fastest = candidate_name("triton_tma", config)
    few = replace(FORM.problem(("rows", 1025, *key[2:]), chip).product(), chip=chip)
    assert key_of(few) == key
    assert SCALED_GROUPED_MM.choose(few).name == "triton"
    bench = DriftingBench(chip, lambda name: 100.0 if name == fastest else 150.0)
    assert tune_op.sweep(tune_op.OPS["scaled_grouped_mm"], [key], bench, {}).left == 0  # type: ignore[arg-type]
    choice = SCALED_GROUPED_MM.choose(few)
    assert (choice.name, choice.config) == ("triton_tma", config)
    assert choice.describe() == f"triton_tma by {measured.user_path(FORM, chip).name}"


@pytest.mark.parametrize("chip", [Chip("NVIDIA B200", 148), Chip("NVIDIA GeForce RTX 5090", 170)], ids=str)
def test_tiles_by_tma_are_not_timed_where_groups_have_few_rows(chip: Chip) -> None:
    """`tune --dry-run` and the choice give one reason."""
    pytest.importorskip("triton")
    key, reason = ("rows", 1024, 512, 1024, 24), "a group has 43 rows in the mean, below 65"
    problem = FORM.problem(key, chip)
    assert "triton_tma" not in FORM.candidates(problem)
    pruned = {name: why for name, why in FORM.pruned(problem).items() if name.startswith("triton_tma")}
    assert len(pruned) >= 2
    assert set(pruned.values()) == {reason}
    lines = [line for line in tune_op.dry_run("scaled_grouped_mm", [key], chip).splitlines() if "triton_tma" in line]
    assert len(lines) == len(pruned)
    assert all(line.endswith(reason) for line in lines)
    assert grouped_mm_table.default(problem) == candidate_name("triton", FORM.candidates(problem)["triton"][0])
    choice = SCALED_GROUPED_MM.choose(replace(problem.product(), chip=chip))
    assert choice.describe().endswith(f"not triton_tma: {reason}")


def codes(arch: str) -> Iterator[tuple[GroupsProblem, str, Any]]:
    """A candidate for each machine code that is timed on an architecture, with its kernel."""
    named, seen = named_target(arch), set()
    assert named is not None
    for layout in LAYOUTS:
        problem = replace_target(problem_of(layout), named[1])
        for kernel, configs in FORM.candidates(problem).items():
            for config in configs:
                if (layout, kernel, config.code) not in seen:
                    seen.add((layout, kernel, config.code))
                    yield problem, kernel, config


def check_compiles(problem: GroupsProblem, name: str, config: Any) -> None:
    from fp8fn.ops.triton.launch import TritonLaunch

    (kernel,) = (kernel for kernel in SCALED_GROUPED_MM.kernels if kernel.name == name)
    (launch,) = kernel.plan(problem.product(), config)
    assert isinstance(launch, TritonLaunch)
    used = launch.resources()
    assert (used.spills, used.scratch) == (0, 0), launch.describe()


@pytest.mark.parametrize("arch", ["sm89", "gfx950"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_candidates_in_triton_multiply(layout: str, arch: str) -> None:
    """A tile of each size by the interpreter, with groups that end within tiles, and rows of none."""
    pytest.importorskip("triton")
    from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm

    named = named_target(arch)
    assert named is not None
    sizes = (600, 256, 256) if layout in SIZES else (256, 256, 600)
    problem = GroupsProblem(layout, *sizes, 2, named[1])
    product = chain_device._product_of_groups(problem, CPU, named[1])
    if layout in SIZES:
        product.group_ends.copy_(torch.tensor([130, 590]))
    (expected,) = SCALED_GROUPED_MM.reference(product)
    tiles = {(config.BM, config.BN): config for config in FORM.candidates(problem)["triton"]}
    assert len(tiles) >= 5
    for config in tiles.values():
        product.out.fill_(torch.nan)
        plan_scaled_grouped_mm(product, config)[0].interpret()
        torch.testing.assert_close(product.out, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("arch", OTHERS)
def test_a_sample_of_the_candidates_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("triton")
    for problem, kernel, config in random.Random(arch).sample(list(codes(arch)), 3):
        check_compiles(problem, kernel, config)


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHERS)
def test_all_candidates_compile_without_spills(arch: str) -> None:
    pytest.importorskip("triton")
    for problem, kernel, config in codes(arch):
        check_compiles(problem, kernel, config)


@pytest.mark.parametrize("layout", ON_HOPPER)
@pytest.mark.parametrize("groups", [1, 4, 60])
def test_tokens_up_to_a_power_of_two_have_one_row(layout: str, groups: int) -> None:
    m, n, k = SIZES.get(layout, SUMMED)
    for tokens in (2200, 3000, 4096):
        sizes = (tokens, n, k) if layout in SIZES else (m, n, tokens)
        key = (layout, 4096, n, k, groups) if layout in SIZES else (layout, m, n, 4096, groups)
        assert key_of(GroupsProblem(layout, *sizes, groups, HOPPER).product()) == key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_a_bench_are_a_product_of_groups(layout: str) -> None:
    """Against float32 matrices, group by group; unequal operands that lie as the problem's do."""
    sizes = (300, 256, 384) if layout in SIZES else (256, 384, 300)
    problem = GroupsProblem(layout, *sizes, 3, HOPPER)
    torch.manual_seed(0)
    product = chain_device._product_of_groups(problem, CPU, HOPPER)
    planned = problem.product()
    for operand, meta in ((product.a, planned.a), (product.b, planned.b)):
        assert (operand.data.stride(), operand.scale.stride()) == (meta.data.stride(), meta.scale.stride())
    assert product.group_ends.tolist() == [100, 200, 300]
    torch.manual_seed(0)
    m, n, k = sizes
    if layout in SIZES:
        a, b = torch.randn(m, k), torch.randn(3, n, k).mT
        expected = torch.cat([a[100 * g : 100 * g + 100] @ b[g] for g in range(3)])
    else:
        a, b = torch.randn(k, m), torch.randn(k, n)
        expected = torch.stack([a[100 * g : 100 * g + 100].mT @ b[100 * g : 100 * g + 100] for g in range(3)])
    check = chain_device.by_reference(SCALED_GROUPED_MM, product)
    check.clear()
    assert check.error() == 1.0
    (found,) = SCALED_GROUPED_MM.reference(product)
    assert snr(found, expected) > 25
    product.out.copy_(found)
    assert check.error() == 0.0


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_the_gradients_products_are_among_the_layouts(
    column_major: bool, square: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []

    def watched(a: Quantized, b: Quantized, offsets: Tensor, *_: Any) -> Tensor:
        seen.append((a.block, b.block))
        return torch.zeros(2, 128, 256)

    monkeypatch.setattr(grouped_gemm, "product", watched)
    ends = torch.tensor([100, 200], dtype=torch.int32)
    x_block = (128, 128) if square else (128, 1)
    x, grad = (
        Quantized(
            *reference.quantize_grouped(torch.randn(200, columns), ends, block, torch.float8_e4m3fn, "fp32"), block
        )
        for columns, block in ((128, x_block), (256, (128, 1)))
    )
    stored = grouped_gemm.Gradients(torch.bfloat16, torch.bfloat16, column_major)
    grouped_gemm.rows_products((None, grad), ends, x, None, stored)
    name = "tokens" if not square else "squares" if column_major else "squares of a"
    _, a_block, b_block, _ = LAYOUTS[name]
    assert seen == [(a_block, b_block)] == [(swap((128, 1)) if name != "squares of a" else (128, 128), b_block)]


def test_keys_of_a_recipe() -> None:
    wanted = tune_op.Wanted(HOPPER, recipe="blockwise_square")
    shape = (3000, 512, 1024)
    assert [key for key in tune_op.keys_of("scaled_grouped_mm", [shape], wanted) if key[-1] == 4] == [
        ("rows", 4096, 512, 1024, 4), ("rows", 4096, 1024, 512, 4), ("squares", 512, 1024, 4096, 4),
    ]  # fmt: skip
    rowwise = tune_op.keys_of("scaled_grouped_mm", [shape], wanted._replace(recipe="rowwise"))
    assert {key[0] for key in rowwise} == {"rowwise"}
    with pytest.raises(ValueError, match="products of groups are tuned for blockwise, blockwise_square, rowwise"):
        tune_op.keys_of("scaled_grouped_mm", [shape], wanted._replace(recipe="tensorwise"))


def test_a_row_of_an_unknown_product_is_refused() -> None:
    tuned("rows", "")
    path = measured.user_path(FORM, H100)
    document = json.loads(path.read_text())
    document["rows"][0][0] = "columns"
    with pytest.raises(ValueError, match=r"row 1 has 'columns' as product, which has to be one of rows, turned rows"):
        measured.parse(FORM, document)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ON_HOPPER)
def test_the_bench_runs_each_candidate_on_a_gpu(layout: str, hopper: Any, caplog: pytest.LogCaptureFixture) -> None:
    from fp8fn.ops.targets import chip_of
    from fp8fn.timing import clock_of

    device = torch.device("cuda", torch.cuda.current_device())
    chip = chip_of(device, hopper)
    assert chip is not None
    problem = GroupsProblem(layout, *SIZES.get(layout, SUMMED), 4, hopper)
    candidates = {candidate_name("cuda", config): ("cuda", config) for config in FORM.candidates(problem)["cuda"]}
    calls, _ = chain_device.groups_bench(device, hopper, chip, clock_of(device)).calls(problem, candidates)
    assert calls.keys() == candidates.keys(), caplog.text


@pytest.mark.parametrize(
    ("chip", "served"),
    [
        (H100, "nvidia-h100-80gb-hbm3-132"),
        (Chip("NVIDIA H800", 132), "nvidia-h100-80gb-hbm3-132"),
        (H200, "nvidia-h200-132"),
        (Chip("NVIDIA GH200 480GB", 132), None),
        (Chip("NVIDIA H100 80GB HBM3", 66), None),
        (Chip("unknown", 132), None),
    ],
    ids=lambda value: value.name if isinstance(value, Chip) else None,
)
def test_the_shipped_table_serves_a_chip_of_another_name_with_the_same_facts(chip: Chip, served: str | None) -> None:
    """The H100's table has 128x128 in bands of 4, the H200's 192x128 without turns; the model takes it in turns."""
    target = replace(SM90, multiprocessors=chip.multiprocessors)
    product = replace(GroupsProblem("rows", 30000, 6144, 7168, 8, target).product(), chip=chip)
    choice = SCALED_GROUPED_MM.choose(product)
    config = choice.config
    expected = {"nvidia-h100-80gb-hbm3-132": (128, 4, True), "nvidia-h200-132": (192, 3, False)}
    assert expected.get(served or "", (192, 3, True)) == (config.BM, config.GROUP, config.TURNS)
    assert choice.source == (f"scaled_grouped_mm-{served}.json" if served else "the model")


@pytest.mark.parametrize(("chip", "turns"), [(H200, False), (H100, True), (Chip("NVIDIA GH200 480GB", 132), True)])
def test_without_a_row_warpgroups_take_turns_as_the_nearest_chips_do(chip: Chip, turns: bool) -> None:
    problems = [GroupsProblem(layout, 5000, 5120, 5120, 3, HOPPER, chip) for layout in ("rows", "squares")]
    choices = [SCALED_GROUPED_MM.choose(problem.product()) for problem in problems]
    assert [(choice.source, choice.config.TURNS) for choice in choices] == [("the model", turns)] * 2
    # By scales of rows and of columns no turns are taken on either.
    assert SCALED_GROUPED_MM.choose(problems[0]._replace(layout="tokens").product()).config.TURNS


def test_without_a_row_the_tile_is_near_the_best_that_was_timed() -> None:
    """By the times of the shipped tables: a tile's place in one product need not be that in products of groups."""
    shares: dict[str, list[float]] = {}
    for chip in (H100, H200):
        (shipped,) = measured.tables(FORM, chip)
        for key, row in shipped.rows.items():
            found = grouped_mm_table.default(GroupsProblem(*key, HOPPER, chip))
            if found in row.times:
                shares.setdefault(f"{key[0]}, {chip.name}", []).append(min(row.times.values()) / row.times[found])
    timed = {f"rows, {H100.name}": 14, f"tokens, {H100.name}": 8, f"rows, {H200.name}": 14}
    assert {where: len(found) for where, found in shares.items()} == timed
    assert all(geomean(found) > 0.98 and min(found) > 0.95 for found in shares.values()), shares
