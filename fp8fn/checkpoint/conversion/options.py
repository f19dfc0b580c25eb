"""The options of a conversion: which tensors it takes, and the blocks, scales and format that it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fp8fn.checkpoint.formats import FORMATS
from fp8fn.checkpoint.load import Entry
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.layout import Block
from fp8fn.site import LEAST_K, LEAST_N, matches, why_sensitive

# The blocks of a weight (N, K) for which products exist.
BLOCKS: Final[Mapping[str, Block]] = {
    "128,128": (128, 128), "1,128": (1, 128), "1,32": (1, 32), "1,-1": (1, -1), "-1,-1": (-1, -1),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options that decide the bytes that are written.

    Without a `block`, FP8 weights keep theirs, and others get the format's. Without a `scale` it is the format's.
    """

    block: Block | None = None
    scale: Literal["fp32", "pow2", "e8m0"] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    format: str = "deepseek"

    def __post_init__(self) -> None:
        # (128.0, 128.0) equals (128, 128), but would be written to config.json as floats.
        if self.block is None:
            return
        if self.block not in BLOCKS.values() or not all(type(size) is int for size in self.block):
            raise ValueError(
                f"block={self.block!r} is no block of a weight (N, K); it must be one of {list(BLOCKS.values())}"
            )
        forms = FORMATS[self.format].forms
        if self.block not in forms:
            raise ValueError(f"block={self.block!r} is no block of {self.format!r}; it must be one of {list(forms)}")

    def named(self, name: str) -> bool:
        """Whether `exclude` does not name a tensor, and `include`, if there is one, names it."""
        return not matches(name, self.exclude) and (not self.include or matches(name, self.include))

    def take(self, name: str, tensor: Entry) -> bool:
        """Whether a tensor goes to FP8: the tensors that `include` names, by default weights of linear layers.

        Experts are batches of matrices of any name (`experts.gate_up_proj`), as `quantize_weights` takes them.
        """
        if tensor.dtype not in INPUT_DTYPES or len(tensor.shape) not in (2, 3) or not math.prod(tensor.shape):
            return False
        if not self.named(name):
            return False
        if self.include:
            return True
        large = tensor.shape[-2] >= LEAST_N and tensor.shape[-1] >= LEAST_K
        named = name.endswith(".weight") or (len(tensor.shape) == 3 and not name.endswith("bias"))
        return large and named and why_sensitive(name, *tensor.shape[-2:]) is None
