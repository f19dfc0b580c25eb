"""The fixture of the quantizers in CUDA C++."""

from __future__ import annotations

import pytest
import torch

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import target_of
from support.cuda_emulator import needs_compiler


@pytest.fixture(params=[pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """The device of the kernels: emulated on the CPU, or a Hopper."""
    if request.param == "cuda":
        name = target_of(torch.device("cuda")).name
        if name != "sm90" or nvrtc.unavailable():
            pytest.skip(nvrtc.unavailable() or f"the kernels are Hopper's, and this device is {name}")
    return str(request.param)
