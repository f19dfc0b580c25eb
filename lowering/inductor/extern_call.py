"""Inductor's lowering of fp8fn's ops: one node for all results, with the layouts found by tracing.

For an unknown op Inductor runs the fake implementation again, makes a node for the call and for each result, and checks
the schema for mutated arguments. fp8fn's ops mutate nothing, and their results have the traced layouts if their inputs
have them. Skipping these steps compiles the ops in a fraction of the time. If an input has another layout, or if
Inductor does not generate a Python wrapper, its default lowering is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fp8fn.meta.registry import OPS

# Types of devices where launches are kept.
_WITH_SITES = {"cuda"}


@cache
def install() -> None:
    """Registers the lowering for all ops with kernels."""
    from torch._inductor import lowering

    for name, op in OPS.items():
        if op.kernel is not None:
            overload = getattr(torch.ops.fp8fn, name).default
            lowering.needs_realized_inputs.add(overload)
            lowering.lowerings[overload] = _lowering(overload)
            # A graph that plain Inductor compiled before has left a constraint, which copies the inputs.
            lowering._maybe_layout_constraints.pop(overload, None)


def _lowering(overload: Any) -> Callable[..., Any]:
    def lowering(*args: Any, **kwargs: Any) -> Any:
        made = _call(overload, args, kwargs) if _is_plain() else None
        return _fallback(overload, args, kwargs) if made is None else made

    return lowering


def _is_plain() -> bool:
    """Whether Inductor generates a Python wrapper without additions to a call."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    other = V.graph.cpp_wrapper or V.graph.aot_mode or config.fx_wrapper
    return not (other or config.generate_intermediate_hooks or config.assume_unaligned_fallback_output)


def _fallback(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inductor's default lowering, with the traced layouts of the inputs where they are recorded."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V
    from torch.fx.operator_schemas import normalize_function

    traced = V.graph.current_node.meta.get("eager_input_vals")
    if traced is not None:
        wanted, given = normalize_function(overload, *traced), normalize_function(overload, args, kwargs)
        assert wanted is not None
        assert given is not None
        args, kwargs = lowering.constrain_to_fake_tensors(*given, *wanted)
    return lowering.fallback_handler(overload, add_to_fallback_set=False)(*args, **kwargs)


def _call(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a call; None if their layouts may differ from the graph's, or if the call is not supported here.

    Calls with a number that is known only at run time, or with a tensor as keyword argument, are not supported.
    """
    from torch._inductor import ir
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    node: Node = V.graph.current_node
    traced = node.meta.get("eager_input_vals", (node.args, node.kwargs))
    if "unbacked_bindings" in node.meta or len(traced[0]) != len(args) or traced[1].keys() != kwargs.keys():
        return None
    inputs: list[Any] = []
    spelled: list[str | None] = []
    sources, before = (*node.args, *node.kwargs.values()), (*traced[0], *(traced[1][name] for name in kwargs))
    for place, arg in enumerate((*args, *kwargs.values())):
        if not isinstance(arg, ir.IRNode):
            text = _spelled(arg)
            if text is None:
                return None
            spelled.append(text if place < len(args) else f"{[*kwargs][place - len(args)]}={text}")
            continue
        if place >= len(args):
            return None
        strides = sources[place].meta["val"].stride()  # type: ignore[union-attr]
        wanted = [*convert_shape_to_inductor(strides)]
        if isinstance(before[place], Tensor):
            if before[place].stride() != strides:
                return None
            if not _lies(arg, wanted):
                arg = ir.ExternKernel.require_exact_strides(arg, strides)
        if not _lies(arg, wanted):
            arg = ir.ExternKernel.realize_input(arg)
            if ir.is_storage_and_layout(arg):
                ir.as_storage_and_layout(arg, freeze=True)
            if [*arg.get_stride()] != wanted:
                return None
        inputs.append(arg)
        spelled.append(None)
    return _maker()(overload, inputs, spelled, node.meta["val"])


def _lies(arg: Any, strides: list[Any]) -> bool:
    """Whether a tensor is a buffer, or part of one, whose strides are fixed to these."""
    from torch._inductor import ir

    while isinstance(arg, ir.MutableBox):
        arg = arg.data
    if not isinstance(arg, ir.ReinterpretView | ir.InputBuffer | ir.ExternKernel):
        return False
    return type(arg.layout) is ir.FixedLayout and [*arg.layout.stride] == strides


def _spelled(arg: Any) -> str | None:
    """The Python literal of a constant, or None if it is not known before the graph runs."""
    if isinstance(arg, list | tuple):
        return repr([*arg]) if all(type(item) is int for item in arg) else None
    return repr(arg) if arg is None or type(arg) in (bool, int, float, str, torch.dtype) else None


def _is_constant(call: Any) -> bool:
    """Whether a call on a GPU has tensors of the same sizes and strides each time that the graph runs."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    # The code of a graph within a graph shares the module, where the names of its buffers are taken.
    if type(V.graph) is not GraphLowering or call.results[0].get_device().type not in _WITH_SITES:
        return False
    results = [result for result in call.results if not isinstance(result.layout, ir.MultiOutputLayout)]
    sizes = (size for tensor in (*call.inputs, *results) for size in (*tensor.get_size(), *tensor.get_stride()))
    return all(isinstance(size, int) or size.is_Integer for size in sizes)


@cache
def _maker() -> Callable[..., Any]:
    """The function that makes a call's nodes; their classes are defined here, since importing Inductor is slow."""
    from torch._inductor import ir
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    class Result(ir.MultiOutput):
        """One of several results: a buffer without an operation of its own."""

        def __init__(self, layout: Any, call: Any, place: int) -> None:
            ir.ExternKernel.__init__(self, None, layout, [call], ())
            self.name = V.graph.register_buffer(self)
            self.call, self.indices = call, [(tuple, place)]

        def get_defining_op(self) -> Any:
            return self.call

    class Call(ir.ExternKernelAlloc):
        """`out, … = op(…)`; `spelled` has the literals of the constant arguments."""

        def __init__(self, overload: Any, layout: Any, inputs: Sequence[Any], spelled: Sequence[str | None]) -> None:
            super().__init__(layout, inputs, python_kernel_name=f"torch.ops.{overload}")
            self.op_overload, self.spelled = overload, spelled
            self.results: list[Any] = [self]

        def get_outputs(self) -> list[Any]:
            return self.results

        def get_read_writes(self) -> Any:
            return ir.InputsKernel.get_read_writes(self)

        def codegen(self, wrapper: Any) -> None:
            self.codegen_comment(wrapper)
            given: Iterator[Any] = iter(self.inputs)
            args = [next(given).codegen_reference() if text is None else text for text in self.spelled]
            used = [result for result in self.results if result.get_name() not in V.graph.removed_buffers]
            names = [result.get_name() if result in used else "_" for result in self.results]
            called = f"{self.get_kernel_name()}({', '.join(args)})"
            if _is_constant(self):
                called = self._at_a_site(
                    wrapper, [arg for arg, text in zip(args, self.spelled, strict=True) if text is None]
                )
            wrapper.writeline(f"{', '.join(names)} = {called}")
            if "_" in names:
                wrapper.writeline("del _")
            for result in used:
                result.codegen_size_asserts(wrapper)

        def _at_a_site(self, wrapper: Any, tensors: Sequence[str]) -> str:
            """The call by a `CallSite` of this place, which the module of the graph's code has."""
            names = iter(f"x{number}" for number in range(len(tensors)))
            given = [next(names) if text is None else text for text in self.spelled]
            parameters = ", ".join(f"x{number}" for number in range(len(tensors)))
            site = f"site_{self.get_name()}"
            wrapper.add_import_once("from fp8fn.meta.call_site import CallSite")
            op = f"lambda {parameters}: {self.get_kernel_name()}({', '.join(given)})"
            wrapper.header.writeline(f"{site} = CallSite({op})")
            return f"{site}({', '.join(tensors)})"

    def layout(value: Tensor) -> Any:
        size, stride = map(convert_shape_to_inductor, (value.size(), value.stride()))
        return ir.FixedLayout(value.device, value.dtype, size, stride)

    def make(overload: Any, inputs: Sequence[Any], spelled: Sequence[str | None], value: Any) -> Any:
        whole = layout(value) if isinstance(value, Tensor) else ir.MultiOutputLayout(device=value[0].device)
        call = Call(overload, whole, inputs, spelled)
        if not isinstance(value, Tensor):
            call.results = [Result(layout(each), call, place) for place, each in enumerate(value)]
        if any(map(ir.is_unaligned, inputs)):  # as Inductor does for every op
            V.graph.unaligned_buffers.update(result.get_name() for result in call.results)
        boxes = tuple(map(ir.TensorBox.create, call.results))
        return boxes[0] if isinstance(value, Tensor) else boxes

    return make
