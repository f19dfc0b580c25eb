"""Buffers that no checkpoint holds, such as the frequencies of a rotary embedding, for a model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8fn.weights.quantize import Place


def rebuilt_buffers(model: nn.Module, device: torch.device | str | None) -> list[tuple[Place, Tensor]]:
    """Values for the non-persistent buffers on the meta device.

    A module is built again from its `config`, as transformers' modules are. Where its constructor takes something else,
    the model around it initializes the buffers of a copy, by the method `_init_weights` of transformers' models.
    """
    found: list[tuple[Place, Tensor]] = []
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
        except Exception as error:
            initialized = None if others else _initialized(model, prefix, names)
            if initialized is None:
                raise NotImplementedError(
                    f"load_weights: buffer {f'{prefix}.{names[0]}' if prefix else names[0]} is on the meta device, and "
                    f"is not saved in checkpoints; build the {type(module).__name__} on a real device, or assign the "
                    "buffer first"
                ) from error
            values = initialized
        found += [(Place(module, name), value.to(device or "cpu")) for name, value in values.items()]
    return found


def _built_again(module: nn.Module, names: list[str]) -> dict[str, Tensor]:
    make: Callable[..., nn.Module] = type(module)
    with torch.device("cpu"):
        fresh = make(module.config)
    return {name: getattr(fresh, name) for name in names}


def _initialized(model: nn.Module, prefix: str, names: list[str]) -> dict[str, Tensor] | None:
    """The buffers of a module as the innermost model around it initializes them; None if it leaves one of them alone.

    A buffer that is initialized has the same values whatever was in it before.
    """
    owner = _innermost(model, prefix)
    if owner is None:
        return None
    made = []
    for before in (0, 1):
        fresh = copy.deepcopy(model.get_submodule(prefix)).to("meta")
        for name in names:
            fresh._buffers[name] = torch.full_like(fresh._buffers[name], before, device="cpu")  # type: ignore[arg-type]
        try:
            with torch.no_grad(), torch.device("cpu"):
                owner._init_weights(fresh)
        except Exception:
            return None
        made.append({name: getattr(fresh, name) for name in names})
    return made[0] if all(torch.equal(made[0][name], made[1][name]) for name in names) else None


def _innermost(model: nn.Module, prefix: str) -> Any:
    """The innermost module from `model` to `prefix` with a method `_init_weights`."""
    parts = prefix.split(".") if prefix else []
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    return next((module for module in around if callable(getattr(module, "_init_weights", None))), None)
