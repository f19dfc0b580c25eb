"""Products that bypass the dispatcher: their bits and gradients, what they save, and calls that they leave to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # its first import reads fp8fn's ops, which these tests replace
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import fp8fn
from fp8fn.meta import direct
from fp8fn.ops import scaled_mm
from fp8fn.ops.cuda.runtime import call_cache, graph_capture
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.grouped_mm_a16w8 import grouped_mm_a16w8_reference
from fp8fn.ops.mm_a16w8 import mm_a16w8_reference
from fp8fn.ops.quantize import quantize_dual_kernel, quantize_kernel
from fp8fn.ops.scaled_grouped_mm import scaled_grouped_mm_reference
from fp8fn.ops.scaled_mm import scaled_mm_kernel
from fp8fn.ops.torch_private import core
from fp8fn.ops.triton.launch import TritonLaunch
from support.cuda_emulator import hopper_on_cpu

BF16 = torch.bfloat16
M, N, K = 48, 80, 144


@contextmanager
def hopper_gpu() -> Iterator[list[CudaLaunch]]:
    """Inside, CPU tensors pass for those of a Hopper GPU, whose kernels the emulator runs; gives what was launched."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator of CUDA is compiled by g++")
    kernels = [kernel for kernel in scaled_mm.SCALED_MM.kernels if kernel.name == "cuda"]
    served = replace(kernels[0], accepts=scaled_mm.cuda.accepts)
    ops = {"quantize": quantize_kernel, "quantize_dual": quantize_dual_kernel, "scaled_mm": scaled_mm_kernel}
    with pytest.MonkeyPatch.context() as patch, hopper_on_cpu() as launches:
        patch.setattr(scaled_mm, "SCALED_MM", replace(scaled_mm.SCALED_MM, kernels=(served,)))
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
        patch.setattr(core, "current_gpu", lambda: None)
        patch.setattr(graph_capture, "capturing", lambda: False)
        patch.setattr(TritonLaunch, "run", TritonLaunch.interpret)
        for op, kernel in ops.items():
            patch.setattr(torch.ops.fp8fn, op, kernel)
        yield launches


@pytest.fixture
def gpu() -> Iterator[list[CudaLaunch]]:
    with hopper_gpu() as launches:
        yield launches


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def step(
    call: Callable[..., Tensor], leaves: tuple[Tensor, ...], wanted: tuple[bool, ...], seed: int
) -> tuple[Tensor, ...]:
    """The result, and the gradients of the wanted leaves."""
    own = [x.detach().clone().requires_grad_(want) for x, want in zip(leaves, wanted, strict=True)]
    out = call(*own)
    if not any(wanted):
        return (out,)
    grad = random(*out.shape, seed=seed).to(out.device)
    return out, *torch.autograd.grad(out, [x for x in own if x.requires_grad], grad)


def programs() -> int:
    """How many of the kept plans of products, and of their backwards, are programs."""
    plans = [found for found in call_cache._kept.values() if isinstance(found, direct.Plan)]
    whole = [plan for plan in plans if plan._program is not None]
    return len(whole) + sum(isinstance(found, call_cache.Program) for found in call_cache._kept.values())


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (fp8fn.linear, (M, K), (N, K)),
    "linear of a batch": (fp8fn.linear, (2, M, K), (N, K)),
    "gemm": (fp8fn.gemm, (M, K), (K, N)),
    "gemm of a transpose": (lambda x, w, **rest: fp8fn.gemm(x, w.mT, **rest), (M, K), (N, K)),
}
RECIPES: dict[str, Any] = {
    "blockwise": "blockwise",
    "square": "blockwise_square",
    "hybrid": "hybrid",
    "kept weights": fp8fn.Recipe(keep_weights=True),
}
CASES = [(name, "blockwise") for name in PRODUCTS] + [("linear", name) for name in RECIPES if name != "blockwise"]


@pytest.mark.parametrize(("product", "recipe"), CASES)
def test_bits_are_those_of_the_op(
    product: str, recipe: str, gpu: list[CudaLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times on new values, of which the first is written down and the others are programs."""
    function, x_shape, w_shape = PRODUCTS[product]

    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return function(x, w, bias=bias, recipe=RECIPES[recipe])

    wanted = (True, True, True)
    for seed in range(3):
        leaves = random(*x_shape, seed=seed), random(*w_shape, seed=seed), random(N, seed=seed)
        found = step(call, leaves, wanted, seed)
        assert programs() == 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fp8fn.matmul.product", lambda *args, **kwargs: None)
            patch.setattr(call_cache, "_kept", type(call_cache._kept)())
            expected = step(call, leaves, wanted, seed)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_a_gradient_that_nobody_wants_launches_nothing(wanted: tuple[bool, bool], gpu: list[CudaLaunch]) -> None:
    leaves = random(M, K), random(N, K)
    full = step(fp8fn.linear, leaves, (True, True), 1)
    for _ in range(2):
        found = step(fp8fn.linear, leaves, wanted, 1)
        kept = [full[0], *(x for x, want in zip(full[1:], wanted, strict=True) if want)]
        assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))
    steps = len(gpu)
    x, w = (leaf.clone().requires_grad_() for leaf in leaves)
    (one,) = torch.autograd.grad(fp8fn.linear(x, w), [x], random(M, N, seed=1))
    assert torch.equal(one, full[1])
    products = [launch for launch in gpu[steps:] if "scaled_mm" in launch.name]
    assert len(products) <= 1  # of the backward of x alone, where no test before made it


def test_a_warm_step_allocates_little_and_starts_every_kernel_once(
    gpu: list[CudaLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    g = random(M, N)
    for _ in range(2):
        torch.autograd.grad(fp8fn.linear(x, w), (x, w), g)
    allocated, started = [], []
    allocate, start = call_cache.allocated, call_cache.start
    monkeypatch.setattr(call_cache, "allocated", lambda made, on: allocated.extend(made) or allocate(made, on))
    monkeypatch.setattr(call_cache, "start", lambda *args: started.append(args) or start(*args))
    out = fp8fn.linear(x, w)
    assert (len(allocated), len(started)) == (4, 3)  # out, x by columns and its scales, the rest
    assert [shape for shape, _, _ in allocated[:3]] == [(M, N), (M, K), (1, K)]
    torch.autograd.grad(out, (x, w), g)
    assert (len(allocated), len(started)) == (7, 7)  # two gradients, the rest
    assert [shape for shape, _, _ in allocated[4:6]] == [(M, K), (N, K)]


def test_large_tensors_are_allocated_alone(gpu: list[CudaLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "SHARED_BYTES", 8192)  # x by rows fits: 6,912 bytes; w in FP8 does not
    x, w = random(M, K), random(N, K)
    first = fp8fn.linear(x, w)
    allocated: list[Any] = []
    allocate = call_cache.allocated
    monkeypatch.setattr(call_cache, "allocated", lambda made, on: allocated.extend(made) or allocate(made, on))
    assert torch.equal(fp8fn.linear(x, w), first)
    assert [shape for shape, _, _ in allocated[:2]] == [(M, N), (K, N)]
    assert len(allocated) == 3
    assert allocated[2][0][0] <= 8192


def test_what_is_saved_is_fp8_and_the_weight_itself(gpu: list[CudaLaunch]) -> None:
    """The same before and after the launches are written down, so that a checkpoint's second forward saves it too."""
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    for _ in range(3):
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, found=found: found.append(t) or t, lambda t: t):
            fp8fn.linear(x, w)
        assert [t.dtype for t in found] == [torch.float8_e4m3fn, torch.float32, BF16]
        assert found[2] is w


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_checkpoints_run_the_forward_again(recipe: str, gpu: list[CudaLaunch]) -> None:
    """Also where the first forward writes its launches down and the second one is a program."""
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    out = checkpoint(fp8fn.linear, x, w, recipe=recipe, use_reentrant=False)
    grads = torch.autograd.grad(out, (x, w), random(M, N))
    plain = fp8fn.linear(x, w, recipe=recipe)
    expected = torch.autograd.grad(plain, (x, w), random(M, N))
    assert torch.equal(out, plain)
    assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))


def test_a_weight_that_was_written_to_is_noticed(gpu: list[CudaLaunch]) -> None:
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    out = fp8fn.linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(random(M, N))


def test_a_second_derivative_is_refused(gpu: list[CudaLaunch]) -> None:
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    with pytest.raises(NotImplementedError, match="second_order=True"):
        torch.autograd.grad(fp8fn.linear(x, w), (x, w), random(M, N), create_graph=True)


def test_a_tensor_beside_itself(gpu: list[CudaLaunch]) -> None:
    """One address for two inputs tells nothing: `x @ xᵀ` first, and `x @ yᵀ` after it."""
    x, y = random(N, K), random(N, K, seed=1)
    square = fp8fn.linear(x, x)
    assert torch.equal(fp8fn.linear(x, x.clone()), square)
    other = fp8fn.linear(x, y)
    assert not torch.equal(other, square)
    assert torch.equal(fp8fn.linear(x, x), square)
    assert torch.equal(fp8fn.linear(x, y.clone()), other)


def test_gradients_of_other_strides(gpu: list[CudaLaunch]) -> None:
    """An expanded gradient, as `sum` makes it, after a contiguous one of the same values."""
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    ones = torch.ones(M, N, dtype=BF16)
    for _ in range(2):
        expected = torch.autograd.grad(fp8fn.linear(x, w), (x, w), ones)
        found = torch.autograd.grad(fp8fn.linear(x, w).sum(), (x, w))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_autocast_names_the_type_of_the_result(gpu: list[CudaLaunch]) -> None:
    x, w = random(M, K, dtype=torch.float32), random(N, K, dtype=torch.float32)
    for _ in range(2):
        assert fp8fn.linear(x, w).dtype == torch.float32
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        try:
            assert fp8fn.linear(x, w).dtype == torch.float16
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert fp8fn.linear(x, w, out_dtype=BF16).dtype == BF16


def test_errors_are_those_of_the_op(gpu: list[CudaLaunch]) -> None:
    x, w = random(M, K), random(N, K)
    with pytest.raises(ValueError, match=r"linear: x \(48, 144\) has K=144 and weight \(80, 143\) has K=143"):
        fp8fn.linear(x, w[:, 1:])
    with pytest.raises(TypeError, match=r"linear: weight has dtype torch\.float64"):
        fp8fn.linear(x, w.double())
    with pytest.raises(ValueError, match=r"linear: bias has shape \(79,\)"):
        fp8fn.linear(x, w, random(79))
    with pytest.raises(TypeError, match=r"gemm: out_dtype=torch\.int32"):
        fp8fn.gemm(x, w.mT, out_dtype=torch.int32)
    with pytest.raises(ValueError, match="did you mean 'rowwise'"):
        fp8fn.gemm(x, w.mT, recipe="rowwse")
    assert programs() == 0


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def _dual() -> AbstractContextManager[Any]:
    return forward_ad.dual_level()


def _profiled() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


@pytest.mark.parametrize(
    "inside", [_Watching, _dual, _profiled, torch.overrides.BaseTorchFunctionMode, call_cache.record]
)
def test_whoever_watches_sees_the_op(
    inside: Callable[[], AbstractContextManager[Any]], gpu: list[CudaLaunch]
) -> None:  # fmt: skip
    x, w = random(M, K), random(N, K)
    assert direct.product(x, w, None, "blockwise", None, transposed=True) is not None
    with inside():
        assert direct.product(x, w, None, "blockwise", None, transposed=True) is None


def test_tensors_that_need_the_dispatcher(gpu: list[CudaLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = random(M, K), random(N, K)

    def taken(x: Any, w: Any, bias: Any = None, recipe: str = "blockwise") -> bool:
        return direct.product(x, w, bias, recipe, None, transposed=True) is not None

    negative = torch.randn(M, K, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert taken(x, w)
    assert not taken(x.as_subclass(_Subclass), w)
    assert not taken(x, w.as_subclass(_Subclass))
    assert not taken(x, w, random(N).as_subclass(_Subclass))
    assert not taken(negative, w)
    assert not taken(x[0], w)  # one row, which `gemm` makes a matrix
    assert not taken(x, w[None])
    assert not taken(x, w, recipe=fp8fn.Recipe(second_order=True).key)
    assert not taken(fp8fn.quantize(x, (1, 128)), w)
    seen = []
    torch.func.vmap(lambda row: seen.append(taken(row, w)) or row.sum())(random(2, M, K))
    torch.func.grad(lambda row: seen.append(taken(row, w)) or row.sum())(x.float())
    assert seen == [False, False]
    monkeypatch.setattr(graph_capture, "capturing", lambda: True)
    assert not taken(x, w)
    monkeypatch.setattr(graph_capture, "capturing", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not taken(x, w)


X, ENDS = random(6, 128), torch.tensor([2, 6], dtype=torch.int32)
W = fp8fn.quantize(random(2, 128, 128), (128, 128))
A = fp8fn.quantize(X, (1, 128)), fp8fn.quantize(X.expand(2, 6, 128), (1, 128))
# A call, and the module and the name of its op.
QUANTIZED: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "gemm": (lambda x: fp8fn.gemm(x, W), "matmul", "mm_a16w8"),
    "groups": (lambda x: fp8fn.grouped_gemm(x, W, ENDS), "grouped", "grouped_mm_a16w8"),
    "a batch": (lambda x: fp8fn.grouped_gemm(x.expand(2, 6, 128), W), "grouped", "mm_a16w8"),
    "quantized groups": (lambda x: fp8fn.grouped_gemm(A[0], W, ENDS), "grouped", "scaled_grouped_mm"),
    "counts": (lambda x: fp8fn.grouped_gemm(A[1], W, counts=ENDS), "grouped", "scaled_grouped_mm"),
    "groups of an FP8Weight": (
        lambda x: torch._grouped_mm(x, fp8fn.FP8Weight(W), offs=ENDS), "weights.products", "grouped_mm_a16w8"
    ),
}  # fmt: skip
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "mm_a16w8": mm_a16w8_reference,
    "grouped_mm_a16w8": grouped_mm_a16w8_reference,
    "scaled_grouped_mm": scaled_grouped_mm_reference,
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_products_of_quantized_operands_start_their_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the dispatcher on a GPU, unless autograd, `torch.compile` or a mode has to see the op."""
    call, module, op = QUANTIZED[case]
    expected, calls = call(X), []

    def called(how: str) -> Callable[..., Tensor]:
        return lambda *args: calls.append(how) or REFERENCES[op](*args)  # type: ignore[func-returns-value]

    def ways(x: Tensor = X) -> list[str]:
        calls.clear()
        found = call(x)
        assert torch.equal(found, expected)
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        return list(calls)

    monkeypatch.setattr(torch.ops.fp8fn, op, called("op"))
    monkeypatch.setattr(f"fp8fn.{module}.{op}_kernel", called("kernel"))
    assert ways() == ["op"]  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    assert ways() == ["kernel"]
    if module == "weights.products":  # PyTorch's op is what others see there
        return
    with _Watching():
        assert ways() == ["op"]
    tracked = X.clone().requires_grad_()
    assert ways(tracked) == ["kernel" if op == "scaled_grouped_mm" else "op"]  # which reads A, not x
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert ways() == ["op"]


def test_a_batch_of_gradients() -> None:
    """`is_grads_batched` calls the backward under vmap: ops compute it from what the direct forward saved."""
    x, w = random(M, K).requires_grad_(), nn.Parameter(random(N, K))
    grads = random(2, M, N)
    with hopper_gpu():
        outs = [fp8fn.linear(x, w) for _ in range(3)]
    found = torch.autograd.grad(outs[0], (x, w), grads, is_grads_batched=True)
    each = [torch.autograd.grad(out, (x, w), grad) for out, grad in zip(outs[1:], grads, strict=True)]
    for one, others in zip(found, zip(*each, strict=True), strict=True):
        assert torch.equal(one, torch.stack(others))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_square", "rowwise", "tensorwise", "hybrid"])
@pytest.mark.parametrize("shape", [(300, 512), (2, 150, 512)], ids=str)
def test_bits_are_those_of_the_op_on_a_gpu(recipe: str, shape: tuple[int, ...]) -> None:
    """Three times on new values, on another stream, and for many layers in turn, whose addresses differ."""

    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return fp8fn.linear(x, w, bias, recipe=recipe)

    leaves = [
        tuple(t.cuda() for t in (random(*shape, seed=seed), random(384, 512, seed=seed), random(384, seed=seed)))
        for seed in range(4)
    ]
    wanted = (True, True, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8fn.matmul.product", lambda *args, **kwargs: None)
        expected = [step(call, each, wanted, seed) for seed, each in enumerate(leaves)]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                found = [step(call, each, wanted, seed) for seed, each in enumerate(leaves)]
        stream.synchronize()
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    kinds = [found for found in call_cache._kept.values() if isinstance(found, direct.Plan)]
    assert any(plan._program is not None for plan in kinds)
