"""The gfx950 code objects of the HIP kernels, executed in the emulator, against the exact products."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.hip import envelope
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.targets import GFX950
from fp8fn.ops.tuning.mx import Problem
from support import emulated
from support.hip_on_host import HOST, SOURCES
from support.hip_probes import check_probe, probes
from support.mx_decode import BF16, FP16, FP32, Dense, Product, Routed, dense, operands, routed

DENSE = [
    *(Dense("gemv", m, 11, k, HipConfig(rows=rows)) for rows, m, k in (
        (1, 1, 1056), (2, 2, 5152), (4, 3, 96), (8, 7, 1056), (16, 13, 1056),
    )),
    Dense("gemv", 1, 11, 1056, HipConfig(rows=4), bias=FP32),
    Dense("gemv", 2, 7, 160, HipConfig(rows=2), BF16, BF16, ((2,), ())),
    Dense("gemv", 9, 7, 160, HipConfig(rows=16), FP16, FP16, ((2,), (2,))),
    *(Dense("mfma", m, 21, k, envelope.configure_mfma(Problem(m, 21, k, GFX950))) for m, k in (
        (5, 96), (16, 640), (31, 1152), (48, 256), (63, 4128),
    )),
    Dense("mfma", 16, 35, 1152, HipConfig(n_sub=2, k_splits=2), BF16, BF16),
    Dense("mfma", 33, 70, 640, HipConfig(n_sub=4, k_splits=8), FP16, FP32, ((2,), ())),
    Dense("mfma", 64, 40, 256, HipConfig(n_sub=4), FP32, BF16, ((), (2,))),
]  # fmt: skip
ROUTED = [
    Routed(5, 2, 4, 16, 21, 768, 2, 16),
    Routed(5, 2, 4, 16, 21, 1024, 1, 8, False, BF16),
    Routed(30, 2, 3, 64, 19, 704, 2, 16, True, FP16),
    Routed(20, 2, 3, 24, 9, 96, 2, 8),
]


def execute(product: Product) -> None:
    emulated.run(product.launches, product.inputs)
    product.check()


@pytest.mark.emulated
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_dense_products(case: Dense) -> None:
    execute(dense(case))


@pytest.mark.emulated
@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_products_of_routed_tokens(case: Routed) -> None:
    execute(routed(case))


@pytest.mark.emulated
@pytest.mark.parametrize("kernel", ["gemv", "mfma"])
def test_what_is_not_a_number_and_the_ends_of_scales(kernel: str) -> None:
    config = HipConfig(rows=8)
    a, b = operands(case := Dense(kernel, 1, 6, 64, config))
    a.scale.view(torch.uint8).copy_(torch.tensor([[0, 254]]))
    b.scale.view(torch.uint8).copy_(torch.tensor([254, 0])[:, None].expand(2, 6))
    execute(dense(case, (a, b)))

    a, b = operands(case := Dense(kernel, 5, 9, 160, config))
    a.scale.view(torch.uint8)[2, 4] = b.scale.view(torch.uint8)[4, 2] = 0xFF
    a.data.view(torch.uint8)[3, 7] = b.data.view(torch.uint8)[159, 3] = 0x7F
    product = dense(case, (a, b))
    execute(product)
    nan = product.out.isnan()
    assert nan.all(0).nonzero().flatten().tolist() == nan.all(1).nonzero().flatten().tolist() == [2, 3]
    assert not nan[[0, 1, 4]][:, [0, 1, 4, 5, 6, 7, 8]].any()


@pytest.mark.emulated
@pytest.mark.parametrize("entry", list(probes()))
def test_what_the_model_of_a_wave_is_held_to(entry: str, tmp_path: Path) -> None:
    """The probes of the model for the host, by the instructions."""
    shutil.copy(HOST / "probes.hip", tmp_path)
    shutil.copy(SOURCES / "wave.h", tmp_path)

    def start(launch: HipLaunch) -> None:
        kernel = replace(launch.kernel, source=str(tmp_path / launch.kernel.source))
        emulated.execute(replace(launch, kernel=kernel))

    check_probe(entry, start)
