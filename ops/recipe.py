"""Recipe: which blocks, element types and scales the three GEMMs of a linear layer use, forward and backward."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Final, Literal, get_args

import torch

from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS, ScaleFormat, short_name
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.layout import WHOLE, Block, contracts_rows, is_square, known_block, swap, unknown_block

Save = Literal["all", "exact", "fp8"]
SAVES: Final[tuple[Save, ...]] = get_args(Save)
Accumulate = Literal["promoted", "fast"]
ACCUMULATES: Final[tuple[Accumulate, ...]] = get_args(Accumulate)
_FLAGS: Final = ("second_order", "keep_weights", "batch_invariant")
_DTYPES: Final = {short_name(dtype): dtype for dtype in FP8_DTYPES}
_NAMES: Final[dict[str, str]] = {}


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(str(size) for size in value)
    if isinstance(value, torch.dtype):
        return short_name(value)
    return str(value)


def read_field(name: str, text: str) -> object:
    if name.endswith("_block"):
        found = re.fullmatch(r"(-?\d+)x(-?\d+)", text)
        if found is None:
            raise ValueError(f"recipe: {name}={text!r} is not a block; write it as '128x128', with -1 for a whole axis")
        return int(found[1]), int(found[2])
    if name.endswith("_dtype"):
        if text not in _DTYPES:
            raise ValueError(f"recipe: {name}={text!r} is not an FP8 type; use one of {', '.join(_DTYPES)}")
        return _DTYPES[text]
    if name in _FLAGS:
        if text not in ("True", "False"):
            raise ValueError(f"recipe: {name}={text!r} is neither 'True' nor 'False'")
        return text == "True"
    return text


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Blocks, FP8 types and scale format of a product `C = A @ B` and of its two gradients.

    Transposed operands of the backward take the transposed block. `key` is the recipe as a string for ops: a preset's
    name, or the fields that differ from `BLOCKWISE`.

    Args:
        activation_block: Block of `A (M, K)`.
        weight_block: Block of `B (K, N)`.
        gradient_block: Block of `dC (M, N)` in `dA = dC @ Bᵀ`.
        wgrad_activation_block: Block of `A (M, K)` in `dB = Aᵀ @ dC`; None: `activation_block` transposed.
        activation_dtype: FP8 type of `A`; None is the device's own e4m3.
        weight_dtype: FP8 type of `B`, likewise.
        gradient_dtype: FP8 type of `dC`, likewise.
        scale: "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.
        second_order: Keeps the unquantized operands for second derivatives outside of nested `torch.func` transforms.
        keep_weights: Keeps the FP8 forms of weights for the backward, one byte an element.
        save: What a compiled graph keeps for its backward: "exact" less than PyTorch, rounding no more; "fp8" also
            the inputs of an MLP's activation in FP8; "all" PyTorch's choice.
        batch_invariant: A row's result has the same bits whatever the other rows. Rows must have their own scales.
        accumulate: "fast" lets the forward keep sums over all of K in the tensor core. Blocks must be whole along K.

    Raises:
        TypeError: A field is given by its position, or a flag is not a bool.
        ValueError: A value does not exist or does not fit its place.

    Example:
        >>> fp8fn.Recipe(scale="pow2").key
        'blockwise_pow2'

    Source:
        `BLOCKWISE` has the blocks of DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """

    activation_block: Block = (1, 128)
    weight_block: Block = (128, 128)
    gradient_block: Block = (1, 128)
    wgrad_activation_block: Block | None = None
    activation_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    scale: ScaleFormat = "fp32"
    second_order: bool = False
    keep_weights: bool = False
    save: Save = "exact"
    batch_invariant: bool = False
    accumulate: Accumulate = "promoted"
    key: str = field(init=False, repr=False, compare=False)

    def __new__(cls, *positional: object, **values: object) -> Recipe:
        """TypeError for what is not given by its name, a preset's name above all."""
        if positional:
            given = positional[0]
            known = isinstance(given, str) and given.lower() in PRESETS
            remedy = f"that preset is fp8fn.{str(given).upper()}" if known else "Recipe(scale='pow2') for one"
            raise TypeError(
                f"Recipe: {given!r} is given as a positional argument, and a field is given by its name; {remedy}, and "
                "every `recipe=` takes a preset's name too"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("activation_block", "weight_block", "gradient_block", "wgrad_activation_block"):
            if name == "wgrad_activation_block" and self.wgrad_activation_block is None:
                continue
            block = known_block(getattr(self, name))
            if block is None:
                raise unknown_block(f"Recipe: {name}", getattr(self, name))
            object.__setattr__(self, name, block)
        fits = {
            "activation_block": not contracts_rows(self.activation_block),
            "gradient_block": not contracts_rows(self.gradient_block),
            "weight_block": is_square(self.weight_block) or contracts_rows(self.weight_block),
            "wgrad_activation_block": is_square(self.wgrad_block) or contracts_rows(self.wgrad_block),
        }
        for name, fit in fits.items():
            if not fit:
                block = getattr(self, name)
                summed = "M, which a wgrad sums over" if name == "wgrad_activation_block" else "K"
                raise ValueError(f"Recipe: {name}={block} has a scale for each element of {summed}; use {swap(block)}")
        if self.wgrad_activation_block == swap(self.activation_block):  # two spellings have one key
            object.__setattr__(self, "wgrad_activation_block", None)
        for name in ("activation_dtype", "weight_dtype", "gradient_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FP8_DTYPES:
                raise ValueError(f"Recipe: {name}={dtype!r} is not an FP8 type; use one of {list(_DTYPES.values())}")
        if self.scale not in SCALE_FORMATS:
            raise ValueError(f"Recipe: scale={self.scale!r} is not a scale format; use one of {SCALE_FORMATS}")
        for name in _FLAGS:
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(f"Recipe: {name}={flag!r} is {kind_of(flag)}; use True or False")
        for name in ("activation_block", "gradient_block"):
            if self.batch_invariant and getattr(self, name)[0] != 1:
                block = getattr(self, name)
                raise ValueError(f"Recipe: batch_invariant=True, and rows share scales in {name}={block}; use (1, 128)")
        if self.save not in SAVES:
            raise ValueError(f"Recipe: save={self.save!r} is not a way to save; use one of {SAVES}")
        if self.accumulate not in ACCUMULATES:
            raise ValueError(f"Recipe: accumulate={self.accumulate!r} is no way to add; use one of {ACCUMULATES}")
        if self.accumulate == "fast":
            check_fast("Recipe: accumulate='fast'", self.activation_block, self.weight_block, self.batch_invariant)
        changed = [f for f in fields(self) if f.init and getattr(self, f.name) != f.default]
        written = ",".join(f"{f.name}={_write(getattr(self, f.name))}" for f in changed)
        # Not a cached property: Dynamo traces reads of the key, and cannot trace the lock of one.
        object.__setattr__(self, "key", _NAMES.get(written, written))

    @property
    def wgrad_block(self) -> Block:
        """The block of `A (M, K)` in `dB = Aᵀ @ dC`."""
        return self.wgrad_activation_block or swap(self.activation_block)

    @property
    def dgrad(self) -> Recipe:
        """The recipe of `dA = dC @ Bᵀ` seen as a product of its own."""
        return replace(
            self,
            activation_block=self.gradient_block,
            wgrad_activation_block=None,
            activation_dtype=self.gradient_dtype,
            accumulate="promoted",
        )

    @property
    def wgrad(self) -> Recipe:
        """The recipe of `dB = Aᵀ @ dC` seen as a product of its own."""
        return replace(
            self,
            activation_block=swap(self.wgrad_block),
            wgrad_activation_block=None,
            weight_block=swap(self.gradient_block),
            weight_dtype=self.gradient_dtype,
            accumulate="promoted",
        )


def _preset(name: str, **values: Any) -> Recipe:
    _NAMES[Recipe(**values).key] = name
    return Recipe(**values)


BLOCKWISE: Final = _preset("blockwise")
BLOCKWISE_POW2: Final = _preset("blockwise_pow2", scale="pow2")
HYBRID: Final = _preset("hybrid", gradient_dtype=torch.float8_e5m2)
ROWWISE: Final = _preset("rowwise", activation_block=(1, WHOLE), weight_block=(WHOLE, 1), gradient_block=(1, WHOLE))
TENSORWISE: Final = _preset(
    "tensorwise", activation_block=(WHOLE, WHOLE), weight_block=(WHOLE, WHOLE), gradient_block=(WHOLE, WHOLE)
)
MXFP8: Final = _preset("mxfp8", activation_block=(1, 32), weight_block=(32, 1), gradient_block=(1, 32), scale="rceil")
BLOCKWISE_SQUARE: Final = _preset("blockwise_square", wgrad_activation_block=(128, 128))

# The fastest preset whose losses keep to the bar of `bench loss`.
BACKEND_DEFAULT: Final = BLOCKWISE_SQUARE

PRESETS: Final = {
    preset.key: preset for preset in (BLOCKWISE, BLOCKWISE_POW2, HYBRID, ROWWISE, TENSORWISE, MXFP8, BLOCKWISE_SQUARE)
}


def check_fast(name: str, a_block: Sequence[int], b_block: Sequence[int], batch_invariant: bool) -> None:
    """ValueError where sums can't stay in the tensor core's accumulator."""
    if batch_invariant:
        raise ValueError(f"{name}, and batch_invariant=True asks for one order of sums; leave one of them out")
    if (a_block[1], b_block[0]) != (WHOLE, WHOLE):
        raise ValueError(
            f"{name}, and blocks {tuple(a_block)} and {tuple(b_block)} have several scales along K, each of "
            "which needs a promotion; use the blocks of ROWWISE or TENSORWISE"
        )


def is_batch_invariant(recipe: Recipe | str) -> bool:
    """`batch_invariant` of a recipe or of its key, which Dynamo can trace."""
    if isinstance(recipe, Recipe):
        return recipe.batch_invariant
    return "batch_invariant=True" in recipe_key(recipe)


def check_grouped(op: str, recipe: Recipe | str) -> None:
    if is_batch_invariant(recipe):
        raise NotImplementedError(
            f"{op}: recipe has batch_invariant=True, and products of groups have no batch-invariant kernel; use "
            "fp8fn.gemm for each group, or leave batch_invariant out"
        )


@lru_cache(maxsize=1024)
def parse_recipe(key: str) -> Recipe:
    """The recipe of a key: a preset's name in any case, or `"field=value,…"` as `Recipe.key` writes it.

    Raises `ValueError` with the nearest names for one that does not exist.
    """
    preset = PRESETS.get(key.lower())
    if preset is not None:
        return preset
    if "=" not in key:
        near = difflib.get_close_matches(key.lower(), PRESETS, n=2, cutoff=0.3) or list(PRESETS)
        names = " or ".join(repr(name) for name in near)
        raise ValueError(f"recipe={key!r} does not exist; did you mean {names}? All presets: {', '.join(PRESETS)}")
    kinds = {f.name for f in fields(Recipe) if f.init}
    values: dict[str, object] = {}
    for item in key.split(","):
        name, _, text = item.partition("=")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1) or sorted(kinds)
            raise ValueError(f"recipe={key!r}: Recipe has no field {name!r}; did you mean {near[0]!r}?")
        if name in values:
            raise ValueError(f"recipe={key!r} names the field {name!r} twice; give it once")
        values[name] = read_field(name, text)
    return Recipe(**values)  # type: ignore[arg-type]


def recipe_key(recipe: Recipe | str) -> str:
    """The canonical key of a recipe or of its name. Raises `TypeError` for anything else."""
    if isinstance(recipe, Recipe):
        return recipe.key
    if isinstance(recipe, str):
        return _canonical(recipe)
    raise TypeError(f"recipe={recipe!r} is {kind_of(recipe)}; pass an fp8fn.Recipe or a preset's name")


def _canonical(key: str) -> str:
    return parse_recipe(key).key


# As `torch.compiler.assume_constant_result` does, which would import Dynamo: it can't trace how a recipe is made.
_canonical._dynamo_marked_constant = True  # type: ignore[attr-defined]
