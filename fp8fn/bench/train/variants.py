"""The variants: what becomes of a model, and the arguments of torch.compile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, cast

import torch
from torch import nn

from fp8fn.ops.recipe import PRESETS, Recipe, read_field
from fp8fn.weights.quantize import quantize_weights

BF16: Final = "bf16"
# The options of `backend="fp8fn"` beside the recipe, which `lowering.backend` names too.
BACKEND_OPTIONS: Final = ("where", "fuse_quantize", "save", "monitor", "batch_invariant", "async_tp")
TORCHAO: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
TRANSFORMER_ENGINE: Final = "transformer_engine"
# PEFT's LoRA over frozen weights: in bf16; in FP8, with the activations of many rows in FP8, or all in 16 bits.
LORA: Final = ("bf16+lora", "fp8fn-weights+lora", "fp8fn-weights-16bit+lora")

# The variants where none are named. A peer that is not installed is reported as such.
DEFAULTS: Final = (
    BF16,
    "torchao:tensorwise",
    "torchao:rowwise",
    *(f"fp8fn:{preset.upper()}" for preset in PRESETS),
    "torchao:rowwise_with_gw_hp",
    "torchao:blockwise",
    TRANSFORMER_ENGINE,
)

Compiled = Callable[..., Any]


class UnavailableError(Exception):
    """A variant can't run here. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant by its name, as `--variants` takes it.

    The names are `bf16`, `torchao:RECIPE`, `transformer_engine`, those of `LORA`, and `fp8fn:PRESET,option=value,…`, in
    which an option is the backend's, Inductor's, or a field of the recipe.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    def compile(self, model: nn.Module, device: torch.device) -> Compiled:
        """The compiled form of `model`, whose layers are replaced by the peer's where the variant is a peer.

        Raises `UnavailableError` where the peer is not installed or does not serve this device.
        """
        if self.family == "torchao":
            _convert_by_torchao(model, self.name.partition(":")[2], device)
        elif self.family == TRANSFORMER_ENGINE:
            return _with_transformer_engine(model)
        elif self.name in LORA:
            return _with_lora(model, self.name)
        if self.family == "fp8fn":
            return torch.compile(model, backend="fp8fn", options=dict(self.options), dynamic=False)
        return torch.compile(model, dynamic=False)


def parse(text: str) -> Variant:
    """The variant of a name. Raises ValueError for a name that does not exist, and says what would do."""
    family, _, rest = text.partition(":")
    if text in (BF16, TRANSFORMER_ENGINE, *LORA):
        return Variant(name=text)
    if family == "torchao" and rest in TORCHAO:
        return Variant(name=text)
    if family == "torchao":
        raise ValueError(f"{text!r}: torchao has no recipe {rest!r}; use one of {', '.join(TORCHAO)}")
    if family != "fp8fn":
        known = f"{BF16}, torchao:RECIPE, {TRANSFORMER_ENGINE}, {', '.join(LORA)}, fp8fn:PRESET"
        raise ValueError(f"{text!r} is not a variant; use {known}")
    preset, *given = rest.split(",")
    recipe = PRESETS.get(preset.lower())
    if recipe is None:
        raise ValueError(f"{text!r}: fp8fn has no preset {preset!r}; use one of {', '.join(PRESETS).upper()}")
    options: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    known_fields = {f.name for f in fields(Recipe) if f.init}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: {item!r} is not option=value")
        if name in BACKEND_OPTIONS or name.replace("-", "_") in torch._inductor.list_options():
            options[name] = _value(value)
        elif name in known_fields:
            changes[name] = read_field(name, value)
        else:
            raise ValueError(
                f"{text!r}: {name!r} is no option of the backend {BACKEND_OPTIONS}, of Inductor, or field of a Recipe"
            )
    recipe = dataclasses.replace(recipe, **changes)
    return Variant(
        name=f"fp8fn:{','.join((preset.upper(), *given))}", options=(("recipe", recipe.key), *options.items())
    )


def listed(text: str) -> list[Variant]:
    """`"bf16 fp8fn:BLOCKWISE,where=*"` → its variants; a name has no space, and may have commas."""
    try:
        return [parse(name) for name in text.split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _value(text: str) -> bool | int | float | str:
    constants = {"True": True, "true": True, "False": False, "false": False}
    if text in constants:
        return constants[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def needed(package: str) -> Any:
    """The package, or `UnavailableError`."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise UnavailableError(f"{package.partition('.')[0]} is not installed")
    try:
        return importlib.import_module(package)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"importing {package}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
        ) from None


def convertible(module: nn.Module, name: str) -> bool:
    """A linear layer other than the head, whose sizes FP8 products take."""
    return (
        isinstance(module, nn.Linear) and "lm_head" not in name and not any(size % 16 for size in module.weight.shape)
    )


def _convert_by_torchao(model: nn.Module, recipe: str, device: torch.device) -> None:
    if recipe == "blockwise":
        quantization, blockwise = (
            needed("torchao.quantization"),
            needed("torchao.prototype.blockwise_fp8_training.linear"),
        )
        quantization.quantize_(model, blockwise.Float8BlockwiseLinearConfig(), filter_fn=convertible)
        return
    float8 = needed("torchao.float8")
    try:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
    except (AssertionError, ValueError) as error:
        raise UnavailableError(f"this torchao has no recipe {recipe!r}: {error}") from None
    if device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=convertible, config=config)


def _with_transformer_engine(model: nn.Module) -> Compiled:
    """The model with Transformer Engine's linear layers, under its autocast with current scaling."""
    engine = needed("transformer_engine.pytorch")
    recipes = needed("transformer_engine.common.recipe")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if convertible(child, name):
                linear = cast(nn.Linear, child)
                made = engine.Linear(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    params_dtype=linear.weight.dtype,
                    device=linear.weight.device,
                )
                made.weight = linear.weight
                if linear.bias is not None:
                    made.bias = linear.bias
                setattr(parent, name, made)
    compiled = torch.compile(model, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with engine.fp8_autocast(enabled=True, fp8_recipe=recipes.Float8CurrentScaling()):
            return compiled(*args, **kwargs)

    return call


def _with_lora(model: nn.Module, name: str) -> Compiled:
    """The model with adapters of rank 16 on all linear layers but the head, over frozen weights."""
    peft = needed("peft")
    fp8 = not name.startswith(BF16)
    if fp8:
        quantize_weights(model, activations="16bit" if "16bit" in name else "fp8")
    linears = [layer for layer, module in model.named_modules() if convertible(module, layer)]
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=linears)
    peft.inject_adapter_in_model(config, model)
    return torch.compile(model, backend="fp8fn" if fp8 else "inductor", dynamic=False)
