"""The declaration of a kernel, from which its tests are generated: forms, operands, expected results.

A `KernelInfo` yields `Form`s: launches at small shapes, one for each main configuration, on `Operands` that know what
must come out of them. The operands lie among poison: bytes that are NaN in every type around inputs, and a pattern
around and in outputs, so that a load outside of an input shows in a value and a store outside of an output in the
pattern. `tests/kernels/test_generated.py` has the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn import ScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import Quantization, Quantized, RoutedProduct, ScaledProduct
from fp8fn.ops.targets import Target
from support.accuracy import differing
from support.cuda_emulator import extent
from support.far import FAR, far
from support.operands.experts import by_hand

FRAME: Final = 4096
"""Bytes of poison before and after a tensor, a multiple of every alignment."""
NAN: Final = 0xFF
"""As a byte of FP8 or e8m0 and repeated as a float of any width a NaN, and -1 as an integer."""
UNWRITTEN: Final = 0x53
E8M0, FP8 = torch.float8_e8m0fnu, (torch.float8_e4m3fn, torch.float8_e5m2)


class Expected(NamedTuple):
    """The exact value of an output in float64, and the sum of the magnitudes of its terms.

    Without magnitudes `value` is in the output's own type, bit by bit. What `written` leaves out keeps its poison.
    """

    value: Tensor
    magnitude: Tensor | None = None
    written: Tensor | None = None
    near: bool = False
    """Whether rounding may differ: scales by 1e-5 of their value, bytes by one step where that crosses a border."""
    rounded: torch.dtype | None = None
    """With `near`: the type that values are rounded to before their blocks' largest magnitudes are found."""


@dataclass(frozen=True)
class Place:
    """The place of operands: a device, `meta` for launches that only compile, and the axis that lies far apart."""

    device: torch.device
    far: tuple[str, int] | None = None
    """An input and its axis along which elements are further apart than 32 bits reach."""
    framed: bool = True
    """Whether operands lie among poison, or each is an allocation of its own, whose ends a sanitizer watches."""


@dataclass
class Operands:
    """The tensors of one form. `expected` gives the outputs by name, from the inputs as they are when it is called."""

    place: Place
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    expected: Callable[[], dict[str, Expected]] = dict
    _memory: dict[str, Tensor] = field(default_factory=dict)

    def input(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, strides: Sequence[int] | None = None,
        values: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """An input of these `values`, or of random finite ones."""
        like = torch.empty(shape, dtype=dtype, device="meta") if strides is None else _strided(shape, strides, dtype)
        if self.place.device.type == "meta":
            self.inputs[name] = like
            return like
        values = random_values(shape, dtype) if values is None else values
        if self.place.far is not None and self.place.far[0] == name:
            axis = self.place.far[1] % like.dim()
            apart = [FAR if a == axis else stride for a, stride in enumerate(like.stride())]
            bits = values.view(torch.uint8) if dtype in (*FP8, E8M0) else values
            self.inputs[name] = far(bits, apart).view(dtype)
            return self.inputs[name]
        tensor = self._framed(name, like, NAN)
        tensor.copy_(values)
        self.inputs[name] = tensor
        return tensor

    def output(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, strides: Sequence[int] | None = None
    ) -> Tensor:
        like = torch.empty(shape, dtype=dtype, device="meta") if strides is None else _strided(shape, strides, dtype)
        self.outputs[name] = like if self.place.device.type == "meta" else self._framed(name, like, UNWRITTEN)
        return self.outputs[name]

    def like(self, name: str, x: Tensor, *, output: bool = False) -> Tensor:
        """An operand with the shape, strides and type of `x`."""
        make: Callable[..., Tensor] = self.output if output else self.input
        return make(name, x.shape, x.dtype, strides=x.stride())

    def quantized(
        self, name: str, shape: Sequence[int], block: Block, *, column_major: bool, scale: str = "fp32",
        dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> Quantized:  # fmt: skip
        """An input as the quantizers lay it out."""
        data = empty_data(torch.empty(tuple(shape), device="meta"), block, dtype, column_major)
        scales = empty_scale(data, block, scale, column_major)
        return Quantized(self.like(name, data), self.like(f"{name}_scale", scales), block)

    def clear(self) -> None:
        """Poison the outputs again."""
        for name in self.outputs:
            self._memory[name].fill_(UNWRITTEN)

    def found(self) -> dict[str, Tensor]:
        """Copies of the outputs."""
        return {name: x.clone() for name, x in self.outputs.items()}

    def bytes_of_inputs(self) -> dict[str, Tensor]:
        """Copies of the inputs with what lies around them."""
        return {name: self._memory[name].clone() for name in self.inputs if name in self._memory}

    def check(self, bound: float) -> None:
        """The outputs are what is expected, within `bound` of the magnitudes, and nothing else was written."""
        for name, wanted in self.expected().items():
            found = self.outputs[name]
            written = torch.ones(found.shape, dtype=torch.bool) if wanted.written is None else wanted.written.cpu()
            assert_expected(name, found.cpu(), wanted, written, bound)
            marks = torch.zeros(self._memory[name].shape, dtype=torch.bool)
            size, start = found.element_size(), FRAME
            for byte in range(size):
                marks.as_strided(found.shape, [size * stride for stride in found.stride()], start + byte)[written] = (
                    True
                )
            assert (self._memory[name].cpu()[~marks] == UNWRITTEN).all(), f"written outside of {name}"

    def _framed(self, name: str, like: Tensor, poison: int) -> Tensor:
        if not self.place.framed:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.place.device)
        size = extent(like.shape, like.stride()) * like.element_size()
        size = -(-size // FRAME) * FRAME
        memory = torch.full((size + 2 * FRAME,), poison, dtype=torch.uint8, device=self.place.device)
        self._memory[name] = memory
        first = FRAME // like.element_size()
        return memory.view(like.dtype).as_strided(like.shape, like.stride(), first)


class Form(NamedTuple):
    """Launches, in order, that fill the outputs of `operands`."""

    name: str
    launches: tuple[Any, ...]
    operands: Operands


Forms = Iterator[Form]


@dataclass(frozen=True)
class KernelInfo:
    """One kernel file, and all that its generated tests need to know."""

    file: str
    """The .cu, .hip or Triton module that it launches."""
    forms: Callable[[Place, Target], Forms]
    """Plans of the main configurations at small shapes, under names of their own."""
    bound: float | None = None
    """The largest error on the CPU, as a share of the sum of the magnitudes of a value's terms; None: exact bytes."""
    gpu_bound: float | None = None
    """The same on a GPU, whose tensor cores keep fewer bits of an FP8 sum."""
    overlaps: bool = False
    """Whether it uses programmatic dependent launch: whether it may begin while the launch before it ends."""
    early: frozenset[str] = frozenset()
    """The inputs that a form may read before it waits for the launches before it."""
    emulated: tuple[str, ...] = ("",)
    """Beginnings of the names of forms; the first form of each runs on the CPU, all run on a GPU."""
    spilling: tuple[str, ...] = ()
    """Names of forms in a configuration that spills registers, so that no call takes it by default."""
    nan: tuple[str, ...] = ()
    """Inputs in which a NaN must stay inside its block's outputs."""
    targets: tuple[str, ...] = ("sm90",)
    """The processors that it may run on."""
    far: tuple[tuple[str, int], ...] = ()
    """Inputs and their axes whose elements may lie further apart than 32 bits reach."""

    @property
    def name(self) -> str:
        return self.file.partition(".")[0]

    def few(self, place: Place, target: Target) -> Forms:
        """The first form of each beginning in `emulated`."""
        left = list(self.emulated)
        for form in self.forms(place, target):
            for beginning in left:
                if form.name.startswith(beginning):
                    left.remove(beginning)
                    yield form
                    break
            if not left:
                return
        assert not left, f"{self.file} has no form that begins with {left}"


def assert_expected(name: str, found: Tensor, wanted: Expected, written: Tensor, bound: float) -> None:
    value = wanted.value.cpu()
    assert found.shape == value.shape, (name, found.shape, value.shape)
    if wanted.near:
        assert_near_bits(name, found[written], value[written], wanted.rounded)
        return
    if wanted.magnitude is None:
        assert found.dtype == value.dtype, name
        count = differing(found[written], value[written])
        assert count == 0, f"{name}: {count} of {found.numel()} differ"
        return
    error = bound * wanted.magnitude.cpu()
    low, high = ((value + sign * error).to(found.dtype) for sign in (-1, 1))
    right = (low <= found) & (found <= high) | (found.isnan() & value.isnan())
    outside = ~right & written
    assert not outside.any(), (
        f"{name}: {int(outside.sum())} of {found.numel()}, first at {outside.nonzero()[0].tolist()}"
    )


def assert_near_bits(name: str, found: Tensor, expected: Tensor, rounded: torch.dtype | None = None) -> None:
    """Scales by a relative error of 1e-5, and bytes one step apart, of which there are few.

    Where values are `rounded` before, one of 200 scales may be off by one step of that type, and the bytes follow.
    """
    assert torch.equal(found.float().isnan(), expected.float().isnan()), name
    if expected.dtype not in FP8:
        if rounded is not None:
            apart = (found.float() / expected.float() - 1).abs() > 1.1e-5
            assert int(apart.sum()) <= found.numel() / 200 + 2, name
        step = 1.1e-5 if rounded is None else torch.finfo(rounded).eps
        torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=0, equal_nan=True)
        return
    number = ~expected.float().isnan()
    steps = (found.view(torch.uint8)[number].int() - expected.view(torch.uint8)[number].int()).abs()
    # Eight borders a binade, to each a 1e-5th on both sides, for the value and for its scale: 4.6e-4.
    assert bool((steps <= 1).all()), name
    assert int(steps.sum()) <= (5e-4 if rounded is None else 2e-3) * steps.numel() + 3, name


def random_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Finite values of several magnitudes, whose products and sums stay finite in 16 bits."""
    if dtype == E8M0:
        return torch.randint(122, 132, tuple(shape), dtype=torch.uint8).view(E8M0)
    spread = torch.exp2(4 * torch.rand(tuple(shape)) - 2)
    return (torch.randn(tuple(shape)) * spread).to(dtype)


def poison(x: Tensor) -> None:
    """A NaN into an element of an input: the last of a line in the middle, or the middle of one line."""
    middle = tuple(size // 2 for size in x.shape)
    element = x[middle if x.dim() == 1 else (*middle[:-1], -1)]
    if x.dtype in (*FP8, E8M0):
        element.view(torch.uint8).fill_(0x7F if x.dtype in FP8 else NAN)
    else:
        element.fill_(torch.nan)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Expected:
    """`left @ right + bias` in float64."""
    left, right = left.double(), right.double()
    value, magnitude = left @ right, left.abs() @ right.abs()
    if bias is not None:
        value, magnitude = value + bias.double(), magnitude + bias.double().abs()
    return Expected(value, magnitude.nan_to_num(0.0, 0.0, 0.0))


def dequantized(q: Quantized) -> Tensor:
    return reference.dequantize(*q).double()


def with_outputs(operands: Operands, q: Quantization) -> Quantization:
    """With outputs among the operands, laid out as the op's own."""
    like = replace(q, x=torch.empty_like(q.x, device="meta"))
    names = iter(like.outputs.tensors)
    into = tuple(
        Quantized(*(operands.like(next(names), part, output=True) for part in out[:2]), out.block) for out in like.outs
    )
    return replace(q, into=into, into_sum=None if like.sum is None else operands.like("sum", like.sum, output=True))


def spread(operands: Operands, name: str, tokens: int, width: int, offsets: Tensor, block: Block) -> Quantized:
    """Random tokens in groups, quantized and, but for whole groups, spread with the zeros that the format asks for."""
    scale = "rceil" if 32 in block else "fp32"
    like = empty_grouped(torch.empty(tokens, width, device="meta"), len(offsets), block, FP8[0], scale)
    values: Any = (None, None)
    if operands.place.device.type != "meta":
        values = reference.quantize_grouped(
            random_values((tokens, width), torch.float32), offsets, block, FP8[0], scale
        )
    data, scales = (
        operands.input(part, of.shape, of.dtype, strides=of.stride(), values=given)
        for part, of, given in zip((name, f"{name}_scale"), like, values, strict=True)
    )
    return Quantized(data, scales, block)


def grouped_product(given: ScaledProduct) -> dict[str, Expected]:
    """`out` of a grouped product by the reference in float32, whose rounding is a thousandth of a kernel's bound."""

    def magnitude(x: Tensor) -> Tensor:
        if x.dtype == torch.float8_e8m0fnu:  # which has no sign
            return x
        return x.abs() if x.dtype == torch.float32 else (x.view(torch.uint8) & 0x7F).view(x.dtype)

    def magnitudes(q: Quantized) -> Quantized:
        return Quantized(magnitude(q.data), magnitude(q.scale), q.block)

    value = reference.scaled_grouped_mm(given.a, given.b, given.group_ends, given.bias, torch.float32)
    bias = None if given.bias is None else given.bias.abs()
    terms = reference.scaled_grouped_mm(magnitudes(given.a), magnitudes(given.b), given.group_ends, bias, torch.float32)
    return {"out": Expected(value.double(), terms.double().nan_to_num(0.0, 0.0, 0.0))}


def counted_product(given: ScaledProduct, tile: int = 1) -> dict[str, Expected]:
    """`out` of each expert's first rows in float64, and zeros; without `zeros` to the end of their last tile only."""
    assert given.counts is not None
    bias = None if given.bias is None else given.bias[:, None]
    value, magnitude, *_ = product(dequantized(given.a), dequantized(given.b), bias)
    assert magnitude is not None
    rows = torch.arange(given.m, device=value.device)[:, None]
    counts = given.counts.clamp(0, given.m)[:, None, None]
    value, magnitude = (torch.where(rows < counts, part, 0.0) for part in (value, magnitude))
    written = None if given.zeros else (rows // tile * tile < counts).expand(value.shape)
    return {"out": Expected(value, magnitude, written)}


def routed_product(given: RoutedProduct) -> dict[str, Expected]:
    """`out` of a routed product; rows that no tile of an expert names keep what they had."""
    a, w, layout = ScaledTensor(*given.a), ScaledTensor(*given.w), tuple(given.routing)
    value, magnitude = by_hand(a, w, layout, given.a_div, given.token_weights)
    ids, owners = layout[0].cpu(), layout[1].cpu()
    tiles = ids.view(len(owners), -1)[(owners >= 0) & (owners < given.experts)]
    written = torch.zeros(value.shape, dtype=torch.bool)
    written[tiles[tiles < len(value)].long()] = True
    return {"out": Expected(value, magnitude.nan_to_num(0.0, 0.0, 0.0), written)}


def _strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
