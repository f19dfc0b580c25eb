"""`quantize_weights`: which parameters become `FP8Weight`s, their values, ties, and errors that change nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from support.accuracy import snr
from support.fp8_weights import same, values


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, 128, 256) / 16)
        self.conv = nn.Conv1d(256, 256, 3)
        self.router = nn.Linear(256, 4)
        self.lm_head = nn.Linear(256, 512, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def test_by_default() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    modules = list(model.modules())
    ids = torch.randint(0, 512, (2, 9))
    report = fp8fn.quantize_weights(model)
    assert report.quantized == ("experts", "layers.0.weight", "layers.1.weight")
    assert report.kept == {
        "embed.weight": "sensitive: embedding; where='*' takes it too",
        "conv.weight": "no matrix product in PyTorch reads the weight of a Conv1d with 3 dimensions",
        "router.weight": "small: N=4 is under 128",
        "lm_head.weight": "sensitive: lm_head; where='*' takes it too",
    }
    assert str(report).splitlines()[0] == "3 weight(s) in FP8, 4 kept"
    assert list(map(id, model.modules())) == list(map(id, modules))
    for name, p in model.named_parameters():
        if name in report.quantized:
            assert isinstance(p, FP8Weight)
            assert isinstance(p, nn.Parameter)
            assert not p.requires_grad
            assert same(p, FP8Weight(fp8fn.quantize(before[name], (128, 128)), torch.float32))
        else:
            assert type(p) is nn.Parameter
            assert torch.equal(p, before[name])
    x = expected = before["embed.weight"][ids]
    for layer in model.layers:
        assert isinstance(layer, nn.Linear)
        expected = expected + expected @ values(layer.weight).T
    assert snr(model(ids), expected @ before["lm_head.weight"].T) > 100
    assert x.shape == (2, 9, 256)


@pytest.mark.parametrize("where", ["layers.*", ["*.1.weight", "lm_head.*"], "*", lambda site: site.n == 512])
def test_where(where: Any) -> None:
    model = Model()
    report = fp8fn.quantize_weights(model, where=where, block=(1, 128))
    expected = {
        "layers.*": ("layers.0.weight", "layers.1.weight"),
        "*": ("experts", "embed.weight", "layers.0.weight", "layers.1.weight", "lm_head.weight"),
    }.get(str(where), ("layers.1.weight", "lm_head.weight"))
    if callable(where):
        expected = ("embed.weight", "lm_head.weight")
    assert report.quantized == expected
    ids = torch.randint(0, 512, (2, 9))
    assert model(ids).shape == (2, 9, 512)
    head = model.lm_head.weight
    assert isinstance(head, FP8Weight) == ("lm_head.weight" in expected)
    if isinstance(head, FP8Weight):
        assert head.scaled.block == (1, 128)


def test_types_and_formats() -> None:
    model = nn.Linear(256, 256).bfloat16()
    fp8fn.quantize_weights(model, block=(1, 32), dtype=torch.float8_e5m2, scale="e8m0")
    w = model.weight
    assert isinstance(w, FP8Weight)
    assert (w.dtype, w.scaled.dtype, w.scaled.scale.dtype) == (torch.bfloat16, torch.float8_e5m2, torch.float8_e8m0fnu)
    assert fp8fn.quantize_weights(model, where="*").kept == {"weight": "it is an FP8Weight already"}


@pytest.mark.parametrize("where", [None, "*"])
def test_tied_weights(where: Any) -> None:
    """One tensor stays one: a head that is tied to a table is quantized with it, or not at all."""
    model = Model()
    model.lm_head.weight = model.embed.weight
    model.layers[1].weight = model.layers[0].weight  # type: ignore[union-attr]
    report = fp8fn.quantize_weights(model, where=where)
    assert model.lm_head.weight is model.embed.weight
    assert model.layers[0].weight is model.layers[1].weight
    assert isinstance(model.layers[0].weight, FP8Weight)
    assert isinstance(model.embed.weight, FP8Weight) == (where == "*")
    assert {"layers.0.weight", "layers.1.weight"} <= set(report.quantized)


def test_a_tie_to_a_weight_that_stays() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(256, 256), "out": nn.Linear(256, 256, bias=False)})
    model["out"].weight = model["embed"].weight
    report = fp8fn.quantize_weights(model)
    assert report.quantized == ()
    assert report.kept["out.weight"].startswith("tied to embed.weight, which stays: sensitive")


def test_an_error_changes_no_weight() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].weight[3, 5] = torch.inf  # type: ignore[index]
    with pytest.raises(ValueError, match=r"layers\.1\.weight holds NaN or Inf; no weight of the model was quantized"):
        fp8fn.quantize_weights(model)
    assert not any(isinstance(p, FP8Weight) for p in model.parameters())


def test_wrong_arguments() -> None:
    model = Model()
    for error, message, arguments in (
        (TypeError, "quantize_weights: model is a Tensor; use a torch.nn.Module", (torch.ones(2, 2),)),
        (ValueError, "where='layer.*' matches no weight; nearest names: 'layers.*.weight'", (model, "layer.*")),
        (ValueError, "where='*.bias' matches no weight; nearest names: ", (model, "*.bias")),
        (TypeError, "where=3 is neither a function of a Site nor glob patterns", (model, 3)),
        (TypeError, "where={'layers.*': False} is neither a function of a Site", (model, {"layers.*": False})),
        (ValueError, "(64, 64) is not a block of fp8fn", (model, None, (64, 64))),
        (ValueError, "(64, 64) is not a block of fp8fn", (nn.ReLU(), None, (64, 64))),
    ):
        with pytest.raises(error, match=re.escape(message)):
            fp8fn.quantize_weights(*arguments)  # type: ignore[arg-type]
    assert not any(isinstance(p, FP8Weight) for p in model.parameters())


def test_a_pattern_that_matches_nothing_beside_others_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A list may serve several models, so that what it matches is quantized."""
    report = fp8fn.quantize_weights(Model(), ["layers.0.*", "layer.1.*", "mlp.*"])
    assert report.quantized == ("layers.0.weight",)
    nearest = "matches no weight; nearest names: 'layers.*.weight'"
    (found,) = [r for r in caplog.records if r.name == "fp8fn"]
    assert found.levelname == "WARNING"
    assert found.getMessage().startswith(f"quantize_weights: where: 'layer.1.*' {nearest}")
    assert "; where: 'mlp.*' matches no weight; nearest names: " in found.getMessage()
    caplog.clear()
    fp8fn.quantize_weights(Model(), ["layers.0.*", "layers.1.*"])
    assert not caplog.records


def test_meta_parameters_stay() -> None:
    with torch.device("meta"):
        model = nn.Linear(256, 256)
    assert fp8fn.quantize_weights(model).kept == {"weight": "it is on the meta device and has no values"}
