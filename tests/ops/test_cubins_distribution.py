"""The distribution `fp8fn-cubins`: its kernels are those that the suite's layers launch, its data and its wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import fp8fn
from fp8fn import cli
from fp8fn.bench.llm84 import SHAPES
from fp8fn.cli import cubins
from fp8fn.meta import bypass
from fp8fn.ops import quantize, quantize_fused, quantize_silu_mul, scaled_mm, targets
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.runtime import call_cache, nvrtc, packaged
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.recipe import PRESETS
from fp8fn.ops.targets import Chip
from fp8fn.ops.triton import launch as triton_launch
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.table import Entry
from support.check_cubins import LARGEST, faults
from support.compilers import needs_nvrtc
from support.cubins import ARCH, use
from support.tuning import H200, PROBLEM, save

ROOT: Final = Path(__file__).parents[2]
BF16: Final = torch.bfloat16
H100: Final = Chip("NVIDIA H100 80GB HBM3", 132)
# The ops that a graph of a compiled model may have, as functions that plan and launch.
OPS: Final = {
    "quantize": quantize.quantize_kernel,
    "quantize_dual": quantize.quantize_dual_kernel,
    "amax": lambda x, block: quantize.AMAX((x,), (tuple(block),)),
    "scaled_mm": scaled_mm.scaled_mm_kernel,
    "quantize_rms_norm": quantize_fused.quantize_rms_norm_kernel,
    "quantize_rms_norm_dual": quantize_fused.quantize_rms_norm_dual_kernel,
    "quantize_silu_mul": quantize_fused.quantize_silu_mul_kernel,
    "quantize_silu_mul_dual": quantize_fused.quantize_silu_mul_dual_kernel,
    "quantize_silu_mul_saved": quantize_silu_mul.quantize_silu_mul_saved_kernel,
    "quantize_silu_mul_backward": quantize_silu_mul.quantize_silu_mul_backward_kernel,
}


@cache
def shipped(recipe: str) -> frozenset[CudaKernel]:
    return frozenset(cubins.shipped_kernels(SHAPES, [PRESETS[recipe]], BF16))


@contextmanager
def on_hopper(chip: Chip, *, library: bool = True) -> Iterator[dict[CudaKernel, None]]:
    """The kernels that calls on `meta` tensors load inside, which pass for those of a chip; none starts.

    Without `library`, PyTorch's cuBLASLt takes no product.
    """
    found: dict[CudaKernel, None] = {}
    loaded = SimpleNamespace(device=torch.device("meta"), settles=True)

    def prepare(launch: CudaLaunch) -> Any:
        found[launch.kernel] = None
        return loaded

    call_cache._kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaLaunch, "prepare", prepare)
        patch.setattr(targets, "target_of", lambda device: replace(targets.SM90, multiprocessors=132))
        patch.setattr(table, "chip_of", lambda *_: chip)
        patch.setattr(nvrtc, "unavailable", lambda: None)
        patch.setattr(call_cache, "start", lambda launch, addresses: None)
        patch.setattr(triton_launch, "kept", lambda launches, tensors, outputs: lambda *_: outputs.results)
        patch.setattr(bypass, "shortest", lambda dispatched, direct, *_, **__: dispatched)
        for name in ("quantize", "quantize_dual", "scaled_mm"):
            patch.setattr(torch.ops.fp8fn, name, OPS[name])
        if not library:
            patch.setattr(cublaslt, "accepts", lambda product: "this PyTorch has no such product")
        yield found
    call_cache._kept.clear()


def step(shape: tuple[int, ...], recipe: str, *, bias: bool, x_grad: bool = True, w_grad: bool = True) -> None:
    """Forward and backward of a layer."""
    m, n, k = shape
    x, w = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(n, k, dtype=BF16, device="meta")
    parts = [torch.empty(n, dtype=BF16, device="meta")] if bias else []
    out = fp8fn.linear(x.requires_grad_(x_grad), nn.Parameter(w, w_grad), *parts, recipe=recipe)
    if x_grad or w_grad:
        out.backward(torch.empty_like(out))


@pytest.mark.parametrize("library", [True, False], ids=["cublaslt", "no_library"])
@pytest.mark.parametrize("chip", [H200, H100], ids=["H200", "H100"])
@pytest.mark.parametrize("recipe", [recipe.key for recipe in cubins.RECIPES])
def test_every_kernel_that_a_layer_of_the_suite_launches_is_there(
    recipe: str, chip: Chip, library: bool, cache: Path
) -> None:
    """Forward and backward in eager mode, with and without a bias, with frozen weights and inputs, and inference."""
    with on_hopper(chip, library=library) as launched:
        for shape in SHAPES:
            step(shape, recipe, bias=False)
            step(shape, recipe, bias=True)
            for x_grad, w_grad in ((False, True), (True, False), (False, False)):
                step(shape, recipe, bias=False, x_grad=x_grad, w_grad=w_grad)
    assert launched.keys() <= shipped(recipe)
    assert {"scaled_mm"} < {kernel.entry for kernel in launched}


@pytest.mark.parametrize("save", ["exact", "fp8"])
@pytest.mark.parametrize("recipe", ["blockwise_square", "tensorwise"])
def test_every_quantizer_of_a_compiled_model_is_there(recipe: str, save: str, cache: Path) -> None:
    """The ops of both graphs of a Llama of 8B's widths, after the fusions, on tensors of the same layouts."""
    pytest.importorskip("transformers")
    calls = [call for call in compiled_graphs(recipe, save) if call[0] != "scaled_mm"]
    with on_hopper(H200) as launched:
        for name, args, kwargs in calls:
            OPS[name](*args, **kwargs)
    assert launched.keys() <= shipped(recipe)
    entries = {kernel.entry for kernel in launched}
    if recipe == "tensorwise":
        assert entries == {"amax", "quantize"}
    else:
        saved = {"silu_mul_saved"} if save == "fp8" else set()
        assert entries == {"quantize", "silu_mul_backward"} | saved


def compiled_graphs(recipe: str, save: Any) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Name, arguments and named arguments of each op of fp8fn in the graphs; tensors are `meta`."""
    from fp8fn.lowering.saved import SavePlan
    from support.fake_hopper import compiled_llama, fused

    def meta(value: Any) -> Any:
        if not isinstance(value, torch.fx.Node):
            return value
        x: Tensor = value.meta["val"]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    backend = compiled_llama("8b", (1, 8192), SavePlan(save), PRESETS[recipe], layers=1)
    return [
        (str(node.target).split(".")[1], [*map(meta, node.args)], {key: meta(x) for key, x in node.kwargs.items()})
        for module in (*backend.forward, *backend.backward)
        for node in fused(module).graph.nodes
        if str(node.target).startswith("fp8fn.")
    ]


def test_the_users_own_table_is_no_part_of_the_distribution(cache: Path) -> None:
    kernels = cubins.shipped_kernels([(8192, 6144, 4096)], [fp8fn.BLOCKWISE], BF16)
    save({PROBLEM: Entry("64x64d2", {"64x64d2": 1.0}, 0.1, None)}, H200)
    assert cubins.shipped_kernels([(8192, 6144, 4096)], [fp8fn.BLOCKWISE], BF16) == kernels
    with on_hopper(H200) as launched:
        step((8192, 6144, 4096), "blockwise", bias=False)
    assert not launched.keys() <= set(kernels)


def test_versions_agree() -> None:
    """pip then says where an upgrade of one leaves the other behind."""
    ours, theirs = ((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in (".", "cubins"))
    assert re.findall(r'^version = "(.*?)"', theirs, re.MULTILINE) == [fp8fn.__version__]
    assert re.findall(r'"fp8fn==(.*?)"', theirs) == [fp8fn.__version__]
    assert re.findall(r'"fp8fn-cubins==(.*?)"', ours) == [fp8fn.__version__]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", cited, re.MULTILINE) == [fp8fn.__version__]
    assert (ROOT / "cubins/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution's folder with the kernels of one layer."""
    found = tmp_path_factory.mktemp("cubins") / "cubins"
    made = shutil.ignore_patterns("*.cubin", packaged.MANIFEST, "build", "*.egg-info")
    shutil.copytree(ROOT / "cubins", found, ignore=made)
    write(found / packaged.PACKAGE)
    return found


def write(folder: Path) -> None:
    shape = ["--shapes", "4096,4096,4096"]
    assert cli.main(["aot", *shape, "--recipe", "rowwise", "--out", str(folder)]) == 0


def wheel_of(source: Path) -> Path:
    script = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    (found,) = source.parent.glob("*.whl")
    return found


@needs_nvrtc
def test_the_wheel_has_the_kernels_and_serves_them(
    source: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(source)
    assert wheel.name == f"fp8fn_cubins-{fp8fn.__version__}-py3-none-any.whl"
    assert faults(wheel, fp8fn.__version__) == []
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    use(tmp_path, monkeypatch)
    monkeypatch.setattr(nvrtc, "_compile", None)
    kernels = cubins.shipped_kernels([(4096, 4096, 4096)], [fp8fn.ROWWISE], BF16)
    for wanted in kernels:
        assert nvrtc.compile_kernel(wanted, ARCH).cubin[:4] == b"\x7fELF"
    assert len(list((tmp_path / packaged.PACKAGE).glob("*.cubin"))) == len(kernels)
    packaged.forget()


@needs_nvrtc
def test_what_is_wrong_with_a_wheel(source: Path, tmp_path: Path) -> None:
    wheel = tmp_path / f"fp8fn_cubins-{fp8fn.__version__}-py3-none-any.whl"
    folder = source / packaged.PACKAGE
    first, second, *others = sorted(path.name for path in folder.glob("*.cubin"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*others, packaged.MANIFEST, "__init__.py"):
            archive.write(folder / name, f"fp8fn_cubins/{name}")
        archive.writestr(f"fp8fn_cubins/{second}", b"damaged")
        archive.writestr("fp8fn_cubins/other.cubin", bytes(LARGEST))
    assert [fault.replace(str(wheel.stat().st_size), "N") for fault in faults(wheel, "7")] == [
        f"the wheel lacks {first}",
        "the wheel has other.cubin",
        f"{second} is not the file of the manifest",
        f"the wheel is of {fp8fn.__version__} and its kernels of fp8fn {fp8fn.__version__}; both must be of 7",
        "the wheel has N bytes; at most 10000000 are allowed",
    ]
    with zipfile.ZipFile(wheel, "w"):
        pass
    (fault,) = faults(wheel, "7")
    assert "python -m fp8fn aot --suite llm84 --out cubins/fp8fn_cubins" in fault


@needs_nvrtc
def test_the_data_is_the_same_in_every_process(source: Path, tmp_path: Path) -> None:
    """This process may have the machine code from an earlier run of the tests; the other one compiles."""
    command = ["-m", "fp8fn", "aot", "--shapes", "4096,4096,4096", "--recipe", "rowwise", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    (tmp_path / "__init__.py").write_bytes((source / packaged.PACKAGE / "__init__.py").read_bytes())
    made, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in (tmp_path, source / packaged.PACKAGE)
    )
    assert made == expected
