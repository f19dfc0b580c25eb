"""A second call of an op by Triton starts the kept launches on its own tensors: values, memory, and what is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import grouped_mm_a16w8 as ops_grouped_a16w8
from fp8fn.ops import mm_a16w8 as ops_mm_a16w8
from fp8fn.ops import mx_mm as ops_mx_mm
from fp8fn.ops import quantize as ops_quantize
from fp8fn.ops import scaled_grouped_mm as ops_grouped_mm
from fp8fn.ops import scaled_mm as ops_scaled_mm
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.layout import BLOCKS, Block
from fp8fn.ops.quantize import quantize_dual_kernel, quantize_dual_reference, quantize_kernel, quantize_reference
from fp8fn.ops.quantize_grouped import (
    quantize_grouped_dual_kernel,
    quantize_grouped_dual_reference,
    quantize_grouped_kernel,
    quantize_grouped_reference,
)
from fp8fn.ops.scaled_mm import scaled_mm_kernel, scaled_mm_reference
from fp8fn.ops.torch_private import core
from fp8fn.ops.triton import launch, scaled_mm_tma
from fp8fn.ops.triton.launch import TritonCall, TritonLaunch
from support.accuracy import assert_same_bits, snr
from support.operands.values import random
from support.samples import SAMPLES


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The target has no kernel in CUDA C++; without a GPU, Triton's interpreter runs the launches."""
    if "hopper" in request.fixturenames:
        request.getfixturevalue("hopper")  # before the GPU's target is replaced: the tests were skipped on every GPU
    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM89)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(TritonLaunch, "run", TritonLaunch.interpret)
    monkeypatch.setattr(call_cache, "_kept", type(call_cache._kept)())


def _assert_right(name: str, label: str, seed: int, device: torch.device | None = None) -> None:
    """The results of a sample: quantizers' in bits, products' rounded sums."""
    kernel, reference = REFERENCES[name]
    (sample,) = (sample for sample in SAMPLES[name](seed, device or torch.device("cpu")) if sample.label == label)
    actual, expected = (each(*sample.args, **sample.kwargs) for each in (kernel, reference))
    if isinstance(actual, Tensor):
        actual, expected = [actual], [expected]
    if not sample.kwargs.get("zeros", True):  # rows past a count hold what the memory held
        counts = sample.args[-1]
        counted = (torch.arange(expected[0].shape[1]) < counts[:, None].cpu())[..., None]
        actual, expected = ([part.cpu().where(counted, 0)] for part in (actual[0], expected[0]))
    if "mm" in name:
        assert snr(actual[0], expected[0]) >= 40  # weights that are scaled before the product are rounded to 16 bits
    else:
        _assert_equal(actual, expected)


def _only_call() -> Any:
    (call,) = call_cache._kept.values()
    return call


REFERENCES = {
    name: (getattr(module, f"{name}_kernel"), getattr(module, f"{name}_reference"))
    for module, names in (
        (ops_quantize, ("amax", "quantize", "quantize_dual")),
        (ops_scaled_mm, ("scaled_mm",)),
        (ops_mm_a16w8, ("mm_a16w8",)),
        (ops_mx_mm, ("mx_mm",)),
        (ops_grouped_mm, ("scaled_grouped_mm",)),
        (ops_grouped_a16w8, ("grouped_mm_a16w8",)),
    )
    for name in names
}
ENDS = torch.tensor([100, 150], dtype=torch.int32)
OTHER_ENDS = torch.tensor([3, 140], dtype=torch.int32)
CASES: list[tuple[Callable[..., Any], Callable[..., Any], Block, str]] = [
    *((quantize_kernel, quantize_reference, block, "fp32") for block in BLOCKS),
    (quantize_kernel, quantize_reference, (1, 32), "e8m0"),
    (quantize_dual_kernel, quantize_dual_reference, (1, 128), "fp32"),
    (quantize_dual_kernel, quantize_dual_reference, (32, 1), "e8m0"),
]


@pytest.mark.parametrize(("kernel", "reference", "block", "scale"), CASES)
def test_a_kept_quantizer_reads_the_tensors_of_each_call(
    kernel: Callable[..., Any], reference: Callable[..., Any], block: Block, scale: str
) -> None:
    for seed in (1, 2):
        args = random(150, 200, seed=seed), block, None, scale
        _assert_equal(kernel(*args), reference(*args))
    assert isinstance(_only_call(), TritonCall)


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, sample.label) for name in REFERENCES for sample in SAMPLES[name]()],
)
def test_two_calls_of_a_sample_read_the_tensors_of_each(name: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a call allocates holds NaN, or as many ones, before its launches."""
    plain = call_cache.allocated
    monkeypatch.setattr(launch, "allocated", lambda made, device: [_poisoned(x) for x in plain(made, device)])
    for seed in (1, 2, 3):
        _assert_right(name, label, seed)
    if label == "plain":
        assert isinstance(_only_call(), TritonCall)


def _poisoned(x: Tensor) -> Tensor:
    torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).fill_(0xFF)  # type: ignore[call-overload]
    return x


@pytest.mark.parametrize("block", [(128, 1), (-1, 1)], ids=str)
def test_a_kept_grouped_quantizer_reads_the_tensors_of_each_call(block: Block) -> None:
    for seed, ends in ((1, ENDS), (2, OTHER_ENDS)):
        args = random(150, 200, seed=seed), ends, block
        _assert_equal(quantize_grouped_kernel(*args), quantize_grouped_reference(*args))
    assert isinstance(_only_call(), TritonCall)


def test_a_kept_grouped_dual_quantizer_reads_the_tensors_of_each_call() -> None:
    for seed, ends in ((1, ENDS), (2, OTHER_ENDS)):
        args = random(150, 200, seed=seed), ends
        _assert_equal(quantize_grouped_dual_kernel(*args), quantize_grouped_dual_reference(*args))
    assert isinstance(_only_call(), TritonCall)


def _assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_kept_product_reads_the_tensors_of_each_call(with_bias: bool, scale: str) -> None:
    """The first call multiplies a matrix by itself, which must not bind both operands to one tensor."""
    first = quantize_reference(random(160, 160, seed=1), (128, 128), None, scale)
    others = [quantize_reference(random(160, 160, seed=seed), (128, 128), None, scale) for seed in (2, 3)]
    for left, right in ((first, first), others):
        bias = random(160, seed=int(left is right)) if with_bias else None
        args = *left, (128, 128), *right, (128, 128), bias, torch.float32
        torch.testing.assert_close(scaled_mm_kernel(*args), scaled_mm_reference(*args), rtol=1e-4, atol=1e-3)
    assert isinstance(_only_call(), TritonCall)


def _small(rows: int, columns: int, scales: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 2, and scales that are powers of two."""
    numbers = torch.Generator().manual_seed(abs(seed) * 2 + (seed < 0))
    data = torch.randint(-2, 3, (rows, columns), generator=numbers).to(torch.float8_e4m3fn)
    return data, torch.exp2(torch.randint(-3, 4, scales, generator=numbers).float())


def _assert_kept_by_tma(device: str, along_k: bool, target: targets.Target, patch: pytest.MonkeyPatch) -> None:
    """Four products by descriptors, each of tensors of its own, with one plan.

    Their sums are exact, by small numbers and scales that are powers of two: Hopper's tensor cores keep 14 bits.
    """
    planned: list[str] = []
    plan = scaled_mm_tma.plan_scaled_mm_tma
    patch.setattr(targets, "target_of", lambda device: target)
    patch.setattr(scaled_mm_tma, "plan_scaled_mm_tma", lambda *args: planned.append("tma") or plan(*args))
    for seed in (1, 2, 3, 4):
        left, right = _small(96, 144, (96, 2), seed=seed), _small(144, 160, (2, 2), seed=-seed)
        stored = right[0].view(torch.uint8)
        data = (stored.mT.contiguous().mT if along_k else stored.contiguous()).view(right[0].dtype)
        args = *left, (1, 128), data, right[1], (128, 128), None, torch.float32
        expected = scaled_mm_reference(*args)
        found = scaled_mm_kernel(*(x.to(device) if isinstance(x, Tensor) else x for x in args))
        assert torch.equal(found.cpu(), expected)
    assert planned == ["tma"]
    assert isinstance(_only_call(), TritonCall)


@pytest.mark.parametrize("along_k", [True, False], ids=["column-major b", "row-major b"])
def test_a_kept_product_by_tma_has_descriptors_of_the_tensors_of_each_call(
    along_k: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_kept_by_tma("cpu", along_k, targets.SM100, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("along_k", [True, False], ids=["column-major b", "row-major b"])
def test_a_kept_product_by_tma_on_a_gpu(along_k: bool, hopper: targets.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned as for sm100, whose tiles of row-major operands Triton turns around for Hopper's instruction."""
    _assert_kept_by_tma("cuda", along_k, targets.SM100, monkeypatch)


@pytest.mark.parametrize("target", [targets.SM100, targets.SM120], ids=lambda target: target.name)
def test_a_kept_mx_product_has_descriptors_of_the_tensors_of_each_call(
    target: targets.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm100 of the scratch too, into which the first launch swizzles the scales."""
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    plain = call_cache.allocated
    monkeypatch.setattr(launch, "allocated", lambda made, device: [_poisoned(x) for x in plain(made, device)])
    for seed in (1, 2, 3):
        left = quantize_reference(random(96, 1280, seed=seed), (1, 32), None, "e8m0")
        right = quantize_reference(random(1280, 136, seed=-seed), (32, 1), None, "e8m0")
        args = *left, *right, None, torch.float32
        found = ops_mx_mm.mx_mm_kernel(*args)
        torch.testing.assert_close(found, ops_mx_mm.mx_mm_reference(*args), rtol=1e-3, atol=1e-2)
    call = _only_call()
    assert isinstance(call, TritonCall)
    names = [step._launch.name for step in call.steps]
    assert names == (["swizzle_scales"] if target is targets.SM100 else []) + ["mx_mm_tma"]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("mx", [False, True])
def test_a_kept_product_of_groups_by_tma_has_descriptors_of_the_tensors_of_each_call(
    mx: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM100)
    a_block, b_block, scale = ((1, 32), (32, 1), "e8m0") if mx else ((1, 128), (128, 128), "fp32")
    for seed, rows in ((1, (70, 130)), (2, (3, 150)), (3, (0, 11))):
        x = random(2, 160, 1280, seed=seed) if counts else random(200, 1280, seed=seed)
        a = quantize_reference(x, a_block, None, scale)
        b = quantize_reference(random(2, 136, 1280, seed=-seed).mT, b_block, None, scale)
        ends = torch.tensor(rows, dtype=torch.int32)
        where = (None, ends) if counts else (ends, None)
        args = *a, a_block, *b, b_block, where[0], None, torch.float32, where[1], True, 100 if counts else None
        kernel, reference = REFERENCES["scaled_grouped_mm"]
        torch.testing.assert_close(kernel(*args), reference(*args), rtol=1e-3, atol=1e-2)
    call = _only_call()
    assert isinstance(call, TritonCall)
    assert [step._launch.name for step in call.steps] == ["swizzle_scales"] * mx + ["grouped_rows_tma"]


def test_the_first_kept_call_compiles_for_the_bytes_of_e8m0() -> None:
    """Later ones read an address alone, and give the tensor as it is."""
    place = launch.Place("scale", 0, torch.uint8, 0, lambda x: x[None])  # type: ignore[arg-type, return-value]
    scales = (torch.empty(4, dtype=torch.float8_e8m0fnu),)
    typed, given = place.typed(scales), place.of(scales)
    assert isinstance(typed, Tensor)
    assert isinstance(given, Tensor)
    assert (typed.dtype, given.dtype) == (torch.uint8, torch.float8_e8m0fnu)


def test_a_kept_call_holds_no_tensor() -> None:
    x = random(150, 200)
    data, _ = quantize_kernel(x, (1, 128))
    held = weakref.ref(x), weakref.ref(data)
    assert isinstance(_only_call(), TritonCall)
    del x, data
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_a_batch_that_has_to_be_copied_is_planned_anew() -> None:
    for seed in (1, 2):
        x = random(40, 3, 2, 130, seed=seed).permute(2, 1, 0, 3)
        assert x.flatten(0, 1).data_ptr() != x.data_ptr()
        _assert_equal(quantize_kernel(x, (1, 128)), quantize_reference(x, (1, 128)))
    assert not isinstance(_only_call(), TritonCall)


class _MachineCode:
    """In the place of what Triton compiles: `[grid]` takes all arguments of the signature, and writes them down."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.started.append((grid, *arguments))


@pytest.mark.parametrize(("target", "later"), [(targets.SM89, 3), (targets.GFX942, 0)], ids=["cuda", "hip"])
def test_later_calls_start_the_machine_code_of_the_first(
    target: targets.Target, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, ran = _MachineCode(), []

    def run(launch: TritonLaunch) -> _MachineCode:
        ran.append(launch)
        return code

    monkeypatch.setattr(targets, "target_of", lambda device: target)
    monkeypatch.setattr(TritonLaunch, "run", run)
    monkeypatch.setattr(core, "current_gpu", lambda: None)  # the index of the CPU's device
    rows = [random(150, 200, seed=seed) for seed in (1, 2, 3, 4)]
    outputs = [quantize_kernel(x, (1, 128)) for x in rows]
    assert len(code.started) == later
    assert len(ran) == 4 - later
    first = ran[0]
    for x, (data, scales), (grid, *arguments) in zip(rows[1:], outputs[1:], code.started, strict=False):
        named = dict(zip((*first.args, *first.constexprs), arguments, strict=True))
        assert grid == first.grid
        assert [named.pop(name).data_ptr() for name in ("x", "data", "scales")] == [
            x.data_ptr(), data.data_ptr(), scales.data_ptr(),
        ]  # fmt: skip
        assert named == {k: v for k, v in {**first.args, **first.constexprs}.items() if not isinstance(v, Tensor)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "label"),
    [(name, sample.label) for name in REFERENCES for sample in SAMPLES[name]()],
)
def test_machine_code_on_a_gpu_reads_the_tensors_of_each_call(
    name: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept call asks Triton for a kernel once; one that has a copy of an input is planned anew each time."""
    from triton.runtime.jit import JITFunction

    asked: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, **kwargs: asked.append(name) or run(fn, *args, **kwargs))
    for seed in (1, 2, 3, 4):
        asked.clear()
        _assert_right(name, label, seed, torch.device("cuda"))
    if all(isinstance(call, TritonCall) for call in call_cache._kept.values()):
        assert asked == []
