"""The gfx950 assembly of the HIP kernels, as the packaged clang writes it: instructions, loads in flight, registers."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest

pytest.importorskip("triton")

from fp8fn.ops.hip import build
from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.config import HipConfig
from support.hip_on_host import SOURCES
from support.mx_decode import BF16, Dense, Routed, dense, routed

COMPILERS = tuple(build._of_zig())
pytestmark = pytest.mark.skipif(not COMPILERS, reason="pip install ziglang for a clang that knows gfx950")


@cache
def assembly(kernel: HipKernel) -> tuple[str, ...]:
    """Its lines."""
    macros = [f"-D{name}={value}" for name, value in kernel.macros]
    device = ["-x", "hip", "--offload-device-only", f"--offload-arch={kernel.arch}", *build._OPTIONS]
    command = [*COMPILERS[0].clang, *device, *macros, "-S", str(SOURCES / kernel.source), "-o", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(line.strip() for line in text.splitlines())


def count(kernel: HipKernel, instruction: str) -> int:
    return sum(line.startswith(instruction) for line in assembly(kernel))


def note(kernel: HipKernel, key: str) -> int:
    found = re.findall(rf"^(?:- )?\.{key}: +(\d+)$", "\n".join(assembly(kernel)), re.M)
    assert len(found) == 1, (kernel, key)
    return int(found[0])


def assert_fits(kernel: HipKernel, lds: int) -> None:
    """Nothing spills, two waves share a SIMD, and sums are in registers that every instruction takes."""
    assert note(kernel, "vgpr_spill_count") == note(kernel, "sgpr_spill_count") == 0
    assert note(kernel, "private_segment_fixed_size") == note(kernel, "agpr_count") == 0
    assert note(kernel, "vgpr_count") <= 256
    assert note(kernel, "group_segment_fixed_size") == lds
    assert count(kernel, "v_accvgpr") == count(kernel, "scratch_") == 0


def in_flight(kernel: HipKernel, until: str) -> int:
    """Loads of 16 bytes before the first line of the loop that begins with `until`."""
    lines = assembly(kernel)
    first = next(i for i, line in enumerate(lines) if line.startswith("buffer_load"))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith(until))
    return sum(line.startswith("buffer_load_dwordx4") for line in lines[first:last])


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_gemv(rows: int) -> None:
    (launch,) = dense(Dense("gemv", rows, 8, 64, HipConfig(rows=rows), BF16, BF16)).launches
    columns = 1 if rows <= 2 else 2 if rows <= 8 else 4
    steps = 4 // columns
    kernel = launch.kernel
    assert_fits(kernel, 0)
    assert count(kernel, "v_pk_fma_f32") == 8 * steps * rows * columns
    assert count(kernel, "v_cvt_pk_f32_fp8") == 8 * steps * (rows + columns)
    assert count(kernel, "v_ldexp_f32") == steps * rows * columns
    assert count(kernel, "buffer_load_dwordx4") == count(kernel, "buffer_load_ubyte") == steps * (rows + columns)
    # The weight's of all steps, and a group of rows or two.
    assert in_flight(kernel, "s_waitcnt vmcnt") == 4 + min(steps * rows, 8)
    assert count(kernel, "v_mfma") == count(kernel, "ds_") == 0


@pytest.mark.parametrize("n_sub", [1, 2, 4])
@pytest.mark.parametrize("m", [16, 32, 48, 64])
def test_mfma(m: int, n_sub: int) -> None:
    """One instruction for 128 of K of each 16 x 16 of the product, none of them masked."""
    (launch,) = dense(Dense("mfma", m, 8, 64, HipConfig(n_sub=n_sub), BF16, BF16)).launches
    tiles_m, steps = m // 16, 4 // n_sub
    assert_products(launch.kernel, steps * tiles_m * n_sub, steps * (tiles_m + n_sub), tiles_m * n_sub)


@pytest.mark.parametrize("block_n", [8, 16])
@pytest.mark.parametrize("block_m", [16, 32, 48, 64])
def test_moe(block_m: int, block_n: int) -> None:
    (launch,) = routed(Routed(2, 2, 2, block_m, 8, 64, 2, block_n, True, BF16)).launches
    tiles_m = block_m // 16
    steps = 4 if tiles_m <= 2 else 2
    assert_products(launch.kernel, steps * tiles_m, steps * (tiles_m + 1), tiles_m)


def assert_products(kernel: HipKernel, products: int, fragments: int, tiles: int) -> None:
    assert_fits(kernel, 4 * tiles * 16 * 16 * 4)
    assert count(kernel, "v_mfma") == count(kernel, "v_mfma_scale_f32_16x16x128_f8f6f4") == products
    assert count(kernel, "buffer_load_dwordx4") == 2 * fragments
    assert count(kernel, "buffer_load_ubyte") == fragments
    assert in_flight(kernel, "v_mfma") == 2 * fragments


def test_sum_of_parts() -> None:
    launch = dense(Dense("mfma", 2, 8, 512, HipConfig(k_splits=4), BF16, BF16)).launches[1]
    assert_fits(launch.kernel, 0)
    assert count(launch.kernel, "v_add_f32") == 4
    assert count(launch.kernel, "global_load_dword ") == 4
    assert count(launch.kernel, "global_atomic") == 0
