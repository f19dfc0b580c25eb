"""Whether a tensor has values to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.torch_private.core import dispatch_depth, is_functorch_wrapped_tensor


def can_be_read(tensor: Any) -> bool:
    """Whether a tensor has values, now: code that looks at them also runs while vmap, grad or torch.compile do."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(tensor)
        and not dispatch_depth()
    )
