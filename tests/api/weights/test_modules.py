"""An `FP8Weight` in a module: state dicts, files, copies, conversions, writes, and what stays frozen."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.fp8_weights import layer, make, parts, same, values

BF16 = torch.bfloat16
FORMATS: list[tuple[ScaleFormat, Block]] = [("fp32", (128, 128)), ("e8m0", (1, 32))]
formats = pytest.mark.parametrize(("scale", "block"), FORMATS, ids=str)


def address(weight: Tensor) -> int:
    return parts(weight)[0].data_ptr()


def test_a_parameter() -> None:
    w = layer(dtype=BF16).weight
    assert isinstance(w, nn.Parameter)
    assert isinstance(w, FP8Weight)
    assert (w.shape, w.dtype, w.device.type, w.requires_grad) == ((320, 384), BF16, "cpu", False)
    assert (w.is_floating_point(), w.numel(), w.element_size()) == (True, 320 * 384, 2)
    assert w.nbytes == 320 * 384 + 4 * 3 * 3
    assert w[:128].nbytes == 128 * 384 + 4 * 3
    text = "FP8Weight(e4m3fn[320, 384], block=(128, 128), dtype=torch.bfloat16)"
    assert repr(w) == f"Parameter containing:\n{text}"
    assert repr(w.detach()) == text
    assert w.scaled.block == (128, 128)
    assert torch.equal(w.dequantize(torch.float32), values(w))
    assert torch.equal(w.dequantize(), values(w).bfloat16())
    with pytest.raises(ValueError, match=re.escape("scaled: a view of shape (384,)")):
        _ = w[0].scaled


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"FP8Weight: scaled is a Tensor; use fp8fn.quantize"):
        FP8Weight(torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"FP8Weight: dtype=torch.float64 is no type of activations"):
        make(64, 64, dtype=torch.float64)


def test_state_dict_shares_the_data() -> None:
    m = layer(bias=True)
    found = m.state_dict()["weight"]
    assert address(found) == address(m.weight)
    assert same(found, m.weight)


@formats
@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict(scale: ScaleFormat, block: Block, assign: bool) -> None:
    m, n = (layer(block=block, scale=scale) for _ in range(2))
    before = address(n.weight)
    assert not same(m.weight, n.weight)
    n.load_state_dict(m.state_dict(), assign=assign)
    assert same(m.weight, n.weight)
    assert isinstance(n.weight, nn.Parameter)
    assert address(n.weight) == (address(m.weight) if assign else before)


def test_a_load_from_16_bits_quantizes_in_place() -> None:
    n, w = layer(dtype=BF16), torch.randn(320, 384).bfloat16()
    before = address(n.weight)
    n.load_state_dict({"weight": w})
    assert same(n.weight, FP8Weight(fp8fn.quantize(w, (128, 128))))
    assert address(n.weight) == before


LAZY_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the negative bit": lambda x: torch._neg_view(-x),
    "the imaginary part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "rows of a negated view": lambda x: torch._neg_view(-torch.cat([x, x]))[len(x) :],
}


@pytest.mark.parametrize("name", LAZY_VIEWS)
@pytest.mark.parametrize(
    "how", ["copy_", "load_state_dict", "data", "an expert", "whole blocks", "vector_to_parameters"]
)
def test_a_lazily_negated_view_is_quantized_with_its_sign(how: str, name: str) -> None:
    w = torch.randn(256, 128)
    source = LAZY_VIEWS[name](w)
    assert source.is_neg()
    m = layer(256, 128)
    if how == "copy_":
        m.weight.copy_(source)
    elif how == "load_state_dict":
        m.load_state_dict({"weight": source})
    elif how == "data":
        m.weight.data = source
    elif how == "an expert":
        experts = make(3, 256, 128)
        experts[1] = source
        m.weight = nn.Parameter(experts[1], requires_grad=False)
    elif how == "whole blocks":
        rows = make(512, 128)
        rows[256:] = source
        m.weight = nn.Parameter(rows[256:], requires_grad=False)
    else:
        vector_to_parameters(source.view(-1), m.parameters())
    assert snr(values(m.weight), w) > 25


def test_a_lazily_negated_tensor_gets_the_values_of_a_weight() -> None:
    w, memory = make(256, 128), torch.zeros(256, 128)
    torch._neg_view(memory).copy_(w)
    assert torch.equal(memory, -values(w))


def test_a_load_of_fp8_into_16_bits_dequantizes() -> None:
    n, m = nn.Linear(384, 320, bias=False, dtype=BF16), layer(dtype=BF16)
    n.load_state_dict(m.state_dict())
    assert type(n.weight) is nn.Parameter
    assert torch.equal(n.weight, values(m.weight).bfloat16())


def test_a_load_into_a_meta_module_stays_frozen_with_one_warning() -> None:
    """`load_state_dict(assign=True)` passes `requires_grad=True` of the module on, and asked for a dense gradient."""
    m = nn.Sequential(layer(256, 256), layer(256, 256))
    with torch.device("meta"):
        n = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    with pytest.warns(UserWarning, match="stays frozen") as said:
        n.load_state_dict(m.state_dict(), assign=True)
    assert len(said) == 1
    x = torch.randn(2, 256, requires_grad=True)
    n(x).sum().backward()
    assert all(not p.requires_grad and p.grad is None for p in n.parameters())
    assert snr(n(x), x @ values(m[0].weight).T @ values(m[1].weight).T) > 100


@pytest.mark.parametrize("how", ["Parameter", "requires_grad_", "attribute", "module"])
def test_a_user_cannot_make_it_trainable(how: str) -> None:
    m = layer()
    w = make(64, 64)
    changes: dict[str, Callable[[], Any]] = {
        "Parameter": lambda: nn.Parameter(w),
        "requires_grad_": w.requires_grad_,
        "attribute": lambda: setattr(w, "requires_grad", True),
        "module": lambda: m.requires_grad_(True),
    }
    with pytest.warns(UserWarning, match="an FP8Weight stays frozen: requires_grad=True has no effect on it"):
        made = changes[how]()
    assert made is None or not any(p.requires_grad for p in (made.parameters() if made is m else [made]))
    assert not w.requires_grad
    assert not m.weight.requires_grad
    out = F.linear(torch.randn(2, 64), w)
    assert not out.requires_grad


def test_a_load_in_another_block_is_refused() -> None:
    n = layer()
    before = parts(n.weight)[0].clone()
    with pytest.raises(RuntimeError, match=re.escape("in blocks of (1, 128) into one of torch.float8_e4m3fn")):
        n.load_state_dict(layer(block=(1, 128)).state_dict())
    assert torch.equal(parts(n.weight)[0], before)
    with pytest.raises(ValueError, match=r"with scales of torch.float8_e8m0fnu into one with scales of torch.float32"):
        make(64, 64, block=(1, 32)).copy_(make(64, 64, block=(1, 32), scale="e8m0"))
    with pytest.raises(ValueError, match=re.escape("of shape (1, 64) into one of (64, 64)")):
        make(64, 64, block=(1, 32)).copy_(make(1, 64, block=(1, 32)))


@formats
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "torch.save of a module", "mmap"])
def test_copies_and_files(scale: ScaleFormat, block: Block, how: str, tmp_path: Path) -> None:
    m = layer(bias=True, block=block, scale=scale, dtype=BF16)
    path = tmp_path / "model.pt"
    if how in ("torch.save", "mmap"):
        torch.save(m.state_dict(), path)
        n = layer(bias=True, block=block, scale=scale, dtype=BF16)
        n.load_state_dict(torch.load(path, weights_only=True, mmap=how == "mmap"))
    elif how == "torch.save of a module":
        torch.save(m, path)
        n = torch.load(path, weights_only=False)
    else:
        n = copy.deepcopy(m) if how == "deepcopy" else pickle.loads(pickle.dumps(m))
    assert same(m.weight, n.weight)
    assert isinstance(n.weight, nn.Parameter)
    assert n.weight.dtype == BF16
    assert address(m.weight) != address(n.weight)
    assert m.weight.scaled.data.stride() == n.weight.scaled.data.stride()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("block", [(128, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "clone"])
def test_a_copy_keeps_the_strides_that_kernels_load(how: str, block: Block) -> None:
    """Rows begin at multiples of 16 bytes; kernels load others by slower configurations."""
    w = make(5, 100, block=block)
    copies: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "clone": torch.clone
    }  # fmt: skip
    made = copies[how](w)
    assert same(made, w)
    assert made.stride() == (112, 1)
    for found, expected in zip((made.scaled.data, made.scaled.scale), (w.scaled.data, w.scaled.scale), strict=True):
        assert found.stride() == expected.stride()
        assert found.data_ptr() != expected.data_ptr()


@pytest.mark.parametrize("how", ["pickle", "torch.save", "weights_only", "copy", "deepcopy"])
@pytest.mark.parametrize("parameter", [True, False])
def test_attributes_of_a_weight_are_kept_where_pytorch_keeps_them(how: str, parameter: bool, tmp_path: Path) -> None:
    def again(tensor: Any) -> Any:
        tensor.shard, tensor.parts = 3, ["q", "k"]
        if how in ("copy", "deepcopy"):
            return getattr(copy, how)(tensor)
        if how == "pickle":
            return pickle.loads(pickle.dumps(tensor))
        torch.save(tensor, tmp_path / "tensor.pt")
        return torch.load(tmp_path / "tensor.pt", weights_only=how == "weights_only")

    w = make(256, 128)
    given, plain = (nn.Parameter(each, requires_grad=False) if parameter else each for each in (w, torch.ones(2)))
    found, expected = again(given), again(plain)
    assert [getattr(found, name, None) for name in ("shard", "parts")] == [
        getattr(expected, name, None) for name in ("shard", "parts")
    ]
    assert same(found, w)
    assert isinstance(found, nn.Parameter) == parameter
    with pytest.raises(ValueError, match=r"the state of a pickle holds \['_data'\]"):
        found.__setstate__({"_data": torch.ones(1)})


def test_a_file_names_public_classes_alone(tmp_path: Path) -> None:
    """Files outlive the modules of this package."""
    torch.save(layer().state_dict(), tmp_path / "model.pt")
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "model.pt") == []
    text = pickle.dumps(layer().weight)
    assert b"fp8fn.weights" not in text
    assert b"FP8Weight" in text


def test_a_damaged_pickle_is_refused() -> None:
    w = make(256, 256)
    state = {**w.scaled.__getstate__(), "scale": torch.ones(1, 2)}
    with pytest.raises(ValueError, match=re.escape("scale has shape (1, 2)")):
        w.scaled.__setstate__(state)
    with pytest.raises(ValueError, match="has no matrices"):
        pickle.dumps(w[0])


def test_a_file_on_another_device(tmp_path: Path) -> None:
    torch.save(layer().state_dict(), tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True, map_location="meta")["weight"]
    assert isinstance(found, FP8Weight)
    assert (found.device.type, found.scaled.data.device.type) == ("meta", "meta")


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_another_dtype_changes_no_data(dtype: torch.dtype) -> None:
    m = layer(bias=True)
    w, before, bytes_before = m.weight, address(m.weight), parts(m.weight)[0].clone()
    m.to(dtype)
    assert m.weight is w
    assert (w.dtype, m.bias.dtype, isinstance(w, nn.Parameter)) == (dtype, dtype, True)
    assert address(w) == before
    assert torch.equal(parts(w)[0], bytes_before)
    x = torch.randn(3, 384).to(dtype)
    assert snr(m(x).float(), x.float() @ values(w).T + m.bias.float()) > (100 if dtype == torch.float32 else 45)


def test_a_dtype_without_products_is_refused() -> None:
    m = layer()
    for change in (m.double, lambda: m.weight.to(torch.float8_e4m3fn), lambda: m.weight.long()):
        with pytest.raises(TypeError, match=r"FP8Weight.to: dtype=torch.\w+ is no type of activations"):
            change()
    assert isinstance(m.weight, FP8Weight)


def test_to_meta_and_back() -> None:
    m, n = layer(), layer().to("meta")
    assert isinstance(n.weight, FP8Weight)
    assert n.weight.scaled.scale.device.type == "meta"
    n.to_empty(device="cpu").load_state_dict(m.state_dict())
    assert same(m.weight, n.weight)


def test_swapped_parameters() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        m, n = layer(), layer()
        n.half().float().load_state_dict(m.state_dict())
    assert same(m.weight, n.weight)


VIEWS_WITH_SHARED_SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of a block": lambda w: w[:64],
    "rows across blocks": lambda w: w[50:150],
    "columns of a block": lambda w: w[:, 64:192],
    "rows of one scale": lambda w: w[3:70],
    "an expert": lambda w: w.view(4, 64, 384)[1],
}


@pytest.mark.parametrize("name", VIEWS_WITH_SHARED_SCALES)
@pytest.mark.parametrize("how", ["deepcopy", "deepcopy of a module", "pickle", "clone", "to"])
def test_a_copy_of_a_view_owns_its_scales(how: str, name: str) -> None:
    w = make(256, 384, block=(-1, -1) if name == "rows of one scale" else (128, 128))
    view, before = VIEWS_WITH_SHARED_SCALES[name](w), [part.clone() for part in parts(w)]
    n, k = view.shape
    m = nn.Linear(k, n, bias=False)
    m.weight = nn.Parameter(view, requires_grad=False)
    with pytest.raises(RuntimeError, match="copy_ into a view of an FP8Weight"):
        m.load_state_dict({"weight": torch.ones(n, k)})
    if how == "deepcopy of a module":
        m = copy.deepcopy(m)
    else:
        copies: dict[str, Callable[[Any], Any]] = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
            "clone": lambda x: x.detach().clone(),
            "to": lambda x: x.detach().to("cpu", copy=True),
        }
        m.weight = nn.Parameter(copies[how](m.weight), requires_grad=False)
    assert torch.equal(values(m.weight), values(view))
    loaded = torch.randn(n, k)
    m.load_state_dict({"weight": loaded})
    assert snr(values(m.weight), loaded) > 25
    assert all(map(torch.equal, parts(w), before))


def test_tied_weights_stay_tied() -> None:
    m = nn.ModuleDict({"table": nn.Embedding(512, 256), "head": nn.Linear(256, 512, bias=False)})
    m["table"].weight = m["head"].weight = nn.Parameter(make(512, 256), requires_grad=False)
    for n in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), copy.deepcopy(m).half()):
        assert n["head"].weight is n["table"].weight
        assert len(list(n.parameters())) == 1
        assert same(n["head"].weight, m["head"].weight)
    dense = values(m["head"].weight)
    rows = torch.tensor([1, 400, 511, 1])
    assert snr(m["head"](m["table"](rows)), dense[rows] @ dense.T) > 100


def test_error_takes_a_weight() -> None:
    dense = torch.randn(320, 384)
    weight = FP8Weight(fp8fn.quantize(dense, (128, 128)))
    found, same_bytes = fp8fn.error(dense, weight), fp8fn.error(dense, weight.scaled)
    assert (found.snr_db, found.saturated) == (same_bytes.snr_db, same_bytes.saturated)
    assert torch.equal(found.by_block, same_bytes.by_block)
    assert found.by_block.shape == (3, 3)


def test_the_data_attribute() -> None:
    """PyTorch's own setter would change the sizes of the wrapper and leave its two tensors: nothing, silently."""
    m, n = layer(), layer()
    n.weight.data = m.weight.data
    assert same(m.weight, n.weight)
    w = torch.randn(320, 384)
    n.weight.data = w
    assert same(n.weight, FP8Weight(fp8fn.quantize(w, (128, 128))))
    with pytest.raises(RuntimeError, match=re.escape("weight.data = a Tensor of shape (2, 384): the weight has shape")):
        n.weight.data = torch.randn(2, 384)
    with pytest.raises(
        RuntimeError, match=r"an FP8Weight for torch.bfloat16; this one stands for torch.float32; use v"
    ):
        n.weight.data = layer(dtype=BF16).weight.data


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda w: w.add_(1),
    "fill_": lambda w: w.fill_(0),
    "zero_": lambda w: w.zero_(),
    "out": lambda w: torch.add(torch.ones(320, 384), 1, out=w),
    "w[0] = 1": lambda w: w.__setitem__(0, 1),
    "w[0].fill_": lambda w: w[0].fill_(0),
    "w[3:70].zero_": lambda w: w[3:70].zero_(),
    "rows of a block": lambda w: w[:64].copy_(torch.ones(64, 384)),
    "an FP8Weight into rows of a block": lambda w: w[:64].copy_(make(64, 384)),
    "rows that start inside of a block": lambda w: w[64:].copy_(torch.ones(256, 384)),
    "fill_diagonal_": lambda w: w.fill_diagonal_(0),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)).zero_(),
    "normal_": lambda w: nn.init.normal_(w),
    "mul_ of a vector": lambda w: w.view(-1).mul_(2),
    "masked": lambda w: w.masked_fill_(torch.ones(320, 384, dtype=torch.bool), 0),
    "index_put_": lambda w: w.__setitem__(torch.tensor([1, 2]), 0),
    "heads inside of blocks": lambda w: w.view(5, 64, 384).copy_(torch.ones(5, 64, 384)),
    "resize_": lambda w: w.resize_(2, 2),
    "set_": lambda w: w.set_(torch.ones(2, 2)),
    "through data": lambda w: w.data.zero_(),
    "through flatten": lambda w: w.flatten().zero_(),
    "columns inside of blocks": lambda w: w[:, :64].copy_(torch.ones(320, 64)),
    "a row": lambda w: w.select(0, 3).copy_(torch.ones(384)),
    "a transposed row": lambda w: w.T[:, 3].zero_(),
    "an optimizer": lambda w: torch._foreach_add_([w], 1),
}
# Views that have no FP8 form.
WRITES_INTO_DENSE_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "w[5, 3] = 1": lambda w: w.__setitem__((5, 3), 1.0),
    "w[:, ::2] = 0": lambda w: w.__setitem__((slice(None), slice(None, None, 2)), 0.0),
    "w[:, ::2] = tensor": lambda w: w.__setitem__((slice(None), slice(None, None, 2)), torch.ones(320, 192)),
    "rows and columns": lambda w: w[::2, 3:70].fill_(1),
    "the diagonal": lambda w: w.diagonal().zero_(),
    "a view of the diagonal": lambda w: w.diagonal()[3:9].view(2, 3).t().mul_(2),
    "an element of a row": lambda w: w[5].select(0, 3).fill_(1),
    "elements of a row": lambda w: w[5].unbind()[3].zero_(),
    "elements of a vector": lambda w: w.view(-1)[3:9].zero_(),
    "blocks torn by a reshape": lambda w: w.view(320, 2, 192).view(640, 192).add_(1),
    "chunks": lambda w: w[:, ::2].chunk(2)[1].copy_(torch.ones(160, 192)),
    "detach": lambda w: w.diagonal().detach().zero_(),
    "data": lambda w: w.diagonal().data.zero_(),
    "+=": lambda w: w.diagonal().__iadd__(1),
    "out": lambda w: torch.add(torch.ones(320), 1, out=w.diagonal()),
    "one of two outs": lambda w: torch.min(torch.ones(2, 320), 0, out=(w.diagonal(), torch.ones(320).long())),
    "foreach": lambda w: torch._foreach_zero_([torch.ones(2), w.diagonal()]),
    "index_put_": lambda w: w[:, ::2].__setitem__(torch.tensor([1, 2]), 0),
    "transpose_": lambda w: w[:, ::2].t_(),
    "set_": lambda w: w.diagonal().set_(torch.ones(2)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_refused_and_never_lost(name: str, inference: bool) -> None:
    w = layer().weight.detach()
    before = [part.clone() for part in parts(w)]
    with torch.inference_mode(inference), pytest.raises((NotImplementedError, RuntimeError)):
        WRITES[name](w)
    assert all(map(torch.equal, parts(w), before))


@pytest.mark.filterwarnings("ignore:aten.* has no FP8 form")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRITES_INTO_DENSE_VIEWS)
def test_a_write_into_a_dense_view_is_refused(name: str, inference: bool) -> None:
    w = layer().weight.detach()
    before = [part.clone() for part in parts(w)]
    for _ in range(2):  # the warning comes once, and the error each time
        with (
            torch.inference_mode(inference),
            pytest.raises(NotImplementedError, match=r"aten\.\S+ would write"),
        ):
            WRITES_INTO_DENSE_VIEWS[name](w)
    assert all(map(torch.equal, parts(w), before))


@pytest.mark.filterwarnings("ignore:aten.* has no FP8 form")
def test_a_dense_view_reads_as_a_tensor(tmp_path: Path) -> None:
    w = make(64, 128)
    view, dense = w[:, ::2], values(w)[:, ::2]
    torch.save(view, tmp_path / "view.pt")
    copies = [pickle.loads(pickle.dumps(view)), copy.deepcopy(view), torch.load(tmp_path / "view.pt"), view.clone()]
    for each in copies:
        assert type(each) is Tensor
        assert torch.equal(each, dense)
        each.zero_()
    assert view.tolist() == dense.tolist()
    assert torch.equal(torch.from_dlpack(view), dense)
    assert torch.equal(torch.empty(64, 64).copy_(view), dense)
    assert repr(view) == repr(dense)
    assert f"{w[5, 4]:.3f}" == f"{dense[5, 2].item():.3f}"
    assert (float(w[5, 4]), w[5, 4].item()) == (dense[5, 2].item(),) * 2
    x = torch.randn(3, 64, requires_grad=True)
    out = F.linear(x, view).pow(2)
    assert torch.equal(out, F.linear(x, dense).pow(2))
    (found,), (expected,) = (torch.autograd.grad(F.linear(x, v).pow(2).sum(), x) for v in (view, dense))
    assert torch.equal(found, expected)
    assert torch.equal(torch.func.vmap(lambda row: row[::2].sum())(w), dense.sum(1))
    other = make(64, 128)
    assert snr(view @ other, dense @ values(other)) > 100
    assert same(make(64, 64).copy_(view), FP8Weight(fp8fn.quantize(dense, (128, 128)), torch.float32))


@pytest.mark.filterwarnings("ignore:aten.* has no FP8 form")
def test_a_dense_view_that_is_negated_or_conjugated_lazily() -> None:
    w = make(64, 128)
    dense = values(w)
    assert torch.equal(torch._neg_view(w) + 0, -dense)
    pairs, expected = (torch.view_as_complex(x.view(64, 64, 2)).conj() for x in (w, dense))
    assert torch.equal(pairs * 1, expected * 1)
    assert torch.equal(pairs.imag + 0, -dense[:, 1::2])


def test_whole_blocks_are_written() -> None:
    w, rows, other = make(320, 384), torch.randn(128, 384), make(64, 384)
    rest = parts(w)[0][:128].clone()
    w[128:256].copy_(rows)
    w[256:].copy_(other)
    assert torch.equal(parts(w)[0][:128], rest)
    assert same(w[128:256], FP8Weight(fp8fn.quantize(rows, (128, 128)), torch.float32))
    assert same(w[256:], other)
    experts = make(3, 256, 128)
    experts[1].copy_(torch.ones(256, 128))
    assert values(experts)[1].unique().tolist() == [1.0]
    experts[2] = torch.ones(128)  # broadcast
    assert values(experts)[2].unique().tolist() == [1.0]


def test_other_ops_dequantize_with_one_warning_each() -> None:
    w = make(64, 128)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(w * 2, values(w) * 2)
            assert torch.equal(w.float().abs().sum(), values(w).abs().sum())
    expected = ["aten.mul.Tensor", "aten.abs.default"]
    assert [str(each.message).partition(" ")[0] for each in said] == expected
    assert str(said[0].message) == ("aten.mul.Tensor has no FP8 form: the weight (64, 128) is dequantized at each call")


@pytest.mark.parametrize(
    "make_layer", [nn.MultiheadAttention, partial(nn.TransformerEncoderLayer, dim_feedforward=512)]
)
def test_a_fused_layer_names_the_switch_that_keeps_its_products_in_fp8(make_layer: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    fused, x = make_layer(256, 4, batch_first=True).eval(), torch.randn(2, 16, 256)
    given = (x,) * (3 if isinstance(fused, nn.MultiheadAttention) else 1)
    fp8fn.quantize_weights(fused, where="*")
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = fused(*given)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            found = fused(*given)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(said) == 1
    assert str(said[0].message).endswith(
        "; torch.backends.mha.set_fastpath_enabled(False) has its products computed one by one, in FP8"
    )
    first, second = (out[0] if isinstance(out, tuple) else out for out in (expected, found))
    assert snr(second, first) > 60


FALLBACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second row": lambda w: w[::2],
    "a mask": lambda w: w[torch.arange(64) % 3 == 0],
    "rows and columns": lambda w: w[torch.tensor([1, 2]), torch.tensor([3, 4])],
    "columns by a tensor": lambda w: w.index_select(1, torch.tensor([3, 1])),
    "blocks torn by a reshape": lambda w: w.view(64, 2, 64).view(128, 64),
    "elements of a vector": lambda w: w.view(-1)[3:9],
    "cat with a tensor": lambda w: torch.cat([w, torch.ones(1, 128)]),
    "another dtype": lambda w: torch.zeros_like(w, dtype=torch.float64) + w,
    "unbind of a row": lambda w: torch.stack(w[3].unbind()),
    "einsum that sums all": lambda w: torch.einsum("nk,nk->", w, torch.ones(64, 128)),
    "equal to a tensor": lambda w: torch.tensor(torch.equal(w, torch.ones(64, 128))),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FALLBACKS)
def test_values_of_views_and_copies_without_an_fp8_form(name: str, inference: bool) -> None:
    w = make(64, 128)
    dense = values(w)
    with torch.inference_mode(inference), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = FALLBACKS[name](w)
    expected = FALLBACKS[name](dense)
    found = found.dequantize() if isinstance(found, FP8Weight) else found
    if name == "einsum that sums all":
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected.to(found.dtype))


def test_a_view_that_has_no_fp8_form_says_that_writes_are_errors() -> None:
    w = make(64, 64)
    with pytest.warns(UserWarning, match="and writing into its result is an error"):
        assert torch.equal(w.diagonal(), values(w).diagonal())


def test_new_tensors() -> None:
    w = make(64, 128)
    assert isinstance(torch.empty_like(w), FP8Weight)
    for new, value in ((torch.zeros_like(w), 0.0), (torch.ones_like(w), 1.0), (torch.full_like(w, 2), 2.0)):
        assert type(new) is Tensor
        assert torch.equal(new, torch.full((64, 128), value))
    assert torch.randn_like(w).std() > 0.5
    assert type(w.new_zeros(3, 5)) is Tensor
    for shape in ((4, 128), (64, 3), (0,), (3, 5), (2, 64, 128)):
        empty = w.new_empty(shape)
        assert (type(empty), empty.shape, empty.dtype) == (Tensor, shape, w.dtype)
        assert torch.equal(empty.fill_(0.3), torch.full(shape, 0.3))
    assert w.new_empty(4, 128, dtype=torch.int64).dtype == torch.int64
    assert isinstance(w.new_empty(64, 128), FP8Weight)
    padded = w.new_zeros(192, 128)
    assert isinstance(padded, FP8Weight)
    assert torch.equal(values(padded), torch.zeros(192, 128))


def test_clone_and_contiguous() -> None:
    w = make(320, 384)
    for other in (w.clone(), w.T.contiguous().T, w.T.clone(memory_format=torch.contiguous_format).T):
        assert same(w, other)
        assert address(w) != address(other)
    assert w.T.contiguous().stride() == (320, 1)
    assert w.T.contiguous().scaled.data.is_contiguous()  # type: ignore[attr-defined]
    assert torch.equal(w, w.clone())
    assert not torch.equal(w, make(320, 384))


def test_optimizers_and_norms_pass_it_over() -> None:
    m = nn.Sequential(layer(), nn.Linear(320, 8))
    optimizer = torch.optim.AdamW(m.parameters(), weight_decay=0.1)
    before = parts(m[0].weight)[0].clone()
    m(torch.randn(2, 384)).sum().backward()
    assert clip_grad_norm_(m.parameters(), 1.0) > 0
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(parts(m[0].weight)[0], before)
    assert list(optimizer.state_dict()["state"]) == [1, 2]


def test_a_vector_of_parameters_is_refused_and_quantized() -> None:
    m = nn.Sequential(layer(256, 256), nn.Linear(256, 8))
    vector = parameters_to_vector(m[1].parameters())
    with pytest.raises(NotImplementedError, match="FP8Weights that were joined to a vector"):
        parameters_to_vector(m.parameters()).add(1)
    w = torch.randn(256, 256)
    vector_to_parameters(torch.cat([w.flatten(), vector.detach()]), m.parameters())
    assert same(m[0].weight, FP8Weight(fp8fn.quantize(w, (128, 128))))


def test_functional_call_and_shared_memory() -> None:
    m, n = layer(), layer()
    x = torch.randn(2, 384)
    assert torch.equal(torch.func.functional_call(n, dict(m.named_parameters()), (x,)), m(x))
    n.share_memory()
    assert n.weight.is_shared()
    assert n.weight.scaled.scale.is_shared()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("alive", ["a graph", "a view"])
def test_a_conversion_is_refused_while_a_view_is_alive(alive: str) -> None:
    """PyTorch swaps a parameter of a wrapper subclass with the converted one, and refuses while a view holds it."""
    m, x = layer(), torch.randn(2, 384, requires_grad=True)
    kept = m(x) if alive == "a graph" else m.weight.t()
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear.weight"):
        m.half()
    assert m.weight.dtype == torch.float32
    assert isinstance(m.weight, nn.Parameter)
    if alive == "a graph":
        (dx,) = torch.autograd.grad(kept.sum(), x)
        assert snr(dx, torch.ones(2, 320) @ values(m.weight)) > 100
    else:
        assert torch.equal(values(kept), values(m.weight).T)
    del kept
    assert m.half().weight.dtype == torch.float16


def test_no_dequantized_copy_is_made() -> None:
    """No op of the forward or the backward makes a 16- or 32-bit tensor of the weight's size, and none is kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(out):
                if type(leaf) is Tensor and leaf.numel() >= 512 * 512 and leaf.element_size() > 1:
                    made.append(str(func))
            return out

    def large() -> dict[int, Tensor]:
        gc.collect()
        return {
            id(o): o for o in gc.get_objects()
            if type(o) is Tensor and o.numel() == 512 * 512 and o.element_size() > 1
        }  # fmt: skip

    m, others = layer(512, 512), large()
    with Watch():
        y = m(torch.randn(2, 512, requires_grad=True))
        y.sum().backward()
    assert made == []
    assert large().keys() <= others.keys()


def test_numbers_are_not_read_past_the_scales() -> None:
    w = make(64, 64)
    for read in (w.numpy, w.tolist):
        with pytest.raises((RuntimeError, TypeError)):
            read()
    with pytest.raises(BufferError, match="an FP8Weight has no memory of its own"):
        torch.from_dlpack(w)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # safetensors' own
def test_safetensors_does_not_write_a_weight_without_memory(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        torch_files.save_file(layer().state_dict(), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_view_is_saved_and_loaded() -> None:
    w = make(64, 64)
    file = io.BytesIO()
    torch.save(w[:32], file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).dequantize(), values(w)[:32])
