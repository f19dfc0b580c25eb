"""Compiled graphs keep fewer bytes for the backward, and gradients keep their bits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.lowering.graph.nodes import arguments_of
from fp8fn.lowering.inductor import partitioner
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import code_cache
from fp8fn.ops.layout import is_column_major
from support.kept import Kept, OpByOp, kept

TOKENS, WIDTH, HIDDEN = 320, 256, 512
FP8 = torch.float8_e4m3fn
EXACT, HALF = SavePlan(), SavePlan("fp8")


class Gated(nn.Module):
    """A gated MLP with a norm."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.norm
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Attention(nn.Module):
    """Grouped-query attention: 4 heads of queries for one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        q = self.q(x).view(1, count, 2, 128).transpose(1, 2)
        k, v = (
            product(x).view(1, count, 1, 128).transpose(1, 2).expand(1, 2, count, 128).clone()
            for product in (self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(out.transpose(1, 2).reshape(count, WIDTH))


class Written(nn.Module):
    """State that the forward reads and then writes: a mean, and a buffer and a parameter that products multiply by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))
        self.register_buffer("w", torch.randn(WIDTH, WIDTH) / 16)
        self.writes = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.a(x))
        y = self.c(fp8fn.linear(self.b(h - self.mean), self.w))
        if self.writes:
            with torch.no_grad():
                self.mean.copy_(h.mean(0) * 9)
                self.w.mul_(4)
                self.c.weight.mul_(2)
        return y


class Tied(nn.Module):
    """One weight in two products, and two weights that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x))) + self.b(x)


@torch.compiler.nested_compile_region
def shared_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@torch.compiler.nested_compile_region
def shared_experts(x: Tensor, up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
    return x + torch._grouped_mm(F.silu(torch._grouped_mm(x, up, offs=offsets)), down, offs=offsets)


class Regions(nn.Module):
    """Layers that share a region: two gated MLPs and two mixtures."""

    def __init__(self) -> None:
        super().__init__()
        mlp, experts = [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)], [(2, WIDTH, HIDDEN), (2, HIDDEN, WIDTH)]
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape) / 16) for shape in (mlp + experts) * 2)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([100, x.shape[0]], dtype=torch.int32)
        for layer in (self.layers[:5], self.layers[5:]):
            x = shared_experts(shared_mlp(x, *layer[:3]), *layer[3:], offsets)
        return x


class Experts(nn.Module):
    """Two experts' weights as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * HIDDEN) / 16)
        self.down = nn.Parameter(torch.randn(2, HIDDEN, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([100, x.shape[0]], dtype=torch.int32)
        gate, up = fp8fn.grouped_gemm(x, self.up, offsets).chunk(2, -1)
        return fp8fn.grouped_gemm(F.silu(gate) * up, self.down, offsets)


def step(plan: SavePlan | None, model: nn.Module, count: int = TOKENS, **options: Any) -> Kept:
    torch._dynamo.reset()
    return compiled_step(compiled(plan, model, **options), model, count)


def compiled(plan: SavePlan | None, model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    recipe = options.pop("recipe", fp8fn.BLOCKWISE)
    return torch.compile(model, backend=OpByOp(plan, recipe), fullgraph=True, **options)


def compiled_step(call: Callable[[Tensor], Tensor], model: nn.Module, count: int = TOKENS) -> Kept:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).bfloat16().requires_grad_()
    return kept(model, lambda: call(x).float().square().mean())


def made(kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).bfloat16()


def weight_bytes(model: nn.Module, result: Kept) -> int:
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    shapes |= {(*shape[:-2], shape[-1], shape[-2]) for shape in shapes}
    return sum(nbytes for nbytes, shape, dtype in result.tensors if dtype == FP8 and shape in shapes)


@pytest.mark.parametrize("kind", [Gated, Gelu, Attention, Tied, Experts, Regions])
def test_the_default_keeps_less_with_the_same_bits(kind: type[nn.Module]) -> None:
    model = made(kind)
    everything, exact = step(None, model), step(EXACT, model)
    assert exact.equals(everything)
    assert weight_bytes(model, everything) > 0
    assert weight_bytes(model, exact) == 0
    assert exact.nbytes < everything.nbytes - weight_bytes(model, everything) or kind is Tied


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_square", "rowwise", "tensorwise", "mxfp8"])
def test_no_recipe_keeps_a_weight(recipe: str) -> None:
    model, chosen = made(Gated), fp8fn.ops.recipe.parse_recipe(recipe)
    everything = step(None, model, recipe=chosen)
    exact = step(EXACT, model, recipe=chosen)
    assert exact.equals(everything)
    assert weight_bytes(model, exact) == 0
    keeping = step(SavePlan(keep_weights=True), model, recipe=chosen)
    assert keeping.equals(everything)
    assert weight_bytes(model, keeping) == weight_bytes(model, everything) > 0


def test_hopper_quantizes_a_weight_once_on_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its square blocks are stored along either axis: the forward stores a weight along one, the backward the other."""
    monkeypatch.setattr(fp8fn.ops.gemm, "_on_hopper", lambda x, block: block == (128, 128))
    model = made(Gated)
    everything = step(None, model)
    torch._dynamo.reset()
    backend = OpByOp(EXACT)
    exact = compiled_step(torch.compile(model, backend=backend, fullgraph=True), model)
    assert exact.equals(everything)
    assert weight_bytes(model, exact) == 0

    def weights(module: torch.fx.GraphModule) -> list[tuple[str, bool]]:
        """The quantizers, and whether each is of a weight as it lies, along whose rows the forward sums."""
        nodes = [node for node in module.graph.nodes if "fp8fn.quantize" in str(node.target)]
        square = [node for node in nodes if tuple(arguments_of(node).get("block", ())) == (128, 128)]
        return [(str(node.target), is_column_major(node.meta["val"][0])) for node in square]

    assert weights(backend.forward[0]) == [("fp8fn.quantize.default", True)] * 3
    assert weights(backend.backward[0]) == [("fp8fn.quantize.default", False)] * 3


def test_what_is_kept_of_a_gated_mlp() -> None:
    """By the exact plan gate and up in 16 bits and no form of their product, by the other one both in FP8."""
    hidden = {dtype: TOKENS * HIDDEN * dtype.itemsize for dtype in (FP8, torch.bfloat16)}
    for plan, dtype in ((EXACT, torch.bfloat16), (HALF, FP8)):
        result = step(plan, made(Gated))
        assert [nbytes for nbytes, shape, _ in result.tensors if shape == (TOKENS, HIDDEN)] == [hidden[dtype]] * 2


def test_the_log_lists_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fp8fn"):
        result = step(EXACT, made(Gated))
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kept between forward")]
    _, total, *lines = text.splitlines()
    of_loss = TOKENS * WIDTH * 4  # is computed outside of the graph
    assert total.split()[0] == f"{result.nbytes - of_loss:,}"
    wide = [line.split() for line in lines if f" {TOKENS}x{HIDDEN} " in line]
    assert [line[:4] for line in wide] == [["327,680", "bfloat16", "320x512", "fp8fn.scaled_mm.default"]] * 2
    assert all(line[4].startswith("test_saved.py:") for line in wide)


def test_keys_and_values_are_kept_before_they_are_repeated() -> None:
    results = [step(plan, made(Attention), 512).tensors for plan in (None, EXACT)]
    sizes = [[nbytes for nbytes, _, dtype in result if dtype == torch.bfloat16] for result in results]
    one, repeated = 512 * 128 * 2, 512 * 256 * 2
    assert sizes[0].count(one) == 0
    assert sizes[1].count(one) == 2
    assert sizes[1].count(repeated) == sizes[0].count(repeated) - 2


@pytest.mark.parametrize(("kind", "bias"), [(Gated, False), (Gated, True), (Gelu, None)])
def test_fp8_is_near(kind: type[nn.Module], bias: bool | None) -> None:
    model = made(kind, **({} if bias is None else {"bias": bias}))
    everything, exact, half = (step(plan, model) for plan in (None, EXACT, HALF))
    assert half.loss == everything.loss
    assert half.worst_snr(everything) > 20
    inputs = 1 if kind is Gelu else 2
    assert exact.nbytes - half.nbytes == inputs * TOKENS * HIDDEN * (2 - 1 - 4 / 128)


class Sine(nn.Module):
    """Whose derivative has 30 times the error of its input."""

    def __init__(self, scale: float = 30.0) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.scale * self.up(x)))


def test_inputs_of_sensitive_functions_stay_in_16_bits() -> None:
    model = made(Sine)
    assert step(HALF, model).equals(step(None, model))


def test_a_graph_without_products_in_fp8_stays_as_it_is() -> None:
    results = []
    for plan in (EXACT, HALF):
        torch._dynamo.reset()
        model = made(Gelu)
        results.append(compiled_step(torch.compile(model, backend=OpByOp(plan, None)), model))
    assert results[1].equals(results[0])
    assert results[1].nbytes == results[0].nbytes


def test_32_bit_values_stay_with_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_said", set())
    torch.manual_seed(0)
    model, x = Gelu(), torch.randn(TOKENS, WIDTH)
    results = []
    for plan in (EXACT, HALF):
        torch._dynamo.reset()
        call = compiled(plan, model)
        results.append(kept(model, lambda call=call: call(x).square().mean()))
    assert results[1].equals(results[0])
    assert [r.getMessage() for r in caplog.records if "save=" in r.getMessage()] == [
        "save='fp8' keeps nothing in FP8: it takes values of 16 bits, and these are float32; use autocast"
    ]


class Batched(nn.Module):
    """A product that stays in 16 bits, whose batch and rows both have symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.down = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(torch.bmm(x, self.w.expand(x.shape[0], WIDTH, WIDTH))))


def test_two_symbolic_sizes(fresh_dynamo: None) -> None:
    model, results = made(Batched), []
    x = torch.randn(5, 68, WIDTH).bfloat16()
    for plan in (EXACT, HALF):
        torch._dynamo.reset()
        call = compiled(plan, model, dynamic=True)
        results.append(kept(model, lambda call=call: call(x).float().square().mean()))
    assert results[1].equals(results[0])


def test_one_graph_serves_every_count_of_tokens() -> None:
    model = made(Gated)
    for plan in (EXACT, HALF):
        torch._dynamo.reset()
        call = compiled(plan, model, dynamic=True)
        got = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = [compiled_step(call, model, count) for count in (320, 260, 507)]
        torch._dynamo.reset()
        plain = compiled(None, model, dynamic=True)
        for result, count in zip(got, (320, 260, 507), strict=True):
            expected = compiled_step(plain, model, count)
            assert weight_bytes(model, result) == 0
            assert result.equals(expected) if plan is EXACT else result.worst_snr(expected) > 20


def test_checkpointed_layers_keep_nothing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Gated(), Gated()

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = made(Checkpointed)
    everything, exact, half = (step(plan, model) for plan in (None, EXACT, HALF))
    assert exact.equals(everything)
    assert half.equals(everything)
    assert exact.nbytes <= everything.nbytes
    assert half.nbytes == exact.nbytes


def test_a_memory_budget_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    model = made(Gated)
    with torch._functorch.config.patch(activation_memory_budget=0.9), caplog.at_level(logging.WARNING, "fp8fn"):
        everything, half = (step(plan, model) for plan in (None, HALF))
    assert half.equals(everything)
    assert [r.getMessage() for r in caplog.records if "save=" in r.getMessage()] == [
        "save='fp8' is ignored: activation_memory_budget=0.9 decides what is kept; set one of the two"
    ]


@pytest.mark.parametrize("kind", ["plain", "products read along the sum"])
def test_inductor_gives_the_same_bits(kind: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind has one scale for a matrix, and as on Hopper each side stores its own orientation."""
    recipe = fp8fn.BLOCKWISE if kind == "plain" else fp8fn.TENSORWISE
    if kind != "plain":
        monkeypatch.setattr(fp8fn.ops.gemm, "_on_hopper", lambda x, block: block == (-1, -1))
    model, results = made(Gated), {}
    for save in ("all", "exact", "fp8"):
        torch._dynamo.reset()
        call = torch.compile(model, backend="fp8fn", options={"recipe": recipe, "where": "*", "save": save})
        results[save] = compiled_step(call, model)
    assert results["exact"].equals(results["all"])
    assert results["fp8"].worst_snr(results["all"]) > 20
    assert results["fp8"].nbytes < results["exact"].nbytes < results["all"].nbytes


@pytest.mark.parametrize("rounds", [True, False])
def test_a_sum_that_inductor_does_not_round(rounds: bool, fresh_dynamo: None) -> None:
    """Inductor computes `x + y` of a residual stream again within the next norm's backward, without its rounding.

    Where the backward quantizes the norm again, an op reads the rounded sum.
    """
    torch.manual_seed(0)
    model, results = nn.Sequential(Gated(), Gated()).bfloat16(), {}
    for save in ("all", "exact"):
        torch._dynamo.reset()
        options = {"where": "*", "save": save, "emulate_precision_casts": rounds}
        call = torch.compile(model, backend="fp8fn", options=options)
        results[save] = compiled_step(call, model)
    assert results["exact"].loss == results["all"].loss
    exact = rounds and torch.__version__ >= "2.13"  # PyTorch 2.11 does not round this sum with the option either
    assert results["exact"].worst_snr(results["all"]) > (200 if exact else 35)


def test_the_backward_reads_what_the_forward_read(fresh_dynamo: None) -> None:
    """The forward writes state after it has read it, which a backward that reads it again would not notice."""
    start, results = made(Written), {}
    for save in ("all", "exact", "fp8"):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        call = torch.compile(model, backend="fp8fn", options={"where": "*", "save": save})
        results[save] = compiled_step(call, model)
        assert torch.equal(model.w, start.w * 4)
    assert results["exact"].equals(results["all"])
    assert results["fp8"].worst_snr(results["all"]) > 20
    start.writes = False
    assert results["exact"].worst_snr(compiled_step(start, start)) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_square", "tensorwise", "rowwise"])
def test_inductor_gives_the_same_bits_on_a_gpu(recipe: str, hopper: Any, fresh_dynamo: None) -> None:
    x = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)
    model = made(Gated).cuda()
    results = {}
    for save in ("all", "exact", "fp8"):
        torch._dynamo.reset()
        call = torch.compile(model, backend="fp8fn", options={"recipe": recipe, "where": "*", "save": save})
        results[save] = kept(model, lambda call=call: call(x).float().square().mean())
    assert results["exact"].equals(results["all"])
    assert results["fp8"].worst_snr(results["all"]) > 20
    assert results["fp8"].nbytes < results["exact"].nbytes < results["all"].nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": "no"}, r"options\['batch_invariant'\] is 'no'; use True or False"),
        ({"recipe": ""}, "recipe.*''"),
        ({"save": "half"}, r"options\['save'\] is 'half'; use one of \('all', 'exact', 'fp8'\)"),
        ({"save": "fp8", "custom_partitioner_fn": partitioner.Partitioner(EXACT, None)}, "set one of them"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, fresh_dynamo: None) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(torch.relu, backend="fp8fn", options=options)(torch.randn(4, 4))


def test_another_plan_is_no_hit() -> None:
    plans = [EXACT, HALF, SavePlan(keep_weights=True), SavePlan(fuse=False)]
    assert len({str(partitioner.Partitioner(plan, "sources").uuid()) for plan in plans}) == len(plans)
    assert partitioner.Partitioner(EXACT, "a").uuid() != partitioner.Partitioner(EXACT, "b").uuid()


def test_a_release_without_the_private_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert partitioner.fault() is None
    with monkeypatch.context() as patch:
        patch.delattr(torch._functorch.partitioners, "choose_saved_values_set")
        assert partitioner.fault() == "choose_saved_values_set(joint_graph, node_info, memory_budget)"
    monkeypatch.setattr(torch._functorch.partitioners, "NodeInfo", object)
    assert partitioner.fault() == "NodeInfo.is_required_fw"


@pytest.mark.slow
def test_a_llama_keeps_less_than_in_bf16() -> None:
    """Bytes kept for each token and layer: at most 0.66 of bf16's with the same bits, 0.49 with FP8 and 20 dB."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=512, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = 256
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(1))
    results = []
    for plan, recipe in ((None, None), (None, fp8fn.BLOCKWISE), (EXACT, fp8fn.BLOCKWISE), (HALF, fp8fn.BLOCKWISE)):
        torch._dynamo.reset()
        call = torch.compile(model, backend=OpByOp(plan, recipe, "model.layers.*"))
        # A CPU without instructions for bf16 takes a minute for the products of the backward, which nothing here reads.
        backward = recipe is not None
        results.append(kept(model, lambda call=call: call(input_ids=ids, labels=ids).loss, backward=backward))
    bf16, everything, exact, half = results
    shares = [result.nbytes / bf16.nbytes for result in (exact, half)]
    print("KB a token and layer:", [round(result.nbytes / tokens / 2 / 1024, 2) for result in results])
    assert exact.equals(everything)
    assert half.worst_snr(everything) > 20
    assert weight_bytes(model, exact) == weight_bytes(model, half) == 0
    assert shares[0] <= 0.66
    assert shares[1] <= 0.49
