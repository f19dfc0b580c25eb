"""Arguments of a wrong kind: each public function names the argument, its value and what would work.

A row is a call, the exception, and what its message must have. Calls of the ops below, through `torch.ops`, keep the
dispatcher's own errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn import arguments
from fp8fn.ops.layout import BLOCKS
from support.gpu import nothing_waits

pytestmark = pytest.mark.every_case

BF16 = torch.bfloat16
A, B = torch.ones(32, 128, dtype=BF16), torch.ones(128, 48, dtype=BF16)
EXPERTS = torch.ones(2, 128, 128, dtype=BF16)
ENDS, DESCENDING = torch.tensor([16, 32], dtype=torch.int32), torch.tensor([32, 16], dtype=torch.int32)
Q, QB = fp8fn.quantize(A, (1, 128)), fp8fn.quantize(B, (128, 128))
G = fp8fn.quantize_grouped(A, ENDS)
GATE_UP, DOWN = torch.ones(2, 128, 256, dtype=BF16), EXPERTS
ARRAY = np.ones((32, 128), dtype=np.float32)
QE = fp8fn.quantize(EXPERTS, (128, 128))
LAYOUT = fp8fn.sort_tokens(torch.zeros(32, 1, dtype=torch.int32), 2, 16)
SPARSE, MKLDNN = A.float().to_sparse(), A.float().to_mkldnn()
NESTED = torch.nested.nested_tensor([A, A], layout=torch.jagged)

f: Any = fp8fn  # whose calls here are wrong, as types see too
Case = tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]

ALL_BLOCKS = tuple(map(str, BLOCKS))
# Every tensor of every function, in the same three ways. `wrong` takes its place.
PLACES: dict[str, Callable[[Any], Any]] = {
    "gemm: a": lambda wrong: f.gemm(wrong, B),
    "gemm: b": lambda wrong: f.gemm(A, wrong),
    "linear: x": lambda wrong: f.linear(wrong, B.mT),
    "linear: weight": lambda wrong: f.linear(A, wrong),
    "grouped_gemm: a": lambda wrong: f.grouped_gemm(wrong, EXPERTS, ENDS),
    "grouped_gemm: b": lambda wrong: f.grouped_gemm(A, wrong, ENDS),
    "expert_mlp: x": lambda wrong: f.expert_mlp(wrong, GATE_UP, DOWN, ENDS),
    "expert_mlp: w_gate_up": lambda wrong: f.expert_mlp(A, wrong, DOWN, ENDS),
    "expert_mlp: w_down": lambda wrong: f.expert_mlp(A, GATE_UP, wrong, ENDS),
    "quantize: x": lambda wrong: f.quantize(wrong, (1, 128)),
    "quantize_dual: x": lambda wrong: f.quantize_dual(wrong),
    "quantize_grouped: x": lambda wrong: f.quantize_grouped(wrong, ENDS),
    "quantize_grouped_dual: x": lambda wrong: f.quantize_grouped_dual(wrong, ENDS),
    "quantize_silu_mul: gate": lambda wrong: f.quantize_silu_mul(wrong, A),
    "quantize_silu_mul: up": lambda wrong: f.quantize_silu_mul(A, wrong),
    "quantize_silu_mul_dual: gate": lambda wrong: f.quantize_silu_mul_dual(wrong, A),
    "quantize_rms_norm: x": lambda wrong: f.quantize_rms_norm(wrong, A[0]),
    "quantize_rms_norm: weight": lambda wrong: f.quantize_rms_norm(A, wrong),
    "quantize_rms_norm_dual: weight": lambda wrong: f.quantize_rms_norm_dual(A, wrong),
    "sort_tokens: topk_ids": lambda wrong: f.sort_tokens(wrong, 2, 16),
    "moe_gemm: sorted_token_ids": lambda wrong: f.moe_gemm(Q, QE, wrong, *LAYOUT[1:], top_k=1),
    "moe_gemm: expert_ids": lambda wrong: f.moe_gemm(Q, QE, LAYOUT[0], wrong, LAYOUT[2], top_k=1),
    "moe_gemm: num_tokens_post_padded": lambda wrong: f.moe_gemm(Q, QE, *LAYOUT[:2], wrong, top_k=1),
}
KINDS: dict[str, tuple[Any, str, str]] = {
    "numpy": (ARRAY, "is an ndarray", "torch.from_numpy({})"),
    "None": (None, "is None", "use a tensor"),
    "list": ([A], "is a list", "torch.tensor({})"),
    "sparse": (SPARSE, "has layout torch.sparse_coo", "{}.to_dense()"),
    "mkldnn": (MKLDNN, "has layout torch._mkldnn", "{}.to_dense()"),
    "nested": (NESTED, "is a nested tensor", "{}.to_padded_tensor(0.0)"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_strided_tensor(place: str, kind: str) -> None:
    wrong, value, remedy = KINDS[kind]
    with pytest.raises(TypeError) as raised:
        PLACES[place](wrong)
    message = str(raised.value)
    assert message.startswith(f"{place} {value}")
    assert remedy.format(place.split(": ")[1]) in message


FORMATS: dict[str, Callable[..., Any]] = {
    "quantize": lambda **given: f.quantize(A, **{"block": (1, 128), **given}),
    "quantize_dual": lambda **given: f.quantize_dual(A, **given),
    "quantize_silu_mul": lambda **given: f.quantize_silu_mul(A, A, **given),
    "quantize_silu_mul_dual": lambda **given: f.quantize_silu_mul_dual(A, A, **given),
    "quantize_rms_norm": lambda **given: f.quantize_rms_norm(A, A[0], **given),
    "quantize_rms_norm_dual": lambda **given: f.quantize_rms_norm_dual(A, A[0], **given),
    "quantize_grouped": lambda **given: f.quantize_grouped(A, ENDS, **given),
    "quantize_grouped_dual": lambda **given: f.quantize_grouped_dual(A, ENDS, **given),
}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"dtype": "e4m3"}, TypeError, ("dtype='e4m3' is not an FP8 type", "torch.float8_e4m3fn", "None")),
        ({"dtype": BF16}, TypeError, ("dtype=torch.bfloat16", "torch.float8_e4m3fn")),
        ({"scale": None}, TypeError, ("scale=None is not a scale format", "'fp32', 'pow2', 'e8m0', 'rceil'")),
        ({"scale": "fp16"}, ValueError, ("scale='fp16' is not a scale format", "'fp32', 'pow2', 'e8m0', 'rceil'")),
        ({"block": None}, TypeError, ("block=None is a NoneType",)),
        ({"block": "128x128"}, TypeError, ("block='128x128' is a str",)),
        ({"block": 128.0}, TypeError, ("block=128.0 is a float",)),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_every_quantizer(
    name: str, given: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        FORMATS[name](**given)
    message = str(raised.value)
    assert message.startswith(f"{name}: {words[0]}")
    if "block" in given:
        words = (*words, "-1") + (("128",) if "grouped" in name else ALL_BLOCKS)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("block", [128, (1.0, 128.0), (True, 128), (1, 128, 1), (64, 64)], ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if "grouped" not in name])
def test_pairs_that_are_no_block(name: str, block: Any) -> None:
    error = ValueError if isinstance(block, tuple) else TypeError
    with pytest.raises(error) as raised:
        FORMATS[name](block=block)
    assert str(raised.value).startswith(f"{name}: block={block} is")
    assert all(word in str(raised.value) for word in ALL_BLOCKS)


LINEAR: list[Case] = [
    (
        "K of linear, weight (K, N)",
        lambda: f.linear(A, B),
        ValueError,
        ("linear: x (32, 128) has K=128", "weight (128, 48) has K=48", "pass weight.mT for a weight of shape (K, N)"),
    ),
    ("K of linear in FP8", lambda: f.linear(A, QB), ValueError, ("linear: x", "weight (128, 48)", "pass weight.mT")),
    ("K of linear, both in FP8", lambda: f.linear(Q, QB), ValueError, ("linear: x", "weight (128, 48) has K=48")),
    ("K of gemm in FP8", lambda: f.gemm(A, QB.mT), ValueError, ("gemm: a (32, 128)", "b (48, 128)", "weight.mT")),
    ("K of a vector", lambda: f.gemm(A[0], B.mT), ValueError, ("gemm: a (128,) has K=128", "b (48, 128)")),
    ("K in gemm", lambda: f.gemm(A, B.mT), ValueError, ("gemm: a", "b must be (K, N)", "a weight of shape (N, K)")),
    ("vector weight", lambda: f.linear(A, A[0]), ValueError, ("linear: weight has shape (128,)", "weight[None]")),
    ("scalar x", lambda: f.linear(A[0, 0], B.mT), ValueError, ("linear: x has shape ()", "at least one dimension")),
    ("integer weight", lambda: f.linear(A, B.mT.int()), TypeError, ("linear: weight has dtype torch.int32", "use")),
    ("device", lambda: f.linear(A, B.mT.to("meta")), ValueError, ("linear: x is on cpu", "weight on meta", "move")),
    ("bias of linear", lambda: f.linear(A, B.mT, A[0]), ValueError, ("linear: bias has shape (128,)", "(48,)")),
    ("no weight", lambda: f.linear(A), TypeError, ("linear() missing 1 required", "'weight'")),
    ("a number as bias", lambda: f.gemm(A, B, bias=1.0), TypeError, ("gemm: bias=1.0 is a float", "torch.full((N,)")),
    ("array as bias", lambda: f.gemm(A, B, bias=ARRAY[0]), TypeError, ("gemm: bias is an ndarray", "from_numpy(bias)")),
    ("linear's bias", lambda: f.linear(A, B.mT, 1), TypeError, ("linear: bias=1 is an int", "torch.full((N,), 1)")),
    ("bias of FP8", lambda: f.gemm(A, QB, bias=2.0), TypeError, ("gemm: bias=2.0 is a float", "torch.full")),
    ("out_dtype", lambda: f.gemm(A, B, out_dtype="bf16"), TypeError, ("gemm: out_dtype='bf16'", "torch.bfloat16")),
    ("of FP8", lambda: f.gemm(A, QB, out_dtype="bf16"), TypeError, ("gemm: out_dtype='bf16'", "torch.bfloat16")),
    ("of two in FP8", lambda: f.gemm(Q, QB, out_dtype=1), TypeError, ("gemm: out_dtype=1", "torch.bfloat16")),
    ("prequant", lambda: f.gemm(A, QB, prequant="no"), TypeError, ("gemm: prequant='no' is a str", "True or False")),
    ("constant", lambda: f.gemm(A, QB, constant="no"), TypeError, ("gemm: constant='no' is a str", "True or False")),
    ("constant of two", lambda: f.gemm(Q, QB, constant="no"), TypeError, ("gemm: constant='no'", "True or False")),
    ("grouped a", lambda: f.gemm(G, B), TypeError, ("gemm: a is a GroupedScaledTensor", "fp8fn.grouped_gemm")),
    ("grouped b", lambda: f.gemm(A, G), TypeError, ("gemm: b is a GroupedScaledTensor", "fp8fn.grouped_gemm")),
    ("grouped weight", lambda: f.linear(A, G), TypeError, ("linear: weight is a GroupedScaledTensor", "grouped_gemm")),
    ("recipe", lambda: f.linear(A, B.mT, recipe=None), TypeError, ("recipe=None", "fp8fn.Recipe")),
]

GROUPS: list[Case] = [
    ("list of ends", lambda: f.quantize_grouped(A, [16, 32]), TypeError, ("offsets=[16, 32] is a list", "torch.int32")),
    ("dual's", lambda: f.quantize_grouped_dual(A, (16, 32)), TypeError, ("offsets=(16, 32) is a tuple", "torch.int32")),
    ("product's", lambda: f.grouped_gemm(A, EXPERTS, [16, 32]), TypeError, ("grouped_gemm: offsets=[16, 32]", "int32")),
    ("MLP's", lambda: f.expert_mlp(A, GATE_UP, DOWN, [16, 32]), TypeError, ("expert_mlp: offsets=[16, 32]", "int32")),
    ("no ends", lambda: f.expert_mlp(A, GATE_UP, DOWN, None), TypeError, ("expert_mlp: offsets is None", "int32")),
    ("array", lambda: f.quantize_grouped(A, np.array([16, 32])), TypeError, ("offsets is an ndarray", "torch.int32")),
    ("int64", lambda: f.quantize_grouped(A, ENDS.long()), TypeError, ("offsets has dtype torch.int64", "torch.int32")),
    ("a matrix", lambda: f.quantize_grouped(A, ENDS[None]), ValueError, ("offsets has shape (1, 2)", "(E,)")),
    ("none at all", lambda: f.quantize_grouped(A, ENDS[:0]), ValueError, ("offsets has shape (0,)", "E >= 1")),
    ("device", lambda: f.quantize_grouped(A, ENDS.to("meta")), ValueError, ("x is on cpu", "offsets on meta", "move")),
    (
        "quantized x",
        lambda: f.quantize_grouped(Q, ENDS),
        TypeError,
        ("x is a ScaledTensor, in FP8 already", "bfloat16"),
    ),
    ("axis", lambda: f.quantize_grouped(A, ENDS, 2), ValueError, ("axis=2", "0 for groups of rows")),
    ("block", lambda: f.quantize_grouped(A, ENDS, block=64), ValueError, ("block=64", "128", "-1")),
    ("recipe", lambda: f.grouped_gemm(A, EXPERTS, ENDS, recipe=3), TypeError, ("recipe=3", "fp8fn.Recipe")),
    ("bias", lambda: f.grouped_gemm(A, EXPERTS, ENDS, bias=1.0), TypeError, ("grouped_gemm: bias=1.0", "a tensor")),
    ("out", lambda: f.grouped_gemm(A, EXPERTS, ENDS, out_dtype="x"), TypeError, ("out_dtype='x'", "torch.bfloat16")),
    (
        "mixed",
        lambda: f.grouped_gemm(Q, EXPERTS, ENDS),
        TypeError,
        ("a is a ScaledTensor and b a Tensor", "two tensors"),
    ),
]

MOE: list[Case] = [
    ("a", lambda: f.moe_gemm(A, QE, *LAYOUT, top_k=1), TypeError, ("moe_gemm: a is a Tensor", "fp8fn.quantize")),
    ("w", lambda: f.moe_gemm(Q, None, *LAYOUT, top_k=1), TypeError, ("moe_gemm: w is a NoneType", "fp8fn.quantize")),
    ("top_k", lambda: f.moe_gemm(Q, QE, *LAYOUT, top_k=1.5), TypeError, ("moe_gemm: top_k=1.5 is a float", "an int")),
    ("top_k of 0", lambda: f.moe_gemm(Q, QE, *LAYOUT, top_k=0), ValueError, ("moe_gemm: top_k=0", "1 at least")),
    ("a_div", lambda: f.moe_gemm(Q, QE, *LAYOUT, top_k=1, a_div="1"), TypeError, ("a_div='1' is a str", "an int")),
    ("out", lambda: f.moe_gemm(Q, QE, *LAYOUT, top_k=1, out_dtype="x"), TypeError, ("out_dtype='x'", "torch.float32")),
    (
        "token_weights",
        lambda: f.moe_gemm(Q, QE, *LAYOUT, top_k=1, token_weights=ARRAY),
        TypeError,
        ("moe_gemm: token_weights is an ndarray", "from_numpy"),
    ),
    ("experts", lambda: f.sort_tokens(LAYOUT[0][None], 2.5, 16), TypeError, ("num_experts=2.5 is a float", "an int")),
    ("no experts", lambda: f.sort_tokens(LAYOUT[0][None], 0, 16), ValueError, ("sort_tokens: num_experts=0", "1 at")),
    ("tile", lambda: f.sort_tokens(LAYOUT[0][None], 2, "16"), TypeError, ("block_m='16' is a str", "an int")),
]

OTHERS: list[Case] = [
    ("no scales", lambda: f.dequantize(A), TypeError, ("dequantize: q is a Tensor", "fp8fn.quantize", "ScaledTensor(")),
    ("None", lambda: f.dequantize(None), TypeError, ("dequantize: q is a NoneType", "fp8fn.quantize")),
    ("a name", lambda: f.dequantize(Q, "bf16"), TypeError, ("dequantize: dtype='bf16'", "torch.bfloat16")),
    ("grouped", lambda: f.dequantize(G, torch.int8), TypeError, ("dequantize: dtype=torch.int8", "torch.bfloat16")),
    (
        "twice",
        lambda: f.quantize(Q, (1, 128)),
        TypeError,
        ("quantize: x is a ScaledTensor, in FP8 already", "bfloat16"),
    ),
    ("vector", lambda: f.quantize(A[0], (1, 128)), ValueError, ("quantize: x has shape (128,)", "x[None]")),
    ("eps as text", lambda: f.quantize_rms_norm(A, A[0], "x"), TypeError, ("eps='x' is a str", "1e-6")),
    ("eps of None", lambda: f.quantize_rms_norm_dual(A, A[0], None), TypeError, ("eps=None is a NoneType", "1e-6")),
    (
        "scale",
        lambda: f.ScaledTensor(Q.data, 1.0, (1, 128)),
        TypeError,
        ("ScaledTensor: scale=1.0 is a float", "tensor"),
    ),
    ("data", lambda: f.ScaledTensor(ARRAY, Q.scale, (1, 128)), TypeError, ("data=array(", "is an ndarray", "tensors")),
    ("both", lambda: f.ScaledTensor([1], [1], (1, 128)), TypeError, ("ScaledTensor: data=[1] is a list", "in_dims")),
    ("no scale", lambda: f.ScaledTensor(Q.data, None, (1, 128)), TypeError, ("scale=None is a NoneType", "tensors")),
    (
        "block",
        lambda: f.ScaledTensor(Q.data, Q.scale, 128),
        TypeError,
        ("ScaledTensor: block=128 is an int", "(1, 128)"),
    ),
    ("floats", lambda: f.ScaledTensor(Q.data, Q.scale, (1.0, 128.0)), ValueError, ("block=(1.0, 128.0)", "(1, 128)")),
    ("axes' block", lambda: f.ScaledTensor(0, 0, (1, 2)), ValueError, ("ScaledTensor: block=(1, 2)", "(1, 128)")),
    ("a device", lambda: Q.to(BF16), TypeError, ("device=torch.bfloat16 is a dtype", "fp8fn.dequantize(q, dtype)")),
    ("grouped's device", lambda: G.to(None), TypeError, ("device=None is a NoneType", "torch.device")),
    (
        "groups' scale",
        lambda: f.GroupedScaledTensor(G.data, 1.0, G.offsets, 0, 128, 32),
        TypeError,
        ("GroupedScaledTensor: scale=1.0 is a float", "tensors for data and scale and offsets"),
    ),
    (
        "groups' ends",
        lambda: f.GroupedScaledTensor(G.data, G.scale, [16, 32], 0, 128, 32),
        TypeError,
        ("GroupedScaledTensor: offsets=[16, 32] is a list", "tensors"),
    ),
    *(
        (
            f"groups' {name}",
            lambda given={name: value}: f.GroupedScaledTensor(
                **{"data": G.data, "scale": G.scale, "offsets": G.offsets, "axis": 0, "block": 128, "size": 32, **given}
            ),
            TypeError,
            (f"GroupedScaledTensor: {name}={value} is a float", "use an int"),
        )
        for name, value in (("axis", 0.0), ("block", 128.0), ("size", 32.0))
    ),
    ("Recipe of a name", lambda: f.Recipe("blockwise"), TypeError, ("'blockwise'", "positional", "fp8fn.BLOCKWISE")),
    ("of another", lambda: f.Recipe("MXFP8"), TypeError, ("'MXFP8'", "that preset is fp8fn.MXFP8", "recipe=")),
    (
        "of a block",
        lambda: f.Recipe((1, 128)),
        TypeError,
        ("(1, 128) is given as a positional", "Recipe(scale='pow2')"),
    ),
    ("second_order", lambda: f.Recipe(second_order="no"), TypeError, ("second_order='no' is a str", "True or False")),
    ("a number", lambda: f.Recipe(second_order=1), TypeError, ("second_order=1 is an int", "True or False")),
    ("Recipe's floats", lambda: f.Recipe(weight_block=(128.0, 128.0)), ValueError, ("(128.0, 128.0)", "(128, 128)")),
    ("Recipe's number", lambda: f.Recipe(weight_block=128), TypeError, ("weight_block=128 is an int", "(128, 128)")),
    ("error of None", lambda: f.error(A, None), TypeError, ("error: q is None", "use a tensor")),
    ("error of a list", lambda: f.error([1.0], A), TypeError, ("error: x is a list", "torch.tensor(x)")),
    ("fp8 of None", lambda: f.fp8(None), TypeError, ("fp8: fn=None is a NoneType", "use a function")),
    ("fp8 of text", lambda: f.fp8("mm"), TypeError, ("fp8: fn='mm' is a str", "use a function")),
    ("explain of None", lambda: f.explain(None), TypeError, ("explain: model=None is a NoneType", "a function or")),
    ("target", lambda: f.explain(torch.mm, A, B, target="v100"), ValueError, ("target='v100'", "'h100'", "'gfx942'")),
    ("no text", lambda: f.explain(torch.mm, A, B, target=90), ValueError, ("target=90", "'sm90'", "'mi300x'")),
]
CASES = [*LINEAR, *GROUPS, *MOE, *OTHERS]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_message(call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


def with_eps(eps: float) -> dict[str, Callable[[], Any]]:
    return {
        "quantize_rms_norm": lambda: fp8fn.quantize_rms_norm(A, A[0], eps),
        "quantize_rms_norm_dual": lambda: fp8fn.quantize_rms_norm_dual(A, A[0], eps),
    }


@pytest.mark.parametrize("eps", [-1.0, -1e-30, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", with_eps(0))
def test_eps(name: str, eps: float) -> None:
    with pytest.raises(ValueError, match="1e-6") as raised:
        with_eps(eps)[name]()
    assert str(raised.value).startswith(f"{name}: eps={eps} ")
    op = getattr(torch.ops.fp8fn, name)
    with pytest.raises(ValueError, match=f"{name}: eps={eps} "):
        op(A, A[0], eps)
    rows = torch.ones(32)
    assert torch.equal(op(A, A[0], eps, rstd=rows)[1], op(A, A[0], rstd=rows)[1])  # which stands for eps


def test_eps_of_zero() -> None:
    x = torch.full((4, 128), 3.0)
    assert torch.equal(fp8fn.dequantize(fp8fn.quantize_rms_norm(x, x[0], 0), torch.float32), x)


GROUPED_OPS: dict[str, Callable[[Tensor], Any]] = {
    "quantize_grouped": lambda ends: fp8fn.quantize_grouped(A, ends),
    "quantize_grouped ": lambda ends: fp8fn.quantize_grouped(A.mT, ends, 1, block=-1),
    "quantize_grouped_dual": lambda ends: fp8fn.quantize_grouped_dual(A, ends),
    "grouped_gemm": lambda ends: fp8fn.grouped_gemm(A, EXPERTS, ends),
    "grouped_gemm of K": lambda ends: fp8fn.grouped_gemm(A.mT, A, ends),
    "grouped_gemm in FP8": lambda ends: fp8fn.grouped_gemm(Q, QE, ends),
    "expert_mlp": lambda ends: fp8fn.expert_mlp(A, GATE_UP, DOWN, ends),
    "scaled_grouped_mm": lambda ends: torch.ops.fp8fn.scaled_grouped_mm(
        Q.data, Q.scale, Q.block, QE.data, QE.scale, QE.block, ends
    ),
    "quantize_silu_mul_grouped": lambda ends: torch.ops.fp8fn.quantize_silu_mul_grouped(A, A, ends),
    "quantize_silu_mul_grouped_dual": lambda ends: torch.ops.fp8fn.quantize_silu_mul_grouped_dual(A, A, ends),
    "quantize_silu_mul_grad_grouped_dual": lambda ends: torch.ops.fp8fn.quantize_silu_mul_grad_grouped_dual(
        A, torch.ones(32, 256, dtype=BF16), ends
    ),
}


@pytest.mark.parametrize("name", GROUPED_OPS)
def test_ends_that_are_none(name: str) -> None:
    call, op = GROUPED_OPS[name], name.split(" ")[0]
    with pytest.raises(ValueError, match="group 1 ends at 16, and group 0 at 32; give where each") as raised:
        call(DESCENDING)
    assert str(raised.value).startswith(f"{op}: offsets descends")
    with pytest.raises(ValueError, match="ascending from 0") as raised:
        call(torch.tensor([-1, 16], dtype=torch.int32))
    assert str(raised.value).startswith(f"{op}: offsets has -1 for group 0")
    call(torch.tensor([0, 0], dtype=torch.int32))
    call(torch.tensor([32, 32], dtype=torch.int32))


@pytest.mark.parametrize("name", [name for name in GROUPED_OPS if name != "grouped_gemm of K"])
def test_an_end_past_the_tokens_counts_as_their_number(name: str) -> None:
    past, whole = (GROUPED_OPS[name](torch.tensor([16, end], dtype=torch.int32)) for end in (1000, 32))
    for got, want in zip(*map(torch.utils._pytree.tree_leaves, (past, whole)), strict=True):
        if got.dtype != torch.int32:
            assert torch.equal(got.float(), want.float())


def test_ends_in_compiled_code(fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda ends: fp8fn.grouped_gemm(A, EXPERTS, ends), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ENDS), fp8fn.grouped_gemm(A, EXPERTS, ENDS))
    with pytest.raises(ValueError, match="offsets descends: group 1 ends at 16"):
        compiled(DESCENDING)


def test_ends_that_cannot_be_read() -> None:
    """Under vmap, and of tensors without data."""
    many = torch.stack([ENDS, ENDS.clamp_max(16)])
    out = torch.vmap(lambda ends: fp8fn.grouped_gemm(A, EXPERTS, ends))(many)
    assert torch.equal(out[1], fp8fn.grouped_gemm(A, EXPERTS, many[1]))
    on_meta = [x.to("meta") for x in (A, EXPERTS, DESCENDING)]
    assert fp8fn.grouped_gemm(*on_meta).shape == (32, 128)


@pytest.mark.gpu
def test_ends_on_a_gpu_are_not_waited_for() -> None:
    with torch.cuda.device(0):
        on_gpu = [x.cuda() for x in (A, EXPERTS, DESCENDING)]
        fp8fn.grouped_gemm(*on_gpu[:2], ENDS.cuda())  # compiles the kernels
        with nothing_waits():
            assert fp8fn.grouped_gemm(*on_gpu).shape == (32, 128)


def test_dequantize_takes_groups() -> None:
    x = torch.randn(70, 40)
    ends = torch.tensor([30, 65], dtype=torch.int32)
    for axis in (0, 1):
        q = fp8fn.quantize_grouped(x if axis == 0 else x.mT, ends, axis)
        got = fp8fn.dequantize(q, torch.float32)
        got = got if axis == 0 else got.mT
        assert got.shape == x.shape
        assert got[65:].count_nonzero() == 0
        assert (got[:65] - x[:65]).norm() < 0.04 * x[:65].norm()


def test_right_arguments_keep_the_error() -> None:
    @arguments.checked(x=arguments.matrix)
    def fails(x: Tensor, y: int = 0) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as raised:
        fails(A)
    assert raised.value.__suppress_context__ is False
    with pytest.raises(TypeError, match="fails: x is None"):
        fails(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        fails(A, z=1)  # type: ignore[call-arg]


CHECKED = [
    "dequantize", "expert_mlp", "gemm", "grouped_gemm", "linear", "load_weights", "moe_gemm", "quantize",
    "quantize_dual", "quantize_grouped", "quantize_grouped_dual", "quantize_rms_norm", "quantize_rms_norm_dual",
    "quantize_silu_mul", "quantize_silu_mul_dual", "quantize_weights", "save_weights", "sort_tokens",
]  # fmt: skip


def test_every_public_function_is_checked() -> None:
    """But for those that check by themselves, and one that transformers calls."""
    own = {"decoding_loop", "error", "explain", "fp8", "load_blockwise", "read_monitor", "write_monitor"}
    public = {name for name in fp8fn.__all__ if inspect.isfunction(getattr(fp8fn, name))}
    assert public - own == set(CHECKED)
    for name in CHECKED:
        fn = getattr(fp8fn, name)
        assert fn.__wrapped__.__name__ == fn.__name__ == name
        assert fn.__doc__
        assert list(inspect.signature(fn).parameters) == list(inspect.signature(fn.__wrapped__).parameters)


def test_a_right_call_does_not_pay_for_the_checks() -> None:
    def seen(op: str, name: str, value: object) -> None:
        raise AssertionError(name)

    call = arguments.checked(a=seen)(lambda a: a)
    assert call(A) is A
