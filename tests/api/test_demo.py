"""The demo: the text, the model, a very short comparison with its values, and the verdict."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch._inductor import compile_fx

import fp8fn
import fp8fn.demo.model
from fp8fn.bench import record
from fp8fn.demo import command
from fp8fn.demo.compare import build, compare, in_fp8
from fp8fn.demo.corpus import HELD_OUT, Corpus, standard_library
from fp8fn.demo.model import GPT, Experts, GPTConfig
from fp8fn.demo.pairs import Pair, standard_deviation, standard_error
from fp8fn.demo.presets import MODELS, PRESETS, default_size
from fp8fn.demo.report import conclusion, left_alone, plot, table, verdict
from fp8fn.demo.results import markdown, results
from fp8fn.demo.saved import bytes_saved
from fp8fn.demo.train import Plan, Run, Variant, evaluate
from fp8fn.lowering.explanation import Explanation, Row

CPU = torch.device("cpu")
CONFIG = GPTConfig(context=64, dim=128, layers=1, heads=2, hidden=128)
PLAN = Plan(device=CPU, steps=3, batch=2, learning_rate=1e-3, evaluations=3, validation_batches=2)
UNCOMPILED = Variant(name="baseline", backend="eager")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library(cap=1 << 18)


@pytest.fixture(scope="module")
def pair(corpus: Corpus) -> Iterator[Pair]:
    (found,) = compare(build(CONFIG, PLAN), corpus, PLAN, in_fp8("blockwise", "*"), UNCOMPILED)
    yield found
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs run in eager mode, without Inductor's code, and each graph adds an element to the list."""
    compiled: list[int] = []

    def as_it_is(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        compiled.append(len(gm.graph.nodes))
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", as_it_is)
    return compiled


def run_of(*validation: float, seconds: float = 1.0, saved_bytes: int = 1 << 20, name: str = "baseline") -> Run:
    """A run with these validation losses and one step between evaluations."""
    return Run(
        name=name,
        losses=list(validation[1:]),
        validation=list(enumerate(validation)),
        step_seconds=[seconds] * max(len(validation) - 1, 1),
        tokens_per_step=1000,
        saved_bytes=saved_bytes,
    )


def pairs_of(*losses: tuple[float, float]) -> list[Pair]:
    """Pairs of seeds 5, 6, … with these final losses of the baseline and of FP8; FP8 takes twice the time."""
    return [
        Pair(
            seed=5 + index,
            baseline=run_of(4.0, before, saved_bytes=2 << 20),
            fp8=run_of(4.0, after, seconds=2.0, name="fp8"),
        )
        for index, (before, after) in enumerate(losses)
    ]


def write_sources(root: Path, count: int) -> None:
    for index in range(count):
        (root / f"m{index:02}.py").write_text(f"{index:02}" * 100)


def test_corpus_is_deterministic(corpus: Corpus) -> None:
    again = standard_library(cap=1 << 18)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.validation, again.validation)
    assert len(corpus.train) + len(corpus.validation) == 1 << 18


def test_split_is_by_whole_files_and_disjoint(tmp_path: Path) -> None:
    write_sources(tmp_path, 2 * HELD_OUT)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("xx" * 100)
    text = standard_library(tmp_path)
    names = [{bytes(pair.tolist()).decode() for pair in part.split(2)} for part in (text.train, text.validation)]
    assert names[1] == {"09", "19"}
    assert names[0] == {f"{index:02}" for index in range(20)} - names[1]
    assert len(text.train) == 18 * 200


def test_cap_cuts_the_text(tmp_path: Path) -> None:
    write_sources(tmp_path, HELD_OUT)
    text = standard_library(tmp_path, cap=1850)
    assert (len(text.train), len(text.validation)) == (1800, 50)


def test_no_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too few Python sources"):
        standard_library(tmp_path)


def test_batches_are_windows_of_the_text_fixed_by_the_seed(corpus: Corpus) -> None:
    first, again, other = (next(corpus.batches(4, 32, seed)) for seed in (7, 7, 8))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert first[0].shape == (4, 32)
    assert bytes(first[0][0].tolist()) in bytes(corpus.train.tolist())


def test_validation_batches_cover_the_text(corpus: Corpus) -> None:
    batches = corpus.validation_batches(3, 2, 32)
    assert [inputs.shape for inputs, _ in batches] == [(2, 32)] * 3
    assert torch.equal(batches[0][0][0], corpus.validation[:32].long())
    assert torch.equal(batches[-1][1][-1], corpus.validation[-32:].long())


def test_model_does_not_know_fp8fn() -> None:
    tree = ast.parse(Path(fp8fn.demo.model.__file__).read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported
    assert not [name for name in imported if "fp8fn" in name]


def test_model_is_causal() -> None:
    model = build(CONFIG, PLAN)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_model_knows_positions() -> None:
    # Without positions, attention over a repeated byte would give the same logits wherever another byte stands.
    model = build(replace(CONFIG, layers=2), PLAN)
    near, far = torch.full((1, 8), 65), torch.full((1, 8), 65)
    near[0, 5], far[0, 1] = 66, 66
    assert not torch.allclose(model(near)[0, -1], model(far)[0, -1], atol=1e-6)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, presets in MODELS.items() for size in presets])
def test_presets_have_sizes_that_fp8_takes(name: str, size: str) -> None:
    preset = MODELS[name][size]
    model = preset.model
    assert bool(model.experts) == (name == "moe")
    assert [n % 128 for n in (model.dim, model.hidden, model.vocabulary, preset.batch * model.context)] == [0] * 4
    assert model.dim % (2 * model.heads) == 0


def test_preset_1b_is_a_billion() -> None:
    with torch.device("meta"):
        model = GPT(PRESETS["1b"].model)
    assert 1.0e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e9


def test_experts_are_the_sum_over_those_that_the_router_chose() -> None:
    config = replace(CONFIG, experts=4)
    torch.manual_seed(0)
    experts, x = Experts(config), torch.randn(2, 8, config.dim)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    chances, chosen = torch.softmax(experts.router(x), -1).topk(2)
    expected = torch.zeros_like(x)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(8)).tolist():
        at = tuple(place)
        for chance, expert in zip(chances[at] / chances[at].sum(), chosen[at], strict=True):
            gate, up = (x[at] @ experts.gate_up[expert]).chunk(2)
            expected[at] += chance * ((F.silu(gate) * up) @ experts.down[expert])
    assert (experts(x) - expected).norm() < 2e-2 * expected.norm()  # bfloat16


@pytest.mark.usefixtures("graphs")
def test_a_mixture_trains_by_its_products_of_groups(corpus: Corpus) -> None:
    model = build(replace(CONFIG, experts=4), PLAN)
    tokens = torch.zeros(PLAN.batch, CONFIG.context, dtype=torch.int64)
    rows = fp8fn.explain(model, tokens, where="*", show=False).rows
    assert [row.weight for row in rows if row.op == "grouped_mm"] == ["layers.0.mlp.gate_up", "layers.0.mlp.down"]
    assert [row.weight for row in rows if row.reason] == ["layers.0.mlp.router.weight"]
    (pair,) = compare(model, corpus, PLAN, in_fp8("blockwise", "*"), UNCOMPILED)
    assert pair.fp8.losses != pair.baseline.losses
    assert pair.fp8.final_loss < pair.fp8.validation[0][1] - 0.2
    assert verdict([pair]) == 0


def test_a_size_of_another_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--device", "cpu", "--model", "moe", "--size", "1b"])
    assert stop.value.code == 2
    assert "--size 1b is not one of --model moe: use tiny or small" in capsys.readouterr().err


@pytest.mark.slow
def test_both_runs_start_alike(pair: Pair, corpus: Corpus) -> None:
    model = build(CONFIG, PLAN)
    held_out = corpus.validation_batches(PLAN.validation_batches, PLAN.batch, CONFIG.context)
    inputs, targets = next(corpus.batches(PLAN.batch, CONFIG.context, PLAN.seed))
    baseline, fp8 = pair.baseline, pair.fp8
    assert baseline.validation[0][1] == pytest.approx(evaluate(model, held_out, PLAN), rel=1e-6)
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert baseline.losses[0] == pytest.approx(expected, rel=1e-6)
    # FP8 rounds each operand by up to 2**-4 of its value: the losses are near, but not equal.
    assert fp8.losses[0] == pytest.approx(baseline.losses[0], rel=5e-3)
    assert fp8.losses[0] != baseline.losses[0]


def test_both_runs_learn(pair: Pair) -> None:
    for run in (pair.baseline, pair.fp8):
        assert len(run.losses) == len(run.step_seconds) == PLAN.steps
        assert [step for step, _ in run.validation] == [0, 1, 2, 3]
        assert run.final_loss < run.validation[0][1] - 0.3
    assert verdict([pair]) == 0


def test_fp8_saves_fewer_bytes(pair: Pair) -> None:
    assert 0 < pair.fp8.saved_bytes < pair.baseline.saved_bytes


@pytest.mark.usefixtures("graphs")
def test_a_seed_after_another_trains_as_it_does_alone(corpus: Corpus) -> None:
    names: list[str] = []

    def progress(name: str, steps: Any) -> Any:
        names.append(name)
        return steps

    def trained(seed: int, seeds: int) -> list[Pair]:
        plan = replace(PLAN, seed=seed)
        model = build(CONFIG, plan)
        return compare(model, corpus, plan, in_fp8("blockwise", "*"), UNCOMPILED, progress, seeds)

    both = trained(3, 2)
    assert names == [f"{variant}, seed {seed}" for variant in ("baseline", "fp8 blockwise") for seed in (3, 4)]
    alone = [*trained(3, 1), *trained(4, 1)]
    assert names[4:] == ["baseline", "fp8 blockwise"] * 2
    assert [pair.seed for pair in both] == [pair.seed for pair in alone] == [3, 4]
    for found, expected in zip(both, alone, strict=True):
        # On several threads sums differ in their last bits, and FP8 rounds some of those up and others down.
        assert found.baseline.losses == pytest.approx(expected.baseline.losses, rel=1e-5)
        assert found.baseline.final_loss == pytest.approx(expected.baseline.final_loss, rel=1e-5)
        assert found.fp8.losses == pytest.approx(expected.fp8.losses, rel=1e-3)
        assert found.fp8.final_loss == pytest.approx(expected.fp8.final_loss, rel=1e-3)
    assert both[0].baseline.losses != pytest.approx(both[1].baseline.losses, rel=1e-3)


def test_each_variant_is_compiled_once_for_all_seeds(corpus: Corpus, graphs: list[int]) -> None:
    compare(build(CONFIG, PLAN), corpus, PLAN, in_fp8("blockwise", "*"))
    alone = len(graphs)
    compare(build(CONFIG, PLAN), corpus, PLAN, in_fp8("blockwise", "*"), seeds=3)
    assert len(graphs) == 2 * alone > 0


def test_table_of_a_pair() -> None:
    assert table(pairs_of((2.0, 2.01))).splitlines() == [
        "                                     baseline     fp8    difference",
        "---------------------------------  ----------  ------  ------------",
        "final validation loss [nats/byte]      2.0000  2.0100        +0.50%",
        "tokens/s, median step                   1,000     500         0.50x",
        "saved for backward per step [MiB]         2.0     1.0         0.50x",
    ]


def test_table_with_peak_memory_and_without_speed() -> None:
    (pair,) = pairs_of((2.0, 2.01))
    pair = replace(pair, baseline=replace(pair.baseline, peak_bytes=4 << 30), fp8=replace(pair.fp8, peak_bytes=3 << 30))
    assert [line.split()[-3:] for line in table([pair]).splitlines()[3:]] == [
        ["1,000", "500", "0.50x"],
        ["4.00", "3.00", "0.75x"],
        ["2.0", "1.0", "0.50x"],
    ]
    assert "tokens/s" not in table([pair], speed=False)
    assert "peak memory [GiB]" in table([pair], speed=False)


def test_what_is_left_alone_is_told_by_layer() -> None:
    with torch.device("meta"):
        model = GPT(replace(PRESETS["tiny"].model, layers=2, hidden=384))
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    left = left_alone(fp8fn.explain(model, tokens, show=False))
    assert [line.split(":")[0] for line in left] == [
        "2x layers.*.mlp.gate.weight", "2x layers.*.mlp.up.weight", "2x layers.*.mlp.down.weight", "1x head.weight",
    ]  # fmt: skip
    assert "small: N=384 is under 512" in left[1]
    assert "small: K=384 is under 512" in left[2]


def test_the_default_size_has_products_in_fp8_by_the_default_where() -> None:
    """On a CPU as on a GPU: the demo needs no `where` to show FP8."""
    assert [default_size(model, device) for model in MODELS for device in ("cpu", "cuda")] == [
        "tiny", "1b", "tiny", "small",
    ]  # fmt: skip
    for presets in MODELS.values():
        preset = presets["tiny"]
        with torch.device("meta"):
            model = GPT(preset.model)
            tokens = torch.zeros(preset.batch, preset.model.context, dtype=torch.int64)
        explanation = fp8fn.explain(model, tokens, show=False)
        assert explanation.substituted >= 4 * preset.model.layers - 2 * bool(preset.model.experts)
    assert in_fp8("blockwise").options == {"recipe": "blockwise", "where": None}


def test_the_bar_says_that_the_first_step_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    progress = command._progress()
    for name, compiling in (("fp8, seed 0", True), ("fp8, seed 1", False), ("other", True)):
        steps = iter(progress(name, range(3)))
        assert next(steps) == 0
        assert ("compiling…" in capsys.readouterr().err) == compiling
        assert list(steps) == [1, 2]
        assert "compiling…" not in capsys.readouterr().err.splitlines()[-1].rpartition("3/3")[2]


def test_markdown_of_a_run() -> None:
    """The table of the docs has the figures of the terminal's."""
    (pair,) = pairs_of((2.0, 2.01))
    pair = replace(pair, baseline=replace(pair.baseline, peak_bytes=4 << 30), fp8=replace(pair.fp8, peak_bytes=3 << 30))
    found = results([pair], PLAN, "gpt", "1b", "blockwise", ["1x head.weight: sensitive"])
    run = {"date": "2026-11-24", "environment": {"torch": "2.11", "triton": "3.6"}, "results": found}
    lines = markdown({**run, "results": {**found, "device": "NVIDIA H200"}}).splitlines()
    assert lines[0].startswith("`python -m fp8fn demo --model gpt --size 1b --recipe blockwise --steps 3`, 1 pair:")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert cells[0] == ["", "baseline", "fp8", "difference"]
    assert cells[2:] == [
        ["final validation loss, nats/byte", "2.0000", "2.0100", "+0.50%"],
        ["tokens/s, median step", "1,000", "500", "0.50x"],
        ["peak memory, GiB", "4.00", "3.00", "0.75x"],
        ["saved for backward, GiB", "0.00", "0.00", "0.50x"],
    ]
    assert "Not in FP8: 1x head.weight: sensitive" in lines
    assert lines[-1] == "NVIDIA H200; torch 2.11, Triton 3.6; 2026-11-24."


def test_table_of_several_pairs() -> None:
    # +1 % and -2 % deviate by 1.5 % from their mean: the standard deviation is 1.5 % * sqrt(2), its error 1.5 %.
    # 1 and 2 deviate by 0.5 from their mean 1.5: 0.5 * sqrt(2) / 1.5 = 47.14 %; FP8's, 0.475 * sqrt(2) / 1.485.
    assert table(pairs_of((1.0, 1.01), (2.0, 1.96))).splitlines() == [
        "                                          baseline     fp8      difference",
        "--------------------------------------  ----------  ------  --------------",
        "final validation loss, seed 5               1.0000  1.0100          +1.00%",
        "final validation loss, seed 6               2.0000  1.9600          -2.00%",
        "mean final validation loss [nats/byte]      1.5000  1.4850  -0.50% ± 1.50%",
        "its standard deviation over seeds           47.14%  45.24%",
        "mean tokens/s, median step                   1,000     500           0.50x",
        "mean saved for backward per step [MiB]         2.0     1.0           0.50x",
    ]


def test_statistics_by_hand() -> None:
    assert standard_deviation([1.0, 2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14 / 3))
    assert standard_error([1.0, 2.0, 3.0, 6.0]) == pytest.approx(math.sqrt(14 / 3) / 2)
    assert standard_error([0.25, 0.25]) == 0
    assert math.isnan(standard_error([1.0, math.nan]))
    assert math.isnan(standard_error([1.0, math.inf]))


@pytest.mark.parametrize("count", [1, 3])
def test_plot_has_each_pair(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[float]] = []
    draw = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **style: drawn.append(list(y)) or draw(axes, x, y, **style))
    plot(pairs_of((1.0, 1.01), (2.0, 1.96), (3.0, 3.0))[:count], tmp_path / "curves")
    assert (tmp_path / "curves").read_bytes().startswith(b"\x89PNG")
    expected = {
        1: [[1.0], [1.01], [4.0, 1.0], [4.0, 1.01], [0.0, 1.0]],
        3: [
            *([4.0, end] for end in (1.0, 2.0, 3.0, 1.01, 1.96, 3.0)),
            [4.0, 2.0],
            [4.0, 1.99],
            *([0.0, end] for end in (1.0, -2.0, 0.0)),
            [0.0, -1 / 3],
        ],
    }[count]
    assert drawn == [pytest.approx(line) for line in expected]


def test_plot_has_the_format_of_its_ending(tmp_path: Path) -> None:
    for name, start in (("curves.PNG", b"\x89PNG"), ("curves.svg", b"<?xml"), ("curves.pdf", b"%PDF")):
        plot(pairs_of((1.0, 1.01)), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_plot_of_no_format_is_an_error_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "compare", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as stop:
        command.main(["--device", "cpu", "--plot", str(tmp_path / "curves.docx")])
    assert stop.value.code == 2
    assert f"error: --plot {tmp_path / 'curves.docx'}: no format 'docx'; use " in capsys.readouterr().err
    assert not (tmp_path / "curves.docx").exists()


def test_bytes_saved_counts_each_storage_once_and_no_parameter() -> None:
    layer = torch.nn.Linear(16, 8, bias=False)
    x = torch.randn(4, 16)
    # Saved: x by the product, twice, and the product by the square; the weight is the layer's own.
    assert bytes_saved(layer, lambda: layer(x).square() + layer(x[:2]).sum()) == x.nbytes + 4 * 8 * 4


def test_bytes_saved_leaves_out_the_data_and_the_scales_of_an_fp8_weight() -> None:
    layer = torch.nn.Linear(256, 128, bias=False)
    fp8fn.quantize_weights(layer)
    x = torch.randn(4, 256, requires_grad=True)
    assert bytes_saved(layer, lambda: layer(x).square()) == 4 * 128 * 4


def test_bytes_saved_of_a_compiled_module() -> None:
    layer = torch.nn.Linear(16, 8, bias=False)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(4, 16)
    compiled(x)
    assert bytes_saved(layer, lambda: compiled(x)) == x.nbytes
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("baseline", "fp8", "status"),
    [
        (2.0, 2.0, 0),
        (2.0, 1.0, 0),
        (2.0, 2.019, 0),
        (2.0, 2.021, 1),
        (2.0, math.nan, 1),
        (math.nan, 2.0, 1),
        (2.0, math.inf, 1),
        (math.inf, 2.0, 1),
    ],
)
def test_verdict(baseline: float, fp8: float, status: int) -> None:
    pairs = pairs_of((baseline, fp8))
    assert verdict(pairs) == status
    assert conclusion(pairs).startswith(("OK", "FAIL")[status])
    # A pair without a difference halves the mean; a loss that is not finite fails any number of pairs.
    with_equal = [*pairs, *pairs_of((2.0, 2.0))]
    assert verdict(with_equal) == int(not math.isfinite(baseline + fp8))
    assert conclusion(with_equal).startswith(("OK", "FAIL")[verdict(with_equal)])


def test_conclusion_of_a_pair() -> None:
    assert conclusion(pairs_of((2.0, 2.01))) == (
        "OK: FP8's final validation loss is +0.50% from the baseline's; +1% is allowed."
    )
    assert conclusion(pairs_of((2.0, math.nan))) == "FAIL: a loss is not finite (baseline 2.0, FP8 nan)."


def test_two_standard_errors_are_allowed_where_they_were_measured() -> None:
    """A deviation of 3 % from pair to pair: +7 % of one pair, and of four in the mean +4 %."""
    assert [verdict(pairs_of((1.0, loss)), 0.03) for loss in (1.0699, 1.0701)] == [0, 1]
    four = [pairs_of(*[(1.0, loss)] * 4) for loss in (1.0399, 1.0401)]
    assert [verdict(pairs, 0.03) for pairs in four] == [0, 1]
    assert conclusion(pairs_of((1.0, 1.05)), 0.03) == (
        "OK: FP8's final validation loss is +5.00% from the baseline's; +1% is allowed, and twice 3.0%, the standard "
        "error of 1 pair at this size; --seeds 8 allows +3.1%."
    )
    assert conclusion(pairs_of(*[(1.0, 1.05)] * 8), 0.03).endswith(
        "+1% is allowed, and twice 1.1%, the standard error of 8 pairs at this size."
    )


@pytest.mark.parametrize("size", ["small", "1b"])
def test_deviations_are_those_of_the_committed_runs(size: str) -> None:
    found = []
    for run in record.committed("loss")["results"]["runs"]:
        losses = {row["variant"]: row["losses"] for row in run["rows"]}
        if run["setting"]["size"] != size:
            continue
        for name, by_seed in losses.items():
            if name != "bf16" and len(by_seed) >= 5:
                found.append(standard_deviation([by_seed[seed] / losses["bf16"][seed] - 1 for seed in by_seed]))
    assert fmean(found) == pytest.approx(PRESETS[size].deviation, rel=0.1)


def test_conclusion_of_several_pairs_has_the_standard_error() -> None:
    # +4 %, -2 % and +1 % deviate by 3, 3 and 0 from +1 %: the deviation is 3 %, its error 3 %/sqrt(3).
    losses = [(1.0, 1.04), (2.0, 1.96), (4.0, 4.04)]
    assert conclusion(pairs_of(*losses[:2], (4.0, 4.0399))) == (
        "OK: FP8's final validation loss is +1.00% ± 1.73% (mean ± standard error of 3 pairs) from the baseline's; "
        "+1% is allowed."
    )
    assert conclusion(pairs_of(*losses, (1.0, 1.05))).startswith(
        "FAIL: FP8's final validation loss is +2.00% ± 1.58% ("
    )
    assert conclusion(pairs_of(*losses, (math.inf, 1.0))) == (
        "FAIL: a loss is not finite (seed 8: baseline inf, FP8 1.0)."
    )


@pytest.mark.parametrize(("last", "status"), [(2.0, 0), (2.1, 1), (math.nan, 1)])
def test_status_and_json_of_two_pairs(
    last: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[Plan, int]] = []

    def without_training(model: GPT, corpus: Corpus, plan: Plan, *_: Any, seeds: int, **__: Any) -> list[Pair]:
        trained.append((plan, seeds))
        return pairs_of((2.0, 2.0), (2.0, last))

    monkeypatch.setattr(command, "compare", without_training)
    row = Row(
        node="mm",
        source="model.py:1",
        op="matmul",
        weight="up.weight",
        shape=(2, 2, 2),
        kernel="reference",
        reason=None,
    )
    head = replace(row, weight="head.weight", kernel=None, reason="small")
    monkeypatch.setattr(command, "_explain", lambda *_: Explanation((row, head), "blockwise_square", 1))
    options = {"--size": "tiny", "--steps": 1, "--batch": 2, "--learning-rate": 5e-4, "--seed": 5, "--seeds": 2}
    paths = {"--plot": tmp_path / "curves.png", "--json": tmp_path / "demo.json"}
    asked = {"--device": "cpu", **options, **paths}
    assert command.main([str(word) for option in asked.items() for word in option]) == status
    assert trained == [(Plan(device=CPU, steps=1, batch=2, learning_rate=5e-4, seed=5), 2)]
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert first.endswith("against FP8 (blockwise_square); learning rate 0.0005; 2 pairs, of seeds 5 to 6")
    assert out.splitlines()[-1] == conclusion(pairs_of((2.0, 2.0), (2.0, last)))

    written = record.read(tmp_path / "demo.json")
    assert written["benchmark"] == "demo"
    assert abs((date.today() - date.fromisoformat(written["date"])).days) <= 1
    assert written["environment"]["torch"] == torch.__version__
    device = written["results"].pop("device")
    assert device in first
    settings: dict[str, Any] = {"model": "gpt", "size": "tiny", "recipe": "blockwise_square", "steps": 1, "batch": 2}
    settings |= {"learning_rate": 5e-4, "left": ["1x head.weight: small"]}
    pairs = written["results"].pop("pairs")
    assert written["results"] == settings
    assert [pair["seed"] for pair in pairs] == [5, 6]
    for pair, end in zip(pairs, [2.0, last], strict=True):
        baseline = {"validation": [[0, 4.0], [1, 2.0]], "tokens_per_second": 1000, "saved_bytes": 2 << 20}
        baseline["peak_bytes"] = None
        assert pair["baseline"] == {"name": "baseline", **baseline}
        assert pair["fp8"].pop("validation") == [[0, 4.0], [1, pytest.approx(end, nan_ok=True)]]
        assert pair["fp8"] == {"name": "fp8", "tokens_per_second": 500, "saved_bytes": 1 << 20, "peak_bytes": None}


def test_nothing_is_trained_without_a_product_in_fp8(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fresh_dynamo: None,
) -> None:
    """A name that `where` misspells: two equal trainings would end with a verdict about FP8."""
    monkeypatch.setattr(command, "compare", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as stop:
        command.main(["--device", "cpu", "--size", "tiny", "--where", "layer.*"])
    assert stop.value.code == 2
    assert "where='layer.*' matches no weight; nearest names: 'layers.*" in caplog.text
    assert capsys.readouterr().err == (
        "python -m fp8fn demo: no product is in FP8, so nothing is compared; --where '*' takes all products\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--seeds", "0", "'0' is not a positive whole number"),
        ("--seeds", "two", "'two' is not a positive whole number"),
        ("--learning-rate", "0", "'0' is not a positive number"),
        ("--learning-rate", "inf", "'inf' is not a positive number"),
        ("--learning-rate", "fast", "'fast' is not a positive number"),
        ("--json", "no/such/folder.json", "'no/such/folder.json' can't be written"),
        ("--plot", ".", "'.' can't be written"),
    ],
)
def test_values_that_an_option_does_not_take_are_errors(
    option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main([option, value])
    assert stop.value.code == 2
    assert f"argument {option}: {reason}" in capsys.readouterr().err


def test_speed_is_the_median_after_the_warm_up() -> None:
    run = replace(run_of(), step_seconds=[9, 9, 9, 9, 9, 1, 2, 8], tokens_per_step=10)
    assert run.tokens_per_second == 5
    assert replace(run, step_seconds=[9, 4]).tokens_per_second == 2.5


def test_learning_rate_warms_up_and_decays() -> None:
    plan = replace(PLAN, steps=100, learning_rate=1.0)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.missing_packages() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tqdm" else object())
    monkeypatch.setattr(command, "installed_by", "pip install {}".format)
    assert command.missing_packages() == "tqdm not installed: pip install demo"
