"""FSDP2 with FP8 on the wire: `gather_fp8` before `fully_shard`, `update_scales` after each optimizer step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8fn.arguments import checked
from fp8fn.distributed.master import GatherForm, MasterWeight, Written, version_of
from fp8fn.meta.call_site import CallSite
from fp8fn.ops.cuda.runtime.call_cache import Geometry, geometry
from fp8fn.ops.layout import WHOLE, is_square, matrix_strides, scale_dtype, scale_shape
from fp8fn.ops.recipe import BLOCKWISE, Recipe, parse_recipe, recipe_key
from fp8fn.ops.sharded import local_of
from fp8fn.ops.torch_private.core import copy_each
from fp8fn.ops.torch_private.dtensor import is_managed_by_fsdp, set_local_part
from fp8fn.site import Where, check_where
from fp8fn.weights.form import block_by_dimension, bytes_of
from fp8fn.weights.fp8_weight import is_gathered
from fp8fn.weights.parts import placed_as
from fp8fn.weights.quantize import (
    QuantizedWeights,
    check_module,
    choose,
    why_not_by_shape,
)

# The forms of the parameters that `gather_fp8` has wrapped, by the module that holds them and by name.
_WRAPPED: WeakKeyDictionary[nn.Module, dict[str, GatherForm]] = WeakKeyDictionary()
# Where the shards of parameters lie, from the step before, by module and by name: PyTorch converts no parameter to
# which a weak reference leads.
_PLACED: Final[WeakKeyDictionary[nn.Module, dict[str, _Placed]]] = WeakKeyDictionary()


def _where(op: str, name: str, value: object) -> None:
    check_where(value)


def _recipe(op: str, name: str, value: Any) -> None:
    block = parse_recipe(recipe_key(value)).weight_block
    if not is_square(block):
        raise ValueError(
            f"{op}: {name} has weight_block={block}, whose data for the forward and for the backward differ, and one "
            "gather serves both; use a recipe with a square weight_block, BLOCKWISE or TENSORWISE for one"
        )


@checked(model=check_module, where=_where, recipe=_recipe)
def gather_fp8(model: nn.Module, where: Where = None, recipe: Recipe | str = BLOCKWISE) -> QuantizedWeights:
    """Makes FSDP2 gather a model's weights as FP8: call it before `fully_shard`, and `update_scales` after each step.

    Weights are matrices, and batches of them (experts). The masters keep their type; optimizers and checkpoints see
    plain values. One byte for each element is gathered, and the gathered weight is an `FP8Weight`, with the bits of
    `quantize(whole_weight, recipe.weight_block)` for any number of rows on a rank. Products by the recipe (`fp8fn.fp8`,
    `linear`, `grouped_gemm`, the backend) take its data as it is. PyTorch's own products multiply unquantized
    activations by it. Gradients reach the masters in either case.

    Args:
        model: Module whose parameters are not sharded by FSDP yet, on any device, `meta` included.
        where: Names of the weights: a glob, a list of globs, or a function of a `fp8fn.Site`; as in `quantize_weights`.
        recipe: `Recipe` or its name, with a square `weight_block`; block, type and scales of weights are those of the
            products' recipe.

    Returns:
        A `QuantizedWeights`: the names of the weights that will be gathered in FP8, and the reason for each other one.

    Raises:
        TypeError: `model` is no module, or `where` or `recipe` has a wrong type.
        ValueError: The recipe's weight block is not square, `where` matches no weight, or FSDP has sharded a weight.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        >>> fp8fn.distributed.gather_fp8(model).quantized
        ('0.weight', '2.weight')
    """
    _recipe("gather_fp8", "recipe", recipe)
    parsed = parse_recipe(recipe_key(recipe))
    places, chosen, kept = choose("gather_fp8", model, where, _why_not)
    for names in chosen.values():
        if any(is_managed_by_fsdp(places[name].module) for name in names):
            raise ValueError(
                f"gather_fp8: FSDP has sharded {names[0]} already; call gather_fp8 before fully_shard, or leave the "
                "weight out by where="
            )
    for weight, names in chosen.items():
        form = GatherForm(names[0], parsed.weight_block, parsed.weight_dtype, parsed.scale)
        parameter = _wrapped(weight, form)
        for name in names:
            place = places[name]
            setattr(place.module, place.name, parameter)
            if place.module not in _WRAPPED:
                place.module.register_load_state_dict_pre_hook(_wrap_assigned)
                place.module.register_state_dict_post_hook(_show_plain)
            _WRAPPED.setdefault(place.module, {})[place.name] = form
    return QuantizedWeights(tuple(name for name in places if any(name in names for names in chosen.values())), kept)


def _why_not(name: str, weight: Tensor, module: nn.Module, where: Where) -> str | None:
    local = local_of(weight)
    if isinstance(local, MasterWeight):
        return "it is gathered in FP8 already"
    if type(local) not in (Tensor, nn.Parameter):
        return f"it is of the tensor subclass {type(local).__name__}"
    return why_not_by_shape(name, weight, module, where)


def _wrapped(weight: Tensor, form: GatherForm) -> nn.Parameter:
    master: Tensor = MasterWeight(local_of(weight).detach(), form)
    if isinstance(weight, DTensor):  # of tensor parallelism
        master = placed_as(weight, master)
    return nn.Parameter(master, requires_grad=weight.requires_grad)


def _show_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """After `state_dict`: plain tensors over the masters' memory, which checkpoints copy to the host."""
    for name, parameter in module._parameters.items():
        master, shown = local_of(parameter), state.get(prefix + name)
        if not isinstance(master, MasterWeight) or shown is None or shown is parameter:  # the last by `keep_vars=True`
            continue
        plain = master._tensor.detach()
        if isinstance(shown, DTensor):  # a view of the parameter: a write of it moves the parameter's version
            set_local_part(shown, plain)
        else:
            state[prefix + name] = plain


def _wrap_assigned(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object) -> None:
    """Before `load_state_dict(assign=True)` puts plain tensors in the place of masters: makes masters of them."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        old, new = local_of(parameter), state.get(prefix + name)
        if isinstance(old, MasterWeight) and type(local_of(new)) in (Tensor, nn.Parameter):
            state[prefix + name] = _wrapped(cast(Tensor, new), old._form)


@checked(model=check_module)
@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """Quantizes the shards of all weights that `gather_fp8` has chosen: call it on all ranks after `optimizer.step()`.

    Each rank quantizes its shards once. One MAX all-reduce for each process group, of 4 bytes for each block of the
    model, tells all ranks the scales of the whole weights; before it, where a block lies on several ranks, each of them
    finds the largest magnitude of its part. A weight that was written since raises an error at its next gather, on each
    rank that has written it.

    Args:
        model: Module on which `fully_shard` was called, or its root; of a part, the part's weights are quantized.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: A rank's weight was replaced since `gather_fp8`, by another parameter of its module; or `model` is
            a part, and FSDP holds its weights gathered.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
        >>> fp8fn.distributed.gather_fp8(model).kept
        {}
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)  # after `fully_shard(model)`
        >>> hook = optimizer.register_step_post_hook(lambda *_: fp8fn.distributed.update_scales(model))
    """
    groups: dict[dist.ProcessGroup, list[_Placed]] = {}
    for weight in _sharded(model):
        groups.setdefault(weight.group, []).append(weight)
    if (why := _why_nothing_is_gathered(model)) is not None:
        warnings.warn(f"update_scales: {why}", stacklevel=4)  # `checked` and `no_grad` are between
    for group, weights in groups.items():
        counts = [weight.blocks for weight in weights]
        # The last one is the number of a weight that some rank has lost: all raise, for the others would wait for it.
        lost = max((number for number, weight in enumerate(weights, 1) if weight.replaced), default=0)
        bits = torch.zeros(sum(counts) + 1, dtype=torch.int32, device=weights[0].device)
        bits[-1:].fill_(lost)
        whole = bits[:-1].view(torch.float32)
        found = [pair for weight, part in zip(weights, whole.split(counts), strict=True) for pair in weight.found(part)]
        if found:
            copy_each([place for place, _ in found], [own for _, own in found])
        # As integers, which order as the magnitudes do, a NaN last; a maximum of floats may lose it. A NaN has no sign.
        bits &= 0x7FFFFFFF
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        if any(weight.replaced or not weight.has_scales for weight in weights) and (number := int(bits[-1])):
            raise RuntimeError(
                f"update_scales: {weights[number - 1].form.name} was replaced since gather_fp8 on this rank or "
                "another, by another parameter; write into the weights that are there, or load by model.load_state_dict"
            )
        scales = {form: _scales(whole, *form).split(counts) for form in {w.scaling for w in weights if w.by_amax}}
        copies: list[tuple[Tensor, Tensor]] = []
        for place, (weight, part) in enumerate(zip(weights, whole.split(counts), strict=True)):
            if weight.by_amax:
                weight.quantize(part)
                part = scales[weight.scaling][place]
            copies.append((weight.new_scale(part.dtype), bytes_of(part.view(weight.grid))))
        copy_each([bytes_of(scale) for scale, _ in copies], [part for _, part in copies])
        written = Written(weights[0].device)
        for weight, (scale, _) in zip(weights, copies, strict=True):
            weight.master.settle(scale, written)


def _scales(largest: Tensor, dtype: torch.dtype | None, scale: str) -> Tensor:
    """The scales of blocks by their largest magnitudes."""
    _, scales = torch.ops.fp8fn.quantize(largest.view(-1, 1), (1, WHOLE), dtype, scale)
    return cast(Tensor, scales).view(-1)


class _Placed:
    """A shard on the device of its mesh, and its place in the weight that FSDP has sharded: a matrix, or experts'.

    `replaced`: the parameter holds a plain tensor in the place of the master. `by_amax`: a block may lie on several
    ranks, so that its scale comes of the largest magnitude of all; the same on each rank.
    """

    def __init__(self, parameter: DTensor, master: MasterWeight, *, replaced: bool = False) -> None:
        form, mesh = master._form, parameter.device_mesh
        self.form, self.device, self.replaced = form, torch.device(mesh.device_type), replaced
        self._master, self._held = ref(master), master if replaced else None
        (size, shards, dim, self.group, rank) = _shard_of(parameter, form)
        step = -(-size[dim] // shards)
        edge = block_by_dimension(len(size), form.block)[dim]
        self.by_amax = (shards > 1 and (edge == WHOLE or step % edge != 0)) or scale_dtype(form.scale) != torch.float32
        self.start = [0] * len(size)
        self.start[dim] = min(rank * step, size[dim])
        self.padded = size.copy()
        self.padded[dim] = step
        self.grid = scale_shape(size, form.block)
        self.blocks = math.prod(self.grid)
        self.pieces = list(self._pieces(master.shape))
        self.geometry: Geometry = geometry(master._tensor)
        self._quantize = CallSite(
            lambda x: torch.ops.fp8fn.quantize(x, form.block, form.dtype, form.scale, None, False)
        )

    @property
    def master(self) -> MasterWeight:
        """The shard, which is held by its parameter, and dies with it."""
        master = self._master()
        assert master is not None
        return master

    def is_of(self, master: MasterWeight) -> bool:
        """Whether this is where `master` lies still."""
        return self._master() is master and self.geometry == geometry(master._tensor)

    @property
    def values(self) -> Tensor:
        return self.master._tensor.to(self.device)

    @property
    def has_scales(self) -> bool:
        """Whether this shard was quantized before, however old that is."""
        return self.master._shard.mark is not None

    @property
    def scaling(self) -> tuple[torch.dtype | None, str]:
        """What decides a block's scale beside its largest magnitude."""
        return self.form.dtype, self.form.scale

    def found(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What this rank knows of its blocks, with the places for it among those of the whole weight.

        With `by_amax` these are the largest magnitudes. Otherwise they are the scales, and the bytes are kept.
        """
        x, whole = self.values, whole.view(self.grid)
        if self.by_amax:
            for piece, blocks in self.pieces:
                yield whole[blocks], torch.ops.fp8fn.amax(x[piece], self.form.block)
            return
        parts = []
        for piece, blocks in self.pieces:  # one, or none
            data, scale = cast(tuple[Tensor, Tensor], self._quantize(x))
            parts.append((piece, data))
            yield whole[blocks], scale
        self._keep(parts)

    def quantize(self, largest: Tensor) -> None:
        """Keeps the shard's bytes by the largest magnitudes of the whole weight."""
        x, form, largest = self.values, self.form, largest.view(self.grid)
        parts = []
        for piece, blocks in self.pieces:
            data, _ = torch.ops.fp8fn.quantize(x[piece], form.block, form.dtype, form.scale, largest[blocks], False)
            parts.append((piece, data))
        self._keep(parts)

    def new_scale(self, dtype: torch.dtype) -> Tensor:
        """Memory for the scales of the whole weight."""
        if (kept := self.master.scale_memory()) is not None:
            return kept
        strides = matrix_strides(self.grid, False, 16 // dtype.itemsize)
        return torch.empty_strided(self.grid, strides, dtype=dtype, device=self.device)

    def _keep(self, parts: list[tuple[tuple[slice, ...], Tensor]]) -> None:
        """Keeps the quantized parts of the shard as its bytes, with FSDP's padding."""
        dtype = parts[0][1].dtype if parts else self._dtype
        if len(parts) == 1 and list(parts[0][1].shape) == self.padded and parts[0][1].is_contiguous():
            whole = bytes_of(parts[0][1])
        else:
            whole = torch.zeros(self.padded, dtype=torch.uint8, device=self.device)
            for piece, data in parts:
                whole[piece] = bytes_of(data)
        self.master.keep(whole.to(self.master._tensor.device), dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The FP8 type of the bytes, where this rank has none."""
        one = torch.ones(1, 1, device=self.device)
        data, _ = torch.ops.fp8fn.quantize(one, (1, WHOLE), self.form.dtype)
        return cast(Tensor, data).dtype

    def _pieces(self, shape: torch.Size) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Parts of the shard whose blocks begin at their first element, and these blocks in the whole weight."""
        blocks = block_by_dimension(len(shape), self.form.block)
        cuts = (_cuts(size, start, block) for size, start, block in zip(shape, self.start, blocks, strict=True))
        for parts in product(*cuts):
            elements, of_blocks = zip(*parts, strict=True)
            yield elements, of_blocks


def _cuts(size: int, start: int, block: int) -> list[tuple[slice, slice]]:
    """The elements up to the first border of a block, and those behind it, each with their blocks."""
    if size == 0:
        return []
    if block == WHOLE:
        return [(slice(0, size), slice(0, 1))]
    head = min(size, -start % block)
    found = [(slice(0, head), slice(start // block, start // block + 1))] if head else []
    if head < size:
        first = (start + head) // block
        found.append((slice(head, size), slice(first, first - (head - size) // block)))
    return found


def _shard_of(parameter: DTensor, form: GatherForm) -> tuple[list[int], int, int, dist.ProcessGroup, int]:
    """The shape that FSDP shards, the number of shards, the dimension that is cut, and the group and rank."""
    mesh, size = parameter.device_mesh, list(parameter.shape)
    cuts: list[tuple[int, Any]] = [
        (axis, placement) for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()
    ]
    if not cuts:
        return size, 1, 0, mesh.get_group(0), 0
    (axis, cut), *inner = cuts  # FSDP's dimensions come first: replicas, then shards; then those of tensor parallelism
    for other, placement in inner:
        whole, edge = size[placement.dim], block_by_dimension(len(size), form.block)[placement.dim]
        step = -(-whole // mesh.size(other))
        if step < whole and (edge == WHOLE or step % edge):
            raise ValueError(
                f"update_scales: {form.name} {tuple(parameter.shape)} is cut by tensor parallelism along dimension "
                f"{placement.dim}, {step} to a rank, within a block of {form.block}; cut it at whole blocks, or leave "
                "it out by gather_fp8(where=)"
            )
        size[placement.dim] = max(0, min(step, size[placement.dim] - mesh.get_local_rank(other) * step))
    return size, mesh.size(axis), cut.dim, mesh.get_group(axis), mesh.get_local_rank(axis)


def _placed(module: nn.Module, name: str, parameter: DTensor, master: MasterWeight) -> _Placed:
    known = _PLACED.setdefault(module, {})
    found = known.get(name)
    if found is None or not found.is_of(master):
        found = known[name] = _Placed(parameter, master)
    master._shard.outer = version_of(parameter)
    return found


def _is_chosen(module: nn.Module) -> bool:
    """Whether weights of the module itself are gathered in FP8 under FSDP; copies of a model are not in `_WRAPPED`."""
    return module in _WRAPPED or any(isinstance(local_of(each), MasterWeight) for each in module._parameters.values())


def _why_nothing_is_gathered(model: nn.Module) -> str | None:
    """Why FSDP gathers no weight of the model in FP8; None if it does, or if DDP or `replicate` has a part of it."""
    chosen = [module for module in model.modules() if _is_chosen(module)]
    if not chosen:
        return (
            f"gather_fp8 has chosen no weight of this {type(model).__name__}, and FSDP gathers them unquantized; call "
            "gather_fp8(model) before fully_shard"
        )
    others = (FSDPModule, DistributedDataParallel)  # `replicate` of FSDP2 makes FSDP's modules, of whole weights
    if any(map(is_managed_by_fsdp, chosen)) or any(isinstance(module, others) for module in model.modules()):
        return None
    return (
        f"FSDP has sharded no weight of this {type(model).__name__} that gather_fp8 has chosen, and gathers none so; "
        "call fully_shard(model) between gather_fp8 and update_scales, or leave both out where FSDP is not used"
    )


def _sharded(model: nn.Module) -> Iterator[_Placed]:
    """The shards of all weights, once each. FSDP gives back what it still holds gathered.

    That is, for example, a root's own weights after a forward without a backward.
    """
    modules = [(module, _WRAPPED.get(module, {})) for module in model.modules()]
    # Copies of a model are not in `_WRAPPED`, and a gathered weight that tensor parallelism cuts is a DTensor.
    held = any(is_gathered(local_of(each)) for module, _ in modules for each in module._parameters.values())
    plain = any(not isinstance(module._parameters.get(name), DTensor) for module, forms in modules for name in forms)
    if held or plain:
        for module, _ in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, weight in model.named_parameters():
            if is_gathered(local_of(weight)):  # the next forward would multiply by the bytes of before
                raise RuntimeError(
                    f"update_scales: FSDP holds {name} gathered, by a module that is not within this "
                    f"{type(model).__name__}; call update_scales with the model on which fully_shard was called"
                )
    seen: set[int] = set()
    for module, forms in modules:
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or id(parameter) in seen:
                continue
            local = local_of(parameter)
            if isinstance(local, MasterWeight):
                seen.add(id(parameter))
                yield _placed(module, name, parameter, local)
            elif name in forms:
                seen.add(id(parameter))
                yield _Placed(parameter, MasterWeight(local, forms[name]), replaced=True)
