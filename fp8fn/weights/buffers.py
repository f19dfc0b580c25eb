"""Buffers that no checkpoint holds, such as the frequencies of a rotary embedding, for a model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fp8fn.weights.quantize import Place


def rebuilt_buffers(model: nn.Module, device: torch.device | str | None) -> list[tuple[Place, Tensor]]:
    """Values for the non-persistent buffers on the meta device.

    A module is built again from its `config`, as transformers' modules are. Where its constructor takes something else,
    the method `_init_weights` of transformers' models initializes the buffers of a copy.
    """
    found: list[tuple[Place, Tensor]] = []
    left: dict[str, Exception] = {}
    for prefix, module in model.named_modules():
        names = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        ]
        if not names:
            continue
        others = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        try:
            values = _built_again(module, [*names, *others])
        except Exception as unbuilt:
            left |= {f"{prefix}.{name}" if prefix else name: unbuilt for name in (*names, *others)}
        else:
            found += [(Place(module, name), value) for name, value in values.items()]
    initialized = _initialized(model, list(left)) if left else {}
    for name, error in left.items():
        prefix, _, last = name.rpartition(".")
        module = model.get_submodule(prefix)
        if name not in initialized:
            raise NotImplementedError(
                f"load_weights: buffer {name} is on the meta device, and is not saved in checkpoints; build the "
                f"{type(module).__name__} on a real device, or assign the buffer first"
            ) from error
        found.append((Place(module, last), initialized[name]))
    return [(place, value.to(device or "cpu")) for place, value in found]


def _built_again(module: nn.Module, names: list[str]) -> dict[str, Tensor]:
    make: Callable[..., nn.Module] = type(module)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        fresh = make(module.config)
    return {name: getattr(fresh, name) for name in names}


def _initialized(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The named buffers that a copy of the model initializes: two copies agree on these, whatever was in them."""
    names = [name for name in names if _has_buffer(model, name)]
    try:
        first, second = (_initialized_copy(model, names, before) for before in (0, 1))
    except Exception:  # a model that Python can't copy
        return {}
    values = {name: first.get_buffer(name) for name in names}
    return {name: value for name, value in values.items() if torch.equal(value, second.get_buffer(name))}


def _has_buffer(model: nn.Module, name: str) -> bool:
    prefix, _, last = name.rpartition(".")
    return last in model.get_submodule(prefix)._buffers


def _initialized_copy(model: nn.Module, names: list[str], before: int) -> nn.Module:
    """A copy on the meta device but for the buffers, which begin as `before`, and whose modules are initialized."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    for name in names:
        buffer = model.get_buffer(name)
        memo[id(buffer)] = torch.full(buffer.shape, before, dtype=buffer.dtype)
    copied = copy.deepcopy(model, memo)
    modules = dict(copied.named_modules())
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for prefix, module in modules.items():
            owner = _innermost(modules, prefix)
            if owner is not None:
                with suppress(Exception):  # its buffers stay as they are, which their comparison shows
                    owner._init_weights(module)
    return copied


def _innermost(modules: dict[str, nn.Module], prefix: str) -> Any:
    """The innermost of the modules around a name, itself among them, with a method `_init_weights`."""
    parts = prefix.split(".") if prefix else []
    around = (modules[".".join(parts[:count])] for count in range(len(parts), -1, -1))
    return next((module for module in around if callable(getattr(module, "_init_weights", None))), None)
