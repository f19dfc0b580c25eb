"""The HIP kernels of decoding on CPU tensors, by a model of a 64-lane wave; and the model by what `wave.h` says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from fp8fn import ScaledTensor
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.hip.moe_gemm import plan_moe
from fp8fn.ops.hip.mx_mm import lines
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing
from fp8fn.ops.targets import GFX950
from fp8fn.ops.tuning.mx import shipped
from support.hip_on_host import needs_compiler, run_on_host
from support.hip_probes import check_probe, probe, probes
from support.mx_decode import (
    BF16,
    E4M3,
    E8M0,
    FP16,
    FP32,
    PLANS,
    Dense,
    Product,
    Routed,
    dense,
    operands,
    routed,
)
from support.products import mx_product

ROWS: Final = tuple(HipConfig(rows=rows) for rows in (1, 2, 4, 8, 16))
CASES: Final = [
    # A step of K is 1024, a part of it, none, and several of a wave's unrolled loop; all ragged.
    Dense("gemv", 1, 5, 96, ROWS[0]),
    Dense("gemv", 1, 9, 5152, ROWS[0]),
    Dense("gemv", 2, 6, 2080, ROWS[1]),
    Dense("gemv", 3, 11, 1056, ROWS[2]),
    Dense("gemv", 7, 9, 3104, ROWS[3], bias=FP32),
    Dense("gemv", 13, 18, 1056, ROWS[4]),
    Dense("gemv", 16, 33, 32, ROWS[4]),
    Dense("gemv", 5, 3, 0, ROWS[3], bias=BF16),
    Dense("gemv", 2, 7, 96, ROWS[1], BF16, BF16, ((3,), ())),
    Dense("gemv", 2, 7, 96, ROWS[1], FP16, FP16, ((), (3,))),
    Dense("gemv", 1, 7, 160, ROWS[1], FP32, FP32, ((2,), (2,))),
    # A step is 128.
    Dense("mfma", 1, 5, 128, HipConfig()),
    Dense("mfma", 16, 16, 96, HipConfig(), bias=FP16),
    Dense("mfma", 5, 19, 2208, HipConfig(k_splits=2)),
    Dense("mfma", 17, 33, 640, HipConfig(n_sub=2, k_splits=4)),
    Dense("mfma", 33, 70, 2080, HipConfig(n_sub=4, k_splits=8), bias=BF16),
    Dense("mfma", 64, 64, 256, HipConfig(n_sub=4)),
    Dense("mfma", 40, 20, 0, HipConfig(k_splits=2), bias=FP32),
    Dense("mfma", 20, 18, 384, HipConfig(k_splits=2), BF16, BF16, ((3,), ())),
    Dense("mfma", 20, 18, 384, HipConfig(n_sub=2), FP16, FP32, ((3,), (3,))),
    Dense("mfma", 20, 18, 384, HipConfig(k_splits=2), FP16, None, ((), (2,))),
]
ROUTED: Final = [
    Routed(6, 2, 4, 16, 24, 128, 2, 16),
    Routed(6, 2, 4, 16, 21, 96, 1, 8, weighted=False),
    Routed(30, 2, 3, 64, 19, 704, 2, 16),
    Routed(40, 2, 3, 128, 9, 256, 2, 8, True, BF16),
    Routed(11, 2, 5, 4, 33, 2208, 2, 8, False, FP16),
    Routed(30, 3, 2, 24, 17, 160, 3, 16),
]


def on_host(product: Product) -> Tensor:
    """In both orders of waves and lanes, which must give the same bits."""
    product.run(lambda launches: run_on_host(*launches))
    first = product.out.clone()
    product.run(lambda launches: run_on_host(*launches, backwards=True))
    bits = torch.int32 if first.element_size() == 4 else torch.int16
    assert torch.equal(first.view(bits), product.out.view(bits))
    return first


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_products(case: Dense) -> None:
    on_host(dense(case))


# The divisions that the shipped table names, at their own M and K; N is a tile of 16 columns and three more.
SHIPPED: Final = sorted(
    {(m, k, row.options["n_sub"], row.options["k_splits"]) for (_, k, _, m), row in shipped().items() if row.options}
)


@needs_compiler
@pytest.mark.parametrize(("m", "k", "n_sub", "k_splits"), SHIPPED)
def test_divisions_of_the_shipped_table(m: int, k: int, n_sub: int, k_splits: int) -> None:
    on_host(dense(Dense("mfma", m, 19, k, HipConfig(n_sub=n_sub, k_splits=k_splits))))


@needs_compiler
@pytest.mark.parametrize("case", [case for case in CASES if case.kernel == "gemv" and case.n > 8], ids=str)
def test_rows_by_waves_of_32_lanes(case: Dense) -> None:
    """Waves of 32 lanes are those of an NVIDIA GPU."""
    product = dense(case)
    (launch,) = product.launches
    kernel = replace(launch.kernel, macros=(*launch.kernel.macros, ("LANES", 32)))
    on_host(replace(product, launches=(replace(launch, kernel=kernel, threads=launch.threads // 2),)))


@needs_compiler
@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_products_of_routed_tokens(case: Routed) -> None:
    on_host(routed(case))


@needs_compiler
def test_tiles_of_no_expert_and_ids_of_no_row() -> None:
    """One of six tiles has an expert before the first, one an expert past the last, one no id; one is past the end."""
    case = Routed(10, 2, 3, 4, 9, 96, 2, 8)
    ids = [0, 7, 20, 2**31 - 1, 1, 2, 3, 4, -1, 19, 5, -(2**31), 6, 8, 9, 10, 20, 20, 20, 20, 11, 12, 13, 14]
    layout = [torch.tensor(x, dtype=torch.int32) for x in (ids, [2, -1, 0, 3, 1, 2], [20])]
    product = routed(case, (layout[0], layout[1], layout[2]))
    assert product.written is not None
    assert product.written.nonzero().flatten().tolist() == [0, 5, 7, 19]
    on_host(product)
    layout[2].zero_()
    product = routed(case, (layout[0], layout[1], layout[2]))
    assert not product.written.any()  # type: ignore[union-attr]
    on_host(product)


@needs_compiler
@pytest.mark.parametrize("case", [Dense("gemv", 3, 6, 96, ROWS[2]), Dense("mfma", 3, 6, 96, HipConfig())], ids=str)
def test_strides_and_what_is_copied(case: Dense) -> None:
    """Padded rows and scales turned around are read where they lie; lines not of 16 bytes are copied."""
    a, b = operands(case)
    expected = on_host(dense(case, (a, b)))
    apart = (
        ScaledTensor(padded(a.data, 112), turned(a.scale), a.block),
        ScaledTensor(padded(b.data.mT, 144).mT, turned(b.scale), b.block),
    )
    product = dense(case, apart)
    assert product.launches[0].args["a_row"] == 112
    assert product.launches[0].args["b_column"] == 144
    assert (apart[0].scale.stride(-1) == 1) != (a.scale.stride(-1) == 1)
    assert torch.equal(on_host(product), expected)
    for other in (
        (ScaledTensor(padded(a.data, 104), a.scale, a.block), ScaledTensor(turned(b.data), b.scale, b.block)),
        (ScaledTensor(padded(a.data, 112, 8), a.scale, a.block), b),
    ):
        product = dense(case, other)
        assert product.launches[0].args["a_row"] == product.launches[0].args["b_column"] == 96
        assert torch.equal(on_host(product), expected)


def padded(x: Tensor, width: int, offset: int = 0) -> Tensor:
    """`x (lines, K)` with its lines `width` bytes apart, NaNs between."""
    memory = torch.full((offset + width * x.shape[0] + 16,), 0x7F, dtype=torch.uint8)
    view = memory.as_strided(x.shape, (width, 1), offset)
    view.copy_(x.view(torch.uint8))
    return view.view(x.dtype)


def turned(x: Tensor) -> Tensor:
    bits = x.view(torch.uint8)
    return (bits.mT.contiguous().mT if bits.stride(-1) == 1 else bits.contiguous()).view(x.dtype)


@needs_compiler
@pytest.mark.parametrize("case", [Dense("gemv", 4, 6, 96, ROWS[2]), Dense("mfma", 4, 6, 96, HipConfig())], ids=str)
def test_what_is_not_a_number_stays_in_its_row_and_column(case: Dense) -> None:
    for where in ("a", "a_scale", "b", "b_scale"):
        a, b = operands(case)
        touched = torch.zeros(4, 6, dtype=torch.bool)
        if where.startswith("a"):
            (a.data if where == "a" else a.scale).view(torch.uint8)[2, -1] = 0x7F if where == "a" else 0xFF
            touched[2] = True
        else:
            (b.data if where == "b" else b.scale).view(torch.uint8)[-1, 5] = 0xFF
            touched[:, 5] = True
        found = on_host(dense(case, (a, b)))
        assert torch.equal(found.isnan(), touched), where


@needs_compiler
@pytest.mark.parametrize("case", [Dense("gemv", 1, 6, 64, ROWS[0]), Dense("mfma", 1, 6, 64, HipConfig())], ids=str)
def test_the_least_and_the_largest_scale(case: Dense) -> None:
    """Their product is 1, though one alone is subnormal in float32 and the other times a datum infinite."""
    a, b = operands(case)
    a.scale.view(torch.uint8).copy_(torch.tensor([[0, 254]]))
    b.scale.view(torch.uint8).copy_(torch.tensor([254, 0])[:, None].expand(2, 6))
    found = on_host(dense(case, (a, b)))
    assert found.isfinite().all()
    assert (found != 0).any()


@needs_compiler
def test_weights_beyond_2_gib() -> None:
    """The columns of a weight lie far apart, and only they take memory."""
    case = Dense("gemv", 2, 40, 64, ROWS[1])
    for kernel in PLANS:
        a, b = operands(case)
        far = far_apart(b.data.mT, 2**26).mT
        assert far.stride(1) * 39 > 2**31
        on_host(dense(case._replace(kernel=kernel), (a, ScaledTensor(far, b.scale, b.block))))
    product = routed(Routed(6, 2, 3, 16, 9, 64, 2, 8))
    launch = product.launches[0]
    args = dict(launch.args)
    args["w"] = far_apart(args["w"], 2**31 + 64)  # type: ignore[arg-type]
    args["w_expert"] = type(args["w_expert"])(2**31 + 64)  # type: ignore[arg-type, call-arg, misc]
    far_launch = HipLaunch(launch.kernel, launch.grid, launch.threads, args, target=GFX950)
    on_host(Product((far_launch,), (args["w"], *product.inputs), *list(vars(product).values())[2:]))  # type: ignore[arg-type]


def far_apart(x: Tensor, stride: int) -> Tensor:
    """`x` with the elements of its first axis this far apart."""
    memory = torch.empty(stride * (x.shape[0] - 1) + x[0].numel(), dtype=torch.uint8)
    view = memory.as_strided(x.shape, (stride, *x[0].contiguous().stride()))
    view.copy_(x.view(torch.uint8))
    return view.view(x.dtype)


def test_what_plans_refuse() -> None:
    def plan(kernel: str, m: int = 1, k: int = 64, n: int = 8, **config: Any) -> Any:
        a, b = torch.empty(m, k, dtype=E4M3, device="meta"), torch.empty(n, k, dtype=E4M3, device="meta").mT
        scales = tuple(torch.empty(*shape, dtype=E8M0, device="meta") for shape in ((m, k // 32), (k // 32, n)))
        out = torch.empty(m, n, device="meta")
        return PLANS[kernel](mx_product((a, b), (scales[0], scales[1]), out, GFX950), HipConfig(**config))

    for message, call in (
        ("rows=4 and M=5", partial(plan, "gemv", 5, rows=4)),
        ("rows=3 and M=1", partial(plan, "gemv", rows=3)),
        ("K=48; it must be a multiple of 32", partial(plan, "gemv", k=48)),
        ("K=100", partial(plan, "mfma", k=100)),
        ("n_sub=3", partial(plan, "mfma", n_sub=3)),
        ("k_splits=3", partial(plan, "mfma", k_splits=3)),
        ("M=65; n_sub must be 1, 2 or 4", partial(plan, "mfma", 65)),
        ("4 lines of b span 3221225472 bytes", partial(plan, "gemv", k=3 * 2**28, n=9)),
        ("16777217 blocks of 256 threads are more than a grid has", partial(plan, "gemv", n=2**28 + 1, k=32)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_the_plan_of_routed_tokens_refuses() -> None:
    product = routed(Routed(4, 2, 3, 16, 9, 64, 2, 8))
    args: Any = product.launches[0].args
    layout = Routing(args["sorted_token_ids"], args["expert_ids"], args["num_tokens_post_padded"])
    a, w = Quantized(args["a"], args["a_scale"], (1, 32)), Quantized(args["w"].mT, args["w_scale"], (32, 1))
    given = RoutedProduct(a=a, w=w, routing=layout, a_div=2, out=product.out, target=GFX950)
    with pytest.raises(ValueError, match="block_n=4 and K=64"):
        plan_moe(given, HipConfig(block_n=4))


def test_lines() -> None:
    x = torch.zeros(4, 64, dtype=torch.uint8).view(E4M3)
    assert lines(x) is x
    assert lines(x[:, :32]).stride() == (64, 1)
    assert lines(x.mT).stride() == (4, 1)
    assert lines(torch.zeros(64, 32, dtype=torch.uint8).view(E4M3).mT).stride() == (64, 1)


def test_splits_that_would_be_empty_are_left_out() -> None:
    for k, splits, expected in ((640, 4, 3), (128, 8, 1), (1024, 8, 8), (1152, 8, 5)):
        launches = dense(Dense("mfma", 2, 4, k, HipConfig(k_splits=splits))).launches
        assert launches[0].options["SPLITS"] == expected
        assert len(launches) == (1 if expected == 1 else 2)


# ---- the model itself ----


@needs_compiler
@pytest.mark.parametrize("entry", list(probes()))
@pytest.mark.parametrize("backwards", [False, True])
def test_the_model_of_a_wave(entry: str, backwards: bool) -> None:
    check_probe(entry, partial(run_on_host, backwards=backwards))


@needs_compiler
def test_a_missing_barrier_shows() -> None:
    values = torch.randn(128)
    expected = (values[:64] + values[64:].flip(0)).repeat(2)
    for backwards in (False, True):
        out = torch.empty(128)
        run_on_host(probe("local_memory", values, out, threads=128, BARRIER=0), backwards=backwards)
        assert out.isnan().any(), "local memory is full of NaNs at first"
        assert not torch.equal(out, expected)


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (1, "a value is not uniform"),
        (2, "lanes 0 and 3 of a wave do different things"),
        (3, "a load at 8 is misaligned"),
        (4, "a load of 1 bytes at 524288 of 1048576 is outside of all tensors"),
        (5, "lanes 0 and 3 of a wave do different things"),
    ],
)
def test_faults(wrong: int, fault: str) -> None:
    data, out = torch.zeros(256, dtype=torch.uint8), torch.zeros(64)
    with pytest.raises(AssertionError, match=fault):
        run_on_host(probe("wrong", data, out, WRONG=wrong))
