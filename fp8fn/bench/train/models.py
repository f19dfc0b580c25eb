"""The models: transformers' own classes with random weights, made from a configuration, with nothing downloaded."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8fn.bench import llama
from fp8fn.demo.corpus import standard_library


@dataclass(frozen=True, kw_only=True)
class Size(llama.Size):
    """The widths of a model and its default depth. With `experts`, `intermediate` is the width of each expert."""

    experts: int = 0
    active: int = 2


SIZES: Final = {
    # No width is the vocabulary's, by which the loss's tensors are told from those of layers.
    "tiny": Size(layers=2, hidden=256, intermediate=512, heads=2, kv_heads=1, vocabulary=768),
    "tiny-moe": Size(layers=2, hidden=256, intermediate=256, heads=2, kv_heads=1, vocabulary=768, experts=4),
    # Llama-3.2-1B's widths with half of its 16 layers.
    "1b": Size(layers=8, hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocabulary=32000),
    # Llama-3.1-8B's widths with an eighth of its 32 layers.
    "8b": Size(layers=4, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=8192),
    "moe": Size(layers=4, hidden=4096, intermediate=3584, heads=32, kv_heads=8, vocabulary=8192, experts=8),
}


def config_of(size: Size, sequence: int) -> Any:
    """The configuration of a LlamaForCausalLM, or of a MixtralForCausalLM with experts."""
    from transformers import LlamaConfig, MixtralConfig

    values: dict[str, Any] = {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": sequence,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if size.experts:
        return MixtralConfig(num_local_experts=size.experts, num_experts_per_tok=size.active, **values)
    return LlamaConfig(**values)


def build(size: Size, sequence: int, attention: str, device: torch.device, seed: int) -> nn.Module:
    """The model in bf16 with the weights of `seed`. `attention` is the name of transformers' implementation."""
    transformers = importlib.import_module("transformers")
    # transformers' default experts are a loop over experts, which breaks the graph; these are torch._grouped_mm.
    experts = {"experts_implementation": "grouped_mm"} if size.experts else {}
    torch.manual_seed(seed)
    with device:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config_of(size, sequence), dtype=torch.bfloat16, attn_implementation=attention, **experts
        )
    return model.train()


def batches(size: Size, batch: int, sequence: int, count: int) -> list[Tensor]:
    """`count` batches of tokens `(batch, sequence)` on the CPU: pairs of bytes of Python's standard library."""
    text = standard_library().train
    pairs = text[: len(text) // 2 * 2].view(-1, 2).long()
    tokens = (256 * pairs[:, 0] + pairs[:, 1]) % size.vocabulary
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(tokens) - sequence, (count, batch, 1), generator=generator)
    return list(tokens[starts + torch.arange(sequence)])


def operations(size: Size, batch: int, sequence: int) -> float:
    """Floating-point operations of a forward and backward: products by weights, and causal attention's products."""
    kv = size.kv_heads * size.head
    weights = 2 * size.hidden**2 + 2 * size.hidden * kv  # q and o, k and v
    weights += 3 * size.hidden * size.intermediate * (size.active if size.experts else 1)
    weights += size.hidden * size.experts  # the router
    forward = 2 * batch * sequence * (size.layers * weights + size.hidden * size.vocabulary)
    forward += size.layers * 4 * batch * sequence**2 * size.hidden // 2
    return 3.0 * forward


def peak_rate(device_name: str) -> float | None:
    """The data sheet's dense bf16 operations a second, for the cards that the bars name; None for any other."""
    sxm = any(card in device_name for card in ("H100", "H200")) and "PCIe" not in device_name
    return 989.4e12 if sxm and "NVL" not in device_name else None


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a wrapper, as a weight with scales is, those of the tensors inside."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights and scales that a forward reads whole: all but the embedding's."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(stored_bytes(weight) for weight in model.parameters() if id(weight) not in embeddings)


def as_json(size: Size) -> dict[str, int]:
    return dict(asdict(size).items())
