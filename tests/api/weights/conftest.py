"""Each test of FP8 weights gets its own once-only warnings. A test that does not expect one fails on it."""

from __future__ import annotations

import pytest

from fp8fn.weights import fp8_weight


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_weight, "_warned", set())
