"""GPUs for tests: one with few multiprocessors, and what a test needs of a real one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest
import torch

from fp8fn.ops.targets import SM90

# So few multiprocessors that a block walks over several tiles.
FEW: Final = replace(SM90, multiprocessors=2)


def skip_below(free: int) -> None:
    if torch.cuda.mem_get_info()[0] < free << 30:
        pytest.skip(f"needs {free} GB of free memory")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, whatever waits for the GPU raises; afterwards the mode is as before."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
