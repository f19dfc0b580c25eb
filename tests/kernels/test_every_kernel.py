"""The launches that a sanitizer runs: of every kernel file, under names of their own, and without a device."""

from __future__ import annotations

import pytest
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops.cuda.limits import SHARED_LIMIT
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import TensorMap
from fp8fn.ops.targets import SM90
from support.every_kernel import launches


def test_every_kernel_file_has_launches() -> None:
    found = list(launches("meta", SM90))
    files = {name for name in nvrtc.sources() if name.endswith(".cu")}
    assert {launch.kernel.file for _, launch in found} == files
    assert len({name for name, _ in found}) == len(found)
    assert len({launch.kernel for _, launch in found}) == len(found)  # no two are of one form
    for name, launch in found:
        assert name.startswith(launch.kernel.file)
        assert launch.shared <= SHARED_LIMIT, name
        tensors = [arg.tensor if isinstance(arg, TensorMap) else arg for arg in launch.args.values()]
        assert all(x.is_meta for x in tensors if isinstance(x, Tensor)), name


def test_the_scaled_product_has_each_form() -> None:
    macros = [dict(launch.kernel.macros) for _, launch in launches("meta", SM90) if launch.name == "scaled_mm"]
    for name, values in {
        "OUT_VIA": {"BULK", "PAIRS", "LINES"}, "GROUPED": {"DENSE", "JAGGED_M", "JAGGED_K", "MASKED"},
        "SPLIT": {1, 2, 4}, "CLUSTER": {1, 2}, "SHARE_B": {0, 1}, "B_ONCE": {0, 1},
        "OUT": {"Element::BF16", "Element::FP16", "Element::FP32"},
    }.items():  # fmt: skip
        assert {of[name] for of in macros} == values, name
    assert {of.get("SPREAD_UNIT") for of in macros} == {None, 32, 128}
