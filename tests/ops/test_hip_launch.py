"""From a plan to a running HIP kernel: compilers, the cache, code objects, launches that a stub of the runtime sees."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.hip import build, code_object, launch, runtime
from fp8fn.ops.hip.build import CompilationError, Compiler, HipKernel, NoCompiler, compile_kernel
from fp8fn.ops.hip.code_object import Parameter, metadata
from fp8fn.ops.hip.launch import HipLaunch, Wide, check_parameters
from fp8fn.ops.launch import Resources
from fp8fn.ops.targets import GFX942, GFX950
from fp8fn.ops.torch_private import core
from support.compilers import needs_hip_compiler

SOURCE = """
#include "wave.h"
extern "C" __attribute__((global, amdgpu_flat_work_group_size(128, 128)))
void fill(const char* a, float* out, int count, long long step, float value, const char* bias, int last) {
    __attribute__((shared)) static float kept[64];
    const int i = __builtin_amdgcn_workgroup_id_x() * 128 + __builtin_amdgcn_workitem_id_x();
    kept[i % 64] = bias ? bias[i] : a[i];
    __builtin_amdgcn_s_barrier();
    if (i < count) out[i * step] = kept[63 - i % 64] * value * FACTOR + last;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kernel(tmp_path: Path, cache: Path) -> HipKernel:
    """A kernel of a file of its own, beside the library's headers."""
    (tmp_path / "fill.hip").write_text(SOURCE.replace('"wave.h"', f'"{build._FOLDER / "wave.h"}"'))
    return HipKernel(str(tmp_path / "fill.hip"), "fill", "gfx950", (("FACTOR", 2),))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The kernel's code object."""
    source = tmp_path_factory.mktemp("source") / "fill.hip"
    source.write_text(SOURCE.replace('#include "wave.h"', ""))
    return build._compile(HipKernel(str(source), "fill", "gfx950", (("FACTOR", 2),)), build._compilers()[0])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HipKernel, Compiler]]:
    """The calls that reach a compiler, which answers with their count."""
    calls: list[tuple[HipKernel, Compiler]] = []

    def compile_(kernel: HipKernel, compiler: Compiler) -> bytes:
        calls.append((kernel, compiler))
        return b"code %d" % len(calls)

    monkeypatch.setattr(build, "_compile", compile_)
    monkeypatch.setattr(build, "_compilers", lambda: (Compiler(("clang",), ("lld",)),))
    monkeypatch.setattr(build, "unavailable", lambda: None)
    return calls


def test_the_second_time_a_kernel_comes_from_the_cache(kernel: HipKernel, cache: Path, compiled: list[Any]) -> None:
    assert [compile_kernel(kernel) for _ in range(3)] == [b"code 1"] * 3
    assert len(compiled) == 1
    (file,) = (cache / "hip").iterdir()
    assert build.cache_path(kernel) == file
    assert re.fullmatch(r"fill-gfx950-[0-9a-f]{32}\.hsaco", file.name)


def test_whatever_changes_the_code_changes_the_key_and_the_compiler_does_not(
    kernel: HipKernel, cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel(kernel)
    for other in (
        replace(kernel, macros=(("FACTOR", 3),)), replace(kernel, macros=()), replace(kernel, arch="gfx942"),
        replace(kernel, entry="other"),
    ):  # fmt: skip
        compile_kernel(other)
    text = build._text
    for name, value in (
        ("_text", lambda name: text(name) + "//"), ("_headers", lambda: {"wave.h": "//"}), ("_OPTIONS", ("-O2",)),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            compile_kernel(kernel)
    assert len(compiled) == len(list((cache / "hip").iterdir())) == 8
    monkeypatch.setattr(build, "_compilers", lambda: (Compiler(("another",), ("another",)),))
    compile_kernel(kernel)
    assert len(compiled) == 8


@pytest.mark.parametrize("damage", [b"", b"code 1", b"\x7fELF" + b"\0" * 100])
def test_a_damaged_file_is_compiled_again(damage: bytes, kernel: HipKernel, cache: Path, compiled: list[Any]) -> None:
    compile_kernel(kernel)
    (file,) = (cache / "hip").iterdir()
    file.write_bytes(damage)
    assert [compile_kernel(kernel) for _ in range(2)] == [b"code 2"] * 2


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, kernel: HipKernel, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "file"))
    assert [compile_kernel(kernel) for _ in range(2)] == [b"code 1", b"code 2"]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without ROCm and without ziglang."""
    build.unavailable.cache_clear()
    monkeypatch.setattr(build, "_compilers", tuple)
    yield
    build.unavailable.cache_clear()


def test_without_a_compiler_the_cache_serves_and_the_rest_says_what_to_do(kernel: HipKernel, no_compiler: None) -> None:
    build.write(build.cache_path(kernel), b"code from elsewhere")
    assert compile_kernel(kernel) == b"code from elsewhere"
    with pytest.raises(NoCompiler, match="no compiler for HIP is here: set ROCM_PATH") as raised:
        compile_kernel(replace(kernel, macros=()))
    for word in ("fill.hip is not in the cache", "pip install 'fp8fn[hip-compile]'", "fp8fn aot --arch gfx950"):
        assert word in str(raised.value)


def test_a_missing_compiler_is_looked_for_once(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(build, "_compilers", lambda: asked.append(""))
    assert len({build.unavailable() for _ in range(3)}) == len(asked) == 1


def executable(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)
    return path


def test_rocm_comes_before_ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation of a variable, then that of `hipcc`; one without a clang is none."""
    (tmp_path / "empty").mkdir()
    for root, folder in (("one", "lib/llvm/bin"), ("two", "llvm/bin")):
        for name in ("clang", "ld.lld"):
            executable(tmp_path / root / folder / name)
    hipcc = executable(tmp_path / "two" / "bin" / "hipcc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hipcc").symlink_to(hipcc)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "one"))
    monkeypatch.setenv("HIP_PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = list(build._of_rocm())[:2]
    for compiler, folder in zip(found, ("one/lib/llvm/bin", "two/llvm/bin"), strict=True):
        assert compiler == Compiler((str(tmp_path / folder / "clang"),), (str(tmp_path / folder / "ld.lld"),))
    zig = Compiler(("zig", "clang"), ("zig", "ld.lld"))
    monkeypatch.setattr(build, "_of_zig", lambda: iter((zig,)))
    monkeypatch.setattr(build, "_of_rocm", lambda: iter(found))
    build._compilers.cache_clear()
    assert build._compilers() == (*found, zig)
    build._compilers.cache_clear()


@needs_hip_compiler
def test_a_compiler_that_knows_no_gfx950_is_not_the_last(
    tmp_path: Path, kernel: HipKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = str(executable(tmp_path / "clang", "echo unknown target CPU gfx950 >&2; exit 1"))
    here = build._compilers()
    monkeypatch.setattr(build, "_compilers", lambda: (Compiler((old,), (old,)), *here))
    with caplog.at_level(logging.INFO, logger="fp8fn"):
        assert compile_kernel(kernel)[:4] == b"\x7fELF"
        compile_kernel(kernel)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"compiling {kernel.source} for gfx950 by {name}" for name in (old, here[0].clang[0])]
    monkeypatch.setattr(build, "_compilers", lambda: (Compiler((old,), (old,)),))
    with pytest.raises(CompilationError, match="unknown target CPU gfx950"):
        compile_kernel(replace(kernel, macros=(("FACTOR", 3),)))


@needs_hip_compiler
def test_an_error_of_the_source_is_clangs_and_is_not_kept(kernel: HipKernel, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompilationError, match=r"fill\.hip:\d+:\d+: error: use of undeclared identifier 'FACTOR'"):
            compile_kernel(replace(kernel, macros=()))
    assert not cache.exists()


@needs_hip_compiler
def test_a_code_object_says_what_its_assembly_says(code: bytes, tmp_path: Path, kernel: HipKernel) -> None:
    found = metadata(code, "fill")
    offsets = (0, 8, 16, 24, 32, 40, 48)
    sizes = (8, 8, 4, 8, 4, 8, 4)
    pointers = (True, True, False, False, False, True, False)
    assert found.parameters == tuple(map(Parameter, offsets, sizes, pointers))
    assert (found.lds, found.spills, found.scratch) == (256, 0, 0)
    compiler, assembly = build._compilers()[0], tmp_path / "fill.s"
    device = ("-x", "hip", "--offload-device-only", "--offload-arch=gfx950", *build._OPTIONS, "-DFACTOR=2", "-S")
    subprocess.run([*compiler.clang, *device, kernel.source, "-o", assembly], check=True)
    text = assembly.read_text()
    of_arguments = text[text.index(".args:") : text.index(".group_segment_fixed_size:")]
    assert [int(size) for size in re.findall(r"\.offset: +(\d+)", of_arguments)] == list(offsets)
    assert [int(size) for size in re.findall(r"\.size: +(\d+)", of_arguments)] == list(sizes)
    assert re.search(r"\.vgpr_count: +(\d+)", text).group(1) == str(found.vgprs)  # type: ignore[union-attr]
    assert code[7:9] == b"\x40\x03"  # the ABI of HSA, of version 5


@needs_hip_compiler
def test_what_is_no_code_object_or_has_no_such_kernel_is_an_error(code: bytes) -> None:
    with pytest.raises(ValueError, match="no kernel 'file', only fill"):
        metadata(code, "file")
    with pytest.raises(ValueError, match=r"64-bit ELF file; this begins with b'cubin'"):
        metadata(b"cubin", "fill")


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"\x05", 5), (b"\xff", -1), (b"\xc0", None), (b"\xc2", False), (b"\xc3", True), (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536), (b"\xcf" + b"\0" * 7 + b"\x09", 9),
        (b"\xd0\xfe", -2), (b"\xd1\xff\x00", -256), (b"\xa2ab", "ab"), (b"\xd9\x02ab", "ab"), (b"\xda\x00\x01a", "a"),
        (b"\x92\x01\xa1x", [1, "x"]), (b"\xdc\x00\x01\x07", [7]), (b"\x81\xa1k\x90", {"k": []}),
        (b"\xde\x00\x01\xa1k\x80", {"k": {}}),
    ],
)  # fmt: skip
def test_messagepack(content: bytes, value: Any) -> None:
    assert code_object._Reader(b"before" + content, 6).value() == value


def test_an_unknown_tag_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown tag 0xca"):
        code_object._Reader(b"\xca\0\0\0\0", 0).value()


@dataclass
class Launched:
    """The arguments of one hipModuleLaunchKernel: sizes, stream, and the bytes at the address of each parameter."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    parameters: list[bytes]


@dataclass
class StubRuntime:
    """libamdhip64 without a GPU; it reads of an argument as many bytes as `kernel` says. `fail`: calls' status."""

    kernel: code_object.Metadata
    fail: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    modules: list[tuple[int, bytes]] = field(default_factory=list)
    device: int = 0

    def _enter(self, name: str) -> int:
        self.calls.append(name)
        return self.fail.get(name, 0)

    def hipModuleLoadData(self, module: Any, code: bytes) -> int:
        self.modules.append((self.device, code))
        module._obj.value = 1000 + len(self.modules)
        return self._enter("hipModuleLoadData")

    def hipModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 1000 + module.value
        assert name == b"fill"
        return self._enter("hipModuleGetFunction")

    def hipModuleLaunchKernel(self, function: Any, *args: Any) -> int:
        *sizes, stream, parameters, extra = args
        assert extra is None
        assert all(isinstance(size, ctypes.c_uint) for size in sizes)
        numbers = [size.value for size in sizes]
        read = [
            ctypes.string_at(address, parameter.size)
            for address, parameter in zip(parameters, self.kernel.parameters, strict=True)
        ]
        self.launched.append(
            Launched(function.value, tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6], stream.value or 0, read)
        )
        return self._enter("hipModuleLaunchKernel")

    def hipGetLastError(self) -> int:
        return self._enter("hipGetLastError")

    @property
    def hipGetErrorString(self) -> Any:
        def text(status: int) -> bytes:
            return b"a reason"

        return text


@pytest.fixture
def stub(code: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRuntime]:
    """Launches of tensors on the CPU go to a stub of the runtime."""
    found = StubRuntime(metadata(code, "fill"))
    monkeypatch.setattr(runtime, "library", lambda: found)
    monkeypatch.setattr(launch, "compile_kernel", lambda kernel: code)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(core, "stream_handle", lambda index: 77 + index)
    for cached in (launch._function, launch._fault, launch._warn):
        cached.cache_clear()
    yield found
    for cached in (launch._function, launch._fault, launch._warn):
        cached.cache_clear()


def filling(**changes: Any) -> HipLaunch:
    a, out = torch.arange(128, dtype=torch.uint8), torch.zeros(256)
    args = {"a": a, "out": out, "count": 128, "step": Wide(2**40), "value": 0.5, "bias": None, "last": -3}
    kernel = HipKernel("fill.hip", "fill", "gfx950", (("FACTOR", 2),))
    return HipLaunch(kernel, (3, 2, 1), 128, {**args, **changes}, {"FACTOR": 2}, target=GFX950)


@needs_hip_compiler
def test_arguments_lie_where_the_kernel_reads_them(stub: StubRuntime) -> None:
    planned = filling()
    planned.run()
    (seen,) = stub.launched
    assert (seen.grid, seen.block, seen.shared, seen.stream, seen.function) == ((3, 2, 1), (128, 1, 1), 0, 77, 2001)
    a, out = (planned.args[name].data_ptr() for name in ("a", "out"))  # type: ignore[union-attr]
    values = struct.unpack("<QQiqfQi", struct.pack("<QQiqfQi", a, out, 128, 2**40, 0.5, 0, -3))
    assert [
        struct.unpack(kind, found)[0] for kind, found in zip("QQiqfQi", seen.parameters, strict=True)
    ] == list(values)  # fmt: skip
    offsets, size = launch.layout(planned.format)
    assert offsets == tuple(parameter.offset for parameter in stub.kernel.parameters)
    assert size == 52


@needs_hip_compiler
def test_a_kernel_is_loaded_once_for_a_device_and_a_launch_waits_for_nothing(stub: StubRuntime, code: bytes) -> None:
    for _ in range(3):
        filling().run()
    assert stub.calls == ["hipModuleLoadData", "hipModuleGetFunction", *["hipModuleLaunchKernel"] * 3]
    stub.device = 1
    filling().run()
    filling(last=4).run()
    assert stub.modules == [(0, code), (1, code)]
    assert [seen.function for seen in stub.launched] == [2001] * 3 + [2002] * 2
    assert [seen.stream for seen in stub.launched] == [77] * 3 + [78] * 2


@needs_hip_compiler
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("hipModuleLoadData", "loading fill"), ("hipModuleGetFunction", "finding fill"),
        ("hipModuleLaunchKernel", "launching fill, 3x2x1 blocks of 128 threads"),
    ],
)  # fmt: skip
def test_an_error_of_the_runtime_is_raised_and_not_left_for_pytorch(call: str, what: str, stub: StubRuntime) -> None:
    stub.fail[call] = 719
    with pytest.raises(runtime.HipError, match=rf"^{what}: a reason \(719\)$"):
        filling().run()
    assert stub.calls[-1] == "hipGetLastError"
    stub.fail.clear()
    filling().run()
    assert stub.launched[-1].parameters[2] == struct.pack("<i", 128)


@needs_hip_compiler
@pytest.mark.parametrize(
    "changes", [{"step": 3}, {"bias": 0}, {"bias": Wide(0)}, {"last": Wide(4)}, {"a": 1}, {"more": 1}], ids=str
)
def test_arguments_that_are_not_the_kernels_own_are_never_launched(changes: Mapping[str, Any], code: bytes) -> None:
    with pytest.raises(ValueError, match=r"^fill takes \(offset, size, is a pointer\)"):
        check_parameters(code, "fill", filling(**changes).format)


@needs_hip_compiler
def test_a_mismatch_is_an_error_of_the_launch(stub: StubRuntime) -> None:
    with pytest.raises(ValueError, match=r"not \[\(0, 8, True\).* of a pointer, a pointer, an int32, an int32, a"):
        filling(step=3).run()
    with pytest.raises(ValueError, match="fill takes"):
        filling(step=3).fault()
    assert not stub.calls


@needs_hip_compiler
def test_an_integer_past_its_type_is_an_error_that_names_it(stub: StubRuntime) -> None:
    with pytest.raises(ValueError, match=r"^fill: .* past 32 bits and no Wide, of \{'count': 2147483648"):
        filling(count=2**31).run()
    assert not stub.launched
    filling(count=2**31 - 1, step=Wide(2**63 - 1)).run()
    assert stub.launched[0].parameters[3] == struct.pack("<q", 2**63 - 1)


def test_a_launch_without_a_tensor_has_no_device() -> None:
    with pytest.raises(ValueError, match="fill has no tensor"):
        filling(a=None, out=None).run()


@needs_hip_compiler
def test_a_kernel_that_cannot_be_loaded_is_a_fault_and_is_reported_once(
    stub: StubRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    assert filling().fault() is None
    launch._function.cache_clear()
    launch._fault.cache_clear()
    stub.fail["hipModuleLoadData"] = 209
    assert [filling().fault() for _ in range(3)] == ["fill can't be loaded"] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "Triton's kernels serve in place of fill, which can't be loaded: loading fill: a reason (209)"
    )  # fmt: skip
    assert not stub.launched


@needs_hip_compiler
def test_no_compiler_is_a_fault_of_every_kernel_and_is_reported_once(
    no_compiler: None, stub: StubRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    monkeypatch.setattr(launch, "compile_kernel", compile_kernel)
    monkeypatch.setattr(build, "_text", lambda name: "")
    other = HipKernel("fill.hip", "other", "gfx950")
    for planned in (filling(), replace(filling(), kernel=other), filling()):
        assert planned.fault() == f"{planned.name} can't be loaded"
    (record,) = caplog.records
    assert record.getMessage() == f"Triton's kernels serve where kernels in HIP would: {build.unavailable()}"


def test_what_a_launch_says_of_itself() -> None:
    planned = replace(filling(), reason="hip_gemv by default")
    assert planned.describe() == "fill[FACTOR=2] grid=3x2x1 gfx950 (hip_gemv by default)"
    assert replace(planned, reason="", options={}, target=GFX942).describe() == "fill[] grid=3x2x1 gfx942"


@needs_hip_compiler
def test_compiling_and_what_it_takes_of_a_compute_unit(kernel: HipKernel, code: bytes) -> None:
    planned = replace(filling(), kernel=kernel)
    assert metadata(planned.compile(), "fill") == metadata(code, "fill")
    assert planned.resources() == Resources(metadata(code, "fill").vgprs, 0, 0, 256)


LIBRARY = """
struct { void *function, *stream, *extra; unsigned sizes[7]; unsigned char bytes[52]; } seen;
int hipModuleLoadData(void **module, const void *code) { *module = (void *)code; return 0; }
int hipModuleGetFunction(void **function, void *module, const char *name) {
    *function = (char *)module + 1;
    return name[0] == 'f' ? 0 : 500;
}
int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra) {
    const int offsets[] = {0, 8, 16, 24, 32, 40, 48}, sizes[] = {8, 8, 4, 8, 4, 8, 4};
    const unsigned all[] = {x, y, z, block_x, block_y, block_z, shared};
    seen.function = function, seen.stream = stream, seen.extra = extra;
    for (int i = 0; i < 7; ++i) seen.sizes[i] = all[i];
    for (int i = 0; i < 7; ++i)
        for (int j = 0; j < sizes[i]; ++j) seen.bytes[offsets[i] + j] = ((unsigned char *)parameters[i])[j];
    return x == 9 ? 1 : 0;
}
int hipGetLastError(void) { return 0; }
const char *hipGetErrorString(int status) { return status == 1 ? "invalid argument" : "another"; }
"""


class Seen(ctypes.Structure):
    """The last call of the library."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7), ("bytes", ctypes.c_ubyte * 52),
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
@needs_hip_compiler
def test_a_library_in_c_with_the_runtimes_signatures(
    stub: StubRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HIP's documentation has them: what ctypes passes is what the other side of the call reads."""
    source, library = tmp_path / "runtime.c", tmp_path / "libamdhip64.so"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    hip = ctypes.CDLL(str(library))
    monkeypatch.setattr(runtime, "library", lambda: hip)
    stream = 2**47 + 16
    monkeypatch.setattr(core, "stream_handle", lambda index: stream)
    planned = filling(step=Wide(-(2**40)), value=-0.75)
    planned.run()
    seen = Seen.in_dll(hip, "seen")
    assert (seen.function or 0) > 2**32
    assert (seen.stream, seen.extra, list(seen.sizes)) == (stream, None, [3, 2, 1, 128, 1, 1, 0])
    a, out = (planned.args[name].data_ptr() for name in ("a", "out"))  # type: ignore[union-attr]
    assert struct.unpack("@PPiqfPi", bytes(seen.bytes)) == (a, out, 128, -(2**40), -0.75, 0, -3)
    with pytest.raises(runtime.HipError, match=r"launching fill, 9x1x1 blocks of 128 threads: invalid argument \(1\)"):
        replace(planned, grid=(9, 1, 1)).run()


def test_the_runtime_that_pytorch_loaded_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    for name in ("libamdhip64.so", "libtorch.so"):
        (package / "lib" / name).touch()
    monkeypatch.setattr(torch, "__file__", str(package / "__init__.py"))
    maps = "7f00-7f01 r-xp 00000000 08:01 42   /opt/a b/libamdhip64.so.7\n7f02-7f03 rw-p 00000000 00:00 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    names = list(runtime._candidates())
    assert names[:2] == ["/opt/a b/libamdhip64.so.7", str(package / "lib" / "libamdhip64.so")]
    assert names[2:] == ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"]


@pytest.mark.skipif(shutil.which("rocminfo") is not None, reason="ROCm is here")
def test_a_missing_runtime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_candidates", lambda: iter(("libamdhip64.so.none",)))
    with pytest.raises(OSError, match=r"no libamdhip64\.so is here.*libamdhip64\.so\.none: cannot open"):
        runtime.library.__wrapped__()


def test_a_launch_runs_on_the_device_of_its_tensors(stub: StubRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the device that was current is so again."""
    devices, ran_on = [0], []

    @contextmanager
    def enter(device: int) -> Iterator[None]:
        devices.append(device)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(HipLaunch, "_run", lambda self, device: ran_on.append((devices[-1], device)))
    for index in (0, 1):
        monkeypatch.setattr(HipLaunch, "_device", lambda self, index=index: index)
        filling().run()
    assert ran_on == [(0, 0), (1, 1)]
    assert devices == [0]
