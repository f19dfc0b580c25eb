"""The format of compressed-tensors, which llm-compressor writes and vLLM reads: groups of layers with a scheme each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from fp8fn.checkpoint.blocks import CHANNEL, E4M3, GROUP, MX, SQUARE, TENSOR
from fp8fn.checkpoint.files import Json, modules, shortened
from fp8fn.checkpoint.format import (
    Activations,
    Contents,
    Declared,
    Format,
    ScaleForm,
    Scheme,
    Schemes,
    Spelling,
    UnknownScheme,
)
from fp8fn.checkpoint.fp8 import declared_block
from fp8fn.ops.layout import WHOLE, Block

# The strategies of weights and of activations without sizes.
_WHOLE: Final[Mapping[str, Block]] = {"tensor": TENSOR, "channel": CHANNEL, "token": CHANNEL}


# The places of a transform that is part of the weights in the file; others change activations while the model runs.
_OFFLINE: Final = ("weight_input", "weight_output")
_BLOCK: Final = re.compile(r"(\d+)x(\d+)")


def _read(declared: Declared) -> Schemes:
    _check_transforms(declared)
    groups = declared.config.get("config_groups")
    where = f"{declared.path}: config_groups"
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"{where}={shortened(repr(groups))} must be a JSON object of groups")
    found: list[tuple[list[str], dict[str, Any], str]] = []
    for name, group in groups.items():
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise ValueError(f"{where}.{name}.targets={shortened(repr(targets))} must be a list of names")
        if group.get("weights", group) is not None:  # null: the group quantizes a cache, say, and no weights
            found.append((targets, group, f"{where}.{name}"))
    schemes: dict[int, Scheme] = {}

    def scheme(weight: str, shape: Sequence[int]) -> Scheme:
        number = _group_of(modules([weight])[0], [targets for targets, _, _ in found])
        if number is None:
            raise UnknownScheme(f"no scheme: no target of {where} is its module")
        if number not in schemes:
            schemes[number] = _scheme(found[number][1], found[number][2], declared.config.get("format"))
        return schemes[number]

    return scheme


def _check_transforms(declared: Declared) -> None:
    """Raises ValueError for rotations of activations, without which the weights in the file give wrong products."""
    config = declared.config.get("transform_config")
    if not config:
        return
    where = f"{declared.path}: transform_config"
    try:
        placed = [
            (name, scheme.get("type"), str(each["location"]))
            for name, scheme in (config.get("config_groups") or {}).items()
            for each in scheme["apply"]
        ]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{where}={shortened(repr(config))} must be a JSON object of groups") from None
    for name, kind, location in placed:
        if location not in _OFFLINE:
            scheme = shortened(f"{kind} at {location} ({name})")
            raise ValueError(f"{where} has an online transform, {scheme}, which fp8fn does not apply")


def _group_of(module: str, groups: Sequence[list[str]]) -> int | None:
    """The group that names a module, by its name or an expression, else the one that names a class."""
    classes = None
    for number, targets in enumerate(groups):
        for target in targets:
            if target.startswith("re:"):
                if _matches(target.removeprefix("re:"), module):
                    return number
            elif target == module or module.endswith(f".{target}"):
                return number
            elif target[:1].isupper() and classes is None:
                classes = number
    return classes


def _matches(expression: str, module: str) -> bool:
    try:
        return re.match(expression, module) is not None
    except re.error as error:
        raise UnknownScheme(f"a target that is no regular expression, {expression!r}: {error}") from None


def _scheme(group: dict[str, Any], where: str, whole_format: object) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    form = group.get("format") or whole_format
    if not isinstance(weights, dict) or not (inputs is None or isinstance(inputs, dict)):
        raise ValueError(f"{where} must have weights, and input_activations or null, as JSON objects")
    words = f"{_words(weights)} {f'in {form} ' if form else ''}({where})"
    block = _block(weights, where)
    if block is None or weights.get("dynamic") or form in ("pack-quantized", "int-quantized", "marlin-24"):
        raise UnknownScheme(words)
    if inputs is None:
        return Scheme(block, None, words, E4M3)
    rows = _block(inputs, where)
    if rows is None or inputs.get("dynamic") not in (True, False, None):
        raise UnknownScheme(f"activations of {_words(inputs)} ({where})")
    return Scheme(block, Activations(rows, static=not inputs.get("dynamic")), words, E4M3)


def _words(args: dict[str, Any]) -> str:
    symmetric = "" if args.get("symmetric", True) else "asymmetric "
    size = f" of {args['group_size']}" if args.get("group_size") else ""
    return str(shortened(f"{symmetric}{args.get('type')}{args.get('num_bits')} per {args.get('strategy')}{size}"))


def _block(args: dict[str, Any], where: str) -> Block | None:
    """The block of a weight's or an activation's arguments; None where it is no FP8 that fp8fn has."""
    if args.get("num_bits") != 8 or args.get("type") != "float" or args.get("symmetric") is False:
        return None
    strategy = args.get("strategy")
    if strategy is None:  # as compressed-tensors infers it
        size = args.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "block":
        sizes = args.get("block_structure")
        written = _BLOCK.fullmatch(sizes) if isinstance(sizes, str) else None  # "128x128", of older files
        return declared_block(list(map(int, written.groups())) if written else sizes, f"{where}: block_structure")
    if strategy == "group":
        size = args.get("group_size")
        return {32: MX, 128: GROUP}.get(size) if isinstance(size, int) else None
    return _WHOLE.get(str(strategy))


def _declare(contents: Contents) -> dict[str, Json]:
    groups: dict[tuple[Block, Activations | None], list[str]] = {}
    for name, weight in contents.weights.items():
        groups.setdefault((weight.block, weight.activations), []).append(name)
    declared = {
        f"group_{number}": {
            "format": _format(block),
            "input_activations": None if activations is None else _arguments(activations.block, activations),
            "output_activations": None,
            "targets": ["Linear"] if len(groups) == 1 else modules(names),
            "weights": _arguments(block, None),
        }
        for number, ((block, activations), names) in enumerate(groups.items())
    }
    formats = {group["format"] for group in declared.values()}
    section = {
        "config_groups": declared,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": modules(contents.left),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return {"config.json": section}


def _format(block: Block) -> str:
    return "mxfp8-quantized" if block == MX else "float-quantized"


def _arguments(block: Block, activations: Activations | None) -> dict[str, Any]:
    """The arguments of a weight, or of activations."""
    channel = "channel" if activations is None else "token"
    strategy = {TENSOR: "tensor", CHANNEL: channel, SQUARE: "block", GROUP: "group", MX: "group"}[block]
    return {
        "block_structure": list(block) if strategy == "block" else None,
        "dynamic": activations is not None and not activations.static,
        "group_size": block[1] if strategy == "group" else None,
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
        **({"scale_dtype": "torch.uint8"} if block == MX else {}),
    }


COMPRESSED_TENSORS: Final = Format(
    name="compressed-tensors",
    methods=("compressed-tensors",),
    scale=Spelling("{name}_scale"),
    input_scale=Spelling("{stem}input_scale"),
    forms={
        CHANNEL: ScaleForm(activations=CHANNEL, may_be_static=True),
        TENSOR: ScaleForm("one", activations=(1, WHOLE), may_be_static=True),
        SQUARE: ScaleForm(activations=GROUP),
        GROUP: ScaleForm(activations=GROUP),
        MX: ScaleForm(dtype=torch.uint8, activations=MX),
    },
    read=_read,
    declare=_declare,
    mixed=True,
    weight_only=True,
)
