"""`ScaledTensor`: a frozen pytree with invariants, through vmap, torch.compile and pickle."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.layout import BLOCKS, Block, swap


def same(a: ScaledTensor, b: ScaledTensor) -> bool:
    return (
        a.block == b.block
        and (a.dtype, a.scale.dtype) == (b.dtype, b.scale.dtype)
        and torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
        and torch.equal(a.scale.float(), b.scale.float())
    )


def layout(q: ScaledTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return q.data.stride(), q.scale.stride()


@pytest.fixture
def q() -> ScaledTensor:
    return fp8fn.quantize(torch.randn(77, 200).bfloat16(), (1, 128))


def test_flatten_and_unflatten(q: ScaledTensor) -> None:
    leaves, spec = pytree.tree_flatten(q)
    assert leaves[0] is q.data
    assert leaves[1] is q.scale
    assert len(leaves) == 2
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, ScaledTensor)
    assert again.data is q.data
    assert again.block == (1, 128)
    paths, _ = pytree.tree_flatten_with_path({"w": q})
    assert [pytree.keystr(path) for path, _ in paths] == ["['w'].data", "['w'].scale"]


def test_the_block_belongs_to_the_structure(q: ScaledTensor) -> None:
    other = ScaledTensor(q.data[:, :128], q.scale[:, :1], (1, -1))
    assert pytree.tree_structure(q) != pytree.tree_structure(other)
    assert pytree.tree_structure(q) == pytree.tree_structure(fp8fn.quantize(torch.randn(4, 8), (1, 128)))


def test_tree_map(q: ScaledTensor) -> None:
    cloned = pytree.tree_map(torch.clone, {"layer": [q, q.mT]})
    assert same(cloned["layer"][0], q)
    assert same(cloned["layer"][1], q.mT)
    shapes = pytree.tree_map(lambda t: t.shape, q)  # leaves of any type, as vmap's in_dims are
    assert (shapes.data, shapes.scale) == ((77, 200), (77, 2))


def test_spec_can_be_written_to_json(q: ScaledTensor) -> None:
    spec = pytree.tree_structure([q, q.mT])
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_frozen(q: ScaledTensor) -> None:
    for name in ("data", "scale", "block"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, name, None)


def test_properties(q: ScaledTensor) -> None:
    assert (q.shape, q.ndim, q.dtype, q.device.type) == ((77, 200), 2, torch.float8_e4m3fn, "cpu")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_transpose_moves_no_data(block: Block) -> None:
    q = fp8fn.quantize(torch.randn(2, 77, 200), block)
    t = q.mT
    assert t.block == swap(block)
    assert t.shape == (2, 200, 77)
    assert t.data.data_ptr() == q.data.data_ptr()
    assert t.scale.data_ptr() == q.scale.data_ptr()
    assert same(t.mT, q)
    assert torch.equal(fp8fn.dequantize(t, torch.float32), fp8fn.dequantize(q, torch.float32).mT)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_to_keeps_strides(block: Block) -> None:
    q = fp8fn.quantize(torch.randn(2, 77, 201), block)
    moved = q.to("meta")
    assert moved.device.type == "meta"
    assert (layout(moved), moved.block, moved.shape) == (layout(q), block, q.shape)
    assert same(q.to("cpu"), q)


def expanded(q: ScaledTensor, how: str) -> ScaledTensor:
    """The same values with axes that repeat: of the batch, of the scales' rows, or of everything."""
    if how == "batch":
        data, scale = (x.expand(3, *x.shape) for x in (q.data, q.scale))
    elif how == "scale":
        data, scale = q.data, q.scale[:1].expand(q.scale.shape)
    elif how == "one element":
        data, scale = q.data[:1, :1].expand(q.shape), q.scale[:1, :1].expand(q.scale.shape)
    else:
        data, scale = (x[None].expand(0, *x.shape) for x in (q.data, q.scale))
    return ScaledTensor(data, scale, q.block)


@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
@pytest.mark.parametrize("how", ["batch", "scale", "one element", "an empty batch"])
def test_to_of_expanded_parts(how: str, scale: str) -> None:
    x = torch.randn(77, 200)
    q = expanded(fp8fn.quantize(x, (1, 32), scale=scale), how)  # type: ignore[arg-type]
    for device in ("cpu", "meta"):
        moved = q.to(device)
        assert (layout(moved), moved.shape, moved.block) == (layout(q), q.shape, q.block)
        assert moved.data.untyped_storage().nbytes() <= q.data.untyped_storage().nbytes()
    copy = q.to("cpu")
    assert same(copy, q)
    if q.data.numel():
        assert copy.data.data_ptr() != q.data.data_ptr()


def test_grouped_to_of_expanded_parts() -> None:
    ends = torch.tensor([1, 4], dtype=torch.int32)
    x = torch.randn(5, 6)
    whole = fp8fn.quantize_grouped(x, ends, block=-1)
    q = fp8fn.GroupedScaledTensor(whole.data[:1].expand(5, 6), whole.scale[:, :1].expand(2, 6), ends, 0, -1, 5)
    for device in ("cpu", "meta"):
        moved = q.to(device)
        assert (moved.data.stride(), moved.scale.stride()) == (q.data.stride(), q.scale.stride())
        assert (moved.offsets.device.type, moved.axis, moved.block, moved.size) == (device, 0, -1, 5)
    assert torch.equal(q.to("cpu").dequantize(), q.dequantize())


def test_equal_is_identical(q: ScaledTensor) -> None:
    ends = torch.tensor([30, 77], dtype=torch.int32)
    g = fp8fn.quantize_grouped(torch.randn(77, 20), ends)
    for one, other in ((q, copy.deepcopy(q)), (q, ScaledTensor(q.data, q.scale, q.block)), (g, copy.deepcopy(g))):
        assert one == one
        assert (one == other, one != other) == (False, True)
        assert one in [other, one]
        assert {one: 1, other: 2}[one] == 1


def test_compiled_code_is_kept_for_another_tensor_of_the_kind(q: ScaledTensor, fresh_dynamo: None) -> None:
    """`==` by identity makes no guard on which tensor it was."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda q: fp8fn.dequantize(q), backend=counter, fullgraph=True)
    for x in (q, copy.deepcopy(q), fp8fn.quantize(torch.randn(77, 200), (1, 128))):
        assert torch.equal(compiled(x), fp8fn.dequantize(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("block", [[1, 128], torch.Size([1, 128]), (1, 128)], ids=repr)
def test_a_block_is_a_tuple_of_ints(block: Block, fresh_dynamo: None) -> None:
    x = torch.randn(77, 200)
    made = fp8fn.quantize(x, block)
    for q in (made, ScaledTensor(made.data, made.scale, block), ScaledTensor(0, None, block)):  # type: ignore[arg-type]
        assert type(q.block) is tuple
        assert [type(size) for size in q.block] == [int, int]
        assert q.block == (1, 128)
        assert hash(pytree.tree_structure(q)) == hash(pytree.tree_structure(made))
    dual = fp8fn.quantize_dual(x, block)
    assert [type(q.block) for q in dual] == [tuple, tuple]
    assert torch.equal(torch.compile(fp8fn.dequantize, backend="eager", fullgraph=True)(made), fp8fn.dequantize(made))


def test_leaves_of_any_type(q: ScaledTensor) -> None:
    """Under pytree.tree_map, which builds the structure with what the function returned; a caller may not."""
    halves = pytree.tree_map(lambda t: t if t.dtype == torch.float32 else None, q)
    assert halves.data is None
    assert halves.scale is q.scale
    assert halves.block == q.block
    assert pytree.tree_map(lambda t: [t], q).scale == [q.scale]
    ends = torch.tensor([30, 77], dtype=torch.int32)
    g = fp8fn.quantize_grouped(torch.randn(77, 20), ends)
    names = pytree.tree_map(lambda t: str(t.dtype), g)
    assert (names.data, names.scale, names.offsets) == ("torch.float8_e4m3fn", "torch.float32", "torch.int32")
    assert (names.axis, names.block, names.size) == (0, 128, 77)


@pytest.mark.gpu
def test_to_the_device_and_back(q: ScaledTensor) -> None:
    there = q.to("cuda")
    assert layout(there) == layout(q)
    assert same(there.to("cpu"), q)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q: (q.data.float(), q.scale, q.block), TypeError, "data has dtype torch.float32"),
        (lambda q: (q.data, q.scale.half(), q.block), TypeError, "scale has dtype torch.float16"),
        (lambda q: (q.data, q.scale[:, :1], q.block), ValueError, r"scale has shape \(77, 1\).* needs \(77, 2\)"),
        (lambda q: (q.data, q.scale, (128, 1)), ValueError, r"needs \(1, 200\)"),
        (lambda q: (q.data, q.scale, (1, 64)), ValueError, r"block=\(1, 64\) is not a block of fp8fn; use one of"),
        (lambda q: (q.data, q.scale, (1,)), ValueError, r"block=\(1,\) is not a block"),
        (lambda q: (q.data[0], q.scale[0], q.block), ValueError, "at least two dimensions"),
        (lambda q: (q.data[None], q.scale, q.block), ValueError, r"needs \(1, 77, 2\)"),
    ],
)
def test_invariants(q: ScaledTensor, change: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ScaledTensor(*change(q))  # type: ignore[operator]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_pickle_and_deepcopy_keep_values_and_strides(block: Block) -> None:
    for scale in ("fp32", "e8m0"):
        q = fp8fn.quantize(torch.randn(2, 33, 70), block, scale=scale)  # type: ignore[arg-type]
        for again in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
            assert same(again, q)
            assert layout(again) == layout(q)


def test_torch_save_and_load_of_weights_only() -> None:
    for scale, block in (("fp32", (1, 128)), ("fp32", (128, 128)), ("e8m0", (1, 32))):
        q = fp8fn.quantize(torch.randn(77, 200).bfloat16(), block, scale=scale)  # type: ignore[arg-type]
        file = io.BytesIO()
        torch.save({"w": q}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["w"]
        assert same(loaded, q)
        assert layout(loaded) == layout(q)


def test_repr() -> None:
    x = torch.ones(77, 200)
    x[0, :7] = 0
    q = fp8fn.quantize(x, (1, 128))
    values = "0.00223 to 0.00223, saturated=99.95%, zero=0.05%"
    assert repr(q) == f"ScaledTensor(e4m3fn[77, 200], block=(1, 128), scale=fp32, {values})"
    assert repr(q.to("meta").mT) == "ScaledTensor(e4m3fn[200, 77], block=(128, 1), scale=fp32, device='meta')"
    mx = fp8fn.quantize(torch.ones(2, 8, 64), (1, 32), dtype=torch.float8_e5m2, scale="e8m0")
    values = "3.05e-05 to 3.05e-05, saturated=0.00%, zero=0.00%"
    assert repr(mx) == f"ScaledTensor(e5m2[2, 8, 64], block=(1, 32), scale=e8m0, {values})"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_vmap_over_and_into(block: Block) -> None:
    x = torch.randn(3, 40, 130)
    out = torch.vmap(lambda t: fp8fn.quantize(t, block))(x)
    assert isinstance(out, ScaledTensor)
    assert same(out, fp8fn.quantize(x, block))
    back = torch.vmap(lambda q: fp8fn.dequantize(q, torch.float32))(out)
    assert torch.equal(back, fp8fn.dequantize(out, torch.float32))
    assert same(torch.vmap(lambda q: q.mT)(out), out.mT)


def test_vmap_of_the_product() -> None:
    a, b = (fp8fn.quantize(torch.randn(3, *shape), block) for shape, block in
            (((40, 130), (1, 128)), ((130, 50), (128, 128))))  # fmt: skip
    out = torch.vmap(lambda a, b: fp8fn.gemm(a, b, out_dtype=torch.float32))(a, b)
    torch.testing.assert_close(out, fp8fn.gemm(a, b, out_dtype=torch.float32))
    shared = ScaledTensor(b.data[0], b.scale[0], b.block)
    out = torch.vmap(lambda a, b: fp8fn.gemm(a, b, out_dtype=torch.float32), (0, None))(a, shared)
    torch.testing.assert_close(out, fp8fn.gemm(a, shared, out_dtype=torch.float32))


def test_vmap_with_in_dims_of_the_leaves() -> None:
    q = fp8fn.quantize(torch.randn(3, 40, 130), (1, 128))
    out = torch.vmap(lambda q: fp8fn.dequantize(q), in_dims=(ScaledTensor(0, 0, (1, 128)),))(q)  # type: ignore[arg-type]
    assert torch.equal(out, fp8fn.dequantize(q))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_function_takes_and_returns_it(q: ScaledTensor, dynamic: bool, fresh_dynamo: None) -> None:
    def work(q: ScaledTensor, x: Tensor) -> tuple[ScaledTensor, Tensor, ScaledTensor]:
        return fp8fn.quantize(x * 2, (1, -1)), fp8fn.dequantize(q), q.mT

    x = torch.randn(40, 70)
    compiled = torch.compile(work, fullgraph=True, dynamic=dynamic)
    got, want = compiled(q, x), work(q, x)
    assert isinstance(got[0], ScaledTensor)
    assert same(got[0], want[0])
    assert layout(got[0]) == layout(want[0])
    assert torch.equal(got[1], want[1])
    assert same(got[2], q.mT)


def test_compiled_dequantization_writes_every_element(fresh_dynamo: None) -> None:
    """Partial last blocks in 16 bits: Inductor 2.13 leaves them unwritten when the scale is spread by views."""
    parts = [part for block in BLOCKS for q in [fp8fn.quantize(torch.randn(2, 77, 200), block)] for part in (q, q.mT)]

    def dequantized(parts: list[ScaledTensor]) -> list[Tensor]:
        return [fp8fn.dequantize(part) for part in parts]

    found = torch.compile(dequantized, fullgraph=True)(parts)
    for part, got, want in zip(parts, found, dequantized(parts), strict=True):
        assert torch.equal(got, want), (part.block, part.shape)


def test_dequantize_as_a_method(q: ScaledTensor) -> None:
    assert torch.equal(q.dequantize(), fp8fn.dequantize(q))
    assert torch.equal(q.dequantize(torch.float32), fp8fn.dequantize(q, torch.float32))


def test_matmul_operator(q: ScaledTensor) -> None:
    w = fp8fn.quantize(torch.randn(200, 96), (128, 128))
    x, y = torch.randn(3, 200), torch.randn(200, 3)
    assert torch.equal(x @ w, fp8fn.gemm(x, w))
    assert torch.equal(q @ y, fp8fn.gemm(q, y))
    assert torch.equal(q @ w, fp8fn.gemm(q, w))
    with pytest.raises(TypeError, match="unsupported operand"):
        q @ 2


def test_indices_of_leading_dimensions() -> None:
    q = fp8fn.quantize(torch.randn(2, 3, 40, 200), (1, 128))
    exact = q.dequantize(torch.float32)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    for index in (1, -1, slice(1, None), (0, 2), (slice(None), 1), torch.tensor([1, 0, 1]), mask):
        assert torch.equal(q[index].dequantize(torch.float32), exact[index])
    assert [each.shape for each in q] == [(3, 40, 200)] * 2
    assert q[1].data.data_ptr() == q.data[1].data_ptr()
    pair: tuple[Any, ...]
    for pair in (
        ([1, 0], torch.tensor([1, 0])),
        ([[0, 1], [1, 1]], torch.tensor([[0, 1], [1, 1]])),
        ([True, False], torch.tensor([True, False])),
        (mask.tolist(), mask),
        ((slice(None), [2, 0]), (slice(None), torch.tensor([2, 0]))),
        ([], torch.tensor([], dtype=torch.int64)),
        (range(2), torch.tensor([0, 1])),
    ):
        assert torch.equal(q[pair[0]].dequantize(torch.float32), exact[pair[1]])
    e8m0 = fp8fn.quantize(torch.randn(3, 40, 64), (1, 32), scale="e8m0")
    chosen = torch.tensor([2, 0])
    assert torch.equal(e8m0[chosen].dequantize(), e8m0.dequantize()[chosen])
    with pytest.raises(IndexError, match="reaches into the matrix"):
        q[0, 0, 0]
    with pytest.raises(IndexError, match="reaches into the matrix"):
        q[0, 0][0]
    rows = torch.ones(2, 3, 40, dtype=torch.bool)
    for mask_of_rows in (rows, rows.tolist(), rows.byte()):
        with pytest.raises(IndexError, match="reaches into the matrix"):
            q[mask_of_rows]
    with pytest.raises(IndexError, match="out of"):
        q[2]
    with pytest.raises(TypeError, match="is no tensor; use integers, slices or tensors, and a tuple of them"):
        q[[slice(0, 1), slice(0, 1)]]
    with pytest.raises(TypeError, match="is no tensor; use integers, slices or tensors, and a tuple of them"):
        q[[torch.tensor([0]), torch.tensor([1])]]
    with pytest.raises(TypeError, match="has None or"):
        q[None]
    with pytest.raises(TypeError, match="no leading dimension to iterate over"):
        list(q[0, 0])


@pytest.mark.gpu
def test_cuda(q: ScaledTensor) -> None:
    for moved in (q.cuda(), q.cuda(0), q.cuda("cuda:0")):  # type: ignore[arg-type]
        assert moved.device == torch.device("cuda", 0)
        assert same(moved.to("cpu"), q)
