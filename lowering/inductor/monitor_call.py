"""Inductor's lowering of `fp8fn::monitor`: a call that the generated code skips while its row is not due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch

from fp8fn.lowering.inductor.extern_call import _is_plain

_IMPORT: Final = "from fp8fn.ops.monitor import PENDING as fp8fn_pending"


@cache
def install() -> None:
    """Registers the lowering."""
    from torch._inductor import lowering

    overload = torch.ops.fp8fn.monitor.default
    lowering.needs_realized_inputs.add(overload)
    lowering.lowerings[overload] = _lowering


def _lowering(
    data: Any, scale: Any, block: Sequence[int], inputs: Sequence[Any], source: str, rows: Sequence[int],
    always: bool = False,
) -> None:  # fmt: skip
    from torch._inductor import lowering

    args = (data, scale, block, inputs, source, rows, always)
    if not _is_plain():
        overload = torch.ops.fp8fn.monitor.default
        lowering.fallback_handler(overload, add_to_fallback_set=False)(*args)
        return
    _maker()([data, scale, *inputs], args)


@cache
def _maker() -> Callable[[Sequence[Any], tuple[Any, ...]], None]:
    """The function that makes a call's node; its class is defined here, since importing Inductor is slow."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class MonitorCall(ir.ExternKernel):
        """`if row in fp8fn_pending: op(…)`."""

        def __init__(self, tensors: Sequence[Any], args: tuple[Any, ...]) -> None:
            realized = [self.realize_input(tensor) for tensor in tensors]
            super().__init__(None, ir.NoneLayout(device=tensors[0].get_device()), realized, ())
            self.args = args
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def should_allocate(self) -> bool:
            return False

        def has_side_effects(self) -> bool:
            return True

        def codegen(self, wrapper: Any) -> None:
            realized: Sequence[Any] = self.inputs
            data, scale, *inputs = (tensor.codegen_reference() for tensor in realized)
            _, _, block, _, source, rows, always = self.args
            call = (
                f"torch.ops.fp8fn.monitor.default({data}, {scale}, {[*block]}, [{', '.join(inputs)}], "
                f"{source!r}, {[*rows]}, {always})"
            )
            if always:
                wrapper.writeline(call)
                return
            wrapper.add_import_once(_IMPORT)
            wrapper.writeline(f"if {rows[0]} in fp8fn_pending: {call}")

    def make(tensors: Sequence[Any], args: tuple[Any, ...]) -> None:
        MonitorCall(tensors, args)

    return make
