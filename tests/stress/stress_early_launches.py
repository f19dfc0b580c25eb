"""Whether launches that begin early read what is written right before them, and nothing older.

    python tests/stress/stress_early_launches.py [--checks 5000] [--seconds 150] [--only SUBSTRING ...] [--json PATH]

Kernels use programmatic dependent launch: one may begin while the launch before it still writes its operands. Here each
operand is written right before the product, by PyTorch's elementwise and copy kernels, by cuBLAS and by our quantizers,
with other values each time, so that a read that comes too early shows. Each result is compared, bit by bit, with the
same product of copies of the operands, launched before and behind a device synchronisation.

- eager: the stream is held back by a sleep while the host enqueues the writes and the product behind it.
- streams: one stream writes, another waits for its event and multiplies; the writes wait for the product before.
- inside: a CUDA graph of the writes and the product.
- first: a CUDA graph that begins with the product; the operands are written between replays.
- behind: a CUDA graph of the writes of what moves, and the product; the rest is written between replays.

A `constant` weight is written once, before a synchronisation; only the rest moves. On a Hopper GPU; `--device cpu`
runs the same through the reference at small sizes, where nothing is early, to test this file. The exit code is 1 where
a result differs, a case fails, or fewer checks than asked for were made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

import fp8fn
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, gemv_mx, mm_a16w8, mx_tiles, splitk_a16w8
from fp8fn.ops.cuda.runtime import call_cache, graph_capture, nvrtc
from fp8fn.ops.cuda.runtime.call_cache import Call, call_of, keep, kind, recall
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.mx_mm import problem_of
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.scaled_mm import empty_output
from fp8fn.ops.triton.launch import TritonLaunch
from support.products import mx_product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS: Final = (1, 2, 4, 8, 9, 16, 17, 32, 64, 128)
MODES: Final = ("eager", "streams", "inside", "first", "behind")
WRITERS: Final = ("copy", "elementwise", "cublas")
_VALUES: Final = 3  # sets of values of a case, used in turn
_SLEEP: Final = 400_000  # cycles, in which the host enqueues what follows
_SQUARE: Final[Block] = (128, 128)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Values: TypeAlias = "tuple[Tensor, ...]"
Product: TypeAlias = "Callable[..., Sequence[Tensor]]"


@dataclass
class Case:
    """A product of operands, the first `moving` of which are written right before it, or all."""

    name: str
    make: Callable[[], Values]
    product: Product
    moving: int | None = None
    kernels: dict[bool, set[str]] = field(default_factory=lambda: {False: set(), True: set()})
    """The kernels that it launches; under True those where it may read weights early."""
    fault: str = ""

    def kernel(self, early: bool) -> str:
        return " + ".join(sorted(self.kernels[early])) or "reference"


@dataclass(frozen=True)
class Sizes:
    """Sizes of operands, large enough on a GPU that a weight is still written when the next launch begins."""

    n: int
    k: int
    rows: tuple[int, ...]
    experts: int
    tokens: int


SIZES: Final = {"cuda": Sizes(2048, 2048, ROWS, 8, 1024), "cpu": Sizes(256, 256, (1, 9), 2, 160)}


def bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def like(x: Tensor) -> Tensor:
    """Memory of its own with the strides of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def copied(values: Values) -> Values:
    made = tuple(map(like, values))
    for to, x in zip(made, values, strict=True):
        bits(to).copy_(bits(x))
    return made


# ---- cases -----------------------------------------------------------------------------------------------------------


class Maker:
    """Random operands, other ones at each call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def x(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def weight(self, *shape: int, block: Block = _SQUARE, scale: Any = "fp32", by_columns: bool = True) -> Values:
        """Data and scales of a weight `(..., K, N)`, stored by columns as `nn.Linear` keeps them, or by rows."""
        q = fp8fn.quantize(torch.randn(*shape, device=self.device) / shape[-2] ** 0.5, block, scale=scale)
        data = bits(q.data)
        data = data.mT.contiguous().mT if by_columns else data.contiguous()
        return data.view(q.data.dtype), q.scale

    def rows(self, *shape: int, block: Block, scale: Any = "fp32") -> Values:
        q = fp8fn.quantize(self.x(*shape), block, scale=scale)
        return q.data, q.scale


def cases(device: torch.device, *, forced: bool) -> Iterator[Case]:
    """All cases; with `forced` also those that launch a kernel of Hopper's which the op's tables would not take."""
    sizes, make = SIZES[device.type], Maker(device)
    yield from _a16w8(sizes, make)
    yield from _mx(sizes, make)
    yield from _chains(sizes, make)
    yield from _quantized_first(sizes, make)
    yield from _dense_and_grouped(sizes, make)
    yield from _quantizers(sizes, make)
    if forced:
        yield from _forced_a16w8(sizes, make)
        yield from _forced_mx(sizes, make)


def _a16w8(sizes: Sizes, make: Maker) -> Iterator[Case]:
    n, k = sizes.n, sizes.k

    def case(name: str, m: int, block: Block, *, constant: bool = False, batch: tuple[int, ...] = (),
             by_columns: bool = True, bias: bool = False, dtype: torch.dtype = BF16) -> Case:  # fmt: skip
        shape = (n // 4, k // 4) if batch else (n, k)

        def values() -> Values:
            weight = make.weight(*batch, shape[1], shape[0], block=block, by_columns=by_columns)
            more = (make.x(shape[0]),) if bias else ()
            return make.x(*batch, m, shape[1], dtype=dtype), *weight, *more

        def product(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Sequence[Tensor]:
            return (torch.ops.fp8fn.mm_a16w8(x, w, scale, block, bias, None, constant),)

        return Case(f"mm_a16w8 M={m} {name}{' constant' * constant}", values, product, 1 if constant else None)

    for m in sizes.rows:
        for constant in (False, True):
            yield case("128x128", m, _SQUARE, constant=constant)
    for m in sizes.rows[::3]:
        yield case("columns", m, (128, 1), bias=True)
        yield case("by rows", m, (-1, 1), by_columns=False, dtype=FP16)
        yield case("batch", m, _SQUARE, batch=(4,), bias=True)
        yield case("whole batch", m, (-1, -1), batch=(3,), constant=True)


def _mx(sizes: Sizes, make: Maker) -> Iterator[Case]:
    def case(m: int, *, constant: bool = False, batch: tuple[int, ...] = (), bias: bool = False) -> Case:
        n, k = (sizes.n // 4, sizes.k // 4) if batch else (sizes.n, sizes.k)

        def values() -> Values:
            a = make.rows(*batch, m, k, block=(1, 32), scale="e8m0")
            return *a, *make.weight(*batch, k, n, block=(32, 1), scale="e8m0"), *((make.x(n),) if bias else ())

        def product(*operands: Tensor) -> Sequence[Tensor]:
            return (torch.ops.fp8fn.mx_mm(*operands[:4], operands[4] if bias else None, None, constant),)

        name = f"mx_mm M={m}{' batch' * bool(batch)}{' bias' * bias}{' constant' * constant}"
        return Case(name, values, product, 2 if constant else None)

    for m in sizes.rows:
        for constant in (False, True):
            yield case(m, constant=constant)
    for m in sizes.rows[::3]:
        yield case(m, batch=(4,))
        yield case(m, bias=True)


def _chains(sizes: Sizes, make: Maker) -> Iterator[Case]:
    """Product after product, each of what the one before it makes, so that our launches follow one another."""
    n = sizes.n

    def a16w8(m: int, *, constant: bool = False, rewritten: bool = False) -> Case:
        """`rewritten`: the second product's weight is written between the two."""

        def values() -> Values:
            return make.x(m, n), *(part for _ in range(3) for part in make.weight(n, n))

        def product(x: Tensor, *parts: Tensor) -> Sequence[Tensor]:
            made = [x]
            for w, scale in zip(parts[::2], parts[1::2], strict=True):
                if rewritten and len(made) == 2:
                    w, scale = copied((w, scale))
                made.append(torch.ops.fp8fn.mm_a16w8(made[-1], w, scale, _SQUARE, None, None, constant))
            return made[1:]

        name = f"chain mm_a16w8 M={m}{' rewritten' * rewritten}{' constant' * constant}"
        return Case(name, values, product, 1 if constant else None)

    def mx(m: int) -> Case:
        def values() -> Values:
            return make.x(m, n), *(part for _ in range(3) for part in make.weight(n, n, block=(32, 1), scale="e8m0"))

        def product(x: Tensor, *parts: Tensor) -> Sequence[Tensor]:
            made = [x]
            for w, scale in zip(parts[::2], parts[1::2], strict=True):
                a = torch.ops.fp8fn.quantize(made[-1], (1, 32), None, "e8m0")
                made.append(torch.ops.fp8fn.mx_mm(*a, w, scale))
            return made[1:]

        return Case(f"chain quantize, mx_mm M={m}", values, product)

    def behind_another(m: int, dtype: torch.dtype = BF16) -> Case:
        """The operands are written two launches ahead; the one between has a row of `dtype`, by Triton in float32."""

        def values() -> Values:
            return make.x(m, n), *make.weight(n, n), make.x(1, n).to(dtype), *make.weight(n, n)

        def product(x: Tensor, w: Tensor, scale: Tensor, *other: Tensor) -> Sequence[Tensor]:
            first = torch.ops.fp8fn.mm_a16w8(*other, _SQUARE)
            return first, torch.ops.fp8fn.mm_a16w8(x, w, scale, _SQUARE)

        other = "one by Triton" if dtype == FP32 else "another"
        return Case(f"chain mm_a16w8 M={m} behind {other}", values, product)

    for m in sizes.rows:
        yield a16w8(m)
        yield behind_another(m)
        yield behind_another(m, FP32)
        yield mx(m)
    for m in sizes.rows[::3]:
        yield a16w8(m, constant=True)
        yield a16w8(m, rewritten=True)


def _quantized_first(sizes: Sizes, make: Maker) -> Iterator[Case]:
    """Operands that our quantizers write right before the product."""
    n, k = sizes.n, sizes.k

    def case(name: str, m: int, product: Product) -> Case:
        return Case(f"quantize, {name} M={m}", lambda: (make.x(m, k), make.x(n, k) / k**0.5), product)

    def a16w8(block: Block) -> Product:
        def product(x: Tensor, w: Tensor) -> Sequence[Tensor]:
            data, scale = torch.ops.fp8fn.quantize(w.mT, block)
            return data, scale, torch.ops.fp8fn.mm_a16w8(x, data, scale, block)

        return product

    def by_columns(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        data, scale = torch.ops.fp8fn.quantize(w, (-1, 1))
        return data, scale, torch.ops.fp8fn.mm_a16w8(x, data, scale, (-1, 1))

    def mx(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        a = torch.ops.fp8fn.quantize(x, (1, 32), None, "e8m0")
        b = torch.ops.fp8fn.quantize(w.mT, (32, 1), None, "e8m0")
        return *a, *b, torch.ops.fp8fn.mx_mm(*a, *b)

    def dense(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        a = torch.ops.fp8fn.quantize(x, (1, 128))
        b = torch.ops.fp8fn.quantize(w.mT, _SQUARE)
        return *a, *b, torch.ops.fp8fn.scaled_mm(*a, (1, 128), *b, _SQUARE)

    for m in sizes.rows:
        yield case("mx_mm", m, mx)
    for m in sizes.rows[::2]:
        yield case("mm_a16w8 128x128", m, a16w8(_SQUARE))
        yield case("mm_a16w8 whole columns", m, a16w8((-1, 1)))
        yield case("scaled_mm", m, dense)
        yield Case(
            f"quantize by columns, mm_a16w8 M={m}",
            lambda m=m: (make.x(m, 4 * k), make.x(4 * k, n) / (4 * k) ** 0.5),  # type: ignore[misc]
            by_columns,
        )


def _dense_and_grouped(sizes: Sizes, make: Maker) -> Iterator[Case]:
    n, k, experts, tokens = sizes.n // 2, sizes.k // 2, sizes.experts, sizes.tokens
    offsets = torch.arange(1, experts + 1, device=make.device, dtype=torch.int32) * (tokens // experts) - 3

    def dense(m: int, a_block: Block, b_block: Block) -> Case:
        return Case(
            f"scaled_mm M={m} {a_block}·{b_block}",
            lambda: (*make.rows(m, k, block=a_block), *make.weight(k, n, block=b_block)),
            lambda a, a_scale, b, b_scale: (torch.ops.fp8fn.scaled_mm(a, a_scale, a_block, b, b_scale, b_block),),
        )

    for m in sizes.rows[-3:]:
        yield dense(m, (1, 128), _SQUARE)
        yield dense(m, (1, -1), (-1, 1))

    def groups(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, offsets: Tensor) -> Sequence[Tensor]:
        return (torch.ops.fp8fn.scaled_grouped_mm(a, a_scale, (1, 128), w, w_scale, _SQUARE, offsets),)

    yield Case(
        "scaled_grouped_mm",
        lambda: (*make.rows(tokens, k, block=(1, 128)), *make.weight(experts, k, n), offsets),
        groups,
    )

    def summed(a: Tensor, b: Tensor, offsets: Tensor) -> Sequence[Tensor]:
        left, right = (torch.ops.fp8fn.quantize_grouped(x, offsets, (128, 1)) for x in (a, b))
        parts = (left[0].mT, left[1].mT, (1, 128), *right, (128, 1))
        return *left, *right, torch.ops.fp8fn.scaled_grouped_mm(*parts, offsets)

    yield Case("quantize_grouped, scaled_grouped_mm", lambda: (make.x(tokens, k), make.x(tokens, n), offsets), summed)

    def routed(m: int, *, mx: bool, quantized: bool = False) -> Case:
        a_block: Block = (1, 32) if mx else (1, 128)
        w_block: Block = (32, 1) if mx else _SQUARE
        scale = "e8m0" if mx else "fp32"
        top_k = 2

        def values() -> Values:
            chosen = torch.randint(0, experts, (m, top_k), device=make.device)
            layout = fp8fn.sort_tokens(chosen, experts, 16)
            a = (make.x(m, k),) if quantized else make.rows(m, k, block=a_block, scale=scale)
            return *layout, *a, *make.weight(experts, k, n, block=w_block, scale=scale)

        def product(ids: Tensor, of_tiles: Tensor, padded: Tensor, *parts: Tensor) -> Sequence[Tensor]:
            a = torch.ops.fp8fn.quantize(parts[0], a_block, None, scale) if quantized else parts[:2]
            layout = ids, of_tiles, padded, top_k, top_k
            return (torch.ops.fp8fn.moe_gemm(*a, a_block, *parts[-2:], w_block, *layout),)

        return Case(f"{'quantize, ' * quantized}moe_gemm {'MX' if mx else '1x128'} M={m}", values, product)

    for m in sizes.rows[:-3:2]:
        yield routed(m, mx=True)
        yield routed(m, mx=True, quantized=True)
    yield routed(sizes.rows[-1], mx=True)
    yield routed(sizes.rows[1], mx=False)


def _quantizers(sizes: Sizes, make: Maker) -> Iterator[Case]:
    ops, k, tokens = torch.ops.fp8fn, sizes.k, sizes.tokens
    for block, scale in (
        ((1, 128), "fp32"), ((128, 1), "fp32"), (_SQUARE, "pow2"), ((1, 32), "e8m0"), ((32, 1), "rceil"),
        ((1, -1), "fp32"), ((-1, 1), "fp32"), ((-1, -1), "fp32"),
    ):  # fmt: skip

        def quantize(x: Tensor, block: Block = block, scale: str = scale) -> Sequence[Tensor]:
            return ops.quantize(x, block, None, scale)

        yield Case(f"quantize {block} {scale}", lambda: (make.x(tokens, k),), quantize)
    for block in ((1, 128), _SQUARE, (1, -1)):

        def dual(x: Tensor, block: Block = block) -> Sequence[Tensor]:
            return ops.quantize_dual(x, block)

        yield Case(f"quantize_dual {block}", lambda: (make.x(tokens, k),), dual)
    yield Case(
        "quantize_silu_mul_dual",
        lambda: (make.x(tokens, k), make.x(tokens, k)),
        lambda gate, up: ops.quantize_silu_mul_dual(gate, up),
    )
    yield Case(
        "quantize_rms_norm_dual", lambda: (make.x(tokens, k), make.x(k)), lambda x, w: ops.quantize_rms_norm_dual(x, w)
    )


def _forced_a16w8(sizes: Sizes, make: Maker) -> Iterator[Case]:
    n, k = sizes.n, sizes.k
    for module, rows, constants in (
        (gemv_a16w8, (*ROWS,), (False,)), (a16w8_tiles, ROWS[:6], (False, True)), (splitk_a16w8, ROWS, (False, True)),
        (mm_a16w8, ROWS, (False, True)),
    ):  # fmt: skip
        for m in rows:
            for constant in constants:
                product = _forced_product(module, constant)
                name = f"{module.__name__.rpartition('.')[2]} M={m}{' constant' * constant}"
                yield Case(name, lambda m=m: (make.x(m, k), *make.weight(k, n)), product, 1 if constant else None)  # type: ignore[misc]


def _forced_product(module: Any, constant: bool) -> Product:
    def product(x: Tensor, w: Tensor, scale: Tensor) -> Sequence[Tensor]:
        told = constant or graph_capture.readable(w, scale)
        operands = x, w, scale
        key = "stress", module.__name__, told, *map(kind, operands)
        call: Call | None = recall(key)
        if call is None:
            out = empty_output(x, w, x.dtype)
            weight = Quantized(w, scale, _SQUARE)
            given = WeightProduct(x=x, w=weight, out=out, target=targets.target_of(x.device), constant=told)
            if (reason := module.accepts(given)) is not None:
                raise Refused(reason)
            launches = module.plan(given, module.configure(given))
            call = keep(key, call_of(launches, ("x", "w", "w_scale"), given.outputs))
            assert call is not None
        return call(*operands)

    return product


def _forced_mx(sizes: Sizes, make: Maker) -> Iterator[Case]:
    n, k = sizes.n, sizes.k
    for module, constants in ((gemv_mx, (False,)), (mx_tiles, (False, True))):
        for m in ROWS[:-1]:
            for constant in constants:

                def values(m: int = m) -> Values:
                    rows = make.rows(m, k, block=(1, 32), scale="e8m0")
                    return *rows, *make.weight(k, n, block=(32, 1), scale="e8m0")

                product = _forced_mx_product(module, constant)
                name = f"{module.__name__.rpartition('.')[2]} M={m}{' constant' * constant}"
                yield Case(name, values, product, 2 if constant else None)


def _forced_mx_product(module: Any, constant: bool) -> Product:
    def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Sequence[Tensor]:
        told = constant or graph_capture.readable(b, b_scale)
        operands = a, a_scale, b, b_scale
        key = "stress", module.__name__, told, *map(kind, operands)
        call: Call | None = recall(key)
        if call is None:
            out, target = empty_output(a, b, None), targets.target_of(a.device)
            problem = problem_of(a, b, target, a_scale, b_scale, constant=told)
            if (reason := module.accepts(problem)) is not None:
                raise Refused(reason)
            config = module.configure(problem)
            product = mx_product((a, b), (a_scale, b_scale), out, target, constant=told)
            launches = module.plan(product, config)
            call = keep(key, call_of(launches, ("a", "a_scale", "b", "b_scale"), product.outputs))
            assert call is not None
        return call(*operands)

    return product


class Refused(Exception):
    """A kernel does not take a case."""


# ---- which kernels run, and what a graph may read early --------------------------------------------------------------


@contextmanager
def launches_seen() -> Iterator[set[str]]:
    """The names of the launches that are prepared inside, or started by Triton; nothing prepared before is kept."""
    seen: set[str] = set()
    prepare, run = CudaLaunch.prepare, TritonLaunch.run

    def prepared_(launch: CudaLaunch) -> Any:
        seen.add(launch.kernel.file.removesuffix(".cu") + "*" * launch.overlaps)
        return prepare(launch)

    def ran(launch: TritonLaunch) -> None:
        seen.add(f"triton {launch.name}" + "*" * launch.overlaps)
        run(launch)

    call_cache._kept.clear()
    with patched(CudaLaunch, "prepare", prepared_), patched(TritonLaunch, "run", ran):
        yield seen


@contextmanager
def answers(given: Sequence[bool] | None = None) -> Iterator[list[bool]]:
    """Records `graph_capture.readable`'s answer for each weight in turn; `given` replaces the answers."""
    readable, said = graph_capture.readable, list[bool]()

    def answer(*tensors: Tensor) -> bool:
        said.append(readable(*tensors) if given is None else given[len(said)])
        return said[-1]

    with patched(graph_capture, "readable", answer):
        yield said


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- runs ------------------------------------------------------------------------------------------------------------


class Stress:
    """Runs cases in all modes, and counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.checks: Counter[tuple[str, str]] = Counter()
        self.mismatches: Counter[tuple[str, str]] = Counter()
        self.found: list[str] = []
        self.early: Counter[bool] = Counter()
        self.last = 0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def warm(self, found: Sequence[Case], jobs: int, seconds: float) -> None:
        """Compiles what the cases launch, also where a graph may read weights early, and notes which kernels these are.

        A case that is not compiled after half of so many seconds, for each of the two, is left out.
        """
        for early in (False, True):
            until = time.monotonic() + seconds / 2
            with patched(graph_capture, "readable", lambda *tensors, early=early: early):
                if jobs > 1:  # NVRTC compiles without Python's lock
                    pool = ThreadPoolExecutor(jobs)
                    futures = {pool.submit(_compile, case): case for case in found if not case.fault}
                    _, late = wait(futures, timeout=max(until - time.monotonic(), 0))
                    for future in late:
                        futures[future].fault = "refused: it was not compiled in time"
                    pool.shutdown(cancel_futures=True)
                for case in found:
                    if not case.fault:
                        case.kernels[early] |= _launched(case)
        self.synchronize()

    def run(self, case: Case, mode: str, rounds: int, start: int) -> None:
        """`rounds` checks of a case in a mode, the values in turn from `start` on."""
        sets = [case.make() for _ in range(_VALUES + 1)]  # the last for what a graph is warmed up with
        if case.moving is not None:  # the rest stays as it is
            sets = [(*values[: case.moving], *sets[0][case.moving :]) for values in sets]
        slots = tuple(map(like, sets[0]))
        moving = len(slots) if case.moving is None else case.moving
        _write(slots[moving:], sets[0][moving:], "copy", {})
        writer = WRITERS[start % len(WRITERS)]
        self.last = start // len(WRITERS)
        run = getattr(self, f"_{mode}")(case, slots, sets, moving, writer)
        expected = self._expected(case, sets, run.answers)
        wrong = torch.zeros(rounds, dtype=torch.bool, device=self.device)
        self.synchronize()
        for i in range(rounds):
            index = (start + i) % _VALUES
            for out, exact in zip(run(index), expected[index], strict=True):
                wrong[i] |= (bits(out) != bits(exact)).any()
        self.synchronize()
        key = case.kernel(any(run.answers)), mode
        self.checks[key] += rounds
        if failed := int(wrong.sum()):
            self.mismatches[key] += failed
            self.found.append(f"{case.name}, {mode}, written by {writer}: {failed} of {rounds} wrong")

    def _expected(self, case: Case, sets: Sequence[Values], said: Sequence[bool]) -> list[list[Tensor]]:
        found = []
        self.early.update(said)
        for values in sets[:_VALUES]:
            values = copied(values)
            self.synchronize()
            with answers(said or None):
                outs = case.product(*values)
            self.synchronize()
            found.append([like(out) for out in outs])
            for to, out in zip(found[-1], outs, strict=True):
                bits(to).copy_(bits(out))
        self.synchronize()
        return found

    def _eager(self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str) -> Run:
        staged = [_staged(values[:moving], writer) for values in sets]
        scratch: dict[int, Tensor] = {}

        def run(index: int) -> Sequence[Tensor]:
            if self.cuda:
                torch.cuda._sleep(_SLEEP)
            _write(slots[:moving], staged[index], writer, scratch, self.last)
            return case.product(*slots)

        return Run(run)

    def _streams(self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str) -> Run:
        run = self._eager(case, slots, sets, moving, writer)
        if not self.cuda:
            return run
        staged = [_staged(values[:moving], writer) for values in sets]
        writes, multiplies = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        scratch: dict[int, Tensor] = {}
        current = torch.cuda.current_stream(self.device)

        def two(index: int) -> Sequence[Tensor]:
            writes.wait_stream(multiplies)
            writes.wait_stream(current)
            with torch.cuda.stream(writes):
                torch.cuda._sleep(_SLEEP)
                _write(slots[:moving], staged[index], writer, scratch, self.last)
            multiplies.wait_stream(writes)
            with torch.cuda.stream(multiplies):
                outs = case.product(*slots)
            current.wait_stream(multiplies)
            for out in outs:
                out.record_stream(current)
            return outs

        return Run(two)

    def _inside(self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str) -> Run:
        return self._graph(case, slots, sets, moving, writer, inside=moving)

    def _first(self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str) -> Run:
        return self._graph(case, slots, sets, moving, writer, inside=0)

    def _behind(self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str) -> Run:
        return self._graph(case, slots, sets, moving, writer, inside=1)

    def _graph(
        self, case: Case, slots: Values, sets: Sequence[Values], moving: int, writer: str, *, inside: int
    ) -> Run:
        """A graph that writes the first operands, so many, and multiplies; the others are written before a replay."""
        staged = [_staged(values[:moving], writer) for values in sets]
        staging = tuple(map(like, staged[0][:inside]))
        scratch: dict[int, Tensor] = {}

        def captured_part() -> Sequence[Tensor]:
            _write(slots[:inside], staging, writer, scratch, self.last)
            return case.product(*slots)

        _write(slots, sets[-1], "copy", {})
        _write(staging, staged[-1][:inside], "copy", {})
        graph, said, outs = None, list[bool](), captured_part()
        if self.cuda:
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not by torch.cuda.graph, which empties PyTorch's cache each time.
            with torch.cuda.stream(torch.cuda.Stream(self.device)), answers() as said:
                graph.capture_begin()
                try:
                    outs = captured_part()
                finally:
                    graph.capture_end()
            self.synchronize()

        def run(index: int) -> Sequence[Tensor]:
            if self.cuda:
                torch.cuda._sleep(_SLEEP)
            _write(staging, staged[index][:inside], "copy", {})
            _write(slots[inside:moving], staged[index][inside:], writer, scratch, self.last)
            if graph is None:
                return captured_part()
            graph.replay()
            return outs

        return Run(run, tuple(said))


def _compile(case: Case) -> None:
    """Compiles what a case launches; whether that works is for `_launched` to say."""
    with suppress(Exception):
        case.product(*case.make())


def _launched(case: Case) -> set[str]:
    """The names of the kernels of a case, or why it does not run, in its `fault`."""
    try:
        values = case.make()
        with launches_seen() as seen:
            case.product(*values)
        return seen
    except Refused as reason:
        case.fault = f"refused: {reason}"
    except Exception as error:
        case.fault = f"{type(error).__name__}: {error}"
    return set()


@dataclass(frozen=True)
class Run:
    """One check, given the values' index; and what was said of each weight while it was captured."""

    once: Callable[[int], Sequence[Tensor]]
    answers: tuple[bool, ...] = ()

    def __call__(self, index: int) -> Sequence[Tensor]:
        return self.once(index)


def _by_product(x: Tensor) -> bool:
    """Whether a product with the identity writes `x`."""
    return x.dtype == BF16 and x.dim() == 2 and x.is_contiguous()


def _staged(values: Values, writer: str) -> Values:
    """The tensors that `_write` reads to write these values."""
    if writer != "elementwise":
        return values
    made = copied(values)
    for x in made:
        torch.bitwise_not(bits(x), out=bits(x))
    return made


def _write(to: Values, values: Values, writer: str, scratch: dict[int, Tensor], last: int = 0) -> None:
    """Writes operands, that of number `last` right before what follows."""
    pairs = list(zip(to, values, strict=True))
    at = last % len(pairs) if pairs else 0
    for slot, x in (*pairs[at + 1 :], *pairs[: at + 1]):
        if writer == "elementwise":
            torch.bitwise_not(bits(x), out=bits(slot))
        elif writer == "cublas" and _by_product(slot):
            k = slot.shape[1]
            if k not in scratch:
                scratch[k] = torch.eye(k, dtype=BF16, device=slot.device)
            torch.mm(x, scratch[k], out=slot)
        else:
            bits(slot).copy_(bits(x))


def stress(found: Sequence[Case], run: Stress, *, checks: int, seconds: float, rounds: int, jobs: int) -> None:
    """Runs cases in turn until there were as many checks, or the time is over."""
    began = time.monotonic()
    run.warm(found, jobs, seconds * 0.6)
    taken = [case for case in found if not case.fault]
    print(f"{len(taken)} of {len(found)} cases compiled in {time.monotonic() - began:.0f} s", flush=True)
    for start in count():
        for index, case in enumerate(taken):
            for mode in MODES:
                if case.fault:
                    continue
                try:
                    run.run(case, mode, rounds, start + index)
                except Exception as error:
                    case.fault = f"{mode}: {type(error).__name__}: {error}"
            if time.monotonic() - began > seconds:
                return
        spent = time.monotonic() - began
        print(f"{run.checks.total()} checks, {run.mismatches.total()} wrong, {spent:.0f} s", flush=True)
        if run.checks.total() >= checks or all(case.fault for case in taken):
            return


def table(run: Stress) -> str:
    """A line for each kernel: wrong results of all, in each mode."""
    kernels = sorted({kernel for kernel, _ in run.checks})
    width = max(map(len, kernels), default=0)
    lines = [f"{'kernels (* overlaps)':{width}}  " + "  ".join(f"{mode:>9}" for mode in MODES)]
    for kernel in kernels:
        cells = [f"{run.mismatches[kernel, mode]}/{run.checks[kernel, mode]}" for mode in MODES]
        lines.append(f"{kernel:{width}}  " + "  ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        target = targets.target_of(device)
        if target.name != "sm90" or nvrtc.unavailable():
            raise SystemExit(f"early launches are of Hopper's kernels: {nvrtc.unavailable() or target.name}")
        print(torch.cuda.get_device_name(device), flush=True)
    torch.manual_seed(args.seed)
    found = [
        case for case in cases(device, forced=on_gpu) if not args.only or any(part in case.name for part in args.only)
    ]
    jobs = args.jobs if on_gpu else 1
    run = Stress(device)
    stress(found, run, checks=args.checks, seconds=args.seconds, rounds=args.rounds, jobs=jobs)
    print(f"\n{table(run)}\n")
    refused = [case for case in found if case.fault.startswith("refused")]
    faults = [case for case in found if case.fault and case not in refused]
    for case in (*faults, *refused):
        print(f"{case.name}: {case.fault}")
    for line in run.found:
        print(f"WRONG {line}")
    print(f"{run.checks.total()} checks, {run.mismatches.total()} wrong, {len(faults)} cases failed")
    if args.json:
        rows = [
            {"kernels": kernel, "mode": mode, "checks": number, "wrong": run.mismatches[kernel, mode]}
            for (kernel, mode), number in sorted(run.checks.items())
        ]
        document = {
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "torch": torch.__version__,
            "checks": run.checks.total(), "wrong": run.mismatches.total(), "found": run.found, "rows": rows,
            "weights read early in graphs": run.early[True], "weights waited for in graphs": run.early[False],
            "faults": {case.name: case.fault for case in (*faults, *refused)},
        }  # fmt: skip
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    enough = run.checks.total() >= args.checks
    if not enough:
        print(f"fewer than the {args.checks} checks asked for; give more --seconds")
    return 0 if enough and not run.found and not faults else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="by default %(default)s")
    parser.add_argument("--checks", type=int, default=5000, help="in all, by default %(default)s")
    parser.add_argument("--seconds", type=float, default=150, help="at most, by default %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="checks of a case and a mode in turn")
    parser.add_argument("--only", nargs="+", default=[], metavar="SUBSTRING", help="cases with it in the name")
    parser.add_argument("--jobs", type=int, default=12, help="threads that compile, by default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
