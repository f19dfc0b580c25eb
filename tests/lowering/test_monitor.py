"""The backend's option `monitor`: its statistics are those of `fp8fn.error`, and it changes no bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.lowering.operand_statistics import UNDERFLOW
from fp8fn.ops.monitor import PENDING
from fp8fn.ops.recipe import MXFP8, PRESETS, Recipe

TOKENS, WIDTH, HIDDEN = 320, 256, 512
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BLOCKWISE_SAVES = [("blockwise", "all"), ("blockwise", "fp8")]


class Block(nn.Module):
    """Two weights that read one input, an activation function, and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.norm
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, HIDDEN) / 16)
        self.register_buffer("ends", torch.tensor([100, 228, 320], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch._grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=self.ends)
        return out.float()


class Left(nn.Module):
    """A weight that is the left operand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weight, x.t()).t()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": Block, "checkpointed": Checkpointed, "experts": Experts, "left": Left,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    """Rows of a test's models are due in no other test."""
    yield
    PENDING.clear()


def compiled(model: nn.Module, every: int | None = 1, **options: Any) -> Any:
    dynamic = options.pop("dynamic", None)
    given: dict[str, Any] = {"where": "*", **({} if every is None else {"monitor": every}), **options}
    return torch.compile(model, backend="fp8fn", dynamic=dynamic, options=given)


def step(model: Callable[[Tensor], Tensor], seed: int = 0, tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator, requires_grad=True)
    out = model(x)
    out.sin().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# ---- values -----------------------------------------------------------------------------------------------------


def expected(x: Tensor, block: tuple[int, int], recipe: Recipe, dtype: torch.dtype | None) -> dict[str, float]:
    """By `fp8fn.error`, which shares no line with the monitor."""
    found = fp8fn.error(x, fp8fn.quantize(x, block, dtype=dtype, scale=recipe.scale))
    amax = x.abs().max().item()
    return {"saturated": found.saturated, "flushed": found.flushed, "amax": amax, "snr_db": found.snr_db}


@pytest.mark.parametrize("recipe", [*PRESETS.values(), replace(MXFP8, scale="e8m0")], ids=lambda recipe: recipe.key)
def test_statistics_of_a_layer(recipe: Recipe) -> None:
    """The tensors have outliers: larger blocks than MX has flush some elements; scales rounded down saturate some."""
    layer = nn.Linear(WIDTH, HIDDEN, bias=False)
    generator = torch.Generator().manual_seed(0)
    x, out_grad = (
        torch.randn(TOKENS, width, generator=generator) * torch.logspace(-40, 6, width, base=2)
        for width in (WIDTH, HIDDEN)
    )
    x.requires_grad_(True)
    model = compiled(layer, recipe=recipe)
    model(x).backward(out_grad)
    found = fp8fn.read_monitor(model)["weight"]
    assert list(found) == ["activation", "weight", "gradient"]
    weight = layer.weight.detach().T
    wanted = {
        "activation": expected(x.detach(), recipe.activation_block, recipe, recipe.activation_dtype),
        "weight": expected(weight, recipe.weight_block, recipe, recipe.weight_dtype),
        "gradient": expected(out_grad, recipe.gradient_block, recipe, recipe.gradient_dtype),
    }
    for operand, values in wanted.items():
        assert asdict(found[operand]) == pytest.approx({**values, "exact": True, "step": 0}, rel=1e-6), operand
    assert (found["activation"].flushed > 0.001) == (32 not in recipe.activation_block)
    assert (found["activation"].saturated > 0.001) == (recipe.scale == "e8m0")


def test_known_shares() -> None:
    """A quarter of the gradient is 2**-20 of its largest element, half is zero, and one row is large."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    out_grad = torch.zeros(128, WIDTH)
    out_grad[:32] = 2.0**-20
    out_grad[32:64] = 1.0
    model = compiled(layer, recipe="tensorwise")
    model(torch.ones(128, WIDTH)).backward(out_grad)
    found = fp8fn.read_monitor(model)["weight"]
    assert found["gradient"].flushed == 0.25
    assert found["gradient"].amax == 1.0
    assert found["gradient"].snr_db == pytest.approx(10 * torch.log10(torch.tensor(2.0**40)).item(), abs=0.1)
    assert found["activation"].flushed == found["activation"].saturated == 0.0


def test_a_nan_shows() -> None:
    model = compiled(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH)
    x[3, 5] = torch.nan
    model(x).sum().backward()
    found = fp8fn.read_monitor(model)["weight"]["activation"]
    assert found.amax != found.amax
    assert found.snr_db != found.snr_db


def test_an_estimate_where_the_activation_is_in_no_memory() -> None:
    """Inductor generates the quantizer of `gelu` if no weight's gradient is needed."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).requires_grad_(False)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    watched = compiled(model)
    watched(x).sum().backward()
    found = fp8fn.read_monitor(watched)
    activation = F.gelu(model[0](x)).detach()
    wanted = expected(activation, (1, 128), fp8fn.BLOCKWISE, None)
    assert found["0.weight"]["activation"].exact
    assert not found["2.weight"]["activation"].exact
    assert found["2.weight"]["activation"].snr_db == pytest.approx(wanted["snr_db"], abs=1.5)
    assert found["2.weight"]["activation"].amax == pytest.approx(wanted["amax"], rel=0.1)


def test_a_quantizer_of_several_products_is_measured_once() -> None:
    watched = compiled(Block())
    _, (code, *_) = run_and_get_code(step, watched)
    found = fp8fn.read_monitor(watched)
    assert found["gate.weight"]["activation"] == found["up.weight"]["activation"]
    assert found["gate.weight"]["gradient"] != found["up.weight"]["gradient"]
    assert code.count("fp8fn.monitor") == 5  # two activations and three weights


# ---- what the monitor leaves as it is ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in MODELS), ("block", True)])
def test_bits_and_one_compilation(name: str, dynamic: bool) -> None:
    plain = MODELS[name]()
    watched = copy.deepcopy(plain)
    got, want = [], []
    for model, every, results in ((plain, None, want), (watched, 2, got)):
        torch._dynamo.reset()
        counters.clear()
        run = compiled(model, every, dynamic=dynamic)
        for seed in range(3):
            results += step(run, seed, TOKENS + 16 * seed if dynamic else TOKENS)
        assert counters["stats"]["unique_graphs"] == 1
        results += gradients(model)
        if every is not None:
            found = fp8fn.read_monitor(run)
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))
    names = [name for name, weight in watched.named_parameters() if weight.ndim > 1]
    assert list(found) == names
    for operands in found.values():
        assert list(operands) == ["activation", "weight", "gradient"]
        assert all(of.step == 2 and of.snr_db > 25 for of in operands.values())


@pytest.mark.parametrize(
    ("recipe", "save"), [*((name, "exact") for name in PRESETS if name != "blockwise"), *BLOCKWISE_SAVES]
)
def test_bits_of_presets(recipe: str, save: str) -> None:
    plain = Block()
    watched = copy.deepcopy(plain)
    options: dict[str, Any] = {"recipe": recipe, "save": save}
    want = [*step(compiled(plain, None, **options)), *gradients(plain)]
    got = [*step(run := compiled(watched, 1, **options)), *gradients(watched)]
    assert all(map(torch.equal, got, want))
    assert all(len(operands) == 3 for operands in fp8fn.read_monitor(run).values())


def test_no_node_without_the_option() -> None:
    _, codes = run_and_get_code(step, compiled(Block(), None))
    assert not any("fp8fn.monitor" in code for code in codes)
    torch._dynamo.reset()
    _, codes = run_and_get_code(step, compiled(Block(), 100))
    lines = [line.strip() for code in codes for line in code.splitlines() if "fp8fn.monitor" in line]
    assert len(codes) == 2
    assert len(lines) == 8
    assert all(line.startswith("if ") and " in fp8fn_pending: " in line for line in lines)


def test_fuse_quantize_off() -> None:
    watched = compiled(Block(), fuse_quantize=False)
    step(watched)
    assert all(len(operands) == 3 for operands in fp8fn.read_monitor(watched).values())


def test_a_pass_of_the_user_runs_first() -> None:
    seen = []
    watched = compiled(Block(), post_grad_custom_post_pass=seen_by(seen))
    step(watched)
    assert len(seen) == 2
    assert not any("monitor" in text for text in seen)
    assert fp8fn.read_monitor(watched)


def seen_by(seen: list[str]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(str(graph))

        def uuid(self) -> Any:
            return None

    return Pass()


# ---- steps ------------------------------------------------------------------------------------------------------


def steps_of(model: nn.Module) -> set[int]:
    return {of.step for operands in fp8fn.read_monitor(model).values() for of in operands.values()}


def test_every_third_step() -> None:
    watched, found = compiled(Block(), 3), []
    for seed in range(7):
        step(watched, seed)
        found.append(steps_of(watched))
    assert found == [{0}, {0}, {0}, {3}, {3}, {3}, {6}]
    assert not PENDING


def test_evaluation_is_neither_measured_nor_counted() -> None:
    watched = compiled(Block(), 2)
    step(watched)
    before = fp8fn.read_monitor(watched)
    watched.eval()
    with torch.no_grad():
        for seed in range(3):
            watched(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)))
    assert fp8fn.read_monitor(watched) == before
    watched.train()
    step(watched, 1)
    step(watched, 2)
    assert steps_of(watched) == {2}


def test_micro_batches_are_steps_and_a_late_backward_is_measured() -> None:
    """Both forwards run before both backwards; the gradients of step 2 come from the first backward after it."""
    watched = compiled(Block(), 2)
    for seed in (0, 2):
        xs = [torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)]
        losses = [watched(x).sin().sum() for x in xs]
        for loss in losses:
            loss.backward()
    assert steps_of(watched) == {2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_no_step(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Block()
    block = torch.compile(model, backend="fp8fn", options={"where": "*", "monitor": 2})
    for step in range(4):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        checkpoint(block, x, use_reentrant=reentrant).square().mean().backward()
    found = fp8fn.read_monitor(model)["down.weight"]
    assert {operand: statistics.step for operand, statistics in found.items()} == dict.fromkeys(found, 2)
    assert set(found) == {"activation", "weight", "gradient"}


def test_graphs_of_one_model_share_their_steps() -> None:
    """A second static graph continues the count of the first."""
    watched = compiled(Block(), 2, dynamic=False)
    step(watched, 0, TOKENS)
    step(watched, 0, TOKENS)
    step(watched, 0, 64)
    assert steps_of(watched) == {2}


# ---- the warning ------------------------------------------------------------------------------------------------


def underflowing(x: Tensor) -> Tensor:
    """The sum, with a gradient of 1 for one row and of 2**-24 for the others."""
    factor = torch.full((x.shape[0], 1), 2.0**-24)
    factor[0] = 1.0
    return (x * factor).sum()


def test_a_gradient_that_underflows_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(Block(), 1, recipe="tensorwise")
    with caplog.at_level(logging.WARNING, "fp8fn"):
        for seed in range(3):
            underflowing(model(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)))).backward()
        logged = [message for message in caplog.messages if "underflows" in message]
        found = fp8fn.read_monitor(model)
    assert len(caplog.messages) == 1  # before the call of read_monitor, and no other after it
    assert "the gradient of down.weight underflows: 100 % of its elements were flushed to zero in step 0" in logged[0]
    assert found["down.weight"]["gradient"].flushed == pytest.approx(1 - 1 / TOKENS)
    assert found["down.weight"]["gradient"].flushed > UNDERFLOW
    assert found["up.weight"]["gradient"].flushed == 0.0  # it is zero before it is quantized


def test_a_recipe_with_smaller_blocks_does_not_underflow(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(Block(), 1)
    with caplog.at_level(logging.WARNING, "fp8fn"):
        underflowing(model(torch.randn(TOKENS, WIDTH))).backward()
        found = fp8fn.read_monitor(model)
    assert not caplog.messages
    assert found["down.weight"]["gradient"].flushed == 0.0


# ---- names and models -------------------------------------------------------------------------------------------


def test_a_model_by_its_parts() -> None:
    """The compiled module, the module itself, and a module that contains it."""
    block = Block()
    whole = nn.ModuleDict({"block": block, "other": Block()})
    watched = compiled(block)
    step(watched)
    names = ["gate.weight", "up.weight", "down.weight"]
    assert list(fp8fn.read_monitor(watched)) == list(fp8fn.read_monitor(block)) == names
    assert list(fp8fn.read_monitor(whole)) == [f"block.{name}" for name in names]
    with pytest.raises(RuntimeError, match="no compiled graph with this model's weights"):
        fp8fn.read_monitor(whole["other"])


def test_a_weight_of_two_products() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.tanh(self.a(x)) * 2**10)

    watched = compiled(Twice())
    step(watched)
    found = fp8fn.read_monitor(watched)
    assert list(found) == ["a.weight", "a.weight#2"]
    assert found["a.weight#2"]["activation"].amax > 2**8 > found["a.weight"]["activation"].amax


def test_modules_that_share_a_graph_are_not_monitored(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend="fp8fn", options={"where": "*", "monitor": 1})
    with caplog.at_level(logging.WARNING, "fp8fn"):
        step(model)
    assert [message for message in caplog.messages if "several modules share one compiled graph" in message]
    with pytest.raises(RuntimeError, match="compile the model as a whole"):
        fp8fn.read_monitor(model)


def test_models_that_take_turns() -> None:
    """PyTorch gives two copies of a model one graph; each has its own steps and statistics."""
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    watched = [compiled(model, 2, dynamic=False) for model in models]
    for model in models:
        model[0].requires_grad_(False)  # no backward writes this layer's gradient
    for i in (0, 0, 0, 1, 0):
        watched[i](torch.randn(TOKENS, WIDTH)).sum().backward()
    assert [steps_of(model) for model in watched] == [{2}, {0}]
    for model, run in zip(models, watched, strict=True):
        found = fp8fn.read_monitor(run)
        assert [*found["0.weight"]] == ["activation", "weight"]
        for name, operands in found.items():
            assert operands["weight"].amax == model.get_parameter(name).abs().max().item()


def test_weights_that_took_the_place_of_others() -> None:
    model = Block()
    watched = compiled(model)
    step(watched)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    before = fp8fn.read_monitor  # the graph has not seen the new weights yet
    with pytest.raises(RuntimeError, match="no compiled graph with this model's weights"):
        before(watched)
    step(watched)
    assert fp8fn.read_monitor(watched)["up.weight"]["weight"].amax == model.up.weight.abs().max().item()


# ---- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "100"])
def test_an_option_that_is_no_number_of_steps(every: Any) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"options\['monitor'\] is .*; use a number"):
        step(compiled(Block(), every))


def test_a_model_without_a_monitor() -> None:
    model = compiled(Block(), None)
    step(model)
    with pytest.raises(RuntimeError, match=r'compile it with torch.compile\(model, backend="fp8fn"'):
        fp8fn.read_monitor(model)
    with pytest.raises(TypeError, match="model is a function"):
        fp8fn.read_monitor(step)  # type: ignore[arg-type]


# ---- TensorBoard ------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


def test_write_monitor() -> None:
    first = fp8fn.Statistics(saturated=0.0, flushed=0.5, amax=2.0, snr_db=31.0, exact=True, step=100)
    statistics = {"fc.weight": {"activation": first, "gradient": replace(first, flushed=0.25, step=101)}}
    writer = Writer()
    fp8fn.write_monitor(writer, statistics)
    fp8fn.write_monitor(writer, statistics, 7)
    assert len(writer.written) == 16
    assert writer.written[1] == ("fp8/fc.weight/activation/flushed", 0.5, 100)
    assert writer.written[5] == ("fp8/fc.weight/gradient/flushed", 0.25, 101)
    assert writer.written[9] == ("fp8/fc.weight/activation/flushed", 0.5, 7)
    with pytest.raises(TypeError, match="writer is a list without add_scalar"):
        fp8fn.write_monitor([], statistics)  # type: ignore[arg-type]


def test_tensorboard(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    watched = compiled(nn.Linear(WIDTH, WIDTH))
    step(watched)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        fp8fn.write_monitor(writer, fp8fn.read_monitor(watched))
    assert list(tmp_path.iterdir())


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu(mode: str) -> None:
    """Statistics of the layers of a GPU's graph, captured in a CUDA graph or not, and bits of the gradients."""
    torch.manual_seed(0)
    plain = Block().to("cuda", torch.bfloat16)
    watched = copy.deepcopy(plain)
    results: list[list[Tensor]] = [[], []]
    for model, every, found in ((plain, None, results[0]), (watched, 4, results[1])):
        torch._dynamo.reset()
        options = {**torch._inductor.list_mode_options(mode)} if mode != "default" else {}
        run = compiled(model, every, **options)
        for seed in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
            out = run(x)
            out.sin().sum().backward()
            found += [out.detach().clone(), *(each.clone() for each in gradients(model))]
        if every is not None:
            statistics = fp8fn.read_monitor(run)
    assert all(map(torch.equal, *results))
    assert {of.step for operands in statistics.values() for of in operands.values()} == {8}
    for name, weight in watched.named_parameters():
        if weight.ndim > 1:
            wanted = expected(weight.detach().T, (128, 128), fp8fn.BLOCKWISE, None)
            assert asdict(statistics[name]["weight"]) == pytest.approx({**wanted, "exact": True, "step": 8}, rel=1e-6)
            assert len(statistics[name]) == 3
            assert all(of.snr_db > 25 for of in statistics[name].values())


# ---- regions ----------------------------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def shared(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.compiler.nested_compile_region
def shared_twice(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return shared(shared(x, v), w)


@torch.compiler.nested_compile_region
def shared_experts(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=offsets)


class Regions(nn.Module):
    """Four weights of regions that are called several times, each 16 times the one before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, groups = kind, [3] if kind == "experts" else []
        generator = torch.Generator().manual_seed(1)
        weights = (torch.randn(*groups, WIDTH, WIDTH, generator=generator) * 16.0**layer for layer in range(4))
        self.layers = nn.ParameterList(w.bfloat16() for w in weights)
        self.register_buffer("ends", torch.tensor([100, 228, 320], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "nested":
            first, second, third, fourth = self.layers  # Dynamo of PyTorch 2.11 traces no slice of a ParameterList
            return shared_twice(shared_twice(x, first, second), third, fourth)  # type: ignore[no-any-return]
        for w in self.layers:
            x = shared_experts(x, w, self.ends) if self.kind == "experts" else shared(x, w)
        return x


@pytest.mark.parametrize("kind", ["flat", "nested", "experts"])
def test_layers_that_share_a_region_have_statistics_of_their_own(kind: str) -> None:
    """The products of all calls are those of one graph without the monitor, and have the same bits with it."""
    plain = Regions(kind)
    watched = copy.deepcopy(plain)
    out_grad = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for model, every in ((plain, None), (watched, 1)):
        torch._dynamo.reset()
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        out = compiled(model, every)(x)
        out.backward(out_grad)
        results.append([out, x.grad, *gradients(model)])
    assert all(map(torch.equal, *results))
    found = fp8fn.read_monitor(watched)
    assert list(found) == [f"layers.{layer}" for layer in range(4)]
    for layer, operands in enumerate(found.values()):
        w = watched.layers[layer].detach()
        assert operands["weight"].amax == w.abs().max().item()
        matrices = w.reshape(-1, WIDTH, WIDTH).float()
        error = torch.cat([m - fp8fn.dequantize(fp8fn.quantize(m, (128, 128)), torch.float32) for m in matrices])
        snr = 10 * torch.log10(matrices.square().sum() / error.square().sum()).item()
        assert operands["weight"].snr_db == pytest.approx(snr, abs=1e-3)
    assert found["layers.0"]["activation"].amax == x.abs().max().item()
    assert found["layers.3"]["gradient"].amax == out_grad.abs().max().item()
    for layer in range(3):
        scale = 16.0**layer * WIDTH**0.5  # by which one product multiplies what it reads
        before, after = found[f"layers.{layer}"], found[f"layers.{layer + 1}"]
        assert after["activation"].amax / before["activation"].amax == pytest.approx(scale, rel=0.5)
        assert before["gradient"].amax / after["gradient"].amax == pytest.approx(16 * scale, rel=0.5)
