"""PyTorch's tensor-parallel styles with FP8 on the wire wherever a sequence is gathered, forward and backward.

A gathered tensor holds what FP8 holds, in the type that it had. Rows of powers of two as scales make that exact for the
products: quantized again by the same recipe, in any of its blocks, such values keep their bits, but for those that
become subnormal beside larger ones. Sums, which a reduce-scatter computes, stay in the type that they have. The
gradient of a bias behind a row-parallel product sums what was gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8fn.distributed.exponents import exponents_of, saturated, scale_of
from fp8fn.meta.levels import apply
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.recipe import BLOCKWISE_POW2, Recipe, parse_recipe, recipe_key
from fp8fn.ops.torch_private.dtensor import parallel as torch_parallel
from fp8fn.quantization import dequantize
from fp8fn.scaled_tensor import ScaledTensor

Placements: TypeAlias = tuple[Placement, ...]

_ROWS: Final = (1, 128)
_ALIGNMENT: Final = 16  # of what is sent: bytes of a row


def _checked(name: str, recipe: Recipe | str) -> Recipe:
    found = parse_recipe(recipe_key(recipe))
    if found.scale != "pow2" or found.activation_block != _ROWS or found.gradient_block != _ROWS:
        raise ValueError(
            f"{name}: recipe={recipe!r} has scale={found.scale!r} and blocks {found.activation_block} and "
            f"{found.gradient_block} of activations and gradients; what is gathered keeps its bits with scale='pow2' "
            "and (1, 128) alone: use BLOCKWISE_POW2, for the model's products too"
        )
    return found


def _is_sequence(placements: Placements, ndim: int) -> bool:
    """Whether a tensor is sharded along another dimension than the last one, on a mesh of one dimension."""
    (first, *others) = placements
    return not others and isinstance(first, Shard) and first.dim % ndim != ndim - 1


def _gathered(x: DTensor, dtype: torch.dtype | None) -> DTensor:
    """All of `x` on each rank, after a byte for each element and one for each 128 of them are sent, in one gather."""
    data, scale = (part.to_local() for part in torch.ops.fp8fn.quantize(x, _ROWS, dtype, "pow2"))
    columns, blocks = data.shape[-1], scale.shape[-1]
    packed = torch.cat([data.view(torch.uint8), exponents_of(scale)], -1)
    free = -packed.shape[-1] % _ALIGNMENT
    sent = F.pad(packed, (0, free)) if free else packed  # a copy otherwise too
    shape = (*x.shape[:-1], sent.shape[-1])
    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(sent, x.device_mesh, x.placements, shape=torch.Size(shape), stride=stride)
    whole: Tensor = placed.redistribute(placements=[Replicate()]).to_local()
    scales = scale_of(whole[..., columns : columns + blocks])
    rows = ScaledTensor(whole[..., :columns].view(data.dtype), scales, _ROWS)
    local = saturated(dequantize(rows, x.dtype)).contiguous()
    return DTensor.from_local(local, x.device_mesh, [Replicate()], run_check=False)


class _Gather(torch.autograd.Function):
    """Gathers activations as FP8; their gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dtype: torch.dtype | None) -> DTensor:
        ctx.placements = x.placements
        return _gathered(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


class _Scatter(torch.autograd.Function):
    """Sums and scatters what ranks hold parts of; the gradient is gathered as FP8."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Placements, dtype: torch.dtype | None) -> DTensor:
        ctx.placements, ctx.dtype = placements, dtype
        return x.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[DTensor, None, None]:
        return _gathered(grad.redistribute(placements=ctx.placements), ctx.dtype), None, None


def _input(
    x: Any, mesh: DeviceMesh, given: tuple[Placement, ...], wanted: tuple[Placement, ...], recipe: Recipe
) -> Any:
    """The input of a module as it is wanted: gathered as FP8 if it is a sequence of a type that FP8 stands for."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, given, run_check=False)
    if wanted == (Replicate(),) and x.dtype in INPUT_DTYPES and _is_sequence(x.placements, x.ndim):
        gathered: DTensor = apply(_Gather, x, recipe.activation_dtype)
        return gathered
    return x if x.placements == wanted else x.redistribute(placements=wanted)


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """PyTorch's `ColwiseParallel`, whose input is gathered as FP8 if it is sharded along the sequence.

    Args:
        input_layouts: As PyTorch's.
        output_layouts: As PyTorch's.
        use_local_output: As PyTorch's.
        recipe: Recipe of the model's products, with powers of two as scales.

    Raises:
        ValueError: The recipe's values would not keep their bits.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> fp8fn.distributed.ColwiseParallel(input_layouts=Shard(1)).desired_input_layouts
        (Replicate(),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        recipe: Recipe | str = BLOCKWISE_POW2,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.recipe = _checked("ColwiseParallel", recipe)

    def _prepare_input_fn(self, given: Any, wanted: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return _input(inputs[0], mesh, given, wanted, self.recipe)


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """PyTorch's `RowwiseParallel`: the gradient of an output sharded along the sequence is gathered as FP8.

    Args:
        input_layouts: As PyTorch's.
        output_layouts: As PyTorch's.
        use_local_output: As PyTorch's.
        recipe: Recipe of the model's products, with powers of two as scales.

    Raises:
        ValueError: The recipe's values would not keep their bits.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> fp8fn.distributed.RowwiseParallel(output_layouts=Shard(1)).output_layouts
        (Shard(dim=1),)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        recipe: Recipe | str = BLOCKWISE_POW2,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.recipe = _checked("RowwiseParallel", recipe)

    def _prepare_output_fn(self, wanted: Any, local: bool, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        is_partial = outputs.placements == (Partial(),)
        if is_partial and outputs.dtype in INPUT_DTYPES and _is_sequence(wanted, outputs.ndim):
            outputs = apply(_Scatter, outputs, wanted, self.recipe.gradient_dtype)
        elif outputs.placements != wanted:
            outputs = outputs.redistribute(placements=wanted)
        return outputs.to_local() if local else outputs


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """PyTorch's `PrepareModuleInput`, which gathers activations as FP8: once for all products that read them.

    That is the first tensor that `forward` takes, if it is as wide as one that a linear layer or a matrix of the module
    multiplies. Others, such as masks with -Inf and rotary embeddings, are gathered as PyTorch does, in their own type.

    Args:
        recipe: Recipe of the model's products, with powers of two as scales.
        quantized_inputs: Positions and keywords of the inputs that are gathered as FP8, in the place of that first one.
        layouts: The arguments of PyTorch's class.

    Raises:
        ValueError: The recipe's values would not keep their bits, or one of `quantized_inputs` has no layout.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> style = fp8fn.distributed.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        >>> style.desired_input_layouts
        (Replicate(),)
    """

    def __init__(
        self,
        *,
        recipe: Recipe | str = BLOCKWISE_POW2,
        quantized_inputs: Sequence[int | str] | None = None,
        **layouts: Any,
    ) -> None:
        super().__init__(**layouts)
        self.recipe = _checked("PrepareModuleInput", recipe)
        known = [*range(len(self.input_layouts or ())), *self.input_kwarg_layouts]
        if isinstance(quantized_inputs, int | str):
            quantized_inputs = (quantized_inputs,)
        if any(each not in known for each in quantized_inputs or ()):
            raise ValueError(
                f"PrepareModuleInput: quantized_inputs={quantized_inputs!r} has an input without a layout; those with "
                f"one are {known}"
            )
        self.quantized_inputs = quantized_inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        widths, names = _widths(module), list(inspect.signature(module.forward).parameters)

        def gather(_: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
            all_inputs = _by_place(inputs, by_name)
            chosen = self.quantized_inputs
            if chosen is None:  # a mask may be as wide, with as many tokens as a layer has columns
                places = [*range(len(inputs)), *(name for name in names if name in by_name)]
                tensors = [place for place in places if isinstance(all_inputs[place], Tensor)]
                chosen = [place for place in tensors[:1] if _is_as_wide(all_inputs[place], widths)]
            self._gather(all_inputs, chosen, device_mesh)
            return tuple(all_inputs[i] for i in range(len(inputs))), {name: all_inputs[name] for name in by_name}

        module.register_forward_pre_hook(gather, with_kwargs=True)  # before PyTorch's hook, which does the rest
        return super()._apply(module, device_mesh)

    def _gather(self, inputs: dict[int | str, Any], chosen: Sequence[int | str], mesh: DeviceMesh) -> None:
        """Replaces those of the chosen inputs that are to be gathered."""
        given = _by_place(self.input_layouts, self.input_kwarg_layouts)
        wanted = _by_place(self.desired_input_layouts, self.desired_input_kwarg_layouts)
        for place in chosen:
            x, layout = inputs.get(place), given.get(place)
            if isinstance(x, Tensor) and layout is not None and wanted.get(place) == Replicate():
                inputs[place] = _input(x, mesh, (layout,), (Replicate(),), self.recipe)

    def _prepare_input_arg(self, input: Any, mesh: DeviceMesh, given: Any, wanted: Any) -> Any:
        if isinstance(input, DTensor) and input.placements == (wanted,):  # PyTorch would sum its gradient
            return input.to_local() if self.use_local_output else input
        return super()._prepare_input_arg(input, mesh, given, wanted)


def _by_place(positional: Sequence[Any] | None, by_name: Mapping[str, Any]) -> dict[int | str, Any]:
    found: dict[int | str, Any] = dict(enumerate(positional or ()))
    found.update(by_name)
    return found


def _is_as_wide(x: Tensor, widths: frozenset[int]) -> bool:
    return x.dtype in INPUT_DTYPES and x.ndim > 1 and x.shape[-1] in widths


def _widths(module: nn.Module) -> frozenset[int]:
    """How wide activations are that the weights of a module multiply: matrices lie either way where no layer says."""
    found: set[int] = set()
    for part in module.modules():
        if isinstance(width := getattr(part, "in_features", None), int):
            found.add(width)
            continue
        for weight in part.parameters(recurse=False):
            found.update(weight.shape[-2:] if weight.ndim > 1 else ())
    return frozenset(found)
