"""Errors name a type with its article, as it is read aloud, and no message spells an article before a type itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fp8fn.ops.kinds import kind_of, with_article

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "an int"),
        (None, "a NoneType"),
        ("", "a str"),
        (nn.Embedding(1, 1), "an Embedding"),
        (nn.LSTM(1, 1), "an LSTM"),
    ],
)
def test_values(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_names() -> None:
    for kind in (
        "an async_generator",
        "an ndarray",
        "an FP8Weight",
        "an MLP",
        "an NVFP4Tensor",
        "an RNN",
        "an X",
        "an object",
    ):
        assert with_article(kind[3:]) == kind
    for kind in (
        "a DTensor",
        "a UserDict",
        "a Union",
        "a uint8",
        "a ScaledTensor",
        "a Module",
        "a GRU",
        "a UUID",
        "a bool",
    ):
        assert with_article(kind[2:]) == kind


def test_no_message_spells_the_article() -> None:
    files = [file for folder in ("fp8fn", "ops", "meta", "lowering") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"\ban? \{(type\(|kind\b)", line)
    ]
    assert not found, "use kind_of:\n" + "\n".join(found)
