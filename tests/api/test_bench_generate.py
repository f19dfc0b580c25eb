"""`bench generate`: a step's logits equal those of whole sequences, the compiled loop's tokens the eager loop's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import fp8fn
from fp8fn import cli
from fp8fn.bench import generate, record
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.generate import PROMPT, WAYS, Loop, Row, agreement, prompts
from fp8fn.bench.llama import A16W8, MX, SIZES, A16W8WithHead, Generator, Plain, Quantized
from fp8fn.bench.served import SERVED, Served
from fp8fn.demo.model import rotary_table, rotate
from fp8fn.timing import clock_of

CPU = torch.device("cpu")
SIZE = replace(SIZES["tiny"], layers=1)
BATCH, CONTEXT, GIVEN = 3, 32, 8


@pytest.fixture(autouse=True)
def no_grad(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(count: int = GIVEN) -> Tensor:
    return torch.randint(SIZE.vocabulary, (BATCH, count))


def loop(model: Generator, step: Any, given: Tensor, steps: int = CONTEXT - 1) -> Tensor:
    """All tokens of a loop."""
    model.start(given)
    for _ in range(steps):
        step()
    return model.tokens.clone()


def whole(model: Any, sequences: Tensor) -> Tensor:
    """The logits `(B, T, vocabulary)` of whole sequences: causal attention, every head of a key by itself."""
    size, length = model.layers[0].attention.size, sequences.shape[1]
    cos, sin = rotary_table(length, size.head, theta=500_000.0)

    def by(linear: Plain | Quantized, x: Tensor) -> Tensor:
        w = fp8fn.dequantize(linear.weight, torch.float32) if isinstance(linear, Quantized) else linear.weight
        return x @ w.T

    x = model.embedding(sequences)
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        heads = by(attention.qkv, layer.attention_norm(x)).unflatten(-1, (-1, size.head)).transpose(1, 2)
        q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], dim=1)
        k, v = (part.repeat_interleave(size.heads // size.kv_heads, dim=1) for part in (rotate(k, cos, sin), v))
        seen = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        x = x + by(attention.out, seen.transpose(1, 2).flatten(2))
        gate, up = by(mlp.gate_up, layer.mlp_norm(x)).chunk(2, dim=-1)
        x = x + by(mlp.down, F.silu(gate) * up)
    return by(model.head, model.norm(x))


@pytest.mark.parametrize("hold", [Plain, A16W8, A16W8WithHead])
def test_a_step_gives_the_logits_of_whole_sequences(hold: Any) -> None:
    model = Generator(SIZES["tiny"], hold, BATCH, CONTEXT, CPU, torch.float32)
    given = tokens(CONTEXT)
    model.start(given)
    found = torch.stack([model().clone() for _ in range(CONTEXT - 1)], dim=1)
    assert model.position.item() == CONTEXT - 1
    assert torch.equal(model.tokens, given)
    torch.testing.assert_close(found, whole(model, given)[:, :-1], atol=2e-4, rtol=0)


def test_the_loop_is_greedy() -> None:
    """The prompt stays, and each later token is the likeliest one after the tokens before it."""
    model = Generator(SIZE, A16W8, BATCH, CONTEXT, CPU, torch.float32)
    given = tokens()
    found = loop(model, model, given)
    assert torch.equal(found[:, :GIVEN], given)
    assert torch.equal(found[:, GIVEN:], whole(model, found)[:, GIVEN - 1 : -1].argmax(-1))
    assert torch.equal(loop(model, model, given), found)  # keys and values of an earlier loop are masked


def test_the_compiled_loop_makes_the_tokens_of_the_eager_one() -> None:
    """The loop is in float32, where rounding decides no token, and compiles once for two prompts."""
    model = Generator(SIZE, A16W8, BATCH, CONTEXT, CPU, torch.float32)
    step = torch.compile(model, fullgraph=True, dynamic=False)
    for given in (tokens(), tokens(3)):
        assert torch.equal(loop(model, step, given), loop(model, model, given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("hold", "ops"), [(A16W8, {"mm_a16w8": 4}), (A16W8WithHead, {"mm_a16w8": 5}), (MX, {"mx_mm": 4, "quantize": 4})]
)
def test_the_graph_reads_weights_where_they_lie(hold: Any, ops: dict[str, int]) -> None:
    """The graph has one op for each product, on views of its inputs, so that a CUDA graph copies none of them."""
    from torch._inductor.compile_fx import compile_fx

    graphs: list[tuple[GraphModule, list[Any], Any]] = []

    def kept(graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append((graph, inputs, options["static_input_idxs"]))
        return graph.forward

    model = Generator(SIZE, hold, BATCH, CONTEXT, CPU)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, fullgraph=True, backend=partial(compile_fx, inner_compile=kept))()
    ((graph, inputs, static),) = graphs
    assert sorted(static) == [*range(len(inputs))]
    nodes = [node for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "fp8fn"]
    names = [node.target._opname for node in nodes]
    assert {name: names.count(name) for name in names} == ops
    for node in nodes:
        if node.target._opname == "quantize":
            continue
        at = 2 if hold is MX else 1
        for weight in node.args[at : at + 2]:
            assert weight.target is torch.ops.aten.permute.default
            assert weight.args[0].op == "placeholder"


def test_agreement() -> None:
    """One token of four is the second best, 0.5 behind."""
    logits = torch.tensor([[1.0, 0.5, -1.0]]).expand(2, 2, 3).clone()
    same, gap = agreement(logits, torch.tensor([[0, 0], [1, 0]]))
    assert same == 0.75
    assert gap == pytest.approx(0.5 / logits.std().item())


def test_the_bytes_of_weights() -> None:
    products = 256 * (256 + 2 * 64) + 256 * 256 + 3 * 256 * 512
    head = 2 * 512 * 256
    sizes = {way: Generator(SIZE, hold, 1, 8, CPU).weight_bytes() for way, hold in WAYS.items()}
    assert sizes["bf16"] == head + 2 * products
    assert sizes["A16W8"] == head + products + 4 * products // 128**2
    assert sizes["MX"] == head + products + products // 32
    assert sizes["A16W8 + head"] == (head + 2 * products) // 2 + 4 * (head // 2 + products) // 128**2
    assert sizes["A16W8, constant"] == sizes["A16W8"]
    assert sizes["MX, constant"] == sizes["MX"]


@pytest.mark.parametrize(
    ("change", "wrong"), [({}, False), ({"snr_db": 14.9}, True), ({"snr_db": float("nan")}, True), ({"gap": 0.5}, True),
                          ({"gap": 0.4}, False), ({"gap": 0.4, "snr_db": 37.5}, True),
                          ({"compiled": 2}, True), ({"skipped": 1}, True), ({"copied": 9}, False)],
)  # fmt: skip
def test_what_is_wrong(change: dict[str, Any], wrong: bool) -> None:
    row = Row(batch=1, way="MX", ms=1.0, ms_q1=1.0, ms_q3=1.0, tokens_s=1e3, weight_bytes=10**9, snr_db=22.0,
              as_eager=0.9, gap=0.1, compiled=1, skipped=0, copied=0)  # fmt: skip
    assert replace(row, **change).wrong is wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    pytest.importorskip("transformers")
    argv = ["bench", "generate", "--device", "cpu", "--layers", "1", "--batch", "2", "--steps", "20", "--rounds", "1"]
    assert cli.main([*argv, "--json", str(path)]) == 0
    run = record.read(path)
    assert run["results"]["size"]["layers"] == 1
    rows = {row["way"]: Row(**row) for row in run["results"]["rows"]}
    served = [f"transformers {weights}{loop}" for loop in ("", " + loop") for weights in ("bf16", "A16W8")]
    assert list(rows) == [*WAYS, *served]
    for row in rows.values():
        assert row.tokens_s == pytest.approx(2e3 / row.ms)
        assert row.ms_q1 <= row.ms <= row.ms_q3
        assert row.as_eager > 0.8
        assert (row.compiled, row.skipped) == (1, 0)
    assert rows["bf16"].snr_db > 38  # compiled, it rounds less often
    assert rows["A16W8"].snr_db > 24
    assert rows["MX"].snr_db > 20
    assert rows["A16W8"].snr_db > rows["A16W8 + head"].snr_db > 22
    assert all(rows[way].snr_db > (38 if "bf16" in way else 24) for way in served)
    table = generate.table(run)
    assert capsys.readouterr().out.endswith(f"\n{table}\n")
    assert f"{rows['bf16'].ms / rows['MX'].ms:.2f}x" in table
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    for way in ("transformers A16W8", "transformers A16W8 + loop"):
        (line,) = [line for line in cells if way in line]
        assert line[5] == f"{rows['A16W8'].ms / rows[way].ms:.2f}x"


def row_of(way: str, ms: float) -> dict[str, Any]:
    return asdict(Row(batch=1, way=way, ms=ms, ms_q1=ms, ms_q3=ms, tokens_s=1e3 / ms, weight_bytes=10**9, snr_db=22.0,
                      as_eager=1.0, gap=0.0, compiled=1, skipped=0, copied=0))  # fmt: skip


def test_the_table_compares_transformers_with_the_loop() -> None:
    """A run without transformers has no such column, as runs of earlier versions."""
    rows = [row_of("bf16", 2.0), row_of("A16W8", 1.0)]
    run = record.make("generate", {"rows": rows})
    assert "of the loop's" not in generate.table(run)
    run["results"]["rows"] = [*rows, row_of("transformers A16W8", 1.25), row_of("transformers bf16", 2.5)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in generate.table(run).splitlines()[:6]]
    assert lines[0][3:5] == ["speedup over bf16", "of the loop's"]
    assert [line[3:5] for line in lines[2:]] == [["1.00x", ""], ["2.00x", ""], ["1.60x", "0.80x"], ["0.80x", "0.80x"]]


# --- transformers' generate


def greedy(model: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    """The likeliest tokens, each by a forward of the whole sequence in eager, without a cache."""
    tokens = prompt
    for _ in range(new_tokens):
        logits = type(model).forward(model, input_ids=tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.slow(but="transformers A16W8")
@pytest.mark.parametrize("way", SERVED)
def test_generate_of_transformers_compiles_once_and_makes_eager_tokens(way: str) -> None:
    """In float32, where rounding decides no token; calls of other lengths and a second prompt compile nothing."""
    pytest.importorskip("transformers")
    served = Served(way, replace(SIZE, kv_heads=4), BATCH, CONTEXT, CPU)
    served.model.float()
    held = [p for p in served.model.parameters() if isinstance(p, fp8fn.FP8Weight)]
    assert len(held) == (0 if SERVED[way].loop == "bf16" else 7)
    steps = CONTEXT - 1
    first = prompts(SIZE, BATCH, CPU)
    for prompt in (first, first.flip(0)):
        made = served.generate(prompt, steps)
        assert torch.equal(made, greedy(served.model, prompt, CONTEXT - PROMPT))
    served.seconds(first, steps, clock_of(CPU))
    assert served.counts["compiled"] == (2 if SERVED[way].forward else 1)


def test_logits_of_transformers_are_compared_after_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    served = Served("transformers A16W8", replace(SIZE, kv_heads=4), BATCH, CONTEXT, CPU)
    logits, reference, eager, made = served.compared(prompts(SIZE, BATCH, CPU), CONTEXT - 1)
    assert logits.shape == reference.shape == ((CONTEXT - PROMPT) * BATCH, SIZE.vocabulary)
    assert eager.shape == (CONTEXT - PROMPT, BATCH, SIZE.vocabulary)
    assert torch.equal(logits.argmax(-1), made.flatten())
    assert snr_db(eager.flatten(0, 1), logits) > 38
    assert 24 < snr_db(reference, logits) < 36
    same, gap = agreement(eager, made)
    assert same > 0.9
    assert gap < generate.gap_bar(38)


def test_the_first_token_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 16 tokens takes 100 s and one of the first token 10 s: each of the 15 others took 6 s."""
    served = object.__new__(Served)
    times = {1: 10.0, 16: 100.0}
    monkeypatch.setattr(served, "_seconds", lambda prompt, new_tokens, clock: times[new_tokens], raising=False)
    assert served.seconds(torch.empty(0), 31, clock_of(CPU)) == 6.0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--device", "cpu", "--steps", "16"), "--steps 16 is not more than the prompt's 16 tokens"),
        (("--ways", "A16W4"), "invalid choice: 'A16W4'"),
        (("--batch", "0"), "not a positive whole number"),
    ],
)
def test_wrong_use(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", "generate", *argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize(
    ("way", "bar"), [("A16W8", 35.0), ("A16W8, constant", 35.0), ("MX", 22.0), ("MX, constant", 22.0)]
)
def test_cuda_graphs_make_the_tokens_of_eager_pytorch(way: str, bar: float) -> None:
    """The step is one CUDA graph that copies nothing; its tokens are eager PyTorch's likeliest, apart from ties."""
    steps = 63
    cuda = torch.device("cuda")
    found = Loop(way, SIZES["tiny"], 4, steps + 1, cuda)
    prompt = prompts(SIZES["tiny"], 4, cuda)
    torch.cuda.synchronize()
    found.generate(prompt, 4)  # before the capture products read their weights late, and may add in another order
    made = found.generate(prompt, steps).clone()
    assert torch.equal(found.generate(prompt, steps), made)
    assert found.counts == {"compiled": 1}
    assert torch.equal(made[:, :PROMPT], prompt)
    eager, captured = (found.logits(made, steps, step) for step in (found.generator, None))
    assert snr_db(eager.flatten(0, 1), captured.flatten(0, 1)) > bar
    same, gap = agreement(eager[PROMPT - 1 :], made.T[PROMPT:])
    assert same > 0.85
    assert gap < generate.gap_bar(bar)
