"""How the tensors of an op may be cut over the ranks of a device mesh; `torch_distributed.py` tells PyTorch.

A rule names the axes of each tensor by letters, as an einsum does. To cut an axis is to shard every tensor that has its
letter. Scales say where it may be cut: `"*rc/block"` are the scales of an axis `r` and an axis `c` in the block that
the argument `block` gives, and each rank's part has to begin with a whole block. Where a block is the whole axis,

- an operand's scale holds for all parts, so that each rank has it;
- a result's scale needs all parts, so that the axis stays whole, unless the op is given the largest magnitudes.

`*` stands for leading dimensions, `_` for an axis that is never cut. An argument without a rule is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from fp8fn.ops.layout import MX_A_BLOCK, MX_B_BLOCK, WHOLE, Block, swap
from fp8fn.ops.silu_mul import SAVED_BLOCK

Placement: TypeAlias = int | str | None
"""Of a tensor over one dimension of the mesh: the dimension that is cut, how parts are reduced, or None for copies."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Axes of an op's tensors.

    Args:
        inputs: of each tensor argument, by name; with `|` between them, for each number of dimensions.
        outputs: of each result.
        reduces: "sum" if results are sums over the axes that they lack; "max" if a scale of a whole axis is the largest
            of its parts.
        added: arguments that are added to a sum, once for all ranks.
        uncut: letters of axes that stay whole, each with the argument whose presence lifts that, or "".
    """

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    reduces: str = ""
    added: tuple[str, ...] = ()
    uncut: Mapping[str, str] | str = ""


@dataclass(frozen=True)
class Refusal:
    """Why an op takes no DTensor, and what would work."""

    reason: str


class Composed(NamedTuple):
    """An op that is written with other ops, whose rules hold."""


Sharding: TypeAlias = Rule | Callable[[Mapping[str, Any]], Rule] | Refusal | Composed


class Cut(NamedTuple):
    """One axis over one dimension of the mesh.

    Args:
        inputs: of each tensor that the op is given.
        outputs: of each result.
        axis: the letter, or the number of a leading dimension.
        size: of the axis.
        blocks: sizes of blocks along the axis, of which each part holds a whole number.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    axis: str = ""
    size: int = 0
    blocks: frozenset[int] = frozenset()

    def is_whole(self, parts: Sequence[int]) -> bool:
        """Whether the axis, cut into so many parts, and each of them into so many, has no block in two of them."""
        return all(_is_whole(self.size, block, parts) for block in self.blocks if block != 1)


def _is_whole(size: int, block: int, parts: Sequence[int]) -> bool:
    if not parts or size == 0:
        return True
    chunk = -(-size // parts[0])  # as torch.chunk
    if chunk < size and chunk % block != 0:
        return False
    return all(_is_whole(part, block, parts[1:]) for part in {min(chunk, size), size % chunk})


class _Axes(NamedTuple):
    """Letters of a tensor's axes, and for scales their block."""

    letters: tuple[str, ...]
    block: Block | None

    def along(self, letter: str) -> int | None:
        """The block along an axis; None for a tensor that holds no scales, and beside the last two axes."""
        if self.block is None or letter not in self.letters[-2:]:
            return None
        return self.block[self.letters[-2:].index(letter)]


def whole(tensors: int, results: int) -> Cut:
    """Nothing is cut: all ranks hold all tensors."""
    return Cut((None,) * tensors, (None,) * results)


def cuts(rule: Rule, arguments: Mapping[str, Any]) -> Iterator[Cut]:
    """Each axis that may be cut, for a call with these arguments, of which tensors have a `shape`."""
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if hasattr(value, "shape")}
    terms = {name: rule.inputs.get(name, "_" * len(shape)) for name, shape in shapes.items()}
    lead = max((len(shapes[name]) - _named(term) for name, term in terms.items() if "|" not in term), default=0)
    inputs = {name: _axes(term, lead, len(shapes[name]), arguments) for name, term in terms.items()}
    outputs = [_axes(term, lead, lead + _named(term), arguments) for term in rule.outputs]
    given = {axes.block for axes in inputs.values()}
    letters = dict.fromkeys(letter for axes in inputs.values() for letter in axes.letters)
    for letter in letters:
        if letter == "_" or (letter in rule.uncut and not _is_given(rule, letter, arguments)):
            continue
        results = [_of_result(axes, letter, given, rule.reduces) for axes in outputs]
        if "" in results:
            continue
        summed = "sum" in results
        placements = tuple(
            "sum" if summed and name in rule.added else _of_operand(axes, letter) for name, axes in inputs.items()
        )
        size = next(
            shapes[name][axes.letters.index(letter)]
            for name, axes in inputs.items()
            if letter in axes.letters and axes.block is None
        )
        blocks = frozenset(axes.along(letter) for axes in (*inputs.values(), *outputs)) - {None, WHOLE}
        yield Cut(placements, tuple(results), letter, size, blocks)  # type: ignore[arg-type]  # neither is None


def _is_given(rule: Rule, letter: str, arguments: Mapping[str, Any]) -> bool:
    lifted_by = rule.uncut[letter] if isinstance(rule.uncut, Mapping) else ""
    return arguments.get(lifted_by) is not None


def _of_operand(axes: _Axes, letter: str) -> Placement:
    return axes.letters.index(letter) if letter in axes.letters and axes.along(letter) != WHOLE else None


def _of_result(axes: _Axes, letter: str, given: set[Block | None], reduces: str) -> Placement:
    """The placement of a result, or "" where the axis has to stay whole for it."""
    if letter not in axes.letters:
        return "sum" if reduces == "sum" else ""
    if axes.along(letter) != WHOLE:
        return axes.letters.index(letter)
    if axes.block in given:
        return None
    return "max" if reduces == "max" else ""


def _named(term: str) -> int:
    """The number of axes beside leading ones."""
    return len(term.partition("/")[0].strip("*"))


def _axes(term: str, lead: int, ndim: int, arguments: Mapping[str, Any]) -> _Axes:
    """A term's axes, of `lead` leading dimensions in all; a tensor with fewer has the last ones."""
    if "|" in term:
        term = next(each for each in term.split("|") if _named(each) + lead * each.startswith("*") == ndim)
    letters, _, block = term.partition("/")
    leading = tuple(str(dim) for dim in range(lead - (ndim - _named(term)), lead))
    return _Axes((*leading, *letters.strip("*")), _block(block, arguments) if block else None)


def _block(name: str, arguments: Mapping[str, Any]) -> Block:
    """The block that an argument gives, or `name.T` its transpose; the default of `dual_block` is that of `block`."""
    if name in _CONSTANT:
        return _CONSTANT[name]
    rows, columns = arguments[name.removesuffix(".T")] or swap(arguments["block"])
    return (columns, rows) if name.endswith(".T") else (rows, columns)


_CONSTANT: Final[dict[str, Block]] = {"SAVED": SAVED_BLOCK, "MX_A": MX_A_BLOCK, "MX_B": MX_B_BLOCK}
_ONE: Final = ("*rc", "*rc/block")
_TWO: Final = (*_ONE, "*rc", "*rc/dual_block")
_GROUPED: Final = ("rc", "rc/block")
_GROUPED_DUAL: Final = (*_GROUPED, "rc", "rc/dual_block")
_TOKENS: Final = "r"
_GATED: Final = {"gate": "*rc", "up": "*rc"}
_GATED_TOKENS: Final = {"gate": "rc", "up": "rc"}
_NORM: Final = {"x": "*rc", "weight": "c", "rstd": "*r"}
_PRODUCT: Final = {"a": "*mk", "b": "*kn", "bias": "n"}

amax: Final = Rule(inputs={"x": "*rc"}, outputs=("*rc/block",), reduces="max")
quantize: Final = Rule(inputs={"x": "*rc", "amax": "*rc/block"}, outputs=_ONE)
quantize_dual: Final = Rule(inputs={"x": "*rc", "amax": "*rc/block"}, outputs=_TWO)
quantize_silu_mul: Final = Rule(inputs=_GATED, outputs=_ONE)
quantize_silu_mul_dual: Final = Rule(inputs=_GATED, outputs=_TWO)
quantize_rms_norm: Final = Rule(inputs=_NORM, outputs=_ONE, uncut={"c": "rstd"})
quantize_rms_norm_dual: Final = Rule(inputs=_NORM, outputs=_TWO, uncut={"c": "rstd"})
quantize_add_rms_norm: Final = Rule(
    inputs={"x": "*rc", "residual": "*rc", "weight": "c"}, outputs=(*_ONE, "*rc"), uncut="c"
)
quantize_silu_mul_saved: Final = Rule(inputs=_GATED, outputs=(*_ONE, *("*rc", "*rc/SAVED") * 2))
quantize_silu_mul_backward: Final = Rule(
    inputs={"grad": "*rc", **_GATED, "gate_scale": "*rc/SAVED", "up_scale": "*rc/SAVED"},
    outputs=(*(*_ONE, "*rc", "*rc/block.T") * 2, "*rc", "*rc/product_block"),
)
# A group of tokens may end anywhere: their axis stays whole.
quantize_grouped: Final = Rule(inputs={"x": "rc"}, outputs=_GROUPED, uncut=_TOKENS)
quantize_grouped_dual: Final = Rule(inputs={"x": "rc"}, outputs=_GROUPED_DUAL, uncut=_TOKENS)
quantize_silu_mul_grouped: Final = Rule(inputs=_GATED_TOKENS, outputs=_GROUPED, uncut=_TOKENS)
quantize_silu_mul_grouped_dual: Final = Rule(inputs=_GATED_TOKENS, outputs=_GROUPED_DUAL, uncut=_TOKENS)
# `hidden` holds two halves: no part of it is the same part of each.
quantize_silu_mul_grad_grouped_dual: Final = Rule(
    inputs={"grad": "rc"}, outputs=(*_GROUPED, "rc", "rc/block.T"), uncut="rc"
)
scaled_mm: Final = Rule(
    inputs={**_PRODUCT, "a_scale": "*mk/a_block", "b_scale": "*kn/b_block"},
    outputs=("*mn",), reduces="sum", added=("bias",),
)  # fmt: skip
mx_mm: Final = Rule(
    inputs={**_PRODUCT, "a_scale": "*mk/MX_A", "b_scale": "*kn/MX_B"},
    outputs=("*mn",), reduces="sum", added=("bias",),
)  # fmt: skip
_A16W8: Final = Rule(
    inputs={"x": "*mk", "w": "*kn", "w_scale": "*kn/w_block", "bias": "n|*n|*_n"},
    outputs=("*mn",), reduces="sum", added=("bias",),
)  # fmt: skip


def mm_a16w8(arguments: Mapping[str, Any]) -> Rule:
    """Activations that are quantized with one scale for a whole row need the row."""
    return replace(_A16W8, uncut="k") if _needs_whole_rows(arguments) else _A16W8


def grouped_mm_a16w8(arguments: Mapping[str, Any]) -> Rule:
    """As `mm_a16w8`."""
    return replace(_GROUPED_A16W8, uncut="mek") if _needs_whole_rows(arguments) else _GROUPED_A16W8


# Sums of parts of K would be rounded to the type of `gate` before they are added.
silu_mul_mm_a16w8: Final = Rule(
    inputs={"gate": "mk", "up": "mk", "w": "kn", "w_scale": "kn/w_block"}, outputs=("mn",), uncut="k"
)
# Likewise, sums of parts of K: silu(gate) * up of a sum is not the sum of theirs.
mm_a16w8_silu_mul: Final = Rule(
    inputs={"x": "mk", "w": "kn", "w_scale": "kn/w_block", "w_up": "kn", "w_up_scale": "kn/w_block"},
    outputs=("mn",), uncut="k",
)  # fmt: skip


def _needs_whole_rows(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("activations", "16bit") != "16bit" and arguments["w_block"][0] == WHOLE)


_GROUPED_A16W8: Final = Rule(
    inputs={"x": "mk", "w": "ekn", "w_scale": "ekn/w_block", "bias": "en"},
    outputs=("mn",), reduces="sum", added=("bias",), uncut="me",
)  # fmt: skip
moe_gemm: Final = Rule(
    inputs={"a": "rk", "a_scale": "rk/a_block", "w": "ekn", "w_scale": "ekn/w_block"},
    outputs=("_n",), reduces="sum", uncut="re",
)  # fmt: skip
_GROUPS_OF_ROWS: Final = Rule(
    inputs={"a": "mk", "a_scale": "mk/a_block", "b": "ekn", "b_scale": "ekn/b_block", "bias": "en"},
    outputs=("mn",), reduces="sum", added=("bias",), uncut="me",
)  # fmt: skip
# A count is of an expert's first rows: they stay whole, while experts may be cut.
_COUNTED_ROWS: Final = Rule(
    inputs={
        "a": "emk", "a_scale": "emk/a_block", "b": "ekn", "b_scale": "ekn/b_block", "bias": "en", "counts": "e",
    },
    outputs=("emn",), reduces="sum", added=("bias",), uncut="m",
)  # fmt: skip
_GROUPS_OF_K: Final = Rule(
    inputs={"a": "mk", "a_scale": "mk/a_block", "b": "kn", "b_scale": "kn/b_block", "bias": "_n"},
    outputs=("_mn",), uncut="k",
)  # fmt: skip


def scaled_grouped_mm(arguments: Mapping[str, Any]) -> Rule:
    if arguments.get("counts") is not None:
        return _COUNTED_ROWS
    return _GROUPS_OF_ROWS if len(arguments["b"].shape) == 3 else _GROUPS_OF_K


COMPOSED: Final = Composed()
monitor: Final = Refusal("its counts are those of one process; give it x.to_local()")
gather_scaled_mm: Final = Refusal("it gathers what ranks hold itself; give it x.to_local()")
mm_a16w8_siblings: Final = Refusal(
    "only passes over compiled graphs call it, whose tensors are local; give it x.to_local()"
)
