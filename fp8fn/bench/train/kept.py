"""The tensors that stand between forward and backward: those of the layers, and a listing by shape and type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

# Rows of a listing with a smaller share of all bytes are added up in its last line.
_LEAST_SHARE = 1e-3


def of_layers(tensors: Iterable[Tensor], tokens: int, vocabulary: int) -> list[Tensor]:
    """The tensors without logits, which are the loss's: one element for each token and each entry of the vocabulary."""
    return [x for x in tensors if vocabulary not in x.shape or x.numel() != tokens * vocabulary]


def listing(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """A row for each shape and type, with the number of tensors and the bytes of their storages; the largest first."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for x in tensors:
        found[tuple(x.shape), str(x.dtype).removeprefix("torch.")].append(x.untyped_storage().nbytes())
    rows = [
        {"shape": list(shape), "dtype": dtype, "tensors": len(sizes), "bytes": sum(sizes)}
        for (shape, dtype), sizes in found.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def lines(rows: Sequence[Mapping[str, Any]], tokens: int, layers: int) -> list[str]:
    """A listing for the terminal: bytes a token and layer, and the tensors that take them."""
    total, small, shown = sum(row["bytes"] for row in rows), 0, []
    for row in rows:
        if row["bytes"] < _LEAST_SHARE * total:
            small += row["bytes"]
            continue
        shape = "x".join(map(str, row["shape"])) or "scalar"
        shown.append(f"{row['bytes'] / tokens / layers:10.1f}  {row['tensors']:3} of {shape} {row['dtype']}")
    head = f"  kept between forward and backward, bytes a token and layer: {total / tokens / layers:.1f}"
    return [head, *shown, f"{small / tokens / layers:10.1f}  the rest"]
