"""A byte-level GPT in plain PyTorch, shaped like Llama: pre-norm, rotary positions, causal attention, SwiGLU.

With `experts`, each layer has a mixture of experts in place of the MLP, as in Mixtral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a model; `dim` is a multiple of `2 * heads`.

    With `experts`, `hidden` is the size of each expert, and `active` experts are chosen for each byte.
    """

    vocabulary: int = 256
    context: int = 128
    dim: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 768
    experts: int = 0
    active: int = 2


def rotary_table(context: int, head_dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each `(context, head_dim)`: RoFormer's rotation, in the half-split layout."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + head_dim / 2])` of `x (B, heads, T, head_dim)` by their positions."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over `(B, T, dim)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(batch, length, dim)))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Experts(nn.Module):
    """A mixture of SwiGLUs: the router chooses and weighs `active` experts for each byte.

    Weights are float32. Products have bfloat16 operands, the type that `torch._grouped_mm` compiles for.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.count, self.active = config.experts, config.active
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, config.dim, 2 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance, chosen = torch.softmax(self.router(tokens).float(), -1).topk(self.active)
        chance = chance / chance.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = (chosen.flatten()[:, None] == torch.arange(self.count, device=x.device)).sum(0).cumsum(0)
        offsets = ends.to(torch.int32)
        rows = tokens[order // self.active].bfloat16()
        gate, up = torch._grouped_mm(rows, self.gate_up.bfloat16(), offs=offsets).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.bfloat16(), offs=offsets)
        # A gather keeps the order of the sums the same in every run; adding to rows would not.
        mixed = (out[order.argsort()].unflatten(0, (-1, self.active)) * chance[..., None]).sum(1)
        return cast(Tensor, mixed.to(x.dtype).view_as(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes `(B, T)` to the logits `(B, T, vocabulary)` of each next byte; `T` is at most `config.context`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        cos, sin = rotary_table(config.context, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """GPT-2's initialisation: normal with a standard deviation of 0.02, less before the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Experts):
            nn.init.normal_(module.gate_up, std=0.02)
        if isinstance(module, Layer):
            down = module.mlp.down if isinstance(module.mlp, Experts) else module.mlp.down.weight
            for weight in (module.attention.out.weight, down):
                nn.init.normal_(weight, std=0.02 * (2 * self.config.layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))
