"""Named ranges around launches, for Nsight Systems and `torch.profiler`: on where `FP8FN_NVTX=1` is set on import."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.profiler import record_function

from fp8fn.ops.cuda.runtime.call_cache import record

ENABLED: Final = os.environ.get("FP8FN_NVTX", "0") not in ("", "0")


@dataclass(frozen=True, eq=False)
class Named:
    """A kept call inside of a range; recorded calls are joined without their names, so that this one is not recorded.

    Inside of a CUDA graph the range is that of the capture: a replay starts no Python.
    """

    call: Callable[..., Any]
    title: str

    def __call__(self, *tensors: Any) -> Any:
        with record(), record_function(self.title), _nvtx(self.title):
            return self.call(*tensors)


def _nvtx(title: str) -> AbstractContextManager[Any]:
    return torch.cuda.nvtx.range("{}", title) if torch.cuda.is_available() else nullcontext()
