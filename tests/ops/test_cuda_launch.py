"""From a plan to a running kernel: NVRTC's cache, parameters packed for a stub of the driver, kept calls, the op."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference
from fp8fn.ops.code_cache import cache_dir, read_whole
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import Config
from fp8fn.ops.cuda.quantize.rms_norm import plan_row_rstd
from fp8fn.ops.cuda.runtime import call_cache, driver, graph_capture, launch, nvrtc
from fp8fn.ops.cuda.runtime.call_cache import Call, call_of, geometry, kind
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, Prepared, TensorMap, pointers
from fp8fn.ops.cuda.runtime.nvrtc import CompilationError, Compiled
from fp8fn.ops.kernel import Choice, Named
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.quantization import RMS_NORM
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.tuning import choose
from support.quantizers import quantization

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FORWARD: tuple[Block, Block] = ((1, 128), (128, 128))
WGRAD: tuple[Block, Block] = ((1, 128), (128, 1))

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

# A small one.
_X = quantization(torch.empty(4, 64, dtype=BF16, device="meta"), (1, 128), source=RMS_NORM, eps=1e-6)
ROWS = plan_row_rstd(_X, torch.empty(4, device="meta")).kernel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches NVRTC, which answers with the count of its calls."""
    calls: list[tuple[Any, ...]] = []

    def compile_(*args: Any) -> Compiled:
        calls.append(args)
        return Compiled(b"cubin %d" % len(calls), "log")

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    return calls


def compile_kernel(kernel: nvrtc.CudaKernel, arch: str = SM90.cubin, *, verbose: bool = False) -> Compiled:
    return nvrtc.compile_kernel(kernel, arch, verbose=verbose)


def test_the_second_time_a_kernel_comes_from_the_cache(cache: Path, compiled: list[Any]) -> None:
    first = compile_kernel(ROWS)
    assert first == Compiled(b"cubin 1", "log")
    assert compile_kernel(ROWS) == Compiled(b"cubin 1", "")
    assert len(compiled) == 1
    (file,) = (cache / "cubin").iterdir()
    assert file.name.startswith("row_rstd-")
    assert file.suffix == ".cubin"


def test_verbose_compiles_anew_and_keeps_nothing(cache: Path, compiled: list[Any]) -> None:
    assert compile_kernel(ROWS, verbose=True).log == "log"
    assert compile_kernel(ROWS, verbose=True).cubin == b"cubin 2"
    assert "--ptxas-options=-v" in compiled[0][-1]
    assert not cache.exists()


def test_whatever_changes_the_code_changes_the_key(
    cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel(ROWS)
    for other in (
        replace(ROWS, macros=(*ROWS.macros, ("OUT", "Element::FP16"))),
        replace(ROWS, macros=ROWS.macros[::-1]),
        replace(ROWS, generated="// before"),
        replace(ROWS, entry="sum"),
    ):
        compile_kernel(other)
    compile_kernel(ROWS, "sm_100a")
    text = nvrtc._text
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_text", lambda name: text(name) + ("//" if name.endswith(".cu") else ""))
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_headers", lambda: {"hopper.cuh": "", "convert.cuh": "//"})
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_OPTIONS", ("--std=c++20",))
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: (12, 8))
        compile_kernel(ROWS)
    assert len(compiled) == len(list((cache / "cubin").iterdir())) == 10
    compile_kernel(ROWS)
    assert len(compiled) == 10


def test_macros_and_architecture_are_options(cache: Path, compiled: list[Any]) -> None:
    compile_kernel(replace(ROWS, generated="struct Before {};\n"))
    source, name, headers, options = compiled[0]
    assert source.startswith('struct Before {};\n#line 1 "row_rstd.cu"\n')
    assert name == "row_rstd.cu"
    assert {"row_sum.cuh", "values.cuh"} <= set(headers)
    assert {"--gpu-architecture=sm_90a", "-DINPUT=Element::BF16", "-DROWS=1"} <= set(options)


@pytest.mark.parametrize("damage", [b"", b"cubin 1", b"\x7fELF" + b"\0" * 100])
def test_a_damaged_file_is_compiled_again(damage: bytes, cache: Path, compiled: list[Any]) -> None:
    compile_kernel(ROWS)
    (file,) = (cache / "cubin").iterdir()
    file.write_bytes(damage)
    assert compile_kernel(ROWS) == Compiled(b"cubin 2", "log")
    assert compile_kernel(ROWS) == Compiled(b"cubin 2", "")


def test_a_file_with_a_flipped_or_missing_byte_is_compiled_again(cache: Path, compiled: list[Any]) -> None:
    compile_kernel(ROWS)
    (file,) = (cache / "cubin").iterdir()
    whole = file.read_bytes()
    for i, damaged in enumerate((whole[:-1], b"d" + whole[1:], whole[1:], whole + b"\0")):
        file.write_bytes(damaged)
        assert compile_kernel(ROWS).cubin == b"cubin %d" % (i + 2)


def test_a_cache_that_cannot_be_written_or_read_does_no_harm(
    tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(file))  # mkdir and read both fail
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    folder = tmp_path / "folder"
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(folder))
    compile_kernel(ROWS)
    (kept,) = (folder / "cubin").iterdir()
    kept.unlink()
    kept.mkdir()  # a folder where the file should be
    assert compile_kernel(ROWS).cubin == b"cubin 3"
    assert file.read_bytes() == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache_does_no_harm(cache: Path, compiled: list[Any]) -> None:
    (cache / "cubin").mkdir(parents=True)
    (cache / "cubin").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    assert compile_kernel(ROWS).cubin == b"cubin 2"


def test_a_failing_write_leaves_the_result(cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    assert not list(cache.rglob("*.cubin"))


def test_processes_that_write_at_once_leave_a_whole_file(cache: Path) -> None:
    """Two processes replace one file as fast as they can: each read gives the content of one of them, or none yet."""
    path = cache / "kernel.cubin"
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from fp8fn.ops.code_cache import write
        for i in range(200):
            write(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)
    """)
    writers = [subprocess.Popen([sys.executable, "-c", script, path, letter]) for letter in "ab"]
    contents = {None, *(letter * 100_000 for letter in (b"a", b"b"))}
    seen: set[bytes | None] = set()
    while any(writer.poll() is None for writer in writers):
        content = read_whole(path)
        assert content in contents
        assert content is not None or not seen - {None}
        seen.add(content)
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert read_whole(path) in contents - {None}
    assert [file.name for file in cache.iterdir()] == ["kernel.cubin"]  # no temporary file is left


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("FP8FN_CACHE_DIR", "")
    assert cache_dir() == Path.home() / ".cache" / "fp8fn"
    monkeypatch.delenv("FP8FN_CACHE_DIR")
    assert cache_dir() == Path.home() / ".cache" / "fp8fn"


@needs_nvrtc
def test_what_the_cache_keeps_is_the_machine_code(cache: Path) -> None:
    first = compile_kernel(ROWS)
    assert first.cubin[:4] == b"\x7fELF"
    assert compile_kernel(ROWS) == Compiled(first.cubin, "")


@needs_nvrtc
def test_an_error_of_the_source_is_nvrtcs_log_and_is_not_kept(cache: Path) -> None:
    broken = replace(ROWS, generated="int broken() { return missing; }\n")
    for _ in range(2):
        with pytest.raises(CompilationError) as error:
            compile_kernel(broken)
        assert 'identifier "missing" is undefined' in str(error.value)
        assert "row_rstd.cu" in str(error.value)
        assert "--gpu-architecture=sm_90a" in str(error.value)
    assert not cache.exists()


@needs_nvrtc
def test_an_error_in_the_file_is_at_the_files_own_line(cache: Path) -> None:
    generated = "// one\n// two\n"
    with pytest.raises(CompilationError, match=r"row_rstd\.cu\(\d+\): error") as error:
        compile_kernel(replace(ROWS, macros=(*ROWS.macros, ("rstd", "(")), generated=generated))
    assert f"does not compile row_rstd.cu with {('--std=c++17',)!r}"[:-2] in str(error.value)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """NVRTC is looked for again, in the test and after it."""
    caches: list[Any] = [nvrtc._library, nvrtc.unavailable, nvrtc.version]
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(("cuda_version", "names"), [("12.8", "12"), ("13.0", "13"), (None, "13 or .12")])
def test_unavailable_says_which_library_is_missing_and_what_to_do(
    cuda_version: str | None, names: str, fresh_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    reason = nvrtc.unavailable()
    assert reason is not None
    assert reason.startswith(f"no libnvrtc.so.{names} is here: pip install nvidia-cuda-nvrtc")
    assert f"libnvrtc.so.{(cuda_version or '13').split('.')[0]}" in asked


def test_a_missing_nvrtc_is_looked_for_once(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing() -> Any:
        asked.append("")
        raise OSError("none")

    monkeypatch.setattr(nvrtc, "_library", missing)
    try:
        assert [nvrtc.unavailable() for _ in range(3)] == ["none"] * 3
    finally:
        monkeypatch.undo()
    assert len(asked) == 1


@needs_nvrtc
def test_nvrtc_of_the_nvidia_package_is_found_where_the_loader_has_none(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packaged library's builtins are loaded before it; the working folder is not searched for them."""
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    packaged = tmp_path / "nvidia" / "cu13" / "lib"
    packaged.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (packaged / name).touch()
    monkeypatch.setattr(nvrtc, "_packaged", lambda major: [str(packaged / f"libnvrtc.so.{major}")])
    loaded = []

    def load(name: str) -> str:
        if os.sep not in name and "builtins" not in name:
            raise OSError(name)
        loaded.append(name)
        return name

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert nvrtc._library() == str(packaged / "libnvrtc.so.13")  # type: ignore[comparison-overlap]
    assert loaded == [str(packaged / "libnvrtc-builtins.so.13.0"), str(packaged / "libnvrtc.so.13")]


@dataclass
class Launched:
    """What one cuLaunchKernel saw."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    parameters: list[int]
    """Where each parameter lies."""
    words: list[int]
    """The first 8 bytes of each: of a descriptor, the address that it was given."""


@dataclass
class StubDriver:
    """libcuda without a GPU: a descriptor's first 8 bytes are its address. `fail`: calls and their status."""

    fail: dict[str, int] = field(default_factory=dict)
    encoded: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    pause: float | None = None

    def _enter(self, name: str) -> int:
        self.calls.append(name)
        if self.pause is not None:
            time.sleep(self.pause)
        return self.fail.get(name, 0)

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"a reason"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 7000 + device
        return self._enter("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.fail.pop("cuLaunchKernel", None) if self.fail.get("cuLaunchKernel") == driver.INVALID_CONTEXT else None
        return self._enter("cuCtxSetCurrent")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value = 2 - mode._obj.value
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        module._obj.value = 1000
        return self._enter("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 2000 + len(self.calls)
        return self._enter("cuModuleGetFunction")

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return self._enter("cuFuncSetAttribute")

    def cuTensorMapEncodeTiled(
        self, into: Any, type_: int, rank: int, address: Any, shape: Any, strides: Any, box: Any, steps: Any, *rest: int
    ) -> int:
        ctypes.c_uint64.from_address(into.value).value = address.value or 0
        self.encoded.append(
            {
                "into": into.value, "type": type_, "rank": rank, "address": address.value or 0, "shape": list(shape),
                "strides": list(strides)[: rank - 1], "box": list(box), "steps": list(steps), "rest": rest,
            }
        )  # fmt: skip
        return self._enter("cuTensorMapEncodeTiled")

    def cuTensorMapReplaceAddress(self, map_: Any, address: Any) -> int:
        if status := self._enter("cuTensorMapReplaceAddress"):
            return status
        self.replaced.append((map_.value, address.value))
        ctypes.c_uint64.from_address(map_.value).value = address.value
        return 0

    def cuLaunchKernel(self, function: Any, *args: Any) -> int:
        *shape, shared, stream, parameters, extra = args
        assert extra is None
        if status := self._enter("cuLaunchKernel"):
            return status
        addresses = [address or 0 for address in parameters]
        words = [ctypes.c_uint64.from_address(address).value for address in addresses]
        self.launched.append(
            Launched(function.value, tuple(shape[:3]), tuple(shape[3:]), shared, stream.value or 0, addresses, words)
        )
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        launch = config._obj
        assert (launch.count, launch.attributes[0].id, launch.attributes[0].value) == (1, 6, 1)
        stream = ctypes.c_void_p(launch.stream)
        return self.cuLaunchKernel(function, *launch.grid, *launch.block, launch.shared, stream, parameters, extra)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """Launches of tensors on the CPU go to a stub of the driver."""
    found = StubDriver()
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(launch, "compile_kernel", lambda kernel, arch: Compiled(b"cubin", ""))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(graph_capture, "capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of the CPU
    launch.function_of.cache_clear()
    yield found
    launch.function_of.cache_clear()


class Operands:
    """Unwritten operands of a product on the CPU."""

    def __init__(
        self, shape: tuple[int, int, int] = (270, 136, 300), blocks: tuple[Block, Block] = WGRAD, *,
        bias: torch.dtype | None = None, batch: int | None = None, out: torch.dtype = BF16,
    ) -> None:  # fmt: skip
        m, n, k = shape
        lead = () if batch is None else (batch,)
        self.blocks, of_a, of_b = blocks, torch.empty(*lead, m, k), torch.empty(*lead, k, n)
        self.a, self.b = empty_data(of_a, blocks[0], E4M3, False), empty_data(of_b, blocks[1], E4M3, True)
        self.a_scale = empty_scale(of_a, blocks[0], "fp32", False)
        self.b_scale = empty_scale(of_b, blocks[1], "fp32", True)
        self.bias = None if bias is None else torch.empty(n, dtype=bias)
        self.out = torch.empty(*lead, m, n, dtype=out)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.a, self.a_scale, self.b, self.b_scale, self.bias

    def plan(self, config: Config | None = None) -> CudaLaunch:
        return cuda.plan(self.product, config or Config())[0]

    @property
    def product(self) -> ScaledProduct:
        a, b = Quantized(self.a, self.a_scale, self.blocks[0]), Quantized(self.b, self.b_scale, self.blocks[1])
        return ScaledProduct(a=a, b=b, bias=self.bias, out=self.out, target=SM90)

    def call(self, plan: CudaLaunch) -> Call:
        return call_of([plan], ("a", "a_scale", "b", "b_scale", "bias"), self.product.outputs)


def int32s(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def test_descriptors_are_encoded_innermost_axis_first(stub: StubDriver) -> None:
    operands = Operands()
    plan = operands.plan()
    plan.prepare()
    a, b, out, a_scale, b_scale = stub.encoded
    assert (a["type"], a["rank"], a["address"]) == (0, 3, operands.a.data_ptr())
    assert (a["shape"], a["strides"]) == ([300, 270, 1], [304, 304 * 270])
    assert (a["box"], a["steps"]) == ([128, 128, 1], [1, 1, 1])
    assert a["rest"] == (0, 3, 3, 0)  # no interleave, swizzle of 128 bytes, 256 bytes of L2, zeros outside
    assert (b["shape"], b["address"]) == ([300, 136, 1], operands.b.data_ptr())
    assert (out["type"], out["shape"], out["strides"]) == (9, [136, 270, 1], [272, 272 * 270])
    assert (out["box"], out["rest"]) == ([64, 64, 1], (0, 3, 3, 0))
    assert (a_scale["type"], a_scale["shape"], a_scale["strides"]) == (7, [270, 3, 1], [1088, 3264])
    assert (a_scale["box"], a_scale["rest"]) == ([128, 1, 1], (0, 0, 3, 0))
    assert (b_scale["shape"], b_scale["box"]) == ([136, 3, 1], [128, 1, 1])


def test_descriptors_lie_at_multiples_of_64_and_parameters_do_not_overlap(stub: StubDriver) -> None:
    for operands in (Operands(), Operands(blocks=FORWARD, bias=BF16, out=FP32), Operands(batch=3, bias=FP32)):
        plan = operands.plan()
        plan.prepare().launch(pointers(plan.args))
        addresses = stub.launched[-1].parameters
        assert len(addresses) == len(plan.args)
        sizes = [driver.MAP_BYTES if isinstance(arg, TensorMap) else driver.MAP_ALIGNMENT for arg in plan.args.values()]
        for address, size, following in zip(addresses, sizes, [*addresses[1:], None], strict=True):
            assert address % 64 == 0
            assert following is None or address + size <= following
    assert {map_["into"] % 64 for map_ in stub.encoded} == {0}


def test_scalars_and_the_problem_are_in_place(stub: StubDriver) -> None:
    operands = Operands((70, 131, 300), FORWARD, bias=FP16, batch=3, out=FP32)
    plan = operands.plan()
    plan.prepare().launch(pointers(plan.args))
    at = dict(zip(plan.args, stub.launched[0].parameters, strict=True))
    words = dict(zip(plan.args, stub.launched[0].words, strict=True))
    assert int32s(at["problem"], 4) == [70, 131, 300, 3]
    assert [int32s(at[name], 1) for name in ("a_batched", "b_batched", "out_m")] == [[1], [1], [131]]
    assert int32s(at["as_batch"], 1) == [operands.a_scale.stride(0)]
    assert [int32s(at[name], 1)[0] for name in ("bs_batch", "bs_n", "bs_k")] == [
        operands.b_scale.stride(i) for i in (0, 2, 1)
    ]
    assert (words["bias"], words["out"]) == (operands.bias.data_ptr(), operands.out.data_ptr())  # type: ignore[union-attr]
    assert words["b_scale"] == operands.b_scale.data_ptr()


def test_a_float_is_packed_as_float32_and_none_as_a_null_pointer(stub: StubDriver) -> None:
    x = torch.empty(4)
    args: dict[str, launch.Argument] = {"x": x, "none": None, "half": 0.5, "negative": -3}
    plan = CudaLaunch(ROWS, (1, 2, 3), 256, 0, args, target=SM90)
    assert pointers(plan.args) == [x.data_ptr(), 0]
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert seen.words[:2] == [x.data_ptr(), 0]
    assert ctypes.c_float.from_address(seen.parameters[2]).value == 0.5
    assert int32s(seen.parameters[3], 1) == [-3]
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((1, 2, 3), (256, 1, 1), 0, 77)


def test_shape_shared_memory_and_stream_reach_the_driver(stub: StubDriver) -> None:
    plan = Operands((300, 300, 300)).plan(Config(MATH=3, DEPTH=1))
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert (seen.grid, seen.block) == ((6, 1, 1), (512, 1, 1))
    assert (seen.shared, seen.stream) == (plan.shared, 77)
    assert stub.attributes == [(8, plan.shared), (14, 1)]  # with clusters of more than 8 blocks


def test_a_launch_that_overlaps_reaches_the_driver_with_the_attribute(stub: StubDriver) -> None:
    plan = CudaLaunch(ROWS, (4, 5, 6), 256, 512, {"x": torch.empty(3)}, target=SM90, overlaps=True)
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert (seen.grid, seen.block, seen.shared) == ((4, 5, 6), (256, 1, 1), 512)
    assert seen.words == pointers(plan.args)


def test_only_addresses_that_changed_are_replaced(stub: StubDriver) -> None:
    plan = Operands().plan()
    ready, addresses = plan.prepare(), pointers(plan.args)
    ready.launch(list(addresses))
    stub.replaced.clear()
    ready.launch(list(addresses))
    assert stub.replaced == []
    maps = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    for name in ("b", "out"):
        place = maps.index(name)
        addresses[place] += 1 << 20
        ready.launch(list(addresses))
        assert [address for _, address in stub.replaced] == [addresses[place]]
        stub.replaced.clear()
    assert len(stub.launched) == 4


@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1))], ids=str)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_each_launch_sees_its_own_addresses(blocks: tuple[Block, Block], out: torch.dtype, stub: StubDriver) -> None:
    """Descriptors and plain pointers alike, also back to addresses that were there before."""
    plan = Operands(blocks=blocks, bias=BF16, out=out).plan()
    ready = plan.prepare()
    names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    for base in (1 << 20, 1 << 30, 1 << 20, 1 << 40):
        addresses = [base + 256 * i for i in range(len(names))]
        ready.launch(list(addresses))
        words = dict(zip(plan.args, stub.launched[-1].words, strict=True))
        assert [words[name] for name in names] == addresses


def test_an_address_that_the_driver_refuses_does_not_stick(stub: StubDriver) -> None:
    """After a failed replacement, some descriptors are new and some old: the next launch writes all of them."""
    plan = Operands().plan()
    ready, addresses = plan.prepare(), pointers(plan.args)
    ready.launch(list(addresses))
    replace_address, count = stub.cuTensorMapReplaceAddress, iter(range(100))

    def third_fails(map_: Any, address: Any) -> int:
        return 1 if next(count) == 2 else replace_address(map_, address)

    stub.cuTensorMapReplaceAddress = third_fails  # type: ignore[method-assign]
    with pytest.raises(driver.DriverError, match="TMA descriptor: a reason"):
        ready.launch([address + 4096 for address in addresses])
    ready.launch(list(addresses))
    seen = stub.launched[-1].words[: len(addresses)]
    assert [
        word for word, arg in zip(seen, plan.args.values(), strict=False) if isinstance(arg, TensorMap)
    ] == addresses[: sum(isinstance(arg, TensorMap) for arg in plan.args.values())]


def test_threads_that_share_a_launch_each_see_their_own_addresses(stub: StubDriver) -> None:
    plan = Operands(bias=BF16).plan()
    ready = plan.prepare()
    names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    stub.pause = 0.0002  # other threads run inside each call of the driver
    barrier, wrong = threading.Barrier(8), []

    def work(thread: int) -> None:
        barrier.wait()
        for i in range(10):
            try:
                ready.launch([(thread + 1) * 2**32 + i * 2**16 + 256 * place for place in range(len(names))])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(stub.launched) == 80
    bases = set()
    for seen in stub.launched:
        words = dict(zip(plan.args, seen.words, strict=True))
        base = words[names[0]]
        assert [words[name] for name in names] == [base + 256 * place for place in range(len(names))]
        bases.add(base)
    assert len(bases) == 80


def test_a_thread_without_a_context_gets_the_devices(stub: StubDriver) -> None:
    """A new thread, such as one of autograd's, may launch before any call of CUDA's runtime was made in it."""
    plan = Operands().plan()
    ready = plan.prepare()
    stub.calls.clear()
    stub.fail["cuLaunchKernel"] = driver.INVALID_CONTEXT
    ready.launch(pointers(plan.args))
    assert stub.calls[-4:] == ["cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"]
    assert len(stub.launched) == 1
    stub.calls.clear()
    ready.launch(pointers(plan.args))
    assert stub.calls == ["cuLaunchKernel"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cuModuleLoadData", "loading scaled_mm: a reason (1)"),
        ("cuModuleGetFunction", "finding scaled_mm: a reason (1)"),
        ("cuFuncSetAttribute", " bytes for scaled_mm: a reason (1)"),
        (
            "cuTensorMapEncodeTiled",
            "TMA descriptor of shape (300, 270, 1), strides (304, 82080), box (128, 128, 1) (torch.float8_e4m3fn): "
            "a reason (1)",
        ),
        ("cuTensorMapReplaceAddress", "TMA descriptor: a reason (1)"),
        ("cuLaunchKernel", "launch: a reason (1)"),
        ("cuDevicePrimaryCtxRetain", "context of device 0: a reason (1)"),
    ],
)
def test_an_error_of_the_driver_says_what_failed(call: str, message: str, stub: StubDriver) -> None:
    stub.fail[call] = 1
    plan = Operands().plan()
    with pytest.raises(driver.DriverError) as error:
        plan.prepare().launch(pointers(plan.args))
    assert message in str(error.value)


def test_a_kernel_is_loaded_once_for_all_launches_of_it(stub: StubDriver) -> None:
    for _ in range(3):
        Operands().plan().prepare()
    Operands((700, 1360, 300)).plan().prepare()  # other sizes, the same code
    assert stub.calls.count("cuModuleLoadData") == 1
    Operands(blocks=FORWARD).plan().prepare()
    assert stub.calls.count("cuModuleLoadData") == 2


def test_description_is_one_line_with_what_was_chosen_and_why() -> None:
    plan = CudaLaunch(ROWS, (4, 1, 1), 256, 0, {}, {"BM": 64}, target=SM90, reason="by the model")
    assert plan.describe() == "row_rstd[BM=64] grid=4x1x1 sm90 (by the model)"
    assert (plan.name, "\n" in plan.describe()) == ("row_rstd", False)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    """An empty store of kept calls."""
    store: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(call_cache, "_kept", store)
    return store


def test_what_was_used_longest_ago_is_dropped(kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "LIMIT", 3)
    for key in "abc":
        assert call_cache.keep(key, key.upper()) == key.upper()
    assert call_cache.recall("a") == "A"
    call_cache.keep("d", "D")
    assert list(kept) == ["c", "a", "d"]
    assert call_cache.recall("b") is None
    for i in range(100):
        call_cache.keep(i, i)
    assert len(kept) == 3


def test_the_first_of_two_that_are_kept_under_one_key_stays(kept: OrderedDict[Any, Any]) -> None:
    assert call_cache.keep("key", "first") == "first"
    assert call_cache.keep("key", "second") == "first"


def test_threads_that_keep_at_once_keep_no_more_than_the_limit(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "LIMIT", 16)
    wrong = []

    def work(thread: int) -> None:
        for i in range(500):
            key = (thread * i) % 40
            if call_cache.keep(key, key) != key or call_cache.recall(key) not in (key, None):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) <= 16


def test_a_kind_is_all_that_a_plan_reads() -> None:
    x = torch.empty(64, 48, dtype=torch.uint8)
    memory = torch.empty(64 * 48 + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    aligned, off = (memory[start + by :].as_strided((64, 48), (48, 1)) for by in (16, 17))
    assert kind(x) == kind(torch.empty(64, 48, dtype=torch.uint8)) == kind(aligned)
    for other in (
        x[:63], x.mT, x.view(torch.int8), off, x[None], torch.empty(64, 64, dtype=torch.uint8)[:, :48],
        x.view(torch.float8_e4m3fn), torch.empty(64, 48, dtype=torch.uint8, device="meta"),
    ):  # fmt: skip
        if other.device.type == "meta":
            continue  # its index is that of the CPU
        assert kind(other) != kind(x)
    assert hash(kind(x)) == hash(kind(aligned))


def names_of_pointers(plan: CudaLaunch) -> list[str]:
    return [name for name, arg in plan.args.items() if not isinstance(arg, (int, float, tuple))]


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("bias", [None, FP16], ids=str)
@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1))], ids=str)
def test_a_call_puts_each_tensor_in_its_place(
    blocks: tuple[Block, Block], bias: torch.dtype | None, batch: int | None, stub: StubDriver
) -> None:
    planned, other = (Operands(blocks=blocks, bias=bias, batch=batch) for _ in range(2))
    plan = planned.plan(Config())
    call = planned.call(plan)
    assert call.made[0] == geometry(planned.out)
    assert len(call.made) == 1
    outs = call(*other.inputs)
    assert len(outs) == 1
    assert geometry(outs[0]) == geometry(planned.out)
    tensors = dict(zip(("a", "a_scale", "b", "b_scale", "bias"), other.inputs, strict=False))
    seen = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    seen["out"] = outs[0].data_ptr()
    assert len(stub.launched) == len(call.steps) == 1
    words = dict(zip(plan.args, stub.launched[0].words, strict=True))
    for name in names_of_pointers(plan):
        assert words[name] == (0 if plan.args[name] is None else seen[name]), name


def test_a_call_allocates_anew_each_time(stub: StubDriver) -> None:
    operands = Operands()
    call = operands.call(operands.plan(Config()))
    first, second = call(*operands.inputs)[0], call(*operands.inputs)[0]
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() != operands.out.data_ptr()


def test_a_call_on_another_device_than_the_current_one_changes_to_it(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    def enter(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    operands = Operands()
    call = operands.call(operands.plan())
    monkeypatch.setattr(torch.cuda, "device", enter)
    call(*operands.inputs)
    assert entered == []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    call(*operands.inputs)
    assert entered == [operands.a.device]


def test_a_launch_runs_on_the_device_of_its_tensors(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        inside.append(device)
        before = len(stub.launched)
        yield
        launched_on.extend([device] * (len(stub.launched) - before))
        inside.pop()

    launched_on: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", enter)
    operands = Operands()
    operands.plan().run()
    assert launched_on == [operands.a.device]
    assert inside == []


Forced = Callable[[Config], None]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch, kept: OrderedDict[Any, Any], hopper: Target) -> Forced:
    """`forced(config)`: the op takes the CUDA kernel in this configuration, whatever the tables say."""

    def force(config: Config) -> None:
        kept.clear()
        monkeypatch.setattr(choose, "named", lambda product: Named("cuda", "a test", lambda _: config))

    return force


CONFIGS = {
    "192x128": Config(MATH=3, DEPTH=1), "128x256": Config(BN=256, SLICES_N=2, DEPTH=1), "128x128": Config(),
    "split": Config(SPLIT=4),
}  # fmt: skip
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Product:
    """Quantized operands on the GPU, and the op on them."""

    def __init__(
        self, m: int = 200, n: int = 264, k: int = 520, blocks: tuple[Block, Block] = FORWARD, *,
        bias: torch.dtype | None = None, batch: int | None = None, device: str = "cuda",
    ) -> None:  # fmt: skip
        lead = () if batch is None else (batch,)
        x, w = torch.randn(*lead, m, k, device=device), torch.randn(*lead, n, k, device=device)
        self.blocks = blocks
        self.a, self.a_scale = torch.ops.fp8fn.quantize(x, blocks[0])
        self.b, self.b_scale = torch.ops.fp8fn.quantize(w.mT, blocks[1])
        self.bias = None if bias is None else torch.randn(n, device=device).to(bias)

    def __call__(self, out_dtype: torch.dtype | None = None) -> Tensor:
        return torch.ops.fp8fn.scaled_mm(  # type: ignore[no-any-return]
            self.a, self.a_scale, self.blocks[0], self.b, self.b_scale, self.blocks[1], self.bias, out_dtype
        )

    def expected(self) -> Tensor:
        a = reference.dequantize(self.a, self.a_scale, self.blocks[0]).double()
        b = reference.dequantize(self.b, self.b_scale, self.blocks[1]).double()
        out = a @ b
        return out if self.bias is None else out + self.bias.double()

    def assert_right(self, found: Tensor) -> None:
        expected = self.expected()
        assert found.shape == expected.shape
        noise = (found.double() - expected).square().sum()
        assert 10 * torch.log10(expected.square().sum() / noise) >= (50 if found.dtype == FP32 else 45)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1)), ((-1, -1), (-1, -1))], ids=str)
def test_the_op_takes_the_kernel_in_cuda(
    blocks: tuple[Block, Block], hopper: Target, kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """At ragged sizes, which the library does not take; the line of the log says so too."""
    planned = []
    plan = Choice.plan

    def recorded(choice: Choice, operands: Any) -> Any:
        planned.extend(launches := plan(choice, operands))
        return launches

    monkeypatch.setattr(Choice, "plan", recorded)
    caplog.set_level(logging.DEBUG, "fp8fn")
    for shape in ((200, 264, 521), (1, 7, 130), (2000, 999, 385)):
        product = Product(*shape, blocks)
        caplog.clear()
        product.assert_right(product())
        product.assert_right(product(FP32))
        assert "scaled_mm[BM=" in caplog.text
        assert "sm90" in caplog.text
    assert len(planned) == 6
    assert all(isinstance(launch, CudaLaunch) for launch in planned)
    product.assert_right(product())
    assert len(planned) == 6  # the second time it was kept


@pytest.mark.gpu
@each_config
@pytest.mark.parametrize("bias", [None, BF16, FP32], ids=str)
def test_a_kept_call_gives_the_same_bits_and_takes_other_addresses(
    bias: torch.dtype | None, config: Config, forced: Forced, kept: OrderedDict[Any, Any]
) -> None:
    forced(config)
    products = [Product(bias=bias) for _ in range(4)]
    outs = [product() for product in products]
    assert sum(isinstance(call, Call) and key[0] == "scaled_mm" for key, call in kept.items()) == 1
    for product, out in zip(products, outs, strict=True):
        product.assert_right(out)
    for product, out in zip(reversed(products), reversed(outs), strict=True):
        again = product()
        assert torch.equal(again.view(torch.int16), out.view(torch.int16))
        assert again.data_ptr() != out.data_ptr()


@pytest.mark.gpu
def test_other_strides_types_or_alignment_make_another_plan(forced: Forced, kept: OrderedDict[Any, Any]) -> None:
    forced(Config())

    def calls() -> int:
        return sum(key[0] == "scaled_mm" for key in kept)

    product = Product()
    product.assert_right(product())
    assert calls() == 1
    product.assert_right(product(FP32))
    product.assert_right(product(FP16))
    assert calls() == 3
    product.bias = torch.randn(264, device="cuda")
    product.assert_right(product())
    assert calls() == 4
    product.bias = None
    wide = torch.empty(200, 1024, dtype=torch.uint8, device="cuda")
    wide[:, 16:536] = product.a.view(torch.uint8)
    product.a = wide[:, 16:536].view(E4M3)
    product.assert_right(product())
    assert calls() == 5
    shorter = Product(199)
    shorter.assert_right(shorter())
    assert calls() == 6


@pytest.mark.gpu
def test_operands_that_tma_cannot_address_are_right_too(hopper: Target) -> None:
    """Row-major b, column-major a, unaligned views, every second column, expanded and strided scales."""
    rowwise: tuple[Block, Block] = ((1, -1), (-1, 1))
    for blocks in (FORWARD, rowwise):
        product = Product(blocks=blocks)
        whole_a, whole_b = product.a.view(torch.uint8), product.b.view(torch.uint8)
        product.b = whole_b.contiguous().view(E4M3)
        product.assert_right(product())
        product.a = whole_a.mT.contiguous().mT.view(E4M3)
        product.assert_right(product())
        memory = torch.empty(200, 1100, dtype=torch.uint8, device="cuda")
        memory[:, 3:523] = whole_a
        product.a = memory[:, 3:523].view(E4M3)
        product.assert_right(product())
        memory[:, :1040:2] = whole_a
        product.a = memory[:, :1040:2].view(E4M3)
        product.assert_right(product())
    product = Product(blocks=rowwise)
    product.a_scale = product.a_scale[:1].expand(200, 1)
    product.assert_right(product())
    product.b_scale = product.b_scale.repeat_interleave(2, -1)[:, ::2]
    product.assert_right(product())
    product = Product(200, 264, 129)
    product.a = product.a.view(torch.uint8).contiguous().view(E4M3)  # rows of 129 bytes
    product.assert_right(product())


@pytest.mark.gpu
@each_config
def test_one_row_column_and_matrix(config: Config, forced: Forced) -> None:
    """Axes of size 1 have strides that no descriptor takes."""
    forced(config)
    for shape in ((1, 7, 129), (1, 1, 1), (5, 1, 17)):
        for batch in (None, 1, 3):
            for blocks in (FORWARD, WGRAD, ((1, -1), (-1, 1))):
                product = Product(*shape, blocks, batch=batch)
                expected = product.expected()
                for dtype in (FP32, BF16):
                    assert ((product(dtype).double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-8).all()
    contiguous = Product(1, 16, 129, ((1, -1), (-1, 1)), batch=1)
    contiguous.a = contiguous.a.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(E4M3)
    assert contiguous.a.stride() == (129, 129, 1)
    contiguous.assert_right(contiguous(FP32))


@pytest.mark.gpu
@each_config
def test_two_streams(config: Config, forced: Forced) -> None:
    """Launches of one kept call on two streams at once are those of one after the other."""
    forced(config)
    products = [Product(1000, 2000, 1024, bias=BF16) for _ in range(2)]
    expected = [product() for product in products]
    streams = [torch.cuda.Stream() for _ in products]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for product, stream, outs in zip(products, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(product())
    torch.cuda.synchronize()
    for outs, want in zip(found, expected, strict=True):
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
@each_config
def test_threads(config: Config, forced: Forced) -> None:
    """New threads, in which CUDA has no context yet, each on a stream of its own, through one kept call."""
    forced(config)
    products = [Product(300, 520, 768, bias=FP32) for _ in range(6)]
    expected = [product() for product in products]
    torch.cuda.synchronize()
    found: list[Any] = [None] * len(products)
    barrier = threading.Barrier(len(products))

    def work(i: int, stream: torch.cuda.Stream | None) -> None:
        barrier.wait()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                found[i] = [products[i]() for _ in range(20)]
        except Exception as error:
            found[i] = error

    # Half of them make no call of CUDA before the product's own.
    streams = [None if i % 2 else torch.cuda.Stream() for i in range(len(products))]
    threads = [threading.Thread(target=work, args=(i, stream)) for i, stream in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for outs, want in zip(found, expected, strict=True):
        assert isinstance(outs, list), outs
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
@each_config
def test_a_captured_graph_replays_on_new_values(config: Config, forced: Forced) -> None:
    forced(config)
    product, other = Product(300, 520, 777, bias=BF16), Product(300, 520, 777, bias=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
        twice = product(FP32)
    want, want_wide = other(), other(FP32)
    for name in ("a", "a_scale", "b", "b_scale", "bias"):
        into, of = getattr(product, name), getattr(other, name)
        bits = torch.uint8 if into.element_size() == 1 else into.dtype
        into.view(bits).copy_(of.view(bits))
    product()  # a launch between that has other addresses does not change the graph's
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)
        assert torch.equal(twice, want_wide)


@pytest.mark.gpu
@each_config
def test_a_thousand_calls_give_one_bit_pattern(config: Config, forced: Forced) -> None:
    forced(config)
    product = Product(333, 777, 1111, bias=BF16)
    first = product()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (product().view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_compiled_is_eager(forced: Forced, fresh_dynamo: None) -> None:
    forced(CONFIGS["192x128"])
    product = Product(200, 264, 520, bias=BF16)

    def step(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
        out = torch.ops.fp8fn.scaled_mm(a, a_scale, FORWARD[0], b, b_scale, FORWARD[1], bias, BF16)
        return torch.nn.functional.relu(out) * 2

    args = (product.a, product.a_scale, product.b, product.b_scale, product.bias)
    for dynamic in (False, True):
        torch._dynamo.reset()
        found = torch.compile(step, dynamic=dynamic, fullgraph=True)(*args)  # type: ignore[arg-type]
        assert torch.equal(found, step(*args))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_backward_runs_in_autograds_thread(forced: Forced) -> None:
    """The products of a backward are launched by a thread of autograd."""
    import fp8fn

    forced(CONFIGS["192x128"])
    x = torch.randn(200, 520, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(264, 520, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(200, 264, device="cuda", dtype=BF16)
    first = torch.autograd.grad(fp8fn.linear(x, w), (x, w), grad)
    second = torch.autograd.grad(fp8fn.linear(x, w), (x, w), grad)
    for found, again, expected in zip(first, second, (grad @ w, grad.mT @ x), strict=True):
        assert torch.equal(found, again)
        assert (found.float() - expected.float()).norm() < 0.06 * expected.float().norm()


@pytest.mark.gpu
def test_a_device_that_is_not_the_current_one(hopper: Target, kept: OrderedDict[Any, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    products = [Product(200, 264, 521, device=f"cuda:{i}") for i in range(2)]
    for current in (0, 1):
        with torch.cuda.device(current):
            for _ in range(2):
                for i, product in enumerate(products):
                    found = product()
                    assert found.device.index == i
                    product.assert_right(found)
            assert torch.cuda.current_device() == current


@pytest.mark.gpu
def test_an_error_of_the_real_driver_has_its_text(hopper: Target) -> None:
    with pytest.raises(driver.DriverError, match=r"loading nothing: .+ \(\d+\)"):
        driver.load_function(b"\x7fELF no cubin" + b"\0" * 200, "nothing", 0, torch.cuda.current_device())
    product = Product()
    unaligned = TensorMap(product.a.as_strided((1, 200, 520), (200 * 521, 521, 1)), (1, 128, 128), 128)
    launch_ = CudaLaunch(ROWS, (1, 1, 1), 256, 0, {"a": unaligned}, target=hopper)
    with pytest.raises(driver.DriverError, match=r"TMA descriptor of shape \(520, 200, 1\), strides \(521, .* \(1\)"):
        Prepared(launch_)
