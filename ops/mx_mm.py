"""The op `fp8fn::mx_mm`, the product of two MX-FP8 matrices: schema, checks, and which kernel takes it.

Kernels stand in a list, each with the envelope of problems that it takes. The first that takes a problem computes it,
unless a table names another one, and past the end of the list is plain PyTorch: so there is always a result, and
`choose` says whose, and why not that of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import gemv_mx, mx_tiles
from fp8fn.ops.cuda.gemm.gemv_a16w8 import Config as CudaConfig
from fp8fn.ops.cuda.gemm.mx_tiles import Config as TilesConfig
from fp8fn.ops.cuda.gemm.scaled_mm import call as cuda_call
from fp8fn.ops.cuda.gemm.scaled_mm import map_fault
from fp8fn.ops.cuda.runtime import graph_capture, nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.hip import envelope
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.layout import Block, known_block
from fp8fn.ops.scaled_mm import check_operand, check_product, empty_output
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.views import largest_offset
from fp8fn.ops.tuning.mx import SHIPPED, Config, Problem, Table, lookup, parse

MX_MM_SCHEMA: Final = (
    "mx_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias=None, ScalarType? out_dtype=None, "
    "bool constant=False) -> Tensor"
)

A_BLOCK: Final[Block] = (1, 32)
B_BLOCK: Final[Block] = (32, 1)
E8M0: Final = torch.float8_e8m0fnu
# Rows of a tile of the kernel that shares a sum over K: the least that a matrix instruction has.
_FEW: Final = 16
_MOST_SPLITS: Final = 8

# Kernels in HIP that could not be compiled or loaded in this process, and why.
_FAULTS: Final[dict[str, str]] = {}

# Of Triton, HIP and CUDA C++.
AnyLaunch: TypeAlias = TritonLaunch | HipLaunch | CudaLaunch
AnyConfig: TypeAlias = Config | HipConfig | CudaConfig | TilesConfig

_log = logging.getLogger("fp8fn")


def check_mx_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Nothing, or the error that says which argument is wrong and what would work."""
    for name, data, scale, block in (("a", a, a_scale, A_BLOCK), ("b", b, b_scale, B_BLOCK)):
        check_operand(f"mx_mm: {name}", data, scale, block)
        if scale.dtype != E8M0:
            raise TypeError(
                f"mx_mm: {name}_scale has dtype {scale.dtype}; it must be float8_e8m0fnu, as "
                f"fp8fn.quantize(x, {block}, scale='e8m0') makes it"
            )
        if scale.device != a.device:
            device = scale.device
            raise ValueError(f"mx_mm: a is on {a.device} and {name}_scale on {device}; move them to one device")
    check_product("mx_mm", a, b, bias, out_dtype)
    if a.ndim > 3 or b.ndim > 3:
        raise ValueError(f"mx_mm: a has {a.ndim} dimensions and b {b.ndim}; flatten the leading ones into one")
    if a.ndim == 3 and b.ndim == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"mx_mm: a has batch {a.shape[0]} and b {b.shape[0]}; they must be equal")


def is_mx(a_scale: Tensor, a_block: Block, b_scale: Tensor, b_block: Block) -> bool:
    """Whether `mx_mm` multiplies operands in these formats."""
    blocks = known_block(a_block), known_block(b_block)
    return blocks == (A_BLOCK, B_BLOCK) and a_scale.dtype == E8M0 and b_scale.dtype == E8M0


@dataclass(frozen=True)
class Kernel:
    """One kernel: the problems it takes, its configuration of one, and its launches.

    `accepts` is None for a problem that the kernel can compute, else the reason why not. `untuned` is None where it
    should do so without a table that names it. `configure` is its own choice, and `plan` the launches, in order, that
    fill `out (B?, M, N)`; those of `cuda` are also told whether b is constant.
    """

    name: str
    accepts: Callable[[Problem], str | None]
    configure: Callable[[Problem], AnyConfig]
    plan: Callable[..., tuple[AnyLaunch, ...]]
    untuned: Callable[[Problem], str | None] = lambda problem: None

    @property
    def hip(self) -> bool:
        return self.name.startswith("hip_")

    @property
    def triton(self) -> bool:
        return self.name.startswith("triton_")

    @property
    def cuda(self) -> bool:
        return self.name.startswith("cuda_")


@dataclass(frozen=True)
class Choice:
    """The kernel of a problem, None for plain PyTorch; who chose it; and why not those before it in the list."""

    kernel: Kernel | None
    config: AnyConfig | None
    source: str
    refused: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "reference" if self.kernel is None else self.kernel.name

    def describe(self) -> str:
        """One line, for the log."""
        others = "".join(f"; not {name}: {reason}" for name, reason in self.refused)
        return f"{self.name} by {self.source}{others}"


def choose(
    problem: Problem, table: Table | None = None, kernels: tuple[Kernel, ...] | None = None,
    faults: Mapping[str, str] | None = None,
) -> Choice:  # fmt: skip
    """The kernel that a table names, where it takes the problem, else the first of the list that does.

    `faults` are kernels that this machine can't load, by name, each with the reason.
    """
    kernels = KERNELS if kernels is None else kernels
    row = lookup(problem, _shipped() if table is None else table)
    refusals = dict(faults or {})
    if row is not None and not row.use_hip:
        refusals |= {kernel.name: "the table has use_hip=0" for kernel in kernels if kernel.hip}
    refused: list[tuple[str, str]] = []
    if row is not None and (row.use_hip or not row.kernel.startswith("hip_")):
        kernel = next((kernel for kernel in kernels if kernel.name == row.kernel), None)
        reason = "no kernel has the name" if kernel is None else refusals.get(row.kernel) or kernel.accepts(problem)
        if kernel is not None and reason is None:
            return Choice(kernel, _changed(kernel.configure(problem), row.options), "the table", ())
        refused.append((row.kernel, f"the table names it, but {reason}"))
    for kernel in kernels:
        reason = refusals.get(kernel.name) or kernel.accepts(problem) or kernel.untuned(problem)
        if reason is None:
            return Choice(kernel, kernel.configure(problem), "default", tuple(refused))
        refused.append((kernel.name, reason))
    return Choice(None, None, "default", tuple(refused))


def problem_of(a: Tensor, b: Tensor, target: Target, *scales: Tensor, constant: bool = False) -> Problem:
    """The problem of `a (B?, M, K) @ b (B?, K, N)` with `scales` of a and of b."""
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = a.shape[0] if a.ndim == 3 else b.shape[0] if b.ndim == 3 else 1
    largest = max(*map(span, (a, b, *scales)), 4 * batch * m * n)
    k_lines = has_lines(a) and has_lines(b.mT)
    words = all(mx_tiles.has_words(lines) for lines in (scales[0], scales[1].mT)) if scales else True
    in_boxes = words and map_fault(a) is None and map_fault(b.mT) is None
    return Problem(m, n, k, target, batch, a.dtype, b.dtype, largest, k_lines, in_boxes, constant)


def span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of the last one, or a stride that is longer."""
    return x.itemsize * max(largest_offset(x) + 1, *x.stride())


def has_lines(x: Tensor) -> bool:
    """Whether the last axis lies in consecutive bytes, and always from a multiple of 16."""
    *steps, step = x.stride()
    aligned = all(stride % 16 == 0 for size, stride in zip(x.shape, steps, strict=False) if size > 1)
    return (step == 1 or x.shape[-1] == 1) and aligned and x.data_ptr() % 16 == 0


def plan(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor, target: Target,
    table: Table | None = None, *, constant: bool = False,
) -> tuple[AnyLaunch, ...] | None:  # fmt: skip
    """The launches that fill `out`, in order; None where plain PyTorch has to serve."""
    problem = problem_of(a, b, target, a_scale, b_scale, constant=constant)
    choice = _default_choice(problem, _missing()) if table is None else choose(problem, table)
    return _launches(choice, a, a_scale, b, b_scale, bias, out, target, constant)


def _launches(
    choice: Choice, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor,
    target: Target, constant: bool,
) -> tuple[AnyLaunch, ...] | None:  # fmt: skip
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("mx_mm %s x %s: %s", tuple(a.shape), tuple(b.shape), choice.describe())
    if choice.kernel is None:
        return None
    told = {"constant": constant} if choice.kernel.cuda else {}
    launches = choice.kernel.plan(a, a_scale, b, b_scale, bias, out, target, choice.config, **told)
    return tuple(replace(launch, reason=choice.describe()) for launch in launches)


def mx_mm_reference(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    return reference.scaled_mm(a, a_scale, A_BLOCK, b, b_scale, B_BLOCK, bias, out_dtype or torch.bfloat16)


def mx_mm_kernel(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    operands = (a, a_scale, b, b_scale) if bias is None else (a, a_scale, b, b_scale, bias)
    constant = constant or graph_capture.readable(b, b_scale)
    key = ("mx_mm", out_dtype, constant, *map(kind, operands))
    call = recall(key)
    if call is not None:  # the key holds all that the checks read
        return call(*operands)[0]  # type: ignore[no-any-return]
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    target = targets.target_of(a.device)
    targets.check_supported(target, a.device)
    out = empty_output(a, b, out_dtype)
    if out.numel() == 0:
        return out
    launches = loadable(a, a_scale, b, b_scale, bias, out, target, constant)
    if launches is None:
        return reference.scaled_mm(a, a_scale, A_BLOCK, b, b_scale, B_BLOCK, bias, out.dtype)
    if isinstance(launches[0], CudaLaunch):
        return keep(key, cuda_call(launches[0], out, bias is not None))(*operands)[0]  # type: ignore[no-any-return]
    for launch in launches:
        launch.run()
    return out


def loadable(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor, target: Target,
    constant: bool = False,
) -> tuple[AnyLaunch, ...] | None:  # fmt: skip
    """As of `plan`; where a kernel in HIP can be neither compiled nor loaded here, the next of the list takes over."""
    problem = problem_of(a, b, target, a_scale, b_scale, constant=constant)
    while True:
        choice = _default_choice(problem, (*_FAULTS.items(), *_missing()))
        launches = _launches(choice, a, a_scale, b, b_scale, bias, out, target, constant)
        faults = (launch.fault() for launch in launches or () if isinstance(launch, HipLaunch))
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is None:
            return launches
        _FAULTS[choice.name] = fault


def _missing() -> tuple[tuple[str, str], ...]:
    """The kernels in CUDA C++ and why, where nothing compiles them."""
    reason = nvrtc.unavailable()
    return () if reason is None else tuple((kernel.name, reason) for kernel in KERNELS if kernel.cuda)


@lru_cache(maxsize=4096)
def _default_choice(problem: Problem, faults: tuple[tuple[str, str], ...] = ()) -> Choice:
    return choose(problem, faults=dict(faults))


@cache
def _shipped() -> Table:
    return parse(SHIPPED)


def _changed(config: AnyConfig, options: Mapping[str, int]) -> AnyConfig:
    changes: dict[str, Any] = dict(options)
    return replace(config, **changes)


def _foreign(problem: Problem) -> str | None:
    for dtype in (problem.a_dtype, problem.b_dtype):
        if dtype not in targets.fp8_dtypes(problem.target):
            return f"{dtype} has no kernel on {problem.target.name}"
    return None


def _accepts_few(problem: Problem) -> str | None:
    return _foreign(problem) or (f"M={problem.m} is above {_FEW}" if problem.m > _FEW else None)


def _configure_few(problem: Problem) -> Config:
    """Narrow tiles and a sum over K in parts, until every core has a program: a weight is read at memory's speed."""
    target = problem.target
    options = (("matrix_instr_nonkdim", 16),) if target.backend == "hip" else ()
    bn = 64 if -(-problem.n // 64) * problem.batch >= target.cores else 32
    config = Config(_FEW, bn, 128, 4, 2 if target.backend == "hip" else 4, options=options)
    tiles, splits = -(-problem.n // bn) * problem.batch, 1
    # Two steps of K for each part at least: the second pass costs a launch.
    while splits < _MOST_SPLITS and tiles * splits < target.cores and problem.k >= 4 * splits * config.BK:
        splits *= 2
    return replace(config, SPLITS=splits)


def _accepts_scaled(problem: Problem) -> str | None:
    if problem.target.arch not in (100, 103, "gfx950"):
        return f"{problem.target.name} has no matrix instruction with scales"
    return _foreign(problem)


def _configure_scaled(problem: Problem) -> Config:
    if problem.target.backend == "hip":
        if problem.m <= 32:
            return Config(32, 64, 256, 4, 2, options=(("matrix_instr_nonkdim", 16),))
        options = (("matrix_instr_nonkdim", 32),)  # tiles of 16 would leave by 8 bytes
        if problem.m <= 64:
            return Config(64, 64, 256, 4, 2, options=options)
        return Config(128, 128, 128, 8, 2, options=options)
    if problem.k % 16:  # loads of single bytes take registers: 128 deep spills 28 to 172
        return Config(128, 64, 64, 8, 3)
    return Config(128, 64 if problem.m <= 128 else 128, 128, 8, 3)


def _configure_widened(problem: Problem) -> Config:
    """As of `mm_a16w8`: deep tiles up to 64 rows, where the weight's bytes decide, and wide ones beyond."""
    target, m = problem.target, problem.m
    options = (("matrix_instr_nonkdim", 16),) if target.backend == "hip" else ()
    # Where K is no multiple of 16, loads of single bytes take registers: wide tiles spill 18 to 80 on NVIDIA's.
    if m <= 64 or (problem.k % 16 and target.backend == "cuda"):
        bm = 16 if m <= 16 else 32 if m <= 32 else 64
        bn = 64 if -(-problem.n // 64) * problem.batch >= target.cores else 32
        if target.backend == "hip":
            return Config(bm, bn, 128, 4, 2, options=options)
        return Config(bm, bn, 64 if bm == 64 else 128, 8 if bm == 64 else 4, 3)
    if target.backend == "hip":
        return Config(128, 128, 64, 8, 2, options=options)
    return Config(128, 128, 64, 8, 3)


def _plan_widened(*args: Any) -> tuple[TritonLaunch, ...]:
    from fp8fn.ops.triton.mx_mm import plan_mx_mm

    return plan_mx_mm(*args)


def _plan_scaled(*args: Any) -> tuple[TritonLaunch, ...]:
    from fp8fn.ops.triton.mx_mm_scaled import plan_mx_mm_scaled

    return (plan_mx_mm_scaled(*args),)


def _plan_gemv(*args: Any) -> tuple[HipLaunch, ...]:
    from fp8fn.ops.hip.mx_mm import plan_gemv

    return plan_gemv(*args)


def _plan_mfma(*args: Any) -> tuple[HipLaunch, ...]:
    from fp8fn.ops.hip.mx_mm import plan_mfma

    return plan_mfma(*args)


KERNELS: Final = (
    Kernel("hip_gemv", envelope.accepts_gemv, envelope.configure_gemv, _plan_gemv, envelope.untuned_gemv),
    Kernel("hip_mfma", envelope.accepts_mfma, envelope.configure_mfma, _plan_mfma, envelope.untuned_mfma),
    Kernel("cuda_tiles", mx_tiles.accepts, mx_tiles.configure, mx_tiles.plan, mx_tiles.untuned),
    Kernel("cuda_gemv", gemv_mx.accepts, gemv_mx.configure, gemv_mx.plan),
    Kernel("triton_few", _accepts_few, _configure_few, _plan_widened),
    Kernel("triton_scaled", _accepts_scaled, _configure_scaled, _plan_scaled),
    Kernel("triton_widened", _foreign, _configure_widened, _plan_widened),
)
