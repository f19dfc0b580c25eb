"""Tells DTensor the rules of `sharding.py`.

 `torch.library.register_sharding` is not used: the key of its cache
leaves out lists, so that a rule for one block would answer for another.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fp8fn.meta import sharding
from fp8fn.meta.sharding import Cut, Refusal, Rule
from fp8fn.ops.torch_private.dtensor import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    generate_redistribute_costs,
    register_op_strategy,
)

_LOG: Final = logging.getLogger("fp8fn")


def register(name: str, rule: sharding.Sharding) -> None:
    """Registers the rule of one op with DTensor."""
    if isinstance(rule, sharding.Composed):
        return
    op = getattr(torch.ops.fp8fn, name).default
    strategy = partial(_refuse, rule) if isinstance(rule, Refusal) else partial(_strategy, rule)
    # All arguments behind the first tensor are part of the cache's key.
    register_op_strategy(op, strategy, RuntimeSchemaInfo(1, needs_pytree=True))


def _refuse(refusal: Refusal, schema: OpSchema) -> OpStrategy:
    raise NotImplementedError(f"{schema.op._schema.name}: no argument may be a DTensor: {refusal.reason}")


def _strategy(rule: Rule | Callable[[Mapping[str, Any]], Rule], schema: OpSchema) -> OpStrategy:
    """All placements of inputs with which each rank's call gives its part of the results."""
    arguments = _arguments(schema)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, OpStrategy)}
    rule = rule if isinstance(rule, Rule) else rule(arguments)
    options = [sharding.whole(len(tensors), len(rule.outputs)), *sharding.cuts(rule, arguments)]
    mesh = schema.get_mesh_from_args()
    given = [value.strategies[0].output_spec for value in tensors.values()]
    found = []
    for choice in itertools.product(options, repeat=mesh.ndim):
        inputs = [
            DTensorSpec(mesh, _placements(choice, "inputs", i), tensor_meta=spec.tensor_meta)
            for i, spec in enumerate(given)
        ]
        as_given = all(spec.placements == wanted.placements for spec, wanted in zip(given, inputs, strict=True))
        if all(_fits(cut, choice, mesh.shape, as_given) for cut in set(choice)):
            outputs = tuple(DTensorSpec(mesh, _placements(choice, "outputs", i)) for i in range(len(rule.outputs)))
            costs = [generate_redistribute_costs(*pair) for pair in zip(tensors.values(), inputs, strict=True)]
            found.append(OpSpec(outputs if len(outputs) > 1 else outputs[0], inputs, costs))
    _log_straddling(schema, options[1:], dict(zip(tensors, given, strict=True)))
    return OpStrategy(found)


def _arguments(schema: OpSchema) -> dict[str, Any]:
    """All arguments by name, with defaults."""
    given = dict(zip((argument.name for argument in schema.op._schema.arguments), schema.args_schema, strict=False))
    defaults = {argument.name: argument.default_value for argument in schema.op._schema.arguments}
    return {**defaults, **given, **schema.kwargs_schema}


def _placements(choice: Sequence[Cut], side: str, index: int) -> tuple[Placement, ...]:
    return tuple(_placement(getattr(cut, side)[index]) for cut in choice)


def _placement(placement: sharding.Placement) -> Placement:
    if placement is None:
        return Replicate()
    return Partial(placement) if isinstance(placement, str) else Shard(placement)


def _fits(cut: Cut, choice: Sequence[Cut], sizes: Sequence[int], as_given: bool) -> bool:
    """Whether the parts of an axis hold whole blocks; and no rank nothing, unless the tensors lie so already."""
    parts = [size for each, size in zip(choice, sizes, strict=True) if each.axis == cut.axis]
    if not cut.axis:
        return True
    enough = 1
    for part in parts:
        enough *= part
    return (as_given or bool(cut.size >= enough)) and cut.is_whole(parts)


def _log_straddling(schema: OpSchema, options: Sequence[Cut], given: Mapping[str, DTensorSpec]) -> None:
    """Says which tensors are moved because a block lies on two ranks; PyTorch asks once for a kind of call."""
    for i, (name, spec) in enumerate(given.items()):
        for dim in {place.dim for place in spec.placements if isinstance(place, Shard)}:
            parts = [spec.mesh.size(m) for m, place in enumerate(spec.placements) if place.is_shard(dim)]
            cut = next((cut for cut in options if cut.inputs[i] == dim), None)
            if max(parts) > 1 and (cut is None or not cut.is_whole(parts)):
                _LOG.warning(
                    "%s: %s %s is sharded along dimension %d over %s ranks, and blocks along it would lie on two of "
                    "them; PyTorch moves the tensor first",
                    schema.op._schema.name, name, tuple(spec.shape), dim, "x".join(map(str, parts)),
                )  # fmt: skip
