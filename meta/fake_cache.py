"""A cache of fake results, keyed by the sizes, strides and types of an op's inputs.

Tracing and Inductor run an op on the same fake tensors about six times, and each layer of a model repeats the previous
one. PyTorch caches fake results of its own ops only; without this cache, fp8fn's ops would dominate compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.torch_private.core import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


class Geometry(NamedTuple):
    """The layout of one result, which is new memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Known: TypeAlias = dict[Hashable, tuple[bool, tuple[Geometry, ...]]]

# More than the number of differently sized layers in any model. Beyond this limit nothing is cached.
_MOST: Final = 4096


def rule() -> Callable[..., Any]:
    """Returns the function that `FakeTensorMode` calls for one op; each op has its own cache."""
    known: Known = {}

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        key = _key(mode, args, kwargs or {})
        found = None if key is None else known.get(key)
        if found is not None:
            single, geometries = found
            made = tuple(_empty(mode, geometry) for geometry in geometries)
            return made[0] if single else made
        results: Any = mode.__torch_dispatch__(func, types, args, kwargs or {})
        if key is not None and len(known) < _MOST:
            single = isinstance(results, Tensor)
            outs = (results,) if single else results
            known[key] = single, tuple(Geometry(out.shape, out.stride(), out.dtype, out.device) for out in outs)
        return results

    return dispatch


def _key(mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Everything that the results depend on; None if a size is symbolic or a tensor belongs to another mode."""
    if mode.propagate_real_tensors:
        return None
    key: list[Hashable] = [*kwargs]
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            if type(arg) is not FakeTensor or arg.fake_mode is not mode or arg._has_symbolic_sizes_strides:
                return None
            key += arg.shape, arg.stride(), arg.dtype, arg.fake_device
        elif isinstance(arg, list | tuple):
            key.append(tuple(arg))
        else:
            key.append(arg)
    try:
        hash(found := tuple(key))
    except TypeError:  # a symbolic number is not hashable
        return None
    return found


def _empty(mode: FakeTensorMode, geometry: Geometry) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        elem = torch.empty_strided(geometry.shape, geometry.strides, dtype=geometry.dtype, device="meta")
    return FakeTensor(mode, elem, geometry.device)
