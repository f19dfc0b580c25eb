"""Grouped products, quantizers and the MLPs of mixtures of experts, beside their peers: `python -m fp8fn bench moe`.

Suites:
- "forward": tokens `(M, K)` by experts `(E, K, N)`, on quantized operands.
- "few": the same of 16-bit tokens by FP8 experts in serving: M rows are M / 8 tokens, for 8 experts each.
- "deepgemm", "deepgemm-wgrad": the first and the next at DeepGEMM's own shapes.
- "deepgemm-masked": quantized operands of experts with room for M rows, of which the device counts C in the mean.
- "wgrad": the gradient `(E, N, K)` of the experts, each summed over the expert's tokens.
- "mlp": forward and backward of `expert_mlp`, quantization included; N is the intermediate size, K the hidden size.
- "layer": one layer of experts: the product, then forward and backward with quantization, beside a loop over experts.
- "quant": quantizers of M tokens with N columns in G groups.
- "weights": quantizers of `(E, K, N)`.

Tokens are divided evenly, or by Zipf's law with exponent 1.2, by whose weights those of "few" choose their experts. The
L2 is flushed by writes before products, and by reads before quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8fn
from fp8fn.bench import command, peers, tables
from fp8fn.bench.command import Suite
from fp8fn.bench.decode import BY_TRITON
from fp8fn.bench.experts import TOP_K, CountedExperts, Experts, routing_fault
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.bench.quant import SCHEDULE, bytes_moved
from fp8fn.bench.shapes import DEEPGEMM_GROUPS, DEEPGEMM_MASKED, DEEPGEMM_WGRAD
from fp8fn.ops.groups import spread_blocks
from fp8fn.ops.layout import WHOLE
from fp8fn.ops.operands import Quantization
from fp8fn.ops.targets import target_of
from fp8fn.timing import Call

# (E, M, N, K).
PRODUCTS: Final = ((8, 32768, 2048, 7168), (8, 32768, 7168, 2048), (8, 16384, 4096, 4096), (16, 16384, 8192, 5120))
# Qwen3-30B-A3B's and DeepSeek-V3's experts, 8 for each of 1 to 2048 tokens.
FEW: Final = tuple(
    (count, TOP_K * tokens, *sides)
    for count, *sides in ((128, 1536, 2048), (128, 2048, 768), (256, 4096, 7168))
    for tokens in (1, 16, 128, 2048)
)
MLP: Final = ((8, 32768, 2048, 7168),)
# The shapes that torchao published its grouped GEMM for MI300X with.
LAYERS: Final = (
    (8, 2048, 1024, 1024), (8, 4096, 2048, 2048), (8, 4096, 4096, 4096), (8, 8192, 4096, 4096), (16, 4096, 2048, 2048),
    (16, 8192, 4096, 4096), (8, 16384, 4096, 4096), (8, 4096, 5120, 5120), (8, 16640, 8192, 5120),
)  # fmt: skip
# (G, M, N): groups, tokens, columns. Then (E, K, N).
TOKENS: Final = tuple((groups, 16640, columns) for columns in (8192, 5120) for groups in (1, 16, 64))
WEIGHTS: Final = tuple((experts, *sides) for experts in (1, 16, 128) for sides in ((8192, 5120), (5120, 8192)))
_MLP_BAR_DB: Final = 20.0  # two products, one after the other
_DISTRIBUTIONS: Final = ("balanced", "zipf")
_COLUMNS: Final = "one scale a group and column"
_ALONG_N: Final = "(1,-1), along N"


def forward_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    found = []
    for distribution in _DISTRIBUTIONS:
        experts = Experts(shape, distribution, device)
        found.append(_case(experts, "fp8fn", f"1x128·128x128, {distribution}", _blockwise))
        found.append(_case(experts, "torch", f"rowwise, {distribution}", _torch_rowwise))
        if distribution == "balanced":
            found.append(_case(experts, "torch", "bf16", _torch_bf16))
            found.append(_case(experts, "torch", "bf16, a loop over experts", _loop))
            found.append(_case(experts, "deep_gemm", "1x128·128x128, balanced", _deep_gemm))
    return found


def _case(experts: Any, peer: str, name: str, build: Callable[[Any], Call]) -> Case:
    """A product of `Experts` or `CountedExperts`."""
    return Case(peer, name, partial(build, experts), lambda out: {"out": experts.out_snr_db(out)}, experts.operations)


def few_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    experts = Experts(shape, "routed", device)
    return [
        _case(experts, "fp8fn", "16 bits·128x128", _unquantized),
        _case(experts, "fp8fn", "1x128·128x128", _blockwise),
        _case(experts, "torch", "bf16", _torch_bf16),
    ]


def masked_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(E, M, C, N, K)`. DeepGEMM leaves the rows past a count unwritten."""
    experts = CountedExperts(shape, device)
    return [
        _case(experts, "fp8fn", "1x128·128x128, zeros past the counts", partial(_masked, zeros=True)),
        _case(experts, "fp8fn", "1x128·128x128", partial(_masked, zeros=False)),
        _case(experts, "deep_gemm", "1x128·128x128", _deep_gemm_masked),
        _case(experts, "torch", "bf16, rows one after the other", _torch_bf16_rows),
    ]


def wgrad_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    found = []
    for distribution in _DISTRIBUTIONS:
        experts = Experts(shape, distribution, device)

        def case(peer: str, name: str, build: Callable[[], Call], experts: Experts = experts) -> Case:
            return Case(peer, name, build, lambda dB: {"dB": experts.wgrad_snr_db(dB)}, experts.operations)

        found.append(case("fp8fn", f"1x128·128x1, {distribution}", partial(_blockwise_wgrad, experts)))
        found.append(case("fp8fn", f"1x128·128x128, {distribution}", partial(_square_wgrad, experts)))
        found.append(case("torch", f"bf16, {distribution}", partial(_torch_bf16_wgrad, experts)))
        if distribution == "balanced":
            found.append(
                case("deep_gemm", "1x128·128x1, balanced, added to float32", partial(_deep_gemm_wgrad, experts))
            )
    return found


def mlp_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(E, tokens, intermediate, hidden)`."""
    count, tokens, inner, hidden = shape
    experts = Experts((count, tokens, 2 * inner, hidden), "balanced", device)
    # Scaled as a model's weights are. Unscaled, the gate would be a step function, and its gradient noise.
    gate_up = (experts.w * hidden**-0.5).requires_grad_()
    down = (normal(count * hidden, inner, device, 3).view(count, hidden, inner).mT * inner**-0.5).requires_grad_()
    x = experts.x.detach().requires_grad_()
    grad = normal(tokens, hidden, device, 4)
    exact: list[Tensor] = []

    def bf16(x: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, gate_up, offs=offsets).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, down, offs=offsets)

    def build(mlp: Callable[..., Tensor]) -> Call:
        def step() -> tuple[Tensor, ...]:
            out = mlp(x, gate_up, down, experts.offsets)
            return out, *torch.autograd.grad(out, (x, gate_up, down), grad)

        return step

    def accuracy(result: Sequence[Tensor]) -> dict[str, float]:
        from fp8fn.bench.accuracy import snr_db

        if not exact:  # in bf16, whose error is 20 dB under FP8's: a float64 step takes 300 times as long
            exact.extend(part.detach() for part in build(bf16)())
        pairs = zip(("out", "dx", "d gate_up", "d down"), exact, result, strict=True)
        return {name: snr_db(want.flatten(0, -2), got.flatten(0, -2)) for name, want, got in pairs}

    operations = 18.0 * tokens * inner * hidden
    return [
        Case("fp8fn", "expert_mlp", lambda: build(fp8fn.expert_mlp), accuracy, operations, snr_bar_db=_MLP_BAR_DB),
        Case("fp8fn", "two grouped_gemm", lambda: build(_composed), accuracy, operations, snr_bar_db=_MLP_BAR_DB),
        Case("torch", "bf16 _grouped_mm", lambda: build(bf16), None, operations),
    ]


def layer_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    experts = Experts(shape, "balanced", device)
    x, w = experts.x.requires_grad_(), experts.w.requires_grad_()
    spans, g = experts.spans(), experts.g

    def one_by_one(x: Any, w: Any) -> Tensor:
        return torch.cat([fp8fn.gemm(x[start:stop], w[expert]) for expert, (start, stop) in enumerate(spans)])

    def grouped(x: Any, w: Any) -> Tensor:
        return fp8fn.grouped_gemm(x, w, experts.offsets)

    def bf16(x: Tensor, w: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=experts.offsets)

    def quantized(multiply: Callable[[Any, Any], Tensor]) -> Call:
        tokens, matrices = x.detach(), w.detach()
        if multiply is grouped:
            return partial(grouped, fp8fn.quantize(tokens, (1, 128)), fp8fn.quantize(matrices, (128, 128)))
        a = [fp8fn.quantize(tokens[start:stop], (1, 128)) for start, stop in spans]
        b = [fp8fn.quantize(matrix, (128, 128)) for matrix in matrices]
        return lambda: torch.cat(list(map(fp8fn.gemm, a, b)))

    def forward(multiply: Callable[[Any, Any], Tensor]) -> Call:
        return partial(multiply, x.detach(), w.detach())

    def step(multiply: Callable[[Any, Any], Tensor]) -> Call:
        def run() -> tuple[Tensor, ...]:
            out = multiply(x, w)
            return out, *torch.autograd.grad(out, (x, w), g)

        return run

    def case(peer: str, name: str, build: Callable[[Any], Call], multiply: Callable[[Any, Any], Tensor]) -> Case:
        operations = experts.operations * (3 if build is step else 1)
        return Case(
            peer,
            name,
            partial(build, multiply),
            lambda out: {"out": experts.out_snr_db(out[0] if build is step else out)},
            operations,
        )

    return [
        case("fp8fn", "product", quantized, grouped),
        case("fp8fn", "product, expert by expert", quantized, one_by_one),
        Case(
            "torch",
            "rowwise product",
            partial(_torch_rowwise, experts),
            lambda out: {"out": experts.out_snr_db(out)},
            experts.operations,
        ),
        case("fp8fn", "forward", forward, grouped),
        case("fp8fn", "forward, expert by expert", forward, one_by_one),
        case("torch", "bf16 forward", forward, bf16),
        case("fp8fn", "forward and backward", step, grouped),
        case("torch", "bf16 forward and backward", step, bf16),
    ]


def quant_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(G, M, N)`. Bytes count the tokens, not the padding of their groups."""
    count, m, n = shape
    x = normal(m, n, device, 0)
    offsets = Experts((count, m, 1, 1), "balanced", device).offsets
    blocks = spread_blocks(m, count)
    copy = torch.empty_like(x)
    spread = 3.0 * m * n + 4.0 * blocks * n

    def case(peer: str, name: str, build: Callable[[], Call]) -> Case:
        return Case(peer, name, build, bytes=3.0 * m * n + 4.0 * count * n)

    return [
        Case("fp8fn", "(128,1) by groups", lambda: lambda: fp8fn.quantize_grouped(x, offsets), bytes=spread),
        Case(
            "fp8fn",
            "(1,128), and (128,128) by groups",
            lambda: lambda: torch.ops.fp8fn.quantize_grouped_dual(x, offsets, (1, 128), dual_block=(128, 128)),
            bytes=bytes_moved(m, n, [(1, 128)]) + 1.0 * m * n + 4.0 * blocks * (n / 128),
        ),
        Case(
            "fp8fn",
            "(1,128), and (128,1) by groups",
            lambda: lambda: fp8fn.quantize_grouped_dual(x, offsets),
            bytes=spread + bytes_moved(m, n, [(1, 128)]) - 2.0 * m * n,
        ),
        case("fp8fn", _COLUMNS, lambda: lambda: fp8fn.quantize_grouped(x, offsets, block=-1)),
        *([case("fp8fn", f"{_COLUMNS}{BY_TRITON}", partial(_by_triton, x, offsets))] if device.type == "cuda" else ()),
        case("torchao", _COLUMNS, lambda: peers.torchao_column_scales(x, offsets)),
        Case("torch", "copy", lambda: lambda: copy.copy_(x), bytes=4.0 * m * n, ceiling=True),
    ]


def weight_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(E, K, N)`, stored as `(E, N, K)`."""
    count, k, n = shape
    w = normal(count * n, k, device, 0).unflatten(0, (count, n)).mT
    copy = torch.empty_like(w)
    elements = float(count * k * n)

    def case(name: str, run: Callable[[], Any], written: int, scales: float) -> Case:
        return Case("fp8fn", name, lambda: run, bytes=(2.0 + written) * elements + 4.0 * scales)

    def along_n(peer: str, name: str, build: Callable[[], Call]) -> Case:
        return Case(peer, name, build, bytes=3.0 * elements + 4.0 * elements / n)

    return [
        case("(128,128) both ways", lambda: fp8fn.quantize_dual(w, (128, 128)), 2, 2 * elements / 128**2),
        case("(128,128)", lambda: fp8fn.quantize(w, (128, 128)), 1, elements / 128**2),
        case("(-1,1), along K", lambda: fp8fn.quantize(w, (-1, 1)), 1, elements / k),
        along_n("fp8fn", _ALONG_N, lambda: lambda: fp8fn.quantize(w, (1, -1))),
        *([along_n("fp8fn", f"{_ALONG_N}{BY_TRITON}", partial(_by_triton, w))] if device.type == "cuda" else ()),
        along_n("torchao", _ALONG_N, lambda: peers.torchao_row_scales(w)),
        Case("torch", "copy", lambda: lambda: copy.copy_(w), bytes=4.0 * elements, ceiling=True),
    ]


def _by_triton(x: Tensor, offsets: Tensor | None = None) -> Call:
    """Our quantizer in Triton of whole rows, or of whole columns of groups, into outputs made beforehand."""
    from fp8fn.ops.triton.quantize import plan_quantize
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped

    block = (1, WHOLE) if offsets is None else (WHOLE, 1)
    target = target_of(x.device)
    q = Quantization(x=x, block=block, dtype=torch.float8_e4m3fn, scale="fp32", target=target, offsets=offsets)
    launches = plan_quantize(q) if offsets is None else plan_quantize_grouped(q)

    def call() -> tuple[Tensor, Tensor]:
        for launch in launches:
            launch.run()
        return q.out.data, q.out.scale

    return call


def _blockwise(experts: Experts) -> Call:
    a, b = fp8fn.quantize(experts.x, (1, 128)), fp8fn.quantize(experts.w, (128, 128))
    return lambda: fp8fn.grouped_gemm(a, b, experts.offsets)


def _masked(experts: CountedExperts, *, zeros: bool) -> Call:
    a, b = fp8fn.quantize(experts.x, (1, 128)), fp8fn.quantize(experts.w, (128, 128))
    args = (a.data, a.scale, a.block, b.data, b.scale, b.block, None, None, torch.bfloat16, experts.counts)
    return partial(torch.ops.fp8fn.scaled_grouped_mm, *args, zeros=zeros, expected_rows=experts.mean)


def _unquantized(experts: Experts) -> Call:
    return partial(fp8fn.grouped_gemm, experts.x, fp8fn.quantize(experts.w, (128, 128)), experts.offsets)


def _deep_gemm(experts: Experts) -> Call:
    a, b = fp8fn.quantize(experts.x, (1, 128)), fp8fn.quantize(experts.w, (128, 128))
    return peers.deep_gemm_groups(a, b, experts.sizes)


def _deep_gemm_masked(experts: CountedExperts) -> Call:
    a, b = fp8fn.quantize(experts.x, (1, 128)), fp8fn.quantize(experts.w, (128, 128))
    return peers.deep_gemm_masked(a, b, experts.counts, experts.mean)


def _deep_gemm_wgrad(experts: Experts) -> Call:
    g, x = (fp8fn.quantize_grouped(tokens, experts.offsets) for tokens in (experts.g, experts.x))
    return peers.deep_gemm_groups_wgrad(g, x, experts.sizes)


def _torch_rowwise(experts: Experts) -> Call:
    a, b = fp8fn.quantize(experts.x, (1, -1)), fp8fn.quantize(experts.w, (-1, 1))
    args = (a.data, b.data, a.scale.squeeze(-1), b.scale.squeeze(-2).contiguous())
    return partial(torch._scaled_grouped_mm, *args, offs=experts.offsets, out_dtype=torch.bfloat16, use_fast_accum=True)


def _torch_bf16(experts: Experts) -> Call:
    return partial(torch._grouped_mm, experts.x, experts.w, offs=experts.offsets)


def _torch_bf16_rows(experts: CountedExperts) -> Call:
    return partial(torch._grouped_mm, experts.rows(experts.x), experts.w, offs=experts.counts.cumsum(0).int())


def _loop(experts: Experts) -> Call:
    x, w, spans = experts.x, experts.w, experts.spans()
    return lambda: torch.cat([x[start:stop] @ w[expert] for expert, (start, stop) in enumerate(spans)])


def _blockwise_wgrad(experts: Experts) -> Call:
    g, x = (fp8fn.quantize_grouped(tokens, experts.offsets) for tokens in (experts.g, experts.x))
    left = g.mT
    return lambda: fp8fn.grouped_gemm(left, x)


def _square_wgrad(experts: Experts) -> Call:
    ops, offsets = torch.ops.fp8fn, experts.offsets
    g, g_scale = ops.quantize_grouped(experts.g, offsets, (128, 1))
    x, x_scale = ops.quantize_grouped(experts.x, offsets, (128, 128))
    return partial(ops.scaled_grouped_mm, g.mT, g_scale.mT, (1, 128), x, x_scale, (128, 128), offsets)


def _torch_bf16_wgrad(experts: Experts) -> Call:
    return partial(torch._grouped_mm, experts.g.mT, experts.x, offs=experts.offsets)


def _composed(x: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
    gate, up = fp8fn.grouped_gemm(x, gate_up, offsets).chunk(2, -1)
    return fp8fn.grouped_gemm(F.silu(gate) * up, down, offsets)


SUITES = {
    "forward": Suite(PRODUCTS, forward_cases, tables.products, axes="E,M,N,K"),
    "few": Suite(
        FEW, few_cases, tables.small, graphs=True, axes="E,M,N,K", fault=lambda shape: routing_fault(*shape[:2])
    ),
    "wgrad": Suite(PRODUCTS, wgrad_cases, tables.products, axes="E,M,N,K"),
    "deepgemm": Suite(DEEPGEMM_GROUPS, forward_cases, tables.layers, axes="E,M,N,K"),
    "deepgemm-masked": Suite(DEEPGEMM_MASKED, masked_cases, tables.layers, axes="E,M,C,N,K"),
    "deepgemm-wgrad": Suite(DEEPGEMM_WGRAD, wgrad_cases, tables.layers, axes="E,M,N,K"),
    "mlp": Suite(MLP, mlp_cases, tables.products, axes="E,M,N,K"),
    "layer": Suite(LAYERS, layer_cases, tables.layers, axes="E,M,N,K"),
    "quant": Suite(TOKENS, quant_cases, tables.quant, SCHEDULE, axes="G,M,N"),
    "weights": Suite(WEIGHTS, weight_cases, tables.quant, SCHEDULE, axes="E,K,N"),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("moe", __doc__, SUITES, argv)
