"""`--shuffle SEED`: tests in another order, the same in every worker, since none may depend on those before it."""

from __future__ import annotations

import random

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order drawn by this seed")


def shuffle(items: list[pytest.Item]) -> None:
    if items and (seed := items[0].config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)
