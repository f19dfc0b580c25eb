"""`fp8fn.plot`, `fp8fn.error` and what notebooks show of a `ScaledTensor` and of `explain`'s result."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import matplotlib
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import fp8fn
from fp8fn.bench import record
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import BLOCKS, Block
from fp8fn.scaled_tensor import summary

matplotlib.use("agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def no_figure_is_left() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("show was called")

    monkeypatch.setattr(plt, "show", show)


def model() -> GraphModule:
    return symbolic_trace(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)))


# Each error, by a plain formula.


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_error_is_that_of_the_definition(block: Block) -> None:
    x = torch.randn(2, 77, 200)
    x[0, 3] = 0
    q = fp8fn.quantize(x, block)
    difference = x.double() - fp8fn.dequantize(q, torch.float32).double()
    found = fp8fn.error(x, q)
    assert found.snr_db == pytest.approx(
        10 * math.log10(x.double().square().sum().item() / difference.square().sum().item())
    )
    assert found.max_abs == difference.abs().max()
    assert found.by_block.shape == q.scale.shape
    assert found.saturated == 0
    rows, columns = (size if wanted == -1 else wanted for size, wanted in zip(x.shape[1:], block, strict=True))
    first = (slice(1, 2), slice(0, rows), slice(0, columns))
    expected = 10 * math.log10(x[first].double().square().sum().item() / difference[first].square().sum().item())
    assert found.by_block[1, 0, 0].item() == pytest.approx(expected)


def test_error_counts_what_saturates_and_what_is_flushed() -> None:
    x = torch.ones(1, 32)
    x[0, 0] = 1.9  # e8m0 rounds amax / 256 down, so that 1.9 * 256 is over 448
    x[0, 1] = 1e-9
    found = fp8fn.error(x, fp8fn.quantize(x, (1, 32), scale="e8m0"))
    assert (found.saturated, found.flushed, found.max_rel) == (1 / 32, 1 / 32, 1.0)
    assert fp8fn.error(x, fp8fn.quantize(x, (1, 32), scale="rceil")).saturated == 0


def test_error_of_tensors() -> None:
    x = torch.randn(64, 256)
    exact = fp8fn.error(x, x)
    assert (exact.snr_db, exact.max_abs, exact.flushed) == (math.inf, 0, 0)
    off = fp8fn.error(x, x * 1.1, (1, 128))
    assert off.snr_db == pytest.approx(20, abs=1e-4)
    assert off.max_rel == pytest.approx(0.1, abs=1e-5)
    assert off.by_block.shape == (64, 2)
    assert math.isnan(fp8fn.error(x, torch.full_like(x, math.nan)).snr_db)
    assert "SNR 20.0 dB" in repr(off)
    assert fp8fn.error(x[:0], x[:0]).snr_db == math.inf
    with pytest.raises(ValueError, match=r"x has shape \(64, 256\) and q \(64, 255\)"):
        fp8fn.error(x, x[:, 1:])


# Summaries that a notebook shows.


def test_summary_counts_codes() -> None:
    q = fp8fn.quantize(torch.randn(64, 256), (1, 128))
    found = summary(q)
    assert found is not None
    values = q.data.double().abs()
    assert found.saturated == (values == 448).double().mean()
    assert found.zero == (values == 0).double().mean()
    assert (found.least_scale, found.largest_scale) == (q.scale.min(), q.scale.max())
    assert found.exponents == (-9, 8)
    assert sum(found.binades) == (values > 0).sum()
    assert found.binades[-1] == (values >= 256).sum()
    assert summary(q.mT) == found


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_summary_of_each_type(dtype: torch.dtype) -> None:
    x = torch.randn(32, 128)
    x[0, 0] = math.inf
    found = summary(fp8fn.quantize(x, (1, 128), dtype=dtype))
    assert found is not None
    # An infinite scale makes a NaN of its block's data, or zeros.
    assert found.not_finite + found.zero >= 1 / 32 / 128
    assert len(found.bars) == len(found.binades)


def test_html_of_a_scaled_tensor() -> None:
    q = fp8fn.quantize(torch.randn(64, 256), (1, 128))
    html = q._repr_html_()
    assert re.search(r"<th>data</th><td>e4m3fn \[64, 256\], cpu, 16.5 KiB with scales</td>", html)
    assert "at the largest value, ±448" in html
    assert "█" in html
    assert html.count("<tr>") == html.count("</tr>") == 7
    assert "saturated" not in q.to("meta")._repr_html_()


def test_repr_reads_no_values_where_there_are_none() -> None:
    shown = []

    def look(x: Tensor) -> Tensor:
        shown.append(repr(fp8fn.quantize(x, (1, 128))))
        return x.sum()

    torch.vmap(look)(torch.randn(3, 4, 128))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        look(torch.randn(4, 128))
    look(torch.randn(0, 128))
    assert [text.count("zero=") for text in shown] == [0, 0, 0]


def test_html_and_repr_of_explain(fresh_dynamo: None) -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 64))
    found = fp8fn.explain(net, torch.randn(32, 512), show=False)
    assert repr(found) == "Explanation(1 of 2 products in FP8, recipe blockwise_square, 1 graph(s))"
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + 2
    cells = [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", html)]
    assert all(cell.removeprefix("- ") in str(found) for cell in cells)
    assert "small: N=64 is under 128" in html
    assert "<p>1 of 2 products in FP8" in html


# The plots: labelled, returned, and on the axes that were given.

X = torch.linspace(-3, 3, 64 * 256).view(64, 256)
RUN = {
    "results": {
        "copy_tb_s": 4.0,
        "rows": [
            {"shape": [128, 128, 128], "peer": peer, "case": case, "unit": "TFLOP/s", "operations": 2.0 * 128**3,
             "bytes": 5e4, "us": us, "us_q1": us - 1, "us_q3": us + 1, "rate": 4 / us}
            for peer, case, us in (("fp8fn", "rowwise", 10.0), ("torch", "bf16", 20.0))
        ],
    }
}  # fmt: skip
PLOTS: dict[str, Callable[..., Any]] = {
    "number_line": lambda ax: fp8fn.plot.number_line(ax=ax),
    "magnitudes": lambda ax: fp8fn.plot.magnitudes(X, "x", ax),
    "magnitudes of codes": lambda ax: fp8fn.plot.magnitudes(fp8fn.quantize(X, (1, 128)), ax=ax),
    "error_histogram": lambda ax: fp8fn.plot.error_histogram(X, {"q": fp8fn.quantize(X, (1, 128))}, ax),
    "snr": lambda ax: fp8fn.plot.snr({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}}, ax, least=2.0),
    "scales": lambda ax: fp8fn.plot.scales(fp8fn.quantize(X, (1, 128)), ax),
    "scales of a batch": lambda ax: fp8fn.plot.scales(fp8fn.quantize(X[None], (1, 32), scale="e8m0"), ax),
    "block_errors": lambda ax: fp8fn.plot.block_errors(X, fp8fn.quantize(X, (1, 128)), ax=ax),
    "curves": lambda ax: fp8fn.plot.curves({"a": [1.0, 2.0]}, "step", "loss [nats]", ax=ax),
    "rates": lambda ax: fp8fn.plot.rates(RUN, ax),
    "roofline": lambda ax: fp8fn.plot.roofline(RUN, ax),
}


@pytest.mark.parametrize("name", PLOTS)
def test_plot_returns_labelled_axes(name: str, never_shown: None) -> None:
    own = PLOTS[name](None)
    assert own.get_xlabel() or name == "snr"  # its groups have names
    assert own.get_ylabel() or name == "number_line"
    own.figure.canvas.draw()
    given = plt.figure().add_subplot()
    assert PLOTS[name](given) is given


def test_speedups_of_the_committed_run(never_shown: None) -> None:
    ax = fp8fn.plot.speedups(record.committed("llm84"))
    assert len(ax.patches) == 84


def test_number_line_has_every_value() -> None:
    ax = fp8fn.plot.number_line([torch.float8_e5m2])
    normal, subnormal = (line.get_xdata() for line in ax.lines)
    assert (len(normal), len(subnormal)) == (30 * 4, 3)
    assert max(normal) == 57344


def test_graph_shows_products_and_what_became_fp8(never_shown: None) -> None:
    gm = model()
    ax = fp8fn.plot.graph(gm, keep=lambda node: node.op != "placeholder")
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["0", "1", "2", "output"]

    graphs: list[GraphModule] = []

    def look(gm: GraphModule, example_inputs: Any) -> Any:
        rewrite(gm, fp8fn.BLOCKWISE, lambda site: site.n == 256)
        graphs.append(gm)
        return gm.forward

    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    torch._dynamo.reset()
    torch.compile(net, backend=look)(torch.randn(32, 128))
    torch._dynamo.reset()
    ax = fp8fn.plot.graph(graphs[0])
    boxes = {text.get_text(): text.get_color() for text in ax.texts if text.get_text()}
    assert boxes == {"fp8fn.gemm 0": "white", "relu": "black", "linear 2": "black", "output": "black"}


def test_plot_comes_with_its_first_use() -> None:
    code = (
        "import sys, fp8fn; assert not {'fp8fn.plot', 'matplotlib'} & set(sys.modules);"
        "fp8fn.plot; assert 'matplotlib' not in sys.modules; assert 'plot' in fp8fn.__all__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'plots'"):
        fp8fn.plots  # type: ignore[attr-defined]  # noqa: B018


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8fn\[notebooks\]'"):
        fp8fn.plot.number_line()
