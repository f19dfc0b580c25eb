"""Tables fit a terminal, and are whole where the output is none."""

from __future__ import annotations

import os
import sys

import pytest
import torch

pytest.importorskip("tabulate")

from fp8fn import terminal
from fp8fn.lowering.explanation import NARROWEST, Explanation, Row
from fp8fn.ops.recipe import BLOCKWISE

pytestmark = pytest.mark.every_case

HEADERS = ("shape", "what was measured", "SNR dB")
ROWS = [("8192,6144,4096", "the product of quantized operands", "50.1"), ("1,2,3", "quantizers", "28.0")]


def test_cells_are_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 38)
    assert terminal.fitted(ROWS, HEADERS, ("left", "left", "right")).splitlines() == [
        "shape           what was        SNR dB",
        "                measured",
        "--------------  ------------  --------",
        "8192,6144,4096  the product       50.1",
        "                of quantized",
        "                operands",
        "1,2,3           quantizers        28.0",
    ]


@pytest.mark.parametrize("width", [None, 200])
def test_a_table_with_room_is_whole(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: width)
    first, _, second, _ = terminal.fitted(ROWS, HEADERS).splitlines()
    assert first.split() == ["shape", "what", "was", "measured", "SNR", "dB"]
    assert second == "8192,6144,4096  the product of quantized operands  50.1"


def test_no_word_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 10)
    assert {"8192,6144,4096", "quantized", "quantizers", "measured"} <= set(terminal.fitted(ROWS, HEADERS).split())


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal.columns() == 77
    with open(os.devnull, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert terminal.columns() is None
    monkeypatch.setattr(sys, "stdout", None)  # of a program without a console
    assert terminal.columns() is None


def test_an_explanation_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(
        node="linear", source="modeling_of_a_long_name.py:1234", op="linear", shape=(8192, 6144, 4096), kernel=None,
        weight="model.language_model.layers.0.self_attention.query.weight", reason=" ".join(["reason"] * 30),
        dtype=torch.bfloat16,
    )  # fmt: skip
    explanation = Explanation((row,), BLOCKWISE.key, 1)
    whole = str(explanation).splitlines()
    assert 90 < max(map(len, whole)) <= 100
    monkeypatch.setattr(terminal, "columns", lambda: 60)
    narrow = str(explanation).splitlines()
    assert 50 < max(map(len, narrow)) <= 60
    assert NARROWEST < 60 / 4
    monkeypatch.setattr(terminal, "columns", lambda: 300)
    assert str(explanation).splitlines() == whole
