"""Times in `explain`, and the products that stay as they are because FP8 is estimated to be slower."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fp8fn
from fp8fn.lowering import costs, recipe_pass
from fp8fn.lowering import explain as module
from fp8fn.lowering.explanation import Explanation
from fp8fn.ops import targets
from fp8fn.ops.recipe import BLOCKWISE_SQUARE, MXFP8
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.estimate import Step, Times, linear_times
from fp8fn.ops.tuning.rates import NAMED
from fp8fn.site import Site
from fp8fn.weights.form import Form
from fp8fn.weights.fp8_weight import weight_of

H200 = NAMED["sm90"]
FP8 = torch.float8_e4m3fn
FAST = Times(Step(10.0, 20.0), Step(20.0, 40.0), "a table")
SLOW = Times(Step(20.0, 40.0), Step(10.0, 20.0), "a table")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """No tables but the shipped ones."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    table.forget()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products on the CPU are estimated as if it were an H200."""
    monkeypatch.setattr(recipe_pass, "chip_for", lambda device, target=None: H200)


class Pair(nn.Module):
    """A product that is worth it at 8192 rows, and one that is not; in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16)
        self.narrow = nn.Linear(2048, 512, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x))


def meta(rows: int) -> tuple[Pair, Tensor]:
    """Sizes as in life, with nothing computed."""
    with torch.device("meta"):
        return Pair(), torch.empty(rows, 4096, dtype=torch.bfloat16)


def reasons(model: Any, *args: Any, **options: Any) -> list[str | None]:
    return [row.reason for row in fp8fn.explain(model, *args, show=False, **options).rows]


def unwrapped(explanation: Explanation) -> list[str]:
    return str(explanation).replace("\n    ", " ").splitlines()


def test_estimates_for_a_target() -> None:
    model, x = meta(8192)
    explanation = fp8fn.explain(model, x, target="sm90", where="*", show=False)
    assert [row.estimated for row in explanation.rows] == [
        linear_times(8192, 2048, 4096, BLOCKWISE_SQUARE, H200),
        linear_times(8192, 512, 2048, BLOCKWISE_SQUARE, H200),
    ]  # fmt: skip
    assert all(row.kernel is not None and " sm90 (" in row.kernel for row in explanation.rows)
    assert explanation.chip == "NVIDIA H200"
    head, _, kernel, *lines, count, unit, step = unwrapped(explanation)
    assert {kernel} == {row.brief for row in explanation.rows}
    assert "BM=" not in kernel
    assert "estimated, µs" in head
    assert "measured" not in head
    for row, line in zip(explanation.rows, lines, strict=True):
        times = row.estimated
        assert times is not None
        cell = f"{times.bf16.combined:.0f} → {times.fp8.combined:.0f} ({times.speedup:.2f}x)"
        assert line.index(cell) == head.index("estimated, µs")
    assert count == "2 of 2 products in FP8, recipe blockwise_square, 1 graph(s)"
    assert unit == "µs: forward and backward, bf16 → FP8 with quantization, estimated for NVIDIA H200"
    whole = explanation.step
    assert whole is not None
    assert (whole.products, whole.unknown, whole.backward) == (2, 0, True)
    assert step == f"whole step: {whole.describe()}; the rest of the step is not counted"


IN_FLOAT32 = "timed products are computed in float32, which takes longer than bf16: their gain is larger than shown"


@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_float32_model_is_said_to_be_compared_with_bf16(autocast: bool, dtype: torch.dtype) -> None:
    """Quantizers read four bytes an element in either case; under autocast products are in bf16, as shown."""
    x = torch.zeros(16, 4096)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        explanation = fp8fn.explain(Pair().float(), x, target="H200", where="*", show=False)
    assert [row.dtype for row in explanation.rows] == [dtype, dtype]
    assert [row.estimated for row in explanation.rows] == [
        linear_times(16, 2048, 4096, BLOCKWISE_SQUARE, H200, itemsize=4),
        linear_times(16, 512, 2048, BLOCKWISE_SQUARE, H200, itemsize=2 if autocast else 4),
    ]  # fmt: skip
    said = [line for line in unwrapped(explanation) if "float32" in line]
    assert said == ([] if autocast else [f"2 of 2 {IN_FLOAT32}"])


def test_a_product_in_float32_among_others_is_counted() -> None:
    """A product without times is not compared with anything."""
    model, x = meta(8192)
    rows = fp8fn.explain(model, x, target="H200", where="*", show=False).rows
    assert [row.dtype for row in rows] == [torch.bfloat16, torch.bfloat16]
    wide = replace(rows[0], dtype=torch.float32)
    lines = unwrapped(Explanation((wide, rows[1], replace(wide, estimated=None)), "blockwise_square", 1))
    assert lines[-1] == f"1 of 2 {IN_FLOAT32}"


WITHOUT_COMPILERS = """
import sys
sys.modules["triton"] = None  # import triton raises ModuleNotFoundError
import torch, fp8fn
from fp8fn.ops.cuda.runtime import nvrtc
nvrtc.unavailable = lambda: "no NVRTC"
model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device="meta")
x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
for target in ("H200", "gfx950"):
    print(fp8fn.explain(model, x, target=target, show=False).rows[0].kernel)
"""


def test_a_target_where_neither_nvrtc_nor_triton_is_installed() -> None:
    """The compilers of the target's machine decide, not those of this one: CPU builds of torch bring neither."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILERS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    hopper, amd = run.stdout.splitlines()
    assert hopper.startswith("scaled_mm[")
    assert " sm90 (cuda by " in hopper
    assert amd == "a kernel in Triton, which is not installed here: pip install triton names it"


def test_the_kernel_of_a_batch_invariant_recipe() -> None:
    """As many blocks of threads share K for few rows as for many, which the plain recipe divides otherwise."""

    def split(rows: int, recipe: fp8fn.Recipe) -> str:
        with torch.device("meta"):
            layer = nn.Linear(14336, 4096, bias=False, dtype=torch.bfloat16)
            x = torch.empty(rows, 14336, dtype=torch.bfloat16)
        (row,) = fp8fn.explain(layer, x, recipe=recipe, target="h200", where="*", show=False).rows
        (found,) = re.findall(r"SPLIT=\d", str(row.kernel))
        return str(found)

    invariant = fp8fn.Recipe(batch_invariant=True)
    assert split(64, invariant) == split(4096, invariant) != "SPLIT=1"
    assert split(64, fp8fn.BLOCKWISE) != split(4096, fp8fn.BLOCKWISE)


def test_the_share_of_operations() -> None:
    model, x = meta(8192)
    explanation = fp8fn.explain(model, x, target="sm90", show=False)
    assert [row.reason is None for row in explanation.rows] == [True, False]
    assert [row.operations for row in explanation.rows] == [2.0 * 8192 * 2048 * 4096, 2.0 * 8192 * 512 * 2048]
    assert explanation.share == pytest.approx(8 / 9)
    assert "\n88.9 % of the operations of all products are in FP8\n" in str(explanation)

    def batched(x: Tensor) -> Tensor:
        return x @ x.mT

    (row,) = fp8fn.explain(batched, torch.empty(3, 512, 256, device="meta"), show=False).rows
    assert row.operations == 3 * 2.0 * 512 * 512 * 256


def test_a_transformers_model_with_its_cache_on_meta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    assert config.use_cache
    with torch.device("meta"):
        model, tokens = transformers.LlamaForCausalLM(config).bfloat16(), torch.zeros(1, 32, dtype=torch.long)
    for keywords in ({}, {"use_cache": True}):
        explanation = fp8fn.explain(model, tokens, where="*", show=False, **keywords)
        assert [row.op for row in explanation.rows] == ["linear"] * 8
        assert explanation.graphs == 1
        assert model.config.use_cache


def test_a_config_that_can_not_be_written_is_left_alone() -> None:
    model = nn.Linear(512, 512)

    class Frozen:
        use_cache = property(lambda self: True)

    model.config = Frozen()  # type: ignore[assignment]
    assert fp8fn.explain(model, torch.randn(32, 512), show=False).substituted == 1


def test_the_caches_of_both_halves_on_meta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2)
    with torch.device("meta"):
        model, tokens = transformers.T5ForConditionalGeneration(config), torch.zeros(1, 8, dtype=torch.long)
    explanation = fp8fn.explain(model, input_ids=tokens, decoder_input_ids=tokens, show=False)
    assert len(explanation.rows) > 10
    assert model.decoder.config.use_cache


def test_no_column_where_there_is_nothing_to_show() -> None:
    model, x = meta(8192)
    for options in ({}, {"target": "sm90", "recipe": MXFP8}):
        explanation = fp8fn.explain(model, x, where="*", show=False, **options)
        assert [row.estimated for row in explanation.rows] == [None, None]
        assert explanation.chip is None
        assert "µs" not in str(explanation)


@pytest.mark.parametrize(
    ("target", "arch", "chip"),
    [
        ("h100", "sm90", "NVIDIA H100 80GB HBM3"), ("H200", "sm90", "NVIDIA H200"), ("SM90", "sm90", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "sm90", "NVIDIA H100 80GB HBM3"), ("h20", "sm90", "NVIDIA H20"),
        ("AMD Instinct MI300X", "gfx942", None), ("mi325x", "gfx942", None), ("MI355X", "gfx950", None),
        ("L40S", "sm89", None), ("NVIDIA GeForce RTX 4090", "sm89", None), ("rtx-4090", "sm89", None),
        ("b200", "sm100", None), ("rtx 5090", "sm120", None), ("gfx950", "gfx950", None),
    ],
)  # fmt: skip
def test_a_target_by_its_products_name(target: str, arch: str, chip: str | None, fresh_dynamo: None) -> None:
    model, x = meta(8192)
    explanation = fp8fn.explain(model.wide, x, target=target, where="*", show=False)
    (row,) = explanation.rows
    assert row.reason is None
    assert row.kernel is not None
    assert f" {arch} (" in row.kernel
    assert explanation.chip == chip
    assert (row.estimated is None) == (chip is None)


def test_a_product_has_its_own_multiprocessors() -> None:
    for name, (target, count) in targets.PRODUCTS.items():
        found = targets.named_target(name.upper())
        assert found == (name, replace(target, multiprocessors=count))
        assert found[1].cores == count
        if name in NAMED:
            assert NAMED[name].multiprocessors == count
    assert targets.named_target("h1000") is None
    assert targets.named_target("") is None


def test_wrong_use() -> None:
    model, x = meta(64)
    with pytest.raises(ValueError, match=r"target='sm80' is not known; use one of 'sm89', 'sm90'.* 'h100', 'h200'"):
        fp8fn.explain(model, x, target="sm80")
    call = Pair.__call__
    with pytest.raises(TypeError, match=r"^explain: model is the class Pair; use a function or a module, as Pair\("):
        fp8fn.explain(Pair, x)
    assert Pair.__call__ is call
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="measure=True needs a GPU"):
            fp8fn.explain(model, x, measure=True)


class Stack(nn.Module):
    """A class that `Module.compile` compiles; the second layer begins behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("compiled", ["none", "whole", "layers", "wrapper"])
def test_a_model_that_is_compiled_already(compiled: str) -> None:
    called = []

    def backend(gm: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        called.append(gm)
        return gm.forward

    model: nn.Module = Stack().requires_grad_(False)
    if compiled == "wrapper":
        model = torch.compile(model, backend=backend)
    for part in {"whole": [model], "layers": model.layers}.get(compiled, []):
        part.compile(backend=backend)
    x = torch.randn(32, 512)
    explanation = fp8fn.explain(model, x, show=False)
    assert [row.weight for row in explanation.rows] == ["layers.0.linear.weight", "layers.1.linear.weight"]
    assert (explanation.substituted, explanation.graphs, called) == (2, 2, [])
    model(x)
    # It is compiled still; layers that are compiled one by one share a graph.
    assert len(called) == {"none": 0, "layers": 1}.get(compiled, 2)


def test_what_pytorch_would_not_compile_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(32, 512)

    class Net(nn.Sequential):
        """With the `forward` of its base."""

    start, skips_none = "explain: Module.compile compiles nothing of a ", torch.__version__ >= "2.14"
    for model, warned in (
        (nn.Sequential(nn.Linear(512, 512)), [] if skips_none else [f"{start}Sequential"]),
        (Net(nn.Linear(512, 512)), [] if skips_none else [f"{start}Net"]),
        (Net(Block()), []),  # Dynamo captures the frame of the block
        (Block(), []),
    ):
        caplog.clear()
        called: list[GraphModule] = []
        model.compile(backend=lambda gm, inputs, called=called: (called.append(gm), gm.forward)[1])
        model(x)
        assert bool(called) == (not warned)
        assert fp8fn.explain(model, x, show=False).substituted == 1
        said = [record.getMessage() for record in caplog.records if record.name == "fp8fn"]
        assert [each.partition(",")[0] for each in said] == warned
    outer = Stack()
    outer.compile(backend="eager")
    outer.layers[0].linear.compile(backend="eager")  # within a graph of the model
    caplog.clear()
    with torch.no_grad():
        fp8fn.explain(outer, x, show=False)
    assert [record.getMessage() for record in caplog.records if record.name == "fp8fn"] == []


def test_what_is_slower_stays_by_default_and_the_reason_has_both_times(on_hopper: None) -> None:
    model, x = meta(8192)
    wide, narrow = reasons(model, x)
    times = linear_times(8192, 512, 2048, BLOCKWISE_SQUARE, H200)
    assert wide is None
    assert times is not None
    assert narrow == (
        f"slower: {times.fp8.combined:.0f} µs in FP8 with quantization, {times.bf16.combined:.0f} in bf16,"
        " forward and backward by shapes near it in h200.json; where='*' takes it too"
    )
    assert reasons(model, x) == reasons(model, x, target="sm90")


def gathered(weight: Tensor, block: tuple[int, int] = (128, 128)) -> nn.Parameter:
    n, k = weight.shape
    grid = (1, 1) if block == (-1, -1) else (-(-n // 128), -(-k // 128))
    data = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta")
    return nn.Parameter(weight_of(data, torch.empty(grid, device="meta"), Form(block, torch.bfloat16, gathered=True)))


def test_a_weight_that_fsdp_has_gathered_has_no_product_in_bf16(on_hopper: None) -> None:
    """Left alone, it would multiply 16-bit rows by FP8 data, and the gradient by a dequantized weight."""
    model, x = meta(8192)
    model.narrow.weight = gathered(model.narrow.weight)
    assert reasons(model, x) == [None, None]
    assert reasons(model, x, where="wide.*")[1] == "where said no"


def test_gathered_weights_take_no_part_in_the_sum_that_decides_about_others(on_hopper: None) -> None:
    model, x = meta(8192)
    alone = reasons(model, x)[0]
    few = nn.Sequential(model.wide, *(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    few[1:].to(device="meta", dtype=torch.bfloat16)
    for layer in few[1:]:
        layer.weight = gathered(layer.weight)
    assert alone is None
    assert reasons(few, x[:256])[0] == reasons(nn.Sequential(model.wide), x[:256])[0]


def test_a_weight_that_is_gathered_in_other_blocks_is_compared_as_any(on_hopper: None) -> None:
    model, x = meta(8192)
    model.narrow.weight = gathered(model.narrow.weight, (-1, -1))
    assert str(reasons(model, x)[1]).startswith("slower: ")


@pytest.mark.parametrize("where", ["*", ["narrow.*", "wide.*"], lambda site: True])
def test_where_overrides_the_estimate(on_hopper: None, where: Any) -> None:
    model, x = meta(8192)
    assert reasons(model, x, where=where) == [None, None]


def test_on_another_device_there_is_no_estimate() -> None:
    model, x = meta(8192)
    assert reasons(model, x) == [None, None]
    assert costs.chip_for(torch.device("cpu")) is None
    assert costs.chip_for(torch.device("cpu"), "sm90") == H200


def test_in_float32_what_stays_is_no_product_in_bf16(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By autocast it is one, also where the operands are float32."""
    monkeypatch.setattr(recipe_pass, "estimated", lambda *_: SLOW)
    model, x = nn.Linear(512, 512), torch.randn(64, 512)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, model.weight)

    assert reasons(model, x) == [None]
    assert [reason and reason.partition(":")[0] for reason in reasons(autocast, x)] == ["slower"]


def test_the_backend_leaves_them_out(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def estimated(site: Site, recipe: Any, chip: Chip | None) -> Times:
        assert chip == H200
        seen.append((site.n, recipe.key))
        return FAST if site.n == 1024 else SLOW

    monkeypatch.setattr(recipe_pass, "estimated", estimated)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).bfloat16()
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    out = torch.compile(model, backend="fp8fn", options={"recipe": "rowwise"})(x)
    expected = model[1](fp8fn.linear(x, model[0].weight, model[0].bias, recipe="rowwise"))
    assert (out - expected).float().norm() < 1e-2 * expected.float().norm()
    assert seen == [(1024, "rowwise"), (512, "rowwise")]


def test_symbolic_sizes_are_estimated_by_their_hint_with_no_guard(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compile serves counts of rows on either side of the verdict, and the first one decides."""
    seen: list[int] = []

    def linear(m: int, *args: Any, **options: Any) -> Times:
        seen.append(m)
        return FAST if m > 600 else SLOW

    monkeypatch.setattr(costs, "linear_times", linear)
    model = nn.Linear(512, 512, bias=False).bfloat16()
    for first, others in ((300, (100, 999)), (100, (300, 999))):
        torch._dynamo.reset()
        seen.clear()
        compiled = torch.compile(model, backend="fp8fn", dynamic=True, fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
            for rows in (first, *others):
                x = torch.randn(3, rows, 512, dtype=torch.bfloat16)
                expected = fp8fn.linear(x, model.weight) if 3 * first > 600 else model(x)
                assert (compiled(x) - expected).float().norm() < 1e-2 * expected.float().norm()
        assert seen == [3 * first]


def test_a_size_without_a_hint_has_no_times() -> None:
    class Unbacked:
        class node:
            hint = None

    site = Site(op="linear", m=Unbacked(), n=512, k=512, dtype=torch.bfloat16, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert costs.sized(site) is None
    assert costs.estimated(site, BLOCKWISE_SQUARE, H200) is None


def test_measured_times_are_shown_beside_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct shape is asked for once, those in FP8 first; a shape that was left out has an empty cell."""
    asked: list[Site] = []

    def measured(sites: Any, recipe: Any) -> dict[Site, Times]:
        asked.extend(dict.fromkeys(sites))
        return {site: FAST for site in asked if site.k == 4096}

    monkeypatch.setattr(module, "measured", measured)
    monkeypatch.setattr(module, "_on_gpu", lambda site: True)
    monkeypatch.setattr(module, "check_measure", lambda measure: None)
    model, x = meta(8192)

    def forward(x: Tensor) -> Tensor:
        y = model(x) + model(x)
        return y @ y.mT

    explanation = fp8fn.explain(forward, x, where="wide*", measure=True, target="sm90", show=False)
    assert [(site.m, site.n, site.k) for site in asked] == [(8192, 2048, 4096), (8192, 512, 2048)]
    assert [row.measured for row in explanation.rows] == [FAST, None, FAST, None, None]
    head, _, *lines = unwrapped(explanation)
    at = head.index("measured, µs")
    assert [line[at : at + 15] for line in lines if line.startswith("2x")] == ["60 → 30 (2.00x)", " " * 15]


def test_what_a_pattern_made_has_not_the_recipes_times() -> None:
    """A weight in FP8 that the graph dequantizes, seen through a parameter's view: by a pattern, not by the recipe."""
    q = fp8fn.quantize(torch.randn(512, 512), (128, 128))
    weight, scale = nn.Parameter(q.data.contiguous(), requires_grad=False), q.scale.contiguous()

    def linear(x: Tensor) -> Tensor:
        scales = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return F.linear(x, (weight.float() * scales).to(x.dtype))

    (row,) = fp8fn.explain(linear, torch.randn(64, 512).bfloat16(), target="sm90", where="*", show=False).rows
    assert (row.kernel, row.estimated, row.measured) == ("fp8fn::mm_a16w8", None, None)


@pytest.mark.parametrize(("dtype", "batch"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.float16, 2)])
def test_measuring(dtype: torch.dtype, batch: int, device: torch.device) -> None:
    """The same code on either device; a product that the time is too short for is left out."""
    small, large = (
        Site(op="", m=m, n=256, k=128, batch=batch, dtype=dtype, device=device) for m in (64, 2**31)
    )  # fmt: skip
    found = costs.measured([small, large, small], BLOCKWISE_SQUARE)
    assert found.keys() == {small}
    assert all(us > 0 for step in (found[small].fp8, found[small].bf16) for us in step)
    assert found[small].source == "the clock"
    assert costs.measured([small], BLOCKWISE_SQUARE, seconds=0) == {}


def test_a_failure_to_measure_is_no_failure_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(costs, "_measured", fail)
    site = Site(op="", m=64, n=256, k=128, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert costs.measured([site], BLOCKWISE_SQUARE) == {}


@pytest.mark.gpu
def test_measured_on_a_gpu() -> None:
    """In a few seconds, near the estimate where there is one, and the random state is as before."""
    model = nn.Sequential(nn.Linear(4096, 6144), nn.Linear(6144, 4096)).cuda().bfloat16()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    state = torch.cuda.get_rng_state()
    for _ in range(2):  # kernels are compiled in the time of the first
        explanation = fp8fn.explain(model, x, measure=True, show=False)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert "measured, µs" in str(explanation)
    for row in explanation.rows:
        assert row.measured is not None
        if row.estimated is not None and explanation.chip == H200.name:
            assert 0.7 < row.measured.fp8.combined / row.estimated.fp8.combined < 1.4
            assert 0.7 < row.measured.bf16.combined / row.estimated.bf16.combined < 1.4


class Batch(nn.Module):
    """As many products as there are matrices of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4096, 4096, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.mT)


def test_the_kernel_of_a_batch_is_planned_for_a_batch() -> None:
    """cuBLASLt takes no batches, and the H200's table has 4096,4096,4096 in another tile than 4 times that."""
    with torch.device("meta"):
        model, x = Batch(), torch.empty(4, 4096, 4096, dtype=torch.bfloat16)
    fast = replace(fp8fn.ROWWISE, accumulate="fast")
    kernels = []
    for recipe in (fast, fp8fn.BLOCKWISE):
        (row,) = fp8fn.explain(model, x, recipe=recipe, where="*", target="h200", show=False).rows
        assert row.batch == 4
        assert row.kernel is not None
        kernels.append(row.kernel)
    assert kernels[0].startswith("scaled_mm[")
    assert "not cublaslt_fast: a has 3 dimensions and b 3, not 2" in kernels[0]
    assert kernels[1].startswith("scaled_mm[BM=192,BN=128,")
    assert "TURNS=0" in kernels[1]
    assert kernels[1].endswith("(cuda by the model)")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 6144, 7168, dtype=torch.bfloat16))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=offs)


def test_the_kernel_of_groups_is_that_of_the_chips_table() -> None:
    """The H100's table has this product in 128x128 in bands of 4, the H200's in 192x128 without turns."""
    with torch.device("meta"):
        model, x = Experts(), torch.empty(30000, 7168, dtype=torch.bfloat16)
        offs = torch.empty(8, dtype=torch.int32)
    kernels = {}
    for target in ("h100", "h200"):
        (row,) = fp8fn.explain(model, x, offs, recipe="blockwise", where="*", target=target, show=False).rows
        kernels[target] = str(row.kernel)
    assert "BM=128,BN=128" in kernels["h100"]
    assert "GROUP=4" in kernels["h100"]
    assert kernels["h100"].endswith("(cuda by scaled_grouped_mm-nvidia-h100-80gb-hbm3-132.json)")
    assert "BM=192,BN=128" in kernels["h200"]
    assert "TURNS=0" in kernels["h200"]
    assert kernels["h200"].endswith("(cuda by scaled_grouped_mm-nvidia-h200-132.json)")


@torch.compiler.nested_compile_region
def scaled_layer(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = torch._scaled_mm(x.to(FP8), w.to(FP8).t(), scale, scale, out_dtype=torch.bfloat16)
    return out


def test_a_product_on_fp8_data_in_a_shared_region() -> None:
    """It is substituted once, for all of its calls, and listed once; no FP8 tensor is outside of the region."""

    def model(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return scaled_layer(scaled_layer(x, w, scale), w, scale)

    given = [torch.randn(128, 256).bfloat16(), torch.randn(256, 256).bfloat16(), torch.ones(())]
    found = fp8fn.explain(model, *given, show=False)
    assert [(row.op, row.shape, row.kernel, row.reason) for row in found.rows] == [
        ("aten._scaled_mm.default", (128, 256, 256), "fp8fn::scaled_mm", None)
    ]


class Layers(nn.Module):
    """Three gated MLPs of one function, and a small head."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp = mlp
        shapes = {"gate": (4096, 2048), "up": (4096, 2048), "down": (2048, 4096)}
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
            for _ in range(3)
        )
        self.out = nn.Linear(2048, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.mlp(x, layer["gate"], layer["up"], layer["down"])
        out: Tensor = self.out(x)
        return out


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def test_a_shared_region_counts_for_each_of_its_calls() -> None:
    """Rows, times and the share of operations are those of a model whose layers share nothing."""
    found = []
    for mlp in (gated, torch.compiler.nested_compile_region(gated)):
        with torch.device("meta"):
            model, x = Layers(mlp), torch.empty(8192, 2048, dtype=torch.bfloat16)
        found.append(fp8fn.explain(model, x, target="H100", show=False))
    plain, shared = found
    rows = [{row.weight: (row.shape, row.reason, row.estimated) for row in each.rows} for each in found]
    assert rows[0] == rows[1]
    assert len(shared.rows) == len(plain.rows) == 10
    assert plain.step is not None
    assert shared.step is not None
    assert astuple(shared.step) == pytest.approx(astuple(plain.step))
    assert (shared.step.products, shared.substituted) == (9, 9)
    assert shared.share == plain.share == pytest.approx(1 - 64 / (9 * 4096 + 64))
    assert "3x  layers.*.up" in str(shared)
