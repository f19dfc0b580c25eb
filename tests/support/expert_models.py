"""Configurations of transformers' mixtures of experts, of one layer and 256 wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

transformers = pytest.importorskip("transformers")

_SIZES: Final = {
    "vocab_size": 160, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, head_dim=128, moe_intermediate_size=128, num_experts=4, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, intermediate_size=128, num_local_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SIZES, head_dim=128, intermediate_size=128, num_local_experts=4, layer_types=["full_attention"],
        rope_parameters=_ROPE,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_SIZES, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=0, n_shared_experts=1, q_lora_rank=128, kv_lora_rank=128, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, rope_parameters=_ROPE,
    ),
}  # fmt: skip
