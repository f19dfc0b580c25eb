"""A few rows `silu(gate) * up` times an FP8 weight become one op in the graphs that `backend="fp8fn"` compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.patterns import gated_rows
from fp8fn.ops import mm_a16w8, reference
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.mm_a16w8 import SILU_MUL_MM_A16W8, serves_gated
from fp8fn.ops.operands import Quantized
from fp8fn.ops.targets import GFX942, SM90
from support.accuracy import snr
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.post_grad import gradients, substituted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, HIDDEN = 256, 384
OP = "fp8fn.silu_mul_mm_a16w8.default"
READ = "another reads silu(gate) * up too, or a part of it, so that a kernel of Inductor's stays"
COMPUTED = "Inductor computes gate or up, and fuses silu(gate) * up with it"


class MLP(nn.Module):
    """With gate and up side by side, or one by one."""

    def __init__(self, *, one: bool = False, bias: bool = False, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.one = one
        widths = [2 * HIDDEN] if one else [HIDDEN, HIDDEN]
        self.into = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for width in widths)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.to(dtype).requires_grad_(False)
        fp8fn.quantize_weights(self, where="*")

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.one:
            gate, up = self.into[0](x).chunk(2, dim=-1)
            return gate, up
        return self.into[0](x), self.into[1](x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.parts(x)
        return self.down(F.silu(gate) * up)


class Reads(MLP):
    """Returns the rows as well."""

    def forward(self, x: Tensor) -> Any:
        gate, up = self.parts(x)
        rows = F.silu(gate) * up
        return self.down(rows), rows


class ReadsGate(MLP):
    """Returns `silu(gate)` as well."""

    def forward(self, x: Tensor) -> Any:
        gate, up = self.parts(x)
        silu = F.silu(gate)
        return self.down(silu * up), silu


class ReadsSum(MLP):
    """Returns the rows in float32 as well."""

    def forward(self, x: Tensor) -> Any:
        gate, up = self.parts(x)
        rows = F.silu(gate.float()) * up.float()
        return self.down(rows.to(x.dtype)), rows


class Halves(MLP):
    """Gate and up are halves of what an elementwise kernel makes."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (torch.cat(self.parts(x), -1) + 1).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Parts(MLP):
    """Gate and up are columns of the input, from `first` on."""

    first = 0

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x[:, at : at + HIDDEN] for at in (self.first, self.first + HIDDEN))
        return self.down(F.silu(gate) * up)


class PartsByFour(Parts):
    first = 4


class Computes(MLP):
    """`up` comes from an elementwise kernel."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.parts(x)
        return self.down(F.silu(gate) * (up + 1))


class GELU(MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.parts(x)
        return self.down(F.gelu(gate) * up)


def model(kind: Callable[..., nn.Module] = MLP, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


run = partial(substituted, pattern=gated_rows.NAME)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(1, WIDTH), (8, WIDTH), (2, 3, WIDTH)], ids=str)
def test_few_rows_become_one_op(shape: tuple[int, ...], dtype: torch.dtype, one: bool) -> None:
    mlp, x = model(one=one, dtype=dtype), torch.randn(*shape).to(dtype)
    found, (report,) = run(mlp, x)
    rows = x.shape[:-1].numel()
    assert (report.made, report.reason, report.shape) == (OP, None, (rows, WIDTH, HIDDEN))
    with torch.no_grad():
        gate, up = mlp.parts(x)
        exact = (F.silu(gate.float()) * up.float()).to(dtype).double() @ mlp.down.weight.dequantize(FP32).double().mT
    assert snr(found, exact) > {BF16: 45, FP16: 65, FP32: 110}[dtype]


@pytest.mark.parametrize(
    ("kind", "options", "rows", "reason"),
    [
        (MLP, {}, 9, "M=9 rows, more than 8"),
        (MLP, {"bias": True}, 4, "the product has a bias, another output type or is batch-invariant"),
        (Reads, {}, 4, READ),
        (ReadsGate, {}, 4, READ),
        (ReadsSum, {}, 4, READ),
        (Computes, {}, 4, COMPUTED),
        (Halves, {}, 4, COMPUTED),
    ],
)
def test_others_stay(kind: Callable[..., nn.Module], options: dict[str, Any], rows: int, reason: str) -> None:
    found, (report,) = run(model(kind, **options), torch.randn(rows, WIDTH).to(BF16))
    assert (report.made, report.reason) == ("", reason)
    assert found is not None


def test_another_activation_is_none_of_its_products() -> None:
    assert run(model(GELU), torch.randn(4, WIDTH).to(BF16))[1] == []


def test_a_batch_invariant_product_stays() -> None:
    x = torch.randn(4, WIDTH).to(BF16)
    _, (report,) = run(model(), x, options={"batch_invariant": True})
    assert report.reason == "the product has a bias, another output type or is batch-invariant"


def test_a_length_that_is_known_at_run_time_stays() -> None:
    _, (report,) = run(model(), torch.randn(4, WIDTH).to(BF16), dynamic=True)
    assert report.reason == "it is no product of matrices of known sizes"


def test_a_backward_computes_what_it_needs_beside() -> None:
    """There `silu(gate) * grad` is the gradient of up, and the gradient of gate needs the parts of the SiLU too."""
    grads, said = gradients(model(), torch.randn(4, WIDTH).to(BF16), gated_rows.NAME)
    assert said == [[(OP, None), ("", READ)], []]
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (torch.empty(4, HIDDEN, dtype=BF16), None),
        (torch.empty(4, 2 * HIDDEN, dtype=BF16)[:, :HIDDEN], None),
        (torch.empty(4, HIDDEN, dtype=FP32), "x has dtype torch.float32, not 16 bits"),
        (torch.empty(HIDDEN, 4, dtype=BF16).mT, "rows of x do not begin at multiples of 16 bytes"),
        (torch.empty(4, HIDDEN + 1, dtype=BF16)[:, 1:], "rows of x do not begin at multiples of 16 bytes"),
        (torch.empty(9, HIDDEN, dtype=BF16), "M=9 rows, which each block of columns would compute anew"),
    ],
)
def test_what_the_kernel_takes(gate: Tensor, reason: str | None) -> None:
    q = fp8fn.quantize(torch.randn(WIDTH, HIDDEN), (128, 128)).mT
    found = serves_gated(gate, torch.empty_like(gate), Quantized(q.data, q.scale, q.block), SM90)
    assert found is None if reason is None else (found or "").startswith(reason)
    up = torch.empty(gate.shape[0], HIDDEN + 4, dtype=gate.dtype)[:, 4:]
    if reason is None:
        found = serves_gated(gate, up, Quantized(q.data, q.scale, q.block), SM90)
        assert found == "rows of x do not begin at multiples of 16 bytes"


def test_a_stride_of_up_past_32_bits_is_left() -> None:
    q = fp8fn.quantize(torch.randn(WIDTH, HIDDEN), (128, 128)).mT
    weight = Quantized(*(part.to("meta") for part in (q.data, q.scale)), q.block)
    gate, near, far = (
        torch.empty_strided((2, HIDDEN), (step, 1), dtype=BF16, device="meta") for step in (HIDDEN, 2**30, 2**31)
    )
    assert serves_gated(gate, near, weight, SM90) is None
    assert serves_gated(gate, far, weight, SM90) == "a size or a stride is past 32 bits"


def test_other_gpus_keep_two_kernels() -> None:
    q = fp8fn.quantize(torch.randn(WIDTH, HIDDEN), (128, 128), dtype=torch.float8_e4m3fnuz).mT
    x = torch.empty(4, HIDDEN, dtype=BF16)
    assert serves_gated(x, x, Quantized(q.data, q.scale, q.block), GFX942) is not None


def test_a_graph_on_hopper_is_planned_as_the_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up as slices of one result are read where they lie."""
    monkeypatch.setattr(gated_rows.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(mm_a16w8, "SILU_MUL_MM_A16W8", None)  # nothing runs it here
    for options in ({"one": True}, {}):
        _, (report,) = run(model(**options), torch.randn(1, WIDTH).to(BF16))
        assert (report.made, report.reason) == (OP, None)
    _, (report,) = run(model(dtype=FP32), torch.randn(1, WIDTH))
    assert report.reason == "no kernel for it: x has dtype torch.float32, not 16 bits"


def test_rows_that_begin_between_16_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op would compute them in several launches: what it sees when it runs is an address."""
    monkeypatch.setattr(gated_rows.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    x = torch.randn(2, 2 * HIDDEN + 8).to(BF16)
    for kind, made, reason in (
        (Parts, OP, None), (PartsByFour, "", "gate or up does not begin at a multiple of 16 bytes")
    ):  # fmt: skip
        _, (report,) = run(model(kind), x)
        assert (report.made, report.reason) == (made, reason)


def test_a_constant_weight_is_planned_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the promise, another kernel is the faster one for this K, and it takes the rows from memory."""
    monkeypatch.setattr(gated_rows.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    x, w = torch.randn(2, 128).to(BF16), fp8fn.quantize(torch.randn(WIDTH, 64), (128, 128)).mT
    made = {}
    for constant in (False, True):

        def product(x: Tensor, constant: bool = constant) -> Tensor:
            return fp8fn.gemm(F.silu(x[:, :64]) * x[:, 64:], w, constant=constant)

        _, (report,) = run(product, x)
        made[constant] = report.made
    assert made == {False: "", True: OP}


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On a second call nothing is planned: the launch of the first takes the new tensors."""
    with hopper_on_cpu() as launches:
        for rows, constant in ((3, False), (3, True), (3, False), (3, True)):
            q = fp8fn.quantize(torch.randn(40, HIDDEN), (128, 128)).mT
            gate, up = torch.randn(rows, 2 * HIDDEN).to(BF16).chunk(2, -1)
            found = mm_a16w8.silu_mul_mm_a16w8_kernel(gate, up, q.data, q.scale, q.block, constant)
            exact = reference.silu_mul(gate, up).to(BF16).double() @ q.dequantize(FP32).double()
            assert found.dtype == BF16
            assert snr(found, exact) > 45
        assert [launch.name for launch in launches] == ["a16w8_tiles"] * 2
        assert [launch.options["W_CONSTANT"] for launch in launches] == [0, 1]


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    """Row by row as in float32, whose rows are rounded to 16 bits; K ends within a K tile."""
    inf, nan, most = torch.inf, torch.nan, torch.finfo(dtype).max
    pairs = [(nan, 1), (1, nan), (inf, 1), (inf, 0), (-inf, 1), (most, most), (-100, most), (0, inf)]
    q = fp8fn.quantize(torch.randn(40, 272), (128, 128)).mT
    gate, up = torch.randn(2, 8, 272).to(dtype)
    clean = gate.clone(), up.clone()
    for row, pair in enumerate(pairs[:7]):
        gate[row, 130 + row], up[row, 130 + row] = pair
    for last, pair in ((False, (-100, 3)), (True, pairs[7])):
        gate[7, 5], up[7, 5] = pair
        with hopper_on_cpu():
            found, before = (
                mm_a16w8.silu_mul_mm_a16w8_kernel(*each, q.data, q.scale, q.block) for each in ((gate, up), clean)
            )
        rows = reference.silu_mul(gate, up).to(dtype)
        assert rows.isfinite().all(-1).tolist() == [False] * 6 + [True, not last]
        exact = rows.double() @ q.dequantize(FP32).double()
        assert snr(found[rows.isfinite().all(-1)], exact[rows.isfinite().all(-1)]) > 45
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found[exact.isinf()].double(), exact[exact.isinf()])
        assert before.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gate": torch.empty(2, 2, HIDDEN)}, ValueError, r"gate has shape \(2, 2, 384\); it must be \(M, K\)"),
        (
            {"up": torch.empty(3, HIDDEN)},
            ValueError,
            r"gate has shape \(2, 384\) and up \(3, 384\); they must be equal",
        ),
        ({"up": torch.empty(2, HIDDEN, dtype=FP16)}, TypeError, r"gate has dtype torch.float32 and up torch.float16"),
        ({"up": torch.empty(2, HIDDEN, device="meta")}, ValueError, "gate is on cpu and up on meta; move them"),
        ({"w": torch.empty(HIDDEN, WIDTH)}, TypeError, "silu_mul_mm_a16w8: w"),
    ],
)
def test_wrong_arguments(change: dict[str, Tensor], error: type[Exception], words: str) -> None:
    q = fp8fn.quantize(torch.randn(WIDTH, HIDDEN), (128, 128)).mT
    given = {"gate": torch.empty(2, HIDDEN), "up": torch.empty(2, HIDDEN), "w": q.data, "w_scale": q.scale}
    with pytest.raises(error, match=words):
        torch.ops.fp8fn.silu_mul_mm_a16w8(**{**given, **change}, w_block=q.block)


def test_no_kernel_means_two_ops() -> None:
    q = fp8fn.quantize(torch.randn(WIDTH, HIDDEN), (128, 128)).mT
    gate, up = torch.randn(2, 40, HIDDEN).to(BF16)
    found = SILU_MUL_MM_A16W8((gate, up, q.data, q.scale), (q.block, False))[0]
    rows = reference.silu_mul(gate, up).to(BF16)
    assert torch.equal(found, torch.ops.fp8fn.mm_a16w8(rows, q.data, q.scale, q.block))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_values_on_a_gpu(rows: int, one: bool) -> None:
    """Also in a CUDA graph, where the weight is read before the launch ahead has ended."""
    mlp = model(one=one).cuda()
    x = torch.randn(rows, WIDTH, device="cuda", dtype=BF16)
    with torch.no_grad():
        gate, up = mlp.parts(x)
        exact = (F.silu(gate.float()) * up.float()).to(BF16).double() @ mlp.down.weight.dequantize(FP32).double().mT
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(mlp, backend="fp8fn", fullgraph=True, mode=mode)
        with torch.no_grad(), post_grad_pass.recorded() as reports:
            for _ in range(3):
                assert snr(compiled(x).clone(), exact) > 45
        assert [report.made for report in reports if report.pattern == gated_rows.NAME] == [OP]
