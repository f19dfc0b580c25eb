"""Collectives of FP8 weights: on the bytes, then on the scales.

The schemas of c10d's ops do not say which tensors they write, so an op without a form raises an error: running it on
dequantized copies would lose what it receives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from fp8fn.meta.untraced import untraced
from fp8fn.ops.layout import WHOLE
from fp8fn.ops.torch_private import collectives
from fp8fn.ops.torch_private.core import no_torch_function, pytree
from fp8fn.weights.form import bytes_of
from fp8fn.weights.fp8_weight import FP8Weight, implements, weight_of
from fp8fn.weights.views import alias, with_row_scales

aten = torch.ops.aten


@untraced
def _dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Runs an op that has `JoinedParameters` among its arguments."""
    if func in (aten.detach.default, aten.alias.default):
        return joined(args[0]._parameters)
    if func in (aten.slice.Tensor, aten.narrow.default):
        return _piece(func, *args)
    if func is collectives.in_place.broadcast_.default:
        return _broadcast(args, kwargs or {})
    raise NotImplementedError(
        f"{func} has no form for FP8Weights that were joined to a vector, as torch.nn.utils.parameters_to_vector "
        "and DistributedDataParallel join parameters; leave the FP8Weights out"
    )


class JoinedParameters(Tensor):
    """Flat parameters one behind the other, as DDP sends them, with no memory of its own: FP8 weights stay FP8.

    DDP joins parameters to a vector, sends the vector, cuts it and copies each piece into a parameter. Here a
    collective runs on each parameter, and a piece is the parameter itself.
    """

    __torch_function__: ClassVar[Any] = no_torch_function
    __torch_dispatch__: Any = classmethod(_dispatch)

    _parameters: Sequence[Tensor]


def joined(tensors: Sequence[Tensor]) -> JoinedParameters:
    size = sum(each.numel() for each in tensors)
    first = tensors[0]
    made = Tensor._make_wrapper_subclass(JoinedParameters, (size,), dtype=first.dtype, device=first.device)
    made._parameters = tuple(tensors)
    return made


def _piece(func: Any, vector: JoinedParameters, axis: int = 0, start: int = 0, end: int = 0, step: int = 1) -> Tensor:
    if func is aten.narrow.default:
        end = start + end
    at = 0
    for each in vector._parameters:
        if (at, at + each.numel()) == (start, end):
            return each.detach()
        at += each.numel()
    raise NotImplementedError(f"elements {start} to {end} of joined parameters are not one parameter")


# These send a tensor of rank 0 to tensors that the other ranks have made by its size and dtype, in 16 or 32 bits.
_TO_PLAIN_TENSORS: Final = {
    collectives.FROM_RANK_0: "set_model_state_dict(broadcast_from_rank0=True)",
    "accelerate.utils.fsdp_utils": "accelerate's cpu_ram_efficient_loading",
}


def _check_receivers() -> None:
    """Raises an error on rank 0 where the other ranks have made plain tensors, and call nothing of fp8fn before."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        sender = _TO_PLAIN_TENSORS.get(frame.f_globals.get("__name__", ""))
        if sender is not None and torch.distributed.get_world_size() > 1:
            raise NotImplementedError(
                f"{sender} of an FP8Weight: the other ranks receive a tensor of 16 or 32 bits; load the whole state "
                "dict on each rank, by set_model_state_dict with StateDictOptions(full_state_dict=True)"
            )
        frame = frame.f_back


def _broadcast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`c10d::broadcast_` of each tensor: the bytes and the scales of a weight."""
    _check_receivers()
    work = None
    for tensor in args[0]:
        for each in tensor._parameters if isinstance(tensor, JoinedParameters) else (tensor,):
            for part in (bytes_of(each._data), bytes_of(each._scale)) if isinstance(each, FP8Weight) else (each,):
                dense = part.contiguous()
                work = torch.ops.c10d.broadcast_.default([dense], *args[1:], **kwargs)[1]
                work.wait()
                if dense is not part:
                    part.copy_(dense)
    return args[0], work


def _in_place(op: Any) -> Callable[..., Any]:
    """A collective that writes into its tensors: it runs on contiguous copies of the bytes, and of the scales."""

    def run(*args: Any, **kwargs: Any) -> Any:
        weights = _weights(op, (args, kwargs))
        for name in ("_data", "_scale"):
            dense = {id(w): bytes_of(getattr(w, name)).contiguous() for w in weights}
            work = _replaced(op, args, kwargs, dense)[-1]
            work.wait()
            for w in weights:
                if dense[id(w)].data_ptr() != getattr(w, name).data_ptr():
                    bytes_of(getattr(w, name)).copy_(dense[id(w)])
        return args[0], work

    return run


def _functional(op: Any) -> Callable[..., Any]:
    """A collective that returns a new tensor."""

    def run(*args: Any, **kwargs: Any) -> FP8Weight:
        weight = _weights(op, (args, kwargs))[0]
        if weight._form.block[0] == WHOLE and not weight._form.shares:
            weight = with_row_scales(weight, 0)  # other ranks have other scales for their rows
            args, kwargs = pytree.tree_map_only(FP8Weight, lambda _: weight, (args, kwargs))
        parts = []
        for part in (weight._data, weight._scale):
            if part is weight._scale and weight._form.block[0] == WHOLE:
                parts.append(part)  # shards of one weight share the scale of a whole axis
                continue
            out = _replaced(op, args, kwargs, {id(weight): bytes_of(part).contiguous()})
            parts.append(collectives.wait(out).view(part.dtype))
        return weight_of(parts[0], parts[1], weight._form._replace(shares=False))

    return run


def _weights(op: Any, arguments: Any) -> list[FP8Weight]:
    """All tensors of a call, which must be weights with whole blocks."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    weights = [each for each in tensors if isinstance(each, FP8Weight) and not each._form.flat]
    if len(weights) != len(tensors):
        raise NotImplementedError(f"{op} of FP8Weights beside other tensors; call it for each")
    return weights


def _replaced(op: Any, args: Any, kwargs: Any, dense: dict[int, Tensor]) -> Any:
    args, kwargs = pytree.tree_map_only(FP8Weight, lambda weight: dense[id(weight)], (args, kwargs))
    return op(*args, **kwargs)


def _waited(weight: FP8Weight, *_: Any) -> FP8Weight:
    """The functional collectives above have waited."""
    return alias(weight)


def _register() -> None:
    c10d = collectives.in_place
    implements(c10d.broadcast_.default)(lambda *args, **kwargs: _broadcast(args, kwargs))
    for op in (c10d.scatter_.default, c10d.allgather_.default):
        implements(op)(_in_place(op))
    for op in (collectives.all_gather.default, collectives.broadcast.default):
        implements(op)(_functional(op))
    implements(collectives.wait.default, collectives.WRAP)(_waited)


if torch.distributed.is_available():
    _register()
