"""A call of an op in Inductor's code, which after its first time starts the kernels without a search for them.

A compiled graph calls each op with tensors of the same sizes, strides and types, so that the dispatcher, the checks and
the search for the kept launch find the same each time. They take the host twice as long as the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from fp8fn.meta import bypass
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Program, recorded

# A kernel may load 16 bytes at once; one was chosen for addresses that are multiples of that, as the first call's were.
_ALIGNMENT: Final = 16


class CallSite:
    """A place in a graph where an op is called.

    The first call that nothing watches is written down. Where it was nothing but kept launches, these serve from then
    on: on aligned tensors, outside of a CUDA graph's capture, and while nothing watches.

    Args:
        op: the op as a function of its tensors, all on one GPU.
    """

    def __init__(self, op: Callable[..., Tensor | Sequence[Tensor]]) -> None:
        self._op = op
        self._program: Program | None = None
        self._unsettled = True
        self._single = False

    def __call__(self, *tensors: Tensor) -> Tensor | Sequence[Tensor | None]:
        """The op's results."""
        if self._program is None:
            return self._first(tensors) if self._unsettled else self._op(*tensors)
        if not _is_direct(tensors):
            return self._op(*tensors)
        results = self._program(*tensors)
        return results[0] if self._single else results  # type: ignore[return-value]

    def _first(self, tensors: Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
        if not _is_direct(tensors) or not bypass.nothing_watches(*tensors):
            return self._op(*tensors)
        out: Tensor | Sequence[Tensor] = ()

        def run() -> Sequence[Tensor]:
            nonlocal out
            out = self._op(*tensors)
            return (out,) if isinstance(out, Tensor) else out

        _, program = recorded(tensors, run)
        self._single = isinstance(out, Tensor)
        self._program, self._unsettled = program, False
        return out


def _is_direct(tensors: Sequence[Tensor]) -> bool:
    if bypass.is_watched() or graph_capture.capturing():
        return False
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % _ALIGNMENT == 0
