"""transformers' fine-grained FP8: models from their configs, whose products go through our ops, and the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn.lowering import joint_pass
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import transformers_fp8
from fp8fn.ops import reference
from support.traced import both_passes

pytest.importorskip("transformers")
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations import finegrained_fp8

from support.accuracy import snr

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # transformers asks for PyTorch's version in a cached function, which Dynamo traces through.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    # Dynamo itself instantiates an autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True))


def deepseek_v3() -> nn.Module:
    """One dense layer and one of experts; K of kv_b_proj and N of kv_a_proj end within a block."""
    config = DeepseekV3Config(
        **SIZES, moe_intermediate_size=128, n_routed_experts=4, n_group=2, topk_group=2, num_experts_per_tok=2,
        first_k_dense_replace=1, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=96, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def quantized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As from a checkpoint with `{"quant_method": "fp8", "weight_block_size": [128, 128]}`, of random weights."""
    dense = {name: parameter.detach() for name, parameter in model.to(dtype).named_parameters()}
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    finegrained_fp8.replace_with_fp8_linear(model, ["lm_head", "gate"], config)
    for name, parameter in list(model.named_parameters()):
        if parameter.dtype.itemsize == 1:
            module, _, last = name.rpartition(".")
            owner = model.get_submodule(module)
            q = fp8fn.quantize(dense[name].float(), (128, 128))
            assert getattr(owner, f"{last}_scale_inv").shape == q.scale.shape
            setattr(owner, last, nn.Parameter(q.data.contiguous()))
            setattr(owner, f"{last}_scale_inv", nn.Parameter(q.scale.contiguous()))
        elif parameter.is_meta and not name.endswith("_scale_inv"):
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Parameter(dense[name]))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def dequantized(model: nn.Module, quantized_model: nn.Module) -> nn.Module:
    """`model` with the values of the FP8 weights."""
    blocks = {name: parameter.detach() for name, parameter in quantized_model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = blocks.get(f"{name}_scale_inv")
            values = blocks[name].float()
            if scale is not None:
                scale = scale.repeat_interleave(128, -2)[..., : values.shape[-2], :]
                values = values * scale.repeat_interleave(128, -1)[..., : values.shape[-1]]
            parameter.copy_(values)
    return model


def tokens() -> Tensor:
    return torch.randint(512, (2, 48))


@pytest.fixture(autouse=True)
def without_the_hub() -> Iterator[None]:
    """transformers as it is without the Hub's kernels, before and after; a graph from a cache would show no pass."""
    before = finegrained_fp8._FINEGRAINED_FP8
    finegrained_fp8._FINEGRAINED_FP8 = None
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    finegrained_fp8._FINEGRAINED_FP8 = before


@pytest.mark.slow(but="llama-fp8fn")
@pytest.mark.parametrize("backend", ["fp8fn", "inductor"])
@pytest.mark.parametrize(("build", "products"), [(llama, 14), (deepseek_v3, 16)], ids=["llama", "deepseek_v3"])
def test_models_of_a_config(build: Any, products: int, backend: str) -> None:
    """Without the Hub's kernel; by the backend, and by plain torch.compile inside of `substitution()`."""
    model = quantized(build(), torch.float32).eval()
    torch.manual_seed(0)
    reference = dequantized(build(), model).eval()
    x = tokens()
    options = {"where": lambda site: False} if backend == "fp8fn" else None
    with torch.no_grad(), fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        found = torch.compile(model, backend=backend, fullgraph=True, options=options)(x).logits
        assert [made.made for made in record] == ["fp8fn.scaled_mm.default"] * products
        assert snr(found, reference(x).logits) > 20


def layer(bias: bool = False, width: int = 256, features: int = 384) -> nn.Module:
    """An `FP8Linear` alone, in a container that transformers' function can walk through."""
    model = nn.Sequential(nn.Linear(width, features, bias=bias)).to(torch.bfloat16)
    return quantized(model, torch.bfloat16)


def of(model: nn.Module, x: Tensor) -> Tensor:
    """The definition of the layer: the activation in FP8 of (1, 128), its scales, and the weight's."""
    linear: Any = model[0]  # type: ignore[index]
    data, scale = torch.ops.fp8fn.quantize(x.flatten(0, -2), (1, 128))
    rows = data.double() * scale.double().repeat_interleave(128, 1)
    scales = linear.weight_scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    out = rows @ (linear.weight.double() * scales).T
    if linear.bias is not None:
        out = out + linear.bias.double()
    return out.view(*x.shape[:-1], -1)


def compiled(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, list[Substitution]]:
    with fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        return torch.compile(model, fullgraph=True, **options)(x), record


# Compiled without fp8fn the layer's input has the same zeros for a gradient.
loses_gradients = pytest.mark.xfail(
    torch.__version__.startswith("2.11."), reason="PyTorch 2.11 loses the gradient behind transformers' bias, in place"
)


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=loses_gradients)])
def test_forward_and_dgrad(bias: bool) -> None:
    """transformers' own backward dequantizes the weight in place; only the input has a gradient."""
    model = layer(bias)
    x, weight = torch.randn(2, 24, 256).bfloat16().requires_grad_(), torch.randn(2, 24, 384).bfloat16()
    out, record = compiled(model, x)
    (grad,) = torch.autograd.grad(out, x, weight)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default", "fp8fn.mm_a16w8.default"]
    assert snr(out, of(model, x.detach())) > 45
    linear: Any = model[0]  # type: ignore[index]
    scales = linear.weight_scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert snr(grad, weight.double() @ (linear.weight.double() * scales)) > 45


def test_eager_is_the_same_product() -> None:
    """Once it is served, transformers' FP8 runs uncompiled as well."""
    model, x = layer(), torch.randn(2, 24, 256).bfloat16()
    with pytest.raises(ImportError):
        model(x)
    transformers_fp8.serve()
    assert snr(model(x), of(model, x)) > 45


def test_tokens_are_dynamic() -> None:
    model = layer()
    with torch.no_grad(), fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        call = torch.compile(model, fullgraph=True)
        for count in (64, 3, 100):
            x = torch.randn(count, 256).bfloat16()
            if count == 64:
                torch._dynamo.mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert snr(call(x), of(model, x)) > 45
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"]


def test_a_static_scale_and_a_scale_for_all() -> None:
    """`activation_scheme="static"`, and no `weight_block_size`."""
    transformers_fp8.serve()
    x, w = torch.randn(24, 256).bfloat16(), fp8fn.quantize(torch.randn(384, 256), (128, 128))
    b, b_scale, static = w.data.contiguous(), w.scale.contiguous(), x.abs().amax().float() / 448
    dense = fp8fn.dequantize(fp8fn.ScaledTensor(b, b_scale, (128, 128))).double()
    kernel = finegrained_fp8.load_finegrained_fp8_kernel()
    out = kernel.matmul(x, b, b_scale, [128, 128], torch.float32, activation_scale=static)
    assert snr(out, x.double() @ dense.T) > 25
    out = kernel.matmul(x, b, torch.tensor(0.5), None, torch.float32)
    assert snr(out, x.double() @ (b.double() * 0.5).T) > 25
    with pytest.raises(NotImplementedError, match="128x128"):
        kernel.matmul(x, b, b_scale, [64, 64])
    with pytest.raises(NotImplementedError, match="FP8 alone"):
        kernel.matmul(x, b.view(torch.int8), b_scale, [128, 128])


def test_experts() -> None:
    """Grouped and row by row, the rows of each expert times its weight."""
    transformers_fp8.serve()
    kernel = finegrained_fp8.load_finegrained_fp8_kernel()
    w, x = fp8fn.quantize(torch.randn(3, 384, 256) / 16, (128, 128)), torch.randn(40, 256).bfloat16()
    ids = torch.randint(3, (40,))
    out = kernel.batched_matmul(x, w.data, w.scale, block_size=[128, 128], expert_ids=ids)
    expected = torch.einsum("sk,snk->sn", x.double(), fp8fn.dequantize(w).double()[ids])
    assert snr(out, expected) > 25


ONE_LAYER: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "num_experts_per_tok": 4}
EXPERTS: dict[str, Any] = {
    "mixtral": lambda how: MixtralForCausalLM(
        MixtralConfig(**ONE_LAYER, num_key_value_heads=2, num_local_experts=4, experts_implementation=how)
    ),
    "qwen3_moe": lambda how: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **ONE_LAYER, num_key_value_heads=2, num_experts=4, moe_intermediate_size=256, head_dim=64,
            experts_implementation=how,
        )
    ),
    "deepseek_v3": lambda how: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **ONE_LAYER, moe_intermediate_size=128, n_routed_experts=4, n_group=1, topk_group=1,
            first_k_dense_replace=0, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64,
            qk_rope_head_dim=32, v_head_dim=64, experts_implementation=how,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_grouped_products_of_their_own_bytes(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend's two passes as uncompiled: the recipe has no part in them."""
    model, x = quantized(EXPERTS[name](how), torch.bfloat16).eval(), tokens()
    transformers_fp8.serve()
    multiplied: list[int] = []
    multiply = reference.scaled_grouped_mm

    def counted(a: Any, b: Any, *rest: Any) -> Tensor:
        multiplied.append(b.data.data_ptr())
        return multiply(a, b, *rest)

    monkeypatch.setattr(reference, "scaled_grouped_mm", counted)
    backend = both_passes(lambda site: "lm_head" not in site.weight)
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(x).logits
        experts = model.get_submodule("model.layers.0.mlp.experts")
        assert multiplied == [experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()]
        explanation = fp8fn.explain(model, x, where="*", show=False)
        assert snr(found, model(x).logits) > 45
    assert not [decision for decision in backend.decided if decision.gemm.groups is not None]
    assert all(decision.reason for decision in backend.decided)
    assert not [row for row in explanation.rows if row.op == "grouped_mm"]


HUB: Any = torch.library.Library("_finegrained_fp8_1a2b3c", "DEF")
for experts in ("", ", Tensor offsets, Tensor tokens_per_expert"):
    HUB.define(
        f"w8a8_block_dynamic_fp8_matmul{'_grouped' if experts else ''}"
        f"(Tensor A, Tensor B, Tensor Bs{experts}, SymInt[] block_size, ScalarType? output_dtype=None) -> Tensor"
    )


def _empty(a: Tensor, b: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=rest[-1])


for name in ("w8a8_block_dynamic_fp8_matmul", "w8a8_block_dynamic_fp8_matmul_grouped"):
    HUB.impl(name, _empty, "Meta")
    HUB.impl(name, _empty, "CPU")
OPS = torch.ops._finegrained_fp8_1a2b3c


@pytest.mark.parametrize("block", [128, 64])
def test_the_hubs_op(block: int) -> None:
    """transformers may have the Hub's kernel as an op; here a stub of that name, which computes nothing."""
    w, x = fp8fn.quantize(torch.randn(384, 256), (128, 128)), torch.randn(2, 24, 256).bfloat16()

    def function(x: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return OPS.w8a8_block_dynamic_fp8_matmul(x, b, scale, [block, block], torch.bfloat16)

    with fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        out = torch.compile(function, fullgraph=True)(x, w.data, w.scale)
    if block == 64:
        assert [made.reason for made in record] == ["weight_block_size is [64, 64]; fp8fn has blocks of 128x128"]
        return
    assert [(made.made, made.shape) for made in record] == [("fp8fn.scaled_mm.default", (48, 384, 256))]
    assert snr(out, x.double() @ fp8fn.dequantize(w).double().T) > 25


def test_the_hubs_experts() -> None:
    w, x = fp8fn.quantize(torch.randn(3, 384, 256), (128, 128)), torch.randn(24, 256).bfloat16()
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)

    def function(x: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return OPS.w8a8_block_dynamic_fp8_matmul_grouped(x, b, scale, ends, ends, [128, 128], torch.bfloat16)

    with fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        out = torch.compile(function, fullgraph=True)(x, w.data, w.scale)
    assert [(made.made, made.shape) for made in record] == [("fp8fn.scaled_grouped_mm.default", (24, 384, 256))]
    expected = torch.einsum("esk,enk->esn", x.double().view(3, 8, 256), fp8fn.dequantize(w).double())
    assert snr(out, expected.flatten(0, 1)) > 25


def test_the_hubs_kernel() -> None:
    """As a Triton op, it is transparent to torch.compile: the graph has the launch."""
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from torch.library import triton_op, wrap_triton

    @triton.jit
    def w8a8_block_dynamic_fp8_matmul_kernel(
        A, B, C, Bs, M, N, K, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr
    ):  # type: ignore[no-untyped-def] # fmt: skip
        tl.store(C + tl.program_id(0), tl.load(A) + tl.load(B).to(tl.float32) + tl.load(Bs))

    @triton_op("_finegrained_fp8_4d5e6f::w8a8_block_dynamic_fp8_matmul", mutates_args=())
    def product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        out = a.new_empty((*a.shape[:-1], b.shape[0]), dtype=torch.bfloat16)
        wrap_triton(w8a8_block_dynamic_fp8_matmul_kernel)[(1,)](
            a, b, out, scale, 48, 384, 256, BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=128
        )
        return out

    w, x = fp8fn.quantize(torch.randn(384, 256), (128, 128)), torch.randn(2, 24, 256).bfloat16()
    with fp8fn.lowering.substitution(), joint_pass.recorded() as record:
        out = torch.compile(product, fullgraph=True)(x, w.data, w.scale)
    assert [(made.made, made.shape) for made in record] == [("fp8fn.scaled_mm.default", (48, 384, 256))]
    assert snr(out, x.double() @ fp8fn.dequantize(w).double().T) > 25
