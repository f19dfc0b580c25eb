"""The CUDA C++ quantizers against the definition: emulated on the CPU, as machine code, through the ops on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")


from fp8fn.ops import quantize, quantize_fused
from fp8fn.ops.cuda.quantize.quantize import (
    QuantizeConfig,
    plan,
)
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.formats import SCALE_FORMATS
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import OCP, SM89, SM90
from support.accuracy import assert_same_bits
from support.compilers import instructions, needs_nvrtc
from support.cuda_emulator import emulate, extent, hopper_on_cpu, needs_compiler
from support.gpu import skip_below
from support.operands.values import HARD, random
from support.quantizers import accepts, accepts_rms_norm, accepts_silu_mul, quantization, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = OCP
ROW, COLUMN, SQUARE = (1, 128), (128, 1), (128, 128)

KINDS: dict[str, tuple[str, Block]] = {
    "row": ("", ROW), "column": ("", COLUMN), "square": ("", SQUARE),
    "dual": ("_dual", ROW), "dual, columns first": ("_dual", COLUMN), "dual square": ("_dual", SQUARE),
    "rows, square columns": ("_dual", ROW), "columns, square rows": ("_dual", COLUMN),
    "square columns": ("", SQUARE), "square rows": ("", SQUARE),
}  # fmt: skip
WHOLES: dict[str, tuple[str, Block]] = {
    "whole": ("", (-1, -1)), "dual whole": ("_dual", (-1, -1)), "whole columns": ("", (-1, -1)),
}  # fmt: skip
# The second block where it is not the transpose of the first.
DUAL_BLOCKS: dict[str, Block] = {"rows, square columns": SQUARE, "columns, square rows": SQUARE}
# The layout of one output in square blocks, where it is given.
COLUMN_MAJOR: dict[str, bool] = {"square columns": True, "square rows": False, "whole columns": True}
SOURCES = ("quantize", "quantize_silu_mul", "quantize_rms_norm")
CASES = [*((source, kind) for source in SOURCES for kind in KINDS), *(("quantize", kind) for kind in WHOLES)]
FEW = [(source, kind) for source, kind in CASES if source == "quantize" or kind == "dual"]


def over(cases: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("source", "kind"), cases, ids=[f"{source}-{kind}" for source, kind in cases])


FORMATS = [(dtype, scale) for dtype in OCP for scale in SCALE_FORMATS]
FUNCTIONS: dict[str, Callable[..., Sequence[Tensor]]] = {**vars(quantize), **vars(quantize_fused)}
GUARD: Final = 512
MARK: Final = 0xA5


class Problem:
    """An op and its arguments: what `source` makes of `x`, in the block of `kind`."""

    def __init__(
        self, source: str, kind: str, x: Tensor, dtype: torch.dtype = E4M3, scale: str = "fp32", *, eps: float = 1e-5,
        other: Tensor | None = None,
    ) -> None:  # fmt: skip
        suffix, block = (KINDS | WHOLES)[kind]
        self.op, self.exact, self.x = source + suffix, source != "quantize_silu_mul", x
        self.inputs: tuple[Any, ...] = (x,)
        if source == "quantize_silu_mul":
            self.inputs = x, x.flip(0) if other is None else other
        elif source == "quantize_rms_norm":
            self.inputs = x, random(x.shape[-1], dtype=x.dtype, seed=1).to(x.device) if other is None else other, eps
        self.format = block, dtype, scale
        self.beside: dict[str, Any] = {"dual_block": DUAL_BLOCKS[kind]} if kind in DUAL_BLOCKS else {}
        if kind in COLUMN_MAJOR:
            self.beside = {"column_major": COLUMN_MAJOR[kind]}

    def reference(self) -> Sequence[Tensor]:
        return FUNCTIONS[f"{self.op}_reference"](*self.inputs, *self.format, **self.beside)

    def kernel(self) -> Sequence[Tensor]:
        return FUNCTIONS[f"{self.op}_kernel"](*self.inputs, *self.format, **self.beside)

    def run(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = getattr(torch.ops.fp8fn, self.op)(*self.inputs, *self.format, **self.beside)
        return found

    def runs(self) -> Iterator[Sequence[Tensor]]:
        """The op's on a GPU; on the CPU emulated, in both orders of the threads."""
        if self.x.is_cuda:
            with watched():
                found = self.run()
            yield found
            return
        for backwards in (False, True):
            with hopper_on_cpu(backwards=backwards), watched():
                found = self.kernel()
            yield found

    def compare(self, actual: Tensor, expected: Tensor) -> None:
        (assert_same_bits if self.exact else assert_near)(actual, expected)

    def assert_right(self, found: Sequence[Tensor] | None = None) -> None:
        reference = self.reference()
        for outputs in self.runs() if found is None else (found,):
            for actual, expected in zip(outputs, reference, strict=True):
                self.compare(actual, expected)


def put(x: Tensor, where: str) -> Tensor:
    """The same tensor there, with what lies around it."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.to(where).as_strided(x.shape, x.stride(), x.storage_offset())


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Scales by a relative error of 1e-5, and bytes one step apart where that crosses a border of rounding."""
    assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    if expected.dtype not in OCP:
        torch.testing.assert_close(actual.float(), expected.float(), rtol=1.1e-5, atol=0, equal_nan=True)
        return
    found, wanted = (x.view(torch.uint8)[~nan].int() for x in (actual, expected))
    apart = (found - wanted).abs()
    assert (apart <= 1).all()
    # Eight borders a binade, to each a 1e-5th on both sides, for the value and for its scale: 4.6e-4.
    assert int(apart.sum()) <= 5e-4 * apart.numel() + 3


@contextmanager
def watched() -> Iterator[None]:
    """Inside, ops have to start kernels in CUDA C++, and to leave what lies around the elements of their outputs."""
    made: list[tuple[Tensor, Tensor]] = []
    started: list[None] = []
    start = call_cache.start

    def marked(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = extent(shape, strides) * dtype.itemsize + 2 * GUARD
        memory = torch.full((size,), MARK, dtype=torch.uint8, device=device)
        made.append((memory, memory.view(dtype).as_strided(shape, strides, GUARD // dtype.itemsize)))
        return made[-1][1]

    def counted(*args: Any) -> None:
        started.append(None)
        start(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_cache, "allocated", lambda kinds, device: [marked(*each, device) for each in kinds])
        patch.setattr(call_cache, "start", counted)
        yield
    assert started
    assert made
    for memory, x in made:
        inside = torch.zeros_like(memory)
        bits = torch.uint8 if x.element_size() == 1 else torch.int32
        inside.view(bits).as_strided(x.shape, x.stride(), x.storage_offset()).bitwise_not_()
        assert (memory[inside == 0] == MARK).all()


def framed(x: Tensor, left: int, width: int) -> Tensor:
    """The same values among NaN: rows of `width` elements, of which `left` lie before each row of `x`."""
    memory = x.new_full((x.shape[0] + 2, width), float("nan"))
    return memory[1:-1, left : left + x.shape[1]].copy_(x)


# One for each way in which the kernels load; the types of plain inputs and of produced ones, to compile not too many.
LAYOUTS: list[tuple[Callable[[torch.dtype], Tensor], tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = [
    (lambda of: random(128, 256, dtype=of), (BF16, FP16, FP32), (BF16,)),
    (lambda of: random(130, 264, dtype=of), (BF16,), ()),
    (lambda of: random(127, 129, dtype=of), (BF16, FP32), (FP32,)),
    (lambda of: framed(random(127, 261, dtype=of), 8, 304), (BF16, FP16, FP32), (FP16,)),
    (lambda of: framed(random(128, 256, dtype=of), 1, 258), (BF16,), ()),
    (lambda of: framed(random(74, 248, dtype=of), 5, 267), (BF16,), ()),
]
VIEWS: dict[str, Callable[[], Tensor]] = {
    "one element": lambda: random(1, 1),
    "one row": lambda: random(1, 300),
    "one column": lambda: random(300, 1),
    "column-major": lambda: random(200, 72).mT,
    "odd column-major": lambda: random(129, 127).mT,
    "sliced column-major": lambda: framed(random(74, 266), 5, 300).mT,
    "every second row": lambda: random(100, 280)[::2, :264],
    "batch": lambda: random(3, 130, 264),
    "batches": lambda: random(2, 3, 40, 129),
    "batch of rows": lambda: random(3, 1, 33),
    "column-major batches": lambda: random(2, 2, 140, 36).mT,
    "one row for all": lambda: random(1, 1, 140).expand(3, 40, 140),
}


def hard_values(rows: int) -> Iterator[Tensor]:
    """The values of HARD, random bits, and values about the amax whose scale is a power of two."""
    bits = torch.randint(-(2**31), 2**31, (rows, 8), dtype=torch.int32)
    borders = torch.tensor([448.0, 57344.0]).view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32)[:, None]
    for x in (*(make() for make in HARD.values()), bits.view(FP32), borders.view(FP32).reshape(-1, 1)):
        yield F.pad(x, (0, -x.shape[1] % 8))


IN_EVERY_FORMAT = [
    *((SOURCES[0], kind) for kind in ("dual", "dual square", "rows, square columns", "dual whole")),
    (SOURCES[1], "dual"),
    (SOURCES[2], "row"),
]
HARD_CASES = [
    (source, kind, dtype, scale)
    for source, kind in (*FEW, (SOURCES[2], "row"), (SOURCES[2], "square"))
    for dtype, scale in itertools.product(OCP, SCALE_FORMATS)
    if (source, kind) in IN_EVERY_FORMAT or (dtype, scale) == (E4M3, "fp32")
]


@pytest.mark.parametrize(("source", "kind", "dtype", "scale"), HARD_CASES, ids=str)
def test_hard_values(source: str, kind: str, dtype: torch.dtype, scale: str, where: str) -> None:
    for x in hard_values(1 << 18 if where == "cuda" and source == "quantize" else 300):
        if source == "quantize_silu_mul":
            # Off the powers of two, where a rounding error changes the scale; and at -88, a fast division gives 0.
            x = (1.1 * x).masked_fill((x < -75) & (x > -85), 0.0)
        problem = Problem(source, kind, x.to(where), dtype, scale)
        problem.assert_right(next(problem.runs()))


@over(CASES)
def test_every_layout(source: str, kind: str, where: str) -> None:
    for make, *types in LAYOUTS:
        for of in types[source != "quantize"]:
            Problem(source, kind, put(make(of), where)).assert_right()


@over(FEW)
def test_every_view(source: str, kind: str, where: str) -> None:
    for name, make in VIEWS.items():
        if source == "quantize" or "column-major" not in name:
            Problem(source, kind, put(make(), where)).assert_right()


@pytest.mark.parametrize("columns", [8, 520, 2048, 2056, 3000, 4096, 6144, 8192, 12296, 16384])
def test_rms_norm_of_whole_rows(columns: int, where: str) -> None:
    for shape, of in (((8, columns), BF16), ((3, 3, columns), FP32 if columns % 1024 else FP16)):
        Problem("quantize_rms_norm", "row", random(*shape, dtype=of).to(where)).assert_right()


def test_silu_has_a_relative_error_under_1e5(where: str) -> None:
    """Read off the scales of rows of one element."""
    gate = torch.linspace(-60, 60, 1 << 14, device=where)[:, None]
    expected = (gate.double() * gate.double().sigmoid() * 1e20 / 448).abs()
    for _, scale in Problem("quantize_silu_mul", "row", gate, other=torch.full_like(gate, 1e20)).runs():
        assert float((scale.double() / expected - 1).abs().max()) < 1e-5


@needs_compiler
@over(FEW)
def test_a_kept_call_takes_other_tensors_of_its_kind(source: str, kind: str) -> None:
    """An address that differs modulo 16 has another call."""
    memory = random(128 * 256 + 8)
    with hopper_on_cpu() as launches:
        for x in (random(128, 256), random(128, 256, seed=1), memory[:-8].view(128, 256), memory[1:-7].view(128, 256)):
            problem = Problem(source, kind, x)
            problem.assert_right(problem.kernel())
    assert [launch.options["ALIGNED"] for launch in launches if launch.name == "quantize"] == [1, 0]


@needs_compiler
@pytest.mark.parametrize("config", [
    QuantizeConfig(ROW_BYTES=8), QuantizeConfig(GROUP=2), QuantizeConfig(GROUP=8, LOAD="LINE"),
    QuantizeConfig(WARPS=4, ROWS=16, STORE="FIRST_OUT"), QuantizeConfig(WARPS=16, ROWS=4, LOAD="FIRST_OUT"),
    QuantizeConfig(WARPS=8, ROWS=4), QuantizeConfig(WARPS=4, ROWS=2),
], ids=str)  # fmt: skip
def test_other_configurations(config: QuantizeConfig) -> None:
    x = random(400, 264)
    q = quantization(x, ROW, dual=config.rows == 128)
    emulate(*plan(q, config))
    Problem("quantize", "dual" if q.dual else "row", x).assert_right(tensors(q))


def test_outputs_have_the_documented_strides(where: str) -> None:
    x = random(2, 130, 300).to(where)
    for row, row_scale, col, col_scale in Problem("quantize", "dual", x).runs():
        assert (row.stride(), row_scale.stride()) == ((130 * 304, 304, 1), (132 * 3, 1, 132))
        assert (col.stride(), col_scale.stride()) == ((300 * 144, 1, 144), (2 * 300, 300, 1))
    for row, row_scale, col, col_scale in Problem("quantize", "dual square", x, scale="e8m0").runs():
        assert (row.stride(), row_scale.stride()) == ((130 * 304, 304, 1), (2 * 16, 16, 1))
        assert (col.stride(), col_scale.stride()) == ((300 * 144, 1, 144), (3 * 16, 1, 16))
    for row, row_scale, col, col_scale in Problem("quantize", "rows, square columns", x).runs():
        assert (row.stride(), row_scale.stride()) == ((130 * 304, 304, 1), (132 * 3, 1, 132))
        assert (col.stride(), col_scale.stride()) == ((300 * 144, 1, 144), (3 * 4, 1, 4))
    for data, scale in Problem("quantize", "square columns", x).runs():
        assert (data.stride(), scale.stride()) == ((300 * 144, 1, 144), (3 * 4, 1, 4))
    for data, scale in Problem("quantize", "square rows", x.mT.contiguous().mT).runs():
        assert (data.stride(), scale.stride()) == ((130 * 304, 304, 1), (2 * 4, 4, 1))
    for data, scale in Problem("quantize", "square", x.mT.contiguous().mT).runs():
        assert (data.stride(), scale.stride()) == ((300 * 144, 1, 144), (3 * 4, 1, 4))


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "columns", "launched"),
    [
        ("row", 16384, 1),
        ("row", 16392, 2),
        ("row", 260, 2),
        ("dual", 256, 2),
        ("column", 256, 2),
        ("square", 256, 2),
        ("rows, square columns", 256, 2),
    ],
)
def test_rms_norm_takes_as_few_launches_as_it_can(kind: str, columns: int, launched: int) -> None:
    problem = Problem("quantize_rms_norm", kind, random(2, columns))
    with hopper_on_cpu() as launches:
        problem.assert_right(problem.kernel())
    assert [launch.name for launch in launches] == [["quantize_rms_norm"], ["row_rstd", "quantize"]][launched - 1]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_of_known_statistics_is_one_launch(kind: str) -> None:
    suffix, block = KINDS[kind]
    x, weight, rstd = random(2, 130, 264), random(264, seed=1), random(130, 2, dtype=FP32, seed=2).abs().mT
    last = [layouts[kind] for layouts in (DUAL_BLOCKS, COLUMN_MAJOR) if kind in layouts]
    given = (x, weight, 1e-6, block, E4M3, "fp32", rstd, *last)
    with hopper_on_cpu() as launches:
        outputs = FUNCTIONS[f"quantize_rms_norm{suffix}_kernel"](*given)
    assert [launch.name for launch in launches] == ["quantize"]
    for found, expected in zip(outputs, FUNCTIONS[f"quantize_rms_norm{suffix}_reference"](*given), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", ["row", "dual square"])
def test_no_load_begins_past_the_end(kind: str, where: str) -> None:
    for columns in (129, 130, 132, 260):
        x = framed(random(130, columns, dtype=FP32), 0, 264)
        Problem("quantize", kind, put(x, where)).assert_right()


@pytest.mark.parametrize(("kind", "weight", "eps"), [
    ("column", float("inf"), 1e-6), ("square", float("inf"), 1e-6), ("row", 1.0, 0.0), ("square", 1.0, 0.0),
], ids=str)  # fmt: skip
def test_rms_norm_with_infinite_factors(kind: str, weight: float, eps: float, where: str) -> None:
    """With `eps=0`, the root of a mean square that underflows has the reciprocal Inf."""
    for columns in (264, 260):
        x, w = torch.full((130, columns), 1.0 if eps else 1e-30, device=where), torch.full((columns,), weight)
        Problem("quantize_rms_norm", kind, x, eps=eps, other=w.to(where)).assert_right()


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("reason", "x"), [
    ("x has strides (32, 2), none of the last two 1", meta(16, 16)[::2, ::2]),
    ("x has shape (1, 2147483648) and strides (2147483648, 1), past 32 bits", meta(1, 2**31)),
    ("x has shape (2, 8) and strides (2147483648, 1), past 32 bits", meta(2, 2**31)[:, :8]),
    ("x has shape (8388481, 8), more than 65535 blocks of rows or matrices", meta(8388481, 8)),
    ("x has shape (65536, 4, 8), more than 65535 blocks of rows or matrices", meta(65536, 4, 8)),
    ("x has strides (8, 24, 1): its matrices do not follow each other", meta(4, 3, 8).transpose(0, 1)),
])  # fmt: skip
def test_refusals_of_a_layout_say_why(reason: str, x: Tensor) -> None:
    assert accepts(x, ROW, E4M3, SM90) == reason
    assert accepts_silu_mul(x, x, ROW, E4M3, SM90) == reason.replace("x has", "gate has")
    assert accepts_rms_norm(x, meta(x.shape[-1]), ROW, E4M3, SM90) == reason


def test_other_refusals_say_why() -> None:
    x, turned, apart = meta(16, 8), meta(8, 16).mT, meta(16, 16)[:, ::2]
    assert accepts(x, ROW, E4M3, SM89) == "sm89 is not sm90"
    assert accepts(x, (1, -1), E4M3, SM90) == "block (1, -1) is none of ((1, 128), (128, 1), (128, 128))"
    fnuz = accepts(x, ROW, torch.float8_e4m3fnuz, SM90)
    assert fnuz == "torch.float8_e4m3fnuz is no type of the hardware"
    assert accepts_silu_mul(turned, x, ROW, E4M3, SM90) == "gate has strides (1, 16), not contiguous rows"
    assert accepts_silu_mul(x, turned, ROW, E4M3, SM90) == "up has strides (1, 16), not contiguous rows"
    assert accepts_silu_mul(x, apart, ROW, E4M3, SM90) == "up has strides (16, 2), none of the last two 1"
    assert accepts_rms_norm(turned, meta(8), ROW, E4M3, SM90) == "x has strides (1, 16), not contiguous rows"
    assert accepts_rms_norm(x, meta(16)[::2], ROW, E4M3, SM90) == "weight has stride 2"
    wide = accepts_rms_norm(x, meta(8, dtype=FP32), ROW, E4M3, SM90)
    assert wide == "weight has dtype torch.float32 and x torch.bfloat16"
    many = accepts_rms_norm(meta(2**30 + 1, 8), meta(8), ROW, E4M3, SM90)
    assert many == "x has shape (1073741825, 8), more than 1073741824 rows"


@pytest.mark.parametrize("block", [ROW, COLUMN, SQUARE], ids=str)
def test_accepts_all_that_it_can_address(block: Block) -> None:
    for x in (*(make() for make in VIEWS.values()), meta(65535 * 128, 8), meta(65535, 4, 8), meta(8, 2**31 - 1)):
        assert accepts(x, block, E5M2, SM90) is None
    assert accepts_silu_mul(meta(3, 16, 8), meta(3, 16, 32)[..., :8], block, E4M3, SM90) is None
    assert accepts_rms_norm(meta(3, 16, 8), meta(8), block, E4M3, SM90) is None


# The kernels that are known to spill, and how many registers.
SPILLS = {
    ("quantize_rms_norm", "row", 2, 8192): 4, ("quantize_rms_norm", "row", 4, 16384): 10,
    # rows that are not aligned
    ("quantize", "square columns", 2, 4093): 6,
}  # fmt: skip
COMPILED = [
    *itertools.product(SOURCES, ["dual"], [(4096, 4096), (4095, 4093)]),
    *itertools.product(SOURCES[:1], ["dual square"], [(4096, 4096), (4095, 4093)]),
    *itertools.product(SOURCES, ["rows, square columns", "square columns"], [(4096, 4096), (4095, 4093)]),
    *itertools.product(SOURCES[2:], ["row"], [(4096, 4096), (4095, 5000), (4096, 8192), (4096, 16384)]),
]


def launches_of(source: str, kind: str, of: torch.dtype, *shape: int) -> list[CudaLaunch]:
    """The op's launches on a Hopper."""
    other = meta(*shape[1:] if "rms" in source else shape, dtype=of)
    with hopper_on_cpu() as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_cache, "start", lambda launch, addresses: None)
        Problem(source, kind, meta(*shape, dtype=of), other=other).kernel()
    return launches


@needs_nvrtc
@pytest.mark.parametrize("of", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("source", "kind", "shape"), COMPILED, ids=str)
def test_registers_suffice(source: str, kind: str, shape: tuple[int, int], of: torch.dtype) -> None:
    """As many blocks as a kernel was compiled for share the 65536, and it keeps none of its own in memory."""
    for launch in launches_of(source, kind, of, *shape):
        used = launch.resources()
        assert used.spills <= SPILLS.get((launch.name, kind, of.itemsize, shape[1]), 0), launch.describe()
        assert int(launch.options.get("BLOCKS", 1)) * launch.threads * -(-used.registers // 8) * 8 <= 65536


@needs_nvrtc
@pytest.mark.parametrize(("kind", "of"), [
    ("row", BF16), ("column", FP16), ("dual", BF16), ("dual", FP32),
    ("rows, square columns", BF16), ("square columns", BF16),
], ids=str)  # fmt: skip
def test_matrices_are_read_once_and_by_16_bytes(kind: str, of: torch.dtype, tmp_path: Path) -> None:
    (launch,) = launches_of("quantize", kind, of, 4096, 4096)
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    loads, stores = ([text for text in sass if name in text] for name in ("LDG.", "STG."))
    assert all(".128" in text for text in loads)
    assert len(loads) * launch.threads * 16 == 128 * 128 * of.itemsize
    assert len([text for text in stores if ".128" in text]) >= (4 if kind in ("row", "column", "square columns") else 8)
    assert len([text for text in stores if ".128" not in text]) <= 2  # scales


on_gpu = pytest.mark.parametrize("where", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@on_gpu
@over(CASES)
def test_many_rows_and_columns(source: str, kind: str, where: str) -> None:
    for shape, of in (((4096, 8192), BF16), ((3, 300, 1024), FP16), ((1000, 1111), FP16), ((130, 16384), FP32)):
        Problem(source, kind, torch.randn(shape, device=where).to(of)).assert_right()


@over(CASES)
def test_an_empty_tensor(source: str, kind: str, device: torch.device) -> None:
    for shape in ((0, 300), (300, 0), (3, 0, 8), (0, 8, 8)):
        problem = Problem(source, kind, torch.empty(shape, dtype=BF16, device=device))
        problem.assert_right(problem.run())


@on_gpu
@over(FEW)
def test_more_than_2_to_the_31_elements(source: str, kind: str, where: str) -> None:
    """Rows are those of the same op on them alone, each part of which has the largest magnitude of `x`."""
    skip_below(16)
    x = torch.randn(2**16 + 3, 2**15 + 128, device=where, dtype=BF16)
    assert x.numel() > 2**31
    parts = ((0, 256), (2**15, 2**15 + 128), (2**16, 2**16 + 3))
    x[[start for start, _ in parts], 5] = 100
    other = random(x.shape[1]).to(where) if "rms" in source else x
    found = Problem(source, kind, x, other=other).run()
    for start, stop in parts:
        part = Problem(source, kind, x[start:stop], other=other if "rms" in source else x[start:stop])
        for whole, expected in zip(found, part.reference(), strict=True):
            first = {x.shape[0]: start, 1: 0}.get(whole.shape[0], start // 128)
            actual = whole[first : first + expected.shape[0]]
            part.compare(*(y.clone(memory_format=torch.contiguous_format) for y in (actual, expected)))


@on_gpu
@over(CASES)
def test_a_captured_graph_replays_on_new_data(source: str, kind: str, where: str) -> None:
    problem = Problem(source, kind, torch.randn(300, 1024, device=where, dtype=BF16))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        problem.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.run()
    for _ in range(3):
        problem.x.normal_()
        graph.replay()
        problem.assert_right(captured)


@on_gpu
@over(CASES)
def test_200_runs_on_two_streams_at_once_give_one_bit_pattern(source: str, kind: str, where: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    problems = [Problem(source, kind, torch.randn(1000, 1111, device=where, dtype=BF16)) for _ in streams]
    first = [problem.run() for problem in problems]
    differing = [torch.zeros((), dtype=torch.int64, device=where) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for one, other in zip(problems[i].run(), first[i], strict=True):
                    bits = torch.uint8 if one.element_size() == 1 else torch.int32
                    differing[i] += (one.view(bits) != other.view(bits)).sum()
    torch.cuda.synchronize()
    for problem, outputs, count in zip(problems, first, differing, strict=True):
        problem.assert_right(outputs)
        assert int(count) == 0
