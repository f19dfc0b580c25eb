"""The launches that a sanitizer runs: of every kernel file, under names of their own, and without a device.

And what each launch declares about the launches around it, in its machine code.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

pytest.importorskip("triton")

from test_cuda_scaled_mm import instructions, needs_nvrtc

from fp8fn.ops.cuda.limits import SHARED_LIMIT
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
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
        "OUT_VIA": {"BULK", "PAIRS", "LINES"}, "GROUPED": {"DENSE", "JAGGED_M", "JAGGED_K"}, "SPLIT": {1, 2, 4},
        "CLUSTER": {1, 2}, "SHARE_B": {0, 1}, "B_ONCE": {0, 1},
        "OUT": {"Element::BF16", "Element::FP16", "Element::FP32"},
    }.items():  # fmt: skip
        assert {of[name] for of in macros} == values, name
    assert {of.get("SPREAD_UNIT") for of in macros} == {None, 32, 128}


@cache
def overlapping() -> dict[str, list[tuple[str, CudaLaunch]]]:
    """By kernel file, launches that overlap: one of each form in which a kernel waits for those before it."""
    forms: dict[str, dict[Hashable, tuple[str, CudaLaunch]]] = {}
    for name, launch in launches("meta", SM90):
        macros = dict(launch.kernel.macros)
        form = (launch.constant, launch.late, macros.get("HELD", 0) == 0, *map(macros.get, _WAITS_BY))
        if launch.overlaps:
            forms.setdefault(launch.kernel.file, {}).setdefault(form, (name, launch))
    return {file: list(found.values()) for file, found in forms.items()}


_WAITS_BY = ("PERSISTENT", "W_CONSTANT", "ROUTED", "K_CONTIGUOUS")


def test_the_kernels_that_overlap() -> None:
    assert {file: len(forms) for file, forms in overlapping().items()} == {
        "a16w8_tiles.cu": 7, "gemv_a16w8.cu": 2, "gemv_mx.cu": 2, "mm_a16w8.cu": 3, "mx_tiles.cu": 3,
        "splitk_a16w8.cu": 8, "stream_columns.cu": 1,
    }  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize(
    "file",
    ["a16w8_tiles", "gemv_a16w8", "gemv_mx", "mm_a16w8", "mx_tiles", "splitk_a16w8", "stream_columns"],
)
def test_machine_code_waits_for_the_launches_before_as_the_launch_declares(file: str, tmp_path: Path) -> None:
    """Before the first wait: no store, no load but of constants, and a late launch does not start the next one."""
    for name, launch in overlapping()[f"{file}.cu"]:
        sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]

        def places(pattern: str, sass: list[str] = sass) -> list[int]:
            return [i for i, text in enumerate(sass) if re.search(pattern, text)]

        waits = places("ACQBULK")
        assert waits, name
        if not {"out", "data"} & set(launch.constant):
            assert waits[0] < min(places(r"\b(STG?\.E|UTMASTG|RED|ATOMG?\b)")), (
                name
            )  # ST: the address was a bare number
        if not launch.constant:
            assert waits[0] < min(places(r"\b(LDG?\.E|LDGSTS|UTMALDG)")), name
        assert not launch.late or waits[0] < min(places("PREEXIT")), name
