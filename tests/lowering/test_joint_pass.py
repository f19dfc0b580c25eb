"""The pass over joint graphs as a citizen of torch.compile: caches, dynamic sizes, export, logs, `explain`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8fn
from fp8fn.lowering import joint_pass

N, K = 256, 384


class Dequantizing(nn.Module):
    """A linear layer of an FP8 checkpoint: the weight in 128x128 blocks, dequantized at each call."""

    def __init__(self) -> None:
        super().__init__()
        q = fp8fn.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), (128, 128))
        self.register_buffer("weight", q.data.contiguous())
        self.register_buffer("scale", q.scale.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return F.linear(x, (self.weight.float() * scale).to(x.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Dequantizing(), nn.Linear(N, K, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


def tokens(count: int, *, grad: bool = False) -> Tensor:
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(count)).bfloat16()
    return x.requires_grad_(grad)


def near(actual: Tensor, expected: Tensor, bound: float = 1e-2) -> bool:
    return bool((actual.double() - expected.double()).norm() <= bound * expected.double().norm())


@pytest.mark.parametrize("how", ["backend", "substitution"])
def test_the_second_compile_is_a_hit_of_both_caches(how: str, fresh_dynamo: None, fresh_caches: None) -> None:
    model, results = Model(), []
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        x = tokens(32, grad=True)
        with fp8fn.lowering.substitution():
            compiled = (
                torch.compile(model, backend="fp8fn", options={"where": "*"})
                if how == "backend"
                else torch.compile(model)
            )
            out = compiled(x)
            (grad,) = torch.autograd.grad(out.float().sum(), x)
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert counters["inductor"]["fxgraph_cache_miss"] == (0 if hits else 2)
        results.append((out, grad))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_another_version_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = joint_pass.SubstitutionPass().uuid()
    assert joint_pass.SubstitutionPass().uuid() == before
    monkeypatch.setattr(joint_pass, "__version__", "another")
    assert joint_pass.SubstitutionPass().uuid() != before


@pytest.mark.parametrize(
    ("package", "file"),
    [("lowering", "patterns/a.py"), ("meta", "fake.py"), ("ops", "groups.py"), ("tuning", "tables/h.json")],
)
def test_another_source_or_table_is_no_hit(
    package: str, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = joint_pass.SubstitutionPass().uuid()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    found = set()
    for text in ("{}", "[]"):
        (tmp_path / file).write_text(text)
        monkeypatch.setitem(joint_pass._SOURCES, package, (tmp_path, joint_pass._SOURCES[package][1]))
        joint_pass._fingerprint.cache_clear()
        found.add(str(joint_pass.SubstitutionPass().uuid()))
    monkeypatch.undo()
    joint_pass._fingerprint.cache_clear()
    assert len(found - {str(before)}) == 2
    assert joint_pass.SubstitutionPass().uuid() == before


def test_one_compile_serves_every_count_of_tokens(fresh_dynamo: None) -> None:
    model = Model()
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for count in (4096, 100, 128, 3, 100003):
            x = tokens(count)
            expected = model(x[:4096])  # rows do not depend on each other
            assert near(compiled(x)[:4096], expected, 5e-2)


def test_export_then_compile(fresh_dynamo: None) -> None:
    model, x = Model().eval(), tokens(48)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    with torch.no_grad(), joint_pass.recorded() as record, torch._inductor.config.patch(fx_graph_cache=False):
        out = torch.compile(program.module(), backend="fp8fn", options={"where": "*"})(x)
    assert [found.made for found in record] == ["fp8fn.mm_a16w8.default"]
    assert near(out, model(x), 5e-2)


def test_outside_of_it_nothing_is_substituted(fresh_dynamo: None) -> None:
    model, x = Dequantizing(), tokens(32)
    with joint_pass.recorded() as record, torch._inductor.config.patch(fx_graph_cache=False):
        out = torch.compile(model)(x)
    assert record == []
    assert near(out, model(x))


def test_the_log_says_what_was_done(fresh_dynamo: None, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="fp8fn"),
        torch._inductor.config.patch(fx_graph_cache=False),
        fp8fn.lowering.substitution(),
    ):
        torch.compile(Dequantizing())(tokens(32))
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith(f"{Path(__file__).name}:") and line.endswith("(M,N,K)=(32,256,384): fp8fn.mm_a16w8.default")
        for line in lines
    ), lines


def test_explain_has_each_product_once(fresh_dynamo: None) -> None:
    model, x = Model(), tokens(32, grad=True)
    rows = fp8fn.explain(model, x, where="*", show=False).rows
    assert [(row.shape, row.kernel, row.reason) for row in rows] == [
        ((32, N, K), "fp8fn::mm_a16w8", None),
        ((32, K, N), "reference (plain PyTorch)", None),
        ((32, K, N), "fp8fn::mm_a16w8", None),
    ]
    assert rows[0].source.startswith(f"{Path(__file__).name}:")
    assert rows[2].op.startswith("aten.mm.default, backward of ")
    with torch.no_grad():
        assert len(fp8fn.explain(model, x, where="*", show=False).rows) == 2


def test_explain_says_why_a_product_is_left_alone(fresh_dynamo: None) -> None:
    class Doubled(Dequantizing):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight = (self.weight.float() * scale).to(x.dtype)
            return torch.addmm(torch.ones(N, dtype=x.dtype), x, weight.t(), beta=2)

    rows = fp8fn.explain(Doubled(), tokens(32), where="*", show=False).rows
    assert [(row.kernel, row.reason) for row in rows] == [(None, "addmm with alpha or beta")]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="2.11's package fails to run: aoti_torch_get_data_ptr")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # PyTorch's own
def test_a_package_of_aotinductor(fresh_dynamo: None, tmp_path: Path) -> None:
    """Exported with fp8fn's ops in it, compiled ahead of time, and loaded again."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.stored = nn.Linear(K, N, bias=False), Dequantizing()

        def forward(self, x: Tensor) -> Tensor:
            weight = fp8fn.ScaledTensor(self.stored.weight, self.stored.scale, (128, 128))
            return fp8fn.gemm(F.silu(fp8fn.linear(x, self.up.weight)), weight)

    model, x = Functional().eval(), torch.randn(48, K)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        out = torch._inductor.aoti_load_package(package)(x)
        assert torch.equal(out, model(x))
