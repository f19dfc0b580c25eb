"""Fake results that an op has given before: the same geometry in new memory, of the mode that asks, and no errors."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fp8fn  # noqa: F401
from fp8fn.meta import fake_cache

OPS = torch.ops.fp8fn


def geometry(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fake_cache.Geometry]:
    """The geometries that are made without asking an op."""
    seen: list[fake_cache.Geometry] = []
    empty = fake_cache._empty

    def watched(mode: FakeTensorMode, geometry: fake_cache.Geometry) -> FakeTensor:
        seen.append(geometry)
        return empty(mode, geometry)

    monkeypatch.setattr(fake_cache, "_empty", watched)
    return seen


def test_the_second_time_is_as_the_first(made: list[fake_cache.Geometry]) -> None:
    sizes = 137, 1031  # of no other test
    with FakeTensorMode():
        x = torch.empty(sizes, dtype=torch.bfloat16)
        first = OPS.quantize_dual(x)
        assert not made
        second = OPS.quantize_dual(torch.empty(sizes, dtype=torch.bfloat16))
        again = OPS.quantize_dual(x)
    assert len(made) == 8
    assert [*map(geometry, first)] == [*map(geometry, second)]
    assert geometry(first[0]) == (sizes, (1040, 1), torch.float8_e4m3fn, torch.device("cpu"))
    assert geometry(first[3]) == ((2, 1031), (1032, 1), torch.float32, torch.device("cpu"))
    assert len({x.untyped_storage()._cdata for x in (*first, *second, *again)}) == 12


def test_another_layout_is_another_input() -> None:
    with FakeTensorMode():
        x = torch.empty(139, 1031)
        rows, columns = (OPS.quantize(each, (128, 128))[0] for each in (x, torch.empty(1031, 139).mT))
    assert (rows.stride(), columns.stride()) == ((1040, 1), (1, 144))


def test_each_mode_gets_its_own() -> None:
    modes = FakeTensorMode(), FakeTensorMode()
    for mode in modes:
        with mode:
            data = OPS.quantize(torch.empty(141, 1031), (1, 128))[0]
        assert data.fake_mode is mode
        assert OPS.quantize(mode.from_tensor(torch.empty(141, 1031)), (1, 128))[0].fake_mode is mode


def test_one_result_is_no_tuple() -> None:
    block = (1, 128)
    with FakeTensorMode():
        a, b = (torch.empty(143, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
        scale = torch.empty(143, 2)
        outs = [OPS.scaled_mm(a, scale, block, b.mT, scale.mT, (128, 1), None, torch.float16) for _ in range(2)]
    assert [*map(geometry, outs)] == [((143, 143), (143, 1), torch.float16, torch.device("cpu"))] * 2


def test_a_symbolic_size_stays_one(made: list[fake_cache.Geometry]) -> None:
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)  # type: ignore[no-untyped-call,unused-ignore]
    mode, sizes = FakeTensorMode(shape_env=ShapeEnv()), torch.empty(145, 1031)
    x = mode.from_tensor(sizes, symbolic_context=context)
    with mode:
        assert isinstance(x.shape[0], torch.SymInt)
        for _ in range(2):
            data, scale = OPS.quantize(x, (1, 128))
            assert str(data.shape[0]) == str(scale.shape[0]) == str(x.shape[0])
    assert not made


def test_an_error_is_one_each_time() -> None:
    with FakeTensorMode():
        x = torch.empty(147, 1031, dtype=torch.int32)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"x has dtype torch\.int32"):
                OPS.quantize(x, (1, 128))


def test_another_device_is_another_input() -> None:
    mode, sizes = FakeTensorMode(), (149, 1031)
    for device in ("cpu", "meta", "cpu"):
        with mode:
            out = OPS.quantize(torch.empty(sizes, device=device), (1, 128))[0]
        assert out.device.type == device


def test_the_name_of_an_argument_is_part_of_the_key() -> None:
    """PyTorch passes an op of ours no keywords today; a schema with arguments after a `*` would have it pass them."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(151, 1031)
    keys = [fake_cache._key(mode, (x,), kwargs) for kwargs in ({}, {"rows": 1}, {"columns": 1}, {"rows": 2})]
    assert None not in keys
    assert len(set(keys)) == 4


def test_real_tensors_are_propagated_every_time() -> None:
    """A mode that runs an op on real tensors too has a result of each call's own values."""
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        mode = FakeTensorMode(shape_env=ShapeEnv())
    for _ in range(2):
        real = torch.randn(153, 1031)
        x = mode.from_tensor(real)
        assert x.real_tensor is not None
        with mode:
            scale = OPS.quantize(x, (-1, -1))[1]
        assert scale.real_tensor is not None
        assert scale.real_tensor.item() == pytest.approx(real.abs().max().item() / 448)
