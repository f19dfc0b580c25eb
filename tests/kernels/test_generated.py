"""Tests that follow from what each kernel declares in its `KernelInfo`: values, poison, NaN, far offsets, machine code.

On the CPU a kernel in CUDA C++ runs in the emulator, which also sees a load that begins outside of all tensors; one in
Triton is interpreted, and one in HIP runs in the model of the host. On a GPU every form of its kernels runs.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.hip import build
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, Target
from fp8fn.ops.triton import views
from fp8fn.ops.triton.launch import TritonLaunch
from support.accuracy import differing
from support.compilers import SHARED_LIMIT, assert_no_spills, instructions, needs_nvrtc
from support.cuda_emulator import emulate
from support.every_hip_kernel import HIP
from support.every_kernel import CUDA
from support.every_triton_kernel import TRITON
from support.hip_on_host import run_on_host
from support.kernel_info import Form, KernelInfo, Place, poison

ALL: Final = (*CUDA, *TRITON, *HIP)
CPU, META, GPU = (Place(torch.device(name)) for name in ("cpu", "meta", "cuda"))
each_cuda_kernel = pytest.mark.parametrize("info", CUDA, ids=lambda info: info.name)


def target_of(info: KernelInfo) -> Target:
    return {"sm90": SM90, "sm100": SM100, "gfx950": GFX950}[info.targets[0]]


def parameters(info: KernelInfo, *values: Any) -> Any:
    of = values[-1] if isinstance(values[-1], str) else values[-1][0]
    return pytest.param(info, *values, id=f"{info.file}-{of}")


def run(form: Form) -> None:
    """On the CPU."""
    for launch in form.launches:
        if isinstance(launch, TritonLaunch):
            launch.interpret()
            continue
        if shutil.which("g++") is None:
            pytest.skip("the models of CUDA and HIP on the CPU are compiled by g++")
        if isinstance(launch, CudaLaunch):
            emulate(launch)
        else:
            run_on_host(launch)


def each_form(infos: Sequence[KernelInfo]) -> pytest.MarkDecorator:
    """Each kernel with the names of its forms that run on the CPU."""
    found = [parameters(info, form.name) for info in infos for form in info.few(META, target_of(info))]
    return pytest.mark.parametrize(("info", "name"), found)


def each_nan(infos: Sequence[KernelInfo]) -> pytest.MarkDecorator:
    """Each kernel with the inputs of its `nan`, and the first form on the CPU that has such an input."""
    found = []
    for info in infos:
        forms = list(info.few(META, target_of(info)))
        for of in info.nan:
            form = next(form for form in forms if of in form.operands.inputs)
            found.append(parameters(info, form.name, of))
    return pytest.mark.parametrize(("info", "name", "of"), found)


def each_far(infos: Sequence[KernelInfo]) -> pytest.MarkDecorator:
    """Each kernel with its inputs of `far`, and its first form, without a batch, of three elements along the axis."""
    found = []
    for info in infos:
        for of, axis in info.far:
            forms = (*info.few(META, target_of(info)), *info.forms(META, target_of(info)))  # the smaller ones first
            inputs = ((form, form.operands.inputs.get(of)) for form in forms)
            form = next(form for form, x in inputs if x is not None and x.dim() <= 2 and x.shape[axis] > 2)
            found.append(parameters(info, form.name, (of, axis)))
    return pytest.mark.parametrize(("info", "name", "of"), found)


def form_of(info: KernelInfo, name: str, place: Place) -> Form:
    return next(form for form in info.forms(place, target_of(info)) if form.name == name)


def test_every_kernel_file_is_declared() -> None:
    triton = {file.name for file in Path(views.__file__).parent.glob("*.py") if "\ndef plan_" in file.read_text()}
    for infos, files in (
        (CUDA, {name for name in nvrtc.sources() if name.endswith(".cu")}),
        (TRITON, triton),
        (HIP, {file.name for file in Path(build.__file__).parent.glob("*.hip")}),
    ):
        assert {info.file for info in infos} == files


@pytest.mark.parametrize("info", ALL, ids=lambda info: info.file)
def test_a_kernel_file_launches_itself(info: KernelInfo) -> None:
    for form in info.forms(META, target_of(info)):
        files = set()
        for launch in form.launches:
            if isinstance(launch, TritonLaunch):
                files.add(Path(launch.kernel.fn.__code__.co_filename).name)
            else:
                files.add(launch.kernel.file if isinstance(launch, CudaLaunch) else launch.kernel.source)
        assert info.file in files, form.name


@each_form(ALL)
def test_values_and_nothing_outside(info: KernelInfo, name: str) -> None:
    """Inputs lie among NaN; outputs among a pattern that stays, as do the inputs' bytes."""
    form = form_of(info, name, CPU)
    before = form.operands.bytes_of_inputs()
    run(form)
    form.operands.check(info.bound or 0.0)
    after = form.operands.bytes_of_inputs()
    assert [key for key, x in before.items() if not torch.equal(after[key], x)] == []


@each_nan(ALL)
def test_a_nan_stays_in_the_outputs_of_its_block(info: KernelInfo, name: str, of: str) -> None:
    """Outputs that don't depend on the NaN have the bits that they have without it."""
    form = form_of(info, name, CPU)
    run(form)
    clean = form.operands.found()
    form.operands.clear()
    poison(form.operands.inputs[of])
    run(form)
    form.operands.check(info.bound or 0.0)
    assert_same_where_finite(form, clean)


def assert_same_where_finite(form: Form, clean: dict[str, torch.Tensor]) -> None:
    expected = form.operands.expected()
    assert any(bool(part.value.isnan().any()) for part in expected.values())
    for name, part in expected.items():
        if part.magnitude is not None:  # a quantizer's scale and bytes change where its block has a NaN
            others = ~part.value.isnan()
            if part.written is not None:
                others &= part.written.to(others.device)
            assert torch.equal(form.operands.outputs[name][others], clean[name][others])


@each_far(ALL)
def test_offsets_past_32_bits(info: KernelInfo, name: str, of: tuple[str, int]) -> None:
    """An input whose lines lie 5 * 2**28 elements apart, in zeros where an offset that lost its upper bits leads."""
    form = form_of(info, name, Place(torch.device("cpu"), of))
    x = form.operands.inputs[of[0]]
    assert x.stride(of[1]) * (x.shape[of[1]] - 1) >= 2**31
    run(form)
    form.operands.check(info.bound or 0.0)


_WAITS_BY = ("PERSISTENT", "W_CONSTANT", "ROUTED", "K_CONTIGUOUS")


def waiting(info: KernelInfo) -> dict[str, CudaLaunch]:
    """One launch for each way in which a kernel that overlaps waits for the launches before it."""
    ways: dict[Hashable, tuple[str, CudaLaunch]] = {}
    for form in info.forms(META, SM90):
        for launch in form.launches:
            macros = dict(launch.kernel.macros)
            way = (launch.constant, launch.late, macros.get("HELD", 0) == 0, *map(macros.get, _WAITS_BY))
            if launch.overlaps:
                ways.setdefault(way, (form.name if launch is form.launches[-1] else launch.name, launch))
    return dict(ways.values())


@each_cuda_kernel
def test_what_overlaps_and_is_read_early_is_declared(info: KernelInfo) -> None:
    launches = [launch for form in info.forms(META, SM90) for launch in form.launches]
    assert any(launch.overlaps for launch in launches) == info.overlaps
    assert {name for launch in launches for name in launch.constant} == info.early


def test_the_ways_in_which_kernels_wait() -> None:
    overlapping = {info.name: waiting(info) for info in CUDA if info.overlaps}
    assert {name: len(of) for name, of in overlapping.items()} == {
        "a16w8_tiles": 8, "gemv_a16w8": 2, "gemv_mx": 2, "mm_a16w8": 3, "mx_tiles": 3, "split_rows": 5,
        "splitk_a16w8": 8, "stream_columns": 1,
    }  # fmt: skip


@needs_nvrtc
@each_cuda_kernel
def test_machine_code_spills_nothing_and_waits_as_the_launch_declares(info: KernelInfo, tmp_path: Path) -> None:
    """Before the first wait: no store, no load but of constants, and a late launch does not start the next one."""
    few = {form.name: launch for form in info.few(META, SM90) for launch in form.launches}
    for name, launch in (few | waiting(info)).items():
        assert (launch.resources().spills > 0) == (name in info.spilling), name
        assert launch.shared <= SHARED_LIMIT, name
        sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]

        def places(pattern: str, sass: list[str] = sass) -> list[int]:
            return [i for i, text in enumerate(sass) if re.search(pattern, text)]

        waits = places("ACQBULK")
        assert bool(waits) == launch.overlaps, name
        if not launch.overlaps:
            continue
        if not {"out", "data"} & set(launch.constant):  # ST: the address was a bare number
            assert waits[0] < min(places(r"\b(STG?\.E|UTMASTG|RED|ATOMG?\b)")), name
        if not launch.constant:
            assert waits[0] < min(places(r"\b(LDG?\.E|LDGSTS|UTMALDG)")), name
        assert not launch.late or waits[0] < min(places("PREEXIT")), name


@pytest.mark.parametrize("info", TRITON, ids=lambda info: info.file)
def test_no_form_in_triton_spills(info: KernelInfo) -> None:
    target = target_of(info)
    form = next(info.few(META, target))
    for launch in form.launches:
        assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
@pytest.mark.parametrize("info", [info for info in TRITON if info.overlaps], ids=lambda info: info.file)
def test_a_kernel_in_triton_that_overlaps_waits_before_it_reads_or_writes(
    info: KernelInfo, target: Target, tmp_path: Path
) -> None:
    for form in info.few(META, target):
        for launch in form.launches:
            assert isinstance(launch, TritonLaunch)
            assert launch.overlaps
            assert launch.compile().metadata.launch_pdl
            sass = [text for _, text in instructions(launch.compile().asm["cubin"], tmp_path)]
            (waits,) = (i for i, text in enumerate(sass) if "ACQBULK" in text)
            (starts,) = (i for i, text in enumerate(sass) if "PREEXIT" in text)
            memory = re.compile(r"\b(LDG?\.E|LDGSTS|STG?\.E|UTMA\w+|REDG?|ATOMG?)\b")
            assert waits < starts < min(i for i, text in enumerate(sass) if memory.search(text)), form.name


@pytest.mark.parametrize("info", TRITON, ids=lambda info: info.file)
def test_a_kernel_in_triton_overlaps_as_declared_and_from_hopper_on(info: KernelInfo) -> None:
    for target, expected in ((target_of(info), info.overlaps), (SM89, False), (GFX942, False)):
        for form in info.few(META, target):
            for launch in form.launches:
                assert isinstance(launch, TritonLaunch)
                assert launch.overlaps == launch.options.get("launch_pdl", False) == expected, form.name


@pytest.mark.gpu
@pytest.mark.parametrize("info", [info for info in ALL if "sm90" in info.targets], ids=lambda info: info.file)
def test_every_form_on_a_gpu(info: KernelInfo, hopper: Target) -> None:
    """Twice, with the same bits."""
    for form in info.forms(GPU, hopper):
        before, found = form.operands.bytes_of_inputs(), []
        for _ in range(2):
            form.operands.clear()
            for launch in form.launches:
                launch.run()
            form.operands.check(info.gpu_bound or 0.0)
            found.append(form.operands.found())
        after = form.operands.bytes_of_inputs()
        assert [key for key, x in before.items() if not torch.equal(after[key], x)] == [], form.name
        for key, first in found[0].items():
            assert differing(first, found[1][key]) == 0, (form.name, key)


@pytest.mark.gpu
@each_nan(CUDA)
def test_a_nan_on_a_gpu(info: KernelInfo, name: str, of: str, hopper: Target) -> None:
    form: Any = form_of(info, name, GPU)
    for launch in form.launches:
        launch.run()
    clean = form.operands.found()
    form.operands.clear()
    poison(form.operands.inputs[of])
    for launch in form.launches:
        launch.run()
    form.operands.check(info.gpu_bound or 0.0)
    assert_same_where_finite(form, clean)
