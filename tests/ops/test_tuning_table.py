"""A user's tuning table with anything in it: a bad row is left out with one warning, and a lookup never raises."""

from __future__ import annotations

import copy
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8fn.ops import code_cache
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import Chip, Target
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.problem import Problem, empty_product
from support.products import dispatched

CHIP = Chip("NVIDIA Test", 132)
HOPPER = Target("cuda", 90, 32, 132)
GOOD = [
    64, 7168, 2112, 1, "VECTOR", "BLOCK", "e4m3fn", "e4m3fn", "bfloat16",
    "64x128d2s2", {"64x64d2": 11.3, "64x128d2s2": 9.25}, 0.5, 12.0,
]  # fmt: skip
OTHER = [128, *GOOD[1:]]
HEAD = {"format": 1, "chip": CHIP.name, "multiprocessors": 132, "origin": {}, "columns": list(table.COLUMNS)}


@pytest.fixture(autouse=True)
def nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An empty cache, and every test warns anew."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    code_cache._said.clear()
    table.forget()
    with caplog.at_level(logging.WARNING, logger="fp8fn"):
        yield
    table.forget()


def put(text: str) -> Path:
    """Makes a text the user's table."""
    path = table.user_path(CHIP)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    table.forget()
    return path


def with_rows(*rows: Any) -> str:
    return json.dumps({**HEAD, "rows": list(rows)})


def changed(column: str, value: Any) -> list[Any]:
    row = copy.deepcopy(GOOD)
    row[table.COLUMNS.index(column)] = value
    return row


BAD: dict[str, tuple[list[Any], str]] = {
    "negative M": (changed("M", -5), "has -5 as M, which has to be a positive whole number"),
    "zero K": (changed("K", 0), "has 0 as K"),
    "batch 0": (changed("batch", 0), "has 0 as batch"),
    "infinite M": (changed("M", math.inf), "has inf as M"),
    "N of text": (changed("N", "7168"), "has '7168' as N"),
    "N of a fraction": (changed("N", 7168.5), "has 7168.5 as N"),
    "true M": (changed("M", True), "has True as M"),
    "more than a tensor has": (changed("M", 2**63), "has 9223372036854775808 as M"),
    "scales": (changed("b_scale", "LINE"), "has scales of no kind: ['VECTOR', 'LINE']"),
    "scales without a hash": (changed("a_scale", []), "has scales of no kind"),
    "a_type": (changed("a_type", "e4m3fnuz"), "has 'e4m3fnuz' as a_type, which has to be one of e4m3fn, e5m2"),
    "b_type": (changed("b_type", {}), "has {} as b_type"),
    "out_type": (changed("out_type", "int8"), "has 'int8' as out_type"),
    "NaN spread": (changed("spread_us", math.nan), "has nan as spread_us, which has to be a number of at least 0"),
    "negative spread": (changed("spread_us", -1), "has -1 as spread_us"),
    "infinite peer": (changed("peer_us", math.inf), "has inf as peer_us"),
    "peer of 0": (changed("peer_us", 0), "has 0 as peer_us, which has to be null or a positive number"),
    "a time of 0": (changed("times_us", {"64x128d2s2": 0}), "as times_us, which have to be positive numbers"),
    "a NaN time": (changed("times_us", {"64x128d2s2": 1, "64x64d2": math.nan}), "as times_us"),
    "a time too large for a float": (changed("times_us", {"64x128d2s2": 10**400}), "as times_us"),
    "times in a list": (changed("times_us", [1.0]), "has [1.0] as times_us"),
    "no time": (changed("times_us", {"64x64d2": 1.0}), "has no time of its configuration '64x128d2s2'"),
    "a number for a configuration": (changed("config", 7), "has no time of its configuration 7"),
    "no configuration": (changed("times_us", {"64x128d2s2": 1.0, "9x9d1": 2.0}), "'9x9d1' names no configuration"),
    "another kind's tile": ([*GOOD[:9], "128x192d2", {"128x192d2": 1.0}, 1, None], "has the configuration 128x192d2"),
    "a time of another kind's tile": (
        changed("times_us", {"64x128d2s2": 1.0, "128x192d2": 2.0}), "has a time of 128x192d2, in which the kernel",
    ),
    "a time of three that share K": (changed("times_us", {"64x128d2s2": 1.0, "64x128d2s3": 2.0}), "has a time of"),
    "a group of no rows": (changed("times_us", {"64x128d2s2": 1.0, "64x128d2g0": 2.0}), "names no configuration"),
    "three share K": ([*GOOD[:9], "64x128d2s3", {"64x128d2s3": 1.0}, 1, None], "has the configuration 64x128d2s3"),
    "too many share K": ([*GOOD[:9], "64x128d2s8", {"64x128d2s8": 1.0}, 1, None], "has the configuration 64x128d2s8"),
    "too little of K to share": (changed("K", 512), "has the configuration 64x128d2s2, in which the kernel can't"),
    "a huge group": (
        [*GOOD[:9], "64x128d2g99999999999", {"64x128d2g99999999999": 1.0}, 1, None], "has the configuration",
    ),
    "twelve cells": (GOOD[:-1], "is no list of 13 values"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_bad_row_is_left_out_with_one_warning(bad: list[Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    path = put(with_rows(OTHER, bad, OTHER))
    for _ in range(2):
        (found,) = table.tables(CHIP)
        assert [problem.m for problem in found.entries] == [128]
        table.forget()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{path}: row 2 has" in message or f"{path}: row 2 is" in message
    assert reason in message
    # And in a table of the command line, an error.
    with pytest.raises(ValueError, match=r"^row 2 "):
        table.read(path)


@pytest.mark.parametrize(
    ("text", "value"), [("1e999", "inf"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("NaN", "nan")]
)
@pytest.mark.parametrize("column", ["M", "spread_us", "peer_us"])
def test_numbers_that_json_has_no_name_for(
    column: str, text: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(with_rows(OTHER, changed(column, "HERE")).replace('"HERE"', text))
    assert len(table.tables(CHIP)[0].entries) == 1
    assert f"{path}: row 2 has {value} as {column}" in caplog.text


def test_several_bad_rows_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    put(with_rows(*(row for row, _ in BAD.values()), GOOD))
    assert len(table.tables(CHIP)[0].entries) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        f"row 1 has -5 as M, which has to be a positive whole number; it is left out, and {len(BAD) - 1} more"
        in message
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        with_rows().replace('"rows": []', '"rows": ' + "[" * 100_000 + "]" * 100_000),
        with_rows().replace("132", "1e999"),
        with_rows().replace("132", '"132"'),
        with_rows(["1" * 5000]).replace(f'"{"1" * 5000}"', "1" * 5000),  # more digits than Python reads
    ],
    ids=["lists", "objects", "rows", "infinite chip", "chip of text", "digits"],
)  # fmt: skip
def test_a_file_that_is_no_table_is_left_out_with_one_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = put(text)
    for _ in range(2):
        assert table.tables(CHIP) == ()
        table.forget()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"tuning: {path} is left out: " in message
    assert "run `python -m fp8fn tune` again" in message
    with pytest.raises(ValueError, match=r"."):
        table.read(path)


def test_every_row_that_tune_writes_is_good() -> None:
    put(with_rows(GOOD, OTHER))
    (found,) = table.tables(CHIP)
    assert [(p.m, p.k, e.config, e.us, e.spread, e.peer_us) for p, e in found.entries.items()] == [
        (64, 2112, "64x128d2s2", 9.25, 0.5, 12.0), (128, 2112, "64x128d2s2", 9.25, 0.5, 12.0),
    ]  # fmt: skip


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**400])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["VECTOR", "BLOCK", "LINE", "WHOLE", "e5m2", "float32", "64x64d2", "192x128d1", "64x64d2s4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rows(draw: st.DrawFn) -> Any:
    """A good row with some of its cells replaced, or anything."""
    if draw(st.integers(0, 9)) == 0:
        return draw(json_values)
    row = copy.deepcopy(GOOD)
    for place in draw(st.lists(st.integers(0, len(row) - 1), max_size=3)):
        row[place] = draw(json_values)
    name = row[9]
    if isinstance(name, str) and draw(st.booleans()):
        row[10] = {name: draw(json_values | st.floats(0.1, 100))}
    return row


def is_good(row: Any) -> bool:
    """By the words of the format: what a row has to be, but for its configuration's fit, which the plan shows."""
    number = (int, float)
    return (
        isinstance(row, list)
        and len(row) == 13
        and all(type(size) is int and size > 0 for size in row[:4])
        and (row[4], row[5]) in [("VECTOR", "BLOCK"), ("VECTOR", "VECTOR"), ("LINE", "LINE"), ("WHOLE", "WHOLE")]
        and row[6] in ["e4m3fn", "e5m2"]
        and row[7] in ["e4m3fn", "e5m2"]
        and row[8] in ["bfloat16", "float16", "float32"]
        and isinstance(row[10], dict)
        and row[9] in list(row[10])
        and all(type(time) in number and 0 < time < 1e300 for time in row[10].values())
        and type(row[11]) in number
        and 0 <= row[11] < 1e300
        and (row[12] is None or (type(row[12]) in number and 0 < row[12] < 1e300))
    )


def runnable(problem: Problem) -> Problem:
    """The problem in fewer rows and columns, of which a configuration does not depend."""
    return Problem(
        min(problem.m, 64), min(problem.n, 128), min(problem.k, 8192), *problem.kinds, min(problem.batch, 2),
        problem.a_type, problem.b_type, problem.out_type,
    )  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(st.lists(rows(), max_size=4), st.integers(0, 4))
def test_no_table_makes_a_lookup_raise(drawn: list[Any], place: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8FN_CACHE_DIR", folder)
        put(with_rows(*drawn[:place], OTHER, *drawn[place:]))
        (found,) = table.tables(CHIP)
        assert Problem(128, 7168, 2112) in found.entries
        wanted = [tuple(row[:3]) for row in (*drawn, OTHER) if is_good(row)]
        for problem, entry in found.entries.items():
            assert (problem.m, problem.n, problem.k) in wanted
            assert entry.us > 0
            assert math.isfinite(entry.spread)
            assert entry.peer_wins in (True, False)
            config = table.config_of(entry.config)
            cuda.plan(empty_product(runnable(problem), "meta", HOPPER), config)
        # A merge of it with another table is a table again.
        table.add(CHIP, {Problem(1, 2, 3): table.Entry("64x64d2", {"64x64d2": 0.001}, 0.0)}, {})
        assert set(table.read(table.user_path(CHIP)).entries) == {Problem(1, 2, 3), *found.entries}


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from([*HEAD, "rows"]), json_values, max_size=3))
def test_no_head_of_a_table_makes_a_lookup_raise(head: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8FN_CACHE_DIR", folder)
        put(json.dumps({**HEAD, "rows": [GOOD], **head}))
        found = table.tables(CHIP)
        changed = {key for key, value in head.items() if value != {**HEAD, "rows": []}[key]} - {"origin"}
        assert (len(found) == 0) == bool(changed)


@pytest.mark.parametrize("bad", [changed("M", -5), [*GOOD[:9], "64x128d2s3", {"64x128d2s3": 1.0}, 1, None]])
def test_a_product_is_planned_beside_a_bad_row(bad: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's own shape goes by the other row, which is near it."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    put(with_rows(bad, OTHER))
    reasons = [dispatched(empty_product(Problem(m, 7168, 2112), "meta", HOPPER, CHIP)).reason for m in (64, 128)]
    name = table.user_path(CHIP).name
    assert reasons == [f"cuda by shapes near it in {name}", f"cuda by {name}"]
