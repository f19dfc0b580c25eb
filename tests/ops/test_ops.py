"""Every op of the registry: schema, opcheck, fakes, vmap and torch.compile, each with a check of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8fn
from fp8fn.meta import vmap
from fp8fn.meta.registry import OPS
from fp8fn.ops import reference
from fp8fn.ops.formats import FP8_DTYPES, SCALE_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS
from support.samples import SAMPLES, Sample

# Products are summed in another order when a batch is flattened; quantized bytes have no such freedom.
EXACT = {name for name in OPS if name.startswith("quantize")}
# The values that they quantize come of exp or rsqrt, for which a batch and a matrix may have other instructions.
PRODUCED = {name for name in OPS if name.startswith(("quantize_silu_mul", "quantize_rms_norm"))}
# Without a rule for batches, vmap calls them once for each element.
CALLED_FOR_EACH = {name for name, op in OPS.items() if op.vmap.__qualname__.startswith(f"{vmap.each.__name__}.")}
NEEDED_LABELS = ("plain", "ragged", "strided")
# The number of tensors of each sample.
TENSORS = {(name, s.label): len(s.tensors) for name in OPS for s in SAMPLES.get(name, list)()}
CASES = list(TENSORS)
NARROW = {*FP8_DTYPES, *SCALE_DTYPES} - {torch.float32}


def op_of(name: str) -> Any:
    return getattr(torch.ops.fp8fn, name)


def sample_of(name: str, label: str, seed: int = 0, device: torch.device | str = "cpu") -> Sample:
    return next(sample for sample in SAMPLES[name](seed, device) if sample.label == label)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def assert_same_bits(actual: Any, expected: Any) -> None:
    for got, want in zip(outputs(actual), outputs(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        as_bytes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
        assert torch.equal(got.view(as_bytes), want.view(as_bytes))


def assert_same_layout(actual: Any, expected: Any) -> None:
    for got, want in zip(outputs(actual), outputs(expected), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def is_exact(name: str, device: torch.device) -> bool:
    return name in EXACT and not (name in PRODUCED and device.type == "cuda")


def assert_near(actual: Any, expected: Any) -> None:
    """Equal but for the order of a float32 sum: 1e-5 in norm, and a rare rounding to the neighbour in 16 or 8 bits.

    On a GPU another number of rows may be another kernel's, and Hopper's FP8 products keep 14 bits of a sum.
    """
    for got, want in zip(outputs(actual), outputs(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        of_sums = 2**-12 if want.is_cuda else 1e-5
        bound = of_sums if want.dtype == torch.float32 else 1e-2 if want.dtype in NARROW else 1e-3
        assert (got.double() - want.double()).norm() <= bound * want.double().norm()


def assert_is_the_loop(name: str, device: torch.device, mapped: Any, looped: Any) -> None:
    same = is_exact(name, device) or name in CALLED_FOR_EACH
    (assert_same_bits if same else assert_near)(mapped, looped)


def stack(tensors: list[Tensor], dim: int) -> Tensor:
    """torch.stack, for FP8 too, for which it has no kernel on every device."""
    if tensors[0].dtype in NARROW:
        return torch.stack([t.view(torch.uint8) for t in tensors], dim).view(tensors[0].dtype)
    return torch.stack(tensors, dim)


@pytest.mark.parametrize("name", OPS)
def test_has_samples(name: str) -> None:
    """The tests below run over OPS and SAMPLES: an op without samples would pass them unseen."""
    assert name in SAMPLES, f"fp8fn::{name} has no samples: add `{name}` to tests/support/samples.py and to SAMPLES"
    labels = [sample.label for sample in SAMPLES[name]()]
    assert len(set(labels)) == len(labels), f"samples of fp8fn::{name} share a label: {labels}"
    missing = [kind for kind in NEEDED_LABELS if not any(label.startswith(kind) for label in labels)]
    assert not missing, f"fp8fn::{name} has no sample labelled {missing}: opcheck, vmap and compile would not cover it"


def test_no_samples_of_unknown_ops() -> None:
    assert set(SAMPLES) <= set(OPS), f"tests/support/samples.py names ops that don't exist: {set(SAMPLES) - set(OPS)}"


@pytest.mark.parametrize("name", OPS)
def test_declaration_is_complete(name: str) -> None:
    op = OPS[name]
    if op.composite is None:
        absent = [part for part in ("reference", "kernel", "fake", "autograd") if getattr(op, part) is None]
        assert not absent, f"the leaf op fp8fn::{name} is declared without {absent}"
    assert callable(op.vmap), f"fp8fn::{name} is declared without a vmap rule"
    assert torch.Tag.pt2_compliant_tag in op_of(name).default.tags


@pytest.mark.parametrize("name", OPS)
def test_schema_neither_mutates_nor_aliases(name: str) -> None:
    schema = op_of(name).default._schema
    assert not schema.is_mutable
    for value in (*schema.arguments, *schema.returns):
        assert value.alias_info is None, f"fp8fn::{name}: {value}"


@pytest.mark.parametrize(("name", "label"), CASES)
def test_opcheck(name: str, label: str, device: torch.device, fp8_opcheck: Callable[..., dict[str, str]]) -> None:
    _, args, kwargs = sample_of(name, label, device=device)
    result = fp8_opcheck(op_of(name).default, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}
    assert len(result) == 4


# torch's own fake check reads .grad of every tensor that an inner op receives, of a reshaped operand too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("label", [label for name, label in CASES if name == "gemm"])
def test_opcheck_gemm_with_gradients(
    label: str, device: torch.device, fp8_opcheck: Callable[..., dict[str, str]]
) -> None:
    sample = sample_of("gemm", label, device=device)
    # clone() keeps the strides of dense views; the others are leaves of a contiguous copy.
    args = sample.with_tensors(tuple(t.clone().requires_grad_() for t in sample.tensors))
    result = fp8_opcheck(op_of("gemm").default, args, sample.kwargs)
    assert set(result.values()) == {"SUCCESS"}


def with_bits(x: Tensor, bits: str) -> tuple[Tensor, Tensor]:
    """A tensor that PyTorch has to change before a kernel may read its memory, and what its values are."""
    if bits == "negative":
        return torch._neg_view(-x), x
    zero = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)  # of no memory
    return zero, torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)  # the layout that PyTorch gives it


def memory_of(x: Any) -> Any:
    """A tensor as a kernel has it, by its address: without PyTorch's bits."""
    if not isinstance(x, Tensor) or type(x) is not Tensor:
        return x
    assert x.untyped_storage().data_ptr() or x.numel() == 0, "a kernel would read at address 0"
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


@pytest.fixture
def reads_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's implementations read their inputs by address, as those of a GPU do."""
    if device.type == "cpu":
        for name in {*reference.__all__} - {"dequantize", "dequantize_grouped"}:  # PyTorch's own ops on a GPU too
            plain = getattr(reference, name)
            by_address = lambda *args, plain=plain: plain(*map(memory_of, args))  # noqa: E731
            monkeypatch.setattr(reference, name, by_address)


def largest_sample(name: str, device: torch.device) -> Sample:
    """The sample that gives the most of the optional tensors."""
    return max(SAMPLES[name](0, device), key=lambda sample: (len(sample.tensors), sample.tensors[0].numel()))


@pytest.mark.parametrize("bits", ["negative", "zero"])
@pytest.mark.parametrize("name", OPS)
def test_bits_of_a_tensor_are_no_part_of_its_memory(
    name: str, bits: str, device: torch.device, reads_memory: None
) -> None:
    """Each argument in its turn, and then all, is `z.conj().imag`, or a tensor of zeros that has no memory."""
    op, sample = op_of(name), largest_sample(name, device)
    free = [i for i, x in enumerate(sample.tensors) if x.dtype not in NARROW]  # FP8 has no negative of its bytes
    if name == "moe_gemm" and bits == "zero":  # ids of one row that several blocks write have no defined result
        ids = op.default._schema.arguments[6].name
        assert ids == "sorted_token_ids"
        free = [i for i in free if sample.tensors[i] is not sample.args[6]]
    op(*sample.args, **sample.kwargs)  # what a GPU keeps of calls is of tensors without bits
    for places in ([i] for i in free) if bits == "zero" else (*([i] for i in free), free):
        given, values = list(sample.tensors), list(sample.tensors)
        for i in places:
            given[i], values[i] = with_bits(values[i], bits)
        with torch.no_grad():
            actual = op(*sample.with_tensors(tuple(given)), **sample.kwargs)
            expected = op(*sample.with_tensors(tuple(values)), **sample.kwargs)
        (assert_same_bits if is_exact(name, device) else assert_near)(actual, expected)


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize("warm", [True, False])
def test_gradients_of_tensors_with_bits(recipe: str, warm: bool, device: torch.device, reads_memory: None) -> None:
    a, b, grad = (torch.randn(*shape, device=device) for shape in ((64, 256), (256, 128), (64, 128)))

    def gradients(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = a.detach().requires_grad_(), b.detach().requires_grad_()
        out = fp8fn.gemm(*leaves, recipe=recipe)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    if warm:  # on a GPU the second run begins to start launches together
        expected = [gradients(a, b, grad) for _ in range(3)][-1]
    negative = [with_bits(x, "negative")[0] for x in (a, b, grad)]
    actual = [gradients(*negative) for _ in range(3)]
    expected = gradients(a, b, grad)
    for each in actual:
        assert_near(each, expected)


@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
def test_scaled_tensors_whose_parts_have_bits(scale: str, device: torch.device, reads_memory: None) -> None:
    """`fp8fn.gemm` on a GPU calls their kernel itself."""
    a_block, b_block = ((1, 128), (128, 128)) if scale == "fp32" else ((1, 32), (32, 1))
    a = fp8fn.quantize(torch.randn(64, 256, device=device), a_block, scale=scale)
    b = fp8fn.quantize(torch.randn(128, 256, device=device).mT, b_block, scale=scale)
    bias = torch.randn(128, device=device)
    expected = [fp8fn.gemm(a, b, bias=bias) for _ in range(2)][-1]
    assert_near(fp8fn.gemm(a, b, bias=with_bits(bias, "negative")[0]), expected)
    if scale == "fp32":
        a_bits, b_bits = (fp8fn.ScaledTensor(q.data, with_bits(q.scale, "negative")[0], q.block) for q in (a, b))
        assert_near(fp8fn.gemm(a_bits, b, bias=bias), expected)
        assert_near(fp8fn.gemm(a, b_bits, bias=bias), expected)
        x = torch.randn(3, 256, device=device)
        for given in (x, with_bits(x, "negative")[0]):
            assert_near(fp8fn.gemm(given, b_bits, bias=bias), fp8fn.gemm(x, b, bias=bias))
        assert_near(fp8fn.dequantize(a_bits), fp8fn.dequantize(a))
    no_data = torch._efficientzerotensor(a.shape, dtype=a.data.dtype, device=device)
    assert_near(fp8fn.gemm(fp8fn.ScaledTensor(no_data, a.scale, a.block), b, bias=bias), bias.bfloat16().expand(64, -1))


@pytest.mark.parametrize(("name", "label"), CASES)
def test_same_bits_every_run_and_inputs_untouched(name: str, label: str, device: torch.device) -> None:
    _, args, kwargs = sample = sample_of(name, label, device=device)
    before = [t.clone() for t in sample.tensors]
    first = op_of(name)(*args, **kwargs)
    assert_same_bits(op_of(name)(*args, **kwargs), first)
    assert_same_bits(sample.tensors, before)


@pytest.mark.parametrize(("name", "label"), CASES)
def test_fake_layout_is_the_real_one(name: str, label: str, device: torch.device) -> None:
    _, args, kwargs = sample = sample_of(name, label, device=device)
    real = op_of(name)(*args, **kwargs)
    with FakeTensorMode() as mode:
        tensors = tuple(mode.from_tensor(t) for t in sample.tensors)
        fake = op_of(name)(*sample.with_tensors(tensors), **kwargs)
    assert_same_layout(fake, real)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.fake is not None])
def test_a_fake_has_the_errors_of_the_real_one(name: str) -> None:
    """Each tensor in its turn has dimensions too many, and a type that no op takes, where the op itself minds."""
    sample, refused = largest_sample(name, torch.device("cpu")), 0
    for place, x in enumerate(sample.tensors):
        for wrong in (x[None, None, None], torch.empty_like(x, dtype=torch.int16)):
            tensors = (*sample.tensors[:place], wrong, *sample.tensors[place + 1 :])
            try:
                op_of(name)(*sample.with_tensors(tensors), **sample.kwargs)
            except (TypeError, ValueError) as error:
                kind, words = type(error), str(error)
            else:
                continue
            with FakeTensorMode() as mode, pytest.raises(kind) as fake:
                op_of(name)(*sample.with_tensors(tuple(map(mode.from_tensor, tensors))), **sample.kwargs)
            assert str(fake.value) == words
            refused += 1
    assert refused >= len(sample.tensors)


@pytest.mark.parametrize("name", OPS)
def test_vmap_over_nothing_has_the_shapes_of_one(name: str) -> None:
    sample = sample_of(name, "plain")
    one = outputs(op_of(name)(*sample.args, **sample.kwargs))
    nothing = tuple(x.new_empty((0, *x.shape)) for x in sample.tensors)

    def call(*tensors: Tensor) -> Any:
        return op_of(name)(*sample.with_tensors(tensors), **sample.kwargs)

    mapped = outputs(torch.func.vmap(call)(*nothing))
    assert [(x.shape, x.dtype) for x in mapped] == [((0, *x.shape), x.dtype) for x in one]


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_fake_layout_of_every_block(block: tuple[int, int], scale: str, device: torch.device) -> None:
    base = torch.randn(2, 66, 140, device=device).bfloat16()
    for x in (base, base.mT, base[0], base[0].mT, base[:, ::2, ::2], base[:, :0], base[..., :1], base.movedim(0, -1)):
        for dtype in FP8_DTYPES:
            with FakeTensorMode() as mode:
                fake = torch.ops.fp8fn.quantize(mode.from_tensor(x), block, dtype, scale)
            assert_same_layout(fake, torch.ops.fp8fn.quantize(x, block, dtype, scale))


def vmapped(name: str, label: str, dim: int, device: torch.device, unmapped: int | None = None) -> tuple[Any, Any]:
    """The op under vmap over three versions of a sample's tensors stacked along `dim`, and by a loop over them."""
    versions = [sample_of(name, label, seed, device) for seed in range(3)]
    columns = list(zip(*[version.tensors for version in versions], strict=True))
    in_dims: list[int | None] = [dim] * len(columns)
    if unmapped is not None:
        in_dims[unmapped] = None
    stacked = [
        column[0] if at is None else stack(list(column), at) for column, at in zip(columns, in_dims, strict=True)
    ]

    def call(*tensors: Tensor) -> Any:
        return op_of(name)(*versions[0].with_tensors(tensors), **versions[0].kwargs)

    mapped = torch.vmap(call, in_dims=tuple(in_dims))(*stacked)
    # A slice of a stack has other strides than what was stacked, and thereby perhaps another kernel.
    slices = [[x if at is None else x.select(at, i) for x, at in zip(stacked, in_dims, strict=True)] for i in range(3)]
    looped = [outputs(call(*tensors)) for tensors in slices]
    return mapped, tuple(stack(list(parts), 0) for parts in zip(*looped, strict=True))


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("name", "label"), CASES)
def test_vmap_is_the_loop(name: str, label: str, dim: int, device: torch.device) -> None:
    assert_is_the_loop(name, device, *vmapped(name, label, dim, device))


@pytest.mark.parametrize(
    ("name", "label", "unmapped"),
    [(*case, i) for case, count in TENSORS.items() if count > 1 for i in range(count)],
)
def test_vmap_with_one_operand_for_all(name: str, label: str, unmapped: int, device: torch.device) -> None:
    assert_is_the_loop(name, device, *vmapped(name, label, 1, device, unmapped))


@pytest.mark.parametrize(("name", "label"), CASES)
def test_nested_vmap_is_the_loop(name: str, label: str, device: torch.device) -> None:
    versions = [[sample_of(name, label, 2 * i + j, device) for j in range(2)] for i in range(2)]

    def call(*tensors: Tensor) -> Any:
        return op_of(name)(*versions[0][0].with_tensors(tensors), **versions[0][0].kwargs)

    count = len(versions[0][0].tensors)
    # The outer dimension is the last of the stack, the inner one the first.
    rows = [[stack([v.tensors[t] for v in row], 0) for row in versions] for t in range(count)]
    stacked = [stack(row, -1) for row in rows]
    mapped = torch.vmap(torch.vmap(call), in_dims=-1)(*stacked)
    looped = [[outputs(call(*(x.select(-1, i).select(0, j) for x in stacked))) for j in range(2)] for i in range(2)]
    expected = tuple(
        stack([stack([looped[i][j][part] for j in range(2)], 0) for i in range(2)], 0)
        for part in range(len(looped[0][0]))
    )
    assert_is_the_loop(name, device, mapped, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_of_gemm_with_mapped_bias_rounds_once_to_autocasts_type(dim: int) -> None:
    a, b, bias = torch.randn(2, 32, 64), torch.randn(64, 48), torch.randn(2, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.vmap(lambda a, bias: fp8fn.gemm(a, b, bias=bias), (0, dim))(a, bias if dim == 0 else bias.T)
        expected = torch.stack([fp8fn.gemm(a[i], b, bias=bias[i]) for i in range(2)])
    assert_near(out, expected)
    assert out.dtype == torch.bfloat16


def compiled_case(name: str, sample: Sample) -> Callable[..., Any]:
    """The op between elementwise work of Inductor's, which sees its strides."""

    def call(*tensors: Tensor) -> Any:
        scaled = tuple(t * 2 if t.dtype not in NARROW else t for t in tensors)
        results = outputs(op_of(name)(*sample.with_tensors(scaled), **sample.kwargs))
        return *results, *(t.float() * 3 for t in results)

    return call


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OPS)
def test_inductor_gives_eagers_bits(name: str, dynamic: bool, device: torch.device, fresh_dynamo: None) -> None:
    sample = next(sample for sample in SAMPLES[name](0, device) if sample.label.startswith("ragged"))
    call = compiled_case(name, sample)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    got, want = compiled(*sample.tensors), call(*sample.tensors)
    assert_same_bits(got, want)
    assert_same_layout(got[: len(got) // 2], want[: len(want) // 2])


@pytest.mark.parametrize(("name", "label"), CASES)
def test_compiled_with_symbolic_sizes_gives_eagers_bits(
    name: str, label: str, device: torch.device, fresh_dynamo: None
) -> None:
    sample = sample_of(name, label, device=device)
    call = compiled_case(name, sample)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    got, want = compiled(*sample.tensors), call(*sample.tensors)
    assert_same_bits(got, want)
    assert_same_layout(got, want)


def test_symbolic_sizes_serve_every_remainder_with_one_graph(fresh_dynamo: None) -> None:
    """Neither padded strides nor a single row of scales is a guard."""

    def call(a: Tensor, b: Tensor) -> Tensor:
        return fp8fn.gemm(a, b.mT)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, n, k in ((128, 256, 384), (1008, 400, 144), (131, 257, 401), (511, 333, 129), (65, 100, 90)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        assert_same_bits(compiled(a, b), call(a, b))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
