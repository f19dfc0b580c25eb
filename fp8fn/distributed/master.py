"""`MasterWeight`: a weight in 16 or 32 bits whose shards FSDP2 gathers as FP8 bytes.

Every op sees the master itself, so that optimizers, checkpoints and initialisation work as on a plain tensor. FSDP2
calls `fsdp_pre_all_gather` on a shard, which gives the bytes that `update_scales` has made of it.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8fn.meta.untraced import untraced
from fp8fn.ops.cuda.runtime.graph_capture import capturing
from fp8fn.ops.layout import Block
from fp8fn.ops.torch_private import core
from fp8fn.ops.torch_private.core import no_torch_function, pytree
from fp8fn.ops.torch_private.dtensor import local_part
from fp8fn.weights.form import Form, block_by_dimension, cache_key
from fp8fn.weights.fp8_weight import weight_of

aten = torch.ops.aten


class GatherForm(NamedTuple):
    """How a weight is quantized for the gather: its name, and the format."""

    name: str
    block: Block
    dtype: torch.dtype | None
    scale: str


class Written:
    """When the bytes and scales of an `update_scales` are written on their GPU: streams that read them wait for it.

    FSDP2's streams wait for the caller's stream when a forward begins, but not where the forward before it raised, nor
    for what follows an event that `set_post_optim_event` was given.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._waiting = device, set[int]()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda" and not capturing():
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Has the current stream wait, which no graph captures: none can wait across the begin of a capture."""
        if self._event is None:
            return
        stream = core.stream_handle(self._index)
        if stream not in self._waiting:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._waiting.add(stream)


@dataclass(eq=False)
class ShardBytes:
    """A shard in FP8, which copies of the shard share.

    Args:
        data: The shard as FP8 bytes, padded to the rows of the largest shard.
        dtype: The FP8 type of the bytes.
        scale: The scales of the whole weight.
        written: When the bytes and the scales are there.
        graph_of: The shard that a CUDA graph gathers from here, or writes here: it writes in no other place, and no
            other shard is one of these bytes.
    """

    data: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    written: Written | None = None
    graph_of: Shard | None = None


@dataclass(eq=False)
class Shard:
    """What is known of the memory of a shard, shared by all views of it.

    Args:
        writes: The number of writes. Writes below a wrapper subclass do not move the version of the tensor inside.
        mark: The writes and the inner tensor's version at the time of `update_scales`; None before.
        fp8: The shard in FP8.
        origin: The shard from which this memory was allocated.
        outer: The version of the parameter at the time of `update_scales`: an optimizer's step that Inductor has
            compiled writes the memory, and moves no other version than that.
        ready: What gathers take until the next `update_scales`, made by the first of them.
    """

    writes: int = 0
    mark: tuple[int, int] | None = None
    fp8: ShardBytes | None = None
    origin: Shard | None = None
    outer: int | None = None
    ready: tuple[tuple[Tensor, ...], Gathered] | None = None

    def is_current(self, tensor: Tensor) -> bool:
        """Whether the FP8 bytes are those of the values, which `tensor` holds."""
        fp8 = self.fp8
        if fp8 is None or fp8.scale is None or (fp8.graph_of is not None and fp8.graph_of is not self):
            return False
        return self.mark == (self.writes, version_of(tensor))


class Gathered(NamedTuple):
    """The weight that gathered bytes stand for."""

    size: torch.Size
    scale: Tensor
    block: Block
    dtype: torch.dtype


@untraced
def _dispatch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Runs an op on the master itself; a view or a copy of a master is one too."""
    if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
        # PyTorch gives a view of a normal tensor the version counter of its base, and an inference tensor has none.
        with torch.inference_mode(False):
            return _run(func, args, kwargs or {})
    return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    if written := _written(func):
        _count_writes(written, args, kwargs)
        if func is aten.copy_.default:
            _carry(*args[:2])
        return args[0] if args and isinstance(args[0], MasterWeight) else out
    shard_of = _shard_of(func)
    if shard_of is None:
        return out
    first = next(one for value in (*args, *kwargs.values()) for one in _masters(value))
    return pytree.tree_map_only(Tensor, lambda tensor: MasterWeight(tensor, first._form, shard_of(first, tensor)), out)


def _plain(value: Any) -> Any:
    """An op's argument with the tensors of masters in their place: a tensor, a list of them, or of such lists."""
    if isinstance(value, MasterWeight):
        return value._tensor
    if isinstance(value, (list, tuple)):
        return [_plain(one) if isinstance(one, _HOLDS_MASTERS) else one for one in value]
    return value


def _masters(value: Any) -> list[MasterWeight]:
    """The masters in an op's argument."""
    if isinstance(value, MasterWeight):
        return [value]
    if isinstance(value, (list, tuple)):
        return [master for one in value if isinstance(one, _HOLDS_MASTERS) for master in _masters(one)]
    return []


def version_of(x: Tensor) -> int:
    """The number of PyTorch's own count of writes; tensors of inference mode have none."""
    return 0 if x.is_inference() else x._version


class _PreAllGather:
    """A master's `fsdp_pre_all_gather`: FSDP2 reads its signature at each gather, and a bound method's takes longer.

    It holds the parts of the master, and not the master, which keeps it.
    """

    __slots__ = ("_form", "_shard", "_tensor")
    __signature__: Final = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)

    def __init__(self, master: MasterWeight) -> None:
        self._tensor, self._form, self._shard = master._tensor, master._form, master._shard

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Gathered]:
        """The bytes that FSDP2 gathers, and the weight of `outer_size` that they stand for."""
        shard = self._shard
        if (outer := shard.outer) is not None:
            for parameter in module._parameters.values():
                own = type(parameter) is DTensor and getattr(local_part(parameter), "_shard", None) is shard
                if own and outer != version_of(parameter):
                    shard.writes += 1
        if not shard.is_current(self._tensor):
            what = "has no scales yet" if shard.mark is None else "changed since the last update_scales"
            raise RuntimeError(
                f"{self._form.name} {what}; call fp8fn.distributed.update_scales(model) after each optimizer.step(), "
                "after loading or initialising weights, and before the first forward"
            )
        fp8 = shard.fp8
        assert fp8 is not None
        assert fp8.scale is not None
        assert fp8.written is not None
        if capturing():
            fp8.graph_of = shard
        else:
            fp8.written.wait()
        if shard.ready is None:
            # The bytes are on the host where FSDP offloads: it has moved the shard, of which this is a copy.
            data, scale = (part.to(self._tensor.device, non_blocking=True) for part in (fp8.data, fp8.scale))
            shard.ready = (data,), Gathered(outer_size, scale, self._form.block, fp8.dtype)
        return shard.ready


def _text(master: MasterWeight, *, tensor_contents: Any = None) -> str:
    return f"MasterWeight({master._form.name}, {master._tensor!r})"


class MasterWeight(Tensor):
    """A master weight, or its shard."""

    RUNS_ON_VALUES: Final = True  # `fp8fn.ops.sharded.plain_of`: without FSDP, as under DDP, it is a plain weight

    __torch_function__ = cast(Any, no_torch_function)
    __torch_dispatch__ = cast(Any, classmethod(_dispatch))
    __repr__ = cast(Any, _text)

    if TYPE_CHECKING:
        _tensor: Tensor
        _form: GatherForm
        _shard: Shard

    def __new__(cls, tensor: Tensor, form: GatherForm, shard: Shard | None = None) -> MasterWeight:
        made = Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
            device=tensor.device,
        )  # fmt: skip
        made._tensor, made._form, made._shard = tensor, form, Shard() if shard is None else shard
        return made

    def __tensor_flatten__(self) -> tuple[list[str], GatherForm]:
        return ["_tensor"], self._form

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], form: GatherForm, size: Any, stride: Any) -> MasterWeight:
        return MasterWeight(parts["_tensor"], form)

    def _stable_hash_for_caching(self) -> str:
        return cache_key("MasterWeight", self._form, self._tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """PyTorch's own copies the storage of a tensor whose `data_ptr()` is not 0, and a wrapper's has none."""
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        copied: Tensor = self.detach().clone(memory_format=torch.preserve_format)
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Checkpoints hold plain tensors."""
        return self._tensor.__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """PyTorch's own setter changes the wrapper's type and leaves the values: accelerate widens masters by it."""
        master = value if isinstance(value, MasterWeight) else MasterWeight(value.detach(), self._form)
        Tensor.data.__set__(self, master)  # type: ignore[attr-defined]
        self._tensor, self._shard = master._tensor, master._shard
        self.__dict__.pop("fsdp_pre_all_gather", None)

    def share_memory_(self) -> MasterWeight:
        """PyTorch's own reads the memory of the wrapper, which has none."""
        self._tensor.share_memory_()
        return self

    def data_ptr(self) -> int:
        """Where the values lie: accelerate tells an optimizer's parameters apart by it, and a wrapper's own is 0."""
        return self._tensor.data_ptr()

    @property
    def is_current(self) -> bool:
        """Whether the FP8 bytes are those of the values."""
        return self._shard.is_current(self._tensor)

    def keep(self, data: Tensor, dtype: torch.dtype) -> None:
        """Keeps the FP8 bytes of the values in the place of older ones, which are freed; `settle` follows."""
        self._shard.ready = None
        if (fp8 := self._in_graph()) is not None:
            fp8.data.copy_(data)
        else:
            self._shard.fp8 = ShardBytes(data, dtype)

    def scale_memory(self) -> Tensor | None:
        """Where new scales have to be written; None for anywhere."""
        fp8 = self._in_graph()
        return None if fp8 is None else fp8.scale

    def _in_graph(self) -> ShardBytes | None:
        """The FP8 bytes, if a CUDA graph reads or writes them where they are."""
        fp8 = self._shard.fp8
        if fp8 is None:
            return None
        if fp8.graph_of is None and fp8.scale is not None and capturing():
            fp8.graph_of = self._shard
        return fp8 if fp8.graph_of is self._shard else None

    def settle(self, scale: Tensor, written: Written) -> None:
        """Keeps the scales of the whole weight: the bytes are those of the values now."""
        assert self._shard.fp8 is not None
        self._shard.fp8.scale, self._shard.fp8.written, self._shard.mark = scale, written, self._mark()

    @cached_property
    def fsdp_pre_all_gather(self) -> _PreAllGather:
        """What FSDP2 calls before it gathers, and reads four times for that."""
        return _PreAllGather(self)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Gathered, param_dtype: torch.dtype | None, *, out: Any = None
    ) -> Any:
        """The whole weight as an `FP8Weight` over the gathered bytes; `out` is that of an earlier gather.

        FSDP allocates and frees the memory that it gathers into, of which an earlier weight is a view.
        """
        data = outputs[0]
        if out is not None:
            # `to_local` of a parameter is a view from PyTorch 2.13 on: its attributes are lost.
            weight: Any = local_part(out) if type(out) is DTensor else out
            if weight._data.data_ptr() != data.data_ptr():
                weight._data = _whole(data, metadata)
            weight._scale = metadata.scale
            return None
        block = block_by_dimension(len(metadata.size), metadata.block)
        form = Form(block, param_dtype or self.dtype, gathered=True)
        return weight_of(_whole(data, metadata), metadata.scale, form), ()

    def _mark(self) -> tuple[int, int]:
        return self._shard.writes, version_of(self._tensor)


def _whole(data: Tensor, metadata: Gathered) -> Tensor:
    """The FP8 data of a weight, a view of gathered bytes."""
    count = math.prod(metadata.size)
    if data.numel() != count:  # FSDP's padding
        data = data.reshape(-1)[:count]
    return data.view(metadata.size).view(metadata.dtype)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an op writes. The schemas of c10d's ops do not tell: they write the first one."""
    arguments = func._schema.arguments
    if func.namespace == "c10d":
        return ((0, arguments[0].name),) if func._schema.name.endswith("_") else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _count_writes(written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number, name in written:
        for master in _masters(args[number] if number < len(args) else kwargs.get(name)):
            master._shard.writes += 1


def _carry(master: Any, source: Any) -> None:
    """FSDP pads a shard by a copy into new memory; its FP8 bytes are padded already and stay."""
    if not isinstance(master, MasterWeight) or not isinstance(source, MasterWeight):
        return
    shard, old = master._shard, source._shard
    if shard.origin is not old:
        return
    shard.origin = None
    if old.fp8 is not None and old.fp8.graph_of is old:
        warnings.warn(
            f"{master._form.name} was loaded into new memory, as FSDP pads its shard; a CUDA graph that was captured "
            "before reads and writes the old one: capture the step again",
            stacklevel=2,
        )
    elif master.shape == source.shape and source.is_current:
        shard.fp8, shard.mark, shard.ready = old.fp8, master._mark(), None


def _same(master: MasterWeight, view: Tensor) -> Shard:
    return master._shard


def _new(master: MasterWeight, new: Tensor) -> Shard:
    return Shard(origin=master._shard)


def _copied(master: MasterWeight, copy: Tensor) -> Shard:
    """The copy has memory of its own, and the values of the master, but where its type rounds them."""
    if not master.is_current or torch.promote_types(master.dtype, copy.dtype) != copy.dtype:
        return Shard()
    return Shard(mark=(0, 0), fp8=master._shard.fp8)


_HOLDS_MASTERS: Final = (MasterWeight, list, tuple)

# The ops beside views whose results are masters too; any other op's result is a plain tensor.
_KEPT: Final[dict[Any, Callable[[MasterWeight, Tensor], Shard]]] = {
    **dict.fromkeys((aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default), _new),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten._pin_memory.default), _copied),
}


@cache
def _shard_of(func: Any) -> Callable[[MasterWeight, Tensor], Shard] | None:
    """A function from the master and a result of an op to what is known of its memory; None where it is no master."""
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return _same if is_view else _KEPT.get(func)
