"""Tiny models of transformers, of five architectures, 256 wide."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_SIZES: Final = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
_MORE: Final[dict[str, dict[str, Any]]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 128, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV3": {
        "num_key_value_heads": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 256, "kv_lora_rank": 128,
        "q_lora_rank": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 128,
    },
    "GPTNeoX": {},
}  # fmt: skip
ARCHITECTURES: Final = tuple(_MORE)


def tiny_model(architecture: str) -> Any:
    """The model with random parameters in bfloat16; under `torch.device("meta")` one without values."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**_SIZES, **_MORE[architecture]})
    model: nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for parameter in model.parameters():  # not the buffers: `bfloat16()` would round a rotary embedding's frequencies
        parameter.data = parameter.data.bfloat16()
    return model.eval()


def two_layers(architecture: str) -> Any:
    """A model in float32, 64 wide, of four query heads and two key heads, without a sliding window."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, sliding_window=None,
    )  # fmt: skip
    return getattr(transformers, f"{architecture}ForCausalLM")(config)
