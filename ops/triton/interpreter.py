"""Triton's interpreter on CPU tensors in an ordinary process, with the casts and products of the hardware.

`TRITON_INTERPRET=1` turns every kernel of a process into an interpreted one, for ever. Here one kernel is interpreted
for one call, and everything that was replaced is put back, so that the same kernel also compiles before and after.
Corrected on the way (Triton 3.6 to 3.9): float32 to FP8 loses the carry and truncates subnormals, float32 to bfloat16
truncates, a product of bfloat16 multiplies raw bits, the fnuz types and products with scales are missing, and numpy 2.4
takes no scalar as an index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401 - while `static_print` is `print`, Python 3.10 cannot import it
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import JITFunction

_TORCH_TYPES: Final = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FNUZ_TYPES: Final = {"fp8e4b8": tl.float8e4b8, "fp8e5b16": tl.float8e5b16}

# The replacements are of module attributes, so one interpretation at a time.
_LOCK: Final = threading.RLock()


def interpret(kernel: Any, grid: tuple[int, int, int], args: Mapping[str, Any]) -> None:
    """Run `kernel` on every point of `grid`; tensors among `args` lie on the CPU and are written in place."""
    with interpreting(), np.errstate(all="ignore"):
        triton_interpreter.InterpretedFunction(kernel.fn).run(grid=grid, warmup=False, **args)


@contextmanager
def interpreting() -> Iterator[None]:
    """While open, a `@triton.jit` function can be called as a Python function on the interpreter's tensors."""
    with _LOCK:
        undo: list[Callable[[], None]] = []

        def replace(owner: Any, name: str, value: Any) -> None:
            missing = name not in vars(owner)
            original = getattr(owner, name, None)
            undo.append(lambda: delattr(owner, name) if missing else setattr(owner, name, original))
            setattr(owner, name, value)

        patch_language = triton_interpreter._patch_lang_core

        def patch_language_and_types(language: Any, scope: Any) -> None:
            patch_language(language, scope)
            to_ir = language.dtype.to_ir
            scope.set_attr(
                language.dtype, "to_ir", lambda self, builder: _FNUZ_TYPES.get(self.name) or to_ir(self, builder)
            )

        patch_tensor = triton_interpreter._patch_lang_tensor

        def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        multiply = triton_interpreter.InterpreterBuilder.create_dot
        replace(triton_interpreter, "_convert_float", _convert_float)
        replace(triton_interpreter, "_patch_lang_core", patch_language_and_types)
        replace(triton_interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        replace(
            triton_interpreter.InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *rest: multiply(self, _widen(a), _widen(b), *rest),
        )
        replace(TritonSemantic, "dot_scaled", _dot_scaled)
        replace(JITFunction, "__call__", _call_device_function)
        # Both modules at once: the kernel sees `triton.language`, Triton's own device functions `triton.language.core`.
        scope = triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        try:
            yield
        finally:
            scope.restore()
            for action in reversed(undo):
                action()


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return triton_interpreter.InterpretedFunction(self.fn).rewrite()(*args, **kwargs)


def _convert_float(source: Any, source_type: Any, target_type: Any, rounding_mode: Any) -> Any:
    """The bits of `source` in another floating type: to nearest even, and saturating where the target is FP8."""
    target = _TORCH_TYPES[target_type]
    values = _to_tensor(source, source_type).to(torch.float32)
    if target.itemsize == 1:
        largest = torch.finfo(target).max
        values = torch.where(values.isnan(), values, values.clamp(-largest, largest))
    bits = values.to(target).view(_INTEGERS[target.itemsize]).numpy()
    return bits.view(f"uint{8 * target.itemsize}").reshape(source.shape)


def _to_tensor(source: Any, source_type: Any) -> torch.Tensor:
    bits = np.ascontiguousarray(source).reshape(-1)
    signed = bits.view("uint8" if bits.dtype.itemsize == 1 else f"int{8 * bits.dtype.itemsize}")
    return torch.from_numpy(signed).view(_TORCH_TYPES[source_type])


def _dot_scaled(self: Any, a: Any, a_scale: Any, _a: Any, b: Any, b_scale: Any, _b: Any, acc: Any, *_: Any) -> Any:
    """`acc (M, N) + (a (M, K) * a_scale) @ (b (K, N) * b_scaleᵀ)` in float32, of FP8 and e8m0 bytes for 32 along K."""
    left, right = _widen(a.handle).data, _widen(b.handle).data
    left_scale, right_scale = (
        torch.from_numpy(np.ascontiguousarray(scale.handle.data)).view(torch.float8_e8m0fnu).float().numpy()
        for scale in (a_scale, b_scale)
    )
    product = (left * left_scale.repeat(32, 1)) @ (right * right_scale.repeat(32, 1).T)
    return self.tensor(triton_interpreter.TensorHandle(acc.handle.data + product, tl.float32), acc.type)


def _widen(operand: Any) -> Any:
    """An operand of a product in float32, which holds every 8- and 16-bit value exactly."""
    kind = operand.dtype.scalar
    if kind not in _TORCH_TYPES or kind == tl.float32:
        return operand
    values = _to_tensor(operand.data, kind).to(torch.float32).numpy().reshape(operand.data.shape)
    return triton_interpreter.TensorHandle(values, tl.float32)
