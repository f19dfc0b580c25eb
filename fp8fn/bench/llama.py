"""A decoder of Llama's shape that makes one token a call, with weights in bf16, FP8 or MX-FP8.

Every step is the same call on the same tensors. Tokens, position, keys and values are buffers that a step changes in
place: a CUDA graph of the step takes no argument, and the host never waits. FP8 weights are `ScaledTensor` attributes
of modules, which torch.compile reads in place, as it reads parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, cast

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import fp8fn
from fp8fn.demo.model import rotary_table, rotate
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SIZES: Final = {
    "tiny": Size(layers=2, hidden=256, intermediate=512, heads=8, kv_heads=2, vocabulary=512),
    # Llama-3.1-8B with a quarter of its 32 layers and of its vocabulary.
    "8b": Size(layers=8, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=32000),
}


class Plain(nn.Module):
    """`x (B, K) @ weight (N, K)ᵀ`, both of one dtype."""

    weight: Tensor
    holds_head: ClassVar[bool] = False

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Quantized(nn.Module):
    """A linear layer with an FP8 weight `(N, K)`."""

    block: ClassVar[Block]
    format: ClassVar[ScaleFormat]
    # Whether the head's weight is quantized, too.
    holds_head: ClassVar[bool] = False

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = fp8fn.quantize(weight, self.block, scale=self.format)


class A16W8(Quantized):
    """Multiplies activations as they are by the FP8 weight."""

    block, format = (128, 128), "fp32"

    def forward(self, x: Tensor) -> Tensor:
        return fp8fn.gemm(x, self.weight.mT)


class A16W8WithHead(A16W8):
    """`A16W8`, of the head too."""

    holds_head = True


class ConstantA16W8(A16W8):
    """`A16W8` with the promise that nothing writes the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8fn.gemm(x, self.weight.mT, constant=True)


class MX(Quantized):
    """Quantizes activations to MX-FP8, as the weight is."""

    block, format = (1, 32), "e8m0"

    def forward(self, x: Tensor) -> Tensor:
        return fp8fn.gemm(fp8fn.quantize(x, self.block, scale=self.format), self.weight.mT)


class ConstantMX(MX):
    """`MX` with the promise that nothing writes the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8fn.gemm(fp8fn.quantize(x, self.block, scale=self.format), self.weight.mT, constant=True)


# Makes the module that holds a linear layer's weight.
Hold = type[Plain] | type[Quantized]


class Weights:
    """Draws normal weights, the same sequence for every model. A product by a weight keeps its input's variance."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def one(self, n: int, k: int, std: float) -> Tensor:
        return self.empty(n, k).normal_(std=std, generator=self.generator)

    def linear(self, n: int, k: int) -> Tensor:
        return self.one(n, k, k**-0.5)

    def norm(self, size: int) -> nn.RMSNorm:
        """An RMSNorm with a weight of ones."""
        return nn.RMSNorm(size, eps=1e-5, device=self.device, dtype=self.dtype)

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, device=self.device, dtype=self.dtype)


class Attention(nn.Module):
    """Attention of one token of each sequence, whose query heads share the key heads."""

    keys: Tensor
    values: Tensor

    def __init__(self, size: Size, hold: Hold, weights: Weights, batch: int, context: int) -> None:
        super().__init__()
        self.size = size
        kv = size.kv_heads * size.head
        self.sections = [size.hidden, kv, kv]
        self.qkv = hold(weights.linear(size.hidden + 2 * kv, size.hidden))
        self.out = hold(weights.linear(size.hidden, size.hidden))
        for name in ("keys", "values"):
            self.register_buffer(name, weights.empty(batch, size.kv_heads, context, size.head).zero_())

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        """`x (B, hidden)`; the token's `position`, `cos` and `sin (1, head)`; `seen (1, context)` is the mask."""
        q, k, v = (part.unflatten(1, (-1, self.size.head)) for part in self.qkv(x).split(self.sections, dim=1))
        self.keys.index_copy_(2, position, rotate(k, cos, sin).unsqueeze(2))
        self.values.index_copy_(2, position, v.unsqueeze(2))
        query = rotate(q, cos, sin).unsqueeze(2)
        heads = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        return cast(Tensor, self.out(heads.flatten(1)))


class MLP(nn.Module):
    """SwiGLU, with gate and up as one product."""

    def __init__(self, size: Size, hold: Hold, weights: Weights) -> None:
        super().__init__()
        self.gate_up = hold(weights.linear(2 * size.intermediate, size.hidden))
        self.down = hold(weights.linear(size.hidden, size.intermediate))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, size: Size, hold: Hold, weights: Weights, batch: int, context: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (weights.norm(size.hidden) for _ in range(2))
        self.attention = Attention(size, hold, weights, batch, context)
        self.mlp = MLP(size, hold, weights)

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), position, cos, sin, seen)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class Generator(nn.Module):
    """Greedy decoding: each call makes the next token of every sequence in `tokens (B, context)`.

    A call returns the logits `(B, vocabulary)` after the token at `position`, and writes the likeliest token to the
    next position. The first `given` tokens are not overwritten: they are a prompt, or a sequence to take logits of.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    tokens: Tensor
    position: Tensor
    given: Tensor

    def __init__(
        self, size: Size, hold: Hold, batch: int, context: int, device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        weights = Weights(device, dtype)
        self.embedding = nn.Embedding.from_pretrained(weights.one(size.vocabulary, size.hidden, 1.0))
        self.layers = nn.ModuleList(Layer(size, hold, weights, batch, context) for _ in range(size.layers))
        self.norm = weights.norm(size.hidden)
        # Embedding and head stay in `dtype`, as in published FP8 checkpoints, unless `hold` takes the head.
        self.head = (hold if hold.holds_head else Plain)(weights.linear(size.vocabulary, size.hidden))
        cos, sin = rotary_table(context, size.head, theta=500_000.0)
        buffers = {
            "cos": cos.to(device, dtype),
            "sin": sin.to(device, dtype),
            "places": torch.arange(context, device=device),
            "tokens": torch.zeros(batch, context, dtype=torch.int64, device=device),
            "position": torch.zeros(1, dtype=torch.int64, device=device),
            "given": torch.zeros(1, dtype=torch.int64, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.requires_grad_(False)

    def start(self, tokens: Tensor) -> None:
        """Start a new loop with `tokens (B, given)`."""
        given = tokens.shape[1]
        self.tokens[:, :given] = tokens
        self.position.zero_()
        self.given.fill_(given)

    def forward(self) -> Tensor:
        position, following = self.position, self.position + 1
        x = self.embedding(self.tokens.index_select(1, position).squeeze(1))
        cos, sin = self.cos.index_select(0, position), self.sin.index_select(0, position)
        seen = (self.places <= position).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, position, cos, sin, seen)
        logits = cast(Tensor, self.head(self.norm(x)))
        likeliest = logits.argmax(1, keepdim=True)
        token = torch.where(following < self.given, self.tokens.index_select(1, following), likeliest)
        self.tokens.index_copy_(1, following, token)
        self.position.copy_(following)
        return logits

    def weight_bytes(self) -> int:
        """Bytes of weights and scales that a step reads: all but the embedding, of which a step reads `B` rows."""
        held = [module.weight for module in self.modules() if isinstance(module, Plain | Quantized)]
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(held))
