"""The text, HTML and data frame of an `Explanation`, from rows that are given."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fp8fn.lowering.explanation import WIDTH, Explanation, Row
from fp8fn.ops.tuning.estimate import Step, Times

FAST = Times(Step(10.0, 20.0), Step(20.0, 40.0), "a table")
KERNEL = "scaled_mm[BM=128,BN=256] grid=132x1x1 sm90 (cuda by h100.json)"
UP = Row(
    node="linear",
    source="model.py:7",
    op="linear",
    weight="layers.0.up.weight",
    shape=(4096, 512, 256),
    kernel=KERNEL,
    reason=None,
    estimated=FAST,
)
HEAD = replace(UP, weight="head.weight", shape=(4096, 64, 256), kernel=None, reason="small: N=64 is under 128")
MIXED = Explanation((UP, replace(UP, weight="layers.1.up.weight"), HEAD), "blockwise", 1)


def test_a_section_for_each_kernel_and_reason() -> None:
    assert (
        str(MIXED)
        == """\
    weight, or node     M,N,K         estimated, µs    source
--  ------------------  ------------  ---------------  ----------
scaled_mm sm90 (cuda by h100.json)
2x  layers.*.up.weight  4096,512,256  60 → 30 (2.00x)  model.py:7
left alone: small: N=64 is under 128
1x  head.weight         4096,64,256   60 → 30 (2.00x)  model.py:7
2 of 3 products in FP8, recipe blockwise, 1 graph(s)
94.1 % of the operations of all products are in FP8
µs: forward and backward, bf16 → FP8 with quantization, estimated for None"""
    )


def test_a_hundred_columns_hold_every_name_by_its_end() -> None:
    """The source gives first, then the widest; sentences are wrapped between words."""
    weight = "model.language_model.decoder.layers.0.self_attention.query_projection.weight"
    long = replace(
        UP,
        weight=weight,
        source="modeling_of_a_model_with_a_long_name.py:1234",
        kernel=None,
        reason=" ".join(["reason"] * 30),
        measured=FAST,
    )
    lines = str(Explanation((long,), "blockwise", 1)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    cells = next(line for line in lines if line.startswith("1x"))
    name, source = (cell for cell in cells.split() if cell.startswith("…"))
    assert weight.endswith(name[1:])
    assert len(name) > 20
    assert long.source.endswith(source[1:])
    assert " ".join(line.strip() for line in lines).count("reason") == 30


def test_triton_kernels_share_a_section_and_forward_times_stay() -> None:
    options = "num_warps=4 num_stages=2 kpack=2 gfx942 (128x64w4s2 modelled; triton by default)"
    rows = tuple(replace(UP, kernel=f"scaled_mm[BM={size}] grid={size}x1x1 {options}") for size in (64, 128))
    assert {row.brief for row in rows} == {"scaled_mm gfx942 (triton by default)"}
    forward = "slower: 60 µs in FP8 with quantization, 53 in bf16, forward by the model; where='*' takes it too"
    assert replace(HEAD, reason=forward).brief == forward


def test_products_of_the_backward_are_in_no_share() -> None:
    assert replace(MIXED, rows=(UP, HEAD, replace(UP, backward=True))).share == pytest.approx(8 / 9)


def test_a_product_without_a_weight_has_its_nodes_name() -> None:
    assert "\n1x  matmul_3         4096,512,256" in str(Explanation((replace(UP, node="matmul_3", weight=""),), "", 1))


def test_reasons_that_differ_in_their_times_share_a_section() -> None:
    """The times stand in the row."""
    reasons = [
        f"slower: {us} µs in FP8 with quantization, 20 in bf16, forward and backward by the model;" for us in (42, 51)
    ]
    alone = Explanation(tuple(replace(HEAD, reason=f"{each} where='*' takes it too") for each in reasons), "", 1)
    assert str(alone).count("left alone: slower: estimated by the model; where='*' takes it too\n") == 1
    assert [row.reason for row in alone.rows] == [f"{each} where='*' takes it too" for each in reasons]


def test_html_has_the_kernels_configuration() -> None:
    html = MIXED._repr_html_()
    assert f'<td title="{KERNEL}">scaled_mm sm90 (cuda by h100.json)</td>' in html
    assert ">- small: N=64 is under 128</td>" in html
    assert html.count("<tr>") == 3


def test_operations_and_their_share() -> None:
    assert UP.operations == 2.0 * 4096 * 512 * 256
    assert replace(UP, batch=4).operations == 4 * 2.0 * 4096 * 512 * 256
    assert replace(UP, shape=(8, 4096, 512, 256)).operations == UP.operations  # groups share the rows
    assert MIXED.share == pytest.approx(16 / 17)
    assert replace(MIXED, rows=()).share is None
    assert "% of the operations" not in str(replace(MIXED, rows=(UP,)))


def test_a_data_frame_has_a_line_for_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """pandas is no package of the tests: its constructor takes a list of dicts."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    lines = MIXED.to_dataframe()
    assert [line["weight"] for line in lines] == ["layers.0.up.weight", "layers.1.up.weight", "head.weight"]
    assert [line["reason"] for line in lines] == [None, None, "small: N=64 is under 128"]
    assert {line["estimated_fp8_us"] for line in lines} == {30.0}
    assert {line["measured_bf16_us"] for line in lines} == {None}
    assert [line["operations"] for line in lines] == [row.operations for row in MIXED.rows]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_dataframe needs pandas: pip install pandas"):
        MIXED.to_dataframe()
