"""Matplotlib plots for notebooks: formats, errors, scales, graphs and benchmarks.

Each function draws on `ax`, or on the axes of a new figure, and returns the axes without calling `show`. Markers,
hatches and line styles distinguish curves, also in print without colour. Needs `pip install 'fp8fn[notebooks]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8fn.ops.formats import FP8_DTYPES, short_name
from fp8fn.quantization_error import error
from fp8fn.scaled_tensor import ScaledTensor, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES: Final = (
    ("black", "-", "o"), ("0.45", "--", "s"), ("0.2", ":", "^"),
    ("0.6", "-.", "D"), ("0.3", "--", "v"), ("0.7", "-", "X"),
)  # fmt: skip
_HATCHES: Final = ("", "//", "..", "xx", "\\\\", "++")
_VIEWS: Final = ("transpose", "t", "permute", "getattr", "to", "contiguous")
_GRAYS: Final = ("0.25", "0.75", "0.95", "0.55", "0.85", "0.65")


def number_line(dtypes: Sequence[torch.dtype] = FP8_DTYPES, ax: Axes | None = None) -> Axes:
    """Plots every positive finite value of each type on a logarithmic axis, one line a type; subnormals are hollow."""
    ax = _axes(ax, (8, 0.5 * len(dtypes) + 1.2))
    for height, dtype in enumerate(reversed(dtypes)):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        values = codes[codes.isfinite() & (codes > 0)]
        least = torch.finfo(dtype).smallest_normal
        normal, subnormal = values[values >= least], values[values < least]
        ax.plot(normal, [height] * len(normal), "|", color="black", markersize=12)
        ax.plot(subnormal, [height] * len(subnormal), "o", color="black", markerfacecolor="white", markersize=4)
    ax.set_xscale("log", base=2)
    ax.set_yticks(range(len(dtypes)), [short_name(dtype) for dtype in reversed(dtypes)])
    ax.set_ylim(-0.6, len(dtypes) - 0.4)
    ax.set_xlabel("positive finite values (o: subnormal)")
    ax.grid(axis="x", alpha=0.3)
    return ax


def magnitudes(x: Tensor | ScaledTensor, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Plots the share of elements in each binade of `|x|`, or of the codes `|data|` of a `ScaledTensor`."""
    ax = _axes(ax, (6, 3))
    if isinstance(x, ScaledTensor):
        found = summary(x)
        if found is None:
            raise ValueError("magnitudes: x has no values to count; it is empty, on meta, or being traced")
        first, counts = found.exponents[0], torch.tensor(found.binades)
    else:
        exponents = torch.frexp(x.detach().double()[x != 0].abs()).exponent - 1
        first = int(exponents.min())
        counts = torch.bincount((exponents - first).flatten())
    color, style, marker = _LINES[len(ax.lines) % len(_LINES)]
    share = 100 * counts.double() / (x.data.numel() if isinstance(x, ScaledTensor) else x.numel())
    places = range(first, first + len(counts))
    ax.plot(places, share.cpu(), color=color, linestyle=style, marker=marker, markersize=4, label=label)
    ax.set_xlabel("binade of the magnitude: log2, rounded down")
    ax.set_ylabel("elements [%]")
    ax.grid(alpha=0.3)
    if label:
        ax.legend(fontsize="small")
    return ax


def error_histogram(x: Tensor, found: Mapping[str, ScaledTensor | Tensor], ax: Axes | None = None) -> Axes:
    """Plots the distribution of `|x - q|` relative to the root mean square of `x`, for each named `q` of `found`.

    Exact elements are not plotted; the legend has each curve's share of elements with an error.
    """
    ax = _axes(ax, (6, 3.2))
    exact = x.detach().double()
    rms = exact.square().mean().sqrt()
    for (name, q), (color, style, _) in zip(found.items(), cycle(_LINES)):
        difference = ((exact - _values(q)).abs() / rms).flatten()
        powers = difference[difference > 0].log2().cpu()
        counts, edges = torch.histogram(powers, bins=80)
        centers = 2 ** ((edges[1:] + edges[:-1]) / 2)
        density = 100 * counts / difference.numel() / (edges[1] - edges[0])
        label = f"{name} ({powers.numel() / difference.numel():.0%} not exact)"
        ax.plot(centers, density, color=color, linestyle=style, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xlabel("|x - q| / rms(x)")
    ax.set_ylabel("elements [% per factor of 2]")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


def snr(
    found: Mapping[str, Mapping[str, float]],
    ax: Axes | None = None,
    label: str = "SNR [dB]",
    least: float | None = None,
) -> Axes:
    """Plots bars of `found[group][bar]`, such as SNR in dB by tensor and block; `least` draws a reference line."""
    ax = _axes(ax, (8, 3.2))
    bars = list(dict.fromkeys(bar for group in found.values() for bar in group))
    width = 0.85 / max(1, len(bars))
    for i, (bar, gray, hatch) in enumerate(zip(bars, cycle(_GRAYS), cycle(_HATCHES))):
        places = [j + (i - (len(bars) - 1) / 2) * width for j, group in enumerate(found.values()) if bar in group]
        heights = [group[bar] for group in found.values() if bar in group]
        ax.bar(places, heights, width, label=bar, facecolor=gray, hatch=hatch, edgecolor="black")
    if least is not None:
        ax.axhline(least, color="black", linestyle="--", linewidth=1, label=f"{least:g}")
    ax.set_xticks(range(len(found)), list(found))
    ax.set_ylabel(label)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def scales(q: ScaledTensor, ax: Axes | None = None) -> Axes:
    """Plots a heat map of `log2(scale)` with a cell for each block, for the first matrix of a batch."""
    return heat_map(
        q.scale.detach().float().log2().flatten(0, -3)[0] if q.ndim > 2 else q.scale.float().log2(),
        f"log2(scale), blocks of {q.block[0]} x {q.block[1]}",
        ax,
    )


def block_errors(
    x: Tensor, q: ScaledTensor | Tensor, block: tuple[int, int] = (-1, -1), ax: Axes | None = None
) -> Axes:
    """Plots a heat map of the SNR in dB of each block of a matrix."""
    return heat_map(error(x, q, block).by_block, "SNR by block [dB]", ax)


def heat_map(values: Tensor, label: str, ax: Axes | None = None) -> Axes:
    """Plots a matrix in grays with a cell for each element; `label` names the quantity."""
    ax = _axes(ax, (6, 3))
    image = ax.imshow(values.detach().double().cpu().numpy(), aspect="auto", cmap="gray", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)
    ax.set_xlabel("block along the columns")
    ax.set_ylabel("block along the rows")
    return ax


def curves(
    found: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    x: Sequence[float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plots one line for each name, over `x` or 1, 2, …."""
    ax = _axes(ax, (7, 3.2))
    for (name, values), (color, style, marker) in zip(found.items(), cycle(_LINES)):
        places = range(1, len(values) + 1) if x is None else x
        every = max(1, len(values) // 8)
        ax.plot(places, values, color=color, linestyle=style, marker=marker, markersize=4, markevery=every, label=name)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.3)
    # A legend of more than four names always covers a curve.
    outside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(found) > 4 else {}
    ax.legend(fontsize="small", **outside)
    return ax


def graph(gm: GraphModule, ax: Axes | None = None, keep: Callable[[Node], bool] | None = None) -> Axes:
    """Draws an FX graph from top to bottom, with products in boxes and fp8fn's products in black.

    `keep` selects the nodes to show. By default views, casts and elementwise functions are hidden, and arrows pass
    through hidden nodes.
    """
    shown, edges = _condensed(gm, keep or _is_landmark)
    place = _layered(shown, edges)
    depth, width = (
        1 + max((y for _, y in place.values()), default=0),
        1 + max((x for x, _ in place.values()), default=0),
    )
    ax = _axes(ax, (max(3.0, 1.6 * width), 0.55 * depth))
    for start, end in edges:
        (x0, y0), (x1, y1) = place[start], place[end]
        # An arrow that passes other nodes is an arc.
        style = "arc3,rad=0.35" if y1 - y0 > 1 and x0 == x1 else "arc3"
        arrow = {"arrowstyle": "->", "color": "0.45", "connectionstyle": style, "shrinkA": 7, "shrinkB": 7}
        ax.annotate("", (x1, -y1), (x0, -y0), arrowprops=arrow)
    for node, (x, y) in place.items():
        face, text = (
            ("black", "white") if _is_fp8(node) else ("0.8", "black") if _is_product(node) else ("white", "black")
        )
        box = {"boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": "black"}
        ax.text(x, -y, _title(node), ha="center", va="center", fontsize=8, color=text, bbox=box)
    ax.set_xlim(-0.6, width - 0.4)
    ax.set_ylim(0.6 - depth, 0.6)
    ax.set_axis_off()
    return ax


def rates(run: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Plots bars of a benchmark's rates by shape, with quartiles; `run` comes from `fp8fn.bench.record.read`."""
    from fp8fn.bench import plot, tables

    ax = _axes(ax, (9, 3.6))
    plot._bars(ax, tables.rows_of(dict(run)))
    # Sizes are stacked vertically: side by side, the labels of five products overlap.
    ax.set_xticks(ax.get_xticks(), [text.get_text().replace(",", ",\n") for text in ax.get_xticklabels()])
    return ax


def roofline(run: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Plots rates over operations per byte, with the copy's bandwidth and the fastest product of the run as limits."""
    from fp8fn.bench import plot, tables

    ax = _axes(ax, (9, 4))
    plot._roofline(ax, tables.rows_of(dict(run)), run["results"]["copy_tb_s"])
    return ax


def speedups(run: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Plots bf16's time over fp8fn's for each of the 84 layers of a run."""
    from fp8fn.bench import plot, tables

    ax = _axes(ax, (9, 3.6))
    plot._speedups(ax, tables.rows_of(dict(run)))
    return ax


def _axes(ax: Axes | None, size: tuple[float, float]) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as missing:
        from fp8fn.extras import installed_by

        raise ImportError(f"fp8fn.plot needs matplotlib: {installed_by('notebooks')}") from missing
    return plt.subplots(figsize=size, layout="constrained")[1]


def _values(q: ScaledTensor | Tensor) -> Tensor:
    from fp8fn.quantization import dequantize

    return (dequantize(q, torch.float32) if isinstance(q, ScaledTensor) else q.detach()).double()


def _name(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_fp8(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("fp8fn.")


def _is_product(node: Node) -> bool:
    names = ("linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "scaled_dot_product_attention")
    return node.op != "placeholder" and _name(node).split(".")[0] in names


def _is_landmark(node: Node) -> bool:
    """Whether a node is a product, a norm, an embedding, an activation, a sum of activations, or the output."""
    names = ("embedding", "softmax", "silu", "gelu", "relu", "rms_norm", "layer_norm", "output", "add", "iadd")
    return _is_fp8(node) or _is_product(node) or (node.op != "placeholder" and _name(node) in names and _is_wide(node))


def _is_wide(node: Node) -> bool:
    """Whether a sum adds activations, and not an index or an epsilon."""
    if not _name(node).endswith("add"):
        return True
    value = node.meta.get("example_value")
    operands = [arg for arg in node.args if isinstance(arg, Node)]
    if len(operands) < 2 or not isinstance(value, Tensor):
        return False
    shapes = {tuple(arg.meta["example_value"].shape) for arg in operands if "example_value" in arg.meta}
    return value.is_floating_point() and value.ndim == 3 and len(shapes) == 1


def _title(node: Node) -> str:
    """The function's name, with the prefix `fp8fn.` for fp8fn's, and the last part of a product's weight name."""
    name = _name(node).removeprefix("fp8fn.").split(".")[0].replace("scaled_dot_product_attention", "attention")
    if _is_fp8(node):
        name = f"fp8fn.{name}"
    if not (_is_fp8(node) or _is_product(node)) or len(node.args) < 2:
        return name
    weight = node.args[1]
    while isinstance(weight, Node) and _name(weight).split(".")[0] in _VIEWS and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    parts = weight.name.split("_") if isinstance(weight, Node) else []
    if "parameters" not in parts:
        return name
    path = "_".join(parts[: parts.index("parameters")])
    return f"{name} {path.rpartition('modules_')[2]}"


def _condensed(gm: GraphModule, keep: Callable[[Node], bool]) -> tuple[list[Node], list[tuple[Node, Node]]]:
    """The kept nodes, and the pairs that are connected without passing another kept node."""
    shown = [node for node in gm.graph.nodes if keep(node)]
    reached: dict[Node, set[Node]] = {}
    edges: list[tuple[Node, Node]] = []
    for node in gm.graph.nodes:
        sources: set[Node] = set().union(*(reached[before] for before in node.all_input_nodes))
        if node in shown:
            edges += [(source, node) for source in shown if source in sources]
            sources = {node}
        reached[node] = sources
    return shown, edges


def _layered(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> dict[Node, tuple[float, int]]:
    """The column and row of each node: below all its inputs, with the nodes of a row centred."""
    row: dict[Node, int] = {}
    for node in nodes:
        row[node] = max((row[start] + 1 for start, end in edges if end is node), default=0)
    width = max((list(row.values()).count(y) for y in row.values()), default=1)
    place: dict[Node, tuple[float, int]] = {}
    for y in range(max(row.values(), default=-1) + 1):
        members = [node for node in nodes if row[node] == y]
        for i, node in enumerate(members):
            place[node] = ((width - len(members)) / 2 + i, y)
    return place
