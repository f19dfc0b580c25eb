"""Compiled and exported models with `FP8Weight`s: values, gradients, no dispatch in Python, no recompilation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.layout import Block
from fp8fn.weights import form
from support.accuracy import snr
from support.fp8_weights import make, parts, same, values

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # torch.export's own, the second in torch 2.11
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]


class MLP(nn.Module):
    """A gated MLP, whose products have bias, none, and an einsum's spelling."""

    def __init__(self, n: int = 256, h: int = 512) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(n, h, bias=False), nn.Linear(n, h), nn.Linear(h, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        return x + torch.einsum("...k,nk->...n", h, self.down.weight)


def mlp() -> tuple[MLP, MLP]:
    """An MLP with FP8 weights, and the same with float32 weights of their values."""
    model, reference = MLP(), MLP()
    reference.load_state_dict(model.state_dict())
    for name in ("gate", "up", "down"):
        layer = getattr(model, name)
        q = fp8fn.quantize(3 * layer.weight.detach(), (128, 128))
        layer.weight = nn.Parameter(FP8Weight(q, torch.float32), requires_grad=False)
        getattr(reference, name).weight = nn.Parameter(values(layer.weight), requires_grad=False)
    return model.requires_grad_(False), reference.requires_grad_(False)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that reach `FP8Weight.__torch_dispatch__`."""
    calls: list[str] = []
    original = FP8Weight.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def counting(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(str(func))
        return original(cls, func, types, args, kwargs)

    monkeypatch.setattr(FP8Weight, "__torch_dispatch__", classmethod(counting))
    return calls


def _gradient(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sin().sum(), x)[0]


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True), ("fp8fn", False)]
)
def test_a_compiled_model(backend: str, dynamic: bool, dispatched: list[str]) -> None:
    model, reference = mlp()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, 20, 256)
    with torch.no_grad():
        compiled(x)
        dispatched.clear()
        out = compiled(x)
    assert dispatched == []
    assert snr(out, reference(x)) > 100
    _gradient(compiled, x)
    dispatched.clear()
    grad = _gradient(compiled, x)
    assert dispatched == []
    assert snr(grad, _gradient(reference, x)) > 90
    if dynamic:
        longer = torch.randn(3, 31, 256)
        assert snr(compiled(longer), reference(longer)) > 100


def test_guards_of_modules_can_be_left_out() -> None:
    """By PyTorch's own option, as docs/guides/serving.md says; what `copy_` writes into a weight is still read."""
    model, reference = mlp()
    unchanged = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    compiled = torch.compile(model, fullgraph=True, options=unchanged)
    x = torch.randn(2, 20, 256)
    with torch.no_grad():
        assert snr(compiled(x), reference(x)) > 100
        other = 2 * values(model.gate.weight).roll(1, 0)
        model.gate.weight.copy_(other)
        reference.gate.weight.copy_(values(model.gate.weight))
        assert snr(compiled(x), reference(x)) > 100


def test_an_eager_layer_dispatches_twice_and_once_in_inference_mode(dispatched: list[str]) -> None:
    """Each dispatch to Python takes 4 µs of host time."""
    w, x = make(256, 128), torch.randn(3, 128)
    with torch.no_grad():
        F.linear(x, w)
    assert dispatched == ["aten.t.default", "aten.mm.default"]
    dispatched.clear()
    with torch.inference_mode():
        F.linear(x[None], w)
    assert dispatched == ["aten.linear.default"]


def test_the_backend_leaves_the_weight_as_it_is() -> None:
    """Quantizing its dequantized values again gave 21 dB, silently."""
    model, reference = mlp()
    x = torch.randn(2, 64, 256)
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"})
    with torch.no_grad():
        assert snr(compiled(x), reference(x)) > 100
    text = str(fp8fn.explain(model, x, where="*"))
    assert "the weight is an FP8Weight, whose own data multiplies activations in their own type" in text
    assert "0 of 3 products" in text


def test_replaced_weights_need_no_new_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model, _ = mlp()
    x = torch.randn(40, 256)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        for change in ("copy", "assign", "data"):
            other, reference = mlp()
            if change == "data":
                for p, q in zip(model.parameters(), other.parameters(), strict=True):
                    p.data = q.data
            else:
                model.load_state_dict(other.state_dict(), assign=change == "assign")
            assert snr(compiled(x), reference(x)) > 100, change
    assert counter.frame_count == 1


def test_experts_views_and_groups_are_compiled() -> None:
    w = nn.Parameter(make(4, 256, 128), requires_grad=False)
    dense = values(w)
    ends = torch.tensor([4, 4, 9, 16], dtype=torch.int32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        heads = torch.einsum("bk,hkn->bhn", x, w[:, 64:192])
        return heads, F.linear(x, w[1, :96]), torch._grouped_mm(x.repeat(1, 2), w, ends)

    x = torch.randn(16, 128)
    heads, rows, groups = run(x, w, ends)
    wide = x.repeat(1, 2)
    assert snr(heads, torch.einsum("bk,hkn->bhn", x, dense[:, 64:192])) > 100
    assert snr(rows, x @ dense[1, :96].T) > 100
    assert snr(groups, torch.cat([wide[:4] @ dense[0], wide[4:9] @ dense[2], wide[9:] @ dense[3]])) > 100


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1, 32), (1, -1)], ids=str)
def test_experts_become_one_matrix_in_a_graph(block: Block) -> None:
    """Scales that lie with padded rows, or one for many rows, allow no view; a fake tensor has another error for it."""
    q = fp8fn.quantize(torch.randn(6, 8, 256), block)
    w, x = nn.Parameter(FP8Weight(q, dtype=torch.float32), requires_grad=False), torch.randn(16, 256)
    dense = fp8fn.dequantize(q, torch.float32)

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        halves = F.linear(x[:, 128:], w[..., 128:].flatten(0, 1))
        return F.linear(x, w.view(-1, 256)), F.linear(x, w.reshape(48, 256)), halves

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, w)
    for got, want in zip(found, run(x, dense), strict=True):
        assert snr(got, want) > 100


def test_transforms_are_compiled() -> None:
    w = make(96, 160)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: (F.linear(row, w) / 50).sin().sum()))(x)

    x = torch.randn(3, 160)
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x, w)
    assert snr(found, run(x, values(w))) > 90


def test_a_write_inside_of_a_graph() -> None:
    w, new = make(256, 256), torch.randn(256, 256)

    def write(w: Tensor, new: Tensor) -> Tensor:
        w.copy_(new)
        return F.linear(torch.ones(1, 256), w)

    out = torch.compile(write, backend="aot_eager", fullgraph=True)(w, new)
    expected = FP8Weight(fp8fn.quantize(new, (128, 128)), torch.float32)
    assert same(w, expected)
    assert snr(out, torch.ones(1, 256) @ values(expected).T) > 100


@pytest.mark.parametrize("how", ["clone", "to"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_copy_that_a_graph_makes_is_written(backend: str, how: str) -> None:
    """The copy was a view by `expand`, whose write is functionalized as a sum: in FP8 that rounds, or is an error."""
    w, new = make(256, 200), torch.randn(256, 200)
    before = [part.clone() for part in parts(w)]

    def write(w: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copy, x = w.clone() if how == "clone" else w.to("cpu", copy=True), torch.ones(1, 200)
        first = F.linear(x, copy)
        copy.copy_(new)
        return copy, first, F.linear(x, copy)

    copy, first, second = torch.compile(write, backend=backend, fullgraph=True)(w, new)
    expected = FP8Weight(fp8fn.quantize(new, (128, 128)), torch.float32)
    assert same(copy, expected)
    for out, weight in ((first, w), (second, expected)):
        assert snr(out, torch.ones(1, 200) @ values(weight).T) > 100
    assert all(map(torch.equal, parts(w), before))


def test_views_that_a_dynamic_graph_returns() -> None:
    """Whether a column shares its scales was a symbol of the trace, which is an error where it is compared later."""
    w = make(256, 384)
    views = torch.compile(lambda w: (w[:64], w[3], w[:, 3]), backend="aot_eager", fullgraph=True, dynamic=True)(w)
    for found, expected in zip(views, (w[:64], w[3], w[:, 3]), strict=True):
        assert found._form == expected._form
        assert torch.equal(found.dequantize(), expected.dequantize())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "fp8fn"])
def test_a_weight_that_a_graph_makes(backend: str) -> None:
    x, w, dense = torch.randn(5, 384), make(256, 384), torch.randn(256, 384)

    def run(x: Tensor, q: fp8fn.ScaledTensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        made = FP8Weight(fp8fn.quantize(dense, (128, 128)), torch.float32)
        return F.linear(x, FP8Weight(q, torch.float32)), F.linear(x, made)

    given, quantized = torch.compile(run, backend=backend, fullgraph=True)(x, w.scaled, dense)
    assert snr(given, x @ values(w).T) > 100
    expected = FP8Weight(fp8fn.quantize(dense, (128, 128)), torch.float32)
    assert snr(quantized, x @ values(expected).T) > 100


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, tmp_path: Path) -> None:
    model, reference = mlp()
    m = torch.export.Dim("m", min=2, max=512)
    program = torch.export.export(model, (torch.randn(6, 256),), dynamic_shapes=({0: m},), strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    x = torch.randn(17, 256)
    for each in (program, loaded):
        weight = each.state_dict["up.weight"]
        assert same(weight, model.up.weight)
        assert snr(each.module()(x), reference(x)) > 100
    lowered = program.run_decompositions()
    names = [str(node.target) for node in lowered.graph.nodes if node.op == "call_function"]
    assert sum("fp8fn.mm_a16w8" in name for name in names) == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_an_ahead_of_time_package(tmp_path: Path) -> None:
    model, reference = mlp()
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(6, 256),))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        x = torch.randn(6, 256)
        assert snr(torch._inductor.aoti_load_package(path)(x), reference(x)) > 100


def test_metadata_decides_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = make(256, 256), make(256, 256), make(256, 256, block=(1, 128))
    keys = [w._stable_hash_for_caching() for w in (a, b, c)]
    assert keys[0] == keys[1] != keys[2]
    assert not torch.equal(parts(a)[0], parts(b)[0])
    # PyTorch keeps traced graphs on disk; another version may trace an op differently.
    monkeypatch.setattr(form, "__version__", "0.0.0")
    assert a._stable_hash_for_caching() != keys[0]


@pytest.mark.filterwarnings("ignore:aten.* has no FP8 form")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "fp8fn"])
def test_dense_views_in_a_graph(backend: str) -> None:
    """Views without an FP8 form, made in the graph and given to it: values and gradients, and writes are errors."""
    w = make(256, 384)
    dense = values(w)

    def run(weight: Tensor, view: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight[:, ::2]).pow(2).sum() + (x @ view.T).sum() + weight[::3].sum() * x.sum()

    found, expected = (torch.randn(5, 192).requires_grad_() for _ in range(2))
    with torch.no_grad():
        expected.copy_(found)
    torch.compile(run, backend=backend, fullgraph=True)(w, w[:, 1::2], found).backward()
    run(dense, dense[:, 1::2], expected).backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert snr(found.grad, expected.grad) > 90
    assert torch.equal(torch.compile(lambda v: v[:, ::2], backend=backend, fullgraph=True)(w), dense[:, ::2])

    def write(weight: Tensor) -> Tensor:
        weight[:, ::2].zero_()
        return weight.sum()

    with pytest.raises(NotImplementedError, match="would write into the dequantized values of a view"):
        torch.compile(write, backend=backend)(w)
    assert torch.equal(values(w), dense)
