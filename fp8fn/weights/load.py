"""`load_weights`: a checkpoint with FP8 weights into a module, which may be on the meta device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.checkpoint.files import Shard
from fp8fn.checkpoint.format import CheckpointLayout
from fp8fn.checkpoint.load import Entry, moved_to, read_contents
from fp8fn.ops.activations import Activations, check_activations
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.sharded import is_sharded, local_of
from fp8fn.ops.torch_private.core import IncompatibleKeys, is_traceable_wrapper_subclass
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights.buffers import rebuilt_buffers
from fp8fn.weights.experts import JoinedEntry, by_parameter, pieces_in_files
from fp8fn.weights.fp8_weight import FP8Weight
from fp8fn.weights.parts import is_even, part_of, placed_as
from fp8fn.weights.quantize import Place, check_module, named_places

_MOST_NAMES: Final = 20  # that an error lists for each kind


class LoadedWeights(IncompatibleKeys):
    """The result of `load_weights`: `missing_keys` and `unexpected_keys`, as `Module.load_state_dict`, and `layout`.

    Args:
        missing_keys: Names that the module has and the checkpoint does not.
        unexpected_keys: Names that the checkpoint has and the module does not.
        layout: `CheckpointLayout` of the files: the format, and the recipe of each weight's activations.
    """

    layout: CheckpointLayout

    def __new__(cls, missing_keys: list[str], unexpected_keys: list[str], layout: CheckpointLayout) -> LoadedWeights:
        made = super().__new__(cls, missing_keys, unexpected_keys)
        made.layout = layout
        return made

    def __getnewargs__(self) -> Any:  # of copy and pickle, which else would leave the layout out
        return (*self, self.layout)


@dataclass(frozen=True)
class _Slot:
    """One tensor of a model and all of its names; tied parameters have several."""

    tensor: Tensor
    names: tuple[str, ...]
    places: tuple[Place, ...]
    is_parameter: bool


@checked(
    model=check_module, device=arguments.optional(arguments.device), dtype=arguments.out_dtype, strict=arguments.flag,
    activations=arguments.activations,
)  # fmt: skip
def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    activations: Activations = "16bit",
) -> LoadedWeights:
    """Loads a safetensors checkpoint into a module; FP8 weights become `FP8Weight` parameters.

    The formats are those of `load_blockwise`. The module may be on the meta device, and sharded there: each rank then
    reads its own parts. Tied parameters stay tied; one of their names is enough. After an error the module is as it
    was. Experts of transformers are read from one matrix each.

    Args:
        model: Module whose parameters and persistent buffers the checkpoint names.
        path: A safetensors file, an index (`model.safetensors.index.json`), or a folder with an index or one file.
        device: Where the tensors go; by default where the module's are, or the CPU for meta.
        dtype: Type of the floating-point tensors, and that FP8 weights stand for; by default the module's, or
            float32 where `from_pretrained` keeps that.
        strict: Whether a name that is missing, or one that the module does not have, is an error.
        activations: Whether products of many rows quantize their activations, as of `FP8Weight`.

    Returns:
        Missing and unexpected names, as `Module.load_state_dict`, and `layout`, a `CheckpointLayout`.

    Raises:
        RuntimeError: Names, shapes or types do not fit.
        ValueError: A file is damaged, or its tensors do not fit one parameter, or `activations` a weight's scales.
        NotImplementedError: A sharded parameter has values, or is in FP8 and FSDP divides it unevenly; or a buffer on
            the meta device is missing.

    Example:
        >>> import tempfile
        >>> model, folder = torch.nn.Sequential(torch.nn.Linear(256, 256)), tempfile.mkdtemp()
        >>> report = fp8fn.quantize_weights(model)
        >>> fp8fn.save_weights(model, folder)
        >>> with torch.device("meta"):
        ...     empty = torch.nn.Sequential(torch.nn.Linear(256, 256))
        >>> fp8fn.load_weights(empty, folder)
        <All keys matched successfully>
        >>> torch.equal(empty[0].weight, model[0].weight)
        True
    """
    check_activations("load_weights", activations)
    if dtype is not None:  # float8_e4m3fn would round every other tensor to FP8 without a scale
        arguments.out_dtype("load_weights", "dtype", dtype)
    contents = read_contents(path)
    stored = pieces_in_files(model)
    slots = list(_slots(model))
    shapes = {name: tuple(slot.tensor.shape) for slot in slots for name in slot.names}
    found = by_parameter(contents.entries, stored, shapes)
    tensors = found.entries
    _refuse_sharded(model, slots, tensors)
    given = {id(slot.tensor): [name for name in slot.names if name in tensors] for slot in slots}
    absent = [slot.names[0] for slot in slots if not given[id(slot.tensor)]]
    missing = [file for name in absent for file in stored.get(name, [name]) if file not in contents.entries]
    known = {name for slot in slots for name in slot.names}
    unexpected = [
        name for name in tensors if name not in known and name not in contents.own and not _unused(model, name)
    ]
    errors = [*found.errors, *_wrong_shapes(slots, tensors)]
    if strict:
        errors = [*_named("Missing", missing), *_named("Unexpected", unexpected), *errors]
    if errors:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *errors]))
    for name in chain.from_iterable(given.values()):  # before the data is read
        if (layout := tensors[name].layout) is not None:
            check_activations(f"load_weights: {name}", activations, layout.block)
    _check_ties(slots, tensors)
    rebuilt = rebuilt_buffers(model, device)
    types = _types(model, slots, dtype)
    first = {given[id(slot.tensor)][0]: slot for slot in slots if given[id(slot.tensor)]}
    loaded = []
    # In the order of the files. Once a file's tensors are on a GPU, its pages leave the host's memory.
    shards: tuple[Shard, ...] = ()
    for name in _with_progress([name for name in tensors if name in first]):
        slot, entry = first[name], tensors[name]
        for shard in shards:
            if shard not in entry.shards:
                shard.unmap()
        shards = entry.shards
        loaded.append((slot, _converted(slot, entry.load(), device, types[id(slot.tensor)], activations)))
    for slot, value in loaded:
        for place in slot.places:
            held: dict[str, Any] = place.module._parameters if slot.is_parameter else place.module._buffers
            held[place.name] = value
    for place, buffer in rebuilt:
        if place.name in place.module._buffers:
            place.module._buffers[place.name] = buffer
        else:
            setattr(place.module, place.name, buffer)
    return LoadedWeights(missing, unexpected, contents.layout)


def _slots(model: nn.Module) -> Iterator[_Slot]:
    """The parameters and the persistent buffers, tied ones once."""
    places: dict[str, Place] = dict(named_places(model))
    parameters = set(places)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                places[f"{prefix}.{name}" if prefix else name] = Place(module, name)
    groups: dict[int, list[str]] = {}
    for name, place in places.items():
        groups.setdefault(id(getattr(place.module, place.name)), []).append(name)
    for names in groups.values():
        first = places[names[0]]
        yield _Slot(
            getattr(first.module, first.name),
            tuple(names),
            tuple(places[name] for name in names),
            names[0] in parameters,
        )


def _unused(model: nn.Module, name: str) -> bool:
    """Whether a class of transformers says that it does without a tensor: DeepSeek-V3's layers of several tokens."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _refuse_sharded(model: nn.Module, slots: Iterable[_Slot], tensors: Mapping[str, Entry | JoinedEntry]) -> None:
    """Raises NotImplementedError for sharded parameters of which a rank could not read its part."""
    by_fsdp: set[int] = set()
    for module in model.modules():
        if hasattr(module, "unshard"):  # an FSDPModule, whose class need not be imported
            by_fsdp.update(id(each) for each in module.modules())
    for slot in slots:
        like, local = slot.tensor, local_of(slot.tensor)
        if local is like:
            continue
        of_fsdp = any(id(place.module) in by_fsdp for place in slot.places)
        in_fp8 = any(name in tensors and tensors[name].scale is not None for name in slot.names)
        if is_traceable_wrapper_subclass(local):
            reason = f"has parts of {type(local).__name__}; load the weights first"
        elif not local.is_meta:
            reason = "has values; build and shard the model on the meta device, or load the weights before sharding"
        elif of_fsdp and in_fp8 and not is_even(like):
            reason = (
                f"its shape {tuple(like.shape)} has uneven parts, which FSDP pads; load the weights before sharding"
            )
        else:
            continue
        raise NotImplementedError(f"load_weights: {slot.names[0]} is sharded, and {reason}")


def _named(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(f'"{name}"' for name in names[:_MOST_NAMES])
    return [f"{kind} key(s) in state_dict: {shown}{', ...' if len(names) > _MOST_NAMES else ''}. "]


def _wrong_shapes(slots: Iterable[_Slot], tensors: Mapping[str, Entry | JoinedEntry]) -> list[str]:
    errors = []
    for slot in slots:
        for name in slot.names:
            value = tensors.get(name)
            if value is None:
                continue
            if value.shape != slot.tensor.shape:
                shape = torch.Size(value.shape)
                errors.append(
                    f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, the shape in "
                    f"current model is {slot.tensor.shape}."
                )
            elif value.scale is not None and not slot.is_parameter:
                errors.append(f"{name} is an FP8 weight in the checkpoint, and a buffer of the model.")
            elif slot.tensor.is_floating_point() and not value.dtype.is_floating_point:
                errors.append(
                    f"{name} is {short_name(value.dtype)} without scales in {value.shards[0].path}, and "
                    f"{short_name(slot.tensor.dtype)} in the model."
                )
    return errors


def _check_ties(slots: Iterable[_Slot], tensors: Mapping[str, Entry | JoinedEntry]) -> None:
    """Raises ValueError where a file holds two tensors for one parameter and they differ."""
    for slot in slots:
        names = [name for name in slot.names if name in tensors]
        for name in names[1:]:
            if not _equal(tensors[names[0]].load(), tensors[name].load()):
                raise ValueError(
                    f"load_weights: {names[0]} and {name} are one parameter of the model, and differ in the "
                    "checkpoint; build the model without the tie (tie_word_embeddings=False)"
                )


def _equal(a: ScaledTensor | Tensor, b: ScaledTensor | Tensor) -> bool:
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return (a.block, a.dtype) == (b.block, b.dtype) and all(map(_equal, (a.data, a.scale), (b.data, b.scale)))
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor) or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.view(torch.uint8) if x.element_size() == 1 else x for x in (a, b)))


def _types(model: nn.Module, slots: Iterable[_Slot], dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """The type of each tensor: float32 where `from_pretrained` of transformers keeps that, whatever the model's is.

    A model that is built in 16 bits has these tensors in 16 bits, too: the correction of DeepSeek-V3's router, say.
    Integers, bools and complex numbers have the model's type, as after `load_state_dict`.
    """
    strict, of_half = (
        {pattern.replace("*", ".*") for module in model.modules() for pattern in _names_in(module, attribute)}
        for attribute in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
    )
    kept = {torch.bfloat16: strict, torch.float16: strict | of_half}
    types = {}
    for slot in slots:
        wanted = slot.tensor.dtype
        if dtype is not None and wanted.is_floating_point:
            wanted = dtype
        patterns = kept.get(wanted, ())
        if any(re.search(pattern, name) for pattern in patterns for name in slot.names):
            wanted = torch.float32
        types[id(slot.tensor)] = wanted
    return types


def _names_in(module: nn.Module, attribute: str) -> Iterable[str]:
    """The names in a list or a set of transformers; another module's attribute of this name may be anything."""
    found = getattr(module, attribute, None)
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, set, tuple)) else ()


def _converted(
    slot: _Slot, value: ScaledTensor | Tensor, device: torch.device | str | None, dtype: torch.dtype,
    activations: Activations,
) -> Tensor:  # fmt: skip
    """The parameter or the buffer of a type that holds a tensor of the checkpoint."""
    old: Any = slot.tensor
    stands_for = dtype if dtype in INPUT_DTYPES else torch.bfloat16
    if is_sharded(old):
        whole = FP8Weight(value, stands_for, activations) if isinstance(value, ScaledTensor) else value
        local = part_of(whole, old).to(device or old.device_mesh.device_type)
        moved: ScaledTensor | Tensor = placed_as(old, local.contiguous())
    else:
        target = torch.device(device) if device is not None else torch.device("cpu") if old.is_meta else old.device
        moved = value if target.type == "cpu" else moved_to(value, target)
    if isinstance(moved, ScaledTensor):
        moved = FP8Weight(moved, stands_for, activations)
    if isinstance(value, ScaledTensor):
        return nn.Parameter(moved, requires_grad=False)
    moved = moved.to(dtype)
    if not slot.is_parameter:
        return moved
    return nn.Parameter(moved, requires_grad=old.requires_grad and moved.is_floating_point())


def _with_progress(names: Sequence[str]) -> Iterable[str]:
    """The names, with a progress bar on a terminal where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return names
    bar: Iterable[str] = tqdm(names, desc="loading", unit="tensor", disable=None)
    return bar
