"""GPUs for tests: one with few multiprocessors, and what a test needs of a real one."""

from __future__ import annotations

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
